// Means of v = silu(conv(u)) over each line of patches and for the class token, which a pooled block scans.
// The kernel also writes the sum of both directions' skip connections, skip_0 v_0 + skip_1 v_1, for each token.
// The gate needs no other function of v, so v of all tokens is never stored.
//
// pool.py declares the parameters of the kernel. Macros:
//   INPUT          element type of the tensors: bf16, fp16 or float
//   VECTOR         number of adjacent channels per thread, up to 2
//   TAPS           length of the convolution's filter, whose last tap reads the current token
//   THREADS, CTAS  threads per CTA, and CTAs per multiprocessor
//
// B batch    S pooled tokens    D channels    count, length, next, next_line: lines.cuh

#include "along_lines.cuh"

constexpr int V = VECTOR;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) pool(PARAMETERS_pool) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    __shared__ int table[TABLE];
    CtaLine at(lines, D);
    write_table(table, lines, at.first);
    int d = at.d;
    Convolved<V> v(u + at.token * u_stride + d, u_stride, weights, biases, d, D, table);
    Tokens<Element> to(skipped + at.token * D + d, D);
    Floats<V> skip_0 = load<V>(skip + d), skip_1 = load<V>(skip + D + d), sum_0 = {}, sum_1 = {};
    int foreign = at.foreign(lines);
    for_line(lines, at, table, [&](int t, int i, const int *here) {
        Floats<V> v_0, v_1;
        v.next(i, here, v_0, v_1);
        if (t == foreign) return;
        sum_0 = sum_0 + v_0, sum_1 = sum_1 + v_1;
        UNROLLED for (int c = 0; c < V; c++) v_0.at[c] = fmaf(skip_0.at[c], v_0.at[c], skip_1.at[c] * v_1.at[c]);
        if (at.writes) store(to.at(here[BACK]), from_floats<Element>(v_0));
    });
    float share = lines.share(at.pooled);
    UNROLLED for (int c = 0; c < V; c++) sum_0.at[c] *= share, sum_1.at[c] *= share;
    if (!at.writes) return;
    means += at.pooled_token * D + d;
    store(means, from_floats<Element>(sum_0));
    store(means + B * (count + 1) * D, from_floats<Element>(sum_1));
}
