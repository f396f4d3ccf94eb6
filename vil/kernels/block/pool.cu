// Means of v = silu(conv(u)) over each line of patches and for the class token, which a pooled block scans.
// The kernel also writes the sum of both directions' skip connections, skip_0 v_0 + skip_1 v_1, for each token.
// The gate needs no other function of v, so v of all tokens is never stored.
//
// pool.py declares the parameters of the kernel. Macros:
//   INPUT          element type of the tensors: bf16, fp16 or float
//   VECTOR         number of adjacent channels per thread, up to 4
//   PIECE          number of adjacent channels that a copy moves, a multiple of VECTOR
//   TAPS           length of the convolution's filter, whose last tap reads the current token
//   THREADS, CTAS  threads per CTA, and CTAs per multiprocessor
//
// B batch    S pooled tokens    D channels    count, length, next, next_line: lines.cuh
// stretch: number of consecutive lines that a CTA processes

#include "along_lines.cuh"

constexpr int GROUP = 8, LEAD = 4;  // tokens per group of copies, and tokens between the newest token and the current one
static_assert(BACK < LEAD);

constexpr int TABLE = SEGMENT + LEAD + DEPTH * GROUP;
typedef Ring<GROUP, 1>::Stage Stage;
typedef Pack<int, 4> Four;

extern "C" __global__ void __launch_bounds__(THREADS, CTAS) pool(PARAMETERS_pool) {
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    __shared__ Stage stages[THREADS / 32][DEPTH];
    __shared__ Four at[TABLE / 4];  // memory index of each token from LEAD tokens before a segment on, or -1
    __shared__ int ends[SEGMENT];  // pooled token whose last token the token is, or -1
    int groups = (D + THREADS * V - 1) / (THREADS * V), stretches = (count + stretch - 1) / stretch;
    unsigned part = blockIdx.x / groups % stretches;
    i64 b = blockIdx.x / groups / stretches;
    int c = blockIdx.x % groups * THREADS * V + threadIdx.x / 32 * WARP_CHANNELS;
    // token `begin` is the first token of the stretch, and the class token, if the class token precedes the first line
    int begin = lines.before(part * stretch), end = lines.before(min(count, (part + 1) * stretch));
    auto write_tables = [&](int segment) {
        __syncthreads();  // no thread uses the previous segment any more
        for (int i = threadIdx.x; i < min(TABLE, end - segment + (DEPTH + 1) * GROUP); i += THREADS) {
            int t = segment - LEAD + i;
            at[i / 4].at[i % 4] = t < end + BACK ? lines.at(t) : -1;
            if (i >= LEAD && i < LEAD + SEGMENT) ends[i - LEAD] = t < end && lines.is_last(t) ? lines.pooled(t) : -1;
        }
        __syncthreads();
    };
    write_tables(begin);
    int copied = c + Ring<GROUP, 1>::column();
    Ring<GROUP, 1> ring = {stages[threadIdx.x / 32], {{u + b * lines.tokens() * u_stride + copied, u_stride}}, copied < D};
    ring.start(at[0].at);
    int d = c + threadIdx.x % 32 * V;
    bool writes = d < D;
    d = min(d, int(D) - V);
    Filter<V> forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d);
    forward.scale(0.5f), backward.scale(0.5f);
    Floats<V> skip_0 = load<V>(skip + d), skip_1 = load<V>(skip + D + d), sum_0 = {}, sum_1 = {};
    Tokens<Element> to(skipped + b * lines.tokens() * D + d, D);
    Tokens<Element> mean(means + b * (count + 1) * D + d, D);
    i64 second = B * (count + 1) * D;
    auto put = [&](int pooled, Floats<V> x_0, Floats<V> x_1, float share) {
        UNROLLED for (int i = 0; i < V; i++) x_0.at[i] *= share, x_1.at[i] *= share;
        if (writes) store(mean.at(pooled), from_floats<Element>(x_0));
        if (writes) store(mean.at(pooled) + second, from_floats<Element>(x_1));
    };
    Floats<V> window[GROUP];  // u(t) has index (t - begin) % GROUP
    const auto &first = ring.next(at[0].at);
    UNROLLED for (int i = 0; i < GROUP; i++)
        window[(i + LEAD) % GROUP] = to_floats(load<V>(&first.at[0][i][threadIdx.x % 32 * V]));
    for (int segment = begin; segment < end; segment += SEGMENT) {
        if (segment != begin) write_tables(segment);
#pragma unroll 1
        for (int done = 0; done < SEGMENT && segment + done < end; done += GROUP) {
            const auto &group = ring.next(at[(done + GROUP) / 4].at);
            Pack<Element, V> news[4];
            Four here;
            int left = end - segment - done, to_center = lines.center() - segment - done;
            unsigned ending = __ballot_sync(WARP, ends[done + threadIdx.x % GROUP] >= 0);  // bit i: token i
            UNROLLED for (int i = 0; i < GROUP; i++) {
                if (i % 4 == 0) {
                    here = at[(done + LEAD + i) / 4];
                    UNROLLED for (int k = 0; k < 4; k++) news[k] = load<V>(&group.at[0][i + k][threadIdx.x % 32 * V]);
                }
                Floats<V> v_0 = forward.bias, v_1 = backward.bias, both;
                window[(i + LEAD) % GROUP] = to_floats(news[i % 4]);
                UNROLLED for (int k = 0; k < V; k++) {
                    UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                        v_0.at[k] = fmaf(forward.weight[tap][k], window[(i - BACK + tap + GROUP) % GROUP].at[k], v_0.at[k]);
                        v_1.at[k] = fmaf(backward.weight[tap][k], window[(i + BACK - tap) % GROUP].at[k], v_1.at[k]);
                    }
                    v_0.at[k] = silu_of_half(Element{}, v_0.at[k]), v_1.at[k] = silu_of_half(Element{}, v_1.at[k]);
                    both.at[k] = fmaf(skip_0.at[k], v_0.at[k], skip_1.at[k] * v_1.at[k]);
                }
                if (i < left && writes) store(to.at(here.at[i % 4]), from_floats<Element>(both));
                if (!(ending >> i & 1))
                    sum_0 = sum_0 + v_0, sum_1 = sum_1 + v_1;
                else if (i == to_center)
                    put(lines.class_token(), v_0, v_1, 1);
                else
                    put(ends[done + i], sum_0 + v_0, sum_1 + v_1, 1.f / length), sum_0 = sum_1 = {};
            }
        }
    }
    wait_for_copies<0>();
}
