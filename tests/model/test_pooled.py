"""Tests of pooled models against loops over patches, rows and tokens that follow docs/architecture.md."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import vil
from vil.kernels.scan import reference
from vil.models.block import BidirectionalMixer, Block, Blocks, LonghornMixer, MambaMixer, RMSNorm

MIXERS = [LonghornMixer, MambaMixer]
# Patch grids (rows, columns). In some grids, the class token is inside a row.
GRIDS = [(3, 4), (4, 3), (3, 3), (1, 5), (5, 1), (1, 1), (2, 2)]


def one_direction(direction, u, groups):
    """Return the output (L, D) of one scan direction for tokens (L, D) in scan order, in plain loops.

    The recurrence reads the mean of each group of tokens.
    """
    w = dict(direction.named_parameters())
    D, R = w["step_proj.weight"].shape
    padded = torch.cat([u.new_zeros(3, D), u])
    v = [w["conv1d.bias"] + sum(w["conv1d.weight"][:, 0, i] * padded[t + i] for i in range(4)) for t in range(len(u))]
    v = [a * torch.sigmoid(a) for a in v]
    read = torch.stack([sum(v[t] for t in group) / len(group) for group in groups])
    step, k, q = (read @ w["x_proj.weight"].T).split([R, 16, 16], dim=-1)
    logits = step @ w["step_proj.weight"].T + w["step_proj.bias"]
    read, logits, k, q = (t[None] for t in (read, logits, k, q))
    if "A_log" in w:
        y = reference.selective(read, logits, -w["A_log"].exp(), k, q)
    else:
        y = reference.longhorn(read, logits, k, q)
    out = {t: y[0, i] + w["skip"] * v[t] for i, group in enumerate(groups) for t in group}
    return torch.stack([out[t] for t in range(len(u))])


def pooled_block(block, x, h, w, axis):
    """Compute a pooled block for one sequence x (L, C) whose patches form a grid (h, w)."""
    L, middle = h * w + 1, h * w // 2
    grid = [(i, j) for i in range(h) for j in range(w)]
    if axis == "columns":
        grid.sort(key=lambda place: (place[1], place[0]))
    where = [t for t in range(L) if t != middle]  # token positions of the patches
    tokens = [where[i * w + j] for i, j in grid]
    tokens.insert(middle, middle)
    lines = grid[-1][axis == "columns"] + 1
    groups = [where[r * (L - 1) // lines : (r + 1) * (L - 1) // lines] for r in range(lines)]
    groups.insert(lines // 2, [middle])
    x = x[tokens]
    normed = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * block.norm.weight
    u, z = (normed @ block.mixer.in_proj.weight.T).chunk(2, dim=-1)
    forward = one_direction(block.mixer.directions[0], u, groups)
    turned = [[L - 1 - t for t in group] for group in reversed(groups)]
    backward = one_direction(block.mixer.directions[1], u.flip(0), turned).flip(0)
    out = x + ((forward + backward) / 2 * F.silu(z)) @ block.mixer.out_proj.weight.T
    return out[torch.tensor(tokens).argsort()]


def random_block(mixer, axis, dim=8):
    torch.manual_seed(0)
    block = Block(dim, mixer, pool=axis, dtype=torch.float64)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return block


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_pooled_block_equals_the_loops(mixer, axis, grid):
    block, x = random_block(mixer, axis), torch.randn(2, grid[0] * grid[1] + 1, 8, dtype=torch.float64)
    weights = [x.requires_grad_(), *block.parameters()]
    dy = torch.randn_like(x)
    expected = torch.stack([pooled_block(block, one, *grid, axis) for one in x])
    actual = block(x, grid=grid)
    assert_close(actual, expected)
    for found, truth in zip(torch.autograd.grad(actual, weights, dy), torch.autograd.grad(expected, weights, dy)):
        assert_close(found, truth)


def test_pooled_models_alternate_rows_and_columns_and_load_weights_of_full_models():
    pooled = timm.create_model("vim_tiny_pooled", depth=3, num_classes=7, img_size=(32, 80)).double().eval()
    full = timm.create_model("vim_tiny", depth=3, num_classes=7, img_size=(32, 80)).double().eval()
    pooled.load_state_dict(full.state_dict())
    images = torch.randn(2, 3, 32, 80, dtype=torch.float64)
    x = full.embed(images)
    for block, axis in zip(full.blocks, ("rows", "columns", "rows")):
        x = torch.stack([pooled_block(block, one, 2, 5, axis) for one in x])
    expected = full.head(full.norm(x)[:, 5])
    assert_close(pooled(images), expected.to(pooled.head.weight.dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["vil_tiny_pooled", "vim_tiny_pooled"])
def test_pooled_models_support_timms_interface(name):
    model = timm.create_model(name, depth=2, img_size=(32, 48), num_classes=5)
    images = torch.randn(2, 3, 32, 48)
    logits = model(images)
    logits.sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.set_grad_checkpointing()
    calls = []
    # With gradient checkpointing, forward hooks still run.
    watched = model.blocks, model.blocks[0].norm
    handles = [m.register_forward_hook(lambda module, *_: calls.append(type(module))) for m in watched]
    model(images).sum().backward()
    for handle in handles:
        handle.remove()
    assert calls == [RMSNorm, Blocks, RMSNorm]
    assert_close([p.grad for p in model.parameters()], plain)
    assert_close(torch.no_grad()(model)(images), logits)
    assert_close(model.forward_head(model.forward_intermediates(images)[0]), logits)
    # all parameters except those of the first block are frozen
    first = model.requires_grad_(False).blocks[0].requires_grad_().norm.weight
    model.set_grad_checkpointing(False)
    assert_close(torch.autograd.grad(model(images).sum(), first)[0], first.grad)
    model.eval()
    features = timm.create_model(name, depth=2, features_only=True, dynamic_img_size=True, out_indices=[1])
    features.load_state_dict(model.state_dict(), strict=False)
    assert features(torch.randn(1, 3, 40, 100))[0].shape == (1, 192, 3, 7)


def test_mixers_and_inputs_that_cannot_be_pooled_are_rejected():
    class Mine(BidirectionalMixer):
        pass

    with pytest.raises(ValueError, match="got Mine"):
        vil.VisionLonghorn(mixer=Mine, pooled=True)
    with pytest.raises(ValueError, match="got 7.*grid"):
        random_block(LonghornMixer, "rows")(torch.randn(1, 7, 8, dtype=torch.float64))
    for grid, tokens in (((2, 2), 5), ((2, 4), 9)):
        with pytest.raises(ValueError, match=f"{tokens}.*got 7"):
            random_block(LonghornMixer, "rows")(torch.randn(1, 7, 8, dtype=torch.float64), grid=grid)


def test_blocks_in_a_user_defined_sequential_equal_a_slice_of_blocks():
    model = timm.create_model(
        "vil_tiny_pooled", dynamic_img_size=True, depth=4, embed_dim=32, img_size=64, patch_size=16
    )
    images = torch.randn(2, 3, 64, 96)  # the patch grid is not square
    blocks = model.blocks
    model.blocks = blocks[:2]
    sliced = model(images)

    model.blocks = torch.nn.Sequential(*blocks[:2])
    assert_close(model(images), sliced)
    model.set_grad_checkpointing()
    assert_close(model(images), sliced)
