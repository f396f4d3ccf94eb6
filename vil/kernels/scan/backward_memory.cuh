// Shared memory of backward.cu, and its use of local memory.

#include "lanes.cuh"

constexpr int TILES = CHUNK / TILE, HALF = TILE / 2;
constexpr int KEY_TOKENS = 256 * WARPS / N < CHUNK ? 256 * WARPS / N : CHUNK;  // tokens whose keys are loaded together
static_assert(NL == 4);

// The length of rows in shared memory is chosen so that simultaneous accesses use different banks
constexpr int ROW = WARP_CHANNELS + 8;
constexpr int PART_SUMS = 4 * GROUPS + 8, CHANNEL_SUMS = PARTS * PART_SUMS + 4, STATE_SUMS = PARTS * ROW + 8;

struct Channels {
    alignas(16) Element x[TILE][WARP_CHANNELS];
    alignas(16) Element step_logits[TILE][WARP_CHANNELS];
    alignas(16) Element dy[TILE][WARP_CHANNELS];
};

struct WarpMemory {
    Channels stage[STAGES];  // the current tile and those being copied
    alignas(16) float skip[WARP_CHANNELS];
    alignas(16) float bias[WARP_CHANNELS];
    alignas(16) float step_size[TILE][ROW];
    alignas(16) float slope[TILE][ROW];
    alignas(16) float channel_sums[HALF][CHANNEL_SUMS];  // dq, then dk, over each lane's channels
    alignas(16) float state_sums[2][HALF][STATE_SUMS];  // sum_x and sum_step_size over each lane's states
    alignas(16) float dkeys[2][TILE][2][N];  // dk and dq over the warp's channels, for two tiles
    alignas(16) float norm[2][TILE];  // dL/d(k.k) over the warp's channels
};

struct CtaMemory {
    Keys<CHUNK> keys;
    alignas(16) WarpMemory warps[WARPS];
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);

typedef Recurrence::Kept Kept[NL][DL];

// The third most significant byte of each of two words, in the result's lower half
DEVICE unsigned third_bytes(unsigned a, unsigned b) { return __byte_perm(a, b, 0x51); }
// A half of a word as the result's upper half, and below it a byte of another word, twice
DEVICE unsigned half_and_byte_twice(unsigned halves, int half, unsigned bytes, int byte) {
    return __byte_perm(halves, bytes, (half ? 0x3200 : 0x1000) + 0x11 * (4 + byte));
}

// Saved states, in 24 bits for 16-bit inputs. The states of all warps on a GPU are about as large as its L2 cache, so
// their size matters; with 16 bits, gradients that are sums over tokens would lose more precision than the inputs have.
template <class Type>
struct alignas(4 * DL) Restart {
    static constexpr int STATES_OF_LANE = NL * DL;
    // the upper 16 bits of each state, and the following 8 bits
    unsigned high[STATES_OF_LANE / 2], low[STATES_OF_LANE / 4];
    INLINE void save(const States &S) {
        unsigned bits[STATES_OF_LANE];
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i++) bits[i] = __float_as_uint(S[i / DL][i % DL]);
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i += 2) high[i / 2] = upper_halves(bits[i], bits[i + 1]);
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i += 4)
            low[i / 4] = lower_halves(third_bytes(bits[i], bits[i + 1]), third_bytes(bits[i + 2], bits[i + 3]));
    }
    // the 8 bits also replace the bits that were dropped
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
