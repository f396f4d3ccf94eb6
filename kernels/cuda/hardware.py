"""What a launch asks about the GPU that it is for. Tests that stand in for a GPU replace these functions."""

from __future__ import annotations

import functools

import torch

from .compiler import HOPPER


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a CTA may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
