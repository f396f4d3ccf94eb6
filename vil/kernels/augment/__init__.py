"""Launches of the augmentation kernels in augment.cu; the reference implementation is
`vil.data.device.batched_transforms`.

Each call copies all per-image parameters to the GPU in one copy from pinned memory, for which the host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cuda.launches import launch
from ..cuda.source import DOUBLE, I64, In, Out, Source

SOURCE = Source("augment/augment", {
    "resize_weights": dict(crops=In("Crop"), memory=Out("int"), H=I64, W=I64, bicubic=I64),
    "crop_resize_flip": dict(crops=In("Crop"), memory=Out("int"), out=Out("u8"), H=I64, W=I64),
    "build_tables": dict(operations=In("Operation"), images=In("u8"), tables=Out("u8"), pixels=I64),
    "apply_operations": dict(
        operations=In("Operation"), tables=In("u8"), images=In("u8"), out=Out("u8"), H=I64, W=I64, red=I64, green=I64,
        blue=I64, bicubic=I64,
    ),
    "gaussian_blur": dict(
        operations=In("Operation"), images=Out("u8"), length=I64, step=I64, lines=I64, apart=I64, together=I64,
    ),
    "finish": dict(
        rests=In("Rest"), images=In("u8"), out=Out("float"), H=I64, W=I64, parts=I64, mean_red=DOUBLE,
        mean_green=DOUBLE, mean_blue=DOUBLE, deviation_red=DOUBLE, deviation_green=DOUBLE, deviation_blue=DOUBLE,
        noise=I64,
    ),
}, fma=False)  # fmt: skip

# the opcode of an operation is its index in this tuple
OPERATIONS = (
    "", "Affine", "AutoContrast", "Equalize", "Invert", "Posterize", "Solarize", "SolarizeAdd", "Color", "Contrast",
    "Brightness", "Sharpness", "GaussianBlur",
)  # fmt: skip
CODES = {name: code for code, name in enumerate(OPERATIONS)}
# operations that map the values of a channel through a lookup table; bit i of the mask is 1 if opcode i has a table
TABLE_OPERATIONS = (
    "AutoContrast", "Equalize", "Invert", "Posterize", "Solarize", "SolarizeAdd", "Contrast", "Brightness",
)  # fmt: skip
TABLE_CODES = [CODES[name] for name in TABLE_OPERATIONS]
MASK = sum(1 << code for code in TABLE_CODES)
MACROS = {name.upper(): code for name, code in CODES.items() if name} | dict(TABLE_MASK=MASK)
COLOURS = "red", "green", "blue"
NOISE = {"const": 0, "rand": 1, "pixel": 2}
TILE = 32  # pixels along each side of the tile that a CTA of crop_resize_flip or apply_operations computes
SHARED_BYTES = 48 * 1024  # maximum dynamic shared memory of a CTA of gaussian_blur

CROP = np.dtype([("pixels", "i8"), ("row", "i8"), ("plane", "i8"), ("flip", "i8"), ("axes", "i8", (2, 4))])
OPERATION = np.dtype([("code", "i8"), ("arguments", "f8", 6)])
REST = np.dtype([("key", "u4"), ("erased", "i4", 4), ("partner", "i4"), ("mixing", "f4", 5)])


def tiles(H: int, W: int) -> int:
    """Return the number of `TILE` x `TILE` tiles that cover an image."""
    return -(-H // TILE) * -(-W // TILE)


def crop_resize_flip(
    addresses_B: np.ndarray, sizes_B2: np.ndarray, boxes_B4: np.ndarray, flips_B: np.ndarray, size: tuple[int, int],
    interpolation: str, resized_B2: np.ndarray, offsets_B2: np.ndarray, device: torch.device,
) -> Tensor:  # fmt: skip
    """Run `batched_transforms.crop_resize_flip` on a GPU, given the addresses of contiguous images (3, h, w) uint8.

    The caller must keep the images alive until the call returns.
    """
    (H, W), count = size, len(addresses_B)
    crops = np.empty(count, CROP)
    crops["row"], crops["plane"], crops["flip"] = sizes_B2[:, 1], sizes_B2.prod(axis=1), flips_B
    crops["pixels"] = addresses_B + boxes_B4[:, 0] * sizes_B2[:, 1] + boxes_B4[:, 1]
    lengths_B2 = boxes_B4[:, 2:]
    support_B2 = (1 + (interpolation == "bicubic")) * np.maximum(lengths_B2 / resized_B2, 1)
    taps_B2 = np.minimum(2 * np.ceil(support_B2).astype(np.int64) + 1, lengths_B2)
    ends = ((2 + taps_B2) * size).cumsum()  # end offsets of the weights that resize each crop's height and width
    starts_B2 = np.concatenate([[0], ends[:-1]]).reshape(-1, 2)
    crops["axes"] = np.stack([lengths_B2, resized_B2, offsets_B2, starts_B2], axis=2)
    records, weights = _to_device(crops, device), torch.empty(int(ends[-1]), dtype=torch.int32, device=device)
    launch(SOURCE, "resize_weights", MACROS, 2 * count, 256, dict(
        crops=records, memory=weights, H=H, W=W, bicubic=interpolation == "bicubic",
    ))  # fmt: skip
    result = torch.empty(count, 3, H, W, dtype=torch.uint8, device=device)
    launch(SOURCE, "crop_resize_flip", MACROS, count * tiles(H, W), TILE * TILE // 4, dict(
        crops=records, memory=weights, out=result, H=H, W=W,
    ))  # fmt: skip
    return result


def apply_operations(
    images: Tensor, codes_BT: np.ndarray, arguments_BTA: np.ndarray, fill: Sequence[int], interpolation: str
) -> Tensor:
    """Run `batched_transforms.apply_operations` on a GPU. Gaussian blurs are given as box filters."""
    (count, _, H, W), turns = images.shape, codes_BT.shape[1]
    images = images.contiguous()
    operations = np.empty((turns, count), OPERATION)
    operations["code"], operations["arguments"] = codes_BT.T, arguments_BTA.swapaxes(0, 1)
    records = _to_device(operations, images.device).view(turns, count * OPERATION.itemsize)
    tables = images.new_empty(count, 3, 256)
    for record, codes_B in zip(records, codes_BT.T):
        if not codes_B.any():
            continue
        if np.isin(codes_B, TABLE_CODES).any():
            of_tables = dict(operations=record, images=images, tables=tables, pixels=H * W)
            launch(SOURCE, "build_tables", MACROS, count, 512, of_tables)
        changed = torch.empty_like(images)
        launch(SOURCE, "apply_operations", MACROS, count * tiles(H, W), TILE * TILE // 4, dict(
            operations=record, tables=tables, images=images, out=changed, H=H, W=W,
            red=fill[0], green=fill[1], blue=fill[2], bicubic=interpolation == "bicubic",
        ))  # fmt: skip
        images = changed
        if (codes_B == CODES["GaussianBlur"]).any():
            for length, step, lines, apart in ((W, 1, H, W), (H, W, W, 1)):
                together = max(1, min(32, SHARED_BYTES // (2 * length)))
                launch(SOURCE, "gaussian_blur", MACROS, count * 3 * -(-lines // together), 256, dict(
                    operations=record, images=images, length=length, step=step, lines=lines, apart=apart,
                    together=together,
                ), 2 * length * together)  # fmt: skip
    return images


def finish(
    images: Tensor, mean: Sequence[float], std: Sequence[float], erasing_B4: np.ndarray | None,
    keys_B: np.ndarray | None, mode: str, mixing_B6: np.ndarray | None, partners_B: np.ndarray | None,
) -> Tensor:  # fmt: skip
    """Run `batched_transforms.finish` on a GPU."""
    count, _, H, W = images.shape
    rests = np.zeros(count, REST)
    if erasing_B4 is not None:
        rests["erased"], rests["key"] = erasing_B4, keys_B
    if mixing_B6 is not None:
        rests["mixing"], rests["partner"] = mixing_B6[:, :5], partners_B
    result = images.new_empty(images.shape, dtype=torch.float32)
    parts = -(-H * -(-W // 4) // 256)
    launch(SOURCE, "finish", MACROS, count * 3 * parts, 256, dict(
        rests=_to_device(rests, images.device), images=images.contiguous(), out=result, H=H, W=W, parts=parts,
        noise=NOISE[mode], **{f"mean_{colour}": 255.0 * value for colour, value in zip(COLOURS, mean)},
        **{f"deviation_{colour}": 255.0 * value for colour, value in zip(COLOURS, std)},
    ))  # fmt: skip
    return result


def _to_device(records: np.ndarray, device: torch.device) -> Tensor:
    """Copy NumPy records to the device as bytes, through pinned memory.

    A copy from pageable memory could block the host until queued work is done.
    """
    host = torch.from_numpy(records.reshape(-1).view(np.uint8))
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
