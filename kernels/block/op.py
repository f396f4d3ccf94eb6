"""The bidirectional block as one PyTorch operator for NVIDIA GPUs, `vil::block`, and its gradient.

It computes what `vil.block.Block` does, by fewer kernels and with fewer tensors kept for backward: the norm's weight is
folded into the projection behind it, both directions share each kernel, the residual addition is part of the last
product, and backward computes convolutions, projections and gate again.

If only the middle token's output is wanted, as of a model's last block, each direction runs over the half of the tokens
that it reads up to there, and z, the gate and the last product are of that token alone.

B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
M tokens whose output is wanted: L or 1    H tokens that a direction reads for it: L or L // 2 + 1    E of uz: 2D or D
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check, check_choice, check_given, once_a_kind
from ..scan import op as scan
from ..scan.checkpoints import boundaries
from ..scan.op import aligned
from . import launch as kernels

REVERSE = [False, True]
TAPS = (2, 3, 4)  # of the convolutions that there are kernels for
WEIGHTS = 2**32 - 1  # elements of in_proj, counted in 32 bits
FP32 = torch.float32

torch.library.define(
    "vil::block",
    "(str recurrence, Tensor x_BLC, Tensor[] normed, Tensor? scale_B, float eps, Tensor norm_C, Tensor in_proj,"
    " Tensor out_proj, Tensor[] directions, ScalarType dtype, bool middle, bool hand_over, bool keep)"
    " -> (Tensor x_BMC, Tensor[] next_normed, Tensor[] saved)",
)
torch.library.define(
    "vil::block_backward",
    "(str recurrence, Tensor dx_BMC, Tensor? rounded_TC, Tensor? scale_B, Tensor norm_C, Tensor in_proj,"
    " Tensor out_proj, Tensor[] directions, bool middle, Tensor[] saved) -> Tensor[]",
)


def supports(x_BLC: Tensor, state_size: int) -> bool:
    """Whether `block` takes this residual stream and this number of states, on this machine."""
    kind = x_BLC.dtype == FP32 and x_BLC.numel() > 0 and state_size in scan.STATE_SIZES
    return kind and scan.runs_cuda(x_BLC.device)


def supports_weights(weights: list[Tensor], taps: int, device: torch.device) -> bool:
    """Whether `block` takes these, all of one dtype, and this many taps for a residual stream on this device."""
    dtype = weights[0].dtype
    kind = dtype in scan.DTYPES and taps in TAPS
    return kind and all(t.dtype == dtype and t.device == device for t in weights)


def block(
    recurrence: str, x_BLC: Tensor, scale_B: Tensor | None, eps: float, norm_C: Tensor, in_proj: Tensor,
    out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype, middle: bool = False,
    handed: list[Tensor] | None = None,
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
        middle: Compute the output of the middle token, number (L - 1) // 2, alone: (B, 1, C).
        handed: For blocks one behind the other, with nothing in between and the same eps. What the block before has
            left of this one's norm; in its place this one leaves what it has computed of the next one's, if anything.
    """
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_BLC, norm_C, in_proj, out_proj, *directions))
    normed = handed if handed and handed[0].dtype == dtype else []
    hand_over = handed is not None and not middle
    y_BMC, next_normed, _ = torch.ops.vil.block(
        recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, middle, hand_over, keep
    )  # fmt: skip
    if handed is not None:
        handed[:] = next_normed
    return y_BMC


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

    def split(self, uz_BLE: Tensor, xhat_TC: Tensor, middle: bool) -> tuple[Tensor, Tensor]:
        """u and z; if `middle`, uz is u alone."""
        if not middle:
            return uz_BLE.chunk(2, dim=-1)
        B, L, D = uz_BLE.shape
        xhat_BC = _wanted(xhat_TC.view(B, L, -1), middle).squeeze(1)
        return uz_BLE, torch.mm(xhat_BC, self.in_proj[D:].t()).unsqueeze(1)

    def project(self, u_BLD: Tensor, middle: bool, logits: bool = True) -> list[Tensor | None]:
        """What the recurrence reads, all as (2, B, H, ...): v, keys, queries, the step and, if wanted, its logits."""
        B, L, _ = u_BLD.shape
        rank, projections = self.step_proj.shape[2], self.x_proj.shape[1]
        v_2BHD, projected_2TP, logits_2TD = kernels.project(
            u_BLD, self.conv, self.conv_bias, self.x_proj, self.step_proj, _reads(L, middle), logits
        )
        step_2TR, k_2TN, q_2TN = projected_2TP.tensor_split((rank, (rank + projections) // 2), dim=-1)
        logits_2BHD = logits_2TD.unflatten(1, (B, -1)) if logits else None
        return [v_2BHD, *(t.unflatten(1, (B, -1)) for t in (k_2TN, q_2TN, step_2TR)), logits_2BHD]


# What lists of tensors hold and the letters of their dimensions: E 2D, P R + 2N, K taps, S states between chunks, r and
# p the padded R and P, U columns of uz, 0 none. Where there is no dtype, it is that of the weights or products.
_DIRECTION = [
    ("conv", "D1K"), ("conv_bias", "D"), ("x_proj", "PD"), ("step_proj", "DR"), ("step_bias", "D"), ("skip", "D"),
    ("A_log", "DN"),
]  # fmt: skip
_DIRECTIONS = {
    recurrence: [(f"directions[{i}] ({name})", layout) for i, (name, layout) in enumerate(2 * _DIRECTION[:tensors])]
    for recurrence, tensors in (("longhorn", 6), ("selective", 7))
}
_SAVED = {
    recurrence: [
        ("saved[0] (uz)", "BLU", None), ("saved[1] (mean)", "BMD", None), ("saved[2] (states)", "2BSND", FP32),
        ("saved[3] (in_proj)", "EC", None), ("saved[4] (out_proj)", "CD", None), ("saved[5] (conv)", "2DK", FP32),
        ("saved[6] (conv_bias)", "2D", FP32), ("saved[7] (x_proj)", "2pD", None), ("saved[8] (step_proj)", "2Dr", None),
        ("saved[9] (step_bias)", "2D", FP32), ("saved[10] (skip)", "2D", FP32), ("saved[11] (rates)", rates, FP32),
        ("saved[12] (xhat)", "TC", None), ("saved[13] (scale)", "T", FP32),
    ]
    for recurrence, rates in (("longhorn", "0"), ("selective", "2DN"))
}  # fmt: skip


def _check(recurrence, residual, scale_B, norm_C, in_proj, out_proj, directions) -> dict[str, int]:
    """The sizes of a block whose kernels there are; else a ValueError that names what does not fit.

    residual is a row of a table that `check` takes, which begins with it.
    """
    check_choice("recurrence", recurrence, scan.RECURRENCES)
    check_given(norm_C=norm_C, in_proj=in_proj, out_proj=out_proj, **{residual[0]: residual[1]})
    rows, dtype = _DIRECTIONS[recurrence], norm_C.dtype
    check_choice("the dtype of norm_C,", dtype, scan.DTYPES)
    _check_length("directions", directions, len(rows))
    sizes = {"1": 1}
    check(
        sizes, residual, ("scale_B", scale_B, "B", FP32), ("norm_C", norm_C, "C", dtype),
        ("out_proj", out_proj, "CD", dtype), ("in_proj", in_proj, "EC", dtype),
        *((name, t, layout, dtype) for (name, layout), t in zip(rows, directions)),
    )  # fmt: skip
    C, D, E, P, R = (sizes[letter] for letter in "CDEPR")
    N = sizes.setdefault("N", (P - R) // 2)
    if 0 in (residual[1].numel(), D, R):
        raise ValueError(f"{residual[0]}, out_proj and step_proj must not be empty")
    if E != 2 * D or P != R + 2 * N:
        raise ValueError(f"in_proj and x_proj must have 2 D = {2 * D} and R + 2 N = {R + 2 * N} rows, not {E} and {P}")
    check_choice("the number of states in x_proj,", N, scan.STATE_SIZES)
    check_choice("the number of taps in conv,", sizes["K"], TAPS)
    if D > scan.CHANNELS or E * C > WEIGHTS:
        limits = f"{scan.CHANNELS} channels and in_proj of {WEIGHTS} elements"
        raise ValueError(f"the kernels take up to D = {limits}, not {D} and {E * C}")
    return sizes


def _check_length(name: str, tensors: list[Tensor], *lengths: int) -> None:
    if len(tensors) not in lengths:
        raise ValueError(f"{name} must hold {' or '.join(map(str, lengths))} tensors; it holds {len(tensors)}")


@once_a_kind
def _check_forward(recurrence, x_BLC, normed, scale_B, norm_C, in_proj, out_proj, directions, dtype) -> None:
    residual = "x_BLC", x_BLC, "BLC", FP32
    sizes = _check(recurrence, residual, scale_B, norm_C, in_proj, out_proj, directions)
    check_choice("dtype", dtype, scan.DTYPES)
    _check_length("normed", normed, 0, 2)
    sizes["T"] = sizes["B"] * sizes["L"]
    check(sizes, residual, *zip(("normed[0]", "normed[1]"), normed, ("TC", "T"), (dtype, FP32)))


@once_a_kind
def _check_backward(
    recurrence, dx_BMC, rounded_TC, scale_B, norm_C, in_proj, out_proj, directions, middle, saved
) -> None:  # fmt: skip
    residual = "dx_BMC", dx_BMC, "BMC", FP32
    sizes = _check(recurrence, residual, scale_B, norm_C, in_proj, out_proj, directions)
    rows = _SAVED[recurrence]
    _check_length("saved", saved, len(rows))
    uz_BLE, padding = saved[0], -sizes["R"] % 8
    dtype = uz_BLE.dtype
    check_choice("the dtype of saved[0] (uz),", dtype, scan.DTYPES)
    sizes.update({"0": 0, "2": 2, "r": sizes["R"] + padding, "p": sizes["P"] + padding})
    sizes["t"] = sizes["B"] * sizes["M"]
    check(sizes, residual, ("rounded_TC", rounded_TC, "tC", dtype), (rows[0][0], uz_BLE, "BLU", dtype))
    L, expected = sizes["L"], (1, sizes["D"]) if middle else (sizes["L"], sizes["E"])
    if (sizes["M"], sizes["U"]) != expected:
        found = f"{sizes['M']} and {sizes['U']}"
        need = "{} tokens and saved[0] (uz) {} columns".format(*expected)
        raise ValueError(f"with middle={middle} dx_BMC must have {need}, not {found}")
    sizes.update(T=sizes["B"] * L, S=boundaries(_reads(L, middle)))
    check(sizes, residual, *((name, t, layout, own or dtype) for (name, layout, own), t in zip(rows, saved)))


def _rates(in_proj: Tensor, directions: list[Tensor]) -> Tensor:
    half = len(directions) // 2
    A_log = [direction[6].float() for direction in (directions[:half], directions[half:]) if half > 6]
    return -torch.stack(A_log).exp() if A_log else in_proj.new_empty(0, dtype=torch.float32)


def _wanted(x_BLC: Tensor, middle: bool) -> Tensor:
    """The M tokens whose output is wanted."""
    return x_BLC.narrow(1, (x_BLC.shape[1] - 1) // 2, 1) if middle else x_BLC


def _reads(L: int, middle: bool) -> int:
    """H, how many tokens each direction reads for them: if `middle`, the first of one and the last of the other."""
    return L // 2 + 1 if middle else L


def _block(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, middle, hand_over, keep
):  # fmt: skip
    """The block's output, its norm (without a weight) with the factors, and what backward needs if `keep`.

    Of the norm nothing unless `hand_over` and it comes with the output. normed is the same for x, or nothing.
    """
    _check_forward(recurrence, x_BLC, normed, scale_B, norm_C, in_proj, out_proj, directions, dtype)
    normed, scale_B = [aligned(t) for t in normed], aligned(scale_B)
    (B, L, C), D = x_BLC.shape, out_proj.shape[1]
    x_TC = x_BLC.contiguous().view(-1, C)
    tiles = None if middle else kernels.empty_tiles(B * L, out_proj, dtype)
    if tiles is not None and x_TC.data_ptr() % 16:
        x_TC = x_TC.clone()
    copy = not (middle or kernels.fuses_product(x_TC, D, dtype))  # the product is written over it
    packed, norm = kernels.prepare(
        norm_C, in_proj, out_proj, directions, dtype, tiles, None if normed else x_TC, eps, copy
    )  # fmt: skip
    weights = Weights(*packed, _rates(in_proj, directions))
    xhat_TC, scale_T, x_TC = (*normed, x_TC.clone() if copy else x_TC) if normed else norm
    projection = weights.in_proj[:D] if middle else weights.in_proj
    uz_BLE = torch.mm(xhat_TC, projection.t()).view(B, L, -1)
    u_BLD, z_BMD = weights.split(uz_BLE, xhat_TC, middle)
    from_step = kernels.scans_from_step(recurrence, u_BLD, _reads(L, middle), weights.x_proj, weights.step_proj)
    v_2BHD, k_2BHN, q_2BHN, step_2BHR, logits_2BHD = weights.project(u_BLD, middle, logits=not from_step)
    channels = weights.skip, weights.step_bias
    if from_step:
        y_2BMD, states = scan.scan_from_step(
            recurrence, v_2BHD, step_2BHR, weights.step_proj, k_2BHN, q_2BHN, *channels, REVERSE, keep
        )
    else:
        rates = weights.rates if recurrence == "selective" else None
        y_2BMD, states = scan.scan(
            "cuda", recurrence, v_2BHD, logits_2BHD, k_2BHN, q_2BHN, rates, *channels, REVERSE, keep
        )
    del v_2BHD, logits_2BHD
    if middle:
        y_2BMD = torch.stack([y_2BMD[0, :, (L - 1) // 2], y_2BMD[1, :, 0]]).unsqueeze(2)
        x_TC = _wanted(x_BLC, middle).clone(memory_format=torch.contiguous_format).view(B, C)
    out_TC, mean_BMD, next_normed = kernels.gated_product(
        x_TC, y_2BMD, z_BMD, scale_B, weights.out_proj, tiles, keep, eps if hand_over else None
    )  # fmt: skip
    saved = [uz_BLE, mean_BMD, states, *weights, *([] if normed else [xhat_TC, scale_T])]
    return out_TC.view(B, -1, C), next_normed, saved if keep else []


def _block_backward(recurrence, dx_BMC, rounded_TC, scale_B, norm_C, in_proj, out_proj, directions, middle, saved):
    """Gradients of x, norm_C, in_proj, out_proj and of every tensor of `directions`; that of x rounded, if it can be.

    rounded_TC is dx_BMC in the products' dtype, its batch and tokens as one dimension, if somebody has it.
    """
    _check_backward(
        recurrence, dx_BMC, rounded_TC, scale_B, norm_C, in_proj, out_proj, directions, middle, saved
    )  # fmt: skip
    uz_BLE, mean_BMD, states, *weights, xhat_TC, scale_T = [aligned(t) for t in saved]
    weights, scale_B = Weights(*weights), aligned(scale_B)
    (B, L, E), C, dtype = uz_BLE.shape, xhat_TC.shape[1], uz_BLE.dtype
    u_BLD, z_BMD = weights.split(uz_BLE, xhat_TC, middle)
    duz_BLE = torch.zeros_like(uz_BLE) if middle else torch.empty_like(uz_BLE)
    du_BLD, dz_BMD = (duz_BLE, torch.empty_like(z_BMD)) if middle else duz_BLE.chunk(2, dim=-1)

    dout_TC = (dx_BMC.to(dtype) if rounded_TC is None else rounded_TC).reshape(-1, C)
    dy_BLD = du_BLD  # which is free until the convolutions' gradient
    gated_BMD = kernels.gated_product_backward(
        dout_TC, weights.out_proj, mean_BMD, z_BMD, scale_B, _wanted(dy_BLD, middle), dz_BMD
    )
    dout_proj = _mm(dout_TC.t(), gated_BMD.flatten(0, 1))
    del gated_BMD, dout_TC

    v_2BHD, k_2BHN, q_2BHN, step_2BHR, logits_2BHD = weights.project(u_BLD, middle)
    _, _, H, D = v_2BHD.shape
    # that of the direction that reads the last H tokens begins with them
    dy_2BHD = dy_BLD.as_strided((2, B, H, D), ((L - H) * dy_BLD.stride(1), *dy_BLD.stride()))
    rates = weights.rates if recurrence == "selective" else None
    dv_2BHD, dlogits_2BHD, dk_2BHN, dq_2BHN, drates, dchannels = scan.scan_backward_over_logits(
        recurrence, dy_2BHD, v_2BHD, logits_2BHD, k_2BHN, q_2BHN, rates, weights.skip, weights.step_bias, states,
        REVERSE,
    )  # fmt: skip
    dprojected_2TP, dstep_proj = kernels.step_backward(
        dlogits_2BHD.flatten(1, 2), step_2BHR.flatten(1, 2), weights.step_proj, dk_2BHN.flatten(1, 2),
        dq_2BHN.flatten(1, 2),
    )  # fmt: skip
    dx_proj = kernels.products_over_tokens(dprojected_2TP, v_2BHD.flatten(1, 2))
    dfilters = kernels.convolve_backward(
        u_BLD, dv_2BHD, dprojected_2TP, weights.x_proj, weights.conv, weights.conv_bias, du_BLD
    )
    del v_2BHD, logits_2BHD, dv_2BHD, dlogits_2BHD

    duz_TE = duz_BLE.flatten(0, 1)
    dfolded = _mm(duz_TE.t(), xhat_TC)
    dxhat_TC = torch.mm(duz_TE, weights.in_proj[:E])
    dx_BLC = dx_BMC.contiguous()
    if middle:  # what z adds, and zeros for the residual stream of the other tokens
        dz_BD, xhat_BC, dxhat_BC = [
            _wanted(t_BLX, middle).squeeze(1) for t_BLX in (dz_BMD, xhat_TC.view(B, L, C), dxhat_TC.view(B, L, C))
        ]
        dfolded = torch.cat([dfolded, _mm(dz_BD.t(), xhat_BC)])
        dxhat_BC.addmm_(dz_BD, weights.in_proj[E:])
        dx_BLC = F.pad(dx_BMC, (0, 0, (L - 1) // 2, L // 2))
    (dnorm, din_proj, *pairs), dx_TC, rounded_TC = kernels.finish_backward(
        norm_C, in_proj, directions, dfolded, dfilters, dx_proj, dstep_proj, dchannels, dxhat_TC, xhat_TC, scale_T,
        dx_BLC.view(-1, C),
    )  # fmt: skip
    if recurrence == "selective":  # d(-exp(A_log)) / dA_log is -exp(A_log)
        pairs += (drates * weights.rates).to(directions[6].dtype).unbind()
    gradients = dnorm, din_proj, dout_proj.to(out_proj.dtype), *pairs[::2], *pairs[1::2]
    return [dx_TC.view(B, L, C), *gradients, rounded_TC]


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32."""
    return torch.mm(a, b) if a.dtype.itemsize >= 4 else torch.mm(a, b, out_dtype=torch.float32)


@torch.library.register_fake("vil::block")
def _fake_block(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, middle, hand_over, keep
):  # fmt: skip
    _check_forward(recurrence, x_BLC, normed, scale_B, norm_C, in_proj, out_proj, directions, dtype)
    (B, L, C), D = x_BLC.shape, out_proj.shape[1]
    N = (directions[2].shape[0] - directions[3].shape[1]) // 2
    M, H, E = (1 if middle else L), _reads(L, middle), (D if middle else 2 * D)
    y_BMC = x_BLC.new_empty(B, M, C)
    norm = [x_BLC.new_empty(B * L, C, dtype=dtype), x_BLC.new_empty(B * L)]
    hand_over = hand_over and not middle and kernels.runs_hopper_kernels(B * L, C, D, dtype, x_BLC.device)
    next_normed = norm if hand_over else []
    if not keep:
        return y_BMC, next_normed, []
    kept = (2, B, boundaries(H), N, D)
    shapes = [(B, L, E), (B, M, D), kept]
    dtypes = [dtype, dtype, torch.float32]
    saved = [x_BLC.new_empty(shape, dtype=t) for shape, t in zip(shapes, dtypes)]
    weights = [*kernels.empty_weights(out_proj, directions, dtype), _rates(in_proj, directions)]
    return y_BMC, next_normed, saved + weights + ([] if normed else [t.clone() for t in norm])


@torch.library.register_fake("vil::block_backward")
def _fake_block_backward(recurrence, dx_BMC, rounded_TC, scale_B, norm_C, in_proj, out_proj, directions, middle, saved):
    _check_backward(
        recurrence, dx_BMC, rounded_TC, scale_B, norm_C, in_proj, out_proj, directions, middle, saved
    )  # fmt: skip
    uz_BLE, *_, xhat_TC, _ = saved
    B, L, _ = uz_BLE.shape
    gradients = [t.new_empty(t.shape) for t in (norm_C, in_proj, out_proj, *directions)]
    rounded_TC = xhat_TC.new_empty(xhat_TC.shape if xhat_TC.dtype != dx_BMC.dtype else 0)
    return [dx_BMC.new_empty(B, L, dx_BMC.shape[2]), *gradients, rounded_TC]


class _Block(torch.autograd.Function):
    """The operator with its gradient. PyTorch's `register_autograd` would do, but takes the host longer."""

    @staticmethod
    def forward(
        ctx, recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, dtype, middle, hand_over, *directions
    ):  # fmt: skip
        y_BMC, next_normed, saved = _below_autograd(
            recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, middle, hand_over,
            True,
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # no gradients of zeros for what is only kept
        ctx.mark_non_differentiable(*next_normed, *saved)
        ctx.recurrence, ctx.middle, ctx.count = recurrence, middle, len(directions)
        ctx.save_for_backward(scale_B, norm_C, in_proj, out_proj, *directions, *saved, *normed)
        return len(next_normed), y_BMC, *next_normed, *saved

    @staticmethod
    def backward(ctx, _, dx_BMC, *__):
        scale_B, norm_C, in_proj, out_proj, *rest = ctx.saved_tensors
        directions, saved = rest[: ctx.count], rest[ctx.count :]
        dx_BLC, dnorm, din_proj, dout_proj, *ddirections, rounded_TC = torch.ops.vil.block_backward(
            ctx.recurrence, dx_BMC, _rounded(dx_BMC, saved[0].dtype), scale_B, norm_C, in_proj, out_proj, directions,
            ctx.middle, saved,
        )  # fmt: skip
        dx_BLC.rounded = rounded_TC, dx_BLC._version
        return None, dx_BLC, None, None, None, dnorm, din_proj, dout_proj, None, None, None, *ddirections


def _rounded(dx_BMC: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What the block behind has left on its gradient of x: the same in its dtype; None if it is not that any more."""
    rounded_TC, version = getattr(dx_BMC, "rounded", (dx_BMC, None))
    valid = rounded_TC.dtype == dtype and version == dx_BMC._version and rounded_TC.numel()
    return rounded_TC if valid else None


def _below_autograd(*arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.vil.block(*arguments)


def _differentiable_block(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, middle, hand_over, keep
):  # fmt: skip
    arguments = recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj
    if not keep:
        return _below_autograd(*arguments, directions, dtype, middle, hand_over, False)
    count, y_BMC, *others = _Block.apply(*arguments, dtype, middle, hand_over, *directions)
    return y_BMC, others[:count], others[count:]


torch.library.impl("vil::block", "CUDA", _block)
torch.library.impl("vil::block_backward", "CUDA", _block_backward)
torch.library.impl("vil::block", "Autograd", _differentiable_block)
