// Includes all code that kernels of several operators share, except Hopper's (sm90.cuh)

#include "elements.cuh"
#include "async_copies.cuh"
#include "mma.cuh"
