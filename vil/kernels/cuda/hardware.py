"""The GPU that a launch is for. Tests that stand in for one replace these functions."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .compiler import HOPPER

SCHEDULERS = 4  # of a multiprocessor
CTA_BYTES = 99 * 1024  # of shared memory that a CTA may have on every GPU from sm_80 on
MULTIPROCESSOR_BYTES = 228 * 1024  # of an H200's, of which each CTA takes 1 KiB more than it asks for


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a CTA may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # whose stub lacks this field
    return properties.shared_memory_per_block_optin


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
