// The layout of the kernels that run straight through a sequence: a lane owns C channels and their states, in registers
// from the first token to the last, and a warp shares nothing with others, so that none ever waits for another.
// Further macros:
//   STAGES    tiles on their way from memory at once
//   UNROLL    tokens whose instructions are interleaved: the more, the fewer warps keep a scheduler busy
//   VECTOR    channels copied by one instruction, as the alignment of the tensors allows

// The warp's channels of a tile as they are in memory: x, or dy where gradients are scanned
struct Channels {
    alignas(16) T value[TILE][WARP_CHANNELS];
    alignas(16) T logit[TILE][WARP_CHANNELS];
};

struct Warp {
    Keys<TILE> keys;
    alignas(16) float gate[TILE][WARP_CHANNELS];
    Channels stage[STAGES];
};

// One warp's place in the grid: a segment of a sequence; and the channels and states of this lane
struct Place {
    i64 g, b, segment, warp_d, d;
    int lane, c, n;
    bool valid;
    __device__ __forceinline__ Place(i64 B, i64 D, i64 segments) {
        lane = threadIdx.x % 32;
        i64 blocks = (D + WARPS * WARP_CHANNELS - 1) / (WARPS * WARP_CHANNELS);
        warp_d = (blockIdx.x % blocks * WARPS + threadIdx.x / 32) * WARP_CHANNELS;
        c = lane / LANES * C;
        d = warp_d + c;
        segment = blockIdx.x / blocks % segments;
        b = blockIdx.x / blocks / segments % B;
        g = blockIdx.x / blocks / segments / B;
        n = lane % LANES * NL;
        valid = d < D;
    }
};

// Copies a warp's channels in blocks of VECTOR; the lane's share of each tile differs from the tile before by a constant
struct ChannelCopies {
    static constexpr int ROW = WARP_CHANNELS / VECTOR, ITEMS = (TILE * ROW + 31) / 32, TOKENS_APART = 32 / ROW;
    static_assert(32 % ROW == 0);
    const T *value, *logit;
    int value_stride, logit_stride, token, c;
    bool valid;

    __device__ __forceinline__ ChannelCopies(const Sequence<const T> &values, const Sequence<const T> &logits,
                                             i64 begin, const Place &at, i64 D)
        : value_stride(values.stride), logit_stride(logits.stride), token(at.lane / ROW), c(at.lane % ROW * VECTOR) {
        valid = at.warp_d + c < D;
        value = values.at(begin, token) + at.warp_d + c;
        logit = logits.at(begin, token) + at.warp_d + c;
    }
    // starts the copy of the next tile, of which `tokens` exist
    __device__ __forceinline__ void start(Channels &tile, i64 tokens) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int t = token + i * TOKENS_APART;
            bool exists = valid && t < tokens;
            if (TILE % TOKENS_APART == 0 || t < TILE) {
                copy_async<VECTOR>(&tile.value[t][c], value + i64(i * TOKENS_APART) * value_stride, exists);
                copy_async<VECTOR>(&tile.logit[t][c], logit + i64(i * TOKENS_APART) * logit_stride, exists);
            }
        }
        commit_copies();
        value += i64(TILE) * value_stride;
        logit += i64(TILE) * logit_stride;
    }
};

// The gates of a tile, each computed by one lane, whichever lanes will read it; side by side, since each is a long chain
DEVICE void stage_gates(Warp &warp, const Channels &tile, const Floats<C> &bias, const Place &at) {
    constexpr int ITEMS = TILE * GROUPS / 32, APART = 32 / GROUPS;
    static_assert(ITEMS * 32 == TILE * GROUPS);
    int c = at.lane % GROUPS * C, first = at.lane / GROUPS;
    Floats<C> gate[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        Floats<C> logit = to_floats(load<C>(&tile.logit[first + i * APART][c]));
        float kk = warp.keys.kk[first + i * APART];
#pragma unroll
        for (int j = 0; j < C; j++) gate[i].at[j] = R::gate(logit.at[j] + bias.at[j], kk);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) store(&warp.gate[first + i * APART][c], gate[i]);
}

typedef float States[NL][C];

DEVICE void load_rates(States &A, const float *rates, const Place &at, i64 D) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++)
            A[n][c] = R::HAS_RATES && at.valid ? R::rate(rates[(at.g * D + at.d + c) * N + at.n + n]) : 0;
}

DEVICE void load_states(States &S, const float *kept, i64 D) {
#pragma unroll
    for (int n = 0; n < NL; n++) {
        Floats<C> v = load<C>(kept + n * D);
#pragma unroll
        for (int c = 0; c < C; c++) S[n][c] = v.at[c];
    }
}

DEVICE void store_states(float *kept, const States &S, i64 D) {
#pragma unroll
    for (int n = 0; n < NL; n++) {
        Floats<C> v;
#pragma unroll
        for (int c = 0; c < C; c++) v.at[c] = S[n][c];
        store(kept + n * D, v);
    }
}

// Runs from token `begin` to `end`, tile by tile: `at_chunk(t)` before each chunk; for each token `step(j, exists, value,
// gate, k, q)`, with the lane's channels and its states of key and query; after every UNROLL of them `after(tokens)`, of
// which so many exist
template <class AtChunk, class Step, class After>
DEVICE void run(Warp &warp, const Sequence<const T> &values, const Sequence<const T> &logits,
                const Sequence<const T> &ks, const Sequence<const T> &qs, const float *biases, i64 begin, i64 end,
                bool key_vectors, const Place &at, i64 D, AtChunk at_chunk, Step step,
                After after) {
    int gate_d = at.lane % GROUPS * C + at.warp_d;
    Floats<C> bias = biases && gate_d < D ? load<C>(biases + at.g * D + gate_d) : Floats<C>{};
    KeysInFlight<TILE, 32> keys(ks, qs, begin, key_vectors, at.lane);
    ChannelCopies channels(values, logits, begin, at, D);
    keys.fetch(min(i64(TILE), end - begin));
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) channels.start(warp.stage[s], end - begin - s * TILE);
    int stage = 0;
#pragma unroll 1
    for (i64 t0 = begin; t0 < end; t0 += TILE) {
        if ((t0 - begin) % CHUNK == 0) at_chunk(t0);
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        keys.put(warp.keys);
        i64 left = end - t0;
        int tokens = min(i64(TILE), left);
        if (left > TILE) {
            keys.advance(TILE);
            keys.fetch(min(i64(TILE), left - TILE));
        }
        channels.start(warp.stage[stage > 0 ? stage - 1 : STAGES - 1], left - (STAGES - 1) * TILE);
        __syncwarp();
        const Channels &tile = warp.stage[stage];
        stage_gates(warp, tile, bias, at);
        __syncwarp();
#pragma unroll 1
        for (int j0 = 0; j0 < tokens; j0 += UNROLL) {
#pragma unroll
            for (int j = 0; j < UNROLL; j++)
                step(j, j0 + j < tokens, to_floats(load<C>(&tile.value[j0 + j][at.c])),
                     load<C>(&warp.gate[j0 + j][at.c]), &warp.keys.k[j0 + j][at.n], &warp.keys.q[j0 + j][at.n]);
            after(tokens - j0);
        }
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
}
