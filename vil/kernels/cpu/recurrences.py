"""Recurrences of CPU kernels: the update of `LANES` channels' states by one token, and its gradients.

Each recurrence has three functions:

    advance   update the states by one token and write y
    again     update the states by one token, keep arrays for `back` and write the token's dq
    back      move the states' gradients back by one token and write dx, dstep_logits and dk

The argument `A` of all three functions has the rows of A (no rows for Longhorn). The argument `kept` of `again` and
`back` has `KEPT` arrays of states for each token of the sequence or chunk.
"""

from __future__ import annotations

from .compiler import LANES
from .language import (
    HALF,
    LN_2,
    LOG2_E,
    ONE,
    TWO,
    WIDTH,
    ZERO,
    broadcast,
    exp2,
    exp2_clamped,
    inlined,
    load,
    sigmoid,
    softplus,
    store,
    total,
)  # fmt: skip


def longhorn_update(N: int):
    """Build the function `advance`, which updates Longhorn's states by one token and writes y."""

    @inlined
    def advance(S, A, x, step_logits, k, q, skip, step_bias, step_size, drive, y):
        norm = ONE
        for n in range(N):
            norm += k[n] * k[n]
        for d in range(LANES):
            step_size[d] = ONE / (norm + exp2_clamped(-LOG2_E * (step_logits[d] + step_bias[0, d])))
            drive[d] = step_size[d] * x[d]
            y[d] = skip[0, d] * x[d]
        for v in range(0, LANES, WIDTH):
            e, ex, out = load(step_size, v), load(drive, v), load(y, v)
            for n in range(N):
                kn, s = broadcast(k[n]), load(S, n * LANES + v)
                s = s + kn * (ex - (kn * e) * s)
                store(S, n * LANES + v, s)
                out = out + broadcast(q[n]) * s
            store(y, v, out)

    return advance


def selective_update(N: int):
    """Build the function `advance`, which updates Mamba's states by one token and writes y."""

    @inlined
    def advance(S, A, x, step_logits, k, q, skip, step_bias, step_size, drive, y):
        for d in range(LANES):
            step_size[d] = softplus(step_logits[d] + step_bias[0, d])
            drive[d] = step_size[d] * x[d]
            y[d] = skip[0, d] * x[d]
        for n in range(N):
            kn, qn = k[n], q[n]
            for d in range(LANES):
                s = exp2(A[n, d] * step_size[d]) * S[n, d] + kn * drive[d]
                S[n, d] = s
                y[d] += qn * s

    return advance


def longhorn_gradients(N: int):
    """Build the functions that repeat the forward scan of Longhorn's recurrence (`again`) and backpropagate (`back`).

    With the residual r = x - k S (docs/kernels) and the step size e, `again` keeps e (2 r - x), and `back` multiplies e
    (2 r - x) by the state's gradient. These products sum to the gradient of k, except the gradient through k.k. The
    products also determine the gradient of the step size, because e r = (e (2 r - x) + e x) / 2.
    """

    @inlined
    def again(i, S, A, x, step_logits, dy, k, step_bias, kept, step_sizes, slopes, drive, dq):
        norm = ONE
        for n in range(N):
            norm += k[n] * k[n]
        for d in range(LANES):
            e = exp2_clamped(-LOG2_E * (step_logits[d] + step_bias[0, d]))
            step_sizes[i, d] = ONE / (norm + e)
            slopes[i, d] = e * step_sizes[i, d]
            drive[d] = step_sizes[i, d] * x[d]
        for n in range(N):
            kn, products = broadcast(k[n]), broadcast(ZERO)
            for v in range(0, LANES, WIDTH):
                s, ex = load(S, n * LANES + v), load(drive, v)
                er = ex - (kn * load(step_sizes, i * LANES + v)) * s
                s = s + kn * er
                store(S, n * LANES + v, s)
                store(kept, (i * LANES + v) * N + n * WIDTH, er + er - ex)
                products = products + s * load(dy, v)
            dq[n] = total(products)

    @inlined
    def back(i, G, A, dA, x, dy, k, q, skip, kept, step_sizes, slopes, drive, sums, dx, dstep_logits, dk, dchannels):
        for n in range(N):
            store(sums, n * WIDTH, broadcast(ZERO))
        norms = broadcast(ZERO)
        for v in range(0, LANES, WIDTH):
            e, xv, dyv = load(step_sizes, i * LANES + v), load(x, v), load(dy, v)
            by_drive, by_factor = broadcast(ZERO), broadcast(ZERO)
            for n in range(N):
                kn, gradient = broadcast(k[n]), load(G, n * LANES + v) + broadcast(q[n]) * dyv
                error = gradient * load(kept, (i * LANES + v) * N + n * WIDTH)
                by_drive = by_drive + kn * gradient
                by_factor = by_factor + kn * error
                store(sums, n * WIDTH, load(sums, n * WIDTH) + error)
                store(G, n * LANES + v, gradient - (broadcast(k[n] * k[n]) * e) * gradient)
            by_x = e * by_drive
            by_step_size = broadcast(HALF) * (by_factor + xv * by_x)  # gradient of the step size e, times e
            norms = norms + e * by_step_size
            by_step_logit = load(slopes, i * LANES + v) * by_step_size
            store(dx, v, by_x + load(skip, v) * dyv)
            store(dstep_logits, v, by_step_logit)
            store(dchannels, v, load(dchannels, v) + xv * dyv)
            store(dchannels, LANES + v, load(dchannels, LANES + v) + by_step_logit)
        norm = total(norms)
        for n in range(N):
            dk[n] = total(load(sums, n * WIDTH))
            dk[n] -= TWO * k[n] * norm

    return again, back


def selective_gradients(N: int):
    """Build the functions that repeat the forward scan of Mamba's recurrence (`again`) and backpropagate (`back`).

    `again` keeps each token's decay and the state before the token.
    """

    @inlined
    def again(i, S, A, x, step_logits, dy, k, step_bias, kept, step_sizes, slopes, drive, dq):
        for d in range(LANES):
            step_logit = step_logits[d] + step_bias[0, d]
            step_sizes[i, d] = softplus(step_logit)
            slopes[i, d] = sigmoid(step_logit)
            drive[d] = step_sizes[i, d] * x[d]
        for n in range(N):
            kn, product = k[n], ZERO
            for d in range(LANES):
                decay = exp2(A[n, d] * step_sizes[i, d])
                s = decay * S[n, d] + kn * drive[d]
                kept[0, i, n, d] = S[n, d]
                kept[1, i, n, d] = decay
                S[n, d] = s
                product += s * dy[d]
            dq[n] = product

    @inlined
    def back(i, G, A, dA, x, dy, k, q, skip, kept, step_sizes, slopes, drive, sums, dx, dstep_logits, dk, dchannels):
        for d in range(LANES):
            dx[d] = ZERO
            dstep_logits[d] = ZERO
        for d in range(LANES):
            drive[d] = step_sizes[i, d] * x[d]
        for n in range(N):
            kn, qn, product = k[n], q[n], ZERO
            for d in range(LANES):
                gradient = G[n, d] + qn * dy[d]
                dx[d] += kn * gradient
                product += gradient * drive[d]
                gradient *= kept[1, i, n, d]
                exponent = gradient * kept[0, i, n, d]
                dstep_logits[d] += A[n, d] * exponent
                dA[n, d] += step_sizes[i, d] * exponent
                G[n, d] = gradient
            dk[n] = product
        for d in range(LANES):
            dstep_logits[d] = (x[d] * dx[d] + LN_2 * dstep_logits[d]) * slopes[i, d]
            dx[d] = step_sizes[i, d] * dx[d] + skip[0, d] * dy[d]
            dchannels[0, d] += x[d] * dy[d]
            dchannels[1, d] += dstep_logits[d]

    return again, back


UPDATES = {"longhorn": longhorn_update, "selective": selective_update}
GRADIENTS = {"longhorn": longhorn_gradients, "selective": selective_gradients}
