"""Tests of small files made to cost much memory or time: readers stay within limits.

FUZZ=1 python -m pytest tests/robustness/test_hostile_files.py    runs the first test on all files.
"""

import os

import hostile_files
import pytest

from vil.checkpoint import Checkpoint
from vil.weight_files import BrokenCheckpointError

SOME = [
    "jpeg app2", "jpeg progressive CMYK", "png zTXt", "gif comment", "tiff 5400 tags", "webp large", "pt hex",
    "pt states again", "pt arguments again",
    "pt tensors as lr", "pt doubling in the config", "legacy pt colliding keys",
    "pt size of a tensor",
    "safetensors metadata", "tar global header", "tar negative size", "wds.gz negative size",
    "wds sparse", "wds.gz sparse 1.0", "wds.gz zeros",
]  # fmt: skip


@pytest.mark.parametrize("name", hostile_files.files() if "FUZZ" in os.environ else SOME)
def test_a_small_file_uses_limited_memory_and_time(tmp_path, name):
    found = hostile_files.cost(name, tmp_path)
    assert found.outcome != "the process ended"
    assert found.megabytes < 1500
    assert found.seconds < 20


@pytest.mark.parametrize("name", ["pt hex", "pt bytearray", "pt set", "pt converted tensor", "legacy pt hex"])
def test_pickled_functions_that_weights_do_not_need_are_rejected_by_name(tmp_path, name):
    (path := tmp_path / "given.pt").write_bytes(hostile_files.files()[name]())
    with pytest.raises(
        BrokenCheckpointError, match="given.pt cannot be read .*: the file holds .* which weights do not need"
    ):
        Checkpoint(path)


def test_a_header_with_a_false_length_is_rejected(tmp_path):
    (path := tmp_path / "given.safetensors").write_bytes(hostile_files.files()["safetensors length"]())
    for whole in (False, True):
        with pytest.raises(
            BrokenCheckpointError,
            match="the safetensors header must be at most 16777216 bytes, got 4611686018427387904",
        ):
            Checkpoint(path, whole)
