"""Tests of how the Triton backend divides sequences into parallel segments."""

import pytest
import torch
from scans import SCANS, exact, longhorn_inputs, outputs_and_gradients, relative_error

from vil.kernels import longhorn_scan
from vil.kernels.scan import chunks, reference

pytest.importorskip("triton")
from vil.kernels.scan import triton_scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def error(scan, reference_scan, inputs, **options):
    def run(*tensors, **options):
        return scan(*(t.to(DEVICE) for t in tensors), backend="triton", **options).cpu()

    expected = outputs_and_gradients(reference_scan, exact(inputs), torch.float32, **options)
    actual = outputs_and_gradients(run, inputs, torch.float32, **options)
    return max(relative_error(a, e) for a, e in zip(actual, expected, strict=True))


# Sequences of three complete chunks and a partial chunk are divided into four, two or one segments.
@SCANS
@pytest.mark.parametrize(
    ("large", "segment_chunks", "reverse"), [(2**16, None, False), (2**16, 3, True), (32, None, True)]
)
def test_segments_equal_the_reference(scan, reference_scan, make_inputs, large, segment_chunks, reverse, monkeypatch):
    for module in (chunks, triton_scan):  # short chunks, because Triton's interpreter is slow
        monkeypatch.setattr(module, "CHUNK", 2)
    monkeypatch.setattr(triton_scan, "CHANNELS", large)
    monkeypatch.setattr(triton_scan, "PROGRAMS", 1)  # a single Triton program computes the gradients of all segments
    schedule = triton_scan._schedule(torch.empty(1, 2, 7, 5), 16)
    assert schedule == ((4, 1, 16) if large == 32 else (1, 4, 16))
    if segment_chunks:
        monkeypatch.setattr(triton_scan, "_schedule", lambda *_: (segment_chunks, 2, 16))
    assert error(scan, reference_scan, make_inputs(2, 7, 5, 4, torch.float32), reverse=reverse) < 1e-5


def test_a_sequence_of_two_chunks_as_long_as_on_a_gpu():
    assert error(longhorn_scan, reference.longhorn, longhorn_inputs(1, 67, 5, 4, torch.float32)) < 1e-5


@pytest.mark.parametrize("L", [1, 64, 65, 1000, 6085])
@pytest.mark.parametrize("channels", [(1, 1, 5), (2, 1, 384), (2, 8, 768), (2, 64, 384), (2, 128, 768)])
def test_sequences_are_divided_only_if_channels_do_not_fill_a_large_gpu(channels, L):
    G, B, D = channels
    segment_chunks, segments, block = triton_scan._schedule(torch.empty(G, B, L, D, device="meta"), 32)
    chunk_count, sequences = -(-L // 64), G * B * D
    assert (segments - 1) * segment_chunks < chunk_count <= segments * segment_chunks
    assert (segments > 1) == (sequences < 2**14 and chunk_count > 1)
    assert segments * sequences <= 4 * 2**16 or segments == 1
    assert block == (64 if segments * sequences >= 2**16 else 32)
