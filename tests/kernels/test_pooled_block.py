"""Tests of pooled blocks: kernels against reference implementations, and the operator against the unfused block."""

import copy
import functools

import emulator
import pytest
import torch
from blocks import (
    MIXERS,
    Scale,
    close,
    make_block,
    on_an_emulated_gpu,
    operator_on_a_cpu,
    options_of,
    outcome,
    weights_of,
)
from emulator import EMULATED
from scans import relative_error

from vil.kernels import backends
from vil.kernels.block import (
    add_slices,
    in_proj_pool_sm90,
    kernels,
    pool,
    pooled_conv_backward,
    scan_image,
    scan_lines,
    scan_lines_bwd,
    sum_lines,
)
from vil.kernels.block.lines import Lines
from vil.kernels.cuda import hardware, launches
from vil.models import dispatch
from vil.models.block import Blocks, LonghornMixer, MambaMixer
from vil.models.tokens import middle_token

# Numbers of rows and columns may be even, odd or one, because the class token's position depends on them.
GRIDS = [(4, 6), (3, 5), (14, 14), (1, 7), (7, 1), (1, 1), (1, 300)]
DEVICES = [pytest.param("cpu", marks=EMULATED, id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def case(device, grid, columns, dtype, multiprocessors, monkeypatch, poison):
    """Return the pooled rows or columns as `Lines`, the inputs of the pooling kernels, and the inputs in fp64."""
    if device == "cpu":
        emulator.as_if_on_a_gpu(monkeypatch, multiprocessors)
    lines, g = Lines.of(*grid, columns), torch.Generator().manual_seed(0)
    B, L, S, D, K = 3, lines.L, lines.S, 72, 4

    def random(*size, dtype=dtype):
        return torch.randn(size, generator=g).to(device, dtype)

    tensors = dict(
        u=random(B, L, 2 * D)[..., :D], conv=random(2, D, K, dtype=torch.float32),
        bias=random(2, D, dtype=torch.float32), skip=random(2, D, dtype=torch.float32), dy=random(B, L, D),
        dmeans=random(2, B, S, D),
    )  # fmt: skip
    return lines, tensors, {name: t.double() for name, t in tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("dtype", "multiprocessors"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 5), (torch.float16, 2)]
)
def test_pooled_kernels_equal_their_definitions(case, dtype):
    lines, t, exact = case

    def run(t, pool, sum_lines, conv_backward):
        du = torch.empty(*t["u"].shape[:2], 2 * t["u"].shape[2]).to(t["u"]).chunk(2, dim=-1)[0]
        weights = t["conv"], t["bias"], t["skip"]
        filters, skips = conv_backward(t["u"], t["dy"], t["dmeans"], *weights, du, lines)
        return *pool(t["u"], *weights, lines), sum_lines(t["dy"], lines), du, filters, skips

    tested = pool.pool, sum_lines.sum_lines, pooled_conv_backward.pooled_conv_backward
    found, again = (run(t, *tested) for _ in range(2))
    truth = run(exact, pool.reference, sum_lines.reference, pooled_conv_backward.reference)
    names = "means", "skipped", "sums", "du", "dfilters", "dskips"
    for name, value, repeated, expected in zip(names, found, again, truth, strict=True):
        assert torch.equal(value, repeated)
        if name in ("dfilters", "dskips"):  # partial sums
            value, expected = value.sum(0), expected.sum(0)
        # Round fp32 sums to `dtype`, because they contain the error of tanh_fast.
        close(value.to(dtype), expected, dtype, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recurrence", backends.RECURRENCES)
@pytest.mark.parametrize(
    ("B", "S", "D", "R", "dtype"),
    [
        (1, 15, 384, 16, torch.bfloat16), (2, 16, 128, 24, torch.float16), (1, 33, 256, 8, torch.float16),
        (3, 1, 128, 8, torch.bfloat16),
    ],
)  # fmt: skip
def test_scan_lines_equals_its_definition(B, S, D, R, dtype, recurrence, device, monkeypatch, poison):
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch, multiprocessors=12)
    g = torch.Generator().manual_seed(0)

    def random(*size, dtype=dtype):
        return torch.randn(size, generator=g).to(device, dtype)

    means, x_proj, step_proj = random(2, B, S, D), random(2, R + 32, D) / D**0.5, random(2, D, R) / R**0.5
    A = -random(2, D, 16, dtype=torch.float32).exp() if recurrence == "selective" else None
    bias = random(2, D, dtype=torch.float32)
    assert scan_lines.fits(means, x_proj, step_proj)
    for other in (
        (means.repeat(1, 133, 1, 1), x_proj, step_proj),  # too many images for the multiprocessors of the GPU
        (means.repeat(1, 1, 65, 1), x_proj, step_proj),  # too many rows or columns for the kernel
        (means.float(), x_proj, step_proj), (means[..., 64:], x_proj, step_proj),
        # unsupported number of states, and unsupported rank of the step projection
        (means, x_proj[:, 16:], step_proj), (means, x_proj[:, 4:], step_proj[..., 4:]),
    ):  # fmt: skip
        assert not scan_lines.fits(*other)
    (found, states), (again, _) = (
        scan_lines.scan_lines(recurrence, means, x_proj, step_proj, A, bias) for _ in range(2)
    )
    assert torch.equal(found, again)
    assert states.shape == (2, B, 0, 16, D)
    exactly = [t if t is None else t.double() for t in (means, x_proj, step_proj, A, bias)]
    truth = scan_lines.reference(recurrence, *exactly)
    # scan_lines rounds steps, keys and queries like conv_xproj, so both kernels have the same tolerance.
    close(found, truth, dtype, "conv_xproj")


def inputs_of_scan(B, S, D, R, dtype, device):
    """Return random means, x_proj, step_proj and step_bias."""
    g = torch.Generator().manual_seed(0)
    sizes = (2, B, S, D), (2, R + 32, D), (2, D, R), (2, D)
    means, x_proj, step_proj, bias = (torch.randn(size, generator=g).to(device) for size in sizes)
    return means.to(dtype), (x_proj / D**0.5).to(dtype), (step_proj / R**0.5).to(dtype), bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("B", "S", "D", "R", "dtype", "slices"),
    [
        (3, 15, 384, 16, torch.bfloat16, 1), (2, 16, 768, 24, torch.bfloat16, 1), (2, 7, 128, 32, torch.float16, 1),
        (1, 3, 576, 8, torch.float16, 1), (5, 1, 64, 40, torch.bfloat16, 1),
        (1, 16, 128, 16, torch.float16, 1), (1, 14, 384, 16, torch.float16, 1),
        # With four CTAs or less, a warp has 32 channels, otherwise 64.
        (2, 15, 1536, 48, torch.bfloat16, 4), (1, 16, 256, 48, torch.bfloat16, 4), (2, 5, 128, 40, torch.float16, 2),
        (3, 16, 384, 24, torch.float16, 2), (5, 1, 192, 8, torch.bfloat16, 3),
    ],
)  # fmt: skip
def test_scan_image_equals_its_definition(B, S, D, R, dtype, slices, device, monkeypatch, poison):
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 1 if slices == 1 else 4)
    means, x_proj, step_proj, bias = inputs_of_scan(B, S, D, R, dtype, device)
    inputs = means, x_proj, step_proj, None, bias
    assert D < 1536 or scan_image.slices_of(D, R, means.device) == slices
    monkeypatch.setattr(scan_image, "slices_of", lambda D, R, device: slices)
    assert scan_image.fits("longhorn", means, x_proj, step_proj)
    assert not scan_image.fits("selective", means, x_proj, step_proj)
    for other in (
        (means.repeat(1, 1, 17, 1), x_proj, step_proj), (means.float(), x_proj, step_proj),
        (means[..., 32:], x_proj, step_proj), (means, x_proj[:, 16:], step_proj),
        (means, x_proj[:, 4:], step_proj[..., 4:]), (means[:, :0], x_proj, step_proj),
    ):  # fmt: skip
        assert not scan_image.fits("longhorn", *other)
    (found, states), (again, _) = (scan_image.scan_image("longhorn", *inputs) for _ in range(2))
    assert torch.equal(found, again)
    assert states.shape == (2, B, 0, 16, D)
    truth = scan_image.reference("longhorn", *[t if t is None else t.double() for t in inputs])
    # scan_image rounds steps, keys and queries like conv_xproj, so both kernels have the same tolerance.
    close(found, truth, dtype, "conv_xproj")


@pytest.mark.parametrize("device", DEVICES)
def test_slices_of_an_image_equal_one_cta(device, monkeypatch, poison):
    """Several CTAs per image (slices of channels) give the output and gradients of one CTA, up to rounding of sums."""
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch, multiprocessors=8)
    means, x_proj, step_proj, bias = inputs_of_scan(3, 15, 384, 16, torch.bfloat16, device)
    dy, found = torch.randn(3, 15, 384).to(means), []
    for slices in (1, 3):
        for module in (scan_image, scan_lines_bwd):
            monkeypatch.setattr(module, "slices_of", lambda D, R, device, slices=slices: slices)
        y, _ = scan_image.scan_image("longhorn", means, x_proj, step_proj, None, bias)
        gradients = scan_lines_bwd.line_gradients(means, x_proj, step_proj, bias, dy)
        found.append([y, *gradients[:-1], gradients.step_bias.sum(0)])
    for whole, sliced in zip(*found, strict=True):
        assert relative_error(sliced, whole.double()) < 3e-3


@pytest.mark.parametrize(
    ("D", "R", "most", "forward", "backward"),
    [
        (384, 16, 227, 1, 1), (768, 24, 227, 1, 1), (768, 48, 227, 2, 2), (1536, 48, 227, 4, 4), (1024, 32, 227, 4, 4),
        (1152, 40, 227, 3, 3), (2048, 64, 227, 8, 8), (1536, 48, 99, 4, 6), (128, 8, 99, 1, 1),
    ],
)  # fmt: skip
def test_slices_are_as_wide_as_shared_memory_allows(D, R, most, forward, backward, monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, shared_bytes=most << 10)
    found = [module.slices_of(D, R, torch.device("cpu")) for module in (scan_image, scan_lines_bwd)]
    assert found == [forward, backward]


@pytest.mark.parametrize(
    ("B", "S", "D", "expected"),
    [
        (1, 15, 768, "scan_lines"), (5, 15, 768, "scan_lines"), (6, 15, 768, None), (32, 15, 768, None),
        (33, 15, 768, "scan_image"), (11, 64, 384, "scan_lines"), (17, 16, 384, "scan_image"), (44, 17, 384, None),
        (2, 15, 1536, "scan_lines"), (3, 15, 1536, None), (16, 15, 1536, None), (17, 15, 1536, "scan_image"),
        (44, 15, 96, None),
    ],
)  # fmt: skip
def test_few_and_many_images_have_kernels_that_project_and_scan(B, S, D, expected, monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors=132)
    R = D // 32 + -(D // 32) % 8  # rank D // 32 of the step projection, rounded up to a multiple of 8
    sizes = (2, B, S, D), (2, R + 32, D), (2, D, R)
    scan = kernels.line_scan("longhorn", *(torch.empty(size, dtype=torch.bfloat16) for size in sizes))
    assert (scan and scan.__name__) == expected


@pytest.mark.parametrize(("B", "D", "expected"), [(16, 768, False), (17, 768, True), (1, 384, True), (1, 1536, True)])
def test_few_images_with_many_channels_do_not_use_scan_lines_backward(B, D, expected, monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors=132)
    R = D // 32 + -(D // 32) % 8
    sizes = (2, B, 15, D), (2, R + 32, D), (2, D, R)
    tensors = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
    assert kernels.backpropagates_lines("longhorn", *tensors) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("B", "S", "D", "R", "dtype", "slices"),
    [
        (3, 15, 64, 8, torch.bfloat16, 1), (3, 16, 384, 16, torch.float16, 1), (2, 9, 768, 24, torch.bfloat16, 1),
        (1, 8, 192, 24, torch.float16, 1), (5, 3, 64, 8, torch.bfloat16, 1), (2, 1, 128, 16, torch.float16, 1),
        (2, 15, 1536, 48, torch.bfloat16, 4), (3, 16, 256, 48, torch.float16, 2), (5, 5, 192, 24, torch.bfloat16, 3),
        (2, 1, 256, 8, torch.float16, 4), (3, 15, 128, 40, torch.bfloat16, 2),
    ],
)  # fmt: skip
def test_scan_lines_backward_equals_its_definition(B, S, D, R, dtype, slices, device, monkeypatch, poison):
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 4 * slices)  # two CTAs per direction and slice
    means, x_proj, step_proj, bias = inputs_of_scan(B, S, D, R, dtype, device)
    dy = torch.randn(B, S, D, generator=torch.Generator().manual_seed(1)).to(means)
    assert D < 1536 or scan_lines_bwd.slices_of(D, R, means.device) == slices
    monkeypatch.setattr(scan_lines_bwd, "slices_of", lambda D, R, device: slices)
    assert scan_lines_bwd.fits("longhorn", means, x_proj, step_proj)
    for other in (
        ("selective", means, x_proj, step_proj), ("longhorn", means.repeat(1, 1, 17, 1), x_proj, step_proj),
        ("longhorn", means.float(), x_proj, step_proj), ("longhorn", means[..., 8:], x_proj, step_proj),
        ("longhorn", means, x_proj[:, 16:], step_proj), ("longhorn", means, x_proj[:, 4:], step_proj[..., 4:]),
    ):  # fmt: skip
        assert not scan_lines_bwd.fits(*other)
    found, again = (scan_lines_bwd.scan_lines_backward(means, x_proj, step_proj, bias, dy) for _ in range(2))
    assert all(map(torch.equal, found, again))
    truth = scan_lines_bwd.reference(*(t.double() for t in (means, x_proj, step_proj, bias, dy)))
    for value, expected, parts in zip(found, truth, (None, 1, 1, 0), strict=True):
        # Step, keys, queries, states and their gradients are rounded to 16 bits, so gradients have several roundings.
        error = relative_error(value if parts is None else value.sum(parts), expected)
        assert error < (6e-3 if dtype == torch.bfloat16 else 8e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(4, 2, 33, 80), (2, 1, 1, 4), (3, 2, 64, 8)])
def test_slices_are_added_in_order_and_rounded_once(size, dtype, device, monkeypatch, poison):
    if device == "cpu":
        emulator.as_if_on_a_gpu(monkeypatch)
    parts = torch.randn(size).to(device)
    found = torch.empty(size[1:], dtype=dtype, device=device)
    add_slices.add_slices(parts, found)
    assert torch.equal(found, functools.reduce(torch.add, parts).to(dtype))
    close(found, add_slices.reference(parts.double()), dtype, "sum")


def inputs_of_in_proj_pool(B, lines, C, dtype, device):
    g = torch.Generator().manual_seed(0)
    D = 2 * C
    sizes = dict(xhat=(B * lines.L, C), in_proj=(2 * D, C)), dict(conv=(2, D, 4), bias=(2, D), skip=(2, D))
    xhat, in_proj = (torch.randn(size, generator=g) for size in sizes[0].values())
    products = [t.to(device, dtype) for t in (xhat, in_proj / C**0.5)]
    return [*products, *(torch.randn(size, generator=g).to(device) for size in sizes[1].values())]


# Each case is (images, grid, columns, C, multiprocessors). If C = 192, the third image of a CTA reuses memory for xhat.
IN_PROJ_POOL = [
    (3, (14, 14), True, 192, 2), (2, (13, 15), False, 384, 1), (3, (15, 13), True, 192, 1), (1, (12, 13), False, 192, 1)
]  # fmt: skip
ON_A_GPU = [(128, (14, 14), False, 384, 132), (300, (14, 14), True, 384, 132), (250, (14, 14), True, 192, 132)]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("device", "case", "dtype"),
    [pytest.param("cpu", case, torch.bfloat16, marks=EMULATED, id=f"emulated-{case}") for case in IN_PROJ_POOL]
    + [pytest.param("cpu", IN_PROJ_POOL[0], torch.float16, marks=EMULATED, id="emulated-fp16")]
    + [
        pytest.param("cuda", case, dtype, marks=pytest.mark.gpu)
        for case in IN_PROJ_POOL + ON_A_GPU for dtype in (torch.bfloat16, torch.float16)
    ],
)  # fmt: skip
def test_in_proj_pool_equals_its_definition(case, dtype, keep, device, monkeypatch, poison):
    B, grid, columns, C, multiprocessors = case
    if device == "cpu":
        emulator.as_if_on_a_gpu(monkeypatch, hopper=True)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: multiprocessors)
    lines = Lines.of(*grid, columns)
    xhat, in_proj, *others = inputs = inputs_of_in_proj_pool(B, lines, C, dtype, device)
    assert in_proj_pool_sm90.fits(B, in_proj, 4, dtype, lines)
    tiles = in_proj_pool_sm90.reference_tiles(in_proj)
    (uz, means, skipped), again = (kernels.in_proj_pool(xhat, tiles, *others, lines, keep) for _ in range(2))
    truth = in_proj_pool_sm90.reference(*(t.double() for t in inputs), lines)
    halves = [t.chunk(2, dim=-1) for t in (uz, again[0], truth[0])]
    for value, repeated, expected, roundings in (
        # u is written only if `keep` is true
        *((u, again, true, 2) for u, again, true in [next(zip(*halves))] if keep),
        (*(z for _, z in halves), 1),
        (means, again[1], truth[1], 2),  # u is rounded before the convolution
        (skipped, again[2], truth[2], 2),
    ):
        assert torch.equal(value, repeated)
        assert value.dtype == dtype
        # The tolerance covers the error of tanh_fast in addition to the rounding of bf16.
        close(value, expected, dtype, "in_proj_pool", roundings)


def test_in_proj_pool_runs_for_many_images_of_supported_sizes_on_hopper(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors=132, hopper=True)

    def fits(B=128, grid=(14, 14), columns=False, C=384, E=None, taps=4, dtype=torch.bfloat16):
        tiles = kernels.empty_in_proj_tiles(B, torch.empty(E or 4 * C, C), taps, dtype, Lines.of(*grid, columns))
        assert tiles is None or tiles.dtype == dtype
        return tiles is not None

    for supported in (
        {}, dict(C=192), dict(dtype=torch.float16), dict(grid=(12, 13), columns=True), dict(grid=(15, 13)),
        dict(grid=(13, 15), columns=True), dict(B=99), dict(B=198), dict(B=256),
    ):  # fmt: skip
        assert fits(**supported), supported
    for other in (
        dict(B=98), dict(B=133), dict(B=197), dict(grid=(16, 12)), dict(grid=(12, 16), columns=True),
        dict(grid=(14, 15)), dict(grid=(11, 11)), dict(grid=(11, 18)), dict(C=256), dict(E=384 * 2), dict(taps=3),
        dict(dtype=torch.float32),
    ):  # fmt: skip
        assert not fits(**other), other
    monkeypatch.setattr(hardware, "is_hopper", lambda device: False)
    assert not fits()


@EMULATED
def test_offsets_of_more_than_32_bits_of_in_proj_pool_emulated(monkeypatch):
    """The last image of a batch, whose offsets exceed 2^32 elements, equals the reference implementation."""
    if not emulator.has_sparse():
        pytest.skip("needs memory that is not reserved")
    B, C, lines = 2**17 + 1, 192, Lines.of(12, 12, True)
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors=2**40, hopper=True)
    xhat = emulator.sparse((B * lines.L, C), torch.bfloat16)
    last, in_proj, *weights = inputs = inputs_of_in_proj_pool(1, lines, C, torch.bfloat16, "cpu")
    xhat[-lines.L :] = last
    with emulator.sparse_where_large(blocks=1) as launch:
        monkeypatch.setattr(launches, "launch", launch)
        found = kernels.in_proj_pool(xhat, in_proj_pool_sm90.reference_tiles(in_proj), *weights, lines, True)
    truth = in_proj_pool_sm90.reference(*(t.double() for t in inputs), lines)
    for value, expected in zip((found[0][-1:], found[1][:, -1:], found[2][-1:]), truth, strict=True):
        close(value, expected, torch.bfloat16, "in_proj_pool", 2)


@pytest.fixture
def gpu(device, monkeypatch):
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch)
        monkeypatch.setattr(backends, "backend_for", lambda device: "cuda")
    return device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2.5e-2)])
def test_a_fused_pooled_block_equals_the_plain_one(
    dtype, tolerance, mixer, axis, middle, device, gpu, poison, monkeypatch
):
    """A fused pooled block, with all tokens or only the class token, equals the unfused block in fp64."""
    (h, w), C = ((3, 5) if axis == "rows" else (4, 3), 32) if device == "cpu" else ((14, 14), 192)
    block, truth = (make_block(mixer, C, drop_path=0.25, pool=axis).to(device).train() for _ in range(2))
    x, dy = torch.randn(2, 4, h * w + 1, C, device=device)
    monkeypatch.setattr(dispatch, "path_scale", lambda *_: x.new_tensor([4 / 3, 0, 4 / 3, 4 / 3]))
    truth.double().drop_path = Scale(x.new_tensor([4 / 3, 0, 4 / 3, 4 / 3]))
    expected = outcome(truth, x.double(), dy.double(), grid=(h, w), class_token_only=middle)
    with operator_on_a_cpu():
        found, again = (outcome(block.to(dtype), x, dy, grid=(h, w), class_token_only=middle) for _ in range(2))
    for name, value in expected.items():
        assert torch.equal(found[name], again[name]), name
        assert relative_error(found[name], value) < tolerance, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2.5e-2), (torch.float16, 4e-3)])
def test_a_pooled_block_with_slices_of_channels_equals_the_plain_one(
    dtype, tolerance, middle, device, gpu, poison, monkeypatch
):
    """A fused block whose images need several CTAs equals the unfused block in fp64. On a GPU, its width is 768."""
    (B, h, w), C, slices = ((3, 3, 5), 64, 2) if device == "cpu" else ((20, 14, 14), 768, 4)
    if device == "cpu":
        for module in (scan_image, scan_lines_bwd):
            monkeypatch.setattr(module, "slices_of", lambda D, R, device: slices)
    launched, launch = set(), launches.launch

    def recorded(source, entry, macros, *others):
        launched.add((entry, macros.get("SLICES")))
        launch(source, entry, macros, *others)

    monkeypatch.setattr(launches, "launch", recorded)
    block, truth = (make_block(LonghornMixer, C, pool="rows").to(device).train() for _ in range(2))
    x, dy = torch.randn(2, B, h * w + 1, C, device=device)
    expected = outcome(truth.double(), x.double(), dy.double(), grid=(h, w), class_token_only=middle)
    with operator_on_a_cpu():
        found, again = (outcome(block.to(dtype), x, dy, grid=(h, w), class_token_only=middle) for _ in range(2))
    assert {(entry, slices) for entry in ("scan_image", "scan_lines_backward", "add_slices")} <= launched
    for name, value in expected.items():
        assert torch.equal(found[name], again[name]), name
        assert relative_error(found[name], value) < tolerance, name


@EMULATED
@pytest.mark.parametrize("keep", [False, True])
def test_a_pooled_block_with_in_proj_pool_emulated_equals_the_plain_one(keep, monkeypatch, poison):
    """With the kernels of Hopper, a pooled block has the output and gradients of the unfused block in fp64."""
    on_an_emulated_gpu(monkeypatch, hopper=True)
    monkeypatch.setattr(backends, "backend_for", lambda device: "cuda")
    used = []
    monkeypatch.setattr(kernels, "in_proj_pool", lambda *a: used.append(a[-1]) or in_proj_pool_sm90.in_proj_pool(*a))
    block, truth = (make_block(MIXERS[0], 192, pool="columns").train(keep) for _ in range(2))
    x, dy = torch.randn(2, 1, 144, 192)
    expected = outcome(truth.double(), x.double(), dy.double(), grid=(13, 11))
    with operator_on_a_cpu(), torch.set_grad_enabled(keep):
        block.bfloat16()
        found = outcome(block, x, dy, grid=(13, 11)) if keep else {"y": block(x, grid=(13, 11))}
    assert used == [keep]
    for name, value in found.items():
        assert relative_error(value, expected[name]) < 2.5e-2, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize(
    ("mixer", "axis", "B", "grid"),
    [(LonghornMixer, "rows", 1, (3, 5)), (MambaMixer, "columns", 2, (1, 20)), (LonghornMixer, None, 1, (5, 14))],
)
def test_inference_of_few_images_equals_the_plain_one(mixer, axis, B, grid, middle, device, gpu, poison, monkeypatch):
    """Blocks of few tokens without gradients have the outputs of unfused blocks."""
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 48)
    blocks = Blocks(*[make_block(mixer, 192, pool=axis, seed=seed) for seed in range(3)]).to(device).eval()
    (h, w), options = grid, dict(class_token_only=middle) | (dict(grid=grid) if axis else {})
    x = torch.randn(B, h * w + 1, 192, device=device)
    with torch.no_grad(), operator_on_a_cpu():
        expected = copy.deepcopy(blocks).double()(x.double(), **options)
        found, again = (blocks.to(torch.bfloat16)(x, **options) for _ in range(2))
    assert torch.equal(found, again)
    x = middle_token(x) if middle else x
    assert relative_error(found - x, expected - x) < 2.5e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [False, True])
def test_the_operator_of_a_pooled_block_keeps_to_the_rules_of_pytorch(columns, device, gpu):
    block, x = make_block(MIXERS[0], 16, device=device), torch.randn(2, 13, 16, device=device, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    with operator_on_a_cpu():
        for middle in (True, False):
            options = [*options_of(block, torch.float32, middle)[:-1], Lines.of(3, 4, columns)]
            arguments = *options, x, [], [x.new_ones(2)], weights_of(block).flat(), True
            torch.library.opcheck(torch.ops.vil.block.default, arguments, test_utils=tests)
        with pytest.raises(ValueError, match="lines must cover the 12 patches"):
            torch.ops.vil.block(*options[:-1], [3, 3, False], *arguments[6:])
