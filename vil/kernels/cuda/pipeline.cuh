// The rules of barriers, of which the sources and docs/kernels name the ones that they use.
//
// By barriers of the CTA. All warps pass __syncthreads once a tile; barrier i is that of tile i, interval i follows it.
//
//   1. What is written in interval i is read in interval i + 1 or later, and written again in a later one than it was
//      read in last. With n buffers in turn, i % n, what is read until interval i + m needs n > m.
//   2. Copies (async_copies.cuh) are waited for by the thread that started them, ahead of barrier i, and belong to all
//      behind it. The copy of tile i + STAGES - 1 starts in interval i: it goes where tile i - 1 was, which nobody
//      reads any more behind barrier i.
//   3. Behind __syncwarp the lanes of a warp see what they wrote: what is a warp's own needs no other barrier.
//
// By mbarriers, where warps have roles. A pipeline's stages in shared memory are filled by producers and read by
// consumers in turn. Each has two mbarriers, "full" and "empty", all of the former first:
//
//   producer   wait_for(empty(), phase() ^ 1)   fill, arrive at full()              next()
//   consumer   wait_for(full(), phase())        read, arrive at empty()             next()
//
//   4. Whoever takes part counts stages with its own Pipeline, in the same order and as often.
//   5. An mbarrier's phase is over when the last of its arrivals has come; waiting for parity p returns once the phase
//      of that parity is over. In its first round a consumer waits for phase 0 of "full", while a producer waits for
//      parity 1 of "empty", which counts as over from the start: stages are empty then. In the next round both
//      parities are the other. A producer is never more than one round ahead, as "empty" of the round before has to be
//      over, so that two parities are enough to tell rounds apart.
//   6. A lane arrives at "full" when its own copies have come, a bulk copy by its bytes. One lane arrives at "empty"
//      for its warp, behind __syncwarp or, if wgmma reads the stage, behind wait_for_products: behind
//      wait_for_products<1>, when the newest products may still read, it gives back the stage before, `empty_before`.
//   7. What threads or their copies have written is seen by wgmma behind show_to_products; bulk copies need none.
//   8. Who copies leaves when its copies have come: shared memory lasts until then.

#include "types.cuh"

template <int DEPTH>
struct Pipeline {
    unsigned barriers;
    int position = 0;  // in two rounds, in one register
    INLINE Pipeline(unsigned barriers) : barriers(barriers) {}
    INLINE int phase() const { return position >= DEPTH; }
    INLINE int stage() const { return position - phase() * DEPTH; }
    INLINE unsigned full() const { return barriers + stage() * 8; }
    INLINE unsigned empty() const { return full() + DEPTH * 8; }
    // of the stage before: products that read it may go on while those of this stage begin
    INLINE unsigned empty_before() const { return full() + ((stage() == 0) * DEPTH + DEPTH - 1) * 8; }
    INLINE void next() { position = position + 1 < 2 * DEPTH ? position + 1 : 0; }
};
