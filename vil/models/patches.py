"""Embedding of an image's patches, and checks of the image size.

Dimension letters in the suffixes of tensor names:

    B batch    H, W image size    h, w patch grid    C model width
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import lecun_normal_, resample_patch_embed, to_2tuple
from timm.models import register_notrace_module
from torch import Tensor, nn


class PatchProjection(nn.Conv2d):
    """Convolution that projects each image patch to a vector of the model width.

    If the stride equals the patch size, the convolution is computed as a matrix product, which is faster on a GPU than
    a convolution.
    """

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


def copy_for_product(x: Tensor) -> Tensor:
    """Convert x to the autocast dtype if autocast is enabled. If the dtype changes, the result is contiguous."""
    device = x.device.type
    # PyTorch does not support autocast on the meta device
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device) if autocast else x.dtype, memory_format=torch.contiguous_format)


@register_notrace_module  # timm's FX feature extractors keep the patch embedding as one node
class PatchEmbed(nn.Module):
    """Convolutional patch embedding of images (B, 3, H, W) to patches (B, h, w, C).

    Patches overlap if the stride is smaller than the patch size. With `add_bias=False`, `forward` omits the
    convolution's bias, and the caller adds the bias.

    Args:
        img_size: Image size in pixels.
        patch_size: Patch size in pixels.
        stride: Distance between neighbouring patches in pixels; None uses the patch size.
        in_chans: Number of image channels.
        embed_dim: Model width C.
        dynamic_img_size: Whether to accept images of any size, padded on the right and bottom to full patches.
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
        """Set the image size and resample the convolution's weights to another patch size.

        Raises:
            ValueError: The image size is less than 1, or the patches do not cover the image and padding is disabled
                (`dynamic_img_size=False`).
        """
        img_size = to_2tuple(self.img_size if img_size is None else img_size)
        if min(img_size) < 1:
            raise ValueError(f"img_size must be at least 1, got {img_size}")
        patch_size = to_2tuple(patch_size or self.patch_size)
        stride = patch_size if self.stride == self.patch_size else self.stride
        grid_size = patch_grid(img_size, patch_size, stride, pad=self.dynamic_img_size)
        covered = tuple((g - 1) * s + p for g, s, p in zip(grid_size, stride, patch_size))
        if covered != img_size and not self.dynamic_img_size:
            size = str(covered[0]) if covered[0] == covered[1] else f"{covered[0]} {covered[1]}"
            raise ValueError(
                f"patches of {patch_size} at stride {stride} must cover the image, got img_size={img_size}: set "
                f"img_size={covered} (--img-size {size}), or pad images with dynamic_img_size=True "
                "(--model-kwargs dynamic_img_size=True)"
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
        """Return the patch grid (h, w) of an image of size (H, W)."""
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


for _name in ("check_channels", "check_size", "copy_for_product", "patch_grid"):
    torch.fx.wrap(_name)


def check_channels(x: Tensor, channels: int) -> None:
    """Raise a ValueError unless x has the shape (B, channels, H, W)."""
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"images must have the shape (B, {channels}, H, W), got {list(x.shape)}")


def check_size(height: int, width: int, img_size: tuple[int, int]) -> None:
    """Raise a ValueError if the image size differs from the size that the model was built for.

    The message names an argument of timm's function, because without the argument, timm's function returns the image
    size of the pretrained weights instead of `img_size`.
    """
    if height != img_size[0] or width != img_size[1]:
        size = (height, width)
        word = height if height == width else f"'{size}'"  # the shell removes the quotes
        raise ValueError(
            f"image size must be {img_size}, got {size}: resize the images, for example as in "
            f"timm.data.resolve_model_data_config(model, dict(input_size={(3, *img_size)})), or create the model with "
            f"img_size={size} (in timm's scripts, --model-kwargs img_size={word}) or dynamic_img_size=True, or call "
            "its set_input_size()"
        )


def patch_grid(
    img_size: tuple[int, int], patch_size: tuple[int, int], stride: tuple[int, int], pad: bool
) -> tuple[int, int]:
    """Return the patch grid (h, w): patches that fit into the image or, if `pad`, that cover the padded image."""
    h = (img_size[0] - patch_size[0] + (stride[0] - 1 if pad else 0)) // stride[0] + 1
    w = (img_size[1] - patch_size[1] + (stride[1] - 1 if pad else 0)) // stride[1] + 1
    return max(1, h), max(1, w)
