"""Tests that batched random erasing, mixup and cutmix equal timm's implementations."""

import math

import numpy as np
import pytest
import torch
from pictures import DATA_CONFIG, random_images, seed_all
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing

from vil.config import Config
from vil.data.device.augmentation import BatchAugmentation

RECIPE = dict(mixup=0.8, cutmix=1.0, mixup_prob=1.0, mixup_switch_prob=0.5, smoothing=0.1, reprob=0.25, remode="const")


def normalised(images):
    """Normalize images with values 0..255."""
    mean, std = (torch.tensor(DATA_CONFIG[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (images / 255 - mean) / std


def augmented_by_timm(images, targets, config, num_classes, epoch, position):
    """Apply timm's random erasing (to 0) and mixup or cutmix to groups of eight images, each with its own seed."""
    parts = []
    for start in range(0, len(images), 8):
        group, labels = normalised(images[start : start + 8]), targets[start : start + 8]
        seed_all(int(np.random.SeedSequence((config["seed"], epoch, position + start, 1)).generate_state(1)[0]))
        if config["reprob"]:
            group = RandomErasing(config["reprob"], mode="const", device="cpu")(group)
        if config["mixup_prob"] and (config["mixup"] or config["cutmix"]):
            mixup = Mixup(
                config["mixup"],
                config["cutmix"],
                prob=config["mixup_prob"],
                switch_prob=config["mixup_switch_prob"],
                label_smoothing=config["smoothing"],
                num_classes=num_classes,
            )
            group, labels = mixup(group, labels)
        parts.append((group, labels))
    return [torch.cat(tensors) for tensors in zip(*parts)]


@pytest.mark.parametrize(
    "options",
    [
        {}, dict(mixup=0.2, cutmix=0.0, reprob=0.0), dict(cutmix=0.4, mixup=0.0, smoothing=0.3),
        dict(mixup_prob=0.5, seed=5, reprob=0.9), dict(mixup_switch_prob=0.9, smoothing=0.0),
        dict(mixup_switch_prob=0.1, reprob=1.0), dict(mixup_prob=0.0, reprob=1.0), dict(mixup=0.0, cutmix=0.0),
        dict(mixup_prob=0.0, reprob=0.0),
    ],
    ids=lambda options: " ".join(options) or "recipe",
)  # fmt: skip
def test_a_batch_is_erased_and_mixed_like_timms(options):
    """Random erasing, mixup and cutmix of a batch in one call equal timm's results for groups of images."""
    config = dict(RECIPE, seed=0) | options
    images, targets = random_images(68, 3, 12, 20), torch.arange(68) % 10
    given = images.clone()
    expected = augmented_by_timm(images, targets, config, 10, epoch=3, position=40)
    augment = BatchAugmentation(Config(**config), 10, DATA_CONFIG)
    parameters = augment.sample(68, 12, 20, epoch=3, position=40)
    for ours, theirs in zip(augment(images, targets, parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(images, given)  # `augment` must not change its input, because synthetic images are reused
    if config["reprob"] or config["mixup_prob"]:
        for other in (dict(epoch=2, position=40), dict(epoch=3, position=48)):
            parameters = augment.sample(68, 12, 20, **other)
            assert not torch.allclose(augment(images, targets, parameters)[0], expected[0], atol=1e-3)


@pytest.mark.parametrize("mode", ["pixel", "rand"])
def test_erased_regions_get_independent_noise_per_image(mode):
    config, images, targets = dict(RECIPE, reprob=0.7, mixup_prob=0.0), random_images(96, 3, 40, 48), torch.arange(96)

    def augmented(kind, first):
        augment = BatchAugmentation(Config(**config | dict(remode=kind)), 100, DATA_CONFIG)
        return augment(images[first:], targets, augment.sample(96 - first, 40, 48, 1, first))[0]

    grey, noisy, again, part = (augmented(*key) for key in (("const", 0), (mode, 0), (mode, 0), (mode, 32)))
    erased = (grey == 0).all(dim=1)
    assert 0.5 < erased.any(dim=(1, 2)).float().mean() < 0.9
    assert torch.equal(noisy.movedim(1, -1)[~erased], grey.movedim(1, -1)[~erased])
    assert torch.equal(noisy, again)
    assert torch.equal(noisy[32:], part)
    values = [noisy[i][:, erased[i]] for i in range(96) if erased[i].any()]
    if mode == "rand":  # the mode "rand" erases with one random colour per image
        assert all((v == v[:, :1]).all() for v in values)
        values = [v[:, :1] for v in values]
    starts = torch.stack([v[:, 0] for v in values])
    assert len(starts.flatten().unique()) == starts.numel()
    noise = torch.cat([v.flatten() for v in values])
    assert noise.mean().abs() < 4 / math.sqrt(len(noise))
    assert (noise.std() - 1).abs() < 4 / math.sqrt(2 * len(noise))
