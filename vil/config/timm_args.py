"""Config files of timm's train.py, such as the args.yaml that timm saves beside a run, in terms of `Config`.

timm saves every option, so most lines of an args.yaml are off or at timm's default. Such lines are ignored. Options
with the same meaning under another name are renamed. All other options are errors, because ignoring them would
silently change the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.optim import get_optimizer_info, list_optimizers

from ..text import shown
from .options import FIELDS, SYNONYMS, ConfigError
from .values import convert, kind_of, unknown_option

EMPTY: tuple = (None, "", False, [], {})  # values that timm treats as "not given" or "off"
RENAMED = {
    "data": "data_dir", "drop_connect": "drop_path", "initial_checkpoint": "pretrained_path", "input_size": "img_size",
}  # fmt: skip
MODEL_ARGUMENTS = {"drop": "drop_rate", "gp": "global_pool"}  # options that timm's train.py passes to the model
# options without counterpart, with the value by which timm trains as this package does
UNSUPPORTED = {
    "amp_impl": "native", "apex_amp": False, "aug_splits": 0, "bce_pos_weight": None, "bn_eps": None,
    "bn_momentum": None, "class_map": "", "clip_mode": "norm", "color_jitter_prob": None, "cooldown_epochs": 0,
    "cutmix_minmax": None, "dataset_download": False, "dataset_trust_remote_code": False, "decay_epochs": 90,
    "decay_milestones": [90, 180, 270], "decay_rate": 0.1, "dist_bn": "reduce", "distill_loss_weight": None,
    "drop_block": None, "epoch_repeats": 0, "eval_metric": "top1", "gaussian_blur_prob": None, "grayscale_prob": None,
    "head_init_bias": None, "head_init_scale": None, "in_chans": 3, "input_img_mode": "RGB", "input_key": None,
    "jsd_loss": False, "kd_distill_type": "logit", "kd_loss_type": "kl", "kd_model_name": None,
    "kd_student_feature_dim": None, "kd_teacher_feature_dim": None, "kd_temperature": 4,
    "kd_token_distill_type": "soft",
    "layer_decay_min_scale": 0, "layer_decay_no_opt_scale": None, "lr_base": None, "lr_base_scale": "",
    "lr_base_size": 256, "lr_cycle_decay": 0.5, "lr_cycle_limit": 1, "lr_cycle_mul": 1, "lr_k_decay": 1,
    "lr_noise": None, "lr_noise_pct": 0.67, "lr_noise_std": 1, "mean": None, "mixup_mode": "batch",
    "mixup_off_epoch": 0, "model_dtype": None, "model_ema_warmup": False, "momentum": 0.9, "naflex_loader": False,
    "naflex_loss_scale": "linear", "naflex_max_seq_len": 576, "naflex_patch_size_probs": None,
    "naflex_patch_sizes": None, "naflex_patchify_channels_first": False,
    "naflex_train_seq_lens": [128, 256, 576, 784, 1024], "native_amp": False, "no_aug": False, "no_resume_opt": False,
    "opt_kwargs": {}, "patience_epochs": 10, "pretrained": False, "recount": 1, "resplit": False,
    "sched_on_updates": False, "split_bn": False, "start_epoch": None, "std": None, "sync_bn": False,
    "target_key": None, "task_loss_weight": None, "train_batch_sizes": None, "train_batches_per_epoch": None,
    "train_crop_mode": "rrc", "train_img_sizes": None, "train_num_samples": None, "train_size_probs": None,
    "train_size_random_mix": 0.1, "train_size_schedule": "constant", "train_size_schedule_spread": 0.65, "tta": 0,
    "val_num_samples": None, "variable_batch_loss_scale": "none", "vflip": 0, "warmup_prefix": False,
}  # fmt: skip
# options that matter only if another option is on
ONLY_WITH = {
    "aug_splits": "resplit split_bn",
    "bce_loss": "bce_pos_weight",
    "clip_grad": "clip_mode",
    "kd_model_name": "distill_loss_weight kd_distill_type kd_loss_type kd_student_feature_dim kd_teacher_feature_dim "
    "kd_temperature kd_token_distill_type task_loss_weight",
    "layer_decay": "layer_decay_min_scale layer_decay_no_opt_scale",
    "lr_noise": "lr_noise_pct lr_noise_std",
    "naflex_loader": "naflex_loss_scale naflex_max_seq_len naflex_patch_size_probs naflex_patch_sizes "
    "naflex_patchify_channels_first naflex_train_seq_lens",
    "reprob": "recount",
    "train_img_sizes": "train_batch_sizes train_size_probs train_size_random_mix train_size_schedule "
    "train_size_schedule_spread variable_batch_loss_scale",
}
SWITCHES = {name: switch for switch, names in ONLY_WITH.items() for name in names.split()}
SCHEDULES = {
    "decay_epochs": ("step",), "decay_milestones": ("multistep",), "decay_rate": ("step", "multistep", "poly"),
    "lr_k_decay": ("cosine", "poly"), "patience_epochs": (),
}  # fmt: skip
# options that change speed, logging or storage but not what is trained
HARMLESS = {
    "channels_last", "checkpoint_hist", "device_modules", "distributed", "fast_norm", "fuser", "grad_accum_steps",
    "local_rank", "model_ema_force_cpu", "no_ddp_bb", "no_prefetcher", "pin_mem", "prefetcher", "rank",
    "recovery_interval", "save_images", "synchronize_step", "torchcompile_mode", "torchscript",
    "use_multi_epochs_loader", "val_interval", "validation_batch_size", "wandb_project", "wandb_resume_id",
    "wandb_tags", "worker_seeding", "world_size",
}  # fmt: skip
ONLY_TIMMS = {*RENAMED, *MODEL_ARGUMENTS, *UNSUPPORTED, *HARMLESS}


def from_timm(
    values: Mapping[Any, Any], source: str, given: Mapping[str, Any]
) -> tuple[dict[Any, Any], list[str], list[str]]:
    """Translate the options of a config file that was written for timm's train.py.

    A file is timm's if it has an option that only timm has. Other files are returned unchanged.

    Args:
        values: The options of the file.
        source: The file, for messages.
        given: The options of the command line, which override the file.

    Returns:
        The options in terms of `Config`, the names of options that change nothing and were ignored, and what is wrong:
        options that this package does not support.
    """
    if not ONLY_TIMMS & values.keys():
        return dict(values), [], []
    options: dict[Any, Any] = {}
    ignored, unsupported = [], {}
    in_effect = {**values, **given}
    for name, value in values.items():
        if name in FIELDS:
            kind, optional = kind_of(name)
            empty = _is_empty(value) and kind is not bool
            if name == "torchcompile":  # timm's value is the name of a backend
                options[name] = True if value == "inductor" else value or False
            elif optional or not empty:
                options[name] = None if empty else value
            else:
                ignored.append(name)
        elif _is_empty(value):
            ignored.append(str(name))
        elif name in RENAMED or name in MODEL_ARGUMENTS:
            continue
        elif _changes_training(name, value, in_effect):
            unsupported[str(name)] = value
        else:
            ignored.append(str(name))
    errors = _rename(values, options, source)
    return options, ignored, errors + _complaints(unsupported, options, given, source)


def _rename(values: Mapping[Any, Any], options: dict[Any, Any], source: str) -> list[str]:
    """Add the options that timm has under another name. Return messages about those that contradict another."""
    errors = []
    for name, ours in RENAMED.items():
        if _is_empty(value := values.get(name)):
            continue
        if name == "input_size":
            try:
                value = img_size_of(value, source)
            except ConfigError as error:
                errors.append(str(error))
                continue
        if options.get(ours) is None:
            options[ours] = value
        elif options[ours] != value and name != "data":  # timm also prefers data_dir
            errors.append(f"option {name!r} in {source} contradicts {ours!r}: set only one of them")
    arguments, own = (
        {MODEL_ARGUMENTS[n]: values[n] for n in MODEL_ARGUMENTS if values.get(n)},
        options.get("model_kwargs"),
    )
    if arguments and (own is None or isinstance(own, dict)):  # `checked` refuses other values
        options["model_kwargs"] = arguments | (own or {})
    return errors


def img_size_of(input_size: Any, source: str) -> int | tuple[int, int]:
    """Return the image size of timm's `input_size`, which is channels, height and width.

    Raises:
        ConfigError: `input_size` has another form, or the number of channels is not three.
    """
    if not isinstance(input_size, (list, tuple)) or len(input_size) != 3 or input_size[0] not in (3, "3"):
        raise ConfigError(f"option 'input_size' in {source} must be 3, height and width, got {shown(input_size)}")
    return convert("img_size", input_size[1:], source)


def _is_empty(value: Any) -> bool:
    return any(value is empty or (type(value) is type(empty) and value == empty) for empty in EMPTY)


def _changes_training(name: str, value: Any, options: Mapping[str, Any]) -> bool:
    """Return whether an option without counterpart has an effect together with the other options of a run."""
    if name not in UNSUPPORTED:  # options of timm's forks are off if they are 0
        return name not in HARMLESS and value != 0
    if value == UNSUPPORTED[name]:
        return False
    if name.startswith("lr_base"):
        return _is_empty(options.get("lr"))
    if name in ("lr_cycle_decay", "lr_cycle_mul"):
        return options.get("lr_cycle_limit", 1) != 1

    def in_effect(ours: str) -> Any:
        return options.get(ours, FIELDS[ours].default if ours in FIELDS else None)

    if name in SCHEDULES:
        return in_effect("sched") in SCHEDULES[name]
    if name == "momentum":
        opt = in_effect("opt")
        return opt not in map(str, list_optimizers()) or get_optimizer_info(opt).has_momentum
    switch = SWITCHES.get(name)
    return switch is None or in_effect(switch) not in (None, "", False, 0, "none", "null")


def _complaints(
    unsupported: dict[str, Any], options: Mapping[str, Any], given: Mapping[str, Any], source: str
) -> list[str]:
    """Return messages about unsupported options: one for each with a remedy, and one for all others together."""
    complaints = []
    if not _is_empty(options.get("batch_size")) and "global_batch_size" not in options | given.keys():
        complaints.append(
            f"option 'batch_size' {shown(options['batch_size'])} in {source} is the batch size of each process in "
            "timm's train.py: set --global-batch-size N, the batch size of an optimizer step over all processes"
        )
    if scaled := [name for name in unsupported if name.startswith("lr_base")]:
        complaints.append(
            f"option {scaled[0]!r} in {source} scales timm's learning rate by the batch size: set --lr, which is not "
            "scaled"
        )
    if unsupported.get("pretrained"):
        complaints.append(f"option 'pretrained' in {source} is not supported: set --pretrained-path FILE")
    rest = [name for name in unsupported if name != "pretrained" and not name.startswith("lr_base")]
    synonyms = " ".join(SYNONYMS.values()).split()
    complaints += [unknown_option(name, f"in {source}", FIELDS) for name in rest if name in synonyms]
    if others := [f"option {name!r} ({shown(unsupported[name])})" for name in rest if name not in synonyms]:
        complaints.append(f"{source} has what is not supported, so remove it: {', '.join(others)}")
    return complaints
