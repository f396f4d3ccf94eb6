// Copies the patches of images to the rows of a matrix, whose product with the patch weights embeds the patches:
//
//   patches[b, i w + j, c, y, x] = images[b, c, i PATCH_H + y, j PATCH_W + x],    rounded to Element
//
// A thread copies 4 adjacent pixels of each channel. A warp writes 128 adjacent elements of a channel if the number of
// pixels of a patch is a multiple of 128.
//
// patchify.py declares the parameters of the kernel. Macros:
//   INPUT             element type of the patches: bf16 or fp16
//   PIXEL             element type of the images: bf16, fp16 or float
//   CHANNELS          number of image channels
//   PATCH_H, PATCH_W  patch size in pixels; PATCH_W is a multiple of 4
//
// grid_h, grid_w patch grid    count number of threads that copy pixels

#include "../cuda/types.cuh"

typedef INPUT Element;
constexpr int V = 4, THREADS = 256;
constexpr unsigned PIXELS = PATCH_H * PATCH_W, PACKS = PIXELS / V, ROW_PACKS = PATCH_W / V;
static_assert(PATCH_W % V == 0);

extern "C" __global__ void __launch_bounds__(THREADS) patchify(PARAMETERS_patchify) {
    begin_kernel();
    unsigned i = blockIdx.x * THREADS + threadIdx.x, h = grid_h, w = grid_w;
    if (i >= count) return;
    unsigned patch = i / PACKS, y = i % PACKS / ROW_PACKS, x = i % ROW_PACKS * V;
    unsigned image = patch / (h * w), cell = patch % (h * w), W = w * PATCH_W;
    i64 channel = i64(h) * PATCH_H * W;
    images += image * CHANNELS * channel + i64(cell / w * PATCH_H + y) * W + (cell % w * PATCH_W + x);
    patches += i64(patch) * CHANNELS * PIXELS + (y * PATCH_W + x);
#pragma unroll 4
    for (int c = 0; c < CHANNELS; c++)
        store(patches + i64(c) * PIXELS, from_floats<Element>(to_floats(load<V>(images + c * channel))));
}
