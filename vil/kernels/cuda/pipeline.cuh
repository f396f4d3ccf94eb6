// Rules for barriers, which the sources and docs/kernels cite by number, and the state of an mbarrier pipeline.
//
// Rules 1 and 2 apply to kernels in which all warps pass __syncthreads once per tile, and rule 3 to all kernels.
// Barrier i is the __syncthreads of tile i, and interval i is the time between barriers i and i + 1.
//
//  1. Data that is written in interval i is read in interval i + 1 or later.
//     Data is overwritten in a later interval than the interval of its last read.
//     If n buffers are used in turn (i % n) and data is read until interval i + m, n must be greater than m.
//  2. The thread that started copies (async_copies.cuh) waits for its copies before barrier i.
//     After barrier i, all threads see the copied data.
//     The copy of tile i + STAGES - 1 starts in interval i and overwrites tile i - 1, which no thread reads any more.
//  3. After __syncwarp, the lanes of a warp see each other's writes, so data of a single warp needs no other barrier.
//
// Rules 4 to 8 apply to kernels in which producer warps fill the stages of a pipeline and consumer warps read them.
// Each stage has two mbarriers, "full" and "empty". In memory, the "full" mbarriers of all stages come first.
//
//   producer   wait_for(empty(), parity() ^ 1)   fill, arrive at full()              next()
//   consumer   wait_for(full(), parity())        read, arrive at empty()             next()
//
//  4. Each participating thread counts stages with its own Pipeline, in the same order and equally often.
//  5. A phase of an mbarrier completes with its last arrival.
//     A wait for parity p returns once the phase of parity p is complete.
//     In the first round, a consumer waits for parity 0 of "full", and a producer waits for parity 1 of "empty".
//     Parity 1 of "empty" counts as complete from the start, because all stages are empty.
//     In each further round, both parities are flipped.
//     Two parities are enough to distinguish rounds, because a producer is at most one round ahead of the consumers.
//  6. A lane arrives at "full" when its own copies have arrived, while a bulk copy arrives by its number of bytes.
//     One lane per warp arrives at "empty", after __syncwarp or, if wgmma reads the stage, after wait_for_products.
//     After wait_for_products<1>, the newest products may still read their stage.
//     Therefore the lane arrives at `empty_before`, which releases the previous stage, after wait_for_products<1>.
//  7. wgmma sees data that threads or cp.async have written only after show_to_products.
//     The thread that wrote the data calls show_to_products before it arrives at a barrier, or the threads that
//     start the products call show_to_products after they have waited for the barrier.
//     Data of bulk copies needs no show_to_products.
//  8. A thread exits only after its copies have arrived, because shared memory is valid only until the exit.

#include "types.cuh"

template <int DEPTH>
struct Pipeline {
    unsigned barriers;
    int position = 0;  // stage and parity in one register: index of the stage over two rounds
    INLINE Pipeline(unsigned barriers) : barriers(barriers) {}
    INLINE int parity() const { return position >= DEPTH; }
    INLINE int stage() const { return position - parity() * DEPTH; }
    INLINE unsigned full() const { return barriers + stage() * 8; }
    INLINE unsigned empty() const { return full() + DEPTH * 8; }
    // "Empty" mbarrier of the previous stage, whose products may still run when products of this stage start.
    INLINE unsigned empty_before() const { return full() + ((stage() == 0) * DEPTH + DEPTH - 1) * 8; }
    INLINE void next() { position = position + 1 < 2 * DEPTH ? position + 1 : 0; }
};
