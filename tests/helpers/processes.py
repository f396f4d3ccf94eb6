"""Command lines of small runs, and functions that run them in forked processes as a user would."""

import contextlib
import importlib
import logging
import multiprocessing
import os
import random
import re
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml

# In mutation testing, tests fork processes from mutmut's process of a mutant instead of from the fork server.
UNDER_TEST = os.environ.get("MUTANT_UNDER_TEST", "stats") != "stats"
CONTEXT = multiprocessing.get_context("fork" if UNDER_TEST else "forkserver")
PRELOADED = ("vil.cli.train", "vil.cli.validate", "torch._dynamo", "matplotlib.figure", "PIL.PngImagePlugin")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)
# options of a run with the default recipe and a model that trains in seconds
SMALL = dict(model_kwargs=dict(embed_dim=32, depth=2, patch_size=8), img_size=16, global_batch_size=16, warmup_epochs=1)


def fork_server() -> None:
    """Fork the server of all test processes from this process, before this process starts threads.

    multiprocessing's own server would be a new interpreter, which would have to import all modules again.
    """
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # matplotlib is optional
            importlib.import_module(name)
    server = forkserver._forkserver
    address = connection.arbitrary_address("AF_UNIX")
    alive, held = os.pipe()  # the server exits when no process holds the other end of this pipe
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(held)
            try:
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, pid


class Forked(CONTEXT.Process):
    """Process that is forked from the fork server, with the same environment variables for all tests."""

    def start(self):
        with mock.patch.dict(os.environ, ENVIRONMENT, clear=True):
            super().start()


def call(main: Callable[[], Any], *words) -> Any:
    """Call a program's `main` in this process with the command-line arguments `words`."""
    with mock.patch.object(sys, "argv", [main.__module__, *map(str, words)]):
        return main()


def script(name):
    """Return the command that runs one of the repository's scripts."""
    return [sys.executable, str(ROOT / name)]


def train_command(folder, image_folder, **options):
    """Return the command line of a small run that writes to `folder`/run."""
    config = folder / "small.yaml"
    run_options = dict(data_dir=str(image_folder), output=str(folder), experiment="run", epochs=2, workers=1)
    config.write_text(yaml.safe_dump(SMALL | run_options | options))
    return [*script("train_imagenet.py"), "-c", str(config)]


def run(command, count=1, check=True, output=None, pictures=False):
    """Run a Python command in `count` forked processes, like `subprocess.run`.

    Stdout and stderr go to `output` if given. Curves are plotted only if `pictures` is set, because plotting takes
    longer than a small run.
    """
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")  # hide GPUs, because ranks cannot share a GPU
    with tempfile.TemporaryDirectory() as folder:
        files = [output or os.path.join(folder, name) for name in ("stdout", "stderr")]
        where = count, free_port(), *files
        started = [
            Forked(target=_run, args=(command[1:], environment, pictures, rank, *where)) for rank in range(count)
        ]
        code = next((code for code in _exit_codes(started) if code), 0)
        said = ("", "") if output else [_said(file) for file in files]
    assert not check or code == 0, said[1][-3000:]
    return subprocess.CompletedProcess(command, code, *said)


def _run(words, environment, pictures, *place):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    become(*place)
    if not pictures:
        draw_nothing()
    module = words[0] == "-m"
    sys.argv = words[module:]
    if module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def draw_nothing():
    from vil.training import mosaic, summary, trainer

    summary.plot_history = lambda *_: b""
    mosaic.Mosaic._plot = lambda _: b""
    trainer.is_reported = lambda *_: False


def _exit_codes(processes):
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()  # kill() does nothing if the process has ended
        process.join()
    return [process.exitcode for process in processes]


class ForkedProgram:
    """Run of a Python script with the methods of `subprocess.Popen` that research/seeds.py calls.

    The process is forked instead of started, because a new interpreter would import all modules again. Nothing is
    plotted.
    """

    def __init__(self, command, *, stdout, stderr, env):
        place = 0, 1, None, stdout.name, stderr.name
        self.process = Forked(target=_run, args=(command[1:], env, False, *place))
        self.process.start()

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)


def _said(file):
    """Return a file's text without Gloo's connection messages."""
    return re.sub(r"\[Gloo\].*\n", "", Path(file).read_text())


class Ended(NamedTuple):
    """Result of one rank: the function's return value, the exit status, and the text written to stdout and stderr."""

    value: Any
    status: int
    errors: str


def in_processes(count, function, *args, port=None) -> list[Ended]:
    """Run `function(rank, *args)` in `count` processes that may call `init_process_group`, and return their results."""
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, str(rank)) for rank in range(count)]
        port, pipes = port or free_port(), [CONTEXT.Pipe(duplex=False) for _ in range(count)]
        started = [
            Forked(target=_call, args=(function, args, pipes[rank][1], files[rank], rank, count, port))
            for rank in range(count)
        ]
        codes = _exit_codes(started)
        values = [pipe.recv() if pipe.poll() else None for pipe, _ in pipes]
        return [Ended(value, code, _said(file)) for value, code, file in zip(values, codes, files)]


def _call(function, args, pipe, file, rank, count, port):
    from vil.fault_tolerance import watchdog

    become(rank, count, port, file, file)
    watchdog.GRACE = 1  # seconds until a rank is terminated after another rank has ended
    pipe.send(function(rank, *args))


def become(rank, processes, port, stdout, stderr):
    """Make this process the rank `rank` of `processes` ranks, and append its stdout and stderr to files."""
    import torch

    torch.set_num_threads(1)
    # Fork loader workers, because spawned workers would import all modules again.
    multiprocessing.set_start_method("fork", force=True)
    if processes > 1:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
    for standard, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    logging.getLogger().handlers.clear()  # the fork copied pytest's log handlers
    # Reopen stdout and stderr, because pytest may have replaced the Python objects.
    sys.stdout, sys.stderr = (os.fdopen(standard, "w", buffering=1, closefd=False) for standard in (1, 2))


def free_port() -> int:
    """Return a port below the ephemeral range, because another connection could take an ephemeral port first."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("localhost", port))
            return port
    raise OSError("found no free port in 20000-31999 after 100 attempts")


# The fork server starts at the end of this module, because its child processes need the module's functions.
# Outside of pytest, multiprocessing starts its own server. Since Python 3.14, a server needs an authentication key.
if "pytest" in sys.modules and sys.version_info < (3, 14) and not UNDER_TEST:
    fork_server()
else:
    CONTEXT.set_forkserver_preload(list(PRELOADED))
