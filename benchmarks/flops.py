"""Count parameters, FLOPs and activations of models for one image on the meta device, without computing anything.

    python benchmarks/flops.py [--models vil_tiny deit_tiny_patch16_224] [--img-size 224]

GFLOPs are counted by FlopCounterMode with the convention of vil/kernels/flops.py: 2 for a multiplication and its
addition. GMACs are half of the GFLOPs, as in timm's tables. One column counts 9 FLOPs for each element of a scan's
state, as VMamba and similar papers do. Activations are the output elements of matrix products, convolutions and scans.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from vil.factory import create_model
from vil.kernels import flops

FAMILIES = ("vil_{}", "vil_{}_pooled", "vim_{}", "deit_{}_patch16_224")
MODELS = [family.format(size) for size in ("tiny", "small", "base") for family in FAMILIES]
aten = torch.ops.aten
PRODUCTS = (
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten.convolution,
    torch.ops.vil.scan,
    torch.ops.vil.reference_scan,
)


class CountOutputs(TorchDispatchMode):
    """Dispatch mode that sums the number of output elements of matrix products, convolutions and scans."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        if function.overloadpacket in PRODUCTS:
            self.total += (returned[0] if isinstance(returned, (tuple, list)) else returned).numel()
        return returned


def measure(name: str, img_size: int) -> tuple[float, float, float, float]:
    """Return a model's parameters (millions), GFLOPs in two conventions, and activations (millions).

    The second number of GFLOPs counts 9 FLOPs for each element of a scan's state.
    """
    with torch.device("meta"):
        model, image = create_model(name, img_size=img_size).eval(), torch.empty(1, 3, img_size, img_size)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # FlopCounterMode then counts the matrix products of attention
    with torch.no_grad(), FlopCounterMode(display=False) as counter, CountOutputs() as outputs:
        model(image)
    total, by_operator = counter.get_total_flops(), counter.get_flop_counts()["Global"]
    scans = sum(count for operator, count in by_operator.items() if str(operator).startswith("vil."))
    field = total - scans + scans * flops.FIELD_CONVENTION // flops.FORWARD
    parameters = sum(p.numel() for p in model.parameters())
    return parameters / 1e6, total / 1e9, field / 1e9, outputs.total / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--img-size", type=int, default=224)
    options = parser.parse_args()
    columns = "parameters, M", "GFLOPs", "GMACs", "GFLOPs with 9 B L D N", "activations, M"
    print("| | " + " | ".join(columns) + " |" + "\n|" + " --- |" * (len(columns) + 1))
    for name in options.models:
        parameters, total, field, activations = measure(name, options.img_size)
        print(f"| {name} | {parameters:.2f} | {total:.2f} | {total / 2:.2f} | {field:.2f} | {activations:.1f} |")


if __name__ == "__main__":
    main()
