// Backward pass of step_proj, which projects the step (R columns) to step logits (D columns), for 16-bit types.
// The kernel reads the largest tensor, the gradients of the step logits, only once. For each direction:
//
//   dstep (tokens, R)        = dstep_logits step_proj      stored in dprojected, next to dk and dq
//   dstep_proj (D, R)        = dstep_logits^T step
//   dprojected (tokens, P)   = [dstep  dk  dq],       P = R + 2N
//
// dstep_proj is a sum over tokens: each CTA writes a partial sum, and `unpack_gradients` adds the partial sums.
//
// step_proj_bwd.py declares the parameters of the kernel. Macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   CHANNELS     D, a multiple of 16 WARPS, small enough for a warp to hold its part of the weights in registers
//   RANK         columns of step_proj, R, a multiple of 8
//   STATES       columns of dk and dq, N, a multiple of 4
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// A CTA processes every `parts`-th tile of 16 tokens of one direction, and each of its eight warps has WIDTH channels.
// Both products read the same tile of dstep_logits, with the fragments of cuda/mma.cuh:
//
//                   a                                   b                            sums
//   dstep           ldmatrix, rows are tokens           step_proj, in registers      (16 tokens, R) of one tile
//                   (16 tokens, 16 channels)            (16 channels, 8 ranks)
//   dstep_proj      ldmatrix.trans, rows are channels   step, ldmatrix.trans         (16 channels, R) of all tiles
//                   (16 channels, 16 tokens)            (16 tokens, 8 ranks)
//
// dstep is a sum over channels and therefore over warps: each warp writes its partial sum to shared memory.
// After the barrier of the next tile, all threads add the eight partial sums and write the result.
// Barriers follow rules 1 and 2 of cuda/pipeline.cuh, with two buffers of dstep. docs/kernels/block.md lists buffers.

#include "../cuda/types.cuh"

typedef INPUT Element;

constexpr int STAGES = 3;  // number of buffered tiles: the prefetched tiles and the current tile
constexpr int TILE = 16, WARPS = 8, D = CHANNELS, WIDTH = D / WARPS, THREADS = 32 * WARPS;
constexpr int SIXTEENS = WIDTH / 16, EIGHTS = RANK / 8, PROJECTIONS = RANK + 2 * STATES;
// PITCH and STEP_PITCH are chosen so that the 16-byte pieces of 8 rows are in different banks.
constexpr int PITCH = D + 8, STEP_PITCH = RANK % 16 == 0 ? RANK + 8 : RANK;
static_assert(D % (16 * WARPS) == 0 && RANK % 8 == 0 && STATES % 4 == 0);
struct Stage {
    Element dstep_logits[TILE][PITCH], step[TILE][STEP_PITCH];
};
struct CtaMemory {
    Stage stages[STAGES];
    float dstep[2][WARPS][TILE][RANK];  // one buffer for even tiles, and one for odd tiles
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);

// All threads copy a tile of one direction.
// Tiles after the last tile are filled with zeros, so that every tile is one group of copies.
DEVICE void fetch(Stage &stage, const Element *dstep_logits, const Element *step, i64 step_stride, int tile,
                  int tokens) {
    constexpr int PIECES = D / 8;  // number of 16-byte pieces of a token; the pieces of a tile are contiguous in memory
    const Element *from = dstep_logits + i64(tile) * TILE * D;
    UNROLLED for (int item = 0; item < TILE * PIECES / THREADS; item++) {
        int i = item * THREADS + threadIdx.x, row = i / PIECES;
        copy_async<8>(&stage.dstep_logits[row][i % PIECES * 8], from + i * 8, tile * TILE + row < tokens);
    }
    if (int row = threadIdx.x / EIGHTS, c = threadIdx.x % EIGHTS * 8; row < TILE)
        copy_async<8>(&stage.step[row][c], step + i64(tile * TILE + row) * step_stride + c, tile * TILE + row < tokens);
    commit_copies();
}

// Writes dstep of a tile, which is the sum over all warps.
DEVICE void store_dstep(Element *dprojected, const float (*dstep)[TILE][RANK], int tile, int tokens) {
    static_assert(TILE * RANK / 2 <= THREADS);
    if (int row = threadIdx.x / (RANK / 2), r = threadIdx.x % (RANK / 2) * 2; row < TILE) {
        Floats<2> sum = load<2>(&dstep[0][row][r]);
        UNROLLED for (int w = 1; w < WARPS; w++) sum = sum + load<2>(&dstep[w][row][r]);
        if (tile * TILE + row < tokens)
            store(dprojected + i64(tile * TILE + row) * PROJECTIONS + r, from_floats<Element>(sum));
    }
}

// dk and dq of a tile in registers, as packs of 4 elements that are loaded during the previous tile.
constexpr int KEYS = TILE * STATES / 2, ITEMS = (KEYS + THREADS - 1) / THREADS;
struct KeyGradients {
    Pack<Element, 4> of[ITEMS];
    static INLINE bool is_one(int tile, int i, int tokens) {
        return (KEYS % THREADS == 0 || i < KEYS) && tile * TILE + i / (STATES / 2) < tokens;
    }
    INLINE void read(const Element *dk, const Element *dq, int tile, int tokens) {
        UNROLLED for (int item = 0; item < ITEMS; item++) {
            int i = item * THREADS + threadIdx.x, n = i % (STATES / 2) * 4;
            const Element *from = (n < STATES ? dk : dq) + i64(tile * TILE + i / (STATES / 2)) * STATES;
            if (is_one(tile, i, tokens)) of[item] = load<4>(from + n % STATES);
        }
    }
    INLINE void write(Element *dprojected, int tile, int tokens) const {
        UNROLLED for (int item = 0; item < ITEMS; item++) {
            int i = item * THREADS + threadIdx.x, n = i % (STATES / 2) * 4;
            Element *to = dprojected + i64(tile * TILE + i / (STATES / 2)) * PROJECTIONS + RANK;
            if (is_one(tile, i, tokens)) store(to + n, of[item]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) step_proj_backward(PARAMETERS_step_proj_backward) {
    begin_kernel();
    extern __shared__ __align__(16) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = blockIdx.x % parts, g = blockIdx.x / parts;
    int all = tokens, tiles = (all + TILE - 1) / TILE, first_channel = warp * WIDTH;
    dstep_logits += g * tokens * D, step += g * step_directions, step_proj += g * D * RANK;
    dk += g * tokens * STATES, dq += g * tokens * STATES, dprojected += g * tokens * PROJECTIONS;
    dstep_proj += (i64(g) * parts + part) * D * RANK;

    // step_proj of the warp's channels as operand b, whose rows are channels and whose column r is a rank.
    unsigned weights[SIXTEENS][EIGHTS][2];
    UNROLLED for (int k = 0; k < SIXTEENS; k++)
        UNROLLED for (int n = 0; n < EIGHTS; n++)
            UNROLLED for (int half = 0; half < 2; half++) {
                int channel = first_channel + k * 16 + half * 8 + lane % 4 * 2;
                const Element *p = step_proj + channel * RANK + n * 8 + lane / 4;
                weights[k][n][half] = p[0].bits | unsigned(p[RANK].bits) << 16;
            }
    KeyGradients keys;
    Floats<2> dweights[SIXTEENS][EIGHTS][2] = {};  // sums of dstep_proj
    UNROLLED for (int s = 0; s < STAGES - 1; s++)
        fetch(cta.stages[s], dstep_logits, step, step_stride, part + s * int(parts), all);
    int i = 0;
    keys.read(dk, dq, part, all);
#pragma unroll 1
    for (int tile = part; tile < tiles; tile += int(parts), i++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        fetch(cta.stages[(i + STAGES - 1) % STAGES], dstep_logits, step, step_stride,
              tile + (STAGES - 1) * int(parts), all);
        if (i > 0) store_dstep(dprojected, cta.dstep[(i - 1) % 2], tile - int(parts), all);
        const Stage &stage = cta.stages[i % STAGES];
        // The step is operand b, loaded as two matrices of 8 ranks at once. The last odd matrix is loaded twice.
        unsigned steps[EIGHTS + EIGHTS % 2][2];
        UNROLLED for (int n = 0; n < EIGHTS; n += 2) {
            unsigned word[4];
            load_transposed(word, &stage.step[lane % 16][min(n + lane / 16, EIGHTS - 1) * 8]);
            steps[n][0] = word[0], steps[n][1] = word[1], steps[n + 1][0] = word[2], steps[n + 1][1] = word[3];
        }
        Floats<2> dstep[EIGHTS][2] = {};
        UNROLLED for (int k = 0; k < SIXTEENS; k++) {
            // In operand a, a_1 is 8 rows later and a_2 is 8 columns later.
            // Rows are tokens for dstep and channels for dstep_proj.
            unsigned rows[4], columns[4];
            load_matrices(rows, &stage.dstep_logits[lane % 16][first_channel + k * 16 + lane / 16 * 8]);
            load_transposed(columns,
                            &stage.dstep_logits[lane / 16 * 8 + lane % 8][first_channel + k * 16 + lane / 8 % 2 * 8]);
            UNROLLED for (int n = 0; n < EIGHTS; n++) {
                multiply_add(Element{}, dstep[n], rows[0], rows[1], rows[2], rows[3], weights[k][n][0],
                             weights[k][n][1]);
                multiply_add(Element{}, dweights[k][n], columns[0], columns[1], columns[2], columns[3], steps[n][0],
                             steps[n][1]);
            }
        }
        UNROLLED for (int n = 0; n < EIGHTS; n++)
            UNROLLED for (int half = 0; half < 2; half++)
                store(&cta.dstep[i % 2][warp][half * 8 + lane / 4][n * 8 + lane % 4 * 2], dstep[n][half]);
        keys.write(dprojected, tile, all);
        keys.read(dk, dq, tile + int(parts), all);
    }
    wait_for_copies<0>();  // waits for the copies of tiles after the last tile
    __syncthreads();
    if (i > 0) store_dstep(dprojected, cta.dstep[(i - 1) % 2], part + (i - 1) * int(parts), all);
    UNROLLED for (int k = 0; k < SIXTEENS; k++)
        UNROLLED for (int n = 0; n < EIGHTS; n++)
            UNROLLED for (int half = 0; half < 2; half++)
                store(dstep_proj + (first_channel + k * 16 + half * 8 + lane / 4) * RANK + n * 8 + lane % 4 * 2,
                      dweights[k][n][half]);
}
