"""Results and errors of commands, and tables that open as text in a spreadsheet."""

from __future__ import annotations

import csv
import io
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError
from .config import ConfigError
from .files import write_atomically
from .text import label_of

FORMULAS = "=+-@＝＋－＠"  # that begin one in a spreadsheet


def check_outputs(paths: Iterable[Path]) -> None:
    """Raises a ConfigError if a file that is asked for could not be written in the end."""
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise FileExistsError("there is something that is no file")
            write_atomically(probe := path.with_name(f".{path.name}.{os.getpid()}"), b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error


class LostResultError(RuntimeError):
    """Nobody took what a command was asked for."""


@contextmanager
def errors_in_a_line(*others: type[Exception]) -> Iterator[None]:
    """Ends a command with one line where its input, or what is asked for, is at fault, or Ctrl-C stops it.

    Args:
        others: Types of errors that the command foresees beside those of all.
    """
    foreseen: tuple[type[Exception], ...] = (ConfigError, CheckpointError, LostResultError, *others)
    try:
        yield
    except foreseen as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)  # as a shell expects it


def print_result(text: str) -> None:
    """Prints what a command was asked for.

    Raises:
        LostResultError: Standard output does not take it.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would try again at its end
        raise LostResultError(f"the standard output did not take the result: {error}") from error


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A table as CSV. Text is printable and quoted, and no spreadsheet takes it for a formula."""

    def cell(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return "'" * value.lstrip().startswith(tuple(FORMULAS)) + label_of(value)

    writer = csv.writer(text := io.StringIO(), quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(columns)
    writer.writerows([cell(row.get(name, "")) for name in columns] for row in rows)
    return text.getvalue()
