// Gradients of the scan. Forward kept the state between chunks. For each chunk, from the last to the first:
//   1. scan it once more, keeping the state before every HALF tile;
//   2. for each half tile, from the last to the first: scan it, keeping what the gradients need of each token in
//      registers, then walk back through it with G = dL/dS.
// A lane owns 4 states of C channels, which makes its sums over states and over channels equally short. Both are finished
// through shared memory, half a tile at once: that takes a third of the instructions of shuffles. There are no atomics:
// blocks write partial sums over their channels, to be added in a fixed order.
//
// Registers and shared memory are dealt so that 12 warps fit on a multiprocessor of an H200.

#include "recurrences.cuh"

constexpr int TILES = CHUNK / TILE;
constexpr int HALF = TILE / 2;
constexpr int KEY_TOKENS = 256 * WARPS / N < CHUNK ? 256 * WARPS / N : CHUNK;  // whose keys and queries are on their way at once
static_assert(NL == 4);

// Rows in shared memory are so long that lanes that store or load side by side meet different banks
constexpr int ROW = WARP_CHANNELS + 8;
constexpr int QUAD_SUMS = 4 * GROUPS + 8, CHANNEL_SUMS = QUADS * QUAD_SUMS + 4, STATE_SUMS = QUADS * ROW + 8;

struct Channels {
    alignas(16) T x[TILE][WARP_CHANNELS];
    alignas(16) T logit[TILE][WARP_CHANNELS];
    alignas(16) T dy[TILE][WARP_CHANNELS];
};

struct Warp {
    Channels stage[STAGES];  // the tile that is worked on and those on their way
    alignas(16) float skip[WARP_CHANNELS];
    alignas(16) float bias[WARP_CHANNELS];
    alignas(16) float gate[TILE][ROW];
    alignas(16) float slope[TILE][ROW];
    alignas(16) float channel_sums[HALF][CHANNEL_SUMS];  // dq, then dk over each lane's channels
    alignas(16) float state_sums[2][HALF][STATE_SUMS];   // sum_x and sum_gate over each lane's states
    alignas(16) float dkeys[2][TILE][2][N];              // dk and dq over the warp's channels, of two tiles
    alignas(16) float norm[2][TILE];                     // dL/d(k.k) over the warp's channels
};

struct Block {
    Keys<CHUNK> keys;
    alignas(16) Warp warps[WARPS];
};

// One warp's place in the grid: a segment of a sequence; and the channels and states of this lane
struct Place {
    i64 g, b, segment, block, warp_d, d, loaded_d;
    int lane, group, quad, c;
    bool valid;
    __device__ __forceinline__ Place(i64 B, i64 D, i64 segments) {
        lane = threadIdx.x % 32;
        quad = part_of(lane);
        group = group_of(lane);
        c = group * C;
        i64 blocks = (D + WARPS * WARP_CHANNELS - 1) / (WARPS * WARP_CHANNELS);
        block = blockIdx.x % blocks;
        warp_d = (block * WARPS + threadIdx.x / 32) * WARP_CHANNELS;
        d = warp_d + c;
        loaded_d = min(d, D - C);
        segment = blockIdx.x / blocks % segments;
        b = blockIdx.x / blocks / segments % B;
        g = blockIdx.x / blocks / segments / B;
        valid = d < D;
    }
};

DEVICE float sum_over_groups(float v) {
#pragma unroll
    for (int bit = 1; bit < GROUPS; bit *= 2) v += __shfl_xor_sync(WARP, v, group_distance(bit));
    return v;
}
DEVICE float sum_over_quads(float v) {
#pragma unroll
    for (int bit = 1; bit < QUADS; bit *= 2) v += __shfl_xor_sync(WARP, v, part_distance(bit));
    return v;
}

typedef float States[NL][C];
typedef R::Kept Kept[NL][C];

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

// States to start from again, in 24 bits for 16-bit inputs: those of all warps on a GPU are about the size of its L2, so
// bytes count; in 16 bits gradients that are sums over tokens would lose more than the inputs have.
template <class T>
struct alignas(4 * C) Restart {
    static constexpr int STATES_OF_LANE = NL * C;
    unsigned high[STATES_OF_LANE / 2], low[STATES_OF_LANE / 4];  // the upper 16 bits of each, and the 8 behind them
    __device__ __forceinline__ void save(const States &S) {
        unsigned bits[STATES_OF_LANE];
#pragma unroll
        for (int i = 0; i < STATES_OF_LANE; i++) bits[i] = __float_as_uint(S[i / C][i % C]);
#pragma unroll
        for (int i = 0; i < STATES_OF_LANE; i += 2) high[i / 2] = __byte_perm(bits[i], bits[i + 1], 0x7632);
#pragma unroll
        for (int i = 0; i < STATES_OF_LANE; i += 4)
            low[i / 4] = __byte_perm(__byte_perm(bits[i], bits[i + 1], 0x51),
                                     __byte_perm(bits[i + 2], bits[i + 3], 0x51), 0x5410);
    }
    // the 8 bits stand for those that were left out, too
    __device__ __forceinline__ void restore(States &S) const {
#pragma unroll
        for (int i = 0; i < STATES_OF_LANE; i++)
            S[i / C][i % C] = __uint_as_float(
                __byte_perm(high[i / 2], low[i / 4], (i % 2 ? 0x3200 : 0x1000) + 0x11 * (4 + i % 4)));
    }
};
template <>
struct Restart<float> {
    States states;
    __device__ __forceinline__ void save(const States &S) { copy(states, S); }
    __device__ __forceinline__ void restore(States &S) const { copy(S, states); }
    static __device__ __forceinline__ void copy(States &to, const States &from) {
#pragma unroll
        for (int n = 0; n < NL; n++)
#pragma unroll
            for (int c = 0; c < C; c++) to[n][c] = from[n][c];
    }
};

// The gates of the warp's channels of a tile, and with `gradients` what these need besides
DEVICE void stage_gates(bool gradients, Warp &warp, const Channels &tile, const float *kk, const Place &at) {
    constexpr int ITEMS = TILE / QUADS > 0 ? TILE / QUADS : 1;
    static_assert(TILE % QUADS == 0);
    Floats<C> bias = load<C>(&warp.bias[at.c]), gate[ITEMS], slope[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int token = at.quad + i * QUADS;
        Floats<C> logit = to_floats(load<C>(&tile.logit[token][at.c]));
        float kk_t = kk[token];
#pragma unroll
        for (int c = 0; c < C; c++) {
            gate[i].at[c] = R::gate(logit.at[c] + bias.at[c], kk_t);
            slope[i].at[c] = R::slope(logit.at[c] + bias.at[c], gate[i].at[c]);
        }
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int token = at.quad + i * QUADS;
        store(&warp.gate[token][at.c], gate[i]);
        if (gradients) store(&warp.slope[token][at.c], slope[i]);
    }
}

// A tile that is worked on, which has its keys and queries from token `start` of the chunk on
struct Tile {
    const Keys<CHUNK> &keys;
    Warp &warp;
    const Channels &channels;
    int start;
};

// What the lane needs of token j of a tile. x and dy are widened when they are read, which takes less shared memory than
// keeping them in fp32.
struct Token {
    Floats<4> k, q;
    Floats<C> x, gate, dy;
    __device__ __forceinline__ Token(const Tile &tile, int j, const Place &at)
        : k(load<4>(&tile.keys.k[tile.start + j][4 * at.quad])), q(load<4>(&tile.keys.q[tile.start + j][4 * at.quad])),
          x(to_floats(load<C>(&tile.channels.x[j][at.c]))), gate(load<C>(&tile.warp.gate[j][at.c])),
          dy(to_floats(load<C>(&tile.channels.dy[j][at.c]))) {}
};

DEVICE void step(States &S, const Token &t, const States &A) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) R::update(S[n][c], t.x.at[c], t.gate.at[c], t.k.at[n], A[n][c]);
}

// One step, keeping what the gradients need; dq over the lane's channels
DEVICE void step_keeping(States &S, Kept &kept, Floats<4> &dq, const Token &t, const States &A) {
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) {
            R::update(S[n][c], kept[n][c], t.x.at[c], t.gate.at[c], t.k.at[n], A[n][c]);
            dq.at[n] = fmaf(t.dy.at[c], S[n][c], dq.at[n]);
        }
}

// One step back: G from behind the token to before it, and the token's sums over the lane's channels and states
DEVICE void step_back(States &G, States &dA, const Kept &kept, Floats<4> &dk, Floats<C> &sum_x, Floats<C> &sum_gate,
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

// S over half a tile, keeping nothing
DEVICE void scan_half(States &S, const Tile &tile, int first, const States &A, const Place &at) {
#pragma unroll
    for (int j = 0; j < HALF; j++) step(S, Token(tile, first + j, at), A);
}

// S over half a tile, keeping what the gradients need; returns the last token, with which the way back begins. Here and
// below a token is loaded before the one ahead of it stores its sums, as the compiler lets no load overtake a store.
DEVICE Token rescan(States &S, Kept (&kept)[HALF], const Tile &tile, int first, const States &A, const Place &at) {
    Token t(tile, first, at);
#pragma unroll
    for (int j = 0; j < HALF; j++) {
        Token following = j < HALF - 1 ? Token(tile, first + j + 1, at) : t;
        Floats<4> dq = {};
        step_keeping(S, kept[j], dq, t, A);
        store(&tile.warp.channel_sums[j][at.quad * QUAD_SUMS + 4 * at.group], dq);
        t = following;
    }
    return t;
}

// G back through half a tile, of which t is the last token
DEVICE void walk_back(States &G, States &dA, const Kept (&kept)[HALF], Token t, const Tile &tile, int first,
                      const States &A, const Place &at) {
#pragma unroll
    for (int j = HALF - 1; j >= 0; j--) {
        Token following = j > 0 ? Token(tile, first + j - 1, at) : t;
        Floats<4> dk = {};
        Floats<C> sum_x = {}, sum_gate = {};
        step_back(G, dA, kept[j], dk, sum_x, sum_gate, t, A);
        store(&tile.warp.channel_sums[j][at.quad * QUAD_SUMS + 4 * at.group], dk);
        store(&tile.warp.state_sums[0][j][at.quad * ROW + at.c], sum_x);
        store(&tile.warp.state_sums[1][j][at.quad * ROW + at.c], sum_gate);
        t = following;
    }
}

struct ChannelSums {
    Floats<C> skip, bias;
};

// dq or dk of half a tile over the warp's channels, from those over each lane's. A lane adds 4 states of a token; where
// that leaves lanes without work, several share the groups of a sum.
DEVICE void finish_keys(Warp &warp, bool is_query, int first, int buffer, const Place &at) {
    constexpr int SUMS = HALF * QUADS, SHARE = SUMS < 32 ? 32 / SUMS : 1;
#pragma unroll
    for (int base = 0; base < SUMS; base += 32) {
        int item = base + at.lane % (32 / SHARE), j = item / QUADS, quad = item % QUADS, group = at.lane * SHARE / 32;
        const float *parts = &warp.channel_sums[j][quad * QUAD_SUMS + 4 * (group * (GROUPS / SHARE))];
        Floats<4> sum = load<4>(parts);
#pragma unroll
        for (int i = 1; i < GROUPS / SHARE; i++) sum = sum + load<4>(parts + 4 * i);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int distance = 32 / SHARE; distance < 32; distance *= 2)
                sum.at[n] += __shfl_xor_sync(WARP, sum.at[n], distance);
        if (group == 0) store(&warp.dkeys[buffer][first + j][is_query][4 * quad], sum);
    }
}

// dx and dlogit of half a tile, from the sums over each lane's states. A lane takes C channels of one token.
DEVICE void finish_channels(const Tile &tile, int first, int buffer, const Sequence<T> &dxs, const Sequence<T> &dlogits,
                            int t0, int tokens, ChannelSums &sums, const Place &at) {
    Warp &warp = tile.warp;
    Floats<C> skip = load<C>(&warp.skip[at.c]);
#pragma unroll
    for (int base = 0; base < HALF; base += QUADS) {
        int half_token = base + at.quad, j = first + half_token;
        float norm = 0;
        if (HALF % QUADS == 0 || half_token < HALF) {
            Floats<C> x = to_floats(load<C>(&tile.channels.x[j][at.c])), gate = load<C>(&warp.gate[j][at.c]);
            Floats<C> dy = to_floats(load<C>(&tile.channels.dy[j][at.c])), slope = load<C>(&warp.slope[j][at.c]);
            const float *parts_x = &warp.state_sums[0][half_token][at.c];
            const float *parts_gate = &warp.state_sums[1][half_token][at.c];
            Floats<C> sum_x = load<C>(parts_x), sum_gate = load<C>(parts_gate), dx, dlogit;
#pragma unroll
            for (int quad = 1; quad < QUADS; quad++) {
                sum_x = sum_x + load<C>(parts_x + quad * ROW);
                sum_gate = sum_gate + load<C>(parts_gate + quad * ROW);
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
                store(dxs.at(t0 + j) + at.d, from_floats<T>(dx));
                store(dlogits.at(t0 + j) + at.d, from_floats<T>(dlogit));
            }
        }
        if (R::HAS_NORM) {
            norm = sum_over_groups(norm);
            if (at.group == 0 && half_token < HALF) warp.norm[buffer][j] = norm;
        }
    }
}

// dk and dq of a tile over the block's channels, one 16-byte store for 4 states
DEVICE void write_keys(const Block &block, int buffer, const Sequence<float> &dkeys, int tile_start, int t0,
                       int tokens) {
#pragma unroll
    for (int base = 0; base < TILE * 2 * QUADS; base += 32 * WARPS) {
        int i = base + threadIdx.x, token = i / (2 * QUADS);
        bool is_query = i / QUADS % 2;
        if (token >= tokens) break;
        Floats<4> sum = load<4>(&block.warps[0].dkeys[buffer][0][0][0] + 4 * i);
#pragma unroll
        for (int w = 1; w < WARPS; w++) sum = sum + load<4>(&block.warps[w].dkeys[buffer][0][0][0] + 4 * i);
        if (R::HAS_NORM && !is_query) {
            Floats<4> k = load<4>(&block.keys.k[tile_start + token][4 * (i % QUADS)]);
            float norm = block.warps[0].norm[buffer][token];
#pragma unroll
            for (int w = 1; w < WARPS; w++) norm += block.warps[w].norm[buffer][token];
#pragma unroll
            for (int n = 0; n < 4; n++) sum.at[n] = fmaf(2 * k.at[n], norm, sum.at[n]);
        }
        store(dkeys.at(t0 + token) + i % (2 * QUADS) * 4, sum);
    }
}

// dlogit may be logit: a warp writes its channels of a tile when it has read them for the last time, and nobody else reads
// them
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
scan_backward(TOKENS(const T, dy), TOKENS(const T, x), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
              const float *__restrict__ rates, const float *__restrict__ skips, const float *__restrict__ biases,
              const float *__restrict__ states, const float *__restrict__ later, T *__restrict__ dx,
              TOKENS(T, dlogit), float *__restrict__ dkeys, float *__restrict__ rows, i64 directions, i64 B, i64 L,
              i64 D, i64 reverse, i64 segment_chunks, i64 key_vectors) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Block) == BLOCK_BYTES);
    Block &block = *reinterpret_cast<Block *>(shared);
    Warp &warp = block.warps[threadIdx.x / 32];

    int chunks = (L + CHUNK - 1) / CHUNK, segments = (chunks + segment_chunks - 1) / segment_chunks;
    Place at(B, D, segments);
    bool backwards = reverse >> at.g & 1;
    ChannelCopies copies(at.warp_d, D);
    Sequence<const T> dys = copies.source({TOKENS_OF(dy), at.g, at.b, L, backwards}, at.warp_d);
    Sequence<const T> xs = copies.source({TOKENS_OF(x), at.g, at.b, L, backwards}, at.warp_d);
    Sequence<const T> logits = copies.source({TOKENS_OF(logit), at.g, at.b, L, backwards}, at.warp_d);
    Sequence<const T> ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    Sequence<T> dxs({dx, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    Sequence<T> dlogits(TOKENS_OF(dlogit), at.g, at.b, L, backwards);
    i64 all_keys = at.block * directions * B * L * 2 * N;
    Sequence<float> dkeys_out({dkeys + all_keys, B * L * 2 * N, L * 2 * N, 2 * N}, at.g, at.b, L, backwards);
    int first = at.segment * segment_chunks, last = min(chunks, first + int(segment_chunks)) - 1;
    int end = min(int(L), (last + 1) * CHUNK);
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
    __syncwarp();

    // Tiles are worked on in this order, and copied ahead in the same: of each chunk, from the last to the first, all
    // tiles but the last forwards, then all backwards. A tile that is done makes room for another.
    int tiles = (end - last * CHUNK + TILE - 1) / TILE;
    int stage = 0, copied_tiles = tiles, copied_start = last * CHUNK, turn = 1 - tiles;
    auto copy_next = [&](Channels &to) {
        if (copied_start >= first * CHUNK) {
            int t0 = copied_start + (copied_tiles - 1 - abs(turn)) * TILE;
            copies.start(to.x, xs, t0, end - t0);
            copies.start(to.logit, logits, t0, end - t0);
            if (turn >= 0) copies.start(to.dy, dys, t0, end - t0);
            if (++turn == copied_tiles) {
                copied_start -= CHUNK;
                copied_tiles = TILES;
                turn = 1 - TILES;
            }
        }
        commit_copies();
    };
    auto stage_next = [&](bool gradients, int start) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        copy_next(warp.stage[stage]);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        stage_gates(gradients, warp, warp.stage[stage], &block.keys.kk[start], at);
        __syncwarp();
        return Tile{block.keys, warp, warp.stage[stage], start};
    };
#pragma unroll
    for (int s = 1; s < STAGES; s++) copy_next(warp.stage[s]);

    ChannelSums sums = {};
    KeysInFlight<KEY_TOKENS, 32 * WARPS> keys(ks, qs, key_vectors, threadIdx.x);
    int buffer = 0;
#pragma unroll 1
    for (int chunk = last; chunk >= first; chunk--, tiles = TILES) {
        int start = chunk * CHUNK, chunk_tokens = min(CHUNK, end - start);
        keys.fetch(start, chunk_tokens);
        __syncthreads();
        keys.put(block.keys);
        // half tiles are scanned whole: keys behind the last token reach no result, unless they are no numbers
#pragma unroll 1
        for (int t = KEY_TOKENS; t < (chunk_tokens + HALF - 1) / HALF * HALF; t += KEY_TOKENS) {
            keys.fetch(start + t, chunk_tokens - t);
            keys.put(block.keys, t);
        }
        __syncthreads();

        // indexed at run time, so in local memory, which suits states that a lane keeps for itself and needs rarely
        Restart<T> before[2 * TILES];
        if (chunk > 0)
            load_states(S, kept_states + i64(chunk) * N * D, D);
        else
            clear_states(S);
#pragma unroll 1
        for (int i = 0; i < tiles - 1; i++) {
            Tile tile = stage_next(false, i * TILE);
#pragma unroll 1
            for (int half = 0; half < 2; half++) {
                before[2 * i + half].save(S);
                scan_half(S, tile, half * HALF, A, at);
            }
        }
        before[2 * tiles - 2].save(S);
#pragma unroll 1
        for (int i = tiles - 1; i >= 0; i--) {
            int t0 = start + i * TILE, tokens = min(TILE, end - t0);
            Tile tile = stage_next(true, i * TILE);
            if (i == tiles - 1 && tokens > HALF) scan_half(S, tile, 0, A, at);
#pragma unroll 1
            for (int half = tokens > HALF; half >= 0; half--) {
                Kept kept[HALF];
                Token last = rescan(S, kept, tile, half * HALF, A, at);
                __syncwarp();
                finish_keys(warp, true, half * HALF, buffer, at);
                __syncwarp();
                // S is free until the next half: time to fetch what that starts from
                before[max(2 * i + half - 1, 0)].restore(S);
                walk_back(G, dA, kept, last, tile, half * HALF, A, at);
                __syncwarp();
                finish_keys(warp, false, half * HALF, buffer, at);
                finish_channels(tile, half * HALF, buffer, dxs, dlogits, t0, tokens, sums, at);
                __syncwarp();
            }
            // two buffers, so that one barrier a tile is enough
            __syncthreads();
            write_keys(block, buffer, dkeys_out, tile.start, t0, tokens);
            buffer ^= 1;
        }
    }

    // a row of a sequence's segment has dskip and dbias as (G, 2, D), then dA as (G, D, N)
    i64 channels = directions * 2 * D, columns = channels + (R::HAS_RATES ? directions * D * N : 0);
    float *row = rows + (at.b * segments + at.segment) * columns;
#pragma unroll
    for (int c = 0; c < C; c++) {
        float skip = sum_over_quads(sums.skip.at[c]), bias = sum_over_quads(sums.bias.at[c]);
        if (at.quad == 0 && at.valid) {
            row[(at.g * 2 + 0) * D + at.d + c] = skip;
            row[(at.g * 2 + 1) * D + at.d + c] = bias;
        }
        if (R::HAS_RATES && at.valid) {
#pragma unroll
            for (int n = 0; n < NL; n++) row[channels + (at.g * D + at.d + c) * N + 4 * at.quad + n] = dA[n][c];
        }
    }
}

// of what nobody reads again, which caches need not keep
DEVICE Floats<4> load_once(const float *p) {
    Floats<4> v;
    asm volatile("ld.global.cs.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.at[0]), "=f"(v.at[1]), "=f"(v.at[2]), "=f"(v.at[3])
                 : "l"(p));
    return v;
}

// Sums of parts in a fixed order, all in one launch of blocks of 256 threads: the columns of the `rows`, where 8 threads
// share a sum; then dk and dq of every token over the blocks of channels, where a thread adds 4 states
extern "C" __global__ void sum_parts(const float *dkeys, T *dk, T *dq, i64 key_parts, i64 tokens, const float *rows,
                                     float *dchannels, float *drates, i64 parts, i64 channels, i64 columns) {
    __shared__ float slices[8][32];
    i64 key_items = tokens * 2 * QUADS, row_blocks = (columns + 31) / 32;
    if (blockIdx.x < row_blocks) {
        int slice = threadIdx.x / 32, lane = threadIdx.x % 32;
        i64 column = blockIdx.x * 32 + lane;
        float sum = 0;
        if (column < columns)
#pragma unroll 8
            for (i64 p = slice; p < parts; p += 8) sum += rows[p * columns + column];
        slices[slice][lane] = sum;
        __syncthreads();
        if (slice > 0 || column >= columns) return;
#pragma unroll
        for (int s = 1; s < 8; s++) sum += slices[s][lane];
        *(column < channels ? dchannels + column : drates + (column - channels)) = sum;
    } else {
        i64 i = (blockIdx.x - row_blocks) * 256 + threadIdx.x;
        if (i >= key_items) return;
        constexpr int TOGETHER = 6;  // parts on their way at once
        Floats<4> sum = {};
        for (i64 first = 0; first < key_parts; first += TOGETHER) {
            Floats<4> parts[TOGETHER] = {};
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                if (first + j < key_parts) parts[j] = load_once(dkeys + ((first + j) * key_items + i) * 4);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++) sum = sum + parts[j];
        }
        i64 token = i / (2 * QUADS), n = i % QUADS * 4;
        store((i / QUADS % 2 ? dq : dk) + token * N + n, from_floats<T>(sum));
    }
}
