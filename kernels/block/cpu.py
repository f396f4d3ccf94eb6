"""The bidirectional block on CPUs: what `vil.block.Block` computes, by few passes over memory, and its gradient.

Convolutions of both directions, norm, gate and the scan are kernels that Numba compiles; products are PyTorch's. Only
for tensors in fp32 that nobody but autograd looks at: compilers, modes and transformations see the block's parts.

B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
P columns of x_proj, R + 2N
"""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import backends
from ..cpu.compiler import LANES, Kernel
from ..scan import cpu_scan as scans

TAPS = (2, 3, 4)
REVERSE = (False, True)
ROWS = 16  # tokens of a task


def supports(x_BLC: Tensor, state_size: int) -> bool:
    """Whether `block` takes this residual stream and this number of states, here and now."""
    return (
        type(x_BLC) is Tensor
        and x_BLC.device.type == "cpu"
        and x_BLC.dtype == torch.float32
        and x_BLC.numel() > 0
        and state_size in backends.STATE_SIZES
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.is_autocast_enabled("cpu")
        and backends.backend_for(x_BLC.device) == "cpu"
    )


def supports_weights(weights: list[Tensor], taps: int) -> bool:
    """Whether `block` takes these, and this many taps."""
    return taps in TAPS and all([t.dtype == torch.float32 and t.device.type == "cpu" for t in weights])  # noqa: C419


def block(
    recurrence: str, x_BLC: Tensor, scale_B: Tensor | None, eps: float, norm_C: Tensor, in_proj: Tensor,
    out_proj: Tensor, directions: list[Tensor],
) -> Tensor:  # fmt: skip
    """x + scale * out_proj(mixer(norm(x))); the arguments are those of `op.block`, all in fp32."""
    arguments = recurrence, eps, x_BLC, scale_B, norm_C, in_proj, out_proj, *directions
    if torch.is_grad_enabled() and any([t.requires_grad for t in (x_BLC, *arguments[4:])]):  # noqa: C419
        return _Block.apply(*arguments)
    with torch.no_grad():
        return _forward(*arguments, keep=False)[0]


def _forward(recurrence, eps, x_BLC, scale_B, norm_C, in_proj, out_proj, *directions, keep):
    """x', and what backward needs."""
    x_BLC, norm_C, scale_B = x_BLC.contiguous(), norm_C.contiguous(), None if scale_B is None else scale_B.contiguous()
    (B, L, C), D, T = x_BLC.shape, out_proj.shape[1], x_BLC.shape[0] * x_BLC.shape[1]
    x_TC = x_BLC.view(T, C)
    h_TC, rho_T = torch.empty_like(x_TC), x_TC.new_empty(T)
    _rows("norm_forward", T, C, T, _bits(eps), *_addresses(x_TC, norm_C, h_TC, rho_T))
    uz_TE = torch.mm(h_TC, in_proj.t())
    v_2TD, projected_2TP, logits_2TD, scanned = _project(uz_TE, B, L, *_halves(directions))
    y_2BLD, states = scans.forward(recurrence, *scanned, REVERSE, keep)
    gated_TD = torch.empty_like(y_2BLD[0]).view(T, D)
    _rows("gate_forward", T, D, T, L, *_gate(uz_TE, y_2BLD, scale_B, gated_TD))
    out_TC = torch.addmm(x_TC, gated_TD, out_proj.t())
    kept = [rho_T, h_TC, uz_TE, v_2TD, projected_2TP, logits_2TD, y_2BLD, states] if keep else []
    return out_TC.view(B, L, C), kept


def _project(uz_TE: Tensor, B: int, L: int, *halves: list[Tensor]):
    """v, what x_proj makes of it, the logits, and all that the scan reads."""
    T, D = uz_TE.shape[0], uz_TE.shape[1] // 2
    taps, R = halves[0][0].shape[-1], halves[0][3].shape[1]
    v_2TD = uz_TE.new_empty(2, T, D)
    filters = [t.contiguous() for weights in halves for t in weights[:2]]
    _channels("conv_forward", taps, B, L, D, *_token_places(uz_TE, L), *_addresses(*filters, v_2TD))
    x_proj_2PD, step_proj_2DR = (torch.stack([weights[i] for weights in halves]) for i in (2, 3))
    projected_2TP = torch.bmm(v_2TD, x_proj_2PD.mT)
    logits_2TD = torch.bmm(projected_2TP[..., :R], step_proj_2DR.mT)
    return v_2TD, projected_2TP, logits_2TD, _scanned(v_2TD, projected_2TP, logits_2TD, B, L, *halves)


def _scanned(v_2TD, projected_2TP, logits_2TD, B, L, *halves):
    """x, logits, k, q, rates, skip and bias of the scan."""
    R = halves[0][3].shape[1]
    N = (projected_2TP.shape[2] - R) // 2
    per_token = [
        t.unflatten(1, (B, L)) for t in (v_2TD, logits_2TD, projected_2TP[..., R : R + N], projected_2TP[..., R + N :])
    ]
    rates = -torch.stack([weights[6] for weights in halves]).exp() if len(halves[0]) > 6 else None
    return *per_token, rates, *(torch.stack([weights[i] for weights in halves]) for i in (5, 4))


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recurrence, eps, *tensors):
        ctx.recurrence = recurrence
        out_BLC, kept = _forward(recurrence, eps, *tensors, keep=True)
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return out_BLC

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_BLC):
        saved = ctx.saved_tensors
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        return None, None, *_backward(ctx.recurrence, dout_BLC.contiguous(), *tensors, kept=kept)


def _backward(recurrence, dout_BLC, x_BLC, scale_B, norm_C, in_proj, out_proj, *directions, kept):
    """Gradients of all tensors in their order, None of scale."""
    rho_T, h_TC, uz_TE, v_2TD, projected_2TP, logits_2TD, y_2BLD, states = kept
    (B, L, C), D, T = x_BLC.shape, out_proj.shape[1], x_BLC.shape[0] * x_BLC.shape[1]
    x_TC, dout_TC, norm_C = x_BLC.contiguous().view(T, C), dout_BLC.view(T, C), norm_C.contiguous()
    scale_B, halves = None if scale_B is None else scale_B.contiguous(), _halves(directions)
    R, taps = directions[3].shape[1], directions[0].shape[-1]

    duz_TE, gated_TD, dy_TD = torch.empty_like(uz_TE), torch.empty_like(v_2TD[0]), torch.empty_like(v_2TD[0])
    dgated_TD = torch.mm(dout_TC, out_proj)
    gate = *_gate(uz_TE, y_2BLD, scale_B, gated_TD), *_addresses(dgated_TD, dy_TD), duz_TE.data_ptr() + 4 * D
    _rows("gate_backward", T, D, T, L, *gate)
    dout_proj = torch.mm(dout_TC.t(), gated_TD)

    scanned = _scanned(v_2TD, projected_2TP, logits_2TD, B, L, *halves)
    dy_2BLD = dy_TD.view(1, B, L, D).expand(2, B, L, D)
    dv_2BLD, dlogits_2BLD, dk_2BLN, dq_2BLN, drates, dchannels_22D = scans.backward(
        recurrence, dy_2BLD, *scanned, states, REVERSE
    )
    dv_2TD, dlogits_2TD = dv_2BLD.view(2, T, D), dlogits_2BLD.view(2, T, D)
    ddirections = []
    for g, weights in enumerate(halves):
        dstep_TR = torch.mm(dlogits_2TD[g], weights[3])
        dprojected_TP = torch.cat([dstep_TR, dk_2BLN[g].view(T, -1), dq_2BLN[g].view(T, -1)], dim=1)
        dx_proj = torch.mm(dprojected_TP.t(), v_2TD[g])
        dstep_proj = torch.mm(dlogits_2TD[g].t(), projected_2TP[g, :, :R])
        dv_2TD[g].addmm_(dprojected_TP, weights[2])
        drates_DN = [] if drates.numel() == 0 else [drates[g] * scanned[4][g]]  # d(-exp(A_log)) / dA_log is itself
        ddirections.append([dx_proj, dstep_proj, dchannels_22D[g, 1], dchannels_22D[g, 0], *drates_DN])
    filters = [t.contiguous() for weights in halves for t in weights[:2]]
    dfilters = uz_TE.new_empty(B, 2, taps + 1, D)
    _channels("conv_backward", taps, B, L, D, *_token_places(uz_TE, L), *_addresses(*filters, dv_2TD, duz_TE, dfilters))
    dfilters = dfilters.sum(0)
    for g in (0, 1):
        ddirections[g][:0] = [dfilters[g, :taps].t().unsqueeze(1), dfilters[g, taps]]

    din_proj, dh_TC = torch.mm(duz_TE.t(), h_TC), torch.mm(duz_TE, in_proj)
    dx_TC, dnorm = torch.empty_like(x_TC), x_TC.new_empty(-(-T // ROWS), C)
    _rows("norm_backward", T, C, T, *_addresses(x_TC, norm_C, rho_T, dh_TC, dout_TC, dx_TC, dnorm))
    return dx_TC.view(B, L, C), None, dnorm.sum(0), din_proj, dout_proj, *ddirections[0], *ddirections[1]


def _halves(directions) -> tuple[list[Tensor], list[Tensor]]:
    half = len(directions) // 2
    return directions[:half], directions[half:]


def _gate(uz_TE, y_2BLD, scale_B, gated_TD) -> tuple[int, ...]:
    D = gated_TD.shape[1]
    y = y_2BLD.data_ptr()
    scale = 0 if scale_B is None else scale_B.data_ptr()
    return uz_TE.data_ptr() + 4 * D, 8 * D, y, y + 2 * y_2BLD.numel(), scale, gated_TD.data_ptr()


def _token_places(uz_TE: Tensor, L: int) -> tuple[int, int, int]:
    """Of u: where it is, and the distance of images and of tokens."""
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
