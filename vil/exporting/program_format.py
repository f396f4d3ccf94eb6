"""Serialization of a model as a torch.export program."""

from __future__ import annotations

import io
import json
from typing import Any

import torch

from .serialized import Serialized, quiet_exporters
from .traced import Exported


def to_pt2(exported: Exported, metadata: dict[str, Any]) -> Serialized:
    """Serialize a model for torch.export.load. The metadata is stored in the extra file metadata.json."""
    buffer = io.BytesIO()
    with quiet_exporters():
        torch.export.save(exported.program(), buffer, extra_files={"metadata.json": json.dumps(metadata)})
    content = buffer.getvalue()
    return Serialized(content, torch.export.load(io.BytesIO(content)).module())
