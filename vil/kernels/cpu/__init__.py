"""Modules that the CPU kernels of the scan and of the block share.

`compiler`     compilation of Python functions to machine code, and launches
`language`     building blocks of kernels
`filters`      causal convolutions
`recurrences`  updates of states and their gradients
"""
