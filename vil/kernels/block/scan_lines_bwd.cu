// Backward pass of x_proj, step_proj and Longhorn's scan of both directions of a pooled block, for at most 16 lines.
// The kernel recomputes everything from the means x of lines, and reads no saved states. For each direction:
//
//   [step k q] = x x_proj^T      step_logits = step step_proj^T      states S_t      (as scan_lines.cu)
//   G_t        = dy_t q_t + decay_{t+1} G_{t+1}                                      (docs/kernels/mathematics.md)
//   dprojected = [dstep dk dq]   dstep = dstep_logits step_proj      dmeans = dx + dprojected x_proj
//
// If several CTAs share an image (SLICES > 1), a CTA cannot compute sums over all channels. The kernel then reads
// [step k q] from `projected`, writes dx to `dmeans`, and writes the sums of dprojected over a CTA's channels to
// `dprojected_parts`. Then add_slices.cu adds these sums, and cuBLAS adds dprojected x_proj to `dmeans`.
//
// scan_lines_bwd.py declares the parameters of the kernel. Macros:
//   INPUT      element type of the tensors: bf16 or fp16
//   LINES      number S of lines, at most 16
//   WIDTH      number of channels D
//   SLICES     CTAs of an image in one direction, each of which has D / SLICES channels, a multiple of 16
//   RANK       columns of the step R, a multiple of 8
//   WARPS      warps per CTA
//   CTA_BYTES  dynamic shared memory, computed by the host
//
// B batch    S pooled tokens, here called lines    D channels    N = 16 states    P = R + 2N
// token t: line t, or S - 1 - t in direction 1
//
// A CTA processes a slice of the channels of every `parts`-th image in one direction. Its weights stay in shared memory.
// A warp processes `TILES_OF_WARP` tiles of 16 adjacent channels, one tile at a time.
// With r = lane / 4 and p = lane % 4, a lane has 2 states of 4 channels of a tile, as in an operand of tensor cores:
//
//     states r (h = 0) and r + 8 (h = 1)      channels 4p + c, c = 0 .. 3
//
// Columns 2p and 2p + 1 of the first half of a tile are channels 4p and 4p + 1, and of the second half 4p + 2 and 4p + 3.
// Tensor cores compute the sums over channels and over states from operands rounded to 16 bits, with e the step size,
// H = e G, and E = H residual:
//
//                    a                              b                                sums
//   dq               S (16 states, 16 channels)     dy (16 channels, 8 tokens)       (16 states, 8 tokens)
//   -dk              H and E                        x and -2                         (16 states, 8 tokens)
//   sum_x            H^T (16 channels, 16 states)   k (16 states, 8 tokens)          (16 channels, 8 tokens)
//   sum_step_size    E^T                            k                                (16 channels, 8 tokens)
//
// Each token has its own operand a. Therefore b is zero except for the column of the token, and a product adds only to
// the sums of this token. docs/kernels/block.md lists buffers and barriers.

#include "../cuda/types.cuh"
#define RECURRENCE Longhorn
#define STATES 16
#define LANE_STATES 2
#define LANE_CHANNELS 4
#include "../scan/recurrences.cuh"

#define PROJECTS (SLICES == 1)  // whether the kernel computes [step k q] and dprojected x_proj

constexpr int D = WIDTH, SLICE = D / SLICES, S_LINES = LINES, ROWS = 16, P = RANK + 2 * N, THREADS = 32 * WARPS;
constexpr int TILES = SLICE / 16, TILES_OF_WARP = (TILES + WARPS - 1) / WARPS, EIGHTHS = RANK / 8, OUTPUTS = P / 8;
constexpr int HALVES = (S_LINES + 7) / 8;
// The pitches are chosen so that the 16-byte pieces of 8 rows are in different banks.
constexpr int PITCH = SLICE + 8, P_PITCH = P % 16 ? P : P + 8, STEP_PITCH = RANK % 16 ? RANK : RANK + 8;
static_assert(S_LINES >= 1 && S_LINES <= ROWS && D == SLICES * TILES * 16 && RANK % 8 == 0);

// Step sizes and slopes of one tile, (tokens, channels), and sum_step_size of 8 tokens.
constexpr int ROW = 20;  // the pitch with the fewest bank conflicts in `by_token`
struct Tile {
    alignas(16) float step_size[ROWS][16], slope[ROWS][16];
    alignas(16) float sums[8][ROW];
};
struct CtaMemory {
#if PROJECTS
    alignas(16) Element x_proj[P][PITCH];
#endif
    alignas(16) Element step_proj[SLICE][STEP_PITCH];
    alignas(16) Element x[ROWS][PITCH];  // means; overwritten by dx, and then by dmeans
    alignas(16) Element dy[ROWS][PITCH];  // gradient of y; overwritten by dstep_logits
    alignas(16) Element projected[ROWS][P_PITCH];  // [step k q]; overwritten by dprojected
    alignas(16) float keys[ROWS][8][4];  // k_r, k_{r+8}, q_r, q_{r+8}
    alignas(16) float norms[WARPS][ROWS];  // dL/d(k.k) over a warp's channels
    union {
        Tile tiles[WARPS];
        float parts[WARPS][ROWS][P];  // sums over a warp's channels: [step k q], and later dprojected
    };
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);

typedef float States[2][4];  // element [h][c] is state r + 8h of a lane's channel c
typedef Floats<2> Sums[2];  // accumulators of one product

struct Lane {
    int r, p;
    // Returns v for the lanes whose column of operand b belongs to token j of 8, and 0 for other lanes.
    INLINE unsigned only(int j, unsigned v) const { return r == j ? v : 0; }
};

// Operand a of a (16 states, 16 channels), rounded.
struct Rounded {
    unsigned word[2][2];  // [h][first or second half of the tile's columns]
    INLINE Rounded(const States &v) {
        UNROLLED for (int h = 0; h < 2; h++)
            UNROLLED for (int i = 0; i < 2; i++) word[h][i] = pack(Element{}, v[h][2 * i], v[h][2 * i + 1]);
    }
    // Adds the product with operand b (16 channels, 8 tokens).
    INLINE void add_over_channels(Sums &sums, unsigned b_0, unsigned b_1) const {
        multiply_add(Element{}, sums, word[0][0], word[1][0], word[0][1], word[1][1], b_0, b_1);
    }
    // Adds the product of the transposed operand a (16 channels, 16 states) with operand b (16 states, 8 tokens).
    INLINE void add_over_states(Sums &sums, unsigned b_0, unsigned b_1) const {
        multiply_add(Element{}, sums, transpose(word[0][0]), transpose(word[0][1]), transpose(word[1][0]),
                     transpose(word[1][1]), b_0, b_1);
    }
};

// All threads copy COLUMNS elements of `count` rows, which are STRIDE elements apart in global memory.
// Rows from `rows` on are filled with zeros.
template <int COLUMNS, int STRIDE = COLUMNS, int PITCH_>
DEVICE void copy_rows(Element (*to)[PITCH_], const Element *from, int count, int rows, bool reverse) {
    constexpr int PIECES = COLUMNS / 8;
    for (int i = threadIdx.x; i < count * PIECES; i += THREADS) {
        int row = i / PIECES, column = i % PIECES * 8, line = min(reverse ? rows - 1 - row : row, rows - 1);
        copy_async<8>(&to[row][column], from + (i64(max(line, 0)) * STRIDE + column), row < rows);
    }
}

#if PROJECTS
// Computes x x_proj^T (16 tokens, P), summed over the warp's channels.
DEVICE void project(CtaMemory &cta, float (*to)[P], int first_tile, int tiles, int lane, Lane at) {
    Sums sums[OUTPUTS] = {};
    const Element *x = &cta.x[lane % 16][lane / 16 * 8], *rows = &cta.x_proj[lane % 8][lane / 8 % 2 * 8];
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        int first = (first_tile + i) * 16;
        unsigned a[4];
        load_matrices(a, x + first);
        UNROLLED for (int n = 0; n < OUTPUTS; n++) {
            unsigned b[2];
            load_matrices(b, rows + (8 * n * PITCH + first));
            multiply_add(Element{}, sums[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        }
    }
    UNROLLED for (int n = 0; n < OUTPUTS; n++)
        UNROLLED for (int half = 0; half < 2; half++) store(&to[at.r + 8 * half][8 * n + 2 * at.p], sums[n][half]);
}
#endif

DEVICE Floats<2> add_parts(const CtaMemory &cta, int row, int column) {
    Floats<2> sum = load<2>(&cta.parts[0][row][column]);
    UNROLLED for (int w = 1; w < WARPS; w++) sum = sum + load<2>(&cta.parts[w][row][column]);
    return sum;
}

// Adds the warps' sums of [step k q], rounds the sums to 16 bits, and writes the step if `is_first`.
DEVICE void finish_projections(CtaMemory &cta, Element *step, bool is_first, bool reverse) {
    for (int i = threadIdx.x; i < ROWS * (P / 2); i += THREADS) {
        int row = i / (P / 2), column = i % (P / 2) * 2;
        Pack<Element, 2> rounded;
        if (PROJECTS) {
            rounded = from_floats<Element>(add_parts(cta, row, column));
            store(&cta.projected[row][column], rounded);
        } else {
            rounded = load<2>(&cta.projected[row][column]);
        }
        if (column < RANK) {
            if (is_first && row < S_LINES) store(step + (reverse ? S_LINES - 1 - row : row) * RANK + column, rounded);
        } else {
            Floats<2> exact = to_floats(rounded);
            int n = column - RANK;  // a state of k, or N plus a state of q
            UNROLLED for (int j = 0; j < 2; j++) cta.keys[row][(n + j) % 8][n / 8] = exact.at[j];
        }
    }
}

// Returns k.k of token t to the four lanes with equal r, each of which squares four states.
DEVICE float squared_norm(const CtaMemory &cta, int t, Lane at) {
    Floats<4> k = to_floats(load<4>(&cta.projected[t][RANK + 4 * at.p]));
    float sum = k.at[0] * k.at[0] + k.at[1] * k.at[1] + k.at[2] * k.at[2] + k.at[3] * k.at[3];
    sum += __shfl_xor_sync(WARP, sum, 1);
    return sum + __shfl_xor_sync(WARP, sum, 2);
}

// Computes step sizes and slopes of a tile. Column 2p + e of product i is channel 4p + 2i + e.
DEVICE void prepare(const CtaMemory &cta, Tile &tile, int first, const Floats<4> &bias, const float (&kk)[2], int lane,
                    Lane at) {
    Sums sums[2] = {};
    int row = lane % 8, channel = first + row / 2 * 4 + lane / 8 % 2 * 2 + row % 2;
    UNROLLED for (int n = 0; n < EIGHTHS; n += 2) {
        unsigned a[4], b[2][2] = {};  // if the last eighth has no pair, zeros multiply the columns of k in a
        load_matrices(a, &cta.projected[lane % 16][8 * n + lane / 16 * 8]);
        load_matrices(b[0], &cta.step_proj[channel][8 * n]);
        if (n + 1 < EIGHTHS) load_matrices(b[1], &cta.step_proj[channel][8 * n + 8]);
        UNROLLED for (int i = 0; i < 2; i++)
            multiply_add(Element{}, sums[i], a[0], a[1], a[2], a[3], b[0][i], b[1][i]);
    }
    UNROLLED for (int half = 0; half < 2; half++) {
        int t = at.r + 8 * half;
        Floats<4> step_size, slope;
        UNROLLED for (int c = 0; c < 4; c++) {
            float step_logit = sums[c / 2][half].at[c % 2] + bias.at[c];
            step_size.at[c] = Longhorn::step_size(step_logit, kk[half]);
            slope.at[c] = Longhorn::slope(step_logit, step_size.at[c]);
        }
        store(&tile.step_size[t][4 * at.p], step_size);
        store(&tile.slope[t][4 * at.p], slope);
    }
}

typedef Longhorn::Kept Residuals[2][4];

// Inputs of a token: value (x or dy) and step size of the lane's channels, and keys and queries of the lane's states.
struct Token {
    Floats<4> value, step_size, keys;
    INLINE Token(const CtaMemory &cta, const Element (&values)[ROWS][PITCH], const Tile &tile, int first, int t, Lane at)
        : value(to_floats(load<4>(&values[t][first + 4 * at.p]))), step_size(load<4>(&tile.step_size[t][4 * at.p])),
          keys(load<4>(cta.keys[t][at.r])) {
        // The compiler must not load tokens earlier, because their values would take too many registers.
        asm volatile("" ::: "memory");
    }
};

DEVICE void advance(States &S, Residuals &kept, const Token &t) {
    UNROLLED for (int h = 0; h < 2; h++)
        UNROLLED for (int c = 0; c < 4; c++)
            Longhorn::update(S[h][c], kept[h][c], t.value.at[c], t.step_size.at[c], t.keys.at[h], 0);
}

// Scans the tokens of a half (8 tokens), keeps the residuals, and adds dq.
DEVICE void scan(States &S, Residuals (&kept)[8], Sums &dq, const CtaMemory &cta, const Tile &tile, int first, int half,
                 Lane at) {
    constexpr int LAST = S_LINES - 1;
    Pack<Element, 4> dy = load<4>(&cta.dy[8 * half + at.r][first + 4 * at.p]);
    Token token(cta, cta.x, tile, first, 8 * half, at);
    UNROLLED for (int j = 0; j < 8; j++)
        if (int t = 8 * half + j; t <= LAST) {
            Token following(cta, cta.x, tile, first, j < 7 && t < LAST ? t + 1 : t, at);
            advance(S, kept[j], token);
            Rounded(S).add_over_channels(dq, at.only(j, dy.word[0]), at.only(j, dy.word[1]));
            token = following;
        }
}

// Updates G from the last token of a half to the first, and adds -dk, sum_x and sum_step_size.
DEVICE void walk_back(States &G, const Residuals (&kept)[8], Sums &minus_dk, Sums &sum_x, Sums &sum_step_size,
                      const CtaMemory &cta, const Tile &tile, int first, int half, Lane at) {
    constexpr int LAST = S_LINES - 1;
    Pack<Element, 4> x = load<4>(&cta.x[8 * half + at.r][first + 4 * at.p]);
    const Element *row = &cta.projected[8 * half + at.r][RANK + 2 * at.p];
    unsigned k_0 = load<2>(row).word[0], k_1 = load<2>(row + 8).word[0], minus_2 = pack(Element{}, -2, -2);
    Token token(cta, cta.dy, tile, first, min(8 * half + 7, LAST), at);
    UNROLLED for (int j = 7; j >= 0; j--)
        if (int t = 8 * half + j; t <= LAST) {
            Token following(cta, cta.dy, tile, first, j > 0 ? t - 1 : t, at);
            States H, E;
            UNROLLED for (int h = 0; h < 2; h++) {
                float k = token.keys.at[h], q = token.keys.at[2 + h];
                UNROLLED for (int c = 0; c < 4; c++) {
                    G[h][c] = fmaf(token.value.at[c], q, G[h][c]);
                    H[h][c] = token.step_size.at[c] * G[h][c];
                    E[h][c] = H[h][c] * kept[j][h][c].residual;
                    G[h][c] = fmaf(-k * k, H[h][c], G[h][c]);
                }
            }
            Rounded H_16(H), E_16(E);
            H_16.add_over_channels(minus_dk, at.only(j, x.word[0]), at.only(j, x.word[1]));
            E_16.add_over_channels(minus_dk, at.only(j, minus_2), at.only(j, minus_2));
            unsigned own_k_0 = at.only(j, k_0), own_k_1 = at.only(j, k_1);
            H_16.add_over_states(sum_x, own_k_0, own_k_1);
            E_16.add_over_states(sum_step_size, own_k_0, own_k_1);
            token = following;
        }
}

// Sums over the channels of a warp.
struct ChannelSums {
    Sums dq[HALVES], minus_dk[HALVES];
    float norm[HALVES];  // dL/d(k.k) of token 8 half + r, over the lane's channels
};

// Transposes sums (channels, tokens) through shared memory, and returns the sums of token 8 half + r, channels 4p + c.
// For i < 8, row i of the sums is channel 4 (i / 2) + i % 2, and row i + 8 is channel 4 (i / 2) + i % 2 + 2.
DEVICE Floats<4> by_token(float (&memory)[8][ROW], const Sums &sums, Lane at) {
    __syncwarp();
    UNROLLED for (int i = 0; i < 2; i++)
        UNROLLED for (int e = 0; e < 2; e++)
            memory[2 * at.p + e][at.r / 2 * 4 + at.r % 2 + 2 * i] = sums[i].at[e];
    __syncwarp();
    return load<4>(&memory[at.r][4 * at.p]);
}

// Writes dx and dstep_logits of token 8 half + r.
DEVICE void finish_half(CtaMemory &cta, Tile &tile, const Sums &sums_x, const Sums &sums_step_size, float &norm,
                        Floats<4> &bias, Element *dstep_logits, int first, int half, bool reverse, Lane at) {
    int t = 8 * half + at.r;
    Pack<Element, 4> dx;
    UNROLLED for (int i = 0; i < 2; i++) dx.word[i] = transpose(pack(Element{}, sums_x[i].at[0], sums_x[i].at[1]));
    store(&cta.x[t][first + 4 * at.p], dx);
    Floats<4> sum_step_size = by_token(tile.sums, sums_step_size, at), dlogit;
    Floats<4> step_size = load<4>(&tile.step_size[t][4 * at.p]), slope = load<4>(&tile.slope[t][4 * at.p]);
    UNROLLED for (int c = 0; c < 4; c++) {
        dlogit.at[c] = sum_step_size.at[c] * slope.at[c];
        norm += Longhorn::dnorm(sum_step_size.at[c], step_size.at[c]);
        bias.at[c] += dlogit.at[c];
    }
    Pack<Element, 4> rounded = from_floats<Element>(dlogit);
    store(&cta.dy[t][first + 4 * at.p], rounded);
    if (t < S_LINES) store(dstep_logits + ((reverse ? S_LINES - 1 - t : t) * D + first + 4 * at.p), rounded);
}

// Computes the gradients of a tile of an image. Also adds the gradient of step_bias to `dstep_bias` in global memory,
// which is the sum over the CTA's images, or initializes the sum if `is_first`.
DEVICE void scan_tile(CtaMemory &cta, Tile &tile, ChannelSums &of, Element *dstep_logits, float *dstep_bias,
                      int first, bool is_first, bool reverse, Lane at) {
    // Lanes with r < 4 add to channel 4p + r.
    dstep_bias += first + 4 * at.p + at.r % 4;
    float bias_before = is_first ? 0 : *dstep_bias;
    Residuals kept[HALVES][8];
    States S = {}, G = {};
    Floats<4> bias = {};
    UNROLLED for (int half = 0; half < HALVES; half++) scan(S, kept[half], of.dq[half], cta, tile, first, half, at);
    UNROLLED for (int half = HALVES - 1; half >= 0; half--) {
        Sums sum_x = {}, sum_step_size = {};
        walk_back(G, kept[half], of.minus_dk[half], sum_x, sum_step_size, cta, tile, first, half, at);
        finish_half(cta, tile, sum_x, sum_step_size, of.norm[half], bias, dstep_logits, first, half, reverse, at);
    }
    UNROLLED for (int c = 0; c < 4; c++) {
        UNROLLED for (int distance = 4; distance < 32; distance *= 2)
            bias.at[c] += __shfl_xor_sync(WARP, bias.at[c], distance);
        if (at.r == c) *dstep_bias = bias_before + bias.at[c];
    }
}

// Writes the warp's sums over its channels to `parts`: dstep_logits step_proj, -dk and dq, and dL/d(k.k) to `norms`.
DEVICE void put_sums(CtaMemory &cta, const ChannelSums &of, const Sums (&dstep)[EIGHTHS], int warp, Lane at) {
    float(*to)[P] = cta.parts[warp];
    UNROLLED for (int n = 0; n < EIGHTHS; n++)
        UNROLLED for (int half = 0; half < 2; half++) store(&to[at.r + 8 * half][8 * n + 2 * at.p], dstep[n][half]);
    UNROLLED for (int half = 0; half < HALVES; half++) {
        UNROLLED for (int h = 0; h < 2; h++)
            UNROLLED for (int e = 0; e < 2; e++) {
                float *row = &to[8 * half + 2 * at.p + e][RANK + at.r + 8 * h];
                row[0] = of.minus_dk[half][h].at[e], row[N] = of.dq[half][h].at[e];
            }
        float norm = of.norm[half];
        norm += __shfl_xor_sync(WARP, norm, 1);
        norm += __shfl_xor_sync(WARP, norm, 2);
        if (at.p == 0) cta.norms[warp][8 * half + at.r] = norm;
    }
}

DEVICE void backpropagate_step(const CtaMemory &cta, Sums (&dstep)[EIGHTHS], int first_tile, int tiles, int lane) {
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        int first = (first_tile + i) * 16;
        unsigned a[4];
        load_matrices(a, &cta.dy[lane % 16][first + lane / 16 * 8]);
        UNROLLED for (int n = 0; n < EIGHTHS; n++) {
            unsigned b[2];
            load_transposed(b, &cta.step_proj[first + lane % 16][8 * n]);
            multiply_add(Element{}, dstep[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        }
    }
}

// Adds the warps' sums, and writes dprojected, or the sums over the CTA's channels to `dprojected_parts`.
DEVICE void finish_dprojected(CtaMemory &cta, Element *dprojected, float *dprojected_parts, bool reverse) {
    for (int i = threadIdx.x; i < ROWS * (P / 2); i += THREADS) {
        int row = i / (P / 2), column = i % (P / 2) * 2, n = column - RANK;
        Floats<2> sum = {};
        if (row < S_LINES) {
            sum = add_parts(cta, row, column);
            if (n >= 0 && n < N) {
                float norm = cta.norms[0][row];
                UNROLLED for (int w = 1; w < WARPS; w++) norm += cta.norms[w][row];
                UNROLLED for (int j = 0; j < 2; j++)
                    sum.at[j] = fmaf(2 * cta.keys[row][(n + j) % 8][n / 8], norm, -sum.at[j]);
            }
        }
        int line = reverse ? S_LINES - 1 - row : row;
        if (PROJECTS) {
            Pack<Element, 2> rounded = from_floats<Element>(sum);
            store(&cta.projected[row][column], rounded);
            if (row < S_LINES) store(dprojected + line * P + column, rounded);
        } else if (row < S_LINES) {
            store(dprojected_parts + (line * P + column), sum);
        }
    }
}

#if PROJECTS
// Replaces dx by dx + dprojected x_proj in the warp's channels.
DEVICE void backpropagate_projections(CtaMemory &cta, int first_tile, int tiles, int lane, Lane at) {
    constexpr int DEPTHS = (P + 15) / 16;
    unsigned a[DEPTHS][4] = {};
    UNROLLED for (int k = 0; k < DEPTHS; k++)
        UNROLLED for (int i = 0; i < (16 * k + 8 < P ? 4 : 2); i++)
            a[k][i] = load<2>(&cta.projected[at.r + i % 2 * 8][16 * k + i / 2 * 8 + 2 * at.p]).word[0];
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        int first = (first_tile + i) * 16;
        Sums sums[2];
        UNROLLED for (int j = 0; j < 2; j++)
            UNROLLED for (int half = 0; half < 2; half++)
                sums[j][half] = to_floats(load<2>(&cta.x[at.r + 8 * half][first + 8 * j + 2 * at.p]));
        UNROLLED for (int k = 0; k < DEPTHS; k++) {
            unsigned b[4];  // rows 16k and 16k + 8 of the first 8 channels, and of the last 8 channels
            int row = 16 * k + (16 * k + 8 < P ? lane / 8 % 2 * 8 : 0) + lane % 8;
            load_transposed(b, &cta.x_proj[row][first + lane / 16 * 8]);
            UNROLLED for (int j = 0; j < 2; j++)
                multiply_add(Element{}, sums[j], a[k][0], a[k][1], a[k][2], a[k][3], b[2 * j], b[2 * j + 1]);
        }
        UNROLLED for (int j = 0; j < 2; j++)
            UNROLLED for (int half = 0; half < 2; half++)
                store(&cta.x[at.r + 8 * half][first + 8 * j + 2 * at.p], from_floats<Element>(sums[j][half]));
    }
}
#endif

// `dstep_biases` receives the sums of the CTAs of a direction: (parts, 2, D).
// `dprojected_parts` receives (SLICES, 2, B, S, P) if SLICES > 1.
extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_lines_backward(PARAMETERS_scan_lines_backward) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);
    unsigned row = blockIdx.x / SLICES;  // row of dstep_biases
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = row % 2, part = row / 2, slice = blockIdx.x % SLICES;
    Lane at = {lane / 4, lane % 4};
    int first_tile = warp * TILES_OF_WARP, tiles = max(min(TILES_OF_WARP, TILES - first_tile), 0), d = slice * SLICE;
    bool reverse = g == 1;
    means += g * B * S_LINES * D + d, dmeans += g * B * S_LINES * D + d, dstep_logits += g * B * S_LINES * D + d;
    step += g * B * S_LINES * RANK, dprojected += g * B * S_LINES * P, step_bias += g * D + d;
    dstep_biases += i64(row) * D + d, dy += d;
#if PROJECTS
    copy_rows<D>(cta.x_proj, x_proj + g * P * D, P, P, false);
#endif
    copy_rows<RANK>(cta.step_proj, step_proj + (g * D + d) * RANK, SLICE, SLICE, false);

#pragma unroll 1
    for (i64 b = part; b < B; b += parts) {
        copy_rows<SLICE, D>(cta.x, means + b * S_LINES * D, ROWS, S_LINES, reverse);
        copy_rows<SLICE, D>(cta.dy, dy + b * S_LINES * D, ROWS, S_LINES, reverse);
        if (!PROJECTS) copy_rows<P>(cta.projected, projected + (g * B + b) * S_LINES * P, ROWS, S_LINES, reverse);
        commit_copies();
        wait_for_copies<0>();
        __syncthreads();  // barrier 1
#if PROJECTS
        project(cta, cta.parts[warp], first_tile, tiles, lane, at);
        __syncthreads();  // barrier 2
#endif
        finish_projections(cta, step + b * S_LINES * RANK, slice == 0, reverse);
        __syncthreads();  // barrier 3
        float kk[2] = {squared_norm(cta, at.r, at), squared_norm(cta, at.r + 8, at)};
        ChannelSums sums = {};
#pragma unroll 1
        for (int i = 0; i < tiles; i++) {
            int first = (first_tile + i) * 16;
            __syncwarp();
            prepare(cta, cta.tiles[warp], first, load<4>(step_bias + first + 4 * at.p), kk, lane, at);
            __syncwarp();
            scan_tile(cta, cta.tiles[warp], sums, dstep_logits + b * S_LINES * D, dstep_biases, first, b == part,
                      reverse, at);
        }
        Sums dstep[EIGHTHS] = {};
        backpropagate_step(cta, dstep, first_tile, tiles, lane);
        __syncthreads();  // barrier 4
        put_sums(cta, sums, dstep, warp, at);
        __syncthreads();  // barrier 5
        float *dprojected_part = dprojected_parts + ((slice * 2 + g) * B + b) * S_LINES * P;
        finish_dprojected(cta, dprojected + b * S_LINES * P, dprojected_part, reverse);
#if PROJECTS
        __syncthreads();  // barrier 6
        backpropagate_projections(cta, first_tile, tiles, lane, at);
        __syncwarp();
#endif
        Element *to = dmeans + b * S_LINES * D + first_tile * 16;
        for (int i = lane; i < S_LINES * tiles * 2; i += 32) {
            int row = i / (tiles * 2), column = i % (tiles * 2) * 8;
            store(to + ((reverse ? S_LINES - 1 - row : row) * D + column), load<8>(&cta.x[row][first_tile * 16 + column]));
        }
        __syncthreads();  // barrier 7: all warps have read the image
    }
}
