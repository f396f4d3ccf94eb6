"""JPEG decoding on a GPU with NVIDIA's nvJPEG, which uses the hardware decoders of recent data-centre GPUs.

The library is called directly instead of through torchvision because of two flags. With the flag
UPSAMPLING_WITH_INTERPOLATION, subsampled colours are interpolated as in Pillow, and pixels differ by at most 1. With
the flag HW_DECODE_NO_PIPELINE, nvJPEG does not wait for the whole GPU while it prepares its next files. While a model
trains on the same GPU, nvJPEG decodes 14,500 images/s with HW_DECODE_NO_PIPELINE, and 200 to 400 images/s without it
(research/notebooks/2026-11-pipeline.md).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...text import one_line

HARDWARE = 3  # value of nvjpegBackend_t
GPU_HYBRID = 2  # value of nvjpegBackend_t
FLAGS = {"NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE": 1, "NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION": 32}
MOST_PIXELS = 2**24  # maximum pixels of a file that nvJPEG decodes; larger files are rare
PLANAR_RGB = 3  # value of nvjpegOutputFormat_t
STATUS = (
    "success", "not initialized", "invalid parameter", "bad JPEG", "JPEG not supported", "allocator failure",
    "execution failed", "architecture mismatch", "internal error", "implementation not supported",
    "incomplete bitstream",
)  # fmt: skip
DESTINATION = np.dtype([("channels", "u8", 4), ("pitches", "u8", 4)])  # struct nvjpegImage_t


class DecodingError(RuntimeError):
    """nvJPEG is missing or reports an error, or a file has too many pixels."""


class JpegDecoder:
    """JPEG decoder that runs nvJPEG on one GPU.

    Raises:
        DecodingError: nvJPEG is missing or cannot be initialized on the GPU; the message gives the reason.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.library = _library()
        self.lock = threading.Lock()
        self.handle = ctypes.c_void_p()
        self.state = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.init()
            status = self._create(HARDWARE)
            if status == STATUS.index("architecture mismatch"):
                status = self._create(GPU_HYBRID)
            _check(status)
            _check(self.library.nvjpegJpegStateCreate(self.handle, ctypes.byref(self.state)))
        self.batch_size = 0  # batch size for which nvJPEG's state is initialized
        self.decoded = torch.cuda.Event(blocking=True)

    def _create(self, backend: int) -> int:
        """Create an nvJPEG handle for a backend, and return nvJPEG's status code."""
        return self.library.nvjpegCreateEx(backend, None, None, sum(FLAGS.values()), ctypes.byref(self.handle))

    def __call__(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Decode files to images (3, h, w) uint8 RGB on the GPU, asynchronously on the current stream.

        The call waits for the work that is already queued on the stream.

        Args:
            files: File contents as uint8 CPU tensors, which must stay alive until the decoding is done.

        Raises:
            DecodingError: A file is corrupt, too large or an unsupported type of JPEG.
        """
        pointers = np.array([file.data_ptr() for file in files], dtype=np.uint64)
        lengths = np.array([len(file) for file in files], dtype=np.uint64)
        sizes_B2 = self._sizes(pointers, lengths)
        planes_B = sizes_B2.prod(axis=1)
        ends_B = (3 * planes_B).cumsum()

        with self.lock, torch.cuda.device(self.device):
            pixels = torch.empty(int(ends_B[-1]), dtype=torch.uint8, device=self.device)
            destinations = np.zeros(len(files), DESTINATION)
            starts_B = pixels.data_ptr() + ends_B - 3 * planes_B
            destinations["channels"][:, :3] = starts_B[:, None] + np.arange(3) * planes_B[:, None]
            destinations["pitches"][:, :3] = sizes_B2[:, 1:]

            self.decoded.synchronize()  # wait until the previous call no longer uses nvJPEG's state
            # wait, because hardware decoders may ignore stream order (pytorch/vision#9606) and overwrite memory in use
            torch.cuda.current_stream().synchronize()
            self._initialize(len(files))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            arrays = (ctypes.c_void_p(array.ctypes.data) for array in (pointers, lengths, destinations))
            status = self.library.nvjpegDecodeBatched(self.handle, self.state, *arrays, stream)
            self.decoded.record()
        _check(status)

        images = pixels.split((3 * planes_B).tolist())
        return [image.view(3, *size) for image, size in zip(images, sizes_B2.tolist())]

    def _initialize(self, batch_size: int) -> None:
        """Initialize nvJPEG's state for a batch size, unless the state already has this batch size."""
        if batch_size == self.batch_size:
            return
        self.batch_size = 0  # if this initialization fails, the next call must not skip it
        _check(self.library.nvjpegDecodeBatchedInitialize(self.handle, self.state, batch_size, 1, PLANAR_RGB))
        self.batch_size = batch_size

    def _sizes(self, pointers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the heights and widths (B, 2) of the images that nvJPEG will write, from the file headers.

        Raises:
            DecodingError: A file is not a JPEG, or its number of pixels is 0 or above `MOST_PIXELS`.
        """
        components = ctypes.c_int()
        subsampling = ctypes.c_int()
        widths = (ctypes.c_int * 4)()
        heights = (ctypes.c_int * 4)()
        found = [ctypes.byref(components), ctypes.byref(subsampling), widths, heights]
        sizes_B2 = np.empty((len(pointers), 2), dtype=np.int64)
        for size, pointer, length in zip(sizes_B2, pointers.tolist(), lengths.tolist()):
            _check(_quick_library().nvjpegGetImageInfo(self.handle, pointer, length, *found))
            size[:] = heights[0], widths[0]

        if ((sizes_B2 < 1) | (sizes_B2.prod(axis=1, keepdims=True) > MOST_PIXELS)).any():
            raise DecodingError(f"number of pixels must be between 1 and {MOST_PIXELS} for nvJPEG")
        return sizes_B2


def _check(status: int) -> None:
    """Raise a DecodingError if nvJPEG returned an error status."""
    if status:
        reason = STATUS[status] if status < len(STATUS) else f"status {status}"
        raise DecodingError(f"nvJPEG failed: {reason}")


@functools.cache
def _path() -> str:
    """Return the path of the nvJPEG library."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return load_nvidia_dynamic_lib("nvjpeg").abs_path
    except Exception as error:  # a missing package or library can raise any type of exception
        reason = one_line(error, 100)
        raise DecodingError(f"nvJPEG is missing ({reason}): pip install 'cuda-toolkit[nvjpeg]'") from error


@functools.cache
def _library() -> ctypes.CDLL:
    """Load nvJPEG for calls that release the GIL."""
    return ctypes.CDLL(_path())


@functools.cache
def _quick_library() -> ctypes.PyDLL:
    """Load nvJPEG for short calls that keep the GIL.

    For microsecond calls, releasing and reacquiring the GIL costs more than the call.
    """
    library = ctypes.PyDLL(_path())
    library.nvjpegGetImageInfo.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 2,
        *[ctypes.POINTER(ctypes.c_int)] * 2,
    ]  # fmt: skip
    return library


@functools.cache
def jpeg_decoder_of(device: torch.device) -> JpegDecoder:
    """Return the nvJPEG decoder of a GPU, which is created on first use."""
    return JpegDecoder(device)
