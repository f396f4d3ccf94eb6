"""Exportable copy of a model, whose mixers use only standard PyTorch operators.

Dimension letters:

    G = 2 directions    B batch    L tokens    C model width    D inner width    N states of a channel
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan_op
from torch.export import Dim, ExportedProgram

from ..data_config import input_size
from ..kernels.block.lines import Lines
from ..models.block import KNOWN_MIXERS, BidirectionalMixer, RMSNorm
from ..models.tokens import grid_of, row_means


class ExportError(RuntimeError):
    """The model cannot be exported as requested. No file was written."""


class Exported(nn.Module):
    """Copy of a model for export: fp32, on the CPU, in eval mode, with `mix` as the mixers' forward.

    Mixers of other classes are exported with their own forward.

    Args:
        model: A timm model.
        features: Indices of blocks whose feature maps are additional outputs.

    Raises:
        ExportError: The model has no such blocks.
    """

    def __init__(self, model: nn.Module, features: Sequence[int] = ()):
        super().__init__()
        if not hasattr(model, "num_classes"):
            raise ExportError(
                f"model must be a timm model with num_classes, got {type(model).__name__}: export the whole model and "
                "set features=[INDEX, ...] for feature maps"
            )
        self.model = as_evaluated(model)
        self.features = sorted(set(features))
        self.input_size = input_size(model)
        known = range(len(getattr(self.model, "feature_info", ())))
        if unknown := [number for number in self.features if number not in known]:
            raise ExportError(f"features must be block indices from 0 to {len(known) - 1}, got {unknown}")
        self.outputs = ["logits" if model.num_classes else "embedding", *(f"features_{n}" for n in self.features)]
        norms: list[Any] = [module for module in self.model.modules() if isinstance(module, RMSNorm)]
        for norm in norms:
            norm.forward = functools.partial(rms_norm, norm)
        mixers: list[Any] = [module for module in self.model.modules() if type(module) in KNOWN_MIXERS]
        for mixer in mixers:
            # `mix` flips the tokens of the backward direction, unless the mixer is pooled
            mixer.directions[1].conv1d.reverse = mixer.pool is not None
            mixer.forward = functools.partial(mix, mixer)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return outputs_of(self.model, self.features, images)

    def program(self) -> ExportedProgram:
        """Return the torch.export program for a dynamic batch size."""
        return program_of(self, pictures(2, self.input_size))  # torch.export specializes on a batch size of 1


@torch.no_grad()
def program_of(module: nn.Module, batch: Tensor, *weights: list[Tensor]) -> ExportedProgram:
    """Return the torch.export program of a module for a dynamic batch size.

    Raises:
        ExportError: The graph contains an operator of this package.
    """
    dynamic_shapes = {0: Dim("batch")}, *([None] * len(some) for some in weights)
    program = torch.export.export(module, (batch, *weights), dynamic_shapes=dynamic_shapes, strict=False)
    for part in program.graph_module.modules():
        for node in part.graph.nodes:
            node.meta.pop("stack_trace", None)  # stack traces contain paths of this machine
            if str(node.target).startswith("vil."):
                raise ExportError(
                    f"graph must contain only PyTorch operators, got {node.target}: write the mixer's recurrence with "
                    "PyTorch operators or add it to vil/export/traced.py"
                )
    return program


def as_evaluated(model: nn.Module) -> Any:
    """Return a copy of the model in fp32, on the CPU, in eval mode."""
    return copy.deepcopy(model).cpu().float().eval().requires_grad_(False)


def outputs_of(model: Any, features: Sequence[int], images: Tensor) -> tuple[Tensor, ...]:
    """Return the logits and the feature maps of the blocks with these indices."""
    if not features:
        return (model(images),)
    tokens, maps = model.forward_intermediates(images, indices=list(features))
    return model.forward_head(tokens), *maps


def pictures(count: int, size: tuple[int, int, int]) -> Tensor:
    """Return normalized images (count, C, H, W), alternating between noise and smooth images, which resemble
    photographs.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, *size, generator=generator)
    coarse = torch.randn(count, size[0], 5, 5, generator=generator)
    noise[1::2] = F.interpolate(coarse, size[1:], mode="bicubic", align_corners=False)[1::2]
    return noise


def mix(mixer: BidirectionalMixer, h_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """Run a mixer with token-first tensors around the scan, which saves transposes and flips in the exported graph.

    A pooled mixer runs its recurrence over the rows or columns of the grid (h, w).
    """
    directions: Any = mixer.directions
    if mixer.pool is None:
        u_BLD, z_BLD = (F.linear(h_BLC, weight) for weight in mixer.in_proj.weight.chunk(2))
        read = directions[0].convolve(u_BLD), directions[1].convolve(u_BLD.flip(1))
        y_LGBD, x_LGBD = scan_of(mixer, read)
        forward_BLD, backward_BLD = (y_LGBD + mixer.skip().unsqueeze(1) * x_LGBD).permute(2, 0, 1, 3).unbind(2)
        return mixer.out_proj((forward_BLD + backward_BLD.flip(1)) / 2 * F.silu(z_BLD))
    h, w = grid_of(h_BLC.shape[1], grid)
    lines = Lines.of(h, w, mixer.pool == "columns")
    h_BLC = h_BLC.index_select(1, lines.order()) if lines.columns else h_BLC
    u_BLD, z_BLD = (F.linear(h_BLC, weight) for weight in mixer.in_proj.weight.chunk(2))
    v_BLD, backward_v_BLD = (direction.convolve(u_BLD) for direction in directions)
    read = row_means(v_BLD, lines.number), row_means(backward_v_BLD, lines.number).flip(1)
    forward_BSD, backward_BSD = scan_of(mixer, read)[0].permute(2, 0, 1, 3).unbind(2)
    skipped_BLD = directions[0].skip / 2 * v_BLD + directions[1].skip / 2 * backward_v_BLD
    y_BSD = (forward_BSD + backward_BSD.flip(1)) / 2
    out_BLC = mixer.out_proj((y_BSD.index_select(1, lines.pooled()) + skipped_BLD) * F.silu(z_BLD))
    return out_BLC.index_select(1, Lines.of(w, h, True).order()) if lines.columns else out_BLC


def rms_norm(norm: RMSNorm, x_BLC: Tensor) -> Tensor:
    """Compute RMSNorm in the form that onnxruntime recognizes and fuses into one kernel."""
    return x_BLC / (x_BLC.pow(2).mean(-1, keepdim=True) + cast(float, norm.eps)).sqrt() * norm.weight


def scan_of(mixer: BidirectionalMixer, read: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Run both scans and return y_LGBD without the skip connection, and x_LGBD.

    Args:
        mixer: The mixer.
        read: Inputs (B, L, D) of each direction, in the order in which the direction reads the tokens.
    """
    directions: Any = mixer.directions
    reads = zip(*((v_BLD, *direction.project(v_BLD)) for direction, v_BLD in zip(directions, read)))
    x_LGBD, step_logits_LGBD, k_LGBN, q_LGBN = (torch.stack(pair, dim=2).permute(1, 2, 0, 3) for pair in reads)
    bias_G1D = mixer.step_bias().unsqueeze(1)
    if mixer.recurrence == "longhorn":
        norm_LGB1 = k_LGBN.square().sum(-1, keepdim=True)
        step_LGBD, A_GND = torch.reciprocal(torch.exp(-bias_G1D - step_logits_LGBD) + (1 + norm_LGB1)), None
    else:
        step_LGBD = F.softplus(step_logits_LGBD + bias_G1D)
        A_GND = -torch.stack([direction.A_log for direction in directions]).exp().mT.contiguous()
    return scan_by_steps(x_LGBD, step_LGBD, k_LGBN, q_LGBN, A_GND), x_LGBD


def scan_by_steps(
    x_LGBD: Tensor, step_LGBD: Tensor, k_LGBN: Tensor, q_LGBN: Tensor, A_GND: Tensor | None
) -> Tensor:  # fmt: skip
    """Run the recurrence with PyTorch's scan operator, which becomes `Scan` in ONNX, and return y_LGBD.

    Args:
        x_LGBD: Input tokens of each direction, in the order in which the direction reads the tokens.
        step_LGBD: Longhorn's step size or Mamba's time step.
        k_LGBN: Keys.
        q_LGBN: Queries.
        A_GND: Mamba's A; None for Longhorn.
    """

    S_GBND = x_LGBD.new_zeros(*x_LGBD.shape[1:3], k_LGBN.shape[-1], x_LGBD.shape[-1])
    if A_GND is None:
        step, drive_LGBD, A = _longhorn_step, x_LGBD, []
    else:
        step, drive_LGBD, A = _selective_step, step_LGBD * x_LGBD, [A_GND.unsqueeze(1)]
    tokens = drive_LGBD.unsqueeze(-2), step_LGBD.unsqueeze(-2), k_LGBN.unsqueeze(-1), q_LGBN.unsqueeze(-2)
    # scan_op directly, because its wrapper `scan` compiles, which depends on the state of earlier compilations
    return scan_op(step, [S_GBND], list(tokens), tuple(A))[1].squeeze(-2)


def _longhorn_step(S_GBND, x_GB1D, step_GB1D, k_GBN1, q_GB1N, *_):
    S_GBND = S_GBND + k_GBN1 * step_GB1D * (x_GB1D - k_GBN1 * S_GBND)
    return [S_GBND, q_GB1N @ S_GBND]


def _selective_step(S_GBND, drive_GB1D, step_GB1D, k_GBN1, q_GB1N, A_G1ND):
    S_GBND = torch.exp(A_G1ND * step_GB1D) * S_GBND + k_GBN1 * drive_GB1D
    return [S_GBND, q_GB1N @ S_GBND]
