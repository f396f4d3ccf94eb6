"""Train an image classifier on ImageNet with ViM's recipe, or on any folder of images.

    python train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet
    torchrun --nproc_per_node=8 train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet --resume auto

If the package is installed without a checkout, use `python -m vil.cli.train` instead.

Config files use timm's option names, and the command line overrides the config file. The config file specifies the
*global* batch size. Each process splits its share of the global batch into micro-batches of at most `batch_size`
images, so that results do not depend on the number of GPUs. Optional `phases` are trained sequentially. The run folder
OUTPUT/EXPERIMENT contains config.yaml, info.txt, summary.csv, curve.png, last.pt and best.pt.

Ctrl-C, SIGTERM or SIGUSR1 writes a checkpoint and exits with status 75. `--resume auto` resumes the run, also on a
different number of processes, with the same result as an uninterrupted run. docs/reliability.md lists other failures
that a run survives.
"""

from __future__ import annotations

from ..fault_tolerance.early_signals import exit_on_signals

if __name__ == "__main__":  # handle signals before the slow imports below
    exit_on_signals()

import logging
import sys
import traceback
from typing import NoReturn

import torch.distributed as dist

from ..checkpoint import CheckpointError, options_to_resume
from ..config import ConfigError, load_config
from ..devices import known_device
from ..distributed import Rank0Error, destroy_process_group, init_process_group, is_rank0
from ..fault_tolerance.locks import FolderInUseError
from ..fault_tolerance.streams import exit_at_once, outlive_output
from ..training.divergence import DivergenceError
from ..training.interruption import StoppedError
from ..training.trainer import train

# errors reported on one line without a traceback
FORESEEN = (ConfigError, CheckpointError, FolderInUseError, Rank0Error, DivergenceError)


def main() -> NoReturn:
    """Train with the options from the command line, then exit with the status of the run."""
    logging.basicConfig(format="%(message)s")
    status = 0
    try:
        config = load_config(__doc__, saved_options=options_to_resume)
        device, rank, world_size = init_process_group(known_device(config.device))
        train(config, device, rank, world_size)
    except StoppedError as notice:
        if is_rank0():
            print(notice, file=sys.stderr)
        status = notice.status
    except FORESEEN as error:
        _fail(f"error: {error}")
    except Exception:
        if not dist.is_initialized():
            raise
        _fail(traceback.format_exc())
    destroy_process_group()
    sys.exit(status)


def _fail(message: str) -> NoReturn:
    """Exit with status 1. A distributed run skips the cleanup, because other processes may have exited."""
    if dist.is_initialized():
        print(message, file=sys.stderr, flush=True)
        exit_at_once(1)
    sys.exit(message)


if __name__ == "__main__":
    outlive_output()
    main()
