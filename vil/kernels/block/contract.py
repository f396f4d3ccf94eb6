"""Argument limits of the operators `vil::block` and `vil::block_backward`, and checks that name the invalid argument.

Dimension letters of this module. If weights.py defines the same letter, this list applies:

    E 2D    P R + 2N    K filter taps    S states between chunks    U columns of uz    W elements of the packed weights
    M output tokens of the last block    m output tokens of a block    l tokens that the recurrence reads
    T tokens of the batch before the first block    t tokens of the batch after the last block
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..checks import Row, check, check_choice, check_given, given
from ..scan.chunks import chunk_state_count
from . import kernels
from .lines import Lines
from .tokens import Tokens
from .weights import BackwardOptions, Options, SavedForBackward, Sizes, scales_and_weights

FP32 = torch.float32
TAPS = (2, 3, 4)  # convolution widths that the kernels support
WEIGHTS = 2**32 - 1  # maximum number of elements of in_proj, which kernels index with 32 bits

# dimension letters of each weight; `BlockWeights.flat` lists the weights of BLOCK, and then of each direction
DIRECTION = dict(conv="D1K", conv_bias="D", x_proj="PD", step_proj="DR", step_bias="D", skip="D", A_log="DN")
BLOCK = dict(norm="C", in_proj="EC", out_proj="CD")
# dimension letters and dtype of each field of `SavedForBackward`, where None means the dtype of the matrix products
SAVED: dict[str, tuple[str, torch.dtype | None]] = {
    "uz": ("BLU", None),
    "mean": ("BmD", None),
    "states": ("2BSND", FP32),
    "packed": ("W", None),
    "A": ("2DN", FP32),
    "line_means": ("2BlD", None),
    "xhat": ("TC", None),
    "rstd": ("T", FP32),
}


def check_lists(recurrence: str, blocks: int, **lists: Any) -> None:
    """Raise a ValueError unless an operator's list arguments have the expected lengths.

    `blocks` is the length of the argument `scales`. Each keyword argument is a tuple of the list to check and the
    permitted lengths of this list.
    """
    check_choice("recurrence", recurrence, backends.RECURRENCES)
    if blocks < 1:
        raise ValueError("scales must hold a tensor or None for each block, got an empty list")
    for name, (items, *lengths) in lists.items():
        if len(items) not in lengths:
            expected = " or ".join(map(str, lengths))
            raise ValueError(f"{name} must hold {expected} items if scales has {blocks} items, got {len(items)}")


def check_forward(options: tuple[Options, ...], keep: bool, flat: list[Tensor | None]) -> None:
    """Raise a ValueError if an argument of `forward_blocks` is invalid or not supported by the kernels."""
    x_BLC, xhat_TC, rstd_T, *_ = flat
    check_given(x_BLC=x_BLC)
    check_choice("dtype", options[0].dtype, backends.DTYPES)
    residual: Row = "x_BLC", x_BLC, "BLC", FP32
    direction = [*DIRECTION.items()][: 7 if options[0].recurrence == "selective" else 6]
    layouts = [*BLOCK.items(), *direction, *direction]
    sizes = {"1": 1}  # size of each dimension letter, equal for all blocks
    for i, (scale_B, weights) in enumerate(scales_and_weights(len(options), flat)):
        first, dtype = i * len(layouts), weights[0].dtype
        check_choice(f"dtype of weights[{first}] (norm)", dtype, backends.DTYPES)
        rows: list[Row] = [
            (f"weights[{first + j}] ({name})", t, layout, dtype)
            for j, (t, (name, layout)) in enumerate(zip(weights, layouts))
        ]
        check(sizes, residual, (f"scales[{i}]", scale_B, "B", FP32), *rows)
        C, D, E, P, R = (sizes[letter] for letter in "CDEPR")
        N = sizes.setdefault("N", (P - R) // 2)
        _check_sizes("weights", Sizes(C, D, N, R, sizes["K"]))
        if E != 2 * D or P != R + 2 * N:
            in_proj, x_proj = f"weights[{first + 1}] (in_proj)", f"weights[{first + 5}] (x_proj)"
            raise ValueError(f"{in_proj} must have {2 * D} rows and {x_proj} {R + 2 * N} rows, got {E} and {P}")
        _check_lines(options[i].lines, sizes["L"])
    if given(x_BLC).numel() == 0:
        raise ValueError("x_BLC must not be empty")
    sizes["T"] = sizes["B"] * sizes["L"]
    check(sizes, residual, ("normed[0]", xhat_TC, "TC", options[0].dtype), ("normed[1]", rstd_T, "T", FP32))


def check_backward(options: tuple[BackwardOptions, ...], sizes: Sizes, flat: list[Tensor | None]) -> None:
    """Raise a ValueError if an argument of `backward_blocks` is invalid or not supported by the kernels."""
    _check_sizes("sizes", sizes)
    dx_BMC, dnext_TC, next_xhat_TC, next_rstd_T, *others = flat
    check_given(dx_BMC=dx_BMC)
    last, each = options[-1], 3 + len(SavedForBackward._fields)
    if dnext_TC is not None and (next_xhat_TC is None or last.class_token_only):
        raise ValueError("dnext_TC must be None if next_normed is empty or class_token_only is True")
    uz_BLU = given(others[3])
    dtype = uz_BLU.dtype  # dtype of matrix products
    check_choice("dtype of saved[0] (uz)", dtype, backends.DTYPES)
    residual: Row = "dx_BMC", dx_BMC, "BMC", FP32

    # check uz first, because the shapes of other saved tensors follow from the number of tokens in uz
    known = sizes._asdict() | {"1": 1, "2": 2, "E": 2 * sizes.D, "W": kernels.packed_size(sizes, dtype)}
    check(known, residual, ("saved[0] (uz)", uz_BLU, "BLU", dtype))
    if given(dx_BMC).numel() == 0:
        raise ValueError(f"dx_BMC must not be empty, got the shape {tuple(given(dx_BMC).shape)}")
    B, L, M, U = (known[letter] for letter in "BLMU")
    expected = Tokens(L, last.class_token_only).M, Tokens(L, options[0].class_token_only).columns(sizes.D)
    if expected != (M, U):
        raise ValueError(
            f"dx_BMC must have {expected[0]} tokens and saved[0] (uz) must have {expected[1]} columns, got {M} tokens "
            f"and {U} columns: check class_token_only of the first and of the last block"
        )
    known.update(t=B * M, T=B * L)
    check(
        known, residual, ("dnext_TC", dnext_TC, "tC", dtype), ("next_normed[0]", next_xhat_TC, "tC", dtype),
        ("next_normed[1]", next_rstd_T, "t", FP32),
    )  # fmt: skip

    for i, own in enumerate(options):
        scale_B, norm_C, in_proj, *fields = others[i * each : (i + 1) * each]
        saved = [t for t in fields if t is not None]
        tokens, parameter = Tokens(L, own.class_token_only), given(norm_C).dtype
        scanned_tokens = own.lines.S if own.lines else tokens.H
        _check_lines(own.lines, L)
        check_choice(f"dtype of weights[{2 * i}] (norm)", parameter, backends.DTYPES)
        known.update(m=tokens.M, U=tokens.columns(sizes.D), l=scanned_tokens, S=chunk_state_count(scanned_tokens))
        check(
            known,
            residual,
            (f"scales[{i}]", scale_B, "B", FP32),
            (f"weights[{2 * i}] (norm)", norm_C, "C", parameter),
            (f"weights[{2 * i + 1}] (in_proj)", in_proj, "EC", parameter),
            *_saved_rows(own, saved, i * len(saved), dtype),
        )


def _check_sizes(argument: str, sizes: Sizes) -> None:
    """Raise a ValueError that begins with `argument` if the kernels do not support the sizes of the weights."""
    C, D, N, R, K = sizes
    if min(C, D, R) < 1:
        raise ValueError(
            f"{argument}: norm, out_proj and step_proj must not be empty, got C = {C}, D = {D} and R = {R}"
        )
    check_choice(f"{argument}: number of states in x_proj", N, backends.STATE_SIZES)
    check_choice(f"{argument}: number of taps in conv", K, TAPS)
    if D > backends.CHANNELS or 2 * D * C > WEIGHTS:
        raise ValueError(
            f"{argument}: D must be at most {backends.CHANNELS}, and in_proj must have at most {WEIGHTS} elements, "
            f"got D = {D} and {2 * D * C} elements"
        )


def _check_lines(lines: Lines | None, L: int) -> None:
    if lines and (min(lines[:2]) < 1 or lines.L != L):
        raise ValueError(
            f"lines must cover the {L - 1} patches of an image, got {lines.number} lines of {lines.length} patches"
        )


def _saved_rows(options: BackwardOptions, saved: list[Tensor], first: int, dtype: torch.dtype) -> list[Row]:
    """Return the rows with which `check` validates a block's saved tensors.

    `first` is the index of the block's first tensor in the operator's argument `saved`, and `dtype` is the dtype of
    matrix products.
    """
    missing = {"A": options.recurrence != "selective", "line_means": options.lines is None}
    fields = [(name, *field) for name, field in SAVED.items() if not missing.get(name)]
    return [
        (f"saved[{first + i}] ({name})", t, layout, own_dtype or dtype)
        for i, (t, (name, layout, own_dtype)) in enumerate(zip(saved, fields))
    ]
