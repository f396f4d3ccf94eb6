// For sequences cut into segments that run in parallel. `scan_summary` runs a segment from a zero state and writes the
// state it ends in and the product of its decays; `scan_combine` passes from segment to segment what that makes of the
// states between them. The segment that no other follows is left out. With GRADIENTS the same for G = dL/dS, whose
// recurrence runs the other way.
//   states       S_t = decay_t S_{t-1} + drive_t
//   gradients    G_t = decay_{t+1} G_{t+1} + dy_t q_t

#include "lanes.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
scan_summary(TOKENS(const T, value), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
             const float *__restrict__ rates, const float *__restrict__ biases, float *__restrict__ ends,
             float *__restrict__ decays, i64 B, i64 L, i64 D, i64 reverse, i64 segment_chunks, i64 key_vectors) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Block) == BLOCK_BYTES);
    Block &block = *reinterpret_cast<Block *>(shared);

    int chunks = (L + CHUNK - 1) / CHUNK, segments = (chunks + segment_chunks - 1) / segment_chunks;
    Place at(B, D, segments - 1);
    int begin = (at.segment + GRADIENTS) * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    bool backwards = (reverse >> at.g & 1) != GRADIENTS;
    if (GRADIENTS) {  // the tokens of the segment, counted from the other end
        int first = L - end;
        end = L - begin;
        begin = first;
    }
    Sequence<const T> ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);

    States A, S = {}, decay;
    load_rates(A, rates, at, D);
#pragma unroll
    for (int n = 0; n < NL; n++)
#pragma unroll
        for (int c = 0; c < C; c++) decay[n][c] = 1;
    auto step = [&](const Token (&tokens)[UNROLL], int, int left) {
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            if (j >= left) break;
            Floats<C> value = tokens[j].value(), gate = tokens[j].gate();
#pragma unroll
            for (int n = 0; n < NL; n += 4) {
                Floats<4> k = tokens[j].k(n), q = tokens[j].q(n);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int c = 0; c < C; c++) {
                        float decay_t = R::decay(gate.at[c], GRADIENTS ? k.at[i] : k.at[i] * k.at[i], A[n + i][c]);
                        if (GRADIENTS)
                            S[n + i][c] = decay_t * fmaf(value.at[c], q.at[i], S[n + i][c]);
                        else  // the drive of both recurrences
                            S[n + i][c] = fmaf(decay_t, S[n + i][c], gate.at[c] * value.at[c] * k.at[i]);
                        decay[n + i][c] *= decay_t;
                    }
            }
        }
    };
    // gradients need the keys only as squares
    run<GRADIENTS>(block, TOKENS_OF(value), TOKENS_OF(logit), ks, qs, biases, begin, end, L, backwards, key_vectors, at,
                   D, [](int) {}, step);
    if (at.valid) {
        i64 offset = state_offset(at.g, at.b, at.segment, at.n, at.d, B, segments - 1, D);
        store_states(ends + offset, S, D);
        store_states(decays + offset, decay, D);
    }
}

// The states between segments, or with GRADIENTS their gradients; one thread for each state
extern "C" __global__ void scan_combine(const float *__restrict__ ends, const float *__restrict__ decays,
                                        float *__restrict__ between, i64 sequences, i64 segments, i64 ND) {
    i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x, sequence = i / ND, state = i % ND;
    if (sequence >= sequences) return;
    float carried = 0;
    // unrolled, so that the reads of several boundaries are on their way at once
#pragma unroll 8
    for (i64 j = 0; j < segments - 1; j++) {
        i64 boundary = GRADIENTS ? segments - 2 - j : j, at = (sequence * (segments - 1) + boundary) * ND + state;
        carried = fmaf(decays[at], carried, ends[at]);
        between[at] = carried;
    }
}
