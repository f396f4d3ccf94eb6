"""Tests of research/recall.py: sequences, models, resumed training and statistics."""

import itertools
import json
import math
import queue
import sys
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from figures import kept_figures
from filelock import FileLock
from PIL import Image
from scipy.stats import hypergeom

from research import causal_conv, recall
from research.recall_model import MIXERS, POWER, Attention, RecallModel, recall_examples
from research.recall_results import Run, experiments, merged, plot, shares, verdict, write
from vil.kernels import longhorn_scan, selective_scan

CPU = torch.device("cpu")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def a_run(**changes):
    settings = dict(mixer="longhorn", length=16, width=16, lr=1e-2, seed=0, pairs=2, batch=16, epochs=2)
    settings |= dict(train_examples=64, test_examples=32, weight_decay=0.1, stop_at=99.0, precision="fp32")
    return Run(**{**settings, **changes})


def trained(run, deadline=math.inf, state=None, count=64, beside=()):
    """Train a run and return it. Between the turns of the run, each run in `beside` trains for a turn."""
    shown = recall_examples(count, run.length, run.pairs, 0, CPU)
    others = [recall.train(other, lambda _: (shown, shown), CPU, math.inf) for other in beside]
    for _ in recall.train(run, lambda _: (shown, shown), CPU, deadline, state):
        for other in others:
            next(other, None)
    return run


def sequences(pairs, queries, length):
    """Return the token sequences of examples, computed in plain loops."""
    tokens = torch.zeros(len(pairs), length, dtype=torch.long)
    for row, listed, places in zip(tokens, pairs.tolist(), queries.tolist()):
        row[: len(listed)] = torch.tensor(listed)
        for key, place in zip(listed[::2], places):
            row[place] = key
    return tokens


def test_a_recall_example_lists_pairs_and_then_asks_for_every_value_once():
    pairs, queries = recall_examples(50, 32, 4, seed=0, device=CPU)
    assert pairs.shape == (50, 8)
    assert queries.shape == (50, 4)
    for listed, places in zip(pairs.tolist(), queries.tolist()):
        keys, values = listed[::2], listed[1::2]
        assert all(0 < key < 4096 <= value < 8192 for key, value in zip(keys, values))
        assert len(set(keys)) == len(set(values)) == len(set(places)) == 4
        assert all(8 <= place < 32 and place % 2 == 0 for place in places)


def test_distances_follow_the_power_law():
    _, queries = recall_examples(6_000, 64, 4, seed=0, device=CPU)
    first = (queries[:, 0] - 8) // 2  # only the first query is independent, because distances do not repeat
    found = torch.bincount(first, minlength=28) / len(first)
    expected = torch.arange(1.0, 29.0) ** (POWER - 1)
    torch.testing.assert_close(found, expected / expected.sum(), atol=0.02, rtol=0)


def test_all_runs_share_their_examples_and_are_tested_on_others():
    equal = dict(train_examples=64, test_examples=64)
    (shown, queries), (asked, _) = recall.examples_of(a_run(**equal), CPU)
    assert shown.shape == asked.shape == (64, 4)
    assert not {tuple(row) for row in shown.tolist()} & {tuple(row) for row in asked.tolist()}
    (_, again), (same, _) = recall.examples_of(a_run(**equal, seed=1, mixer="mamba"), CPU)
    assert torch.equal(again, queries)
    assert torch.equal(same, asked)


def test_examples_are_drawn_piece_by_piece_and_none_again():
    pairs, queries = recall_examples(8_200, 8, 2, 0, CPU, vocabulary=32)
    assert len(pairs) == len(queries) == 8_200
    assert not torch.equal(pairs[:8, ::2], pairs[8_192:, ::2])


def test_pairs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="length must be even and at least 20 for 5 pairs .*got 16"):
        recall_examples(1, 16, 5, 0, CPU)


def test_embeddings_are_those_of_the_sequence_and_so_are_their_gradients():
    torch.manual_seed(0)
    model = RecallModel("longhorn", 8, 24, vocabulary=32)
    pairs, queries = recall_examples(5, 24, 3, 0, CPU, vocabulary=32)
    found = model.embedded(pairs, queries)
    weight = model.embedding.weight.detach().clone().requires_grad_()
    expected = F.embedding(sequences(pairs, queries, 24), weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, weight.grad)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_loss_is_that_of_zoologys_model_at_the_queries(mixer):
    """Compare the loss with that of Zoology's model, whose last block computes all positions, not only the queries."""
    torch.manual_seed(0)
    model = RecallModel(mixer, 16, 24).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones of the initialization could hide errors
            parameter.add_(0.1 * torch.randn_like(parameter))
    pairs, queries = recall_examples(4, 24, 3, 0, CPU)
    loss = model.loss(pairs, queries)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    x = F.embedding(sequences(pairs, queries, 24), model.embedding.weight)
    attends, residual = mixer == "attention", 0
    if attends:
        x = x + model.positions

    def layer_norm(residual, norm):
        return F.layer_norm(residual, (16,), norm.weight, norm.bias, 1e-5)

    for block in model.blocks:
        residual = residual + x
        if attends:
            residual = residual + block.mixer(layer_norm(residual, block.norm))
            x = layer_norm(residual, block.second_norm)
        else:
            scale = (residual.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            x = block.mixer(residual * scale * block.norm.weight)
    logits = F.linear(layer_norm(residual + x, model.norm), model.embedding.weight)
    parts = [
        -F.log_softmax(logits[row, place], dim=-1)[value]
        for row in range(4)
        for place, value in zip(queries[row], pairs[row, 1::2])
    ]
    expected = torch.stack(parts).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, list(model.parameters())), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mixer", ["longhorn", "mamba"])
@pytest.mark.parametrize("width", [16, 136])  # the step projections of the widths 16 and 136 have ranks of 1 and 9
def test_the_causal_mixer_is_one_direction_of_the_packages_block(mixer, width):
    torch.manual_seed(0)
    module = MIXERS[mixer](width)
    h = torch.randn(2, 9, width)
    u, z = module.in_proj(h).chunk(2, dim=-1)
    direction = module.weights
    v, logits, k, q = direction(u)
    rest = (k, q, direction.skip, direction.step_proj.bias)
    y = (
        longhorn_scan(v, logits, *rest)
        if mixer == "longhorn"
        else selective_scan(v, logits, -direction.A_log.exp(), *rest)
    )
    expected = module.out_proj(y * F.silu(z))
    torch.testing.assert_close(module(h), expected, rtol=1e-4, atol=1e-6)
    places = torch.tensor([[3, 0], [8, 5]])
    wanted = torch.stack([expected[row, chosen] for row, chosen in enumerate(places)])
    torch.testing.assert_close(module(h, places), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "taps"),  # the shapes cover complete and partial strips of tokens, and fewer tokens than taps
    [((2, 33, 128), 4), ((1, 70, 70), 4), ((9, 5, 16), 3), ((1, 2, 16), 4), ((1, 40, 3), 1)],
)
def test_the_convolution_kernels_equal_silu_of_conv1d_with_gradients(dtype, shape, taps):
    """Both implementations of silu(conv(u)) match the outputs and gradients of F.conv1d followed by F.silu."""
    torch.manual_seed(0)
    # The input and the output gradient are not contiguous.
    u = torch.randn(shape[0], shape[2], shape[1], dtype=dtype).mT.requires_grad_()
    weight, bias = torch.randn(shape[2], taps, requires_grad=True), torch.randn(shape[2], requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (u, weight, bias)]
    of_conv = F.conv1d(exact[0].mT, exact[1].unsqueeze(1), exact[2], padding=taps - 1, groups=shape[2])
    expected = F.silu(of_conv[..., : shape[1]]).mT
    dv = torch.randn(*shape[:2], 1).to(dtype).expand(shape)
    gradients = torch.autograd.grad(expected, exact, dv.double())
    rounding = 1e-5 if dtype == torch.float32 else 0.01
    for function in (causal_conv.silu_by_kernels, causal_conv.silu_of_shifted_products):
        found = function(u, weight, bias)
        assert found.dtype == dtype
        for a, b in zip((found, *torch.autograd.grad(found, (u, weight, bias), dv)), (expected, *gradients)):
            assert (a.double() - b).norm() <= rounding * b.norm()


def test_attention_is_softmax_of_products():
    torch.manual_seed(0)
    module = Attention(4).eval()
    h = torch.randn(2, 5, 4)
    q, k, v = module.in_proj(h).chunk(3, dim=-1)
    weights = (q @ k.mT / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(module(h), module.out_proj(weights @ v))


def test_attention_drops_a_tenth_of_its_weights():
    """In training, attention drops a tenth of its weights.

    Zero queries attend evenly to all tokens up to their own, and values that are unit vectors reveal the weights.
    """
    module, count = Attention(64), 64
    with torch.no_grad():
        module.in_proj.weight.copy_(torch.cat([torch.zeros(2 * count, count), torch.eye(count)]))
        module.out_proj.weight.copy_(torch.eye(count))
    h = torch.eye(count).expand(8, -1, -1)
    even = (torch.ones(count, count).tril() / torch.arange(1, count + 1).unsqueeze(1)).expand(8, -1, -1)
    torch.testing.assert_close(module.eval()(h), even)
    torch.manual_seed(0)
    shown = module.train()(h)
    kept = shown != 0
    assert kept[even != 0].float().mean().item() == pytest.approx(0.9, abs=0.01)
    torch.testing.assert_close(shown[kept], even[kept] / 0.9)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_tenth_of_attentions_embeddings_is_dropped_and_none_of_others(mixer):
    torch.manual_seed(0)
    examples = recall_examples(16, 24, 3, 0, CPU)
    model, seen = RecallModel(mixer, 16, 24), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.eval()(*examples)
    model.train()(*examples)
    plain, shown = seen
    dropout = 0.1 if mixer == "attention" else 0.0
    kept = shown != 0
    assert kept.float().mean().item() == pytest.approx(1 - dropout, abs=dropout / 5)
    torch.testing.assert_close(shown[kept], plain[kept] / (1 - dropout))


def test_initialisation_is_zoologys():
    torch.manual_seed(0)
    attention, mamba = (RecallModel(mixer, 128, 64) for mixer in ("attention", "mamba"))
    for model in (attention, mamba):
        assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert attention.positions.std().item() == pytest.approx(0.02, rel=0.03)
    assert mamba.positions is None
    mixer = attention.blocks[0].mixer
    assert mixer.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert mixer.out_proj.weight.std().item() == pytest.approx(0.01, rel=0.03)
    assert not mixer.in_proj.bias.any()
    # Mamba's weights are uniform in [-b, b] with b = 1 / sqrt(fan-in). The weights of out_proj are also divided by the
    # square root of the number of layers.
    assert mamba.blocks[1].mixer.in_proj.weight.abs().max().item() == pytest.approx(128**-0.5, rel=1e-2)
    assert mamba.blocks[1].mixer.out_proj.weight.abs().max().item() == pytest.approx(256**-0.5 / 2**0.5, rel=1e-2)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_run_learns_what_it_is_shown_and_stops_there(mixer):
    run = trained(a_run(mixer=mixer, pairs=1, length=8, epochs=100, train_examples=32), count=32)
    assert run.ended
    assert run.finite
    assert run.accuracy[0] < 50
    assert run.accuracy[-1] > 99
    assert len(run.accuracy) == len(run.loss) == len(run.gradient_norm) < 100
    assert run.loss[-1] < run.loss[0]
    assert run.parameters == sum(p.numel() for p in RecallModel(mixer, 16, 8).parameters())


def test_training_equals_a_plain_adamw_loop():
    """Training gives the losses, gradient norms and accuracy of a plain AdamW loop over the same batches."""
    run = trained(a_run(epochs=2, train_examples=70), count=70)  # the last examples do not fill a batch and are dropped
    pairs, queries = recall_examples(70, 16, 2, 0, CPU)
    torch.manual_seed(0)
    model = RecallModel("longhorn", 16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), 1.0, weight_decay=0.1)
    losses, norms = [], []
    for epoch, i in itertools.product(range(2), range(4)):
        cosine = (1, 0.5)[epoch]
        optimizer.param_groups[0]["lr"] = 1e-2 * cosine
        rows = slice(16 * i, 16 * i + 16)
        optimizer.zero_grad()
        loss = model.loss(pairs[rows], queries[rows])
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        losses.append(loss.item())
    assert run.loss == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:]) / 4], rel=1e-4)
    assert run.gradient_norm == pytest.approx([max(norms[:4]), max(norms[4:])], rel=1e-3)
    answers = model(pairs, queries).argmax(-1)
    right = [int(a == v) for row, listed in zip(answers.tolist(), pairs.tolist()) for a, v in zip(row, listed[1::2])]
    assert run.accuracy[-1] == pytest.approx(100 * sum(right) / len(right))


def test_accuracy_is_measured_in_fp32_and_without_dropout():
    examples = recall_examples(16, 16, 2, 0, CPU)
    training = recall.Training(a_run(mixer="attention", precision="bf16"), examples, CPU)
    seen = []
    training.model.register_forward_hook(lambda model, _, logits: seen.append((model.training, logits.dtype)))
    training.accuracy(*examples)
    training.begin_epoch(0)
    training.step()
    assert seen == [(False, torch.float32), (True, torch.bfloat16)]


def test_a_value_that_is_not_finite_is_recorded_and_ends_the_run():
    run = trained(a_run(lr=1e30, epochs=5))
    assert run.ended
    assert not run.finite
    assert len(run.loss) < 5
    assert run.loss[-1] is None
    json.dumps(asdict(run), allow_nan=False)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_run_cut_short_and_continued_beside_others_equals_one_in_a_piece(mixer, tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "STEPS_A_TURN", 3)  # an epoch has four steps, so the last turn is shorter
    whole = trained(a_run(mixer=mixer, epochs=4))
    calls = 0
    while True:
        others = [a_run(mixer=other, seed=calls) for other in ("attention", "longhorn")]
        part = trained(a_run(mixer=mixer, epochs=4), deadline=0.0, state=tmp_path / "run.safetensors", beside=others)
        calls += 1
        assert len(part.accuracy) == calls
        if part.ended:
            break
    assert calls == 4
    assert (part.loss, part.gradient_norm, part.accuracy) == (whole.loss, whole.gradient_norm, whole.accuracy)
    assert [sitting["epochs"] for sitting in part.sittings] == [1, 1, 1, 1]
    # without a state file, no progress is stored
    assert len(trained(a_run(mixer=mixer, epochs=4), deadline=0.0).accuracy) == 1
    other = a_run(mixer=mixer, epochs=4, lr=1e-3)
    with pytest.raises(
        ValueError, match=r"run.safetensors must be a state of this run, got another run \(.*lr 0.01, seed 0"
    ):
        trained(other, state=tmp_path / "run.safetensors")


def test_a_run_that_is_killed_goes_on_from_what_was_saved_since(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "STEPS_A_TURN", 3)
    monkeypatch.setattr(recall, "SECONDS_BETWEEN_SAVES", -1)
    shown, path = recall_examples(64, 16, 2, 0, CPU), tmp_path / "run.safetensors"
    killed = a_run(epochs=4)
    for _ in recall.train(killed, lambda _: (shown, shown), CPU, math.inf, path):
        if len(killed.accuracy) == 2:
            break
    run = trained(a_run(epochs=4), state=path)
    assert run.accuracy == trained(a_run(epochs=4)).accuracy
    assert [sitting["epochs"] for sitting in run.sittings] == [2, 2]


@torch._dynamo.config.patch(recompile_limit=8)
def test_no_run_begins_when_the_time_is_up_and_progress_is_told_before_the_first_epoch(monkeypatch, capsys):
    now, done = [0.0], queue.Queue()

    def train(run, *_):
        for _ in range(run.seed + 1):
            now[0] += 40
            yield

    monkeypatch.setattr(recall, "train", train)
    monkeypatch.setattr(recall, "time", SimpleNamespace(time=lambda: now[0]))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    recall.work(0, "cpu", [[a_run(seed=seed) for seed in range(4)]], done, 2, 60.0, None)
    assert [run and run.seed for run in done.queue] == [0, 1, None]
    assert "longhorn 0.01 0: 0, 0%; longhorn 0.01 1: 0, 0%; 2 wait" in capsys.readouterr().out


def test_a_worker_that_fails_ends_the_call(monkeypatch):
    results = mock.Mock(get=mock.Mock(side_effect=[queue.Empty, AssertionError("nobody will answer")]))
    workers = mock.Mock(join=mock.Mock(side_effect=RuntimeError("in a worker")))
    context = mock.Mock(Queue=lambda: results)
    monkeypatch.setattr(
        recall, "multiprocessing", mock.Mock(get_context=lambda _: context, spawn=lambda *_, **__: workers)
    )
    with pytest.raises(RuntimeError, match="in a worker"):
        recall.train_all([a_run()], "cpu", 1, 1.0, None, None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
# `recall.work` changes recompile_limit, which this decorator restores after the test.
@torch._dynamo.config.patch(recompile_limit=8)
def test_dropout_follows_from_the_run_whatever_runs_beside_it(device, monkeypatch):
    """Train with a learning rate of 0, so that losses differ only because of dropout."""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)

    def losses(seeds, at_a_time):
        runs, done = [a_run(mixer="attention", lr=0.0, seed=seed, train_examples=640) for seed in seeds], queue.Queue()
        recall.work(0, device, [runs], done, at_a_time, math.inf, None)
        assert done.qsize() == len(runs) + 1
        return [run.loss for run in runs]

    together = losses([0, 1, 2], at_a_time=3)
    for alone, found in zip(losses([0, 1, 2], at_a_time=1), together):
        assert found == pytest.approx(alone, rel=1e-6)
        assert found[0] != pytest.approx(found[1], rel=1e-6)  # the two epochs sample different dropout masks


def test_every_setting_has_a_state_of_its_own(tmp_path):
    runs = [a_run(), a_run(lr=1e-3), a_run(seed=1), a_run(stop_at=50.0), a_run(epochs=3)]
    assert len({recall.state_file(tmp_path / "a.json", run) for run in runs}) == len({run.key for run in runs}) == 5
    assert recall.state_file(tmp_path / "a.json", a_run()) == recall.state_file(
        tmp_path / "a.json", a_run(accuracy=[5.0])
    )
    assert recall.state_file(None, runs[0]) is None


def test_what_is_finished_is_not_run_again_and_what_was_begun_comes_first(tmp_path):
    out = tmp_path / "out.json"
    runs = [a_run(mixer=mixer, seed=seed) for mixer in ("longhorn", "mamba") for seed in (0, 1)]
    begun = recall.state_file(out, runs[3])
    begun.parent.mkdir()
    begun.touch()
    todo = recall.to_do(runs, [a_run(accuracy=[1.0, 2.0])], out)
    assert [(run.mixer, run.seed) for run in todo] == [("mamba", 1), ("mamba", 0), ("longhorn", 1)]


def test_a_run_ends_above_what_it_stops_at():
    at, above = (a_run(stop_at=50.0, accuracy=[top], loss=[1.0], gradient_norm=[1.0]) for top in (50.0, 50.1))
    assert (at.ended, above.ended) == (False, True)


def test_files_are_merged_by_their_runs(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write([a_run(accuracy=[1.0]), a_run(seed=1, accuracy=[2.0], loss=[None])], first)
    write([a_run(accuracy=[3.0]), a_run(epochs=3, accuracy=[4.0], gradient_norm=[None])], second)
    runs = merged([first, second])
    assert [run.accuracy for run in runs] == [[1.0], [2.0], [4.0]]
    assert [run.finite for run in runs] == [True, False, False]


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["recall.py", *map(str, arguments)])
    recall.main()


def test_repeated_calls_resume_until_all_runs_are_done(tmp_path, monkeypatch, capfd):
    """Call the program until all runs are done. The first call trains one epoch of each run."""
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    settings = ["--mixers", "longhorn", "--lengths", 16, "--pairs", 2, "--batch", 16, "--widths", 16, "--epochs", 2]
    settings += ["--learning-rates", 1e-2, "--seeds", 2, "--train-examples", 64, "--test-examples", 32]
    settings += ["--device", "cpu", "--runs-per-gpu", 2, "--out", out]
    monkeypatch.setattr(recall, "train_all", in_this_process)
    run_main(monkeypatch, *settings, "--minutes", 0)
    assert not out.exists()
    states = out.with_suffix(".states")
    assert len(list(states.iterdir())) == 2
    assert "after 1 of 2 epochs, 1 of them in" in capfd.readouterr().out
    monkeypatch.undo()
    run_main(monkeypatch, *settings, "--plot", plot)
    assert not list(states.iterdir())
    runs = merged([out])
    assert [len(run.accuracy) for run in runs] == [2, 2]
    assert all([sitting["epochs"] for sitting in run.sittings] == [1, 1] for run in runs)
    assert Image.open(plot).format == "PNG"
    text = capfd.readouterr().out
    assert "2 runs, of which 2 are to do" in text
    assert "| longhorn | 0.01 | 2 |" in text
    monkeypatch.setattr(recall, "train_all", None)  # finished runs must not be trained again
    run_main(monkeypatch, *settings)
    assert "2 runs, of which 0 are to do" in capfd.readouterr().out


def test_the_state_of_a_run_is_there_until_its_results_are(tmp_path, monkeypatch):
    out, ended = tmp_path / "out.json", dict(accuracy=[100.0], loss=[0.0], gradient_norm=[0.0])

    def end(runs, device, at_a_time, minutes, out, done):
        (state := recall.state_file(out, runs[0])).parent.mkdir()
        state.touch()
        done(replace(runs[0], **ended, sittings=[dict(seconds=1.0, epochs=1)]))

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(recall, "train_all", end)
    monkeypatch.setattr(recall, "write", full)
    with pytest.raises(OSError, match="no space left"):
        run_main(monkeypatch, "--device", "cpu", "--out", out)
    assert len(list(out.with_suffix(".states").iterdir())) == 1


def test_a_length_that_zoology_has_not_needs_its_pairs_and_batch(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--lengths", 64, 16, "--pairs", 2)
    assert "--pairs and --batch are required for a length of 16" in capsys.readouterr().err


def test_a_file_is_written_by_one_call_at_a_time(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    monkeypatch.setattr(recall, "run_all", lambda options, finished: write([a_run(accuracy=[1.0])], options.out))
    with FileLock(tmp_path / "out.lock"), pytest.raises(SystemExit):
        run_main(monkeypatch, "--out", out)
    assert f"another call is writing to {out}: wait until it ends, or choose another --out" in capsys.readouterr().err
    assert not out.exists()
    run_main(monkeypatch, "--out", out)
    assert out.exists()


def test_what_is_not_given_is_as_in_zoologys_figure_2(monkeypatch):
    asked = []
    monkeypatch.setattr(recall, "train_all", lambda runs, *_: asked.extend(runs))
    run_main(monkeypatch, "--device", "cpu")
    sizes = {(64, 4, 512), (128, 8, 512), (256, 16, 256), (512, 64, 128)}
    assert {(run.length, run.pairs, run.batch) for run in asked} == sizes
    rest = {(r.epochs, r.train_examples, r.test_examples, r.weight_decay, r.stop_at, r.width) for r in asked}
    assert rest == {(64, 100_000, 3_000, 0.1, 99.0, 64)}


def in_this_process(runs, device, at_a_time, minutes, out, done):
    """Train one epoch of each run in this process instead of in worker processes."""
    for run in runs:
        done(trained(run, deadline=0.0, state=recall.state_file(out, run)))


def test_reports_come_from_several_files(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / name for name in ("a.json", "b.json", "both.json")]
    write([a_run(accuracy=[95.0])], paths[0])
    write([a_run(mixer="mamba", accuracy=[5.0])], paths[1])
    run_main(monkeypatch, "--report", paths[0], paths[1], "--out", paths[2])
    assert (
        "Above 90%: Longhorn 1 of 1 runs, Mamba 0 of 1; Fisher's exact test, two-sided: p = 1."
        in capsys.readouterr().out
    )
    assert len(json.loads(paths[2].read_text())["runs"]) == 2


def study(**ends):
    """Return runs of two epochs with the given final accuracies by mixer, learning rate and seed."""
    return [
        a_run(mixer=mixer, lr=lr, seed=seed, accuracy=[99.9, end], loss=[None if end == 0 else 1.0])
        for mixer, rates in ends.items()
        for lr, values in zip((1e-3, 1e-2), rates)
        for seed, end in enumerate(values)
    ]


def wilson(k, n, z=1.959964):
    middle, half = (k + z * z / 2) / (n + z * z), z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return 100 * (middle - half), 100 * (middle + half)


def test_the_table_has_medians_shares_and_their_intervals():
    runs = study(longhorn=([91.0, 93.0, 90.0, 99.5], [0.0, 50.0, 96.0]), mamba=([0.0, 2.0, 95.0, 1.0],))
    lines = shares(runs).splitlines()
    assert lines[0] == (
        "| mixer | learning rate | runs | median % | best % | above 90% (95% interval of the share) | finite | epochs |"
    )

    def row(mixer, rate, n, median, best, k, finite):
        low, high = wilson(k, n)
        return f"| {mixer} | {rate} | {n} | {median} | {best} | {k} ({low:.0f} to {high:.0f}%) | {finite} | 2 |"

    assert lines[2:] == [
        row("longhorn", 0.001, 4, 92.0, 99.5, 3, 4),  # a run with exactly 90% has not learned the task
        row("longhorn", 0.01, 3, 50.0, 96.0, 1, 2),
        row("longhorn", "all", 7, 91.0, 99.5, 4, 6),
        row("mamba", 0.001, 4, 1.5, 95.0, 1, 3),
        row("mamba", "all", 4, 1.5, 95.0, 1, 3),
    ]


def test_mixers_are_compared_over_the_rates_and_seeds_that_both_have():
    runs = study(longhorn=([91.0, 93.0, 95.0, 99.5], [96.0, 96.0]), mamba=([0.0, 2.0, 95.0, 1.0],))
    # 5 of 8 runs exceed 90% accuracy: 4 of 4 Longhorn runs and 1 of 4 Mamba runs.
    # Fisher's p-value is the total probability of all tables that are not more probable than the observed table.
    tables = [hypergeom.pmf(k, 8, 5, 4) for k in range(5)]
    p = sum(probability for probability in tables if probability <= tables[4] * (1 + 1e-9))
    text = f"Above 90%: Longhorn 4 of 4 runs, Mamba 1 of 4; Fisher's exact test, two-sided: p = {p:.2g}.\n"
    assert verdict(runs).startswith(text)
    assert verdict(study(longhorn=([1.0],))) == ""


def test_a_seed_is_as_good_as_the_best_of_its_learning_rates():
    runs = study(longhorn=([91.0, 3.0, 95.0], [96.0, 90.0]), mamba=([0.0, 2.0, 99.0], [7.0, 91.5, 99.0]))
    assert verdict(runs).splitlines()[1:] == [  # seeds without a run at each learning rate are ignored
        "Best of 2 learning rates, longhorn by seed: 96.0, 90.0; 1 of 2 above 90%.",
        "Best of 2 learning rates, mamba by seed: 7.0, 91.5; 1 of 2 above 90%.",
    ]


def test_experiments_differ_in_settings_that_are_named():
    runs = study(longhorn=([1.0, 2.0], [3.0]), mamba=([4.0],))
    assert list(experiments(runs)) == ["length 16, width 16"]
    shorter = [replace(run, epochs=1) for run in runs[:2]]
    groups = experiments(runs + shorter)
    assert {label: len(group) for label, group in groups.items()} == {
        "length 16, width 16, epochs 2": 4,
        "length 16, width 16, epochs 1": 2,
    }


def test_every_run_is_a_point_and_a_line(tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch)
    runs = study(longhorn=([91.0, 93.0], [60.0]), mamba=([4.0], [5.0]))
    plot(runs, tmp_path / "plot.png")
    ends, curves = figures[0].axes
    points = [point for line in ends.lines if line.get_marker() == "o" for point in line.get_xydata().tolist()]
    assert sorted(y for _, y in points) == [4, 5, 60, 91, 93]
    assert Counter(round(x) for x, _ in points) == {0: 3, 1: 2}
    assert [line.get_xydata().tolist() for line in curves.lines] == [[[1, 99.9], [2, y]] for y in (91, 93, 60, 4, 5)]
    assert [text.get_text() for text in ends.get_legend().get_texts()] == ["longhorn", "mamba"]
