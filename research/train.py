"""Train as `train_imagenet.py` does, and also support the models of research/models.py."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[0] = str(root)  # the root replaces research/, whose modules would shadow other modules
    import torch

    import research.models  # noqa: F401  registers the models

    # By default, cuDNN computes the convolutions of a run in fp32 (--no-amp) in TF32.
    torch.backends.cudnn.allow_tf32 = False
    runpy.run_path(str(root / "train_imagenet.py"), run_name="__main__")
