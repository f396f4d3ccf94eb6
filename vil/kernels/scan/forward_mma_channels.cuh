// Channel producers of forward_mma.cu, which compute operands of channels from x, step logits (or steps) and norms.

#include "forward_mma_memory.cuh"

// Operands of 8 tokens (a span of the tile) and a consumer's channels.
// Lane (c, p) computes pair p of the span for channels c and c + 8.
struct ChannelProducer {
    // Number of octets of the step's columns, and number of loads of 4 octets.
    static constexpr int RANK_OCTETS = RANK / 8, LOADS = (RANK_OCTETS + 3) / 4;
    // Addresses and values of the lane. `last` is the term of y of the last token before the tile.
    // `weights` are columns 2 p and 2 p + 1 of each octet of step_proj, for channels c and c + 8.
    int consumer, span, from, decay[2], drive[3], add[2];
    float skip[2], bias[2], last[2];
    unsigned weights[RANK_OCTETS + 1][2];
    // Inputs of a tile (x and step logits of channels c and c + 8, or the step), and operands to be written.
    unsigned values[RANK ? 2 : 4], step[LOADS + 1][4];
    Floats<4> norm;
    float kq;
    Pack<unsigned, 2> decays[2], drives[3];
    Floats<2> first, second;

    INLINE void begin(int unit, const float *skip_of, const float *bias_of, const Element *step_proj, i64 D,
                      const Position &at) {
        consumer = unit / SPANS, span = unit % SPANS;
        int row = 8 * span + at.lane % 8, pair = 4 * span + at.p, quad = pair / 2;
        int octet = swizzled(2 * consumer + at.lane / 8 % 2, row);
        from = ((RANK ? 0 : at.lane / 16 * TILE) + row) * CTA_CHANNELS + octet * 8;
        UNROLLED for (int f = 0; f < 2; f++) decay[f] = (quad * 32 + at.c * 4 + (at.p + 2 * f) % 4) * 2;
        UNROLLED for (int f = 0; f < 3; f++)
            drive[f] = (quad * 32 + drive_slot(quad, at.c, f)) * 4 + pair % 2 * 2;
        UNROLLED for (int odd = 0; odd < 2; odd++) {
            // The last token of the tile is in the first row of the next tile.
            int row = (2 * pair + odd + 1) % TILE;
            add[odd] = (row * 8 + add_slot(2 * pair + odd, at.c)) * 2;
        }
        asm("" : "+r"(from), "+r"(decay[0]), "+r"(decay[1]), "+r"(drive[0]), "+r"(drive[1]), "+r"(drive[2]),
            "+r"(add[0]), "+r"(add[1]));
        i64 d = at.cta_d + 16 * consumer + at.c;
        UNROLLED for (int i = 0; i < 2; i++) {
            bool exists = d + 8 * i < D;
            skip[i] = exists && skip_of ? skip_of[at.g * D + d + 8 * i] : 0;
            bias[i] = exists && bias_of ? -LOG2E * bias_of[at.g * D + d + 8 * i] : 0;
            last[i] = 0;
            UNROLLED for (int e = 0; e < RANK_OCTETS; e++)
                weights[e][i] =
                    exists ? load<2>(step_proj + (at.g * D + d + 8 * i) * RANK + 8 * e + 2 * at.p).word[0] : 0;
        }
    }
    INLINE void read(const Tile &tile, const StateFactors &states, const Position &at) {
        load_transposed(values, &tile.x[0][0] + from);
        UNROLLED for (int e = 0; e < LOADS; e++) {
            int octet = min(4 * e + at.lane / 8, RANK_OCTETS - 1);
            load_matrices(step[e], &tile.step_logits[8 * span + at.lane % 8][octet * 8]);
        }
        norm = load<4>(states.norm[4 * span + at.p]), kq = states.norm[4 * span + at.p][4];
    }
    // Returns the step size divided by `scale`, because `norm` is `scale` times 1 + k.k.
    DEVICE float step_size(float step_logit, float bias, float norm, float scale) {
        return reciprocal(fmaf(exp2_fast(fmaf(-LOG2E, step_logit, bias)), scale, norm));
    }
    // Computes step_logits (16 channels, 8 tokens) = step_proj (16 channels, RANK) times the transposed step.
    INLINE void project(Floats<2> (&step_logits)[2]) const {
        if constexpr (RANK_OCTETS % 2) {
            float product[4];
            multiply(Element{}, product, weights[RANK_OCTETS - 1][0], weights[RANK_OCTETS - 1][1],
                     step[RANK_OCTETS / 4][(RANK_OCTETS - 1) % 4]);
            UNROLLED for (int i = 0; i < 2; i++) step_logits[i] = {product[2 * i], product[2 * i + 1]};
        }
        UNROLLED for (int e = 0; e + 1 < RANK_OCTETS; e += 2)
            multiply_add(Element{}, step_logits, weights[e][0], weights[e][1], weights[e + 1][0], weights[e + 1][1],
                         step[e / 4][e % 4], step[e / 4][e % 4 + 1]);
    }
    INLINE void compute(const Position &at) {
        Floats<2> step_logits[2] = {};
        if constexpr (RANK) {
            project(step_logits);
        } else {
            UNROLLED for (int i = 0; i < 2; i++) step_logits[i] = unpack(Element{}, values[2 + i]);
        }
        UNROLLED for (int i = 0; i < 2; i++) {
            Floats<2> x = unpack(Element{}, values[i]), step_logit = step_logits[i];
            float e_0 = step_size(step_logit.at[0], bias[i], norm.at[0], norm.at[1]);
            float e_1 = step_size(step_logit.at[1], bias[i], norm.at[2], norm.at[3]);
            float v_0 = e_0 * x.at[0], v_1 = e_1 * x.at[1];
            decays[0].at[i] = pack(fp16{}, e_0, e_1);
            decays[1].at[i] = pack(fp16{}, e_0 * e_1, 0);
            drives[0].at[i] = pack(Element{}, v_0, v_1);
            Floats<2> high = unpack(Element{}, drives[0].at[i]);
            drives[1].at[i] = pack(Element{}, v_0 - high.at[0], v_1 - high.at[1]);
            drives[2].at[i] = pack(Element{}, e_1 * v_0, 0);
            first.at[i] = fmaf(v_0, kq, skip[i] * x.at[0]), second.at[i] = skip[i] * x.at[1];
        }
        if (span == SPANS - 1 && at.p == 3) {
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

// Loop of a channel producer with UNITS units, starting with unit `first`.
template <int UNITS>
DEVICE void produce_channels(CtaMemory &cta, int first, const float *skip, const float *step_bias,
                             const Element *step_proj, i64 D, int begin, int end, const Position &at) {
    ChannelProducer units[UNITS];
    UNROLLED for (int i = 0; i < UNITS; i++) units[i].begin(first + i, skip, step_bias, step_proj, D, at);
    sync_producers();
    sync_producers();
    int stage = 0, states = 0, buffer = 0;
#pragma unroll 1
    for (int t0 = begin;; t0 += TILE) {
        // Units are interleaved, because each unit is a long chain of dependent instructions.
        UNROLLED for (int i = 0; i < UNITS; i++) units[i].read(cta.tiles[stage], cta.states[states], at);
        UNROLLED for (int i = 0; i < UNITS; i++) units[i].compute(at);
        UNROLLED for (int i = 0; i < UNITS; i++) units[i].write(cta.channels[buffer]);
        stage = next_stage(stage, STAGES), states = next_stage(states, 3), buffer ^= 1;
        __syncthreads();
        if (t0 > end) break;
    }
}
