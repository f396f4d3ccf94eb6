// x_proj, step_proj and Longhorn's scan of both directions of a pooled block in one kernel, applied to the means of lines.
// The kernel is for 16-bit types, 16 states, up to 16 lines per image, and any number of images:
//
//   [step_g k_g q_g] = mean_g x_proj_g^T      step_logits_g = step_g step_proj_g^T      y = y_0 + y_1
//
// y_g is the output of the scan without its skip connection. Direction 1 scans from the last line to the first.
// Tensor cores advance the states by two lines at a time, with the equations of scan/forward_mma.cu.
// If several CTAs share an image (SLICES > 1), the kernel reads [step_g k_g q_g] from `projected` instead of computing it.
//
// scan_image.py declares the parameters of the kernel. Macros:
//   INPUT          element type of the tensors: bf16 or fp16
//   WIDTH          number of channels D
//   SLICES         CTAs of an image, each of which has D / SLICES channels
//   RANK           columns of the step, R
//   STATES         number of states N, 16
//   WARP_CHANNELS  channels of a warp, 32 or 64
//   MIN_CTAS       CTAs that must fit on a multiprocessor, which limits the registers per thread
//   CTA_BYTES      dynamic shared memory, computed by the host
//
// B batch    S pooled tokens, here called lines    D channels    P = R + 2N    c = lane / 4    p = lane % 4
//
// A CTA processes a slice of an image's channels: direction 0, then direction 1.
// Lines are counted in the reading order of a direction.
// If S < 16, the last line is repeated, which changes only states that no line needs.
// For each direction:
//  1. project       a warp multiplies its channels of the means (16 lines) by its columns of x_proj, unless SLICES > 1
//     barrier A
//  2. finish_keys   a warp adds all warps' partial sums of keys and queries for two pairs of lines, rounds the sums to
//                   16 bits, and computes the operands of the states
//     finish_steps  a warp adds and rounds all warps' partial sums of steps
//                   (if SLICES > 1, the rounded sums are an input)
//     barrier B
//  3. scan_tiles    a warp scans 32 channels at a time: step sizes, operands of the channels, states and y
// While the warps scan direction 0, x_proj of direction 1 arrives.
// y_0, and then y_0 + y_1, overwrite the means of direction 0, rounded to 16 bits.
// All warps read `parts` of all warps between barriers A and B.
// All other data of a warp is accessed only by the warp itself, so the data needs only __syncwarp.

#include "../cuda/async_copies.cuh"
#include "../cuda/types.cuh"

typedef INPUT Element;
constexpr int D = WIDTH, N = STATES, P = RANK + 2 * N, LINES = 16, PAIRS = LINES / 2;
constexpr int TOGETHER = 2;  // tiles of 16 channels that a warp scans at once
constexpr int SLICE = D / SLICES, WARPS = SLICE / WARP_CHANNELS, EIGHTS = RANK / 8, LOADS = (EIGHTS + 3) / 4;
// PIECES: number of 16-byte pieces of a row; ROWS: number of rows that a warp copies at once
constexpr int PIECES = WARP_CHANNELS / 8, ROWS = 32 / PIECES;
// The pitches are chosen so that rows begin in different banks.
constexpr int PART_PITCH = P | 8, STEP_PITCH = RANK | 8;

#define PROJECTS (SLICES == 1)  // whether the kernel computes [step k q]

struct WarpMemory {
    Element means[2][LINES][WARP_CHANNELS];  // with swizzled pieces; means[0] is overwritten by y_0 and then by y_0 + y_1
#if PROJECTS
    Element x_proj[P][WARP_CHANNELS];  // x_proj with swizzled pieces
#endif
    Element step_proj[WARP_CHANNELS][STEP_PITCH];
#if PROJECTS
    float parts[LINES][PART_PITCH];  // [step k q], summed over the channels of the warp
#endif
};
// `update` and `output` are operands b of the products of cuda/mma.cuh for one pair of lines, with zeros for other pairs.
struct CtaMemory {
    WarpMemory warps[WARPS];
    unsigned update[PAIRS][2][32][4];  // decay of states c and c + 8, then drive of states c and c + 8
    unsigned output[PAIRS][32][4];  // queries of the first line (or a q, if c is odd) and of the second line
    float norm[LINES][2];  // scale (1 + k.k), and scale, a power of two
    float kq[PAIRS];  // scale k.q of the first line of a pair
    Element step[LINES][STEP_PITCH];
#if !PROJECTS
    Element projected[2][LINES][P];  // [step k q] of both directions
#endif
};
static_assert(sizeof(CtaMemory) == CTA_BYTES && D == SLICES * WARPS * WARP_CHANNELS);
static_assert(WARP_CHANNELS == 32 || WARP_CHANNELS == 64);
static_assert(RANK % 8 == 0 && N == 16 && LOADS <= 2);

// Returns the index of the ith line in the reading order of direction g, or of the last line if i >= S.
DEVICE int line_of(int i, int g, int S) { return g ? S - 1 - min(i, S - 1) : min(i, S - 1); }

// Returns the first column of a piece of means or x_proj. The same piece of 8 adjacent rows is in different banks.
// If the bits of two rows (or pieces) do not overlap, the column of their sum is the XOR of their columns.
DEVICE constexpr int swizzled(int row, int piece) { return (piece ^ row * PIECES / 8 % PIECES) * 8; }

// Start copying the channels of the warp from the means of S lines, from step_proj, and from all rows of x_proj.
// The last line is repeated, because products have 16 lines.
DEVICE void copy_means(Element (*to)[WARP_CHANNELS], const Element *means, int S, int lane) {
    int row = lane / PIECES, piece = lane % PIECES;
    UNROLLED for (int i = 0; i < LINES; i += ROWS)
        copy_async<8>(&to[row + i][swizzled(row, piece) ^ swizzled(i, 0)],
                      means + (min(row + i, S - 1) * D + piece * 8), true);
}
DEVICE void copy_step_proj(WarpMemory &warp, const Element *step_proj, int lane) {
    UNROLLED for (int i = 0; i < WARP_CHANNELS * EIGHTS; i += 32)
        copy_async<8>(&warp.step_proj[(lane + i) / EIGHTS][(lane + i) % EIGHTS * 8], step_proj + (lane + i) * 8, true);
}

#if PROJECTS
DEVICE void copy_x_proj(WarpMemory &warp, const Element *x_proj, int lane) {
    static_assert(P % ROWS == 0);
    int row = lane / PIECES, piece = lane % PIECES;
    const Element *from = x_proj + (row * D + piece * 8);
    UNROLLED for (int i = 0; i < P; i += ROWS)
        copy_async<8>(&warp.x_proj[row + i][swizzled(row, piece) ^ swizzled(i, 0)], from + i * D, true);
}

// Computes [step k q] (16 lines, P), summed over the channels of the warp.
DEVICE void project(WarpMemory &warp, const Element (*means)[WARP_CHANNELS], int lane) {
    Floats<2> sums[P / 8][2] = {};
    UNROLLED for (int k = 0; k < WARP_CHANNELS; k += 32) {
        unsigned a[2][4];
        UNROLLED for (int i = 0; i < 2; i++) 
            load_matrices(a[i], &means[lane % 16][swizzled(lane % 16, lane / 16) ^ swizzled(0, k / 8 + 2 * i)]);
        UNROLLED for (int n = 0; n < P / 8; n++) {
            unsigned b[4];
            load_matrices(b, &warp.x_proj[n * 8 + lane % 8][swizzled(lane % 8, lane / 8) ^ swizzled(0, k / 8)]);
            UNROLLED for (int i = 0; i < 2; i++)
                multiply_add(Element{}, sums[n], a[i][0], a[i][1], a[i][2], a[i][3], b[2 * i], b[2 * i + 1]);
        }
    }
    UNROLLED for (int n = 0; n < P / 8; n++)
        UNROLLED for (int half = 0; half < 2; half++)
            store(&warp.parts[half * 8 + lane / 4][n * 8 + lane % 4 * 2], sums[n][half]);
}

// Returns four adjacent columns of [step k q] of a line, as rounded sums over all channels.
DEVICE Pack<Element, 4> rounded_sums(const CtaMemory &cta, int g, int line, int column) {
    Floats<4> sum = load<4>(&cta.warps[0].parts[line][column]);
    UNROLLED for (int w = 1; w < WARPS; w++) sum = sum + load<4>(&cta.warps[w].parts[line][column]);
    return from_floats<Element>(sum);
}
#else
// All threads start copying [step k q] of S lines.
DEVICE void copy_projected(Element (*to)[P], const Element *projected, int S) {
#pragma unroll 1
    for (int i = threadIdx.x; i < LINES * (P / 8); i += 32 * WARPS) {
        int row = i / (P / 8), column = i % (P / 8) * 8;
        copy_async<8>(&to[row][column], projected + (min(row, S - 1) * P + column), true);
    }
}
DEVICE Pack<Element, 4> rounded_sums(const CtaMemory &cta, int g, int line, int column) {
    return load<4>(&cta.projected[g][line][column]);
}
#endif

DEVICE void finish_steps(CtaMemory &cta, int first, int g, int S) {
    constexpr int FOURS = RANK / 4;
    if (first >= LINES * FOURS) return;
    int i = first / FOURS, column = first % FOURS * 4;
    store(&cta.step[i][column], rounded_sums(cta, g, line_of(i, g, S), column));
}

// Computes the operands of the states for lines 4 unit to 4 unit + 3, which are two pairs.
// Eight lanes share a line: lanes with column < 4 have four states of the key, and the other lanes of the query.
DEVICE void finish_keys(CtaMemory &cta, int unit, int g, int S, int lane) {
    int i = 4 * unit + lane / 8, column = lane % 8, pair = i / 2;
    bool second = i % 2, is_key = column < 4;
    Pack<Element, 4> rounded = rounded_sums(cta, g, line_of(i, g, S), RANK + 4 * column);
    Floats<4> own = to_floats(rounded), other, next;  // other: query if `is_key`, otherwise key
    float kk = 0, kq = 0;
    UNROLLED for (int j = 0; j < 4; j++) {
        other.at[j] = __shfl_xor_sync(WARP, own.at[j], 4);
        next.at[j] = __shfl_xor_sync(WARP, own.at[j], 8);
        float k = is_key ? own.at[j] : other.at[j];
        kk = fmaf(k, k, kk), kq = fmaf(own.at[j], other.at[j], kq);
    }
    UNROLLED for (int apart = 1; apart < 4; apart *= 2)
        kk += __shfl_xor_sync(WARP, kk, apart), kq += __shfl_xor_sync(WARP, kq, apart);
    float norm = 1 + kk, scale = inverse_exponent(norm), next_scale = __shfl_xor_sync(WARP, scale, 8);
    if (column == 0) {
        store(cta.norm[i], Floats<2>{norm * scale, scale});
        if (!second) cta.kq[pair] = kq * scale;
    }
    int r = pair % 4;
    if (is_key && !second) {
        UNROLLED for (int j = 0; j < 4; j++) {
            int n = 4 * column + j;
            unsigned *decay = &cta.update[pair][0][n % 8 * 4 + r][n / 8 * 2];
            unsigned *drive = &cta.update[pair][1][n % 8 * 4 + r][n / 8 * 2];
            float scaled_0 = own.at[j] * scale, scaled_1 = next.at[j] * next_scale;
            float a_0 = own.at[j] * scaled_0, a_1 = next.at[j] * scaled_1;
            decay[0] = pack(fp16{}, -a_0, -a_1), decay[1] = pack(fp16{}, a_0 * a_1, 0);
            drive[0] = pack(Element{}, scaled_0, scaled_1), drive[1] = pack(Element{}, -a_1 * scaled_0, scaled_1);
        }
    }
    if (!is_key) {
        int octet = column % 4 / 2, first = column % 2 * 2;
        UNROLLED for (int j = 0; j < 2; j++) {
            unsigned(*even)[4] = &cta.output[pair][2 * r * 4 + first + j], (*odd)[4] = even + 4;
            if (second) {
                (*even)[2 + octet] = rounded.word[j];
            } else {
                float aq[2];
                UNROLLED for (int h = 0; h < 2; h++) {
                    float k = other.at[2 * j + h];
                    aq[h] = k * (k * scale) * own.at[2 * j + h];
                }
                (*even)[octet] = rounded.word[j], (*odd)[octet] = pack(Element{}, aq[0], aq[1]);
            }
        }
    }
}

typedef unsigned Steps[2][LOADS][4];  // operands b of lines 0 to 7 and 8 to 15 for the product with step_proj

// 16 channels of a warp. A lane has the pairs p and 4 + p of channels c and c + 8, which are fragments a of the products.
struct Tile {
    int c, p, piece, line;  // first of the two pieces of the tile; line of the rows that the lane loads
    unsigned decays[2][4], drives[2][4];
    // sums[0]: S_0 q_0 + e_0 x_0 k_0 q_0, and S_0 (a_0 q_0); sums[1]: S_2 q_1.
    float step_sizes[2][2];
    Floats<2> sums[2][2][2];
    // states[o][2 h + j] is state 8 o + 2 p + j of channel c + 8 h; s: rounded states as fragments a.
    float states[2][4];
    unsigned s[4];

    INLINE void load_rows(unsigned (&x)[4], const Element (*means)[WARP_CHANNELS], int lane) const {
        load_transposed(x, &means[line][swizzled(line, piece + lane / 8 % 2)]);
    }
    // Computes the fragments of all pairs. `bias` contains -log2(e) times the step's bias of channels c and c + 8.
    INLINE void prepare(WarpMemory &warp, const CtaMemory &cta, const Steps &steps, int tile, const float (&bias)[2], int g,
                        int S, int lane) {
        c = lane / 4, p = lane % 4, piece = 2 * tile, line = line_of(lane / 16 * 8 + lane % 8, g, S);
        unsigned x[4], weights[EIGHTS / 2 + 1][4], last[2];  // x: channels c and c + 8 of lines 0 to 7, then of 8 to 15
        load_rows(x, warp.means[g], lane);
        const Element(*rows)[STEP_PITCH] = &warp.step_proj[16 * tile + lane % 16];
        UNROLLED for (int e = 0; e < EIGHTS / 2; e++) load_matrices(weights[e], &rows[0][16 * e + lane / 16 * 8]);
        if constexpr (EIGHTS % 2) load_matrices(last, &rows[0][RANK - 8]);
        UNROLLED for (int half = 0; half < 2; half++) {
            Floats<2> logits[2] = {};
            if constexpr (EIGHTS % 2) {
                float product[4];
                multiply(Element{}, product, last[0], last[1], steps[half][EIGHTS / 4][(EIGHTS - 1) % 4]);
                UNROLLED for (int h = 0; h < 2; h++) logits[h] = {product[2 * h], product[2 * h + 1]};
            }
            UNROLLED for (int e = 0; e < EIGHTS / 2; e++)
                multiply_add(Element{}, logits, weights[e][0], weights[e][1], weights[e][2], weights[e][3],
                             steps[half][e / 2][2 * e % 4], steps[half][e / 2][2 * e % 4 + 1]);
            Floats<4> norm = load<4>(cta.norm[8 * half + 2 * p]);
            float kq = cta.kq[4 * half + p];
            UNROLLED for (int h = 0; h < 2; h++) {
                Floats<2> at = unpack(Element{}, x[2 * half + h]);
                float e[2], v[2];
                UNROLLED for (int j = 0; j < 2; j++) {
                    float u = exp2_fast(fmaf(-LOG2E, logits[h].at[j], bias[h]));
                    e[j] = reciprocal(fmaf(u, norm.at[2 * j + 1], norm.at[2 * j])), v[j] = e[j] * at.at[j];
                }
                decays[half][h] = pack(fp16{}, e[0], e[1]), decays[half][2 + h] = pack(fp16{}, e[0] * e[1], 0);
                drives[half][h] = pack(Element{}, v[0], v[1]);
                float low = v[1] - unpack(Element{}, drives[half][h]).at[1];
                drives[half][2 + h] = pack(Element{}, e[1] * v[0], low);
                step_sizes[half][h] = e[0];
                // the part of y_0 that does not depend on the states
                sums[half][0][h] = {v[0] * kq, 0}, sums[half][1][h] = {};
            }
        }
    }
    // Advances the states by a pair of lines. Before the first pair, the states are zero.
    INLINE void advance(int pair, const Pack<unsigned, 4> &decay_of, const Pack<unsigned, 4> &drive_of) {
        UNROLLED for (int o = 0; o < 2; o++) {
            float decay[4], drive[4];
            multiply(Element{}, drive, drives[pair / 4], drive_of.at[2 * o], drive_of.at[2 * o + 1], 0);
            if (pair > 0) multiply(fp16{}, decay, decays[pair / 4], decay_of.at[2 * o], decay_of.at[2 * o + 1], 1);
            UNROLLED for (int j = 0; j < 4; j++)
                states[o][j] = pair > 0 ? fmaf(decay[j], states[o][j], drive[j]) : drive[j];
            UNROLLED for (int h = 0; h < 2; h++) s[2 * o + h] = pack(Element{}, states[o][2 * h], states[o][2 * h + 1]);
        }
    }
    // Multiplies the states by the queries of the first or second line of a pair.
    INLINE void multiply_queries(int pair, int second, const Pack<unsigned, 4> &queries) {
        multiply_add(Element{}, sums[pair / 4][second], s[0], s[1], s[2], s[3], queries.at[2 * second],
                     queries.at[2 * second + 1]);
    }
    // Stores y. In direction 1, y_0 is loaded in the layout of x and added.
    INLINE void finish(WarpMemory &warp, int g, int S, int lane) const {
        unsigned first[4] = {};
        if (g) load_rows(first, warp.means[0], lane);
        __syncwarp();  // x and y_0 of all lanes may be overwritten
        UNROLLED for (int half = 0; half < 2; half++) {
            int i = 8 * half + c, row = line_of(i, g, S);
            UNROLLED for (int h = 0; h < 2; h++) {
                Floats<2> q = sums[half][0][h], other = unpack(Element{}, first[2 * half + h]);
                float y_0 = fmaf(-step_sizes[half][h], q.at[1], q.at[0]), y_1 = sums[half][1][h].at[0];
                unsigned word = transpose(pack(Element{}, y_0 + other.at[0], y_1 + other.at[1]));
                if (i < S) store(&warp.means[0][row][swizzled(row, piece + h) + 2 * p], Pack<Element, 2>{word});
            }
        }
    }
};

// Computes y of TOGETHER tiles, which share loads of the operands of the states. A lane has the bias of one of 32 channels.
DEVICE void scan_tiles(WarpMemory &warp, const CtaMemory &cta, int first, float bias, int g, int S, int lane) {
    Tile tiles[TOGETHER];
    Steps steps;
    UNROLLED for (int half = 0; half < 2; half++)
        UNROLLED for (int e = 0; e < LOADS; e++)
            load_matrices(steps[half][e], &cta.step[8 * half + lane % 8][min(4 * e + lane / 8, EIGHTS - 1) * 8]);
    UNROLLED for (int i = 0; i < TOGETHER; i++) {
        float bias_of[2];
        UNROLLED for (int h = 0; h < 2; h++) bias_of[h] = __shfl_sync(WARP, bias, 16 * i + 8 * h + lane / 4);
        tiles[i].prepare(warp, cta, steps, first + i, bias_of, g, S, lane);
    }
    Pack<unsigned, 4> queries = load<4>(cta.output[0][lane]);
    auto advance = [&](int pair) {
        Pack<unsigned, 4> decay = load<4>(cta.update[pair][0][lane]), drive = load<4>(cta.update[pair][1][lane]);
        UNROLLED for (int i = 0; i < TOGETHER; i++) {
            tiles[i].advance(pair, decay, drive);
            tiles[i].multiply_queries(pair, 1, queries);
        }
    };
    UNROLLED for (int pair = 0; pair < PAIRS - 1; pair++) {
        advance(pair);
        queries = load<4>(cta.output[pair + 1][lane]);
        UNROLLED for (int i = 0; i < TOGETHER; i++) tiles[i].multiply_queries(pair + 1, 0, queries);
    }
    if (S == LINES) advance(PAIRS - 1);  // only y of the last line needs the states after the last pair
    UNROLLED for (int i = 0; i < TOGETHER; i++) tiles[i].finish(warp, g, S, lane);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS) scan_image(PARAMETERS_scan_image) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);
    int lane = threadIdx.x % 32, w = threadIdx.x / 32, S = lines, d = blockIdx.x % SLICES * SLICE + w * WARP_CHANNELS;
    WarpMemory &warp = cta.warps[w];
#if !PROJECTS
    projected += i64(blockIdx.x / SLICES) * S * P;
    for (int g = 0; g < 2; g++) copy_projected(cta.projected[g], projected + g * B * S * P, S);
#endif
    means += i64(blockIdx.x / SLICES) * S * D + d;
    copy_means(warp.means[0], means, S, lane);
#if PROJECTS
    copy_x_proj(warp, x_proj + d, lane);
#endif
    commit_copies();
    copy_step_proj(warp, step_proj + d * RANK, lane);
    copy_means(warp.means[1], means + B * S * D, S, lane);
    commit_copies();
    // Initialize the operands with zeros, because entries of other pairs must be zero.
    for (int i = threadIdx.x * 16; i < int(sizeof cta.update + sizeof cta.output); i += 32 * WARPS * 16)
        store((float *)((char *)cta.update + i), Floats<4>{});
#pragma unroll 1
    for (int g = 0; g < 2; g++) {
        wait_for_copies<1>();
        __syncwarp();  // means and x_proj of all lanes have arrived
#if PROJECTS
        project(warp, warp.means[g], lane);
        __syncwarp();  // no lane reads x_proj any more
        if (g == 0) copy_x_proj(warp, x_proj + (P * D + d), lane);
#endif
        commit_copies();
        float bias[WARP_CHANNELS / 32];  // a lane has every 32nd channel
        UNROLLED for (int i = 0; i < WARP_CHANNELS / 32; i++) bias[i] = -LOG2E * step_bias[g * D + d + 32 * i + lane];
        wait_for_copies<1>();  // waits for step_proj
        __syncthreads();  // barrier A
        for (int unit = w; unit < LINES / 4 + (LINES * RANK / 4 + 31) / 32; unit += WARPS) {
            if (unit < LINES / 4)
                finish_keys(cta, unit, g, S, lane);
            else
                finish_steps(cta, (unit - LINES / 4) * 32 + lane, g, S);
        }
        __syncthreads();  // barrier B
#pragma unroll 1
        for (int tile = 0; tile < WARP_CHANNELS / 16; tile += TOGETHER) {
            scan_tiles(warp, cta, tile, bias[0], g, S, lane);
            bias[0] = bias[WARP_CHANNELS / 32 - 1];
        }
        __syncwarp();  // step_proj may be overwritten, and y is complete
        if (g == 0) copy_step_proj(warp, step_proj + (D + d) * RANK, lane);
        commit_copies();
    }
    int row = lane / PIECES, piece = lane % PIECES;
    y += i64(blockIdx.x / SLICES) * S * D + d;
    UNROLLED for (int i = 0; i < LINES; i += ROWS)
        if (row + i < S)
            store(y + ((row + i) * D + piece * 8), load<8>(&warp.means[0][row + i][swizzled(row, piece) ^ swizzled(i, 0)]));
}
