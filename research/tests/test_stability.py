"""Tests of research/stability.py: synthetic images and measurements."""

import math

import pytest
import timm
import torch
from figures import kept_figures
from processes import call
from timm.models import register_model
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


@register_model
def vil_two_blocks(pretrained=False, **kwargs):
    return timm.create_model("vil_tiny", depth=2, **kwargs)


def images(batch, noise=1.0):
    return stability.Images(0, batch, 32, noise, torch.device("cpu"))


def test_the_norm_of_the_gradient_is_that_of_fp32_whatever_the_loss_is_scaled_by():
    norms = [stability.train("vil_two_blocks", images(8), 1, dtype).gradient_norms for dtype in (None, torch.float16)]
    torch.testing.assert_close(*norms, rtol=0.02, atol=0)


def test_steps_that_overflow_are_skipped_and_counted_and_an_infinite_loss_is_noticed():
    run = stability.train("vil_two_blocks", images(1), 6, torch.float16)  # the scaler's initial scale overflows fp16
    assert 0 < run.skipped == (~run.gradient_norms.isfinite()).sum() < 6
    assert run.finite
    assert not stability.train("vil_two_blocks", images(2, noise=math.inf), 2, None).finite


def test_a_difference_of_losses_needs_both_runs_and_no_number_of_steps():
    runs = {name: stability.Run(torch.tensor(losses), None, 0, True, 1.0) for name, losses in (
        ("fp32", [1.0, 2.0]), ("bf16", [1.0, 4.5]),
    )}  # fmt: skip
    assert stability.farthest(runs, "bf16") == 2.5
    assert math.isnan(stability.farthest(runs, "fp16"))
    assert math.isnan(stability.farthest({"bf16": runs["bf16"]}, "bf16"))


def test_the_rate_rises_to_its_peak_and_the_norm_is_that_of_all_gradients():
    rates, norms = [], []

    def record(optimizer, *_):
        rates.append(optimizer.param_groups[0]["lr"].item())
        squares = [p.grad.square().sum() for group in optimizer.param_groups for p in group["params"]]
        norms.append(sum(squares).sqrt())

    hook = register_optimizer_step_pre_hook(record)
    try:
        run = stability.train("vil_two_blocks", images(2), 4, None)
    finally:
        hook.remove()
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    torch.testing.assert_close(run.gradient_norms, torch.stack(norms), rtol=1e-3, atol=0)


def test_a_row_has_the_distance_from_fp32_in_units_of_the_noise_and_the_plot_every_run(monkeypatch):
    """Each row of the table shows a run's distance from fp32, also divided by the distance between two fp32 runs."""

    def a_run(offset, finite=True):
        norms = torch.tensor([1.0, 2.0, 9.0, math.inf])
        return stability.Run(torch.linspace(4, 0.1, 40) + offset, norms, 1, finite, 3.0)

    runs = {"fp32": a_run(0), "fp32, other images": a_run(0.5), "bf16": a_run(-0.25, finite=False), "fp16": a_run(0)}
    assert [stability.row("vil_tiny", runs, name) for name in runs] == [  # the last loss is the mean of two steps
        "| vil_tiny | fp32 | 4.000 | 0.150 | 0.000 | 0.00 | 2.00, 9.00 | 1 | yes | 3 |",
        "| vil_tiny | fp32, other images | 4.500 | 0.650 | 0.500 | 1.00 | 2.00, 9.00 | 1 | yes | 3 |",
        "| vil_tiny | bf16 | 3.750 | -0.100 | 0.250 | 0.50 | 2.00, 9.00 | 1 | NO | 3 |",
        "| vil_tiny | fp16 | 4.000 | 0.150 | 0.000 | 0.00 | 2.00, 9.00 | 1 | yes | 3 |",
    ]
    figures = kept_figures(monkeypatch)
    assert stability.plot({"vil_tiny": runs}).startswith(b"\x89PNG")
    for axis in figures[0].axes:
        assert [line.get_xdata()[[0, -1]].tolist() for line in axis.lines] == [[2, 40]] * 4


def test_the_program_prints_a_row_of_every_run_plots_the_curves_and_fails_if_a_loss_is_not_finite(tmp_path, capsys):
    words = ["--models", "vil_two_blocks", "--steps", 2, "--batch", 2, "--img-size", 32, "--device", "cpu"]
    call(stability.main, *words, "--picture", tmp_path / "curves.png")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| vil_two_blocks")]
    assert [row.split(" | ")[1] for row in rows] == list(stability.RUNS)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="not finite"):
        call(stability.main, *words, "--runs", "fp32", "--noise", "inf")
