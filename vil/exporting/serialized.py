"""Content of an exported file, with a function that runs the serialized model."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# loggers of PyTorch's exporters and of onnxscript that report internal details
NOISY_LOGGERS = ("onnxscript", "torch._export.serde.serialize", "torch.onnx._internal.exporter._schemas")

Run = Callable[[Tensor], Sequence[Tensor]]  # function from images (B, 3, H, W) to model outputs


@dataclass
class Serialized:
    """Serialized model, before the file is written.

    Attributes:
        content: Bytes of the file.
        run: Function that runs the serialized model on images (B, 3, H, W).
    """

    content: bytes
    run: Run


def text_of(value: Any) -> str:
    """Convert a metadata value to text: return strings unchanged and other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def quiet_exporters() -> Iterator[None]:
    """Suppress the exporters' warnings and log messages about their internals."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
