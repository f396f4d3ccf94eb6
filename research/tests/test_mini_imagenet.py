"""Tests of research/mini_imagenet.py: the splits of the images."""

import hashlib
import subprocess
import sys
import tarfile

import pytest

from research import mini_imagenet


def repository(folder, content):
    """Write files to a new git repository with one commit."""
    for path, data in content.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "images"]):
        subprocess.run([*git, *words], check=True)
    return folder


def test_mini_imagenet_is_split_by_names_without_photographs_of_the_test_split(tmp_path, monkeypatch, capsys):
    names = [f"n02091831/n02091831{i:08}.jpg" for i in range(740, 800)]  # including a name of SEEN_IN_TEST
    names += [f"n02606052/n02606052{i:08}.jpg" for i in range(1, 61)]
    content = {f"train/{name}": name.encode() for name in names}
    content |= {f"val/n02606052/n02606052{i:08}.jpg": b"test %d" % i for i in range(3)}
    source = repository(tmp_path / "source", content | {".gitattributes": b"* text=auto\n"})
    monkeypatch.setattr(sys, "argv", ["mini_imagenet.py", str(source), str(tmp_path / "parts")])
    mini_imagenet.main()
    assert "train: 19 images\nchoose: 100 images\ntest: 3 images" in capsys.readouterr().out
    for part in (tmp_path / "parts").iterdir():
        with tarfile.open(part) as tar:
            tar.extractall(tmp_path / "out", filter="data")
    found = {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in (tmp_path / "out").rglob("*.jpg")}
    for i in range(3):
        assert found.pop(f"test/n02606052/n02606052{i:08}.jpg") == b"test %d" % i
    assert all(data.decode() == path.partition("/")[2] for path, data in found.items())
    kept = [name for name in names if name != "n02091831/n0209183100000748.jpg"]
    assert sorted(data.decode() for data in found.values()) == sorted(kept)
    expected = sorted(kept[59:], key=lambda name: hashlib.sha256(f"0 {name.split('/')[1]}".encode()).digest())[:50]
    assert {path for path in found if path.startswith("choose/n02606052")} == {f"choose/{name}" for name in expected}


def test_a_repository_of_another_data_set_is_rejected(tmp_path, monkeypatch):
    source = repository(tmp_path / "source", {"train/n01/a.jpg": b"a"})
    monkeypatch.setattr(sys, "argv", ["mini_imagenet.py", str(source), str(tmp_path / "parts")])
    with pytest.raises(SystemExit, match="must contain train/ and val/"):
        mini_imagenet.main()
