"""Renaming, truncation, resampling and checks of pretrained state dicts, among them ViM's published checkpoints."""

import math
import re
from collections.abc import Mapping
from typing import Any

from timm.layers import resample_patch_embed
from torch import Tensor, nn

from .tokens import resample_pos_embed

# Regular expressions that rename keys of ViM's published checkpoints, applied in order. The suffix `_b` in ViM's keys
# marks the backward direction.
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


def rename_published(state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Rename ViM's published state-dict keys to this package's names. Keys that are already renamed are kept."""
    renamed = {}
    for name, value in state_dict.get("model", state_dict).items():
        for pattern, replacement in _VIM_NAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def first_blocks(weights: dict[str, Tensor], depth: Any) -> dict[str, Tensor]:
    """Remove all blocks except the first `depth` blocks from a state dict. The keys may be this package's or ViM's.

    All blocks are returned if `depth` is not an integer.
    """
    if not isinstance(depth, int):
        return weights
    blocks = {name: re.match(r"(?:blocks|layers)\.(\d+)\.", name) for name in weights}
    return {name: tensor for name, tensor in weights.items() if not (block := blocks[name]) or int(block[1]) < depth}


def shapes_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape of each entry of a state dict, or None for an entry that is not a tensor."""
    return {name: getattr(value, "shape", None) for name, value in state_dict.items()}


def check_architecture(state_dict: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check that a checkpoint has the same keys and shapes as a model.

    The head is not compared, and neither are the shapes of the patch and position embeddings, which depend on the patch
    size and the image size.

    Raises:
        RuntimeError: The architectures differ. The message describes the architectures, names the model arguments of
            the checkpoint if known, and lists up to three keys of each kind of difference.
    """
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}
    other = {name: value for name, value in state_dict.items() if not name.startswith("head.")}
    common = own.keys() & other.keys() - {"patch_embed.proj.weight", "pos_embed"}
    differences = {
        "missing": own.keys() - other.keys(),
        "unexpected": other.keys() - own.keys(),
        "with other shapes": [name for name in common if own[name].shape != other[name].shape],
    }
    if not any(differences.values()):
        return

    listed = [f"{len(names)} {what} ({', '.join(sorted(names)[:3])})" for what, names in differences.items() if names]
    expected, found = architecture(own), architecture(other)
    if found == expected:
        problem = f"the checkpoint's tensors must match the model, {expected}"
    else:
        problem = f"the checkpoint's architecture must match the model, {expected}, got {found}{_remedy(own, other)}"
    raise RuntimeError(f"{problem}; keys: {', '.join(listed)}")


def architecture(state_dict: Mapping[str, Tensor]) -> str:
    """Return a description of the architecture of a state dict, such as "a ViL with ...", for messages."""
    arguments = _arguments_of(state_dict)
    if not arguments:
        return "an unknown architecture"
    return f"a {_kind_of(state_dict)} with embed_dim {arguments['embed_dim']} and depth {arguments['depth']}"


def _kind_of(state_dict: Mapping[str, Tensor]) -> str:
    return "ViM" if any(name.endswith(".A_log") for name in state_dict) else "ViL"


def _arguments_of(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model arguments that the shapes in a state dict determine, or {} for an unknown architecture."""
    projections = [name for name in state_dict if re.fullmatch(r"blocks\.\d+\.mixer\.in_proj\.weight", name)]
    if not projections:
        return {}
    arguments: dict[str, Any] = {"embed_dim": state_dict[projections[0]].shape[1], "depth": len(projections)}
    patches = state_dict.get("patch_embed.proj.weight")
    if patches is not None and patches.dim() == 4:
        height, width = patches.shape[2:]
        arguments["patch_size"] = height if height == width else (height, width)
    return arguments


def _remedy(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Return how to load the checkpoint `other` instead, or "" if model arguments cannot change `own` to `other`."""
    expected, found = _arguments_of(own), _arguments_of(other)
    changed = ", ".join(f"{name}={value}" for name, value in found.items() if value != expected.get(name))
    if not changed or _kind_of(own) != _kind_of(other):
        return ""
    return (
        f": create the model with {changed}, or load the file with vil.from_checkpoint, which reads the arguments from "
        "checkpoints of vil train"
    )


def check_classes(state_dict: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raise a RuntimeError if the checkpoint's head does not have as many classes as the model's head."""
    classes, num_classes = (len(tensors.get("head.bias", ())) for tensors in (state_dict, model.state_dict()))
    if classes != num_classes:
        raise RuntimeError(
            f"the checkpoint has {classes} classes, but the model has {num_classes}: create the model with "
            f"num_classes={classes}, load the checkpoint, and call reset_classifier({num_classes})"
        )


def resample(
    state_dict: Mapping[str, Tensor], patch_size: tuple[int, int], grid_size: tuple[int, int]
) -> dict[str, Tensor]:
    """Resample the patch and position embeddings of a checkpoint to a model's patch size and patch grid.

    Raises:
        RuntimeError: The position embeddings must be resampled, but the checkpoint's patch grid is not square.
    """
    resampled = dict(state_dict)

    # Embeddings with an unexpected number of dimensions are not resampled, and load_state_dict rejects them.
    patch_embed = resampled.get("patch_embed.proj.weight")
    if patch_embed is not None and patch_embed.dim() == 4:
        resampled["patch_embed.proj.weight"] = resample_patch_embed(patch_embed, list(patch_size))

    pos_embed = resampled.get("pos_embed")
    if pos_embed is not None and pos_embed.dim() == 3 and pos_embed.shape[1] != math.prod(grid_size) + 1:
        side = math.isqrt(max(0, pos_embed.shape[1] - 1))
        if side**2 + 1 != pos_embed.shape[1]:
            raise RuntimeError(
                f"pos_embed in the checkpoint must have a square patch grid and a class token, got "
                f"{pos_embed.shape[1]} tokens: load the checkpoint into a model with the original img_size, then call "
                "set_input_size()"
            )
        resampled["pos_embed"] = resample_pos_embed(pos_embed, grid_size, (side, side))
    return resampled
