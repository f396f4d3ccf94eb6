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

import runpy
from pathlib import Path

if __name__ == "__main__":
    # Handle signals before the imports below, which take seconds. An import of the handlers would import the package.
    handlers = runpy.run_path(str(Path(__file__).parent / "vil/fault_tolerance/early_signals.py"))
    handlers["exit_on_signals"]()

from vil.cli.train import main
from vil.fault_tolerance.streams import outlive_output

if __name__ == "__main__":
    outlive_output()
    main(__doc__)
