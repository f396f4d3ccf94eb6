"""Measure exported files on this machine's CPU: size, and latency of a batch compared with DeiT in the same runtime.

    python benchmarks/exported.py --folder /tmp/exported [--models vil_tiny deit_tiny_patch16_224] [--batch 8]

Existing files in the folder are reused. In each round, every file of a runtime processes three batches and the last
batch is timed, so that other load of the machine affects all files equally. With --cpu-time, the CPU time of all
threads is measured, on which other processes have less influence. The program reports the minimum and the median
time over the rounds, and the ratio of the minimum to the minimum of the DeiT of the same size.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

import numpy as np
import onnxruntime
import timm
import torch

import vil  # noqa: F401  registers the models
from vil.exporting import export_model

MODELS = ["vil_tiny", "vim_tiny", "deit_tiny_patch16_224", "vil_small", "vim_small", "deit_small_patch16_224"]
FORMATS = ("onnx", "pt2")


def runner(path: Path, name: str, threads: int, batch: int):
    """Return a function that runs the exported model in the file `path` on a batch of random images."""
    images = torch.randn(batch, *timm.get_pretrained_cfg(name).input_size)
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()
        return lambda: module(images)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    feeds = {"images": images.numpy()}
    return lambda: session.run(None, feeds)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the exported files")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=1, help="images per batch")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of all threads, not latency")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{options.threads} threads, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    print("| file | MB | least, ms | median, ms | of DeiT |\n| --- | --- | --- | --- | --- |")
    for ending in options.formats:
        runs = {}
        for name in options.models:
            path = options.folder / f"{name}.{ending}"
            if not path.exists():
                export_model(timm.create_model(name), path)
            runs[path] = runner(path, name, options.threads, options.batch)
        times: dict[Path, list[float]] = {path: [] for path in runs}
        for _ in range(options.rounds):
            for path, run in runs.items():
                run()
                run()
                start = clock()
                run()
                times[path].append(1e3 * (clock() - start))
        for path, measured in times.items():
            size = re.split("[_.]", path.name)[1]
            peers = [min(t) for p, t in times.items() if p.name.startswith(f"deit_{size}")]
            ratio = f"{min(measured) / peers[0]:.1f} x" if peers else ""
            megabytes = path.stat().st_size / 1e6
            print(f"| {path.name} | {megabytes:.1f} | {min(measured):.1f} | {np.median(measured):.1f} | {ratio} |")


if __name__ == "__main__":
    main()
