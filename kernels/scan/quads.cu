// forward.cu's scan for 16-bit inputs and batches that leave much of a GPU idle. A warp has 8 channels only, which makes
// many warps. To read keys and queries and to sum over states would take much of the time; tensor cores do it:
//   keys     (2 tokens, 8 states) = (which 2 of 8 tokens, 8 tokens) times (8 tokens, 8 states): exact, each sum being one
//            key and zeros; but a key that is no number spoils 8 tokens
//   outputs  (8 channels and 2 tokens, 8 tokens) = (8 channels and 2 tokens, states) times (states, 8 tokens), of which
//            those count where both tokens are the same; it reads states cut to 10 bits (tf32), the recurrence does not
//   k.k      the diagonal of (16 tokens, states) times (states, 8 tokens)
// Lane 4 c + p has channel c and, of each 8 states or tokens, numbers 2 p and 2 p + 1, as the products have them.

#include "recurrences.cuh"

constexpr int THREADS = 32 * WARPS, BLOCK_CHANNELS = 8 * WARPS, OCTETS = N / 8;
static_assert(TILE == 32 && CHUNK % TILE == 0 && LANES == 4 && WARP_CHANNELS == 8 && sizeof(T) == 2);

// A tile as it is in memory, but by 8 states and 8 channels
struct Tile {
    alignas(16) T k[OCTETS][TILE][8];
    alignas(16) T q[OCTETS][TILE][8];
    alignas(16) T x[WARPS][TILE][8];
    alignas(16) T logit[WARPS][TILE][8];
};

// What the 4 lanes of a channel share: x and gates of 8 channels by 8 tokens
struct Staged {
    alignas(16) float x[TILE / 8][8][8];
    alignas(16) float gate[TILE / 8][8][8];
};

struct Block {
    Staged staged[2][WARPS];
    Tile tiles[STAGES];
};

// One warp's place in the grid: a segment of a sequence; and the channel of this lane
struct Place {
    i64 g, b, segment, block_d, warp_d, d;
    int warp, lane, c, p;
    bool valid;
    __device__ __forceinline__ Place(i64 B, i64 D, i64 segments) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        c = lane / 4, p = lane % 4;
        i64 blocks = (D + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
        block_d = blockIdx.x % blocks * BLOCK_CHANNELS;
        warp_d = block_d + warp * 8;
        d = warp_d + c;
        segment = blockIdx.x / blocks % segments;
        b = blockIdx.x / blocks / segments % B;
        g = blockIdx.x / blocks / segments / B;
        valid = d < D;
    }
};

// Copies WIDTH neighbours of each token of a tile, ELEMENTS at once, of which `width` exist: for all threads of the block
template <int WIDTH, int ELEMENTS>
struct Copies {
    static constexpr int ROW = WIDTH / ELEMENTS, ITEMS = (TILE * ROW + THREADS - 1) / THREADS, APART = THREADS / ROW;
    static_assert(THREADS % ROW == 0);
    Sequence<const T> source;
    int token, column;
    bool exists;
    __device__ __forceinline__ Copies(const Sequence<const T> &source, i64 width)
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

// Of a tile that is to be staged, x, logits and k.k of the lane's channel and tokens
struct Unstaged {
    unsigned x[TILE / 8], logits[TILE / 8];
    Floats<2> kk[TILE / 8];
    __device__ __forceinline__ void read(const Tile &tile, const Place &at) {
        load_transposed(x, tile.x[at.warp][at.lane]);
        load_transposed(logits, tile.logit[at.warp][at.lane]);
#pragma unroll
        for (int i = 0; i < TILE / 8; i += 2) {
            Floats<2> products[2][2] = {};  // with the first and with the last 8 of 16 tokens
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
    // 8 tokens
    __device__ __forceinline__ void stage(Staged &staged, int i, float bias, const Place &at) const {
        Floats<2> logit = unpack(T{}, logits[i]), gate;
#pragma unroll
        for (int j = 0; j < 2; j++) gate.at[j] = R::gate(logit.at[j] + bias, kk[i].at[j]);
        store(&staged.gate[i][at.c][2 * at.p], gate);
        store(&staged.x[i][at.c][2 * at.p], unpack(T{}, x[i]));
    }
};

// What the lane needs of 8 tokens: x and gates of its channel, and as the products want them keys and queries
struct Octet {
    Floats<4> x[2], gate[2];
    unsigned k[OCTETS / 2][2], q[OCTETS / 2][2];
    __device__ __forceinline__ void read(const Staged &staged, const Tile &tile, int i, const Place &at) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            x[j] = load<4>(&staged.x[i][at.c][4 * j]);
            gate[j] = load<4>(&staged.gate[i][at.c][4 * j]);
        }
#pragma unroll
        for (int o = 0; o < OCTETS; o += 2) {
            int token = 8 * i + at.lane % 8;
            load_transposed(k[o / 2], tile.k[o + at.lane / 8 % 2][token]);
            load_matrices(q[o / 2], tile.q[o + at.lane / 8 % 2][token]);
        }
    }
};

// The lane's states: 8 o + 2 p and 8 o + 2 p + 1 for each o
typedef float States[OCTETS][2];

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
scan_forward(TOKENS(const T, x), TOKENS(const T, logit), TOKENS(const T, k), TOKENS(const T, q),
             const float *__restrict__ rates, const float *__restrict__ skips, const float *__restrict__ biases,
             const float *__restrict__ earlier, T *__restrict__ y, float *__restrict__ states, i64 B, i64 L, i64 D,
             i64 reverse, i64 segment_chunks, i64 keep) {
    extern __shared__ __align__(16) char shared[];
    static_assert(sizeof(Block) == BLOCK_BYTES);
    Block &block = *reinterpret_cast<Block *>(shared);

    int chunks = (L + CHUNK - 1) / CHUNK, segments = (chunks + segment_chunks - 1) / segment_chunks;
    Place at(B, D, segments);
    bool backwards = reverse >> at.g & 1;
    int begin = at.segment * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    Copies<N, KEY_VECTOR> ks({TOKENS_OF(k), at.g, at.b, L, backwards}, N);
    Copies<N, KEY_VECTOR> qs({TOKENS_OF(q), at.g, at.b, L, backwards}, N);
    Sequence<const T> x_tokens(TOKENS_OF(x), at.g, at.b, L, backwards);
    Sequence<const T> logit_tokens(TOKENS_OF(logit), at.g, at.b, L, backwards);
    x_tokens.data += at.block_d, logit_tokens.data += at.block_d;
    Copies<BLOCK_CHANNELS, VECTOR> xs(x_tokens, D - at.block_d), logits(logit_tokens, D - at.block_d);
    Sequence<T> ys({y + at.warp_d + 2 * at.p, B * L * D, L * D, D}, at.g, at.b, L, backwards);
    float *kept = states + state_offset(at.g, at.b, begin / CHUNK - 1, 2 * at.p, at.d, B, chunks - 1, D);
    earlier += state_offset(at.g, at.b, at.segment - 1, 2 * at.p, at.d, B, segments - 1, D);

    float skip = skips && at.valid ? skips[at.g * D + at.d] : 0, bias = biases && at.valid ? biases[at.g * D + at.d] : 0;
    States A = {}, S = {};
#pragma unroll
    for (int o = 0; o < OCTETS; o++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (R::HAS_RATES && at.valid) A[o][n] = R::rate(rates[(at.g * D + at.d) * N + 8 * o + 2 * at.p + n]);
            if (at.segment > 0 && at.valid) S[o][n] = earlier[(8 * o + n) * D];
        }

    auto copy = [&](int stage, int t0) {
        Tile &tile = block.tiles[stage];
        ks.start(tile.k, t0, end - t0);
        qs.start(tile.q, t0, end - t0);
        xs.start(tile.x, t0, end - t0);
        logits.start(tile.logit, t0, end - t0);
        commit_copies();
    };
    const unsigned one = from_floats<T>(Floats<2>{1, 0}).word[0];
    // 8 tokens from t on, whose x is also in `own_x`
    auto step = [&](const Octet &tokens, unsigned own_x, int t) {
        float products[4][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                float k[4], after[2][2];  // of tokens 2 j and 2 j + 1
                multiply(T{}, k, at.p == j ? one : 0, at.p == j ? one << 16 : 0, tokens.k[o / 2][o % 2]);
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int odd = 0; odd < 2; odd++) {
                        float x = tokens.x[j / 2].at[2 * j % 4 + odd], gate = tokens.gate[j / 2].at[2 * j % 4 + odd];
                        R::update(S[o][n], x, gate, k[2 * odd + n], A[o][n]);
                        after[n][odd] = S[o][n];
                    }
                Floats<2> q = unpack(T{}, tokens.q[o / 2][o % 2]);
                multiply_add_tf32(products[j], after[0][0], after[0][1], after[1][0], after[1][1], q.at[0], q.at[1]);
            }
        Floats<2> x = unpack(T{}, own_x), own_y = {products[0][0], products[0][3]};
#pragma unroll
        for (int j = 1; j < 4; j++)
            if (at.p == j) own_y = {products[j][0], products[j][3]};
#pragma unroll
        for (int odd = 0; odd < 2; odd++) own_y.at[odd] = fmaf(skip, x.at[odd], own_y.at[odd]);
        // of the 8 tokens of a channel to the 8 channels of a token, which are neighbours in memory
        Pack<T, 2> y = {transpose(from_floats<T>(own_y).word[0])};
        i64 channels = D - at.warp_d - 2 * at.p;
        if (t + at.c < end && channels > 0) {
            T *to = ys.at(t + at.c);
            if (VECTOR > 1) {
                store(to, y);
            } else {
                to[0].bits = y.word[0];
                if (channels > 1) to[1].bits = y.word[0] >> 16;
            }
        }
    };

#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) copy(s, begin + s * TILE);
    wait_for_copies<STAGES - 2>();
    __syncthreads();
    Unstaged here, next;
    here.read(block.tiles[0], at);
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) here.stage(block.staged[0][at.warp], i, bias, at);
    int stage = 0, buffer = 0;
#pragma unroll 1
    for (int t0 = begin; t0 < end; t0 += TILE) {
        if ((t0 - begin) % CHUNK == 0) {
            if (keep && at.valid && t0 > 0)
#pragma unroll
                for (int o = 0; o < OCTETS; o++)
#pragma unroll
                    for (int n = 0; n < 2; n++) kept[(8 * o + n) * D] = S[o][n];
            kept += N * D;
        }
        // the next tile is staged while this one is worked on, as gates are a long chain of instructions
        wait_for_copies<STAGES - 3>();
        __syncthreads();
        copy(stage > 0 ? stage - 1 : STAGES - 1, t0 + (STAGES - 1) * TILE);
        const Tile &tile = block.tiles[stage];
        const Staged &staged = block.staged[buffer][at.warp];
        stage = stage + 1 < STAGES ? stage + 1 : 0;
        buffer ^= 1;
        next.read(block.tiles[stage], at);
        Octet tokens;
        tokens.read(staged, tile, 0, at);
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            Octet following;
            next.stage(block.staged[buffer][at.warp], i, bias, at);
            following.read(staged, tile, i + 1 < TILE / 8 ? i + 1 : i, at);
            step(tokens, here.x[i], t0 + 8 * i);
            tokens = following;
        }
        here = next;
    }
}
