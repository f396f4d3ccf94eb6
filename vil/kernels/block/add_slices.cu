// Sums of partial sums over slices of channels, in the order of the slices, rounded to 16 bits.
//
// add_slices.py declares the parameters of the kernel. Macros:
//   INPUT   element type of the sums: bf16 or fp16
//   SLICES  number of partial sums of each element
//
// A thread computes 4 adjacent sums. `elements`, the number of sums, is a multiple of 4.

#include "../cuda/types.cuh"

typedef INPUT Element;
constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) add_slices(PARAMETERS_add_slices) {
    begin_kernel();
    i64 i = (i64(blockIdx.x) * THREADS + threadIdx.x) * 4;
    if (i >= elements) return;
    Floats<4> part[SLICES];
    UNROLLED for (int s = 0; s < SLICES; s++) part[s] = load<4>(parts + s * elements + i);
    UNROLLED for (int s = 1; s < SLICES; s++) part[0] = part[0] + part[s];
    store(sums + i, from_floats<Element>(part[0]));
}
