"""Trains an image classifier: ImageNet with ViM's recipe, or any folder of images.

    python train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet
    torchrun --nproc_per_node=8 train_imagenet.py -c configs/vil_tiny.yaml --data-dir /imagenet --resume auto

A config file holds options under timm's names, and the command line overrides it. The recipe states the *global* batch:
each process takes its share, in as many micro-batches as `batch_size` asks for, so any number of GPUs trains the same
thing. The run's folder, OUTPUT/EXPERIMENT, gets config.yaml, summary.csv, curve.png, last.pt and best.pt.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import yaml
from timm.data import resolve_data_config
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, init_distributed_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import vil  # noqa: F401  registers the models
from vil.training import checkpoint, data
from vil.training.config import Config, ConfigError, load_config
from vil.training.evaluation import autocast, default_device, evaluate
from vil.training.models import create_model
from vil.training.summary import write_atomically, write_summary


class DivergenceError(RuntimeError):
    """The loss is not finite."""


def main() -> None:
    logging.basicConfig(format="%(message)s")
    try:
        config = load_config(__doc__)
        process = SimpleNamespace(device=config.device or default_device())
        device = init_distributed_device(process)
        Trainer(config, device, process.rank, process.world_size).run()
    except (ConfigError, checkpoint.CheckpointError, DivergenceError) as error:
        sys.exit(f"error: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Trainer:
    """One process of a run: `run` goes through the epochs, `train_one_epoch` through the global batches of one."""

    def __init__(self, config: Config, device: torch.device, rank: int, world_size: int):
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        self.folder = Path(config.output) / config.experiment
        resumed = checkpoint.find_resumed(config.resume, self.folder)
        micro_batch, self.accumulation = data.split_global_batch(config, world_size)
        train_set, val_set, num_classes = data.open_splits(config)

        data.share_cores(device, config.workers)
        data.seed_everything(config.seed)
        size = {"img_size": config.img_size} if config.img_size else {}
        self.model = create_model(
            config.model,
            config.pretrained_path,
            num_classes=num_classes,
            drop_path_rate=config.drop_path,
            **size,
            **config.model_kwargs,
        ).to(device)
        if config.grad_checkpointing:
            self.model.set_grad_checkpointing()
        data_config = resolve_data_config(
            {"img_size": config.img_size, "crop_pct": config.crop_pct, "interpolation": config.interpolation},
            model=self.model,
        )
        self.batches = data.TrainingBatches(len(train_set), config, micro_batch, rank, world_size)
        self.train_loader = data.training_loader(train_set, config, data_config, device, self.batches)
        self.val_loader = data.evaluation_loader(
            val_set, data_config, device, config.workers, 2 * micro_batch, rank, world_size
        )
        self.augment = data.BatchAugmentation(config, num_classes, device)
        self.loss_fn = SoftTargetCrossEntropy() if config.mixing else LabelSmoothingCrossEntropy(config.smoothing)

        choices = {"betas": config.opt_betas, "eps": config.opt_eps}
        self.optimizer = create_optimizer_v2(
            self.model,
            opt=config.opt,
            lr=config.lr,
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **{name: value for name, value in choices.items() if value is not None},
        )
        self.scheduler, _ = create_scheduler_v2(
            self.optimizer,
            sched=config.sched,
            num_epochs=config.epochs,
            warmup_epochs=config.warmup_epochs,
            warmup_lr=config.warmup_lr,
            min_lr=config.min_lr,
        )
        self.ema = ModelEmaV3(self.model, decay=config.model_ema_decay) if config.model_ema else None
        self.precision = autocast(device, config.amp, config.amp_dtype)
        scaled = config.amp and config.amp_dtype == "float16" and device.type != "cpu"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled)
        self.history: list[dict] = []  # a row for each epoch done: summary.csv
        self.saved_config = {**dataclasses.asdict(config), "num_classes": num_classes}
        if resumed:
            self.restore(resumed)

        self.wrapped: nn.Module = self.model
        if world_size > 1:
            self.wrapped = DistributedDataParallel(self.model, [device] if device.type == "cuda" else None)

    def run(self) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "config.yaml", yaml.safe_dump(self.saved_config, sort_keys=False))
        epochs, done = self.config.epochs, len(self.history)
        images = self.batches.steps * self.config.global_batch_size
        quiet = None if self.rank == 0 else True  # None: where nobody watches, one line an epoch will do
        with tqdm(total=epochs * images, initial=done * images, unit="img", unit_scale=True, disable=quiet) as bar:
            for epoch in range(done, epochs):
                bar.set_description(f"epoch {epoch + 1}/{epochs}")
                start = time.perf_counter()
                row = {"epoch": epoch + 1, "lr": self.rate, "train_loss": self.train_one_epoch(epoch, bar)}
                row["images_per_second"] = images / (time.perf_counter() - start)
                row.update(self.evaluate())
                self.scheduler.step(epoch + 1)
                self.history.append(row)
                if self.rank == 0:
                    self.save()
                    tqdm.write(", ".join(f"{k} {v:.6g}" for k, v in row.items()))

    def train_one_epoch(self, epoch: int, bar: tqdm) -> float:
        """Returns the mean loss over all processes."""
        self.wrapped.train()
        self.batches.set_epoch(epoch)
        if hasattr(self.train_loader.dataset, "set_epoch"):  # a dataset that streams shuffles by itself
            self.train_loader.dataset.set_epoch(epoch)
        losses, loss = [], torch.zeros((), device=self.device)
        micro_batches = zip(self.train_loader, self.batches.first_positions())
        for i, ((images, targets), position) in enumerate(micro_batches, start=1):
            images, targets = self.augment(images, targets, epoch, position)
            # what the model draws (stochastic depth) follows from the seed and the place in the run as well
            data.seed_everything(data.derive_seed(self.config.seed, epoch, position, 2))
            complete = i % self.accumulation == 0
            loss = loss + self.backward(images, targets, synchronize=complete)
            if not complete:
                continue
            self.update()
            losses.append(loss)
            loss = torch.zeros_like(loss)
            if len(losses) % self.config.log_interval == 0:
                bar.set_postfix(loss=f"{self.check_finite(losses, epoch):.4f}", lr=f"{self.rate:.2e}")
            bar.update(self.config.global_batch_size)
        self.check_finite(losses, epoch)
        return sum_over_processes(torch.stack(losses).mean()) / self.world_size

    def backward(self, images: Tensor, targets: Tensor, synchronize: bool) -> Tensor:
        """Adds a micro-batch's gradient to this process's, or to all processes'; returns its share of the loss."""
        with self.wrapped.no_sync() if self.world_size > 1 and not synchronize else nullcontext():
            with self.precision:
                loss = self.loss_fn(self.wrapped(images), targets) / self.accumulation
            self.scaler.scale(loss).backward()
        return loss.detach()

    def update(self) -> None:
        """One step of the optimizer."""
        if self.config.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.update(self.model)

    def evaluate(self) -> dict[str, float]:
        models = {"": self.model} | ({"_ema": self.ema.module} if self.ema else {})
        results = evaluate(list(models.values()), self.val_loader, self.device, self.precision)
        row = {}
        for suffix, result in zip(models, results):
            row |= {f"eval_{name}{suffix}": getattr(result, name) for name in ("loss", "top1", "top5")}
        skipped = torch.tensor(float(data.unreadable_images(self.train_loader)), device=self.device)
        return row | {"unreadable_images": results[0].unreadable + sum_over_processes(skipped)}

    @property
    def rate(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def check_finite(self, losses: list[Tensor], epoch: int) -> float:
        """Looks at the losses since the last look; only here does the host wait for the device. Returns the last."""
        recent = torch.stack(losses[-self.config.log_interval :]).tolist()
        for step, loss in enumerate(recent, start=len(losses) - len(recent) + 1):
            if not math.isfinite(loss):
                last = self.folder / "last.pt"
                raise DivergenceError(
                    f"the loss is {loss} at step {step} of epoch {epoch + 1}, at learning rate {self.rate:.3g}; the "
                    f"last checkpoint is {last if last.exists() else 'none yet'}. A lower --lr, --clip-grad or "
                    "--no-amp may help; --resume auto goes on from the checkpoint"
                )
        return recent[-1]

    def save(self) -> None:
        """Writes last.pt, best.pt if this epoch is the best so far, and the summary."""
        state = {
            "arch": self.config.model,
            "epoch": len(self.history),
            "config": self.saved_config,
            "history": self.history,
            "scheduler": self.scheduler.state_dict(),
            **{name: part.state_dict() for name, part in self.parts().items()},
        }
        checkpoint.save_checkpoint(state, self.folder / "last.pt")
        metric = "eval_top1_ema" if self.ema else "eval_top1"
        if self.history[-1][metric] >= max(row[metric] for row in self.history):
            checkpoint.save_checkpoint(state, self.folder / "best.pt")
        write_summary(self.history, self.folder)

    def restore(self, path: Path) -> None:
        """Goes on from a checkpoint: with what it learned, but with the options of this run where they differ."""
        saved = checkpoint.read_checkpoint(path)
        checkpoint.check_same_run(saved["config"], self.saved_config, path)
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        for group, chosen in zip(self.optimizer.param_groups, options):
            group.update(chosen)
        self.history = saved["history"]
        self.scheduler.step(len(self.history))

    def parts(self) -> dict:
        """What a run learns and a checkpoint holds, under timm's names."""
        parts = {"state_dict": self.model, "optimizer": self.optimizer, "amp_scaler": self.scaler}
        return parts | ({"state_dict_ema": self.ema.module} if self.ema else {})


def sum_over_processes(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
    return value.item()


if __name__ == "__main__":
    main()
