"""CPU kernels of a pooled block before and after the scan of row or column means, compiled by Numba.

Rows are tokens; u and z are the halves of rows of uz. Addresses and strides are in bytes. In line order, the patches of
each row (or column) are consecutive. The tables have three rows: the token indices in line order, the index of each
token's mean for tokens in line order, and the index of each token's mean for tokens in row-major order.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from ..cpu.compiler import BYTES, LANES
from ..cpu.filters import AHEAD, WINDOW, convolution, filter_gradients, take_filters, token_gradient
from ..cpu.language import (
    HALF,
    ONE,
    block_of_channels,
    clear,
    count_up,
    inlined,
    load_rows,
    local_row,
    local_rows,
    longs,
    prefetch_row,
    row,
    sigmoid,
    sigmoids,
    store_row,
    store_rows,
    unpack,
)  # fmt: skip


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
    filters = 2 * taps
    convolve = convolution(taps)

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, skip0, skip1, tables0, S, length, s0, st,
            means0,
        ) = unpack(arguments, 21)  # fmt: skip
        weights, bias = local_rows(filters), local_rows(2)
        window, v = local_rows(WINDOW), local_rows(2)
        means, skip = local_rows(2), local_rows(2)
        skipped, share = local_row(), ONE / np.float32(length)
        order, lines = carray(longs(tables0), (L,)), carray(longs(tables0 + 8 * L), (L,))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            b, first, width = block_of_channels(task, blocks, D)
            take_filters(w0, bias0, w1, bias1, first, width, taps, weights, bias)
            load_rows(skip0 + BYTES * first, skip1 - skip0, width, 2, skip)
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
                    earlier, later = sigmoids(v[0, d], v[1, d])
                    v[0, d] *= earlier
                    v[1, d] *= later
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
    """Build the gate kernel of a pooled block, in which the scan reads row or column means instead of tokens.

    The gate's output is scale * ((y_0 + y_1) / 2 + s) * silu(z), where y_0 and y_1 are the scan's outputs for the
    token's row or column, and s are the skip connections. The gate's output may overwrite s.
    """

    def kernel(arguments):
        (_, _, tasks, rows, D, T, L, z0, zt, y0, y1, scale0, tables0, S, s0, st, gated0, gatedt) = unpack(arguments, 18)
        lines = carray(longs(tables0 + 16 * L), (L,))
        z, s = local_rows(1), local_rows(1)
        y, gated = local_rows(2), local_row()
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

    The gradient of the gate's output is overwritten with the gradient of s. The gradient of y_0 equals the gradient of
    y_1, and is half of the sum of the gradient of s over a row or column.
    """

    def kernel(arguments):
        (
            _, _, tasks, blocks, _, L, D, z0, zt, y0, y1, scale0, tables0, S, s0, gated0, dgated0, dz0, dy0,
        ) = unpack(arguments, 19)  # fmt: skip
        lines = carray(longs(tables0 + 16 * L), (L,))
        z, s = local_rows(1), local_rows(1)
        y, dgated = local_rows(2), local_rows(1)
        gated, dz, dy = local_row(), local_row(), local_rows(1)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            b, first, width = block_of_channels(task, blocks, D)
            scale = ONE
            if scale0:
                scale = row(scale0 + BYTES * b, 1)[0]
            of_lines = BYTES * (b * S * D + first)
            clear(dy, 1)
            for line in range(S):
                store_row(dy0 + of_lines + BYTES * line * D, width, dy[0])
            for i in range(L):
                t, line = b * L + i, of_lines + BYTES * lines[i] * D
                token, token_z, ahead = BYTES * (t * D + first), zt * t + BYTES * first, BYTES * AHEAD * D
                prefetch_row(z0 + token_z + zt * AHEAD)
                prefetch_row(dz0 + token_z + zt * AHEAD)
                for start in (s0, dgated0, gated0):
                    prefetch_row(start + token + ahead)
                load_rows(z0 + token_z, 0, width, 1, z)
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
                store_row(dz0 + token_z, width, dz)
                store_row(dgated0 + token, width, dgated[0])
                store_row(dy0 + line, width, dy[0])

    return kernel


def pool_backward(taps: int):
    """Build the kernel of the backward pass of `pool_forward`, from the gradients ds of s and dmeans of the means.

    The kernel writes one sum of the gradients of filters, biases and skip weights per image, (B, 2, taps + 2, D).
    """
    filters, sum_rows = 2 * taps, 2 * (taps + 2)
    convolve, add_filter_gradients = convolution(taps), filter_gradients(taps)
    compute_token_gradient = token_gradient(taps)

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, u0, ut, w0, bias0, w1, bias1, skip0, skip1, tables0, S, length, ds0, dmeans0,
            du0, dweights0,
        ) = unpack(arguments, 22)  # fmt: skip
        weights, bias = local_rows(filters), local_rows(2)
        window, convolved = local_rows(WINDOW), local_rows(2)
        before, behind = local_rows(WINDOW), local_rows(WINDOW)
        sums, du = local_rows(sum_rows), local_row()
        skip, dmeans = local_rows(2), local_rows(2)
        ds, share = local_rows(1), ONE / np.float32(length)
        order, lines = carray(longs(tables0), (L,)), carray(longs(tables0 + 8 * L), (L,))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            b, first, width = block_of_channels(task, blocks, D)
            take_filters(w0, bias0, w1, bias1, first, width, taps, weights, bias)
            load_rows(skip0 + BYTES * first, skip1 - skip0, width, 2, skip)
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
                        half, (earlier, later) = HALF * ds[0, d], sigmoids(convolved[0, d], convolved[1, d])
                        v_0, v_1 = convolved[0, d] * earlier, convolved[1, d] * later
                        dv_0 = half * skip[0, d] + weight * dmeans[0, d]
                        dv_1 = half * skip[1, d] + weight * dmeans[1, d]
                        before[i % WINDOW, d] = dv_0 * (earlier + v_0 * (ONE - earlier))
                        behind[i % WINDOW, d] = dv_1 * (later + v_1 * (ONE - later))
                        sums[taps + 1, d] += half * v_0
                        sums[2 * taps + 3, d] += half * v_1
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
