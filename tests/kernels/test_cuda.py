"""Tests of the CUDA backend: kernels compile without register spills and equal the reference, on a GPU or emulated."""

import itertools
import math

import emulator
import pytest
import scans
import torch
from emulator import EMULATED
from scans import SCANS, exact, in_order, longhorn_inputs, of_both_directions, of_recurrence, relative_error
from spills import NVRTC, assert_no_spills

from vil.kernels import backends, longhorn_scan
from vil.kernels.cuda import hardware, launches
from vil.kernels.scan import cuda_scan, heuristics, reference, scan_op, segments
from vil.kernels.scan.heuristics import FORWARD_MMA, ForwardMma, Schedule
from vil.kernels.scan.kernel import rows

RECURRENCES = pytest.mark.parametrize("recurrence", backends.RECURRENCES)
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
# maximum shared memory of a CTA in bytes by architecture; sm_120 has 99 KiB
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
H200 = 132  # number of multiprocessors of an H200
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
# maximum relative errors of the emulated kernels before the results are rounded
OWN = {torch.float32: 1e-6, torch.bfloat16: 4e-4, torch.float16: 8e-5}
OWN_OF_TENSOR_CORES = {torch.float32: 1e-6, torch.bfloat16: 1.2e-3, torch.float16: 6e-4}


@pytest.fixture
def emulated(monkeypatch):
    """Emulate kernels on a CPU, with the number of multiprocessors and the shared memory of an H200."""
    emulator.as_if_on_a_gpu(monkeypatch, H200)


@pytest.fixture(
    params=[pytest.param("cpu", marks=EMULATED, id="emulated"), pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")]
)
def device(request):
    """Return "cpu" (kernels are emulated) or "cuda"."""
    if request.param == "cpu":
        request.getfixturevalue("emulated")
    return request.param


def kernels(recurrence, dtype, N, D=768, arch="sm_90"):
    """Yield all scan kernels that the cost model may choose for a recurrence, a dtype, N states and D channels.

    Projecting kernels are listed for ranks 24 and 48 on sm_90 in bf16, otherwise only for rank 48.
    """
    ranks = (0, 24, 48) if (arch, dtype) == ("sm_90", torch.bfloat16) else (0, 48)
    x = torch.empty(2, 1, 8, D, dtype=dtype, device="meta")
    for variant in heuristics.forward_variants(recurrence, N, dtype.itemsize, D % 8 == 0, SHARED.get(arch, 99 * 1024)):
        if isinstance(variant, ForwardMma):
            yield from (variant.kernel(recurrence, x, N, rank) for rank in ranks)
        else:
            yield variant.kernel(recurrence, x, x, N)
    for kind, gradients in (("forward", "false"), ("backward", "true")):
        variant = heuristics.segment_variant(kind, recurrence, N, dtype.itemsize)
        if isinstance(variant, heuristics.SegmentGradientsMma):
            yield variant.kernel(recurrence, x, x)
        else:
            yield variant.kernel(recurrence, x, x, N, segments.STATES_SOURCE, GRADIENTS=gradients)
    for variant in heuristics.backward_variants(recurrence, N):
        yield variant.kernel(recurrence, x, x, x, N)


@NVRTC
@pytest.mark.parametrize(
    ("recurrence", "arch", "dtype", "N"),
    [
        ("longhorn", "sm_90", torch.bfloat16, 16),
        ("longhorn", "sm_90", torch.float32, 16),
        ("longhorn", "sm_80", torch.bfloat16, 64),
        ("selective", "sm_90", torch.bfloat16, 16),
        ("selective", "sm_120", torch.float32, 4),
    ],
)
def test_every_variant_compiles_without_spills(recurrence, arch, dtype, N):
    every = kernels(recurrence, dtype, N, arch=arch)
    assert_no_spills([(kernel.source, arch, kernel.macros) for kernel in every])


@RECURRENCES
def test_every_variant_fits_a_multiprocessor(recurrence):
    for arch, dtype, N in itertools.product(ARCHS, TOLERANCE, backends.STATE_SIZES):
        for kernel in kernels(recurrence, dtype, N, arch=arch):
            most = SHARED.get(arch, 99 * 1024) if kernel.source.name == "scan/forward_mma" else 99 * 1024
            assert kernel.shared_bytes <= most, (arch, dtype, N, kernel)


@pytest.mark.parametrize("L", [1, 64, 65, 127, 128, 197, 6085])
def test_memory_kept_for_backward_is_at_most_one_byte_per_element(L):
    x, k = (torch.empty(1, 2, L, n, device="meta") for n in (96, 16))
    _, states = scan_op._fake_scan("cuda", "longhorn", x, x, k, k, None, None, None, [False], True)
    assert states.shape == (1, 2, (L - 1) // 64, 16, 96)
    assert states.nbytes <= x.numel()


def results_of(f, inputs, dy, **kwargs):
    """Return the output, and the gradients of the inputs for an output gradient of `dy`."""
    y = f(*inputs, **kwargs)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def placed(t, place):
    """Return a copy of the tensor (G, B, L, n) with unusual strides and surrounded by NaN."""
    order = [(1, 2, 0), (2, 0, 1), (0, 2, 1), (2, 1, 0), (1, 0, 2)][place]
    sizes = [t.shape[i] + 1 for i in order]
    view = t.new_full([*sizes, t.shape[3] + 8 * (place + 1)], float("nan"))[1:, 1:, 1:, 8 : 8 + t.shape[3]]
    return view.permute([*(order.index(i) for i in range(3)), 3]).copy_(t)


def assert_close_to(truth, found, dtype, variant):
    """Assert that each direction's relative errors are small.

    If kernels are emulated, the limit combines the error of rounding the result with the kernels' own error (`OWN`). On
    a GPU, the limit is `TOLERANCE`.
    """
    own = (OWN_OF_TENSOR_CORES if isinstance(variant, ForwardMma | str) else OWN)[dtype]
    for g, tensors in enumerate(found):
        for i, (value, exactly) in enumerate(zip(tensors, truth[g])):
            if value is None:
                continue
            limit = math.hypot(relative_error(exactly.to(value.dtype), exactly), own)
            limit = limit if value.device.type == "cpu" else TOLERANCE[dtype]
            error = relative_error(value.cpu(), exactly)
            assert error < limit or exactly.norm() == 0 == value.norm(), (variant, g, i, error, limit)


@pytest.mark.parametrize(
    ("dtype", "shape", "segment_chunks", "channels"),
    [
        (torch.float32, (2, 150, 40, 16), 1, True),
        (torch.bfloat16, (1, 200, 7, 16), 1, True),
        (torch.float16, (2, 100, 40, 32), 1, True),
        (torch.bfloat16, (1, 270, 104, 16), 2, True),
        (torch.bfloat16, (1, 130, 4, 64), 1, True),
        (torch.float32, (2, 128, 12, 4), 1, True),
        (torch.bfloat16, (1, 70, 20, 8), 1, True),
        (torch.bfloat16, (2, 70, 7, 16), 1, False),  # without skip connection and step bias
    ],
)
@RECURRENCES
def test_every_variant_equals_the_reference(recurrence, dtype, shape, segment_chunks, channels, device, poison):
    _, reference_scan = of_recurrence(recurrence)
    pair, stacked = of_both_directions(recurrence, shape, dtype, device)
    pair, stacked = (pair, stacked) if channels else ([inputs[:-2] for inputs in pair], stacked[:-2])
    x, step_logits, k, q, A, skip, bias = in_order(recurrence, stacked)
    reverse = [False, True]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth = [
        results_of(reference_scan, exact(inputs), dy[g].double(), reverse=reverse[g]) for g, inputs in enumerate(pair)
    ]
    x, step_logits, k, q, dy = (placed(t.to(device), place) for place, t in enumerate((x, step_logits, k, q, dy)))
    tensors = x, step_logits, k, q, A, skip, bias
    before = [t.clone() for t in (*tensors, dy) if t is not None]
    forward_variants = heuristics.forward_variants(recurrence, shape[3], dtype.itemsize, shape[2] % 8 == 0)

    def forward(variant, keep=True):
        return cuda_scan.scan_forward(recurrence, *tensors, reverse, keep, Schedule(variant, segment_chunks))

    def results():
        """Return the output, the chunk states and the gradients of every kernel variant."""
        _, states = chosen = cuda_scan.scan_forward(recurrence, *tensors, reverse, True)
        backward = {
            v: cuda_scan.scan_backward(recurrence, dy, *tensors, states, reverse, Schedule(v, segment_chunks))
            for v in heuristics.backward_variants(recurrence, shape[3])
        }
        return {"chosen": chosen, **{v: forward(v) for v in forward_variants}}, backward

    if device == "cpu":
        with emulator.compiling():
            results()
    ys, gradients = results()
    _, states = ys[heuristics.FORWARD_SIMT[recurrence][0]]
    for variant, (y, kept) in ys.items():
        assert_close_to(truth, [[y[g]] for g in range(2)], dtype, variant)
        # Tensor-core variants round the factors of matrix products, so the states of these variants are less precise.
        if isinstance(variant, ForwardMma | str):
            assert kept.numel() == 0 or relative_error(kept.cpu(), states.cpu().double()) < TOLERANCE[dtype] / 2
        else:
            torch.testing.assert_close(kept, states, rtol=1e-4, atol=1e-5)
        if variant != "chosen":
            again, nothing = forward(variant, keep=False)
            assert torch.equal(again, y)
            assert nothing.numel() == 0
    for variant, (dx, dstep_logits, dk, dq, dA, dchannels) in gradients.items():
        assert dA.numel() == (0 if A is None else A.numel())
        found = [
            [dx[g], dstep_logits[g], *([] if A is None else [dA[g]]), dk[g], dq[g], *(dchannels[g] if channels else [])]
            for g in range(2)
        ]
        assert_close_to([t[1:] for t in truth], found, dtype, variant)
    assert all(torch.equal(a, b) for a, b in zip(before, [t for t in (*tensors, dy) if t is not None]))


@pytest.mark.parametrize(
    ("dtype", "logit", "scale"),
    [(torch.bfloat16, *case) for case in [(0, 0), (0, 1), (0, 100), (-1e4, 1), (-100, 1), (-100, 100), (100, 1)]]
    + [(torch.bfloat16, 1e4, 1), (torch.bfloat16, 1e4, 100), (torch.float16, -1e4, 1), (torch.float16, 100, 1)]
    + [(torch.float32, 0, 25), (torch.float32, 1e4, 1)],
)
@RECURRENCES
def test_extreme_logits_and_keys(recurrence, dtype, logit, scale, device):
    """Results are correct for very large positive or negative logits of the step size, and for large keys."""
    make, reference_scan = of_recurrence(recurrence)
    x, step_logits, k, q, A, skip, bias = in_order(recurrence, [t.detach() for t in make(1, 50, 40, 16, dtype)])
    signs = torch.randint(-1, 2, step_logits.shape, generator=torch.Generator().manual_seed(0))
    step_logits, k = torch.where(signs == 0, step_logits, signs * logit).to(dtype), (scale * k).to(dtype)
    A, skip, bias = (t if t is None else t.float() for t in (A, skip, bias))
    if recurrence == "selective":  # the reference's log(1 + exp(z)) overflows for large z
        step_logits = step_logits.clamp(max=100)
    inputs = [t for t in (x, step_logits, A, k, q, skip, bias) if t is not None]
    truth = [results_of(reference_scan, exact(inputs), x.double())]
    tensors = [t if t is None else t[None].to(device) for t in (x, step_logits, k, q, A, skip, bias)]
    _, states = cuda_scan.scan_forward(recurrence, *tensors, [False], True)
    for variant in heuristics.forward_variants(recurrence, 16, dtype.itemsize):
        y, _ = cuda_scan.scan_forward(recurrence, *tensors, [False], False, Schedule(variant, 1))
        assert_close_to(truth, [[y[0]]], dtype, variant)
    for variant in heuristics.BACKWARD[recurrence]:
        found = cuda_scan.scan_backward(recurrence, tensors[0], *tensors, states, [False], Schedule(variant, 1))
        dx, dstep_logits, dk, dq, dA, dchannels = (t[0] if t.numel() else None for t in found)
        found = [dx, dstep_logits, *([] if A is None else [dA]), dk, dq, *dchannels]
        assert_close_to([truth[0][1:]], [found], dtype, variant)


@pytest.mark.parametrize(
    ("shape", "rank", "dtype"),  # in some cases, channels fill only a part of a CTA, and sequences end inside a tile
    [
        ((2, 50, 40), 8, torch.bfloat16), ((1, 33, 104), 16, torch.float16), ((1, 129, 96), 24, torch.bfloat16),
        ((1, 20, 8), 48, torch.float16),
    ],
)  # fmt: skip
def test_two_tokens_at_a_time_project_the_step(shape, rank, dtype, device, poison):
    B, L, D = shape if device == "cpu" else (shape[0], 10 * shape[1], 8 * shape[2])  # a GPU needs more CTAs
    _, stacked = of_both_directions("longhorn", (B, L, D, 16), dtype, "cpu")
    x, _, k, q, skip, bias = stacked
    random = torch.Generator().manual_seed(0)
    projected = torch.randn(2, B, L, rank + 32, generator=random).to(dtype)  # step, keys and queries
    step_proj = torch.randn(2, D, rank, generator=random).to(dtype)
    step, reverse = projected[..., :rank], [False, True]
    logits = torch.einsum("gblr,gdr->gbld", step.double(), step_proj.double())
    truth = [
        [reference.longhorn(*(t[g].double() for t in (x, logits, k, q, skip, bias)), reverse=reverse[g])]
        for g in range(2)
    ]
    x, projected, k, q, skip, bias, step_proj = (t.to(device) for t in (x, projected, k, q, skip, bias, step_proj))
    tensors = k, q, None, skip, bias, reverse, True

    def results(variant):
        schedule = Schedule(variant, -(-L // 64))
        assert schedule.projects_step(L, rank)
        return cuda_scan.scan_forward("longhorn", x, projected[..., :rank], *tensors, schedule, step_proj)

    if device == "cpu":
        with emulator.compiling():
            for variant in FORWARD_MMA:
                results(variant)
    _, states = cuda_scan.scan_forward("longhorn", x, logits.to(device, dtype), *tensors)
    for variant in FORWARD_MMA:
        y, kept = results(variant)
        assert_close_to(truth, [[y[g]] for g in range(2)], dtype, variant)
        # The tolerance is doubled, because the expected states were computed from rounded step logits.
        assert kept.shape == states.shape
        assert kept.numel() == 0 or relative_error(kept.cpu(), states.cpu().double()) < 2 * TOLERANCE[dtype]


@EMULATED
def test_tensors_that_vectors_cannot_read_emulated_get_a_kernel_that_can(emulated, monkeypatch):
    """Tensors that are not aligned for vector loads run on the scalar kernel, whatever the cost model prefers."""
    monkeypatch.setattr(hardware, "multiprocessors", lambda device: 1)
    launched = []
    monkeypatch.setattr(
        launches, "launch", lambda source, *args: launched.append(source.name) or emulator.launch(source, *args)
    )
    inputs = [t.detach()[None] for t in longhorn_inputs(1, 300, 96, 16, torch.bfloat16)]
    x, logits, k, q, skip, bias = (t.float() if t.dim() == 2 else t for t in inputs)
    truth = [[reference.longhorn(*(t[0].double() for t in inputs))]]

    def right(x, logits, k, q):
        launched.clear()
        y, _ = cuda_scan.scan_forward("longhorn", x, logits, k, q, None, skip, bias, [False], False)
        assert_close_to(truth, [[y[0]]], x.dtype, "chosen")
        return launched

    def behind(t, elements):
        """Return a copy of `t` in which each row starts `elements` elements after an aligned address."""
        return torch.cat([t[..., :elements], t, t[..., : 8 - elements]], -1)[..., elements:][..., : t.shape[-1]]

    assert right(x, logits, k, q) == ["scan/forward_mma"]
    for i, elements in enumerate((1, 4, 4, 1)):
        tensors = [behind(t, elements) if i == j else t for j, t in enumerate((x, logits, k, q))]
        assert right(*tensors) == ["scan/forward_simt"]
    # Tensors whose last dimension is not contiguous, and tokens that are 2 GiB apart, are copied first.
    assert right(*(t.mT.contiguous().mT for t in (x, logits, k, q))) == ["scan/forward_mma"]
    for apart in (2**30 - 8, 2**30) if emulator.has_sparse() else ():
        far = emulator.sparse(x.shape, x.dtype, (0, 0, apart, 1))
        assert (rows(far)[0] is far) == (apart < 2**30)  # larger distances would overflow 32-bit offsets
        assert right(far.copy_(x), logits, k, q) == ["scan/forward_mma"]


@EMULATED
@pytest.mark.skipif(not emulator.has_sparse(), reason="needs memory that is not reserved")
@pytest.mark.parametrize("strides", [False, True])  # True: inputs have large strides; False: only results are large
@RECURRENCES
def test_offsets_of_more_than_32_bits_emulated(recurrence, strides, emulated, monkeypatch):
    """The last image is correct if tensors have more than 2^32 elements, or inputs have strides above 2^32."""
    (L, D, N), dtype, (make, reference_scan) = (70, 40, 16), torch.bfloat16, of_recurrence(recurrence)
    inputs = [t.detach() if t.dim() == 3 else t.detach().float() for t in make(1, L, D, N, dtype)]
    x, logits, k, q, *channels = in_order(recurrence, inputs)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    truth = [results_of(reference_scan, exact(inputs), dy.double(), reverse=True)]

    def large(t, image):
        """Return an input with more than 2^32 elements or with strides above 2^32, in little memory.

        All images are `t` if only the results must be large; otherwise only the last image of direction 1 is `t`.
        """
        if not strides:
            return t.expand(2, 2**21 + 3, -1, -1)
        n = t.shape[-1]
        tensor = emulator.sparse((2, 2, L, n), dtype, (2**34 + image, 2**33 + 3 * image, n, 1))
        tensor[1, 1] = t[0]
        return tensor

    with emulator.sparse_where_large() as launch:
        x, logits, k, q, dy = (large(t, 8 * (i + 1)) for i, t in enumerate((x, logits, k, q, dy)))
        tensors = x, logits, k, q, *(t if t is None else torch.stack([t] * 2) for t in channels)
        monkeypatch.setattr(launches, "launch", launch)
        by_fmas = Schedule(heuristics.FORWARD_SIMT[recurrence][0], 1)
        _, states = cuda_scan.scan_forward(recurrence, *tensors, [True, True], True, by_fmas)
        for variant in heuristics.forward_variants(recurrence, N, 2):
            y, kept = cuda_scan.scan_forward(recurrence, *tensors, [True, True], True, Schedule(variant, 1))
            assert_close_to(truth, [[y[1, -1:]]], dtype, variant)
            assert relative_error(kept[1, -1], states[1, -1].double()) < TOLERANCE[dtype] / 2
        for variant in heuristics.BACKWARD[recurrence]:
            before = logits[1, -1].clone()
            dx, dlogits, dk, dq, *_ = cuda_scan.scan_backward(
                recurrence, dy, *tensors, states, [True, True], Schedule(variant, 1), overwrite_step_logits=strides
            )
            found = [dx, dlogits, *([] if recurrence == "longhorn" else [None]), dk, dq]
            assert_close_to([truth[0][1:]], [[t if t is None else t[1, -1:] for t in found]], dtype, variant)
            if strides:
                logits[1, -1] = before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@RECURRENCES
def test_nan_and_infinity_stay_in_their_channel(recurrence, value, device):
    make, _ = of_recurrence(recurrence)
    x, *rest = in_order(recurrence, [t.detach()[None] for t in make(1, 50, 40, 16, torch.bfloat16)][:-2])
    rest = [t if t is None else (t.float() if t.dim() == 3 else t).to(device) for t in rest]
    for variant in heuristics.forward_variants(recurrence, 16, 2):
        # Kernels that process two tokens at a time also propagate NaN of x to up to two earlier tokens.
        before, tokens = (2, (20, 21, 22, 23)) if isinstance(variant, ForwardMma) else (0, (20,))
        for token in tokens:
            spoilt = x.clone()
            spoilt[0, 0, token, 9] = value
            y, _ = cuda_scan.scan_forward(
                recurrence, spoilt.to(device), *rest, [False], False, Schedule(variant, 1)
            )  # fmt: skip
            assert not torch.isfinite(y[0, 0, token:, 9]).any()
            assert torch.isfinite(y[0, 0, : token - before]).all()
            y[..., 9] = 0
            assert torch.isfinite(y).all()


@pytest.mark.parametrize(("dtype", "shape", "segment_chunks"), [
    (torch.float32, (2, 150, 40, 16), 1), (torch.bfloat16, (1, 200, 71, 16), 2), (torch.bfloat16, (1, 200, 72, 16), 4),
])  # fmt: skip
@RECURRENCES
def test_gradients_written_over_the_step_logits_are_the_same(recurrence, dtype, shape, segment_chunks, device):
    """On request, the gradients of the step logits overwrite the step logits, also in strided tensors."""
    (B, L, D, N), g = shape, torch.Generator().manual_seed(0)
    L, D = (L, D) if device == "cpu" else (5 * L, 8 * D)  # a GPU needs more CTAs
    x, dy, logits = (torch.randn(2, B, L, D, generator=g).to(device, dtype) for _ in range(3))
    k, q = (torch.randn(2, B, L, N, generator=g).to(device, dtype) for _ in range(2))
    A = None if recurrence == "longhorn" else -torch.rand(2, D, N, generator=g).to(device)
    rest = k, q, A, torch.ones(2, D, device=device), torch.ones(2, D, device=device)
    spread = torch.full((2, B, 2 * L, D), float("nan"), device=device, dtype=dtype)[:, :, ::2]
    _, states = cuda_scan.scan_forward(recurrence, x, logits, *rest, [False, True], True)
    for variant in heuristics.BACKWARD[recurrence]:
        arguments = *rest, states, [False, True], Schedule(variant, segment_chunks)
        before = logits.clone()
        apart = cuda_scan.scan_backward(recurrence, dy, x, logits, *arguments)
        assert torch.equal(logits, before)
        for over in (before, spread.copy_(logits)):
            found = cuda_scan.scan_backward(recurrence, dy, x, over, *arguments, overwrite_step_logits=True)
            assert found[1].data_ptr() == over.data_ptr()
            assert all(torch.equal(a, b) for a, b in zip(found, apart)), variant


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-4), (torch.float16, 2e-4)])
@pytest.mark.parametrize(("L", "D", "segment_chunks"), [(150, 40, 1), (300, 7, 2), (129, 136, 1)])
def test_gradients_between_segments_equal_those_without_tensor_cores(
    dtype, tolerance, L, D, segment_chunks, device, monkeypatch, poison
):
    """The tensor-core kernel and the scalar kernel compute the same gradients between segments of a sequence."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(2, 1, L, n, generator=g).to(dtype) for n in (D, 16, 16)]
    scale = torch.tensor([1e-2, 0.5, 20])[torch.randint(3, (2, 1, L, 1), generator=g)]
    logits = torch.where(torch.rand(2, 1, L, D, generator=g) < 0.1, 100 * x[0].sign(), 3 * x[0])
    dy, bias = x[0][:1].expand(2, -1, -1, -1).to(device), torch.randn(2, D, generator=g).to(device)
    keys = torch.cat([x[0][..., :1], (scale * x[1]).to(dtype), x[2]], dim=-1).to(device)
    tensors = dy, logits.to(device, dtype), *keys[..., 1:].split(16, dim=-1), None, bias
    found = []
    for variant in (heuristics.SEGMENT_GRADIENTS_MMA, heuristics.SEGMENT_STATES["longhorn"]):
        monkeypatch.setattr(heuristics, "SEGMENT_GRADIENTS_MMA", variant)
        found.append(cuda_scan.between_segments("longhorn", *tensors, [False, True], segment_chunks, gradients=True))
    assert relative_error(found[0], found[1].double()) < tolerance


# Tests of public functions on a GPU


def with_gradients(inputs):
    return [t.detach().cuda().requires_grad_() for t in inputs]


def assert_right(scan, reference_scan, inputs, dtype, **kwargs):
    # Parameters are in fp32, as in models, because their gradients sum over all tokens and may overflow fp16.
    inputs = with_gradients([t if t.dim() == 3 else t.float() for t in inputs])
    expected = scans.outputs_and_gradients(
        lambda *t, **k: reference_scan(*t, **k).cpu(), exact(inputs), dtype, **kwargs
    )
    actual = scans.outputs_and_gradients(lambda *t, **k: scan(*t, backend="cuda", **k).cpu(), inputs, dtype, **kwargs)
    for i, (a, truth, t) in enumerate(zip(actual, expected, [inputs[0], *inputs])):
        assert a.dtype == t.dtype
        error = relative_error(a, truth)
        assert error < TOLERANCE[dtype] or truth.norm() == 0 == a.norm(), (i, error)


@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("N", [4, 8, 16, 32, 64, 1, 11])
def test_random_shapes_equal_the_reference(scan, reference_scan, make_inputs, dtype, N, poison):
    g = torch.Generator().manual_seed(N)
    for seed in range(4):
        B, L, D = (int(torch.randint(1, high, (), generator=g)) for high in (5, 200, 150))
        D = D if seed % 2 else 8 * D  # half of the widths are multiples of 8, so that vector loads are used
        assert_right(scan, reference_scan, make_inputs(B, L, D, N, dtype, seed), dtype, reverse=bool(seed // 2))


@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((*size, 16), torch.float32) for size in [(1, 1, 1), (1, 10_000, 3), (300, 3, 40), (1, 64, 768), (2, 65, 64)]]
    + [((2, 1500, 768, 16), torch.bfloat16), ((3, 1000, 768, 16), torch.bfloat16)],  # sequences split into segments
)
def test_extreme_shapes(scan, reference_scan, make_inputs, shape, dtype, poison):
    assert_right(scan, reference_scan, make_inputs(*shape, dtype), dtype)


@pytest.mark.gpu
@SCANS
@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("shape", [(64, 197, 384, 16), (1, 1500, 768, 16), (8, 1025, 768, 16)])
def test_two_runs_are_bitwise_identical(scan, reference_scan, make_inputs, shape, backend):
    inputs = with_gradients(make_inputs(*shape, torch.bfloat16))
    dy = torch.randn(shape[:3], device="cuda", dtype=torch.bfloat16)
    runs = [results_of(scan, inputs, dy, reverse=True, backend=backend) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs))


@pytest.mark.gpu
def test_gradients_of_more_than_two_to_the_31_elements():
    B, L, D, N = 700, 4096, 768, 4
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(B, L, D, generator=g, device="cuda", dtype=torch.bfloat16)
    logits = torch.zeros(1, 1, 1, device="cuda", dtype=torch.bfloat16).expand(B, L, D).contiguous()
    k, q = torch.randn(2, B, L, N, generator=g, device="cuda", dtype=torch.bfloat16)
    inputs = [t.requires_grad_() for t in (x, logits, k, q)]
    found = results_of(longhorn_scan, inputs, x.detach())
    last = [t.detach()[-1:].double().requires_grad_() for t in inputs]
    for a, truth in zip(found, results_of(reference.longhorn, last, last[0].detach())):
        assert relative_error(a[-1:], truth) < 4e-3


@pytest.mark.gpu
@SCANS
def test_cuda_graph_capture_on_another_stream(scan, reference_scan, make_inputs):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        inputs = with_gradients(make_inputs(1, 300, 64, 16, torch.float32))
        dy = torch.randn(1, 300, 64, device="cuda")
        expected = results_of(scan, inputs, dy)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = results_of(scan, inputs, dy)
    for t in captured:
        t.detach().fill_(float("nan"))
    graph.replay()
    assert all(torch.equal(a, truth) for a, truth in zip(captured, expected))
