// Gradients of a pooled block's convolutions and skip connections.
// For token t of line l, e(t) is the gradient of the output of either direction.
// dmean_g(l) is the gradient of the line's mean of v_g, and share is 1 / length, or 1 for the class token.
// With BACK = TAPS - 1:
//
//   dv_g(t) = skip_g e(t) + share(l) dmean_g(l)
//   s_g(t) = silu'(conv_g(t)) dv_g(t)                dskip_g = sum_t e(t) v_g(t)
//   du(t) = sum_i weight_0[i] s_0(t + BACK - i) + weight_1[i] s_1(t - BACK + i)
//   dweight_0[i] = sum_t u(t) s_0(t + BACK - i)      dbias_g = sum_t s_g(t)
//   dweight_1[i] = sum_t u(t) s_1(t - BACK + i)
//
// Macros and letters are the same as in pool.cu.
// stretch: number of tokens that a CTA processes at a time, a multiple of 4 up to SEGMENT    parts: CTAs per channel
//
// pooled_conv_backward.py declares the parameters of the kernel.

#include "along_lines.cuh"

constexpr int V = VECTOR, RING = 4;
static_assert(BACK < RING);

// Length of two tables per stretch: positions of tokens, and pooled tokens. Tables start RING tokens early.
constexpr int NUMBERS = SEGMENT + 3 * RING;

// Prefetched tokens of u and e.
struct Arriving {
    Tokens<const Element> u, e;
    struct Token {
        Pack<Element, V> u, e;
    } token[RING];
    INLINE void fetch(int number, int at) {
        token[number % RING] = {};
        if (at >= 0) token[number % RING] = {load<V>(u.at(at)), load<V>(e.at(at))};
    }
};

// Gradient that the tokens of a line receive from the line's mean: share dmean_g, or zero outside the image.
struct OfLine {
    const Element *mean_0, *mean_1;
    int D, line = -1;
    Floats<V> from_mean_0 = {}, from_mean_1 = {};
    INLINE void read(int now, float share) {
        line = now;
        Pack<Element, V> packs[2] = {};
        if (line >= 0) packs[0] = load<V>(mean_0 + i64(line) * D), packs[1] = load<V>(mean_1 + i64(line) * D);
        from_mean_0 = to_floats(packs[0]), from_mean_1 = to_floats(packs[1]);
        UNROLLED for (int c = 0; c < V; c++) from_mean_0.at[c] *= share, from_mean_1.at[c] *= share;
    }
};

// Ring buffers of u, e, dv_1 and s_0 for tokens t to t + BACK, and of s_1 for tokens t - BACK to t.
// s_0 and s_1 are doubled and filters are halved, as silu_and_slope requires.
struct Window {
    Floats<V> u[RING], e[RING], dv_1[RING], s_0[RING] = {}, s_1[RING] = {};
};

// Returns dv of one direction.
DEVICE Floats<V> gradient(const Floats<V> &skip, const Floats<V> &e, const Floats<V> &from_mean) {
    Floats<V> dv;
    UNROLLED for (int c = 0; c < V; c++) dv.at[c] = fmaf(skip.at[c], e.at[c], from_mean.at[c]);
    return dv;
}

// A thread processes one stretch after another.
// In the step for token t, a thread computes du and direction 1 at token t, but direction 0 at token t + BACK.
// Therefore all terms of du(t) are known in the step for token t.
// A thread starts RING tokens before its stretch, without stores and sums, to compute the first values of s_0 and s_1.
// Threads share no sums: each thread writes its own partial sums.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) pooled_conv_backward(PARAMETERS_pooled_conv_backward) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    int groups = (D + THREADS * V - 1) / (THREADS * V), part = blockIdx.x / groups;
    i64 d = (blockIdx.x % groups * THREADS + threadIdx.x) * i64(V);
    bool writes = d < D;
    d = min(d, D - V);
    __shared__ int at[NUMBERS], pooled[NUMBERS];
    int L = lines.tokens(), stretches = (L + stretch - 1) / stretch, items = B * stretches;
    i64 S = count + 1;
    float line_share = 1.f / length;
    Filter<V> forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d);
    forward.scale(0.5f), backward.scale(0.5f);
    Floats<V> skip_0 = load<V>(skip + d), skip_1 = load<V>(skip + D + d), dskip_0 = {}, dskip_1 = {};
    Floats<V> dforward[TAPS + 1] = {}, dbackward[TAPS + 1] = {};
#pragma unroll 1
    for (int item = part; item < items; item += parts) {
        i64 b = item / stretches;
        int begin = item % stretches * int(stretch), end = min(L, begin + int(stretch));
        __syncthreads();  // no thread uses the previous stretch any more
        for (int i = threadIdx.x; i < NUMBERS; i += THREADS) {
            int t = begin - RING + i;
            at[i] = lines.at(t), pooled[i] = at[i] < 0 ? -1 : lines.pooled(t);
        }
        __syncthreads();
        const Element *mean = dmeans + b * S * D + d;
        Arriving arriving = {{u + b * L * u_stride + d, u_stride}, {e + b * L * D + d, D}};
        OfLine of_line = {mean, mean + B * S * D, int(D)};
        Window window;
        UNROLLED for (int i = 0; i < RING; i++) arriving.fetch(i, at[i]);
        // Adds token `number` to the ring buffers at index i, and returns dv_0.
        auto arrive = [&](int number, int i) {
            auto token = arriving.token[i % RING];
            arriving.fetch(i, at[number + RING]);
            if (int now = pooled[number]; now != of_line.line)
                of_line.read(now, now == lines.class_token() ? 1.f : line_share);
            window.u[i % RING] = to_floats(token.u), window.e[i % RING] = to_floats(token.e);
            window.dv_1[i % RING] = gradient(skip_1, window.e[i % RING], of_line.from_mean_1);
            return gradient(skip_0, window.e[i % RING], of_line.from_mean_0);
        };
        UNROLLED for (int i = 0; i < BACK; i++) arrive(i, i);
        Tokens<Element> to(du + b * L * du_stride + d, du_stride);
        // Advances by RING tokens.
        // A stretch sums e v_1 over its own tokens, but e v_0 over the tokens that are BACK tokens later.
        // The first stretch of an image therefore adds e v_0 of the image's first BACK tokens, too.
        auto go = [&](int number, bool here) {
            UNROLLED for (int i = 0; i < RING; i++) {
                Floats<V> dv_0 = arrive(number + i + BACK, i + BACK), sum = {}, v_1;
                int lead = (i + BACK) % RING;
                UNROLLED for (int c = 0; c < V; c++) {
                    float h_0 = forward.bias.at[c], h_1 = backward.bias.at[c];
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        h_0 = fmaf(forward.weight[tap][c], window.u[(lead - BACK + tap + RING) % RING].at[c], h_0);
                        h_1 = fmaf(backward.weight[tap][c], window.u[(i + BACK - tap) % RING].at[c], h_1);
                    }
                    SiluOfHalf of_0 = silu_and_slope(Element{}, h_0), of_1 = silu_and_slope(Element{}, h_1);
                    window.s_0[lead].at[c] = dv_0.at[c] * of_0.twice_slope;
                    window.s_1[i].at[c] = window.dv_1[i].at[c] * of_1.twice_slope;
                    v_1.at[c] = of_1.value;
                    if (here || begin == 0) dskip_0.at[c] = fmaf(window.e[lead].at[c], of_0.value, dskip_0.at[c]);
                }
                if (!here) continue;
                UNROLLED for (int c = 0; c < V; c++) {
                    dskip_1.at[c] = fmaf(window.e[i].at[c], v_1.at[c], dskip_1.at[c]);
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        float after = window.s_0[(i + BACK - tap) % RING].at[c];
                        float before = window.s_1[(i - BACK + tap + RING) % RING].at[c];
                        dforward[tap].at[c] = fmaf(window.u[i].at[c], after, dforward[tap].at[c]);
                        dbackward[tap].at[c] = fmaf(window.u[i].at[c], before, dbackward[tap].at[c]);
                        sum.at[c] = fmaf(forward.weight[tap][c], after, sum.at[c]);
                        sum.at[c] = fmaf(backward.weight[tap][c], before, sum.at[c]);
                    }
                    dforward[TAPS].at[c] += window.s_0[i].at[c];
                    dbackward[TAPS].at[c] += window.s_1[i].at[c];
                }
                int token = at[number + i];
                if (token >= 0 && writes) store(to.at(token), from_floats<Element>(sum));
            }
        };
        go(0, false);
#pragma unroll 1
        for (int t = begin; t < end; t += RING) go(t - begin + RING, true);
    }
    if (!writes) return;
    dfilters += part * (2 * (TAPS + 1) * D) + d, dskips += part * (2 * D) + d;
    UNROLLED for (int tap = 0; tap <= TAPS; tap++) {
        UNROLLED for (int c = 0; c < V; c++) dforward[tap].at[c] *= 0.5f, dbackward[tap].at[c] *= 0.5f;
        store(dfilters + tap * D, dforward[tap]);
        store(dfilters + (TAPS + 1 + tap) * D, dbackward[tap]);
    }
    store(dskips, dskip_0);
    store(dskips + D, dskip_1);
}
