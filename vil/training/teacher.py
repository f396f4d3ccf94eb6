"""Teacher for knowledge distillation: any timm model with its own preprocessing and weights."""

from __future__ import annotations

import copy
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .. import checkpoint
from ..classes import check_order, names_of
from ..config import Config, ConfigError
from ..download import check_download
from ..evaluation.wrappers import Renormalized, Reordered
from ..factory import from_checkpoint
from ..text import one_line
from ..weight_files import digest


class Teacher:
    """Frozen teacher in eval mode that accepts images preprocessed for the student and returns logits.

    Images are normalized again with the teacher's mean and standard deviation. Images are resized only if the teacher
    has a fixed input size, like most transformers, that differs from the student's.

    Args:
        config: Options of the run, which specify the teacher's name and checkpoint.
        num_classes: Number of classes of the run.
        label_names: Class names of the run by index; may be empty. The teacher's logits are reordered to match.
        data_config: timm's data config of the student's images.
        student: The student model on the device for training.

    Raises:
        ConfigError: The weights are not available, the teacher has other classes than the run, or the teacher does not
            support the image size.
        CheckpointError: The checkpoint is missing, corrupt, or from another model.
    """

    def __init__(
        self,
        config: Config,
        num_classes: int,
        label_names: list[str],
        data_config: dict[str, Any],
        student: nn.Module,
    ):
        self.name = str(config.teacher)
        self.device = device = next(student.parameters()).device
        model: Any = _load(self.name, config.teacher_checkpoint, num_classes)
        self.digest = digest(model.state_dict())  # hash that identifies the teacher's weights

        names = model.pretrained_cfg.get("label_names") or () if config.teacher_checkpoint else names_of(model)
        owner = f"the teacher {config.teacher_checkpoint or self.name}"
        order = check_order(names, label_names, owner, "this run", "choose a teacher of the same classes")
        own = resolve_model_data_config(model)
        self.size = tuple(own["input_size"][1:]) if model.pretrained_cfg.get("fixed_input_size") else None
        model = Renormalized(model, given=data_config, own=own)
        if order:
            model = Reordered(model, order)
        # convolutions on GPUs are usually fastest in channels_last
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.model = model.eval().requires_grad_(False).to(device, memory_format=self.layout)

        for phase in config.phases or ():
            if size := phase.get("img_size"):
                self._try_out((3, *to_2tuple(size)), num_classes)
        own_cost = self._try_out(data_config["input_size"], num_classes)
        trained_cost = 3 * _gflops(student, data_config["input_size"])
        self.cost = (
            f"teacher {self.name} needs {own_cost:.3g} GFLOPs per image; training {config.model} needs "
            f"{trained_cost:.3g}"
        )

    @torch.no_grad()
    def __call__(self, images_B3HW: Tensor) -> Tensor:
        """Return fp32 logits (B, classes) for images normalized for the student."""
        if self.size and self.size != images_B3HW.shape[2:]:
            images_B3HW = F.interpolate(images_B3HW, self.size, mode="bicubic", antialias=True)
        return self.model(images_B3HW.contiguous(memory_format=self.layout)).float()

    def _try_out(self, input_size: tuple[int, ...], num_classes: int) -> float:
        """Run the teacher on one image of the student's size and return the GFLOPs of the forward pass."""
        try:
            with FlopCounterMode(display=False) as counter:
                logits = self(torch.zeros(1, *input_size, device=self.device))
        except Exception as error:  # models raise exceptions of various types for unsupported image sizes
            height, width = input_size[1:]
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise ConfigError(
                f"teacher {self.name} does not support {height}x{width} images ({reason}): choose another teacher or "
                "--img-size"
            ) from error
        if logits.shape != (1, num_classes):
            raise ConfigError(
                f"teacher {self.name} must return logits of shape (1, {num_classes}), one per class of the run, got "
                f"{tuple(logits.shape)}: choose another teacher"
            )
        return counter.get_total_flops() / 1e9


@torch.no_grad()
def _gflops(model: nn.Module, input_size: tuple[int, ...]) -> float:
    """Return the GFLOPs of a forward pass on one image. The model is copied to the meta device."""
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).to("meta").eval()(torch.zeros(1, *input_size, device="meta"))
    return counter.get_total_flops() / 1e9


def _load(name: str, path: str | None, num_classes: int) -> nn.Module:
    """Load a teacher on the CPU, with weights from the checkpoint `path` or, if None, timm's pretrained weights."""
    if path:
        source = checkpoint.Checkpoint(path)
        if (own := source.options.get("num_classes")) is not None:
            _check_num_classes(path, own, num_classes)
        return from_checkpoint(source, name, num_classes=num_classes)
    known = timm.get_pretrained_cfg(name)
    if known is None or not known.has_weights:
        raise ConfigError(f"timm has no pretrained weights for teacher {name}; set --teacher-checkpoint FILE")
    _check_num_classes(name, known.num_classes, num_classes)
    if known.hf_hub_id:
        check_download(f"teacher {name}", known.hf_hub_id, "set --teacher-checkpoint FILE")
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # timm and the hub raise exceptions of various types
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise ConfigError(
            f"failed to download the weights of teacher {name} ({reason}): set --teacher-checkpoint FILE to read them "
            "from a file"
        ) from error


def _check_num_classes(teacher: str, found: int, expected: int) -> None:
    if found != expected:
        raise ConfigError(f"teacher {teacher} must have the run's {expected} classes, got {found}")
