"""Fixtures shared by all kernel tests."""

import pytest

from vil.models import dispatch


@pytest.fixture(autouse=True)
def fused_blocks(monkeypatch):
    """Fuse blocks even with VIL_FUSED=0, and restore the setting afterwards."""
    monkeypatch.setattr(dispatch, "_fused", True)
