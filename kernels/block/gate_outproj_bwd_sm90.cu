// Backward of gate and product with out_proj in one kernel, for 16-bit types on Hopper.
// Compiled by NVRTC with these macros:
//   INPUT    element type of the tensors: bf16 or fp16
//   WIDTH    model width C, the columns of dout: 192 or 384
//
// L tokens of a sequence    C columns of dout    D channels

#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "silu.cuh"

typedef INPUT T;
constexpr int C = WIDTH, D = 2 * C;

// With dgated = dout out_proj and scale the stochastic depth of the image: dy = scale dgated silu(z) / 2, of either
// direction; dz = scale dgated mean silu'(z); and once more gated = scale mean silu(z).
//
// A block keeps the weights of SLICE channels in shared memory. Each of its two groups of four warps takes up to 64 tokens at
// a time: it multiplies their dout, 64 columns at a time, and has dgated in registers when z and mean come, 64 channels
// at a time. A warp for each group copies all of that through the group's slots, and goes on, to the next tokens, while
// results are written. Neighbouring blocks have the other channels of the same tokens, whose dout the L2 keeps for them.
constexpr int SLICE = 128, SLICES = D / SLICE, GROUPS = 2, ROWS = 64;
constexpr int WEIGHTS = C * SLICE * 2, SLOT = ROWS * 128, BARRIERS = 2 * 8;  // bytes, the last of a slot
constexpr int SLOTS = (227 * 1024 - WEIGHTS - 8) / (GROUPS * (SLOT + BARRIERS));  // of a group, all that fit

// A group of a block takes up to `tokens_of_group` tokens at a time, and all groups do so `rounds` times. z, dy and dz are
// halves of rows of 2 D.
extern "C" __global__ void __launch_bounds__(384, 1)
gated_product_backward(const T *__restrict__ dout, const T *__restrict__ out_proj, const T *__restrict__ means,
                       const T *__restrict__ z, const float *__restrict__ scales, T *__restrict__ dy, T *__restrict__ dz,
                       T *__restrict__ gated, i64 tokens, i64 length, i64 tokens_of_group, i64 rounds) {
    extern __shared__ __align__(1024) char shared[];
    unsigned weights = shared_address(shared), slots = weights + WEIGHTS, barriers = slots + GROUPS * SLOTS * SLOT;
    unsigned weights_there = barriers + GROUPS * SLOTS * BARRIERS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = tokens, most = tokens_of_group;
    if (threadIdx.x == 0) {
        for (int i = 0; i < GROUPS * 2 * SLOTS; i++) init_barrier(barriers + i * 8, i / SLOTS % 2 ? 4 : 32);
        init_barrier(weights_there, GROUPS * 128);
        publish_barriers();
    }
    __syncthreads();

    bool copies = warp >= GROUPS * 4;
    int g = copies ? warp - GROUPS * 4 : warp / 4, slice = blockIdx.x % SLICES * SLICE;
    int start = (blockIdx.x / SLICES * GROUPS + g) * most, at_once = gridDim.x / SLICES * GROUPS * most;
    int limit = at_once * int(rounds);  // tokens of all blocks
    Ring<SLOTS> ring(barriers + g * SLOTS * BARRIERS);
    slots += g * SLOTS * SLOT;
    z += slice, means += slice, dy += slice, dz += slice, gated += slice;
    if (copies) {
        if (g >= GROUPS) return;
        int row = lane / 8, piece = lane % 8;  // a thread has 16 bytes of every fourth row
        for (int of_group = start; of_group < limit; of_group += at_once) {
            int first = of_group + row, end = min(of_group + most, all);
            auto copy = [&](const T *from, i64 stride, int place, int flip) {
                wait_for(ring.empty(), ring.phase() ^ 1);
                unsigned to = slots + ring.place() * SLOT + row * 128 + place * 16;
                from += first * stride + piece * 8;
#pragma unroll 4
                for (int token = first; token < end; token += 4, from += 4 * stride)
                    copy_16_async(to, from), to = to + 4 * 128 ^ flip;
                arrive_when_copied(ring.full());
                ring.next();
            };
#pragma unroll 1
            for (int c = 0; c < C; c += 64) copy(dout + c, C, piece ^ row, 4 * 16);
#pragma unroll 1
            for (int d = 0; d < SLICE; d += 64) {
                copy(z + d, 2 * D, piece ^ row % 2 * 4, 0);
                copy(means + d, D, piece ^ row % 2 * 4, 0);
            }
        }
        wait_for_all_copies();
        return;
    }

    // The weights of a column of dout are rows of 64 channels, in an order in which a lane has 8 neighbours of dgated.
#pragma unroll 8
    for (int i = threadIdx.x; i < C * SLICE / 8; i += GROUPS * 128) {
        int piece = i % 8, c = i / 8 % C, chunk = i / 8 / C;
        Pack<T, 8> v = load<8>(out_proj + (i64(c) * D + slice + chunk * 64 + piece * 8));
#pragma unroll
        for (int w = 0; w < 4; w++)
            store_shared(weights + (chunk * C + c) * 128 + (piece / 4 * 4 + w ^ c % 8) * 16 + piece % 4 * 4, v.word[w]);
    }
    show_to_products();
    arrive(weights_there);
    wait_for(weights_there, 0);

    int row = warp % 4 * 16 + lane / 4, L = length;
    unsigned of_piece = row * 128 + (lane % 4 ^ row % 2 * 4) * 16;
    for (int of_group = start; of_group < limit; of_group += at_once) {
        int token = of_group + row, end = min(of_group + most, all);
        float scale[2], sums[SLICE / 2];
#pragma unroll
        for (int i = 0; i < 2; i++) scale[i] = scales && token + i * 8 < end ? scales[(token + i * 8) / L] : 1;
#pragma unroll 1
        for (int c = 0; c < C; c += 64, ring.next()) {
            wait_for(ring.full(), ring.phase());
            show_to_products();
            hold(sums);
            begin_products();
#pragma unroll
            for (int k = 0; k < 64; k += 16)
                multiply_shared(T{}, sums, slots + ring.place() * SLOT + k * 2, weights + (c + k) * 128, C * 128, c + k > 0);
            commit_products();
            wait_for_products<1>();  // those before
            if (c > 0 && lane == 0) arrive(ring.empty_before());
        }
        wait_for_products<0>();
        hold(sums);
        if (lane == 0) arrive(ring.empty_before());

#pragma unroll
        for (int d = 0; d < SLICE; d += 64, ring.next()) {
            wait_for(ring.full(), ring.phase());
            unsigned z_at = slots + ring.place() * SLOT + of_piece;
            ring.next();
            wait_for(ring.full(), ring.phase());
            unsigned mean_at = slots + ring.place() * SLOT + of_piece;
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned zs[4], ms[4], dys[4], dzs[4], gateds[4];
                    load_shared(zs, (z_at ^ half * 64) + i * 8 * 128), load_shared(ms, (mean_at ^ half * 64) + i * 8 * 128);
                    if (i == 1 && half == 1) {
                        __syncwarp();
                        if (lane == 0) arrive(ring.empty_before()), arrive(ring.empty());
                    }
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        Floats<2> x = unpack(T{}, zs[w]), m = unpack(T{}, ms[w]), of_y, of_z, of_gated;
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            float dgated = scale[i] * sums[(d / 8 + half * 4 + w) * 4 + i * 2 + j];
                            float s = sigmoid(x.at[j]), silu = x.at[j] * s;
                            of_y.at[j] = 0.5f * dgated * silu;
                            of_z.at[j] = dgated * m.at[j] * silu_slope(x.at[j], s);
                            of_gated.at[j] = scale[i] * m.at[j] * silu;
                        }
                        dys[w] = pack(T{}, of_y.at[0], of_y.at[1]), dzs[w] = pack(T{}, of_z.at[0], of_z.at[1]);
                        gateds[w] = pack(T{}, of_gated.at[0], of_gated.at[1]);
                    }
                    auto write = [&](T *to, i64 stride, const unsigned (&v)[4]) {
                        to += (token + i * 8) * stride + d + half * 32 + lane % 4 * 8;
                        if (token + i * 8 < end) store(to, Pack<T, 8>{v[0], v[1], v[2], v[3]});
                    };
                    write(dy, 2 * D, dys), write(dz, 2 * D, dzs), write(gated, D, gateds);
                }
        }
    }
}
