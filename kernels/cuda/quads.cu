// forward.cu's scan for 16-bit inputs and batches that leave much of a GPU idle. A warp has 8 channels only, which makes
// many warps. Reading keys and queries and summing over states would then take most of the time; tensor cores do both:
//   keys     (2 tokens, states) = (2 of 8 tokens chosen) times (8 tokens, states): exact, as a sum of one key and zeros
//   outputs  (channels and 2 tokens, 8 tokens) = (channels and 2 tokens, states) times (states, 8 tokens), of which the
//            outputs are where both tokens are the same; states are cut to the 10 bits of tf32, their recurrence is fp32
// Of these products lane 4 c + p has channel c and of each 8 columns, states or tokens, columns 2 p and 2 p + 1.

constexpr int THREADS = 32 * WARPS, BLOCK_CHANNELS = WARP_CHANNELS * WARPS, OCTETS = N / 8;
static_assert(TILE == 32 && LANES == 4 && CHUNK % TILE == 0 && sizeof(T) == 2);

// A tile on its way from memory and as it is there, but by 8 states and 8 channels
struct Tile {
    alignas(16) T k[OCTETS][TILE][8];
    alignas(16) T q[OCTETS][TILE][8];
    alignas(16) T x[WARPS * C][TILE][8];
    alignas(16) T logit[WARPS * C][TILE][8];
};

// by 8 tokens and 8 channels
struct Warp {
    alignas(16) float x[TILE / 8][C][8][8];
    alignas(16) float gate[TILE / 8][C][8][8];
};

struct Block {
    Warp warps[2][WARPS];
    Tile tiles[STAGES];
};

// of a matrix of which each lane has elements 2 p and 2 p + 1 of row c
DEVICE unsigned transpose(unsigned m) {
    unsigned transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
    return transposed;
}

// (16, 8) times (8, 8). Of the product the lane has columns 2 p and 2 p + 1 of row c, then of row c + 8.
DEVICE void multiply(bf16, float (&product)[4], unsigned a_0, unsigned a_1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a_0), "r"(a_1), "r"(b), "f"(0.0f));
}
DEVICE void multiply(fp16, float (&product)[4], unsigned a_0, unsigned a_1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a_0), "r"(a_1), "r"(b), "f"(0.0f));
}
DEVICE void multiply_add_tf32(float (&sums)[4], float a_0, float a_1, float a_2, float a_3, float b_0, float b_1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a_0)), "r"(__float_as_uint(a_1)), "r"(__float_as_uint(a_2)), "r"(__float_as_uint(a_3)),
          "r"(__float_as_uint(b_0)), "r"(__float_as_uint(b_1)));
}

// One warp's place in the grid: a segment of a sequence; and the first channel of this lane, whose others are 8 apart
struct Place {
    i64 g, b, segment, block_d, warp_d, d;
    int warp, lane, c, p;
    __device__ __forceinline__ Place(i64 B, i64 D, i64 segments) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        c = lane / 4, p = lane % 4;
        i64 blocks = (D + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
        block_d = blockIdx.x % blocks * BLOCK_CHANNELS;
        warp_d = block_d + warp * WARP_CHANNELS;
        d = warp_d + c;
        segment = blockIdx.x / blocks % segments;
        b = blockIdx.x / blocks / segments % B;
        g = blockIdx.x / blocks / segments / B;
    }
};

// Copies rows of WIDTH elements of a tile's tokens, ELEMENTS at once, by all threads of the block
template <int WIDTH, int ELEMENTS>
struct Copies {
    static constexpr int ROW = WIDTH / ELEMENTS, ITEMS = (TILE * ROW + THREADS - 1) / THREADS, APART = THREADS / ROW;
    static_assert(THREADS % ROW == 0);
    Sequence<const T> source;
    int token, column;
    bool exists;
    __device__ __forceinline__ Copies(const Sequence<const T> &source, int width)
        : source(source), token(threadIdx.x / ROW), column(threadIdx.x % ROW * ELEMENTS), exists(column < width) {
        this->source.data += column;
        asm("" : "+l"(this->source.data));  // or the compiler would add it up again for every tile
    }
    // from token t0 on, of which `tokens` exist; zeros for the others
    __device__ __forceinline__ void start(T (&tile)[WIDTH / 8][TILE][8], int t0, int tokens) const {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int t = token + i * APART;
            if (TILE % APART == 0 || t < TILE)
                copy_async<ELEMENTS>(&tile[column / 8][t][column % 8], source.at(t0 + t), exists && t < tokens);
        }
    }
};

DEVICE void scatter(T *p, Pack<T, 2> two, i64 count) {
    p[0].bits = two.word[0];
    if (count > 1) p[1].bits = two.word[0] >> 16;
}

// What staging a tile takes of it: x, logits and k.k of the lane's own tokens, 2 p and 2 p + 1 of each 8
struct Unstaged {
    unsigned x[C][TILE / 8], logits[C][TILE / 8];
    Floats<2> kk[TILE / 8];
    __device__ __forceinline__ void read(const Tile &tile, const Place &at) {
#pragma unroll
        for (int ch = 0; ch < C; ch++) {
            load_transposed(x[ch], tile.x[at.warp * C + ch][at.lane]);
            load_transposed(logits[ch], tile.logit[at.warp * C + ch][at.lane]);
        }
#pragma unroll
        for (int i = 0; i < TILE / 8; i += 2) {
            // k.k are the diagonal of the product of keys and keys, here of 16 tokens with the first 8 and the last 8
            Floats<2> products[2][2] = {};
#pragma unroll
            for (int o = 0; o < OCTETS; o += 2) {
                unsigned k[4];
                load_matrices(k, tile.k[o + at.lane / 16][8 * i + at.lane % 16]);
                multiply_add(T{}, products[0], k[0], k[1], k[2], k[3], k[0], k[2]);
                multiply_add(T{}, products[1], k[0], k[1], k[2], k[3], k[1], k[3]);
            }
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    kk[i + half].at[j] = __shfl_sync(WARP, products[half][half].at[j], 9 * at.p + 4 * j);
        }
    }
    // gates and values in fp32, which the 4 lanes of a channel share, of 8 tokens
    __device__ __forceinline__ void stage(Warp &warp, int i, const Floats<C> &bias, const Place &at) const {
#pragma unroll
        for (int ch = 0; ch < C; ch++) {
            Floats<2> logit = unpack(T{}, logits[ch][i]), gate;
#pragma unroll
            for (int j = 0; j < 2; j++) gate.at[j] = R::gate(logit.at[j] + bias.at[ch], kk[i].at[j]);
            store(&warp.gate[i][ch][at.c][2 * at.p], gate);
            store(&warp.x[i][ch][at.c][2 * at.p], unpack(T{}, x[ch][i]));
        }
    }
};

// What the lane needs of 8 tokens
struct Octet {
    Floats<4> x[C][2], gate[C][2];
    unsigned k[OCTETS / 2][2], q[OCTETS / 2][2];
    __device__ __forceinline__ void read(const Warp &warp, const Tile &tile, int i, const Place &at) {
#pragma unroll
        for (int ch = 0; ch < C; ch++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                x[ch][j] = load<4>(&warp.x[i][ch][at.c][4 * j]);
                gate[ch][j] = load<4>(&warp.gate[i][ch][at.c][4 * j]);
            }
#pragma unroll
        for (int o = 0; o < OCTETS; o += 2) {
            int row = 8 * i + at.lane % 8;
            load_transposed(k[o / 2], tile.k[o + at.lane / 8 % 2][row]);
            load_matrices(q[o / 2], tile.q[o + at.lane / 8 % 2][row]);
        }
    }
};

typedef float States[NL][C];  // states 8 h + 2 p and + 1 for each h
DEVICE int state_of(int n) { return n / 2 * 8 + n % 2; }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
scan_forward(TOKENS(const T, x), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
             const float *__restrict__ rates, const float *__restrict__ skips, const float *__restrict__ biases,
             T *__restrict__ y, float *__restrict__ states, i64 B, i64 L, i64 D, i64 reverse, i64 segment_chunks,
             i64 keep, i64) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Block) == BLOCK_BYTES);
    Block &block = *reinterpret_cast<Block *>(shared);

    int chunks = (L + CHUNK - 1) / CHUNK, segments = (chunks + segment_chunks - 1) / segment_chunks;
    Place at(B, D, segments);
    bool backwards = reverse >> at.g & 1;
    int begin = at.segment * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    Copies<N, KEY_VECTOR> ks({TOKENS_OF(k), at.g, at.b, L, backwards}, N), qs({TOKENS_OF(q), at.g, at.b, L, backwards}, N);
    Copies<BLOCK_CHANNELS, VECTOR> xs({{x_data + at.block_d, x_stride_G, x_stride_B, x_stride_L}, at.g, at.b, L, backwards}, min(D - at.block_d, i64(BLOCK_CHANNELS)));
    Copies<BLOCK_CHANNELS, VECTOR> logits({{logit_data + at.block_d, logit_stride_G, logit_stride_B, logit_stride_L}, at.g, at.b, L, backwards}, min(D - at.block_d, i64(BLOCK_CHANNELS)));
    Sequence<T> ys({y + at.warp_d + 2 * at.p, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    float *kept = states + state_offset(at.g, at.b, begin / CHUNK - 1, 2 * at.p, at.d, B, chunks - 1, D);

    Floats<C> skip = {}, bias = {};
    States A = {}, S = {};
#pragma unroll
    for (int ch = 0; ch < C; ch++) {
        i64 d = at.d + 8 * ch;
        if (d >= D) continue;
        if (skips) skip.at[ch] = skips[at.g * D + d];
        if (biases) bias.at[ch] = biases[at.g * D + d];
#pragma unroll
        for (int n = 0; n < NL; n++) {
            if (R::HAS_RATES) A[n][ch] = R::rate(rates[(at.g * D + d) * N + 2 * at.p + state_of(n)]);
            if (begin > 0) S[n][ch] = kept[state_of(n) * D + 8 * ch];
        }
    }
    const unsigned one = from_floats<T>(Floats<2>{1, 0}).word[0];

    auto step = [&](const Octet &tokens, const unsigned (&own_x)[C][TILE / 8], int i, int t0) {
        float y[C][4][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int h = 0; h < OCTETS; h++) {
                float k[4];  // two states of token 2 j, two of the next
                multiply(T{}, k, at.p == j ? one : 0, at.p == j ? one << 16 : 0, tokens.k[h / 2][h % 2]);
                Floats<2> q = unpack(T{}, tokens.q[h / 2][h % 2]);
#pragma unroll
                for (int ch = 0; ch < C; ch++) {
                    float products[2][2];
#pragma unroll
                    for (int n = 0; n < 2; n++)
#pragma unroll
                        for (int odd = 0; odd < 2; odd++) {
                            float x = tokens.x[ch][j / 2].at[2 * j % 4 + odd];
                            float gate = tokens.gate[ch][j / 2].at[2 * j % 4 + odd];
                            R::update(S[2 * h + n][ch], x, gate, k[2 * odd + n], A[2 * h + n][ch]);
                            products[n][odd] = S[2 * h + n][ch];
                        }
                    multiply_add_tf32(y[ch][j], products[0][0], products[0][1], products[1][0], products[1][1], q.at[0],
                                      q.at[1]);
                }
            }
        int token = 8 * i + at.c;
        T *to = ys.at(t0 + token);
#pragma unroll
        for (int ch = 0; ch < C; ch++) {
            Floats<2> x = unpack(T{}, own_x[ch][i]), own = {};
#pragma unroll
            for (int j = 0; j < 4; j++)  // where the product's token is the column's
                if (j == 0 || at.p == j) own = {y[ch][j][0], y[ch][j][3]};
#pragma unroll
            for (int odd = 0; odd < 2; odd++) own.at[odd] = fmaf(skip.at[ch], x.at[odd], own.at[odd]);
            Pack<T, 2> two = {transpose(from_floats<T>(own).word[0])};
            i64 left = D - at.warp_d - 8 * ch - 2 * at.p;
            if (t0 + token < end && left > 0) {
                if (VECTOR > 1)
                    store(to + 8 * ch, two);
                else
                    scatter(to + 8 * ch, two, left);
            }
        }
    };

    auto copy = [&](int stage, int t0) {
        Tile &tile = block.tiles[stage];
        ks.start(tile.k, t0, end - t0);
        qs.start(tile.q, t0, end - t0);
        xs.start(tile.x, t0, end - t0);
        logits.start(tile.logit, t0, end - t0);
        commit_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy(s, begin + s * TILE);
    Unstaged here, next;
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    here.read(block.tiles[0], at);
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) here.stage(block.warps[0][at.warp], i, bias, at);
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE) {
        if ((t0 - begin) % CHUNK == 0) {
            if (keep && t0 > 0)
#pragma unroll
                for (int ch = 0; ch < C; ch++)
                    if (at.d + 8 * ch < D)
#pragma unroll
                        for (int n = 0; n < NL; n++) kept[state_of(n) * D + 8 * ch] = S[n][ch];
            kept += N * D;
        }
        // the next tile is staged while this one is worked on
        wait_for_copies<STAGES - 3>();
        __syncthreads();
        copy(stage > 0 ? stage - 1 : STAGES - 1, t0 + (STAGES - 1) * TILE);
        const Tile &tile = block.tiles[stage];
        const Warp &warp = block.warps[buffer][at.warp];
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        buffer ^= 1;
        next.read(block.tiles[stage], at);
        Octet tokens;
        tokens.read(warp, tile, 0, at);
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            Octet following;
            following.read(warp, tile, i + 1 < TILE / 8 ? i + 1 : i, at);
            next.stage(block.warps[buffer][at.warp], i, bias, at);
            step(tokens, here.x, i, t0);
            tokens = following;
        }
        here = next;
    }
}
