"""Tests of macOS, Windows and MPS, which are simulated by removing or replacing functions."""

import os
import runpy
import subprocess
import sys
import types
from contextlib import nullcontext

import pytest
import timm
import torch
import torch.distributed as dist
from faults import same
from processes import ROOT, train_command
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vil import checkpoint
from vil.fault_tolerance import files
from vil.kernels import cache
from vil.kernels.scan import torch_scan
from vil.training import meter


def test_training_is_interrupted_and_resumed_to_the_same_weights(tmp_path, image_folder, uninterrupted):
    folders = [tmp_path / platform for platform in ("darwin", "win32")]
    for folder in folders:
        folder.mkdir()
    configs = [train_command(folder, image_folder)[-1] for folder in folders]
    command = [sys.executable, str(ROOT / "tests/helpers/platforms.py"), *configs]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=500)
    assert ended.returncode == 0, ended.stderr
    for words in ("stopped by a signal", "resuming after step 2 of 4 in epoch 2 of 2"):
        assert ended.stderr.count(words) == 2
    expected = checkpoint.Checkpoint(uninterrupted / "run/last.pt").training_state()
    for folder in folders:
        found = checkpoint.Checkpoint(folder / "run/last.pt").training_state()
        assert len(found["history"]) == 2
        for part in ("state_dict", "state_dict_ema"):
            assert same(found[part], expected[part]), (folder.name, part)


def test_peak_memory_is_in_bytes_on_a_mac_and_unknown_on_windows(monkeypatch):
    bytes_here = meter.peak_memory()
    usage = types.SimpleNamespace(ru_maxrss=bytes_here)
    faked = types.SimpleNamespace(getrusage=lambda _: usage, RUSAGE_SELF=0)
    monkeypatch.setitem(sys.modules, "resource", faked)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert meter.peak_memory() == bytes_here
    monkeypatch.setitem(sys.modules, "resource", None)
    assert meter.peak_memory() == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    assert meter.peak_memory() == 7  # with CUDA, the peak memory of the GPU


def test_losses_are_summed_on_the_cpu_when_the_device_does_not_support_fp64(monkeypatch):
    came: list = []
    monkeypatch.setattr(torch.Tensor, "is_mps", True)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: came.append(t.dtype) or t)
    measured = meter.EpochMeter()
    measured.add(torch.tensor(1.0), torch.tensor(2.0))
    measured.collect()
    assert came == [torch.float32]


def test_files_are_written_on_platforms_that_cannot_open_folders(tmp_path, monkeypatch):
    real = os.open

    def opened(path, *arguments, **keywords):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.delattr(os, "O_DIRECTORY")
    files.write_atomically(tmp_path / "file", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "content"


# Python implementations of the reference scan's operators
INSIDE = {
    torch.ops.vil.reference_scan: torch_scan._scan_forward._init_fn,
    torch.ops.vil.reference_scan_backward: torch_scan._scan_backward._init_fn,
}


class Recorded(TorchDispatchMode):
    """Dispatch mode that records the dtypes of all tensors and all operators, also inside the reference scan."""

    def __init__(self):
        super().__init__()
        self.operators, self.dtypes = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inside = INSIDE.get(function.overloadpacket)
        with self if inside else nullcontext():
            out = (inside or function)(*args, **(kwargs or {}))
        self.operators.add(function.overloadpacket)
        self.dtypes |= {t.dtype for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
        return out


@pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])
def test_models_use_no_fp64_because_mps_does_not_support_it(name, monkeypatch):
    # run the reference backend, as on MPS
    monkeypatch.setattr("vil.kernels.backends._backend_for", lambda device: "reference")
    model = timm.create_model(name, depth=2, embed_dim=32, img_size=32, drop_path_rate=0.5)
    with Recorded() as recorded:
        model(torch.rand(2, 3, 32, 32)).sum().backward()
    # Only the reference scan calls addcmul_, so the operators inside the reference scan were recorded.
    assert torch.ops.aten.addcmul_ in recorded.operators
    assert torch.ops.vil.reference_scan_backward in recorded.operators
    assert {d for d in recorded.dtypes if d.is_floating_point} == {torch.float32}


def test_the_package_works_without_torch_distributed(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "vil.distributed", raising=False)
    for name in ("register_rendezvous_handler", "Store", "PrefixStore", "DistError"):
        monkeypatch.delattr(dist, name)
    assert runpy.run_module("vil.distributed")["is_rank0"]()


def test_compiled_code_is_not_cached_on_a_platform_without_file_owners(monkeypatch):
    monkeypatch.setattr(cache, "os", types.SimpleNamespace(name="nt"))
    cache.write("name", b"key", b"content")
    assert cache.read("name", b"key") is None
