"""The bidirectional block as one PyTorch operator for NVIDIA GPUs, `vil::block`, and its gradient.

It computes what `vil.block.Block` does, by fewer kernels and with fewer tensors kept for backward: the norm's weight is
folded into the projection behind it, both directions share each kernel, the residual addition is part of the last
product, and backward computes convolutions, projections and gate again.

B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import gpu
from .cuda import block as kernels
from .kept import boundaries

REVERSE = [False, True]

torch.library.define(
    "vil::block",
    "(str recurrence, Tensor x_BLC, Tensor? scale_B, float eps, Tensor norm_C, Tensor in_proj, Tensor out_proj,"
    " Tensor[] directions, ScalarType dtype, bool keep)"
    " -> (Tensor x_BLC, Tensor[] saved)",
)
torch.library.define(
    "vil::block_backward",
    "(str recurrence, Tensor dx_BLC, Tensor? scale_B, Tensor norm_C, Tensor in_proj, Tensor out_proj,"
    " Tensor[] directions, Tensor[] saved) -> Tensor[]",
)


def supports(x_BLC: Tensor, state_size: int) -> bool:
    """Whether `block` takes this residual stream and this number of states, on this machine."""
    kind = x_BLC.dtype == torch.float32 and x_BLC.numel() > 0 and state_size in gpu.STATE_SIZES
    return kind and gpu.runs_cuda(x_BLC.device)


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
        directions: For each direction in turn: convolution weight (D, 1, taps) and bias, x_proj (R + 2N, D), step_proj
            weight (D, R) and bias, skip, and A_log (D, N) if the recurrence has rates.
        dtype: float32, bfloat16 or float16.
    """
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_BLC, norm_C, in_proj, out_proj, *directions))
    return torch.ops.vil.block(
        recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep
    )[0]  # fmt: skip


class Weights(NamedTuple):
    """The weights as the kernels and products take them: projections in the products' dtype, others in fp32."""

    in_proj: Tensor  # (2D, C), the norm's weight in it: in_proj @ (norm * xhat) = (in_proj * norm) @ xhat
    out_proj: Tensor  # (C, D)
    conv: Tensor  # (2, D, K)
    conv_bias: Tensor  # (2, D)
    x_proj: Tensor  # (2, R + 2N, D), with R padded by zeros to a multiple of 8, which fast matrix products need
    step_proj: Tensor  # (2, D, R)
    step_bias: Tensor  # (2, D)
    skip: Tensor  # (2, D)
    rates: Tensor  # (2, D, N), A; empty if the recurrence has none

    @classmethod
    def of(
        cls, norm_C: Tensor, in_proj: Tensor, out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype
    ) -> Weights:
        return cls(*kernels.pack(norm_C, in_proj, out_proj, directions, dtype), _rates(in_proj, directions))

    def project(self, u_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the recurrence reads: v, the step's logits, keys and queries; and the step (2, T, R)."""
        B, L, _ = u_BLD.shape
        rank, projections = self.step_proj.shape[2], self.x_proj.shape[1]
        v_2BLD, projected_2TP, logits_2TD = kernels.project(
            u_BLD, self.conv, self.conv_bias, self.x_proj, self.step_proj
        )
        step_2TR, k_2TN, q_2TN = projected_2TP.tensor_split((rank, (rank + projections) // 2), dim=-1)
        return v_2BLD, *(t.unflatten(1, (B, L)) for t in (logits_2TD, k_2TN, q_2TN)), step_2TR


def _rates(in_proj: Tensor, directions: list[Tensor]) -> Tensor:
    half = len(directions) // 2
    A_log = [direction[6].float() for direction in (directions[:half], directions[half:]) if half > 6]
    return -torch.stack(A_log).exp() if A_log else in_proj.new_empty(0, dtype=torch.float32)


def _block(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep):
    """The block's output, and what backward needs if `keep`."""
    B, L, C = x_BLC.shape
    weights = Weights.of(norm_C, in_proj, out_proj, directions, dtype)
    xhat_TC, scale_T, out_TC = kernels.rms_norm(x_BLC.contiguous().view(-1, C), eps, dtype)
    uz_BLE = torch.mm(xhat_TC, weights.in_proj.t()).view(B, L, -1)
    u_BLD, z_BLD = uz_BLE.chunk(2, dim=-1)
    v_2BLD, logits_2BLD, k_2BLN, q_2BLN, _ = weights.project(u_BLD)
    rates = weights.rates if recurrence == "selective" else None
    y_2BLD, states = gpu.scan(
        "cuda", recurrence, v_2BLD, logits_2BLD, k_2BLN, q_2BLN, rates, weights.skip, weights.step_bias, REVERSE, keep
    )
    gated_BLD, mean_BLD = kernels.gate(y_2BLD, z_BLD, scale_B, keep)
    _add_product(out_TC, gated_BLD.flatten(0, 1), weights.out_proj.t())
    return out_TC.view(B, L, C), [xhat_TC, scale_T, uz_BLE, mean_BLD, states, *weights] if keep else []


def _block_backward(recurrence, dx_BLC, scale_B, norm_C, in_proj, out_proj, directions, saved):
    """Gradients of x, norm_C, in_proj, out_proj and of every tensor of `directions`."""
    xhat_TC, scale_T, uz_BLE, mean_BLD, states, *weights = saved
    weights = Weights(*weights)
    (B, L, D), C, dtype = mean_BLD.shape, xhat_TC.shape[1], uz_BLE.dtype
    u_BLD, z_BLD = uz_BLE.chunk(2, dim=-1)
    duz_BLE = torch.empty_like(uz_BLE)
    du_BLD, dz_BLD = duz_BLE.chunk(2, dim=-1)
    dx_TC = dx_BLC.contiguous().view(-1, C)

    dout_TC = dx_TC.to(dtype)
    dgated_BLD = torch.mm(dout_TC, weights.out_proj).view(B, L, D)
    dy_BLD = du_BLD  # which is free until the convolutions' gradient
    gated_BLD = kernels.gate_backward(dgated_BLD, mean_BLD, z_BLD, scale_B, dy_BLD, dz_BLD)
    dout_proj = _mm(dout_TC.t(), gated_BLD.flatten(0, 1))
    del dgated_BLD, gated_BLD, dout_TC

    v_2BLD, logits_2BLD, k_2BLN, q_2BLN, step_2TR = weights.project(u_BLD)
    rates = weights.rates if recurrence == "selective" else None
    dv_2BLD, dlogits_2BLD, dk_2BLN, dq_2BLN, drates, dchannels = gpu.scan_backward(
        "cuda", recurrence, dy_BLD.expand(2, -1, -1, -1), v_2BLD, logits_2BLD, k_2BLN, q_2BLN, rates, weights.skip,
        weights.step_bias, states, REVERSE,
    )  # fmt: skip
    del logits_2BLD
    dprojected_2TP, dstep_proj = kernels.step_backward(
        dlogits_2BLD.flatten(1, 2), step_2TR, weights.step_proj, dk_2BLN.flatten(1, 2), dq_2BLN.flatten(1, 2), B
    )
    dx_proj = kernels.products_over_tokens(dprojected_2TP, v_2BLD.flatten(1, 2), B)
    dfilters = kernels.convolve_backward(
        u_BLD, dv_2BLD, dprojected_2TP, weights.x_proj, weights.conv, weights.conv_bias, du_BLD
    )
    del v_2BLD, dv_2BLD, dlogits_2BLD

    duz_TE = duz_BLE.flatten(0, 1)
    dfolded = _mm(duz_TE.t(), xhat_TC)
    dx_TC = kernels.rms_norm_backward(torch.mm(duz_TE, weights.in_proj), xhat_TC, scale_T, dx_TC)

    dnorm, din_proj, *pairs = kernels.unpack(
        norm_C, in_proj, directions, dtype, dfolded, dfilters, dx_proj, dstep_proj, dchannels
    )
    if recurrence == "selective":  # d(-exp(A_log)) / dA_log is -exp(A_log)
        pairs += (drates * weights.rates).to(directions[6].dtype).unbind()
    gradients = dnorm, din_proj, dout_proj.to(out_proj.dtype), *pairs[::2], *pairs[1::2]
    return [dx_TC.view(B, L, C), *gradients]


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32."""
    return torch.mm(a, b) if a.dtype.itemsize >= 4 else torch.mm(a, b, out_dtype=torch.float32)


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> None:
    """x += a @ b, with no rounding in between."""
    if a.dtype == x.dtype:
        torch.addmm(x, a, b, out=x)
    else:
        torch.addmm(x, a, b, out_dtype=x.dtype, out=x)


@torch.library.register_fake("vil::block")
def _fake_block(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep):
    (B, L, C), D = x_BLC.shape, out_proj.shape[1]
    N = (directions[2].shape[0] - directions[3].shape[1]) // 2
    if not keep:
        return x_BLC.new_empty(x_BLC.shape), []
    kept = (2, B, boundaries(L), N, D)
    shapes = [(B * L, C), (B * L,), (B, L, 2 * D), (B, L, D), kept]
    dtypes = [dtype, torch.float32, dtype, dtype, torch.float32]
    saved = [x_BLC.new_empty(shape, dtype=t) for shape, t in zip(shapes, dtypes)]
    weights = [*kernels.empty_weights(out_proj, directions, dtype), _rates(in_proj, directions)]
    return x_BLC.new_empty(x_BLC.shape), saved + weights


@torch.library.register_fake("vil::block_backward")
def _fake_block_backward(recurrence, dx_BLC, scale_B, norm_C, in_proj, out_proj, directions, saved):
    return [t.new_empty(t.shape) for t in (dx_BLC, norm_C, in_proj, out_proj, *directions)]


class _Block(torch.autograd.Function):
    """The operator with its gradient. PyTorch's `register_autograd` would do, but takes the host longer."""

    @staticmethod
    def forward(ctx, recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, dtype, *directions):
        y_BLC, saved = _below_autograd(
            recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, True
        )
        ctx.set_materialize_grads(False)  # no gradients of zeros for what is only kept
        ctx.mark_non_differentiable(*saved)
        ctx.recurrence, ctx.count = recurrence, len(directions)
        ctx.save_for_backward(scale_B, norm_C, in_proj, out_proj, *directions, *saved)
        return y_BLC, *saved

    @staticmethod
    def backward(ctx, dx_BLC, *_):
        scale_B, norm_C, in_proj, out_proj, *rest = ctx.saved_tensors
        dx_BLC, dnorm, din_proj, dout_proj, *ddirections = torch.ops.vil.block_backward(
            ctx.recurrence, dx_BLC, scale_B, norm_C, in_proj, out_proj, rest[: ctx.count], rest[ctx.count :]
        )
        return None, dx_BLC, None, None, dnorm, din_proj, dout_proj, None, *ddirections


def _below_autograd(*arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.vil.block(*arguments)


def _differentiable_block(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, keep):
    if not keep:
        return _below_autograd(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, False)
    y_BLC, *saved = _Block.apply(recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, dtype, *directions)
    return y_BLC, saved


torch.library.impl("vil::block", "CUDA", _block)
torch.library.impl("vil::block_backward", "CUDA", _block_backward)
torch.library.impl("vil::block", "Autograd", _differentiable_block)
