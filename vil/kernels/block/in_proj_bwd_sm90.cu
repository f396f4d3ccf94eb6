// Gradient of in_proj's input and backward pass of the norm before in_proj, for 16-bit types on Hopper:
//
//   dxhat = duz in_proj        dx = dresidual + rstd (dxhat - xhat mean(dxhat xhat))
//
// dxhat is rounded to Element, as a matrix product would store dxhat, and never leaves shared memory.
// If `rounded` is not null, the kernel writes dx, rounded to Element, to `rounded`.
//
// in_proj_bwd_sm90.py declares the parameters of the kernel. Macros:
//   INPUT        element type of the 16-bit tensors: bf16 or fp16
//   WIDTH        model width C, the number of columns of dxhat: 192 or 384
//   CLUSTER      number of CTAs of a cluster, each of which computes 192 columns of dxhat: WIDTH / 192
//   GROUPS       number of groups of four consumer warps, with 64 tokens each
//   NORMS        number of warps that process the norm, 1 to 15 - 4 GROUPS
//   STAGES       number of pipeline stages for duz and in_proj, with 64 columns of duz each
//   TOGETHER     number of tokens that a lane loads at once in the backward pass of the norm
//   PREFETCH     whether to prefetch xhat and dresidual to the L2 cache
//   BULK         whether in_proj has the layout `blocked` of tiles.cuh, for bulk copies
//   AHEAD        whether copies of duz load 256 bytes, of two stages, into the L2 cache
//   WIDE         whether lanes store 8 instead of 4 bytes of dxhat at once
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// C columns of dxhat    E columns of duz
//
// Each multiprocessor runs one CTA. A cluster processes tiles of TOKENS tokens, one after another.
// The consumers of a CTA compute dxhat of all tokens of the tile, but only of the CTA's 192 columns.
// The consumers write dxhat of the first ROWS = TOKENS / CLUSTER tokens to the shared memory of the first CTA, and of the
// following ROWS tokens to the shared memory of the second CTA.
// Therefore each CTA has complete rows of dxhat for the norm, while the consumers already compute the next tile.
// No CTA accesses the memory of a CTA that has ended, because a CTA ends after it has received dxhat of the last tile.
// docs/kernels/block.md lists the buffers, and cuda/pipeline.cuh the rules of the barriers.
//
//   4 GROUPS warps          consumers: 64 tokens x 192 columns of dxhat per group, in 96 registers per lane;
//                           after their last tile, help with the norm of this tile
//   NORMS warps             backward pass of the norm
//   the last warps          producers: 64 columns of duz of the tile's tokens, and 64 rows of in_proj
//
// A CTA has 16 warps, because wgmma needs 122 of at most 128 registers per thread.
//
// Rows of duz and in_proj in shared memory have 128 bytes, with each 16-byte piece at index piece ^ row % 8.
// Rows 64 i to 64 i + 63 of in_proj's part of a stage contain the columns 64 i to 64 i + 63 of the CTA's 192 columns.
// Rows of dxhat in shared memory are PITCH bytes apart, so that the rows of a store are in different banks.

#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "../cuda/overlap.cuh"

typedef INPUT Element;
constexpr int C = WIDTH, E = 4 * C, COLUMNS = 192;
static_assert(C == COLUMNS * CLUSTER);

constexpr int K_TILE = 64, TOKENS = 64 * GROUPS, ROWS = TOKENS / CLUSTER, PITCH = C * 2 + (WIDE ? 32 : 16);
constexpr int BLOCK = 64 * 128;  // bytes of 64 rows of duz or in_proj
constexpr int OF_WEIGHTS = GROUPS * BLOCK, STAGE = OF_WEIGHTS + COLUMNS / 64 * BLOCK;
// Offsets in shared memory in bytes: stages, dxhat, then barriers of stages and of dxhat.
constexpr int OF_ROWS = STAGES * STAGE, OF_BARRIERS = OF_ROWS + ROWS * PITCH;
constexpr int OF_ROW_BARRIERS = OF_BARRIERS + 2 * STAGES * 8;
static_assert(OF_ROW_BARRIERS + 2 * 8 == CTA_BYTES && CTA_BYTES <= 227 * 1024);
constexpr int CONSUMERS = 4 * GROUPS, PRODUCERS = 16 - CONSUMERS - NORMS;  // numbers of warps
static_assert(CONSUMERS % CLUSTER == 0 && 16 % PRODUCERS == 0);

// The producers load the columns k to k + 63 of duz, and the rows k to k + 63 of in_proj. A lane copies 16 bytes of
// every STEP-th row. `first` is the tile's first token, and `of_norm` the first token of the CTA's rows of dxhat.
DEVICE void produce(Pipeline<STAGES> &stages, unsigned shared, const Element *duz, const Element *in_proj,
                    const Element *xhat, const float *dresidual, i64 first, i64 of_norm, i64 tokens, int thread) {
    constexpr int STEP = 4 * PRODUCERS;
    int row = thread / 8, piece = thread % 8;
    int left = min(tokens - first, i64(TOKENS)) - row;
    duz += (first + row) * E + piece * 8, in_proj += BULK ? 0 : row * C + piece * 8;
    unsigned of_lane = shared + row * 128 + (piece ^ row % 8) * 16;
#pragma unroll 1
    for (int k = 0; k < E; k += K_TILE, stages.next(), duz += K_TILE, in_proj += K_TILE * C) {
        wait_for(stages.empty(), stages.parity() ^ 1);
        if (BULK && thread == 0) {
            arrive_and_expect(stages.full(), STAGE - OF_WEIGHTS);
            copy_bulk(shared + stages.stage() * STAGE + OF_WEIGHTS, in_proj, STAGE - OF_WEIGHTS, stages.full());
        }
        unsigned to = of_lane + stages.stage() * STAGE;
        UNROLLED for (int i = 0; i < TOKENS; i += STEP)
            if (i < left) {
                if (AHEAD)
                    copy_16_async_ahead((to ^ i % 8 * 16) + i * 128, duz + i64(i) * E);
                else
                    copy_16_async((to ^ i % 8 * 16) + i * 128, duz + i64(i) * E);
            }
        UNROLLED for (int c = 0; c < COLUMNS && !BULK; c += 64)
            UNROLLED for (int i = 0; i < 64; i += STEP)
                copy_16_async((to ^ i % 8 * 16) + OF_WEIGHTS + c / 64 * BLOCK + i * 128, in_proj + i * C + c);
        arrive_when_copied(stages.full());
        if (PREFETCH && thread == 0) {  // the product of each K_TILE columns prefetches a part of the rows
            constexpr int PART = (ROWS * K_TILE + E - 1) / E;
            i64 token = of_norm + k / K_TILE * PART;
            int count = min(min(of_norm + ROWS, tokens) - token, i64(PART));
            if (count > 0)
                prefetch_bulk(xhat + token * C, count * C * 2), prefetch_bulk(dresidual + token * C, count * C * 4);
        }
    }
}

// Computes sums = duz in_proj for the group's tokens at `duz` in the first stage.
// A stage is released one step later, when wait_for_products<1> guarantees that the stage's products have finished.
DEVICE void multiply(float (&sums)[COLUMNS / 2], Pipeline<STAGES> &stages, unsigned duz, unsigned in_proj, int lane) {
#pragma unroll 1
    for (int k = 0; k < E; k += K_TILE, stages.next()) {
        wait_for(stages.full(), stages.parity());
        show_to_products();
        hold(sums);
        begin_products();
        UNROLLED for (int i = 0; i < K_TILE; i += 16)
            multiply_shared(Element{}, sums, duz + stages.stage() * STAGE + i * 2,
                            in_proj + stages.stage() * STAGE + i * 128, BLOCK, k + i > 0);
        commit_products();
        wait_for_products<1>();  // waits for all products except the newest
        if (k > 0 && lane == 0) arrive(stages.empty_before());
    }
    wait_for_products<0>();
    hold(sums);
    if (lane == 0) arrive(stages.empty_before());
}

// Writes a warp's 16 rows of dxhat to `rows`, in the shared memory of the CTA that processes these tokens.
// If WIDE, pairs of lanes exchange words, so that even lanes store 4 columns of one product, and odd lanes of the next.
DEVICE void hand_over(const float (&sums)[COLUMNS / 2], unsigned rows, int lane) {
    rows += WIDE ? lane % 2 * 16 + lane % 4 / 2 * 8 : lane % 4 * 4;
    UNROLLED for (int c = 0; c < COLUMNS; c += 16)
        UNROLLED for (int i = 0; i < 2; i++) {
            const float *s = &sums[c / 2 + i * 2];
            unsigned to = rows + i * 8 * PITCH + c * 2;
            unsigned a = pack(Element{}, s[0], s[1]), b = pack(Element{}, s[4], s[5]);
            if (WIDE) {
                unsigned other = __shfl_xor_sync(WARP, lane % 2 ? a : b, 1);
                store_in_cluster(to, lane % 2 ? other : a, lane % 2 ? b : other);
            } else {
                store_in_cluster(to, a), store_in_cluster(to + 16, b);
            }
        }
}

// A lane processes 4 adjacent channels at a time, and LANES lanes process a token.
constexpr int LANES = C / 12, AT_ONCE = 32 / LANES, V = 4, ITEMS = C / (V * LANES);
static_assert(LANES * AT_ONCE == 32 && ITEMS * V * LANES == C);

// Backward pass of the norm, for the rows of dxhat in the CTA's shared memory.
struct Norm {
    const char *rows;
    const Element *xhat;
    const float *rstd, *dresidual;
    float *dx;
    Element *rounded;
    i64 tokens;
    // Computes dx of the CTA's tokens, the first of which is `token`, with `warps` warps.
    // A lane loads TOGETHER tokens at once.
    INLINE void backward(i64 token, int warp, int warps, int lane) const {
        int count = min(tokens - token, i64(ROWS)), c = lane % LANES * V;
        i64 start = token * C + c;
#pragma unroll 1
        for (int first = warp * AT_ONCE; first < count; first += TOGETHER * AT_ONCE * warps) {
            Pack<Element, V> value[TOGETHER][ITEMS] = {};
            Floats<V> residual[TOGETHER][ITEMS] = {};
            float r[TOGETHER] = {};
            UNROLLED for (int i = 0; i < TOGETHER; i++)
                if (int row = first + i * AT_ONCE * warps + lane / LANES; row < count) {
                    UNROLLED for (int j = 0; j < ITEMS; j++) {
                        i64 at = start + row * C + j * LANES * V;
                        value[i][j] = load<V>(xhat + at), residual[i][j] = load<V>(dresidual + at);
                    }
                    r[i] = rstd[token + row];
                }
            UNROLLED for (int i = 0; i < TOGETHER; i++) {
                int row = first + i * AT_ONCE * warps + lane / LANES;
                Pack<Element, V> gradient[ITEMS] = {};
                float products = 0;
                UNROLLED for (int j = 0; j < ITEMS; j++) {
                    if (row < count) gradient[j] = load<V>((const Element *)(rows + row * PITCH) + j * LANES * V + c);
                    Floats<V> g = to_floats(gradient[j]), v = to_floats(value[i][j]);
                    UNROLLED for (int e = 0; e < V; e++) products = fmaf(g.at[e], v.at[e], products);
                }
                UNROLLED for (int distance = LANES / 2; distance > 0; distance /= 2)
                    products += __shfl_xor_sync(WARP, products, distance);
                float mean = products / C;
                UNROLLED for (int j = 0; j < ITEMS; j++) {
                    i64 at = start + row * C + j * LANES * V;
                    Floats<V> g = to_floats(gradient[j]), v = to_floats(value[i][j]), sum = residual[i][j];
                    UNROLLED for (int e = 0; e < V; e++)
                        sum.at[e] = fmaf(r[i], fmaf(-v.at[e], mean, g.at[e]), sum.at[e]);
                    if (row < count) store(dx + at, sum);
                    if (rounded && row < count) store(rounded + at, from_floats<Element>(sum));
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(512, 1) __cluster_dims__(CLUSTER, 1, 1)
    in_proj_backward(PARAMETERS_in_proj_backward) {
    begin_kernel();
    extern __shared__ __align__(1024) char shared[];
    unsigned memory = shared_address(shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = CLUSTER > 1 ? cluster_rank() : 0;
    Pipeline<STAGES> stages(memory + OF_BARRIERS);
    Pipeline<1> handed(memory + OF_ROW_BARRIERS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++)
            init_barrier(stages.barriers + i * 8, i / STAGES ? CONSUMERS : 32 * PRODUCERS + BULK);
        init_barrier(handed.full(), CONSUMERS), init_barrier(handed.empty(), CLUSTER * NORMS);
        publish_barriers();
    }
    __syncthreads();
    sync_cluster();  // the barriers of all CTAs of the cluster are initialized

    const Norm norm = {shared + OF_ROWS, xhat, rstd, dresidual, dx, rounded, tokens};
    // first token of the current tile, and distance to the first token of the next tile
    i64 first = i64(blockIdx.x / CLUSTER) * TOKENS, per_round = i64(gridDim.x / CLUSTER) * TOKENS;
    i64 of_norm = rank * ROWS;  // first token of the CTA's rows of dxhat in a tile
    if (warp >= CONSUMERS + NORMS) {
        for (; first < tokens; first += per_round)
            produce(stages, memory, duz, in_proj + rank * COLUMNS * (BULK ? K_TILE : 1), xhat, dresidual, first,
                    first + of_norm, tokens, threadIdx.x - 32 * (CONSUMERS + NORMS));
        wait_for_all_copies();
    } else {
        if (warp >= CONSUMERS) {
            for (; first + per_round < tokens; first += per_round, handed.next()) {
                wait_for_cluster(handed.full(), handed.parity());
                norm.backward(first + of_norm, warp - CONSUMERS, NORMS, lane);
                __syncwarp();
                if (lane < CLUSTER) arrive_in_cluster(in_cta(handed.empty(), lane));
            }
        } else {
            int row = warp * 16, cta = row / ROWS;  // CTA that processes the norm of the warp's tokens
            unsigned rows = memory + OF_ROWS + (row % ROWS + lane / 4) * PITCH + rank * COLUMNS * 2;
            unsigned to = in_cta(rows, cta), full = in_cta(handed.full(), cta);
            for (;; first += per_round, handed.next()) {
                float sums[COLUMNS / 2];
                multiply(sums, stages, memory + warp / 4 * BLOCK, memory + OF_WEIGHTS, lane);
                wait_for_cluster(handed.empty(), handed.parity() ^ 1);
                hand_over(sums, to, lane);
                __syncwarp();
                if (lane == 0) arrive_in_cluster(full);
                if (first + per_round >= tokens) break;
            }
        }
        // all warps process the norm of the CTA's last tile, because no further product follows
        wait_for_cluster(handed.full(), handed.parity());
        norm.backward(first + of_norm, warp, CONSUMERS + NORMS, lane);
    }
}
