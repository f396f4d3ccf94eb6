// Tokens of a pooled block in line order, which each warp copies to shared memory ahead of their use.
// A warp copies only its own channels, so that warps wait for each other only when a CTA fills a table.

#include "../cuda/async_copies.cuh"
#include "filter.cuh"
#include "lines.cuh"
#include "silu.cuh"

constexpr int V = VECTOR, WARP_CHANNELS = 32 * V, SEGMENT = 256;  // SEGMENT: number of tokens per table
constexpr int DEPTH = 8 / sizeof(Element);  // number of groups of tokens in a ring buffer, a power of 2

// Tokens of a tensor, with 32-bit strides.
template <class T>
struct Tokens {
    T *data;
    int stride;  // in bytes
    INLINE Tokens(T *data, i64 stride) : data(data), stride(int(stride) * int(sizeof(T))) {
        // The compiler must keep the stride in a register; otherwise each token would need a 64-bit multiplication.
        asm("" : "+r"(this->stride));
    }
    INLINE T *at(int t) const {
        i64 offset;
        asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(t), "r"(stride));
        return (T *)((char *)data + offset);
    }
};

// Ring buffer of a warp's tokens. Copies of DEPTH - 1 groups are in flight while the warp processes a group.
template <int GROUP, int TENSORS>
struct Ring {
    struct Stage {
        Element at[TENSORS][GROUP][WARP_CHANNELS];
    };
    static constexpr int PIECES = WARP_CHANNELS / PIECE;  // lanes that copy a token of one tensor
    Stage *stages;
    Tokens<const Element> tensors[TENSORS];  // start at the first channel that the lane copies
    bool valid;  // whether the lane copies existing channels
    unsigned position = 0;
    static INLINE int column() { return threadIdx.x % PIECES * PIECE; }
    INLINE void copy(unsigned stage, const int *table) {
        int row = threadIdx.x % 32 / PIECES;
        Stage &to = stages[stage % DEPTH];
        UNROLLED for (int i = 0; i < GROUP; i += 32 / PIECES) {
            int at = table[i + row];
            UNROLLED for (int k = 0; k < TENSORS; k++)
                copy_async<PIECE>(&to.at[k][i + row][column()], tensors[k].at(at), at >= 0 && valid);
        }
        commit_copies();
    }
    // Starts to copy the first DEPTH - 1 groups. `table` has the memory index of each token, or -1 for zeros.
    INLINE void start(const int *table) {
        wait_for_copies<0>();
        __syncwarp();
        position = 0;
        UNROLLED for (int i = 0; i < DEPTH - 1; i++) copy(i, table + i * GROUP);
    }
    // Returns the next group, and starts to copy the group that is DEPTH - 1 groups later.
    // `table` starts with the returned group.
    INLINE const Stage &next(const int *table) {
        wait_for_copies<DEPTH - 2>();
        __syncwarp();  // all copies of the group have arrived, and no lane reads the previous group any more
        copy(position + DEPTH - 1, table + (DEPTH - 1) * GROUP);
        const Stage &stage = stages[position++ % DEPTH];
        return stage;
    }
};
