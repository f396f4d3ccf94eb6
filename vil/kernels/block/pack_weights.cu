// Packs a block's weights in the layout of its kernels and products, and computes the norm of the block's input.
// Packing and norm run in one launch, because each task leaves most of the GPU idle for few tokens.
//
// Projections are converted to Element, and the weight of the norm is multiplied into the following projection.
// The rank of step_proj is padded to `padded_rank`, and the weights of both directions become one tensor.
// A thread processes V adjacent elements of a large matrix, or one element of a small matrix.
// If `tiles` is not null, the kernel writes out_proj to `tiles` in the layout of gate_outproj_sm90.cu.
// If `in_proj_tiles` is not null, the kernel writes in_proj to `in_proj_tiles` in the layout of in_proj_pool_sm90.cu.
// If `in_proj_blocks` is not null, the kernel also writes in_proj to it in the layout of in_proj_bwd_sm90.cu.
// The remaining CTAs compute the norm, one token per warp, unless an earlier block has computed the norm.
// Weights are packed while the previous kernels run. CTAs that compute the norm wait for the previous kernel first, and
// CTA 0 waits before it ends (overlap.cuh).
//
// pack_weights.py declares the parameters of the kernel. Macros:
//   INPUT      element type of the packed weights: bf16, fp16 or float; the residual stream is in fp32
//   PARAMETER  element type of the model's parameters
//   VECTOR     number of adjacent channels that a lane loads or stores with one instruction
//   WIDTH      model width C
//   TAPS       length of the convolutions' filters
//
// D channels    projections: P with the padded rank

#include "norm.cuh"
#include "parameters.cuh"
#include "tiles.cuh"

extern "C" __global__ void __launch_bounds__(256) pack_weights(PARAMETERS_pack_weights) {
    if (blockIdx.x >= packing) {
        wait_for_previous_kernel();
        i64 token = (blockIdx.x - packing) * 8 + threadIdx.x / 32;
        if (token < tokens) rms_norm(token, x, xhat, rstd, copy, eps);
        return;
    }
    constexpr unsigned C = WIDTH;
    unsigned D = channels, projections = projections_, rank = rank_, padded_rank = padded_rank_;
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (is_among(i, 2 * D * C / V)) {
        i *= V;
        Floats<V> weight = values<V>(in_proj + i), scale = values<V>(norm + i % C);
        UNROLLED for (int j = 0; j < V; j++) weight.at[j] *= scale.at[j];
        Pack<Element, V> rounded = from_floats<Element>(weight);
        store(packed_in + i, rounded);
        if (in_proj_blocks) store(in_proj_blocks + blocked(i / C, i % C, C), rounded);
        if (in_proj_tiles) store(in_proj_tiles + tiled_in(i / C, i % C, D, C), rounded);
    } else if (is_among(i, C * D / V)) {
        i *= V;
        Pack<Element, V> weight = from_floats<Element>(values<V>(out_proj + i));
        store(packed_out + i, weight);
        if (tiles) store(tiles + tiled(i / D, i % D, C), weight);
    } else if (is_among(i, 2 * projections * D / V)) {
        i *= V;
        unsigned row = i / D % projections, from = row < rank ? row : row - (padded_rank - rank);
        const PARAMETER *p = i < projections * D ? x_proj_0 : x_proj_1;
        bool padding = row >= rank && row < padded_rank;
        store(packed_x + i, from_floats<Element>(padding ? Floats<V>{} : values<V>(p + from * D + i % D)));
    } else if (is_among(i, 2 * D * padded_rank)) {
        unsigned r = i % padded_rank, d = i / padded_rank;
        put(packed_step + i, r < rank ? value((d < D ? step_0 : step_1) + d % D * rank + r) : 0);
    } else if (is_among(i, 2 * D * TAPS)) {
        packed_conv[i] = value(i < D * TAPS ? conv_0 + i : conv_1 + i - D * TAPS);
    } else if (is_among(i, 2 * D)) {
        unsigned d = i % D;
        packed_conv_bias[i] = value((i < D ? conv_bias_0 : conv_bias_1) + d);
        packed_step_bias[i] = value((i < D ? step_bias_0 : step_bias_1) + d);
        packed_skip[i] = value((i < D ? skip_0 : skip_1) + d);
    }
    if (blockIdx.x == 0) wait_for_previous_kernel();
}
