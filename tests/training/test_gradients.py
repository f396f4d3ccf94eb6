"""Tests of the flat gradient buffer and of EMA weights."""

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from vil.training.gradients import FlatGradients
from vil.training.update import ListedEma, Update


def test_gradients_accumulate_in_the_parameters_grad():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(7))
    x, y = torch.randn(2, 4, 3)
    (model(x).square().sum() + model(y).square().sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if name != "0.bias"}
    gradients = FlatGradients(model.parameters())
    assert gradients.norm() == 0
    # each gradient is aligned to 64 values for vector loads
    assert not any(p.grad.storage_offset() % 64 for p in gradients.parameters)
    gradients.add(model(x).square().sum())
    gradients.add(model(y).square().sum())
    expected["unused"] = torch.zeros(7)
    torch.testing.assert_close(gradients.norm(), nn.utils.get_total_norm(expected.values()))
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters() if name != "0.bias"}, expected)
    assert model[0].bias.grad is None
    gradients.zero()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.mark.gpu
def test_gradients_of_a_graph_on_another_stream_do_not_warn(recwarn):
    model, images = nn.Linear(3, 5).cuda(), torch.ones(2, 3, device="cuda")
    gradients = FlatGradients(model.parameters())
    with torch.cuda.stream(torch.cuda.Stream()):
        kept = model(images)  # `kept` keeps the parameters' AccumulateGrad nodes of this stream alive
    torch.cuda.synchronize()
    gradients.add(model(images).sum())
    assert kept.grad_fn
    assert not recwarn.list


def test_parameters_must_be_float32():
    with pytest.raises(TypeError, match=r"parameters must be float32, got torch\.float16"):
        FlatGradients(nn.Linear(2, 2).half().parameters())


def test_a_fused_step_uses_the_current_learning_rates(monkeypatch):
    """The fused step reads learning rates from the device, while the optimizer's groups keep Python numbers."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch.manual_seed(0)
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (
        torch.optim.AdamW([{"params": [m.weight]}, {"params": [m.bias]}], fused=fused)
        for m, fused in zip(models, (True, False))
    )
    gradients = FlatGradients(models[0].parameters())
    update = Update(models[0], gradients, ours, torch.amp.GradScaler("cpu", enabled=False), None, None, False)
    for rates in ((0.1, 0.2), (0.1, 0.01), (0.3, 0.01), (0.3, 0.01)):
        for optimizer in (ours, theirs):
            for group, rate in zip(optimizer.param_groups, rates):
                group["lr"] = rate
        gradients.add(models[0](torch.ones(1, 3)).square().sum())
        models[1](torch.ones(1, 3)).square().sum().backward()
        norm = nn.utils.get_total_norm([p.grad for p in models[1].parameters()])
        torch.testing.assert_close(update(), norm)
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
        assert [group["lr"] for group in ours.param_groups] == [*rates]
    assert update.rates_on_device._version == 3  # rates are copied to the device only when they change


@pytest.mark.parametrize("options", [{}, dict(use_warmup=True, update_after_step=1)], ids=str)
def test_the_ema_is_bitwise_identical_to_timms(options):
    """EMA weights and batch statistics equal timm's, also after timm's state was loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    averages = [kind(model, decay=0.9, **options) for kind in (ListedEma, ModelEmaV3)]
    for step in range(6):
        model(torch.randn(4, 3))
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))
        for average in averages:
            average.update(model, step if options else None)
        states = [average.state_dict() for average in averages]
        assert states[0]["module.1.num_batches_tracked"] == step + 1
        torch.testing.assert_close(*states, rtol=0, atol=0)
        averages[0].load_state_dict(states[1])
