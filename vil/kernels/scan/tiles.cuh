// How all scan kernels access their tensors: sequences in reading order, a CTA's position in the grid, and asynchronous
// copies of a tile of tokens to shared memory.

#include "recurrences.cuh"

// A tensor of tokens. Strides are in elements; the innermost dimension is contiguous
template <class T>
struct Tokens {
    T *data;
    i64 stride_G, stride_B, stride_L;
};
#define TOKENS_OF(name) {name##_data, name##_stride_G, name##_stride_B, name##_stride_L}

// One sequence of the tensor in reading order. Token indices and strides in bytes are 32-bit, which the host checks, so
// that the address of a token takes one instruction: a 64-bit base plus the 64-bit product of both.
template <class T>
struct Sequence {
    T *data;
    int stride;
    Sequence() = default;
    INLINE Sequence(Tokens<T> x, i64 g, i64 b, i64 L, bool reverse)
        : data(x.data + g * x.stride_G + b * x.stride_B + (reverse ? (L - 1) * x.stride_L : 0)),
          stride(int(reverse ? -x.stride_L : x.stride_L) * int(sizeof(T))) {
        asm("" : "+r"(stride));  // otherwise the compiler would recompute it for every token
    }
    INLINE T *at(int t) const {
        i64 offset;
        asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(t), "r"(stride));
        return (T *)((char *)data + offset);
    }
    // address of a channel, kept in registers
    INLINE Sequence from(i64 d) const {
        Sequence channels = *this;
        channels.data += d;
        asm("" : "+l"(channels.data));  // otherwise the compiler would repeat the addition for every tile
        return channels;
    }
};

typedef Sequence<const Element> Input;

// Combines two words of two 16-bit elements: the first elements of both words, or the second elements
DEVICE unsigned lower_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
DEVICE unsigned upper_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x7632); }

// Sequences are divided into chunks of CHUNK tokens, between which states are saved, and segments of whole chunks,
// which run in parallel
struct Cut {
    int chunks, segments;
    INLINE Cut(i64 L, i64 segment_chunks)
        : chunks(unsigned(L + CHUNK - 1) / CHUNK),
          segments(unsigned(chunks + segment_chunks - 1) / unsigned(segment_chunks)) {}
};

// A CTA's position in the grid. The fastest index is the CTA's channels, followed by segments (or boundaries between
// them), sequences of the batch, and directions
struct GridPosition {
    i64 channels, segment, b, g;  // channels: index of the CTA among those of a sequence
    INLINE GridPosition(unsigned cta_channels, unsigned D, unsigned segments, unsigned B) {
        unsigned ctas = (D + cta_channels - 1) / cta_channels;  // CTAs for the channels of a sequence
        channels = blockIdx.x % ctas;
        segment = blockIdx.x / ctas % segments;
        b = blockIdx.x / ctas / segments % B;
        g = blockIdx.x / ctas / segments / B;
    }
};

// States between chunks or segments have the shape (G, B, boundaries, N, D), with contiguous channels. Chunk i starts
// at boundary i - 1, because there is no boundary before the first chunk.
DEVICE i64 state_offset(i64 g, i64 b, i64 boundary, i64 n, i64 d, i64 B, i64 boundaries, i64 D) {
    return (((g * B + b) * boundaries + boundary) * N + n) * D + d;
}

// Copies a warp's COLUMNS channels of a tile, VECTOR at once; a lane copies the same channels of every APART-th token.
// Copies run while earlier tiles are processed.
template <int COLUMNS>
struct TileCopies {
    static constexpr int ROW = COLUMNS / VECTOR, ITEMS = (TILE * ROW + 31) / 32, APART = 32 / ROW;
    static_assert(32 % ROW == 0);
    int token, column, skipped;

    INLINE TileCopies(i64 warp_d, i64 D)
        : token(threadIdx.x % 32 / ROW), column(threadIdx.x % 32 % ROW * VECTOR),
          skipped(warp_d + column < D ? 0 : TILE) {
        // otherwise the compiler would recompute them for every tile; single elements use separate registers
        if (VECTOR > 1) asm("" : "+r"(token), "+r"(column), "+r"(skipped));
    }
    // Copies token t0 + t of `source`, which starts at the lane's channels, to where(t), for `tokens` tokens, and
    // writes zeros for the others
    template <class Where>
    INLINE void start(const Input &source, int t0, int tokens, Where where) const {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int t = token + i * APART;
            if (TILE % APART == 0 || t < TILE)
                copy_async<VECTOR>(where(t), source.at(t0 + t), t + skipped < min(tokens, TILE));
        }
    }
};
