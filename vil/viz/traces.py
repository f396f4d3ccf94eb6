"""Traces of the scans of each block: relevance for the class token, steps and state norms.

`vil.viz` lists the dimension letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.scan.torch_scan import RECURRENCES
from ..models.block import KNOWN_MIXERS, Block, LonghornDirection, at_least_fp32
from ..models.tokens import repeat_rows, split_class_token, transpose_grid
from ..models.vision_longhorn import VisionLonghorn
from ..wrappers import unwrapped


@dataclass
class Trace:
    """Per-token values of the recurrences of one block, each (B, G, L) in the order of the image.

    The recurrences of a pooled block read rows or columns of patches, so each patch has the value of its row or column.

    Attributes:
        relevance: Norm over channels of the token's contribution to the scan's output at the class token. A direction
            reads only tokens that precede the class token in its order.
        step: How much of the token is written to the state, as the mean over channels: beta in ViL, the time step dt in
            ViM.
        state_norm: Frobenius norm of the state (D, N) after the token.
    """

    relevance: Tensor
    step: Tensor
    state_norm: Tensor


@torch.no_grad()
def trace_scans(model: VisionLonghorn, images: Tensor) -> list[Trace]:
    """Trace the scans of every block on images (B, 3, H, W).

    Raises:
        TypeError: The model is not a VisionLonghorn, or a mixer's class is unknown.
    """
    model = check_model(model)
    for block in blocks_of(model):
        if type(block.mixer) not in KNOWN_MIXERS:
            name = type(block.mixer).__name__
            raise TypeError(
                f"mixer must be LonghornMixer or MambaMixer, got {name}: add its recurrence to vil/viz/traces.py"
            )
    with _recorded_tokens(model) as recorded:
        model.forward_features(images)
    traces = []
    for block in blocks_of(model):
        parts = [
            _trace(block.mixer.recurrence, direction, recorded[direction], reverse)
            for direction, reverse in zip(block.mixer.directions, (False, True))
        ]
        values = (torch.stack(pair, dim=1) for pair in zip(*parts))
        traces.append(Trace(*(_of_tokens(v, block.pool, model.grid_of(images)) for v in values)))
    return traces


def check_model(model: nn.Module) -> VisionLonghorn:
    """Return the VisionLonghorn inside of wrappers of PyTorch and timm; raise a TypeError for other models."""
    model = unwrapped(model)
    if not isinstance(model, VisionLonghorn):
        raise TypeError(f"model must be a VisionLonghorn, got {type(model).__name__}")
    return model


def blocks_of(model: VisionLonghorn) -> list[Block]:
    return cast("list[Block]", list(model.blocks))  # nn.Sequential has no type parameter


@contextmanager
def _recorded_tokens(model: VisionLonghorn):
    """Record the tokens that each direction reads, by hooks, which make the blocks run unfused."""
    recorded: dict[LonghornDirection, Tensor] = {}

    def record(direction: LonghornDirection):
        return direction.x_proj.register_forward_pre_hook(lambda _, inputs: recorded.update({direction: inputs[0]}))

    handles = [record(direction) for block in blocks_of(model) for direction in block.mixer.directions]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _of_tokens(values_BGS: Tensor, pool: str | None, grid: tuple[int, int]) -> Tensor:
    """Expand values of the scanned tokens (B, G, S) to values of the block's tokens (B, G, L)."""
    if pool is None:
        return values_BGS
    h, w = grid
    columns = pool == "columns"
    values_XL1 = repeat_rows(values_BGS.flatten(0, 1).unsqueeze(-1), h if columns else w)
    values_XL1 = transpose_grid(values_XL1, w, h) if columns else values_XL1
    return values_XL1.view(*values_BGS.shape[:2], -1)


def _trace(
    recurrence: str, direction: LonghornDirection, v_BLD: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return relevance_BL, step_BL and state_norm_BL of one direction."""
    step_logits_BLD, k_BLN, q_BLN = direction.project(v_BLD)
    decay_TBND, drive_TBND, step_BLD = _coefficients(recurrence, direction, v_BLD, step_logits_BLD, k_BLN, reverse)
    T = len(decay_TBND)
    state_BND, norms = torch.zeros_like(drive_TBND[0]), []
    for decay_BND, drive_BND in zip(decay_TBND, drive_TBND):
        state_BND = decay_BND * state_BND + drive_BND
        norms.append(state_BND.flatten(1).norm(dim=1))
    # The class token reads a token's drive multiplied by the product of all later decays.
    middle = (T - 1) // 2
    position = T - 1 - middle if reverse else middle
    contribution_TBND = torch.zeros_like(drive_TBND)
    left_BND = torch.ones_like(state_BND)
    for t in range(position, -1, -1):
        contribution_TBND[t] = left_BND * drive_TBND[t]
        left_BND = left_BND * decay_TBND[t]
    added_TBD = torch.einsum("tbnd,bn->tbd", contribution_TBND, q_BLN[:, middle].to(contribution_TBND.dtype))
    relevance_BL = _in_image_order(added_TBD.norm(dim=-1), reverse)
    return relevance_BL, step_BLD.mean(-1), _in_image_order(torch.stack(norms), reverse)


def _in_image_order(values_TB: Tensor, reverse: bool) -> Tensor:
    return (values_TB.flip(0) if reverse else values_TB).T


def _coefficients(recurrence, direction, v_BLD, step_logits_BLD, k_BLN, reverse) -> tuple[Tensor, Tensor, Tensor]:
    """Return decay_TBND and drive_TBND of S_t = decay_t S_{t-1} + drive_t, and the tokens' step_BLD (beta or dt)."""
    v_BLD, step_logits_BLD, k_BLN = (at_least_fp32(t) for t in (v_BLD, step_logits_BLD, k_BLN))
    step_logits_BLD = step_logits_BLD + direction.step_bias()
    selective = recurrence == "selective"
    step_BLD = F.softplus(step_logits_BLD) if selective else step_logits_BLD.sigmoid()
    inputs = [v_BLD, step_BLD if selective else step_logits_BLD, k_BLN]
    inputs_GTBX = [(t.flip(1) if reverse else t).transpose(0, 1)[None] for t in inputs]
    A_1ND = [-at_least_fp32(direction.A_log).exp().T[None]] if selective else []
    shape = 1, *inputs_GTBX[0].shape[1:3], k_BLN.shape[-1], v_BLD.shape[-1]
    decay_GTBND, drive_GTBND = (v_BLD.new_empty(shape) for _ in range(2))
    RECURRENCES[recurrence].coefficients(decay_GTBND, drive_GTBND, *inputs_GTBX, *A_1ND)
    return decay_GTBND[0], drive_GTBND[0], step_BLD


def patch_maps(model: VisionLonghorn, values_BGL: Tensor, image_size: Sequence[int]) -> Tensor:
    """Reshape token values (B, G, L) to patch maps (B, G, h, w), dropping the class token."""
    patches, _ = split_class_token(values_BGL.flatten(0, 1).unsqueeze(-1))
    height, width = image_size[-2:]
    grid = check_model(model).patch_embed.dynamic_feat_size((height, width))
    return patches.reshape(*values_BGL.shape[:2], *grid)


def reading(model: VisionLonghorn, images: Tensor) -> Tensor:
    """Return how much of each patch the class token reads, (B, h, w): the mean relevance over all blocks, summing to 1.

    The map does not depend on a class: what the class token reads may be evidence for or against a class. In all blocks
    except the first, each token is already a mixture of patches.
    """
    maps = [patch_maps(model, trace.relevance, images.shape).sum(1) for trace in trace_scans(model, images)]
    return torch.stack([map_Bhw / map_Bhw.sum((1, 2), keepdim=True) for map_Bhw in maps]).mean(0)
