// The gate of a pooled block, and its gradient. Token t of line l reads what the recurrence found for the line, and skips
// it with its own v = silu(conv(u)), which is computed again:
//
//   mean(t) = (y_0(l) + skip_0 v_0(t) + y_1(l) + skip_1 v_1(t)) / 2        gated(t) = scale mean(t) silu(z(t))
//
// Macros and letters: pool.cu

#include "lines.cuh"

constexpr int WARPS = 4, V = VECTOR;

// The pooled token of a thread, which takes its line; neighbouring threads have neighbouring channels
struct Place {
    i64 b, d, token, pooled_token;  // of the image's first token, and of the pooled one, in memory
    int pooled, first, last;
    INLINE Place(const Lines &lines, i64 D) {
        i64 thread = blockIdx.x * i64(32 * WARPS) + threadIdx.x, S = lines.count + 1;
        d = thread % (D / V) * V, b = thread / (D / V) / S, pooled = thread / (D / V) % S;
        first = lines.first(pooled), last = lines.last(pooled);
        token = b * lines.tokens(), pooled_token = b * S + pooled;
    }
    // whether token t is one of the line's
    INLINE bool has(const Lines &lines, int t) const {
        return t <= last && (t != lines.middle() || pooled == lines.class_token());
    }
};

// The halves of what both directions found for the line, and of their skips
struct Halves {
    Floats<V> y, skip_0, skip_1;
    INLINE Halves(const Element *y_0, i64 direction, const float *skip, i64 D) {
        y = to_floats(load<V>(y_0)) + to_floats(load<V>(y_0 + direction));
        skip_0 = load<V>(skip), skip_1 = load<V>(skip + D);
        UNROLLED for (int c = 0; c < V; c++) y.at[c] *= 0.5f, skip_0.at[c] *= 0.5f, skip_1.at[c] *= 0.5f;
    }
    INLINE float mean(int c, const Floats<V> &v_0, const Floats<V> &v_1) const {
        return fmaf(skip_0.at[c], v_0.at[c], fmaf(skip_1.at[c], v_1.at[c], y.at[c]));
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
pooled_gate(const Element *__restrict__ u, i64 u_stride, const Element *__restrict__ z, i64 z_stride,
            const Element *__restrict__ y, const float *__restrict__ weights, const float *__restrict__ biases,
            const float *__restrict__ skip, const float *__restrict__ scales, Element *__restrict__ gated, i64 B, i64 D,
            i64 count, i64 length, i64 next, i64 next_line) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    Place at(lines, D);
    if (at.b >= B) return;
    i64 d = at.d;
    Halves half(y + at.pooled_token * D + d, B * (count + 1) * D, skip + d, D);
    Convolved<V> v(u + at.token * u_stride + d, u_stride, weights, biases, d, D, lines, at.first);
    Walk walk(lines, at.first);
    Coming<V> gate;
    z += at.token * z_stride + d, gated += at.token * D + d;
    gate.fetch(z, z_stride, walk);
    float scale = scales ? scales[at.b] : 1;
#pragma unroll 1
    for (int t = at.first; t <= at.last; t += STEP) {
        v.advance();
        Coming<V> present = gate;
        gate.fetch(z, z_stride, walk);
        UNROLLED for (int i = 0; i < STEP; i++) {
            Floats<V> v_0, v_1, product = to_floats(present.pack[i]);
            v.convolve(i, v_0, v_1);
            UNROLLED for (int c = 0; c < V; c++)
                product.at[c] *= scale * half.mean(c, v_0, v_1) * sigmoid(product.at[c]);
            if (at.has(lines, t + i)) store(gated + present.at[i] * D, from_floats<Element>(product));
        }
        v.move_on();
    }
}

// With g = scale dgated: writes e = g silu(z) / 2, the gradient of what each direction puts out, over dgated,
// dz = g mean silu'(z), gated once more, e's sum over the line, and the means of v over the line
extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
pooled_gate_backward(const Element *__restrict__ u, i64 u_stride, const Element *__restrict__ z, i64 z_stride,
                     const Element *__restrict__ y, const float *__restrict__ weights,
                     const float *__restrict__ biases, const float *__restrict__ skip,
                     const float *__restrict__ scales, Element *__restrict__ dgated, Element *__restrict__ dz,
                     i64 dz_stride, Element *__restrict__ gated, Element *__restrict__ dy, Element *__restrict__ means,
                     i64 B, i64 D, i64 count, i64 length, i64 next, i64 next_line) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    Place at(lines, D);
    if (at.b >= B) return;
    i64 d = at.d, S = count + 1;
    Halves half(y + at.pooled_token * D + d, B * S * D, skip + d, D);
    Convolved<V> v(u + at.token * u_stride + d, u_stride, weights, biases, d, D, lines, at.first);
    Walk walk(lines, at.first), gradients(lines, at.first);
    Coming<V> gate, gradient;
    z += at.token * z_stride + d, dz += at.token * dz_stride + d;
    gated += at.token * D + d, dgated += at.token * D + d;
    gate.fetch(z, z_stride, walk);
    gradient.fetch(dgated, D, gradients);
    float scale = scales ? scales[at.b] : 1;
    Floats<V> sum = {}, sum_0 = {}, sum_1 = {};
#pragma unroll 1
    for (int t = at.first; t <= at.last; t += STEP) {
        v.advance();
        Coming<V> present = gate, present_gradient = gradient;
        gate.fetch(z, z_stride, walk);
        gradient.fetch(dgated, D, gradients);
        UNROLLED for (int i = 0; i < STEP; i++) {
            Floats<V> v_0, v_1, zs = to_floats(present.pack[i]), e = to_floats(present_gradient.pack[i]), product;
            v.convolve(i, v_0, v_1);
            UNROLLED for (int c = 0; c < V; c++) {
                float s = sigmoid(zs.at[c]), slope = silu_slope(zs.at[c], s), g = scale * e.at[c];
                float mean = half.mean(c, v_0, v_1);
                product.at[c] = scale * mean * zs.at[c] * s;
                e.at[c] = 0.5f * g * zs.at[c] * s;
                zs.at[c] = g * mean * slope;
            }
            if (!at.has(lines, t + i)) continue;
            i64 token = present.at[i];
            store(dgated + token * D, from_floats<Element>(e));
            store(dz + token * dz_stride, from_floats<Element>(zs));
            store(gated + token * D, from_floats<Element>(product));
            sum = sum + e, sum_0 = sum_0 + v_0, sum_1 = sum_1 + v_1;
        }
        v.move_on();
    }
    UNROLLED for (int c = 0; c < V; c++) sum_0.at[c] *= lines.share(at.pooled), sum_1.at[c] *= lines.share(at.pooled);
    dy += at.pooled_token * D + d, means += at.pooled_token * D + d;
    store(dy, from_floats<Element>(sum));
    store(means, from_floats<Element>(sum_0));
    store(means + B * S * D, from_floats<Element>(sum_1));
}
