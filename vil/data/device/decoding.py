"""Image decoding on the device. NVIDIA GPUs decode with nvJPEG."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from ...fault_tolerance.machine_errors import MachineError
from ..sources.images import read_image
from .nvjpeg import jpeg_decoder_of


def unpack(contents: Sequence[Tensor], sizes: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Convert raw pixel bytes to images (3, h, w) uint8, given the sizes (h, w)."""
    parts = torch.cat(list(contents)).to(device).split([len(content) for content in contents])
    return [part.view(3, *size) for part, size in zip(parts, sizes)]


def decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """Decode JPEG files to images (3, h, w) uint8, with nvJPEG on a GPU. A file that cannot be decoded gives None."""
    try:
        return [*_decode_all(files, device)]
    except MachineError:
        raise
    except Exception:  # decode each file separately, because the error does not name the file
        return [None] if len(files) == 1 else [image for file in files for image in decode([file], device)]


def _decode_all(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    if device.type == "cuda":
        return jpeg_decoder_of(device)(files)
    images = (read_image(io.BytesIO(file.numpy().tobytes())) for file in files)
    return [pil_to_tensor(image).to(device) for image in images]


@functools.cache
def decoder_is_missing(device: torch.device) -> str | None:
    """Decode a small JPEG file on a device to test the decoder. Return the error message, or None on success."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, format="JPEG")
    try:
        _decode_all([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)
    except Exception as error:  # a missing library can raise any type of exception
        return f"{device} cannot decode JPEG files: {repr(error)[:200]}"
    return None
