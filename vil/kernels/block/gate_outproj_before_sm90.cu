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
//   SLOTS        number of pipeline stages (slots) of each group, for y_0, y_1 and z, or for x
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// L tokens of a sequence    C outputs    D channels    count, length, next, next_line: lines.cuh
//
// Each multiprocessor runs one CTA of 12 warps: two groups of four consumer warps, and producer warps.
// A group processes up to 64 tokens with all outputs in registers: 16 rows per warp, and C / 2 floats per lane.
// A warp can normalize outputs, because a warp has all outputs of its tokens.
// Weights are read from the L2 cache once for 128 tokens.
// docs/kernels/block.md lists the buffers, and cuda/pipeline.cuh the rules of the barriers.
//
//   warps 0 - 3, 4 - 7    consumers of group 0 and of group 1
//   warps 8, 9            producer of group 0 and of group 1: loads y_0, y_1 and z of the group,
//                         SLOT_CHANNELS channels per slot, and then x, PART columns per slot
//   warp 10, one lane     producer of the weights: K_TILE channels of all outputs per stage, which both groups read
//   warp 11               idle; it exists because only groups of four warps can release registers
//
// Rows of y_0, y_1 and z in a slot have 128 bytes (SLOT_CHANNELS channels).
// Each 16-byte piece of y_0, y_1 and z is at index piece ^ row % 8, so that ldmatrix has no bank conflicts.
// Rows of x have PART columns. Each 16-byte piece of x is at piece ^ row % 2 * 4.
// The order of the pieces of x avoids bank conflicts, because lanes read four adjacent pieces of each row of x.
// The mean overwrites y_0 in the slot, and is written to global memory from the slot in full lines.
// `tiled` in tiles.cuh defines the layout of the weights.

#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "gate.cuh"
#include "tiles.cuh"

typedef INPUT Element;
constexpr int C = WIDTH, D = 2 * C;

constexpr int GROUPS = 2, ROWS = 64;  // ROWS: tokens of a group
// Number of channels of y_0, y_1 and z in a slot, and number of slots for all D channels.
constexpr int SLOT_CHANNELS = 64, YZ_SLOTS = D / SLOT_CHANNELS;
constexpr int TENSOR = ROWS * SLOT_CHANNELS * 2, SLOT = 3 * TENSOR;  // bytes of a tensor, and of a slot
constexpr int PART = SLOT / (ROWS * 4), PARTS = C / PART;  // columns of x in a slot; number of slots that x uses
constexpr int STAGE = C * K_TILE * 2, HALVES = C / 192;  // bytes of a stage; number of products of 192 outputs
constexpr int K_STEPS = K_TILE / 16;
static_assert(SLOT_CHANNELS % K_TILE == 0 && C % PART == 0 && PART % 32 == 0);
// Offsets in shared memory in bytes: slots of each group after the weights, then barriers of slots and of stages.
constexpr int OF_SLOTS = STAGES * STAGE, OF_SLOT_BARRIERS = OF_SLOTS + GROUPS * SLOTS * SLOT;
constexpr int OF_STAGE_BARRIERS = OF_SLOT_BARRIERS + GROUPS * 2 * SLOTS * 8;
constexpr int OF_ROWS = OF_STAGE_BARRIERS + 2 * STAGES * 8;  // each group's rows of y_1, if POOLED
static_assert(OF_ROWS + POOLED * GROUPS * ROWS * 4 == CTA_BYTES);
static_assert(STAGE % 1024 == 0 && SLOT % 1024 == 0);  // wgmma and the XOR of addresses require this alignment

// Tokens of this launch. In a round, a group processes at most `most` tokens, and all groups process `per_round`.
// All rounds together process `limit` tokens.
struct Tokens {
    int all, most, per_round, limit;
};

// One lane of warp 10 loads all weights once per round with bulk copies.
DEVICE void produce_weights(Pipeline<STAGES> stages, unsigned weights, const Element *tiles, Tokens tokens) {
#pragma unroll 1
    for (int of_block = blockIdx.x * 2 * tokens.most; of_block < tokens.limit; of_block += tokens.per_round)
#pragma unroll 1
        for (int step = 0; step < D / K_TILE; step++, stages.next()) {
            wait_for(stages.empty(), stages.parity() ^ 1);
            arrive_and_expect(stages.full(), STAGE);
            copy_bulk(weights + stages.stage() * STAGE, tiles + step * C * K_TILE, STAGE, stages.full());
        }
}

// Loads SLOT_CHANNELS channels of y_0, y_1 and z into a slot. A lane copies 16 bytes of every fourth token.
// If POOLED, `rows` contains the row of y_1 for each token. Otherwise, y_1 has the same tokens as y_0.
DEVICE void produce_gate(unsigned to, const Element *y_0, const Element *y_1, const Element *z, const int *rows,
                         int first, int end) {
#pragma unroll 2
    for (int token = first; token < end; token += 4) {
        copy_16_async(to, y_0), copy_16_async(to + 2 * TENSOR, z);
        copy_16_async(to + TENSOR, POOLED ? y_1 + i64(*rows) * D : y_1);
        to = to + 4 * SLOT_CHANNELS * 2 ^ 4 * 16, y_0 += 4 * D, z += 4 * 2 * D;
        if (POOLED)
            rows += 4;
        else
            y_1 += 4 * D;
    }
}

// Loads PART columns of x into a slot.
DEVICE void produce_residual(unsigned to, const float *x, int first, int end) {
#pragma unroll 2
    for (int token = first; token < end; token += 4, to += 4 * PART * 4, x += 4 * C)
        UNROLLED for (int c = 0; c < PART; c += 32) copy_16_async(to + c * 4, x + c);
}

// Warps 8 and 9 load all inputs of the tokens of group g. `rows` is shared memory for the rows of y_1.
DEVICE void produce_inputs(Pipeline<SLOTS> inputs, unsigned slots, const Element *y_0, const Element *y_1,
                           const Element *z, const float *x, int *rows, int g, int lane, const Lines &lines, int L,
                           Tokens tokens) {
    int row = lane / 8, piece = lane % 8;
    unsigned to_yz = row * SLOT_CHANNELS * 2 + (piece ^ row) * 16;
    unsigned to_x = row * PART * 4 + (piece ^ row % 2 * 4) * 16;
#pragma unroll 1
    for (int of_group = (blockIdx.x * 2 + g) * tokens.most; of_group < tokens.limit; of_group += tokens.per_round) {
        int first = of_group + row, end = min(of_group + tokens.most, tokens.all);
        if (POOLED) {
            __syncwarp();  // no lane reads the previous rows any more
#pragma unroll 1
            for (int i = lane; i < end - of_group; i += 32) rows[i] = row_of_second<true>(lines, of_group + i, L);
            __syncwarp();
        }
#pragma unroll 1
        for (int k_slot = 0; k_slot < YZ_SLOTS; k_slot++, inputs.next()) {
            wait_for(inputs.empty(), inputs.parity() ^ 1);
            unsigned to = slots + inputs.stage() * SLOT + to_yz;
            int channel = k_slot * SLOT_CHANNELS + piece * 8;
            i64 at = i64(first) * D + channel;
            produce_gate(to, y_0 + at, y_1 + (POOLED ? channel : at), z + (i64(first) * (2 * D) + channel), rows + row,
                         first, end);
            arrive_when_copied(inputs.full());
        }
#pragma unroll 1
        for (int part = 0; part < PARTS; part++, inputs.next()) {
            wait_for(inputs.empty(), inputs.parity() ^ 1);
            unsigned to = slots + inputs.stage() * SLOT + to_x;
            produce_residual(to, x + (i64(first) * C + part * PART + piece * 4), first, end);
            arrive_when_copied(inputs.full());
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

// Addresses that a consumer lane reads.
// Slots start at multiples of 1024 bytes, so the address of a further channel or column is address ^ offset.
struct Consumer {
    int lane, warp, row;
    unsigned of_matrix, of_word, of_x;
    INLINE Consumer(int lane, int warp)
        : lane(lane), warp(warp), row(warp * 16 + lane / 4),
          of_matrix((warp * 16 + lane % 16) * SLOT_CHANNELS * 2 + (lane / 16 ^ lane % 8) * 16),
          of_word(row * SLOT_CHANNELS * 2 + lane / 4 * 16 + lane % 4 * 4),
          of_x(row * PART * 4 + (lane % 4 ^ lane / 4 % 2 * 4) * 16) {}
};

// Computes the gate of 16 channels as operand a of wgmma. The mean overwrites y_0.
DEVICE void gate_channels(unsigned (&a)[4], unsigned slot, int k, const float (&scale)[2], const Consumer &my) {
    unsigned y_0[4], y_1[4], zs[4], from = slot + my.of_matrix ^ k * 32;
    load_matrices(y_0, from), load_matrices(y_1, from + TENSOR), load_matrices(zs, from + 2 * TENSOR);
    UNROLLED for (int w = 0; w < 4; w++) {
        Gated found = gate<Element>(y_0[w], y_1[w], zs[w], scale[w % 2]);
        a[w] = found.gated;
        if (KEEP)
            store_shared((slot + my.of_word ^ k * 32 + w / 2 * 16) + w % 2 * 8 * SLOT_CHANNELS * 2, found.mean);
    }
}

// Writes the means of a slot in full lines, for the warp's 16 tokens.
DEVICE void store_means(Element *means, unsigned slot, int channel, int first, int end, const Consumer &my) {
    UNROLLED for (int i = 0; i < 4; i++) {
        int r = my.warp * 16 + i * 4 + my.lane / 8, of_row = first + r;
        Pack<Element, 8> mean;
        load_shared(mean.word, slot + r * SLOT_CHANNELS * 2 + (my.lane % 8 ^ r % 8) * 16);
        if (of_row < end) store(means + (i64(of_row) * D + channel + my.lane % 8 * 8), mean);
    }
}

// Computes sums = gated out_proj^T, 16 channels at a time.
// wait_for_products<1> guarantees only that all products except the newest have finished.
// Therefore a warp releases a stage of weights only after it has started the first products of the next stage.
// For the same reason, operand a has two buffers.
DEVICE void multiply(Sums &sums, Pipeline<SLOTS> &inputs, Pipeline<STAGES> &stages, unsigned slots, unsigned weights,
                     Element *means, const float (&scale)[2], int first, int end, const Consumer &my) {
#pragma unroll 1
    for (int k_slot = 0; k_slot < YZ_SLOTS; k_slot++, inputs.next()) {
        wait_for(inputs.full(), inputs.parity());
        unsigned slot = slots + inputs.stage() * SLOT, a[2][4];
        UNROLLED for (int k = 0; k < SLOT_CHANNELS / 16; k++) {
            gate_channels(a[k % 2], slot, k, scale, my);
            if (k == SLOT_CHANNELS / 16 - 1) {
                __syncwarp();
                if (KEEP) store_means(means, slot, k_slot * SLOT_CHANNELS, first, end, my);
                __syncwarp();
                if (my.lane == 0) arrive(inputs.empty());
            }
            if (k % K_STEPS == 0) wait_for(stages.full(), stages.parity());
            sums.hold();
            begin_products();
            UNROLLED for (int h = 0; h < HALVES; h++)
                multiply_group(Element{}, sums.of[h], a[k % 2],
                               weights + stages.stage() * STAGE + h * 192 * K_TILE * 2 + k % K_STEPS * 32,
                               k_slot + k > 0);
            commit_products();
            wait_for_products<1>();  // waits for all products except the newest
            if (k % K_STEPS == 0 && k_slot + k > 0 && my.lane == 0) arrive(stages.empty_before());
            if (k % K_STEPS == K_STEPS - 1) stages.next();
        }
    }
    wait_for_products<0>();
    sums.hold();
    if (my.lane == 0) arrive(stages.empty_before());
}

// Epilogue, which computes and stores out = x + sums, and keeps the result in registers.
DEVICE void add_residual(Sums &sums, Pipeline<SLOTS> &inputs, unsigned slots, float *out, int token, int end,
                         const Consumer &my) {
    i64 to = i64(token) * C + my.lane % 4 * 4;
    UNROLLED for (int part = 0; part < PARTS; part++, inputs.next()) {
        wait_for(inputs.full(), inputs.parity());
        UNROLLED for (int n = 0; n < PART; n += 16)
            UNROLLED for (int i = 0; i < 2; i++) {
                unsigned v[4];
                unsigned from = slots + inputs.stage() * SLOT + my.of_x ^ n % 32 * 4;
                load_shared(v, from + n / 32 * 128 + i * 8 * PART * 4);
                Floats<4> found;
                UNROLLED for (int c = 0; c < 4; c++)
                    found.at[c] = sums.at(i, part * PART + n, c) += __uint_as_float(v[c]);
                if (token + i * 8 < end) store(out + (to + i * 8 * C + part * PART + n), found);
            }
        __syncwarp();
        if (my.lane == 0) arrive(inputs.empty());
    }
}

// Epilogue, which computes the norm of the sums and adds the squares in the order of rms_norm.
DEVICE void store_norm(Sums &sums, Element *xhat, float *rstd, double eps, int token, int end, int lane) {
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
            store(xhat + (i64(token + i * 8) * C + lane % 4 * 4 + n), from_floats<Element>(found));
        }
    }
}

// Each group processes up to `tokens_of_group` tokens at a time, for `rounds` rounds.
// rstd and xhat may be null. z is the second half of rows of length 2 D.
extern "C" __global__ void __launch_bounds__(384, 1) gate_outproj(PARAMETERS_gate_outproj) {
    begin_kernel();
    extern __shared__ __align__(1024) char shared[];
    unsigned weights = shared_address(shared), slots = weights + OF_SLOTS, barriers = weights + OF_SLOT_BARRIERS;
    Pipeline<STAGES> stages(weights + OF_STAGE_BARRIERS);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, most = tokens_of_group, per_round = gridDim.x * GROUPS * most;
    const Tokens of = {int(tokens), most, per_round, per_round * int(rounds)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * 2 * SLOTS; i++) init_barrier(barriers + i * 8, i / SLOTS % 2 ? 4 : 32);
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(stages.barriers + i * 8, i / STAGES ? GROUPS * 4 : 1);
        publish_barriers();
    }
    __syncthreads();

    if (warp >= GROUPS * 4) {
        give_registers<40>();
        int g = warp - GROUPS * 4;
        if (warp == 10 && lane == 0)
            produce_weights(stages, weights, tiles, of);
        else if (warp < 10) {
            const Lines lines = {int(count), int(length), int(next), int(next_line)};
            produce_inputs(barriers + g * 2 * SLOTS * 8, slots + g * SLOTS * SLOT, y_0, y_1, z, x,
                           (int *)(shared + OF_ROWS) + g * ROWS, g, lane, lines, L_, of);
        }
        wait_for_all_copies();
        return;
    }

    take_registers<232>();
    int g = warp / 4, L = L_;
    const Consumer my(lane, warp % 4);
    Pipeline<SLOTS> inputs(barriers + g * 2 * SLOTS * 8);
    slots += g * SLOTS * SLOT;
    Sums sums;
    for (int token = (blockIdx.x * 2 + g) * most + my.row; token < of.limit + my.row; token += per_round) {
        int first = token - my.row, end = min(first + most, of.all);
        float scale[2];
        UNROLLED for (int i = 0; i < 2; i++)
            scale[i] = scales && token + i * 8 < end ? scales[(token + i * 8) / L] : 1;
        multiply(sums, inputs, stages, slots, weights, means, scale, first, end, my);
        add_residual(sums, inputs, slots, out, token, end, my);
        if (!xhat) continue;
        // The compiler must not keep values that are derived from `token` in registers during store_norm.
        asm("" : "+r"(token));
        store_norm(sums, xhat, rstd, eps, token, end, lane);
    }
}
