// Longhorn's forward scan for 16-bit inputs and 16 states, two tokens at a time on tensor cores.
// Step sizes e and inputs x differ between channels, k and a = k^2 differ between states. For tokens 0 and 1:
//   S_2 = A S_0 + B        A = 1 - e_0 a_0 - e_1 a_1 + (e_0 e_1) (a_0 a_1)
//                          B = (e_0 x_0) k_0 + (e_1 x_1) k_1 - (e_1 e_0 x_0) (a_1 k_0)
// A - 1 and B are matrix products of the shapes (channels, 3) and (3, states), which tensor cores compute.
// Besides the matrix products, updating a state takes one FMA per two tokens.
// The outputs are also matrix products, with the states before a pair of tokens:
//   y_1 = S_2 q_1          y_0 = S_0 q_0 - e_0 (S_0 (a_0 q_0)) + (e_0 x_0) (k_0 q_0)
// docs/kernels/mathematics.md derives the equations and lists the rounding errors.
// A NaN or infinite input also affects up to four earlier tokens, in its channel or, if it is a key, in all channels.
//
// Roles of warps (docs/kernels/scan-forward.md describes layouts and buffers):
//  consumers            CONSUMERS warps, which scan 16 channels each                         (forward_mma_consumer.cuh)
//  copier               one warp, copies tiles to shared memory and y to global memory         (forward_mma_copier.cuh)
//  state producers      compute the operands of states from keys and queries                   (forward_mma_states.cuh)
//  channel producers    compute the operands of channels, 8 tokens x 16 channels at a time   (forward_mma_channels.cuh)
//
// All warps meet at one __syncthreads per tile.
// The last tile contains the token after the segment, because y of the last token may need the next pair's product.
// For n tiles, there are barriers 0 to n. In interval j, the time between barriers j and j + 1:
//
//  copier               starts copying tile j + STAGES - 1, which overwrites tile j - 1; stores y of tile j - 2;
//                       waits for the copy of tile j + 3
//  state producers      read keys and queries of tile j + 2, write states[(j + 2) % 3]
//  channel producers    read x and step logits of tile j + 1 and states[(j + 1) % 3], write channels[(j + 1) % 2]
//  consumers            read states[j % 3] and channels[j % 2], write y[j % 3] of tile j;
//                       write the last 8 tokens of y[j % 3] in interval j + 1, after the last two pairs of tile j
//
// The numbers of buffers follow from rule 1 of cuda/pipeline.cuh.
// Before barrier 0, the copier and the producers have two barriers of their own (`sync_producers`).
// `sync_producers` first follows the copies of tiles 0 and 1, and then the preparation of states[0] and states[1].
//
// forward_mma.py declares the parameters of the kernel.

#include "forward_mma_copier.cuh"
#include "forward_mma_states.cuh"
#include "forward_mma_channels.cuh"
#include "forward_mma_consumer.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_forward(PARAMETERS_scan_forward) {
    begin_kernel();
    extern __shared__ __align__(128) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);

    Cut cut(L, segment_chunks);
    Position at(B, D, cut.segments);
    bool backwards = reverse >> at.g & 1;
    int begin = at.segment * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    // Entries of the operands that belong to no pair or query stay zero.
    for (int i = threadIdx.x * 16; i < int(sizeof cta.states + sizeof cta.channels); i += THREADS * 16)
        store((float *)((char *)cta.states + i), Floats<4>{});
    __syncthreads();
    if (at.warp >= CONSUMERS) {
        int role = 0, states_before = 0, units_before = 0;
        UNROLLED for (int i = 0; i < PRODUCERS; i++) {
            if (at.warp - CONSUMERS == i) role = ROLE[i];
            if (at.warp - CONSUMERS > i)
                states_before += ROLE[i] == STATE_PRODUCER, units_before += max(ROLE[i], 0);
        }
        if (role == COPIER) {
            Input xs(TOKENS_OF(x), at.g, at.b, L, backwards), step(TOKENS_OF(step_logits), at.g, at.b, L, backwards);
            Input ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
            Sequence<Element> ys({y, B * L * D, L * D, D}, at.g, at.b, L, backwards);
            copy_tiles(cta, xs, step, ks, qs, ys, D, begin, end, at);
        } else if (role == STATE_PRODUCER) {
            produce_states(cta, states_before, begin, end, at);
        } else if (count_of(1) && role == 1) {
            produce_channels<1>(cta, units_before, skip, step_bias, step_proj, D, begin, end, at);
        } else {
            produce_channels<2>(cta, units_before, skip, step_bias, step_proj, D, begin, end, at);
        }
        return;
    }

    i64 d = at.cta_d + at.warp * 16 + at.c;
    float *chunk_state = chunk_states + state_offset(at.g, at.b, begin / CHUNK - 1, 2 * at.p, d, B, cut.chunks - 1, D);
    initial_states += state_offset(at.g, at.b, at.segment - 1, 2 * at.p, d, B, cut.segments - 1, D);
    PairStates S = {};
    if (at.segment > 0) for_states(S, D - d, D, [&](float &s, i64 offset) { s = initial_states[offset]; });
    consume(cta, S, begin, end, at, [&](PairStates &S, int t) {
        if (keep && t > 0 && t < end)
            for_states(S, D - d, D, [&](float &s, i64 offset) { chunk_state[offset] = s; });
        chunk_state += N * D;
    });
}
