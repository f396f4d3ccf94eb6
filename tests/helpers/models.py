"""Small models for tests, and comparisons of their outputs and gradients."""

import pytest
import timm
import torch

SMALL = dict(embed_dim=32, depth=2, img_size=48, num_classes=7)  # 48-pixel images have 3 x 3 patches
KINDS = pytest.mark.parametrize("name", ["vil_tiny", "vim_tiny"])


def small(name="vil_tiny", **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **kwargs})


def random_images(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def with_random_parameters(module):
    """Convert a model to fp64 and add noise to all parameters, so that no bias is zero and no scale is one."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in module.double().parameters():
            p += 0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64)
    return module


def gradients(output, module):
    dy = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    return torch.autograd.grad(output, list(module.parameters()), dy)


def assert_same_output_and_gradients(module, actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    names = [name for name, _ in module.named_parameters()]
    for name, a, e in zip(names, gradients(actual, module), gradients(expected, module)):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10, msg=name)


def stochastic_depth(rates, images, seed, dtype=torch.float64):
    """Sample the stochastic-depth factor of each image in each block, 0 or 1 / (1 - rate), as timm's DropPath does."""
    torch.manual_seed(seed)
    kept = [torch.empty(images, dtype=dtype).bernoulli_(1 - rate) if rate else None for rate in rates]
    return [k if k is None else k / (1 - rate) for k, rate in zip(kept, rates)]
