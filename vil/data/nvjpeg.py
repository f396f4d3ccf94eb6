"""JPEG files decoded by a GPU: NVIDIA's nvJPEG, whose decoders are hardware of their own on data-centre GPUs.

Called here and not through torchvision for two flags. By one, colours of half resolution are interpolated as Pillow
does it: pixels differ by 1 at most. Without the other, nvJPEG waits for the whole GPU while it prepares its next files,
so that beside a model that trains it decodes some hundred images a second, and 14,500 with it
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

from ..text import one_line

HARDWARE, GPU_HYBRID = 3, 2  # nvjpegBackend_t
FLAGS = {"NVJPEG_FLAGS_HW_DECODE_NO_PIPELINE": 1, "NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION": 32}
MOST_PIXELS = 2**24  # of a file that is decoded here: larger ones are few
PLANAR_RGB = 3  # nvjpegOutputFormat_t
STATUS = (
    "success", "not initialized", "invalid parameter", "bad JPEG", "JPEG not supported", "allocator failure",
    "execution failed", "architecture mismatch", "internal error", "implementation not supported",
    "incomplete bitstream",
)  # fmt: skip
DESTINATION = np.dtype([("channels", "u8", 4), ("pitches", "u8", 4)])  # nvjpegImage_t


class DecodingError(RuntimeError):
    """nvJPEG is missing, or refuses a file."""


class Decoder:
    """Decodes on one GPU.

    Raises:
        DecodingError: There is no nvJPEG for it; the message says what is missing.
    """

    def __init__(self, device: torch.device):
        self.device, self.library, self.lock = device, _library(), threading.Lock()
        self.handle, self.state = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.init()
            status = self._create(HARDWARE)
            if status == STATUS.index("architecture mismatch"):
                status = self._create(GPU_HYBRID)
            _check(status)
            _check(self.library.nvjpegJpegStateCreate(self.handle, ctypes.byref(self.state)))
        self.batch_size, self.decoded = 0, torch.cuda.Event(blocking=True)

    def _create(self, backend: int) -> int:
        return self.library.nvjpegCreateEx(backend, None, None, sum(FLAGS.values()), ctypes.byref(self.handle))

    def __call__(self, files: Sequence[Tensor]) -> list[Tensor]:
        """Images (3, h, w) uint8 RGB, on the GPU when the current stream gets there; waits for what is queued on it.

        Args:
            files: Bytes on the CPU, which stay until then.

        Raises:
            DecodingError: A file is damaged, too large or of a kind that is not decoded here.
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
            self.decoded.synchronize()  # until then the state is in use
            # decoders in hardware write at once (pytorch/vision#9606), over what the stream has yet to read
            torch.cuda.current_stream().synchronize()
            if len(files) != self.batch_size:
                self.batch_size = 0
                arguments = len(files), 1, PLANAR_RGB
                _check(self.library.nvjpegDecodeBatchedInitialize(self.handle, self.state, *arguments))
                self.batch_size = len(files)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            arrays = (ctypes.c_void_p(array.ctypes.data) for array in (pointers, lengths, destinations))
            status = self.library.nvjpegDecodeBatched(self.handle, self.state, *arrays, stream)
            self.decoded.record()
        _check(status)
        images = pixels.split((3 * planes_B).tolist())
        return [image.view(3, *size) for image, size in zip(images, sizes_B2.tolist())]

    def _sizes(self, pointers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Heights and widths as nvJPEG sees them, which is what it will write."""
        components, subsampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * 4)(), (ctypes.c_int * 4)()
        found = [ctypes.byref(components), ctypes.byref(subsampling), widths, heights]
        sizes_B2 = np.empty((len(pointers), 2), dtype=np.int64)
        for size, pointer, length in zip(sizes_B2, pointers.tolist(), lengths.tolist()):
            _check(_quick_library().nvjpegGetImageInfo(self.handle, pointer, length, *found))
            size[:] = heights[0], widths[0]
        if ((sizes_B2 < 1) | (sizes_B2.prod(axis=1, keepdims=True) > MOST_PIXELS)).any():
            raise DecodingError(f"a file has more than {MOST_PIXELS} pixels or none")
        return sizes_B2


def _check(status: int) -> None:
    if status:
        raise DecodingError(f"nvJPEG: {STATUS[status] if status < len(STATUS) else f'status {status}'}")


@functools.cache
def _path() -> str:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return load_nvidia_dynamic_lib("nvjpeg").abs_path
    except Exception as error:  # a missing package or library, in whatever way it is missing
        reason = one_line(error, 100)
        raise DecodingError(f"nvJPEG is missing ({reason}): pip install 'cuda-toolkit[nvjpeg]'") from error


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(_path())


@functools.cache
def _quick_library() -> ctypes.PyDLL:
    """For calls of a microsecond: giving the interpreter's lock away, and waiting for it, would take longer."""
    library = ctypes.PyDLL(_path())
    library.nvjpegGetImageInfo.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 2,
        *[ctypes.POINTER(ctypes.c_int)] * 2,
    ]  # fmt: skip
    return library


@functools.cache
def decoder(device: torch.device) -> Decoder:
    """That of a GPU."""
    return Decoder(device)
