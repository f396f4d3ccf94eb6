"""Encoded images on the way from workers that read files to the device that decodes and transforms them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..host.workers import into_shared_memory
from .batched_transforms import ARGUMENTS, CODES, GEOMETRIC, affine_matrix
from .nvjpeg import MOST_PIXELS
from .transform_parameters import Operation, TransformParameters

SMALL = 2**14  # pixels; workers decode smaller images, because nvJPEG takes as long for them as for larger ones

NO_CONTENT = torch.empty(0, dtype=torch.uint8)

FILE = np.dtype(
    [
        ("row", "i8"),  # row of the image in the batch
        ("index", "i8"),  # index and seed of the sampler
        ("seed", "i8"),
        ("bytes", "i8"),  # length of the content; 0 if the device has cached the image
        ("size", "i8", 2),  # height and width
        ("version", "i8", 2),  # version of the file
        ("box", "i8", 4),  # `TransformParameters`
        ("resized", "i8", 2),
        ("offset", "i8", 2),
        ("flip", "i8"),
    ]
)


@dataclass
class EncodedImage:
    """File for decoding on the device, with its sampled transform."""

    index: int  # index and seed of the sampler
    seed: int
    # the file, or the pixels (3, h, w) if there are at most `SMALL`; empty if the device has cached the image
    data: bytes
    size: tuple[int, int]  # height and width of the header
    version: tuple[int, int]  # version of the file, which changes with the file
    parameters: TransformParameters

    def record(self, row: int) -> tuple:
        """Return the fields of `FILE` of the image in this row of a batch."""
        transform = self.parameters
        source = row, self.index, self.seed, len(self.data), self.size, self.version
        return *source, transform.box, transform.resized, transform.offset, transform.flip


@dataclass
class EncodedBatch:
    """Files to decode and transform, and the images that the workers have finished instead."""

    targets: np.ndarray  # (B,)
    files: np.ndarray  # (N,) of FILE
    operations: np.ndarray  # (N, turns): opcodes of each file's operations; 0 for none
    arguments: np.ndarray  # (N, turns, ARGUMENTS)
    contents: list[Tensor]  # content of each file; a worker returns all contents concatenated in one tensor
    finished_rows: np.ndarray  # rows of the other images in the batch
    finished: list[Tensor]  # images (n, 3, H, W) uint8


def is_small(pixels: Any) -> Any:
    """Return whether a worker decodes images with this number of pixels (a number or an array)."""
    return pixels <= SMALL


def is_plain_jpeg(data: bytes, header: Any) -> bool:
    """Return whether the hardware decodes the JPEG to PIL's pixels: complete, baseline, in colour or grey."""
    if header.format != "JPEG" or math.prod(header.size) > MOST_PIXELS:
        return False
    has_one_frame = len(header.layer) == header.layers  # decoders may differ if there are two frames
    is_ycc = header.info.get("adobe_transform", 1) == 1
    is_baseline = header.mode in ("RGB", "L") and not header.info.get("progressive")
    # the hardware does not support 4:1:1
    is_sampled = all(across <= 2 and down <= 2 for _, across, down, _ in header.layer)
    is_complete = data.endswith(b"\xff\xd9")
    return has_one_frame and is_ycc and is_baseline and is_sampled and is_complete


def collate_encoded(samples: Sequence[tuple[EncodedImage | Tensor, int]], size: tuple[int, int]) -> EncodedBatch:
    """Collate samples, each an `EncodedImage` or an augmented image (3, H, W) uint8, with its target.

    Args:
        samples: Images and targets.
        size: Height and width of augmented images.
    """
    encoded = {row: image for row, (image, _) in enumerate(samples) if isinstance(image, EncodedImage)}
    finished = {row: image for row, (image, _) in enumerate(samples) if isinstance(image, Tensor)}
    operations, arguments = _encode_operations([image.parameters.operations for image in encoded.values()], size)
    content = bytearray().join(image.data for image in encoded.values())
    batch = EncodedBatch(
        targets=np.array([target for _, target in samples], dtype=np.int64),
        files=np.array([image.record(row) for row, image in encoded.items()], dtype=FILE),
        operations=operations,
        arguments=arguments,
        contents=[torch.frombuffer(content, dtype=torch.uint8)] if content else [],
        finished_rows=np.array(list(finished), dtype=np.int64),
        finished=[torch.stack(list(finished.values()))] if finished else [],
    )
    into_shared_memory(*batch.contents, *batch.finished)
    return batch


def _encode_operations(
    operations: Sequence[Sequence[Operation]], size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the opcodes (N, turns) and arguments (N, turns, ARGUMENTS) of each image's operations."""
    turns = max(map(len, operations), default=0)
    codes = np.zeros((len(operations), turns), dtype=np.uint8)
    arguments = np.zeros((len(operations), turns, ARGUMENTS), dtype=np.float32)
    for i, of_image in enumerate(operations):
        for turn, (name, values) in enumerate(of_image):
            if name in GEOMETRIC:
                name, values = "Affine", affine_matrix(name, values[0], width=size[1], height=size[0])
            codes[i, turn] = CODES[name]
            arguments[i, turn, : len(values)] = values
    return codes, arguments


def join_pieces(pieces: Sequence[EncodedBatch]) -> EncodedBatch:
    """Join the pieces of several workers to one batch in this order, with one tensor for each file."""
    first_rows = np.cumsum([0, *(len(piece.targets) for piece in pieces[:-1])])
    files = np.concatenate([piece.files for piece in pieces])
    files["row"] += np.repeat(first_rows, [len(piece.files) for piece in pieces])
    turns = max(piece.operations.shape[1] for piece in pieces)
    return EncodedBatch(
        targets=np.concatenate([piece.targets for piece in pieces]),
        files=files,
        operations=np.concatenate([_pad_turns(piece.operations, turns) for piece in pieces]),
        arguments=np.concatenate([_pad_turns(piece.arguments, turns) for piece in pieces]),
        contents=[content for piece in pieces for content in _split_contents(piece)],
        finished_rows=np.concatenate([first + piece.finished_rows for first, piece in zip(first_rows, pieces)]),
        finished=[images for piece in pieces for images in piece.finished],
    )


def _pad_turns(array: np.ndarray, turns: int) -> np.ndarray:
    """Pad the second axis with zeros, which mean no operation."""
    padded = np.zeros((len(array), turns, *array.shape[2:]), array.dtype)
    padded[:, : array.shape[1]] = array
    return padded


def _split_contents(piece: EncodedBatch) -> list[Tensor]:
    """Split the content of a piece by file; files without content share one empty tensor.

    Creating or freeing a tensor passes the GIL to another thread, and one tensor for each image took a quarter of the
    host's time.
    """
    lengths = piece.files["bytes"].tolist()
    contents = iter(piece.contents[0].split([length for length in lengths if length]) if piece.contents else ())
    return [next(contents) if length else NO_CONTENT for length in lengths]
