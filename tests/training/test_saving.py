"""Tests of checkpoints: writing, choice of the checkpoint to resume from, and options that may change."""

import contextlib
import errno
import itertools
import os
import re
import resource
import shlex
import signal
from argparse import Namespace

import pytest
import timm
import torch
from safetensors.torch import save_file

import vil  # noqa: F401  registers the models
from vil import checkpoint, state_dicts, weight_files
from vil.checkpoint import CheckpointError
from vil.config import ConfigError, load_config
from vil.factory import create_model
from vil.training.resumption import check_same_options, find_resumed

TINY = dict(embed_dim=16, depth=2, patch_size=8, img_size=16)


PARTS = dict(config={}, history=[], progress={}, scheduler={}, state_dict={}, optimizer={})


def save(path, epoch, **kwargs):
    checkpoint.save_checkpoint(PARTS | {"epoch": epoch}, path, **kwargs)


def epochs(*paths):
    return [checkpoint.Checkpoint(path).training_state()["epoch"] for path in paths]


def test_class_names_are_ordered_by_index_and_printable(tmp_path):
    numbers = {"n10": 1, "n9": 0, "a\x1b[31m\nb\u202e": 3, "é, ß": 2, "x" * 2000: 4, "\udcff": 5}
    names = checkpoint.labels_of(numbers)
    assert names == ["n9", "n10", "é, ß", "a?[31m?b?", "x" * 1000, "?"]
    checkpoint.save_checkpoint(PARTS | dict(config=dict(num_classes=6), label_names=names), tmp_path / "best.pt")
    assert checkpoint.Checkpoint(tmp_path / "best.pt").label_names == names


def test_the_last_checkpoint_is_kept_until_the_next_is_complete(tmp_path, monkeypatch):
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    for epoch in (1, 2, 3):
        save(last, epoch, previous=previous)
    assert epochs(last, previous) == [3, 2]

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"last.pt: Input/output error. The last complete last.pt is kept"):
        save(last, 4, previous=previous)
    with pytest.raises(CheckpointError, match="failed to write .*new.pt: Input/output error. To continue"):
        save(tmp_path / "new.pt", 4)
    assert epochs(last, previous) == [3, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt", "previous.pt"]


def test_a_power_loss_leaves_a_complete_checkpoint(tmp_path, monkeypatch):
    """A checkpoint is flushed to disk before the rename, and the rename is flushed before the next training step."""
    done, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor):
        done.append(("on disk", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noted_replace(source, target):
        done.append((os.path.basename(source), os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    last, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    save(last, 1)
    temporary = done[0][1]
    assert done == [("on disk", temporary), (temporary, "last.pt"), ("on disk", tmp_path.name)]
    done.clear()
    save(last, 2, previous=previous)
    temporary, kept = done[0][1], done[2][0]
    renamed = [(temporary, "last.pt"), (kept, "previous.pt")]
    assert done == [("on disk", temporary), *renamed, ("on disk", tmp_path.name)]


RENAMES = [(rename, links) for links in (True, False) for rename in (1, 2, 3)]


@pytest.mark.parametrize(("failing", "links"), RENAMES)
def test_a_failed_rename_leaves_a_complete_checkpoint_that_resuming_finds(failing, links, tmp_path, monkeypatch):
    """A complete checkpoint remains if a rename and all later renames fail, also without hard links."""
    last, previous, replace, calls = tmp_path / "last.pt", tmp_path / "previous.pt", os.replace, []

    def failing_replace(*names):
        calls.append(names)
        if len(calls) >= failing:
            raise OSError(errno.EIO, "Input/output error")
        replace(*names)

    def no_link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    for epoch in (1, 2):
        save(last, epoch, previous=previous)
    for epoch in (3, 4):  # the second call finds files that the first one left behind
        calls.clear()
        with monkeypatch.context() as broken:
            broken.setattr(os, "replace", failing_replace)
            if not links:
                broken.setattr(os, "link", no_link)
            with contextlib.suppress(CheckpointError):
                save(last, epoch, previous=previous)
        assert find_resumed("auto", tmp_path)[1]["epoch"] in (2, 3, 4)
        assert not list(tmp_path.glob(".*"))
    if links:
        assert len(epochs(last, previous)) == 2  # last.pt and previous.pt are complete


CAUSES = [
    (errno.ENOSPC, "make room"), (errno.EDQUOT, "make room"), (errno.EACCES, "permission"), (errno.EROFS, "read-write"),
    (errno.EIO, "check the disk"), (errno.ESTALE, "check the disk"), (errno.EFBIG, "ulimit -f"),
    (errno.EMFILE, "ulimit -n"), (errno.ENOENT, "move the folder back"),
]  # fmt: skip


@pytest.mark.parametrize(("number", "remedy"), CAUSES, ids=lambda value: str(value))
def test_a_checkpoint_that_cannot_be_written_is_reported_with_cause_and_remedy(number, remedy, tmp_path, monkeypatch):
    def failing_fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing_fsync)
    with pytest.raises(CheckpointError, match=remedy) as refused:
        save(tmp_path / "last.pt", 1)
    assert os.strerror(number) in str(refused.value)
    assert ("make room" in str(refused.value)) == (remedy == "make room")


def test_the_io_error_is_reported_instead_of_pytorchs_own_error(tmp_path):
    state = PARTS | {"state_dict": {"a": torch.zeros(10**5)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, hard))
    try:
        with pytest.raises(CheckpointError, match="last.pt: File too large.*ulimit -f"):
            checkpoint.save_checkpoint(state, tmp_path / "last.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


def test_a_folder_moved_during_a_run_is_reported_in_one_error(tmp_path):
    (folder := tmp_path / "run").mkdir()
    save(folder / "last.pt", 1)
    folder.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"failed to write .*run/last.pt: No such file.*move the folder back"):
        save(folder / "last.pt", 2, previous=folder / "previous.pt")


@pytest.mark.parametrize(("version", "whose"), [(2, "an older"), (99, "a newer")])
def test_a_checkpoint_of_another_version_is_rejected_and_not_skipped(version, whose, tmp_path):
    save(tmp_path / "previous.pt", 1)
    torch.save({"version": version, "config": {}}, tmp_path / "last.pt")
    message = rf"version must be 3 to resume, got {version} in .*last.pt: resume with {whose} version"
    with pytest.raises(CheckpointError, match=message):
        find_resumed("auto", tmp_path)


OF_OTHERS = [dict(model=dict(a=torch.ones(1)), args=Namespace(model="vim")), dict(version="3", config={}), [1]]
EXPORTED = dict(version=3, config={}, metadata={}, state_dict={})


@pytest.mark.parametrize("content", [*OF_OTHERS, dict(version=3), EXPORTED])
def test_files_of_other_programs_cannot_be_resumed(content, tmp_path):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="other.pt is not a checkpoint of vil train: resume from the last.pt of"):
        checkpoint.Checkpoint(tmp_path / "other.pt").training_state()
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    for name in ("other.pt", "weights.safetensors"):
        assert checkpoint.Checkpoint(tmp_path / name).options == {}


def test_ema_weights_are_loaded_if_present_unless_requested_otherwise(tmp_path):
    state = {"config": {}, "state_dict": {"a": torch.zeros(1)}}
    checkpoint.save_checkpoint(state, tmp_path / "one.pt")
    both = state | {"state_dict_ema": {"a": torch.ones(1)}}
    checkpoint.save_checkpoint(both, tmp_path / "both.pt")
    for name, best in (("model", "state_dict"), ("average", "state_dict_ema")):
        checkpoint.save_checkpoint(both | {"best": best}, tmp_path / f"{name}.pt")
        assert checkpoint.Checkpoint(tmp_path / f"{name}.pt").weights()["a"].item() == (name == "average")
    torch.save({"model": {"a": torch.zeros(1)}, "model_ema": {"a": torch.ones(1)}}, tmp_path / "other.pt")
    for name, use_ema in (("one", None), *itertools.product(("both", "other"), (None, False, True))):
        expected = name != "one" and use_ema is not False
        assert checkpoint.Checkpoint(tmp_path / f"{name}.pt").weights(use_ema)["a"].item() == expected
    with pytest.raises(CheckpointError, match="one.pt: the checkpoint has no EMA weights"):
        checkpoint.Checkpoint(tmp_path / "one.pt").weights(True)


def test_mismatched_weights_and_unreadable_files_have_different_messages(tmp_path):
    torch.save({"other": torch.ones(2)}, path := tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"other.pth does not fit the model: .*Missing key.*weight.*other"):
        state_dicts.load_weights(torch.nn.Linear(2, 2), checkpoint.Checkpoint(path).weights(), path)
    with pytest.raises(CheckpointError, match="^checkpoint .*missing.safetensors does not exist$"):
        checkpoint.Checkpoint(tmp_path / "missing.safetensors").weights()
    (tmp_path / "cut.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cut.safetensors cannot be read as a checkpoint"):
        checkpoint.Checkpoint(tmp_path / "cut.safetensors").weights()
    with pytest.raises(CheckpointError, match=r"^folder \S+ has no model.safetensors: set a checkpoint file"):
        checkpoint.Checkpoint(tmp_path).weights()


@pytest.mark.parametrize(
    ("present", "resume", "restarts", "found"),
    [
        ("", None, "0", None), ("", "auto", "0", None), ("", None, "1", None), ("", "other.pt", "1", "other.pt"),
        ("last previous", "auto", "0", "last.pt"), ("previous", "auto", "0", "previous.pt"),
        ("last", "other.pt", "0", "other.pt"),
        # A process that torchrun restarted resumes from its run folder if there is a checkpoint.
        ("last previous", None, "2", "last.pt"), ("last", "other.pt", "1", "last.pt"),
    ],
)  # fmt: skip
def test_a_run_resumes_from_the_right_checkpoint(present, resume, restarts, found, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for i, name in enumerate(present.split()):
        save(tmp_path / "run" / f"{name}.pt", i)
    save(tmp_path / "other.pt", 9)
    result = find_resumed(resume, tmp_path / "run")
    assert (result and result[0].name) == found
    if result:
        assert result[1]["epoch"] == checkpoint.Checkpoint(result[0]).training_state()["epoch"]
        assert result[1]["num_images"] == 0  # early checkpoints do not store the number of images


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    save(tmp_path / "previous.pt", 1)
    with pytest.raises(
        CheckpointError,
        match="already contains a run: resume with --resume auto, or start another",
    ):
        find_resumed(None, tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint nowhere.pt does not exist"):
        find_resumed("nowhere.pt", tmp_path)


def test_a_broken_checkpoint_is_renamed_and_the_previous_one_is_used(tmp_path, caplog):
    save(tmp_path / "previous.pt", 4)
    (tmp_path / "last.pt").write_bytes(b"cut off")
    path, saved = find_resumed("auto", tmp_path)
    assert (path.name, saved["epoch"]) == ("previous.pt", 4)
    assert (tmp_path / "last.broken").read_bytes() == b"cut off"
    assert not (tmp_path / "last.pt").exists()
    assert "last.pt cannot be read as a checkpoint" in caplog.text
    assert re.search("resuming from .*previous.pt.* renamed to .*last.broken", caplog.text)
    (tmp_path / "previous.pt").write_bytes(b"this too")
    for _ in range(2):  # a repeated call must raise the error again
        with pytest.raises(CheckpointError, match="no checkpoint in .* can be read; start another run"):
            find_resumed("auto", tmp_path)


@pytest.mark.parametrize("option", ["model", "model_kwargs", "img_size", "num_classes", "opt", "model_ema", "teacher"])
def test_options_that_determine_saved_tensors_must_not_change(option, tmp_path):
    for other, named in (({option: "b"}, "'b'"), ({}, "None")):
        with pytest.raises(CheckpointError, match=f"^{option} must be 'a', as in .*, got {named}: resume"):
            check_same_options({option: "a"}, other, tmp_path)


def test_changes_of_options_are_logged_unless_harmless(tmp_path, caplog):
    harmless = "resume output experiment workers device log_interval batch_size checkpoint_interval log_tensorboard"
    saved = dict.fromkeys(f"{harmless} log_wandb cuda_graphs augment_on_device".split(), 1)
    check_same_options(saved, dict.fromkeys(saved, 2), tmp_path)
    check_same_options({"lr": 0.1}, {"lr": 0.1, "new": 3}, tmp_path)
    check_same_options({"lr": 0.1}, {"lr": 0.2}, tmp_path, is_finished=True)
    assert caplog.text == ""
    others = {"lr": 0.2, "mixup": 0.8, "seed": 5}
    check_same_options({"lr": 0.1, "mixup": 0.8, "seed": 4}, others, tmp_path)
    assert caplog.messages == ["resuming with lr 0.2, was 0.1", "resuming with seed 5, was 4"]


def test_resuming_within_an_epoch_needs_the_same_global_batch_size(tmp_path):
    saved = dict(global_batch_size=16, lr=0.1)
    check_same_options(saved, dict(global_batch_size=32, lr=0.1), tmp_path)
    with pytest.raises(CheckpointError, match="global_batch_size must be 16 to resume within an epoch .*, got 32"):
        check_same_options(saved, dict(global_batch_size=32, lr=0.1), tmp_path, is_within_epoch=True)


@pytest.mark.parametrize("packed", [False, True], ids=["checkpoint", "safetensors"])
def test_a_model_that_does_not_match_the_weights_is_rejected_with_the_right_options(packed, tmp_path):
    path = tmp_path / "best.pt"
    kwargs = dict(embed_dim=32, depth=2, patch_size=[8, 8], drop_path_rate=0.1, drop_rate=0.1)
    source = timm.create_model("vil_tiny", num_classes=4, img_size=16, **kwargs)
    config = dict(model="vil_tiny", img_size=16, num_classes=4, model_kwargs=kwargs)
    checkpoint.save_checkpoint(dict(config=config, state_dict=source.state_dict()), path)
    if packed:
        path = tmp_path / "weights.safetensors"
        path.write_bytes(weight_files.pack_weights(source.state_dict(), config, {}))
    built = r"got a ViL with embed_dim 32 and depth 2: .*; the weights fit (--model vil_tiny --model-kwargs .*)$"
    with pytest.raises(ConfigError, match=built) as refused:
        create_model("vil_tiny", str(path), num_classes=4)
    shared = dict(embed_dim=32, depth=2, patch_size=8, img_size=16, num_heads=2)  # a ViT shares some tensor names
    for other, found, options in (("resnet10t", 0, {}), ("deit_tiny_patch16_224", 7, shared)):
        told = rf"{other} with .*: only {found} of the model's \d+ tensors are in .*; the weights fit --model"
        with pytest.raises(ConfigError, match=told):
            create_model(other, str(path), num_classes=5, **options)
    words = shlex.split(re.search(built, str(refused.value))[1])
    chosen = load_config("", ["--img-size", "16", *words])
    assert chosen.model_kwargs == dict(embed_dim=32, depth=2, patch_size=[8, 8])
    model = create_model(chosen.model, str(path), num_classes=4, img_size=16, **chosen.model_kwargs)
    assert torch.equal(model.head.weight, source.head.weight)


def test_a_mismatch_with_a_checkpoint_without_arguments_suggests_no_arguments(tmp_path):
    weights = timm.create_model("vil_tiny", num_classes=4, **TINY).state_dict()
    path, config = tmp_path / "best.pt", dict(model="vil_tiny", model_kwargs=dict(checkpoint_path="x"))
    for content, end in (
        (weights, r"\)"),
        (dict(version=3, config=config, state_dict=weights), r"\)"),
        (
            dict(version=3, config=dict(model="vil_tiny"), state_dict=weights),
            r"\); the weights fit --model vil_tiny",
        ),
    ):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=rf"keys: .* with other shapes \([^()]*{end}$"):
            create_model("vil_tiny", str(path), **TINY | dict(embed_dim=24))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vil_tinny", {}, "cannot create the model vil_tinny: Unknown model .*; did you mean 'vil_tiny'"),
        ("zzz", {}, "cannot create the model zzz: Unknown model .*; timm.list_models.. lists all models$"),
        ("vil_tiny", {"heads": 3}, "cannot create the model vil_tiny: .*heads"),
        ("vil_tiny", {"img_size": 100}, r"must cover the image, got img_size=\(100, 100\): set img_size=\(96, 96\)"),
    ],
)
def test_invalid_model_names_and_arguments_are_rejected(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        create_model(name, **arguments)
