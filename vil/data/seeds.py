"""Seeds that follow from a place in a run, and the generators that they go to."""

from __future__ import annotations

import random

import numpy as np
import torch


def derive_seed(*key: int) -> int:
    """A 32-bit seed of its own for every key, such as (seed, epoch, position)."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch, the CPU and the GPU in use.

    `torch.manual_seed` would also note the seed for every backend that nobody has started, with a stack trace that
    takes ten times as long as the rest: too slow for every image.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
