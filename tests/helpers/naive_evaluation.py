"""Independent evaluation: each image is a batch of one, and metrics are computed from saved logits.

This module imports nothing from the package. PIL opens the images. timm's transform with explicit
options preprocesses the images.
"""

import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform


def saved_logits(model, folder, numbers, unreadable=(), **options):
    """Return file names, class indices (N,) and logits (N, C) of the images in a folder of class folders.

    `numbers` maps class names to class indices.
    """
    transform = create_transform(options.pop("input_size"), is_training=False, **options)
    names, targets, logits = [], [], []
    for path in sorted(Path(folder).glob("*/*")):
        if path.name not in unreadable:
            with torch.inference_mode():
                logits.append(model.eval()(transform(Image.open(path).convert("RGB"))[None])[0].double().numpy())
            names.append(path.name)
            targets.append(numbers[path.parent.name])
    return names, np.array(targets), np.stack(logits)


def only(logits_NC, classes):
    """Set the logits of all classes except `classes` to minus infinity, so that predictions are among `classes`."""
    restricted = np.full_like(logits_NC, -np.inf)
    restricted[:, classes] = logits_NC[:, classes]
    return restricted


def right(logits_NC, allowed, most):
    """Return for each image whether one of the `most` classes with the largest logits is correct."""
    best = np.argsort(-logits_NC, axis=1)[:, :most]
    return np.array([bool(set(classes) & set(own)) for classes, own in zip(best.tolist(), allowed)])


def mean_cross_entropy(logits_NC, targets_N):
    largest = logits_NC.max(axis=1)
    log_sums = largest + np.log(np.exp(logits_NC - largest[:, None]).sum(axis=1))
    return float(np.mean(log_sums - logits_NC[np.arange(len(targets_N)), targets_N]))


def numbers(logits_NC, targets_N, allowed=None):
    """Return the metrics that validate.py must report for these logits.

    `allowed` holds the correct classes of each image, like ReaL labels. Images without a correct class count only for
    the loss.
    """
    allowed = [{target} for target in targets_N.tolist()] if allowed is None else [set(own) for own in allowed]
    counted = np.array([bool(own) for own in allowed])
    top1, top5 = (right(logits_NC, allowed, most)[counted] for most in (1, 5))
    return {
        "images": int(counted.sum()),
        "top1": 100 * top1.mean(),
        "top5": 100 * top5.mean(),
        "loss": mean_cross_entropy(logits_NC, targets_N),
    }


def paired(first_N, second_N):
    """Return how many images are classified correctly by both models, only the first, only the second, and neither."""
    cells = [(True, True), (True, False), (False, True), (False, False)]
    return [sum((a, b) == cell for a, b in zip(first_N.tolist(), second_N.tolist())) for cell in cells]


def wilson_interval(correct, n):
    """Return Wilson's 95% confidence interval of a proportion, in percent."""
    p, z = correct / n, 1.959964
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return [100 * (centre + sign * half) / (1 + z * z / n) for sign in (-1, 1)]


def paired_interval(both, only_first, only_second, neither):
    """Return a 95% interval of the difference of two paired accuracies, in percentage points.

    Agresti and Min (2005) add 0.5 to each count and compute Wald's interval.
    """
    n = both + only_first + only_second + neither + 2
    p12, p21 = (only_first + 0.5) / n, (only_second + 0.5) / n
    half = 1.959964 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / n)
    return [100 * (p12 - p21 - half), 100 * (p12 - p21 + half)]


def mcnemar(only_first, only_second):
    """Return the p-value of the exact McNemar test, a two-sided sign test of `only_first` against `only_second`."""
    n, fewer = only_first + only_second, min(only_first, only_second)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
