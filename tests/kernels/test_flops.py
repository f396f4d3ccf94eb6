"""What FlopCounterMode counts, against products counted by hand and against scalars that count themselves."""

import itertools
import math
import sys
from pathlib import Path

import pytest
import timm
import torch
from blocks import options_of, weights_of
from torch.utils.flop_counter import FlopCounterMode
from vil.kernels import flops, longhorn_scan, selective_scan
from vil.kernels.block import operator as block_operator
from vil.kernels.scan import naive
from vil.kernels.scan import operator as scan_operator

import vil  # noqa: F401  registers the models

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def counted(function, *arguments, **keywords):
    """What a function returns, and the FLOPs of it."""
    with FlopCounterMode(display=False, custom_mapping=flops.CORRECTED) as counter:
        returned = function(*arguments, **keywords)
    return returned, counter.get_total_flops()


def forward_by_hand(C, depth, tokens=197, classes=1000, states=16, taps=4):
    """Of one image: 2 FLOPs a multiply-add of each product in the papers' description, 7 an element of state."""
    D, R = 2 * C, C // 16
    patches = (tokens - 1) * (3 * 16 * 16) * C
    in_and_out = tokens * C * (2 * D) + tokens * D * C
    convolution = (tokens + taps - 1) * D * taps
    projections = tokens * D * (R + 2 * states) + tokens * R * D
    head = C * classes
    products = patches + depth * (in_and_out + 2 * (convolution + projections)) + head
    return 2 * products + 7 * depth * 2 * tokens * D * states


@pytest.mark.parametrize("kind", ["vil", "vim"])
@pytest.mark.parametrize(("size", "width"), [("tiny", 192), ("small", 384), ("base", 768)])
def test_a_model_counts_what_its_products_are_by_hand(kind, size, width):
    with torch.device("meta"):
        model, images = timm.create_model(f"{kind}_{size}"), torch.empty(3, 3, 224, 224)
    assert counted(model, images)[1] == 3 * forward_by_hand(width, depth=24)


def test_vil_tiny_in_numbers():
    # 2.585 GFLOPs of products, and 24 blocks of 2 directions of 197 tokens of 384 channels of 16 states at 7
    assert forward_by_hand(192, depth=24) == 2_585_877_504 + 24 * 2 * 197 * 384 * 16 * 7


class Number:
    """A number that counts what is done with it."""

    count = 0

    def __init__(self, value):
        self.value = value

    def _calculated(self, value):
        Number.count += 1
        return Number(value)

    def __add__(self, other):
        return self._calculated(self.value + other.value)

    def __sub__(self, other):
        return self._calculated(self.value - other.value)

    def __mul__(self, other):
        return self._calculated(self.value * other.value)

    def exp(self):
        return self._calculated(math.exp(self.value))

    def reciprocal(self):
        return self._calculated(1 / self.value)


def zeros(*shape):
    return [zeros(*shape[1:]) for _ in range(shape[0])] if shape else Number(0.0)


def numbers(tensor):
    return [numbers(row) for row in tensor] if tensor.dim() else Number(tensor.item())


def values(rows):
    return [values(row) for row in rows] if isinstance(rows, list) else rows.value


def coefficients(x, gates, k, rates):
    """Of the recurrence, for scalars: decay (L, N, D), drive k input, the input (L, D), and step size and k^2."""
    L, N, D = len(k), len(k[0]), len(x[0])
    one = Number(1.0)
    squares = [[key * key for key in row] for row in k]
    steps = gates
    if rates is None:
        steps = [[Number(0.0)] * D for _ in range(L)]
        for t in range(L):
            norm = one
            for n in range(N):
                norm = norm + squares[t][n]
            steps[t] = [(norm + (Number(0.0) - gates[t][d]).exp()).reciprocal() for d in range(D)]
    inputs = [[steps[t][d] * x[t][d] for d in range(D)] for t in range(L)]
    decay = zeros(L, N, D)
    for t, n, d in itertools.product(range(L), range(N), range(D)):
        decay[t][n][d] = one - steps[t][d] * squares[t][n] if rates is None else (rates[n][d] * steps[t][d]).exp()
    return decay, inputs, steps, squares


def forward(x, gates, k, q, rates):
    """y (L, D), and the states before and after each token."""
    L, N, D = len(k), len(k[0]), len(x[0])
    decay, inputs, _, _ = coefficients(x, gates, k, rates)
    states, y = [zeros(N, D)], zeros(L, D)
    for t in range(L):
        states.append(zeros(N, D))
        for n, d in itertools.product(range(N), range(D)):
            states[-1][n][d] = decay[t][n][d] * states[-2][n][d] + k[t][n] * inputs[t][d]
            y[t][d] = y[t][d] + q[t][n] * states[-1][n][d]
    return y, states


def backward(dy, x, gates, k, q, rates):
    """Gradients of x (L, D), q (L, N), and of Mamba's rates (N, D), with states and coefficients as given."""
    states = forward(x, gates, k, q, rates)[1]
    decay, inputs, steps, squares = coefficients(x, gates, k, rates)
    Number.count = 0
    L, N, D = len(k), len(k[0]), len(x[0])
    dx, dq, drates, later = zeros(L, D), zeros(L, N), zeros(N, D), zeros(N, D)
    for t in reversed(range(L)):
        dinput, dstep, dkey, dsquare = zeros(D), zeros(D), zeros(N), zeros(N)
        for n, d in itertools.product(range(N), range(D)):
            dS = q[t][n] * dy[t][d] + later[n][d]
            later[n][d] = decay[t][n][d] * dS
            dq[t][n] = dq[t][n] + states[t + 1][n][d] * dy[t][d]
            dinput[d] = dinput[d] + k[t][n] * dS
            dkey[n] = dkey[n] + inputs[t][d] * dS
            ddecay = dS * states[t][n][d]
            if rates is None:
                dstep[d] = dstep[d] + squares[t][n] * ddecay
                dsquare[n] = dsquare[n] + steps[t][d] * ddecay
            else:
                dexponent = ddecay * decay[t][n][d]
                dstep[d] = dstep[d] + rates[n][d] * dexponent
                drates[n][d] = drates[n][d] + steps[t][d] * dexponent
        dx[t] = [dinput[d] * steps[t][d] for d in range(D)]
    return dx, dq, drates


def random_inputs(L, D, N, selects):
    g = torch.Generator().manual_seed(0)
    x, gates, dy = (torch.randn(L, D, generator=g, dtype=torch.float64) for _ in range(3))
    k, q = (torch.randn(L, N, generator=g, dtype=torch.float64) for _ in range(2))
    rates = -torch.rand(N, D, generator=g, dtype=torch.float64) if selects else None
    return x, gates.abs() if selects else gates, k, q, rates, dy


def per_element_of_state(count):
    """The coefficient of L D N in a count that is linear in each."""
    corners = itertools.product((2, 3), repeat=3)
    return sum((-1) ** (sum(corner) + 1) * count(*corner) for corner in corners)


@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_scalars_count_what_the_formulas_say_of_an_element_of_state(recurrence):
    def inputs(L, D, N):
        return [t if t is None else numbers(t) for t in random_inputs(L, D, N, recurrence == "selective")]

    def count_forward(L, D, N):
        *arguments, _ = inputs(L, D, N)
        Number.count = 0
        forward(*arguments)
        return Number.count

    def count_backward(L, D, N):
        *arguments, dy = inputs(L, D, N)
        backward(dy, *arguments)
        return Number.count

    assert per_element_of_state(count_forward) == flops.FORWARD
    assert per_element_of_state(count_backward) == flops.BACKWARD[recurrence]


@pytest.mark.parametrize("recurrence", ["longhorn", "selective"])
def test_the_scalars_compute_the_recurrence_and_its_gradients(recurrence):
    x, gates, k, q, rates, dy = random_inputs(3, 2, 4, recurrence == "selective")
    for tensor in (x, q, *([] if rates is None else [rates])):
        tensor.requires_grad_()
    if rates is None:
        y = naive.longhorn(x[None], gates[None], k[None], q[None])[0]
    else:
        logits = torch.log(torch.expm1(gates))  # softplus of which are the steps
        y = naive.selective(x[None], logits[None], rates.mT, k[None], q[None])[0]
    y.backward(dy)
    arguments = [t if t is None else numbers(t.detach()) for t in (x, gates, k, q, rates)]
    torch.testing.assert_close(torch.tensor(values(forward(*arguments)[0])), y.detach().float())
    gradients = backward(numbers(dy), *arguments)
    for found, tensor in zip(gradients, (x, q, *([] if rates is None else [rates]))):
        torch.testing.assert_close(torch.tensor(values(found)), tensor.grad.float())


def test_every_operator_of_the_scan_counts_the_same_forward_and_backward():
    G, B, L, D, N = 2, 3, 37, 24, 16
    found = set()
    for device, backend in (("cpu", "reference"), ("meta", "reference"), ("cpu", "auto"), ("meta", "operator")):
        tensors = [torch.randn(G, B, L, size, device=device, requires_grad=True) for size in (D, D, N, N)]
        x, logits, k, q = tensors
        rates = torch.full((G, D, N), -1.0, device=device, requires_grad=True)
        if backend == "operator":  # of GPUs, which has to have none for tensors without memory
            rest = None, None, [False] * G, True
            (y, _), first = counted(scan_operator.scan, "cuda", "longhorn", *tensors, None, *rest)
            (z, _), second = counted(scan_operator.scan, "triton", "selective", *tensors, rates, *rest)
        else:
            keywords = dict(reverse=[False, True], backend=backend)
            y, first = counted(longhorn_scan, x, logits, k, q, **keywords)
            z, second = counted(selective_scan, x, logits, rates, k, q, **keywords)
        found.add((first, counted(y.sum().backward)[1], second, counted(z.sum().backward)[1]))
    elements = G * B * L * D * N
    assert found == {(7 * elements, 14 * elements, 7 * elements, 15 * elements)}


@pytest.mark.parametrize("class_token_only", [False, True])
@pytest.mark.parametrize("kind", ["vil_tiny", "vim_tiny"])
def test_the_fused_block_counts_what_its_parts_do(kind, class_token_only):
    with torch.device("meta"):
        block = timm.create_model(kind, embed_dim=48, depth=1).blocks[0]
        x = torch.empty(3, 21, 48, requires_grad=True)
    y, by_parts = counted(block, x, class_token_only)
    by_parts = by_parts, counted(y.sum().backward)[1]
    options = options_of(block, torch.bfloat16, class_token_only)
    (y, _), fused = counted(block_operator.block, x, weights_of(block), options)
    assert y.shape == (3, 1 if class_token_only else 21, 48)
    assert (fused, counted(y.sum().backward)[1]) == by_parts


def test_groups_count_in_the_gradient_of_a_convolution():
    x = torch.randn(2, 6, 10, 9, requires_grad=True)
    convolution = torch.nn.Conv2d(6, 12, (3, 2), groups=3)
    y, forward_count = counted(convolution, x)
    assert forward_count == 2 * y.numel() * (3 * 2) * (6 // 3)
    # each product of forward is one of the input's gradient and one of the weights'
    assert counted(y.sum().backward)[1] == 2 * forward_count


def test_the_table_has_timms_published_numbers_for_deit():
    from flops import measure

    parameters, total, field, activations = measure("deit_tiny_patch16_224", 224)
    assert [round(parameters, 1), round(activations, 2)] == [5.7, 5.97]
    assert total / 2 == pytest.approx(1.26, abs=0.01)
    assert field == total
    _, total, field, _ = measure("vim_tiny", 224)
    assert field - total == pytest.approx(2 * 24 * 2 * 197 * 384 * 16 / 1e9)


def test_the_document_has_the_table_that_the_command_prints(capsys, monkeypatch):
    from flops import main

    monkeypatch.setattr(sys, "argv", ["flops.py"])
    main()
    assert capsys.readouterr().out in (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
