"""The bidirectional block as one PyTorch operator for NVIDIA GPUs, `vil::block`, and its gradient.

It computes what `vil.block.Block` does, by fewer kernels and with fewer tensors kept for backward: the norm's weight is
folded into the projection behind it, both directions share each kernel, the residual addition is part of the last
product, and backward computes convolutions, projections and gate again.

B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu
from .cuda import elementwise

REVERSE = [False, True]

torch.library.define(
    "vil::block",
    "(str recurrence, Tensor x_BLC, Tensor? scale_B, float eps, Tensor norm_C, Tensor in_proj, Tensor out_proj,"
    " Tensor[] directions, ScalarType dtype, bool keep)"
    " -> (Tensor x_BLC, Tensor xhat_TC, Tensor scale_T, Tensor uz_BLE, Tensor mean_BLD, Tensor states)",
)
torch.library.define(
    "vil::block_backward",
    "(str recurrence, Tensor dx_BLC, Tensor? scale_B, Tensor norm_C, Tensor in_proj, Tensor out_proj,"
    " Tensor[] directions, Tensor xhat_TC, Tensor scale_T, Tensor uz_BLE, Tensor mean_BLD, Tensor states)"
    " -> Tensor[]",
)


def unsupported(x_BLC: Tensor, state_size: int) -> str | None:
    """Why `block` does not run on this device and these states, or None."""
    if state_size not in gpu.STATE_SIZES or gpu.backend(x_BLC.device) != "cuda":
        return "the fused block needs the cuda backend and a state size of its own"
    return None


def block(
    recurrence: str, x_BLC: Tensor, scale_B: Tensor | None, eps: float, norm_C: Tensor, in_proj: Tensor,
    out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """x + scale * out_proj(mixer(norm(x))) of the residual stream x (fp32), computed in `dtype`.

    Args:
        recurrence: "longhorn" or "selective".
        x_BLC: Residual stream, fp32.
        scale_B: Stochastic depth: 0 or 1 / (1 - rate) for each image. None for 1.
        eps: Of the norm.
        norm_C: Weight of the norm.
        in_proj: (2D, C).
        out_proj: (C, D).
        directions: As `Directions` takes them.
        dtype: float32, bfloat16 or float16.
    """
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_BLC, norm_C, in_proj, out_proj, *directions))
    return torch.ops.vil.block(
        recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep
    )[0]  # fmt: skip


class Directions:
    """The weights of both directions as the kernels take them.

    `parameters` holds, for each direction in turn: convolution weight and bias, x_proj, step_proj weight and bias, skip,
    and A_log if the recurrence has rates.
    """

    def __init__(self, parameters: list[Tensor], dtype: torch.dtype):
        half = len(parameters) // 2
        pairs = list(zip(parameters[:half], parameters[half:]))
        self.filters = [t.float().reshape(t.shape[0], -1).contiguous() for direction in zip(*pairs[:2]) for t in direction]
        self.x_proj = torch.stack(pairs[2]).to(dtype)  # (2, R + 2N, D)
        self.step_proj = torch.stack(pairs[3]).to(dtype)  # (2, D, R)
        self.step_bias, self.skip = torch.stack([*pairs[4], *pairs[5]]).float().unflatten(0, (2, 2))
        self.rates = -torch.stack(pairs[6]).float().exp() if len(pairs) > 6 else None  # (2, D, N)

    def project(self, u_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the recurrence reads, v, the step's logits, keys and queries; and the steps of low rank."""
        B, L, D = u_BLD.shape
        R = self.step_proj.shape[-1]
        v_2BLD = elementwise.convolve(u_BLD, self.filters)
        projected_2TP = torch.bmm(v_2BLD.view(2, -1, D), self.x_proj.mT)
        step_2TR, k_2TN, q_2TN = projected_2TP.tensor_split((R, (R + projected_2TP.shape[-1]) // 2), dim=-1)
        logits_2TD = torch.bmm(step_2TR, self.step_proj.mT)
        k_2BLN, q_2BLN = k_2TN.unflatten(1, (B, L)), q_2TN.unflatten(1, (B, L))
        return v_2BLD, logits_2TD.view(2, B, L, D), k_2BLN, q_2BLN, step_2TR


@torch.library.impl("vil::block", "CUDA")
def _block(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep):
    if x_BLC.numel() == 0:
        return _fake_block(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep)
    B, L, C = x_BLC.shape
    x_TC = x_BLC.contiguous().view(-1, C)
    xhat_TC, scale_T = elementwise.rms_norm(x_TC, eps, dtype)
    uz_BLE = torch.mm(xhat_TC, _folded(in_proj, norm_C, dtype).t()).view(B, L, -1)
    u_BLD, z_BLD = uz_BLE.chunk(2, dim=-1)
    weights = Directions(directions, dtype)
    v_2BLD, logits_2BLD, k_2BLN, q_2BLN, _ = weights.project(u_BLD)
    y_2BLD, states = gpu.scan(
        "cuda", recurrence, v_2BLD, logits_2BLD, k_2BLN, q_2BLN, weights.rates, weights.skip, weights.step_bias, REVERSE, keep
    )
    gated_BLD, mean_BLD = elementwise.gate(y_2BLD, z_BLD, scale_B, keep)
    x_TC = _addmm(x_TC, gated_BLD.flatten(0, 1), out_proj.to(dtype).t())
    if not keep:
        xhat_TC, scale_T, uz_BLE = (t.new_empty(0) for t in (xhat_TC, scale_T, uz_BLE))
    return x_TC.view(B, L, C), xhat_TC, scale_T, uz_BLE, mean_BLD, states


@torch.library.impl("vil::block_backward", "CUDA")
def _block_backward(
    recurrence, dx_BLC, scale_B, norm_C, in_proj, out_proj, directions, xhat_TC, scale_T, uz_BLE, mean_BLD, states
):
    """Gradients of x, norm_C, in_proj, out_proj and of every tensor of `directions`."""
    (B, L, E), C, D, dtype = uz_BLE.shape, xhat_TC.shape[1], mean_BLD.shape[-1], uz_BLE.dtype
    u_BLD, z_BLD = uz_BLE.chunk(2, dim=-1)
    duz_BLE = torch.empty_like(uz_BLE)
    du_BLD, dz_BLD = duz_BLE.chunk(2, dim=-1)
    dx_TC = dx_BLC.contiguous().view(-1, C)

    dout_TC = dx_TC.to(dtype)
    dgated_BLD = torch.mm(dout_TC, out_proj.to(dtype)).view(B, L, D)
    dy_BLD, gated_BLD = elementwise.gate_backward(dgated_BLD, mean_BLD, z_BLD, scale_B, dz_BLD)
    dout_proj = _mm(dout_TC.t(), gated_BLD.flatten(0, 1))
    del dgated_BLD, gated_BLD, dout_TC

    weights = Directions(directions, dtype)
    v_2BLD, logits_2BLD, k_2BLN, q_2BLN, step_2TR = weights.project(u_BLD)
    dv_2BLD, dlogits_2BLD, dk_2BLN, dq_2BLN, drates, dchannels = gpu.scan_backward(
        "cuda", recurrence, dy_BLD.expand(2, -1, -1, -1), v_2BLD, logits_2BLD, k_2BLN, q_2BLN,
        weights.rates, weights.skip, weights.step_bias, states, REVERSE,
    )  # fmt: skip
    del logits_2BLD, dy_BLD
    dlogits_2TD, dv_2TD = dlogits_2BLD.flatten(1, 2), dv_2BLD.flatten(1, 2)
    dprojected_2TP = torch.cat(
        [torch.bmm(dlogits_2TD, weights.step_proj), dk_2BLN.flatten(1, 2), dq_2BLN.flatten(1, 2)], dim=-1
    )
    dstep_proj = _bmm(dlogits_2TD.mT, step_2TR)
    dx_proj = _bmm(dprojected_2TP.mT, v_2BLD.flatten(1, 2))
    dv_2TD.baddbmm_(dprojected_2TP, weights.x_proj)
    dfilters = elementwise.convolve_backward(u_BLD, dv_2BLD, weights.filters, du_BLD)
    del v_2BLD, dv_2BLD, dv_2TD, dlogits_2BLD, dlogits_2TD

    duz_TE = duz_BLE.flatten(0, 1)
    dfolded = _mm(duz_TE.t(), xhat_TC)
    dxhat_TC = torch.mm(duz_TE, _folded(in_proj, norm_C, dtype))
    dx_TC = elementwise.rms_norm_backward(dxhat_TC, xhat_TC, scale_T, dx_TC)

    dconv, dconv_bias = dfilters[:, :-1].mT, dfilters[:, -1]
    ddirections = [dconv, dconv_bias, dx_proj, dstep_proj, dchannels[:, 1], dchannels[:, 0]]
    if weights.rates is not None:
        ddirections.append(drates * weights.rates)  # as d(-exp(A_log)) / dA_log is -exp(A_log)
    gradients = [(dfolded * in_proj).sum(0), dfolded * norm_C, dout_proj]
    gradients += [pair[g] for g in (0, 1) for pair in ddirections]
    parameters = norm_C, in_proj, out_proj, *directions
    return [dx_TC.view(B, L, C), *(d.to(p.dtype).reshape(p.shape) for d, p in zip(gradients, parameters))]


def _folded(in_proj: Tensor, norm_C: Tensor, dtype: torch.dtype) -> Tensor:
    """The projection with the norm's weight in it: in_proj @ (norm * xhat) = (in_proj * norm) @ xhat."""
    return torch.mul(in_proj, norm_C, out=in_proj.new_empty(in_proj.shape, dtype=dtype))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32."""
    return torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b) if a.dtype == torch.float32 else torch.bmm(a, b, out_dtype=torch.float32)


def _addmm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(x, a, b) if a.dtype == x.dtype else torch.addmm(x, a, b, out_dtype=x.dtype)


@torch.library.register_fake("vil::block")
def _fake_block(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep):
    B, L, C = x_BLC.shape
    D, half = out_proj.shape[1], len(directions) // 2
    N = (directions[2].shape[0] - directions[3].shape[1]) // 2
    kept = gpu._fake_scan(
        "cuda", recurrence, x_BLC.new_empty(2, B, L, D), None, x_BLC.new_empty(2, B, L, N), *[None] * 4, REVERSE, keep
    )[1]
    shapes = ((B * L, C), dtype), ((B * L,), torch.float32), ((B, L, 2 * D), dtype), ((B, L, D), dtype)
    saved = [x_BLC.new_empty(shape if keep else 0, dtype=dtype) for shape, dtype in shapes]
    return x_BLC.new_empty(x_BLC.shape), *saved, kept


@torch.library.register_fake("vil::block_backward")
def _fake_block_backward(recurrence, dx_BLC, scale_B, norm_C, in_proj, out_proj, directions, *saved):
    return [torch.empty_like(t) for t in (dx_BLC, norm_C, in_proj, out_proj, *directions)]


def _setup_context(ctx, inputs, output):
    ctx.recurrence, _, scale_B, _, norm_C, in_proj, out_proj, directions, _, _ = inputs
    ctx.save_for_backward(scale_B, norm_C, in_proj, out_proj, *directions, *output[1:])
    ctx.count = len(directions)


def _backward(ctx, dx_BLC, *_):
    scale_B, norm_C, in_proj, out_proj, *rest = ctx.saved_tensors
    directions, saved = rest[: ctx.count], rest[ctx.count :]
    dx_BLC, dnorm, din_proj, dout_proj, *ddirections = torch.ops.vil.block_backward(
        ctx.recurrence, dx_BLC, scale_B, norm_C, in_proj, out_proj, directions, *saved
    )
    return None, dx_BLC, None, None, dnorm, din_proj, dout_proj, ddirections, None, None


torch.library.register_autograd("vil::block", _backward, setup_context=_setup_context)
