"""Operators on plain tensors, independent of vision models. Each operator has a folder:

`scan`      the recurrences: `naive` is the reference implementation, `interface` has the public functions, `operator`
is `vil::scan`, which runs on `cuda_scan` (CUDA C++), `triton_scan` or `cpu_scan` (Numba); `chunked` is plain PyTorch
for any device
`block`     the model's residual block around the scan: `naive` is the reference implementation, `fused` decides which
block runs as one operator, `operator` is `vil::block`, `forward` and `backward` launch its kernels, `cpu` is the CPU
version
`augment`   augmentation of image batches

Shared modules:

`backends`  which backend runs these tensors here, or why not
`checks`    validation of operators' arguments
`cuda`      headers of CUDA sources, and compilation, launch and replay of kernels
`cpu`       the same for kernels written in Python and compiled by Numba
`cache`     compiled code on disk
`flops`     FLOP formulas of the operators for PyTorch's FlopCounterMode
"""

from . import flops
from .scan.interface import longhorn_scan, selective_scan

__all__ = ["flops", "longhorn_scan", "selective_scan"]
