"""Fixtures shared by all kernel tests."""

import pytest

from vil.models import dispatch


@pytest.fixture(autouse=True)
def fused_blocks(monkeypatch):
    """Fuse blocks even if VIL_FUSED=0 is set, and restore the setting after the test."""
    monkeypatch.setattr(dispatch, "_fused", True)
