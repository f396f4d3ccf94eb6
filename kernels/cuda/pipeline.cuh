// A pipeline: stages in shared memory that producers fill and consumers read in turn. Each has two mbarriers, "full"
// and "empty", all of the former first. Whoever takes part counts stages with its own Pipeline, in the same order:
//
//   producer   wait_for(empty(), phase() ^ 1)   fill, arrive at full()              next()
//   consumer   wait_for(full(), phase())        read, arrive at empty()             next()
//
// An mbarrier's phase is over when the last of its arrivals has come; waiting for parity p returns once the phase of
// that parity is over. So in its first round a consumer waits for phase 0 of "full", while a producer waits for parity
// 1 of "empty", which counts as over from the start: stages are empty then. In the next round both parities are the
// other. A producer is never more than one round ahead, as `empty` of the round before has to be over, so that two
// parities are enough to tell rounds apart.

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
