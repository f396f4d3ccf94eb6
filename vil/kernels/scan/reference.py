"""Reference implementation of Longhorn's and Mamba's scans, token by token, which every backend must reproduce.

The arguments are those of `vil.kernels.longhorn_scan` and `vil.kernels.selective_scan`, with three differences:

- There is no `backend`, and nothing of this package is imported. Gradients are autograd's.
- There is one direction. The public functions also run G directions in one call, stacked along a new first dimension:
direction g is this function of `x_GBLD[g]`, `k_GBLN[g]`, `skip_GD[g]` and so on, with `reverse[g]`.
- State and sums have the dtype of the inputs, instead of at least float32. Use float64 for ground truth.

    B batch    L tokens    D channels    N states of a channel
"""

import torch
from torch import Tensor


def longhorn(
    x_BLD: Tensor, beta_logits_BLD: Tensor, k_BLN: Tensor, q_BLN: Tensor, skip_D: Tensor | None = None,
    beta_bias_D: Tensor | None = None, *, reverse: bool = False, initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run Longhorn's recurrence (Liu et al., 2024, Algorithm 1, eq. 6).

        beta_t[d] = sigmoid(beta_logits_t[d] + beta_bias[d])
        eps_t[d]  = beta_t[d] / (1 + beta_t[d] * (k_t . k_t))
        S_t[d, n] = (1 - eps_t[d] * k_t[n]^2) * S_{t-1}[d, n] + eps_t[d] * k_t[n] * x_t[d]
        y_t[d]    = S_t[d] . q_t + skip[d] * x_t[d]

    Tokens are read from the first to the last or, with `reverse`, from the last to the first. The state before the
    first token read is `initial_state` (B, D, N), or zero. Returns y_BLD or, with `return_final_state`, a tuple of
    y_BLD and the state (B, D, N) after the last token read.
    """
    B, L, D = x_BLD.shape
    S_BDN = x_BLD.new_zeros(B, D, k_BLN.shape[-1]) if initial_state is None else initial_state
    bias_D = 0 if beta_bias_D is None else beta_bias_D
    y = []
    for t in reversed(range(L)) if reverse else range(L):
        x_BD, k_BN, q_BN = x_BLD[:, t], k_BLN[:, t], q_BLN[:, t]
        beta_BD = torch.sigmoid(beta_logits_BLD[:, t] + bias_D)
        eps_BD = beta_BD / (1 + beta_BD * (k_BN**2).sum(-1, keepdim=True))
        decay_BDN = 1 - torch.einsum("bd,bn->bdn", eps_BD, k_BN**2)
        S_BDN = decay_BDN * S_BDN + torch.einsum("bd,bn->bdn", eps_BD * x_BD, k_BN)
        y_BD = torch.einsum("bdn,bn->bd", S_BDN, q_BN)
        y.append(y_BD if skip_D is None else y_BD + skip_D * x_BD)
    y_BLD = torch.stack(y[::-1] if reverse else y, 1)
    return (y_BLD, S_BDN) if return_final_state else y_BLD


def selective(
    x_BLD: Tensor, dt_logits_BLD: Tensor, A_DN: Tensor, b_BLN: Tensor, c_BLN: Tensor, skip_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None, *, reverse: bool = False, initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run Mamba's selective state space (Gu & Dao, 2023, Algorithm 2), the recurrence of Vision Mamba.

        dt_t[d]   = softplus(dt_logits_t[d] + dt_bias[d]) = log(1 + exp(dt_logits_t[d] + dt_bias[d]))
        S_t[d, n] = exp(A[d, n] * dt_t[d]) * S_{t-1}[d, n] + dt_t[d] * b_t[n] * x_t[d]
        y_t[d]    = S_t[d] . c_t + skip[d] * x_t[d]

    Tokens are read from the first to the last or, with `reverse`, from the last to the first. The state before the
    first token read is `initial_state` (B, D, N), or zero. Returns y_BLD or, with `return_final_state`, a tuple of
    y_BLD and the state (B, D, N) after the last token read.
    """
    B, L, D = x_BLD.shape
    S_BDN = x_BLD.new_zeros(B, D, b_BLN.shape[-1]) if initial_state is None else initial_state
    bias_D = 0 if dt_bias_D is None else dt_bias_D
    y = []
    for t in reversed(range(L)) if reverse else range(L):
        x_BD, b_BN, c_BN = x_BLD[:, t], b_BLN[:, t], c_BLN[:, t]
        dt_BD = torch.log1p(torch.exp(dt_logits_BLD[:, t] + bias_D))
        decay_BDN = torch.exp(torch.einsum("bd,dn->bdn", dt_BD, A_DN))
        S_BDN = decay_BDN * S_BDN + torch.einsum("bd,bn->bdn", dt_BD * x_BD, b_BN)
        y_BD = torch.einsum("bdn,bn->bd", S_BDN, c_BN)
        y.append(y_BD if skip_D is None else y_BD + skip_D * x_BD)
    y_BLD = torch.stack(y[::-1] if reverse else y, 1)
    return (y_BLD, S_BDN) if return_final_state else y_BLD
