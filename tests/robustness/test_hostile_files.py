"""Small files that are made to cost much: what reads them takes limited memory and time, and refuses them or not.

FUZZ=1 python -m pytest tests/robustness/test_hostile_files.py    reads all of them.
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
    "safetensors metadata", "tar global header", "wds sparse", "wds.gz sparse 1.0", "wds.gz zeros",
]  # fmt: skip


@pytest.mark.parametrize("name", hostile_files.files() if "FUZZ" in os.environ else SOME)
def test_a_small_file_costs_little(tmp_path, name):
    found = hostile_files.cost(name, tmp_path)
    assert found.outcome != "the process ended"
    assert found.megabytes < 1500
    assert found.seconds < 20


@pytest.mark.parametrize("name", ["pt hex", "pt bytearray", "pt set", "pt converted tensor", "legacy pt hex"])
def test_functions_that_weights_do_not_need_are_refused_by_name(tmp_path, name):
    (path := tmp_path / "given.pt").write_bytes(hostile_files.files()[name]())
    with pytest.raises(
        BrokenCheckpointError, match="given.pt cannot be read .*: it holds .* which weights do not need"
    ):
        Checkpoint(path)


def test_a_header_of_claimed_length_is_refused(tmp_path):
    (path := tmp_path / "given.safetensors").write_bytes(hostile_files.files()["safetensors length"]())
    for whole in (False, True):
        with pytest.raises(BrokenCheckpointError, match="its header has 4611686018427387904 bytes, more than 16777216"):
            Checkpoint(path, whole)
