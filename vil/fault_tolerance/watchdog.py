"""Watchdog thread that detects when the process of another rank dies."""

from __future__ import annotations

import datetime
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from .streams import exit_at_once

GRACE = 20  # seconds; delay before termination, so that the main thread can first report the reason itself


class RankWatchdog(threading.Thread):
    """Thread that terminates this process if the next rank exits before `finish`, so that a failure reaches all ranks.

    Without the watchdog, remaining ranks that no launcher terminates would hang until PyTorch's timeout, because NCCL
    waits for the dead rank.
    """

    def __init__(self, rank: int, world_size: int):
        super().__init__(daemon=True)
        self.next_rank = (rank + 1) % world_size
        self.previous_rank = (rank - 1) % world_size
        # The timeout exceeds any run time, because the only message is sent at the end of the run.
        self.group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1000))

    def run(self) -> None:
        try:
            dist.recv(torch.empty(()), self.next_rank, self.group)
        except RuntimeError as error:
            time.sleep(GRACE)
            print(
                f"error: the process of rank {self.next_rank} has died, so this process exits: {error}",
                file=sys.stderr,
                flush=True,
            )
            exit_at_once(1)

    def finish(self) -> None:
        """Stop the watchdog. All ranks must call `finish`."""
        dist.send(torch.zeros(()), self.previous_rank, self.group)
        self.join()
