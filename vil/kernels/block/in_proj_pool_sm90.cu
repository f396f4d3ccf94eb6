// in_proj, convolutions, SiLU and line means of a pooled block in one kernel, for 16-bit types on Hopper:
//
//   [u z] = xhat in_proj^T      v_g = silu(conv_g(u))      means_g = means of v_g over each line
//   skipped = skip_0 v_0 + skip_1 v_1
//
// u passes through shared memory, and is written to global memory only if the backward pass needs u.
//
// in_proj_pool_sm90.py declares the parameters of the kernel. Macros:
//   INPUT        element type of the tensors: bf16 or fp16
//   WIDTH        model width C: 192 or 384
//   TAPS         length of the convolution's filter, whose last tap reads the current token
//   KEEP         whether to write u
//   STAGES       number of pipeline stages for the weights, with CHUNK columns each
//   SLOTS        number of pipeline stages (slots) for xhat, with CHUNK columns each
//   CTA_BYTES    dynamic shared memory, computed by the host
//
// B images    C columns of xhat    D channels    S pooled tokens: all lines and the class token
// count, length, next, next_line: lines.cuh
//
// Each multiprocessor runs one CTA of 16 warps, which processes one image after another and keeps the image's xhat in
// shared memory. The tile is a buffer in shared memory with u of 64 channels for all tokens.
// docs/kernels/block.md lists the buffers, and cuda/pipeline.cuh the rules of the barriers.
//
//   warps 0 - 3      start products of 64 channels and all tokens, alternately channels of u and of z
//                    While the tensor cores compute z, the warps write u to the tile and, if KEEP, to global memory.
//                    While the tensor cores compute u, the warps store z.
//   warps 4 - 11     compute convolutions, means and skip connections; a warp has up to two lines, a lane two channels
//   warp 12          loads the weights, CHUNK columns per stage
//   warps 14, 15     load xhat, CHUNK columns of all tokens of an image per slot
//
// The products are transposed: a row is a channel, and column t is token t of the line order.
// Rows are permuted by row_of in tiles.cuh, so that after `transposed`, a lane has four adjacent channels.

#include "../cuda/sm90.cuh"
#include "../cuda/pipeline.cuh"
#include "filter.cuh"
#include "lines.cuh"
#include "silu.cuh"
#include "tiles.cuh"

constexpr int C = WIDTH, D = 2 * C;
constexpr int STARTERS = 4, CONVOLVERS = 8, PRODUCERS = 4;  // numbers of warps by task
constexpr int COLUMNS = 200, TILE = 64, STEPS = D / TILE;   // tokens and channels of a product; products of u per image
constexpr int CHUNK = 64, CHUNKS = C / CHUNK;               // columns per chunk; chunks of xhat
constexpr int USES = 2 * CHUNKS / STAGES;                   // number of times that a step uses each stage
constexpr int TOGETHER = 7;                                 // tokens per iteration of a convolution; 14 patches need two
constexpr int AHEAD = 2;                                    // chunks whose products may be in flight after a wait
// Sizes and offsets in shared memory in bytes.
// Between the rows of the tile, 16 bytes are unused, so that eight consecutive rows use different banks.
constexpr int SLOT = COLUMNS * CHUNK * 2, STAGE = TILE * CHUNK * 2, ROW = TILE * 2 + 16;
constexpr int OF_ROWS = COLUMNS * ROW, OF_BARRIERS = OF_ROWS + (COLUMNS + 8) * 2;
constexpr int OF_TOKEN_BARRIERS = OF_BARRIERS + 2 * STAGES * 8;
constexpr int OF_TILE_BARRIERS = OF_TOKEN_BARRIERS + 2 * SLOTS * 8;
constexpr int OF_SLOTS = (OF_TILE_BARRIERS + 2 * 8 + 1023) / 1024 * 1024, OF_STAGES = OF_SLOTS + SLOTS * SLOT;
static_assert(OF_STAGES + STAGES * STAGE == CTA_BYTES && CTA_BYTES <= 227 * 1024);
static_assert(D % TILE == 0 && OF_BARRIERS % 8 == 0 && SLOT % 1024 == 0 && STAGE % 1024 == 0);
static_assert(SLOTS % CHUNKS == 0);  // the slots of an image are adjacent and have the same parity
// The parity of a stage in `multiply` is the same for all images.
static_assert(2 * CHUNKS % STAGES == 0 && (USES == 1 && STEPS % 2 == 0 || USES == 2));
static_assert(COLUMNS / 4 % 4 == 2);  // hand_over stores groups of 4 words, and then 2 words
// The last iteration of a convolution reads up to TOGETHER - 1 tokens after a line, and BACK tokens after them.
// An image has at most COLUMNS - BACK tokens, so these reads may exceed the tile, but not the CTA's shared memory.
static_assert(TOGETHER - 1 - BACK <= 8 && (COLUMNS + TOGETHER - 1) * ROW <= CTA_BYTES);

// Writes the table of rows. rows[t] is the index in memory of token t of the line order, or -1 if there is no token t.
// Also fills columns without tokens with zeros in all slots, so that convolutions read zeros after the last token.
// The zeros remain, because all images have the same number of tokens and produce_tokens copies only tokens.
DEVICE void write_tables(short *rows, unsigned slots, const Lines &lines) {
    for (int i = threadIdx.x; i < COLUMNS + 8; i += blockDim.x) rows[i] = lines.at(i);
    for (int i = threadIdx.x; i < SLOTS * COLUMNS; i += blockDim.x)
        if (i % COLUMNS >= lines.tokens())
            for (int w = 0; w < CHUNK / 2; w++) store_shared(slots + i * CHUNK * 2 + w * 4, 0);
}

// Warps 14 and 15 load xhat of each image, CHUNK columns at a time. Rows in a slot have 128 bytes (CHUNK columns), with
// each 16-byte piece at index piece ^ row % 8. A lane copies 16 bytes of every eighth row.
DEVICE void produce_tokens(Pipeline<SLOTS> tokens, unsigned slots, const Element *xhat, const short *rows, int lane, int L,
                           int images) {
    int first = lane / 8, piece = lane % 8;
    unsigned to_piece = slots + first * CHUNK * 2 + (piece ^ first) * 16;
#pragma unroll 1
    for (int image = blockIdx.x; image < images; image += gridDim.x) {
        const Element *from = xhat + i64(image) * L * C + piece * 8;
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; chunk++, from += CHUNK, tokens.next()) {
            wait_long_for(tokens.empty(), tokens.parity() ^ 1);
            unsigned to = to_piece + tokens.stage() * SLOT;
#pragma unroll 5
            for (int row = first; row < COLUMNS; row += 8, to += 8 * CHUNK * 2)
                if (rows[row] >= 0) copy_16_async(to, from + rows[row] * C);
            arrive_when_copied(tokens.full());
        }
    }
}

// A lane of warp 12 loads CHUNK columns of TILE channels at a time: all columns for channels of u, then all columns for
// the same channels of z, and so on. `tiles` has the same order, and its rows have the layout of slots (see tiled_in).
DEVICE void produce_weights(Pipeline<STAGES> stages, unsigned weights, const Element *tiles, int images) {
#pragma unroll 1
    for (int image = blockIdx.x; image < images; image += gridDim.x)
#pragma unroll 1
        for (int i = 0; i < 2 * STEPS * CHUNKS; i++, stages.next()) {
            wait_long_for(stages.empty(), stages.parity() ^ 1);
            arrive_and_expect(stages.full(), STAGE);
            copy_bulk(weights + stages.stage() * STAGE, tiles + i * (TILE * CHUNK), STAGE, stages.full());
        }
}

// Starts the products of a chunk: sums += weights xhat^T for TILE channels of all tokens, or sums = ... if not `add`.
DEVICE void start(float (&sums)[COLUMNS / 2], SharedRows weights, SharedRows xhat, bool add) {
    hold(sums);
    begin_products();
    UNROLLED for (int k = 0; k < CHUNK; k += 16)
        multiply_rows(Element{}, sums, weights.after(k * 2), xhat.after(k * 2), add || k > 0);
    commit_products();
}

// Returns a pointer that the compiler keeps in registers, so that the address of a token needs only one instruction.
DEVICE Element *in_register(Element *p) {
    asm("" : "+l"(p));
    return p;
}

// Transposes fragments of 16 channels and 8 columns. Returns four adjacent channels of column lane / 4.
DEVICE Pack<Element, 4> transposed(unsigned upper, unsigned lower) { return {transpose(upper), transpose(lower)}; }

// Stores 16 channels of columns 8 j to 8 j + 7. `to` points to the lane's four channels of the image's first token.
DEVICE void store_pair(Element *to, int stride, const short *rows, int j, unsigned upper, unsigned lower, int lane) {
    Pack<Element, 4> four = transposed(upper, lower);
    int row = rows[8 * j + lane / 4];
    store_unless_negative(row, to + i64(row) * stride, four.word[0], four.word[1]);
}

// Rounds the warp's products, and stores the products of part `part` of the columns, which are split into CHUNKS parts.
DEVICE void store_products(const float (&sums)[COLUMNS / 2], Element *to, int stride, const short *rows, int part, int lane) {
    UNROLLED for (int j = 0; j < COLUMNS / 8; j++) {
        if (j * CHUNKS / (COLUMNS / 8) != part) continue;
        unsigned upper = pack(Element{}, sums[4 * j], sums[4 * j + 1]);
        store_pair(to, stride, rows, j, upper, pack(Element{}, sums[4 * j + 2], sums[4 * j + 3]), lane);
    }
}

// Values of two channels. `Stored` is the type of u in the tile.
template <class T>
struct Two {
    typedef T Stored;
    Floats<2> two;
    INLINE Two(float a = 0, float b = 0) : two{a, b} {}
    INLINE static Two stored(unsigned word) {
        Floats<2> f = unpack(T{}, word);
        return {f.at[0], f.at[1]};
    }
    INLINE Floats<2> floats() const { return two; }
    INLINE Two silu_of_half() const {
        return {::silu_of_half(T{}, two.at[0]), ::silu_of_half(T{}, two.at[1])};
    }
    INLINE Two times(Two a, Two b) const {
        return {fmaf(two.at[0], a.two.at[0], b.two.at[0]), fmaf(two.at[1], a.two.at[1], b.two.at[1])};
    }
};
// For results in bf16, fp16 is precise enough, and an instruction computes two channels. Values above 65504 overflow.
template <>
struct Two<bf16> {
    typedef fp16 Stored;
    Halves two;
    INLINE Two(float a = 0, float b = 0) : two(halves(a, b)) {}
    INLINE Two(Halves h) : two(h) {}
    INLINE static Two stored(unsigned word) { return Halves{word}; }
    INLINE Floats<2> floats() const { return to_floats(two); }
    INLINE Two silu_of_half() const { return multiply_add(two, tanh_fast(two), two); }
    INLINE Two times(Two a, Two b) const { return multiply_add(two, a.two, b.two); }
};
typedef Two<Element> Pair;

// Rounds and transposes a warp's 16 rows of products, and writes the products to the tile, which has a row per token.
DEVICE void hand_over(const float (&sums)[COLUMNS / 2], unsigned tile, int warp, int lane) {
    unsigned to = tile + (lane / 16 * 8 + lane % 8) * ROW + (warp * 2 + lane / 8 % 2) * 16;
    unsigned m[COLUMNS / 4];
    UNROLLED for (int i = 0; i < COLUMNS / 4; i++) m[i] = pack(Pair::Stored{}, sums[2 * i], sums[2 * i + 1]);
    UNROLLED for (int i = 0; i + 4 <= COLUMNS / 4; i += 4)
        store_transposed(to + i / 2 * 8 * ROW, m[i], m[i + 1], m[i + 2], m[i + 3]);
    store_transposed(to + (COLUMNS - 8) * ROW, m[COLUMNS / 4 - 2], m[COLUMNS / 4 - 1]);
}
// Filters of both directions of two channels, halved as silu_of_half requires, and weights of the skip connections.
struct Channels {
    Pair filter[2][TAPS], bias[2], skip[2];
    INLINE Channels(const float *weights, const float *biases, const float *skips, int d) {
        UNROLLED for (int g = 0; g < 2; g++, weights += D * TAPS, biases += D, skips += D) {
            const Filter<2> of(weights, biases, d);
            UNROLLED for (int tap = 0; tap < TAPS; tap++)
                filter[g][tap] = {0.5f * of.weight[tap][0], 0.5f * of.weight[tap][1]};
            bias[g] = {0.5f * of.bias.at[0], 0.5f * of.bias.at[1]};
            Floats<2> two = load<2>(skips + d);
            skip[g] = {two.at[0], two.at[1]};
        }
    }
};

// Convolutions of one line and two channels.
struct Convolution {
    static constexpr int WORDS = ROW / 4;  // distance between adjacent tokens in the tile, in 32-bit words
    const Channels &channels;
    Element *skipped;  // points to the lane's channels of the image's first token in memory
    Pair window[TOGETHER + 2 * BACK];  // u of TOGETHER tokens, and of BACK tokens before and after
    Floats<2> sum_0 = {}, sum_1 = {};
    // `here` points to token t, the line's first token, in the tile. Tokens before token 0 are zero.
    INLINE Convolution(const Channels &channels, const unsigned *here, int t, Element *skipped)
        : channels(channels), skipped(in_register(skipped)) {
        UNROLLED for (int i = -BACK; i < BACK; i++)
            window[BACK + i] = t + i < 0 ? Pair() : Pair::stored(here[i * WORDS]);
    }
    // Computes v of TOGETHER tokens, writes skipped, and adds v to the sums.
    // `left` and `foreign` count from `here`. Tokens after `left` and token `foreign` do not belong to the line.
    // Results of tokens that do not belong to the line are neither stored nor added.
    INLINE void next(const unsigned *here, const short *rows, int left, int foreign) {
        int row[TOGETHER];
        UNROLLED for (int i = 0; i < TOGETHER; i++) {
            window[2 * BACK + i] = Pair::stored(here[(BACK + i) * WORDS]);
            row[i] = rows[i];
        }
        Pair some_0, some_1;
        const Pair one(1, 1);
        UNROLLED for (int i = 0; i < TOGETHER; i++) {
            Pair v_0 = channels.bias[0], v_1 = channels.bias[1];
            UNROLLED for (int tap = 0; tap < TAPS; tap++) {
                v_0 = channels.filter[0][tap].times(window[i + tap], v_0);
                v_1 = channels.filter[1][tap].times(window[i + 2 * BACK - tap], v_1);
            }
            v_0 = v_0.silu_of_half(), v_1 = v_1.silu_of_half();
            Pair both = channels.skip[0].times(v_0, channels.skip[1].times(v_1, Pair()));
            Element *to = skipped + i64(row[i]) * D;
            Pack<Element, 2> of_skipped = from_floats<Element>(both.floats());
            if (i <= left && i != foreign) {
                some_0 = v_0.times(one, some_0), some_1 = v_1.times(one, some_1);
                store(to, of_skipped);
            }
        }
        sum_0 = sum_0 + some_0.floats(), sum_1 = sum_1 + some_1.floats();
        UNROLLED for (int i = 0; i < 2 * BACK; i++) window[i] = window[i + TOGETHER];
    }
};

// Computes v of a line for two channels, and writes the means of both directions and skipped.
// `tile` points to token 0 in the tile. `means` points to the image's first pooled token in direction 0.
DEVICE void convolve(const Channels &channels, const unsigned *tile, int pooled, const Lines &lines, const short *rows,
                     Element *skipped, Element *means, i64 of_direction) {
    int first = lines.first(pooled), last = lines.last(pooled), foreign = pooled == lines.class_token() ? -1 : lines.center();
    Convolution line(channels, tile + first * Convolution::WORDS, first, skipped);
#pragma unroll 1
    for (int t = first; t <= last; t += TOGETHER)
        line.next(tile + t * Convolution::WORDS, rows + t, last - t, foreign - t);
    float share = lines.share(pooled);
    UNROLLED for (int c = 0; c < 2; c++) line.sum_0.at[c] *= share, line.sum_1.at[c] *= share;
    store(means + pooled * D, from_floats<Element>(line.sum_0));
    store(means + of_direction + pooled * D, from_floats<Element>(line.sum_1));
}

// Products of u and z, which the first four warps compute. The mbarriers of a chunk are compile-time constants.
struct Products {
    float u[COLUMNS / 2], z[COLUMNS / 2];
    Element *to_z = nullptr;  // destination of z that is not stored yet, or null
    const unsigned tile, full, empty;
    const SharedRows weights;
    Pipeline<1> handed;
    const short *rows;
    const int warp, lane;
    INLINE Products(unsigned tile, unsigned weights, Pipeline<1> handed, const short *rows, int warp, int lane)
        : tile(tile), full(tile + OF_BARRIERS), empty(full + STAGES * 8), weights(weights), handed(handed), rows(rows),
          warp(warp), lane(lane) {}
    INLINE void store_z(int part) { store_products(z, to_z, 2 * D, rows, part, lane); }
    // Stores the next part of u after each start of products of z. Parts without such a start are stored with the first.
    INLINE void store_u(Element *to, int chunk) {
        UNROLLED for (int part = chunk < AHEAD ? 0 : chunk; part <= chunk; part++) store_products(u, to, 2 * D, rows, part, lane);
    }
    INLINE void hand_over_u() {
        hold(u);
        wait_long_for(handed.empty(), handed.parity() ^ 1);
        hand_over(u, tile, warp, lane);
        __syncwarp();
        if (lane == 0) arrive(handed.full());
        handed.next();
    }
    // Releases the stage of chunk i of a step and, in the last step, the slot of xhat after its last use.
    INLINE void release(int i, bool last, unsigned xhat_empty) {
        if (lane == 0) {
            arrive(empty + i % STAGES * 8);
            if (last && i >= CHUNKS) arrive(xhat_empty + (i - CHUNKS) * 8);
        }
    }
    // Computes u and z of image `image`. `uz` points to the first image.
    // When a warp has started the products of chunk i and has waited, the products of chunk i - AHEAD have finished.
    INLINE void multiply(Pipeline<SLOTS> tokens, unsigned slots, Element *uz, int image, int L) {
        unsigned xhat_full = tokens.full(), xhat_empty = tokens.empty();
        const SharedRows xhat = slots + tokens.stage() * SLOT;
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            Element *to_u = uz + (i64(image) * L * (2 * D) + step * TILE + warp * 16 + lane % 4 * 4);
            UNROLLED for (int i = 0; i < 2 * CHUNKS; i++) {
                int chunk = i % CHUNKS, stage = i % STAGES, parity = USES == 2 ? i / STAGES : step % 2;
                if (i < CHUNKS && step == 0) {
                    wait_long_for(xhat_full + chunk * 8, tokens.parity());
                    show_to_products();
                }
                wait_long_for(full + stage * 8, parity);
                start(i < CHUNKS ? u : z, weights.after(stage * STAGE), xhat.after(chunk * SLOT), chunk > 0);
                if (i == 0)
                    wait_for_products<1>();  // tells the compiler that the products of z have finished
                else
                    wait_for_products<AHEAD>();
                if (i >= AHEAD) release(i - AHEAD, step == STEPS - 1, xhat_empty);
                if (i == CHUNKS + AHEAD - 1) hand_over_u();
                if (KEEP && i >= CHUNKS + AHEAD - 1) store_u(to_u, chunk);
                if (i < CHUNKS && to_z) store_z(chunk);
            }
            wait_for_products<0>();
            hold(z);
            UNROLLED for (int i = 2 * CHUNKS - AHEAD; i < 2 * CHUNKS; i++) release(i, step == STEPS - 1, xhat_empty);
            to_z = in_register(to_u + D);
        }
    }
};

// A row of uz contains u and then z of a token. u is written only if KEEP.
extern "C" __global__ void __launch_bounds__(32 * (STARTERS + CONVOLVERS + PRODUCERS), 1) in_proj_pool(PARAMETERS_in_proj_pool) {
    begin_kernel();
    extern __shared__ __align__(1024) char shared[];
    unsigned tile = shared_address(shared), slots = tile + OF_SLOTS, weights = tile + OF_STAGES;
    short *rows = (short *)(shared + OF_ROWS);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Lines lines = {int(count), int(length), int(next), int(next_line)};
    Pipeline<STAGES> stages(tile + OF_BARRIERS);
    Pipeline<SLOTS> tokens(tile + OF_TOKEN_BARRIERS);
    Pipeline<1> handed(tile + OF_TILE_BARRIERS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) init_barrier(stages.barriers + i * 8, i / STAGES ? STARTERS : 1);
        for (int i = 0; i < 2 * SLOTS; i++) init_barrier(tokens.barriers + i * 8, i / SLOTS ? STARTERS : 64);
        init_barrier(handed.full(), STARTERS), init_barrier(handed.empty(), CONVOLVERS);
        publish_barriers();
    }
    write_tables(rows, slots, lines);
    show_to_products();
    __syncthreads();

    if (warp >= STARTERS + CONVOLVERS) {
        give_registers<24>();
        warp -= STARTERS + CONVOLVERS;
        if (warp == 0 && lane == 0) produce_weights(stages, weights, tiles, B);
        if (warp >= 2) produce_tokens(tokens, slots, xhat, rows, threadIdx.x % 64, lines.tokens(), B);
        wait_for_all_copies();
        return;
    }
    if (warp >= STARTERS) {
        give_registers<112>();
        const unsigned *of_lane = (const unsigned *)shared + lane;
        int channel = lane / 8 * 16 + lane % 4 * 4 + lane / 4 % 2 * 2, pair = warp - STARTERS;  // pair of lines
        i64 L = lines.tokens(), S = count + 1;
#pragma unroll 1
        for (int image = blockIdx.x; image < B; image += gridDim.x)
#pragma unroll 1
            for (int d = channel; d < D; d += TILE, handed.next(), pair = (pair + 1) % CONVOLVERS) {
                const Channels channels(filters, biases, skip, d);
                wait_long_for(handed.full(), handed.parity());
#pragma unroll 1
                for (int pooled = 2 * pair; pooled < 2 * pair + 2 && pooled < S; pooled++)
                    convolve(channels, of_lane, pooled, lines, rows, skipped + (image * L * D + d),
                             means + (image * S * D + d), B * S * D);
                __syncwarp();
                if (lane == 0) arrive(handed.empty());
            }
        return;
    }

    take_registers<256>();
    Products products(tile, weights, handed, rows, warp, lane);
#pragma unroll 1
    for (int image = blockIdx.x; image < B; image += gridDim.x) {
        products.multiply(tokens, slots, uz, image, lines.tokens());
        UNROLLED for (int chunk = 0; chunk < CHUNKS; chunk++) tokens.next();
    }
    UNROLLED for (int part = 0; part < CHUNKS; part++) products.store_z(part);
}
