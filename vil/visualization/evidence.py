"""Gradient attribution and occlusion sensitivity of a model's outputs.

The docstring of `vil.viz` lists the dimension letters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.tokens import split_class_token
from ..models.vision_longhorn import VisionLonghorn
from .traces import check_model


@torch.no_grad()
def class_evidence(model: nn.Module, images: Tensor, classes: Tensor | None = None, steps: int = 16) -> Tensor:
    """Return the contribution (B, H, W) of each pixel to the probability of a class, by integrated gradients.

    The integration path (Sundararajan et al., 2017) starts at a baseline image, which has the mean colour of the image
    everywhere. The contributions in an image sum to the class probability of the image minus the class probability of
    the baseline, up to the discretization error.

    Args:
        model: Any classifier.
        images: The model's input, (B, 3, H, W).
        classes: Class indices (B,); the predicted classes if None.
        steps: Number of gradient evaluations per image.
    """
    if classes is None:
        classes = model(images).argmax(-1)
    baseline = _mean_colour(images)
    mean_gradient = torch.zeros_like(images)
    for step in range(steps):
        fraction = (step + 0.5) / steps
        between = (baseline + fraction * (images - baseline)).requires_grad_()
        with torch.enable_grad():
            probability = _probabilities(model, between, classes).sum()
            (gradient,) = torch.autograd.grad(probability, between)
        mean_gradient += gradient / steps
    return (mean_gradient * (images - baseline)).sum(1)


def _mean_colour(images: Tensor) -> Tensor:
    return images.mean((2, 3), keepdim=True).expand_as(images)


def _probabilities(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    return model(images).softmax(-1).gather(1, classes[:, None])[:, 0]


def patch_sums(model: VisionLonghorn, values_BHW: Tensor) -> Tensor:
    """Sum pixel values (B, H, W) over each patch and return (B, h, w).

    If the h x w patches do not divide the image, or overlap, each sum is the mean over a cell of adaptive average
    pooling times H W / (h w).
    """
    h, w = check_model(model).grid_of(values_BHW[:, None])
    pixels_of_patch = values_BHW[0].numel() / (h * w)
    return F.adaptive_avg_pool2d(values_BHW, (h, w)) * pixels_of_patch


@torch.no_grad()
def deletion_curve(
    model: nn.Module, images: Tensor, maps_Bhw: Tensor, classes: Tensor | None = None, steps: int = 10
) -> Tensor:
    """Return class probabilities (B, steps + 1) after hiding increasing shares of the image (Samek et al., 2017).

    Cells of a grid over the image are replaced by the image's mean colour in descending order of their map values. Up
    to rounding, each step hides equally many cells: none are hidden in the first column, and all in the last column.
    The faster the probability falls, the better the map ranks the parts of the image that the model uses.

    Args:
        model: Any classifier.
        images: The model's input, (B, 3, H, W).
        maps_Bhw: Values (B, h, w) that rank the cells of an h x w grid over each image.
        classes: Class indices (B,); the predicted classes if None.
        steps: Number of steps in which all cells are hidden.
    """
    if classes is None:
        classes = model(images).argmax(-1)
    baseline = _mean_colour(images)
    cells = maps_Bhw[0].numel()
    order_Bn = maps_Bhw.flatten(1).argsort(1, descending=True)
    rank_Bhw = order_Bn.argsort(1).view(maps_Bhw.shape)  # the cell with the largest map value has rank 0

    curve = []
    for step in range(steps + 1):
        is_hidden_Bhw = rank_Bhw < step * cells / steps
        is_hidden_B1HW = F.interpolate(is_hidden_Bhw[:, None].float(), images.shape[2:]) > 0
        curve.append(_probabilities(model, torch.where(is_hidden_B1HW, baseline, images), classes))
    return torch.stack(curve, dim=1)


def effective_receptive_field(model: VisionLonghorn, images: Tensor, token: str = "centre") -> Tensor:
    """Return the influence (H, W) of each pixel on the final features of a token (Luo et al., 2016).

    The influence is the absolute gradient of the sum of the token's features with respect to the pixel, averaged over
    colour channels and images, and normalized to a sum of 1.

    Args:
        model: Any VisionLonghorn.
        images: The model's input, (B, 3, H, W).
        token: "centre" for the patch at the image centre, or "class" for the class token.

    Raises:
        TypeError: The model is not a VisionLonghorn.
        ValueError: `token` is neither "centre" nor "class".
    """
    model = check_model(model)
    if token not in ("centre", "class"):
        raise ValueError(f"token must be 'centre' or 'class', got {token!r}")
    images = images.clone().requires_grad_()
    with torch.enable_grad():
        patches_BnC, class_token_B1C = split_class_token(model.forward_features(images))
        if token == "class":
            features_BC = class_token_B1C[:, 0]
        else:
            h, w = model.grid_of(images)
            centre = (h // 2) * w + w // 2
            features_BC = patches_BnC[:, centre]
        (gradient,) = torch.autograd.grad(features_BC.sum(), images)
    field_HW = gradient.abs().mean((0, 1))
    return field_HW / field_HW.sum()
