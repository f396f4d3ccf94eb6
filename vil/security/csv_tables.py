"""CSV tables whose cells no spreadsheet program executes as formulas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..text import label_of

FORMULAS = "=+-@＝＋－＠"  # leading characters that make a spreadsheet program treat a cell as a formula


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a table as CSV text. Text cells are quoted and printable, and cannot act as spreadsheet formulas."""
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
