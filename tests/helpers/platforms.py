"""Simulate macOS and Windows on Linux: run train_imagenet.py without the functions and modules that they lack.

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
# imported before functions are removed, because these libraries check the platform
LIBRARIES = ("timm", "torch.utils.data")
