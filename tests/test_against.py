"""validate.py --against: its statistics by hand, its tables, other test sets, and the whole command on two models."""

import csv
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import ImageNetInfo

from vil.published import published
from vil.training.comparison import Comparison, Paired, Predictions
from vil.training.config import ConfigError
from vil.training.imagenet import OnlyClasses, Renormalized, open_test_split, real_labels


def test_mcnemar_and_the_interval_by_their_formulas():
    paired = Paired(both=70, only_first=10, only_second=3, neither=17)
    assert paired.difference == pytest.approx(7.0)
    tail = sum(math.comb(13, k) for k in range(4)) / 2**13  # as few as 3 of 13 coins
    assert paired.p_value == pytest.approx(2 * tail)
    # Agresti & Min: half an image more in each cell, then Wald's interval of the difference of paired proportions
    p12, p21, n = 10.5 / 102, 3.5 / 102, 102
    half = 1.959964 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / n)
    assert paired.interval == pytest.approx((100 * (p12 - p21 - half), 100 * (p12 - p21 + half)), abs=1e-6)


def test_models_that_are_right_on_the_same_images_do_not_differ():
    paired = Paired(both=5, only_first=0, only_second=0, neither=2)
    assert (paired.difference, paired.p_value) == (0.0, 1.0)
    assert paired.interval[0] < 0 < paired.interval[1]


def test_the_interval_covers_the_true_difference_in_19_of_20_experiments():
    rng, shares = np.random.default_rng(0), [0.6, 0.16, 0.08, 0.16]  # both, only first, only second, neither
    intervals = [Paired(*counts).interval for counts in rng.multinomial(60, shares, size=4000).tolist()]
    covered = np.mean([low <= 8.0 <= high for low, high in intervals])
    assert 0.94 < covered < 0.97


def known_comparison(**kwargs):
    """Six images of classes 0, 0, 1, 1, 2 and one unreadable; two best classes of two models."""
    targets = np.array([0, 0, 1, 1, 2, -1])
    first = [[0, 1], [0, 2], [1, 0], [2, 1], [0, 1], [0, 1]]
    second = [[0, 2], [1, 0], [2, 1], [2, 0], [0, 1], [1, 0]]
    return Comparison.of(targets, np.stack([first, second], axis=1), **kwargs)


def test_known_predictions_give_the_counts_that_a_hand_count_gives():
    found = known_comparison()
    assert found.top1 == Paired(both=1, only_first=2, only_second=0, neither=2)
    assert found.top5 == Paired(both=3, only_first=1, only_second=0, neither=1)
    assert found.agreement == pytest.approx(60.0)


def test_the_tables_hold_what_differs_by_class_and_by_confusion(tmp_path):
    known_comparison().write_tables(tmp_path / "new", {0: "ant", 1: "bee", 2: "cat"})
    classes = list(csv.DictReader((tmp_path / "new" / "classes.csv").open()))
    assert [(r["name"], r["images"], r["top1_first"], r["top1_second"], r["difference"]) for r in classes] == [
        ("ant", "2", "100.0", "50.0", "50.0"),
        ("bee", "2", "50.0", "0.0", "50.0"),
        ("cat", "1", "0.0", "0.0", "0.0"),
    ]
    confusions = list(csv.DictReader((tmp_path / "new" / "confusions.csv").open()))
    assert [(r["name"], r["predicted_name"], r["first"], r["second"], r["difference"]) for r in confusions] == [
        ("ant", "bee", "0", "1", "-1"),
        ("bee", "cat", "1", "2", "-1"),
    ]


def test_real_labels_count_every_class_they_allow_and_leave_out_images_without_any():
    allowed = np.zeros((6, 3), dtype=bool)
    allowed[[0, 1, 1, 2, 4], [0, 0, 1, 2, 0]] = True  # image 3 has no label; images 2 and 4 have another than before
    found = known_comparison(real_labels_NC=allowed)
    assert found.top1 == Paired(both=3, only_first=0, only_second=1, neither=0)


def test_predictions_keep_five_classes_of_each_model_in_order():
    predictions = Predictions()
    logits = torch.randn(2, 7, 9)
    predictions(torch.arange(4), [logits[0, :4], logits[1, :4]])
    predictions(torch.arange(4, 7), [logits[0, 4:], logits[1, 4:]])
    targets, best = predictions.gather()
    assert targets.tolist() == list(range(7))
    assert (best == logits.transpose(0, 1).topk(5).indices.numpy()).all()


def test_images_of_several_processes_are_gathered_in_the_order_of_the_split(monkeypatch):
    """Which ReaL labels an image gets depends on it. Process r of two sees images r, r + 2, ..."""
    shares = []
    for images in ([0, 2, 4], [1, 3]):
        share = Predictions()
        share(torch.tensor(images), [F.one_hot(torch.tensor(images), 6).float()] * 2)
        shares.append(share.gather())

    def all_gather_object(parts, mine):
        parts[:] = shares

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    targets, best = share.gather()
    assert targets.tolist() == [0, 1, 2, 3, 4]
    assert best[:, 0, 0].tolist() == [0, 1, 2, 3, 4]


def test_the_published_numbers_of_one_model():
    assert published("vim_tiny") == (76.1, 93.0)
    assert published("vil_small") == (80.7, None)
    assert published("vil_base") == (None, None)


@pytest.fixture(scope="module")
def imagenet_like(tmp_path_factory):
    """{some,real}/...: two of ImageNet's classes by WordNet id, and images under the names of its validation images."""
    root, ids = tmp_path_factory.mktemp("imagenet"), ImageNetInfo().label_names()
    for split, folder, names in (
        ("some", ids[7], ["a", "b"]),
        ("some", ids[301], ["c"]),
        ("real", ids[7], ["ILSVRC2012_val_00000001", "ILSVRC2012_val_00000003"]),
        ("real", ids[301], ["ILSVRC2012_val_00000002"]),
    ):
        (root / split / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            Image.new("RGB", (16, 16), (200, 30, 90)).save(root / split / folder / f"{name}.JPEG")
    return root


def test_a_folder_of_some_imagenet_classes_is_judged_among_these(imagenet_like):
    images, classes = open_test_split(str(imagenet_like), "", "some", 1000)
    assert classes == [7, 301]
    assert sorted(images.reader[i][1] for i in range(3)) == [7, 7, 301]
    logits = torch.zeros(2, 1000)
    logits[:, 5], logits[:, 301] = 9.0, 1.0
    assert OnlyClasses(torch.nn.Identity(), classes, 1000)(logits).argmax(1).tolist() == [301, 301]


def test_folders_named_by_class_numbers_keep_them_as_in_imagenet_v2(tmp_path):
    for number in range(12):  # in the order of their names 10 would come before 2
        (tmp_path / "v2" / str(number)).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "v2" / str(number) / "image.png")
    images, classes = open_test_split(str(tmp_path), "", "v2", 12)
    assert classes is None
    assert all(int(images.filename(i).split("/")[0]) == images.reader[i][1] for i in range(12))


def test_other_folders_must_have_the_classes_of_the_model(image_folder):
    assert open_test_split(str(image_folder), "", "val", 4)[1] is None
    with pytest.raises(ConfigError, match="has 4 classes but num_classes is 1000"):
        open_test_split(str(image_folder), "", "val", 1000)


def test_real_labels_go_with_the_names_of_the_images(imagenet_like, tmp_path):
    labels = tmp_path / "real.json"
    labels.write_text("[[7, 8], [], [9]]")
    images, _ = open_test_split(str(imagenet_like), "", "real", 1000)
    right = real_labels(images, 1000, str(labels))
    by_name = {images.filename(i, basename=True): np.flatnonzero(row).tolist() for i, row in enumerate(right)}
    assert by_name["ILSVRC2012_val_00000001.JPEG"] == [7, 8]
    assert by_name["ILSVRC2012_val_00000002.JPEG"] == []
    assert by_name["ILSVRC2012_val_00000003.JPEG"] == [9]
    with pytest.raises(ConfigError, match="ReaL labels are for ImageNet's validation images"):
        real_labels(open_test_split(str(imagenet_like), "", "some", 1000)[0], 1000, str(labels))
    with pytest.raises(ConfigError, match="cannot read the ReaL labels"):
        real_labels(images, 1000, str(tmp_path / "none.json"))


def test_the_second_model_sees_images_normalised_as_its_own():
    given = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    own = {"mean": (0.1, 0.2, 0.3), "std": (0.9, 0.8, 0.7)}
    pixels = torch.rand(2, 3, 4, 4)

    def normalised(config):
        shape = (3, 1, 1)
        return (pixels - torch.tensor(config["mean"]).view(shape)) / torch.tensor(config["std"]).view(shape)

    model = torch.nn.Conv2d(3, 1, 1)
    torch.testing.assert_close(Renormalized(model, given, own)(normalised(given)), model(normalised(own)))
