"""The work of `vil train`: train in the processes of a run, and exit with the status of the run."""

from __future__ import annotations

import sys
import traceback
from typing import NoReturn

import torch.distributed as dist

from ..checkpoint import CheckpointError
from ..config import Config, ConfigError
from ..devices import known_device
from ..distributed import Rank0Error, destroy_process_group, init_process_group, is_rank0
from ..fault_tolerance.locks import FolderInUseError
from ..fault_tolerance.streams import exit_at_once
from .divergence import DivergenceError
from .interruption import StoppedError
from .trainer import train

# errors reported on one line without a traceback
FORESEEN = (ConfigError, CheckpointError, FolderInUseError, Rank0Error, DivergenceError)


def run(config: Config) -> NoReturn:
    """Train with the given options, then exit with the status of the run."""
    status = 0
    try:
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
    """Print the message and exit with status 1.

    A distributed run skips the cleanup, because other processes may have exited.
    """
    if dist.is_initialized():
        print(message, file=sys.stderr, flush=True)
        exit_at_once(1)
    sys.exit(message)
