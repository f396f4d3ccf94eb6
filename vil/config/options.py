"""Options of a training run, with defaults, ranges and choices. Most options that timm also has have timm's names.

timm is imported inside functions, so that `--help` and errors about unknown options do not wait for PyTorch's import.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from ..errors import ConfigError
from ..text import nearest, shown

MOST_PIXELS = 8192  # maximum image height or width, in pixels


def _option(
    default: Any, help: str, bare: Any = None, low: float = -math.inf, high: float = math.inf, above: float = -math.inf
) -> Any:
    """Define a field of `Config`. `bare` is the value of an option that is set without a value on the command line.

    Numbers, also in tuples, must be at least `low`, at most `high` and greater than `above`.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "bare": bare, "low": low, "high": high, "above": above}
    )


@dataclass
class Config:
    """Options of a training run. Defaults are ViM's recipe for the tiny model on ImageNet, but in bf16 autocast."""

    # options of the data
    data_dir: str | None = _option(
        None, "folder of class folders, or of two splits, each a folder or .tar of class folders"
    )
    dataset: str = _option("", "timm dataset name such as 'hfds/NAME' or 'wds/NAME'; empty for folders and tar files")
    train_split: str = _option("train", "name of the training split")
    val_split: str = _option("validation", "name of the validation split")
    val_fraction: float | None = _option(
        None, "hold out this share of each class of the training split, and validate on it instead of val_split",
        above=0, high=0.9,
    )  # fmt: skip
    num_classes: int | None = _option(None, "number of classes; read from the dataset if not given", low=1)
    apply_exif_orientation: bool = _option(
        False, "rotate images by their EXIF orientation, as prediction does; timm's programs ignore the orientation"
    )
    workers: int | None = _option(
        None, "data loading workers of each process; depends on the available cores if not given", low=0, high=1024
    )
    synthetic: int = _option(
        0,
        "train on this many synthetic images per epoch, one batch repeated (ImageNet's number if no value is given)",
        1_281_167,
        low=0,
    )
    # options of the model
    model: str = _option("vil_tiny", "timm model name")
    model_kwargs: dict | None = _option(None, "model arguments as KEY=VALUE, which are added to those of the config")
    img_size: int | tuple[int, int] | None = _option(
        None, "image size in pixels, or height and width; the model's default if not given", low=1, high=MOST_PIXELS
    )
    pretrained: bool = _option(
        False, "start from timm's pretrained weights of the model, unless pretrained_path is given"
    )
    pretrained_path: str | None = _option(
        None, "start from this weights file, or from weights of the package such as vil_tiny.tiny_in200"
    )
    drop_path: float = _option(0.0, "stochastic depth rate of the last block", low=0, high=0.99)
    grad_checkpointing: bool = _option(False, "recompute activations in backward to save memory")
    cuda_graphs: bool = _option(
        True,
        "on a GPU, replay forward, backward, AdamW and evaluation as CUDA graphs, which saves host time",
    )
    torchcompile: bool = _option(False, "train with torch.compile, which speeds up models such as DeiT, but hardly ViL")
    # options of the optimization
    epochs: int = _option(300, "number of epochs", low=1)
    phases: list | None = _option(
        None, "consecutive phases of the run, each with the options that change, such as '{epochs: 100, lr: 4e-4}'"
    )
    global_batch_size: int = _option(1024, "batch size per optimizer step, summed over all processes", low=1)
    batch_size: int | None = _option(
        None,
        "maximum micro-batch size per device; gradients are accumulated up to the global batch size",
        low=1,
    )
    opt: str = _option("adamw", "timm optimizer")
    opt_betas: tuple[float, ...] | None = _option(
        None, "optimizer betas; the optimizer's default if not given", low=0, high=1
    )
    opt_eps: float | None = _option(None, "optimizer epsilon; the optimizer's default if not given", above=0)
    lr: float = _option(1e-3, "peak learning rate; not scaled by the batch size", low=0)
    weight_decay: float = _option(0.1, "weight decay", low=0)
    layer_decay: float | None = _option(None, "learning rate of each block relative to the next block", above=0, high=1)
    clip_grad: float | None = _option(None, "maximum gradient norm", above=0)
    sched: str = _option("cosine", "timm scheduler, stepped once per epoch")
    warmup_epochs: int = _option(5, "number of warm-up epochs", low=0)
    warmup_lr: float = _option(1e-6, "learning rate of the first warm-up epoch", low=0)
    min_lr: float = _option(1e-5, "learning rate that the schedule approaches at the end", low=0)
    model_ema: bool = _option(True, "keep an exponential moving average (EMA) of the weights")
    model_ema_decay: float = _option(0.99996, "decay of the EMA weights per step", low=0, high=1)
    amp: bool = _option(True, "mixed precision on GPUs; a CPU always trains in fp32")
    amp_dtype: str = _option("bfloat16", "'bfloat16', or 'float16' with a gradient scaler")
    # options of the augmentation
    scale: tuple[float, ...] = _option(
        (0.08, 1.0), "minimum and maximum share of the image in the random crop", above=0
    )
    ratio: tuple[float, ...] = _option((3 / 4, 4 / 3), "minimum and maximum aspect ratio of the random crop", above=0)
    hflip: float = _option(0.5, "probability of a horizontal flip", low=0, high=1)
    color_jitter: float | None = _option(
        0.3, "strength of colour jitter; has no effect if aa is set to a policy other than 3a", low=0
    )
    aa: str | None = _option("rand-m9-mstd0.5-inc1", "AutoAugment or RandAugment policy")
    aug_repeats: int = _option(
        3, "number of augmented copies of an image in a global batch; 0 or 1 for no repetition", low=0
    )
    train_interpolation: str = _option("bicubic", "interpolation of the training crops")
    augment_on_device: bool | None = _option(
        None,
        "decode and augment images on the training device instead of in the workers; by default on GPUs with nvJPEG "
        "if the images are JPEGs or small",
    )
    reprob: float = _option(0.25, "probability of random erasing", low=0, high=1)
    remode: str = _option("pixel", "values of erased pixels: 'const', 'rand' or 'pixel'")
    mixup: float = _option(0.8, "mixup alpha", low=0)
    cutmix: float = _option(1.0, "cutmix alpha", low=0)
    mixup_prob: float = _option(1.0, "probability of mixup or cutmix", low=0, high=1)
    mixup_switch_prob: float = _option(0.5, "probability of cutmix instead of mixup if both are enabled", low=0, high=1)
    # options of the loss
    smoothing: float = _option(0.1, "label smoothing", low=0, high=1)
    bce_loss: bool = _option(False, "use timm's BinaryCrossEntropy loss")
    bce_target_thresh: float | None = _option(
        None,
        "with bce_loss: set targets above this threshold to 1 and others to 0; none keeps the targets",
        low=0,
        high=1,
    )
    bce_sum: bool = _option(False, "with bce_loss: sum over classes instead of averaging")
    teacher: str | None = _option(None, "timm model to distil from, which receives the same augmented images")
    teacher_checkpoint: str | None = _option(None, "weights of the teacher; timm's pretrained weights if not given")
    distillation: str = _option("hard", "learn the teacher's 'hard' labels or 'soft' probabilities")
    distillation_alpha: float = _option(
        0.5, "weight of the distillation loss; the label loss has the remaining weight", low=0, high=1
    )
    distillation_tau: float = _option(1.0, "temperature of soft distillation", above=0)
    # options of the evaluation
    crop_pct: float | None = _option(
        None,
        "side of the centre crop in evaluation, as a share of the resized image's shorter side; the model's default if "
        "not given",
        above=0,
        high=2,
    )
    interpolation: str | None = _option(None, "interpolation in evaluation; the model's default if not given")
    # options of the run
    seed: int = _option(0, "seed of all random numbers", low=0, high=2**32 - 1)
    device: str | None = _option(None, "device such as 'cuda' or 'cpu'; cuda if available and not given")
    output: str = _option("output", "parent folder of run folders")
    experiment: str | None = _option(
        None, "name of the run folder inside output; the name of the config file, data folder or model if not given"
    )
    resume: str | None = _option(
        None, "'auto' to resume from the last checkpoint in the run folder if any, or the path of a checkpoint"
    )
    checkpoint_interval: str | None = _option(
        "30m", "minutes ('30m') or optimizer steps ('500') between checkpoints, besides the one after each epoch"
    )
    log_interval: int = _option(50, "logging interval in optimizer steps", low=1)
    log_tensorboard: bool = _option(False, "also log each epoch to TensorBoard")
    log_wandb: bool = _option(False, "also log each epoch to Weights & Biases")

    def __post_init__(self):
        from timm.optim import get_optimizer_info

        self.model_kwargs = self.model_kwargs or {}
        for name, option in (("drop_path_rate", "drop_path"), ("num_classes", "num_classes"), ("img_size", "img_size")):
            if name in self.model_kwargs:
                raise ConfigError(f"model_kwargs must not contain {name}; set --{option.replace('_', '-')} instead")
        if (channels := self.model_kwargs.get("in_chans", 3)) != 3:
            raise ConfigError(f"in_chans in model_kwargs must be 3, the channels of RGB images, got {shown(channels)}")
        if self.model_kwargs.get("global_pool") == "":
            raise ConfigError(
                "global_pool in model_kwargs must not be '', because training needs one row of logits per image"
            )
        interval = self.checkpoint_interval
        if interval is not None and not re.fullmatch(r"0*[1-9]\d{0,11}m?", interval):
            raise ConfigError(
                f"checkpoint_interval must be minutes ('30m') or optimizer steps ('500'), got {shown(interval)}"
            )
        if self.teacher_checkpoint and not self.teacher:
            raise ConfigError(f"teacher_checkpoint {self.teacher_checkpoint} needs a teacher; set --teacher MODEL")
        if wrong := unknown_models(vars(self)):
            raise ConfigError(wrong[0])
        check_choices(vars(self))
        check_policy(self.aa)
        for name in ("scale", "ratio"):
            limits = getattr(self, name)
            if len(limits) != 2 or limits[0] > limits[1]:
                raise ConfigError(f"{name} must be two numbers, the smaller one first, got {limits}")
        known = get_optimizer_info(self.opt)
        if self.opt_betas and known.has_betas and len(self.opt_betas) != known.num_betas:
            raise ConfigError(f"opt_betas must be {known.num_betas} numbers for {self.opt}, got {self.opt_betas}")

        self._fill_phases()

    def _fill_phases(self) -> None:
        """Add each option that at least one phase sets to all phases, and validate each phase."""
        phases = self.phases or []
        names = dict.fromkeys(name for phase in phases for name in phase)
        self.phases = [{name: phase.get(name, getattr(self, name)) for name in names} for phase in phases] or None
        for number, phase in enumerate(self.phases or (), start=1):
            try:
                dataclasses.replace(self, phases=None, **phase)
            except ConfigError as error:
                raise ConfigError(f"phase {number}: {error}") from error

    @property
    def num_phases(self) -> int:
        return len(self.phases or [{}])

    def of_phase(self, number: int) -> Config:
        """Return the options of the phase with the index `number`."""
        return dataclasses.replace(self, **self.phases[number]) if self.phases else self

    def without_initial_weights(self) -> Config:
        """Return the options of a model with random weights."""
        return dataclasses.replace(self, pretrained=False, pretrained_path=None)

    def epochs_of_phase(self, number: int) -> range:
        """Return the epochs of a phase. Epochs are counted from 0 over all phases."""
        lengths = [phase.get("epochs", self.epochs) for phase in self.phases or [{}]]
        return range(sum(lengths[:number]), sum(lengths[: number + 1]))

    @property
    def total_epochs(self) -> int:
        return self.epochs_of_phase(self.num_phases - 1).stop

    @property
    def mixing(self) -> bool:
        return self.mixup_prob > 0 and (self.mixup > 0 or self.cutmix > 0)


def check_policy(policy: str | None) -> None:
    """Raise a ConfigError if timm cannot parse an augmentation policy or would ignore a part of the policy."""
    from timm.data import create_transform

    expected = f"aa must be a timm policy such as rand-m9-mstd0.5-inc1 or 3a, got {shown(policy)}"
    try:
        create_transform(16, is_training=True, auto_augment=policy)
    except Exception as error:  # timm's policy parsers raise various exception types
        raise ConfigError(f"{expected}: {error}") from error
    kind, *sections = (policy or "").split("-")
    known = POLICY_SECTIONS.get(kind, "mstd0.5")
    for section in sections:
        has_number = re.fullmatch(r"[a-z]+\d.*", section) and not section.startswith("t")
        if not has_number and section not in known.split():
            raise ConfigError(f"{expected}: {kind} has no section {section!r}; sections are {known}")


def choices_of_options() -> dict[str, list[str]]:
    """Return the valid values of each option that has choices."""
    from timm.optim import get_optimizer_info, list_optimizers

    interpolations = ["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"]
    return {
        "opt": [name for name in map(str, list_optimizers()) if not get_optimizer_info(name).second_order],
        "sched": ["cosine", "tanh", "step", "multistep", "poly"],  # timm schedulers that do not depend on a metric
        "train_interpolation": [*interpolations, "random"],
        "interpolation": interpolations,
        "amp_dtype": ["bfloat16", "float16"],
        "remode": ["const", "rand", "pixel"],
        "distillation": ["hard", "soft"],
    }


# model arguments that are counts or numbers of pixels -> smallest valid value
SIZES = dict.fromkeys(("img_size", "patch_size", "stride", "in_chans", "embed_dim", "depth", "num_heads"), 1)
SIZES["num_classes"] = 0


def check_sizes(arguments: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a model argument is an invalid size. Models accept some invalid sizes, such as depth 0."""
    for name in SIZES.keys() & arguments:
        value = arguments[name]
        for size in value if isinstance(value, (list, tuple)) else [value]:
            if size is not None and not isinstance(size, Integral):
                raise ConfigError(f"{name} must be an integer, got {shown(value)}")
            if size is not None and size < SIZES[name]:
                raise ConfigError(f"{name} must be at least {SIZES[name]}, got {shown(value)}")


def check_choices(values: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the value of an option is not one of the option's choices."""
    if wrong := wrong_choices(values):
        raise ConfigError(wrong[0])


def wrong_choices(values: Mapping[str, Any]) -> list[str]:
    """Return an error message for each option whose value is not one of the option's choices."""
    wrong = []
    for name, choices in choices_of_options().items():
        value = values.get(name)
        if value is not None and value not in choices:
            known = textwrap.shorten(", ".join(choices), 200, placeholder=" ...")
            wrong.append(f"unknown {name} {shown(value)}{nearest(value, choices) or '; choose one of ' + known}")
    return wrong


def unknown_models(values: Mapping[str, Any]) -> list[str]:
    """Return an error message for each option with a model name that timm does not know."""
    named = [(name, model) for name in ("model", "teacher") if (model := values.get(name))]
    if not named:
        return []
    import timm

    from ..models import vision_longhorn  # noqa: F401  registers the models with timm

    return [
        f"{name} {shown(model)} is not a model of timm or this package{nearest(model, timm.list_models())}"
        for name, model in named
        if not timm.is_model(model)
    ]


# valid sections of timm's augmentation policies, with example values
POLICY_SECTIONS = {
    "rand": "m9 n2 p0.5 mstd0.5 mmax10 inc1 tweights t3a t3aw",
    "augmix": "m3 w3 d2 a1 b1 mstd0.5",
}

# options that may differ between phases
PHASE_OPTIONS = (
    "epochs", "img_size", "global_batch_size", "batch_size", "grad_checkpointing", "drop_path", "opt", "opt_betas",
    "opt_eps", "lr", "weight_decay", "layer_decay", "clip_grad", "sched", "warmup_epochs", "warmup_lr", "min_lr",
    "model_ema_decay", "scale", "ratio", "hflip", "color_jitter", "aa", "aug_repeats", "train_interpolation",
    "reprob", "remode", "mixup", "cutmix", "mixup_prob", "mixup_switch_prob", "smoothing", "bce_loss",
    "bce_target_thresh", "bce_sum", "distillation", "distillation_alpha", "distillation_tau", "crop_pct",
)  # fmt: skip
DATASETS = ("wds", "hfds", "hfids", "tfds")  # supported prefixes of timm dataset names; folders and tar files have none
FIELDS = {field.name: field for field in dataclasses.fields(Config)}

# option -> names of the same or a similar option in other programs, for suggestions when an option is unknown
SYNONYMS = {
    "aa": "auto_augment autoaugment",
    "amp": "mixed_precision bf16 fp16",
    "bce_loss": "bce binary_cross_entropy",
    "batch_size": "accum_iter accumulation_steps grad_accum_steps gradient_accumulation_steps "
    "per_device_train_batch_size",
    "checkpoint_interval": "save_freq save_interval save_steps",
    "clip_grad": "clip grad_clip gradient_clip_val max_grad_norm max_norm",
    "data_dir": "data data_path dataset_path root train_dir",
    "device": "accelerator gpu gpus",
    "distillation": "distillation_type",
    "distillation_alpha": "kd_loss_weight",
    "distillation_tau": "distill_temperature kd_temperature temperature",
    "drop_path": "stochastic_depth",
    "epochs": "num_train_epochs",
    "experiment": "name run_name",
    "global_batch_size": "bs effective_batch_size train_batch_size",
    "grad_checkpointing": "use_checkpoint",
    "img_size": "crop_size resolution",
    "layer_decay": "llrd",
    "lr": "base_lr initial_lr learning_rate max_lr",
    "min_lr": "eta_min",
    "model": "arch architecture backbone model_name",
    "opt": "optimizer",
    "opt_eps": "adam_epsilon eps",
    "output": "out_dir save_dir work_dir",
    "phases": "stages",
    "pretrained_path": "checkpoint finetune init_checkpoint initial_checkpoint load_from weights",
    "reprob": "random_erase random_erasing",
    "sched": "lr_scheduler_type",
    "teacher": "kd_model_name",
    "teacher_checkpoint": "teacher_path teacher_weights",
    "warmup_epochs": "warmup",
    "weight_decay": "l2 wd",
    "workers": "dataloader_num_workers j",
}
