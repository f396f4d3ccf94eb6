"""Decoding and augmentation of an encoded batch on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .batched_transforms import apply_operations, crop_resize_flip, to_device
from .cache import DecodedCache
from .decoded import DecodedImages
from .decoding import decode, unpack
from .encoded import EncodedBatch, is_small
from .transform_parameters import TransformSampler

PIXELS_AT_ONCE = 2**28  # approximate number of pixels that are decoded at a time; the pixels take 0.8 GB


class Preparation:
    """Callable that decodes the uncached files of a batch, and transforms the images with sampled parameters.

    Args:
        device: Device of the images.
        sampler: Sampler of the parameters, which also specifies size, interpolation and fill colour.
        cache: Cache of decoded images.
    """

    def __init__(self, device: torch.device, sampler: TransformSampler, cache: DecodedCache):
        self.device = device
        self.sampler = sampler
        self.cache = cache

    def __call__(self, batch: EncodedBatch) -> tuple[Tensor, Tensor, np.ndarray]:
        """Return images (B, 3, H, W) uint8, targets (B,), and the records (F,) of files that the device rejected."""
        parts, rejected = self._decode_and_transform(batch)
        if batch.finished:
            parts.append((batch.finished_rows, torch.cat(batch.finished).to(self.device)))
        targets = to_device(batch.targets, self.device)
        return self._joined(parts, len(targets)), targets, batch.files[rejected]

    def fill_cache(self, batch: EncodedBatch) -> None:
        """Decode the files of a batch into the cache."""
        for group in _groups(batch.files):
            self._originals(batch, group)

    def _decode_and_transform(self, batch: EncodedBatch) -> tuple[list[tuple[np.ndarray, Tensor]], list[int]]:
        """Return parts of the batch as pairs (ascending rows, transformed images), and indices of rejected files."""
        # A file that occurs several times in the batch, due to repeated augmentation, is decoded only once.
        # `first` has the index of each image's first occurrence, and `original_of` maps each occurrence to its image.
        _, first, original_of = np.unique(batch.files["index"], return_index=True, return_inverse=True)
        parts, rejected = [], []
        for group in _groups(batch.files[first]):
            files = np.flatnonzero((original_of >= group[0]) & (original_of <= group[-1]))
            originals = self._originals(batch, first[group])[original_of[files] - group[0]]
            are_present = originals.are_present

            rejected += files[~are_present].tolist()
            files, originals = files[are_present], originals[are_present]
            if len(files):
                order = np.argsort(batch.files["row"][files])
                files, originals = files[order], originals[order]
                parts.append((batch.files["row"][files], self._transform(batch, files, originals)))
        return parts, rejected

    def _joined(self, parts: Sequence[tuple[np.ndarray, Tensor]], count: int) -> Tensor:
        """Return images (count, 3, H, W) uint8, given parts with their rows. A part with all rows is not copied."""
        if len(parts) == 1 and len(parts[0][0]) == count:
            return parts[0][1]
        images = torch.empty(count, 3, *self.sampler.size, dtype=torch.uint8, device=self.device)
        for rows, part in parts:
            images[to_device(rows, self.device)] = part
        return images

    def _originals(self, batch: EncodedBatch, files: np.ndarray) -> DecodedImages:
        """Return untransformed images from the cache or the decoder. The image of a rejected file is missing."""
        records = batch.files[files]
        originals = self.cache.get(records["index"], records["version"])
        new = np.flatnonzero(~originals.are_present & (records["bytes"] > 0))
        if len(new):
            originals[new] = self._decode_new(batch, files[new])
        return originals

    def _decode_new(self, batch: EncodedBatch, files: np.ndarray) -> DecodedImages:
        """Decode files that have content, and add the images to the cache. The image of a rejected file is missing."""
        records = batch.files[files]
        index_of_content = (batch.files["bytes"] > 0).cumsum() - 1
        contents = [batch.contents[i] for i in index_of_content[files]]
        images = DecodedImages.missing(len(files))
        are_small = is_small(records["size"].prod(axis=1))
        for numbers, read in ((np.flatnonzero(are_small), self._unpack), (np.flatnonzero(~are_small), self._decode)):
            if len(numbers):
                decoded = read([contents[i] for i in numbers], records["size"][numbers].tolist())
                images[numbers] = DecodedImages.of(decoded)

        are_valid = (images.sizes == records["size"]).all(axis=1)  # reject files with a wrong size in the header
        images[~are_valid] = DecodedImages.missing((~are_valid).sum())
        records = records[are_valid]
        self.cache.add(records["index"], images[are_valid], batch.targets[records["row"]], records["version"])
        return images

    def _unpack(self, contents: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        return unpack(contents, sizes, self.device)

    def _decode(self, contents: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor | None]:
        return decode(contents, self.device)

    def _transform(self, batch: EncodedBatch, files: np.ndarray, originals: DecodedImages) -> Tensor:
        """Crop, resize, flip and augment the images of files."""
        records, sampler = batch.files[files], self.sampler
        crops = crop_resize_flip(
            originals,
            records["box"],
            records["flip"].astype(bool),
            sampler.size,
            sampler.interpolation,
            records["resized"],
            records["offset"],
        )
        operations = batch.operations[files]
        if not operations.any():
            return crops
        return apply_operations(crops, operations, batch.arguments[files], sampler.fill, sampler.interpolation)


def _groups(files: np.ndarray) -> list[np.ndarray]:
    """Return groups of file indices. A group has about `PIXELS_AT_ONCE` pixels and is decoded in one call."""
    if not len(files):
        return []
    pixels = files["size"].prod(axis=1)
    return np.split(np.arange(len(files)), np.flatnonzero(np.diff(pixels.cumsum() // PIXELS_AT_ONCE)) + 1)
