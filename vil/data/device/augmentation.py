"""Batch augmentation on the device: normalization and, in training, random erasing and mixup or cutmix.

timm samples the boxes and mixing ratios on the host, seeded by the position in the run. On an NVIDIA GPU, one kernel
launch erases the boxes and mixes the images.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from timm.data import Mixup
from timm.data.mixup import cutmix_bbox_and_lam, one_hot
from timm.data.random_erasing import RandomErasing
from torch import Tensor

from ...config import Config
from .batched_transforms import finish, to_device

# Maximum number of consecutive images that share mixup parameters and are mixed with each other.
# Mixup does not depend on the world size if each rank's micro-batch is a multiple of `MIXUP_GROUP`.
MIXUP_GROUP = 8


@dataclass
class BatchParameters:
    """Sampled parameters of erasing and mixing for a batch. The fields of a disabled augmentation are None."""

    boxes: np.ndarray | None  # (B, 4) int32: top, left, height and width of the box to erase
    keys: np.ndarray | None  # (B,) uint32: RNG seeds of the noise in erased boxes
    # (B, 6) float32: top, bottom, left and right of the box to mix, weight of the image's own pixels in the box, weight
    # of its own target
    mixing: np.ndarray | None


class BatchAugmentation:
    """Normalization, random erasing, and mixup or cutmix with soft targets for batches, as in timm.

    Args:
        config: Options of the run, with the probabilities and strengths.
        num_classes: Number of classes, which is the length of a soft target.
        data_config: timm's data config, with `mean` and `std` of pixels in 0..1.
    """

    def __init__(self, config: Config, num_classes: int, data_config: dict[str, Any]):
        self.seed = config.seed
        self.mode = config.remode
        self.num_classes = num_classes
        self.smoothing = config.smoothing
        self.mean = data_config["mean"]
        self.std = data_config["std"]
        # RandomErasing only samples boxes (independently of its mode), and `finish` fills the boxes
        self.erase = RandomErasing(config.reprob, mode="const", device="cpu") if config.reprob > 0 else None
        self.mix: Any = None
        if config.mixing:
            self.mix = Mixup(
                mixup_alpha=config.mixup,
                cutmix_alpha=config.cutmix,
                prob=config.mixup_prob,
                switch_prob=config.mixup_switch_prob,
            )

    @property
    def is_random(self) -> bool:
        """Whether parameters are sampled, for random erasing or for mixing."""
        return bool(self.erase or self.mix)

    def __call__(self, images_B3HW: Tensor, targets_B: Tensor, parameters: BatchParameters) -> tuple[Tensor, Tensor]:
        """Augment images and return float32 images and targets. Mixing returns soft targets (B, num_classes).

        Args:
            images_B3HW: uint8 images.
            targets_B: Class indices.
            parameters: Parameters that `sample` has sampled for these images.
        """
        count = len(images_B3HW)
        partners = None if parameters.mixing is None else _partners(count)
        images = finish(
            images_B3HW, self.mean, self.std, parameters.boxes, parameters.keys, self.mode, parameters.mixing, partners
        )
        if parameters.mixing is None:
            return images, targets_B

        shares = to_device(parameters.mixing[:, 5:].copy(), targets_B.device)
        rest = self.smoothing / self.num_classes
        soft = one_hot(targets_B, self.num_classes, on_value=1 - self.smoothing + rest, off_value=rest)
        return images, soft * shares + soft[_partners_on(count, targets_B.device)] * (1 - shares)

    def sample(self, count: int, height: int, width: int, epoch: int, position: int) -> BatchParameters:
        """Seed the RNGs of Python and NumPy by the position in the run, and sample the augmentation of images.

        Args:
            count: Number of images.
            height: Height of the images.
            width: Width of the images.
            epoch: Index of the epoch.
            position: Position of the first image in the epoch.
        """
        boxes = np.zeros((count, 4), dtype=np.int32)
        keys = np.zeros(count, dtype=np.uint32)
        mixing = np.zeros((count, 6), dtype=np.float32)
        for start in range(0, count if self.is_random else 0, MIXUP_GROUP):
            group = slice(start, min(start + MIXUP_GROUP, count))
            # words[0] seeds the RNGs of Python and NumPy, and each further word seeds the erasing noise of one image
            words = np.random.SeedSequence((self.seed, epoch, position + start, 1)).generate_state(1 + MIXUP_GROUP)
            random.seed(int(words[0]))
            np.random.seed(words[0])
            keys[group] = words[1 : 1 + group.stop - start]
            if self.erase:
                self.erase(_Boxes(boxes[group], height, width))
            if self.mix:
                mixing[group] = self._sample_mixing(height, width)
        return BatchParameters(
            boxes=boxes if self.erase else None,
            keys=keys if self.erase else None,
            mixing=mixing if self.mix else None,
        )

    def _sample_mixing(self, height: int, width: int) -> tuple[float, ...]:
        """Sample a box for mixup or cutmix, the mixing ratio inside the box, and the mixing ratio of the targets.

        The first four of the returned numbers are the top, bottom, left and right of the box.
        """
        share, use_cutmix = self.mix._params_per_batch()
        if not use_cutmix or share == 1:
            return 0, height, 0, width, share, share
        box, share = cutmix_bbox_and_lam((height, width), share, self.mix.cutmix_minmax, self.mix.correct_lam)
        return *box, 0, share


class _Boxes:
    """Fake image batch that records the boxes (top, left, height, width) that timm's RandomErasing erases."""

    dtype = torch.float32

    def __init__(self, boxes_B4: np.ndarray, height: int, width: int):
        self.boxes_B4, self.height, self.width = boxes_B4, height, width

    def size(self) -> tuple[int, int, int, int]:
        return len(self.boxes_B4), 3, self.height, self.width

    def __getitem__(self, row: int) -> _Boxes:
        return _Boxes(self.boxes_B4[row : row + 1], self.height, self.width)

    def __setitem__(self, window: tuple[slice, slice, slice], pixels: Tensor) -> None:
        _, rows, columns = window
        self.boxes_B4[0] = rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start


@functools.cache
def _partners_on(count: int, device: torch.device) -> Tensor:
    return to_device(_partners(count), device)


@functools.cache
def _partners(count: int) -> np.ndarray:
    """Return the index of each image's mixing partner, the image at the mirrored position in the same group."""
    rows = np.arange(count)
    starts = rows - rows % MIXUP_GROUP
    return starts + np.minimum(starts + MIXUP_GROUP, count) - 1 - rows
