// Iteration of a CTA over the tokens of a line in a pooled block, with a window of u that gives v = silu(conv(u)).

#include "filter.cuh"
#include "lines.cuh"
#include "silu.cuh"

// A CTA processes SEGMENT tokens at a time. A table contains the memory positions of the tokens and of adjacent tokens.
constexpr int SEGMENT = 64, AHEAD = 4;  // number of tokens per table, and of prefetched tokens
constexpr int TABLE = SEGMENT + 2 * BACK + AHEAD;

DEVICE void write_table(int *table, const Lines &lines, int first) {
    __syncthreads();  // no thread uses the previous table any more
#pragma unroll 1
    for (int i = threadIdx.x; i < TABLE; i += THREADS) table[i] = lines.at(first - BACK + i);
    __syncthreads();
}

// Tokens of a tensor, with 32-bit strides.
template <class T>
struct Tokens {
    T *data;
    int stride;  // in bytes
    INLINE Tokens(T *data, i64 stride) : data(data), stride(int(stride) * int(sizeof(T))) {
        // The compiler must keep the stride in a register; otherwise each token would need a 64-bit multiplication.
        asm("" : "+r"(this->stride));
    }
    INLINE T *at(int t) const {
        i64 offset;
        asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(t), "r"(stride));
        return (T *)((char *)data + offset);
    }
};

// V channels of a tensor's tokens, of which AHEAD tokens are prefetched. Indices are constants in unrolled loops.
template <int V>
struct Coming {
    Tokens<const Element> from;
    Pack<Element, V> pack[AHEAD];
    // Prefetches the first tokens of the table.
    INLINE Coming(const Element *from, i64 stride, const int *table) : from(from, stride) {
        UNROLLED for (int i = 0; i < AHEAD; i++) fetch(i, table[i]);
    }
    INLINE void fetch(int number, int at) {
        pack[number % AHEAD] = at < 0 ? Pack<Element, V>{} : load<V>(from.at(at));
    }
    // Returns a token and prefetches the token that is AHEAD tokens later.
    INLINE Floats<V> next(int number, int at_ahead) {
        Floats<V> token = to_floats(pack[number % AHEAD]);
        fetch(number, at_ahead);
        return token;
    }
};

// Computes v of both directions. The filters are halved, as silu_of_half requires.
// The window is a ring buffer: window[t % 8] is u(t) for the token t of the line, counted from the line's first token.
template <int V>
struct Convolved {
    Filter<V> forward, backward;
    Floats<V> window[8];
    Coming<V> u;
    INLINE Convolved(const Element *from, i64 stride, const float *weights, const float *biases, i64 d, i64 D,
                     const int *table)
        : forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d), u(from, stride, table) {
        forward.scale(0.5f), backward.scale(0.5f);
        UNROLLED for (int i = 0; i < 2 * BACK; i++) window[(i - BACK) & 7] = u.next(i, table[i + AHEAD]);
    }
    // Computes v of token i, where `table` starts BACK tokens before token i.
    INLINE void next(int i, const int *table, Floats<V> &v_0, Floats<V> &v_1) {
        window[(i + BACK) & 7] = u.next(i + 2 * BACK, table[2 * BACK + AHEAD]);
        v_0 = forward.bias, v_1 = backward.bias;
        UNROLLED for (int c = 0; c < V; c++) {
            UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                v_0.at[c] = fmaf(forward.weight[tap][c], window[(i - BACK + tap) & 7].at[c], v_0.at[c]);
                v_1.at[c] = fmaf(backward.weight[tap][c], window[(i + BACK - tap) & 7].at[c], v_1.at[c]);
            }
            v_0.at[c] = silu_of_half(Element{}, v_0.at[c]), v_1.at[c] = silu_of_half(Element{}, v_1.at[c]);
        }
    }
};

// The line and the channels of a CTA.
struct CtaLine {
    i64 token;  // index in memory of the image's first token
    unsigned pooled_token;  // index of the CTA's pooled token among the pooled tokens of all images
    int d, pooled, first, last;
    bool writes;
    INLINE CtaLine(const Lines &lines, i64 D) {
        int groups = (D + THREADS * VECTOR - 1) / (THREADS * VECTOR), S = lines.count + 1;
        pooled_token = blockIdx.x / groups, pooled = pooled_token % S;
        d = (blockIdx.x % groups * THREADS + threadIdx.x) * VECTOR, writes = d < D, d = min(d, int(D) - VECTOR);
        first = lines.first(pooled), last = lines.last(pooled);
        token = i64(pooled_token / S) * lines.tokens();
    }
    // Returns the index of the class token if this line may contain the class token between its patches, otherwise -1.
    INLINE int foreign(const Lines &lines) const { return pooled == lines.class_token() ? -1 : lines.center(); }
};

// Calls body(t, i, here) for each token t of the line, where i is the constant (t - first) % 8.
// `here` points to the table's entry BACK tokens before t. Initially, the table contains the line's first tokens.
template <class Body>
DEVICE void for_line(const Lines &lines, const CtaLine &line, int *table, Body body) {
    for (int segment = line.first; segment <= line.last; segment += SEGMENT) {
        if (segment != line.first) write_table(table, lines, segment);
#pragma unroll 1
        for (int eight = 0; eight < SEGMENT && segment + eight <= line.last; eight += 8)
            UNROLLED for (int i = 0; i < 8; i++) {
                int t = segment + eight + i;
                if (t <= line.last) body(t, i, table + eight + i);
            }
    }
}
