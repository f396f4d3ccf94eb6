"""Mutation testing of the CUDA sources (`make cuda-mutants`): emulated tests should detect each inserted bug.

python tools/cuda_mutants.py [--jobs 2] [word ...]  # mutants whose file or description contains one of the words
python tools/cuda_mutants.py --check  # only report stale quotes and files without a mutant

A mutant's quote is stale if the source no longer contains the quoted text, or contains the text more than once.
Update the quote in that case.
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

import pytest

from vil.kernels.cuda import source

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/helpers"))  # pytest also adds this folder to sys.path
import emulator

LIMIT = 600  # seconds; time limit for the tests of a mutant. A mutant that exceeds the limit counts as detected.
SCAN = ["tests/kernels/test_cuda.py"]
POOLED = ["tests/kernels/test_pooled_block.py"]
BLOCK = [f"tests/kernels/test_block{name}.py" for name in ("_kernels", "_references", "")] + POOLED
AUGMENT = ["tests/kernels/test_augment_kernels.py"]
EMBEDDING = ["tests/kernels/test_embedding.py"]
PYTEST = ["-x", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", "-p", "no:randomly", "-k", "emulated"]
TESTS = {  # test files by CUDA source; sources that are not listed use the tests of their folder
    **{f"cuda/{name}.cuh": SCAN + BLOCK for name in ("async_copies", "elements", "mma")},
    **{f"block/{name}.cu": POOLED for name in ("pool", "scan_lines", "sum_lines", "pooled_conv_backward")},
    **{
        f"block/{name}.cu": POOLED
        for name in ("in_proj_pool_sm90", "scan_image", "scan_lines_bwd", "projection_gradients", "add_slices")
    },
    "block/along_lines.cuh": POOLED,
}
FOLDERS = {"scan": SCAN, "block": BLOCK, "cuda": BLOCK, "augment": AUGMENT, "embedding": EMBEDDING}


class Mutant(NamedTuple):
    file: str
    shows: str
    before: str
    after: str


# A row of TABLE: (description, unique quote with ⟦original→replacement⟧), or (description, quote, changed quote).
# fmt: off
TABLE = {
    "cuda/async_copies.cuh": [
        ("odd channels: what lies behind the last token or channel is read",
         "*shared = ⟦valid ? *global : T{}→*global⟧;"),
    ],
    "cuda/elements.cuh": [
        ("every other bf16 value has its neighbour's bits behind its own", "__uint_as_float(word⟦ & 0xffff0000u→⟧)}"),
        ("odd channels: 16-bit values lose their last bit", "unpack(T{}, v.at[0].bits⟦→ & 0xfffe⟧).at[0]"),
        ("keys that no vector can read: two states exchanged",
         "p[⟦2].bits | unsigned(p[3→3].bits | unsigned(p[2⟧].bits) << 16"),
    ],
    "cuda/mma.cuh": [
        ("pairs of matrices are not transposed", "m8n8.x2.⟦trans.→⟧shared"),
        ("four matrices are not transposed", "m8n8.x4.⟦trans.→⟧shared"),
    ],
    "scan/recurrences.cuh": [
        ("Longhorn: one term of dk has the wrong sign", "dk = fmaf(2, eps_G_residual, fmaf(⟦-→⟧x, eps_G, dk));"),
        ("Longhorn: dk lacks the derivative of the key's norm", "return ⟦-eps * sum_step_size→0⟧;"),
        ("Longhorn: NaN gradients where a logit is very negative",
         "return eps * ⟦min_or_nan(exp_fast(-step_logit), 0x1p126f→exp_fast(-step_logit⟧);"),
        ("Mamba: the step size is off by 1e-3 at logits around 0",
         "p = fmaf(p, u, -0.24536864f), p = fmaf(p, u, 0.⟦33284062f→33384062f⟧)"),
        ("Mamba: dA and the step size's gradient from S_t in place of S_{t-1}",
         "kept⟦ = {S, decay(dt, b, A)};\n        S = fmaf(kept.decay, S, dt * x * b)→.decay = decay(dt, b, A);\n"
         "        S = fmaf(kept.decay, S, dt * x * b);\n        kept.S_previous = S⟧;"),
        ("Mamba: the step size's gradient lacks what the input adds",
         "return ⟦fmaf(x, sum_x, sum_step_size * (1 / LOG2E)→sum_step_size * (1 / LOG2E⟧) * slope;"),
    ],
    "scan/tiles.cuh": [
        ("the reversed direction begins one token behind the last", "(reverse ? ⟦(L - 1)→L⟧ * x.stride_L : 0)"),
        ("tensors of more than 2^31 elements: wrong images",
         "data(x.data + ⟦g * x.stride_G + b * x.stride_B→int(g * x.stride_G) + int(b * x.stride_B)⟧"),
        ("more than 2^31 states: wrong ones", "DEVICE ⟦i64→int⟧ state_offset("),
        ("channels behind the last are read", "t ⟦+ skipped →⟧< min(tokens, TILE)"),
        ("both directions scan the first one's tensors", "g = ⟦blockIdx.x / ctas / segments / B→0⟧;"),
    ],
    "scan/lanes.cuh": [
        ("both directions have the first one's A", "Recurrence::scaled_A(A[(at.⟦g * D + at.→⟧d + c) * N + at.n + n])"),
        ("backward: key norms of a chunk's later tokens overwrite the first's",
         "if (!is_query && n == 0) keys.kk[⟦start + →⟧first + i * APART] = kk;"),
        ("keys behind the last token are read", "⟦min(first + i * APART, tokens - 1→(first + i * APART⟧)"),
    ],
    "scan/simt_scan.cuh": [
        ("copies go to the stage that is being read",
         "copy(warp.stage[stage⟦ > 0 ? stage - 1 : STAGES - 1→⟧], t0 + (STAGES - 1) * TILE);"),
        ("step sizes are read before other lanes have written them",
         "preparation.run(warp.prepared, tile, tile_keys);⟦\n        __syncwarp();→⟧"),
        ("keys of the next tile overwrite those that slower warps still read", "⟦        buffer ^= 1;\n→⟧"),
        ("both directions have the first one's step bias", "load<DL>(step_bias + at.⟦g * D + at.→⟧warp_d + c)"),
        ("few states a lane: both directions have the first one's bias", "step_bias[at.⟦g * D + at.→⟧warp_d + c + i]"),
        ("a tile is read before it has arrived", "wait_for_copies<STAGES - ⟦2→1⟧>();"),
    ],
    "scan/forward_simt.cu": [
        ("both directions have the first one's skip connection", "load<DL>(skip + at.⟦g * D + at.→⟧d)"),
        ("chunk states are one chunk too late", "begin / CHUNK⟦ - 1→⟧, at.n"),
        ("the last tokens have no output", "scan);⟦\n    if (AHEAD) finish(last_y, last_t, last_left);→⟧"),
        ("every segment starts from the state behind the first",
         "⟦at.segment - 1→0⟧, at.n, at.d, B, cut.segments - 1, D"),
        ("the state at the start of a segment is not kept", "if (keep && at.valid && t > ⟦0→begin⟧)"),
        ("a sum over states lacks some", "for (int i = 1; i < CHAINS⟦→ - 1⟧; i++) y[j].at[c] += sums[i][c];"),
    ],
    "scan/segment_states.cu": [
        ("a segment forgets all but the one before it", "passed = ⟦fmaf(decays[at], passed, ends[at])→ends[at]⟧;"),
        ("gradients pass from segment to segment in the wrong order", "⟦GRADIENTS ? segments - 2 - j : →⟧j"),
        ("gradients between segments: tokens that do not exist count", "⟦            if (j >= left) break;\n→⟧"),
        ("a segment's decay is that of its last token", "decay[n + i][c] ⟦*→⟧= decay_t;"),
        ("states between segments decay by k in place of k^2", "⟦GRADIENTS ? k.at[i] : k.at[i] * →⟧k.at[i]"),
    ],
    "scan/backward.cu": [
        ("every segment takes the first one's gradient from behind",
         "final_gradients + state_offset(at.g, at.b, ⟦at.segment→0⟧, at.n"),
        ("dq from S_{t-1} in place of S_t",
         "⟦Recurrence::update(S[n][c], kept[j][n][c], t.x.at[c], t.step_size.at[c], t.k.at[n], A[n][c]);\n"
         "                dq.at[n] = fmaf(t.dy.at[c], S[n][c], dq.at[n→dq.at[n] = fmaf(t.dy.at[c], S[n][c], "
         "dq.at[n]);\n                Recurrence::update(S[n][c], kept[j][n][c], t.x.at[c], t.step_size.at[c], "
         "t.k.at[n], A[n][c⟧]);"),
        ("dk and dq are added up before all warps have theirs", "        ⟦__syncthreads();\n        →⟧write_keys("),
        ("sums over channels and states before all lanes have theirs",
         "            walk_back(G, dA, kept, last, tile, half * HALF, of.A, of.at);⟦\n            __syncwarp();→⟧"),
        ("dk and dq of a tile are overwritten while other warps add them up", "⟦        buffer ^= 1;\n→⟧"),
    ],
    "scan/backward_memory.cuh": [
        ("states that are scanned from again are cut to 16 bits",
         "__uint_as_float(half_and_byte_twice(high[i / 2], i % 2, low[i / 4], i % 4)⟦→ & 0xffff0000u⟧)"),
    ],
    "scan/backward_tiles.cuh": [
        ("the slope of the step size lacks the bias",
         "Recurrence::slope(step_logit.at[c]⟦ + bias.at[c]→⟧, step_size[i].at[c]);"),
        ("the last tile of each chunk has another one's dy", "if (next_tile >⟦=→⟧ 0) copies.start(dys"),
        ("step sizes are read before other lanes have written them",
         "prepare_step_sizes(gradients, warp, warp.stage[stage], &cta.keys.kk[start], at);⟦\n        __syncwarp();→⟧"),
    ],
    "scan/backward_sums.cuh": [
        ("dk lacks the norm's part of a CTA's last channels", "for (int w = 1; w < WARPS⟦→ - 1⟧; w++) norm +="),
        ("dx lacks the skip connection",
         "dx.at[c] = ⟦fmaf(skip.at[c], dy.at[c], Recurrence::dx(sum_x.at[c], "
         "step_size.at[c])→Recurrence::dx(sum_x.at[c], step_size.at[c]⟧);"),
        ("gradients of tokens behind the last are written", "if (at.valid⟦ && j < tokens→⟧) {"),
    ],
    "scan/backward_reduce.cuh": [
        ("parameters' gradients lack the last segment of the last image",
         "for (i64 row = slice; row < rows⟦→ - 1⟧; row += 8)"),
        ("dk and dq lack the last CTA's channels", "if (first + j < key_parts⟦→ - (key_parts > 1)⟧)"),
    ],
    "scan/forward_mma.cu": [
        ("the state at the start of a segment is not kept", "if (keep && t > ⟦0→begin⟧ && t < end)"),
        ("every segment starts from the state behind the first",
         "⟦at.segment - 1→0⟧, 2 * at.p, d, B, cut.segments - 1, D"),
    ],
    "scan/forward_mma_memory.cuh": [
        ("two tokens of a product are exchanged", "ROWS_OF_FIRST = table(1, ⟦3, 0→0, 3⟧, 2)"),
    ],
    "scan/forward_mma_consumer.cuh": [
        ("a tile's first factors are read one barrier too early: consumers' barrier stands a pair later",
         "            } else if (t0 + TILE <= end) {\n                if (pair + ⟦2 == PAIRS) {\n"
         "                    // this tile is fully loaded; its last pairs run while the next tile is loaded\n"
         "                    __syncthreads();→1 == PAIRS) __syncthreads();\n"
         "                if (pair + 2 == PAIRS) {⟧\n"),
    ],
    "scan/forward_mma_copier.cuh": [
        ("tiles are read before they have arrived",
         "        ⟦wait_for_copies<STAGES - 4>();\n        →⟧__syncthreads();"),
        ("factors of the first two tiles are prepared before these have arrived",
         "⟦    wait_for_copies<STAGES - 3>();\n→⟧"),
        ("a segment writes an output of the one before it",
         "if (t ⟦>= begin && t →⟧< end) store(to[i].at(t), values[i]);"),
        ("the last tile's outputs are not written", "for (int i = 0; i < ⟦2→1⟧; i++, t0 += TILE) copy_results();"),
    ],
    "scan/forward_mma_states.cuh": [
        ("what the second of two tokens does to the first one's drive has the wrong sign",
         "pack(Element{}, ⟦-→⟧a_1 * scaled_0, 0)"),
        ("the decay of two tokens has a wrong sign", "pack(fp16{}, ⟦→-⟧a_0[j] * a_1, 0)"),
    ],
    "scan/forward_mma_channels.cuh": [
        ("e x is rounded to 16 bits", "⟦pack(Element{}, v_0 - high.at[0], v_1 - high.at[1])→0⟧"),
        ("the skip connection of every tile's last token is missing", "second.at[i] = last[i]⟦, last[i] = next[i]→⟧"),
        ("both directions have the first one's skip connection",
         "exists && skip_of ? skip_of[⟦at.g * D + →⟧d + 8 * i] : 0"),
        ("both directions project the step by the first one's weights", "step_proj + (⟦at.g * D + →⟧d + 8 * i) * RANK"),
    ],
    "scan/segment_gradients_mma.cu": [
        ("gradients between segments: dy meets the query of the token before", "qs.at(t0 + j⟦ + 1→⟧)[n + 8 * o]"),
        ("gradients between segments begin at a whole tile",
         "begin(max(0, L - (boundary + 2) * tokens)⟦→ / TILE * TILE⟧)"),
        ("every other four triples have the norms of those before",
         "norm = load<4>(states[four && t0 + TILE < end].norm[⟦four ? p : 4 + →⟧p]);"),
        ("gradients between segments: both directions have the first one's bias",
         "bias[s][i] = -LOG2E * step_bias[⟦at.g * D + →⟧channel];"),
        ("gradients between segments: channels behind the last are written", "if (⟦to.d + 16 * s + 8 * i < D→true⟧)"),
        ("gradients between segments: all have the first boundary's keys",
         "((at.g * B + at.b) * boundaries⟦ + at.segment→⟧) * tiles_of(tokens)"),
    ],
    "block/norm.cuh": [
        ("the norm has no eps: NaN for a token of zeros", "rsqrtf(sum_over_warp(squares) / WIDTH⟦ + eps→⟧)"),
    ],
    "block/norm_backward.cu": [
        ("dx lacks the derivative of the norm's factor",
         "fmaf(r, ⟦fmaf(-v.at[j], mean, g.at[j])→g.at[j]⟧, residual[i].at[j])"),
    ],
    "block/parameters.cuh": [
        ("weights behind the first are dealt to other threads", "i -= among ? 0 : ⟦n→n + 1⟧;"),
    ],
    "block/pack_weights.cu": [
        ("both directions have the first one's step bias",
         "packed_step_bias[i] = value(⟦(i < D ? step_bias_0 : step_bias_1)→step_bias_0⟧ + d);"),
        ("keys and queries are projected by the wrong rows of x_proj",
         "from = row < rank ? row : row - ⟦(padded_rank - rank)→1⟧;"),
    ],
    "block/unpack_gradients.cu": [
        ("the gradient of the norm's weight is added up too early",
         "for (int v = 0; v < V; v++) sums[row][column + v] = sum.at[v];⟦\n        __syncthreads();→⟧"),
        ("weights' gradients lack the last part of the tokens",
         "for (int part = 0; part < parts⟦→ - 1⟧; part++) sum = sum + load<N>"),
        ("the gradient of in_proj lacks the last part of the tokens",
         "for (int part = 0; part < folded_parts⟦→ - 1⟧; part++)"),
        ("the gradient of out_proj lacks the last elements", "if (i >= C * D⟦→ - V⟧) return;"),
        ("the second direction's step bias gets another gradient",
         "sum_of_parts(dstep_biases + ⟦g * next_bias→0⟧ + d, bias_parts"),
        ("the second direction's skip gets another gradient",
         "sum_of_parts(dskips + ⟦g * next_direction→0⟧ + d, skip_parts, next_part)"),
        ("the gradients of the norm and of in_proj lack z's half",
         "for (unsigned r = row; r < ⟦2 * →⟧D; r += TOGETHER * ROWS)"),
        ("keys' and queries' gradients of x_proj are the wrong rows",
         "from = row⟦ < rank ? row : row + padded_rank - rank→⟧;"),
        ("the gradients of a filter's taps are in the wrong order",
         "put(tap < TAPS ? (g ? dconv_1 : dconv_0) + d * TAPS + ⟦→TAPS - 1 - ⟧tap"),
    ],
    "block/gate.cu": [
        ("drop-path is ignored", "    float scale = ⟦scales ? scales[token / L] : →⟧1;\n    y_0 += token"),
        ("the gradients of a dropped image are not zero", "g = ⟦scale * →⟧gradient.at[c];"),
        ("dy is that of the sum of both directions", "gradient.at[c] = ⟦0.5f * →⟧g * zs.at[c] * s;"),
        ("tensors of more than 2^31 elements: wrong gradients of the gate",
         "    dgated += ⟦token * D, means += token * D→int(token * D), means += int(token * D)⟧,"),
    ],
    "block/filter.cuh": [
        ("an image's first tokens see the image before", "⟦unsigned(t + i) < unsigned(L)→t + i < L⟧"),
        ("the convolutions' gradients lack their biases", "⟦bias.at[c] *= factor;→⟧"),
    ],
    "block/lines.cuh": [
        ("a class token within a line is none for the patches behind it",
         "return t == center() ? t : position⟦ + (position >= center())→⟧;"),
        ("columns are taken for rows", "patch / length * ⟦next_line + patch % length * next→length + patch % length⟧;"),
        ("the pooled class token stands before a line too early", "int line = (t - (t > center())) / length;\n"
         "        return t == center() ? class_token() : line + (line >= class_token()⟦→ - 1⟧);"),
    ],
    "block/along_lines.cuh": [
        ("odd channels: threads without channels of their own write elsewhere",
         "⟦writes = d < D, d = min(d, int(D) - V);→writes = true, d = min(d, int(D));⟧"),
        ("tables are overwritten while they are read", "⟦__syncthreads();→⟧  // no thread uses the previous tables"),
        ("tables are read before they are written", "of_token;\n    }\n    ⟦__syncthreads();→⟧"),
        ("tokens outside of the image are not zero", "⟦at >= 0 && copies→copies⟧);"),
        ("a group is read before its copies arrive", "wait_for_copies<⟦DEPTH - 2→DEPTH - 1⟧>();"),
        ("a group is read before the copies of other lanes arrive", "⟦__syncwarp();→⟧  // the lanes' copies"),
    ],
    "block/pool.cu": [
        ("the window of a segment's later tokens", "if (⟦segment != begin→false⟧) write(segment);"),
        ("a line's mean has the class token within it", "else if (⟦i == to_center→false⟧)"),
        ("the class token's mean is shared", "v_1[i % 2], ⟦1→share⟧);"),
        ("a stretch stores tokens of the next stretch", "if (⟦i < left && →⟧channels.writes) store(to"),
        ("a line ends at the first of two tokens only", "if (ending >> (i - 1) & ⟦3→1⟧)"),
        ("the next line starts with the previous line's sum", "share)⟦, sum_0 = sum_1 = {}→⟧;"),
        ("the second direction's skip is the first's", "skip_1 = load<V>(skip⟦ + D→⟧ + d)"),
    ],
    "block/sum_lines.cu": [
        ("patches behind the class token are taken from where it would not be", "(patch⟦ + (patch >= center)→⟧) * D"),
        ("lines behind the class token are those before", "(pooled⟦ - (pooled > lines.class_token())→⟧) * lines"),
    ],
    "block/scan_lines.cu": [
        ("the second 16 lines are the first", "x_proj + part * QUARTER, ⟦first→0⟧, S, lane);"),
        ("a quarter of the channels is not added up", "for (int part = 1; part < ⟦4→3⟧; part++)"),
        ("parts are written while they are added up",
         "        add_parts(memory, first);\n        ⟦__syncthreads();→__syncwarp();⟧"),
        ("both directions have the first one's step sizes",
         "load<8>(step_proj + (⟦g * D + →⟧d + lane) * RANK + i * 8)"),
        ("the second direction reads from the first line", "⟦            if (g) t = S - 1 - t;\n→⟧"),
        ("y of two lines are exchanged", "int t = start + ⟦2 * odd + upper→odd + 2 * upper⟧;"),
        ("the second direction's y is missing", "⟦ + load<2>(&memory.x[1][t][pair])→⟧;"),
        ("Mamba's rates are those of other states", "A + (g * D + d + c) * N⟦ + lane % 4 * NL→⟧)"),
    ],
    "block/scan_lines_bwd.cu": [
        ("both directions read from the first line", "⟦reverse ? rows - 1 - row : row→row⟧, rows - 1);"),
        ("projections before the image is there",
         "        wait_for_copies<0>();\n        ⟦__syncthreads();→__syncwarp();⟧"),
        ("projections are added up before all warps have theirs",
         "project(cta, cta.parts[warp], first_tile, tiles, lane, at);\n        ⟦__syncthreads();→__syncwarp();⟧"),
        ("sums over states are read before they are there",
         "= sums[i].at[e];\n    ⟦__syncwarp();→⟧"),
        ("sums of slower warps are overwritten",
         "backpropagate_step(cta, dstep, first_tile, tiles, lane);\n        ⟦__syncthreads();→__syncwarp();⟧"),
        ("dprojected is added up before all warps have theirs",
         "put_sums(cta, sums, dstep, warp, at);\n        ⟦__syncthreads();→__syncwarp();⟧"),
        ("the next image overwrites what slower warps read",
         "⟦        __syncthreads();  // barrier 7: all warps have read the image\n→⟧"),
        ("the gradient of keys lacks the step size's",
         "for (int w = 1; w < WARPS; w++) norm += ⟦→0 * ⟧cta.norms[w][row];"),
        ("the bias's gradient is that of the last image", "float bias_before = ⟦is_first→true⟧ ? 0"),
        ("other channels' weights of the step", "load_transposed(b, &cta.step_proj[first + lane % ⟦16→8⟧][8 * n]);"),
        ("dx has the tokens' other order", "dx.word[i] = ⟦transpose→⟧(pack(Element{}, sums_x[i]"),
        ("keys are read before all warps have written them",
         "slice == 0, reverse);\n        ⟦__syncthreads();→__syncwarp();⟧"),
        ("slices: all CTAs of an image have the first one's channels", "d = ⟦slice * SLICE→0⟧;"),
        ("slices: dy is that of the first slice", "dstep_biases += i64(row) * D + d⟦, dy += d→⟧;"),
        ("slices: both directions have the first one's keys", "projected + (⟦g * B + →⟧b) * S_LINES * P, ROWS"),
        ("slices: the second direction has the first one's order of keys",
         "S_LINES * P, ROWS, S_LINES, ⟦reverse→false⟧);"),
        ("slices: sums of one slice overwrite those of another", "((⟦slice * 2 + →⟧g) * B + b) * S_LINES * P;"),
        ("slices: all images have the first one's dprojected", "((slice * 2 + g) * B⟦ + b→⟧) * S_LINES * P;"),
        ("dmeans lack eight of the projections", "UNROLLED for (int i = 0; i < (16 * k + ⟦8→16⟧ < P ? 4 : 2); i++)"),
    ],
    "block/add_slices.cu": [
        ("the last slice's sum is missing", "for (int s = 1; s < SLICES⟦→ - 1⟧; s++)"),
        ("sums behind the last are written", "if (i >= elements⟦→ + 4⟧) return;"),
    ],
    "block/projection_gradients.cu": [
        ("tokens behind the last count", "⟦t < tokens→true⟧);"),
        ("stages are read before their copies are there",
         "wait_for_copies<STAGES - 2>();\n        ⟦__syncthreads();→__syncwarp();⟧"),
        ("odd tokens' sums overwrite what slower warps read",
         "    wait_for_copies<0>();\n    ⟦__syncthreads();→__syncwarp();⟧"),
        ("odd tokens are missing in the gradient of step_proj",
         "⟦        add(sums.step_proj[n], others.step_proj[n]);→⟧"),
    ],
    "block/in_proj_pool_sm90.cu": [
        ("Hopper: columns without a token are not zero", "⟦store_shared(slots + i * CHUNK * 2 + w * 4, 0);→;⟧"),
        ("Hopper: weights are read before they have arrived", "⟦wait_long_for(full + stage * 8, parity);→⟧"),
        ("Hopper: xhat is read before it has arrived", "⟦wait_long_for(xhat_full + chunk * 8, tokens.parity());→⟧"),
        ("Hopper: the next xhat overwrites xhat of this image", "if (⟦last→true⟧ && i >= CHUNKS)"),
        ("Hopper: a stage is released while its products run", "if (i >= AHEAD) release(i⟦ - AHEAD→⟧, step"),
        ("Hopper: the tile is read before it is written", "⟦wait_long_for(handed.full(), handed.parity());→⟧"),
        ("Hopper: the tile is overwritten before it is read",
         "⟦wait_long_for(handed.empty(), handed.parity() ^ 1);→⟧"),
        ("Hopper: the class token belongs to the line around it", "if (i <= left⟦ && i != foreign→⟧)"),
        ("Hopper: the class token is divided by the length of a line", "lines.share(⟦pooled→0⟧)"),
        ("Hopper: tensors of more than 2^31 elements: u and z of other images",
         "uz + (⟦i64(image)→image⟧ * L * (2 * D) + step"),
        ("Hopper: a part of u is not stored", "part = chunk < AHEAD ? ⟦0→1⟧ : chunk;"),
    ],
    "block/scan_image.cu": [
        ("x_proj is read before it has arrived",
         "⟦        wait_for_copies<1>();→⟧\n        __syncwarp();  // means and x_proj of all lanes have arrived"),
        ("step_proj is read before it has arrived", "⟦wait_for_copies<1>();→⟧  // waits for step_proj"),
        ("partial sums are added before they are there", "⟦        __syncthreads();→⟧  // barrier A"),
        ("sums are read before they are there", "⟦        __syncthreads();→⟧  // barrier B"),
        ("the last warp's partial sum is missing", "for (int w = 1; w < WARPS⟦→ - 1⟧; w++)"),
        ("entries of other pairs are not zero",
         "store((float *)((char *)cta.update + i), Floats<4>{⟦→0x1p127f, 0x1p127f, 0x1p127f, 0x1p127f⟧});"),
        ("both directions have the first one's step weights",
         "copy_step_proj(warp, step_proj + (⟦D + →⟧d) * RANK, lane);"),
        ("the second direction reads from the first line", "return ⟦g ? S - 1 - min(i, S - 1) : →⟧min(i, S - 1);"),
        ("the first direction's y is missing", "⟦if (g) load_rows(→if (false) load_rows(⟧first"),
        ("the sixteenth line has no y", "if (S == ⟦LINES→LINES + 1⟧) advance"),
        ("the second line's y is that of the first", "queries.at[2 * ⟦second→0⟧],"),
        ("both tiles have the first tile's bias", "⟦16 * i + →⟧8 * h + lane / 4);"),
        ("channels 32 to 63 have the bias of the first 32", "bias[0] = bias[⟦WARP_CHANNELS / 32 - 1→0⟧];"),
        ("slices: all CTAs of an image have the first one's channels",
         "d = ⟦blockIdx.x % SLICES * SLICE + →⟧w * WARP_CHANNELS;"),
        ("slices: y belongs to another image", "y += i64(blockIdx.x / SLICES⟦→ / 2 * 2⟧) * S * D + d;"),
        ("slices: both directions have the first one's keys", "projected + ⟦g * B * S * P→0⟧, S);"),
        ("slices: all images have the first one's keys", "projected += i64(blockIdx.x / SLICES⟦→ * 0⟧) * S * P;"),
        ("slices: all lines have the first one's keys", "load<4>(&cta.projected[g][⟦line→0⟧][column]);"),
    ],
    "block/pooled_conv_backward.cu": [
        ("a mean's gradient is not shared", "{dmeans + b * S * D + d, D}, B * S * D, 1.f⟦ / length→⟧}"),
        ("the class token's gradient is shared", "pooled == lines.class_token() ? ⟦1→share⟧ : share;"),
        ("the gradient of another line was prefetched", "if (⟦pooled != expected→expected < 0⟧) fetch(pooled);"),
        ("tokens ahead of a stretch give the first direction's skip twice",
         "if (⟦here || begin == 0→true⟧) dskip_0"),
        ("the image's first tokens give the first direction's skip nothing", "if (here⟦ || begin == 0→⟧) dskip_0"),
        ("what is before a stretch is not known", "⟦go(1, false);→ring.next(at[1].at);⟧"),
        ("all lines have the first one's gradient", "now != line⟦→ && line < 0⟧)"),
        ("gradients of filters stay doubled", "dforward[tap].at[c] *= ⟦0.5f→1.0f⟧"),
    ],
    "block/conv.cu": [
        ("the second direction's taps are in the wrong order", "window[i + ⟦2 * BACK -→BACK +⟧ tap]"),
        ("tensors of more than 2^31 elements: the second direction's outputs get lost",
         "v_1 = v_0 + ⟦(B * H - begin_1) * D→int(B * H - begin_1) * int(D)⟧"),
        ("the middle token's block: outputs before the second direction's first token",
         "if (t + i < end⟦ && t + i >= begin_1→⟧)"),
    ],
    "block/conv_backward.cu": [
        ("the bias's gradient counts some tokens twice and others never",
         "dforward[TAPS].at[c] += s_0[⟦→BACK + ⟧i].at[c];"),
        ("stretches behind the last image count",
         "int length = ⟦copied < items ? L : 0, read = copied < items ? H : 0→L, read = H⟧"),
        ("the next stretches overwrite what slower warps still read",
         "⟦        __syncthreads();  // no thread reads the previous group's tiles any more\n→⟧"),
        ("weights' gradients lack every other two stretches", "distance < STRETCHES⟦→ / 2⟧; distance *= 2"),
        ("tensors of more than 2^31 elements: gradients of other images",
         "u + ⟦→int(⟧(copied_b * L + t_0) * u_stride⟦→)⟧ + c,"),
        ("the middle token's block: the second direction's gradients belong to other tokens",
         "t_1 = t⟦ - int(L - H)→⟧;"),
    ],
    "block/conv_xproj.cu": [
        ("an image's last tokens see the next image",
         "bool valid = t >= 0 && position < L ⟦→+ BACK ⟧&& sequence < span.sequences;"),
        ("the second direction reads the first half of the tokens", "first_read = ⟦g ? span.L - span.H : →⟧0;"),
        ("logits lack eight of the step's columns", "if (k * 16 + ⟦8→16⟧ < RANK) w[1] ="),
        ("logits before all threads' copies of the weights are there",
         "        ⟦__syncthreads();\n        →⟧if (k_tile + 1 < k_tiles) fetch_step_proj("),
        ("tensors of more than 2^31 elements: other images",
         "u += ⟦b * span.L * u_stride→int(b * span.L * u_stride)⟧;"),
        ("the second direction's window begins in the wrong place",
         "row[m] = sequence * (span.L + BACK) + t - span.first + BACK - ⟦onward * →⟧BACK;"),
    ],
    "block/step_proj_bwd.cu": [
        ("the step's gradient lacks the last channels", "for (int w = 1; w < WARPS⟦→ - 1⟧; w++)"),
        ("dq is lost", "const Element *from = ⟦(n < STATES ? dk : dq)→dk⟧"),
        ("the last tokens' gradients of the step are missing",
         "⟦    if (i > 0) store_dstep(dprojected, cta.dstep[(i - 1) % 2], part + (i - 1) * int(parts), all);→⟧"),
        ("copies go to the stage that is read next", "fetch(cta.stages[(i + STAGES - ⟦1→2⟧) % STAGES]"),
        ("tensors of more than 2^31 elements: the second direction's gradients",
         "dstep_logits += ⟦g * tokens * D→int(g * tokens * D)⟧,"),
    ],
    "block/gate_outproj.cu": [
        ("drop-path of another image", "scales ? scales[⟦token→tile⟧ / L] : 1;"),
        ("sums over channels before all warps have theirs",
         "store(&parts[warp][half * 8 + lane / 4][n * 8 + lane % 4 * 2], sums[n][half]);⟦\n    __syncthreads();→⟧"),
        ("what is behind the last token is overwritten", "if (means && output == 0⟦ && token < all→⟧)"),
        ("the product lacks the last channels",
         "sum = ⟦sum + load<4>(&parts[w][row][c])→w < WARPS - 1 ? sum + load<4>(&parts[w][row][c]) : sum⟧;"),
    ],
    "block/gate.cuh": [
        ("the sum of both directions in place of their mean", "mean.at[c] *= ⟦0.5f→1⟧;"),
    ],
    "block/tiles.cuh": [
        ("Hopper: weights of other channels", "eighth = d % K_TILE / 8 ^ row ⟦/ 2 →⟧% 4;"),
    ],
    "block/gate_outproj_sm90.cu": [
        ("Hopper: drop-path of another image", "gate<Element>(y_0[w], y_1[w], zs[w], scale[⟦w % 2→0⟧])"),
        ("Hopper: the norm has no eps", "rsqrtf(squares[0] / C⟦ + float(eps)→⟧)"),
        ("Hopper: the norm adds squares in another order than pack_weights",
         "for (int ⟦distance = 4; distance > 0; distance /= 2)\n            UNROLLED for (int n = 0; n < distance; n++)"
         " squares[n] += squares[n + distance→n = 1; n < 8; n++) squares[0] += squares[n⟧];"),
        ("Hopper: weights are overwritten while products read them",
         "wait_for_products<⟦1→2⟧>();  // waits for all products except the newest"),
        ("Hopper: products of weights that have not arrived",
         "⟦if (k % K_STEPS == 0) wait_for(stages.full(), stages.parity());→⟧"),
        ("Hopper: tensors of more than 2^31 elements: other tokens", "i64 at = ⟦i64(first)→first⟧ * D + channel;"),
        ("Hopper: norms of tokens that belong to another group",
         "store_norm(sums, xhat, rstd, eps, token, ⟦end→of.all⟧, lane);"),
    ],
    "block/gate_outproj_bwd_sm90.cu": [
        ("Hopper: the gradient of out_proj counts dropped images", "of_gated.at[j] = ⟦scale[i] * →⟧m.at[j] * silu;"),
        ("Hopper: products of weights that other threads have not written", "⟦    wait_for(weights_there, 0);→⟧"),
        ("Hopper: the last round's tokens have no gradients",
         "⟦int(rounds→(int(rounds) - (rounds > 1)⟧);  // number of tokens that all CTAs process"),
        ("Hopper: dy is that of the sum of both directions", "of_y.at[j] = ⟦0.5f * →⟧dgated * silu;"),
        ("Hopper: drop-path of the image before",
         "scale[i] = scales && token + i * 8 < end ? scales[⟦(token + i * 8)→token⟧ / L] : 1;"),
    ],
    "cuda/pipeline.cuh": [
        ("Hopper: a stage is given back that is still read",
         "return full() + (⟦(stage() == 0) * DEPTH + →⟧DEPTH - 1) * 8;"),
        ("Hopper: a stage is read again before it is filled again",
         "position = position + 1 < ⟦2 * →⟧DEPTH ? position + 1 : 0;"),
    ],
    "block/silu.cuh": [
        ("wrong gradient of SiLU", "return s * fmaf(x, ⟦1 - →⟧s, 1);"),
    ],
    "embedding/patchify.cu": [
        ("channels of an image are the first one", "load<V>(images + ⟦c→0⟧ * channel)"),
        ("rows of patches are exchanged with columns of patches", "i64(⟦cell / w→cell / h⟧ * PATCH_H + y)"),
        ("tensors of more than 2^31 pixels: other images",
         "images += ⟦image→int(image)⟧ * CHANNELS * ⟦channel→int(channel)⟧ +"),
        ("tensors of more than 2^31 pixels: patches get lost", "patches += ⟦i64(patch)→int(patch)⟧ * CHANNELS"),
        ("threads after the last pixel write", "if (⟦i >= count→false⟧) return;"),
    ],
    "embedding/add_embeddings.cu": [
        ("patches after the class token belong to the token before", "(token⟦ - (token > class_token)→⟧) * C + c"),
        ("the class token has the bias of patches", "at.is_patch() ? bias : ⟦class_token→bias⟧;"),
        ("the class token has the values of a patch", "b < B⟦ && at.is_patch()→⟧) patch[i] ="),
        ("an odd number of images: patches after the last image are read", "⟦b < B && →⟧at.is_patch()) patch[i] ="),
        ("an odd number of images: images after the last are written",
         "if (i64 b = i64(at.group) * IMAGES + i; ⟦b < B→true⟧) store("),
        ("tensors of more than 2^31 elements: other tokens", "store(x + ⟦b→int(b)⟧ * ⟦L * C→int(L * C)⟧, to_floats"),
        ("the class token's gradient is a patch's", "b < B⟦ && at.is_patch()→⟧)\n                store(dprojected"),
        ("gradients after the last image are read", "if (i64 b = start + i * parts; ⟦b < B→true⟧) gradient[i] ="),
        ("an image is missing in the sums", "start += IMAGES * parts⟦→ + 1⟧"),
        ("all groups of images write the same sums", "store(sums + ⟦at.group→0⟧ * L * C"),
        ("tensors of more than 2^31 elements: other images' gradients",
         "gradient[i] = load<V>(dx + ⟦b→int(b)⟧ * ⟦L * C→int(L * C)⟧);"),
        ("channels after the last token are processed", "is_valid = ⟦token < L→true⟧;"),
    ],
    "augment/augment.cu": [
        ("weights are cut, not rounded", "int(weight * ONE⟦ + (weight < 0 ? -0.5 : 0.5)→⟧)"),
        ("the first tap is one too late", "max(int(centre - support + ⟦0→1⟧.5), 0)"),
        ("enlarged crops get a wider filter", "stretch = scale⟦ < 1 ? 1 : scale→⟧"),
        ("rows beyond a window are not left out", "bool inside = of >= 0⟦ && of < axis.resized→⟧;"),
        ("rows below a resized crop end the rows of their tile",
         "last = ⟦min(→⟧i64(min(top + TILE, height))⟦, crop.axes[0].resized - crop.axes[0].offset)→⟧ - 1;"),
        ("crops are never flipped", "column = ⟦crop.flip ? width - 1 - of_lane : →⟧of_lane,"),
        ("the last row of a chunk is not resized", "if (y + r < stop⟦→ - 1⟧)"),
        ("threads do not wait for the resized rows", "level(resized[r][c]);\n        }⟦\n        __syncthreads();→⟧"),
        ("resized rows are overwritten while other threads read them",
         "sums[c][i] += bytes[i] * weight;\n            }\n        }⟦\n        __syncthreads();→⟧"),
        ("the first row of each chunk after the first is not added", "y = max(row_first, start⟦→ + (start > begin)⟧);"),
        ("the last of an odd number of bytes is not stored", "if (i ⟦→+ 1 ⟧< count) to[i] = bytes"),
        ("transformed pixels end with a tile", "x < ⟦min(tile.left + TILE, width)→tile.left + TILE⟧; x += 8"),
        ("quotients are not corrected",
         "return ⟦fmaf(fmaf(-quotient, deviation, centred), reciprocal, quotient)→quotient⟧;"),
        ("boxes that begin between four elements are not erased", "x <⟦= -4→ 0⟧ || x >= rest.erased_width"),
        ("regions that begin between four elements are not mixed", "at.x⟦ + 4→⟧ > rest.left"),
        ("a histogram without its last barrier",
         "counts[i * COPIES] += counts[i * COPIES + copy];⟦\n    __syncthreads();→⟧"),
        ("one copy of a histogram is not added", "for (int copy = ⟦1→2⟧; copy < COPIES; copy++)"),
        ("Equalize begins at 0", "(⟦step / 2 + →⟧levels.below"),
        ("Equalize exceeds white", "/ step, i64(⟦255→999⟧))"),
        ("Solarize spares its threshold", "value >⟦=→⟧ argument"),
        ("Contrast's mean is cut, not rounded", "double(sum[0]) / pixels⟦ + 0.5→⟧"),
        ("an enhanced level wraps", "return v ⟦<= 0 ? 0 : v >= 255 ? 255 : u8→>= 255 ? 255 : int⟧(v);"),
        ("the cubic's last term has another sign", "twist = at - before - next ⟦+→-⟧ after"),
        ("what comes from the last half pixel is outside", "from_x < W ⟦→- 0.5 ⟧&&"),
        ("edges are smoothed across rows", "if (⟦x == 0 || →⟧y == 0 ||"),
        ("smoothed levels are cut, not rounded", "⟦(2 * sum + 13)→2 * sum⟧ / 26"),
        ("blurred boxes end a pixel early", "j <⟦=→⟧ at + radius; j++) sum"),
        ("a blur is taken twice", "pass < ⟦3→2⟧"),
        ("a blur does not wait for its neighbours",
         "ends * end_weight + (1 << 23)) >> 24;\n        }⟦\n        __syncthreads();→⟧"),
        ("noise without its first key", "unsigned(second >> 32) ^ b⟦ ^ key_0→⟧"),
        ("noise of nine rounds", "round < ⟦10→9⟧"),
        ("erased boxes are a row too high", "y < 0 || y >⟦=→⟧ rest.erased_height"),
        ("a partner keeps its pixels where it is erased", "normalise(⟦rests[rest.partner]→rest⟧,"),
        ("mixed shares are swapped",
         "rest.share * ⟦values.at[i] + (1 - rest.share) * others→others.at[i] + (1 - rest.share) * values⟧.at[i]"),
        ("the last of an odd number of pixels is not written", "if (i ⟦→+ 1 ⟧< count) to[i] = values"),
        ("32-bit offsets of finished images", "float *to = out + (image * ⟦i64(elements)→elements⟧ + offset);"),
        ("32-bit offsets of images to transform", "const u8 *from = images + tile.image * ⟦i64(3)→3⟧ * pixels,"),
    ],
}
# fmt: on


def of_row(file: str, shows: str, text: str, after: str | None = None) -> Mutant:
    if after is not None:
        return Mutant(file, shows, text, after)
    return Mutant(file, shows, *(re.sub("⟦(.*?)→(.*?)⟧", side, text, flags=re.DOTALL) for side in (r"\1", r"\2")))


MUTANTS = [of_row(file, *row) for file, rows in TABLE.items() for row in rows]


class Run(NamedTuple):
    mutant: Mutant
    log: Path
    start: float


def tests_of(mutants: list[Mutant]) -> list[str]:
    """Return the test files that should detect the given mutants."""
    every = (TESTS.get(m.file, FOLDERS[Path(m.file).parent.name]) for m in mutants)
    return list(dict.fromkeys(file for files in every for file in files))


def start(mutant: Mutant | None, folder: Path, files: list[str]) -> tuple[int, Run]:
    """Start the test files in a child process, with a mutant or with the original sources."""
    folder.mkdir()
    run = Run(mutant, folder / "log", time.monotonic())
    pid = os.fork()
    if pid:
        return pid, run
    os.setsid()  # own session, so that the child can be killed together with its compilers
    log = os.open(run.log, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if mutant:
        sources, cache = folder / "sources", folder / "cache"
        shutil.copytree(source.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
        path = sources / mutant.file
        path.write_text(path.read_text().replace(mutant.before, mutant.after))
        cache.mkdir()
        for library in emulator.CACHE.iterdir():  # reuse compiled kernels that the mutant does not change
            (cache / library.name).symlink_to(library)
        source.SOURCES, emulator.CACHE = sources, cache
    code = 3
    try:
        code = pytest.main([*PYTEST, *files])
    finally:
        sys.stdout.flush()
        os._exit(code)


def outcome(status: int, run: Run) -> str:
    """Return the test, signal or exit status that detected the mutant, or "" if the mutant survived."""
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\w+)", run.log.read_text(), re.M)
    return "" if os.WEXITSTATUS(status) == 0 else failed[1] if failed else f"exit status {os.WEXITSTATUS(status)}"


def why_stale(mutant: Mutant) -> str | None:
    """Return the reason why the mutant cannot be planted, or None if the mutant can be planted."""
    path = source.SOURCES / mutant.file
    if not path.is_file():
        return "the file does not exist"
    count = path.read_text().count(mutant.before)
    return None if count == 1 else f"the file contains the quote {count} times: {mutant.before!r}"


def report_stale() -> int:
    """Print mutants with stale quotes, and CUDA sources without a mutant. Return the number of printed lines."""
    stale = [f"{m.file}: {m.shows}: STALE: {why}" for m in MUTANTS if (why := why_stale(m))]
    files = {path.relative_to(source.SOURCES).as_posix() for path in source.SOURCES.glob("*/*.cu*")}
    # Mutants of sm90.cuh and overlap.cuh would not be detected, because the emulator replaces sm90.cuh and runs one
    # kernel at a time.
    without = sorted(files - {"cuda/sm90.cuh", "cuda/overlap.cuh", "cuda/types.cuh"} - {m.file for m in MUTANTS})
    for line in [*stale, *(f"{file}: no mutant" for file in without)]:
        print(line)
    return len(stale) + len(without)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="only report stale quotes and files without a mutant")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    if args.check:
        return report_stale() > 0
    named = [m for m in MUTANTS if any(word in f"{m.file}: {m.shows}" for word in args.words or [""])]
    chosen = []
    for m in named:
        if why := why_stale(m):
            print(f"{m.file}: {m.shows}: STALE: {why}")
        else:
            chosen.append(m)
    with tempfile.TemporaryDirectory() as folder:
        pid, run = start(None, Path(folder, "without"), tests_of(chosen))
        if found := outcome(os.waitpid(pid, 0)[1], run):
            print(run.log.read_text())
            print(f"The tests fail without a mutant: {found}")
            return 1
        waiting, running, noticed = list(enumerate(chosen)), {}, 0
        while waiting or running:
            while waiting and len(running) < args.jobs:
                number, mutant = waiting.pop(0)
                pid, run = start(mutant, Path(folder, str(number)), tests_of([mutant]))
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
                found = f"noticed by {by}" if by else "SURVIVED"
                print(f"{run.mutant.file}: {run.mutant.shows}: {found} ({seconds:.0f} s)", flush=True)
                shutil.rmtree(run.log.parent)
    print(f"{noticed} of {len(chosen)} mutants noticed, {len(named) - len(chosen)} stale")
    return noticed < 0.9 * len(chosen)


if __name__ == "__main__":
    sys.exit(main())
