// Shared memory of forward_mma.cu, and where in it a lane finds its factors.

#include "tiles.cuh"

constexpr int COPIER = 0, STATE_PRODUCER = -1, ROLE[PRODUCERS] = ROLES;  // more: units of a channel producer
DEVICE constexpr int count_of(int role) {
    int count = 0;
    for (int i = 0; i < PRODUCERS; i++) count += ROLE[i] == role;
    return count;
}
static_assert(count_of(COPIER) == 1 && count_of(STATE_PRODUCER) + count_of(1) + count_of(2) == PRODUCERS - 1);
constexpr int THREADS = 32 * (CONSUMERS + PRODUCERS), CTA_CHANNELS = 16 * CONSUMERS;
constexpr int STEP_COLUMNS = RANK ? RANK : CTA_CHANNELS;  // of the step logits or, with a RANK, of the step
constexpr int PAIRS = TILE / 2, QUADS = TILE / 4, SPANS = TILE / 8;  // of 2, 4 and 8 tokens
constexpr int KEY_ROWS = 2 * TILE + 4;  // 2 TILE + 1 in whole lines
static_assert(N == 16 && TILE % 16 == 0 && CHUNK % TILE == 0 && sizeof(Element) == 2 && RANK % 8 == 0);

// A tile as it is in memory; of keys those of the tile, then the queries of the token before and of the tile.
// Asynchronous copies are fast where 8 lanes move a line of 128 bytes that is one in both memories. Octets of channels
// are swizzled, so that those of 8 tokens that are read together do not meet in a bank.
struct alignas(128) Tile {
    Element x[TILE][CTA_CHANNELS];
    Element step_logits[TILE][STEP_COLUMNS];
    Element keys[KEY_ROWS][N];
};
DEVICE int swizzled(int octet, int t) {
    return octet ^ (CTA_CHANNELS % 64 == 0 ? t % 8 : CTA_CHANNELS % 32 == 0 ? t / 2 % 4 : t / 4 % 2);
}

// The channels of a CTA share these, by pair: the factors of states in the order in which lanes read them, of A and of
// B for two octets (`word`); queries; and what step sizes take
struct StateFactors {
    alignas(16) unsigned update[PAIRS][32][4];
    alignas(16) unsigned output[PAIRS][32][2];  // of two octets: states 2 p and 2 p + 1
    // of both tokens 1 + k.k times a power of two and that power, then k_0 . q_0 times it
    alignas(16) float norm[PAIRS][8];
};

// A consumer takes these: the factors of A for two pairs, channels c and c + 8; of B, of both pairs; and from the token
// before the tile on what y takes else
struct ChannelFactors {
    alignas(16) unsigned decay[QUADS][32][2];
    alignas(16) unsigned drive[QUADS][32][4];
    alignas(16) float add[TILE][8][2];  // of channels c and c + 8
};

struct CtaMemory {
    Tile tiles[STAGES];
    StateFactors states[3];
    ChannelFactors channels[2][CONSUMERS];
    alignas(128) Element y[3][TILE][CTA_CHANNELS];  // from the token before the tile on
};
static_assert(sizeof(CtaMemory) == CTA_BYTES);
DEVICE int next_stage(int i, int count) { return i + 1 < count ? i + 1 : 0; }

// Small tables in a register: 4 bits for each of up to 8 numbers
template <class... Numbers>
DEVICE constexpr unsigned table(Numbers... numbers) {
    unsigned packed = 0, shift = 0;
    ((packed |= unsigned(numbers) << shift, shift += 4), ...);
    return packed;
}
DEVICE int entry(unsigned table, int i) { return table >> 4 * i & 15; }

// Where a lane finds its factor. Those that write are lanes of one factor and of different states, channels or pairs;
// with these orders they do not meet in a bank.
DEVICE int state_slot(int c, int p) { return c * 4 + (p ^ c >> 1); }
DEVICE int word(int pair, int octet, bool drive) { return octet % 2 + 2 * (pair % 2 ^ drive); }
DEVICE int drive_slot(int quad, int c, int factor) { return c * 4 + (factor ^ c / 2 % 2 ^ quad % 2 * 2); }
DEVICE int column_slot(int pair, int column, int p) { return (column ^ pair & 1) * 4 + p; }
constexpr unsigned ADD_SWIZZLE = table(0, 2, 1, 1, 2, 0, 3, 3);  // by token of 8
DEVICE int add_slot(int t, int c) { return c ^ entry(ADD_SWIZZLE, t & 7) * 2; }

// Columns of the product for y: of q_0, a_0 q_0 and the q before
DEVICE int column_of(int pair, int which) { return which < 2 ? pair % 4 * 2 + which : (pair % 4 * 2 + 4) % 8; }
// The token, of 8, from the one before (-1) on, of which lane p gets y from the first or second such product
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
        asm("" : "+r"(warp), "+r"(lane), "+r"(c), "+r"(p));  // or the compiler would compute them again and again
    }
};

DEVICE void sync_producers() { asm volatile("bar.sync 1, %0;" ::"n"(32 * PRODUCERS) : "memory"); }
