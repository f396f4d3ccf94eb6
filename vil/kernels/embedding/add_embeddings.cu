// Tokens of the residual stream from projected patches, and the gradients of projected patches and of embeddings.
// The class token is the middle token.
//
//   x[b, l] = positions[l] + (l is the class token ? class_token : bias + projected[b, patch of l])
//
//   dprojected = dx of patches, rounded to Element    sums[p] = sum of dx over the images p, p + parts, p + 2 parts, ...
//
// A thread processes 4 adjacent channels of a token. In add_embeddings, a thread processes these channels in IMAGES
// images, so that one load of an embedding serves IMAGES images. embedding_gradients divides the images among CTAs,
// because too few CTAs would run if each CTA added all images.
//
// add_embeddings.py declares the parameters of the kernels. Macros:
//   INPUT      element type of projected patches: bf16 or fp16; the residual stream is in fp32
//   PARAMETER  element type of the model's parameters
//   WIDTH      model width C, a multiple of 4
//   IMAGES     number of images that a thread loads at the same time
//
// B images    L tokens of an image    parts number of partial sums of an element

#include "../cuda/types.cuh"

typedef INPUT Element;
constexpr int V = 4, THREADS = 256;
constexpr unsigned C = WIDTH, PACKS = C / V;
static_assert(C % V == 0);

// The channels of a token that a thread processes, and the group of images.
struct Channels {
    unsigned token, c, group, class_token;
    bool is_valid;
    INLINE Channels(unsigned L) {
        unsigned ctas = (L * PACKS + THREADS - 1) / THREADS, i = blockIdx.x % ctas * THREADS + threadIdx.x;
        token = i / PACKS, c = i % PACKS * V, group = blockIdx.x / ctas;
        class_token = (L - 1) / 2, is_valid = token < L;
    }
    INLINE bool is_patch() const { return token != class_token; }
    INLINE i64 in_tokens() const { return i64(token) * C + c; }
    INLINE i64 in_patches() const { return i64(token - (token > class_token)) * C + c; }
};

extern "C" __global__ void __launch_bounds__(THREADS) add_embeddings(PARAMETERS_add_embeddings) {
    begin_kernel();
    Channels at(L);
    if (!at.is_valid) return;
    const PARAMETER *added = at.is_patch() ? bias : class_token;
    Floats<V> embedding = to_floats(load<V>(positions + at.in_tokens())) + to_floats(load<V>(added + at.c));
    projected += at.in_patches(), x += at.in_tokens();
    Pack<Element, V> patch[IMAGES] = {};
    UNROLLED for (int i = 0; i < IMAGES; i++)
        if (i64 b = i64(at.group) * IMAGES + i; b < B && at.is_patch()) patch[i] = load<V>(projected + b * (L - 1) * C);
    UNROLLED for (int i = 0; i < IMAGES; i++)
        if (i64 b = i64(at.group) * IMAGES + i; b < B) store(x + b * L * C, to_floats(patch[i]) + embedding);
}

extern "C" __global__ void __launch_bounds__(THREADS) embedding_gradients(PARAMETERS_embedding_gradients) {
    begin_kernel();
    Channels at(L);
    if (!at.is_valid) return;
    dx += at.in_tokens(), dprojected += at.in_patches();
    Floats<V> sum = {};
    for (i64 start = at.group; start < B; start += IMAGES * parts) {
        Floats<V> gradient[IMAGES] = {};
        UNROLLED for (int i = 0; i < IMAGES; i++)
            if (i64 b = start + i * parts; b < B) gradient[i] = load<V>(dx + b * L * C);
        UNROLLED for (int i = 0; i < IMAGES; i++) {
            sum = sum + gradient[i];
            if (i64 b = start + i * parts; b < B && at.is_patch())
                store(dprojected + b * (L - 1) * C, from_floats<Element>(gradient[i]));
        }
    }
    store(sums + at.group * L * C + at.in_tokens(), sum);
}
