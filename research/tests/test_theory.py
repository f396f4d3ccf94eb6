"""Tests of the equations in the Longhorn paper (Liu et al., 2024), in fp64."""

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from vil.kernels import longhorn_scan

D, N, L = 3, 4, 6


@pytest.fixture
def g():
    return torch.Generator().manual_seed(0)


def randn(g, *shape) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def rand(g, *shape) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64)


def minimiser(objective, like: Tensor) -> Tensor:
    """Return the minimiser of a strictly convex quadratic function, by one Newton step from zero."""
    start = torch.zeros_like(like)
    gradient = jacobian(objective, start).flatten()
    curvature = hessian(objective, start).reshape(len(gradient), -1)
    assert torch.linalg.eigvalsh(curvature).min() > 0
    return start - torch.linalg.solve(curvature, gradient).view_as(start)


def recall_objective(S_old, k, x, beta):
    """Return Longhorn's online objective: |S - S_old|^2 plus beta times the squared error of S k compared with x."""
    return lambda S: (S - S_old).square().sum() + (beta * (S @ k - x).square()).sum()


def closed_form(S_old, k, x, beta):
    """Return the new state S_t = (I - eps k k^T) S_{t-1} + eps x k of theorem 1, with one row per channel."""
    eps = (beta / (1 + beta * (k @ k)))[:, None]
    return S_old - eps * (S_old @ k)[:, None] * k + eps * x[:, None] * k


def diagonal_form(S_old, k, x, beta):
    """Compute the approximation that a scan supports, with k k^T replaced by its diagonal."""
    eps = (beta / (1 + beta * (k @ k)))[:, None]
    return (1 - eps * k.square()) * S_old + eps * x[:, None] * k


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_theorem_1_is_the_minimiser_of_the_recall_objective(g, scale):
    S_old, k, x, beta = randn(g, D, N), scale * randn(g, N), randn(g, D), rand(g, D)
    expected = minimiser(recall_objective(S_old, k, x, beta), S_old)
    torch.testing.assert_close(closed_form(S_old, k, x, beta), expected, rtol=1e-8, atol=1e-10)


def test_theorem_1_is_the_implicit_step_of_gradient_descent(g):
    """Check that the new state is the old one minus half the gradient of the recall error at the NEW state, not at
    the old one.
    """
    S_old, k, x, beta = randn(g, D, N), randn(g, N), randn(g, D), rand(g, D)
    S_new = closed_form(S_old, k, x, beta)
    error_gradient = jacobian(lambda S: (beta * (S @ k - x).square()).sum(), S_new)
    torch.testing.assert_close(S_new, S_old - error_gradient / 2)
    explicit = S_old - jacobian(lambda S: (beta * (S @ k - x).square()).sum(), S_old) / 2
    assert not torch.allclose(S_new, explicit, rtol=0.1)


def test_the_more_beta_the_better_the_new_pair_is_recalled(g):
    S_old, k, x = randn(g, D, N), randn(g, N), randn(g, D)
    weights = torch.tensor([0.0, 0.1, 1.0, 10.0, 1e9], dtype=torch.float64)
    errors = torch.stack([(closed_form(S_old, k, x, b.expand(D)) @ k - x).abs() for b in weights])
    torch.testing.assert_close(errors[0], (S_old @ k - x).abs())  # if beta is 0, the update keeps the recall error
    assert (errors[1:] < errors[:-1]).all()
    assert errors[-1].max() < 1e-8


def test_the_diagonal_form_drops_the_terms_between_different_states(g):
    """The diagonal approximation omits only the terms eps k_n sum_{m != n} k_m S_m, which are small for short keys."""
    S_old, k, x, beta = randn(g, D, N), randn(g, N), randn(g, D), rand(g, D)
    eps = (beta / (1 + beta * (k @ k)))[:, None]
    between = torch.outer(k, k) - torch.diag(k.square())
    left_out = diagonal_form(S_old, k, x, beta) - closed_form(S_old, k, x, beta)
    torch.testing.assert_close(left_out, eps * (S_old @ between))
    # If the key is 100 times shorter, the update is 100 times smaller, and the omitted terms are 10^4 times smaller.
    short = k / 100 * 1e-3, k * 1e-3
    errors = [(diagonal_form(S_old, key, x, beta) - closed_form(S_old, key, x, beta)).norm() for key in short]
    assert (errors[0] / errors[1]).item() == pytest.approx(1e-4, rel=1e-3)


def test_a_state_never_grows_when_there_is_nothing_to_remember(g):
    S_old, k, beta = randn(g, D, N), 5 * randn(g, N), rand(g, D)
    for form in (closed_form, diagonal_form):
        assert (form(S_old, k, torch.zeros(D, dtype=torch.float64), beta).norm(dim=1) <= S_old.norm(dim=1)).all()


# Each of the next five functions samples an old state, and returns it with a model's online objective and new state.
# The objectives are from the Longhorn paper's table of online learners.


def linear_attention(g):
    """Return the old state, the online objective and the new state of linear attention (Katharopoulos et al., 2020)."""
    S_old, k, x = randn(g, D, N), randn(g, N), randn(g, D)
    return S_old, lambda S: (S - S_old).square().sum() - 2 * x @ S @ k, S_old + torch.outer(x, k)


def retnet(g):
    """Return the old state, the online objective and the new state of RetNet (Sun et al., 2023)."""
    S_old, k, x, gamma = randn(g, D, N), randn(g, N), randn(g, D), 0.9

    def objective(S):
        return gamma * (S - S_old).square().sum() + (1 - gamma) * S.square().sum() - 2 * x @ S @ k

    return S_old, objective, gamma * S_old + torch.outer(x, k)


def gla(g):
    """Return the old state, the online objective and the new state of GLA (Yang et al., 2024)."""
    S_old, k, x, alpha = randn(g, D, N), randn(g, N), randn(g, D), rand(g, N)

    def objective(S):
        return (alpha * (S - S_old).square()).sum() + ((1 - alpha) * S.square()).sum() - 2 * x @ S @ k

    return S_old, objective, alpha * S_old + torch.outer(x, k)


def griffin(g):
    """Return the old state, the online objective and the new state of Griffin's RG-LRU (De et al., 2024)."""
    S_old, x, alpha, gate = randn(g, D), randn(g, D), rand(g, D), rand(g, D)
    drive = (1 - alpha.square()).sqrt() * gate * x

    def objective(S):
        return (alpha * (S - S_old).square()).sum() + ((1 - alpha) * S.square()).sum() - 2 * (S * drive).sum()

    return S_old, objective, alpha * S_old + drive


def longhorn(g):
    """Return a random state of Longhorn (Liu et al., 2024), its online objective, and the updated state."""
    S_old, k, x, beta = randn(g, D, N), randn(g, N), randn(g, D), rand(g, D)
    return S_old, recall_objective(S_old, k, x, beta), closed_form(S_old, k, x, beta)


@pytest.mark.parametrize("learner", [linear_attention, retnet, gla, griffin, longhorn])
def test_each_online_objective_gives_its_published_update(g, learner):
    S_old, objective, published = learner(g)
    torch.testing.assert_close(minimiser(objective, S_old), published, rtol=1e-10, atol=1e-12)


def operator_states(x_BLD, logits_BLD, k_BLN) -> Tensor:
    """Return the states (B, L, D, N) of `longhorn_scan` after each token.

    Each of N unit queries reads one state per channel.
    """
    unit_queries = torch.eye(k_BLN.shape[-1], dtype=k_BLN.dtype)
    states = [longhorn_scan(x_BLD, logits_BLD, k_BLN, q_N.expand_as(k_BLN).contiguous()) for q_N in unit_queries]
    return torch.stack(states, dim=-1)


def test_the_scan_never_enlarges_a_state_for_any_key_and_beta(g):
    """`longhorn_scan` multiplies a state by a factor in (0, 1], so a token with value 0 never enlarges a state."""
    B = 1000
    k_BLN, logits_BLD = torch.ones(B, 2, N, dtype=torch.float64), 20 * randn(g, B, 2, D)
    k_BLN[:, 1] = randn(g, B, N) * 10.0 ** torch.randint(-6, 7, (B, 1), generator=g)
    k_BLN[0, 1] = torch.tensor([1e3, 0.0, 0.0, 0.0])  # a key of large norm clears a state almost completely
    x_BLD = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 2, 1).expand(B, 2, D).contiguous()
    # The first token writes a state. The second token has a value of 0, so the state only decays.
    logits_BLD[:, 0] = logits_BLD[0] = 0
    written, kept = operator_states(x_BLD, logits_BLD, k_BLN).unbind(1)
    share = kept / written
    assert share.min() > 0
    assert share.max() <= 1 + 1e-12
    assert share.min() < 1e-4  # the fraction of a state that remains ranges from nearly 0 to nearly 1
    assert share.max() > 0.999999


def test_the_operator_runs_the_diagonal_form_token_by_token(g):
    x_LD, logits_LD, k_LN = randn(g, L, D), randn(g, L, D), randn(g, L, N)
    S = torch.zeros(D, N, dtype=torch.float64)
    for t, state in enumerate(operator_states(x_LD[None], logits_LD[None], k_LN[None])[0]):
        S = diagonal_form(S, k_LN[t], x_LD[t], torch.sigmoid(logits_LD[t]))
        torch.testing.assert_close(state, S)


def test_the_scan_recalls_every_pair_whose_keys_share_no_state(g):
    """`longhorn_scan` recalls the value of every key if each key uses a different element of the state.

    The diagonal form then equals Theorem 1, and the whole value is stored if beta k.k is large.
    """
    x_LD, k_LN = randn(g, N, D), 1e4 * torch.eye(N, dtype=torch.float64)
    logits_LD = torch.full((N, D), 30.0, dtype=torch.float64)
    state = operator_states(x_LD[None], logits_LD[None], k_LN[None])[0, -1]
    torch.testing.assert_close(state @ k_LN.T, x_LD.T, rtol=1e-6, atol=1e-6)
