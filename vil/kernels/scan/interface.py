"""Public functions `longhorn_scan` and `selective_scan`: argument checks and choice of a backend.

`reference.py` is the reference implementation.

    B batch    L tokens    D channels    N states of a channel    G directions
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import STATE_SIZES, choose
from ..checks import check, given
from . import scan_op, torch_scan
from .states import Inputs, scan_with_states


@overload
def longhorn_scan(
    x_BLD: Tensor, beta_logits_BLD: Tensor, k_BLN: Tensor, q_BLN: Tensor, skip_D: Tensor | None = None,
    beta_bias_D: Tensor | None = None, *, reverse: bool | Sequence[bool] = False, backend: str = "auto",
    initial_state: Tensor | None = None, return_final_state: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def longhorn_scan(
    x_BLD: Tensor, beta_logits_BLD: Tensor, k_BLN: Tensor, q_BLN: Tensor, skip_D: Tensor | None = None,
    beta_bias_D: Tensor | None = None, *, reverse: bool | Sequence[bool] = False, backend: str = "auto",
    initial_state: Tensor | None = None, return_final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def longhorn_scan(
    x_BLD: Tensor, beta_logits_BLD: Tensor, k_BLN: Tensor, q_BLN: Tensor, skip_D: Tensor | None = None,
    beta_bias_D: Tensor | None = None, *, reverse: bool | Sequence[bool] = False, backend: str = "auto",
    initial_state: Tensor | None = None, return_final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def longhorn_scan(
    x_BLD: Tensor,
    beta_logits_BLD: Tensor,
    k_BLN: Tensor,
    q_BLN: Tensor,
    skip_D: Tensor | None = None,
    beta_bias_D: Tensor | None = None,
    *,
    reverse: bool | Sequence[bool] = False,
    backend: str = "auto",
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Longhorn's recurrence over the tokens of a sequence (Liu et al., 2024, Algorithm 1, eq. 6).

    For every channel d with its own state row S[d], and beta = sigmoid(beta_logits + beta_bias)::

        eps_t[d]  = beta_t[d] / (1 + beta_t[d] * (k_t . k_t))
        S_t[d, n] = (1 - eps_t[d] * k_t[n]^2) * S_{t-1}[d, n] + eps_t[d] * k_t[n] * x_t[d],    S_0 = 0
        y_t[d]    = S_t[d] . q_t + skip[d] * x_t[d]

    G directions run in one pass if every tensor is stacked along a new first dimension (`x_GBLD`, `skip_GD`, ...) and
    `reverse` holds one bool for each direction.

    Args:
        x_BLD: Values to remember. All tensors are float16, bfloat16, float32 or float64; if the dtypes of the per-token
            tensors differ, they are converted to float32 (float64 if x is).
        beta_logits_BLD: Logits of beta, the weight of recalling the new pair compared with keeping the state.
        k_BLN: Keys, shared by the channels.
        q_BLN: Queries, shared by the channels.
        skip_D: Weight of x in the output. None for no skip connection.
        beta_bias_D: Bias that is added to the logits. None for no bias.
        reverse: Whether to run from the last token to the first.
        backend: "cuda" (CUDA C++ for NVIDIA GPUs), "triton" (any GPU), "cpu" (Numba, CPUs), "reference" (plain PyTorch,
            any device), or "auto" for the first of these that supports the inputs.
        initial_state: S_0 (B, D, N), such as the final state of earlier tokens. None for zeros.
        return_final_state: Whether to also return the state after the last token.

    Returns:
        y_BLD in x's dtype or, with `return_final_state`, a tuple of y_BLD and S_L (B, D, N) in float32 (float64 if x
        is). State and sums are in float32 (float64 if x is). The result is differentiable once with respect to every
        tensor argument. NaN in the inputs propagates, and so does infinity unless the equations map it to a finite
        value, such as beta = 1 for infinite logits. An initial state and a final state each cost the time of N
        tokens, unless there is only one token, and make the computation float32 (float64 if x is).

    Raises:
        ValueError: A shape, dtype, device or the backend is not supported; the message names the argument.
        RuntimeError: This machine cannot run the requested backend.
    """
    tensors, directions, stacked = _stack(
        reverse, BLD=dict(x=x_BLD, beta_logits=beta_logits_BLD), BLN=dict(k=k_BLN, q=q_BLN),
        D=dict(skip=skip_D, beta_bias=beta_bias_D), BDN=dict(initial_state=initial_state),
    )  # fmt: skip
    x, step_logits, k, q, skip, step_bias, initial = tensors
    inputs = Inputs(given(x), given(step_logits), given(k), given(q), None, skip, step_bias)
    return _scan(backend, "longhorn", inputs, directions, stacked, initial, return_final_state)


@overload
def selective_scan(
    x_BLD: Tensor, dt_logits_BLD: Tensor, A_DN: Tensor, b_BLN: Tensor, c_BLN: Tensor, skip_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None, *, reverse: bool | Sequence[bool] = False, backend: str = "auto",
    initial_state: Tensor | None = None, return_final_state: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def selective_scan(
    x_BLD: Tensor, dt_logits_BLD: Tensor, A_DN: Tensor, b_BLN: Tensor, c_BLN: Tensor, skip_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None, *, reverse: bool | Sequence[bool] = False, backend: str = "auto",
    initial_state: Tensor | None = None, return_final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def selective_scan(
    x_BLD: Tensor, dt_logits_BLD: Tensor, A_DN: Tensor, b_BLN: Tensor, c_BLN: Tensor, skip_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None, *, reverse: bool | Sequence[bool] = False, backend: str = "auto",
    initial_state: Tensor | None = None, return_final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def selective_scan(
    x_BLD: Tensor,
    dt_logits_BLD: Tensor,
    A_DN: Tensor,
    b_BLN: Tensor,
    c_BLN: Tensor,
    skip_D: Tensor | None = None,
    dt_bias_D: Tensor | None = None,
    *,
    reverse: bool | Sequence[bool] = False,
    backend: str = "auto",
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run Mamba's selective state space over the tokens of a sequence (Gu & Dao, 2023, Algorithm 2).

    For every channel d with its own state row S[d], and dt = softplus(dt_logits + dt_bias)::

        S_t[d, n] = exp(A[d, n] * dt_t[d]) * S_{t-1}[d, n] + dt_t[d] * b_t[n] * x_t[d],    S_0 = 0
        y_t[d]    = S_t[d] . c_t + skip[d] * x_t[d]

    G directions run in one pass if every tensor is stacked along a new first dimension (`x_GBLD`, `A_GDN`, ...) and
    `reverse` holds one bool for each direction.

    Args:
        x_BLD: Input of the state space. All tensors are float16, bfloat16, float32 or float64; if the dtypes of the
            per-token tensors differ, they are converted to float32 (float64 if x is).
        dt_logits_BLD: Time step before the softplus.
        A_DN: Rate of each state; negative, so that the state decays.
        b_BLN: Input projection, shared by the channels.
        c_BLN: Output projection, shared by the channels.
        skip_D: Weight of x in the output. None for no skip connection.
        dt_bias_D: Bias that is added to the time step's logits. None for no bias.
        reverse: Whether to run from the last token to the first.
        backend: "cuda" (CUDA C++ for NVIDIA GPUs), "triton" (any GPU), "cpu" (Numba, CPUs), "reference" (plain PyTorch,
            any device), or "auto" for the first of these that supports the inputs.
        initial_state: S_0 (B, D, N), such as the final state of earlier tokens. None for zeros.
        return_final_state: Whether to also return the state after the last token.

    Returns:
        y_BLD in x's dtype or, with `return_final_state`, a tuple of y_BLD and S_L (B, D, N) in float32 (float64 if x
        is). State and sums are in float32 (float64 if x is). The result is differentiable once with respect to every
        tensor argument. NaN in the inputs propagates, and so does infinity unless the equations map it to a finite
        value, such as dt = 0 for logits of -inf. An initial state and a final state each cost the time of N
        tokens, unless there is only one token, and make the computation float32 (float64 if x is).

    Raises:
        ValueError: A shape, dtype, device or the backend is not supported; the message names the argument.
        RuntimeError: This machine cannot run the requested backend.
    """
    tensors, directions, stacked = _stack(
        reverse, BLD=dict(x=x_BLD, dt_logits=dt_logits_BLD), DN=dict(A=A_DN), BLN=dict(b=b_BLN, c=c_BLN),
        D=dict(skip=skip_D, dt_bias=dt_bias_D), BDN=dict(initial_state=initial_state),
    )  # fmt: skip
    x, step_logits, A, b, c, skip, step_bias, initial = tensors
    inputs = Inputs(given(x), given(step_logits), given(b), given(c), A, skip, step_bias)
    return _scan(backend, "selective", inputs, directions, stacked, initial, return_final_state)


def _scan(
    backend: str, recurrence: str, inputs: Inputs, reverse: list[bool], stacked: bool, initial_GBDN: Tensor | None,
    return_final_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Choose a backend, and run a scan on arguments that are stacked over scan directions."""
    backend = choose(backend, inputs.x, inputs.k.shape[-1], len(reverse))
    run: Callable[..., Tensor] = torch_scan.scan if backend == "reference" else functools.partial(_on_kernels, backend)
    if initial_GBDN is None and not return_final_state:
        y_GBLD = run(recurrence, *inputs, reverse)
        return y_GBLD if stacked else y_GBLD[0]
    y_GBLD, final = scan_with_states(run, recurrence, inputs, reverse, initial_GBDN, return_final_state)
    y = y_GBLD if stacked else y_GBLD[0]
    if final is None:
        return y
    return y, final if stacked else final[0]


def _on_kernels(backend: str, recurrence: str, x, step_logits, k, q, A, skip, step_bias, reverse: list[bool]) -> Tensor:
    """Run the operator `vil::scan` after converting inputs to one dtype and padding the states to a supported size."""
    dtype = x.dtype if x.dtype == step_logits.dtype == k.dtype == q.dtype else torch.float32
    size = next(n for n in STATE_SIZES if n >= k.shape[-1])
    inputs = [x.to(dtype), step_logits.to(dtype), _pad(k.to(dtype), size), _pad(q.to(dtype), size)]
    inputs.append(None if A is None else _pad(A.to(torch.float32).contiguous(), size))
    inputs += [None if t is None else t.to(torch.float32).contiguous() for t in (skip, step_bias)]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return scan_op.scan(backend, recurrence, *inputs, reverse, keep)[0].to(x.dtype)


def _pad(t: Tensor, state_size: int) -> Tensor:
    # padded states have zero keys and queries, so they stay 0 and add 0 to the output
    return t if t.shape[-1] == state_size else F.pad(t, (0, state_size - t.shape[-1]))


def _stack(
    reverse: bool | Sequence[bool], **layouts: dict[str, Tensor | None]
) -> tuple[list[Tensor | None], list[bool], bool]:
    """Check the tensors' shapes against layouts such as BLD, and add the dimension of directions if it is missing.

    Each keyword is a layout, and its value contains the tensors with this layout by name.

    Returns the tensors in the order of the arguments, `reverse` as a list, and whether the inputs had the dimension.
    """
    stacked = not isinstance(reverse, bool)
    directions = [reverse] if isinstance(reverse, bool) else list(reverse)
    prefix = "G" if stacked else ""
    check({"G": len(directions)}, *(
        (name, t, prefix + layout, None) for layout, tensors in layouts.items() for name, t in tensors.items()
    ))  # fmt: skip
    tensors = [t for named in layouts.values() for t in named.values()]
    if not stacked:
        tensors = [t if t is None else t.unsqueeze(0) for t in tensors]
    return tensors, directions, stacked
