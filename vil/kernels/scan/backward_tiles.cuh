// Tiles of backward.cu: the order in which tiles are copied and processed, their step sizes, and a lane's reads.

#include "backward_memory.cuh"

// Computes the step sizes of the warp's channels of a tile and, with `gradients`, their slopes.
// A lane computes its channels for every PARTS-th token, and lanes of the other parts read the results, too.
DEVICE void prepare_step_sizes(bool gradients, WarpMemory &warp, const Channels &tile, const float *kk,
                               const Position &at) {
    constexpr int ITEMS = TILE / PARTS > 0 ? TILE / PARTS : 1;
    static_assert(TILE % PARTS == 0);
    Floats<DL> bias = load<DL>(&warp.bias[at.c]), step_size[ITEMS], slope[ITEMS];
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        int token = at.part + i * PARTS;
        Floats<DL> step_logit = to_floats(load<DL>(&tile.step_logits[token][at.c]));
        float kk_t = kk[token];
        UNROLLED for (int c = 0; c < DL; c++) {
            step_size[i].at[c] = Recurrence::step_size(step_logit.at[c] + bias.at[c], kk_t);
            slope[i].at[c] = Recurrence::slope(step_logit.at[c] + bias.at[c], step_size[i].at[c]);
        }
    }
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        int token = at.part + i * PARTS;
        store(&warp.step_size[token][at.c], step_size[i]);
        if (gradients) store(&warp.slope[token][at.c], slope[i]);
    }
}

// The current tile, whose keys and queries start at token `start` of the chunk.
struct Tile {
    const Keys<CHUNK> &keys;
    WarpMemory &warp;
    const Channels &channels;
    int start;
};

// Queue of the warp's tiles of a segment, in processing order.
// For each chunk of n tiles, from the last chunk to the first, tiles 0 to n - 2 come first, only to save states.
// Then follow tiles n - 1 to 0 with dy, for the gradients.
struct TileQueue {
    TileCopies<WARP_CHANNELS> copies;
    Input dys, xs, step_logits;
    int segment_start, end;  // first token of the segment, and the token after the segment
    // The next tile to copy is tiles - 1 - |next_tile| of the chunk, with dy unless next_tile < 0.
    int chunk_start, tiles, next_tile;
    int stage;  // index of the stage with the current tile

    // Starts copying the next tile. After the last tile, commits an empty group, so that each call commits one group.
    INLINE void copy_next(Channels &to) {
        if (chunk_start >= segment_start) {
            int t0 = chunk_start + (tiles - 1 - abs(next_tile)) * TILE;
            copies.start(xs, t0, end - t0, [&](int t) { return &to.x[t][copies.column]; });
            copies.start(step_logits, t0, end - t0, [&](int t) { return &to.step_logits[t][copies.column]; });
            if (next_tile >= 0) copies.start(dys, t0, end - t0, [&](int t) { return &to.dy[t][copies.column]; });
            if (++next_tile == tiles) {
                chunk_start -= CHUNK;
                tiles = TILES;
                next_tile = 1 - TILES;
            }
        }
        commit_copies();
    }
    // Moves to the next tile and computes step sizes and, with `gradients`, slopes.
    // After the first __syncwarp, all lanes see all copies, and no lane uses the tile that is overwritten.
    INLINE Tile next(bool gradients, int start, CtaMemory &cta, WarpMemory &warp, const Position &at) {
        wait_for_copies<STAGES - 2>();
        __syncwarp();
        copy_next(warp.stage[stage]);
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        prepare_step_sizes(gradients, warp, warp.stage[stage], &cta.keys.kk[start], at);
        __syncwarp();
        return Tile{cta.keys, warp, warp.stage[stage], start};
    }
};

// The lane's part of token j of a tile.
// x and dy are converted to fp32 when they are read, which takes less shared memory than storing them in fp32.
struct Token {
    Floats<4> k, q;
    Floats<DL> x, step_size, dy;
    INLINE Token(const Tile &tile, int j, const Position &at)
        : k(load<4>(&tile.keys.k[tile.start + j][at.n])), q(load<4>(&tile.keys.q[tile.start + j][at.n])),
          x(to_floats(load<DL>(&tile.channels.x[j][at.c]))), step_size(load<DL>(&tile.warp.step_size[j][at.c])),
          dy(to_floats(load<DL>(&tile.channels.dy[j][at.c]))) {}
};
