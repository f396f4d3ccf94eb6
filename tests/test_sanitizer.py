"""Test of tools/sanitize.py, which runs kernels under NVIDIA's compute-sanitizer on a GPU."""

import contextlib

import sanitize
import torch
from blocks import on_an_emulated_gpu, operator_on_a_cpu
from processes import ROOT

from vil.kernels import backends
from vil.kernels.cuda import launches


@contextlib.contextmanager
def autocast(device, dtype=torch.bfloat16, enabled=True):
    """Replacement of `torch.autocast` that works on a machine without a GPU."""
    was_enabled, old_dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, was_enabled)
        torch.set_autocast_dtype(device, old_dtype)


def test_the_sanitizer_launches_every_kernel_of_blocks(monkeypatch):
    """tools/sanitize.py launches every CUDA source of vil/kernels/block. The launches are recorded and not run."""
    launched, randn = set(), torch.randn
    on_an_emulated_gpu(monkeypatch, hopper=True)
    monkeypatch.setattr(launches, "launch", lambda source, *_: launched.add(source.name))
    monkeypatch.setattr(backends, "backend_for", lambda device: "cuda")
    monkeypatch.setattr(torch, "randn", lambda *size, device, **kwargs: randn(*size, **kwargs))
    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module: module)
    with operator_on_a_cpu():
        sanitize.block("longhorn", torch.bfloat16)
    kernels = ROOT / "vil/kernels"
    sources = {path.relative_to(kernels).with_suffix("").as_posix() for path in kernels.glob("block/*.cu")}
    assert sources
    assert sources <= launched
