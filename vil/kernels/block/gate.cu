// A block's gate and its gradient, without the product with out_proj.
// gate_outproj.cu and gate_outproj_sm90.cu compute the gate and the product in one kernel.
// The kernels gate and gate_backward are limited by memory bandwidth, and read or write each tensor once.
//
// gate.py declares the parameters of the kernels. Macros:
//   INPUT   element type of the tensors: bf16, fp16 or float
//   VECTOR  number of adjacent channels that a lane loads or stores with one instruction
//   POOLED  whether y_1 has a row for each pooled token instead of each token
//
// L tokens of a sequence    D channels    count, length, next, next_line: lines.cuh

#include "gate.cuh"

typedef INPUT Element;
constexpr int V = VECTOR;
constexpr int WARPS = 4;

// Computes gated = scale mean silu(z), where mean = (y_0 + y_1) / 2, and scale is the image's stochastic-depth factor.
// Each warp processes one token. `means` is null if no gradient is needed.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gate(PARAMETERS_gate) {
    begin_kernel();
    i64 token = blockIdx.x * i64(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    float scale = scales ? scales[token / L] : 1;
    y_0 += token * D, y_1 += row_of_second<POOLED>(lines, token, L) * D;
    z += token * z_stride, gated += token * D;
#pragma unroll 3
    for (int d = threadIdx.x % 32 * V; d < D; d += 32 * V) {
        Floats<V> zs = to_floats(load<V>(z + d)), mean = to_floats(load<V>(y_0 + d));
        Floats<V> other = to_floats(load<V>(y_1 + d));
        UNROLLED for (int c = 0; c < V; c++) {
            mean.at[c] = 0.5f * (mean.at[c] + other.at[c]);
            zs.at[c] = scale * mean.at[c] * zs.at[c] * sigmoid(zs.at[c]);
        }
        store(gated + d, from_floats<Element>(zs));
        if (means) store(means + token * D + d, from_floats<Element>(mean));
    }
}

// Computes dy = scale dgated silu(z) / 2 of either direction, dz = scale dgated mean silu'(z), and recomputes gated.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gate_backward(PARAMETERS_gate_backward) {
    begin_kernel();
    i64 token = blockIdx.x * i64(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    float scale = scales ? scales[token / L] : 1;
    dgated += token * D, means += token * D, z += token * z_stride;
    dy += token * dy_stride, dz += token * dz_stride, gated += token * D;
#pragma unroll 3
    for (int d = threadIdx.x % 32 * V; d < D; d += 32 * V) {
        Floats<V> zs = to_floats(load<V>(z + d)), mean = to_floats(load<V>(means + d));
        Floats<V> gradient = to_floats(load<V>(dgated + d)), product;
        UNROLLED for (int c = 0; c < V; c++) {
            float s = sigmoid(zs.at[c]), slope = silu_slope(zs.at[c], s), g = scale * gradient.at[c];
            product.at[c] = scale * mean.at[c] * zs.at[c] * s;
            gradient.at[c] = 0.5f * g * zs.at[c] * s;
            zs.at[c] = g * mean.at[c] * slope;
        }
        store(dy + d, from_floats<Element>(gradient));
        store(dz + d, from_floats<Element>(zs));
        store(gated + d, from_floats<Element>(product));
    }
}
