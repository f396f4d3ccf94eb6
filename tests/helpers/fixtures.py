"""Fixtures shared by the tests of the package and of research; a conftest.py imports the fixtures of its folder."""

import os

# Limit threads before NumPy and PyTorch are imported, because tests run in parallel and fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

# Detect GPUs by NVML, because CUDA cannot be used in a forked process once the parent has initialized CUDA.
with mock.patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
    has_gpu = torch.cuda.is_available()
if not has_gpu:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads TRITON_INTERPRET when functions are decorated

# PyTorch caches the factory functions that a device context affects. Fill the cache before a test replaces torch.empty,
# because otherwise later tests would allocate models on the CPU instead of the meta device.
with torch.device("meta"):
    torch.empty(0)

from processes import run, train_command
from timm.data import get_img_extensions, set_img_extensions

# Stop ignoring SIGINT, because background jobs of shell scripts ignore SIGINT, as do their child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

CLASSES = ("ant", "bee", "cat", "dog")
TRAIN_IMAGES, VAL_IMAGES = 17, 7  # images per class; neither number is a multiple of the batch size


def reset_signal_handlers():
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def process_state():
    """Reset signal handlers before and after each test, and timm's image extensions after each test."""
    extensions = get_img_extensions()
    reset_signal_handlers()
    yield
    reset_signal_handlers()
    set_img_extensions(extensions)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """Return an image folder {train,val}/{ant,bee,cat,dog}/*.png. Images are noise with a mean colour per class."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split, count in (("train", TRAIN_IMAGES), ("val", VAL_IMAGES)):
        for target, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 160, (24 + i, 30, 3), dtype=np.uint8)
                pixels[..., target % 3] += np.uint8(60 + 30 * (target // 3))
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, image_folder):
    """Return the output folder of a finished run of two epochs in one process. The run folder is `run` inside it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(train_command(folder, image_folder), pictures=True)
    return folder


@pytest.fixture
def no_pictures(monkeypatch):
    # Skip all plots and reports, because plotting takes longer than a small training run.
    monkeypatch.setattr("vil.training.summary.plot_history", lambda *_: b"")
    monkeypatch.setattr("vil.training.mosaic.Mosaic._plot", lambda _: b"")
    monkeypatch.setattr("vil.training.trainer.is_reported", lambda *_: False)


@pytest.fixture
def poison(monkeypatch):
    """Fill tensors of `empty`, `empty_like` and `new_empty` with NaN or 0x5A, so that unwritten memory fails tests."""

    def poisoned(make):
        def made(*args, **kwargs):
            t = make(*args, **kwargs)
            return t.fill_(float("nan") if t.is_floating_point() else 0x5A)

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
