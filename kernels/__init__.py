"""Operators on plain tensors; they know nothing of vision. Imported as `vil.kernels`. One folder an operator:

`scan`     the recurrences: `reference` defines them, `operators` has the public functions, `op` the operators, which
           `launch` (CUDA C++), `triton_scan` (Triton) and `cpu_scan` (Numba) run
`block`    the operator around the scan, the mixer of a block with norm and residual addition: `reference` defines it,
           `op` computes it by what `launch` runs, `cpu` on CPUs
`augment`  augmentation of images, before all that
`flops`    what PyTorch's FlopCounterMode counts for them
`cuda`     what their CUDA sources share, and what compiles and launches them
`cpu`      the same for kernels in Numba's Python
"""

from . import flops
from .scan.interface import longhorn_scan, selective_scan

__all__ = ["flops", "longhorn_scan", "selective_scan"]
