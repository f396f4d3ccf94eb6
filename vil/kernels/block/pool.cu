// Means of v = silu(conv(u)) over each line of patches, and v of the class token, which a pooled block scans.
// The kernel also writes the sum of both directions' skip connections, skip_0 v_0 + skip_1 v_1, for each token.
// The gate needs no other function of v, so v of all tokens is never stored.
//
// pool.py declares the parameters of the kernel. Macros:
//   INPUT          element type of the tensors: bf16, fp16 or float
//   VECTOR         number of adjacent channels per thread, up to 2
//   PIECE          number of adjacent channels per copy to shared memory, a multiple of VECTOR
//   SEGMENT        number of tokens per table of memory indices
//   TAPS           length of the convolution's filter, whose last tap reads the current token
//   THREADS, CTAS  threads per CTA, and CTAs per multiprocessor
//
// B batch    S pooled tokens    D channels    count, length, next, next_line: lines.cuh
// lines_per_cta: number of consecutive lines that a CTA processes, the CTA's stretch

#include "along_lines.cuh"

// Number of tokens per group of copies, and distance between the newest token in registers and the current token.
constexpr int GROUP = 8, LEAD = 4;
static_assert(BACK < LEAD);
constexpr int DEPTH = 2, TABLE = SEGMENT + LEAD + DEPTH * GROUP;
typedef Ring<GROUP, DEPTH, 1> Copies;
typedef Copies::Stage Stage;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) pool(PARAMETERS_pool) {
    begin_kernel();
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    __shared__ Stage stages[THREADS / 32][DEPTH];
    __shared__ Four at[TABLE / 4];  // memory index of each token, or -1
    __shared__ Four ends[TABLE / 4];  // index of the pooled token that ends at each token, or -1
    int groups = (int(D) + THREADS * V - 1) / (THREADS * V), stretches = (int(count) + int(lines_per_cta) - 1) / int(lines_per_cta);
    int item = blockIdx.x / groups, first_line = item % stretches * int(lines_per_cta);
    i64 b = item / stretches, L = lines.tokens(), S = count + 1;
    Channels channels(blockIdx.x % groups, D);
    int d = channels.d, copied = channels.warp + Copies::column();
    Filter<V> forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d);
    Floats<V> skip_0 = load<V>(skip + d), skip_1 = load<V>(skip + D + d), sum_0 = {}, sum_1 = {};
    int begin = lines.before(first_line), end = lines.before(min(first_line + int(lines_per_cta), lines.count));
    auto write = [&](int segment) {
        write_tables(at, ends, min(TABLE, end - segment + (DEPTH + 1) * GROUP), lines, segment - LEAD, end + BACK - 1,
                     [&](int t) {
                         int pooled = lines.pooled(t);
                         return t < end && t == lines.last(pooled) ? pooled : -1;
                     });
    };
    write(begin);
    Copies ring = {stages[threadIdx.x / 32], {{u + b * L * u_stride + copied, u_stride}}, copied < D};
    ring.start(at[0].at);
    forward.scale(0.5f), backward.scale(0.5f);
    Tokens<Element> to(skipped + b * L * D + d, D), mean(means + b * S * D + d, D);
    // Stores the means of a pooled token, which are x_0 and x_1 times `share`.
    auto put = [&](int pooled, Floats<V> x_0, Floats<V> x_1, float share) {
        UNROLLED for (int c = 0; c < V; c++) x_0.at[c] *= share, x_1.at[c] *= share;
        if (channels.writes) store(mean.at(pooled), from_floats<Element>(x_0));
        if (channels.writes) store(mean.at(pooled) + B * S * D, from_floats<Element>(x_1));
    };
    float share = 1.f / length;
    Floats<V> window[GROUP];  // ring buffer: u of token begin + i has index i % GROUP
    const Stage &first = ring.next(at[0].at);
    UNROLLED for (int i = 0; i < GROUP; i++) window[(i + LEAD) % GROUP] = to_floats(load<V>(own(first.at[0][i])));
    int segment = begin;
    do {
        if (segment != begin) write(segment);
#pragma unroll 1
        for (int done = 0; done < SEGMENT && segment + done < end; done += GROUP) {
            const Stage &group = ring.next(at[(done + GROUP) / 4].at);
            const int *here = ends[(done + LEAD) / 4].at;
            // Bit i of `ending` is set if a pooled token ends at token i of the group.
            unsigned ending = __ballot_sync(WARP, here[threadIdx.x % GROUP] >= 0);
            int left = end - segment - done, to_center = lines.center() - segment - done;
            Four index;
            Pack<Element, V> news[4];
            Floats<V> v_0[2], v_1[2], skipped;
            // Adds token i to the sums, and stores the means if a pooled token ends at token i.
            // The sums of a line with the class token inside continue after the class token.
            // Tokens after the stretch are added, too, but their sums are never stored.
            auto add = [&](int i) {
                if (!(ending >> i & 1))
                    sum_0 = sum_0 + v_0[i % 2], sum_1 = sum_1 + v_1[i % 2];
                else if (i == to_center)
                    put(lines.class_token(), v_0[i % 2], v_1[i % 2], 1);
                else
                    put(here[i], sum_0 + v_0[i % 2], sum_1 + v_1[i % 2], share), sum_0 = sum_1 = {};
            };
            UNROLLED for (int i = 0; i < GROUP; i++) {
                if (i % 4 == 0) {
                    index = at[(done + LEAD + i) / 4];
                    UNROLLED for (int k = 0; k < 4; k++) news[k] = load<V>(own(group.at[0][i + k]));
                }
                window[(i + LEAD) % GROUP] = to_floats(news[i % 4]);
                UNROLLED for (int c = 0; c < V; c++) {
                    float h_0 = forward.bias.at[c], h_1 = backward.bias.at[c];
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        h_0 = fmaf(forward.weight[tap][c], window[(i - BACK + tap + GROUP) % GROUP].at[c], h_0);
                        h_1 = fmaf(backward.weight[tap][c], window[(i + BACK - tap) % GROUP].at[c], h_1);
                    }
                    h_0 = silu_of_half(Element{}, h_0), h_1 = silu_of_half(Element{}, h_1);
                    v_0[i % 2].at[c] = h_0, v_1[i % 2].at[c] = h_1;
                    skipped.at[c] = fmaf(skip_0.at[c], h_0, skip_1.at[c] * h_1);
                }
                if (i < left && channels.writes) store(to.at(index.at[i % 4]), from_floats<Element>(skipped));
                if (i % 2 == 0) continue;
                if (ending >> (i - 1) & 3)
                    add(i - 1), add(i);
                else
                    sum_0 = sum_0 + v_0[0] + v_0[1], sum_1 = sum_1 + v_1[0] + v_1[1];
            }
        }
        segment += SEGMENT;
    } while (segment < end);
    ring.finish();
}
