"""Bidirectional state-space block: Vision Mamba's "v2" block with Longhorn's or Mamba's recurrence.

Classes are ordered from the smallest part to the largest: norm, convolution, direction, mixer, block, sequence of
blocks. The last class, `Longhorn`, is a layer with Longhorn's recurrence for use in other networks.

On CPUs and NVIDIA GPUs, an edit of a method such as `LonghornMixer.scan` or `LonghornDirection.project` does not change
the output of a model, because the fused kernels replace the code of these classes (`vil/models/dispatch.py`). Set the
environment variable VIL_FUSED=0 to run the edited code, or write a subclass, because subclasses always run unfused.

Dimension letters in the suffixes of tensor names:

    B batch    L tokens    C model width    D inner width    N states per channel    R rank of the step projection
    2 directions: forward (first to last token), then backward
    In pooled blocks: h, w patch grid    S = h + 1 row means and class token
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from ..kernels import longhorn_scan, selective_scan
from . import dispatch
from .tokens import grid_of, middle_token, repeat_rows, row_means, transpose_grid


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# torch.fx does not trace into these functions, so each call is a single node of the graph.
for _name in (
    "at_least_fp32",
    "grid_of",
    "longhorn_scan",
    "repeat_rows",
    "row_means",
    "selective_scan",
    "transpose_grid",
):
    torch.fx.wrap(_name)


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in the input's dtype, which is fp32 or fp64 in a block; the output has the weight's dtype."""

    def forward(self, x_BLC: Tensor) -> Tensor:
        h_BLC = F.rms_norm(x_BLC, self.normalized_shape, self.weight.to(x_BLC.dtype), self.eps)
        return h_BLC.to(self.weight.dtype)


class TokenConv1d(nn.Conv1d):
    """Depthwise convolution of tokens (B, L, D), causal from first to last token or, if `reverse`, the other way."""

    def __init__(self, dim: int, width: int, *, reverse: bool, device=None, dtype=None):
        super().__init__(dim, dim, width, groups=dim, device=device, dtype=dtype)
        self.reverse = reverse

    def forward(self, u_BLD: Tensor) -> Tensor:
        lookback = self.kernel_size[0] - 1
        weight = self.weight.flip(-1) if self.reverse else self.weight
        if torch.compiler.is_dynamo_compiling() and u_BLD.is_cpu:
            return sum_of_taps(u_BLD, weight, self.bias, self.reverse)

        # On CPUs, a 2d convolution of height 1 is several times faster than F.conv1d, which copies transposed tokens.
        u_BD1L = u_BLD.transpose(1, 2).unsqueeze(2)
        v_BD1L = F.conv2d(u_BD1L, weight.unsqueeze(1), self.bias, padding=(0, lookback), groups=self.groups)
        return v_BD1L.squeeze(2).transpose(1, 2).narrow(1, lookback if self.reverse else 0, u_BLD.shape[1])


def sum_of_taps(u_BLD: Tensor, weight_D1K: Tensor, bias_D: Tensor | None, reverse: bool) -> Tensor:
    """Compute the depthwise convolution of tokens as a sum of elementwise products of weights and shifted tokens.

    The sum replaces `F.conv2d` in compiled CPU code, because TorchInductor can fail to compile a model that has
    convolutions and a dynamic batch size.
    """
    lookback, length = weight_D1K.shape[-1] - 1, u_BLD.shape[1]
    padded = F.pad(u_BLD, (0, 0, 0, lookback) if reverse else (0, 0, lookback, 0))
    taps = weight_D1K.squeeze(1).to(u_BLD.dtype).unbind(-1)
    parts = [tap_D * padded.narrow(1, i, length) for i, tap_D in enumerate(taps)]
    return sum(parts[1:], parts[0]) if bias_D is None else sum(parts, bias_D.to(u_BLD.dtype))


class StepProjection(nn.Linear):
    """Linear layer whose bias the recurrence adds. PyTorch's quantize_dynamic does not replace this subclass."""

    def forward(self, step_BLR: Tensor) -> Tensor:
        return F.linear(step_BLR, self.weight)


class LonghornDirection(nn.Module):
    """One direction of a mixer: convolution, token projections, and weights of the skip connection."""

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
        """Return the recurrence's inputs: values v, step logits (the recurrence adds a bias), keys k and queries q."""
        v_BLD = self.convolve(u_BLD)
        return v_BLD, *self.project(v_BLD)

    def convolve(self, u_BLD: Tensor) -> Tensor:
        return F.silu(self.conv1d(u_BLD))

    def project(self, v_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step_BLR, k_BLN, q_BLN = self.x_proj(v_BLD).split(self.split, dim=-1)
        return self.step_proj(step_BLR), k_BLN, q_BLN

    def step_bias(self) -> Tensor:
        """Return the bias that the recurrence adds to the step logits.

        The bias is that of the `StepProjection`, which a wrapper such as a LoRA adapter may contain. The bias is zero
        if `step_proj` was replaced by another module, such as an `nn.Linear`, which adds its bias itself.
        """
        projections = [module for module in self.step_proj.modules() if isinstance(module, StepProjection)]
        if not projections:
            return torch.zeros_like(self.skip)
        return getattr(self.step_proj, "bias", projections[0].bias)


class MambaDirection(LonghornDirection):
    """`LonghornDirection` with Mamba's decay rates and initialization (Gu & Dao, 2023, section 3.6)."""

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
        self.step_proj.bias.copy_(dt_D + torch.log(-torch.expm1(-dt_D)))  # the bias is the inverse softplus of dt
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1, device=self.A_log.device).log())


class BidirectionalMixer(nn.Module):
    """Token mixer that averages the outputs of a forward and a backward recurrence over the tokens of an image.

    Args:
        dim: Model width C.
        expand: Inner width D as a multiple of C.
        state_size: Number of states N per channel.
        conv_width: Kernel size of the convolution before the recurrence, in tokens.
        pool: If None, the recurrence reads every token. If "rows" or "columns", the recurrence reads the mean of each
            row or column of patches, and the class token in the middle (the pooling of Kapse et al., 2025).
    """

    direction: type[LonghornDirection]
    recurrence: str  # name of the recurrence in the fused kernels: "longhorn" or "selective"

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
        self.directions: Sequence[LonghornDirection] = cast(
            Any, directions
        )  # cast, because nn.ModuleList has no type parameter
        self.out_proj = nn.Linear(inner, dim, bias=False, **dd)

    def forward(self, h_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Mix tokens (B, L, C). A pooled mixer needs the patch grid (h, w), unless the grid is square."""
        if self.pool is None:
            return self.mix(h_BLC)

        h, w = grid_of(h_BLC.shape[1], grid)
        if self.pool == "rows":
            return self.mix_row_means(h_BLC, h, w)
        out_BLC = self.mix_row_means(transpose_grid(h_BLC, h, w), w, h)
        return transpose_grid(out_BLC, w, h)

    def mix(self, h_BLC: Tensor) -> Tensor:
        """Run the convolution and the recurrence over all tokens, in both directions."""
        u_BLD, z_BLD = self.in_proj(h_BLC).chunk(2, dim=-1)
        forward, backward = [direction(u_BLD) for direction in self.directions]
        v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN = [torch.stack(pair) for pair in zip(forward, backward)]

        y_2BLD = self.scan(v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN)
        return self.out_proj(self.gate(y_2BLD.mean(0), z_BLD))

    def mix_row_means(self, h_BLC: Tensor, h: int, w: int) -> Tensor:
        """Run the convolution over all tokens, and the recurrence over the class token and h means of w patches.

        The convolution and the recurrence run in both directions.
        """
        u_BLD, z_BLD = self.in_proj(h_BLC).chunk(2, dim=-1)
        v_2BLD = torch.stack([direction.convolve(u_BLD) for direction in self.directions])
        v_2BSD = torch.stack([row_means(v_2BLD[g], h) for g in range(2)])
        forward, backward = [direction.project(v_2BSD[g]) for g, direction in enumerate(self.directions)]
        step_logits_2BSD, k_2BSN, q_2BSN = [torch.stack(pair) for pair in zip(forward, backward)]

        # All patches of a row share the recurrence's output, but the skip connection uses each patch's own v.
        y_2BSD = self.scan(v_2BSD, step_logits_2BSD, k_2BSN, q_2BSN, skip=False)
        y_BLD = repeat_rows(y_2BSD.mean(0), w) + (self.skip()[:, None, None] * v_2BLD).mean(0)
        return self.out_proj(self.gate(y_BLD.to(z_BLD.dtype), z_BLD))

    def gate(self, y_BLD: Tensor, z_BLD: Tensor) -> Tensor:
        """Gate the mean y of both scan directions by z, the second half of in_proj(h), and return out_proj's input."""
        return y_BLD * F.silu(z_BLD)

    def scan(
        self, v_2BLD: Tensor, step_logits_2BLD: Tensor, k_2BLN: Tensor, q_2BLN: Tensor, skip: bool = True
    ) -> Tensor:
        """Run the forward and the backward scan, and return their outputs (2, B, L, D).

        If `skip` is True, the values v times the skip weights are added to the outputs.
        """
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
        return longhorn_scan(v_2BLD, step_logits_2BLD, k_2BLN, q_2BLN, skip_2D, self.step_bias(), reverse=(False, True))


class MambaMixer(BidirectionalMixer):
    """Bidirectional mixer with Mamba's selective state space (Gu & Dao, 2023; Zhu et al., 2024)."""

    direction = MambaDirection
    recurrence = "selective"
    directions: Sequence[MambaDirection]

    def scan(
        self, v_2BLD: Tensor, step_logits_2BLD: Tensor, k_2BLN: Tensor, q_2BLN: Tensor, skip: bool = True
    ) -> Tensor:
        A_2DN = -at_least_fp32(torch.stack([direction.A_log for direction in self.directions])).exp()
        skip_2D = self.skip() if skip else None
        return selective_scan(
            v_2BLD, step_logits_2BLD, A_2DN, k_2BLN, q_2BLN, skip_2D, self.step_bias(), reverse=(False, True)
        )


class Block(nn.Module):
    """Pre-norm residual block. The residual stream (B, L, C) is fp32, or fp64 if the model's weights are fp64."""

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

    @dispatch.fusible
    def forward(self, x_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Add the mixer's output for the normalized tokens to the residual stream.

        A pooled block needs the patch grid (h, w), unless the grid is square.
        """
        mixer = self.mixer if self.pool is None else functools.partial(self.mixer, grid=grid)
        return x_BLC + self.drop_path(mixer(self.norm(x_BLC)))


class Blocks(nn.Sequential):
    """Sequence of blocks. Each block runs as a fused operator if the fused kernels support the block."""

    def forward(
        self,
        x_BLC: Tensor,
        grid: tuple[int, int] | None = None,
        class_token_only: bool = False,
        checkpointing: bool = False,
    ) -> Tensor:
        """Run all blocks and return the residual stream, or only the class token.

        Args:
            x_BLC: Residual stream.
            grid: Patch grid (h, w), which pooled blocks need unless the grid is square.
            class_token_only: Return only the class token (B, 1, C), unless this module has hooks. The option saves
                time on NVIDIA GPUs and, in a pooled model, on CPUs, because the last fused block computes the gate and
                the output projection only for the class token.
            checkpointing: Run each block with activation checkpointing.
        """
        class_token_only = class_token_only and not dispatch.has_hooks(self)
        x_BLC = dispatch.run_blocks(self, x_BLC, grid, class_token_only, checkpointing)
        return middle_token(x_BLC) if class_token_only else x_BLC


KNOWN_MIXERS = (LonghornMixer, MambaMixer)  # mixers of the fused kernels, pooled models, vil.viz and vil.export

for _mixer in KNOWN_MIXERS:
    _direction = [_mixer.direction, TokenConv1d, nn.Linear, StepProjection]
    dispatch.register(_mixer, [RMSNorm, _mixer, nn.Linear, nn.ModuleList, nn.Linear, *_direction, *_direction])


class Longhorn(nn.Module):
    """Longhorn layer for any network, causal or bidirectional. Input and output are tokens (B, L, C).

    The layer consists of PyTorch operators and the fused scan. A bidirectional layer can load the weights of the
    mixer in a ViL block.

    Args:
        d_model: Width C.
        bidirectional: Whether to read tokens in both directions. If False, a token depends only on itself and earlier
            tokens.
        expand: Inner width D as a multiple of C.
        state_size: Number of states N per channel.
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
