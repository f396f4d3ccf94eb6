"""Conversion of image files, Pillow images and arrays to 8-bit RGB for `predict`."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import numpy as np
from PIL import Image
from torch import Tensor

from ..config import ConfigError

Picture: TypeAlias = str | os.PathLike | Image.Image | np.ndarray


def check_picture(image: Any) -> None:
    """Raise a TypeError unless `open_picture` supports the type of an image."""
    if isinstance(image, (str, os.PathLike, Image.Image, np.ndarray)):
        return
    remedy = ""
    if isinstance(image, (bytes, bytearray)):
        remedy = ": pass PIL.Image.open(io.BytesIO(data)) for the bytes of an image file"
    elif isinstance(image, Tensor):
        remedy = ": pass torchvision.transforms.functional.to_pil_image(tensor) for a tensor (C, H, W)"
    raise TypeError(
        f"an image must be a file path, a Pillow image or a NumPy array, got {type(image).__name__}{remedy}"
    )


def open_picture(image: Any) -> Image.Image:
    """Convert an image file, Pillow image or array to 8-bit RGB, with the same colour conversion as in training.

    Image files and Pillow images are rotated by their EXIF orientation.
    """
    from ..data.sources.images import read_image
    from ..security.exif import to_upright_rgb
    from ..security.image_decoding import to_rgb

    if isinstance(image, (str, os.PathLike)):
        return read_image(image)
    if isinstance(image, Image.Image):
        return to_upright_rgb(image)
    return to_rgb(_from_array(np.asarray(image)))


def _from_array(array: np.ndarray) -> Image.Image:
    has_known_shape = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if array.dtype not in (np.uint8, np.uint16) or not has_known_shape:
        raise ConfigError(
            "image arrays must be (H, W), (H, W, 3) or (H, W, 4) of dtype uint8 or uint16, "
            f"got {array.shape} of {array.dtype}"
        )
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    return Image.fromarray(array)
