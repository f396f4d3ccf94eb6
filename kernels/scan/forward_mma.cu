// The forward scan of Longhorn for 16-bit inputs with 16 states, two tokens at a time on tensor cores. Step sizes e and
// inputs x belong to a channel, k and a = k^2 to a state. Over tokens 0 and 1 the recurrence (recurrences.cuh) is
//   S_2 = A S_0 + B
//   A = (1 - e_0 a_0) (1 - e_1 a_1) = 1 - e_0 a_0 - e_1 a_1 + (e_0 e_1) (a_0 a_1)
//   B = e_0 x_0 k_0 (1 - e_1 a_1) + e_1 x_1 k_1 = (e_0 x_0) k_0 + (e_1 x_1) k_1 - (e_1 e_0 x_0) (a_1 k_0)
// so A and B are products of matrices, (channels, 3) times (3, states), which tensor cores do, and what is left is one
// FFMA for a state and two tokens. Queries meet the states between pairs of tokens: y_t = S_t q_t with S_t behind token
// t, so
//   y_1 = S_2 q_1
//   y_0 = S_0 q_0 - e_0 (S_0 (a_0 q_0)) + (e_0 x_0) (k_0 q_0)         as S_1 = (1 - e_0 a_0) S_0 + e_0 x_0 k_0
// are products too, (channels, states) times (states, 3).
//
// For A tensor cores read fp16: e (1 + k.k) and a / (1 + k.k) are at most 1, so that an error is 2^-12 of at most 1. In
// place of 1 + k.k stands the power of two below it, which leaves keys exact. For B they read the type of the inputs, e
// x as the sum of two such numbers, for one alone would be an error of 2^-9 in the states. For y they read states in
// that type. A token that is no number spoils up to four before it as well, in its channel or, if it is a key, in all.
//
// Roles of the warps of a CTA:
//   consumers            CONSUMERS of them scan 16 channels each
//   copier               (one) copies tiles of TILE tokens to shared memory, and y from there to where it belongs
//   state producers      prepare factors of states (of keys and queries), which all channels share
//   channel producers    prepare factors of channels, in units of 8 tokens of a consumer's channels, from x and logits;
//                        with a RANK they compute the logits, by products too: what is given in their place is the step
//                        (tokens, RANK), and step_projs (channels, RANK)
//
// All meet at one __syncthreads for a tile. For n tiles, of which the last holds the token behind the segment (y of the
// last token may need the product of the pair behind it), there are barriers 0 to n. Between barriers j and j + 1
//
//   copier               tile j + STAGES - 1 on its way, to where tile j - 1 was; tile j + 3 has arrived before j + 1
//   state producers      tile j + 2's keys          to states[(j + 2) % 3]
//   channel producers    tile j + 1's x and logits, norms of states[(j + 1) % 3]         to channels[(j + 1) % 2]
//   consumers            states[j % 3] and channels[j % 2] of tile j (they come to barrier j + 1 when all is read,
//                        with two pairs still to compute)     to y[j % 3], whose last 8 tokens are there before j + 2
//   copier               y of tile j - 2
//
// so whatever is written between two barriers is read behind the second, and written again two (channels), three
// (states, y) or more (tiles) barriers later, where its readers have passed one in between. Before barrier 0 the
// producers meet twice among themselves (`sync_producers`): tiles 0 and 1 have arrived; the states of both are
// prepared.
//
// Layout of a consumer: lane 4 c + p has channels c and c + 8 and, of each 8 states, numbers 2 p and 2 p + 1, which is
// how a lane has sums of a product (cuda/mma.cuh): S[o][2 i + j] is state 8 o + 2 p + j of channel c + 8 i. Factors are
// words of two neighbours of the 8 that a product sums over. Two pairs of tokens (4 tokens, a quarter) share the words
// of A:
//
//     words of A of pairs 0, 1 of 4     e_0, e_1 | e_2, e_3 | e_0 e_1, 0 | e_2 e_3, 0   (of 2, 3: the last two first)
//     and of states, for pair 0        -a_0, -a_1 |  0  0   | a_0 a_1, 0 |  0  0        the other pair's are zeros
//     words of B of each pair         high of e_0 x_0, e_1 x_1 | low of both | e_1 e_0 x_0, 0 | (again)
//     and of states                   k_0, k_1                 | k_0, k_1    | -a_1 k_0, 0    | 0  0
//
// Two pairs share a product for y, of which lane p gets columns 2 p and 2 p + 1. Pair r of 4 has columns 2 r (q_0) and
// 2 r + 1 (a_0 q_0), and (2 r + 4) % 8 (q of the token before, -1), so that of tokens -1 to 6 of 8
//
//     lane p                          0         1         2        3
//     product 0, of pairs 0 and 1     0         2        -1        1          (`token_of`)
//     product 1, of pairs 2 and 3     3         5         4        6

#include "tiles.cuh"

constexpr int COPIER = 0, STATE_PRODUCER = -1, ROLE[PRODUCERS] = ROLES;  // more: units of a channel producer
DEVICE constexpr int count_of(int role) {
    int count = 0;
    for (int i = 0; i < PRODUCERS; i++) count += ROLE[i] == role;
    return count;
}
static_assert(count_of(COPIER) == 1 && count_of(STATE_PRODUCER) + count_of(1) + count_of(2) == PRODUCERS - 1);
constexpr int THREADS = 32 * (CONSUMERS + PRODUCERS), CTA_CHANNELS = 16 * CONSUMERS;
constexpr int LOGIT_COLUMNS = RANK ? RANK : CTA_CHANNELS;  // of what the logits are or, with a RANK, come from
constexpr int PAIRS = TILE / 2, QUARTERS = TILE / 4, EIGHTHS = TILE / 8;
constexpr int KEY_ROWS = 2 * TILE + 4;  // 2 TILE + 1 in whole lines
static_assert(N == 16 && TILE % 16 == 0 && CHUNK % TILE == 0 && sizeof(Element) == 2 && RANK % 8 == 0);

// A tile as it is in memory; of keys those of the tile, then the queries of the token before and of the tile.
// Asynchronous copies are fast where 8 lanes move a line of 128 bytes that is one in both memories. Octets of channels
// are exchanged, so that those of 8 tokens that are read together do not meet in a bank.
struct alignas(128) Tile {
    Element x[TILE][CTA_CHANNELS];
    Element logit[TILE][LOGIT_COLUMNS];
    Element keys[KEY_ROWS][N];
};
DEVICE int exchanged(int octet, int t) {
    return octet ^ (CTA_CHANNELS % 64 == 0 ? t % 8 : CTA_CHANNELS % 32 == 0 ? t / 2 % 4 : t / 4 % 2);
}

// What the channels of a CTA share, by pair: the factors of states in the order in which lanes read them, of A and of B
// for two octets (`word`); queries; and what step sizes take
struct StateFactors {
    alignas(16) unsigned update[PAIRS][32][4];
    alignas(16) unsigned output[PAIRS][32][2];  // of two octets: states 2 p and 2 p + 1
    // of both tokens 1 + k.k times a power of two and that power, then k_0 . q_0 times it
    alignas(16) float norm[PAIRS][8];
};

// What a consumer takes: the factors of A for two pairs, channels c and c + 8; of B, of both pairs; and from the token
// before the tile on what y takes else
struct ChannelFactors {
    alignas(16) unsigned decay[QUARTERS][32][2];
    alignas(16) unsigned drive[QUARTERS][32][4];
    alignas(16) float add[TILE][8][2];  // of channels c and c + 8
};

struct CtaMemory {
    Tile tiles[STAGES];
    StateFactors states[3];
    ChannelFactors channels[2][CONSUMERS];
    alignas(128) Element y[3][TILE][CTA_CHANNELS];  // from the token before the tile on
};
static_assert(sizeof(CtaMemory) == BLOCK_BYTES);

// Where a lane finds its factor. Those that write are lanes of one factor and of different states, channels or pairs;
// with these orders they do not meet in a bank.
DEVICE int state_slot(int c, int p) { return c * 4 + (p ^ c >> 1); }
DEVICE int word(int pair, int octet, bool drive) { return octet % 2 + 2 * (pair % 2 ^ drive); }
DEVICE int drive_slot(int quarter, int c, int factor) { return c * 4 + (factor ^ c / 2 % 2 ^ quarter % 2 * 2); }
DEVICE int column_slot(int pair, int column, int p) { return (column ^ pair & 1) * 4 + p; }
DEVICE int add_slot(int t, int c) { return c ^ (0x33021120 >> 4 * (t & 7) & 15) * 2; }
// Columns of the product for y: of q_0, a_0 q_0 and the q before
DEVICE int column_of(int pair, int which) { return which < 2 ? pair % 4 * 2 + which : (pair % 4 * 2 + 4) % 8; }
// The token, of 8, from the one before on, of which lane p gets y from the first or second such product
DEVICE int token_of(int p, int product) { return ((product ? 0x7564 : 0x2031) >> 4 * p & 15) - 1; }

DEVICE int after(int i, int count) { return i + 1 < count ? i + 1 : 0; }
DEVICE void sync_producers() { asm volatile("bar.sync 1, %0;" ::"n"(32 * PRODUCERS) : "memory"); }

// A warp's place in the grid, and a lane's in its matrices
struct Place : GridPlace {
    i64 cta_d;
    int warp, lane, c, p;
    INLINE Place(i64 B, i64 D, i64 segments) : GridPlace(CTA_CHANNELS, D, segments, B) {
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        c = lane / 4, p = lane % 4;
        cta_d = channels * CTA_CHANNELS;
        asm("" : "+r"(warp), "+r"(lane), "+r"(c), "+r"(p));  // or the compiler would compute them again and again
    }
};

// Copies of COUNT vectors of 8 elements by one warp, whose lanes remember where each of theirs is from and goes.
// (TileCopies need less, but rows of at most 32 vectors that divide 32.)
template <int COUNT>
struct VectorCopies {
    static constexpr int ITEMS = (COUNT + 31) / 32, NEVER = 1 << 30;  // a token behind any end
    struct Item {
        Input source;
        int token, to;
    };
    Item items[ITEMS];
    INLINE void set(int i, const Input &source, int column, int token, int to) {
        items[i] = {source.from(column), token, to};
        asm("" : "+r"(items[i].to), "+r"(items[i].token));  // or the compiler would compute them for every tile
    }
    // from token t0 on, of which those from `begin` to `end` exist; zeros for the others
    INLINE void start(Element *tile, int t0, int begin, int end) const {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int t = t0 + items[i].token;
            if (COUNT % 32 == 0 || 32 * i + threadIdx.x % 32 < COUNT)
                copy_async<8>(tile + items[i].to, items[i].source.at(t), t >= begin && t < end);
        }
    }
};
// COLUMNS of a tile's tokens, of which `width` exist
template <int COLUMNS, bool EXCHANGES>
struct TokenCopies : VectorCopies<TILE * COLUMNS / 8> {
    INLINE TokenCopies(const Input &source, i64 width, int lane) {
        UNROLLED for (int i = 0; i < this->ITEMS; i++) {
            int item = 32 * i + lane, octet = item % (COLUMNS / 8), token = item / (COLUMNS / 8);
            int to = token * COLUMNS + 8 * (EXCHANGES ? exchanged(octet, token) : octet);
            this->set(i, source, 8 * octet, 8 * octet < width ? token : this->NEVER, to);
        }
    }
};
struct KeyCopies : VectorCopies<(2 * TILE + 1) * N / 8> {
    INLINE KeyCopies(const Input &k, const Input &q, int lane) {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int item = 32 * i + lane, row = item / (N / 8);
            set(i, row < TILE ? k : q, item % (N / 8) * 8, row < TILE ? row : row - TILE - 1, 8 * item);
        }
    }
};

// y of a tile, from the token before it on, from shared memory to where it belongs, for one warp
struct Results {
    static constexpr int ROW = CTA_CHANNELS / 8, ITEMS = TILE * ROW / 32, NEVER = 1 << 30;
    static_assert(TILE * ROW % 32 == 0);
    Sequence<Element> to[ITEMS];
    int token[ITEMS], from[ITEMS];
    INLINE Results(const Sequence<Element> &ys, i64 width, int lane) {
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int item = 32 * i + lane, row = item / ROW, octet = item % ROW;
            to[i] = ys;
            to[i].data += 8 * octet;
            token[i] = 8 * octet < width ? row - 1 : NEVER, from[i] = row * CTA_CHANNELS + 8 * exchanged(octet, row);
            asm("" : "+r"(token[i]), "+r"(from[i]));
        }
    }
    INLINE void copy(const Element (&y)[TILE][CTA_CHANNELS], int t0, int begin, int end) const {
        Pack<Element, 8> values[ITEMS];
        UNROLLED for (int i = 0; i < ITEMS; i++) values[i] = load<8>(&y[0][0] + from[i]);
        UNROLLED for (int i = 0; i < ITEMS; i++) {
            int t = t0 + token[i];
            if (t >= begin && t < end) store(to[i].at(t), values[i]);
        }
    }
};

// The factors of the states of a tile: a warp takes 4 pairs and those APART further on, 8 lanes a pair, a lane two
// states
struct StateProducer {
    static constexpr int APART = 4 * count_of(STATE_PRODUCER), PASSES = PAIRS / APART;
    static_assert(PAIRS % APART == 0);
    int m, key, decay[2], drive, output[3], norm;  // where, for the first 4 pairs
    INLINE StateProducer(int warp, const Place &at) {
        int pair = 4 * warp + at.lane / 8, r = pair % 4;
        m = at.lane % 8;
        key = 2 * pair * N + 2 * m;
        UNROLLED for (int f = 0; f < 2; f++) {
            decay[f] = pair * 128 + state_slot(m % 4 * 2, (r + 2 * f) % 4) * 4 + word(pair, m / 4, false);
            asm("" : "+r"(decay[f]));
        }
        UNROLLED for (int f = 0; f < 3; f++) {
            output[f] = (pair * 32 + column_slot(pair, column_of(pair, f), m % 4)) * 2 + m / 4;
            asm("" : "+r"(output[f]));
        }
        drive = pair * 128 + word(pair, m / 4, true), norm = pair * 8;
        asm("" : "+r"(m), "+r"(key), "+r"(drive), "+r"(norm));
    }
    INLINE void prepare(StateFactors &to, const Tile &tile) const {
        Floats<2> k[PASSES][2];
        unsigned q[PASSES][2];  // of the token before first
        float norm_of[PASSES][2], kq[PASSES];
        UNROLLED for (int pass = 0; pass < PASSES; pass++)
            UNROLLED for (int odd = 0; odd < 2; odd++) {
                const Element *keys = &tile.keys[2 * APART * pass + odd][0] + key;
                k[pass][odd] = to_floats(load<2>(keys)), q[pass][odd] = load<2>(keys + TILE * N).word[0];
            }
        UNROLLED for (int pass = 0; pass < PASSES; pass++) reduce(k[pass], q[pass][1], norm_of[pass], kq[pass]);
        UNROLLED for (int pass = 0; pass < PASSES; pass++) write(to, pass, k[pass], q[pass], norm_of[pass], kq[pass]);
    }
    // 1 + k.k of both tokens for all 8 lanes, k_0 . q_0 for lane 1: with each exchange a lane passes on what it will
    // not finish
    INLINE void reduce(const Floats<2> (&k)[2], unsigned q_0, float (&norm_of)[2], float &kq) const {
        auto dot = [](Floats<2> a, Floats<2> b) { return fmaf(a.at[0], b.at[0], a.at[1] * b.at[1]); };
        float kk_0 = dot(k[0], k[0]), kk_1 = dot(k[1], k[1]);
        float product = dot(k[0], unpack(Element{}, q_0));
        bool odd = m & 1, upper = m & 2;
        float sums[2] = {odd ? product : kk_0, odd ? 0 : kk_1};
        sums[0] += __shfl_xor_sync(WARP, odd ? kk_0 : product, 1);
        sums[1] += __shfl_xor_sync(WARP, odd ? kk_1 : 0, 1);
        float sum = (upper ? sums[1] : sums[0]) + __shfl_xor_sync(WARP, upper ? sums[0] : sums[1], 2);
        sum += __shfl_xor_sync(WARP, sum, 4);
        int first = threadIdx.x & 24;
        norm_of[0] = 1 + __shfl_sync(WARP, sum, first);
        norm_of[1] = 1 + __shfl_sync(WARP, sum, first + 2);
        kq = sum;
    }
    INLINE void write(StateFactors &to, int pass, const Floats<2> (&k)[2], const unsigned (&q)[2],
                      const float (&norm_of)[2], float kq) const {
        float scale[2];  // the power of two that takes the norm to between 1 and 2
        UNROLLED for (int odd = 0; odd < 2; odd++)
            scale[odd] = __uint_as_float(0x7f000000u - (__float_as_uint(norm_of[odd]) & 0x7f800000u));
        unsigned *updates = to.update[APART * pass][0];
        float a_0[2];
        UNROLLED for (int j = 0; j < 2; j++) {
            float k_0 = k[0].at[j], k_1 = k[1].at[j], scaled_0 = k_0 * scale[0], scaled_1 = k_1 * scale[1];
            float a_1 = k_1 * scaled_1;
            a_0[j] = k_0 * scaled_0;
            // the slots of neighbouring states are 4 words by 4 apart
            updates[decay[0] + 16 * j] = pack(fp16{}, -a_0[j], -a_1);
            updates[decay[1] + 16 * j] = pack(fp16{}, a_0[j] * a_1, 0);
            unsigned first_order = pack(Element{}, scaled_0, scaled_1);
            int c = m % 4 * 2;
            updates[drive + state_slot(c, 0) * 4 + 16 * j] = first_order;
            updates[drive + state_slot(c, 1) * 4 + 16 * j] = first_order;
            updates[drive + state_slot(c, 2) * 4 + 16 * j] = pack(Element{}, -a_1 * scaled_0, 0);
        }
        unsigned *outputs = to.output[APART * pass][0];
        Floats<2> q_0 = unpack(Element{}, q[1]);
        outputs[output[0]] = q[1];
        outputs[output[1]] = pack(Element{}, a_0[0] * q_0.at[0], a_0[1] * q_0.at[1]);
        outputs[output[2]] = q[0];
        float *norms = to.norm[APART * pass] + norm;
        if (m == 0) store(norms, Floats<4>{norm_of[0] * scale[0], scale[0], norm_of[1] * scale[1], scale[1]});
        if (m == 1) norms[4] = kq * scale[0];
    }
};

// The factors of 8 tokens (an eighth of a tile's) of a consumer's channels: a lane takes pair p of channels c and c + 8
struct ChannelProducer {
    static constexpr int EIGHTS = RANK / 8, LOADS = (EIGHTS + 3) / 4;  // of the step's columns; of 4 eights
    int consumer, eighth, from, decay[2], drive[3], add[2];
    float skip[2], bias[2], last[2];  // `last` is what to add to y of the last token before the tile
    unsigned step_proj[EIGHTS + 1][2];  // of each 8 columns 2 p and 2 p + 1, of channels c and c + 8; never empty
    INLINE void begin(int unit, const float *skips, const float *biases, const Element *step_projs, i64 D,
                      const Place &at) {
        consumer = unit / EIGHTHS, eighth = unit % EIGHTHS;
        int row = 8 * eighth + at.lane % 8, pair = 4 * eighth + at.p, quarter = pair / 2;
        int octet = exchanged(2 * consumer + at.lane / 8 % 2, row);
        from = ((RANK ? 0 : at.lane / 16 * TILE) + row) * CTA_CHANNELS + octet * 8;
        UNROLLED for (int f = 0; f < 2; f++) decay[f] = (quarter * 32 + at.c * 4 + (at.p + 2 * f) % 4) * 2;
        UNROLLED for (int f = 0; f < 3; f++)
            drive[f] = (quarter * 32 + drive_slot(quarter, at.c, f)) * 4 + pair % 2 * 2;
        UNROLLED for (int odd = 0; odd < 2; odd++) {
            int row = (2 * pair + odd + 1) % TILE;  // the tile's last is the first of the next tile's
            add[odd] = (row * 8 + add_slot(2 * pair + odd, at.c)) * 2;
        }
        asm("" : "+r"(from), "+r"(decay[0]), "+r"(decay[1]), "+r"(drive[0]), "+r"(drive[1]), "+r"(drive[2]),
            "+r"(add[0]), "+r"(add[1]));
        i64 d = at.cta_d + 16 * consumer + at.c;
        UNROLLED for (int i = 0; i < 2; i++) {
            bool exists = d + 8 * i < D;
            skip[i] = exists && skips ? skips[at.g * D + d + 8 * i] : 0;
            bias[i] = exists && biases ? -LOG2E * biases[at.g * D + d + 8 * i] : 0;
            last[i] = 0;
            UNROLLED for (int e = 0; e < EIGHTS; e++)
                step_proj[e][i] =
                    exists ? load<2>(step_projs + (at.g * D + d + 8 * i) * RANK + 8 * e + 2 * at.p).word[0] : 0;
        }
    }
    unsigned values[RANK ? 2 : 4], step[LOADS + 1][4];  // x, logits of channels c and c + 8
    Floats<4> norm;
    float kq;
    Pack<unsigned, 2> decays[2], drives[3];
    Floats<2> first, second;
    INLINE void read(const Tile &tile, const StateFactors &states, const Place &at) {
        load_transposed(values, &tile.x[0][0] + from);
        UNROLLED for (int e = 0; e < LOADS; e++)
            load_matrices(step[e], &tile.logit[8 * eighth + at.lane % 8][min(4 * e + at.lane / 8, EIGHTS - 1) * 8]);
        norm = load<4>(states.norm[4 * eighth + at.p]), kq = states.norm[4 * eighth + at.p][4];
    }
    // divided by `scale`, where `norm` is `scale` times 1 + k.k
    DEVICE float step_size(float logit, float bias, float norm, float scale) {
        return reciprocal(fmaf(exp2_fast(fmaf(-LOG2E, logit, bias)), scale, norm));
    }
    // step (8 tokens, RANK) step_proj^T (RANK, 16 channels), transposed: rows are channels, as for what lanes have of x
    INLINE void project(Floats<2> (&logits)[2]) const {
        if constexpr (EIGHTS % 2) {
            float product[4];
            multiply(Element{}, product, step_proj[EIGHTS - 1][0], step_proj[EIGHTS - 1][1],
                     step[EIGHTS / 4][(EIGHTS - 1) % 4]);
            UNROLLED for (int i = 0; i < 2; i++) logits[i] = {product[2 * i], product[2 * i + 1]};
        }
        UNROLLED for (int e = 0; e + 1 < EIGHTS; e += 2)
            multiply_add(Element{}, logits, step_proj[e][0], step_proj[e][1], step_proj[e + 1][0], step_proj[e + 1][1],
                         step[e / 4][e % 4], step[e / 4][e % 4 + 1]);
    }
    INLINE void compute(const Place &at) {
        Floats<2> logits[2] = {};
        if constexpr (RANK) {
            project(logits);
        } else {
            UNROLLED for (int i = 0; i < 2; i++) logits[i] = unpack(Element{}, values[2 + i]);
        }
        UNROLLED for (int i = 0; i < 2; i++) {
            Floats<2> x = unpack(Element{}, values[i]), logit = logits[i];
            float e_0 = step_size(logit.at[0], bias[i], norm.at[0], norm.at[1]);
            float e_1 = step_size(logit.at[1], bias[i], norm.at[2], norm.at[3]);
            float v_0 = e_0 * x.at[0], v_1 = e_1 * x.at[1];
            decays[0].at[i] = pack(fp16{}, e_0, e_1);
            decays[1].at[i] = pack(fp16{}, e_0 * e_1, 0);
            drives[0].at[i] = pack(Element{}, v_0, v_1);
            Floats<2> high = unpack(Element{}, drives[0].at[i]);
            drives[1].at[i] = pack(Element{}, v_0 - high.at[0], v_1 - high.at[1]);
            drives[2].at[i] = pack(Element{}, e_1 * v_0, 0);
            first.at[i] = fmaf(v_0, kq, skip[i] * x.at[0]), second.at[i] = skip[i] * x.at[1];
        }
        if (eighth == EIGHTHS - 1 && at.p == 3) {
            float next[2] = {second.at[0], second.at[1]};
            UNROLLED for (int i = 0; i < 2; i++) second.at[i] = last[i], last[i] = next[i];
        }
    }
    INLINE void write(ChannelFactors (&to)[CONSUMERS]) const {
        unsigned *decays_to = &to[consumer].decay[0][0][0], *drives_to = &to[consumer].drive[0][0][0];
        float *adds = &to[consumer].add[0][0][0];
        UNROLLED for (int f = 0; f < 2; f++) store(decays_to + decay[f], decays[f]);
        UNROLLED for (int f = 0; f < 3; f++) store(drives_to + drive[f], drives[f]);
        store(adds + add[0], first);
        store(adds + add[1], second);
    }
};

// The loop of the copier
DEVICE void copy_tiles(CtaMemory &cta, Input xs, Input logits, const Input &ks, const Input &qs, Sequence<Element> ys,
                       i64 D, int begin, int end, const Place &at) {
    i64 width = D - at.cta_d;
    xs.data += at.cta_d, ys.data += at.cta_d;
    if (!RANK) logits.data += at.cta_d;
    TokenCopies<CTA_CHANNELS, true> x_copies(xs, width, at.lane);
    TokenCopies<LOGIT_COLUMNS, !RANK> logit_copies(logits, RANK ? RANK : width, at.lane);
    KeyCopies key_copies(ks, qs, at.lane);
    auto copy = [&](int stage, int t0) {
        Tile &tile = cta.tiles[stage];
        key_copies.start(tile.keys[0], t0, begin, end);
        x_copies.start(tile.x[0], t0, begin, end);
        logit_copies.start(tile.logit[0], t0, begin, end);
        commit_copies();
    };
    UNROLLED for (int s = 0; s < STAGES - 1; s++) copy(s, begin + s * TILE);
    wait_for_copies<STAGES - 3>();
    sync_producers();
    sync_producers();
    int stage = STAGES - 1, t0 = begin, buffer = 0;
    Results results(ys, width, at.lane);
    auto copy_results = [&]() {
        if (t0 >= begin + 2 * TILE) {
            results.copy(cta.y[buffer], t0 - 2 * TILE, begin, end);
            buffer = after(buffer, 3);
        }
    };
#pragma unroll 1
    for (; t0 <= end; t0 += TILE) {
        wait_for_copies<STAGES - 4>();
        __syncthreads();
        copy(stage, t0 + (STAGES - 1) * TILE);
        stage = after(stage, STAGES);
        copy_results();
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; i++, t0 += TILE) copy_results();
}

// The loop of a state producer, the `warp`th of them
DEVICE void produce_states(CtaMemory &cta, int warp, int begin, int end, const Place &at) {
    StateProducer producer(warp, at);
    sync_producers();
    producer.prepare(cta.states[0], cta.tiles[0]);
    producer.prepare(cta.states[1], cta.tiles[1]);
    sync_producers();
    int stage = 1, buffer = 1;
#pragma unroll 1
    for (int t0 = begin; t0 <= end; t0 += TILE) {
        __syncthreads();
        stage = after(stage, STAGES), buffer = after(buffer, 3);
        producer.prepare(cta.states[buffer], cta.tiles[stage]);
    }
    __syncthreads();
}

// The loop of a channel producer that has UNITS, from `first` on
template <int UNITS>
DEVICE void produce_channels(CtaMemory &cta, int first, const float *skips, const float *biases,
                             const Element *step_projs, i64 D, int begin, int end, const Place &at) {
    ChannelProducer units[UNITS];
    UNROLLED for (int i = 0; i < UNITS; i++) units[i].begin(first + i, skips, biases, step_projs, D, at);
    sync_producers();
    sync_producers();
    int stage = 0, states = 0, buffer = 0;
#pragma unroll 1
    for (int t0 = begin;; t0 += TILE) {
        // side by side, as each is a long chain of instructions
        UNROLLED for (int i = 0; i < UNITS; i++) units[i].read(cta.tiles[stage], cta.states[states], at);
        UNROLLED for (int i = 0; i < UNITS; i++) units[i].compute(at);
        UNROLLED for (int i = 0; i < UNITS; i++) units[i].write(cta.channels[buffer]);
        stage = after(stage, STAGES), states = after(states, 3), buffer ^= 1;
        __syncthreads();
        if (t0 > end) break;
    }
}

// `S[o][2 i + j]` is state 8 o + 2 p + j of channel c + 8 i. Calls f(state, offset in memory) for those that exist.
template <class F>
DEVICE void for_states(float (&S)[2][4], i64 left, i64 D, F f) {
    UNROLLED for (int i = 0; i < 2; i++)
        if (8 * i < left)
            UNROLLED for (int o = 0; o < 2; o++)
                UNROLLED for (int j = 0; j < 2; j++) f(S[o][2 * i + j], (8 * o + j) * D + 8 * i);
}

// A consumer's registers and where it finds its factors. Factors are read two pairs ahead and multiplied one ahead, y
// is finished when the next product is under way and stored a pair later, so that nothing waits.
struct Consumer {
    int update, column[2], drive[2], add[2], result[2];  // for even and odd pairs; products of y
    const StateFactors *states;
    const ChannelFactors *channels;
    Element *y;
    Pack<unsigned, 2> decays[2], queries;
    Pack<unsigned, 4> drives[2], factors[2];
    float decay_of[2][4], drive_of[2][4];  // A and B of the next pair
    Floats<2> sums[2], adds[2];
    float step_sizes[2], first[2];
    unsigned transposed[2];

    INLINE Consumer(CtaMemory &cta, const Place &at)
        : states(cta.states), channels(&cta.channels[0][at.warp]), y(&cta.y[2][0][0]), sums(), adds(), step_sizes(),
          first() {
        update = state_slot(at.c, at.p);
        int factor = min(at.p, 2);
        int row = token_of(at.c / 2, at.c % 2) + 1;  // of 8 tokens the one whose y transposition leaves to the lane
        UNROLLED for (int i = 0; i < 2; i++) {
            int t = token_of(at.p, i);
            column[i] = column_slot(i, at.c, at.p), drive[i] = drive_slot(i, at.c, factor);
            add[i] = ((t + 1) * 8 + add_slot(t, at.c)) * 2;
            result[i] = row * CTA_CHANNELS + exchanged(at.warp * 2 + i, row) * 8 + 2 * at.p;
            asm("" : "+r"(column[i]), "+r"(drive[i]), "+r"(add[i]), "+r"(result[i]));
        }
        asm("" : "+r"(update));
    }
    INLINE void read_factors(int pair, int lane) {
        if (pair % 2 == 0) {
            decays[pair / 2 % 2] = load<2>(channels->decay[pair / 2][lane]);
            drives[pair / 2 % 2] = load<4>(channels->drive[pair / 2][drive[pair / 2 % 2]]);
        }
        factors[pair % 2] = load<4>(states->update[pair][update]);
    }
    INLINE void read_queries(int pair) {
        queries = load<2>(states->output[pair][column[pair % 2]]);
    }
    // A and B of a pair, of one octet of states
    INLINE void multiply_factors(int pair, int o) {
        Pack<unsigned, 2> a = decays[pair / 2 % 2];
        Pack<unsigned, 4> b = drives[pair / 2 % 2], of = factors[pair % 2];
        multiply(fp16{}, decay_of[o], a.at[0], a.at[1], of.at[word(pair, o, false)], 1);
        multiply(Element{}, drive_of[o], b.at[2 * (pair % 2)], b.at[2 * (pair % 2) + 1], of.at[word(pair, o, true)], 0);
    }
    // S from before a pair to behind it, while the next pair's A and B are multiplied
    INLINE void advance(float (&S)[2][4], int next_pair) {
        UNROLLED for (int o = 0; o < 2; o++) {
            float decay[4], added[4];
            UNROLLED for (int j = 0; j < 4; j++) decay[j] = decay_of[o][j], added[j] = drive_of[o][j];
            multiply_factors(next_pair, o);
            UNROLLED for (int j = 0; j < 4; j++) S[o][j] = fmaf(decay[j], S[o][j], added[j]);
        }
    }
    // y of the product whose sums are complete; of 8 tokens behind the second
    INLINE void finish(int product) {
        UNROLLED for (int i = 0; i < 2; i++) {
            float y = fmaf(-step_sizes[i], sums[i].at[1], sums[i].at[0] + adds[product].at[i]);
            if (product == 0)
                first[i] = y;
            else
                transposed[i] = transpose(from_floats<Element>(Floats<2>{first[i], y}).word[0]);
        }
    }
    INLINE void write(int eighth) const {
        UNROLLED for (int i = 0; i < 2; i++)
            store(y + 8 * eighth * CTA_CHANNELS + result[i], Pack<Element, 2>{transposed[i]});
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
scan_forward(TOKENS(const Element, x), TOKENS(const Element, logit), TOKENS(const Element, k), TOKENS(const Element, q),
             const float *__restrict__ rates, const float *__restrict__ skips, const float *__restrict__ biases,
             const float *__restrict__ initial_states, Element *__restrict__ y, float *__restrict__ checkpoints, i64 B,
             i64 L, i64 D, i64 reverse, i64 segment_chunks, i64 keep, const Element *__restrict__ step_projs) {
    extern __shared__ __align__(128) char shared[];
    CtaMemory &cta = *reinterpret_cast<CtaMemory *>(shared);

    Cut cut(L, segment_chunks);
    Place at(B, D, cut.segments);
    bool backwards = reverse >> at.g & 1;
    int begin = at.segment * segment_chunks * CHUNK, end = min(L, begin + segment_chunks * CHUNK);
    // what belongs to no pair or is no query's stays zero
    for (int i = threadIdx.x * 16; i < int(sizeof cta.states + sizeof cta.channels); i += THREADS * 16)
        store((float *)((char *)cta.states + i), Floats<4>{});
    __syncthreads();
    if (at.warp >= CONSUMERS) {
        int role = 0, states_before = 0, units_before = 0;
        UNROLLED for (int i = 0; i < PRODUCERS; i++) {
            if (at.warp - CONSUMERS == i) role = ROLE[i];
            if (at.warp - CONSUMERS > i)
                states_before += ROLE[i] == STATE_PRODUCER, units_before += max(ROLE[i], 0);
        }
        if (role == COPIER) {
            Input xs(TOKENS_OF(x), at.g, at.b, L, backwards), logits(TOKENS_OF(logit), at.g, at.b, L, backwards);
            Input ks(TOKENS_OF(k), at.g, at.b, L, backwards), qs(TOKENS_OF(q), at.g, at.b, L, backwards);
            Sequence<Element> ys({y, B * L * D, L * D, D}, at.g, at.b, L, backwards);
            copy_tiles(cta, xs, logits, ks, qs, ys, D, begin, end, at);
        } else if (role == STATE_PRODUCER) {
            produce_states(cta, states_before, begin, end, at);
        } else if (count_of(1) && role == 1) {
            produce_channels<1>(cta, units_before, skips, biases, step_projs, D, begin, end, at);
        } else {
            produce_channels<2>(cta, units_before, skips, biases, step_projs, D, begin, end, at);
        }
        return;
    }

    i64 d = at.cta_d + at.warp * 16 + at.c;
    float *checkpoint = checkpoints + state_offset(at.g, at.b, begin / CHUNK - 1, 2 * at.p, d, B, cut.chunks - 1, D);
    initial_states += state_offset(at.g, at.b, at.segment - 1, 2 * at.p, d, B, cut.segments - 1, D);
    float S[2][4] = {};
    if (at.segment > 0) for_states(S, D - d, D, [&](float &s, i64 offset) { s = initial_states[offset]; });
    int buffer = 0, states_buffer = 0, y_buffer = 2;
    Consumer consumer(cta, at);
    __syncthreads();
    consumer.read_factors(0, at.lane);
    consumer.read_factors(1, at.lane);
    consumer.read_queries(0);
    consumer.multiply_factors(0, 0);
    consumer.multiply_factors(0, 1);
#pragma unroll 1
    for (int t0 = begin; t0 <= end; t0 += TILE) {
        if ((t0 - begin) % CHUNK == 0) {
            if (keep && t0 > 0 && t0 < end)
                for_states(S, D - d, D, [&](float &s, i64 offset) { checkpoint[offset] = s; });
            checkpoint += N * D;
        }
        states_buffer = after(states_buffer, 3), buffer ^= 1;
        const StateFactors *next_states = cta.states + states_buffer;
        const ChannelFactors *next_channels = &cta.channels[buffer][at.warp];
        UNROLLED for (int pair = 0; pair < PAIRS; pair++) {
            Pack<unsigned, 2> query = consumer.queries;
            if (pair + 1 < PAIRS) consumer.read_queries(pair + 1);
            if (pair + 2 < PAIRS) {
                consumer.read_factors(pair + 2, at.lane);
            } else if (t0 + TILE <= end) {
                if (pair + 2 == PAIRS) {
                    // all of this tile is read: while its last pairs are worked on, the next is read
                    __syncthreads();
                    consumer.states = next_states, consumer.channels = next_channels;
                }
                consumer.read_factors(pair + 2 - PAIRS, at.lane);
                if (pair + 1 == PAIRS) consumer.read_queries(0);
            }
            if (pair % 2 == 0) {
                consumer.finish((pair / 2 + 1) % 2);
                UNROLLED for (int i = 0; i < 2; i++) {
                    if (pair % 4 == 0)
                        consumer.adds[i] = load<2>(&consumer.channels->add[2 * pair][0][0] + consumer.add[i]);
                    consumer.step_sizes[i] = unpack(fp16{}, consumer.decays[pair / 2 % 2].at[i]).at[0];
                    consumer.sums[i] = {};
                }
            }
            if (pair % 4 == 1) consumer.write((pair / 4 + EIGHTHS - 1) % EIGHTHS);
            if (pair == 1) y_buffer = after(y_buffer, 3), consumer.y = &cta.y[y_buffer][0][0];
            unsigned s[4];
            UNROLLED for (int o = 0; o < 2; o++)
                UNROLLED for (int i = 0; i < 2; i++) s[2 * o + i] = pack(Element{}, S[o][2 * i], S[o][2 * i + 1]);
            multiply_add(Element{}, consumer.sums, s[0], s[1], s[2], s[3], query.at[0], query.at[1]);
            consumer.advance(S, (pair + 1) % PAIRS);
        }
    }
    consumer.finish(1);
    consumer.write(EIGHTHS - 1);
    __syncthreads();
}
