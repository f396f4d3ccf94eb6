"""Tests of the study of training with AMP: its images and measurements."""

import math
import sys
from functools import partial

import pytest
import timm
import torch
from figures import kept_figures

from research import stability


def test_images_are_those_of_their_seed_and_classes_of_every_seed():
    device = torch.device("cpu")
    streams = [stability.Images(seed, 3, 32, 0.0, device) for seed in (0, 0, 1)]
    (first, labels), (again, same_labels), (other, _) = (stream.next() for stream in streams)
    assert torch.equal(first, again)
    assert torch.equal(labels, same_labels)
    assert not torch.equal(first, other)
    assert not torch.equal(first, streams[0].next()[0])  # images never repeat
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
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**30)  # overflows fp16, also after one halving
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


def test_the_rate_rises_to_its_peak_and_the_norm_is_that_of_all_gradients(monkeypatch):
    rates, norms = [], []

    class Recorder(torch.optim.AdamW):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"].item())
            squares = [p.grad.square().sum() for group in self.param_groups for p in group["params"]]
            norms.append(sum(squares).sqrt())
            return super().step(closure)

    monkeypatch.setattr(stability.timm, "create_model", partial(timm.create_model, depth=1))
    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    run = stability.train("vil_tiny", stability.Images(0, 2, 32, 1.0, torch.device("cpu")), 4, None)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    torch.testing.assert_close(run.gradient_norms, torch.stack(norms), rtol=1e-3, atol=0)


def test_the_table_has_distances_from_fp32_in_units_of_the_noise(monkeypatch, tmp_path, capsys):
    """Divide distances from fp32 by the noise of 0.5. The bf16 run, which is not finite, has a distance of 0.25."""

    def train(model, seed, steps, dtype):
        finite = dtype != torch.bfloat16
        losses = torch.linspace(4, 0.1, steps) + 0.5 * seed - 0.25 * (not finite)
        return stability.Run(losses, torch.tensor([1.0, 2.0, 9.0, math.inf]), 1, finite, 3.0)

    figures = kept_figures(monkeypatch)
    monkeypatch.setattr(stability, "Images", lambda seed, *_: seed)
    monkeypatch.setattr(stability, "train", train)
    words = ["--models", "vil_tiny", "--steps", "40", "--device", "cpu", "--picture", str(tmp_path / "curves.png")]
    monkeypatch.setattr(sys, "argv", ["stability.py", *words])
    with pytest.raises(SystemExit, match="not finite"):
        stability.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| vil_tiny")]
    assert rows == [  # the last loss is the mean of two steps
        "| vil_tiny | fp32 | 4.000 | 0.150 | 0.000 | 0.00 | 2.00, 9.00 | 1 | yes | 3 |",
        "| vil_tiny | fp32, other images | 4.500 | 0.650 | 0.500 | 1.00 | 2.00, 9.00 | 1 | yes | 3 |",
        "| vil_tiny | bf16 | 3.750 | -0.100 | 0.250 | 0.50 | 2.00, 9.00 | 1 | NO | 3 |",
        "| vil_tiny | fp16 | 4.000 | 0.150 | 0.000 | 0.00 | 2.00, 9.00 | 1 | yes | 3 |",
    ]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for axis in figures[0].axes:
        assert [line.get_xdata()[[0, -1]].tolist() for line in axis.lines] == [[2, 40]] * 4
