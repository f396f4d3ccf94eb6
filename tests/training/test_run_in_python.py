"""Tests of the function `vil.train`, which trains like `vil train`, raises exceptions and restores signal handlers."""

import csv
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import SMALL, call

import vil
from vil.checkpoint import CheckpointError
from vil.cli import train as command
from vil.config import ConfigError
from vil.training.interruption import StoppedError
from vil.training.run import options_of_run
from vil.training.trainer import Trainer

OPTIONS = dict(SMALL | dict(epochs=2, workers=0, device="cpu", experiment="run"), warmup_epochs=0)
MEASURED = ("images_per_second", "data_wait_percent", "gpu_wait_percent", "peak_memory_gib", "eval_images_per_second")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(image_folder, **options):
    return vil.train(image_folder, "none", **OPTIONS | options)


def losses(rows):
    return [{name: float(value) for name, value in row.items() if name not in MEASURED} for row in rows]


def test_a_run_in_python_has_the_history_of_the_command(image_folder, tmp_path):
    run = train(image_folder)
    small = ["--model-kwargs", *(f"{name}={value}" for name, value in SMALL["model_kwargs"].items())]
    words = ["--img-size", 16, "--global-batch-size", 16, "--warmup-epochs", 0, "--epochs", 2, "--workers", 0]
    words += [image_folder, "--pretrained-path", "none", "--device", "cpu", "--experiment", "command"]
    with pytest.raises(SystemExit, match="^0$"):
        call(command.main, *small, *words)
    tables = [(tmp_path / "output" / name / "summary.csv").read_text() for name in ("run", "command")]
    written = [list(csv.DictReader(table.splitlines())) for table in tables]
    assert losses(run.history) == losses(written[0]) == losses(written[1])
    assert run.folder == tmp_path / "output/run"
    assert run.best_checkpoint == run.folder / "best.pt"


def test_a_run_leaves_the_rngs_of_the_process_unchanged(image_folder):
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = [draws(), draws()]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    found = [draws()]
    train(image_folder, epochs=1)
    assert [*found, draws()] == expected


def test_a_run_predicts_with_its_best_checkpoint(image_folder, monkeypatch):
    run = train(image_folder, epochs=1)
    photos = sorted(image_folder.glob("val/*/0.png"))
    monkeypatch.chdir("/")
    assert run.predict(photos, topk=2) == vil.predict(run.best_checkpoint, photos, topk=2)


def test_errors_are_exceptions_and_release_the_run_folder(image_folder, monkeypatch):
    train(image_folder, epochs=1)
    with pytest.raises(
        ConfigError, match="unknown option 'epoch' in the arguments of vil.train; did you mean 'epochs'"
    ):
        train(image_folder, epoch=1)
    with pytest.raises(ConfigError, match="data_dir is given twice, as data and as data_dir"):
        train(image_folder, data_dir=image_folder)
    with pytest.raises(ConfigError, match="data must be the path of a folder of images, got <.*Your own training loop"):
        vil.train(torch.utils.data.TensorDataset(torch.zeros(4)))
    with pytest.raises(ConfigError, match="config file vil_tin does not exist; did you mean 'vil_tiny'"):
        train(image_folder, config="vil_tin")
    with pytest.raises(CheckpointError, match="run already contains a run"):
        train(image_folder, epochs=1)
    with pytest.raises(CheckpointError, match="model_kwargs must be") as kept:
        train(image_folder, resume="auto", model_kwargs={"embed_dim": 16, "depth": 2, "patch_size": 8})
    monkeypatch.setattr("vil.fault_tolerance.locks.PATIENCE", 0)  # a locked run folder raises at once
    assert len(train(image_folder, resume="auto").history) == 2, kept


def test_paths_and_devices_may_be_objects(image_folder, tmp_path):
    given = dict(output=tmp_path, device=torch.device("cpu"), epochs=1)
    config = options_of_run(Path(image_folder), None, None, given)
    assert (config.data_dir, config.output, config.device) == (str(image_folder), str(tmp_path), "cpu")


def test_several_processes_are_rejected(image_folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="trains in one process, got WORLD_SIZE=2: unset WORLD_SIZE"):
        train(image_folder)


def test_a_signal_raises_after_a_checkpoint_and_handlers_are_restored(image_folder):
    look = Trainer.look_at_step

    def interrupted(self, progress):
        os.kill(os.getpid(), signal.SIGINT)
        look(self, progress)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers], torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "look_at_step", interrupted)
        with pytest.raises(StoppedError, match="stopped by a signal: .*last.pt"):
            train(image_folder)
    assert ([signal.getsignal(number) for number in numbers], torch.get_num_threads()) == before
    assert len(train(image_folder, resume="auto").history) == 2


def test_a_run_trains_in_another_thread_than_the_main_thread(image_folder):
    runs = []
    thread = threading.Thread(target=lambda: runs.append(train(image_folder, epochs=1)))
    thread.start()
    thread.join()
    assert [len(run.history) for run in runs] == [1]
