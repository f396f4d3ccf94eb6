// Gradients of a block's convolutions (conv.cu), including the product that adds the contribution of x_proj to dv.
// With BACK = TAPS - 1 and s_g(t) = silu'(conv_g(t)) (dv_g(t) + dprojected_g(t) x_proj_g):
//
//   du(t) = sum_i weight_0[i] s_0(t + BACK - i) + weight_1[i] s_1(t - BACK + i)
//   dweight_0[i] = sum_t u(t - BACK + i) s_0(t)      dbias_g = sum_t s_g(t)
//   dweight_1[i] = sum_t u(t + BACK - i) s_1(t)
//
// s_g(t) is 0 for tokens that direction g does not read.
//
// conv_backward.py declares the parameters of the kernel. Macros:
//   INPUT        element type of the tensors: bf16, fp16 or float
//   VECTOR       number of adjacent channels that one instruction copies, up to 16 bytes
//   TAPS         length of the convolution's filter, whose last tap reads the current token
//   PROJECTIONS  rows of x_proj, R + 2N, a multiple of 8
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// B batch    L tokens    D channels    H tokens that each direction reads, the first H in the direction's order
// stretch: number of tokens of a sequence that a lane processes at a time, a multiple of 4

#include "filter.cuh"
#include "silu.cuh"

constexpr int WARPS = 4;

// Returns -silu'(x) / LOG2E as a function of y = -LOG2E x.
// Filters scaled by -LOG2E give y directly, so that exp(-x) = exp2(y) needs no further product.
// In du, the two scales cancel, because s_g and the filter contain one scale each. dweight and dbias are rescaled.
// With s = sigmoid(x), LN2 = 1 / LOG2E, x = -LN2 y and silu'(x) = s + s (1 - s) x:
//  -LN2 silu'(x) = s (-LN2 + LN2^2 y (1 - s))
DEVICE float scaled_slope(float y) {
    constexpr float LN2 = 1 / LOG2E;
    float s = reciprocal(1 + exp2_fast(y));
    return s * fmaf(y, fmaf(-LN2 * LN2, s, LN2 * LN2), -LN2);
}

// A CTA processes SPAN channels of four stretches of tokens, then of the next four stretches.
// Lane l (r = l / 4, p = l % 4) has stretch p and LANE channels, starting at channel r LANE of its warp's channels.
//
// In the step for token t, a lane computes du and direction 1 at token t, but direction 0 at token t + BACK.
// Therefore all terms of du(t) are known in the step for token t. Windows advance by STEP tokens at once:
//
//   window[i] = u(t + i)    gives conv_0(t + BACK) and conv_1(t), so s_0(t + BACK) and s_1(t)
//   s_0[i] = s_0(t + i)     du(t) += weight_0[i] s_0[BACK - i]    dweight_0[i] += u(t) s_0[BACK - i]
//   s_1[i] = s_1(t - BACK + i)    += weight_1[i] s_1[i]           dweight_1[i] += u(t) s_1[i]
//
// dweight is summed over the tokens of u instead of the tokens of s, so that each pair of u and s is added once.
// A lane starts STEP tokens before its stretch, without stores and sums, to compute the first values of s_0 and s_1.
//
// Tensor cores compute dprojected x_proj as (16 channels, 16 projections) times (16 projections, 8 tokens).
// Row r of operand a is the lane's first channel, and row r + 8 is the lane's second channel.
// The 8 columns are two tokens of each of the four stretches, and lane (r, p) receives the tokens of its stretch.
// The sums start with dv, so that dv is added without rounding. For 32-bit inputs, dv already contains the product.
//
// Tiles of 8 tokens of each stretch are in shared memory, and the next tile is prefetched.
// The rows of a tile are in the order of the products: two tokens of each stretch, then the next two tokens.
//
//   rows        0, 1       2, 3      4, 5      6, 7      8, 9         ..   30, 31
//   tokens      t, t + 1   the same  the same  the same  t + 2, t + 3  ..   t + 6, t + 7
//   of stretch  0          1         2         3         0             ..   3
//
// Barriers follow rules 1 and 2 of cuda/pipeline.cuh with two stages.
// One more barrier precedes each group of stretches, because the group's first copies overwrite the last tile.
// Shuffles sum the gradients of the filters over p, in a fixed order.
// Each part of the stretches has its own sums in `dfilters` (parts, 2, TAPS + 1, D). The biases follow the taps.
// `unpack_gradients` adds the sums of all parts. docs/kernels/block.md describes the layout of a CTA.
constexpr int LANE = VECTOR < 2 ? 1 : 2, SPAN = 8 * LANE * WARPS, STRETCHES = 4;
constexpr int TILE = 2 * STEP, ROWS = STRETCHES * TILE;  // TILE: number of tokens of each stretch in a tile
constexpr int PRODUCTS = sizeof(Element) == 2 ? (PROJECTIONS + 15) / 16 : 0;
static_assert(PROJECTIONS % 8 == 0);
// PITCH and PROJECTED_PITCH are chosen so that simultaneous accesses use different banks.
constexpr int PITCH = SPAN + 16 / sizeof(Element), PROJECTED_PITCH = PRODUCTS * 16 + 8;
struct Tile {
    Element u[ROWS][PITCH], dv[2][ROWS][PITCH], dprojected[2][ROWS][PROJECTED_PITCH];
};
static_assert(2 * sizeof(Tile) == CTA_BYTES);

// The product of dprojected and x_proj for both directions, the lane's channels and two tokens.
template <class T, int PRODUCTS>
struct Product {
    unsigned x_proj[2][PRODUCTS][4];  // operand a of `multiply_add`, whose rows l / 4 and l / 4 + 8 are channels
    INLINE Product(const T *from, i64 d, i64 D) {
        UNROLLED for (int i = 0; i < 2 * PRODUCTS * 4; i++) {
            int g = i / (PRODUCTS * 4), k = i / 4 % PRODUCTS, word = i % 4, c = word % 2;
            int row = k * 16 + word / 2 * 8 + threadIdx.x % 4 * 2;
            T low = {}, high = {};
            if (c < LANE && d < D && row < PROJECTIONS) {
                const T *x = from + (g * PROJECTIONS + row) * D + d + c;
                low = x[0], high = x[D];
            }
            x_proj[g][k][word] = low.bits | unsigned(high.bits) << 16;
        }
    }
    // Adds the product for the tokens in 8 rows, starting with `row`.
    INLINE void add_to(Floats<2> (&sums)[2][2], const Tile &tile, int row) const {
        int lane = threadIdx.x % 32;
        const T *from = &tile.dprojected[lane / 16][row + lane % 8][lane / 8 % 2 * 8];
        UNROLLED for (int k = 0; k < PRODUCTS; k++) {
            unsigned tokens[4];
            load_matrices(tokens, from + k * 16);
            UNROLLED for (int g = 0; g < 2; g++) {
                const unsigned *x = x_proj[g][k];
                multiply_add(T{}, sums[g], x[0], x[1], x[2], x[3], tokens[g * 2], tokens[g * 2 + 1]);
            }
        }
    }
};
template <class T>
struct Product<T, 0> {  // nothing to add, because dv already contains the product
    __device__ Product(const T *, i64, i64) {}
    __device__ void add_to(Floats<2> (&)[2][2], const Tile &, int) const {}
};

// All 128 threads copy a tile asynchronously. Missing tokens and columns become zeros.
// A thread copies V adjacent columns of every 8 V columns.
// A thread copies every 16th row from `first_row` on, which is every 4th token from t on.
template <int V, int COLUMNS, int PITCH>
DEVICE void copy_rows(Element (*to)[PITCH], const Element *from, i64 stride, int columns, int t, int tokens,
                      int first_row) {
    int row = threadIdx.x / 8, column = threadIdx.x % 8 * V;
    UNROLLED for (int j = 0; j < COLUMNS; j += 8 * V) {
        if (COLUMNS % (8 * V) && j + column >= COLUMNS) break;
        int copied = j + column < columns ? tokens : 0;
        UNROLLED for (int i = first_row; i < ROWS; i += 16)
            copy_async<V>(&to[row + i][j + column], from + i / 4 * stride + j, unsigned(t + i / 4) < unsigned(copied));
    }
}

// Source addresses of a thread for a group of stretches. The thread copies every fourth token of one stretch.
// Copies start at token t_0 for u and direction 0, and at token t_1 for direction 1.
struct Copies {
    const Element *u, *dv_0, *dv_1, *projected_0, *projected_1;
    i64 u_stride, D;
    // columns: number of columns from the CTA's first column on; length and read: numbers of tokens of u and of dv.
    int columns, length, read, t_0, t_1;
    INLINE void start(Tile &tile, int first_row) {
        copy_rows<VECTOR, SPAN>(tile.u, u, u_stride, columns, t_0, length, first_row);
        copy_rows<VECTOR, SPAN>(tile.dv[0], dv_0, D, columns, t_0, read, first_row);
        copy_rows<VECTOR, SPAN>(tile.dv[1], dv_1, D, columns, t_1, read, first_row);
        constexpr int P = PROJECTIONS;
        copy_rows<8, PRODUCTS * 16>(tile.dprojected[0], projected_0, P, P, t_0, read, first_row);
        copy_rows<8, PRODUCTS * 16>(tile.dprojected[1], projected_1, P, P, t_1, read, first_row);
        commit_copies();
        u += TILE * u_stride, dv_0 += TILE * D, dv_1 += TILE * D, t_0 += TILE, t_1 += TILE;
        projected_0 += TILE * PROJECTIONS, projected_1 += TILE * PROJECTIONS;
    }
};

// Filters of the lane's channels and their gradients, summed over all tokens of the lane, with biases last.
struct Filters {
    Filter<LANE> forward, backward;
    Floats<LANE> dforward[TAPS + 1] = {}, dbackward[TAPS + 1] = {};
    INLINE Filters(const float *weights, const float *biases, i64 d, i64 D)
        : forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d) {
        forward.scale(-LOG2E), backward.scale(-LOG2E);
    }
    // Sums over the stretches of lanes with the same channels, and undoes the scale of the filters.
    INLINE void store_gradients(float *to, i64 D, bool writes) {
        UNROLLED for (int tap = 0; tap <= TAPS; tap++) {
            UNROLLED for (int c = 0; c < LANE; c++) {
                dforward[tap].at[c] *= -LOG2E, dbackward[tap].at[c] *= -LOG2E;
                UNROLLED for (int distance = 1; distance < STRETCHES; distance *= 2) {
                    dforward[tap].at[c] += __shfl_xor_sync(WARP, dforward[tap].at[c], distance);
                    dbackward[tap].at[c] += __shfl_xor_sync(WARP, dbackward[tap].at[c], distance);
                }
            }
            if (writes) {
                store(to + tap * D, dforward[tap]);
                store(to + (TAPS + 1 + tap) * D, dbackward[tap]);
            }
        }
    }
};

// State of the lane's stretch: u, s_0 and s_1 of the previous tokens.
struct Stretch {
    Floats<LANE> window[BACK + STEP], s_0[BACK + STEP] = {}, s_1[BACK + STEP] = {};
    int quad, channel;
    // Reads u of the next STEP tokens, and sets s_0 and s_1 to dv + dprojected x_proj.
    INLINE void read(const Tile &tile, int first_row, const Product<Element, PRODUCTS> &product) {
        UNROLLED for (int pair = 0; pair < STEP / 2; pair++) {
            int row = first_row + pair * 8;
            Floats<2> sums[2][2] = {};
            UNROLLED for (int i = 0; i < 2; i++) {
                int at = row + quad * 2 + i;
                Floats<LANE> dv_0 = to_floats(load<LANE>(&tile.dv[0][at][channel]));
                Floats<LANE> dv_1 = to_floats(load<LANE>(&tile.dv[1][at][channel]));
                window[BACK + pair * 2 + i] = to_floats(load<LANE>(&tile.u[at][channel]));
                UNROLLED for (int c = 0; c < LANE; c++) sums[0][c].at[i] = dv_0.at[c], sums[1][c].at[i] = dv_1.at[c];
            }
            product.add_to(sums, tile, row);
            UNROLLED for (int i = 0; i < 2; i++)
                UNROLLED for (int c = 0; c < LANE; c++) {
                    s_0[BACK + pair * 2 + i].at[c] = sums[0][c].at[i];
                    s_1[BACK + pair * 2 + i].at[c] = sums[1][c].at[i];
                }
        }
    }
    // Multiplies s_0 and s_1 by silu', and computes du of STEP tokens.
    // If the tokens belong to the stretch (`own`), the function also adds their terms to the gradients of the filters.
    INLINE void work(Pack<Element, LANE> (&du)[STEP], Filters &filters, bool own) {
        UNROLLED for (int i = 0; i < STEP; i++) {
            Floats<LANE> sum = {};
            UNROLLED for (int c = 0; c < LANE; c++) {
                float sum_0 = filters.forward.bias.at[c], sum_1 = filters.backward.bias.at[c];
                UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                    sum_0 = fmaf(filters.forward.weight[tap][c], window[i + tap].at[c], sum_0);
                    sum_1 = fmaf(filters.backward.weight[tap][c], window[i + BACK - tap].at[c], sum_1);
                }
                s_0[BACK + i].at[c] *= scaled_slope(sum_0);
                s_1[BACK + i].at[c] *= scaled_slope(sum_1);
                if (!own) continue;
                UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                    float after = s_0[i + BACK - tap].at[c], before = s_1[i + tap].at[c];
                    filters.dforward[tap].at[c] = fmaf(window[i].at[c], after, filters.dforward[tap].at[c]);
                    filters.dbackward[tap].at[c] = fmaf(window[i].at[c], before, filters.dbackward[tap].at[c]);
                    sum.at[c] = fmaf(filters.forward.weight[tap][c], after, sum.at[c]);
                    sum.at[c] = fmaf(filters.backward.weight[tap][c], before, sum.at[c]);
                }
                filters.dforward[TAPS].at[c] += s_0[i].at[c];
                filters.dbackward[TAPS].at[c] += s_1[BACK + i].at[c];
            }
            du[i] = from_floats<Element>(sum);
        }
    }
    INLINE void move_on() {
        UNROLLED for (int i = 0; i < BACK; i++)
            window[i] = window[i + STEP], s_0[i] = s_0[i + STEP], s_1[i] = s_1[i + STEP];
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, PRODUCTS <= 5 ? 3 : 2)
conv_backward(PARAMETERS_conv_backward) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    Tile *tiles = reinterpret_cast<Tile *>(shared);
    int lane = threadIdx.x % 32, quad = lane % 4, channel = threadIdx.x / 4 * LANE;
    int blocks = (D + SPAN - 1) / SPAN, first_d = blockIdx.x % blocks * SPAN, part = blockIdx.x / blocks;
    int d = first_d + channel, loaded_d = min(d, int(D) - LANE);
    Product<Element, PRODUCTS> product(x_proj, d, D);
    Filters filters(weights, biases, loaded_d, D);
    int stretches = (L + stretch - 1) / stretch, items = B * stretches;
#pragma unroll 1
    for (int first = part * STRETCHES; first < items; first += int(parts) * STRETCHES) {
        // The thread copies the stretch with index `copied`.
        int row = threadIdx.x / 8, copied = first + row % 8 / 2;
        i64 copied_b = copied / stretches;
        int t = copied % stretches * int(stretch) - TILE + row / 8 * 2 + row % 2;
        int length = copied < items ? L : 0, read = copied < items ? H : 0, t_0 = t + BACK, t_1 = t - int(L - H);
        int c = first_d + threadIdx.x % 8 * VECTOR, p = threadIdx.x % 8 * 8;
        const Element *of_dv = dv + c, *of_projected = dprojected + p;
        i64 row_0 = copied_b * H + t_0, row_1 = (B + copied_b) * H + t_1;
        Copies copies = {
            u + (copied_b * L + t_0) * u_stride + c, of_dv + row_0 * D, of_dv + row_1 * D,
            of_projected + row_0 * PROJECTIONS, of_projected + row_1 * PROJECTIONS,
            u_stride, D, int(D) - first_d, length, read, t_0, t_1,
        };
        __syncthreads();  // no thread reads the previous group's tiles any more
        copies.start(tiles[0], ROWS / 2);
        int item = first + quad, begin = item % stretches * int(stretch);  // stretch that the lane processes
        int left = d < D && item < items ? min(int(stretch), int(L) - begin) : 0;  // number of tokens to store
        i64 b = item / stretches;
        Element *dus = du + (b * L + begin) * du_stride + d;
        InFlight<LANE, BACK> behind;
        behind.fetch(u + (b * L + begin - STEP) * u_stride + loaded_d, u_stride, begin - STEP, item < items ? L : 0);
        Stretch own;
        own.quad = quad, own.channel = channel;
        UNROLLED for (int i = 0; i < BACK; i++) own.window[i] = to_floats(behind.token[i]);
        int present = 1;
        // Waits for the next tile, and prefetches the following tile, which overwrites the previous tile.
        auto advance = [&]() {
            wait_for_copies<0>();
            __syncthreads();
            copies.start(tiles[present], 0);
            present ^= 1;
        };
        auto step = [&](int first_row, bool stores) {
            Pack<Element, LANE> found[STEP];
            own.read(tiles[present], first_row, product);
            own.work(found, filters, stores);
            if (stores) {
                UNROLLED for (int i = 0; i < STEP; i++, dus += du_stride)
                    if (i < left) store(dus, found[i]);
                left -= STEP;
            }
            own.move_on();
        };
        advance();
        step(ROWS / 2, false);
#pragma unroll 1
        for (int k = 0; k < int(stretch); k += TILE) {
            advance();
            step(0, true);
            if (k + STEP >= int(stretch)) break;
            step(ROWS / 2, true);
        }
        wait_for_copies<0>();  // waits for the copies of a tile that no lane reads
    }
    filters.store_gradients(dfilters + part * 2 * (TAPS + 1) * D + d, D, quad == 0 && d < D);
}
