"""Content of config.json and README.md in an exported folder, which timm loads by `local-dir:` or `hf-hub:`."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timm.models import PretrainedCfg
from timm.models._hub import save_config_for_hf


def config_of(model: Any, metadata: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Return the content of config.json in an exported folder.

    Args:
        model: The exported timm model.
        metadata: Metadata returned by `describe`, such as preprocessing and class names.
        arguments: Keyword arguments that create the model.
    """
    # leave out the license, which is unknown, and label_names, which is a top-level key of config.json
    known = {field.name for field in fields(PretrainedCfg)} - {"label_names", "license"}
    model = copy.copy(model)  # copied, so that setting pretrained_cfg does not change the caller's model
    model.pretrained_cfg = _selected(model.pretrained_cfg, known)

    config: dict[str, Any] = {"pretrained_cfg": _selected(metadata, known)}
    if "label_names" in metadata:
        config["label_names"] = metadata["label_names"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        # Older versions of timm need a Path, although the parameter is annotated as str.
        save_config_for_hf(model, path, config, dict(arguments))  # type: ignore[arg-type]
        written = json.loads(path.read_text())
    # drop num_classes from model_args, because timm reads the top-level num_classes, and transformers sets its own
    written.get("model_args", {}).pop("num_classes", None)
    return json.dumps(written, indent=2)


def _selected(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def card_of(name: str, metadata: Mapping[str, Any], further: Mapping[str, str]) -> str:
    """Return the content of README.md: a model card with metadata and a usage example.

    Args:
        name: Name of the folder.
        metadata: Metadata returned by `describe`.
        further: Additional metadata entries set by the user.
    """
    size = "x".join(map(str, metadata["input_size"][1:]))
    stored = "class names and preprocessing are" if "label_names" in metadata else "preprocessing is"
    facts = [
        f"{metadata['model']}, {metadata['num_classes']} classes, images of {size} pixels",
        f"weights in half precision; {stored} in config.json",
        *(f"{key}: {text}" for key, text in further.items()),
        "TODO: add the training data, accuracy and license here",
    ]
    facts_list = "\n".join(f"- {fact}" for fact in facts)
    return f"""---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm, vision-longhorn]
---
# {name}

{facts_list}

```python
import timm
import vil  # Vision Longhorn, registers the models

model = timm.create_model("local-dir:{name}", pretrained=True).eval()  # from the hub: "hf-hub:OWNER/{name}"
vil.predict(model, "photo.jpg")
```
"""
