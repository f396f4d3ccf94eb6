"""Fuzz the loaders and vil.viz with image files of many formats that are randomly damaged or slow to decode.

    python tools/fuzz_images.py --count 20000
    python tools/fuzz_images.py --count 2000 --slow --paths evaluation viz
    python tools/fuzz_images.py --count 2000 --paths device --formats jpeg --device cuda

Every file must be read or counted as unreadable. No file may end a loader or take more than 20 s, and the reading
processes may not exceed their memory limit. A seed always gives the same files.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import io
import logging
import os
import random
import resource
import struct
import sys
import tempfile
import time
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageCms, PngImagePlugin, features

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/helpers"))  # pytest also adds this folder
from processes import CONTEXT, Forked

from vil.config import Config, ConfigError
from vil.data.host import reader
from vil.data.loaders import evaluation_loader, training_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources import images
from vil.data.sources.images import UNREADABLE
from vil.data.sources.splits import open_split
from vil.fault_tolerance import machine_errors
from vil.security import sandbox
from vil.visualization import command as viz

AT_ONCE = 100  # maximum number of damaged or slow files on disk
PATHS = ("training", "device", "evaluation")
DATA_CONFIG = dict(
    input_size=(3, 32, 32), crop_pct=0.875, crop_mode="center", interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3
)
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 9000, 60000, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def corpus(formats: str = "") -> dict[str, bytes]:
    """Return a dict from names to intact image files, for all names that contain the string `formats`."""
    files = {}
    for name, (image, kind, options) in variants().items():
        if formats in name:
            if options.get("save_all"):  # create new images, because Pillow stores settings of a format in saved images
                options["append_images"] = [image.convert("RGB").rotate(90), image.convert("RGB").rotate(180)]
            image.copy().save(file := io.BytesIO(), kind, **options)
            files[name] = file.getvalue()
    if formats in "ppm plain":
        pixels = np.asarray(variants()["ppm"][0]).ravel()
        files["ppm plain"] = f"P3 64 48 255\n{' '.join(map(str, pixels))}\n".encode()
    return files


def variants() -> dict[str, tuple[Image.Image, str, dict]]:
    """Return a dict from the names of the corpus to images, their formats and their save options."""
    y, x = np.mgrid[:48, :64]
    noise = np.random.default_rng(0).integers(0, 40, (48, 64))
    rgb = Image.fromarray(np.stack([4 * x, 5 * y, 2 * x + 2 * y], axis=-1).astype(np.uint8))
    grey = Image.fromarray((3 * x + noise).astype(np.uint8))
    grey16 = Image.fromarray(((3 * x + noise) * 257).astype(np.uint16))
    floats = Image.fromarray((x / 64).astype(np.float32))
    alpha, black = Image.merge("RGBA", (*rgb.split(), grey)), grey.convert("1")
    profile, exif, text = metadata()
    frames, palette, told = dict(save_all=True), rgb.convert("P"), dict(comment=b"no comment")
    found = {
        "jpeg": (rgb, {}), "jpeg grey": (grey, {}), "jpeg progressive": (rgb, dict(progressive=True)),
        "jpeg cmyk": (rgb.convert("CMYK"), {}), "jpeg 4:4:4": (rgb, dict(subsampling=0, restart_marker_rows=1)),
        "jpeg profile": (rgb, told | dict(icc_profile=profile, exif=exif)), "mpo": (rgb, {**frames}),
        "png": (rgb, {}), "png 1": (black, {}), "png grey": (grey, dict(transparency=100)), "png 16": (grey16, {}),
        "png palette": (palette, dict(transparency=bytes(range(256)))), "png alpha": (alpha, {}),
        "png text": (rgb, dict(pnginfo=text, icc_profile=profile, exif=exif, dpi=(72, 72))),
        "png animated": (rgb, {**frames}), "webp": (rgb, {}), "webp lossless": (alpha, dict(lossless=True, exif=exif)),
        "webp animated": (rgb, {**frames}), "bmp": (rgb, {}), "bmp palette": (palette, {}), "gif": (palette, told),
        "gif animated": (palette, frames | dict(transparency=3)), "tiff": (rgb, dict(exif=exif)),
        "tiff 16": (grey16, {}), "tiff float": (floats, {}), "tiff pages": (rgb, {**frames}),
        "tiff fax": (black, dict(compression="group4")),
        "ppm": (rgb, {}), "ppm pgm 16": (grey16, {}), "ppm pbm": (black, {}), "ppm pfm": (floats, {}),
    }  # fmt: skip
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits", "zstd", "lzma"):
        found[f"tiff {compression}"] = rgb, dict(compression=compression)
    if features.check("avif"):
        found |= {"avif": (rgb, {}), "avif alpha": (alpha, dict(exif=exif, icc_profile=profile))}
    return {name: (image, name.split()[0].upper(), options) for name, (image, options) in found.items()}


def metadata() -> tuple[bytes, Image.Exif, PngImagePlugin.PngInfo]:
    """Return a fixed colour profile, EXIF data and PNG text."""
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "one " * 50, zip=True)
    text.add_itxt("Title", "two " * 20, zip=True)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[274], exif[305] = 6, "software"
    return profile[:24] + bytes(12) + profile[36:], exif, text  # the profile's creation time is set to 0


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a PNG chunk."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def segments(marker: int, data: bytes, count: int = 1) -> bytes:
    """Return `count` copies of a JPEG segment."""
    return (bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data) * count


def tiff(pixels: bytes, tags: dict[int, int], order: str = "<") -> bytes:
    """Return a 32x24 greyscale TIFF whose tags (a dict from tag number to value) are updated with `tags`."""
    tags = {256: 32, 257: 24, 258: 8, 259: 1, 262: 1, 273: 0, 277: 1, 278: 24, 279: len(pixels)} | tags
    start = 14 + 12 * len(tags)
    tags |= {name: start for name in (273, 324) if name in tags}  # the pixels follow the tags
    entries = (struct.pack(f"{order}HHII", name, 4, 1, value) for name, value in sorted(tags.items()))
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(f"{order}IH", 8, len(tags)) + b"".join(entries) + bytes(4) + pixels


def sharing(length: int, tags: int) -> bytes:
    """Return a TIFF with additional tags whose values share the same bytes."""
    entries = (struct.pack("<HHII", 1000 + i, 1, length, 8) for i in range(min(tags, 60000)))
    whole = tiff(b"", {})
    return whole[:8] + struct.pack("<H", 9 + min(tags, 60000)) + whole[10:-4] + b"".join(entries) + bytes(4 + length)


@functools.cache
def large(kind: str, width: int, height: int, **options) -> bytes:
    mode = "L" if kind == "PPM" else "RGB"
    Image.new(mode, (width, height), "red" if mode == "RGB" else 99).save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def slow(name: str, chance: random.Random) -> bytes:
    """Return a valid or almost valid file that costs more time or memory than typical images of its size."""
    n = int(2 ** chance.uniform(8, 24))  # approximate size of the file in bytes
    side = int(2 ** chance.uniform(0, 13.5))
    size = side, min(max(1, int(side * 2 ** chance.uniform(-7, 7))), 16000, 2**26 // side)
    small, jpeg = large("PNG", 9, 7), large("JPEG", 9, 7)
    bomb = zlib.compress(bytes(chance.choice((2**10, 2**20, 2**24))))
    notes = {b"zTXt": b"a\0\0" + bomb, b"iCCP": b"a\0\0" + bomb, b"iTXt": b"a\0\1\0\0\0" + bomb, b"IDAT": b""}
    notes |= {b"tEXt": b"a\0b", b"prVt": b"", b"eXIf": sharing(2**15, n // 12)[:n], b"PLTE": bytes(768)}
    (note, data), exif = chance.choice([*notes.items()]), b"Exif\0\0" + sharing(chance.choice((64, 2**15)), 2600)
    of_jpeg = [
        lambda: segments(0xE1, exif[:65533], chance.choice((1, 2, 99))),
        lambda: segments(chance.choice((0xFE, 0xE1, 0xE2, 0xED)), bytes(chance.choice((0, 9, 65533))), 1 + n // 999),
        lambda: chance.choice((b"\xff", b"\xff\xd8", b"\xff\0", b"x")) * (n // 2),
        lambda: segments(0xE2, b"MPF\0" + exif[6:65500]),
    ]
    files = {
        "png": lambda: small[:33] + chunk(note, data) * (1 + n // (12 + len(data))) + small[33:],
        "png large": lambda: large("PNG", *size) + bytes(n),
        "apng": lambda: small[:33] + chunk(b"acTL", struct.pack(">II", n // 38 + 1, 0)) + small[33:-12]
        + b"".join(chunk(b"fcTL", struct.pack(">IIIIIHHBB", i, 9, 7, 0, 0, 1, 1, 0, 0)) for i in range(n // 38)),
        "jpeg": lambda: jpeg[:2] + chance.choice(of_jpeg)() + jpeg[2:],
        "jpeg large": lambda: large("JPEG", *size) + bytes(n),
        "jpeg progressive": lambda: (p := large("JPEG", *size, progressive=True))[:-2]
        + p[p.rindex(b"\xff\xda") : -2] * chance.choice((1, 50, 90, 2000)) + b"\xff\xd9",
        "mpo": lambda: jpeg[:2] + segments(0xE2, b"MPF\0" + sharing(64, 9)) + jpeg[2:] + jpeg * (n // len(jpeg)),
        "gif": lambda: b"GIF89a" + struct.pack("<HHBBB", *size, 0, 0, 0) + b"\x21\xfe" + b"\1a" * (n // 2) + b"\0",
        "gif frames": lambda: large("GIF", *size)[:-1] + large("GIF", 9, 7)[13:-1] * (n // 50) + b";",
        "ppm": lambda: b"P%d\n" % chance.randint(1, 6) + b"%d %d 255\n" % size
        + chance.choice((b"#", b" ", b"1", b"1 ", b"#\n")) * n,
        "pfm": lambda: b"Pf" + b"\n" * n + b"%d %d\n-1.0\n" % size + bytes(n),
        "bmp": lambda: b"BM" + struct.pack("<IIIIiiHHIIIIII", n, 0, 54, 40, *size, 1, 8, 1, n, 1, 1, 0, 0)
        + chance.choice((b"\0\2\1\1", b"\0\0", b"\xff\1")) * (n // 4),
        "tiff": lambda: sharing(n, int(2 ** chance.uniform(0, 15))),
        "tiff large": lambda: large("TIFF", *size, compression=chance.choice(("tiff_lzw", "tiff_adobe_deflate"))),
        "webp": lambda: large("WEBP", *size, lossless=chance.random() < 0.5, method=0) + bytes(n),
        "avif": lambda: large("AVIF", *size, speed=10) if features.check("avif") else b"",
    }  # fmt: skip
    return files[name]()


SLOW = (
    *("png", "png large", "apng", "jpeg", "jpeg large", "jpeg progressive", "mpo", "gif", "gif frames", "ppm", "pfm"),
    *("bmp", "tiff", "tiff large", "webp", "avif"),
)


def flip_bits(content: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content


def cut_short(content: bytearray, chance: random.Random) -> bytearray:
    return content[: chance.randrange(len(content)) if chance.random() < 0.8 else chance.randrange(20)]


def repeat(content: bytearray, chance: random.Random) -> bytearray:
    start = chance.randrange(len(content))
    end = start + chance.randint(1, chance.choice((8, 64, 4096)))
    return content[:end] + content[start:end] * chance.choice((1, 2, 40)) + content[end:]


def write_number(content: bytearray, chance: random.Random) -> bytearray:
    """Overwrite bytes that may be a length, a size or an offset."""
    place = chance.randrange(min(len(content), chance.choice((64, 1024, len(content)))))
    kind = chance.choice(("<H", ">H", "<I", ">I"))
    number = chance.choice(NUMBERS) % 2 ** (8 * struct.calcsize(kind))
    content[place : place + struct.calcsize(kind)] = struct.pack(kind, number)
    return content


def splice(content: bytearray, chance: random.Random) -> bytearray:
    """Replace the end of a file by the end of another intact file."""
    other = chance.choice(SPLICED)
    return content[: chance.randrange(len(content))] + other[chance.randrange(len(other)) :]


def change_chunks(content: bytearray, chance: random.Random) -> bytearray:
    """Randomly change a PNG's chunks, with valid checksums, or the parts of another file between its 0xff bytes."""
    if not content.startswith(b"\x89PNG"):
        parts = content.split(b"\xff")
        chance.shuffle(parts) if chance.random() < 0.1 else parts.insert(
            chance.randrange(len(parts)), chance.choice(parts)
        )
        return bytearray(b"\xff").join(parts)
    chunks, place = [], 8
    while place + 8 <= len(content):
        (length,) = struct.unpack_from(">I", content, place)
        chunks.append([content[place + 4 : place + 8], content[place + 8 : place + 8 + length]])
        place += 12 + length
    chosen = chance.choice(chunks)
    if chance.random() < 0.2:
        chunks.insert(chance.randrange(1 + len(chunks)), chosen)
    elif chance.random() < 0.2:
        chosen[0] = bytearray(chance.choice((b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"iCCP", b"zTXt", b"fcTL", b"fdAT")))
    elif chosen[1]:
        chosen[1] = chance.choice((flip_bits, write_number, cut_short, repeat))(bytearray(chosen[1]), chance)
    return content[:8] + b"".join(chunk(bytes(name), bytes(data)) for name, data in chunks)


SPLICED = list(corpus().values())
DAMAGES = (flip_bits, cut_short, repeat, write_number, splice, change_chunks)
WEIGHTS = (2, 1, 2, 3, 1, 3)


def damaged(content: bytes, chance: random.Random) -> bytes:
    result = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        (damage,) = chance.choices(DAMAGES, WEIGHTS)
        result = damage(result, chance) or bytearray(b"\0")
    return bytes(result)


def write_files(root: Path, count: int, seed: int, formats: str = "", is_slow: bool = False) -> None:
    """Write `count` damaged or slow files to {train,val}/damaged, and intact files to {train,val}/whole."""
    chance, files, names = random.Random(seed), corpus(formats), [name for name in SLOW if formats in name]
    for folder in ("damaged", "whole"):
        (root / "train" / folder).mkdir(parents=True)
    for i in range(count):
        name = names[i % len(names)] if is_slow else ""
        content = slow(name, chance) if is_slow else damaged(chance.choice(list(files.values())), chance)
        (root / "train" / "damaged" / f"{i}{name}.{chance.choice(('jpg', 'png'))}").write_bytes(content)
    for name, content in files.items():
        (root / "train" / "whole" / f"{name}.jpg").write_bytes(content)
    (root / "val").symlink_to("train")


@dataclass
class Outcome:
    """Statistics of one epoch over the fuzzed files."""

    files: int
    images: int = 0
    unreadable: int = 0
    seconds: float = 0.0
    megabytes: float = 0.0  # peak growth of this process's memory, plus the largest peak of a sandbox process
    slowest: tuple[float, str] = (0.0, "")  # the slowest file's seconds and name
    errors: collections.Counter = field(default_factory=collections.Counter)  # counts of errors by message
    names: set[str] = field(default_factory=set)  # names of unreadable files
    ended_by: str = ""


def read_all(root: Path, path: str, device: torch.device, gigabytes: float | None) -> Outcome:
    """Read all files in this process, by one epoch of a loader or by vil.viz."""
    is_training = path in ("training", "device")
    dataset = open_split(str(root), "", "train" if is_training else "val")
    outcome = Outcome(len(dataset))
    if is_training:
        batch = next(size for size in (16, 8, 4, 2) if len(dataset) >= size)
        config = Config(global_batch_size=batch, workers=0, aug_repeats=0, augment_on_device=path == "device")
        batches = TrainingBatches(len(dataset), config, batch, 0, 1)
        loader = training_loader(dataset, config, DATA_CONFIG, device, batches, 2)
    else:
        loader = evaluation_loader(dataset, DATA_CONFIG, device, 0, 16, 0, 1)
    warnings.simplefilter("ignore")
    before, start = memory("VmRSS"), time.perf_counter()
    if gigabytes:
        resource.setrlimit(resource.RLIMIT_AS, (int(memory("VmSize") * 2**20 + gigabytes * 2**30), -1))
    with noted(outcome):
        try:
            if path == "viz":
                outcome.unreadable = sum(not drawn(file) for file, _ in dataset.reader.samples)
            else:
                for pixels, targets in loader.images:
                    assert pixels.isfinite().all()
                    outcome.images += len(targets)
                    outcome.unreadable += int((targets == UNREADABLE).sum())
                counted = loader.take_unreadable()
                assert is_training or outcome.unreadable == counted
                outcome.unreadable = counted
        except BaseException as error:
            outcome.ended_by = repr(error)
    outcome.seconds, outcome.megabytes = time.perf_counter() - start, max(0, memory("VmHWM") - before)
    sandbox.sandbox_of(os.getpid()).close()
    outcome.megabytes += resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return outcome


def drawn(file: str) -> bool:
    """Return whether vil.viz can read the file."""
    try:
        return bool(viz.read_pictures([Path(file)]))
    except ConfigError:
        return False


@contextlib.contextmanager
def noted(outcome: Outcome):
    """Record read errors and the slowest file in `outcome` while the context is active."""

    class Noted(logging.Handler):
        def emit(self, record):
            name, error = record.args
            outcome.names.add(name)
            outcome.errors[error] += 1

    def timed(read):
        def read_timed(path, *rest):
            start = time.perf_counter()
            try:
                return read(path, *rest)
            finally:
                outcome.slowest = max(outcome.slowest, (time.perf_counter() - start, os.path.basename(path)))

        return read_timed

    logger, handler = logging.getLogger("vil.data.sources.images"), Noted()
    logger.addHandler(handler)
    logger.propagate = False
    reader.retry_reading, viz.read_image = timed(machine_errors.retry_reading), timed(images.read_image)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        reader.retry_reading, viz.read_image = machine_errors.retry_reading, images.read_image


def memory(what: str) -> float:
    """Return a memory size of this process in MiB, from the field `what` of /proc/self/status."""
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(what))


def in_a_child(*arguments) -> Outcome:
    """Run `read_all` in a child process, which has its own memory limit and may crash."""
    receive, send = CONTEXT.Pipe(duplex=False)
    child = Forked(target=_send_outcome, args=(send, arguments))
    child.start()
    send.close()
    try:
        outcome = receive.recv()
    except EOFError:
        outcome = Outcome(0, ended_by="the end of its process")
    child.join()
    return outcome


def _send_outcome(pipe, arguments) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # discard messages of libtiff and libjpeg
    pipe.send(read_all(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="use slow or large files instead of damaged ones")
    parser.add_argument("--formats", default="", help="use only files of the corpus whose name contains this")
    parser.add_argument("--paths", nargs="+", choices=(*PATHS, "viz"), default=PATHS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles = "path", "files", "unreadable", "seconds", "MB more at the peak", "slowest", "errors", "ended by"
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    failed = False
    for first in range(0, options.count, AT_ONCE):
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            count = min(AT_ONCE, options.count - first)
            write_files(root, count, options.seed + first, options.formats, options.slow)
            for path in options.paths:
                on_gpu = options.device.type == "cuda"  # no memory limit, which the driver's address space would exceed
                run = read_all if on_gpu else in_a_child
                outcome = run(root, path, options.device, None if on_gpu else 2.5)
                errors = ", ".join(f"{message} {count}" for message, count in outcome.errors.most_common(3))
                print(
                    f"| {path} | {outcome.files} | {outcome.unreadable} | {outcome.seconds:.0f} "
                    f"| {outcome.megabytes:.0f} | {outcome.slowest[0]:.1f} s, {outcome.slowest[1]} | {errors} "
                    f"| {outcome.ended_by or 'nothing'} |",
                    flush=True,
                )
                failed |= bool(outcome.ended_by) or outcome.slowest[0] > 20
    sys.exit(failed)


if __name__ == "__main__":
    main()
