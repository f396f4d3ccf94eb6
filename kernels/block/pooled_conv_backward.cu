// The gradients of a pooled block's convolutions and skips. Token t of line l, of which e(t) is the gradient of what
// either direction puts out and dmean_g(l) that of the line's mean of v_g, with BACK = TAPS - 1:
//
//   dv_g(t) = skip_g e(t) + share(l) dmean_g(l)      share: 1 / length, or 1 of the class token
//   s_g(t) = silu'(conv_g(t)) dv_g(t)                dskip_g = sum_t e(t) v_g(t)
//   du(t) = sum_i weight_0[i] s_0(t + BACK - i) + weight_1[i] s_1(t - BACK + i)
//   dweight_0[i] = sum_t u(t) s_0(t + BACK - i)      dbias_g = sum_t s_g(t)
//   dweight_1[i] = sum_t u(t) s_1(t - BACK + i)
//
// Macros and letters: pool.cu, with up to 2 neighbouring channels
// stretch: tokens that a thread takes at a time, a multiple of STEP    parts: threads of each channel

#include "lines.cuh"

constexpr int WARPS = 4, V = VECTOR;

// u, e and dv of one direction, of token t + i or, with BACK, of that ahead of it
struct Window {
    Floats<V> u[BACK + STEP], e[BACK + STEP], dv_1[BACK + STEP], s_0[BACK + STEP] = {}, s_1[BACK + STEP] = {};
    INLINE void move_on() {
        UNROLLED for (int i = 0; i < BACK; i++) {
            u[i] = u[i + STEP], e[i] = e[i + STEP], dv_1[i] = dv_1[i + STEP];
            s_0[i] = s_0[i + STEP], s_1[i] = s_1[i + STEP];
        }
    }
};

// Tokens on their way: u, e, and the gradients of both means, already shared
struct Arriving {
    const Element *u, *e, *dmeans;
    i64 u_stride, D, direction;
    Walk walk;
    struct Token {
        Pack<Element, V> u, e, dmean_0, dmean_1;
        float share;
    };
    INLINE Token fetch() {
        int pooled, at = walk.next(pooled);
        if (at < 0) return {};
        const Element *mean = dmeans + pooled * D;
        return {load<V>(u + at * u_stride), load<V>(e + at * D), load<V>(mean), load<V>(mean + direction),
                walk.lines.share(pooled)};
    }
};

// A thread takes stretch after stretch. Its step at t is at t for du and direction 1, and BACK tokens ahead in direction
// 0, because that is when everything for du(t) is known. A stretch begins STEP tokens early, without storing or summing,
// to fill s_0 and s_1. Nothing is shared: each thread writes its part of the sums.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)
pooled_conv_backward(const Element *__restrict__ u, i64 u_stride, const Element *__restrict__ e,
                     const Element *__restrict__ dmeans, const float *__restrict__ weights,
                     const float *__restrict__ biases, const float *__restrict__ skip, Element *__restrict__ du,
                     i64 du_stride, float *__restrict__ dfilters, float *__restrict__ dskips, i64 B, i64 D, i64 count,
                     i64 length, i64 next, i64 next_line, i64 stretch, i64 parts) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    i64 thread = blockIdx.x * i64(32 * WARPS) + threadIdx.x, d = thread % (D / V) * V, part = thread / (D / V);
    if (part >= parts) return;
    int L = lines.tokens(), stretches = (L + stretch - 1) / stretch;
    i64 S = count + 1;
    Filter<V> forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d);
    Floats<V> skip_0 = load<V>(skip + d), skip_1 = load<V>(skip + D + d), dskip_0 = {}, dskip_1 = {};
    Floats<V> dforward[TAPS + 1] = {}, dbackward[TAPS + 1] = {};
#pragma unroll 1
    for (i64 item = part; item < B * stretches; item += parts) {
        i64 b = item / stretches;
        int begin = item % stretches * stretch, end = min(L, begin + int(stretch));
        Arriving arriving = {u + b * L * u_stride + d, e + b * L * D + d, dmeans + b * S * D + d, u_stride, D,
                             B * S * D, Walk(lines, begin - STEP)};
        Window window;
        UNROLLED for (int i = 0; i < BACK; i++) {
            auto token = arriving.fetch();
            window.u[i] = to_floats(token.u), window.e[i] = to_floats(token.e);
            Floats<V> dmean_1 = to_floats(token.dmean_1);
            UNROLLED for (int c = 0; c < V; c++)
                window.dv_1[i].at[c] = fmaf(skip_1.at[c], window.e[i].at[c], token.share * dmean_1.at[c]);
        }
        Arriving::Token coming[STEP];
        UNROLLED for (int i = 0; i < STEP; i++) coming[i] = arriving.fetch();
        Walk own(lines, begin);
        Element *dus = du + b * L * du_stride + d;
#pragma unroll 1
        for (int t = begin - STEP; t < end; t += STEP) {
            Floats<V> dv_0[STEP];
            UNROLLED for (int i = 0; i < STEP; i++) {
                auto token = coming[i];
                window.u[BACK + i] = to_floats(token.u), window.e[BACK + i] = to_floats(token.e);
                Floats<V> dmean_0 = to_floats(token.dmean_0), dmean_1 = to_floats(token.dmean_1);
                UNROLLED for (int c = 0; c < V; c++) {
                    float gradient = window.e[BACK + i].at[c];
                    dv_0[i].at[c] = fmaf(skip_0.at[c], gradient, token.share * dmean_0.at[c]);
                    window.dv_1[BACK + i].at[c] = fmaf(skip_1.at[c], gradient, token.share * dmean_1.at[c]);
                }
            }
            UNROLLED for (int i = 0; i < STEP; i++) coming[i] = arriving.fetch();
            UNROLLED for (int i = 0; i < STEP; i++) {
                bool ahead = t + BACK + i >= begin && t + BACK + i < end, here = t >= begin;
                Floats<V> sum = {};
                UNROLLED for (int c = 0; c < V; c++) {
                    float x_0 = forward.bias.at[c], x_1 = backward.bias.at[c];
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        x_0 = fmaf(forward.weight[tap][c], window.u[i + tap].at[c], x_0);
                        x_1 = fmaf(backward.weight[tap][c], window.u[i + BACK - tap].at[c], x_1);
                    }
                    float sigmoid_0 = sigmoid(x_0), sigmoid_1 = sigmoid(x_1);
                    window.s_0[BACK + i].at[c] = dv_0[i].at[c] * silu_slope(x_0, sigmoid_0);
                    window.s_1[BACK + i].at[c] = window.dv_1[i].at[c] * silu_slope(x_1, sigmoid_1);
                    if (ahead) dskip_0.at[c] = fmaf(window.e[BACK + i].at[c], x_0 * sigmoid_0, dskip_0.at[c]);
                    if (!here) continue;
                    dskip_1.at[c] = fmaf(window.e[i].at[c], x_1 * sigmoid_1, dskip_1.at[c]);
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        float after = window.s_0[i + BACK - tap].at[c], before = window.s_1[i + tap].at[c];
                        dforward[tap].at[c] = fmaf(window.u[i].at[c], after, dforward[tap].at[c]);
                        dbackward[tap].at[c] = fmaf(window.u[i].at[c], before, dbackward[tap].at[c]);
                        sum.at[c] = fmaf(forward.weight[tap][c], after, sum.at[c]);
                        sum.at[c] = fmaf(backward.weight[tap][c], before, sum.at[c]);
                    }
                    dforward[TAPS].at[c] += window.s_0[i].at[c];
                    dbackward[TAPS].at[c] += window.s_1[BACK + i].at[c];
                }
                if (here) {
                    int at = own.next();
                    if (at >= 0) store(dus + at * du_stride, from_floats<Element>(sum));
                }
            }
            window.move_on();
        }
    }
    dfilters += part * 2 * (TAPS + 1) * D + d, dskips += part * 2 * D + d;
    UNROLLED for (int tap = 0; tap <= TAPS; tap++) {
        store(dfilters + tap * D, dforward[tap]);
        store(dfilters + (TAPS + 1 + tap) * D, dbackward[tap]);
    }
    store(dskips, dskip_0);
    store(dskips + D, dskip_1);
}
