"""The gradients of a block's weights, from those of the packed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda import compiler
from ..cuda.elements import ELEMENT
from .pack_weights import by_direction, plain_packed
from .plain import gradients as by_autograd


def unpack_gradients(
    norm_C: Tensor, in_proj: Tensor, directions: list[Tensor], dfolded: Tensor, dfilters: Tensor, dx_proj: Tensor,
    dstep_proj: Tensor, dchannels: Tensor, dtype: torch.dtype, flat: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Gradients of norm_C, in_proj and each direction's first six weights, from those of what `pack_weights` makes.

    Args:
        dfolded: Of the projection that contains the norm's weight.
        dfilters: (parts, 2, taps + 1, D), to be summed over parts, the bias behind the taps.
        dx_proj: (2, parts, padded R + 2N, D), to be summed over parts.
        dstep_proj: (2, other parts, D, padded R).
        dchannels: (2, 2, D): of skip, then of the step's bias.
        dtype: Of the products.
        flat: All in one tensor, for `unflatten`.
    """
    (_, C), D, taps = in_proj.shape, dfolded.shape[0] // 2, dfilters.shape[2] - 1
    P, padded, half = dx_proj.shape[2], dstep_proj.shape[3], len(directions) // 2
    weights = [norm_C, in_proj, *directions[:6], *directions[half : half + 6]]
    if flat:
        memory = torch.empty(sum(t.numel() for t in weights), device=norm_C.device, dtype=norm_C.dtype)
        gradients = unflatten(memory, weights)
    else:
        gradients = [torch.empty(t.shape, device=norm_C.device, dtype=norm_C.dtype) for t in weights]
    blocks = -(-C // 8) + -(-2 * D * (P + padded + taps + 2) // 256)
    vector = 4 if C % 4 == 0 else 1
    macros = dict(INPUT=ELEMENT[dtype], PARAMETER=ELEMENT[norm_C.dtype], VECTOR=vector, WIDTH=C, TAPS=taps)
    compiler.launch("block/unpack_gradients", "unpack_gradients", macros, blocks, 256, dict(
        norm=norm_C, in_proj=in_proj, dfolded=dfolded, dfilters=dfilters, dx_projs=dx_proj, dsteps=dstep_proj,
        filter_parts=dfilters.shape[0], x_parts=dx_proj.shape[1], step_parts=dstep_proj.shape[1], dchannels=dchannels,
        dnorm=gradients[0], din_proj=gradients[1], **by_direction("d", gradients[2:]), channels=D, projections_=P,
        rank_=directions[3].shape[1], padded_rank_=padded,
    ))  # fmt: skip
    return [memory] if flat else gradients


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of it one behind the other, with these shapes, at a fraction of what one view by one takes the host."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))


def plain(
    norm_C: Tensor, in_proj: Tensor, directions: list[Tensor], dfolded: Tensor, dfilters: Tensor, dx_proj: Tensor,
    dstep_proj: Tensor, dchannels: Tensor, dtype: torch.dtype, flat: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The definition of `unpack_gradients`."""
    half = len(directions) // 2

    def packed(norm_C, in_proj, *directions):
        folded, _, *rest = plain_packed(norm_C, in_proj, in_proj, directions, dtype)
        return torch.cat([t.flatten() for t in (folded, *rest)])

    (dskip, dstep_bias), dfilters = dchannels.unbind(1), dfilters.sum(0)
    dpacked = (
        dfolded, dx_proj.sum(1), dstep_proj.sum(1), dfilters[:, :-1].mT, dfilters[:, -1], dstep_bias, dskip
    )  # fmt: skip
    weights = [norm_C, in_proj, *directions[:6], *directions[half : half + 6]]
    found = by_autograd(packed, weights, torch.cat([t.flatten() for t in dpacked]))
    return [torch.cat([t.flatten() for t in found])] if flat else found
