"""Tests of pooled blocks: kernels against reference implementations, and the operator against the unfused block."""

import copy

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
from vil.kernels.block import kernels, pool, pooled_conv_backward, scan_image, scan_lines, scan_lines_bwd, sum_lines
from vil.kernels.block.lines import Lines
from vil.kernels.cuda import hardware
from vil.models import dispatch
from vil.models.block import Blocks, LonghornMixer, MambaMixer
from vil.models.tokens import middle_token

# The class token is in the middle of the tokens, so even, odd and single numbers of rows and columns differ.
GRIDS = [(4, 6), (3, 5), (14, 14), (1, 7), (7, 1), (1, 1), (2, 70)]
DEVICES = [pytest.param("cpu", marks=EMULATED, id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def case(device, grid, columns, dtype, monkeypatch, poison):
    """Return the pooled rows or columns as `Lines`, the inputs of the pooling kernels, and the inputs in fp64."""
    if device == "cpu":
        emulator.as_if_on_a_gpu(monkeypatch)
    lines, g = Lines.of(*grid, columns), torch.Generator().manual_seed(0)
    B, L, S, D, K = 3, lines.L, lines.S, 40, 4

    def random(*size, dtype=dtype):
        return torch.randn(size, generator=g).to(device, dtype)

    tensors = dict(
        u=random(B, L, 2 * D)[..., :D], conv=random(2, D, K, dtype=torch.float32),
        bias=random(2, D, dtype=torch.float32), skip=random(2, D, dtype=torch.float32), e=random(B, L, D),
        dmeans=random(2, B, S, D),
    )  # fmt: skip
    return lines, tensors, {name: t.double() for name, t in tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooled_kernels_equal_their_definitions(case, dtype):
    lines, t, exact = case

    def run(t, pool, sum_lines, conv_backward):
        du = torch.empty(*t["u"].shape[:2], 2 * t["u"].shape[2]).to(t["u"]).chunk(2, dim=-1)[0]
        weights = t["conv"], t["bias"], t["skip"]
        filters, skips = conv_backward(t["u"], t["e"], t["dmeans"], *weights, du, lines)
        return *pool(t["u"], *weights, lines), sum_lines(t["e"], lines), du, filters, skips

    kernels = pool.pool, sum_lines.sum_lines, pooled_conv_backward.pooled_conv_backward
    found, again = (run(t, *kernels) for _ in range(2))
    truth = run(exact, pool.reference, sum_lines.reference, pooled_conv_backward.reference)
    for i, (value, repeated, expected) in enumerate(zip(found, again, truth, strict=True)):
        assert torch.equal(value, repeated)
        if value.dim() - expected.dim() == 0 and len(value) != len(expected):
            value, expected = value.sum(0), expected.sum(0)
        # Round fp32 sums to `dtype`, because they contain the error of tanh_fast.
        close(value.to(dtype), expected, dtype, str(i))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
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
        (means.repeat(1, 133, 1, 1), x_proj, step_proj),  # too many images for this GPU
        (means.repeat(1, 1, 65, 1), x_proj, step_proj),  # too many rows or columns for the kernel
        (means.float(), x_proj, step_proj), (means[..., 64:], x_proj, step_proj),
        # The kernel does not support these numbers of states and ranks.
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
    # scan_lines rounds steps, keys and queries like conv_xproj, so the kernels have equal tolerances.
    close(found, truth, dtype, "conv_xproj")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("B", "S", "D", "R", "dtype"),
    [
        (3, 15, 384, 16, torch.bfloat16), (2, 16, 768, 24, torch.bfloat16), (2, 7, 128, 32, torch.float16),
        (1, 3, 576, 8, torch.float16), (5, 1, 64, 40, torch.bfloat16),
        (1, 16, 128, 16, torch.float16), (1, 14, 384, 16, torch.float16),
    ],
)  # fmt: skip
def test_scan_image_equals_its_definition(B, S, D, R, dtype, device, monkeypatch, poison):
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 1)
    g = torch.Generator().manual_seed(0)

    def random(*size, dtype=dtype):
        return torch.randn(size, generator=g).to(device, dtype)

    means, x_proj, step_proj = random(2, B, S, D), random(2, R + 32, D) / D**0.5, random(2, D, R) / R**0.5
    inputs = means, x_proj, step_proj, None, random(2, D, dtype=torch.float32)
    assert scan_image.fits("longhorn", means, x_proj, step_proj)
    assert not scan_image.fits("selective", means, x_proj, step_proj)
    for other in (
        (means.repeat(1, 1, 17, 1), x_proj, step_proj), (means.float(), x_proj, step_proj),
        (means[..., 32:], x_proj, step_proj), (means, x_proj[:, 16:], step_proj),
        (means, x_proj[:, 4:], step_proj[..., 4:]), (means.repeat(1, 1, 1, 48), x_proj, step_proj),
    ):  # fmt: skip
        assert not scan_image.fits("longhorn", *other)
    (found, states), (again, _) = (scan_image.scan_image("longhorn", *inputs) for _ in range(2))
    assert torch.equal(found, again)
    assert states.shape == (2, B, 0, 16, D)
    truth = scan_image.reference("longhorn", *[t if t is None else t.double() for t in inputs])
    # The kernel rounds steps, keys and queries like conv_xproj, so the kernels have equal tolerances.
    close(found, truth, dtype, "conv_xproj")


@pytest.mark.parametrize(
    ("B", "S", "D", "expected"),
    [
        (1, 15, 768, "scan_lines"), (5, 15, 768, "scan_lines"), (6, 15, 768, None), (32, 15, 768, None),
        (33, 15, 768, "scan_image"), (11, 64, 384, "scan_lines"), (17, 16, 384, "scan_image"), (44, 17, 384, None),
        (44, 15, 1536, None), (44, 15, 96, None),
    ],
)  # fmt: skip
def test_few_and_many_images_have_kernels_that_project_and_scan(B, S, D, expected, monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors=132)
    R = D // 32 + -(D // 32) % 8  # padded to a multiple of 8
    sizes = (2, B, S, D), (2, R + 32, D), (2, D, R)
    scan = kernels.line_scan("longhorn", *(torch.empty(size, dtype=torch.bfloat16) for size in sizes))
    assert (scan and scan.__name__) == expected


@pytest.mark.parametrize(("B", "D", "expected"), [(16, 768, False), (17, 768, True), (1, 384, True)])
def test_few_images_with_many_channels_do_not_use_scan_lines_backward(B, D, expected, monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors=132)
    sizes = (2, B, 15, D), (2, 24 + 32, D), (2, D, 24)
    tensors = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
    assert kernels.backpropagates_lines("longhorn", *tensors) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("B", "S", "D", "R", "dtype"),
    [
        (3, 15, 64, 8, torch.bfloat16), (3, 16, 384, 16, torch.float16), (2, 9, 768, 24, torch.bfloat16),
        (1, 8, 192, 24, torch.float16), (5, 3, 64, 8, torch.bfloat16), (2, 1, 128, 16, torch.float16),
    ],
)  # fmt: skip
def test_scan_lines_backward_equals_its_definition(B, S, D, R, dtype, device, monkeypatch, poison):
    if device == "cpu":
        on_an_emulated_gpu(monkeypatch)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 4)  # two CTAs for each direction
    g = torch.Generator().manual_seed(0)

    def random(*size, dtype=dtype):
        return torch.randn(size, generator=g).to(device, dtype)

    means, x_proj, step_proj = random(2, B, S, D), random(2, R + 32, D) / D**0.5, random(2, D, R) / R**0.5
    bias, dy = random(2, D, dtype=torch.float32), random(B, S, D)
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
    norm, in_proj, out_proj, *directions = weights_of(block).flat()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    with operator_on_a_cpu():
        for middle in (True, False):
            options = [*options_of(block, torch.float32, middle)[:-1], Lines.of(3, 4, columns)]
            arguments = *options, x, [], x.new_ones(2), norm, in_proj, out_proj, directions, True
            torch.library.opcheck(torch.ops.vil.block.default, arguments, test_utils=tests)
        with pytest.raises(ValueError, match="lines must cover the 12 patches"):
            torch.ops.vil.block(*options[:-1], [3, 3, False], *arguments[6:])
