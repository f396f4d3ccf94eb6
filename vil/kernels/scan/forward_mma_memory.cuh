// Shared memory of forward_mma.cu, and the addresses at which a lane finds its operands.

#include "tiles.cuh"

// Roles of producer warps. A positive role is the number of units of a channel producer.
constexpr int COPIER = 0, STATE_PRODUCER = -1, ROLE[PRODUCERS] = ROLES;
DEVICE constexpr int count_of(int role) {
    int count = 0;
    for (int i = 0; i < PRODUCERS; i++) count += ROLE[i] == role;
    return count;
}
static_assert(count_of(COPIER) == 1 && count_of(STATE_PRODUCER) + count_of(1) + count_of(2) == PRODUCERS - 1);
constexpr int THREADS = 32 * (CONSUMERS + PRODUCERS), CTA_CHANNELS = 16 * CONSUMERS;
constexpr int STEP_COLUMNS = RANK ? RANK : CTA_CHANNELS;  // columns of the step logits, or of the step if RANK is set
constexpr int PAIRS = TILE / 2, QUADS = TILE / 4, SPANS = TILE / 8;  // number of groups of 2, 4 and 8 tokens per tile
constexpr int KEY_ROWS = 2 * TILE + 4;  // 2 TILE + 1, rounded up to whole lines of 128 bytes
static_assert(N == 16 && TILE % 16 == 0 && CHUNK % TILE == 0 && sizeof(Element) == 2 && RANK % 8 == 0);

// A tile as in memory. `keys` contains the keys of the tile, and the queries from the token before the tile on.
// Asynchronous copies are fast if 8 lanes move a line of 128 bytes that is aligned in global and shared memory.
// Octets of channels are swizzled, so that reading an octet of 8 tokens has no bank conflicts.
struct alignas(128) Tile {
    Element x[TILE][CTA_CHANNELS];
    Element step_logits[TILE][STEP_COLUMNS];
    Element keys[KEY_ROWS][N];
};
DEVICE int swizzled(int octet, int t) {
    return octet ^ (CTA_CHANNELS % 64 == 0 ? t % 8 : CTA_CHANNELS % 32 == 0 ? t / 2 % 4 : t / 4 % 2);
}

// Data that all channels of a CTA share, for each pair of tokens.
// `update` contains the operands of A and B for two octets of states, in the order in which lanes read them (`word`).
struct StateFactors {
    alignas(16) unsigned update[PAIRS][32][4];
    alignas(16) unsigned output[PAIRS][32][2];  // queries, for two octets of states: states 2 p and 2 p + 1
    // 1 + k.k of both tokens, each times a power of two and followed by this power; k_0 . q_0 times the first power.
    alignas(16) float norm[PAIRS][8];
};

// Data of one consumer's channels.
// `decay` contains the operands of A for two pairs, `drive` the operands of B for both pairs of a quad.
// `add` contains the remaining terms of y, starting with the token before the tile.
struct ChannelFactors {
    alignas(16) unsigned decay[QUADS][32][2];
    alignas(16) unsigned drive[QUADS][32][4];
    alignas(16) float add[TILE][8][2];  // terms of y for channels c and c + 8
};

struct CtaMemory {
    Tile tiles[STAGES];
    StateFactors states[3];
    ChannelFactors channels[2][CONSUMERS];
    alignas(128) Element y[3][TILE][CTA_CHANNELS];  // y of TILE tokens, starting with the token before the tile
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);
DEVICE int next_stage(int i, int count) { return i + 1 < count ? i + 1 : 0; }

// Lookup table in a register, with 4 bits for each of up to 8 numbers.
template <class... Numbers>
DEVICE constexpr unsigned table(Numbers... numbers) {
    unsigned packed = 0, shift = 0;
    ((packed |= unsigned(numbers) << shift, shift += 4), ...);
    return packed;
}
DEVICE int entry(unsigned table, int i) { return table >> 4 * i & 15; }

// Addresses of a lane's operands.
// Lanes that write at the same time write the same operand of different states, channels or pairs.
// The order of the slots avoids bank conflicts between lanes that write at the same time.
DEVICE int state_slot(int c, int p) { return c * 4 + (p ^ c >> 1); }
DEVICE int word(int pair, int octet, bool drive) { return octet % 2 + 2 * (pair % 2 ^ drive); }
DEVICE int drive_slot(int quad, int c, int factor) { return c * 4 + (factor ^ c / 2 % 2 ^ quad % 2 * 2); }
DEVICE int column_slot(int pair, int column, int p) { return (column ^ pair & 1) * 4 + p; }
constexpr unsigned ADD_SWIZZLE = table(0, 2, 1, 1, 2, 0, 3, 3);  // one entry for each token index modulo 8
DEVICE int add_slot(int t, int c) { return c ^ entry(ADD_SWIZZLE, t & 7) * 2; }

// Column of the product for y, where `which` is 0 for q_0, 1 for a_0 q_0, and 2 for q of the token before the pair.
DEVICE int column_of(int pair, int which) { return which < 2 ? pair % 4 * 2 + which : (pair % 4 * 2 + 4) % 8; }
// Token, from -1 to 6, whose y lane p receives from the first or second product of 4 pairs. -1 is the token before.
// The tables contain the token plus 1.
constexpr unsigned ROWS_OF_FIRST = table(1, 3, 0, 2), ROWS_OF_SECOND = table(4, 6, 5, 7);
DEVICE int token_of(int p, int product) { return entry(product ? ROWS_OF_SECOND : ROWS_OF_FIRST, p) - 1; }

// Position of a warp in the grid, and of a lane in the fragments of a product.
struct Position : GridPosition {
    i64 cta_d;
    int warp, lane, c, p;
    INLINE Position(i64 B, i64 D, i64 segments) : GridPosition(CTA_CHANNELS, D, segments, B) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        c = lane / 4, p = lane % 4;
        cta_d = channels * CTA_CHANNELS;
        // The compiler must keep the position in registers instead of recomputing it.
        asm("" : "+r"(warp), "+r"(lane), "+r"(c), "+r"(p));
    }
};

DEVICE void sync_producers() { asm volatile("bar.sync 1, %0;" ::"n"(32 * PRODUCERS) : "memory"); }
