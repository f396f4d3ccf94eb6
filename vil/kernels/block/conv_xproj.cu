// A block's convolutions and the projections of their outputs in one kernel, for 16-bit types.
// For the first H tokens in each direction's order, and with BACK = TAPS - 1, the kernel computes:
//
//   v(t) = silu(conv(t))              conv_0(t) = bias_0 + sum_i weight_0[i] u(t - BACK + i)
//                                     conv_1(t) = bias_1 + sum_i weight_1[i] u(t + BACK - i)
//   projected = v x_proj^T            (tokens, P): the step, k and q
//   step_logits = step step_proj^T    (tokens, D): the step is the first R columns of `projected`, rounded
//
// Barriers follow rules 1 and 2 of cuda/pipeline.cuh.
// docs/kernels/block.md describes the warps and buffers of a CTA and the order of the columns.
//
// conv_xproj.py declares the parameters of the kernel. Macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   TAPS         length of the convolution's filter, 4, whose last tap reads the current token
//   PROJECTIONS  rows of x_proj, P = R + 2N, a multiple of 8, at most 64 so that a warp's sums fit in registers
//   RANK         columns of step_proj, R, a multiple of 8
//   LOGITS       whether to compute step_logits
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// B batch    L tokens    D channels    H tokens that a direction reads
//
// A CTA processes TOKENS tokens, both directions and all channels, in steps of K_TILE channels. K_TILE divides D.
// Warp w processes direction w % 2 of group w / 2, which has WARP_TOKENS = 32 tokens, in two tiles of 16 tokens.
// A tile has 8 strips of two adjacent tokens of the same sequence.
// Lane (r = lane / 4, p = lane % 4) has strip r of each tile and channels 8p .. 8p + 7 of each 32 channels.
// L is rounded up to whole strips, so that no strip crosses sequences.
// In shared memory, BACK rows of zeros separate two sequences.

#include "filter.cuh"
#include "silu.cuh"

constexpr int STRIP = 2, TILES = 2, GROUPS = 3;  // tokens per strip, tiles per warp, groups per direction
constexpr int WARP_TOKENS = 16 * TILES, TOKENS = GROUPS * WARP_TOKENS, THREADS = 2 * GROUPS * 32;
constexpr int WINDOW = BACK + STRIP;  // number of tokens that the convolutions of a strip read
constexpr int K_TILE = 64;  // channels per stage in shared memory
// Number of tensor-core products for all columns of `projected` (8 per product), and for all ranks (16 per product).
constexpr int COLUMNS = PROJECTIONS / 8, STEPS = (RANK + 15) / 16;
static_assert(TAPS == 4);
// Rows of zeros between the sequences of a CTA's tokens, which belong to at most five sequences.
constexpr int GAPS = 4 * BACK;
constexpr int ROWS = BACK + TOKENS + GAPS + BACK;
constexpr int PITCH = K_TILE + 16;  // chosen so that lanes with different strips access different banks
// STEP_PITCH is chosen so that the rows of a product are in different banks.
constexpr int STEP_PITCH = RANK + (RANK % 16 == 0 ? 8 : 0);

struct Weights {  // filters, biases and x_proj of 32 channels
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
struct CtaMemory {
    Stage stages[2];
    // Offset in global memory of each row of Stage::u, counted from sequence b, or -1 for a row of zeros.
    int rows[ROWS];
};
static_assert(sizeof(StepStage) <= sizeof(Stage) && sizeof(CtaMemory) == CTA_BYTES);

// Returns the index in shared memory of the filter for channel c of 32 channels.
// A lane reads the filters of channels 8p .. 8p + 7 one after another.
// Lanes therefore read channels c, c + 8, c + 16 and c + 24 at the same time, which are adjacent in shared memory.
DEVICE int filter_place(int c) { return c % 8 * 4 + c / 8; }
// Returns the row of step_proj for channel c = 8p + 2w + e of 32 channels, which is row 8w + 2p + e.
// A lane's sums of the four products w = 0 .. 3 therefore belong to 8 adjacent channels.
DEVICE int step_proj_row(int c) { return c % 8 / 2 * 8 + c / 8 * 2 + c % 2; }

// Tokens of a CTA: TOKENS tokens from token `first` of sequence b on, counted in whole strips.
struct Span {
    int L, H, D, strips, first, sequences;  // strips: strips per sequence; sequences: number of sequences from b on
    i64 B, b;
    INLINE Span(i64 B, i64 length, i64 read, i64 channels)
        : L(length), H(read), D(channels), strips((L + STRIP - 1) / STRIP), B(B) {
        i64 first_strip = blockIdx.x * i64(TOKENS / STRIP);
        b = first_strip / strips;
        first = first_strip % strips * STRIP, sequences = min(B - b, i64(TOKENS));
    }
};

// Tokens of a lane: one strip of each tile, whose two tokens are rows r and r + 8 of a product.
struct LaneTokens {
    int lane, g, onward;
    bool valid[TILES][STRIP];
    int token[TILES];  // first token of the strip among the tokens that are read, counted from sequence b
    int row[TILES];  // row of the stage where the strip's window starts
    INLINE LaneTokens(const Span &span, int thread) {
        int group = thread / 64 % GROUPS;  // the modulo is redundant, but the kernel was timed with it
        lane = thread % 32;
        g = thread / 32 % 2, onward = g ? -1 : 1;
        int first_read = g ? span.L - span.H : 0;
        UNROLLED for (int m = 0; m < TILES; m++) {
            int strip = span.first / STRIP + group * (WARP_TOKENS / STRIP) + m * 8 + lane / 4;
            int sequence = strip / span.strips, t = strip % span.strips * STRIP + g * (STRIP - 1);
            row[m] = sequence * (span.L + BACK) + t - span.first + BACK - onward * BACK;
            token[m] = sequence * span.H + t - first_read;
            UNROLLED for (int s = 0; s < STRIP; s++)
                valid[m][s] = sequence < span.sequences && unsigned(t + s * onward - first_read) < unsigned(span.H);
        }
    }
};

struct Sums {  // sums of products of 8 columns each, for the two rows of a strip
    Floats<2> of[TILES][COLUMNS][2];
};
struct Step {  // the step of a lane's tokens, as operand a of products over 16 ranks
    unsigned of[TILES][STEPS][4];
};

// Number of 16-byte pieces of a row, and number of rows that all threads copy together.
constexpr int PIECES = K_TILE / 8, COPIED_ROWS = THREADS / PIECES;
static_assert(THREADS % PIECES == 0);

// Computes the offsets of u's rows, and clears the rows between sequences, which stay zero for all channels.
DEVICE void find_rows(CtaMemory &memory, const Span &span, i64 u_stride) {
    int L = span.L;
    for (int i = threadIdx.x; i < ROWS; i += THREADS) {
        int t = span.first - BACK + i, sequence = t / (L + BACK), position = t - sequence * (L + BACK);
        bool valid = t >= 0 && position < L && sequence < span.sequences;
        memory.rows[i] = valid ? (sequence * L + position) * int(u_stride) : -1;
        for (int j = 0; j < (valid ? 0 : 2 * PIECES); j++)
            store(&memory.stages[j / PIECES].u[i][j % PIECES * 8], Pack<Element, 8>{});
    }
}

// All threads copy K_TILE channels of u, x_proj and the filters.
DEVICE void fetch(CtaMemory &memory, int k_tile, const Element *u, const float *weights, const float *biases,
                  const Element *x_proj, int D) {
    Stage &stage = memory.stages[k_tile % 2];
    int thread = threadIdx.x;
    // The compiler must not keep values that are derived from `thread` in registers for every k_tile.
    asm("" : "+r"(thread) : "r"(k_tile));
    int piece = thread % PIECES * 8, copied = thread / PIECES, x_stride = COPIED_ROWS * D;
    Element *to = &stage.u[copied][piece];
    const Element *from = u + (k_tile * K_TILE + piece);
    UNROLLED for (int i = 0; i < ROWS; i += COPIED_ROWS)
        if (int row = i + COPIED_ROWS <= ROWS || i + copied < ROWS ? memory.rows[i + copied] : -1; row >= 0)
            copy_async<8>(to + i * PITCH, from + row, true);
    to = &stage.weights[piece / 32].x_proj[copied][piece % 32];
    from = x_proj + (copied * D + k_tile * K_TILE + piece);
    UNROLLED for (int i = 0; i < 2 * PROJECTIONS; i += COPIED_ROWS) {
        if (i + COPIED_ROWS <= 2 * PROJECTIONS || i + copied < 2 * PROJECTIONS) copy_async<8>(to + i * 32, from, true);
        from += x_stride;
    }
    UNROLLED for (int start = 0; start < 2 * K_TILE; start += THREADS)
        if (int i = start + thread; i < 2 * K_TILE) {
            int g = i / K_TILE, c = i % K_TILE;
            copy_async<4>(stage.weights[c / 32].of[g].weights[filter_place(c % 32)],
                          weights + (g * D + k_tile * K_TILE + c) * TAPS, true);
        }
    if (int i = thread * 4; i < 2 * K_TILE) {
        int g = i / K_TILE, c = i % K_TILE;
        copy_async<4>(stage.weights[c / 32].of[g].biases[filter_place(c % 32) / 16 * 4 + c % 32 / 8],
                      biases + g * D + k_tile * K_TILE + c, true);
    }
    commit_copies();
}

// All threads copy K_TILE rows of step_proj for both directions.
DEVICE void fetch_step_proj(StepStage &stage, int k_tile, const Element *step_proj, int D) {
    constexpr int PIECES = RANK / 8;
    int thread = threadIdx.x;
    asm("" : "+r"(thread) : "r"(k_tile));
    UNROLLED for (int start = 0; start < 2 * K_TILE * PIECES; start += THREADS)
        if (int i = start + thread; i < 2 * K_TILE * PIECES) {
            int d = i / PIECES % K_TILE, g = i / (PIECES * K_TILE), r = i % PIECES * 8;
            int position = d / 32 * 32 + step_proj_row(d % 32);
            const Element *from = step_proj + (g * D + k_tile * K_TILE + d) * RANK + r;
            copy_async<8>(&stage.step_proj[g][position][r], from, true);
        }
    commit_copies();
}

// Computes v for a strip of each tile and for the lane's channels among 32 channels, from windows of u.
DEVICE void convolve(Pack<Element, 8> (&v)[TILES][STRIP], const Pack<Element, 8> (&window)[TILES][WINDOW],
                     const Weights &of_32, int of_weights) {
    UNROLLED for (int i = 0; i < 4; i++) {
        Floats<2> bias = load<2>(&of_32.of[0].biases[0][0] + (of_weights + i / 2 * 16 + i % 2 * 2));
        Floats<TAPS> weight[2];
        UNROLLED for (int c = 0; c < 2; c++)
            weight[c] = load<TAPS>(&of_32.of[0].weights[0][0] + (of_weights + (i * 2 + c) * 4 * TAPS));
        UNROLLED for (int m = 0; m < TILES; m++) {
            Floats<2> x[WINDOW];
            UNROLLED for (int k = 0; k < WINDOW; k++) x[k] = unpack(Element{}, window[m][k].word[i]);
            UNROLLED for (int s = 0; s < STRIP; s++) {
                Floats<2> sum = bias;
                UNROLLED for (int c = 0; c < 2; c++) {
                    UNROLLED for (int tap = 0; tap < TAPS; tap++)
                        sum.at[c] = fmaf(weight[c].at[tap], x[s + tap].at[c], sum.at[c]);
                    sum.at[c] *= sigmoid(sum.at[c]);
                }
                v[m][s].word[i] = pack(Element{}, sum.at[0], sum.at[1]);
            }
        }
    }
}

// Computes sums += v x_proj^T over 32 channels.
DEVICE void project(Sums &sums, const unsigned (&a)[TILES][8], const Element *x_proj) {
    UNROLLED for (int i = 0; i < COLUMNS; i++) {
        Pack<Element, 8> w = load<8>(x_proj + i * 8 * 32);
        UNROLLED for (int m = 0; m < TILES; m++) {
            multiply_add(Element{}, sums.of[m][i], a[m][0], a[m][1], a[m][2], a[m][3], w.word[0], w.word[1]);
            multiply_add(Element{}, sums.of[m][i], a[m][4], a[m][5], a[m][6], a[m][7], w.word[2], w.word[3]);
        }
    }
}

// Writes `projected`, and returns the step in registers, because a lane's sums are an operand of the next product.
DEVICE Step store_projected(const Sums &sums, Element *projected, const LaneTokens &at) {
    Step step = {};
    UNROLLED for (int m = 0; m < TILES; m++) {
        Element *to = projected + at.token[m] * PROJECTIONS;
        UNROLLED for (int s = 0; s < STRIP; s++, to += at.onward * PROJECTIONS) {
            UNROLLED for (int i = 0; i < COLUMNS; i++) {
                Pack<Element, 2> rounded = from_floats<Element>(sums.of[m][i][s]);
                if (at.valid[m][s]) store(to + i * 8, rounded);
                if (i * 8 < RANK) step.of[m][i / 2][i % 2 * 2 + s] = rounded.word[0];
            }
        }
    }
    return step;
}

// Writes step_logits = step step_proj^T for the channels of a k_tile, with four products for each 32 channels.
DEVICE void store_step_logits(Element *step_logits, const Step &step, const StepStage &stage, int D,
                              const LaneTokens &at) {
    UNROLLED for (int start = 0; start < K_TILE; start += 32) {
        Pack<Element, 8> found[TILES][STRIP];
        UNROLLED for (int i = 0; i < 4; i++) {
            const Element *weights = &stage.step_proj[at.g][start + i * 8 + at.lane / 4][at.lane % 4 * 2];
            Floats<2> sums[TILES][2] = {};
            UNROLLED for (int k = 0; k < STEPS; k++) {
                unsigned w[2] = {load<2>(weights + k * 16).word[0], 0};
                if (k * 16 + 8 < RANK) w[1] = load<2>(weights + k * 16 + 8).word[0];
                UNROLLED for (int m = 0; m < TILES; m++) {
                    const unsigned *a = step.of[m][k];
                    multiply_add(Element{}, sums[m], a[0], a[1], a[2], a[3], w[0], w[1]);
                }
            }
            UNROLLED for (int m = 0; m < TILES; m++)
                UNROLLED for (int s = 0; s < STRIP; s++)
                    found[m][s].word[i] = from_floats<Element>(sums[m][s]).word[0];
        }
        UNROLLED for (int m = 0; m < TILES; m++)
            UNROLLED for (int s = 0; s < STRIP; s++)
                if (at.valid[m][s]) store(step_logits + (at.token[m] + s * at.onward) * D + start, found[m][s]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, __CUDA_ARCH__ < 1200 ? 2 : 1)
conv_xproj(PARAMETERS_conv_xproj) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &memory = *reinterpret_cast<CtaMemory *>(shared);
    Stage *stages = memory.stages;
    const Span span(B, length, read, channels);
    int H = span.H, D = span.D, k_tiles = D / K_TILE;
    i64 b = span.b;
    u += b * span.L * u_stride;
    find_rows(memory, span, u_stride);
    __syncthreads();

    const LaneTokens at(span, threadIdx.x);
    Element *vs[TILES];
    bool any = false;
    int next = at.onward * D;
    UNROLLED for (int m = 0; m < TILES; m++) {
        vs[m] = v + ((at.g * B + b) * H + at.token[m]) * D + at.lane % 4 * 8;
        UNROLLED for (int s = 0; s < STRIP; s++) any |= at.valid[m][s];
    }
    any = __any_sync(WARP, any);

    int window_of[TILES], onward_pitch = at.onward * PITCH;
    int of_weights = at.g * 32 * (TAPS + 1) + at.lane % 4 * 4, of_x_proj = at.g * PROJECTIONS * 32 + at.lane * 8;
    UNROLLED for (int m = 0; m < TILES; m++) {
        window_of[m] = at.row[m] * PITCH + at.lane % 4 * 8;
        asm("" : "+r"(window_of[m]));
    }
    asm("" : "+r"(onward_pitch), "+r"(of_weights), "+r"(of_x_proj));
    Sums sums = {};
    fetch(memory, 0, u, weights, biases, x_proj, D);
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
        wait_for_copies<0>();
        __syncthreads();
        if (k_tile + 1 < k_tiles) fetch(memory, k_tile + 1, u, weights, biases, x_proj, D);
        const Stage &stage = stages[k_tile % 2];
        const Element *us = &stage.u[0][0];
        const Weights *of_32 = stage.weights;
#pragma unroll 1
        for (int half = 0; any && half < K_TILE / 32; half++, us += 32, of_32++) {
            Pack<Element, 8> window[TILES][WINDOW], found[TILES][STRIP];
            UNROLLED for (int m = 0; m < TILES; m++)
                UNROLLED for (int k = 0; k < WINDOW; k++)
                    window[m][k] = load<8>(us + (window_of[m] + k * onward_pitch));
            convolve(found, window, *of_32, of_weights);
            UNROLLED for (int m = 0; m < TILES; m++)
                UNROLLED for (int s = 0; s < STRIP; s++)
                    if (at.valid[m][s]) store(vs[m] + s * next, found[m][s]);
            UNROLLED for (int m = 0; m < TILES; m++) vs[m] += 32;
            unsigned a[TILES][8];
            // Values are selected instead of copied, because the compiler would repeat a copy for every product.
            UNROLLED for (int m = 0; m < TILES; m++)
                UNROLLED for (int i = 0; i < 8; i++)
                    a[m][i] = at.valid[m][i % 2] ? found[m][i % 2].word[i / 2] : 0;
            project(sums, a, &of_32->x_proj[0][0] + of_x_proj);
        }
    }

    auto step_stage = [&](int k_tile) -> StepStage & {
        return reinterpret_cast<StepStage &>(stages[(k_tiles + k_tile) % 2]);
    };
    if (LOGITS) fetch_step_proj(step_stage(0), 0, step_proj, D);
    int thread = threadIdx.x;
    // The compiler must not keep values that are derived from `thread` in registers during the loop above.
    asm("" : "+r"(thread) : "f"(sums.of[0][0][0].at[0]));
    const LaneTokens own(span, thread);
    projected += (own.g * B + b) * H * PROJECTIONS + own.lane % 4 * 2;
    const Step step = store_projected(sums, projected, own);
    if (!LOGITS) return;
    step_logits += (own.g * B + b) * H * D + own.lane % 4 * 8;
#pragma unroll 1
    for (int k_tile = 0; k_tile < k_tiles; k_tile++, step_logits += K_TILE) {
        wait_for_copies<0>();
        __syncthreads();
        if (k_tile + 1 < k_tiles) fetch_step_proj(step_stage(k_tile + 1), k_tile + 1, step_proj, D);
        store_step_logits(step_logits, step, step_stage(k_tile), D, own);
    }
}
