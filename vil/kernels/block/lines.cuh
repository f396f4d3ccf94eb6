// A pooled block's tokens in two orders: as they are in memory, and line by line, where a line is a row of the image's
// patches or a column

#include "../cuda/types.cuh"

// Each line of patches is a pooled token, and the class token one more, number count / 2. In both orders, this and the
// one in memory, the class token is number `center`, which may be within a line.
struct Lines {
    int count, length, next, next_line;  // in memory, from a patch to the next of its line, and from line to line
    INLINE int center() const { return count * length / 2; }
    INLINE int tokens() const { return count * length + 1; }
    INLINE int class_token() const { return count / 2; }
    // the first token and the last of a pooled token
    INLINE int first(int pooled) const {
        int patch = (pooled - (pooled > class_token())) * length;
        return pooled == class_token() ? center() : patch + (patch >= center());
    }
    INLINE int last(int pooled) const {
        int patch = (pooled - (pooled > class_token()) + 1) * length - 1;
        return pooled == class_token() ? center() : patch + (patch >= center());
    }
    INLINE float share(int pooled) const { return pooled == class_token() ? 1.f : 1.f / length; }
    // the pooled token of token t
    INLINE int pooled(int t) const {
        int line = (t - (t > center())) / length;
        return t == center() ? class_token() : line + (line >= class_token());
    }
    // the pooled token of the token that is number t in memory
    INLINE int pooled_in_memory(int t) const {
        int patch = t - (t > center()), line = next == 1 ? patch / length : patch % count;
        return t == center() ? class_token() : line + (line >= class_token());
    }
    // where token t is in memory, -1 if it is none
    INLINE int at(int t) const {
        int patch = t - (t > center()), place = patch / length * next_line + patch % length * next;
        if (unsigned(t) >= unsigned(tokens())) return -1;
        return t == center() ? t : place + (place >= center());
    }
};
