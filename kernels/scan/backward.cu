// Gradients of the scan, from dy and the checkpoints, the states that forward kept between chunks of CHUNK tokens. For
// each chunk of a segment, from the last to the first:
//   1. scan it once more, saving the state before every half tile (`Restart`);
//   2. for each half tile, from the last to the first: scan it again, keeping what the gradients need of each token in
//      registers (`Kept`; S_t gives dq_t = sum over channels of dy_t S_t), then walk back through it with G = dL/dS_t:
//        G += dy_t q_t;  sums over states and channels;  G = decay_t G          (recurrences.cuh)
// dx and dlogit take sums over states, which lanes share; dk and dq sums over channels, which lanes, warps and CTAs
// share. Both go through shared memory, half a tile at once, which takes a third of the instructions of shuffles. There
// are no atomics: CTAs write sums over their channels, and `reduce_partials` adds these in a fixed order.
//
// A lane has 4 states of DL channels (lanes.cuh), which makes its sums over states and over channels equally short.
// Warps have channels of their own, and share keys, queries, and the sums over channels. Their barriers:
//   chunk    __syncthreads; keys and queries to shared memory; __syncthreads
//   tile     copies and step sizes; __syncwarp; its halves; __syncthreads; all threads add the warps' dk and dq
//   half     rescan; __syncwarp; dq; __syncwarp; walk back; __syncwarp; dk, dx, dlogit; __syncwarp
// The warps' sums of dk and dq have two buffers, so that one barrier a tile is enough: who writes those of a buffer
// again has passed the barrier of the tile between, to which the others came when they had read it.
//
// Registers and shared memory are dealt so that 12 warps fit on a multiprocessor of an H200.

#include "lanes.cuh"

constexpr int TILES = CHUNK / TILE, HALF = TILE / 2;
constexpr int KEY_TOKENS = 256 * WARPS / N < CHUNK ? 256 * WARPS / N : CHUNK;  // whose keys are on their way at once
static_assert(NL == 4);

// Rows in shared memory are so long that lanes that store or load side by side meet different banks
constexpr int ROW = WARP_CHANNELS + 8;
constexpr int PART_SUMS = 4 * GROUPS + 8, CHANNEL_SUMS = PARTS * PART_SUMS + 4, STATE_SUMS = PARTS * ROW + 8;

struct Channels {
    alignas(16) Element x[TILE][WARP_CHANNELS];
    alignas(16) Element logit[TILE][WARP_CHANNELS];
    alignas(16) Element dy[TILE][WARP_CHANNELS];
};

struct WarpMemory {
    Channels stage[STAGES];  // the tile that is worked on and those on their way
    alignas(16) float skip[WARP_CHANNELS];
    alignas(16) float bias[WARP_CHANNELS];
    alignas(16) float step_size[TILE][ROW];
    alignas(16) float slope[TILE][ROW];
    alignas(16) float channel_sums[HALF][CHANNEL_SUMS];  // dq, then dk over each lane's channels
    alignas(16) float state_sums[2][HALF][STATE_SUMS];   // sum_x and sum_step_size over each lane's states
    alignas(16) float dkeys[2][TILE][2][N];              // dk and dq over the warp's channels, of two tiles
    alignas(16) float norm[2][TILE];                     // dL/d(k.k) over the warp's channels
};

struct CtaMemory {
    Keys<CHUNK> keys;
    alignas(16) WarpMemory warps[WARPS];
};
static_assert(sizeof(CtaMemory) == BLOCK_BYTES);

DEVICE float sum_over_groups(float v) {
    UNROLLED for (int bit = 1; bit < GROUPS; bit *= 2) v += __shfl_xor_sync(WARP, v, group_distance(bit));
    return v;
}
DEVICE float sum_over_parts(float v) {
    UNROLLED for (int bit = 1; bit < PARTS; bit *= 2) v += __shfl_xor_sync(WARP, v, part_distance(bit));
    return v;
}

typedef Recurrence::Kept Kept[NL][DL];

// States to start from again, in 24 bits for 16-bit inputs: those of all warps on a GPU are about the size of its L2,
// so bytes count; in 16 bits gradients that are sums over tokens would lose more than the inputs have.
template <class Type>
struct alignas(4 * DL) Restart {
    static constexpr int STATES_OF_LANE = NL * DL;
    unsigned high[STATES_OF_LANE / 2], low[STATES_OF_LANE / 4];  // the upper 16 bits of each, and the 8 behind them
    INLINE void save(const States &S) {
        unsigned bits[STATES_OF_LANE];
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i++) bits[i] = __float_as_uint(S[i / DL][i % DL]);
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i += 2) high[i / 2] = __byte_perm(bits[i], bits[i + 1], 0x7632);
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i += 4)
            low[i / 4] = __byte_perm(__byte_perm(bits[i], bits[i + 1], 0x51),
                                     __byte_perm(bits[i + 2], bits[i + 3], 0x51), 0x5410);
    }
    // the 8 bits stand for those that were left out, too
    INLINE void restore(States &S) const {
        UNROLLED for (int i = 0; i < STATES_OF_LANE; i++)
            S[i / DL][i % DL] = __uint_as_float(
                __byte_perm(high[i / 2], low[i / 4], (i % 2 ? 0x3200 : 0x1000) + 0x11 * (4 + i % 4)));
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

// The step sizes of the warp's channels of a tile, and with `gradients` their slopes: a lane computes those of its
// channels of every PARTS-th token, which lanes of the other parts will read
DEVICE void prepare_step_sizes(bool gradients, WarpMemory &warp, const Channels &tile, const float *kk,
                               const Place &at) {
    constexpr int ITEMS = TILE / PARTS > 0 ? TILE / PARTS : 1;
    static_assert(TILE % PARTS == 0);
    Floats<DL> bias = load<DL>(&warp.bias[at.c]), step_size[ITEMS], slope[ITEMS];
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        int token = at.part + i * PARTS;
        Floats<DL> logit = to_floats(load<DL>(&tile.logit[token][at.c]));
        float kk_t = kk[token];
        UNROLLED for (int c = 0; c < DL; c++) {
            step_size[i].at[c] = Recurrence::step_size(logit.at[c] + bias.at[c], kk_t);
            slope[i].at[c] = Recurrence::slope(logit.at[c] + bias.at[c], step_size[i].at[c]);
        }
    }
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        int token = at.part + i * PARTS;
        store(&warp.step_size[token][at.c], step_size[i]);
        if (gradients) store(&warp.slope[token][at.c], slope[i]);
    }
}

// A tile that is worked on, which has its keys and queries from token `start` of the chunk on
struct Tile {
    const Keys<CHUNK> &keys;
    WarpMemory &warp;
    const Channels &channels;
    int start;
};

// The warp's tiles of a segment in the order in which they are worked on: of each chunk, from the last to the first,
// with tiles 0 to n - 1, first 0 to n - 2 forwards, only to save states, then n - 1 to 0 with dy, for the gradients
struct TileQueue {
    TileCopies<WARP_CHANNELS> copies;
    Input dys, xs, logits;
    int segment_start, end;        // tokens
    int chunk_start, tiles, turn;  // what is copied next: tile tiles - 1 - |turn| of the chunk, with dy unless turn < 0
    int stage;                     // of the tile that is worked on

    // Starts to copy the next tile; an empty group behind the last, so that waiting for groups counts tiles
    INLINE void copy_next(Channels &to) {
        if (chunk_start >= segment_start) {
            int t0 = chunk_start + (tiles - 1 - abs(turn)) * TILE;
            copies.start(xs, t0, end - t0, [&](int t) { return &to.x[t][copies.column]; });
            copies.start(logits, t0, end - t0, [&](int t) { return &to.logit[t][copies.column]; });
            if (turn >= 0) copies.start(dys, t0, end - t0, [&](int t) { return &to.dy[t][copies.column]; });
            if (++turn == tiles) {
                chunk_start -= CHUNK;
                tiles = TILES;
                turn = 1 - TILES;
            }
        }
        commit_copies();
    }
    // The next tile, with step sizes and for `gradients` slopes. Behind the first __syncwarp what each lane has copied
    // is there for all, and all are done with the tile before, in whose place another is copied.
    INLINE Tile next(bool gradients, int start, CtaMemory &cta, WarpMemory &warp, const Place &at) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        copy_next(warp.stage[stage]);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        prepare_step_sizes(gradients, warp, warp.stage[stage], &cta.keys.kk[start], at);
        __syncwarp();
        return Tile{cta.keys, warp, warp.stage[stage], start};
    }
};

// What the lane needs of token j of a tile. x and dy are widened when they are read, which takes less shared memory
// than keeping them in fp32.
struct Token {
    Floats<4> k, q;
    Floats<DL> x, step_size, dy;
    INLINE Token(const Tile &tile, int j, const Place &at)
        : k(load<4>(&tile.keys.k[tile.start + j][at.n])), q(load<4>(&tile.keys.q[tile.start + j][at.n])),
          x(to_floats(load<DL>(&tile.channels.x[j][at.c]))), step_size(load<DL>(&tile.warp.step_size[j][at.c])),
          dy(to_floats(load<DL>(&tile.channels.dy[j][at.c]))) {}
};

// S over half a tile, keeping nothing
DEVICE void scan_half(States &S, const Tile &tile, int first, const States &A, const Place &at) {
    UNROLLED for (int j = 0; j < HALF; j++) {
        Token t(tile, first + j, at);
        UNROLLED for (int n = 0; n < NL; n++)
            UNROLLED for (int c = 0; c < DL; c++)
                Recurrence::update(S[n][c], t.x.at[c], t.step_size.at[c], t.k.at[n], A[n][c]);
    }
}

// S over half a tile, keeping what the gradients need, with dq of each token over the lane's channels; returns the last
// token, with which the way back begins. Here and below a token is loaded before the one ahead of it stores its sums,
// as the compiler lets no load overtake a store.
DEVICE Token rescan(States &S, Kept (&kept)[HALF], const Tile &tile, int first, const States &A, const Place &at) {
    Token t(tile, first, at);
    UNROLLED for (int j = 0; j < HALF; j++) {
        Token following = j < HALF - 1 ? Token(tile, first + j + 1, at) : t;
        Floats<4> dq = {};
        UNROLLED for (int n = 0; n < NL; n++)
            UNROLLED for (int c = 0; c < DL; c++) {
                Recurrence::update(S[n][c], kept[j][n][c], t.x.at[c], t.step_size.at[c], t.k.at[n], A[n][c]);
                dq.at[n] = fmaf(t.dy.at[c], S[n][c], dq.at[n]);
            }
        store(&tile.warp.channel_sums[j][at.part * PART_SUMS + 4 * at.group], dq);
        t = following;
    }
    return t;
}

// G from behind half a tile, of which t is the last token, to before it, with each token's sums over the lane's
// channels and states
DEVICE void walk_back(States &G, States &dA, const Kept (&kept)[HALF], Token t, const Tile &tile, int first,
                      const States &A, const Place &at) {
    UNROLLED for (int j = HALF - 1; j >= 0; j--) {
        Token following = j > 0 ? Token(tile, first + j - 1, at) : t;
        Floats<4> dk = {};
        Floats<DL> sum_x = {}, sum_step_size = {};
        UNROLLED for (int n = 0; n < NL; n++)
            UNROLLED for (int c = 0; c < DL; c++) {
                G[n][c] = fmaf(t.dy.at[c], t.q.at[n], G[n][c]);
                Recurrence::gradients(G[n][c], kept[j][n][c], t.x.at[c], t.step_size.at[c], t.k.at[n], A[n][c],
                                      sum_x.at[c], sum_step_size.at[c], dk.at[n], dA[n][c]);
            }
        store(&tile.warp.channel_sums[j][at.part * PART_SUMS + 4 * at.group], dk);
        store(&tile.warp.state_sums[0][j][at.part * ROW + at.c], sum_x);
        store(&tile.warp.state_sums[1][j][at.part * ROW + at.c], sum_step_size);
        t = following;
    }
}

// dskip and dbias of the lane's channels
struct ChannelSums {
    Floats<DL> skip, bias;
};

// dq or dk of half a tile over the warp's channels, from those over each lane's, for `write_keys`. A lane adds 4 states
// of a token; where that leaves lanes without work, several share the groups of a sum.
DEVICE void finish_keys(WarpMemory &warp, bool is_query, int first, int buffer, const Place &at) {
    constexpr int SUMS = HALF * PARTS, SHARE = SUMS < 32 ? 32 / SUMS : 1;
    UNROLLED for (int base = 0; base < SUMS; base += 32) {
        int item = base + at.lane % (32 / SHARE), j = item / PARTS, part = item % PARTS, group = at.lane * SHARE / 32;
        const float *parts = &warp.channel_sums[j][part * PART_SUMS + 4 * (group * (GROUPS / SHARE))];
        Floats<4> sum = load<4>(parts);
        UNROLLED for (int i = 1; i < GROUPS / SHARE; i++) sum = sum + load<4>(parts + 4 * i);
        UNROLLED for (int n = 0; n < 4; n++)
            UNROLLED for (int distance = 32 / SHARE; distance < 32; distance *= 2)
                sum.at[n] += __shfl_xor_sync(WARP, sum.at[n], distance);
        if (group == 0) store(&warp.dkeys[buffer][first + j][is_query][4 * part], sum);
    }
}

// dx and dlogit of half a tile, from the sums over each lane's states; and dL/d(k.k) over the warp's channels, for
// `write_keys`. A lane takes its channels of one token.
DEVICE void finish_channels(const Tile &tile, int first, int buffer, const Sequence<Element> &dxs,
                            const Sequence<Element> &dlogits, int t0, int tokens, ChannelSums &sums, const Place &at) {
    WarpMemory &warp = tile.warp;
    Floats<DL> skip = load<DL>(&warp.skip[at.c]);
    UNROLLED for (int base = 0; base < HALF; base += PARTS) {
        int half_token = base + at.part, j = first + half_token;
        float norm = 0;
        if (HALF % PARTS == 0 || half_token < HALF) {
            Floats<DL> x = to_floats(load<DL>(&tile.channels.x[j][at.c]));
            Floats<DL> step_size = load<DL>(&warp.step_size[j][at.c]);
            Floats<DL> dy = to_floats(load<DL>(&tile.channels.dy[j][at.c])), slope = load<DL>(&warp.slope[j][at.c]);
            const float *parts_x = &warp.state_sums[0][half_token][at.c];
            const float *parts_step_size = &warp.state_sums[1][half_token][at.c];
            Floats<DL> sum_x = load<DL>(parts_x), sum_step_size = load<DL>(parts_step_size), dx, dlogit;
            UNROLLED for (int part = 1; part < PARTS; part++) {
                sum_x = sum_x + load<DL>(parts_x + part * ROW);
                sum_step_size = sum_step_size + load<DL>(parts_step_size + part * ROW);
            }
            UNROLLED for (int c = 0; c < DL; c++) {
                dx.at[c] = fmaf(skip.at[c], dy.at[c], Recurrence::dx(sum_x.at[c], step_size.at[c]));
                dlogit.at[c] = Recurrence::dlogit(sum_x.at[c], sum_step_size.at[c], x.at[c], slope.at[c]);
                norm += Recurrence::dnorm(sum_step_size.at[c], step_size.at[c]);
                sums.skip.at[c] = fmaf(dy.at[c], x.at[c], sums.skip.at[c]);
                sums.bias.at[c] += dlogit.at[c];
            }
            if (at.valid && j < tokens) {
                store(dxs.at(t0 + j) + at.d, from_floats<Element>(dx));
                store(dlogits.at(t0 + j) + at.d, from_floats<Element>(dlogit));
            }
        }
        if (Recurrence::HAS_NORM) {
            norm = sum_over_groups(norm);
            if (at.group == 0 && half_token < HALF) warp.norm[buffer][j] = norm;
        }
    }
}

// dk and dq of a tile over the CTA's channels, one 16-byte store for 4 states
DEVICE void write_keys(const CtaMemory &cta, int buffer, const Sequence<float> &dkeys, int tile_start, int t0,
                       int tokens) {
    UNROLLED for (int base = 0; base < TILE * 2 * KEY_VECTORS; base += 32 * WARPS) {
        int i = base + threadIdx.x, token = i / (2 * KEY_VECTORS);
        bool is_query = i / KEY_VECTORS % 2;
        if (token >= tokens) break;
        Floats<4> sum = load<4>(&cta.warps[0].dkeys[buffer][0][0][0] + 4 * i);
        UNROLLED for (int w = 1; w < WARPS; w++) sum = sum + load<4>(&cta.warps[w].dkeys[buffer][0][0][0] + 4 * i);
        if (Recurrence::HAS_NORM && !is_query) {
            Floats<4> k = load<4>(&cta.keys.k[tile_start + token][4 * (i % KEY_VECTORS)]);
            float norm = cta.warps[0].norm[buffer][token];
            UNROLLED for (int w = 1; w < WARPS; w++) norm += cta.warps[w].norm[buffer][token];
            UNROLLED for (int n = 0; n < 4; n++) sum.at[n] = fmaf(2 * k.at[n], norm, sum.at[n]);
        }
        store(dkeys.at(t0 + token) + i % (2 * KEY_VECTORS) * 4, sum);
    }
}

// dlogit may be logit: a warp writes its channels of a tile when it has read them for the last time, and nobody else
// reads them. `final_gradients` are those behind all segments but the last. `sums` get a row for each sequence and
// segment: dskip and dbias as (G, 2, D), then dA as (G, D, N).
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
scan_backward(TOKENS(const Element, dy), TOKENS(const Element, x), TOKENS(const Element, logit),
              TOKENS(const Element, k), TOKENS(const Element, q), const float *__restrict__ rates,
              const float *__restrict__ skips, const float *__restrict__ biases, const float *__restrict__ checkpoints,
              const float *__restrict__ final_gradients, Element *__restrict__ dx, TOKENS(Element, dlogit),
              float *__restrict__ dkeys, float *__restrict__ sums, i64 directions, i64 B, i64 L, i64 D, i64 reverse,
              i64 segment_chunks, i64 key_vectors) {
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);
    WarpMemory &warp = cta.warps[threadIdx.x / 32];

    Cut cut(L, segment_chunks);
    Place at(B, D, cut.segments);
    i64 loaded_d = min(at.d, D - DL);  // channels that exist
    bool backwards = reverse >> at.g & 1;
    TileCopies<WARP_CHANNELS> copies(at.warp_d, D);
    Input dys(TOKENS_OF(dy), at.g, at.b, L, backwards);
    dys = dys.from(at.warp_d + copies.column);
    Input xs(TOKENS_OF(x), at.g, at.b, L, backwards);
    xs = xs.from(at.warp_d + copies.column);
    Input logits(TOKENS_OF(logit), at.g, at.b, L, backwards);
    logits = logits.from(at.warp_d + copies.column);
    Input ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    Sequence<Element> dxs({dx, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    Sequence<Element> dlogits(TOKENS_OF(dlogit), at.g, at.b, L, backwards);
    i64 all_keys = at.channels * directions * B * L * 2 * N;
    Sequence<float> dkeys_out({dkeys + all_keys, B * L * 2 * N, L * 2 * N, 2 * N}, at.g, at.b, L, backwards);
    int first = at.segment * segment_chunks, last = min(cut.chunks, first + int(segment_chunks)) - 1;
    int end = min(int(L), (last + 1) * CHUNK);
    checkpoints += state_offset(at.g, at.b, -1, at.n, loaded_d, B, cut.chunks - 1, D);

    States A, dA = {}, S, G = {};
    load_rates(A, rates, at, D);
    if (at.part == 0) {
        store(&warp.skip[at.c], skips ? load<DL>(skips + at.g * D + loaded_d) : Floats<DL>{});
        store(&warp.bias[at.c], biases ? load<DL>(biases + at.g * D + loaded_d) : Floats<DL>{});
    }
    if (at.segment < cut.segments - 1 && at.valid)
        load_states(G, final_gradients + state_offset(at.g, at.b, at.segment, at.n, at.d, B, cut.segments - 1, D), D);
    __syncwarp();

    int tiles = (end - last * CHUNK + TILE - 1) / TILE;
    TileQueue queue{copies, dys, xs, logits, first * CHUNK, end, last * CHUNK, tiles, 1 - tiles, 0};
    UNROLLED for (int s = 1; s < STAGES; s++) queue.copy_next(warp.stage[s]);

    ChannelSums channel_sums = {};
    KeysInFlight<KEY_TOKENS, 32 * WARPS> keys(ks, qs, key_vectors, threadIdx.x);
    int buffer = 0;
#pragma unroll 1
    for (int chunk = last; chunk >= first; chunk--, tiles = TILES) {
        int start = chunk * CHUNK, chunk_tokens = min(CHUNK, end - start);
        keys.fetch(start, chunk_tokens);
        __syncthreads();
        keys.put(cta.keys);
        // half tiles are scanned whole: keys behind the last token reach no result, unless they are no numbers
#pragma unroll 1
        for (int t = KEY_TOKENS; t < (chunk_tokens + HALF - 1) / HALF * HALF; t += KEY_TOKENS) {
            keys.fetch(start + t, chunk_tokens - t);
            keys.put(cta.keys, t);
        }
        __syncthreads();

        // indexed at run time, so in local memory, which suits states that a lane keeps for itself and needs rarely
        Restart<Element> before[2 * TILES];
        if (chunk > 0)
            load_states(S, checkpoints + i64(chunk) * N * D, D);
        else
            fill(S, 0);
#pragma unroll 1
        for (int i = 0; i < tiles - 1; i++) {
            Tile tile = queue.next(false, i * TILE, cta, warp, at);
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
            Tile tile = queue.next(true, i * TILE, cta, warp, at);
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
                finish_channels(tile, half * HALF, buffer, dxs, dlogits, t0, tokens, channel_sums, at);
                __syncwarp();
            }
            __syncthreads();
            write_keys(cta, buffer, dkeys_out, tile.start, t0, tokens);
            buffer ^= 1;
        }
    }

    i64 channels = directions * 2 * D, columns = channels + (Recurrence::HAS_RATES ? directions * D * N : 0);
    float *row = sums + (at.b * cut.segments + at.segment) * columns;
    UNROLLED for (int c = 0; c < DL; c++) {
        float skip = sum_over_parts(channel_sums.skip.at[c]), bias = sum_over_parts(channel_sums.bias.at[c]);
        if (at.part == 0 && at.valid) {
            row[(at.g * 2 + 0) * D + at.d + c] = skip;
            row[(at.g * 2 + 1) * D + at.d + c] = bias;
        }
        if (Recurrence::HAS_RATES && at.valid) {
            UNROLLED for (int n = 0; n < NL; n++) row[channels + (at.g * D + at.d + c) * N + at.n + n] = dA[n][c];
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

// Sums of what CTAs wrote, in a fixed order, all in one launch of CTAs of 256 threads: the columns of the `rows` of
// `sums`, where 8 threads share a sum; then dk and dq of every token over the `key_parts` CTAs of its channels, where a
// thread adds 4 states
extern "C" __global__ void reduce_partials(const float *dkeys, Element *dk, Element *dq, i64 key_parts, i64 tokens,
                                           const float *sums, float *dchannels, float *drates, i64 rows, i64 channels,
                                           i64 columns) {
    __shared__ float slices[8][32];
    i64 key_items = tokens * 2 * KEY_VECTORS, row_ctas = (columns + 31) / 32;
    if (blockIdx.x < row_ctas) {
        int slice = threadIdx.x / 32, lane = threadIdx.x % 32;
        i64 column = blockIdx.x * 32 + lane;
        float sum = 0;
        if (column < columns)
#pragma unroll 8
            for (i64 row = slice; row < rows; row += 8) sum += sums[row * columns + column];
        slices[slice][lane] = sum;
        __syncthreads();
        if (slice > 0 || column >= columns) return;
        UNROLLED for (int s = 1; s < 8; s++) sum += slices[s][lane];
        *(column < channels ? dchannels + column : drates + (column - channels)) = sum;
    } else {
        i64 i = (blockIdx.x - row_ctas) * 256 + threadIdx.x;
        if (i >= key_items) return;
        constexpr int TOGETHER = 6;  // parts on their way at once
        Floats<4> sum = {};
        for (i64 first = 0; first < key_parts; first += TOGETHER) {
            Floats<4> parts[TOGETHER] = {};
            UNROLLED for (int j = 0; j < TOGETHER; j++)
                if (first + j < key_parts) parts[j] = load_once(dkeys + ((first + j) * key_items + i) * 4);
            UNROLLED for (int j = 0; j < TOGETHER; j++) sum = sum + parts[j];
        }
        i64 token = i / (2 * KEY_VECTORS), n = i % KEY_VECTORS * 4;
        store((i / KEY_VECTORS % 2 ? dq : dk) + token * N + n, from_floats<Element>(sum));
    }
}
