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
def load_token(u1, ul, t, L, width, window):
    """Load token t, or zeros after the last token, into the ring buffer `window`."""
    if t < L:
        prefetch_row(u1 + (t + AHEAD) * ul)
        load_rows(u1 + t * ul, 0, width, 1, window[t % WINDOW : t % WINDOW + 1])
    else:
        clear(window[t % WINDOW : t % WINDOW + 1], 1)


def conv_forward(taps: int):
    """Build the kernel of both directions' causal convolutions with SiLU.

    At token t, tap i of direction 0 reads token t - taps + 1 + i.
    """
    of_weights, of_window, two = 2 * taps * LANES, WINDOW * LANES, 2 * LANES

    def kernel(arguments):
        (_, _, tasks, blocks, B, L, D, u0, ub, ul, w0, bias0, w1, bias1, v0) = to_fixed_tuple(
            carray(arguments, (15,)), 15
        )
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
            u1, v1 = u0 + b * ub + BYTES * first, v0 + BYTES * (b * L * D + first)
            clear(window, WINDOW)
            for t in range(taps - 1):
                load_token(u1, ul, t, L, width, window)
            for t in range(L):
                load_token(u1, ul, t + taps - 1, L, width, window)
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
        (_, _, tasks, blocks, B, L, D, u0, ub, ul, w0, bias0, w1, bias1, dv0, du0, dweights0) = to_fixed_tuple(
            carray(arguments, (17,)), 17
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
            u1, dv1, du1 = u0 + b * ub + BYTES * first, dv0 + BYTES * (b * L * D + first), du0 + b * ub + BYTES * first
            clear(window, WINDOW)
            # gradients of the filters' outputs for the most recent tokens, one buffer per direction
            clear(before, WINDOW)
            clear(behind, WINDOW)
            clear(sums, 2 * (taps + 1))
            for t in range(taps - 1):
                load_token(u1, ul, t, L, width, window)
            for t in range(L + taps - 1):
                load_token(u1, ul, t + taps - 1, L, width, window)
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
                    store_row(du1 + seen * ul, width, du)
            store_rows(
                dweights0 + BYTES * (b * 2 * (taps + 1) * D + first), BYTES * D, width, 2 * (taps + 1), sums
            )  # fmt: skip

    return kernel


@inlined
def position_in_line(i, count, length):
    """Return token i's index among the pooled tokens, its line (row or column), and its position in the line."""
    center = count * length // 2
    patch = i - (i > center)
    line = patch // length
    pooled = count // 2 if i == center else line + (line >= count // 2)
    return pooled, line, patch - line * length


@inlined
def index_in_memory(i, count, length, next, next_line):
    center = count * length // 2
    _, line, position = position_in_line(i, count, length)
    patch = line * next_line + position * next
    return center if i == center else patch + (patch >= center)


@inlined
def load_token_of_line(u1, ul, i, count, length, next, next_line, width, window):
    """Load token i in line order (row by row or column by column) into the ring buffer `window`."""
    if i <= count * length:
        index = index_in_memory(i, count, length, next, next_line)
        load_rows(u1 + index * ul, 0, width, 1, window[i % WINDOW : i % WINDOW + 1])
    else:
        clear(window[i % WINDOW : i % WINDOW + 1], 1)


def pool_forward(taps: int):
    """Build the kernel that averages both directions' convolved tokens over rows or columns.

    With v_g = silu(conv_g(u)), the kernel overwrites u by the skip connections (skip_0 v_0 + skip_1 v_1) / 2.
    """
    of_weights, of_window, two = 2 * taps * LANES, WINDOW * LANES, 2 * LANES

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, u0, ub, ul, w0, bias0, w1, bias1, skip0, skip1, count, length, next,
            next_line, means0,
        ) = to_fixed_tuple(carray(arguments, (21,)), 21)  # fmt: skip
        weights, bias = carray(local_floats(of_weights), (2 * taps, LANES)), carray(local_floats(two), (2, LANES))
        window, v = carray(local_floats(of_window), (WINDOW, LANES)), carray(local_floats(two), (2, LANES))
        sums, skip = carray(local_floats(two), (2, LANES)), carray(local_floats(two), (2, LANES))
        skipped = carray(local_floats(LANES), (LANES,))
        center, S = count * length // 2, count + 1
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
            u1, means1 = u0 + b * ub + BYTES * first, means0 + BYTES * (b * S * D + first)
            clear(window, WINDOW)
            clear(sums, 2)
            for i in range(taps - 1):
                load_token_of_line(u1, ul, i, count, length, next, next_line, width, window)
            for i in range(L):
                load_token_of_line(u1, ul, i + taps - 1, count, length, next, next_line, width, window)
                for d in range(LANES):
                    earlier, later = bias[0, d], bias[1, d]
                    for j in range(taps):
                        earlier += weights[j, d] * window[(i - (taps - 1) + j) % WINDOW, d]
                        later += weights[taps + j, d] * window[(i + (taps - 1) - j) % WINDOW, d]
                    earlier *= sigmoid(earlier)
                    later *= sigmoid(later)
                    v[0, d] = earlier
                    v[1, d] = later
                    skipped[d] = HALF * (skip[0, d] * earlier + skip[1, d] * later)
                store_row(u1 + ul * index_in_memory(i, count, length, next, next_line), width, skipped)
                pooled, _, position = position_in_line(i, count, length)
                if i == center:
                    store_rows(means1 + BYTES * pooled * D, BYTES * B * S * D, width, 2, v)
                    continue
                for g in range(2):
                    for d in range(LANES):
                        sums[g, d] += v[g, d]
                if position == length - 1:
                    share = ONE / np.float32(length)
                    for g in range(2):
                        for d in range(LANES):
                            sums[g, d] *= share
                    store_rows(means1 + BYTES * pooled * D, BYTES * B * S * D, width, 2, sums)
                    clear(sums, 2)

    return kernel


def pooled_gate_forward():
    """Build the kernel of the gate after a scan of row or column means.

    The kernel overwrites the skip connections s by scale * ((y_0 + y_1) / 2 + s) * silu(z), where y_0 and y_1 are the
    scan's outputs for the token's row or column.
    """

    def kernel(arguments):
        (_, _, tasks, rows, D, T, L, uz0, uzt, y0, y1, scale0, count, length, columns) = to_fixed_tuple(
            carray(arguments, (15,)), 15
        )
        center, S = count * length // 2, count + 1
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            for t in range(task * rows, min(task * rows + rows, T)):
                b, i = t // L, t % L
                patch = i - (i > center)
                line = patch % count if columns else patch // length
                pooled = b * S + (count // 2 if i == center else line + (line >= count // 2))
                scale = ONE
                if scale0:
                    scale = row(scale0 + BYTES * b, 1)[0]
                gated, z = row(uz0 + uzt * t, D), row(uz0 + uzt * t + BYTES * D, D)
                first, second = row(y0 + BYTES * pooled * D, D), row(y1 + BYTES * pooled * D, D)
                for d in range(D):
                    gated[d] = scale * (HALF * (first[d] + second[d]) + gated[d]) * (z[d] * sigmoid(z[d]))

    return kernel
