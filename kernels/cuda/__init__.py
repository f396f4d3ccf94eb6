"""The scan in CUDA C++ for NVIDIA GPUs, sm_80 and newer."""
