"""What all tests of kernels have in common."""

import pytest

from vil import block


@pytest.fixture(autouse=True)
def fused_blocks(monkeypatch):
    """Blocks are fused, with VIL_FUSED=0 as well, and are what they were again afterwards."""
    monkeypatch.setattr(block, "_fused", True)
