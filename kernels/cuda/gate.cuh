// The gradient of gated = scale mean silu(z), where mean = (y_0 + y_1) / 2 and scale is the stochastic depth of the image:
// dy (of either direction) = scale dgated silu(z) / 2, dz = scale dgated mean silu'(z), and gated once more
template <int V>
struct GateGradient {
    Floats<V> dy, dz, gated;
    __device__ __forceinline__ GateGradient(const Floats<V> &dgated, const Floats<V> &mean, const Floats<V> &z, float scale) {
#pragma unroll
        for (int c = 0; c < V; c++) {
            float s = sigmoid(z.at[c]), silu = z.at[c] * s, g = scale * dgated.at[c];
            dy.at[c] = 0.5f * g * silu;
            dz.at[c] = g * mean.at[c] * silu_slope(z.at[c], s);
            gated.at[c] = scale * mean.at[c] * silu;
        }
    }
};
