"""Search for a split's folder or tar file under synonyms of its name, with advice if the split is missing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from timm.data import get_img_extensions

from ...classes import quoted
from ...config import ConfigError
from ...distributed import warn_on_rank0
from ...errors import reject_url
from ...text import nearest

WHOLE = "."  # name of the only split of a data folder that contains class folders instead of split folders
# accepted names of each split's folder or tar file
SPLIT_NAMES = {"train": ("train", "training"), "validation": ("validation", "val", "valid", "eval")}


def find_split(data_dir: str | None, split: str) -> Path:
    """Return the folder or tar file of a split. Case is ignored, and synonyms of the split's name are accepted.

    Raises:
        ConfigError: `data_dir` is missing or not a folder, the split is missing, or names differ only in case.
    """
    if not data_dir:
        raise ConfigError("data_dir is required: pass the folder of the images as FOLDER or --data-dir FOLDER")
    root = Path(data_dir)
    if not root.is_dir():
        reject_url(data_dir)
        raise missing_folder(root, "pass the folder that contains the splits")

    if split == WHOLE:
        return root
    if path := split_in(root, split):
        is_synonym = path.name.removesuffix(".tar").casefold() != split.casefold()
        if is_synonym and split not in SPLIT_NAMES:  # synonyms of 'train' and 'validation' need no warning
            warn_on_rank0(__name__, "%s has no split %r: %s is used instead", data_dir, split, path.name)
        return path

    present = sorted(path.name for path in root.iterdir())
    listed = quoted(present) or "nothing"
    raise ConfigError(
        f"{data_dir} has no split {split!r} (a folder or .tar called {' or '.join(_synonyms(split))}); it has {listed}"
        + _missing_split_hints(root, split, present)
    )


def missing_folder(path: Path, remedy: str) -> ConfigError:
    """Return the error for a data folder that is missing or a file. The message may suggest a similar folder name."""
    if path.exists():
        return ConfigError(f"the data folder {str(path)!r} is not a folder: {remedy}")
    with suppress(OSError):
        if similar := nearest(path.name, [other.name for other in path.parent.iterdir() if other.is_dir()]):
            remedy = similar.removeprefix("; ")
    return ConfigError(f"the data folder {str(path)!r} does not exist: {remedy}")


def called(split: str, data_dir: str | None) -> str:
    """Return the description of a split for messages, such as "the split 'val' of photos"."""
    return f"the folder {data_dir}" if split == WHOLE else f"the split {split!r} of {data_dir}"


def split_in(root: Path, split: str) -> Path | None:
    """Return the folder or tar file of a split in the folder `root`, or None if the split is missing.

    Raises:
        ConfigError: Names differ only in case.
    """
    present = sorted(path.name for path in root.iterdir())
    for name in (split, *_synonyms(split)):
        for file_name in (name, f"{name}.tar"):
            path = _path_in_any_case(root, file_name, present)
            if path.is_dir() or path.is_file():
                return path
    return None


def _synonyms(split: str) -> tuple[str, ...]:
    """Return all accepted names of a split's folder or tar file, without the extension."""
    for names in SPLIT_NAMES.values():
        if split.casefold() in names:
            return names
    return (split,)


def _path_in_any_case(root: Path, name: str, present: Sequence[str]) -> Path:
    """Return the path of `name` in the folder `root`. Prefer an exact match in `present` to a match that ignores case.

    Raises:
        ConfigError: Several entries match.
    """
    if name in present:
        return root / name
    matches = [other for other in present if other.casefold() == name.casefold()]
    if len(matches) > 1:
        raise ConfigError(
            f"{root} has {quoted(matches)}, which differ only in case: set --train-split, --val-split or, in vil "
            "validate, --split to one of these names"
        )
    return root / (matches[0] if matches else name)


def _missing_split_hints(root: Path, split: str, present: Sequence[str]) -> str:
    """Return hints about what the user may have meant by a missing split, to append to an error message.

    Args:
        root: Folder of the splits.
        split: Name of the missing split.
        present: Names of the entries of `root`.
    """
    is_validation = _synonyms(split) == SPLIT_NAMES["validation"]
    hints = ""

    tests = [name for name in present if name.casefold() in ("test", "testing", "test.tar")]
    if tests and is_validation:
        test = tests[0].removesuffix(".tar")
        hints = f". The split {test!r} is read with --val-split {test} in training and --split {test} in vil validate"

    if deeper := [folder for folder in root.iterdir() if folder.is_dir() and _has_splits(folder)]:
        hints += f". The splits are in {deeper[0].name!r}: set --data-dir {deeper[0]}"

    if _count_classes(root) > 1:
        hints += f". If these folders are classes, this command splits them: {_splitting_command(root, root)}"
    train = next((root / name for name in present if name.casefold() in SPLIT_NAMES["train"]), root / "train")
    if is_validation and _count_classes(train) > 1:
        hints += f". This command splits {train.name!r}: {_splitting_command(train, root)}"
    return hints


def _splitting_command(folder: Path, data_dir: Path) -> str:
    """Return the command that splits a folder of classes into training and validation."""
    return shlex.join(["vil", "split", str(folder), f"{data_dir.resolve()}_split"])


def _has_splits(folder: Path) -> bool:
    """Return whether a folder has a training and a validation split."""
    present = {path.name.casefold().removesuffix(".tar") for path in folder.iterdir()}
    return not any(present.isdisjoint(names) for names in SPLIT_NAMES.values())


def _count_classes(root: Path) -> int:
    """Return the number of subfolders that directly contain images."""
    suffixes = get_img_extensions()
    return sum(any(file.suffix.lower() in suffixes for file in folder.glob("*")) for folder in root.glob("*/"))
