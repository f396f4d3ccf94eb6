// The convolutions of a block and the projections of what they find in one kernel, for 16-bit types and whole CHUNKs of
// channels. Compiled by NVRTC with these macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   TAPS         tokens that a convolution sees
//   PROJECTIONS  rows of x_proj, R + 2N
//   RANK         columns of step_proj, R
//   LOGITS       whether to compute them
//   TILES        tiles of 16 tokens that a warp takes
//   SPLIT        warps that share them, each with its part of the channels: 1, or as many as tiles
//   CHUNK        channels on their way to shared memory at once
//   LINES
//
// B batch    L tokens    D channels. Directions: 0 reads tokens from the first to the last, 1 from the last to the first.

#include "filter.cuh"
#include "silu.cuh"

typedef INPUT T;

// v_0(t) = silu(bias_0 + sum_i weight_0[i] u(t - BACK + i)), v_1(t) = silu(bias_1 + sum_i weight_1[i] u(t + BACK - i)),
// projected = v x_proj^T, whose first RANK columns are the step, and logits = step step_proj^T, on the tensor cores.
// They are of the H tokens that each direction reads first.
// A warp takes WARP_TOKENS in one direction, by STRIPs that do not cross sequences. Its lanes compute v where the cores
// want it: lane l has channels 8 (l % 4) .. + 7 of 32, which are columns of two products in another order, and the
// tokens of a strip as rows l / 4 and l / 4 + 8. A block's warps share u and the weights, one CHUNK of channels after
// another, of which the next is on its way to shared memory.
constexpr int STRIP = 2, GROUPS = 3;  // of tiles in each direction, of a block
constexpr int WARP_TOKENS = 16 * TILES, TOKENS = GROUPS * WARP_TOKENS, THREADS = 2 * GROUPS * SPLIT * 32;
constexpr int TOGETHER = PROJECTIONS <= 64 ? TILES : 1;  // tiles of which a warp computes v at once
constexpr int PART = CHUNK / SPLIT;  // channels of a chunk that a warp has
static_assert(PART % 32 == 0 && (SPLIT == 1 || SPLIT == 2 && TILES == 2));
constexpr int GAPS = 4 * BACK;  // zeros between the sequences of a block's tokens: BACK between two
constexpr int ROWS = BACK + TOKENS + GAPS + BACK;
constexpr int PITCH = CHUNK + 16;  // for which lanes with different strips hit different banks
constexpr int STEP_PITCH = RANK + (RANK % 16 == 0 ? 8 : 0);  // for which the rows of a product are in different banks
struct Weights {  // of 32 channels
    struct {
        float weights[32][TAPS], biases[8][4];
    } of[2];
    T x_proj[2 * PROJECTIONS][32];
};
struct Stage {
    T u[ROWS][PITCH];
    Weights weights[CHUNK / 32];
};
struct StepStage {
    T step_proj[2][CHUNK][STEP_PITCH];
};
static_assert(sizeof(StepStage) <= sizeof(Stage));

// where the weights of a channel are, so that the lanes that read them together read neighbours
DEVICE int place_of(int c) { return c % 8 * 4 + c / 8; }

// What the warps of a group exchange: sums of a tile that another of them finishes, and then the step of all tiles
constexpr int COLUMNS = PROJECTIONS / 8, STEPS = (RANK + 15) / 16;
union Exchange {
    Floats<2> sums[COLUMNS][2][32];
    unsigned step[STEPS][4][32];
};
static_assert(SPLIT == 1 || TILES * 2 * GROUPS * sizeof(Exchange) <= sizeof(Stage));

extern "C" __global__ void __launch_bounds__(THREADS, __CUDA_ARCH__ < 1200 && SPLIT == 1 ? 2 : 1)
project(const T *__restrict__ u, i64 u_stride, const float *__restrict__ weights, const float *__restrict__ biases,
        const T *__restrict__ x_proj, const T *__restrict__ step_proj, T *__restrict__ v, T *__restrict__ projected,
        T *__restrict__ logits, i64 B, i64 length, i64 read, i64 channels) {
    extern __shared__ __align__(16) char shared[];
    Stage *stages = reinterpret_cast<Stage *>(shared);
    int lane, L = length, H = read, D = channels, chunks = D / CHUNK;
    int *rows = reinterpret_cast<int *>(stages + 2);  // where those of Stage::u are in memory, or -1 for zeros
    int strips = (L + STRIP - 1) / STRIP;  // of a sequence
    i64 first_strip = blockIdx.x * i64(TOKENS / STRIP), b = first_strip / strips;
    int first = first_strip % strips * STRIP, there = min(B - b, i64(TOKENS));  // sequences
    u += b * L * u_stride;

    constexpr int PIECES = CHUNK / 8, AT_ONCE = THREADS / PIECES;  // rows that are copied at once
    static_assert(THREADS % PIECES == 0 && TAPS == 4);
    for (int i = threadIdx.x; i < ROWS; i += THREADS) {  // zeros between sequences are the same for every chunk
        int t = first - BACK + i, sequence = t / (L + BACK), position = t - sequence * (L + BACK);
        bool valid = t >= 0 && position < L && sequence < there;
        rows[i] = valid ? (sequence * L + position) * int(u_stride) : -1;
        for (int j = 0; j < (valid ? 0 : 2 * PIECES); j++)
            store(&stages[j / PIECES].u[i][j % PIECES * 8], Pack<T, 8>{});
    }
    __syncthreads();
    auto fetch = [&](int chunk) {
        Stage &stage = stages[chunk % 2];
        int thread = threadIdx.x;
        asm("" : "+r"(thread) : "r"(chunk));  // or registers would hold what follows from it for all chunks
        int piece = thread % PIECES * 8, copied = thread / PIECES, x_stride = AT_ONCE * D;
        T *to = &stage.u[copied][piece];
        const T *from = u + (chunk * CHUNK + piece);
#pragma unroll
        for (int i = 0; i < ROWS; i += AT_ONCE)
            if (int row = i + AT_ONCE <= ROWS || i + copied < ROWS ? rows[i + copied] : -1; row >= 0)
                copy_async<8>(to + i * PITCH, from + row, true);
        to = &stage.weights[piece / 32].x_proj[copied][piece % 32];
        from = x_proj + (copied * D + chunk * CHUNK + piece);
#pragma unroll
        for (int i = 0; i < 2 * PROJECTIONS; i += AT_ONCE) {
            if (i + AT_ONCE <= 2 * PROJECTIONS || i + copied < 2 * PROJECTIONS) copy_async<8>(to + i * 32, from, true);
            from += x_stride;
        }
#pragma unroll
        for (int start = 0; start < 2 * CHUNK; start += THREADS)
            if (int i = start + thread; i < 2 * CHUNK) {
                int g = i / CHUNK, c = i % CHUNK;
                copy_async<4>(stage.weights[c / 32].of[g].weights[place_of(c % 32)], weights + (g * D + chunk * CHUNK + c) * TAPS, true);
            }
        if (int i = thread * 4; i < 2 * CHUNK) {
            int g = i / CHUNK, c = i % CHUNK;
            copy_async<4>(stage.weights[c / 32].of[g].biases[place_of(c % 32) / 16 * 4 + c % 32 / 8], biases + g * D + chunk * CHUNK + c, true);
        }
        commit_copies();
    };
    // Channels 8 a + 2 i + e of 32 become column 2 a + e of product i: a lane has 8 neighbours of four products.
    auto fetch_step = [&](int chunk) {
        StepStage &stage = reinterpret_cast<StepStage &>(stages[(chunks + chunk) % 2]);
        constexpr int PIECES = RANK / 8;
        int thread = threadIdx.x;
        asm("" : "+r"(thread) : "r"(chunk));
#pragma unroll
        for (int start = 0; start < 2 * CHUNK * PIECES; start += THREADS)
            if (int i = start + thread; i < 2 * CHUNK * PIECES) {
                int d = i / PIECES % CHUNK, g = i / (PIECES * CHUNK), r = i % PIECES * 8;
                int place = d / 32 * 32 + d % 8 / 2 * 8 + d % 32 / 8 * 2 + d % 2;
                copy_async<8>(&stage.step_proj[g][place][r], step_proj + (g * D + chunk * CHUNK + d) * RANK + r, true);
            }
        commit_copies();
    };

    int g, part, onward;
    bool valid[TILES][STRIP], any = false;
    T *vs[TILES];
    int token[TILES];  // that the strip begins with, of those read, behind the first of sequence b
    int row[TILES];    // of a stage, where the strip's window begins
    auto find_tokens = [&](int thread) {
        int group = thread / 64 % GROUPS;
        lane = thread % 32;
        g = thread / 32 % 2, part = SPLIT == 1 ? 0 : thread / (64 * GROUPS), onward = g ? -1 : 1;
        int first_read = g ? L - H : 0;
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            int strip = first / STRIP + group * (WARP_TOKENS / STRIP) + m * 8 + lane / 4;
            int sequence = strip / strips, t = strip % strips * STRIP + g * (STRIP - 1);
            row[m] = sequence * (L + BACK) + t - first + BACK - onward * BACK;
            token[m] = sequence * H + t - first_read;
#pragma unroll
            for (int s = 0; s < STRIP; s++)
                valid[m][s] = sequence < there && unsigned(t + s * onward - first_read) < unsigned(H);
        }
    };
    find_tokens(threadIdx.x);
    int next = onward * D;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        vs[m] = v + ((g * B + b) * H + token[m]) * D + part * PART + lane % 4 * 8;
#pragma unroll
        for (int s = 0; s < STRIP; s++) any |= valid[m][s];
    }
    any = __any_sync(WARP, any);

    int window_of[TILES], onward_pitch = onward * PITCH;
    int of_weights = g * 32 * (TAPS + 1) + lane % 4 * 4, of_x_proj = g * PROJECTIONS * 32 + lane * 8;
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        window_of[m] = row[m] * PITCH + part * PART + lane % 4 * 8;
        asm("" : "+r"(window_of[m]));
    }
    constexpr int OF_PART = PART / 32 * sizeof(Weights);
    of_weights += part * OF_PART / 4, of_x_proj += part * OF_PART / 2;
    asm("" : "+r"(onward_pitch), "+r"(of_weights), "+r"(of_x_proj));
    Floats<2> sums[TILES][COLUMNS][2] = {};
    fetch(0);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        wait_for_copies<0>();
        __syncthreads();
        if (chunk + 1 < chunks) fetch(chunk + 1);
        const Stage &stage = stages[chunk % 2];
        const T *us = &stage.u[0][0];
        const Weights *of_32 = stage.weights;
#pragma unroll 1
        for (int half = 0; any && half < PART / 32; half++, us += 32, of_32++) {
            unsigned a[TILES][8];
#pragma unroll
            for (int first = 0; first < TILES; first += TOGETHER) {
                Pack<T, 8> window[TOGETHER][BACK + STRIP], found[TOGETHER][STRIP];
#pragma unroll
                for (int m = 0; m < TOGETHER; m++)
#pragma unroll
                    for (int k = 0; k < BACK + STRIP; k++)
                        window[m][k] = load<8>(us + (window_of[first + m] + k * onward_pitch));
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    Floats<2> bias = load<2>(&of_32->of[0].biases[0][0] + (of_weights + i / 2 * 16 + i % 2 * 2));
                    Floats<TAPS> weight[2];
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        weight[c] = load<TAPS>(&of_32->of[0].weights[0][0] + (of_weights + (i * 2 + c) * 4 * TAPS));
#pragma unroll
                    for (int m = 0; m < TOGETHER; m++) {
                        Floats<2> x[BACK + STRIP];
#pragma unroll
                        for (int k = 0; k < BACK + STRIP; k++) x[k] = unpack(T{}, window[m][k].word[i]);
#pragma unroll
                        for (int s = 0; s < STRIP; s++) {
                            Floats<2> sum = bias;
#pragma unroll
                            for (int c = 0; c < 2; c++) {
#pragma unroll
                                for (int tap = 0; tap < TAPS; tap++)
                                    sum.at[c] = fmaf(weight[c].at[tap], x[s + tap].at[c], sum.at[c]);
                                sum.at[c] *= sigmoid(sum.at[c]);
                            }
                            found[m][s].word[i] = pack(T{}, sum.at[0], sum.at[1]);
                        }
                    }
                }
#pragma unroll
                for (int m = 0; m < TOGETHER; m++)
#pragma unroll
                    for (int s = 0; s < STRIP; s++)
                        if (valid[first + m][s]) store(vs[first + m] + s * next, found[m][s]);
#pragma unroll
                for (int m = 0; m < TOGETHER; m++) vs[first + m] += 32;
                // selected, not copied, or the compiler would copy them again for every product
#pragma unroll
                for (int m = 0; m < TOGETHER; m++)
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        a[first + m][i] = valid[first + m][i % 2] ? found[m][i % 2].word[i / 2] : 0;
                if (TOGETHER < TILES) ;
            }
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                Pack<T, 8> w = load<8>(&of_32->x_proj[0][0] + (of_x_proj + i * 8 * 32));
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add(T{}, sums[m][i], a[m][0], a[m][1], a[m][2], a[m][3], w.word[0], w.word[1]);
                    multiply_add(T{}, sums[m][i], a[m][4], a[m][5], a[m][6], a[m][7], w.word[2], w.word[3]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < TILES; m++) vs[m] += CHUNK - PART;
    }
    if (LOGITS) fetch_step(0);
    int thread = threadIdx.x;
    asm("" : "+r"(thread) : "f"(sums[0][0][0].at[0]));  // or registers would hold what follows from it all the time
    find_tokens(thread);
    Exchange *exchanges = reinterpret_cast<Exchange *>(&stages[(chunks + 1) % 2]) + thread / 32 % (2 * GROUPS) * TILES;
    if constexpr (SPLIT > 1) {
        __syncthreads();
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
#pragma unroll
                for (int s = 0; s < STRIP; s++)
                    if (m != part) exchanges[m].sums[i][s][lane] = sums[m][i][s];
        __syncthreads();
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int i = 0; i < COLUMNS; i++)
#pragma unroll
                for (int s = 0; s < STRIP; s++)
                    if (m == part)
                        sums[m][i][s] = sums[m][i][s] + exchanges[m].sums[i][s][lane];
    }

    // What the lane has of `projected` is what it needs of the step as a factor of the next product.
    unsigned step[TILES][STEPS][4] = {};
    projected += (g * B + b) * H * PROJECTIONS + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int s = 0; s < STRIP; s++) {
                Pack<T, 2> rounded = from_floats<T>(sums[m][i][s]);
                if (valid[m][s] && (SPLIT == 1 || m == part)) store(projected + (token[m] + s * onward) * PROJECTIONS + i * 8, rounded);
                if (i * 8 < RANK) step[m][i / 2][i % 2 * 2 + s] = rounded.word[0];
            }
    if (!LOGITS) return;
    if constexpr (SPLIT > 1) {
        __syncwarp();
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int k = 0; k < STEPS; k++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (m == part) exchanges[m].step[k][i][lane] = step[m][k][i];
        __syncthreads();
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int k = 0; k < STEPS; k++)
#pragma unroll
                for (int i = 0; i < 4; i++) step[m][k][i] = exchanges[m].step[k][i][lane];
    }
    logits += (g * B + b) * H * D + part * PART + lane % 4 * 8;
    constexpr int AT_ONCE_32 = LINES ? 2 : 1;  // times 32 channels
    bool odd = lane & 4, valid_of[2][TILES][STRIP];
    int token_of[2][TILES];
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        int other = __shfl_xor_sync(WARP, token[m], 4);
        token_of[0][m] = odd ? other : token[m], token_of[1][m] = odd ? token[m] : other;
#pragma unroll
        for (int s = 0; s < STRIP; s++) {
            bool theirs = __shfl_xor_sync(WARP, int(valid[m][s]), 4);
            valid_of[0][m][s] = odd ? theirs : valid[m][s], valid_of[1][m][s] = odd ? valid[m][s] : theirs;
        }
    }
    if (LINES && odd) logits += 32;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        wait_for_copies<0>();
        __syncthreads();
        if (chunk + 1 < chunks) fetch_step(chunk + 1);
        const StepStage &stage = reinterpret_cast<const StepStage &>(stages[(chunks + chunk) % 2]);
#pragma unroll
        for (int start = 0; start < PART / 32; start += AT_ONCE_32) {
            Pack<T, 8> found[AT_ONCE_32][TILES][STRIP];
#pragma unroll
            for (int h = 0; h < AT_ONCE_32; h++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const T *weights =
                        &stage.step_proj[g][part * PART + (start + h) * 32 + i * 8 + lane / 4][lane % 4 * 2];
                    Floats<2> sums[TILES][2] = {};
#pragma unroll
                    for (int k = 0; k < STEPS; k++) {
                        unsigned w[2] = {load<2>(weights + k * 16).word[0], 0};
                        if (k * 16 + 8 < RANK) w[1] = load<2>(weights + k * 16 + 8).word[0];
#pragma unroll
                        for (int m = 0; m < TILES; m++) {
                            const unsigned *a = step[m][k];
                            multiply_add(T{}, sums[m], a[0], a[1], a[2], a[3], w[0], w[1]);
                        }
                    }
#pragma unroll
                    for (int m = 0; m < TILES; m++)
#pragma unroll
                        for (int s = 0; s < STRIP; s++) found[h][m][s].word[i] = from_floats<T>(sums[m][s]).word[0];
                }
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int s = 0; s < STRIP; s++) {
                    if constexpr (LINES) {
                        Pack<T, 8> even_row, odd_row;
#pragma unroll
                        for (int w = 0; w < 4; w++) {
                            unsigned low = found[0][m][s].word[w], high = found[1][m][s].word[w];
                            unsigned theirs = __shfl_xor_sync(WARP, odd ? low : high, 4);
                            even_row.word[w] = odd ? theirs : low, odd_row.word[w] = odd ? high : theirs;
                        }
                        if (valid_of[0][m][s])
                            store(logits + (token_of[0][m] + s * onward) * D + start * 32, even_row);
                        if (valid_of[1][m][s])
                            store(logits + (token_of[1][m] + s * onward) * D + start * 32, odd_row);
                    } else if (valid[m][s])
                        store(logits + (token[m] + s * onward) * D + start * 32, found[0][m][s]);
                }
        }
        logits += CHUNK;
    }
}
