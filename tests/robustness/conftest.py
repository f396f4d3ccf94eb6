"""Fixtures that start runs with several processes, and that train uninterrupted runs for comparison."""

import functools

import pytest
from faults import Run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, image_folder):
    """Return a function that trains an uninterrupted run and caches the run by world size and options."""

    @functools.cache
    def trained(processes=2, **options):
        run = Run(tmp_path_factory.mktemp("undisturbed"), processes, data_dir=str(image_folder), **options)
        run.finished()
        return run

    return trained


@pytest.fixture
def start(tmp_path, image_folder):
    """Return a function that starts a `Run`, by default in the test's temporary folder."""
    runs = []

    def started(processes=2, prepare=None, output=tmp_path, **options):
        output.mkdir(exist_ok=True)
        runs.append(Run(output, processes, prepare, **dict(data_dir=str(image_folder)) | options))
        return runs[-1]

    yield started
    for run in runs:
        run.kill()
