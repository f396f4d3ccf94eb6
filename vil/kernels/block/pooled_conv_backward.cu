// Gradients of a pooled block's convolutions and skip connections.
// For token t of line l, dy(t) is the gradient of the output of either direction.
// dmean_g(l) is the gradient of the line's mean of v_g, and share is 1 / length, or 1 for the class token.
// All tokens of a line receive the same gradient from the line's mean, so the kernel needs no means.
// With BACK = TAPS - 1:
//
//   dv_g(t) = skip_g dy(t) + share(l) dmean_g(l)
//   s_g(t) = silu'(conv_g(t)) dv_g(t)                dskip_g = sum_t dy(t) v_g(t)
//   du(t) = sum_i weight_0[i] s_0(t + BACK - i) + weight_1[i] s_1(t - BACK + i)
//   dweight_0[i] = sum_t u(t) s_0(t + BACK - i)      dbias_g = sum_t s_g(t)
//   dweight_1[i] = sum_t u(t) s_1(t - BACK + i)
//
// Macros and letters are the same as in pool.cu.
// stretch: number of tokens that a CTA processes at a time, a multiple of GROUP up to SEGMENT    parts: CTAs per channel
//
// pooled_conv_backward.py declares the parameters of the kernel.

#include "along_lines.cuh"

constexpr int GROUP = 4, DEPTH = 8 / sizeof(Element);  // number of tokens per step, and of groups in a ring buffer
static_assert(BACK < GROUP);
typedef Ring<GROUP, DEPTH, 2> Copies;
typedef Copies::Stage Stage;

// A step for tokens t to t + GROUP - 1 reads the group of copies that starts with token t + BACK.
// The tables start two groups before the group that the first step with stores reads.
constexpr int BEFORE = 2 * GROUP - BACK, TABLE = SEGMENT + (DEPTH + 2) * GROUP;

// Gradients that the tokens of a line receive from the line's means: share dmean_g, or zero outside the image.
// The gradients of the next line are prefetched.
struct OfLine {
    Tokens<const Element> mean_0;
    i64 second;  // distance from the means of direction 0 to the means of direction 1, in elements
    float share;
    int expected = -1;
    Pack<Element, V> packs[2];
    Floats<V> from_mean_0 = {}, from_mean_1 = {};
    INLINE void fetch(int pooled) {
        expected = pooled;
        packs[0] = load<V>(mean_0.at(pooled)), packs[1] = load<V>(mean_0.at(pooled) + second);
    }
    INLINE void enter(const Lines &lines, int pooled) {
        if (pooled < 0) {
            from_mean_0 = from_mean_1 = {};
            return;
        }
        if (pooled != expected) fetch(pooled);
        from_mean_0 = to_floats(packs[0]), from_mean_1 = to_floats(packs[1]);
        float factor = pooled == lines.class_token() ? 1 : share;
        UNROLLED for (int c = 0; c < V; c++) from_mean_0.at[c] *= factor, from_mean_1.at[c] *= factor;
        fetch(min(pooled + 1, lines.count));
    }
};

// Ring buffers of u, dy, dv_1 and s_0 for tokens t to t + BACK, and of s_1 for tokens t - BACK to t.
// s_0 and s_1 are doubled and filters are halved, as silu_and_slope requires.
struct Window {
    Floats<V> u[GROUP], dy[GROUP], dv_1[GROUP], s_0[GROUP] = {}, s_1[GROUP] = {};
};

// Returns dv of one direction.
DEVICE Floats<V> gradient(const Floats<V> &skip, const Floats<V> &dy, const Floats<V> &from_mean) {
    Floats<V> dv;
    UNROLLED for (int c = 0; c < V; c++) dv.at[c] = fmaf(skip.at[c], dy.at[c], from_mean.at[c]);
    return dv;
}

// A thread processes one stretch after another.
// In the step for token t, a thread computes du and direction 1 at token t, but direction 0 at token t + BACK.
// Therefore all terms of du(t) are known in the step for token t.
// A thread starts GROUP tokens before its stretch, without stores and sums, to compute the first values of s_0 and s_1.
// Threads share no sums: each thread writes its own partial sums.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) pooled_conv_backward(PARAMETERS_pooled_conv_backward) {
    begin_kernel();
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    __shared__ Stage stages[THREADS / 32][DEPTH];
    __shared__ Four at[TABLE / 4];  // memory index of each token, or -1 outside of the image
    __shared__ Four pooled[TABLE / 4];  // index of each token's pooled token, or -1
    int groups = (int(D) + THREADS * V - 1) / (THREADS * V), part = blockIdx.x / groups;
    Channels channels(blockIdx.x % groups, D);
    int d = channels.d, copied = channels.warp + Copies::column();
    int L = lines.tokens(), stretches = (L + int(stretch) - 1) / int(stretch), items = B * stretches;
    i64 S = count + 1;
    Filter<V> forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d);
    forward.scale(0.5f), backward.scale(0.5f);
    Floats<V> skip_0 = load<V>(skip + d), skip_1 = load<V>(skip + D + d), dskip_0 = {}, dskip_1 = {};
    Floats<V> dforward[TAPS + 1] = {}, dbackward[TAPS + 1] = {};
#pragma unroll 1
    for (int item = part; item < items; item += parts) {
        i64 b = item / stretches;
        int begin = item % stretches * int(stretch), end = min(L, begin + int(stretch));
        write_tables(at, pooled, TABLE, lines, begin - BEFORE, end + BACK - 1, [&](int t) { return lines.pooled(t); });
        Tokens<const Element> from_u(u + b * L * u_stride + copied, u_stride), from_dy(dy + b * L * D + copied, D);
        Copies ring = {stages[threadIdx.x / 32], {from_u, from_dy}, copied < D};
        ring.start(at[0].at);
        OfLine of_line = {{dmeans + b * S * D + d, D}, B * S * D, 1.f / length};
        int line = -1;
        Window window;
        // Adds token `i` of a group to the ring buffers at index `to`, and returns dv_0.
        auto arrive = [&](const Stage &group, int i, int now, int to) {
            window.u[to] = to_floats(load<V>(own(group.at[0][i])));
            window.dy[to] = to_floats(load<V>(own(group.at[1][i])));
            if (now != line) of_line.enter(lines, line = now);
            window.dv_1[to] = gradient(skip_1, window.dy[to], of_line.from_mean_1);
            return gradient(skip_0, window.dy[to], of_line.from_mean_0);
        };
        const Stage &ahead = ring.next(at[0].at);
        UNROLLED for (int i = 0; i < BACK; i++) arrive(ahead, GROUP - BACK + i, pooled[0].at[GROUP - BACK + i], i);
        Tokens<Element> to(du + b * L * du_stride + d, du_stride);
        // Advances by GROUP tokens, where `number` is the index of a group of copies.
        // A stretch sums dy v_1 over its own tokens, but dy v_0 over the tokens that are BACK tokens later.
        // The first stretch of an image therefore adds dy v_0 of the image's first BACK tokens, too.
        auto go = [&](int number, bool here) {
            const Stage &group = ring.next(at[number].at);
            Four now = pooled[number];
            const int *stored = at[number - 1].at + GROUP - BACK;
            UNROLLED for (int i = 0; i < GROUP; i++) {
                int lead = (i + BACK) % GROUP;
                Floats<V> dv_0 = arrive(group, i, now.at[i], lead), sum = {}, v_1;
                UNROLLED for (int c = 0; c < V; c++) {
                    float h_0 = forward.bias.at[c], h_1 = backward.bias.at[c];
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        h_0 = fmaf(forward.weight[tap][c], window.u[(lead - BACK + tap + GROUP) % GROUP].at[c], h_0);
                        h_1 = fmaf(backward.weight[tap][c], window.u[(i + BACK - tap) % GROUP].at[c], h_1);
                    }
                    SiluOfHalf of_0 = silu_and_slope(Element{}, h_0), of_1 = silu_and_slope(Element{}, h_1);
                    window.s_0[lead].at[c] = fmaf(dv_0.at[c], of_0.twice_slope_less_1, dv_0.at[c]);
                    window.s_1[i].at[c] = fmaf(window.dv_1[i].at[c], of_1.twice_slope_less_1, window.dv_1[i].at[c]);
                    v_1.at[c] = of_1.value;
                    if (here || begin == 0) dskip_0.at[c] = fmaf(window.dy[lead].at[c], of_0.value, dskip_0.at[c]);
                }
                if (!here) continue;
                UNROLLED for (int c = 0; c < V; c++) {
                    dskip_1.at[c] = fmaf(window.dy[i].at[c], v_1.at[c], dskip_1.at[c]);
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        float after = window.s_0[(i + BACK - tap) % GROUP].at[c];
                        float before = window.s_1[(i - BACK + tap + GROUP) % GROUP].at[c];
                        dforward[tap].at[c] = fmaf(window.u[i].at[c], after, dforward[tap].at[c]);
                        dbackward[tap].at[c] = fmaf(window.u[i].at[c], before, dbackward[tap].at[c]);
                        sum.at[c] = fmaf(forward.weight[tap][c], after, sum.at[c]);
                        sum.at[c] = fmaf(backward.weight[tap][c], before, sum.at[c]);
                    }
                    dforward[TAPS].at[c] += window.s_0[i].at[c];
                    dbackward[TAPS].at[c] += window.s_1[i].at[c];
                }
                int token = stored[i];
                if (token >= 0 && channels.writes) store(to.at(token), from_floats<Element>(sum));
            }
        };
        go(1, false);
#pragma unroll 1
        for (int number = 2; begin + (number - 2) * GROUP < end; number++) go(number, true);
        ring.finish();
    }
    if (!channels.writes) return;
    dfilters += part * (2 * (TAPS + 1) * D) + d, dskips += part * (2 * D) + d;
    UNROLLED for (int tap = 0; tap <= TAPS; tap++) {
        UNROLLED for (int c = 0; c < V; c++) dforward[tap].at[c] *= 0.5f, dbackward[tap].at[c] *= 0.5f;
        store(dfilters + tap * D, dforward[tap]);
        store(dfilters + (TAPS + 1 + tap) * D, dbackward[tap]);
    }
    store(dskips, dskip_0);
    store(dskips + D, dskip_1);
}
