"""Run kernels on small inputs under NVIDIA's compute-sanitizer to find errors that do not change the results.

The program runs every kernel. Kernels for Hopper GPUs run only on a Hopper GPU.

    export PYTHONPATH=tests/helpers PYTORCH_NO_CUDA_MEMORY_CACHING=1  # so that the sanitizer sees each tensor's memory
    compute-sanitizer --report-api-errors no --tool memcheck python3 tools/sanitize.py  # racecheck, initcheck

On an H200, initcheck falsely reports that 16-bit results of cuBLAS are uninitialized, also in PyTorch's own kernels
that read the result of `torch.mm`. Therefore this program computes the matrix products of blocks in fp32.
"""

import math
from unittest import mock

import numpy as np
import torch
from scans import in_order, of_both_directions

from vil.data.device.batched_transforms import apply_operations, crop_resize_flip, finish
from vil.data.device.decoded import DecodedImages
from vil.kernels import longhorn_scan, selective_scan
from vil.kernels.augment import OPERATIONS
from vil.kernels.block import scan_image, scan_lines_bwd
from vil.kernels.cuda import hardware
from vil.kernels.scan import cuda_scan as scan
from vil.kernels.scan import heuristics as variants
from vil.kernels.scan import triton_scan
from vil.models.block import Block, Blocks, LonghornMixer, MambaMixer
from vil.models.vision_longhorn import VisionLonghorn

B, L, D, N = 1, 70, 35, 16  # L is longer than a chunk, and D channels do not support vector loads
REVERSE = [False, True]


def main() -> None:
    for run in (cuda_scan, triton_scans, block):
        for recurrence in ("longhorn", "selective"):
            for dtype in (torch.bfloat16, torch.float32):
                run(recurrence, dtype)
                torch.cuda.synchronize()
                print(run.__name__, recurrence, dtype, flush=True)
    embedding()
    torch.cuda.synchronize()
    print("embedding", flush=True)
    for interpolation in ("bilinear", "bicubic"):
        augmentation(interpolation)
        torch.cuda.synchronize()
        print("augmentation", interpolation, flush=True)


def cuda_scan(recurrence: str, dtype: torch.dtype) -> None:
    for channels in (D, 40):  # 35 channels do not support vector loads, and 40 channels do
        tensors = in_order(recurrence, of_both_directions(recurrence, (B, L, channels, N), dtype, "cuda")[1])
        for segment_chunks in (2, 1):  # the two chunks of the sequence form one segment or two segments
            for variant in variants.forward_variants(recurrence, N, dtype.itemsize, channels % 8 == 0):
                schedule = variants.Schedule(variant, segment_chunks)
                _, states = scan.scan_forward(recurrence, *tensors, REVERSE, True, schedule)
                if schedule.projects_step(L, 8):
                    x, logits, *others = tensors
                    step_proj = torch.randn(2, channels, 8, device="cuda", dtype=dtype)
                    scan.scan_forward(recurrence, x, logits[..., :8], *others, REVERSE, True, schedule, step_proj)
            for variant in variants.BACKWARD[recurrence]:
                scan.scan_backward(
                    recurrence, tensors[0], *tensors, states, REVERSE, variants.Schedule(variant, segment_chunks)
                )


def triton_scans(recurrence: str, dtype: torch.dtype) -> None:
    operator = {"longhorn": longhorn_scan, "selective": selective_scan}[recurrence]
    for segment_chunks, segments in ((2, 1), (1, 2)):
        for channels in (16, 64):  # channels per thread block
            with mock.patch.object(triton_scan, "_schedule", return_value=(segment_chunks, segments, channels)):
                tensors = [t.requires_grad_() for t in of_both_directions(recurrence, (B, L, D, N), dtype, "cuda")[1]]
                operator(*tensors, reverse=REVERSE, backend="triton").sum().backward()


def block(recurrence: str, dtype: torch.dtype) -> None:
    mixer = {"longhorn": LonghornMixer, "selective": MambaMixer}[recurrence]
    # Together, the block widths, numbers of multiprocessors and grids select every kernel of a block.
    is_hopper = hardware.is_hopper(torch.device("cuda", 0))
    for width, multiprocessors, on_hopper in (
        (16, 1, False), (18, 1, False), (64, 1, False), (192, 1, is_hopper), (192, 1, False), (192, 64, False)
    ):  # fmt: skip
        x = torch.randn(2, L, width, device="cuda", requires_grad=True)
        with (
            torch.autocast("cuda", dtype, enabled=dtype != torch.float32),
            mock.patch.multiple(torch, mm=in_fp32(torch.mm), bmm=in_fp32(torch.bmm)),
            mock.patch("vil.kernels.block.gate_outproj.add_product", lambda x, a, b: x.add_(torch.mm(a, b))),
            mock.patch.object(hardware, "multiprocessors", return_value=multiprocessors),
            mock.patch.object(hardware, "is_hopper", return_value=on_hopper),
        ):
            for middle in (False, True):
                blocks = Blocks(*[Block(width, mixer, drop_path=0.5).cuda().train() for _ in range(2)])
                blocks(x, class_token_only=middle).sum().backward()
            if width >= 64:
                pooled = Block(width, mixer, drop_path=0.5, pool="rows").cuda().train()
                for grid in ((7, 9), (11, 12)):  # in_proj_pool_sm90 needs at least 129 tokens
                    x = torch.randn(2, math.prod(grid) + 1, width, device="cuda", requires_grad=True)
                    # The numbers of images differ, because a plan is cached by tensor shapes and not by `slices`.
                    for images, slices in ((2, 1), (1, 2)):
                        with (
                            mock.patch.object(scan_image, "slices_of", return_value=slices),
                            mock.patch.object(scan_lines_bwd, "slices_of", return_value=slices),
                        ):
                            pooled(x[:images], grid=grid).sum().backward()
                            with torch.no_grad():
                                pooled(x[:images], grid=grid)


def embedding() -> None:
    """Embed images in each pixel dtype, with several partial sums over images and an odd number of images."""
    for patch_size, pixel in ((16, torch.float32), (4, torch.bfloat16), (8, torch.float16)):
        height, width = 3 * patch_size, 5 * patch_size
        model = VisionLonghorn((height, width), patch_size, embed_dim=36, depth=0, num_classes=0).cuda()
        images = torch.randn(9, 3, height, width, device="cuda", dtype=pixel)
        with (
            torch.autocast("cuda", torch.bfloat16),
            mock.patch.object(torch, "mm", in_fp32(torch.mm)),
        ):
            model.embed(images).sum().backward()
            with torch.no_grad():
                model.embed(images)


def augmentation(interpolation: str) -> None:
    """Run every augmentation as the first and as the second operation, on sizes that are no multiple of a block."""
    count, size = len(OPERATIONS), (37, 261)
    images = [torch.randint(0, 256, (3, 9 * i + 1, 61 - i), dtype=torch.uint8).cuda() for i in range(count)]
    boxes = np.array([(0, 0, *image.shape[1:]) for image in images])
    resized, offsets = np.full((count, 2), (30, 400)), np.full((count, 2), (-3, 5))
    flips = np.arange(count) % 2 == 0
    decoded = DecodedImages.of(images)
    crop_resize_flip(decoded, boxes, flips, size, interpolation)
    crops = crop_resize_flip(decoded, boxes, flips, size, interpolation, resized, offsets)
    codes = np.arange(count)[:, None].repeat(2, axis=1)
    crops = apply_operations(crops, codes, np.full((count, 2, 6), 0.9), (1, 2, 3), interpolation)
    erasing, mixing = np.array([[3, 4, 20, 200]] * count), np.array([[0, 30, 0, 200, 0.5, 0.5]] * count)
    for mode in ("pixel", "rand", "const"):
        finish(crops, (0.5,) * 3, (0.2,) * 3, erasing, np.arange(count), mode, mixing, np.arange(count)[::-1])


def in_fp32(product):
    @torch.autocast("cuda", enabled=False)
    def in_fp32(a, b, out_dtype=None, out=None):
        result = product(a.float(), b.float())
        return result.to(out_dtype or a.dtype) if out is None else out.copy_(result)

    return in_fp32


if __name__ == "__main__":
    main()
