"""Training in Python: `vil.train` and its result, a `Run`."""

from __future__ import annotations

import functools
import gc
import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import options_to_resume
from ..config import Config, ConfigError
from ..config.command_line import path_of_config, resolve_config
from ..config.values import checked
from ..data.seeds import rng_states_restored
from ..devices import known_device
from ..distributed import init_process_group, world_size_variable
from ..factory import from_checkpoint
from ..fault_tolerance.signals import handlers_restored
from ..prediction import Prediction, predict
from ..prediction.images import Picture
from ..text import shown
from . import trainer
from .own_folder import complete_options
from .run_info import folder_of

SOURCE = "the arguments of vil.train"  # name of the source of options, for error messages


@dataclass(frozen=True)
class Run:
    """Finished training run.

    Attributes:
        folder: Run folder, which also contains last.pt, summary.csv, curve.png and, for a validation split of moderate
            size, report.html.
        history: One dict per epoch with the columns of summary.csv, such as `epoch`, `train_loss` and `eval_top1`.
        best_checkpoint: Checkpoint of the epoch with the highest top-1 accuracy on the validation split.
    """

    folder: Path
    history: list[dict[str, float]]
    best_checkpoint: Path

    def predict(
        self, images: Picture | Iterable[Picture], topk: int = 5, *, batch_size: int = 32
    ) -> list[Prediction] | list[list[Prediction]]:
        """Predict the classes of images with the best checkpoint, as `vil.predict` does."""
        return predict(self._best_model, images, topk, batch_size=batch_size)

    @functools.cached_property
    def _best_model(self) -> nn.Module:
        return from_checkpoint(self.best_checkpoint)


def train(
    data: str | os.PathLike | None = None,
    weights: str | os.PathLike | None = None,
    *,
    config: str | os.PathLike | None = None,
    **options: Any,
) -> Run:
    """Train an image classifier in this process, as the command `vil train` does.

    Without a config, the splits, the weights and the recipe are chosen by the content of the folder and the device.
    The log on stderr names the choices. Training leaves the RNGs of Python, NumPy and PyTorch as they were before.

    Args:
        data: Folder of images, with one folder per class or with splits; with dataset="wds/NAME", folder or URL of the
            shards; optional for other values of `dataset`; None for synthetic images.
        weights: Weights to start from: a file, or the name of weights in the package, such as "vil_tiny.tiny_in200";
            "none" for random weights; None for the config's weights or, without a config, for weights chosen by the
            folder.
        config: Config file, or the name of a config of this package, such as "vil_tiny".
        options: Options of `vil train`, with underscores instead of hyphens, such as `epochs=20` or `resume="auto"`.

    Returns:
        The finished run.

    Raises:
        ConfigError: An option is unknown or invalid, or does not fit the data.
        CheckpointError: A checkpoint cannot be read or written, or the run folder already contains a run.
        FolderInUseError: Another process trains in the run folder.
        DivergenceError: The loss or the gradient norm is not finite.
        StoppedError: A signal such as Ctrl-C stopped the run, or images cannot be read. If at least one step was
            finished, the run has written a checkpoint, from which `resume="auto"` continues.
    """
    chosen = options_of_run(data, weights, config, options)
    threads = torch.get_num_threads()
    try:
        with handlers_restored(), rng_states_restored():
            device, rank, size = init_process_group(known_device(chosen.device))
            history = trainer.train(chosen, device, rank, size)
    except BaseException as error:
        free_frames(error)
        raise
    finally:
        torch.set_num_threads(threads)
    folder = folder_of(chosen).resolve()
    return Run(folder, history, folder / "best.pt")


def options_of_run(
    data: str | os.PathLike | None,
    weights: str | os.PathLike | None,
    config: str | os.PathLike | None,
    options: dict[str, Any],
) -> Config:
    """Return the options of a run from the arguments of `train`.

    Raises:
        ConfigError: An option is unknown, invalid or given twice, or several processes were started.
        CheckpointError: A checkpoint cannot be read.
    """
    if (variable := world_size_variable()) and os.environ[variable] != "1":
        raise ConfigError(
            f"vil.train trains in one process, got {variable}={os.environ[variable]}: unset {variable}, or run "
            "torchrun -m vil train"
        )
    if not isinstance(data, str | os.PathLike | None):
        raise ConfigError(
            f"data must be the path of a folder of images, got {shown(data)}: pass the path of a folder, or train on a "
            'dataset object in your own loop (docs/guide.md, section "Your own training loop")'
        )
    given = {name: _plain(value) for name, value in options.items()}
    for name, argument, value in (("data_dir", "data", data), ("pretrained_path", "weights", weights)):
        if value is not None and name in given:
            raise ConfigError(f"{name} is given twice, as {argument} and as {name}")
        if value is not None:
            given[name] = _plain(value)
    file = path_of_config(None if config is None else os.fspath(config))
    return resolve_config(checked(given, SOURCE), file, options_to_resume, complete_options)


def free_frames(error: BaseException | None) -> None:
    """Free the model and the lock of the run folder, which the traceback of `error` would keep alive in a notebook."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()


def _plain(value: Any) -> Any:
    """Return a path or device as a string, because options store strings, and any other value unchanged."""
    if isinstance(value, torch.device):
        return str(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value
