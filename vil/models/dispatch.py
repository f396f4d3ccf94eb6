"""Dispatch of blocks to the fused kernels of vil/kernels/block, and of the embedding to vil/kernels/embedding.

A block or embedding runs fused if the kernels compute the same function as its modules. Otherwise the modules run as
ordinary PyTorch code.

    fusible        decorate a block's forward so that the block runs fused if the kernels support the block
    run_blocks     run a sequence of blocks, each fused if the kernels support the block
    run_embedding  embed images by the fused kernels, or return None if the kernels do not support the call
    register       declare a mixer that the fused kernels support
    set_fused      enable or disable the fused kernels; the environment variable VIL_FUSED=0 disables them at import
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import DropPath
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook

from ..kernels.block.fused import fused_operator
from ..kernels.block.lines import Lines
from ..kernels.block.weights import BlockWeights, DirectionWeights, Options
from ..kernels.embedding import embed_op
from ..kernels.embedding.embed_op import EmbeddingWeights
from .tokens import grid_of

_fused = os.environ.get("VIL_FUSED") != "0"
_classes: dict[type, list[type]] = {}  # supported mixer class -> expected classes of `modules_of(block)`


def set_fused(enable: bool) -> None:
    """Enable (the default) or disable the fused kernels of blocks and of the embedding, for debugging.

    Compiled models are recompiled at the next call. Captured CUDA graphs and exported programs do not change.
    The environment variable VIL_FUSED=0 disables the fused kernels at import, also in child processes.
    """
    global _fused
    _fused = enable


def register(mixer: type[nn.Module], classes: Sequence[type]) -> None:
    """Declare that the fused kernels support a block with the class `mixer` if its modules have exactly `classes`."""
    _classes[mixer] = list(classes)


def fusible(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a block's forward to run the fused kernels if they support the block, otherwise `forward`."""

    @functools.wraps(forward)
    def fused_or_forward(block: nn.Module, x_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        fused = fused_block(block, x_BLC)
        if fused is None:
            return forward(block, x_BLC, grid)
        options = options_of(block, fused.weights, lines_of(block, x_BLC, grid))
        return fused.operator(x_BLC, [fused.weights], [options], [path_scale(block, x_BLC)])[0]

    fused_or_forward.fusible = True  # type: ignore[attr-defined]
    return fused_or_forward


def run_blocks(
    blocks: Iterable[nn.Module],
    x_BLC: Tensor,
    grid: tuple[int, int] | None = None,
    class_token_only: bool = False,
    checkpointing: bool = False,
) -> Tensor:
    """Run blocks sequentially and return the residual stream (B, L, C).

    If two consecutive blocks run fused without activation checkpointing, and the kernels of the first block support the
    fused add-norm, the first block also computes the norm of the second block.

    Args:
        blocks: Modules of any class. Modules with hooks and modules other than blocks are called as usual.
        x_BLC: Residual stream.
        grid: Patch grid (h, w), which pooled blocks need unless the grid is square.
        class_token_only: Return only the class token (B, 1, C), if the kernels of the last block support this option.
        checkpointing: Run each block with activation checkpointing.
    """
    modules = list(blocks)
    normed, normed_eps = None, 0.0
    while modules:
        fused = fused_blocks(modules, x_BLC)
        if not fused:
            x_BLC, normed = call(modules.pop(0), x_BLC, grid, checkpointing), None
            continue

        count = len(fused)
        own, modules = modules[:count], modules[count:]
        operator, weights = fused[0].operator, [each.weights for each in fused]
        options = [
            options_of(
                block,
                weights[i],
                lines_of(block, x_BLC, grid),
                class_token_only=class_token_only and not modules and i + 1 == count,
                norm_next=not checkpointing and bool(modules or i + 1 < count),
            )
            for i, block in enumerate(own)
        ]
        scales = [path_scale(block, x_BLC) for block in own]
        if checkpointing:
            for i in range(count):
                each = weights[i : i + 1], options[i : i + 1], scales[i : i + 1]
                # A CUDA graph cannot restore the RNG state, and need not, because `operator` samples no random numbers.
                x_BLC, _ = checkpoint(operator, x_BLC, *each, preserve_rng_state=False)
        else:
            given = normed if options[0].eps == normed_eps else None
            x_BLC, normed = operator(x_BLC, weights, options, scales, given)
            normed_eps = options[0].eps
    return x_BLC


def run_embedding(
    images_B3HW: Tensor, patch_embed: Any, classes: Sequence[type], cls_token: Tensor, pos_embed: Tensor
) -> Tensor | None:
    """Return the tokens (B, L, C) of images by the fused kernels, or None if PyTorch code must run.

    The kernels run if the image size is that of the model, patches do not overlap, the types of `patch_embed` and its
    projection are exactly `classes`, neither module has hooks, and `embed_op.fits` returns True.
    """
    if not _fused or not isinstance(images_B3HW, Tensor) or not embed_op.runs_kernels(images_B3HW):
        return None
    proj: Any = patch_embed._modules.get("proj")
    if [type(patch_embed), type(proj)] != classes or has_hooks(patch_embed, proj) or proj.stride != proj.kernel_size:
        return None
    if images_B3HW.shape[1:] != (proj.in_channels, *patch_embed.img_size):
        return None
    weights = EmbeddingWeights(proj.weight, proj.bias, cls_token, pos_embed)
    return embed_op.embed(images_B3HW, weights) if embed_op.fits(images_B3HW, weights) else None


def fused_blocks(modules: Sequence[nn.Module], x_BLC: Tensor) -> list["FusedBlock"]:
    """Return the fused operators and the weights of the modules at the start of the sequence that run fused together.

    The list ends before a module that must run unfused, or whose operator or eps differs from the first module's. All
    modules are checked before the first module runs, because on a CPU, matrix products between the checks would evict
    the checks' code from the caches.
    """
    found: list[FusedBlock] = []
    for block in modules:
        fused = fused_block(block, x_BLC) if only_runs_forward(block) else None
        if fused is None:
            break
        if found and (fused.operator is not found[0].operator or eps_of(block) != eps_of(modules[0])):
            break
        found.append(fused)
    return found


def eps_of(block: nn.Module) -> float:
    modules: dict[str, Any] = block._modules
    return modules["norm"].eps


def only_runs_forward(block: nn.Module) -> bool:
    """Return whether the module has a `fusible` forward and no hooks."""
    return getattr(type(block).forward, "fusible", False) and not has_hooks(block)


def call(block: nn.Module, x_BLC: Tensor, grid: tuple[int, int] | None, checkpointing: bool) -> Tensor:
    """Call a module with the residual stream. Pooled blocks also get the patch grid."""
    keywords: dict[str, Any] = {} if getattr(block, "pool", None) is None else {"grid": grid}
    return checkpoint(block, x_BLC, **keywords) if checkpointing else block(x_BLC, **keywords)


class FusedBlock(NamedTuple):
    """Fused operator for a block, together with the block's weights.

    Attributes:
        operator: Function with the signature of `vil.kernels.block.block_op.run_blocks`.
        weights: Weights of the block.
    """

    operator: Callable
    weights: BlockWeights


def fused_block(block: nn.Module, x_BLC: Tensor) -> FusedBlock | None:
    """Return the fused operator for a block and the block's weights, or None if the block must run unfused.

    A block can run fused if the fused kernels are enabled, no module was replaced or has hooks, and `fused_operator`
    supports the weights and the input, which must be on an NVIDIA GPU, or on a CPU in fp32.
    """
    if not _fused or not isinstance(x_BLC, Tensor):
        return None
    weights = weights_as_built(block)
    if weights is None:
        return None
    operator = fused_operator(x_BLC, weights)
    return None if operator is None else FusedBlock(operator, weights)


def weights_as_built(block: nn.Module) -> BlockWeights | None:
    """Return the block's weights, or None if a module was replaced, has hooks, or has unsupported parameters.

    Parameters of the original modules can be missing, because FSDP version 1 replaces them with plain tensors.
    """
    modules: dict[str, Any] = block._modules  # reading _modules is faster than nn.Module.__getattr__
    mixer, drop_path = modules["mixer"], modules["drop_path"]
    if type(mixer) not in _classes or type(drop_path) not in (DropPath, nn.Identity) or mixer._parameters:
        return None

    parts = modules_of(block)
    if [type(part) for part in parts] != _classes[type(mixer)] or has_hooks(drop_path, *parts):
        return None

    norm, _, in_proj, _, out_proj, *directions = [part._parameters for part in parts]
    try:
        first, second = direction_weights(*directions[:4]), direction_weights(*directions[4:])
        if first is None or second is None or in_proj["bias"] is not None or out_proj["bias"] is not None:
            return None
        return BlockWeights(norm["weight"], in_proj["weight"], out_proj["weight"], (first, second))
    except KeyError:  # a parameter is missing
        return None


def modules_of(block: nn.Module) -> list[Any]:
    """List a block's norm, mixer and modules of the mixer, then each direction followed by the direction's modules."""
    modules: dict[str, Any] = block._modules
    mixer = modules["mixer"]
    parts = [modules["norm"], mixer, *mixer._modules.values()]
    for direction in mixer._modules["directions"]._modules.values():
        parts += [direction, *direction._modules.values()]
    return parts


def direction_weights(own: dict, conv: dict, x_proj: dict, step_proj: dict) -> DirectionWeights | None:
    """Return a direction's weights, or None if the direction has parameters that the kernels do not support."""
    if x_proj["bias"] is not None or len(own) > 1 + ("A_log" in own):
        return None
    return DirectionWeights(
        conv["weight"],
        conv["bias"],
        x_proj["weight"],
        step_proj["weight"],
        step_proj["bias"],
        own["skip"],
        own.get("A_log"),
    )


def has_hooks(*modules: nn.Module) -> bool:
    """Return whether any module has hooks or a `forward` replaced on the instance, or global hooks are registered."""
    return any_global_hook() or any([  # noqa: C419  a list is faster than a generator
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        for own in [module.__dict__ for module in modules]
    ])  # fmt: skip


def lines_of(block: nn.Module, x_BLC: Tensor, grid: tuple[int, int] | None) -> Lines | None:
    """Return the rows or columns of patches that a pooled block averages, or None for a block without pooling."""
    if block.pool is None:
        return None
    h, w = grid_of(x_BLC.shape[1], grid)
    return Lines.of(h, w, columns=block.pool == "columns")


def options_of(
    block: nn.Module,
    weights: BlockWeights,
    lines: Lines | None = None,
    class_token_only: bool = False,
    norm_next: bool = False,
) -> Options:
    """Return the options of the fused operator for a block.

    The operator's matrix products run in the autocast dtype if autocast is enabled, otherwise in the weights' dtype.
    """
    modules: dict[str, Any] = block._modules
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weights.norm.dtype
    return Options(modules["mixer"].recurrence, modules["norm"].eps, dtype, class_token_only, norm_next, lines)


def path_scale(block: nn.Module, x_BLC: Tensor) -> Tensor | None:
    """Sample each image's stochastic-depth factor, which is 0 or 1 / (1 - rate) by default, like timm's DropPath.

    Return None if the block has no DropPath, or the DropPath is in eval mode.
    """
    drop: Any = block._modules["drop_path"]
    if not isinstance(drop, DropPath) or not drop.training:
        return None
    if not 0 < drop.drop_prob < 1 or not drop.scale_by_keep:
        return drop(x_BLC.new_ones(x_BLC.shape[0]))
    keep = 1 - drop.drop_prob
    # `bernoulli_` and `div_` compute the same as timm's DropPath in half the host time.
    return x_BLC.new_empty(x_BLC.shape[0]).bernoulli_(keep).div_(keep)
