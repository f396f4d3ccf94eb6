// The layout of the kernels that run straight through a sequence: a lane owns C channels and some or all of their states,
// in registers from the first token to the last. The warps of a block share keys and queries. Further macros:
//   UNROLL    tokens whose instructions are interleaved and whose sums over lanes are finished together
//   AHEAD     whether a lane has so few states that there are registers to load the next tokens ahead

#include "recurrences.cuh"

static_assert(UNROLL % 4 == 0 && TILE % UNROLL == 0 && CHUNK % TILE == 0);

// The warp's channels of a tile as they are in memory: x, or dy where gradients are scanned
struct Channels {
    alignas(16) T value[TILE][WARP_CHANNELS];
    alignas(16) T logit[TILE][WARP_CHANNELS];
};

// One warp's place in the grid: a segment of a sequence; and the channels and states of this lane
struct Place {
    i64 g, b, segment, warp_d, d;
    int lane, part, group, n;
    bool valid;
    __device__ __forceinline__ Place(i64 B, i64 D, i64 segments) {
        lane = threadIdx.x % 32;
        part = part_of(lane);
        group = group_of(lane);
        i64 blocks = (D + WARPS * WARP_CHANNELS - 1) / (WARPS * WARP_CHANNELS);
        warp_d = (blockIdx.x % blocks * WARPS + threadIdx.x / 32) * WARP_CHANNELS;
        d = warp_d + group * C;
        segment = blockIdx.x / blocks % segments;
        b = blockIdx.x / blocks / segments % B;
        g = blockIdx.x / blocks / segments / B;
        n = part * NL;
        valid = d < D;
    }
};

// The tile as lanes read it. Gates are computed by one lane each, whichever lanes will read them. `Staging` does this,
// `Token` is what a step of the scan asks for: the lane's channels of value and gate, its states of key and query.
template <bool AHEAD_>
struct Staged;

// Reading is little beside the arithmetic of many states: value, key and query are read when they are needed.
template <>
struct Staged<false> {
    alignas(16) float gates[TILE][WARP_CHANNELS];

    struct Staging {
        static constexpr int ITEMS = TILE * GROUPS / 32, APART = 32 / GROUPS;
        static_assert(AHEAD || ITEMS * 32 == TILE * GROUPS);
        int c, first;
        Floats<C> bias;
        __device__ __forceinline__ Staging(const float *biases, const Place &at, i64 D)
            : c(at.lane % GROUPS * C), first(at.lane / GROUPS) {
            bias = biases && at.warp_d + c < D ? load<C>(biases + at.g * D + at.warp_d + c) : Floats<C>{};
        }
        // the items side by side, since each is a long chain
        __device__ __forceinline__ void stage(Staged &staged, const Channels &tile, const Keys<TILE> &keys) const {
            Floats<C> gate[ITEMS];
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                Floats<C> logit = to_floats(load<C>(&tile.logit[first + i * APART][c]));
                float kk = keys.kk[first + i * APART];
#pragma unroll
                for (int j = 0; j < C; j++) gate[i].at[j] = R::gate(logit.at[j] + bias.at[j], kk);
            }
#pragma unroll
            for (int i = 0; i < ITEMS; i++) store(&staged.gates[first + i * APART][c], gate[i]);
        }
    };
    struct Token {
        const T *from_value;
        const float *from_gate, *from_k, *from_q;
        __device__ __forceinline__ Floats<C> value() const { return to_floats(load<C>(from_value)); }
        __device__ __forceinline__ Floats<C> gate() const { return load<C>(from_gate); }
        __device__ __forceinline__ Floats<4> k(int n) const { return load<4>(from_k + n); }
        __device__ __forceinline__ Floats<4> q(int n) const { return load<4>(from_q + n); }
    };
    __device__ __forceinline__ void read(Token (&tokens)[UNROLL], const Channels &tile, const Keys<TILE> &keys, int j0,
                                         const Place &at) const {
        int c = at.group * C;
#pragma unroll
        for (int j = 0; j < UNROLL; j++)
            tokens[j] = {&tile.value[j0 + j][c], &gates[j0 + j][c], &keys.k[j0 + j][at.n], &keys.q[j0 + j][at.n]};
    }
};

// With few states reading is much of the work: value and gate are staged so that one vector has four tokens of a channel,
// first the first channel of every group, and all is read a step ahead.
template <>
struct Staged<true> {
    alignas(16) float values[TILE / 4][WARP_CHANNELS][4];
    alignas(16) float gates[TILE / 4][WARP_CHANNELS][4];

    // a lane takes four tokens of some neighbouring channels
    struct Staging {
        static constexpr int MOST = TILE / 4 * WARP_CHANNELS / 32, CHANNELS = MOST > 2 ? 4 : MOST > 1 ? 2 : 1;
        static constexpr int ROW = WARP_CHANNELS / CHANNELS, ITEMS = (TILE / 4 * ROW + 31) / 32, APART = 32 / ROW;
        int c, first;
        Floats<CHANNELS> bias;
        __device__ __forceinline__ Staging(const float *biases, const Place &at, i64 D)
            : c(at.lane % ROW * CHANNELS), first(at.lane / ROW) {
#pragma unroll
            for (int i = 0; i < CHANNELS; i++)
                bias.at[i] = biases && at.warp_d + c + i < D ? biases[at.g * D + at.warp_d + c + i] : 0;
        }
        __device__ __forceinline__ void stage(Staged &staged, const Channels &tile, const Keys<TILE> &keys) const {
#pragma unroll
            for (int item = 0; item < ITEMS; item++) {
                int t = first + item * APART;
                if (TILE / 4 % APART != 0 && t >= TILE / 4) break;
                Floats<4> kk = load<4>(&keys.kk[4 * t]), values[CHANNELS], gates[CHANNELS];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    Floats<CHANNELS> value = to_floats(load<CHANNELS>(&tile.value[4 * t + j][c]));
                    Floats<CHANNELS> logit = to_floats(load<CHANNELS>(&tile.logit[4 * t + j][c]));
#pragma unroll
                    for (int i = 0; i < CHANNELS; i++) {
                        values[i].at[j] = value.at[i];
                        gates[i].at[j] = R::gate(logit.at[i] + bias.at[i], kk.at[j]);
                    }
                }
#pragma unroll
                for (int i = 0; i < CHANNELS; i++) {
                    int slot = (c + i) % C * GROUPS + (c + i) / C;
                    store(staged.values[t][slot], values[i]);
                    store(staged.gates[t][slot], gates[i]);
                }
            }
        }
    };
    struct Token {
        Floats<C> read_value, read_gate;
        Floats<4> read_k[NL / 4], read_q[NL / 4];
        __device__ __forceinline__ Floats<C> value() const { return read_value; }
        __device__ __forceinline__ Floats<C> gate() const { return read_gate; }
        __device__ __forceinline__ Floats<4> k(int n) const { return read_k[n / 4]; }
        __device__ __forceinline__ Floats<4> q(int n) const { return read_q[n / 4]; }
    };
    __device__ __forceinline__ void read(Token (&tokens)[UNROLL], const Channels &, const Keys<TILE> &keys, int j0,
                                         const Place &at) const {
#pragma unroll
        for (int j = 0; j < UNROLL; j++)
#pragma unroll
            for (int n = 0; n < NL / 4; n++) {
                tokens[j].read_k[n] = load<4>(&keys.k[j0 + j][at.n + 4 * n]);
                tokens[j].read_q[n] = load<4>(&keys.q[j0 + j][at.n + 4 * n]);
            }
#pragma unroll
        for (int j = 0; j < UNROLL; j += 4)
#pragma unroll
            for (int c = 0; c < C; c++) {
                Floats<4> value = load<4>(values[(j0 + j) / 4][c * GROUPS + at.group]);
                Floats<4> gate = load<4>(gates[(j0 + j) / 4][c * GROUPS + at.group]);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    tokens[j + i].read_value.at[c] = value.at[i], tokens[j + i].read_gate.at[c] = gate.at[i];
            }
    }
};
typedef Staged<AHEAD>::Token Token;

struct Warp {
    Staged<AHEAD> staged;
    Channels stage[STAGES];
};

struct Block {
    Keys<TILE> keys[2];
    Warp warps[WARPS];
};

typedef float States[NL][C];

DEVICE void load_rates(States &A, const float *rates, const Place &at, i64 D) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++)
            A[n][c] = R::HAS_RATES && at.valid ? R::rate(rates[(at.g * D + at.d + c) * N + at.n + n]) : 0;
}

DEVICE void load_states(States &S, const float *states, i64 D) {
#pragma unroll
    for (int n = 0; n < NL; n++) {
        Floats<C> v = load<C>(states + n * D);
#pragma unroll
        for (int c = 0; c < C; c++) S[n][c] = v.at[c];
    }
}

DEVICE void store_states(float *states, const States &S, i64 D) {
#pragma unroll
    for (int n = 0; n < NL; n++) {
        Floats<C> v;
#pragma unroll
        for (int c = 0; c < C; c++) v.at[c] = S[n][c];
        store(states + n * D, v);
    }
}

// Runs from token `begin` to `end`, tile by tile: `at_chunk(t)` before each chunk, then `step(tokens, t, left)` for UNROLL
// tokens from t on, of which `left` exist, perhaps more or none. SQUARED gives them k^2 in place of k
template <bool SQUARED = false, class AtChunk, class Step>
DEVICE void run(Block &block, const Tokens<const T> &values, const Tokens<const T> &logits, const Sequence<const T> &ks,
                const Sequence<const T> &qs, const float *biases, int begin, int end, i64 L, bool backwards,
                bool key_vectors, const Place &at, i64 D, AtChunk at_chunk, Step step) {
    Warp &warp = block.warps[threadIdx.x / 32];
    ChannelCopies copies(at.warp_d, D);
    Sequence<const T> value = copies.source({values, at.g, at.b, L, backwards}, at.warp_d);
    Sequence<const T> logit = copies.source({logits, at.g, at.b, L, backwards}, at.warp_d);
    auto copy = [&](Channels &to, int t0) {
        copies.start(to.value, value, t0, end - t0);
        copies.start(to.logit, logit, t0, end - t0);
        commit_copies();
    };
    Staged<AHEAD>::Staging staging(biases, at, D);
    KeysInFlight<TILE, 32 * WARPS> keys(ks, qs, key_vectors, threadIdx.x);
    keys.fetch(begin, end - begin);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy(warp.stage[s], begin + s * TILE);
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE) {
        if ((t0 - begin) % CHUNK == 0) at_chunk(t0);
        Keys<TILE> &tile_keys = block.keys[buffer];
        keys.template put<SQUARED>(tile_keys);
        if (end - t0 > TILE) keys.fetch(t0 + TILE, end - t0 - TILE);
        wait_for_copies<STAGES - 2>();
        // two buffers of keys, so that one barrier a tile is enough
        __syncthreads();
        copy(warp.stage[stage > 0 ? stage - 1 : STAGES - 1], t0 + (STAGES - 1) * TILE);
        const Channels &tile = warp.stage[stage];
        staging.stage(warp.staged, tile, tile_keys);
        __syncwarp();
        Token tokens[UNROLL];
        if (AHEAD) {
            warp.staged.read(tokens, tile, tile_keys, 0, at);
#pragma unroll
            for (int j0 = 0; j0 < TILE; j0 += UNROLL) {
                Token following[UNROLL];
                warp.staged.read(following, tile, tile_keys, j0 + UNROLL < TILE ? j0 + UNROLL : j0, at);
                step(tokens, t0 + j0, end - t0 - j0);
#pragma unroll
                for (int j = 0; j < UNROLL; j++) tokens[j] = following[j];
            }
        } else {
            int exist = min(TILE, end - t0);
#pragma unroll 1
            for (int j0 = 0; j0 < exist; j0 += UNROLL) {
                warp.staged.read(tokens, tile, tile_keys, j0, at);
                step(tokens, t0 + j0, exist - j0);
            }
        }
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        buffer ^= 1;
    }
}
