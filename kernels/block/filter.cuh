// The weights of the convolutions of V channels, (D, TAPS) in memory; the last tap is the token itself

#include "../cuda/types.cuh"

template <int V>
struct Filter {
    float weight[TAPS][V];
    Floats<V> bias;
    INLINE Filter(const float *weights, const float *biases, i64 d) : bias(load<V>(biases + d)) {
        UNROLLED for (int c = 0; c < V; c++)
            UNROLLED for (int tap = 0; tap < TAPS; tap++) weight[tap][c] = weights[(d + c) * TAPS + tap];
    }
    INLINE void scale(float factor) {
        UNROLLED for (int c = 0; c < V; c++) {
            bias.at[c] *= factor;
            UNROLLED for (int tap = 0; tap < TAPS; tap++) weight[tap][c] *= factor;
        }
    }
};
constexpr int BACK = TAPS - 1;  // how far a convolution looks
