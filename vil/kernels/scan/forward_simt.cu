// The forward scan without tensor cores, for the tokens of a segment:
//   S_t = decay_t S_{t-1} + drive_t        y_t = sum over states of q_t S_t, + skip x_t
// The kernel saves S before every chunk except the first, for the backward pass.
// `initial_states` contains the states before all segments except the first.
// A warp scans GROUPS groups of DL channels of one segment (lanes.cuh).
// Warps of a CTA share only keys, queries and the barrier of each tile (simt_scan.cuh).
//
// forward_simt.py declares the parameters of the kernel.

#include "simt_scan.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS) scan_forward(PARAMETERS_scan_forward) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);

    Cut cut(L, segment_chunks);
    Position at(B, D, cut.segments);
    bool backwards = reverse >> at.g & 1;
    Input ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    Sequence<Element> ys({y + at.d, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    int begin = at.segment * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    float *chunk_state = chunk_states + state_offset(at.g, at.b, begin / CHUNK - 1, at.n, at.d, B, cut.chunks - 1, D);

    States lane_A, S = {};
    load_A(lane_A, A, at, D);
    // The first lane of each channel adds the skip connection.
    Floats<DL> lane_skip = skip && at.valid && at.part == 0 ? load<DL>(skip + at.g * D + at.d) : Floats<DL>{};
    if (at.segment > 0 && at.valid)
        load_states(
            S, initial_states + state_offset(at.g, at.b, at.segment - 1, at.n, at.d, B, cut.segments - 1, D), D);

    auto at_chunk = [&](int t) {
        if (keep && at.valid && t > 0) store_states(chunk_state, S, D);
        chunk_state += N * D;
    };
    // Sums y over the lanes of a channel.
    // In each exchange, a lane sends half of its tokens (or its only token) to its partner and receives as many.
    auto finish = [&](Floats<DL> (&y)[UNROLL], int t, int left) {
        int count = UNROLL, first = 0;
        UNROLLED for (int bit = 1; bit < PARTS; bit *= 2) {
            bool upper = at.part & bit;
            if (count > 1) {
                count /= 2;
                first += upper ? count : 0;
            }
            UNROLLED for (int j = 0; j < count; j++)
                UNROLLED for (int c = 0; c < DL; c++) {
                    float low = y[j].at[c], high = y[UNROLL > bit ? j + count : j].at[c];
                    y[j].at[c] = (upper ? high : low) + __shfl_xor_sync(WARP, upper ? low : high, part_distance(bit));
                }
        }
        UNROLLED for (int j = 0; j < count; j++)
            if (at.valid && at.part < UNROLL && first + j < left)
                store(ys.at(t + first + j), from_floats<Element>(y[j]));
    };
    // Exchanges have a long latency, which the arithmetic of the next tokens hides if there are enough registers.
    Floats<DL> last_y[UNROLL] = {};
    int last_t = begin, last_left = 0;
    auto scan = [&](const Token (&tokens)[UNROLL], int t, int left) {
        // If a lane has few channels and does not load ahead, several chains of sums avoid waiting for each addition.
        constexpr int CHAINS = !AHEAD && DL < 4 ? 4 / DL : 1;
        Floats<DL> y[UNROLL];
        if (AHEAD) finish(last_y, last_t, last_left);
        UNROLLED for (int j = 0; j < UNROLL; j++) {
            Floats<DL> x = tokens[j].value(), step_size = tokens[j].step_size();
            float sums[CHAINS][DL] = {};
            UNROLLED for (int c = 0; c < DL; c++) sums[0][c] = lane_skip.at[c] * x.at[c];
            UNROLLED for (int n = 0; n < NL; n += 4) {
                Floats<4> k = tokens[j].k(n), q = tokens[j].q(n);
                UNROLLED for (int i = 0; i < 4; i++)
                    UNROLLED for (int c = 0; c < DL; c++) {
                        Recurrence::update(S[n + i][c], x.at[c], step_size.at[c], k.at[i], lane_A[n + i][c]);
                        sums[i % CHAINS][c] = fmaf(S[n + i][c], q.at[i], sums[i % CHAINS][c]);
                    }
            }
            UNROLLED for (int c = 0; c < DL; c++) {
                y[j].at[c] = sums[0][c];
                UNROLLED for (int i = 1; i < CHAINS; i++) y[j].at[c] += sums[i][c];
            }
        }
        if (AHEAD) {
            UNROLLED for (int j = 0; j < UNROLL; j++) last_y[j] = y[j];
            last_t = t, last_left = left;
        } else {
            finish(y, t, left);
        }
    };
    scan_tiles(cta, TOKENS_OF(x), TOKENS_OF(step_logits), ks, qs, step_bias, begin, end, L, backwards,
               key_vectors, at, D, at_chunk, scan);
    if (AHEAD) finish(last_y, last_t, last_left);
}
