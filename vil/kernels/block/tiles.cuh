// Where `pack_weights` puts out_proj for gate_outproj_sm90.cu, whose bulk copies leave it so in shared memory

#include "../cuda/types.cuh"

// The row of output c = 16 j + 4 p + 2 i + e: column 2p + e of product 2j + i, so that what lane p has of two products
// are outputs 16 j + 4p .. + 3
DEVICE int place_of(int c) { return c / 16 * 16 + c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2; }

// Where channel d of output c is: rows of K_TILE channels of all C outputs, and then the next channels. Wgmma reads
// rows of 64 bytes with their 16-byte pieces at piece ^ row / 2 % 4.
constexpr int K_TILE = 32;
DEVICE int tiled(int c, int d, int C) {
    int place = place_of(c), eighth = d % K_TILE / 8 ^ place / 2 % 4;
    return (d / K_TILE * C + place) * K_TILE + eighth * 8 + d % 8;
}
