"""CPU kernels of the scan, written in Python and compiled by Numba.

A task is a block of `LANES` channels of one image and direction. The task loops over the tokens with the states of
these channels in the L1 cache, and loops over channels become vector instructions. A last block of fewer channels is
copied to a buffer that is padded with zeros.

A factory creates the kernel for a recurrence with N states. Addresses (x_data) and strides are in bytes, with each
tensor's strides of directions (x_G), images (x_B) and tokens (x_L); channels, states and outputs are contiguous.
x_start is the start of a task's sequence.
"""

from __future__ import annotations

from numba import carray

from ..cpu.compiler import BYTES, KEPT, LANES
from ..cpu.language import (
    WIDTH,
    block_of_channels,
    clear,
    count_up,
    floats,
    lanes,
    load_rows,
    local_floats,
    local_row,
    local_rows,
    readable_row,
    second,
    store_row,
    store_rows,
    unpack,
)  # fmt: skip
from ..cpu.recurrences import GRADIENTS, UPDATES

AHEAD = 2  # kernels prefetch the memory of the token that is `AHEAD` tokens after the current token
FORWARD, BACKWARD = 30, 41  # number of arguments of the forward kernel and of the backward kernel


def forward(recurrence: str, N: int, chunk: int):
    """Build the forward kernel, which calls `advance` per token to update the states and write y."""
    advance = UPDATES[recurrence](N)
    rows_of_A = N if recurrence == "selective" else 0

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, reverse, x_data, x_G, x_B, x_L,
            step_logits_data, step_logits_G, step_logits_B, step_logits_L, k_data, k_G, k_B, k_L, q_data, q_G, q_B, q_L,
            A_data, skip_data, step_bias_data, y_data, states_data, chunk_states,
        ) = unpack(arguments, FORWARD)  # fmt: skip
        S, A = local_rows(N), local_rows(rows_of_A)
        step_size, drive = local_row(), local_row()
        y = local_row()
        x_padded, step_logits_padded = local_floats(LANES), local_floats(LANES)
        skip, step_bias = local_rows(1), local_rows(1)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            sequence, first, width = block_of_channels(task, blocks, D)
            g, b = sequence // B, sequence % B
            ahead = -AHEAD if reverse >> g & 1 else AHEAD
            x_start = x_data + g * x_G + b * x_B + BYTES * first
            step_logits_start = step_logits_data + g * step_logits_G + b * step_logits_B + BYTES * first
            k_start, q_start = k_data + g * k_G + b * k_B, q_data + g * q_G + b * q_B
            states_start = states_data + BYTES * (sequence * chunk_states * N * D + first)
            load_rows(skip_data + BYTES * (g * D + first), 0, width, 1, skip)
            load_rows(step_bias_data + BYTES * (g * D + first), 0, width, 1, step_bias)
            load_rows(A_data + BYTES * (g * N * D + first), BYTES * D, width, rows_of_A, A)
            y_start = y_data + BYTES * (sequence * L * D + first)
            clear(S, N)
            for i in range(L):
                t = L - 1 - i if reverse >> g & 1 else i
                if chunk_states and i and i % chunk == 0:
                    store_rows(states_start + BYTES * (i // chunk - 1) * N * D, BYTES * D, width, N, S)
                x = lanes(readable_row(x_start, x_L, t, ahead, width, x_padded))
                step_logits = lanes(readable_row(step_logits_start, step_logits_L, t, ahead, width, step_logits_padded))
                k, q = carray(floats(k_start + t * k_L), (N,)), carray(floats(q_start + t * q_L), (N,))
                advance(S, A, x, step_logits, k, q, skip, step_bias, step_size, drive, y)
                store_row(y_start + BYTES * t * D, width, y)

    return kernel


def backward(recurrence: str, N: int, chunk: int):
    """Build the backward kernel, which processes chunks of tokens in reverse and recomputes each chunk's states."""
    again, back = GRADIENTS[recurrence](N)
    kept_arrays = KEPT[recurrence]
    rows_of_A = N if recurrence == "selective" else 0
    of_kept, of_steps, of_sums = kept_arrays * chunk * N * LANES, chunk * LANES, N * WIDTH

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, reverse, x_data, x_G, x_B, x_L,
            step_logits_data, step_logits_G, step_logits_B, step_logits_L, k_data, k_G, k_B, k_L, q_data, q_G, q_B, q_L,
            A_data, skip_data, step_bias_data, dy_data, dy_G, dy_B, dy_L, states_data, chunk_states, dx_data,
            dstep_logits_data, dk_data, dq_data, dA_data, dchannels_data, scratch_data, _,
        ) = unpack(arguments, BACKWARD)  # fmt: skip
        scratch = scratch_data + BYTES * count_up(second(arguments)) * (of_kept + 2 * of_steps)
        kept = carray(floats(scratch), (kept_arrays, chunk, N, LANES))
        step_sizes = carray(floats(scratch + BYTES * of_kept), (chunk, LANES))
        slopes = carray(floats(scratch + BYTES * (of_kept + of_steps)), (chunk, LANES))
        S, G = local_rows(N), local_rows(N)
        A, dA = local_rows(rows_of_A), local_rows(rows_of_A)
        x_padded, step_logits_padded, dy_padded = local_floats(LANES), local_floats(LANES), local_floats(LANES)
        skip, step_bias = local_rows(1), local_rows(1)
        drive, sums = local_row(), carray(local_floats(of_sums), (N, WIDTH))
        dx, dstep_logits = local_row(), local_row()
        dchannels = local_rows(2)
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            sequence, first, width = block_of_channels(task, blocks, D)
            g, b = sequence // B, sequence % B
            ahead = -AHEAD if reverse >> g & 1 else AHEAD
            x_start = x_data + g * x_G + b * x_B + BYTES * first
            step_logits_start = step_logits_data + g * step_logits_G + b * step_logits_B + BYTES * first
            k_start, q_start = k_data + g * k_G + b * k_B, q_data + g * q_G + b * q_B
            states_start = states_data + BYTES * (sequence * chunk_states * N * D + first)
            load_rows(skip_data + BYTES * (g * D + first), 0, width, 1, skip)
            load_rows(step_bias_data + BYTES * (g * D + first), 0, width, 1, step_bias)
            load_rows(A_data + BYTES * (g * N * D + first), BYTES * D, width, rows_of_A, A)
            dy_start = dy_data + g * dy_G + b * dy_B + BYTES * first
            dx_start = dx_data + BYTES * (sequence * L * D + first)
            dstep_logits_start = dstep_logits_data + BYTES * (sequence * L * D + first)
            # each block of channels has its own sums of dk and dq over its channels
            part = BYTES * L * N * (task % blocks * (tasks // blocks) + sequence)
            dk_start, dq_start = dk_data + part, dq_data + part
            clear(dA, rows_of_A)
            clear(G, N)
            clear(dchannels, 2)
            for c in range(chunk_states, -1, -1):
                clear(S, N)
                if c:
                    load_rows(states_start + BYTES * (c - 1) * N * D, BYTES * D, width, N, S)
                tokens = min(chunk, L - c * chunk)
                for i in range(tokens):
                    t = L - 1 - (c * chunk + i) if reverse >> g & 1 else c * chunk + i
                    x = lanes(readable_row(x_start, x_L, t, ahead, width, x_padded))
                    step_logits = lanes(
                        readable_row(step_logits_start, step_logits_L, t, ahead, width, step_logits_padded)
                    )
                    dy = lanes(readable_row(dy_start, dy_L, t, ahead, width, dy_padded))
                    k, dq = carray(floats(k_start + t * k_L), (N,)), carray(floats(dq_start + BYTES * t * N), (N,))
                    again(i, S, A, x, step_logits, dy, k, step_bias, kept, step_sizes, slopes, drive, dq)
                for i in range(tokens - 1, -1, -1):
                    t = L - 1 - (c * chunk + i) if reverse >> g & 1 else c * chunk + i
                    x = lanes(readable_row(x_start, x_L, t, -ahead, width, x_padded))
                    dy = lanes(readable_row(dy_start, dy_L, t, -ahead, width, dy_padded))
                    k, q = carray(floats(k_start + t * k_L), (N,)), carray(floats(q_start + t * q_L), (N,))
                    dk = carray(floats(dk_start + BYTES * t * N), (N,))
                    back(
                        i, G, A, dA, x, dy, k, q, skip, kept, step_sizes, slopes, drive, sums, dx, dstep_logits, dk,
                        dchannels,
                    )  # fmt: skip
                    store_row(dx_start + BYTES * t * D, width, dx)
                    store_row(dstep_logits_start + BYTES * t * D, width, dstep_logits)
            image = b * (tasks // blocks // B) + g  # row of the partial sums for this image and direction
            store_rows(dchannels_data + BYTES * (image * 2 * D + first), BYTES * D, width, 2, dchannels)
            store_rows(dA_data + BYTES * (image * N * D + first), BYTES * D, width, rows_of_A, dA)

    return kernel
