"""Measure CPU time and memory for reading files of at most 1 MB that were crafted to be expensive.

Print the seconds and megabytes of each file: python tests/helpers/hostile_files.py [PART OF A NAME]
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import logging
import os
import pickle
import random
import resource
import struct
import sys
import tarfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, features

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from fuzz_images import chunk, memory, segments, sharing, tiff
from processes import CONTEXT, Forked

from vil.checkpoint import Checkpoint
from vil.data.sources.images import read_image
from vil.data.sources.splits import open_split
from vil.factory import from_checkpoint
from vil.security import sandbox

MOST = 10**6  # maximum file size in bytes
SIDE = 9400  # side in pixels of a square image just below the pixel limit
FILES: dict[str, Callable[[], bytes]] = {}


def add(name: str, make: Callable[..., bytes], *arguments) -> None:
    FILES[name] = lambda: make(*arguments)[:MOST]


def encoded(kind: str, mode: str = "RGB", size: tuple[int, int] = (64, 48), **options) -> bytes:
    Image.new(mode, size, 77 if mode in ("L", "1", "P") else None).save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def png(
    width: int, height: int, bits: int, colour: int, chunks: list[tuple[bytes, bytes]], interlaced: int = 0
) -> bytes:
    head = b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in (head, *chunks, (b"IEND", b"")))


@functools.cache
def zeros(count: int, *, level: int = 9) -> bytes:
    """Return `count` zero bytes, a multiple of 16 MiB, compressed by zlib."""
    packer = zlib.compressobj(level)
    return b"".join(packer.compress(bytes(2**24)) for _ in range(count >> 24)) + packer.flush()


# Image files

TAGS = sharing(2**15, 2600)[:65000]
JPEG = encoded("JPEG")


def _jpegs() -> None:
    names = (
        b"JFIF\0",
        b"Exif\0\0",
        b"MPF\0",
        b"ICC_PROFILE\0\1\1",
        b"http://ns.adobe.com/xap/1.0/\0",
        b"Photoshop 3.0\0",
    )
    for marker in range(0xE0, 0xF0):
        name = names[marker % len(names)]
        add(
            f"jpeg app{marker - 0xE0}",
            lambda m, n: JPEG[:2] + segments(m, (n + TAGS)[:65500], 14) + JPEG[2:],
            marker,
            name,
        )
    add("jpeg comments", lambda: JPEG[:2] + segments(0xFE, b"", 200_000) + JPEG[2:])
    add("jpeg tables", lambda: JPEG[:2] + segments(0xDB, (b"\0" + b"\1" * 64) * 1000, 15) + JPEG[2:])
    add("jpeg fill bytes", lambda: JPEG[:2] + b"\xff" * 900_000 + JPEG[2:])
    add("jpeg adobe", lambda: JPEG[:2] + segments(0xEE, b"Adobe" + bytes(60_000), 15) + JPEG[2:])
    for mode in ("L", "RGB", "CMYK"):
        add(f"jpeg progressive {mode}", lambda m: encoded("JPEG", m, (SIDE, SIDE), progressive=True, quality=1), mode)
        add(f"jpeg baseline {mode}", lambda m: encoded("JPEG", m, (SIDE, SIDE), quality=1), mode)
    add(
        "jpeg scans",
        lambda: (p := encoded("JPEG", "L", (4000, 4000), progressive=True))[:-2] + p[p.rindex(b"\xff\xda") : -2] * 15,
    )


def _pngs() -> None:
    pixels = b"IDAT", zlib.compress(bytes(48 * (1 + 64 * 3)))
    for kind, data in {
        b"zTXt": b"a\0\0" + zeros(2**28), b"iTXt": b"a\0\1\0\0\0" + zeros(2**28), b"iCCP": b"a\0\0" + zeros(2**28),
        b"eXIf": TAGS, b"tEXt": b"a\0" + bytes(900_000), b"tRNS": bytes(900_000), b"prVt": bytes(900_000),
        b"acTL": bytes(8), b"PLTE": bytes(900_000),
    }.items():  # fmt: skip
        add(f"png {kind.decode()}", lambda k, d: png(64, 48, 8, 2, [(k, d), pixels]), kind, data)
        add(f"png {kind.decode()} behind", lambda k, d: png(64, 48, 8, 2, [pixels, (k, d)]), kind, data)
    for bits, colour in ((1, 0), (8, 2), (16, 0), (16, 2), (16, 6), (8, 3)):
        for interlaced in (0, 1):
            pixel = dict(width=SIDE, height=SIDE, bits=bits, colour=colour, interlaced=interlaced)
            add(f"png {pixel}", lambda p: png(**p, chunks=[(b"PLTE", bytes(768)), (b"IDAT", zeros(2**29))]), pixel)
    add("png of empty chunks", lambda: png(64, 48, 8, 2, [*[(b"IDAT", b"")] * 60_000, pixels]))
    add("png of many chunks", lambda: png(64, 48, 8, 2, [*[(b"tEXt", b"a\0b")] * 60_000, pixels]))


def _others() -> None:
    gif = b"GIF89a" + struct.pack("<HHBBB", SIDE, SIDE, 0, 0, 0)
    add("gif comment", lambda: gif + b"\x21\xfe" + b"\1a" * 450_000 + b"\0")
    add(
        "gif frames", lambda: gif + (b"\x2c" + struct.pack("<HHHHB", 0, 0, SIDE, SIDE, 0) + b"\2\1\0\0") * 60_000 + b";"
    )
    add("gif large", lambda: encoded("GIF", "P", (SIDE, SIDE)))
    for kind, marker in (("exif", "exif"), ("icc_profile", "icc"), ("xmp", "xmp")):
        add(f"webp {marker}", lambda k: encoded("WEBP", **{k: TAGS * 13}), kind)
    add("webp large", lambda: encoded("WEBP", "RGB", (16000, 5500), lossless=True, method=0))
    add(
        "webp animated",
        lambda: encoded(
            "WEBP",
            "RGB",
            (2000, 2000),
            save_all=True,
            append_images=[Image.new("RGB", (2000, 2000), i) for i in range(20)],
        ),
    )
    if features.check("avif"):
        add("avif large", lambda: encoded("AVIF", "RGB", (SIDE // 2, SIDE // 2), speed=10))
        add("avif exif", lambda: encoded("AVIF", exif=TAGS * 13))
    bmp = struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, SIDE, SIDE, 1, 8, 1, 54, 1, 1, 0, 0)
    for end in (b"\0\2\1\1", b"\0\0", b"\xff\1"):
        add(f"bmp {end!r}", lambda e: b"BM" + bmp + e * (900_000 // len(e)), end)
    for word in (b"#", b" ", b"1", b"1 ", b"#\n", b"\xff"):
        add(f"ppm {word!r}", lambda w: b"P3\n9400 9400 255\n" + w * (900_000 // len(w)), word)
        add(f"pgm {word!r}", lambda w: b"P5\n" + w * (900_000 // len(w)) + b"\n", word)
    add("pfm", lambda: b"PF\n9400 9400\n-1.0\n" + bytes(900_000))
    for tags in (900, 5400, 30_000):
        add(f"tiff {tags} tags", lambda t: sharing(600_000, t), tags)
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd", "lzma", "jpeg"):
        add(f"tiff {compression}", lambda c: encoded("TIFF", "RGB", (SIDE, SIDE), compression=c), compression)
        if compression != "jpeg":  # libtiff does not compress 16-bit pixels as JPEG
            add(
                f"tiff 16 bits {compression}",
                lambda c: encoded("TIFF", "I;16", (SIDE, SIDE), compression=c),
                compression,
            )
    bomb = zeros(2**28)
    add("tiff tiles", lambda: tiff(bomb, {256: SIDE, 257: SIDE, 259: 8, 322: SIDE, 323: SIDE, 324: 0, 325: len(bomb)}))
    add("tiff strip of all rows", lambda: tiff(bomb, {256: SIDE, 257: SIDE, 259: 8, 278: 2**32 - 1, 279: len(bomb)}))
    add("tiff of 200 samples", lambda: tiff(bomb, {256: 4000, 257: 4000, 259: 8, 277: 200, 279: len(bomb)}))
    add("tiff of 64 bits", lambda: tiff(bomb, {256: SIDE, 257: SIDE, 258: 64, 259: 8, 279: len(bomb)}))
    add("tiff that refers to itself", lambda: encoded("TIFF")[:-4] + struct.pack("<I", 8))
    add("mpo", lambda: JPEG[:2] + segments(0xE2, b"MPF\0" + TAGS) + JPEG[2:] + JPEG * 1000)


# Checkpoint files

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def text(word: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(word)) + word


def storage(key: bytes = b"0", count: bytes = b"K\1") -> bytes:
    return b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(key) + text(b"cpu") + count + b"tQ"


def view(count: int) -> bytes:
    """Return the pickle of a tensor whose strides are 0, so that all elements share one stored value."""
    return TENSOR + b"(" + storage() + b"K\0J" + struct.pack("<i", count) + b"K\2\x86K\0K\0\x86\x89}tR"


def archive(program: bytes, method: int = zipfile.ZIP_STORED, *, values: bytes = bytes(4), times: int = 1) -> bytes:
    with warnings.catch_warnings(), zipfile.ZipFile(made := io.BytesIO(), "w", method) as file:
        warnings.simplefilter("ignore")
        for _ in range(times):
            file.writestr("x/data.pkl", b"\x80\2" + program + b".")
        file.writestr("x/data/0", values)
    return made.getvalue()


def understated(method: int) -> bytes:
    """Return a zip archive whose entry decompresses to at least 512 MiB, although its directory declares four bytes."""
    with zipfile.ZipFile(made := io.BytesIO(), "w", method) as file:
        with file.open("x/data.pkl", "w") as part:
            part.write(b"\x80\2}.")
            for _ in range(512 if method == zipfile.ZIP_DEFLATED else 1500):
                part.write(bytes(2**20))
        file.infolist()[0].file_size = 4
    return made.getvalue()


def legacy(program: bytes) -> bytes:
    system = dict(protocol_version=1001, little_endian=True, type_sizes={})
    start = b"".join(pickle.dumps(p, 2) for p in (0x1950A86A20F9469CFC6C, 1001, system))
    storages = pickle.dumps(["0"], 2) + struct.pack("<q", 1) + bytes(4)
    return start + b"\x80\2" + program + b"." + storages * (b"Storage\n" in program) + pickle.dumps([], 2)


def saved(value) -> bytes:
    torch.save(value, file := io.BytesIO())
    return file.getvalue()


def doubled(times: int, start: bytes = b"]", join: bytes = b"\x86") -> bytes:
    return (
        start
        + b"q\0"
        + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + join + b"q" + bytes([i + 1]) for i in range(times))
    )


def config(**values) -> bytes:
    return saved(dict(version=3, config=values, state_dict={}))


def safetensors(header: bytes, values: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + values


def _checkpoints() -> None:
    encode = b"c_codecs\nencode\n"
    huge = {
        "hex": encode * 40 + text(b"a") + (text(b"hex") + b"\x86R") * 40,
        "bytearray": b"c__builtin__\nbytearray\nJ\0\0\0\x7f\x85R",
        "set": b"c__builtin__\nset\n" + b"](" + b"K\1" * 99999 + b"e\x85R",
        "bytes of zeros": b"cbuiltins\nbytes\nJ\0\0\0\x7f\x85R",
        "dict of a tensor": b"ccollections\nOrderedDict\n" + view(2**30) + b"\x85R",
        "calls a tensor": b"ccollections\nOrderedDict\n" + view(2**30) + b"R",
        "size of a tensor": b"ctorch\nSize\n" + view(2**30) + b"\x85R",
        "state of a tensor": b"cargparse\nNamespace\n)\x81" + view(2**30) + b"b",
        "converted tensor": b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
        + view(2**30)
        + b"ctorch\nfloat64\n"
        + text(b"cpu")
        + b"\x89tR",
        "tensor of floats": b"ctorch\nTensor\nJ\0\0\0\x7f\x85R",
        "storage of floats": b"ctorch\nFloatStorage\nJ\0\0\0\x7f\x85R",
        "expanded": b"}" + text(b"a") + view(2**30) + b"s",
        "claimed storage": b"}" + text(b"a") + storage(count=b"J\0\0\0\x7f") + b"s",
        "sizes again": b"ctorch\nSize\nq\0(" + b"K\1" * 200_000 + b"t\x85q\1" + b"h\0h\1R0" * 80_000,
        "arguments again": b"ctorch\ndevice\nq\0("
        + text(b"cpu")
        + b"K\1" * 250_000
        + b"tq\1]("
        + b"h\0h\1R" * 95_000
        + b"e",
        "states again": b"cargparse\nNamespace\nq\0}("
        + b"".join(text(b"%d" % i) + b"K\1" for i in range(30_000))
        + b"uq\1"
        + b"h\0)\x81h\1b" * 80_000,
        "views again": TENSOR + b"q\0(" + storage() + b"K\0K\1\x85K\1\x85\x89}tq\1](" + b"h\0h\1R" * 150_000 + b"e",
        "lists": b"](" + b"]" * 900_000 + b"e",
        "dicts": b"](" + b"}" * 900_000 + b"e",
        "marks": b"(" * 900_000,
        "ordered dicts": b"ccollections\nOrderedDict\nq\0](" + b"h\0)R" * 220_000 + b"e",
        "namespaces": b"cargparse\nNamespace\nq\0](" + b"h\0)\x81" * 220_000 + b"e",
        "nested tuples": b")" + b"\x85" * 900_000,
        "nested lists": b"]" * 450_000 + b"a" * 449_999,
        "list in itself": b"]q\0h\0a",
        "doubling tuples": doubled(200),
        "doubling in the config": b"}(" + text(b"version") + b"K\3" + text(b"config") + doubled(60) + b"u",
        "long integer": b"\x8b" + struct.pack("<i", 900_000) + b"\x7f" * 900_000,
        "decimal": b"I" + b"9" * 900_000 + b"\n",
        "octets": b"\x8e" + struct.pack("<Q", 2**60),
        "text of a claimed length": b"X\xff\xff\xff\xffabc",
        "text of 64 bits": b"\x8d" + struct.pack("<Q", 2**61),
        "memo of a high index": b"]r\xff\xff\xff\x7f",
        "colliding keys": b"}("
        + b"".join(pickle.dumps(k * (2**61 - 1), 2)[2:-1] + b"K\1" for k in range(1, 60_000))
        + b"u",
        "escapes": b"S'" + b"\\x00" * 220_000 + b"'\n",
        "one text many times": b"](" + text(b"\0" * 400_000) + b"q\0" + b"h\0" * 200_000 + b"e",
    }
    for name, program in huge.items():
        add(f"pt {name}", archive, program)
        add(f"legacy pt {name}", legacy, program)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        add(f"pt compressed by {method}", lambda m: archive(b"}", m, values=bytes(2**29)), method)
        add(f"pt of a size understated by {method}", understated, method)
    add("pt of one part many times", lambda: archive(b"}", times=7000))
    add(
        "pt of many names for a tensor",
        lambda: saved({f"{i}": t for t in [torch.ones(100_000)] for i in range(20_000)}),
    )
    big = torch.ones(1000)
    for name, value in {"numbers": [1] * 200_000, "tensors": [big] * 100_000, "texts": ["\0" * 1000] * 100_000}.items():
        for option in ("lr", "model_kwargs", "dataset", "phases", "num_classes"):
            add(f"pt {name} as {option}", lambda o, v: config(**{o: v, "model": "vil_tiny"}), option, value)
    add("pt names", lambda: saved(dict(version=3, config=dict(num_classes=10**6), label_names=["x" * 1000] * 10**5)))
    add("safetensors length", lambda: safetensors(b"{}", length=2**62))
    add("safetensors numbers", lambda: safetensors(b'{"a":' + b"9" * 900_000 + b"}"))
    add("safetensors nesting", lambda: safetensors(b"[" * 900_000))
    add("safetensors lists", lambda: safetensors(b'{"__metadata__":[' + b"[]," * 300_000 + b"[]]}"))
    add(
        "safetensors metadata",
        lambda: safetensors(json.dumps({"__metadata__": {f"{i}": "" for i in range(60_000)}}).encode()),
    )
    add("safetensors escapes", lambda: safetensors(b'{"__metadata__":{"a":"' + b"\\ud83d" * 150_000 + b'"}}'))
    empty = dict(dtype="F32", shape=[0], data_offsets=[0, 0])
    add("safetensors tensors", lambda: safetensors(json.dumps({f"{i}": empty for i in range(17_000)}).encode()))
    shape = dict(dtype="F32", shape=[2**40, 0] * 9000, data_offsets=[0, 0])
    add("safetensors dimensions", lambda: safetensors(json.dumps({"a": shape}).encode()))
    add(
        "safetensors claims",
        lambda: safetensors(json.dumps({"a": empty | dict(shape=[2**40], data_offsets=[0, 2**42])}).encode()),
    )
    ours = {"producer": "vision-longhorn", "config": "[" + "[]," * 250_000 + "[]]", "mean": "[" + "1," * 99 + "1]"}
    add("safetensors config", lambda: safetensors(json.dumps({"__metadata__": ours}).encode()))


# Tar archives of images


def member(name: str, size: int = 0, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **headers: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.pax_headers = size or len(data), kind, headers
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


def _tars() -> None:
    sparse = {"GNU.sparse.size": f"{2**29 - 1}", "GNU.sparse.numblocks": "1", "GNU.sparse.map": f"{2**29 - 1},0"}
    newest = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": f"{2**40}"}
    noted = tarfile.TarInfo.create_pax_global_header({f"{i}": "x" for i in range(30_000)})
    label = member("a/1.cls", data=b"0")
    negative = tarfile.TarInfo("a/1.jpg")
    negative.size = -512
    tars = {
        "sparse": b"".join(member(f"a/{i}.jpg", **sparse) + label for i in range(200)),
        "sparse 1.0": member("a/1.jpg", data=b"999999999\n" + b"0\n" * 200_000, **newest) + label,
        "global header": noted + b"".join(member(f"a/{i}.jpg") for i in range(800)),
        "members": b"".join(member(f"a/{i}.jpg") for i in range(1900)),
        "claimed sizes": b"".join(member(f"a/{i}.jpg", size=2**29 - 1) for i in range(500)),
        "negative size": negative.tobuf(tarfile.GNU_FORMAT) + bytes(2**20),
        "claimed notes": member("x", size=2**33 - 1, kind=b"L"),
        "long name": member("a" * 400_000 + "/1.jpg", data=JPEG),
        "header of many keys": member("a/1.jpg", data=JPEG, **{f"{i}": "x" for i in range(60_000)}),
        "tar in tar": member("b.tar", data=b"".join(member(f"a/{i}.jpg", **sparse) for i in range(200))),
        "links": b"".join(member(f"a/{i}.jpg", kind=tarfile.LNKTYPE) for i in range(1900)),
    }  # fmt: skip
    for name, content in tars.items():
        add(f"tar {name}", lambda c: c[: MOST - 1024] + bytes(1024), content)
        add(f"wds {name}", lambda c: c[: MOST - 1024] + bytes(1024), content)
        add(f"wds.gz {name}", lambda c: gzip.compress(c * 20), content)
    add("wds.gz zeros", zeros_in_a_tar)
    add("tar.gz zeros", zeros_in_a_tar)
    add("wds.gz headers", lambda: gzip.compress(member("a/1.jpg") * 300_000, 1))


def zeros_in_a_tar() -> bytes:
    with gzip.GzipFile(fileobj=(made := io.BytesIO()), mode="w", compresslevel=1) as file:
        for _ in range(3):
            file.write(member("a/1.jpg", size=2**28))
            for _ in range(16):
                file.write(bytes(2**24))
    return made.getvalue()


@functools.cache
def files() -> dict[str, Callable[[], bytes]]:
    """Return a dict from file names to functions that return the file's content."""
    for collect in (_jpegs, _pngs, _others, _checkpoints, _tars):
        collect()
    return FILES


# Cost of reading a file


@dataclass
class Cost:
    seconds: float  # CPU time, because other programs may use the machine
    megabytes: float  # peak growth of this process's memory or, if larger, peak memory of the sandbox for images
    outcome: str


def read(name: str, path: Path) -> str:
    """Read a file as this package's commands do, and return the outcome as text."""
    kind = name.split(" ")[0]
    if kind.startswith(("wds", "tar")):
        if kind.startswith("wds"):
            shard = dict(name="train", filenames=[path.name], num_samples=9, shard_lengths=[9])
            (path.parent / "_info.json").write_text(json.dumps(dict(splits=dict(train=shard))))
        images = open_split(str(path.parent), "wds/x" if kind.startswith("wds") else "", "train", is_training=False)
        return f"{sum(1 for _ in images)} images"
    if kind in ("pt", "legacy", "safetensors"):
        for whole in (False, True):
            source = Checkpoint(path, whole)
            for part in ("options", "label_names", "preprocessing", "ema_is_best"):
                with contextlib.suppress(Exception):
                    getattr(source, part)
            with contextlib.suppress(Exception):
                source.training_state()
        from_checkpoint(source, "vil_tiny")
        return "a model"
    return str(read_image(path).size)


def _measure(pipe, name: str, path: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    logging.disable()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset VmHWM, the peak resident memory
    before, start = memory("VmRSS"), time.process_time()
    try:
        outcome = read(name, path)
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    seconds, grown = time.process_time() - start, memory("VmHWM") - before
    sandbox.sandbox_of(os.getpid()).close()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    pipe.send(Cost(seconds + children.ru_utime, max(grown, children.ru_maxrss / 1024), outcome[:300]))


def cost(name: str, folder: Path) -> Cost:
    """Read one of `files` in a new process, and return the CPU time and memory that it takes."""
    kind = name.split(" ")[0]
    suffix = {"legacy": ".pt", "pt": ".pt", "safetensors": ".safetensors", "wds.gz": ".tar.gz", "wds": ".tar"}.get(kind)
    path = folder / f"train{'.tar' if kind.startswith('tar') else suffix or '.jpg'}"
    path.write_bytes(content := files()[name]())
    assert len(content) <= MOST
    receive, send = CONTEXT.Pipe(duplex=False)
    child = Forked(target=_measure, args=(send, name, path))
    child.start()
    send.close()
    try:
        found = receive.recv()
    except EOFError:
        found = Cost(0.0, 0.0, "the process ended")
    child.join()
    path.unlink()
    return found


def main() -> None:
    import tempfile

    torch.set_num_threads(1)
    names = [name for name in files() if (sys.argv[1:] or [""])[0] in name]
    random.Random(0).shuffle(names)
    read_image(io.BytesIO(JPEG))
    np.zeros(1)
    worst, failed = Cost(0, 0, ""), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found = cost(name, Path(folder))
            bad = found.seconds > 20 or found.megabytes > 1500 or found.outcome == "the process ended"
            failed += bad
            cost_of_it = f"{found.seconds:6.1f} s {found.megabytes:6.0f} MB"
            print(f"{'FAIL' if bad else 'ok  '} {cost_of_it}  {name}: {found.outcome[:110]!r}", flush=True)
            worst = Cost(max(worst.seconds, found.seconds), max(worst.megabytes, found.megabytes), "")
    print(f"{len(names)} files, {failed} beyond the limits; at most {worst.seconds:.1f} s and {worst.megabytes:.0f} MB")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
