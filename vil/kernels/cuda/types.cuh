// Includes all code that kernels of several operators share, except for code that only Hopper supports (sm90.cuh).

#include "elements.cuh"
#include "async_copies.cuh"
#include "mma.cuh"
