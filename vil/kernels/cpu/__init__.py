"""Shared modules of the CPU kernels: `compiler` (Python functions to machine code) and `language` (building blocks)."""
