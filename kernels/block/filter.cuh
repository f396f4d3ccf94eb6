// The weights of the convolutions of V channels, (D, TAPS) in memory; the last tap is the token itself

#include "../cuda/types.cuh"

template <int V>
struct Filter {
    float weight[TAPS][V];
    Floats<V> bias;
    __device__ __forceinline__ Filter(const float *weights, const float *biases, i64 d) : bias(load<V>(biases + d)) {
#pragma unroll
        for (int c = 0; c < V; c++)
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) weight[tap][c] = weights[(d + c) * TAPS + tap];
    }
    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int c = 0; c < V; c++) {
            bias.at[c] *= factor;
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) weight[tap][c] *= factor;
        }
    }
};
constexpr int BACK = TAPS - 1;  // how far a convolution looks
