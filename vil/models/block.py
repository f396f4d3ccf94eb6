"""Bidirectional state-space block: Vision Mamba's "v2" block with Longhorn's or Mamba's recurrence.

Dimension letters in the suffixes of tensor names:

    B batch    L tokens    C model width    D inner width    N states of a channel    R rank of the step projection
    2 directions, stacked in this order: first token to last, last token to first
    In a pooled block: h, w grid of patches    r rows of the grid, or columns    S = r + 1 pooled tokens

On an NVIDIA GPU, a forward pass runs through `VisionLonghorn.forward` and `run_blocks`, then through `block_op.block`,
`_Block.forward` and the planned forward of vil/kernels/block, then through `Plan.__call__` of vil/kernels/cuda, whose
steps launch the kernels.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook

from ..kernels import longhorn_scan, selective_scan
from ..kernels.block.fused import fused_operator
from ..kernels.block.lines import Lines
from ..kernels.block.weights import BlockWeights, DirectionWeights, Options


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in fp32; the output has the weight's dtype."""

    def forward(self, x_BLC: Tensor) -> Tensor:
        h_BLC = F.rms_norm(x_BLC, self.normalized_shape, self.weight.to(x_BLC.dtype), self.eps)
        return h_BLC.to(self.weight.dtype)


def middle_token(x_BLC: Tensor) -> Tensor:
    middle = (x_BLC.shape[1] - 1) // 2
    return x_BLC[:, middle : middle + 1]


def insert_class_token(patches_BnC: Tensor, token_B1C: Tensor) -> Tensor:
    middle = patches_BnC.shape[1] // 2
    before, behind = patches_BnC.split([middle, patches_BnC.shape[1] - middle], dim=1)
    return torch.cat((before, token_B1C, behind), dim=1)


def split_class_token(x_BLC: Tensor) -> tuple[Tensor, Tensor]:
    """Split tokens (B, L, C) into patches (B, L - 1, C) and class token (B, 1, C); inverts `insert_class_token`."""
    middle = (x_BLC.shape[1] - 1) // 2
    return torch.cat((x_BLC[:, :middle], x_BLC[:, middle + 1 :]), dim=1), middle_token(x_BLC)


def transpose_grid(x_BLC: Tensor, h: int, w: int) -> Tensor:
    """Reorder the patches of an (h, w) grid from row-major to column-major order; the class token stays in the
    middle.
    """
    patches_BnC, token_B1C = split_class_token(x_BLC)
    return insert_class_token(patches_BnC.unflatten(1, (h, w)).transpose(1, 2).flatten(1, 2), token_B1C)


def row_means(v_BLD: Tensor, rows: int) -> Tensor:
    """Return the mean of each row of patches, with the class token inserted at index rows // 2: (B, S, D)."""
    patches_BnD, token_B1D = split_class_token(v_BLD)
    return insert_class_token(patches_BnD.unflatten(1, (rows, -1)).mean(2), token_B1D)


def repeat_rows(y_BSD: Tensor, length: int) -> Tensor:
    """Repeat each row's token for the row's `length` patches: (B, S, D) to (B, L, D)."""
    rows_BrD, token_B1D = split_class_token(y_BSD)
    return insert_class_token(rows_BrD.unsqueeze(2).expand(-1, -1, length, -1).flatten(1, 2), token_B1D)


class TokenConv1d(nn.Conv1d):
    """Depthwise convolution of tokens (B, L, D), causal in the order in which its direction reads the tokens."""

    def __init__(self, dim: int, width: int, *, reverse: bool, device=None, dtype=None):
        super().__init__(dim, dim, width, groups=dim, device=device, dtype=dtype)
        self.reverse = reverse

    def forward(self, u_BLD: Tensor) -> Tensor:
        lookback = self.kernel_size[0] - 1
        weight = self.weight.flip(-1) if self.reverse else self.weight
        if torch.compiler.is_dynamo_compiling() and u_BLD.is_cpu:
            return sum_of_taps(u_BLD, weight, self.bias, self.reverse)
        # A 2d convolution of height 1 accepts channels-last tokens without a transpose, 3 to 6 times faster on CPUs.
        u_BD1L = u_BLD.transpose(1, 2).unsqueeze(2)
        v_BD1L = F.conv2d(u_BD1L, weight.unsqueeze(1), self.bias, padding=(0, lookback), groups=self.groups)
        return v_BD1L.squeeze(2).transpose(1, 2).narrow(1, lookback if self.reverse else 0, u_BLD.shape[1])


@torch.jit.unused
def sum_of_taps(u_BLD: Tensor, weight_D1K: Tensor, bias_D: Tensor | None, reverse: bool) -> Tensor:
    """Compute the convolution as a sum of shifted products.

    On CPUs, TorchInductor fails to compile a second convolution with a dynamic batch size.
    """
    lookback, length = weight_D1K.shape[-1] - 1, u_BLD.shape[1]
    padded = F.pad(u_BLD, (0, 0, 0, lookback) if reverse else (0, 0, lookback, 0))
    taps = weight_D1K.squeeze(1).to(u_BLD.dtype).unbind(-1)
    parts = [tap_D * padded.narrow(1, i, length) for i, tap_D in enumerate(taps)]
    return sum(parts[1:], parts[0]) if bias_D is None else sum(parts, bias_D.to(u_BLD.dtype))


class StepProjection(nn.Linear):
    """Linear layer whose bias is added by the recurrence. Quantization skips this class and so keeps the bias."""

    def forward(self, step_BLR: Tensor) -> Tensor:
        return F.linear(step_BLR, self.weight)


class LonghornDirection(nn.Module):
    """Weights of one direction of a mixer: convolution, projections of each token, and skip connection."""

    def __init__(
        self, dim: int, state_size: int, rank: int, conv_width: int, *, reverse: bool, device=None, dtype=None
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.split = (rank, state_size, state_size)
        self.conv1d = TokenConv1d(dim, conv_width, reverse=reverse, **dd)
        self.x_proj = nn.Linear(dim, rank + 2 * state_size, bias=False, **dd)
        self.step_proj = StepProjection(rank, dim, **dd)
        self.skip = nn.Parameter(torch.empty(dim, **dd))
        LonghornDirection.reset_parameters(self)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.step_proj.bias)
        nn.init.ones_(self.skip)

    def forward(self, u_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the recurrence: token v, step logits without their bias, key k and query q."""
        v_BLD = self.convolve(u_BLD)
        return v_BLD, *self.project(v_BLD)

    def convolve(self, u_BLD: Tensor) -> Tensor:
        return F.silu(self.conv1d(u_BLD))

    def project(self, v_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step_BLR, k_BLN, q_BLN = self.x_proj(v_BLD).split(self.split, dim=-1)
        return self.step_proj(step_BLR), k_BLN, q_BLN

    def step_bias(self) -> Tensor:
        """Return the bias that the recurrence adds to the step logits; zeros if `step_proj` was replaced by another
        linear layer.
        """
        if not torch.jit.is_scripting():
            step_proj = self.step_proj
            if isinstance(step_proj, nn.Linear) and not isinstance(step_proj, StepProjection):
                return torch.zeros_like(self.skip)
        return self.step_proj.bias


class MambaDirection(LonghornDirection):
    """`LonghornDirection` with the decay rates of Mamba's states, and Mamba's initialization (Gu & Dao, 2023, section
    3.6).
    """

    def __init__(
        self, dim: int, state_size: int, rank: int, conv_width: int, *, reverse: bool, device=None, dtype=None
    ):
        super().__init__(dim, state_size, rank, conv_width, reverse=reverse, device=device, dtype=dtype)
        self.A_log = nn.Parameter(torch.empty(dim, state_size, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        dt_D = torch.empty_like(self.skip).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.step_proj.bias.copy_(dt_D + torch.log(-torch.expm1(-dt_D)))  # inverse softplus of dt
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1, device=self.A_log.device).log())


class BidirectionalMixer(nn.Module):
    """Token mixer that averages a forward and a backward recurrence over an image's tokens.

    Args:
        dim: Model width C.
        expand: Inner width D as a multiple of C.
        state_size: Number of states N of a channel.
        conv_width: Kernel size of the convolution before the recurrence, in tokens.
        pool: If None, the recurrence reads every token. If "rows" or "columns", the recurrence reads the means of the
            rows or columns of patches in order, and the class token in the middle (the pooling of Kapse et al., 2025).
    """

    direction: type[LonghornDirection]
    recurrence: str  # the recurrence's name in the fused kernels

    def __init__(
        self,
        dim: int,
        expand: int = 2,
        state_size: int = 16,
        conv_width: int = 4,
        pool: str | None = None,
        device=None,
        dtype=None,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.pool = pool
        inner, rank = expand * dim, math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False, **dd)
        directions = nn.ModuleList(
            [self.direction(inner, state_size, rank, conv_width, reverse=reverse, **dd) for reverse in (False, True)]
        )
        self.directions: Sequence[LonghornDirection] = cast(Any, directions)  # nn.ModuleList has no type parameter
        self.out_proj = nn.Linear(inner, dim, bias=False, **dd)

    # Fused kernels replace this method of LonghornMixer and MambaMixer; set VIL_FUSED=0 to see the effect of an edit.
    def forward(self, h_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Mix tokens (B, L, C). A pooled mixer needs the patch grid (h, w), unless the grid is square."""
        if self.pool is not None:
            return self.forward_pooled(h_BLC, grid_of(h_BLC.shape[1], grid))
        u_BLD, z_BLD = self.in_proj(h_BLC).chunk(2, dim=-1)
        forward, backward = self.directions[0](u_BLD), self.directions[1](u_BLD)
        v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN = [torch.stack(pair) for pair in zip(forward, backward)]
        y_2BLD = self.scan(v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN)
        return self.out_proj(y_2BLD.mean(0) * F.silu(z_BLD))

    def forward_pooled(self, h_BLC: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix tokens with a recurrence over rows or columns; the convolution reads patches in the same order."""
        h, w = grid
        rows, length = (w, h) if self.pool == "columns" else (h, w)
        if self.pool == "columns":
            h_BLC = transpose_grid(h_BLC, h, w)
        u_BLD, z_BLD = self.in_proj(h_BLC).chunk(2, dim=-1)
        v_2BLD = torch.stack([direction.convolve(u_BLD) for direction in self.directions])
        means_2BSD = torch.stack([row_means(v_2BLD[g], rows) for g in range(2)])
        read = [direction.project(means_2BSD[g]) for g, direction in enumerate(self.directions)]
        step_logits_2BSD, k_2BSN, q_2BSN = [torch.stack(pair) for pair in zip(read[0], read[1])]
        # a patch reads the output of its row, but the skip connection adds its own v
        y_2BSD = self.scan(means_2BSD, step_logits_2BSD, k_2BSN, q_2BSN, skip=False)
        y_BLD = repeat_rows(y_2BSD.mean(0), length) + (self.skip()[:, None, None] * v_2BLD).mean(0)
        out_BLC = self.out_proj(y_BLD.to(z_BLD.dtype) * F.silu(z_BLD))
        return transpose_grid(out_BLC, w, h) if self.pool == "columns" else out_BLC

    def scan(
        self, v_2BLD: Tensor, step_logits_2BLD: Tensor, k_2BLN: Tensor, q_2BLN: Tensor, skip: bool = True
    ) -> Tensor:
        """Run the recurrence in both directions and return y_2BLD, with the skip connection if `skip`."""
        raise NotImplementedError

    def skip(self) -> Tensor:
        return torch.stack([direction.skip for direction in self.directions])

    def step_bias(self) -> Tensor:
        return torch.stack([direction.step_bias() for direction in self.directions])


class LonghornMixer(BidirectionalMixer):
    """Bidirectional mixer with Longhorn's online associative recall (Liu et al., 2024)."""

    direction = LonghornDirection
    recurrence = "longhorn"

    def scan(
        self, v_2BLD: Tensor, step_logits_2BLD: Tensor, k_2BLN: Tensor, q_2BLN: Tensor, skip: bool = True
    ) -> Tensor:
        skip_2D = self.skip() if skip else None
        return bidirectional_longhorn_scan(v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN, skip_2D, self.step_bias())


class Longhorn(nn.Module):
    """Longhorn as a layer of any network, from tokens (B, L, C) to tokens (B, L, C), causal or bidirectional.

    The layer consists of PyTorch operators and the scan; only the scan is fused. A bidirectional layer can load the
    weights of a block's mixer.

    Args:
        d_model: Width C.
        bidirectional: Read tokens from both ends; otherwise a token sees only itself and earlier tokens.
        expand: Inner width D as a multiple of C.
        state_size: Number of states N of a channel.
        conv_width: Kernel size of the convolution before the recurrence, in tokens.
    """

    def __init__(
        self,
        d_model: int,
        bidirectional: bool = False,
        expand: int = 2,
        state_size: int = 16,
        conv_width: int = 4,
        device=None,
        dtype=None,
    ):
        super().__init__()
        mixer = LonghornMixer(d_model, expand, state_size, conv_width, device=device, dtype=dtype)
        self.in_proj, self.out_proj = mixer.in_proj, mixer.out_proj
        self.directions = mixer.directions if bidirectional else mixer.directions[:1]

    def forward(self, x_BLC: Tensor) -> Tensor:
        u_BLD, z_BLD = self.in_proj(x_BLC).chunk(2, dim=-1)
        outputs = []
        for direction in self.directions:
            v_BLD, step_logits_BLD, k_BLN, q_BLN = direction(u_BLD)
            skip, step_bias, reverse = direction.skip, direction.step_bias(), direction.conv1d.reverse
            outputs.append(longhorn_scan(v_BLD, step_logits_BLD, k_BLN, q_BLN, skip, step_bias, reverse=reverse))
        return self.out_proj(torch.stack(outputs).mean(0) * F.silu(z_BLD))


class MambaMixer(BidirectionalMixer):
    """Bidirectional mixer with Mamba's selective state space (Gu & Dao, 2023), as in Vision Mamba (Zhu et al.,
    2024).
    """

    direction = MambaDirection
    recurrence = "selective"
    if TYPE_CHECKING:  # TorchScript would compile the annotation
        directions: Sequence[MambaDirection]

    def scan(
        self, v_2BLD: Tensor, step_logits_2BLD: Tensor, k_2BLN: Tensor, q_2BLN: Tensor, skip: bool = True
    ) -> Tensor:
        A_2DN = -at_least_fp32(torch.stack([direction.A_log for direction in self.directions])).exp()
        skip_2D = self.skip() if skip else None
        return bidirectional_selective_scan(v_2BLD, step_logits_2BLD, A_2DN, k_2BLN, q_2BLN, skip_2D, self.step_bias())


@torch.jit.ignore
def grid_of(L: int, grid: tuple[int, int] | None) -> tuple[int, int]:
    """Return the patch grid (h, w) of L tokens; a square grid if `grid` is None.

    Raises:
        ValueError: L is not h w + 1, the number of patches and a class token.
    """
    h, w = (math.isqrt(L - 1),) * 2 if grid is None else grid
    if h * w + 1 != L:
        need = f"{h * w + 1} for the grid {(h, w)}" if grid else "a square number plus 1 if no grid is given"
        raise ValueError(f"number of tokens of a pooled block must be {need}, got {L}: pass the patches' grid=(h, w)")
    return h, w


# torch.fx does not trace into these functions: they become single nodes of its graph.
for _name in ("at_least_fp32", "bidirectional_longhorn_scan", "bidirectional_selective_scan", "grid_of"):
    torch.fx.wrap(_name)


@torch.jit.ignore
def bidirectional_longhorn_scan(
    v_2BLD: Tensor, logits_2BLD: Tensor, k_2BLN: Tensor, q_2BLN: Tensor, skip_2D: Tensor | None, bias_2D: Tensor
) -> Tensor:
    return longhorn_scan(v_2BLD, logits_2BLD, k_2BLN, q_2BLN, skip_2D, bias_2D, reverse=(False, True))


@torch.jit.ignore
def bidirectional_selective_scan(
    v_2BLD: Tensor, logits_2BLD: Tensor, A_2DN: Tensor, b_2BLN: Tensor, c_2BLN: Tensor, skip_2D: Tensor | None,
    bias_2D: Tensor,
) -> Tensor:  # fmt: skip
    return selective_scan(v_2BLD, logits_2BLD, A_2DN, b_2BLN, c_2BLN, skip_2D, bias_2D, reverse=(False, True))


class Block(nn.Module):
    """Pre-norm residual block: an fp32 residual stream (B, L, C) and a mixer in the dtype of its weights."""

    def __init__(
        self,
        dim: int,
        mixer: type[BidirectionalMixer],
        drop_path: float = 0.0,
        pool: str | None = None,
        device=None,
        dtype=None,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.norm = RMSNorm(dim, eps=1e-5, **dd)
        self.mixer = mixer(dim, **dd) if pool is None else mixer(dim, pool=pool, **dd)
        self.pool = pool
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x_BLC: Tensor, class_token_only: bool = False, grid: tuple[int, int] | None = None) -> Tensor:
        """Return all tokens (B, L, C), or only the class token (B, 1, C) if `class_token_only`.

        With `class_token_only`, each direction of the fused kernels reads only half of the tokens. A pooled block needs
        the patch grid (h, w), unless the grid is square.
        """
        if not torch.jit.is_scripting():  # TorchScript skips a branch only if this is its whole condition
            fused = fused_block(self, x_BLC)
            if fused is not None:
                run, weights = fused
                how = options(self, weights, class_token_only, lines=lines_of(self, x_BLC, grid))
                x_BLC = run(x_BLC, weights, how, path_scale(self, x_BLC))[0]
                return middle_token(x_BLC) if class_token_only else x_BLC
        h_BLC = self.norm(x_BLC)
        h_BLC = self.mixer(h_BLC) if self.pool is None else self.mixer(h_BLC, grid)
        x_BLC = x_BLC + self.drop_path(h_BLC)
        return middle_token(x_BLC) if class_token_only else x_BLC


def run_blocks(
    blocks: nn.Module,
    x_BLC: Tensor,
    class_token_only: bool = False,
    checkpointing: bool = False,
    grid: tuple[int, int] | None = None,
    called: bool = False,
) -> Tensor:
    """Run the blocks sequentially and return all tokens (B, L, C), or only the class token (B, 1, C).

    If two neighbouring blocks are fused and no hook sees the tokens between them, the first block also computes the
    second block's norm.

    Args:
        blocks: nn.Sequential or `Blocks`. If `blocks` has hooks or is of another class, it is called and returns all
            tokens.
        x_BLC: Residual stream.
        class_token_only: Whether to return only the class token.
        checkpointing: Whether to run the blocks with activation checkpointing.
        grid: Patch grid (h, w) for pooled blocks.
        called: Whether the module `blocks` was called already, so that its hooks have run.
    """
    if not called and (type(blocks) not in (nn.Sequential, Blocks) or watched(blocks)):
        return blocks(x_BLC, checkpointing, grid) if isinstance(blocks, Blocks) else blocks(x_BLC)
    modules: list[Any] = list(cast(nn.Sequential, blocks))
    fused = [fused_block(m, x_BLC) if type(m) is Block and not watched(m) else None for m in modules]
    normed, dtype = None, x_BLC.dtype
    for i, (block, found) in enumerate(zip(modules, fused)):
        last = i + 1 == len(modules)
        only = class_token_only and last and found is not None
        if checkpointing:
            x_BLC = checkpointed(block, x_BLC, only, grid)
        elif found is None or x_BLC.dtype != dtype:  # a custom block returned another dtype
            x_BLC, normed = block(x_BLC, **grid_for(block, grid)), None
        else:
            run, weights = found
            assert isinstance(block, Block)
            norm_next = not last and fused[i + 1] is not None and modules[i + 1].norm.eps == block.norm.eps
            how = options(block, weights, only, norm_next, lines_of(block, x_BLC, grid))
            x_BLC, normed = run(x_BLC, weights, how, path_scale(block, x_BLC), normed)
    return middle_token(x_BLC) if class_token_only else x_BLC


class Blocks(nn.Sequential):
    """Sequential container of a model's blocks, run by `run_blocks`. Calling the container runs its hooks."""

    @torch.jit.unused
    def forward(self, x_BLC: Tensor, checkpointing: bool = False, grid: tuple[int, int] | None = None) -> Tensor:
        return run_blocks(self, x_BLC, False, checkpointing, grid, called=True)


def checkpointed(
    block: nn.Module, x_BLC: Tensor, class_token_only: bool = False, grid: tuple[int, int] | None = None
) -> Tensor:
    """Run the block with activation checkpointing.

    The recomputation of a fused block samples no random numbers, because a CUDA graph could not restore the RNG state
    of forward.
    """
    found = fused_block(block, x_BLC) if type(block) is Block and not watched(block) else None
    if found is None:
        arguments: dict[str, Any] = {"class_token_only": True} if class_token_only else {}
        return checkpoint(block, x_BLC, **arguments, **grid_for(block, grid))
    assert isinstance(block, Block)
    run, weights = found
    how = options(block, weights, class_token_only, lines=lines_of(block, x_BLC, grid))
    return checkpoint(run, x_BLC, weights, how, path_scale(block, x_BLC), preserve_rng_state=False)[0]


def grid_for(block: nn.Module, grid: tuple[int, int] | None) -> dict[str, Any]:
    """Return the grid as a keyword argument for a pooled block; no arguments for other blocks."""
    return {} if grid is None or getattr(block, "pool", None) is None else {"grid": grid}


KNOWN_MIXERS = (LonghornMixer, MambaMixer)  # the mixers that kernels, pooled models, vil.export and vil.viz support
_DIRECTION: list[type] = [TokenConv1d, nn.Linear, StepProjection]
# for each mixer with fused kernels, the types of a block's submodules in order
FUSED: dict[type, list[type]] = {
    mixer: [RMSNorm, mixer, nn.Linear, nn.ModuleList, nn.Linear, *2 * [mixer.direction, *_DIRECTION]]
    for mixer in KNOWN_MIXERS
}
_fused = os.environ.get("VIL_FUSED") != "0"


def set_fused(enable: bool) -> None:
    """Enable (the default) or disable the fused kernels of blocks, for debugging; compiled graphs do not see the
    switch.

    VIL_FUSED=0 in the environment disables the fused kernels from the start, also in child processes.
    """
    global _fused
    _fused = enable


def fused_block(block: Block, x_BLC: Tensor) -> tuple[Callable, BlockWeights] | None:
    """Return the fused operator for this block and its weights, or None if the block must run unfused.

    A block can run fused if all its submodules are as built, whatever the values of their weights, and `fused_operator`
    supports the tensor's device: an NVIDIA GPU, or a CPU in fp32.
    """
    if not _fused or not isinstance(x_BLC, Tensor):
        return None
    weights = weights_as_built(block)
    if weights is None:
        return None
    run = fused_operator(x_BLC, weights, block.pool is not None)
    return None if run is None else (run, weights)


def weights_as_built(block: Block) -> BlockWeights | None:
    """Return the block's weights, or None if a submodule was replaced, has hooks, or has a parameter unknown to
    kernels.
    """
    modules: dict[str, Any] = block._modules
    norm, mixer, drop_path = modules["norm"], modules["mixer"], modules["drop_path"]
    if type(mixer) not in FUSED or type(drop_path) not in (DropPath, nn.Identity) or mixer._parameters:
        return None
    parts = [norm, mixer, *mixer._modules.values()]
    for direction in mixer._modules["directions"]._modules.values():
        parts += [direction, *direction._modules.values()]
    if [type(part) for part in parts] != FUSED[type(mixer)] or watched(drop_path, *parts):
        return None
    norm, _, in_proj, _, out_proj, *both = [part._parameters for part in parts]
    first, second = _direction_weights(*both[:4]), _direction_weights(*both[4:])
    if first is None or second is None or in_proj["bias"] is not None or out_proj["bias"] is not None:
        return None
    return BlockWeights(norm["weight"], in_proj["weight"], out_proj["weight"], (first, second))


def _direction_weights(own: dict, conv: dict, x_proj: dict, step_proj: dict) -> DirectionWeights | None:
    if x_proj["bias"] is not None or len(own) > 1 + ("A_log" in own):
        return None
    return DirectionWeights(
        conv["weight"], conv["bias"], x_proj["weight"], step_proj["weight"], step_proj["bias"], own["skip"],
        own.get("A_log"),
    )  # fmt: skip


def watched(*modules: nn.Module) -> bool:
    """Return whether one of the modules has hooks registered or an overridden forward."""
    return any_global_hook() or any([  # noqa: C419  a list is faster
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        for own in [module.__dict__ for module in modules]
    ])  # fmt: skip


def lines_of(block: Block, x_BLC: Tensor, grid: tuple[int, int] | None) -> Lines | None:
    """Return the rows or columns of patches whose means a pooled block reads; None for other blocks."""
    pool = block.pool
    if pool is None:
        return None
    h, w = grid_of(x_BLC.shape[1], grid)
    return Lines.of(h, w, pool == "columns")


def options(
    block: Block, weights: BlockWeights, class_token_only: bool, norm_next: bool = False, lines: Lines | None = None
) -> Options:
    """Return the operator's options for the block: products run in autocast's dtype if enabled, otherwise in the
    weights'.
    """
    autocast = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else weights.norm.dtype
    class_token_only = class_token_only and lines is None  # pooled kernels compute all tokens
    modules: dict[str, Any] = block._modules
    recurrence, eps = modules["mixer"].recurrence, modules["norm"].eps
    return Options(recurrence, eps, dtype, class_token_only, norm_next, lines)


def path_scale(block: Block, x_BLC: Tensor) -> Tensor | None:
    """Sample the stochastic-depth factor of each image, 0 or 1 / (1 - rate); None if every factor is 1."""
    if not block.training or not isinstance(drop := block._modules["drop_path"], DropPath):
        return None
    if not 0 < drop.drop_prob < 1 or not drop.scale_by_keep:
        return drop(x_BLC.new_ones(x_BLC.shape[0]))
    keep = 1 - drop.drop_prob
    return x_BLC.new_empty(x_BLC.shape[0]).bernoulli_(keep).div_(keep)  # equal to DropPath, in half of the host time
