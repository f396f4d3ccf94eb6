r"""Train ViL, ViM and DeiT with the same recipe and several seeds, and compare their accuracy.

    python -m vil.data.digits data/digits
    python -m research.seeds -c research/configs/digits.yaml --out output/digits.json
    python -m research.seeds -c research/configs/digits.yaml --jobs 15 --device cpu      # 15 runs at a time

Every run calls research/train.py, which trains as `train_imagenet.py` does. All runs have the same config, budget and
recipe. The accuracy after the last epoch is reported. A seed determines the initial weights, the order of the images
and their augmentation. The models are compared by the paired t-test over the seeds, and also by Welch's t-test, because
models of one seed share only the order and the augmentation of images.

With `--folder`, the runs are kept in a folder. The next call resumes interrupted runs (stopped by `--minutes`, Ctrl-C,
SIGTERM or a lost machine) and starts missing runs. With `--test-split`, the last weights of all runs classify test
images, which no run has seen and which no choice is based on. McNemar's test compares the predictions by image.
Runs with another recipe or other images (by the names and sizes of their files) are rejected, in the folder and in
`--earlier`.

    python -m research.seeds -c research/configs/rehearsal.yaml --folder output/rehearsal --processes 4 \
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

import research.models  # noqa: F401  registers the models of studies
import vil  # noqa: F401  registers the models of the package
from research.compare import listed, paired, spread, welch
from research.predictions import Judged, compare_images, job_of, joined, name_of
from vil.config import ConfigError, load_config
from vil.data.host.workers import share_cores
from vil.data.loaders import evaluation_loader
from vil.data.sources.splits import open_split
from vil.devices import autocast, default_device
from vil.evaluation.evaluator import Evaluator
from vil.evaluation.markdown import markdown_table
from vil.evaluation.predictions import PredictionCollector
from vil.factory import create_model, load_model
from vil.fault_tolerance.files import write_atomically
from vil.fault_tolerance.signals import SCHEDULER_SIGNALS, signals_handled_in_thread
from vil.info import git_commit
from vil.training.interruption import PREEMPTED

ROOT = Path(__file__).parents[1]
MODELS = ["vil_tiny", "vim_tiny", "deit_tiny_patch16_224"]
HEAD_WIDTH = 32  # width of DeiT's heads if the config sets embed_dim
CURVES = (
    "lr", "train_loss", "grad_norm", "images_per_second", "eval_images_per_second", "eval_loss", "eval_top1",
    "eval_top1_ema",
)  # fmt: skip
EVALUATED_AT_ONCE = 250


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the study's options and the options to pass to research/train.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-c", "--config", type=Path, default=ROOT / "research" / "configs" / "digits.yaml")
    add("--data-dir", help="folder of the images (default: the config's)")
    add("--models", nargs="+", default=MODELS, help="the first is compared with the others")
    add("--seeds", type=int, default=5, help="number of seeds")
    add("--first-seed", type=int, default=0, help="first of the consecutive seeds")
    add("--jobs", type=int, default=1, help="number of parallel runs, each on its own GPUs if there are enough")
    add("--processes", type=int, help="processes of a run, started by torchrun (default: one, without torchrun)")
    add("--folder", type=Path, help="folder to keep the runs in and to resume them from")
    add("--earlier", type=Path, help="--out file of an earlier call, whose runs are added instead of repeated")
    add("--minutes", type=float, default=math.inf, help="time limit, after which running jobs are stopped")
    add("--test-split", help="evaluate all runs on this split")
    add("--out", type=Path, help="JSON file of all runs; predictions are written beside it")
    add("--plot", type=Path, help="PNG plot of the accuracy by epoch and by training time")
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
    numbers = range(options.first_seed, options.first_seed + options.seeds)
    jobs = [(model, seed) for seed in numbers for model in options.models]
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
        how = "run the same command to resume" if options.folder else "set --folder to keep unfinished runs"
        print(f"not done yet: {', '.join(missing)}; {how}", file=sys.stderr)
        sys.exit(PREEMPTED)


def publish(runs: list[dict[str, Any]], parts: list[Judged], options: argparse.Namespace, study: dict) -> None:
    """Print the tables and write the requested files. `parts` contains the predictions of all runs."""
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
    """Time at which runs must stop: `minutes` after construction or, inside `with`, when a signal asks this process
    to end.
    """

    def __init__(self, minutes: float):
        self.time = time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.time

    def __enter__(self) -> None:
        self.handlers = {number: signal.signal(number, self._pass) for number in SCHEDULER_SIGNALS}
        self.hearing = signals_handled_in_thread()  # signal handlers also run while the main thread is busy
        self.hearing.__enter__()

    def __exit__(self, *error) -> None:
        self.hearing.__exit__(*error)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _pass(self, *_) -> None:
        self.time = -math.inf


def open_splits(config: Path, words: list[str], test_split: str | None) -> list:
    """Open the training split, the validation split and, if given, the test split.

    Raises:
        SystemExit: An option is invalid, or a split is missing.
    """
    try:
        chosen = load_config("", ["-c", str(config), *words])
        names = (chosen.train_split, chosen.val_split, test_split)
        return [open_split(chosen.data_dir, chosen.dataset, name) if name else None for name in names]
    except ConfigError as error:
        sys.exit(f"error: {error}")


def digest_of(images) -> str:
    """Return a digest of a split's file names and sizes, or the number of images if the files are unknown."""
    samples = getattr(images.reader, "samples", None)
    if samples is None:
        return f"{len(images)} images"
    digest = hashlib.sha256()
    for i, (file, *_) in enumerate(samples):
        size = file.size if isinstance(file, TarInfo) else os.stat(file).st_size
        digest.update(f"{images.filename(i)}\0{size}\n".encode())
    return digest.hexdigest()


def keep_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Write the recipe to the folder, or check that the recipe equals that of the folder's existing runs.

    Raises:
        SystemExit: The folder contains runs with another recipe.
    """
    file = folder / "study.json"
    if file.exists():
        check_same(file, json.loads(file.read_text()), recipe, "set the same options, or choose another --folder")
    elif any(folder.glob("*/config.yaml")):
        sys.exit(
            f"{folder} contains runs of an earlier version without {file.name}, which stores the recipe: choose "
            "another --folder"
        )
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(recipe, indent=1) + "\n")


def check_same(file: Path, found: dict[str, Any], expected: dict[str, Any], remedy: str) -> None:
    """Check that the values stored in a results file equal the expected values.

    Raises:
        SystemExit: The values differ.
    """
    for name, value in expected.items():
        if name not in found:
            sys.exit(f"{file} of an earlier version does not store the {name} of its runs: {remedy}")
        if found[name] != value:
            sys.exit(f"{name} must match the runs in {file} (expected {found[name]}, got {value}): {remedy}")


def predictions_of(results: Path) -> Path:
    """Return the path of the file of predictions that is stored beside a JSON results file."""
    return results.with_suffix(".csv.gz")


def visible_gpus() -> list[str]:
    """Return the names of this process's GPUs, as in CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return [str(i) for i in range(torch.cuda.device_count())]


def share_gpus(names: list[str], jobs: int, processes: int) -> SimpleQueue[str]:
    """Return a queue with the GPUs of each parallel run. Runs share GPUs only if the machine has too few GPUs."""
    groups = [",".join(names[i : i + processes]) for i in range(0, len(names) - processes + 1, processes)]
    queue: SimpleQueue[str] = SimpleQueue()
    for group, _ in zip(cycle(groups or [",".join(names)]), range(jobs)):
        queue.put(group)
    return queue


def find_runs(folder: Path, models: list[str]) -> list[tuple[str, int]]:
    """Return the model and the seed of each run in a folder, sorted by model and then by seed."""
    found = [(model, path.name.removeprefix(f"{model}-")) for model in models for path in folder.glob(f"{model}-*")]
    return sorted(((m, int(s)) for m, s in found if s.isdecimal()), key=lambda run: (models.index(run[0]), run[1]))


def train(
    options, model: str, seed: int, words: list[str], folder: Path, deadline: Deadline, gpus: SimpleQueue[str]
) -> None:
    """Start or resume one run of research/train.py on free GPUs, and stop it at the deadline."""
    path, config = folder / name_of(model, seed), yaml.safe_load(options.config.read_text())
    if is_done(path) or deadline.passed:
        return
    arguments = dict(config.get("model_kwargs") or {})
    if "embed_dim" in arguments and model.startswith("deit"):
        arguments["num_heads"] = arguments["embed_dim"] // HEAD_WIDTH
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    launcher = launcher if options.processes else []
    command = [sys.executable, *launcher, str(ROOT / "research" / "train.py"), "-c", str(options.config.resolve())]
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
    stopped |= status == PREEMPTED  # another process may have stopped the run by a signal
    row = dict(seconds=round(time.monotonic() - start, 1), stopped=stopped, epochs=len(read_summary(path)))
    where = machine()
    row |= dict(commit=where["commit"], gpu=where["gpu"], processes=options.processes, jobs=options.jobs)
    with open(path / "sessions.jsonl", "a") as sessions:  # each call of `train` adds one line for this run
        sessions.write(json.dumps(row) + "\n")
    if status and not stopped:
        sys.exit(f"{path.name} ended with status {status}: {(path / 'log.txt').read_text()[-2000:]}")
    reached = f", top-1 {read_summary(path)[-1]['eval_top1']:.2f}" if row["epochs"] else ""
    print(f"{path.name}: {json.dumps(row)}{reached}", flush=True)


def read_summary(path: Path) -> list[dict[str, float]]:
    """Return the rows of a run's summary.csv, one per finished epoch."""
    if not (path / "summary.csv").exists():
        return []
    rows = csv.DictReader((path / "summary.csv").read_text().splitlines())
    return [{name: float(value) for name, value in row.items() if value} for row in rows]


def is_done(path: Path) -> bool:
    rows = read_summary(path)
    return bool(rows) and len(rows) == saved_config(path)["epochs"]


def saved_config(path: Path) -> dict[str, Any]:
    """Return the options of a run in its last phase, with the number of epochs of all phases."""
    saved = yaml.safe_load((path / "config.yaml").read_text())
    phases = saved.get("phases") or [{}]
    return saved | phases[-1] | dict(epochs=sum(phase.get("epochs", saved["epochs"]) for phase in phases))


def model_arguments(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of timm's `create_model` for the model of a run."""
    size = {"img_size": saved["img_size"]} if saved["img_size"] else {}
    return dict(num_classes=saved["num_classes"], **size, **(saved["model_kwargs"] or {}))


def read_run(folder: Path, model: str, seed: int, images: int, evaluated: int) -> dict[str, Any]:
    """Return a finished run's results, such as accuracy and loss of the last epoch, curves over epochs, and durations.

    Args:
        folder: Folder of the runs.
        model: Model of the run.
        seed: Seed of the run.
        images: Number of training images.
        evaluated: Number of validation images.
    """
    path = folder / name_of(model, seed)
    rows, saved = read_summary(path), saved_config(path)
    built = create_model(model, **model_arguments(saved))
    batch = saved["global_batch_size"]
    images -= images % batch
    sessions = path / "sessions.jsonl"  # sessions.jsonl is missing if research.seeds was killed while the run continued
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
    """Read the runs of an earlier call, and their predictions if there is a test split.

    Raises:
        SystemExit: The earlier call had another recipe, other images or another test split, or predictions are missing.
    """
    found, remedy = json.loads(path.read_text()), "leave out --earlier"
    check_same(path, found, study, remedy)
    if not study["test_split"]:
        return found["runs"], []
    if not (file := predictions_of(path)).exists():
        sys.exit(f"{file} with the predictions of the runs in {path} does not exist: {remedy}")
    return found["runs"], [joined([Judged.read(file)], [name_of(*job_of(run)) for run in found["runs"]])]


def judge(folder: Path, runs: list[dict[str, Any]], images) -> Judged:
    """Classify the images of a split with the last weights of each run, not with the EMA weights."""
    device = torch.device(default_device())
    torch.backends.cudnn.allow_tf32 = False  # as in research/train.py
    models = []
    for run in runs:
        path = folder / name_of(run["model"], run["seed"])
        saved = saved_config(path)
        models.append(load_model(run["model"], str(path / "last.pt"), **model_arguments(saved)).to(device).eval())
    chosen = {name: saved[name] for name in ("img_size", "crop_pct", "interpolation")}
    data_config = resolve_data_config(chosen, model=models[0])
    share_cores(device, saved["workers"])
    loader = evaluation_loader(images, data_config, device, saved["workers"], EVALUATED_AT_ONCE, 0, 1)
    predictions = PredictionCollector(len(models), models[0].num_classes, device)
    precision = autocast(device, saved["amp"], saved["amp_dtype"])
    Evaluator(models, data_config["input_size"], device, precision, EVALUATED_AT_ONCE)(loader, predictions)
    targets_N, best_NMK, _ = predictions.gather()
    files = [images.filename(i) for i in range(len(images))]
    return Judged(targets_N, best_NMK[..., 0], files, [name_of(*job_of(run)) for run in runs])


def epoch_seconds(runs: list[dict[str, Any]]) -> float:
    """Return the median seconds per training epoch over a model's runs, because other jobs may slow some runs."""
    return median(run["epoch_seconds"] for run in runs)


def top1_by_seed(runs: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the top-1 by model and seed, with the models in the order of `runs`."""
    models = dict.fromkeys(run["model"] for run in runs)
    return {model: {run["seed"]: run["top1"] for run in runs if run["model"] == model} for model in models}


def report(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table of each model's top-1 over seeds, and of its differences to the first model."""
    top1 = top1_by_seed(runs)
    first = next(iter(top1), "")
    difference = f"{first} minus this model (95% interval), paired by seed"
    table = [
        ["model", "parameters", "top-1 %, mean ± deviation", "seeds", "s per epoch", difference, "unpaired (Welch)"]
    ]
    for model, by_seed in top1.items():
        own = [run for run in runs if run["model"] == model]
        found = [test(top1[first], by_seed) if model != first else None for test in (paired, welch)]
        row = [model, f"{own[0]['parameters']:,}", spread(by_seed.values()), listed(by_seed.values())]
        differences = [f"{gap}, p = {gap.p_value:.2g}" if gap else "" for gap in found]
        table.append([*row, f"{epoch_seconds(own):.2f}", *differences])
    return markdown_table(table)


def plot(runs: list[dict[str, Any]]) -> bytes:
    """Plot the validation accuracy by epoch and by training time (epochs times `epoch_seconds`) as a PNG file."""
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
    """Return the versions and hardware of this machine."""
    return dict(
        commit=git_commit(), torch=torch.__version__, processor=processor(), cores=os.cpu_count(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )  # fmt: skip


def processor(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the first CPU in a cpuinfo file, or platform.processor() if the file names no model."""
    text = cpu_info.read_text() if cpu_info.exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
