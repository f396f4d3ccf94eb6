// Gradients of the scan. Forward kept the state between chunks. For each chunk, from the last to the first:
//   1. scan it once more, keeping the state before every TILE tokens;
//   2. for each tile, from the last to the first, and each half of it: scan to the half, then on through it, keeping what
//      the gradients need of each token in registers, then walk back through it with G = dL/dS.
// A lane owns 4 states of C channels, which makes its sums over states and over channels equally short. Both are finished
// through shared memory, half a tile at once: that takes a third of the instructions of shuffles. There are no atomics:
// blocks write partial sums over their channels, to be added in a fixed order.

constexpr int TILES = CHUNK / TILE;
constexpr int HALF = TILE / 2;
constexpr int KEY_TOKENS = 256 * WARPS / N < CHUNK ? 256 * WARPS / N : CHUNK;  // whose keys and queries are on their way at once
static_assert(NL == 4);

struct Warp {
    alignas(16) float skip[WARP_CHANNELS];
    alignas(16) float bias[WARP_CHANNELS];
    alignas(16) float x[TILE][WARP_CHANNELS];
    alignas(16) float gate[TILE][WARP_CHANNELS];
    alignas(16) float slope[TILE][WARP_CHANNELS];
    alignas(16) float dy[TILE][WARP_CHANNELS];
    // dk and dq of a token over each lane's channels; a column more than there are groups, for the banks' sake
    alignas(16) float channel_sums[2][HALF][QUADS][GROUPS + 1][4];
    alignas(16) float state_sums[2][HALF][QUADS][WARP_CHANNELS];  // sum_x and sum_gate over each lane's states
    alignas(16) float dkeys[2][TILE][2][N];                       // dk and dq over the warp's channels, of two tiles
    float norm[HALF];                                             // dL/d(k.k) over the warp's channels
};

struct Block {
    Keys<CHUNK> keys;
    alignas(16) Warp warps[WARPS];
};

// One warp's place in the grid: a segment of a sequence; and the channels and states of this lane
struct Place {
    i64 g, b, segment, block, d, loaded_d;
    int lane, group, quad, c;
    bool valid;
    __device__ __forceinline__ Place(i64 B, i64 D, i64 segments) {
        lane = threadIdx.x % 32;
        group = lane % GROUPS;
        quad = lane / GROUPS;
        c = group * C;
        i64 blocks = (D + WARPS * WARP_CHANNELS - 1) / (WARPS * WARP_CHANNELS);
        block = blockIdx.x % blocks;
        d = (block * WARPS + threadIdx.x / 32) * WARP_CHANNELS + c;
        loaded_d = min(d, D - C);
        segment = blockIdx.x / blocks % segments;
        b = blockIdx.x / blocks / segments % B;
        g = blockIdx.x / blocks / segments / B;
        valid = d < D;
    }
};

// The warp's channels of a tile on their way from memory, fetched while the tile before is worked on. The lane that
// fetches a token's channels is the one that later stores their gradients.
struct ChannelsInFlight {
    static constexpr int ITEMS = TILE * GROUPS / 32, APART = 32 / GROUPS;
    static_assert(ITEMS * 32 == TILE * GROUPS);
    Pack<T, C> x[ITEMS], logit[ITEMS], dy[ITEMS];

    __device__ __forceinline__ void fetch(const Sequence<const T> &xs, const Sequence<const T> &logits,
                                          const Sequence<const T> &dys, i64 t0, int tokens, const Place &at) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int token = min(at.lane / GROUPS + i * APART, tokens - 1);
            x[i] = load<C>(xs.at(t0, token) + at.loaded_d);
            logit[i] = load<C>(logits.at(t0, token) + at.loaded_d);
            dy[i] = load<C>(dys.at(t0, token) + at.loaded_d);
        }
    }
    // what scanning the states needs, and with GRADIENTS the rest
    template <bool GRADIENTS>
    __device__ __forceinline__ void put(Warp &warp, const float *kk, int tokens, const Place &at) const {
        Floats<C> bias = load<C>(&warp.bias[at.c]), gate[ITEMS], slope[ITEMS];
        int first = at.lane / GROUPS;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            Floats<C> l = to_floats(logit[i]);
            float kk_t = kk[first + i * APART];
#pragma unroll
            for (int c = 0; c < C; c++) {
                gate[i].at[c] = R::gate(l.at[c] + bias.at[c], kk_t);
                slope[i].at[c] = R::slope(l.at[c] + bias.at[c], gate[i].at[c]);
            }
        }
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int token = first + i * APART;
            Floats<C> gradient = to_floats(dy[i]);
#pragma unroll
            for (int c = 0; c < C; c++)  // behind the last token or channel: no gradient comes in, so none comes out
                if (token >= tokens || !at.valid) gradient.at[c] = 0;
            store(&warp.x[token][at.c], to_floats(x[i]));
            store(&warp.gate[token][at.c], gate[i]);
            if (GRADIENTS) {
                store(&warp.slope[token][at.c], slope[i]);
                store(&warp.dy[token][at.c], gradient);
            }
        }
    }
};

typedef float States[NL][C];

DEVICE void load_states(States &S, const float *p, i64 stride) {
#pragma unroll
    for (int n = 0; n < NL; n++) {
        Floats<C> v = load<C>(p + n * stride);
#pragma unroll
        for (int c = 0; c < C; c++) S[n][c] = v.at[c];
    }
}

DEVICE void clear_states(States &S) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) S[n][c] = 0;
}

DEVICE void copy_states(States &to, const States &from) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) to[n][c] = from[n][c];
}

// What the lane needs of token j of the tile
struct Token {
    Floats<4> k, q;
    Floats<C> x, gate, dy;
    __device__ __forceinline__ Token(const Keys<CHUNK> &keys, const Warp &warp, int tile_start, int j, const Place &at)
        : k(load<4>(&keys.k[tile_start + j][4 * at.quad])), q(load<4>(&keys.q[tile_start + j][4 * at.quad])),
          x(load<C>(&warp.x[j][at.c])), gate(load<C>(&warp.gate[j][at.c])), dy(load<C>(&warp.dy[j][at.c])) {}
};

DEVICE void step(States &S, const Token &t, const States &A) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) R::update(S[n][c], t.x.at[c], t.gate.at[c], t.k.at[n], A[n][c]);
}

// One step, keeping what the gradients need; dq over the lane's channels
DEVICE void step_keeping(States &S, States &kept, Floats<4> &dq, const Token &t, const States &A) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) kept[n][c] = R::keep(S[n][c], t.x.at[c], t.k.at[n]);
    step(S, t, A);
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) dq.at[n] = fmaf(t.dy.at[c], S[n][c], dq.at[n]);
}

// One step back: G from behind the token to before it, and the token's sums over the lane's channels and states
DEVICE void step_back(States &G, States &dA, const States &kept, Floats<4> &dk, Floats<C> &sum_x, Floats<C> &sum_gate,
                      const Token &t, const States &A) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) {
            G[n][c] = fmaf(t.dy.at[c], t.q.at[n], G[n][c]);
            R::gradients(G[n][c], kept[n][c], t.x.at[c], t.gate.at[c], t.k.at[n], A[n][c], sum_x.at[c],
                         sum_gate.at[c], dk.at[n], dA[n][c]);
        }
}

// S over the first tokens of a tile, keeping nothing
template <int TOKENS>
DEVICE void scan(States &S, const Warp &warp, const Keys<CHUNK> &keys, int tile_start, const States &A,
                 const Place &at) {
#pragma unroll
    for (int j = 0; j < TOKENS; j++) step(S, Token(keys, warp, tile_start, j, at), A);
}

// S over half a tile, keeping what the gradients need. Here and below a token is loaded before the one ahead of it stores
// its sums, as the compiler lets no load overtake a store.
DEVICE void rescan(States &S, States (&kept)[HALF], Warp &warp, const Keys<CHUNK> &keys, int tile_start, int first,
                   const States &A, const Place &at) {
    Token t(keys, warp, tile_start, first, at);
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        Token following(keys, warp, tile_start, first + (j < HALF - 1 ? j + 1 : j), at);
        Floats<4> dq = {};
        step_keeping(S, kept[j], dq, t, A);
        store(warp.channel_sums[1][j][at.quad][at.group], dq);
        t = following;
    }
}

// G back through half a tile
DEVICE void walk_back(States &G, States &dA, const States (&kept)[HALF], Warp &warp, const Keys<CHUNK> &keys,
                      int tile_start, int first, const States &A, const Place &at) {
    Token t(keys, warp, tile_start, first + HALF - 1, at);
#pragma unroll
    for (int j = HALF - 1; j >= 0; j--) {
        Token following(keys, warp, tile_start, first + (j > 0 ? j - 1 : 0), at);
        Floats<4> dk = {};
        Floats<C> sum_x = {}, sum_gate = {};
        step_back(G, dA, kept[j], dk, sum_x, sum_gate, t, A);
        store(warp.channel_sums[0][j][at.quad][at.group], dk);
        store(&warp.state_sums[0][j][at.quad][at.c], sum_x);
        store(&warp.state_sums[1][j][at.quad][at.c], sum_gate);
        t = following;
    }
}

struct ChannelSums {
    Floats<C> skip, bias;
};

// dx and dlogit of half a tile from the sums over states; a lane takes C channels of one token at a time
DEVICE void finish_channels(Warp &warp, int first, const Sequence<T> &dxs, const Sequence<T> &dlogits, i64 t0,
                            int tokens, ChannelSums &sums, const Place &at) {
    Floats<C> skip = load<C>(&warp.skip[at.c]);
#pragma unroll
    for (int base = 0; base < HALF * GROUPS; base += 32) {
        int half_token = (base + at.lane) / GROUPS, j = first + half_token;
        float norm = 0;
        if (HALF * GROUPS % 32 == 0 || half_token < HALF) {
            Floats<C> x = load<C>(&warp.x[j][at.c]), gate = load<C>(&warp.gate[j][at.c]);
            Floats<C> dy = load<C>(&warp.dy[j][at.c]), slope = load<C>(&warp.slope[j][at.c]);
            Floats<C> sum_x = {}, sum_gate = {}, dx, dlogit;
#pragma unroll
            for (int quad = 0; quad < QUADS; quad++) {
                Floats<C> part_x = load<C>(&warp.state_sums[0][half_token][quad][at.c]);
                Floats<C> part_gate = load<C>(&warp.state_sums[1][half_token][quad][at.c]);
#pragma unroll
                for (int c = 0; c < C; c++) sum_x.at[c] += part_x.at[c], sum_gate.at[c] += part_gate.at[c];
            }
#pragma unroll
            for (int c = 0; c < C; c++) {
                dx.at[c] = fmaf(skip.at[c], dy.at[c], R::dx(sum_x.at[c], gate.at[c]));
                dlogit.at[c] = R::dlogit(sum_x.at[c], sum_gate.at[c], x.at[c], slope.at[c]);
                norm += R::dnorm(sum_gate.at[c], gate.at[c]);
                sums.skip.at[c] = fmaf(dy.at[c], x.at[c], sums.skip.at[c]);
                sums.bias.at[c] += dlogit.at[c];
            }
            if (at.valid && j < tokens) {
                store(dxs.at(t0, j) + at.d, from_floats<T>(dx));
                store(dlogits.at(t0, j) + at.d, from_floats<T>(dlogit));
            }
        }
#pragma unroll
        for (int distance = 1; distance < GROUPS; distance *= 2) norm += __shfl_xor_sync(WARP, norm, distance);
        if (at.group == 0 && half_token < HALF) warp.norm[half_token] = norm;
    }
}

// dk and dq of half a tile over the warp's channels; a lane takes 4 states of one token at a time
DEVICE void finish_keys(Warp &warp, int first, int buffer, const Keys<CHUNK> &keys, int tile_start, const Place &at) {
    constexpr int SUMS = 2 * HALF * QUADS;
#pragma unroll
    for (int base = 0; base < SUMS; base += 32) {
        int i = base + at.lane, which = i / (HALF * QUADS), half_token = i / QUADS % HALF, quad = i % QUADS;
        if (SUMS % 32 != 0 && i >= SUMS) break;
        Floats<4> sum = {};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            Floats<4> part = load<4>(warp.channel_sums[which][half_token][quad][group]);
#pragma unroll
            for (int n = 0; n < 4; n++) sum.at[n] += part.at[n];
        }
        Floats<4> k = load<4>(&keys.k[tile_start + first + half_token][4 * quad]);
        float norm = which == 0 ? 2 * warp.norm[half_token] : 0;
#pragma unroll
        for (int n = 0; n < 4; n++) sum.at[n] = fmaf(k.at[n], norm, sum.at[n]);
        store(&warp.dkeys[buffer][first + half_token][which][4 * quad], sum);
    }
}

// dk and dq of a tile over the block's channels, one 16-byte store for 4 states
DEVICE void write_keys(const Block &block, int buffer, const Sequence<float> &dkeys, i64 t0, int tokens) {
#pragma unroll
    for (int base = 0; base < TILE * 2 * QUADS; base += 32 * WARPS) {
        int i = base + threadIdx.x, token = i / (2 * QUADS);
        if (token >= tokens) break;
        Floats<4> sum = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            Floats<4> part = load<4>(&block.warps[w].dkeys[buffer][0][0][0] + 4 * i);
#pragma unroll
            for (int n = 0; n < 4; n++) sum.at[n] += part.at[n];
        }
        store(dkeys.at(t0, token) + i % (2 * QUADS) * 4, sum);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
scan_backward(TOKENS(const T, dy), TOKENS(const T, x), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
              const float *__restrict__ rates, const float *__restrict__ skips, const float *__restrict__ biases,
              const float *__restrict__ states, const float *__restrict__ later, T *__restrict__ dx,
              T *__restrict__ dlogit, float *__restrict__ dkeys, float *__restrict__ dchannels,
              float *__restrict__ drates, i64 directions, i64 B, i64 L, i64 D, i64 reverse, i64 segment_chunks,
              i64 key_vectors) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Block) == BLOCK_BYTES);
    Block &block = *reinterpret_cast<Block *>(shared);
    Warp &warp = block.warps[threadIdx.x / 32];

    i64 chunks = (L + CHUNK - 1) / CHUNK, segments = (chunks + segment_chunks - 1) / segment_chunks;
    Place at(B, D, segments);
    bool backwards = reverse >> at.g & 1;
    Sequence<const T> dys(TOKENS_OF(dy), at.g, at.b, L, backwards), xs(TOKENS_OF(x), at.g, at.b, L, backwards);
    Sequence<const T> logits(TOKENS_OF(logit), at.g, at.b, L, backwards);
    Sequence<const T> ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    Sequence<T> dxs({dx, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    Sequence<T> dlogits({dlogit, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    i64 all_keys = at.block * directions * B * L * 2 * N;
    Sequence<float> dkeys_out({dkeys + all_keys, B * L * 2 * N, L * 2 * N, 2 * N}, at.g, at.b, L, backwards);
    i64 first = at.segment * segment_chunks, last = min(chunks, first + segment_chunks) - 1;
    i64 end = min(L, (last + 1) * CHUNK);
    const float *kept_states = states + state_offset(at.g, at.b, -1, 4 * at.quad, at.loaded_d, B, chunks - 1, D);

    States A, dA = {}, S, G = {};
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++)
            A[n][c] = R::HAS_RATES && at.valid ? R::rate(rates[(at.g * D + at.d + c) * N + 4 * at.quad + n]) : 0;
    if (at.quad == 0) {
        store(&warp.skip[at.c], skips ? load<C>(skips + at.g * D + at.loaded_d) : Floats<C>{});
        store(&warp.bias[at.c], biases ? load<C>(biases + at.g * D + at.loaded_d) : Floats<C>{});
    }
    if (at.segment < segments - 1 && at.valid)
        load_states(G, later + state_offset(at.g, at.b, at.segment, 4 * at.quad, at.d, B, segments - 1, D), D);

    ChannelSums sums = {};
    ChannelsInFlight next;
    auto tokens_from = [&](i64 t0) { return int(min(i64(TILE), end - t0)); };
    auto fetch = [&](i64 t0) { next.fetch(xs, logits, dys, t0, tokens_from(t0), at); };

    fetch(last * CHUNK);
    int buffer = 0;
#pragma unroll 1
    for (i64 chunk = last; chunk >= first; chunk--) {
        i64 start = chunk * CHUNK;
        int chunk_tokens = min(i64(CHUNK), end - start), tiles = (chunk_tokens + TILE - 1) / TILE;
        __syncthreads();
        KeysInFlight<KEY_TOKENS, 32 * WARPS> keys(ks, qs, start, key_vectors, threadIdx.x);
#pragma unroll 1
        for (int t = 0; t < chunk_tokens; t += KEY_TOKENS) {
            keys.fetch(chunk_tokens - t);
            keys.put(block.keys, t);
            keys.advance(KEY_TOKENS);
        }
        __syncthreads();

        // indexed at run time, so in local memory, which suits states that a lane keeps for itself and needs rarely
        States before_tile[TILES];
        if (chunk > 0)
            load_states(S, kept_states + chunk * N * D, D);
        else
            clear_states(S);
#pragma unroll 1
        for (int tile = 0; tile < tiles - 1; tile++) {
            copy_states(before_tile[tile], S);
            __syncwarp();
            next.put<false>(warp, &block.keys.kk[tile * TILE], TILE, at);
            __syncwarp();
            fetch(start + (tile + 1) * TILE);
            scan<TILE>(S, warp, block.keys, tile * TILE, A, at);
        }
        copy_states(before_tile[tiles - 1], S);
#pragma unroll 1
        for (int tile = tiles - 1; tile >= 0; tile--) {
            i64 t0 = start + tile * TILE;
            int tokens = tokens_from(t0);
            __syncwarp();
            next.put<true>(warp, &block.keys.kk[tile * TILE], tokens, at);
            __syncwarp();
#pragma unroll 1
            for (int half = HALF; half >= 0; half -= HALF) {
                if (half > 0)
                    scan<HALF>(S, warp, block.keys, tile * TILE, A, at);
                else
                    fetch(tile > 0 ? t0 - TILE : chunk > first ? start - CHUNK : t0);
                States kept[HALF];
                rescan(S, kept, warp, block.keys, tile * TILE, half, A, at);
                // S is free until the next half: time to fetch what that starts from
                copy_states(S, before_tile[half > 0 ? tile : max(tile - 1, 0)]);
                walk_back(G, dA, kept, warp, block.keys, tile * TILE, half, A, at);
                __syncwarp();
                finish_channels(warp, half, dxs, dlogits, t0, tokens, sums, at);
                __syncwarp();
                finish_keys(warp, half, buffer, block.keys, tile * TILE, at);
                __syncwarp();
            }
            // two buffers, so that one barrier a tile is enough
            __syncthreads();
            write_keys(block, buffer, dkeys_out, t0, tokens);
            buffer ^= 1;
        }
    }

    // (segments and batch, G, 2, D): dskip and dbias; (segments and batch, G, D, N): dA
    i64 part = (at.b * segments + at.segment) * directions + at.g;
#pragma unroll
    for (int c = 0; c < C; c++) {
#pragma unroll
        for (int distance = GROUPS; distance < 32; distance *= 2) {
            sums.skip.at[c] += __shfl_xor_sync(WARP, sums.skip.at[c], distance);
            sums.bias.at[c] += __shfl_xor_sync(WARP, sums.bias.at[c], distance);
        }
        if (at.quad == 0 && at.valid) {
            dchannels[(part * 2 + 0) * D + at.d + c] = sums.skip.at[c];
            dchannels[(part * 2 + 1) * D + at.d + c] = sums.bias.at[c];
        }
        if (R::HAS_RATES && at.valid) {
#pragma unroll
            for (int n = 0; n < NL; n++) drates[(part * D + at.d + c) * N + 4 * at.quad + n] = dA[n][c];
        }
    }
}

// dk and dq of every token from the blocks' parts, in the order of the blocks; a thread adds 4 states
extern "C" __global__ void sum_keys(const float *parts, T *dk, T *dq, i64 blocks, i64 tokens) {
    i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x;
    if (i >= tokens * 2 * QUADS) return;
    Floats<4> sum = {};
    for (i64 b = 0; b < blocks; b++) {
        Floats<4> part = load<4>(parts + (b * tokens * 2 * QUADS + i) * 4);
#pragma unroll
        for (int n = 0; n < 4; n++) sum.at[n] += part.at[n];
    }
    i64 token = i / (2 * QUADS), n = i % QUADS * 4;
    store((i / QUADS % 2 ? dq : dk) + token * N + n, from_floats<T>(sum));
}
