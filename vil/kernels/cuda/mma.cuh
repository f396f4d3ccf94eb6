// Products of small matrices on tensor cores, and moves of matrix fragments between memory and registers.
// A register of an operand contains two 16-bit elements, the first one in the lower half.
// With r = l / 4 and p = l % 4, lane l holds the following fragments:
//
//     a (16, 16)   columns 2p, 2p+1  2p+8, 2p+9   b (16, 8)        column r   sums (16, 8)   columns 2p, 2p+1
//       row r            a_0             a_2        rows 2p, 2p+1     b_0       row r          sums[0].at[0], [1]
//       row r + 8        a_1             a_3        rows 2p+8, 2p+9   b_1       row r + 8      sums[1].at[0], [1]
//
// Rounded to 16 bits and packed, the sums of one product are therefore a_0 and a_1 of another product.

#include "elements.cuh"

// Computes sums (16, 8) += a (16, 16) b (16, 8).
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

// Computes product (16, 8) = a (16, 8) b (8, 8) + start, with the fragments a_0, a_1 and b_0 of `multiply_add`.
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

// Computes product (16, 8) = a (16, 16) b (16, 8) + start.
DEVICE void multiply(bf16, float (&product)[4], const unsigned (&a)[4], unsigned b_0, unsigned b_1, float start) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1), "f"(start));
}
DEVICE void multiply(fp16, float (&product)[4], const unsigned (&a)[4], unsigned b_0, unsigned b_1, float start) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(product[0]), "=f"(product[1]), "=f"(product[2]), "=f"(product[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1), "f"(start));
}

// Load 2 or 4 matrices of 8 x 8 16-bit elements from shared memory (ldmatrix).
// Lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i.
// A lane receives columns 2p, 2p+1 of row r, or, if transposed, rows 2p, 2p+1 of column r.
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
// Transposes a matrix of 8 x 8 16-bit elements that is distributed over the registers of a warp.
DEVICE unsigned transpose(unsigned m) {
    unsigned transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(m));
    return transposed;
}
