// Gate of a block, with mean = (y_0 + y_1) / 2.
// Without pooling, y_0 and y_1 are the outputs of both directions.
// In a pooled block, y_0 contains a token's skip connections, and y_1 contains the scan's output for the token's line.

#include "lines.cuh"
#include "silu.cuh"

// Returns the row of y_1 for a token. Rows are counted over all sequences.
template <bool pooled, class Int>
DEVICE i64 row_of_second(const Lines &lines, Int token, Int L) {
    return pooled ? i64(token / L) * (lines.count + 1) + lines.pooled_in_memory(int(token % L)) : token;
}

// Returns scale mean silu(z) and the mean of two adjacent channels.
struct Gated {
    unsigned gated, mean;
};
template <class T>
DEVICE Gated gate(unsigned y_0, unsigned y_1, unsigned z, float scale) {
    Floats<2> g = unpack(T{}, z), mean = unpack(T{}, y_0) + unpack(T{}, y_1);
    UNROLLED for (int c = 0; c < 2; c++) {
        mean.at[c] *= 0.5f;
        g.at[c] = scale * mean.at[c] * g.at[c] * sigmoid(g.at[c]);
    }
    return {pack(T{}, g.at[0], g.at[1]), pack(T{}, mean.at[0], mean.at[1])};
}
