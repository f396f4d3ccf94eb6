"""CPU kernels of a pooled block, which scans row or column means, written in Python and compiled by Numba.

Rows are tokens; u and z are the halves of rows of uz. Addresses and strides are in bytes. In line order, the patches of
each row (or column) are consecutive. Tables have the order, the index of each token's mean in this order, and the index
of each token's mean in row-major order.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from ..cpu.compiler import KEPT, LANES
from ..cpu.filters import WINDOW, convolution, filter_gradients, take_filters, token_gradient
from ..cpu.language import (
    BYTES,
    HALF,
    LOG2_E,
    ONE,
    WIDTH,
    ZERO,
    broadcast,
    clear,
    count_up,
    exp2,
    floats,
    inlined,
    load,
    load_rows,
    local_floats,
    longs,
    prefetch_row,
    row,
    second,
    sigmoid,
    sigmoids,
    store,
    store_row,
    store_rows,
    total,
)  # fmt: skip
from ..cpu.recurrences import longhorn_gradients, longhorn_update, selective_gradients, selective_update

AHEAD = 4  # kernels prefetch the memory of the token that is `AHEAD` tokens after the current token


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


@inlined
def dot(a, b, size):
    """Return the inner product of two arrays."""
    products = broadcast(ZERO)
    for i in range(0, size - WIDTH + 1, WIDTH):
        products = products + load(a, i) * load(b, i)
    result = total(products)
    for i in range(size // WIDTH * WIDTH, size):
        result += a[i] * b[i]
    return result


@inlined
def take_columns(step_proj, R, width, columns):
    """Copy `width` rows of R elements to the columns of an array (R, LANES), padding the array with zeros."""
    source = row(step_proj, width * R)
    for r in range(R):
        for d in range(width):
            columns[r, d] = source[d * R + r]
        for d in range(width, LANES):
            columns[r, d] = ZERO


@inlined
def take_decay_rates(A_log, N, width, A):
    """Store the transposed decay rates A = -exp(A_log), times log2(e), of a block of channels."""
    source = row(A_log, width * N)
    for n in range(N):
        for d in range(width):
            A[n, d] = -LOG2_E * exp2(LOG2_E * source[d * N + n])
        for d in range(width, LANES):
            A[n, d] = ZERO


@inlined
def compute_step_logits(step, step_proj, R, step_logits):
    """Multiply a row of R elements by a matrix (R, LANES)."""
    for v in range(0, LANES, WIDTH):
        logits = broadcast(ZERO)
        for r in range(R):
            logits = logits + broadcast(step[r]) * load(step_proj, r * LANES + v)
        store(step_logits, v, logits)


def _scan_forward(N: int, rows_of_A: int, advance):
    """Build the kernel of the projections and the scan of the means. A task is one direction of one image."""
    of_states, of_A = N * LANES, max(1, rows_of_A) * LANES

    def kernel(arguments):
        (
            _, _, tasks, B, S, D, R, means0, x_proj_0, step_proj_0, step_bias_0, A_log_0, x_proj_1, step_proj_1,
            step_bias_1, A_log_1, projected0, y0, scratch0,
        ) = to_fixed_tuple(carray(arguments, (19,)), 19)  # fmt: skip
        P = R + 2 * N
        step_proj = carray(floats(scratch0 + BYTES * count_up(second(arguments)) * R * LANES), (R, LANES))
        states, A = carray(local_floats(of_states), (N, LANES)), carray(local_floats(of_A), (rows_of_A, LANES))
        x, step_bias = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        step_logits, skip = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (1, LANES))
        step_size, drive = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (LANES,))
        y = carray(local_floats(LANES), (LANES,))
        clear(skip, 1)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g = task // B
            means1, projected1 = means0 + BYTES * task * S * D, projected0 + BYTES * task * S * P
            for p in range(P):
                weights = row((x_proj_1 if g else x_proj_0) + BYTES * p * D, D)
                for s in range(S):
                    row(projected1 + BYTES * s * P, P)[p] = dot(row(means1 + BYTES * s * D, D), weights, D)
            for first in range(0, D, LANES):
                width = min(LANES, D - first)
                take_columns((step_proj_1 if g else step_proj_0) + BYTES * first * R, R, width, step_proj)
                load_rows((step_bias_1 if g else step_bias_0) + BYTES * first, 0, width, 1, step_bias)
                take_decay_rates((A_log_1 if g else A_log_0) + BYTES * first * N, rows_of_A, width, A)
                clear(states, N)
                for i in range(S):
                    s = S - 1 - i if g else i
                    token = BYTES * (s * D + first)
                    load_rows(means1 + token, 0, width, 1, x)
                    projected = row(projected1 + BYTES * s * P, P)
                    k, q = projected[R : R + N], projected[R + N :]
                    compute_step_logits(projected, step_proj, R, step_logits)
                    advance(states, A, x[0], step_logits, k, q, skip, step_bias, step_size, drive, y)
                    store_row(y0 + BYTES * task * S * D + token, width, y)

    return kernel


def longhorn_scan_forward(N: int):
    return _scan_forward(N, 0, longhorn_update(N))


def selective_scan_forward(N: int):
    return _scan_forward(N, N, selective_update(N))


def _scan_backward(N: int, rows_of_A: int, kept_arrays: int, again, back):
    """Build the kernel of the backward pass of `_scan_forward`, except the gradients of the projections' weights.

    Each image has its own sum of the gradients of step_bias and A. The kernel writes the gradients of the means, the
    projections and the step logits.
    """
    of_states, of_A, of_sums, two = N * LANES, max(1, rows_of_A) * LANES, N * WIDTH, 2 * LANES

    def kernel(arguments):
        (
            _, _, tasks, B, S, D, R, means0, x_proj_0, step_proj_0, step_bias_0, A_log_0, x_proj_1, step_proj_1,
            step_bias_1, A_log_1, projected0, dy0, dmeans0, dprojected0, dstep_logits0, dstep_bias0, dA0, scratch0,
            of_scratch,
        ) = to_fixed_tuple(carray(arguments, (25,)), 25)  # fmt: skip
        P = R + 2 * N
        scratch = scratch0 + BYTES * count_up(second(arguments)) * of_scratch
        step_proj = carray(floats(scratch), (R, LANES))
        step_sizes = carray(floats(scratch + BYTES * R * LANES), (S, LANES))
        slopes = carray(floats(scratch + BYTES * (R + S) * LANES), (S, LANES))
        x_proj = carray(floats(scratch + BYTES * (R + 2 * S) * LANES), (P, LANES))
        kept = carray(floats(scratch + BYTES * (R + 2 * S + P) * LANES), (kept_arrays, S, N, LANES))
        states, G = carray(local_floats(of_states), (N, LANES)), carray(local_floats(of_states), (N, LANES))
        A, dA = carray(local_floats(of_A), (rows_of_A, LANES)), carray(local_floats(of_A), (rows_of_A, LANES))
        x, step_bias = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        dy, skip = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        step_logits, drive = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (LANES,))
        dx, dstep_logits = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (LANES,))
        sums, dchannels = carray(local_floats(of_sums), (N, WIDTH)), carray(local_floats(two), (2, LANES))
        dk, dq = carray(local_floats(N), (N,)), carray(local_floats(N), (N,))
        clear(skip, 1)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g, b = task // B, task % B
            means1, projected1 = means0 + BYTES * task * S * D, projected0 + BYTES * task * S * P
            dmeans1, dprojected1 = dmeans0 + BYTES * task * S * D, dprojected0 + BYTES * task * S * P
            image = b * 2 + g  # row of the sums for this image and direction
            all_dprojected = row(dprojected1, S * P)
            for i in range(S * P):
                all_dprojected[i] = ZERO
            for first in range(0, D, LANES):
                width = min(LANES, D - first)
                take_columns((step_proj_1 if g else step_proj_0) + BYTES * first * R, R, width, step_proj)
                load_rows((step_bias_1 if g else step_bias_0) + BYTES * first, 0, width, 1, step_bias)
                take_decay_rates((A_log_1 if g else A_log_0) + BYTES * first * N, rows_of_A, width, A)
                clear(states, N)
                clear(G, N)
                clear(dA, rows_of_A)
                clear(dchannels, 2)
                for i in range(S):
                    s = S - 1 - i if g else i
                    token = BYTES * (s * D + first)
                    load_rows(means1 + token, 0, width, 1, x)
                    load_rows(dy0 + BYTES * b * S * D + token, 0, width, 1, dy)
                    projected, dprojected = row(projected1 + BYTES * s * P, P), row(dprojected1 + BYTES * s * P, P)
                    compute_step_logits(projected, step_proj, R, step_logits)
                    again(
                        i, states, A, x[0], step_logits, dy[0], projected[R : R + N], step_bias, kept, step_sizes,
                        slopes, drive, dq,
                    )  # fmt: skip
                    for n in range(N):
                        dprojected[R + N + n] += dq[n]
                for i in range(S - 1, -1, -1):
                    s = S - 1 - i if g else i
                    token = BYTES * (s * D + first)
                    load_rows(means1 + token, 0, width, 1, x)
                    load_rows(dy0 + BYTES * b * S * D + token, 0, width, 1, dy)
                    projected, dprojected = row(projected1 + BYTES * s * P, P), row(dprojected1 + BYTES * s * P, P)
                    back(
                        i, G, A, dA, x[0], dy[0], projected[R : R + N], projected[R + N :], skip, kept, step_sizes,
                        slopes, drive, sums, dx, dstep_logits, dk, dchannels,
                    )  # fmt: skip
                    for n in range(N):
                        dprojected[R + n] += dk[n]
                    for r in range(R):
                        dprojected[r] += dot(dstep_logits, step_proj[r], LANES)
                    store_row(dmeans1 + token, width, dx)
                    store_row(dstep_logits0 + BYTES * task * S * D + token, width, dstep_logits)
                store_row(dstep_bias0 + BYTES * (image * D + first), width, dchannels[1])
                store_rows(dA0 + BYTES * (image * N * D + first), BYTES * D, width, rows_of_A, dA)
            for first in range(0, D, LANES):
                width = min(LANES, D - first)
                load_rows((x_proj_1 if g else x_proj_0) + BYTES * first, BYTES * D, width, P, x_proj)
                for s in range(S):
                    dmeans, dprojected = dmeans1 + BYTES * (s * D + first), row(dprojected1 + BYTES * s * P, P)
                    load_rows(dmeans, 0, width, 1, x)
                    for v in range(0, LANES, WIDTH):
                        gradient = load(x, v)
                        for p in range(P):
                            gradient = gradient + broadcast(dprojected[p]) * load(x_proj, p * LANES + v)
                        store(x, v, gradient)
                    store_row(dmeans, width, x[0])

    return kernel


def longhorn_scan_backward(N: int):
    return _scan_backward(N, 0, KEPT["longhorn"], *longhorn_gradients(N))


def selective_scan_backward(N: int):
    return _scan_backward(N, N, KEPT["selective"], *selective_gradients(N))


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
