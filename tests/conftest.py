"""Fixtures of every test of the package; `fixtures` also makes the environment that tests need."""

import random

import numpy as np
import pytest
import torch
from fixtures import image_folder, no_pictures, poison, signal_handlers, uninterrupted  # noqa: F401


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)  # a test's numbers are the same in every run
