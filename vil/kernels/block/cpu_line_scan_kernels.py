"""CPU kernels that project and scan the row or column means of a pooled block, compiled by Numba.

A task is one direction of one image. A task loops over blocks of `LANES` channels, and for each block over all means.
Addresses are in bytes.
"""

from __future__ import annotations

from numba import carray

from ..cpu.compiler import BYTES, KEPT, LANES
from ..cpu.language import (
    LOG2_E,
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
    local_row,
    local_rows,
    row,
    second,
    store,
    store_row,
    store_rows,
    total,
    unpack,
)  # fmt: skip
from ..cpu.recurrences import GRADIENTS, UPDATES


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
def add(values, size, sums):
    """Add the first `size` elements of `values` to `sums`."""
    for i in range(size):
        sums[i] += values[i]


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
    """Store A = -exp(A_log), the decay rates of a block of channels, transposed and multiplied by log2(e)."""
    source = row(A_log, width * N)
    for n in range(N):
        for d in range(width):
            A[n, d] = -LOG2_E * exp2(LOG2_E * source[d * N + n])
        for d in range(width, LANES):
            A[n, d] = ZERO


@inlined
def take_weights(step_proj0, step_bias0, A_log0, first, width, R, N, step_proj, step_bias, A):
    """Copy a direction's weights for a block of channels: step_proj, step_bias, and the decay rates if `A` has rows."""
    take_columns(step_proj0 + BYTES * first * R, R, width, step_proj)
    load_rows(step_bias0 + BYTES * first, 0, width, 1, step_bias)
    take_decay_rates(A_log0 + BYTES * first * N, A.shape[0], width, A)


@inlined
def project(means0, x_proj0, projected0, S, D, P):
    """Multiply S means of D channels by the matrix x_proj (P, D), and write the result to the address `projected0`."""
    for p in range(P):
        weights = row(x_proj0 + BYTES * p * D, D)
        for s in range(S):
            row(projected0 + BYTES * s * P, P)[p] = dot(row(means0 + BYTES * s * D, D), weights, D)


@inlined
def add_projected_gradients(dprojected0, x_proj0, dmeans0, S, D, P, x_proj, dmeans):
    """Add the projections' gradients times the matrix x_proj (P, D) to the gradients of S means of D channels."""
    for first in range(0, D, LANES):
        width = min(LANES, D - first)
        load_rows(x_proj0 + BYTES * first, BYTES * D, width, P, x_proj)
        for s in range(S):
            address, dprojected = dmeans0 + BYTES * (s * D + first), row(dprojected0 + BYTES * s * P, P)
            load_rows(address, 0, width, 1, dmeans)
            for v in range(0, LANES, WIDTH):
                gradient = load(dmeans, v)
                for p in range(P):
                    gradient = gradient + broadcast(dprojected[p]) * load(x_proj, p * LANES + v)
                store(dmeans, v, gradient)
            store_row(address, width, dmeans[0])


@inlined
def compute_step_logits(step, step_proj, R, step_logits):
    """Compute step logits: multiply a step (R elements) by a matrix (R, LANES)."""
    for v in range(0, LANES, WIDTH):
        logits = broadcast(ZERO)
        for r in range(R):
            logits = logits + broadcast(step[r]) * load(step_proj, r * LANES + v)
        store(step_logits, v, logits)


def scan_forward(recurrence: str, N: int):
    """Build the kernel of the projections and the scan of row or column means."""
    advance = UPDATES[recurrence](N)
    rows_of_A = N if recurrence == "selective" else 0

    def kernel(arguments):
        (
            _, _, tasks, B, S, D, R, means0, x_proj_0, step_proj_0, step_bias_0, A_log_0, x_proj_1, step_proj_1,
            step_bias_1, A_log_1, projected0, y0, scratch0,
        ) = unpack(arguments, 19)  # fmt: skip
        P = R + 2 * N
        step_proj = carray(floats(scratch0 + BYTES * count_up(second(arguments)) * R * LANES), (R, LANES))
        states, A, x, skip, step_bias = (
            local_rows(N),
            local_rows(rows_of_A),
            local_rows(1),
            local_rows(1),
            local_rows(1),
        )
        step_logits, step_size, drive, y = local_row(), local_row(), local_row(), local_row()
        clear(skip, 1)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g = task // B
            step_proj1, step_bias1 = step_proj_1 if g else step_proj_0, step_bias_1 if g else step_bias_0
            x_proj1, A_log1 = x_proj_1 if g else x_proj_0, A_log_1 if g else A_log_0
            means1, projected1 = means0 + BYTES * task * S * D, projected0 + BYTES * task * S * P
            project(means1, x_proj1, projected1, S, D, P)
            for first in range(0, D, LANES):
                width = min(LANES, D - first)
                take_weights(step_proj1, step_bias1, A_log1, first, width, R, N, step_proj, step_bias, A)
                clear(states, N)
                for i in range(S):
                    s = S - 1 - i if g else i
                    token, projected = BYTES * (s * D + first), row(projected1 + BYTES * s * P, P)
                    load_rows(means1 + token, 0, width, 1, x)
                    compute_step_logits(projected, step_proj, R, step_logits)
                    k, q = projected[R : R + N], projected[R + N :]
                    advance(states, A, x[0], step_logits, k, q, skip, step_bias, step_size, drive, y)
                    store_row(y0 + BYTES * task * S * D + token, width, y)

    return kernel


def scan_backward(recurrence: str, N: int):
    """Build the backward kernel of `scan_forward` for all gradients except those of the projections' weights.

    The kernel writes the gradients of the means, the projections and the step logits, and one sum of the gradients of
    step_bias and A per image.
    """
    again, back = GRADIENTS[recurrence](N)
    kept_arrays = KEPT[recurrence]
    rows_of_A = N if recurrence == "selective" else 0
    of_sums = N * WIDTH

    def kernel(arguments):
        (
            _, _, tasks, B, S, D, R, means0, x_proj_0, step_proj_0, step_bias_0, A_log_0, x_proj_1, step_proj_1,
            step_bias_1, A_log_1, projected0, dy0, dmeans0, dprojected0, dstep_logits0, dstep_bias0, dA0, scratch0,
            of_scratch,
        ) = unpack(arguments, 25)  # fmt: skip
        P = R + 2 * N
        scratch = scratch0 + BYTES * count_up(second(arguments)) * of_scratch
        step_proj = carray(floats(scratch), (R, LANES))
        step_sizes = carray(floats(scratch + BYTES * R * LANES), (S, LANES))
        slopes = carray(floats(scratch + BYTES * (R + S) * LANES), (S, LANES))
        x_proj = carray(floats(scratch + BYTES * (R + 2 * S) * LANES), (P, LANES))
        kept = carray(floats(scratch + BYTES * (R + 2 * S + P) * LANES), (kept_arrays, S, N, LANES))
        states, G, A, dA = local_rows(N), local_rows(N), local_rows(rows_of_A), local_rows(rows_of_A)
        x, dy, skip, step_bias, dchannels = local_rows(1), local_rows(1), local_rows(1), local_rows(1), local_rows(2)
        step_logits, drive, dx, dstep_logits = local_row(), local_row(), local_row(), local_row()
        sums = carray(local_floats(of_sums), (N, WIDTH))
        dk, dq = carray(local_floats(N), (N,)), carray(local_floats(N), (N,))
        clear(skip, 1)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g, b = task // B, task % B
            step_proj1, step_bias1 = step_proj_1 if g else step_proj_0, step_bias_1 if g else step_bias_0
            x_proj1, A_log1 = x_proj_1 if g else x_proj_0, A_log_1 if g else A_log_0
            means1, projected1 = means0 + BYTES * task * S * D, projected0 + BYTES * task * S * P
            dmeans1, dprojected1 = dmeans0 + BYTES * task * S * D, dprojected0 + BYTES * task * S * P
            dy1, dstep_logits1 = dy0 + BYTES * b * S * D, dstep_logits0 + BYTES * task * S * D
            all_dprojected = row(dprojected1, S * P)
            for i in range(S * P):
                all_dprojected[i] = ZERO
            for first in range(0, D, LANES):
                width = min(LANES, D - first)
                take_weights(step_proj1, step_bias1, A_log1, first, width, R, N, step_proj, step_bias, A)
                clear(states, N)
                clear(G, N)
                clear(dA, rows_of_A)
                clear(dchannels, 2)
                for i in range(S):
                    s = S - 1 - i if g else i
                    token, projected = BYTES * (s * D + first), row(projected1 + BYTES * s * P, P)
                    load_rows(means1 + token, 0, width, 1, x)
                    load_rows(dy1 + token, 0, width, 1, dy)
                    compute_step_logits(projected, step_proj, R, step_logits)
                    k = projected[R : R + N]
                    again(i, states, A, x[0], step_logits, dy[0], k, step_bias, kept, step_sizes, slopes, drive, dq)
                    add(dq, N, row(dprojected1 + BYTES * (s * P + R + N), N))
                for i in range(S - 1, -1, -1):
                    s = S - 1 - i if g else i
                    token, projected = BYTES * (s * D + first), row(projected1 + BYTES * s * P, P)
                    load_rows(means1 + token, 0, width, 1, x)
                    load_rows(dy1 + token, 0, width, 1, dy)
                    back(
                        i, G, A, dA, x[0], dy[0], projected[R : R + N], projected[R + N :], skip, kept, step_sizes,
                        slopes, drive, sums, dx, dstep_logits, dk, dchannels,
                    )  # fmt: skip
                    add(dk, N, row(dprojected1 + BYTES * (s * P + R), N))
                    dstep = row(dprojected1 + BYTES * s * P, R)
                    for r in range(R):
                        dstep[r] += dot(dstep_logits, step_proj[r], LANES)
                    store_row(dmeans1 + token, width, dx)
                    store_row(dstep_logits1 + token, width, dstep_logits)
                image = b * 2 + g  # row of the sums for this image and direction
                store_row(dstep_bias0 + BYTES * (image * D + first), width, dchannels[1])
                store_rows(dA0 + BYTES * (image * N * D + first), BYTES * D, width, rows_of_A, dA)
            add_projected_gradients(dprojected1, x_proj1, dmeans1, S, D, P, x_proj, x)

    return kernel
