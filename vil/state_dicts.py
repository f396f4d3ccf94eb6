"""Finding, checking and loading state dicts in checkpoints of this package and other programs."""

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

# keys of raw and of EMA state dicts in checkpoints of programs such as timm, DeiT and DeepSpeed
RAW = ("state_dict", "model_state_dict", "model", "net", "module")
EMA = ("state_dict_ema", "model_ema", "ema")
# parts that torch.compile, FSDP and activation checkpointing insert into parameter names
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
IN_FRONT = "module."  # prefix of parameter names in DataParallel, DistributedDataParallel and AveragedModel
OF_ALL = ("model.", "net.")  # usual prefixes of parameter names if a LightningModule contains the model
MOST_RESAMPLED = 2**26  # a model may have at most 4 times a file's number of weights plus MOST_RESAMPLED
MOST_DIMENSIONS = 64  # maximum number of tensor dimensions that most PyTorch operators support
COUNTER = "n_averaged"  # buffer that PyTorch's AveragedModel adds to the state dict of the averaged model


class StateDictError(ValueError):
    """The state dict in a checkpoint is missing or ambiguous."""


class Found(NamedTuple):
    """Candidate for the model's state dict in a checkpoint.

    Attributes:
        keys: Keys from the root of the checkpoint to the state dict.
        is_ema: Whether the state dict contains EMA weights.
        tensors: The state dict.
    """

    keys: tuple[str, ...]
    is_ema: bool
    tensors: dict[Any, Any]

    def __str__(self) -> str:
        return "".join(f"[{key!r}]" for key in self.keys)


def find_state_dict(content: Any, use_ema: bool | None, ema_is_best: bool | None) -> Found:
    """Find the state dict in the content of a checkpoint.

    Args:
        content: Content of the checkpoint file.
        use_ema: True returns the EMA weights. False returns EMA weights only if there are no other weights. None
            follows `ema_is_best`; if both are None, EMA weights are returned if there are any.
        ema_is_best: Whether the EMA weights are the best weights in the file; None if the file does not say which
            weights are best.

    Raises:
        StateDictError: EMA weights are requested but missing, state dicts are only under unknown keys, or there are
            several different state dicts.
        TypeError: The content is not a dict.
    """
    if not isinstance(content, dict):
        raise TypeError(f"content of a checkpoint must be a dict, got {type(content).__name__}")
    found = _search(content)
    emas = [one for one in found if one.is_ema]
    others = [one for one in found if not one.is_ema]
    if use_ema and not emas:
        raise StateDictError("the checkpoint has no EMA weights")

    prefers_ema = ema_is_best is not False if use_ema is None else use_ema
    candidates = emas if emas and (prefers_ema or not others) else others
    whole = Found((), False, content)  # the whole file, which may be a state dict itself
    if not any(_has_tensors(one.tensors) for one in [*candidates, whole]):
        elsewhere = _below(content)
        if elsewhere:
            keys = ", ".join(RAW + EMA)
            raise StateDictError(
                f"the checkpoint has no state dict under the keys {keys}, only at {_to_extract(elsewhere)}"
            )
    if not candidates:
        return whole

    first, *others = candidates
    if not all(_same(first.tensors, other.tensors) for other in others):
        raise StateDictError(f"the checkpoint has several different state dicts: {_to_extract(candidates)}")
    return first


def has_ema(content: Any) -> bool:
    """Return whether the content of a checkpoint has EMA weights in addition to raw weights."""
    return isinstance(content, dict) and {one.is_ema for one in _search(content)} == {True, False}


def _search(content: dict[Any, Any], keys: tuple[str, ...] = (), is_ema: bool = False) -> list[Found]:
    """Return the state dicts under the keys that training programs use, such as "state_dict" or "model_ema".

    A dict without tensors under such a key at the root is searched for the same keys.
    """
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
    return found or empty[:1]  # an empty state dict makes loading report the missing weights


def _below(content: dict[Any, Any]) -> list[Found]:
    """Return the least deeply nested dicts that contain tensors, the largest first. Four levels are searched."""
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
    listed = ", ".join(f"{one} ({len(one.tensors)} tensors)" for one in found[:8])
    return f"{listed}. Extract one, for example with torch.save(torch.load(FILE){found[0]}, 'weights.pth')"


def without_wrappers(weights: dict[str, Any]) -> dict[str, Any]:
    """Remove the name prefixes of wrappers from the keys of a state dict.

    Known wrappers are DataParallel, DistributedDataParallel, FSDP, torch.compile, activation checkpointing,
    AveragedModel, and a LightningModule that contains only the model.

    Raises:
        StateDictError: Two names are equal without the prefixes.
    """
    names = {name: name for name in weights}  # maps each name in the file to the name without wrapper prefixes
    while (unwrapped := _without_outer_wrappers(names)) != names:
        names = unwrapped
    if len(set(names.values())) < len(names):
        raise StateDictError(
            f"parameter names differ only in prefixes of wrappers such as DataParallel: {_groups(names)}"
        )
    return {short: weights[name] for name, short in names.items()}


def _without_outer_wrappers(names: dict[str, str]) -> dict[str, str]:
    """Remove one layer of wrapper prefixes from the values of `names`, which are parameter names."""
    names = dict(names)
    for wrapper in INSIDE:
        names = {name: short.replace(wrapper, "") for name, short in names.items()}

    averaged = {name: short for name, short in names.items() if short != COUNTER}
    if averaged and all(short.startswith(IN_FRONT) for short in averaged.values()):
        names = averaged  # drop the counter that PyTorch's AveragedModel stores
    names = {name: short.removeprefix(IN_FRONT) for name, short in names.items()}

    for wrapper in OF_ALL:
        if all(short.startswith(wrapper) for short in names.values()):
            names = {name: short.removeprefix(wrapper) for name, short in names.items()}
    return names


def within_own_prefix(weights: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Add "model." or "net." to all keys of `weights` if all names in the model, but no keys, begin with the prefix."""
    for prefix in OF_ALL:
        if all(name.startswith(prefix) for name in names) and not any(name.startswith(prefix) for name in weights):
            return {prefix + name: tensor for name, tensor in weights.items()}
    return weights


def parts_of(names: Iterable[str]) -> str:
    """Return a hint on how to extract the model's weights if the parameter names in a file have a prefix."""
    names = [*names]
    common, dot, _ = os.path.commonprefix(names).rpartition(".")  # noqa: RUF071  rpartition ends at a "."
    prefix = next((wrapper for wrapper in OF_ALL if any(name.startswith(wrapper) for name in names)), common + dot)
    if not prefix:
        return ""
    return (
        f"; names in the file begin with {_groups(names)}. If the model is in {prefix!r}, extract "
        f"{{name[{len(prefix)}:]: t for name, t in state_dict.items() if name.startswith({prefix!r})}}"
    )


def _groups(names: Iterable[str]) -> str:
    counts = Counter(name.partition(".")[0] + "." * ("." in name) for name in names)
    return ", ".join(f"{start!r} ({count})" for start, count in counts.most_common(8))


def check_weights(weights: dict[str, Any], path: str | Path) -> None:
    """Raise a CheckpointError if a state dict is empty or has a value that cannot be a weight, such as NaN."""
    if not weights:
        raise CheckpointError(f"{path} does not contain any weights")
    for name, tensor in weights.items():
        if problem := _problem_of(tensor):
            raise CheckpointError(f"{path} does not contain valid weights: {name!r} {problem}")


def _problem_of(tensor: Any) -> str | None:
    """Return the reason why a value of a state dict cannot be a weight, or None if the value is valid."""
    if not isinstance(tensor, torch.Tensor):
        return f"must be a tensor, got {type(tensor).__name__}"
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.element_size() == 1):
        return f"has the unsupported dtype {tensor.dtype}"
    if tensor.ndim > MOST_DIMENSIONS:
        return f"must have at most {MOST_DIMENSIONS} dimensions, got {tensor.ndim}"
    if tensor.is_floating_point() and not tensor.float().isfinite().all():
        return "has values that are NaN or infinite"
    return None


def load_weights(model: nn.Module, weights: dict[str, Any], path: str | Path) -> None:
    """Load a state dict from `Checkpoint.weights` into a model. Every weight of the model must be present.

    Raises:
        CheckpointError: The weights are from another architecture or have another number of classes.
    """
    own = model.state_dict()
    try:
        expected = _num_values(own)
        given = _num_values(weights)
        if expected > 4 * given + MOST_RESAMPLED:
            raise ValueError(f"expected {expected} weights, but the file has {given}")
        fitting = fitted(within_own_prefix(weights, own), model)
        # With assign=True, the file's tensors become the parameters, which a model on the meta device needs.
        model.load_state_dict(fitting, assign=any(p.is_meta for p in model.parameters()))
    except Exception as error:  # timm's filters of checkpoints raise exceptions of various types
        lines = [line.strip()[:400] for line in str(error).splitlines()]
        reason = _other_classes(weights, model) or " ".join(lines[:6]).rstrip(".") + parts_of(map(str, weights))
        raise CheckpointError(f"{path} does not fit the model: {reason}") from error


def _other_classes(weights: dict[str, Any], model: nn.Module) -> str:
    """Return a message if only the number of classes differs between a state dict and a model, and "" otherwise."""
    own = model.state_dict()
    if own.keys() != weights.keys() or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        return ""
    shapes = [(tensor.shape, weights[name].shape) for name, tensor in own.items()]
    different = [(expected, given) for expected, given in shapes if expected != given]
    if any(len(expected) != len(given) or expected[1:] != given[1:] for expected, given in different):
        return ""
    found = {given[0] for _, given in different}
    if len(found) != 1 or {expected[0] for expected, _ in different} != {getattr(model, "num_classes", None)}:
        return ""
    (classes,) = found
    return (
        f"the checkpoint has {classes} classes, but the model has {model.num_classes}: set num_classes to {classes}; "
        f"for a new head, call reset_classifier({model.num_classes}) on the loaded model"
    )


def _num_values(weights: dict[str, Any]) -> int:
    return sum(math.prod(tensor.shape) for tensor in weights.values())


def fitted(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Adapt a state dict by the `checkpoint_filter_fn` of the model's module, if any.

    A state dict with the same names and shapes as the model is returned unchanged.
    """
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if adapt is None or shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}:
        return weights
    return adapt(dict(weights), model)
