// Layout of a warp in kernels without tensor cores.
// A lane keeps NL states of each of DL adjacent channels in registers during the whole scan.
// PARTS = N / NL lanes share a group of DL channels, and a warp has GROUPS groups.
// In the index of a lane, bit 0 and the bits from 2 on select the part of the states.
// Bit 1 and the highest bits of the index select the group of channels.
// Adjacent lanes read the same or consecutive addresses, so a 16-byte load from shared memory takes 2 cycles, not 4.
// With 4 parts and 8 groups:
//
//     lane    0  1  2  3  4  5  6  7  8  9 10 ...        states NL part .. NL part + NL - 1
//     part    0  1  0  1  2  3  2  3  0  1  0 ...        channels DL group .. DL group + DL - 1 of the warp's
//     group   0  0  1  1  0  0  1  1  2  2  3 ...
//
// The warps of a CTA share keys and queries.

#include "tiles.cuh"

constexpr int PARTS = N / NL, GROUPS = 32 / PARTS, WARP_CHANNELS = GROUPS * DL;
constexpr int KEY_VECTORS = N / 4;  // number of 16-byte vectors per key or query

DEVICE int part_of(int lane) { return PARTS == 1 ? 0 : lane % 2 | (lane / 2 & PARTS - 2); }
DEVICE int group_of(int lane) { return PARTS == 1 ? lane : lane / 2 % 2 | lane / (2 * PARTS) * 2; }
// Distance between two lanes whose parts, or groups, differ only in `bit`.
DEVICE constexpr int part_distance(int bit) { return bit == 1 ? 1 : 2 * bit; }
DEVICE constexpr int group_distance(int bit) { return PARTS == 1 ? bit : bit == 1 ? 2 : bit * PARTS; }

// Position of a lane in the grid, with the first channel of its warp, and its own first channel and first state.
struct Position : GridPosition {
    i64 warp_d, d;
    int lane, part, group, c, n;
    bool valid;  // whether the lane's channels exist
    INLINE Position(i64 B, i64 D, i64 segments)
        : GridPosition(WARPS * WARP_CHANNELS, D, segments, B) {
        lane = threadIdx.x % 32;
        part = part_of(lane), group = group_of(lane);
        c = group * DL, n = part * NL;
        warp_d = (channels * WARPS + threadIdx.x / 32) * WARP_CHANNELS;
        d = warp_d + c;
        valid = d < D;
    }
};

// States of a lane, or the gradients or decays of its states. In memory, a row contains one state of all channels.
typedef float States[NL][DL];

DEVICE void fill(States &S, float value) {
    UNROLLED for (int n = 0; n < NL; n++)
        UNROLLED for (int c = 0; c < DL; c++) S[n][c] = value;
}
DEVICE void load_states(States &S, const float *states, i64 D) {
    UNROLLED for (int n = 0; n < NL; n++) {
        Floats<DL> v = load<DL>(states + n * D);
        UNROLLED for (int c = 0; c < DL; c++) S[n][c] = v.at[c];
    }
}
DEVICE void store_states(float *states, const States &S, i64 D) {
    UNROLLED for (int n = 0; n < NL; n++) {
        Floats<DL> v;
        UNROLLED for (int c = 0; c < DL; c++) v.at[c] = S[n][c];
        store(states + n * D, v);
    }
}
// Loads A of the lane's states, scaled so that a decay is one exp2, or 0 for Longhorn.
DEVICE void load_A(States &lane_A, const float *A, const Position &at, i64 D) {
    UNROLLED for (int n = 0; n < NL; n++)
        UNROLLED for (int c = 0; c < DL; c++)
            lane_A[n][c] = Recurrence::HAS_A && at.valid
                          ? Recurrence::scaled_A(A[(at.g * D + at.d + c) * N + at.n + n])
                          : 0;
}

// Keys and queries of TOKENS tokens in fp32; kk is k.k.
template <int TOKENS>
struct Keys {
    alignas(16) float k[TOKENS][N];
    alignas(16) float q[TOKENS][N];
    alignas(16) float kk[TOKENS];
};

// Keys and queries of TOKENS tokens while they are loaded into registers.
// A thread loads 4 adjacent states of a key or query at a time, always the same 4 states.
// If fewer than TOKENS tokens exist, further loads repeat the last token, which does not affect results.
template <int TOKENS, int THREADS>
struct KeysInFlight {
    static constexpr int ROW = 2 * KEY_VECTORS, ITEMS = (TOKENS * ROW + THREADS - 1) / THREADS, APART = THREADS / ROW;
    static_assert(THREADS % ROW == 0);
    Input source;
    int first, n;
    bool is_query, vectors;
    Pack<Element, 4> item[ITEMS];

    // `vectors` tells whether one load may read all 4 states.
    INLINE KeysInFlight(const Input &k, const Input &q, bool vectors, int thread)
        : source(thread / KEY_VECTORS % 2 ? q : k), first(thread / (2 * KEY_VECTORS)), n(thread % KEY_VECTORS * 4),
          is_query(thread / KEY_VECTORS % 2), vectors(vectors) {
        source.data += n;
    }
    INLINE void fetch(int t0, int tokens) {
        const Element *p[ITEMS];
        UNROLLED for (int i = 0; i < ITEMS; i++) p[i] = source.at(t0 + min(first + i * APART, tokens - 1));
        if (vectors) {
            UNROLLED for (int i = 0; i < ITEMS; i++) item[i] = load<4>(p[i]);
        } else {
            UNROLLED for (int i = 0; i < ITEMS; i++) item[i] = gather4(p[i]);
        }
    }
    // Stores the tokens in `keys` from token `start` on. SQUARED stores k^2 instead of k.
    template <bool SQUARED = false, int ROOM>
    INLINE void put(Keys<ROOM> &keys, int start = 0) const {
        float *to = is_query ? keys.q[start + first] : keys.k[start + first];
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            Floats<4> v = to_floats(item[i]);
            float kk = v.at[0] * v.at[0] + v.at[1] * v.at[1] + v.at[2] * v.at[2] + v.at[3] * v.at[3];
            UNROLLED for (int distance = 1; distance < KEY_VECTORS; distance *= 2)
                kk += __shfl_xor_sync(WARP, kk, distance);
            if (TOKENS % APART == 0 || first + i * APART < TOKENS) {
                if (SQUARED && !is_query)
                    UNROLLED for (int j = 0; j < 4; j++) v.at[j] *= v.at[j];
                store(to + i * APART * N + n, v);
                if (!is_query && n == 0) keys.kk[start + first + i * APART] = kk;
            }
        }
    }
};
