"""Class names: where two sources of class names meet, the class indices follow the names, or the names are refused.

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
    indices: dict[str, int] = {}
    given = [*names]
    for index, name in enumerate(map(normal, given)):
        if (other := indices.setdefault(name, index)) != index:
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
    own, wishes = [*map(normal, names)], [*map(normal, wanted)]
    if is_numbered(own) and {*wishes} == {*imagenet_ids()}:
        own = imagenet_ids()
    elif is_numbered(wishes) and {*own} == {*imagenet_ids()}:
        wishes = imagenet_ids()
    indices = {name: index for index, name in enumerate(own)}
    if own == wishes or (is_numbered(own) and is_numbered(wishes)):
        return [*range(len(own))]
    if len(own) != len(wishes) or len(indices) < len(own) or indices.keys() != {*wishes}:
        return None
    return [indices[wish] for wish in wishes]


def is_numbered(names: Sequence[str]) -> bool:
    """Return whether names are the indices of ImageNet's 1000 classes, which say nothing but the order."""
    return len(names) == IMAGENET_CLASSES and all(n.isdecimal() and int(n) == i for i, n in enumerate(names))


def first_difference(names: Sequence[str], wanted: Sequence[str], owner: str, other: str) -> str:
    """Return a clause that names the first class of `owner` that `other` lacks."""
    own, wishes = [*map(normal, names)], [*map(normal, wanted)]
    differ = [index for index, (name, wish) in enumerate(zip(own, wishes)) if name != wish]
    if not differ:
        return f"{owner} has {len(names)} classes, but {other} has {len(wanted)}"
    index = next((index for index in differ if own[index] not in wishes), differ[0])  # not one that only moved
    return f"class {index} is {names[index]!r} in {owner}, but {wanted[index]!r} in {other}"


def check_order(names: Sequence[str], wanted: Sequence[str], owner: str, other: str, remedy: str) -> list[int] | None:
    """Return the permutation of a model's outputs that gives the `wanted` classes, or None if the outputs fit.

    Sources without names are not compared.

    Raises:
        ConfigError: `names` are other classes; the message ends with `remedy`.
    """
    if not names or not wanted:
        return None
    if (order := order_of(names, wanted)) is None:
        raise ConfigError(f"{first_difference(names, wanted, owner, other)}: {remedy}")
    return None if order == [*range(len(order))] else order


def names_of(model: Any) -> list[str]:
    """Return the class names of a model by index, as far as its `pretrained_cfg` stores them.

    timm's own pretrained models with 1000 classes have ImageNet's, by WordNet id.
    """
    config: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    classes, names = getattr(model, "num_classes", None), config.get("label_names") or ()
    if names:
        return [str(name) for name in names] if len(names) == classes else []  # otherwise the head was replaced
    tag = str(config.get("tag") or "")
    timms = f"{config.get('architecture')}.{tag}"
    own = timm.get_pretrained_cfg(timms) if timm.is_model_pretrained(timms) else None
    is_imagenet = "in1k" in tag or (own is not None and own.num_classes == IMAGENET_CLASSES)
    return imagenet_ids() if is_imagenet and classes == IMAGENET_CLASSES else []


@functools.cache
def imagenet_ids() -> list[str]:
    """Return the WordNet ids of ImageNet's 1000 classes by index."""
    return list(ImageNetInfo().label_names())


def quoted(names: Iterable[str]) -> str:
    """Return the first names in a line, with control characters escaped."""
    names = list(names)
    return ", ".join(map(repr, names[:5])) + (", ..." if names[5:] else "")
