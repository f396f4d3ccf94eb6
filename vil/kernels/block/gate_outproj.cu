// The gate and the product with out_proj in one kernel, for 16-bit types and few tokens, where latency dominates:
//
//   mean = (y_0 + y_1) / 2      gated = scale mean silu(z)      out = x + gated out_proj^T
//
// The residual stream x and out are fp32, and scale is the image's stochastic-depth factor.
// For many tokens, gate_outproj_sm90.cu is used, or gate.cu and a separate product.
//
// gate_outproj.py declares the parameters of the kernel. Macros:
//   INPUT   element type of the 16-bit tensors: bf16 or fp16
//   WIDTH   model width C, the number of outputs: 192 or 384
//   POOLED  whether y_1 has a row for each pooled token instead of each token
//
// L tokens of a sequence    C outputs    D channels    count, length, next, next_line: lines.cuh
//
// A CTA computes OUTPUTS outputs of 16 tokens, and each of its warps has EACH channels.
// A lane issues all its loads except the load of x at the start.
// Lane l (r = l / 4, p = l % 4) computes the gate of channels 8p .. 8p + 7 of each 32 channels, for tokens r and r + 8.
// The channels of a lane are four words w = 0 .. 3 of two channels each.
// Words 0 and 1 are columns 2p, 2p + 1 and 2p + 8, 2p + 9 of one product, and words 2 and 3 of another product.
// Because the columns are permuted, no data moves between lanes.
// Operand b has the same words of row r of out_proj.
// The warps' sums over 64 channels are exchanged through shared memory and added in the order of the channels.

#include "gate.cuh"

typedef INPUT Element;
constexpr int C = WIDTH, D = 2 * C;
constexpr int OUTPUTS = 48, EACH = 64, WARPS = D / EACH;

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) gate_outproj_of_few(PARAMETERS_gate_outproj_of_few) {
    begin_kernel();
    constexpr int THIRTY_TWOS = EACH / 32, EIGHTS = OUTPUTS / 8;
    __shared__ float parts[WARPS][16][OUTPUTS + 8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = tokens, L = L_;
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    int tile = blockIdx.x / (C / OUTPUTS) * 16, output = blockIdx.x % (C / OUTPUTS) * OUTPUTS;
    int d = warp * EACH + lane % 4 * 8;
    Pack<Element, 8> firsts[2][THIRTY_TWOS], seconds[2][THIRTY_TWOS], zs[2][THIRTY_TWOS], weights[EIGHTS][THIRTY_TWOS];
    float scale[2];
    UNROLLED for (int half = 0; half < 2; half++) {
        int token = min(tile + half * 8 + lane / 4, all - 1);
        scale[half] = scales ? scales[token / L] : 1;
        const Element *from_0 = y_0 + (token * D + d), *from_z = z + (token * z_stride + d);
        const Element *from_1 = y_1 + (row_of_second<POOLED>(lines, token, L) * D + d);
        UNROLLED for (int i = 0; i < THIRTY_TWOS; i++) {
            firsts[half][i] = load<8>(from_0 + i * 32), seconds[half][i] = load<8>(from_1 + i * 32);
            zs[half][i] = load<8>(from_z + i * 32);
        }
    }
    UNROLLED for (int n = 0; n < EIGHTS; n++)
        UNROLLED for (int i = 0; i < THIRTY_TWOS; i++)
            weights[n][i] = load<8>(out_proj + ((output + n * 8 + lane / 4) * D + d + i * 32));

    Floats<2> sums[EIGHTS][2] = {};
    UNROLLED for (int i = 0; i < THIRTY_TWOS; i++) {
        Pack<Element, 8> a[2];
        UNROLLED for (int half = 0; half < 2; half++) {
            Pack<Element, 8> mean;
            UNROLLED for (int w = 0; w < 4; w++) {
                Gated two = gate<Element>(firsts[half][i].word[w], seconds[half][i].word[w], zs[half][i].word[w],
                                          scale[half]);
                a[half].word[w] = two.gated, mean.word[w] = two.mean;
            }
            int token = tile + half * 8 + lane / 4;
            if (means && output == 0 && token < all) means[(token * D + d + i * 32) / 8] = mean;
        }
        UNROLLED for (int n = 0; n < EIGHTS; n++)
            UNROLLED for (int w = 0; w < 4; w += 2)
                multiply_add(Element{}, sums[n], a[0].word[w], a[1].word[w], a[0].word[w + 1], a[1].word[w + 1],
                             weights[n][i].word[w], weights[n][i].word[w + 1]);
    }
    UNROLLED for (int n = 0; n < EIGHTS; n++)
        UNROLLED for (int half = 0; half < 2; half++)
            store(&parts[warp][half * 8 + lane / 4][n * 8 + lane % 4 * 2], sums[n][half]);
    __syncthreads();
    constexpr int FOURS = OUTPUTS / 4;
    static_assert(16 * FOURS <= 32 * WARPS);  // each thread adds 4 outputs of a token
    int row = threadIdx.x / FOURS, c = threadIdx.x % FOURS * 4;
    if (row < 16 && tile + row < all) {
        int at = (tile + row) * C + output + c;
        Floats<4> sum = load<4>(x + at);
        UNROLLED for (int w = 0; w < WARPS; w++) sum = sum + load<4>(&parts[w][row][c]);
        store(out + at, sum);
    }
}
