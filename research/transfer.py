"""The worth of pre-trained weights where real images are few: scikit-learn's digits, 20 and 5 a class to learn from.

    python -m research.transfer --weights weights/vil_tiny_fractals.safetensors --jobs 7 --out output/transfer.json

A model of full size at 224 pixels is trained from scratch and fine-tuned from the weights, by `train_imagenet.py`, with
one budget and recipe (research/configs/transfer.yaml): they differ in the start alone. The top-1 of the weights'
average after the last epoch counts. Beside that a logistic regression reads frozen features, the pooled class token:
of the weights, of random ones, and, in place of features, the 64 pixels; a support vector machine with an RBF kernel
reads the pixels as well.

A seed draws the training images, and decides the initial weights and the order and augmentation of the images. The 450
images that are reported on are always the same. Nothing is chosen on them: the learning rate, and the penalty of the
regression, are those with the best mean over seeds that are not reported, on training images that were held out for it;
every way has a list of its own length to choose from, RATES or PENALTIES. The ways are compared by the paired t-test
over the seeds.

Runs that are done are in the JSON file, and a second call goes on with the others, also where a list of settings has
grown; what a call that was stopped has left without a comparison is not reported. Options that are not known here go to
`train_imagenet.py`, such as --device cpu.
"""

from __future__ import annotations

import argparse
import functools
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
from vil.config import Config, load_config
from vil.data.digits import picture, split_digits, write_digits
from vil.data.seeds import seed_everything
from vil.data.workers import SHARED_MEMORY
from vil.devices import known_device
from vil.evaluation.comparison import markdown_table
from vil.factory import create_model
from vil.files import write_atomically
from vil.processes import end_with_parent, join_processes

sys.path.insert(0, str(ROOT))
from train_imagenet import DivergenceError, Trainer

SCRATCH, FINE_TUNED = "from scratch", "fine-tuned"
PROBE, PROBE_OF_RANDOM, PROBE_OF_PIXELS = "linear, features", "linear, features of random weights", "linear, pixels"
KERNEL_MACHINE = "RBF kernel, pixels"
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # learning rates
PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)  # C of the classifiers: the larger, the weaker the penalty
SETTINGS = dict.fromkeys((SCRATCH, FINE_TUNED), RATES)
SETTINGS |= dict.fromkeys((PROBE, PROBE_OF_RANDOM, PROBE_OF_PIXELS, KERNEL_MACHINE), PENALTIES)
COMPARED = ((FINE_TUNED, SCRATCH), (PROBE, PROBE_OF_RANDOM), (PROBE, PROBE_OF_PIXELS))
CHOICE_SEEDS = (100, 101)  # on which settings are chosen, and nothing is reported
EPOCH = 800  # training files: copies of the few images
RUN_BYTES = 2**29  # of a run's three checkpoints, with room to spare
AT_ONCE = 128  # images whose features are computed together


class Run(NamedTuple):
    """One result: a way of learning with its setting, the images a class, and whether it is to choose the setting."""

    way: str
    per_class: int
    setting: float
    seed: int
    rehearse: bool

    def __str__(self) -> str:
        suffix = " (to choose)" * self.rehearse
        return f"{self.way}, {self.per_class} a class, {self.setting:g}, seed {self.seed}{suffix}"


class Results:
    """The rows of runs that are done, in a JSON file as well if there is one, which says what machine each call had.

    Args:
        path: The JSON file.
        about: What all runs of a file have in common.
        machine: Of this call.
        settings: To choose from, by way; the list may be another than that of earlier calls.

    Raises:
        SystemExit: The file is of other weights, another recipe, other options or an earlier version.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], machine: dict[str, Any], settings: dict[str, Any]):
        self.path, self.about, self.rows = path, json.loads(json.dumps(about)), []
        self.settings = settings
        self.earlier_calls, self.machine, self.start = [], machine, time.monotonic()
        if path and path.exists():
            found = json.loads(path.read_text())
            if differing := [name for name in self.about if found.get(name) != self.about[name]]:
                sys.exit(f"error: {path} has results of another {', '.join(differing)}: give --out another file")
            if "calls" not in found:
                sys.exit(f"error: {path} does not say what machine it is of (an earlier version): give --out another")
            self.rows, self.earlier_calls = found["runs"], found["calls"]
        self.found = len(self.rows)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Machine, commit, seconds and number of runs of the calls that have trained or fitted something, in order."""
        runs, seconds = len(self.rows) - self.found, round(time.monotonic() - self.start)
        return [*self.earlier_calls, *([dict(self.machine, runs=runs, seconds=seconds)] if runs else [])]

    @property
    def seconds(self) -> float:
        """That these calls together took."""
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
    parser.add_argument("--weights", type=Path, required=True, help="of the pre-trained model")
    parser.add_argument("-c", "--config", type=Path, default=ROOT / "research" / "configs" / "transfer.yaml")
    parser.add_argument("--per-class", type=int, nargs="+", default=[20, 5], help="training images (default: 20 5)")
    parser.add_argument("--seeds", type=int, default=5, help="how many are reported, from 0 (default: 5)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="JSON of all runs; what it has is not done again")
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
    """Does what is missing of a study: the runs that settings are chosen on, and then those that are reported."""
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
    """Adds the outcomes that are not there yet, of training, behind `prepare`, or of a `probe`: the way's name says."""
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
    """For checkpoints that nobody reads: memory, if there is enough of it."""
    fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * jobs * RUN_BYTES
    return str(SHARED_MEMORY) if fits else None


def processes(jobs: int) -> AbstractContextManager[Executor | None]:
    """Where runs are trained beside each other; None where it is one at a time, which this process can do."""
    if jobs == 1:
        return nullcontext()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each
    context = multiprocessing.get_context("spawn")
    gpus = context.Queue()
    for gpu, _ in zip(cycle(visible_gpus() or [""]), range(jobs)):
        gpus.put(gpu)
    return ProcessPoolExecutor(jobs, context, initializer=begin_process, initargs=(gpus,))


def begin_process(gpus: Queue[str]) -> None:
    """Takes one of the GPUs for this process, and keeps quiet."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()
    # a process that was spawned would spawn its loaders' workers, one after the other, for ten seconds each
    multiprocessing.set_start_method(None, force=True)
    end_with_parent(signal.SIGKILL)  # a run that is asked to stop would end, and its process wait for the next
    logging.disable(logging.WARNING)


def outcomes(pool: Executor | None, function: Callable[[Run], dict], runs: Sequence[Run]) -> Iterator[tuple[Run, dict]]:
    """Each run with its outcome, as they are done."""
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
    """The images of a run, which others of its seed share."""
    path, copies = images_of(folder, run), max(1, EPOCH // (10 * run.per_class))
    if not path.exists():
        with redirect_stdout(io.StringIO()):
            write_digits(path, run.per_class, seed=run.seed, rehearse=run.rehearse, copies=copies)


def train(words: list[str], weights: str, folder: str, run: Run) -> dict[str, Any]:
    """The outcome of one run of train_imagenet.py; a loss that is not finite counts as 0%."""
    start = ["--pretrained-path", weights] if run.way == FINE_TUNED else []
    return train_on(images_of(folder, run), [*words, *start], folder, run)


def train_on(images: Path, words: list[str], folder: str, run: Any) -> dict[str, Any]:
    """Train a run of any study on a folder of images and return its outcome; `words` specify the initial weights."""
    words = [*words, "--data-dir", str(images), "--output", folder, "--experiment", "-".join(map(str, run))]
    words += ["--lr", str(run.setting), "--seed", str(run.seed)]
    config, start = load_config("", words), time.monotonic()
    with redirect_stdout(io.StringIO()):
        trainer = Trainer(config, *join_processes(known_device(config.device)))
        try:
            trainer.run()
        except DivergenceError as error:
            return dict(top1=0.0, error=str(error))
        finally:
            shutil.rmtree(trainer.folder)
    last = trainer.history[-1]
    return dict(
        top1=last["eval_top1_ema"], loss=last["eval_loss_ema"], train_loss=last["train_loss"], updates=trainer.steps,
        seconds=round(time.monotonic() - start, 1), plan=trainer.setup,
    )  # fmt: skip


class Features:
    """Features of all digits, (1797, C), for each way of `classify`.

    Args:
        config: The options of the runs, for the model and what is done to an image before it.
        weights: File of the pre-trained model.
        device: Where the model runs.
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
        """(B, 3, H, W) uint8, as they are evaluated on."""
        if not hasattr(self, "prepared"):
            names = ("input_size", "crop_pct", "crop_mode", "interpolation")
            transform = create_transform(**{name: data_config[name] for name in names}, use_prefetcher=True)
            images = [transform(picture(pixels).convert("RGB")) for pixels in self.digits.images]
            self.prepared = torch.stack([torch.as_tensor(image) for image in images])
        return iter(self.prepared.split(AT_ONCE))


def frozen(name: str, weights: str | None, seed: int, device: torch.device, **arguments: Any) -> Any:
    """A model without a head, to read features of; its weights are random without a file."""
    seed_everything(seed)
    model: Any = create_model(name, weights, num_classes=10, **arguments)
    model.reset_classifier(0)
    return model.to(device).eval()


def regression(penalty: float) -> Pipeline:
    """A classifier of features; the larger C = `penalty` is, the weaker it is."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=5000))


def classify(features: Features, run: Run) -> dict[str, Any]:
    """The top-1 of a logistic regression, or a support vector machine, on features of the run's training images."""
    found, classes = features(run.way, run.seed), features.digits.target
    train_N, validation_N = split_digits(classes, run.per_class, run.seed, run.rehearse)
    classifier = SVC(C=run.setting) if run.way == KERNEL_MACHINE else regression(run.setting)
    classifier.fit(found[train_N], classes[train_N])
    return dict(top1=100 * float(classifier.score(found[validation_N], classes[validation_N])))


def chosen(rows: Iterable[dict[str, Any]], way: str, per_class: int) -> float:
    """The setting with the best mean over the seeds to choose on, the least of several that are equal."""
    rows = [row for row in rows if row["rehearse"] and (row["way"], row["per_class"]) == (way, per_class)]
    tried = sorted({row["setting"] for row in rows})
    return max(tried, key=lambda setting: mean(row["top1"] for row in rows if row["setting"] == setting))


def by_seed(rows: Sequence[dict[str, Any]], way: str, per_class: int) -> dict[int, float]:
    """The top-1 of the reported runs at the chosen setting."""
    run = (way, per_class, chosen(rows, way, per_class), False)
    own = [row for row in rows if (row["way"], row["per_class"], row["setting"], row["rehearse"]) == run]
    return {row["seed"]: row["top1"] for row in sorted(own, key=lambda row: row["seed"])}


def complete(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, dict[int, float]]]:
    """The top-1 by images a class, way and seed, of seeds that all ways have: a call that was stopped leaves others."""
    found, ways = {}, dict.fromkeys(row["way"] for row in rows)
    for per_class in dict.fromkeys(row["per_class"] for row in rows if not row["rehearse"]):
        of_ways = {way: by_seed(rows, way, per_class) for way in ways}
        if seeds := set.intersection(*map(set, of_ways.values())):
            found[per_class] = {way: {s: own[s] for s in own if s in seeds} for way, own in of_ways.items()}
    return found


def ways_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: mean and deviation of every way over the `complete` seeds."""
    table = [["images a class", "way", "learning rate or C", "top-1 %, mean ± deviation", "seeds"]]
    for per_class, ways in complete(rows).items():
        for way, own in ways.items():
            setting = f"{chosen(rows, way, per_class):g}"
            table.append([str(per_class or "all"), way, setting, spread(own.values()), listed(own.values())])
    return markdown_table(table)


def differences_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: the differences of the ways that are compared, over the `complete` seeds."""
    pairs = [(n, ways, *pair) for n, ways in complete(rows).items() for pair in COMPARED]
    return tested([(n, first, second, paired(ways[first], ways[second])) for n, ways, first, second in pairs])


def tested(found: Sequence[tuple[int, str, str, Difference | None]]) -> str:
    """Markdown: images a class, two ways and their difference, where there are seeds enough for one."""
    found = [row for row in found if row[-1]]
    table = [["images a class", "first", "less", "points (95% interval)", "p", "p (Holm)"]]
    for (n, first, second, gap), corrected in zip(found, holm([gap.p_value for *_, gap in found])):
        table.append([str(n or "all"), first, second, str(gap), f"{gap.p_value:.2g}", f"{corrected:.2g}"])
    return markdown_table(table)


if __name__ == "__main__":
    main()
