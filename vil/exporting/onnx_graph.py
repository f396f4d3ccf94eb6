"""ONNX graph of a model. Blocks that differ only in their weights are translated once, as one ONNX function."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ..models.block import Block
from .mixers import ClassTokenBlock
from .traced import Exported, is_known, program_of

# maximum number of elements of a folded constant; an ONNX file of at most 2 GiB contains no larger constant
MAX_FOLDED = 2**31
DOMAIN = "vil.block"  # ONNX domain of the block functions, which are inlined after translation


class Kind(NamedTuple):
    """Key that is equal for blocks that differ only in their weights."""

    modules: str
    pool: str | None
    grid: tuple[int, int] | None
    tokens: tuple[int, ...]  # shape (L, C) of the tokens of an image


class BlockFunction(NamedTuple):
    """ONNX function that all blocks with the same `Kind` share, with the weights as inputs.

    Attributes:
        name: Name of the ONNX function.
        block: One of the blocks with this `Kind`, from which the function is translated.
    """

    name: str
    block: Block


Functions = dict[Kind, BlockFunction]


def onnx_model(exported: Exported, opset: int) -> Any:
    """Return a model as an onnx.ModelProto with only standard ONNX operators."""
    functions: Functions = {}
    blocks: list[Any] = [module for module in exported.modules() if is_known(module)]
    for block in blocks:
        block.forward = functools.partial(call, functions, block)
    whole = translate(exported.program(), opset, ["images"], exported.outputs)
    for block in blocks:
        del block.forward

    for kind, (name, block) in functions.items():
        weights = list(block.state_dict().values())
        program = program_of(WithWeights(block, kind.grid), torch.zeros(2, *kind.tokens), weights)
        add_function(whole.model, name, translate(program, opset).model)
    inline_functions(whole.model)
    return whole.model_proto


def call(functions: Functions, block: Block, x_BLC: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """Run a block as a call of an ONNX function, which all blocks with the same structure share.

    If no function in `functions` has the block's structure, a new function is added.
    """
    kind = Kind(str(block), block.pool, grid, tuple(x_BLC.shape[1:]))
    if kind not in functions:
        functions[kind] = BlockFunction(f"Block{len(functions)}", block)
    name = functions[kind].name
    inputs = (x_BLC, *block.state_dict(keep_vars=True).values())
    shape = x_BLC[:, :1].shape if isinstance(block, ClassTokenBlock) else x_BLC.shape
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{name}", inputs, dtype=x_BLC.dtype, shape=shape, version=1)


class WithWeights(nn.Module):
    """Module that runs a block with weights that are inputs instead of parameters."""

    def __init__(self, block: Block, grid: tuple[int, int] | None):
        super().__init__()
        self.run = functools.partial(torch.func.functional_call, block, kwargs=dict(grid=grid))
        self.names = list(block.state_dict())

    def forward(self, x_BLC: Tensor, weights: list[Tensor]) -> Tensor:
        return self.run(dict(zip(self.names, weights)), (x_BLC,))


def translate(
    program: ExportedProgram, opset: int, inputs: list[str] | None = None, outputs: list[str] | None = None
) -> Any:  # fmt: skip
    """Translate a torch.export program to ONNX with PyTorch's exporter, and inline the functions of loop bodies."""
    from onnxscript import optimizer

    translated: Any = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=opset,
        verbose=False,
        optimize=False,
        input_names=inputs,
        output_names=outputs,
    )
    optimizer.inline(translated.model)
    return translated


def add_function(model: Any, name: str, body: Any) -> None:
    """Add the graph of the ONNX model `body` to `model` as a function."""
    from onnxscript import ir

    function = ir.Function(DOMAIN, name, graph=body.graph, attributes=())
    model.functions[function.identifier()] = function


def inline_functions(model: Any) -> None:
    """Optimize each function of an ONNX model once, then inline the functions, and fold and merge constants."""
    from onnxscript import ir, optimizer

    optimizer.optimize(model, inline=False)
    passes = ir.passes.common
    passes.InlinePass()(model)
    # onnxruntime quantizes only weights that are initializers, so fold operators on weights, such as transpositions
    optimizer.fold_constants(model, input_size_limit=MAX_FOLDED, output_size_limit=MAX_FOLDED)
    run_passes = ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.RemoveUnusedNodesPass(),
        passes.DeduplicateInitializersPass(),
        passes.RemoveUnusedOpsetsPass(),
    )
    run_passes(model)
