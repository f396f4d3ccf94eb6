"""Tests of the fused block's emulated kernels (eps, many images per CTA, large offsets), and of kernel selection."""

import functools
import math

import emulator
import pytest
import torch
from blocks import close, make_block, weights_of
from reference_kernels import ReferenceKernels, in_tiles
from torch.utils._pytree import tree_map_only

from vil.kernels.block import conv, conv_backward, gate_outproj_sm90, kernels
from vil.kernels.block.weights import BlockWeights
from vil.kernels.cuda import hardware, launches, products
from vil.models.block import LonghornMixer

pytestmark = emulator.EMULATED
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Emulate the kernels on a CPU. The emulated GPU is older than Hopper and has one multiprocessor."""
    emulator.as_if_on_a_gpu(monkeypatch)


def small_tokens(T, C):
    """Return tokens with mean squares of 0, far below eps = 1e-5, close to eps, and far above eps."""
    return torch.randn(T, C) * torch.tensor([0, 1e-4, 3e-3, 1.0])[torch.arange(T) % 4, None]


def normed(x, eps):
    scale = 1 / torch.sqrt(x.double().square().mean(-1) + eps)
    return x.double() * scale[:, None], scale


def block_weights(C, dtype=torch.float32):
    return BlockWeights.of([p.detach() for p in weights_of(make_block(LonghornMixer, C, dtype=dtype)).flat()])


def exactly(*tensors):
    """Convert tensors to fp64, including those in lists and named tuples."""
    return tree_map_only(torch.Tensor, torch.Tensor.double, tensors)


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_the_norm_of_small_tokens_emulated_is_that_with_eps(eps, poison):
    weights, x = block_weights(8), small_tokens(21, 8)
    for dtype in (torch.float32, BF16):
        for copy in (True, False):
            _, (*norm, x_or_copy) = kernels.pack_weights(weights, dtype, None, x, eps, copy)
            for value, truth in zip(norm, normed(x, eps), strict=True):
                close(value, truth, dtype, "norm")
            assert torch.equal(x_or_copy, x)
            assert (x_or_copy is x) != copy


def test_parameters_of_16_bits_and_their_gradients_emulated(poison):
    """Packed 16-bit parameters, and their unpacked gradients, are correct up to rounding."""
    weights = block_weights(8, BF16)
    C, D, _, _, K = sizes = weights.sizes()
    packed, _ = kernels.pack_weights(weights, BF16, None, None, 1e-5, True)
    views = kernels.PackedWeights.of(packed, sizes)
    for value, truth in zip(views, ReferenceKernels.pack(*exactly(weights), torch.float64), strict=True):
        close(value, truth, BF16, "packed")
    # projections are packed in the matrix products' dtype, other weights in fp32
    assert [t.dtype for t in views] == 4 * [BF16] + 4 * [torch.float32]
    shapes = (
        (9, 2 * D, C), (8, C, D), (3, 2, K + 1, D), (2, 5, sizes.padded_P, D), (2, 7, D, sizes.padded_R), (4, 2, D),
        (6, 2, D),
    )  # fmt: skip
    given = weights.norm, weights.in_proj, sizes, *[torch.randn(shape) for shape in shapes]
    lengths = [math.prod(shape) for shape in sizes.shapes()]
    gradients = kernels.unpack_gradients(*given, BF16)
    truths = ReferenceKernels.unpack_gradients(*exactly(*given), torch.float64).split(lengths)
    assert gradients.dtype == BF16
    for value, truth in zip(gradients.split(lengths), truths, strict=True):
        close(value, truth, BF16, "gradient")


@pytest.mark.parametrize("C", [192, 384])
def test_the_emulated_hopper_kernel_returns_the_norm_with_eps(C, monkeypatch, poison):
    """On Hopper, the kernel of gate and out_proj also returns the RMSNorm of its output, with the given eps.

    The norm is bitwise identical to the norm that `pack_weights` computes in the next block.
    """
    emulator.as_if_on_a_gpu(monkeypatch, hopper=True)
    B, L = 2, 96
    x, out_proj = small_tokens(B * L, C), torch.zeros(C, 2 * C, dtype=BF16)
    y, uz = torch.randn(2, B, L, 2 * C).to(BF16), torch.randn(B, L, 4 * C).to(BF16)
    tiles = kernels.empty_tiles(B * L, out_proj, BF16).zero_()
    for eps in (1e-5, 1e-2):
        out, _, norm = kernels.gate_outproj(
            x, kernels.GateInputs(*y), uz[..., 2 * C :], None, out_proj, tiles, True, eps
        )
        assert torch.equal(out, x)
        _, (*same, _) = kernels.pack_weights(block_weights(C), BF16, None, out, eps, False)
        for value, truth, other in zip(norm, normed(x, eps), same, strict=True):
            close(value, truth, BF16, "norm")
            assert torch.equal(value, other)


@pytest.mark.parametrize(("B", "L"), [(11, 16), (13, 5), (5, 21), (2, 600)])
@pytest.mark.parametrize(("dtype", "D"), [(torch.float32, 33), (BF16, 64)])
def test_the_gradients_of_convolutions_of_many_images_for_each_block_emulated(dtype, D, B, L, poison):
    """Gradients of convolutions are correct if a CTA loops over groups of stretches (runs of consecutive tokens)."""
    for H in (L, L // 2 + 1):
        sizes = (B, L, D), (2, B, H, D), (2, B * H, 16), (2, 16, D)
        inputs = *[torch.randn(size).to(dtype) for size in sizes], torch.randn(2, D, 4), torch.randn(2, D)
        du, expected = torch.empty(B, L, D, dtype=dtype), torch.empty(B, L, D, dtype=torch.float64)
        truth = ReferenceKernels.conv_backward(*exactly(*inputs), expected)
        dfilters = kernels.conv_backward(*(t.clone() for t in inputs), du)
        close(dfilters.sum(0, keepdim=True), truth, dtype, "filters")
        close(du, expected, dtype, "du")


# Tests of kernel selection on a simulated GPU, Hopper or older


@pytest.fixture
def launched(monkeypatch):
    """Return a list that collects (entry point, number of CTAs) of each launch; no kernel runs."""
    found = []
    monkeypatch.setattr(launches, "launch", lambda source, entry, macros, ctas, *_: found.append((entry, ctas)))
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 132)
    return found


@pytest.mark.parametrize(
    ("T", "C", "hopper", "entry", "ctas"),
    [
        (16, 192, False, "gate_outproj_of_few", 4), (33 * 16, 192, False, "gate_outproj_of_few", 132),
        (33 * 16 + 1, 192, False, "gate", None), (16 * 16, 384, False, "gate_outproj_of_few", 128),
        (17 * 16, 384, False, "gate", None), (96 * 133, 384, False, "gate", None),
        (64 * 132 - 1, 384, True, "gate", None), (64 * 132, 384, True, "gate_outproj", 132),
    ],
)  # fmt: skip
def test_few_and_many_tokens_have_kernels_that_gate_and_multiply(T, C, hopper, entry, ctas, launched, monkeypatch):
    monkeypatch.setattr(hardware, "is_hopper", lambda device: hopper)
    monkeypatch.setattr("vil.kernels.block.gate_outproj.add_product", lambda x, a, b: x)

    def run(D=2 * C, dtype=BF16, columns=C):
        x, out_proj = torch.empty(T, columns)[:, :C], torch.empty(C, D, dtype=dtype)
        y, z = torch.empty(2, 1, T, D, dtype=dtype), torch.empty(1, T, 2 * D, dtype=dtype)[..., D:]
        launched.clear()
        tiles = kernels.empty_tiles(T, out_proj, dtype)
        out, _, norm = kernels.gate_outproj(x, kernels.GateInputs(*y), z, None, out_proj, tiles, True, 1e-5)
        fused = kernels.fuses_product(x, D, dtype)
        assert (out.data_ptr() == x.data_ptr()) != fused
        on_hopper = kernels.runs_hopper_kernels(T, C, D, dtype, x.device)
        assert (tiles is not None, len(norm)) == (on_hopper, 2 * on_hopper)
        ((entry, ctas),) = launched
        return entry, ctas if fused else None

    assert run() == run(dtype=torch.float16) == (entry, ctas)
    # Other widths, other dtypes and unaligned rows use a gate kernel and a separate matrix product with out_proj.
    if entry != "gate_outproj":
        assert run(columns=C + 1)[0] == "gate"
    assert run(dtype=torch.float32)[0] == run(D=3 * C)[0] == "gate"


@pytest.mark.parametrize(("T", "ctas"), [(1, 1), (128, 1), (129, 1), (1000, 3), (8448, 132), (25217, 132), (99, 7)])
def test_groups_share_the_tokens_evenly_in_as_few_rounds_as_64_each_take(T, ctas):
    rounds, tokens = gate_outproj_sm90.shares(T, ctas)
    assert 1 <= tokens <= 64
    assert rounds * 2 * ctas * tokens >= T > rounds * 2 * ctas * (tokens - 1)
    assert (rounds - 1) * 2 * ctas * 64 < T


@pytest.mark.parametrize(("T", "parts"), [(96, 16), (15, 15), (34, 2), (17, 1), (1, 1)])
def test_products_over_tokens_are_cut_into_equal_parts(T, parts):
    a, b = torch.randn(2, T, 5), torch.randn(2, T, 3)
    found = products.batched_over_tokens(a, b)
    by_part = a.unflatten(1, (parts, -1)), b.unflatten(1, (parts, -1))
    torch.testing.assert_close(found, torch.einsum("gptm,gptn->gpmn", *by_part))


@pytest.mark.parametrize(
    ("T", "M", "N", "parts"),
    [(4096, 130, 30, 4), (4096, 30, 300, 2), (4100, 257, 257, 1), (2047, 8, 8, 1), (3074, 9, 9, 2)],
)
def test_a_product_over_many_tokens_has_as_many_parts_as_fill_the_gpu(T, M, N, parts, monkeypatch):
    """Parts have at least 1,024 tokens, and their tiles of 128 x 128 sums are about as many as multiprocessors."""
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 8)
    a, b = torch.randn(T, M), torch.randn(T, N)
    found = products.over_tokens(a, b)
    by_part = a.unflatten(0, (parts, -1)), b.unflatten(0, (parts, -1))
    torch.testing.assert_close(found, torch.einsum("ptm,ptn->pmn", *by_part), rtol=1e-4, atol=1e-4)


def test_convolution_and_projection_are_fused_for_supported_shapes(launched, monkeypatch):
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 2)

    def run(B=2, L=96, D=64, R=16, N=16, taps=4, dtype=BF16, stride=None, start=0, u=None):
        u = torch.empty(B, L, stride or D, dtype=dtype)[..., start : start + D] if u is None else u
        x_proj, step_proj = torch.zeros(2, R + 2 * N, D, dtype=dtype), torch.zeros(2, D, R, dtype=dtype)
        launched.clear()
        kernels.conv_xproj(u, torch.empty(2, D, taps), torch.empty(2, D), x_proj, step_proj, L)
        ((entry, ctas),) = launched
        return entry, ctas

    assert run() == run(dtype=torch.float16) == ("conv_xproj", 2)
    assert run(B=3, L=97) == ("conv_xproj", 4)  # 147 pairs of tokens need four CTAs with 48 pairs each
    assert run(R=32) == run()  # rank 32 and 16 states give a projection of 64 channels
    assert run(L=95)[0] == run(B=16, L=24)[0] == "conv_xproj"  # at least 96 pairs of tokens use the fused kernel
    for other in (
        dict(L=94),  # 94 pairs of tokens are too few for two CTAs of 48 pairs
        dict(B=16, L=23),  # the fused kernel needs sequences of at least 24 tokens
        dict(D=96), dict(R=40), dict(taps=3), dict(dtype=torch.float32), dict(stride=68),
        dict(stride=128, start=4),
    ):  # fmt: skip
        assert run(**other)[0] == "conv", other
    # 96 tokens span slightly less than 2^31 bytes with the first token stride, and slightly more with the second.
    for apart in (11_184_808, 11_184_816) if emulator.has_sparse() else ():
        reached = "conv_xproj" if 2 * 96 * apart < 2**31 else "conv"
        assert run(u=emulator.sparse((2, 96, 64), BF16, (0, apart, 1)))[0] == reached


@pytest.mark.parametrize(
    ("D", "R", "dtype", "one_kernel"),
    [
        (128, 8, BF16, True), (768, 24, BF16, True), (384, 16, torch.float16, True), (768, 32, BF16, False),
        (896, 24, BF16, False), (192, 16, BF16, False), (128, 12, BF16, False), (128, 8, torch.float32, False),
    ],
)  # fmt: skip
def test_gradients_of_the_step_are_fused_if_registers_hold_the_weights(D, R, dtype, one_kernel, launched, monkeypatch):
    product = torch.bmm
    # Emulate `out_dtype` of torch.bmm, which only GPUs support.
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype=None: product(a, b).to(out_dtype))
    T, N = 1000, 16
    sizes = (2, T, D), (2, T, R), (2, D, R), (2, T, N), (2, T, N)
    dprojected, dstep_proj = kernels.step_proj_backward(*[torch.zeros(size, dtype=dtype) for size in sizes])
    # Each direction has one CTA per 16 tokens, but at most half as many CTAs as multiprocessors.
    assert launched == ([("step_proj_backward", 2 * min(63, 66))] if one_kernel else [])
    assert (dprojected.shape, dprojected.dtype) == ((2, T, R + 2 * N), dtype)
    assert (dstep_proj.shape, dstep_proj.dtype) == ((2, 63 if one_kernel else 10, D, R), torch.float32)


@pytest.mark.parametrize(
    ("B", "L", "most", "stretch", "parts"),
    [
        (128, 197, 33, 200, 32), (64, 577, 66, 148, 64), (8, 6085, 33, 188, 33), (1, 6085, 33, 48, 32),
        (1, 197, 66, 8, 7), (2, 50, 198, 8, 4), (1, 1, 396, 8, 1),
    ],
)  # fmt: skip
def test_gradients_of_convolutions_keep_a_gpu_busy_as_when_they_were_measured(B, L, most, stretch, parts):
    assert conv_backward.share(B, L, most) == (stretch, parts)
    assert stretch % 4 == 0
    rounds = -(-B * -(-L // stretch) // (4 * parts))  # each partial sum adds 4 stretches (runs of tokens) per round
    assert (rounds - 1) * 4 * parts < B * -(-L // stretch)


@pytest.mark.parametrize(
    ("B", "L", "D", "vector", "stretch"),
    [(1, 6085, 768, 4, 16), (1, 197, 384, 4, 8), (2, 50, 100, 4, 8), (1, 1, 64, 4, 4)],
)
def test_convolutions_keep_a_gpu_busy_as_when_they_were_measured(B, L, D, vector, stretch):
    assert conv.stretch_of(B * D // vector, L, 132) == stretch


# These tests use sparse tensors of more than 2^32 elements, for which only written pages use memory.
# All images except the last are 0, and only the last CTAs of each grid run.
L = 50


@pytest.fixture
def large(monkeypatch):
    """Return a function that makes a sparse tensor with random values in the last image, and 0 in all others."""
    if not emulator.has_sparse():
        pytest.skip("needs memory that is not reserved")

    def make(*size, dtype=BF16):
        t = emulator.sparse(size, dtype)
        end(t).copy_(torch.randn(end(t).shape).to(dtype))
        return t

    with emulator.sparse_where_large() as launch:
        monkeypatch.setattr(launches, "launch", launch)
        yield make


def end(t):
    """Return the last L tokens, which are the last image of the batch."""
    return t[..., -1:, :, :] if t.dim() > 2 and t.shape[-2] == L else t[..., -L:, :]


def test_offsets_of_more_than_32_bits_of_gates_emulated(large):
    B, D = 2**21 + 3, 40
    y, z, dgated, scale = large(2, B, L, D), large(B, L, 2 * D)[..., D:], large(B, L, D), torch.rand(B)
    gated, mean = kernels.gate(kernels.GateInputs(*y), z, scale, True)
    end_y, *given = exactly(end(y), end(z), scale[-1:])
    for value, truth in zip(
        (gated, mean), ReferenceKernels.gate(kernels.GateInputs(*end_y), *given, True), strict=True
    ):
        close(end(value), truth, BF16, "gate")
    duz, expected = emulator.sparse((B, L, 2 * D), BF16), torch.empty(1, L, 2 * D, dtype=torch.float64)
    gated = kernels.gate_backward(dgated, mean, z, scale, *duz.chunk(2, dim=-1))
    given = exactly(end(dgated), end(mean), end(z), scale[-1:])
    close(end(gated), ReferenceKernels.gate_backward(*given, *expected.chunk(2, dim=-1)), BF16, "gated")
    close(end(duz), expected, BF16, "duz")


def test_offsets_of_more_than_32_bits_of_norms_emulated(large):
    C, T = 8, 2**29 + 41
    x, dxhat, dresidual = large(T, C, dtype=torch.float32), large(T, C), large(T, C, dtype=torch.float32)
    _, (xhat, rstd, copy) = kernels.pack_weights(block_weights(C), BF16, None, x, 1e-5, True)
    for value, truth in zip((end(xhat), rstd[-L:]), normed(end(x), 1e-5), strict=True):
        close(value, truth, BF16, "norm")
    assert torch.equal(end(copy), end(x))
    dx, rounded = kernels.norm_backward(dxhat, xhat, rstd, dresidual)
    truth, _ = ReferenceKernels.norm_backward(*exactly(end(dxhat), end(xhat), rstd[-L:], end(dresidual)))
    close(end(dx), truth, BF16, "dx")
    assert torch.equal(end(rounded), end(dx).to(BF16))


@pytest.mark.parametrize("D", [40, 64])  # the kernel with projections supports D = 64, but not D = 40
def test_offsets_of_more_than_32_bits_of_convolutions_emulated(D, large, monkeypatch):
    B, P, R = 2**21 + 3, 16, 8
    u, conv, conv_bias = large(B, L, 2 * D)[..., :D], torch.randn(2, D, 4), torch.randn(2, D)
    x_proj, step_proj = torch.randn(2, P, D).to(BF16), torch.randn(2, D, R).to(BF16)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "bmm", lambda a, b: a.new_zeros(()).expand(*a.shape[:2], b.shape[2]))
        found = kernels.conv_xproj(u, conv, conv_bias, x_proj, step_proj, L)
    truths = ReferenceKernels.conv_xproj(*exactly(end(u), conv, conv_bias, x_proj, step_proj), L)
    for value, truth in list(zip(found, truths, strict=True))[: 3 if D == 64 else 1]:
        close(end(value), truth, BF16, "conv_xproj")
    # For a GPU with many multiprocessors, the work is divided as finely as possible.
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 2**40)
    dv, dprojected, du = large(2, B, L, D), large(2, B * L, P), emulator.sparse((B, L, 2 * D), BF16)[..., D:]
    dfilters = kernels.conv_backward(u, dv, dprojected, x_proj, conv, conv_bias, du)
    expected = torch.empty(1, L, D, dtype=torch.float64)
    given = exactly(end(u), end(dv), end(dprojected), x_proj, conv, conv_bias)
    close(dfilters[-16:].sum(0, keepdim=True), ReferenceKernels.conv_backward(*given, expected), BF16, "filters")
    close(end(du), expected, BF16, "du")


def test_offsets_of_more_than_32_bits_of_the_step_emulated(large, monkeypatch):
    # For a GPU with many multiprocessors, each CTA has only one tile.
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 2**40)
    T, D, R, N = 2**25 + 5, 128, 8, 4
    dstep_logits, step, dk, dq = large(2, T, D), large(2, T, R + 2 * N)[..., :R], large(2, T, N), large(2, T, N)
    step_proj = torch.randn(2, D, R).to(BF16)
    dprojected, dstep_proj = kernels.step_proj_backward(dstep_logits, step, step_proj, dk, dq)
    given = exactly(end(dstep_logits), end(step), step_proj, end(dk), end(dq))
    truths = ReferenceKernels.step_proj_backward(*given)
    close(end(dprojected)[1], truths[0][1], BF16, "dprojected")
    close(dstep_proj[1, -16:].sum(0), truths[1][1, 0], BF16, "dstep_proj")


def test_offsets_of_more_than_32_bits_of_gate_outproj_emulated(large, monkeypatch):
    B, C, D = 2**18 + 1, 192, 384
    T = B * L
    # With T / 128 multiprocessors, each warp group processes only one group of tokens.
    emulator.as_if_on_a_gpu(monkeypatch, -(-T // 128), hopper=True)
    monkeypatch.setattr(launches, "launch", functools.partial(emulator.launch, blocks=6))
    x, y, z = large(T, C, dtype=torch.float32), large(2, B, L, D), large(B, L, 2 * D)[..., D:]
    scale, out_proj = torch.rand(B), torch.randn(C, D).to(BF16)
    out, mean, norm = kernels.gate_outproj(
        x, kernels.GateInputs(*y), z, scale, out_proj, in_tiles(out_proj), True, 1e-5
    )
    end_y, *given = exactly(end(y), end(z), scale[-1:])
    gated, mean_truth = ReferenceKernels.gate(kernels.GateInputs(*end_y), *given, True)
    truth = end(x) + gated.to(BF16).double().flatten(0, 1) @ out_proj.double().t()
    torch.testing.assert_close(end(out).double(), truth, atol=2e-2, rtol=1e-4)
    close(end(mean), mean_truth, BF16, "mean")
    for value, expected in zip(norm, normed(end(out), 1e-5), strict=True):
        close(value[-L:], expected, BF16, "norm")
    # The last six CTAs of the grid run: two for each of three slices of channels, with 256 tokens per CTA.
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 3 * -(-T // 256))
    dout, duz = large(T, C), emulator.sparse((B, L, 2 * D), BF16)
    gated = kernels.gate_outproj_backward(dout, out_proj, mean, z, scale, *duz.chunk(2, dim=-1))
    expected = torch.empty(1, L, 2 * D, dtype=torch.float64)
    given = exactly(end(dout), out_proj, end(mean), end(z), scale[-1:])
    truth = ReferenceKernels.gate_outproj_backward(*given, *expected.chunk(2, dim=-1))
    close(end(gated), truth, BF16, "gated")
    close(end(duz), expected, BF16, "duz")
