"""Messages about the setup of a run and the start of a training phase."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..config import Config
from ..data.samplers import TrainingBatches
from ..data.sources.splits import describe_split
from ..models.block import Block
from ..models.dispatch import fused_block
from .data import Data, Splits
from .forward_backward import ForwardBackward
from .phases import Phase
from .teacher import Teacher

_logger = logging.getLogger(__name__)


def announce(phase: Phase, batches: TrainingBatches, splits: Splits, model: nn.Module) -> None:
    """Log the data splits, the model and the options of a training phase.

    Warn if the phase is too short for warmup or for the EMA decay, or if repeated augmentation has no effect.
    """
    config = phase.config
    if not config.synthetic:
        names = ("train", "validation") if config.val_fraction else (config.train_split, config.val_split)
        for name, images in zip(names, (splits.train, splits.validation)):
            _logger.warning("%s", describe_split(name, images))
    _logger.warning("%s", describe_model(config, model))
    if config.phases:
        options = ", ".join(f"{name} {value}" for name, value in config.phases[phase.index].items())
        _logger.warning("phase %d of %d: %s", phase.index + 1, config.num_phases, options)
    _logger.warning("%s", batches.described(config.epochs, "the phase" if config.phases else "the run"))

    if config.aug_repeats > batches.repeats:
        _logger.warning(
            "aug_repeats %d has no effect, because an iterable dataset yields each image only once", config.aug_repeats
        )
    if config.warmup_epochs >= config.epochs and config.warmup_lr < config.lr:
        _logger.warning(
            "warmup_epochs should be less than epochs, got %d of %d: the learning rate never reaches lr %g",
            config.warmup_epochs, config.epochs, config.lr,
        )  # fmt: skip
    if config.model_ema:
        _warn_of_short_ema(config, config.epochs * batches.steps)


def describe_model(config: Config, model: nn.Module) -> str:
    """Return one line: a model's name, arguments and size, and whether blocks run as fused kernels or PyTorch code."""
    count = sum(parameter.numel() for parameter in model.parameters())
    arguments = ", ".join(f"{name} {value}" for name, value in (config.model_kwargs or {}).items())
    line = f"{config.model}{f' with {arguments}' if arguments else ''}: {count:,} parameters"
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not blocks:
        return line
    is_fused = [fused_block(block, block.norm.weight.new_empty(1, 1, len(block.norm.weight))) for block in blocks]
    unfused = is_fused.count(None)
    if unfused == 0:
        return f"{line}; all {len(blocks)} blocks run as fused kernels"
    return f"{line}; {unfused} of {len(blocks)} blocks run as PyTorch code"


def describe_setup(
    config: Config,
    device: torch.device,
    world_size: int,
    forward_backward: ForwardBackward,
    data: Data,
    teacher: Teacher | None,
) -> str:
    """Return one line about the devices, micro-batch size, CUDA graph, image loading and teacher of a run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    line = f"{world_size} x {name}: micro-batches of {forward_backward.micro_batch} images, "
    line += f"global batch size {config.global_batch_size}"
    if forward_backward.is_graph:
        line += ", forward and backward captured as a CUDA graph"
    line += f"; {data.train_loader.images.description}"
    if teacher:
        line += f"; {teacher.cost}"
    return line


def _warn_of_short_ema(config: Config, steps: int) -> None:
    decay = config.model_ema_decay
    if steps * (1 - decay) >= 1:
        return
    averaged = 1 / (1 - decay) if decay < 1 else float("inf")
    shorter = max(0.5, 1 - 10 / steps)
    _logger.warning(
        "model_ema_decay %s averages over about %.0f steps, but only %d steps are trained, so the EMA weights stay "
        "close to the initial weights. Set --model-ema-decay %.4g to average over about %.0f steps, or train longer",
        decay, averaged, steps, shorter, 1 / (1 - shorter),
    )  # fmt: skip
