"""Output of command-line programs: results on stdout and one-line errors on stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError, ConfigError
from .files import write_atomically


def check_outputs(paths: Iterable[Path]) -> None:
    """Raise a ConfigError before a long computation if one of its output files cannot be written."""
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise FileExistsError("the path exists but is not a regular file; move or remove it")
            write_atomically(probe := path.with_name(f".{path.name}.{os.getpid()}"), b"")
            probe.unlink()
        except OSError as error:
            is_file_in_path = isinstance(error, FileExistsError) and error.filename  # a parent folder is a file
            cause = f"{error.filename} is not a folder" if is_file_in_path else error.strerror or error
            raise ConfigError(f"cannot write {path}: {cause}") from error


class LostResultError(RuntimeError):
    """A requested result could not be written."""


@contextmanager
def errors_in_a_line(*others: type[Exception]) -> Iterator[None]:
    """Exit with a one-line message instead of a traceback on Ctrl-C or on errors in input files or options.

    Args:
        others: Additional exception types to report in one line.
    """
    foreseen: tuple[type[Exception], ...] = (ConfigError, CheckpointError, LostResultError, *others)
    try:
        yield
    except foreseen as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)  # exit status that shells expect after Ctrl-C


def print_result(text: str) -> None:
    """Print the result of a command.

    Raises:
        LostResultError: stdout cannot be written to.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # without this redirection, the interpreter would flush stdout at exit and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise LostResultError(f"failed to write the result to stdout: {error}") from error
