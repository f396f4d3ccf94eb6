"""The definitions once more, token by token and channel by channel, as literally as they are printed in the papers.

Independent of `vil.kernels`: nothing here is imported from it. Gradients come from autograd. S (B, D, N) is the state
before the first token that is read and, with `states`, returned as it is behind the last.
"""

import torch


def longhorn(x, beta_logits, k, q, skip=None, beta_bias=None, reverse=False, S=None, states=False):
    """Liu et al., 2024, Algorithm 1, eq. 6, for one sequence batch: x (B, L, D), k (B, L, N)."""
    B, L, D = x.shape
    S = x.new_zeros(B, D, k.shape[-1]) if S is None else S
    y = [None] * L
    for t in reversed(range(L)) if reverse else range(L):
        beta = torch.sigmoid(beta_logits[:, t] if beta_bias is None else beta_logits[:, t] + beta_bias)
        eps = beta / (1 + beta * (k[:, t] ** 2).sum(-1, keepdim=True))
        S = (1 - torch.einsum("bd,bn->bdn", eps, k[:, t] ** 2)) * S + torch.einsum("bd,bn->bdn", eps * x[:, t], k[:, t])
        y[t] = torch.einsum("bdn,bn->bd", S, q[:, t])
        if skip is not None:
            y[t] = y[t] + skip * x[:, t]
    return (torch.stack(y, 1), S) if states else torch.stack(y, 1)


def selective(x, dt_logits, A, b, c, skip=None, dt_bias=None, reverse=False, S=None, states=False):
    """Gu & Dao, 2023, Algorithm 2, for one sequence batch: x (B, L, D), A (D, N), b (B, L, N)."""
    B, L, D = x.shape
    S = x.new_zeros(B, D, b.shape[-1]) if S is None else S
    y = [None] * L
    for t in reversed(range(L)) if reverse else range(L):
        dt = torch.log1p(torch.exp(dt_logits[:, t] if dt_bias is None else dt_logits[:, t] + dt_bias))
        S = torch.exp(torch.einsum("bd,dn->bdn", dt, A)) * S + torch.einsum("bd,bn->bdn", dt * x[:, t], b[:, t])
        y[t] = torch.einsum("bdn,bn->bd", S, c[:, t])
        if skip is not None:
            y[t] = y[t] + skip * x[:, t]
    return (torch.stack(y, 1), S) if states else torch.stack(y, 1)
