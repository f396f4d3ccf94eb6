// Adds the partial sums of the CTAs of backward.cu.

#include "lanes.cuh"

// Loads data that is not read again and need not stay in caches.
DEVICE Floats<4> load_once(const float *p) {
    Floats<4> v;
    asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.at[0]), "=f"(v.at[1]), "=f"(v.at[2]), "=f"(v.at[3])
                 : "l"(p));
    return v;
}

// Adds the partial sums of all CTAs in a fixed order, in one launch of CTAs with 256 threads.
// The first CTAs add the `rows` rows of `channel_partials`, and 8 threads share a column.
// Further CTAs add dk and dq of every token over the `key_parts` CTAs of a sequence, with 4 states per thread.
extern "C" __global__ void reduce_partials(PARAMETERS_reduce_partials) {
    begin_kernel();
    __shared__ float slices[8][32];
    i64 key_items = tokens * 2 * KEY_VECTORS, row_ctas = (columns + 31) / 32;
    if (blockIdx.x < row_ctas) {
        int slice = threadIdx.x / 32, lane = threadIdx.x % 32;
        i64 column = blockIdx.x * 32 + lane;
        float sum = 0;
        if (column < columns)
#pragma unroll 8
            for (i64 row = slice; row < rows; row += 8) sum += channel_partials[row * columns + column];
        slices[slice][lane] = sum;
        __syncthreads();
        if (slice > 0 || column >= columns) return;
        UNROLLED for (int s = 1; s < 8; s++) sum += slices[s][lane];
        *(column < channels ? dchannels + column : dA + (column - channels)) = sum;
    } else {
        i64 i = (blockIdx.x - row_ctas) * 256 + threadIdx.x;
        if (i >= key_items) return;
        constexpr int TOGETHER = 6;  // number of partial sums that are loaded at the same time
        Floats<4> sum = {};
        for (i64 first = 0; first < key_parts; first += TOGETHER) {
            Floats<4> parts[TOGETHER] = {};
            UNROLLED for (int j = 0; j < TOGETHER; j++)
                if (first + j < key_parts) parts[j] = load_once(key_partials + ((first + j) * key_items + i) * 4);
            UNROLLED for (int j = 0; j < TOGETHER; j++) sum = sum + parts[j];
        }
        i64 token = i / (2 * KEY_VECTORS), n = i % KEY_VECTORS * 4;
        store((i / KEY_VECTORS % 2 ? dq : dk) + token * N + n, from_floats<Element>(sum));
    }
}
