"""Tests of the report page on the best epoch, which a run writes when it ends."""

import re

import pytest
import torch
from processes import in_processes

import vil
from vil import distributed
from vil.config import Config
from vil.training import final_report
from vil.training.summary import Reporter
from vil.training.trainer import Trainer, train

MODEL = dict(model="vil_tiny", model_kwargs=dict(embed_dim=16, depth=1, patch_size=8), img_size=16, workers=0)
CPU = torch.device("cpu")
CLASSES, IMAGES = ("ant", "bee", "cat", "dog"), 28  # classes and number of images in image_folder/val


def config(image_folder, output, **options):
    settings = dict(data_dir=str(image_folder), output=str(output), experiment="run", epochs=3, global_batch_size=16)
    return Config(**MODEL | settings | options, lr=1e-2, warmup_epochs=0)


@pytest.fixture(autouse=True)
def no_mosaic(monkeypatch):
    monkeypatch.setattr("vil.training.mosaic.Mosaic.add", lambda *_: None)


@pytest.mark.parametrize("ema", [False, True])
def test_a_run_ends_with_a_report_on_its_best_epoch(image_folder, tmp_path, ema):
    run = Trainer(config(image_folder, tmp_path, model_ema=ema, model_ema_decay=0.5), CPU, 0, 1)
    run.run()
    page = (tmp_path / "run" / "report.html").read_text()
    history = run.state.history
    top1, epoch = max((row[name], row["epoch"]) for row in history for name in row if name.startswith("eval_top1"))
    assert f"<td>{top1:.2f}</td>" in page
    assert re.search(f"best.pt, epoch {epoch} of 3(, EMA weights)?<", page)
    assert f"{IMAGES} images. The best epoch was chosen on these images, so the accuracy is optimistic" in page
    assert page.count("data:image/png;base64,") == 1  # the training curve is the page's only PNG image
    assert all(f'<th scope="col">{name}</th>' in page for name in CLASSES)
    # the evaluation of best.pt leaves the weights of the last epoch in the model
    last = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["state_dict"]
    assert all(torch.equal(t, last[name]) for name, t in run.state.model.state_dict().items())
    closing = Reporter(tmp_path / "run", config(image_folder, tmp_path), {}, "").closing_line(history)
    assert closing.endswith(f", report: {tmp_path}/run/report.html")


def test_the_last_line_of_a_run_loads_the_best_checkpoint(image_folder, tmp_path, no_pictures, capsys):
    train(config(image_folder, tmp_path, epochs=1), CPU, 0, 1)
    last = capsys.readouterr().out.splitlines()[-1]
    path = re.fullmatch(r"load in Python: vil\.from_checkpoint\('(.*)'\)", last)[1]
    assert path == str(tmp_path / "run" / "best.pt")
    assert vil.from_checkpoint(path).num_classes == len(CLASSES)


def train_in_process(rank, image_folder, output):
    train(config(image_folder, output), *distributed.init_process_group("cpu"))
    distributed.destroy_process_group()


def matrix_of(folder):
    """Return the cells of the confusion matrix in a report."""
    page = (folder / "run" / "report.html").read_text().partition('class="matrix"')[2].partition("</table>")[0]
    return re.findall(r"--share: [.0-9]+\">(\d*)<", page)


def test_the_report_of_several_processes_counts_each_image_once(image_folder, tmp_path):
    for ended in in_processes(2, train_in_process, image_folder, tmp_path / "two"):
        assert ended.status == 0, ended.errors
    train(config(image_folder, tmp_path / "one"), CPU, 0, 1)
    assert matrix_of(tmp_path / "two") == matrix_of(tmp_path / "one")
    assert sum(int(count or 0) for count in matrix_of(tmp_path / "two")) == IMAGES


@pytest.mark.parametrize(
    ("limit", "options"),
    [(("MOST_IMAGES", 27), {}), (("MOST_CLASSES", 3), {}), (("MOST_IMAGES", 28), dict(synthetic=16, num_classes=4))],
)
def test_large_and_synthetic_runs_write_no_report(limit, options, image_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(final_report, *limit)
    train(config(image_folder, tmp_path, epochs=1, **options), CPU, 0, 1)
    assert not (tmp_path / "run" / "report.html").exists()


def test_the_accuracy_of_a_single_epoch_is_not_called_optimistic(image_folder, tmp_path):
    train(config(image_folder, tmp_path, epochs=1), CPU, 0, 1)
    assert "optimistic" not in (tmp_path / "run" / "report.html").read_text()


def test_a_signal_ends_the_evaluation_without_a_report(image_folder, tmp_path, caplog, monkeypatch):
    run = Trainer(config(image_folder, tmp_path, epochs=1), CPU, 0, 1)
    finish = run.checkpointer.save
    monkeypatch.setattr(run.checkpointer, "save", lambda: finish() or setattr(run.signals, "received", True))
    run.run()
    assert not (tmp_path / "run" / "report.html").exists()
    assert "report.html is not written, because the evaluation was interrupted" in caplog.text


def test_a_run_ends_without_a_report_if_its_best_epoch_has_another_image_size(
    image_folder, tmp_path, caplog, monkeypatch
):
    row_of_epoch = Trainer.row_of_epoch
    monkeypatch.setattr(Trainer, "row_of_epoch", lambda run, epoch: row_of_epoch(run, epoch) | {"eval_top1": 9 - epoch})
    deit = dict(model="deit_tiny_patch16_224", model_kwargs=dict(embed_dim=16, depth=1, num_heads=1, patch_size=8))
    phases = [dict(epochs=1, img_size=16), dict(epochs=1, img_size=24)]
    assert len(train(config(image_folder, tmp_path, **deit, model_ema=False, phases=phases), CPU, 0, 1)) == 2
    assert not (tmp_path / "run" / "report.html").exists()
    assert "an earlier phase trained the best weights at another image size" in caplog.text


def test_a_lost_best_checkpoint_or_an_unwritable_page_does_not_fail_a_run(image_folder, tmp_path, caplog, monkeypatch):
    run = Trainer(config(image_folder, tmp_path, epochs=1), CPU, 0, 1)
    finish = run.checkpointer.save
    monkeypatch.setattr(run.checkpointer, "save", lambda: finish() or (tmp_path / "run" / "best.pt").unlink())
    run.run()
    assert not (tmp_path / "run" / "report.html").exists()
    (tmp_path / "other" / "run" / "report.html").mkdir(parents=True)
    train(config(image_folder, tmp_path / "other", epochs=1), CPU, 0, 1)
    assert f"failed to write {tmp_path}/other/run/report.html" in caplog.text
