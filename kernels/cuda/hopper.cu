// Gate, product with out_proj, residual addition and the norm behind in one kernel, for 16-bit types, on Hopper (sm_90a):
// wgmma reads the weights from shared memory once for 64 tokens, and warps of their own keep memory busy.
// Compiled by NVRTC with these macros:
//   INPUT  element type of the tensors: bf16 or fp16; the residual stream is in fp32
//   WIDTH  model width C, the outputs: 192 or 384

typedef INPUT T;
constexpr int C = WIDTH, D = 2 * C;
#ifndef STEP
#define STEP 32
#endif
#ifndef CLUSTER
#define CLUSTER 2
#endif
#ifndef RAW
#define RAW 2
#endif
#ifndef UNROLL
#define UNROLL 4
#endif
#ifndef HINT
#define HINT ""
#endif
#ifndef STREAM
#define STREAM 0
#endif
#ifndef KEEP
#define KEEP 0
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef SLOTS
#define SLOTS 3
#endif
constexpr int ROWS = 64, CHUNK = 64, CHUNKS = D / CHUNK;       // tokens of a warpgroup, channels at once
constexpr int SLOT = 3 * ROWS * CHUNK * 2;                     // bytes of y_0, y_1 and z, or of some columns of x
constexpr int PART = SLOT / ROWS / 4, PARTS = C / PART;        // those columns
constexpr int STAGE = C * STEP * 2;                            // bytes of the weights of STEP channels
constexpr int NS = C / 192;                                    // products of 192 outputs

DEVICE void init_barrier(unsigned barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEVICE void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE void wait_for(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}" ::"r"(
            barrier),
        "r"(parity)
        : "memory");
}
// the same barrier of another block of the cluster
DEVICE void arrive_at(unsigned barrier, unsigned rank) {
    if (CLUSTER == 1) return arrive(barrier);
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}
DEVICE void wait_for_cluster() {
    if (CLUSTER > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
}
// a part of a stage, to all blocks of the cluster
DEVICE void copy_to_cluster(unsigned to, const void *from, unsigned barrier) {
    if (CLUSTER > 1)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, "
                     "[%3], %4;" ::"r"(to), "l"(from), "r"(STAGE / CLUSTER), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1))
                     : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                     "l"(from), "r"(STAGE), "r"(barrier)
                     : "memory");
}
DEVICE void copy16(unsigned to, const void *from) {
    asm volatile("cp.async.cg.shared.global" HINT " [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void load_at(unsigned (&m)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

// a ring of slots in shared memory, each with a barrier for "full" and, `size` further on, one for "empty"
struct Ring {
    unsigned barriers;
    int size, slot, phase;
    __device__ __forceinline__ unsigned full() const { return barriers + slot * 8; }
    __device__ __forceinline__ unsigned empty() const { return barriers + (size + slot) * 8; }
    __device__ __forceinline__ unsigned empty_before() const { return barriers + (size + (slot ? slot : size) - 1) * 8; }
    __device__ __forceinline__ void next() {
        if (++slot == size) slot = 0, phase ^= 1;
    }
};

#define R4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define R16(x, i) R4(x, i), R4(x, i + 4), R4(x, i + 8), R4(x, i + 12)
#define R96(x) R16(x, 0), R16(x, 16), R16(x, 32), R16(x, 48), R16(x, 64), R16(x, 80)
#define WGMMA(type)                                                                                    \
    asm volatile(                                                                                      \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"                                                  \
        "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {"                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
        "}, {%96, %97, %98, %99}, %100, p, 1, 1, 0;\n}"                                                \
        : R96(sums)                                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)))
DEVICE void multiply(bf16, float (&sums)[96], const unsigned (&a)[4], unsigned long long b, bool add) { WGMMA("bf16"); }
DEVICE void multiply(fp16, float (&sums)[96], const unsigned (&a)[4], unsigned long long b, bool add) { WGMMA("f16"); }
DEVICE void hold(float (&sums)[96]) { asm volatile("" : R96(sums)::"memory"); }
template <int PENDING>
DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

DEVICE unsigned long long descriptor(unsigned address) {
    return (unsigned long long)((address & 0x3ffff) >> 4) | 1ull << 16 | (unsigned long long)(STEP * 16 / 16) << 32 |
           (STEP == 64 ? 1ull : 2ull) << 62;
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(384, 1)
gated_product(const T *__restrict__ y, const T *__restrict__ z, i64 z_stride, const float *__restrict__ scales,
              const T *__restrict__ weights, const float *__restrict__ x, float *__restrict__ out,
              T *__restrict__ means, T *__restrict__ xhat, float *__restrict__ norms, double eps, i64 tokens,
              i64 length, i64 tokens_of_group, i64 rounds) {
    extern __shared__ __align__(1024) char shared[];
    unsigned base = shared_address(shared), slots = base + STAGES * STAGE;
    unsigned barriers = slots + 2 * SLOTS * SLOT;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = tokens, per = tokens_of_group, tiles = int(rounds) * gridDim.x;
    unsigned rank = 0;
    if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    Ring weight_ring{barriers + 4 * SLOTS * 8, STAGES, 0, 0};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4 * SLOTS; i++) init_barrier(barriers + i * 8, i / SLOTS % 2 ? 4 : 32 * RAW);
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(weight_ring.barriers + i * 8, i / STAGES ? 8 * CLUSTER : 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    wait_for_cluster();

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        Ring weights_to = weight_ring;
        auto copy_weights = [&](int step) {
            wait_for(weights_to.empty(), weights_to.phase ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(weights_to.full()), "r"(STAGE)
                         : "memory");
            copy_to_cluster(base + weights_to.slot * STAGE + rank * (STAGE / CLUSTER),
                            weights + (step * (C * STEP) + rank * (C * STEP / CLUSTER)), weights_to.full());
            weights_to.next();
        };
        if (RAW == 1 && warp == 11) {
            if (lane == 0)
                for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x)
#pragma unroll 1
                    for (int step = 0; step < D / STEP; step++) copy_weights(step);
        } else if (RAW == 2 || warp < 10) {
            // a thread copies 16 bytes of every APART-th row
            constexpr int APART = 4 * RAW;
            int g = warp % 2, row = lane / 8 + (warp - 8) / 2 * 4, piece = lane % 8;
            Ring ring{barriers + g * 2 * SLOTS * 8, SLOTS, 0, 0};
            unsigned y_to = row * 128 + (piece ^ row) * 16, x_to = row * (PART * 4) + (piece ^ row % 2 * 4) * 16;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                int first = (2 * tile + g) * per, left = min(per, all - first) - row;
                const T *from_y = y + (i64(first + row) * D + piece * 8);
                const T *from_z = z + (i64(first + row) * (2 * D) + piece * 8);
#pragma unroll 1
                for (int chunk = 0; chunk < CHUNKS; chunk++, ring.next()) {
                    if (RAW == 2 && warp == 8) {
                        if (lane == 0)
#pragma unroll 1
                            for (int i = 0; i < CHUNK / STEP; i++) copy_weights(chunk * (CHUNK / STEP) + i);
                        __syncwarp();
                    }
                    wait_for(ring.empty(), ring.phase ^ 1);
                    unsigned to = slots + (g * SLOTS + ring.slot) * SLOT + y_to;
                    const T *p_0 = from_y + chunk * CHUNK, *p_1 = p_0 + tokens * D, *p_z = from_z + chunk * CHUNK;
#pragma unroll UNROLL
                    for (int r = 0; r < left; r += APART) {
                        copy16(to, p_0), copy16(to + ROWS * 128, p_1), copy16(to + 2 * ROWS * 128, p_z);
                        to += APART * 128, p_0 += APART * D, p_1 += APART * D, p_z += APART * 2 * D;
                        if (RAW == 1) to ^= 64;
                    }
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full()) : "memory");
                }
                const float *from_x = x + (i64(first + row) * C + piece * 4);
#pragma unroll 1
                for (int part = 0; part < PARTS; part++, ring.next()) {
                    wait_for(ring.empty(), ring.phase ^ 1);
                    unsigned to = slots + (g * SLOTS + ring.slot) * SLOT + x_to;
                    const float *p = from_x + part * PART;
#pragma unroll UNROLL
                    for (int r = 0; r < left; r += APART, to += APART * PART * 4, p += APART * C)
#pragma unroll
                        for (int k = 0; k < PART / 32; k++) copy16(to + k * 128, p + k * 32);
                    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full()) : "memory");
                }
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int g = warp / 4, L = length;
        warp %= 4;
        Ring ring{barriers + g * 2 * SLOTS * 8, SLOTS, 0, 0};
        slots += g * SLOTS * SLOT;
        // of the first channels; others are at ^ 16 times their eighth, as slots are at multiples of 1024
        unsigned read_at = (warp * 16 + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
        float sums[NS][96];
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int token = (2 * tile + g) * per + warp * 16 + lane / 4, end = min((2 * tile + g + 1) * per, all);
            float scale[2] = {1, 1};
            if (scales)
                for (int i = 0; i < 2; i++)
                    if (token + i * 8 < end) scale[i] = scales[(token + i * 8) / L];
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; chunk++, ring.next()) {
                wait_for(ring.full(), ring.phase);
                unsigned slot = slots + ring.slot * SLOT;
                unsigned a[2][4];
#pragma unroll
                for (int k = 0; k < CHUNK / 16; k++) {
                    unsigned at = slot + read_at ^ k * 32;
                    unsigned y_0[4], y_1[4], zs[4];
                    load_at(y_0, at), load_at(y_1, at + ROWS * 128), load_at(zs, at + 2 * ROWS * 128);
#pragma unroll
                    for (int w = 0; w < 4; w++) {
                        Floats<2> v = unpack(T{}, zs[w]), mean = unpack(T{}, y_0[w]) + unpack(T{}, y_1[w]);
#pragma unroll
                        for (int c = 0; c < 2; c++) {
                            mean.at[c] *= 0.5f;
                            v.at[c] = scale[w % 2] * mean.at[c] * v.at[c] * sigmoid(v.at[c]);
                        }
                        a[k % 2][w] = pack(T{}, v.at[0], v.at[1]);
                        if (KEEP) {  // in the place of y_0
                            unsigned to = slot + (warp * 16 + lane / 4) * 128 + lane / 4 * 16 + lane % 4 * 4 ^ k * 32 + w / 2 * 16;
                            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + w % 2 * 1024), "r"(pack(T{}, mean.at[0], mean.at[1]))
                                         : "memory");
                        }
                    }
                    if (k == CHUNK / 16 - 1) {
                        if (KEEP) {
                            __syncwarp();
#pragma unroll
                            for (int i = 0; i < 4; i++) {
                                int r = warp * 16 + i * 4 + lane / 8;
                                unsigned from = slot + r * 128 + (lane % 8 ^ r % 8) * 16;
                                Pack<T, 8> mean;
                                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                                             : "=r"(mean.word[0]), "=r"(mean.word[1]), "=r"(mean.word[2]), "=r"(mean.word[3])
                                             : "r"(from)
                                             : "memory");
                                int t = token - lane / 4 + i * 4 + lane / 8;
                                if (t < end) store(means + (i64(t) * D + chunk * CHUNK + lane % 8 * 8), mean);
                            }
                        }
                        __syncwarp();
                        if (lane == 0) arrive(ring.empty());
                    }
                    constexpr int STEPS = STEP / 16;
                    if (k % STEPS == 0) wait_for(weight_ring.full(), weight_ring.phase);
#pragma unroll
                    for (int n = 0; n < NS; n++) hold(sums[n]);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int n = 0; n < NS; n++) {
                        unsigned at = base + weight_ring.slot * STAGE + n * (192 * STEP * 2) + k % STEPS * 32;
                        multiply(T{}, sums[n], a[k % 2], descriptor(at), chunk + k > 0);
                    }
                    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                    wait_for_products<1>();
                    // the products before these are done
                    if (k % STEPS == 0 && lane < CLUSTER && chunk + k > 0) arrive_at(weight_ring.empty_before(), lane);
                    if (k % STEPS == STEPS - 1) weight_ring.next();
                }
            }
            wait_for_products<0>();
#pragma unroll
            for (int n = 0; n < NS; n++) hold(sums[n]);
            if (lane < CLUSTER) arrive_at(weight_ring.empty_before(), lane);

            i64 to = i64(token) * C + lane % 4 * 4;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                wait_for(ring.full(), ring.phase);
                unsigned from = slots + ring.slot * SLOT + (warp * 16 + lane / 4) * (PART * 4);
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int n = 0; n < PART / 16; n++) {
                        Floats<4> v;
                        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                                     : "=f"(v.at[0]), "=f"(v.at[1]), "=f"(v.at[2]), "=f"(v.at[3])
                                     : "r"(from + i * 8 * (PART * 4) + (n * 4 + lane % 4 ^ lane / 4 % 2 * 4) * 16)
                                     : "memory");
#pragma unroll
                        for (int c = 0; c < 4; c++) {
                            int column = part * PART + n * 16;  // of the first of 16
                            float &sum = sums[column / 192][column % 192 / 2 + c / 2 * 4 + i * 2 + c % 2];
                            sum += v.at[c];
                            v.at[c] = sum;
                        }
                        if (token + i * 8 < end) {
                            float *p = out + (to + i * 8 * C + part * PART + n * 16);
                            if (STREAM == 1)
                                asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.at[0]), "f"(v.at[1]), "f"(v.at[2]), "f"(v.at[3]) : "memory");
                            else
                                store(p, v);
                        }
                    }
                __syncwarp();
                if (lane == 0) arrive(ring.empty());
                ring.next();
            }
            if (xhat)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float squares[8] = {};  // added in the order of rms_norm
#pragma unroll
                for (int n = 0; n < C / 16; n++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        float v = sums[n / 12][n % 12 * 8 + c / 2 * 4 + i * 2 + c % 2];
                        squares[n % 8] = fmaf(v, v, squares[n % 8]);
                    }
#pragma unroll
                for (int distance = 4; distance > 0; distance /= 2)
#pragma unroll
                    for (int n = 0; n < distance; n++) squares[n] += squares[n + distance];
                squares[0] += __shfl_xor_sync(WARP, squares[0], 2);
                squares[0] += __shfl_xor_sync(WARP, squares[0], 1);
                float r = rsqrtf(squares[0] / C + float(eps));
                if (token + i * 8 >= end) continue;
                if (lane % 4 == 0) norms[token + i * 8] = r;
#pragma unroll
                for (int n = 0; n < C / 16; n++) {
                    Floats<4> v;
#pragma unroll
                    for (int c = 0; c < 4; c++) v.at[c] = r * sums[n / 12][n % 12 * 8 + c / 2 * 4 + i * 2 + c % 2];
                    store(xhat + (to + i * 8 * C + n * 16), from_floats<T>(v));
                }
            }
        }
    }
    __syncwarp();
    wait_for_cluster();  // before its shared memory is gone
}
