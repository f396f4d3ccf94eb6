// x_proj, step_proj and the scan of both directions of a pooled block in one kernel, applied to the means of lines.
// The kernel is for 16-bit types and small batches, where latency dominates:
//
//   [step_g k_g q_g] = mean_g x_proj_g^T      step_logits_g = step_g step_proj_g^T      y = y_0 + y_1
//
// y_g is the output of the scan without its skip connection. Direction 1 scans from the last line to the first.
//
// scan_lines.py declares the parameters of the kernel. Macros:
//   INPUT      element type of the tensors: bf16 or fp16
//   RECURRENCE, STATES, LANE_STATES (4), LANE_CHANNELS (1): scan/recurrences.cuh
//   WIDTH      number of channels D
//   RANK       columns of the step, R
//   TILES      number of tiles of 16 lines for all S lines
//   CTA_BYTES  dynamic shared memory, computed by the host
//
// B batch    S pooled tokens, here called lines    D channels    P = R + 2N
//
// A CTA processes all lines of an image and 32 channels. Every CTA of the image computes [step k q].
// For [step k q], each warp computes one direction and a quarter of the channels.
// Lane l (r = l / 4, p = l % 4) loads channels 8p .. 8p + 7 of each 32 channels.
// The lane loads these channels of lines r and r + 8, and of row r of x_proj.
// Columns are permuted as in gate_outproj.cu.
// After the projections, a lane computes the step sizes of one channel, and scans four states of one channel.

#include "../cuda/types.cuh"
#include "../scan/recurrences.cuh"

constexpr int D = WIDTH, P = RANK + 2 * N, LINES = 16 * TILES;
// PITCH is chosen to avoid bank conflicts.
constexpr int CHANNELS = 32, WARPS = 8, QUARTER = D / 4, PITCH = P | 8;

struct CtaMemory {
    float parts[WARPS][16][PITCH];  // partial sums of [step k q] over a quarter of the channels
    float projected[2][LINES][P];  // step, key and query
    float x[2][LINES][CHANNELS];  // means; overwritten by y
    float step_sizes[2][LINES][CHANNELS];
};
static_assert(sizeof(CtaMemory) == CTA_BYTES && D % 128 == 0 && RANK % 8 == 0 && N == 16 && NL == 4 && DL == 1);

// Computes means x_proj^T (16 lines, P), summed over a quarter of the channels.
DEVICE void project(float (*to)[PITCH], const Element *means, const Element *x_proj, int first, int S, int lane) {
    constexpr int PIECES = QUARTER / 32, TOGETHER = PIECES % 3 == 0 ? 3 : PIECES % 2 == 0 ? 2 : 1;
    Floats<2> sums[P / 8][2] = {};
#pragma unroll 1
    for (int piece = 0; piece < PIECES; piece += TOGETHER) {
        Pack<Element, 8> a[TOGETHER][2], b[TOGETHER][P / 8];
        UNROLLED for (int i = 0; i < TOGETHER; i++) {
            int d = (piece + i) * 32 + lane % 4 * 8;
            UNROLLED for (int half = 0; half < 2; half++)
                a[i][half] = load<8>(means + (min(first + half * 8 + lane / 4, S - 1) * D + d));
            UNROLLED for (int n = 0; n < P / 8; n++) b[i][n] = load<8>(x_proj + ((n * 8 + lane / 4) * D + d));
        }
        UNROLLED for (int i = 0; i < TOGETHER; i++)
            UNROLLED for (int n = 0; n < P / 8; n++)
                UNROLLED for (int w = 0; w < 4; w += 2)
                    multiply_add(Element{}, sums[n], a[i][0].word[w], a[i][1].word[w], a[i][0].word[w + 1],
                                 a[i][1].word[w + 1], b[i][n].word[w], b[i][n].word[w + 1]);
    }
    UNROLLED for (int n = 0; n < P / 8; n++)
        UNROLLED for (int half = 0; half < 2; half++)
            store(&to[half * 8 + lane / 4][n * 8 + lane % 4 * 2], sums[n][half]);
}

// Adds the partial sums of 16 lines, and rounds the sums like the result of a product.
DEVICE void add_parts(CtaMemory &memory, int first) {
    constexpr int FOURS = P / 4;
    for (int i = threadIdx.x; i < 2 * 16 * FOURS; i += 32 * WARPS) {
        int g = i / (16 * FOURS), row = i / FOURS % 16, column = i % FOURS * 4;
        Floats<4> sum = load<4>(&memory.parts[g * 4][row][column]);
        UNROLLED for (int part = 1; part < 4; part++) sum = sum + load<4>(&memory.parts[g * 4 + part][row][column]);
        store(&memory.projected[g][first + row][column], to_floats(from_floats<Element>(sum)));
    }
}

// Computes x and step sizes of the warp's lines, with one channel per lane.
DEVICE void prepare(CtaMemory &memory, const Element *x, const Pack<Element, 8> (&step_proj)[RANK / 8], float bias, int g,
                    int warp, int S, int lane) {
    for (int t = warp; t < S; t += WARPS / 2) {
        const float *projected = memory.projected[g][t];
        float step_logit = bias, kk = 0;
        UNROLLED for (int r = 0; r < RANK; r += 8) {
            Floats<8> weights = to_floats(step_proj[r / 8]);
            UNROLLED for (int i = 0; i < 8; i += 4) {
                Floats<4> step = load<4>(projected + r + i);
                UNROLLED for (int j = 0; j < 4; j++) step_logit = fmaf(step.at[j], weights.at[i + j], step_logit);
            }
        }
        UNROLLED for (int n = 0; Recurrence::HAS_NORM && n < N; n += 4) {
            Floats<4> k = load<4>(projected + RANK + n);
            UNROLLED for (int j = 0; j < 4; j++) kk = fmaf(k.at[j], k.at[j], kk);
        }
        memory.x[g][t][lane] = to_floats(load<1>(x + t * D)).at[0];
        memory.step_sizes[g][t][lane] = Recurrence::step_size(step_logit, kk);
    }
}

// Replaces x with y. The sums over a channel's four lanes are computed for four lines at a time, one line per lane.
DEVICE void scan(CtaMemory &memory, const float (&A)[NL], int g, int c, int part, int S) {
    float states[NL] = {};
#pragma unroll 1
    for (int start = 0; start < S; start += 4) {
        float x[4], step_size[4], y[4] = {};
        Floats<4> k[4], q[4];
        UNROLLED for (int j = 0; j < 4; j++) {
            int t = min(start + j, S - 1);
            if (g) t = S - 1 - t;
            x[j] = memory.x[g][t][c], step_size[j] = memory.step_sizes[g][t][c];
            k[j] = load<4>(&memory.projected[g][t][RANK + part * NL]);
            q[j] = load<4>(&memory.projected[g][t][RANK + N + part * NL]);
        }
        UNROLLED for (int j = 0; j < 4; j++)
            UNROLLED for (int n = 0; n < NL; n++) {
                Recurrence::update(states[n], x[j], step_size[j], k[j].at[n], A[n]);
                y[j] = fmaf(states[n], q[j].at[n], y[j]);
            }
        bool odd = part & 1, upper = part & 2;  // a lane sends half of its lines, then half of the rest
        UNROLLED for (int j = 0; j < 2; j++)
            y[j] = (odd ? y[j + 2] : y[j]) + __shfl_xor_sync(WARP, odd ? y[j] : y[j + 2], 1);
        y[0] = (upper ? y[1] : y[0]) + __shfl_xor_sync(WARP, upper ? y[0] : y[1], 2);
        int t = start + 2 * odd + upper;
        if (t < S) memory.x[g][g ? S - 1 - t : t][c] = y[0];
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) scan_lines(PARAMETERS_scan_lines) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &memory = *reinterpret_cast<CtaMemory *>(shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = warp / 4, part = warp % 4, S = lines;
    int d = blockIdx.x % (D / CHANNELS) * CHANNELS;
    i64 b = blockIdx.x / (D / CHANNELS);
    means += (g * B + b) * S * D, x_proj += g * P * D;
    Pack<Element, 8> of_step[RANK / 8];
    UNROLLED for (int i = 0; i < RANK / 8; i++) of_step[i] = load<8>(step_proj + (g * D + d + lane) * RANK + i * 8);
    float bias = step_bias[g * D + d + lane], scaled_A[NL] = {};
    int c = part * 8 + lane / 4;  // channel that the lane scans
    if constexpr (Recurrence::HAS_A) {
        Floats<NL> own = load<NL>(A + (g * D + d + c) * N + lane % 4 * NL);
        UNROLLED for (int n = 0; n < NL; n++) scaled_A[n] = Recurrence::scaled_A(own.at[n]);
    }

    for (int first = 0; first < S; first += 16) {
        project(memory.parts[warp], means + part * QUARTER, x_proj + part * QUARTER, first, S, lane);
        __syncthreads();
        add_parts(memory, first);
        __syncthreads();  // sums are complete, and `parts` may be overwritten
    }
    prepare(memory, means + d + lane, of_step, bias, g, part, S, lane);
    __syncthreads();
    scan(memory, scaled_A, g, c, lane % 4, S);
    __syncthreads();
    y += b * S * D + d;
    for (int i = threadIdx.x; i < S * CHANNELS / 2; i += 32 * WARPS) {
        int t = i / (CHANNELS / 2), pair = i % (CHANNELS / 2) * 2;
        Floats<2> sum = load<2>(&memory.x[0][t][pair]) + load<2>(&memory.x[1][t][pair]);
        store(y + (t * D + pair), from_floats<Element>(sum));
    }
}
