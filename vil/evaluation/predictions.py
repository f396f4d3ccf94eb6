"""Predictions of one or more models for each image of a split.

Dimension letters in the suffixes of array names:

    N images    M models    K most probable classes, at most 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..data.sources.images import UNREADABLE
from ..distributed import all_gather_interleaved
from .evaluator import Evaluation


class PredictionCollector:
    """Collector of each image's target and most probable classes, passed as `observe` to a call of an `Evaluator`.

    Args:
        num_models: Number of models M.
        num_classes: Number of classes that the models distinguish.
        device: Device of the targets and logits.
    """

    def __init__(self, num_models: int, num_classes: int, device: torch.device) -> None:
        # The lists begin with empty tensors, because a process reads no image if all of its shards are damaged.
        probabilities_NMK = torch.empty(0, num_models, min(5, num_classes), device=device)
        self._targets = [torch.empty(0, dtype=torch.long, device=device)]
        self._classes = [probabilities_NMK.long()]
        self._probabilities = [probabilities_NMK]

    def __call__(self, targets: Tensor, logits: Sequence[Tensor]) -> None:
        classes = []
        probabilities = []
        for logits_BC in logits:
            logits_BC = logits_BC.float()
            top_BK, classes_BK = logits_BC.topk(min(5, logits_BC.shape[1]))
            classes.append(classes_BK)
            probabilities.append((top_BK - logits_BC.logsumexp(1, keepdim=True)).exp())
        self._targets.append(targets)
        self._classes.append(torch.stack(classes, dim=1))
        self._probabilities.append(torch.stack(probabilities, dim=1))

    def gather(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return targets_N, classes_NMK and probabilities_NMK of all images, in the order of the split, on every rank.

        Rank r must have evaluated the images r, r + world size, r + 2 * world size and so on.
        """
        targets_N, classes_NMK, probabilities_NMK = (
            all_gather_interleaved(torch.cat(batches)).cpu().numpy()
            for batches in (self._targets, self._classes, self._probabilities)
        )
        return targets_N, classes_NMK, probabilities_NMK


@dataclass(frozen=True)
class Predictions:
    """Predictions for all readable images. With ReaL labels, images without a label are excluded.

    Attributes:
        indices_N: Indices of the images in the split.
        targets_N: Class indices of the images.
        classes_NMK: Predicted classes, most probable first.
        probabilities_NMK: Probabilities of the predicted classes.
        correct_NMK: Whether each predicted class is correct.
    """

    indices_N: np.ndarray  # noqa: N815
    targets_N: np.ndarray  # noqa: N815
    classes_NMK: np.ndarray  # noqa: N815
    probabilities_NMK: np.ndarray  # noqa: N815
    correct_NMK: np.ndarray  # noqa: N815

    @classmethod
    def of(
        cls,
        targets_N: np.ndarray,
        classes_NMK: np.ndarray,
        probabilities_NMK: np.ndarray,
        real_labels_NC: np.ndarray | None = None,
    ) -> Predictions:
        """Create the predictions from arrays. Unreadable images and images without a ReaL label are left out.

        A predicted class is correct if the class equals the target. With ReaL labels, a predicted class is correct if
        the class is one of the image's ReaL labels.
        """
        is_counted = targets_N != UNREADABLE
        if real_labels_NC is None:
            correct_NMK = classes_NMK == targets_N[:, None, None]
        else:
            images = np.arange(len(targets_N))[:, None, None]
            correct_NMK = real_labels_NC[images, classes_NMK]
            is_counted &= real_labels_NC.any(1)
        return cls(
            indices_N=np.flatnonzero(is_counted),
            targets_N=targets_N[is_counted],
            classes_NMK=classes_NMK[is_counted],
            probabilities_NMK=probabilities_NMK[is_counted],
            correct_NMK=correct_NMK[is_counted],
        )

    @property
    def models(self) -> int:
        return self.classes_NMK.shape[1]

    @property
    def predicted_NM(self) -> np.ndarray:
        """Most probable class of each image."""
        return self.classes_NMK[..., 0]

    @property
    def top1_NM(self) -> np.ndarray:
        """Whether the most probable class of each image is correct."""
        return self.correct_NMK[..., 0]

    @property
    def top5_NM(self) -> np.ndarray:
        """Whether one of the five most probable classes of each image is correct."""
        return np.asarray(self.correct_NMK.any(-1))

    def recount(self, result: Evaluation, m: int) -> Evaluation:
        """Return the evaluation result of model `m` with images and correct predictions counted from `self`.

        The loss is unchanged.
        """
        top1 = self.top1_NM[:, m].sum()
        top5 = self.top5_NM[:, m].sum()
        return replace(result, images=len(self.targets_N), top1_correct=top1, top5_correct=top5)
