"""Vision Longhorn (ViL) and its baseline Vision Mamba (ViM) as timm models.

The models split an image into patches, insert a class token in the middle of the patch sequence, and mix the tokens
with bidirectional state-space blocks.

ViL is the vision model of Liu et al., "Longhorn: State Space Models are Amortized Online Learners" (2024). ViM is the
model of Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model"
(2024).

    model = timm.create_model("vil_small", num_classes=10, img_size=384)

On an NVIDIA GPU, `model(images)` calls these functions, each of which calls the next:

    VisionLonghorn.forward             vision_longhorn.py    features, then head
    VisionLonghorn.forward_features    vision_longhorn.py    patches to tokens, blocks, norm
    Blocks.forward                     block.py              sequence of blocks
    run_blocks                         dispatch.py           fused operator or `Block.forward` for each block
    block_op.run_blocks                vil/kernels/block     function that calls the operator for consecutive blocks
    launch                             vil/kernels/cuda      compilation and launch of the operator's kernels

`forward_features` calls `VisionLonghorn.embed` before the blocks. `embed` runs the kernels of vil/kernels/embedding if
the kernels support the call.

Dimension letters in the suffixes of tensor names:

    B batch    H, W image size    h, w patch grid    L = h w + 1 tokens    C model width
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import calculate_drop_path_rates, trunc_normal_
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model,
    model_entrypoint,
    register_model,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from . import shipped
from .block import KNOWN_MIXERS, BidirectionalMixer, Block, Blocks, LonghornMixer, MambaMixer, RMSNorm, at_least_fp32
from .dispatch import has_hooks, run_blocks, run_embedding
from .patches import PatchEmbed, PatchProjection
from .pretrained import check_architecture, check_classes, first_blocks, rename_published, resample, shapes_of
from .tokens import insert_class_token, resample_pos_embed, split_class_token

try:
    from timm.models._input import update_model_input_size
except ImportError:  # timm before 1.0.31 does not record the patch size, which vil.export needs

    def update_model_input_size(model: nn.Module, img_size: int | Sequence[int] | None, **model_args: Any) -> None:
        if model_args["patch_size"]:
            vars(model)["_model_args"] = model_args


for _name in ("add_to_patches", "resample_pos_embed"):
    torch.fx.wrap(_name)


def refuse_torch_onnx() -> None:
    """Raise a NotImplementedError in a call of torch.onnx.export, which does not support the recurrence."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "torch.onnx.export does not support this model: use vil.export.export_model(model, 'model.onnx')"
        )


def add_to_patches(x_1LC: Tensor, bias_C: Tensor) -> Tensor:
    """Convert x to fp32, unless x is fp64, and add the bias to all tokens except the class token."""
    patches_1nC, token_11C = split_class_token(at_least_fp32(x_1LC))
    return insert_class_token(patches_1nC + bias_C, token_11C)


class VisionLonghorn(nn.Module):
    """Vision backbone of bidirectional state-space blocks.

    The class token is in the middle of the sequence. In the L tokens that `forward_features` returns, the class token
    has the index (L - 1) // 2. `split_class_token` separates the class token from the patches.

    `num_prefix_tokens` is 0, because no token precedes the patches. Therefore timm code that removes prefix tokens does
    not remove a patch. If such code then reshapes the tokens to a feature map, the reshape fails because of the class
    token, instead of silently shifting the map by one patch.

    Args:
        img_size: Image size in pixels, (height, width) or one number for both.
        patch_size: Patch size in pixels.
        stride: Distance between neighbouring patches in pixels; None uses the patch size. ViM's fine-grained models
            have a stride of 8.
        in_chans: Number of image channels.
        num_classes: Number of classes of the head; 0 removes the head.
        global_pool: Input of the head: "token" (class token), "avg" (mean of the patches), or "" (all tokens).
        embed_dim: Model width C.
        depth: Number of blocks.
        mixer: Class of the blocks' token mixer.
        pooled: Whether the recurrence reads the mean of each row (even blocks) or column (odd blocks) of patches
            instead of every patch.
        dynamic_img_size: Whether to accept images of any size and aspect ratio. Images are padded to full patches, and
            the position embeddings are resampled.
        drop_rate: Dropout rate before the head.
        drop_path_rate: Stochastic depth rate of the last block; the rate grows linearly from 0 in the first block.

    Raises:
        ValueError: The patches do not cover the image and `dynamic_img_size` is False, `global_pool` is unknown, or
            `mixer` does not support pooling.
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
                f"mixer must be LonghornMixer or MambaMixer in a pooled model, got {mixer.__name__}: set pooled=False"
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
        """Initialize embeddings and head, and scale the blocks' output projections by 1 / sqrt(depth)."""
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
        """Initialize every parameter, for example after the model was built on the meta device."""
        for module in reversed(list(self.modules())):  # initialize children before their parents
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
        """Replace the head by a randomly initialized head, or remove the head if `num_classes` is 0.

        If the argument `global_pool` is None, the pooling is unchanged.
        """
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
        """Change the image or patch size. Resample the position embeddings and the patch projection's weights."""
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
        """Run the blocks and return the outputs of selected blocks as feature maps of the patches.

        Args:
            x: Images (B, 3, H, W).
            indices: Last n blocks if an int, blocks with these indices if a list, all blocks if None.
            return_prefix_tokens: Return the class token (B, 1, C) with each map. The class token is in the middle of
                the sequence, although timm's name suggests a prefix.
            norm: Apply the final norm to each map.
            stop_early: Do not run the blocks after the last requested block.
            output_fmt: "NCHW" for maps (B, C, h, w), "NLC" for maps (B, h w, C).
            intermediates_only: Return only the list of maps.
            output_dict: Return a dict with timm's keys instead of a tuple.

        Returns:
            Normalized tokens (B, L, C) of the last block that ran, and the list of feature maps, unless the arguments
            select another format.

        Raises:
            ValueError: `output_fmt` is unknown.
            AssertionError: An index in `indices` is out of range.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.blocks), indices)
        blocks = self.blocks[: last + 1] if stop_early else self.blocks
        x, grid = self.embed(x), self.grid_of(x)
        intermediates: list[Any] = []
        class_tokens = []
        for i, block in enumerate(blocks):
            x = run_blocks([block], x, grid, checkpointing=self.grad_checkpointing)
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
        """Remove the blocks after the last of `indices`, and optionally norm and head. Return the block indices."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def embed(self, x_B3HW: Tensor) -> Tensor:
        """Embed images (B, 3, H, W) as tokens (B, L, C) in fp32, or in fp64 if the weights are fp64."""
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            refuse_torch_onnx()
        classes = [PatchEmbed, PatchProjection]
        fused_BLC = run_embedding(x_B3HW, self.patch_embed, classes, self.cls_token, self.pos_embed)
        if fused_BLC is not None:
            return fused_BLC
        x_BhwC = self.patch_embed(x_B3HW, add_bias=False)
        pos_embed_1LC: Tensor = self.pos_embed
        if self.dynamic_img_size:
            pos_embed_1LC = resample_pos_embed(pos_embed_1LC, x_BhwC.shape[1:3], self.patch_embed.grid_size)
        class_token_B1C = self.cls_token.expand(x_BhwC.shape[0], -1, -1)
        x_BLC = insert_class_token(x_BhwC.flatten(1, 2), class_token_B1C)
        # Add the bias to the position embeddings first. Otherwise the bias gradient is a slow sum over the whole batch.
        return x_BLC + add_to_patches(pos_embed_1LC, self.patch_embed.proj.bias)  # the sum is fp32 or fp64

    def grid_of(self, x_B3HW: Tensor) -> tuple[int, int]:
        """Return the patch grid (h, w) of a batch of images."""
        if not self.dynamic_img_size:
            return self.patch_embed.grid_size
        height, width = x_B3HW.shape[-2:]
        return self.patch_embed.dynamic_feat_size((height, width))

    def forward_features(self, x: Tensor, class_token_only: bool = False) -> Tensor:
        """Return the normalized tokens (B, L, C) of images (B, 3, H, W).

        With `class_token_only`, the result is only the class token (B, 1, C), unless `blocks` has hooks or was
        replaced.
        """
        grid = self.grid_of(x)
        x = self.embed(x)
        if isinstance(self.blocks, Blocks):
            x = self.blocks(x, grid, class_token_only, self.grad_checkpointing)
        elif type(self.blocks) is nn.Sequential and not has_hooks(self.blocks):
            # A user may have replaced `model.blocks` with an nn.Sequential of blocks.
            x = run_blocks(self.blocks, x, grid, checkpointing=self.grad_checkpointing)
        else:  # a user has replaced `model.blocks` with another module
            x = self.blocks(x)
        return self.norm(x).to(self.cls_token.dtype)  # without a norm, x is the fp32 residual stream

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits (B, num_classes), or the pooled features if `pre_logits`, of tokens (B, L, C).

        If `global_pool` is "", the logits or features are those of every token, without pooling.
        """
        if self.global_pool == "token":
            x = x[:, (x.shape[1] - 1) // 2]
        elif self.global_pool == "avg":
            x = split_class_token(x)[0].mean(1)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.forward_features(x, class_token_only=self.global_pool == "token")
        return self.forward_head(x)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False):
        """Load weights as in `nn.Module.load_state_dict`.

        If keys or shapes differ from this model's, ViM's published keys are renamed, and the patch and position
        embeddings are resampled to this model's patch size and patch grid.

        Raises:
            RuntimeError: Tensors with the same name have different shapes, or the position embeddings cannot be
                resampled. If `strict`, a checkpoint of another architecture or number of classes also raises.
        """
        if shapes_of(state_dict) != shapes_of(self.state_dict()):
            state_dict = rename_published(state_dict)
            if strict:
                check_architecture(state_dict, self)
                check_classes(state_dict, self)
            state_dict = resample(state_dict, self.patch_embed.patch_size, self.patch_embed.grid_size)
        return super().load_state_dict(state_dict, strict, assign)


def _known_pool(global_pool: str) -> str:
    if global_pool not in ("", "avg", "token"):
        raise ValueError(f"global_pool must be 'token', 'avg' or '', got {global_pool!r}")
    return global_pool


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: VisionLonghorn) -> dict[str, Tensor]:
    """Rename, check and resample a pretrained checkpoint. timm calls this function before loading the weights.

    The architecture is checked here, because timm does not check the architecture when the model gets a new head.
    """
    state_dict = rename_published(state_dict)
    check_architecture(state_dict, model)
    return resample(state_dict, model.patch_embed.patch_size, model.patch_embed.grid_size)


def _cfg(**entries: Any) -> dict[str, Any]:
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
    } | entries


default_cfgs: dict[str, Any] = {}  # timm reads the models' configs from this dict, which `register` fills


def _create_vision_longhorn(variant: str, pretrained: bool = False, **kwargs) -> VisionLonghorn:
    out_indices = kwargs.pop("out_indices", 3)
    if pretrained:
        source = kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay")
        kwargs["pretrained_cfg"] = shipped.pretrained_cfg(variant, *source)

    def filter_fn(state_dict: dict[str, Tensor], model: VisionLonghorn) -> dict[str, Tensor]:
        # Blocks are dropped only if `depth` is given, so that a default model rejects the weights of a deeper model.
        return checkpoint_filter_fn(first_blocks(rename_published(state_dict), kwargs.get("depth")), model)

    model: Any = build_model_with_cfg(
        VisionLonghorn,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **kwargs,
    )
    # Only arguments of VisionLonghorn are kept, because timm's arguments may contain weights, whose memory would never
    # be freed.
    known = inspect.signature(VisionLonghorn).parameters
    model.model_args = {name: value for name, value in kwargs.items() if name in known}  # for vil.export
    return model


def register(function: Callable[..., VisionLonghorn]) -> Callable[..., VisionLonghorn]:
    """Register a model with timm's `register_model`, unless another package has registered the same name.

    Raises:
        RuntimeError: Another package has already registered a model with this name.
    """
    name = function.__name__
    if is_model(name) and (module := model_entrypoint(name).__module__) != __name__:
        raise RuntimeError(
            f"cannot register the model {name} of {__name__}, because {module} has already registered this name: use "
            "the two packages in different processes"
        )
    tagged = {tag: _cfg(**entries) for tag, entries in shipped.pretrained_cfgs(name).items()}
    default_cfgs.update(generate_default_cfgs({**tagged, f"{name}.*": _cfg()}))  # "*" marks timm's default config
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
    """Vision Longhorn, tiny, with a recurrence over row and column means. Weight shapes are those of vil_tiny."""
    model_args = dict(embed_dim=192, mixer=LonghornMixer, pooled=True)
    return _create_vision_longhorn("vil_tiny_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vil_small_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, small, with a recurrence over row and column means. Weight shapes are those of vil_small."""
    model_args = dict(embed_dim=384, mixer=LonghornMixer, pooled=True)
    return _create_vision_longhorn("vil_small_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vil_base_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Longhorn, base, with a recurrence over row and column means. Weight shapes are those of vil_base."""
    model_args = dict(embed_dim=768, mixer=LonghornMixer, pooled=True)
    return _create_vision_longhorn("vil_base_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_tiny_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, tiny, with a recurrence over row and column means. Weight shapes are those of vim_tiny."""
    model_args = dict(embed_dim=192, mixer=MambaMixer, pooled=True)
    return _create_vision_longhorn("vim_tiny_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_small_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, small, with a recurrence over row and column means. Weight shapes are those of vim_small."""
    model_args = dict(embed_dim=384, mixer=MambaMixer, pooled=True)
    return _create_vision_longhorn("vim_small_pooled", pretrained=pretrained, **dict(model_args, **kwargs))


@register
def vim_base_pooled(pretrained: bool = False, **kwargs) -> VisionLonghorn:
    """Vision Mamba, base, with a recurrence over row and column means. Weight shapes are those of vim_base."""
    model_args = dict(embed_dim=768, mixer=MambaMixer, pooled=True)
    return _create_vision_longhorn("vim_base_pooled", pretrained=pretrained, **dict(model_args, **kwargs))
