"""Image files, data loaders for them, and reference images that timm and PIL compute one by one."""

import io
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from processes import SMALL
from sklearn.datasets import load_sample_images
from timm.data import create_transform

from vil.config import Config
from vil.data.loaders import training_loader
from vil.data.samplers import TrainingBatches, split_global_batch
from vil.data.sources.splits import open_split

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
DATA_CONFIG = dict(input_size=(3, 12, 16), crop_pct=0.8, crop_mode="center", interpolation="bilinear")
DATA_CONFIG |= dict(mean=(0.3, 0.5, 0.6), std=(0.4, 0.2, 0.3))
# photos of a temple and a flower, 427 x 640 pixels
PHOTOS = [Image.fromarray(pixels) for pixels in load_sample_images().images]
PHOTO = PHOTOS[0].resize((60, 40))
MEANS = {name: DATA_CONFIG[name] for name in ("mean", "std")}
# defaults of the image transform in training, as arguments of timm's create_transform
RECIPE = dict(scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), hflip=0.5, color_jitter=0.3)
RECIPE |= dict(auto_augment="rand-m9-mstd0.5-inc1", interpolation="bicubic")
TIMMS_NAMES = {"aa": "auto_augment", "train_interpolation": "interpolation"}


def small_config(image_folder, **options) -> Config:
    return Config(**SMALL | dict(data_dir=str(image_folder), workers=0, experiment="run") | options)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_images(*shape):
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def tensor(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def encode(image, **options):
    file = io.BytesIO()
    image.save(file, **dict(format="JPEG", quality=90) | options)
    return file.getvalue()


def damage_tables(jpeg):
    """Overwrite a JPEG file's first Huffman table: the header stays valid, but decoding fails."""
    place = jpeg.index(b"\xff\xc4") + 5
    return jpeg[:place] + b"\xff" * 16 + jpeg[place + 16 :]


def without_adobes_mark(jpeg):
    start = jpeg.index(b"\xff\xee")
    return jpeg[:start] + jpeg[start + 2 + int.from_bytes(jpeg[start + 2 : start + 4], "big") :]


def training_set(folder, device=CPU, rank=0, world_size=1, epoch=0, input_size=(3, 12, 16), **options):
    """Return a loader of a rank's uint8 training batches, and the (index, seed) of each image of the rank's epoch."""
    config = Config(**dict(data_dir=str(folder), global_batch_size=8, workers=0, aug_repeats=0) | options)
    dataset = open_split(config.data_dir, "", "train", is_training=True)
    micro_batch, _ = split_global_batch(config, world_size)
    batches = TrainingBatches(len(dataset), config, micro_batch, rank, world_size)
    batches.set_epoch(epoch)
    loader = training_loader(dataset, config, DATA_CONFIG | dict(input_size=input_size), device, batches, 2)
    return loader.images, [key for batch in batches for key in batch]


def joined(loader):
    """Return all images of a loader as uint8 (before normalization), and all targets."""
    loader = getattr(loader, "images", loader)
    images, targets = zip(*loader)
    assert len(loader) == len(images)
    assert all(part.dtype == torch.uint8 for part in images)
    return torch.cat(images).cpu(), torch.cat(targets).tolist()


def by_timm(dataset, keys, input_size=(3, 12, 16), **options):
    """Return images that timm augments (each with its own seed), their targets and the number of unreadable files.

    As in timm, the next image replaces an unreadable one.
    """
    options = {TIMMS_NAMES.get(name, name): value for name, value in options.items()}
    transform = create_transform(input_size, is_training=True, use_prefetcher=True, **MEANS | RECIPE | options)
    images, targets, broken = [], [], set()
    for index, seed in keys:
        for i in range(index, index + 3):
            name = dataset.filename(i % len(dataset))
            try:
                image = Image.open(Path(dataset.reader.root) / name).convert("RGB")
                break
            except OSError:
                broken.add(name)
        seed_all(seed)
        images.append(torch.as_tensor(transform(image)))
        targets.append("axby".index(name[0]) // 2)
    return torch.stack(images), targets, len(broken)
