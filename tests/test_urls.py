"""Tests of URLs of files, which are rejected with the advice to download the file."""

import pytest
from processes import ROOT

import vil
from vil.cli.main import run

URL = "https://example.com/a/file"
SHIPPED = str(ROOT / "weights" / "vil_tiny_pooled_photographs.safetensors")


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (["predict", "--checkpoint", SHIPPED, "{}"], ".jpg"),
        (["predict", "--checkpoint", "{}", "a.jpg"], ".pt"),
        (["predict", "--checkpoint", "{}", "a.jpg"], ".onnx"),
        (["viz", "--checkpoint", SHIPPED, "--images", "{}"], ".jpg"),
        (["viz", "--checkpoint", "{}", "--images", "a.jpg"], ".pt"),
        (["export", "--checkpoint", "{}", "--out", "a.onnx"], ""),
        (["validate", "--checkpoint", "{}"], ".pt"),
        (["validate", "--checkpoint", SHIPPED, "--data-dir", "{}"], ".zip"),
        (["train", "--data-dir", "{}"], ".zip"),
        (["split", "{}", "out"], ".zip"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_a_url_is_rejected_with_the_advice_to_download_the_file(words, ending, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run([word.format(URL + ending) for word in words])
    message = f"{capsys.readouterr().err}{stopped.value.code}"
    assert f"{URL}{ending} is a URL: download the file and pass its path instead" in message
    assert "Traceback" not in message


def test_python_functions_reject_urls():
    with pytest.raises(RuntimeError, match="is a URL"):
        vil.from_checkpoint(URL)
    with pytest.raises(ValueError, match="is a URL"):
        vil.predict(SHIPPED, URL + ".jpg")
