"""Tests of an image's augmentation parameters, sampled without pixels, against timm's transform with the same seed."""

import pytest
import torch
from pictures import IMAGENET, PHOTO, PHOTOS, tensor
from PIL import Image
from timm.data import auto_augment, create_transform
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as pil

from vil.config import ConfigError
from vil.data.device.transform_parameters import TransformSampler
from vil.data.seeds import seed_everything

FILL = (124, 116, 104)
POLICIES = "3a-mstd2 original originalr-mstd0.5 v0 v0r rand-m9-n4-t3a-inc1 rand-m9-mstd0.5-inc1 "
POLICIES += "rand-m5-n3-p0.8-tweights rand-m7-mstd101-mmax20 rand-n3-t3aw"


def timm_transform(**options):
    options = dict(auto_augment="rand-m9-mstd0.5-inc1", color_jitter=0.3, interpolation="bicubic") | options
    return create_transform(32, is_training=True, use_prefetcher=True, **options, **IMAGENET)


def replayed(image, draws, transform):
    """Apply sampled augmentation parameters with PIL."""
    method = InterpolationMode(transform.interpolation)
    top, left, height, width = draws.box
    image = pil.resize(pil.crop(image, top, left, height, width), list(draws.resized), method)
    image = pil.crop(image, *draws.offset, *transform.size)
    if draws.flip:
        image = pil.hflip(image)
    for name, arguments in draws.operations:
        resample = getattr(Image.Resampling, transform.interpolation.upper())
        image = auto_augment.NAME_TO_OP[name](image, *arguments, resample=resample, fillcolor=FILL)
    return tensor(image)


@pytest.mark.parametrize(
    "options",
    [
        *(dict(auto_augment=aa) for aa in POLICIES.split()),
        dict(auto_augment=None, color_jitter=0.9),
        dict(auto_augment=None, color_jitter=0.0),
        dict(auto_augment="3a", color_jitter=None, interpolation="bilinear", scale=(0.5, 0.6), ratio=(2.0, 2.5)),
        dict(auto_augment=None, color_jitter=None, hflip=0.0),
    ],
    ids=lambda options: " ".join(f"{value}" for value in options.values()),
)
def test_sampled_parameters_reproduce_timms_transform(options):
    """Images that PIL transforms with the sampled parameters equal those of timm's transform with the same seed."""
    transform = timm_transform(**options)
    drawing = TransformSampler(transform)
    for seed in range(150):
        seed_everything(seed)
        expected = transform(PHOTO)
        seed_everything(seed)
        assert torch.equal(replayed(PHOTO, drawing(PHOTO), drawing), torch.as_tensor(expected))


@pytest.mark.parametrize("crop_pct", [0.875, 1.0, 0.53, 1.25])
@pytest.mark.parametrize(
    "options",
    [
        dict(input_size=(3, 32, 32)),
        dict(input_size=(3, 33, 33), interpolation="bicubic"),
        dict(input_size=(3, 20, 40), crop_mode="center"),
        dict(input_size=(3, 20, 41), crop_mode="squash"),
        dict(input_size=(3, 32, 32), crop_mode="squash"),
    ],
    ids=str,
)
def test_evaluation_crops_equal_timms(options, crop_pct):
    transform = create_transform(use_prefetcher=True, crop_pct=crop_pct, **options, **IMAGENET)
    drawing = TransformSampler(transform)
    assert drawing.size == options["input_size"][1:]
    for size in ((60, 40), (40, 61), (33, 33), (1, 50), (200, 21)):
        photo = PHOTOS[1].resize(size)
        assert torch.equal(replayed(photo, drawing(photo), drawing), torch.as_tensor(transform(photo)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_augment": "augmix-m5"}, "transform .*got 'AugMixAugment'"),
        ({"interpolation": "random"}, "interpolation .*got 'random'"),
        ({"interpolation": "lanczos"}, "interpolation .*got 'lanczos'"),
        ({"color_jitter_prob": 0.5, "auto_augment": None}, "transform .*got 'RandomApply'"),
    ],
)
def test_an_unsupported_transform_is_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        TransformSampler(timm_transform(**options))
    with pytest.raises(ConfigError, match="got 'CenterCropOrPad'"):  # timm's transform for crop_mode="border"
        TransformSampler(create_transform(32, use_prefetcher=True, crop_mode="border"))
