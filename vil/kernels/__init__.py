"""Operators on plain tensors; they know nothing of vision. Imported as `vil.kernels`. One folder an operator:

`scan`      the recurrences: `naive` defines them, `interface` has the public functions, `operator` is `vil::scan`, run
            by `cuda_scan` (CUDA C++), `triton_scan` and `cpu_scan` (Numba); `chunked` is plain PyTorch, anywhere
`block`     the operator around the scan, the model's residual block: `naive` defines it, `fused` says which block runs
            as one operator, `operator` is `vil::block`, `forward` and `backward` launch its kernels, `cpu` is for CPUs
`augment`   augmentation of images, before all that

and what these share:

`backends`  which backend runs tensors here, or why not
`checks`    what operators refuse before they read a tensor
`cuda`      headers of CUDA sources, and what compiles, launches and replays kernels
`cpu`       the same for kernels in Numba's Python
`cache`     compiled code on disk
`flops`     what PyTorch's FlopCounterMode counts for the operators
"""

from . import flops
from .scan.interface import longhorn_scan, selective_scan

__all__ = ["flops", "longhorn_scan", "selective_scan"]
