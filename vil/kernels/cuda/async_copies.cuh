// Asynchronous copies from global to shared memory (cp.async).
// `commit_copies` closes a group of the copies that the calling thread has started.
// `wait_for_copies<PENDING>` waits until all groups of the calling thread except the last PENDING have arrived.
// Other threads see copied data only after a barrier (__syncwarp, __syncthreads) that follows the wait.
// The compiler does not move memory accesses across the functions in this file.

#include "elements.cuh"

// Copies ELEMENTS adjacent elements, or writes zeros without reading if `valid` is false.
// The hardware copies 4, 8 or 16 bytes asynchronously; a single 16-bit element is copied through a register.
template <int ELEMENTS, class T>
DEVICE void copy_async(T *shared, const T *global, bool valid) {
    constexpr int BYTES = ELEMENTS * sizeof(T);
    unsigned to = __cvta_generic_to_shared(shared);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0)
                     : "memory");
    else if constexpr (BYTES >= 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES),
                     "r"(valid ? BYTES : 0)
                     : "memory");
    else
        *shared = valid ? *global : T{};
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
