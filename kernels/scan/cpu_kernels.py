"""The scan's kernels for CPUs, in the part of Python that Numba compiles; `cpu_scan` launches them, and says with what.

A task is a block of `LANES` channels of one image and direction. It walks over the tokens with the states of these
channels in the first cache; the loops over channels become vector instructions. A last block of fewer channels is
copied to where there are as many, zeros behind it.

A factory makes the kernel for N states. Addresses and strides are in bytes, each tensor's of directions, images and
tokens; channels, states and outputs are contiguous.
"""

from __future__ import annotations

from numba import carray
from numba.np.unsafe.ndarray import to_fixed_tuple

from ..cpu.compiler import LANES
from ..cpu.language import (
    BYTES,
    LN_2,
    LOG2_E,
    ONE,
    TWO,
    ZERO,
    clear,
    count_up,
    exp2,
    exp2_clamped,
    floats,
    full,
    give,
    inlined,
    lanes,
    local_floats,
    put,
    second,
    sigmoid,
    softplus,
    take,
)  # fmt: skip

FORWARD, BACKWARD = 30, 41  # arguments


@inlined
def place(task, blocks, B, D):
    """Direction, image, the number of both, and first channel and width of a task's block."""
    first, sequence = task % blocks * LANES, task // blocks
    return sequence // B, sequence % B, sequence, first, min(LANES, D - first)


def longhorn_forward(N: int, chunk: int):
    size = N * LANES

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, reverse, x0, xg, xb, xl, l0, lg, lb, ll, k0, kg, kb, kl, q0, qg, qb, ql,
            _, skip0, bias0, y0, states0, kept,
        ) = to_fixed_tuple(carray(arguments, (FORWARD,)), FORWARD)  # fmt: skip
        S, eps = carray(local_floats(size), (N, LANES)), carray(local_floats(LANES), (LANES,))
        y = carray(local_floats(LANES), (LANES,))
        x_padded, l_padded = local_floats(LANES), local_floats(LANES)
        skip, bias = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g, b, sequence, first, width = place(task, blocks, B, D)
            x1, l1 = x0 + g * xg + b * xb + BYTES * first, l0 + g * lg + b * lb + BYTES * first
            k1, q1 = k0 + g * kg + b * kb, q0 + g * qg + b * qb
            states1 = states0 + BYTES * (sequence * kept * N * D + first)
            take(skip0 + BYTES * (g * D + first), 0, width, 1, skip)
            take(bias0 + BYTES * (g * D + first), 0, width, 1, bias)
            y1 = y0 + BYTES * (sequence * L * D + first)
            clear(S, N)
            for i in range(L):
                t = L - 1 - i if reverse >> g & 1 else i
                if kept and i and i % chunk == 0:
                    give(states1 + BYTES * (i // chunk - 1) * N * D, BYTES * D, width, N, S)
                x, logits = lanes(full(x1 + t * xl, width, x_padded)), lanes(full(l1 + t * ll, width, l_padded))
                k, q = carray(floats(k1 + t * kl), (N,)), carray(floats(q1 + t * ql), (N,))
                norm = ONE
                for n in range(N):
                    norm += k[n] * k[n]
                for d in range(LANES):
                    eps[d] = ONE / (norm + exp2_clamped(-LOG2_E * (logits[d] + bias[0, d])))
                    y[d] = skip[0, d] * x[d]
                for n in range(N):
                    kn, qn = k[n], q[n]
                    for d in range(LANES):
                        s = S[n, d]
                        s += (eps[d] * kn) * (x[d] - kn * s)
                        S[n, d] = s
                        y[d] += qn * s
                put(y1 + BYTES * t * D, width, y)

    return kernel


def selective_forward(N: int, chunk: int):
    size = N * LANES

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, reverse, x0, xg, xb, xl, l0, lg, lb, ll, k0, kg, kb, kl, q0, qg, qb, ql,
            rates0, skip0, bias0, y0, states0, kept,
        ) = to_fixed_tuple(carray(arguments, (FORWARD,)), FORWARD)  # fmt: skip
        S, rates = carray(local_floats(size), (N, LANES)), carray(local_floats(size), (N, LANES))
        dt, drive = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (LANES,))
        y = carray(local_floats(LANES), (LANES,))
        x_padded, l_padded = local_floats(LANES), local_floats(LANES)
        skip, bias = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g, b, sequence, first, width = place(task, blocks, B, D)
            x1, l1 = x0 + g * xg + b * xb + BYTES * first, l0 + g * lg + b * lb + BYTES * first
            k1, q1 = k0 + g * kg + b * kb, q0 + g * qg + b * qb
            states1 = states0 + BYTES * (sequence * kept * N * D + first)
            take(skip0 + BYTES * (g * D + first), 0, width, 1, skip)
            take(bias0 + BYTES * (g * D + first), 0, width, 1, bias)
            take(rates0 + BYTES * (g * N * D + first), BYTES * D, width, N, rates)
            y1 = y0 + BYTES * (sequence * L * D + first)
            clear(S, N)
            for i in range(L):
                t = L - 1 - i if reverse >> g & 1 else i
                if kept and i and i % chunk == 0:
                    give(states1 + BYTES * (i // chunk - 1) * N * D, BYTES * D, width, N, S)
                x, logits = lanes(full(x1 + t * xl, width, x_padded)), lanes(full(l1 + t * ll, width, l_padded))
                k, q = carray(floats(k1 + t * kl), (N,)), carray(floats(q1 + t * ql), (N,))
                for d in range(LANES):
                    dt[d] = softplus(logits[d] + bias[0, d])
                    drive[d] = dt[d] * x[d]
                    y[d] = skip[0, d] * x[d]
                for n in range(N):
                    kn, qn = k[n], q[n]
                    for d in range(LANES):
                        s = exp2(rates[n, d] * dt[d]) * S[n, d] + kn * drive[d]
                        S[n, d] = s
                        y[d] += qn * s
                put(y1 + BYTES * t * D, width, y)

    return kernel


def longhorn_backward(N: int, chunk: int):
    """By the residuals r = x - k S of a chunk of tokens, as docs/kernels.md derives it."""
    size, of_chunk, twice = N * LANES, chunk * N * LANES, 2 * LANES

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, reverse, x0, xg, xb, xl, l0, lg, lb, ll, k0, kg, kb, kl, q0, qg, qb, ql,
            _, skip0, bias0, dy0, dyg, dyb, dyl, states0, kept, dx0, dl0, dk0, dq0, _, dchannels0, scratch0, _,
        ) = to_fixed_tuple(carray(arguments, (BACKWARD,)), BACKWARD)  # fmt: skip
        scratch = scratch0 + BYTES * count_up(second(arguments)) * (of_chunk + 2 * chunk * LANES)
        residuals = carray(floats(scratch), (chunk, N, LANES))
        steps = carray(floats(scratch + BYTES * of_chunk), (chunk, LANES))
        slopes = carray(floats(scratch + BYTES * (of_chunk + chunk * LANES)), (chunk, LANES))
        S, G = carray(local_floats(size), (N, LANES)), carray(local_floats(size), (N, LANES))
        x_padded, l_padded, dy_padded = local_floats(LANES), local_floats(LANES), local_floats(LANES)
        skip, bias = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        dx, dl = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (LANES,))
        dchannels = carray(local_floats(twice), (2, LANES))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g, b, sequence, first, width = place(task, blocks, B, D)
            x1, l1 = x0 + g * xg + b * xb + BYTES * first, l0 + g * lg + b * lb + BYTES * first
            k1, q1 = k0 + g * kg + b * kb, q0 + g * qg + b * qb
            states1 = states0 + BYTES * (sequence * kept * N * D + first)
            take(skip0 + BYTES * (g * D + first), 0, width, 1, skip)
            take(bias0 + BYTES * (g * D + first), 0, width, 1, bias)
            dy1, dx1 = dy0 + g * dyg + b * dyb + BYTES * first, dx0 + BYTES * (sequence * L * D + first)
            dl1, sums = (
                dl0 + BYTES * (sequence * L * D + first),
                BYTES * L * N * (task % blocks * (tasks // blocks) + sequence),
            )
            clear(G, N)
            clear(dchannels, 2)
            for c in range(kept, -1, -1):
                clear(S, N)
                if c:
                    take(states1 + BYTES * (c - 1) * N * D, BYTES * D, width, N, S)
                tokens = min(chunk, L - c * chunk)
                for i in range(tokens):
                    t = L - 1 - (c * chunk + i) if reverse >> g & 1 else c * chunk + i
                    x, logits = lanes(full(x1 + t * xl, width, x_padded)), lanes(full(l1 + t * ll, width, l_padded))
                    dy = lanes(full(dy1 + t * dyl, width, dy_padded))
                    k, dq = carray(floats(k1 + t * kl), (N,)), carray(floats(dq0 + sums + BYTES * t * N), (N,))
                    norm = ONE
                    for n in range(N):
                        norm += k[n] * k[n]
                    for d in range(LANES):
                        e = exp2_clamped(-LOG2_E * (logits[d] + bias[0, d]))
                        steps[i, d] = ONE / (norm + e)
                        slopes[i, d] = e * steps[i, d]
                    for n in range(N):
                        kn, total = k[n], ZERO
                        for d in range(LANES):
                            r = x[d] - kn * S[n, d]
                            s = S[n, d] + (steps[i, d] * kn) * r
                            residuals[i, n, d] = r
                            S[n, d] = s
                            total += s * dy[d]
                        dq[n] = total
                for i in range(tokens - 1, -1, -1):
                    t = L - 1 - (c * chunk + i) if reverse >> g & 1 else c * chunk + i
                    x, dy = lanes(full(x1 + t * xl, width, x_padded)), lanes(full(dy1 + t * dyl, width, dy_padded))
                    k, q = carray(floats(k1 + t * kl), (N,)), carray(floats(q1 + t * ql), (N,))
                    dk = carray(floats(dk0 + sums + BYTES * t * N), (N,))
                    for d in range(LANES):
                        dx[d] = ZERO
                        dl[d] = ZERO
                    for n in range(N):
                        kn, qn, total = k[n], q[n], ZERO
                        for d in range(LANES):
                            gradient, r = G[n, d] + qn * dy[d], residuals[i, n, d]
                            scaled = steps[i, d] * gradient
                            dx[d] += kn * scaled
                            dl[d] += (kn * scaled) * r
                            total += scaled * (TWO * r - x[d])
                            G[n, d] = gradient - (kn * kn) * scaled
                        dk[n] = total
                    norm = ZERO
                    for d in range(LANES):
                        norm += steps[i, d] * dl[d]
                        dl[d] *= slopes[i, d]
                        dx[d] += skip[0, d] * dy[d]
                        dchannels[0, d] += x[d] * dy[d]
                        dchannels[1, d] += dl[d]
                    for n in range(N):
                        dk[n] -= TWO * k[n] * norm
                    put(dx1 + BYTES * t * D, width, dx)
                    put(dl1 + BYTES * t * D, width, dl)
            give(
                dchannels0 + BYTES * ((b * (tasks // blocks // B) + g) * 2 * D + first), BYTES * D, width, 2, dchannels
            )

    return kernel


def selective_backward(N: int, chunk: int):
    size, of_chunk, twice = N * LANES, chunk * N * LANES, 2 * LANES

    def kernel(arguments):
        (
            _, _, tasks, blocks, B, L, D, reverse, x0, xg, xb, xl, l0, lg, lb, ll, k0, kg, kb, kl, q0, qg, qb, ql,
            rates0, skip0, bias0, dy0, dyg, dyb, dyl, states0, kept, dx0, dl0, dk0, dq0, drates0, dchannels0, scratch0,
            _,
        ) = to_fixed_tuple(carray(arguments, (BACKWARD,)), BACKWARD)  # fmt: skip
        scratch = scratch0 + BYTES * count_up(second(arguments)) * (2 * of_chunk + 2 * chunk * LANES)
        before = carray(floats(scratch), (chunk, N, LANES))
        decays = carray(floats(scratch + BYTES * of_chunk), (chunk, N, LANES))
        steps = carray(floats(scratch + BYTES * 2 * of_chunk), (chunk, LANES))
        slopes = carray(floats(scratch + BYTES * (2 * of_chunk + chunk * LANES)), (chunk, LANES))
        S, G = carray(local_floats(size), (N, LANES)), carray(local_floats(size), (N, LANES))
        rates, drates = carray(local_floats(size), (N, LANES)), carray(local_floats(size), (N, LANES))
        drive = carray(local_floats(LANES), (LANES,))
        x_padded, l_padded, dy_padded = local_floats(LANES), local_floats(LANES), local_floats(LANES)
        skip, bias = carray(local_floats(LANES), (1, LANES)), carray(local_floats(LANES), (1, LANES))
        dx, dl = carray(local_floats(LANES), (LANES,)), carray(local_floats(LANES), (LANES,))
        dchannels = carray(local_floats(twice), (2, LANES))
        while True:
            task = count_up(arguments)
            if task >= tasks:
                break
            g, b, sequence, first, width = place(task, blocks, B, D)
            x1, l1 = x0 + g * xg + b * xb + BYTES * first, l0 + g * lg + b * lb + BYTES * first
            k1, q1 = k0 + g * kg + b * kb, q0 + g * qg + b * qb
            states1 = states0 + BYTES * (sequence * kept * N * D + first)
            take(skip0 + BYTES * (g * D + first), 0, width, 1, skip)
            take(bias0 + BYTES * (g * D + first), 0, width, 1, bias)
            dy1, dx1 = dy0 + g * dyg + b * dyb + BYTES * first, dx0 + BYTES * (sequence * L * D + first)
            dl1, sums = (
                dl0 + BYTES * (sequence * L * D + first),
                BYTES * L * N * (task % blocks * (tasks // blocks) + sequence),
            )
            take(rates0 + BYTES * (g * N * D + first), BYTES * D, width, N, rates)
            clear(drates, N)
            clear(G, N)
            clear(dchannels, 2)
            for c in range(kept, -1, -1):
                clear(S, N)
                if c:
                    take(states1 + BYTES * (c - 1) * N * D, BYTES * D, width, N, S)
                tokens = min(chunk, L - c * chunk)
                for i in range(tokens):
                    t = L - 1 - (c * chunk + i) if reverse >> g & 1 else c * chunk + i
                    x, logits = lanes(full(x1 + t * xl, width, x_padded)), lanes(full(l1 + t * ll, width, l_padded))
                    dy = lanes(full(dy1 + t * dyl, width, dy_padded))
                    k, dq = carray(floats(k1 + t * kl), (N,)), carray(floats(dq0 + sums + BYTES * t * N), (N,))
                    for d in range(LANES):
                        logit = logits[d] + bias[0, d]
                        steps[i, d] = softplus(logit)
                        slopes[i, d] = sigmoid(logit)
                        drive[d] = steps[i, d] * x[d]
                    for n in range(N):
                        kn, total = k[n], ZERO
                        for d in range(LANES):
                            decay = exp2(rates[n, d] * steps[i, d])
                            s = decay * S[n, d] + kn * drive[d]
                            before[i, n, d] = S[n, d]
                            decays[i, n, d] = decay
                            S[n, d] = s
                            total += s * dy[d]
                        dq[n] = total
                for i in range(tokens - 1, -1, -1):
                    t = L - 1 - (c * chunk + i) if reverse >> g & 1 else c * chunk + i
                    x, dy = lanes(full(x1 + t * xl, width, x_padded)), lanes(full(dy1 + t * dyl, width, dy_padded))
                    k, q = carray(floats(k1 + t * kl), (N,)), carray(floats(q1 + t * ql), (N,))
                    dk = carray(floats(dk0 + sums + BYTES * t * N), (N,))
                    for d in range(LANES):
                        dx[d] = ZERO
                        dl[d] = ZERO
                    for d in range(LANES):
                        drive[d] = steps[i, d] * x[d]
                    for n in range(N):
                        kn, qn, total = k[n], q[n], ZERO
                        for d in range(LANES):
                            gradient = G[n, d] + qn * dy[d]
                            dx[d] += kn * gradient
                            total += gradient * drive[d]
                            gradient *= decays[i, n, d]
                            exponent = gradient * before[i, n, d]
                            dl[d] += rates[n, d] * exponent
                            drates[n, d] += steps[i, d] * exponent
                            G[n, d] = gradient
                        dk[n] = total
                    for d in range(LANES):
                        dl[d] = (x[d] * dx[d] + LN_2 * dl[d]) * slopes[i, d]
                        dx[d] = steps[i, d] * dx[d] + skip[0, d] * dy[d]
                        dchannels[0, d] += x[d] * dy[d]
                        dchannels[1, d] += dl[d]
                    put(dx1 + BYTES * t * D, width, dx)
                    put(dl1 + BYTES * t * D, width, dl)
            give(
                dchannels0 + BYTES * ((b * (tasks // blocks // B) + g) * 2 * D + first), BYTES * D, width, 2, dchannels
            )
            give(drates0 + BYTES * ((b * (tasks // blocks // B) + g) * N * D + first), BYTES * D, width, N, drates)

    return kernel
