"""Tests of evaluating models on batches, and of the precision used (fp32 or mixed)."""

from types import SimpleNamespace

import naive_evaluation as naive
import pytest
import timm
import torch

from vil import devices
from vil.data.device.batched_transforms import finish
from vil.data_config import chosen_data_config
from vil.evaluation import evaluator
from vil.evaluation.evaluator import Evaluation, Evaluator


class Guess(torch.nn.Module):
    """Model that returns its input as logits; in training mode, dropout zeroes nearly all logits."""

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.99)

    def forward(self, images):
        return self.dropout(images.flatten(1)) @ torch.eye(images.shape[-1])


def test_a_model_with_one_mean_for_all_channels_normalizes_all_channels():
    model = timm.create_model("test_vit", pretrained_cfg_overlay=dict(mean=(0.5,), std=[0.25]))
    config = chosen_data_config(model)
    assert (config["mean"], config["std"]) == ((0.5,) * 3, (0.25,) * 3)
    images = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    torch.testing.assert_close(finish(images, config["mean"], config["std"]), torch.full((2, 3, 4, 4), 2.0))


def test_models_are_evaluated_in_eval_mode_and_their_mode_is_restored(monkeypatch):
    ticks = iter([100.0, 104.0])
    monkeypatch.setattr(evaluator, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    pixels = torch.stack([torch.randperm(7) for _ in range(10)]).to(torch.uint8)[:, None, None]
    targets = torch.arange(10) % 7
    targets[[2, 6]] = -1  # the loader marks unreadable images with the target -1
    models, observed = [Guess().train(), Guess().eval()], []
    images = (pixels.float() - 2) / 0.5
    evaluate = Evaluator(models, (1, 1, 7), torch.device("cpu"), torch.autocast("cpu", torch.bfloat16), batch_size=6)
    results = evaluate(
        [(images[:6], targets[:6]), (images[6:7], targets[6:7]), (images[7:], targets[7:])],
        lambda targets, logits: observed.extend(zip(targets.tolist(), *logits)),
    )
    images = images.flatten(1)
    readable = targets >= 0
    expected = naive.numbers(images[readable].bfloat16().double().numpy(), targets[readable].numpy())
    for result in results:
        assert {name: getattr(result, name) for name in expected} == pytest.approx(expected, rel=1e-5)
        assert (result.unreadable, result.images_per_second) == (2, 10 / 4)
    assert [model.training for model in models] == [True, False]
    monkeypatch.undo()
    (alone, _) = evaluate([(images[:1, None, None], targets[:1])])
    assert alone.loss == pytest.approx(
        naive.numbers(images[:1].bfloat16().double().numpy(), targets[:1].numpy())["loss"]
    )
    (none, _) = evaluate([(images[2:3, None, None], targets[2:3])])
    assert (none.images, none.unreadable, none.loss) == (0, 1, 0.0)
    assert [target for target, *_ in observed] == targets.tolist()
    for i, (_, *logits) in enumerate(observed):
        assert [x.dtype for x in logits] == [torch.bfloat16] * 2
        assert all(torch.equal(x, images.bfloat16()[i]) for x in logits)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_is_enabled_only_on_gpus_and_on_request():
    mixed = devices.autocast(torch.device("cuda"), True, "float16")
    assert (mixed.device, mixed.fast_dtype) == ("cuda", torch.float16)
    for device, enabled in (("cuda", False), ("cpu", True)):
        with devices.autocast(torch.device(device), enabled, "bfloat16"):
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_autocast_enabled("cuda")
    assert devices.default_device() == ("cuda" if torch.cuda.is_available() else "cpu")


def test_without_readable_images_accuracy_is_0_with_an_interval_of_0_to_100():
    nothing = Evaluation(images=0, top1_correct=0, top5_correct=0, loss=0.0, unreadable=3, images_per_second=9)
    assert (nothing.top1, nothing.top5, nothing.top1_interval) == (0.0, 0.0, (0.0, 100.0))
    one = Evaluation(images=1, top1_correct=1, top5_correct=1, loss=0.0, unreadable=0, images_per_second=9)
    assert (one.top1, one.top5) == (100.0, 100.0)
