// cp.async: copies from global to shared memory that a thread starts and goes on. `commit_copies` closes a group of
// those that it has started, `wait_for_copies<PENDING>` returns when all of its groups but the last PENDING have
// arrived. That is of this thread's own copies: others see them behind a barrier that follows (__syncwarp,
// __syncthreads). The compiler moves no access to memory over any of them.

#include "elements.cuh"

// `ELEMENTS` neighbours, or zeros if they are not `valid`: nothing is read then. The copy engine takes 4, 8 or 16
// bytes; a single 16-bit element goes through a register.
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
