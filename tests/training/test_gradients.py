"""Gradients in one piece of memory, and the average of weights."""

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn

from vil.training.gradients import FlatGradients
from vil.training.update import ListedEma


def test_gradients_add_up_where_parameters_show_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(7))
    x, y = torch.randn(2, 4, 3)
    (model(x).square().sum() + model(y).square().sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if name != "0.bias"}
    gradients = FlatGradients(model.parameters())
    assert gradients.norm() == 0
    assert not any(p.grad.storage_offset() % 64 for p in gradients.parameters)  # where the widest loads begin
    gradients.add(model(x).square().sum())
    gradients.add(model(y).square().sum())
    expected["unused"] = torch.zeros(7)
    torch.testing.assert_close(gradients.norm(), nn.utils.get_total_norm(expected.values()))
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters() if name != "0.bias"}, expected)
    assert model[0].bias.grad is None
    gradients.zero()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_parameters_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match=r"parameters must be float32 to be trained, not torch\.float16"):
        FlatGradients(nn.Linear(2, 2).half().parameters())


@pytest.mark.parametrize("options", [{}, dict(use_warmup=True, update_after_step=1)], ids=str)
def test_the_listed_average_is_timms_bit_for_bit(options):
    """Batch statistics and their count, too, and where either one goes on from a state."""
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
