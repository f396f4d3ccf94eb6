"""Trains as train_imagenet.py does where what macOS or Windows lack has been taken away, as far as one can elsewhere.

PLATFORM=win32 python tests/helpers/platforms.py -c CONFIG

Ctrl-C interrupts the run in the middle of its second epoch; then it goes on. Loaders' workers are new interpreters, as
there: they import this file, and lack the same.
"""

import importlib
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


def become(platform: str) -> None:
    """Takes away what the platform lacks, once libraries have been imported, which know better than this file."""
    in_worker = __name__ == "__mp_main__"  # of a loader, which needs less
    for library in ("timm", "torch.utils.data") if in_worker else ("matplotlib.figure", "timm", "numba"):
        importlib.import_module(library)
    if platform == "win32" and not in_worker:
        importlib.import_module("vil.kernels.cache").os = SimpleNamespace(name="nt")
    for module, names in MISSING[platform].items():
        for name in names:
            delattr(module, name)
    for name in MODULES[platform]:
        sys.modules[name] = None
    resource_tracker._HAVE_SIGMASK = hasattr(signal, "pthread_sigmask")
    sys.modules["torch.utils.data._utils.signal_handling"].IS_WINDOWS = platform == "win32"


def train_and_interrupt(steps: int) -> None:
    """Trains until Ctrl-C, which is all that there is on Windows, after so many steps."""
    import train_imagenet
    from vil.training.interruption import PREEMPTED, CheckpointTimer

    due = CheckpointTimer.due

    def interrupted(timer, step):
        if step == steps:
            signal.raise_signal(signal.SIGINT)
        return due(timer, step)

    CheckpointTimer.due = interrupted
    try:
        train_imagenet.main()
    except SystemExit as end:
        if end.code != PREEMPTED:
            raise
    CheckpointTimer.due = due


if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(ROOT))
    become(os.environ["PLATFORM"])

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    until_imports = (ROOT / "train_imagenet.py").read_text().partition("\nimport dataclasses\n")[0]
    exec(until_imports, {"__name__": "__main__"})  # what it does of signals that come early
    train_and_interrupt(steps=6)
    import train_imagenet

    sys.argv += ["--resume", "auto", "--workers", "0"]
    train_imagenet.main()
