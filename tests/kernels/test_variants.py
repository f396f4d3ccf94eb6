"""Tests that kernel variants and segment lengths are valid for many sizes, and as intended for typical inputs."""

import itertools

import emulator
import pytest
import torch

from vil.kernels import backends
from vil.kernels.cuda import hardware
from vil.kernels.cuda.elements import vector_width
from vil.kernels.scan import cuda_scan, heuristics
from vil.kernels.scan.heuristics import FORWARD_MMA, Backward, ForwardMma, ForwardSimt, Schedule

H200, A100 = 132, 108  # number of multiprocessors of each GPU
RECURRENCES = pytest.mark.parametrize("recurrence", backends.RECURRENCES)


CASES = list(itertools.product((1, 16, 256), (1, 40, 768), (1, 64, 65, 1025, 20000), (4, 16, 64), (2, 4)))


@RECURRENCES
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_choice_covers_the_sequence_and_fits_a_cta(kind, recurrence):
    for sequences, D, L, N, itemsize in CASES:
        for multiprocessors, vectors, limit in (
            (H200, True, 227 * 1024),
            (A100, False, 163 * 1024),
            (1, True, 99 * 1024),
        ):
            arguments = sequences, D, L, N, itemsize, multiprocessors, vectors, limit
            variant, segment_chunks = heuristics.choose(kind, recurrence, *arguments)
            assert 1 <= segment_chunks <= -(-L // 64)
            assert isinstance(variant, Backward) == (kind == "backward")
            if isinstance(variant, ForwardMma):
                assert (recurrence, N, itemsize, vectors) == ("longhorn", 16, 2, True)
                assert variant.shared_bytes() <= limit


@pytest.mark.parametrize("N", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_ctas_of_backward_fit_a_multiprocessor_and_use_it(N, itemsize):
    for variant in heuristics.backward_variants("longhorn", N) + heuristics.backward_variants("selective", N):
        for channels in {1, variant.lane_channels(N)}:
            warps, shared_bytes, resident = variant.cta(N, itemsize, channels)
            assert warps in (1, 2, 4)
            assert shared_bytes <= 99 * 1024
            # A CTA has fewer than four warps only if shared memory requires it.
            of_keys = 4 * 64 * (2 * N + 1)
            assert warps == 4 or of_keys + 2 * (shared_bytes - of_keys) > 99 * 1024
            assert 1024 <= resident * (shared_bytes + 1024) <= 228 * 1024
            # Registers permit 12 warps per multiprocessor for 16-bit inputs with 16 or 32 states, otherwise 8 warps.
            most = (3 if itemsize == 2 and N in (16, 32) else 2) * 4 // warps
            assert resident == most or (resident + 1) * (shared_bytes + 1024) > 228 * 1024


def test_large_batches_are_not_divided_into_segments_but_one_long_sequence_is(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, H200)
    for recurrence in backends.RECURRENCES:
        for kind in ("forward", "backward"):
            for (B, L), cut in (((128, 197), False), ((1, 6085), True)):
                x = torch.empty(2, B, L, 768, device="meta", dtype=torch.bfloat16)
                assert (cuda_scan._choose(kind, recurrence, x, 16, vectors=True).segments(L) > 1) == cut


def test_the_tensor_cores_scan_needs_vectors_and_the_smaller_one_less_shared_memory(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, H200)
    x = torch.empty(2, 8, 6085, 768, device="meta", dtype=torch.bfloat16)
    assert isinstance(cuda_scan._choose("forward", "longhorn", x, 16, vectors=False).variant, ForwardSimt)
    assert cuda_scan._choose("forward", "longhorn", x, 16, vectors=True).variant == FORWARD_MMA[0]
    monkeypatch.setattr(hardware, "shared_bytes", lambda device: 99 * 1024)
    assert cuda_scan._choose("forward", "longhorn", x, 16, vectors=True).variant == FORWARD_MMA[1]


def test_the_step_is_projected_by_the_scan_of_long_sequences_and_of_few(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, H200)

    def projects(B, L, D=768, recurrence="longhorn", R=24, N=16, dtype=torch.bfloat16):
        x = torch.empty(2, B, L, D, device="meta", dtype=dtype)
        return cuda_scan.forward_schedule(recurrence, x, N, R).projects_step(L, R)

    assert projects(8, 6085)
    assert projects(8, 6085, R=48)
    others = dict(R=12), dict(D=764), dict(recurrence="selective"), dict(N=32), dict(dtype=torch.float32)
    assert not any(projects(8, 6085, **other) for other in others)
    assert not projects(128, 197)
    assert projects(1, 197)  # scan and projection together are faster, although the scan becomes slower
    # A scan that divides sequences into segments does not fuse the projection of the step.
    monkeypatch.setattr(heuristics, "choose", lambda *args: Schedule(FORWARD_MMA[0], 4))
    assert [projects(1, L) for L in (256, 257)] == [True, False]


@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("limit", [4, 8])
def test_vectors_are_as_wide_as_every_row_of_every_tensor_allows(limit, dimensions):
    g = torch.Generator().manual_seed(0)

    def view(multiple):
        """Return a view whose row strides and row length are multiples of `multiple`, and so are most offsets."""
        start, *strides, n = (int(i) * multiple for i in torch.randint(1, 5, (5,), generator=g))
        sizes = (2, 3) if dimensions == 3 else (2, 2, 3)
        start += int(torch.randint(4, (), generator=g) == 0)
        return torch.zeros(4096, dtype=torch.bfloat16).as_strided((*sizes, n), (*strides[: len(sizes)], 1), start)

    seen = set()
    for i in range(200):
        tensors = [view(2 ** (i % 4)) for _ in range(2)]
        rows = [t[place] for t in tensors for place in itertools.product(*map(range, t.shape[:-1]))]
        starts = [row.data_ptr() // 2 for row in rows] + [len(row) for row in rows]
        widest = next(w for w in (8, 4, 2, 1) if w <= limit and all(start % w == 0 for start in starts))
        assert vector_width(limit, *tensors) == widest
        seen.add(widest)
    assert seen == {w for w in (1, 2, 4, 8) if w <= limit}
