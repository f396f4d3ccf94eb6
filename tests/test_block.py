"""The fused block against the plain one: its algebra on a CPU with plain kernels, and on a GPU as it is."""

import copy

import pytest
import torch
import torch.nn.functional as F

from vil import block as vil_block
from vil.block import Block, LonghornMixer, MambaMixer
from vil.kernels import block as operator
from vil.kernels import longhorn_scan, selective_scan

MIXERS = [LonghornMixer, MambaMixer]


def make_block(mixer, dim, drop_path=0.0, seed=0, **dd):
    """A block none of whose parameters is at a special value."""
    torch.manual_seed(seed)
    block = Block(dim, mixer, drop_path=drop_path)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith(("bias", "skip", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return block.to(**dd)


def outcome(block, x, dy, autocast=None):
    """Output and every gradient, by name."""
    x = x.detach().clone().requires_grad_()
    block.zero_grad()
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        y = block(x)
    y.backward(dy.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


def relative_error(value, truth):
    return ((value.double() - truth.double()).norm() / truth.double().norm()).item()


def gradients(function, inputs, dy):
    """Gradients of `function(*inputs)` by autograd, None for inputs that are None."""
    inputs = [t if t is None else t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        y = function(*inputs)
    found = iter(torch.autograd.grad(y, [t for t in inputs if t is not None], dy))
    return [None if t is None else next(found) for t in inputs]


class Scale(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, y):
        return y * self.scale[:, None, None]


class PlainKernels:
    """The kernels that the fused block calls, in plain PyTorch; their gradients by autograd."""

    @staticmethod
    def rms_norm(x, eps, dtype):
        scale = (x.square().mean(-1) + eps).rsqrt()
        return (x * scale[:, None]).to(dtype), scale, x.clone()

    @staticmethod
    def rms_norm_backward(dxhat, xhat, scale, dresidual):
        return dresidual + scale[:, None] * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))

    @staticmethod
    def pack(norm, in_proj, out_proj, directions, dtype):
        half = len(directions) // 2
        conv, conv_bias, x_proj, step, step_bias, skip = [
            torch.stack(pair).to(dtype) for pair in list(zip(directions[:half], directions[half:]))[:6]
        ]
        rank = step.shape[2]
        x_proj = torch.cat([F.pad(x_proj[:, :rank], (0, 0, 0, -rank % 8)), x_proj[:, rank:]], 1)
        step = F.pad(step, (0, -rank % 8))
        return [in_proj * norm, out_proj.clone(), conv.squeeze(2), conv_bias, x_proj, step, step_bias, skip]

    @staticmethod
    def convolve(u, conv, conv_bias):
        def one(u, weight, bias):
            taps = weight.shape[1]
            return F.silu(F.conv1d(F.pad(u.mT, (taps - 1, 0)), weight[:, None], bias, groups=len(weight)).mT)

        return torch.stack([one(u, conv[0], conv_bias[0]), one(u.flip(1), conv[1], conv_bias[1]).flip(1)])

    @classmethod
    def convolve_backward(cls, u, dv, conv, conv_bias, du):
        found, dconv, dconv_bias = gradients(cls.convolve, [u, conv, conv_bias], dv)
        du.copy_(found)
        return torch.cat([dconv.mT, dconv_bias[:, None]], 1)

    @staticmethod
    def gate(y, z, scale, keep):
        mean = y.mean(0)
        return mean * F.silu(z) * (1 if scale is None else scale[:, None, None]), mean

    @classmethod
    def gate_backward(cls, dgated, mean, z, scale, dy, dz):
        def one(mean, z):
            return cls.gate(mean[None], z, scale, True)[0]

        dmean, found = gradients(one, [mean, z], dgated)
        dy.copy_(dmean / 2)
        dz.copy_(found)
        return one(mean, z)

    @staticmethod
    def scan(backend, recurrence, x, logits, k, q, rates, skip, bias, reverse, keep):
        if recurrence == "longhorn":
            return longhorn_scan(x, logits, k, q, skip, bias, reverse=reverse), x.new_empty(0)
        return selective_scan(x, logits, rates, k, q, skip, bias, reverse=reverse), x.new_empty(0)

    @classmethod
    def scan_backward(cls, backend, recurrence, dy, x, logits, k, q, rates, skip, bias, states, reverse):
        def one(*inputs):
            return cls.scan(backend, recurrence, *inputs, reverse, False)[0]

        *found, dskip, dbias = gradients(one, [x, logits, k, q, rates, skip, bias], dy)
        return *found, torch.stack([dskip, dbias], 1)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_block_operator_has_the_gradients_of_the_plain_block(mixer, scaled, monkeypatch):
    """In fp64, kernels aside: folding, projections and every derivative by hand."""
    monkeypatch.setattr(operator, "elementwise", PlainKernels)
    monkeypatch.setattr(operator.gpu, "scan", PlainKernels.scan)
    monkeypatch.setattr(operator.gpu, "scan_backward", PlainKernels.scan_backward)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    block = make_block(mixer, 24, dtype=torch.float64)
    x, dy = torch.randn(2, 3, 9, 24, dtype=torch.float64)
    scale = torch.tensor([0.0, 1.25, 1.25], dtype=torch.float64) if scaled else None
    if scaled:
        block.drop_path = Scale(scale)
    expected = outcome(block, x, dy)

    norm, m = block.norm, block.mixer
    weights = norm.weight, m.in_proj.weight, m.out_proj.weight
    directions = [p for direction in m.directions for p in direction.fused_parameters()]
    with torch.no_grad():
        y, *saved = operator._block(m.recurrence, x, scale, norm.eps, *weights, directions, x.dtype, True)
        dx, *found = operator._block_backward(m.recurrence, dy, scale, *weights, directions, saved)
    torch.testing.assert_close(y, expected["y"])
    torch.testing.assert_close(dx, expected["x"])
    names = {id(p): name for name, p in block.named_parameters()}
    assert len(found) == len(names)
    for parameter, gradient in zip([*weights, *directions], found):
        torch.testing.assert_close(
            gradient, expected[names[id(parameter)]], msg=lambda m: f"{names[id(parameter)]}: {m}"
        )


def test_plain_path_is_taken_without_a_gpu():
    assert not vil_block.runs_fused(make_block(LonghornMixer, 16), torch.randn(1, 5, 16))
