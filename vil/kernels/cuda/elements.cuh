// Element types, packs of adjacent elements that one instruction moves, and approximate hardware functions.

typedef long long i64;
#define INLINE __device__ __forceinline__
#define DEVICE static INLINE
#define UNROLLED _Pragma("unroll")

constexpr unsigned WARP = 0xffffffffu;

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };

// Pack of C adjacent elements that one instruction moves. 16-bit elements stay packed in 32-bit words.
template <class T, int C>
struct alignas(C * sizeof(T)) Pack {
    T at[C];
};
template <>
struct alignas(4) Pack<bf16, 2> { unsigned word[1]; };
template <>
struct alignas(8) Pack<bf16, 4> { unsigned word[2]; };
template <>
struct alignas(16) Pack<bf16, 8> { unsigned word[4]; };
template <>
struct alignas(4) Pack<fp16, 2> { unsigned word[1]; };
template <>
struct alignas(8) Pack<fp16, 4> { unsigned word[2]; };
template <>
struct alignas(16) Pack<fp16, 8> { unsigned word[4]; };
template <int C>
using Floats = Pack<float, C>;

template <int C>
DEVICE Floats<C> operator+(Floats<C> a, Floats<C> b) {
    UNROLLED for (int i = 0; i < C; i++) a.at[i] += b.at[i];
    return a;
}

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
        UNROLLED for (int i = 0; i < C; i += 2) {
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
        UNROLLED for (int i = 0; i < C; i += 2) v.word[i / 2] = pack(T{}, f.at[i], f.at[i + 1]);
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

// Hardware exp2 and reciprocal have a relative error of at most 2^-22, and need few instructions.
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
// The hardware tanh has a relative error of at most 2^-11.
DEVICE float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Two fp16 numbers in one register. One instruction operates on both numbers.
struct Halves { unsigned word; };
DEVICE Halves halves(float low, float high) { return {pack(fp16{}, low, high)}; }
DEVICE Floats<2> to_floats(Halves h) { return unpack(fp16{}, h.word); }
DEVICE Halves multiply_add(Halves a, Halves b, Halves c) {
    Halves sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum.word) : "r"(a.word), "r"(b.word), "r"(c.word));
    return sum;
}
DEVICE Halves tanh_fast(Halves x) {
    Halves y;
    asm("tanh.approx.f16x2 %0, %1;" : "=r"(y.word) : "r"(x.word));
    return y;
}
DEVICE float min_or_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
constexpr float LOG2E = 1.4426950408889634f;
DEVICE float exp_fast(float x) { return exp2_fast(x * LOG2E); }
// Returns the power of two whose product with v, a number of at least 1, is at least 1 and less than 2.
DEVICE float inverse_exponent(float v) {
    constexpr unsigned EXPONENT = 0x7f800000u, TWICE_THE_BIAS = 0x7f000000u;  // bits of an fp32 number
    return __uint_as_float(TWICE_THE_BIAS - (__float_as_uint(v) & EXPONENT));
}
