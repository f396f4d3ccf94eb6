"""Tests of runs with several phases: start of each phase, interruption, and rejected phases."""

import csv
import dataclasses
import functools
import gc
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from faults import OPTIONS, Run, assert_same, before, result
from processes import SMALL
from tqdm import tqdm

from vil import checkpoint
from vil.config import FIELDS, Config, ConfigError, load_config
from vil.config.options import PHASE_OPTIONS
from vil.fault_tolerance import locks
from vil.fault_tolerance.locks import FolderInUseError, FolderLock
from vil.training import summary
from vil.training.checkpointer import Checkpointer
from vil.training.phases import check_phases
from vil.training.resumption import first_phase
from vil.training.trainer import Trainer, train
from vil.training.update import Update

CPU = torch.device("cpu")
# Phases have eight, four and eight steps per epoch. The model's position embedding depends on the image size.
PHASES = [
    dict(epochs=1, img_size=16, global_batch_size=8, lr=1e-3, mixup=0.8),
    dict(epochs=2, img_size=24, global_batch_size=16, lr=5e-4, mixup=0.0, cutmix=0.0, warmup_epochs=0),
    dict(epochs=1, img_size=16, global_batch_size=8, lr=1e-4, mixup=0.8, layer_decay=0.7),
]


@pytest.fixture(scope="module")
def options(image_folder):
    return dict(data_dir=str(image_folder), phases=PHASES, workers=0, model_ema_decay=0.9)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, options):
    """Train an uninterrupted run, and return the `Run` and its results."""
    run = Run(tmp_path_factory.mktemp("undisturbed"), 1, **options)
    return run, run.finished()


def get(number):
    os.kill(os.getpid(), number)


def stopped_at(call, number=signal.SIGKILL):
    """Return a function that makes rank 0 receive a signal before optimizer step number `call`."""
    return functools.partial(before, Update, "__call__", functools.partial(get, number), call)


def ended_while_it_begins():
    """Let SIGTERM arrive when the second phase begins, so that the last checkpoint is that of the first phase."""
    before(Checkpointer, "load", functools.partial(get, signal.SIGTERM), call=2)


def told_to_stop_while_it_saves(call):
    """Return a function that makes SIGTERM arrive before checkpoint number `call`, at the end of a phase."""
    return functools.partial(before, Checkpointer, "save", functools.partial(get, signal.SIGTERM), call)


@pytest.mark.parametrize(
    "stops",
    [
        # The first run is killed before step 5, and the second run is stopped after step 8, the last step of phase 1.
        [(stopped_at(5), -9), (told_to_stop_while_it_saves(5), 75)],
        # The first run ends at the end of phase 1. The next runs receive a signal before the steps 9, 14 and 20.
        [(ended_while_it_begins, -15), (stopped_at(1), -9), (stopped_at(6), -9), (stopped_at(7, signal.SIGTERM), 75)],
    ],
    ids=["in and at the end of the first", "between, in the second and the third"],
)
def test_a_run_stopped_in_and_between_phases_is_bitwise_identical_to_an_uninterrupted_one(
    tmp_path, options, undisturbed, stops
):
    for prepare, status in stops:
        assert Run(tmp_path, 1, prepare, **options).wait() == [status]
    assert_same(Run(tmp_path, 1, **options).finished(), undisturbed[1])


def trainers_left(folder):
    """Return the Trainers in memory whose run folders are inside `folder`.

    A remaining Trainer's CUDA graphs and loaders would use memory in the next phase.
    """
    return [thing for thing in gc.get_objects() if type(thing) is Trainer and folder in thing.run_info.folder.parents]


def test_a_run_resumes_at_the_end_of_a_phase_also_in_another_folder(
    tmp_path, options, undisturbed, no_pictures, monkeypatch, caplog
):
    class Bar(tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            with pytest.raises(FolderInUseError):  # all phases share one lock
                FolderLock(folders[-1])
            bars.append((options["initial"], options["total"]))

    bars: list = []
    folders = [tmp_path / "run"]
    monkeypatch.setattr(locks, "PATIENCE", 0)
    monkeypatch.setattr("vil.training.progress.tqdm", Bar)
    first = Config(**OPTIONS | options | dict(output=str(tmp_path)))
    Trainer(first, CPU, 0, 1).run()
    last = tmp_path / "run" / "last.pt"
    end = shutil.copy(last, tmp_path / "end.pt")
    others = dict(output=str(tmp_path / "elsewhere"), resume=str(last), pretrained_path=str(last))
    elsewhere = dataclasses.replace(first, **others)
    for config in (elsewhere, load_config("", ["--resume", str(last)], checkpoint.options_to_resume)):
        folders.append(Path(config.output) / "run")
        train(config, CPU, 0, 1)
        assert not trainers_left(tmp_path)
        assert bars[1:] == [(0, 128), (0, 64)]
        del bars[1:]
        assert "initialized from" not in caplog.text  # later phases do not load the initial weights
        assert_same(result(Path(config.output) / "run"), undisturbed[1])
    train(dataclasses.replace(config, resume="auto"), CPU, 0, 1)
    assert "has finished all 4 epochs; set more epochs in --phases to train longer" in caplog.text
    # if the run folder has a checkpoint, a restarted process ignores --resume FILE of another image size
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    shutil.copy(end, last)
    again = dataclasses.replace(first, resume=str(tmp_path / "elsewhere" / "run" / "last.pt"))
    assert len(Trainer(again, CPU, 0, 1, 1).state.history) == 1


def test_two_ranks_change_phases_together(tmp_path, options):
    phases = [PHASES[0], PHASES[1] | dict(epochs=1)]
    whole, again, options = tmp_path / "whole", tmp_path / "again", options | dict(phases=phases, model_ema=False)
    for folder in (whole, again):
        folder.mkdir()
    truth = Run(whole, 2, **options).finished()
    assert sorted(Run(again, 2, stopped_at(9), **options).wait())[0] == -9
    assert_same(Run(again, 2, **options).finished(), truth)


def test_progress_summary_and_run_files_show_the_phases(undisturbed):
    run, ended = undisturbed
    assert [row["phase"] for row in ended["history"]] == [1, 2, 2, 3]
    assert [row["lr"] for row in ended["history"]] == [1e-6, 5e-4, pytest.approx(2.55e-4), 1e-6]
    said = run.said()
    for number, (phase, steps) in enumerate(zip(PHASES, (8, 8, 8)), start=1):
        assert re.search(f"phase {number} of 3: .*epochs {phase['epochs']}, .*img_size {phase['img_size']}, lr ", said)
        assert f"images, the phase has {steps} steps" in said
    assert [*map(int, re.findall(r"^epoch \d/4, phase (\d): training loss", said, re.M))] == [1, 2, 2, 3]
    assert said.count("best: top-1") == 1
    advice = "only 8 steps are trained, .* --model-ema-decay 0.5 to average over about 2 steps"
    assert len(re.findall(advice, said)) == 3
    with open(run.folder / "summary.csv") as file:
        assert [row["phase"] for row in csv.DictReader(file)] == ["1", "2", "2", "3"]
    assert (run.folder / "info.txt").read_text().count("global batch size") == 3
    saved = checkpoint.Checkpoint(run.folder / "last.pt").training_state()
    assert saved["config"]["img_size"] == 16  # the last phase's image size, because loading creates that phase's model
    written = load_config("", ["-c", str(run.folder / "config.yaml")])
    assert [written.of_phase(n).img_size for n in range(3)] == [16, 24, 16]
    assert written.resume is None
    assert first_phase(dataclasses.replace(written, resume="auto")) == 2  # all phases are finished


def test_the_plot_marks_the_start_of_each_phase(monkeypatch):
    from matplotlib.axes import Axes

    marked, draw = [], Axes.axvline
    monkeypatch.setattr(Axes, "axvline", lambda self, x, **how: marked.append((x, how)) or draw(self, x, **how))
    common = dict(train_loss=1.0, eval_loss=1.0, eval_top1=1.0, lr=0.1)
    summary.plot_history([dict(epoch=n + 1, phase=phase, **common) for n, phase in enumerate((1, 1, 2, 2))])
    assert {x for x, how in marked if "linewidth" in how} == {2.5}


def test_options_outside_phases_are_the_defaults_of_phases():
    config = Config(phases=[dict(epochs=3), dict(lr=1e-4)], epochs=7, lr=1e-3)
    assert config.phases == [dict(epochs=3, lr=1e-3), dict(epochs=7, lr=1e-4)]
    assert [config.epochs_of_phase(n) for n in range(2)] == [range(3), range(3, 10)]
    assert config.of_phase(1).of_phase(0) == config.of_phase(0)  # a checkpoint of any phase stores all phases
    of_run = "amp amp_dtype apply_exif_orientation augment_on_device checkpoint_interval cuda_graphs data_dir dataset "
    of_run += "device experiment interpolation log_interval log_tensorboard log_wandb model model_ema model_kwargs "
    of_run += "num_classes output phases pretrained pretrained_path resume seed synthetic teacher teacher_checkpoint "
    of_run += "torchcompile train_split val_fraction val_split workers"
    assert sorted(FIELDS.keys() - PHASE_OPTIONS) == of_run.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--phases {seed: 1}", "phase 1 in the command line must not set 'seed'"),
        (
            "--phases {lr: 1} {smooth: 1}",
            "unknown option 'smooth' in phase 2 in the command line; did you mean 'smoothing'",
        ),
        ("--phases {lr: 1} {epochs: 0}", "option 'epochs' in phase 2 in the command line must be at least 1, got 0"),
        ("--phases {aa: x}", "phase 1: aa must be a timm policy.*got 'x'"),
        ("--phases 5", "phase 1 in the command line must be a mapping such as {epochs: 100, lr: 4e-4}, got 5"),
        ("--resume last.pt --lr 1", "--lr has no effect, because the phases in last.pt override it: set --phases"),
        ("-c FILE --lr 1", "--lr has no effect, because the phases in .*c.yaml override it: set --phases"),
    ],
)
def test_invalid_phases_are_rejected(tmp_path, words, message):
    (tmp_path / "c.yaml").write_text("epochs: 3\nseed: 7\nphases:\n- {img_size: 16}\n- {lr: 1}\n")
    words = [word.replace("FILE", str(tmp_path / "c.yaml")) for word in re.findall(r"{.*?}|\S+", words)]
    with pytest.raises(ConfigError, match=message):
        load_config("", words, lambda path, given: dict(phases=[dict(lr=1.0)]))
    rest = "--resume last.pt --epochs 5 --lr 2 --phases none --output a --experiment b"
    # a config file replaces the checkpoint's options
    for words, seed in ((["-c", str(tmp_path / "c.yaml")], 7), ([], 0)):
        again = load_config("", [*words, *rest.split()], lambda path, given: dict(phases=[dict(lr=1.0)]))
        assert (again.total_epochs, again.lr, again.output, again.experiment, again.seed) == (5, 2, "a", "b", seed)


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (dict(img_size=17), "phase 2: cannot create the model vil_tiny: .*17"),
        (dict(global_batch_size=6), "phase 2: .*mixup pairs images, got 3"),
        (dict(global_batch_size=100), "phase 2: global_batch_size must be at most 64, .*got 100"),
        (dict(bce_loss=True, bce_target_thresh=0.001), "phase 2: bce_target_thresh must be between .*got 0.001"),
        (dict(opt="bnbadam"), "phase 2: cannot create the optimizer bnbadam: "),
        (dict(train_interpolation="lanczos"), "phase 2: interpolation must be .*got 'lanczos'"),
    ],
)
def test_an_invalid_later_phase_is_rejected_at_the_start(tmp_path, phase, message):
    run = dict(phases=[{}, phase], augment_on_device=True, output=str(tmp_path), experiment="run")
    config = Config(**SMALL, synthetic=64, num_classes=4, **run)
    with pytest.raises(ConfigError, match=message):
        Trainer(config, CPU, 0, 2)
    assert not (tmp_path / "run").exists()


def test_phases_of_other_image_sizes_need_a_model_that_supports_resampling():
    kwargs = dict(depth=1, embed_dim=48, num_heads=2)
    config = Config(model="cait_xxs24_224", model_kwargs=kwargs, phases=[dict(img_size=32), dict(img_size=64)])
    with pytest.raises(ConfigError, match="phase 2: cait_xxs24_224 cannot change its image size: .*pos_embed"):
        check_phases(config, 1, 2048, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_phases_give_the_same_losses_with_and_without_cuda_graphs_and_free_memory(tmp_path, options):
    histories = []
    for cuda_graphs in (True, False):
        run = dict(cuda_graphs=cuda_graphs, amp=False, output=str(tmp_path / str(cuda_graphs)))
        train(Config(**OPTIONS | options | run), torch.device("cuda", 0), 0, 1)
        assert not trainers_left(tmp_path)
        saved = checkpoint.Checkpoint(tmp_path / str(cuda_graphs) / "run" / "last.pt").training_state()
        histories.append([row["train_loss"] for row in saved["history"]])
    assert histories[0] == pytest.approx(histories[1], rel=1e-3)
