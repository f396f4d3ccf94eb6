"""Saving and loading the checkpoints of a run folder: last.pt, previous.pt and best.pt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import checkpoint
from ..checkpoint import CheckpointError
from ..config import ConfigError
from ..distributed import broadcast_from_rank0
from ..fault_tolerance.locks import FolderLock
from ..text import one_line
from .best import BestCheckpoint
from .phases import resampled_weights
from .resumption import check_same_run, find_resumed
from .run_info import RunInfo
from .state import TrainState, check_optimizer

_logger = logging.getLogger(__name__)

# exceptions raised while loading a training state that is invalid or does not fit the model
INVALID_STATE = (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError)


class Checkpointer:
    """Restores a run's state from a checkpoint at the start, and saves checkpoints during training.

    Only rank 0 locks the run folder and reads and writes checkpoints.

    Args:
        run: Information about the run that checkpoints store.
        state: Training state of the run.
        rank: Rank of this process.
        steps_per_epoch: Number of optimizer steps per epoch.
        lock: Lock of the run folder, if this process already holds the lock from the previous phase.
    """

    def __init__(
        self, run: RunInfo, state: TrainState, rank: int, steps_per_epoch: int, lock: FolderLock | None = None
    ):
        self.run = run
        self.state = state
        self.rank = rank
        self.steps_per_epoch = steps_per_epoch
        self.lock = lock
        self.last = run.folder / "last.pt"
        self.previous = run.folder / "previous.pt"
        self.best = BestCheckpoint(run.folder)

    def load(self) -> None:
        """Lock the run folder, and restore the state of all ranks if the run resumes.

        Raises:
            ConfigError: The run folder is not writable, or the path of a checkpoint is not a regular file.
            FolderInUseError: Another run has locked the run folder.
            CheckpointError: The checkpoint cannot be read or belongs to another run.
        """
        found = broadcast_from_rank0(self._lock_and_read)
        if found:
            path, saved = found
            self.run.options.update(saved.pop("initial_weights"))  # so that config.yaml still names the initial weights
            self._restore(path, saved)

    @contextmanager
    def hold_lock(self, release: bool) -> Iterator[None]:
        """Hold the run folder's lock inside the context. On exit, release the lock if `release` or after an error."""
        try:
            yield
        except BaseException:
            release = True
            raise
        finally:
            if self.lock and release:
                self.lock.release()

    def _lock_and_read(self) -> list | None:
        """Lock the run folder. Return path and content of the checkpoint to resume from, or None for a new run."""
        try:
            self.lock = self.lock or FolderLock(self.run.folder)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {self.run.folder}: {error}. Choose another folder with --output or --experiment"
            ) from error
        for path in (self.last, self.previous, self.best.path):
            if path.exists() and not path.is_file():
                raise ConfigError(f"{path} exists but is not a regular file; move or remove it")
        found = find_resumed(self.run.phase.config.resume, self.run.folder)
        if found is None:
            if self.run.phase.config.resume == "auto":
                _logger.warning("%s has no checkpoint yet, so training starts from epoch 1", self.run.folder)
            return None
        path, saved = found
        check_same_run(saved, self.run, path)
        return [str(path), saved]

    def _restore(self, path: str, saved: dict[str, Any]) -> None:
        starts_phase = self.run.phase.starts_from(saved)
        try:
            if starts_phase:
                self._start_phase(saved)
            else:
                self.state.load_state_dict(saved)
                check_optimizer(self.state.optimizer, self.run.phase.config.opt)
        except INVALID_STATE as error:
            reason = one_line(f"{type(error).__name__}: {error}", 400)
            raise CheckpointError(f"{path} does not fit this run: {reason}") from error
        if self.rank == 0:
            self._resume_best(starts_phase)
            self._log_progress(path)

    def _start_phase(self, saved: dict[str, Any]) -> None:
        """Load the previous phase's last checkpoint, with weights resampled to this phase's image size."""
        before = self.run.phase.previous.config
        for name, model in zip(("state_dict", "state_dict_ema"), self.state.models):
            saved[name] = resampled_weights(before, self.run.num_classes, model, saved[name])
        self.state.load_weights_and_history(saved)

    def _resume_best(self, starts_phase: bool) -> None:
        """Find the best epoch of a resumed run.

        If best.pt holds no epoch of the restored history, write best.pt from the restored state, unless this state is
        within an epoch or from the previous phase.
        """
        state = self.state
        self.best.resume(state.history)
        if state.history and not self.best.row and not state.meter.steps and not starts_phase:
            self.best.write(self.state_dict())

    def _log_progress(self, path: str) -> None:
        epochs = len(self.state.history)
        total_epochs = self.run.phase.config.total_epochs
        if epochs >= total_epochs:
            phases_set_epochs = any("epochs" in phase for phase in self.run.phase.config.phases or ())
            remedy = "more epochs in --phases" if phases_set_epochs else "a larger --epochs"
            is_equal = epochs == total_epochs
            finished = f"all {epochs} epochs" if is_equal else f"{epochs} epochs, and --epochs is {total_epochs}"
            _logger.warning("%s has finished %s; set %s to train longer", path, finished, remedy)
            return
        _logger.warning(
            "resuming after step %d of %d in epoch %d of %d from %s",
            self.state.meter.steps, self.steps_per_epoch, epochs + 1, total_epochs, path,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the current content of the checkpoint, which `save` writes to last.pt."""
        return self.run.state_dict() | self.state.state_dict()

    def save_unfinished_epoch(self) -> str:
        """Write last.pt if at least one step is finished. Return a message for the user about the saved progress."""
        epochs = len(self.state.history)
        steps = self.state.meter.steps
        if not epochs and not steps:
            return "no step was finished, so there is nothing to save"
        self.save()
        return f"{self.last} holds step {steps} of epoch {epochs + 1}, and --resume auto resumes from there"

    def save(self) -> None:
        """On rank 0, write last.pt, and keep the old file as previous.pt.

        At the end of the best epoch so far, also write best.pt.
        """
        if self.rank > 0:
            return
        content = self.state_dict()
        if self.state.meter.steps == 0 and self.best.is_beaten_by(self.state.history[-1]):
            self.best.write(content)
        checkpoint.save_checkpoint(content, self.last, previous=self.previous)
