"""What training minimises: the loss of labels, hard or mixed, and of a teacher's answers."""

from __future__ import annotations

import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from ..config import Config, ConfigError
from .teacher import Teacher


class Loss:
    """The mean loss of a batch, by the options of a run.

    Without a teacher it is that of the labels: cross-entropy, or timm's binary cross-entropy with `bce_loss`. With one
    it is DeiT's (Touvron et al., 2021), for the share alpha = `distillation_alpha`, the student's logits z and the
    teacher's t:

        hard, equation 3:  (1 - alpha) labels + alpha CE(z, argmax t)
        soft, equation 2:  (1 - alpha) labels + alpha tau^2 KL(softmax(t / tau), softmax(z / tau))

    There is no distillation token: the class token's head learns from both. KL is summed over classes, as in the
    paper (which takes tau 3 and alpha 0.1 for soft); DeiT's code takes the mean over them. Images that are mixed are so
    for the teacher, too.

    Raises:
        ConfigError: `bce_target_thresh` makes all classes targets, or none.
    """

    def __init__(self, config: Config, num_classes: int, teacher: Teacher | None = None):
        self.teacher, self.kind = teacher, config.distillation
        self.alpha, self.tau = config.distillation_alpha, config.distillation_tau
        self.of_labels = _loss_of_labels(config, num_classes)

    def __call__(self, logits_BK: Tensor, targets: Tensor, images_B3HW: Tensor) -> Tensor:
        """Targets are classes (B,), or shares of them (B, K); images are what the student saw. Returns a scalar."""
        logits_BK = logits_BK.float()
        loss = self.of_labels(logits_BK, targets)
        if not self.teacher:
            return loss
        taught_BK = self.teacher(images_B3HW)
        if self.kind == "hard":
            distilled = F.cross_entropy(logits_BK, taught_BK.argmax(1))
        else:
            ours, theirs = ((x / self.tau).log_softmax(1) for x in (logits_BK, taught_BK))
            distilled = self.tau**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        return (1 - self.alpha) * loss + self.alpha * distilled


def _loss_of_labels(config: Config, num_classes: int) -> nn.Module:
    if not config.bce_loss:
        return SoftTargetCrossEntropy() if config.mixing else LabelSmoothingCrossEntropy(config.smoothing)
    threshold, smoothing = config.bce_target_thresh, config.smoothing
    wrong, right = smoothing / num_classes, 1 - smoothing + smoothing / num_classes
    if threshold is not None and not wrong <= threshold < right:
        raise ConfigError(
            f"bce_target_thresh {threshold:g} tells no right class from a wrong one: with smoothing {smoothing:g} over "
            f"{num_classes} classes their targets are {right:.4g} and {wrong:.4g}; choose one between"
        )
    # mixed targets are smoothed already
    return BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold, sum_classes=config.bce_sum)
