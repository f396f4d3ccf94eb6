"""JPEG files decoded by a GPU: NVIDIA's nvJPEG, whose decoders are hardware of their own on data-centre GPUs.

Called here and not through torchvision, since it decides on which stream nvJPEG works: one whose few small kernels do
not wait behind every kernel of the model that trains meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HARDWARE, GPU_HYBRID = 3, 2  # nvjpegBackend_t
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
    """Decodes on one GPU, for one thread at a time.

    Raises:
        DecodingError: There is no nvJPEG for it; the message says what is missing.
    """

    def __init__(self, device: torch.device):
        self.device, self.library = device, _library()
        self.handle, self.state = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # begins CUDA's context, if nobody has
            status = self._create(HARDWARE)
            if status == STATUS.index("architecture mismatch"):
                status = self._create(GPU_HYBRID)
            _check(status)
            _check(self.library.nvjpegJpegStateCreate(self.handle, ctypes.byref(self.state)))
        self.batch_size = 0

    def _create(self, backend: int) -> int:
        return self.library.nvjpegCreateEx(backend, None, None, 0, ctypes.byref(self.handle))

    def __call__(self, files: Sequence[Tensor], sizes_B2: np.ndarray) -> list[Tensor]:
        """Images (3, h, w) uint8 RGB, on the GPU when the current stream gets there.

        Args:
            files: Bytes on the CPU, which stay until then.
            sizes_B2: Height and width of each image.

        Raises:
            DecodingError: A file is damaged, of a kind that is not decoded here, or of another size.
        """
        pointers = np.array([file.data_ptr() for file in files], dtype=np.uint64)
        lengths = np.array([len(file) for file in files], dtype=np.uint64)
        self._check_sizes(pointers, lengths, sizes_B2)
        planes_B = sizes_B2.prod(axis=1)
        ends_B = (3 * planes_B).cumsum()
        with torch.cuda.device(self.device):
            pixels = torch.empty(int(ends_B[-1]), dtype=torch.uint8, device=self.device)
            destinations = np.zeros(len(files), DESTINATION)
            destinations["channels"][:, :3] = (
                pixels.data_ptr() + (ends_B - 3 * planes_B)[:, None] + np.arange(3) * planes_B[:, None]
            )
            destinations["pitches"][:, :3] = sizes_B2[:, 1:]
            if len(files) != self.batch_size:
                self.batch_size = 0
                _check(self.library.nvjpegDecodeBatchedInitialize(self.handle, self.state, len(files), 1, PLANAR_RGB))
                self.batch_size = len(files)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            arguments = (ctypes.c_void_p(array.ctypes.data) for array in (pointers, lengths, destinations))
            _check(self.library.nvjpegDecodeBatched(self.handle, self.state, *arguments, stream))
        images = pixels.split((3 * planes_B).tolist())
        return [image.view(3, *size) for image, size in zip(images, sizes_B2.tolist())]

    def _check_sizes(self, pointers: np.ndarray, lengths: np.ndarray, sizes_B2: np.ndarray) -> None:
        """What nvJPEG will write: of a file that says two sizes it may take the other one."""
        components, subsampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * 4)(), (ctypes.c_int * 4)()
        found = [ctypes.byref(components), ctypes.byref(subsampling), widths, heights]
        for pointer, length, size in zip(pointers.tolist(), lengths.tolist(), sizes_B2.tolist()):
            _check(_quick_library().nvjpegGetImageInfo(self.handle, pointer, length, *found))
            if [heights[0], widths[0]] != size:
                raise DecodingError(f"a file has an image of {heights[0]}x{widths[0]} pixels, not {size[0]}x{size[1]}")


def _check(status: int) -> None:
    if status:
        raise DecodingError(f"nvJPEG: {STATUS[status] if status < len(STATUS) else f'status {status}'}")


@functools.cache
def _path() -> str:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return load_nvidia_dynamic_lib("nvjpeg").abs_path
    except Exception as error:  # a missing package or library, in whatever way it is missing
        reason = " ".join(str(error).split())[:100]
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


_of_thread = threading.local()


def decoder(device: torch.device) -> Decoder:
    """This thread's for a GPU."""
    decoders = _of_thread.__dict__.setdefault("decoders", {})
    if device not in decoders:
        decoders[device] = Decoder(device)
    return decoders[device]
