// Types, loads and the two recurrences. Compiled by NVRTC with these macros:
//   INPUT           element type of the tensors: bf16, fp16 or float
//   RECURRENCE      Longhorn or SelectiveStateSpace
//   STATES          states N of a channel: 4, 8, 16, 32 or 64
//   LANE_STATES     states of a channel that one lane holds; STATES / LANE_STATES neighbouring lanes share a channel
//   LANE_CHANNELS   neighbouring channels of a lane, loaded as one vector
//   TILE            tokens whose inputs are staged at once
//   WARPS           warps of a block
//   MIN_BLOCKS      blocks that must fit on a multiprocessor, which bounds the registers
//   STAGES          tiles on their way from memory at once
//   VECTOR          channels copied by one instruction, as the alignment of the tensors allows
//
// G directions    B batch    L tokens    D channels    N states. Tokens are counted in the order a direction reads them.

typedef long long i64;
#define DEVICE static __device__ __forceinline__

constexpr int CHUNK = 64;  // tokens between the states that forward keeps for backward; the first, which is 0, it does not
constexpr unsigned WARP = 0xffffffffu;

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

// C neighbouring elements, moved by one instruction; 16-bit ones stay packed in words while they wait
template <class T, int C>
struct alignas(C * sizeof(T)) Pack {
    T at[C];
};
template <>
struct alignas(4) Pack<bf16, 2> { unsigned word[1]; };
template <>
struct alignas(8) Pack<bf16, 4> { unsigned word[2]; };
template <>
struct alignas(4) Pack<fp16, 2> { unsigned word[1]; };
template <>
struct alignas(8) Pack<fp16, 4> { unsigned word[2]; };
template <int C>
using Floats = Pack<float, C>;

DEVICE Pack<float, 2> unpack(bf16, unsigned word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
DEVICE Pack<float, 2> unpack(fp16, unsigned word) {
    Pack<float, 2> f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(f.at[0]), "=f"(f.at[1])
        : "r"(word));
    return f;
}
DEVICE unsigned pack(bf16, float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
DEVICE unsigned pack(fp16, float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <class T, int C>
DEVICE Floats<C> to_floats(Pack<T, C> v) {
    Floats<C> f;
    if constexpr (sizeof(T) == 4) {
        f = v;
    } else if constexpr (C == 1) {
        f.at[0] = unpack(T{}, v.at[0].bits).at[0];
    } else {
#pragma unroll
        for (int i = 0; i < C; i += 2) {
            Pack<float, 2> two = unpack(T{}, v.word[i / 2]);
            f.at[i] = two.at[0], f.at[i + 1] = two.at[1];
        }
    }
    return f;
}
template <class T, int C>
DEVICE Pack<T, C> from_floats(Floats<C> f) {
    Pack<T, C> v;
    if constexpr (sizeof(T) == 4) {
        v = f;
    } else if constexpr (C == 1) {
        v.at[0].bits = pack(T{}, f.at[0], 0);
    } else {
#pragma unroll
        for (int i = 0; i < C; i += 2) v.word[i / 2] = pack(T{}, f.at[i], f.at[i + 1]);
    }
    return v;
}
template <int C, class T>
DEVICE Pack<T, C> load(const T *p) { return *reinterpret_cast<const Pack<T, C> *>(p); }
template <class T>
DEVICE Pack<T, 4> gather4(const T *p) {
    if constexpr (sizeof(T) == 4)
        return {p[0], p[1], p[2], p[3]};
    else
        return {p[0].bits | unsigned(p[1].bits) << 16, p[2].bits | unsigned(p[3].bits) << 16};
}
template <class T, int C>
DEVICE void store(T *p, Pack<T, C> v) { *reinterpret_cast<Pack<T, C> *>(p) = v; }

// Copies `ELEMENTS` neighbours to shared memory while the thread goes on, or zeros if they are not `valid`. The copy
// engine takes 4 bytes or more; a single 16-bit element goes through a register.
template <int ELEMENTS, class T>
DEVICE void copy_async(T *shared, const T *global, bool valid) {
    constexpr int BYTES = ELEMENTS * sizeof(T);
    unsigned to = __cvta_generic_to_shared(shared);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0));
    else if constexpr (BYTES >= 4)
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES),
                     "r"(valid ? BYTES : 0));
    else
        *shared = valid ? *global : T{};
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// the unit's own exp2 and reciprocal: relative error 2^-22, a tenth of the instructions of the exact ones
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float min_or_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
constexpr float LOG2E = 1.4426950408889634f;
DEVICE float exp_fast(float x) { return exp2_fast(x * LOG2E); }

// A recurrence S_t = decay * S_{t-1} + drive, for one state n of one channel d. `gate` is what the logits become.
//   keep, gradients   the element of backward: what to keep of a token while its states are recomputed, and from
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
    DEVICE float decay(float gate, float k, float) { return fmaf(-gate * k, k, 1); }

    DEVICE float keep(float S_previous, float x, float k) { return fmaf(-k, S_previous, x); }
    DEVICE void gradients(float &G, float residual, float x, float gate, float k, float, float &sum_x, float &sum_gate,
                          float &dk, float &) {
        float eps_G = gate * G;
        float eps_G_residual = eps_G * residual;
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
    DEVICE float gate(float logit, float) { return logit > 20 ? logit : log1pf(exp_fast(logit)); }
    DEVICE float slope(float logit, float) { return reciprocal(1 + exp_fast(-logit)); }

    DEVICE void update(float &S, float x, float gate, float k, float A) {
        S = fmaf(decay(gate, k, A), S, gate * x * k);
    }
    DEVICE float decay(float gate, float, float A) { return exp2_fast(A * gate); }

    DEVICE float keep(float S_previous, float, float) { return S_previous; }
    DEVICE void gradients(float &G, float S_previous, float x, float gate, float k, float A, float &sum_x,
                          float &sum_gate, float &dk, float &dA) {
        sum_x = fmaf(k, G, sum_x);
        dk = fmaf(gate * x, G, dk);
        G *= decay(gate, k, A);
        float dexponent = G * S_previous;
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
    // `keys` may have room for more tokens: these go from `start` on
    template <int ROOM>
    __device__ __forceinline__ void put(Keys<ROOM> &keys, int start = 0) const {
        float *to = is_query ? keys.q[start + first] : keys.k[start + first];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            Floats<4> v = to_floats(item[i]);
            float kk = v.at[0] * v.at[0] + v.at[1] * v.at[1] + v.at[2] * v.at[2] + v.at[3] * v.at[3];
#pragma unroll
            for (int distance = 1; distance < QUADS; distance *= 2) kk += __shfl_xor_sync(WARP, kk, distance);
            if (TOKENS % APART == 0 || first + i * APART < TOKENS) {
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
