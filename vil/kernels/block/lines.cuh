// Two orders of a pooled block's tokens: the order in memory, and line by line (rows or columns of patches).

#include "../cuda/types.cuh"

// Each line of patches is one pooled token, and the class token is the pooled token with index count / 2.
// In memory order and in line order, the class token has the index `center`, which may be inside a line.
struct Lines {
    // `next` and `next_line` are distances in memory: to the next patch of a line, and to the next line.
    int count, length, next, next_line;
    INLINE int center() const { return count * length / 2; }
    INLINE int tokens() const { return count * length + 1; }
    INLINE int class_token() const { return count / 2; }
    // `first` and `last` return the line-order index of the first and of the last token of a pooled token.
    INLINE int first(int pooled) const {
        int patch = (pooled - (pooled > class_token())) * length;
        return pooled == class_token() ? center() : patch + (patch >= center());
    }
    INLINE int last(int pooled) const {
        int patch = (pooled - (pooled > class_token()) + 1) * length - 1;
        return pooled == class_token() ? center() : patch + (patch >= center());
    }
    INLINE float share(int pooled) const { return pooled == class_token() ? 1.f : 1.f / length; }
    // Returns the index in line order of a line's first patch, or the number of tokens if `line` is `count`.
    // If the class token directly precedes the first patch, the function returns the class token's index instead.
    INLINE int before(int line) const { return line * length + (line * length > center()); }
    // Returns the pooled token that contains token t of the line order.
    INLINE int pooled(int t) const {
        int line = (t - (t > center())) / length;
        return t == center() ? class_token() : line + (line >= class_token());
    }
    // Returns the pooled token that contains token t of the memory order.
    INLINE int pooled_in_memory(int t) const {
        int patch = t - (t > center()), line = next == 1 ? patch / length : patch % count;
        return t == center() ? class_token() : line + (line >= class_token());
    }
    // Returns the index in memory of token t of the line order, or -1 if no such token exists.
    INLINE int at(int t) const {
        int patch = t - (t > center()), position = patch / length * next_line + patch % length * next;
        if (unsigned(t) >= unsigned(tokens())) return -1;
        return t == center() ? t : position + (position >= center());
    }
};
