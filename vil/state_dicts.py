"""State dicts in the checkpoints of this and other programs: finding, checking and loading them."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .errors import CheckpointError

# keys of timm, PyTorch's tutorials, DeiT and DeepSpeed
RAW = ("state_dict", "model_state_dict", "model", "net", "module")
EMA = ("state_dict_ema", "model_ema", "ema")
# attributes of wrappers: within names, in front of some names, and in front of all names (Lightning's modules)
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
IN_FRONT = "module."
OF_ALL = ("model.", "net.")
MOST_RESAMPLED = 2**26  # maximum number of values that resampling to another image size may add
MOST_DIMENSIONS = 64
COUNTER = "n_averaged"  # counter of PyTorch's AveragedModel, beside its module


class StateDictError(ValueError):
    """A checkpoint's state dict cannot be identified without guessing."""


class Found(NamedTuple):
    """A state dict, the keys that lead to it, and whether it has EMA weights."""

    keys: tuple[str, ...]
    is_ema: bool
    tensors: dict[Any, Any]

    def __str__(self) -> str:
        return "".join(f"[{key!r}]" for key in self.keys)


def find_state_dict(content: Any, use_ema: bool | None, ema_is_best: bool | None) -> Found:
    """Return the state dict of a checkpoint.

    Args:
        content: What the file holds.
        use_ema: Return the EMA weights. False: Return EMA weights only if there are no others. None: Return the
            weights that the file stores as the best, otherwise the EMA weights if any.
        ema_is_best: Whether the file stores that its EMA weights are the best. None: The file does not store which are.

    Raises:
        StateDictError: There is none under a known key, or there are several of the same kind.
        TypeError: The content is not a dict.
    """
    if not isinstance(content, dict):
        raise TypeError(f"{type(content).__name__} is not a dict")
    found = _search(content)
    emas = [one for one in found if one.is_ema]
    others = [one for one in found if not one.is_ema]
    if use_ema and not emas:
        raise StateDictError("has no EMA weights")

    prefers_ema = ema_is_best is not False if use_ema is None else use_ema
    candidates = emas if emas and (prefers_ema or not others) else others
    whole = Found((), False, content)  # a plain state dict
    if not any(_has_tensors(one.tensors) for one in [*candidates, whole]):
        elsewhere = _below(content)
        if elsewhere:
            keys = ", ".join(RAW + EMA)
            raise StateDictError(f"has no state dict under the keys {keys}: {_to_extract(elsewhere)}")
    if not candidates:
        return whole

    first, *others = candidates
    if not all(_same(first.tensors, other.tensors) for other in others):
        raise StateDictError(f"has several state dicts: {_to_extract(candidates)}")
    return first


def _search(content: dict[Any, Any], keys: tuple[str, ...] = (), is_ema: bool = False) -> list[Found]:
    """Return the state dicts under known keys, and one level below these."""
    found = []
    empty = []
    for key in RAW + EMA:
        value = content.get(key)
        if not isinstance(value, dict):
            continue
        one = Found((*keys, key), is_ema or key in EMA, value)
        if _has_tensors(value):
            found.append(one)
        elif not keys:
            found += _search(value, one.keys, one.is_ema)
            empty.append(one)
    return found or empty[:1]  # a later message names what the empty one lacks


def _below(content: dict[Any, Any]) -> list[Found]:
    """Return the dicts with tensors of the first of a few levels that has some, the largest first."""
    level = [Found((), False, content)]
    for _ in range(4):
        level = [
            Found((*keys, key), False, value)
            for keys, _, inner in level
            for key, value in inner.items()
            if isinstance(value, dict)
        ]
        if found := [one for one in level if _has_tensors(one.tensors)]:
            return sorted(found, key=lambda one: -len(one.tensors))
    return []


def _has_tensors(value: Any) -> bool:
    return isinstance(value, dict) and any(isinstance(tensor, torch.Tensor) for tensor in value.values())


def _same(first: dict[Any, Any], second: dict[Any, Any]) -> bool:
    return first.keys() == second.keys() and all(
        a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b))
        for a, b in zip(first.values(), (second[name] for name in first))
    )


def _to_extract(found: list[Found]) -> str:
    several = ", ".join(f"{one} ({len(one.tensors)} tensors)" for one in found[:8])
    return f"{several}. Extract one, such as torch.save(torch.load(FILE){found[0]}, 'weights.pth')"


def without_wrappers(weights: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict under the names that the model has without its wrappers.

    These are DataParallel, DistributedDataParallel, FSDP, torch.compile, activation checkpointing, AveragedModel, and
    a LightningModule whose only part is the model.

    Raises:
        StateDictError: Two names become the same.
    """
    names = {name: name for name in weights}  # names in the file, and without the wrappers that are known so far
    while (unwrapped := _without_outer_wrappers(names)) != names:
        names = unwrapped
    if len(set(names.values())) < len(names):
        raise StateDictError(f"has tensors of the same name but for their wrappers: {_groups(names)}")
    return {short: weights[name] for name, short in names.items()}


def _without_outer_wrappers(names: dict[str, str]) -> dict[str, str]:
    """Remove the outermost wrapper of each kind from the values of a dict of names."""
    names = dict(names)
    for wrapper in INSIDE:
        names = {name: short.replace(wrapper, "") for name, short in names.items()}

    averaged = {name: short for name, short in names.items() if short != COUNTER}
    if averaged and all(short.startswith(IN_FRONT) for short in averaged.values()):
        names = averaged  # those of an AveragedModel, without its counter
    names = {name: short.removeprefix(IN_FRONT) for name, short in names.items()}

    for wrapper in OF_ALL:
        if all(short.startswith(wrapper) for short in names.values()):
            names = {name: short.removeprefix(wrapper) for name, short in names.items()}
    return names


def within_own_prefix(weights: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a state dict with the prefix that all `names` of a model have itself, if none of the weights has it."""
    for prefix in OF_ALL:
        if all(name.startswith(prefix) for name in names) and not any(name.startswith(prefix) for name in weights):
            return {prefix + name: tensor for name, tensor in weights.items()}
    return weights


def parts_of(names: Iterable[str]) -> str:
    """Return a remedy for a state dict in which the model has a prefix that no known wrapper has, or an empty text."""
    names = [*names]
    common, dot, _ = os.path.commonprefix(names).rpartition(".")  # noqa: RUF071  rpartition ends at a "."
    prefix = next((wrapper for wrapper in OF_ALL if any(name.startswith(wrapper) for name in names)), common + dot)
    if not prefix:
        return ""
    return (
        f"; its names begin with {_groups(names)}. If the model is in {prefix!r}, extract "
        f"{{name[{len(prefix)}:]: t for name, t in state_dict.items() if name.startswith({prefix!r})}}"
    )


def _groups(names: Iterable[str]) -> str:
    counts = Counter(name.partition(".")[0] + "." * ("." in name) for name in names)
    return ", ".join(f"{start!r} ({count})" for start, count in counts.most_common(8))


def check_weights(weights: dict[str, Any], path: str | Path) -> None:
    """Raise a CheckpointError that names a value of a state dict that cannot be a weight."""
    for name, tensor in weights.items():
        if problem := _problem_of(tensor):
            raise CheckpointError(f"{path} does not hold weights of a model: {name!r} {problem}")


def _problem_of(tensor: Any) -> str | None:
    """Return why a value of a state dict cannot be a weight, or None."""
    if not isinstance(tensor, torch.Tensor):
        return f"is not a tensor but {type(tensor).__name__}"
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() == 1):
        return f"is a tensor of {tensor.dtype}"
    if tensor.ndim > MOST_DIMENSIONS:  # PyTorch computes with no more
        return f"has {tensor.ndim} dimensions, more than {MOST_DIMENSIONS}"
    if tensor.is_floating_point() and not tensor.float().isfinite().all():  # as models do
        return "has values that are not finite"
    return None


def load_weights(model: nn.Module, weights: dict[str, Any], path: str | Path) -> None:
    """Load all weights of a model from the result of `Checkpoint.weights`.

    Raises:
        CheckpointError: The weights have another architecture or number of classes than the model.
    """
    own = model.state_dict()
    try:
        expected = _num_values(own)
        given = _num_values(weights)
        if expected > 4 * given + MOST_RESAMPLED:
            raise ValueError(f"it has {expected} values, and the file {given}")
        fitting = fitted(within_own_prefix(weights, own), model)
        # a model on the meta device uses the file's memory
        model.load_state_dict(fitting, assign=any(p.is_meta for p in model.parameters()))
    except Exception as error:  # timm's filters and names that are not text raise various types
        lines = [line.strip()[:400] for line in str(error).splitlines()]
        reason = " ".join(lines[:6]) + parts_of(map(str, weights))
        raise CheckpointError(f"{path} does not fit the model: {reason}") from error


def _num_values(weights: dict[str, Any]) -> int:
    return sum(math.prod(tensor.shape) for tensor in weights.values())


def fitted(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the weights unchanged if they have the model's shapes, otherwise adapted by timm's filter for the
    model.
    """
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if adapt is None or shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}:
        return weights
    return adapt(dict(weights), model)
