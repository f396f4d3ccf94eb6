"""Pytest plugin, used by run.py, that records which functions each test calls in any of the test's processes.

With MUTANT_UNDER_TEST=stats the plugin writes a line for each test to REACHED/<process>.jsonl. With a mutant the plugin
gives the tests their own process group and temporary folder.
"""

import functools
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from mutmut.mutation import trampoline

NOTICED = os.path.abspath("../noticed.txt")


def in_this_process() -> None:
    """Let mutmut record the functions that this process calls, and use the mutant in MUTANT_UNDER_TEST."""
    trampoline.record_trampoline_hit = record
    trampoline.get_mutant_under_test = lambda: named_as_here(os.environ.get("MUTANT_UNDER_TEST", ""))


def name_of_script() -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return spec.name if spec else Path(getattr(main, "__file__", "") or "").stem


def named_as_here(mutant: str) -> str:
    module, _, function = mutant.rpartition(".")
    return f"__main__.{function}" if module and module == name_of_script() else mutant


@functools.cache
def record(function: str, caller: str | None = None) -> None:
    if "REACHED_FILE" in os.environ:
        module, _, name = function.rpartition(".")
        with open(os.environ["REACHED_FILE"], "a") as file:
            file.write(f"{name_of_script() if module == '__main__' else module}.{name}\n")


class Reached:
    """Plugin that records the called functions and the seconds of each test, including those of its fixtures."""

    def __init__(self, folder: Path):
        self.results, self.file = folder / f"{os.getpid()}.jsonl", folder / f"{os.getpid()}.txt"
        os.environ["REACHED_FILE"] = str(self.file)
        self.of_fixture: dict[str, tuple[set[str], float]] = {}
        self.of_test, self.seconds, self.failed = set(), 0.0, False

    def pytest_collection_finish(self):
        processes = importlib.import_module("processes")
        first = processes.Forked(target=int)  # start the slow fork server, so that its time does not count for a test
        first.start()
        first.join()

    def take(self) -> set[str]:
        """Return the functions that have been called since `take` was called last."""
        record.cache_clear()
        names = set(self.file.read_text().split()) if self.file.exists() else set()
        self.file.write_text("")
        return names

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        self.of_test |= self.take()
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            self.of_fixture[fixturedef.argname] = self.take(), time.monotonic() - begin

    def pytest_runtest_logreport(self, report):
        self.seconds += report.duration * (report.when == "call")
        self.failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.take()
        self.of_test, self.seconds, self.failed = set(), 0.0, False
        result = yield
        self.of_test |= self.take()
        for name in item.fixturenames:
            functions, seconds = self.of_fixture.get(name, (set(), 0.0))
            self.of_test |= functions
            self.seconds += seconds
        with open(self.results, "a") as file:
            test = dict(test=item.nodeid, seconds=self.seconds, failed=self.failed, reached=sorted(self.of_test))
            file.write(json.dumps(test) + "\n")
        return result


class Noticed:
    """Plugin that records which tests detect the mutant, and by which failure."""

    def __init__(self, mutant: str):
        self.mutant = mutant

    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            how = crash.message.split("\n")[0] if crash else ""
            with open(NOTICED, "a") as file:
                file.write(f"{self.mutant} {report.nodeid} {how}\n")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    mutant = os.environ.get("MUTANT_UNDER_TEST", "")
    if mutant == "stats" and "REACHED" in os.environ and not config.option.collectonly:
        in_this_process()
        config.pluginmanager.register(Reached(Path(os.environ["REACHED"])))
    elif "__mutmut_" in mutant:
        in_this_process()
        config.pluginmanager.register(Noticed(mutant))
        config.option.basetemp = os.path.abspath(f"../temporary/{mutant}")
        os.setpgrp()
        signal.signal(signal.SIGXCPU, lambda *_: os.killpg(0, signal.SIGKILL))  # kill all processes at the time limit
