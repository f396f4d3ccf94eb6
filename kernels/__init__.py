"""The recurrences as operators on plain tensors; they know nothing of vision. Imported as `vil.kernels`.

`operators` holds the public functions, `reference` the definition of both recurrences in plain PyTorch, `gpu` the
operators for GPUs, which `cuda` (CUDA C++) and `triton_scan` (Triton) run, and `block` the operator around them: the
mixer of a block with norm and residual addition.
"""

from .operators import longhorn_scan, selective_scan

__all__ = ["longhorn_scan", "selective_scan"]
