// The gradient of the norm without its weight, added to the gradient of the residual stream:
//
//   dx = dresidual + rstd (dxhat - xhat mean(dxhat xhat))
//
// If `rounded` is not null, the kernel writes dx, rounded to Element, to `rounded`. Each warp processes one token.
//
// norm_backward.py declares the parameters of the kernel. Macros:
//   INPUT   element type of the tensors: bf16, fp16 or float; the residual stream is in fp32
//   VECTOR  number of adjacent channels that a lane loads or stores with one instruction
//   WIDTH   model width C

#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(256) norm_backward(PARAMETERS_norm_backward) {
    begin_kernel();
    int lane = threadIdx.x % 32;
    i64 token = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    if (token >= tokens) return;
    dxhat += token * WIDTH, xhat += token * WIDTH, dresidual += token * WIDTH, dx += token * WIDTH;
    Pack<Element, V> gradient[ITEMS] = {}, value[ITEMS] = {};
    Floats<V> residual[ITEMS];
    float products = 0, r = rstd[token];
    UNROLLED for (int i = 0; i < ITEMS; i++)
        if (int c = (i * 32 + lane) * V; c < WIDTH)
            gradient[i] = load<V>(dxhat + c), value[i] = load<V>(xhat + c), residual[i] = load<V>(dresidual + c);
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        Floats<V> g = to_floats(gradient[i]), v = to_floats(value[i]);
        UNROLLED for (int j = 0; j < V; j++) products = fmaf(g.at[j], v.at[j], products);
    }
    float mean = sum_over_warp(products) / WIDTH;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        Floats<V> g = to_floats(gradient[i]), v = to_floats(value[i]);
        UNROLLED for (int j = 0; j < V; j++)
            residual[i].at[j] = fmaf(r, fmaf(-v.at[j], mean, g.at[j]), residual[i].at[j]);
        if (int c = (i * 32 + lane) * V; c < WIDTH) store(dx + c, residual[i]);
        if (int c = (i * 32 + lane) * V; rounded && c < WIDTH)
            store(rounded + token * WIDTH + c, from_floats<Element>(residual[i]));
    }
}
