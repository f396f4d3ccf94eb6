// Tables and copies of a pooled block's tokens in line order.
// Each warp copies its channels of the tokens to shared memory before it uses the tokens.
// Warps wait for each other only when their CTA writes tables.
// pool.cu lists the macros.

#include "../cuda/async_copies.cuh"
#include "filter.cuh"
#include "lines.cuh"
#include "silu.cuh"

constexpr int V = VECTOR, WARP_CHANNELS = 32 * V;
typedef Pack<int, 4> Four;

// Writes two tables for `size` tokens, starting with token `first` of the line order.
// `at` receives the memory index of each token, or -1 for tokens outside of the image and after `last`.
// `values` receives value(t) of each token t, or -1 wherever `at` receives -1.
template <class Value>
DEVICE void write_tables(Four *at, Four *values, int size, const Lines &lines, int first, int last, Value value) {
    __syncthreads();  // no thread uses the previous tables any more
#pragma unroll 1
    for (int i = threadIdx.x; i < size; i += THREADS) {
        int t = first + i, of_token = value(t), index = lines.at(t);
        if (t > last || index < 0) of_token = index = -1;
        at[i / 4].at[i % 4] = index, values[i / 4].at[i % 4] = of_token;
    }
    __syncthreads();
}

// Channels that a thread processes.
struct Channels {
    int warp, d;  // first channel of the warp, and of the thread
    bool writes;  // false if the thread has no channels of its own
    INLINE Channels(int group, i64 D) {
        warp = (group * THREADS + threadIdx.x / 32 * 32) * V, d = warp + threadIdx.x % 32 * V;
        writes = d < D, d = min(d, int(D) - V);
    }
};

// Returns the thread's channels of a token that its warp has copied.
DEVICE const Element *own(const Element *token) { return token + threadIdx.x % 32 * V; }

// Tokens of a tensor, with 32-bit strides.
template <class T>
struct Tokens {
    T *data;
    int stride;  // stride between tokens in bytes
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

// Ring buffer of a warp for tokens of TENSORS tensors, in groups of GROUP tokens.
// Copies of DEPTH - 1 groups are in flight while the warp processes a group. DEPTH is a power of 2.
template <int GROUP, int DEPTH, int TENSORS>
struct Ring {
    struct Stage {
        Element at[TENSORS][GROUP][WARP_CHANNELS];
    };
    static constexpr int PIECES = WARP_CHANNELS / PIECE;  // number of lanes that copy one token of one tensor
    Stage *stages;
    Tokens<const Element> tensors[TENSORS];  // each starts at the first channel that the lane copies
    bool copies;  // whether the channels that the lane copies exist
    unsigned stage = 0;
    static INLINE int column() { return threadIdx.x % PIECES * PIECE; }
    INLINE void copy(unsigned stage, const int *table) {
        int row = threadIdx.x % 32 / PIECES;
        Stage &to = stages[stage % DEPTH];
        UNROLLED for (int i = 0; i < GROUP; i += 32 / PIECES) {
            int at = table[i + row];
            UNROLLED for (int k = 0; k < TENSORS; k++)
                copy_async<PIECE>(&to.at[k][i + row][column()], tensors[k].at(at), at >= 0 && copies);
        }
        commit_copies();
    }
    // Starts to copy the first groups. `table` contains the memory index of each token, or -1 for zeros.
    INLINE void start(const int *table) {
        UNROLLED for (int i = 0; i < DEPTH - 1; i++) copy(i, table + i * GROUP);
    }
    // Waits for the next group, and starts to copy the group that is DEPTH - 1 groups later.
    // `table` contains the memory indices of the tokens, starting with the next group.
    INLINE const Stage &next(const int *table) {
        wait_for_copies<DEPTH - 2>();
        __syncwarp();  // the lanes' copies of the group have arrived, and no lane reads the previous group any more
        copy(stage + DEPTH - 1, table + (DEPTH - 1) * GROUP);
        return stages[stage++ % DEPTH];
    }
    // Waits for the copies of all groups, and until no lane reads a group any more.
    INLINE void finish() {
        wait_for_copies<0>();
        __syncwarp();
    }
};
