"""Operators on plain tensors; they know nothing of vision. Imported as `vil.kernels`. One folder an operator:

`scan`     the recurrences: `reference` defines them, `operators` has the public functions, `op` the operators for
           GPUs, which `launch` (CUDA C++) and `triton_scan` (Triton) run
`block`    the operator around the scan, the mixer of a block with norm and residual addition: `reference` defines it,
           `op` computes it by what `launch` runs
`augment`  augmentation of images, before all that
`flops`    what PyTorch's FlopCounterMode counts for them
`cuda`     what their CUDA sources share, and what compiles and launches them
"""

from . import flops
from .scan.operators import longhorn_scan, selective_scan

__all__ = ["flops", "longhorn_scan", "selective_scan"]
