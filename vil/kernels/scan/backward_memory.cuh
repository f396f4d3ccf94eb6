// Shared memory of backward.cu, and the restart states in local memory.

#include "lanes.cuh"

constexpr int TILES = CHUNK / TILE, HALF = TILE / 2;
// Number of tokens whose keys are loaded together.
constexpr int KEY_TOKENS = 256 * WARPS / N < CHUNK ? 256 * WARPS / N : CHUNK;
static_assert(NL == 4);

// The lengths of rows in shared memory are chosen so that simultaneous accesses use different banks.
constexpr int ROW = WARP_CHANNELS + 8;
constexpr int PART_SUMS = 4 * GROUPS + 8, CHANNEL_SUMS = PARTS * PART_SUMS + 4, STATE_SUMS = PARTS * ROW + 8;

struct Channels {
    alignas(16) Element x[TILE][WARP_CHANNELS];
    alignas(16) Element step_logits[TILE][WARP_CHANNELS];
    alignas(16) Element dy[TILE][WARP_CHANNELS];
};

struct WarpMemory {
    Channels stage[STAGES];  // the current tile, and tiles that are being copied
    alignas(16) float skip[WARP_CHANNELS];
    alignas(16) float bias[WARP_CHANNELS];
    alignas(16) float step_size[TILE][ROW];
    alignas(16) float slope[TILE][ROW];
    alignas(16) float channel_sums[HALF][CHANNEL_SUMS];  // dq, then dk, over each lane's channels
    alignas(16) float state_sums[2][HALF][STATE_SUMS];  // sum_x and sum_step_size, over each lane's states
    alignas(16) float dkeys[2][TILE][2][N];  // dk and dq over the warp's channels, for two tiles
    alignas(16) float norm[2][TILE];  // dL/d(k.k) over the warp's channels, for two tiles
};

struct CtaMemory {
    Keys<CHUNK> keys;
    alignas(16) WarpMemory warps[WARPS];
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);

typedef Recurrence::Kept Kept[NL][DL];

// Returns the third most significant bytes of two words, in the lower half of the result.
DEVICE unsigned third_bytes(unsigned a, unsigned b) { return __byte_perm(a, b, 0x51); }
// Returns a half of a word in the upper half of the result, and a byte of another word, twice, in the lower half.
DEVICE unsigned half_and_byte_twice(unsigned halves, int half, unsigned bytes, int byte) {
    return __byte_perm(halves, bytes, (half ? 0x3200 : 0x1000) + 0x11 * (4 + byte));
}

// Restart states, with 24 bits per state for 16-bit inputs.
// The number of bits matters, because the restart states of all warps on a GPU are about as large as the L2 cache.
// With 16 bits per state, the error of gradients that are sums over tokens would exceed the error of 16-bit inputs.
template <class Type>
struct alignas(4 * DL) Restart {
    static constexpr int STATES_OF_LANE = NL * DL;
    // Upper 16 bits of each state, and the next 8 bits of each state.
    unsigned high[STATES_OF_LANE / 2], low[STATES_OF_LANE / 4];
    INLINE void save(const States &S) {
        unsigned bits[STATES_OF_LANE];
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i++) bits[i] = __float_as_uint(S[i / DL][i % DL]);
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i += 2) high[i / 2] = upper_halves(bits[i], bits[i + 1]);
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i += 4)
            low[i / 4] = lower_halves(third_bytes(bits[i], bits[i + 1]), third_bytes(bits[i + 2], bits[i + 3]));
    }
    // The lowest 8 bits, which were not saved, become a copy of the previous 8 bits.
    INLINE void restore(States &S) const {
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i++)
            S[i / DL][i % DL] = __uint_as_float(half_and_byte_twice(high[i / 2], i % 2, low[i / 4], i % 4));
    }
};
template <>
struct Restart<float> {
    float states[NL * DL];
    INLINE void save(const States &S) {
        UNROLLED for (int i = 0; i < NL * DL; i++) states[i] = S[i / DL][i % DL];
    }
    INLINE void restore(States &S) const {
        UNROLLED for (int i = 0; i < NL * DL; i++) S[i / DL][i % DL] = states[i];
    }
};
