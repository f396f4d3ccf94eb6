// The convolutions of a block and the projections of what they find in one kernel, for 16-bit types. For each
// direction, of the H tokens that it reads first,
//
//   v(t) = silu(conv(t))         conv_0(t) = bias_0 + sum_i weight_0[i] u(t - BACK + i)
//                                conv_1(t) = bias_1 + sum_i weight_1[i] u(t + BACK - i),     BACK = TAPS - 1
//   projected = v x_proj^T       (tokens, P): the step, k and q
//   logits = step step_proj^T    (tokens, D), where the step is the first R columns, rounded
//
// Direction 0 reads tokens from the first to the last, 1 from the last to the first.
//
// Macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   TAPS         tokens that a convolution sees, the last of them the token itself: 4
//   PROJECTIONS  rows of x_proj, P = R + 2N, a multiple of 8, at most 80, for whose sums a warp has registers
//   RANK         columns of step_proj, R, a multiple of 8
//   LOGITS       whether to compute them
//   SPLIT        1, or 2 for P > 64: warps that share their tokens and have a part of the channels each. A warp keeps P
//                sums a lane; those of wide projections leave no registers to compute v of both of its tiles at once.
//                With SPLIT a CTA has 12 warps, one CTA a multiprocessor, also where there are no tokens for two CTAs
//                of 6, and while one warp waits for its sigmoids another multiplies. It costs an exchange of sums and
//                steps between two warps. At P = 56, (4, 6085, 768), it loses: 80 us of 70. At P = 80, (64, 197, 1536),
//                it takes 84 us of 110, without logits 59 of 79.
//   K_TILE       channels on their way to shared memory at once, 32 SPLIT or a multiple; D is one of it
//   BLOCK_BYTES  dynamic shared memory, as the host has counted it
//
// B batch    L tokens    D channels
//
// A CTA has TOKENS tokens, both directions and all channels, one K_TILE after another. Its warps share u and the
// weights:
//
//   warp w:  direction w % 2, group w / 2 % GROUPS of WARP_TOKENS = 32 tokens, part w / (2 GROUPS) of K_TILE channels
//
// A group's tokens are two tiles of 16, a tile is 8 strips of two neighbours in its sequence. Sequences have a whole
// number of strips (L rounded up), so no strip crosses them; in shared memory BACK rows of zeros are between two.
//
// Layout (cuda/types.cuh; lane l, r = l / 4, p = l % 4). A lane has strip r of each tile: its tokens are rows r and r +
// 8 of a. It computes v of channels 8p .. 8p + 7 of each 32, from one window of BACK + 2 rows of u in shared memory, 16
// bytes each, and has them as four words, w = 0 .. 3, of channels 8p + 2w, 8p + 2w + 1. A product wants columns 2p, 2p
// + 1 and 2p + 8, 2p + 9. As a sum over channels may be in any order, if both factors have the same, columns are
// renamed:
//
//   product   columns         are channels        a                        b, of 8p .. 8p + 7 of row 8i + r of x_proj
//   first     2p, 2p + 1      8p, 8p + 1          word 0 of both tokens    word 0
//             2p + 8, 2p + 9  8p + 2, 8p + 3      word 1                   word 1
//   second    2p, 2p + 1      8p + 4, 8p + 5      word 2                   word 2
//             2p + 8, 2p + 9  8p + 6, 8p + 7      word 3                   word 3
//
// so neither v nor x_proj is moved between lanes, and v is stored as 16 bytes a token. The sums, columns 8i + 2p, + 1
// of rows r and r + 8, rounded, are what the lane needs of the step as a of the last product, whose b are rows of
// step_proj. There it is rows (channels of the logits) that are renamed: in shared memory, row 8w + 2p + e of 32 is
// channel 8p + 2w + e, so that the lane's sums of products w = 0 .. 3 are channels 8p .. 8p + 7 of its tokens, again 16
// bytes.
//
// Barriers: two stages, one __syncthreads for each K_TILE channels, behind the wait for copies. Behind it they have come
// for all threads, and nobody reads the other stage any more, into which the next copies go. step_proj follows the last
// channels of u through the same stages. With SPLIT, the stage of the last channels has sums and then the step
// (`Exchange`):
//   __syncthreads   nobody reads these channels any more; each warp writes its sums of the other's tile
//   __syncthreads   each adds those of its own tile, in the order part + other; only it reads these, so that behind
//                   __syncwarp it writes the tile's step in their place
//   __syncthreads   both read the steps of both tiles, before the next barrier, behind which step_proj is copied there

#include "filter.cuh"
#include "silu.cuh"

typedef INPUT Element;

constexpr int STRIP = 2, TILES = 2, GROUPS = 3;  // tokens of a strip, tiles of a warp, groups of each direction
constexpr int WARP_TOKENS = 16 * TILES, TOKENS = GROUPS * WARP_TOKENS, THREADS = 2 * GROUPS * SPLIT * 32;
constexpr int TOGETHER = PROJECTIONS <= 64 ? TILES : 1;  // tiles of which a warp computes v at once
constexpr int PART = K_TILE / SPLIT;  // channels of a k_tile that a warp has
constexpr int COLUMNS = PROJECTIONS / 8, STEPS = (RANK + 15) / 16;  // products: of `projected`, of sixteen ranks
static_assert(PART % 32 == 0 && (SPLIT == 1 || SPLIT == TILES) && TAPS == 4);
constexpr int GAPS = 4 * BACK;  // rows of zeros between the at most five sequences of a CTA's tokens
constexpr int ROWS = BACK + TOKENS + GAPS + BACK;
constexpr int PITCH = K_TILE + 16;  // for which lanes with different strips hit different banks
constexpr int STEP_PITCH = RANK + (RANK % 16 == 0 ? 8 : 0);  // for which the rows of a product are in different banks

struct Weights {  // of 32 channels
    struct {
        float weights[32][TAPS], biases[8][4];
    } of[2];
    Element x_proj[2 * PROJECTIONS][32];
};
struct Stage {
    Element u[ROWS][PITCH];
    Weights weights[K_TILE / 32];
};
struct StepStage {
    Element step_proj[2][K_TILE][STEP_PITCH];
};
union Exchange {  // of a tile
    Floats<2> sums[COLUMNS][2][32];
    unsigned step[STEPS][4][32];
};
struct CtaMemory {
    Stage stages[2];
    int rows[ROWS];  // where those of Stage::u are in memory, from the first sequence on, or -1 for zeros
};
static_assert(sizeof(StepStage) <= sizeof(Stage) && sizeof(CtaMemory) == BLOCK_BYTES);
constexpr int EXCHANGES = SPLIT == 1 ? 0 : TILES * 2 * GROUPS * sizeof(Exchange);
constexpr bool TAKES_BOTH = EXCHANGES > sizeof(Stage);  // stages; step_proj is fetched when they are free again
static_assert(EXCHANGES <= 2 * sizeof(Stage));

// Where the filter of channel c of 32 is. A lane reads those of its channels 8p .. 8p + 7 one after the other, so lanes
// read channels c, c + 8, c + 16 and c + 24 together: neighbours.
DEVICE int place_of(int c) { return c % 8 * 4 + c / 8; }
// Row of step_proj for channel c of 32, 8p + 2w + e, as above
DEVICE int step_place_of(int c) { return c % 8 / 2 * 8 + c / 8 * 2 + c % 2; }

extern "C" __global__ void __launch_bounds__(THREADS, __CUDA_ARCH__ < 1200 && SPLIT == 1 ? 2 : 1)
conv_xproj(const Element *__restrict__ u, i64 u_stride, const float *__restrict__ weights,
           const float *__restrict__ biases, const Element *__restrict__ x_proj, const Element *__restrict__ step_proj,
           Element *__restrict__ v, Element *__restrict__ projected, Element *__restrict__ logits, i64 B, i64 length,
           i64 read, i64 channels) {
    extern __shared__ __align__(16) char shared[];
    CtaMemory &memory = *reinterpret_cast<CtaMemory *>(shared);
    Stage *stages = memory.stages;
    int *rows = memory.rows;
    int lane, L = length, H = read, D = channels, k_tiles = D / K_TILE;
    int strips = (L + STRIP - 1) / STRIP;  // of a sequence
    i64 first_strip = blockIdx.x * i64(TOKENS / STRIP), b = first_strip / strips;
    int first = first_strip % strips * STRIP, there = min(B - b, i64(TOKENS));  // sequences
    u += b * L * u_stride;

    constexpr int PIECES = K_TILE / 8, AT_ONCE = THREADS / PIECES;  // rows that are copied at once
    static_assert(THREADS % PIECES == 0);
    for (int i = threadIdx.x; i < ROWS; i += THREADS) {  // zeros between sequences stay for all channels
        int t = first - BACK + i, sequence = t / (L + BACK), position = t - sequence * (L + BACK);
        bool valid = t >= 0 && position < L && sequence < there;
        rows[i] = valid ? (sequence * L + position) * int(u_stride) : -1;
        for (int j = 0; j < (valid ? 0 : 2 * PIECES); j++)
            store(&stages[j / PIECES].u[i][j % PIECES * 8], Pack<Element, 8>{});
    }
    __syncthreads();
    auto fetch = [&](int k_tile) {
        Stage &stage = stages[k_tile % 2];
        int thread = threadIdx.x;
        asm("" : "+r"(thread) : "r"(k_tile));  // or registers would hold what follows from it for every k_tile
        int piece = thread % PIECES * 8, copied = thread / PIECES, x_stride = AT_ONCE * D;
        Element *to = &stage.u[copied][piece];
        const Element *from = u + (k_tile * K_TILE + piece);
        UNROLLED for (int i = 0; i < ROWS; i += AT_ONCE)
            if (int row = i + AT_ONCE <= ROWS || i + copied < ROWS ? rows[i + copied] : -1; row >= 0)
                copy_async<8>(to + i * PITCH, from + row, true);
        to = &stage.weights[piece / 32].x_proj[copied][piece % 32];
        from = x_proj + (copied * D + k_tile * K_TILE + piece);
        UNROLLED for (int i = 0; i < 2 * PROJECTIONS; i += AT_ONCE) {
            if (i + AT_ONCE <= 2 * PROJECTIONS || i + copied < 2 * PROJECTIONS) copy_async<8>(to + i * 32, from, true);
            from += x_stride;
        }
        UNROLLED for (int start = 0; start < 2 * K_TILE; start += THREADS)
            if (int i = start + thread; i < 2 * K_TILE) {
                int g = i / K_TILE, c = i % K_TILE;
                copy_async<4>(stage.weights[c / 32].of[g].weights[place_of(c % 32)],
                              weights + (g * D + k_tile * K_TILE + c) * TAPS, true);
            }
        if (int i = thread * 4; i < 2 * K_TILE) {
            int g = i / K_TILE, c = i % K_TILE;
            copy_async<4>(stage.weights[c / 32].of[g].biases[place_of(c % 32) / 16 * 4 + c % 32 / 8],
                          biases + g * D + k_tile * K_TILE + c, true);
        }
        commit_copies();
    };
    auto fetch_step = [&](int k_tile) {
        StepStage &stage = reinterpret_cast<StepStage &>(stages[(k_tiles + k_tile) % 2]);
        constexpr int PIECES = RANK / 8;
        int thread = threadIdx.x;
        asm("" : "+r"(thread) : "r"(k_tile));
        UNROLLED for (int start = 0; start < 2 * K_TILE * PIECES; start += THREADS)
            if (int i = start + thread; i < 2 * K_TILE * PIECES) {
                int d = i / PIECES % K_TILE, g = i / (PIECES * K_TILE), r = i % PIECES * 8;
                int place = d / 32 * 32 + step_place_of(d % 32);
                const Element *from = step_proj + (g * D + k_tile * K_TILE + d) * RANK + r;
                copy_async<8>(&stage.step_proj[g][place][r], from, true);
            }
        commit_copies();
    };

    int g, part, onward;
    bool valid[TILES][STRIP], any = false;
    Element *vs[TILES];
    int token[TILES];  // that the strip begins with, of those read, behind the first of sequence b
    int row[TILES];    // of a stage, where the strip's window begins
    auto find_tokens = [&](int thread) {
        int group = thread / 64 % GROUPS;
        lane = thread % 32;
        g = thread / 32 % 2, part = SPLIT == 1 ? 0 : thread / (64 * GROUPS), onward = g ? -1 : 1;
        int first_read = g ? L - H : 0;
        UNROLLED for (int m = 0; m < TILES; m++) {
            int strip = first / STRIP + group * (WARP_TOKENS / STRIP) + m * 8 + lane / 4;
            int sequence = strip / strips, t = strip % strips * STRIP + g * (STRIP - 1);
            row[m] = sequence * (L + BACK) + t - first + BACK - onward * BACK;
            token[m] = sequence * H + t - first_read;
            UNROLLED for (int s = 0; s < STRIP; s++)
                valid[m][s] = sequence < there && unsigned(t + s * onward - first_read) < unsigned(H);
        }
    };
    find_tokens(threadIdx.x);
    int next = onward * D;
    UNROLLED for (int m = 0; m < TILES; m++) {
        vs[m] = v + ((g * B + b) * H + token[m]) * D + part * PART + lane % 4 * 8;
        UNROLLED for (int s = 0; s < STRIP; s++) any |= valid[m][s];
    }
    any = __any_sync(WARP, any);

    int window_of[TILES], onward_pitch = onward * PITCH;
    int of_weights = g * 32 * (TAPS + 1) + lane % 4 * 4, of_x_proj = g * PROJECTIONS * 32 + lane * 8;
    UNROLLED for (int m = 0; m < TILES; m++) {
        window_of[m] = row[m] * PITCH + part * PART + lane % 4 * 8;
        asm("" : "+r"(window_of[m]));
    }
    constexpr int OF_PART = PART / 32 * sizeof(Weights);
    of_weights += part * OF_PART / 4, of_x_proj += part * OF_PART / 2;
    asm("" : "+r"(onward_pitch), "+r"(of_weights), "+r"(of_x_proj));
    Floats<2> sums[TILES][COLUMNS][2] = {};
    fetch(0);
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
        wait_for_copies<0>();
        __syncthreads();
        if (k_tile + 1 < k_tiles) fetch(k_tile + 1);
        const Stage &stage = stages[k_tile % 2];
        const Element *us = &stage.u[0][0];
        const Weights *of_32 = stage.weights;
#pragma unroll 1
        for (int half = 0; any && half < PART / 32; half++, us += 32, of_32++) {
            unsigned a[TILES][8];
            UNROLLED for (int first = 0; first < TILES; first += TOGETHER) {
                Pack<Element, 8> window[TOGETHER][BACK + STRIP], found[TOGETHER][STRIP];
                UNROLLED for (int m = 0; m < TOGETHER; m++)
                    UNROLLED for (int k = 0; k < BACK + STRIP; k++)
                        window[m][k] = load<8>(us + (window_of[first + m] + k * onward_pitch));
                UNROLLED for (int i = 0; i < 4; i++) {
                    Floats<2> bias = load<2>(&of_32->of[0].biases[0][0] + (of_weights + i / 2 * 16 + i % 2 * 2));
                    Floats<TAPS> weight[2];
                    UNROLLED for (int c = 0; c < 2; c++)
                        weight[c] = load<TAPS>(&of_32->of[0].weights[0][0] + (of_weights + (i * 2 + c) * 4 * TAPS));
                    UNROLLED for (int m = 0; m < TOGETHER; m++) {
                        Floats<2> x[BACK + STRIP];
                        UNROLLED for (int k = 0; k < BACK + STRIP; k++) x[k] = unpack(Element{}, window[m][k].word[i]);
                        UNROLLED for (int s = 0; s < STRIP; s++) {
                            Floats<2> sum = bias;
                            UNROLLED for (int c = 0; c < 2; c++) {
                                UNROLLED for (int tap = 0; tap < TAPS; tap++)
                                    sum.at[c] = fmaf(weight[c].at[tap], x[s + tap].at[c], sum.at[c]);
                                sum.at[c] *= sigmoid(sum.at[c]);
                            }
                            found[m][s].word[i] = pack(Element{}, sum.at[0], sum.at[1]);
                        }
                    }
                }
                UNROLLED for (int m = 0; m < TOGETHER; m++)
                    UNROLLED for (int s = 0; s < STRIP; s++)
                        if (valid[first + m][s]) store(vs[first + m] + s * next, found[m][s]);
                UNROLLED for (int m = 0; m < TOGETHER; m++) vs[first + m] += 32;
                // selected, not copied, or the compiler would copy them again for every product
                UNROLLED for (int m = 0; m < TOGETHER; m++)
                    UNROLLED for (int i = 0; i < 8; i++)
                        a[first + m][i] = valid[first + m][i % 2] ? found[m][i % 2].word[i / 2] : 0;
#if __CUDA_ARCH__ < 900
                if (TOGETHER < TILES) {  // or NVRTC would read the next tile's window ahead, with no registers for it
                    asm("" : "+r"(window_of[1]), "+r"(of_weights) : "r"(a[0][0]), "r"(a[0][7]));
                }
#endif
            }
            UNROLLED for (int i = 0; i < COLUMNS; i++) {
                Pack<Element, 8> w = load<8>(&of_32->x_proj[0][0] + (of_x_proj + i * 8 * 32));
                UNROLLED for (int m = 0; m < TILES; m++) {
                    multiply_add(Element{}, sums[m][i], a[m][0], a[m][1], a[m][2], a[m][3], w.word[0], w.word[1]);
                    multiply_add(Element{}, sums[m][i], a[m][4], a[m][5], a[m][6], a[m][7], w.word[2], w.word[3]);
                }
            }
        }
        UNROLLED for (int m = 0; m < TILES; m++) vs[m] += K_TILE - PART;
    }
    if (LOGITS && !TAKES_BOTH) fetch_step(0);
    int thread = threadIdx.x;
    asm("" : "+r"(thread) : "f"(sums[0][0][0].at[0]));  // or registers would hold what follows from it all the time
    find_tokens(thread);
    Exchange *exchanges = reinterpret_cast<Exchange *>(&stages[TAKES_BOTH ? 0 : (k_tiles + 1) % 2]);
    exchanges += thread / 32 % (2 * GROUPS) * TILES;
    if constexpr (SPLIT > 1) {
        __syncthreads();
        // over all tiles, or an index that is not known to the compiler would put sums into memory
        UNROLLED for (int m = 0; m < TILES; m++)
            UNROLLED for (int i = 0; i < COLUMNS; i++)
                UNROLLED for (int s = 0; s < STRIP; s++)
                    if (m != part) exchanges[m].sums[i][s][lane] = sums[m][i][s];
        __syncthreads();
        UNROLLED for (int m = 0; m < TILES; m++)
            UNROLLED for (int i = 0; i < COLUMNS; i++)
                UNROLLED for (int s = 0; s < STRIP; s++)
                    if (m == part) sums[m][i][s] = sums[m][i][s] + exchanges[m].sums[i][s][lane];
    }

    // What the lane has of `projected` is what it needs of the step as a factor of the next product.
    unsigned step[TILES][STEPS][4] = {};
    projected += (g * B + b) * H * PROJECTIONS + lane % 4 * 2;
    UNROLLED for (int m = 0; m < TILES; m++)
        UNROLLED for (int i = 0; i < COLUMNS; i++)
            UNROLLED for (int s = 0; s < STRIP; s++) {
                Pack<Element, 2> rounded = from_floats<Element>(sums[m][i][s]);
                if (valid[m][s] && (SPLIT == 1 || m == part))
                    store(projected + (token[m] + s * onward) * PROJECTIONS + i * 8, rounded);
                if (i * 8 < RANK) step[m][i / 2][i % 2 * 2 + s] = rounded.word[0];
            }
    if (!LOGITS) return;
    if constexpr (SPLIT > 1) {
        __syncwarp();
        UNROLLED for (int m = 0; m < TILES; m++)
            UNROLLED for (int k = 0; k < STEPS; k++)
                UNROLLED for (int i = 0; i < 4; i++)
                    if (m == part) exchanges[m].step[k][i][lane] = step[m][k][i];
        __syncthreads();
        UNROLLED for (int m = 0; m < TILES; m++)
            UNROLLED for (int k = 0; k < STEPS; k++)
                UNROLLED for (int i = 0; i < 4; i++) step[m][k][i] = exchanges[m].step[k][i][lane];
        if (TAKES_BOTH) {
            __syncthreads();
            fetch_step(0);
        }
    }
    logits += (g * B + b) * H * D + part * PART + lane % 4 * 8;
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; k_tile++, logits += K_TILE) {
        wait_for_copies<0>();
        __syncthreads();
        if (k_tile + 1 < k_tiles) fetch_step(k_tile + 1);
        const StepStage &stage = reinterpret_cast<const StepStage &>(stages[(k_tiles + k_tile) % 2]);
        UNROLLED for (int start = 0; start < PART; start += 32) {
            Pack<Element, 8> found[TILES][STRIP];
            UNROLLED for (int i = 0; i < 4; i++) {
                const Element *weights = &stage.step_proj[g][part * PART + start + i * 8 + lane / 4][lane % 4 * 2];
                Floats<2> sums[TILES][2] = {};
                UNROLLED for (int k = 0; k < STEPS; k++) {
                    unsigned w[2] = {load<2>(weights + k * 16).word[0], 0};
                    if (k * 16 + 8 < RANK) w[1] = load<2>(weights + k * 16 + 8).word[0];
                    UNROLLED for (int m = 0; m < TILES; m++) {
                        const unsigned *a = step[m][k];
                        multiply_add(Element{}, sums[m], a[0], a[1], a[2], a[3], w[0], w[1]);
                    }
                }
                UNROLLED for (int m = 0; m < TILES; m++)
                    UNROLLED for (int s = 0; s < STRIP; s++)
                        found[m][s].word[i] = from_floats<Element>(sums[m][s]).word[0];
            }
            UNROLLED for (int m = 0; m < TILES; m++)
                UNROLLED for (int s = 0; s < STRIP; s++)
                    if (valid[m][s]) store(logits + (token[m] + s * onward) * D + start, found[m][s]);
        }
    }
}
