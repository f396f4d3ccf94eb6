"""TensorBoard and Weights & Biases loggers, which receive one history row per epoch."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any, Protocol

from ..config import Config, ConfigError
from ..fault_tolerance.files import write_atomically

_logger = logging.getLogger(__name__)


class RowLogger(Protocol):
    """Protocol of a logger for history rows.

    Attributes:
        name: Name of the logger in warnings.
    """

    name: str

    def log(self, row: dict[str, Any]) -> None: ...


def open_loggers(config: Config, saved_config: dict[str, Any], folder: Path) -> list[RowLogger]:
    """Create the loggers that are enabled in the options of a run.

    Raises:
        ConfigError: A logger needs a package that is not installed.
    """
    loggers: list[RowLogger] = []
    if config.log_tensorboard:
        loggers.append(TensorBoard(folder))
    if config.log_wandb:
        loggers.append(WeightsAndBiases(str(config.experiment), saved_config, folder))
    return loggers


class TensorBoard:
    """TensorBoard logger that writes event files to the run folder."""

    name = "tensorboard"

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("log_tensorboard needs the package tensorboard; run pip install tensorboard") from error
        self.writer = SummaryWriter(folder)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()


class WeightsAndBiases:
    """Weights & Biases logger. A resumed run continues the same W&B run, whose id is stored in wandb_id.txt."""

    name = "weights_and_biases"

    def __init__(self, experiment: str, saved_config: dict[str, Any], folder: Path):
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("log_wandb needs the package wandb; run pip install wandb") from error
        self.wandb: Any = wandb
        self.run: Any = None

        known = folder / "wandb_id.txt"
        if not known.is_file():
            write_atomically(known, secrets.token_hex(4))
        self.settings = dict(
            project="vision-longhorn",
            name=experiment,
            id=known.read_text(),
            resume="allow",
            config=saved_config,
            dir=folder,
        )
        try:
            self._connect()
        except Exception as error:  # wandb and the network raise exceptions of various types
            _logger.warning("failed to connect to Weights & Biases: %s; trying again after the next epoch", error)

    def _connect(self) -> None:
        if self.run is None:
            self.run = self.wandb.init(**self.settings)

    def log(self, row: dict[str, Any]) -> None:
        self._connect()
        self.run.log(row, step=int(row["epoch"]))  # older checkpoints store the epoch as a float
