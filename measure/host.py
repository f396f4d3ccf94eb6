"""Median host time in microseconds per block of fused blocks of vil_tiny_pooled, in eager mode on one GPU.

    PYTHONPATH=<tree> python host.py [label]

Run the script with PYTHONPATH set to the old and to the new tree alternately. All cases run with bf16 autocast. The GPU
is idle before each timed step, so the time until the call returns is the host time. The cases:

    one block        one block called as `block(x, grid=grid)`, which is the path of a single block in a model
    24 with hooks    all blocks of a model with a forward hook on each block, so that each block runs as a single block
    24 in runs       all blocks of a model without hooks, which run in groups of six blocks
"""

import statistics
import sys
import time

import timm
import torch

import vil

START, LIMIT = time.perf_counter(), 9  # seconds for all cases together


def measure(step, params, dy, seconds):
    """Return median microseconds of the forward and the backward pass."""
    forward, backward = [], []
    for i in range(100000):
        if i == 30:  # plans and CUDA graphs are recorded
            forward.clear(), backward.clear()
            start = time.perf_counter()
        if i > 60 and time.perf_counter() - start > seconds:
            break
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            y = step()
        t1 = time.perf_counter()
        if params is not None:
            gradients = torch.autograd.grad(y, params, dy)
            t2 = time.perf_counter()
            backward.append(1e6 * (t2 - t1))
            del gradients
        forward.append(1e6 * (t1 - t0))
        del y
    return statistics.median(forward), statistics.median(backward) if backward else 0.0, len(forward)


def main():
    label = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"# {label} {vil.__file__} torch {torch.__version__} {torch.cuda.get_device_name()}")
    torch.manual_seed(0)
    model = timm.create_model("vil_tiny_pooled", drop_path_rate=0.0).cuda().train()
    blocks, grid, C = model.blocks, (14, 14), model.embed_dim
    assert type(blocks).__name__ == "Blocks", type(blocks)
    cases = []
    for batch in (1, 64):
        x = torch.randn(batch, 197, C, device="cuda", requires_grad=True)
        dy = torch.randn_like(x)
        cases += [
            (f"one block, batch {batch}", 1, False, lambda x=x: blocks[0](x, grid=grid), [x, *blocks[0].parameters()], dy),
            (f"24 with hooks, batch {batch}", 24, True, lambda x=x: blocks(x, grid=grid), [x, *blocks.parameters()], dy),
            (f"24 in runs, batch {batch}", 24, False, lambda x=x: blocks(x, grid=grid), [x, *blocks.parameters()], dy),
        ]
    x = torch.randn(1, 197, C, device="cuda")
    cases.append(("one block, no gradients", 1, False, lambda: blocks[0](x, grid=grid), None, None))
    cases.append(("24 with hooks, no gradients", 24, True, lambda: blocks(x, grid=grid), None, None))
    for name, count, hooks, step, params, dy in cases:
        handles = [block.register_forward_hook(lambda *_: None) for block in blocks] if hooks else []
        with torch.set_grad_enabled(params is not None):
            left = LIMIT - (time.perf_counter() - START)
            forward, backward, steps = measure(step, params, dy, max(0.5, min(2.5, left / len(cases))))
        for handle in handles:
            handle.remove()
        print(
            f"{label:6} {name:28} forward {forward / count:8.2f}  backward {backward / count:8.2f}"
            f"  sum {(forward + backward) / count:8.2f} us per block  ({steps} steps)",
            flush=True,
        )
    print(f"# {time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
