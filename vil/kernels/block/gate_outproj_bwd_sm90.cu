// Backward pass of the gate and of the product with out_proj in one kernel, for 16-bit types on Hopper.
// With the image's stochastic-depth factor `scale`:
//
//   dgated = scale dout out_proj         dy = dgated silu(z) / 2, of either direction
//   gated = scale mean silu(z)           dz = dgated mean silu'(z)
//
// `gated` is recomputed for the gradient of out_proj, dout^T gated, which another product computes.
//
// gate_outproj_bwd_sm90.py declares the parameters of the kernel. Macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   WIDTH        model width C, the number of columns of dout: 192 or 384
//   SLOTS        number of slots of each group, which hold 64 tokens x 64 channels or columns each
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// L tokens of a sequence    C columns of dout    D channels
//
// Each multiprocessor runs one CTA of 12 warps.
// A CTA keeps the weights of SLICE channels in shared memory during the whole kernel.
// CTAs with adjacent indices process other channels of the same tokens, so that dout is read from the L2 cache.
// docs/kernels/block.md lists the buffers, and cuda/pipeline.cuh the rules of the barriers.
//
//   warps 0 - 3, 4 - 7    consumers of group 0 and of group 1: first write the weights to shared memory; then process
//                         up to 64 tokens at a time, with dgated in registers (SLICE / 2 floats per lane)
//   warps 8, 9            producer of group 0 and of group 1: loads dout, 64 columns per slot; then z and mean,
//                         64 channels per slot; loads the next tokens while the consumers write results
//   warps 10, 11          idle
//
// Rows in shared memory have 128 bytes, as wgmma requires, with each 16-byte piece at index piece ^ row % 8.
// A row of dout is a token. A row of weights is a column of dout with 64 channels.
// Rows of the second 64 channels follow all rows of the first 64 channels.
// The pieces of z and mean are at piece ^ row % 2 * 4, because lanes read four adjacent pieces of each row.

#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "silu.cuh"

typedef INPUT Element;
constexpr int C = WIDTH, D = 2 * C;

constexpr int SLICE = 128, SLICES = D / SLICE, GROUPS = 2, ROWS = 64, SLOT = ROWS * 128;  // SLOT: bytes of a slot
// Offsets in shared memory in bytes: slots of each group after the weights, then barriers of slots and of weights.
constexpr int OF_SLOTS = C * SLICE * 2, OF_BARRIERS = OF_SLOTS + GROUPS * SLOTS * SLOT;
constexpr int OF_WEIGHTS_THERE = OF_BARRIERS + GROUPS * 2 * SLOTS * 8;
static_assert(OF_WEIGHTS_THERE + 8 == CTA_BYTES && CTA_BYTES <= 227 * 1024);
static_assert(C * 128 % 1024 == 0 && SLOT % 1024 == 0);  // wgmma requires this alignment

// Warps 8 and 9 load 64 columns of the group's tokens into a slot. A lane copies 16 bytes of every fourth token.
struct Producer {
    Pipeline<SLOTS> inputs;
    unsigned slots;
    int row, piece;
    // `flip` is the XOR of a piece's byte offsets in a row and four rows later.
    INLINE void fill(const Element *from, i64 stride, int piece_at, int flip, int first, int end) {
        wait_for(inputs.empty(), inputs.parity() ^ 1);
        unsigned to = slots + inputs.stage() * SLOT + row * 128 + piece_at * 16;
        from += first * stride + piece * 8;
#pragma unroll 4
        for (int token = first; token < end; token += 4, from += 4 * stride)
            copy_16_async(to, from), to = to + 4 * 128 ^ flip;
        arrive_when_copied(inputs.full());
        inputs.next();
    }
    INLINE void produce(const Element *dout, const Element *z, const Element *means, int first, int end) {
        first += row;
#pragma unroll 1
        for (int c = 0; c < C; c += 64) fill(dout + c, C, piece ^ row, 4 * 16, first, end);
#pragma unroll 1
        for (int d = 0; d < SLICE; d += 64) {
            fill(z + d, 2 * D, piece ^ row % 2 * 4, 0, first, end);
            fill(means + d, D, piece ^ row % 2 * 4, 0, first, end);
        }
    }
};

// The consumers write the weights of SLICE channels to shared memory, in rows of 64 channels.
// A lane reads z and writes dy for 8 adjacent channels 8p .. 8p + 7 of 32 channels, which are half h of 64 channels.
// The 8 channels must be the lane's columns of the four products w = 0 .. 3.
// Therefore column 8 (4h + w) + 2p + e is channel 32h + 8p + 2w + e, for e = 0 and 1.
// Word w of each 16 bytes moves to word p of piece 4h + w.
DEVICE void store_weights(unsigned weights, const Element *out_proj, int slice) {
#pragma unroll 8
    for (int i = threadIdx.x; i < C * SLICE / 8; i += GROUPS * 128) {
        int piece = i % 8, c = i / 8 % C, half = i / 8 / C;
        Pack<Element, 8> v = load<8>(out_proj + (i64(c) * D + slice + half * 64 + piece * 8));
        UNROLLED for (int w = 0; w < 4; w++)
            store_shared(weights + (half * C + c) * 128 + (piece / 4 * 4 + w ^ c % 8) * 16 + piece % 4 * 4, v.word[w]);
    }
}

// Computes sums = dout out_proj.
// A slot is released one step later, when wait_for_products<1> guarantees that the slot's products have finished.
DEVICE void multiply(float (&sums)[SLICE / 2], Pipeline<SLOTS> &inputs, unsigned slots, unsigned weights, int lane) {
#pragma unroll 1
    for (int c = 0; c < C; c += 64, inputs.next()) {
        wait_for(inputs.full(), inputs.parity());
        show_to_products();
        hold(sums);
        begin_products();
        UNROLLED for (int k = 0; k < 64; k += 16)
            multiply_shared(Element{}, sums, slots + inputs.stage() * SLOT + k * 2, weights + (c + k) * 128, C * 128,
                            c + k > 0);
        commit_products();
        wait_for_products<1>();  // waits for all products except the newest
        if (c > 0 && lane == 0) arrive(inputs.empty_before());
    }
    wait_for_products<0>();
    hold(sums);
    if (lane == 0) arrive(inputs.empty_before());
}

// Epilogue, which computes dy, dz and gated from sums = dgated / scale, for tokens `token` and `token` + 8.
DEVICE void store_gradients(const float (&sums)[SLICE / 2], Pipeline<SLOTS> &inputs, unsigned slots, Element *dy, i64 dy_stride,
                            Element *dz, Element *gated, int token, int end, const float (&scale)[2], int lane,
                            unsigned of_piece) {
    UNROLLED for (int d = 0; d < SLICE; d += 64, inputs.next()) {
        wait_for(inputs.full(), inputs.parity());
        unsigned z_at = slots + inputs.stage() * SLOT + of_piece;
        inputs.next();
        wait_for(inputs.full(), inputs.parity());
        unsigned mean_at = slots + inputs.stage() * SLOT + of_piece;
        UNROLLED for (int i = 0; i < 2; i++)
            UNROLLED for (int half = 0; half < 2; half++) {
                unsigned zs[4], ms[4], dys[4], dzs[4], gateds[4];
                load_shared(zs, (z_at ^ half * 64) + i * 8 * 128);
                load_shared(ms, (mean_at ^ half * 64) + i * 8 * 128);
                if (i == 1 && half == 1) {  // the lane has loaded its values from both slots
                    __syncwarp();
                    if (lane == 0) arrive(inputs.empty_before()), arrive(inputs.empty());
                }
                UNROLLED for (int w = 0; w < 4; w++) {
                    Floats<2> x = unpack(Element{}, zs[w]), m = unpack(Element{}, ms[w]), of_y, of_z, of_gated;
                    UNROLLED for (int j = 0; j < 2; j++) {
                        float dgated = scale[i] * sums[(d / 8 + half * 4 + w) * 4 + i * 2 + j];
                        float s = sigmoid(x.at[j]), silu = x.at[j] * s;
                        of_y.at[j] = 0.5f * dgated * silu;
                        of_z.at[j] = dgated * m.at[j] * silu_slope(x.at[j], s);
                        of_gated.at[j] = scale[i] * m.at[j] * silu;
                    }
                    dys[w] = pack(Element{}, of_y.at[0], of_y.at[1]);
                    dzs[w] = pack(Element{}, of_z.at[0], of_z.at[1]);
                    gateds[w] = pack(Element{}, of_gated.at[0], of_gated.at[1]);
                }
                auto write = [&](Element *to, i64 stride, const unsigned (&v)[4]) {
                    to += (token + i * 8) * stride + d + half * 32 + lane % 4 * 8;
                    if (token + i * 8 < end) store(to, Pack<Element, 8>{v[0], v[1], v[2], v[3]});
                };
                write(dy, dy_stride, dys), write(dz, 2 * D, dzs), write(gated, D, gateds);
            }
    }
}

// Each group processes up to `tokens_of_group` tokens at a time, for `rounds` rounds.
// z and dz are halves of rows of length 2 D.
extern "C" __global__ void __launch_bounds__(384, 1) gate_outproj_backward(PARAMETERS_gate_outproj_backward) {
    begin_kernel();
    extern __shared__ __align__(1024) char shared[];
    unsigned weights = shared_address(shared), slots = weights + OF_SLOTS, barriers = weights + OF_BARRIERS;
    unsigned weights_there = weights + OF_WEIGHTS_THERE;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = tokens, most = tokens_of_group;
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * 2 * SLOTS; i++) init_barrier(barriers + i * 8, i / SLOTS % 2 ? 4 : 32);
        init_barrier(weights_there, GROUPS * 128);
        publish_barriers();
    }
    __syncthreads();

    bool produces = warp >= GROUPS * 4;
    int g = produces ? warp - GROUPS * 4 : warp / 4, slice = blockIdx.x % SLICES * SLICE;
    int start = (blockIdx.x / SLICES * GROUPS + g) * most, per_round = gridDim.x / SLICES * GROUPS * most;
    int limit = per_round * int(rounds);  // number of tokens that all CTAs process in all rounds
    Pipeline<SLOTS> inputs(barriers + g * 2 * SLOTS * 8);
    slots += g * SLOTS * SLOT;
    z += slice, means += slice, dy += slice, dz += slice, gated += slice;
    if (produces) {
        if (g >= GROUPS) return;
        Producer producer = {inputs, slots, lane / 8, lane % 8};
        for (int of_group = start; of_group < limit; of_group += per_round)
            producer.produce(dout, z, means, of_group, min(of_group + most, all));
        wait_for_all_copies();
        return;
    }

    store_weights(weights, out_proj, slice);
    show_to_products();
    arrive(weights_there);
    wait_for(weights_there, 0);
    int row = warp % 4 * 16 + lane / 4, L = length;
    unsigned of_piece = row * 128 + (lane % 4 ^ row % 2 * 4) * 16;
    for (int of_group = start; of_group < limit; of_group += per_round) {
        int token = of_group + row, end = min(of_group + most, all);
        float scale[2], sums[SLICE / 2];
        UNROLLED for (int i = 0; i < 2; i++) scale[i] = scales && token + i * 8 < end ? scales[(token + i * 8) / L] : 1;
        multiply(sums, inputs, slots, weights, lane);
        store_gradients(sums, inputs, slots, dy, dy_stride, dz, gated, token, end, scale, lane, of_piece);
    }
}
