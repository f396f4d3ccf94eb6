"""Trains as train_imagenet.py does where what macOS or Windows lack has been taken away, as far as one can elsewhere.

PLATFORM=win32 python tests/platforms.py -c CONFIG

Ctrl-C interrupts the run in the middle of its second epoch; then it goes on. Loaders' workers are new interpreters, as
there: they import this file, and lack the same.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing import resource_tracker
from pathlib import Path

ROOT = Path(__file__).parents[1]
MISSING = {
    "darwin": {signal: ("sigwaitinfo", "sigtimedwait"), os: ("sched_getaffinity", "EX_TEMPFAIL")},
    "win32": {
        signal: ("SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGALRM", "pthread_sigmask", "sigwait",
                 "sigwaitinfo", "sigtimedwait", "pthread_kill", "setitimer"),
        os: ("fork", "forkpty", "mkfifo", "geteuid", "getuid", "sched_getaffinity", "EX_TEMPFAIL",
             "O_DIRECTORY", "killpg", "setsid", "getpgid", "uname"),
    },
}  # fmt: skip
MODULES = {"darwin": (), "win32": ("fcntl", "resource", "pwd", "grp", "termios", "triton", "cuda", "cuda.core")}


def become(platform: str) -> None:
    """Takes away what the platform lacks, once libraries have been imported, which know better than this file."""
    import matplotlib.figure
    import timm
    import torch.utils.data  # noqa: F401
    from torch.utils.data._utils import signal_handling

    for module, names in MISSING[platform].items():
        for name in names:
            delattr(module, name)
    for name in MODULES[platform]:
        sys.modules[name] = None
    resource_tracker._HAVE_SIGMASK = hasattr(signal, "pthread_sigmask")
    signal_handling.IS_WINDOWS = platform == "win32"


def interrupt_after(steps: int) -> None:
    """Ctrl-C, in place of the user's: all that there is on Windows."""
    from vil.training.interruption import CheckpointTimer

    due = CheckpointTimer.due

    def interrupted(timer, step):
        if step == steps:
            signal.raise_signal(signal.SIGINT)
        return due(timer, step)

    CheckpointTimer.due = interrupted


if __name__ in ("__main__", "__mp_main__"):
    sys.path.insert(0, str(ROOT))
    become(os.environ["PLATFORM"])

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    text = (ROOT / "train_imagenet.py").read_text()
    exec(
        text.partition("\nimport dataclasses\n")[0], {"__name__": "__main__"}
    )  # what it does of signals before imports
    import train_imagenet
    from vil.training.interruption import PREEMPTED, CheckpointTimer

    due = CheckpointTimer.due
    interrupt_after(steps=6)
    try:
        train_imagenet.main()
    except SystemExit as end:
        assert end.code == PREEMPTED == 75, end.code
    CheckpointTimer.due = due
    sys.argv += ["--resume", "auto", "--workers", "0"]
    train_imagenet.main()
