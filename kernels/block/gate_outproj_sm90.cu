// Gate, product with out_proj, residual addition and the norm behind them in one kernel, for 16-bit types on Hopper:
//
//   mean = (y_0 + y_1) / 2      gated = scale mean silu(z)      out = x + gated out_proj^T
//   norms = rsqrt(mean over C of out^2 + eps)                   xhat = norms out
//
// with the residual stream x, out in fp32 and scale the stochastic depth of the image. norms and xhat have the bits
// that `rms_norm` of pack.cu gives.
//
// Macros:
//   INPUT        element type of the other tensors: bf16 or fp16
//   WIDTH        model width C, the outputs: 192 or 384
//   KEEP         whether to write the means that backward needs
//   STAGES       K_TILEs of channels of the weights on their way at once
//   SLOTS        stages of a group's y and z, or x, on their way at once
//   BLOCK_BYTES  dynamic shared memory, as the host has counted it
//
// L tokens of a sequence    C outputs    D channels
//
// One CTA a multiprocessor, of 12 warps. A group of four consumer warps has up to 64 tokens with all outputs in
// registers, 16 rows of sums a warp, C / 2 floats a lane: so a warp has whole rows of the result to norm, and weights
// come from the L2 once for 128 tokens. There are two groups, and registers for no more, so that producer warps give up
// theirs.
//
//   warps 0 - 3, 4 - 7    consumers of group 0, of group 1
//   warps 8, 9            producers of group 0, 1: y_0, y_1 and z of its tokens, SLOT_CHANNELS channels a slot of the
//                         group; then x, PART columns a slot
//   warp 10, one lane     producer of the weights: K_TILE channels of all outputs a stage, which both groups read
//   warp 11               none: registers are given up by groups of four warps
//
//   mbarrier      arrivals a phase                                               means
//   slot full     32, each lane of the producer when its own copies have come    the slot may be read
//   slot empty    4, a lane of each consumer warp, behind __syncwarp             the slot may be overwritten
//   stage full    1, and the bytes of the bulk copy                              products may read the stage
//   stage empty   8, a lane of each consumer warp, when its products have read   the stage may be overwritten
//
// (cuda/pipeline.cuh says how these are waited for.) A warp gives a stage back one step late: wait_for_products<1>
// behind the next step's products says that all products but these have ended. a has two buffers for the same reason:
// the gate of one step is computed while the products of the step before read the other.
//
// Shared memory. Rows of y_0, y_1 and z in a slot are 128 bytes, SLOT_CHANNELS channels, their 16-byte pieces at piece ^
// row % 8, so that ldmatrix, which reads a piece of 8 rows, meets no bank twice. Of x rows have PART columns, pieces at
// piece ^ row % 2 * 4: lanes read four neighbouring pieces of each row. The mean takes the place of y_0 in the slot,
// from where it goes to memory in whole lines. Weights: `tiled` in gate.cuh.
//
// Registers (cuda/types.cuh; lane l, r = l / 4, p = l % 4). Of 16 rows, a of wgmma is as that of multiply_add, and so y
// and z come by ldmatrix, are gated word by word and multiplied. Sums too: of 8 columns lane l has 2p, 2p + 1 of rows r
// and r + 8. As `place_of` has put out_proj's rows, two such are outputs 16 j + 4p .. + 3: 16 bytes.

#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "gate.cuh"

typedef INPUT Element;
constexpr int C = WIDTH, D = 2 * C;

constexpr int GROUPS = 2, ROWS = 64;  // tokens of a group
constexpr int SLOT_CHANNELS = 64, YZ_SLOTS = D / SLOT_CHANNELS;      // of y and z in a slot; slots that they take
constexpr int TENSOR = ROWS * SLOT_CHANNELS * 2, SLOT = 3 * TENSOR;  // bytes
constexpr int PART = SLOT / (ROWS * 4), PARTS = C / PART;            // columns of x in a slot; slots that it takes
constexpr int STAGE = C * K_TILE * 2, HALVES = C / 192;              // bytes; products of 192 outputs
constexpr int K_STEPS = K_TILE / 16;
static_assert(SLOT_CHANNELS % K_TILE == 0 && C % PART == 0 && PART % 32 == 0);
// shared memory, bytes: weights, slots of each group, their barriers and those of the weights
constexpr int OF_SLOTS = STAGES * STAGE, OF_SLOT_BARRIERS = OF_SLOTS + GROUPS * SLOTS * SLOT;
constexpr int OF_STAGE_BARRIERS = OF_SLOT_BARRIERS + GROUPS * 2 * SLOTS * 8;
static_assert(OF_STAGE_BARRIERS + 2 * STAGES * 8 == BLOCK_BYTES);
static_assert(STAGE % 1024 == 0 && SLOT % 1024 == 0);  // which products and the ^ of addresses want

// A group takes up to `tokens_of_group` tokens at a time, and all groups do so `rounds` times. norms and xhat may be
// null. z is the last half of rows of 2 D.
extern "C" __global__ void __launch_bounds__(384, 1)
gate_outproj(const Element *__restrict__ y, const Element *__restrict__ z, const float *__restrict__ scales,
             const Element *__restrict__ tiles, const float *__restrict__ x, float *__restrict__ out,
             Element *__restrict__ means, Element *__restrict__ xhat, float *__restrict__ norms, double eps, i64 tokens,
             i64 length, i64 tokens_of_group, i64 rounds) {
    extern __shared__ __align__(1024) char shared[];
    unsigned weights = shared_address(shared), slots = weights + OF_SLOTS, barriers = weights + OF_SLOT_BARRIERS;
    Pipeline<STAGES> stages(weights + OF_STAGE_BARRIERS);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = tokens, most = tokens_of_group;
    int at_once = gridDim.x * GROUPS * most, limit = at_once * int(rounds);  // tokens of all blocks
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * 2 * SLOTS; i++) init_barrier(barriers + i * 8, i / SLOTS % 2 ? 4 : 32);
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(stages.barriers + i * 8, i / STAGES ? GROUPS * 4 : 1);
        publish_barriers();
    }
    __syncthreads();

    if (warp >= GROUPS * 4) {
        give_registers<40>();
        if (warp == 10 && lane == 0) {
#pragma unroll 1
            for (int of_block = blockIdx.x * 2 * most; of_block < limit; of_block += at_once)
#pragma unroll 1
                for (int step = 0; step < D / K_TILE; step++, stages.next()) {
                    wait_for(stages.empty(), stages.phase() ^ 1);
                    arrive_and_expect(stages.full(), STAGE);
                    copy_bulk(weights + stages.stage() * STAGE, tiles + step * C * K_TILE, STAGE, stages.full());
                }
        } else if (warp < 10) {
            int g = warp - 8, row = lane / 8, piece = lane % 8;  // a thread has 16 bytes of every fourth row
            Pipeline<SLOTS> inputs(barriers + g * 2 * SLOTS * 8);
            slots += g * SLOTS * SLOT;
            unsigned to_yz = row * SLOT_CHANNELS * 2 + (piece ^ row) * 16;
            unsigned to_x = row * PART * 4 + (piece ^ row % 2 * 4) * 16;
#pragma unroll 1
            for (int of_group = (blockIdx.x * 2 + g) * most; of_group < limit; of_group += at_once) {
                int first = of_group + row, end = min(of_group + most, all);
#pragma unroll 1
                for (int k_slot = 0; k_slot < YZ_SLOTS; k_slot++, inputs.next()) {
                    wait_for(inputs.empty(), inputs.phase() ^ 1);
                    unsigned to = slots + inputs.stage() * SLOT + to_yz;
                    int channel = k_slot * SLOT_CHANNELS + piece * 8;
                    const Element *y_0 = y + (i64(first) * D + channel), *y_1 = y_0 + tokens * D;
                    const Element *from_z = z + (i64(first) * (2 * D) + channel);
#pragma unroll 2
                    for (int token = first; token < end; token += 4) {
                        copy_16_async(to, y_0), copy_16_async(to + TENSOR, y_1), copy_16_async(to + 2 * TENSOR, from_z);
                        to = to + 4 * SLOT_CHANNELS * 2 ^ 4 * 16, y_0 += 4 * D, y_1 += 4 * D, from_z += 4 * 2 * D;
                    }
                    arrive_when_copied(inputs.full());
                }
#pragma unroll 1
                for (int part = 0; part < PARTS; part++, inputs.next()) {
                    wait_for(inputs.empty(), inputs.phase() ^ 1);
                    unsigned to = slots + inputs.stage() * SLOT + to_x;
                    const float *from = x + (i64(first) * C + part * PART + piece * 4);
#pragma unroll 2
                    for (int token = first; token < end; token += 4, to += 4 * PART * 4, from += 4 * C)
                        UNROLLED for (int c = 0; c < PART; c += 32) copy_16_async(to + c * 4, from + c);
                    arrive_when_copied(inputs.full());
                }
            }
        }
        wait_for_all_copies();
    } else {
        take_registers<232>();
        int g = warp / 4, L = length;
        warp %= 4;
        int row = warp * 16 + lane / 4;
        Pipeline<SLOTS> inputs(barriers + g * 2 * SLOTS * 8);
        slots += g * SLOTS * SLOT;
        // of the first channels or columns; as slots are at multiples of 1024 bytes, others are at this ^ theirs
        unsigned of_matrix = (warp * 16 + lane % 16) * SLOT_CHANNELS * 2 + (lane / 16 ^ lane % 8) * 16;
        unsigned of_word = row * SLOT_CHANNELS * 2 + lane / 4 * 16 + lane % 4 * 4;
        unsigned of_x = row * PART * 4 + (lane % 4 ^ lane / 4 % 2 * 4) * 16;
        float sums[HALVES][96];
        // of token lane / 4 + 8 i of the warp, columns n to n + 15: this lane's are 4 (l % 4) to + 3
        auto sum = [&](int i, int n, int c) -> float & {
            return sums[n / 192][n % 192 / 2 + c / 2 * 4 + i * 2 + c % 2];
        };
        for (int token = (blockIdx.x * 2 + g) * most + row; token < limit + row; token += at_once) {
            int end = min(token - row + most, all);
            float scale[2];
            UNROLLED for (int i = 0; i < 2; i++)
                scale[i] = scales && token + i * 8 < end ? scales[(token + i * 8) / L] : 1;
#pragma unroll 1
            for (int k_slot = 0; k_slot < YZ_SLOTS; k_slot++, inputs.next()) {
                wait_for(inputs.full(), inputs.phase());
                unsigned slot = slots + inputs.stage() * SLOT, a[2][4];
                UNROLLED for (int k = 0; k < SLOT_CHANNELS / 16; k++) {
                    unsigned y_0[4], y_1[4], zs[4], from = slot + of_matrix ^ k * 32;
                    load_matrices(y_0, from), load_matrices(y_1, from + TENSOR), load_matrices(zs, from + 2 * TENSOR);
                    UNROLLED for (int w = 0; w < 4; w++) {
                        Gated found = gate<Element>(y_0[w], y_1[w], zs[w], scale[w % 2]);
                        a[k % 2][w] = found.gated;
                        // the mean in place of y_0, from where whole lines go to memory
                        if (KEEP)
                            store_shared((slot + of_word ^ k * 32 + w / 2 * 16) + w % 2 * 8 * SLOT_CHANNELS * 2,
                                         found.mean);
                    }
                    if (k == SLOT_CHANNELS / 16 - 1) {
                        __syncwarp();
                        if (KEEP)
                            UNROLLED for (int i = 0; i < 4; i++) {
                                int r = warp * 16 + i * 4 + lane / 8, of_row = token - row + r;
                                Pack<Element, 8> mean;
                                load_shared(mean.word, slot + r * SLOT_CHANNELS * 2 + (lane % 8 ^ r % 8) * 16);
                                if (of_row < end)
                                    store(means + (i64(of_row) * D + k_slot * SLOT_CHANNELS + lane % 8 * 8), mean);
                            }
                        __syncwarp();
                        if (lane == 0) arrive(inputs.empty());
                    }
                    if (k % K_STEPS == 0) wait_for(stages.full(), stages.phase());
                    UNROLLED for (int h = 0; h < HALVES; h++) hold(sums[h]);
                    begin_products();
                    UNROLLED for (int h = 0; h < HALVES; h++)
                        multiply_group(
                            Element{}, sums[h], a[k % 2],
                            weights + stages.stage() * STAGE + h * 192 * K_TILE * 2 + k % K_STEPS * 32, k_slot + k > 0);
                    commit_products();
                    wait_for_products<1>();  // those before
                    if (k % K_STEPS == 0 && k_slot + k > 0 && lane == 0) arrive(stages.empty_before());
                    if (k % K_STEPS == K_STEPS - 1) stages.next();
                }
            }
            wait_for_products<0>();
            UNROLLED for (int h = 0; h < HALVES; h++) hold(sums[h]);
            if (lane == 0) arrive(stages.empty_before());

            i64 to = i64(token) * C + lane % 4 * 4;
            UNROLLED for (int part = 0; part < PARTS; part++, inputs.next()) {
                wait_for(inputs.full(), inputs.phase());
                UNROLLED for (int n = 0; n < PART; n += 16)
                    UNROLLED for (int i = 0; i < 2; i++) {
                        unsigned v[4];
                        unsigned from = slots + inputs.stage() * SLOT + of_x ^ n % 32 * 4;
                        load_shared(v, from + n / 32 * 128 + i * 8 * PART * 4);
                        Floats<4> found;
                        UNROLLED for (int c = 0; c < 4; c++)
                            found.at[c] = sum(i, part * PART + n, c) += __uint_as_float(v[c]);
                        if (token + i * 8 < end) store(out + (to + i * 8 * C + part * PART + n), found);
                    }
                __syncwarp();
                if (lane == 0) arrive(inputs.empty());
            }
            if (!xhat) continue;
            asm("" : "+r"(token));  // or registers would hold what follows from it
            UNROLLED for (int i = 0; i < 2; i++) {
                float squares[8] = {};  // which are added in the order of rms_norm
                UNROLLED for (int n = 0; n < C; n += 16)
                    UNROLLED for (int c = 0; c < 4; c++)
                        squares[n / 16 % 8] = fmaf(sum(i, n, c), sum(i, n, c), squares[n / 16 % 8]);
                UNROLLED for (int distance = 4; distance > 0; distance /= 2)
                    UNROLLED for (int n = 0; n < distance; n++) squares[n] += squares[n + distance];
                UNROLLED for (int distance = 2; distance > 0; distance /= 2)
                    squares[0] += __shfl_xor_sync(WARP, squares[0], distance);
                float r = rsqrtf(squares[0] / C + float(eps));
                if (token + i * 8 >= end) continue;
                if (lane % 4 == 0) norms[token + i * 8] = r;
                UNROLLED for (int n = 0; n < C; n += 16) {
                    Floats<4> found;
                    UNROLLED for (int c = 0; c < 4; c++) found.at[c] = r * sum(i, n, c);
                    store(xhat + (i64(token + i * 8) * C + lane % 4 * 4 + n), from_floats<Element>(found));
                }
            }
        }
    }
}
