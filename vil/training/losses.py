"""Training loss: (binary) cross-entropy with the labels, optionally combined with knowledge distillation."""

from __future__ import annotations

import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from ..config import Config, ConfigError
from .teacher import Teacher


class Loss:
    """Training loss averaged over a batch, configured by the options of a run.

    Without a teacher, the loss is the label loss: cross-entropy, or timm's binary cross-entropy with `bce_loss`. With a
    teacher, the loss is DeiT's (Touvron et al., 2021) for the weight alpha = `distillation_alpha`, the student's logits
    z and the teacher's logits t:

        hard, equation 3:  (1 - alpha) label_loss + alpha CE(z, argmax t)
        soft, equation 2:  (1 - alpha) label_loss + alpha tau^2 KL(softmax(t / tau), softmax(z / tau))

    There is no distillation token, so the model's only head learns from both the labels and the teacher. KL is summed
    over classes, as in the paper, which sets tau to 3 and alpha to 0.1 for soft distillation. DeiT's code averages KL
    over classes instead. Teacher and student receive the same mixed images.

    Raises:
        ConfigError: `bce_target_thresh` is outside the range of the smoothed targets.
    """

    def __init__(self, config: Config, num_classes: int, teacher: Teacher | None = None):
        self.teacher = teacher
        self.distillation = config.distillation
        self.alpha = config.distillation_alpha
        self.tau = config.distillation_tau
        self.label_loss = _label_loss(config, num_classes)

    def __call__(self, logits_BK: Tensor, targets: Tensor, images_B3HW: Tensor) -> Tensor:
        """Compute the loss as an fp32 scalar.

        Args:
            logits_BK: The student's logits.
            targets: Class indices (B,), or class probabilities (B, K).
            images_B3HW: The student's images.
        """
        logits_BK = logits_BK.float()
        label_loss = self.label_loss(logits_BK, targets)
        if not self.teacher:
            return label_loss
        teacher_BK = self.teacher(images_B3HW)
        if self.distillation == "hard":
            teacher_loss = F.cross_entropy(logits_BK, teacher_BK.argmax(1))
        else:
            log_p_BK = (logits_BK / self.tau).log_softmax(1)
            log_q_BK = (teacher_BK / self.tau).log_softmax(1)
            teacher_loss = self.tau**2 * F.kl_div(log_p_BK, log_q_BK, reduction="batchmean", log_target=True)
        return (1 - self.alpha) * label_loss + self.alpha * teacher_loss


def _label_loss(config: Config, num_classes: int) -> nn.Module:
    threshold = config.bce_target_thresh
    smoothing = config.smoothing
    if not config.bce_loss:
        return SoftTargetCrossEntropy() if config.mixing else LabelSmoothingCrossEntropy(smoothing)

    wrong_target = smoothing / num_classes
    right_target = 1 - smoothing + wrong_target
    if threshold is not None and not wrong_target <= threshold < right_target:
        raise ConfigError(
            f"bce_target_thresh must be between {wrong_target:.4g} and {right_target:.4g}, the smoothed targets of "
            f"wrong and right classes, got {threshold:g}"
        )
    # BinaryCrossEntropy smooths only class indices, because mixed targets are already smoothed
    return BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold, sum_classes=config.bce_sum)
