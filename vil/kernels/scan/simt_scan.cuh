// `scan_tiles`, the loop of kernels without tensor cores that process a sequence from start to end.
// Each warp copies its own channels STAGES - 1 tiles ahead.
// All threads of the CTA load keys and queries one tile ahead.
// For each tile:
//
//    all warps    store keys of this tile from registers to shared memory, and start loading keys of the next tile
//    barrier      __syncthreads
//    each warp    start copying the tile STAGES - 1 ahead; step sizes to shared memory; __syncwarp; scan the tokens
//
// By rules 1 and 2 of cuda/pipeline.cuh, one barrier per tile is sufficient, because keys have two buffers.
//
// Further macros:
//   UNROLL    number of tokens whose instructions are interleaved and whose sums over lanes are computed together
//   AHEAD     whether a lane has so few states that enough registers are left to load the next tokens ahead

#include "lanes.cuh"

static_assert(UNROLL % 4 == 0 && TILE % UNROLL == 0 && CHUNK % TILE == 0);

// Channels of a warp for one tile, as in memory. `value` is x or, if gradients are scanned, dy.
struct Channels {
    alignas(16) Element value[TILE][WARP_CHANNELS];
    alignas(16) Element step_logits[TILE][WARP_CHANNELS];
};

// Tile in the layout in which lanes read values and step sizes.
// `Preparation` computes each step size in one lane, because several lanes may read the step size.
// `Token` holds the lane's channels of value and step size, and the lane's states of key and query.
template <bool AHEAD_>
struct Prepared;

// With many states, loads take little time compared with arithmetic, so values and keys are loaded when needed.
template <>
struct Prepared<false> {
    alignas(16) float step_sizes[TILE][WARP_CHANNELS];

    struct Preparation {
        static constexpr int ITEMS = TILE * GROUPS / 32, APART = 32 / GROUPS;
        static_assert(AHEAD || ITEMS * 32 == TILE * GROUPS);
        int c, first;
        Floats<DL> bias;
        INLINE Preparation(const float *step_bias, const Position &at, i64 D)
            : c(at.lane % GROUPS * DL), first(at.lane / GROUPS) {
            bias = step_bias && at.warp_d + c < D ? load<DL>(step_bias + at.g * D + at.warp_d + c) : Floats<DL>{};
        }
        // Items are interleaved, because each item is a long chain of dependent instructions.
        INLINE void run(Prepared &to, const Channels &tile, const Keys<TILE> &keys) const {
            Floats<DL> step_size[ITEMS];
            UNROLLED for (int i = 0; i < ITEMS; i++) {
                Floats<DL> step_logit = to_floats(load<DL>(&tile.step_logits[first + i * APART][c]));
                float kk = keys.kk[first + i * APART];
                UNROLLED for (int j = 0; j < DL; j++)
                    step_size[i].at[j] = Recurrence::step_size(step_logit.at[j] + bias.at[j], kk);
            }
            UNROLLED for (int i = 0; i < ITEMS; i++) store(&to.step_sizes[first + i * APART][c], step_size[i]);
        }
    };
    struct Token {
        const Element *from_value;
        const float *from_step_size, *from_k, *from_q;
        INLINE Floats<DL> value() const { return to_floats(load<DL>(from_value)); }
        INLINE Floats<DL> step_size() const { return load<DL>(from_step_size); }
        INLINE Floats<4> k(int n) const { return load<4>(from_k + n); }
        INLINE Floats<4> q(int n) const { return load<4>(from_q + n); }
    };
    INLINE void read(Token (&tokens)[UNROLL], const Channels &tile, const Keys<TILE> &keys, int j0,
                     const Position &at) const {
        UNROLLED for (int j = 0; j < UNROLL; j++)
            tokens[j] = {&tile.value[j0 + j][at.c], &step_sizes[j0 + j][at.c], &keys.k[j0 + j][at.n],
                         &keys.q[j0 + j][at.n]};
    }
};

// With few states, loads take much of the time, so everything is loaded one step ahead.
// A vector of values or step sizes contains four tokens of a channel.
// The first channels of all groups are stored first, then the second channels.
template <>
struct Prepared<true> {
    alignas(16) float values[TILE / 4][WARP_CHANNELS][4];
    alignas(16) float step_sizes[TILE / 4][WARP_CHANNELS][4];

    // A lane processes four tokens of CHANNELS adjacent channels.
    struct Preparation {
        static constexpr int MOST = TILE / 4 * WARP_CHANNELS / 32, CHANNELS = MOST > 2 ? 4 : MOST > 1 ? 2 : 1;
        static constexpr int ROW = WARP_CHANNELS / CHANNELS, ITEMS = (TILE / 4 * ROW + 31) / 32, APART = 32 / ROW;
        int c, first;
        Floats<CHANNELS> bias;
        INLINE Preparation(const float *step_bias, const Position &at, i64 D)
            : c(at.lane % ROW * CHANNELS), first(at.lane / ROW) {
            UNROLLED for (int i = 0; i < CHANNELS; i++)
                bias.at[i] = step_bias && at.warp_d + c + i < D ? step_bias[at.g * D + at.warp_d + c + i] : 0;
        }
        INLINE void run(Prepared &to, const Channels &tile, const Keys<TILE> &keys) const {
            UNROLLED for (int item = 0; item < ITEMS; item++) {
                int t = first + item * APART;
                if (TILE / 4 % APART != 0 && t >= TILE / 4) break;
                Floats<4> kk = load<4>(&keys.kk[4 * t]), values[CHANNELS], step_sizes[CHANNELS];
                UNROLLED for (int j = 0; j < 4; j++) {
                    Floats<CHANNELS> value = to_floats(load<CHANNELS>(&tile.value[4 * t + j][c]));
                    Floats<CHANNELS> step_logit = to_floats(load<CHANNELS>(&tile.step_logits[4 * t + j][c]));
                    UNROLLED for (int i = 0; i < CHANNELS; i++) {
                        values[i].at[j] = value.at[i];
                        step_sizes[i].at[j] = Recurrence::step_size(step_logit.at[i] + bias.at[i], kk.at[j]);
                    }
                }
                UNROLLED for (int i = 0; i < CHANNELS; i++) {
                    int slot = (c + i) % DL * GROUPS + (c + i) / DL;
                    store(to.values[t][slot], values[i]);
                    store(to.step_sizes[t][slot], step_sizes[i]);
                }
            }
        }
    };
    struct Token {
        Floats<DL> read_value, read_step_size;
        Floats<4> read_k[NL / 4], read_q[NL / 4];
        INLINE Floats<DL> value() const { return read_value; }
        INLINE Floats<DL> step_size() const { return read_step_size; }
        INLINE Floats<4> k(int n) const { return read_k[n / 4]; }
        INLINE Floats<4> q(int n) const { return read_q[n / 4]; }
    };
    INLINE void read(Token (&tokens)[UNROLL], const Channels &, const Keys<TILE> &keys, int j0,
                     const Position &at) const {
        UNROLLED for (int j = 0; j < UNROLL; j++)
            UNROLLED for (int n = 0; n < NL / 4; n++) {
                tokens[j].read_k[n] = load<4>(&keys.k[j0 + j][at.n + 4 * n]);
                tokens[j].read_q[n] = load<4>(&keys.q[j0 + j][at.n + 4 * n]);
            }
        UNROLLED for (int j = 0; j < UNROLL; j += 4)
            UNROLLED for (int c = 0; c < DL; c++) {
                Floats<4> value = load<4>(values[(j0 + j) / 4][c * GROUPS + at.group]);
                Floats<4> step_size = load<4>(step_sizes[(j0 + j) / 4][c * GROUPS + at.group]);
                UNROLLED for (int i = 0; i < 4; i++)
                    tokens[j + i].read_value.at[c] = value.at[i], tokens[j + i].read_step_size.at[c] = step_size.at[i];
            }
    }
};
typedef Prepared<AHEAD>::Token Token;

struct WarpMemory {
    Prepared<AHEAD> prepared;
    Channels stage[STAGES];
};

struct CtaMemory {
    Keys<TILE> keys[2];
    WarpMemory warps[WARPS];
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);

// Scans tokens `begin` to `end`, tile by tile, and calls `at_chunk(t)` before each chunk.
// `scan(tokens, t, left)` receives UNROLL tokens from t on, of which `left` tokens exist if left < UNROLL.
// With SQUARED, tokens contain k^2 instead of k.
template <bool SQUARED = false, class AtChunk, class Scan>
DEVICE void scan_tiles(CtaMemory &cta, const Tokens<const Element> &values, const Tokens<const Element> &step_logits,
                       const Input &ks, const Input &qs, const float *step_bias, int begin, int end, i64 L,
                       bool backwards, bool key_vectors, const Position &at, i64 D, AtChunk at_chunk, Scan scan) {
    WarpMemory &warp = cta.warps[threadIdx.x / 32];
    TileCopies<WARP_CHANNELS> copies(at.warp_d, D);
    auto channels_of = [&](const Tokens<const Element> &x) {
        return Input(x, at.g, at.b, L, backwards).from(at.warp_d + copies.column);
    };
    Input value = channels_of(values), step_logit = channels_of(step_logits);
    auto copy = [&](Channels &to, int t0) {
        copies.start(value, t0, end - t0, [&](int t) { return &to.value[t][copies.column]; });
        copies.start(step_logit, t0, end - t0, [&](int t) { return &to.step_logits[t][copies.column]; });
        commit_copies();
    };
    Prepared<AHEAD>::Preparation preparation(step_bias, at, D);
    KeysInFlight<TILE, 32 * WARPS> keys(ks, qs, key_vectors, threadIdx.x);
    keys.fetch(begin, end - begin);
    UNROLLED for (int s = 0; s < STAGES - 1; s++) copy(warp.stage[s], begin + s * TILE);
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE) {
        if ((t0 - begin) % CHUNK == 0) at_chunk(t0);
        Keys<TILE> &tile_keys = cta.keys[buffer];
        keys.template put<SQUARED>(tile_keys);
        if (end - t0 > TILE) keys.fetch(t0 + TILE, end - t0 - TILE);
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        copy(warp.stage[stage > 0 ? stage - 1 : STAGES - 1], t0 + (STAGES - 1) * TILE);
        const Channels &tile = warp.stage[stage];
        preparation.run(warp.prepared, tile, tile_keys);
        __syncwarp();
        Token tokens[UNROLL];
        int exist = min(TILE, end - t0);
        if (AHEAD) {
            warp.prepared.read(tokens, tile, tile_keys, 0, at);
            UNROLLED for (int j0 = 0; j0 < TILE; j0 += UNROLL) {
                if (j0 % 16 == 0 && j0 >= exist) break;
                Token following[UNROLL];
                warp.prepared.read(following, tile, tile_keys, j0 + UNROLL < TILE ? j0 + UNROLL : j0, at);
                scan(tokens, t0 + j0, exist - j0);
                UNROLLED for (int j = 0; j < UNROLL; j++) tokens[j] = following[j];
            }
        } else {
#pragma unroll 1
            for (int j0 = 0; j0 < exist; j0 += UNROLL) {
                warp.prepared.read(tokens, tile, tile_keys, j0, at);
                scan(tokens, t0 + j0, exist - j0);
            }
        }
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        buffer ^= 1;
    }
}
