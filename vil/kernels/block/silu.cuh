// silu(x) = x sigmoid(x), and its derivative.

#include "../cuda/types.cuh"

DEVICE float sigmoid(float x) { return reciprocal(1 + exp_fast(-x)); }
// Returns the derivative of silu at x, where s = sigmoid(x).
DEVICE float silu_slope(float x, float s) { return s * fmaf(x, 1 - s, 1); }

// Sigmoid and SiLU of x = 2h for results of type T. For bf16, SiLU uses sigmoid(2h) = (1 + tanh(h)) / 2.
// In bf16, the rounding error hides the error of tanh_fast.
// tanh_fast costs half as much as an exponential and a reciprocal, which limit kernels with several SiLUs per element.
template <class T>
DEVICE float sigmoid_of_half(T, float h) { return reciprocal(1 + exp2_fast(-2 * LOG2E * h)); }
template <class T>
DEVICE float silu_of_half(T, float h) { return 2 * h * sigmoid_of_half(T{}, h); }
DEVICE float silu_of_half(bf16, float h) { return fmaf(h, tanh_fast(h), h); }

// With t = tanh(h), the value is silu(2h) = h (1 + t), and twice_slope_less_1 is 2 silu'(2h) - 1 = t + h (1 - t^2).
struct SiluOfHalf {
    float value, twice_slope_less_1;
};
template <class T>
DEVICE SiluOfHalf silu_and_slope(T, float h) {
    float s = 2 * sigmoid_of_half(T{}, h);
    return {h * s, fmaf(s, fmaf(-h, s, 2 * h), s - 1)};
}
DEVICE SiluOfHalf silu_and_slope(bf16, float h) {
    float t = tanh_fast(h);
    return {fmaf(h, t, h), fmaf(h, fmaf(-t, t, 1), t)};
}
