// Gate, product with out_proj, residual addition and the norm behind them in one kernel, for 16-bit types on Hopper.
// Compiled by NVRTC with these macros:
//   INPUT    element type of the tensors: bf16 or fp16; the residual stream is in fp32
//   WIDTH    model width C, the outputs: 192 or 384
//   KEEP     whether to write the means that backward needs
//   STAGES   copies of STEP channels of the weights on their way at once
//   SLOTS    the same of a group's y and z, or x
//
// L tokens of a sequence    C outputs    D channels

#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "gate.cuh"

typedef INPUT T;
constexpr int C = WIDTH, D = 2 * C;

// A block has two groups of four warps. A group has up to 64 tokens with all outputs in registers, as its warps have 16 rows
// each. They gate y and z where wgmma wants them, add x, and have whole rows of the result to norm. Three other warps
// copy: y, z and then x through the slots of each group, and the weights through stages, which both groups read. The outputs
// leave registers for one block on a multiprocessor, so its copies go on, to the next tokens, while a result is written.
constexpr int ROWS = 64, CHUNK = 64, CHUNKS = D / CHUNK;  // tokens of a group, channels in a slot
constexpr int TENSOR = ROWS * CHUNK * 2, SLOT = 3 * TENSOR;
constexpr int PART = SLOT / (ROWS * 4), PARTS = C / PART;  // columns of x in a slot
constexpr int STAGE = C * STEP * 2, HALVES = C / 192;
static_assert(CHUNK % STEP == 0 && C % PART == 0 && PART % 32 == 0);

// A group of a block takes up to `tokens_of_group` tokens at a time, and all groups do so `rounds` times. `norms` are the
// factors of rms_norm, xhat its result; both may be null. z is the last half of rows of 2 D.
extern "C" __global__ void __launch_bounds__(384, 1)
gated_product_by_wgmma(const T *__restrict__ y, const T *__restrict__ z, const float *__restrict__ scales,
                       const T *__restrict__ tiles, const float *__restrict__ x, float *__restrict__ out,
                       T *__restrict__ means, T *__restrict__ xhat, float *__restrict__ norms, double eps, i64 tokens,
                       i64 length, i64 tokens_of_group, i64 rounds) {
    extern __shared__ __align__(1024) char shared[];
    unsigned weights = shared_address(shared), slots = weights + STAGES * STAGE, barriers = slots + 2 * SLOTS * SLOT;
    Ring<STAGES> stages(barriers + 4 * SLOTS * 8);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = tokens, most = tokens_of_group;
    int at_once = gridDim.x * 2 * most, limit = at_once * int(rounds);  // tokens of all blocks
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4 * SLOTS; i++) init_barrier(barriers + i * 8, i / SLOTS % 2 ? 4 : 32);
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(stages.barriers + i * 8, i / STAGES ? 8 : 1);
        publish_barriers();
    }
    __syncthreads();

    if (warp >= 8) {
        give_registers<40>();
        if (warp == 10 && lane == 0) {
#pragma unroll 1
            for (int of_block = blockIdx.x * 2 * most; of_block < limit; of_block += at_once)
#pragma unroll 1
                for (int step = 0; step < D / STEP; step++, stages.next()) {
                    wait_for(stages.empty(), stages.phase() ^ 1);
                    arrive_and_expect(stages.full(), STAGE);
                    copy_bulk(weights + stages.place() * STAGE, tiles + step * C * STEP, STAGE, stages.full());
                }
        } else if (warp < 10) {
            int g = warp - 8, row = lane / 8, piece = lane % 8;  // a thread has 16 bytes of every fourth row
            Ring<SLOTS> ring(barriers + g * 2 * SLOTS * 8);
            slots += g * SLOTS * SLOT;
            unsigned to_yz = row * CHUNK * 2 + (piece ^ row) * 16, to_x = row * PART * 4 + (piece ^ row % 2 * 4) * 16;
#pragma unroll 1
            for (int of_group = (blockIdx.x * 2 + g) * most; of_group < limit; of_group += at_once) {
                int first = of_group + row, end = min(of_group + most, all);
#pragma unroll 1
                for (int chunk = 0; chunk < CHUNKS; chunk++, ring.next()) {
                    wait_for(ring.empty(), ring.phase() ^ 1);
                    unsigned to = slots + ring.place() * SLOT + to_yz;
                    const T *y_0 = y + (i64(first) * D + chunk * CHUNK + piece * 8), *y_1 = y_0 + tokens * D;
                    const T *from_z = z + (i64(first) * (2 * D) + chunk * CHUNK + piece * 8);
#pragma unroll 2
                    for (int token = first; token < end; token += 4) {
                        copy_16_async(to, y_0), copy_16_async(to + TENSOR, y_1), copy_16_async(to + 2 * TENSOR, from_z);
                        to = to + 4 * CHUNK * 2 ^ 4 * 16, y_0 += 4 * D, y_1 += 4 * D, from_z += 4 * 2 * D;
                    }
                    arrive_when_copied(ring.full());
                }
#pragma unroll 1
                for (int part = 0; part < PARTS; part++, ring.next()) {
                    wait_for(ring.empty(), ring.phase() ^ 1);
                    unsigned to = slots + ring.place() * SLOT + to_x;
                    const float *from = x + (i64(first) * C + part * PART + piece * 4);
#pragma unroll 2
                    for (int token = first; token < end; token += 4, to += 4 * PART * 4, from += 4 * C)
#pragma unroll
                        for (int c = 0; c < PART; c += 32) copy_16_async(to + c * 4, from + c);
                    arrive_when_copied(ring.full());
                }
            }
        }
        wait_for_all_copies();
    } else {
        take_registers<232>();
        int g = warp / 4, L = length;
        warp %= 4;
        int row = warp * 16 + lane / 4;
        Ring<SLOTS> ring(barriers + g * 2 * SLOTS * 8);
        slots += g * SLOTS * SLOT;
        // of the first channels or columns; as slots are at multiples of 1024 bytes, others are at this ^ theirs
        unsigned of_matrix = (warp * 16 + lane % 16) * CHUNK * 2 + (lane / 16 ^ lane % 8) * 16;
        unsigned of_word = row * CHUNK * 2 + lane / 4 * 16 + lane % 4 * 4;
        unsigned of_x = row * PART * 4 + (lane % 4 ^ lane / 4 % 2 * 4) * 16;
        float sums[HALVES][96];
        // of token lane / 4 + 8 i of the warp, columns n to n + 15: this lane's are 4 (l % 4) to + 3
        auto sum = [&](int i, int n, int c) -> float & {
            return sums[n / 192][n % 192 / 2 + c / 2 * 4 + i * 2 + c % 2];
        };
        for (int token = (blockIdx.x * 2 + g) * most + row; token < limit + row; token += at_once) {
            int end = min(token - row + most, all);
            float scale[2];
#pragma unroll
            for (int i = 0; i < 2; i++) scale[i] = scales && token + i * 8 < end ? scales[(token + i * 8) / L] : 1;
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; chunk++, ring.next()) {
                wait_for(ring.full(), ring.phase());
                unsigned slot = slots + ring.place() * SLOT, a[2][4];
#pragma unroll
                for (int k = 0; k < CHUNK / 16; k++) {
                    unsigned y_0[4], y_1[4], zs[4], from = slot + of_matrix ^ k * 32;
                    load_matrices(y_0, from), load_matrices(y_1, from + TENSOR), load_matrices(zs, from + 2 * TENSOR);
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        Gated found = gate<T>(y_0[w], y_1[w], zs[w], scale[w % 2]);
                        a[k % 2][w] = found.gated;
                        // the mean in place of y_0, from where whole lines go to memory
                        if (KEEP) store_shared((slot + of_word ^ k * 32 + w / 2 * 16) + w % 2 * 8 * CHUNK * 2, found.mean);
                    }
                    if (k == CHUNK / 16 - 1) {
                        __syncwarp();
                        if (KEEP)
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                int r = warp * 16 + i * 4 + lane / 8, of_row = token - row + r;
                                Pack<T, 8> mean;
                                load_shared(mean.word, slot + r * CHUNK * 2 + (lane % 8 ^ r % 8) * 16);
                                if (of_row < end) store(means + (i64(of_row) * D + chunk * CHUNK + lane % 8 * 8), mean);
                            }
                        __syncwarp();
                        if (lane == 0) arrive(ring.empty());
                    }
                    constexpr int KS = STEP / 16;
                    if (k % KS == 0) wait_for(stages.full(), stages.phase());
#pragma unroll
                    for (int h = 0; h < HALVES; h++) hold(sums[h]);
                    begin_products();
#pragma unroll
                    for (int h = 0; h < HALVES; h++)
                        multiply_group(T{}, sums[h], a[k % 2], weights + stages.place() * STAGE + h * 192 * STEP * 2 + k % KS * 32,
                                       chunk + k > 0);
                    commit_products();
                    wait_for_products<1>();  // those before
                    if (k % KS == 0 && chunk + k > 0 && lane == 0) arrive(stages.empty_before());
                    if (k % KS == KS - 1) stages.next();
                }
            }
            wait_for_products<0>();
#pragma unroll
            for (int h = 0; h < HALVES; h++) hold(sums[h]);
            if (lane == 0) arrive(stages.empty_before());

            i64 to = i64(token) * C + lane % 4 * 4;
#pragma unroll
            for (int part = 0; part < PARTS; part++, ring.next()) {
                wait_for(ring.full(), ring.phase());
#pragma unroll
                for (int n = 0; n < PART; n += 16)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        unsigned v[4];
                        load_shared(v, (slots + ring.place() * SLOT + of_x ^ n % 32 * 4) + n / 32 * 128 + i * 8 * PART * 4);
                        Floats<4> found;
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            found.at[c] = sum(i, part * PART + n, c) += __uint_as_float(v[c]);
                        if (token + i * 8 < end) store(out + (to + i * 8 * C + part * PART + n), found);
                    }
                __syncwarp();
                if (lane == 0) arrive(ring.empty());
            }
            if (!xhat) continue;
            asm("" : "+r"(token));  // or registers would hold what follows from it
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float squares[8] = {};  // which are added in the order of rms_norm
#pragma unroll
                for (int n = 0; n < C; n += 16)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        squares[n / 16 % 8] = fmaf(sum(i, n, c), sum(i, n, c), squares[n / 16 % 8]);
#pragma unroll
                for (int distance = 4; distance > 0; distance /= 2)
#pragma unroll
                    for (int n = 0; n < distance; n++) squares[n] += squares[n + distance];
#pragma unroll
                for (int distance = 2; distance > 0; distance /= 2)
                    squares[0] += __shfl_xor_sync(WARP, squares[0], distance);
                float r = rsqrtf(squares[0] / C + float(eps));
                if (token + i * 8 >= end) continue;
                if (lane % 4 == 0) norms[token + i * 8] = r;
#pragma unroll
                for (int n = 0; n < C; n += 16) {
                    Floats<4> found;
#pragma unroll
                    for (int c = 0; c < 4; c++) found.at[c] = r * sum(i, n, c);
                    store(xhat + (i64(token + i * 8) * C + lane % 4 * 4 + n), from_floats<T>(found));
                }
            }
        }
    }
}
