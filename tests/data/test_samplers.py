"""Tests of the images in each batch and of the images' order, for any world size and micro-batch size."""

import random

import numpy as np
import pytest
import torch
from pictures import DATA_CONFIG, seed_all, small_config

from vil.config import Config, ConfigError
from vil.data.device.augmentation import BatchAugmentation
from vil.data.samplers import EvaluationBatches, Pieces, TrainingBatches, split_global_batch
from vil.data.seeds import derive_seed, seed_everything


@pytest.mark.parametrize(("share", "batch_size"), [(16, None), (16, 16), (16, 5), (12, 8), (10, 3), (6, 1), (14, 5)])
def test_the_micro_batch_is_the_largest_that_divides_the_batch_and_fits(share, batch_size):
    fits = [size for size in range(1, share + 1) if share % size == 0 and size <= (batch_size or share)]
    for world_size in (1, 3):
        config = Config(global_batch_size=share * world_size, batch_size=batch_size, mixup=0.0, cutmix=0.0)
        assert split_global_batch(config, world_size) == (max(fits), share // max(fits))


def test_a_global_batch_that_ranks_cannot_share_is_rejected(image_folder):
    with pytest.raises(ConfigError, match="must be a multiple of the world size 3, got 16"):
        split_global_batch(small_config(image_folder), 3)
    odd = dict(global_batch_size=18)  # 9 images for each of two ranks
    with pytest.raises(ConfigError, match="mixup pairs images, got 9: .*9 images per rank"):
        split_global_batch(small_config(image_folder, **odd), 2)
    with pytest.raises(ConfigError, match="mixup pairs images, got 9: .*18 images per rank"):
        split_global_batch(small_config(image_folder, **odd, batch_size=9, mixup=0.0), 1)
    for unmixed in (dict(mixup_prob=0.0), dict(mixup=0.0, cutmix=0.0)):
        assert split_global_batch(small_config(image_folder, **odd, **unmixed), 2) == (9, 1)
    config = small_config(image_folder)
    assert TrainingBatches(16, config, 16, 0, 1).steps == 1
    with pytest.raises(ConfigError, match="must be at most 15, .*got 16: lower --global-batch-size, or"):
        TrainingBatches(15, config, 16, 0, 1)


@pytest.mark.parametrize(
    ("images", "batch", "repeats", "epochs", "said"),
    [
        (
            41, 32, 0, 50,
            "an epoch has 1 step of 32 images, the run has 50 steps; each epoch skips 9 of 41 images, chosen at "
            "random; for more steps, set --global-batch-size 4 with a lower --lr, or more --epochs",
        ),
        (
            12, 12, 0, 1,
            "an epoch has 1 step of 12 images, the run has 1 step; for more steps, set --global-batch-size 2 with a "
            "lower --lr, or more --epochs",
        ),
        (12, 4, 0, 9, "an epoch has 3 steps of 4 images, the run has 27 steps"),
        (64, 16, 0, 128, "an epoch has 4 steps of 16 images, the run has 512 steps"),
        (128, 16, 0, 2, "an epoch has 8 steps of 16 images, the run has 16 steps"),
        (
            129, 16, 3, 2,
            "an epoch has 8 steps of 16 images, the run has 16 steps; each epoch skips 81 of 129 images, chosen at "
            "random",
        ),
    ],
)  # fmt: skip
def test_few_steps_per_epoch_are_logged_with_advice(image_folder, images, batch, repeats, epochs, said):
    config = small_config(image_folder, global_batch_size=batch, aug_repeats=repeats)
    assert TrainingBatches(images, config, batch // 4, 0, 2).described(epochs) == said


def global_batches(config, num_images, world_size, epoch=3):
    """Return the (index, seed) pairs of each global batch of an epoch, gathered from all ranks in order."""
    micro_batch, _ = split_global_batch(config, world_size)
    ranks = [TrainingBatches(num_images, config, micro_batch, rank, world_size) for rank in range(world_size)]
    for batches in ranks:
        batches.set_epoch(epoch)
    share = config.global_batch_size // world_size
    pairs = [[pair for batch in batches for pair in batch] for batches in ranks]
    steps = range(ranks[0].steps)
    return [[pair for rank in pairs for pair in rank[step * share : (step + 1) * share]] for step in steps]


@pytest.mark.parametrize("repeats", [0, 3])
def test_global_batches_do_not_depend_on_world_size_or_accumulation(image_folder, repeats):
    config = small_config(image_folder, aug_repeats=repeats)
    expected = global_batches(config, 100, world_size=1)
    assert len(expected) == 100 // 16
    for world_size, batch_size in [(2, None), (4, None), (1, 4), (2, 5)]:
        split = small_config(image_folder, aug_repeats=repeats, batch_size=batch_size)
        assert global_batches(split, 100, world_size) == expected


def test_an_epoch_contains_each_image_once_or_as_often_as_aug_repeats(image_folder):
    for repeats in (0, 1):
        once = [i for b in global_batches(small_config(image_folder, aug_repeats=repeats), 100, 1) for i, _ in b]
        assert len(set(once)) == len(once) == 96
        assert set(once) < set(range(100))
    batches = global_batches(small_config(image_folder, aug_repeats=3, global_batch_size=12), 100, 1)
    seen = []
    for batch in batches:
        indices = [i for i, _ in batch]
        assert sorted(indices.count(i) for i in set(indices)) == [3, 3, 3, 3]
        assert len({seed for _, seed in batch}) == 12  # each copy is augmented differently
        seen += set(indices)
    assert len(set(seen)) == len(seen) == 4 * len(batches) == 32


@pytest.mark.parametrize("global_batch_size", [12, 16, 24, 64])
def test_an_image_is_never_mixed_with_a_copy_of_itself(image_folder, global_batch_size):
    config = small_config(image_folder, aug_repeats=3, global_batch_size=global_batch_size, cutmix=0.0, reprob=0.0)
    augment = BatchAugmentation(config, 200, DATA_CONFIG)
    for batch in global_batches(config, 200, 1):
        indices = torch.tensor([i for i, _ in batch])
        images = torch.zeros(len(batch), 3, 2, 2, dtype=torch.uint8)
        _, targets = augment(images, indices, augment.sample(len(batch), 2, 2, epoch=0, position=0))
        # Each image has its own class, so an image that is mixed with a copy of itself would have a single peak.
        assert ((targets > targets.min(dim=1, keepdim=True).values).sum(dim=1) == 2).all()


def test_epochs_and_seeds_shuffle_and_augment_differently(image_folder):
    def drawn(seed, epoch):
        pairs = [pair for b in global_batches(small_config(image_folder, seed=seed), 100, 1, epoch) for pair in b]
        return [i for i, _ in pairs], {seed for _, seed in pairs}

    assert drawn(0, 0) == drawn(0, 0)
    orders, seeds = zip(*(drawn(*key) for key in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]))
    assert len(set(map(tuple, orders))) == 5
    assert len(set.union(*seeds)) == 5 * 96  # each image is augmented with its own seed
    assert 2**32 > max(max(s) for s in seeds) >= 2**31 > min(min(s) for s in seeds)


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, None), (2, 4)])
def test_an_epoch_resumes_at_its_step(image_folder, world_size, batch_size):
    config = small_config(image_folder, batch_size=batch_size)
    micro_batch, accumulation = split_global_batch(config, world_size)
    for rank in range(world_size):
        batches = TrainingBatches(100, config, micro_batch, rank, world_size)
        batches.set_epoch(5)
        whole = list(zip(batches, batches.first_positions()))
        share = 16 // world_size
        assert [position for _, position in whole] == [
            16 * step + share * rank + micro_batch * part for step in range(6) for part in range(accumulation)
        ]
        batches.set_epoch(5, first_step=4)
        assert list(zip(batches, batches.first_positions())) == whole[4 * accumulation :]
        assert len(batches) == len(whole) - 4 * accumulation == 2 * accumulation
        assert list(batches.sizes()) == [micro_batch] * len(batches)


def test_rank_r_of_n_evaluates_every_nth_image_from_r_on():
    for world_size in (1, 2, 3, 5, 29):
        for rank in range(world_size):
            batches = EvaluationBatches(28, 4, rank, world_size)
            indices = list(range(28))[rank::world_size]
            expected = [indices[start : start + 4] for start in range(0, len(indices), 4)]
            assert [[i for i, _ in batch] for batch in batches] == expected
            assert len(batches) == len(expected)
            assert list(batches.sizes()) == [len(batch) for batch in expected]


def test_pieces_form_batches_and_none_is_sampled_before_the_sampler_is_ready():
    """Pieces form batches. Before `ready` is set there are none, because PyTorch samples pieces at workers' start."""
    pieces = Pieces(EvaluationBatches(250, 100, 1, 2), 64)
    assert list(pieces) == []
    pieces.ready = True
    assert [len(piece) for piece in pieces] == [64, 36, 25]
    assert [key for piece in pieces for key in piece] == [(index, 0) for index in range(1, 250, 2)]


def test_tasks_have_adjacent_copies_and_the_row_of_each_image():
    batches = [[(5, 0), (2, 1), (5, 2), (2, 3), (5, 4)], [(1, 5), (0, 6)]]
    pieces = Pieces(batches, 3, lambda pairs, rows: [*zip(rows, pairs, strict=True)])  # type: ignore[arg-type]
    pieces.ready = True
    assert [*pieces] == [
        [(1, (2, 1)), (3, (2, 3)), (0, (5, 0))], [(2, (5, 2)), (4, (5, 4))], [(1, (0, 6)), (0, (1, 5))],
    ]  # fmt: skip


def test_seeds_depend_only_on_their_key_and_seed_every_generator(monkeypatch):
    keys = [(0, 1), (1, 0), (0, 1, 0, 1), (0, 1, 0, 2), (0, 0, 1, 1), (7, 2**33)]
    for key in keys:
        assert derive_seed(*key) == np.random.SeedSequence(key).generate_state(1)[0]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    seed_everything(2**32 - 5)
    drawn = random.random(), np.random.rand(), torch.rand(())
    seed_all(2**32 - 5)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))
    seeded = []
    for name in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(f"torch.{name}.manual_seed", lambda seed, name=name: seeded.append((name, seed)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    seed_everything(3)
    assert seeded == [("xpu", 3), ("mps", 3)]  # an unused GPU is not initialized
