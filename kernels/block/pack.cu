// What surrounds the scan in a block, less convolutions: weights, norm and gate, and their gradients. All are bound by
// memory, so each tensor is read and written once, and sums that a gradient needs stay on the chip until a CTA has
// finished its part. No kernel has dynamic shared memory or warps of different roles.
//
//   pack_weights       the model's parameters -> what kernels and products read; xhat = rms_norm(x) without its weight
//   unpack_gradients   the reverse for gradients, which come as sums over parts of the tokens
//   norm_backward      d xhat -> dx
//   gate               gated = scale mean silu(z), mean = (y_0 + y_1) / 2
//   gate_backward      d gated -> dy (of either direction), dz, and gated once more
//
// Macros:
//   INPUT      element type of the tensors: bf16, fp16 or float; the residual stream is in fp32
//   PARAMETER  that of the model's parameters
//   VECTOR     neighbouring channels that a lane moves at once
//   WIDTH      model width C, of the norm
//   TAPS       tokens that a convolution sees, for the size of its weights
//
// B batch    L tokens    C model width    D channels

#include "gate.cuh"

typedef INPUT Element;
constexpr int V = VECTOR;
constexpr int WARPS = 4;

DEVICE float sum_over_warp(float x) {
    UNROLLED for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(WARP, x, distance);
    return x;
}

// xhat = x / sqrt(mean(x^2) + eps): the norm without its weight, which the projection behind it contains. A warp takes
// a token and keeps it in registers; the copy of x, unless null, is what the block's last product is added to.
constexpr int ITEMS = (WIDTH + 32 * V - 1) / (32 * V);

DEVICE void rms_norm(i64 token, const float *__restrict__ x, Element *__restrict__ xhat, float *__restrict__ scale,
                     float *__restrict__ copy, float eps) {
    int lane = threadIdx.x % 32;
    x += token * WIDTH, xhat += token * WIDTH;
    Floats<V> row[ITEMS] = {};
    float squares = 0;
    UNROLLED for (int i = 0; i < ITEMS; i++)
        if (int c = (i * 32 + lane) * V; c < WIDTH) row[i] = load<V>(x + c);
    UNROLLED for (int i = 0; i < ITEMS; i++)
        UNROLLED for (int j = 0; j < V; j++) squares = fmaf(row[i].at[j], row[i].at[j], squares);
    float r = rsqrtf(sum_over_warp(squares) / WIDTH + eps);
    if (lane == 0) scale[token] = r;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        if (int c = (i * 32 + lane) * V; copy && c < WIDTH) store(copy + token * WIDTH + c, row[i]);
        UNROLLED for (int j = 0; j < V; j++) row[i].at[j] *= r;
        if (int c = (i * 32 + lane) * V; c < WIDTH) store(xhat + c, from_floats<Element>(row[i]));
    }
}

// The weights of a block as the kernels and products take them: those of projections as Element, the norm's in the
// projection behind it, `step` padded to `padded_rank`, and each pair of the directions' weights as one tensor. A
// thread has V neighbours of a large matrix or one element of a small one. `tiles`, unless null, are those of out_proj
// as gate_outproj_sm90.cu wants them. The CTAs behind take a token of the norm with each warp, if nobody has computed
// it.
template <int C>
DEVICE Floats<C> values(const PARAMETER *p) { return to_floats(load<C>(p)); }
DEVICE float value(const PARAMETER *p) { return values<1>(p).at[0]; }
template <class E>
DEVICE void put(E *p, float x) { store(p, from_floats<E>(Floats<1>{x})); }

// whether the thread's item is one of these `n`; if not, its number among those that follow
DEVICE bool is_among(unsigned &i, unsigned n) {
    bool among = i < n;
    i -= among ? 0 : n;
    return among;
}

#define PAIR(type, name) type *name##_0, type *name##_1
extern "C" __global__ void __launch_bounds__(256)
pack_weights(const PARAMETER *norm, const PARAMETER *in_proj, const PARAMETER *out_proj, PAIR(const PARAMETER, conv),
             PAIR(const PARAMETER, conv_bias), PAIR(const PARAMETER, x_proj), PAIR(const PARAMETER, step),
             PAIR(const PARAMETER, step_bias), PAIR(const PARAMETER, skip), Element *packed_in, Element *packed_out,
             Element *tiles, float *packed_conv, float *packed_conv_bias, Element *packed_x, Element *packed_step,
             float *packed_step_bias, float *packed_skip, i64 channels, i64 projections_, i64 rank_, i64 padded_rank_,
             const float *__restrict__ x, Element *__restrict__ xhat, float *__restrict__ scale,
             float *__restrict__ copy, i64 tokens, double eps, i64 packing) {
    if (blockIdx.x >= packing) {
        i64 token = (blockIdx.x - packing) * 8 + threadIdx.x / 32;
        if (token < tokens) rms_norm(token, x, xhat, scale, copy, eps);
        return;
    }
    constexpr unsigned C = WIDTH;
    unsigned D = channels, projections = projections_, rank = rank_, padded_rank = padded_rank_;
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (is_among(i, 2 * D * C / V)) {
        i *= V;
        Floats<V> weight = values<V>(in_proj + i), scale = values<V>(norm + i % C);
        UNROLLED for (int j = 0; j < V; j++) weight.at[j] *= scale.at[j];
        store(packed_in + i, from_floats<Element>(weight));
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
}

// dx = dresidual + scale (dxhat - xhat mean(dxhat xhat)); and, unless null, dx rounded to Element. A warp takes a
// token.
extern "C" __global__ void __launch_bounds__(256)
norm_backward(const Element *__restrict__ dxhat, const Element *__restrict__ xhat, const float *__restrict__ scale,
              const float *__restrict__ dresidual, float *__restrict__ dx, Element *__restrict__ rounded, i64 tokens) {
    int lane = threadIdx.x % 32;
    i64 token = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    if (token >= tokens) return;
    dxhat += token * WIDTH, xhat += token * WIDTH, dresidual += token * WIDTH, dx += token * WIDTH;
    Pack<Element, V> gradient[ITEMS] = {}, value[ITEMS] = {};
    Floats<V> residual[ITEMS];
    float products = 0, r = scale[token];
    UNROLLED for (int i = 0; i < ITEMS; i++)
        if (int c = (i * 32 + lane) * V; c < WIDTH)
            gradient[i] = load<V>(dxhat + c), value[i] = load<V>(xhat + c), residual[i] = load<V>(dresidual + c);
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        Floats<V> g = to_floats(gradient[i]), v = to_floats(value[i]);
        UNROLLED for (int j = 0; j < V; j++) products = fmaf(g.at[j], v.at[j], products);
    }
    float mean = sum_over_warp(products) / WIDTH;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        Floats<V> g = to_floats(gradient[i]), v = to_floats(value[i]);
        UNROLLED for (int j = 0; j < V; j++)
            residual[i].at[j] = fmaf(r, fmaf(-v.at[j], mean, g.at[j]), residual[i].at[j]);
        if (int c = (i * 32 + lane) * V; c < WIDTH) store(dx + c, residual[i]);
        if (int c = (i * 32 + lane) * V; rounded && c < WIDTH)
            store(rounded + token * WIDTH + c, from_floats<Element>(residual[i]));
    }
}

// The reverse of `pack_weights` for gradients, which arrive in parts: as sums over some of the tokens. The first CTAs
// take COLUMNS columns each of the projection that contains the norm's weight, whose gradient is a sum over all rows; a
// thread has the same V columns of every ROWS-th row.
constexpr int COLUMNS = 8, ROWS = 256 * V / COLUMNS;

// sum over parts that are `stride` apart, always in the same order
DEVICE float sum_of_parts(const float *p, int parts, unsigned stride) {
    float sum = 0;
#pragma unroll 16
    for (int part = 0; part < parts; part++) sum += p[i64(part) * stride];
    return sum;
}

extern "C" __global__ void __launch_bounds__(256)
unpack_gradients(const PARAMETER *__restrict__ norm, const PARAMETER *__restrict__ in_proj,
                 const float *__restrict__ dfolded, const float *dfilters, const float *dx_projs, const float *dsteps,
                 i64 filter_parts, i64 x_parts, i64 step_parts, const float *dchannels, PARAMETER *__restrict__ dnorm,
                 PARAMETER *__restrict__ din_proj, PAIR(PARAMETER, dconv), PAIR(PARAMETER, dconv_bias),
                 PAIR(PARAMETER, dx_proj), PAIR(PARAMETER, dstep), PAIR(PARAMETER, dstep_bias), PAIR(PARAMETER, dskip),
                 i64 channels, i64 projections_, i64 rank_, i64 padded_rank_) {
    constexpr unsigned C = WIDTH;
    unsigned D = channels, projections = projections_, rank = rank_, padded_rank = padded_rank_;
    unsigned norm_blocks = (C + COLUMNS - 1) / COLUMNS;
    if (blockIdx.x < norm_blocks) {
        constexpr int TOGETHER = 4;  // rows on their way at once
        __shared__ float sums[ROWS][COLUMNS + 1];
        unsigned column = threadIdx.x * V % COLUMNS, row = threadIdx.x * V / COLUMNS;
        unsigned c = blockIdx.x * COLUMNS + column;
        Floats<V> weight = c < C ? values<V>(norm + c) : Floats<V>{}, sum = {};
        for (unsigned r = row; r < 2 * D; r += TOGETHER * ROWS) {
            Floats<V> d[TOGETHER] = {}, w[TOGETHER] = {};
            UNROLLED for (int j = 0; j < TOGETHER; j++)
                if (unsigned at = r + j * ROWS; at < 2 * D && c < C)
                    d[j] = load<V>(dfolded + at * C + c), w[j] = values<V>(in_proj + at * C + c);
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
        // a warp finishes a column
        float all = 0;
        column = threadIdx.x / 32, c = blockIdx.x * COLUMNS + column;
        UNROLLED for (int r = 0; r < ROWS; r += 32) all += sums[r + threadIdx.x % 32][column];
        all = sum_over_warp(all);
        if (threadIdx.x % 32 == 0 && c < C) put(dnorm + c, all);
        return;
    }
    unsigned i = (blockIdx.x - norm_blocks) * blockDim.x + threadIdx.x;
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
        put((g ? dskip_1 : dskip_0) + d, dchannels[2 * g * D + d]);
        put((g ? dstep_bias_1 : dstep_bias_0) + d, dchannels[(2 * g + 1) * D + d]);
    }
}

// gated = scale mean silu(z), where mean = (y_0 + y_1) / 2 and scale is the stochastic depth of the image. A warp takes
// a token. `means` is null if no gradient is needed.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate(const Element *__restrict__ y, const Element *__restrict__ z, i64 z_stride, const float *__restrict__ scales,
     Element *__restrict__ gated, Element *__restrict__ means, i64 tokens, i64 L, i64 D) {
    i64 token = blockIdx.x * i64(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    float scale = scales ? scales[token / L] : 1;
    const Element *y_0 = y + token * D, *y_1 = y_0 + tokens * D;
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

// dy (of either direction) = scale dgated silu(z) / 2, dz = scale dgated mean silu'(z), and gated once more
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_backward(const Element *__restrict__ dgated, const Element *__restrict__ means, const Element *__restrict__ z,
              i64 z_stride, const float *__restrict__ scales, Element *__restrict__ dy, i64 dy_stride,
              Element *__restrict__ dz, i64 dz_stride, Element *__restrict__ gated, i64 tokens, i64 L, i64 D) {
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
