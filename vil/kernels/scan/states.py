"""Initial and final states of scans on any backend, encoded as additional tokens before and after the sequence.

A single token, as in autoregressive generation, is one step of the recurrence. Otherwise, with N states of a channel,
additional token n before the sequence writes only state n of every channel:

    Longhorn    beta = 1 and k = e_n, a unit vector: eps = 1 / 2, so that S[d, n] becomes x[d] / 2
    Mamba       b = e_n / dt with dt so small that nothing decays: S[d, n] becomes x[d]

Additional token n after the sequence has k = 0 (and dt = 0 for Mamba), so that the state does not change, and q = e_n,
so that y[d] is S[d, n].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """Tensors of a scan of G directions, in the order of `vil::scan`."""

    x: Tensor  # (G, B, L, D)
    step_logits: Tensor  # (G, B, L, D)
    k: Tensor  # (G, B, L, N)
    q: Tensor  # (G, B, L, N)
    A: Tensor | None  # (G, D, N)
    skip: Tensor | None  # (G, D)
    step_bias: Tensor | None  # (G, D)


class Tokens(NamedTuple):
    """Constants of the additional tokens that set a scan's initial state or return its final state."""

    writing: float  # step logit of the tokens that write the initial state
    reading: float  # step logit of the tokens that read the final state
    key: Callable[[Tensor], Tensor]  # maps the logit `writing` to the factor of a one-hot key
    x: float  # factor of the initial state in the scan's input x


TOKENS = {
    "longhorn": Tokens(writing=1e4, reading=0, key=torch.ones_like, x=2),
    # softplus maps `writing` to dt = 4e-18, and `reading` to dt = 0
    "selective": Tokens(writing=-40, reading=-1e4, key=lambda step_logit: 1 / F.softplus(step_logit), x=1),
}


def scan_with_states(
    scan: Callable[..., Tensor], recurrence: str, inputs: Inputs, reverse: list[bool],
    initial_GBDN: Tensor | None, final: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run a backend's `scan` with an initial state, and return y (G, B, L, D) and the final state (G, B, D, N) or None.

    y and states are computed in at least float32, because the additional tokens hold the states.
    """
    x_GBLD, step_logits_GBLD, k_GBLN, q_GBLN, A_GDN, skip_GD, step_bias_GD = inputs
    (G, B, L, D), N, tokens = x_GBLD.shape, k_GBLN.shape[-1], TOKENS[recurrence]
    dtype = torch.promote_types(x_GBLD.dtype, torch.float32)
    x, step_logits, k, q = (t.to(dtype) for t in (x_GBLD, step_logits_GBLD, k_GBLN, q_GBLN))
    if step_bias_GD is not None:
        step_logits = step_logits + step_bias_GD[:, None, None].to(dtype)
    if L == 1:
        y_GBLD, S_GBDN = _step(x, step_logits, k, q, A_GDN, initial_GBDN)
        y_GBLD = y_GBLD if skip_GD is None else y_GBLD + skip_GD[:, None, None] * x
        return y_GBLD.to(x_GBLD.dtype), S_GBDN if final else None
    unit, zeros = torch.eye(N, dtype=dtype, device=x.device).expand(G, B, N, N), x.new_zeros(G, B, N, D)
    ahead, behind = [], []
    if initial_GBDN is not None:
        written, key = tokens.x * initial_GBDN.to(dtype).mT, tokens.key(x.new_tensor(tokens.writing))
        ahead.append((written, zeros + tokens.writing, key * unit, torch.zeros_like(unit)))
    if final:
        behind.append((zeros, zeros + tokens.reading, torch.zeros_like(unit), unit))

    def in_order(parts: list, backwards: bool) -> Tensor:
        return torch.cat(parts[::-1] if backwards else parts, dim=1)

    stretches = [*ahead, (x, step_logits, k, q), *behind]
    x, step_logits, k, q = (
        torch.stack([in_order([t[g] for t in parts], backwards) for g, backwards in enumerate(reverse)])
        for parts in zip(*stretches)
    )
    y = scan(recurrence, x, step_logits, k, q, A_GDN, skip_GD, None, reverse)
    first = [N * len(behind if backwards else ahead) for backwards in reverse]
    y_GBLD = torch.stack([y[g, :, start : start + L] for g, start in enumerate(first)]).to(x_GBLD.dtype)
    if not final:
        return y_GBLD, None
    last = [y[g, :, :N] if backwards else y[g, :, -N:] for g, backwards in enumerate(reverse)]
    return y_GBLD, torch.stack(last).mT.contiguous()


def _step(x_GB1D, step_logits_GB1D, k_GB1N, q_GB1N, A_GDN, S_GBDN) -> tuple[Tensor, Tensor]:
    """Run the recurrence for one token. Return y (G, B, 1, D) without the skip connection, and the new state."""
    x_GBD1, step_logits_GBD1 = x_GB1D.mT, step_logits_GB1D.mT
    if A_GDN is None:
        beta_GBD1 = torch.sigmoid(step_logits_GBD1)
        step_GBD1 = beta_GBD1 / (1 + beta_GBD1 * k_GB1N.square().sum(-1, keepdim=True))
        decay_GBDN = 1 - step_GBD1 * k_GB1N.square()
    else:
        step_GBD1 = F.softplus(step_logits_GBD1)
        decay_GBDN = torch.exp(A_GDN.to(step_GBD1.dtype).unsqueeze(1) * step_GBD1)
    drive_GBDN = step_GBD1 * x_GBD1 * k_GB1N
    S_GBDN = drive_GBDN if S_GBDN is None else decay_GBDN * S_GBDN.to(drive_GBDN.dtype) + drive_GBDN
    return (S_GBDN * q_GB1N).sum(-1).unsqueeze(2), S_GBDN
