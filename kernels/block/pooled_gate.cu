// The gate of a pooled block, and its gradient. Token t of line l reads what the recurrence found for the line, and skips
// it with its own v = silu(conv(u)), which is computed again:
//
//   mean(t) = (y_0(l) + skip_0 v_0(t) + y_1(l) + skip_1 v_1(t)) / 2        gated(t) = scale mean(t) silu(z(t))
//
// Macros and letters: pool.cu

#include "lines.cuh"

constexpr int V = VECTOR;

// The halves of what both directions found for the line, and of their skips of v by -LOG2E
struct Halves {
    Floats<V> y, skip_0, skip_1;
    INLINE Halves(const Element *y_0, i64 direction, const float *skip, i64 D) {
        y = to_floats(load<V>(y_0)) + to_floats(load<V>(y_0 + direction));
        skip_0 = load<V>(skip), skip_1 = load<V>(skip + D);
        UNROLLED for (int c = 0; c < V; c++)
            y.at[c] *= 0.5f, skip_0.at[c] *= -0.5f / LOG2E, skip_1.at[c] *= -0.5f / LOG2E;
    }
    INLINE float mean(int c, const Floats<V> &v_0, const Floats<V> &v_1) const {
        return fmaf(skip_0.at[c], v_0.at[c], fmaf(skip_1.at[c], v_1.at[c], y.at[c]));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
pooled_gate(const Element *__restrict__ u, i64 u_stride, const Element *__restrict__ z, i64 z_stride,
            const Element *__restrict__ y, const float *__restrict__ weights, const float *__restrict__ biases,
            const float *__restrict__ skip, const float *__restrict__ scales, Element *__restrict__ gated, i64 B, i64 D,
            i64 count, i64 length, i64 next, i64 next_line) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    __shared__ int table[TABLE];
    Place at(lines, D);
    write_table(table, lines, at.first);
    i64 d = at.d;
    Halves half(y + at.pooled_token * D + d, B * (count + 1) * D, skip + d, D);
    Convolved<V> v(u + at.token * u_stride + d, u_stride, weights, biases, d, D, table);
    Coming<V> gate(z + at.token * z_stride + d, z_stride, table + BACK);
    Tokens<Element> to(gated + at.token * D + d, D);
    float scale = scales ? scales[at.b] : 1;
    int foreign = at.foreign(lines);
    for_line(lines, at, table, [&](int t, int i, const int *here) {
        Floats<V> v_0, v_1, product = gate.next(i, here[BACK + AHEAD]);
        v.next(i, here, v_0, v_1);
        UNROLLED for (int c = 0; c < V; c++)
            product.at[c] *= scale * half.mean(c, v_0, v_1) * sigmoid(product.at[c]);
        if (at.writes && t != foreign) store(to.at(here[BACK]), from_floats<Element>(product));
    });
}

// With g = scale dgated: writes e = g silu(z) / 2, the gradient of what each direction puts out, over dgated,
// dz = g mean silu'(z), gated once more, e's sum over the line, and the means of v over the line
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
pooled_gate_backward(const Element *__restrict__ u, i64 u_stride, const Element *__restrict__ z, i64 z_stride,
                     const Element *__restrict__ y, const float *__restrict__ weights,
                     const float *__restrict__ biases, const float *__restrict__ skip,
                     const float *__restrict__ scales, Element *dgated, Element *__restrict__ dz, i64 dz_stride,
                     Element *__restrict__ gated, Element *__restrict__ dy, Element *__restrict__ means, i64 B, i64 D,
                     i64 count, i64 length, i64 next, i64 next_line) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    __shared__ int table[TABLE];
    Place at(lines, D);
    write_table(table, lines, at.first);
    i64 d = at.d, S = count + 1;
    Halves half(y + at.pooled_token * D + d, B * S * D, skip + d, D);
    Convolved<V> v(u + at.token * u_stride + d, u_stride, weights, biases, d, D, table);
    dgated += at.token * D + d;
    Tokens<Element> to_e(dgated, D), to_gated(gated + at.token * D + d, D), to_dz(dz + at.token * dz_stride + d, dz_stride);
    Coming<V> gate(z + at.token * z_stride + d, z_stride, table + BACK), gradient(dgated, D, table + BACK);
    float scale = scales ? scales[at.b] : 1;
    int foreign = at.foreign(lines);
    Floats<V> sum = {}, sum_0 = {}, sum_1 = {};
    for_line(lines, at, table, [&](int t, int i, const int *here) {
        Floats<V> v_0, v_1, zs = gate.next(i, here[BACK + AHEAD]), e = gradient.next(i, here[BACK + AHEAD]), product;
        v.next(i, here, v_0, v_1);
        UNROLLED for (int c = 0; c < V; c++) {
            float s = sigmoid(zs.at[c]), slope = silu_slope(zs.at[c], s), g = scale * e.at[c];
            float mean = half.mean(c, v_0, v_1);
            product.at[c] = scale * mean * zs.at[c] * s;
            e.at[c] = 0.5f * g * zs.at[c] * s;
            zs.at[c] = g * mean * slope;
        }
        if (t == foreign) return;
        if (at.writes) {
            store(to_e.at(here[BACK]), from_floats<Element>(e));
            store(to_dz.at(here[BACK]), from_floats<Element>(zs));
            store(to_gated.at(here[BACK]), from_floats<Element>(product));
        }
        sum = sum + e, sum_0 = sum_0 + v_0, sum_1 = sum_1 + v_1;
    });
    float share = lines.share(at.pooled) / -LOG2E;
    UNROLLED for (int c = 0; c < V; c++) sum_0.at[c] *= share, sum_1.at[c] *= share;
    if (!at.writes) return;
    dy += at.pooled_token * D + d, means += at.pooled_token * D + d;
    store(dy, from_floats<Element>(sum));
    store(means, from_floats<Element>(sum_0));
    store(means + B * S * D, from_floats<Element>(sum_1));
}
