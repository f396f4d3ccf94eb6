"""Bidirectional block on CPUs in fp32, with few passes over memory, and its gradient.

Convolutions of both directions, norm, gate and the scan are kernels compiled by Numba; products are PyTorch's.
`fused_operator` decides for which tensors the block runs fused. Under compilers, modes and functional transforms, the
separate parts of the block run instead.

    B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
    P columns of x_proj, R + 2N
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import once_differentiable
from ..cpu.compiler import LANES, Kernel
from ..scan import cpu_scan as scans
from .lines import Lines
from .tokens import Tokens
from .weights import BlockWeights, DirectionWeights, Normed, Options, needs_gradients

REVERSE = (False, True)
ROWS = 16  # number of tokens that one task of a CPU kernel processes


class Saved(NamedTuple):
    """Tensors that forward saves for backward, in addition to its inputs."""

    rstd: Tensor  # (T,) of the norm
    h: Tensor  # (T, C), normed
    uz: Tensor  # (T, 2D)
    v: Tensor  # (2, T, D), convolved
    projected: Tensor  # (2, T, P)
    step_logits: Tensor  # (2, T, D)
    y: Tensor  # (2, B, L, D), outputs of both directions
    states: Tensor  # (2, B, S, N, D), states between chunks of tokens


class Scanned(NamedTuple):
    """Input tensors of `cpu_scan.forward` and `cpu_scan.backward`."""

    x: Tensor
    step_logits: Tensor
    k: Tensor
    q: Tensor
    A: Tensor | None
    skip: Tensor | None
    step_bias: Tensor


def block(
    x_BLC: Tensor, weights: BlockWeights, options: Options, scale_B: Tensor | None = None, normed: Normed | None = None
) -> tuple[Tensor, None]:
    """Run a block on a CPU in fp32, as `block_op.block` does on a GPU, but without the norm for the next block."""
    x_BLC, weights = x_BLC.contiguous(), BlockWeights.of([t.contiguous() for t in weights.flat()])
    scale_B = None if scale_B is None else scale_B.contiguous()
    if needs_gradients(x_BLC, weights):
        y_BLC = _Block.apply(options, x_BLC, scale_B, *weights.flat())
    else:
        y_BLC, _ = _forward(options, x_BLC, scale_B, weights, keep=False)
    return Tokens(y_BLC.shape[1], options.class_token_only).outputs(y_BLC), None


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, x_BLC, scale_B, *flat):
        y_BLC, saved = _forward(options, x_BLC, scale_B, BlockWeights.of(flat), keep=True)
        assert saved is not None, "pooled blocks have no backward on CPUs"
        ctx.options = options
        ctx.save_for_backward(x_BLC, scale_B, *saved, *flat)
        return y_BLC

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BLC):
        x_BLC, scale_B, *tensors = ctx.saved_tensors
        saved, weights = Saved(*tensors[: len(Saved._fields)]), BlockWeights.of(tensors[len(Saved._fields) :])
        dx_BLC, dweights = _backward(ctx.options, dy_BLC.contiguous(), x_BLC, scale_B, weights, saved)
        return None, dx_BLC, None, *dweights.flat()


def _forward(
    options: Options, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, keep: bool
) -> tuple[Tensor, Saved | None]:
    """Return the block's output, and the tensors that backward needs, which are None for a pooled block.

    Unless `keep`, the states of the scan are not saved.
    """
    (B, L, C), T = x_BLC.shape, x_BLC.shape[0] * x_BLC.shape[1]
    x_TC = x_BLC.view(T, C)
    h_TC, rstd_T = torch.empty_like(x_TC), x_TC.new_empty(T)
    _rows("norm_forward", T, C, T, _bits(options.eps), *_addresses(x_TC, weights.norm, h_TC, rstd_T))
    uz_TE = torch.mm(h_TC, weights.in_proj.t())
    if options.lines is not None:
        gated_TD = _pooled(options.recurrence, options.lines, uz_TE, scale_B, B, L, weights)
        y_TC = torch.addmm(x_TC, gated_TD, weights.out_proj.t())
        return y_TC.view(B, L, C), None
    v_2TD, projected_2TP, step_logits_2TD = _project(uz_TE, B, L, weights)
    scanned = _scanned(v_2TD, projected_2TP, step_logits_2TD, B, L, weights)
    y_2BLD, states = scans.forward(options.recurrence, *scanned, REVERSE, keep)
    gated_TD = torch.empty_like(y_2BLD[0]).view(T, -1)
    _rows("gate_forward", T, gated_TD.shape[1], T, L, *_gate(uz_TE, y_2BLD, scale_B, gated_TD))
    y_TC = torch.addmm(x_TC, gated_TD, weights.out_proj.t())
    return y_TC.view(B, L, C), Saved(rstd_T, h_TC, uz_TE, v_2TD, projected_2TP, step_logits_2TD, y_2BLD, states)


def _project(uz_TE: Tensor, B: int, L: int, weights: BlockWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Return both directions' convolution outputs v, x_proj outputs, and step sizes before bias and activation."""
    T, (_, D, _, R, K) = uz_TE.shape[0], weights.sizes()
    v_2TD, filters = uz_TE.new_empty(2, T, D), _filters(weights)
    _channels("conv_forward", K, B, L, D, *_token_addresses(uz_TE, L), *_addresses(*filters, v_2TD))
    # the copy is row-major, so that a token's keys and queries are contiguous, as the scan's kernel requires
    projected_2TP = torch.bmm(_both(weights, "x_proj"), v_2TD.mT).mT.contiguous()
    return v_2TD, projected_2TP, torch.bmm(projected_2TP[..., :R], _both(weights, "step_proj").mT)


def _pooled(
    recurrence: str, lines: Lines, uz_TE: Tensor, scale_B: Tensor | None, B: int, L: int, weights: BlockWeights
) -> Tensor:
    """Return the input of out_proj for a block that scans row or column means. The result is a view of `uz_TE`."""
    (_, D, N, R, K), T = weights.sizes(), len(uz_TE)
    skips = [direction.skip for direction in weights.directions]
    means_2BSD = uz_TE.new_empty(2, B, lines.S, D)
    _channels(
        "pool_forward", K, B, L, D, *_token_addresses(uz_TE, L), *_addresses(*_filters(weights), *skips),
        *lines.arguments().values(), means_2BSD.data_ptr(),
    )  # fmt: skip
    projected_2TP, step_logits_2TD = uz_TE.new_empty(2, B * lines.S, R + 2 * N), uz_TE.new_empty(2, B * lines.S, D)
    for mean_BSD, projected_TP, step_logits_TD, direction in zip(
        means_2BSD, projected_2TP, step_logits_2TD, weights.directions
    ):
        torch.mm(mean_BSD.view(-1, D), direction.x_proj.t(), out=projected_TP)
        torch.mm(projected_TP[:, :R], direction.step_proj.t(), out=step_logits_TD)
    scanned = _scanned(means_2BSD.view(2, -1, D), projected_2TP, step_logits_2TD, B, lines.S, weights)
    y_2BSD, _ = scans.forward(recurrence, *scanned._replace(skip=None), REVERSE, False)
    scale = 0 if scale_B is None else scale_B.data_ptr()
    inputs = uz_TE.data_ptr(), 8 * D, *_addresses(*y_2BSD), scale
    _rows("pooled_gate_forward", T, D, T, L, *inputs, lines.number, lines.length, lines.columns)
    return uz_TE[:, :D]


def _both(weights: BlockWeights, name: str) -> Tensor:
    return torch.stack([getattr(direction, name) for direction in weights.directions])


def _filters(weights: BlockWeights) -> list[Tensor]:
    return [t for direction in weights.directions for t in (direction.conv, direction.conv_bias)]


def _scanned(v_2TD, projected_2TP, step_logits_2TD, B: int, L: int, weights: BlockWeights) -> Scanned:
    _, _, N, R, _ = weights.sizes()
    k_2TN, q_2TN = projected_2TP[..., R : R + N], projected_2TP[..., R + N :]
    x, step_logits, k, q = (t.unflatten(1, (B, L)) for t in (v_2TD, step_logits_2TD, k_2TN, q_2TN))
    A_2DN = None if weights.directions[0].A_log is None else -_both(weights, "A_log").exp()
    return Scanned(x, step_logits, k, q, A_2DN, _both(weights, "skip"), _both(weights, "step_bias"))


def _backward(
    options: Options, dy_BLC: Tensor, x_BLC: Tensor, scale_B: Tensor | None, weights: BlockWeights, saved: Saved
) -> tuple[Tensor, BlockWeights]:
    """Return the gradients of x and of all weights."""
    (B, L, C), D, T = x_BLC.shape, weights.out_proj.shape[1], len(saved.uz)
    x_TC, dout_TC = x_BLC.view(T, C), dy_BLC.view(T, C)
    duz_TE, gated_TD, dy_TD = (torch.empty_like(t) for t in (saved.uz, saved.v[0], saved.v[0]))
    dgated_TD = torch.mm(dout_TC, weights.out_proj)
    gate = _gate(saved.uz, saved.y, scale_B, gated_TD)
    dz = duz_TE.data_ptr() + 4 * D
    _rows("gate_backward", T, D, T, L, *gate, *_addresses(dgated_TD, dy_TD), dz)
    directions = _through_directions(options.recurrence, dy_TD.view(B, L, D), weights, saved, duz_TE)
    dh_TC, dx_TC, dnorm = torch.mm(duz_TE, weights.in_proj), torch.empty_like(x_TC), x_TC.new_empty(-(-T // ROWS), C)
    _rows("norm_backward", T, C, T, *_addresses(x_TC, weights.norm, saved.rstd, dh_TC, dout_TC, dx_TC, dnorm))
    din_proj, dout_proj = torch.mm(duz_TE.t(), saved.h), torch.mm(dout_TC.t(), gated_TD)
    return dx_TC.view(B, L, C), BlockWeights(dnorm.sum(0), din_proj, dout_proj, directions)


def _through_directions(
    recurrence: str, dy_BLD: Tensor, weights: BlockWeights, saved: Saved, duz_TE: Tensor
) -> tuple[DirectionWeights, DirectionWeights]:
    """Backpropagate through scans, projections and convolutions to u. Return the gradients of both directions' weights.

    The gradient of u is written to `duz_TE`.
    """
    (B, L, D), T, R, K = dy_BLD.shape, len(duz_TE), weights.sizes().R, weights.sizes().K
    scanned = _scanned(saved.v, saved.projected, saved.step_logits, B, L, weights)
    dv_2BLD, dstep_logits_2BLD, dk_2BLN, dq_2BLN, dA_2DN, dchannels_22D = scans.backward(
        recurrence, dy_BLD.expand(2, B, L, D), *scanned, saved.states, REVERSE
    )
    dv_2TD, dstep_logits_2TD = dv_2BLD.view(2, T, D), dstep_logits_2BLD.view(2, T, D)
    # a product with few rows takes half as long as one with few columns
    dstep_2RT = torch.bmm(_both(weights, "step_proj").mT, dstep_logits_2TD.mT)
    dprojected_2TP = torch.cat([dstep_2RT.mT, dk_2BLN.view(2, T, -1), dq_2BLN.view(2, T, -1)], dim=2)
    dv_2TD.baddbmm_(dprojected_2TP, _both(weights, "x_proj"))
    dx_proj_2PD = torch.bmm(dprojected_2TP.mT, saved.v)
    dstep_proj_2DR = torch.bmm(saved.projected[..., :R].mT, dstep_logits_2TD).mT
    dfilters = duz_TE.new_empty(B, 2, K + 1, D)
    tensors = *_filters(weights), dv_2TD, duz_TE, dfilters
    _channels("conv_backward", K, B, L, D, *_token_addresses(saved.uz, L), *_addresses(*tensors))
    dfilters_2KD, (dskip_2D, dstep_bias_2D) = dfilters.sum(0), dchannels_22D.unbind(1)
    dA_log = (None, None) if scanned.A is None else dA_2DN * scanned.A  # because A = -exp(A_log)
    first, second = (
        DirectionWeights(
            dfilters_2KD[g, :K].t().unsqueeze(1), dfilters_2KD[g, K], dx_proj_2PD[g], dstep_proj_2DR[g],
            dstep_bias_2D[g],
            dskip_2D[g], dA_log[g],
        ) for g in (0, 1)
    )  # fmt: skip
    return first, second


def _gate(uz_TE, y_2BLD, scale_B, gated_TD) -> tuple[int, ...]:
    D = gated_TD.shape[1]
    y = y_2BLD.data_ptr()
    scale = 0 if scale_B is None else scale_B.data_ptr()
    return uz_TE.data_ptr() + 4 * D, 8 * D, y, y + 2 * y_2BLD.numel(), scale, gated_TD.data_ptr()


def _token_addresses(uz_TE: Tensor, L: int) -> tuple[int, int, int]:
    """Return the address of u (the first half of the columns of uz), and its byte strides of images and of tokens."""
    E = uz_TE.shape[1]
    return uz_TE.data_ptr(), 4 * L * E, 4 * E


def _addresses(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def _bits(number: float) -> int:
    return struct.unpack("i", struct.pack("f", number))[0]


def _rows(factory: str, T: int, width: int, *numbers: int) -> None:
    tasks = -(-T // ROWS)
    _kernel(factory).launch(tasks, tasks, ROWS, width, *numbers)


def _channels(factory: str, taps: int, B: int, L: int, D: int, *numbers: int) -> None:
    blocks = -(-D // LANES)
    _kernel(factory, taps).launch(B * blocks, B * blocks, blocks, B, L, D, *numbers)


@functools.cache
def _kernel(factory: str, *constants: int) -> Kernel:
    return Kernel(f"{__package__}.cpu_kernels", factory, *constants)
