// Sums of backward.cu over channels and states, from the lanes' partial sums in shared memory to gradients of tokens.

#include "backward_tiles.cuh"

DEVICE float sum_over_groups(float v) {
    UNROLLED for (int bit = 1; bit < GROUPS; bit *= 2) v += __shfl_xor_sync(WARP, v, group_distance(bit));
    return v;
}
DEVICE float sum_over_parts(float v) {
    UNROLLED for (int bit = 1; bit < PARTS; bit *= 2) v += __shfl_xor_sync(WARP, v, part_distance(bit));
    return v;
}

// dskip and dstep_bias of the lane's channels, summed over tokens.
struct ChannelSums {
    Floats<DL> skip, bias;
};

// Destinations of the gradients of a sequence: dx, dstep_logits, and the CTA's partial sums of dk and dq.
struct Gradients {
    Sequence<Element> x, step_logits;
    Sequence<float> keys;
};

// Computes dq or dk of half a tile over the warp's channels, from the sums over each lane's channels.
// A lane adds 4 states of a token. If lanes would be idle, several lanes share the groups of a sum.
DEVICE void finish_keys(WarpMemory &warp, bool is_query, int first, int buffer, const Position &at) {
    constexpr int SUMS = HALF * PARTS, SHARE = SUMS < 32 ? 32 / SUMS : 1;
    UNROLLED for (int base = 0; base < SUMS; base += 32) {
        int item = base + at.lane % (32 / SHARE), j = item / PARTS, part = item % PARTS, group = at.lane * SHARE / 32;
        const float *parts = &warp.channel_sums[j][part * PART_SUMS + 4 * (group * (GROUPS / SHARE))];
        Floats<4> sum = load<4>(parts);
        UNROLLED for (int i = 1; i < GROUPS / SHARE; i++) sum = sum + load<4>(parts + 4 * i);
        UNROLLED for (int n = 0; n < 4; n++)
            UNROLLED for (int distance = 32 / SHARE; distance < 32; distance *= 2)
                sum.at[n] += __shfl_xor_sync(WARP, sum.at[n], distance);
        if (group == 0) store(&warp.dkeys[buffer][first + j][is_query][4 * part], sum);
    }
}

// Computes dx and dstep_logits of half a tile, from the sums over each lane's states.
// Computes dL/d(k.k) over the warp's channels, too, for `write_keys`. A lane computes its channels of one token.
DEVICE void finish_channels(const Tile &tile, int first, int buffer, const Gradients &to, int t0, int tokens,
                            ChannelSums &sums, const Position &at) {
    WarpMemory &warp = tile.warp;
    Floats<DL> skip = load<DL>(&warp.skip[at.c]);
    UNROLLED for (int base = 0; base < HALF; base += PARTS) {
        int half_token = base + at.part, j = first + half_token;
        float norm = 0;
        if (HALF % PARTS == 0 || half_token < HALF) {
            Floats<DL> x = to_floats(load<DL>(&tile.channels.x[j][at.c]));
            Floats<DL> step_size = load<DL>(&warp.step_size[j][at.c]);
            Floats<DL> dy = to_floats(load<DL>(&tile.channels.dy[j][at.c])), slope = load<DL>(&warp.slope[j][at.c]);
            const float *parts_x = &warp.state_sums[0][half_token][at.c];
            const float *parts_step_size = &warp.state_sums[1][half_token][at.c];
            Floats<DL> sum_x = load<DL>(parts_x), sum_step_size = load<DL>(parts_step_size), dx, dstep_logit;
            UNROLLED for (int part = 1; part < PARTS; part++) {
                sum_x = sum_x + load<DL>(parts_x + part * ROW);
                sum_step_size = sum_step_size + load<DL>(parts_step_size + part * ROW);
            }
            UNROLLED for (int c = 0; c < DL; c++) {
                dx.at[c] = fmaf(skip.at[c], dy.at[c], Recurrence::dx(sum_x.at[c], step_size.at[c]));
                dstep_logit.at[c] = Recurrence::dstep_logit(sum_x.at[c], sum_step_size.at[c], x.at[c], slope.at[c]);
                norm += Recurrence::dnorm(sum_step_size.at[c], step_size.at[c]);
                sums.skip.at[c] = fmaf(dy.at[c], x.at[c], sums.skip.at[c]);
                sums.bias.at[c] += dstep_logit.at[c];
            }
            if (at.valid && j < tokens) {
                store(to.x.at(t0 + j) + at.d, from_floats<Element>(dx));
                store(to.step_logits.at(t0 + j) + at.d, from_floats<Element>(dstep_logit));
            }
        }
        if (Recurrence::HAS_NORM) {
            norm = sum_over_groups(norm);
            if (at.group == 0 && half_token < HALF) warp.norm[buffer][j] = norm;
        }
    }
}

// Writes dk and dq of a tile over the CTA's channels, with one 16-byte store for 4 states.
DEVICE void write_keys(const CtaMemory &cta, int buffer, const Sequence<float> &dkeys, int tile_start, int t0,
                       int tokens) {
    UNROLLED for (int base = 0; base < TILE * 2 * KEY_VECTORS; base += 32 * WARPS) {
        int i = base + threadIdx.x, token = i / (2 * KEY_VECTORS);
        bool is_query = i / KEY_VECTORS % 2;
        if (token >= tokens) break;
        Floats<4> sum = load<4>(&cta.warps[0].dkeys[buffer][0][0][0] + 4 * i);
        UNROLLED for (int w = 1; w < WARPS; w++) sum = sum + load<4>(&cta.warps[w].dkeys[buffer][0][0][0] + 4 * i);
        if (Recurrence::HAS_NORM && !is_query) {
            Floats<4> k = load<4>(&cta.keys.k[tile_start + token][4 * (i % KEY_VECTORS)]);
            float norm = cta.warps[0].norm[buffer][token];
            UNROLLED for (int w = 1; w < WARPS; w++) norm += cta.warps[w].norm[buffer][token];
            UNROLLED for (int n = 0; n < 4; n++) sum.at[n] = fmaf(2 * k.at[n], norm, sum.at[n]);
        }
        store(dkeys.at(t0 + token) + i % (2 * KEY_VECTORS) * 4, sum);
    }
}
