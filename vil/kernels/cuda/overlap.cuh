// Programmatic dependent launch: consecutive kernels of a stream overlap on GPUs of compute capability 9.0 or higher.
//
// The CTAs of a kernel start as soon as all CTAs of the previous kernel have called `begin_kernel` or ended, and
// multiprocessors are free. Therefore every kernel without early accesses begins with a call of `begin_kernel`.
//
// A kernel with early accesses (`early` in source.py) accesses memory before it waits for the previous kernel. A kernel
// with early accesses never calls `begin_kernel`, so the next kernel starts only after the kernel with early accesses
// has ended. At least one thread of the kernel with early accesses calls `wait_for_previous_kernel`, so the kernel ends
// after the previous kernel.

#include "elements.cuh"

// Waits until all previous kernels of the stream have completed and their results are visible.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the CTAs of the next kernel start, and waits for the previous kernel.
DEVICE void begin_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    wait_for_previous_kernel();
}
