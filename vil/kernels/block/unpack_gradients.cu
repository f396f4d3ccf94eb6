// Converts gradients of packed weights, many of which are partial sums over tokens, to gradients of the parameters.
// The first CTAs process COLUMNS columns each of the projection that contains the weight of the norm.
// A CTA needs whole columns, because the gradient of the norm's weight is a sum over all rows.
// In the first CTAs, a thread has V columns of every ROWS-th row.
// In the next CTAs, a thread adds the partial sums of V adjacent elements of out_proj's gradient.
// In the last CTAs, a thread adds the partial sums of one element.
//
// unpack_gradients.py declares the parameters of the kernel. Macros:
//   INPUT      element type of the block's tensors
//   PARAMETER  element type of the model's parameters
//   VECTOR     number of adjacent channels that a lane loads or stores with one instruction
//   WIDTH      model width C
//   TAPS       length of the convolutions' filters
//
// D channels    projections: P with the padded rank

#include "norm.cuh"
#include "parameters.cuh"

constexpr int COLUMNS = 8, ROWS = 256 * V / COLUMNS;

// Adds parts that are `stride` elements apart, always in the same order.
template <int N>
DEVICE Floats<N> sums_of_parts(const float *p, int parts, unsigned stride) {
    Floats<N> sum = {};
#pragma unroll 16
    for (int part = 0; part < parts; part++) sum = sum + load<N>(p + i64(part) * stride);
    return sum;
}
DEVICE float sum_of_parts(const float *p, int parts, unsigned stride) {
    return sums_of_parts<1>(p, parts, stride).at[0];
}

extern "C" __global__ void __launch_bounds__(256) unpack_gradients(PARAMETERS_unpack_gradients) {
    begin_kernel();
    constexpr unsigned C = WIDTH;
    unsigned D = channels, projections = projections_, rank = rank_, padded_rank = padded_rank_;
    unsigned norm_blocks = (C + COLUMNS - 1) / COLUMNS, out_blocks = (C * D / V + 255) / 256;
    if (blockIdx.x < norm_blocks) {
        constexpr int TOGETHER = 4;  // number of rows that are loaded at the same time
        __shared__ float sums[ROWS][COLUMNS + 1];
        unsigned column = threadIdx.x * V % COLUMNS, row = threadIdx.x * V / COLUMNS;
        unsigned c = blockIdx.x * COLUMNS + column;
        Floats<V> weight = c < C ? values<V>(norm + c) : Floats<V>{}, sum = {};
        for (unsigned r = row; r < 2 * D; r += TOGETHER * ROWS) {
            Floats<V> d[TOGETHER] = {}, w[TOGETHER] = {};
            UNROLLED for (int j = 0; j < TOGETHER; j++)
                if (unsigned at = r + j * ROWS; at < 2 * D && c < C) w[j] = values<V>(in_proj + at * C + c);
#pragma unroll 4
            for (int part = 0; part < folded_parts; part++)
                UNROLLED for (int j = 0; j < TOGETHER; j++)
                    if (unsigned at = r + j * ROWS; at < 2 * D && c < C)
                        d[j] = d[j] + load<V>(dfolded + i64(part) * (2 * C * D) + at * C + c);
            UNROLLED for (int j = 0; j < TOGETHER; j++) {
                UNROLLED for (int v = 0; v < V; v++) {
                    sum.at[v] = fmaf(d[j].at[v], w[j].at[v], sum.at[v]);
                    d[j].at[v] *= weight.at[v];
                }
                if (unsigned at = r + j * ROWS; at < 2 * D && c < C)
                    store(din_proj + at * C + c, from_floats<PARAMETER>(d[j]));
            }
        }
        UNROLLED for (int v = 0; v < V; v++) sums[row][column + v] = sum.at[v];
        __syncthreads();
        // Each warp adds the sums of one column.
        float all = 0;
        column = threadIdx.x / 32, c = blockIdx.x * COLUMNS + column;
        UNROLLED for (int r = 0; r < ROWS; r += 32) all += sums[r + threadIdx.x % 32][column];
        all = sum_over_warp(all);
        if (threadIdx.x % 32 == 0 && c < C) put(dnorm + c, all);
        return;
    }
    if (blockIdx.x < norm_blocks + out_blocks) {
        unsigned i = ((blockIdx.x - norm_blocks) * 256 + threadIdx.x) * V;
        if (i >= C * D) return;
        Floats<V> sum = sums_of_parts<V>(dout_projs + i, out_parts, C * D);
        store(dout_proj + i, from_floats<PARAMETER>(sum));
        return;
    }
    unsigned i = (blockIdx.x - norm_blocks - out_blocks) * blockDim.x + threadIdx.x;
    if (is_among(i, 2 * (projections - padded_rank + rank) * D)) {
        unsigned rows = projections - padded_rank + rank, size = projections * D;
        unsigned g = i / (rows * D), row = i / D % rows, from = row < rank ? row : row + padded_rank - rank;
        float sum = sum_of_parts(dx_projs + g * x_parts * size + from * D + i % D, x_parts, size);
        put((g ? dx_proj_1 : dx_proj_0) + i % (rows * D), sum);
    } else if (is_among(i, 2 * D * rank)) {
        unsigned g = i / (D * rank), d = i / rank % D, r = i % rank, size = D * padded_rank;
        float sum = sum_of_parts(dsteps + g * step_parts * size + d * padded_rank + r, step_parts, size);
        put((g ? dstep_1 : dstep_0) + i % (D * rank), sum);
    } else if (is_among(i, 2 * (TAPS + 1) * D)) {
        unsigned g = i / ((TAPS + 1) * D), tap = i / D % (TAPS + 1), d = i % D;
        float sum = sum_of_parts(dfilters + i, filter_parts, 2 * (TAPS + 1) * D);
        put(tap < TAPS ? (g ? dconv_1 : dconv_0) + d * TAPS + tap : (g ? dconv_bias_1 : dconv_bias_0) + d, sum);
    } else if (is_among(i, 2 * D)) {
        unsigned g = i / D, d = i % D;
        put((g ? dskip_1 : dskip_0) + d, sum_of_parts(dskips + g * next_direction + d, skip_parts, next_part));
    } else if (is_among(i, 2 * D)) {
        unsigned g = i / D, d = i % D;
        float sum = sum_of_parts(dstep_biases + g * next_bias + d, bias_parts, next_bias_part);
        put((g ? dstep_bias_1 : dstep_bias_0) + d, sum);
    }
}
