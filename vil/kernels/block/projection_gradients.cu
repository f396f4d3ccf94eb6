// Gradients of x_proj and step_proj, which are sums over tokens, for 16-bit types and few tokens. For each direction:
//
//   dx_proj (P, D)    = dprojected^T x             dstep_proj (D, R)  = dstep_logits^T step
//
// Each CTA writes a partial sum over its tokens, and `unpack_gradients` adds the partial sums.
//
// projection_gradients.py declares the parameters of the kernel. Macros:
//   INPUT      element type of the tensors: bf16 or fp16
//   WIDTH      number of channels D, a multiple of 64
//   RANK       columns of the step R, a multiple of 8
//   OUTPUTS    columns of dprojected P, a multiple of 8
//   CTA_BYTES  dynamic shared memory, computed by the host
//
// A CTA processes 64 channels and every `parts`-th stage of 64 tokens of one direction. A warp processes 16 of the
// channels, and every second group of 16 tokens of a stage. All operands are loaded from rows of tokens and transposed
// (cuda/mma.cuh):
//
//                  a                                   b                         sums
//   dx_proj        dprojected (16 outputs, 16 tokens)  x (16 tokens, 8 channels) (16 outputs, 8 channels)
//   dstep_proj     dstep_logits (16 channels, tokens)  step (16 tokens, 8 ranks) (16 channels, 8 ranks)
//
// Barriers follow rules 1 and 2 of cuda/pipeline.cuh: in interval i, all warps read stage i.

#include "../cuda/types.cuh"

typedef INPUT Element;

constexpr int D = WIDTH, P = OUTPUTS, STAGES = 5, TOKENS = 64, CHANNELS = 64, WARPS = 8, THREADS = 32 * WARPS;
constexpr int SIXTEENS = (P + 15) / 16, EIGHTHS = RANK / 8;
// The pitches are chosen so that the 16-byte pieces of 8 rows are in different banks.
constexpr int PITCH = CHANNELS + 8, P_PITCH = P % 16 ? P : P + 8, STEP_PITCH = RANK % 16 ? RANK : RANK + 8;
static_assert(D % CHANNELS == 0 && RANK % 8 == 0 && P % 8 == 0 && P >= 16);

typedef Floats<2> Sums[2];  // accumulators of one product
struct Gradients {
    Sums x_proj[SIXTEENS][2], step_proj[EIGHTHS];
};
struct Stage {
    alignas(16) Element x[TOKENS][PITCH], dstep_logits[TOKENS][PITCH], dprojected[TOKENS][P_PITCH], step[TOKENS][STEP_PITCH];
};
struct CtaMemory {
    union {
        Stage stages[STAGES];
        Gradients gradients[WARPS / 2][32];  // sums of the warps with odd groups of tokens, by lane
    };
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);

// All threads copy COLUMNS columns of 64 tokens. Tokens after the last one are filled with zeros.
template <int COLUMNS, int PITCH_>
DEVICE void copy_rows(Element (*to)[PITCH_], const Element *from, int stride, int start, int tokens) {
    constexpr int PIECES = COLUMNS / 8;
    for (int i = threadIdx.x; i < TOKENS * PIECES; i += THREADS) {
        int row = i / PIECES, column = i % PIECES * 8, t = start + row;
        copy_async<8>(&to[row][column], from + (i64(min(t, tokens - 1)) * stride + column), t < tokens);
    }
}

// Loads a transposed matrix of 16 x 16 elements. In memory, its upper right part is word 1 if `is_a`, otherwise word 2.
template <int PITCH_>
DEVICE void load_16(unsigned (&word)[4], const Element (*rows)[PITCH_], int first, int most, bool is_a, int lane) {
    int lower = is_a ? lane / 16 : lane / 8 % 2, right = is_a ? lane / 8 % 2 : lane / 16;
    load_transposed(word, &rows[lower * 8 + lane % 8][min(first + right * 8, most)]);
}

DEVICE void add(Sums &a, const Sums &b) { a[0] = a[0] + b[0], a[1] = a[1] + b[1]; }

extern "C" __global__ void __launch_bounds__(THREADS, 1) projection_gradients(PARAMETERS_projection_gradients) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);
    constexpr int SLABS = D / CHANNELS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = warp % 4 * 16, odd = warp / 4;
    int slab = blockIdx.x % SLABS, g = blockIdx.x / SLABS % 2, part = blockIdx.x / SLABS / 2, all = tokens;
    int stages = (all + TOKENS - 1) / TOKENS, d = slab * CHANNELS;
    x += g * tokens * D + d, dstep_logits += g * tokens * D + d;
    dprojected += g * tokens * P, step += g * tokens * RANK;
    auto fetch = [&](Stage &stage, int index) {
        int start = index * TOKENS;
        if (start < all) {
            copy_rows<CHANNELS>(stage.x, x, D, start, all);
            copy_rows<CHANNELS>(stage.dstep_logits, dstep_logits, D, start, all);
            copy_rows<P>(stage.dprojected, dprojected, P, start, all);
            copy_rows<RANK>(stage.step, step, RANK, start, all);
        }
        commit_copies();
    };
    for (int s = 0; s < STAGES - 1; s++) fetch(cta.stages[s], part + s * int(parts));
    Gradients sums = {};
    int s = 0;
#pragma unroll 1
    for (int index = part; index < stages; index += int(parts), s = s + 1 < STAGES ? s + 1 : 0) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        fetch(cta.stages[s > 0 ? s - 1 : STAGES - 1], index + (STAGES - 1) * int(parts));
        const Stage &stage = cta.stages[s];
        UNROLLED for (int k = 0; k < TOKENS / 32; k++) {
            int t = (2 * k + odd) * 16;
            unsigned of_x[4], of_logits[4];
            load_16(of_x, stage.x + t, own, D, false, lane);
            load_16(of_logits, stage.dstep_logits + t, own, D, true, lane);
            UNROLLED for (int m = 0; m < SIXTEENS; m++) {
                unsigned a[4];
                load_16(a, stage.dprojected + t, m * 16, P - 8, true, lane);
                UNROLLED for (int n = 0; n < 2; n++)
                    multiply_add(Element{}, sums.x_proj[m][n], a[0], a[1], a[2], a[3], of_x[2 * n], of_x[2 * n + 1]);
            }
            UNROLLED for (int n = 0; n < EIGHTHS; n += 2) {
                unsigned b[4];
                load_16(b, stage.step + t, n * 8, RANK - 8, false, lane);
                UNROLLED for (int i = 0; i < (n + 1 < EIGHTHS ? 2 : 1); i++)
                    multiply_add(Element{}, sums.step_proj[n + i], of_logits[0], of_logits[1], of_logits[2], of_logits[3],
                                 b[2 * i], b[2 * i + 1]);
            }
        }
    }
    wait_for_copies<0>();
    __syncthreads();
    if (odd) cta.gradients[warp % 4][lane] = sums;
    __syncthreads();
    if (odd) return;
    const Gradients &others = cta.gradients[warp][lane];
    int r = lane / 4, column = lane % 4 * 2;
    dx_projs += (g * parts + part) * P * D + d + own, dsteps += ((g * parts + part) * D + d + own) * RANK;
    UNROLLED for (int m = 0; m < SIXTEENS; m++)
        UNROLLED for (int n = 0; n < 2; n++) {
            add(sums.x_proj[m][n], others.x_proj[m][n]);
            UNROLLED for (int half = 0; half < 2; half++)
                if (m * 16 + half * 8 < P)
                    store(dx_projs + ((m * 16 + half * 8 + r) * D + n * 8 + column), sums.x_proj[m][n][half]);
        }
    UNROLLED for (int n = 0; n < EIGHTHS; n++) {
        add(sums.step_proj[n], others.step_proj[n]);
        UNROLLED for (int half = 0; half < 2; half++)
            store(dsteps + ((half * 8 + r) * RANK + n * 8 + column), sums.step_proj[n][half]);
    }
}
