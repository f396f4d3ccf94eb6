"""Seeds derived from the position in a run, and seeding of the generators of Python, NumPy and PyTorch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*key: int) -> int:
    """Return a 32-bit seed derived from a key such as (seed, epoch, position)."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch, on the CPU and on the current device of initialized backends.

    `torch.manual_seed` is not used, because it also records a stack trace per uninitialized backend. Recording takes
    longer than all other seeding together, which is too slow to do for each image.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for backend in (torch.cuda, torch.xpu):
        if backend.is_initialized():
            backend.manual_seed(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


@contextmanager
def rng_states_restored() -> Iterator[None]:
    """Restore the RNG states of Python, NumPy and PyTorch on exit, on the CPU and on the current initialized GPU."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
