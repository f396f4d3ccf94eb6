"""Watchdog of another rank's process."""

from __future__ import annotations

import datetime
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from .streams import exit_at_once

GRACE = 20  # seconds in which a process can notice by itself that another process is gone, and report why


class RankWatchdog(threading.Thread):
    """Thread that terminates this process if the next rank exits before `finish`, so that a failure reaches all ranks.

    Otherwise a process that waits for its GPU would not notice the failure, because NCCL waits forever for missing
    data.
    """

    def __init__(self, rank: int, world_size: int):
        super().__init__(daemon=True)
        self.next_rank = (rank + 1) % world_size
        self.previous_rank = (rank - 1) % world_size
        # the group outlasts any run, because its only message is sent at the end
        self.group: Any = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1000))

    def run(self) -> None:
        try:
            dist.recv(torch.empty(()), self.next_rank, self.group)
        except RuntimeError as error:
            time.sleep(GRACE)
            print(
                f"error: the process of rank {self.next_rank} is gone, and this one waits for it: {error}",
                file=sys.stderr,
                flush=True,
            )
            exit_at_once(1)

    def finish(self) -> None:
        """Stop watching. All ranks must call this."""
        dist.send(torch.zeros(()), self.previous_rank, self.group)
        self.join()
