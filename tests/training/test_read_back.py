"""Tests that a run accepts only options that can be read back from the run's checkpoints."""

import dataclasses

import pytest
import timm
import torch
from processes import SMALL

import vil
from vil import checkpoint
from vil.config import FIELDS, Config, ConfigError, load_config
from vil.data.sources.synthetic import SyntheticImages
from vil.security.checkpoint_options import NOT_FROM_CHECKPOINTS
from vil.training.trainer import Trainer

CPU = torch.device("cpu")
# Non-default values of all options that a checkpoint restores, except `data_dir` and `dataset`, which are set below.
OPTIONS = dict(
    train_split="sub/first", val_split="my other", val_fraction=0.3, apply_exif_orientation=True, num_classes=5,
    workers=0, synthetic=64,
    model="vim_tiny", model_kwargs=dict(
        embed_dim=16, depth=1, patch_size=[8, 4], stride=[4, 4], in_chans=3, dynamic_img_size=True, drop_rate=0.1,
        global_pool="avg",
    ), img_size=24, drop_path=0.1, grad_checkpointing=True, cuda_graphs=False, torchcompile=True,
    epochs=7, global_batch_size=8, batch_size=4, opt="nadamw", opt_betas=(0.8, 0.9), opt_eps=1e-7, lr=0.5,
    weight_decay=0.2, layer_decay=0.7, clip_grad=3.0, sched="poly", warmup_epochs=2, warmup_lr=1e-5, min_lr=1e-4,
    model_ema=False, model_ema_decay=0.9, amp=False, amp_dtype="float16",
    scale=(0.5, 0.9), ratio=(0.9, 1.1), hflip=0.4, color_jitter=None, aa="3a", aug_repeats=2,
    train_interpolation="random", augment_on_device=False, reprob=0.1, remode="const", mixup=0.2, cutmix=0.3,
    mixup_prob=0.9, mixup_switch_prob=0.4, smoothing=0.2, bce_loss=True, bce_target_thresh=0.25, bce_sum=True,
    teacher="test_resnet", distillation="soft", distillation_alpha=0.3, distillation_tau=2.0, crop_pct=0.8,
    phases=[dict(scale=(0.5, 0.9), lr=0.5), dict(scale=(0.6, 0.9), lr=0.25)], interpolation="nearest", seed=3,
    checkpoint_interval="500", log_interval=5,
)  # fmt: skip


def written(folder, **options):
    """Write a run's checkpoint after one step, and return its path."""
    trainer = Trainer(Config(**dict(output=str(folder), experiment="run") | options), CPU, 0, 1)
    trainer.state.meter.add(torch.tensor(1.0), torch.tensor(1.0))
    trainer.checkpointer.save()
    return trainer.run_info.folder / "last.pt"


def read_back(path, *words):
    """Return the config that --resume restores from a checkpoint, after reading it as training state and as a model."""
    checkpoint.Checkpoint(path).training_state()
    vil.from_checkpoint(path)
    return load_config("", ["--resume", str(path), *words], checkpoint.options_to_resume)


def test_every_option_is_restored_from_a_checkpoint(tmp_path):
    torch.save(timm.create_model("test_resnet", num_classes=5).state_dict(), tmp_path / "teacher.pth")
    options = OPTIONS | dict(data_dir=str(tmp_path))
    differ = options.keys() ^ FIELDS.keys() - NOT_FROM_CHECKPOINTS - {"dataset"}
    assert not differ, (
        f"set {differ} to non-default values in OPTIONS, or add options that select a path, device or logger to "
        "NOT_FROM_CHECKPOINTS"
    )
    path = written(tmp_path, teacher_checkpoint=str(tmp_path / "teacher.pth"), **options)
    found, default = (dataclasses.asdict(c) for c in (read_back(path, "--teacher", "test_resnet"), Config()))
    for name, value in options.items():
        assert found[name] == value != default[name]


@pytest.mark.parametrize(
    ("dataset", "data_dir", "split"),
    [
        ("wds/x", "https://host/shards", "x-train-{0000..0001}.tar|36"),
        ("WDS/x", "shards", "part 1/{00000..41455}.tar|400000000"),
        ("wds/x", "shards", "train"),
        ("hfds/someone/pictures", "/cache", "train[:10%]+validation[5:10]"),
        ("hfids/someone/pictures", None, "train"),
        ("tfds/imagenet_v2/topimages:3.*.*", None, "test[:100]"),
    ],
)
def test_datasets_and_splits_are_restored_if_the_command_line_confirms_them(
    tmp_path, monkeypatch, dataset, data_dir, split
):
    monkeypatch.setattr("vil.training.data.open_splits", lambda config: (SyntheticImages(64), SyntheticImages(8), 4))
    options = SMALL | dict(dataset=dataset, data_dir=data_dir, train_split=split, val_split=split, workers=0)
    path = written(tmp_path, synthetic=64, **options)
    # the folder does not exist, so the path is stored as given
    assert torch.load(path)["config"]["data_dir"] == data_dir
    found = read_back(path, "--dataset", dataset, *(["--data-dir", data_dir] if data_dir else []))
    assert {name: getattr(found, name) for name in options} == options


def test_arguments_of_timms_vision_transformers_are_restored(tmp_path):
    kwargs = dict(embed_dim=24, depth=1, patch_size=8, num_heads=3, mlp_ratio=1.5, qkv_bias=False, global_pool="avg")
    options = dict(model="deit_tiny_patch16_224", model_kwargs=kwargs, img_size=16, global_batch_size=8)
    path = written(tmp_path, synthetic=64, num_classes=4, workers=0, **options)
    assert read_back(path).model_kwargs == kwargs
    assert vil.from_checkpoint(path).blocks[0].attn.num_heads == 3


UNREADABLE = "^checkpoints with these options could not be loaded again: .*"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(model="deit_tiny_patch16_224", model_kwargs=dict(class_token=False, global_pool="avg")),
         "^unknown model argument 'class_token'; training supports embed_dim, depth, "),
        (dict(model_kwargs=dict(dpth=3)), "^unknown model argument 'dpth'; did you mean 'depth'"),
        (dict(train_split="../train"), rf"{UNREADABLE}train_split in .* must be a relative path .*got '\.\./train'"),
        (dict(val_split="train[:10%]"), rf"{UNREADABLE}val_split in .* must be a relative path .*got 'train\[:10%\]'"),
        (dict(dataset="https://x/y"), f"{UNREADABLE}has dataset .https://x/y., but dataset must be empty or one of"),
    ],
)  # fmt: skip
def test_a_run_whose_checkpoints_could_not_be_read_does_not_start(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, **dict(synthetic=64, img_size=16, num_classes=4, workers=0, global_batch_size=8) | options)
    assert not (tmp_path / "run").exists()
