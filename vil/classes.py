"""Comparison of class names between models, checkpoints and datasets, to match class indices.

Names are normalized with `normal` before comparing, because file systems may store "é" as one character or as two
characters.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import timm
from timm.data import ImageNetInfo

from .config import ConfigError
from .distributed import warn_on_rank0
from .published import IMAGENET_CLASSES
from .text import label_of


def normal(name: str) -> str:
    """Normalize a class name for comparison: return a printable label of limited length in Unicode form NFC."""
    return unicodedata.normalize("NFC", label_of(name))


def check_distinct(names: Iterable[str], owner: str) -> dict[str, int]:
    """Check that class names differ after Unicode normalization, and return a dict from normalized name to index.

    Args:
        names: Class names in index order.
        owner: Description of the source of the names, for error messages.

    Raises:
        ConfigError: Two names are equal after normalization.
    """
    given = [*names]
    indices: dict[str, int] = {}
    for index, name in enumerate(map(normal, given)):
        other = indices.setdefault(name, index)
        if other != index:
            raise ConfigError(
                f"class names of {owner} must differ after Unicode normalization (NFC), got {given[other]!a} and "
                f"{given[index]!a}: rename one of them"
            )
    return indices


def find(names: Mapping[str, Sequence[str]], known: Sequence[str], owner: str) -> dict[str, int | None]:
    """Return a dict from each class to the class's index in `known`, or to None if the class is not in `known`.

    Args:
        names: Candidate names of each class, full name first. The other candidates are suffixes of the full name, and
            match only the full name of a class in `known` that is not also a suffix of another class in `known`.
        known: Class names by index.
        owner: Description of the source of `known`, for messages.

    Raises:
        ConfigError: Two names in `known` are equal after normalization.
    """
    indices = check_distinct(known, owner)
    ends = {end for name in indices for end in ends_of(name)[:-1]}
    found: dict[str, int | None] = {}
    for name, (first, *others) in names.items():
        candidates = [normal(first), *(end for end in map(normal, others) if end not in ends)]
        found[name] = next((indices[candidate] for candidate in candidates if candidate in indices), None)
    return found


def ends_of(path: str) -> list[str]:
    """Return all suffixes of a path, shortest first: "c", "b/c" and "a/b/c" for "a/b/c"."""
    parts = path.split("/")
    return ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def order_of(names: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    """Return the index in `names` of each class in `wanted`, or None if the two sets of classes differ.

    Datasets such as ImageNet-V2 name the folders of ImageNet's 1000 classes by class index. Such names match the
    same indices and ImageNet's WordNet ids. If `names` has duplicates, the result is None unless both lists are equal.
    """
    own = [*map(normal, names)]
    expected = [*map(normal, wanted)]
    if is_numbered(own) and {*expected} == {*imagenet_ids()}:
        own = imagenet_ids()
    elif is_numbered(expected) and {*own} == {*imagenet_ids()}:
        expected = imagenet_ids()
    if own == expected or (is_numbered(own) and is_numbered(expected)):
        return [*range(len(own))]

    indices = {name: index for index, name in enumerate(own)}
    has_duplicates = len(indices) < len(own)
    if has_duplicates or len(own) != len(expected) or indices.keys() != {*expected}:
        return None
    return [indices[name] for name in expected]


def warn_of_assumed_order(names: Sequence[str], owner: str) -> None:
    """Warn that the outputs of a model without class names are assumed to be in the order of `names`.

    No warning is logged if the names are also in alphabetical order, which torchvision's `ImageFolder` uses.

    Args:
        names: Class names of the data by index, in the natural order of this package and timm ("2" before "10").
        owner: Description of the source of the model, for the message.
    """
    by_torchvision = sorted(names)
    if [*names] != by_torchvision:
        difference = first_difference(names, by_torchvision, "this order", "torchvision's ImageFolder")
        warn_on_rank0(
            __name__, "%s stores no class names, so its outputs are assumed to be in the natural order of the class "
            "names (%s). If the weights were trained in another order, set the class names and export the model "
            '(docs/guide.md, section "Your own training loop")', owner, difference,
        )  # fmt: skip


def is_numbered(names: Sequence[str]) -> bool:
    """Return whether names are the class indices of ImageNet, "0" to "999" in order, also with leading zeros."""
    return len(names) == IMAGENET_CLASSES and all(n.isdecimal() and int(n) == i for i, n in enumerate(names))


def first_difference(names: Sequence[str], wanted: Sequence[str], owner: str, other: str) -> str:
    """Describe a difference between the class names of `owner` and `other`, for messages."""
    own = [*map(normal, names)]
    expected = [*map(normal, wanted)]
    differing = [index for index, (a, b) in enumerate(zip(own, expected)) if a != b]
    if not differing:
        return f"{owner} has {len(names)} classes, but {other} has {len(wanted)}"
    # Report a class that `other` lacks rather than a class with another index in `other`.
    index = next((index for index in differing if own[index] not in expected), differing[0])
    return f"class {index} is {names[index]!r} in {owner}, but {wanted[index]!r} in {other}"


def check_order(names: Sequence[str], wanted: Sequence[str], owner: str, other: str, remedy: str) -> list[int] | None:
    """Return the permutation from a model's outputs to the `wanted` classes, or None if no reordering is needed.

    If `names` or `wanted` is empty, nothing is compared.

    Raises:
        ConfigError: The two sets of classes differ. The message ends with `remedy`.
    """
    if not names or not wanted:
        return None
    order = order_of(names, wanted)
    if order is None:
        raise ConfigError(f"the classes differ because {first_difference(names, wanted, owner, other)}: {remedy}")
    return None if order == [*range(len(order))] else order


def names_of(model: Any) -> list[str]:
    """Return the class names of a model by index, or an empty list if the names are unknown or the head was replaced.

    The names come from the model's `pretrained_cfg`. timm's pretrained ImageNet-1k models get WordNet ids as names.
    """
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    num_classes = getattr(model, "num_classes", None)
    names = config.get("label_names") or ()
    if names:
        was_head_replaced = len(names) != num_classes
        return [] if was_head_replaced else [str(name) for name in names]

    tag = str(config.get("tag") or "")
    name = f"{config.get('architecture')}.{tag}"
    pretrained = timm.get_pretrained_cfg(name) if timm.is_model_pretrained(name) else None
    is_imagenet = "in1k" in tag or (pretrained is not None and pretrained.num_classes == IMAGENET_CLASSES)
    return imagenet_ids() if is_imagenet and num_classes == IMAGENET_CLASSES else []


@functools.cache
def imagenet_ids() -> list[str]:
    """Return the WordNet ids of ImageNet's 1000 classes by index."""
    return list(ImageNetInfo().label_names())


def quoted(names: Iterable[str]) -> str:
    """Return the first five names on one line, quoted and with control characters escaped."""
    names = list(names)
    first = ", ".join(map(repr, names[:5]))
    return f"{first}, ..." if len(names) > 5 else first
