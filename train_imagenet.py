"""Train an image classifier on ImageNet with ViM's recipe, or on any folder of images.

    python train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet
    torchrun --nproc_per_node=8 train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet --resume auto

A config file has options with timm's names, and the command line overrides the file. The recipe specifies the *global*
batch size. Each process trains on its share in micro-batches of at most `batch_size`, so that results do not depend on
the number of GPUs. If the recipe has `phases`, they are trained sequentially. The run folder, OUTPUT/EXPERIMENT,
contains config.yaml, info.txt, summary.csv, curve.png, last.pt and best.pt.

Ctrl-C, SIGTERM or SIGUSR1 writes a checkpoint and exits with status 75. `--resume auto` resumes with the result of an
uninterrupted run, also on another number of processes. docs/reliability.md lists other failures that a run survives.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

if __name__ == "__main__":  # before the slow imports: there is nothing to save until a step is trained

    def end_at_once(*_):
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):
                if os.name == "nt" or select.select([], [2], [], 0)[1]:  # a full pipe without a reader would block
                    os.write(2, b"\nstopped by a signal with nothing to save\n")
        os._exit(75)  # PREEMPTED

    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        if hasattr(signal, name):  # Windows lacks SIGUSR1
            signal.signal(getattr(signal, name), end_at_once)
    if hasattr(signal, "SIGHUP"):  # when its terminal closes, torchrun ends its processes; a single process continues
        signal.signal(signal.SIGHUP, end_at_once if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_IGN)

from vil.cli.train import main
from vil.fault_tolerance.streams import outlive_output

if __name__ == "__main__":
    outlive_output()
    main(__doc__)
