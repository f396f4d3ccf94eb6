"""Tests of the HTML page that `validate.py --report` writes, against scikit-learn's metrics and the image files."""

import base64
import io
import os
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
from fixtures import CLASSES, VAL_IMAGES
from PIL import Image
from sklearn.calibration import calibration_curve
from sklearn.metrics import confusion_matrix, precision_score, recall_score
from timm.data.dataset import IterableImageDataset

from vil.data.sources.splits import open_split
from vil.evaluation.calibration import calibration_bins, expected_calibration_error
from vil.evaluation.predictions import Predictions
from vil.evaluation.report import report_page
from vil.fault_tolerance.files import write_atomically

VOID = {"meta", "img", "br", "path", "rect"}
NAMES = dict(enumerate(["<script>alert(1)</script>", *CLASSES[1:]]))
MODEL = dict(model="vil_tiny", weights="best.pt", top1=50.0, top1_interval=(40.0, 60.0), top5=100.0, loss=1.0)


class Page(HTMLParser):
    """HTML parser that collects a page's tables as text, images with captions, and references to files."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tables, self.captions, self.pictures, self.references = [], [], [], [], []
        self.alternatives = []  # alternative texts of the images
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.references += [attributes[name] for name in ("src", "href") if name in attributes]
        assert tag != "script"
        if tag == "img":
            self.alternatives.append(attributes["alt"])
            self.pictures.append(Image.open(io.BytesIO(base64.b64decode(attributes["src"].partition(",")[2]))))
        elif tag == "figcaption":
            self.captions.append("")
        elif tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, text):
        if "figcaption" in self.open:
            self.captions[-1] += text
        elif self.open[-1:] in (["td"], ["th"]):
            self.tables[-1][-1][-1] += text


def section(text, title):
    """Parse the part of a page below the heading `title`, up to the next heading of the same level."""
    return Page(text.partition(f"<h2>{title}</h2>")[2].partition("<h2>")[0].partition("</main>")[0])


@pytest.fixture(scope="module", params=[1, 2])
def found(request, image_folder):
    """Return targets, predictions, probabilities, image files and report page of a split with an unreadable image."""
    images, rng = open_split(str(image_folder), "", "val"), np.random.default_rng(0)
    targets = np.repeat(np.arange(4), VAL_IMAGES)
    targets[0] = -1
    best = np.stack([rng.permuted(np.tile(np.arange(4), (len(targets), 1)), axis=1) for _ in range(request.param)], 1)
    best[targets == 3] = [0, 1, 2, 3]  # no image of class 3 is classified correctly
    shares = -np.sort(-rng.dirichlet(np.ones(4), best.shape[:2]), axis=-1)
    judged = Predictions.of(targets, best, shares)
    notes = ["1 unreadable images were skipped"]
    models = [MODEL | dict(images=len(targets) - 1)] * request.param
    page = report_page("Validation", models, judged, NAMES, notes, images)
    return targets[1:], best[1:], shares[1:], [file for file, _ in images.reader.samples][1:], page


def test_the_report_page_loads_no_other_files_and_runs_no_scripts(found):
    page = Page(found[-1])
    assert page.references
    assert all(reference.startswith("data:image/jpeg;base64,") for reference in page.references)
    assert "1 unreadable images were skipped." in found[-1]
    assert "://" not in found[-1]
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in found[-1]
    several = len(page.tables[0]) == 3
    first, second = (found[1][:, m, 0] == found[0] for m in (0, -1))
    both = f"Both models classify {(first & second).sum()} images correctly, only the first {(first & ~second).sum()},"
    single = f"only the second {(second & ~first).sum()}, and neither {(~first & ~second).sum()}."
    assert (f"{both}\n{single}<" in found[-1]) == several
    assert found[-1].count(">Validation</") == 2  # "Validation" is the page's title and its heading
    # With two models, the name of each model is a heading three times: over tables, mistakes and correct predictions.
    assert found[-1].count("<h3>vil_tiny, best.pt</h3>") == 2 * 3 * several


def test_names_of_folders_files_and_classes_need_not_be_utf_8(image_folder, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    for name, pictures in ((b"caf\xe9", "ant"), (b"\xff", "bee")):
        shutil.copytree(image_folder / "val" / pictures, folder / "val" / os.fsdecode(name))
        (folder / "val" / os.fsdecode(name) / "0.png").rename(folder / "val" / os.fsdecode(name + b"/\xe9.png"))
    images = open_split(str(folder), "", "val")
    judged = Predictions.of(np.repeat([0, 1], VAL_IMAGES), *(np.tile(v, (14, 1, 1)) for v in ([[1, 0]], [[0.7, 0.3]])))
    names = {number: name for name, number in images.reader.class_to_idx.items()}
    models = [MODEL | dict(weights=str(folder / "best.pt"), images=14)]
    page = report_page(f"Validation on {folder}", models, judged, names, [str(folder)], images)
    write_atomically(tmp_path / "index.html", page)
    captions = Page((tmp_path / "index.html").read_text(encoding="utf-8")).captions
    assert len(captions) == 2 * VAL_IMAGES  # class 0 is never predicted, class 1 always


def test_class_metrics_and_confusions_equal_scikit_learns(found):
    targets, best, _, _, text = found
    overview, classes, *matrices = Page(text).tables
    models = len(overview) - 1
    classes = classes[models - 1 :]  # with two models, the first row of the table has the models' names
    assert [row[3 * m + 2] for m in range(models) for row in classes[:1]] == ["recall %"] * models
    truth, expected = {NAMES[number]: number for number in range(4)}, []
    assert sorted(row[0] for row in classes[1:]) == sorted(truth)
    for m, said in enumerate(best[:, :, 0].T):
        recall, precision = (
            score(targets, said, average=None, zero_division=np.nan) for score in (recall_score, precision_score)
        )
        for name, count, *columns in classes[1:]:
            number = truth[name]
            assert int(count) == (targets == number).sum()
            told = precision[number]
            assert columns[3 * m : 3 * m + 2] == [
                f"{100 * recall[number]:.1f}",
                "-" if np.isnan(told) else f"{100 * told:.1f}",
            ]
            wrong = np.bincount(said[(targets == number) & (said != number)], minlength=4)
            mistakes = [f"{NAMES[n]} ({wrong[n]})" for n in range(4) if 0 < wrong[n] == wrong.max()] or [""]
            assert columns[3 * m + 2] in mistakes
        assert classes[-1][2] >= classes[1][2] == "0.0"  # the class with the lowest recall is listed first
        counts = [[int(cell or 0) for cell in row[1:]] for row in matrices[m][1:]]
        assert counts == confusion_matrix(targets, said).tolist()
        assert matrices[m][0] == ["", *truth] == ["", *(row[0] for row in matrices[m][1:])]
        expected += confusion_matrix(targets, said, normalize="true").flatten().tolist()
    cells = re.findall(r'<td class="(\w+)" style="--share: ([.0-9]+)"', text)
    assert [float(strength) for _, strength in cells] == pytest.approx(expected, abs=0.006)
    # Cells of correct predictions are green.
    assert [mark == "right" for mark, _ in cells] == [*np.eye(4).flatten()] * models


def captions_of(page):
    return [caption.replace("\n", "") for caption in page.captions]


def caption_of(found, i, m):
    targets, best, shares, files, _ = found
    said = "".join(f"{NAMES[n]} ({100 * share:.1f}%)" for n, share in zip(best[i, m, :3], shares[i, m, :3]))
    return f"true class {NAMES[targets[i]]}{said}{'/'.join(files[i].split('/')[-2:])}"


def test_misclassified_images_are_shown_most_confident_first(found):
    targets, best, shares, files, text = found
    page, captions, pictures, alternatives = section(text, "The most confident mistakes"), [], [], []
    for m in range(best.shape[1]):
        wrong = np.flatnonzero(best[:, m, 0] != targets)
        for i in wrong[np.argsort(-shares[wrong, m, 0])][:32]:
            captions.append(caption_of(found, i, m))
            pictures.append(files[i])
            alternatives.append(f"true class {NAMES[targets[i]]}, predicted {NAMES[best[i, m, 0]]}")
    assert captions_of(page) == captions
    assert page.alternatives == alternatives
    for shown, file in zip(page.pictures, pictures, strict=True):
        truth = Image.open(file)
        assert shown.size == truth.size
        assert np.abs(np.asarray(shown).astype(int) - np.asarray(truth)).mean(axis=(0, 1)).max() < 60
        np.testing.assert_allclose(np.asarray(shown).mean((0, 1)), np.asarray(truth).mean((0, 1)), atol=4)


def test_correctly_classified_images_are_shown_in_the_order_of_the_split(found, monkeypatch):
    targets, best, _, _, text = found
    correct = [np.flatnonzero(best[:, m, 0] == targets) for m in range(best.shape[1])]
    assert max(map(len, correct)) <= 16
    assert captions_of(section(text, "Correct predictions")) == [
        caption_of(found, i, m) for m, images in enumerate(correct) for i in images
    ]


def test_a_comparison_shows_the_images_on_which_the_models_differ(found):
    targets, best, shares, _, text = found
    if best.shape[1] == 1:
        assert "models differ" not in text
        return
    (first, second), is_right = best[:, :, 0].T, best[:, :, 0] == targets[:, None]
    page = section(text, "Images on which the models differ")
    captions, titles = [], []
    for title, right in (
        ("Only the first model is correct", [True, False]),
        ("Only the second model is correct", [False, True]),
        ("Both models are wrong", [False, False]),
    ):
        images = np.flatnonzero((is_right == right).all(1) & (first != second))
        error = np.where(is_right, 0, shares[..., 0]).max(1)
        captions += [
            (NAMES[targets[i]], f"first model: {NAMES[first[i]]} ({100 * shares[i, 0, 0]:.1f}%)",
             f"second model: {NAMES[second[i]]} ({100 * shares[i, 1, 0]:.1f}%)")
            for i in images[np.argsort(-error[images])]
        ]  # fmt: skip
        titles.append(f"<h3>{title}: {len(images)} image{'s' * (len(images) != 1)}</h3>")
    assert all(title in text for title in titles)
    assert len(captions) == len(page.captions) > 3
    for (truth, one, other), caption, alternative in zip(captions, captions_of(page), page.alternatives):
        assert caption.startswith(f"true class {truth}{one}{other}")
        assert alternative == f"true class {truth}, " + ", ".join(re.sub(r" \([.0-9]+%\)", "", t) for t in (one, other))


def test_the_page_shows_the_calibration_of_each_models_top_1_predictions(found):
    targets, best, shares, _, text = found
    bars = re.findall("<title>([0-9]+) images, accuracy ([.0-9]+)%, mean probability ([.0-9]+)%</title>", text)
    calibrated = [calibration_bins(shares[:, m, 0], best[:, m, 0] == targets) for m in range(best.shape[1])]
    errors = [f"{expected_calibration_error(bins):.1f} points" for bins in calibrated]
    assert [row[6] for row in Page(text).tables[0][1:]] == errors
    expected = [[b.images, b.accuracy, b.confidence] for bins in calibrated for b in bins if b.images]
    np.testing.assert_allclose(np.array(bars, dtype=float), expected, atol=0.051)


def test_calibration_equals_scikit_learns():
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.2, 1, 500)
    shares[0] = 1.0
    right = rng.uniform(size=500) < shares**2
    bins = calibration_bins(shares, right)
    filled = [b for b in bins if b.images]
    accuracy, confidence = calibration_curve(right, shares, n_bins=10)
    assert [b.accuracy for b in filled] == pytest.approx(100 * accuracy)
    assert [b.confidence for b in filled] == pytest.approx(100 * confidence)
    weights = [b.images / 500 for b in filled]
    assert expected_calibration_error(bins) == pytest.approx(
        float(np.sum(weights * np.abs(accuracy - confidence)) * 100)
    )
    assert expected_calibration_error(calibration_bins(np.array([0.75]), np.array([True]))) == 25
    assert expected_calibration_error(calibration_bins(np.zeros(0), np.zeros(0, dtype=bool))) == 0


def test_many_classes_get_a_list_of_the_most_frequent_confusions_instead_of_a_matrix(
    image_folder, monkeypatch, tmp_path
):
    monkeypatch.setattr("vil.evaluation.report.MAX_MATRIX_CLASSES", 24)
    monkeypatch.setattr("vil.evaluation.report.MAX_MISTAKES", 12)
    monkeypatch.setattr("vil.evaluation.report.MAX_CONFUSIONS", 4)
    images = open_split(str(image_folder), "", "val")
    targets = np.arange(28)
    best = np.stack([targets, targets + 1], 1)[:, None, :]
    best[:9, 0, 0] = 50
    best[-4:, 0, 0] = [70, 71, 72, 73]
    targets[:9] = 40
    judged = Predictions.of(targets, best, np.full(best.shape, 0.5))
    monkeypatch.setattr("vil.evaluation.report.THUMBNAIL_SIZE", 10)
    monkeypatch.setattr("vil.evaluation.report.MAX_CORRECT", 3)
    words = "Validation", [MODEL | dict(images=28)], judged, {40: "a\n", 50: "b"}, []
    text = report_page(*words, images)
    shutil.make_archive(str(tmp_path / "val"), "tar", image_folder / "val")
    of_others = open_split(str(tmp_path), "", "val"), IterableImageDataset("", reader=[])
    page, of_tar, of_stream = (Page(report_page(*words, others)) for others in (images, *of_others))
    # The page shows at most 12 of the 13 misclassified images and 3 of the 15 correctly classified ones.
    assert [max(picture.size) for picture in page.pictures] == [10] * (12 + 3)
    assert [caption.split()[2][:2] for caption in page.captions[12:]] == ["9", "16", "23"]
    assert [picture.tobytes() for picture in of_tar.pictures] == [picture.tobytes() for picture in page.pictures]
    assert of_stream.pictures == []  # an iterable dataset has no images by index
    assert of_stream.captions[0].split()[:3] == page.captions[0].split()[:3]
    _, classes, rows = page.tables
    assert [classes[5], classes[-1]] == [["a?", "9", "0.0", "-", "b (9)"], ["23", "1", "100.0", "100.0", ""]]
    assert rows[:2] == [["true class", "predicted class", "images"], ["a?", "b", "9"]]
    assert rows[2:] == [[f"{i}", f"{i + 46}", "1"] for i in range(24, 27)]
    assert "only for up to 24 classes" in text
    assert len(re.findall("<figure>", text)) == 12 + 3
    monkeypatch.setattr("vil.evaluation.report.MAX_MATRIX_CLASSES", 25)
    cells = re.findall(r"--share: ([.0-9]+)\"", report_page(*words, images))  # cells of the confusion matrix
    assert (len(cells), {*cells}) == (25**2, {"0.00", "1.00"})  # all images of a class have the same prediction
    right = np.broadcast_to(targets[:, None, None], best.shape)
    two = Predictions.of(targets, np.concatenate([right, best], 1), np.full((28, 2, 2), 0.5))
    assert len(Page(report_page(words[0], 2 * words[1], two, *words[3:], images)).tables[-1]) == 1 + 25
