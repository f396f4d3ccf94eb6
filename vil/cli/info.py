"""Print the versions, commit and hardware that a bug report needs."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Parser
from ..fault_tolerance.output import errors_in_a_line, print_result


def main(words: Sequence[str] | None = None, prog: str = "vil info") -> None:
    with errors_in_a_line():
        Parser(prog=prog, description=__doc__).parse_args(words)
        from ..info import format_environment

        print_result(format_environment().rstrip("\n"))
