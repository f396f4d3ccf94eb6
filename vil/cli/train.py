"""Train an image classifier on ImageNet with ViM's recipe, or on any folder of images.

    python -m vil.cli.train -c configs/vil_tiny.yaml --data-dir /imagenet
    torchrun --nproc_per_node=8 -m vil.cli.train -c configs/vil_tiny.yaml --data-dir /imagenet --resume auto

A config file has options with timm's names, and the command line overrides the file. The recipe specifies the *global*
batch size. Each process trains on its share in micro-batches of at most `batch_size`, so that results do not depend on
the number of GPUs. If the recipe has `phases`, they are trained sequentially. The run folder, OUTPUT/EXPERIMENT,
contains config.yaml, info.txt, summary.csv, curve.png, last.pt and best.pt.

Ctrl-C, SIGTERM or SIGUSR1 writes a checkpoint and exits with status 75. `--resume auto` resumes with the result of an
uninterrupted run, also on another number of processes. docs/reliability.md lists other failures that a run survives.
"""

from __future__ import annotations

import logging
import sys
import traceback

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

FORESEEN = (ConfigError, CheckpointError, FolderInUseError, Rank0Error, DivergenceError)


def main(description: str = __doc__) -> None:
    logging.basicConfig(format="%(message)s")
    status = 0
    try:
        config = load_config(description, saved_options=options_to_resume)
        train(config, *init_process_group(known_device(config.device)))
    except StoppedError as notice:
        if is_rank0():
            print(notice, file=sys.stderr)
        status = notice.status
    except Exception as error:
        foreseen = isinstance(error, FORESEEN)
        if dist.is_initialized():  # exit at once, because cleaning up would wait for other processes, which may be gone
            print(f"error: {error}" if foreseen else traceback.format_exc(), file=sys.stderr, flush=True)
            exit_at_once(1)
        if foreseen:
            sys.exit(f"error: {error}")
        raise
    destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    outlive_output()
    main()
