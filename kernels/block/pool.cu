// What the recurrence of a pooled block reads: of each direction the mean of v = silu(conv(u)) over a line of patches,
// and v of the class token. No v of all tokens lies in memory.
//
// Macros:
//   INPUT   element type of the tensors: bf16, fp16 or float
//   VECTOR  neighbouring channels that a thread takes, up to 4
//   TAPS    tokens that a convolution sees, the last of them the token itself
//
// B batch    S pooled tokens    D channels    count, length, next, next_line: lines.cuh

#include "lines.cuh"

constexpr int WARPS = 4, V = VECTOR;

// A thread takes a pooled token's line, neighbouring threads neighbouring channels.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
pool(const Element *__restrict__ u, i64 u_stride, const float *__restrict__ weights, const float *__restrict__ biases,
     Element *__restrict__ means, i64 B, i64 D, i64 count, i64 length, i64 next, i64 next_line) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    i64 thread = blockIdx.x * i64(32 * WARPS) + threadIdx.x, S = count + 1, d = thread % (D / V) * V;
    i64 b = thread / (D / V) / S;
    int pooled = thread / (D / V) % S, first = lines.first(pooled), last = lines.last(pooled);
    if (b >= B) return;
    Convolved<V> v(u + b * lines.tokens() * u_stride + d, u_stride, weights, biases, d, D, lines, first);
    Floats<V> sum_0 = {}, sum_1 = {};
#pragma unroll 1
    for (int t = first; t <= last; t += STEP) {
        v.advance();
        UNROLLED for (int i = 0; i < STEP; i++) {
            Floats<V> v_0, v_1;
            v.convolve(i, v_0, v_1);
            bool own = t + i <= last && (t + i != lines.middle() || pooled == lines.class_token());
            if (own) sum_0 = sum_0 + v_0, sum_1 = sum_1 + v_1;
        }
        v.move_on();
    }
    UNROLLED for (int c = 0; c < V; c++) sum_0.at[c] *= lines.share(pooled), sum_1.at[c] *= lines.share(pooled);
    means += (b * S + pooled) * D + d;
    store(means, from_floats<Element>(sum_0));
    store(means + B * S * D, from_floats<Element>(sum_1));
}
