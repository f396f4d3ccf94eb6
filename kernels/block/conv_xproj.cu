// The convolutions of a block and the projections of what they find in one kernel, for 16-bit types and whole CHUNKs of
// channels. Compiled by NVRTC with these macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   TAPS         tokens that a convolution sees
//   PROJECTIONS  rows of x_proj, R + 2N
//   RANK         columns of step_proj, R
//   LOGITS       whether to compute them
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
constexpr int CHUNK = 64, STRIP = 2, GROUPS = 3;  // warps of a block in each direction
constexpr int TILES = PROJECTIONS <= 64 ? 2 : 1;  // 16 tokens each, that share what a warp reads of the weights
constexpr int WARP_TOKENS = 16 * TILES, TOKENS = GROUPS * WARP_TOKENS, THREADS = 2 * GROUPS * 32;
constexpr int GAPS = 4 * BACK;  // zeros between the sequences of a block's tokens: BACK between two
constexpr int ROWS = BACK + TOKENS + GAPS + BACK;
constexpr int PITCH = CHUNK + 16;  // for which lanes with different strips hit different banks
constexpr int STEP_PITCH = RANK + (RANK % 16 == 0 ? 8 : 0);  // for which the rows of a product are in different banks
struct Stage {
    T u[ROWS][PITCH];
    float weights[2][CHUNK][TAPS], biases[2][CHUNK];
    T x_proj[CHUNK / 32][2 * PROJECTIONS][32];
};
struct StepStage {
    T step_proj[2][CHUNK][STEP_PITCH];
};
static_assert(sizeof(StepStage) <= sizeof(Stage));

// where the weights of a channel are, so that the lanes that read them together read neighbours
DEVICE int place_of(int c) { return c / 32 * 32 + c % 8 * 4 + c % 32 / 8; }

extern "C" __global__ void __launch_bounds__(THREADS, __CUDA_ARCH__ < 1200 ? 2 : 1)
project(const T *__restrict__ u, i64 u_stride, const float *__restrict__ weights, const float *__restrict__ biases,
        const T *__restrict__ x_proj, const T *__restrict__ step_proj, T *__restrict__ v, T *__restrict__ projected,
        T *__restrict__ logits, i64 B, i64 length, i64 read, i64 channels) {
    extern __shared__ __align__(16) char shared[];
    Stage *stages = reinterpret_cast<Stage *>(shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, L = length, H = read, D = channels, chunks = D / CHUNK;
    int *rows = reinterpret_cast<int *>(stages + 2);  // where those of Stage::u are in memory, or -1 for zeros
    int strips = (L + STRIP - 1) / STRIP;  // of a sequence
    i64 first_strip = blockIdx.x * i64(TOKENS / STRIP), b = first_strip / strips;
    int first = first_strip % strips * STRIP, there = min(B - b, i64(TOKENS));  // sequences
    u += b * L * u_stride;

    constexpr int PIECES = CHUNK / 8, AT_ONCE = THREADS / PIECES;  // rows that are copied at once
    static_assert(THREADS % PIECES == 0 && TAPS == 4);
    int piece = threadIdx.x % PIECES * 8, copied = threadIdx.x / PIECES;
    for (int i = threadIdx.x; i < ROWS; i += THREADS) {  // zeros between sequences are the same for every chunk
        int t = first - BACK + i, sequence = t / (L + BACK), position = t - sequence * (L + BACK);
        bool valid = t >= 0 && position < L && sequence < there;
        rows[i] = valid ? (sequence * L + position) * int(u_stride) : -1;
        for (int j = 0; j < (valid ? 0 : 2 * PIECES); j++)
            store(&stages[j / PIECES].u[i][j % PIECES * 8], Pack<T, 8>{});
    }
    __syncthreads();
    u += piece;
    x_proj += copied * D + piece;
    int u_to = copied * PITCH + piece, x_to = (piece / 32 * 2 * PROJECTIONS + copied) * 32 + piece % 32;
    int x_stride = AT_ONCE * D;
    asm("" : "+r"(u_to), "+r"(x_to), "+r"(x_stride));  // or the compiler would compute them for each copy
    auto fetch = [&](int chunk) {
        Stage &stage = stages[chunk % 2];
        T *to = &stage.u[0][0] + u_to;
#pragma unroll
        for (int i = 0; i < ROWS; i += AT_ONCE)
            if (int row = i + AT_ONCE <= ROWS || i + copied < ROWS ? rows[i + copied] : -1; row >= 0)
                copy_async<8>(to + i * PITCH, u + row, true);
        u += CHUNK;
        to = &stage.x_proj[0][0][0] + x_to;
        const T *from = x_proj;
#pragma unroll
        for (int i = 0; i < 2 * PROJECTIONS; i += AT_ONCE) {
            if (i + AT_ONCE <= 2 * PROJECTIONS || i + copied < 2 * PROJECTIONS) copy_async<8>(to + i * 32, from, true);
            from += x_stride;
        }
        x_proj += CHUNK;
        int thread = threadIdx.x;
        asm("" : "+r"(thread) : "r"(chunk));  // or registers would hold what follows from it for all chunks
#pragma unroll
        for (int start = 0; start < 2 * CHUNK; start += THREADS)
            if (int i = start + thread; i < 2 * CHUNK) {
                int g = i / CHUNK, c = i % CHUNK;
                copy_async<4>(stage.weights[g][place_of(c)], weights + (g * D + chunk * CHUNK + c) * TAPS, true);
            }
        if (int i = thread * 4; i < 2 * CHUNK) {
            int g = i / CHUNK, c = i % CHUNK;
            copy_async<4>(&stage.biases[g][c], biases + g * D + chunk * CHUNK + c, true);
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

    int g = warp % 2, onward = g ? -1 : 1, first_read = g ? L - H : 0;
    bool valid[TILES][STRIP], any = false;
    T *vs[TILES];
    i64 next = onward * D;
    int token[TILES];  // that the strip begins with, of those read, behind the first of sequence b
    int row[TILES];    // of a stage, where the strip's window begins
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        int strip = first / STRIP + warp / 2 * (WARP_TOKENS / STRIP) + m * 8 + lane / 4;
        int sequence = strip / strips, t = strip % strips * STRIP + g * (STRIP - 1);
        row[m] = sequence * (L + BACK) + t - first + BACK - onward * BACK;
        token[m] = sequence * H + t - first_read;
        vs[m] = v + ((g * B + b) * H + token[m]) * D + lane % 4 * 8;
#pragma unroll
        for (int s = 0; s < STRIP; s++) {
            valid[m][s] = sequence < there && unsigned(t + s * onward - first_read) < unsigned(H);
            any |= valid[m][s];
        }
    }
    any = __any_sync(WARP, any);

    constexpr int COLUMNS = PROJECTIONS / 8;
    Floats<2> sums[TILES][COLUMNS][2] = {};
    fetch(0);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        wait_for_copies<0>();
        __syncthreads();
        if (chunk + 1 < chunks)
            fetch(chunk + 1);
        else if (LOGITS)
            fetch_step(0);
        const Stage &stage = stages[chunk % 2];
#pragma unroll 1
        for (int half = 0; any && half < CHUNK / 32; half++) {
            Pack<T, 8> window[TILES][BACK + STRIP], found[TILES][STRIP];
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int k = 0; k < BACK + STRIP; k++)
                    window[m][k] = load<8>(&stage.u[row[m] + k * onward][half * 32 + lane % 4 * 8]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Floats<2> bias = load<2>(&stage.biases[g][half * 32 + lane % 4 * 8 + i * 2]);
                Floats<TAPS> weight[2];
#pragma unroll
                for (int c = 0; c < 2; c++)
                    weight[c] = load<TAPS>(stage.weights[g][half * 32 + (i * 2 + c) * 4 + lane % 4]);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
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
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int s = 0; s < STRIP; s++)
                    if (valid[m][s]) store(vs[m] + s * next, found[m][s]);
#pragma unroll
            for (int m = 0; m < TILES; m++) vs[m] += 32;
            unsigned a[TILES][8];  // selected, not copied, or the compiler would copy them again for every product
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int i = 0; i < 8; i++) a[m][i] = valid[m][i % 2] ? found[m][i % 2].word[i / 2] : 0;
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                Pack<T, 8> w = load<8>(&stage.x_proj[half][g * PROJECTIONS + i * 8 + lane / 4][lane % 4 * 8]);
#pragma unroll
                for (int m = 0; m < TILES; m++) {
                    multiply_add(T{}, sums[m][i], a[m][0], a[m][1], a[m][2], a[m][3], w.word[0], w.word[1]);
                    multiply_add(T{}, sums[m][i], a[m][4], a[m][5], a[m][6], a[m][7], w.word[2], w.word[3]);
                }
            }
        }
    }

    // What the lane has of `projected` is what it needs of the step as a factor of the next product.
    constexpr int STEPS = (RANK + 15) / 16;
    unsigned step[TILES][STEPS][4] = {};
    projected += (g * B + b) * H * PROJECTIONS + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < COLUMNS; i++)
#pragma unroll
            for (int s = 0; s < STRIP; s++) {
                Pack<T, 2> rounded = from_floats<T>(sums[m][i][s]);
                if (valid[m][s]) store(projected + (token[m] + s * onward) * PROJECTIONS + i * 8, rounded);
                if (i * 8 < RANK) step[m][i / 2][i % 2 * 2 + s] = rounded.word[0];
            }
    if (!LOGITS) return;
    logits += (g * B + b) * H * D + lane % 4 * 8;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        wait_for_copies<0>();
        __syncthreads();
        if (chunk + 1 < chunks) fetch_step(chunk + 1);
        const StepStage &stage = reinterpret_cast<const StepStage &>(stages[(chunks + chunk) % 2]);
#pragma unroll
        for (int half = 0; half < CHUNK / 32; half++) {
            Pack<T, 8> found[TILES][STRIP];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const T *weights = &stage.step_proj[g][half * 32 + i * 8 + lane / 4][lane % 4 * 2];
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
                    for (int s = 0; s < STRIP; s++) found[m][s].word[i] = from_floats<T>(sums[m][s]).word[0];
            }
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int s = 0; s < STRIP; s++)
                    if (valid[m][s])
                        store(logits + (token[m] + s * onward) * D + half * 32, found[m][s]);
        }
        logits += CHUNK;
    }
}
