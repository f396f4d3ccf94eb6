// Layout in which `pack_weights` stores out_proj for gate_outproj_sm90.cu, whose bulk copies keep this layout.

#include "../cuda/types.cuh"

// Returns the row of output c = 16 j + 4 p + 2 i + e, which is column 2p + e of product 2j + i.
// The outputs of lane p in products 2j and 2j + 1 are therefore 16 j + 4 p to 16 j + 4 p + 3.
DEVICE int row_of(int c) { return c / 16 * 16 + c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2; }

// Returns the index of channel d of output c. K_TILE channels of all C outputs precede the next K_TILE channels.
// wgmma reads rows of 64 bytes, with each 16-byte piece at index piece ^ row / 2 % 4.
constexpr int K_TILE = 32;
DEVICE int tiled(int c, int d, int C) {
    int row = row_of(c), eighth = d % K_TILE / 8 ^ row / 2 % 4;
    return (d / K_TILE * C + row) * K_TILE + eighth * 8 + d % 8;
}
