// Gradients of Longhorn's states between the segments of a sequence, three tokens at a time on tensor cores.
// The kernel replaces segment_states.cu with GRADIENTS, for 16-bit inputs and 16 states.
// Tokens are counted in processing order, from the last token to the first.
// Step sizes e and dy differ between channels, a = k^2 and q differ between states.
// F_t is the part of dL/dS_t from token t and from the tokens before t in processing order:
//   F_t = (1 - e_{t-1} a_{t-1}) F_{t-1} + dy_t q_t
//   F_3 = A F_0 + B          A = (1 - e_0 a_0) (1 - e_1 a_1) (1 - e_2 a_2)
// Multiplied out, A - 1 and B are sums of 7 products of a channel's factor and a state's factor.
// A - 1 and B are therefore matrix products of the shapes (channels, 8) and (8, states), which tensor cores compute.
// Besides the matrix products, three tokens take two instructions per state: F = A F + B and decay = decay A.
// `Factors` stores the operands as four words of two columns, from e and v = dy_1 to dy_3, or from -a and q:
//
//     of A        e_0, e_1    | e_2, e_0 e_1     | e_0 e_2, e_1 e_2    | 0, e_0 e_1 e_2
//     of B        v_0, v_1    | v_2, e_1 v_0     | e_2 v_0, e_2 v_1    | e_1 e_2 v_0, 0
//
// docs/kernels/mathematics.md derives the operands and their formats.
// The operands of states are the same for all channels, so `stage_factors` writes them to memory, 176 bytes per token.
// A warp of `segment_gradients` has DL / 2 times 16 channels and is independent of other warps.
// Therefore __syncwarp is the only barrier (rule 3 of cuda/pipeline.cuh).
// docs/kernels/scan-backward.md describes lanes and buffers.
//
// segments.py declares the parameters of the kernels.

#include "tiles.cuh"

constexpr int THREADS = 32 * WARPS, SIXTEENS = DL / 2, OCTETS = N / 8, TRIPLES = TILE / 3, WARP_CHANNELS = 8 * DL;
// Number of triples whose operands of states are loaded ahead. With 4, compilers spill registers on newer GPUs.
#if __CUDA_ARCH__ < 1000
constexpr int AHEAD = 4;
#else
constexpr int AHEAD = 2;
#endif
static_assert(TILE == 24 && sizeof(Element) == 2 && N == 16 && NL == OCTETS * 2 && DL % 2 == 0);

// A warp's tile as in memory, by octets of channels: step logits, then dy of the next token.
// The order of the rows avoids bank conflicts of copies of two tokens, and of loads of tokens 3 apart.
struct Tile {
    alignas(16) Element at[2][WARP_CHANNELS / 8][TILE][8];
};
DEVICE int tile_row(int octet, int token) { return token ^ 2 * (octet % 4); }

// Data that all channels share, for each triple of a tile.
// `factor` contains the operands of A and of the added term for each lane and two octets of states.
// `norm` contains 1 / (1 + k.k).
struct StateFactors {
    alignas(16) unsigned factor[TRIPLES][32][2 * OCTETS];
    alignas(16) float norm[TRIPLES][4];
};

// Operands of a warp's channels for 4 triples: operands of A for channels c and c + 8, then of the added term.
// With a row length of 33, lanes that write the same operand of four triples have no bank conflicts.
struct ChannelFactors {
    alignas(16) unsigned factor[SIXTEENS][4][33][4];
};

struct WarpMemory {
    Tile tile;
    ChannelFactors channels;
};
static_assert(WARPS * sizeof(WarpMemory) == CTA_BYTES && sizeof(StateFactors) == FACTOR_BYTES);

// Multiplies both halves of words. On older GPUs, PTX has no bf16 product, but an FMA that rounds in the same way.
constexpr unsigned MINUS_ZEROS = 0x80008000u;
DEVICE unsigned multiply_both(bf16, unsigned a, unsigned b) {
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(MINUS_ZEROS));
    return product;
}
DEVICE unsigned multiply_both(fp16, unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// The four words of a triple, for a channel from three step sizes e and values v, or for a state from -a and q.
// `v_01` contains two values, and the lower half of `v_2` contains the third value.
struct Factors {
    unsigned decay[4], added[4];
    INLINE Factors(const float (&e)[3], unsigned v_01, unsigned v_2) {
        unsigned e_1 = pack(Element{}, e[1], 0), e_2 = pack(fp16{}, e[2], e[2]);
        decay[0] = pack(fp16{}, e[0], e[1]);         // e_0, e_1
        decay[1] = pack(fp16{}, e[2], e[0] * e[1]);  // e_2, e_0 e_1
        decay[2] = multiply_both(fp16{}, decay[0], e_2);  // e_0 e_2, e_1 e_2
        decay[3] = multiply_both(fp16{}, decay[1], e_2 & 0xffff0000u);  // 0, e_0 e_1 e_2
        added[0] = v_01;  // v_0, v_1
        added[1] = lower_halves(v_2, multiply_both(Element{}, v_01, e_1));  // v_2, e_1 v_0
        added[2] = multiply_both(Element{}, v_01, pack(Element{}, e[2], e[2]));  // e_2 v_0, e_2 v_1
        added[3] = multiply_both(Element{}, added[2], e_1);  // e_1 e_2 v_0, 0
    }
};

// Tokens of the segment whose gradients are passed on at a boundary, counted from the end of the sequence.
struct Stretch {
    int begin, end;
    INLINE Stretch(int boundary, int L, int tokens)
        : begin(max(0, L - (boundary + 2) * tokens)), end(L - (boundary + 1) * tokens) {}
};
DEVICE int tiles_of(int tokens) { return (tokens + TILE - 1) / TILE; }

// A thread computes the operands of two states, n and n + 8, of one triple.
extern "C" __global__ void __launch_bounds__(128) stage_factors(PARAMETERS_stage_factors) {
    begin_kernel();
    static_assert(N == 16);
    unsigned index = blockIdx.x * 128u + threadIdx.x, tile = index / (8 * TRIPLES), each = tiles_of(segment_tokens);
    if (tile >= count) return;
    int n = index % 8, triple = index / 8 % TRIPLES;
    unsigned sequence = tile / each / unsigned(boundaries), g = sequence / unsigned(B), b = sequence % unsigned(B);
    Stretch stretch(tile / each % unsigned(boundaries), L, segment_tokens);
    int t0 = stretch.begin + tile % each * TILE + triple * 3, tokens = stretch.end - t0;
    bool backwards = !(reverse >> g & 1);
    Input ks(TOKENS_OF(k), g, b, L, backwards), qs(TOKENS_OF(q), g, b, L, backwards);
    Element keys[2][3], queries[2][3];  // queries: queries of the next token
    UNROLLED for (int j = 0; j < 3; j++)
        UNROLLED for (int o = 0; o < 2; o++) {
            keys[o][j] = j < tokens ? ks.at(t0 + j)[n + 8 * o] : Element{};
            queries[o][j] = j + 1 < tokens ? qs.at(t0 + j + 1)[n + 8 * o] : Element{};
        }
    float minus_a[2][3], norm[3];
    UNROLLED for (int j = 0; j < 3; j++) {
        float kk = 0;
        UNROLLED for (int o = 0; o < 2; o++) {
            float key = to_floats(Pack<Element, 1>{keys[o][j]}).at[0];
            minus_a[o][j] = -key * key;
            kk -= minus_a[o][j];
        }
        UNROLLED for (int distance = 1; distance < 8; distance *= 2) kk += __shfl_xor_sync(WARP, kk, distance);
        norm[j] = reciprocal(1 + kk);
        UNROLLED for (int o = 0; o < 2; o++) minus_a[o][j] *= norm[j];
    }
    Factors first(minus_a[0], queries[0][0].bits | unsigned(queries[0][1].bits) << 16, queries[0][2].bits);
    Factors second(minus_a[1], queries[1][0].bits | unsigned(queries[1][1].bits) << 16, queries[1][2].bits);
    StateFactors &to = factors[tile];
    UNROLLED for (int p = 0; p < 4; p++)
        store(to.factor[triple][4 * n + p],
              Pack<unsigned, 4>{first.decay[p], second.decay[p], first.added[p], second.added[p]});
    if (n == 0) store(to.norm[triple], Floats<4>{norm[0], norm[1], norm[2], 0});
}

// Position of a warp in the grid, at a boundary between segments of a sequence, with the lane's first channel.
struct Position : GridPosition {
    i64 warp_d, d;
    int warp, lane, c, p;
    INLINE Position(i64 B, i64 D, i64 boundaries) : GridPosition(WARPS * WARP_CHANNELS, D, boundaries, B) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane / 4, p = lane % 4;
        warp_d = (channels * WARPS + warp) * WARP_CHANNELS;
        d = warp_d + c;
    }
};

// States of a lane in the layout of products: [s][o][2 i + j] is state 8 o + 2 p + j of channel 16 s + c + 8 i.
typedef float LaneStates[SIXTEENS][OCTETS][4];

// Copies of a warp's tile: the step logits of each token, and dy of the following token.
struct Copies {
    TileCopies<WARP_CHANNELS> lane;
    Input step_logits, dys;  // both start at the lane's channels
    int end;
    INLINE void start(Tile &tile, int t0) const {
        int octet = lane.column / 8, column = lane.column % 8, left = lane.skipped ? 0 : end - t0 - lane.token;
        UNROLLED for (int i = 0; i < lane.ITEMS; i++) {
            int t = i * lane.APART, token = t0 + lane.token + t, row = tile_row(octet, lane.token + t);
            copy_async<VECTOR>(tile.at[0][octet][row] + column, step_logits.at(token), t < left);
            copy_async<VECTOR>(tile.at[1][octet][row] + column, dys.at(token + 1), t + 1 < left);
        }
        commit_copies();
    }
};

// Registers that ldmatrix loads from a tile: token j of triples p and p + 4, as the halves of a word.
// The words of step logits of channels c and c + 8 come first, then the words of dy.
// Lane 2 i passes the address of a row of triple i, and lane 2 i + 1 of triple i + 4.
typedef unsigned Words[SIXTEENS][3][4];
struct Rows {
    int of[2][3];
    INLINE Rows(int lane) {
        int octet = lane / 8 % 2, token = lane % 8 / 2 * 3 + lane % 2 * 12;
        UNROLLED for (int s = 0; s < 2; s++)
            UNROLLED for (int j = 0; j < 3; j++)
                of[s][j] = (octet + 2 * s) * TILE + tile_row(octet + 2 * s, token + j);
    }
    INLINE void read(Words &words, const Tile &tile, int lane) const {
        const Element(*rows)[8] = tile.at[lane / 16][0];
        UNROLLED for (int s = 0; s < SIXTEENS; s++)
            UNROLLED for (int j = 0; j < 3; j++) load_transposed(words[s][j], rows[s / 2 * 4 * TILE + of[s % 2][j]]);
    }
};

// Writes the operands of the warp's channels for triples 0 to 3 of a tile, or for triples 4 to 7 if `second`.
DEVICE void write_factors(ChannelFactors &to, const Words &words, int second, const float (&bias)[SIXTEENS][2],
                          const Floats<4> &norm, int c, int p) {
    UNROLLED for (int s = 0; s < SIXTEENS; s++) {
        float step_size[2][3];
        UNROLLED for (int i = 0; i < 2; i++)
            UNROLLED for (int j = 0; j < 3; j++) {
                float step_logit = unpack(Element{}, words[s][j][i]).at[second];
                step_size[i][j] = reciprocal(fmaf(exp2_fast(fmaf(step_logit, -LOG2E, bias[s][i])), norm.at[j], 1));
            }
        auto values = [&](int i, int a, int b) {
            return second ? upper_halves(words[s][a][2 + i], words[s][b][2 + i])
                          : lower_halves(words[s][a][2 + i], words[s][b][2 + i]);
        };
        Factors of_c(step_size[0], values(0, 0, 1), values(0, 2, 2));
        Factors of_c_8(step_size[1], values(1, 0, 1), values(1, 2, 2));
        UNROLLED for (int w = 0; w < 4; w++)
            store(to.factor[s][p][4 * c + w],
                  Pack<unsigned, 4>{of_c.decay[w], of_c_8.decay[w], of_c.added[w], of_c_8.added[w]});
    }
}

// Advances F and the product of decays by a triple of tokens.
DEVICE void advance(LaneStates &F, LaneStates &decay, const ChannelFactors &channels,
                    const Pack<unsigned, 4> &of_states, int triple, int lane) {
    Pack<unsigned, 4> channel[SIXTEENS];
    UNROLLED for (int s = 0; s < SIXTEENS; s++) channel[s] = load<4>(channels.factor[s][triple][lane]);
    UNROLLED for (int o = 0; o < OCTETS; o++)
        UNROLLED for (int s = 0; s < SIXTEENS; s++) {
            float A[4], added[4], (&f)[4] = F[s][o];
            multiply(fp16{}, A, channel[s].at[0], channel[s].at[1], of_states.at[o], 1);
            multiply(Element{}, added, channel[s].at[2], channel[s].at[3], of_states.at[OCTETS + o], 0);
            UNROLLED for (int x = 0; x < 4; x++) {
                f[x] = fmaf(A[x], f[x], added[x]);
                decay[s][o][x] *= A[x];
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_CTAS) segment_gradients(PARAMETERS_segment_gradients) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];

    int tokens = segment_chunks * CHUNK, boundaries = (L + tokens - 1) / tokens - 1;
    Position at(B, D, boundaries);
    int lane = at.lane, c = at.c, p = at.p;
    Stretch stretch(at.segment, L, tokens);
    int begin = stretch.begin, end = stretch.end;
    bool backwards = !(reverse >> at.g & 1);
    Input qs(TOKENS_OF(q), at.g, at.b, L, backwards), dys(TOKENS_OF(dy), at.g, at.b, L, backwards);
    Input step_logits(TOKENS_OF(step_logits), at.g, at.b, L, backwards);
    TileCopies<WARP_CHANNELS> of_lane(at.warp_d, D);
    Copies copies = {of_lane, step_logits.from(at.warp_d + of_lane.column), dys.from(at.warp_d + of_lane.column), end};
    WarpMemory &warp = reinterpret_cast<WarpMemory *>(shared)[at.warp];
    const StateFactors *states = factors + ((at.g * B + at.b) * boundaries + at.segment) * tiles_of(tokens);
    copies.start(warp.tile, begin);

    LaneStates F, decay;
    float bias[SIXTEENS][2] = {};
    UNROLLED for (int s = 0; s < SIXTEENS; s++)
        UNROLLED for (int i = 0; i < 2; i++) {
            i64 channel = at.d + 16 * s + 8 * i;
            bool exists = channel < D;
            if (step_bias && exists) bias[s][i] = -LOG2E * step_bias[at.g * D + channel];
            float dy = exists ? to_floats(load<1>(dys.at(begin) + channel)).at[0] : 0;
            UNROLLED for (int o = 0; o < OCTETS; o++)
                UNROLLED for (int j = 0; j < 2; j++) {
                    decay[s][o][2 * i + j] = 1;
                    F[s][o][2 * i + j] = dy * to_floats(load<1>(qs.at(begin) + 8 * o + 2 * p + j)).at[0];
                }
        }

    Rows rows(lane);
    Floats<4> norm = load<4>(states->norm[p]);
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE, states++) {
        wait_for_copies<0>();
        __syncwarp();
        Words words;
        rows.read(words, warp.tile, lane);
        __syncwarp();
        copies.start(warp.tile, t0 + TILE);
        UNROLLED for (int four = 0; four < 2; four++) {
            // Operands of states are loaded while the operands of channels are computed.
            Pack<unsigned, 4> of_states[AHEAD];
            UNROLLED for (int j = 0; j < AHEAD; j++) of_states[j] = load<4>(states->factor[4 * four + j][lane]);
            write_factors(warp.channels, words, four, bias, norm, c, p);
            // The norms belong to the next four triples.
            norm = load<4>(states[four && t0 + TILE < end].norm[four ? p : 4 + p]);
            __syncwarp();
#pragma unroll AHEAD
            for (int j = 0; j < 4; j++) {
                advance(F, decay, warp.channels, of_states[j % AHEAD], j, lane);
                if (j + AHEAD < 4) of_states[j % AHEAD] = load<4>(states->factor[4 * four + j + AHEAD][lane]);
            }
            __syncwarp();
        }
    }
    wait_for_copies<0>();  // waits for the copies of a tile after the last tile
    // The compiler must not keep values that are derived from `boundaries` and `D` in registers during the loop.
    asm("" : "+r"(boundaries), "+l"(D));
    Position to(B, D, boundaries);
    i64 offset = state_offset(to.g, to.b, to.segment, 2 * p, to.d, B, boundaries, D);
    UNROLLED for (int s = 0; s < SIXTEENS; s++)
        UNROLLED for (int i = 0; i < 2; i++)
            if (to.d + 16 * s + 8 * i < D)
                UNROLLED for (int o = 0; o < OCTETS; o++)
                    UNROLLED for (int j = 0; j < 2; j++) {
                        i64 index = offset + (8 * o + j) * D + 16 * s + 8 * i;
                        ends[index] = F[s][o][2 * i + j];
                        decays[index] = decay[s][o][2 * i + j];
                    }
}
