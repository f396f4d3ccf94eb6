"""Images a second that the training loaders deliver with ViM's recipe: timm's on the CPU, and the one on the device.

    python benchmarks/loader.py --workers 1 4 8 16
    python benchmarks/loader.py --paths device --stages
    python benchmarks/loader.py --workers 16 --model deit_tiny_patch16_224

Without --data-dir it writes 4,096 JPEGs of 500x375 pixels and about 75 KB to a temporary folder. The rate is that of
batches ready to train on, with random erasing and mixup. With --model it is that of training steps, for each path and
for one batch that stays on the device.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image, ImageFilter

import vil  # noqa: F401  registers the models
from vil.config import Config
from vil.data import batched_transforms, device_loader
from vil.data.augmentation import BatchAugmentation
from vil.data.encoded import collate_encoded, join_pieces
from vil.data.loaders import training_loader
from vil.data.samplers import TrainingBatches
from vil.data.splits import open_split
from vil.devices import default_device

DATA_CONFIG = dict(input_size=(3, 224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="folder with a training split")
    parser.add_argument("--paths", nargs="+", choices=["timm", "device"], default=["timm", "device"])
    parser.add_argument("--workers", nargs="+", type=int, default=[8])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", help="train this model on what is loaded")
    parser.add_argument("--stages", action="store_true", help="time the parts of the device path one by one")
    parser.add_argument("--device", type=torch.device, default=default_device())
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name(options.device) if options.device.type == "cuda" else "no GPU"
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}, timm {timm.__version__}"
    print(f"{os.cpu_count()} cores, {gpu}, {versions}, batch {options.batch_size}")
    with tempfile.TemporaryDirectory() as folder:
        if not options.data_dir:
            write_images(Path(folder), 4096)
        options.data_dir = options.data_dir or folder
        if options.stages:
            time_stages(options)
        else:
            time_loaders(options)


def write_images(root: Path, count: int) -> None:
    for name in map(str, range(8)):
        (root / "train" / name).mkdir(parents=True)
    with Pool() as pool:
        pool.starmap(_write_image, [(root / "train" / str(i % 8) / f"{i}.jpg", i) for i in range(count)])


def _write_image(path: Path, seed: int) -> None:
    picture(seed).save(path, quality=88)


def picture(seed: int) -> Image.Image:
    """Shapes and grain of 500x375 pixels, whose files are about as large as those of photos."""
    random_numbers = np.random.default_rng(seed)
    shapes = Image.fromarray(random_numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
    grain = Image.fromarray(random_numbers.integers(0, 256, (375, 500, 3), dtype=np.uint8))
    return Image.blend(shapes, grain.filter(ImageFilter.GaussianBlur(0.7)), 0.5)


def create_loader(options, path: str, workers: int):
    config = Config(
        data_dir=options.data_dir,
        global_batch_size=options.batch_size,
        workers=workers,
        augment_on_device=path == "device",
    )
    dataset = open_split(config.data_dir, "", "train", is_training=True)
    dataset.reader.samples *= 64  # an epoch that does not end while we measure
    batches = TrainingBatches(len(dataset), config, options.batch_size, rank=0, world_size=1)
    loader = training_loader(dataset, config, DATA_CONFIG, options.device, batches)
    return loader, BatchAugmentation(config, 1000, DATA_CONFIG)


def time_loaders(options) -> None:
    step, unit = no_step, "ready"
    if options.model:
        step, unit = training_step(options.model, options.device), f"trained with {options.model}"
        images = torch.randn(options.batch_size, *DATA_CONFIG["input_size"], device=options.device)
        batch = images, torch.rand(options.batch_size, 1000, device=options.device)
        print(f"one batch again and again: {rate(itertools.repeat(batch), 8, step, options):.0f} images/s", flush=True)
    print(f"| path | workers | images/s {unit} |\n| --- | --- | --- |")
    for path, workers in itertools.product(options.paths, options.workers):
        loader, augment = create_loader(options, path, workers)
        batches = (augment(*batch, 0, i * options.batch_size) for i, batch in enumerate(loader))
        # until then we get what the workers prepared while they started
        images_per_second = rate(batches, 2 * workers + 1, step, options)
        print(f"| {path} | {workers} | {images_per_second:.0f} |", flush=True)


def rate(batches: Iterable, warm_up: int, step: Callable, options) -> float:
    batches, count = iter(batches), 0
    for batch in itertools.islice(batches, warm_up):
        step(*batch)
    synchronize(options.device)
    start = time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        step(*next(batches))
        count += options.batch_size
    synchronize(options.device)
    return count / (time.perf_counter() - start)


def no_step(images, targets) -> None:
    pass


def training_step(name: str, device: torch.device) -> Callable:
    model = timm.create_model(name).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(images, targets) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_stages(options) -> None:
    """Each part of one batch by itself, waiting for the device; a full pipeline overlaps them."""
    device = options.device
    loader, augment = create_loader(options, "device", 0)
    transform = loader.transform
    keys = next(iter(loader.batches))
    read = [loader.dataset[key] for key in keys]
    batch = join_pieces([collate_encoded(read, transform.size)])
    decoded = device_loader.decode(batch.files, device)
    crops_of = (decoded, batch.boxes, batch.flips, transform.size, transform.interpolation)
    crops = batched_transforms.crop_resize_flip(*crops_of)
    operations = (batch.operations, batch.arguments, transform.fill, transform.interpolation)
    ready = crops, torch.from_numpy(batch.targets).to(device)
    stages = {
        "worker: read, draw": lambda: [loader.dataset[key] for key in keys],
        "worker: collate": lambda: collate_encoded(read, transform.size),
        "decode": lambda: device_loader.decode(batch.files, device),
        "crop, resize, flip": lambda: batched_transforms.crop_resize_flip(*crops_of),
        "RandAugment": lambda: batched_transforms.apply_operations(crops, *operations),
        "normalisation, random erasing, mixup": lambda: augment(*ready, 0, 0),
    }
    print("| part | ms a batch | of which the host | us an image |\n| --- | --- | --- | --- |")
    for name, stage in stages.items():
        host, total = [], []
        for _ in range(8):
            synchronize(device)
            start = time.perf_counter()
            stage()
            host.append(time.perf_counter() - start)
            synchronize(device)
            total.append(time.perf_counter() - start)
        ms, host_ms = (1e3 * sorted(times)[len(times) // 2] for times in (total, host))
        print(f"| {name} | {ms:.2f} | {host_ms:.2f} | {1e3 * ms / options.batch_size:.1f} |", flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
