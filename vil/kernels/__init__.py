"""Operators on plain tensors, independent of vision models. Each operator has its own folder.

`scan`      the recurrences: `interface` has the public functions, `scan_op` registers `vil::scan`, which runs on
`cuda_scan` (CUDA C++), `triton_scan` or `cpu_scan` (Numba), and `torch_scan` is plain PyTorch for any device
`block`     the model's residual block around the scan: `fused` decides which block runs fused, `block_op` registers the
operator `vil::block` for consecutive blocks, `run` is the operator's forward and backward pass, `forward` and
`backward` launch a block's kernels, and `cpu` is the CPU version, with the mixer `cpu_tokens` or, in pooled blocks,
`cpu_lines`
`augment`   augmentation of image batches

`scan` and `block` have their reference implementations in `reference`.

Shared modules:

`backends`  choice of the backend for given tensors, and why a backend cannot run
`checks`    validation of operators' arguments
`cuda`      headers of CUDA sources, and compilation, launch and replay of kernels
`cpu`       compilation and launch of kernels written in Python and compiled by Numba, and building blocks of kernels
`torch_private`  private functions of PyTorch that this package uses
`cache`     disk cache of compiled code
`flops`     FLOP formulas of the operators for PyTorch's FlopCounterMode
"""

if __name__ != "kernels":  # transformers imports any module `kernels`, which may be the symbolic link in a clone
    from . import flops
    from .scan.interface import longhorn_scan, selective_scan

__all__ = ["flops", "longhorn_scan", "selective_scan"]
