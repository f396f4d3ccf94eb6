"""What the scan's forward keeps for its backward, on any GPU: the states between chunks of tokens."""

import torch

CHUNK = 64  # tokens


def boundaries(L: int) -> int:
    """Those between chunks of `L` tokens, where forward keeps a state."""
    return max(L - 1, 0) // CHUNK


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the states kept for inputs of `dtype`. With N = 16 they take at most a byte for each element of x.

    Gradients in bf16 lose about as much to rounding as these states do. fp16 is finer, and its range may be too small.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
