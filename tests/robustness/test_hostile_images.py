"""Tests of untrusted image files: formats, colours and limits. A bad file neither stops a run nor starts a program."""

import collections
import contextlib
import dataclasses
import gzip
import http.server
import io
import json
import logging
import multiprocessing
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fuzz_images
import numpy as np
import pytest
import torch
from fuzz_images import DATA_CONFIG, PATHS, chunk, sharing, tiff
from PIL import EpsImagePlugin, Image, PngImagePlugin, features
from processes import ROOT, SMALL, in_processes
from timm.data.dataset import ImageDataset

from vil.config import Config, ConfigError
from vil.data.device import decoding, encoded, preparation
from vil.data.device.encoded import EncodedImage
from vil.data.device.reader import EncodedReader
from vil.data.device.transform_parameters import TransformParameters
from vil.data.host.reader import ImageReader
from vil.data.loaders import evaluation_loader, training_loader
from vil.data.samplers import TrainingBatches
from vil.data.sources import images
from vil.data.sources.images import UNREADABLE
from vil.data.sources.splits import open_split, open_splits
from vil.evaluation.split import open_evaluation_split
from vil.fault_tolerance.machine_errors import MachineError, is_machine_error
from vil.security import image_decoding, image_structure, sandbox, sandbox_server
from vil.training.trainer import Trainer
from vil.visualization import command as viz

CPU = torch.device("cpu")
Y, X = np.mgrid[:24, :32]
RGB = np.stack([8 * X, 10 * Y, 4 * X + 5 * Y], axis=-1).astype(np.uint8)
GREY = (8 * X).astype(np.uint8)


def encode(image, kind, **options):
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, kind, **options)
    return file.getvalue()


def png(*chunks):
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in chunks)


def header(width, height, bits=8, colour=2):
    return b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)


def many_scans():
    """Return a progressive JPEG whose last scan, which covers all pixels, is repeated 20,000 times."""
    whole = encode(Image.new("L", (400, 400)), "JPEG", progressive=True)
    return whole[:-2] + whole[whole.rindex(b"\xff\xda") : -2] * 20_000 + b"\xff\xd9"


def large_header(jpeg, width, height, times=1):
    """Return a JPEG with `times` frame headers, the first of which claims the size `width` x `height`."""
    place = jpeg.index(b"\xff\xc0")
    frame = jpeg[place : place + 19]
    large = frame[:5] + struct.pack(">HH", height, width) + frame[9:]
    return jpeg[:place] + large + frame * (times - 1) + jpeg[place + 19 :]


def text_bomb():
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "\0" * 2**21, zip=True)
    return encode(RGB, "PNG", pnginfo=text)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n0 0 8 8 rectfill\n%%EOF\n"
SMALL_JPEG = encode(RGB, "JPEG")
BOMB = zlib.compress(bytes(4096**2))
UNFIT = {
    "eps": EPS,
    "nothing": b"",
    "no image": b"no image\n" * 99,
    "truncated png": encode(RGB, "PNG")[:-40],
    "truncated jpeg": SMALL_JPEG[: len(SMALL_JPEG) // 2],
    "short header": png((b"IHDR", b"\0\0\0\x08\0\0\0\x08"), (b"IEND", b"")),
    "no pixels": png(header(0, 8), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")),
    "pixel bomb": png(header(60000, 60000), (b"IDAT", zlib.compress(bytes(9))), (b"IEND", b"")),
    "more pixels than pillow warns of": png(header(9460, 9460, 1, 0), (b"IDAT", zlib.compress(bytes(9460 * 1184)))),
    "a line": encode(np.zeros((1, 60000), np.uint8), "PNG"),
    "a column": encode(np.zeros((60000, 1), np.uint8), "PNG"),
    "large jpeg": large_header(SMALL_JPEG, 65500, 65500),
    "many scans": many_scans(),
    "large tiles": tiff(BOMB, {256: 64, 257: 64, 259: 8, 322: 4096, 323: 4096, 324: 0, 325: len(BOMB)}),
    "floats": encode((X / 32).astype(np.float32), "TIFF"),
    "float map": encode((X / 32).astype(np.float32), "PPM"),
    "32 bits": encode((1000 * X).astype(np.int32), "TIFF"),
    "signed": tiff((1000 * X).astype("<i2").tobytes(), {258: 16, 339: 2}),
}
if features.check("avif"):
    avif = encode(RGB, "AVIF")
    UNFIT["broken avif"] = avif[: len(avif) // 2] + bytes(len(avif) // 2)


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """Put a stub of Ghostscript on the PATH, and return the path of the file that the stub creates when it starts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\necho 10\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow caches the path of Ghostscript
    return tmp_path / "started"


@pytest.fixture
def pillow():
    """Restore Pillow's list of formats after the test."""
    known = list(Image.ID)
    yield
    Image.ID[:] = known


def folder_of(root, contents):
    """Write a folder {train,val}/{ant,bee}: 12 valid images in class ant, and `contents` as files of class bee."""
    for name in ("ant", "bee"):
        (root / "train" / name).mkdir(parents=True)
    for i in range(12):
        (root / "train" / "ant" / f"{i}.png").write_bytes(SMALL_JPEG if i % 2 else encode(RGB, "PNG"))
    for name, content in contents.items():
        (root / "train" / "bee" / f"{name}.jpg").write_bytes(content)
    (root / "val").symlink_to("train")
    return root


def loader_of(root, path, workers=0, device=CPU, transform_device=None):
    """Return a loader, and an iterable over the loader's batches (uint8 images before normalization)."""
    if path == "evaluation":
        loader = evaluation_loader(open_split(str(root), "", "val"), DATA_CONFIG, device, workers, 4, 0, 1)
        return loader, loader.images
    dataset = open_split(str(root), "", "train", is_training=True)
    config = Config(global_batch_size=4, workers=workers, aug_repeats=0, augment_on_device=path == "device")
    batches = TrainingBatches(len(dataset) // 4 * 4, config, 4, 0, 1)
    loader = training_loader(dataset, config, DATA_CONFIG, device, batches, 2)
    return loader, loader.images


def named(log):
    return [record.args[0] for record in log.records if record.name == "vil.data.sources.images"]


# a few unreadable images do not stop a run


@pytest.mark.parametrize("path", PATHS)
def test_unreadable_images_are_counted_logged_and_replaced(tmp_path, path, caplog, ghostscript, monkeypatch):
    monkeypatch.setattr(image_decoding, "MOST_BYTES", 2**20)
    root = folder_of(tmp_path / "images", UNFIT | {"long": SMALL_JPEG + bytes(2**20)})
    os.mkfifo(root / "train" / "bee" / "pipe.png")
    for i in range(-(len(UNFIT) + 3) % 4 or 4):
        (root / "train" / "bee" / f"whole {i}.png").write_bytes(SMALL_JPEG)
    loader, batches = loader_of(root, path)
    start = time.monotonic()
    pixels, targets = (torch.cat(parts) for parts in zip(*batches))
    assert time.monotonic() - start < 30
    unfit = {f"bee/{name}.jpg" for name in (*UNFIT, "long")} | {f"bee/{name}.png" for name in ("pipe",)}
    assert sorted(named(caplog)) == sorted(unfit)
    counted = loader.take_unreadable()
    if path == "evaluation":
        assert (targets == UNREADABLE).sum() == counted == len(unfit)
        assert not pixels[targets == UNREADABLE].any()  # unreadable images are zeros
    else:
        assert counted >= len(unfit)
        assert set(targets.tolist()) == {0, 1}
    assert not ghostscript.exists()


def test_vil_viz_opens_images_with_the_limits_of_the_loaders(tmp_path, ghostscript, capsys):
    for name, content in UNFIT.items():
        (tmp_path / f"{name}.png").write_bytes(content)
    os.mkfifo(tmp_path / "pipe.png")
    for path in tmp_path.glob("*.png"):
        with pytest.raises(ConfigError, match="none of the files can be read"):
            viz.read_pictures([path])
        assert f"'{path}' cannot be read as an image: " in capsys.readouterr().err
    assert not ghostscript.exists()
    (tmp_path / "wide.png").write_bytes(SIXTEEN["png"])
    np.testing.assert_array_equal(viz.read_pictures([tmp_path / "wide.png"])[0][1], shown(SIXTEEN["png"]))


def test_decoding_stops_at_a_time_or_memory_limit_and_is_not_retried_after_a_timeout(tmp_path, caplog, monkeypatch):
    """A file that passes all checks of its structure is limited by a timeout and a memory limit for decoding."""
    with pytest.raises(
        images.UnfitImageError, match="MemoryError|not decoded"
    ):  # on a busy machine, the timeout can come before the memory limit
        images.read_image(io.BytesIO(sharing(2**22, 900)))
    process = sandbox.sandbox_of(os.getpid())._process
    if sys.platform == "linux" and process:  # None if a timeout has killed the process
        # read VmHWM, because ru_maxrss would also count the memory of the process that started the sandbox
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) < 2 * 2**20
    monkeypatch.setattr(sandbox_server, "SECONDS", 3)
    asked, decode = [], images.decode_in_sandbox
    monkeypatch.setattr(images, "decode_in_sandbox", lambda data, *rest: asked.append(data) or decode(data, *rest))
    comments = b"GIF89a" + bytes((8, 0, 8, 0, 0, 0, 0, 0x21, 0xFE)) + b"\1a" * 2**22
    loader, _ = loader_of(folder_of(tmp_path, {"gif": comments}), "evaluation")
    start = time.monotonic()
    for _ in range(3):
        assert sum((targets == UNREADABLE).sum() for _, targets in loader) == loader.take_unreadable() == 1
    assert time.monotonic() - start < 30
    assert len(asked) == 1
    assert named(caplog) == ["bee/gif.jpg"]
    assert "not decoded in 3 s" in caplog.text


def is_bounded(content):
    return image_structure.strip_metadata(content) is not None


@pytest.mark.parametrize("name", ["jpeg", "jpeg progressive", "png"])
def test_photographs_are_decoded_without_the_sandbox(name):
    """`strip_metadata` accepts photographs, whose decoding cost is bounded, so that they need no sandbox."""
    content = fuzz_images.corpus(name)[name]
    assert is_bounded(content)
    for scans in (100, 101) if name == "jpeg" else ():  # repeated scans of one component in a baseline frame
        scan = content[content.index(b"\xff\xda") :]
        several = content[: -len(scan)] + (scan[:4] + b"\1" + scan[5:]) * scans
        if scans > image_structure.MOST_SCANS:
            with pytest.raises(images.UnfitImageError, match="at most 100 scans, got 101"):
                is_bounded(several)
        else:
            assert is_bounded(several)
    twice = large_header(SMALL_JPEG, 24, 32, 2)  # a JPEG with two frame headers is decoded in the sandbox
    assert not is_bounded(twice)
    # a large progressive JPEG is decoded in the sandbox, because each of its scans may cover all pixels
    if name == "jpeg progressive":
        place = content.index(b"\xff\xc2") + 5
        large = content[:place] + struct.pack(">HH", 8000, 8000) + content[place + 4 :]
        assert not is_bounded(large)
        # A segment must start with an accepted marker.
        for odd in (b"\0\xe0", b"\xff\xff", b"\xff\xbf", b"\xff\xd9", b"\xff\xdf"):
            others = content[:2] + b"\xff\xe0\0\2" + odd + b"\0\2" + content[2:]
            assert not is_bounded(others)
    # data after a baseline image (a video or a second image) is not counted as scans
    for more in (b"\xff\xda" * 101, content[2:]) if name == "jpeg" else ():
        assert is_bounded(content + more)
    width, height = Image.open(io.BytesIO(content)).size
    for length, is_in_proportion in ((most := 2**20 + 8 * width * height, True), (most + 1, False)):
        assert is_bounded(content.ljust(length, b"\0")) == is_in_proportion
    for kind in (b"tEXt", b"IDAT") if name == "png" else ():
        # The file has `count` chunks, a header and an end chunk.
        for count in (most := image_structure.MOST_PARTS + 9, most + 1):
            many = png(header(8, 8), *[(kind, b"")] * count, (b"IEND", b""))
            assert is_bounded(many) == (count == most)


def with_segment(marker, note, jpeg=SMALL_JPEG):
    return jpeg[:2] + fuzz_images.segments(marker, note[:65533]) + jpeg[2:]


SHARED_TAGS = sharing(2**15, 2600)[:65000]  # a TIFF directory for which Pillow allocates 86 MB
METADATA = {
    "exif": with_segment(0xE1, b"Exif\0\0" + SHARED_TAGS),
    "exif twice": with_segment(0xE1, b"Exif\0\0", with_segment(0xE1, b"Exif\0\0")),
    "mpf": with_segment(0xE2, b"MPF\0" + SHARED_TAGS), "icc": with_segment(0xE2, b"ICC_PROFILE\0\1\xff" + bytes(9)),
    "photoshop": with_segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x03\xed\0\0\0\0\0\0" * 5000),
    "comment": with_segment(0xFE, b"x"),
    "of any name": with_segment(0xEB, SHARED_TAGS), "text in a png": text_bomb(),
    "profile in a png": encode(RGB, "PNG", icc_profile=bytes(2**21)),
    "exif in a png": png(header(32, 24), (b"eXIf", SHARED_TAGS), *(
        (b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in RGB))), (b"IEND", b""))),
    "transparency": encode(RGB, "PNG", transparency=(0, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata_changes_no_pixel_and_is_removed_before_decoding(name, monkeypatch):
    """Metadata of any name is removed before Pillow decodes the file, because pixels do not depend on metadata."""
    monkeypatch.setattr(images, "decode_in_sandbox", None)  # fail if the sandbox decodes the file
    content = METADATA[name]
    plain = RGB if content.startswith(b"\x89PNG") else np.asarray(Image.open(io.BytesIO(SMALL_JPEG)))
    np.testing.assert_array_equal(np.asarray(images.read_image(io.BytesIO(content))), plain)
    assert len(image_structure.strip_metadata(content)) < 5000


GIF = encode(RGB, "GIF")
# decoding takes longer than twice the timeout of one second below
SLOW_GIF = b"GIF89a" + bytes((8, 0, 8, 0, 0, 0, 0, 0x21, 0xFE)) + b"\1a" * 2**23


@contextlib.contextmanager
def sandbox_process(seconds=60, most_bytes=None):
    """Yield a sandbox process with an alarm after twice `seconds` and an address-space limit of `most_bytes`."""

    def limit():
        if most_bytes:
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))

    code = "import sys; from security.sandbox_server import serve; serve(sys.stdin.buffer, sys.stdout.buffer, {})"
    command = [sys.executable, "-c", code.format(seconds)]
    process = subprocess.Popen(
        command, cwd=ROOT / "vil", stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=limit
    )
    assert process.stdout.read(1) == b"\n"
    yield process
    process.stdin.close()
    process.kill()
    process.wait()
    process.stdout.close()


def decode_by(process, content):
    """Decode a file in a sandbox process, and return the image's size and pixels (empty if the process has ended)."""
    process.stdin.write(sandbox_server.REQUEST.pack(len(content), False) + content)
    process.stdin.flush()
    count, *size = sandbox_server.REPLY.unpack(process.stdout.read(sandbox_server.REPLY.size).ljust(16, b"\0"))
    return tuple(size), process.stdout.read(count)


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="Windows has no alarms")
def test_an_orphaned_sandbox_times_out_while_decoding_but_not_while_waiting():
    with sandbox_process(seconds=1) as process:
        assert decode_by(process, GIF)[0] == (32, 24)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        assert decode_by(process, GIF)[0] == (32, 24)
        assert decode_by(process, SLOW_GIF) == ((0, 0), b"")
        assert process.wait(60) == -signal.SIGALRM


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no such signals")
def test_a_sandbox_survives_the_signals_that_a_scheduler_sends_to_all_processes():
    with sandbox_process() as process:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            process.send_signal(number)
        assert decode_by(process, GIF)[0] == (32, 24)


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox limits its memory only on Linux")
@pytest.mark.parametrize("most_bytes", [None, 2**40, 2**30])
def test_a_sandbox_lowers_its_memory_limit_and_never_raises_it(most_bytes):
    with sandbox_process(most_bytes=most_bytes) as process:
        limit, _ = resource.prlimit(process.pid, resource.RLIMIT_AS)
        assert limit == most_bytes if most_bytes == 2**30 else sandbox_server.MEMORY < limit < 2**32
        assert decode_by(process, GIF)[0] == (32, 24)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows cannot stop a process")
def test_a_hanging_sandbox_times_out_and_a_killed_sandbox_raises_a_machine_error(monkeypatch):
    gif, own = encode(RGB, "GIF"), sandbox.sandbox_of(os.getpid())
    expected = own.decode(gif)
    if sys.platform == "linux":  # libraries' messages about untrusted files must not reach the terminal
        assert os.readlink(f"/proc/{own._process.pid}/fd/2") == os.devnull

    os.kill(own._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(sandbox_server, "SECONDS", 0.5)
        with pytest.raises(sandbox.LateImageError, match="not decoded in 0.5 s"):
            own.decode(gif)
    assert own.decode(gif) == expected

    os.kill(own._process.pid, signal.SIGSTOP)
    killing = threading.Timer(0.3, own._process.kill)  # simulates the out-of-memory killer
    killing.start()
    with pytest.raises(OSError, match="the image decoding process was killed") as killed:
        own.decode(gif)
    killing.join()
    assert is_machine_error(killed.value)
    assert images.read_image(io.BytesIO(gif)) == expected


def test_a_sandbox_that_does_not_start_raises(monkeypatch):
    sandbox.sandbox_of(os.getpid()).close()
    monkeypatch.setattr(sandbox.sys, "executable", "false")
    with pytest.raises(OSError, match="the image decoding process does not start; try to run: false -I -S -c "):
        images.read_image(io.BytesIO(encode(RGB, "GIF")))


HOSTILE_MODULES = ("warnings", "runpy", "io", "os", "struct", "signal", "PIL", "numpy", "sitecustomize", "resource")


def read_in(rank, folder, variable):
    os.chdir(folder)
    sys.path.insert(0, "")
    if variable:
        os.environ[variable] = "."
    return images.read_image("image.gif").size


@pytest.mark.parametrize("variable", [None, "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"])
def test_a_sandbox_imports_no_module_from_its_working_folder(tmp_path, variable):
    """A sandbox does not import modules of an untrusted working folder, whatever environment variables specify."""
    for name in HOSTILE_MODULES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "image.gif").write_bytes(encode(RGB, "GIF"))
    (ended,) = in_processes(1, read_in, tmp_path, variable)
    assert (ended.value, ended.status) == ((32, 24), 0), ended.errors
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="loaders do not fork there")
# Python 3.12 warns about a fork in a process with threads
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_during_decoding_does_not_deadlock():
    """A process that is forked while a thread decodes an image, as a loader's workers may be, can decode images."""
    gif = encode(RGB, "GIF")
    with sandbox.sandbox_of(os.getpid())._lock:
        forked = multiprocessing.get_context("fork").Process(target=images.read_image, args=[io.BytesIO(gif)])
        forked.start()
        forked.join(30)
    forked.kill()
    assert forked.exitcode == 0


def test_concurrent_threads_each_decode_their_own_image(monkeypatch):
    """Threads that decode images concurrently, as in vil.predict, each get their own image."""
    monkeypatch.setattr(sandbox_server, "SECONDS", 3)
    files = [encode(Image.new("RGB", (32 + i, 24), (i, 0, 0)), "GIF") for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda file: images.read_image(io.BytesIO(file)), files))
    assert [(picture.size, picture.getpixel((0, 0))) for picture in found] == [
        ((32 + i, 24), (i, 0, 0)) for i in range(24)
    ]


def test_links_out_of_the_dataset_and_duplicate_links_are_skipped(tmp_path, caplog):
    root, outside = folder_of(tmp_path / "images", {}), tmp_path / "elsewhere"
    for folder in (root / "more/inner", root / "more", outside):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "1.jpg").write_bytes(SMALL_JPEG)
    links = {"ant/self": ".", "ant/me": ".", "ant/up": "..", "ant/again": "../bee", "bee/all": "../..", "fly": "/"}
    links |= {"bee/out": outside, "bee/out.jpg": outside / "1.jpg", "bee/two.jpg": "../ant/1.png", "gnat": "../more"}
    (root / "one.jpg").write_bytes(SMALL_JPEG)
    links["bee/second.jpg"] = one = "../../one.jpg"
    (root / "train" / "bee" / ".#one.jpg").symlink_to(one)  # an editor's lock file is first in alphabetical order
    followed = {"bee/first.jpg": one, "beetle": "../more/inner", "cat": "../more", "bee/notes.txt": "/etc/passwd"}
    (root / "two.jpg").write_bytes(SMALL_JPEG)
    (root / "more" / "2.jpg").symlink_to("../two.jpg")  # a link inside a linked folder
    for name, target in (links | followed).items():
        (root / "train" / name).symlink_to(target)
    dataset = open_split(str(root), "", "train")
    names = {dataset.filename(i) for i in range(len(dataset))}
    linked = {"bee/first.jpg", "beetle/1.jpg", "cat/1.jpg", "cat/2.jpg"}
    assert names == {f"ant/{i}.png" for i in range(12)} | linked
    assert [message[: message.index(": ")] for message in caplog.messages] == [
        f"left out 11 links in '{root}/train', such as 'ant/again'"
    ]
    (tmp_path / "link").symlink_to(root)
    by_link = open_split(str(tmp_path / "link"), "", "train")
    assert {by_link.filename(i) for i in range(len(by_link))} == names
    (outside / "ant").mkdir()
    (outside / "ant" / "1.jpg").write_bytes(SMALL_JPEG)  # outside/1.jpg is in no class folder
    (root / "test").symlink_to(outside)  # a split's folder may be a link
    assert [path for path, _ in open_split(str(root), "", "test").reader.samples] == [f"{root}/test/ant/1.jpg"]
    assert {str(path.relative_to(root / "train")) for path in viz.image_files([root / "train"])} == names - linked


ERRORS = [
    *(ValueError, RuntimeError, IndexError, NotImplementedError, AttributeError, KeyError, TypeError, AssertionError),
    *(struct.error, zlib.error, MemoryError, RecursionError, OverflowError, EOFError, SyntaxError, OSError),
    *(tarfile.ReadError, Image.DecompressionBombError, Image.DecompressionBombWarning, UnicodeError),
]


class FailingFile(io.BytesIO):
    def __init__(self, error):
        super().__init__(SMALL_JPEG)
        self.error = error

    def read(self, *_):
        raise self.error


class Rows:
    """Reader with timm's interface. Each item is a file's content, or an error that is raised when the file is read."""

    def __init__(self, *files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        return (io.BytesIO(file) if isinstance(file, bytes) else FailingFile(file)), index

    def filename(self, index, *_):
        return f"file {index}"


def identity(image):
    return image


def readers(rows, transform=identity, sample=lambda header: TransformParameters(box=(0, 0, *header.size[::-1]))):
    dataset = ImageDataset("", reader=rows)
    yield ImageReader(dataset, transform, is_training=True)
    yield ImageReader(dataset, transform, is_training=False)
    yield EncodedReader(dataset, transform, True, sample)


ANY = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)


@ANY
def test_any_exception_of_a_decoder_counts_as_an_unreadable_image(error, caplog):
    training, evaluation, encoded = readers(Rows(error("of the file"), SMALL_JPEG))
    assert (training[0, 0][1], evaluation[0, 0][1], encoded[0, 0][1]) == (1, UNREADABLE, 1)
    for reader in (training, evaluation, encoded):
        assert reader.unreadable.count == 1
    assert caplog.text.count("file 0") == 3
    reason = "(of the file)" if issubclass(error, OSError) else f"({error.__name__}('of the file'))"
    assert caplog.text.count(reason) == 3


@ANY
def test_an_exception_of_a_transform_is_raised(error):
    def fail(*_):
        raise error("of the code")

    training, evaluation, _ = readers(Rows(SMALL_JPEG), transform=fail)
    *_, encoded = readers(Rows(SMALL_JPEG), sample=fail)
    for reader in (training, evaluation, encoded):
        with pytest.raises(error, match="of the code"):
            _ = reader[0, 0]
        assert reader.unreadable.count == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_system_exit_are_not_caught_while_reading(error):
    for reader in readers(Rows(error(), SMALL_JPEG)):
        with pytest.raises(error):
            _ = reader[0, 0]


class Million(Rows):
    def __init__(self, readable):
        self.readable, self.asked = readable, []

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        self.asked.append(index)
        return io.BytesIO(SMALL_JPEG if self.readable(index) else b""), index


def test_among_a_million_broken_files_training_fails_after_fewer_than_200_attempts():
    rows = Million(lambda index: False)
    reader = next(readers(rows))
    with pytest.raises(
        ConfigError,
        match="found no readable training image: .*the file is empty",
    ):
        _ = reader[999_990, 0]
    assert 100 <= len(set(rows.asked)) == len(rows.asked) < 200
    assert max(rows.asked) - min(rows.asked) > 900_000  # tried indices are spread over the whole split


def test_a_long_run_of_broken_files_is_replaced_by_the_next_readable_image(caplog):
    rows = Million(lambda index: index >= 50_000)
    assert next(readers(rows))[100, 0][1] >= 50_000
    # an unreadable image is replaced by a readable image among the next nine, if any
    assert next(readers(Million(lambda index: index >= 109)))[100, 0][1] == 109
    # the search for a readable image continues with the first image after the last image
    image, target = next(readers(Rows(encode(RGB, "PNG"), SMALL_JPEG, b"")))[2, 0]
    assert (target, np.array_equal(image, RGB)) == (0, True)
    caplog.clear()
    reader = next(readers(Rows(b"", b"", SMALL_JPEG)))
    assert reader[0, 0][1] == 2
    assert named(caplog) == ["file 0", "file 1"]
    reader.dataset.reader.files = [SMALL_JPEG]
    assert reader[0, 0][1] == 0  # the reader reads a repaired file again and returns its image


def test_a_worker_reports_a_split_without_readable_images_in_one_line(tmp_path):
    root = folder_of(tmp_path, {})
    for path in [*root.glob("train/*/*")]:
        path.with_name(f"OSError: {path.name}").write_bytes(b"none")
        path.unlink()
    before = set(multiprocessing.active_children())
    _, batches = loader_of(root, "training", workers=1)
    with pytest.raises(ConfigError) as caught:
        list(batches)
    # terminate workers, because PyTorch would wait up to five seconds for a worker to exit
    for worker in set(multiprocessing.active_children()) - before:
        worker.terminate()
        worker.join()
    start = "found no readable training image: tried 12 images, the last was 'ant/"
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_tried_three_times_is_counted_once_per_epoch(tmp_path):
    root = folder_of(tmp_path / "images", {"a line": UNFIT["a line"]})
    reader = ImageReader(open_split(str(root), "", "train"), None, is_training=False)
    for _ in range(2):
        assert [reader.read(12)[1] for _ in range(3)] == [UNREADABLE] * 3
        assert (reader.unreadable.take(), reader.unreadable.take()) == (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_files_are_counted_in_each_epoch_and_logged_once(tmp_path, workers):
    root = folder_of(tmp_path / "images", {name: UNFIT[name] for name in ("eps", "floats", "nothing", "a line")})
    log, logger = logging.FileHandler(tmp_path / "log"), logging.getLogger("vil.data.sources.images")
    logger.addHandler(log)  # workers that are forked later also write to this log
    try:
        loader, _ = loader_of(root, "evaluation", workers)
        for _ in range(3):
            assert sum((targets == UNREADABLE).sum() for _, targets in loader) == 4
            assert loader.take_unreadable() == 4
        assert loader.take_unreadable() == 0
    finally:
        logger.removeHandler(log)
    lines = (tmp_path / "log").read_text().splitlines()
    names = ("a line", "eps", "floats", "nothing")
    assert sorted(line.split("'")[1] for line in lines) == [f"bee/{name}.jpg" for name in names]


@pytest.mark.skipif(sys.platform != "linux", reason="loaders do not fork there")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_image_that_timed_out_in_one_worker_is_not_retried_by_another(caplog):
    """Workers share the list of files that timed out, because another worker may get a file in a later epoch."""
    unreadable, late = images.Unreadable(2), sandbox.LateImageError("not decoded")
    forked = multiprocessing.get_context("fork").Process(target=unreadable.add, args=(1, "name", late))
    forked.start()
    forked.join()
    with pytest.raises(sandbox.LateImageError):
        unreadable.refuse_late(1)
    unreadable.add(1, "name", late)
    assert (unreadable.count, named(caplog)) == (1, [])


def test_control_characters_in_file_names_are_escaped_in_logs(tmp_path, caplog):
    root = folder_of(tmp_path, {"\x1b[2J\nerror: all is well": b"none"})
    list(loader_of(root, "evaluation")[0])
    assert len(named(caplog)) == 1
    assert "all is well" in caplog.messages[0]
    assert caplog.messages[0].isprintable()


# Tests of image formats


def test_other_packages_in_a_worker_cannot_open_further_image_formats(tmp_path, ghostscript):
    """In a worker, other packages can open only the image formats that this package supports."""

    class Opening(Rows):
        def __getitem__(self, index):
            try:
                with pytest.raises(Image.DecompressionBombWarning):
                    Image.open(io.BytesIO(UNFIT["more pixels than pillow warns of"]))
                Image.open(io.BytesIO(EPS)).load()
            except OSError:
                return io.BytesIO(SMALL_JPEG), 7
            return io.BytesIO(SMALL_JPEG), 8

    dataset = ImageDataset("", reader=Opening(b"", b""))
    loader = evaluation_loader(dataset, DATA_CONFIG, CPU, 1, 2, 0, 1)
    assert [targets.tolist() for _, targets in loader] == [[7, 7]]
    assert not ghostscript.exists()


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF"])
def test_image_formats_are_detected_by_content_and_not_by_file_name(kind):
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow does not support AVIF")
    options = dict(save_all=True, append_images=[Image.new("RGB", (32, 24))]) if kind == "MPO" else {}
    content = encode(Image.fromarray(RGB), kind, **options)
    for reader in readers(Rows(content)):
        image, target = reader[0, 0]
        assert target == 0
        if not isinstance(image, EncodedImage):
            difference = np.abs(np.asarray(image).astype(int) - RGB)
            assert difference.mean() < {"GIF": 12, "JPEG": 3, "MPO": 3, "WEBP": 4, "AVIF": 3}.get(kind, 1e-9)


# Tests of image modes and colours


def shown(content):
    """Return an image's RGB pixels, and assert that the readers for workers and for the device agree."""
    training, evaluation, encoded = readers(Rows(content))
    images = [reader[0, 0][0] for reader in (training, evaluation, encoded)]
    assert {image.mode for image in images[:2]} == {"RGB"}
    if isinstance(images[2], EncodedImage):
        height, width = images[2].size
        images[2] = np.frombuffer(images[2].data, np.uint8).reshape(3, height, width).transpose(1, 2, 0)
    first, *others = (np.asarray(image) for image in images)
    for other in others:
        np.testing.assert_array_equal(first, other)
    assert [reader.unreadable.count for reader in (training, evaluation, encoded)] == [0, 0, 0]
    return first


WIDE = GREY.astype(np.uint16) * 257
PAIRS = (GREY.astype(int) * 4095 // 255).reshape(-1, 2)  # two 12-bit values, packed into three bytes below
PACKED = np.stack([PAIRS[:, 0] >> 4, (PAIRS[:, 0] & 15) << 4 | PAIRS[:, 1] >> 8, PAIRS[:, 1] & 255], axis=-1)


def wide_png(colour, channels):
    rows = b"".join(b"\0" + np.repeat(row, channels).astype(">u2").tobytes() for row in WIDE)
    return png(header(32, 24, 16, colour), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))


SIXTEEN = {
    "png": encode(WIDE, "PNG"),
    "png shifted": encode(GREY.astype(np.uint16) << 8, "PNG"),
    "pgm": encode(WIDE, "PPM"),
    "plain pgm": f"P2 32 24 65535\n{' '.join(map(str, WIDE.ravel()))}\n".encode(),
    "pgm of 1000": b"P5 32 24 1000\n" + np.round(GREY / 255 * 1000).astype(">u2").tobytes(),
    "tiff": encode(WIDE, "TIFF"),
    "tiff compressed": encode(WIDE, "TIFF", compression="tiff_adobe_deflate"),
    "tiff big-endian": tiff(WIDE.astype(">u2").tobytes(), {258: 16}, ">"),
    "tiff white is zero": tiff((65535 - WIDE).astype("<u2").tobytes(), {258: 16, 262: 0}),
    "tiff of a tile that is larger": tiff(WIDE.astype("<u2").tobytes(), {258: 16, 322: 64, 323: 64}),
    "tiff of 12 bits": tiff(PACKED.astype(np.uint8).tobytes(), {258: 12}),
    "png rgb": wide_png(colour=2, channels=3),
    "png grey and alpha": wide_png(colour=4, channels=2),
}


@pytest.mark.parametrize("kind", SIXTEEN)
def test_images_of_16_bits_are_scaled_to_8_bits(kind):
    expected = np.repeat(GREY[..., None], 3, axis=-1).astype(int)
    assert np.abs(shown(SIXTEEN[kind]) - expected).max() <= (1 if "1" in kind else 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_image_modes_keep_their_colours(mode, kind):
    """Readers keep the colours of images of every mode, and ignore alpha and transparency."""
    colours = np.array([[0, 0, 0], [255, 255, 255]] if mode in ("1", "L", "LA") else [[255, 0, 0], [0, 0, 255]])
    picture = colours[(X + Y) // 8 % 2].astype(np.uint8)
    try:
        image = Image.fromarray(picture).convert("P" if mode == "PA" else mode)
        if mode in ("LA", "RGBA"):
            image.putalpha(Image.fromarray(GREY))
        options = dict(transparency=0) if (mode, kind) == ("P", "PNG") else {}
        content = encode(image.convert(mode), kind, **options)
    except (OSError, ValueError):
        pytest.skip(f"Pillow cannot write {mode} images as {kind}")
    np.testing.assert_array_equal(shown(content), picture)


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "MPO", "PNG", "WEBP"])
def test_files_with_several_images_yield_the_first(kind):
    first, second = Image.new("RGB", (32, 24), (255, 0, 0)), Image.new("RGB", (32, 24), (0, 255, 0))
    pixels = shown(encode(first, kind, save_all=True, append_images=[second]))
    assert np.abs(pixels - np.array([255, 0, 0])).max() <= 4


def test_panoramas_are_accepted_up_to_the_limits_on_pixels_and_aspect_ratio(monkeypatch):
    for shape in ((10, 1000), (1000, 10)):
        panorama = encode(np.zeros(shape, np.uint8), "PNG")
        monkeypatch.setattr(image_decoding, "MOST_PIXELS", 10_000)
        assert np.asarray(image_decoding.decode(io.BytesIO(panorama))).shape == (*shape, 3)
        monkeypatch.setattr(image_decoding, "MOST_PIXELS", 9_999)
        with pytest.raises(images.UnfitImageError, match=f"^image must have at most 9999.*, got {shape[1]}x{shape[0]}"):
            image_decoding.open_image(io.BytesIO(panorama))
    with pytest.raises(images.UnfitImageError, match="^aspect ratio must be at most 100, got 1000x9 pixels"):
        image_decoding.open_image(io.BytesIO(encode(np.zeros((9, 1000), np.uint8), "PNG")))
    monkeypatch.undo()
    # tiles of 4096 x 2048 pixels fit into the image
    halves = {256: 4096, 257: 4096, 259: 8, 322: 4096, 323: 2048, 324: 0, 325: len(BOMB)}
    assert image_decoding.open_image(io.BytesIO(tiff(BOMB, halves))).size == (4096, 4096)


# Tests of shards


def shard(path, samples):
    with tarfile.open(path, "w") as tar:
        for name, content in samples.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def write_shards(root, contents, train=None):
    """Write {train,validation}-0.tar: 8 valid images of class 1, and `contents` in class 2, or `train` for training."""
    whole = {f"whole{i}": SMALL_JPEG for i in range(8)}
    splits = {}
    for split, files in (("train", train or whole | contents), ("validation", whole | contents)):
        samples = {}
        for name, content in files.items():
            samples |= {f"{name}.jpg": content, f"{name}.cls": b"12"[name in contents :][:1]}
        shard(root / f"{split}-0.tar", samples)
        lengths = dict(num_samples=len(files), shard_lengths=[len(files)])
        splits[split] = dict(name=split, filenames=[f"{split}-0.tar"], **lengths)
    (root / "_info.json").write_text(json.dumps(dict(splits=splits)))
    options = dict(dataset="wds/x", num_classes=4, global_batch_size=8, workers=0, aug_repeats=0, epochs=1)
    return Config(data_dir=str(root), **options)


def test_images_in_shards_are_decoded_like_files(tmp_path, caplog, ghostscript, pillow):
    config = write_shards(tmp_path, UNFIT | {"wide": SIXTEEN["png"]})
    train, val, _ = open_splits(config)
    loader = evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1)
    images, targets = (torch.cat(parts) for parts in zip(*loader.images))
    assert collections.Counter(targets.tolist()) == {1: 8, 2: 1, UNREADABLE: len(UNFIT)}
    # a 16-bit image must not be clipped to white
    assert images[targets == 2][0, :, 16, 16].tolist() == pytest.approx([GREY[12, 16]] * 3, abs=6)
    assert loader.take_unreadable() == len(UNFIT)
    assert {name.rpartition(": ")[2] for name in named(caplog)} == set(UNFIT)
    batches = TrainingBatches(len(train), config, 8, 0, 1)
    unmixed = dataclasses.replace(config, mixup=0.0, cutmix=0.0)
    loader = training_loader(train, unmixed, DATA_CONFIG, CPU, batches, 4)
    targets = torch.cat([batch.targets for batch in loader.epoch(0)])
    assert set(targets.tolist()) == {1, 2}
    assert len(targets) == batches.steps * 8
    assert loader.take_unreadable() >= len(UNFIT)
    assert not ghostscript.exists()


def test_an_epoch_of_shards_counts_the_images_of_all_ranks(tmp_path, monkeypatch, pillow):
    # simulate one of two ranks, each of which reads half of the samples
    monkeypatch.setattr("vil.data.sources.shards.Shards.__len__", lambda shards: shards.num_samples // 2)
    options = SMALL | dict(global_batch_size=8, output=str(tmp_path), experiment="run")
    run = Trainer(dataclasses.replace(write_shards(tmp_path, {}), **options), CPU, 0, 1)
    assert run.data.batches.num_images == 8


def test_shards_without_a_readable_image_stop_training(tmp_path, pillow):
    config = write_shards(tmp_path, {}, train={f"broken{i}": b"none" for i in range(16)})
    train, _, _ = open_splits(config)
    batches = TrainingBatches(len(train), config, 8, 0, 1)
    loader = training_loader(train, config, DATA_CONFIG, CPU, batches, 2)
    with pytest.raises(ConfigError, match="no image of the training split can be read"):
        list(loader.epoch(0))
    assert list(loader.epoch(0, 2)) == []  # an epoch that is resumed after its last step has no batches


@pytest.mark.parametrize("place", ["data_dir", "train_split", "val_split"])
@pytest.mark.parametrize("dataset", ["wds/x", "WDS/x"])
def test_a_shell_command_as_a_shard_is_rejected_and_not_run(tmp_path, place, dataset, pillow):
    config = write_shards(tmp_path, {})
    config.dataset = dataset
    command = f"{'pipe' if dataset == 'wds/x' else ' PIPE'}:touch {tmp_path}/ran; cat {tmp_path}/train-0.tar"
    setattr(config, place, command)
    with pytest.raises(ConfigError, match=r"(?i)data_dir and split must not be commands, got .*pipe:touch"):
        open_splits(config)
    assert not (tmp_path / "ran").exists()


def test_shards_are_read_in_webdatasets_secure_mode(tmp_path, monkeypatch, pillow):
    """Names in _info.json start no program, and an absolute path is not opened, even inside the dataset folder."""
    import webdataset
    from webdataset.gopen import gopen_schemes

    config = write_shards(tmp_path, {})
    info = json.loads((tmp_path / "_info.json").read_text())
    files = info["splits"]["validation"]["filenames"]
    files += [f"pipe:touch {tmp_path}/ran", f"|touch {tmp_path}/ran", str(tmp_path / "train-0.tar")]
    (tmp_path / "_info.json").write_text(json.dumps(info))
    _, val, _ = open_splits(config)
    monkeypatch.setattr(webdataset.utils, "enforce_security", False)  # a spawned worker does not inherit this flag
    monkeypatch.delitem(gopen_schemes, "local-shards")
    targets = torch.cat([targets for _, targets in evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1)])
    assert len(targets) == 8
    for url in (f"pipe:touch {tmp_path}/ran", "/etc/passwd", "file:/etc/passwd"):
        with pytest.raises(ValueError, match="secur|unsafe|handler"):
            webdataset.gopen(url)
    assert not (tmp_path / "ran").exists()


def test_gzipped_shards_are_read_completely(tmp_path, pillow):
    config = write_shards(tmp_path, {f"{i}": SMALL_JPEG for i in range(40)})
    info = json.loads((tmp_path / "_info.json").read_text())
    for split in info["splits"].values():
        (name,) = split["filenames"]
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        (tmp_path / name).unlink()
        split["filenames"] = [f"{name}.gz"]
    (tmp_path / "_info.json").write_text(json.dumps(info))
    _, val, _ = open_splits(config)
    targets = torch.cat([targets for _, targets in evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1)])
    assert collections.Counter(targets.tolist()) == {1: 8, 2: 40}


def pax(name, size=0, type=tarfile.REGTYPE, **headers):
    member = tarfile.TarInfo(name)
    member.pax_headers, member.size, member.type = headers, size, type
    return member.tobuf(tarfile.PAX_FORMAT)


def oldest_sparse(name):
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[148:156], header[483:495] = tarfile.GNUTYPE_SPARSE, b" " * 8, b"00777777777\0"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


SPARSE = {f"GNU.sparse.{key}": value for key, value in (("size", f"{2**40}"), ("numblocks", "1"))}
GLOBAL = tarfile.TarInfo.create_pax_global_header({f"{i}": "x" for i in range(50_000)})
TARS = {  # tar files for which Python's tarfile may need gigabytes
    "sparse 0.1": pax("a/1.jpg", **SPARSE | {"GNU.sparse.map": f"{2**40},0"}),
    "sparse 1.0": pax("a/1.jpg", **SPARSE | {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}) + b"9\n" * 256,
    "sparse of GNU": oldest_sparse("a/1.jpg"),
    "global header": GLOBAL + b"".join(pax(f"a/{i}.jpg") for i in range(500)),
    "in a tar file": pax("a.tar", size=len(pax("a/1.jpg", **SPARSE))) + pax("a/1.jpg", **SPARSE),
}


@pytest.mark.parametrize("name", TARS)
def test_tars_with_sparse_members_or_huge_headers_are_rejected(tmp_path, name, pillow, caplog):
    (tmp_path / "train.tar").write_bytes(TARS[name] + bytes(1024))
    with pytest.raises(
        ConfigError,
        match="cannot open the split 'train' of .*: (sparse files in a tar|extended header .* too large)",
    ):
        open_split(str(tmp_path), "", "train")
    if name == "in a tar file":  # the reader of shards does not open nested tar files
        return
    write_shards(tmp_path, {})
    for content in (TARS[name], gzip.compress(TARS[name])):
        (tmp_path / "validation-0.tar").write_bytes(content.ljust(2**17, b"\0"))
        _, val, _ = open_splits(Config(data_dir=str(tmp_path), dataset="wds/x", num_classes=4))
        assert [*evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1)] == []


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (dict(filenames=["../shards.tar"]), r"the shard '\.\./shards.tar' must be a regular file in "),
        (dict(filenames=["validation-0.tar", "./validation-0.tar"]), "'./validation-0.tar' is listed twice in "),
        (dict(filenames=["link.tar"]), "the shard 'link.tar' must be a regular file in "),
        (dict(filenames=["pipe.tar"]), "the shard 'pipe.tar' must be a regular file in "),
        (dict(filenames=["gone-0.tar", "gone-1.tar"]), "none of the 2 shards in .* exists: check --data-dir"),
        (dict(num_samples=61), "must list 0 to 60 samples for shards of this size, got 61"),
        (dict(num_samples="many"), "must list 0 to 60 samples for shards of this size, got 'many'"),
        (dict(num_samples=-1), "must list 0 to 60 samples for shards of this size, got -1"),
        (dict(filenames=7), "cannot open the split 'validation' of "),
        (dict(note="x" * 9000), "must list the split 'train'"),
    ],
)
def test_metadata_of_shards_is_validated(tmp_path, info, message, pillow, monkeypatch):
    monkeypatch.setattr("vil.data.sources.shards.MOST_INFO", 2**13)
    (tmp_path / "shards").mkdir()
    config = write_shards(tmp_path / "shards", {})
    shard(tmp_path / "shards.tar", {"a.jpg": SMALL_JPEG, "a.cls": b"1"})
    (tmp_path / "shards" / "link.tar").symlink_to("../shards.tar")
    os.mkfifo(tmp_path / "shards" / "pipe.tar")
    whole = json.loads((tmp_path / "shards" / "_info.json").read_text())
    whole["splits"]["validation"] |= dict(num_samples=60, filenames=["train-0.tar", "validation-0.tar"])
    (tmp_path / "shards" / "_info.json").write_text(json.dumps(whole))
    (tmp_path / "link").symlink_to("shards")
    for data_dir in (config.data_dir, str(tmp_path / "link")):
        assert len(open_splits(dataclasses.replace(config, data_dir=data_dir))[1]) == 60
    whole["splits"]["validation"] |= info
    (tmp_path / "shards" / "_info.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=message):
        open_splits(config)


def test_large_and_broken_samples_are_counted_and_logged(tmp_path, caplog, monkeypatch, pillow):
    for name, most in (("IMAGE", 2**16), ("LABEL", 2**13), ("INFO", 2**13)):
        monkeypatch.setattr(f"vil.data.sources.shards.MOST_{name}", most)
    stream = type("Stream", (io.BytesIO,), dict(seek=None))  # a download stream does not support seek
    monkeypatch.setattr("vil.data.sources.shards.open_file", lambda path: stream(pathlib.Path(path).read_bytes()))
    config = write_shards(tmp_path, {})
    samples = {"large": (bytes(2**16 + 1), b"1"), "long": (SMALL_JPEG, b"1" * 5000)}
    samples |= {"unlabelled": (SMALL_JPEG, b"-1")}
    samples |= {"label": (SMALL_JPEG, b" " * 2**13 + b"1"), "whole": (SMALL_JPEG.ljust(2**16, b"\0"), b"3")}
    members = {f"{name}.{suffix}": samples[name][i] for name in samples for i, suffix in enumerate(("jpg", "cls"))}
    pickle = f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR.".encode()
    members = {"README": b"", "__notes__/a.jpg": SMALL_JPEG} | members
    shard(tmp_path / "validation-0.tar", members | {"whole.pyd": pickle})
    with tarfile.open(tmp_path / "validation-0.tar", "a") as tar:
        folder = tarfile.TarInfo("folder.jpg")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        tar.addfile(tarfile.TarInfo("whole.cls"))  # the sample has this key twice
    info = json.loads((tmp_path / "_info.json").read_text())
    for kind in (notes := (b"x", b"g", b"X", b"L", b"K")):  # member types that tarfile reads into memory as a whole
        shard(file := tmp_path / f"{kind.decode()}.tar", {})
        with tarfile.open(file, "a") as tar:
            member = tarfile.TarInfo("notes")
            member.type, member.size = kind, 2**28
            tar.addfile(member)
        info["splits"]["validation"]["filenames"].append(file.name)
    endless = tarfile.TarInfo("endless.txt")  # the header claims 2^60 bytes, and the file ends after the header
    endless.size = 2**60
    (tmp_path / "endless.tar").write_bytes(endless.tobuf())
    info["splits"]["validation"]["filenames"].append("endless.tar")
    # sample b is damaged or truncated below
    half = {"a.cls": b"2", "a.jpg": SMALL_JPEG, "b.cls": b"1", "b.jpg": SMALL_JPEG}
    for name, members in (("flipped", half), ("cut", half), ("next", {"b.jpg": SMALL_JPEG})):
        shard(file := tmp_path / f"{name}.tar", members)
        with tarfile.open(file) as tar:
            header = tar.getmember("b.jpg").offset
        whole = file.read_bytes()
        file.write_bytes({"flipped": whole.replace(b"b.jpg", b"B.jpg"), "cut": whole[: header + 99]}.get(name, whole))
        info["splits"]["validation"]["filenames"].append(file.name)
    (tmp_path / "_info.json").write_text(json.dumps(info))
    _, val, _ = open_splits(config)
    targets = torch.cat([targets for _, targets in evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1)])
    assert sorted(targets.tolist()) == [UNREADABLE] * 6 + [2, 2, 3]
    assert {name.rpartition(": ")[2] for name in named(caplog)} == {*samples, "b"} - {"whole", "unlabelled"}
    assert f"{tmp_path}/validation-0.tar: large" in caplog.text
    assert "local-shards" not in caplog.text
    assert caplog.text.count("because a member has a broken header") == 2
    assert caplog.text.count(f"extended header of a member is too large: {2**28} bytes") == len(notes)
    again, _ = open_evaluation_split(str(tmp_path), "wds/x", "validation", 4)  # as `vil validate` opens a split
    targets = torch.cat([targets for _, targets in evaluation_loader(again, DATA_CONFIG, CPU, 0, 4, 0, 1)])
    assert sorted(targets.tolist()) == [UNREADABLE] * 6 + [2, 2, 3]
    assert not (tmp_path / "ran").exists()


def test_samples_with_an_out_of_range_class_stop_evaluation_and_are_skipped_in_training(tmp_path, caplog, pillow):
    config = write_shards(tmp_path, {"last": SMALL_JPEG})
    config.num_classes = 2  # the samples have the classes 1 and 2
    train, val, _ = open_splits(config)
    with pytest.raises(ConfigError, match="classes of shards must be 0 to 1, got 2 in .*validation-0.tar: number the"):
        list(evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1))
    assert {target for _, target in train} == {1}
    assert "the class index must be below 2, got 2" in caplog.text


@pytest.mark.skipif(not shutil.which("curl"), reason="webdataset downloads shards with curl")
@pytest.mark.parametrize("fails", ["truncated", "missing"])
def test_a_failed_download_of_a_shard_raises_a_machine_error(tmp_path, fails, pillow):
    write_shards(tmp_path, {})
    whole = (tmp_path / "validation-0.tar").read_bytes()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path))

        def do_GET(self):
            if not self.path.endswith("validation-0.tar"):
                super().do_GET()
            elif fails == "missing":
                self.send_error(404)
            else:
                self.send_response(200)
                self.send_header("Content-Length", str(len(whole)))
                self.end_headers()
                self.wfile.write(whole[:2048])

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            url = f"http://localhost:{server.server_address[1]}"
            val, _ = open_evaluation_split(url, "wds/x", "validation", 4)
            with pytest.raises(MachineError, match=r"^cannot read http://.*validation-0.tar: .*exit (18|22|56)"):
                list(evaluation_loader(val, DATA_CONFIG, CPU, 0, 4, 0, 1))
        finally:
            server.shutdown()


def test_shuffling_equals_webdatasets_up_to_a_memory_limit(tmp_path, monkeypatch, pillow):
    from webdataset.filters import _shuffle

    reader = open_splits(write_shards(tmp_path, {}))[0].reader
    reader.worker_seed, samples = 5, [dict(jpg=bytes(9), number=i) for i in range(60)]
    reader.set_epoch(3)
    for sizes in ((6, 8), (20, 8)):
        reader.sample_shuffle_size, reader.sample_initial_size = sizes
        expected = list(_shuffle(iter(samples), *sizes, random.Random(5 + 3)))
        assert list(reader._shuffled(iter(samples))) == expected
    monkeypatch.setattr("vil.data.sources.shards.MOST_SHUFFLED", 50)
    source = iter(samples)
    waiting = [60 - source.__length_hint__() - given for given, _ in enumerate(reader._shuffled(source), start=1)]
    # 5 samples of 9 bytes fit into 50 bytes, and one sample more may wait while another is returned.
    assert (len(waiting), max(waiting)) == (60, 50 // 9 + 1)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("torch/cifar10", r"dataset must be one of wds/\.\.\., hfds/\.\.\., .*got 'torch/cifar10'"),
        ("cifar10", r"dataset must be one of .*, tfds/\.\.\., got 'cifar10': leave out --dataset"),
        ("hfds/", "dataset must be one of .*got 'hfds/'"),
        ("hfds/x", r"--dataset hfds/x needs additional packages: pip install datasets \(.*missing"),
        ("tfds/y", "cannot open the split 'train' of tfds/y: OSError: no server"),
    ],
)
def test_an_error_about_a_dataset_that_cannot_be_opened_names_the_dataset(dataset, message, pillow, monkeypatch):
    def fail(name, **kwargs):
        raise ModuleNotFoundError("datasets is missing") if name == "hfds/x" else OSError("no server")

    monkeypatch.setattr("vil.data.sources.splits.create_dataset", fail)
    with pytest.raises(ConfigError, match=f"^{message}"):
        open_split(None, dataset, "train")


def test_datasets_of_other_packages_are_opened_by_timm(monkeypatch, pillow):
    monkeypatch.setattr("vil.data.sources.splits.create_dataset", lambda *names, **options: (*names, options))
    monkeypatch.setattr("vil.data.sources.splits.class_names", lambda _: {})
    assert open_split("/cache", "hfds/X/y", "test", seed=3) == ("hfds/X/y", dict(root="/cache", split="test", seed=3))
    # Pillow accepts only FORMATS, even for images that other packages open.
    assert tuple(Image.ID) == image_decoding.FORMATS


def test_shards_at_a_url_are_opened_by_timm(monkeypatch, pillow):
    monkeypatch.setattr(
        "vil.data.sources.shards.ReaderWds.__init__", lambda self, root, **_: setattr(self, "asked", root)
    )
    assert open_split("https://a.b/c", "wds/x", "train").reader.asked == "https://a.b/c"


@pytest.mark.parametrize("root", [None, "cache"])
def test_folders_next_to_a_dataset_of_another_package_are_not_classes(root, tmp_path, monkeypatch, pillow):
    (tmp_path / "cache" / "downloads").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    reader = SimpleNamespace(root=root, class_to_idx={"cat": 0, "dog": 1})
    monkeypatch.setattr(
        "vil.data.sources.splits.create_dataset", lambda *names, **options: SimpleNamespace(reader=reader)
    )
    assert open_splits(Config(data_dir=root, dataset="hfds/x"))[2] == 2


# Tests of class names


def test_missing_validation_classes_are_logged_with_escaped_names(tmp_path, caplog):
    for i in range(9):
        for split in ("train", "val"):
            if split == "train" or i not in (2, 4, 5, 6, 7, 8):
                (tmp_path / split / f"class {i}\x1b[2J").mkdir(parents=True)
                (tmp_path / split / f"class {i}\x1b[2J" / "1.jpg").write_bytes(SMALL_JPEG)
    (tmp_path / "val" / "class 8\x1b[2J").mkdir()  # an empty class folder
    config = Config(data_dir=str(tmp_path))
    _, val, num_classes = open_splits(config)
    assert num_classes == 9
    assert [val.reader[i][1] for i in range(3)] == [0, 1, 3]
    missing = ", ".join(rf"'class {i}\x1b[2J'" for i in (2, 4, 5, 6, 7))
    assert [message.partition("has ")[2] for message in caplog.messages] == [
        f"no images of 6 of the 9 classes, so accuracies say nothing about {missing}, ..."
    ]
    caplog.clear()
    config.val_split = "train"
    open_splits(config)
    assert not caplog.messages
    config.val_split = "none"
    with pytest.raises(ConfigError, match="it has 'train', 'val'"):
        open_splits(config)
    (tmp_path / "train" / "none\x1b[2J").mkdir()
    with pytest.raises(ConfigError, match=r"have no images: 'none\\x1b\[2J'\. Copy"):
        open_splits(config)


# Tests of the device's decoder


def batches_on_device(root):
    """Return the pixels of one epoch of the device's loader, and the number of unreadable images."""
    loader, batches = loader_of(root, "device")
    return torch.cat([images for images, _ in batches]).float(), loader.take_unreadable()


@pytest.mark.parametrize("fault", [MemoryError, "another size"])
def test_the_cpu_decodes_images_that_the_device_rejects_or_decodes_to_another_size(tmp_path, fault, monkeypatch):
    monkeypatch.setattr(encoded, "SMALL", 0)
    root, decode = folder_of(tmp_path, {}), decoding._decode_all
    whole, _ = batches_on_device(root)

    def decode_wrongly(files, *arguments, **keywords):
        if fault != "another size":
            raise fault("of the file")
        return [image[:, 9:] for image in decode(files, *arguments, **keywords)]

    monkeypatch.setattr("vil.data.plan.decoder_is_missing", lambda device: None)
    monkeypatch.setattr(decoding, "_decode_all", decode_wrongly)
    images, unreadable = batches_on_device(root)
    assert unreadable == 0
    assert (images - whole).abs().mean() < 2.5


def test_large_images_and_jpegs_with_two_frame_sizes_are_decoded_by_workers(monkeypatch):
    """Workers decode JPEGs of large or two frame sizes, because a device may allocate memory for a claimed size."""
    large = encode(Image.new("L", (4100, 4100)), "JPEG")
    for content, on_device in ((SMALL_JPEG, True), (large, False), (large_header(SMALL_JPEG, 9000, 9000, 2), False)):
        *_, reader = readers(Rows(content, encode(RGB, "PNG")))
        assert isinstance(reader[0, 0][0], EncodedImage) == on_device
    monkeypatch.setattr(image_decoding, "MOST_BYTES", 100)
    with pytest.raises(images.UnfitImageError, match="at most 100 bytes"):
        reader._content(0)


def test_a_batch_is_decoded_in_parts_within_a_pixel_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(encoded, "SMALL", 0)
    root = folder_of(tmp_path, {f"{i}": encode(Image.fromarray(RGB).resize((40 + i, 30)), "JPEG") for i in range(8)})
    whole, _ = batches_on_device(root)
    decode, most = preparation.decode, []

    def note(files, device):
        images = decode(files, device)
        most.append(sum(image[0].numel() for image in images) - images[-1][0].numel())
        return images

    monkeypatch.setattr(preparation, "decode", note)
    monkeypatch.setattr(preparation, "PIXELS_AT_ONCE", 2000)
    parts, _ = batches_on_device(root)
    assert len(most) > 8
    assert max(most) <= 2000
    assert (parts - whole).abs().mean() < 0.1  # batches of other sizes sum in another order


# Tests of randomly damaged files


@pytest.fixture(scope="module")
def damaged_files(tmp_path_factory):
    root = tmp_path_factory.mktemp("damaged")
    fuzz_images.write_files(root, count=300, seed=random.SystemRandom().randrange(2**32) if "FUZZ" in os.environ else 0)
    return root


@pytest.mark.parametrize("path", PATHS)
def test_damaged_files_crash_nothing_and_use_little_memory(damaged_files, path):
    """Decoding 300 damaged files stays below 1000 MiB. `python tools/fuzz_images.py` decodes more damaged files."""
    outcome = fuzz_images.in_a_child(damaged_files, path, CPU, 2.5)
    assert outcome.ended_by == ""
    assert outcome.megabytes < 1000
    whole = {name for name in outcome.names if name.startswith("whole")}
    assert whole == {"whole/ppm pfm.jpg", "whole/tiff float.jpg"}
    broken = {name for name in outcome.names if name.startswith("damaged")}
    assert 100 < len(broken) < 290
    if path == "evaluation":
        assert outcome.images == outcome.files
        assert outcome.unreadable == len(outcome.names)
        missed = {str(path.relative_to(damaged_files / "train")) for path in not_by_pillow(damaged_files)} - broken
        assert len(missed) < 10  # Pillow fails on damaged metadata, which the loaders do not read
        assert all(name.endswith((".jpg", ".png")) for name in missed)
    else:
        assert outcome.images >= outcome.files - 16
        assert outcome.unreadable >= len(outcome.names)


@pytest.mark.parametrize("path", ["evaluation", "viz"])
def test_slow_and_large_files_crash_nothing_and_use_limited_time_and_memory(tmp_path, path):
    fuzz_images.write_files(tmp_path, count=16, seed=5, is_slow=True)
    outcome = fuzz_images.in_a_child(tmp_path, path, CPU, 2.5)
    assert outcome.ended_by == ""
    assert 0 < outcome.slowest[0] < 20
    assert outcome.megabytes < 2000
    assert 5 < outcome.unreadable < 16


def not_by_pillow(root):
    for path in (root / "train" / "damaged").iterdir():
        try:
            Image.open(path).convert("RGB")
        except Exception:
            yield path
