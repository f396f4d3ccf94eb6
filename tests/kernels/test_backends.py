"""Tests, on a CPU, of the code around the GPU backends: backend selection, argument checks, and results."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from scans import SCANS, StandIn, exact, outputs_and_gradients, relative_error
from torch._subclasses.fake_tensor import FakeTensorMode

from vil.kernels import backends, cuda, longhorn_scan, selective_scan
from vil.kernels.scan import scan_op, torch_scan


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # in interpreter mode, Triton accepts CPU tensors
    module = StandIn()
    monkeypatch.setattr(scan_op, "_module", lambda backend, device: module)
    return module


@SCANS
@pytest.mark.parametrize(("N", "padded"), [(1, 4), (4, 4), (5, 8), (16, 16), (17, 32), (64, 64)])
def test_any_number_of_states_is_padded_to_a_supported_number(scan, reference_scan, make_inputs, N, padded, stand_in):
    inputs = make_inputs(2, 5, 3, N, torch.float32)
    expected = outputs_and_gradients(reference_scan, exact(inputs), torch.float32)
    actual = outputs_and_gradients(lambda *t: scan(*t, backend="triton"), inputs)
    assert [t.dtype for t in actual] == [torch.float32] * len(actual)
    for a, truth in zip(actual, expected):
        assert relative_error(a, truth) < 1e-6
    assert stand_in.kept == [True]
    assert stand_in.state_sizes == [padded]


@SCANS
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning", "ignore::torch.jit.TracerWarning")
def test_a_scan_on_any_device_can_be_traced_by_torch_jit(scan, reference_scan, make_inputs, monkeypatch):
    """torch.jit.trace traces a scan. Meta tensors replace CUDA tensors, and the test selects the CUDA backend."""
    monkeypatch.setattr(backends, "backend_for", lambda device: "cuda")
    inputs = [t.to("meta") for t in make_inputs(2, 5, 3, 4, torch.float32)]
    traced = torch.jit.trace(scan, inputs, check_trace=False)
    assert traced(*inputs).shape == (2, 5, 3)


@SCANS
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_inputs_of_several_dtypes_lose_only_the_rounding_of_the_output(
    scan, reference_scan, make_inputs, low, stand_in
):
    """Inputs of several dtypes are converted to one kernel dtype, and each gradient has its input's dtype."""
    for mixed in range(4):
        inputs = make_inputs(2, 5, 3, 4, torch.float32)
        per_token = [i for i, t in enumerate(inputs) if t.dim() == 3]
        for i in {*range(len(inputs))} - {per_token[mixed]}:
            inputs[i] = inputs[i].detach().to(low).requires_grad_()
        expected = outputs_and_gradients(reference_scan, exact(inputs), low)
        actual = outputs_and_gradients(lambda *t: scan(*t, backend="triton"), inputs, low)
        assert [t.dtype for t in actual] == [inputs[0].dtype, *(t.dtype for t in inputs)]
        for a, truth in zip(actual, expected):
            assert relative_error(a, truth) < (1e-6 if a.dtype == torch.float32 else 4e-3)
    scan(*(t.to(low) if t.dim() == 3 else t for t in inputs), backend="triton")
    assert stand_in.dtypes == [torch.float32] * 4 + [low]


@SCANS
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_states_are_kept_only_if_an_input_requires_gradients(
    scan, reference_scan, make_inputs, backend, stand_in, monkeypatch
):
    kept, reference = stand_in.kept, torch_scan._scan_forward
    monkeypatch.setattr(torch_scan, "_scan_forward", lambda *given: kept.append(given[-1]) or reference(*given))
    inputs = make_inputs(2, 5, 3, 4, torch.float32)
    frozen = [t.detach() for t in inputs]
    scan(*frozen, backend=backend)
    with torch.no_grad():
        scan(*inputs, backend=backend)
    assert kept == [False, False]
    for i, leaf in enumerate(inputs):
        scan(*frozen[:i], leaf, *frozen[i + 1 :], backend=backend)
    # States are kept for the gradient of any input, except that of the skip weights in the reference backend.
    skip = len(inputs) - 2
    assert kept[2:] == [i != skip or backend == "triton" for i in range(len(inputs))]


def inputs_on_a_gpu(dtype=torch.float32, N=16, L=5, D=3, G=1):
    x, k = torch.zeros((), dtype=dtype, device="cuda"), torch.zeros((), dtype=dtype, device="cuda")
    return x.expand(G, 1, L, D), x.expand(G, 1, L, D), k.expand(G, 1, L, N), k.expand(G, 1, L, N)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (dict(), None),
        (dict(dtype=torch.float16, N=64), None),
        (dict(dtype=torch.bfloat16, N=1, G=63), None),
        (dict(L=2**31 - 2**10, D=1), None),
        (dict(L=1, D=2**29 - 1), None),
        (dict(dtype=torch.float64), "dtype of x must be float16, bfloat16 or float32 .*got torch.float64"),
        (dict(N=65), "supports up to 64 states and 63 directions, got 65 and 1"),
        (dict(G=64), "supports up to 64 states and 63 directions, got 16 and 64"),
        (
            dict(L=2**31 - 2**10 + 1, D=1),
            "supports up to 2147482624 tokens and 536870911 channels, got 2147482625 and 1",
        ),
        (dict(L=1, D=2**29), "supports up to 2147482624 tokens and 536870911 channels, got 1 and 536870912"),
    ],
    ids=str,
)
def test_auto_selects_the_gpu_for_supported_inputs_and_the_reference_otherwise(inputs, reason):
    with FakeTensorMode():
        x, _, k, _ = tensors = inputs_on_a_gpu(**inputs)
        assert backends.choose("auto", x, k.shape[-1], len(x)) == ("auto" if reason is None else "reference")
        for name in ("cuda", "triton"):
            if reason is None:
                assert backends.choose(name, x, k.shape[-1], len(x)) == name
            else:
                with pytest.raises(ValueError, match=reason):
                    longhorn_scan(*tensors, reverse=[False] * len(x), backend=name)
        assert backends.choose("reference", x, k.shape[-1], len(x)) == "reference"


def test_only_triton_in_interpreter_mode_accepts_cpu_tensors(monkeypatch):
    x, k = torch.zeros(1, 2, 3), torch.zeros(1, 2, 4)
    A = torch.zeros(3, 4)
    for interpret, names in (("0", ("cuda", "triton")), ("1", ("cuda",))):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        for name in names:
            with pytest.raises(ValueError, match=f"must be on a GPU for the {name} backend, got x on cpu"):
                longhorn_scan(x, x, k, k, backend=name)
            with pytest.raises(ValueError, match=f"must be on a GPU for the {name} backend, got x on cpu"):
                selective_scan(x, x, A, k, k, backend=name)
            with pytest.raises(ValueError, match=f"must be on a GPU for the {name} backend, got x on cpu"):
                backends.resolve(name, x.device)  # `resolve` raises too, because operators call it directly
        assert backends.choose("auto", x, 4, 1) == "cpu"
    assert backends.choose("triton", x, 4, 1) == "triton"


@pytest.fixture
def machine(monkeypatch):
    """Return a function that simulates a machine with an NVIDIA or AMD GPU, with or without the packages that CUDA
    kernels and Triton need.
    """

    def look(hip=None, missing=None, triton=True):
        backends._backend_for.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(cuda, "unavailable", lambda device: missing)
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace() if triton else None)

    yield look
    backends._backend_for.cache_clear()


def test_the_first_backend_that_the_machine_supports_is_selected(machine):
    device = torch.device("cuda", 0)
    machine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [backends.resolve(name, device) for name in ("auto", "cuda", "triton")] == ["cuda", "cuda", "triton"]
        machine(hip="6.2")
        assert [backends.resolve(name, device) for name in ("auto", "triton")] == ["triton", "triton"]
        assert backends.backend_for(torch.device("mps")) == "reference"  # no kernels exist for MPS
    machine(missing="no NVRTC here")
    with pytest.warns(UserWarning, match="no NVRTC here. Using the triton backend"):
        assert backends.backend_for(device) == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning is issued only once
        assert [backends.resolve(name, device) for name in ("auto", "triton")] == ["triton", "triton"]
    with pytest.raises(RuntimeError, match="no NVRTC here"):
        backends.resolve("cuda", device)


def test_the_reference_takes_over_on_a_gpu_without_nvrtc_and_triton(machine):
    device = torch.device("cuda", 0)
    machine(missing="no NVRTC here", triton=False)
    reason = "no NVRTC here; the triton backend needs Triton, which cannot be imported: .*. Using the reference"
    with FakeTensorMode():
        x = inputs_on_a_gpu()[0]
        with pytest.warns(UserWarning, match=reason):
            assert backends.choose("auto", x, 16, 1) == "reference"
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the warning is issued only once
            assert backends.choose("auto", x, 16, 1) == backends.backend_for(device) == "reference"
        for name in ("auto", "triton"):
            with pytest.raises(RuntimeError, match="the triton backend needs Triton"):
                backends.resolve(name, device)
        machine()
        assert backends.choose("auto", x, 16, 1) == "auto"
