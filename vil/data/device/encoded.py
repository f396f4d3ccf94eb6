"""Encoded images on the way from workers that read files to the device that decodes and transforms them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..host.workers import into_shared_memory
from .batched_transforms import ARGUMENTS, CODES, GEOMETRIC, affine_matrix
from .nvjpeg import MOST_PIXELS
from .transform_parameters import Draws

SMALL = 2**14  # pixels; workers decode smaller images, because nvJPEG takes as long for them as for larger ones


@dataclass
class EncodedImage:
    """File for decoding on the device, with its sampled transform."""

    key: tuple[int, int]  # index and seed of the sampler
    # the file, or the pixels (3, h, w) if there are at most `SMALL`; empty if the device has kept the image
    data: bytes
    draws: Draws
    size: tuple[int, int]  # width and height of the header
    version: tuple[int, int] = (0, 0)  # version of the file, which changes with the file


NO_BYTES = torch.empty(0, dtype=torch.uint8)


def is_small(pixels: Any) -> Any:
    """Return whether a worker decodes images with this number of pixels (a number or an array)."""
    return pixels <= SMALL


def is_plain_jpeg(data: bytes, header: Any) -> bool:
    """Return whether the hardware decodes the JPEG to PIL's pixels: complete, baseline, in colour or grey."""
    if header.format != "JPEG" or math.prod(header.size) > MOST_PIXELS:
        return False
    one_frame = len(header.layer) == header.layers  # decoders may differ if there are two frames
    ycc = header.info.get("adobe_transform", 1) == 1
    baseline = header.mode in ("RGB", "L") and not header.info.get("progressive")
    # the hardware does not support 4:1:1
    sampled = all(across <= 2 and down <= 2 for _, across, down, _ in header.layer)
    return baseline and ycc and one_frame and sampled and data.endswith(b"\xff\xd9")


@dataclass
class EncodedBatch:
    """Files to decode, with their rows in the batch, and the images that the CPU has prepared."""

    targets: np.ndarray
    rows: np.ndarray  # rows of the files in the batch; most fields below are for the files
    keys: np.ndarray  # (files, 2): index and seed
    lengths: np.ndarray  # lengths of the files in bytes
    sizes: np.ndarray  # (files, 2): height and width of the headers
    versions: np.ndarray  # (files, 2)
    boxes: np.ndarray  # (files, 4)
    resized: np.ndarray  # (files, 2)
    offsets: np.ndarray  # (files, 2)
    flips: np.ndarray
    operations: np.ndarray  # (files, turns): opcodes
    arguments: np.ndarray  # (files, turns, ARGUMENTS)
    ready_rows: np.ndarray
    files: list[Tensor]  # contents of the files; a worker returns all contents concatenated in one tensor
    ready: list[Tensor]  # images (n, 3, H, W) uint8


def collate_encoded(samples: list[tuple[EncodedImage | Tensor, int]], size: tuple[int, int]) -> EncodedBatch:
    """Collate samples, each an `EncodedImage` or an augmented image (3, H, W) uint8, with its target."""
    files = {row: image for row, (image, _) in enumerate(samples) if isinstance(image, EncodedImage)}
    ready = {row: image for row, (image, _) in enumerate(samples) if isinstance(image, Tensor)}
    images, draws = list(files.values()), [file.draws for file in files.values()]
    turns = max((len(d.operations) for d in draws), default=0)
    operations = np.zeros((len(files), turns), dtype=np.uint8)
    arguments = np.zeros((len(files), turns, ARGUMENTS), dtype=np.float32)
    for i, d in enumerate(draws):
        for turn, (name, values) in enumerate(d.operations):
            if name in GEOMETRIC:
                name, values = "Affine", affine_matrix(name, values[0], width=size[1], height=size[0])
            operations[i, turn] = CODES[name]
            arguments[i, turn, : len(values)] = values
    lengths = np.array([len(file.data) for file in images], dtype=np.int64)
    data = torch.empty(int(lengths.sum()), dtype=torch.uint8)
    for part, file in zip(np.split(data.numpy(), lengths.cumsum()), images):
        part[:] = np.frombuffer(file.data, dtype=np.uint8)
    batch = EncodedBatch(
        targets=np.array([target for _, target in samples], dtype=np.int64),
        rows=np.array(list(files), dtype=np.int64),
        keys=np.array([file.key for file in images], dtype=np.int64).reshape(-1, 2),
        lengths=lengths,
        sizes=np.array([file.size[::-1] for file in images], dtype=np.int64).reshape(-1, 2),
        versions=np.array([file.version for file in images], dtype=np.int64).reshape(-1, 2),
        boxes=np.array([d.box for d in draws], dtype=np.int64).reshape(-1, 4),
        resized=np.array([d.resized for d in draws], dtype=np.int64).reshape(-1, 2),
        offsets=np.array([d.offset for d in draws], dtype=np.int64).reshape(-1, 2),
        flips=np.array([d.flip for d in draws], dtype=bool),
        operations=operations,
        arguments=arguments,
        ready_rows=np.array(list(ready), dtype=np.int64),
        files=[data] if len(data) else [],
        ready=[torch.stack(list(ready.values()))] if ready else [],
    )
    into_shared_memory(*batch.files, *batch.ready)
    return batch


def join_pieces(pieces: Sequence[EncodedBatch]) -> EncodedBatch:
    """Join the pieces of several workers to one batch in this order, with one tensor for each file."""
    first_rows = np.cumsum([0, *(len(piece.targets) for piece in pieces[:-1])])
    turns = max(piece.operations.shape[1] for piece in pieces)
    joined = {
        name: np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("targets", "keys", "lengths", "sizes", "versions", "boxes", "resized", "offsets", "flips")
    }
    joined |= {
        name: np.concatenate([first + getattr(piece, name) for first, piece in zip(first_rows, pieces)])
        for name in ("rows", "ready_rows")
    }
    for name in ("operations", "arguments"):
        arrays = [getattr(piece, name) for piece in pieces]
        joined[name] = np.zeros((len(joined["rows"]), turns, *arrays[0].shape[2:]), arrays[0].dtype)
        for place, array in zip(np.split(joined[name], np.cumsum([len(array) for array in arrays])), arrays):
            place[:, : array.shape[1]] = array
    files = [file for piece in pieces for file in _separate(piece)]
    return EncodedBatch(**joined, files=files, ready=[images for piece in pieces for images in piece.ready])


def _separate(piece: EncodedBatch) -> Iterator[Tensor]:
    """Split the files of a piece; empty files, whose images the device has kept, share one tensor.

    Creating or freeing a tensor passes the GIL to another thread, and one tensor for each image took a quarter of the
    host's time.
    """
    lengths = piece.lengths.tolist()
    files = iter(piece.files[0].split([length for length in lengths if length]) if piece.files else ())
    return (next(files) if length else NO_BYTES for length in lengths)
