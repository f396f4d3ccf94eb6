// Access of scan kernels to tensors: sequences in reading order, positions in the grid, and copies of tiles.

#include "recurrences.cuh"

// Tensor of tokens. Strides are in elements, and the innermost dimension is contiguous.
template <class T>
struct Tokens {
    T *data;
    i64 stride_G, stride_B, stride_L;
};
#define TOKENS_OF(name) {name##_data, name##_stride_G, name##_stride_B, name##_stride_L}

// One sequence of a tensor, in reading order.
// Token indices and strides in bytes have 32 bits, which the host checks.
// Therefore one instruction computes an address: a 64-bit base plus the 64-bit product of index and stride.
template <class T>
struct Sequence {
    T *data;
    int stride;
    Sequence() = default;
    INLINE Sequence(Tokens<T> x, i64 g, i64 b, i64 L, bool reverse)
        : data(x.data + g * x.stride_G + b * x.stride_B + (reverse ? (L - 1) * x.stride_L : 0)),
          stride(int(reverse ? -x.stride_L : x.stride_L) * int(sizeof(T))) {
        // The compiler must keep the stride in a register instead of recomputing it for every token.
        asm("" : "+r"(stride));
    }
    INLINE T *at(int t) const {
        i64 offset;
        asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(t), "r"(stride));
        return (T *)((char *)data + offset);
    }
    // Returns the sequence from channel d on, with the address kept in registers.
    INLINE Sequence from(i64 d) const {
        Sequence channels = *this;
        channels.data += d;
        // The compiler must keep the address in registers instead of repeating the addition for every tile.
        asm("" : "+l"(channels.data));
        return channels;
    }
};

typedef Sequence<const Element> Input;

// Combine two words of two 16-bit elements each: the first elements of both words, or the second elements.
DEVICE unsigned lower_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x5410); }
DEVICE unsigned upper_halves(unsigned a, unsigned b) { return __byte_perm(a, b, 0x7632); }

// Numbers of chunks and segments of a sequence.
// States are saved between chunks of CHUNK tokens. Segments consist of whole chunks and run in parallel.
struct Cut {
    int chunks, segments;
    INLINE Cut(i64 L, i64 segment_chunks)
        : chunks(unsigned(L + CHUNK - 1) / CHUNK),
          segments(unsigned(chunks + segment_chunks - 1) / unsigned(segment_chunks)) {}
};

// Position of a CTA in the grid.
// The fastest index counts groups of channels, followed by segments (or boundaries), sequences, and directions.
struct GridPosition {
    i64 channels, segment, b, g;  // channels: index of the CTA among the CTAs of a sequence
    INLINE GridPosition(unsigned cta_channels, unsigned D, unsigned segments, unsigned B) {
        unsigned ctas = (D + cta_channels - 1) / cta_channels;  // number of CTAs per sequence
        channels = blockIdx.x % ctas;
        segment = blockIdx.x / ctas % segments;
        b = blockIdx.x / ctas / segments % B;
        g = blockIdx.x / ctas / segments / B;
    }
};

// Offset of a state between chunks or segments in a tensor (G, B, boundaries, N, D) with contiguous channels.
// Chunk i starts at boundary i - 1, because there is no boundary before the first chunk.
DEVICE i64 state_offset(i64 g, i64 b, i64 boundary, i64 n, i64 d, i64 B, i64 boundaries, i64 D) {
    return (((g * B + b) * boundaries + boundary) * N + n) * D + d;
}

// Copies a warp's COLUMNS channels of a tile, while earlier tiles are processed.
// A lane copies the same VECTOR channels of every APART-th token.
template <int COLUMNS>
struct TileCopies {
    static constexpr int ROW = COLUMNS / VECTOR, ITEMS = (TILE * ROW + 31) / 32, APART = 32 / ROW;
    static_assert(32 % ROW == 0);
    int token, column, skipped;

    INLINE TileCopies(i64 warp_d, i64 D)
        : token(threadIdx.x % 32 / ROW), column(threadIdx.x % 32 % ROW * VECTOR),
          skipped(warp_d + column < D ? 0 : TILE) {
        // The compiler must keep `token`, `column` and `skipped` in registers. Single elements use separate registers.
        if (VECTOR > 1) asm("" : "+r"(token), "+r"(column), "+r"(skipped));
    }
    // Copies tokens t0 to t0 + tokens - 1 of `source` to where(0), where(1), ..., and writes zeros for other tokens.
    // `source` starts at the lane's channels.
    template <class Where>
    INLINE void start(const Input &source, int t0, int tokens, Where where) const {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int t = token + i * APART;
            if (TILE % APART == 0 || t < TILE)
                copy_async<VECTOR>(where(t), source.at(t0 + t), t + skipped < min(tokens, TILE));
        }
    }
};
