"""Encoded images, which workers read and the device decodes and transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..host.channel import Channel, send, send_bytes
from .batched_transforms import ARGUMENTS, CODES, GEOMETRIC, affine_matrix
from .nvjpeg import MOST_PIXELS
from .transform_parameters import Operation, TransformParameters

# Workers decode images of up to `SMALL` pixels, because nvJPEG takes as long for small images as for larger images.
SMALL = 2**14

FILE = np.dtype(
    [
        ("row", "i8"),  # index of the image in the batch
        ("index", "i8"),  # index of the image in the dataset
        ("seed", "i8"),  # seed of the image's augmentation
        ("bytes", "i8"),  # number of content bytes; 0 if the device has cached the image
        ("size", "i8", 2),  # height and width of the image
        ("version", "i8", 2),  # size and modification time of the file
        ("box", "i8", 4),  # box, resized, offset and flip are fields of `TransformParameters`
        ("resized", "i8", 2),
        ("offset", "i8", 2),
        ("flip", "i8"),
    ]
)


@dataclass
class EncodedImage:
    """Encoded image for the device to decode, with the sampled parameters of its transform."""

    index: int  # index of the image in the dataset
    seed: int  # seed of the image's augmentation
    # the file without metadata, or raw pixels (3, h, w) of a small image; empty if the device has cached the image
    data: bytes
    size: tuple[int, int]  # height and width in the file's header
    version: tuple[int, int]  # size and modification time of the file
    parameters: TransformParameters

    def record(self, row: int) -> tuple:
        """Return the image's record of dtype `FILE`, given the image's index in the batch."""
        transform = self.parameters
        source = row, self.index, self.seed, len(self.data), self.size, self.version
        return *source, transform.box, transform.resized, transform.offset, transform.flip


@dataclass
class EncodedBatch:
    """Batch of encoded images for the device to decode, and of images that workers have already augmented."""

    rows: np.ndarray  # (B,) position in the batch of each image
    targets: np.ndarray  # (B,) class indices
    files: np.ndarray  # (N,) records of dtype `FILE`
    operations: np.ndarray  # (N, T) opcodes of up to T operations per file; 0 means no operation
    arguments: np.ndarray  # (N, T, ARGUMENTS) arguments of the operations
    # one tensor per file that has content; in a worker's result, one (sent) tensor with the content of all files
    contents: list[Any]
    finished_rows: np.ndarray  # positions of `finished` in the batch
    finished: list[Any]  # augmented images (n, 3, H, W) uint8, as tensors or, in a worker, as sent tensors


def is_small(pixels: Any) -> Any:
    """Return whether workers decode an image with `pixels` pixels, element-wise for an array."""
    return pixels <= SMALL


def is_plain_jpeg(data: bytes, header: Any) -> bool:
    """Return whether a file is a complete baseline JPEG that GPU hardware decodes like Pillow."""
    if header.format != "JPEG" or math.prod(header.size) > MOST_PIXELS:
        return False
    has_one_frame = len(header.layer) == header.layers  # decoders may disagree about a JPEG with two frames
    is_ycc = header.info.get("adobe_transform", 1) == 1
    is_baseline = header.mode in ("RGB", "L") and not header.info.get("progressive")
    # GPU hardware does not support 4:1:1 chroma subsampling
    is_sampled = all(across <= 2 and down <= 2 for _, across, down, _ in header.layer)
    is_complete = data.endswith(b"\xff\xd9")
    return has_one_frame and is_ycc and is_baseline and is_sampled and is_complete


def collate_encoded(
    samples: Sequence[tuple[int, EncodedImage | Tensor, int]], size: tuple[int, int], channel: Channel | None = None
) -> EncodedBatch:
    """Collate samples into a batch. An image is an `EncodedImage` or an augmented uint8 tensor (3, H, W).

    Args:
        samples: Rows in the batch, images and targets.
        size: Height and width of augmented images.
        channel: Channel through which a worker sends the images.
    """
    encoded = {row: image for row, image, _ in samples if isinstance(image, EncodedImage)}
    finished = {row: image for row, image, _ in samples if isinstance(image, Tensor)}
    operations, arguments = _encode_operations([image.parameters.operations for image in encoded.values()], size)
    contents = [image.data for image in encoded.values() if image.data]
    return EncodedBatch(
        rows=np.array([row for row, _, _ in samples], dtype=np.int64),
        targets=np.array([target for _, _, target in samples], dtype=np.int64),
        files=np.array([image.record(row) for row, image in encoded.items()], dtype=FILE),
        operations=operations,
        arguments=arguments,
        contents=[send_bytes(contents, channel)] if contents else [],
        finished_rows=np.array(list(finished), dtype=np.int64),
        finished=[send(torch.stack(list(finished.values())), channel)] if finished else [],
    )


def _encode_operations(
    operations: Sequence[Sequence[Operation]], size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return opcodes (N, T) and arguments (N, T, ARGUMENTS) of N images with at most T operations each."""
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


def join_pieces(batches: Sequence[Sequence[EncodedBatch]]) -> EncodedBatch:
    """Concatenate the sub-batches (pieces) that workers have loaded, and split the pieces' contents into files."""
    sizes = [sum(len(piece.targets) for piece in batch) for batch in batches]
    first_rows = np.repeat(np.cumsum([0, *sizes[:-1]]), [len(batch) for batch in batches])
    pieces = [piece for batch in batches for piece in batch]
    files = np.concatenate([piece.files for piece in pieces])
    files["row"] += np.repeat(first_rows, [len(piece.files) for piece in pieces])
    turns = max(piece.operations.shape[1] for piece in pieces)
    rows = np.concatenate([first + piece.rows for first, piece in zip(first_rows, pieces)])
    targets = np.empty_like(rows)
    targets[rows] = np.concatenate([piece.targets for piece in pieces])
    return EncodedBatch(
        rows=np.arange(len(rows)),
        targets=targets,
        files=files,
        operations=np.concatenate([_pad_turns(piece.operations, turns) for piece in pieces]),
        arguments=np.concatenate([_pad_turns(piece.arguments, turns) for piece in pieces]),
        contents=[content for piece in pieces for content in _split_contents(piece)],
        finished_rows=np.concatenate([first + piece.finished_rows for first, piece in zip(first_rows, pieces)]),
        finished=[images for piece in pieces for images in piece.finished],
    )


def _pad_turns(array: np.ndarray, turns: int) -> np.ndarray:
    """Pad an array with zeros to `turns` operations per image. Opcode 0 means no operation."""
    padded = np.zeros((len(array), turns, *array.shape[2:]), array.dtype)
    padded[:, : array.shape[1]] = array
    return padded


def _split_contents(piece: EncodedBatch) -> Sequence[Tensor]:
    """Split a worker's concatenated content into one tensor per file that has content."""
    lengths = piece.files["bytes"]
    return piece.contents[0].split(lengths[lengths > 0].tolist()) if piece.contents else ()
