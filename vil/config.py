"""The options of a training run: their names (timm's wherever it has one), defaults, and where values come from."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import yaml
from timm.data import create_transform
from timm.optim import list_optimizers


class ConfigError(ValueError):
    """An option that does not exist, has a value of the wrong type, or contradicts another."""


def _option(
    default: Any, help: str, bare: Any = None, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> Any:
    """A field of `Config`; `bare` is its value where the command line gives the flag alone.

    A number, and each of a tuple's, is at least `low`, at most `high` and more than `above`.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "bare": bare, "low": low, "high": high, "above": above}
    )


@dataclass
class Config:
    """A training run. Defaults are ViM's recipe where its sizes share it (see configs/)."""

    # data
    data_dir: str | None = _option(None, "folder with the two splits, each a folder of class folders or a .tar of them")
    dataset: str = _option("", "timm dataset name such as 'hfds/NAME' or 'wds/NAME'; empty for folders and tar files")
    train_split: str = _option("train", "name of the training split")
    val_split: str = _option("validation", "name of the validation split")
    num_classes: int | None = _option(None, "classes; read from the dataset where it knows them", low=1)
    workers: int | None = _option(
        None, "loader processes per training process; by the cores it may use if not given", low=0, high=1024
    )
    synthetic: int = _option(
        0,
        "train on noise made on the device, this many images an epoch (ImageNet's number if none is given)",
        1_281_167,
        low=0,
    )
    # model
    model: str = _option("vil_tiny", "timm model")
    model_kwargs: dict | None = _option(None, "further arguments of the model, as KEY=VALUE")
    img_size: int | None = _option(None, "image size; the model's default if not given", low=1)
    pretrained_path: str | None = _option(
        None, "start from these weights; head and position embeddings are adapted to the model"
    )
    drop_path: float = _option(0.0, "stochastic depth rate of the last block", low=0, high=0.99)
    grad_checkpointing: bool = _option(False, "recompute activations in backward to save memory")
    cuda_graphs: bool = _option(
        True,
        "on a GPU, replay forward, backward and evaluation as CUDA graphs, which takes the host's work out of them",
    )
    torchcompile: bool = _option(False, "train through torch.compile, by which DeiT and its like gain, ViL hardly")
    # optimisation
    epochs: int = _option(300, "epochs", low=1)
    global_batch_size: int = _option(1024, "images per optimizer step over all processes", low=1)
    batch_size: int | None = _option(
        None, "most images that a device holds at once; a larger share of the global batch is accumulated", low=1
    )
    opt: str = _option("adamw", "timm optimizer")
    opt_betas: tuple[float, ...] | None = _option(
        None, "optimizer betas; the optimizer's default if not given", low=0, high=1
    )
    opt_eps: float | None = _option(None, "optimizer epsilon; the optimizer's default if not given", above=0)
    lr: float = _option(1e-3, "peak learning rate, for the global batch; nothing scales it", low=0)
    weight_decay: float = _option(0.1, "weight decay", low=0)
    layer_decay: float | None = _option(None, "learning-rate factor from each block to the one before it", above=0)
    clip_grad: float | None = _option(None, "largest norm of the gradient", above=0)
    sched: str = _option("cosine", "timm scheduler, stepped once an epoch")
    warmup_epochs: int = _option(5, "epochs of linear warm-up", low=0)
    warmup_lr: float = _option(1e-6, "learning rate of the first epoch", low=0)
    min_lr: float = _option(1e-5, "learning rate at the end", low=0)
    model_ema: bool = _option(True, "keep an exponential moving average of the weights")
    model_ema_decay: float = _option(0.99996, "its decay per step", low=0, high=1)
    amp: bool = _option(True, "mixed precision on GPUs; a CPU always trains in fp32")
    amp_dtype: str = _option("bfloat16", "'bfloat16', or 'float16' with a loss scaler")
    # augmentation
    scale: tuple[float, ...] = _option((0.08, 1.0), "area of the random crop, as a share of the image", above=0)
    ratio: tuple[float, ...] = _option((3 / 4, 4 / 3), "aspect ratio of the random crop", above=0)
    hflip: float = _option(0.5, "probability of a horizontal flip", low=0, high=1)
    color_jitter: float | None = _option(0.3, "colour jitter; has no effect where aa is on", low=0)
    aa: str | None = _option("rand-m9-mstd0.5-inc1", "AutoAugment or RandAugment policy")
    aug_repeats: int = _option(3, "augmented copies of an image in a global batch; 0 for none", low=0)
    train_interpolation: str = _option("bicubic", "interpolation of the training crops")
    augment_on_device: bool | None = _option(
        None, "decode and augment images on the training device, not in the loader; on GPUs with nvJPEG if not given"
    )
    reprob: float = _option(0.25, "probability of random erasing", low=0, high=1)
    remode: str = _option("pixel", "what it fills in: 'const', 'rand' or 'pixel'")
    mixup: float = _option(0.8, "mixup alpha", low=0)
    cutmix: float = _option(1.0, "cutmix alpha", low=0)
    mixup_prob: float = _option(1.0, "probability of mixing", low=0, high=1)
    mixup_switch_prob: float = _option(0.5, "probability of cutmix where both are on", low=0, high=1)
    smoothing: float = _option(0.1, "label smoothing", low=0, high=1)
    # evaluation
    crop_pct: float | None = _option(
        None, "share of the image that evaluation sees; the model's default if not given", above=0
    )
    interpolation: str | None = _option(None, "interpolation in evaluation; the model's default if not given")
    # run
    seed: int = _option(0, "everything random in a run follows from it", low=0)
    device: str | None = _option(None, "'cuda', 'cpu', ...; a GPU if there is one")
    output: str = _option("output", "folder of runs")
    experiment: str | None = _option(None, "folder of this run inside it; the config file's name if not given")
    resume: str | None = _option(None, "'auto' to go on from the run's last checkpoint if it has one, or a checkpoint")
    checkpoint_interval: str | None = _option(
        "30m", "minutes ('30m') or optimizer steps ('500') between checkpoints; each epoch's end is one too"
    )
    log_interval: int = _option(50, "optimizer steps between looks at the loss", low=1)
    log_tensorboard: bool = _option(False, "write each epoch's numbers for TensorBoard, too")
    log_wandb: bool = _option(False, "send each epoch's numbers to Weights & Biases, too")

    def __post_init__(self):
        self.model_kwargs = self.model_kwargs or {}
        for name, option in (("drop_path_rate", "drop_path"), ("num_classes", "num_classes"), ("img_size", "img_size")):
            if name in self.model_kwargs:
                raise ConfigError(f"model_kwargs has {name}, an option of its own: give --{option.replace('_', '-')}")
        if (channels := self.model_kwargs.get("in_chans", 3)) != 3:
            raise ConfigError(f"model_kwargs has in_chans {_shown(channels)}, but images here have three channels")
        interval = self.checkpoint_interval
        if interval is not None and not re.fullmatch(r"0*[1-9]\d*m?", interval):
            raise ConfigError(
                f"checkpoint_interval {interval!r} is neither minutes ('30m') nor optimizer steps ('500')"
            )
        if self.amp_dtype not in ("bfloat16", "float16"):
            raise ConfigError(f"amp_dtype {self.amp_dtype!r} is neither 'bfloat16' nor 'float16'")
        for name, choices in _choices().items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                known = textwrap.shorten(", ".join(choices), 200, placeholder=" ...")
                raise ConfigError(f"{name} {value!r} is unknown{_nearest(value, choices) or '; there are ' + known}")
        try:
            create_transform(16, is_training=True, auto_augment=self.aa)
        except Exception as error:  # timm's parsers of policies have no common type
            known = "like rand-m9-mstd0.5-inc1 or 3a"
            raise ConfigError(f"aa {self.aa!r} is no policy that timm knows, {known}: {error}") from error
        for name in ("scale", "ratio"):
            limits = getattr(self, name)
            if len(limits) != 2 or limits[0] > limits[1]:
                raise ConfigError(f"{name} {limits} must be two numbers, the smaller one first")

    @property
    def mixing(self) -> bool:
        return self.mixup_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


@functools.cache
def _choices() -> dict[str, list[str]]:
    """What options by name can be."""
    interpolations = ["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
    return {
        "opt": [str(name) for name in list_optimizers()],
        "sched": ["cosine", "tanh", "step", "multistep", "poly"],  # those that need no metric
        "train_interpolation": [*interpolations, "random"],
        "interpolation": interpolations,
        "remode": ["const", "rand", "pixel"],
    }


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
_TYPES = typing.get_type_hints(Config)
# what a checkpoint, which may come from anybody, does not decide: where files are read and written, and by what
NOT_FROM_CHECKPOINTS = {"output", "experiment", "resume", "pretrained_path", "device", "log_tensorboard", "log_wandb"}
# the arguments of models that it may name, and how large they may be, or which words
MODEL_KWARGS: dict[str, int | tuple[str, ...]] = {
    "embed_dim": 8192, "depth": 512, "patch_size": 512, "stride": 512, "in_chans": 1024, "dynamic_img_size": 1,
    "drop_rate": 1, "drop_path_rate": 1, "img_size": 8192, "global_pool": ("", "token", "avg"),
    "num_heads": 512, "mlp_ratio": 64, "qkv_bias": 1,  # of DeiT and its like
}  # fmt: skip
PLAIN_NAMES = "letters, digits, spaces and . _ + - in names, which / joins"
DATASETS = ("wds", "hfds", "hfids", "tfds")  # timm's readers other than that of folders and tar files

# what other programs call them
SYNONYMS = {
    "aa": "auto_augment autoaugment",
    "amp": "mixed_precision use_amp bf16 fp16",
    "batch_size": "accum_iter accumulation_steps grad_accum_steps gradient_accumulation_steps micro_batch_size "
    "per_device_train_batch_size",
    "checkpoint_interval": "save_freq save_interval save_steps",
    "clip_grad": "clip clip_grad_norm grad_clip gradient_clip_val max_grad_norm max_norm",
    "data_dir": "data data_path data_root dataset_dir dataset_path root train_dir",
    "device": "accelerator gpu gpus",
    "drop_path": "drop_path_rate stochastic_depth",
    "epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "experiment": "exp_name name run_name",
    "global_batch_size": "bs effective_batch_size total_batch_size train_batch_size",
    "grad_checkpointing": "checkpointing gradient_checkpointing use_checkpoint",
    "img_size": "crop_size image_size input_size resolution size",
    "layer_decay": "layer_wise_lr_decay llrd",
    "log_tensorboard": "tensorboard",
    "log_wandb": "use_wandb wandb",
    "lr": "base_lr blr initial_lr learning_rate max_lr",
    "min_lr": "eta_min final_lr lr_min",
    "model": "arch architecture backbone model_name",
    "model_ema": "ema use_ema",
    "model_ema_decay": "ema_decay",
    "num_classes": "classes n_classes nb_classes",
    "opt": "optim optimizer",
    "opt_betas": "adam_betas betas",
    "opt_eps": "adam_epsilon eps",
    "output": "out out_dir output_dir save_dir work_dir",
    "pretrained_path": "checkpoint finetune init_checkpoint initial_checkpoint load_from pretrained weights",
    "remode": "erasing_mode",
    "reprob": "random_erase random_erasing",
    "sched": "lr_sched lr_scheduler lr_scheduler_type scheduler",
    "seed": "random_seed",
    "smoothing": "label_smoothing",
    "torchcompile": "compile torch_compile",
    "warmup_epochs": "warmup",
    "weight_decay": "l2 wd",
    "workers": "dataloader_num_workers j num_workers",
}


class Parser(argparse.ArgumentParser):
    """argparse's, but what is wrong is a ConfigError of a line, and an unknown option is answered with the nearest."""

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            if not word.startswith("-"):
                raise ConfigError(f"{_shown(word)} on the command line belongs to no option")
            name = word.split("=")[0].lstrip("-").replace("-", "_")
            raise ConfigError(_unknown_option(name, "on the command line", vars(options)))
        return options

    def error(self, message):
        raise ConfigError(message)


def load_config(
    description: str,
    arguments: Sequence[str] | None = None,
    saved_options: Callable[[str], dict[str, Any]] | None = None,
) -> Config:
    """Reads `-c FILE` and then the options of a command line, which win.

    Args:
        description: What `--help` says first.
        arguments: The command line; the program's own if not given.
        saved_options: Reads those of a checkpoint, which hold where `--resume FILE` is given and no `-c`.

    Raises:
        ConfigError: An option or value is wrong; the message names the option, and the nearest that exists.
    """
    # one option for each field; the values are checked like those of the file, by `_checked`
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=description, formatter_class=formatter, allow_abbrev=False)
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
    values = vars(parser.parse_args(arguments))
    path = values.pop("config")
    from_file = _checked(_read_yaml(path), path) if path else {}
    given = _checked({name: value for name, value in values.items() if value is not None}, "the command line")
    resumed = given.get("resume")
    if saved_options and not path and resumed not in (None, "auto"):
        folder = Path(resumed).resolve().parent  # it goes on where it is
        from_file = {"output": str(folder.parent), "experiment": folder.name, **saved_options(resumed)}
        confirm_dataset(from_file, given, resumed)
    config = Config(**{**from_file, **given})
    config.experiment = config.experiment or (Path(path).stem if path else config.model)
    return config


def options_of_checkpoint(values: Any, path: str | Path) -> dict[str, Any]:
    """What the options saved in a checkpoint may decide for whoever loads it, which is nothing but names and numbers.

    Raises:
        ConfigError: One is not of its type, out of range, or a model, argument, path or split that it may not name.
    """
    where = f"the checkpoint {path}"
    if not isinstance(values, dict):
        raise ConfigError(f"{where} holds {type(values).__name__} in place of options")
    known = {name: value for name, value in values.items() if name in FIELDS and name not in NOT_FROM_CHECKPOINTS}
    options = {name: _convert(name, value, where) for name, value in known.items()}
    if "model" in options and not (re.fullmatch(r"[\w.]+", options["model"]) and timm.is_model(options["model"])):
        raise ConfigError(
            f"{where} is of a model {_shown(options['model'])}, which is none of timm's or this package's"
        )
    for name, value in (options.get("model_kwargs") or {}).items():
        if (allowed := MODEL_KWARGS.get(name)) is None:
            raise ConfigError(
                f"{where} has an argument {_shown(name)} of its model, which a checkpoint may not give; it may give "
                + ", ".join(MODEL_KWARGS)
            )
        if isinstance(allowed, tuple):
            if value not in allowed:
                raise ConfigError(f"{where} has {name} {_shown(value)}, and may have {', '.join(map(repr, allowed))}")
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if len(numbers) > 2 or not all(isinstance(v, (int, float)) and 0 <= v <= allowed for v in numbers):
            raise ConfigError(f"{where} has {name} {_shown(value)}, and may have at most {allowed}")
    for name, choices in _choices().items():
        if options.get(name) is not None and options[name] not in choices:
            raise ConfigError(f"{where} has {name} {_shown(options[name])}, which is unknown")
    for name, most in (("num_classes", 10**6), ("img_size", 8192)):
        if (options.get(name) or 0) > most:
            raise ConfigError(f"{where} has {name} {options[name]}, and may have at most {most}")
    dataset = options.get("dataset", "")
    if not re.fullmatch(rf"|({'|'.join(DATASETS)})/[\w./-]+(:[\w.*-]+)?", dataset, re.IGNORECASE):
        raise ConfigError(f"{where} has dataset {_shown(dataset)}, which is no plain name of one")
    for name in ("train_split", "val_split"):
        if not _is_plain_split(options.get(name, "x"), dataset):
            raise ConfigError(f"{where} has {name} {_shown(options[name])}, which is no plain name: {PLAIN_NAMES}")
    if dataset:  # it may lie at an address, and packages write to their folder: whoever has it read says where
        options.pop("data_dir", None)
    if re.search(r"^pipe:|://|[\0-\x1f]", options.get("data_dir") or ""):
        raise ConfigError(f"{where} has data_dir {_shown(options['data_dir'])}, which is no path of a folder")
    return options


def _is_plain_split(split: str, dataset: str) -> bool:
    """Whether it is names inside a folder, joined by /, or of a dataset what its kind has beside names."""
    if len(split) > 200:
        return False
    if dataset.lower().startswith("wds/"):  # some numbered shards and how many images: x-{0000..0099}.tar|50000
        split = re.sub(r"\{0*\d{1,5}\.\.0*\d{1,5}\}", "0", re.sub(r"\|\d{1,12}$", "", split), count=1)
    elif dataset:  # a part of a split: train[:10%]
        split = re.sub(r"\[[\d:%]*\]", "", split)
    return all(re.fullmatch(r"[\w .+-]+", n) and n.strip(".") for n in split.split("/"))


def confirm_dataset(saved: dict[str, Any], given: dict[str, Any], path: str | Path) -> None:
    """Raises a ConfigError if a checkpoint alone says that data are to be read from elsewhere than a folder."""
    dataset = saved.get("dataset")
    if not dataset or given.get("dataset") or (dataset.startswith("wds/") and given.get("data_dir")):
        return
    confirmation = "--data-dir" if dataset.startswith("wds/") else f"--dataset {dataset}, and its --data-dir if any"
    raise ConfigError(f"the checkpoint {path} is of the dataset {dataset!r}: to have it read, give {confirmation}")


def parse_key_values(words: Sequence[str]) -> dict[str, Any]:
    """Words KEY=VALUE, the values read as YAML.

    Raises:
        ConfigError: A word has no "=", or its value is not YAML.
    """
    for word in words:
        if "=" not in word:
            raise ConfigError(f"{word!r} is not of the form KEY=VALUE")
    return {key: _parse_yaml(value, f"the value of {key}") for key, value in (word.split("=", 1) for word in words)}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from error
    values = _parse_yaml(text, path)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a list of 'option: value' lines")
    return values


def _parse_yaml(text: str, source: str) -> Any:
    """YAML without aliases, by which a short text can stand for one without end."""
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ConfigError(f"{source} has an alias (*), which options have no use for: write out what it stands for")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a date such as 2024-13-32
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from error


def _checked(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The values of known options, converted to their types."""
    for name in values:
        if name not in FIELDS:
            raise ConfigError(_unknown_option(name, f"in {source}", FIELDS))
    return {name: _convert(name, value, source) for name, value in values.items()}


def _shown(value: Any) -> str:
    """A value in a message of one line."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 200 else line[:197] + "..."


def _unknown_option(name: Any, where: str, options: Iterable[str]) -> str:
    unknown, words = f"unknown option {_shown(name)} {where}", re.sub(r"^no_(?=.)", "", str(name).lower())
    for ours, synonyms in SYNONYMS.items():
        if ours in options and words in synonyms.split():
            return f"{unknown}; here it is {ours!r}: {FIELDS[ours].metadata['help']}"
    return unknown + _nearest(str(name), options)


def _nearest(name: str, names: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


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
    converted: Any = None
    try:
        if kind is tuple and isinstance(value, (list, tuple)):
            converted = tuple(float(v) for v in value)
        elif kind is float and not isinstance(value, bool):
            converted = float(value)  # also '1e-3', which YAML reads as text
        elif kind is int and not isinstance(value, bool) and int(value) == float(value):
            converted = int(value)
        elif kind is str and type(value) is int:
            converted = str(value)
        elif isinstance(value, kind) and isinstance(value, bool) == (kind is bool):  # true is an int to Python
            converted = value
    except (TypeError, ValueError, OverflowError):
        pass
    if converted is None:
        raise ConfigError(f"option {name!r} in {source} must be {kind.__name__}, not {_shown(value)}")
    for number in converted if kind is tuple else [converted] if kind in (int, float) else []:
        if complaint := _out_of_range(number, **{key: FIELDS[name].metadata[key] for key in ("low", "high", "above")}):
            raise ConfigError(f"option {name!r} in {source} must be {complaint}, not {_shown(value)}")
    return converted


def _out_of_range(number: float, low: float, high: float, above: float) -> str | None:
    """What a number should be, or None if it is."""
    if not math.isfinite(number):
        return "a finite number"
    if number < low:
        return f"at least {low}"
    if number > high:
        return f"at most {high}"
    return f"more than {above}" if number <= above else None
