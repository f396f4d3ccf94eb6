"""Decoding and augmentation of an encoded batch on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .batched_transforms import apply_operations, crop_resize_flip, to_device
from .cache import CachedImage, DecodedCache
from .decoding import decode, unpack
from .encoded import EncodedBatch, is_small
from .transform_parameters import TransformSampler

PIXELS_AT_ONCE = 2**28  # approximate number of pixels that are decoded at a time, which take 0.8 GB


class Preparation:
    """Decode the files of a batch that are not cached, and transform the images with sampled parameters.

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
        images = torch.empty(len(batch.targets), 3, *self.sampler.size, dtype=torch.uint8, device=self.device)
        rejected = self._decode_and_transform(batch, images)
        if batch.finished:
            images[to_device(batch.finished_rows, self.device)] = torch.cat(batch.finished).to(self.device)
        targets = to_device(batch.targets, self.device)
        return images, targets, batch.files[rejected]

    def fill_cache(self, batch: EncodedBatch) -> None:
        """Decode the files of a batch into the cache."""
        for group in _groups(batch.files):
            self._originals(batch, group)

    def _decode_and_transform(self, batch: EncodedBatch, images: Tensor) -> list[int]:
        """Write the images of a batch's files to `images`, and return the indices of rejected files."""
        # A file that repeated augmentation has repeated in the batch is decoded only once.
        # `first` has the first occurrence of each image, and `original_of` maps each occurrence to its image.
        _, first, original_of = np.unique(batch.files["index"], return_index=True, return_inverse=True)
        rejected = []
        for group in _groups(batch.files[first]):
            originals = self._originals(batch, first[group])
            is_decoded = np.array([original is not None for original in originals])
            files = np.flatnonzero((original_of >= group[0]) & (original_of <= group[-1]))
            sources = original_of[files] - group[0]  # index in `originals` of each file's image

            rejected += files[~is_decoded[sources]].tolist()
            files, sources = files[is_decoded[sources]], sources[is_decoded[sources]]
            if len(files):
                decoded = [original for original in originals if original is not None]
                index_of_decoded = is_decoded.cumsum() - 1
                transformed = self._transform(batch, files, decoded, index_of_decoded[sources])
                images[to_device(batch.files["row"][files], self.device)] = transformed
        return rejected

    def _originals(self, batch: EncodedBatch, files: np.ndarray) -> list[Tensor | None]:
        """Return the images (3, h, w) of files from the cache or the decoder. A rejected file gives None."""
        records = batch.files[files]
        indices = records["index"].tolist()
        versions = list(map(tuple, records["version"].tolist()))
        originals = list(map(self.cache.get, indices, versions))

        is_missing = np.array([original is None for original in originals]) & (records["bytes"] > 0)
        small = is_small(records["size"].prod(axis=1))
        targets = batch.targets[records["row"]].tolist()
        new: dict[int, CachedImage] = {}
        for missing, read in ((is_missing & small, self._unpack), (is_missing & ~small, self._decode)):
            numbers = np.flatnonzero(missing).tolist()
            if not numbers:
                continue
            contents = [batch.contents[files[i]] for i in numbers]
            sizes = records["size"][numbers].tolist()
            for i, size, image in zip(numbers, sizes, read(contents, sizes)):
                # skip a file whose decoded size differs from its header
                if image is not None and [*image.shape[1:]] == size:
                    originals[i] = image
                    new[indices[i]] = CachedImage(image, targets[i], versions[i])
        self.cache.add(new)
        return originals

    def _unpack(self, contents: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        return unpack(contents, sizes, self.device)

    def _decode(self, contents: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor | None]:
        return decode(contents, self.device)

    def _transform(
        self, batch: EncodedBatch, files: np.ndarray, originals: Sequence[Tensor], sources: np.ndarray
    ) -> Tensor:
        """Crop, flip and augment images. The image of the i-th file is `originals[sources[i]]`."""
        records, sampler = batch.files[files], self.sampler
        crops = crop_resize_flip(
            originals,
            records["box"],
            records["flip"].astype(bool),
            sampler.size,
            sampler.interpolation,
            records["resized"],
            records["offset"],
            sources,
        )
        operations = batch.operations[files]
        if not operations.any():
            return crops
        return apply_operations(crops, operations, batch.arguments[files], sampler.fill, sampler.interpolation)


def _groups(files: np.ndarray) -> list[np.ndarray]:
    """Split file indices into groups of bounded pixel count, each of which is decoded in one call."""
    if not len(files):
        return []
    pixels = files["size"].prod(axis=1)
    return np.split(np.arange(len(files)), np.flatnonzero(np.diff(pixels.cumsum() // PIXELS_AT_ONCE)) + 1)
