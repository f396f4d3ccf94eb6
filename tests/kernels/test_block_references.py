"""Tests of a block's kernels against their reference implementations, emulated on a CPU; some also run on a GPU."""

import functools
import math

import emulator
import pytest
import torch
from blocks import close, make_block, on_an_emulated_gpu, weights_of
from emulator import EMULATED
from reference_kernels import ReferenceKernels, in_tiles
from scans import relative_error
from spills import NVRTC, assert_no_spills
from torch.utils._pytree import tree_map_only

from vil.kernels import backends
from vil.kernels.block import (
    add_slices,
    conv,
    conv_backward,
    conv_xproj,
    gate,
    gate_outproj,
    gate_outproj_bwd_sm90,
    gate_outproj_sm90,
    in_proj_pool_sm90,
    kernels,
    norm_backward,
    pack_weights,
    pool,
    pooled_conv_backward,
    projection_gradients,
    scan_image,
    scan_lines,
    scan_lines_bwd,
    step_proj_bwd,
    sum_lines,
    unpack_gradients,
)
from vil.kernels.block.gate import GateInputs
from vil.kernels.block.lines import SEGMENT, Lines
from vil.kernels.cuda import hardware, launches
from vil.kernels.cuda.elements import ELEMENT
from vil.models.block import LonghornMixer


@NVRTC
@pytest.mark.parametrize(("arch", "dtype"), [("sm_90", "bf16"), ("sm_90", "float"), ("sm_80", "bf16")])
def test_kernels_of_the_block_compile_without_spills(arch, dtype):
    """Kernels compile almost without spills: all variants for sm_90 and bf16, otherwise each source's last variant."""
    types = {name: t for t, name in ELEMENT.items()}
    t, small = types[dtype], dtype != "float"
    packing = [dict(INPUT=dtype, PARAMETER="float", VECTOR=4, WIDTH=width, TAPS=4) for width in (192, 768)]
    of_conv_xproj = [
        conv_xproj.macros_of(t, R + 32, R, 4, logits) for R in (16, 24) for logits in (False, True) if small
    ]  # fmt: skip
    widths, hopper = (192, 384) if small else (), arch == "sm_90"
    named = {
        pack_weights: packing,
        unpack_gradients: packing,
        norm_backward: packing,
        gate: [dict(packing[0], POOLED=pooled) for pooled in (0, 1)],
        conv: [dict(INPUT=dtype, TAPS=4, VECTOR=8 if small else 4)],
        conv_backward: [conv_backward.macros_of(t, 8 if small else 4, 4, P) for P in (48, 56, 80, 144)],
        conv_xproj: of_conv_xproj,
        scan_lines: [
            scan_lines.macros_of(recurrence, torch.empty(2, 1, S, D, dtype=t, device="meta"), R + 32, R)
            for recurrence in backends.RECURRENCES for S, D, R in ((15, 384, 16), (15, 768, 24)) if small
        ],
        projection_gradients: [
            projection_gradients.macros_of(t, D, R + 32, R) for D, R in ((384, 16), (1536, 48), (768, 24)) if small
        ],
        scan_image: [
            scan_image.macros_of(t, *size)
            for size in ((384, 16, 32), (384, 16, 64), (1536, 48, 32, 4), (1536, 48, 64, 4), (768, 24, 64)) if small
        ],
        add_slices: [dict(INPUT=dtype, SLICES=4)] if small else [],
        sum_lines: [dict(INPUT=dtype, VECTOR=8 if small else 4, THREADS=192)],
        step_proj_bwd: [step_proj_bwd.macros_of(t, D, R, 16) for D, R in ((384, 16), (768, 24)) if small],
        gate_outproj: [dict(INPUT=dtype, WIDTH=C, POOLED=pooled) for C in widths for pooled in (0, 1)],
        gate_outproj_sm90: [
            gate_outproj_sm90.macros_of(t, C, keep, pooled)
            for C, keep in ((192, True), (384, False), (384, True)) for pooled in (False, True) if small and hopper
        ],
        **{module: [dict(INPUT=dtype, TAPS=4, VECTOR=2, PIECE=8 if small else 4, SEGMENT=SEGMENT, **launch)]
           for module, launch in ((pool, dict(THREADS=96, CTAS=8 if small else 6)),
                                  (pooled_conv_backward, dict(THREADS=192, CTAS=2)))},
        gate_outproj_bwd_sm90: [gate_outproj_bwd_sm90.macros_of(t, C) for C in widths if hopper],
        in_proj_pool_sm90: [
            in_proj_pool_sm90.macros_of(t, C, keep) for C in widths for keep in (False, True) if hopper
        ],
    }  # fmt: skip
    assert_no_spills(
        [
            (module.SOURCE, arch + "a" * module.SOURCE.only_hopper, macros)
            for module, all_macros in named.items() for macros in (all_macros if small and hopper else all_macros[-1:])
        ]
    )  # fmt: skip


@NVRTC
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_backward_scan_of_lines_spills_few_registers(arch):
    """scan_lines_bwd spills at most 32 registers, and with 15 lines none inside the loop over lines."""
    sizes = ((15, 384, 16), (16, 768, 24), (15, 1536, 48, 4), (15, 768, 24))
    macros = [scan_lines_bwd.macros_of(torch.bfloat16, *size) for size in sizes]
    assert_no_spills([(scan_lines_bwd.SOURCE, arch, m) for m in macros], allowed=128)


def random_tensors(device, *kinds):
    """Return random tensors of the given sizes and dtypes."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=random).to(device, dtype) for size, dtype in kinds]


def on_both(emulated, on_a_gpu):
    """Parametrize a test over shapes on an emulated GPU and on a real GPU, in bf16 and fp16."""
    cases = [(*case, torch.bfloat16) for case in emulated] + [(*emulated[0], torch.float16)]
    large = [(128, 197, 384, 132), (70, 197, 192, 132), (1, 197, 384, 132), *on_a_gpu]
    return pytest.mark.parametrize(
        ("device", "shape", "hopper", "dtype"),
        [pytest.param("cpu", *case, marks=EMULATED, id=f"emulated-{case}") for case in cases]
        + [
            pytest.param("cuda", shape, True, dtype, marks=pytest.mark.gpu)
            for shape in large for dtype in (torch.bfloat16, torch.float16)
        ],
    )  # fmt: skip


# Cases (B, L, C, multiprocessors) cover complete and partial tiles, and sequences that end inside a tile.
GATED = [(3, 33, 192, 1), (1, 97, 384, 1), (2, 77, 384, 1), (2, 96, 192, 1), (2, 19, 192, 12), (1, 7, 384, 8)]


@on_both([(shape, True) for shape in GATED if shape[:2] != (1, 97)] + [(few, False) for few in GATED[4:]], GATED)
def test_gate_outproj_equals_the_plain_one(dtype, device, shape, hopper, monkeypatch, poison):
    if device == "cpu":
        emulator.as_if_on_a_gpu(monkeypatch, hopper=hopper)
    B, L, C, multiprocessors = shape
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: multiprocessors)
    D = 2 * C
    h = next(h for h in range(math.isqrt(L - 1), 0, -1) if (L - 1) % h == 0)
    rows, columns = (Lines.of(h, (L - 1) // h, columns) for columns in (False, True))
    x, y, uz, out_proj, scale, of_rows, of_columns = random_tensors(
        device, ((B * L, C), torch.float32), ((2, B, L, D), dtype), ((B, L, 2 * D), dtype), ((C, D), dtype),
        ((B,), torch.float32), *(((B, lines.S, D), dtype) for lines in (rows, columns)),
    )  # fmt: skip
    z = uz[..., D:]
    before = x.clone()
    assert kernels.fuses_product(x, D, dtype)
    tiles = kernels.empty_tiles(B * L, out_proj, dtype)
    if tiles is not None:
        tiles.copy_(in_tiles(out_proj))
    reads = GateInputs(*y), GateInputs(y[0], of_rows, rows), GateInputs(y[0], of_columns, columns)
    for read, scale_B, keep in zip((*reads, reads[0]), (scale, scale, None, None), (True, True, False, False)):
        (out, mean, norm), *again = (
            kernels.gate_outproj(x, read, z, scale_B, out_proj, tiles, keep, 1e-5) for _ in range(2 if keep else 1)
        )
        assert torch.equal(x, before)
        assert all(torch.equal(out, other) for other, *_ in again)
        exactly = GateInputs(read.first.double(), read.second.double(), read.lines)
        gated, truth = ReferenceKernels.gate(exactly, z.double(), None if scale_B is None else scale_B.double(), keep)
        expected = x + gated.to(dtype).double().flatten(0, 1) @ out_proj.double().t()
        assert relative_error(out, expected) < 1e-4  # the gate's output may be rounded differently
        if keep:
            close(mean, truth, dtype, "mean")
        assert len(norm) == (0 if tiles is None else 2)
        for value, truth in zip(norm, ReferenceKernels.rms_norm(out.double(), 1e-5, torch.float64)):
            close(value, truth, dtype, "norm")


# In the cases (B, L, C, multiprocessors), a warp group processes 50, 50, 35, 2 and 33 tokens per round.
GATED_BACKWARD = [(3, 33, 192, 1), (1, 197, 384, 1), (5, 83, 192, 9), (3, 3, 192, 12), (1, 65, 384, 1)]


@on_both([(shape, True) for shape in GATED_BACKWARD], GATED_BACKWARD)
def test_gate_outproj_backward_equals_the_plain_one(dtype, device, shape, hopper, monkeypatch, poison):
    if device == "cpu":
        monkeypatch.setattr(launches, "launch", emulator.launch)
        monkeypatch.setattr(gate_outproj_sm90, "fits", lambda *args: True)  # run the kernel even for few tokens
        monkeypatch.setattr("vil.kernels.block.gate.gate_backward", None)
    B, L, C, multiprocessors = shape
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: multiprocessors)
    D = 2 * C
    dout, out_proj, mean, uz, scale = random_tensors(
        device, ((B * L, C), dtype), ((C, D), dtype), ((B, L, D), dtype), ((B, L, 2 * D), dtype), ((B,), torch.float32)
    )
    z = uz[..., D:]
    # If `fits` is False, a matrix product is rounded before the gate kernel reads it, so more roundings are allowed.
    roundings = 1 if gate_outproj_sm90.fits(B * L, C, D, dtype, dout.device) else 3
    for scale_B in scale, None:
        duz, again = (torch.empty_like(uz) for _ in range(2))
        gated, gated_again = (
            kernels.gate_outproj_backward(dout, out_proj, mean, z, scale_B, *t.chunk(2, dim=-1)) for t in (duz, again)
        )
        assert torch.equal(duz, again)
        assert torch.equal(gated, gated_again)
        exactly = [t if t is None else t.double() for t in (dout, out_proj, mean, z, scale_B)]
        truth = torch.empty(2, B, L, D, device=device, dtype=torch.float64)
        close(gated, ReferenceKernels.gate_outproj_backward(*exactly, *truth), dtype, "gated")
        for value, expected in zip(duz.chunk(2, dim=-1), truth):
            close(value, expected, dtype, "duz", roundings)


def test_gate_outproj_backward_is_fused_for_supported_shapes(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, hopper=True)
    launched = []
    monkeypatch.setattr(launches, "launch", lambda source, entry, *args: launched.append(entry))
    C, D = 192, 384

    def entry(L=64, dtype=torch.bfloat16, start=0, D=D, z=None):
        uz, duz = (torch.empty(2 * L * D + start, dtype=dtype)[start:].view(1, L, 2 * D) for _ in range(2))
        z = uz[..., D:] if z is None else z
        dout, out_proj, mean = (torch.zeros(*size, dtype=dtype) for size in ((L, C), (C, D), (1, L, D)))
        kernels.gate_outproj_backward(dout, out_proj, mean, z, None, *duz.chunk(2, dim=-1))
        return launched.pop()

    assert entry() == entry(dtype=torch.float16) == "gate_outproj_backward"
    others = dict(L=63), dict(dtype=torch.float32), dict(start=4), dict(D=320)
    for case in *others, dict(z=torch.zeros(1, 64, D, dtype=torch.bfloat16)):
        assert entry(**case) == "gate_backward"


TAPS = 4  # number of filter taps
RANKS = [(8, 4), (24, 8)]  # pairs of the step's rank and the number of states
SHAPES = [(2, 21, 8, 40), (1, 70, 6, 10), (3, 1, 4, 36), (2, 67, 4, 128), (5, 26, 4, 64), (9, 21, 4, 33)]


def tokens_in(dtype):
    return lambda *sizes, dtype=dtype: torch.randn(*sizes).to(dtype)


def calls_of_conv_xproj(tokens, B, L, C, D, backward=False):
    u, _ = tokens(B, L, 2 * D).chunk(2, dim=-1)
    conv, conv_bias = torch.randn(2, D, TAPS), torch.randn(2, D)
    R, N = RANKS[L % 2]
    x_proj = tokens(2, R + 2 * N, D)
    for H in (L, L // 2 + 1):
        if backward:
            yield u, tokens(2, B, H, D), tokens(2, B * H, R + 2 * N), x_proj, conv, conv_bias
        else:
            yield u, conv, conv_bias, x_proj, tokens(2, D, R), H


def calls_of_step_proj_backward(tokens, B, L, C, D):
    for R, N in RANKS:
        step = tokens(2, B * L, R + 2 * N)[..., :R]
        yield tokens(2, B * L, D), step, tokens(2, D, R), *tokens(2, 2, B * L, N)


def calls_of_gate(tokens, B, L, C, D):
    _, z = tokens(B, L, 2 * D).chunk(2, dim=-1)
    for scale in (None, torch.rand(B)):
        yield GateInputs(*tokens(2, B, L, D)), z, scale, True
        yield GateInputs(*tokens(2, B, 1, D)), z[:, L // 2 :][:, :1], scale, True
        if L > 1:
            lines = Lines.of(L - 1, 1, columns=scale is None)
            yield GateInputs(tokens(B, L, D), tokens(B, lines.S, D), lines), z, scale, True


def calls_of_gate_backward(tokens, B, L, C, D):
    _, z = tokens(B, L, 2 * D).chunk(2, dim=-1)
    for scale in (None, torch.rand(B)):
        yield tokens(B, L, D), tokens(B, L, D), z, scale


def calls_of_norm_backward(tokens, B, L, C, D):
    yield tokens(B * L, C), tokens(B * L, C), torch.rand(B * L), tokens(B * L, C, dtype=torch.float32)


def calls_of_pack_weights(tokens, B, L, C, D):
    for x in (tokens(B * L, C, dtype=torch.float32), None):
        yield weights_of(make_block(LonghornMixer, C), detach=True), tokens(0).dtype, None, x, 1e-5, True


def calls_of_unpack_gradients(tokens, B, L, C, D):
    weights, parts, D = weights_of(make_block(LonghornMixer, C), detach=True), 3, 2 * C
    P, R = weights.sizes().padded_P, weights.sizes().padded_R
    dfolded, dout_proj = torch.randn(parts + 3, 2 * D, C), torch.randn(parts - 1, C, D)
    dfilters, dx_proj = torch.randn(parts, 2, TAPS + 1, D), torch.randn(2, parts, P, D)
    dstep_proj, dskips, dchannels = torch.randn(2, parts, D, R), torch.randn(parts + 1, 2, D), torch.randn(2, 2, D)
    # The gradients of the skip weights and of step_bias have other memory layouts in pooled blocks (`dskips`) than in
    # the scan (`dchannels`).
    for of_skips, of_bias in ((dskips, dskips.flip(0)), (dchannels[None, :, 0], dchannels[None, :, 1])):
        yield (
            weights.norm, weights.in_proj, weights.sizes(), dfolded, dout_proj, dfilters, dx_proj, dstep_proj,
            of_skips, of_bias, tokens(0).dtype,
        )  # fmt: skip


CALLS = {
    "conv_xproj": calls_of_conv_xproj,
    "conv_backward": functools.partial(calls_of_conv_xproj, backward=True),
    "step_proj_backward": calls_of_step_proj_backward,
    "gate": calls_of_gate,
    "gate_backward": calls_of_gate_backward,
    "norm_backward": calls_of_norm_backward,
    "pack_weights": calls_of_pack_weights,
    "unpack_gradients": calls_of_unpack_gradients,
}
WRITTEN = {"conv_backward": 1, "gate_backward": 2}  # number of (B, L, D) arguments that each kernel overwrites


def results(name, kernel, inputs, written):
    """Return all results of a kernel or its reference, also those written in place, with partial sums added up."""
    values = kernel(*inputs, *written)
    if name == "conv_backward":
        values = values.sum(0, keepdim=True)
    if name == "step_proj_backward":
        values = values[0], values[1].sum(1, keepdim=True)
    if name == "pack_weights":
        packed, norm = values
        values = [*kernels.PackedWeights.of(packed, inputs[0].sizes()), *(t for t in norm if t is not None)]
    if name == "unpack_gradients":
        values = values.split([math.prod(shape) for shape in inputs[2].shapes()])
    return [*([values] if isinstance(values, torch.Tensor) else values), *written]


@EMULATED
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(dtype, shape) for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES] + [(torch.float16, SHAPES[5])],
)
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_emulated_on_a_cpu_equals_its_definition(name, dtype, shape, monkeypatch, poison):
    on_an_emulated_gpu(monkeypatch)
    torch.manual_seed(0)
    B, L, _, D = shape
    for inputs in CALLS[name](tokens_in(dtype), *shape):
        written = [torch.empty(B, L, D, dtype=dtype) for _ in range(WRITTEN.get(name, 0))]
        exactly = tree_map_only(torch.Tensor, torch.Tensor.double, [*inputs])
        exactly = [torch.float64 if i is dtype else i for i in exactly]
        truths = results(name, getattr(ReferenceKernels, name), exactly, [t.double() for t in written])
        for value, truth in zip(results(name, getattr(kernels, name), inputs, written), truths, strict=True):
            close(value, truth, dtype, name)
