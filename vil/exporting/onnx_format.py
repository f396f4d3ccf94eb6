"""Serialization of a model in the ONNX format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .onnx_graph import onnx_model
from .serialized import Serialized, quiet_exporters, text_of
from .traced import Exported, ExportError

OPSET = 18  # oldest opset that PyTorch's exporter implements; supported by onnxruntime, TensorRT and OpenVINO
MAX_REASON = 400  # maximum length of a quoted error message, in characters


def onnx_packages() -> tuple[Any, Any]:
    """Return the modules onnx and onnxruntime; raise an ExportError if a package for ONNX is missing."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  required by torch.onnx
    except ImportError as error:
        raise ExportError(
            f"ONNX export needs additional packages ({error}): pip install onnx onnxruntime onnxscript"
        ) from error
    return onnx, onnxruntime


def to_onnx(exported: Exported, metadata: dict[str, Any], opset: int) -> Serialized:
    """Serialize a model as ONNX, with a function that runs the ONNX model in onnxruntime.

    Raises:
        ExportError: A package is missing, or PyTorch's exporter or onnxruntime does not support the model or opset.
    """
    onnx, onnxruntime = onnx_packages()
    with quiet_exporters():
        try:
            proto = onnx_model(exported, max(opset, OPSET))
        except torch.onnx.errors.OnnxExporterError as error:
            raise ExportError(f"PyTorch's exporter fails at opset {opset}: {_first_line(error)}") from error
    _check_operators(onnx, proto, opset)

    _clean(proto)
    proto.producer_name = "vision-longhorn"
    proto.producer_version = ""
    onnx.helper.set_model_props(proto, {name: text_of(value) for name, value in metadata.items()})
    content = proto.SerializeToString()

    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base class but Exception
        version = onnxruntime.__version__
        raise ExportError(
            f"onnxruntime {version} cannot load the model at opset {opset}: {_first_line(error)}"
        ) from error

    def run(images: Tensor) -> list[Tensor]:
        outputs = session.run(exported.outputs, {"images": images.numpy()})
        return [torch.from_numpy(output) for output in outputs]

    return Serialized(content, run)


def _check_operators(onnx: Any, proto: Any, opset: int) -> None:
    """Raise an ExportError if the opset does not support an operator of the model, or is too new for PyTorch."""
    written = next(entry.version for entry in proto.opset_import if not entry.domain)
    too_new = []
    nodes = (node for graph in _graphs(proto.graph) for node in graph.node)
    for name in sorted({node.op_type for node in nodes if not node.domain}):
        version = _version_of(onnx, name, written)
        if version is not None and version > opset:
            too_new.append((version, name))

    if too_new:
        newest, name = max(too_new)
        raise ExportError(
            f"opset must be at least {OPSET} for this model, got {opset}: PyTorch's exporter uses operators of opset "
            f"{newest}, such as {name}"
        )
    if written != max(opset, OPSET):
        raise ExportError(
            f"opset {opset} is not supported by this PyTorch version, which wrote opset {written} instead: "
            "set a lower opset"
        )


def _version_of(onnx: Any, name: str, opset: int) -> int | None:
    """Return the opset that introduced the version of an ONNX operator that `opset` contains.

    If the operator is newer than `opset`, return the opset of its newest version. Return None for an unknown operator.
    """
    if not onnx.defs.has(name):
        return None
    if onnx.defs.has(name, opset):
        return onnx.defs.get_schema(name, opset).since_version
    return onnx.defs.get_schema(name).since_version


def _clean(proto: Any) -> None:
    """Remove the metadata of PyTorch's exporter and the shapes of weights, and name the dynamic dimension "batch".

    The shapes of weights, which PyTorch 2.10 writes, are removed because onnxruntime's `quantize_dynamic` transposes
    weights without updating their shapes.
    """
    for graph in _graphs(proto.graph):
        weights = {weight.name for weight in graph.initializer}
        others = [value for value in graph.value_info if value.name not in weights]
        del graph.value_info[:]
        graph.value_info.extend(others)
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del part.metadata_props[:]
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param.isidentifier():
                    dim.dim_param = "batch"
    del proto.graph.metadata_props[:]
    del proto.metadata_props[:]


def _graphs(graph: Any) -> Iterator[Any]:
    """Iterate over a graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:MAX_REASON] if lines else type(error).__name__
