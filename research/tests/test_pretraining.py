"""Tests of research/weights.py: the order and the options of runs, the weights, and the tables."""

import json

import numpy as np
import torch
import yaml
from processes import call

import vil
from research import seeds, weights
from research.photographs import Cell
from research.predictions import Judged
from research.weights import DEIT, MODELS, POOLED, SMALL
from vil.config import load_config

BEST = {POOLED: 2e-3, SMALL: 1e-3, DEIT: 5e-4}
RIGHT = {POOLED: (30, 25), SMALL: (36, 31), DEIT: (20, 28)}  # correct test images of Tiny ImageNet and of mini-ImageNet


def result(cell):
    """Return an invented result that is best at the model's learning rate in BEST."""
    top1 = 20.0 - abs(np.log(cell.lr / BEST[cell.model]))
    return cell._asdict() | dict(parameters=5000, epochs=160, images=160, top1=top1, curves=dict(eval_top1=[top1]))


def study(stop=None):
    runs = []
    while (cells := weights.to_do(runs)) and not (stop and stop(cells[0])):
        runs.append(result(cells[0]))
    return runs


def judged(runs):
    models = [run["model"] for run in runs if run["stage"] == "seeds"]
    right = [np.concatenate([np.arange(50) >= 50 - count for count in RIGHT[model]]) for model in models]
    files = [f"n01/{i}{ending}" for ending in (".JPEG", ".jpg") for i in range(50)]
    targets = np.zeros(100, dtype=int)
    return Judged(targets, 1 - np.stack(right, axis=1).astype(int), files, [f"{model}-0" for model in models])


def cells_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_each_model_chooses_its_rate_and_then_trains_once():
    cells = [Cell(*(run[name] for name in Cell._fields)) for run in study()]
    assert cells[:9] == [Cell("rates", model, rate, 100) for rate in (5e-4, 1e-3, 2e-3) for model in MODELS]
    assert cells[9:11] == [Cell("rates", POOLED, 4e-3, 100), Cell("rates", DEIT, 2.5e-4, 100)]
    assert cells[11:] == [Cell("seeds", model, BEST[model], 0) for model in MODELS]


def test_a_diverged_run_is_trained_again_with_half_of_the_learning_rate():
    runs = study(stop=lambda cell: cell.stage == "seeds")
    cell = Cell("seeds", POOLED, BEST[POOLED], 0)
    runs.append(cell._asdict() | dict(top1=0.0, diverged="the loss is nan at step 1"))
    left = weights.to_do(runs)
    assert left == [cell._replace(lr=BEST[POOLED] / 2), *(Cell("seeds", m, BEST[m], 0) for m in (SMALL, DEIT))]
    assert cells_of(weights.models_table(runs, None))[0][1:4] == ["-", "-", "-"]
    runs += map(result, left)
    assert weights.to_do(runs) == []
    predicted = judged([run for run in runs if "diverged" not in run])
    assert cells_of(weights.models_table(runs, predicted))[0][1:3] == ["5,000", "0.001"]


def test_reported_runs_end_with_a_phase_at_224_pixels():
    config = ["-c", str(seeds.ROOT / "research" / "configs" / "weights.yaml")]
    run = load_config("", [*config, *weights.words_of(Cell("seeds", POOLED, 2e-3, 0)), "--lr", "2e-3"])
    first, last = run.of_phase(0), run.of_phase(1)
    assert (first.epochs, first.img_size, first.lr, first.warmup_epochs) == (150, 128, 2e-3, 10)
    assert (last.epochs, last.img_size, last.lr, last.warmup_epochs) == (10, 224, 2e-4, 1)
    run = load_config("", [*config, *weights.words_of(Cell("rates", DEIT, 2e-3, 100)), "--lr", "2e-3"])
    assert (run.epochs, run.num_phases, run.img_size, run.torchcompile) == (8, 1, 128, True)


def test_a_run_is_done_after_the_epochs_of_all_phases(tmp_path):
    phases = [dict(epochs=3, img_size=128), dict(epochs=2, img_size=224)]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dict(epochs=300, img_size=128, phases=phases)))
    (tmp_path / "summary.csv").write_text("epoch\n1\n2\n3\n4\n")
    assert not seeds.is_done(tmp_path)
    (tmp_path / "summary.csv").write_text("epoch\n1\n2\n3\n4\n5\n")
    assert seeds.is_done(tmp_path)
    assert seeds.saved_config(tmp_path)["img_size"] == 224


def test_tables_have_test_accuracies_by_data_set_when_all_runs_are_finished():
    early = study(stop=lambda cell: (cell.stage, cell.model) == ("seeds", DEIT))
    assert cells_of(weights.models_table(early, judged(early)))[0][4:] == ["-", "-", "-"]
    assert {row[3] for row in cells_of(weights.differences_table(early, judged(early)))} == {"-"}
    runs = study()
    rows = {row[0]: row[1:] for row in cells_of(weights.models_table(runs, judged(runs)))}
    assert rows[POOLED] == ["5,000", "0.002", "20.00", "60.00", "50.00", "55.00"]
    differences = cells_of(weights.differences_table(runs, judged(runs)))
    assert [row[:3] for row in differences[:2]] == [[POOLED, DEIT, "Tiny ImageNet"], [POOLED, DEIT, "mini-ImageNet"]]
    assert [row[3].split()[0] for row in differences] == ["+20.00", "-6.00", "+7.00", "+12.00", "+12.00", "+12.00"]


def test_the_program_writes_the_weights_and_removes_finished_runs(simulate, tmp_path, capsys):
    config = dict(img_size=32, num_classes=4, model_kwargs=dict(depth=1, embed_dim=32))

    def start(path):
        if path.parent.name.startswith("seeds"):
            model = path.name.removesuffix("-0")
            arguments = config["model_kwargs"] | (dict(num_heads=1) if model == DEIT else {})
            built = seeds.create_model(model, num_classes=4, img_size=32, **arguments)
            saved = config | dict(model=model, model_kwargs=arguments)
            path.mkdir(parents=True)
            torch.save(dict(version=1, state_dict=built.state_dict(), config=saved), path / "last.pt")
            # The weights of each finished run are kept at once, because the machine may be lost during the next run.
            for finished in MODELS[: MODELS.index(model)]:
                assert (tmp_path / "runs" / f"{finished}.tiny_mini_in275.safetensors").exists()
                assert not (path.parent.parent / f"seeds-{BEST[finished]:g}" / f"{finished}-0").exists()

    words, _ = simulate(start, result)
    for _ in range(2):  # the second call has no run to train
        call(weights.main, *words)
    assert len(json.loads((tmp_path / "out.json").read_text())["runs"]) == 11 + 3
    assert not any((tmp_path / "runs").glob("seeds-*/*"))
    for model in MODELS:
        loaded = vil.from_checkpoint(tmp_path / "runs" / f"{model}.tiny_mini_in275.safetensors")
        assert loaded.num_classes == 4
    assert f"| {POOLED} | 5,000 | 0.002 |" in capsys.readouterr().out
