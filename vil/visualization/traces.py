"""Values of the scans in each block: each token's contribution to the class token, step size and state norm.

The docstring of `vil.viz` lists the dimension letters.
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
    """Values (B, G, L) of each token in both scan directions of a block, with tokens in image order.

    The scans of a pooled block read rows or columns of patches. Each patch gets the value of its row or column.

    Attributes:
        relevance: Norm over channels of the token's contribution to the scan output at the class token. The value is 0
            for tokens after the class token in scan order.
        step: Mean over channels of beta = sigmoid(step logits) in ViL, or of the time step dt in ViM, which determine
            how strongly the token is written to the state.
        state_norm: Frobenius norm of the state (D, N) after the token is read.
    """

    relevance: Tensor
    step: Tensor
    state_norm: Tensor


@torch.no_grad()
def trace_scans(model: VisionLonghorn, images: Tensor) -> list[Trace]:
    """Return a trace of the scans in every block for images (B, 3, H, W).

    Raises:
        TypeError: The model is not a VisionLonghorn, or the class of a mixer is unknown.
    """
    model = check_model(model)
    for block in blocks_of(model):
        if type(block.mixer) not in KNOWN_MIXERS:
            name = type(block.mixer).__name__
            raise TypeError(f"mixer must be LonghornMixer or MambaMixer, got {name}: vil.viz supports no other mixer")
    with _recorded_tokens(model) as recorded:
        model.forward_features(images)
    grid = model.grid_of(images)
    return [_trace_block(block, recorded, grid) for block in blocks_of(model)]


def check_model(model: nn.Module) -> VisionLonghorn:
    """Return the VisionLonghorn inside the wrappers of PyTorch and timm; raise a TypeError for other models."""
    model = unwrapped(model)
    if not isinstance(model, VisionLonghorn):
        raise TypeError(f"model must be a VisionLonghorn, got {type(model).__name__}")
    return model


def blocks_of(model: VisionLonghorn) -> list[Block]:
    return cast("list[Block]", list(model.blocks))  # cast, because nn.Sequential has no type parameter


@contextmanager
def _recorded_tokens(model: VisionLonghorn):
    """Record the tokens that each direction reads. The recording uses hooks, which make the blocks run unfused."""
    recorded: dict[LonghornDirection, Tensor] = {}

    def record(direction: LonghornDirection):
        return direction.x_proj.register_forward_pre_hook(lambda _, inputs: recorded.update({direction: inputs[0]}))

    handles = [record(direction) for block in blocks_of(model) for direction in block.mixer.directions]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _trace_block(block: Block, recorded: dict[LonghornDirection, Tensor], grid: tuple[int, int]) -> Trace:
    forward, backward = block.mixer.directions
    forward_trace = _trace_direction(block.mixer.recurrence, forward, recorded[forward], reverse=False)
    backward_trace = _trace_direction(block.mixer.recurrence, backward, recorded[backward], reverse=True)

    def of_both(name: str) -> Tensor:
        values_BGS = torch.stack([getattr(forward_trace, name), getattr(backward_trace, name)], dim=1)
        return _of_tokens(values_BGS, block.pool, grid)

    return Trace(relevance=of_both("relevance"), step=of_both("step"), state_norm=of_both("state_norm"))


def _of_tokens(values_BGS: Tensor, pool: str | None, grid: tuple[int, int]) -> Tensor:
    """Expand values per scanned row or column, (B, G, S), to values per patch, (B, G, L).

    Without pooling, the values are returned unchanged.
    """
    if pool is None:
        return values_BGS
    h, w = grid
    B, G, _ = values_BGS.shape
    values_XL1 = repeat_rows(values_BGS.flatten(0, 1).unsqueeze(-1), h if pool == "columns" else w)
    if pool == "columns":
        values_XL1 = transpose_grid(values_XL1, w, h)
    return values_XL1.view(B, G, -1)


@dataclass
class Coefficients:
    """Coefficients of the linear recurrence S_t = decay_t S_{t-1} + drive_t of one direction.

    `decay` and `drive` have the shape (T, B, N, D).
    """

    decay: Tensor
    drive: Tensor


def _trace_direction(recurrence: str, direction: LonghornDirection, v_BLD: Tensor, reverse: bool) -> Trace:
    """Return the relevance, step size and state norm of each token in one scan direction, each of shape (B, L).

    Args:
        recurrence: Name of the recurrence, "longhorn" or "selective".
        direction: Module of the direction.
        v_BLD: Tokens that the direction reads.
        reverse: Whether the direction scans from the last token to the first.
    """
    step_logits_BLD, k_BLN, q_BLN = direction.project(v_BLD)
    step_logits_BLD = at_least_fp32(step_logits_BLD) + direction.step_bias()
    v_BLD, k_BLN = at_least_fp32(v_BLD), at_least_fp32(k_BLN)
    step_BLD = F.softplus(step_logits_BLD) if recurrence == "selective" else step_logits_BLD.sigmoid()
    coefficients = _coefficients(recurrence, direction, v_BLD, step_logits_BLD, k_BLN, reverse)

    class_token = (v_BLD.shape[1] - 1) // 2
    relevance_TB = _relevance(coefficients, class_token, q_BLN[:, class_token], reverse)
    return Trace(
        relevance=_in_image_order(relevance_TB, reverse),
        step=step_BLD.mean(-1),
        state_norm=_in_image_order(_state_norms(coefficients), reverse),
    )


def _coefficients(
    recurrence: str,
    direction: LonghornDirection,
    v_BLD: Tensor,
    step_logits_BLD: Tensor,
    k_BLN: Tensor,
    reverse: bool,
) -> Coefficients:
    """Return the coefficients of the state update, computed by the scan's reference backend."""
    selective = recurrence == "selective"
    inputs_BLX = [v_BLD, F.softplus(step_logits_BLD) if selective else step_logits_BLD, k_BLN]
    if reverse:
        inputs_BLX = [x_BLX.flip(1) for x_BLX in inputs_BLX]
    inputs_GTBX = [x_BLX.transpose(0, 1).unsqueeze(0) for x_BLX in inputs_BLX]
    if selective:
        A_DN = -at_least_fp32(cast(Tensor, direction.A_log)).exp()
        inputs_GTBX.append(A_DN.T.unsqueeze(0))

    B, T, D = v_BLD.shape
    decay_GTBND = v_BLD.new_empty(1, T, B, k_BLN.shape[-1], D)
    drive_GTBND = torch.empty_like(decay_GTBND)
    RECURRENCES[recurrence].coefficients(decay_GTBND, drive_GTBND, *inputs_GTBX)
    return Coefficients(decay_GTBND[0], drive_GTBND[0])


def _state_norms(coefficients: Coefficients) -> Tensor:
    """Return the Frobenius norm (T, B) of the state after each token."""
    state_BND = torch.zeros_like(coefficients.drive[0])
    norms = []
    for decay_BND, drive_BND in zip(coefficients.decay, coefficients.drive):
        state_BND = decay_BND * state_BND + drive_BND
        norms.append(state_BND.flatten(1).norm(dim=1))
    return torch.stack(norms)


def _relevance(coefficients: Coefficients, class_token: int, q_BN: Tensor, reverse: bool) -> Tensor:
    """Return the norm (T, B) of each token's contribution to the scan output at the class token.

    The contribution is the token's drive, multiplied by the decays of all later tokens up to the class token, and then
    by the query of the class token.
    """
    T = len(coefficients.drive)
    position = T - 1 - class_token if reverse else class_token
    contribution_TBND = torch.zeros_like(coefficients.drive)
    remaining_BND = torch.ones_like(contribution_TBND[0])
    for t in range(position, -1, -1):
        contribution_TBND[t] = remaining_BND * coefficients.drive[t]
        remaining_BND = remaining_BND * coefficients.decay[t]
    added_TBD = torch.einsum("tbnd,bn->tbd", contribution_TBND, q_BN.to(contribution_TBND.dtype))
    return added_TBD.norm(dim=-1)


def _in_image_order(values_TB: Tensor, reverse: bool) -> Tensor:
    return (values_TB.flip(0) if reverse else values_TB).T


def patch_maps(model: VisionLonghorn, values_BGL: Tensor, image_size: Sequence[int]) -> Tensor:
    """Reshape token values (B, G, L) to patch maps (B, G, h, w), without the class token."""
    height, width = image_size[-2:]
    h, w = check_model(model).patch_embed.dynamic_feat_size((height, width))
    B, G, _ = values_BGL.shape
    patches, _ = split_class_token(values_BGL.flatten(0, 1).unsqueeze(-1))
    return patches.reshape(B, G, h, w)


def reading(model: VisionLonghorn, images: Tensor) -> Tensor:
    """Return maps (B, h, w) of how much the class token reads from each patch, which sum to 1 per image.

    A map is the mean over all blocks of the relevance, normalized to a sum of 1 in each block. A map does not depend on
    a class: a patch that is read can be evidence for or against a class. The tokens of later blocks are mixtures of
    patches.
    """
    shares = []
    for trace in trace_scans(model, images):
        relevance_Bhw = patch_maps(model, trace.relevance, images.shape).sum(1)
        shares.append(relevance_Bhw / relevance_Bhw.sum((1, 2), keepdim=True))
    return torch.stack(shares).mean(0)
