"""Argument limits of the fused block operators, and checks that name the invalid argument.

Dimension letters of this module. If weights.py defines the same letter, this list applies:

    E 2D    P R + 2N    K filter taps    S states between chunks    T, t tokens of the batch before and after the block
    l tokens that the recurrence reads    U columns of uz    W elements of the packed weights
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends
from ..checks import Row, check, check_choice, check_given, given, once_a_kind
from ..scan.chunks import chunk_state_count
from . import kernels
from .lines import Lines
from .tokens import Tokens
from .weights import BackwardOptions, BlockWeights, Inputs, Normed, Options, SavedForBackward, Sizes

FP32 = torch.float32
TAPS = (2, 3, 4)  # convolution widths that the kernels support
WEIGHTS = 2**32 - 1  # maximum number of elements of in_proj, which kernels index with 32 bits

DIRECTION = dict(conv="D1K", conv_bias="D", x_proj="PD", step_proj="DR", step_bias="D", skip="D", A_log="DN")
# dimension letters and dtype of each field of `SavedForBackward`, where None means the dtype of the matrix products
SAVED: dict[str, tuple[str, torch.dtype | None]] = {
    "uz": ("BLU", None),
    "mean": ("BMD", None),
    "states": ("2BSND", FP32),
    "packed": ("W", None),
    "A": ("2DN", FP32),
    "line_means": ("2BlD", None),
    "xhat": ("TC", None),
    "rstd": ("T", FP32),
}


def check_lists(recurrence: str, pooled: bool, **lists: list[Tensor]) -> None:
    """Raise a ValueError unless an operator's list arguments have the expected lengths."""
    check_choice("recurrence", recurrence, backends.RECURRENCES)
    selective = recurrence == "selective"
    lengths = dict(
        directions=[14 if selective else 12],  # weights of two directions
        saved=[6 + selective + pooled],
        normed=[0, 2],
        next_normed=[0, 2],
    )
    for name, tensors in lists.items():
        expected = lengths[name]
        if len(tensors) not in expected:
            raise ValueError(f"{name} must hold {' or '.join(map(str, expected))} tensors, got {len(tensors)}")


def check_forward(options: Options, keep: bool, flat: list[Tensor | None]) -> None:
    """Raise a ValueError if an argument of the forward operator is invalid or not supported by the kernels."""
    x, _, _, _, norm, in_proj, out_proj, *_ = flat
    check_given(x_BLC=x, norm_C=norm, in_proj=in_proj, out_proj=out_proj)
    x_BLC, scale_B, normed, weights = Inputs.of(flat)
    residual: Row = "x_BLC", x_BLC, "BLC", FP32
    sizes = _check_weights(residual, scale_B, weights)
    check_choice("dtype", options.dtype, backends.DTYPES)
    _check_lines(options.lines, sizes["L"])

    sizes["T"] = sizes["B"] * sizes["L"]
    check(sizes, residual, *_norm_rows("normed", normed, "T", options.dtype))


@once_a_kind
def check_backward(
    recurrence, class_token_only, lines, dx_BMC, dnext_TC, next_normed, scale_B, norm_C, in_proj, out_proj, directions,
    saved,
) -> None:  # fmt: skip
    """Raise a ValueError if an argument of the backward operator is invalid or not supported by the kernels."""
    check_lists(recurrence, lines is not None, directions=directions, saved=saved, next_normed=next_normed)
    residual: Row = "dx_BMC", dx_BMC, "BMC", FP32
    weights = BlockWeights.of([norm_C, in_proj, out_proj, *directions])
    sizes = _check_weights(residual, scale_B, weights)
    check_saved(
        recurrence, class_token_only, lines, residual, dnext_TC, next_normed, sizes, weights.sizes(), saved
    )  # fmt: skip


def check_saved(
    recurrence: str, class_token_only: bool, lines: Lines | None, residual: Row, dnext_TC: Tensor | None,
    next_normed: list[Tensor], sizes: dict[str, int], weight_sizes: Sizes, saved: list[Tensor],
) -> None:  # fmt: skip
    """Raise a ValueError if a gradient or saved tensor of a block is invalid.

    `residual` describes the gradient dx_BMC as a row of `check`. `sizes` maps dimension letters to the weights' sizes.
    """
    norm = Normed(*next_normed) if next_normed else None
    if dnext_TC is not None and (norm is None or class_token_only):
        raise ValueError("dnext_TC must be None if next_normed is empty or class_token_only is True")
    dtype = saved[0].dtype
    check_choice("dtype of saved[0] (uz)", dtype, backends.DTYPES)

    # check uz first, because the shapes of other saved tensors follow from the number of tokens in uz
    sizes.update({"2": 2, "t": sizes["B"] * sizes["M"], "W": kernels.packed_size(weight_sizes, dtype)})
    saved_rows = _saved_rows(recurrence, lines, saved, dtype)
    norm_rows = _norm_rows("next_normed", norm, "t", dtype)
    check(sizes, residual, ("dnext_TC", dnext_TC, "tC", dtype), *norm_rows, saved_rows[0])
    tokens = Tokens(sizes["L"], class_token_only)
    _check_lines(lines, sizes["L"])
    expected = tokens.M, tokens.columns(sizes["D"])
    if (sizes["M"], sizes["U"]) != expected:
        found = f"{sizes['M']} and {sizes['U']}"
        need = "dx_BMC must have {} tokens, and saved[0] (uz) must have {} columns".format(*expected)
        raise ValueError(f"if class_token_only is {class_token_only}, {need}, got {found}")

    # check all saved tensors, because all dimensions are known now
    scanned_tokens = lines.S if lines else tokens.H
    sizes.update(T=sizes["B"] * tokens.L, l=scanned_tokens, S=chunk_state_count(scanned_tokens))
    check(sizes, residual, *saved_rows)


def check_run_backward(options: tuple[BackwardOptions, ...], sizes: Sizes, flat: list[Tensor | None]) -> None:
    """Raise a ValueError if an argument of `run.backward_run` is invalid or not supported by the kernels."""
    dx, dnext_TC, *next_normed = flat[:4]
    dx_BMC, each = given(dx), 3 + len(SavedForBackward._fields)
    letters = sizes._asdict() | {"1": 1, "E": 2 * sizes.D, "P": sizes.P}
    for i, own in reversed([*enumerate(options)]):
        scale_B, norm_C, in_proj, *saved = flat[4 + i * each : 4 + (i + 1) * each]
        check_given(norm_C=norm_C, in_proj=in_proj)
        residual: Row = "dx_BMC", dx_BMC, "BMC", FP32
        dtype, known = given(norm_C).dtype, dict(letters)
        check(
            known,
            residual,
            ("scale_B", scale_B, "B", FP32),
            ("norm_C", norm_C, "C", dtype),
            ("in_proj", in_proj, "EC", dtype),
        )
        kept = [t for t in saved if t is not None]
        check_saved(
            own.recurrence, own.class_token_only, own.lines, residual, dnext_TC,
            [t for t in next_normed if t is not None], known, sizes, kept,
        )  # fmt: skip
        # the gradient that a block receives has the shape of the block's output
        B, L = given(saved[0]).shape[:2]
        dx_BMC, dnext_TC, next_normed = dx_BMC.new_empty(1).expand(B, L, sizes.C), None, []


def _check_lines(lines: Lines | None, L: int) -> None:
    if lines and (min(lines[:2]) < 1 or lines.L != L):
        raise ValueError(
            f"lines must cover the {L - 1} patches of an image, got {lines.number} lines of {lines.length} patches"
        )


def _saved_rows(recurrence: str, lines: Lines | None, saved: list[Tensor], dtype: torch.dtype) -> list[Row]:
    """Return the layout and dtype that `check` expects of each saved tensor, given the dtype of matrix products."""
    missing = {"A": recurrence != "selective", "line_means": lines is None}
    fields = [(name, *field) for name, field in SAVED.items() if not missing.get(name)]
    return [
        (f"saved[{i}] ({name})", t, layout, own_dtype or dtype)
        for i, (t, (name, layout, own_dtype)) in enumerate(zip(saved, fields))
    ]


def _norm_rows(name: str, normed: Normed | None, tokens: str, dtype: torch.dtype) -> list[Row]:
    if normed is None:
        return []
    return [(f"{name}[0]", normed.xhat, tokens + "C", dtype), (f"{name}[1]", normed.rstd, tokens, FP32)]


def _check_weights(residual: Row, scale_B: Tensor | None, weights: BlockWeights) -> dict[str, int]:
    """Check that the kernels support a block's weights, and return the size of each dimension letter.

    `residual` is the row with which `check` validates the residual stream or the gradient of the residual stream.
    """
    norm_C, in_proj, out_proj, directions = weights
    name_of_x, x, _, _ = residual
    check_given(norm_C=norm_C, in_proj=in_proj, out_proj=out_proj, **{name_of_x: x})
    dtype = norm_C.dtype
    check_choice("dtype of norm_C", dtype, backends.DTYPES)
    fields = len([t for t in directions[0] if t is not None])
    direction_rows: list[Row] = [
        (f"directions[{g * fields + i}] ({name})", t, layout, dtype)
        for g, direction in enumerate(directions)
        for i, (t, (name, layout)) in enumerate(zip(direction, DIRECTION.items()))
    ]
    sizes = {"1": 1}
    check(
        sizes,
        residual,
        ("scale_B", scale_B, "B", FP32),
        ("norm_C", norm_C, "C", dtype),
        ("out_proj", out_proj, "CD", dtype),
        ("in_proj", in_proj, "EC", dtype),
        *direction_rows,
    )

    C, D, E, P, R = (sizes[letter] for letter in "CDEPR")
    N = sizes.setdefault("N", (P - R) // 2)
    if 0 in (given(x).numel(), D, R):
        raise ValueError(f"{name_of_x}, out_proj and step_proj must not be empty")
    if E != 2 * D or P != R + 2 * N:
        raise ValueError(f"in_proj must have {2 * D} rows and x_proj {R + 2 * N} rows, got {E} and {P}")
    check_choice("number of states in x_proj", N, backends.STATE_SIZES)
    check_choice("number of taps in conv", sizes["K"], TAPS)
    if D > backends.CHANNELS or E * C > WEIGHTS:
        raise ValueError(
            f"D must be at most {backends.CHANNELS}, and in_proj must have at most {WEIGHTS} elements, "
            f"got D = {D} and {E * C} elements"
        )
    return sizes
