// All of what kernels of several operators share, but for what is Hopper's own (sm90.cuh)

#include "elements.cuh"
#include "async_copies.cuh"
#include "mma.cuh"
