"""ONNX graph of a model that exports each kind of block only once, because blocks differ only in their weights."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..models.block import KNOWN_MIXERS, Block
from .traced import Exported, program_of

DOMAIN = "vil.block"  # domain of the block functions, which are inlined at the end


class Kind(NamedTuple):
    """Key of blocks that differ only in their weights."""

    modules: str
    pool: str | None
    grid: tuple[int, int] | None
    tokens: tuple[int, ...]  # (L, C)


def onnx_model(exported: Exported, opset: int) -> Any:
    """Return the onnx.ModelProto of the model, with only standard operators."""
    from onnxscript import ir, optimizer

    kinds: dict[Kind, tuple[str, Block]] = {}
    blocks: list[Any] = [module for module in exported.modules() if is_known(module)]
    for block in blocks:
        block.forward = functools.partial(call, kinds, block)
    whole = translated(exported.program(), opset, ["images"], exported.outputs)
    for block in blocks:
        del block.forward
    for kind, (name, block) in kinds.items():
        weights = list(block.state_dict().values())
        program = program_of(WithWeights(block, kind.grid), torch.zeros(2, *kind.tokens), weights)
        add_function(whole.model, name, translated(program, opset).model)
    optimizer.optimize(whole.model, inline=False)  # optimize each kind once, before inlining
    passes = ir.passes.common
    tidy = passes.LiftConstantsToInitializersPass(True, 0), passes.DeduplicateInitializersPass()
    ir.passes.Sequential(passes.InlinePass(), *tidy, passes.RemoveUnusedOpsetsPass())(whole.model)
    return whole.model_proto


def is_known(module: nn.Module) -> bool:
    return type(module) is Block and type(module.mixer) in KNOWN_MIXERS


def call(
    kinds: dict[Kind, tuple[str, Block]], block: Block, x_BLC: Tensor, grid: tuple[int, int] | None = None
) -> Tensor:
    """Replace a block's forward by a call of its kind's ONNX function, and register the kind in `kinds`."""
    kind = Kind(str(block), block.pool, grid, tuple(x_BLC.shape[1:]))
    name, _ = kinds.setdefault(kind, (f"Block{len(kinds)}", block))
    inputs = x_BLC, *block.state_dict(keep_vars=True).values()
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{name}", inputs, dtype=x_BLC.dtype, shape=x_BLC.shape, version=1)


class WithWeights(nn.Module):
    """Block with its weights as inputs."""

    def __init__(self, block: Block, grid: tuple[int, int] | None):
        super().__init__()
        self.run = functools.partial(torch.func.functional_call, block, kwargs=dict(grid=grid))
        self.names = list(block.state_dict())

    def forward(self, x_BLC: Tensor, weights: list[Tensor]) -> Tensor:
        return self.run(dict(zip(self.names, weights)), (x_BLC,))


def translated(
    program: ExportedProgram, opset: int, inputs: list[str] | None = None, outputs: list[str] | None = None
) -> Any:  # fmt: skip
    """Export with PyTorch's exporter and inline the functions that the exporter creates for loop bodies."""
    from onnxscript import optimizer

    found: Any = torch.onnx.export(
        program, (), dynamo=True, opset_version=opset, verbose=False, optimize=False, input_names=inputs,
        output_names=outputs,
    )  # fmt: skip
    optimizer.inline(found.model)
    return found


def add_function(model: Any, name: str, body: Any) -> None:
    """Add a model's graph to another model as a function."""
    from onnxscript import ir

    function = ir.Function(DOMAIN, name, graph=body.graph, attributes=())
    model.functions[function.identifier()] = function
