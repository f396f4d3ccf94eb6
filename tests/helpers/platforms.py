"""Simulate macOS and Windows on Linux: run train_imagenet.py without the functions and modules that these systems lack.

    python tests/helpers/platforms.py DARWIN.yaml WIN32.yaml

Ctrl-C interrupts each run in the middle of its second epoch, and the run is then resumed. For Windows,
the loader's workers are new interpreters, which import this file and remove the same functions.
"""

import contextlib
import importlib
import io
import multiprocessing
import os
import signal
import sys
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
MISSING = {
    "darwin": {signal: ("sigwaitinfo", "sigtimedwait"), os: ("sched_getaffinity",)},
    "win32": {
        signal: ("SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGALRM", "pthread_sigmask", "pthread_kill",
                 "setitimer", "sigwait", "sigwaitinfo", "sigtimedwait"),
        os: ("fork", "forkpty", "mkfifo", "geteuid", "getuid", "sched_getaffinity", "EX_TEMPFAIL", "O_DIRECTORY",
             "killpg", "setsid", "getpgid", "uname"),
    },
}  # fmt: skip
MODULES = {"darwin": ("triton", "cuda"), "win32": ("triton", "cuda", "fcntl", "resource", "pwd", "grp", "termios")}
# imported before `become` removes functions, because importing NumPy needs `os.uname`
LIBRARIES = ("timm", "torch.utils.data")


def become(platform: str) -> None:
    """Remove the functions and modules that the platform lacks; must be called before `vil` is imported."""
    for module, names in MISSING[platform].items():
        for name in names:
            delattr(module, name)
    for name in MODULES[platform]:
        sys.modules[name] = None
    if platform == "win32":  # stub file locks, which always succeed
        sys.modules["msvcrt"] = SimpleNamespace(LK_NBLCK=2, locking=lambda *_: None)
    resource_tracker._HAVE_SIGMASK = hasattr(signal, "pthread_sigmask")
    sys.modules["torch.utils.data._utils.signal_handling"].IS_WINDOWS = platform == "win32"


def train(platform: str, config: str) -> None:
    """Train with workers until Ctrl-C, then resume without workers until the end."""
    # Fork for macOS, because starting new interpreters takes seconds and the Windows run covers spawned workers.
    multiprocessing.set_start_method("spawn" if platform == "win32" else "fork", force=True)
    os.environ["PLATFORM"] = platform
    whole = SimpleNamespace(**vars(os))
    become(platform)
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        import vil  # noqa: F401
    assert not said.getvalue()
    from vil.kernels import cache
    from vil.training import mosaic, summary, trainer

    cache.os = whole  # the kernel cache keeps the complete `os` module, because compiling kernels takes long
    summary.plot_history = lambda *_: b""
    mosaic.Mosaic._plot = lambda _: b""
    trainer.is_reported = lambda *_: False
    sys.argv = ["train_imagenet.py", "-c", config]
    from vil.cli import train as program
    from vil.fault_tolerance.early_signals import exit_on_signals
    from vil.training import trainer as training_loop

    exit_on_signals()
    save = training_loop.Trainer.checkpoint_if_due

    def interrupted(trainer):
        if trainer.steps == 6:
            signal.raise_signal(signal.SIGINT)
        save(trainer)

    training_loop.Trainer.checkpoint_if_due = interrupted
    try:
        program.main()
    except SystemExit as end:
        if end.code != 75:
            raise
    training_loop.Trainer.checkpoint_if_due = save
    sys.argv += ["--resume", "auto", "--workers", "0"]
    program.main()


if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(ROOT))
    for library in LIBRARIES:
        importlib.import_module(library)

if __name__ == "__mp_main__":
    become(os.environ["PLATFORM"])

if __name__ == "__main__":
    importlib.import_module("numba")
    runs = [multiprocessing.get_context("fork").Process(target=train, args=run) for run in zip(MISSING, sys.argv[1:])]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    sys.exit(any(run.exitcode for run in runs))
