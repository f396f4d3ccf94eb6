// Filters of V channels and prefetched tokens for the convolution kernels.
// Filters are stored as (D, TAPS), and the last tap reads the current token.

#include "../cuda/types.cuh"

typedef INPUT Element;

template <int V>
struct Filter {
    float weight[TAPS][V];
    Floats<V> bias;
    INLINE Filter(const float *weights, const float *biases, i64 d) : bias(load<V>(biases + d)) {
        constexpr int TOGETHER = TAPS % 4 == 0 ? 4 : TAPS % 2 == 0 ? 2 : 1;
        UNROLLED for (int c = 0; c < V; c++)
            UNROLLED for (int tap = 0; tap < TAPS; tap += TOGETHER) {
                Floats<TOGETHER> some = load<TOGETHER>(weights + (d + c) * TAPS + tap);
                UNROLLED for (int i = 0; i < TOGETHER; i++) weight[tap + i][c] = some.at[i];
            }
    }
    INLINE void scale(float factor) {
        UNROLLED for (int c = 0; c < V; c++) {
            bias.at[c] *= factor;
            UNROLLED for (int tap = 0; tap < TAPS; tap++) weight[tap][c] *= factor;
        }
    }
};
constexpr int BACK = TAPS - 1;  // number of previous tokens that a convolution reads

// V channels of prefetched tokens of one sequence, in registers. Tokens outside the sequence are zero.
template <int V, int TOKENS>
struct InFlight {
    Pack<Element, V> token[TOKENS];
    // Prefetches tokens t to t + TOKENS - 1, where p points to token t.
    INLINE void fetch(const Element *p, int stride, int t, int L) {
        UNROLLED for (int i = 0; i < TOKENS; i++)
            token[i] = unsigned(t + i) < unsigned(L) ? load<V>(p + i64(i) * stride) : Pack<Element, V>{};
    }
};
constexpr int STEP = 4;  // number of tokens that are prefetched together
static_assert(STEP > BACK);
