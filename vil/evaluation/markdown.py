"""Markdown tables of evaluation results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..published import published

EXPLANATION = (
    "Top-1 has Wilson's score interval, and the difference has Agresti and Min's interval. McNemar's test is exact. "
    "Speed and memory are measured for inference on one batch with one model at a time. Published numbers are for the "
    "ImageNet-1k validation set at 224x224 pixels."
)


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Format rows as a Markdown table. The first row is the header."""
    head, *body = rows
    separator = ["---"] * len(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, separator, *body)) + "\n"


def comparison_text(result: dict[str, Any]) -> str:
    """Format the JSON result of a comparison as a Markdown table with explanatory sentences."""
    first, second = result["models"]
    paired = result["paired"]
    top1 = paired["top1"]
    sentences = [
        f"Of {first['images']} images, {top1['both']} are classified correctly by both models, {top1['only_first']} "
        f"only by the first model, {top1['only_second']} only by the second model, and {top1['neither']} by neither. "
        f"The models predict the same class for {paired['agreement']:.2f}% of the images.",
        *(note[0].upper() + note[1:] + "." for note in result["notes"]),
        EXPLANATION,
    ]
    return markdown_table(_comparison_rows(first, second, paired)) + "\n" + "\n".join(sentences)


def _comparison_rows(first: dict[str, Any], second: dict[str, Any], paired: dict[str, Any]) -> list[list[str]]:
    def row(name: str, text: Callable[[dict[str, Any]], str], comparison: str = "") -> list[str]:
        return [name, text(first), text(second), comparison]

    def ratio(name: str) -> str:
        return f"{first[name] / second[name]:.2f} x" if first[name] and second[name] else ""

    loss_difference = f"{first['loss'] - second['loss']:+.4f}"
    rows = [
        row("", lambda r: r["model"], "first minus second (95% interval), McNemar's test"),
        row("weights", lambda r: r["weights"]),
        row("top-1 %", _top1_text, _difference_text(paired["top1"])),
        row("top-5 %", lambda r: f"{r['top5']:.2f}", _difference_text(paired["top5"])),
    ]
    if first["published"] or second["published"]:
        rows.append(row("published top-1 / top-5 %", _published_text))
    return [
        *rows,
        row("loss", lambda r: f"{r['loss']:.4f}", loss_difference),
        row("parameters", lambda r: f"{r['parameters']:,}", ratio("parameters")),
        row("images/s", lambda r: f"{r['images_per_second']:.0f}", ratio("images_per_second")),
        row("peak MiB", lambda r: f"{r['peak_mib']:.0f}" if r["peak_mib"] else "-", ratio("peak_mib")),
    ]


def _top1_text(result: dict[str, Any]) -> str:
    low, high = result["top1_interval"]
    return f"{result['top1']:.2f} ({low:.2f} to {high:.2f})"


def _difference_text(paired: dict[str, Any]) -> str:
    low, high = paired["interval"]
    return f"{paired['difference']:+.2f} ({low:+.2f} to {high:+.2f}), p = {paired['p_value']:.3g}"


def _published_text(result: dict[str, Any]) -> str:
    if not result["published"]:  # no results are published for the model's size or classes
        return "- / -"
    return " / ".join("-" if number is None else str(number) for number in published(result["model"]))
