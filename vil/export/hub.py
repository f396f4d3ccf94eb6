"""A folder as timm's `local-dir:` and `hf-hub:` read it: config.json and a card beside model.safetensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timm.models import PretrainedCfg
from timm.models._hub import save_config_for_hf


def config_of(model: Any, metadata: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """The text of config.json.

    Args:
        model: A model of timm.
        metadata: Of `describe`: preprocessing and names of classes.
        arguments: Those with which the model is built.
    """
    known = {field.name for field in fields(PretrainedCfg)} - {"label_names", "license"}  # which nobody here knows
    model = copy.copy(model)  # whose configuration says more than timm's can
    model.pretrained_cfg = {name: value for name, value in model.pretrained_cfg.items() if name in known}
    said = {name: value for name, value in metadata.items() if name in known}
    names = {"label_names": metadata["label_names"]} if "label_names" in metadata else {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        # a Path, which older releases of timm need, whatever the type says
        save_config_for_hf(model, path, {"pretrained_cfg": said, **names}, dict(arguments))  # type: ignore[arg-type]
        return path.read_text()


def card_of(name: str, metadata: Mapping[str, Any], further: Mapping[str, str]) -> str:
    """The text of README.md, a model card: what the file says of itself, and how it is used."""
    size = "x".join(map(str, metadata["input_size"][1:]))
    lines = [
        f"{metadata['model']}, {metadata['num_classes']} classes, images of {size} pixels",
        "weights in half precision; names of classes and preprocessing are in config.json",
        *(f"{key}: {text}" for key, text in further.items()),
        "data, accuracy, licence: for who trained it to say here",
    ]
    return f"""---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm, vision-longhorn]
---
# {name}

{chr(10).join(f"- {line}" for line in lines)}

```python
import timm
import vil  # of Vision Longhorn, registers the models

model = timm.create_model("local-dir:{name}", pretrained=True).eval()  # from the hub: "hf-hub:OWNER/{name}"
vil.predict(model, "photo.jpg")
```
"""
