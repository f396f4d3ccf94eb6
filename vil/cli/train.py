"""Train an image classifier on any folder of images, or on ImageNet with ViM's recipe.

    vil train photos
    vil train -c vil_tiny --data-dir /imagenet
    torchrun --nproc_per_node=8 -m vil train -c vil_tiny --data-dir /imagenet --resume auto

Without a config file, `vil train` chooses the splits, weights and recipe by the content of the folder and the device.
The log names each choice and the option that changes the choice. docs/guide.md describes the supported layouts of
folders.

Most options in config files have timm's names, and the command line overrides the config file. The config file
specifies the *global* batch size. Each process splits its share of the global batch into micro-batches of at most
`batch_size` images, so that the recipe does not depend on the number of GPUs. Optional `phases` are trained
sequentially. The run folder OUTPUT/EXPERIMENT contains config.yaml, info.txt, summary.csv, the plots augmented.png and
curve.png, the checkpoints last.pt, previous.pt and best.pt and, for a validation split of moderate size, report.html.

Ctrl-C, SIGTERM or SIGUSR1 writes a checkpoint and exits with status 75. `--resume auto` resumes the run, also on a
different number of processes, with the same result as an uninterrupted run up to rounding errors. docs/reliability.md
lists the exceptions, and other failures that a run survives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

from ..config import load_config
from ..fault_tolerance.output import errors_in_a_line


def main(words: Sequence[str] | None = None, prog: str | None = None, chooses_recipe: bool = True) -> NoReturn:
    """Train with the options from the command line, then exit with the status of the run.

    Args:
        words: Words of the command line; None uses `sys.argv`.
        prog: Name of the program in `--help`; None uses the name of the script.
        chooses_recipe: Whether weights and recipe are chosen by the folder and the device if there is no config file.
    """
    logging.basicConfig(format="%(message)s")

    def complete(options: dict[str, Any], has_config: bool) -> dict[str, Any]:
        from ..training.own_folder import complete_options

        return complete_options(options, has_config or not chooses_recipe)

    with errors_in_a_line():
        config = load_config(__doc__, words, saved_options=_saved_options, prog=prog, complete=complete)
    from ..training.command import run

    run(config)


def _saved_options(path: str, given: dict[str, Any]) -> dict[str, Any]:
    from ..checkpoint import options_to_resume

    return options_to_resume(path, given)
