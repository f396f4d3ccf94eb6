// What the recurrence of a pooled block reads: of each direction the mean of v = silu(conv(u)) over a line of patches,
// and v of the class token. No v of all tokens lies in memory.
//
// Macros:
//   INPUT   element type of the tensors: bf16, fp16 or float
//   VECTOR  neighbouring channels that a thread takes, up to 4
//   TAPS    tokens that a convolution sees, the last of them the token itself
//   THREADS, CTAS  of a CTA, and of a multiprocessor
//
// B batch    S pooled tokens    D channels    count, length, next, next_line: lines.cuh

#include "lines.cuh"

constexpr int V = VECTOR;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
pool(const Element *__restrict__ u, i64 u_stride, const float *__restrict__ weights, const float *__restrict__ biases,
     Element *__restrict__ means, i64 B, i64 D, i64 count, i64 length, i64 next, i64 next_line) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    __shared__ int table[TABLE];
    Place at(lines, D);
    write_table(table, lines, at.first);
    i64 d = at.d;
    Convolved<V> v(u + at.token * u_stride + d, u_stride, weights, biases, d, D, table);
    Floats<V> sum_0 = {}, sum_1 = {};
    int foreign = at.foreign(lines);
    for_line(lines, at, table, [&](int t, int i, const int *here) {
        Floats<V> v_0, v_1;
        v.next(i, here, v_0, v_1);
        if (t != foreign) sum_0 = sum_0 + v_0, sum_1 = sum_1 + v_1;
    });
    float share = lines.share(at.pooled) / -LOG2E;
    UNROLLED for (int c = 0; c < V; c++) sum_0.at[c] *= share, sum_1.at[c] *= share;
    if (!at.writes) return;
    means += at.pooled_token * D + d;
    store(means, from_floats<Element>(sum_0));
    store(means + B * (count + 1) * D, from_floats<Element>(sum_1));
}
