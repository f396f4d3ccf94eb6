// Shared memory of forward_mma.cu, and a lane's addresses of factors.

#include "tiles.cuh"

// larger values: number of units of a channel producer
constexpr int COPIER = 0, STATE_PRODUCER = -1, ROLE[PRODUCERS] = ROLES;
DEVICE constexpr int count_of(int role) {
    int count = 0;
    for (int i = 0; i < PRODUCERS; i++) count += ROLE[i] == role;
    return count;
}
static_assert(count_of(COPIER) == 1 && count_of(STATE_PRODUCER) + count_of(1) + count_of(2) == PRODUCERS - 1);
constexpr int THREADS = 32 * (CONSUMERS + PRODUCERS), CTA_CHANNELS = 16 * CONSUMERS;
constexpr int STEP_COLUMNS = RANK ? RANK : CTA_CHANNELS;  // columns of the step logits or, with a RANK, of the step
constexpr int PAIRS = TILE / 2, QUADS = TILE / 4, SPANS = TILE / 8;  // groups of 2, 4 and 8 tokens
constexpr int KEY_ROWS = 2 * TILE + 4;  // 2 TILE + 1, rounded up to whole lines
static_assert(N == 16 && TILE % 16 == 0 && CHUNK % TILE == 0 && sizeof(Element) == 2 && RANK % 8 == 0);

// A tile as it is in memory; `keys` contains the tile's keys, then the queries of the token before the tile and of the
// tile. Asynchronous copies are fast if 8 lanes move an aligned line of 128 bytes in both memories. Octets of channels
// are swizzled, so that those of 8 tokens, which are read together, have no bank conflicts.
struct alignas(128) Tile {
    Element x[TILE][CTA_CHANNELS];
    Element step_logits[TILE][STEP_COLUMNS];
    Element keys[KEY_ROWS][N];
};
DEVICE int swizzled(int octet, int t) {
    return octet ^ (CTA_CHANNELS % 64 == 0 ? t % 8 : CTA_CHANNELS % 32 == 0 ? t / 2 % 4 : t / 4 % 2);
}

// Data shared by all channels of a CTA, per pair: factors of states in the order in which lanes read them, of A and of
// B for two octets (`word`); queries; and inputs of step sizes
struct StateFactors {
    alignas(16) unsigned update[PAIRS][32][4];
    alignas(16) unsigned output[PAIRS][32][2];  // of two octets: states 2 p and 2 p + 1
    // for both tokens, 1 + k.k times a power of two and that power, then k_0 . q_0 times it
    alignas(16) float norm[PAIRS][8];
};

// Data of one consumer: the factors of A for two pairs and channels c and c + 8, the factors of B for both pairs, and,
// starting with the token before the tile, the remaining terms of y
struct ChannelFactors {
    alignas(16) unsigned decay[QUADS][32][2];
    alignas(16) unsigned drive[QUADS][32][4];
    alignas(16) float add[TILE][8][2];  // of channels c and c + 8
};

struct CtaMemory {
    Tile tiles[STAGES];
    StateFactors states[3];
    ChannelFactors channels[2][CONSUMERS];
    alignas(128) Element y[3][TILE][CTA_CHANNELS];  // starting with the token before the tile
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);
DEVICE int next_stage(int i, int count) { return i + 1 < count ? i + 1 : 0; }

// Small lookup tables in a register: 4 bits for each of up to 8 numbers
template <class... Numbers>
DEVICE constexpr unsigned table(Numbers... numbers) {
    unsigned packed = 0, shift = 0;
    ((packed |= unsigned(numbers) << shift, shift += 4), ...);
    return packed;
}
DEVICE int entry(unsigned table, int i) { return table >> 4 * i & 15; }

// Addresses of a lane's factors. Lanes that write at the same time have one factor and different states, channels or
// pairs; these orders avoid bank conflicts.
DEVICE int state_slot(int c, int p) { return c * 4 + (p ^ c >> 1); }
DEVICE int word(int pair, int octet, bool drive) { return octet % 2 + 2 * (pair % 2 ^ drive); }
DEVICE int drive_slot(int quad, int c, int factor) { return c * 4 + (factor ^ c / 2 % 2 ^ quad % 2 * 2); }
DEVICE int column_slot(int pair, int column, int p) { return (column ^ pair & 1) * 4 + p; }
constexpr unsigned ADD_SWIZZLE = table(0, 2, 1, 1, 2, 0, 3, 3);  // by index of the token in 8
DEVICE int add_slot(int t, int c) { return c ^ entry(ADD_SWIZZLE, t & 7) * 2; }

// Columns of the product for y: q_0, a_0 q_0 and the previous q
DEVICE int column_of(int pair, int which) { return which < 2 ? pair % 4 * 2 + which : (pair % 4 * 2 + 4) % 8; }
// The token, of 8 starting with the one before (-1), whose y lane p receives from the first or second such product
constexpr unsigned ROWS_OF_FIRST = table(1, 3, 0, 2), ROWS_OF_SECOND = table(4, 6, 5, 7);  // counted from that token
DEVICE int token_of(int p, int product) { return entry(product ? ROWS_OF_SECOND : ROWS_OF_FIRST, p) - 1; }

// A warp's position in the grid, and a lane's in its matrices
struct Position : GridPosition {
    i64 cta_d;
    int warp, lane, c, p;
    INLINE Position(i64 B, i64 D, i64 segments) : GridPosition(CTA_CHANNELS, D, segments, B) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        c = lane / 4, p = lane % 4;
        cta_d = channels * CTA_CHANNELS;
        asm("" : "+r"(warp), "+r"(lane), "+r"(c), "+r"(p));  // otherwise the compiler would recompute them repeatedly
    }
};

DEVICE void sync_producers() { asm volatile("bar.sync 1, %0;" ::"n"(32 * PRODUCERS) : "memory"); }
