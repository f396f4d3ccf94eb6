"""Gradients in one piece of memory."""

import pytest
import torch
from torch import nn

from vil.training.gradients import FlatGradients


def model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(7))
    return model, lambda x: model(x).square().sum()


def test_gradients_add_up_where_parameters_show_them():
    model, loss = model_and_loss()
    x, y = torch.randn(2, 4, 3)
    (loss(x) + loss(y)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    gradients = FlatGradients(model.parameters())
    assert gradients.norm() == 0
    gradients.add(loss(x))
    gradients.add(loss(y))
    for name, parameter in model.named_parameters():
        if name == "unused":
            assert not parameter.grad.any()
        elif name == "0.bias":
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, expected[name])
    known = [g for g in expected.values() if g is not None]
    torch.testing.assert_close(gradients.norm(), nn.utils.get_total_norm(known))
    gradients.zero()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_parameters_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match=r"parameters must be float32 to be trained, not torch\.float16"):
        FlatGradients(nn.Linear(2, 2).half().parameters())
