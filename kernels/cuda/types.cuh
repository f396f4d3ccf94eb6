// Element types, loads and stores, and the unit's fast functions.

typedef long long i64;
#define DEVICE static __device__ __forceinline__

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
#pragma unroll
    for (int i = 0; i < C; i++) a.at[i] += b.at[i];
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

// sums += a b on the tensor cores, (16, 16) times (16, 8): lane l has, of a, columns 2 (l % 4), + 1 of rows l / 4 (a_0) and
// l / 4 + 8 (a_1), and the columns 8 further on (a_2, a_3); of b, the same rows of column l / 4 (b_0, b_1); of the sums,
// columns 2 (l % 4), + 1 of rows l / 4 and l / 4 + 8
DEVICE void multiply_add(bf16, Floats<2> (&sums)[2], unsigned a_0, unsigned a_1, unsigned a_2, unsigned a_3, unsigned b_0,
                         unsigned b_1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0].at[0]), "+f"(sums[0].at[1]), "+f"(sums[1].at[0]), "+f"(sums[1].at[1])
        : "r"(a_0), "r"(a_1), "r"(a_2), "r"(a_3), "r"(b_0), "r"(b_1));
}
DEVICE void multiply_add(fp16, Floats<2> (&sums)[2], unsigned a_0, unsigned a_1, unsigned a_2, unsigned a_3, unsigned b_0,
                         unsigned b_1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0].at[0]), "+f"(sums[0].at[1]), "+f"(sums[1].at[0]), "+f"(sums[1].at[1])
        : "r"(a_0), "r"(a_1), "r"(a_2), "r"(a_3), "r"(b_0), "r"(b_1));
}

// (16, 8) times (8, 8) and `start`: the lane has columns 2 (l % 4), + 1 of rows l / 4 and l / 4 + 8 of a, these rows of column
// l / 4 of b, and of the product these columns of row l / 4, then of row l / 4 + 8
DEVICE void multiply(bf16, float (&product)[4], unsigned a_0, unsigned a_1, unsigned b, float start = 0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a_0), "r"(a_1), "r"(b), "f"(start));
}
DEVICE void multiply(fp16, float (&product)[4], unsigned a_0, unsigned a_1, unsigned b, float start = 0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a_0), "r"(a_1), "r"(b), "f"(start));
}
// the same added up in tf32, where columns l % 4 and l % 4 + 4 of a are the lane's, and these rows of b
DEVICE void multiply_add_tf32(float (&sums)[4], float a_0, float a_1, float a_2, float a_3, float b_0, float b_1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a_0)), "r"(__float_as_uint(a_1)), "r"(__float_as_uint(a_2)), "r"(__float_as_uint(a_3)),
          "r"(__float_as_uint(b_0)), "r"(__float_as_uint(b_1)));
}

// 2 or 4 matrices of 8 rows of 8 16-bit elements from shared memory. Lanes 8 i to 8 i + 7 name the rows of matrix i, of which
// lane l gets columns 2 (l % 4), + 1 of row l / 4, or transposed rows 2 (l % 4), + 1 of column l / 4.
DEVICE unsigned shared_address(const void *p) { return __cvta_generic_to_shared(p); }
DEVICE void load_matrices(unsigned (&m)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_matrices(unsigned (&m)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_transposed(unsigned (&m)[2], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(m[0]), "=r"(m[1])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_transposed(unsigned (&m)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// the same from and to registers: one matrix, transposed
DEVICE unsigned transpose(unsigned m) {
    unsigned transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
    return transposed;
}
