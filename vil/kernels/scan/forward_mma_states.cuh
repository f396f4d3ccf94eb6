// State producers of forward_mma.cu, which compute operands of states from keys and queries for all channels.

#include "forward_mma_memory.cuh"

// Operands of the states of a tile. Eight lanes compute a pair of tokens, with two states per lane.
// A warp computes 4 pairs of tokens at a time, and then the 4 pairs that are APART pairs later.
struct StateProducer {
    static constexpr int APART = 4 * count_of(STATE_PRODUCER), PASSES = PAIRS / APART;
    static_assert(PAIRS % APART == 0);
    int m, key, decay[2], drive, output[3], norm;  // addresses for the first 4 pairs
    INLINE StateProducer(int warp, const Position &at) {
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
        unsigned q[PASSES][2];  // q[0]: query of the token before the pair
        float norm_of[PASSES][2], kq[PASSES];
        UNROLLED for (int pass = 0; pass < PASSES; pass++)
            UNROLLED for (int odd = 0; odd < 2; odd++) {
                const Element *keys = &tile.keys[2 * APART * pass + odd][0] + key;
                k[pass][odd] = to_floats(load<2>(keys)), q[pass][odd] = load<2>(keys + TILE * N).word[0];
            }
        UNROLLED for (int pass = 0; pass < PASSES; pass++) reduce(k[pass], q[pass][1], norm_of[pass], kq[pass]);
        UNROLLED for (int pass = 0; pass < PASSES; pass++) write(to, pass, k[pass], q[pass], norm_of[pass], kq[pass]);
    }
    // Returns 1 + k.k of both tokens to all 8 lanes, and k_0 . q_0 to lane 1.
    // In each exchange, a lane sends the partial sums that other lanes complete.
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
        float scale[2];
        UNROLLED for (int odd = 0; odd < 2; odd++) scale[odd] = inverse_exponent(norm_of[odd]);
        unsigned *updates = to.update[APART * pass][0];
        float a_0[2];
        UNROLLED for (int j = 0; j < 2; j++) {
            float k_0 = k[0].at[j], k_1 = k[1].at[j], scaled_0 = k_0 * scale[0], scaled_1 = k_1 * scale[1];
            float a_1 = k_1 * scaled_1;
            a_0[j] = k_0 * scaled_0;
            // Slots of adjacent states are 16 words apart.
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

// Loop of the state producer with index `warp`.
DEVICE void produce_states(CtaMemory &cta, int warp, int begin, int end, const Position &at) {
    StateProducer producer(warp, at);
    sync_producers();
    producer.prepare(cta.states[0], cta.tiles[0]);
    producer.prepare(cta.states[1], cta.tiles[1]);
    sync_producers();
    int stage = 1, buffer = 1;
#pragma unroll 1
    for (int t0 = begin; t0 <= end; t0 += TILE) {
        __syncthreads();
        stage = next_stage(stage, STAGES), buffer = next_stage(buffer, 3);
        producer.prepare(cta.states[buffer], cta.tiles[stage]);
    }
    __syncthreads();
}
