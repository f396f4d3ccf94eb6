"""Gradients in one piece of memory."""

import pytest
import torch
from torch import nn

from vil.training.gradients import FlatGradients


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
