"""The CUDA backend: without a GPU that every kernel compiles without spills, with one that it is right on anything."""

import io
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_mutants
import emulator
import pytest
import torch
from scans import SCANS, exact, longhorn_inputs, outputs_and_gradients, relative_error, selective_inputs
from vil.kernels import backends, longhorn_scan, selective_scan
from vil.kernels.cuda import compiler, hardware
from vil.kernels.scan import cuda_scan as scan
from vil.kernels.scan import heuristics as variants
from vil.kernels.scan import naive
from vil.kernels.scan import operator as gpu
from vil.kernels.scan.heuristics import Schedule

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
NVRTC = pytest.mark.skipif(compiler.unavailable() is not None, reason="needs NVRTC and cuda.core")
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}  # bytes that a block may have; else 99 KiB
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def kernels(recurrence, dtype, N, D=768, arch="sm_90"):
    """Every kernel that the cost model may choose for these inputs."""
    x = torch.empty(2, 1, 8, D, dtype=dtype, device="meta")
    for variant in variants.forward_variants(recurrence, N, dtype.itemsize, D % 8 == 0, SHARED.get(arch, 99 * 1024)):
        if isinstance(variant, variants.ForwardMma):
            yield from (variant.kernel(recurrence, x, N, rank) for rank in (0, 16, 24, 48))
        else:
            yield variant.kernel(recurrence, x, x, N)
    for kind, gradients in (("forward", "false"), ("backward", "true")):
        variant = variants.segment_variant(kind, recurrence, N, dtype.itemsize)
        if isinstance(variant, variants.SegmentGradientsMma):
            yield variant.kernel(recurrence, x, x)
        else:
            yield variant.kernel(recurrence, x, x, N, "segment_states", GRADIENTS=gradients)
    for variant in variants.backward_variants(recurrence, N):
        yield variant.kernel(recurrence, x, x, x, N)


@NVRTC
@pytest.mark.parametrize(
    ("arch", "dtype", "N"),
    [(arch, dtype, 16) for arch in ARCHS for dtype in (torch.bfloat16, torch.float32)]
    + [("sm_90", torch.float16, 16), ("sm_80", torch.bfloat16, 4), ("sm_90", torch.float32, 8)]
    + [(arch, torch.bfloat16, N) for arch in ("sm_80", "sm_120") for N in (32, 64)],
)
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_every_variant_compiles_without_spills_and_fits_a_multiprocessor(recurrence, arch, dtype, N):
    every = list(kernels(recurrence, dtype, N, arch=arch))
    for kernel in every:
        assert kernel.shared_bytes <= (SHARED.get(arch, 99 * 1024) if kernel.source == "forward_mma" else 99 * 1024)
    assert_no_spills([(f"scan/{kernel.source}", arch, kernel.macros) for kernel in every])


def log_of_compiling(variant):
    """What ptxas says, kept from the first time that it says it."""
    from cuda.bindings import nvrtc

    (file, arch, macros), log = variant, io.StringIO()

    def compile_cubin(path):
        assert compiler.compile_cubin(file, arch, tuple(sorted(macros.items())), log)
        path.write_text(log.getvalue())

    how = Path(compiler.__file__).read_text(), os.environ.get("MUTANT_UNDER_TEST"), nvrtc.nvrtcVersion()
    return emulator.kept(
        repr((how, compiler.source(file), arch, sorted(macros.items()))), ".log", compile_cubin
    ).read_text()


def assert_no_spills(variants):
    """Of (file, architecture, macros), which NVRTC compiles two at a time.

    A few words where nothing is measured: releases of NVRTC differ in that (13.0 spills up to 36 bytes, 13.2 none).
    """
    variants = [v for i, v in enumerate(variants) if v not in variants[:i]]
    with ThreadPoolExecutor(2) as pool:
        for variant, log in zip(variants, pool.map(log_of_compiling, variants)):
            spilled = max(map(int, re.findall(r"(\d+) bytes spill stores", log)))
            assert spilled <= (0 if variant[1].startswith("sm_90") else 40), (variant, log)


H200 = 132


@pytest.mark.parametrize("L", [1, 64, 65, 127, 128, 197, 6085])
def test_memory_kept_for_backward_is_at_most_a_byte_for_each_element(L):
    x, k = (torch.empty(1, 2, L, n, device="meta") for n in (96, 16))
    _, states = gpu._fake_scan("cuda", "longhorn", x, x, k, k, None, None, None, [False], True)
    assert states.shape == (1, 2, (L - 1) // 64, 16, 96)
    assert states.nbytes <= x.numel()


def test_tensors_on_the_cpu_are_refused():
    x, k = torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="needs tensors on a GPU; x is on cpu"):
        longhorn_scan(x, x, k, k, backend="cuda")


def outputs_and_gradients_for(f, inputs, dy, **kwargs):
    y = f(*inputs, **kwargs)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def placed(t, place):
    """The same tensor (G, B, L, n) as a view with other strides, none of which is another one's, amid NaN."""
    order = [(1, 2, 0), (2, 0, 1), (0, 2, 1), (2, 1, 0), (1, 0, 2)][place]
    sizes = [t.shape[i] + 1 for i in order]
    view = t.new_full([*sizes, t.shape[3] + 8 * (place + 1)], float("nan"))[1:, 1:, 1:, 8 : 8 + t.shape[3]]
    return view.permute([*(order.index(i) for i in range(3)), 3]).copy_(t)


def assert_every_variant_right(recurrence, dtype, shape, segment_chunks, device, channels=True):
    make, definition = {
        "longhorn": (longhorn_inputs, naive.longhorn),
        "selective": (selective_inputs, naive.selective),
    }[recurrence]
    pair = [[t if t.dim() == 3 else t.float() for t in make(*shape, dtype, seed)] for seed in (0, 1)]
    pair = pair if channels else [inputs[:-2] for inputs in pair]  # without skip and bias
    x, logits, *rest = (torch.stack(tensors).detach().to(device) for tensors in zip(*pair))
    A = rest.pop(0) if recurrence == "selective" else None
    k, q, skip, bias = rest if channels else (*rest, None, None)
    reverse = [False, True]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth = [
        outputs_and_gradients_for(definition, exact([t.detach() for t in inputs]), dy[g].double(), reverse=reverse[g])
        for g, inputs in enumerate(pair)
    ]
    x, logits, k, q, dy = (placed(t.to(device), place) for place, t in enumerate((x, logits, k, q, dy)))
    tensors = x, logits, k, q, A, skip, bias
    before = [t.clone() for t in (*tensors, dy) if t is not None]

    def results():
        """Kept states; y and kept states, and gradients, of every variant."""
        y, states = scan.scan_forward(recurrence, *tensors, reverse, True)
        forward = variants.forward_variants(recurrence, k.shape[-1], dtype.itemsize, x.shape[-1] % 8 == 0)
        return (
            states,
            {
                "chosen": (y, states),
                **{
                    v: scan.scan_forward(recurrence, *tensors, reverse, True, Schedule(v, segment_chunks))
                    for v in forward
                },
            },
            {
                v: scan.scan_backward(recurrence, dy, *tensors, states, reverse, Schedule(v, segment_chunks))
                for v in variants.backward_variants(recurrence, k.shape[-1])
            },
        )

    if device == "cpu":
        with emulator.compiling():
            results()
    _, forward, backward = results()
    _, states = forward[variants.FORWARD_SIMT[recurrence][0]]
    for variant, (y, kept) in forward.items():
        assert_close_to(truth, [[y[g]] for g in range(2)], dtype, variant)
        # whose products round their factors, and that may be chosen
        if isinstance(variant, variants.ForwardMma | str):
            assert kept.numel() == 0 or relative_error(kept.cpu(), states.cpu().double()) < TOLERANCE[dtype] / 2
        else:
            torch.testing.assert_close(kept, states, rtol=1e-4, atol=1e-5)
        if variant != "chosen":
            again, nothing = scan.scan_forward(recurrence, *tensors, reverse, False, Schedule(variant, segment_chunks))
            assert torch.equal(again, y)
            assert nothing.numel() == 0
    for variant, (dx, dlogits, dk, dq, dA, dchannels) in backward.items():
        assert dA.numel() == (0 if A is None else A.numel())
        found = [
            [dx[g], dlogits[g], *([] if A is None else [dA[g]]), dk[g], dq[g], *(dchannels[g] if channels else [])]
            for g in range(2)
        ]
        assert_close_to([t[1:] for t in truth], found, dtype, variant)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for t in (*tensors, dy) if t is not None]))


# errors beside the rounding of a result, of what a GPU's fast functions and tensor cores are emulated as
OWN = {torch.float32: 1e-6, torch.bfloat16: 4e-4, torch.float16: 8e-5}
OWN_OF_TENSOR_CORES = {torch.float32: 1e-6, torch.bfloat16: 1.2e-3, torch.float16: 6e-4}


def assert_close_to(truth, found, dtype, variant):
    """For each direction: emulated the rounding of the result and little else, on a GPU `TOLERANCE`."""
    own = (OWN_OF_TENSOR_CORES if isinstance(variant, variants.ForwardMma | str) else OWN)[dtype]
    for g, tensors in enumerate(found):
        for i, (value, exactly) in enumerate(zip(tensors, truth[g])):
            if value is None:
                continue
            limit = math.hypot(relative_error(exactly.to(value.dtype), exactly), own)
            limit = limit if value.device.type == "cpu" else TOLERANCE[dtype]
            error = relative_error(value.cpu(), exactly)
            assert error < limit or exactly.norm() == 0 == value.norm(), (variant, g, i, error, limit)


needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def emulated(monkeypatch):
    """The scan's kernels run on the CPU, and as if on an H200."""
    monkeypatch.setattr(compiler, "launch", emulator.launch)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: H200)
    monkeypatch.setattr(hardware, "shared_bytes", lambda device: SHARED["sm_90"])


@needs_gxx
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
@pytest.mark.parametrize(
    ("dtype", "shape", "segment_chunks"),
    [
        (torch.float32, (2, 150, 40, 16), 1),
        (torch.bfloat16, (1, 200, 7, 16), 1),
        (torch.float16, (2, 100, 40, 32), 1),
        (torch.bfloat16, (1, 270, 104, 16), 2),
        (torch.float16, (2, 128, 72, 16), 1),
        (torch.bfloat16, (1, 130, 4, 64), 1),
        (torch.float32, (2, 70, 12, 4), 1),
        (torch.bfloat16, (1, 70, 20, 8), 1),
    ],
)
def test_every_variant_emulated_on_a_cpu_equals_the_definition(
    recurrence, dtype, shape, segment_chunks, emulated, poison
):
    assert_every_variant_right(recurrence, dtype, shape, segment_chunks, "cpu")


@needs_gxx
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_without_skip_and_bias_every_variant_emulated_on_a_cpu_is_right(recurrence, emulated, poison):
    assert_every_variant_right(recurrence, torch.bfloat16, (2, 70, 7, 16), 1, "cpu", channels=False)


@needs_gxx
@pytest.mark.parametrize(
    ("logit", "scale"), [(0, 0), (0, 1), (0, 100), (-1e4, 1), (-100, 1), (-100, 100), (100, 1), (1e4, 1), (1e4, 100)]
)
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_extreme_logits_and_keys_emulated_on_a_cpu(recurrence, logit, scale, emulated):
    """A third of the logits each as they are, as given and with the other sign."""
    selective = recurrence == "selective"
    make, definition = (selective_inputs, naive.selective) if selective else (longhorn_inputs, naive.longhorn)
    x, logits, *rest = (t.detach() for t in make(1, 50, 40, 16, torch.bfloat16))
    A, k, q, skip, bias = rest if selective else (None, *rest)
    signs = torch.randint(-1, 2, logits.shape, generator=torch.Generator().manual_seed(0))
    logits, k = torch.where(signs == 0, logits, signs * logit).bfloat16(), scale * k
    channels = [t if t is None else t.float() for t in (A, skip, bias)]
    inputs = [t for t in (x, logits, channels[0], k, q, *channels[1:]) if t is not None]
    if selective:  # whose definition, log(1 + exp(z)), is infinite where z is large
        inputs[1] = inputs[1].clamp(max=100)
    truth = [outputs_and_gradients_for(definition, exact(inputs), x.double())]
    tensors = [t if t is None else t[None] for t in (x, inputs[1], k, q, *channels)]
    _, states = scan.scan_forward(recurrence, *tensors, [False], True)
    for variant in variants.forward_variants(recurrence, 16, 2):
        y, _ = scan.scan_forward(recurrence, *tensors, [False], False, Schedule(variant, 1))
        assert_close_to(truth, [[y[0]]], x.dtype, variant)
    for variant in variants.BACKWARD[recurrence]:
        schedule = Schedule(variant, 1)
        dx, dlogits, dk, dq, dA, dchannels = scan.scan_backward(
            recurrence, x[None], *tensors, states, [False], schedule
        )
        found = [dx[0], dlogits[0], *([dA[0]] if selective else []), dk[0], dq[0], *dchannels[0]]
        assert_close_to([truth[0][1:]], [found], x.dtype, variant)


def assert_logits_of_the_step_right(device, dtype, shape, rank):
    B, L, D = shape
    pairs = zip(*(longhorn_inputs(*shape, 16, dtype, seed) for seed in (0, 1)))
    x, _, k, q, skip, bias = (torch.stack([t.detach() for t in pair]) for pair in pairs)
    random = torch.Generator().manual_seed(0)
    projected = torch.randn(2, B, L, rank + 32, generator=random).to(dtype)  # of which the step is a part
    step_proj = torch.randn(2, D, rank, generator=random).to(dtype)
    step, reverse = projected[..., :rank], [False, True]
    logits = torch.einsum("gblr,gdr->gbld", step.double(), step_proj.double())
    truth = [
        [naive.longhorn(*(t[g].double() for t in (x, logits, k, q, skip, bias)), reverse=reverse[g])] for g in range(2)
    ]
    x, projected, k, q, skip, bias, step_proj = (
        t.to(device) for t in (x, projected, k, q, skip.float(), bias.float(), step_proj)
    )

    def results(variant):
        schedule, step = Schedule(variant, -(-L // 64)), projected[..., :rank]
        return scan.scan_forward("longhorn", x, step, k, q, None, skip, bias, reverse, True, schedule, step_proj)

    if device == "cpu":
        with emulator.compiling():
            for variant in variants.FORWARD_MMA:
                results(variant)
    _, states = scan.scan_forward("longhorn", x, logits.to(device, dtype), k, q, None, skip, bias, reverse, True)
    for variant in variants.FORWARD_MMA:
        y, kept = results(variant)
        assert_close_to(truth, [[y[g]] for g in range(2)], dtype, variant)
        # those of logits that are rounded
        assert kept.shape == states.shape
        assert kept.numel() == 0 or relative_error(kept.cpu(), states.cpu().double()) < 2 * TOLERANCE[dtype]


# whole blocks of channels and parts of them, sequences that end within a tile
STEPS = [((2, 50, 40), 8), ((1, 33, 104), 16), ((1, 129, 96), 24), ((1, 20, 8), 48)]


@needs_gxx
@pytest.mark.parametrize(("shape", "rank"), STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_tokens_at_a_time_project_the_step_emulated_on_a_cpu(dtype, shape, rank, emulated, poison):
    assert_logits_of_the_step_right("cpu", dtype, shape, rank)


@needs_gxx
def test_tensors_that_vectors_cannot_read_emulated_get_a_kernel_that_can(emulated, monkeypatch):
    """On a GPU of one multiprocessor, where the cost model would take two tokens at a time."""
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 1)
    launched = []
    monkeypatch.setattr(compiler, "launch", lambda name, *args: launched.append(name) or emulator.launch(name, *args))
    inputs = [t.detach()[None] for t in longhorn_inputs(1, 300, 96, 16, torch.bfloat16)]
    x, logits, k, q, skip, bias = (t.float() if t.dim() == 2 else t for t in inputs)
    truth = [[naive.longhorn(*(t[0].double() for t in inputs))]]

    def right(x, logits, k, q):
        launched.clear()
        y, _ = scan.scan_forward("longhorn", x, logits, k, q, None, skip, bias, [False], False)
        assert_close_to(truth, [[y[0]]], x.dtype, "chosen")
        return launched

    def behind(t, elements):
        """One of other rows, so that each begins so many elements behind a vector."""
        return torch.cat([t[..., :elements], t, t[..., : 8 - elements]], -1)[..., elements:][..., : t.shape[-1]]

    assert right(x, logits, k, q) == ["scan/forward_mma"]
    for i, elements in enumerate((1, 4, 4, 1)):
        tensors = [behind(t, elements) if i == j else t for j, t in enumerate((x, logits, k, q))]
        assert right(*tensors) == ["scan/forward_simt"]
    # neighbours that are not neighbours in memory, and tokens 2 GiB apart
    assert right(*(t.mT.contiguous().mT for t in (x, logits, k, q))) == ["scan/forward_mma"]
    for apart in (2**30 - 8, 2**30) if emulator.has_sparse() else ():
        far = emulator.sparse(x.shape, x.dtype, (0, 0, apart, 1))
        assert right(far.copy_(x), logits, k, q) == ["scan/forward_mma"]


needs_sparse = pytest.mark.skipif(not emulator.has_sparse(), reason="needs memory that is not reserved")
LARGE = pytest.mark.parametrize("strides", [False, True])  # large strides of inputs, or large results


@needs_gxx
@needs_sparse
@LARGE
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_offsets_of_more_than_32_bits_emulated(recurrence, strides, emulated, monkeypatch):
    """The last image of a tensor of more than 2^32 elements, of which this machine has no more than is touched."""
    selective, (L, D, N), dtype = recurrence == "selective", (70, 40, 16), torch.bfloat16
    make, definition = (selective_inputs, naive.selective) if selective else (longhorn_inputs, naive.longhorn)
    x, logits, *rest = (t.detach() for t in make(1, L, D, N, dtype))
    A, k, q, skip, bias = rest if selective else (None, *rest)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs = [t for t in (x, logits, A, k, q, skip, bias) if t is not None]
    inputs = [t if t.dim() == 3 else t.float() for t in inputs]
    truth = [outputs_and_gradients_for(definition, exact(inputs), dy.double(), reverse=True)]

    def large(t, image):
        """The last of the second direction's images; the others are zeros or, if only results are large, the same."""
        if not strides:
            return t.expand(2, 2**21 + 3, -1, -1)
        n = t.shape[-1]
        tensor = emulator.sparse((2, 2, L, n), dtype, (2**34 + image, 2**33 + 3 * image, n, 1))
        tensor[1, 1] = t[0]
        return tensor

    with emulator.sparse_where_large() as launch:
        x, logits, k, q, dy = (large(t, 8 * (i + 1)) for i, t in enumerate((x, logits, k, q, dy)))
        tensors = x, logits, k, q, *(t if t is None else torch.stack([t.float()] * 2) for t in (A, skip, bias))
        monkeypatch.setattr(compiler, "launch", launch)
        of_lanes = Schedule(variants.FORWARD_SIMT[recurrence][0], 1)
        _, states = scan.scan_forward(recurrence, *tensors, [True, True], True, of_lanes)
        for variant in variants.forward_variants(recurrence, N, 2):
            y, kept = scan.scan_forward(recurrence, *tensors, [True, True], True, Schedule(variant, 1))
            assert_close_to(truth, [[y[1, -1:]]], dtype, variant)
            assert relative_error(kept[1, -1], states[1, -1].double()) < TOLERANCE[dtype] / 2
        for variant in variants.BACKWARD[recurrence]:
            before = logits[1, -1].clone()
            dx, dlogits, dk, dq, *_ = scan.scan_backward(
                recurrence, dy, *tensors, states, [True, True], Schedule(variant, 1), overwrite_step_logits=strides
            )
            found = [dx, dlogits, *([] if A is None else [None]), dk, dq]
            assert_close_to([truth[0][1:]], [[t if t is None else t[1, -1:] for t in found]], dtype, variant)
            if strides:
                logits[1, -1] = before


@needs_gxx
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_two_tokens_at_a_time_keep_what_is_no_number_in_its_channel_emulated_on_a_cpu(value, monkeypatch):
    monkeypatch.setattr(compiler, "launch", emulator.launch)
    x, logits, k, q, *_ = (t.detach()[None] for t in longhorn_inputs(1, 50, 40, 16, torch.bfloat16))
    for token in (20, 21, 22, 23):
        spoilt = x.clone()
        spoilt[0, 0, token, 9] = value
        y, _ = scan.scan_forward(
            "longhorn", spoilt, logits, k, q, None, None, None, [False], False, Schedule(variants.FORWARD_MMA[1], 1)
        )
        assert not torch.isfinite(y[0, 0, token:, 9]).any()
        assert torch.isfinite(y[0, 0, : token - 2]).all()
        y[..., 9] = 0
        assert torch.isfinite(y).all()


@needs_gxx
@pytest.mark.parametrize(("dtype", "shape", "segment_chunks"), [
    (torch.float32, (2, 150, 40, 16), 1), (torch.bfloat16, (1, 200, 71, 16), 2), (torch.bfloat16, (1, 200, 72, 16), 4),
])  # fmt: skip
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_gradients_written_over_the_logits_emulated_are_the_same(recurrence, dtype, shape, segment_chunks, monkeypatch):
    monkeypatch.setattr(compiler, "launch", emulator.launch)
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: H200)
    monkeypatch.setattr(hardware, "shared_bytes", lambda device: SHARED["sm_90"])
    assert_logits_overwritten(recurrence, dtype, shape, segment_chunks, "cpu")


def assert_logits_overwritten(recurrence, dtype, shape, segment_chunks, device):
    """Also where every other token of a longer tensor is scanned; and only if asked for."""
    (B, L, D, N), g = shape, torch.Generator().manual_seed(0)
    x, dy, logits = (torch.randn(2, B, L, D, generator=g).to(device, dtype) for _ in range(3))
    k, q = (torch.randn(2, B, L, N, generator=g).to(device, dtype) for _ in range(2))
    rates = None if recurrence == "longhorn" else -torch.rand(2, D, N, generator=g).to(device)
    rest = k, q, rates, torch.ones(2, D, device=device), torch.ones(2, D, device=device)
    spread = torch.full((2, B, 2 * L, D), float("nan"), device=device, dtype=dtype)[:, :, ::2]
    reverse = [False, True]
    _, states = scan.scan_forward(recurrence, x, logits, *rest, reverse, True)
    for variant in variants.BACKWARD[recurrence]:
        arguments = *rest, states, reverse, Schedule(variant, segment_chunks)
        before = logits.clone()
        apart = scan.scan_backward(recurrence, dy, x, logits, *arguments)
        assert torch.equal(logits, before)
        for over in (before, spread.copy_(logits)):
            found = scan.scan_backward(recurrence, dy, x, over, *arguments, overwrite_step_logits=True)
            assert found[1].data_ptr() == over.data_ptr()
            assert all(torch.equal(a, b) for a, b in zip(found, apart)), variant


@needs_gxx
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-4), (torch.float16, 2e-4)])
@pytest.mark.parametrize(("L", "D", "segment_chunks"), [(150, 40, 1), (300, 7, 2), (129, 136, 1)])
def test_gradients_between_segments_emulated_equal_those_without_tensor_cores(
    dtype, tolerance, L, D, segment_chunks, monkeypatch, poison
):
    """The largest and smallest gates, large and small keys, neither aligned, and dy that the directions share."""
    monkeypatch.setattr(compiler, "launch", emulator.launch)
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(2, 1, L, n, generator=g).to(dtype) for n in (D, 16, 16)]
    scale = torch.tensor([1e-2, 0.5, 20])[torch.randint(3, (2, 1, L, 1), generator=g)]
    logits = torch.where(torch.rand(2, 1, L, D, generator=g) < 0.1, 100 * x[0].sign(), 3 * x[0])
    dy, bias = x[0][:1].expand(2, -1, -1, -1), torch.randn(2, D, generator=g)
    k, q = torch.cat([x[0][..., :1], (scale * x[1]).to(dtype), x[2]], dim=-1)[..., 1:].split(16, dim=-1)
    tensors = dy, logits.to(dtype), k, q, None, bias
    found = []
    for variant in (variants.SEGMENT_GRADIENTS_MMA, variants.SEGMENT_STATES["longhorn"]):
        monkeypatch.setattr(variants, "SEGMENT_GRADIENTS_MMA", variant)
        found.append(scan.between_segments("longhorn", *tensors, [False, True], segment_chunks, gradients=True))
    assert relative_error(found[0], found[1].double()) < tolerance


def test_every_mutant_of_the_sources_can_be_planted():
    """Each text is there once; every file of code has one, but for Hopper's own, which emulator.cpp replaces."""
    for file, shows, before, after in cuda_mutants.MUTANTS:
        assert (compiler.SOURCES / file).read_text().count(before) == 1, (file, shows)
        assert before != after
    files = {path.relative_to(compiler.SOURCES).as_posix() for path in compiler.SOURCES.glob("*/*.cu*")}
    assert files - {"cuda/sm90.cuh", "cuda/types.cuh"} == {mutant.file for mutant in cuda_mutants.MUTANTS}


# With a GPU


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("segment_chunks", [1, 3, 100])
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_gradients_written_over_the_logits_are_the_same(recurrence, segment_chunks):
    assert_logits_overwritten(recurrence, torch.bfloat16, (3, 1000, 768, 16), segment_chunks, "cuda")


def on_gpu(inputs):
    return [t.detach().cuda().requires_grad_() for t in inputs]


def assert_right(scan, definition, inputs, dtype, **kwargs):
    # parameters in fp32, as models keep them: their gradients, sums over all tokens, may be too large for fp16
    inputs = on_gpu([t if t.dim() == 3 else t.float() for t in inputs])
    expected = outputs_and_gradients(lambda *t, **k: definition(*t, **k).cpu(), exact(inputs), dtype, **kwargs)
    actual = outputs_and_gradients(lambda *t, **k: scan(*t, backend="cuda", **k).cpu(), inputs, dtype, **kwargs)
    for i, (a, truth, t) in enumerate(zip(actual, expected, [inputs[0], *inputs])):
        assert a.dtype == t.dtype
        error = relative_error(a, truth)
        assert error < TOLERANCE[dtype] or truth.norm() == 0 == a.norm(), (i, error)


@GPU
@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("N", [4, 8, 16, 32, 64, 1, 11])
def test_random_shapes_equal_the_definition(scan, definition, make_inputs, dtype, N, poison):
    g = torch.Generator().manual_seed(N)
    for seed in range(4):
        B, L, D = (int(torch.randint(1, high, (), generator=g)) for high in (5, 200, 150))
        D = D if seed % 2 else 8 * D  # odd ones, and those that vectors can move
        assert_right(scan, definition, make_inputs(B, L, D, N, dtype, seed), dtype, reverse=bool(seed // 2))


@GPU
@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 16), (1, 10_000, 3, 16), (300, 3, 40, 16), (1, 64, 768, 16), (2, 65, 64, 16)]
)
def test_extreme_shapes(scan, definition, make_inputs, shape, poison):
    assert_right(scan, definition, make_inputs(*shape, torch.float32), torch.float32)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("segment_chunks", [1, 2, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_every_variant_and_segments_in_parallel_equal_the_definition(recurrence, dtype, segment_chunks, poison):
    assert_every_variant_right(recurrence, dtype, (2, 200, 104, 16), segment_chunks, "cuda")


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "rank"), [*STEPS, ((2, 1500, 768), 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_tokens_at_a_time_project_the_step(dtype, shape, rank, poison):
    assert_logits_of_the_step_right("cuda", dtype, shape, rank)


@GPU
@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize("shape", [(64, 197, 384, 16), (1, 1500, 768, 16), (8, 1025, 768, 16)])
def test_two_runs_are_equal_bit_for_bit(scan, definition, make_inputs, shape):
    inputs = on_gpu(make_inputs(*shape, torch.bfloat16))
    dy = torch.randn(shape[:3], device="cuda", dtype=torch.bfloat16)
    runs = [outputs_and_gradients_for(scan, inputs, dy, reverse=True) for _ in range(2)]
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("logit", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_extreme_logits(logit, dtype):
    inputs = longhorn_inputs(2, 80, 24, 16, dtype)
    signs = torch.randint(-1, 2, inputs[1].shape, generator=torch.Generator().manual_seed(0))
    inputs[1] = torch.where(signs == 0, inputs[1].detach(), (signs * logit).to(dtype)).requires_grad_()
    assert_right(longhorn_scan, naive.longhorn, inputs, dtype)


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_zero_and_large_keys(scale):
    inputs = longhorn_inputs(2, 150, 24, 16, torch.float32)
    k = inputs[2].detach()
    inputs[2] = (scale * k / k.norm(dim=-1, keepdim=True)).requires_grad_()
    assert_right(longhorn_scan, naive.longhorn, inputs, torch.float32)


@GPU
@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate(scan, definition, make_inputs, value):
    inputs = [t.detach().clone().cuda() for t in make_inputs(2, 80, 64, 16, torch.float32)]
    inputs[0][0, 70, 1] = value
    y = scan(*inputs)
    assert not torch.isfinite(y[0, 70:, 1]).any()
    y[0, 70:, 1] = 0
    assert torch.isfinite(y).all()


@GPU
@pytest.mark.gpu
@SCANS
def test_strided_and_offset_views(scan, definition, make_inputs):
    inputs = on_gpu(make_inputs(2, 90, 48, 16, torch.bfloat16))
    dy = torch.randn(2, 90, 48, device="cuda", dtype=torch.bfloat16)
    expected = outputs_and_gradients_for(scan, inputs, dy)
    for pad, order in ((1, None), (8, None), (3, "reversed")):
        views = []
        for t in inputs:
            dims = list(range(t.dim()))[:: -1 if order else 1]
            padded = t.new_full([t.shape[i] + 2 * pad for i in dims], float("nan"))
            view = padded[tuple(slice(pad, pad + t.shape[i]) for i in dims)].permute(*dims)
            views.append(view.copy_(t.detach()).detach().requires_grad_())
        for a, truth in zip(outputs_and_gradients_for(scan, views, dy), expected):
            assert relative_error(a, truth.double()) < 1e-3
    expanded = outputs_and_gradients_for(scan, inputs, torch.ones((), device="cuda", dtype=dy.dtype).expand_as(dy))
    for a, truth in zip(expanded, outputs_and_gradients_for(scan, inputs, torch.ones_like(dy))):
        assert torch.equal(a, truth)


@GPU
@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    B, L, D, N = 3, 91, 2**23 - 24, 4  # 2.29e9 elements; states and their offsets are larger still
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(B, L, D, generator=g, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(B, L, D, generator=g, device="cuda", dtype=torch.bfloat16)
    k, q = torch.randn(2, B, L, N, generator=g, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    y = longhorn_scan(x, logits, k, q, reverse=True)
    for columns in (slice(0, 64), slice(D // 2, D // 2 + 64), slice(D - 64, D)):
        part = (t[..., columns].double() for t in (x, logits))
        assert relative_error(y[..., columns], naive.longhorn(*part, k.double(), q.double(), reverse=True)) < 4e-3


@GPU
@pytest.mark.gpu
def test_gradients_of_more_than_two_to_the_31_elements():
    B, L, D, N = 700, 4096, 768, 4
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(B, L, D, generator=g, device="cuda", dtype=torch.bfloat16)
    logits = torch.zeros(1, 1, 1, device="cuda", dtype=torch.bfloat16).expand(B, L, D).contiguous()
    k, q = torch.randn(2, B, L, N, generator=g, device="cuda", dtype=torch.bfloat16)
    inputs = [t.requires_grad_() for t in (x, logits, k, q)]
    y = longhorn_scan(*inputs)
    grads = torch.autograd.grad(y, inputs, x.detach())
    last = [t.detach()[-1:].double().requires_grad_() for t in inputs]
    expected = outputs_and_gradients_for(naive.longhorn, last, last[0].detach())
    for a, truth in zip((y, *grads), expected):
        assert relative_error(a[-1:], truth) < 4e-3


@GPU
@pytest.mark.gpu
@SCANS
def test_operator_registrations(scan, definition, make_inputs):
    stacked = [t.detach()[None] for t in make_inputs(2, 70, 8, 4, torch.float32)]
    if len(stacked) == 7:
        x, logits, A, b, c, skip, bias = on_gpu(stacked)
        arguments = ("cuda", "selective", x, logits, b, c, A, skip, bias, [True], True)
    else:
        x, logits, k, q, skip, bias = on_gpu(stacked)
        arguments = ("cuda", "longhorn", x, logits, k, q, None, skip, bias, [True], True)
    torch.library.opcheck(gpu.scan.default, arguments, atol=1e-5, rtol=1e-4)


@GPU
@pytest.mark.gpu
@SCANS
def test_compiles_without_graph_breaks(scan, definition, make_inputs):
    inputs = on_gpu(make_inputs(2, 70, 16, 16, torch.float32))
    dy = torch.randn(2, 70, 16, device="cuda")
    compiled = torch.compile(scan, fullgraph=True)
    for a, truth in zip(outputs_and_gradients_for(compiled, inputs, dy), outputs_and_gradients_for(scan, inputs, dy)):
        torch.testing.assert_close(a, truth)


@GPU
@pytest.mark.gpu
@SCANS
def test_cuda_graph_capture_on_another_stream(scan, definition, make_inputs):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        inputs = on_gpu(make_inputs(1, 300, 64, 16, torch.float32))
        dy = torch.randn(1, 300, 64, device="cuda")
        expected = outputs_and_gradients_for(scan, inputs, dy)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = outputs_and_gradients_for(scan, inputs, dy)
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    for a, truth in zip(captured, expected):
        assert torch.equal(a, truth)


@GPU
@pytest.mark.gpu
def test_mixed_dtypes_autocast_and_checkpointing():
    inputs = on_gpu(longhorn_inputs(2, 70, 16, 16, torch.float32))
    x, logits, k, q, skip, bias = inputs
    y = longhorn_scan(x.bfloat16(), logits, k.half(), q, skip.bfloat16(), bias)
    assert y.dtype == torch.bfloat16
    exactly = [t.detach().cpu().double() for t in (x.bfloat16(), logits, k.half(), q, skip.bfloat16(), bias)]
    assert relative_error(y.cpu(), naive.longhorn(*exactly)) < 4e-3
    dy = torch.randn_like(x)
    expected = outputs_and_gradients_for(longhorn_scan, inputs, dy)

    def checkpointed(*t):
        return torch.utils.checkpoint.checkpoint(longhorn_scan, *t, use_reentrant=False)

    with torch.autocast("cuda", torch.bfloat16):
        actual = outputs_and_gradients_for(checkpointed, inputs, dy)
    for a, truth in zip(actual, expected):
        assert torch.equal(a, truth)


@GPU
@pytest.mark.gpu
@SCANS
def test_empty_batch_and_empty_sequence_and_no_parameters(scan, definition, make_inputs):
    for B, L in ((0, 5), (2, 0)):
        inputs = on_gpu(make_inputs(B, L, 8, 4, torch.float32))
        grads = torch.autograd.grad(scan(*inputs).sum(), inputs)
        assert all(torch.isfinite(t).all() for t in grads)
    assert_right(scan, definition, make_inputs(2, 9, 6, 4, torch.float32)[:-2], torch.float32)


@GPU
@pytest.mark.gpu
def test_float64_goes_to_the_reference_and_is_refused_by_name():
    inputs = [t.detach().cuda() for t in longhorn_inputs(1, 5, 4, 4)]
    assert longhorn_scan(*inputs).dtype == torch.float64
    with pytest.raises(ValueError, match="float64"):
        longhorn_scan(*inputs, backend="cuda")


@GPU
@pytest.mark.gpu
def test_without_nvrtc_triton_takes_over_with_one_warning(monkeypatch):
    inputs = [t.detach().cuda() for t in selective_inputs(1, 5, 4, 4, torch.float32)]
    for function in (backends._backend_for, gpu._module):
        function.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "unavailable", lambda: "NVRTC is missing")
        with pytest.warns(UserWarning, match="NVRTC is missing") as warned:
            y, _ = (selective_scan(*inputs) for _ in range(2))
        with pytest.raises(RuntimeError, match="NVRTC is missing"):
            selective_scan(*inputs, backend="cuda")
    for function in (backends._backend_for, gpu._module):
        function.cache_clear()
    assert len(warned) == 1
    assert torch.equal(y, selective_scan(*inputs, backend="triton"))
