// The two recurrences and what their kernels share. Compiled by NVRTC with these macros:
//   INPUT           element type of the tensors: bf16, fp16 or float
//   RECURRENCE      Longhorn or SelectiveStateSpace
//   STATES          states N of a channel: 4, 8, 16, 32 or 64
//   CHUNK           tokens between the states that forward keeps for backward; the first, which is 0, it does not
//   LANE_STATES     states of a channel that one lane holds; STATES / LANE_STATES neighbouring lanes share a channel
//   LANE_CHANNELS   neighbouring channels of a lane, loaded as one vector
//   TILE            tokens whose inputs are staged at once
//   WARPS           warps of a block
//   MIN_BLOCKS      blocks that must fit on a multiprocessor, which bounds the registers
//   STAGES          tiles on their way from memory at once
//   VECTOR          channels copied by one instruction, as the alignment of the tensors allows
//
// G directions    B batch    L tokens    D channels    N states. Tokens are counted in the order a direction reads them.

#include "../cuda/types.cuh"

// A recurrence S_t = decay * S_{t-1} + drive, for one state n of one channel d. `gate` is what the logits become.
//   Kept, gradients   the element of backward: what to keep of a token while its states are recomputed, and from
//                     G = dL/dS_t the gradients of the token and dL/dS_{t-1}, which replaces G. Sums over states go
//                     into sum_x and sum_gate, the sum over channels into dk, that over tokens into dA.
//   dx, dlogit        those sums to gradients; slope is what the logit's gradient is proportional to
//   dnorm             a channel's part of dL/d(k.k)

// Longhorn (Liu et al., 2024, Algorithm 1, eq. 6): gate is eps = beta / (1 + beta k.k) = 1 / (1 + exp(-logit) + k.k)
//   S_t = (1 - eps k^2) S_{t-1} + eps k x = S_{t-1} + eps k (x - k S_{t-1})
struct Longhorn {
    static constexpr bool HAS_RATES = false, HAS_NORM = true;
    DEVICE float rate(float) { return 0; }
    // where exp overflows to infinity eps is 0, its limit
    DEVICE float gate(float logit, float kk) { return reciprocal(1 + kk + exp_fast(-logit)); }
    // clamped because 0 * infinity would be no number
    DEVICE float slope(float logit, float gate) { return gate * min_or_nan(exp_fast(-logit), 0x1p126f); }

    DEVICE void update(float &S, float x, float gate, float k, float) { S = fmaf(gate * k, fmaf(-k, S, x), S); }
    // of k^2, which a lane's channels share
    DEVICE float decay(float gate, float k_squared, float) { return fmaf(-gate, k_squared, 1); }

    struct Kept { float residual; };
    DEVICE void update(float &S, Kept &kept, float x, float gate, float k, float) {
        kept.residual = fmaf(-k, S, x);
        S = fmaf(gate * k, kept.residual, S);
    }
    DEVICE void gradients(float &G, Kept kept, float x, float gate, float k, float, float &sum_x, float &sum_gate,
                          float &dk, float &) {
        float eps_G = gate * G;
        float eps_G_residual = eps_G * kept.residual;
        sum_x = fmaf(k, eps_G, sum_x);
        sum_gate = fmaf(k, eps_G_residual, sum_gate);
        dk = fmaf(2, eps_G_residual, fmaf(-x, eps_G, dk));
        G = fmaf(-k * k, eps_G, G);
    }
    DEVICE float dx(float sum_x, float) { return sum_x; }
    DEVICE float dlogit(float, float sum_gate, float, float slope) { return sum_gate * slope; }
    DEVICE float dnorm(float sum_gate, float gate) { return -gate * sum_gate; }
};

// Mamba (Gu & Dao, 2023, Algorithm 2): gate is dt = softplus(logit), k is b, and A is a rate of the channel's state
//   S_t = exp(A dt) S_{t-1} + dt b x
struct SelectiveStateSpace {
    static constexpr bool HAS_RATES = true, HAS_NORM = false;
    DEVICE float rate(float A) { return A * LOG2E; }
    // softplus as max(logit, 0) + log(1 + u) with u = exp(-|logit|) and a polynomial for log(1 + u) / u: no branches, and
    // where u is small a relative error of 2^-21 still
    DEVICE float gate(float logit, float) {
        float u = exp_fast(-fabsf(logit)), p = -0.008778933f;
        p = fmaf(p, u, 0.04498657f), p = fmaf(p, u, -0.10902282f), p = fmaf(p, u, 0.17847203f);
        p = fmaf(p, u, -0.24536864f), p = fmaf(p, u, 0.33284062f), p = fmaf(p, u, -0.49998179f);
        return fmaf(u, fmaf(p, u, 1), fmaxf(logit, 0));
    }
    DEVICE float slope(float logit, float) { return reciprocal(1 + exp_fast(-logit)); }

    DEVICE void update(float &S, float x, float gate, float k, float A) {
        S = fmaf(decay(gate, k, A), S, gate * x * k);
    }
    DEVICE float decay(float gate, float, float A) { return exp2_fast(A * gate); }

    struct Kept { float S_previous, decay; };
    DEVICE void update(float &S, Kept &kept, float x, float gate, float k, float A) {
        kept = {S, decay(gate, k, A)};
        S = fmaf(kept.decay, S, gate * x * k);
    }
    DEVICE void gradients(float &G, Kept kept, float x, float gate, float k, float A, float &sum_x, float &sum_gate,
                          float &dk, float &dA) {
        sum_x = fmaf(k, G, sum_x);
        dk = fmaf(gate * x, G, dk);
        G *= kept.decay;
        float dexponent = G * kept.S_previous;
        sum_gate = fmaf(A, dexponent, sum_gate);
        dA = fmaf(gate, dexponent, dA);
    }
    DEVICE float dx(float sum_x, float gate) { return gate * sum_x; }
    DEVICE float dlogit(float sum_x, float sum_gate, float x, float slope) {
        return fmaf(x, sum_x, sum_gate * (1 / LOG2E)) * slope;
    }
    DEVICE float dnorm(float, float) { return 0; }
};

// A tensor of tokens, strides in elements, innermost dimension contiguous
template <class T>
struct Tokens {
    T *data;
    i64 stride_G, stride_B, stride_L;
};
#define TOKENS(T, name) T *name##_data, i64 name##_stride_G, i64 name##_stride_B, i64 name##_stride_L
#define TOKENS_OF(name) {name##_data, name##_stride_G, name##_stride_B, name##_stride_L}

// The same for one sequence in the order it is read. Tokens are counted in 32 bits and strides in 32 bits of bytes, which
// the host checks, so that the address of a token is one instruction: a 64-bit base and the 64-bit product of both.
template <class T>
struct Sequence {
    T *data;
    int stride;
    Sequence() = default;
    __device__ __forceinline__ Sequence(Tokens<T> x, i64 g, i64 b, i64 L, bool reverse)
        : data(x.data + g * x.stride_G + b * x.stride_B + (reverse ? (L - 1) * x.stride_L : 0)),
          stride(int(reverse ? -x.stride_L : x.stride_L) * int(sizeof(T))) {
        asm("" : "+r"(stride));  // or the compiler would compute it again for every token
    }
    __device__ __forceinline__ T *at(int t) const {
        i64 offset;
        asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(t), "r"(stride));
        return (T *)((char *)data + offset);
    }
};

typedef RECURRENCE R;
typedef INPUT T;
constexpr int N = STATES;
constexpr int NL = LANE_STATES;
constexpr int C = LANE_CHANNELS;
constexpr int LANES = N / NL;       // lanes that share a channel
constexpr int GROUPS = 32 / LANES;  // groups of C channels in a warp
constexpr int WARP_CHANNELS = GROUPS * C;
constexpr int QUADS = N / 4;

// Of the lanes of a warp, bit 0 says which part of a channel's states it has and bit 1 which group of channels: shared
// memory serves a vector twice as fast if each lane has the same address as its neighbour or the one after.
DEVICE int part_of(int lane) { return LANES == 1 ? 0 : lane % 2 | (lane / 2 & LANES - 2); }
DEVICE int group_of(int lane) { return LANES == 1 ? lane : lane / 2 % 2 | lane / (2 * LANES) * 2; }
// how far apart lanes are that differ in this bit of the part, or of the group
DEVICE constexpr int part_distance(int bit) { return bit == 1 ? 1 : 2 * bit; }
DEVICE constexpr int group_distance(int bit) { return LANES == 1 ? bit : bit == 1 ? 2 : bit * LANES; }

// Keys and queries of some tokens in fp32; kk is k.k
template <int TOKENS>
struct Keys {
    alignas(16) float k[TOKENS][N];
    alignas(16) float q[TOKENS][N];
    alignas(16) float kk[TOKENS];
};

// The same on its way from memory: a thread moves 4 neighbouring states of a key or query at a time, always the same 4.
// Behind the last of `tokens` it is read again: what follows the last token reaches no result.
template <int TOKENS, int THREADS>
struct KeysInFlight {
    static constexpr int ITEMS = (TOKENS * 2 * QUADS + THREADS - 1) / THREADS, APART = THREADS / (2 * QUADS);
    static_assert(THREADS % (2 * QUADS) == 0);
    Sequence<const T> source;
    int first, n;
    bool is_query, vectors;
    Pack<T, 4> item[ITEMS];

    __device__ __forceinline__ KeysInFlight(const Sequence<const T> &k, const Sequence<const T> &q, bool vectors,
                                            int thread)
        : source(thread / QUADS % 2 ? q : k), first(thread / (2 * QUADS)), n(thread % QUADS * 4),
          is_query(thread / QUADS % 2), vectors(vectors) {
        source.data += n;
    }
    __device__ __forceinline__ void fetch(int t0, int tokens) {
        const T *p[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) p[i] = source.at(t0 + min(first + i * APART, tokens - 1));
        if (vectors) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) item[i] = load<4>(p[i]);
        } else {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) item[i] = gather4(p[i]);
        }
    }
    // `keys` may have room for more tokens: these go from `start` on. SQUARED has k^2 in place of k
    template <bool SQUARED = false, int ROOM>
    __device__ __forceinline__ void put(Keys<ROOM> &keys, int start = 0) const {
        float *to = is_query ? keys.q[start + first] : keys.k[start + first];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            Floats<4> v = to_floats(item[i]);
            float kk = v.at[0] * v.at[0] + v.at[1] * v.at[1] + v.at[2] * v.at[2] + v.at[3] * v.at[3];
#pragma unroll
            for (int distance = 1; distance < QUADS; distance *= 2) kk += __shfl_xor_sync(WARP, kk, distance);
            if (TOKENS % APART == 0 || first + i * APART < TOKENS) {
                if (SQUARED && !is_query)
#pragma unroll
                    for (int j = 0; j < 4; j++) v.at[j] *= v.at[j];
                store(to + i * APART * N + n, v);
                if (!is_query && n == 0) keys.kk[start + first + i * APART] = kk;
            }
        }
    }
};

// A warp's channels of a tile as they are in memory, on their way from there while earlier tiles are worked on: lanes copy
// VECTOR of a row at once, as the alignment of the tensors allows
struct ChannelCopies {
    static constexpr int ROW = WARP_CHANNELS / VECTOR, ITEMS = (TILE * ROW + 31) / 32, TOKENS_APART = 32 / ROW;
    static_assert(32 % ROW == 0);
    int token, c, skipped;

    __device__ __forceinline__ ChannelCopies(i64 warp_d, i64 D)
        : token(threadIdx.x % 32 / ROW), c(threadIdx.x % 32 % ROW * VECTOR), skipped(warp_d + c < D ? 0 : TILE) {}
    // where the lane starts to read, kept in registers
    __device__ __forceinline__ Sequence<const T> source(Sequence<const T> channels, i64 warp_d) const {
        channels.data += warp_d + c;
        asm("" : "+l"(channels.data));
        return channels;
    }
    // from token t0 on, of which `tokens` exist; zeros for the others
    __device__ __forceinline__ void start(T (&tile)[TILE][WARP_CHANNELS], const Sequence<const T> &source, int t0,
                                          int tokens) const {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int t = token + i * TOKENS_APART;
            if (TILE % TOKENS_APART == 0 || t < TILE)
                copy_async<VECTOR>(&tile[t][c], source.at(t0 + t), t + skipped < min(tokens, TILE));
        }
    }
};

// States between chunks or segments are (G, B, boundaries, N, D): neighbouring channels are neighbours in memory. Chunk i
// starts at boundary i - 1, as no state is kept before the first.
DEVICE i64 state_offset(i64 g, i64 b, i64 boundary, i64 n, i64 d, i64 B, i64 boundaries, i64 D) {
    return (((g * B + b) * boundaries + boundary) * N + n) * D + d;
}
