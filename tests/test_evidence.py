"""The benchmarks behind docs/results.md: their data, models and statistics."""

import json
import math
import re
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from vil.kernels import longhorn_scan, selective_scan

from benchmarks import mqar, seeds

CPU = torch.device("cpu")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")


def a_run(**changes):
    settings = dict(mixer="longhorn", length=16, width=16, lr=1e-2, pairs=2, batch=16, epochs=2, train_examples=64)
    return mqar.Run(**{**settings, "test_examples": 32, "weight_decay": 0.1, "stop_at": 99.0, "seed": 0, **changes})


def test_a_recall_example_lists_pairs_and_then_asks_for_every_value_once():
    tokens, queries, values = mqar.recall_examples(50, 32, 4, seed=0, device=CPU)
    for row, places, answers in zip(tokens.tolist(), queries.tolist(), values.tolist()):
        memory = dict(zip(row[0:8:2], row[1:8:2]))
        assert len(memory) == 4  # keys are distinct
        assert all(0 < key < 4096 <= value < 8192 for key, value in memory.items())
        assert len(set(memory.values())) == 4
        assert sorted(row[place] for place in places) == sorted(memory)
        assert [memory[row[place]] for place in places] == answers
        assert all(place >= 8 and place % 2 == 0 for place in places)
        assert all(token == 0 for place, token in enumerate(row) if place >= 8 and place not in places)


def test_distances_follow_the_power_law():
    _, queries, _ = mqar.recall_examples(20_000, 64, 4, seed=0, device=CPU)
    first = (queries[:, 0] - 8) // 2  # the first of a draw without replacement has the plain distribution
    found = torch.bincount(first, minlength=28) / len(first)
    expected = torch.arange(1.0, 29.0) ** (mqar.POWER - 1)
    torch.testing.assert_close(found, expected / expected.sum(), atol=0.01, rtol=0)


def test_examples_follow_from_their_seed_and_differ_between_seeds():
    same, again, other = (mqar.recall_examples(20, 16, 2, seed, CPU)[0] for seed in (3, 3, 4))
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_pairs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="5 pairs and their queries need an even length of at least 20, not 16"):
        mqar.recall_examples(1, 16, 5, 0, CPU)


@pytest.mark.parametrize("mixer", mqar.MIXERS)
def test_every_mixer_is_causal(mixer):
    torch.manual_seed(0)
    model = mqar.RecallModel(mixer, 16, 12)
    tokens = torch.randint(8192, (1, 12))
    later = torch.cat([tokens[:, :8], torch.randint(8192, (1, 4))], dim=1)
    places = torch.arange(12)[None]
    before, after = model(tokens, places), model(later, places)
    torch.testing.assert_close(after[:, :8], before[:, :8])
    assert not torch.allclose(after[:, 9:], before[:, 9:])


@pytest.mark.parametrize("mixer", ["longhorn", "mamba"])
def test_the_causal_mixer_is_one_direction_of_the_packages_block(mixer):
    torch.manual_seed(0)
    module = mqar.MIXERS[mixer](16)
    h = torch.randn(2, 9, 16)
    u, z = module.in_proj(h).chunk(2, dim=-1)
    direction = module.weights
    v, logits, k, q = direction(u)
    rest = (k, q, direction.skip, direction.step_proj.bias)
    y = (
        longhorn_scan(v, logits, *rest)
        if mixer == "longhorn"
        else selective_scan(v, logits, -direction.A_log.exp(), *rest)
    )
    torch.testing.assert_close(module(h), module.out_proj(y * F.silu(z)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mixer", mqar.MIXERS)
def test_a_run_learns_what_it_is_shown_and_stops_there(mixer):
    run = a_run(mixer=mixer, pairs=1, length=8, epochs=100, train_examples=32)
    shown = mqar.recall_examples(32, run.length, run.pairs, 0, CPU)
    list(mqar.train(run, lambda run: (shown, shown), CPU, deadline=math.inf))
    assert run.accuracy[0] < 50
    assert run.accuracy[-1] >= 99
    assert len(run.accuracy) < 100
    assert run.parameters == sum(p.numel() for p in mqar.RecallModel(mixer, 16, 8).parameters())


def test_a_run_ends_when_its_time_is_up():
    run = a_run(epochs=50)
    list(mqar.train(run, lambda run: [mqar.recall_examples(64, 16, 2, 0, CPU)] * 2, CPU, deadline=0.0))
    assert len(run.accuracy) == 1


def test_runs_are_dealt_whole_groups_at_a_time_and_all_of_them():
    runs = [a_run(mixer=m, length=t, lr=lr) for m in mqar.MIXERS for t in (16, 32, 64) for lr in (1e-3, 1e-2)]
    hands = mqar.deal(runs, 3)
    assert sorted(map(str, runs)) == sorted(str(run) for hand in hands for run in hand)
    places = {(run.mixer, run.length, i) for i, hand in enumerate(hands) for run in hand}
    assert len(places) == 9  # no group is in two hands
    assert [sum(run.length for run in hand) for hand in hands] == [224, 224, 224]


def test_the_best_learning_rate_is_the_one_that_ends_highest(tmp_path):
    runs = [asdict(a_run(lr=lr, parameters=5)) for lr in (1e-3, 1e-2)]
    runs[0]["accuracy"], runs[1]["accuracy"] = [10.0, 60.0], [90.0, 50.0]
    assert "| 16 | longhorn | 5 | 60.0 (0.001) |" in mqar.markdown(runs)
    mqar.plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_seeds_are_compared_in_pairs():
    top1 = {"vil_tiny": [90.0, 92.0, 94.0], "vim_tiny": [89.0, 92.0, 91.0], "deit_tiny_patch16_224": [80.0, 80.0, 80.0]}
    runs = [
        dict(model=m, seed=s, parameters=1000, top1=v, epoch_seconds=2.0)
        for m, values in top1.items()
        for s, v in enumerate(values)
    ]
    lines = seeds.report(runs).splitlines()
    assert lines[2].startswith("| vil_tiny | 1,000 | 92.00 ± 2.00 | 90.00 92.00 94.00 | 2.00 |")
    # differences 1, 0, 3: mean 4/3, standard error sqrt(7/3 / 3), t at 2 degrees of freedom 4.3027
    half = 4.3027 * math.sqrt(7 / 9)
    assert f"+1.33 ({4 / 3 - half:+.2f} to {4 / 3 + half:+.2f}), p = 0.27" in lines[3]


def test_the_published_results_are_those_of_the_files(request):
    """docs/results.md quotes what docs/results/*.json hold."""
    docs = request.config.rootpath / "docs"
    text = (docs / "results.md").read_text()
    assert mqar.markdown(json.loads((docs / "results" / "mqar.json").read_text())["runs"]) in text
    for name in ("digits", "digits_few"):
        assert seeds.report(json.loads((docs / "results" / f"{name}.json").read_text())["runs"]) in text


def test_the_readme_quotes_no_result_that_the_page_does_not_hold(request):
    root = request.config.rootpath
    section = (root / "README.md").read_text().split("\n## Results\n")[1].split("\n## ")[0]
    page = (root / "docs" / "results.md").read_text()
    held = {float(number.replace(",", "")) for number in NUMBER.findall(page)}
    quoted = NUMBER.findall(section)
    assert len(quoted) > 20
    rounded = {number: len(number.partition(".")[2]) for number in quoted}
    missing = [
        q for q, digits in rounded.items() if not any(round(h, digits) == float(q.replace(",", "")) for h in held)
    ]
    assert missing == []
