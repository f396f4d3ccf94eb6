// A block's convolutions v = silu(conv(u)) without projections, for the first H tokens in each direction's order.
// conv_xproj.cu computes convolutions and projections in one kernel.
// Direction 0 reads tokens from the first to the last, and direction 1 from the last to the first.
// With BACK = TAPS - 1:
//
//   conv_0(t) = bias_0 + sum_i weight_0[i] u(t - BACK + i)       v_g(t) = silu(conv_g(t))
//   conv_1(t) = bias_1 + sum_i weight_1[i] u(t + BACK - i)
//
// conv.py declares the parameters of the kernel. Macros:
//   INPUT   element type of the tensors: bf16, fp16 or float
//   VECTOR  number of adjacent channels that one instruction can copy, up to 16 bytes; a thread processes at most 4
//   TAPS    length of the convolution's filter, whose last tap reads the current token
//
// B batch    L tokens    D channels    stretch: number of tokens of a sequence per thread, a multiple of 4

#include "filter.cuh"
#include "silu.cuh"

constexpr int WARPS = 4;

// A thread processes V channels of a stretch of tokens, and adjacent threads have adjacent channels.
// Both directions use the same window of u, where window[i] is u(t - BACK + i).
// For token t + i, direction 0 reads window[i] to window[i + BACK].
// For token t + i, direction 1 reads window[i + BACK] to window[i + 2 BACK].
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) conv(PARAMETERS_conv) {
    begin_kernel();
    constexpr int V = VECTOR < 4 ? VECTOR : 4;
    i64 stretches = (L + stretch - 1) / stretch, thread = blockIdx.x * i64(32 * WARPS) + threadIdx.x;
    i64 d = thread % (D / V) * V, b = thread / (D / V) / stretches;
    if (b >= B) return;
    int begin = thread / (D / V) % stretches * stretch, end = min(L, begin + stretch), stride = u_stride;
    Filter<V> forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d);
    u += (b * L + begin) * stride + d;
    int end_0 = min(end, int(H)), begin_1 = L - H;
    Element *v_0 = v + (b * H + begin) * D + d, *v_1 = v_0 + (B * H - begin_1) * D;

    Floats<V> window[2 * BACK + STEP];
    InFlight<V, 2 * BACK> first;
    InFlight<V, STEP> next;
    first.fetch(u - i64(BACK) * stride, stride, begin - BACK, L);
    u += i64(BACK) * stride;
    next.fetch(u, stride, begin + BACK, L);
    UNROLLED for (int i = 0; i < 2 * BACK; i++) window[i] = to_floats(first.token[i]);
#pragma unroll 1
    for (int t = begin; t < end; t += STEP) {
        UNROLLED for (int i = 0; i < STEP; i++) window[2 * BACK + i] = to_floats(next.token[i]);
        u += i64(STEP) * stride;
        next.fetch(u, stride, t + STEP + BACK, L);
        UNROLLED for (int i = 0; i < STEP; i++) {
            Floats<V> sum_0 = forward.bias, sum_1 = backward.bias;
            UNROLLED for (int c = 0; c < V; c++) {
                UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                    sum_0.at[c] = fmaf(forward.weight[tap][c], window[i + tap].at[c], sum_0.at[c]);
                    sum_1.at[c] = fmaf(backward.weight[tap][c], window[i + 2 * BACK - tap].at[c], sum_1.at[c]);
                }
                sum_0.at[c] *= sigmoid(sum_0.at[c]);
                sum_1.at[c] *= sigmoid(sum_1.at[c]);
            }
            if (t + i < end_0) store(v_0, from_floats<Element>(sum_0));
            if (t + i < end && t + i >= begin_1) store(v_1, from_floats<Element>(sum_1));
            v_0 += D, v_1 += D;
        }
        UNROLLED for (int i = 0; i < 2 * BACK; i++) window[i] = window[i + STEP];
    }
}
