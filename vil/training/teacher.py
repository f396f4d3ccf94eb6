"""The teacher of a distilled run: any timm model, with the preprocessing and the weights that it was trained with."""

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
from ..config import Config, ConfigError
from ..factory import from_checkpoint
from ..text import one_line


class Teacher:
    """Classifies images that were prepared for the student: gives its logits, in evaluation mode, without gradients.

    Pixels get the teacher's mean and standard deviation in place of the student's. They are interpolated only if its
    input size is fixed, as that of most transformers is, and another.

    Args:
        config: Names the teacher and the file of its weights.
        num_classes: Of the run.
        label_names: The classes by their numbers, where the run knows them.
        data_config: timm's, of the student's images.
        student: The model that learns, on its device.

    Raises:
        ConfigError: Its weights are not to be had, it has other classes than the run, or does not take images of this
            size.
        CheckpointError: The file of its weights is missing, corrupt, or of another model.
    """

    def __init__(
        self,
        config: Config,
        num_classes: int,
        label_names: list[str],
        data_config: dict[str, Any],
        student: nn.Module,
    ):
        self.name, device = str(config.teacher), next(student.parameters()).device
        model: Any = _load(self.name, config.teacher_checkpoint, num_classes)
        names = model.pretrained_cfg.get("label_names") if config.teacher_checkpoint else None
        for number, (own, ours) in enumerate(zip(names or (), label_names)):
            if own != ours:
                raise ConfigError(
                    f"class {number} of the teacher {config.teacher_checkpoint} is {own!r}, and of this run {ours!r}"
                )
        self.digest = checkpoint.digest(model.state_dict())  # which tells its weights from others
        layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format  # as convolutions like it
        self.model = model.eval().requires_grad_(False).to(device, memory_format=layout)
        own = resolve_model_data_config(self.model)
        self.size = tuple(own["input_size"][1:]) if model.pretrained_cfg.get("fixed_input_size") else None
        means, stds = (
            [torch.tensor(c[name], device=device).view(1, -1, 1, 1) for c in (data_config, own)]
            for name in ("mean", "std")
        )
        self.scale, self.shift, self.layout = stds[0] / stds[1], (means[0] - means[1]) / stds[1], layout
        for size in (phase.get("img_size") for phase in config.phases or ()):
            if size:
                self._try_out((3, *to_2tuple(size)), num_classes)
        own_cost = self._try_out(data_config["input_size"], num_classes)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy.deepcopy(student).to("meta").eval()(torch.zeros(1, *data_config["input_size"], device="meta"))
        trained = 3 * counter.get_total_flops() / 1e9
        self.cost = (
            f"teacher {self.name}, {own_cost:.3g} GFLOPs an image beside some {trained:.3g} of training {config.model}"
        )

    @torch.no_grad()
    def __call__(self, images_B3HW: Tensor) -> Tensor:
        """Logits (B, classes) in fp32 of images that are normalised for the student."""
        images_B3HW = torch.addcmul(self.shift, images_B3HW, self.scale)
        if self.size and self.size != images_B3HW.shape[2:]:
            images_B3HW = F.interpolate(images_B3HW, self.size, mode="bicubic", antialias=True)
        return self.model(images_B3HW.contiguous(memory_format=self.layout)).float()

    def _try_out(self, input_size: tuple[int, ...], num_classes: int) -> float:
        """Looks at an image of a size of the student's. Returns how many GFLOPs that takes."""
        try:
            with FlopCounterMode(display=False) as counter:
                logits = self(torch.zeros(1, *input_size, device=self.scale.device))
        except Exception as error:  # whatever a model says of a size that it is not made for
            height, width = input_size[1:]
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise ConfigError(
                f"teacher {self.name} takes no images of {height} x {width} pixels ({reason}): choose another, or "
                "another --img-size"
            ) from error
        if logits.shape != (1, num_classes):
            raise ConfigError(_other_classes(self.name, logits.shape[-1], num_classes))
        return counter.get_total_flops() / 1e9


def _load(name: str, path: str | None, num_classes: int) -> nn.Module:
    """A model with its own weights, on the CPU."""
    if path:
        source = checkpoint.Checkpoint(path)
        said = source.options.get("num_classes")
        if said not in (None, num_classes):
            raise ConfigError(_other_classes(path, said, num_classes))
        return from_checkpoint(source, name, num_classes=num_classes)
    known = timm.get_pretrained_cfg(name)
    if known is None or not known.has_weights:
        raise ConfigError(f"teacher {name} has no weights that timm knows of: give --teacher-checkpoint FILE")
    if known.num_classes != num_classes:
        raise ConfigError(_other_classes(name, known.num_classes, num_classes))
    try:
        return timm.create_model(name, pretrained=True)
    except Exception as error:  # of networks, hubs and their packages
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise ConfigError(
            f"the weights of teacher {name} could not be fetched; --teacher-checkpoint FILE takes them from a file. "
            f"{reason}"
        ) from error


def _other_classes(teacher: str | None, found: int, wanted: int) -> str:
    return f"teacher {teacher} knows {found} classes, and the run has {wanted}: it takes one of the same"
