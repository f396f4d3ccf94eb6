// The convolutions of a block and the projections of what they find in one kernel, for 16-bit types and whole CHUNKs of
// channels. Compiled by NVRTC with these macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   TAPS         tokens that a convolution sees
//   PROJECTIONS  rows of x_proj, R + 2N
//   RANK         columns of step_proj, R
//
// L tokens of a sequence    D channels. Directions: 0 reads tokens from the first to the last, 1 from the last to the first.

typedef INPUT T;

// v_0(t) = silu(bias_0 + sum_i weight_0[i] u(t - BACK + i)), v_1(t) = silu(bias_1 + sum_i weight_1[i] u(t + BACK - i)),
// projected = v x_proj^T, whose first RANK columns are the step, and logits = step step_proj^T, on the tensor cores.
// A block takes TOKENS of the batch, whatever their sequences, and one CHUNK of channels after another, of which the next
// is on its way to shared memory. A warp computes v of some tokens in one direction and then the other, in which it reads
// them, and then the products of 16 tokens in one direction.
constexpr int TOKENS = 64, CHUNK = 64, THREADS = 256;
constexpr int STEP_PITCH = RANK + (RANK % 16 == 0 ? 8 : 0);  // for which the rows of a product are in different banks
struct Stage {
    T u[BACK + TOKENS + BACK][CHUNK];
    float weights[2][CHUNK][TAPS], biases[2][CHUNK];
    T x_proj[CHUNK / 32][2 * PROJECTIONS][32];
};
struct StepStage {
    T step_proj[2][CHUNK][STEP_PITCH];
};
// v in rows of 32 channels; a padding puts the two halves of a CHUNK into different banks
struct Values {
    T at[2][CHUNK / 32][TOKENS * 32 + 32];
};

extern "C" __global__ void __launch_bounds__(THREADS, PROJECTIONS <= 64 ? 3 : 2)
project(const T *__restrict__ u, i64 u_stride, const float *__restrict__ weights, const float *__restrict__ biases,
        const T *__restrict__ x_proj, const T *__restrict__ step_proj, T *__restrict__ v, T *__restrict__ projected,
        T *__restrict__ logits, i64 all, i64 length, i64 channels) {
    extern __shared__ __align__(16) char shared[];
    Stage *stages = reinterpret_cast<Stage *>(shared);
    Values &values = *reinterpret_cast<Values *>(stages + 2);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, L = length, D = channels, chunks = D / CHUNK;
    i64 tile = blockIdx.x * i64(TOKENS);
    int there = min(all - tile, i64(TOKENS));  // tokens of the tile
    u += tile * u_stride, v += tile * D, projected += tile * PROJECTIONS, logits += tile * D;

    constexpr int PIECES = CHUNK / 8, ROWS = THREADS / PIECES;  // that are copied at once
    int piece = threadIdx.x % PIECES * 8, copied = threadIdx.x / PIECES;
    auto fetch = [&](int chunk) {
        Stage &stage = stages[chunk % 2];
        int d = chunk * CHUNK;
#pragma unroll
        for (int i = 0; i < BACK + TOKENS + BACK; i += ROWS) {
            int t = i + copied - BACK;
            bool valid = tile + t >= 0 && tile + t < all;
            if (i + copied < BACK + TOKENS + BACK)
                copy_async<8>(&stage.u[i + copied][piece], u + (valid ? i64(t) * int(u_stride) + d + piece : 0), valid);
        }
#pragma unroll
        for (int i = 0; i < 2 * PROJECTIONS; i += ROWS)
            if (int p = i + copied; p < 2 * PROJECTIONS)
                copy_async<8>(&stage.x_proj[piece / 32][p][piece % 32], x_proj + p * D + d + piece, true);
        for (int i = threadIdx.x * 4; i < 2 * CHUNK * TAPS; i += THREADS * 4) {
            int g = i / (CHUNK * TAPS);
            copy_async<4>(&stage.weights[0][0][0] + i, weights + (g * D + d) * TAPS + i % (CHUNK * TAPS), true);
        }
        if (int i = threadIdx.x * 4; i < 2 * CHUNK)
            copy_async<4>(&stage.biases[0][0] + i, biases + i / CHUNK * D + d + i % CHUNK, true);
        commit_copies();
    };

    constexpr int RUN = TOKENS / (THREADS / 32);  // tokens of which a warp computes v
    constexpr int COLUMNS = PROJECTIONS / 8;
    int g = warp / 4, row = warp % 4 * 16 + lane / 4;  // of the products: direction, tokens `row` and `row` + 8
    Floats<2> sums[COLUMNS][2] = {};
    // in their sequences, of the first token that the warp reads in each direction
    int positions[2] = {int(unsigned(tile + warp * RUN) % L), L - 1 - int(unsigned(tile + warp * RUN + RUN - 1) % L)};
    fetch(0);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        const Stage &stage = stages[chunk % 2];
        wait_for_copies<0>();
        __syncthreads();
        if (chunk + 1 < chunks) fetch(chunk + 1);
#pragma unroll 1
        for (int direction = 0; direction < 2; direction++) {
            int first = warp * RUN + (direction ? RUN - 1 : 0), onward = direction ? -1 : 1;
            int position = positions[direction];
            Filter<2> filter(&stage.weights[direction][0][0], stage.biases[direction], 2 * lane);
            const T *us = &stage.u[BACK + first][2 * lane];
            T *to = &values.at[direction][lane / 16][first * 32 + lane % 16 * 2];
            T *vs = v + (direction * all + first) * D + chunk * CHUNK + 2 * lane;
            Floats<2> window[TAPS];
#pragma unroll
            for (int i = 0; i < BACK; i++)
                window[i] = position + i >= BACK ? to_floats(load<2>(us - (BACK - i) * onward * CHUNK)) : Floats<2>{};
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                if (position == 0)  // a sequence begins
#pragma unroll
                    for (int j = 0; j < BACK; j++) window[j] = {};
                window[BACK] = to_floats(load<2>(us));
                Floats<2> sum = filter.bias;
#pragma unroll
                for (int c = 0; c < 2; c++) {
#pragma unroll
                    for (int tap = 0; tap < TAPS; tap++)
                        sum.at[c] = fmaf(filter.weight[tap][c], window[tap].at[c], sum.at[c]);
                    sum.at[c] *= sigmoid(sum.at[c]);
                }
                Pack<T, 2> rounded = from_floats<T>(sum);
                store(to, rounded);
                if (first + i * onward < there) store(vs, rounded);
                us += onward * CHUNK, to += onward * 32, vs += onward * D;
                position = position + 1 == L ? 0 : position + 1;
#pragma unroll
                for (int j = 0; j < BACK; j++) window[j] = window[j + 1];
            }
        }
        __syncthreads();
#pragma unroll
        for (int half = 0; half < CHUNK / 32; half++) {
            Pack<T, 8> low = load<8>(&values.at[g][half][row * 32 + lane % 4 * 8]);
            Pack<T, 8> high = load<8>(&values.at[g][half][(row + 8) * 32 + lane % 4 * 8]);
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) {
                Pack<T, 8> w = load<8>(&stage.x_proj[half][g * PROJECTIONS + i * 8 + lane / 4][lane % 4 * 8]);
                multiply_add(T{}, sums[i], low.word[0], high.word[0], low.word[1], high.word[1], w.word[0], w.word[1]);
                multiply_add(T{}, sums[i], low.word[2], high.word[2], low.word[3], high.word[3], w.word[2], w.word[3]);
            }
        }
    }

    // What the lane has of `projected` is what it needs of the step as a factor of the next product.
    constexpr int STEPS = (RANK + 15) / 16;
    unsigned step[STEPS][4] = {};
    bool low_there = row < there, high_there = row + 8 < there;
    T *low = projected + (g * all + row) * PROJECTIONS + lane % 4 * 2, *high = low + 8 * PROJECTIONS;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        Pack<T, 2> rounded[2] = {from_floats<T>(sums[i][0]), from_floats<T>(sums[i][1])};
        if (low_there) store(low + i * 8, rounded[0]);
        if (high_there) store(high + i * 8, rounded[1]);
        if (i * 8 < RANK) step[i / 2][i % 2 * 2] = rounded[0].word[0], step[i / 2][i % 2 * 2 + 1] = rounded[1].word[0];
    }

    StepStage *step_stages = reinterpret_cast<StepStage *>(shared);
    // Channels 8 a + 2 i + e of 32 become column 2 a + e of product i, so that a lane has 8 neighbours of four products.
    auto fetch_step = [&](int chunk) {
        constexpr int PIECES = RANK / 8;
        for (int i = threadIdx.x; i < 2 * CHUNK * PIECES; i += THREADS) {
            int d = i / PIECES % CHUNK, g = i / (PIECES * CHUNK), r = i % PIECES * 8;
            int place = d / 32 * 32 + d % 8 / 2 * 8 + d % 32 / 8 * 2 + d % 2;
            copy_async<8>(&step_stages[chunk % 2].step_proj[g][place][r], step_proj + (g * D + chunk * CHUNK + d) * RANK + r,
                          true);
        }
        commit_copies();
    };
    __syncthreads();
    fetch_step(0);
    T *logits_low = logits + (g * all + row) * D + lane % 4 * 8, *logits_high = logits_low + 8 * D;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        const StepStage &stage = step_stages[chunk % 2];
        wait_for_copies<0>();
        __syncthreads();
        if (chunk + 1 < chunks) fetch_step(chunk + 1);
#pragma unroll
        for (int first = 0; first < CHUNK; first += 32) {
            Pack<T, 8> found[2];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                Floats<2> sums[2] = {};
                const T *weights = &stage.step_proj[g][first + i * 8 + lane / 4][lane % 4 * 2];
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    unsigned w[2] = {load<2>(weights + k * 16).word[0], 0};
                    if (k * 16 + 8 < RANK) w[1] = load<2>(weights + k * 16 + 8).word[0];
                    multiply_add(T{}, sums, step[k][0], step[k][1], step[k][2], step[k][3], w[0], w[1]);
                }
                found[0].word[i] = from_floats<T>(sums[0]).word[0], found[1].word[i] = from_floats<T>(sums[1]).word[0];
            }
            if (low_there) store(logits_low + chunk * CHUNK + first, found[0]);
            if (high_there) store(logits_high + chunk * CHUNK + first, found[1]);
        }
    }
}
