"""CPU kernels of the norm, and of the convolutions and gate of a full (not pooled) block, compiled by Numba.

Rows are tokens; u and z are the halves of rows of uz. Addresses and strides are in bytes. A task is a range of rows, or
a block of `LANES` channels of one image, for which the convolutions keep a window of tokens.
"""

from __future__ import annotations

import numpy as np

from ..cpu.compiler import BYTES, LANES
from ..cpu.filters import AHEAD, WINDOW, convolution, filter_gradients, take_filters, token_gradient
from ..cpu.language import (
    HALF,
    ONE,
    ZERO,
    as_float,
    block_of_channels,
    clear,
    count_up,
    inlined,
    load_rows,
    local_row,
    local_rows,
    prefetch_row,
    row,
    sigmoid,
    square_root,
    store_row,
    store_rows,
    unpack,
)  # fmt: skip


def norm_forward():
    """Build the kernel of the RMSNorm h = gamma * x * rho, with rho = 1 / sqrt(mean(x^2) + eps)."""

    def kernel(arguments):
        _, _, tasks, rows, C, T, eps_bits, x0, gamma0, h0, rho0 = unpack(arguments, 11)
        gamma, rho, eps = row(gamma0, C), row(rho0, T), as_float(np.int32(eps_bits))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            for t in range(task * rows, min(task * rows + rows, T)):
                x, h = row(x0 + BYTES * t * C, C), row(h0 + BYTES * t * C, C)
                total = ZERO
                for c in range(C):
                    total += x[c] * x[c]
                scale = ONE / square_root(total / np.float32(C) + eps)
                rho[t] = scale
                for c in range(C):
                    h[c] = x[c] * scale * gamma[c]

    return kernel


def norm_backward():
    """Build the kernel of the RMSNorm's backward pass, which writes one partial sum of gamma's gradient per task.

    The kernel adds x's gradient through the norm to the gradient of the residual stream.
    """

    def kernel(arguments):
        (_, _, tasks, rows, C, T, x0, gamma0, rho0, dh0, dout0, dx0, dgamma0) = unpack(arguments, 13)
        gamma, rho = row(gamma0, C), row(rho0, T)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            dgamma = row(dgamma0 + BYTES * task * C, C)
            for c in range(C):
                dgamma[c] = ZERO
            for t in range(task * rows, min(task * rows + rows, T)):
                x, dh = row(x0 + BYTES * t * C, C), row(dh0 + BYTES * t * C, C)
                dout, dx = row(dout0 + BYTES * t * C, C), row(dx0 + BYTES * t * C, C)
                scale, total = rho[t], ZERO
                for c in range(C):
                    total += dh[c] * gamma[c] * x[c]
                total *= scale * scale / np.float32(C)
                for c in range(C):
                    dx[c] = dout[c] + scale * (dh[c] * gamma[c] - x[c] * total)
                    dgamma[c] += dh[c] * (x[c] * scale)

    return kernel


def gate_forward():
    """Build the kernel of the gate, which multiplies the mean of both directions by silu(z) and the scale."""

    def kernel(arguments):
        (_, _, tasks, rows, D, T, L, z0, zt, y0, y1, scale0, gated0) = unpack(arguments, 13)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            for t in range(task * rows, min(task * rows + rows, T)):
                half = HALF
                if scale0:
                    half = HALF * row(scale0 + BYTES * (t // L), 1)[0]
                z, gated = row(z0 + zt * t, D), row(gated0 + BYTES * t * D, D)
                a, b = row(y0 + BYTES * t * D, D), row(y1 + BYTES * t * D, D)
                for d in range(D):
                    gated[d] = half * (a[d] + b[d]) * (z[d] * sigmoid(z[d]))

    return kernel


def gate_backward():
    """Build the kernel of the gate's backward pass, which also recomputes the gate's output.

    The gradient of y is equal for both directions.
    """

    def kernel(arguments):
        (_, _, tasks, rows, D, T, L, z0, zt, y0, y1, scale0, gated0, dgated0, dy0, dz0) = unpack(arguments, 16)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            for t in range(task * rows, min(task * rows + rows, T)):
                half = HALF
                if scale0:
                    half = HALF * row(scale0 + BYTES * (t // L), 1)[0]
                z, gated, dz = row(z0 + zt * t, D), row(gated0 + BYTES * t * D, D), row(dz0 + zt * t, D)
                a, b = row(y0 + BYTES * t * D, D), row(y1 + BYTES * t * D, D)
                dgated, dy = row(dgated0 + BYTES * t * D, D), row(dy0 + BYTES * t * D, D)
                for d in range(D):
                    s, mean = sigmoid(z[d]), half * (a[d] + b[d])
                    silu = z[d] * s
                    gated[d] = mean * silu
                    dy[d] = dgated[d] * half * silu
                    dz[d] = dgated[d] * mean * (s + silu * (ONE - s))

    return kernel


@inlined
def load_token(u1, ut, t, L, width, window):
    """Load token t, or zeros after the last token, into the ring buffer `window`."""
    if t < L:
        prefetch_row(u1 + (t + AHEAD) * ut)
        load_rows(u1 + t * ut, 0, width, 1, window[t % WINDOW : t % WINDOW + 1])
    else:
        clear(window[t % WINDOW : t % WINDOW + 1], 1)


def conv_forward(taps: int):
    """Build the kernel of both directions' causal convolutions with SiLU.

    At token t, tap i of direction 0 reads token t - taps + 1 + i.
    """
    convolve = convolution(taps)
    filters = 2 * taps

    def kernel(arguments):
        (_, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, v0) = unpack(arguments, 14)
        weights, bias = local_rows(filters), local_rows(2)
        window, v = local_rows(WINDOW), local_rows(2)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            b, first, width = block_of_channels(task, blocks, D)
            take_filters(w0, bias0, w1, bias1, first, width, taps, weights, bias)
            u1, v1 = u0 + b * L * ut + BYTES * first, v0 + BYTES * (b * L * D + first)
            clear(window, WINDOW)
            for t in range(taps - 1):
                load_token(u1, ut, t, L, width, window)
            for t in range(L):
                load_token(u1, ut, t + taps - 1, L, width, window)
                convolve(weights, bias, window, t, v)
                for g in range(2):
                    for d in range(LANES):
                        v[g, d] *= sigmoid(v[g, d])
                store_rows(v1 + BYTES * t * D, BYTES * B * L * D, width, 2, v)

    return kernel


def conv_backward(taps: int):
    """Build the kernel of the convolutions' backward pass.

    The kernel writes one sum of the gradients of filters and biases per image, (B, 2, taps + 1, D).
    """
    convolve, add_filter_gradients = convolution(taps), filter_gradients(taps)
    compute_token_gradient = token_gradient(taps)
    filters, sum_rows = 2 * taps, 2 * (taps + 1)

    def kernel(arguments):
        (_, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, dv0, du0, dweights0) = unpack(arguments, 16)
        weights, bias = local_rows(filters), local_rows(2)
        window, dv = local_rows(WINDOW), local_rows(2)
        before, behind = local_rows(WINDOW), local_rows(WINDOW)
        convolved = local_rows(2)
        sums, du = local_rows(sum_rows), local_row()
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            b, first, width = block_of_channels(task, blocks, D)
            take_filters(w0, bias0, w1, bias1, first, width, taps, weights, bias)
            u1, du1 = u0 + b * L * ut + BYTES * first, du0 + b * L * ut + BYTES * first
            dv1 = dv0 + BYTES * (b * L * D + first)
            clear(window, WINDOW)
            # gradients of the filters' outputs for the most recent tokens, one buffer per direction
            clear(before, WINDOW)
            clear(behind, WINDOW)
            clear(sums, 2 * (taps + 1))
            for t in range(taps - 1):
                load_token(u1, ut, t, L, width, window)
            for t in range(L + taps - 1):
                load_token(u1, ut, t + taps - 1, L, width, window)
                if t < L:
                    for g in range(2):
                        prefetch_row(dv1 + BYTES * ((t + AHEAD) * D + g * B * L * D))
                    load_rows(dv1 + BYTES * t * D, BYTES * B * L * D, width, 2, dv)
                    convolve(weights, bias, window, t, convolved)
                    for d in range(LANES):
                        s = sigmoid(convolved[0, d])
                        before[t % WINDOW, d] = dv[0, d] * (s + convolved[0, d] * s * (ONE - s))
                    for d in range(LANES):
                        s = sigmoid(convolved[1, d])
                        behind[t % WINDOW, d] = dv[1, d] * (s + convolved[1, d] * s * (ONE - s))
                    add_filter_gradients(before, behind, window, t, sums)
                else:
                    clear(before[t % WINDOW : t % WINDOW + 1], 1)
                    clear(behind[t % WINDOW : t % WINDOW + 1], 1)
                seen = t - (taps - 1)  # no later output reads token `seen`, so its gradient is complete
                if seen >= 0:
                    compute_token_gradient(weights, before, behind, seen, du)
                    store_row(du1 + seen * ut, width, du)
            store_rows(
                dweights0 + BYTES * (b * 2 * (taps + 1) * D + first), BYTES * D, width, 2 * (taps + 1), sums
            )  # fmt: skip

    return kernel
