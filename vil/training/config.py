"""The options of a training run: their names (timm's wherever it has one), defaults, and where values come from."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """An option that does not exist, has a value of the wrong type, or contradicts another."""


def _option(default: Any, help: str, bare: Any = None) -> Any:
    """A field of `Config`; `bare` is its value where the command line gives the flag alone."""
    return dataclasses.field(default=default, metadata={"help": help, "bare": bare})


@dataclass
class Config:
    """A training run. Defaults are ViM's recipe where its sizes share it (see configs/)."""

    # data
    data_dir: str | None = _option(None, "folder with the two splits, each a folder of class folders or a .tar of them")
    dataset: str = _option("", "timm dataset name such as 'hfds/NAME' or 'wds/NAME'; empty for folders and tar files")
    train_split: str = _option("train", "name of the training split")
    val_split: str = _option("validation", "name of the validation split")
    num_classes: int | None = _option(None, "classes; read from the dataset where it knows them")
    workers: int = _option(8, "loader processes per training process")
    synthetic: int = _option(
        0,
        "train on noise made on the device, this many images an epoch (ImageNet's number if none is given)",
        1_281_167,
    )
    # model
    model: str = _option("vil_tiny", "timm model")
    model_kwargs: dict | None = _option(None, "further arguments of the model, as KEY=VALUE")
    img_size: int | None = _option(None, "image size; the model's default if not given")
    pretrained_path: str | None = _option(
        None, "start from these weights; head and position embeddings are adapted to the model"
    )
    drop_path: float = _option(0.0, "stochastic depth rate of the last block")
    grad_checkpointing: bool = _option(False, "recompute activations in backward to save memory")
    torchcompile: bool = _option(
        False, "train through torch.compile and CUDA graphs, which take the host's work out of a step"
    )
    # optimisation
    epochs: int = _option(300, "epochs")
    global_batch_size: int = _option(1024, "images per optimizer step over all processes")
    batch_size: int | None = _option(
        None, "most images that a device holds at once; a larger share of the global batch is accumulated"
    )
    opt: str = _option("adamw", "timm optimizer")
    opt_betas: tuple[float, ...] | None = _option(None, "optimizer betas; the optimizer's default if not given")
    opt_eps: float | None = _option(None, "optimizer epsilon; the optimizer's default if not given")
    lr: float = _option(1e-3, "peak learning rate, for the global batch; nothing scales it")
    weight_decay: float = _option(0.1, "weight decay")
    layer_decay: float | None = _option(None, "learning-rate factor from each block to the one before it")
    clip_grad: float | None = _option(None, "largest norm of the gradient")
    sched: str = _option("cosine", "timm scheduler, stepped once an epoch")
    warmup_epochs: int = _option(5, "epochs of linear warm-up")
    warmup_lr: float = _option(1e-6, "learning rate of the first epoch")
    min_lr: float = _option(1e-5, "learning rate at the end")
    model_ema: bool = _option(True, "keep an exponential moving average of the weights")
    model_ema_decay: float = _option(0.99996, "its decay per step")
    amp: bool = _option(True, "mixed precision on GPUs; a CPU always trains in fp32")
    amp_dtype: str = _option("bfloat16", "'bfloat16', or 'float16' with a loss scaler")
    # augmentation
    scale: tuple[float, ...] = _option((0.08, 1.0), "area of the random crop, as a share of the image")
    ratio: tuple[float, ...] = _option((3 / 4, 4 / 3), "aspect ratio of the random crop")
    hflip: float = _option(0.5, "probability of a horizontal flip")
    color_jitter: float | None = _option(0.3, "colour jitter; has no effect where aa is on")
    aa: str | None = _option("rand-m9-mstd0.5-inc1", "AutoAugment or RandAugment policy")
    aug_repeats: int = _option(3, "augmented copies of an image in a global batch; 0 for none")
    train_interpolation: str = _option("bicubic", "interpolation of the training crops")
    augment_on_device: bool = _option(
        False, "decode and augment training images on the training device (nvJPEG on a GPU), not in the loader"
    )
    reprob: float = _option(0.25, "probability of random erasing")
    remode: str = _option("pixel", "what it fills in: 'const', 'rand' or 'pixel'")
    mixup: float = _option(0.8, "mixup alpha")
    cutmix: float = _option(1.0, "cutmix alpha")
    mixup_prob: float = _option(1.0, "probability of mixing")
    mixup_switch_prob: float = _option(0.5, "probability of cutmix where both are on")
    smoothing: float = _option(0.1, "label smoothing")
    # evaluation
    crop_pct: float | None = _option(None, "share of the image that evaluation sees; the model's default if not given")
    interpolation: str | None = _option(None, "interpolation in evaluation; the model's default if not given")
    # run
    seed: int = _option(0, "everything random in a run follows from it")
    device: str | None = _option(None, "'cuda', 'cpu', ...; a GPU if there is one")
    output: str = _option("output", "folder of runs")
    experiment: str | None = _option(None, "folder of this run inside it; the config file's name if not given")
    resume: str | None = _option(None, "'auto' to go on from the run's last checkpoint if it has one, or a checkpoint")
    checkpoint_interval: str | None = _option(
        "30m", "minutes ('30m') or optimizer steps ('500') between checkpoints; each epoch's end is one too"
    )
    log_interval: int = _option(50, "optimizer steps between looks at the loss")
    log_tensorboard: bool = _option(False, "write each epoch's numbers for TensorBoard, too")
    log_wandb: bool = _option(False, "send each epoch's numbers to Weights & Biases, too")

    def __post_init__(self):
        self.model_kwargs = self.model_kwargs or {}
        interval = self.checkpoint_interval
        if interval is not None and not re.fullmatch(r"0*[1-9]\d*m?", interval):
            raise ConfigError(
                f"checkpoint_interval {interval!r} is neither minutes ('30m') nor optimizer steps ('500')"
            )
        if self.amp_dtype not in ("bfloat16", "float16"):
            raise ConfigError(f"amp_dtype {self.amp_dtype!r} is neither 'bfloat16' nor 'float16'")

    @property
    def mixing(self) -> bool:
        return self.mixup_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_TYPES = typing.get_type_hints(Config)


def load_config(description: str, arguments: Sequence[str] | None = None) -> Config:
    """Reads `-c FILE` and then the options of a command line, which win.

    Raises:
        ConfigError: An option or value is wrong; the message names the option, and the nearest that exists.
    """
    # one option for each field; the values are checked like those of the file, by `_checked`
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("-c", "--config", metavar="FILE", help="YAML file of options")
    for name, field in FIELDS.items():
        flag, kind = "--" + name.replace("_", "-"), _kind(name)[0]
        help = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        else:
            bare = field.metadata["bare"]
            nargs = "+" if kind in (tuple, dict) else "?" if bare else None
            parser.add_argument(flag, nargs=nargs, const=bare, metavar="VALUE", help=help)
    options, unknown = parser.parse_known_args(arguments)
    for word in unknown:
        raise ConfigError(_unknown_option(word.split("=")[0].lstrip("-").replace("-", "_"), "on the command line"))
    values = vars(options)
    path = values.pop("config")
    from_file = _checked(_read_yaml(path), path) if path else {}
    given = _checked({name: value for name, value in values.items() if value is not None}, "the command line")
    config = Config(**{**from_file, **given})
    config.experiment = config.experiment or (Path(path).stem if path else config.model)
    return config


def parse_key_values(words: Sequence[str]) -> dict[str, Any]:
    """Words KEY=VALUE, the values read as YAML.

    Raises:
        ConfigError: A word has no "=".
    """
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word!r} is not of the form KEY=VALUE")
    return {key: yaml.safe_load(value) for key, value in (word.split("=", 1) for word in words)}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a list of 'option: value' lines")
    return values


def _checked(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The values of known options, converted to their types."""
    for name in values:
        if name not in FIELDS:
            raise ConfigError(_unknown_option(name, f"in {source}"))
    return {name: _convert(name, value, source) for name, value in values.items()}


def _unknown_option(name: str, where: str) -> str:
    nearest = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.5)
    return f"unknown option {name!r} {where}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


def _kind(name: str) -> tuple[type, bool]:
    """The type of an option, and whether it may be None."""
    hint = _TYPES[name]
    optional = isinstance(hint, types.UnionType)
    hint = hint.__args__[0] if optional else hint
    return typing.get_origin(hint) or hint, optional


def _convert(name: str, value: Any, source: str) -> Any:
    kind, optional = _kind(name)
    if optional and (value is None or value in ("none", "null")):
        return None
    if kind is dict and isinstance(value, list):  # the command line's KEY=VALUE words
        return parse_key_values(value)
    try:
        if kind is tuple and isinstance(value, (list, tuple)):
            return tuple(float(v) for v in value)
        if kind is float and not isinstance(value, bool):
            return float(value)  # also '1e-3', which YAML reads as text
        if kind is int and not isinstance(value, bool) and int(value) == float(value):
            return int(value)
        if kind is str and type(value) is int:
            return str(value)
        if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):  # true is an int to Python
            return value
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"option {name!r} in {source} must be {kind.__name__}, not {value!r}")
