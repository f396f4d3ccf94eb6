"""Command-line options that create a model: --model-kwargs and --img-size."""

from __future__ import annotations

import argparse
from typing import Any

from .values import COMMAND_LINE, convert, parse_key_values


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --model-kwargs and --img-size to a parser."""
    add = parser.add_argument
    add("--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="keyword arguments of the model")
    add("--img-size", nargs="+", metavar="SIZE", help="image size in pixels: one number, or height and width")


def model_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of the model that the options specify.

    Raises:
        ConfigError: A value is invalid.
    """
    img_size = convert("img_size", options.img_size, COMMAND_LINE)
    return ({"img_size": img_size} if img_size else {}) | parse_key_values(options.model_kwargs)
