// What gate, product and residual addition in one kernel have in common, and where shared memory has the weights

#include "silu.cuh"

// scale mean silu(z) of two neighbours, where mean = (y_0 + y_1) / 2
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

// Weights of gate_outproj_sm90.cu, as `pack_weights` writes them and bulk copies leave them in shared memory.
//
// The row of output c, 16 j + 4 p + 2 i + e: column 2p + e of product 2j + i, so that what lane p has of two products
// are outputs 16 j + 4p .. + 3
DEVICE int place_of(int c) { return c / 16 * 16 + c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2; }

// Where channel d of output c is: rows of K_TILE channels of all C outputs, and then the next channels. Wgmma reads
// rows of 64 bytes with their 16-byte pieces at piece ^ row / 2 % 4.
constexpr int K_TILE = 32;
DEVICE int tiled(int c, int d, int C) {
    int place = place_of(c), eighth = d % K_TILE / 8 ^ place / 2 % 4;
    return (d / K_TILE * C + place) * K_TILE + eighth * 8 + d % 8;
}
