"""Tests of research/seeds.py: stored and resumed runs, evaluation on a separate split, and comparison by image."""

import csv
import gzip
import json
import math
import platform
import shutil
import signal
import tarfile
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import naive_evaluation as naive
import numpy as np
import pytest
import timm
import torch
import yaml
from figures import kept_figures
from fixtures import CLASSES
from processes import SMALL, ForkedProgram, call
from scipy.stats import binomtest

from research import seeds
from research.predictions import Judged, compare_images, joined
from vil.config import load_config
from vil.data.sources.splits import open_split
from vil.factory import load_model

MODELS = ["vil_tiny", "vim_tiny"]


@pytest.fixture
def kept(tmp_path, image_folder):
    """Return a folder with the config of a small study, and the command line of the study."""
    config = dict(SMALL, data_dir=str(image_folder), epochs=2, workers=1, crop_pct=0.7)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    command = ["-c", tmp_path / "small.yaml", "--folder", tmp_path / "runs", "--models", *MODELS]
    command += ["--seeds", "1", "--test-split", "val", "--out", tmp_path / "out.json"]
    return tmp_path, [str(word) for word in [*command, "--plot", tmp_path / "out.png", "--device", "cpu"]]


def run_study(words):
    call(seeds.main, *words)


def test_a_study_goes_on_ends_once_and_is_added_to_by_another(kept, image_folder, capsys, monkeypatch):
    monkeypatch.setattr(seeds, "subprocess", SimpleNamespace(Popen=ForkedProgram))
    root, command = kept
    with pytest.raises(SystemExit) as stopped:
        run_study([*command, "--minutes", "0"])
    assert stopped.value.code == 75
    assert "not done yet: vil_tiny-0, vim_tiny-0" in capsys.readouterr().err
    assert not (root / "out.png").exists()
    run_study(command)
    for model in MODELS:  # the last checkpoint is evaluated, not the best
        (root / "runs" / f"{model}-0" / "best.pt").unlink()
    run_study(command)  # the second call has no run to train
    for model in MODELS:
        sessions = (root / "runs" / f"{model}-0" / "sessions.jsonl").read_text().splitlines()
        assert [json.loads(line)["epochs"] for line in sessions] == [2]

    found = json.loads((root / "out.json").read_text())
    rows = list(csv.DictReader(gzip.decompress((root / "out.csv.gz").read_bytes()).decode().splitlines()))
    assert len(rows) == 28
    for run in found["runs"]:
        path = root / "runs" / f"{run['model']}-0"
        saved = yaml.safe_load((path / "config.yaml").read_text())
        arguments = dict(num_classes=4, img_size=16, **SMALL["model_kwargs"])
        model = load_model(run["model"], str(path / "last.pt"), **arguments).eval()
        cfg = model.pretrained_cfg
        summary = list(csv.DictReader((path / "summary.csv").read_text().splitlines()))
        assert (run["epochs"], run["images"], run["updates"]) == (2, 128, 8)
        assert run["parameters"] == sum(p.numel() for p in model.parameters())
        assert run["curves"]["eval_top1"] == [float(row["eval_top1"]) for row in summary]
        assert run["training_seconds"] == pytest.approx(sum(64 / float(row["images_per_second"]) for row in summary))
        numbers = {name: number for number, name in enumerate(CLASSES)}
        how = dict(input_size=16, crop_pct=0.7, interpolation="bicubic", mean=cfg["mean"], std=cfg["std"])
        names, targets, logits = naive.saved_logits(model, f"{saved['data_dir']}/val", numbers, **how)
        assert [row["image"].split("/")[-1] for row in rows] == names
        assert [int(row["target"]) for row in rows] == targets.tolist()
        taken_for = np.array([int(row[path.name]) for row in rows])
        assert np.all(np.take_along_axis(logits, taken_for[:, None], 1)[:, 0] >= logits.max(axis=1) - 1e-4)
        assert run["top1"] == pytest.approx(100 * (taken_for == targets).mean())
    assert (root / "out.png").read_bytes().startswith(b"\x89PNG")

    elsewhere = root / "elsewhere"
    shutil.copytree(image_folder, elsewhere)
    words = [word.replace("/runs", "/others").replace("/out.", "/more.") for word in command]
    words[words.index("vim_tiny")] = "--earlier"  # this study has only one model
    words.insert(words.index("--earlier") + 1, str(root / "out.json"))
    words[words.index("--seeds") + 1] = "2"
    run_study([*words, "--data-dir", str(elsewhere)])
    saved = yaml.safe_load((root / "others/vil_tiny-1/config.yaml").read_text())
    assert (saved["data_dir"], saved["seed"]) == (str(elsewhere), 1)
    assert sorted(path.name for path in (root / "others").iterdir()) == ["study.json", "vil_tiny-1"]
    before, after = (json.loads(path.read_text())["runs"] for path in (root / "out.json", root / "more.json"))
    assert [(run["model"], run["seed"]) for run in after] == [("vil_tiny", 0), ("vil_tiny", 1), ("vim_tiny", 0)]
    assert [after[0], after[2]] == before
    new = list(csv.reader(gzip.decompress((root / "more.csv.gz").read_bytes()).decode().splitlines()))
    assert [[*row[:3], row[4]] for row in new[1:]] == [list(row.values()) for row in rows]
    assert after[1]["top1"] == pytest.approx(100 * np.mean([row[1] == row[3] for row in new[1:]]))


STUB = """
import json, signal, sys, time
from pathlib import Path

words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
root = Path(__file__).parents[1]
folder, orders = Path(words["--output"], words["--experiment"]), root / "orders"
with open(folder / "calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
given = sys.argv[sys.argv.index("--model-kwargs") + 1 :]
arguments = {name: int(value) for name, value in (word.split("=") for word in given)}
saved = dict(epochs=2, num_classes=4, img_size=16, global_batch_size=16, model_kwargs=arguments)
saved |= dict(crop_pct=None, interpolation="", workers=0, amp=False, amp_dtype="bfloat16")
(folder / "config.yaml").write_text(json.dumps(saved))

names = "lr train_loss grad_norm images_per_second eval_images_per_second eval_loss eval_top1 eval_top1_ema".split()

def train(epochs):  # the first epoch has the highest numbers, and is the best
    rows = [",".join(str(number / epoch) for number in range(1, 9)) for epoch in range(1, epochs + 1)]
    (folder / "summary.csv").write_text("\\n".join([",".join(names), *rows]))
    (folder / "last.pt").write_bytes((root / "last.pt").read_bytes())

def stop(*_):
    (folder / "stopped").touch()
    sys.exit(75)

if orders.exists():
    train(1)
    signal.signal(signal.SIGTERM, stop)
    (folder / "started").touch()
    time.sleep(20)
    sys.exit("nobody has stopped this run")
train(2)
"""


@pytest.fixture
def stubbed(tmp_path, image_folder, monkeypatch):
    """Return a folder and a command line of a study whose runs have the same random weights and do not train."""
    monkeypatch.setattr(seeds, "ROOT", tmp_path)
    model = timm.create_model("vil_tiny", num_classes=4, img_size=16, **SMALL["model_kwargs"])
    torch.save({"state_dict": model.state_dict()}, tmp_path / "last.pt")
    (tmp_path / "research").mkdir()
    (tmp_path / "research" / "train.py").write_text(STUB)
    shutil.copytree(image_folder, tmp_path / "images")
    shutil.copytree(tmp_path / "images" / "val", tmp_path / "images" / "test")
    config = SMALL | dict(data_dir=str(tmp_path / "images"), epochs=1)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    command = ["-c", tmp_path / "small.yaml", "--folder", tmp_path / "runs", "--models", "vil_tiny"]
    return tmp_path, [str(word) for word in command]


def calls(root):
    return [json.loads(line) for path in sorted(root.glob("runs/*/calls")) for line in path.read_text().splitlines()]


def test_every_run_has_its_own_model_and_seed_and_goes_on_by_itself(stubbed):
    root, command = stubbed
    command += ["deit_tiny_patch16_224", "--seeds", "2", "--first-seed", "7"]
    run_study([*command, "--jobs", "3", "--lr", "1e-5"])
    configs = [load_config("", words) for words in calls(root)]
    runs = [("deit_tiny_patch16_224", 7), ("deit_tiny_patch16_224", 8), ("vil_tiny", 7), ("vil_tiny", 8)]
    assert [(config.model, config.seed) for config in configs] == runs
    assert [(config.output, config.experiment) for config in configs] == [
        (str(root / "runs"), f"{m}-{s}") for m, s in runs
    ]
    assert {(config.resume, config.lr, config.epochs, config.img_size) for config in configs} == {("auto", 1e-5, 1, 16)}
    heads = {"deit_tiny_patch16_224": dict(num_heads=1), "vil_tiny": {}}
    assert all(config.model_kwargs == SMALL["model_kwargs"] | heads[config.model] for config in configs)


def send_sigterm_once(started):
    """Send SIGTERM to the calling thread as soon as the file `started` exists."""
    while not started.exists():
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def test_sigterm_stops_the_runs_which_the_next_call_resumes(stubbed, capsys):
    root, command = stubbed
    run, orders = root / "runs" / "vil_tiny-0", root / "orders"
    orders.touch()
    command = [*command, "--seeds", "1", "--out", str(root / "out.json")]
    signal.signal(signal.SIGTERM, handler := lambda *_: None)
    threading.Thread(target=send_sigterm_once, args=(run / "started",), daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        run_study(command)
    assert ended.value.code == 75
    assert "not done yet: vil_tiny-0; run the same command" in capsys.readouterr().err
    assert (run / "stopped").exists()
    assert signal.getsignal(signal.SIGTERM) is handler
    orders.unlink()
    run_study(command)
    (found,) = json.loads((root / "out.json").read_text())["runs"]
    assert [(session["stopped"], session["epochs"]) for session in found["sessions"]] == [(True, 1), (False, 2)]


def test_a_run_that_something_else_stops_is_not_an_error(stubbed):
    root, command = stubbed
    (root / "research" / "train.py").write_text("print('stopped'); raise SystemExit(75)")
    with pytest.raises(SystemExit) as ended:
        run_study([*command, "--seeds", "1"])
    assert ended.value.code == 75
    (root / "research" / "train.py").write_text("print(5000 * '.' + 'what is wrong'); raise SystemExit(3)")
    with pytest.raises(SystemExit, match="vil_tiny-0 ended with status 3: .*what is wrong"):
        run_study([*command, "--seeds", "1"])
    assert (root / "runs" / "vil_tiny-0" / "log.txt").read_text().startswith("stopped\n.")


def test_without_a_folder_nothing_is_promised(stubbed, capsys):
    _, command = stubbed
    i = command.index("--folder")
    with pytest.raises(SystemExit):
        run_study([*command[:i], *command[i + 2 :], "vim_tiny", "--minutes", "0"])
    said = capsys.readouterr().err
    assert "not done yet: vil_tiny-0, vim_tiny-0, vil_tiny-1, vim_tiny-1, " in said  # no run of the study is done
    assert "vim_tiny-4; set --folder" in said


def test_a_run_whose_end_nobody_noted_counts(stubbed):
    root, command = stubbed
    command += ["--seeds", "1", "--out", str(root / "out.json")]
    run_study(command)
    (root / "runs" / "vil_tiny-0" / "sessions.jsonl").unlink()
    (root / "runs" / "vil_tiny-0-before").mkdir()  # folders whose names do not end with a seed are ignored
    summary = root / "runs" / "vil_tiny-0" / "summary.csv"
    head, *rows = summary.read_text().splitlines()
    for lines in (
        [line.rpartition(",")[0] for line in (head, *rows)],
        [head, *(f"{row.rpartition(',')[0]}," for row in rows)],
    ):
        summary.write_text("\n".join(lines))  # both summaries lack EMA accuracies
        run_study(command)
        (run,) = json.loads((root / "out.json").read_text())["runs"]
        # the reported accuracy is that of the last epoch, not of the best epoch
        assert (run["top1"], run["loss"], run["sessions"]) == (3.5, 3.0, [])
        assert run["curves"].keys() == {*seeds.CURVES} - {"eval_top1_ema"}
    seconds = run["epoch_seconds"], run["training_seconds"], run["evaluation_seconds"]
    assert seconds == pytest.approx((24, 64 / 4 + 64 / 2, 28 / 5 + 28 / 2.5))
    assert len(calls(root)) == 1


def test_parallel_runs_of_several_processes_have_gpus_of_their_own(stubbed, monkeypatch):
    root, command = stubbed
    note = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], "
    note += "'on', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
    (root / "research" / "train.py").write_text(note + "if os.environ['RANK'] != '0': raise SystemExit\n" + STUB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-6,7")
    run_study([*command, "--seeds", "2", "--jobs", "2", "--processes", "2"])
    logs = [(root / "runs" / f"vil_tiny-{seed}" / "log.txt").read_text().splitlines() for seed in range(2)]
    found = sorted(sorted(line for line in log if line.startswith("rank ")) for log in logs)
    assert found == [[f"rank {rank} of 2 on {gpus}" for rank in range(2)] for gpus in ("4,5", "GPU-6,7")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert seeds.visible_gpus() == [str(i) for i in range(torch.cuda.device_count())]


def test_a_model_needs_neither_size_nor_arguments():
    assert seeds.model_arguments(dict(num_classes=4, img_size=None, model_kwargs=None)) == dict(num_classes=4)


def test_a_run_that_cannot_start_leaves_its_gpus_to_others(stubbed):
    root, _ = stubbed
    gpus = SimpleQueue()
    gpus.put("3")

    (root / "runs" / "vil_tiny-0" / "log.txt").mkdir(parents=True)  # a folder, so the log cannot be written
    (root / "small.yaml").write_text("epochs: 1")  # the config of a study may lack model_kwargs
    options = SimpleNamespace(config=root / "small.yaml", processes=None, jobs=1)
    deadline = seeds.Deadline(9)
    assert 9 * 60 - 5 < deadline.time - time.monotonic() <= 9 * 60
    with pytest.raises(IsADirectoryError):
        seeds.train(options, "vil_tiny", 0, [], root / "runs", deadline, gpus)
    assert gpus.get_nowait() == "3"


def test_what_cannot_be_opened_is_one_line(stubbed):
    with pytest.raises(SystemExit, match="^error: .*nosuch"):
        run_study([*stubbed[1], "--test-split", "nosuch"])


def enlarge(path):
    path.write_bytes(path.read_bytes() + b"\0")


def test_a_folder_has_runs_of_one_recipe_and_of_the_same_images(stubbed):
    root, command = stubbed
    command[command.index("--folder") + 1] = str(root / "below" / "runs")  # the folder's parent does not exist either
    with pytest.raises(SystemExit):
        run_study([*command, "--minutes", "0"])
    command[command.index("--folder") + 1] = str(root / "runs")
    command += ["--seeds", "1"]
    run_study([*command, "--lr", "1e-3"])
    with pytest.raises(SystemExit, match="options must match .*study.json.*'1e-3'.* got .*'1e-5'.*--folder"):
        run_study([*command, "--lr", "1e-5"])
    command += ["--lr", "1e-3"]
    moved = root / "moved"
    shutil.copytree(root / "images", moved)
    run_study([*command, "--data-dir", str(moved)])
    for split in ("train", "val"):
        shutil.copytree(root / "images", moved, dirs_exist_ok=True)
        enlarge(moved / split / "ant" / "3.png")
        with pytest.raises(SystemExit, match="images must match .*study.json"):
            run_study([*command, "--data-dir", str(moved)])
    config = root / "small.yaml"
    before = config.read_text()
    config.write_text(before.replace("epochs: 1", "epochs: 2"))
    with pytest.raises(SystemExit, match="config must match .*study.json.*'epochs': 1.* got .*'epochs': 2"):
        run_study(command)
    config.write_text(before)
    (root / "runs" / "study.json").unlink()
    with pytest.raises(SystemExit, match="runs contains runs of an earlier version without study.json"):
        run_study(command)
    assert len(calls(root)) == 1


def test_results_are_not_added_to_those_of_other_images_or_of_another_split(stubbed):
    root, command = stubbed
    earlier, predictions, moved = root / "earlier.json", root / "earlier.csv.gz", root / "moved"
    run_study([*command, "--seeds", "1", "--test-split", "test", "--out", str(earlier)])
    command += ["--seeds", "2", "--earlier", str(earlier)]
    command[command.index("--folder") + 1] = str(root / "others")
    judged = [*command, "--test-split", "test"]
    shutil.copytree(root / "images", moved)
    (tmp := root / "earlier").mkdir()
    for file in (earlier, predictions):
        shutil.copy(file, tmp)

    def refused(words, match):
        with pytest.raises(SystemExit, match=match):
            run_study(words)
        assert not (root / "others").exists()  # the study is rejected before training starts

    refused(command, r"test_split must match .*earlier.json \(expected test, got None\): leave out --earlier")
    refused(
        [*command, "--test-split", "val"], "test_split must match .*expected test, got val"
    )  # the two splits have the same file names
    for split, match in (
        ("test", "test_images must match"),
        ("val", "images must match"),
        ("train", "images must match"),
    ):
        shutil.copytree(root / "images", moved, dirs_exist_ok=True)
        enlarge(moved / split / "dog" / "6.png")
        refused([*judged, "--data-dir", str(moved)], match)
    refused([*judged, "--lr", "1"], r"options must match .*expected \[\], got \['--lr', '1'\]")
    found = json.loads(earlier.read_text())
    for name in ("images", "test_split"):
        earlier.write_text(json.dumps({key: value for key, value in found.items() if key != name}))
        refused(judged, f"does not store the {name} of its runs: leave out --earlier")
    earlier.write_text(json.dumps(found | dict(runs=[*found["runs"], found["runs"][0] | dict(seed=7)])))
    refused(judged, "no predictions of vil_tiny-7")
    predictions.unlink()
    refused(judged, "earlier.csv.gz .* does not exist")

    for file in tmp.iterdir():
        shutil.copy(file, root)
    shutil.copytree(root / "images", moved, dirs_exist_ok=True)
    for folder in ("others", "runs"):  # the folder `runs` also contains the run of the --earlier file
        judged[judged.index("--folder") + 1] = str(root / folder)
        run_study([*judged, "--data-dir", str(moved), "--out", str(root / "both.json")])
        assert [run["seed"] for run in json.loads((root / "both.json").read_text())["runs"]] == [0, 1]


@pytest.mark.parametrize("tar", [False, True])
def test_a_split_is_known_by_the_names_and_sizes_of_its_files(tar, tmp_path):
    def digest(name, files):
        folder = tmp_path / name
        for path, content in files.items():
            (folder / "val" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "val" / path).write_bytes(content)
        if tar:
            with tarfile.open(folder / "val.tar", "w") as file:
                file.add(folder / "val", ".")
            shutil.rmtree(folder / "val")
        return seeds.digest_of(open_split(str(folder), "", "val"))

    files = {"a/0.png": b"12", "a/1.png": b"1", "b/0.png": b"1"}
    first = digest("first", files)
    assert digest("again", files) == first
    others = [
        files | {"b/0.png": b"12"},
        files | {"b/1.png": b"1"},
        {"b/1.png": b"1", "a/0.png": b"12", "a/1.png": b"1"},
    ]
    assert len({first, *(digest(str(i), other) for i, other in enumerate(others))}) == 4


def test_a_split_without_a_list_of_files_is_known_by_their_number():
    class Streamed(list):
        reader = None

    assert seeds.digest_of(Streamed("abc")) == "3 images"


def test_predictions_are_read_as_they_were_written_and_have_no_date(tmp_path):
    judged = Judged(np.array([1, 0]), np.array([[1, 2], [0, 3]]), ["a/x, y.png", 'b/"1".png'], ["m-0", "m-1"])
    judged.write(tmp_path / "found.csv.gz")
    found = Judged.read(tmp_path / "found.csv.gz")
    assert (found.images, found.runs) == (judged.images, judged.runs)
    assert found.targets_N.tolist() == [1, 0]
    assert found.predicted_NM.tolist() == [[1, 2], [0, 3]]
    # gzip's timestamp is zero, so that equal contents give equal files
    assert (tmp_path / "found.csv.gz").read_bytes()[4:8] == bytes(4)


def test_predictions_of_the_same_images_are_joined_by_the_names_of_runs():
    def judged(images, runs, *predicted):
        return Judged(np.zeros(2, dtype=int), np.array(predicted), images, runs)

    first = judged(["a", "b"], ["x", "z"], [1, 2], [3, 4])
    parts = [first, judged(["a", "b"], ["y"], [5], [6])]
    assert joined(parts, ["x", "y", "z"]).predicted_NM.tolist() == [[1, 5, 2], [3, 6, 4]]
    of_other_classes = Judged(np.ones(2, dtype=int), np.array([[5], [6]]), ["a", "b"], ["y"])
    for other in (judged(["a", "c"], ["y"], [5], [6]), of_other_classes):
        with pytest.raises(SystemExit, match="same images"):
            joined([first, other], ["x", "y"])


@pytest.mark.parametrize(
    ("names", "jobs", "processes", "expected"),
    [
        (["0", "1", "2", "3"], 2, 1, ["0", "1"]),
        (["4", "7"], 3, 1, ["4", "7", "4"]),
        (["0", "1", "2", "3"], 2, 2, ["0,1", "2,3"]),
        (["0", "1", "2"], 2, 2, ["0,1", "0,1"]),
        (["0"], 1, 2, ["0"]),  # if a run needs more GPUs than exist, research/train.py reports the error
        ([], 2, 1, ["", ""]),
    ],
)
def test_runs_at_a_time_have_gpus_of_their_own(names, jobs, processes, expected):
    shared = seeds.share_gpus(names, jobs, processes)
    assert [shared.get_nowait() for _ in range(shared.qsize())] == expected


def test_images_that_one_model_alone_gets_right_decide():
    targets = np.zeros(100, dtype=int)
    first, second, other_seed = (np.r_[np.zeros(n, dtype=int), np.ones(100 - n, dtype=int)] for n in (80, 70, 5))
    images, names = [str(i) for i in range(100)], ["a-3", "b-3", "b-4"]
    judged = Judged(targets, np.stack([first, second, other_seed], axis=1), images, names)
    runs = [dict(model="a", seed=3), dict(model="b", seed=3), dict(model="b", seed=4)]
    (line,) = compare_images(runs, judged).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["a, b", "3", "70", "10", "0", "20"]
    assert cells[7] == f"{binomtest(10, 10).pvalue:.2g}"
    b, c, n = 10.5, 0.5, 102  # Wald's interval of the difference, with 0.5 added to each of the four counts
    half = 1.96 * math.sqrt(b + c - (b - c) ** 2 / n)
    assert cells[6] == f"+10.00 ({100 * (b - c - half) / n:+.2f} to {100 * (b - c + half) / n:+.2f})"


def test_a_table_has_means_and_differences_of_the_first_model():
    top1 = {"vil_tiny": [90.0, 92.0, 94.0], "vim_tiny": [89.0, 92.0, 91.0], "deit_tiny_patch16_224": [80.0]}
    runs = [
        dict(model=m, seed=s, parameters=1000, top1=v, epoch_seconds=seconds)
        for m, values in top1.items()
        for s, (v, seconds) in enumerate(zip(values, (9.0, 2.0, 1.9)))  # the first run of each model is slow
    ]
    _, _, vil, vim, deit = (line.strip("|").split(" | ") for line in seeds.report(runs).splitlines())
    assert vil[1:] == ["1,000", "92.00 ± 2.00", "90.00 92.00 94.00", "2.00", "", " "]
    # The differences are 1, 0 and 3, with a mean of 4/3 and a standard error of sqrt(7/3 / 3).
    # The 97.5% quantile of Student's t distribution with 2 degrees of freedom is 4.3027.
    half = 4.3027 * math.sqrt(7 / 9)
    assert vim[5] == f"+1.33 ({4 / 3 - half:+.2f} to {4 / 3 + half:+.2f}), p = 0.27"
    # The variances of 3 runs each are 4 and 7/3, so the standard error is sqrt(4/3 + 7/9).
    # The 97.5% quantile of Student's t distribution with 3.741 degrees of freedom is 2.8539.
    half = 2.8539 * math.sqrt(19 / 9)
    assert vim[6].startswith(f"+1.33 ({4 / 3 - half:+.2f} to {4 / 3 + half:+.2f}), p = 0.4")
    assert deit[2:] == ["80.00", "80.00", "9.00", "", " "]


def test_curves_are_drawn_by_epochs_and_by_the_time_of_training(monkeypatch):
    figures, seconds = kept_figures(monkeypatch), {"vil_tiny": 3.0, "vim_tiny": 5.0}
    runs = [
        dict(model=m, epoch_seconds=s, curves=dict(eval_top1=[seed, 9])) for m, s in seconds.items() for seed in (1, 2)
    ]
    seeds.plot(runs)
    for axis, scales in zip(figures[0].axes, ((1, 1), (3, 5)), strict=True):
        expected = [[[scale, seed], [2 * scale, 9]] for scale in scales for seed in (1, 2)]
        assert [line.get_xydata().tolist() for line in axis.lines] == expected
    assert [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()] == MODELS


def test_the_processor_is_the_first_of_proc_cpuinfo_or_what_python_reports(tmp_path):
    cpu_info = tmp_path / "cpuinfo"
    assert seeds.processor(cpu_info) == platform.processor()  # the fallback without a cpuinfo file
    cpu_info.write_text("processor\t: 0\nmodel name\t: One\n\nprocessor\t: 1\nmodel name\t: Two\n")
    assert seeds.processor(cpu_info) == "One"
