"""Fixtures shared by all tests of the package; `fixtures` also sets up the environment that tests need."""

import logging

import pytest
import torch
from fixtures import image_folder, no_pictures, poison, process_state, uninterrupted  # noqa: F401


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.manual_seed(0)  # pytest-randomly does not seed PyTorch
    # undo the log level of `vil export`, because xdist cannot send log lines with file names that are not UTF-8
    logging.getLogger("vil.exporting").setLevel(logging.NOTSET)
