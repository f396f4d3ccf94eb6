// summary.cu's scan_summary of Longhorn for 16-bit inputs, two tokens at a time. Over tokens 0 and 1 decays make
//   A = (1 - g_0 k_0^2) (1 - g_1 k_1^2) = 1 - g_0 k_0^2 - g_1 k_1^2 + g_0 g_1 k_0^2 k_1^2
// and states S_1 before them, or with GRADIENTS F_t = dL/dS_t, which has dy_t q_t in it already,
//   S_2 = A S_0 + g_0 x_0 k_0 + g_1 x_1 k_1 - g_0 g_1 x_0 k_1^2 k_0
//   F_2 = A F_0 + dy_1 q_1 + dy_2 q_2 - g_1 dy_1 k_1^2 q_1
// where g, x and dy belong to a channel, k and q to a state. So A and what is added are products of matrices, (channels, 3)
// times (3, states), which tensor cores do, and what is left is two instructions for a state and two tokens. They read
// tf32, whose 10 bits keep x, dy, k and q exact.
//
// A warp has C / 2 times 16 channels. Lane 4 c + p has channels c and c + 8 of 16 and, of each 8 states, numbers 2 p and
// 2 p + 1. Of 4 tokens it computes the gate of number p, which is where a product takes it: its column p for one of the two
// pairs. What a pair has beside its gates is in the columns of the other pair's.

constexpr int THREADS = 32 * WARPS, SIXTEENS = C / 2, OCTETS = N / 8, PAIRS = TILE / 2;
constexpr int BLOCK_CHANNELS = WARPS * WARP_CHANNELS;
static_assert(TILE % 8 == 0 && CHUNK % TILE == 0 && sizeof(T) == 2 && N % 16 == 0 && NL == OCTETS * 2 && C % 2 == 0);

// A tile as it is in memory, channels by 8: keys, then queries; logits, then values. With GRADIENTS queries and values are
// those of the next token; else there are no queries.
struct Tile {
    alignas(16) T keys[2][TILE][N];
    alignas(16) T channels[2][BLOCK_CHANNELS / 8][TILE][8];
};

// What a block's channels share: the factors of states, as lanes read them (`slot`), of A and of what is added, for states
// of two octets; and (1 + k.k) / ROUND of tokens p and p + 4 of 8
struct States {
    alignas(16) float factor[PAIRS][OCTETS / 2][32][4];
    alignas(16) float norm[TILE / 8][4][2];
};

struct Block {
    Tile tiles[STAGES];
    States states[2];
};

// where lane 4 c + p reads, so that those that write one factor of many states do not meet in a bank
DEVICE int slot(int c, int p) { return c * 4 + (p ^ c >> 1); }

// tensor cores cut what they read to tf32: with this factor they cut to the nearest on average
constexpr float ROUND = 1 + 0x1p-11f, LOG2_ROUND = 0x1p-11f * LOG2E;

// (16, 4) times (4, 8): the lane has column p of rows c and c + 8 of a, row p of column c of b, and of the sums columns 2 p
// and 2 p + 1 of rows c and c + 8
DEVICE void multiply_tf32(float (&product)[4], float start, float a_0, float a_1, float b) {
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(__float_as_uint(a_0)), "r"(__float_as_uint(a_1)), "r"(__float_as_uint(b)), "f"(start));
}

// Copies WIDTH neighbours of each token of a tile, ELEMENTS at once, of which `width` exist: half of the block's threads
// from one tensor, half from another
template <int WIDTH, int ELEMENTS>
struct Copies {
    static constexpr int HALF = THREADS / 2, ROW = WIDTH / ELEMENTS, APART = HALF / ROW;
    static constexpr int ITEMS = (TILE * ROW + HALF - 1) / HALF;
    static_assert(HALF % ROW == 0);
    Sequence<const T> source;
    int token, column, missing;
    __device__ __forceinline__ Copies(const Sequence<const T> &source, i64 width)
        : source(source), token(threadIdx.x % HALF / ROW), column(threadIdx.x % ROW * ELEMENTS),
          missing(column < width ? 0 : TILE) {
        this->source.data += column;
        asm("" : "+l"(this->source.data));  // or the compiler would add it up again for every tile
    }
    // from token t0 on, of which `tokens` exist, to what `place` says; zeros for the others
    template <class Place>
    __device__ __forceinline__ void start(Place place, int t0, int tokens) const {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int t = token + i * APART;
            if (TILE % APART == 0 || t < TILE)
                copy_async<ELEMENTS>(place(t, column), source.at(t0 + t), t + missing < min(tokens, TILE));
        }
    }
};

// The factors of a tile's states, by one warp: a lane takes all three of a pair for state c of each octet
DEVICE void stage_states(States &to, const Tile &tile, int lane) {
#pragma unroll
    for (int base = 0; base < PAIRS; base += 4) {
        int pair = base + lane / 8, c = lane % 8;
        float kk[2] = {};
#pragma unroll
        for (int o = 0; o < OCTETS; o += 2) {
            Floats<4> factors[3];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int n = 8 * (o + i) + c;
                float k[2], q[2];
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    k[odd] = to_floats(load<1>(&tile.keys[0][2 * pair + odd][n])).at[0];
                    if (GRADIENTS) q[odd] = to_floats(load<1>(&tile.keys[1][2 * pair + odd][n])).at[0];
                    kk[odd] = fmaf(k[odd], k[odd], kk[odd]);
                }
                float squared = -ROUND * k[1] * k[1];
                factors[0].at[i] = -ROUND * k[0] * k[0];
                factors[1].at[i] = squared;
                factors[2].at[i] = -squared * (k[0] * k[0]);
                if (GRADIENTS)
                    factors[0].at[2 + i] = squared * q[0], factors[1].at[2 + i] = q[0], factors[2].at[2 + i] = q[1];
                else
                    factors[0].at[2 + i] = k[0], factors[1].at[2 + i] = k[1], factors[2].at[2 + i] = squared * k[0];
            }
            float(&row)[32][4] = to.factor[pair][o / 2];
#pragma unroll
            for (int f = 0; f < 3; f++) store(row[slot(c, f ^ pair % 2 * 2)], factors[f]);
        }
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) kk[odd] += __shfl_xor_sync(WARP, kk[odd], distance);
            int token = 2 * pair + odd;
            if (c == 0) to.norm[token / 8][token % 4][token / 4 % 2] = (1 + kk[odd]) * (1 / ROUND);
        }
    }
}

// What products take of 4 tokens of 16 channels, for either pair: of A, and of what is added
struct Columns {
    float decay[2][2], drive[2][2];  // of a pair, of channels c and c + 8
    __device__ __forceinline__ void set(int i, float gate, float value, int p) {
        float other = __shfl_xor_sync(WARP, gate, 3);  // of tokens 3, 2, 1, 0
        float both = __shfl_xor_sync(WARP, gate, 2) * other;
        bool low = p < 2;
        decay[0][i] = low ? gate : both, decay[1][i] = low ? both : gate;
        if (GRADIENTS) {  // the value of lane 0 is that of token 4
            float gated = __shfl_xor_sync(WARP, gate * value, 1);
            drive[0][i] = p == 0 ? gated : value, drive[1][i] = p == 2 ? gated : value;
        } else {
            float gated = gate * value, decayed = __shfl_xor_sync(WARP, gated, 2) * other;
            drive[0][i] = low ? gated : decayed, drive[1][i] = low ? decayed : gated;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
scan_summary(TOKENS(const T, value), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
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
    int begin = (segment + GRADIENTS) * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    bool backwards = (reverse >> g & 1) != GRADIENTS;
    if (GRADIENTS) {  // the tokens of the segment, counted from the other end
        int first = L - end;
        end = L - begin;
        begin = first;
    }
    Sequence<const T> k_tokens(TOKENS_OF(k), g, b, L, backwards), q_tokens(TOKENS_OF(q), g, b, L, backwards);
    Sequence<const T> value_tokens(TOKENS_OF(value), g, b, L, backwards);
    Sequence<const T> logit_tokens(TOKENS_OF(logit), g, b, L, backwards);

    // `S[s][o][2 i + j]` is state 8 o + 2 p + j of channel 16 s + c + 8 i
    float S[SIXTEENS][OCTETS][4] = {}, decay[SIXTEENS][OCTETS][4], bias[SIXTEENS][2] = {};
#pragma unroll
    for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            i64 channel = d + 16 * s + 8 * i;
            bool exists = channel < D;
            if (biases && exists) bias[s][i] = biases[g * D + channel];
            bias[s][i] = fmaf(bias[s][i], -LOG2E, -LOG2_ROUND);
            float value = GRADIENTS && exists ? to_floats(load<1>(value_tokens.at(begin) + channel)).at[0] : 0;
#pragma unroll
            for (int o = 0; o < OCTETS; o++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    decay[s][o][2 * i + j] = 1;
                    if (GRADIENTS)
                        S[s][o][2 * i + j] =
                            value * to_floats(load<1>(q_tokens.at(begin) + 8 * o + 2 * p + j)).at[0];
                }
        }
    // all that is needed at the end, computed here once
    i64 offset = state_offset(g, b, segment, 2 * p, d, B, boundaries, D);
    int left = min(D - d, i64(WARP_CHANNELS));
    asm("" : "+l"(offset), "+r"(left));
    // factors that are nobody's stay zero
    for (int i = threadIdx.x * 16; i < int(sizeof block.states); i += THREADS * 16)
        store((float *)((char *)block.states + i), Floats<4>{});

    bool second = threadIdx.x >= THREADS / 2;  // of the halves that copy
    Sequence<const T> channel_tokens = second ? value_tokens : logit_tokens;
    channel_tokens.data += block_d;
    Copies<N, KEY_VECTOR> keys(second ? q_tokens : k_tokens, second && !GRADIENTS ? 0 : N);
    Copies<BLOCK_CHANNELS, VECTOR> channels(channel_tokens, D - block_d);
    auto copy = [&](int stage, int t0) {
        Tile &tile = block.tiles[stage];
        if (GRADIENTS) t0 += second;
        keys.start([&](int t, int n) { return &tile.keys[second][t][n]; }, t0, end - t0);
        channels.start([&](int t, int c) { return &tile.channels[second][c / 8][t][c % 8]; }, t0, end - t0);
        commit_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy(s, begin + s * TILE);
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    if (warp == 0) stage_states(block.states[0], block.tiles[0], lane);

    // The row that this lane names of 8 tokens of 16 channels' logits and values: lane p gets tokens p and p + 4 of logits
    bool is_value = lane >= 16;
    int row = lane % 8, token = (is_value && GRADIENTS ? row / 2 + 3 & 3 : row / 2) + row % 2 * 4;
    int octet = warp * (WARP_CHANNELS / 8) + lane / 8 % 2, factor_slot = slot(c, p);
    int stage = 0, buffer = 0, turn = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE) {
        wait_for_copies<STAGES - 3>();
        __syncthreads();
        copy(stage > 0 ? stage - 1 : STAGES - 1, t0 + (STAGES - 1) * TILE);
        const Tile &tile = block.tiles[stage];
        const States &states = block.states[buffer];
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        const T *rows = tile.channels[is_value][octet][token];
#pragma unroll 1
        for (int eight = 0; eight < TILE / 8; eight++) {
            Floats<2> norm = load<2>(states.norm[eight][p]);
            unsigned words[SIXTEENS][4];
#pragma unroll
            for (int s = 0; s < SIXTEENS; s++) load_transposed(words[s], rows + (2 * s * TILE + eight * 8) * 8);
#pragma unroll
            for (int four = 0; four < 2; four++) {
                Columns columns[SIXTEENS];
#pragma unroll
                for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float logit = unpack(T{}, words[s][i]).at[four], value = unpack(T{}, words[s][2 + i]).at[four];
                        float gate = reciprocal(norm.at[four] + exp2_fast(fmaf(logit, -LOG2E, bias[s][i])));
                        columns[s].set(i, gate, value, p);
                    }
#pragma unroll
                for (int pair = 0; pair < 2; pair++)
#pragma unroll
                    for (int o = 0; o < OCTETS; o += 2) {
                        Floats<4> factor = load<4>(states.factor[eight * 4 + four * 2 + pair][o / 2][factor_slot]);
#pragma unroll
                        for (int s = 0; s < SIXTEENS; s++)
#pragma unroll
                            for (int i = 0; i < 2; i++) {
                                float A[4], drive[4];
                                const Columns &from = columns[s];
                                multiply_tf32(A, 1, from.decay[pair][0], from.decay[pair][1], factor.at[i]);
                                multiply_tf32(drive, 0, from.drive[pair][0], from.drive[pair][1], factor.at[2 + i]);
#pragma unroll
                                for (int j = 0; j < 4; j++) {
                                    S[s][o + i][j] = fmaf(A[j], S[s][o + i][j], drive[j]);
                                    decay[s][o + i][j] *= A[j];
                                }
                            }
                    }
            }
        }
        buffer ^= 1;
        if (warp == turn) stage_states(block.states[buffer], block.tiles[stage], lane);
        turn = turn + 1 < WARPS ? turn + 1 : 0;
    }
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
                        ends[at] = S[s][o][2 * i + j];
                        decays[at] = decay[s][o][2 * i + j];
                    }
}
