"""Tests of the equations in docs/kernels/mathematics.md and block.md against loops over tokens, the reference
implementation and autograd.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from vil.kernels.scan import reference

FP64 = dict(dtype=torch.float64)
# B batch    L tokens    C model width    D inner width    N states    R rank of the step    K filter taps
B, L, C, D, N, R, K = 2, 7, 6, 12, 4, 3, 4
EPS = 1e-5
T = B * L


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, **FP64)


def leaves(*shapes):
    return [randn(*shape).mul_(0.5).requires_grad_() for shape in shapes]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def steps_of_longhorn(x_LD, logits_LD, k_LN):
    """Return the quantities that the kernels compute: step sizes, states after every token, and residuals x - k S."""
    e_LD = 1 / (1 + torch.exp(-logits_LD) + k_LN.square().sum(-1, keepdim=True))
    S_DN, states, residuals = torch.zeros(x_LD.shape[1], k_LN.shape[1], **FP64), [], []
    for x_D, e_D, k_N in zip(x_LD, e_LD, k_LN):
        residuals.append(x_D[:, None] - k_N * S_DN)
        S_DN = S_DN + e_D[:, None] * k_N * residuals[-1]
        states.append(S_DN)
    return e_LD, states, residuals


def test_longhorns_gradients_in_residual_form_are_those_of_the_definition():
    x, logits, k, q, skip, bias = inputs = leaves((L, D), (L, D), (L, N), (L, N), (D,), (D,))
    y = reference.longhorn(*(t[None] for t in (x, logits, k, q)), skip, bias)[0]
    dy = randn(L, D)
    expected = torch.autograd.grad(y, inputs, dy)
    with torch.no_grad():
        e, S, r = steps_of_longhorn(x, logits + bias, k)
        G = torch.zeros(D, N, **FP64)
        dx, dlogits, dk, dq = (torch.empty_like(t) for t in (x, logits, k, q))
        for t in reversed(range(L)):
            G = G + dy[t][:, None] * q[t]
            dq[t] = dy[t] @ S[t]
            eG = e[t][:, None] * G
            sum_x, sum_step_size = (k[t] * eG).sum(1), (k[t] * eG * r[t]).sum(1)
            dx[t] = sum_x + skip * dy[t]
            dlogits[t] = sum_step_size * (e[t] * torch.exp(-(logits + bias)[t]))
            dnorm = (-e[t] * sum_step_size).sum()
            dk[t] = (2 * eG * r[t] - x[t][:, None] * eG).sum(0) + 2 * k[t] * dnorm
            G = G - k[t].square() * eG
    for found, gradient in zip((dx, dlogits, dk, dq, (dy * x).sum(0), dlogits.sum(0)), expected, strict=True):
        same(found, gradient)


def test_mambas_gradients_from_the_state_before_and_the_decay_are_those_of_the_definition():
    x, logits, b, c = inputs = leaves((L, D), (L, D), (L, N), (L, N))
    A = (-torch.rand(D, N, **FP64)).requires_grad_()
    y = reference.selective(x[None], logits[None], A, b[None], c[None])
    dy = randn(L, D)
    expected = torch.autograd.grad(y[0], (*inputs, A), dy)
    with torch.no_grad():
        dt, S, before, after = F.softplus(logits), torch.zeros(D, N, **FP64), [], []
        for t in range(L):
            before.append(S)
            S = torch.exp(A * dt[t][:, None]) * S + (dt * x)[t][:, None] * b[t]
            after.append(S)
        G, dA = torch.zeros(D, N, **FP64), torch.zeros_like(A)
        dx, dlogits, db, dc = (torch.empty_like(t) for t in inputs)
        for t in reversed(range(L)):
            G = G + dy[t][:, None] * c[t]
            dc[t], sum_x, db[t] = dy[t] @ after[t], (b[t] * G).sum(1), (dt * x)[t] @ G
            G = G * torch.exp(A * dt[t][:, None])
            exponent = G * before[t]
            dA += dt[t][:, None] * exponent
            dx[t] = dt[t] * sum_x
            dlogits[t] = (x[t] * sum_x + (A * exponent).sum(1)) * torch.sigmoid(logits[t])
    for found, gradient in zip((dx, dlogits, db, dc, dA), expected, strict=True):
        same(found, gradient)


def test_segments_pass_on_states_and_gradients():
    tokens, segments = 4, 3
    decay, drive, dyq = torch.rand(12, **FP64), randn(12), randn(12)
    S, J, states, passed = 0.0, 0.0, {}, {}
    for t in range(12):
        S = states[t] = decay[t] * S + drive[t]
    # The gradient of each state is G = dyq + J, and the gradient passed to the previous state is J = decay G.
    for t in reversed(range(12)):
        J = passed[t] = decay[t] * (dyq[t] + J)
    state = gradient = 0.0
    for s in range(segments):
        own = 0.0
        for t in range(s * tokens, (s + 1) * tokens):
            own = decay[t] * own + drive[t]
        state = decay[s * tokens : (s + 1) * tokens].prod() * state + own
        same(state, states[(s + 1) * tokens - 1])
    for s in reversed(range(segments)):
        own = 0.0
        for t in reversed(range(s * tokens, (s + 1) * tokens)):
            own = decay[t] * (dyq[t] + own)
        gradient = decay[s * tokens : (s + 1) * tokens].prod() * gradient + own
        same(gradient, passed[s * tokens])


def test_two_tokens_are_products_of_channels_and_states():
    S, k, q, x, logits = randn(D, N), randn(2, N), randn(2, N), randn(2, D), randn(2, D)
    a, e = k.square(), 1 / (1 + torch.exp(-logits) + k.square().sum(-1, keepdim=True))
    first = S + e[0][:, None] * k[0] * (x[0][:, None] - k[0] * S)
    second = first + e[1][:, None] * k[1] * (x[1][:, None] - k[1] * first)

    scale = 2.0 ** -torch.floor(torch.log2(1 + a.sum(-1, keepdim=True)))  # 1 <= scale * (1 + sum(a)) < 2
    e, a, scaled_k = e / scale, a * scale, k * scale
    v = e * x
    assert ((scale * (1 + k.square().sum(-1, keepdim=True)) >= 1) & (e <= 1) & (a.amax(-1, keepdim=True) < 2)).all()
    A = 1 + torch.stack([e[0], e[1], e[0] * e[1]], 1) @ torch.stack([-a[0], -a[1], a[0] * a[1]])
    drive = torch.stack([v[0], v[1], e[1] * v[0]], 1) @ torch.stack([scaled_k[0], scaled_k[1], -a[1] * scaled_k[0]])
    same(A * S + drive, second)
    same(S @ q[0] - e[0] * (S @ (a[0] * q[0])) + v[0] * (scaled_k[0] @ q[0]), first @ q[0])


def test_three_tokens_are_products_of_channels_and_states():
    F_0, k, q, v, e = randn(D, N), randn(3, N), randn(3, N), randn(3, D), torch.rand(3, D, **FP64)
    a, expected = k.square(), F_0
    for t in range(3):
        expected = (1 - e[t][:, None] * a[t]) * expected + v[t][:, None] * q[t]

    def factors(e, v):
        zero = torch.zeros_like(e[0])
        decay = [e[0], e[1], e[2], e[0] * e[1], e[0] * e[2], e[1] * e[2], zero, e[0] * e[1] * e[2]]
        added = [v[0], v[1], v[2], e[1] * v[0], e[2] * v[0], e[2] * v[1], e[1] * e[2] * v[0], zero]
        return torch.stack(decay), torch.stack(added)

    (decay_D, added_D), (decay_N, added_N) = factors(e, v), factors(-a, q)
    same((1 + decay_D.T @ decay_N) * F_0 + added_D.T @ added_N, expected)


def test_24_bits_of_a_state_are_within_a_part_in_32768_and_have_no_bias():
    S = torch.randn(100_000)
    bits = S.view(torch.int32)
    kept = bits >> 8 & 0xFF
    restored = (bits & -0x10000 | kept << 8 | kept).view(torch.float32)
    error = (restored.double() - S) / S
    assert error.abs().max() < 2**-15
    assert error.mean().abs() < 2**-21


def both_scans(*inputs):
    return torch.stack([reference.longhorn(*(t[g] for t in inputs), reverse=bool(g)) for g in range(2)])


def norm(x_TC):
    rho = (x_TC.square().mean(-1, keepdim=True) + EPS) ** -0.5
    return x_TC * rho, rho


def test_the_gradients_of_a_block_are_those_of_the_chain():
    """The equations in docs/kernels/block.md give the same gradients of a block as autograd."""
    shapes = (T, C), (C,), (2 * D, C), (C, D), (2, D, K), (2, D), (2, R + 2 * N, D), (2, D, R), (2, D), (2, D)
    x, gamma, W_in, W_out, w, b, Wx, Ws, bias, skip = parameters = leaves(*shapes)
    delta = torch.tensor([1.25, 0.7], **FP64).repeat_interleave(L)[:, None]

    def shifted(t_BLD, by):  # shift by `by` tokens to the left, with zeros outside the sequence
        return F.pad(t_BLD, (0, 0, 3, 3))[:, 3 + by : 3 + by + L]

    (xhat, rho) = norm(x)
    u, z = (xhat @ (W_in * gamma).T).chunk(2, -1)
    u_BLD = u.view(B, L, D)
    sums = torch.stack([
        b[0] + sum(w[0, :, i] * shifted(u_BLD, i - 3) for i in range(K)),
        b[1] + sum(w[1, :, i] * shifted(u_BLD, 3 - i) for i in range(K)),
    ])  # fmt: skip
    v = F.silu(sums)
    step, k, q = torch.einsum("gbld,gpd->gblp", v, Wx).split((R, N, N), -1)
    logits = torch.einsum("gblr,gdr->gbld", step, Ws)
    y = both_scans(v, logits, k, q, skip, bias)
    m = y.mean(0).view(T, D)
    gated = delta * m * F.silu(z)
    x_next = x + gated @ W_out.T
    xhat_next, rho_next = norm(x_next)
    dx_next, dxhat_next = randn(T, C), randn(T, C)
    expected = torch.autograd.grad((x_next, xhat_next), parameters, (dx_next, dxhat_next), retain_graph=True)

    def through_norm(dx, dxhat, xhat, rho):
        return dx + rho * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))

    scanned = [t.detach().requires_grad_() for t in (v, logits, k, q, skip, bias)]
    with torch.no_grad():
        do = through_norm(dx_next, dxhat_next, xhat_next, rho_next)  # equation (a) of block.md
        dgated, sigma = do @ W_out, torch.sigmoid(z)  # equation (b)
        dy = (delta * dgated * z * sigma / 2).view(B, L, D)
        dz = delta * dgated * m * sigma * (1 + z * (1 - sigma))
    y = both_scans(*scanned)
    dv, dlogits, dk, dq, dskip, dbias = torch.autograd.grad(y, scanned, torch.stack([dy, dy]))  # equation (c)
    with torch.no_grad():
        dp = torch.cat([torch.einsum("gbld,gdr->gblr", dlogits, Ws), dk, dq], -1)  # equation (d)
        dWs = torch.einsum("gbld,gblr->gdr", dlogits, step)
        dWx = torch.einsum("gblp,gbld->gpd", dp, v)
        dv = dv + torch.einsum("gblp,gpd->gbld", dp, Wx)
        sigma, log2e = torch.sigmoid(sums), 1 / math.log(2)  # equation (e)
        s = dv * sigma * (1 + sums * (1 - sigma))
        scaled, ln2 = -log2e * sums, math.log(2)
        same(dv * sigma * (scaled * ln2**2 * (1 - sigma) - ln2) * -log2e, s)  # conv_backward computes s by this formula
        du = sum(w[0, :, i] * shifted(s[0], 3 - i) + w[1, :, i] * shifted(s[1], i - 3) for i in range(K))
        dw = torch.stack([
            torch.stack([(s[0] * shifted(u_BLD, i - 3)).sum((0, 1)) for i in range(K)], -1),
            torch.stack([(s[1] * shifted(u_BLD, 3 - i)).sum((0, 1)) for i in range(K)], -1),
        ])  # fmt: skip
        duz = torch.cat([du.view(T, D), dz], -1)  # equation (f)
        folded = duz.T @ xhat
        dxhat = duz @ (W_in * gamma)
        dx = through_norm(do, dxhat, xhat, rho)  # equation (g), the gradient of the block's input
        found = (
            dx, (folded * W_in).sum(0), folded * gamma, do.T @ gated, dw, s.sum((1, 2)), dWx, dWs, dbias, dskip,
        )  # fmt: skip
    for ours, gradient in zip(found, expected, strict=True):
        same(ours, gradient)
