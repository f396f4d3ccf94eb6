"""nvJPEG's speed beside a model that trains, and its pixels, by its flags.

python benchmarks/decoding.py
python benchmarks/decoding.py --model vil_small --batch-size 128
"""

from __future__ import annotations

import argparse
import io
import threading
import time
from collections.abc import Callable

import numpy as np
import timm
import torch
from loader import picture
from PIL import Image, ImageFilter
from torch import Tensor

import vil  # noqa: F401  registers the models
from vil.cuda_graphs import Replayed
from vil.data import nvjpeg

FLAGS = dict(nvjpeg.FLAGS)
FILES = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vil_tiny")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.model}, batch {options.batch_size}\n")
    step = training_step(options.model, options.batch_size)
    print(f"| flags | alone, us a file | decoded, images/s | trained, images/s |\n|{' --- |' * 4}")
    print(f"| no decoder | | | {rates(step, None, options)[1]:.0f} |", flush=True)
    files = [encoded(picture(seed), 2) for seed in range(FILES)]
    for names in ([], [*FLAGS][:1], [*FLAGS]):
        decode = decoder(names, files)
        start = time.perf_counter()
        decode()
        alone = (time.perf_counter() - start) / FILES
        decoded, trained = rates(step, decode, options)
        print(f"| {' '.join(names) or 'none'} | {1e6 * alone:.1f} | {decoded:.0f} | {trained:.0f} |", flush=True)
    print(f"\n| colours at | flags | smooth: mean, largest difference from Pillow | noise |\n|{' --- |' * 4}")
    for subsampling, colours in enumerate(("full resolution", "half", "a quarter")):
        for names in ([*FLAGS][:1], [*FLAGS]):
            cells = [", ".join(map(str, difference(names, make, subsampling))) for make in (smooth, picture)]
            print(f"| {colours} | {' '.join(names)} | {' | '.join(cells)} |", flush=True)


def smooth(seed: int) -> Image.Image:
    random_numbers = np.random.default_rng(seed)
    shapes = Image.fromarray(random_numbers.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    grain = Image.fromarray(random_numbers.integers(0, 256, (375, 500), dtype=np.uint8))
    shapes = shapes.resize((500, 375), Image.Resampling.BICUBIC)
    return Image.blend(shapes, grain.filter(ImageFilter.GaussianBlur(1)).convert("RGB"), 0.3)


def encoded(image: Image.Image, subsampling: int) -> Tensor:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=90, subsampling=subsampling)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def decoder(names: list[str], files: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Decodes the files and waits for that, on a stream of high priority; two calls are done."""
    nvjpeg.FLAGS = {name: FLAGS[name] for name in names}
    decode, stream = nvjpeg.Decoder(torch.device("cuda", torch.cuda.current_device())), torch.cuda.Stream(priority=-1)

    def call() -> list[Tensor]:
        with torch.cuda.stream(stream):
            images = decode(files)
        stream.synchronize()
        return images

    call(), call()
    return call


def difference(names: list[str], make: Callable[[int], Image.Image], subsampling: int) -> tuple[float, int]:
    """Mean and largest, in grey levels, of 64 files."""
    files = [encoded(make(seed), subsampling) for seed in range(64)]
    images = torch.stack(decoder(names, files)()).cpu().int()
    pictures = [np.array(Image.open(io.BytesIO(file.numpy().tobytes())).convert("RGB")) for file in files]
    differences = (images - torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).int()).abs()
    return round(differences.float().mean().item(), 3), int(differences.max())


def training_step(name: str, batch_size: int) -> Callable[[], int]:
    """Forward and backward as a CUDA graph; returns how many images it trains on."""
    model = timm.create_model(name).cuda().train()
    parameters, images = list(model.parameters()), torch.randn(batch_size, 3, 224, 224, device="cuda")

    def backward(images: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images).float().square().mean()
        return torch.autograd.grad(loss, parameters)

    replayed = Replayed(backward, [images.clone()], name)
    return lambda: len(replayed(images)) and batch_size


def rates(step: Callable[[], int], decode: Callable[[], list[Tensor]] | None, options) -> tuple[float, float]:
    """Files a second that a thread decodes, and images a second that the GPU trains on meanwhile."""
    stop, decoded, trained, under_way = threading.Event(), 0, 0, []

    def keep_decoding() -> None:
        nonlocal decoded
        while not stop.is_set():
            decoded += len(decode())

    thread = threading.Thread(target=keep_decoding if decode else lambda: None)
    thread.start()
    start = time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        trained += step()
        under_way.append(torch.cuda.Event(blocking=True))
        under_way[-1].record()
        if len(under_way) > 2:
            under_way.pop(0).synchronize()
    so_far = decoded
    torch.cuda.current_stream().synchronize()
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    return so_far / seconds, trained / seconds


if __name__ == "__main__":
    main()
