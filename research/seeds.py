"""ViL, ViM and DeiT through the full training path with one recipe, several seeds each.

    python -m vil.data.digits data/digits
    python -m research.seeds -c configs/digits.yaml --out output/digits.json
    python -m research.seeds -c configs/digits.yaml --jobs 15 --device cpu      # 15 runs at a time

Every run is `train_imagenet.py` with the same config, budget and recipe; what counts is the accuracy after the last
epoch. A seed decides the initial weights, the order of the images and how they are augmented. The models are compared
by the paired t-test over the seeds, and by Welch's, as seeds pair little: models of one seed share the order of images.

With `--folder` the runs are kept there: called again, it goes on where it was stopped (by `--minutes`, Ctrl-C, SIGTERM
or a lost machine), with what is missing of each run and with the runs that are missing. `--test-split` has the last
weights of all runs judged on images that no run has seen and nothing was chosen on; whose predictions are right is
compared image by image, by McNemar's test. Runs of another recipe or of other images (by the names and sizes of their
files) are refused, in the folder as in what `--earlier` adds.

    python -m research.seeds -c research/configs/rehearsal.yaml --folder output/rehearsal --processes 4 \\
        --test-split test --out output/rehearsal.json --plot output/rehearsal.png
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from tarfile import TarInfo
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from timm.data import resolve_data_config

import vil  # noqa: F401  registers the models
from research.compare import listed, paired, spread, welch
from research.predictions import Judged, compare_images, job_of, joined, name_of
from vil.config import ConfigError, load_config
from vil.data.loaders import evaluation_loader
from vil.data.splits import open_split
from vil.data.workers import share_cores
from vil.devices import autocast, default_device
from vil.evaluation.comparison import Predictions, markdown_table
from vil.evaluation.evaluator import Evaluator
from vil.factory import create_model, load_model
from vil.files import write_atomically
from vil.info import git_commit
from vil.processes import SCHEDULERS_SIGNALS, hearing_signals
from vil.training.interruption import PREEMPTED

ROOT = Path(__file__).parents[1]
MODELS = ["vil_tiny", "vim_tiny", "deit_tiny_patch16_224"]
HEAD_WIDTH = 32  # of DeiT, where the config narrows it: two heads at least
CURVES = (
    "lr", "train_loss", "grad_norm", "images_per_second", "eval_images_per_second", "eval_loss", "eval_top1",
    "eval_top1_ema",
)  # fmt: skip
EVALUATED_AT_ONCE = 250
CPU_INFO = Path("/proc/cpuinfo")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The study's options, and those that it hands to train_imagenet.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-c", "--config", type=Path, default=ROOT / "configs" / "digits.yaml")
    add("--data-dir", help="of the images (default: the config's), wherever they are now")
    add("--models", nargs="+", default=MODELS, help="the first is compared with the others")
    add("--seeds", type=int, default=5, help="how many, from 0")
    add("--jobs", type=int, default=1, help="runs at a time, each with GPUs of its own where there are as many")
    add("--processes", type=int, help="of a run, started by torchrun (default: one, without it)")
    add("--folder", type=Path, help="keeps the runs, and goes on with those that are there")
    add("--earlier", type=Path, help="--out of a call before, whose runs are added and not done again")
    add("--minutes", type=float, default=math.inf, help="after so many it stops what is running")
    add("--test-split", help="judges all runs on this split of the data")
    add("--out", type=Path, help="JSON of all runs; the predictions go beside it")
    add("--plot", type=Path, help="PNG of the accuracy by epoch and by a model's time of training")
    return parser.parse_known_args()


def main() -> None:
    options, training_options = parse_arguments()
    deadline = Deadline(options.minutes)
    words = [*training_options, *(["--data-dir", options.data_dir] if options.data_dir else [])]
    train_set, val_set, test_set = open_splits(options.config, words, options.test_split)
    recipe = dict(
        config=yaml.safe_load(options.config.read_text()), options=training_options,
        images=[digest_of(train_set), digest_of(val_set)],
    )  # fmt: skip
    study = recipe | dict(test_split=options.test_split, test_images=digest_of(test_set) if test_set else None)
    runs, parts = read_results(options.earlier, study) if options.earlier else ([], [])
    have = {job_of(run) for run in runs}
    jobs = [(model, seed) for seed in range(options.seeds) for model in options.models]
    with nullcontext(options.folder) if options.folder else TemporaryDirectory() as folder:
        folder = Path(folder)
        keep_recipe(folder, recipe)
        gpus = share_gpus(visible_gpus(), options.jobs, options.processes or 1)
        with deadline, ThreadPoolExecutor(options.jobs) as pool:
            to_do = [job for job in jobs if job not in have]
            list(pool.map(lambda job: train(options, *job, words, folder, deadline, gpus), to_do))
        done = [job for job in find_runs(folder, options.models) if is_done(folder / name_of(*job)) and job not in have]
        new = [read_run(folder, *job, len(train_set), len(val_set)) for job in done]
        if options.test_split and new:
            parts.append(judge(folder, new, test_set))
    models = [*dict.fromkeys(run["model"] for run in [*runs, *new])]
    runs = sorted([*runs, *new], key=lambda run: (models.index(run["model"]), run["seed"]))
    publish(runs, parts, options, study)
    if missing := [name_of(*job) for job in jobs if job not in map(job_of, runs)]:
        how = "the same command goes on" if options.folder else "without --folder nothing of them is kept"
        print(f"not done yet: {', '.join(missing)}; {how}", file=sys.stderr)
        sys.exit(PREEMPTED)


def publish(runs: list[dict[str, Any]], parts: list[Judged], options: argparse.Namespace, study: dict) -> None:
    """Prints the tables, and writes the files that the options name; `parts` are predictions of all runs."""
    predictions = joined(parts, [name_of(*job_of(run)) for run in runs]) if options.test_split and runs else None
    if predictions:
        for run, right in zip(runs, predictions.right_NM.T):
            run["top1"] = 100 * float(right.mean())
    where = machine() | dict(processes=options.processes, jobs=options.jobs)
    print(where | dict(options=study["options"]), "\n\n" + report(runs))
    if predictions:
        print(compare_images(runs, predictions))
    if options.out and runs:
        write_atomically(options.out, json.dumps(where | study | dict(runs=runs), indent=1) + "\n")
        if predictions:
            predictions.write(predictions_of(options.out))
    if options.plot and runs:
        write_atomically(options.plot, plot(runs))


class Deadline:
    """When runs are to stop: after so many minutes, or, inside `with`, as soon as a signal asks this process to end."""

    def __init__(self, minutes: float):
        self.time = time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.time

    def __enter__(self) -> None:
        self.handlers = {number: signal.signal(number, self._pass) for number in SCHEDULERS_SIGNALS}
        self.hearing = hearing_signals()  # this thread waits for those that have the runs
        self.hearing.__enter__()

    def __exit__(self, *error) -> None:
        self.hearing.__exit__(*error)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _pass(self, *_) -> None:
        self.time = -math.inf


def open_splits(config: Path, words: list[str], test_split: str | None) -> list:
    """The split that runs train on, the one that validates them, and, if given, the one that judges them in the end.

    Raises:
        SystemExit: An option is wrong, or a split is missing.
    """
    try:
        chosen = load_config("", ["-c", str(config), *words])
        names = (chosen.train_split, chosen.val_split, test_split)
        return [open_split(chosen.data_dir, chosen.dataset, name) if name else None for name in names]
    except ConfigError as error:
        sys.exit(f"error: {error}")


def digest_of(images) -> str:
    """A digest of a split's file names and sizes, or, where they are not known, how many images there are."""
    samples = getattr(images.reader, "samples", None)
    if samples is None:
        return f"{len(images)} images"
    digest = hashlib.sha256()
    for i, (file, *_) in enumerate(samples):
        size = file.size if isinstance(file, TarInfo) else os.stat(file).st_size
        digest.update(f"{images.filename(i)}\0{size}\n".encode())
    return digest.hexdigest()


def keep_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Notes in a folder the recipe of its runs.

    Raises:
        SystemExit: There are runs of another recipe.
    """
    file = folder / "study.json"
    if file.exists():
        check_same(file, json.loads(file.read_text()), recipe, "give the same as then, or another --folder")
    elif any(folder.glob("*/config.yaml")):
        sys.exit(
            f"{folder} has runs, and no {file.name} that says by which recipe: an earlier version made them; give "
            "another --folder"
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(recipe, indent=1) + "\n")


def check_same(file: Path, found: dict[str, Any], expected: dict[str, Any], remedy: str) -> None:
    """Compares what a file says of its runs with what is expected of them.

    Raises:
        SystemExit: They differ.
    """
    for name, value in expected.items():
        if name not in found:
            sys.exit(f"{file} does not say the {name} of its runs: an earlier version wrote it; {remedy}")
        if found[name] != value:
            sys.exit(f"{file} is of runs with other {name}: {found[name]}, not {value}; {remedy}")


def predictions_of(results: Path) -> Path:
    """The file of predictions beside a JSON file of results."""
    return results.with_suffix(".csv.gz")


def visible_gpus() -> list[str]:
    """This process's GPUs, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(i) for i in range(torch.cuda.device_count())]


def share_gpus(names: list[str], jobs: int, processes: int) -> SimpleQueue[str]:
    """The GPUs of `jobs` runs at a time, each of as many processes: none is shared as long as there are others."""
    groups = [",".join(names[i : i + processes]) for i in range(0, len(names) - processes + 1, processes)]
    queue: SimpleQueue[str] = SimpleQueue()
    for group, _ in zip(cycle(groups or [",".join(names)]), range(jobs)):
        queue.put(group)
    return queue


def find_runs(folder: Path, models: list[str]) -> list[tuple[str, int]]:
    """Model and seed of the runs in a folder, by model and then by seed."""
    found = [(model, path.name.removeprefix(f"{model}-")) for model in models for path in folder.glob(f"{model}-*")]
    return sorted(((m, int(s)) for m, s in found if s.isdecimal()), key=lambda run: (models.index(run[0]), run[1]))


def train(
    options, model: str, seed: int, words: list[str], folder: Path, deadline: Deadline, gpus: SimpleQueue[str]
) -> None:
    """Does what is missing of one run of train_imagenet.py, on GPUs that are free, and stops it when time is up."""
    path, config = folder / name_of(model, seed), yaml.safe_load(options.config.read_text())
    if is_done(path) or deadline.passed:
        return
    arguments = dict(config.get("model_kwargs") or {})
    if "embed_dim" in arguments and model.startswith("deit"):
        arguments["num_heads"] = arguments["embed_dim"] // HEAD_WIDTH
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    launcher = launcher if options.processes else []
    command = [sys.executable, *launcher, str(ROOT / "train_imagenet.py"), "-c", str(options.config.resolve())]
    command += ["--model", model, "--seed", str(seed), "--resume", "auto"]
    command += ["--output", str(folder.resolve()), "--experiment", path.name, *words]
    if arguments:
        command += ["--model-kwargs", *(f"{name}={value}" for name, value in arguments.items())]
    path.mkdir(parents=True, exist_ok=True)
    start, mine = time.monotonic(), gpus.get()
    try:
        with open(path / "log.txt", "ab") as log:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": mine}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while process.poll() is None and not deadline.passed:
            time.sleep(0.1)
        if stopped := process.poll() is None:
            process.send_signal(signal.SIGTERM)
        status = process.wait()
    finally:
        gpus.put(mine)
    stopped |= status == PREEMPTED  # by a signal that did not come from here
    row = dict(seconds=round(time.monotonic() - start, 1), stopped=stopped, epochs=len(read_summary(path)))
    where = machine()
    row |= dict(commit=where["commit"], gpu=where["gpu"], processes=options.processes, jobs=options.jobs)
    with open(path / "sessions.jsonl", "a") as sessions:  # the processes that it took
        sessions.write(json.dumps(row) + "\n")
    if status and not stopped:
        sys.exit(f"{path.name} ended with status {status}: {(path / 'log.txt').read_text()[-2000:]}")
    reached = f", top-1 {read_summary(path)[-1]['eval_top1']:.2f}" if row["epochs"] else ""
    print(f"{path.name}: {json.dumps(row)}{reached}", flush=True)


def read_summary(path: Path) -> list[dict[str, float]]:
    """The rows of a run's summary.csv so far."""
    if not (path / "summary.csv").exists():
        return []
    rows = csv.DictReader((path / "summary.csv").read_text().splitlines())
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def is_done(path: Path) -> bool:
    rows = read_summary(path)
    return bool(rows) and len(rows) == saved_config(path)["epochs"]


def saved_config(path: Path) -> dict[str, Any]:
    return yaml.safe_load((path / "config.yaml").read_text())


def model_arguments(saved: dict[str, Any]) -> dict[str, Any]:
    """What timm's `create_model` gets for the model of a run, by the run's config."""
    size = {"img_size": saved["img_size"]} if saved["img_size"] else {}
    return dict(num_classes=saved["num_classes"], **size, **(saved["model_kwargs"] or {}))


def read_run(folder: Path, model: str, seed: int, images: int, evaluated: int) -> dict[str, Any]:
    """The record of a run that is done: numbers after the last epoch, its curves, and the time it took.

    `images` and `evaluated` are the images of the training and of the validation split.
    """
    path = folder / name_of(model, seed)
    rows, saved = read_summary(path), saved_config(path)
    built = create_model(model, **model_arguments(saved))
    batch = saved["global_batch_size"]
    images -= images % batch
    sessions = path / "sessions.jsonl"  # missing where this process ended before the run did
    return {
        "model": model,
        "seed": seed,
        "parameters": sum(p.numel() for p in built.parameters()),
        "epochs": len(rows),
        "images": images * len(rows),
        "updates": images // batch * len(rows),
        "top1": rows[-1]["eval_top1"],
        "loss": rows[-1]["eval_loss"],
        "epoch_seconds": median(images / row["images_per_second"] for row in rows),
        "training_seconds": sum(images / row["images_per_second"] for row in rows),
        "evaluation_seconds": sum(evaluated / row["eval_images_per_second"] for row in rows),
        "sessions": [json.loads(line) for line in sessions.read_text().splitlines()] if sessions.exists() else [],
        "curves": {name: [row[name] for row in rows] for name in CURVES if name in rows[0]},
    }


def read_results(path: Path, study: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Judged]]:
    """The runs that an earlier call wrote, and their predictions, if they were judged.

    Raises:
        SystemExit: That call had another recipe, other images or another split to judge on, or predictions are missing.
    """
    found, remedy = json.loads(path.read_text()), "leave --earlier out"
    check_same(path, found, study, remedy)
    if not study["test_split"]:
        return found["runs"], []
    if not (file := predictions_of(path)).exists():
        sys.exit(f"{file} is missing, the predictions of the runs in {path}; {remedy}")
    return found["runs"], [joined([Judged.read(file)], [name_of(*job_of(run)) for run in found["runs"]])]


def judge(folder: Path, runs: list[dict[str, Any]], images) -> Judged:
    """Has the last weights of the runs, not their averages, classify the images of a split, all in one pass."""
    device = torch.device(default_device())
    models = []
    for run in runs:
        path = folder / name_of(run["model"], run["seed"])
        saved = saved_config(path)
        models.append(load_model(run["model"], str(path / "last.pt"), **model_arguments(saved)).to(device).eval())
    chosen = {name: saved[name] for name in ("img_size", "crop_pct", "interpolation")}
    data_config = resolve_data_config(chosen, model=models[0])
    share_cores(device, saved["workers"])
    loader = evaluation_loader(images, data_config, device, saved["workers"], EVALUATED_AT_ONCE, 0, 1)
    predictions = Predictions()
    precision = autocast(device, saved["amp"], saved["amp_dtype"])
    Evaluator(models, data_config, device, precision, EVALUATED_AT_ONCE)(loader, predictions)
    targets_N, best_NMK, _ = predictions.gather()
    files = [images.filename(i) for i in range(len(images))]
    return Judged(targets_N, best_NMK[..., 0], files, [name_of(*job_of(run)) for run in runs])


def epoch_seconds(runs: list[dict[str, Any]]) -> float:
    """Seconds of training that an epoch of one model takes: the median of its runs, some of which may be disturbed."""
    return median(run["epoch_seconds"] for run in runs)


def top1_by_seed(runs: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The top-1 of every model and seed, models in their order."""
    models = dict.fromkeys(run["model"] for run in runs)
    return {model: {run["seed"]: run["top1"] for run in runs if run["model"] == model} for model in models}


def report(runs: list[dict[str, Any]]) -> str:
    """Markdown: every model's mean and deviation over the seeds, and the first model's mean less that of each other."""
    top1 = top1_by_seed(runs)
    first = next(iter(top1), "")
    less = f"{first} less this (95% interval), paired by seed"
    table = [["model", "parameters", "top-1 %, mean ± deviation", "seeds", "s an epoch", less, "unpaired (Welch)"]]
    for model, by_seed in top1.items():
        own = [run for run in runs if run["model"] == model]
        found = [test(top1[first], by_seed) if model != first else None for test in (paired, welch)]
        row = [model, f"{own[0]['parameters']:,}", spread(by_seed.values()), listed(by_seed.values())]
        differences = [f"{gap}, p = {gap.p_value:.2g}" if gap else "" for gap in found]
        table.append([*row, f"{epoch_seconds(own):.2f}", *differences])
    return markdown_table(table)


def plot(runs: list[dict[str, Any]]) -> bytes:
    """A PNG: the accuracy on the validation split by epochs and by the time of training, at `epoch_seconds` each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for color, model in enumerate(dict.fromkeys(run["model"] for run in runs)):
        own = [run for run in runs if run["model"] == model]
        for i, run in enumerate(own):
            top1, style = run["curves"]["eval_top1"], dict(color=f"C{color}", linewidth=1, label=None if i else model)
            epochs = np.arange(1, len(top1) + 1)
            axes[0].plot(epochs, top1, **style)
            axes[1].plot(epochs * epoch_seconds(own), top1, **style)
    axes[0].set(xlabel="epochs", ylabel="top-1 on the validation split (%)")
    axes[1].set(xlabel="seconds of training")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


def machine() -> dict[str, Any]:
    """What runs are done by and on."""
    return dict(
        commit=git_commit(), torch=torch.__version__, processor=processor(), cores=os.cpu_count(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )  # fmt: skip


def processor() -> str:
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""  # Linux has it
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
