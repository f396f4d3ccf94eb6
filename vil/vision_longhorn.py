"""Vision Longhorn (ViL) and its baseline Vision Mamba (ViM) as timm models.

An image becomes a sequence of patches with the class token in its middle, which bidirectional state-space blocks mix.
ViL is the vision model of Liu et al., "Longhorn: State Space Models are Amortized Online Learners" (2024), ViM that of
Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model" (2024).

    model = timm.create_model("vil_small", num_classes=10, img_size=384)

    B batch    H, W image    h, w grid of patches    L = h w + 1 tokens    C model width
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import (
    calculate_drop_path_rates,
    lecun_normal_,
    resample_abs_pos_embed,
    resample_patch_embed,
    to_2tuple,
    trunc_normal_,
)
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model,
    model_entrypoint,
    register_model,
    register_notrace_module,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from .block import (
    KNOWN_MIXERS,
    BidirectionalMixer,
    Block,
    Blocks,
    LonghornMixer,
    MambaMixer,
    RMSNorm,
    at_least_fp32,
    checkpointed,
    grid_for,
    insert_class_token,
    run_blocks,
    split_class_token,
)

try:
    from timm.models._input import update_model_input_size
except ImportError:  # timm before 1.0.30 keeps no record of sizes, as newer ones do: vil.export asks for this one

    def update_model_input_size(model: nn.Module, img_size: int | Sequence[int] | None, **model_args: Any) -> None:
        if model_args["patch_size"]:
            vars(model)["_model_args"] = model_args


class PatchProjection(nn.Conv2d):
    """The convolution of patches; as a matrix product, several times faster on a GPU, if they do not overlap."""

    bias: Tensor

    def forward(self, x_B3HW: Tensor, add_bias: bool = True) -> Tensor:
        bias = self.bias if add_bias else None
        height, width = self.kernel_size
        if self.stride != self.kernel_size:
            return self._conv_forward(x_B3HW, self.weight, bias)
        h, w = x_B3HW.shape[2] // height, x_B3HW.shape[3] // width
        x_B3HW = x_B3HW[:, :, : h * height, : w * width]
        patches = x_B3HW.unflatten(3, (w, width)).unflatten(2, (h, height)).permute(0, 2, 4, 1, 3, 5)
        patches = copy_for_product(patches).flatten(3)
        return F.linear(patches, self.weight.flatten(1), bias).permute(0, 3, 1, 2)


@torch.jit.ignore
def copy_for_product(x: Tensor) -> Tensor:
    """A contiguous copy of x, in the dtype that autocast would give it next if it is on."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)  # PyTorch has none for meta tensors
    return x.to(torch.get_autocast_dtype(device) if autocast else x.dtype, memory_format=torch.contiguous_format)


@register_notrace_module  # its checks branch on the size of the image
class PatchEmbed(nn.Module):
    """Image (B, 3, H, W) to patches (B, h, w, C) by a convolution; patches overlap if the stride is below their size.

    Without `add_bias` the convolution's bias is left to who calls.

    Args:
        img_size: Image size that the model is built for.
        patch_size: Size of a patch.
        stride: Distance of neighbouring patches, the patch size if None.
        in_chans: Channels of the image.
        embed_dim: Model width.
        dynamic_img_size: Take images of any size, padded on the right and bottom to full patches.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None,
        in_chans: int,
        embed_dim: int,
        dynamic_img_size: bool,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.patch_size = to_2tuple(patch_size)
        self.stride = to_2tuple(stride or patch_size)
        self.dynamic_img_size = dynamic_img_size
        self.proj = PatchProjection(in_chans, embed_dim, self.patch_size, self.stride, device=device, dtype=dtype)
        self.img_size: tuple[int, int]
        self.set_input_size(img_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lecun_normal_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def set_input_size(self, img_size=None, patch_size=None) -> None:
        """Sets the image size, and resamples the convolution to another patch size.

        Raises:
            ValueError: The patches do not cover the image, and nothing pads it.
        """
        img_size = to_2tuple(img_size or self.img_size)
        patch_size = to_2tuple(patch_size or self.patch_size)
        stride = patch_size if self.stride == self.patch_size else self.stride
        grid_size = patch_grid(img_size, patch_size, stride, pad=self.dynamic_img_size)
        covered = tuple((g - 1) * s + p for g, s, p in zip(grid_size, stride, patch_size))
        if covered != img_size and not self.dynamic_img_size:
            raise ValueError(
                f"img_size {img_size} is not covered by patches of {patch_size} at stride {stride}: "
                f"use {covered}, or dynamic_img_size=True, which pads"
            )
        if patch_size != self.patch_size:
            old = self.proj
            dd: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
            self.proj = PatchProjection(old.in_channels, old.out_channels, patch_size, stride, **dd)
            with torch.no_grad():
                self.proj.weight.copy_(resample_patch_embed(old.weight, patch_size))
                self.proj.bias.copy_(old.bias)
            self.proj.requires_grad_(old.weight.requires_grad)
        self.img_size, self.patch_size, self.stride, self.grid_size = img_size, patch_size, stride, grid_size
        self.num_patches = grid_size[0] * grid_size[1]

    def feat_ratio(self) -> int:
        return max(self.stride)

    def dynamic_feat_size(self, img_size: tuple[int, int]) -> tuple[int, int]:
        """The grid (h, w) of patches of an image (H, W)."""
        return patch_grid(img_size, self.patch_size, self.stride, pad=self.dynamic_img_size)

    def forward(self, x_B3HW: Tensor, add_bias: bool = True) -> Tensor:
        check_channels(x_B3HW, self.proj.in_channels)
        height, width = x_B3HW.shape[2], x_B3HW.shape[3]
        if self.dynamic_img_size:
            h, w = self.dynamic_feat_size((height, width))
            bottom = (h - 1) * self.stride[0] + self.patch_size[0] - height
            right = (w - 1) * self.stride[1] + self.patch_size[1] - width
            x_B3HW = F.pad(x_B3HW, (0, right, 0, bottom))
        else:
            check_size(height, width, self.img_size)
        return self.proj(x_B3HW, add_bias).permute(0, 2, 3, 1)


for _name in ("add_to_patches", "check_channels", "check_size", "copy_for_product", "patch_grid", "resample_pos_embed"):
    torch.fx.wrap(_name)


def check_channels(x: Tensor, channels: int) -> None:
    """Raises a ValueError unless there are images (B, channels, H, W)."""
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"images must be (B, {channels}, H, W), not {list(x.shape)}")


def check_size(height: int, width: int, img_size: tuple[int, int]) -> None:
    """Raises a ValueError if an image is not of the size that a model was built for."""
    if height != img_size[0] or width != img_size[1]:
        size = (height, width)
        raise ValueError(
            f"the image is {size} but the model was built for {img_size}: create it with img_size={size} "
            f"or dynamic_img_size=True, or call its set_input_size()"
        )


def patch_grid(
    img_size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int], pad: bool
) -> tuple[int, int]:
    """The patches (h, w) that fit into an image, or that cover it if it may be padded."""
    h = (img_size[0] - patch_size[0] + (stride[0] - 1 if pad else 0)) // stride[0] + 1
    w = (img_size[1] - patch_size[1] + (stride[1] - 1 if pad else 0)) // stride[1] + 1
    return max(1, h), max(1, w)


@torch.jit.ignore
def resample_pos_embed(pos_embed_1LC: Tensor, new_size: list[int], old_size: list[int]) -> Tensor:
    """Resamples position embeddings from one grid of patches to another; the class token's row stays in the middle."""
    if new_size == old_size:
        return pos_embed_1LC
    patches, token = split_class_token(pos_embed_1LC)
    if patches.requires_grad and torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        # PyTorch cannot compile the gradient for a symbolic size (pytorch#197622): this makes a graph for each grid
        new_size = [operator.index(n) for n in new_size]
    patches = resample_abs_pos_embed(patches, new_size, old_size, num_prefix_tokens=0)
    return insert_class_token(patches, token)


@torch.jit.ignore
def add_to_patches(x_1LC: Tensor, bias_C: Tensor) -> Tensor:
    """x in fp32, with the bias added to all tokens but the class token."""
    patches_1nC, token_11C = split_class_token(at_least_fp32(x_1LC))
    return insert_class_token(patches_1nC + bias_C, token_11C)


class VisionLonghorn(nn.Module):
    """A vision backbone of bidirectional state-space blocks.

    The class token is in the middle of the sequence, before and after the blocks: of the L tokens that
    `forward_features` returns, it is number (L - 1) // 2, and `split_class_token` takes it out. No token stands before
    the patches: `num_prefix_tokens` is 0, so that code for timm's models that cuts off `tokens[:, :num_prefix_tokens]`
    cuts off no patch; where it then makes a map of the others it fails by a token too many, in place of a map that is
    shifted by one.

    Args:
        img_size: Image size, (height, width) or one number for both.
        patch_size: Patch size.
        stride: Distance of neighbouring patches, the patch size if None; ViM's fine-grained setting is 8.
        in_chans: Channels of the image.
        num_classes: Classes of the head; 0 for none.
        global_pool: What the head sees: "token" (class token), "avg" (mean of the patches), or "" (all tokens).
        embed_dim: Model width C.
        depth: Number of blocks.
        mixer: The blocks' token mixer.
        pooled: Whether the recurrence reads the mean of each row of patches, in every second block of each column.
        dynamic_img_size: Take images of any size and aspect ratio, padded to full patches, by resampling the position
            embeddings.
        drop_rate: Dropout before the head.
        drop_path_rate: Stochastic depth of the last block; it grows linearly from 0 in the first.

    Raises:
        ValueError: The patches do not cover the image (and `dynamic_img_size` is off), the head's pooling is unknown,
            or there is no pooled form of the mixer.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        stride: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 192,
        depth: int = 24,
        mixer: type[BidirectionalMixer] = LonghornMixer,
        pooled: bool = False,
        dynamic_img_size: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device=None,
        dtype=None,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.global_pool = _known_pool(global_pool)
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 0
        self.dynamic_img_size = dynamic_img_size
        self.grad_checkpointing = False
        self.pooled = pooled

        self.patch_embed = PatchEmbed(img_size, patch_size, stride, in_chans, embed_dim, dynamic_img_size, **dd)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.pos_embed = nn.Parameter(torch.empty(1, self.patch_embed.num_patches + 1, embed_dim, **dd))
        if pooled and mixer not in KNOWN_MIXERS:
            raise ValueError(
                f"a pooled model mixes by LonghornMixer or MambaMixer: {mixer.__name__} has no pooled form"
            )
        axes = ("rows", "columns") if pooled else (None, None)
        rates: Any = calculate_drop_path_rates(drop_path_rate, depth)
        self.blocks: nn.Sequential = Blocks(
            *[Block(embed_dim, mixer, rate, axes[i % 2], **dd) for i, rate in enumerate(rates)]
        )
        self.feature_info = [
            dict(module=f"blocks.{i}", num_chs=embed_dim, reduction=self.patch_embed.feat_ratio()) for i in range(depth)
        ]
        self.norm: nn.Module = RMSNorm(embed_dim, eps=1e-5, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises what this class owns, and divides the blocks' output projections by the square root of depth."""
        trunc_normal_(self.cls_token, std=0.02)
        trunc_normal_(self.pos_embed, std=0.02)
        if isinstance(self.head, nn.Linear):
            trunc_normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        for mixer in self.modules():
            if isinstance(mixer, BidirectionalMixer):
                nn.init.kaiming_uniform_(mixer.out_proj.weight, a=math.sqrt(5))
                with torch.no_grad():
                    mixer.out_proj.weight.div_(math.sqrt(len(self.blocks)))

    def init_weights(self) -> None:
        """Initialises every parameter, such as after building the model on the meta device."""
        for module in reversed(list(self.modules())):  # what a module contains before the module
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^cls_token|pos_embed|patch_embed",
            blocks=[(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the head by a new one; keeps the pooling if `global_pool` is None."""
        if global_pool is not None:
            self.global_pool = _known_pool(global_pool)
        self.num_classes = num_classes
        dd: dict[str, Any] = {"device": self.cls_token.device, "dtype": self.cls_token.dtype}
        self.head = nn.Linear(self.embed_dim, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.head.train(self.training)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
    ) -> None:
        """Rebuilds the model for another image or patch size; position embeddings and patch weights are resampled."""
        old_size = self.patch_embed.grid_size
        self.patch_embed.set_input_size(img_size, patch_size)
        if self.patch_embed.grid_size != old_size:
            pos_embed = resample_pos_embed(self.pos_embed.detach(), self.patch_embed.grid_size, old_size)
            self.pos_embed = nn.Parameter(pos_embed, requires_grad=self.pos_embed.requires_grad)
        for info in self.feature_info:
            info["reduction"] = self.patch_embed.feat_ratio()
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]] | dict[str, Any]:
        """Runs the blocks and returns what some of them put out, as maps of the patches.

        Args:
            x: Images (B, 3, H, W).
            indices: The last n blocks if an int, these blocks if a sequence, all if None.
            return_prefix_tokens: Return the class token (B, 1, C) beside each map. (timm's name: here it is in the
                middle.)
            norm: Apply the final norm to each.
            stop_early: Stop after the last block asked for.
            output_fmt: "NCHW" for (B, C, h, w), "NLC" for (B, h w, C).
            intermediates_only: Return only the list.
            output_dict: Return a dictionary, as timm's models do.

        Returns:
            The normed tokens (B, L, C) of the last block run and the list, unless asked otherwise.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt {output_fmt!r} is neither 'NCHW' nor 'NLC'")
        taken, last = feature_take_indices(len(self.blocks), indices)
        x, grid = self.embed(x), self.grid_of(x)
        intermediates: list[Any] = []
        class_tokens = []
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = checkpointed(block, x, grid=grid) if self.grad_checkpointing else block(x, **grid_for(block, grid))
            if i in taken:
                patches, class_token = split_class_token((self.norm(x) if norm else x).to(self.cls_token.dtype))
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
                intermediates.append(patches)
                class_tokens.append(class_token)
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": intermediates}
            if return_prefix_tokens:
                result["image_intermediates_prefix"] = class_tokens
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        if return_prefix_tokens:
            intermediates = list(zip(intermediates, class_tokens))
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops blocks (and norm, head) that the intermediates of `indices` do not need; returns their numbers."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def embed(self, x_B3HW: Tensor) -> Tensor:
        """Images to the tokens (B, L, C) of the residual stream: patches, class token in the middle, positions."""
        x_BhwC = self.patch_embed(x_B3HW, add_bias=False)
        pos_embed_1LC = self.pos_embed
        if self.dynamic_img_size:
            pos_embed_1LC = resample_pos_embed(pos_embed_1LC, x_BhwC.shape[1:3], self.patch_embed.grid_size)
        class_token_B1C = self.cls_token.expand(x_BhwC.shape[0], -1, -1)
        x_BLC = insert_class_token(x_BhwC.flatten(1, 2), class_token_B1C)
        # with the positions' gradient, a sum over images, the bias's is almost free: by itself it is a slow sum
        return x_BLC + add_to_patches(pos_embed_1LC, self.patch_embed.proj.bias)  # in fp32

    def grid_of(self, x_B3HW: Tensor) -> tuple[int, int]:
        """The grid (h, w) of patches of these images."""
        if not self.dynamic_img_size:
            return self.patch_embed.grid_size
        return self.patch_embed.dynamic_feat_size((x_B3HW.shape[2], x_B3HW.shape[3]))

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) to normed tokens (B, L, C)."""
        if not torch.jit.is_scripting():  # TorchScript looks into a branch unless this alone decides
            x, grid = self.embed(x), self.grid_of(x)
            return self.norm(run_blocks(self.blocks, x, checkpointing=self.grad_checkpointing, grid=grid))
        grid = self.grid_of(x)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, False, grid)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (B, L, C) to logits (B, num_classes), or to the pooled features if `pre_logits`."""
        if self.global_pool == "token":
            x = x[:, (x.shape[1] - 1) // 2]
        elif self.global_pool == "avg":
            x = split_class_token(x)[0].mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.jit.is_scripting():
            # the head's class token is the middle one: nobody needs the others of the last block, nor their norm
            only = self.global_pool == "token"
            x, grid = self.embed(x), self.grid_of(x)
            x = run_blocks(self.blocks, x, only, self.grad_checkpointing, grid)
            return self.forward_head(self.norm(x))
        return self.forward_head(self.forward_features(x))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """As PyTorch's, also for ViM's published names and for other grids and sizes of patches.

        Raises:
            RuntimeError: The checkpoint is of another architecture, or has another number of classes.
        """
        state_dict = rename_published(state_dict)
        if strict:
            check_architecture(state_dict, self)
            classes = len(state_dict.get("head.bias", ()))
            if classes != self.num_classes:
                raise RuntimeError(
                    f"the checkpoint has {classes} classes but the model {self.num_classes}: create the model with "
                    f"num_classes={classes}, and then call its reset_classifier({self.num_classes})"
                )
        return super().load_state_dict(resample(state_dict, self), strict, assign)


def _known_pool(global_pool: str) -> str:
    if global_pool not in ("", "avg", "token"):
        raise ValueError(f"global_pool {global_pool!r} is none of 'token', 'avg' and ''")
    return global_pool


# The names of ViM's published checkpoints, in this order; `_b` marks the backward direction's.
_VIM_NAMES = [
    (r"^layers\.", "blocks."),
    (r"^norm_f\.", "norm."),
    (r"\.mixer\.A_log$", ".mixer.directions.0.A_log"),
    (r"\.mixer\.A_b_log$", ".mixer.directions.1.A_log"),
    (r"\.mixer\.D$", ".mixer.directions.0.skip"),
    (r"\.mixer\.D_b$", ".mixer.directions.1.skip"),
    (r"\.mixer\.(conv1d|x_proj)\.", r".mixer.directions.0.\1."),
    (r"\.mixer\.(conv1d|x_proj)_b\.", r".mixer.directions.1.\1."),
    (r"\.mixer\.dt_proj\.", ".mixer.directions.0.step_proj."),
    (r"\.mixer\.dt_proj_b\.", ".mixer.directions.1.step_proj."),
]


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: VisionLonghorn) -> dict[str, Tensor]:
    """What timm puts a pretrained checkpoint through before it adapts the head and loads the rest without looking."""
    state_dict = rename_published(state_dict)
    check_architecture(state_dict, model)
    return resample(state_dict, model)


def rename_published(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """A checkpoint under our names, which it may have already, in place of ViM's published ones."""
    renamed = {}
    for name, value in state_dict.get("model", state_dict).items():
        for pattern, replacement in _VIM_NAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def check_architecture(state_dict: dict[str, Tensor], model: VisionLonghorn) -> None:
    """Compares a checkpoint with a model, apart from what can be adapted: the head, and what the image is like.

    Raises:
        RuntimeError: It is of another architecture; the message says of which, and names keys that differ.
    """
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}
    other = {name: value for name, value in state_dict.items() if not name.startswith("head.")}
    common = own.keys() & other.keys() - {"patch_embed.proj.weight", "pos_embed"}
    differences = {
        "missing": own.keys() - other.keys(),
        "unexpected": other.keys() - own.keys(),
        "of another shape": [name for name in common if own[name].shape != other[name].shape],
    }
    if any(differences.values()):
        listed = [
            f"{len(names)} {what} ({', '.join(sorted(names)[:3])})" for what, names in differences.items() if names
        ]
        raise RuntimeError(
            f"the checkpoint is of {_architecture(other)}, the model {_architecture(own)}; keys: {', '.join(listed)}"
        )


def _architecture(state_dict: dict[str, Tensor]) -> str:
    projections = [name for name in state_dict if re.fullmatch(r"blocks\.\d+\.mixer\.in_proj\.weight", name)]
    if not projections:
        return "neither a ViL nor a ViM"
    kind = "ViM" if any(name.endswith(".A_log") for name in state_dict) else "ViL"
    return f"a {kind} of embed_dim {state_dict[projections[0]].shape[1]} and depth {len(projections)}"


def resample(state_dict: dict[str, Tensor], model: VisionLonghorn) -> dict[str, Tensor]:
    """Fits patch and position embeddings of a checkpoint to a model's size and grid of patches.

    Raises:
        RuntimeError: A grid to be resampled is not square, as that of every published checkpoint is.
    """
    state_dict = dict(state_dict)
    patches = state_dict.get("patch_embed.proj.weight")
    # of another number of dimensions is for load_state_dict to refuse
    if patches is not None and patches.dim() == 4:
        state_dict["patch_embed.proj.weight"] = resample_patch_embed(patches, model.patch_embed.patch_size)
    pos_embed = state_dict.get("pos_embed")
    if pos_embed is not None and pos_embed.dim() == 3 and pos_embed.shape[1] != model.pos_embed.shape[1]:
        side = math.isqrt(max(0, pos_embed.shape[1] - 1))
        if side**2 + 1 != pos_embed.shape[1]:
            raise RuntimeError(
                f"pos_embed of the checkpoint has length {pos_embed.shape[1]}, which is no square grid of patches and "
                "a class token: load it at its own img_size, then call the model's set_input_size()"
            )
        state_dict["pos_embed"] = resample_pos_embed(pos_embed, model.patch_embed.grid_size, (side, side))
    return state_dict


def _cfg() -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
    }


default_cfgs: dict[str, Any] = {}  # where timm looks for them: `register` adds that of each model


def _create_vision_longhorn(variant: str, pretrained: bool = False, **kwargs) -> VisionLonghorn:
    out_indices = kwargs.pop("out_indices", 3)
    return build_model_with_cfg(
        VisionLonghorn,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )


def register(function: Callable[..., VisionLonghorn]) -> Callable[..., VisionLonghorn]:
    """timm's `register_model`, which would put a model in the place of another package's by the same name.

    Raises:
        RuntimeError: There is one.
    """
    name = function.__name__
    if is_model(name) and (module := model_entrypoint(name).__module__) != __name__:
        raise RuntimeError(
            f"timm has a model {name} of {module}, which that of {__name__} would hide: use them in different processes"
        )
    default_cfgs.update(generate_default_cfgs({name: _cfg()}))
    return register_model(function)


@register
def vil_tiny(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, tiny: 6.9 M parameters."""
    model_args = dict(embed_dim=192, mixer=LonghornMixer)
    return _create_vision_longhorn("vil_tiny", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vil_small(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, small: 25.2 M parameters."""
    model_args = dict(embed_dim=384, mixer=LonghornMixer)
    return _create_vision_longhorn("vil_small", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vil_base(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, base: 96.4 M parameters."""
    model_args = dict(embed_dim=768, mixer=LonghornMixer)
    return _create_vision_longhorn("vil_base", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_tiny(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, tiny: 7.1 M parameters."""
    model_args = dict(embed_dim=192, mixer=MambaMixer)
    return _create_vision_longhorn("vim_tiny", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_small(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, small: 25.8 M parameters."""
    model_args = dict(embed_dim=384, mixer=MambaMixer)
    return _create_vision_longhorn("vim_small", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_base(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, base: 97.6 M parameters."""
    model_args = dict(embed_dim=768, mixer=MambaMixer)
    return _create_vision_longhorn("vim_base", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vil_tiny_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, tiny with a recurrence over row and column means; its weights are vil_tiny's."""
    model_args = dict(embed_dim=192, mixer=LonghornMixer, pooled=True)
    return _create_vision_longhorn("vil_tiny_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vil_small_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, small with a recurrence over row and column means; its weights are vil_small's."""
    model_args = dict(embed_dim=384, mixer=LonghornMixer, pooled=True)
    return _create_vision_longhorn("vil_small_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vil_base_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, base with a recurrence over row and column means; its weights are vil_base's."""
    model_args = dict(embed_dim=768, mixer=LonghornMixer, pooled=True)
    return _create_vision_longhorn("vil_base_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_tiny_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, tiny with a recurrence over row and column means; its weights are vim_tiny's."""
    model_args = dict(embed_dim=192, mixer=MambaMixer, pooled=True)
    return _create_vision_longhorn("vim_tiny_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_small_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, small with a recurrence over row and column means; its weights are vim_small's."""
    model_args = dict(embed_dim=384, mixer=MambaMixer, pooled=True)
    return _create_vision_longhorn("vim_small_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_base_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, base with a recurrence over row and column means; its weights are vim_base's."""
    model_args = dict(embed_dim=768, mixer=MambaMixer, pooled=True)
    return _create_vision_longhorn("vim_base_pooled", pretrained=pretrained, **dict(model_args, **kwargs))
