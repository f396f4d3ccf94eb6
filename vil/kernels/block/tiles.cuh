// Layouts in which `pack_weights` stores out_proj for gate_outproj_sm90.cu, and in_proj for in_proj_pool_sm90.cu and
// in_proj_bwd_sm90.cu. The bulk copies of these kernels keep the layouts.

#include "../cuda/types.cuh"

// Returns the row of output c = 16 j + 4 p + 2 i + e, which is column 2p + e of product 2j + i.
// The outputs of lane p in products 2j and 2j + 1 are therefore 16 j + 4 p to 16 j + 4 p + 3.
DEVICE int row_of(int c) { return c / 16 * 16 + c % 4 / 2 * 8 + c % 16 / 4 * 2 + c % 2; }

// Returns the index of out_proj's weight for output c and channel d.
// K_TILE channels of all C outputs precede the next K_TILE channels.
// wgmma reads rows of 64 bytes, with each 16-byte piece at index piece ^ row / 2 % 4.
constexpr int K_TILE = 32;
DEVICE int tiled(int c, int d, int C) {
    int row = row_of(c), eighth = d % K_TILE / 8 ^ row / 2 % 4;
    return (d / K_TILE * C + row) * K_TILE + eighth * 8 + d % 8;
}

// Returns the index of in_proj's weight in row e and column c. A block of 64 rows and 64 columns is contiguous.
// The blocks are ordered by channel / 64, then u before z, and then by column.
// wgmma reads rows of 128 bytes, with each 16-byte piece at index piece ^ row % 8.
DEVICE int tiled_in(int e, int c, int D, int C) {
    int of_z = e >= D, d = e - of_z * D, row = row_of(d % 64), piece = c % 64 / 8 ^ row % 8;
    return (((d / 64 * 2 + of_z) * (C / 64) + c / 64) * 64 + row) * 64 + piece * 8 + c % 8;
}

// Returns the index of in_proj's weight in row e and column c for in_proj_bwd_sm90.cu.
// Blocks of 64 rows and 64 columns are contiguous, and ordered by row and then by column.
// In row r of a block, the 16-byte piece with index i is stored at index i ^ r % 8.
DEVICE int blocked(int e, int c, int C) {
    return ((e / 64 * (C / 64) + c / 64) * 64 + e % 64) * 64 + (c % 64 / 8 ^ e % 8) * 8 + c % 8;
}
