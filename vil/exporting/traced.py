"""Exportable copy of a model, in which mixers use only standard PyTorch operators."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..data_config import input_size
from ..models.block import KNOWN_MIXERS, Block, Blocks, RMSNorm
from ..models.vision_longhorn import VisionLonghorn
from .mixers import ClassTokenBlock, Convolve, convolve, convolve_images, mix, rms_norm


class ExportError(RuntimeError):
    """The model cannot be exported as requested. No file was written."""


class Exported(nn.Module):
    """Copy of a model for export: in fp32, on the CPU and in eval mode.

    Mixers of this package run `vil.exporting.mixers.mix` instead of fused kernels. Mixers of unknown classes keep their
    own forward method.

    Args:
        model: A timm model.
        features: Indices of the blocks whose feature maps are additional outputs.
        for_onnxruntime: Compute convolutions by `convolve_images`, which is slower in PyTorch.

    Raises:
        ExportError: The model has no num_classes, or an index in `features` is out of range.
    """

    def __init__(self, model: nn.Module, features: Sequence[int] = (), for_onnxruntime: bool = False):
        super().__init__()
        if isinstance(model, (str, os.PathLike)):
            raise ExportError(f"model must be a timm model, got the path {str(model)!r}: use vil.from_checkpoint")
        if not hasattr(model, "num_classes"):
            raise ExportError(
                f"model must be a timm model with num_classes, got {type(model).__name__}: export the whole model and "
                "set features=[INDEX, ...] for feature maps"
            )
        self.model = as_evaluated(model)
        self.input_size = input_size(model)
        self.features = sorted(set(features))
        self._check_features()

        first_output = "logits" if model.num_classes else "embedding"
        self.outputs = [first_output, *(f"features_{index}" for index in self.features)]
        self._replace_forwards(convolve_images if for_onnxruntime else convolve)

    def _check_features(self) -> None:
        num_blocks = len(getattr(self.model, "feature_info", ()))
        unknown = [index for index in self.features if not 0 <= index < num_blocks]
        if unknown:
            raise ExportError(f"features must be block indices from 0 to {num_blocks - 1}, got {unknown}")

    def _replace_forwards(self, convolve: Convolve) -> None:
        """Replace the forward methods of mixers and norms by functions with only standard PyTorch operators.

        If possible, the last block computes only the class token.
        """
        for module in self.model.modules():
            replaced: Any = module
            if isinstance(module, RMSNorm):
                replaced.forward = functools.partial(rms_norm, module)
            elif type(module) in KNOWN_MIXERS:
                replaced.forward = functools.partial(mix, replaced, convolve=convolve)
        if self._reads_only_class_token():
            self.model.blocks[-1].__class__ = ClassTokenBlock

    def _reads_only_class_token(self) -> bool:
        """Return whether only the class token of the last block determines the outputs."""
        model = self.model
        if type(model) is not VisionLonghorn or type(model.blocks) is not Blocks:
            return False
        *blocks, last = model.blocks
        is_needed = len(blocks) in self.features or any(block is last for block in blocks)
        return is_known(last) and not is_needed and model.global_pool == "token"

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return outputs_of(self.model, self.features, images)

    def program(self) -> ExportedProgram:
        """Return the model as a torch.export program with a dynamic batch size."""
        return program_of(
            self, pictures(2, self.input_size)
        )  # 2 images, because torch.export would specialize on a batch size of 1


def is_known(block: nn.Module) -> bool:
    """Return whether a module is a block of this package with a mixer that `mix` supports."""
    return type(block) in (Block, ClassTokenBlock) and type(block.mixer) in KNOWN_MIXERS


@torch.no_grad()
def program_of(module: nn.Module, batch: Tensor, *weights: list[Tensor]) -> ExportedProgram:
    """Return a module as a torch.export program with a dynamic batch size.

    Raises:
        ExportError: The graph contains a custom operator of this package.
    """
    shapes_of_weights = [[None] * len(tensors) for tensors in weights]
    dynamic_shapes = ({0: Dim("batch")}, *shapes_of_weights)
    program = torch.export.export(module, (batch, *weights), dynamic_shapes=dynamic_shapes, strict=False)
    for part in program.graph_module.modules():
        for node in part.graph.nodes:
            node.meta.pop("stack_trace", None)  # stack traces would reveal paths of this machine in the file
            if str(node.target).startswith("vil."):
                raise ExportError(
                    f"exported graph must contain only PyTorch operators, got {node.target}: write the recurrence with "
                    "PyTorch operators or add it to vil/exporting/mixers.py"
                )
    return program


def as_evaluated(model: nn.Module) -> Any:
    """Return a copy of the model in fp32, on the CPU and in eval mode."""
    return copy.deepcopy(model).cpu().float().eval().requires_grad_(False)


def outputs_of(model: Any, features: Sequence[int], images: Tensor) -> tuple[Tensor, ...]:
    """Return the logits, and the feature maps of the blocks with indices `features`."""
    if not features:
        return (model(images),)
    tokens, maps = model.forward_intermediates(images, indices=list(features))
    return model.forward_head(tokens), *maps


def pictures(count: int, size: tuple[int, int, int]) -> Tensor:
    """Return random normalized images (count, C, H, W), alternately white noise and smooth images."""
    channels, height, width = size
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, channels, height, width, generator=generator)
    coarse = torch.randn(count, channels, 5, 5, generator=generator)
    smooth = F.interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
    images[1::2] = smooth[1::2]
    return images
