// y_t = S_t . q_t + skip x_t for the tokens of a segment, from the state before it. Keeps the state between chunks.

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS)
scan_forward(TOKENS(const T, x), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
             const float *__restrict__ rates, const float *__restrict__ skips, const float *__restrict__ biases,
             T *__restrict__ y, float *__restrict__ states, i64 B, i64 L, i64 D, i64 reverse, i64 segment_chunks,
             i64 keep, i64 key_vectors) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Warp) == WARP_BYTES);
    Warp &warp = reinterpret_cast<Warp *>(shared)[threadIdx.x / 32];

    i64 chunks = (L + CHUNK - 1) / CHUNK, segments = (chunks + segment_chunks - 1) / segment_chunks;
    Place at(B, D, segments);
    bool backwards = reverse >> at.g & 1;
    Sequence<const T> xs(TOKENS_OF(x), at.g, at.b, L, backwards), logits(TOKENS_OF(logit), at.g, at.b, L, backwards);
    Sequence<const T> ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    Sequence<T> ys({y, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    i64 begin = at.segment * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    float *kept = states + state_offset(at.g, at.b, begin / CHUNK - 1, at.n, at.d, B, chunks - 1, D);

    States A, S = {};
    load_rates(A, rates, at, D);
    // of the lanes that share a channel the first adds the skip connection and stores the sum
    bool first = at.valid && at.n == 0;
    Floats<C> skip = skips && first ? load<C>(skips + at.g * D + at.d) : Floats<C>{};
    if (begin > 0 && at.valid) load_states(S, kept, D);

    T *y_t = ys.at(begin) + at.d;
    auto at_chunk = [&](i64 t) {
        if (keep && at.valid && t > 0) store_states(kept, S, D);
        kept += N * D;
    };
    float sums[UNROLL][C];
    auto step = [&](int j, bool, Floats<C> x, Floats<C> gate, const float *k_t, const float *q_t) {
        // a sum of several chains, as a lane with few channels would else wait for each addition
        constexpr int CHAINS = C < 4 ? 4 / C : 1;
        float y[CHAINS][C] = {};
#pragma unroll
        for (int c = 0; c < C; c++) y[0][c] = skip.at[c] * x.at[c];
#pragma unroll
        for (int n = 0; n < NL; n += 4) {
            Floats<4> k = load<4>(k_t + n), q = load<4>(q_t + n);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int c = 0; c < C; c++) {
                    R::update(S[n + i][c], x.at[c], gate.at[c], k.at[i], A[n + i][c]);
                    y[i % CHAINS][c] = fmaf(S[n + i][c], q.at[i], y[i % CHAINS][c]);
                }
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            sums[j][c] = y[0][c];
#pragma unroll
            for (int i = 1; i < CHAINS; i++) sums[j][c] += y[i][c];
        }
    };
    // over the lanes of a channel; several tokens at once, as each step waits for a shuffle
    auto after = [&](int tokens) {
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2)
#pragma unroll
            for (int j = 0; j < UNROLL; j++)
#pragma unroll
                for (int c = 0; c < C; c++) sums[j][c] += __shfl_xor_sync(WARP, sums[j][c], distance);
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            Floats<C> y;
#pragma unroll
            for (int c = 0; c < C; c++) y.at[c] = sums[j][c];
            if (first && j < tokens) store(y_t, from_floats<T>(y));
            y_t += ys.stride;
        }
    };
    run(warp, xs, logits, ks, qs, biases, begin, end, key_vectors, at, D, at_chunk, step, after);
}
