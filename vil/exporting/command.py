"""Implementation of `vil export`: load or create the model, export it and print a report."""

from __future__ import annotations

import argparse

from torch import nn

from ..checkpoint import Checkpoint
from ..config import ConfigError, model_arguments
from ..factory import from_checkpoint, pretrained_model
from . import OPSET, check_options, export_model


def export(options: argparse.Namespace) -> None:
    """Write the exported file or folder, and print what was written.

    Raises:
        ConfigError, CheckpointError: The model cannot be created or loaded.
        ExportError: The model cannot be exported as requested.
        OSError: The file cannot be written.
    """
    if (options.num_classes or 0) < 0:
        raise ConfigError(f"--num-classes must be at least 0, got {options.num_classes}")
    opset = OPSET if options.opset is None else options.opset
    check_options(options.out, opset, options.features)
    arguments = dict(features=options.features, opset=opset, metadata=dict(options.metadata))
    model, note = _model_of(options)
    report = export_model(model, options.out, **arguments)
    print("; ".join(filter(None, [str(report), note])))


def _model_of(options: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return the model to export, and a note on the model's weights, which can be empty."""
    classes = {} if options.num_classes is None else {"num_classes": options.num_classes}
    arguments = classes | model_arguments(options)
    if options.checkpoint:
        source = Checkpoint(options.checkpoint)
        model = from_checkpoint(source, options.model, use_ema=options.use_ema, **arguments)
        return model, source.note_on_weights(options.use_ema)
    if not options.model:
        raise ConfigError("--model or --checkpoint is required")
    remedy = "set --checkpoint FILE, or --model-kwargs pretrained=False to export random weights"
    note = "pretrained weights" if arguments.get("pretrained", True) else "random weights"
    return pretrained_model(options.model, remedy, **arguments), note
