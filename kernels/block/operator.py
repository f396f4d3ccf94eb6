"""The bidirectional block as one PyTorch operator for NVIDIA GPUs, `vil::block`, and its gradient.

It computes what `vil.block.Block` does, by fewer kernels and with fewer tensors kept for backward: the norm's weight is
folded into the projection behind it, both directions share each kernel, the residual addition is part of the last
product, and backward computes convolutions, projections and gate again.

Blocks one behind the other pass on, beside the residual stream x, its norm without a weight, xhat, as a fused add-norm
does: (x, xhat) -> (x', xhat'). Both have gradients, and that of xhat' becomes one of x' as backward begins.

If only the class token's output is wanted, as of a model's last block, each direction runs over the half of the tokens
that it reads up to there, and z, the gate and the last product are of that token alone.

B batch    L tokens    T tokens of the batch    C model width    D inner width    N states    R rank    2 directions
M tokens whose output is wanted: L or 1    H tokens that a direction reads for it: L or L // 2 + 1    E of uz: 2D or D
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import backends
from ..checks import aligned, check, check_choice, check_given, once_a_kind
from ..cuda.plan import planned
from ..scan import cuda_scan as scans
from ..scan.chunks import chunk_state_count
from . import launch as kernels
from .launch import Weights

REVERSE = (False, True)
TAPS = (2, 3, 4)  # of the convolutions that there are kernels for
WEIGHTS = 2**32 - 1  # elements of in_proj, counted in 32 bits
FP32 = torch.float32

torch.library.define(
    "vil::block",
    "(str recurrence, Tensor x_BLC, Tensor[] normed, Tensor? scale_B, float eps, Tensor norm_C, Tensor in_proj,"
    " Tensor out_proj, Tensor[] directions, ScalarType dtype, bool class_token_only, bool norm_next, bool keep)"
    " -> (Tensor x_BMC, Tensor[] next_normed, Tensor[] saved)",
)
torch.library.define(
    "vil::block_backward",
    "(str recurrence, Tensor dx_BMC, Tensor? dnext_TC, Tensor[] next_normed, Tensor? scale_B, Tensor norm_C,"
    " Tensor in_proj, Tensor out_proj, Tensor[] directions, bool class_token_only, bool prenormed, Tensor[] saved)"
    " -> Tensor[]",
)


def supports(x_BLC: Tensor, state_size: int) -> bool:
    """Whether `block` takes this residual stream and this number of states, on this machine."""
    kind = x_BLC.dtype == FP32 and x_BLC.numel() > 0 and state_size in backends.STATE_SIZES
    return kind and backends.backend_for(x_BLC.device) == "cuda"


def supports_weights(weights: list[Tensor], taps: int, device: torch.device) -> bool:
    """Whether `block` takes these, all of one dtype, and this many taps for a residual stream on this device."""
    dtype = weights[0].dtype
    kind = dtype in backends.DTYPES and taps in TAPS
    return kind and {t.dtype for t in weights} == {dtype} and {t.device for t in weights} == {device}


def block(
    recurrence: str, x_BLC: Tensor, normed: tuple[Tensor, Tensor] | None, scale_B: Tensor | None, eps: float,
    norm_C: Tensor, in_proj: Tensor, out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype,
    class_token_only: bool = False, norm_next: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """x' = x + scale * out_proj(mixer(norm(x))) of the residual stream x (fp32), computed in `dtype`, and its norm.

    Args:
        recurrence: "longhorn" or "selective".
        x_BLC: Residual stream, fp32.
        normed: What the block before has returned beside x, if that was called with the same eps and dtype.
        scale_B: Stochastic depth: 0 or 1 / (1 - rate) for each image. None for 1.
        eps: Of the norm.
        norm_C: Weight of the norm.
        in_proj: (2D, C).
        out_proj: (C, D).
        directions: For each direction in turn: convolution weight (D, 1, taps) and bias, x_proj (R + 2N, D), step_proj
            weight (D, R) and bias, skip, and A_log (D, N) if the recurrence has rates.
        dtype: float32, bfloat16 or float16.
        class_token_only: Compute the output of the middle token, number (L - 1) // 2, alone: (B, 1, C).
        norm_next: Whether a block with the same eps and dtype comes next, to which nothing but x' is given.

    Returns:
        x', and the norm of x' without a weight (B L, C) with its factors (B L,) if that costs nothing, else None.
    """
    given = [] if normed is None or normed[0].dtype != dtype else list(normed)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_BLC, norm_C, in_proj, out_proj, *directions))
    arguments = (
        recurrence, x_BLC, given, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only,
        norm_next and not class_token_only,
    )  # fmt: skip
    if not runs_at_once(x_BLC):
        y_BMC, next_normed, _ = torch.ops.vil.block(*arguments, keep)
    elif keep:
        y_BMC, next_normed, _ = _differentiable_block(*arguments, True, at_once=True)
    else:
        with torch.no_grad():
            y_BMC, next_normed, _ = _block(*arguments, False)
    return y_BMC, tuple(next_normed) or None


def runs_at_once(t: Tensor) -> bool:
    """Whether nobody is to see the operator: no compiler, no mode, no transformation and no kind of tensor."""
    return not (
        torch.compiler.is_compiling()
        or type(t) is not Tensor
        or t.device.type != "cuda"
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


# What lists of tensors hold and the letters of their dimensions: E 2D, P R + 2N, K taps, S states between chunks, U
# columns of uz, W of packed weights. Where there is no dtype, it is that of the weights or products.
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
        ("saved[3] (weights)", "W", None), *((f"saved[4] ({name})", layout, FP32) for name, layout in rates),
        (f"saved[{4 + len(rates)}] (xhat)", "TC", None), (f"saved[{5 + len(rates)}] (scale)", "T", FP32),
    ]
    for recurrence, rates in (("longhorn", []), ("selective", [("rates", "2DN")]))
}  # fmt: skip


def _check(recurrence, residual, scale_B, norm_C, in_proj, out_proj, directions) -> dict[str, int]:
    """The sizes of a block whose kernels there are; else a ValueError that names what does not fit.

    residual is a row of a table that `check` takes, which begins with it.
    """
    check_choice("recurrence", recurrence, backends.RECURRENCES)
    check_given(norm_C=norm_C, in_proj=in_proj, out_proj=out_proj, **{residual[0]: residual[1]})
    rows, dtype = _DIRECTIONS[recurrence], norm_C.dtype
    check_choice("the dtype of norm_C,", dtype, backends.DTYPES)
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
    check_choice("the number of states in x_proj,", N, backends.STATE_SIZES)
    check_choice("the number of taps in conv,", sizes["K"], TAPS)
    if D > backends.CHANNELS or E * C > WEIGHTS:
        limits = f"{backends.CHANNELS} channels and in_proj of {WEIGHTS} elements"
        raise ValueError(f"the kernels take up to D = {limits}, not {D} and {E * C}")
    return sizes


def _check_length(name: str, tensors: list[Tensor], *lengths: int) -> None:
    if len(tensors) not in lengths:
        raise ValueError(f"{name} must hold {' or '.join(map(str, lengths))} tensors; it holds {len(tensors)}")


def _check_forward(recurrence, x_BLC, normed, scale_B, norm_C, in_proj, out_proj, directions, dtype) -> None:
    residual = "x_BLC", x_BLC, "BLC", FP32
    sizes = _check(recurrence, residual, scale_B, norm_C, in_proj, out_proj, directions)
    check_choice("dtype", dtype, backends.DTYPES)
    _check_length("normed", normed, 0, 2)
    sizes["T"] = sizes["B"] * sizes["L"]
    check(sizes, residual, *zip(("normed[0]", "normed[1]"), normed, ("TC", "T"), (dtype, FP32)))


@once_a_kind
def _check_backward(
    recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj, directions, class_token_only, saved
) -> None:  # fmt: skip
    residual = "dx_BMC", dx_BMC, "BMC", FP32
    sizes = _check(recurrence, residual, scale_B, norm_C, in_proj, out_proj, directions)
    rows = _SAVED[recurrence]
    _check_length("saved", saved, len(rows))
    _check_length("next_normed", next_normed, 0, 2)
    if dnext_TC is not None and (not next_normed or class_token_only):
        raise ValueError("dnext_TC is the gradient of next_normed[0], which is not given or has none")
    uz_BLE = saved[0]
    dtype = uz_BLE.dtype
    check_choice("the dtype of saved[0] (uz),", dtype, backends.DTYPES)
    sizes.update({"2": 2, "t": sizes["B"] * sizes["M"]})
    sizes["W"] = kernels.packed_size(*kernels.packed_sizes(out_proj, directions), dtype)
    next_rows = zip(("next_normed[0]", "next_normed[1]"), next_normed, ("tC", "t"), (dtype, FP32))
    check(sizes, residual, ("dnext_TC", dnext_TC, "tC", dtype), *next_rows, (rows[0][0], uz_BLE, "BLU", dtype))
    L, expected = sizes["L"], (1, sizes["D"]) if class_token_only else (sizes["L"], sizes["E"])
    if (sizes["M"], sizes["U"]) != expected:
        found = f"{sizes['M']} and {sizes['U']}"
        need = "{} tokens and saved[0] (uz) {} columns".format(*expected)
        raise ValueError(f"with class_token_only={class_token_only} dx_BMC must have {need}, not {found}")
    sizes.update(T=sizes["B"] * L, S=chunk_state_count(_reads(L, class_token_only)))
    check(sizes, residual, *((name, t, layout, own or dtype) for (name, layout, own), t in zip(rows, saved)))


def _rates(directions: list[Tensor]) -> list[Tensor]:
    """A (2, D, N), if the recurrence has rates."""
    half = len(directions) // 2
    return [-torch.stack([directions[6].float(), directions[half + 6].float()]).exp()] if half > 6 else []


def _wanted(x_BLC: Tensor, class_token_only: bool) -> Tensor:
    """The M tokens whose output is wanted."""
    return x_BLC.narrow(1, (x_BLC.shape[1] - 1) // 2, 1) if class_token_only else x_BLC


def _reads(L: int, class_token_only: bool) -> int:
    """H, how many tokens each direction reads for them, the first of one and the last of the other."""
    return L // 2 + 1 if class_token_only else L


def _split(uz_BLE: Tensor, xhat_TC: Tensor, in_proj: Tensor, class_token_only: bool) -> tuple[Tensor, Tensor]:
    """u and z; if `class_token_only`, uz is u alone."""
    if not class_token_only:
        return uz_BLE.chunk(2, dim=-1)
    B, L, D = uz_BLE.shape
    xhat_BC = _wanted(xhat_TC.view(B, L, -1), class_token_only).squeeze(1)
    return uz_BLE, torch.mm(xhat_BC, in_proj[D:].t()).unsqueeze(1)


def _project(u_BLD: Tensor, weights: Weights, class_token_only: bool, logits: bool = True) -> list[Tensor | None]:
    """What the recurrence reads, all as (2, B, H, ...): v, keys, queries, the step and, if wanted, its logits."""
    B, L, _ = u_BLD.shape
    rank, projections = weights.step_proj.shape[2], weights.x_proj.shape[1]
    v_2BHD, projected_2TP, logits_2TD = kernels.conv_xproj(
        u_BLD, weights.conv, weights.conv_bias, weights.x_proj, weights.step_proj, _reads(L, class_token_only), logits
    )
    step_2TR, k_2TN, q_2TN = projected_2TP.tensor_split((rank, (rank + projections) // 2), dim=-1)
    logits_2BHD = logits_2TD.unflatten(1, (B, -1)) if logits else None
    return [v_2BHD, *(t.unflatten(1, (B, -1)) for t in (k_2TN, q_2TN, step_2TR)), logits_2BHD]


def _check_forward_call(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, *_
) -> None:  # fmt: skip
    _check_forward(recurrence, x_BLC, normed, scale_B, norm_C, in_proj, out_proj, directions, dtype)


@planned(_check_forward_call)
def _forward(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only, norm_next,
    keep,
):  # fmt: skip
    """x'; xhat' with its factors, or None twice; and what backward needs if `keep`: what `_SAVED` lists."""
    x_BLC, scale_B, norm_C, in_proj, out_proj = map(aligned, (x_BLC, scale_B, norm_C, in_proj, out_proj))
    normed, directions = [aligned(t) for t in normed], [aligned(t) for t in directions]
    (B, L, C), D = x_BLC.shape, out_proj.shape[1]
    x_TC = x_BLC.view(-1, C)
    tiles = None if class_token_only else kernels.empty_tiles(B * L, out_proj, dtype)
    copy = not (class_token_only or kernels.fuses_product(x_TC, D, dtype))  # the product is written over it
    packed, norm = kernels.pack_weights(
        norm_C, in_proj, out_proj, directions, dtype, tiles, None if normed else x_TC, eps, copy
    )  # fmt: skip
    weights, rates = Weights.of(packed, *kernels.packed_sizes(out_proj, directions)), _rates(directions)
    xhat_TC, scale_T, x_TC = (*normed, x_TC.clone() if copy else x_TC) if normed else norm
    projection = weights.in_proj[:D] if class_token_only else weights.in_proj
    uz_BLE = torch.mm(xhat_TC, projection.t()).view(B, L, -1)
    u_BLD, z_BMD = _split(uz_BLE, xhat_TC, weights.in_proj, class_token_only)
    H = _reads(L, class_token_only)
    schedule, from_step = kernels.schedule_scan(recurrence, u_BLD, H, weights.x_proj, weights.step_proj)
    v_2BHD, k_2BHN, q_2BHN, step_2BHR, logits_2BHD = _project(u_BLD, weights, class_token_only, logits=not from_step)
    y_2BMD, states = scans.scan_forward(
        recurrence, v_2BHD, step_2BHR if from_step else logits_2BHD, k_2BHN, q_2BHN,
        rates[0] if rates else None, weights.skip, weights.step_bias, REVERSE, keep,
        schedule=schedule, step_proj_GDR=weights.step_proj if from_step else None,
    )  # fmt: skip
    if class_token_only:
        y_2BMD = torch.stack([y_2BMD[0, :, (L - 1) // 2], y_2BMD[1, :, 0]]).unsqueeze(2)
        x_TC = _wanted(x_BLC, class_token_only).clone(memory_format=torch.contiguous_format).view(B, C)
    out_TC, mean_BMD, next_normed = kernels.gate_outproj(
        x_TC, y_2BMD, z_BMD, scale_B, weights.out_proj, tiles, keep, eps if norm_next else None
    )  # fmt: skip
    saved = [uz_BLE, mean_BMD, states, packed, *rates, *([] if normed else [xhat_TC, scale_T])]
    return [out_TC.view(B, -1, C), *(next_normed or (None, None)), *(saved if keep else [])]


def _block(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only, norm_next,
    keep,
):  # fmt: skip
    """The block's output, its norm if `norm_next` and it comes with the output, and what backward needs if `keep`."""
    y_BMC, xhat_TC, scale_T, *saved = _forward(
        recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only,
        norm_next, keep,
    )  # fmt: skip
    return y_BMC, [] if xhat_TC is None else [xhat_TC, scale_T], saved


@planned()
def _backward(
    recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, shapes, class_token_only, prenormed, flat,
    saved,
):  # fmt: skip
    """Gradients of x, xhat (None unless `prenormed`), out_proj, of both A_log or None, and what `unpack_gradients` has.

    Of out_proj and `directions` the shapes are enough: what they were as forward ran is packed.
    """
    dx_BMC, dnext_TC, scale_B, norm_C, in_proj = map(aligned, (dx_BMC, dnext_TC, scale_B, norm_C, in_proj))
    next_normed, saved = [aligned(t) for t in next_normed], [aligned(t) for t in saved]
    uz_BLE, mean_BMD, states, packed, *rates, xhat_TC, scale_T = saved
    (B, L, E), C, dtype = uz_BLE.shape, xhat_TC.shape[1], uz_BLE.dtype
    out_proj, *directions = [norm_C.new_empty(shape) for shape in shapes]
    weights = Weights.of(packed, *kernels.packed_sizes(out_proj, directions))
    dout_TC, dx_TC = None, dx_BMC.view(-1, C)
    if dnext_TC is not None:
        dx_TC, dout_TC = kernels.norm_backward(dnext_TC, *next_normed, dx_TC)
    dout_TC = dx_TC.to(dtype) if dout_TC is None else dout_TC

    u_BLD, z_BMD = _split(uz_BLE, xhat_TC, weights.in_proj, class_token_only)
    duz_BLE = torch.zeros_like(uz_BLE) if class_token_only else torch.empty_like(uz_BLE)
    du_BLD, dz_BMD = (duz_BLE, torch.empty_like(z_BMD)) if class_token_only else duz_BLE.chunk(2, dim=-1)
    dy_BLD = du_BLD  # which is free until the convolutions' gradient
    gated_BMD = kernels.gate_outproj_backward(
        dout_TC, weights.out_proj, mean_BMD, z_BMD, scale_B, _wanted(dy_BLD, class_token_only), dz_BMD
    )
    dout_proj = _mm(dout_TC.t(), gated_BMD.flatten(0, 1))

    v_2BHD, k_2BHN, q_2BHN, step_2BHR, logits_2BHD = _project(u_BLD, weights, class_token_only)
    _, _, H, D = v_2BHD.shape
    # that of the direction that reads the last H tokens begins with them
    dy_2BHD = dy_BLD.as_strided((2, B, H, D), ((L - H) * dy_BLD.stride(1), *dy_BLD.stride()))
    dv_2BHD, dlogits_2BHD, dk_2BHN, dq_2BHN, drates, dchannels = scans.scan_backward(
        recurrence, dy_2BHD, v_2BHD, logits_2BHD, k_2BHN, q_2BHN, rates[0] if rates else None, weights.skip,
        weights.step_bias, states, REVERSE, overwrite_step_logits=True,
    )  # fmt: skip
    dprojected_2TP, dstep_proj = kernels.dt_proj_backward(
        dlogits_2BHD.flatten(1, 2), step_2BHR.flatten(1, 2), weights.step_proj, dk_2BHN.flatten(1, 2),
        dq_2BHN.flatten(1, 2),
    )  # fmt: skip
    dx_proj = kernels.products_over_tokens(dprojected_2TP, v_2BHD.flatten(1, 2))
    dfilters = kernels.conv_backward(
        u_BLD, dv_2BHD, dprojected_2TP, weights.x_proj, weights.conv, weights.conv_bias, du_BLD
    )

    duz_TE = duz_BLE.flatten(0, 1)
    dfolded = _mm(duz_TE.t(), xhat_TC)
    dxhat_TC = torch.mm(duz_TE, weights.in_proj[:E])
    if class_token_only:  # what z adds, and zeros for the residual stream of the other tokens
        dz_BD, xhat_BC, dxhat_BC = [
            _wanted(t_BLX, class_token_only).squeeze(1)
            for t_BLX in (dz_BMD, xhat_TC.view(B, L, C), dxhat_TC.view(B, L, C))
        ]
        dfolded = torch.cat([dfolded, _mm(dz_BD.t(), xhat_BC)])
        dxhat_BC.addmm_(dz_BD, weights.in_proj[E:])
        dx_TC = F.pad(dx_TC.view(B, 1, C), (0, 0, (L - 1) // 2, L // 2)).view(-1, C)
    dweights = kernels.unpack_gradients(
        norm_C, in_proj, directions, dfolded, dfilters, dx_proj, dstep_proj, dchannels, dtype, flat
    )  # fmt: skip
    if not prenormed:
        dx_TC, _ = kernels.norm_backward(dxhat_TC, xhat_TC, scale_T, dx_TC)
    dA_log = (drates * rates[0]).to(directions[6].dtype) if rates else None  # d(-exp(A_log)) / dA_log is -exp(A_log)
    return [dx_TC.view(B, L, C), dxhat_TC if prenormed else None, dout_proj.to(out_proj.dtype), dA_log, *dweights]


def _in_order(dout_proj: Tensor, dA_log: tuple[Tensor, ...], dnorm, din_proj, *ddirections) -> list[Tensor]:
    """Gradients of norm_C, in_proj, out_proj and of every tensor of directions."""
    if dA_log:
        ddirections = *ddirections[:6], dA_log[0], *ddirections[6:], dA_log[1]
    return [dnorm, din_proj, dout_proj, *ddirections]


@functools.lru_cache(maxsize=256)
def _stand_ins(norm_C: tuple, in_proj: tuple, *directions: tuple) -> list[Tensor]:
    """Tensors of the sizes of what `unpack_gradients` has, in no memory."""
    half = len(directions) // 2
    shapes = norm_C, in_proj, *directions[:6], *directions[half : half + 6]
    return [torch.empty(shape, device="meta") for shape in shapes]


def _block_backward(
    recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj, directions, class_token_only,
    prenormed, saved,
):  # fmt: skip
    """`_backward`, with an empty tensor in place of None."""
    _check_backward(
        recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj, directions, class_token_only,
        saved,
    )  # fmt: skip
    shapes = _shapes(out_proj, directions)
    dx_BLC, dxhat_TC, dout_proj, dA_log, *dweights = _backward(
        recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, shapes, class_token_only, prenormed, False,
        saved,
    )  # fmt: skip
    # an operator's results share no memory
    dA_log = () if dA_log is None else tuple(t.clone() for t in dA_log)
    gradients = _in_order(dout_proj, dA_log, *dweights)
    if dx_BLC.data_ptr() == dx_BMC.data_ptr():  # an operator returns nothing that it was given
        dx_BLC = dx_BLC.clone()
    return [dx_BLC, dx_BLC.new_empty(0, dtype=saved[0].dtype) if dxhat_TC is None else dxhat_TC, *gradients]


def _shapes(out_proj: Tensor, directions: list[Tensor]) -> tuple:
    return tuple([t.shape for t in (out_proj, *directions)])


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32."""
    return torch.mm(a, b) if a.dtype.itemsize >= 4 else torch.mm(a, b, out_dtype=torch.float32)


@torch.library.register_fake("vil::block")
def _fake_block(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only, norm_next,
    keep,
):  # fmt: skip
    _check_forward(recurrence, x_BLC, normed, scale_B, norm_C, in_proj, out_proj, directions, dtype)
    (B, L, C), D = x_BLC.shape, out_proj.shape[1]
    N = (directions[2].shape[0] - directions[3].shape[1]) // 2
    M, H, E = (1, _reads(L, True), D) if class_token_only else (L, L, 2 * D)
    y_BMC = x_BLC.new_empty(B, M, C)
    norm = [x_BLC.new_empty(B * L, C, dtype=dtype), x_BLC.new_empty(B * L)]
    norm_next = norm_next and not class_token_only and kernels.runs_hopper_kernels(B * L, C, D, dtype, x_BLC.device)
    next_normed = norm if norm_next else []
    if not keep:
        return y_BMC, next_normed, []
    packed = kernels.packed_size(*kernels.packed_sizes(out_proj, directions), dtype)
    shapes = [(B, L, E), (B, M, D), (2, B, chunk_state_count(H), N, D), (packed,)]
    saved = [x_BLC.new_empty(shape, dtype=t) for shape, t in zip(shapes, (dtype, dtype, FP32, dtype))]
    saved += _rates(directions)
    return y_BMC, next_normed, saved + ([] if normed else [t.clone() for t in norm])


@torch.library.register_fake("vil::block_backward")
def _fake_block_backward(
    recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj, directions, class_token_only,
    prenormed, saved,
):  # fmt: skip
    _check_backward(
        recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj, directions, class_token_only,
        saved,
    )  # fmt: skip
    (B, L, _), xhat_TC = saved[0].shape, saved[-2]
    gradients = [t.new_empty(t.shape) for t in (norm_C, in_proj, out_proj, *directions)]
    return [dx_BMC.new_empty(B, L, dx_BMC.shape[2]), xhat_TC.new_empty(xhat_TC.shape if prenormed else 0), *gradients]


class _Block(torch.autograd.Function):
    """The operator with its gradient. PyTorch's `register_autograd` would do, but takes the host longer."""

    @staticmethod
    def forward(
        ctx, at_once, recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, dtype, class_token_only, norm_next,
        given, *tensors,
    ):  # fmt: skip
        normed, directions, prenormed = list(tensors[:given]), list(tensors[given:]), given > 0
        run = _block if at_once else _below_autograd
        y_BMC, next_normed, saved = run(
            recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only,
            norm_next, True,
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # no gradients of zeros for what is only kept
        ctx.mark_non_differentiable(*next_normed[1:], *(() if at_once else saved))
        ctx.options = at_once, recurrence, class_token_only, prenormed
        ctx.lengths = len(next_normed), len(saved) + len(normed)
        ctx.shape = y_BMC.shape
        if at_once:
            ctx.shapes = _shapes(out_proj, directions)
            ctx.save_for_backward(*next_normed, *saved, *normed, scale_B, norm_C, in_proj)
        else:
            ctx.save_for_backward(*next_normed, *saved, *normed, scale_B, norm_C, in_proj, out_proj, *directions)
        return len(next_normed), y_BMC, *next_normed, *(() if at_once else saved)

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dx_BMC, *others):
        at_once, recurrence, class_token_only, prenormed = ctx.options
        after, kept = ctx.lengths
        dnext_TC, tensors = others[0] if after else None, ctx.saved_tensors
        next_normed, saved = list(tensors[:after]), list(tensors[after : after + kept])
        scale_B, norm_C, in_proj, *others = tensors[after + kept :]
        if dx_BMC is None:
            dx_BMC = saved[0].new_zeros(ctx.shape, dtype=FP32)
        arguments = recurrence, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj
        if at_once:
            dx_BLC, dxhat_TC, dout_proj, dA_log, dweights = _backward(
                *arguments, ctx.shapes, class_token_only, prenormed, True, saved
            )  # fmt: skip
            dweights = kernels.unflatten(dweights, _stand_ins(norm_C.shape, in_proj.shape, *ctx.shapes[1:]))
            gradients = _in_order(dout_proj, () if dA_log is None else dA_log.unbind(), *dweights)
        else:
            dx_BLC, dxhat_TC, *gradients = torch.ops.vil.block_backward(
                *arguments, others[0], others[1:], class_token_only, prenormed, saved
            )  # fmt: skip
        dnorm, din_proj, dout_proj, *ddirections = gradients
        dnormed = (dxhat_TC, None) if prenormed else ()
        return (
            None, None, dx_BLC, None, None, dnorm, din_proj, dout_proj, None, None, None, None, *dnormed, *ddirections,
        )  # fmt: skip


# `_Block.apply` without its question whether functions are transformed, which `runs_at_once` has answered
_apply = super(torch.autograd.Function, _Block).apply


def _below_autograd(*arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.vil.block(*arguments)


def _differentiable_block(
    recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only, norm_next,
    keep, at_once=False,
):  # fmt: skip
    if not keep:
        return _below_autograd(
            recurrence, x_BLC, normed, scale_B, eps, norm_C, in_proj, out_proj, directions, dtype, class_token_only,
            norm_next, False,
        )  # fmt: skip
    count, y_BMC, *others = (_apply if at_once else _Block.apply)(
        at_once, recurrence, x_BLC, scale_B, eps, norm_C, in_proj, out_proj, dtype, class_token_only, norm_next,
        len(normed), *normed, *directions,
    )  # fmt: skip
    return y_BMC, others[:count], others[count:]


torch.library.impl("vil::block", "CUDA", _block)
torch.library.impl("vil::block_backward", "CUDA", _block_backward)
torch.library.impl("vil::block", "Autograd", _differentiable_block)
