// summary.cu's scan_summary of Longhorn's gradients for 16-bit inputs, three tokens at a time. F_t = G_t + dy_t q_t, with what
// comes from behind, is dL/dS_t. Tokens are counted backwards here, g and dy belong to a channel, a = k^2 and q to a state:
//   F_3 = A F_0 + dy_1 q_1 (1 - g_1 a_1) (1 - g_2 a_2) + dy_2 q_2 (1 - g_2 a_2) + dy_3 q_3
//   A = (1 - g_0 a_0) (1 - g_1 a_1) (1 - g_2 a_2)
// Multiplied out, A is one plus 7 products of something of a channel and something of a state, and so is what is added but
// for the one: products of matrices, (channels, 8) times (8, states), which tensor cores do. What is left is two instructions
// for a state and three tokens.
//
// For A they read fp16: g_t (1 + k_t.k_t) and a_t / (1 + k_t.k_t) are at most 1, so that an error is 2^-12 of at most 1. For
// the rest they read the type of the inputs, which has dy and q exactly.
//
// A warp has C / 2 times 16 channels. Lane 4 c + p has channels c and c + 8 of 16 and, of each 8 states, numbers 2 p and
// 2 p + 1. Of 4 triples it computes the factors of number p.

constexpr int THREADS = 32 * WARPS, SIXTEENS = C / 2, OCTETS = N / 8, TRIPLES = TILE / 3;
constexpr int BLOCK_CHANNELS = WARPS * WARP_CHANNELS;
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
    Tile tiles[STAGES];
    States states[2];
    Channels channels[WARPS];
};

// Where lane 4 c + p reads, so that those that write one factor of many states, or of many triples, meet in no bank
DEVICE int state_slot(int c, int p) { return c * 4 + (p ^ c >> 1); }
DEVICE int channel_slot(int triple, int c, int p) { return c * 4 + (p ^ triple); }
DEVICE int word(int triple, int octet, bool added) { return octet % 2 + 2 * (triple % 2 ^ added); }

// (16, 8) times (8, 8) and `start`: the lane has columns 2 p and 2 p + 1 of rows c and c + 8 of a, these rows of column c of
// b, and of the product columns 2 p and 2 p + 1 of row c, then of row c + 8
DEVICE void multiply(bf16, float (&product)[4], unsigned a_0, unsigned a_1, unsigned b, float start) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a_0), "r"(a_1), "r"(b), "f"(start));
}
DEVICE void multiply(fp16, float (&product)[4], unsigned a_0, unsigned a_1, unsigned b, float start) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a_0), "r"(a_1), "r"(b), "f"(start));
}

// The eight columns of a triple, or rows, as lanes have them: of A, and of what is added
struct Factors {
    unsigned decay[4], added[4];
    // with g and dy, or -a and q
    __device__ __forceinline__ Factors(const float (&g)[3], const float (&value)[3]) {
        float last = g[1] * g[2];
        decay[0] = pack(fp16{}, g[0], g[1]), decay[1] = pack(fp16{}, g[2], g[0] * g[1]);
        decay[2] = pack(fp16{}, g[0] * g[2], last), decay[3] = pack(fp16{}, g[0] * last, 0);
        added[0] = pack(T{}, value[0], value[1]), added[1] = pack(T{}, value[2], g[1] * value[0]);
        added[2] = pack(T{}, g[2] * value[0], g[2] * value[1]), added[3] = pack(T{}, last * value[0], 0);
    }
};

// The factors of a tile's states, read ahead: an item is a triple and a state
struct StateFactors {
    static constexpr int ITEMS = TRIPLES * N / THREADS, APART = THREADS / N;
    static_assert(TRIPLES * N % THREADS == 0 && THREADS % N == 0);
    Sequence<const T> ks, qs;
    int first, n;
    T k[ITEMS][3], q[ITEMS][3];
    __device__ __forceinline__ StateFactors(const Sequence<const T> &k, const Sequence<const T> &q)
        : ks(k), qs(q), first(threadIdx.x / N), n(threadIdx.x % N) {
        ks.data += n, qs.data += n;
    }
    // from token t0 on, of which `tokens` exist
    __device__ __forceinline__ void fetch(int t0, int tokens) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
#pragma unroll
            for (int j = 0; j < 3; j++) {
                int t = (first + i * APART) * 3 + j;
                k[i][j] = t < tokens ? *ks.at(t0 + t) : T{};
                q[i][j] = t + 1 < tokens ? *qs.at(t0 + t + 1) : T{};
            }
    }
    __device__ __forceinline__ void put(States &to) const {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int triple = first + i * APART;
            float minus_a[3], query[3], norm[3];
#pragma unroll
            for (int j = 0; j < 3; j++) {
                float k_t = to_floats(Pack<T, 1>{k[i][j]}).at[0], kk = k_t * k_t;
#pragma unroll
                for (int distance = 1; distance < N; distance *= 2) kk += __shfl_xor_sync(WARP, kk, distance);
                norm[j] = reciprocal(1 + kk);
                minus_a[j] = -k_t * k_t * norm[j];
                query[j] = to_floats(Pack<T, 1>{q[i][j]}).at[0];
            }
            Factors factors(minus_a, query);
#pragma unroll
            for (int p = 0; p < 4; p++) {
                unsigned(&row)[4] = to.factor[triple][n / 16][state_slot(n % 8, p)];
                row[word(triple, n / 8, false)] = factors.decay[p], row[word(triple, n / 8, true)] = factors.added[p];
            }
            if (n == 0) store(to.norm[triple], Floats<4>{norm[0], norm[1], norm[2], 0});
        }
    }
};

// Copies of channels to tiles, VECTOR at once: half of the block's threads those of logits, half those of dy
struct Copies {
    static constexpr int HALF = THREADS / 2, ROW = BLOCK_CHANNELS / VECTOR, APART = HALF / ROW;
    static constexpr int ITEMS = TILE / APART;
    static_assert(HALF % ROW == 0 && TILE % APART == 0);
    Sequence<const T> source;
    int half, token, c;
    bool exists;
    __device__ __forceinline__ Copies(const Sequence<const T> &logits, const Sequence<const T> &dys, i64 first, i64 D)
        : source(threadIdx.x < HALF ? logits : dys), half(threadIdx.x / HALF), token(threadIdx.x % HALF / ROW),
          c(threadIdx.x % ROW * VECTOR), exists(first + c < D) {
        source.data += first + c;
        asm("" : "+l"(source.data));  // or the compiler would add it up again for every tile
    }
    // from token t0 on, of which `tokens` exist; zeros for the others
    __device__ __forceinline__ void start(Tile &tile, int t0, int tokens) const {
        T *to = &tile.at[half][c / 8][token][c % 8];
        tokens = exists ? tokens - half - token : 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            copy_async<VECTOR>(to + i * APART * 8, source.at(t0 + half + token + i * APART), i * APART < tokens);
        commit_copies();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
scan_summary(TOKENS(const T, dy), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
             const float *__restrict__ rates, const float *__restrict__ biases, float *__restrict__ ends,
             float *__restrict__ decays, i64 B, i64 L, i64 D, i64 reverse, i64 segment_chunks) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Block) == BLOCK_BYTES);
    Block &block = *reinterpret_cast<Block *>(shared);

    int chunks = (L + CHUNK - 1) / CHUNK, boundaries = (chunks + segment_chunks - 1) / segment_chunks - 1;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = lane / 4, p = lane % 4;
    i64 blocks = (D + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS, block_d = blockIdx.x % blocks * BLOCK_CHANNELS;
    i64 segment = blockIdx.x / blocks % boundaries, b = blockIdx.x / blocks / boundaries % B;
    i64 g = blockIdx.x / blocks / boundaries / B, d = block_d + warp * WARP_CHANNELS + c;
    // the tokens of the segment, counted from the other end
    int first = (segment + 1) * segment_chunks * CHUNK, begin = max(i64(0), L - first - segment_chunks * CHUNK), end = L - first;
    bool backwards = !(reverse >> g & 1);
    Sequence<const T> ks(TOKENS_OF(k), g, b, L, backwards), qs(TOKENS_OF(q), g, b, L, backwards);
    Sequence<const T> dys(TOKENS_OF(dy), g, b, L, backwards), logits(TOKENS_OF(logit), g, b, L, backwards);
    Copies copies(logits, dys, block_d, D);
    StateFactors keys(ks, qs);
    keys.fetch(begin, end - begin);
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copies.start(block.tiles[s], begin + s * TILE, end - begin - s * TILE);

    // `F[s][o][2 i + j]` is state 8 o + 2 p + j of channel 16 s + c + 8 i
    float F[SIXTEENS][OCTETS][4], decay[SIXTEENS][OCTETS][4], bias[SIXTEENS][2] = {};
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            i64 channel = d + 16 * s + 8 * i;
            bool exists = channel < D;
            if (biases && exists) bias[s][i] = -LOG2E * biases[g * D + channel];
            float dy = exists ? to_floats(load<1>(dys.at(begin) + channel)).at[0] : 0;
#pragma unroll
            for (int o = 0; o < OCTETS; o++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    decay[s][o][2 * i + j] = 1;
                    F[s][o][2 * i + j] = dy * to_floats(load<1>(qs.at(begin) + 8 * o + 2 * p + j)).at[0];
                }
        }
    // all that is needed at the end, computed once
    i64 offset = state_offset(g, b, segment, 2 * p, d, B, boundaries, D);
    int left = min(D - d, i64(WARP_CHANNELS));
    asm("" : "+l"(offset), "+r"(left));

    // The rows that this lane names of 12 tokens of 16 channels: lane p gets the first two of triple p of logits and dy of
    // channels c and c + 8; then its third of these 12 and of the 12 after
    int octet = warp * (WARP_CHANNELS / 8) + lane / 8 % 2, pair = lane % 8 / 2 * 3;
    int first_two = pair + lane % 2, third = pair + 2 + lane % 2 * 12;
    unsigned(&factors)[SIXTEENS][4][32][4] = block.channels[warp].factor;
    keys.put(block.states[0]);
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        copies.start(block.tiles[stage > 0 ? stage - 1 : STAGES - 1], t0 + (STAGES - 1) * TILE,
                     end - t0 - (STAGES - 1) * TILE);
        keys.fetch(t0 + TILE, end - t0 - TILE);
        const T(*rows)[8] = block.tiles[stage].at[lane / 16][octet];
        const States &states = block.states[buffer];
        stage = stage + 1 < STAGES ? stage + 1 : 0;
#pragma unroll 1
        for (int four = 0; four < 2; four++) {
            Floats<4> norm = load<4>(states.norm[4 * four + p]);
            __syncwarp();
#pragma unroll
            for (int s = 0; s < SIXTEENS; s++) {
                unsigned two[4], one[4];
                load_transposed(two, rows[2 * s * TILE + 12 * four + first_two]);
                load_transposed(one, rows[2 * s * TILE + third]);
                unsigned found[2][2][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    Floats<2> logits = unpack(T{}, two[i]), dys = unpack(T{}, two[2 + i]);
                    // of the two halves of a word the upper, or the lower one
                    float logit_2 = unpack(T{}, four ? one[i] : one[i] << 16).at[1];
                    float dy_2 = unpack(T{}, four ? one[2 + i] : one[2 + i] << 16).at[1];
                    float logit[3] = {logits.at[0], logits.at[1], logit_2}, gate[3];
                    float dy[3] = {dys.at[0], dys.at[1], dy_2};
#pragma unroll
                    for (int j = 0; j < 3; j++)
                        gate[j] = reciprocal(fmaf(exp2_fast(fmaf(logit[j], -LOG2E, bias[s][i])), norm.at[j], 1));
                    Factors channel(gate, dy);
#pragma unroll
                    for (int w = 0; w < 4; w++) found[0][i][w] = channel.decay[w], found[1][i][w] = channel.added[w];
                }
#pragma unroll
                for (int w = 0; w < 4; w++)
                    store(factors[s][p][channel_slot(p, c, w)],
                          Pack<unsigned, 4>{found[0][0][w], found[0][1][w], found[1][0][w], found[1][1][w]});
            }
            __syncwarp();
#pragma unroll
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
        keys.put(block.states[buffer]);
    }
    wait_for_copies<0>();  // of tiles that do not exist
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (16 * s + 8 * i < left)
#pragma unroll
                for (int o = 0; o < OCTETS; o++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        i64 at = offset + (8 * o + j) * D + 16 * s + 8 * i;
                        ends[at] = F[s][o][2 * i + j];
                        decays[at] = decay[s][o][2 * i + j];
                    }
}
