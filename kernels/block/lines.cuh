// A pooled block's tokens in its order: line by line, where a line is a row of the image's patches or a column

#include "filter.cuh"
#include "silu.cuh"

// Each line of patches is a pooled token, and the class token one more, number count / 2. In both orders, this and the
// one in memory, the class token is number `middle`, which may be within a line.
struct Lines {
    int count, length, next, next_line;  // in memory, from a patch to the next of its line, and from line to line
    INLINE int middle() const { return count * length / 2; }
    INLINE int tokens() const { return count * length + 1; }
    INLINE int class_token() const { return count / 2; }
    // the first token and the last of a pooled token
    INLINE int first(int pooled) const {
        int patch = (pooled - (pooled > class_token())) * length;
        return pooled == class_token() ? middle() : patch + (patch >= middle());
    }
    INLINE int last(int pooled) const {
        int patch = (pooled - (pooled > class_token()) + 1) * length - 1;
        return pooled == class_token() ? middle() : patch + (patch >= middle());
    }
    INLINE float share(int pooled) const { return pooled == class_token() ? 1.f : 1.f / length; }
};

// From token to token, without a division but for the first
struct Walk {
    Lines lines;
    int token, line, place, patch;  // in the block's order; of the next patch; in memory
    INLINE Walk(Lines lines, int token) : lines(lines), token(token) {
        int before = max(0, token - (token > lines.middle()));
        line = before / lines.length, place = before % lines.length;
        patch = line * lines.next_line + place * lines.next;
    }
    // where the token is in memory, -1 if it is none, and its pooled token; and on
    INLINE int next(int &pooled) {
        int at = -1, middle = lines.middle();
        pooled = lines.class_token();
        if (token == middle) {
            at = middle;
        } else if (unsigned(token) < unsigned(lines.tokens())) {
            at = patch + (patch >= middle), pooled = line + (line >= lines.class_token());
            patch += lines.next;
            if (++place == lines.length) place = 0, line++, patch += lines.next_line - lines.length * lines.next;
        }
        token++;
        return at;
    }
    INLINE int next() {
        int pooled;
        return next(pooled);
    }
};

constexpr int AHEAD = 4;  // tokens on their way

// V channels of the tokens of one tensor, in the block's order, AHEAD of them on their way. A token's index is known where
// the loop around it is unrolled.
template <int V>
struct Coming {
    const Element *from;
    i64 stride;
    Walk walk;
    Pack<Element, V> pack[AHEAD];
    INLINE Coming(const Element *from, i64 stride, Walk walk) : from(from), stride(stride), walk(walk) {
        UNROLLED for (int i = 0; i < AHEAD; i++) fetch(i);
    }
    INLINE void fetch(int i) {
        int at = walk.next();
        pack[i % AHEAD] = at < 0 ? Pack<Element, V>{} : load<V>(from + at * stride);
    }
    // number i, which is the next one
    INLINE Floats<V> next(int i) {
        Floats<V> token = to_floats(pack[i % AHEAD]);
        fetch(i);
        return token;
    }
};

// Loops over a line's tokens t from `first` to `last`, with i = (t - first) % 8 as a constant
#define FOR_LINE(first, last, t, i)                        \
    _Pragma("unroll 1") for (int t##_8 = first; t##_8 <= last; t##_8 += 8) \
        UNROLLED for (int i = 0, t = t##_8; i < 8; i++, t++) if (t <= last)

// v of both directions by -LOG2E: filters scaled by -LOG2E give y, so that exp(-x) = exp2(y), and v = -y / LOG2E sigmoid.
// The window is a ring: at[t % 8] is u(t), counted from the line's first token.
template <int V>
struct Convolved {
    Filter<V> forward, backward;
    Floats<V> at[8];
    Coming<V> u;
    INLINE Convolved(const Element *from, i64 stride, const float *weights, const float *biases, i64 d, i64 D,
                     Lines lines, int first)
        : forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d),
          u(from, stride, Walk(lines, first - BACK)) {
        forward.scale(-LOG2E), backward.scale(-LOG2E);
        UNROLLED for (int i = 0; i < 2 * BACK; i++) at[(i - BACK) & 7] = u.next(i);
    }
    // of the next token, number i
    INLINE void next(int i, Floats<V> &v_0, Floats<V> &v_1) {
        at[(i + BACK) & 7] = u.next(i + 2 * BACK);
        v_0 = forward.bias, v_1 = backward.bias;
        UNROLLED for (int c = 0; c < V; c++) {
            UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                v_0.at[c] = fmaf(forward.weight[tap][c], at[(i - BACK + tap) & 7].at[c], v_0.at[c]);
                v_1.at[c] = fmaf(backward.weight[tap][c], at[(i + BACK - tap) & 7].at[c], v_1.at[c]);
            }
            v_0.at[c] *= reciprocal(1 + exp2_fast(v_0.at[c]));
            v_1.at[c] *= reciprocal(1 + exp2_fast(v_1.at[c]));
        }
    }
};

// A CTA takes a pooled token's line and CHANNELS of its channels, so that which token is next is the same for all
struct Place {
    i64 b, d, token, pooled_token;  // of the image's first token, and of the pooled one, in memory
    int pooled, first, last;
    INLINE Place(const Lines &lines, i64 D, int channels) {
        int groups = (D + channels - 1) / channels, S = lines.count + 1;
        unsigned place = blockIdx.x / groups;
        d = blockIdx.x % groups * i64(channels), b = place / S, pooled = place % S;
        first = lines.first(pooled), last = lines.last(pooled);
        token = b * lines.tokens(), pooled_token = place;
    }
    // whether token t is one of the line's
    INLINE bool has(const Lines &lines, int t) const {
        return t != lines.middle() || pooled == lines.class_token();
    }
};
