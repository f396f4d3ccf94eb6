"""What the kernels for CPUs share: `compiler`, which makes machine code of Python functions, and `language`."""
