"""Wrappers that adapt a classifier to the images and classes of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Reordered(nn.Module):
    """Classifier whose logits are reordered by the permutation that `vil.classes.check_order` returns."""

    order: Tensor

    def __init__(self, model: nn.Module, order: Sequence[int]):
        super().__init__()
        self.model = model
        self.register_buffer("order", torch.tensor(order))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[:, self.order]


class Restricted(nn.Module):
    """Classifier that predicts only the given classes. The logits of all other classes are -inf."""

    excluded: Tensor

    def __init__(self, model: nn.Module, classes: Sequence[int], num_classes: int):
        super().__init__()
        self.model = model
        excluded = torch.ones(num_classes, dtype=torch.bool)
        excluded[list(classes)] = False
        self.register_buffer("excluded", excluded)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).masked_fill(self.excluded, -torch.inf)


class Renormalized(nn.Module):
    """Classifier for images that were normalized with the mean and standard deviation of another model.

    Args:
        model: Classifier to wrap.
        given: timm data config that the images were normalized with.
        own: timm data config of `model`.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, given: dict[str, Any], own: dict[str, Any]):
        super().__init__()
        self.model = model
        given_mean, given_std, own_mean, own_std = (
            torch.tensor(config[name]).view(-1, 1, 1) for config in (given, own) for name in ("mean", "std")
        )
        self.register_buffer("scale", given_std / own_std)
        self.register_buffer("shift", (given_mean - own_mean) / own_std)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images * self.scale + self.shift)
