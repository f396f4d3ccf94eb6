"""Bugs planted into the CUDA sources one at a time; the emulated tests should notice each: `make cuda-mutants`.

python tests/cuda_mutants.py [--jobs 2] [word ...]  # those whose file or description has one of the words
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import emulator
import pytest
from vil.kernels.cuda import compiler

LIMIT = 600  # seconds; a kernel that never ends is noticed too
SCAN, BLOCK = ["tests/test_cuda.py"], ["tests/test_block_kernels.py", "tests/test_block.py"]
TESTS = {"types.cuh": SCAN + BLOCK, "common.cuh": SCAN, "lanes.cuh": SCAN, "forward.cu": SCAN, "quads.cu": SCAN}
TESTS |= {"pairs.cu": SCAN, "summary.cu": SCAN, "summary_triples.cu": SCAN, "backward.cu": SCAN}


class Mutant(NamedTuple):
    file: str
    before: str  # which the file has once
    after: str
    shows: str  # what it does to a result


MUTANTS = [
    Mutant(
        "types.cuh",
        "*shared = valid ? *global : T{};",
        "*shared = *global;",
        "odd channels: what lies behind the last token or channel is read",
    ),
    Mutant(
        "types.cuh",
        "__uint_as_float(word & 0xffff0000u)}",
        "__uint_as_float(word)}",
        "every other bf16 value has its neighbour's bits behind its own",
    ),
    Mutant(
        "types.cuh",
        "unpack(T{}, v.at[0].bits).at[0]",
        "unpack(T{}, v.at[0].bits & 0xfffe).at[0]",
        "odd channels: 16-bit values lose their last bit",
    ),
    Mutant(
        "common.cuh",
        "dk = fmaf(2, eps_G_residual, fmaf(-x, eps_G, dk));",
        "dk = fmaf(2, eps_G_residual, fmaf(x, eps_G, dk));",
        "Longhorn: one term of dk has the wrong sign",
    ),
    Mutant(
        "common.cuh",
        "return -gate * sum_gate;",
        "return 0;",
        "Longhorn: dk lacks the derivative of the key's norm",
    ),
    Mutant(
        "common.cuh",
        "return gate * min_or_nan(exp_fast(-logit), 0x1p126f);",
        "return gate * exp_fast(-logit);",
        "Longhorn: NaN gradients where a logit is very negative",
    ),
    Mutant(
        "common.cuh",
        "p = fmaf(p, u, -0.24536864f), p = fmaf(p, u, 0.33284062f)",
        "p = fmaf(p, u, -0.24536864f), p = fmaf(p, u, 0.33384062f)",
        "Mamba: the step is off by 1e-3 at logits around 0",
    ),
    Mutant(
        "common.cuh",
        "kept = {S, decay(gate, k, A)};\n        S = fmaf(kept.decay, S, gate * x * k);",
        "kept.decay = decay(gate, k, A);\n        S = fmaf(kept.decay, S, gate * x * k);\n        kept.S_previous = S;",
        "Mamba: dA and the step's gradient from S_t in place of S_{t-1}",
    ),
    Mutant(
        "common.cuh",
        "return fmaf(x, sum_x, sum_gate * (1 / LOG2E)) * slope;",
        "return sum_gate * (1 / LOG2E) * slope;",
        "Mamba: the step's gradient lacks what the input adds",
    ),
    Mutant(
        "common.cuh",
        "(reverse ? (L - 1) * x.stride_L : 0)",
        "(reverse ? L * x.stride_L : 0)",
        "the reversed direction begins one token behind the last",
    ),
    Mutant(
        "common.cuh",
        "data(x.data + g * x.stride_G + b * x.stride_B",
        "data(x.data + int(g * x.stride_G) + int(b * x.stride_B)",
        "tensors of more than 2^31 elements: wrong images",
    ),
    Mutant(
        "common.cuh",
        "DEVICE i64 state_offset(",
        "DEVICE int state_offset(",
        "more than 2^31 states: wrong ones",
    ),
    Mutant(
        "common.cuh",
        "t + skipped < min(tokens, TILE)",
        "t < min(tokens, TILE)",
        "channels behind the last are read",
    ),
    Mutant(
        "common.cuh",
        "if (!is_query && n == 0) keys.kk[start + first + i * APART] = kk;",
        "if (!is_query && n == 0) keys.kk[first + i * APART] = kk;",
        "backward: key norms of a chunk's later tokens overwrite the first's",
    ),
    Mutant(
        "lanes.cuh",
        "copy(warp.stage[stage > 0 ? stage - 1 : STAGES - 1], t0 + (STAGES - 1) * TILE);",
        "copy(warp.stage[stage], t0 + (STAGES - 1) * TILE);",
        "copies go to the stage that is being read",
    ),
    Mutant(
        "lanes.cuh",
        "staging.stage(warp.staged, tile, tile_keys);\n        __syncwarp();",
        "staging.stage(warp.staged, tile, tile_keys);",
        "gates are read before other lanes have written them",
    ),
    Mutant(
        "lanes.cuh",
        "        buffer ^= 1;\n",
        "",
        "keys of the next tile overwrite those that slower warps still read",
    ),
    Mutant(
        "lanes.cuh",
        "load<C>(biases + at.g * D + at.warp_d + c)",
        "load<C>(biases + at.warp_d + c)",
        "both directions have the first one's step bias",
    ),
    Mutant(
        "lanes.cuh",
        "R::rate(rates[(at.g * D + at.d + c) * N + at.n + n])",
        "R::rate(rates[(at.d + c) * N + at.n + n])",
        "both directions have the first one's rates",
    ),
    Mutant(
        "forward.cu",
        "load<C>(skips + at.g * D + at.d)",
        "load<C>(skips + at.d)",
        "both directions have the first one's skip connection",
    ),
    Mutant(
        "forward.cu",
        "begin / CHUNK - 1, at.n",
        "begin / CHUNK, at.n",
        "states are kept one chunk too late",
    ),
    Mutant(
        "forward.cu",
        "        step);\n    if (AHEAD) finish(last_y, last_t, last_left);",
        "        step);",
        "the last tokens have no output",
    ),
    Mutant(
        "forward.cu",
        "at.segment - 1, at.n, at.d, B, segments - 1, D",
        "0, at.n, at.d, B, segments - 1, D",
        "every segment starts from the state behind the first",
    ),
    Mutant(
        "summary.cu",
        "carried = fmaf(decays[at], carried, ends[at]);",
        "carried = ends[at];",
        "a segment forgets all but the one before it",
    ),
    Mutant(
        "summary.cu",
        "GRADIENTS ? segments - 2 - j : j",
        "j",
        "gradients pass from segment to segment in the wrong order",
    ),
    Mutant(
        "summary.cu",
        "            if (j >= left) break;\n",
        "",
        "gradients between segments: tokens that do not exist count",
    ),
    Mutant(
        "backward.cu",
        "later + state_offset(at.g, at.b, at.segment, 4 * at.quad",
        "later + state_offset(at.g, at.b, 0, 4 * at.quad",
        "every segment takes the first one's gradient from behind",
    ),
    Mutant(
        "backward.cu",
        "            R::update(S[n][c], kept[n][c], t.x.at[c], t.gate.at[c], t.k.at[n], A[n][c]);\n"
        "            dq.at[n] = fmaf(t.dy.at[c], S[n][c], dq.at[n]);",
        "            dq.at[n] = fmaf(t.dy.at[c], S[n][c], dq.at[n]);\n"
        "            R::update(S[n][c], kept[n][c], t.x.at[c], t.gate.at[c], t.k.at[n], A[n][c]);",
        "dq from S_{t-1} in place of S_t",
    ),
    Mutant(
        "backward.cu",
        "            // two buffers, so that one barrier a tile is enough\n            __syncthreads();",
        "",
        "dk and dq are added up before all warps have theirs",
    ),
    Mutant(
        "backward.cu",
        "                walk_back(G, dA, kept, last, tile, half * HALF, A, at);\n                __syncwarp();",
        "                walk_back(G, dA, kept, last, tile, half * HALF, A, at);",
        "sums over channels and states before all lanes have theirs",
    ),
    Mutant(
        "backward.cu",
        "for (int w = 1; w < WARPS; w++) norm +=",
        "for (int w = 1; w < WARPS - 1; w++) norm +=",
        "dk lacks the norm's part of a block's last channels",
    ),
    Mutant(
        "backward.cu",
        "for (i64 p = slice; p < parts; p += 8)",
        "for (i64 p = slice; p < parts - 1; p += 8)",
        "parameters' gradients lack the last segment of the last image",
    ),
    Mutant(
        "backward.cu",
        "if (first + j < key_parts)",
        "if (first + j < key_parts - (key_parts > 1))",
        "dk and dq lack the last block of channels",
    ),
    Mutant(
        "backward.cu",
        "__byte_perm(high[i / 2], low[i / 4], (i % 2 ? 0x3200 : 0x1000) + 0x11 * (4 + i % 4))",
        "(__byte_perm(high[i / 2], low[i / 4], i % 2 ? 0x3200 : 0x1000) & 0xffff0000u)",
        "states that are scanned from again are cut to 16 bits",
    ),
    Mutant(
        "backward.cu",
        "dx.at[c] = fmaf(skip.at[c], dy.at[c], R::dx(sum_x.at[c], gate.at[c]));",
        "dx.at[c] = R::dx(sum_x.at[c], gate.at[c]);",
        "dx lacks the skip connection",
    ),
    Mutant(
        "backward.cu",
        "slope[i].at[c] = R::slope(logit.at[c] + bias.at[c], gate[i].at[c]);",
        "slope[i].at[c] = R::slope(logit.at[c], gate[i].at[c]);",
        "the slope of the gate lacks the bias",
    ),
    Mutant(
        "quads.cu",
        "wait_for_copies<STAGES - 3>();",
        "wait_for_copies<STAGES - 2>();",
        "the next tile is staged before it has arrived",
    ),
    Mutant(
        "quads.cu",
        "if (channels > 1) to[1].bits",
        "to[1].bits",
        "odd channels: the last one's neighbour, of the next token, is overwritten",
    ),
    Mutant(
        "quads.cu",
        "            kept += N * D;",
        "            kept += D;",
        "later chunks' states are kept in the wrong place",
    ),
    Mutant(
        "quads.cu",
        "biases && at.valid ? biases[at.g * D + at.d] : 0",
        "biases && at.valid ? biases[at.d] : 0",
        "both directions have the first one's step bias",
    ),
    Mutant(
        "pairs.cu",
        "pack(T{}, v_0 - high.at[0], v_1 - high.at[1])",
        "0",
        "g x is rounded to 16 bits",
    ),
    Mutant(
        "pairs.cu",
        "pack(T{}, -a_1 * scaled_0, 0)",
        "pack(T{}, a_1 * scaled_0, 0)",
        "what the second of two tokens does to the first one's drive has the wrong sign",
    ),
    Mutant(
        "pairs.cu",
        "second.at[i] = last[i], last[i] = next[i]",
        "second.at[i] = last[i]",
        "the skip connection of every tile's last token is missing",
    ),
    Mutant(
        "pairs.cu",
        "                wait_for_copies<STAGES - 4>();\n                __syncthreads();",
        "                __syncthreads();",
        "tiles are read before they have arrived",
    ),
    Mutant(
        "pairs.cu",
        "if (keep && t0 > 0 && t0 < end)",
        "if (keep && t0 > begin && t0 < end)",
        "the state at the start of a segment is not kept",
    ),
    Mutant(
        "pairs.cu",
        "exists && skips ? skips[at.g * D + d + 8 * i] : 0",
        "exists && skips ? skips[d + 8 * i] : 0",
        "both directions have the first one's skip connection",
    ),
    Mutant(
        "summary_triples.cu",
        "dys.at(t0 + token + t + 1), t + 1 < left)",
        "dys.at(t0 + token + t + 1), t < left)",
        "gradients between segments: the token behind the last counts",
    ),
    Mutant(
        "summary_triples.cu",
        "begin(max(0, L - (boundary + 2) * tokens))",
        "begin(max(0, L - (boundary + 2) * tokens) / TILE * TILE)",
        "gradients between segments begin at a whole tile",
    ),
    Mutant(
        "summary_triples.cu",
        "norm = load<4>(states[four && t0 + TILE < end].norm[four ? p : 4 + p]);",
        "norm = load<4>(states[four && t0 + TILE < end].norm[p]);",
        "every other four triples have the norms of those before",
    ),
    Mutant(
        "summary_triples.cu",
        "bias[s][i] = -LOG2E * biases[at.g * D + channel];",
        "bias[s][i] = -LOG2E * biases[channel];",
        "gradients between segments: both directions have the first one's bias",
    ),
    Mutant(
        "block.cu",
        "rsqrtf(sum_over_warp(squares) / WIDTH + eps)",
        "rsqrtf(sum_over_warp(squares) / WIDTH)",
        "the norm has no eps: NaN for a token of zeros",
    ),
    Mutant(
        "block.cu",
        "fmaf(r, fmaf(-v.at[j], mean, g.at[j]), residual[i].at[j])",
        "fmaf(r, g.at[j], residual[i].at[j])",
        "dx lacks the derivative of the norm's factor",
    ),
    Mutant(
        "block.cu",
        "        for (int v = 0; v < V; v++) sums[row][column + v] = sum.at[v];\n        __syncthreads();",
        "        for (int v = 0; v < V; v++) sums[row][column + v] = sum.at[v];",
        "the gradient of the norm's weight is added up too early",
    ),
    Mutant(
        "block.cu",
        "packed_step_bias[i] = value((i < D ? step_bias_0 : step_bias_1) + d);",
        "packed_step_bias[i] = value(step_bias_0 + d);",
        "both directions have the first one's step bias",
    ),
    Mutant(
        "block.cu",
        "for (int part = 0; part < parts; part++) sum += p[i64(part) * stride];",
        "for (int part = 0; part < parts - 1; part++) sum += p[i64(part) * stride];",
        "weights' gradients lack the last part of the tokens",
    ),
    Mutant(
        "block.cu",
        "put((g ? dstep_bias_1 : dstep_bias_0) + d, dchannels[(2 * g + 1) * D + d]);",
        "put((g ? dstep_bias_1 : dstep_bias_0) + d, dchannels[(g + 1) * D + d]);",
        "the second direction's step bias gets another gradient",
    ),
    Mutant(
        "block.cu",
        "    float scale = scales ? scales[token / L] : 1;\n    const T *y_0",
        "    float scale = 1;\n    const T *y_0",
        "drop-path is ignored",
    ),
    Mutant(
        "block.cu",
        "g = scale * gradient.at[c];",
        "g = gradient.at[c];",
        "the gradients of a dropped image are not zero",
    ),
    Mutant(
        "block.cu",
        "from = row < rank ? row : row - (padded_rank - rank);",
        "from = row < rank ? row : row - 1;",
        "keys and queries are projected by the wrong rows of x_proj",
    ),
    Mutant(
        "convolve.cu",
        "unsigned(t + i) < unsigned(L)",
        "t + i < L",
        "an image's first tokens see the image before",
    ),
    Mutant(
        "convolve.cu",
        "window[i + 2 * BACK - tap]",
        "window[i + BACK + tap]",
        "the second direction's taps are in the wrong order",
    ),
    Mutant(
        "convolve.cu",
        "dforward[TAPS].at[c] += s_0[i].at[c];",
        "dforward[TAPS].at[c] += s_0[BACK + i].at[c];",
        "the bias's gradient counts some tokens twice and others never",
    ),
    Mutant(
        "convolve.cu",
        "int length = copied < items ? L : 0, read = copied < items ? H : 0",
        "int length = L, read = H",
        "stretches behind the last image count",
    ),
    Mutant(
        "convolve.cu",
        "        __syncthreads();\n        fetch(tiles[0], ROWS / 2);",
        "        fetch(tiles[0], ROWS / 2);",
        "the next stretches overwrite what slower warps still read",
    ),
    Mutant(
        "convolve.cu",
        "distance < STRETCHES; distance *= 2",
        "distance < STRETCHES / 2; distance *= 2",
        "weights' gradients lack every other two stretches",
    ),
    Mutant(
        "project.cu",
        "bool valid = t >= 0 && position < L && sequence < there;",
        "bool valid = t >= 0 && position < L + BACK && sequence < there;",
        "an image's last tokens see the next image",
    ),
    Mutant(
        "project.cu",
        "first_read = g ? L - H : 0;",
        "first_read = 0;",
        "the second direction reads the first half of the tokens",
    ),
    Mutant(
        "project.cu",
        "if (k * 16 + 8 < RANK) w[1] =",
        "if (k * 16 + 16 < RANK) w[1] =",
        "logits lack eight of the step's columns",
    ),
    Mutant(
        "project.cu",
        "        __syncthreads();\n        if (chunk + 1 < chunks) fetch_step(chunk + 1);",
        "        if (chunk + 1 < chunks) fetch_step(chunk + 1);",
        "logits before all threads' copies of the weights are there",
    ),
    Mutant(
        "step.cu",
        "for (int w = 1; w < WARPS; w++)",
        "for (int w = 1; w < WARPS - 1; w++)",
        "the step's gradient lacks the last channels",
    ),
    Mutant(
        "step.cu",
        "(n < STATES ? dk : dq)",
        "dk",
        "dq is lost",
    ),
    Mutant(
        "step.cu",
        "    if (i > 0) write_dstep(part + (i - 1) * int(parts), block.dstep[(i - 1) % 2]);",
        "",
        "the last tokens' gradients of the step are missing",
    ),
    Mutant(
        "step.cu",
        "fetch(block.stages[(i + STAGES - 1) % STAGES]",
        "fetch(block.stages[(i + STAGES - 2) % STAGES]",
        "copies go to the stage that is read next",
    ),
    Mutant(
        "output.cu",
        "scales[(token + i * AT_ONCE) / L] : 1;",
        "scales[token / L] : 1;",
        "drop-path of the image before, for the first tokens of the next",
    ),
    Mutant(
        "output.cu",
        "store(&parts[warp][half * 8 + lane / 4][n * 8 + lane % 4 * 2], sums[n][half]);\n    __syncthreads();",
        "store(&parts[warp][half * 8 + lane / 4][n * 8 + lane % 4 * 2], sums[n][half]);",
        "few tokens: sums over channels before all warps have theirs",
    ),
    Mutant(
        "output.cu",
        "if (first + r * 8 < all) store(out",
        "if (first + start * 8 < all) store(out",
        "what is behind the last token is overwritten",
    ),
    Mutant(
        "output.cuh",
        "mean.at[c] *= 0.5f;",
        "mean.at[c] *= 1;",
        "the sum of both directions in place of their mean",
    ),
    Mutant(
        "output.cuh",
        "eighth = d % STEP / 8 ^ place / 2 % 4;",
        "eighth = d % STEP / 8 ^ place % 4;",
        "Hopper: weights of other channels",
    ),
    Mutant(
        "output_hopper.cu",
        "gate<T>(y_0[w], y_1[w], zs[w], scale[w % 2])",
        "gate<T>(y_0[w], y_1[w], zs[w], scale[0])",
        "Hopper: drop-path of another image",
    ),
    Mutant(
        "output_hopper.cu",
        "rsqrtf(squares[0] / C + float(eps))",
        "rsqrtf(squares[0] / C)",
        "Hopper: the norm has no eps",
    ),
    Mutant(
        "output_hopper.cu",
        "                    wait_for_products<1>();  // those before",
        "                    wait_for_products<2>();  // those before",
        "Hopper: weights are overwritten while products read them",
    ),
    Mutant(
        "output_hopper.cu",
        "if (k % KS == 0) wait_for(stages.full(), stages.phase());",
        "",
        "Hopper: products of weights that have not arrived",
    ),
    Mutant(
        "output_hopper_backward.cu",
        "of_gated.at[j] = scale[i] * m.at[j] * silu;",
        "of_gated.at[j] = m.at[j] * silu;",
        "Hopper: the gradient of out_proj counts dropped images",
    ),
    Mutant(
        "output_hopper_backward.cu",
        "    wait_for(weights_there, 0);",
        "",
        "Hopper: products of weights that other threads have not written",
    ),
    Mutant(
        "output_hopper_backward.cu",
        "int(rounds);  // tokens of all blocks",
        "(int(rounds) - (rounds > 1));  // tokens of all blocks",
        "Hopper: the last round's tokens have no gradients",
    ),
    Mutant(
        "ring.cuh",
        "return full() + ((place() == 0) * PLACES + PLACES - 1) * 8;",
        "return full() + (PLACES - 1) * 8;",
        "Hopper: a place is given back that is still read",
    ),
    Mutant(
        "silu.cuh",
        "return s * fmaf(x, 1 - s, 1);",
        "return s * fmaf(x, s, 1);",
        "wrong gradient of SiLU",
    ),
    Mutant(
        "filter.cuh",
        "bias.at[c] *= factor;",
        "",
        "the convolutions' gradients lack their biases",
    ),
    Mutant(
        "common.cuh",
        "min(first + i * APART, tokens - 1)",
        "(first + i * APART)",
        "keys behind the last token are read",
    ),
    Mutant(
        "types.cuh",
        "p[2].bits | unsigned(p[3].bits) << 16",
        "p[3].bits | unsigned(p[2].bits) << 16",
        "keys that no vector can read: two states exchanged",
    ),
    Mutant(
        "lanes.cuh",
        "biases[at.g * D + at.warp_d + c + i]",
        "biases[at.warp_d + c + i]",
        "few states a lane: both directions have the first one's bias",
    ),
    Mutant(
        "lanes.cuh",
        "wait_for_copies<STAGES - 2>();",
        "wait_for_copies<STAGES - 1>();",
        "a tile is read before it has arrived",
    ),
    Mutant(
        "forward.cu",
        "if (keep && at.valid && t > 0)",
        "if (keep && at.valid && t > begin)",
        "the state at the start of a segment is not kept",
    ),
    Mutant(
        "forward.cu",
        "for (int i = 1; i < CHAINS; i++) y[j].at[c] += sums[i][c];",
        "for (int i = 1; i < CHAINS - 1; i++) y[j].at[c] += sums[i][c];",
        "a sum over states lacks some",
    ),
    Mutant(
        "summary.cu",
        "decay[n + i][c] *= decay_t;",
        "decay[n + i][c] = decay_t;",
        "a segment's decay is that of its last token",
    ),
    Mutant(
        "summary.cu",
        "GRADIENTS ? k.at[i] : k.at[i] * k.at[i]",
        "k.at[i]",
        "states between segments decay by k in place of k^2",
    ),
    Mutant(
        "backward.cu",
        "if (turn >= 0) copies.start(to.dy",
        "if (turn > 0) copies.start(to.dy",
        "the last tile of each chunk has another one's dy",
    ),
    Mutant(
        "backward.cu",
        "        stage_gates(gradients, warp, warp.stage[stage], &block.keys.kk[start], at);\n        __syncwarp();",
        "        stage_gates(gradients, warp, warp.stage[stage], &block.keys.kk[start], at);",
        "gates are read before other lanes have written them",
    ),
    Mutant(
        "backward.cu",
        "if (at.valid && j < tokens) {",
        "if (at.valid) {",
        "gradients of tokens behind the last are written",
    ),
    Mutant(
        "backward.cu",
        "            buffer ^= 1;\n",
        "",
        "dk and dq of a tile are overwritten while other warps add them up",
    ),
    Mutant(
        "quads.cu",
        "if (t + at.c < end && channels > 0)",
        "if (t + at.c < L && channels > 0)",
        "a segment writes some of the next one's outputs",
    ),
    Mutant(
        "quads.cu",
        "at.segment - 1, 2 * at.p, at.d, B, segments - 1, D",
        "0, 2 * at.p, at.d, B, segments - 1, D",
        "every segment starts from the state behind the first",
    ),
    Mutant(
        "pairs.cu",
        "pack(fp16{}, a_0[j] * a_1, 0)",
        "pack(fp16{}, -a_0[j] * a_1, 0)",
        "the decay of two tokens has a wrong sign",
    ),
    Mutant(
        "pairs.cu",
        "            staging.stage(block.states[1], block.tiles[1]);\n            sync_stagers();",
        "            sync_stagers();\n            staging.stage(block.states[1], block.tiles[1]);",
        "the second tile's factors of states are late",
    ),
    Mutant(
        "pairs.cu",
        "step_projs + (at.g * D + d + 8 * i) * RANK",
        "step_projs + (d + 8 * i) * RANK",
        "both directions project the step by the first one's weights",
    ),
    Mutant(
        "pairs.cu",
        "at.segment - 1, 2 * at.p, d, B, segments - 1, D",
        "0, 2 * at.p, d, B, segments - 1, D",
        "every segment starts from the state behind the first",
    ),
    Mutant(
        "pairs.cu",
        "if (t >= begin && t < end) store(to[i].at(t), values[i]);",
        "if (t < end) store(to[i].at(t), values[i]);",
        "a segment writes an output of the one before it",
    ),
    Mutant(
        "pairs.cu",
        "for (int i = 0; i < 2; i++, t0 += TILE) copy_results();",
        "for (int i = 0; i < 1; i++, t0 += TILE) copy_results();",
        "the last tile's outputs are not written",
    ),
    Mutant(
        "summary_triples.cu",
        "exists(warp_d + lane % ROW * VECTOR < D)",
        "exists(true)",
        "channels behind the last are read",
    ),
    Mutant(
        "summary_triples.cu",
        "((at.g * B + at.b) * boundaries + at.boundary) * tiles_of(tokens)",
        "((at.g * B + at.b) * boundaries) * tiles_of(tokens)",
        "gradients between segments: all have the first boundary's keys",
    ),
    Mutant(
        "block.cu",
        "for (unsigned r = row; r < 2 * D; r += TOGETHER * ROWS)",
        "for (unsigned r = row; r < D; r += TOGETHER * ROWS)",
        "the gradients of the norm and of in_proj lack z's half",
    ),
    Mutant(
        "block.cu",
        "from = row < rank ? row : row + padded_rank - rank;",
        "from = row;",
        "keys' and queries' gradients of x_proj are the wrong rows",
    ),
    Mutant(
        "block.cu",
        "gradient.at[c] = 0.5f * g * zs.at[c] * s;",
        "gradient.at[c] = g * zs.at[c] * s;",
        "dy is that of the sum of both directions",
    ),
    Mutant(
        "block.cu",
        "put(tap < TAPS ? (g ? dconv_1 : dconv_0) + d * TAPS + tap",
        "put(tap < TAPS ? (g ? dconv_1 : dconv_0) + d * TAPS + TAPS - 1 - tap",
        "the gradients of a filter's taps are in the wrong order",
    ),
    Mutant(
        "block.cu",
        "    dgated += token * D, means += token * D,",
        "    dgated += int(token * D), means += int(token * D),",
        "tensors of more than 2^31 elements: wrong gradients of the gate",
    ),
    Mutant(
        "convolve.cu",
        "v_1 = v_0 + (B * H - begin_1) * D",
        "v_1 = v_0 + int(B * H - begin_1) * int(D)",
        "tensors of more than 2^31 elements: the second direction's outputs get lost",
    ),
    Mutant(
        "convolve.cu",
        "i64 copied_b = copied / stretches;",
        "int copied_b = copied / stretches;",
        "tensors of more than 2^31 elements: gradients of other images",
    ),
    Mutant(
        "convolve.cu",
        "t_1 = t - int(L - H);",
        "t_1 = t;",
        "the middle token's block: the second direction's gradients belong to other tokens",
    ),
    Mutant(
        "convolve.cu",
        "if (t + i < end && t + i >= begin_1)",
        "if (t + i < end)",
        "the middle token's block: outputs before the second direction's first token",
    ),
    Mutant(
        "project.cu",
        "u += b * L * u_stride;",
        "u += int(b * L * u_stride);",
        "tensors of more than 2^31 elements: other images",
    ),
    Mutant(
        "project.cu",
        "row[m] = sequence * (L + BACK) + t - first + BACK - onward * BACK;",
        "row[m] = sequence * (L + BACK) + t - first + BACK - BACK;",
        "the second direction's window begins in the wrong place",
    ),
    Mutant(
        "step.cu",
        "dlogits += g * tokens * CHANNELS,",
        "dlogits += int(g * tokens * CHANNELS),",
        "tensors of more than 2^31 elements: the second direction's gradients",
    ),
    Mutant(
        "output.cu",
        "left = all - token, at = i64(token) * D + piece",
        "left = all - token, at = token * D + piece",
        "tensors of more than 2^31 elements: other tokens",
    ),
    Mutant(
        "output.cu",
        "sum = sum + load<4>(&parts[w][row][c]);",
        "sum = w < WARPS - 1 ? sum + load<4>(&parts[w][row][c]) : sum;",
        "few tokens: the product lacks the last channels",
    ),
    Mutant(
        "output_hopper.cu",
        "*y_0 = y + (i64(first) * D + chunk * CHUNK + piece * 8)",
        "*y_0 = y + (first * D + chunk * CHUNK + piece * 8)",
        "Hopper: tensors of more than 2^31 elements: other tokens",
    ),
    Mutant(
        "output_hopper.cu",
        "if (token + i * 8 >= end) continue;",
        "if (token + i * 8 >= all) continue;",
        "Hopper: norms of tokens that belong to another group",
    ),
    Mutant(
        "output_hopper_backward.cu",
        "of_y.at[j] = 0.5f * dgated * silu;",
        "of_y.at[j] = dgated * silu;",
        "Hopper: dy is that of the sum of both directions",
    ),
    Mutant(
        "output_hopper_backward.cu",
        "scale[i] = scales && token + i * 8 < end ? scales[(token + i * 8) / L] : 1;",
        "scale[i] = scales && token + i * 8 < end ? scales[token / L] : 1;",
        "Hopper: drop-path of the image before",
    ),
    Mutant(
        "ring.cuh",
        "turn = turn + 1 < 2 * PLACES ? turn + 1 : 0;",
        "turn = turn + 1 < PLACES ? turn + 1 : 0;",
        "Hopper: a place is read again before it is filled again",
    ),
]  # fmt: skip


class Run(NamedTuple):
    mutant: Mutant
    log: Path
    start: float


def start(mutant: Mutant | None, folder: Path) -> tuple[int, Run]:
    """Runs the tests of one mutant's file, or all without, in another process."""
    folder.mkdir()
    run = Run(mutant, folder / "log", time.monotonic())
    pid = os.fork()
    if pid:
        return pid, run
    os.setsid()  # so that it can be killed with its compilers
    log = os.open(run.log, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    files = SCAN + BLOCK
    if mutant:
        sources, cache = folder / "sources", folder / "cache"
        shutil.copytree(compiler.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
        path = sources / mutant.file
        path.write_text(path.read_text().replace(mutant.before, mutant.after))
        cache.mkdir()
        for library in emulator.CACHE.iterdir():  # of the other kernels
            (cache / library.name).symlink_to(library)
        compiler.SOURCES, emulator.CACHE, files = sources, cache, TESTS.get(mutant.file, BLOCK)
    code = 3
    try:
        code = pytest.main(["-x", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", "-k", "emulated", *files])
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(status: int, run: Run) -> str:
    """By what it was noticed, or nothing."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\w+)", run.log.read_text(), re.M)
    return "" if os.WEXITSTATUS(status) == 0 else failed[1] if failed else f"exit status {os.WEXITSTATUS(status)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.words or any(word in f"{m.file}: {m.shows}" for word in args.words)]
    with tempfile.TemporaryDirectory() as folder:
        pid, run = start(None, Path(folder, "without"))
        if found := outcome(os.waitpid(pid, 0)[1], run):
            print(run.log.read_text())
            print(f"The tests fail without a mutant: {found}")
            return 1
        waiting, running, noticed = list(enumerate(chosen)), {}, 0
        while waiting or running:
            while waiting and len(running) < args.jobs:
                number, mutant = waiting.pop(0)
                pid, run = start(mutant, Path(folder, str(number)))
                running[pid] = run
            time.sleep(0.1)
            for pid, run in list(running.items()):
                if time.monotonic() - run.start > LIMIT:
                    os.killpg(pid, signal.SIGKILL)
                if not (done := os.waitpid(pid, os.WNOHANG))[0]:
                    continue
                del running[pid]
                by = outcome(done[1], run)
                noticed += bool(by)
                seconds = time.monotonic() - run.start
                print(
                    f"{'noticed ' if by else 'SURVIVED'} {run.mutant.file}: {run.mutant.shows} [{by}, {seconds:.0f} s]"
                )
                sys.stdout.flush()
                shutil.rmtree(run.log.parent)
    print(f"{noticed} of {len(chosen)} mutants noticed")
    return noticed < 0.9 * len(chosen)


if __name__ == "__main__":
    sys.exit(main())
