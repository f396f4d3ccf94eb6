"""Properties of GPUs that kernel launches depend on. Tests replace these functions to simulate a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

HOPPER = (9, 0)  # compute capability of H100 and H200 GPUs
SCHEDULERS = 4  # number of schedulers per multiprocessor
CTA_BYTES = 99 * 1024  # bytes of shared memory per CTA that every GPU since sm_80 supports
# bytes of shared memory per H200 multiprocessor; CUDA adds 1 KiB to the request of each CTA
MULTIPROCESSOR_BYTES = 228 * 1024


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the maximum shared memory per CTA in bytes."""
    properties: Any = torch.cuda.get_device_properties(device)  # Any, because the type stub lacks this field
    return properties.shared_memory_per_block_optin


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
