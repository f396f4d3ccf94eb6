"""The content of the files: ONNX, PyTorch's exported program, and weights in half precision."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from .. import checkpoint
from ..config import MODEL_KWARGS, ConfigError
from ..factory import from_checkpoint, input_size
from .onnx_graph import onnx_model
from .traced import Exported, ExportError, as_evaluated, outputs_of

OPSET = 18  # the oldest that PyTorch's exporter writes; onnxruntime, TensorRT and OpenVINO have long read it

Run = Callable[[Tensor], Sequence[Tensor]]


def onnx_packages() -> tuple[Any, Any]:
    """onnx and onnxruntime, with onnxscript there too."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  of which torch.onnx is made
    except ImportError as error:
        raise ExportError(f"{error}: pip install onnx onnxruntime onnxscript, which an export to ONNX needs") from error
    return onnx, onnxruntime


def to_onnx(exported: Exported, metadata: dict[str, Any], opset: int) -> tuple[bytes, Run]:
    """An ONNX file's content, and what runs it in onnxruntime.

    Raises:
        ExportError: ONNX or onnxruntime has no such operator; the message names it and the opset.
    """
    onnx, onnxruntime = onnx_packages()
    with _quiet():
        try:
            proto = onnx_model(exported, max(opset, OPSET))
        except torch.onnx.errors.OnnxExporterError as error:
            raise ExportError(f"at opset {opset} PyTorch's exporter fails: {_first_line(error)}") from error
    _check_operators(onnx, proto, opset)
    _clean(proto)
    proto.producer_name, proto.producer_version = "vision-longhorn", ""
    onnx.helper.set_model_props(proto, {name: _plain(value) for name, value in metadata.items()})
    content = proto.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common type
        version = onnxruntime.__version__
        raise ExportError(f"onnxruntime {version} cannot read this at opset {opset}: {_first_line(error)}") from error
    return content, lambda images: [
        torch.from_numpy(y) for y in session.run(exported.outputs, {"images": images.numpy()})
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters say of their own parts."""
    names = "onnxscript", "torch._export.serde.serialize", "torch.onnx._internal.exporter._schemas"
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph, and of the graphs inside of it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _check_operators(onnx: Any, proto: Any, opset: int) -> None:
    """Raises an ExportError that names the operators that are not of this opset."""
    written = next(entry.version for entry in proto.opset_import if not entry.domain)
    names = {node.op_type for node in _nodes(proto.graph) if not node.domain}
    schemas = [onnx.defs.get_schema(n, *[written] * onnx.defs.has(n, written)) for n in names if onnx.defs.has(n)]
    versions = {schema.name: schema.since_version for schema in schemas}
    if newer := [f"{name} of opset {version}" for name, version in sorted(versions.items()) if version > opset]:
        raise ExportError(f"opset {opset} cannot be written: PyTorch's exporter uses {', '.join(newer)}; use {OPSET}")
    if written != max(opset, OPSET):
        raise ExportError(f"opset {opset} cannot be written: PyTorch's exporter stopped at {written}")


def _clean(proto: Any) -> None:
    """Leaves out what the exporter notes of Python for each node, and names the batch, which alone is free."""
    for graph in (proto.graph, *(a.g for n in _nodes(proto.graph) for a in n.attribute if a.HasField("g"))):
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del part.metadata_props[:]
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param.isidentifier():
                    dim.dim_param = "batch"
    del proto.graph.metadata_props[:], proto.metadata_props[:]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__


def to_pt2(exported: Exported, metadata: dict[str, Any]) -> tuple[bytes, Run]:
    """The content of a file for torch.export.load, and what runs it."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(exported.program(), buffer, extra_files={"metadata.json": json.dumps(metadata)})
    content = buffer.getvalue()
    return content, torch.export.load(io.BytesIO(content)).module()


def arguments_of(model: Any) -> dict[str, Any]:
    """Those that build a model of `vil.from_checkpoint`, or of this package's commands, for the sizes it has now."""
    sizes = {"img_size": input_size(model)[1:]} if hasattr(model, "set_input_size") else {}
    if patch_size := getattr(model, "_model_args", {}).get("patch_size"):  # timm's record of set_input_size
        sizes["patch_size"] = patch_size
    return {k: v for k, v in getattr(model, "model_args", {}).items() if k in MODEL_KWARGS} | sizes


def to_safetensors(model: Any, metadata: dict[str, Any]) -> tuple[bytes, Run]:
    """The content of a file of weights in half precision, and what runs the model that it says.

    Raises:
        ExportError: A weight is too large, or the model has no head or does not say how it was built.
    """
    if not model.num_classes:
        raise ExportError("weights keep their head: without it they are loaded by vil.from_checkpoint(num_classes=0)")
    weights = {name: t.half() if t.is_floating_point() else t for name, t in as_evaluated(model).state_dict().items()}
    if too_large := [name for name, t in weights.items() if not t.isfinite().all()]:
        raise ExportError(f"half precision cannot hold {', '.join(too_large[:3])}: values must be below 65504")
    built = arguments_of(model)
    options = {name: metadata[name] for name in ("model", "num_classes", "crop_pct", "interpolation")}
    height, width = metadata["input_size"][1:]
    options["img_size"] = height if height == width else [height, width]
    options["model_kwargs"] = {name: value for name, value in built.items() if name != "img_size"}
    content = checkpoint.pack_weights(weights, options, {name: _plain(value) for name, value in metadata.items()})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        path.write_bytes(content)
        try:
            loaded = from_checkpoint(path)
        except (ConfigError, checkpoint.CheckpointError) as error:
            raise ExportError(
                f"the model does not say with which arguments it was built, as those of vil.from_checkpoint do: {error}"
            ) from error
    return content, lambda images: outputs_of(loaded, (), images)
