// The gate and the product with out_proj in one kernel, for 16-bit types.
// Compiled by NVRTC with these macros:
//   INPUT  element type of the tensors: bf16 or fp16; the residual stream is in fp32
//   WIDTH  model width C, the outputs: 192 or 384
//
// L tokens of a sequence    C outputs    D channels

#include "gate.cuh"

typedef INPUT T;
constexpr int C = WIDTH, D = 2 * C;

// out = x + gated out_proj^T in fp32, gated = scale mean silu(z), where mean = (y_0 + y_1) / 2 and scale is the
// stochastic depth of the image. `means` is null if no gradient is needed.
struct GatedEight {
    Pack<T, 8> gated, mean;
};
DEVICE GatedEight gate(Pack<T, 8> y_0, Pack<T, 8> y_1, Pack<T, 8> z, float scale) {
    GatedEight found;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        Gated two = gate<T>(y_0.word[w], y_1.word[w], z.word[w], scale);
        found.gated.word[w] = two.gated, found.mean.word[w] = two.mean;
    }
    return found;
}

// A load that is issued where it stands: the compiler moves others behind the barrier that follows
DEVICE Pack<T, 8> load_here(const T *p) {
    Pack<T, 8> v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(p));
    return v;
}

// A block takes TOKENS at a time with all outputs, one CHUNK of channels after another: its threads gate what they have
// read of y and z, and then its warps, in two rows of six, multiply what all of them have gated, while y, z and the
// weights of the next chunk are on their way.
constexpr int CHUNK = 64, CHUNKS = D / CHUNK;
constexpr int TILES = 3, COLUMNS = 6, THREADS = 2 * COLUMNS * 32;  // 16 tokens each, of a warp; warps of a row
constexpr int TOKENS = 2 * TILES * 16, PAIRS = C / COLUMNS / 16;   // of eight outputs, of a warp
constexpr int EIGHTS_AT_ONCE = C <= 192 ? 3 : 1;  // rows of x on their way, for which there are registers
constexpr int PITCH = CHUNK + 8;  // for which 8 rows of 16 bytes are in different banks
constexpr int PIECES = CHUNK / 8, AT_ONCE = THREADS / PIECES, ITEMS = TOKENS / AT_ONCE;
static_assert(CHUNKS % 2 == 0 && AT_ONCE % 16 == 0 && C % AT_ONCE == 0);
struct Stage {
    T gated[TOKENS][PITCH], weights[C][PITCH];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
gated_product(const T *__restrict__ y, const T *__restrict__ z, i64 z_stride, const float *__restrict__ scales,
              const T *__restrict__ out_proj, const float *__restrict__ x, float *__restrict__ out,
              Pack<T, 8> *__restrict__ means, i64 tokens, i64 length) {
    extern __shared__ __align__(16) char shared[];
    Stage *stages = reinterpret_cast<Stage *>(shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, L = length;
    int all = tokens, tiles = (all + TOKENS - 1) / TOKENS;

    // a thread gates 8 neighbouring channels of every AT_ONCE-th token
    int piece = threadIdx.x % PIECES * 8, row = threadIdx.x / PIECES, first_token, left;  // from that on
    i64 at;
    float scale[ITEMS];
    Pack<T, 8> y_0[ITEMS] = {}, y_1[ITEMS] = {}, zs[ITEMS] = {};
    auto aim = [&](int tile) {
        int token = tile * TOKENS + row;
        left = all - token, at = i64(token) * D + piece, first_token = token;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            scale[i] = scales && i * AT_ONCE < left ? scales[(token + i * AT_ONCE) / L] : 1;
    };
    auto read = [&](int chunk) {
        const T *from_0 = y + at + chunk * CHUNK, *from_1 = from_0 + tokens * D;
        const T *from_z = z + first_token * z_stride + piece + chunk * CHUNK;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (i * AT_ONCE < left) {
                y_0[i] = load_here(from_0 + i * AT_ONCE * D), y_1[i] = load_here(from_1 + i * AT_ONCE * D);
                zs[i] = load_here(from_z + i * AT_ONCE * z_stride);
            }
    };
    auto gate_all = [&](Stage &stage, int chunk) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            GatedEight g = gate(y_0[i], y_1[i], zs[i], scale[i]);
            store(&stage.gated[row + i * AT_ONCE][piece], g.gated);
            if (means && i * AT_ONCE < left) means[(at + i * AT_ONCE * D + chunk * CHUNK) / 8] = g.mean;
        }
    };
    int w_from = row * D + piece, w_to = place_of(row) * PITCH + piece;
    auto fetch = [&](Stage &stage, int chunk) {
        T *to = &stage.weights[0][0] + w_to;
        const T *from = out_proj + w_from + chunk * CHUNK;
#pragma unroll
        for (int i = 0; i < C; i += AT_ONCE) copy_async<8>(to + i * PITCH, from + i * D, true);
        commit_copies();
    };

    int first_row = warp % 2 * TILES * 16, first_column = warp / 2 * PAIRS * 16;
    aim(blockIdx.x);
    read(0);
    fetch(stages[0], 0);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        Floats<2> sums[TILES][2 * PAIRS][2] = {};
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            Stage &stage = stages[chunk % 2];
            int next = chunk + 1 < CHUNKS ? chunk + 1 : 0;
            asm("" : "+r"(next));  // or registers would hold what follows from it
            gate_all(stage, chunk);
            if (next == 0) aim(tile + gridDim.x);
            read(next);
            wait_for_copies<0>();
            __syncthreads();
#pragma unroll
            for (int k = 0; k < CHUNK; k += 16) {
                if (k == 16) fetch(stages[(chunk + 1) % 2], next);  // the first products do not wait for its copies
                unsigned a[TILES][4];
#pragma unroll
                for (int m = 0; m < TILES; m++)
                    load_matrices(a[m], &stage.gated[first_row + m * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
                for (int n = 0; n < PAIRS; n++) {
                    unsigned b[4];
                    int column = first_column + n * 16 + lane / 16 * 8 + lane % 8;
                    load_matrices(b, &stage.weights[column][k + lane / 8 % 2 * 8]);
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        multiply_add(T{}, sums[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                        multiply_add(T{}, sums[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                    }
                }
            }
        }
        int first = tile * TOKENS + first_row + lane / 4;
        i64 to = i64(first) * C + first_column + lane % 4 * 4;
#pragma unroll
        for (int start = 0; start < 2 * TILES; start += EIGHTS_AT_ONCE) {
            if (first + start * 8 >= all) break;
            Floats<4> residual[EIGHTS_AT_ONCE][PAIRS] = {};
#pragma unroll
            for (int i = 0; i < EIGHTS_AT_ONCE; i++)
#pragma unroll
                for (int n = 0; n < PAIRS; n++)
                    if (int r = start + i; first + r * 8 < all)
                        residual[i][n] = load<4>(x + to + (r * 8 * C + n * 16));
#pragma unroll
            for (int i = 0; i < EIGHTS_AT_ONCE; i++)
#pragma unroll
                for (int n = 0; n < PAIRS; n++) {
                    int r = start + i;
                    Floats<2> low = sums[r / 2][2 * n][r % 2], high = sums[r / 2][2 * n + 1][r % 2];
                    Floats<4> sum{low.at[0], low.at[1], high.at[0], high.at[1]};
                    if (first + r * 8 < all) store(out + to + (r * 8 * C + n * 16), residual[i][n] + sum);
                }
        }
    }
    wait_for_copies<0>();  // of a tile that does not exist
}

// The same for few tokens, where latency counts: a block has 16 of them and FEW_OUTPUTS, and each of its warps EACH
// channels, all on their way at once. A lane gates them where the tensor cores want them: it has channels
// 8 (l % 4) .. + 7 of 32, which are columns of two products in another order.
constexpr int FEW_OUTPUTS = 48, EACH = 64, WARPS = D / EACH;

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
gated_product_of_few(const T *__restrict__ y, const T *__restrict__ z, i64 z_stride, const float *__restrict__ scales,
                     const T *__restrict__ out_proj, const float *__restrict__ x, float *__restrict__ out,
                     Pack<T, 8> *__restrict__ means, i64 tokens, i64 length) {
    constexpr int THIRTY_TWOS = EACH / 32, EIGHTS = FEW_OUTPUTS / 8;
    __shared__ float parts[WARPS][16][FEW_OUTPUTS + 8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = tokens, L = length;
    int tile = blockIdx.x / (C / FEW_OUTPUTS) * 16, output = blockIdx.x % (C / FEW_OUTPUTS) * FEW_OUTPUTS;
    int d = warp * EACH + lane % 4 * 8;
    Pack<T, 8> y_0[2][THIRTY_TWOS], y_1[2][THIRTY_TWOS], zs[2][THIRTY_TWOS], weights[EIGHTS][THIRTY_TWOS];
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int token = min(tile + half * 8 + lane / 4, all - 1);
        scale[half] = scales ? scales[token / L] : 1;
        const T *from = y + (token * D + d), *from_z = z + (token * z_stride + d);
#pragma unroll
        for (int i = 0; i < THIRTY_TWOS; i++) {
            y_0[half][i] = load<8>(from + i * 32), y_1[half][i] = load<8>(from + tokens * D + i * 32);
            zs[half][i] = load<8>(from_z + i * 32);
        }
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int i = 0; i < THIRTY_TWOS; i++)
            weights[n][i] = load<8>(out_proj + ((output + n * 8 + lane / 4) * D + d + i * 32));

    Floats<2> sums[EIGHTS][2] = {};
#pragma unroll
    for (int i = 0; i < THIRTY_TWOS; i++) {
        Pack<T, 8> a[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            GatedEight g = gate(y_0[half][i], y_1[half][i], zs[half][i], scale[half]);
            a[half] = g.gated;
            int token = tile + half * 8 + lane / 4;
            if (means && output == 0 && token < all) means[(token * D + d + i * 32) / 8] = g.mean;
        }
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int w = 0; w < 4; w += 2)
                multiply_add(T{}, sums[n], a[0].word[w], a[1].word[w], a[0].word[w + 1], a[1].word[w + 1],
                             weights[n][i].word[w], weights[n][i].word[w + 1]);
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            store(&parts[warp][half * 8 + lane / 4][n * 8 + lane % 4 * 2], sums[n][half]);
    __syncthreads();
    constexpr int FOURS = FEW_OUTPUTS / 4;
    static_assert(16 * FOURS <= 32 * WARPS);
    int row = threadIdx.x / FOURS, c = threadIdx.x % FOURS * 4;
    if (row < 16 && tile + row < all) {
        int at = (tile + row) * C + output + c;
        Floats<4> sum = load<4>(x + at);
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum = sum + load<4>(&parts[w][row][c]);
        store(out + at, sum);
    }
}
