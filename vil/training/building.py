"""Functions that build a run's model, optimizer, learning-rate schedule and training state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from ..config import Config, ConfigError
from ..distributed import warn_on_rank0
from ..factory import check_pretrained, create_model
from .state import TrainState
from .update import ListedEma


def build_model(
    config: Config, num_classes: int, weights: dict[str, Tensor] | None = None, label_names: Sequence[str] = ()
) -> nn.Module:
    """Create the model of a run with random weights, timm's pretrained weights, or the weights from `pretrained_path`.

    Args:
        config: Options of the run.
        num_classes: Number of classes.
        weights: State dict of the same model to load instead of `pretrained_path`; resampled to the image size.
        label_names: Class names of the data by index. The head loaded from `pretrained_path` is reordered to match.

    Raises:
        ConfigError: The model has no pretrained weights, the weights cannot be downloaded, the model does not support
            activation checkpointing, or `vil.factory.create_model` raises.
        CheckpointError: `vil.factory.create_model` raises.
    """
    arguments: dict[str, Any] = {"img_size": config.img_size} if config.img_size else {}
    arguments |= dict(num_classes=num_classes, drop_path_rate=config.drop_path) | (config.model_kwargs or {})
    from_timm = weights is None and config.pretrained and not config.pretrained_path
    if weights is not None:
        overlay = dict(state_dict=dict(weights), num_classes=num_classes)
        arguments |= dict(pretrained=True, pretrained_cfg_overlay=overlay)
    elif from_timm:
        check_pretrained(config.model, arguments, "set --pretrained-path FILE, or --no-pretrained for random weights")
        arguments["pretrained"] = True
    model: Any = create_model(
        config.model, None if weights else config.pretrained_path, label_names=label_names, **arguments
    )
    if from_timm:
        is_new = model.pretrained_cfg["num_classes"] != num_classes
        head = f"; new head for {num_classes} classes" if is_new else ""
        warn_on_rank0(__name__, "initialized from timm's pretrained weights of %s%s", config.model, head)
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing()
        except (AssertionError, AttributeError) as error:  # raised by timm models without activation checkpointing
            raise ConfigError(
                f"{config.model} does not support activation checkpointing; remove --grad-checkpointing"
            ) from error
    return model


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Create the timm optimizer of a run; AdamW on a GPU is fused.

    Raises:
        ConfigError: The optimizer cannot be created, for example because a package is missing.
    """
    on_gpu = next(model.parameters()).is_cuda
    fused = True if config.opt == "adamw" and on_gpu else None  # fused AdamW launches fewer kernels
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
    except Exception as error:  # optimizers of other packages raise exceptions of various types
        raise ConfigError(f"cannot create the optimizer {config.opt}: {error}") from error
    # Sort parameters by size, so that small tensors share the launches of fused kernels. A launch processes only a
    # limited number of tensors.
    for group in optimizer.param_groups:
        group["params"].sort(key=torch.Tensor.numel, reverse=True)
    return optimizer


def build_scheduler(config: Config, optimizer: torch.optim.Optimizer) -> Scheduler:
    """Create the timm learning-rate scheduler of a run, which is stepped once per epoch."""
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.sched,
        num_epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        warmup_lr=config.warmup_lr,
        min_lr=config.min_lr,
    )
    assert scheduler is not None  # timm returns no scheduler only for names of schedulers that `Config` rejects
    return scheduler


def build_state(config: Config, model: nn.Module, first_epoch: int) -> TrainState:
    """Create the training state: EMA, optimizer, scheduler and gradient scaler for a given model.

    Args:
        config: Options of the phase.
        model: Model on the device for training.
        first_epoch: First epoch of the phase, counted from 0 over the whole run.

    Raises:
        ConfigError: As for `build_optimizer`.
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
