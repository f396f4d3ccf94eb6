"""The study of training under AMP: its images, and what it counts."""

import math
from functools import partial

import timm
import torch

from research import stability


def test_images_are_those_of_their_seed_and_classes_of_every_seed():
    device = torch.device("cpu")
    streams = [stability.Images(seed, 3, 32, 0.0, device) for seed in (0, 0, 1)]
    (first, labels), (again, same_labels), (other, _) = (stream.next() for stream in streams)
    assert torch.equal(first, again)
    assert torch.equal(labels, same_labels)
    assert not torch.equal(first, other)
    assert not torch.equal(first, streams[0].next()[0])  # they never repeat
    assert torch.equal(streams[0].textures, streams[2].textures)


def test_the_norm_of_the_gradient_is_that_of_fp32_whatever_the_loss_is_scaled_by(monkeypatch):
    monkeypatch.setattr(stability.timm, "create_model", partial(timm.create_model, depth=2))
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**10))
    norms = [
        stability.train("vil_tiny", stability.Images(0, 2, 32, 1.0, torch.device("cpu")), 1, dtype).gradient_norms
        for dtype in (None, torch.float16)
    ]
    torch.testing.assert_close(*norms, rtol=0.02, atol=0)


def test_steps_that_overflow_are_skipped_and_counted_and_an_infinite_loss_is_noticed(monkeypatch):
    images = stability.Images(0, 2, 32, 1.0, torch.device("cpu"))
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**30)  # more than fp16 can hold, also when halved
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    run = stability.train("vil_tiny", images, 2, torch.float16)
    assert run.skipped == 2
    assert run.finite
    monkeypatch.setattr(images, "textures", images.textures * torch.inf)
    assert not stability.train("vil_tiny", images, 2, None).finite


def test_a_difference_of_losses_needs_both_runs_and_no_number_of_steps():
    runs = {name: stability.Run(torch.tensor(losses), None, 0, True, 1.0) for name, losses in (
        ("fp32", [1.0, 2.0]), ("bf16", [1.0, 4.5]),
    )}  # fmt: skip
    assert stability.farthest(runs, "bf16") == 2.5
    assert math.isnan(stability.farthest(runs, "fp16"))
    assert math.isnan(stability.farthest({"bf16": runs["bf16"]}, "bf16"))
