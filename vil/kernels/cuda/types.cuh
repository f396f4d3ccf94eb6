// Includes all code that kernels of several operators share, except for Hopper kernels (sm90.cuh, pipeline.cuh).

#include "elements.cuh"
#include "async_copies.cuh"
#include "mma.cuh"
#include "overlap.cuh"
