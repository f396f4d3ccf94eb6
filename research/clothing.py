"""Fine-tune pre-trained weights on photographs of ten classes of clothing, compared with training from scratch.

    python -m research.clothing --data-dir data/clothing --jobs 2 --out output/clothing.json \\
        --weights weights/vil_tiny_photographs.safetensors data/vil_tiny_fractals.safetensors

The training set has 3,068 images, or 20 images per class. `vil_tiny` is trained at 224 pixels with
research/configs/finetune.yaml, from scratch and from each weights file. As a comparison, a logistic regression is
fitted to frozen features of the same weights, and of random weights. For each method and number of images, the learning
rate or the penalty of the regression is selected on the split `validation` with a seed that is not reported. The
reported accuracy is the top-1 on the split `test`, on which nothing is selected; trained models are evaluated with the
EMA weights after the last epoch. A seed determines the initial weights, the order of the images and, with 20 images per
class, the sample of images. The protocol is in research/transfer.md.

Finished runs are stored in the JSON file, and a second call continues with the other runs. Unknown options are treated
as options of `train_imagenet.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from timm.data import create_transform, resolve_model_data_config
from torch.utils.data import DataLoader

from research import transfer
from research.compare import paired, welch
from research.seeds import ROOT, digest_of, machine
from research.transfer import AT_ONCE, RATES, SCRATCH, Results, Run
from vil.config import load_config
from vil.data.sources.splits import open_split
from vil.devices import known_device

CONFIG = ROOT / "research" / "configs" / "finetune.yaml"
PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)  # C of the logistic regression; larger values are weaker penalties
EPOCHS = {0: 20, 20: 100}  # numbers of epochs by training images per class; the key 0 means all images
CHOICE_SEED = 100
RANDOM = "random"


def ways(names: Sequence[str]) -> dict[str, Sequence[float]]:
    """Return the compared methods with the learning rates or regression penalties that each method tries."""
    trained = [SCRATCH, *map(fine_tuned, names)]
    return dict.fromkeys(trained, RATES) | dict.fromkeys([*map(linear, names), linear(RANDOM)], PENALTIES)


def fine_tuned(name: str) -> str:
    return f"fine-tuned, {name}"


def linear(name: str) -> str:
    return f"linear, {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of the splits train, validation and test")
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="files of pre-trained weights")
    parser.add_argument("--per-class", type=int, nargs="+", choices=EPOCHS, default=[*EPOCHS], help="0: all")
    parser.add_argument("--seeds", type=int, default=5, help="number of reported seeds, from 0 (default: 5)")
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous runs")
    parser.add_argument("--out", type=Path, help="JSON file of all runs; existing runs are kept")
    options, training_options = parser.parse_known_args()
    words = ["-c", str(CONFIG), "--model", "vil_tiny", *training_options]
    device = known_device(load_config("", words).device)
    files = {path.stem: path.resolve() for path in options.weights}
    about = {
        "sha256 of the weights": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()},
        "images": [digest_of(open_split(str(options.data_dir), "", name)) for name in ("train", "validation", "test")],
        "config": yaml.safe_load(CONFIG.read_text()), "options": training_options, "epochs": EPOCHS,
        "choice_seed": CHOICE_SEED,
    }  # fmt: skip
    results = Results(options.out, about, dict(machine(), jobs=options.jobs), ways([*files]))
    with TemporaryDirectory(dir=transfer.fast_folder(options.jobs)) as folder, transfer.processes(options.jobs) as pool:
        training = partial(train, words, files, folder)
        probe = Probe(options.data_dir, files, device)
        prepare = partial(write_images, options.data_dir, folder)
        transfer.do_all(options, [CHOICE_SEED], results, pool, prepare, training, probe)
    print(f"{results.seconds:.0f} s\n\n{transfer.ways_table(results.rows)}\n{differences_table(results.rows)}")


def drawn(files: Sequence[Path], run: Run) -> list[Path]:
    """Return the training images of one class: a random sample that depends on the run's seed, or all images."""
    return random.Random(run.seed).sample(sorted(files), run.per_class) if run.per_class else sorted(files)


def write_images(data: Path, runs: str, run: Run) -> None:
    """Write the images of a run. Runs that differ only in method and learning rate share the images."""
    folder = transfer.images_of(runs, run)
    if folder.exists():
        return
    for split in ("train", "validation" if run.rehearse else "test"):
        for kind in sorted((data / split).iterdir()):
            (folder / split / kind.name).mkdir(parents=True)
            for file in drawn([*kind.iterdir()], run) if split == "train" else kind.iterdir():
                (folder / split / kind.name / file.name).write_bytes(file.read_bytes())


def train(words: list[str], files: dict[str, Path], folder: str, run: Run) -> dict[str, Any]:
    """Train a run as train_imagenet.py does, and return the accuracy, losses and duration."""
    start = {fine_tuned(name): ["--pretrained-path", str(path)] for name, path in files.items()}.get(run.way, [])
    split = "validation" if run.rehearse else "test"
    words = [*words, *start, "--epochs", str(EPOCHS[run.per_class]), "--val-split", split]
    return transfer.train_on(transfer.images_of(folder, run), words, folder, run)


class Probe:
    """Callable that returns the top-1 of a logistic regression on features of frozen weights.

    Args:
        data: Folder of the three splits.
        files: Files of the weights, by name.
        device: Device of the model.
    """

    def __init__(self, data: Path, files: dict[str, Path], device: str):
        self.data, self.files, self.device = data, files, torch.device(device)
        self.features = cache(self._features)

    def __call__(self, run: Run) -> dict[str, Any]:
        found = self.features(run.way, run.seed if run.way == linear(RANDOM) else 0)
        kinds = sorted({path.parent.name for path in found})
        train = [p for k in kinds for p in drawn([p for p in found if p.parts[-3:-1] == ("train", k)], run)]
        judged = [path for path in found if path.parts[-3] == ("validation" if run.rehearse else "test")]
        classifier = transfer.regression(run.setting)
        classifier.fit(np.stack([found[path] for path in train]), [path.parent.name for path in train])
        score = classifier.score(np.stack([found[path] for path in judged]), [path.parent.name for path in judged])
        return dict(top1=100 * float(score))

    @torch.inference_mode()
    def _features(self, way: str, seed: int) -> dict[Path, np.ndarray]:
        """Return a dict from each image's path to the pooled class token (C,) of the image."""
        weights = {linear(name): str(path) for name, path in self.files.items()}.get(way)
        model = transfer.frozen("vil_tiny", weights, seed, self.device, img_size=224)
        transform, found = create_transform(**resolve_model_data_config(model)), {}
        for split in ("train", "validation", "test"):
            images = open_split(str(self.data), "", split)
            images.transform = transform
            batches = DataLoader(images, AT_ONCE, num_workers=min(8, os.cpu_count() or 1))
            features = torch.cat([model(batch.to(self.device)).cpu() for batch, _ in batches]).numpy()
            found |= {Path(split, images.filename(i)): features[i] for i in range(len(images))}
        return found


def differences_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table that compares fine-tuning from the first file of `--weights` with the other methods.

    The other methods are training from scratch, fine-tuning from the other files, and a regression on frozen features
    of the first file. With 20 images per class, the paired t-test is used, because all methods use the images that the
    seed samples. With all images, Welch's t-test is used.
    """
    found = []
    for per_class, own in transfer.complete(rows).items():
        first, *others = [way for way in own if way.startswith(fine_tuned(""))]
        frozen, test = linear(first.removeprefix(fine_tuned(""))), paired if per_class else welch
        found += [(per_class, first, way, test(own[first], own[way])) for way in (SCRATCH, *others, frozen)]
    return transfer.tested(found)


if __name__ == "__main__":
    main()
