// Copier of forward_mma.cu, one warp that copies tiles to shared memory, and y from shared to global memory.

#include "forward_mma_memory.cuh"

// Copies of COUNT vectors of 8 elements by one warp, whose lanes keep the addresses of their vectors in registers.
// TileCopies need fewer registers, but support only rows whose number of vectors divides 32.
template <int COUNT>
struct VectorCopies {
    static constexpr int ITEMS = (COUNT + 31) / 32, NEVER = 1 << 30;  // NEVER: token index after any end
    struct Item {
        Input source;
        int token, to;
    };
    Item items[ITEMS];
    INLINE void set(int i, const Input &source, int column, int token, int to) {
        items[i] = {source.from(column), token, to};
        // The compiler must keep `to` and `token` in registers instead of recomputing them for every tile.
        asm("" : "+r"(items[i].to), "+r"(items[i].token));
    }
    // Copies tokens from t0 on. Tokens before `begin` and from `end` on become zeros.
    INLINE void start(Element *tile, int t0, int begin, int end) const {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int t = t0 + items[i].token;
            if (COUNT % 32 == 0 || 32 * i + threadIdx.x % 32 < COUNT)
                copy_async<8>(tile + items[i].to, items[i].source.at(t), t >= begin && t < end);
        }
    }
};
// Copies of COLUMNS columns of a tile, of which `width` columns exist in memory.
template <int COLUMNS, bool SWIZZLES>
struct TokenCopies : VectorCopies<TILE * COLUMNS / 8> {
    INLINE TokenCopies(const Input &source, i64 width, int lane) {
        UNROLLED for (int i = 0; i < this->ITEMS; i++) {
            int item = 32 * i + lane, octet = item % (COLUMNS / 8), token = item / (COLUMNS / 8);
            int to = token * COLUMNS + 8 * (SWIZZLES ? swizzled(octet, token) : octet);
            this->set(i, source, 8 * octet, 8 * octet < width ? token : this->NEVER, to);
        }
    }
};
struct KeyCopies : VectorCopies<(2 * TILE + 1) * N / 8> {
    INLINE KeyCopies(const Input &k, const Input &q, int lane) {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int item = 32 * i + lane, row = item / (N / 8);
            set(i, row < TILE ? k : q, item % (N / 8) * 8, row < TILE ? row : row - TILE - 1, 8 * item);
        }
    }
};

// Copies y of TILE tokens, starting with the token before the tile, from shared to global memory.
struct Results {
    static constexpr int ROW = CTA_CHANNELS / 8, ITEMS = TILE * ROW / 32, NEVER = 1 << 30;
    static_assert(TILE * ROW % 32 == 0);
    Sequence<Element> to[ITEMS];
    int token[ITEMS], from[ITEMS];
    INLINE Results(const Sequence<Element> &ys, i64 width, int lane) {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int item = 32 * i + lane, row = item / ROW, octet = item % ROW;
            to[i] = ys;
            to[i].data += 8 * octet;
            token[i] = 8 * octet < width ? row - 1 : NEVER, from[i] = row * CTA_CHANNELS + 8 * swizzled(octet, row);
            asm("" : "+r"(token[i]), "+r"(from[i]));
        }
    }
    INLINE void copy(const Element (&y)[TILE][CTA_CHANNELS], int t0, int begin, int end) const {
        Pack<Element, 8> values[ITEMS];
        UNROLLED for (int i = 0; i < ITEMS; i++) values[i] = load<8>(&y[0][0] + from[i]);
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int t = t0 + token[i];
            if (t >= begin && t < end) store(to[i].at(t), values[i]);
        }
    }
};

// Loop of the copier, which copies each tile of a segment to shared memory, and y to global memory.
DEVICE void copy_tiles(CtaMemory &cta, Input xs, Input step_logits, const Input &ks, const Input &qs,
                       Sequence<Element> ys, i64 D, int begin, int end, const Position &at) {
    i64 width = D - at.cta_d;
    xs.data += at.cta_d, ys.data += at.cta_d;
    if (!RANK) step_logits.data += at.cta_d;
    TokenCopies<CTA_CHANNELS, true> x_copies(xs, width, at.lane);
    TokenCopies<STEP_COLUMNS, !RANK> step_copies(step_logits, RANK ? RANK : width, at.lane);
    KeyCopies key_copies(ks, qs, at.lane);
    auto copy = [&](int stage, int t0) {
        Tile &tile = cta.tiles[stage];
        key_copies.start(tile.keys[0], t0, begin, end);
        x_copies.start(tile.x[0], t0, begin, end);
        step_copies.start(tile.step_logits[0], t0, begin, end);
        commit_copies();
    };
    UNROLLED for (int s = 0; s < STAGES - 1; s++) copy(s, begin + s * TILE);
    wait_for_copies<STAGES - 3>();
    sync_producers();
    sync_producers();
    int stage = STAGES - 1, t0 = begin, buffer = 0;
    Results results(ys, width, at.lane);
    auto copy_results = [&]() {
        if (t0 >= begin + 2 * TILE) {
            results.copy(cta.y[buffer], t0 - 2 * TILE, begin, end);
            buffer = next_stage(buffer, 3);
        }
    };
#pragma unroll 1
    for (; t0 <= end; t0 += TILE) {
        wait_for_copies<STAGES - 4>();
        __syncthreads();
        copy(stage, t0 + (STAGES - 1) * TILE);
        stage = next_stage(stage, STAGES);
        copy_results();
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; i++, t0 += TILE) copy_results();
}
