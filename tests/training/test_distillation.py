"""Tests of distillation: rejected teachers, resumed runs, and teachers in CUDA graphs."""

import functools
import signal

import pytest
import timm
import torch
from fixtures import CLASSES
from processes import SMALL

from vil import checkpoint
from vil.checkpoint import CheckpointError
from vil.config import Config, ConfigError, load_config
from vil.security.checkpoint_options import options_of_checkpoint
from vil.training.interruption import PreemptedError
from vil.training.losses import Loss
from vil.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_pictures")

CPU = torch.device("cpu")


def weights_of(path, name="test_resnet", seed=0, **options):
    torch.manual_seed(seed)
    torch.save(timm.create_model(name, **dict(num_classes=len(CLASSES)) | options).state_dict(), path)
    return str(path)


def trainer(image_folder, output, device=CPU, **options):
    settings = dict(data_dir=str(image_folder), output=str(output), experiment="run", workers=0, epochs=1)
    return Trainer(Config(**SMALL | settings | options), device, 0, 1)


def own_run(folder, names, **config):
    """Write a checkpoint of this package, and return its path."""
    weights = timm.create_model("vil_tiny", num_classes=len(CLASSES), img_size=16, **SMALL["model_kwargs"]).state_dict()
    config = dict(model="vil_tiny", model_kwargs=SMALL["model_kwargs"], img_size=16, num_classes=len(CLASSES)) | config
    state = dict(config=config, history=[], progress={}, scheduler={}, optimizer={}, state_dict=weights)
    checkpoint.save_checkpoint(state | dict(label_names=names), folder / "own.pt")
    return str(folder / "own.pt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(teacher="resnet5000"),
            "teacher 'resnet5000' is not a model of .*; did you mean 'resnet",
        ),
        (dict(teacher="hf-hub:timm/resnet50"), "teacher 'hf-hub:timm/resnet50' is not a model of timm"),
        (dict(teacher="vil_tiny"), "no pretrained weights for teacher vil_tiny; set --teacher-checkpoint"),
        (dict(teacher="test_vit"), "teacher test_vit must have the run's 4 classes, got 1000"),
        (dict(teacher="test_vit", synthetic=64, num_classes=1000), "teacher test_vit .*offline"),
        (dict(teacher="test_vit", teacher_checkpoint="no.pth"), "^checkpoint no.pth does not exist$"),
        (dict(teacher="test_vit", teacher_checkpoint="OTHER"), "resnet.pth does not fit the model: .*Missing key"),
        (dict(teacher="test_resnet", teacher_checkpoint="MORE"), "more.pth does not fit .* has 9 classes, .* has 4:"),
        (
            dict(teacher="vil_tiny", teacher_checkpoint="OWN7"),
            "own.pt must have the run's 4 classes, got 7",
        ),
        (dict(teacher="vil_tiny", teacher_checkpoint="OWN"), "class 1 is 'wasp' in .*own.pt, but 'bee' in this run"),
        (
            dict(teacher="inception_v3", teacher_checkpoint="LARGE", phases=[dict(img_size=96), dict(img_size=16)]),
            r"does not support 16x16 images \(\w+: .*--img-size",
        ),
        (dict(distillation="firm"), "unknown distillation 'firm'; choose one of hard, soft"),
        (dict(teacher_checkpoint="x.pth"), "teacher_checkpoint x.pth needs a teacher; set --teacher MODEL"),
    ],
)
def test_an_unsuitable_teacher_is_rejected_before_training_starts(
    image_folder, tmp_path, monkeypatch, options, message
):
    def offline(*args, **kwargs):
        raise ConnectionError("it is\noffline")

    files = dict(
        OTHER=lambda: weights_of(tmp_path / "resnet.pth"),
        MORE=lambda: weights_of(tmp_path / "more.pth", num_classes=9),
        OWN7=lambda: own_run(tmp_path, None, num_classes=7),
        OWN=lambda: own_run(tmp_path, ["ant", "wasp", "cat", "dog"]),
        LARGE=lambda: weights_of(tmp_path / "large.pth", "inception_v3", aux_logits=False),
    )
    if (given := options.get("teacher_checkpoint")) in files:
        options = options | dict(teacher_checkpoint=files[given]())
    monkeypatch.setattr("vil.download.get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr("timm.models._builder.load_pretrained", offline)
    with pytest.raises((ConfigError, CheckpointError), match=message) as refused:
        trainer(image_folder, tmp_path, **options)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_timm_teacher_runs_in_eval_mode(image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vil.download.get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *args, **kwargs: None)
    taught = trainer(image_folder, tmp_path, teacher="test_resnet", synthetic=64, num_classes=1000)
    assert not any(part.training for part in taught.teacher.model.modules())
    with torch.autocast("cpu", torch.bfloat16):
        assert taught.teacher(torch.ones(1, 3, 16, 16)).dtype is torch.float32
    monkeypatch.setattr("vil.training.teacher._load", lambda *_: timm.create_model("test_resnet", num_classes=9))
    with pytest.raises(ConfigError, match=r"test_resnet must return logits of shape \(1, 4\), .*, got \(1, 9\)"):
        trainer(image_folder, tmp_path, teacher="test_resnet")


@pytest.mark.parametrize(
    ("threshold", "smoothing", "ok"),
    [(0.0, 0.0, True), (0.02, 0.1, False), (0.2, 0.1, True), (0.95, 0.1, False), (0.999, 0.0, True), (1.0, 0.0, False)],
)
def test_the_bce_threshold_must_be_between_the_smoothed_targets(threshold, smoothing, ok):
    config = Config(bce_loss=True, bce_target_thresh=threshold, smoothing=smoothing)
    if ok:
        Loss(config, 4)
        return
    targets = "0.025 and 0.925" if smoothing else "0 and 1"
    with pytest.raises(ConfigError, match=f"bce_target_thresh must be between {targets}, .* got {threshold:g}"):
        Loss(config, 4)


def test_a_resumed_distilled_run_is_bitwise_identical_and_needs_the_same_teacher(image_folder, tmp_path, monkeypatch):
    options = dict(teacher="test_resnet", teacher_checkpoint=weights_of(tmp_path / "a.pth"), epochs=2)
    trainer(image_folder, tmp_path / "whole", **options).run()
    first = trainer(image_folder, tmp_path, **options)
    update = first.update
    monkeypatch.setattr(first, "update", lambda: (signal.raise_signal(signal.SIGTERM), update())[1])
    with pytest.raises(PreemptedError):
        first.run()
    last = tmp_path / "run" / "last.pt"
    other = dict(teacher="test_resnet", teacher_checkpoint=weights_of(tmp_path / "b.pth", seed=1), epochs=2)
    for changed, message in ((other, "must have the same weights as in"), ({}, "teacher must be 'test_resnet'")):
        with pytest.raises(CheckpointError, match=message):
            trainer(image_folder, tmp_path, resume="auto", **changed)
    trainer(image_folder, tmp_path, resume="auto", **options).run()
    ended, whole = (
        checkpoint.Checkpoint(path).training_state() for path in (last, tmp_path / "whole" / "run" / "last.pt")
    )
    for part in ("state_dict", "state_dict_ema"):
        assert all(torch.equal(tensor, ended[part][name]) for name, tensor in whole[part].items())


def test_a_checkpoint_cannot_choose_the_teacher_without_the_command_line(image_folder, tmp_path):
    path = weights_of(tmp_path / "a.pth")
    trainer(image_folder, tmp_path, teacher="test_resnet", teacher_checkpoint=path).run()
    last = tmp_path / "run" / "last.pt"
    with pytest.raises(
        ConfigError, match="with the teacher 'test_resnet': to use this teacher, set --teacher test_resnet, and"
    ):
        load_config("", ["--resume", str(last), "--lr", "1"], checkpoint.options_to_resume)
    words = ["--resume", str(last), "--teacher", "test_resnet"]
    config = load_config("", words, checkpoint.options_to_resume)
    # the path in the checkpoint's teacher_checkpoint is not used
    assert (config.teacher, config.teacher_checkpoint) == ("test_resnet", None)
    with pytest.raises(ConfigError, match="has teacher '/etc/x', which is not a model of timm"):
        options_of_checkpoint(dict(teacher="/etc/x"), "x")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_teacher_in_the_cuda_graph_gives_the_losses_of_eager_mode(image_folder, tmp_path, name, kind):
    options = dict(teacher=name, teacher_checkpoint=weights_of(tmp_path / "a.pth", name), distillation=kind)
    losses, calls = [], []
    for cuda_graphs in (True, False):
        run = trainer(
            image_folder, tmp_path / str(cuda_graphs), torch.device("cuda", 0), epochs=2, cuda_graphs=cuda_graphs,
            amp=False, drop_path=0.0, **options,
        )  # fmt: skip
        assert run.forward_backward.is_graph is cuda_graphs
        run.teacher.model.register_forward_hook(functools.partial(lambda graphs, *_: calls.append(graphs), cuda_graphs))
        run.run()
        losses.append([row["train_loss"] for row in run.state.history])
    assert set(calls) == {False}  # replaying a CUDA graph runs no Python
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
