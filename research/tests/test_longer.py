"""Tests of research/longer.py and research/cost.py: the order of runs, the tables, and the minutes to an accuracy."""

import json

import numpy as np
import pytest
import yaml
from processes import call
from scipy.stats import ttest_ind

from research import cost, longer, seeds
from research.compare import holm
from research.longer import DEIT, MODELS, POOLED, PUBLISHED, VIL, VIM
from research.photographs import Cell
from research.predictions import Judged

BEST = dict(zip(MODELS, (1.5e-3, 1.5e-3, 7.5e-4, 3e-3, 1.5e-3)))
IMAGES = 100
RIGHT = {
    POOLED: (60, 61, 60, 62), VIL: (50, 52, 54), VIM: (50, 51, 49), DEIT: (40, 41, 42, 40), PUBLISHED: (58, 60, 60, 59)
}  # fmt: skip


def result(cell):
    """Return an invented result whose accuracy after 10 epochs is highest at the model's rate in BEST."""
    last = 20.0 - abs(np.log(cell.lr / BEST[cell.model])) if cell.stage == "rates" else 40.0 + cell.seed
    curves = dict(eval_top1=[10.0, 30.0 + cell.seed, last])
    return cell._asdict() | dict(parameters=5000, epochs=3, images=3 * 60_000, top1=last, curves=curves)


def study(stop=None):
    """Return the results of the planned runs, up to the first run that `stop` accepts."""
    runs = []
    while (cells := longer.to_do(runs)) and not (stop and stop(cells[0])):
        runs.append(result(cells[0]))
    return runs


def judged(runs):
    runs = [run for run in runs if run["stage"] == "seeds" and "diverged" not in run]
    names = [f"{run['model']}-{run['seed']}" for run in runs]
    right = [RIGHT[run["model"]][run["seed"]] for run in runs]
    predicted = np.stack([np.arange(IMAGES) >= count for count in right], axis=1).astype(int)
    return Judged(np.zeros(IMAGES, dtype=int), predicted, [str(i) for i in range(IMAGES)], names)


def cells_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_each_model_chooses_its_rate_and_then_all_models_train_one_seed_after_the_other():
    cells = [Cell(*(run[name] for name in Cell._fields)) for run in study()]
    assert cells[:15] == [Cell("rates", model, rate, 100) for rate in (7.5e-4, 1.5e-3, 3e-3) for model in MODELS]
    assert cells[15:17] == [Cell("rates", VIM, 3.75e-4, 100), Cell("rates", DEIT, 6e-3, 100)]
    seeds_of_all = [Cell("seeds", model, BEST[model], seed) for seed in range(3) for model in MODELS]
    assert cells[17:] == seeds_of_all + [Cell("seeds", model, BEST[model], 3) for model in (POOLED, DEIT, PUBLISHED)]
    rows = {row[0]: row[1:] for row in cells_of(longer.rates_table(study()))}
    assert [row[-1] for row in rows.values()] == ["0.0015", "0.0015", "0.00075", "0.003", "0.0015"]
    assert rows[POOLED][2] == "20.00"


def test_only_deit_is_compiled_and_only_runs_that_choose_are_short():
    short = ["--epochs", "10", "--warmup-epochs", "1"]
    assert longer.words_of(Cell("rates", VIL, 1e-3, 100)) == short
    assert longer.words_of(Cell("rates", DEIT, 1e-3, 100)) == [*short, "--torchcompile"]
    assert longer.words_of(Cell("seeds", POOLED, 1e-3, 0)) == []
    assert longer.words_of(Cell("seeds", PUBLISHED, 1e-3, 0)) == ["--torchcompile"]


def test_test_accuracies_and_tests_are_shown_after_the_last_run():
    runs = study()
    for table in (longer.models_table, longer.differences_table):
        early = study(stop=lambda cell: (cell.stage, cell.model, cell.seed) == ("seeds", PUBLISHED, 3))
        assert "52.00" not in table(early, judged(early))
        assert "- | - |" in table(early, judged(early))
    rows = cells_of(longer.models_table(runs, judged(runs)))
    assert rows[1] == [VIL, "5,000", "0.0015", "3", "52.00 ± 2.00", "50.00 52.00 54.00", "41.00 ± 1.00"]
    pairs = [(POOLED, VIL), (POOLED, DEIT), (POOLED, PUBLISHED)]
    p_values = [ttest_ind(RIGHT[first], RIGHT[second], equal_var=False).pvalue for first, second in pairs]
    *rows, estimate = cells_of(longer.differences_table(runs, judged(runs)))
    assert [tuple(row[:2]) for row in rows] == pairs
    assert rows[1][2].startswith("+20.00 (")
    assert [row[3:] for row in rows] == [[f"{p:.2g}", f"{q:.2g}"] for p, q in zip(p_values, holm(p_values))]
    assert estimate[:2] + estimate[3:] == [VIL, VIM, "-", "-"]
    assert estimate[2].startswith("+2.00 (")


def test_a_diverged_run_has_a_test_accuracy_of_zero():
    runs = study()
    i = next(i for i, run in enumerate(runs) if (run["stage"], run["model"], run["seed"]) == ("seeds", DEIT, 0))
    runs[i] = Cell("seeds", DEIT, BEST[DEIT], 0)._asdict() | dict(top1=0.0, diverged="the loss is nan at step 1")
    rows = cells_of(longer.models_table(runs, judged(runs)))
    assert rows[3][1:6] == ["5,000", "0.003", "4", "30.75 ± 20.52", "0.00 41.00 42.00 40.00"]
    assert rows[3][6].startswith("31.50 ± ")  # the mean of 0, 41, 42 and 43 on the selection split
    rows = {row[0]: row[1:] for row in cells_of(longer.minutes_table(runs, {DEIT: 1000.0}))}
    assert rows[DEIT][-1] == "3.0"


def test_minutes_are_counted_up_to_the_first_epoch_whose_mean_reaches_the_accuracy(monkeypatch):
    assert cost.minutes_to(30, [[10, 29, 40], [20, 31, 10]], 1.5) == 3.0
    assert cost.minutes_to(31, [[10, 29, 40], [20, 31, 10]], 1.5) is None
    assert cost.minutes_to(20, [[10], [20, 31, 42]], 1.5) == 4.5  # the first run has diverged in its second epoch
    monkeypatch.setattr(longer, "LEVELS", (31, 41, 50))
    speeds = {POOLED: 1000.0, VIL: 500.0, DEIT: 2000.0}
    rows = {row[0]: row[1:] for row in cells_of(longer.minutes_table(study(), speeds))}
    assert rows[POOLED] == ["1,000", "2.0", "3.0", "not reached", "3.0"]  # an epoch takes a minute
    assert rows[VIL] == ["500", "4.0", "6.0", "not reached", "6.0"]
    assert rows[VIM] == ["-"] * 5  # the throughput of ViM is unknown
    assert rows[DEIT] == rows[PUBLISHED] == ["2,000", "1.0", "1.5", "not reached", "1.5"]
    early = longer.minutes_table(study(stop=lambda cell: cell.seed == 3), speeds)
    assert {cell for row in cells_of(early) for cell in row[1:]} == {"-"}


def test_the_throughput_of_a_model_is_the_median_of_its_fastest_mode(tmp_path):
    measured = {VIL: [(7.0, 6.0), (9.0, 6.0), (7.5, 7.6)], DEIT: [(8.0, 16.0)]}
    rows = [
        dict(model=model) | {mode: dict(images_per_second=speed) for mode, speed in zip(("graph", "compiled"), speeds)}
        for model, rounds in measured.items()
        for speeds in rounds
    ]
    (tmp_path / "file.json").write_text(json.dumps(dict(rows=[*rows, dict(model="resnet50")])))
    assert cost.throughput(tmp_path / "file.json") == {VIL: 7.6, DEIT: 16.0}
    assert cost.throughput(tmp_path / "missing.json") == {}


def test_the_program_trains_all_runs_stops_at_the_deadline_and_stores_divergence(simulate, tmp_path, capsys):
    def start(path):
        if path.parts[-2:] == ("seeds-0.0015", f"{PUBLISHED}-1"):
            raise SystemExit("published_vit-1 ended with status 1: the loss is nan at step 3 of epoch 2.")

    words, trained = simulate(start, result)
    with pytest.raises(SystemExit) as stopped:
        call(longer.main, *words, "--minutes", "0")
    assert stopped.value.code == 75
    for _ in range(2):  # the second call has no run to train
        call(longer.main, *words)
    assert not any((tmp_path / "runs").glob("*/*"))
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert len(runs) == 17 + 18
    assert [(run["model"], run["seed"]) for run in runs if "diverged" in run] == [(PUBLISHED, 1)]
    expected = [POOLED, VIL, PUBLISHED, POOLED, VIL, POOLED, VIL, PUBLISHED, POOLED, PUBLISHED]
    assert trained["seeds-0.0015"] == expected  # the diverged run is not repeated
    shown = capsys.readouterr().out
    assert f"| {VIM} | 5,000 | 0.00075 | 3 | 100.00 ± 0.00 |" in shown
    assert f"| {PUBLISHED} | 5,000 | 0.0015 | 4 | 75.00 ± 50.00 | 100.00 0.00 100.00 100.00 |" in shown


def test_the_recipe_is_that_of_the_published_vit_except_for_the_shape_the_crops_and_the_length():
    recipes = [
        yaml.safe_load((seeds.ROOT / "research" / "configs" / f"{name}.yaml").read_text())
        for name in ("longer", "published_vit")
    ]
    differing = {name for name in recipes[0] | recipes[1] if recipes[0].get(name) != recipes[1].get(name)}
    shape, crops, length = {"model_kwargs", "img_size"}, {"scale", "ratio"}, {"epochs", "warmup_epochs"}
    assert differing == shape | crops | length | {"data_dir", "val_split", "lr"}
