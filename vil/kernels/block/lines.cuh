// A pooled block's tokens in two orders: as in memory, and line by line, where a line is a row or a column of the
// image's patches

#include "../cuda/types.cuh"

// Each line of patches is one pooled token. The class token is another one, with index count / 2. In memory and in line
// order, the class token has index `center`, which may be inside a line.
struct Lines {
    int count, length, next, next_line;  // steps in memory from a patch to the next of its line, and from line to line
    INLINE int center() const { return count * length / 2; }
    INLINE int tokens() const { return count * length + 1; }
    INLINE int class_token() const { return count / 2; }
    // first and last token of a pooled token, in line order
    INLINE int first(int pooled) const {
        int patch = (pooled - (pooled > class_token())) * length;
        return pooled == class_token() ? center() : patch + (patch >= center());
    }
    INLINE int last(int pooled) const {
        int patch = (pooled - (pooled > class_token()) + 1) * length - 1;
        return pooled == class_token() ? center() : patch + (patch >= center());
    }
    INLINE float share(int pooled) const { return pooled == class_token() ? 1.f : 1.f / length; }
    // pooled token that contains token t in line order
    INLINE int pooled(int t) const {
        int line = (t - (t > center())) / length;
        return t == center() ? class_token() : line + (line >= class_token());
    }
    // pooled token that contains token t in memory
    INLINE int pooled_in_memory(int t) const {
        int patch = t - (t > center()), line = next == 1 ? patch / length : patch % count;
        return t == center() ? class_token() : line + (line >= class_token());
    }
    // index in memory of token t in line order, or -1 if there is no such token
    INLINE int at(int t) const {
        int patch = t - (t > center()), position = patch / length * next_line + patch % length * next;
        if (unsigned(t) >= unsigned(tokens())) return -1;
        return t == center() ? t : position + (position >= center());
    }
};
