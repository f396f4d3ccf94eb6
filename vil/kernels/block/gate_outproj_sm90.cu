// Gate, product with out_proj, residual addition and the following norm in one kernel, for 16-bit types on Hopper:
//
//   mean = (y_0 + y_1) / 2      gated = scale mean silu(z)      out = x + gated out_proj^T
//   rstd = rsqrt(mean over C of out^2 + eps)                    xhat = rstd out
//
// The residual stream x and out are fp32, and scale is the image's stochastic-depth factor.
// scale multiplies the input of out_proj instead of the output, which is equivalent, because out_proj has no bias.
// rstd and xhat are bitwise identical to the results of `rms_norm` in norm.cuh.
//
// gate_outproj_sm90.py declares the parameters of the kernel. Macros:
//   INPUT        element type of the 16-bit tensors: bf16 or fp16
//   WIDTH        model width C, the number of outputs: 192 or 384
//   KEEP         whether to write the means that the backward pass needs
//   POOLED       whether y_1 has a row for each pooled token instead of each token
//   STAGES       number of pipeline stages for the weights, with K_TILE channels each
//   SLOTS        number of pipeline stages (slots) of each group for gated, with SLOT_CHANNELS channels each
//   AHEAD        number of tokens whose inputs a gater lane loads in advance, 8 channels each
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// L tokens of a sequence    C outputs    D channels    count, length, next, next_line: lines.cuh
//
// Each multiprocessor runs one CTA of 12 warps. Two groups of four warps process up to 64 tokens each:
//
//   warps 0 - 3, 4 - 7    group 0 and group 1: start products of the group's tokens and all outputs, which are in
//                         registers, add x and compute the norm: 16 tokens per warp, and C / 2 floats per lane
//   warps 8 - 10          gaters: load y_0, y_1 and z, and write gated to the slots of both groups in turn
//   warp 11, one lane     loads the weights: K_TILE channels of all outputs per stage, which both groups read
//
// The tensor cores work while gaters compute gated of the next channels, because no warp does both.
// A warp can normalize outputs, because a warp has all outputs of its tokens.
// Weights are read from the L2 cache once for 128 tokens.
// docs/kernels/block.md lists the buffers, and cuda/pipeline.cuh the rules of the barriers.
//
// Rows of a slot have 128 bytes, with each 16-byte piece at index piece ^ row % 8. wgmma reads both operands from shared
// memory. `tiled` in tiles.cuh defines the layout of the weights.

#include "../cuda/async_copies.cuh"
#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "gate.cuh"
#include "tiles.cuh"

typedef INPUT Element;
constexpr int C = WIDTH, D = 2 * C;

constexpr int GROUPS = 2, ROWS = 64, GATERS = 3;  // ROWS: tokens of a group
constexpr int SLOT_CHANNELS = 64, K_SLOTS = D / SLOT_CHANNELS, STEPS = SLOT_CHANNELS / K_TILE;
constexpr int SLOT = ROWS * SLOT_CHANNELS * 2, STAGE = C * K_TILE * 2;  // bytes
constexpr int HALVES = C / 192;                                         // number of products of 192 outputs
constexpr int INPUTS = 3 * 512;  // bytes of y_0, y_1 and z of four tokens, one per eight lanes of a gater
// Offsets in shared memory in bytes: slots of each group after the weights, then the inputs of each gater, tables of the
// gaters, and barriers of slots and of stages.
constexpr int OF_SLOTS = STAGES * STAGE, OF_INPUTS = OF_SLOTS + GROUPS * SLOTS * SLOT;
constexpr int OF_TOKENS = OF_INPUTS + GATERS * AHEAD * INPUTS;
constexpr int OF_SLOT_BARRIERS = OF_TOKENS + GATERS * GROUPS * ROWS * 8;
constexpr int OF_STAGE_BARRIERS = OF_SLOT_BARRIERS + GROUPS * 2 * SLOTS * 8;
static_assert(OF_STAGE_BARRIERS + 2 * STAGES * 8 == CTA_BYTES && CTA_BYTES <= 227 * 1024);
static_assert(STAGE % 1024 == 0 && SLOT % 1024 == 0);  // wgmma requires this alignment
static_assert(HALVES * 192 == C && ROWS / 4 % AHEAD == 0);

// Tokens of this launch. In a round, a group processes at most `most` tokens, and all groups process `per_round`.
// All rounds together process `limit` tokens.
struct Tokens {
    int all, most, per_round, limit;
};

// One lane of warp 11 loads all weights once per round with bulk copies.
DEVICE void produce_weights(Pipeline<STAGES> stages, unsigned weights, const Element *tiles, Tokens tokens) {
#pragma unroll 1
    for (int of_block = blockIdx.x * GROUPS * tokens.most; of_block < tokens.limit; of_block += tokens.per_round)
#pragma unroll 1
        for (int step = 0; step < D / K_TILE; step++, stages.next()) {
            wait_long_for(stages.empty(), stages.parity() ^ 1);
            arrive_and_expect(stages.full(), STAGE);
            copy_bulk(weights + stages.stage() * STAGE, tiles + step * C * K_TILE, STAGE, stages.full());
        }
}

// Row of y_1 and stochastic-depth factor of a token.
struct OfToken {
    int row;
    float scale;
};

// A warp that gates 8 channels per lane of every fourth token of a group. A lane reads only inputs that it has copied.
struct Gater {
    const Element *y_0, *y_1, *z;
    Element *means;
    unsigned inputs;          // inputs of the lane's first token in shared memory
    const OfToken *of_token;  // of the lane's first token
    int lane;

    // Starts copies of the inputs of token `i` of the lane. `at` is the token's row in y_0.
    INLINE void copy(int i, int at, int channel) const {
        unsigned to = inputs + i % AHEAD * INPUTS;
        copy_16_async(to, y_0 + (i64(at) * D + channel));
        copy_16_async(to + 512, y_1 + (i64(POOLED ? of_token[4 * i].row : at) * D + channel));
        copy_16_async(to + 1024, z + (i64(at) * (2 * D) + channel));
    }
    INLINE void gate_token(int i, int at, int channel, unsigned slot) const {
        unsigned from = inputs + i % AHEAD * INPUTS, first[4], second[4], zs[4], gated[4];
        load_shared(first, from), load_shared(second, from + 512), load_shared(zs, from + 1024);
        Pack<Element, 8> mean;
        UNROLLED for (int w = 0; w < 4; w++) {
            Gated found = gate<Element>(first[w], second[w], zs[w], of_token[4 * i].scale);
            gated[w] = found.gated, mean.word[w] = found.mean;
        }
        int row = lane / 8 + 4 * i;
        store_shared(slot + row * SLOT_CHANNELS * 2 + (lane % 8 ^ row % 8) * 16, gated);
        if (KEEP) store(means + (i64(at) * D + channel), mean);
    }
    // Fills a slot with SLOT_CHANNELS channels of the group's tokens. `token` is the lane's first token.
    INLINE void fill(unsigned slot, unsigned empty, int parity, int token, int end, int channel) const {
        UNROLLED for (int i = 0; i < AHEAD; i++) {
            if (token + 4 * i < end) copy(i, token + 4 * i, channel);
            commit_copies();
        }
        wait_long_for(empty, parity);
#pragma unroll 4
        for (int i = 0; i < ROWS / 4; i++) {
            wait_for_copies<AHEAD - 1>();
            if (token + 4 * i < end) gate_token(i, token + 4 * i, channel, slot);
            if (i + AHEAD < ROWS / 4 && token + 4 * (i + AHEAD) < end) copy(i + AHEAD, token + 4 * (i + AHEAD), channel);
            commit_copies();
        }
    }
};

// Warps 8 to 10 fill the slots of both groups in turn. `turn` is the number of slots that other gaters fill before the
// warp's first slot.
DEVICE void produce_gated(Pipeline<SLOTS> slots, unsigned first_slot, Gater gater, OfToken *of_tokens, const float *scales,
                          const float *x, const Lines &lines, int L, Tokens tokens, int turn) {
    int lane = gater.lane;
#pragma unroll 1
    for (int of_block = blockIdx.x * GROUPS * tokens.most; of_block < tokens.limit; of_block += tokens.per_round) {
        __syncwarp();  // no lane reads the previous tokens any more
#pragma unroll 1
        for (int i = lane; i < GROUPS * ROWS; i += 32) {
            int token = min(of_block + i / ROWS * tokens.most + i % ROWS, tokens.all - 1);
            of_tokens[i] = {int(row_of_second<POOLED>(lines, token, L)), scales ? scales[token / L] : 1};
        }
        __syncwarp();
#pragma unroll 1
        for (int k_slot = 0; k_slot < K_SLOTS; k_slot++, slots.next())
#pragma unroll 1
            for (int g = 0; g < GROUPS; g++) {
                if (turn--) continue;
                turn = GATERS - 1;
                int first = of_block + g * tokens.most, end = min(first + tokens.most, tokens.all);
                unsigned full = slots.full() + g * 2 * SLOTS * 8;
                                    UNROLLED for (int i = lane; i < ROWS; i += 32)
                        if (first + i < end) prefetch_to_l2(x + (i64(first + i) * C + k_slot * (C / K_SLOTS)));
                gater.of_token = of_tokens + g * ROWS + lane / 8;
                gater.fill(first_slot + (g * SLOTS + slots.stage()) * SLOT, full + SLOTS * 8, slots.parity() ^ 1,
                           first + lane / 8, end, k_slot * SLOT_CHANNELS);
                show_to_products();
                __syncwarp();
                if (lane == 0) arrive(full);
            }
    }
}

struct Sums {
    float of[HALVES][96];
    // Sum for token lane / 4 + 8 i of the warp and output n + 4 (lane % 4) + c, where n is a multiple of 16.
    INLINE float &at(int i, int n, int c) { return of[n / 192][n % 192 / 2 + c / 2 * 4 + i * 2 + c % 2]; }
    INLINE void hold() {
        UNROLLED for (int h = 0; h < HALVES; h++) ::hold(of[h]);
    }
};

// Computes sums = gated out_proj^T, K_TILE channels at a time.
// wait_for_products<1> guarantees only that all products except those of the newest stage have finished.
// Therefore a warp releases a stage or a slot only after it has started the products of the next stage.
DEVICE void multiply(Sums &sums, Pipeline<SLOTS> &slots, Pipeline<STAGES> &stages, unsigned first_slot, unsigned weights,
                     int lane) {
#pragma unroll 1
    for (int k_slot = 0; k_slot < K_SLOTS; k_slot++, slots.next()) {
        wait_for(slots.full(), slots.parity());
        unsigned slot = first_slot + slots.stage() * SLOT;
        UNROLLED for (int step = 0; step < STEPS; step++, stages.next()) {
            wait_for(stages.full(), stages.parity());
            sums.hold();
            begin_products();
            UNROLLED for (int k = 0; k < K_TILE; k += 16)
                UNROLLED for (int h = 0; h < HALVES; h++)
                    multiply_slot(Element{}, sums.of[h], slot + (step * K_TILE + k) * 2,
                                  weights + stages.stage() * STAGE + (h * 192 * K_TILE + k) * 2, k_slot + step + k > 0);
            commit_products();
            wait_for_products<1>();
            if (lane == 0 && k_slot + step > 0) {
                arrive(stages.empty_before());
                if (step == 0) arrive(slots.empty_before());
            }
        }
    }
    wait_for_products<0>();
    sums.hold();
    if (lane == 0) arrive(stages.empty_before()), arrive(slots.empty_before());
}

// Computes and stores out = x + sums, and keeps the result in registers. `at` is the index of the lane's first output.
DEVICE void add_residual(Sums &sums, const float *x, float *out, i64 at, int token, int end) {
    UNROLLED for (int n = 0; n < C; n += 16)
        UNROLLED for (int i = 0; i < 2; i++) {
            if (token + i * 8 >= end) continue;
            Floats<4> found = load<4>(x + (at + i * 8 * C + n));
            UNROLLED for (int c = 0; c < 4; c++) found.at[c] = sums.at(i, n, c) += found.at[c];
            store(out + (at + i * 8 * C + n), found);
        }
}

// Computes and stores the norm of the sums. The squares are added in the order of rms_norm.
DEVICE void store_norm(Sums &sums, Element *xhat, float *rstd, double eps, i64 at, int token, int end, int lane) {
    UNROLLED for (int i = 0; i < 2; i++) {
        float squares[8] = {};
        UNROLLED for (int n = 0; n < C; n += 16)
            UNROLLED for (int c = 0; c < 4; c++)
                squares[n / 16 % 8] = fmaf(sums.at(i, n, c), sums.at(i, n, c), squares[n / 16 % 8]);
        UNROLLED for (int distance = 4; distance > 0; distance /= 2)
            UNROLLED for (int n = 0; n < distance; n++) squares[n] += squares[n + distance];
        UNROLLED for (int distance = 2; distance > 0; distance /= 2)
            squares[0] += __shfl_xor_sync(WARP, squares[0], distance);
        float r = rsqrtf(squares[0] / C + float(eps));
        if (token + i * 8 >= end) continue;
        if (lane % 4 == 0) rstd[token + i * 8] = r;
        UNROLLED for (int n = 0; n < C; n += 16) {
            Floats<4> found;
            UNROLLED for (int c = 0; c < 4; c++) found.at[c] = r * sums.at(i, n, c);
            store(xhat + (at + i * 8 * C + n), from_floats<Element>(found));
        }
    }
}

// Each group processes up to `tokens_of_group` tokens at a time, for `rounds` rounds.
// rstd and xhat may be null. z is the second half of rows of length 2 D.
extern "C" __global__ void __launch_bounds__(384, 1) gate_outproj(PARAMETERS_gate_outproj) {
    begin_kernel();
    extern __shared__ __align__(1024) char shared[];
    unsigned weights = shared_address(shared), first_slot = weights + OF_SLOTS, barriers = weights + OF_SLOT_BARRIERS;
    Pipeline<STAGES> stages(weights + OF_STAGE_BARRIERS);
    int lane = threadIdx.x % 32, warp = __shfl_sync(WARP, int(threadIdx.x / 32), 0), most = tokens_of_group;
    int per_round = gridDim.x * GROUPS * most;
    const Tokens of = {int(tokens), most, per_round, per_round * int(rounds)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * 2 * SLOTS; i++) init_barrier(barriers + i * 8, i / SLOTS % 2 ? 4 : 1);
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(stages.barriers + i * 8, i / STAGES ? GROUPS * 4 : 1);
        publish_barriers();
    }
    __syncthreads();

    if (warp >= GROUPS * 4) {
        give_registers<56>();
        int gater = warp - GROUPS * 4, channel = lane % 8 * 8;
        if (gater < GATERS) {
            const Lines lines = {int(count), int(length), int(next), int(next_line)};
            produce_gated(barriers, first_slot,
                          {y_0 + channel, y_1 + channel, z + channel, means + channel,
                           weights + OF_INPUTS + gater * AHEAD * INPUTS + lane * 16, nullptr, lane},
                          (OfToken *)(shared + OF_TOKENS) + gater * GROUPS * ROWS, scales, x, lines, L_, of, gater);
        } else if (lane == 0) {
            produce_weights(stages, weights, tiles, of);
        }
        wait_for_all_copies();
        return;
    }

    take_registers<224>();
    int g = warp / 4, row = warp % 4 * 16 + lane / 4;
    Pipeline<SLOTS> slots(barriers + g * 2 * SLOTS * 8);
    first_slot += g * SLOTS * SLOT;
    Sums sums;
#pragma unroll 1
    for (int first = (blockIdx.x * GROUPS + g) * most; first < of.limit; first += per_round) {
        multiply(sums, slots, stages, first_slot, weights, lane);
        int token = first + row, end = min(first + most, of.all);
        i64 at = i64(token) * C + lane % 4 * 4;
        add_residual(sums, x, out, at, token, end);
        if (xhat) store_norm(sums, xhat, rstd, eps, at, token, end, lane);
    }
}
