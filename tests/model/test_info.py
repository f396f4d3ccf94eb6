"""Tests of vil.info (versions, commit and hardware for bug reports) and vil.published (published results)."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from types import SimpleNamespace

import pytest
import torch

import vil
from vil import info, published
from vil.cli.main import run


def git(folder, *command):
    identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", folder, *identity, *command], check=True, capture_output=True, text=True).stdout


def test_the_report_names_versions_and_machine_in_one_column():
    lines = info.format_environment().splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines if not line.startswith("gpu "))
    names = ["vision-longhorn", "commit", "python", "platform", "torch", "torchvision", "timm", "triton"]
    assert list(facts)[:13] == [*names, "cuda-core", "numba", "numpy", "pillow", "cpu"]
    for name in ("vision-longhorn", "torch", "torchvision", "timm", "numpy", "pillow"):
        assert facts[name] == importlib.metadata.version(name)
    assert (facts["python"], facts["platform"]) == (platform.python_version(), platform.platform())
    assert facts["cpu"].startswith(f"{os.cpu_count()} cores, {platform.machine()}, ")
    assert facts["cuda"] == (torch.version.cuda or "not in this build of torch")
    assert len({line.index(line.split(maxsplit=1)[1], len(line.split()[0])) for line in lines[:12]}) == 1


def test_missing_packages_are_reported_as_missing(monkeypatch):
    monkeypatch.setattr(info, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(torch.version, "cuda", None)
    facts = info.environment()
    assert facts["no-such-package"] == "not installed"
    assert facts["cuda"] == "not in this build of torch"
    assert "triton" not in facts
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert info.environment()["cuda"] == "13.0"


def test_gpus_and_their_driver_are_reported(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\n[ "$*" = "--query-gpu=driver_version --format=csv,noheader" ] && yes 580.1 | head -2\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus = [SimpleNamespace(name="H200", major=9, minor=0, total_memory=139.8 * 2**30) for _ in range(2)]
    gpus[1].name, gpus[1].minor = "other", 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: gpus[i])
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    facts = info.environment()
    assert (facts["nccl"], facts["driver"]) == ("2.27.3", "580.1")
    assert (facts["gpu 0"], facts["gpu 1"]) == ("H200, sm_90, 140 GiB", "other, sm_91, 140 GiB")
    assert "gpu 2" not in facts
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # PyTorch on Windows has no NCCL
    monkeypatch.delattr(torch.cuda.nccl, "version")
    assert "nccl" not in info.environment()


def test_the_reported_commit_is_that_of_the_packages_checkout(tmp_path, monkeypatch, capfd):
    checkout, package = tmp_path / "checkout", tmp_path / "checkout" / "vil"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(info, "__file__", str(package / "info.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))  # tmp_path may be inside a git checkout
    monkeypatch.chdir(tmp_path)
    unknown = "unknown: not run from a git checkout"
    assert info.git_commit() == unknown
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "around it")
    assert info.git_commit() == unknown  # a repository in a parent folder does not count
    git(checkout, "init", "--quiet")
    assert info.git_commit() == "unknown: git failed"  # the repository has no commit yet
    (package / "other").touch()
    git(checkout, "add", "vil")
    git(checkout, "commit", "--quiet", "-m", "with it")
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert info.git_commit() == head
    git(checkout, "tag", "-a", "v1", "-m", "a tag, which names no commit")
    (checkout / "new").write_text("a file that git does not know makes no difference")
    written = (index := checkout / ".git" / "index").stat().st_mtime_ns
    os.utime(package / "other", (1, 1))
    assert info.git_commit() == head
    assert index.stat().st_mtime_ns == written  # reading the commit does not rewrite git's index
    (monitor := tmp_path / "monitor").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran")
    monitor.chmod(0o755)
    git(checkout, "config", "core.fsmonitor", str(monitor))
    assert info.git_commit() == head
    assert not (tmp_path / "ran").exists()  # a checkout's config must not make git run a program
    git(checkout, "config", "--unset", "core.fsmonitor")
    git(checkout, "worktree", "add", "--quiet", str(tmp_path / "branch"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(info, "__file__", str(tmp_path / "branch" / "vil" / "info.py"))
        assert info.git_commit() == head
    (package / "other").write_text("changed")
    assert info.git_commit() == head + "-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))  # with this PATH, git is not found
    assert info.git_commit() == "unknown: git failed"
    assert capfd.readouterr() == ("", "")  # git's own error messages are not printed


def test_help_and_version_options_print_help_and_version(monkeypatch, capsys):
    assert vil.__version__ == importlib.metadata.version("vision-longhorn")
    monkeypatch.setattr(vil, "__version__", vil.__version__)  # lets monkeypatch restore the version after the test
    with monkeypatch.context() as not_installed:
        find = importlib.metadata.version
        not_installed.setattr(importlib.metadata, "version", lambda name: find(f"no {name}"))
        assert importlib.reload(vil).__version__ == "unknown"
    with pytest.raises(SystemExit, match="0"):
        run(["info", "--help"])
    assert "Print the versions, commit and hardware" in capsys.readouterr().out
    run(["info"])
    assert capsys.readouterr().out == info.format_environment()


def test_published_accuracies_equal_the_papers():
    assert published.IMAGENET_CLASSES == 1000
    expected = {
        "vil_tiny": (76.4, None), "vil_small": (80.7, None), "vil_base": (None, None),
        "vim_tiny": (76.1, 93.0), "vim_small": (80.5, 95.1), "vim_base": (81.9, 95.8),
    }  # fmt: skip
    assert {name: published.published(name) for name in expected} == expected
    assert published.published("vim_base.tag") == expected["vim_base"]
    assert published.published("deit_small") == published.published("resnet50") == (None, None)
    assert published.published_for("vil_base.tag") == published.published_for("deit_base") == {"ViM-base": (81.9, 95.8)}
    others = "resnet50", "vil_tiny_pooled", "deit_tiny_patch16_224.fb_in1k"  # names that do not end with a known size
    assert [published.published_for(name) for name in others] == [{}, {}, {}]
