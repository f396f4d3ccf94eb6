// The gradients of the projection from the step's R columns to the D logits, for 16-bit types, in one pass over dlogits,
// the largest of its tensors: dstep = dlogits step_proj, which goes into dprojected next to dk and dq, and
// dstep_proj = dlogits^T step.
// Compiled by NVRTC with these macros:
//   INPUT     element type of the tensors: bf16 or fp16
//   CHANNELS  of D, that a CTA has: a multiple of 16 WARPS, for whose part of the weights a warp has registers
//   SLICES    D / CHANNELS
//   STAGES    tiles of tokens on their way to shared memory at once, and that which is worked on
//   RANK      columns of step_proj, R, a multiple of 8
//   STATES    columns of dk and of dq, N, a multiple of 4

#include "../cuda/types.cuh"

typedef INPUT T;

// A block takes TILE tokens of one direction after another, of which the next STAGES - 1 tiles are on their way to shared
// memory. A warp has WIDTH of the channels: of dstep_proj, a sum over the block's tokens, in registers until the end; of
// dstep, a sum over channels, as a part that the warps leave in shared memory and add after the next barrier.
constexpr int TILE = 16, WARPS = 8, WIDTH = CHANNELS / WARPS, THREADS = 32 * WARPS;
constexpr int D = CHANNELS * SLICES;
constexpr int SIXTEENS = WIDTH / 16, EIGHTS = RANK / 8, PROJECTIONS = RANK + 2 * STATES;
constexpr int PITCH = CHANNELS + 8, STEP_PITCH = RANK % 16 == 0 ? RANK + 8 : RANK;  // 8 rows of 16 bytes in different banks
struct Stage {
    T dlogits[TILE][PITCH], step[TILE][STEP_PITCH];
};
struct Block {
    Stage stages[STAGES];
    float dstep[2][WARPS][TILE][RANK];
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
step_backward(const T *__restrict__ dlogits, const T *__restrict__ step, i64 step_stride, i64 step_directions,
              const T *__restrict__ step_proj, const T *__restrict__ dk, const T *__restrict__ dq,
              T *__restrict__ dprojected, float *__restrict__ dsteps, float *__restrict__ dstep_proj, i64 tokens,
              i64 parts) {
    extern __shared__ __align__(16) char shared[];
    Block &block = *reinterpret_cast<Block *>(shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = blockIdx.x % SLICES;
    int part = blockIdx.x / SLICES % parts, g = blockIdx.x / SLICES / parts;
    int all = tokens, tiles = (all + TILE - 1) / TILE, first_channel = warp * WIDTH;
    dlogits += g * tokens * D + slice * CHANNELS, step += g * step_directions;
    step_proj += (g * D + slice * CHANNELS) * RANK, dsteps += i64(g * SLICES + slice) * tokens * RANK;
    dk += g * tokens * STATES, dq += g * tokens * STATES, dprojected += g * tokens * PROJECTIONS;
    dstep_proj += ((i64(g) * parts + part) * D + slice * CHANNELS) * RANK;

    auto fetch = [&](Stage &stage, int tile) {
        constexpr int PIECES = CHANNELS / 8;  // of a token; in memory those of a tile are neighbours, if there is one slice
        const T *from = dlogits + i64(tile) * TILE * D;
#pragma unroll
        for (int item = 0; item < TILE * PIECES / THREADS; item++) {
            int i = item * THREADS + threadIdx.x, row = i / PIECES;
            copy_async<8>(&stage.dlogits[row][i % PIECES * 8], from + (row * (D - CHANNELS) + i * 8), tile * TILE + row < all);
        }
        if (int row = threadIdx.x / EIGHTS, c = threadIdx.x % EIGHTS * 8; row < TILE)
            copy_async<8>(&stage.step[row][c], step + i64(tile * TILE + row) * step_stride + c, tile * TILE + row < all);
        commit_copies();
    };
    // step_proj of the warp's channels as the second factor of products
    unsigned weights[SIXTEENS][EIGHTS][2];
#pragma unroll
    for (int k = 0; k < SIXTEENS; k++)
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const T *p = step_proj + (first_channel + k * 16 + half * 8 + lane % 4 * 2) * RANK + n * 8 + lane / 4;
                weights[k][n][half] = p[0].bits | unsigned(p[RANK].bits) << 16;
            }
    auto write_dstep = [&](int tile, const float (*dstep)[TILE][RANK]) {
#pragma unroll
        for (int item = threadIdx.x; item < TILE * RANK / 2; item += THREADS) {
            int row = item / (RANK / 2), r = item % (RANK / 2) * 2;
            Floats<2> sum = load<2>(&dstep[0][row][r]);
#pragma unroll
            for (int w = 1; w < WARPS; w++) sum = sum + load<2>(&dstep[w][row][r]);
            if (i64 token = i64(tile) * TILE + row; token < all) {
                if (SLICES == 1)
                    store(dprojected + token * PROJECTIONS + r, from_floats<T>(sum));
                else
                    store(dsteps + token * RANK + r, sum);
            }
        }
    };
    // dk and dq of a tile, 4 neighbours at a time, on their way during the tile before
    constexpr int KEYS = TILE * STATES / 2, ITEMS = (KEYS + THREADS - 1) / THREADS;
    Pack<T, 4> dkeys[ITEMS];
    auto is_key = [&](int tile, int i) {
        return SLICES == 1 && (KEYS % THREADS == 0 || i < KEYS) && tile * TILE + i / (STATES / 2) < all;
    };
    auto read_dkeys = [&](int tile) {
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            int i = item * THREADS + threadIdx.x, n = i % (STATES / 2) * 4;
            const T *from = (n < STATES ? dk : dq) + i64(tile * TILE + i / (STATES / 2)) * STATES;
            if (is_key(tile, i)) dkeys[item] = load<4>(from + n % STATES);
        }
    };
    auto write_dkeys = [&](int tile) {
#pragma unroll
        for (int item = 0; item < ITEMS; item++) {
            int i = item * THREADS + threadIdx.x, n = i % (STATES / 2) * 4;
            T *to = dprojected + i64(tile * TILE + i / (STATES / 2)) * PROJECTIONS + RANK;
            if (is_key(tile, i)) store(to + n, dkeys[item]);
        }
    };

    Floats<2> dweights[SIXTEENS][EIGHTS][2] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(block.stages[s], part + s * int(parts));
    int i = 0;
    read_dkeys(part);
#pragma unroll 1
    for (int tile = part; tile < tiles; tile += int(parts), i++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        fetch(block.stages[(i + STAGES - 1) % STAGES], tile + (STAGES - 1) * int(parts));
        if (i > 0) write_dstep(tile - int(parts), block.dstep[(i - 1) % 2]);
        const Stage &stage = block.stages[i % STAGES];
        unsigned steps[EIGHTS + EIGHTS % 2][2];
#pragma unroll
        for (int n = 0; n < EIGHTS; n += 2) {
            unsigned word[4];
            load_transposed(word, &stage.step[lane % 16][min(n + lane / 16, EIGHTS - 1) * 8]);
            steps[n][0] = word[0], steps[n][1] = word[1], steps[n + 1][0] = word[2], steps[n + 1][1] = word[3];
        }
        Floats<2> dstep[EIGHTS][2] = {};
#pragma unroll
        for (int k = 0; k < SIXTEENS; k++) {
            unsigned rows[4], columns[4];
            load_matrices(rows, &stage.dlogits[lane % 16][first_channel + k * 16 + lane / 16 * 8]);
            load_transposed(columns,
                            &stage.dlogits[lane / 16 * 8 + lane % 8][first_channel + k * 16 + lane / 8 % 2 * 8]);
#pragma unroll
            for (int n = 0; n < EIGHTS; n++) {
                multiply_add(T{}, dstep[n], rows[0], rows[1], rows[2], rows[3], weights[k][n][0], weights[k][n][1]);
                multiply_add(T{}, dweights[k][n], columns[0], columns[1], columns[2], columns[3], steps[n][0],
                             steps[n][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store(&block.dstep[i % 2][warp][half * 8 + lane / 4][n * 8 + lane % 4 * 2], dstep[n][half]);
        write_dkeys(tile);
        read_dkeys(tile + int(parts));
    }
    wait_for_copies<0>();  // of tiles that do not exist
    __syncthreads();
    if (i > 0) write_dstep(part + (i - 1) * int(parts), block.dstep[(i - 1) % 2]);
#pragma unroll
    for (int k = 0; k < SIXTEENS; k++)
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store(dstep_proj + (first_channel + k * 16 + half * 8 + lane / 4) * RANK + n * 8 + lane % 4 * 2,
                      dweights[k][n][half]);
}

// dprojected where the channels are in SLICES: the sums over them, which step_backward leaves as dsteps (2, SLICES, tokens,
// RANK), rounded, next to dk and dq. A thread takes 4 neighbouring columns of a token.
extern "C" __global__ void __launch_bounds__(THREADS)
join_slices(const float *__restrict__ dsteps, const T *__restrict__ dk, const T *__restrict__ dq,
            T *__restrict__ dprojected, i64 tokens) {
    constexpr int FOURS = PROJECTIONS / 4;
    i64 item = blockIdx.x * i64(THREADS) + threadIdx.x, token = item / FOURS;  // of both directions
    int c = item % FOURS * 4;
    if (token >= 2 * tokens) return;
    Pack<T, 4> found;
    if (c < RANK) {
        i64 g = token / tokens;
        const float *from = dsteps + (g * SLICES * tokens + token % tokens) * RANK + c;
        Floats<4> sum = load<4>(from);
#pragma unroll
        for (int slice = 1; slice < SLICES; slice++) sum = sum + load<4>(from + slice * tokens * RANK);
        found = from_floats<T>(sum);
    } else {
        int n = c - RANK;
        found = load<4>((n < STATES ? dk : dq) + token * STATES + n % STATES);
    }
    store(dprojected + token * PROJECTIONS + c, found);
}
