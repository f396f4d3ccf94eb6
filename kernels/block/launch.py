"""Launches the kernels of all of a block but the scan.

They are in pack.cu, conv.cu, conv_xproj.cu, dt_proj_bwd.cu, gate_outproj.cu, gate_outproj_sm90.cu and
gate_outproj_bwd_sm90.cu; docs/kernels.md says what each computes. Where a kernel has dynamic shared memory, the host's
count of its bytes is the macro BLOCK_BYTES, which the kernel compares with its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda import hardware
from ..cuda.compiler import launch
from ..cuda.elements import ELEMENT, vector_width
from ..cuda.plan import place
from ..scan.cuda_scan import forward_schedule
from ..scan.heuristics import Schedule

WARPS = 4  # of a CTA, as in pack.cu and conv.cu
ALIGNMENT = 64  # elements, where weights and gradients that share memory begin
STAGES, SLOTS = 5, 2  # of gate_outproj_sm90.cu: weights and tokens on their way at once


class Weights(NamedTuple):
    """The weights as the kernels and products take them: projections in the products' dtype, others in fp32."""

    in_proj: Tensor  # (2D, C), the norm's weight in it: in_proj @ (norm * xhat) = (in_proj * norm) @ xhat
    out_proj: Tensor  # (C, D)
    x_proj: Tensor  # (2, R + 2N, D), with R padded by zeros to a multiple of 8, which fast matrix products need
    step_proj: Tensor  # (2, D, R)
    conv: Tensor  # (2, D, K)
    conv_bias: Tensor  # (2, D)
    step_bias: Tensor  # (2, D)
    skip: Tensor  # (2, D)

    @classmethod
    def of(cls, packed: Tensor, C: int, D: int, P: int, R: int, taps: int) -> Weights:
        """Views of what `pack_weights` has written: `packed_size` elements of the products' dtype. P and R padded."""
        views, start = [], 0
        for shape, fp32 in _packed_parts(C, D, P, R, taps):
            length = _length(shape, packed.dtype, fp32)
            part = packed[start : start + length]
            start += length
            if fp32 and packed.dtype.itemsize < 4:
                part = part.view(torch.float32)
            views.append(part[: math.prod(shape)].view(shape))
        return cls(*views)


def _packed_parts(C: int, D: int, P: int, R: int, taps: int) -> list[tuple[tuple[int, ...], bool]]:
    """The shapes of `Weights`, and which are in fp32 at least."""
    products = (2 * D, C), (C, D), (2, P, D), (2, D, R)
    return [*((shape, False) for shape in products), ((2, D, taps), True), *3 * [((2, D), True)]]


def _length(shape: tuple[int, ...], dtype: torch.dtype, fp32: bool) -> int:
    """Elements of `dtype` that a part takes, so that the next begins where vectors do."""
    elements = math.prod(shape) * (2 if fp32 and dtype.itemsize < 4 else 1)
    return elements + -elements % ALIGNMENT


def packed_size(C: int, D: int, P: int, R: int, taps: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that all weights take."""
    return sum(_length(shape, dtype, fp32) for shape, fp32 in _packed_parts(C, D, P, R, taps))


def packed_sizes(out_proj: Tensor, directions: list[Tensor]) -> tuple[int, int, int, int, int]:
    """C, D, P, R and taps of these, with R padded."""
    (C, D), (conv, _, x_proj, step, *_) = out_proj.shape, directions
    padding = -step.shape[1] % 8
    return C, D, x_proj.shape[0] + padding, step.shape[1] + padding, conv.shape[-1]


def pack_weights(
    norm_C: Tensor, in_proj: Tensor, out_proj: Tensor, directions: list[Tensor], dtype: torch.dtype,
    tiles: Tensor | None, x_TC: Tensor | None, eps: float, copy: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The weights of a block, all of one dtype, as `Weights.of` sees them; and `tiles` as `gate_outproj` does.

    And the norm of x_TC but for its weight, if it is given: x / sqrt(mean(x^2) + eps) in `dtype`, the factors (T,) in
    fp32, and x or a copy, which costs little here.
    """
    C, D, P, padded, taps = sizes = packed_sizes(out_proj, directions)
    packed = torch.empty(packed_size(*sizes, dtype), device=out_proj.device, dtype=dtype)
    views = Weights.of(packed, *sizes)
    T, (xhat_TC, scale_T, copy_TC) = 0, (None, None, None)
    if x_TC is not None:
        T, (xhat_TC, scale_T) = len(x_TC), _empty_norm(x_TC, dtype)
        copy_TC = torch.empty_like(x_TC) if copy else None
    vector = 4 if C % 4 == D % 4 == 0 else 1
    packing = -(-((3 * C * D + 2 * P * D) // vector + 2 * D * (padded + taps + 1)) // 256)
    launch("block/pack", "pack_weights", _macros(dtype, vector, C, taps, norm_C.dtype), packing + -(-T // 8), 256, dict(
        norm=norm_C, in_proj=in_proj, out_proj=out_proj, **_by_direction("", directions), packed_in=views.in_proj,
        packed_out=views.out_proj, tiles=tiles, packed_conv=views.conv, packed_conv_bias=views.conv_bias,
        packed_x=views.x_proj, packed_step=views.step_proj, packed_step_bias=views.step_bias, packed_skip=views.skip,
        channels=D, projections_=P, rank_=directions[3].shape[1], padded_rank_=padded, x=x_TC, xhat=xhat_TC,
        scale=scale_T, copy=copy_TC, tokens=T, eps=eps, packing=packing,
    ))  # fmt: skip
    return packed, [xhat_TC, scale_T, copy_TC if copy else x_TC]


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
    macros = _macros(dtype, 4 if C % 4 == 0 else 1, C, taps, norm_C.dtype)
    launch("block/pack", "unpack_gradients", macros, blocks, 256, dict(
        norm=norm_C, in_proj=in_proj, dfolded=dfolded, dfilters=dfilters, dx_projs=dx_proj, dsteps=dstep_proj,
        filter_parts=dfilters.shape[0], x_parts=dx_proj.shape[1], step_parts=dstep_proj.shape[1], dchannels=dchannels,
        dnorm=gradients[0], din_proj=gradients[1], **_by_direction("d", gradients[2:]), channels=D, projections_=P,
        rank_=directions[3].shape[1], padded_rank_=padded,
    ))  # fmt: skip
    return [memory] if flat else gradients


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of it one behind the other, with these shapes, at a fraction of what one view by one takes the host."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))


def norm_backward(dxhat_TC: Tensor, xhat_TC: Tensor, scale_T: Tensor, dresidual_TC: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x, of which xhat is one use and the residual stream the other; and the same in xhat's dtype."""
    (T, C), rounds = xhat_TC.shape, xhat_TC.dtype != dresidual_TC.dtype
    dx_TC = torch.empty_like(dresidual_TC)
    rounded_TC = torch.empty_like(xhat_TC) if rounds else dx_TC
    launch("block/pack", "norm_backward", _macros(xhat_TC.dtype, 4 if C % 4 == 0 else 1, C), -(-T // 8), 256, dict(
        dxhat=dxhat_TC, xhat=xhat_TC, scale=scale_T, dresidual=dresidual_TC, dx=dx_TC,
        rounded=rounded_TC if rounds else None, tokens=T,
    ))  # fmt: skip
    return dx_TC, rounded_TC


def _by_direction(prefix: str, directions: list[Tensor | None]) -> dict:
    """The first six weights of both directions as kernels call them, with the prefix d for gradients."""
    names, half = ("conv", "conv_bias", "x_proj", "step", "step_bias", "skip"), len(directions) // 2
    both = enumerate((directions[:half], directions[half:]))
    return {f"{prefix}{name}_{g}": t for g, weights in both for name, t in zip(names, weights)}


def _empty_norm(x_TC: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x_TC, dtype=dtype), torch.empty(len(x_TC), device=x_TC.device, dtype=x_TC.dtype)]


def conv_xproj(
    u_BLD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor, x_proj_2PD: Tensor, step_proj_2DR: Tensor, H: int,
    logits: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """v_2BHD, convolution and SiLU of both directions; v x_proj^T (2, T, P), of which R columns are the step's; logits.

    All are of the H tokens that each direction reads first, T in all. The last of the K taps is the token itself. The
    logits (2, T, D), the step times step_proj^T, are computed if wanted.
    """
    (B, L, D), P, taps = u_BLD.shape, x_proj_2PD.shape[1], conv_2DK.shape[2]
    R, dtype, device = step_proj_2DR.shape[2], u_BLD.dtype, place(u_BLD)
    v_2BHD = torch.empty(2, B, H, D, device=u_BLD.device, dtype=dtype)
    # what the fused kernel's copies need, its shared memory holds, its 32-bit offsets within two sequences reach and
    # fills the GPU: a CTA takes 48 strips of two tokens
    strips = B * -(-L // 2)
    fits = dtype.itemsize == 2 and D % 64 == 0 and P <= 80 and taps == 4 and L >= 24 and vector_width(8, u_BLD) == 8
    fits = fits and 2 * L * u_BLD.stride(1) < 2**31
    if fits and 48 * hardware.multiprocessors(device) <= strips:
        macros = _conv_xproj_macros(dtype, D, P, R, taps, logits, hardware.shared_bytes(device))
        projected_2TP = torch.empty(2, B * H, P, device=u_BLD.device, dtype=dtype)
        logits_2TD = u_BLD.new_empty(2, B * H, D) if logits else None
        launch("block/conv_xproj", "conv_xproj", macros, -(-strips // 48), 192 * macros["SPLIT"], dict(
            u=u_BLD, u_stride=u_BLD.stride(1), weights=conv_2DK, biases=conv_bias_2D, x_proj=x_proj_2PD,
            step_proj=step_proj_2DR, v=v_2BHD, projected=projected_2TP, logits=logits_2TD, B=B, length=L, read=H,
            channels=D,
        ), macros["BLOCK_BYTES"])  # fmt: skip
        return v_2BHD, projected_2TP, logits_2TD
    macros = _conv_macros(dtype, vector_width(16 // dtype.itemsize, u_BLD), taps, P)
    threads = B * D // min(4, macros["VECTOR"])
    stretch = 64  # tokens that a thread takes: few enough for 512 threads a multiprocessor
    while stretch > 8 and threads * -(-L // stretch) < 512 * hardware.multiprocessors(device):
        stretch //= 2
    stretch = -(-L // (4 * -(-L // stretch))) * 4
    arguments = dict(
        u=u_BLD, u_stride=u_BLD.stride(1), weights=conv_2DK, biases=conv_bias_2D, v=v_2BHD, B=B, L=L, H=H, D=D,
        stretch=stretch,
    )  # fmt: skip
    blocks = -(-threads * -(-L // stretch) // (32 * WARPS))
    launch("block/conv", "conv", macros, blocks, 32 * WARPS, arguments)
    projected_2TP = torch.bmm(v_2BHD.flatten(1, 2), x_proj_2PD.mT)
    return v_2BHD, projected_2TP, torch.bmm(projected_2TP[..., :R], step_proj_2DR.mT) if logits else None


def _conv_xproj_macros(dtype: torch.dtype, D: int, P: int, R: int, taps: int, logits: bool, shared: int) -> dict:
    """Of conv_xproj.cu, where a CTA may have `shared` bytes."""

    def block_bytes(k_tile):
        rows = 96 + 6 * (taps - 1)
        return 2 * (rows * (k_tile + 16) * 2 + 2 * k_tile * (taps + 1) * 4 + 2 * P * k_tile * 2) + rows * 4

    split = 2 if P > 64 else 1  # a warp has no registers for the sums of wide projections and all channels' inputs
    k_tile = 128 if split == 2 and D % 128 == 0 and block_bytes(128) <= shared else 64
    return dict(
        INPUT=ELEMENT[dtype], TAPS=taps, PROJECTIONS=P, RANK=R, LOGITS=int(logits), SPLIT=split, K_TILE=k_tile,
        BLOCK_BYTES=block_bytes(k_tile),
    )  # fmt: skip


def schedule_scan(
    recurrence: str, u_BLD: Tensor, H: int, x_proj_2PD: Tensor, step_proj_2DR: Tensor
) -> tuple[Schedule, bool]:  # fmt: skip
    """How the scan of H tokens in both directions runs, and whether it computes their step logits itself."""
    (_, P, _), (_, _, R) = x_proj_2PD.shape, step_proj_2DR.shape
    schedule = forward_schedule(recurrence, u_BLD[:, :H].expand(2, -1, -1, -1), (P - R) // 2, R)
    return schedule, schedule.projects_step(H, R)


def conv_backward(
    u_BLD: Tensor, dv_2BHD: Tensor, dprojected_2TP: Tensor, x_proj_2PD: Tensor, conv_2DK: Tensor, conv_bias_2D: Tensor,
    du_BLD: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the convolutions, given those of v, less what its projections add, and of these.

    They are of the H tokens that each direction reads first; others have none. Writes du_BLD; returns the gradients of
    weights and biases, the biases last: (parts, 2, K + 1, D), to be summed.
    """
    B, L, D = u_BLD.shape
    P, taps, size = dprojected_2TP.shape[2], conv_2DK.shape[2], u_BLD.element_size()
    if size == 4:
        dv_2BHD.flatten(1, 2).baddbmm_(dprojected_2TP, x_proj_2PD)
    macros = _conv_macros(u_BLD.dtype, vector_width(16 // size, u_BLD), taps, P)
    blocks, resident = -(-D // (8 * WARPS * min(2, macros["VECTOR"]))), 3 if size == 4 or P <= 80 else 2
    # No more parts than keep the GPU busy: each is written, and added by another kernel. They all get as many
    # stretches of tokens, four at a time, and these are as long as that allows.
    most = max(1, resident * hardware.multiprocessors(place(u_BLD)) // blocks)
    rounds = -(-B * -(-L // 256) // (4 * most))
    stretch = max(8, -(-L // (4 * max(1, 4 * most * rounds // B))) * 4)
    parts = min(-(-B * -(-L // stretch) // 4), most)
    dfilters = torch.empty(parts, 2, taps + 1, D, device=u_BLD.device, dtype=torch.float32)
    launch("block/conv", "conv_backward", macros, parts * blocks, 32 * WARPS, dict(
        u=u_BLD, u_stride=u_BLD.stride(1), dv=dv_2BHD, dprojected=dprojected_2TP, x_proj=x_proj_2PD, weights=conv_2DK,
        biases=conv_bias_2D, du=du_BLD, du_stride=du_BLD.stride(1), dfilters=dfilters, B=B, L=L, H=dv_2BHD.shape[2],
        D=D, stretch=stretch, parts=parts,
    ), macros["BLOCK_BYTES"])  # fmt: skip
    return dfilters


def dt_proj_backward(
    dlogits_2TD: Tensor, step_2TR: Tensor, step_proj_2DR: Tensor, dk_2TN: Tensor, dq_2TN: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of all columns of the projections (2, T, P): dlogits step_proj, dk and dq; and of step_proj.

    The latter, dlogits^T step, in parts of the tokens: (2, parts, D, R) in fp32.
    """
    (_, T, D), R, N = dlogits_2TD.shape, step_proj_2DR.shape[2], dk_2TN.shape[2]
    # a warp's registers hold its part of step_proj and of its gradient
    fits = dlogits_2TD.element_size() == 2 and D <= 768 and R <= 24 and D % 128 == R % 8 == 0
    if not fits:
        dstep_2TR = torch.bmm(dlogits_2TD, step_proj_2DR)
        dprojected_2TP = torch.cat([dstep_2TR, dk_2TN, dq_2TN], dim=-1)
        return dprojected_2TP, products_over_tokens(dlogits_2TD, step_2TR)
    parts = min(-(-T // 16), -(-hardware.multiprocessors(place(dlogits_2TD)) // 2))
    dprojected_2TP = torch.empty(2, T, R + 2 * N, device=dlogits_2TD.device, dtype=dlogits_2TD.dtype)
    dstep_proj = torch.empty(2, parts, D, R, device=dlogits_2TD.device, dtype=torch.float32)
    macros = _dt_proj_backward_macros(dlogits_2TD.dtype, D, R, N)
    launch("block/dt_proj_bwd", "dt_proj_backward", macros, 2 * parts, 256, dict(
        dlogits=dlogits_2TD, step=step_2TR, step_stride=step_2TR.stride(1), step_directions=step_2TR.stride(0),
        step_proj=step_proj_2DR, dk=dk_2TN, dq=dq_2TN, dprojected=dprojected_2TP, dstep_proj=dstep_proj, tokens=T,
        parts=parts,
    ), macros["BLOCK_BYTES"])  # fmt: skip
    return dprojected_2TP, dstep_proj


def _dt_proj_backward_macros(dtype: torch.dtype, D: int, R: int, N: int) -> dict:
    stages, warps, tile = 3, 8, 16
    stage = tile * (D + 8 + R + (8 if R % 16 == 0 else 0)) * 2
    block_bytes = stages * stage + 2 * warps * tile * R * 4
    return dict(INPUT=ELEMENT[dtype], CHANNELS=D, RANK=R, STATES=N, BLOCK_BYTES=block_bytes)


def products_over_tokens(a_2TM: Tensor, b_2TN: Tensor) -> Tensor:
    """a^T b in fp32 by parts of the tokens (2, parts, M, N): one product would leave most of the GPU idle."""
    T = a_2TM.shape[1]
    parts = next(parts for parts in range(min(T, 16), 0, -1) if T % parts == 0)
    a, b = (t.unflatten(1, (parts, -1)).flatten(0, 1) for t in (a_2TM, b_2TN))
    products = torch.bmm(a.mT, b) if a.dtype.itemsize >= 4 else torch.bmm(a.mT, b, out_dtype=torch.float32)
    return products.unflatten(0, (2, parts))


def _conv_macros(dtype: torch.dtype, vector: int, taps: int, P: int) -> dict:
    """Of conv.cu; the shared memory is that of the gradients."""
    span, products = 8 * WARPS * min(2, vector), -(-P // 16) if dtype.itemsize == 2 else 0
    rows = 3 * (span * dtype.itemsize + 16) + 2 * (16 * products + 8) * dtype.itemsize
    return dict(INPUT=ELEMENT[dtype], VECTOR=vector, TAPS=taps, PROJECTIONS=P, BLOCK_BYTES=2 * 32 * rows)


def gate(y_2BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """scale * mean * silu(z) of the mean of both directions; and that mean if `keep`, else an empty tensor."""
    _, B, L, D = y_2BLD.shape
    gated_BLD = torch.empty(B, L, D, device=y_2BLD.device, dtype=y_2BLD.dtype)
    mean_BLD = torch.empty_like(gated_BLD) if keep else gated_BLD.new_empty(0)
    means = mean_BLD if keep else None
    arguments = dict(
        y=y_2BLD, z=z_BLD, z_stride=_token_stride(z_BLD), scales=scale_B, gated=gated_BLD, means=means, tokens=B * L,
        L=L, D=D,
    )  # fmt: skip
    _launch("gate", _macros(y_2BLD.dtype, vector_width(4, z_BLD)), B * L, arguments)
    return gated_BLD, mean_BLD


def fuses_product(x_TC: Tensor, D: int, dtype: torch.dtype) -> bool:
    """Whether `gate_outproj` is one kernel: there is one for few tokens and, on Hopper, one for many."""
    (T, C), multiprocessors = x_TC.shape, hardware.multiprocessors(place(x_TC))
    if dtype.itemsize > 2 or C not in (192, 384) or D != 2 * C or vector_width(4, x_TC) < 4:
        return False
    return _few_blocks(T, C) <= multiprocessors or runs_hopper_kernels(T, C, D, dtype, place(x_TC))


def runs_hopper_kernels(T: int, C: int, D: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether gate_outproj_sm90.cu, which computes the norm of its result too, and its backward take these tokens."""
    fits = dtype.itemsize == 2 and C in (192, 384) and D == 2 * C
    return fits and hardware.is_hopper(device) and 64 * hardware.multiprocessors(device) <= T


def empty_tiles(T: int, out_proj: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Room for out_proj as that kernel wants it, if it is to run."""
    takes = runs_hopper_kernels(T, *out_proj.shape, dtype, place(out_proj))
    return torch.empty_like(out_proj, dtype=dtype, memory_format=torch.contiguous_format) if takes else None


def gate_outproj(
    x_TC: Tensor, y_2BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, out_proj_CD: Tensor, tiles: Tensor | None,
    keep: bool, eps: float | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """x + gated out_proj^T, with `gate`'s two results; written over x unless `fuses_product`.

    And its norm with the factors, as `pack_weights` has them, if `eps` is given and there are `tiles`, else an empty
    list. With `tiles`, written by `pack_weights`, x is to be at a multiple of 16 bytes and z the last half of uz.
    """
    (_, B, L, D), (T, C) = y_2BLD.shape, x_TC.shape
    if not fuses_product(x_TC, D, y_2BLD.dtype):
        gated_BLD, mean_BLD = gate(y_2BLD, z_BLD, scale_B, keep)
        return _add_product(x_TC, gated_BLD.flatten(0, 1), out_proj_CD.t()), mean_BLD, []
    out_TC = torch.empty_like(x_TC)
    mean_BLD = y_2BLD.new_empty((B, L, D) if keep else 0)
    means, multiprocessors = mean_BLD if keep else None, hardware.multiprocessors(place(x_TC))
    if tiles is not None:
        assert _token_stride(z_BLD) == 2 * D
        assert x_TC.data_ptr() % 16 == 0
        norm = [] if eps is None else _empty_norm(x_TC, y_2BLD.dtype)
        macros = _gate_outproj_macros(y_2BLD.dtype, C, keep)
        rounds, tokens = _shares(T, multiprocessors)
        xhat_TC, norms_T = norm or (None, None)
        launch("block/gate_outproj_sm90", "gate_outproj", macros, multiprocessors, 384, dict(
            y=y_2BLD, z=z_BLD, scales=scale_B, tiles=tiles, x=x_TC, out=out_TC, means=means, xhat=xhat_TC,
            norms=norms_T, eps=eps or 0.0, tokens=T, length=L, tokens_of_group=tokens, rounds=rounds,
        ), macros["BLOCK_BYTES"])  # fmt: skip
        return out_TC, mean_BLD, norm
    macros = dict(INPUT=ELEMENT[y_2BLD.dtype], WIDTH=C)
    launch("block/gate_outproj", "gate_outproj_of_few", macros, _few_blocks(T, C), D // 2, dict(
        y=y_2BLD, z=z_BLD, z_stride=_token_stride(z_BLD), scales=scale_B, out_proj=out_proj_CD, x=x_TC, out=out_TC,
        means=means, tokens=T, length=L,
    ))  # fmt: skip
    return out_TC, mean_BLD, []


def _gate_outproj_macros(dtype: torch.dtype, C: int, keep: bool) -> dict:
    """Of gate_outproj_sm90.cu."""
    barriers = 2 * STAGES + 2 * 2 * SLOTS
    block_bytes = STAGES * C * 32 * 2 + 2 * SLOTS * 3 * 64 * 64 * 2 + barriers * 8
    return dict(INPUT=ELEMENT[dtype], WIDTH=C, KEEP=int(keep), STAGES=STAGES, SLOTS=SLOTS, BLOCK_BYTES=block_bytes)


def _gate_outproj_backward_macros(dtype: torch.dtype, C: int) -> dict:
    """Of gate_outproj_bwd_sm90.cu: weights of 128 channels, and as many slots for each of two groups as fit."""
    weights, slot = C * 128 * 2, 64 * 128 + 2 * 8
    slots = (227 * 1024 - weights - 8) // (2 * slot)
    return dict(INPUT=ELEMENT[dtype], WIDTH=C, SLOTS=slots, BLOCK_BYTES=weights + 2 * slots * slot + 8)


def _few_blocks(T: int, C: int) -> int:
    """CTAs of `gate_outproj_of_few`: one for 16 tokens and 48 outputs."""
    return -(-T // 16) * (C // 48)


def _add_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x += a @ b, with no rounding in between."""
    if a.dtype == x.dtype:
        return torch.addmm(x, a, b, out=x)
    return torch.addmm(x, a, b, out_dtype=x.dtype, out=x)


def gate_outproj_backward(
    dout_TC: Tensor, out_proj_CD: Tensor, mean_BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, dy_BLD: Tensor,
    dz_BLD: Tensor,
) -> Tensor:  # fmt: skip
    """`gate_backward` of the product's gradient dout out_proj.

    On Hopper both are one kernel, if the tokens fill the GPU and z, dy and dz are halves of uz and its gradient.
    """
    (T, C), (_, L, D) = dout_TC.shape, mean_BLD.shape
    dout_TC = dout_TC.contiguous()
    halves = all(_token_stride(t) == 2 * D for t in (z_BLD, dy_BLD, dz_BLD))
    aligned = vector_width(8, dout_TC, out_proj_CD, mean_BLD, z_BLD, dy_BLD, dz_BLD) == 8
    if not (runs_hopper_kernels(T, C, D, dout_TC.dtype, place(dout_TC)) and halves and aligned):
        dgated_BLD = torch.mm(dout_TC, out_proj_CD).view_as(mean_BLD)
        return gate_backward(dgated_BLD, mean_BLD, z_BLD, scale_B, dy_BLD, dz_BLD)
    gated_BLD = torch.empty_like(mean_BLD)
    slices = D // 128  # of channels; a CTA has one of them and a multiprocessor's shared memory
    blocks = max(1, hardware.multiprocessors(place(dout_TC)) // slices)  # of each
    rounds, tokens = _shares(T, blocks)
    macros = _gate_outproj_backward_macros(dout_TC.dtype, C)
    launch("block/gate_outproj_bwd_sm90", "gate_outproj_backward", macros, blocks * slices, 384, dict(
        dout=dout_TC, out_proj=out_proj_CD, means=mean_BLD, z=z_BLD, scales=scale_B, dy=dy_BLD, dz=dz_BLD,
        gated=gated_BLD, tokens=T, length=L, tokens_of_group=tokens, rounds=rounds,
    ), macros["BLOCK_BYTES"])  # fmt: skip
    return gated_BLD


def _shares(T: int, blocks: int) -> tuple[int, int]:
    """How often each of two groups of every block on Hopper takes tokens, at most 64 at a time, and how many."""
    rounds = -(-T // (2 * 64 * blocks))
    return rounds, -(-T // (2 * rounds * blocks))


def gate_backward(
    dgated_BLD: Tensor, mean_BLD: Tensor, z_BLD: Tensor, scale_B: Tensor | None, dy_BLD: Tensor, dz_BLD: Tensor
) -> Tensor:
    """Writes dy_BLD, of either direction, and dz_BLD; returns gated_BLD once more."""
    B, L, D = mean_BLD.shape
    gated_BLD = torch.empty_like(mean_BLD)
    arguments = dict(
        dgated=dgated_BLD, means=mean_BLD, z=z_BLD, z_stride=_token_stride(z_BLD), scales=scale_B, dy=dy_BLD,
        dy_stride=_token_stride(dy_BLD), dz=dz_BLD, dz_stride=_token_stride(dz_BLD), gated=gated_BLD, tokens=B * L,
        L=L, D=D,
    )  # fmt: skip
    _launch("gate_backward", _macros(mean_BLD.dtype, vector_width(4, z_BLD, dy_BLD, dz_BLD)), B * L, arguments)
    return gated_BLD


def _token_stride(t_BLD: Tensor) -> int:
    """From one token to the next, also of the next image: L may be 1."""
    return t_BLD.stride(0) // t_BLD.shape[1]


def _macros(
    dtype: torch.dtype, vector: int, width: int = 4, taps: int = 4, parameter: torch.dtype = torch.float32
) -> dict:
    return dict(INPUT=ELEMENT[dtype], PARAMETER=ELEMENT[parameter], VECTOR=vector, WIDTH=width, TAPS=taps)


def _launch(entry: str, macros: dict, tokens: int, arguments: dict) -> None:
    launch("block/pack", entry, macros, -(-tokens // WARPS), 32 * WARPS, arguments)
