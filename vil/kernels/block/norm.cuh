// RMSNorm without its weight: xhat = rstd x with rstd = 1 / sqrt(mean(x^2) + eps).
// The weight of the norm is folded into the following projection.
// Each warp processes one token, and keeps the token in registers as packs of V adjacent channels per lane.

#include "../cuda/types.cuh"

typedef INPUT Element;
constexpr int V = VECTOR;
constexpr int ITEMS = (WIDTH + 32 * V - 1) / (32 * V);

DEVICE float sum_over_warp(float x) {
    UNROLLED for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(WARP, x, distance);
    return x;
}

// Computes the norm of a token. If `copy` is not null, the function copies x to `copy`.
DEVICE void rms_norm(i64 token, const float *__restrict__ x, Element *__restrict__ xhat, float *__restrict__ rstd,
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
    if (lane == 0) rstd[token] = r;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        if (int c = (i * 32 + lane) * V; copy && c < WIDTH) store(copy + token * WIDTH + c, row[i]);
        UNROLLED for (int j = 0; j < V; j++) row[i].at[j] *= r;
        if (int c = (i * 32 + lane) * V; c < WIDTH) store(xhat + c, from_floats<Element>(row[i]));
    }
}
