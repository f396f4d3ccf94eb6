"""Seeing inside a ViL or ViM: what the class token reads along each scan, what is written, and what a pixel can reach.

    python -m vil.viz --checkpoint output/digits/last.pt --images data/digits/validation/3 --out output/viz

Needs matplotlib for the pictures (`pip install -e ".[viz]"`), not for the numbers.

    B images    G = 2 directions, first token to last and last to first    L tokens    D channels    N states
    T tokens in the order in which a direction reads them    H, W image    h, w grid of patches
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from . import checkpoint
from .block import LonghornDirection, at_least_fp32
from .config import ConfigError
from .data.folders import list_images
from .data.images import read_image
from .factory import create_model, from_checkpoint
from .kernels.scan.chunked import RECURRENCES
from .vision_longhorn import VisionLonghorn, split_class_token

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIRECTIONS = ("first to last", "last to first")


@dataclass
class Trace:
    """How the recurrences of one block treated each token, (B, G, L) each, in the order of the image.

    Attributes:
        relevance: Each token's for the class token: the norm over channels of what it adds to the class token's output
            of the scan. A direction can only read tokens that come before the class token on its way.
        step: How much of the token is written: beta in ViL, the time step dt in ViM, the mean over channels.
        state_norm: Frobenius norm of the state (D, N) after the token.
    """

    relevance: Tensor
    step: Tensor
    state_norm: Tensor


@torch.no_grad()
def trace_scans(model: VisionLonghorn, images: Tensor) -> list[Trace]:
    """The scans of every block on images (B, 3, H, W).

    Raises:
        TypeError: The model is no VisionLonghorn.
    """
    _check(model)
    with _recorded_inputs(model) as recorded:
        model.forward_features(images)
    traces = []
    for block in model.blocks:
        parts = [
            _trace(block.mixer.recurrence, direction, *recorded[direction], reverse)
            for direction, reverse in zip(block.mixer.directions, (False, True))
        ]
        traces.append(Trace(*(torch.stack(values, dim=1) for values in zip(*parts))))
    return traces


def _check(model: nn.Module) -> None:
    if not isinstance(model, VisionLonghorn):
        raise TypeError(f"a {type(model).__name__} has no scans to look into; this is for VisionLonghorn models")
    if model.pooled:
        raise TypeError("a pooled model scans rows and columns, which are no tokens to look at; take one that is not")


@contextmanager
def _recorded_inputs(model: VisionLonghorn):
    """Collects what each direction hands to its recurrence. With hooks on them, blocks run unfused."""
    recorded: dict[LonghornDirection, tuple[Tensor, ...]] = {}
    handles = [
        direction.register_forward_hook(lambda module, _, output: recorded.update({module: output}))
        for block in model.blocks
        for direction in block.mixer.directions
    ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _trace(
    recurrence: str, direction: LonghornDirection, v_BLD: Tensor, step_logits_BLD: Tensor, k_BLN: Tensor, q_BLN: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """relevance_BL, step_BL and state_norm_BL of one direction."""
    decay_TBND, drive_TBND, step_BLD = _coefficients(recurrence, direction, v_BLD, step_logits_BLD, k_BLN, reverse)
    T = len(decay_TBND)
    state_BND, norms = torch.zeros_like(drive_TBND[0]), []
    for decay_BND, drive_BND in zip(decay_TBND, drive_TBND):
        state_BND = decay_BND * state_BND + drive_BND
        norms.append(state_BND.flatten(1).norm(dim=1))
    # what is left of a token's drive when the class token is read: the product of the later decays
    middle = (T - 1) // 2
    position = T - 1 - middle if reverse else middle
    contribution_TBND = torch.zeros_like(drive_TBND)
    left_BND = torch.ones_like(state_BND)
    for t in range(position, -1, -1):
        contribution_TBND[t] = left_BND * drive_TBND[t]
        left_BND = left_BND * decay_TBND[t]
    added_TBD = torch.einsum("tbnd,bn->tbd", contribution_TBND, q_BLN[:, middle].to(contribution_TBND.dtype))
    relevance_BL = _in_image_order(added_TBD.norm(dim=-1), reverse)
    return relevance_BL, step_BLD.mean(-1), _in_image_order(torch.stack(norms), reverse)


def _in_image_order(values_TB: Tensor, reverse: bool) -> Tensor:
    return (values_TB.flip(0) if reverse else values_TB).T


def _coefficients(recurrence, direction, v_BLD, step_logits_BLD, k_BLN, reverse) -> tuple[Tensor, Tensor, Tensor]:
    """decay_TBND and drive_TBND of S_t = decay_t S_{t-1} + drive_t, and the step (beta or dt) of tokens, step_BLD."""
    v_BLD, step_logits_BLD, k_BLN = (at_least_fp32(t) for t in (v_BLD, step_logits_BLD, k_BLN))
    step_logits_BLD = step_logits_BLD + direction.step_proj.bias
    selective = recurrence == "selective"
    step_BLD = F.softplus(step_logits_BLD) if selective else step_logits_BLD.sigmoid()
    inputs = [v_BLD, step_BLD if selective else step_logits_BLD, k_BLN]
    inputs_GTBX = [(t.flip(1) if reverse else t).transpose(0, 1)[None] for t in inputs]
    A_1ND = [-at_least_fp32(direction.A_log).exp().T[None]] if selective else []
    shape = 1, *inputs_GTBX[0].shape[1:3], k_BLN.shape[-1], v_BLD.shape[-1]
    decay_GTBND, drive_GTBND = (v_BLD.new_empty(shape) for _ in range(2))
    RECURRENCES[recurrence].coefficients(decay_GTBND, drive_GTBND, *inputs_GTBX, *A_1ND)
    return decay_GTBND[0], drive_GTBND[0], step_BLD


def patch_maps(model: VisionLonghorn, values_BGL: Tensor, image_size: Sequence[int]) -> Tensor:
    """Values of tokens as maps (B, G, h, w) of the patches, without the class token's."""
    patches, _ = split_class_token(values_BGL.flatten(0, 1).unsqueeze(-1))
    grid = model.patch_embed.dynamic_feat_size(tuple(image_size[-2:]))
    return patches.reshape(*values_BGL.shape[:2], *grid)


def effective_receptive_field(model: VisionLonghorn, images: Tensor, token: str = "centre") -> Tensor:
    """How much each pixel moves the final features of a token, (H, W), summing to 1 (Luo et al., 2016).

    The gradient of the sum of the token's features with respect to the image, its absolute value averaged over colours
    and images.

    Args:
        model: Any VisionLonghorn.
        images: (B, 3, H, W).
        token: "centre" for the patch in the centre, "class" for the class token.

    Raises:
        TypeError: The model is no VisionLonghorn.
        ValueError: `token` is neither.
    """
    _check(model)
    if token not in ("centre", "class"):
        raise ValueError(f"token {token!r} is neither 'centre' nor 'class'")
    images = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        patches_BnC, class_token_B1C = split_class_token(model.forward_features(images))
        h, w = model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:]))
        chosen = class_token_B1C[:, 0] if token == "class" else patches_BnC[:, (h // 2) * w + w // 2]
        (gradient,) = torch.autograd.grad(chosen.sum(), images)
    field_HW = gradient.abs().mean((0, 1))
    return field_HW / field_HW.sum()


def plot_scans(model: VisionLonghorn, images: Tensor, shown: Tensor, blocks: Sequence[int] | None = None) -> Figure:
    """A picture: for each image and block, relevance, step and state norm along both directions, on one scale a pair.

    Args:
        model: Any VisionLonghorn.
        images: The model's input, (B, 3, H, W).
        shown: The images as the picture shows them beside the maps, (B, 3, H, W) in 0 to 1.
        blocks: Numbers of blocks; all if None.
    """
    from matplotlib.figure import Figure

    traces = trace_scans(model, images)
    blocks = range(len(traces)) if blocks is None else blocks
    step = {"longhorn": "beta", "selective": "dt"}[model.blocks[0].mixer.recurrence]
    columns = [
        (name, field) for name, field in zip(("relevance", step, "state norm"), ("relevance", "step", "state_norm"))
    ]
    rows = [(i, b) for i in range(len(images)) for b in blocks]
    figure = Figure(figsize=(1.5 * 7, 1.7 * len(rows) + 0.4), layout="constrained")
    axes = figure.subplots(len(rows), 7, squeeze=False)
    for row, (i, b) in zip(axes, rows):
        row[0].imshow(shown[i].permute(1, 2, 0).numpy(force=True))
        row[0].set_ylabel(f"block {b}")
        for c, (name, field) in enumerate(columns):
            maps = patch_maps(model, getattr(traces[b], field)[i : i + 1], images.shape)[0].numpy(force=True)
            row[1 + 2 * c].set_xlabel(f"{maps.min():.3g} to {maps.max():.3g}", fontsize=7)
            for g in range(2):
                axis = row[1 + 2 * c + g]
                axis.imshow(maps[g], cmap="viridis", vmin=maps.min(), vmax=maps.max())
                if (i, b) == rows[0]:
                    axis.set_title(f"{name},\n{DIRECTIONS[g]}", fontsize=8)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure


def plot_receptive_fields(fields: dict[str, Tensor]) -> Figure:
    """A picture of fields (H, W) by their titles, each on a logarithmic scale of four decades below its maximum."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(fields), 2.9), layout="constrained")
    for axis, (title, field_HW) in zip(figure.subplots(1, len(fields), squeeze=False)[0], fields.items()):
        top = float(field_HW.max())
        axis.imshow(field_HW.clamp(min=top * 1e-4).numpy(force=True), cmap="magma", norm=LogNorm(top * 1e-4, top))
        axis.set_title(title, fontsize=9)
        axis.set(xticks=[], yticks=[])
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True, help="checkpoint of train_imagenet.py")
    parser.add_argument("--images", required=True, type=Path, nargs="+", help="image files, or folders of them")
    parser.add_argument("--count", type=int, default=3, help="images in the picture of the scans (default: 3)")
    parser.add_argument("--blocks", type=int, nargs="+", help="blocks in it (default: first, middle, last)")
    parser.add_argument("--out", type=Path, default=Path("output/viz"), help="folder of scans.png and fields.png")
    options = parser.parse_args()
    try:
        draw(options)
    except (ConfigError, checkpoint.CheckpointError) as error:
        sys.exit(f"error: {error}")


def draw(options: argparse.Namespace) -> None:
    """Draws the pictures that the command line asks for.

    Raises:
        ConfigError, CheckpointError: The checkpoint is not one of train_imagenet.py or broken, a block does not exist,
            or an image cannot be read.
    """
    if options.count < 1:
        raise ConfigError(f"--count must be at least 1, not {options.count}")
    config = checkpoint.saved_config(options.checkpoint)
    if not config.get("model"):
        raise ConfigError(f"{options.checkpoint} is not a checkpoint of train_imagenet.py, and does not say its model")
    arguments = {name: config[name] for name in ("num_classes", "img_size") if config.get(name)}
    arguments |= config.get("model_kwargs") or {}
    model = from_checkpoint(options.checkpoint)  # first: it may be of another size than it says
    torch.manual_seed(0)
    untrained = create_model(config["model"], **arguments).eval()
    if not isinstance(model, VisionLonghorn):
        raise ConfigError(f"{options.checkpoint} is of {config['model']}, which has no scans to look into")
    depth = len(model.blocks)
    blocks = options.blocks or sorted({0, depth // 2, depth - 1})
    for block in blocks:
        if not 0 <= block < depth:
            raise ConfigError(f"--blocks: there is no block {block}; the model has 0 to {depth - 1}")
    data_config = resolve_model_data_config(model)
    transform = create_transform(**data_config)
    files = image_files(options.images)
    images = torch.stack([transform(read_picture(path)) for path in files[:64]])
    mean, std = (torch.tensor(data_config[name]).view(3, 1, 1) for name in ("mean", "std"))

    options.out.mkdir(parents=True, exist_ok=True)
    count = options.count
    shown = (images[:count] * std + mean).clamp(0, 1)
    plot_scans(model, images[:count], shown, blocks).savefig(options.out / "scans.png", dpi=110)
    fields = {
        f"{name}, {token}": effective_receptive_field(m, images, token)
        for name, m in (("untrained", untrained), ("trained", model))
        for token in ("centre", "class")
    }
    plot_receptive_fields(fields).savefig(options.out / "fields.png", dpi=110)
    print(f"{options.out / 'scans.png'}: {len(shown)} images; {options.out / 'fields.png'}: over {len(images)} images")


def image_files(paths: list[Path]) -> list[Path]:
    """Files, and those of folders: one of each folder, then the next of each.

    Raises:
        ConfigError: There is none.
    """
    folders = [sorted(map(Path, list_images(str(path), str(path)))) if path.is_dir() else [path] for path in paths]
    files = [path for files in zip(*folders) for path in files]
    if not files:
        raise ConfigError("--images: there are no images in " + " ".join(map(str, paths)))
    return files


def read_picture(path: Path) -> Image.Image:
    """Raises a ConfigError if the file is missing or cannot be decoded."""
    try:
        return read_image(path)
    except Exception as error:  # PIL's decoders have no common type of error
        raise ConfigError(f"--images: {str(path)!r} cannot be read as an image: {error}") from error


if __name__ == "__main__":
    main()
