// The rules of barriers. The sources and docs/kernels refer to them by number.
//
// Barriers of the CTA: all warps pass __syncthreads once per tile. Barrier i is that of tile i, and interval i follows
// it.
//
//  1. Data written in interval i is read in interval i + 1 or later, and overwritten in a later interval than that of
//     its last read. If n buffers are used in turn (i % n) and data is read until interval i + m, n > m is required.
//  2. The thread that started copies (async_copies.cuh) waits for them before barrier i; then all threads see them.
//     The copy of tile i + STAGES - 1 starts in interval i and overwrites tile i - 1, which no thread reads after
//     barrier i.
//  3. After __syncwarp, the lanes of a warp see each other's writes: data of a single warp needs no other barrier.
//
// mbarriers, for warps with roles: the stages of a pipeline in shared memory are filled by producers and read by
// consumers in turn. Each stage has two mbarriers, "full" and "empty"; all "full" ones come first in memory:
//
//   producer   wait_for(empty(), parity() ^ 1)   fill, arrive at full()              next()
//   consumer   wait_for(full(), parity())        read, arrive at empty()             next()
//
//  4. Each participating thread counts stages with its own Pipeline, in the same order and equally often.
//  5. A phase of an mbarrier completes with its last arrival; a wait for parity p returns once the phase of that parity
//     is complete. In the first round, a consumer waits for phase 0 of "full", while a producer waits for parity 1 of
//     "empty", which counts as complete from the start because stages are empty. In the next round both parities are
//     flipped. A producer is never more than one round ahead, because "empty" of the round before must be complete, so
//     that two parities are enough to distinguish rounds.
//  6. A lane arrives at "full" when its own copies have arrived; a bulk copy arrives by its bytes. One lane per warp
//     arrives at "empty", after __syncwarp or, if wgmma reads the stage, after wait_for_products. After
//     wait_for_products<1> the newest products may still read, so it releases the stage before, `empty_before`.
//  7. wgmma sees data that threads or their copies have written after show_to_products; bulk copies do not need it.
//  8. A thread that copies does not exit before its copies have arrived, as shared memory is valid only until then.

#include "types.cuh"

template <int DEPTH>
struct Pipeline {
    unsigned barriers;
    int position = 0;  // stage and parity in one register: counts over two rounds
    INLINE Pipeline(unsigned barriers) : barriers(barriers) {}
    INLINE int parity() const { return position >= DEPTH; }
    INLINE int stage() const { return position - parity() * DEPTH; }
    INLINE unsigned full() const { return barriers + stage() * 8; }
    INLINE unsigned empty() const { return full() + DEPTH * 8; }
    // the stage before: its products may still be reading while those of this stage start
    INLINE unsigned empty_before() const { return full() + ((stage() == 0) * DEPTH + DEPTH - 1) * 8; }
    INLINE void next() { position = position + 1 < 2 * DEPTH ? position + 1 : 0; }
};
