"""CPU kernels of a block except the scan, written in Python and compiled by Numba.

Rows are tokens; u and z are the halves of rows of uz. Addresses and strides are in bytes. A task is a range of rows, or
a block of `LANES` channels of one image, for which the convolutions keep a window of tokens.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from ..cpu.compiler import LANES
from ..cpu.language import (
    BYTES,
    HALF,
    ONE,
    ZERO,
    as_float,
    clear,
    count_up,
    floats,
    inlined,
    load_rows,
    local_floats,
    longs,
    prefetch_row,
    sigmoid,
    square_root,
    store_row,
    store_rows,
)  # fmt: skip

AHEAD = 4  # kernels prefetch the memory of the token that is `AHEAD` tokens after the current token
WINDOW = 8  # number of tokens in a ring buffer: a power of 2 that covers the convolution taps of both directions


@inlined
def row(address, size):
    return carray(floats(address), (size,))


def norm_forward():
    """Build the kernel of the RMSNorm h = gamma * x * rho, with rho = 1 / sqrt(mean(x^2) + eps)."""

    def kernel(arguments):
        _, _, tasks, rows, C, T, eps_bits, x0, gamma0, h0, rho0 = to_fixed_tuple(carray(arguments, (11,)), 11)
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

    The norm's gradient is added to the residual stream's gradient.
    """

    def kernel(arguments):
        (_, _, tasks, rows, C, T, x0, gamma0, rho0, dh0, dout0, dx0, dgamma0) = to_fixed_tuple(
            carray(arguments, (13,)), 13
        )
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
        (_, _, tasks, rows, D, T, L, z0, zt, y0, y1, scale0, gated0) = to_fixed_tuple(carray(arguments, (13,)), 13)
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
        (_, _, tasks, rows, D, T, L, z0, zt, y0, y1, scale0, gated0, dgated0, dy0, dz0) = to_fixed_tuple(
            carray(arguments, (16,)), 16
        )
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
def take_filters(weights0, bias0, g, D, first, width, taps, weights, bias):
    """Copy the biases and the transposed filters, (taps, channels), of one direction for a block of channels."""
    source = row(weights0 + BYTES * first * taps, width * taps)
    for i in range(taps):
        for d in range(width):
            weights[g * taps + i, d] = source[d * taps + i]
        for d in range(width, LANES):
            weights[g * taps + i, d] = ZERO
    load_rows(bias0 + BYTES * first, 0, width, 1, bias[g : g + 1])


@inlined
def load_token(u1, ut, t, L, width, window):
    """Load token t, or zeros after the last token, into the ring buffer `window`."""
    if t < L:
        prefetch_row(u1 + (t + AHEAD) * ut)
        load_rows(u1 + t * ut, 0, width, 1, window[t % WINDOW : t % WINDOW + 1])
    else:
        clear(window[t % WINDOW : t % WINDOW + 1], 1)


def convolution(taps: int):
    """Build a function of both directions' convolutions at token t, where tap i reads tokens t -+ (taps - 1 - i)."""

    @inlined
    def convolve(weights, bias, window, t, convolved):
        for d in range(LANES):
            earlier, later = bias[0, d], bias[1, d]
            for i in range(taps):
                earlier += weights[i, d] * window[(t - (taps - 1) + i) % WINDOW, d]
                later += weights[taps + i, d] * window[(t + (taps - 1) - i) % WINDOW, d]
            convolved[0, d] = earlier
            convolved[1, d] = later

    return convolve


def filter_gradients(taps: int):
    """Build a function that adds token t's gradients of both directions' filters and biases to `sums`.

    `before` and `behind` have the gradients of the convolutions' outputs, one buffer per direction.
    """

    @inlined
    def add_filter_gradients(before, behind, window, t, sums):
        second = sums.shape[0] // 2
        for d in range(LANES):
            for i in range(taps):
                sums[i, d] += before[t % WINDOW, d] * window[(t - (taps - 1) + i) % WINDOW, d]
            sums[taps, d] += before[t % WINDOW, d]
        for d in range(LANES):
            for i in range(taps):
                sums[second + i, d] += behind[t % WINDOW, d] * window[(t + (taps - 1) - i) % WINDOW, d]
            sums[second + taps, d] += behind[t % WINDOW, d]

    return add_filter_gradients


def token_gradient(taps: int):
    """Build a function of the gradient of token t, given the gradients of the convolutions that read the token."""

    @inlined
    def compute_token_gradient(weights, before, behind, t, du):
        for d in range(LANES):
            total = ZERO
            for i in range(taps):
                total += weights[i, d] * before[(t + (taps - 1) - i) % WINDOW, d]
                total += weights[taps + i, d] * behind[(t - (taps - 1) + i) % WINDOW, d]
            du[d] = total

    return compute_token_gradient


def conv_forward(taps: int):
    """Build the kernel of both directions' causal convolutions with SiLU.

    At token t, tap i of direction 0 reads token t - taps + 1 + i.
    """
    of_weights, of_window, two = 2 * taps * LANES, WINDOW * LANES, 2 * LANES

    def kernel(arguments):
        (_, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, v0) = to_fixed_tuple(carray(arguments, (14,)), 14)
        weights, bias = carray(local_floats(of_weights), (2 * taps, LANES)), carray(local_floats(two), (2, LANES))
        window, v = carray(local_floats(of_window), (WINDOW, LANES)), carray(local_floats(two), (2, LANES))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            first, b = task % blocks * LANES, task // blocks
            width = min(LANES, D - first)
            take_filters(w0, bias0, 0, D, first, width, taps, weights, bias)
            take_filters(w1, bias1, 1, D, first, width, taps, weights, bias)
            u1, v1 = u0 + b * L * ut + BYTES * first, v0 + BYTES * (b * L * D + first)
            clear(window, WINDOW)
            for t in range(taps - 1):
                load_token(u1, ut, t, L, width, window)
            for t in range(L):
                load_token(u1, ut, t + taps - 1, L, width, window)
                for d in range(LANES):
                    earlier, later = bias[0, d], bias[1, d]
                    for i in range(taps):
                        earlier += weights[i, d] * window[(t - (taps - 1) + i) % WINDOW, d]
                        later += weights[taps + i, d] * window[(t + (taps - 1) - i) % WINDOW, d]
                    v[0, d] = earlier
                    v[1, d] = later
                for g in range(2):
                    for d in range(LANES):
                        v[g, d] *= sigmoid(v[g, d])
                store_rows(v1 + BYTES * t * D, BYTES * B * L * D, width, 2, v)

    return kernel


def conv_backward(taps: int):
    """Build the kernel of the convolutions' backward pass.

    Each image has its own sum of the gradients of filters and biases, (B, 2, taps + 1, D).
    """
    of_weights, of_window, two, of_sums = 2 * taps * LANES, WINDOW * LANES, 2 * LANES, 2 * (taps + 1) * LANES

    def kernel(arguments):
        (_, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, dv0, du0, dweights0) = to_fixed_tuple(
            carray(arguments, (16,)), 16
        )
        weights, bias = carray(local_floats(of_weights), (2 * taps, LANES)), carray(local_floats(two), (2, LANES))
        window, dv = carray(local_floats(of_window), (WINDOW, LANES)), carray(local_floats(two), (2, LANES))
        before, behind = (
            carray(local_floats(of_window), (WINDOW, LANES)), carray(local_floats(of_window), (WINDOW, LANES)),
        )  # fmt: skip
        convolved = carray(local_floats(two), (2, LANES))
        sums, du = carray(local_floats(of_sums), (2 * (taps + 1), LANES)), carray(local_floats(LANES), (LANES,))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            first, b = task % blocks * LANES, task // blocks
            width = min(LANES, D - first)
            take_filters(w0, bias0, 0, D, first, width, taps, weights, bias)
            take_filters(w1, bias1, 1, D, first, width, taps, weights, bias)
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
                    for d in range(LANES):
                        earlier, later = bias[0, d], bias[1, d]
                        for i in range(taps):
                            earlier += weights[i, d] * window[(t - (taps - 1) + i) % WINDOW, d]
                            later += weights[taps + i, d] * window[(t + (taps - 1) - i) % WINDOW, d]
                        convolved[0, d] = earlier
                        convolved[1, d] = later
                    for d in range(LANES):
                        s = sigmoid(convolved[0, d])
                        before[t % WINDOW, d] = dv[0, d] * (s + convolved[0, d] * s * (ONE - s))
                    for d in range(LANES):
                        s = sigmoid(convolved[1, d])
                        behind[t % WINDOW, d] = dv[1, d] * (s + convolved[1, d] * s * (ONE - s))
                    for d in range(LANES):
                        for i in range(taps):
                            sums[i, d] += before[t % WINDOW, d] * window[(t - (taps - 1) + i) % WINDOW, d]
                        sums[taps, d] += before[t % WINDOW, d]
                    for d in range(LANES):
                        for i in range(taps):
                            sums[taps + 1 + i, d] += behind[t % WINDOW, d] * window[(t + (taps - 1) - i) % WINDOW, d]
                        sums[2 * taps + 1, d] += behind[t % WINDOW, d]
                else:
                    clear(before[t % WINDOW : t % WINDOW + 1], 1)
                    clear(behind[t % WINDOW : t % WINDOW + 1], 1)
                seen = t - (taps - 1)  # no later output reads token `seen`, so its gradient is complete
                if seen >= 0:
                    for d in range(LANES):
                        total = ZERO
                        for i in range(taps):
                            total += weights[i, d] * before[(seen + (taps - 1) - i) % WINDOW, d]
                            total += weights[taps + i, d] * behind[(seen - (taps - 1) + i) % WINDOW, d]
                        du[d] = total
                    store_row(du1 + seen * ut, width, du)
            store_rows(
                dweights0 + BYTES * (b * 2 * (taps + 1) * D + first), BYTES * D, width, 2 * (taps + 1), sums
            )  # fmt: skip

    return kernel


@inlined
def load_token_of_line(u1, ut, order, i, L, width, window):
    """Load token i in line order (row by row or column by column) into the ring buffer `window`."""
    if i < L:
        prefetch_row(u1 + order[min(i + AHEAD, L - 1)] * ut)
        load_rows(u1 + order[i] * ut, 0, width, 1, window[i % WINDOW : i % WINDOW + 1])
    else:
        clear(window[i % WINDOW : i % WINDOW + 1], 1)


def pool_forward(taps: int):
    """Build the kernel that averages both directions' convolved tokens v_g = silu(conv_g(u)) over rows or columns.

    The kernel also writes the skip connections s = (skip_0 v_0 + skip_1 v_1) / 2, which may overwrite u.
    """
    of_weights, of_window, two = 2 * taps * LANES, WINDOW * LANES, 2 * LANES
    convolve = convolution(taps)

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, skip0, skip1, tables0, S, length, s0, st,
            means0,
        ) = to_fixed_tuple(carray(arguments, (21,)), 21)  # fmt: skip
        weights, bias = carray(local_floats(of_weights), (2 * taps, LANES)), carray(local_floats(two), (2, LANES))
        window, v = carray(local_floats(of_window), (WINDOW, LANES)), carray(local_floats(two), (2, LANES))
        means, skip = carray(local_floats(two), (2, LANES)), carray(local_floats(two), (2, LANES))
        skipped, share = carray(local_floats(LANES), (LANES,)), ONE / np.float32(length)
        order, lines = carray(longs(tables0), (L,)), carray(longs(tables0 + 8 * L), (L,))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            first, b = task % blocks * LANES, task // blocks
            width = min(LANES, D - first)
            take_filters(w0, bias0, 0, D, first, width, taps, weights, bias)
            take_filters(w1, bias1, 1, D, first, width, taps, weights, bias)
            load_rows(skip0 + BYTES * first, 0, width, 1, skip)
            load_rows(skip1 + BYTES * first, 0, width, 1, skip[1:])
            u1, s1 = u0 + b * L * ut + BYTES * first, s0 + b * L * st + BYTES * first
            means1 = means0 + BYTES * (b * S * D + first)
            clear(means, 2)
            for line in range(S):
                store_rows(means1 + BYTES * line * D, BYTES * B * S * D, width, 2, means)
            clear(window, WINDOW)
            for i in range(taps - 1):
                load_token_of_line(u1, ut, order, i, L, width, window)
            for i in range(L):
                load_token_of_line(u1, ut, order, i + taps - 1, L, width, window)
                convolve(weights, bias, window, i, v)
                for d in range(LANES):
                    v[0, d], v[1, d] = v[0, d] * sigmoid(v[0, d]), v[1, d] * sigmoid(v[1, d])
                    skipped[d] = HALF * (skip[0, d] * v[0, d] + skip[1, d] * v[1, d])
                prefetch_row(s1 + st * order[min(i + AHEAD, L - 1)])
                store_row(s1 + st * order[i], width, skipped)
                weight = ONE if i == (L - 1) // 2 else share
                mean = means1 + BYTES * lines[i] * D
                load_rows(mean, BYTES * B * S * D, width, 2, means)
                for g in range(2):
                    for d in range(LANES):
                        means[g, d] += weight * v[g, d]
                store_rows(mean, BYTES * B * S * D, width, 2, means)

    return kernel


def pooled_gate_forward():
    """Build the kernel of the gate after a scan of row or column means.

    The gate's output is scale * ((y_0 + y_1) / 2 + s) * silu(z), where y_0 and y_1 are the scan's outputs for the
    token's row or column, and s are the skip connections. The gate's output may overwrite s.
    """
    two = 2 * LANES

    def kernel(arguments):
        (_, _, tasks, rows, D, T, L, z0, zt, y0, y1, scale0, tables0, S, s0, st, gated0, gatedt) = to_fixed_tuple(
            carray(arguments, (18,)), 18
        )
        lines = carray(longs(tables0 + 16 * L), (L,))
        z, s = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        y, gated = carray(local_floats(two), (2, LANES)), carray(local_floats(LANES), (LANES,))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            for t in range(task * rows, min(task * rows + rows, T)):
                line, scale = t // L * S + lines[t % L], ONE
                if scale0:
                    scale = row(scale0 + BYTES * (t // L), 1)[0]
                for first in range(0, D, LANES):
                    width, offset = min(LANES, D - first), BYTES * first
                    load_rows(z0 + zt * t + offset, 0, width, 1, z)
                    load_rows(s0 + st * t + offset, 0, width, 1, s)
                    load_rows(y0 + BYTES * line * D + offset, y1 - y0, width, 2, y)
                    for d in range(LANES):
                        value = scale * (HALF * (y[0, d] + y[1, d]) + s[0, d])
                        gated[d] = value * (z[0, d] * sigmoid(z[0, d]))
                    store_row(gated0 + gatedt * t + offset, width, gated)

    return kernel


def pooled_gate_backward():
    """Build the kernel of the backward pass of `pooled_gate_forward`, which also recomputes the gate's output.

    The gradient of the gate's output is overwritten by the gradient of s. Half of the sum of this gradient over a row
    or column is the gradient of y_0, and also of y_1.
    """
    two = 2 * LANES

    def kernel(arguments):
        (
            _, _, tasks, blocks, _, L, D, z0, zt, y0, y1, scale0, tables0, S, s0, gated0, dgated0, dz0, dy0,
        ) = to_fixed_tuple(carray(arguments, (19,)), 19)  # fmt: skip
        lines = carray(longs(tables0 + 16 * L), (L,))
        z, s = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        y, dgated = carray(local_floats(two), (2, LANES)), carray(local_floats(LANES), (1, LANES))
        gated, dz = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (LANES,))
        dy = carray(local_floats(LANES), (1, LANES))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            first, b = task % blocks * LANES, task // blocks
            width, scale = min(LANES, D - first), ONE
            if scale0:
                scale = row(scale0 + BYTES * b, 1)[0]
            of_lines = BYTES * (b * S * D + first)
            clear(dy, 1)
            for line in range(S):
                store_row(dy0 + of_lines + BYTES * line * D, width, dy[0])
            for i in range(L):
                t, line = b * L + i, of_lines + BYTES * lines[i] * D
                token = BYTES * (t * D + first)
                ahead = BYTES * AHEAD * D
                prefetch_row(z0 + zt * (t + AHEAD) + BYTES * first)
                prefetch_row(dz0 + zt * (t + AHEAD) + BYTES * first)
                prefetch_row(s0 + token + ahead)
                prefetch_row(dgated0 + token + ahead)
                prefetch_row(gated0 + token + ahead)
                load_rows(z0 + zt * t + BYTES * first, 0, width, 1, z)
                load_rows(s0 + token, 0, width, 1, s)
                load_rows(dgated0 + token, 0, width, 1, dgated)
                load_rows(y0 + line, y1 - y0, width, 2, y)
                load_rows(dy0 + line, 0, width, 1, dy)
                for d in range(LANES):
                    gate, value = sigmoid(z[0, d]), scale * (HALF * (y[0, d] + y[1, d]) + s[0, d])
                    silu = z[0, d] * gate
                    gated[d] = value * silu
                    dz[d] = dgated[0, d] * value * (gate + silu * (ONE - gate))
                    dgated[0, d] *= scale * silu
                    dy[0, d] += HALF * dgated[0, d]
                store_row(gated0 + token, width, gated)
                store_row(dz0 + zt * t + BYTES * first, width, dz)
                store_row(dgated0 + token, width, dgated[0])
                store_row(dy0 + line, width, dy[0])

    return kernel


def pool_backward(taps: int):
    """Build the kernel of the backward pass of `pool_forward`, from the gradients ds of s and dmeans of the means.

    Each image has its own sum of the gradients of filters, biases and skip weights, (B, 2, taps + 2, D).
    """
    of_weights, of_window, two, of_sums = 2 * taps * LANES, WINDOW * LANES, 2 * LANES, 2 * (taps + 2) * LANES
    convolve, add_filter_gradients = convolution(taps), filter_gradients(taps)
    compute_token_gradient = token_gradient(taps)

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, skip0, skip1, tables0, S, length, ds0, dmeans0,
            du0, dweights0,
        ) = to_fixed_tuple(carray(arguments, (22,)), 22)  # fmt: skip
        weights, bias = carray(local_floats(of_weights), (2 * taps, LANES)), carray(local_floats(two), (2, LANES))
        window, convolved = carray(local_floats(of_window), (WINDOW, LANES)), carray(local_floats(two), (2, LANES))
        before, behind = (
            carray(local_floats(of_window), (WINDOW, LANES)), carray(local_floats(of_window), (WINDOW, LANES)),
        )  # fmt: skip
        sums, du = carray(local_floats(of_sums), (2 * (taps + 2), LANES)), carray(local_floats(LANES), (LANES,))
        skip, dmeans = carray(local_floats(two), (2, LANES)), carray(local_floats(two), (2, LANES))
        ds, share = carray(local_floats(LANES), (1, LANES)), ONE / np.float32(length)
        order, lines = carray(longs(tables0), (L,)), carray(longs(tables0 + 8 * L), (L,))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            first, b = task % blocks * LANES, task // blocks
            width = min(LANES, D - first)
            take_filters(w0, bias0, 0, D, first, width, taps, weights, bias)
            take_filters(w1, bias1, 1, D, first, width, taps, weights, bias)
            load_rows(skip0 + BYTES * first, 0, width, 1, skip)
            load_rows(skip1 + BYTES * first, 0, width, 1, skip[1:])
            u1, du1 = u0 + b * L * ut + BYTES * first, du0 + b * L * ut + BYTES * first
            ds1, dmeans1 = ds0 + BYTES * (b * L * D + first), dmeans0 + BYTES * (b * S * D + first)
            clear(window, WINDOW)
            clear(before, WINDOW)
            clear(behind, WINDOW)
            clear(sums, 2 * (taps + 2))
            for i in range(taps - 1):
                load_token_of_line(u1, ut, order, i, L, width, window)
            for i in range(L + taps - 1):
                load_token_of_line(u1, ut, order, i + taps - 1, L, width, window)
                if i < L:
                    weight = ONE if i == (L - 1) // 2 else share
                    prefetch_row(ds1 + BYTES * order[min(i + AHEAD, L - 1)] * D)
                    load_rows(ds1 + BYTES * order[i] * D, 0, width, 1, ds)
                    load_rows(dmeans1 + BYTES * lines[i] * D, BYTES * B * S * D, width, 2, dmeans)
                    convolve(weights, bias, window, i, convolved)
                    for d in range(LANES):
                        x, half = convolved[0, d], HALF * ds[0, d]
                        gate = sigmoid(x)
                        silu = x * gate
                        sums[taps + 1, d] += half * silu
                        before[i % WINDOW, d] = (half * skip[0, d] + weight * dmeans[0, d]) * (
                            gate + silu * (ONE - gate)
                        )
                    for d in range(LANES):
                        x, half = convolved[1, d], HALF * ds[0, d]
                        gate = sigmoid(x)
                        silu = x * gate
                        sums[2 * taps + 3, d] += half * silu
                        behind[i % WINDOW, d] = (half * skip[1, d] + weight * dmeans[1, d]) * (
                            gate + silu * (ONE - gate)
                        )
                    add_filter_gradients(before, behind, window, i, sums)
                else:
                    clear(before[i % WINDOW : i % WINDOW + 1], 1)
                    clear(behind[i % WINDOW : i % WINDOW + 1], 1)
                seen = i - (taps - 1)  # no later output reads token `seen`, so its gradient is complete
                if seen >= 0:
                    compute_token_gradient(weights, before, behind, seen, du)
                    prefetch_row(du1 + ut * order[min(seen + AHEAD, L - 1)])
                    store_row(du1 + ut * order[seen], width, du)
            store_rows(
                dweights0 + BYTES * (b * 2 * (taps + 2) * D + first), BYTES * D, width, 2 * (taps + 2), sums
            )  # fmt: skip

    return kernel
