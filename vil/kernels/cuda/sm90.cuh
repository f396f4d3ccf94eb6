// Features of Hopper (sm_90a): mbarriers, bulk copies, and products of groups of four warps (wgmma).
// Addresses without a pointer type are addresses in shared memory.
// tests/helpers/emulator.cpp implements the same functions for a CPU.

#include "types.cuh"

DEVICE void init_barrier(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the barrier wait for `bytes` bytes of bulk copies, too.
DEVICE void arrive_and_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE void wait_for(unsigned barrier, int parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

// Waits as wait_for does, but the hardware may suspend the warp for a longer time.
DEVICE void wait_long_for(unsigned barrier, int parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 10000000;\n"
                 "@!done bra AGAIN;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

DEVICE void copy_16_async(unsigned to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Arrives at the barrier when the copies that this thread has started have arrived.
DEVICE void arrive_when_copied(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Loads the 128 bytes around an address to the L2 cache.
DEVICE void prefetch_to_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
DEVICE void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void copy_bulk(unsigned to, const void *from, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
template <int REGISTERS>
DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

DEVICE void load_matrices(unsigned (&m)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}
DEVICE void load_shared(unsigned (&v)[4], unsigned from) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}
DEVICE void store_shared(unsigned to, unsigned v) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE void store_shared(unsigned to, const unsigned (&v)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// Store 2 or 4 transposed matrices of 8 x 8 16-bit elements, given fragments with the layout of load_matrices.
// Lanes 8 i to 8 i + 7 pass the addresses of the columns of matrix i.
DEVICE void store_transposed(unsigned column, unsigned a, unsigned b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(column), "r"(a), "r"(b) : "memory");
}
DEVICE void store_transposed(unsigned column, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// Stores 8 bytes in global memory unless `index` is negative.
// A branch would keep the compiler from reordering the instructions around the store.
DEVICE void store_unless_negative(int index, void *to, unsigned first, unsigned second) {
    asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %3, 0;\n@p st.global.v2.b32 [%0], {%1, %2};\n}" ::"l"(to), "r"(first),
                 "r"(second), "r"(index)
                 : "memory");
}

// Computes sums += a b, or sums = a b if not `add`, for 64 rows of `a` and 192 columns of `b`.
// Each of the four warps has 16 rows of `a`, with the fragments of multiply_add.
// A column of `b` is a row of 64 bytes in shared memory, with each 16-byte piece at index piece ^ row / 2 % 4.
// The sums have the columns of 24 multiply_add, one after another.
// Between `begin_products` and `wait_for_products`, only the tensor cores may access the registers of `a` and sums.
#define R4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define R16(x, i) R4(x, i), R4(x, i + 4), R4(x, i + 8), R4(x, i + 12)
#define R64(x) R16(x, 0), R16(x, 16), R16(x, 32), R16(x, 48)
#define R96(x) R64(x), R16(x, 64), R16(x, 80)
#define FIRST_64                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                 \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(type)                                                                                    \
    asm volatile(                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {" FIRST_64 ", "                \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"               \
        "}, {%96, %97, %98, %99}, %100, p, 1, 1, 0;\n}"                                                \
        : R96(sums)                                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(matrix), "r"(int(add)))
// Descriptor of a matrix for wgmma (PTX ISA, matrix descriptor). Its 16-bit fields are in units of 16 bytes:
// the address in shared memory, the distance of the matrix's halves, and the distance of groups of 8 rows.
// The last field is the swizzle mode.
constexpr unsigned long long SWIZZLED_128_BYTES = 1, SWIZZLED_64_BYTES = 2, SHARED_MEMORY = (1 << 18) - 1;
DEVICE unsigned long long matrix_at(unsigned address, int apart, int eight_rows, unsigned long long swizzle) {
    unsigned long long from = (address & SHARED_MEMORY) / 16, halves = apart / 16, rows = eight_rows / 16;
    return from | halves << 16 | rows << 32 | swizzle << 62;
}
DEVICE unsigned long long matrix_of_64_byte_rows(unsigned address) {
    return matrix_at(address, 16, 8 * 64, SWIZZLED_64_BYTES);
}
DEVICE void multiply_group(bf16, float (&sums)[96], const unsigned (&a)[4], unsigned b, bool add) {
    unsigned long long matrix = matrix_of_64_byte_rows(b);
    WGMMA("bf16");
}
DEVICE void multiply_group(fp16, float (&sums)[96], const unsigned (&a)[4], unsigned b, bool add) {
    unsigned long long matrix = matrix_of_64_byte_rows(b);
    WGMMA("f16");
}
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }
// Prevents the compiler from moving accesses to the sums across this function.
DEVICE void hold(float (&sums)[96]) { asm volatile("" : R96(sums)::"memory"); }
DEVICE void hold(float (&sums)[64]) { asm volatile("" : R64(sums)::"memory"); }
#define R100(x) R96(x), R4(x, 96)
DEVICE void hold(float (&sums)[100]) { asm volatile("" : R100(sums)::"memory"); }

// Computes sums += a b, or sums = a b if not `add`, with both operands in shared memory and 128 columns of `b`.
// Rows of `a` and `b` have 128 bytes in shared memory, with each 16-byte piece at index piece ^ row % 8.
// A row of 128 bytes holds 64 columns of `a` or `b`. A product uses 16 columns of `a`.
// The other 64 columns of `b` are stored `apart` bytes after the first 64 columns.
#define WGMMA_SHARED(type)                                                                             \
    asm volatile(                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                   \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" FIRST_64                     \
        "}, %64, %65, p, 1, 1, 0, 1;\n}"                                                               \
        : R64(sums)                                                                                    \
        : "l"(matrix_of_128_byte_rows(a, 16)), "l"(matrix_of_128_byte_rows(b, apart)), "r"(int(add)))
DEVICE unsigned long long matrix_of_128_byte_rows(unsigned address, int apart) {
    return matrix_at(address, apart, 8 * 128, SWIZZLED_128_BYTES);
}
DEVICE void multiply_shared(bf16, float (&sums)[64], unsigned a, unsigned b, int apart, bool add) { WGMMA_SHARED("bf16"); }
DEVICE void multiply_shared(fp16, float (&sums)[64], unsigned a, unsigned b, int apart, bool add) { WGMMA_SHARED("f16"); }
// Computes sums += a b, or sums = a b if not `add`, for 64 rows of `a` and 192 columns of `b`, both in shared memory.
// `a` has the rows of multiply_shared, and `b` the columns of multiply_group, whose sums the sums equal.
#define WGMMA_SLOT(type)                                                                               \
    asm volatile(                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                                   \
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {" FIRST_64 ", "                \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"               \
        "}, %96, %97, p, 1, 1, 0, 0;\n}"                                                               \
        : R96(sums)                                                                                    \
        : "l"(matrix_of_128_byte_rows(a, 16)), "l"(matrix_of_64_byte_rows(b)), "r"(int(add)))
DEVICE void multiply_slot(bf16, float (&sums)[96], unsigned a, unsigned b, bool add) { WGMMA_SLOT("bf16"); }
DEVICE void multiply_slot(fp16, float (&sums)[96], unsigned a, unsigned b, bool add) { WGMMA_SLOT("f16"); }
// Lower half of the descriptor of a matrix for multiply_rows, which contains the matrix's address.
struct SharedRows {
    unsigned low;
    INLINE SharedRows(unsigned address) : low((address & SHARED_MEMORY) / 16 | 1 << 16) {}
    // Returns the lower half of the descriptor of a matrix that starts `bytes` bytes later.
    INLINE SharedRows after(int bytes) const {
        SharedRows rows = *this;
        rows.low += bytes / 16;
        return rows;
    }
    INLINE unsigned long long matrix() const {
        unsigned long long matrix;
        asm("mov.b64 %0, {%1, %2};" : "=l"(matrix) : "r"(low), "r"(unsigned(8 * 128 / 16 | SWIZZLED_128_BYTES << 30)));
        return matrix;
    }
};
// Computes sums += a b^T, or sums = a b^T if not `add`, with both operands in shared memory and 200 rows of `b`.
// Rows of `a` and `b` have 128 bytes in shared memory, with each 16-byte piece at index piece ^ row % 8.
// A product uses 16 columns of `a` and `b`. The sums have the columns of 25 multiply_add, one after another.
#define WGMMA_ROWS(type)                                                                               \
    asm volatile(                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %102, 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n200k16.f32." type "." type " {" FIRST_64 ", "                \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
        "%96, %97, %98, %99}, %100, %101, p, 1, 1, 0, 0;\n}"                                           \
        : R100(sums)                                                                                   \
        : "l"(a.matrix()), "l"(b.matrix()), "r"(int(add)))
DEVICE void multiply_rows(bf16, float (&sums)[100], SharedRows a, SharedRows b, bool add) { WGMMA_ROWS("bf16"); }
DEVICE void multiply_rows(fp16, float (&sums)[100], SharedRows a, SharedRows b, bool add) { WGMMA_ROWS("f16"); }
// Makes writes to shared memory visible to wgmma (proxy fence): writes of this thread, and writes of other threads for
// which this thread has waited at a barrier.
DEVICE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
