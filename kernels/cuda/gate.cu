// The gradient of the gate, and the product that comes before it in backward: dgated = dout out_proj, for 16-bit types,
// which never leaves the chip.
// Compiled by NVRTC with these macros:
//   INPUT     element type of the tensors: bf16 or fp16
//   WIDTH     model width C, a multiple of DEPTH
//   CHANNELS  inner width D, a multiple of COLUMNS
//
// A block has ROWS tokens and COLUMNS channels, of which a warp has a quarter of a half. Both factors come by DEPTH of the
// sum's terms, STAGES - 1 of them ahead. Two blocks share a multiprocessor, so that one multiplies while the other one,
// whose sums then lie in shared memory, reads and writes whole rows.

typedef INPUT T;
constexpr int ROWS = 128, COLUMNS = 128, DEPTH = 32, STAGES = 4, WARPS = 8, THREADS = 32 * WARPS;
// 8 rows of 16 bytes, which are read at once, are in different banks
struct Stage {
    T dout[ROWS][DEPTH + 8], out_proj[DEPTH][COLUMNS + 8];
};
union Block {
    Stage stages[STAGES];
    T dgated[ROWS][COLUMNS + 8];
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
product_and_gate_backward(const T *__restrict__ dout, const T *__restrict__ out_proj, const T *__restrict__ means,
                          const T *__restrict__ z, i64 z_stride, const float *__restrict__ scales, T *__restrict__ dy,
                          i64 dy_stride, T *__restrict__ dz, i64 dz_stride, T *__restrict__ gated, i64 tokens, i64 L) {
    extern __shared__ __align__(16) char shared[];
    Block &block = *reinterpret_cast<Block *>(shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first_channel = blockIdx.x % (CHANNELS / COLUMNS) * COLUMNS, first_row = warp / 4 * 64, first_column = warp % 4 * 32;
    i64 first_token = blockIdx.x / (CHANNELS / COLUMNS) * i64(ROWS);
    int there = min(tokens - first_token, i64(ROWS));
    dout += first_token * WIDTH, out_proj += first_channel;

    auto fetch = [&](int step) {
        Stage &stage = block.stages[step % STAGES];
        if (step < WIDTH / DEPTH) {
#pragma unroll
            for (int i = threadIdx.x; i < ROWS * DEPTH / 8; i += THREADS) {
                int row = i / (DEPTH / 8), c = i % (DEPTH / 8) * 8;
                copy_async<8>(&stage.dout[row][c], dout + row * WIDTH + step * DEPTH + c, row < there);
            }
#pragma unroll
            for (int i = threadIdx.x; i < DEPTH * COLUMNS / 8; i += THREADS) {
                int row = i / (COLUMNS / 8), c = i % (COLUMNS / 8) * 8;
                copy_async<8>(&stage.out_proj[row][c], out_proj + (step * DEPTH + row) * CHANNELS + c, true);
            }
        }
        commit_copies();
    };
    Floats<2> sums[4][4][2] = {};  // of 16 rows by 8 columns
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(s);
#pragma unroll 1
    for (int step = 0; step < WIDTH / DEPTH; step++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        fetch(step + STAGES - 1);
        const Stage &stage = block.stages[step % STAGES];
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            unsigned rows[4][4], columns[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                load_matrices(rows[i], &stage.dout[first_row + i * 16 + lane % 16][k + lane / 16 * 8]);
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrices_transposed(columns[j],
                                         &stage.out_proj[k + lane % 16][first_column + j * 16 + lane / 16 * 8]);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_add(T{}, sums[i][j], rows[i][0], rows[i][1], rows[i][2], rows[i][3],
                                 columns[j / 2][j % 2 * 2], columns[j / 2][j % 2 * 2 + 1]);
        }
    }
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store(&block.dgated[first_row + i * 16 + half * 8 + lane / 4][first_column + j * 8 + lane % 4 * 2],
                      from_floats<T>(sums[i][j][half]));
    __syncthreads();

    constexpr int V = COLUMNS / 32, TOGETHER = 4;
    i64 d = first_channel + lane * V;
    means += first_token * CHANNELS + d, gated += first_token * CHANNELS + d;
    z += first_token * z_stride + d, dy += first_token * dy_stride + d, dz += first_token * dz_stride + d;
#pragma unroll 1
    for (int first = warp; first < there; first += TOGETHER * WARPS) {
        Pack<T, V> mean[TOGETHER], zs[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (int row = first + i * WARPS; row < there)
                mean[i] = load<V>(means + row * CHANNELS), zs[i] = load<V>(z + row * z_stride);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (int row = first + i * WARPS; row < there) {
                float scale = scales ? scales[(first_token + row) / L] : 1;
                GateGradient<V> gradient(to_floats(load<V>(&block.dgated[row][lane * V])), to_floats(mean[i]),
                                         to_floats(zs[i]), scale);
                store(dy + row * dy_stride, from_floats<T>(gradient.dy));
                store(dz + row * dz_stride, from_floats<T>(gradient.dz));
                store(gated + row * CHANNELS, from_floats<T>(gradient.gated));
            }
    }
}
