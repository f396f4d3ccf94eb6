// Sums of a tensor's tokens over each line of patches, and the class token itself, as results for the pooled tokens.
// The backward pass sums the gradients of tokens to the gradients of pooled tokens.
//
// sum_lines.py declares the parameters of the kernel. Macros:
//   INPUT    element type of the tensors: bf16, fp16 or float
//   VECTOR   number of adjacent channels per thread, up to 16 bytes
//   THREADS  threads per CTA
//
// D channels    count, length, next, next_line: lines.cuh

#include "lines.cuh"

typedef INPUT Element;
constexpr int TOGETHER = 20;  // number of tokens that are loaded at the same time

extern "C" __global__ void __launch_bounds__(THREADS) sum_lines(PARAMETERS_sum_lines) {
    begin_kernel();
    Lines lines = {int(count), int(length), int(next), int(next_line)};
    int groups = (D + THREADS * VECTOR - 1) / (THREADS * VECTOR), S = lines.count + 1, center = lines.center();
    unsigned pooled_token = blockIdx.x / groups;
    int pooled = pooled_token % S, d = (blockIdx.x % groups * THREADS + threadIdx.x) * VECTOR;
    if (d >= D) return;
    dy += i64(pooled_token / S) * lines.tokens() * D + d;
    Floats<VECTOR> sum = {};
    if (pooled == lines.class_token()) {
        sum = to_floats(load<VECTOR>(dy + center * D));
    } else {
        int first = (pooled - (pooled > lines.class_token())) * lines.next_line;
        for (int start = 0; start < lines.length; start += TOGETHER) {
            Pack<Element, VECTOR> token[TOGETHER];
            UNROLLED for (int i = 0; i < TOGETHER; i++) {
                int patch = first + min(start + i, lines.length - 1) * lines.next;
                token[i] = load<VECTOR>(dy + (patch + (patch >= center)) * D);
            }
            UNROLLED for (int i = 0; i < TOGETHER; i++)
                if (start + i < lines.length) sum = sum + to_floats(token[i]);
        }
    }
    store(sums + pooled_token * D + d, from_floats<Element>(sum));
}
