// Consumer warps of forward_mma.cu, which run the recurrence of 16 channels two tokens at a time.

#include "forward_mma_memory.cuh"

// States of a lane in the layout of a product's sums: S[o][2 i + j] is state 8 o + 2 p + j of channel c + 8 i.
typedef float PairStates[2][4];

// Calls f(state, offset in memory) for existing channels. `left` is the number of existing channels from channel c on.
template <class F>
DEVICE void for_states(PairStates &S, i64 left, i64 D, F f) {
    UNROLLED for (int i = 0; i < 2; i++)
        if (8 * i < left)
            UNROLLED for (int o = 0; o < 2; o++)
                UNROLLED for (int j = 0; j < 2; j++) f(S[o][2 * i + j], (8 * o + j) * D + 8 * i);
}

// Registers of a consumer, and the addresses of its operands.
// Operands are loaded two pairs ahead and multiplied one pair ahead, so that no instruction waits.
// y is computed while the next product runs, and stored one pair later.
struct Consumer {
    // The index of an address is the parity of the pair (column) or of the quad (drive), the product of y (add), or the
    // octet of channels (result).
    int update, column[2], drive[2], add[2], result[2];
    const StateFactors *states;
    const ChannelFactors *channels;
    Element *y;
    Pack<unsigned, 2> decays[2], queries;
    Pack<unsigned, 4> drives[2], factors[2];
    float decay_of[2][4], drive_of[2][4];  // A and B of the next pair of tokens
    Floats<2> sums[2], adds[2];
    float step_sizes[2], first[2];
    unsigned transposed[2];

    INLINE Consumer(CtaMemory &cta, const Position &at)
        : states(cta.states), channels(&cta.channels[0][at.warp]), y(&cta.y[2][0][0]), sums(), adds(), step_sizes(),
          first() {
        update = state_slot(at.c, at.p);
        int factor = min(at.p, 2);
        // Index, among 8 tokens, of the token whose y the lane has after the transposition.
        int row = token_of(at.c / 2, at.c % 2) + 1;
        UNROLLED for (int i = 0; i < 2; i++) {
            int t = token_of(at.p, i);
            column[i] = column_slot(i, at.c, at.p), drive[i] = drive_slot(i, at.c, factor);
            add[i] = ((t + 1) * 8 + add_slot(t, at.c)) * 2;
            result[i] = row * CTA_CHANNELS + swizzled(at.warp * 2 + i, row) * 8 + 2 * at.p;
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
    // Computes A and B of a pair of tokens for one octet of states.
    INLINE void multiply_factors(int pair, int o) {
        Pack<unsigned, 2> a = decays[pair / 2 % 2];
        Pack<unsigned, 4> b = drives[pair / 2 % 2], of = factors[pair % 2];
        multiply(fp16{}, decay_of[o], a.at[0], a.at[1], of.at[word(pair, o, false)], 1);
        multiply(Element{}, drive_of[o], b.at[2 * (pair % 2)], b.at[2 * (pair % 2) + 1], of.at[word(pair, o, true)], 0);
    }
    // Prepares the operands that the loop needs for the first pairs.
    INLINE void fill_pipeline(int lane) {
        read_factors(0, lane);
        read_factors(1, lane);
        read_queries(0);
        multiply_factors(0, 0);
        multiply_factors(0, 1);
    }
    // Advances S by a pair of tokens, while tensor cores compute A and B of the next pair.
    INLINE void advance(PairStates &S, int next_pair) {
        UNROLLED for (int o = 0; o < 2; o++) {
            float decay[4], added[4];
            UNROLLED for (int j = 0; j < 4; j++) decay[j] = decay_of[o][j], added[j] = drive_of[o][j];
            multiply_factors(next_pair, o);
            UNROLLED for (int j = 0; j < 4; j++) S[o][j] = fmaf(decay[j], S[o][j], added[j]);
        }
    }
    // Starts the sums of a product of states and queries, which two pairs share.
    INLINE void begin_product(int pair) {
        UNROLLED for (int i = 0; i < 2; i++) {
            if (pair % 4 == 0) adds[i] = load<2>(&channels->add[2 * pair][0][0] + add[i]);
            step_sizes[i] = unpack(fp16{}, decays[pair / 2 % 2].at[i]).at[0];
            sums[i] = {};
        }
    }
    INLINE void multiply_queries(const PairStates &S, const Pack<unsigned, 2> &query) {
        unsigned s[4];
        UNROLLED for (int o = 0; o < 2; o++)
            UNROLLED for (int i = 0; i < 2; i++) s[2 * o + i] = pack(Element{}, S[o][2 * i], S[o][2 * i + 1]);
        multiply_add(Element{}, sums, s[0], s[1], s[2], s[3], query.at[0], query.at[1]);
    }
    // Computes y from the completed sums of a product. After product 1, y of 8 tokens is complete.
    INLINE void finish_product(int product) {
        UNROLLED for (int i = 0; i < 2; i++) {
            float y = fmaf(-step_sizes[i], sums[i].at[1], sums[i].at[0] + adds[product].at[i]);
            if (product == 0)
                first[i] = y;
            else
                transposed[i] = transpose(from_floats<Element>(Floats<2>{first[i], y}).word[0]);
        }
    }
    INLINE void write(int span) const {
        UNROLLED for (int i = 0; i < 2; i++)
            store(y + 8 * span * CTA_CHANNELS + result[i], Pack<Element, 2>{transposed[i]});
    }
};

// Loop of a consumer, which starts with state S at token `begin`, and calls `at_chunk(S, t)` before each chunk.
template <class AtChunk>
DEVICE void consume(CtaMemory &cta, PairStates &S, int begin, int end, const Position &at, AtChunk at_chunk) {
    Consumer consumer(cta, at);
    int buffer = 0, states_buffer = 0, y_buffer = 2;
    __syncthreads();
    consumer.fill_pipeline(at.lane);
#pragma unroll 1
    for (int t0 = begin; t0 <= end; t0 += TILE) {
        if ((t0 - begin) % CHUNK == 0) at_chunk(S, t0);
        states_buffer = next_stage(states_buffer, 3), buffer ^= 1;
        const StateFactors *next_states = cta.states + states_buffer;
        const ChannelFactors *next_channels = &cta.channels[buffer][at.warp];
        UNROLLED for (int pair = 0; pair < PAIRS; pair++) {
            Pack<unsigned, 2> query = consumer.queries;
            if (pair + 1 < PAIRS) consumer.read_queries(pair + 1);
            if (pair + 2 < PAIRS) {
                consumer.read_factors(pair + 2, at.lane);
            } else if (t0 + TILE <= end) {
                if (pair + 2 == PAIRS) {
                    // this tile is fully loaded; its last pairs run while the next tile is loaded
                    __syncthreads();
                    consumer.states = next_states, consumer.channels = next_channels;
                }
                consumer.read_factors(pair + 2 - PAIRS, at.lane);
                if (pair + 1 == PAIRS) consumer.read_queries(0);
            }
            if (pair % 2 == 0) {
                consumer.finish_product((pair / 2 + 1) % 2);
                consumer.begin_product(pair);
            }
            if (pair % 4 == 1) consumer.write((pair / 4 + SPANS - 1) % SPANS);
            if (pair == 1) y_buffer = next_stage(y_buffer, 3), consumer.y = &cta.y[y_buffer][0][0];
            consumer.multiply_queries(S, query);
            consumer.advance(S, (pair + 1) % PAIRS);
        }
    }
    consumer.finish_product(1);
    consumer.write(SPANS - 1);
    __syncthreads();
}
