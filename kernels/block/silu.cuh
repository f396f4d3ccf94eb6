// silu(x) = x sigmoid(x)

#include "../cuda/types.cuh"

DEVICE float sigmoid(float x) { return reciprocal(1 + exp_fast(-x)); }
// d silu(x) / dx, where s = sigmoid(x)
DEVICE float silu_slope(float x, float s) { return s * fmaf(x, 1 - s, 1); }
