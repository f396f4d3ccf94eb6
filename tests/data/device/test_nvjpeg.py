"""Tests of decoding with nvJPEG against Pillow."""

import ctypes
import io
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pictures import CPU, encode, tensor
from PIL import Image

from vil.data.device import nvjpeg
from vil.data.device.nvjpeg import DecodingError, JpegDecoder


def picture(seed, mode, size):
    noise = np.random.default_rng(seed).integers(0, 256, (size[1] // 9 + 1, size[0] // 9 + 1, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).convert(mode)


def bytes_of(content):
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def by_pillow(content):
    return tensor(Image.open(io.BytesIO(content)).convert("RGB")).int()


@pytest.mark.gpu
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_equal_pillows_up_to_rounding(mode, subsampling):
    options = {"subsampling": subsampling} if mode == "RGB" else {}
    sizes = [(500, 375), (17, 33), (8, 8), (301, 299)]
    files = [encode(picture(i, mode, size), **options) for i, size in enumerate(sizes)]
    decode = JpegDecoder(torch.device("cuda", 0))
    batches = 10 * [files, files[:2], files[1:]]  # decode batches of changing sizes without synchronizing in between
    contents = [[bytes_of(file) for file in batch] for batch in batches]
    decoded = [decode(batch) for batch in contents]
    for batch, images in zip(batches, decoded, strict=True):
        for image, file in zip(images, batch, strict=True):
            difference = (image.cpu().int() - by_pillow(file)).abs()
            assert difference.max() <= 1
            assert difference.float().mean() < 0.05


@pytest.mark.gpu
def test_decoding_waits_for_queued_kernels_that_read_the_memory():
    device, file, size = torch.device("cuda", 0), bytes_of(encode(picture(0, "RGB", (1200, 900)))), 3 * 1200 * 900
    decode = JpegDecoder(device)
    with torch.cuda.stream(torch.cuda.Stream()):  # unlike the default stream, this stream waits for no other
        decode([file])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.full((size,), 7, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * 10**8)  # keep the GPU busy for about 0.1 seconds
        read, memory = before.sum(), before.data_ptr()
        del before
        (image,) = decode([file])
        assert image.data_ptr() == memory
        assert read.item() == 7 * size


@pytest.mark.gpu
def test_invalid_and_too_large_files_are_rejected(monkeypatch):
    decode, whole = JpegDecoder(torch.device("cuda", 0)), encode(picture(0, "RGB", (64, 48)))
    with pytest.raises(DecodingError, match="nvJPEG failed"):
        decode([bytes_of(whole), bytes_of(b"no picture at all" * 20)])
    monkeypatch.setattr(nvjpeg, "MOST_PIXELS", 64 * 48 - 1)
    with pytest.raises(DecodingError, match="between 1 and 3071"):
        decode([bytes_of(whole)])
    monkeypatch.undo()
    (image,) = decode([bytes_of(whole)])
    assert image.shape == (3, 48, 64)


def test_memory_is_allocated_only_for_sizes_within_the_limit(monkeypatch):
    """Memory is allocated only if the size that nvJPEG reports is within the limit. PIL may report another size."""
    sizes, taken = iter([(48, 64), (2**12, 2**12 + 1), (0, 64)]), []

    def size_of(handle, pointer, length, components, subsampling, widths, heights):
        heights[0], widths[0] = next(sizes)
        return 0

    def empty(count, **_):
        taken.append(count)
        raise MemoryError

    decode = JpegDecoder.__new__(JpegDecoder)
    decode.device, decode.handle, decode.lock = torch.device("cpu"), None, threading.Lock()
    monkeypatch.setattr(nvjpeg, "_quick_library", lambda: SimpleNamespace(nvjpegGetImageInfo=size_of))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "empty", empty)
    file = bytes_of(encode(picture(0, "RGB", (64, 48))))
    with pytest.raises(MemoryError):
        decode([file])
    for _ in range(2):
        with pytest.raises(DecodingError, match="between 1 and 16777216"):
            decode([file])
    assert taken == [3 * 48 * 64]


@pytest.fixture
def library(monkeypatch):
    """Replace nvJPEG and the GPU by stubs that record calls and return configurable status codes."""
    asked, answers, destinations = [], {}, []

    def create(backend, *_):
        return answers.get(asked.append(backend) or backend, 0)

    def initialize(handle, state, count, *_):
        return answers.get(asked.append(count) or count, 0)

    def size_of(handle, pointer, length, components, subsampling, widths, heights):
        heights[0], widths[0] = 8 + length, 5
        return 0

    def decode(handle, state, pointers, lengths, images, stream):
        destinations[:] = np.frombuffer(ctypes.string_at(images, 2 * nvjpeg.DESTINATION.itemsize), nvjpeg.DESTINATION)
        return 0

    calls = dict(nvjpegCreateEx=create, nvjpegDecodeBatchedInitialize=initialize, nvjpegJpegStateCreate=lambda *_: 0)
    monkeypatch.setattr(nvjpeg, "_library", lambda: SimpleNamespace(nvjpegDecodeBatched=decode, **calls))
    monkeypatch.setattr(nvjpeg, "_quick_library", lambda: SimpleNamespace(nvjpegGetImageInfo=size_of))
    queue = SimpleNamespace(synchronize=lambda: None, record=lambda: None, cuda_stream=0)
    faked = dict(device=nullcontext, init=lambda: None, Event=lambda **_: queue, current_stream=lambda: queue)
    for name, value in faked.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return asked, answers, destinations


@pytest.mark.parametrize(
    ("answers", "asked", "error"),
    [
        ({}, [3], None), ({3: 7}, [3, 2], None), ({3: 7, 2: 9}, [3, 2], "nvJPEG failed: implementation not supported"),
        ({3: 5}, [3], "nvJPEG failed: allocator failure"), ({3: 99}, [3], "status 99"),
    ],
    ids=str,
)  # fmt: skip
def test_a_gpu_without_a_hardware_decoder_decodes_on_its_cores(library, answers, asked, error):
    library[1].update(answers)
    with pytest.raises(DecodingError, match=error) if error else nullcontext():
        JpegDecoder(CPU)
    assert library[0] == asked


def test_the_decoder_is_reinitialized_after_an_allocation_failure(library):
    decode, file = JpegDecoder(CPU), bytes_of(b"file")
    library[1][3] = 5
    for _ in range(2):
        decode([file] * 2)
    with pytest.raises(DecodingError, match="allocator failure"):
        decode([file] * 3)
    decode([file] * 2)
    assert library[0] == [nvjpeg.HARDWARE, 2, 3, 2]


def test_each_colour_plane_is_written_to_its_own_memory(library):
    images = JpegDecoder(CPU)([bytes_of(b"file"), bytes_of(b"another")])
    assert [image.shape for image in images] == [(3, 12, 5), (3, 15, 5)]
    for image, destination in zip(images, library[2], strict=True):
        assert destination["channels"].tolist() == [*(plane.data_ptr() for plane in image), 0]
        assert destination["pitches"].tolist() == [5, 5, 5, 0]


def test_a_missing_library_is_reported_with_the_remedy(monkeypatch):
    from cuda import pathfinder

    def missing(name):
        raise pathfinder.DynamicLibNotFoundError(f"no folder has {name}:\n" + "/usr/lib " * 99)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    for cached in (nvjpeg._path, nvjpeg._library, nvjpeg._quick_library):
        cached.cache_clear()
    with pytest.raises(
        DecodingError, match=r"nvJPEG is missing \(no folder has nvjpeg: .{78}\): pip install 'cuda-toolkit\[nvjpeg\]'"
    ):
        JpegDecoder(torch.device("cuda", 0))
