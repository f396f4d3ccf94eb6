// summary.cu's scan_summary of Longhorn's gradients for 16-bit inputs, three tokens at a time. Tokens are counted in the order
// they are read, from the last on; g and dy belong to a channel, a = k^2 and q to a state. F_t = dL/dS_t = dy_t q_t + what
// comes from the tokens before t, so
//   F_3 = A F_0 + dy_1 q_1 (1 - g_1 a_1) (1 - g_2 a_2) + dy_2 q_2 (1 - g_2 a_2) + dy_3 q_3
//   A = (1 - g_0 a_0) (1 - g_1 a_1) (1 - g_2 a_2)
// Multiplied out, A is one plus 7 products of something of a channel and something of a state, and so is, without the one,
// what is added: products of matrices, (channels, 8) times (8, states), which tensor cores do. What is left is two
// instructions for a state and three tokens.
//
// For A they read fp16: g_t (1 + k_t.k_t) and a_t / (1 + k_t.k_t) are at most 1, so that an error is 2^-12 of at most 1. For
// the rest they read the type of the inputs, which has dy and q exactly.
//
// A warp has C / 2 times 16 channels. Lane 4 c + p has channels c and c + 8 of 16 and, of each 8 states, numbers 2 p and
// 2 p + 1. Of 4 triples it computes the factors of number p.

constexpr int THREADS = 32 * WARPS, SIXTEENS = C / 2, OCTETS = N / 8, TRIPLES = TILE / 3;
constexpr int BLOCK_CHANNELS = WARPS * WARP_CHANNELS;
// triples whose products are interleaved: compilers for newer GPUs spill what they read ahead for all
#if __CUDA_ARCH__ >= 1000
constexpr int AT_ONCE = 2;
#else
constexpr int AT_ONCE = 4;
#endif
static_assert(TILE == 24 && sizeof(T) == 2 && N % 16 == 0 && NL == OCTETS * 2 && C % 2 == 0);

// A tile as it is in memory, but by 8 channels: logits, then dy of the next token
struct Tile {
    alignas(16) T at[2][BLOCK_CHANNELS / 8][TILE][8];
};

// What a block's channels share, of each triple: factors of states as lanes read them (`slot`), of A and of what is added,
// for two octets (`word`); and 1 / (1 + k.k)
struct States {
    alignas(16) unsigned factor[TRIPLES][OCTETS / 2][32][4];
    alignas(16) float norm[TRIPLES][4];
};

// The factors of a warp's channels, of 4 triples: of A, channels c and c + 8, then of what is added
struct Channels {
    alignas(16) unsigned factor[SIXTEENS][4][32][4];
};

struct Block {
    Tile tiles[2];
    States states[2];
    Channels channels[WARPS];
};

// Where lane 4 c + p reads, so that those that write one factor of many states, or of many triples, meet in no bank
DEVICE int state_slot(int c, int p) { return c * 4 + (p ^ c >> 1); }
DEVICE int channel_slot(int triple, int c, int p) { return c * 4 + (p ^ triple); }
DEVICE int word(int triple, int octet, bool added) { return octet % 2 + 2 * (triple % 2 ^ added); }

// of both halves of a word; PTX has a product of bf16 for newer GPUs only, which rounds the same
DEVICE unsigned multiply_both(bf16, unsigned a, unsigned b) {
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}
DEVICE unsigned multiply_both(fp16, unsigned a, unsigned b) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// The eight columns of a triple, or rows, as lanes have them: of A from three gates g, of what is added from gates and three
// values v, of which `v_01` and `v_2` are words, the latter with v_2 in its lower half and anything in the upper one. Or with
// -a for g and q for v.
struct Factors {
    unsigned decay[4], added[4];
    __device__ __forceinline__ Factors(const float (&g)[3], unsigned v_01, unsigned v_2) {
        unsigned g_1 = pack(T{}, g[1], 0), g_2 = pack(fp16{}, g[2], g[2]);
        decay[0] = pack(fp16{}, g[0], g[1]);         // g_0, g_1
        decay[1] = pack(fp16{}, g[2], g[0] * g[1]);  // g_2, g_0 g_1
        decay[2] = multiply_both(fp16{}, decay[0], g_2);  // g_0 g_2, g_1 g_2
        decay[3] = multiply_both(fp16{}, decay[1], g_2 & 0xffff0000u);  // 0, g_0 g_1 g_2
        added[0] = v_01;  // v_0, v_1
        added[1] = __byte_perm(v_2, multiply_both(T{}, v_01, g_1), 0x5410);  // v_2, g_1 v_0
        added[2] = multiply_both(T{}, v_01, pack(T{}, g[2], g[2]));  // g_2 v_0, g_2 v_1
        added[3] = multiply_both(T{}, added[2], g_1);  // g_1 g_2 v_0, 0
    }
};

// The factors of a tile's states, read ahead by all threads: a thread has two states, n and n + 8, of one triple
struct StateFactors {
    static_assert(N == 16 && TRIPLES * 8 == THREADS);
    Sequence<const T> ks, qs;
    int triple, n;
    T k[2][3], q[2][3];  // q of the next token
    __device__ __forceinline__ StateFactors(const Sequence<const T> &k, const Sequence<const T> &q)
        : ks(k), qs(q), triple(threadIdx.x / 8), n(threadIdx.x % 8) {
        ks.data += n, qs.data += n;
    }
    // from token t0 on, of which `tokens` exist
    __device__ __forceinline__ void fetch(int t0, int tokens) {
#pragma unroll
        for (int j = 0; j < 3; j++) {
            int t = triple * 3 + j;
            const T *key = ks.at(t0 + t), *query = qs.at(t0 + t + 1);
#pragma unroll
            for (int o = 0; o < 2; o++) {
                k[o][j] = t < tokens ? key[8 * o] : T{};
                q[o][j] = t + 1 < tokens ? query[8 * o] : T{};
            }
        }
    }
    __device__ __forceinline__ void put(States &to) const {
        float minus_a[2][3], norm[3];
#pragma unroll
        for (int j = 0; j < 3; j++) {
            float kk = 0;
#pragma unroll
            for (int o = 0; o < 2; o++) {
                float key = to_floats(Pack<T, 1>{k[o][j]}).at[0];
                minus_a[o][j] = -key * key;
                kk -= minus_a[o][j];
            }
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) kk += __shfl_xor_sync(WARP, kk, distance);
            norm[j] = reciprocal(1 + kk);
#pragma unroll
            for (int o = 0; o < 2; o++) minus_a[o][j] *= norm[j];
        }
        Factors first(minus_a[0], q[0][0].bits | unsigned(q[0][1].bits) << 16, q[0][2].bits);
        Factors second(minus_a[1], q[1][0].bits | unsigned(q[1][1].bits) << 16, q[1][2].bits);
#pragma unroll
        for (int p = 0; p < 4; p++) {
            unsigned(&row)[4] = to.factor[triple][0][state_slot(n, p)];
            store(row + word(triple, 0, false), Pack<unsigned, 2>{first.decay[p], second.decay[p]});
            store(row + word(triple, 0, true), Pack<unsigned, 2>{first.added[p], second.added[p]});
        }
        if (n == 0) store(to.norm[triple], Floats<4>{norm[0], norm[1], norm[2], 0});
    }
};

// Copies to tiles, VECTOR channels at once: half of the block's threads logits, half dy
struct Copies {
    static constexpr int HALF = THREADS / 2, ROW = BLOCK_CHANNELS / VECTOR, TOKENS = HALF > ROW ? HALF / ROW : 1;
    static constexpr int TIMES = ROW > HALF ? ROW / HALF : 1, APART = HALF * VECTOR;  // a row takes, and channels between
    static_assert(TILE % TOKENS == 0 && (TIMES == 1 || APART % 8 == 0));
    Sequence<const T> source;
    int half, token, c, left;  // channels from the thread's first on
    __device__ __forceinline__ Copies(const Sequence<const T> &logits, const Sequence<const T> &dys, i64 first, i64 D)
        : source(threadIdx.x < HALF ? logits : dys), half(threadIdx.x / HALF), token(threadIdx.x % HALF / ROW),
          c(threadIdx.x % HALF % ROW * VECTOR), left(min(D - first, i64(BLOCK_CHANNELS)) - c) {
        source.data += first + c;
        asm("" : "+l"(source.data));  // or the compiler would add it up again for every tile
    }
    // from token t0 on, of which `tokens` exist; zeros for the others
    __device__ __forceinline__ void start(Tile &tile, int t0, int tokens) const {
        T *to = &tile.at[half][c / 8][token][c % 8];
#pragma unroll
        for (int n = 0; n < TIMES; n++) {
            int exist = n * APART < left ? tokens - half - token : 0;
#pragma unroll
            for (int t = 0; t < TILE; t += TOKENS)
                copy_async<VECTOR>(to + (n * APART / 8 * TILE + t) * 8, source.at(t0 + half + token + t) + n * APART,
                                   t < exist);
        }
        commit_copies();
    }
};

// A block's place in the grid, a boundary between segments of a sequence, and this lane's first channel
struct Place {
    i64 g, b, boundary, block_d, d;
    int warp, lane, c, p;
    __device__ __forceinline__ Place(unsigned block, unsigned B, i64 D, unsigned boundaries) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane / 4, p = lane % 4;
        unsigned blocks = (unsigned(D) + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
        block_d = block % blocks * BLOCK_CHANNELS;
        d = block_d + warp * WARP_CHANNELS + c;
        boundary = block / blocks % boundaries;
        b = block / blocks / boundaries % B;
        g = block / blocks / boundaries / B;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
scan_summary(TOKENS(const T, dy), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
             const float *__restrict__ rates, const float *__restrict__ biases, float *__restrict__ ends,
             float *__restrict__ decays, i64 B, i64 L, i64 D, i64 reverse, i64 segment_chunks) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Block) == BLOCK_BYTES);
    Block &block = *reinterpret_cast<Block *>(shared);

    int chunks = (L + CHUNK - 1) / CHUNK, length = segment_chunks, boundaries = (chunks + length - 1) / length - 1;
    Place at(blockIdx.x, B, D, boundaries);
    int lane = at.lane, c = at.c, p = at.p;
    // the tokens of the segment, counted from the other end
    int first = (at.boundary + 1) * length * CHUNK, begin = max(0, int(L) - first - length * CHUNK), end = int(L) - first;
    bool backwards = !(reverse >> at.g & 1);
    Sequence<const T> ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
    Sequence<const T> dys(TOKENS_OF(dy), at.g, at.b, L, backwards);
    Sequence<const T> logits(TOKENS_OF(logit), at.g, at.b, L, backwards);
    Copies copies(logits, dys, at.block_d, D);
    StateFactors keys(ks, qs);
    copies.start(block.tiles[0], begin, end - begin);
    keys.fetch(begin, end - begin);

    // `F[s][o][2 i + j]` is state 8 o + 2 p + j of channel 16 s + c + 8 i
    float F[SIXTEENS][OCTETS][4], decay[SIXTEENS][OCTETS][4], bias[SIXTEENS][2] = {};
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            i64 channel = at.d + 16 * s + 8 * i;
            bool exists = channel < D;
            if (biases && exists) bias[s][i] = -LOG2E * biases[at.g * D + channel];
            float dy = exists ? to_floats(load<1>(dys.at(begin) + channel)).at[0] : 0;
#pragma unroll
            for (int o = 0; o < OCTETS; o++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    decay[s][o][2 * i + j] = 1;
                    F[s][o][2 * i + j] = dy * to_floats(load<1>(qs.at(begin) + 8 * o + 2 * p + j)).at[0];
                }
        }

    // The rows that this lane names of 12 tokens of 16 channels: lane p gets the first two of triple p of logits and dy of
    // channels c and c + 8; then its third of these 12 and of the 12 after
    int octet = at.warp * (WARP_CHANNELS / 8) + lane / 8 % 2, pair = lane % 8 / 2 * 3;
    int first_two = pair + lane % 2, third = pair + 2 + lane % 2 * 12;
    unsigned(&factors)[SIXTEENS][4][32][4] = block.channels[at.warp].factor;
    keys.put(block.states[0]);
    keys.fetch(begin + TILE, end - begin - TILE);
    int buffer = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE) {
        wait_for_copies<0>();
        __syncthreads();
        copies.start(block.tiles[buffer ^ 1], t0 + TILE, end - t0 - TILE);
        keys.put(block.states[buffer ^ 1]);
        keys.fetch(t0 + 2 * TILE, end - t0 - 2 * TILE);
        const T(*rows)[8] = block.tiles[buffer].at[lane / 16][octet];
        const States &states = block.states[buffer];
#pragma unroll
        for (int four = 0; four < 2; four++) {
            Floats<4> norm = load<4>(states.norm[4 * four + p]);
            int shift = four ? 16 : 0;  // to the half of a word that is of these 4 triples
            unsigned two[SIXTEENS][4], one[SIXTEENS][4];
            float gate[SIXTEENS][2][3];
#pragma unroll
            for (int s = 0; s < SIXTEENS; s++) {
                load_transposed(two[s], rows[2 * s * TILE + 12 * four + first_two]);
                load_transposed(one[s], rows[2 * s * TILE + third]);
            }
            // all gates side by side, since each is a long chain
#pragma unroll
            for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    Floats<2> logits = unpack(T{}, two[s][i]);
                    float logit[3] = {logits.at[0], logits.at[1], unpack(T{}, one[s][i] >> shift).at[0]};
#pragma unroll
                    for (int j = 0; j < 3; j++)
                        gate[s][i][j] = reciprocal(fmaf(exp2_fast(fmaf(logit[j], -LOG2E, bias[s][i])), norm.at[j], 1));
                }
            __syncwarp();
#pragma unroll
            for (int s = 0; s < SIXTEENS; s++) {
                Factors of_c(gate[s][0], two[s][2], one[s][2] >> shift), of_c_8(gate[s][1], two[s][3], one[s][3] >> shift);
#pragma unroll
                for (int w = 0; w < 4; w++)
                    store(factors[s][p][channel_slot(p, c, w)],
                          Pack<unsigned, 4>{of_c.decay[w], of_c_8.decay[w], of_c.added[w], of_c_8.added[w]});
            }
            __syncwarp();
#pragma unroll AT_ONCE
            for (int j = 0; j < 4; j++) {
                Pack<unsigned, 4> channel[SIXTEENS];
#pragma unroll
                for (int s = 0; s < SIXTEENS; s++) channel[s] = load<4>(factors[s][j][channel_slot(j, c, p)]);
#pragma unroll
                for (int o = 0; o < OCTETS; o += 2) {
                    Pack<unsigned, 4> state = load<4>(states.factor[4 * four + j][o / 2][state_slot(c, p)]);
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int s = 0; s < SIXTEENS; s++) {
                            float A[4], added[4], (&of)[4] = F[s][o + i];
                            multiply(fp16{}, A, channel[s].at[0], channel[s].at[1], state.at[word(j, i, false)], 1);
                            multiply(T{}, added, channel[s].at[2], channel[s].at[3], state.at[word(j, i, true)], 0);
#pragma unroll
                            for (int x = 0; x < 4; x++) {
                                of[x] = fmaf(A[x], of[x], added[x]);
                                decay[s][o + i][x] *= A[x];
                            }
                        }
                }
            }
        }
        buffer ^= 1;
    }
    wait_for_copies<0>();  // of tiles that do not exist
    unsigned index = blockIdx.x;
    asm("" : "+r"(index), "+r"(boundaries), "+l"(D));  // or registers would hold all the time what follows from them
    Place to(index, B, D, boundaries);
    i64 offset = state_offset(to.g, to.b, to.boundary, 2 * p, to.d, B, boundaries, D);
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (to.d + 16 * s + 8 * i < D)
#pragma unroll
                for (int o = 0; o < OCTETS; o++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        i64 place = offset + (8 * o + j) * D + 16 * s + 8 * i;
                        ends[place] = F[s][o][2 * i + j];
                        decays[place] = decay[s][o][2 * i + j];
                    }
}
