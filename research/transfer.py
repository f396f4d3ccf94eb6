"""Fine-tune pre-trained weights on scikit-learn's digits, with 20 or 5 training images per class.

    python -m research.transfer --weights data/vil_tiny_fractals.safetensors --jobs 7 --out output/transfer.json

A full-size model at 224 pixels is trained from scratch and fine-tuned from the weights, as by `train_imagenet.py`, with
one budget and recipe (research/configs/transfer.yaml), so that the runs differ only in the initial weights. The result
is the top-1 of the EMA weights after the last epoch. As a comparison, a logistic regression is fitted to frozen
features (the pooled class token) of the weights, to features of random weights, and to the 64 pixels; a support vector
machine with an RBF kernel is fitted to the pixels.

A seed samples the training images and determines the initial weights, the order and the augmentation of the images. The
same 450 images are used for all reported accuracies, and nothing is selected on these images. The learning rate of each
method, or the penalty of its classifier, has the best mean accuracy on held-out training images over seeds that are not
reported. The methods are compared by the paired t-test over the seeds.

Finished runs are stored in the JSON file, and a second call continues with the other runs, also if RATES or PENALTIES
have new values. The tables include only seeds that all methods have finished. Unknown options such as --device cpu are
treated as options of `train_imagenet.py`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from itertools import cycle
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from timm.data import create_transform, resolve_data_config

from research.compare import Difference, holm, listed, paired, spread
from research.seeds import ROOT, machine, visible_gpus
from vil.checkpoint import Checkpoint
from vil.config import Config, load_config
from vil.data.digits import picture, split_digits, write_digits
from vil.data.host.workers import SHARED_MEMORY
from vil.data.seeds import seed_everything
from vil.devices import known_device
from vil.distributed import init_process_group
from vil.evaluation.markdown import markdown_table
from vil.evaluation.models import build
from vil.evaluation.settings import EvaluationSettings, ModelOptions, resolve_data, resolve_model
from vil.evaluation.validation import validate
from vil.factory import create_model
from vil.fault_tolerance.files import write_atomically
from vil.fault_tolerance.locks import FolderInUseError, FolderLock
from vil.fault_tolerance.parents import terminate_with_parent

sys.path.insert(0, str(ROOT))
from vil.training.divergence import DivergenceError
from vil.training.trainer import Trainer

SCRATCH, FINE_TUNED = "from scratch", "fine-tuned"
PROBE, PROBE_OF_RANDOM, PROBE_OF_PIXELS = "linear, features", "linear, features of random weights", "linear, pixels"
KERNEL_MACHINE = "RBF kernel, pixels"
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # learning rates from which the best is selected
PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)  # C of the classifiers; larger values are weaker penalties
SETTINGS = dict.fromkeys((SCRATCH, FINE_TUNED), RATES)
SETTINGS |= dict.fromkeys((PROBE, PROBE_OF_RANDOM, PROBE_OF_PIXELS, KERNEL_MACHINE), PENALTIES)
COMPARED = ((FINE_TUNED, SCRATCH), (PROBE, PROBE_OF_RANDOM), (PROBE, PROBE_OF_PIXELS))
CHOICE_SEEDS = (100, 101)  # seeds used only to select learning rates and penalties
EPOCH = 800  # number of image files per epoch; each training image is copied several times
RUN_BYTES = 2**29  # maximum size in bytes of a run's three checkpoints
AT_ONCE = 128  # batch size of the feature extraction and of the evaluation on a test split


class Run(NamedTuple):
    """Settings that identify a run: method, images per class, learning rate or penalty, and seed.

    `rehearse` is True if the run serves to select the learning rate or penalty.
    """

    way: str
    per_class: int
    setting: float
    seed: int
    rehearse: bool

    def __str__(self) -> str:
        suffix = " (to choose)" * self.rehearse
        return f"{self.way}, {self.per_class} a class, {self.setting:g}, seed {self.seed}{suffix}"


class Results:
    """Settings and accuracies of the finished runs, stored in a JSON file if a path is given.

    Args:
        path: Path of the JSON file.
        about: Values that all runs of a file have in common.
        machine: Machine of this call.
        settings: Learning rates or penalties to select from, by method. Earlier calls may have had other values.

    Raises:
        SystemExit: The file has other weights, another recipe, other options, is of an earlier version, or is used by
            another process.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], machine: dict[str, Any], settings: dict[str, Any]):
        self.path, self.about, self.rows = path, json.loads(json.dumps(about)), []
        self.settings = settings
        self.earlier_calls, self.machine, self.start = [], machine, time.monotonic()
        if path:
            try:
                self.lock = FolderLock(path.with_suffix(".lock"))
            except FolderInUseError:
                sys.exit(f"error: another process writes {path}: wait until it has ended, or choose another --out")
        if path and path.exists():
            found = json.loads(path.read_text())
            if differing := [name for name in self.about if found.get(name) != self.about[name]]:
                sys.exit(f"error: {', '.join(differing)} must match the results in {path}: choose another --out")
            if "calls" not in found:
                sys.exit(f"error: {path} of an earlier version does not store its machine: choose another --out")
            self.rows, self.earlier_calls = found["runs"], found["calls"]
        self.found = len(self.rows)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Machine, commit, number of runs and seconds of each call of the program that finished at least one run."""
        runs, seconds = len(self.rows) - self.found, round(time.monotonic() - self.start)
        return [*self.earlier_calls, *([dict(self.machine, runs=runs, seconds=seconds)] if runs else [])]

    @property
    def seconds(self) -> float:
        """Total duration in seconds of all calls of the program in which at least one run was finished."""
        return sum(call["seconds"] for call in self.calls)

    def __contains__(self, run: Any) -> bool:
        return any(all(row[name] == value for name, value in run._asdict().items()) for row in self.rows)

    def add(self, run: Any, outcome: dict[str, Any]) -> None:
        self.rows.append({**run._asdict(), **outcome})
        print(f"{len(self.rows)}. {run}: {outcome['top1']:.2f}", flush=True)

    def write(self) -> None:
        if self.path:
            content = {"calls": self.calls, **self.about, "settings": self.settings, "runs": self.rows}
            write_atomically(self.path, json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="file with the pre-trained weights")
    parser.add_argument("-c", "--config", type=Path, default=ROOT / "research" / "configs" / "transfer.yaml")
    parser.add_argument(
        "--per-class",
        type=int,
        nargs="+",
        default=[20, 5],
        help="numbers of training images of each class (default: 20 5)",
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of reported seeds, counted from 0 (default: 5)")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs")
    parser.add_argument("--out", type=Path, help="JSON file of all runs; its runs are not repeated")
    options, training_options = parser.parse_known_args()
    words = ["-c", str(options.config), *training_options]
    config = load_config("", words)
    device = known_device(config.device)
    about = {
        "sha256 of the weights": hashlib.sha256(options.weights.read_bytes()).hexdigest(),
        "config": yaml.safe_load(options.config.read_text()),
        "options": training_options,
        "choice_seeds": CHOICE_SEEDS,
    }
    results = Results(options.out, about, dict(machine(), jobs=options.jobs), SETTINGS)
    with TemporaryDirectory(dir=fast_folder(options.jobs)) as folder, processes(options.jobs) as pool:
        probe = functools.partial(classify, Features(config, str(options.weights), device))
        training = functools.partial(train, words, str(options.weights.resolve()), folder)
        do_all(options, CHOICE_SEEDS, results, pool, functools.partial(write_images, folder), training, probe)
    print(f"{results.seconds:.0f} s\n\n{ways_table(results.rows)}\n{differences_table(results.rows)}")


def do_all(
    options: argparse.Namespace, choice_seeds: Iterable[int], results: Results, pool: Executor | None,
    prepare: Callable[[Run], None], training: Callable[[Run], dict], probe: Callable[[Run], dict],
) -> None:  # fmt: skip
    """Train or fit the missing runs, first those that select learning rates and penalties, then the reported runs."""
    for seeds, rehearse in ((choice_seeds, True), (range(options.seeds), False)):
        runs = [
            Run(way, per_class, setting, seed, rehearse)
            for per_class in options.per_class
            for seed in seeds
            for way, settings in results.settings.items()
            for setting in (settings if rehearse else [chosen(results.rows, way, per_class)])
        ]
        do_missing(runs, results, pool, prepare, training, probe)


def do_missing(
    runs: Sequence[Run], results: Results, pool: Executor | None, prepare: Callable[[Run], None],
    training: Callable[[Run], dict], probe: Callable[[Run], dict],
) -> None:  # fmt: skip
    """Run those of `runs` that `results` does not contain, and add their outcomes to `results`.

    Methods that train the model call `prepare` and then `training`, in parallel processes if `pool` is given. Other
    methods call `probe`.
    """
    missing = [run for run in runs if run not in results]
    trained = [run for run in missing if run.way.startswith((SCRATCH, FINE_TUNED))]
    for run in trained:
        prepare(run)
    for run, outcome in outcomes(pool, training, trained):
        results.add(run, outcome)
        results.write()
    for run in missing:
        if run not in trained:
            results.add(run, probe(run))
    results.write()


def fast_folder(jobs: int) -> str | None:
    """Return the shared-memory folder for temporary checkpoints if it has enough space, otherwise None."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * jobs * RUN_BYTES
    return str(SHARED_MEMORY) if fits else None


def processes(jobs: int) -> AbstractContextManager[Executor | None]:
    """Open a process pool for parallel runs. With one job, the pool is None, because this process does all runs."""
    if jobs == 1:
        return nullcontext()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker process uses one CPU thread
    context = multiprocessing.get_context("spawn")
    gpus = context.Queue()
    for gpu, _ in zip(cycle(visible_gpus() or [""]), range(jobs)):
        gpus.put(gpu)
    return ProcessPoolExecutor(jobs, context, initializer=begin_process, initargs=(gpus,))


def begin_process(gpus: Queue[str]) -> None:
    """Initialize a worker process: assign it one of the GPUs, and disable log messages up to warnings."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()
    # With the inherited start method "spawn", each of a loader's workers would import PyTorch again.
    multiprocessing.set_start_method(None, force=True)
    # Use SIGKILL, because the trainer handles SIGTERM by ending only the current run.
    terminate_with_parent(signal.SIGKILL)
    logging.disable(logging.WARNING)


def outcomes(pool: Executor | None, function: Callable[[Run], dict], runs: Sequence[Run]) -> Iterator[tuple[Run, dict]]:
    """Call a function for each run, in parallel if `pool` is given, and yield runs and results as they complete."""
    if not pool:
        yield from ((run, function(run)) for run in runs)
        return
    futures = {pool.submit(function, run): run for run in runs}
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()


def images_of(folder: str, run: Run) -> Path:
    return Path(folder) / f"images-{run.per_class}-{run.seed}-{run.rehearse}"


def write_images(folder: str, run: Run) -> None:
    """Write the images of a run. Runs that differ only in method and learning rate share the images."""
    path, copies = images_of(folder, run), max(1, EPOCH // (10 * run.per_class))
    if not path.exists():
        with redirect_stdout(io.StringIO()):
            write_digits(path, run.per_class, seed=run.seed, rehearse=run.rehearse, copies=copies)


def train(words: list[str], weights: str, folder: str, run: Run) -> dict[str, Any]:
    """Train a run as train_imagenet.py does, and return the accuracy, losses and duration."""
    start = ["--pretrained-path", weights] if run.way == FINE_TUNED else []
    return train_on(images_of(folder, run), [*words, *start], folder, run)


def train_on(images: Path, words: list[str], folder: str, run: Any, test_split: str = "") -> dict[str, Any]:
    """Train a run on a folder of images, with the command-line options `words`, and return a dict of results.

    `top1` is the accuracy of the EMA weights after the last epoch, and `top1_by_epoch` has their accuracy after each
    epoch, all on the validation split. If `test_split` is given, `top1` and `loss` are those of the test split, which
    is evaluated only after the last epoch. A diverged run has an accuracy of 0%, and `top1_by_epoch` has the accuracy
    after each epoch that was finished before the divergence.
    """
    words = [*words, "--data-dir", str(images), "--output", folder, "--experiment", "-".join(map(str, run))]
    words += ["--lr", str(run.setting), "--seed", str(run.seed)]
    config, start = load_config("", words), time.monotonic()
    gc.collect()  # free the CUDA graphs of the previous run, of which forked loader processes would also free copies
    with redirect_stdout(io.StringIO()):
        trainer = Trainer(config, *init_process_group(known_device(config.device)))
        try:
            trainer.run()
            last = trainer.state.history[-1]
            outcome = dict(top1=last["eval_top1_ema"], loss=last["eval_loss_ema"], train_loss=last["train_loss"])
            outcome |= dict(updates=trainer.steps)
            if test_split:
                outcome |= evaluate(trainer.run_info.folder / "last.pt", test_split, trainer.device)
        except DivergenceError as error:
            outcome = dict(top1=0.0, error=str(error))
        finally:
            shutil.rmtree(trainer.run_info.folder)
    top1_by_epoch = [round(epoch["eval_top1_ema"], 2) for epoch in trainer.state.history]
    seconds = round(time.monotonic() - start, 1)
    return outcome | dict(seconds=seconds, plan=trainer.setup, top1_by_epoch=top1_by_epoch)


def evaluate(checkpoint: Path, split: str, device: torch.device) -> dict[str, float]:
    """Return top-1 and loss of a checkpoint's EMA weights on a split of the run's images."""
    source = Checkpoint(checkpoint)
    model = build(resolve_model(ModelOptions(checkpoint=str(checkpoint), use_ema=True), source), device)
    settings = EvaluationSettings(AT_ONCE, source.options["workers"], True, None, False)
    (result,) = validate([model], resolve_data(None, None, split, source), settings, device, 0, 1).results
    return dict(top1=result.top1, loss=result.loss)


class Features:
    """Callable that returns the features (1797, C) that a method extracts from all 1797 digits.

    Args:
        config: Options of the runs, for the model and the preprocessing.
        weights: File of the pre-trained model.
        device: Device of the model.
    """

    def __init__(self, config: Config, weights: str, device: str):
        self.config, self.weights, self.device = config, weights, torch.device(device)
        self.digits, self.known = load_digits(), {}

    def __call__(self, way: str, seed: int) -> np.ndarray:
        if way in (PROBE_OF_PIXELS, KERNEL_MACHINE):
            return self.digits.data
        key = (way, seed if way == PROBE_OF_RANDOM else None)
        if key not in self.known:
            self.known[key] = self._of_model(self.weights if way == PROBE else None, seed)
        return self.known[key]

    @torch.inference_mode()
    def _of_model(self, weights: str | None, seed: int) -> np.ndarray:
        size = {"img_size": self.config.img_size} if self.config.img_size else {}
        model = frozen(self.config.model, weights, seed, self.device, **size, **self.config.model_kwargs)
        data_config = resolve_data_config({**size, "crop_pct": self.config.crop_pct}, model=model)
        mean, std = (torch.tensor(data_config[name], device=self.device).view(-1, 1, 1) for name in ("mean", "std"))
        parts = [model((images.to(self.device) / 255 - mean) / std) for images in self._images(data_config)]
        return torch.cat(parts).cpu().numpy()

    def _images(self, data_config: dict[str, Any]) -> Iterator[torch.Tensor]:
        """Iterate over batches of images (B, 3, H, W) in uint8, resized and cropped as in evaluation."""
        if not hasattr(self, "prepared"):
            names = ("input_size", "crop_pct", "crop_mode", "interpolation")
            transform = create_transform(**{name: data_config[name] for name in names}, use_prefetcher=True)
            images = [transform(picture(pixels).convert("RGB")) for pixels in self.digits.images]
            self.prepared = torch.stack([torch.as_tensor(image) for image in images])
        return iter(self.prepared.split(AT_ONCE))


def frozen(name: str, weights: str | None, seed: int, device: torch.device, **arguments: Any) -> Any:
    """Return a model without a head for feature extraction, with random weights if no file is given."""
    seed_everything(seed)
    model: Any = create_model(name, weights, num_classes=10, **arguments)
    model.reset_classifier(0)
    return model.to(device).eval()


def regression(penalty: float) -> Pipeline:
    """Return a logistic regression on standardized features with scikit-learn's inverse penalty C = `penalty`."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=5000))


def classify(features: Features, run: Run) -> dict[str, Any]:
    """Fit a logistic regression or a support vector machine to features of the run's training images.

    Returns:
        Dict with the `top1` on the evaluation images, in percent.
    """
    found, classes = features(run.way, run.seed), features.digits.target
    train_N, validation_N = split_digits(classes, run.per_class, run.seed, run.rehearse)
    classifier = SVC(C=run.setting) if run.way == KERNEL_MACHINE else regression(run.setting)
    classifier.fit(found[train_N], classes[train_N])
    return dict(top1=100 * float(classifier.score(found[validation_N], classes[validation_N])))


def chosen(rows: Iterable[dict[str, Any]], way: str, per_class: int) -> float:
    """Return the learning rate or penalty with the best mean top-1 over CHOICE_SEEDS (the smallest on ties)."""
    rows = [row for row in rows if row["rehearse"] and (row["way"], row["per_class"]) == (way, per_class)]
    tried = sorted({row["setting"] for row in rows})
    return max(tried, key=lambda setting: mean(row["top1"] for row in rows if row["setting"] == setting))


def by_seed(rows: Sequence[dict[str, Any]], way: str, per_class: int) -> dict[int, float]:
    """Return {seed: top-1} of a method's reported runs, which use the selected learning rate or penalty."""
    run = (way, per_class, chosen(rows, way, per_class), False)
    own = [row for row in rows if (row["way"], row["per_class"], row["setting"], row["rehearse"]) == run]
    return {row["seed"]: row["top1"] for row in sorted(own, key=lambda row: row["seed"])}


def complete(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, dict[int, float]]]:
    """Return {images per class: {method: {seed: top-1}}}, only with the seeds that all methods have."""
    found, ways = {}, dict.fromkeys(row["way"] for row in rows)
    for per_class in dict.fromkeys(row["per_class"] for row in rows if not row["rehearse"]):
        of_ways = {way: by_seed(rows, way, per_class) for way in ways}
        if seeds := set.intersection(*map(set, of_ways.values())):
            found[per_class] = {way: {s: own[s] for s in own if s in seeds} for way, own in of_ways.items()}
    return found


def ways_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of each method's setting and top-1 (mean and deviation over the common seeds)."""
    table = [["images per class", "method", "learning rate or C", "top-1 %, mean ± deviation", "seeds"]]
    for per_class, ways in complete(rows).items():
        for way, own in ways.items():
            setting = f"{chosen(rows, way, per_class):g}"
            table.append([str(per_class or "all"), way, setting, spread(own.values()), listed(own.values())])
    return markdown_table(table)


def differences_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of paired t-tests between two methods, over the seeds that all methods have."""
    pairs = [(n, ways, *pair) for n, ways in complete(rows).items() for pair in COMPARED]
    return tested([(n, first, second, paired(ways[first], ways[second])) for n, ways, first, second in pairs])


def tested(found: Sequence[tuple[int, str, str, Difference | None]]) -> str:
    """Return a Markdown table of differences between two methods. Comparisons with too few seeds are left out."""
    found = [row for row in found if row[-1]]
    table = [["images per class", "method", "minus", "points (95% interval)", "p", "p (Holm)"]]
    for (n, first, second, gap), corrected in zip(found, holm([gap.p_value for *_, gap in found])):
        table.append([str(n or "all"), first, second, str(gap), f"{gap.p_value:.2g}", f"{corrected:.2g}"])
    return markdown_table(table)


if __name__ == "__main__":
    main()
