// Layout in which `pack_weights` stores out_proj for gate_outproj_sm90.cu, whose bulk copies do not change it

#include "../cuda/types.cuh"

// The row of output c = 16 j + 4 p + 2 i + e is column 2p + e of product 2j + i, so that the outputs of lane p in two
// products are 16 j + 4p .. + 3
DEVICE int row_of(int c) { return c / 16 * 16 + c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2; }

// Index of channel d of output c: rows of K_TILE channels of all C outputs, followed by the next channels. wgmma reads
// rows of 64 bytes, with each 16-byte piece at index piece ^ row / 2 % 4.
constexpr int K_TILE = 32;
DEVICE int tiled(int c, int d, int C) {
    int row = row_of(c), eighth = d % K_TILE / 8 ^ row / 2 % 4;
    return (d / K_TILE * C + row) * K_TILE + eighth * 8 + d % 8;
}
