"""Reader of untrusted WebDataset shards, based on timm's reader in webdataset's secure mode."""

from __future__ import annotations

import io
import json
import os
import random
import re
import tarfile
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import webdataset
from PIL import Image
from timm.data.readers.reader_wds import ReaderWds, log_and_continue
from webdataset.filters import getfirst
from webdataset.gopen import gopen_schemes
from webdataset.tariterators import base_plus_ext, group_by_keys, url_opener

from ...config import ConfigError
from ...fault_tolerance.machine_errors import MachineError, RetryingFile, WorkersError, is_machine_error, retry_reading
from ...security.image_decoding import UnfitImageError
from ...security.tars import GZIP, MOST_RATIO, decompressed, members, read_member
from ...text import label_of
from .images import UNREADABLE, Unreadable, image_of, open_file

LOCAL = "local-shards"  # URL scheme of the local files that webdataset may open
LABELS = "cls", "json"  # file name extensions of labels
NUMBERS = 2**20  # number of possible hash values of sample names, which identify unreadable samples
MOST_LABEL = 2**20  # maximum bytes of a label
MOST_IMAGE = 2**28  # maximum bytes of an image, because a small compressed shard can contain huge members
MOST_INFO = 2**24  # maximum bytes of _info.json
MOST_SHUFFLED = 2**31  # maximum bytes of samples in the shuffle buffer
FEWEST_BYTES = 1024  # minimum bytes of a sample: the tar headers of an image and its label


class LabelError(WorkersError):
    """A sample has a class that the model does not have."""


class Shards(ReaderWds):
    """timm's reader of WebDataset shards, with limits for untrusted shards and a count of unreadable samples.

    Images are decoded as in the readers of other sources. The shards of a local folder must lie inside the folder.

    If a sample cannot be read, a warning names the sample and `unreadable` counts the sample. Training uses the next
    sample; evaluation uses a blank image with the target `UNREADABLE`.

    Args:
        root: Folder or URL of the shards.
        num_classes: Number of classes. A sample of another class counts as unreadable in training, and raises a
            LabelError in evaluation. None accepts all classes.

    Raises:
        ConfigError: `root` is empty, `root` or the split is a command, `_info.json` does not list the split or, in
            training, its number of samples, no shard of a local folder exists, a shard is listed twice, is outside the
            folder or is not a regular file, or the shards cannot contain as many samples as the split claims.
    """

    num_classes: int | None
    is_upright = False  # `apply_exif_orientation` sets this attribute

    def __init__(self, root: str | None, num_classes: int | None = None, **kwargs):
        if not root:
            raise ConfigError("data_dir is required: set --data-dir to the folder or URL of the shards")
        for name in (root, kwargs["split"]):
            if re.match(r"\W*pipe:", name, re.IGNORECASE):
                raise ConfigError(f"data_dir and split must not be commands, got {name!r}: set a folder or a URL")
        enter_secure_mode()
        try:
            super().__init__(root if "://" in root else f"{LOCAL}:{os.path.abspath(root)}", **kwargs)
        except RuntimeError as error:  # timm does not find the split or its number of samples
            raise ConfigError(
                f"_info.json in {root!r} must list the split {kwargs['split']!r} with its shards and its number of "
                f"samples ({error}): add the split, or set --train-split and --val-split to shards and a number of "
                "samples, such as 'train-{0000..0009}.tar|12000'"
            ) from error
        self.unreadable = Unreadable(NUMBERS)
        self.num_classes = num_classes
        if "://" not in root:
            self._check(os.path.realpath(root))

    def _check(self, root: str) -> None:
        """Check the shards of a local folder and the number of samples, which `_info.json` or the split lists.

        Raises:
            ConfigError: No shard exists, a shard is listed twice, is not a regular file or lies outside the folder, or
                the shards cannot contain the listed number of samples.
        """
        known = set()
        most_samples = 0
        for name in self.split_info.filenames:
            path = os.path.realpath(os.path.join(root, name))
            if path in known:
                raise ConfigError(f"the shard {name!r} is listed twice in {root!r}: see _info.json")
            known.add(path)
            if not path.startswith(os.path.join(root, "")) or (os.path.exists(path) and not os.path.isfile(path)):
                raise ConfigError(f"the shard {name!r} must be a regular file in {root!r}: copy the file, not a link")
            if os.path.exists(path):
                most_samples += _most_samples(path)

        if not any(map(os.path.exists, known)):
            raise ConfigError(f"none of the {len(known)} shards in {root!r} exists: check --data-dir and the split")
        count = self.num_samples
        if not isinstance(count, int) or not 0 <= count <= most_samples:
            raise ConfigError(
                f"_info.json or the split of {root!r} must list 0 to {most_samples} samples for shards of this size, "
                f"got {count!r}"
            )

    def _lazy_init(self) -> None:
        enter_secure_mode()  # a spawned worker, which opens the shards, does not inherit secure mode
        super()._lazy_init()
        shards: Any = self.ds
        # replace the last stages of timm's pipeline, which read, shuffle and decode samples
        shards.pipeline[-4 if self.is_training else -3 :] = [
            self._samples,
            *([self._shuffled] if self.is_training else []),
            webdataset.map(self._read),
        ]

    def __iter__(self) -> Iterator[tuple[Image.Image, int]]:
        """Iterate over images and targets.

        In evaluation, every sample is read once over all ranks, while timm's reader would give each rank the same
        number of samples.
        """
        if self.is_training:
            yield from super().__iter__()
            return

        if self.ds is None:
            self._lazy_init()
        shards: Any = self.ds
        for sample in shards:
            yield sample["image"], sample["target"]

    @property
    def _are_few(self) -> bool:
        """Whether there are fewer shards than workers. If so, all workers read all shards and share the samples."""
        return len(self.split_info.filenames) < self.global_num_workers

    def _split_by_node_and_worker(self, src: Iterator[dict]) -> Iterator[dict]:
        return src if self._are_few else super()._split_by_node_and_worker(src)

    def _samples(self, shards: Iterator[dict]) -> Iterator[dict]:
        """Iterate over the encoded image and label of each sample."""
        members = self._members(url_opener(shards, handler=_log_or_stop))
        samples = group_by_keys(members, handler=_log_or_stop)
        if self._are_few:
            return islice(samples, self.global_worker_id, None, self.global_num_workers)
        return samples

    def _members(self, shards: Iterator[dict]) -> Iterator[dict]:
        """Iterate over the members of opened shards. After an error in a shard's data, continue with the next shard.

        Raises:
            MachineError: A shard cannot be read because of an I/O or memory error.
        """
        for shard in shards:
            problem: object = None
            try:
                yield from self._members_of(shard)
            except tarfile.HeaderError as error:
                problem = f"the rest of the shard is skipped, because a member has a broken header: {error}"
            except MachineError:
                raise
            except Exception as error:
                if is_machine_error(error):
                    raise MachineError.reading(_path_of(shard["url"]), error) from None
                problem = error

            _close(shard)
            if problem:
                log_and_continue(tarfile.ReadError(f"{_path_of(shard['url'])}: {problem}"))
            yield {}  # an empty member makes `group_by_keys` finish the last sample of a shard

    def _members_of(self, shard: dict) -> Iterator[dict]:
        """Iterate over the images and labels of a shard."""
        suffixes = {*self.input_key.split(";"), *LABELS}
        stream = decompressed(shard["stream"])
        for member in members(stream):
            suffix = (base_plus_ext(member.name)[1] or "").lower()
            is_read = member.is_file and suffix in suffixes and not re.match(r"__[^/]*__($|/)", member.name)
            most = MOST_LABEL if suffix in LABELS else MOST_IMAGE
            data = read_member(stream, member, most if is_read else 0)
            if is_read:  # `read_member` returns no data for oversized members, which are then reported as unreadable
                yield dict(fname=member.name, data=data, __url__=shard["url"])

    def _shuffled(self, samples: Iterator[dict]) -> Iterator[dict]:
        """Shuffle samples like webdataset, but limit the buffer's bytes, so that large samples leave the buffer
        earlier.
        """
        buffer = _ShuffleBuffer(seed=self.worker_seed + self.epoch_count.value)
        for sample in samples:
            buffer.add(sample)
            # until the buffer is full, add two samples for each sample that is taken
            if len(buffer) < self.sample_shuffle_size:
                for second in islice(samples, 1):
                    buffer.add(second)
            if len(buffer) >= min(self.sample_initial_size, self.sample_shuffle_size):
                yield buffer.take()
            while buffer.bytes > MOST_SHUFFLED:
                yield buffer.take()
        while len(buffer):
            yield buffer.take()

    def _read(self, sample: dict[str, Any]) -> dict[str, Any] | None:
        """Decode a sample. Return None if the sample is skipped."""
        label = self.split_info.alt_label
        try:
            target = int(json.loads(sample["json"])[label] if label else sample["cls"])
            if target < 0:  # timm encodes skipped labels as negative targets
                return None
            if self.num_classes and target >= self.num_classes:
                self._reject_class(target, self.num_classes, sample)
            image = retry_reading(
                sample["__key__"], lambda: image_of(getfirst(sample, self.input_key), self.is_upright)
            )
            return dict(image=image, target=target)
        except (MachineError, LabelError):
            raise
        except Exception as error:
            name = f"{_path_of(sample['__url__'])}: {sample['__key__']}"
            self.unreadable.add(zlib.crc32(name.encode()) % NUMBERS, name, error)
            return None if self.is_training else dict(image=Image.new("RGB", (256, 256)), target=UNREADABLE)

    def _reject_class(self, target: int, num_classes: int, sample: dict[str, Any]) -> None:
        """Raise an error for a class that the model does not have.

        Evaluation ends with an error, because accuracies over a part of the classes would be misleading.

        Raises:
            UnfitImageError: In training, which uses the next sample.
            LabelError: In evaluation.
        """
        if self.is_training:
            raise UnfitImageError(f"the class index must be below {num_classes}, got {target}")
        shard = label_of(_path_of(sample["__url__"]))
        raise LabelError(
            f"classes of shards must be 0 to {num_classes - 1}, got {target} in {shard}: number the classes from 0, or "
            "set --num-classes"
        )


class _ShuffleBuffer:
    """Buffer from which samples are taken at random."""

    def __init__(self, seed: int):
        self.bytes = 0
        self._samples: list[dict] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: dict) -> None:
        self._samples.append(sample)
        self.bytes += _bytes_of(sample)

    def take(self) -> dict:
        """Remove a sample and return it."""
        i = self._random.randint(0, len(self) - 1)
        self._samples[i], self._samples[-1] = self._samples[-1], self._samples[i]
        sample = self._samples.pop()
        self.bytes -= _bytes_of(sample)
        return sample


def enter_secure_mode() -> None:
    """Make webdataset reject commands, pickles and local files, except the files that `Shards` opens."""
    webdataset.utils.enforce_security = True
    gopen_schemes.pop("pipe", None)  # webdataset before 1.0 has no secure mode
    gopen_schemes[LOCAL] = _open_local


def _open_local(url: str, *_, **__) -> BinaryIO:
    """Open a file of a local folder of shards.

    Raises:
        UnfitImageError: A shard is missing although `_info.json` exists, the file is not regular, or an `_info.json`
            has more than `MOST_INFO` bytes.
        FileNotFoundError: There is no `_info.json`.
        MachineError: The file cannot be read because of an I/O error.
    """
    path = _path_of(url)
    if path.endswith("info.json") and os.path.getsize(path) > MOST_INFO:
        raise UnfitImageError(f"file {path!r} must have at most {MOST_INFO} bytes")
    listed = any((folder / "_info.json").exists() for folder in Path(path).parents)
    if listed and not os.path.lexists(path):  # do not retry, because _info.json shows that the disk is mounted
        raise UnfitImageError(f"there is no file {path!r}")
    retry_reading(path, lambda: open_file(path).close())  # `open_file` raises if the shard is not a regular file
    return io.BufferedReader(retry_reading(path, lambda: RetryingFile(path)))


def _close(shard: dict) -> None:
    """Close a shard's stream.

    Raises:
        MachineError: The download failed, which may also explain errors in the shard's data.
    """
    try:
        shard["stream"].close()
    except OSError as error:
        raise MachineError.reading(_path_of(shard["url"]), error) from None


def _log_or_stop(error: Exception) -> bool:
    """Handle an exception caught by webdataset: log an error in a shard's data and return whether to continue.

    Raises:
        MachineError: The exception is an I/O or memory error.
    """
    if isinstance(error, MachineError):
        raise MachineError(error.args[0]) from None  # restore the message, to which webdataset has appended the URL
    if is_machine_error(error):
        raise MachineError.reading(getattr(error, "filename", None) or "a shard", error) from None
    return log_and_continue(error)


def _path_of(url: str) -> str:
    """Return the path of a shard on a local disk, or the URL of a remote shard."""
    return url.removeprefix(f"{LOCAL}:")


def _most_samples(path: str) -> int:
    """Return the largest number of samples that a shard can contain, given the size of its file."""
    with open_file(path) as file:
        ratio = MOST_RATIO if file.read(len(GZIP)) == GZIP else 1
    return ratio * os.path.getsize(path) // FEWEST_BYTES


def _bytes_of(sample: dict) -> int:
    return sum(len(value) for value in sample.values() if isinstance(value, bytes))
