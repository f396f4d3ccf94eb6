"""Blocks with random weights for tests, and the fused block operator run on a CPU."""

import contextlib
import math

import emulator
import torch
from scans import relative_error

from vil.kernels.block import block_op, gate_outproj, kernels
from vil.kernels.block.weights import BlockWeights, DirectionWeights, Options
from vil.kernels.cuda import products
from vil.models.block import Block, Blocks, LonghornMixer, MambaMixer

MIXERS = [LonghornMixer, MambaMixer]


def make_block(mixer, dim, drop_path=0.0, seed=0, pool=None, **dd):
    """Return a block with random weights. Noise is added to biases, norm weights and skip weights."""
    torch.manual_seed(seed)
    block = Block(dim, mixer, drop_path, pool)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith(("bias", "skip", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return block.to(**dd)


def outcome(block, x, dy, autocast=None, **kwargs):
    """Return a dict of the output and all gradients, by name, of a block or a sequence of blocks."""
    x = x.detach().clone().requires_grad_()
    block.zero_grad()
    run = Blocks(block) if isinstance(block, Block) and "class_token_only" in kwargs else block
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        y = run(x, **kwargs)
    y.backward(dy[:, : y.shape[1]].to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}


def weights_of(block, detach=False):
    """Return a block's weights in the form that the fused block operators accept."""
    if detach:
        return BlockWeights.of([p.detach() for p in weights_of(block).flat()])
    mixer = block.mixer
    first, second = (
        DirectionWeights(
            d.conv1d.weight, d.conv1d.bias, d.x_proj.weight, d.step_proj.weight, d.step_proj.bias, d.skip,
            getattr(d, "A_log", None),
        ) for d in mixer.directions
    )  # fmt: skip
    return BlockWeights(block.norm.weight, mixer.in_proj.weight, mixer.out_proj.weight, (first, second))


def options_of(block, dtype, class_token_only=False, norm_next=False, lines=None):
    return Options(block.mixer.recurrence, block.norm.eps, dtype, class_token_only, norm_next, lines)


def on_an_emulated_gpu(monkeypatch, multiprocessors=1, hopper=False):
    """Apply `emulator.as_if_on_a_gpu`, and emulate 16-bit matrix products with fp32 results, as on GPUs."""

    def product(a, b):
        return a.float() @ b.float()

    emulator.as_if_on_a_gpu(monkeypatch, multiprocessors, hopper)
    for name in ("mm_in_fp32", "bmm_in_fp32"):
        monkeypatch.setattr(products, name, product)
    for module in (gate_outproj, kernels):
        monkeypatch.setattr(module, "add_product", lambda x, a, b: x.add_(product(a, b)))


class OnGpu(torch.Tensor):
    """CPU tensor that reports the second GPU as its device."""

    device = torch.device("cuda", 1)

    def get_device(self):
        return 1


class Scale(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, y):
        return y * self.scale[:, None, None]


@contextlib.contextmanager
def operator_on_a_cpu():
    """Register `vil::block` for CPU tensors, for tests that replace the operator's kernels."""
    with torch.library._scoped_library("vil", "IMPL") as library:
        library.impl("block", lambda *arguments: block_op._forward(*arguments), "CPU")
        library.impl("block_backward", lambda *arguments: block_op._backward(*arguments), "CPU")
        yield


def close(value, truth, dtype, name, roundings=1):
    """Assert that a value equals an fp64 reference, up to the rounding of the result and of intermediate values."""
    own = {torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 2e-5}[value.dtype]
    if name == "conv_xproj":
        own = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert value.shape == truth.shape, name
    rounded = relative_error(truth.to(value.dtype), truth)
    assert relative_error(value, truth) <= math.hypot(rounded * math.sqrt(roundings), own), name
