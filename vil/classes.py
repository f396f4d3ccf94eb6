"""Comparison of class names, for example those of a checkpoint and of a folder, which decide the class indices.

Names are compared in one form (`normal`), because a file system may store "é" as one character or as two.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import timm
from timm.data import ImageNetInfo

from .config import ConfigError
from .published import IMAGENET_CLASSES
from .text import label_of


def normal(name: str) -> str:
    """Return the form in which class names are compared: as checkpoints store them, in Unicode form NFC."""
    return unicodedata.normalize("NFC", label_of(name))


def check_distinct(names: Iterable[str], owner: str) -> dict[str, int]:
    """Return the index of each name in its `normal` form; `owner` is what has these classes, in messages.

    Raises:
        ConfigError: Two names have the same form.
    """
    given = [*names]
    indices: dict[str, int] = {}
    for index, name in enumerate(map(normal, given)):
        other = indices.setdefault(name, index)
        if other != index:
            raise ConfigError(
                f"class names of {owner} must differ in their printable characters in Unicode form NFC, got "
                f"{given[other]!a} and {given[index]!a}: rename one of them"
            )
    return indices


def find(names: Mapping[str, Sequence[str]], known: Sequence[str], owner: str) -> dict[str, int | None]:
    """Return the index in `known` of each class, or None for a class that is not in `known`.

    Args:
        names: Each class with the names that it may have in `known`, the most specific one first. The others are ends
            of the first, and count only if no other class of `known` ends in the same way.
        known: Class names by index.
        owner: What has the `known` classes, in messages.

    Raises:
        ConfigError: Two classes of `known` have the same name.
    """
    indices = check_distinct(known, owner)
    ends = {end for name in indices for end in ends_of(name)[:-1]}
    found: dict[str, int | None] = {}
    for name, (first, *others) in names.items():
        candidates = [normal(first), *(end for end in map(normal, others) if end not in ends)]
        found[name] = next((indices[candidate] for candidate in candidates if candidate in indices), None)
    return found


def ends_of(path: str) -> list[str]:
    """Return the ends of a path that begin after a separator, the shortest one first, and the path."""
    parts = path.split("/")
    return ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def order_of(names: Sequence[str], wanted: Sequence[str]) -> list[int] | None:
    """Return the index in `names` of each of the `wanted` classes, or None if `names` are other classes.

    ImageNet's 1000 classes may be folders that are named by their index, as in ImageNet-V2. Numbers are compared with
    ImageNet's WordNet ids only.
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


def is_numbered(names: Sequence[str]) -> bool:
    """Return whether names are the indices of ImageNet's 1000 classes, which say nothing but the order."""
    return len(names) == IMAGENET_CLASSES and all(n.isdecimal() and int(n) == i for i, n in enumerate(names))


def first_difference(names: Sequence[str], wanted: Sequence[str], owner: str, other: str) -> str:
    """Return a clause that names the first class of `owner` that `other` lacks."""
    own = [*map(normal, names)]
    expected = [*map(normal, wanted)]
    differing = [index for index, (a, b) in enumerate(zip(own, expected)) if a != b]
    if not differing:
        return f"{owner} has {len(names)} classes, but {other} has {len(wanted)}"
    index = next((index for index in differing if own[index] not in expected), differing[0])  # not one that only moved
    return f"class {index} is {names[index]!r} in {owner}, but {wanted[index]!r} in {other}"


def check_order(names: Sequence[str], wanted: Sequence[str], owner: str, other: str, remedy: str) -> list[int] | None:
    """Return the permutation of a model's outputs that gives the `wanted` classes, or None if the outputs fit.

    Sources without names are not compared.

    Raises:
        ConfigError: `names` are other classes; the message ends with `remedy`.
    """
    if not names or not wanted:
        return None
    order = order_of(names, wanted)
    if order is None:
        raise ConfigError(f"{first_difference(names, wanted, owner, other)}: {remedy}")
    return None if order == [*range(len(order))] else order


def names_of(model: Any) -> list[str]:
    """Return the class names of a model by index, as far as its `pretrained_cfg` stores them.

    timm's own pretrained models with 1000 classes have ImageNet's, by WordNet id.
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
    """Return the first names in a line, with control characters escaped."""
    names = list(names)
    first = ", ".join(map(repr, names[:5]))
    return f"{first}, ..." if len(names) > 5 else first
