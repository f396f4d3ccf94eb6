"""Tests of the documentation: snippets and the notebook run, and documented command lines have valid options."""

import importlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
import types

import pytest
import timm
import torch
from PIL import Image
from processes import ROOT

from vil.cli.main import run
from vil.config import load_config
from vil.distributed import init_process_group
from vil.training.trainer import Trainer

PAGES = "guide", "digits", "options", "hardware", "export", "seeing-inside"
DOCUMENTS = ["README.md", *(f"docs/{name}.md" for name in PAGES)]


def snippets(document):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)


def command_lines(document):
    text = (ROOT / document).read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:    )?((?:vil|python|torchrun|pip|make) .*)$", text, re.M)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture
def folder(tmp_path, monkeypatch, no_pictures):
    """Write the digits of docs/digits.md and train its runs with a small model, and return the working folder."""
    monkeypatch.chdir(tmp_path)
    for words in command_lines("docs/digits.md"):
        if words[:3] == ["python", "-m", "vil.data.digits"]:
            monkeypatch.setattr(sys, "argv", words[2:])
            monkeypatch.delitem(sys.modules, "vil.data.digits", raising=False)
            runpy.run_module("vil.data.digits", run_name="__main__")
    for name in ("low", "high"):
        words = ["-c", str(ROOT / "configs/digits.yaml"), "--data-dir", f"data/{name}", "--experiment", name]
        words += ["--model-kwargs", "embed_dim=64", "depth=1", "patch_size=8", "--epochs", "2", "--warmup-epochs", "0"]
        words += ["--workers", "0", "--device", "cpu", "--global-batch-size", "200"]
        Trainer(load_config("", words), *init_process_group("cpu")).run()
    (tmp_path / "weights").symlink_to(ROOT / "weights")
    return tmp_path


def run_alone(snippet, document):
    """Run a snippet in a namespace of its own and return the namespace."""
    exec(compile(snippet, document, "exec"), found := {})
    return found


def write_photos(folder):
    """Write photo.jpg, and photos/train with two classes of two images."""
    for name, color in (("cat", "teal"), ("dog", "orange")):
        (folder / "photos/train" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (60, 40), color).save(folder / "photos/train" / name / f"{number}.jpg")
    Image.new("RGB", (60, 40), "teal").save(folder / "photo.jpg")


def test_each_snippet_of_the_digits_runs_alone(folder, capsys):
    for snippet in snippets("docs/digits.md"):
        run_alone(snippet, "docs/digits.md")
    printed = capsys.readouterr().out
    assert re.search(r"validation/7/\d+.png is a [6-9] \(\d+%\)\n", printed)
    scores = dict(re.findall(r"(KNeighborsClassifier|LogisticRegression) (\d\.\d+)", printed))
    assert min(map(float, scores.values())) > 0.5  # chance is 0.25 with four classes
    assert len(scores) == 2


def test_each_snippet_of_the_guide_runs_alone(folder, capsys):
    (folder / "output/photos").symlink_to(folder / "output/high")
    write_photos(folder)
    found: dict = {}
    for snippet in snippets("docs/guide.md"):
        found |= run_alone(snippet.replace("range(20)", "range(1)"), "docs/guide.md")
    assert len(re.findall(r"photos/train/(?:cat|dog)/[01].jpg is a [6-9] \(\d+%\)\n", capsys.readouterr().out)) == 4
    assert found["patches"].shape == (2, 16, 64)
    assert found["class_token"].shape == (2, 1, 64)
    assert found["loss"].isfinite()
    assert torch.equal(found["started"].blocks[5].mixer.in_proj.weight, found["shipped"].blocks[5].mixer.in_proj.weight)
    assert [model.num_classes for model in (found["started"], found["shipped"])] == [4, 200]


def test_the_snippet_of_seeing_inside_runs_alone(folder):
    (folder / "output/photos").symlink_to(folder / "output/high")
    write_photos(folder)
    (snippet,) = snippets("docs/seeing-inside.md")
    found = run_alone(snippet, "docs/seeing-inside.md")
    assert found["evidence"].shape == found["images"][:, 0].shape
    assert found["curve"].shape == (1, 11)


def run_line(words):
    """Run a shell line of the notebook in this process, with short training."""
    assert words[0] == "vil"
    if words[1] == "train":
        short = ["--epochs", "1", "--warmup-epochs", "0", "--workers", "0", "--device", "cpu", "--lr", "0.001"]
        Trainer(load_config("", [*words[2:], *short]), *init_process_group("cpu")).run()
    else:
        run(words[1:])


def test_the_notebook_runs_from_drawn_images_to_a_timm_model(tmp_path, monkeypatch, capsys):
    cells = json.loads((ROOT / "docs/first_hour.ipynb").read_text())["cells"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # restores PATH after the notebook has changed it
    for name in ("configs", "weights"):
        (tmp_path / name).symlink_to(ROOT / name)
    found: dict = {}
    for source in ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"):
        if source.startswith("!"):
            run_line(shlex.split(source[1:]))
        else:
            exec(compile(source, "docs/first_hour.ipynb", "exec"), found)
    printed = capsys.readouterr().out
    line = r"^data/shapes/validation/.*/\d+.png is a (?:circle|square|triangle) \(\d+%\)$"
    assert len(re.findall(line, printed, re.M)) == 8
    assert "circle" in (tmp_path / "output/shapes/index.html").read_text()
    assert found["model"].num_classes == 3
    assert not any(cell.get("outputs") for cell in cells)


def test_the_guides_custom_mixer_runs():
    found: dict = {}
    idea, _ = snippets("CONTRIBUTING.md")
    exec(
        compile(idea.replace('"vil_tiny", ', '"vil_tiny", depth=1, num_classes=0, '), "CONTRIBUTING.md", "exec"), found
    )
    images = torch.randn(2, 3, 224, 224)
    mixer = found["model"].blocks[0].mixer
    with torch.inference_mode():
        before = found["model"](images)
        for direction in mixer.directions:  # keys with norm 1 do not depend on the scale of x_proj
            rank, states, _ = direction.split
            direction.x_proj.weight[rank : rank + states] *= 3
        torch.testing.assert_close(found["model"](images), before, rtol=1e-4, atol=1e-5)
        plain = timm.create_model("vil_tiny", depth=1, num_classes=0)
        plain.load_state_dict(found["model"].state_dict())
        assert (plain(images) - before).abs().max() > 1e-3


def test_a_registered_model_with_a_custom_mixer_trains_from_the_shipped_weights(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path)
    module = types.ModuleType("idea")  # timm looks up the module of a registered function
    monkeypatch.setitem(sys.modules, "idea", module)
    code = "".join(snippets("CONTRIBUTING.md"))
    short = 'img_size=64, epochs=1, warmup_epochs=0, workers=0, device="cpu"'
    exec(compile(code.replace("img_size=64", short), "CONTRIBUTING.md", "exec"), vars(module))
    assert "initialized from vil_tiny.tiny_in200: 65 of 67 tensors, 2 resampled; new head for 2 classes" in caplog.text
    assert module.run.history[-1]["epoch"] == 1
    assert {prediction.label for prediction in module.predictions} == {"cat", "dog"}


def test_the_readmes_lines_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    found: dict = {}
    (lines,) = snippets("README.md")
    exec(compile(lines, "README.md", "exec"), found)
    assert found["logits"].shape == (1, 10)
    assert {tuple(features.shape) for features in found["maps"]} == {(1, 192, 20, 30)}
    assert found["pretrained"].num_classes == 10


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_command_lines_use_existing_options(document, monkeypatch, tmp_path):
    lines = command_lines(document)
    monkeypatch.chdir(ROOT)
    for words in lines:
        words = [word for word in words if word != "torchrun" and not word.startswith("--nproc_per_node")]
        words = words[1:] if words[0] in ("python", "-m") else words
        words = words[1:] if words[0] == "-m" else words
        program, options = words[0], words[1:]
        if program == "vil":
            command, *options = options
            check_options_of_command(command, options)
        elif program.endswith(".py"):
            assert (ROOT / program).exists()
        elif program not in ("pip", "make"):
            assert importlib.util.find_spec(program), words
    assert lines or document == "docs/hardware.md"


def check_options_of_command(command, options):
    if command == "train":
        resumed = "--resume" in options and "-c" not in options
        assert resumed or load_config("", options).model
    elif command == "info":
        assert not options
    else:
        assert importlib.import_module(f"vil.cli.{command}").parse_options(options, f"vil {command}")


@pytest.mark.parametrize(
    ("command", "words", "missing"),
    [("predict", [], r"IMAGE\|FOLDER; .*"), ("export", [], "--out")],
)
def test_missing_command_line_arguments_are_named(command, words, missing):
    with pytest.raises(SystemExit, match=f"^error: .*arguments are required: {missing}$"):
        run([command, *words])
