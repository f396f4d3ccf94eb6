"""Train as `train_imagenet.py` does, and also support the models of research/models.py."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parents[1]
    sys.path[0] = str(root)  # the root replaces research/, whose modules would shadow other modules
    import research.models  # noqa: F401  registers the models

    runpy.run_path(str(root / "train_imagenet.py"), run_name="__main__")
