"""Command lines of small runs, and running them as a user does."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
# every random part of the recipe, in a model of seconds
SMALL = dict(model_kwargs=dict(embed_dim=32, depth=2, patch_size=8), img_size=16, global_batch_size=16, warmup_epochs=1)


def script(name, processes=1):
    """The start of a command line, under torchrun for several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *(torchrun if processes > 1 else []), str(ROOT / name)]


def train_command(folder, image_folder, processes=1, **options):
    """The command line of a small run that writes to `folder`/run."""
    config = folder / "small.yaml"
    run_options = dict(data_dir=str(image_folder), output=str(folder), experiment="run", epochs=2, workers=1)
    config.write_text(yaml.safe_dump(SMALL | run_options | options))
    return [*script("train_imagenet.py", processes), "-c", str(config)]


def run(command, check=True):
    environment = dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # several processes, no GPU to share
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert not check or result.returncode == 0, result.stderr[-3000:]
    return result
