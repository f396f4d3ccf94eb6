// What gate, product and residual addition in one kernel have in common, and where shared memory has the weights.

#include "silu.cuh"

// scale mean silu(z) of two neighbours, where mean = (y_0 + y_1) / 2
struct Gated {
    unsigned gated, mean;
};
template <class T>
DEVICE Gated gate(unsigned y_0, unsigned y_1, unsigned z, float scale) {
    Floats<2> g = unpack(T{}, z), mean = unpack(T{}, y_0) + unpack(T{}, y_1);
#pragma unroll
    for (int c = 0; c < 2; c++) {
        mean.at[c] *= 0.5f;
        g.at[c] = scale * mean.at[c] * g.at[c] * sigmoid(g.at[c]);
    }
    return {pack(T{}, g.at[0], g.at[1]), pack(T{}, mean.at[0], mean.at[1])};
}

// the row of an output, so that what a lane has of two products are four neighbours
DEVICE int place_of(int c) { return c / 16 * 16 + c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2; }

// For wgmma: rows of STEP channels, swizzled, of all C outputs, and then the next channels
constexpr int STEP = 32;
DEVICE int tiled(int c, int d, int C) {
    int place = place_of(c), eighth = d % STEP / 8 ^ place / 2 % 4;
    return (d / STEP * C + place) * STEP + eighth * 8 + d % 8;
}
