"""Adaptation of state dicts that initialize a model of another depth or with other classes."""

from __future__ import annotations

from collections.abc import Sequence

import timm
import torch
from torch import Tensor, nn

from .classes import first_difference, normal, order_of
from .state_dicts import fitted

MOST_LAYERS = 4  # maximum number of new layers, and of unused layers, that a description lists


def num_classes_of(model: str, weights: dict[str, Tensor]) -> int:
    """Return the number of classes of the head in a state dict, or 0 if no head with a bias is found."""
    bias = f"{_classifiers(model)[0]}.bias"
    return weights[bias].numel() if bias in weights else 0


def fit_head(
    model: str, weights: dict[str, Tensor], own_names: Sequence[str], label_names: Sequence[str]
) -> tuple[dict[str, Tensor], str]:
    """Reorder the rows of the head to match `label_names`. Return the weights and a description of the change.

    If the classes differ, the head is removed from the weights.

    Args:
        model: Model name in timm.
        weights: State dict from the file.
        own_names: Class names of the file by index; empty if unknown.
        label_names: Class names of the data by index; empty if unknown.
    """
    if not label_names or not own_names:
        return weights, ""
    names = [f"{classifier}.{part}" for classifier in _classifiers(model) for part in ("weight", "bias")]
    head = [name for name in names if name in weights and len(weights[name]) == len(own_names)]
    order = order_of(own_names, label_names)
    if order is None:
        reason = ""
        # The description gives no reason if the file and the data have no class in common.
        if {*map(normal, own_names)} & {*map(normal, label_names)}:
            reason = f", because {first_difference(own_names, label_names, 'the file', 'the data')}"
        without_head = {name: tensor for name, tensor in weights.items() if name not in head}
        return without_head, f"; new head for {len(label_names)} classes{reason}"
    if order == [*range(len(order))]:
        return weights, ""
    return weights | {
        name: weights[name][order] for name in head
    }, "; the head's rows were reordered to the class names"


def _classifiers(model: str) -> tuple[str, ...]:
    """Return the names of a model's classifier layers from timm's pretrained config."""
    config = timm.get_pretrained_cfg(model)
    classifier = (config.classifier if config else None) or "head"
    return (classifier,) if isinstance(classifier, str) else tuple(classifier)


def names_taken(model: nn.Module, weights: dict[str, Tensor]) -> list[str]:
    """Return the names of the model's tensors that equal the tensors of a state dict after resampling by `fitted`."""
    own, adapted = model.state_dict(), fitted(weights, model)
    return [name for name in own if name in adapted and torch.equal(adapted[name].to(own[name]), own[name])]


def describe_initialization(model: nn.Module, weights: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    """Describe how many of a model's tensors were loaded, and which layers are new or were not used.

    Tensors of a head that `fit_head` has removed are not listed as new.
    """
    own, taken = model.state_dict(), names_taken(model, weights)
    adapted = fitted(weights, model)
    resampled = [name for name in taken if name in given and given[name].shape != own[name].shape]
    others = {
        "new": [name for name in own if name not in taken and (name in weights or name not in given)],
        "not used": [name for name in adapted if name not in own],
    }
    parts = [f"{len(taken)} of {len(own)} tensors" + f", {len(resampled)} resampled" * bool(resampled)]
    parts += [f"{what}: {_layers(names)}" for what, names in others.items() if names]
    return "; ".join(parts)


def _layers(names: Sequence[str]) -> str:
    """Return the layers of tensors as text, such as "head" for head.weight and head.bias."""
    layers = [*dict.fromkeys(name.rpartition(".")[0] or name for name in names)]
    return ", ".join(layers[:MOST_LAYERS]) + f" and {len(layers) - MOST_LAYERS} more" * (len(layers) > MOST_LAYERS)
