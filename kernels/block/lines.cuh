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

// STEP tokens of one tensor on their way, V channels of each, and where in memory they are
template <int V>
struct Coming {
    Pack<Element, V> pack[STEP];
    int at[STEP];
    INLINE void fetch(const Element *from, i64 stride, Walk &walk) {
        UNROLLED for (int i = 0; i < STEP; i++) {
            at[i] = walk.next();
            pack[i] = at[i] < 0 ? Pack<Element, V>{} : load<V>(from + at[i] * stride);
        }
    }
};

// v of both directions, STEP tokens at a time, from a window on u: at[i] is u(t - BACK + i)
template <int V>
struct Convolved {
    Filter<V> forward, backward;
    Walk walk;
    const Element *u;
    i64 stride;
    Floats<V> at[2 * BACK + STEP];
    Coming<V> coming;
    INLINE Convolved(const Element *u, i64 stride, const float *weights, const float *biases, i64 d, i64 D, Lines lines,
                     int t)
        : forward(weights, biases, d), backward(weights + D * TAPS, biases + D, d), walk(lines, t - BACK), u(u),
          stride(stride) {
        UNROLLED for (int i = 0; i < 2 * BACK; i++) {
            int token = walk.next();
            at[i] = to_floats(token < 0 ? Pack<Element, V>{} : load<V>(u + token * stride));
        }
        coming.fetch(u, stride, walk);
    }
    INLINE void advance() {
        UNROLLED for (int i = 0; i < STEP; i++) at[2 * BACK + i] = to_floats(coming.pack[i]);
        coming.fetch(u, stride, walk);
    }
    // of token t + i
    INLINE void convolve(int i, Floats<V> &v_0, Floats<V> &v_1) const {
        v_0 = forward.bias, v_1 = backward.bias;
        UNROLLED for (int c = 0; c < V; c++) {
            UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                v_0.at[c] = fmaf(forward.weight[tap][c], at[i + tap].at[c], v_0.at[c]);
                v_1.at[c] = fmaf(backward.weight[tap][c], at[i + 2 * BACK - tap].at[c], v_1.at[c]);
            }
            v_0.at[c] *= sigmoid(v_0.at[c]);
            v_1.at[c] *= sigmoid(v_1.at[c]);
        }
    }
    INLINE void move_on() {
        UNROLLED for (int i = 0; i < 2 * BACK; i++) at[i] = at[i + STEP];
    }
};
