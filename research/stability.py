"""Train ViL and ViM in fp32, bf16 and fp16 on the same synthetic images and compare the loss curves.

    python -m research.stability --picture research/results/stability.png

Each run has 2,000 steps of AdamW with weight decay 0.1. The learning rate rises over the first 100 steps to the peak
learning rate of the tiny recipe (1e-3) and then stays constant. The batch size is far below the tiny recipe's 1024, so
the same learning rate is a harder test of stability. bf16 and fp16 use autocast, fp16 also uses a gradient scaler, and
fp32 runs without TF32. The initial weights and the images are the same in every precision.
`fp32, other images` differs from fp32 only in the seed of the images, and its distance from fp32 is the noise that the
other distances are compared with.

The images never repeat. Each of the 1000 classes is a smooth random texture. An image is a random crop of its class's
texture plus another smooth random texture with the weight `--noise`, and white noise. The loss falls, but the noise
keeps it above zero. The program exits with an error if a loss, weight or gradient was not finite, except the gradients
of steps that the gradient scaler skipped.

    S steps    B batch
"""

from __future__ import annotations

import argparse
import io
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_weight_decay
from torch import Tensor

import vil  # noqa: F401  registers the models
from vil.fault_tolerance.files import write_atomically
from vil.info import git_commit

CLASSES, GRID = 1000, 8
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
RUNS = {"fp32": ("fp32", 0), "fp32, other images": ("fp32", 1), "bf16": ("bf16", 0), "fp16": ("fp16", 0)}


@dataclass
class Run:
    losses: Tensor  # training loss of each step, (S,)
    gradient_norms: Tensor
    skipped: int  # number of steps that the gradient scaler skipped because of an overflow
    finite: bool
    seconds: float


class Images:
    """Endless stream of labelled synthetic images, created on the device."""

    def __init__(self, seed: int, batch: int, img_size: int, noise: float, device: torch.device):
        self.generator = torch.Generator(device)
        self.generator.manual_seed(0)  # the textures of the classes do not depend on the seed of the images
        self.batch, self.img_size, self.noise, self.device = batch, img_size, noise, device
        self.textures = self._randn(CLASSES, 3, GRID, GRID)
        self.generator.manual_seed(1 + seed)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next batch of images (B, 3, H, W) and their labels (B,)."""
        B, size = self.batch, self.img_size
        labels = torch.randint(CLASSES, (B,), generator=self.generator, device=self.device)
        textures = self.textures[labels] + self.noise * self._randn(B, 3, GRID, GRID)
        scale_B, x_B, y_B = torch.rand(3, B, generator=self.generator, device=self.device)
        scale_B = 1 - 0.3 * scale_B  # side of each random crop as a fraction of the texture's side
        crop_B23 = torch.zeros(B, 2, 3, device=self.device)
        crop_B23[:, 0, 0] = crop_B23[:, 1, 1] = scale_B
        crop_B23[:, 0, 2], crop_B23[:, 1, 2] = (1 - scale_B) * (2 * x_B - 1), (1 - scale_B) * (2 * y_B - 1)
        places = F.affine_grid(crop_B23, [B, 3, size, size], align_corners=False)
        images = F.grid_sample(textures, places, "bicubic", "reflection", align_corners=False)
        return images + self._randn(B, 3, size, size), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vil_tiny", "vim_tiny"])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--img-size", type=int, default=112)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--picture", type=Path, help="PNG file to plot the curves to")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    print(f"{name}, torch {torch.__version__}, timm {timm.__version__}, commit {git_commit()}")
    print(f"{args.steps} steps of {args.batch} images of {args.img_size} pixels, noise {args.noise}\n")
    print("| model | run | first loss | last loss | farthest from fp32 | in units of the noise | ", end="")
    print("gradient norm, median and largest | skipped steps | finite | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    runs: dict[str, dict[str, Run]] = {model: {} for model in args.models}
    for model, of_model in runs.items():
        for name in args.runs:
            precision, seed = RUNS[name]
            # Warm up on a side stream, because a backward pass in a graph capture must not use the default stream.
            with torch.cuda.stream(torch.cuda.Stream() if device.type == "cuda" else None):
                images = Images(seed, args.batch, args.img_size, args.noise, device)
                of_model[name] = train(model, images, args.steps, PRECISIONS[precision])
        for name in of_model:
            print(row(model, of_model, name), flush=True)
    if args.picture:
        write_atomically(args.picture, plot(runs))
    if not all(run.finite for of_model in runs.values() for run in of_model.values()):
        sys.exit("error: a loss, weight or gradient was not finite")


def row(model: str, runs: dict[str, Run], name: str) -> str:
    """Return the Markdown table row for run `name` of a model: losses, distance from fp32, norms and duration."""
    run, distance = runs[name], farthest(runs, name)
    norms = run.gradient_norms[run.gradient_norms.isfinite()]
    median, largest = (norms.median(), norms.max()) if len(norms) else (math.nan, math.nan)
    return (
        f"| {model} | {name} | {run.losses[0]:.3f} | {smooth(run.losses)[-1]:.3f} "
        f"| {distance:.3f} | {distance / farthest(runs, 'fp32, other images'):.2f} | {median:.2f}, {largest:.2f} "
        f"| {run.skipped} | {'yes' if run.finite else 'NO'} | {run.seconds:.0f} |"
    )


def train(model_name: str, images: Images, steps: int, dtype: torch.dtype | None) -> Run:
    """Train a run in fp32 or under autocast to `dtype`. On a GPU, all steps but the first three replay a CUDA graph."""
    start, device, on_gpu = time.perf_counter(), images.device, images.device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = timm.create_model(model_name, num_classes=CLASSES, img_size=images.img_size).to(device).train()
    groups = param_groups_weight_decay(model, 0.1, model.no_weight_decay())
    rate = torch.tensor(0.0, device=device)
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=True, capturable=on_gpu)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    parameters = list(model.parameters())
    x_B3HW, labels_B = images.next()  # static input buffers of the CUDA graph

    def step() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = F.cross_entropy(model(x_B3HW), labels_B)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach(), norm

    measured_S2 = torch.empty(steps, 2, device=device)
    for i in range(steps):
        for held, new in zip((x_B3HW, labels_B), images.next()):
            held.copy_(new)
        rate.fill_(1e-3 * min(1, (i + 1) / min(100, steps)))
        if i < 3 or not on_gpu:  # the first three steps on a GPU are a warm-up before the graph capture
            measured = step()
        else:
            if i == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    measured = step()
            graph.replay()
        measured_S2[i] = torch.stack(measured)
    loss_S, norm_S = measured_S2.cpu().unbind(1)
    # The optimizer's step counter does not count the steps that the gradient scaler skipped.
    skipped = steps - max(int(state["step"]) for state in optimizer.state.values())
    finite = all(t.isfinite().all() for t in (loss_S, *parameters)) and int((~norm_S.isfinite()).sum()) == skipped
    return Run(loss_S, norm_S, skipped, finite, time.perf_counter() - start)


def smooth(loss_S: Tensor) -> Tensor:
    """Return moving averages of the loss over windows of a twentieth of the run."""
    return F.avg_pool1d(loss_S[None].double(), max(1, len(loss_S) // 20), stride=1)[0]


def farthest(runs: dict[str, Run], name: str) -> float:
    """Return the largest difference of smoothed losses between run `name` and run "fp32" (NaN if a run is missing)."""
    if not {"fp32", name} <= runs.keys():
        return math.nan
    return (smooth(runs[name].losses) - smooth(runs["fp32"].losses)).abs().max().item()


def plot(runs: dict[str, dict[str, Run]]) -> bytes:
    """Plot the smoothed losses, and their differences from fp32, as a PNG."""
    from matplotlib.figure import Figure  # instead of pyplot, which would keep figures in global state

    figure = Figure(figsize=(5 * len(runs), 6), layout="constrained")
    columns = figure.subplots(2, len(runs), sharex=True, squeeze=False).T
    for (model, of_model), (loss, difference) in zip(runs.items(), columns):
        for name, run in of_model.items():
            loss_S = smooth(run.losses)
            # Plot each moving average at the last step of its window.
            steps = torch.arange(len(loss_S)) + len(run.losses) - len(loss_S) + 1
            loss.plot(steps, loss_S, label=name, linewidth=1)
            if "fp32" in of_model:
                difference.plot(steps, loss_S - smooth(of_model["fp32"].losses), linewidth=1)
        loss.set_title(model)
        loss.set_ylabel("training loss, smoothed")
        difference.set_ylabel("difference from fp32")
        difference.set_xlabel("step")
        loss.legend()
        loss.grid(alpha=0.3)
        difference.grid(alpha=0.3)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=150)
    return png.getvalue()


if __name__ == "__main__":
    main()
