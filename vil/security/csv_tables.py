"""CSV tables that no spreadsheet runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..text import label_of

FORMULAS = "=+-@＝＋－＠"  # characters that start a formula in a spreadsheet


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a table as CSV with printable, quoted text that no spreadsheet interprets as a formula."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row.get(name, "")) for name in columns])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    is_formula = value.lstrip().startswith(tuple(FORMULAS))
    return ("'" if is_formula else "") + label_of(value)
