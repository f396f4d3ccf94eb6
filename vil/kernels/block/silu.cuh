// silu(x) = x sigmoid(x)

#include "../cuda/types.cuh"

DEVICE float sigmoid(float x) { return reciprocal(1 + exp_fast(-x)); }
// d silu(x) / dx, where s = sigmoid(x)
DEVICE float silu_slope(float x, float s) { return s * fmaf(x, 1 - s, 1); }

// silu of x = 2h for results of type T: sigmoid(2h) = (1 + tanh(h)) / 2. bf16 hides the error of tanh_fast, and this
// one instruction costs half of an exponential and a reciprocal, which limit the speed of kernels with several per
// element.
template <class T>
DEVICE float sigmoid_of_half(T, float h) { return reciprocal(1 + exp2_fast(-2 * LOG2E * h)); }
template <class T>
DEVICE float silu_of_half(T, float h) { return 2 * h * sigmoid_of_half(T{}, h); }
DEVICE float silu_of_half(bf16, float h) { return fmaf(h, tanh_fast(h), h); }

// silu(2h) and twice its derivative there. With t = tanh(h) they are h (1 + t) and (1 + t)(1 + h (1 - t)).
struct SiluOfHalf {
    float value, twice_slope;
};
template <class T>
DEVICE SiluOfHalf silu_and_slope(T, float h) {
    float s = 2 * sigmoid_of_half(T{}, h);
    return {h * s, s * (1 + fmaf(-h, s, 2 * h))};
}
DEVICE SiluOfHalf silu_and_slope(bf16, float h) {
    float t = tanh_fast(h), s = 1 + t;
    return {fmaf(h, t, h), fmaf(s, fmaf(-h, t, h), s)};
}
