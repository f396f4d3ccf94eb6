// Gradients of the scan, from dy and from the states between chunks that the forward pass has saved.
// For each chunk of a segment, from the last chunk to the first:
//  1. `sweep_forward` scans the chunk again and saves the state before each half tile except the last (`Restart`).
//  2. `sweep_backward` processes the half tiles from the last to the first.
//     `rescan` scans a half tile again and keeps in registers what the gradients need (`Kept`).
//     `walk_back` goes through the half tile in reverse order with G = dL/dS_t (recurrences.cuh):
//       G += dy_t q_t;  sums over states and channels;  G = decay_t G
//
// The gradients of x and step logits are sums over states, which are distributed over lanes.
// The gradients of keys and queries are sums over channels, which are distributed over lanes, warps and CTAs.
// Lanes exchange sums of half a tile through shared memory, which takes fewer instructions than shuffles.
// There are no atomics: each CTA writes sums over its channels, and `reduce_partials` adds them in a fixed order.
//
// A lane has 4 states of DL channels (lanes.cuh), so that sums over states and over channels are similarly short.
// Each warp has its own channels. Warps share keys, queries, and sums over channels.
// Barriers:
//  chunk    __syncthreads; keys and queries to shared memory; __syncthreads
//  tile     copies and step sizes; __syncwarp; two halves; __syncthreads; all threads add dk and dq of the warps
//  half     rescan; __syncwarp; dq; __syncwarp; walk_back; __syncwarp; dk, dx, dstep_logit; __syncwarp
// One __syncthreads per tile is sufficient, because sums of dk and dq have two buffers (rule 1 of cuda/pipeline.cuh).
// All other data except keys and queries belongs to a single warp (rule 3).
//
// On an H200, registers and shared memory allow 12 warps per multiprocessor for 16-bit inputs and 16 states.
// docs/kernels/scan-backward.md describes tiles, lanes and buffers, and lists alternatives that were tried.
//
// backward.py declares the parameters of the kernels.

#include "backward_sums.cuh"
#include "backward_reduce.cuh"

// Advances S by half a tile without keeping anything.
DEVICE void scan_half(States &S, const Tile &tile, int first, const States &A, const Position &at) {
    UNROLLED for (int j = 0; j < HALF; j++) {
        Token t(tile, first + j, at);
        UNROLLED for (int n = 0; n < NL; n++)
            UNROLLED for (int c = 0; c < DL; c++)
                Recurrence::update(S[n][c], t.x.at[c], t.step_size.at[c], t.k.at[n], A[n][c]);
    }
}

// Advances S by half a tile, keeps what the gradients need, and stores dq of each token over the lane's channels.
// Returns the last token, with which `walk_back` starts.
// A token is loaded before the sums of the previous token are stored.
// The compiler would not move the load before the store.
DEVICE Token rescan(States &S, Kept (&kept)[HALF], const Tile &tile, int first, const States &A, const Position &at) {
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

// Moves G from the end of half a tile, whose last token is t, to its start.
// Stores each token's sums over the lane's channels and over the lane's states.
DEVICE void walk_back(States &G, States &dA, const Kept (&kept)[HALF], Token t, const Tile &tile, int first,
                      const States &A, const Position &at) {
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

// Moves keys and queries of a chunk from registers to shared memory, and loads tokens from KEY_TOKENS on.
// Half tiles are always scanned completely, even if they end after the last token.
// Keys after the last token do not affect results unless they are NaN or infinite.
DEVICE void put_keys(CtaMemory &cta, KeysInFlight<KEY_TOKENS, 32 * WARPS> &keys, int start, int tokens) {
    keys.put(cta.keys);
#pragma unroll 1
    for (int t = KEY_TOKENS; t < (tokens + HALF - 1) / HALF * HALF; t += KEY_TOKENS) {
        keys.fetch(start + t, tokens - t);
        keys.put(cta.keys, t);
    }
}

// Objects that both sweeps through a chunk use.
struct Sweep {
    CtaMemory &cta;
    WarpMemory &warp;
    TileQueue &queue;
    const Position &at;
    const States &A;
    // Restart states, which are indexed at run time and therefore stored in local memory.
    // Local memory is suitable, because restart states are private to a lane and rarely used.
    Restart<Element> (&before)[2 * TILES];
};

// Advances S from the start of a chunk to the start of its last tile.
DEVICE void sweep_forward(States &S, const Sweep &of, int tiles) {
#pragma unroll 1
    for (int i = 0; i < tiles - 1; i++) {
        Tile tile = of.queue.next(false, i * TILE, of.cta, of.warp, of.at);
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            of.before[2 * i + half].save(S);
            scan_half(S, tile, half * HALF, of.A, of.at);
        }
    }
    of.before[2 * tiles - 2].save(S);
}

// Moves G from the end of a chunk to its start, and computes the gradients of all tokens of the chunk.
DEVICE void sweep_backward(States &S, States &G, States &dA, ChannelSums &channel_sums, int &buffer, const Sweep &of,
                           int tiles, int start, int end, const Gradients &to) {
#pragma unroll 1
    for (int i = tiles - 1; i >= 0; i--) {
        int t0 = start + i * TILE, tokens = min(TILE, end - t0);
        Tile tile = of.queue.next(true, i * TILE, of.cta, of.warp, of.at);
        if (i == tiles - 1 && tokens > HALF) scan_half(S, tile, 0, of.A, of.at);
#pragma unroll 1
        for (int half = tokens > HALF; half >= 0; half--) {
            Kept kept[HALF];
            Token last = rescan(S, kept, tile, half * HALF, of.A, of.at);
            __syncwarp();
            finish_keys(of.warp, true, half * HALF, buffer, of.at);
            __syncwarp();
            // The next restart state is loaded now, because S is unused until the next half tile.
            of.before[max(2 * i + half - 1, 0)].restore(S);
            walk_back(G, dA, kept, last, tile, half * HALF, of.A, of.at);
            __syncwarp();
            finish_keys(of.warp, false, half * HALF, buffer, of.at);
            finish_channels(tile, half * HALF, buffer, to, t0, tokens, channel_sums, of.at);
            __syncwarp();
        }
        __syncthreads();
        write_keys(of.cta, buffer, to.keys, tile.start, t0, tokens);
        buffer ^= 1;
    }
}

// Writes dskip and dstep_bias of the segment as (G, 2, D), followed by dA as (G, D, N), to a row of partial sums.
DEVICE void store_channel_sums(float *row, const ChannelSums &sums, const States &dA, i64 directions, i64 D,
                               const Position &at) {
    i64 channels = directions * 2 * D;
    UNROLLED for (int c = 0; c < DL; c++) {
        float skip = sum_over_parts(sums.skip.at[c]), bias = sum_over_parts(sums.bias.at[c]);
        if (at.part == 0 && at.valid) {
            row[(at.g * 2 + 0) * D + at.d + c] = skip;
            row[(at.g * 2 + 1) * D + at.d + c] = bias;
        }
        if (Recurrence::HAS_A && at.valid) {
            UNROLLED for (int n = 0; n < NL; n++) row[channels + (at.g * D + at.d + c) * N + at.n + n] = dA[n][c];
        }
    }
}

// `dstep_logits` may be the same memory as `step_logits`.
// A warp overwrites its channels of a tile after it has read them for the last time, and no other warp reads them.
// `final_gradients` contains G after each segment except the last.
// `channel_partials` receives a row for each image and segment.
// `key_partials` receives dk and dq, with the shape (CTAs per sequence, G, B, L, 2, N).
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS) scan_backward(PARAMETERS_scan_backward) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);
    WarpMemory &warp = cta.warps[threadIdx.x / 32];

    Cut cut(L, segment_chunks);
    Position at(B, D, cut.segments);
    i64 loaded_d = min(at.d, D - DL);  // first channel of the lane, clamped to existing channels
    bool backwards = reverse >> at.g & 1;
    TileCopies<WARP_CHANNELS> copies(at.warp_d, D);
    Input dys(TOKENS_OF(dy), at.g, at.b, L, backwards);
    dys = dys.from(at.warp_d + copies.column);
    Input xs(TOKENS_OF(x), at.g, at.b, L, backwards);
    xs = xs.from(at.warp_d + copies.column);
    Input step_logits(TOKENS_OF(step_logits), at.g, at.b, L, backwards);
    step_logits = step_logits.from(at.warp_d + copies.column);
    Input ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    Sequence<Element> dxs({dx, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    Sequence<Element> dstep_logits(TOKENS_OF(dstep_logits), at.g, at.b, L, backwards);
    i64 all_keys = at.channels * directions * B * L * 2 * N;
    Sequence<float> dkeys({key_partials + all_keys, B * L * 2 * N, L * 2 * N, 2 * N}, at.g, at.b, L, backwards);
    Gradients to = {dxs, dstep_logits, dkeys};
    int first = at.segment * segment_chunks, last = min(cut.chunks, first + int(segment_chunks)) - 1;
    int end = min(int(L), (last + 1) * CHUNK);
    chunk_states += state_offset(at.g, at.b, -1, at.n, loaded_d, B, cut.chunks - 1, D);

    States lane_A, dA = {}, S, G = {};
    load_A(lane_A, A, at, D);
    if (at.part == 0) {
        store(&warp.skip[at.c], skip ? load<DL>(skip + at.g * D + loaded_d) : Floats<DL>{});
        store(&warp.bias[at.c], step_bias ? load<DL>(step_bias + at.g * D + loaded_d) : Floats<DL>{});
    }
    if (at.segment < cut.segments - 1 && at.valid)
        load_states(G, final_gradients + state_offset(at.g, at.b, at.segment, at.n, at.d, B, cut.segments - 1, D), D);
    __syncwarp();

    int tiles = (end - last * CHUNK + TILE - 1) / TILE;
    TileQueue queue{copies, dys, xs, step_logits, first * CHUNK, end, last * CHUNK, tiles, 1 - tiles, 0};
    UNROLLED for (int s = 1; s < STAGES; s++) queue.copy_next(warp.stage[s]);

    ChannelSums channel_sums = {};
    KeysInFlight<KEY_TOKENS, 32 * WARPS> keys(ks, qs, key_vectors, threadIdx.x);
    int buffer = 0;
#pragma unroll 1
    for (int chunk = last; chunk >= first; chunk--, tiles = TILES) {
        int start = chunk * CHUNK, chunk_tokens = min(CHUNK, end - start);
        keys.fetch(start, chunk_tokens);
        __syncthreads();
        put_keys(cta, keys, start, chunk_tokens);
        __syncthreads();

        Restart<Element> before[2 * TILES];
        Sweep of = {cta, warp, queue, at, lane_A, before};
        if (chunk > 0)
            load_states(S, chunk_states + i64(chunk) * N * D, D);
        else
            fill(S, 0);
        sweep_forward(S, of, tiles);
        sweep_backward(S, G, dA, channel_sums, buffer, of, tiles, start, end, to);
    }
    i64 columns = directions * 2 * D + (Recurrence::HAS_A ? directions * D * N : 0);
    float *row = channel_partials + (at.b * cut.segments + at.segment) * columns;
    store_channel_sums(row, channel_sums, dA, directions, D, at);
}
