"""Tests of the augmentation kernels and their reference implementation against PIL and timm.

Images are small if the kernels are emulated on a CPU, and large on a GPU.
"""

import itertools
import math
import random
from types import SimpleNamespace

import emulator
import numpy as np
import pytest
import torch
from emulator import EMULATED
from pictures import tensor
from PIL import Image, ImageFilter
from scipy import stats
from spills import NVRTC, assert_no_spills
from timm.data import auto_augment, create_transform

from vil.data.device import batched_transforms
from vil.data.device.batched_transforms import (
    SIMPLE_OPERATIONS,
    affine_matrix,
    apply_operations,
    crop_resize_flip,
    finish,
)
from vil.data.device.decoded import DecodedImages
from vil.kernels import augment, cuda
from vil.kernels.augment import CODES
from vil.kernels.cuda import compiler
from vil.kernels.cuda.source import Source

FILL = (124, 116, 104)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
METHODS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

pytestmark = pytest.mark.usefixtures("poison")
KERNELS = [pytest.param("emulated", marks=EMULATED), pytest.param("gpu", marks=pytest.mark.gpu)]
of_kernels = pytest.mark.parametrize("where", KERNELS, indirect=True)


@pytest.fixture(params=["reference", *KERNELS])
def where(request, monkeypatch):
    """Settings of a test: device, number of trials, image size, and whether pixels must equal PIL's pixels exactly."""
    if request.param == "emulated":
        emulate(monkeypatch)
    if request.param == "gpu":
        return SimpleNamespace(device=torch.device("cuda"), count=64, size=(224, 224), exact=True)
    return SimpleNamespace(device=torch.device("cpu"), count=12, size=(19, 37), exact=request.param == "emulated")


def emulate(monkeypatch, launch=emulator.launch):
    monkeypatch.setattr(augment, "launch", launch)
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)


def noise(height, width, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def smooth(height, width, seed=0):
    return noise(-(-height // 7), -(-width // 7), seed).resize((width, height), Image.Resampling.BICUBIC)


def batch(images, device):
    return torch.stack([tensor(image) for image in images]).to(device)


def assert_levels(images, expected, most, share):
    """Assert that at most a fraction `share` of each image's pixel values differ, and by at most `most` levels."""
    for i, (image, truth) in enumerate(zip(images.cpu(), expected, strict=True)):
        levels = (image.int() - truth.int()).abs()
        assert levels.max() <= most, i
        assert (levels > 0).float().mean() <= share, i


# Tests of crops


@pytest.mark.parametrize("interpolation", METHODS)
def test_resized_crops_of_any_size_equal_pils(where, interpolation):
    numbers = random.Random(0)
    for size in (where.size, (33, 260), (1, 1)):
        images, boxes, flips, expected = [], [], [], []
        for i in range(where.count):
            height, width = (math.ceil(math.exp(numbers.uniform(0, 6))) for _ in range(2))
            images.append(noise(height, width, i))
            h, w = numbers.randint(1, height), numbers.randint(1, width)
            top, left = numbers.randint(0, height - h), numbers.randint(0, width - w)
            crop = images[-1].crop((left, top, left + w, top + h)).resize(size[::-1], METHODS[interpolation])
            boxes.append((top, left, h, w))
            flips.append(numbers.random() < 0.5)
            expected.append(tensor(crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flips[-1] else crop))
        decoded = [tensor(image).to(where.device) for image in images]
        decoded[0] = decoded[0].mT.contiguous().mT  # one image has a transposed memory layout
        crops = crop_resize_flip(DecodedImages.of(decoded), np.array(boxes), np.array(flips), size, interpolation)
        # Small crops have many pixels exactly between two levels, which fp32 sums may round to either level.
        assert_levels(crops, expected, *((0, 0) if where.exact else (2, 0.1)))


@of_kernels
@pytest.mark.parametrize("shape", [(1, 3000), (3000, 1), (1500, 700)])
def test_images_of_extreme_shapes_are_resized_like_pil(where, shape):
    if where.device.type == "cuda":
        shape = tuple(n if n == 1 else 3 * n if min(shape) > 1 else 32 * n for n in shape)
    image, box = noise(*shape), np.array([[0, 0, *shape]])
    for interpolation, method in METHODS.items():
        images = DecodedImages.of([tensor(image).to(where.device)])
        crop = crop_resize_flip(images, box, np.array([False]), (5, 9), interpolation)
        assert torch.equal(crop[0].cpu(), tensor(image.resize((9, 5), method)))


@pytest.mark.parametrize("crop_pct", [0.875, 1.0, 1.3])
@pytest.mark.parametrize("interpolation", METHODS)
def test_windows_are_those_of_timms_evaluation(where, interpolation, crop_pct):
    """Crop windows equal those of timm's evaluation transform, also if a window is larger than the resized image."""
    height, width = where.size
    transform = create_transform(
        (3, height, height), is_training=False, use_prefetcher=True, interpolation=interpolation, crop_pct=crop_pct
    )
    images = [noise(h, w) for h, w in ((height, 3 * width), (width, width), (70, 51), (33, 500), (3, 2))]
    resized, scale = [], math.floor(height / crop_pct)
    for image in images:
        longer = int(scale * max(image.size) / min(image.size))
        resized.append((longer, scale) if image.height > image.width else (scale, longer))
    offsets = [[-((height - n) // 2) if n < height else round((n - height) / 2) for n in size] for size in resized]
    boxes = np.array([(0, 0, image.height, image.width) for image in images])
    windows = crop_resize_flip(
        DecodedImages.of([tensor(image).to(where.device) for image in images]), boxes, np.zeros(len(images), bool),
        (height, height), interpolation, np.array(resized), np.array(offsets),
    )  # fmt: skip
    expected = [torch.as_tensor(transform(image)) for image in images]
    assert_levels(windows, expected, *((0, 0) if where.exact else (1, 0.1)))


def test_crops_of_like_size_are_padded_together_as_many_as_memory_holds():
    sides = np.array([100, 256, 257, 5000, 300, 9000, 9000, *[200] * 1023])
    groups = [rows.tolist() for rows in batched_transforms._rows_of_similar_size(sides)]
    assert groups == [[0, 1, *range(7, 1029)], [1029], [2, 4], [3], [5], [6]]


def test_a_crop_outside_its_image_is_rejected(where):
    images = DecodedImages.of([torch.zeros(3, 8, 9, dtype=torch.uint8, device=where.device)] * 2)
    flips = np.zeros(2, bool)
    for box in ((0, 0, 9, 9), (0, 1, 8, 9), (-1, 0, 2, 2), (0, -1, 2, 2), (3, 3, 0, 2), (3, 3, 2, 0)):
        (top, left, height, width) = box
        place = rf"got {height}x{width} pixels at \({top}, {left}\)"
        with pytest.raises(ValueError, match=f"must be inside the 8x9 image and not empty, {place}"):
            crop_resize_flip(images, np.array([(0, 0, 8, 9), box]), flips, (4, 4), "bicubic")


# Tests of augmentation operations


def random_operation(numbers, name=None):
    """Return the name and a random argument of one of timm's operations."""
    name = name or numbers.choice([*SIMPLE_OPERATIONS, *batched_transforms.GEOMETRIC, "GaussianBlur"])
    ranges = dict(Posterize=(0, 8), Solarize=(0, 256), SolarizeAdd=(0, 110), Rotate=(-30, 30), GaussianBlur=(0.1, 2))
    ranges |= dict.fromkeys(("ShearX", "ShearY", "TranslateXRel", "TranslateYRel"), (-0.4, 0.4))
    if name in ("TranslateX", "TranslateY"):  # multiples of 0.5 pixels, half of which sample at the image's edge
        return name, numbers.randint(-40, 40) / 2
    if name not in ranges:  # many results are exact integers if the factors are multiples of 0.1
        return name, numbers.randint(1, 19) / 10
    argument = numbers.uniform(*ranges[name])
    return name, int(argument) if name in ("Posterize", "Solarize", "SolarizeAdd") else argument


def by_timm(image, name, argument, interpolation="bicubic"):
    if name == "GaussianBlur":
        return image.filter(ImageFilter.GaussianBlur(argument))
    arguments = [] if name in ("AutoContrast", "Equalize", "Invert") else [argument]
    return auto_augment.NAME_TO_OP[name](image, *arguments, resample=METHODS[interpolation], fillcolor=FILL)


def encoded(operations, size):
    """Convert each image's operations, a list of (name, argument), to the opcodes and arguments of the kernels."""
    codes = np.zeros((len(operations), len(operations[0])), np.uint8)
    arguments = np.zeros((*codes.shape, batched_transforms.ARGUMENTS))
    for i, turns in enumerate(operations):
        for turn, (name, argument) in enumerate(turns):
            if name in batched_transforms.GEOMETRIC:
                arguments[i, turn] = affine_matrix(name, argument, width=size[1], height=size[0])
                name = "Affine"
            else:
                arguments[i, turn, 0] = argument
            codes[i, turn] = CODES[name]
    return codes, arguments


@pytest.mark.parametrize("interpolation", METHODS)
@pytest.mark.parametrize("name", [*SIMPLE_OPERATIONS, *batched_transforms.GEOMETRIC, "GaussianBlur"])
def test_every_augmentation_operation_equals_timms(where, name, interpolation):
    numbers = random.Random(0)
    for height, width in (where.size, (2, 40), (3, 3), (1, 1)):
        images = [smooth(height, width, i) if i % 2 else noise(height, width, i) for i in range(where.count)]
        few = [Image.fromarray(np.array(image) // 100 * 90) for image in images[:2]]
        images += [*few, Image.new("RGB", (width, height), (0, 100, 255))]
        operations = [random_operation(numbers, name) for _ in images]
        expected = [tensor(by_timm(image, *o, interpolation)) for image, o in zip(images, operations)]
        codes, arguments = encoded([[o] for o in operations], (height, width))
        pixels = batch(images, where.device)
        given = pixels.clone()
        result = apply_operations(pixels, codes, arguments, FILL, interpolation)
        exact = where.exact or name not in ("AutoContrast", *batched_transforms.GEOMETRIC)
        # The reference's results differ from PIL's by rounding, because PIL computes in double precision and truncates.
        assert_levels(result, expected, *((0, 0) if exact else (1, 1 if width < 4 else 0.1)))
        assert torch.equal(pixels, given)


@of_kernels
@pytest.mark.parametrize("interpolation", METHODS)
def test_each_image_of_a_batch_gets_its_own_operations_in_each_turn(where, interpolation):
    numbers, (height, width) = random.Random(1), (41, 34) if where.device.type == "cpu" else (224, 224)
    images = [smooth(height, width, i) for i in range(30)]
    operations = [[random_operation(numbers) for _ in range(3)] for _ in images]
    codes, arguments = encoded(operations, (height, width))
    codes[::5, 1], codes[0] = 0, 0  # every fifth image skips the second operation, and image 0 skips all operations
    expected = []
    for i, (image, turns) in enumerate(zip(images, operations)):
        for turn, (name, argument) in enumerate(turns):
            image = by_timm(image, name, argument, interpolation) if codes[i, turn] else image
        expected.append(tensor(image))
    strided = batch(images, where.device).to(memory_format=torch.channels_last)
    assert_levels(apply_operations(strided, codes, arguments, FILL, interpolation), expected, 0, 0)


def test_operations_of_an_image_are_applied_in_order(where):
    names = [["Invert", "Brightness"], ["Brightness", "Invert"], ["", "Brightness"], ["", ""]]
    operations = np.array([[CODES[name] for name in turns] for turns in names], np.uint8)
    arguments = np.zeros((4, 2, batched_transforms.ARGUMENTS), np.float32)
    arguments[:, :, 0] = [[0, 0.5], [0.25, 0], [0, 0.75], [0, 0]]
    images = torch.full((4, 3, 2, 2), 200, dtype=torch.uint8, device=where.device)
    result = apply_operations(images, operations, arguments, FILL, "bicubic")
    assert result[:, 0, 0, 0].tolist() == [27, 205, 150, 200]
    assert (result == result[:, :1, :1, :1]).all()


@pytest.mark.parametrize("interpolation", METHODS)
def test_a_batch_is_transformed_on_its_device(interpolation):
    """Results stay on the images' device: PyTorch raises if "meta" images are combined with tensors on a CPU."""
    images = DecodedImages.of([torch.empty(3, 20, 30 + i, dtype=torch.uint8, device="meta") for i in range(3)])
    boxes, flips = np.array([[0, 0, 20, 30]] * 3), np.array([True, False, True])
    crops = crop_resize_flip(images, boxes, flips, (8, 12), interpolation)
    assert (crops.device.type, crops.shape) == ("meta", (3, 3, 8, 12))
    operations = np.array([[CODES["Affine"], CODES[name]] for name in ("Color", "Contrast", "Solarize")], np.uint8)
    arguments = np.zeros((3, 2, batched_transforms.ARGUMENTS), np.float32)
    result = apply_operations(crops, operations, arguments, FILL, interpolation)
    assert (result.device.type, result.shape) == ("meta", (3, 3, 8, 12))


def test_turns_without_operations_leave_batches_unchanged(where):
    images = batch([noise(5, 7)] * 2, where.device).to(memory_format=torch.channels_last)
    for turns in (0, 2):
        codes, arguments = np.zeros((2, turns), np.uint8), np.zeros((2, turns, 6), np.float32)
        assert torch.equal(apply_operations(images, codes, arguments, FILL, "bicubic"), images)
    codes[:, 1] = CODES["Invert"]
    assert torch.equal(apply_operations(images, codes, arguments, FILL, "bicubic"), 255 - images)


def test_a_blur_of_any_radius_equals_pils(where):
    for height, width in ((40, 70), (3, 2), (1, 1)):
        for radius in (0, 0.1, 0.5, 1, 1.37, 2, 5.5, 30, 200):
            image, blur = noise(height, width), encoded([[("GaussianBlur", radius)]], (height, width))
            blurred = apply_operations(batch([image], where.device), *blur, FILL, "bicubic")
            assert torch.equal(blurred[0].cpu(), tensor(by_timm(image, "GaussianBlur", radius))), radius


# Tests of normalization, erasing and mixing


def normalised(images):
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    return (images.cpu().double() / 255 - mean) / std


@pytest.mark.parametrize("shape", [(5, 20, 24), (4, 7, 9), (3, 1, 1)])
def test_images_are_normalised_erased_and_mixed(where, shape):
    count, height, width = shape
    if where.device.type == "cuda":
        height, width = height + 200, width + 200
    numbers = np.random.default_rng(0)
    images = batch([noise(height, width, i) for i in range(count)], where.device)
    images = images.to(memory_format=torch.channels_last)
    given, whole = images.clone(), normalised(images)
    boxes = np.array([(0, 0, 0, 0), (0, 0, height, width), (height // 2, width // 3, 1, 1)] * 2, np.int32)[:count]
    erased = whole.clone()
    for (top, left, h, w), image in zip(boxes, erased):
        image[:, top : top + h, left : left + w] = 0
    mixing, partners = numbers.random((count, 6), np.float32), numbers.permutation(count)
    mixing[:, :4] = [0, height, 0, width]
    mixing[1, :5], mixing[2, 4] = (height // 3, height - height // 4, width // 5, width - 1, 0), 1

    def mixed(truth):
        result = truth.clone()
        for i, (top, bottom, left, right, share, _) in enumerate(mixing.tolist()):
            inside = (slice(None), slice(int(top), int(bottom)), slice(int(left), int(right)))
            result[i][inside] = share * truth[i][inside] + (1 - share) * truth[partners[i]][inside]
        return result

    erasing, mixes = (boxes, np.arange(count, dtype=np.uint32), "const"), dict(mixing=mixing, partners=partners)
    for found, truth in (
        (finish(images, MEAN, STD), whole), (finish(images, MEAN, STD, *erasing), erased),
        (finish(images, MEAN, STD, *erasing, **mixes), mixed(erased)),
        (finish(images, MEAN, STD, **mixes), mixed(whole)),
    ):  # fmt: skip
        torch.testing.assert_close(found.cpu().double(), truth, rtol=0, atol=1e-6)
    assert torch.equal(images, given)


def erased(device, keys, mode, size=(64, 64), **mixes):
    """Return normalized images after random erasing of their whole area."""
    images = torch.zeros(len(keys), 3, *size, dtype=torch.uint8, device=device)
    boxes = np.tile(np.array([0, 0, *size], np.int32), (len(keys), 1))
    return finish(images, MEAN, STD, boxes, np.array(keys, np.uint32), mode, **mixes).cpu()


def test_erased_pixels_are_standard_normal_and_independent(where):
    """Noise is uncorrelated between adjacent pixels, rows, channels and images, even if keys are consecutive."""
    values = erased(where.device, range(20), "pixel").double()
    for moment, power, variance in ((0, 1, 1), (1, 2, 2), (3, 4, 96)):
        assert abs((values**power).mean() - moment) < 5 * (variance / values.numel()) ** 0.5
    assert stats.kstest(values.flatten(), "norm").pvalue > 1e-3
    for power, axis, distance in itertools.product((1, 2), range(4), (1, 2, 3)):
        moments = (values**power - (values**power).mean()) / (values**power).std()
        if (length := moments.shape[axis] - distance) > 0:
            product = moments.narrow(axis, 0, length) * moments.narrow(axis, distance, length)
            assert abs(product.mean()) < 5 / product.numel() ** 0.5, (power, axis, distance)


def test_noise_depends_only_on_the_key_and_the_pixel_position(where):
    keys, size = [7, 2**32 - 1, 7, 0], (12, 10)
    values = erased(where.device, keys, "pixel", size)
    assert torch.equal(values, erased(where.device, keys, "pixel", size))
    assert torch.equal(values[0], values[2])
    assert torch.equal(values[1:2], erased(where.device, keys[1:2], "pixel", size))
    for i, j in ((0, 1), (0, 3), (1, 3)):
        assert not (values[i] == values[j]).any()
    # The noise that erases a region depends only on the key of the erased image, also if images are mixed.
    partners = dict(mixing=np.array([[0, 12, 0, 10, 0, 0]] * 4, np.float32), partners=np.array([1, 0, 3, 2]))
    assert torch.equal(erased(where.device, keys, "pixel", size, **partners), values[[1, 0, 3, 2]])


def test_a_channel_of_an_image_is_erased_to_one_number(where):
    values = erased(where.device, range(200), "rand", (4, 4))
    assert (values == values[:, :, :1, :1]).all()
    numbers = values[:, :, 0, 0].double()
    assert stats.kstest(numbers.flatten(), "norm").pvalue > 1e-3
    assert (torch.corrcoef(numbers.T) - torch.eye(3)).abs().max() < 5 / 200**0.5


def philox(counters, key):
    """Compute the random numbers of Random123's Philox4x32-10 for counters (n, 4) and a key of two 32-bit words."""
    a, b, c, d = np.array(counters, np.uint64).T
    key_0, key_1 = key
    low = np.uint64(2**32 - 1)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (
            second >> np.uint64(32) ^ b ^ np.uint64(key_0), second & low,
            first >> np.uint64(32) ^ d ^ np.uint64(key_1), first & low,
        )  # fmt: skip
        key_0, key_1 = (key_0 + 0x9E3779B9) % 2**32, (key_1 + 0xBB67AE85) % 2**32
    return np.stack([a, b, c, d], axis=1)


@of_kernels
def test_the_kernels_noise_is_philox_and_box_mullers(where):
    # Random123's test vector of Philox4x32-10 for counter 0 and key 0
    answer = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([[0] * 4], (0, 0)).tolist() == [answer]
    key, (height, width) = 0xDEADBEEF, (9, 11)
    for mode, kind in (("pixel", 2), ("rand", 1)):
        fours = -(-width // 4)  # groups of four adjacent pixels in a row
        groups = 3 * height * fours if mode == "pixel" else 1
        bits = philox([[group, kind, 0, 0] for group in range(groups)], (key, 0)).astype(float)
        far, turn = np.sqrt(-2 * np.log((bits[:, ::2] + 1) / 2**32)), 2 * np.pi * bits[:, 1::2] / 2**32
        numbers = torch.tensor(np.stack([far * np.cos(turn), far * np.sin(turn)], axis=2)).flatten()
        if mode == "pixel":
            expected = numbers.view(3, height, 4 * fours)[..., :width].flatten()
        else:
            expected = numbers[:3].repeat_interleave(height * width)
        result = erased(where.device, [key], mode, (height, width))
        torch.testing.assert_close(result.double().flatten(), expected, rtol=1e-5, atol=1e-5)


# Tests of batches of images


@NVRTC
def test_kernels_compile_without_spills_and_round_products_as_pil_does():
    assert_no_spills([(augment.SOURCE, arch, augment.MACROS) for arch in ("sm_80", "sm_90")])
    macros = tuple(augment.MACROS.items())
    with_fma = Source(augment.SOURCE.name, augment.SOURCE.kernels)
    assert compiler.compile_cubin(augment.SOURCE, "sm_90", macros) != compiler.compile_cubin(with_fma, "sm_90", macros)


def test_a_batch_takes_few_launches_and_one_copy_a_function(monkeypatch):
    launched, copied = [], []
    emulate(monkeypatch, lambda source, entry, *_: launched.append(entry))
    real = augment._to_device
    monkeypatch.setattr(augment, "_to_device", lambda *given: copied.append(1) or real(*given))
    count = len(augment.OPERATIONS)
    images = DecodedImages.of([tensor(noise(20, 30))] * count)
    crops = crop_resize_flip(images, np.array([[0, 0, 20, 30]] * count), np.zeros(count, bool), (8, 8), "bicubic")
    codes = np.arange(count, dtype=np.uint8)[:, None].repeat(2, axis=1)
    apply_operations(crops, codes, np.ones((count, 2, 6)), FILL, "bicubic")
    finish(crops, MEAN, STD)
    turn = ["build_tables", "apply_operations", "gaussian_blur", "gaussian_blur"]
    assert launched == ["resize_weights", "crop_resize_flip", *turn, *turn, "finish"]
    assert len(copied) == 3
    launched.clear()
    codes = np.array([[CODES[name]] for name in ("Affine", "Color", "Sharpness")])
    apply_operations(crops[:3], codes, np.ones((3, 1, 6)), FILL, "bicubic")
    assert launched == ["apply_operations"]


@pytest.mark.skipif(not emulator.has_sparse(), reason="needs memory that is not touched")
@EMULATED
def test_the_last_image_of_more_than_2_to_the_31_pixels_emulated(monkeypatch):
    images = emulator.sparse((3, 3, 20_000, 20_000), torch.uint8)
    last = torch.arange(200, dtype=torch.uint8)
    images[-1, -1, -1, -200:] = last
    with emulator.sparse_where_large() as launch:
        emulate(monkeypatch, launch)
        inverted = apply_operations(images, np.full((3, 1), CODES["Posterize"]), np.full((3, 1, 6), 4), FILL, "bicubic")
        assert torch.equal(inverted[-1, -1, -1, -200:], last & 0xF0)
        finished = finish(images, (0, 0, 0), (1, 1, 1))
        assert torch.equal(finished[-1, -1, -1, -200:], last / 255.0)


@pytest.mark.gpu
def test_augmented_images_are_bitwise_reproducible_in_any_batch():
    device, numbers = torch.device("cuda"), random.Random(0)
    images = DecodedImages.of([tensor(smooth(375, 500, i)).to(device) for i in range(64)])
    boxes, flips = np.array([(i, 2 * i, 300 - 2 * i, 350 - 3 * i) for i in range(64)]), np.arange(64) % 2 == 0
    codes, arguments = encoded([[random_operation(numbers) for _ in range(2)] for _ in range(64)], (224, 224))
    erasing = np.array([(i, i, 100, 90) for i in range(64)], np.int32)

    def augmented(which):
        crops = crop_resize_flip(images[which], boxes[which], flips[which], (224, 224), "bicubic")
        operated = apply_operations(crops, codes[which], arguments[which], FILL, "bicubic")
        return finish(operated, MEAN, STD, erasing[which], np.array(which, np.uint32), "pixel")

    every = list(range(64))
    whole = augmented(every)
    assert torch.equal(augmented(every), whole)
    assert torch.equal(augmented([40, 3, 17]), whole[[40, 3, 17]])
