"""FLOP formulas of this package's operators for PyTorch's FlopCounterMode.

The FLOP count of a model does not depend on which operators the model uses.

PyTorch counts only matrix products, convolutions and attention, with 2 FLOPs for a multiplication and its addition, and
not elementwise functions. The recurrence counts as a product of coefficients and states. All operations on the G B L D
N elements of the states count. Operations on fewer elements (step sizes, norms of keys, the skip connection) do not
count. FLOPs per state element:

    forward, 7    decay 1 - eps k^2 or exp(A dt) (2), drive k (eps x) or b (dt x) (1), decay S + drive (2), q S (2)
    backward      q dy plus gradients from later tokens (3), gradients of q (2), decay (1), drive (2) and key (2); via
    the decay, Longhorn's eps (2) and key (2), or Mamba's exponent (1), dt (2) and A (2)

The sums for backward are 14 for Longhorn and 15 for Mamba. States, projections and other values that backward
recomputes to save memory do not count. VMamba and similar papers count 9 FLOPs per state element for forward
(`FIELD_CONVENTION`).

A fused block counts as many FLOPs as the operators of an unfused block. The count includes tokens that the last block
need not compute, and the K - 1 additional tokens of the convolution's padding.

    B batch    L tokens    C model width    D inner width    N states    R rank    P = R + 2N    K taps    G directions
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod

import torch

_logger = logging.getLogger("torch.utils.flop_counter")
_level = _logger.level
_logger.setLevel(logging.ERROR)  # suppress PyTorch's warning about missing Triton at each `import vil`
from torch.utils.flop_counter import conv_flop_count, register_flop_formula  # noqa: E402

_logger.setLevel(_level)

from .block import block_op as _block  # noqa: E402, F401  these imports define the operators
from .scan import scan_op as _scan  # noqa: E402, F401
from .scan import torch_scan as _torch_scan  # noqa: E402, F401

FORWARD = 7
BACKWARD = {"longhorn": 14, "selective": 15}
FIELD_CONVENTION = 9


@register_flop_formula(torch.ops.vil.scan)
def scan(backend, recurrence, x_GBLD, step_logits, k_GBLN, *_, **__) -> int:
    return FORWARD * prod(x_GBLD) * k_GBLN[-1]


@register_flop_formula(torch.ops.vil.scan_backward)
def scan_backward(backend, recurrence, dy, x_GBLD, step_logits, k_GBLN, *_, **__) -> int:
    return BACKWARD[recurrence] * prod(x_GBLD) * k_GBLN[-1]


@register_flop_formula(torch.ops.vil.reference_scan)
def reference_scan(recurrence, q_GLBN, inputs, *_, **__) -> int:
    return FORWARD * prod(inputs[0]) * q_GLBN[-1]


@register_flop_formula(torch.ops.vil.reference_scan_backward)
def reference_scan_backward(recurrence, dy_GLBD, chunk_states, q_GLBN, *_, **__) -> int:
    return BACKWARD[recurrence] * prod(dy_GLBD) * q_GLBN[-1]


@register_flop_formula(torch.ops.vil.block)
def block(
    recurrence, eps, dtype, class_token_only, norm_next, lines, x_BLC, normed, scales, weights, *_, **__
) -> int:  # fmt: skip
    B, L, C = x_BLC
    flops = 0
    for i in range(len(scales)):
        products, scans = _block_products(B, L, C, weights[3:], lines[3 * i : 3 * i + 3])
        flops += products + FORWARD * scans
    return flops


@register_flop_formula(torch.ops.vil.block_backward)
def block_backward(
    recurrence, class_token_only, norm_given, lines, sizes, dx_BMC, dnext, next_normed, scales, weights, saved, **_
) -> int:  # fmt: skip
    (B, L, _U), (C, D, N, R, K) = saved[0], sizes
    direction = [(D, 1, K), (D,), (R + 2 * N, D), (D, R)]
    flops = 0
    for i in range(len(scales)):
        products, scans = _block_products(B, L, C, direction, lines[3 * i : 3 * i + 3])
        flops += 2 * products + BACKWARD[recurrence] * scans
    return flops


def _block_products(B: int, L: int, C: int, directions: list, lines: Sequence[int]) -> tuple[int, int]:
    """Return the FLOPs of a block's matrix products and convolutions, and its number of state elements."""
    S = lines[0] + 1 if lines else L  # number of tokens that the recurrence reads
    (D, _, K), _, (P, _), (_, R) = directions[:4]
    each = (L + K - 1) * D * K + S * D * P + S * R * D
    return 2 * B * (L * C * 2 * D + 2 * each + L * D * C), 2 * B * S * D * (P - R) // 2


def convolution_backward(
    dy, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, output_mask, *_, **__
) -> int:  # fmt: skip
    """Count FLOPs as PyTorch does, but include groups, which PyTorch's formula omits for the weights' gradient."""
    return sum(output_mask[:2]) * conv_flop_count(x, weight, dy, transposed)


# custom_mapping of FlopCounterMode that counts backward passes of grouped convolutions correctly
CORRECTED = {torch.ops.aten.convolution_backward: convolution_backward}
