// States between the segments of a sequence, or their gradients if GRADIENTS is true.
// `segment_states` scans a segment from a state of 0 to its final state E, and computes the product P of its decays.
// `pass_states` computes the states between segments, one after another: S becomes P S + E.
// The segment that is processed last is omitted, because no other segment follows.
// With GRADIENTS, the recurrence runs in the opposite direction, where F_t is the part of dL/dS_t from tokens after t:
//   states       S_t = decay_t S_{t-1} + drive_t
//   gradients    F_{t-1} = decay_t (F_t + dy_t q_t)
// The layout is the layout of the forward scan (lanes.cuh, simt_scan.cuh). `value` is x or, with GRADIENTS, dy.
//
// segments.py declares the parameters of the kernels.

#include "simt_scan.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS) segment_states(PARAMETERS_segment_states) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);

    Cut cut(L, segment_chunks);
    Position at(B, D, cut.segments - 1);
    int begin = (at.segment + GRADIENTS) * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    bool backwards = (reverse >> at.g & 1) != GRADIENTS;
    // The tokens of the segment are counted from the end of the sequence.
    if (GRADIENTS) {
        int first = L - end;
        end = L - begin;
        begin = first;
    }

    Input ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    States lane_A, S = {}, decay;
    load_A(lane_A, A, at, D);
    fill(decay, 1);
    auto scan = [&](const Token (&tokens)[UNROLL], int, int left) {
        UNROLLED for (int j = 0; j < UNROLL; j++) {
            if (j >= left) break;
            Floats<DL> value = tokens[j].value(), step_size = tokens[j].step_size();
            UNROLLED for (int n = 0; n < NL; n += 4) {
                Floats<4> k = tokens[j].k(n), q = tokens[j].q(n);
                UNROLLED for (int i = 0; i < 4; i++)
                    UNROLLED for (int c = 0; c < DL; c++) {
                        float k_squared = GRADIENTS ? k.at[i] : k.at[i] * k.at[i];
                        float decay_t = Recurrence::decay(step_size.at[c], k_squared, lane_A[n + i][c]);
                        if (GRADIENTS)
                            S[n + i][c] = decay_t * fmaf(value.at[c], q.at[i], S[n + i][c]);
                        // The drive of both recurrences has the same form.
                        else
                            S[n + i][c] = fmaf(decay_t, S[n + i][c], step_size.at[c] * value.at[c] * k.at[i]);
                        decay[n + i][c] *= decay_t;
                    }
            }
        }
    };
    // Gradients need only the squares of keys.
    scan_tiles<GRADIENTS>(cta, TOKENS_OF(value), TOKENS_OF(step_logits), ks, qs, step_bias, begin, end, L,
                          backwards, key_vectors, at, D, [](int) {}, scan);
    if (at.valid) {
        i64 offset = state_offset(at.g, at.b, at.segment, at.n, at.d, B, cut.segments - 1, D);
        store_states(ends + offset, S, D);
        store_states(decays + offset, decay, D);
    }
}

// States between segments, or their gradients if GRADIENTS is true. Each thread computes one element of the states.
extern "C" __global__ void pass_states(PARAMETERS_pass_states) {
    begin_kernel();
    i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x, sequence = i / ND, state = i % ND;
    if (sequence >= sequences) return;
    float passed = 0;
    // The loop is unrolled to load several boundaries at the same time.
#pragma unroll 8
    for (i64 j = 0; j < segments - 1; j++) {
        i64 boundary = GRADIENTS ? segments - 2 - j : j, at = (sequence * (segments - 1) + boundary) * ND + state;
        passed = fmaf(decays[at], passed, ends[at]);
        between[at] = passed;
    }
}
