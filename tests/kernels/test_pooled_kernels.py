"""The kernels of pooled blocks against the definitions beside them: emulated on a CPU, and on a GPU."""

import emulator
import pytest
import torch
from blocks import close
from emulator import EMULATED
from vil.kernels.block import pool, pooled_conv_backward, pooled_gate
from vil.kernels.block.lines import Lines
from vil.kernels.cuda import compiler, hardware

# grids with the class token between lines and in one, lines of one patch, one line, and one patch alone
GRIDS = [(4, 6), (3, 5), (14, 14), (1, 7), (7, 1), (1, 1), (2, 37)]
DEVICES = [pytest.param("cpu", marks=EMULATED), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def case(device, grid, columns, dtype, monkeypatch, poison):
    """Inputs of all three kernels on strided halves, and the same in fp64."""
    if device == "cpu":
        monkeypatch.setattr(compiler, "launch", emulator.launch)
        monkeypatch.setattr(hardware, "multiprocessors", lambda device: 1)
    lines, g = Lines.of(*grid, columns), torch.Generator().manual_seed(0)
    B, L, S, D, K = 3, lines.L, lines.S, 40, 4

    def random(*size, dtype=dtype):
        return torch.randn(size, generator=g).to(device, dtype)

    uz = random(B, L, 2 * D)
    tensors = dict(
        u=uz[..., :D], z=uz[..., D:], y=random(2, B, S, D), conv=random(2, D, K, dtype=torch.float32),
        bias=random(2, D, dtype=torch.float32), skip=random(2, D, dtype=torch.float32),
        scale=random(B, dtype=torch.float32), dgated=random(B, L, D), dmeans=random(2, B, S, D),
    )  # fmt: skip
    return lines, tensors, {name: t.double() for name, t in tensors.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pooled_kernels_equal_their_definitions(case, dtype):
    lines, t, exact = case

    def forward(t, module_pool, module_gate):
        means = module_pool(t["u"], t["conv"], t["bias"], lines)
        of_gate = [t[name] for name in ("u", "z", "y", "conv", "bias", "skip")]
        return means, *(module_gate(*of_gate, scale, lines) for scale in (t["scale"], None))

    def backward(t, module_gate, module_conv):
        duz, e = torch.empty(*t["u"].shape[:2], 2 * t["u"].shape[2]).to(t["u"]), t["dgated"].clone()
        du, dz = duz.chunk(2, dim=-1)
        rest = [t[name] for name in ("u", "z", "y", "conv", "bias", "skip", "scale")]
        found = module_gate(e, *rest, dz, lines)
        filters, skips = module_conv(t["u"], t["dgated"], t["dmeans"], t["conv"], t["bias"], t["skip"], du, lines)
        return *found, e, dz, du, filters, skips

    for run, kernels, plain in (
        (forward, (pool.pool, pooled_gate.pooled_gate), (pool.plain, pooled_gate.plain)),
        (backward, (pooled_gate.pooled_gate_backward, pooled_conv_backward.pooled_conv_backward),
         (pooled_gate.plain_backward, pooled_conv_backward.plain)),
    ):  # fmt: skip
        found, again, truth = run(t, *kernels), run(t, *kernels), run(exact, *plain)
        for i, (value, repeated, expected) in enumerate(zip(found, again, truth)):
            assert torch.equal(value, repeated)
            if value.dim() - expected.dim() == 0 and len(value) != len(expected):
                value, expected = value.sum(0), expected.sum(0)
            close(value, expected, dtype, f"{run.__name__} {i}")
