"""A model in a file that runs without this package: ONNX, or PyTorch's own exported program. Or weights to hand on.

    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.onnx
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.pt2
    python -m vil.export --model vil_tiny --checkpoint output/vil_tiny/best.pt --out vil_tiny.safetensors

The ending says the format; a .safetensors file has weights alone, in half precision, and says of which model they are:
`vil.from_checkpoint` needs nothing else. The input is `images` (B, 3, H, W), fp32, prepared as the file's metadata say;
the outputs are `logits` (B, classes) and, for each block N asked for, `features_N` (B, C, h, w). B is free, H and W are
the model's. What is in the file is compared with the model before it is written. docs/export.md says what reads it.

    G = 2 directions    B batch    L tokens    C model width    D inner width    N states of a channel
"""

from __future__ import annotations

import argparse
import copy
import functools
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan_op
from torch.export import Dim, ExportedProgram

from . import checkpoint
from .block import BidirectionalMixer
from .config import MODEL_KWARGS, ConfigError, parse_key_values
from .factory import create_model, from_checkpoint
from .files import write_atomically

OPSET = 18  # the oldest that PyTorch's exporter writes; onnxruntime, TensorRT and OpenVINO have long read it
RUNTIMES = ("any", "onnxruntime")
TOLERANCE = 1e-4  # of an output's largest magnitude, or absolute where that is below 1
TOLERANCE_OF_HALVES = 2e-2  # the same for weights in half precision
PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation")


class ExportError(RuntimeError):
    """A model cannot be exported as asked for. Nothing was written."""


@dataclass
class Report:
    """What was written, and how far it is from the model.

    Attributes:
        path: The file.
        size: Its bytes.
        difference: The largest between an output and the model's own, on noise and on smooth pictures.
        images: How many pictures these were.
        same_top1: For how many of them the largest logit is the model's.
    """

    path: Path
    size: int
    difference: float
    images: int
    same_top1: int

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.size / 1e6:.1f} MB; the largest difference from PyTorch is {self.difference:.1e}, "
            f"top-1 is the same on {self.same_top1} of {self.images} images"
        )


def export_model(
    model: nn.Module,
    path: str | Path,
    *,
    features: Sequence[int] = (),
    runtime: str = "any",
    opset: int = OPSET,
    metadata: dict[str, str] | None = None,
    **preprocessing: Any,
) -> Report:
    """Writes a model to a file that runs without this package, once what is in it has been compared with the model.

    Args:
        model: A model of timm, which is left as it is; exported in fp32, as in evaluation.
        path: The file, *.onnx or *.pt2, or *.safetensors for weights in half precision; written whole or not at all.
        features: Numbers of blocks whose maps are outputs too.
        runtime: What an ONNX file is for: "any", of ONNX's own operators alone, or "onnxruntime", whose operator
            `com.microsoft.LinearAttention` then runs the recurrence.
        opset: Version of ONNX's operators.
        metadata: What the file is to say of itself, beside the model and its preprocessing.
        **preprocessing: mean, std, crop_pct, crop_mode and interpolation for the metadata, where they are not timm's
            for this model.

    Raises:
        ExportError: A package is missing, the format or runtime cannot have what was asked for, or what is in the file
            computes something else.
    """
    path = Path(path)
    _check_options(path, runtime, opset, features)
    exported = Exported(model, features, scan_by_steps if runtime == "any" else scan_by_linear_attention)
    described = describe(model, preprocessing)
    if taken := {*described, "label_names"} & (metadata or {}).keys():
        raise ExportError(f"{', '.join(sorted(taken))} in the metadata is for the model itself to say (pretrained_cfg)")
    described |= metadata or {}
    tolerance = TOLERANCE
    if path.suffix == ".safetensors":
        content, run = to_safetensors(model, described)
        tolerance = TOLERANCE_OF_HALVES
    elif path.suffix == ".onnx":
        content, run = to_onnx(exported.program(), exported.outputs, described, opset)
    else:
        content, run = to_pt2(exported.program(), described)
    found = compare(model, exported, run, tolerance)
    write_atomically(path, content)
    return Report(path, len(content), *found)


def _check_options(path: Path, runtime: str, opset: int, features: Sequence[int] = ()) -> None:
    if path.suffix not in (".onnx", ".pt2", ".safetensors"):
        raise ExportError(
            f"{path} must end with .onnx for ONNX, .pt2 for PyTorch's exported program, or .safetensors for weights"
        )
    if runtime not in RUNTIMES:
        raise ExportError(f"runtime {runtime!r} is none of {', '.join(RUNTIMES)}")
    if path.suffix != ".onnx" and (runtime, opset) != ("any", OPSET):
        raise ExportError(f"runtime and opset are of ONNX files, and {path} is none")
    if path.suffix == ".safetensors" and features:
        raise ExportError(f"{path} has weights, not outputs: features are of .onnx and .pt2 files")
    if not path.parent.is_dir():
        raise ExportError(f"there is no folder {path.parent}")
    if path.suffix == ".onnx":
        _packages()


def _packages() -> tuple[Any, Any]:
    """onnx and onnxruntime, with onnxscript there too."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  of which torch.onnx is made
    except ImportError as error:
        raise ExportError(f"{error}: pip install 'vision-longhorn[export]' has what an export to ONNX needs") from error
    return onnx, onnxruntime


class Exported(nn.Module):
    """A copy of a model as it is exported: fp32, on the CPU, in evaluation, its mixers as `mix` has them.

    Args:
        model: A model of timm.
        features: Numbers of blocks whose maps are outputs too.
        recurrence: `scan_by_steps` or another function of its arguments.

    Raises:
        ExportError: The model has no such features.
    """

    def __init__(self, model: nn.Module, features: Sequence[int] = (), recurrence: Callable | None = None):
        super().__init__()
        self.model = as_evaluated(model)
        self.features = sorted(set(features))
        self.image_size = image_size(model)
        known = range(len(getattr(self.model, "feature_info", ())))
        if unknown := [number for number in self.features if number not in known]:
            raise ExportError(f"features {unknown} are not of the model's blocks 0 to {len(known) - 1}")
        self.outputs = ["logits" if model.num_classes else "embedding", *(f"features_{n}" for n in self.features)]
        mixers: list[Any] = [module for module in self.model.modules() if isinstance(module, BidirectionalMixer)]
        for mixer in mixers:
            mixer.directions[1].conv1d.reverse = False  # it is given the tokens in the order in which it reads
            mixer.forward = functools.partial(mix, recurrence or scan_by_steps, mixer)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return outputs_of(self.model, self.features, images)

    @torch.no_grad()
    def program(self) -> ExportedProgram:
        """The graph of its operators for any number of images."""
        images = pictures(2, self.image_size)  # PyTorch takes a batch of 1 for what it can never be more than
        program = torch.export.export(self, (images,), dynamic_shapes=({0: Dim("batch")},), strict=False)
        for module in program.graph_module.modules():
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # which would tell where the files of this machine are
                if str(node.target).startswith("vil."):
                    raise ExportError(f"the graph has the operator {node.target}, which only this package knows")
        return program


def as_evaluated(model: nn.Module) -> Any:
    """A copy of it in fp32, on the CPU, in evaluation."""
    return copy.deepcopy(model).cpu().float().eval().requires_grad_(False)


def outputs_of(model: Any, features: Sequence[int], images: Tensor) -> tuple[Tensor, ...]:
    """Logits and the maps of the blocks of these numbers."""
    if not features:
        return (model(images),)
    tokens, maps = model.forward_intermediates(images, indices=list(features))
    return model.forward_head(tokens), *maps


def image_size(model: nn.Module) -> tuple[int, int]:
    """The height and width that the model was built for, which timm's configuration does not always know."""
    own = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return tuple(own or resolve_model_data_config(model)["input_size"][1:])


def describe(model: Any, preprocessing: dict[str, Any]) -> dict[str, Any]:
    """The metadata of an exported model: what it is, and what is done to a picture before it."""
    if unknown := preprocessing.keys() - set(PREPROCESSING):
        raise ExportError(f"{', '.join(sorted(unknown))} is none of {', '.join(PREPROCESSING)}")
    config = resolve_model_data_config(model) | {name: v for name, v in preprocessing.items() if v is not None}
    names = model.pretrained_cfg.get("label_names")  # of a head that has been replaced, perhaps
    known = isinstance(names, (list, tuple)) and 0 < len(names) == model.num_classes
    return {
        "model": model.pretrained_cfg.get("architecture", type(model).__name__),
        "num_classes": model.num_classes,
        "input_size": [model.in_chans if hasattr(model, "in_chans") else 3, *image_size(model)],
        **{name: config[name] for name in PREPROCESSING},
        **({"label_names": [checkpoint.label_of(str(name)) for name in names]} if known else {}),
    }


def pictures(count: int, size: tuple[int, int]) -> Tensor:
    """Normalised images (count, 3, H, W): noise, and between them smooth ones, as photographs mostly are."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, 3, *size, generator=generator)
    coarse = torch.randn(count, 3, 5, 5, generator=generator)
    noise[1::2] = F.interpolate(coarse, size, mode="bicubic", align_corners=False)[1::2]
    return noise


def mix(recurrence: Callable[..., Tensor], mixer: BidirectionalMixer, h_BLC: Tensor) -> Tensor:
    """A mixer's forward with tokens first around the scan: fewer copies where each transposition and flip is one."""
    u_BLD, z_BLD = mixer.in_proj(h_BLC).chunk(2, dim=-1)
    directions: Any = mixer.directions
    reads = zip(directions[0](u_BLD), directions[1](u_BLD.flip(1)))
    x_LGBD, logits_LGBD, k_LGBN, q_LGBN = (torch.stack(pair, dim=2).permute(1, 2, 0, 3) for pair in reads)
    bias_G1D = mixer.step_bias().unsqueeze(1)
    if mixer.recurrence == "longhorn":
        norm_LGB1 = k_LGBN.square().sum(-1, keepdim=True)
        step_LGBD, A_GND = torch.reciprocal(torch.exp(-bias_G1D - logits_LGBD) + (1 + norm_LGB1)), None
    else:
        step_LGBD = F.softplus(logits_LGBD + bias_G1D)
        A_GND = -torch.stack([direction.A_log for direction in directions]).exp().mT.contiguous()
    y_LGBD = recurrence(x_LGBD, step_LGBD, k_LGBN, q_LGBN, A_GND) + mixer.skip().unsqueeze(1) * x_LGBD
    forward_BLD, backward_BLD = y_LGBD.permute(2, 0, 1, 3).unbind(2)
    return mixer.out_proj((forward_BLD + backward_BLD.flip(1)) / 2 * F.silu(z_BLD))


def scan_by_steps(
    x_LGBD: Tensor, step_LGBD: Tensor, k_LGBN: Tensor, q_LGBN: Tensor, A_GND: Tensor | None
) -> Tensor:  # fmt: skip
    """y_LGBD of the recurrence by PyTorch's operator for loops, which is `Scan` in ONNX.

    Args:
        x_LGBD: What is read, each direction's tokens in the order in which it reads them.
        step_LGBD: Longhorn's step size or Mamba's time step.
        k_LGBN: Keys.
        q_LGBN: Queries.
        A_GND: Rates of Mamba's states; None for Longhorn.
    """

    S_GBND = x_LGBD.new_zeros(*x_LGBD.shape[1:3], k_LGBN.shape[-1], x_LGBD.shape[-1])
    if A_GND is None:
        step, drive_LGBD, rates = _longhorn_step, x_LGBD, []
    else:
        step, drive_LGBD, rates = _selective_step, step_LGBD * x_LGBD, [A_GND.unsqueeze(1)]
    tokens = drive_LGBD.unsqueeze(-2), step_LGBD.unsqueeze(-2), k_LGBN.unsqueeze(-1), q_LGBN.unsqueeze(-2)
    # the operator itself: `scan` around it compiles it, with what compilations before have left behind
    return scan_op(step, [S_GBND], list(tokens), tuple(rates))[1].squeeze(-2)


def _longhorn_step(S_GBND, x_GB1D, step_GB1D, k_GBN1, q_GB1N, *_):
    S_GBND = S_GBND + k_GBN1 * step_GB1D * (x_GB1D - k_GBN1 * S_GBND)
    return [S_GBND, q_GB1N @ S_GBND]


def _selective_step(S_GBND, drive_GB1D, step_GB1D, k_GBN1, q_GB1N, A_G1ND):
    S_GBND = torch.exp(A_G1ND * step_GB1D) * S_GBND + k_GBN1 * drive_GB1D
    return [S_GBND, q_GB1N @ S_GBND]


def scan_by_linear_attention(
    x_LGBD: Tensor, step_LGBD: Tensor, k_LGBN: Tensor, q_LGBN: Tensor, A_GND: Tensor | None
) -> Tensor:  # fmt: skip
    """The same by onnxruntime's operator: S = exp(decay) S + key value and y = query S, with a head for each channel.

    Images and directions are its batch. Its heads share the query.
    """
    (L, G, B, D), N = x_LGBD.shape, k_LGBN.shape[-1]
    x_GBLD, step_GBLD1, k_GBL1N, q_GBLN = (
        x_LGBD.permute(1, 2, 0, 3), step_LGBD.permute(1, 2, 0, 3).unsqueeze(-1),
        k_LGBN.permute(1, 2, 0, 3).unsqueeze(-2), q_LGBN.permute(1, 2, 0, 3),
    )  # fmt: skip
    key_GBLDN = k_GBL1N * step_GBLD1
    if A_GND is None:
        decay_GBLDN = torch.log((1 - key_GBLDN * k_GBL1N).clamp(min=torch.finfo(x_LGBD.dtype).tiny))
    else:
        decay_GBLDN = A_GND.mT[:, None, None] * step_GBLD1
    inputs = q_GBLN.flatten(0, 1), key_GBLDN.flatten(3).flatten(0, 1), x_GBLD.flatten(0, 1), None
    attributes: dict[str, Any] = dict(q_num_heads=1, kv_num_heads=D, scale=1.0, update_rule="gated")
    y_XLD, _ = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention", (*inputs, decay_GBLDN.flatten(3).flatten(0, 1)), attributes,
        dtypes=(x_LGBD.dtype, x_LGBD.dtype), shapes=((G * B, L, D), (G * B, D, N, 1)), version=1,
    )  # fmt: skip
    return y_XLD.unflatten(0, (G, B)).permute(2, 0, 1, 3)


Run = Callable[[Tensor], Sequence[Tensor]]


def to_onnx(
    program: ExportedProgram, outputs: list[str], metadata: dict[str, Any], opset: int
) -> tuple[bytes, Run]:  # fmt: skip
    """An ONNX file's content, and what runs it in onnxruntime.

    Raises:
        ExportError: ONNX or onnxruntime has no such operator; the message names it and the opset.
    """
    onnx, onnxruntime = _packages()
    with _quiet():
        try:
            exported: Any = torch.onnx.export(
                program, (), dynamo=True, opset_version=max(opset, OPSET), input_names=["images"],
                output_names=outputs, verbose=False,
            )  # fmt: skip
        except torch.onnx.errors.OnnxExporterError as error:
            raise ExportError(f"at opset {opset} PyTorch's exporter fails: {_first_line(error)}") from error
    proto = exported.model_proto
    _check_operators(onnx, proto, opset)
    _clean(proto)
    proto.producer_name, proto.producer_version = "vision-longhorn", ""
    onnx.helper.set_model_props(proto, {name: _plain(value) for name, value in metadata.items()})
    content = proto.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common type
        others = sorted({f"{node.domain}.{node.op_type}" for node in _nodes(proto.graph) if node.domain})
        raise ExportError(
            f"onnxruntime {onnxruntime.__version__} cannot read this at opset {opset}"
            + (f", with the operators {', '.join(others)} beside ONNX's" if others else "")
            + f": {_first_line(error)}"
        ) from error
    return content, lambda images: [torch.from_numpy(y) for y in session.run(outputs, {"images": images.numpy()})]


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
    """Of a graph, and of the graphs inside of it."""
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
    """Leaves out what the exporter notes of Python for each node, and gives the batch its name."""
    batch = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for graph in (proto.graph, *(a.g for n in _nodes(proto.graph) for a in n.attribute if a.HasField("g"))):
        for part in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del part.metadata_props[:]
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == batch:
                    dim.dim_param = "batch"
    del proto.graph.metadata_props[:], proto.metadata_props[:]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__


def to_pt2(program: ExportedProgram, metadata: dict[str, Any]) -> tuple[bytes, Run]:
    """The content of a file for torch.export.load, and what runs it."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(program, buffer, extra_files={"metadata.json": json.dumps(metadata)})
    content = buffer.getvalue()
    return content, torch.export.load(io.BytesIO(content)).module()


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
    built = {k: v for k, v in model.pretrained_cfg.get("model_args", {}).items() if k in MODEL_KWARGS}
    options = {name: metadata[name] for name in ("model", "num_classes", "crop_pct", "interpolation")}
    if isinstance(built.get("img_size"), int):  # of two numbers it is no option of a run
        options["img_size"] = built.pop("img_size")
    options["model_kwargs"] = built
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


@torch.no_grad()
def compare(
    model: nn.Module, exported: Exported, run: Run, tolerance: float = TOLERANCE, count: int = 4
) -> tuple[float, int, int]:
    """The largest difference of an output, the number of images, and of those with the same largest logit.

    Raises:
        ExportError: An output differs by more than `tolerance`.
    """
    images = pictures(count, exported.image_size)
    expected = outputs_of(as_evaluated(model), exported.features, images)
    found = [torch.cat(parts) for parts in zip(run(images[:-1]), run(images[-1:]))]  # of two numbers of images
    largest = 0.0
    for name, truth, value in zip(exported.outputs, expected, found, strict=True):
        difference = (truth - value).abs().max().item()
        if not difference <= tolerance * max(1, truth.abs().max().item()):  # also if it is not a number
            raise ExportError(f"{name} differs from the model's by {difference:.1e}, more than rounding can")
        largest = max(largest, difference)
    return largest, count, int((expected[0].argmax(-1) == found[0].argmax(-1)).reshape(count, -1).all(1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="timm model; the checkpoint's if it says")
    parser.add_argument("--model-kwargs", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the model")
    parser.add_argument("--checkpoint", help="weights; random ones if not given")
    parser.add_argument("--use-ema", action=argparse.BooleanOptionalAction, help="the moving average of the weights")
    parser.add_argument("--img-size", type=int, help="image size")
    parser.add_argument("--num-classes", type=int, help="classes of the model; 0 for pooled features in their place")
    parser.add_argument("--features", nargs="+", type=int, default=[], metavar="BLOCK", help="maps of these blocks too")
    parser.add_argument("--runtime", choices=RUNTIMES, default="any", help="onnxruntime: use its LinearAttention")
    parser.add_argument("--opset", type=int, default=OPSET, help=f"of ONNX's operators (default: {OPSET})")
    parser.add_argument(
        "--metadata", nargs="+", type=_key_and_text, default=[], metavar="KEY=TEXT",
        help="what else the file is to say of itself",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="*.onnx, *.pt2 or *.safetensors")
    options = parser.parse_args()
    try:
        _check_options(options.out, options.runtime, options.opset, options.features)
        arguments = dict(features=options.features, runtime=options.runtime, opset=options.opset)
        arguments["metadata"] = dict(options.metadata)
        report = export_model(_model_of(options), options.out, **arguments)
        trained = options.checkpoint or parse_key_values(options.model_kwargs).get("pretrained")  # timm's own weights
        print(report if trained else f"{report}; of random weights, as no --checkpoint was given")
    except (ConfigError, checkpoint.CheckpointError, ExportError, OSError) as error:
        sys.exit(f"error: {error}")


def _key_and_text(word: str) -> tuple[str, str]:
    key, sign, text = word.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{word!r} is not of the form KEY=TEXT")
    return key, text


def _model_of(options: argparse.Namespace) -> nn.Module:
    chosen = {name: getattr(options, name) for name in ("num_classes", "img_size")}
    arguments = {name: value for name, value in chosen.items() if value is not None}
    arguments |= parse_key_values(options.model_kwargs)
    if options.checkpoint:
        return from_checkpoint(options.checkpoint, options.model, use_ema=options.use_ema, **arguments)
    if not options.model:
        raise ConfigError("neither --model nor --checkpoint is given")
    return create_model(options.model, **arguments)


if __name__ == "__main__":
    main()
