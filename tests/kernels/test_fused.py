"""Tests of which operator a block runs, and of which changes of a block make it run unfused."""

import runpy

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from vil.kernels import backends
from vil.kernels.block import block_op, cpu
from vil.models import dispatch
from vil.models.block import Block, LonghornMixer, MambaMixer
from vil.models.dispatch import fused_block, set_fused

OPERATORS = {"cuda": block_op.run_blocks, "cpu": cpu.run_blocks, "reference": None}


@pytest.fixture(params=OPERATORS)
def backend(request, monkeypatch):
    """Simulate a machine on which CPU tensors use the backend `request.param`."""
    monkeypatch.setattr(
        backends, "backend_for", lambda device: request.param if device.type == "cpu" else "reference"
    )  # fmt: skip
    return request.param


def found(block, x):
    """Return the fused operator that the block would run, or None."""
    fused = fused_block(block, x)
    return fused and fused[0]


def replaced(place, part):
    """Return a function that replaces the submodule at the path `place` of a block with the module `part`."""
    place, _, last = place.rpartition(".")
    return lambda block: block.get_submodule(place).add_module(last, part)


def hooked(hook, place):
    return lambda block: getattr(block.get_submodule(place), f"register_{hook}_hook")(lambda *_: None)


def with_parameter(place):
    return lambda block: block.get_submodule(place).register_parameter("eps_scale", nn.Parameter(torch.ones(32)))


def without_bias(block):
    block.mixer.directions[0].conv1d.bias = None


FITTING = {
    "nothing": lambda block: None,
    "Mamba": lambda block: block.add_module("mixer", MambaMixer(16)),
    "a hook on the block": hooked("forward", ""),  # hooks on the block itself also run if the block is fused
    "8 states": replaced("mixer", LonghornMixer(16, state_size=8)),
    **{f"{n} taps": replaced("mixer", LonghornMixer(16, conv_width=n)) for n in (2, 3)},
}
PLACES = ("drop_path", "norm", "mixer", "mixer.directions.1", "mixer.directions.1.conv1d", "mixer.out_proj")
OTHERS = {
    **{
        f"a {hook} hook at {p}": hooked(hook, p)
        for hook in ("forward", "forward_pre", "full_backward", "full_backward_pre")
        for p in PLACES
    },
    "a forward of an instance": lambda block: setattr(block.mixer.out_proj, "forward", lambda y: y),
    "a weight that stands for others": lambda block: setattr(
        block.mixer.in_proj, "weight", nn.Parameter(TwoTensor(*2 * [block.mixer.in_proj.weight.detach()]))
    ),
    "a weight in fp64": lambda block: block.mixer.in_proj.double(),
    "a block in fp64": lambda block: block.double(),
    "another norm": replaced("norm", nn.RMSNorm(16)),
    "no norm": replaced("norm", nn.Identity()),
    "no projection": replaced("mixer.directions.0.x_proj", nn.Identity()),
    "a projection in a container": replaced("mixer.out_proj", nn.Sequential(nn.Linear(32, 16, bias=False))),
    "a bias": replaced("mixer.in_proj", nn.Linear(16, 64)),
    "a bias of keys": replaced("mixer.directions.0.x_proj", nn.Linear(32, 33)),
    "no bias of a convolution": without_bias,
    "a parameter more of a direction": with_parameter("mixer.directions.1"),
    "a parameter more of the mixer": with_parameter("mixer"),
    "12 states": replaced("mixer", LonghornMixer(16, state_size=12)),
    **{f"{n} taps": replaced("mixer", LonghornMixer(16, conv_width=n)) for n in (1, 5)},
}


@pytest.mark.parametrize("change", FITTING)
def test_an_unmodified_block_runs_fused(change, backend):
    block = Block(16, LonghornMixer, drop_path=0.1)
    FITTING[change](block)
    assert found(block, torch.randn(2, 5, 16)) is OPERATORS[backend]


@pytest.mark.parametrize("change", OTHERS)
def test_blocks_with_hooks_or_replaced_modules_run_unfused(change, backend):
    block = Block(16, LonghornMixer, drop_path=0.1)
    OTHERS[change](block)
    assert found(block, torch.randn(2, 5, 16)) is None


def test_the_operator_takes_a_residual_stream_in_fp32_and_weights_beside_it(backend):
    block, x = Block(16, LonghornMixer), torch.randn(2, 5, 16)
    for other in (x.double(), x.bfloat16(), x[:0], x.to("meta")):
        assert found(block, other) is None
    for name, p in Block(16, MambaMixer).named_parameters():
        block, (place, _, weight) = Block(16, MambaMixer), name.rpartition(".")
        setattr(block.get_submodule(place), weight, nn.Parameter(p.to("meta")))
        assert found(block, x) is None, name
    # Blocks with 16-bit weights run fused only on GPUs.
    assert found(Block(16, LonghornMixer).bfloat16(), x) is (block_op.run_blocks if backend == "cuda" else None)


def test_set_fused_and_the_environment_switch_it(backend, monkeypatch):
    block, x = Block(16, LonghornMixer), torch.randn(2, 5, 16)
    for enable in (False, True):
        set_fused(enable)
        assert found(block, x) is (OPERATORS[backend] if enable else None)
    for value, enable in (("", True), ("0", False)):
        monkeypatch.setenv("VIL_FUSED", value)
        assert runpy.run_path(dispatch.__file__, run_name="vil.models.again")["_fused"] is enable
