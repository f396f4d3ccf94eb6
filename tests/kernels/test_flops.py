"""Tests of the FLOPs that FlopCounterMode counts, against matrix products counted by hand."""

import sys
from pathlib import Path

import pytest
import timm
import torch
from blocks import options_of, weights_of
from torch.utils.flop_counter import FlopCounterMode

from vil.kernels import flops, longhorn_scan, selective_scan
from vil.kernels.block import block_op
from vil.kernels.scan import scan_op
from vil.models.block import Blocks
from vil.models.dispatch import lines_of


def counted(function, *arguments, **keywords):
    """Return a function's result and the FLOPs that FlopCounterMode counts for it."""
    with FlopCounterMode(display=False, custom_mapping=flops.CORRECTED) as counter:
        returned = function(*arguments, **keywords)
    return returned, counter.get_total_flops()


def forward_by_hand(C, depth, scanned=197, tokens=197, classes=1000, states=16, taps=4):
    """Return a model's FLOPs per image, counted from the shapes of its layers.

    A multiply-add of a matrix product or convolution counts 2 FLOPs, and a state element per token counts 7 FLOPs.
    `scanned` is the number of tokens that the recurrence reads.
    """
    D, R = 2 * C, C // 16
    patches = (tokens - 1) * (3 * 16 * 16) * C
    in_and_out = tokens * C * (2 * D) + tokens * D * C
    convolution = (tokens + taps - 1) * D * taps
    projections = scanned * D * (R + 2 * states) + scanned * R * D
    head = C * classes
    products = patches + depth * (in_and_out + 2 * (convolution + projections)) + head
    return 2 * products + 7 * depth * 2 * scanned * D * states


def test_every_operator_of_the_scan_counts_the_same_forward_and_backward():
    G, B, L, D, N = 2, 3, 37, 24, 16
    found = set()
    for device, backend in (("cpu", "reference"), ("meta", "reference"), ("cpu", "auto"), ("meta", "operator")):
        tensors = [torch.randn(G, B, L, size, device=device, requires_grad=True) for size in (D, D, N, N)]
        x, step_logits, k, q = tensors
        A = torch.full((G, D, N), -1.0, device=device, requires_grad=True)
        if backend == "operator":  # FLOPs of the GPU operator can be counted without a GPU, on meta tensors
            rest = None, None, [False] * G, True
            (y, _), first = counted(scan_op.scan, "cuda", "longhorn", *tensors, None, *rest)
            (z, _), second = counted(scan_op.scan, "triton", "selective", *tensors, A, *rest)
        else:
            keywords = dict(reverse=[False, True], backend=backend)
            y, first = counted(longhorn_scan, x, step_logits, k, q, **keywords)
            z, second = counted(selective_scan, x, step_logits, A, k, q, **keywords)
        found.add((first, counted(y.sum().backward)[1], second, counted(z.sum().backward)[1]))
    elements = G * B * L * D * N
    assert found == {(7 * elements, 14 * elements, 7 * elements, 15 * elements)}


@pytest.mark.parametrize(
    ("kind", "class_token_only"),
    [
        ("vil_tiny", False),
        ("vil_tiny", True),
        ("vim_tiny", False),
        ("vim_tiny", True),
        ("vil_tiny_pooled", False),
        ("vil_tiny_pooled", True),
    ],
)
def test_the_fused_block_counts_what_its_parts_do(kind, class_token_only):
    with torch.device("meta"):
        block = timm.create_model(kind, embed_dim=48, depth=1).blocks[0]
        x = torch.empty(3, 21, 48, requires_grad=True)
    y, by_parts = counted(Blocks(block), x, (4, 5), class_token_only)
    by_parts = by_parts, counted(y.sum().backward)[1]
    options = options_of(block, torch.bfloat16, class_token_only, lines=lines_of(block, x, (4, 5)))
    (y, _), fused = counted(block_op.run_blocks, x, [weights_of(block)], [options], [None])
    assert y.shape == (3, 1 if class_token_only else 21, 48)
    assert (fused, counted(y.sum().backward)[1]) == by_parts
    if not class_token_only:
        options = [options._replace(norm_next=True), options]
        (y, _), two = counted(block_op.run_blocks, x, 2 * [weights_of(block)], options, [None, None])
        assert (two, counted(y.sum().backward)[1]) == (2 * by_parts[0], 2 * by_parts[1])


def test_groups_count_in_the_gradient_of_a_convolution():
    x = torch.randn(2, 6, 10, 9, requires_grad=True)
    convolution = torch.nn.Conv2d(6, 12, (3, 2), groups=3)
    y, forward_count = counted(convolution, x)
    assert forward_count == 2 * y.numel() * (3 * 2) * (6 // 3)
    # Backward has two products per product of forward: one for the input's gradient and one for the weights' gradient.
    assert counted(y.sum().backward)[1] == 2 * forward_count


def test_the_document_has_the_table_that_the_command_prints(capsys, monkeypatch):
    """The table in docs/architecture.md equals the output of benchmarks/flops.py.

    FLOPs of ViL, pooled ViL and ViM equal counts by hand, and FLOPs of DeiT-tiny equal the published count.
    """
    import flops as command

    measured, measure = {}, command.measure
    monkeypatch.setattr(command, "measure", lambda name, size: measured.setdefault(name, measure(name, size)))
    monkeypatch.setattr(sys, "argv", ["flops.py"])
    command.main()
    assert capsys.readouterr().out in (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    for size, width in (("tiny", 192), ("small", 384), ("base", 768)):
        for name, scanned in (("vil_{}", 197), ("vil_{}_pooled", 15), ("vim_{}", 197)):
            by_hand = forward_by_hand(width, 24, scanned)
            scans = 2 * 24 * 2 * scanned * (2 * width) * 16  # counting 9 instead of 7 FLOPs per state element
            _, total, field, _ = measured[name.format(size)]
            assert (total * 1e9, field * 1e9) == pytest.approx((by_hand, by_hand + scans), rel=1e-12)
    parameters, total, field, activations = measured["deit_tiny_patch16_224"]
    assert [round(parameters, 1), round(activations, 2)] == [5.7, 5.97]
    assert total / 2 == pytest.approx(1.26, abs=0.01)
    assert field == total
