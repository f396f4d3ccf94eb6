"""Construction of a run's model and of the state of its training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from ..config import Config, ConfigError
from ..factory import create_model
from .data import Splits
from .state import TrainState
from .teacher import Teacher
from .update import ListedEma


def build_model(
    config: Config, num_classes: int, weights: dict[str, Tensor] | None = None, label_names: Sequence[str] = ()
) -> nn.Module:
    """Create the model of a run, randomly initialized or from `pretrained_path`.

    Args:
        config: Options of the run.
        num_classes: Number of classes.
        weights: State dict to load instead of `pretrained_path`, from the same model; resampled to this image size.
        label_names: Class names of the data by index, which the head of `pretrained_path` follows.

    Raises:
        ConfigError, CheckpointError: As `vil.factory.create_model`, or the model does not support activation
            checkpointing.
    """
    arguments: dict[str, Any] = {"img_size": config.img_size} if config.img_size else {}
    arguments |= dict(num_classes=num_classes, drop_path_rate=config.drop_path) | (config.model_kwargs or {})
    if weights is not None:
        overlay = dict(state_dict=dict(weights), num_classes=num_classes)
        arguments |= dict(pretrained=True, pretrained_cfg_overlay=overlay)
    model: Any = create_model(
        config.model, None if weights else config.pretrained_path, label_names=label_names, **arguments
    )
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing()
        except (AssertionError, AttributeError) as error:  # timm's models raise one of these
            raise ConfigError(
                f"{config.model} does not support activation checkpointing: leave out --grad-checkpointing"
            ) from error
    return model


def build_teacher(config: Config, splits: Splits, data_config: dict[str, Any], student: nn.Module) -> Teacher | None:
    """Load the teacher of a distilled run.

    Args:
        config: Options of the run.
        splits: Splits of the run, with their classes.
        data_config: timm's data config of the student's images.
        student: The student, on its device.

    Raises:
        ConfigError, CheckpointError: As `Teacher`.
    """
    if not config.teacher:
        return None
    return Teacher(config, splits.num_classes, splits.label_names, data_config, student)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Create timm's optimizer of a run, fused if it is AdamW on a GPU.

    Raises:
        ConfigError: The optimizer needs a missing package or device.
    """
    on_gpu = next(model.parameters()).is_cuda
    fused = True if config.opt == "adamw" and on_gpu else None  # one kernel instead of a dozen
    choices: dict[str, Any] = {"betas": config.opt_betas, "eps": config.opt_eps, "fused": fused}
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **{name: value for name, value in choices.items() if value is not None},
        )
    except Exception as error:  # optimizers come from several packages
        raise ConfigError(f"cannot create the optimizer {config.opt}: {error}") from error
    # Sort by size: a fused launch processes few tensors and takes as long as its largest one.
    for group in optimizer.param_groups:
        group["params"].sort(key=torch.Tensor.numel, reverse=True)
    return optimizer


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> Scheduler:
    """Create timm's learning-rate schedule of a run, which is updated once an epoch."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.sched,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
    )
    assert scheduler is not None  # Config validates `sched`
    return scheduler


def build_state(config: Config, model: nn.Module, first_epoch: int) -> TrainState:
    """Create what training changes besides the model.

    Args:
        config: Options of the phase.
        model: Model on its device.
        first_epoch: First epoch of the phase, counted from 0 over the whole run.

    Raises:
        ConfigError: As `build_optimizer`.
    """
    device = next(model.parameters()).device
    is_scaled = config.amp and config.amp_dtype == "float16" and device.type != "cpu"
    optimizer = build_optimizer(config, model)
    return TrainState(
        model=model,
        ema=ListedEma(model, decay=config.model_ema_decay) if config.model_ema else None,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        scaler=torch.amp.GradScaler(device.type, enabled=is_scaled),
        first_epoch=first_epoch,
    )
