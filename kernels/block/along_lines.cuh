// How a CTA goes along the lines of a pooled block's tokens, with a window on u that gives v = silu(conv(u))

#include "../cuda/async_copies.cuh"
#include "filter.cuh"
#include "lines.cuh"
#include "silu.cuh"

// A CTA works on SEGMENT tokens at a time, and first writes down for itself where they and those around them are.
constexpr int SEGMENT = 64, SLOTS = 8, AHEAD = SLOTS - 1;  // AHEAD tokens are on their way from memory
constexpr int TABLE = SEGMENT + 2 * BACK + AHEAD;

DEVICE void write_table(int *table, const Lines &lines, int first) {
    __syncthreads();  // nobody reads the last one any more
    for (int i = threadIdx.x; i < TABLE; i += THREADS) table[i] = lines.at(first - BACK + i);
    __syncthreads();
}

// The tokens of one tensor
template <class T>
struct Tokens {
    T *data;
    int stride;  // in bytes
    INLINE Tokens(T *data, i64 stride) : data(data), stride(int(stride) * int(sizeof(T))) {
        asm("" : "+r"(this->stride));  // or the compiler would multiply by the 64-bit one again for every token
    }
    INLINE T *at(int t) const {
        i64 offset;
        asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(t), "r"(stride));
        return (T *)((char *)data + offset);
    }
};

// V channels of the tokens of one tensor, AHEAD of them on their way to slots of the thread's own in shared memory: a
// thread that waits for a load into a register waits for all those behind it, too. Numbers are constants where loops
// are unrolled.
template <int V>
struct Coming {
    Tokens<const Element> from;
    Pack<Element, V> *slots;
    // the first are those that the table has first
    INLINE Coming(const Element *from, i64 stride, const int *table, Pack<Element, V> (*slots)[THREADS])
        : from(from, stride), slots(&slots[0][threadIdx.x]) {
        UNROLLED for (int i = 0; i < AHEAD; i++) fetch(i, table[i]);
    }
    INLINE void fetch(int number, int at) {
        copy_async<V>((Element *)&slots[number % SLOTS * THREADS], from.at(max(at, 0)), at >= 0);
        commit_copies();
    }
    // that one; the one AHEAD of it goes where the one before it was
    INLINE Floats<V> next(int number, int at_ahead) {
        wait_for_copies<AHEAD - 1>();
        Floats<V> token = to_floats(slots[number % SLOTS * THREADS]);
        fetch(number + AHEAD, at_ahead);
        return token;
    }
};

// v of both directions. Filters are halved, as silu_of_half wants it. The window is a ring: at[t % 8] is u(t), counted
// from the line's first token.
template <int V>
struct Convolved {
    Coming<V> u;
    Filter<V> forward, backward;
    Floats<V> window[8];
    INLINE Convolved(const Element *from, i64 stride, const float *weights, const float *biases, i64 d, i64 D,
                     const int *table, Pack<Element, V> (*slots)[THREADS])
        : u(from, stride, table, slots), forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d) {
        forward.scale(0.5f), backward.scale(0.5f);
        UNROLLED for (int i = 0; i < 2 * BACK; i++) window[(i - BACK) & 7] = u.next(i, table[i + AHEAD]);
    }
    // of token i, where `table` begins BACK tokens before it
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

// The lines of a CTA, which is one of `parts` of an image, and its channels
struct Place {
    i64 d, token, pooled_token;  // of the image's first token, and of the first pooled one of these lines, in memory
    int first, end;              // tokens
    bool writes;
    INLINE Place(const Lines &lines, i64 D, int parts) {
        int groups = (D + THREADS * VECTOR - 1) / (THREADS * VECTOR), part = blockIdx.x / groups % parts;
        i64 b = blockIdx.x / groups / parts;
        d = (blockIdx.x % groups * THREADS + threadIdx.x) * i64(VECTOR);
        writes = d < D, d = min(d, D - VECTOR);
        int line = i64(lines.count) * part / parts;
        first = lines.first(line), end = lines.first(i64(lines.count) * (part + 1) / parts);
        token = b * lines.tokens(), pooled_token = b * (lines.count + 1) + line + (line > lines.class_token());
    }
};

// Body(i, here, at_center, ends) for each token t of a CTA, with i = (t - first) % 8 as a constant, and `here` where the
// table, which has the first SEGMENT tokens, has that BACK tokens before t. `ends`: t is a line's last patch. Class token
// and ends come in the order of pooled tokens.
template <class Body>
DEVICE void for_lines(const Lines &lines, const Place &place, int *table, Body body) {
    int patches = 0;  // of the line at hand
    for (int segment = place.first; segment < place.end; segment += SEGMENT) {
        if (segment != place.first) write_table(table, lines, segment);
#pragma unroll 1
        for (int eight = 0; eight < SEGMENT && segment + eight < place.end; eight += 8)
            UNROLLED for (int i = 0; i < 8; i++) {
                int t = segment + eight + i;
                if (t >= place.end) continue;
                bool at_center = t == lines.center();
                patches += !at_center;
                bool ends = !at_center && patches == lines.length;
                if (ends) patches = 0;
                body(i, table + eight + i, at_center, ends);
            }
    }
}
