"""validate.py as a user runs it: on our checkpoints and ViM's, by one process or two, and on bad input."""

import json
import math
import shutil

import pytest
import timm
import torch
from conftest import CLASSES, VAL_IMAGES
from PIL import Image
from processes import run, script
from timm.data import create_transform

import validate
from vil.training import checkpoint
from vil.training.evaluation import Evaluation


def evaluated_by_hand(model, folder, size):
    """(images, top-1 correct, mean loss) one image at a time through timm's own transform."""
    transform = create_transform(size, crop_pct=0.875, interpolation="bicubic")
    correct, losses = 0, []
    for target, name in enumerate(CLASSES):
        for path in sorted((folder / name).iterdir()):
            with torch.inference_mode():
                logits = model(transform(Image.open(path).convert("RGB"))[None])[0]
            correct += int(logits.argmax()) == target
            losses.append(float(-logits.log_softmax(0)[target]))
    return len(losses), correct, sum(losses) / len(losses)


@pytest.mark.parametrize("use_ema", [False, True])
def test_the_counts_are_those_of_one_image_at_a_time(uninterrupted, image_folder, tmp_path, use_ema):
    path = uninterrupted / "run" / "last.pt"
    config = checkpoint.saved_config(path)
    model = timm.create_model("vil_tiny", num_classes=4, img_size=16, **config["model_kwargs"]).eval()
    checkpoint.load_weights(model, path, use_ema)
    images, correct, loss = evaluated_by_hand(model, image_folder / "val", 16)

    words = ["--checkpoint", str(path), "--json", str(tmp_path / "out.json"), "--batch-size", "5", "--workers", "1"]
    result = run([*script("validate.py"), *words, *(["--use-ema"] if use_ema else [])])
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["images"], written["top1"]) == (images, pytest.approx(100 * correct / images))
    assert written["loss"] == pytest.approx(loss, rel=1e-4)
    assert f"vil_tiny: top-1 {100 * correct / images:.2f}% (95% interval" in result.stdout
    assert "published numbers are for ImageNet-1k, not for these 4 classes" in result.stdout


def test_two_processes_count_each_image_once(uninterrupted, image_folder, tmp_path):
    shutil.copytree(image_folder, tmp_path / "images")
    (tmp_path / "images" / "val" / "ant" / "0.png").unlink()  # 27 images: not a multiple of two
    broken = tmp_path / "images" / "val" / "dog" / "1.png"
    broken.write_bytes(broken.read_bytes()[:200])
    words = ["--checkpoint", str(uninterrupted / "run" / "last.pt"), "--data-dir", str(tmp_path / "images")]
    results = []
    for processes in (1, 2):
        out = tmp_path / f"{processes}.json"
        result = run(
            [*script("validate.py", processes), *words, "--json", str(out), "--batch-size", "4", "--workers", "1"]
        )
        assert "1 unreadable images were left out" in result.stdout
        assert result.stdout.count("top-1") == 1
        written = json.loads(out.read_text())
        results.append({k: written[k] for k in ("images", "unreadable", "top1", "top5", "loss")})
    assert results[0]["images"] == 4 * VAL_IMAGES - 2
    assert results[1] == pytest.approx(results[0], rel=1e-6)


def test_the_line_sets_the_result_beside_the_published_numbers():
    result = Evaluation(
        images=50_000, top1_correct=38_200, top5_correct=46_500, loss=1.0, unreadable=0, images_per_second=9
    )
    line = validate.validation_line("vil_tiny", 1000, result)
    assert "top-1 76.40%" in line
    assert "top-5 93.00%" in line
    assert line.endswith("published top-1 on ImageNet-1k: ViL-tiny 76.4, ViM-tiny 76.1 (top-5 93.0)")
    # Wilson's interval by its formula
    p, n, z = 0.764, 50_000, 1.959964
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = [100 * (centre + sign * half) / (1 + z * z / n) for sign in (-1, 1)]
    assert result.top1_interval == pytest.approx(expected, abs=1e-4)
    assert "published" not in validate.validation_line("resnet50", 1000, result)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model is not given"),
        (["--model", "vil_tiny"], "No pretrained weights exist for vil_tiny"),
        (["--model", "vil_tiny", "--checkpoint", "nowhere.pt"], "there is no checkpoint nowhere.pt"),
        (["--checkpoint", "LAST", "--num-classes", "10"], "has 4 classes but the model 10"),
        (["--checkpoint", "LAST", "--model", "vim_tiny"], "does not fit the model"),
        (["--checkpoint", "LAST", "--data-dir", "LESS"], "has 3 classes but num_classes is 4"),
        (["--checkpoint", "LAST", "--split", "holdout"], "has no split 'holdout'"),
    ],
)
def test_bad_input_is_named_without_a_traceback(
    uninterrupted, image_folder, tmp_path, words, message, monkeypatch, capsys
):
    shutil.copytree(image_folder, tmp_path / "less")
    shutil.rmtree(tmp_path / "less" / "val" / "bee")
    names = {"LAST": str(uninterrupted / "run" / "last.pt"), "LESS": str(tmp_path / "less")}
    monkeypatch.setattr("sys.argv", ["validate.py", "--workers", "0", *(names.get(word, word) for word in words)])
    with pytest.raises(SystemExit) as error:
        validate.main()
    assert message in str(error.value)
