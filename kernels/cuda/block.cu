// What surrounds the scan in a block: norm, convolutions and gate, and their gradients. All are bound by memory, so each
// tensor is read and written once, and sums that a gradient needs stay on the chip until a block has finished its part.
// Compiled by NVRTC with these macros:
//   INPUT    element type of the tensors: bf16, fp16 or float; the residual stream, norms and weights are in fp32
//   VECTOR   neighbouring channels that a lane moves at once
//   WIDTH    model width C, of the norm
//   TAPS     tokens that a convolution sees
//
// B batch    L tokens    D channels. Directions: 0 reads tokens from the first to the last, 1 from the last to the first.

typedef INPUT T;
constexpr int V = VECTOR;
constexpr int WARPS = 4;  // of a block

DEVICE float sum_over_warp(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(WARP, x, distance);
    return x;
}
DEVICE float sigmoid(float x) { return reciprocal(1 + exp_fast(-x)); }
// d silu(x) / dx, where s = sigmoid(x)
DEVICE float silu_slope(float x, float s) { return s * fmaf(x, 1 - s, 1); }

// xhat = x / sqrt(mean(x^2) + eps): the norm without its weight, which the projection behind it contains. A warp takes
// a token and keeps it in registers.
constexpr int ITEMS = (WIDTH + 32 * V - 1) / (32 * V);

extern "C" __global__ void __launch_bounds__(32 * WARPS)
rms_norm(const float *__restrict__ x, T *__restrict__ xhat, float *__restrict__ scale, i64 tokens, double eps) {
    i64 token = blockIdx.x * i64(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    x += token * WIDTH, xhat += token * WIDTH;
    Floats<V> row[ITEMS] = {};
    float squares = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (int c = (i * 32 + lane) * V; c < WIDTH) row[i] = load<V>(x + c);
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int j = 0; j < V; j++) squares = fmaf(row[i].at[j], row[i].at[j], squares);
    float r = rsqrtf(sum_over_warp(squares) / WIDTH + float(eps));
    if (lane == 0) scale[token] = r;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
#pragma unroll
        for (int j = 0; j < V; j++) row[i].at[j] *= r;
        if (int c = (i * 32 + lane) * V; c < WIDTH) store(xhat + c, from_floats<T>(row[i]));
    }
}

// dx = dresidual + scale (dxhat - xhat mean(dxhat xhat))
extern "C" __global__ void __launch_bounds__(32 * WARPS)
rms_norm_backward(const T *__restrict__ dxhat, const T *__restrict__ xhat, const float *__restrict__ scale,
                  const float *__restrict__ dresidual, float *__restrict__ dx, i64 tokens) {
    i64 token = blockIdx.x * i64(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    dxhat += token * WIDTH, xhat += token * WIDTH, dresidual += token * WIDTH, dx += token * WIDTH;
    Pack<T, V> gradient[ITEMS] = {}, value[ITEMS] = {};
    Floats<V> residual[ITEMS];
    float products = 0, r = scale[token];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (int c = (i * 32 + lane) * V; c < WIDTH)
            gradient[i] = load<V>(dxhat + c), value[i] = load<V>(xhat + c), residual[i] = load<V>(dresidual + c);
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        Floats<V> g = to_floats(gradient[i]), v = to_floats(value[i]);
#pragma unroll
        for (int j = 0; j < V; j++) products = fmaf(g.at[j], v.at[j], products);
    }
    float mean = sum_over_warp(products) / WIDTH;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        Floats<V> g = to_floats(gradient[i]), v = to_floats(value[i]);
#pragma unroll
        for (int j = 0; j < V; j++) residual[i].at[j] = fmaf(r, fmaf(-v.at[j], mean, g.at[j]), residual[i].at[j]);
        if (int c = (i * 32 + lane) * V; c < WIDTH) store(dx + c, residual[i]);
    }
}

// The weights of the convolutions of V channels, (D, TAPS) in memory; the last tap is the token itself
struct Filter {
    float weight[TAPS][V];
    Floats<V> bias;
    __device__ __forceinline__ Filter(const float *weights, const float *biases, i64 d) : bias(load<V>(biases + d)) {
#pragma unroll
        for (int c = 0; c < V; c++)
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) weight[tap][c] = weights[(d + c) * TAPS + tap];
    }
};
constexpr int BACK = TAPS - 1;  // how far a convolution looks

// V channels of one sequence, zero outside of it
template <class E>
struct Channels {
    E *data;
    i64 stride, L;
    __device__ __forceinline__ Floats<V> operator[](i64 t) const {
        return t >= 0 && t < L ? to_floats(load<V>(data + t * stride)) : Floats<V>{};
    }
};

// v_0(t) = silu(bias_0 + sum_i weight_0[i] u(t - BACK + i)), v_1(t) = silu(bias_1 + sum_i weight_1[i] u(t + BACK - i)).
// A thread takes V channels of a stretch of tokens, with a window on u that serves both directions.
constexpr int AT_ONCE = 8;  // tokens loaded together

extern "C" __global__ void __launch_bounds__(32 * WARPS)
convolve(const T *__restrict__ u, i64 u_stride, const float *weights_0, const float *biases_0, const float *weights_1,
         const float *biases_1, T *__restrict__ v, i64 B, i64 L, i64 D, i64 stretch) {
    i64 stretches = (L + stretch - 1) / stretch, thread = blockIdx.x * i64(32 * WARPS) + threadIdx.x;
    i64 d = thread % (D / V) * V, begin = thread / (D / V) % stretches * stretch, b = thread / (D / V) / stretches;
    if (b >= B) return;
    i64 end = min(L, begin + stretch);
    Channels<const T> us = {u + b * L * u_stride + d, u_stride, L};
    Filter forward(weights_0, biases_0, d), backward(weights_1, biases_1, d);
    T *v_0 = v + b * L * D + d, *v_1 = v_0 + B * L * D;
    Floats<V> window[2 * BACK + AT_ONCE];
#pragma unroll
    for (int i = 0; i < 2 * BACK; i++) window[i] = us[begin - BACK + i];
#pragma unroll 1
    for (i64 t0 = begin; t0 < end; t0 += AT_ONCE) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) window[2 * BACK + i] = us[t0 + BACK + i];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            Floats<V> sum_0 = forward.bias, sum_1 = backward.bias;
#pragma unroll
            for (int c = 0; c < V; c++) {
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) {
                    sum_0.at[c] = fmaf(forward.weight[tap][c], window[i + tap].at[c], sum_0.at[c]);
                    sum_1.at[c] = fmaf(backward.weight[tap][c], window[i + 2 * BACK - tap].at[c], sum_1.at[c]);
                }
                sum_0.at[c] *= sigmoid(sum_0.at[c]);
                sum_1.at[c] *= sigmoid(sum_1.at[c]);
            }
            if (t0 + i < end) {
                store(v_0 + (t0 + i) * D, from_floats<T>(sum_0));
                store(v_1 + (t0 + i) * D, from_floats<T>(sum_1));
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * BACK; i++) window[i] = window[i + AT_ONCE];
    }
}

// The gradients of the convolutions' sums, s_g(t) = dv_g(t) silu'(sum_g(t)), go into
//   du(t) = sum_i weight_0[i] s_0(t + BACK - i) + weight_1[i] s_1(t - BACK + i)
//   dweight_0[i] = sum_t s_0(t) u(t - BACK + i)    dweight_1[i] = sum_t s_1(t) u(t + BACK - i)    dbias_g = sum_t s_g(t)
// Where the window on u is at t .. t + BACK, s_0(t + BACK) and s_1(t) are known. A warp takes V channels a lane and one
// stretch of tokens after another; the sums of a block's warps are added before it writes its part of dfilters,
// (parts, 2, TAPS + 1, D) with the biases last.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
convolve_backward(const T *__restrict__ u, i64 u_stride, const T *__restrict__ dv, const float *weights_0,
                  const float *biases_0, const float *weights_1, const float *biases_1, T *__restrict__ du,
                  i64 du_stride, float *__restrict__ dfilters, i64 B, i64 L, i64 D, i64 stretch, i64 parts) {
    __shared__ Floats<V> sums[WARPS][2][TAPS + 1][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 blocks = (D + 32 * V - 1) / (32 * V), part = blockIdx.x / blocks, d = (blockIdx.x % blocks * 32 + lane) * V;
    bool valid = d < D;
    i64 stretches = (L + stretch - 1) / stretch, loaded_d = min(d, D - V);
    Filter forward(weights_0, biases_0, loaded_d), backward(weights_1, biases_1, loaded_d);
    Floats<V> dforward[TAPS + 1] = {}, dbackward[TAPS + 1] = {};
    for (i64 item = part * WARPS + warp; item < B * stretches; item += parts * WARPS) {
        i64 b = item / stretches, begin = item % stretches * stretch, end = min(L, begin + stretch);
        Channels<const T> us = {u + b * L * u_stride + loaded_d, u_stride, L};
        Channels<const T> dv_0 = {dv + b * L * D + loaded_d, D, L}, dv_1 = {dv_0.data + B * L * D, D, L};
        T *dus = du + b * L * du_stride + d;
        Floats<V> window[TAPS], s_0[TAPS] = {}, s_1[TAPS] = {};
#pragma unroll
        for (int i = 0; i < BACK; i++) window[i] = us[begin - BACK + i];
        Floats<V> next_u = us[begin], next_dv_0 = dv_0[begin], next_dv_1 = dv_1[begin - BACK];
#pragma unroll 4
        for (i64 t = begin - BACK; t < end; t++) {
            window[BACK] = next_u;
            Floats<V> sum_0 = forward.bias, sum_1 = backward.bias, gradient_0 = next_dv_0, gradient_1 = next_dv_1, sum;
            next_u = us[t + TAPS], next_dv_0 = dv_0[t + TAPS], next_dv_1 = dv_1[t + 1];
            bool own_0 = t + BACK < end, own_1 = t >= begin;
#pragma unroll
            for (int c = 0; c < V; c++) {
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) {
                    sum_0.at[c] = fmaf(forward.weight[tap][c], window[tap].at[c], sum_0.at[c]);
                    sum_1.at[c] = fmaf(backward.weight[tap][c], window[BACK - tap].at[c], sum_1.at[c]);
                }
                s_0[BACK].at[c] = gradient_0.at[c] * silu_slope(sum_0.at[c], sigmoid(sum_0.at[c]));
                s_1[BACK].at[c] = gradient_1.at[c] * silu_slope(sum_1.at[c], sigmoid(sum_1.at[c]));
                float own_s_0 = own_0 ? s_0[BACK].at[c] : 0, own_s_1 = own_1 ? s_1[BACK].at[c] : 0;
                sum.at[c] = 0;
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) {
                    dforward[tap].at[c] = fmaf(own_s_0, window[tap].at[c], dforward[tap].at[c]);
                    dbackward[tap].at[c] = fmaf(own_s_1, window[BACK - tap].at[c], dbackward[tap].at[c]);
                    sum.at[c] = fmaf(forward.weight[tap][c], s_0[BACK - tap].at[c], sum.at[c]);
                    sum.at[c] = fmaf(backward.weight[tap][c], s_1[tap].at[c], sum.at[c]);
                }
                dforward[TAPS].at[c] += own_s_0;
                dbackward[TAPS].at[c] += own_s_1;
            }
            if (own_1 && valid) store(dus + t * du_stride, from_floats<T>(sum));
#pragma unroll
            for (int i = 0; i < BACK; i++) window[i] = window[i + 1], s_0[i] = s_0[i + 1], s_1[i] = s_1[i + 1];
        }
    }
#pragma unroll
    for (int tap = 0; tap <= TAPS; tap++) {
        sums[warp][0][tap][lane] = dforward[tap];
        sums[warp][1][tap][lane] = dbackward[tap];
    }
    __syncthreads();
    if (!valid) return;
    for (int row = warp; row < 2 * (TAPS + 1); row += WARPS) {
        Floats<V> sum = sums[0][0][row][lane];
#pragma unroll
        for (int w = 1; w < WARPS; w++)
#pragma unroll
            for (int c = 0; c < V; c++) sum.at[c] += sums[w][0][row][lane].at[c];
        store(dfilters + (part * 2 * (TAPS + 1) + row) * D + d, sum);
    }
}

// gated = scale mean silu(z), where mean = (y_0 + y_1) / 2 and scale is the stochastic depth of the image. A warp takes a
// token. `means` is null if no gradient is needed.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate(const T *__restrict__ y, const T *__restrict__ z, i64 z_stride, const float *__restrict__ scales,
     T *__restrict__ gated, T *__restrict__ means, i64 tokens, i64 L, i64 D) {
    i64 token = blockIdx.x * i64(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    float scale = scales ? scales[token / L] : 1;
    const T *y_0 = y + token * D, *y_1 = y_0 + tokens * D;
    z += token * z_stride, gated += token * D;
#pragma unroll 3
    for (i64 d = threadIdx.x % 32 * V; d < D; d += 32 * V) {
        Floats<V> zs = to_floats(load<V>(z + d)), mean = to_floats(load<V>(y_0 + d)), other = to_floats(load<V>(y_1 + d));
#pragma unroll
        for (int c = 0; c < V; c++) {
            mean.at[c] = 0.5f * (mean.at[c] + other.at[c]);
            zs.at[c] = scale * mean.at[c] * zs.at[c] * sigmoid(zs.at[c]);
        }
        store(gated + d, from_floats<T>(zs));
        if (means) store(means + token * D + d, from_floats<T>(mean));
    }
}

// dy (of either direction) = scale dgated silu(z) / 2, dz = scale dgated mean silu'(z), and gated once more
extern "C" __global__ void __launch_bounds__(32 * WARPS)
gate_backward(const T *__restrict__ dgated, const T *__restrict__ means, const T *__restrict__ z, i64 z_stride,
              const float *__restrict__ scales, T *__restrict__ dy, T *__restrict__ dz, i64 dz_stride,
              T *__restrict__ gated, i64 tokens, i64 L, i64 D) {
    i64 token = blockIdx.x * i64(WARPS) + threadIdx.x / 32;
    if (token >= tokens) return;
    float scale = scales ? scales[token / L] : 1;
    dgated += token * D, means += token * D, z += token * z_stride;
    dy += token * D, dz += token * dz_stride, gated += token * D;
#pragma unroll 3
    for (i64 d = threadIdx.x % 32 * V; d < D; d += 32 * V) {
        Floats<V> zs = to_floats(load<V>(z + d)), mean = to_floats(load<V>(means + d));
        Floats<V> gradient = to_floats(load<V>(dgated + d)), product;
#pragma unroll
        for (int c = 0; c < V; c++) {
            float s = sigmoid(zs.at[c]), slope = silu_slope(zs.at[c], s), g = scale * gradient.at[c];
            product.at[c] = scale * mean.at[c] * zs.at[c] * s;
            gradient.at[c] = 0.5f * g * zs.at[c] * s;
            zs.at[c] = g * mean.at[c] * slope;
        }
        store(dy + d, from_floats<T>(gradient));
        store(dz + d, from_floats<T>(zs));
        store(gated + d, from_floats<T>(product));
    }
}
