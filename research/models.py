"""Models that only the studies use, registered with timm. The models are not part of the package."""

from __future__ import annotations

from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models import VisionTransformer, register_model
from torch import nn

from vil.models.block import MambaDirection
from vil.models.vision_longhorn import VisionLonghorn


@register_model
def published_vit(drop_path_rate: float = 0.0, **arguments: Any) -> VisionTransformer:
    """Return DeiT-tiny with the initialization and the stochastic depth of Lee et al. (2021).

    The weights of linear layers and of the patch embedding are sampled from Xavier's normal distribution, and biases
    are zero. The class token and the position embeddings have a standard deviation of 1; in timm's DeiT, the standard
    deviations are 1e-6 and 0.02. Each residual branch is dropped with the probability `drop_path_rate`. In timm's DeiT,
    this probability grows linearly with depth, from zero to `drop_path_rate`.

    Args:
        drop_path_rate: Probability of dropping a residual branch of an image.
        arguments: Arguments of timm's `create_model` for DeiT-tiny.
    """
    model = timm.create_model("deit_tiny_patch16_224", drop_path_rate=drop_path_rate, **arguments)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            with torch.no_grad():
                # The weight is flattened, because a patch embedding is a linear layer of all values of a patch.
                nn.init.xavier_normal_(module.weight.flatten(1))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    nn.init.normal_(model.cls_token)
    nn.init.normal_(model.pos_embed)
    if drop_path_rate:
        for block in model.blocks:
            block.drop_path1, block.drop_path2 = DropPath(drop_path_rate), DropPath(drop_path_rate)
    return model


@register_model
def vim_tiny_large_steps(**arguments: Any) -> VisionLonghorn:
    """Return ViM-tiny whose initial dt (step size of the recurrence) is ten times as large, log-uniform from 1e-2 to 1.

    In `vim_tiny`, dt is log-uniform between 1e-3 and 1e-1. With equal RNG states, the two models differ only in the
    initial biases of their step projections.

    Args:
        arguments: Arguments of timm's `create_model` for ViM-tiny.
    """
    model = timm.create_model("vim_tiny", **arguments)
    for module in model.modules():
        if isinstance(module, MambaDirection):
            with torch.no_grad():
                dt_D = 10 * F.softplus(module.step_proj.bias)
                module.step_proj.bias.copy_(dt_D + torch.log(-torch.expm1(-dt_D)))  # inverse softplus of dt
    return model
