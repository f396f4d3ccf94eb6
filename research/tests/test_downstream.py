"""Tests of research/downstream.py and research/downstream_images.py: the splits, the order of runs, and tables."""

import json
import subprocess
import tarfile
from collections import Counter
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from processes import call
from scipy.stats import ttest_ind

from research import downstream, downstream_images, transfer
from research.compare import holm
from research.downstream import COMPARED, DEIT, EPOCHS, NEW, OLD, POOLED, SMALL, STARTS, WEIGHTS, Run, Way
from research.transfer import SCRATCH


def counted(places):
    return Counter(place.split("/")[0] for place in places)


def files_in(folder, count, extension=".jpg"):
    return {f"{folder}/image_{i:04}{extension}": f"{folder}-{i}" for i in range(count)}


def test_caltech101_has_equal_classes_whose_images_of_one_name_share_a_split():
    root = "101_ObjectCategories"
    files = files_in(f"{root}/Faces", 90) | files_in(f"{root}/Faces_easy", 90) | files_in(f"{root}/inline_skate", 31)
    files |= files_in(f"{root}/BACKGROUND_Google", 9)
    places = downstream_images.splits("caltech101", files)
    assert counted(places) == dict(train=75, validation=15, test=50 + 50 + 1)
    assert {place.split("/")[1] for place in places} == {"Faces", "Faces_easy", "inline_skate"}
    assert {place.replace("Faces/", "Faces_easy/") for place in places if "/Faces/" in place} <= places.keys()
    assert places == downstream_images.splits("caltech101", dict(reversed(files.items())))


def test_groceries_keep_their_splits_and_have_the_finest_classes():
    files = {
        "dataset/train/Fruit/Apple/Granny-Smith/a.jpg": "1", "dataset/val/Fruit/Apple/Granny-Smith/a.jpg": "2",
        "dataset/test/Vegetables/Leek/a.jpg": "3", "dataset/iconic-images-and-descriptions/Leek/a.jpg": "4",
        "sample_images/natural/Leek.jpg": "5",
    }  # fmt: skip
    expected = {"train/Granny-Smith/a.jpg": "1", "validation/Granny-Smith/a.jpg": "2", "test/Leek/a.jpg": "3"}
    assert downstream_images.splits("groceries", files) == expected


def test_pacs_is_trained_on_three_domains_and_tested_on_the_fourth():
    domains = ("art_painting", "cartoon", "photo", "sketch")
    files = {path: blob for domain in domains for path, blob in files_in(f"PACS/{domain}/dog", 30, ".png").items()}
    places = downstream_images.splits("pacs", files)
    assert counted(places) == dict(train=3 * 27, validation=3 * 3, test=30)
    assert {place.split("/")[2].startswith("sketch_") for place in places if place.startswith("test/")} == {True}
    assert not any("sketch" in place for place in places if not place.startswith("test/"))


def test_aid_has_a_fifth_of_each_class_for_training():
    places = downstream_images.splits("aid", files_in("AID/Beach", 40) | files_in("AID/Pond", 20))
    assert counted(places) == dict(train=8 + 4, validation=2 + 1, test=30 + 15)


def test_an_image_that_is_stored_twice_is_kept_only_among_the_test_images():
    files = {"train/hat/a.jpg": "1", "validation/hat/b.jpg": "1", "test/hat/c.jpg": "1", "train/hat/d.jpg": "2"}
    assert downstream_images.splits("clothing", files) == {"test/hat/c.jpg": "1", "train/hat/d.jpg": "2"}


def test_the_parts_have_small_jpeg_files_of_all_data_sets(tmp_path, capsys):
    paths = dict(
        caltech101="101_ObjectCategories/ant/a.jpg", groceries="dataset/val/Leek/b.jpg", pacs="PACS/sketch/dog/c d.png",
        aid="AID/Pond/e.jpg", clothing="test/hat/f.jpg",
    )  # fmt: skip
    for name, path in paths.items():
        file = tmp_path / "sources" / name / path
        file.parent.mkdir(parents=True)
        Image.new("RGB", (400, 800), (len(name), 0, 0)).save(file)
        git = ["git", "-C", str(tmp_path / "sources" / name), "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "images"]):
            subprocess.run([*git, *words], check=True)
    call(downstream_images.main, tmp_path / "sources", tmp_path / "parts")
    assert "pacs: train 0, validation 0, test 1" in capsys.readouterr().out
    found = {}
    for part in (tmp_path / "parts").glob("*/part-0.tar.gz"):
        with tarfile.open(part) as tar:
            (member,) = tar
            image = Image.open(BytesIO(tar.extractfile(member).read()))
            found[part.parent.name] = (member.name, image.format, image.size)
    names = ("caltech101/train/ant/a.jpg", "groceries/validation/Leek/b.jpg", "pacs/test/dog/sketch_c d.jpg",
             "aid/train/Pond/e.jpg", "clothing/test/hat/f.jpg")  # fmt: skip
    assert found == {name.split("/")[0]: (name, "JPEG", (150, 300)) for name in names}
    with pytest.raises(SystemExit, match="must not exist"):
        call(downstream_images.main, tmp_path / "sources", tmp_path / "parts")


def top1(run):
    """Return a fake accuracy. From scratch, a learning rate of 1e-3 is best; for fine-tuning, the largest one."""
    best = {1e-3: 30} if run.start == SCRATCH else {}
    return best.get(run.setting, 1000 * run.setting) + run.seed + len(run.task) + STARTS.index((run.model, run.start))


def study(tasks=EPOCHS, pretrained=WEIGHTS, stop=None):
    """Return the rows of a study that trains one run at a time, up to the first run that `stop` accepts."""
    rows, done = [], set()
    while missing := [run for run in downstream.planned(rows, tasks, pretrained) if run not in done]:
        if stop and stop(missing[0]):
            break
        done.add(missing[0])
        rows.append(missing[0]._asdict() | dict(top1=top1(missing[0])))
    return rows


def test_each_way_tries_rates_up_to_a_worse_neighbor_and_then_trains_each_seed_at_the_best_rate():
    rows = study()
    for way in downstream.all_ways():
        tried = [row["setting"] for row in downstream.own(rows, way, True)]
        reported = [(row["setting"], row["seed"]) for row in downstream.own(rows, way, False)]
        if way.start == SCRATCH:
            expected = {POOLED: [3e-4, 1e-3, 3e-3], DEIT: [1e-4, 3e-4, 1e-3, 3e-3]}[way.model]
        else:
            expected = [3e-4, 1e-3, 3e-3, 1e-2] if way.model == POOLED else [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
        assert tried == expected, way
        assert reported == [(1e-3 if way.start == SCRATCH else 1e-2, seed) for seed in range(5)]


def test_the_lowest_learning_rate_is_also_a_neighbor_and_wins_ties():
    way, rows = Way("aid", DEIT, NEW), []
    while (rate := downstream.chosen(rows, way)) is None:
        missing = next(r for r in downstream.rates_to_try(rows, way) if r not in downstream.tried(rows, way))
        rows.append(Run(*way, missing, 100, True)._asdict() | dict(top1=50.0))
    assert rate == 3e-5
    assert {row["setting"] for row in rows} == {3e-5, 1e-4, 3e-4, 1e-3}


def test_the_compared_methods_of_all_data_sets_come_first_and_seeds_are_balanced():
    rows = study(stop=lambda run: run.task == "pacs" and run.seed == 2)
    assert {(row["model"], row["start"]) for row in rows} == {*COMPARED}
    assert [len(downstream.by_seed(rows, Way("pacs", *start))) for start in COMPARED] == [2] * 4
    assert len(downstream.by_seed(rows, Way("aid", POOLED, NEW))) == 5


def test_runs_without_images_or_weights_are_left_for_a_later_call():
    rows = study(tasks=["aid"], pretrained=[(POOLED, OLD)])
    assert {row["task"] for row in rows} == {"aid"}
    assert {(row["model"], row["start"]) for row in rows} == {(POOLED, SCRATCH), (POOLED, OLD), (DEIT, SCRATCH)}
    assert "| aid | 100 | 33.0 ±" not in downstream.summary_table(rows)


def test_p_values_are_shown_after_the_last_registered_run():
    rows = study(stop=lambda run: run.task == "pacs" and run.seed == 4)
    lines = downstream.differences_table(rows).splitlines()[2:]
    assert [" (" in line for line in lines] == [True, True, True, True, False] * 3
    assert all(line.endswith("| - | - |") for line in lines)
    rows = study()
    lines = downstream.differences_table(rows).splitlines()[2:]
    pairs = [[[*downstream.by_seed(rows, way).values()] for way in pair] for pair in downstream.TESTED]
    p_values = [ttest_ind(*pair, equal_var=False).pvalue for pair in pairs]
    expected = [[f"{p:.2g}", f"{c:.2g}"] for p, c in zip(p_values, holm(p_values))]
    assert [line.strip("| ").split(" | ")[3:] for line in lines] == expected
    assert downstream.summary_table(rows).splitlines()[2].startswith("| clothing | 100 | 40.0 ± 1.6 | 21.0 ± 1.6 |")


def test_the_runs_of_the_clothing_study_are_complete_ways_of_this_study():
    rows = downstream.clothing_runs()
    images = rows[0]["images"]
    ways = [Way("clothing", *start) for start in ((POOLED, SCRATCH), (POOLED, OLD), (DEIT, SCRATCH))]
    assert [len(downstream.by_seed(rows, way)) for way in ways] == [5, 5, 5]
    planned = list(downstream.planned(rows, ["clothing"], [(POOLED, OLD)]))
    assert sorted(map(str, planned)) == sorted(str(Run(*(row[name] for name in Run._fields))) for row in rows)
    downstream.check_inputs(rows, dict(clothing=images), {})
    with pytest.raises(SystemExit, match="images of clothing"):
        downstream.check_inputs(rows, dict(clothing=images[::-1]), {})


@pytest.fixture
def data(tmp_path):
    for split, count in (("train", 4), ("validation", 2), ("test", 3)):
        for kind in ("coat", "hat"):
            (folder := tmp_path / "data" / "aid" / split / kind).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (40, 40), (50 * i, 255 * (kind == "hat"), 0)).save(folder / f"{split}{i}.jpg")
    return tmp_path / "data"


def test_the_program_reports_on_test_and_resumes(data, tmp_path, monkeypatch, capsys):
    given = []

    def train_on(images, words, _, run, test_split):
        given.append((images, dict(pairwise(words)), run, test_split))
        return dict(top1=top1(run))

    weights = [tmp_path / f"{name}.safetensors" for name in WEIGHTS.values()]
    for path in weights:
        path.write_text(path.stem)
    command = ["--data-dir", data, "--weights", *weights, "--out", tmp_path / "out.json", "--device", "cpu"]
    monkeypatch.setattr(transfer, "train_on", train_on)
    earlier = [row for row in downstream.clothing_runs() if row["start"] == SCRATCH]
    monkeypatch.setattr(downstream, "clothing_runs", lambda: earlier)
    call(downstream.main, *command)
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(given) == len(study(tasks=["aid"])) == len(content["runs"]) - len(earlier)
    assert content["calls"][0]["runs"] == len(given)
    for images, options, run, test_split in given:
        assert images == data / "aid"
        assert options["--val-split"] == "validation"
        assert test_split == ("" if run.rehearse else "test")
        assert (options["--model"], options["--epochs"], options["--layer-decay"]) == (run.model, "100", "none")
        assert options["--crop-pct"] == "0.875"  # the same for ViL and DeiT
        expected = f"{WEIGHTS[run.model, run.start]}.safetensors" if run.start != SCRATCH else "-"
        assert Path(options.get("--pretrained-path", "-")).name == expected
    call(downstream.main, *command)
    assert len(given) == content["calls"][0]["runs"]
    assert f"| aid | {SMALL} | new weights | 0.01 | 5 |" in capsys.readouterr().out
    weights[-1].write_text("others")
    with pytest.raises(SystemExit, match="must start from"):
        call(downstream.main, *command)


def test_the_test_split_is_evaluated_once_after_training(data, tmp_path, monkeypatch, no_pictures):
    seen, validate = [], transfer.validate
    monkeypatch.setattr(transfer, "validate", lambda *given: seen.append(given) or validate(*given))
    words = ["-c", "finetune", "--model", "vil_tiny", "--img-size", "32", "--epochs", "2", "--warmup-epochs", "0"]
    words += ["--global-batch-size", "4", "--device", "cpu", "--workers", "0", "--layer-decay", "none"]
    words += ["--val-split", "validation", "--model-kwargs", "depth=2", "embed_dim=32"]
    run = Run("aid", "vil_tiny", SCRATCH, 1e-3, 0, False)
    (tmp_path / "runs").mkdir()
    plain = transfer.train_on(data / "aid", words, str(tmp_path / "runs"), run)
    assert plain["top1"] == pytest.approx(plain["top1_by_epoch"][-1], abs=0.01)
    assert not seen
    tested = transfer.train_on(data / "aid", words, str(tmp_path / "runs"), run, "test")
    ((models, images, *_),) = seen
    assert images.split == "test"
    assert models[0].settings.use_ema
    assert tested["top1_by_epoch"] == plain["top1_by_epoch"]
    assert tested["train_loss"] == plain["train_loss"]
    assert tested["top1"] in [pytest.approx(100 * right / 6) for right in range(7)]
    assert tested["loss"] != plain["loss"]
    again = transfer.train_on(data / "aid", words, str(tmp_path / "runs"), run, "validation")
    assert again["loss"] == pytest.approx(plain["loss"], rel=1e-5)
