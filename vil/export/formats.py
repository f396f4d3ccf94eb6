"""Serialization of exported models: ONNX, torch.export programs, and weights in half precision."""

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

from ..config import ConfigError
from ..data_config import input_size
from ..errors import CheckpointError
from ..factory import from_checkpoint
from ..security.checkpoint_options import MODEL_KWARGS
from ..weight_files import pack_weights
from .onnx_graph import onnx_model
from .traced import Exported, ExportError, as_evaluated, outputs_of

OPSET = 18  # the oldest opset that PyTorch's exporter writes; onnxruntime, TensorRT and OpenVINO read it

Run = Callable[[Tensor], Sequence[Tensor]]


def onnx_packages() -> tuple[Any, Any]:
    """Return the modules onnx and onnxruntime; raise an ExportError if a package for ONNX is missing."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  required by torch.onnx
    except ImportError as error:
        raise ExportError(
            f"an ONNX export needs more packages ({error}): pip install onnx onnxruntime onnxscript"
        ) from error
    return onnx, onnxruntime


def to_onnx(exported: Exported, metadata: dict[str, Any], opset: int) -> tuple[bytes, Run]:
    """Return the content of an ONNX file and a function that runs it in onnxruntime.

    Raises:
        ExportError: ONNX or onnxruntime does not support an operator; the message names the operator and the opset.
    """
    onnx, onnxruntime = onnx_packages()
    with _quiet():
        try:
            proto = onnx_model(exported, max(opset, OPSET))
        except torch.onnx.errors.OnnxExporterError as error:
            raise ExportError(f"PyTorch's exporter fails at opset {opset}: {_first_line(error)}") from error
    _check_operators(onnx, proto, opset)
    _clean(proto)
    proto.producer_name, proto.producer_version = "vision-longhorn", ""
    onnx.helper.set_model_props(proto, {name: _plain(value) for name, value in metadata.items()})
    content = proto.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base class
        version = onnxruntime.__version__
        raise ExportError(
            f"onnxruntime {version} cannot load the model at opset {opset}: {_first_line(error)}"
        ) from error
    return content, lambda images: [
        torch.from_numpy(y) for y in session.run(exported.outputs, {"images": images.numpy()})
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporters' warnings and log messages about their internals."""
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
    """Iterate over the nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _check_operators(onnx: Any, proto: Any, opset: int) -> None:
    """Raise an ExportError that names the operators that the opset does not support."""
    written = next(entry.version for entry in proto.opset_import if not entry.domain)
    names = {node.op_type for node in _nodes(proto.graph) if not node.domain}
    schemas = [onnx.defs.get_schema(n, *[written] * onnx.defs.has(n, written)) for n in names if onnx.defs.has(n)]
    versions = {schema.name: schema.since_version for schema in schemas}
    if newer := [f"{name} of opset {version}" for name, version in sorted(versions.items()) if version > opset]:
        raise ExportError(
            f"opset must be at least {OPSET} for this model, got {opset}: PyTorch's exporter uses {', '.join(newer)}"
        )
    if written != max(opset, OPSET):
        raise ExportError(f"opset must be at most {written}, PyTorch's newest, got {opset}")


def _clean(proto: Any) -> None:
    """Remove the Python metadata of each node and name the dynamic dimension "batch"."""
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
    """Return the content of a file for torch.export.load and a function that runs it."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(exported.program(), buffer, extra_files={"metadata.json": json.dumps(metadata)})
    content = buffer.getvalue()
    return content, torch.export.load(io.BytesIO(content)).module()


def arguments_of(model: Any) -> dict[str, Any]:
    """Return the arguments that build the model with its current image and patch size.

    Only models of `vil.from_checkpoint` or of this package's commands record their arguments.
    """
    sizes = {"img_size": input_size(model)[1:]} if hasattr(model, "set_input_size") else {}
    if patch_size := getattr(model, "_model_args", {}).get("patch_size"):  # set_input_size records the patch size here
        sizes["patch_size"] = patch_size
    return {k: v for k, v in getattr(model, "model_args", {}).items() if k in MODEL_KWARGS} | sizes


def to_safetensors(model: Any, metadata: dict[str, Any]) -> tuple[bytes, Run]:
    """Return the content of a file of weights in half precision and a function that runs the reloaded model.

    Raises:
        ExportError: A weight exceeds fp16, the model has no head, or the model does not record its arguments.
    """
    if not model.num_classes:
        raise ExportError(
            "num_classes must be positive for .safetensors files, got 0: export the model with its head and load it "
            "with vil.from_checkpoint(num_classes=0)"
        )
    weights = {name: t.half() if t.is_floating_point() else t for name, t in as_evaluated(model).state_dict().items()}
    if too_large := [name for name, t in weights.items() if not t.isfinite().all()]:
        raise ExportError(
            f"weights must be below 65504 in magnitude, the range of half precision, in {', '.join(too_large[:3])}"
        )
    built = arguments_of(model)
    options = {name: metadata[name] for name in ("model", "num_classes", "crop_pct", "interpolation")}
    height, width = metadata["input_size"][1:]
    options["img_size"] = height if height == width else [height, width]
    options["model_kwargs"] = {name: value for name, value in built.items() if name != "img_size"}
    content = pack_weights(weights, options, {name: _plain(value) for name, value in metadata.items()})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        path.write_bytes(content)
        try:
            loaded = from_checkpoint(path)
        except (ConfigError, CheckpointError) as error:
            raise ExportError(
                "the model must record the arguments that it was built with: create it with vil.from_checkpoint "
                f"({error})"
            ) from error
    return content, lambda images: outputs_of(loaded, (), images)
