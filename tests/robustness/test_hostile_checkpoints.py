"""Tests of untrusted checkpoints and configs: harmful contents are rejected with a one-line message."""

import copy
import functools
import io
import json
import math
import os
import pathlib
import pickle
import random
import re
import struct
import sys
import tarfile
import threading
import zipfile
from types import SimpleNamespace
from unittest import mock

import pytest
import timm
import torch
import yaml
from processes import ROOT, SMALL, call
from timm.optim import create_optimizer_v2

import vil
from vil import checkpoint, state_dicts, weight_files
from vil.checkpoint import CheckpointError
from vil.cli import train as training
from vil.cli import validate, viz
from vil.config import Config, ConfigError, load_config
from vil.data.sources.splits import open_split
from vil.devices import known_device
from vil.factory import create_model
from vil.security.checkpoint_options import check_preprocessing, options_of_checkpoint
from vil.training.command import FORESEEN
from vil.training.history import history_of
from vil.training.state import check_optimizer
from vil.training.trainer import Trainer
from vil.weight_files import BrokenCheckpointError

COUNT = int(os.environ.get("FUZZ", 60))
KWARGS = SMALL["model_kwargs"]
SAME = dict(num_classes=4, img_size=16, **KWARGS)
CPU = torch.device("cpu")
POOL = [None, -1, 0, 1, 10**30, 1.5, math.nan, -math.inf, "", "x", "../../x", "pipe:id", [], [[]], {}, {"a": 1}, True]
POOL += [1j, torch.zeros(3), torch.zeros(()), torch.full((2, 2), torch.nan), b"bytes", (1, 2)]
PARTS = ["config", "label_names", "history", "progress", "optimizer", "state_dict", "state_dict_ema", "version"]


@pytest.fixture(scope="module")
def small():
    """Return the state dict of a small model."""
    torch.manual_seed(0)
    return timm.create_model("vil_tiny", **SAME).state_dict()


@pytest.fixture
def write(tmp_path, small, image_folder):
    """Return a function that writes a checkpoint with changed options or parts, as .pt or .safetensors file."""

    def write(options=(), container="pt", **parts):
        config = dict(model="vil_tiny", model_kwargs=KWARGS, img_size=16, num_classes=4, data_dir=str(image_folder))
        config, path = config | dict(options), tmp_path / f"given.{container}"
        if container == "safetensors":
            texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in parts.items()}
            path.write_bytes(weight_files.pack_weights(small, config, texts))
        else:
            state = dict(config=config, history=[], progress={}, scheduler={}, optimizer={}, state_dict=small)
            checkpoint.save_checkpoint(state | parts, path)
        return path

    return write


@pytest.fixture
def error_of_validation():
    """Return a function that runs validate.py or another command, and returns the command's one-line error."""

    def failed(*words, main=validate.main, common=("--device", "cpu", "--workers", "0")):
        with pytest.raises(SystemExit) as stopped:
            call(main, *common, *words)
        assert re.fullmatch("error: [^\n]*", str(stopped.value))
        return str(stopped.value)

    return failed


# Tests of options in a checkpoint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(data_dir="pipe:touch MARKER"), "has data_dir 'pipe:touch .*', but data_dir must be the path"),
        (dict(data_dir="x\ny"), r"has data_dir 'x\\ny', but data_dir must be the path"),
        # without a dataset, data_dir must be a local folder
        (dict(data_dir="https://x/y"), "has data_dir 'https://x/y', but data_dir must"),
        (dict(dataset="wds/x", val_split="pipe:touch MARKER"), "val_split in .* must be .*got 'pipe:touch "),
        (dict(dataset="hfds/x"), "was trained on the dataset 'hfds/x': to read this dataset, set --dataset hfds/x"),
        (dict(dataset="https://x/y"), "has dataset 'https://x/y', but dataset must be empty or one of wds/NAME, hfds"),
        (dict(data_dir="nowhere"), "data_dir nowhere stored in .*given.pt does not exist on this machine: set"),
        (dict(model="vil_tiny./tmp/x"), "has model 'vil_tiny./tmp/x', which is not a model of timm or this package"),
        (dict(model="no_model"), "has model 'no_model', which is not a model of timm or this package"),
        (dict(model_kwargs=dict(checkpoint_path="/etc/passwd")), "has the model argument 'checkpoint_path'"),
        (dict(model_kwargs=dict(patch_size=[8, 8, 8])), r"has patch_size \[8, 8, 8\]"),
        (dict(model_kwargs="depth"), "option 'model_kwargs' in the checkpoint .* must be a mapping, got 'depth'"),
        (dict(model_kwargs=dict(global_pool="/x")), "but global_pool must be one of '', 'token', 'avg'$"),
        (dict(num_classes=10**6 + 1), "has num_classes 1000001, but num_classes must be at most 1000000$"),
        (dict(img_size=8193), "'img_size' in the checkpoint .* must be at most 8192, got 8193$"),
        (dict(phases=[dict(resume="x")]), "phase 1 in the checkpoint .* must not set 'resume'"),
        (dict(phases={}), "'phases' in the checkpoint .* must be a list with a mapping"),
        (dict(crop_pct=math.nan), "option 'crop_pct' in the checkpoint .* must be a finite number, got nan"),
        (dict(crop_pct=1e-4), "has crop_pct 0.0001, which would resize images to a height or width of more than"),
        *((dict(interpolation=i), f"interpolation in .* must be a supported value .*, got '{i}'$") for i in ("7", "")),
    ],
)  # fmt: skip
def test_a_checkpoint_cannot_set_commands_urls_or_huge_sizes(write, error_of_validation, tmp_path, options, message):
    marker = tmp_path / "marker"
    options = {k: v.replace("MARKER", str(marker)) if isinstance(v, str) else v for k, v in options.items()}
    assert re.search(message, error_of_validation("--checkpoint", write(options)))
    assert not marker.exists()


def test_options_in_a_checkpoint_are_accepted_up_to_their_limits():
    kwargs = dict(embed_dim=8192, depth=512, patch_size=[512, 512], stride=512, in_chans=1024, img_size=8192)
    kwargs |= dict(drop_rate=1, drop_path_rate=1, num_heads=512, mlp_ratio=64, dynamic_img_size=True, qkv_bias=True)
    largest = dict(model_kwargs=kwargs | dict(global_pool="token"), num_classes=10**6, img_size=8192)
    largest |= dict(crop_pct=0.5, phases=[dict(epochs=1)] * 100, val_split="x" * 200)
    assert options_of_checkpoint(largest, "x") == largest
    check_preprocessing(dict(mean=[-1e6, 0, 1e6], std=[1e-6, 1, 1e6]), "x")
    for name, value in kwargs.items():
        more = dict(model_kwargs={"global_pool": "avg", name: [1, 513] if name == "patch_size" else value + 1})
        with pytest.raises(ConfigError, match=f"has {name} .*, but {name} must be one or two numbers between 0 and "):
            options_of_checkpoint(more, "x")
    shards = dict(dataset="wds/x", val_split="x-{0000..0099}.tar|50", model_kwargs=dict(drop_rate=0))
    assert options_of_checkpoint(shards, "x") == shards
    for more, message in (
        (dict(val_split="x" * 201), "val_split in .* must be a relative path"),
        (dict(phases=[{}] * 101), "must have at most 100 phases, got 101$"),
        (
            dict(crop_pct=0.499),
            "has crop_pct 0.499, which would resize images to a height or width of more than [0-9]* pixels$",
        ),
        (
            dict(phases=[dict(crop_pct=0.4)]),
            "has crop_pct 0.4, which would resize images to a height or width of more than [0-9]* pixels$",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            options_of_checkpoint(largest | more, "x")
    with pytest.raises(ConfigError, match="^the options in the checkpoint x must be a dict, got int$"):
        options_of_checkpoint(7, "x")


@pytest.mark.parametrize(("more", "reason"), [(0, "size mismatch"), (1, r"expected \d+ weights, but the file has 10$")])
def test_resampling_adds_values_only_up_to_a_limit(more, reason):
    model = torch.nn.Linear(1, 4 * 10 + state_dicts.MOST_RESAMPLED + more, bias=False, device="meta")
    with pytest.raises(CheckpointError, match=f"x.pt does not fit the model: .*{reason}"):
        state_dicts.load_weights(model, dict(weight=torch.zeros(10)), "x.pt")


def test_a_checkpoint_given_by_against_has_the_same_restrictions(write, error_of_validation):
    path = write(dict(model="hf-hub:someone/model"))
    against = path.replace(path.with_name("against.pt"))
    assert "has model 'hf-hub:someone/model'" in error_of_validation("--checkpoint", write(), "--against", against)


def test_a_checkpoint_sets_hyperparameters_but_no_paths_or_devices(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = dict(output="/etc", experiment="cron.d", device="meta", resume="x", pretrained_path="/x", log_wandb=True)
    path = write(asked | dict(lr=0.5))
    config = load_config("", ["--resume", path.name], checkpoint.options_to_resume)
    # the run continues in the folder of the checkpoint
    assert (config.output, config.experiment) == (str(tmp_path.parent), tmp_path.name)
    assert (config.device, config.pretrained_path, config.log_wandb, config.lr) == (None, None, False, 0.5)
    (tmp_path / "c.yaml").write_text("epochs: 7")  # a config file replaces the checkpoint's options
    config = load_config("", ["-c", "c.yaml", "--resume", path.name], checkpoint.options_to_resume)
    assert (config.output, config.epochs, config.lr) == ("output", 7, 1e-3)


CONFIRMED = [("wds/x", ["--data-dir", "shards"], "shards")]
CONFIRMED += [(name, ["--dataset", name], None) for name in ("wds/x", "WDS/x", "hfds/x", "hfids/x", "tfds/x")]


@pytest.mark.parametrize("place", [None, "/root/.ssh", "https://host/shards", "pipe:touch x"])
@pytest.mark.parametrize(("dataset", "words", "data_dir"), CONFIRMED)
def test_a_checkpoints_dataset_is_opened_only_if_the_command_line_confirms_it(write, place, dataset, words, data_dir):
    path = write(dict(dataset=dataset, data_dir=place))
    config = load_config("", ["--resume", str(path), *words], checkpoint.options_to_resume)
    assert (config.dataset, config.data_dir) == (dataset, data_dir)
    words = ["--dataset", "", "--data-dir", "mine"]
    config = load_config("", ["--resume", str(path), *words], checkpoint.options_to_resume)
    assert (config.dataset, config.data_dir) == ("", "mine")
    words = ["--lr" if dataset == "wds/x" else "--data-dir", "1"]
    needed = "--data-dir$" if dataset == "wds/x" else f"--dataset {dataset}, and its --data-dir if any$"
    with pytest.raises(
        ConfigError, match=f"was trained on the dataset '{dataset}': to read this dataset, set {needed}"
    ):
        load_config("", ["--resume", str(path), *words], checkpoint.options_to_resume)


@pytest.mark.parametrize(
    ("dataset", "splits"),
    [
        ("", "../x x/../y .. ./. ... /x x//y x/ x:y x|5 x{0..3} x[:10%] $HOME ~/x \\x x\n"),
        ("wds/x", "../{0..3}.tar {0..3}/../x.tar /x.tar x:y a::b a{b,c} {.,x}./x.tar {a..z} {0..3}{0..3} {0..999999}"),
        ("wds/x", "{0..3..1} ${HOME}/x.tar {WDS_X}.tar x|a x|5|5 x|5/../y pipe:x x[:10%] {" + "0" * 200 + "1..2}"),
        ("hfds/x", ". train[/x] train[a] https://x/y ../x x{0..3} x|5"),
    ],
)
def test_split_names_in_a_checkpoint_cannot_leave_the_data_folder(dataset, splits):
    for split in splits.split(" "):
        with pytest.raises(ConfigError, match="val_split in the checkpoint x must be a relative path"):
            options_of_checkpoint(dict(dataset=dataset, val_split=split), "x")
    assert options_of_checkpoint(dict(val_split="."), "x")["val_split"] == "."  # "." is the data folder itself


def test_random_shard_splits_are_rejected_or_expand_to_files_in_the_folder():
    """Every accepted split name expands to at most 100,000 files, all of them in the data folder."""
    from webdataset.shardlists import expand_urls

    words = [*"./|0a,-{}:$", "..", "tar", "{0..3}", "{0..299}", "{0..999999}", "{HOME}", "{.,a}", "|36", "::", "pipe:"]
    rng, accepted = random.Random(0), 0
    for _ in range(100 * COUNT):
        split = "".join(rng.choices(words, k=rng.randint(1, 6)))
        try:
            options_of_checkpoint(dict(dataset="wds/x", train_split=split), "x")
        except ConfigError:
            continue
        accepted += 1
        files = expand_urls(split.split("|")[0])
        assert len(files) <= 10**5
        assert all(os.path.normpath(os.path.join("/data", name)).startswith("/data/") for name in files), split
        assert not any(":" in name for name in files)
    assert accepted > COUNT


# Tests of weights in a checkpoint


def compressed():
    """Return a PyTorch archive with compressed parts, each of which is at most as large as the file."""
    content = io.BytesIO(saved([*(torch.rand(10**5) for _ in range(2)), *(torch.zeros(15 * 10**4) for _ in range(3))]))
    with zipfile.ZipFile(content) as plain, zipfile.ZipFile(made := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as file:
        for part in plain.infolist():
            file.writestr(part.filename, plain.read(part))
    return made.getvalue()


def understated():
    """Return an archive with one part whose declared size is four bytes, but which decompresses to 64 MiB."""
    with zipfile.ZipFile(made := io.BytesIO(), "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("x/data.pkl", b"\x80\2}." + bytes(2**26))
        file.infolist()[0].file_size = 4
    return made.getvalue()


def program_of(*opcodes, storage=b""):
    """Return a PyTorch archive whose pickle consists of the given opcodes."""
    with zipfile.ZipFile(made := io.BytesIO(), "w") as file:
        file.writestr("x/data.pkl", b"\x80\2" + b"".join(opcodes) + b".")
        file.writestr("x/data/0", storage)
    return made.getvalue()


def text(word):
    return b"X" + struct.pack("<I", len(word)) + word.encode()


def hexed(times):
    """Return an archive whose pickle has `times` nested calls of _codecs.encode with the codec "hex"."""
    return program_of(b"c_codecs\nencode\n" * times, text("a"), (text("hex") + b"\x86R") * times)


def view_of_one_value(count):
    """Return the pickle of a tensor of shape (count, 2) and strides 0, whose elements share one stored value."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\1tQ"
    size = b"J" + struct.pack("<i", count) + b"K\2\x86" + b"K\0K\0\x86"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + size + b"\x89}tR"


class Call(tuple):
    def __reduce__(self):
        return self[0], self[1:]


def nested(times, width):
    value = functools.reduce(lambda value, _: [value] * width, range(times))
    return dict(version=3, config=dict(lr=value))


def odd_safetensors(count, dimensions):
    """Return a safetensors file that has only a header, with `count` empty tensors of many dimensions."""
    header = {f"{i}": dict(dtype="F32", shape=[0] * dimensions, data_offsets=[0, 0]) for i in range(count)}
    return struct.pack("<Q", len(text := json.dumps(header).encode())) + text


ALIKE, MUCH = torch.zeros(5 * 10**5), Call((bytearray, 10**12))
MORE = "which weights do not need and which may run code"
GROWING = [
    (
        lambda: saved({"head.weight": torch.zeros(()).expand(10**5, 10**5)}),
        "the values in the file must need at most .*, got at least 400000000",
    ),
    (lambda: saved({f"{i}.weight": ALIKE.flatten() for i in range(20)}), "the values in the file must need"),
    (compressed, "the file is a compressed zip archive"),
    (understated, "the file is a compressed zip archive"),
    (lambda: saved([MUCH]), f"the file holds __builtin__.bytearray, {MORE}"),
    (lambda: saved([MUCH], _use_new_zipfile_serialization=False), f"the file holds __builtin__.bytearray, {MORE}"),
    (lambda: saved({1, 2}), f"the file holds __builtin__.set, {MORE}"),
    (lambda: hexed(30), f"the file holds _codecs.encode, {MORE}"),
    (lambda: saved(nested(4, 300)), "the values in the file must need at most"),
    (lambda: saved(nested(99, 1)), "the file's values must be nested less than 20 levels"),
    (lambda: saved(["x" * 2**20] * 20), "the values in the file must need at most"),
    (lambda: saved({2**40: 0}), "dict keys must be str, None or integers .*, got int"),
    # functions that iterate over an argument must not receive a huge tensor
    (
        lambda: program_of(b"ccollections\nOrderedDict\n", view_of_one_value(10**9), b"R"),
        "the file calls an object of type function",
    ),
    (lambda: program_of(b"ctorch\nSize\n", view_of_one_value(10**9), b"\x85R"), "tensor sizes and strides must"),
    (
        lambda: program_of(b"cargparse\nNamespace\n)\x81", view_of_one_value(10**9), b"b"),
        "the file sets attributes of a Names",
    ),
    (lambda: program_of(b"ctorch\ndevice\n(", b"K\1" * 9, b"tR"), "expected a file written by"),
    (lambda: program_of(b"K\1(", b"K\1" * 1000, b"tR"), "the file calls an object of type int"),
]


@pytest.mark.parametrize(("make", "reason"), GROWING)
def test_a_file_that_expands_in_memory_is_rejected_before_allocation(tmp_path, make, reason):
    (tmp_path / "made.pt").write_bytes(content := make())
    assert len(content) < 10**7
    for whole in (True, False):
        with pytest.raises(CheckpointError, match=f"made.pt cannot be read as a checkpoint; .*: {reason}"):
            checkpoint.Checkpoint(tmp_path / "made.pt", whole)


def test_a_damaged_frame_length_is_reported_as_a_damaged_file(tmp_path):
    """A damaged length of a pickle frame is reported as a truncated file, although Python raises MemoryError."""
    magic, rest = saved({"a": 1}, _use_new_zipfile_serialization=False).split(b"}q", 1)[0], struct.pack("<Q", 2**61)
    (path := tmp_path / "made.pt").write_bytes(magic + b"\x95" + rest)
    with pytest.raises(BrokenCheckpointError, match="made.pt cannot be read .*: the file is truncated within a pickle"):
        checkpoint.Checkpoint(path).weights()


@pytest.mark.parametrize("dimensions", [65, 100_000])
def test_safetensors_with_many_dimensions_are_rejected(tmp_path, dimensions):
    (path := tmp_path / "odd.safetensors").write_bytes(odd_safetensors(1, dimensions))
    with pytest.raises(CheckpointError, match=f"must have at most 64 dimensions, got {dimensions}"):
        checkpoint.Checkpoint(path).weights()


@pytest.mark.parametrize("container", ["pt", "safetensors"])
def test_a_flipped_bit_is_rejected_or_changes_nothing(write, small, container):
    names = list("abcd")
    path = write(container=container, label_names=names)
    content, rng, refused = path.read_bytes(), random.Random(0), 0
    for place in [*rng.choices(range(len(content)), k=COUNT), *range(8, 500, 11)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        for read in (vil.from_checkpoint, lambda path: create_model("vil_tiny", str(path), **SAME)):
            try:
                model = read(path)
            except (CheckpointError, ConfigError):
                refused += 1
                continue
            assert model.pretrained_cfg.get("label_names", names) == names
            assert all(torch.equal(value, small[name]) for name, value in model.state_dict().items())
    assert refused > 1.6 * COUNT


def test_a_changed_tensor_fails_the_checksum(tmp_path, small, write):
    path = tmp_path / "given.pt"
    torch.serialization.set_crc32_options(False)
    # `weights` removes the prefix "module.", which DistributedDataParallel adds
    torch.save({f"module.{name}": value for name, value in small.items()}, path)
    torch.serialization.set_crc32_options(True)
    assert checkpoint.Checkpoint(path).weights().keys() == small.keys()
    # head.weight and embedding.weight are tied
    torch.save({"head.weight": ALIKE, "embedding.weight": ALIKE, "mask": ALIKE == 0}, path)
    # write the ZIP marker of an archive of more than 4 GB
    path.write_bytes((content := path.read_bytes())[:-6] + b"\xff" * 4 + content[-2:])
    assert checkpoint.Checkpoint(path).weights().keys() == {"head.weight", "embedding.weight", "mask"}
    path.write_bytes(content[:1_900_000] + b"1" + content[1_900_001:])
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        checkpoint.Checkpoint(path).weights()
    exported = write(container="safetensors")
    exported.write_bytes((content := exported.read_bytes())[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(CheckpointError, match="the checksum of the tensors does not match"):
        checkpoint.Checkpoint(exported).weights()
    # Existing files contain digests, so the digest of given weights must not change.
    assert weight_files.digest({"b": torch.ones(2), "a": torch.arange(3)}) == "c0ac27d2"


def test_a_file_replaced_during_reading_is_read_consistently(tmp_path, small, write):
    """While a file is replaced repeatedly, each read returns the best weights of one file, never a mix of two files."""
    good, bad = ({name: torch.full_like(value, number) for name, value in small.items()} for number in (1, 2))
    files = []
    for best, worse in (("state_dict", "state_dict_ema"), ("state_dict_ema", "state_dict")):
        files.append(write(best=best, **{best: good, worse: bad}).read_bytes())
    path, ended = tmp_path / "best.pt", threading.Event()
    path.write_bytes(files[0])

    def replace():
        while not ended.is_set():
            for content in files:
                (tmp_path / "next.pt").write_bytes(content)
                os.replace(tmp_path / "next.pt", path)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(15):
            model = vil.from_checkpoint(path)
            assert all((value == 1).all() for value in model.state_dict().values())
    finally:
        ended.set()
        thread.join()


def saved(thing, **how):
    torch.save(thing, file := io.BytesIO(), **how)
    return file.getvalue()


def in_the_byte_order_of(order):
    with mock.patch.object(sys, "byteorder", order):
        return saved([1, 2])


def program():
    with zipfile.ZipFile(content := io.BytesIO(saved([1, 2])), "a") as file:
        file.writestr("archive/constants.pkl", b"")  # PyTorch recognizes TorchScript by this file name
    return content.getvalue()


def exported():
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.zeros(1),)), file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("words.pt", b"this is no checkpoint", "expected a file written by"),
        ("words.npz", b"no" * 50, "expected a file written by"),  # PyTorch's own message asks to file an issue
        ("words.safetensors", b"no" * 50, "header"),
        ("empty.pt", b"", "expected a file written by"),
        ("pickle.pt", pickle.dumps([1, 2]), "expected a file written by"),  # PyTorch warns about this pickle protocol
        ("list.pt", saved([1, 2]), "the file must contain a dict"),
        ("model.pt2", exported(), "is an exported program: export a .safetensors file"),
        ("model.pth", exported(), "PytorchStreamReader failed|expected a file written by"),
        ("model.onnx", onnx := b"\x08\n\x12\x07pytorch", "is an exported program"),
        ("onnx.bin", onnx, "expected a file written by"),
        # This package does not convert the byte order of a file.
        ("order.pt", in_the_byte_order_of("big"), "the file's byte order must be"),
        ("program.pt", program(), "the file is a TorchScript program"),
        ("legacy.tar", bytes(10240), "expected a file written by"),
        ("code.pt", saved(pathlib.PurePosixPath("x")), r"the file holds pathlib.*PurePosixPath, .* may run code"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_not_a_checkpoint_is_rejected_without_unsafe_advice(tmp_path, recwarn, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read as a checkpoint; .*{reason}") as refused:
        checkpoint.Checkpoint(tmp_path / name).weights()
    assert not re.search("allowlist|safe_globals|weights_only|issue|\n", str(refused.value))
    assert [str(warning.message) for warning in recwarn if warning.category is not ResourceWarning] == []


COMMANDS = [(validate, ("--checkpoint",)), (viz, ("--images", "x", "--checkpoint")), (training, ("--resume",))]


LARGE = [dict(model_kwargs=dict(embed_dim=8192, depth=64)), dict(model_kwargs=KWARGS | dict(stride=1), img_size=1600)]


@pytest.mark.parametrize("large", LARGE, ids=["blocks", "positions"])
@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_a_model_that_does_not_fit_the_weights_is_never_allocated(
    write, error_of_validation, monkeypatch, command, words, large
):
    """A checkpoint may name a huge model, so the model is first created on the meta device to compare its shapes."""
    real = timm.create_model

    def made(*args, **kwargs):
        assert torch.get_default_device().type == "meta"
        return real(*args, **kwargs)

    monkeypatch.setattr(timm, "create_model", made)
    assert "does not fit the model" in error_of_validation(*words, write(large), main=command.main, common=())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([1.0, torch.nan, torch.inf, 0.0]), "has values that are NaN or infinite"),
        (torch.full((4,), 1e39, dtype=torch.float64), "has values that are NaN or infinite"),  # 1e39 overflows in fp32
        (torch.zeros(4, dtype=torch.complex64), "has the unsupported dtype torch.complex64"),
        (torch.zeros(4, dtype=torch.float8_e4m3fn), "has the unsupported dtype torch.float8_e4m3fn"),
        ("weights", "must be a tensor, got str"),
    ],
    ids=["not finite", "too large", "complex", "8 bits", "text"],
)
def test_invalid_weights_are_rejected_by_tensor_name(write, small, tensor, message, error_of_validation):
    parts = dict(state_dict=small | {"head.bias": tensor})
    torch.save(torch.load(path := write()) | parts, path)
    assert f"given.pt does not contain valid weights: 'head.bias' {message}" in error_of_validation(
        "--checkpoint", path
    )


def test_control_characters_in_tensor_names_are_escaped(write, small, error_of_validation, tmp_path):
    weights = small | {"\x1b[2J\nerror: all is well": torch.zeros(1)}
    assert error_of_validation("--checkpoint", write(state_dict=weights)).isprintable()
    torch.save(weights, path := tmp_path / "others.pth")
    with pytest.raises(ConfigError) as refused:
        create_model("vil_tiny", str(path), **SAME)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["patch_embed.proj.weight", "pos_embed"])
def test_weights_to_resample_must_have_the_right_number_of_dimensions(write, small, name, error_of_validation):
    for shape in ((), (5,), (1, 5), (1, 0, 32), (32, 3, 5, 5, 5)):
        message = error_of_validation("--checkpoint", write(state_dict=small | {name: torch.zeros(shape)}))
        assert "given.pt does not fit the model" in message
        assert name in message


def resumed(path, image_folder, tmp_path):
    where = dict(data_dir=str(image_folder), output=str(tmp_path), resume=path and str(path))
    return Trainer(Config(**SMALL, **where, experiment="run", workers=0), CPU, 0, 1)


KINDS = [], {}, None, 7, torch.zeros(2)
OF_ANOTHER_KIND = [
    *(
        (part, value, f"must have {part} of type {kind.__name__}, got {type(value).__name__}")
        for part, kind in checkpoint.TRAINING_STATE.items() for value in KINDS if type(value) is not kind
    ),
    *(("optimizer", value, "does not fit this run: TypeError") for value in ([], None, 7)),
    ("optimizer", {}, "does not fit this run: KeyError: 'param_groups'"), ("state_dict", {}, "keys: 35 missing"),
    ("config", dict(lr=torch.zeros(2)), "must be a number"),
    ("progress", {}, "does not fit this run: KeyError: 'losses'"),
    ("progress", dict(losses=[1.0], norms=[]), "ValueError: progress must have one loss .* per step, got 1 and 0$"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "value", "reason"), OF_ANOTHER_KIND)
def test_a_checkpoint_part_of_a_wrong_type_cannot_be_resumed(write, image_folder, tmp_path, part, value, reason):
    fresh = resumed(None, image_folder, tmp_path / "fresh")
    whole = fresh.state.state_dict()
    with pytest.raises((CheckpointError, ConfigError), match=rf"given.pt[^\n]*{reason}[^\n]*$"):
        resumed(write(**whole | {part: value}), image_folder, tmp_path)


def test_a_history_must_have_one_row_of_numbers_per_epoch():
    row = dict(epoch=1, eval_top1=2.0)
    # integers and floats keep their types
    assert str(history_of([row, row | dict(epoch=2.0)])) == str([row, row | dict(epoch=2.0)])
    for odd in (dict(epoch=2), dict(eval_top1=math.nan), {"a b": 1.0}):
        with pytest.raises(ValueError, match="the history row of epoch 1 is missing or invalid"):
            history_of([row | odd])


OPTIMIZERS = [("adamw", key, torch.zeros(1)) for key in ("exp_avg", "exp_avg_sq", "step", "other")]
OPTIMIZERS += [("adamw", "step", torch.tensor(step)) for step in (-1.0, 2.0**53)]
OPTIMIZERS += [("momentum", "momentum_buffer", value) for value in (torch.zeros(3), torch.full((2,), torch.inf))]
OPTIMIZERS += [("lion", "exp_avg", torch.zeros(3))]


@pytest.mark.parametrize(("name", "key", "odd"), OPTIMIZERS)
def test_an_optimizer_state_that_training_cannot_produce_is_rejected(name, key, odd):
    model = torch.nn.ParameterList([torch.ones(2)])
    optimizer = create_optimizer_v2(model, name)
    model[0].sum().backward()
    optimizer.step()
    optimizer.state[model[0]] |= {"step": torch.tensor(2.0**52)} if name == "adamw" else {}
    check_optimizer(optimizer, name)
    optimizer.state[model[0]][key] = odd
    with pytest.raises(ValueError, match=rf"invalid {name} state for a parameter of shape \(2,\)$"):
        check_optimizer(optimizer, name)


NO_NAMES = ["abcd", 4, ["a"] * 3, ["a"] * 5, {"a": 0}, ["a", "b", "c", 4]]
NO_NAMES += ["", "[1", "[" * 10**5, ["a\n"] * 4, ["\x1b[31m"] * 4, ["x" * 1001] * 4]


@pytest.mark.parametrize("names", NO_NAMES)
@pytest.mark.parametrize("container", ["pt", "safetensors"])
def test_class_names_must_be_one_short_line_per_class(write, names, container):
    path = write(container=container, label_names=names)
    with pytest.raises(CheckpointError, match="must be one name for each of the 4 classes") as refused:
        vil.from_checkpoint(path)
    assert "\n" not in str(refused.value)


def test_classes_in_another_order_are_rejected_with_the_first_difference(write, image_folder, tmp_path):
    given = checkpoint.labels_of({name: i for i, name in enumerate(sorted(os.listdir(image_folder / "train")))})
    names = [given[i] for i in (0, 2, 1, 3)]
    message = f"class 1 is '{given[2]}' in .*given.pt, but '{given[1]}' in this run"
    with pytest.raises(CheckpointError, match=message):
        resumed(write(label_names=names), image_folder, tmp_path)


def mutated(node, rng, pool):
    """Return a copy of nested lists and dicts in which one entry is replaced, removed, renamed or swapped."""
    node = copy.copy(node)
    if not isinstance(node, (dict, list)) or not node or rng.random() < 0.15:
        return rng.choice(pool)
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    kind = rng.random()
    if kind < 0.12:
        del node[key]
    elif kind < 0.2 and isinstance(node, dict):
        node[rng.choice([1, "other", str(key) + "x"])] = node.pop(key)
    elif kind < 0.3 and isinstance(node, dict):
        other = rng.choice(list(node))
        node[key], node[other] = node[other], node[key]
    else:
        node[key] = mutated(node[key], rng, pool)
    return node


def test_mutated_checkpoints_are_rejected_in_one_line_or_resumed(uninterrupted, image_folder, tmp_path, caplog):
    whole = torch.load(uninterrupted / "run" / "previous.pt", weights_only=True)
    refusals = {}
    for seed in range(COUNT):
        rng, state = random.Random(seed), whole
        for _ in range(rng.choice([1, 1, 2, 5])):
            key = rng.choice([*PARTS, None])
            state = {**state, key: mutated(state[key], rng, POOL)} if key in state else mutated(state, rng, POOL)
            if not isinstance(state, dict) or not state:
                break
        path = tmp_path / "generated.pt"
        torch.save(state, path)
        try:
            read = checkpoint.Checkpoint(path)
            _ = read.options, read.label_names, read.ema_is_best, read.weights()
            trainer = resumed(path, image_folder, tmp_path)
            trainer.state.meter.collect()
        except FORESEEN as error:
            refusals[seed] = str(error)
        trainer = None  # deleting the trainer releases the lock on the run folder
    assert 0.1 < len(refusals) / COUNT < 0.98
    for message in refusals.values():
        assert re.fullmatch(r"[^\n]*(generated.pt|model|num_classes)[^\n]*", message)


@pytest.mark.parametrize("listed", [pickle.dumps(Call((os.mkdir, "MARKER"))), b"", pickle.dumps({"tartrees": [1]})])
def test_a_cached_tar_index_runs_no_code_and_may_be_damaged(image_folder, tmp_path, listed, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with tarfile.open("train.tar", "w") as tar:
        tar.add(image_folder / "train", "train")
    os.truncate("train.tar", 11 * 2**30)  # timm reads a cached index only if the tar files exceed 10 GiB
    (tmp_path / "_train_tarinfos.pickle").write_bytes(listed)
    assert len(open_split(str(tmp_path), "", "train")) == len(open_split(str(image_folder), "", "train"))
    assert re.fullmatch(r"ignored .*/_train_tarinfos.pickle, .*Error\(.*\)\): remove the file.*", caplog.messages[0])
    assert not os.path.exists("MARKER")
    (tmp_path / "val.tar").write_bytes(b"none")
    with pytest.raises(ConfigError, match="cannot open the split 'val' of .*ReadError"):
        open_split(str(tmp_path), "", "val")
    assert len(caplog.messages) == 1  # val.tar has no index file, so the only message is about the index of train.tar


# Tests of configs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: .nan", "option 'lr' in .*c.yaml must be a finite number, got nan"),
        ("scale: [1, 0.5]", "must be two numbers, the smaller one first"),
        ("[" * 700, "values in .*c.yaml are nested too deeply"),
        ("experiment: 2024-13-32", "c.yaml is not valid YAML: month must be in 1..12"),
        ("? [a]\n: 1", "c.yaml is not valid YAML: .* found unhashable key"),
        ("a: &x 1\nb: *x", r"c.yaml: YAML aliases \(\*\)"),
        ("model_kwargs: !!python/object/apply:os.system [id]", "c.yaml is not valid YAML: could not determine a"),
        ("opt: admw", "unknown opt 'admw'; did you mean 'adamw'"),
        ("aa: rand-q9", "aa must be a timm policy such as rand-m9-mstd0.5-inc1 or 3a, got 'rand-q9'"),
        (b"lr: \xff\xfe", "c.yaml must be a text file in UTF-8"),
        ("a: [" + "[]," * 300_000 + "]", "c.yaml must be at most 131072 bytes"),
    ],
)  # fmt: skip
def test_invalid_configs_are_rejected_with_the_cause(tmp_path, text, message):
    (tmp_path / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as refused:
        load_config("", ["-c", str(tmp_path / "c.yaml")])
    assert "\n" not in str(refused.value)


def test_mutated_configs_are_rejected_in_one_line_or_accepted(tmp_path):
    files = sorted((ROOT / "configs").glob("*.yaml"))
    scalars = [value for value in POOL if not isinstance(value, (torch.Tensor, complex, bytes, tuple))]
    refusals = {}
    for seed in range(COUNT):
        rng = random.Random(seed)
        text = rng.choice(files).read_text()
        if seed % 2:
            text = yaml.safe_dump(mutated(yaml.safe_load(text), rng, scalars))
        for _ in range(rng.choice([0, 1, 3, 10])):
            place = rng.randrange(len(text) + 1)
            odd = rng.choice([*"[]{}:,&*!|>%@`'\"\\\t\n-#?", "\x00", "é", "null", "1e400", "---\n"])
            text = text[:place] + odd + text[place + rng.randrange(3) :]
        (tmp_path / "generated.yaml").write_text(text)
        try:
            load_config("", ["-c", str(tmp_path / "generated.yaml")])
        except ConfigError as error:
            refusals[seed] = str(error)
    assert 0.1 < len(refusals) / COUNT < 0.98
    assert not any("\n" in message for message in refusals.values())


def test_an_unavailable_device_is_rejected_by_name(error_of_validation, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, reason in (("gpu", "a PyTorch device"), ("cuda", "not available"), ("meta", "not available")):
        message = error_of_validation("--device", device, "--model", "vil_tiny")
        assert f"'{device}'" in message
        assert reason in message
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, device_count=lambda: 2))
    assert (known_device("cuda:1"), known_device(None)) == ("cuda:1", "cuda")
    with pytest.raises(ConfigError, match="less than 2.*got 'cuda:2'"):
        known_device("cuda:2")


def test_a_legacy_checkpoint_with_a_missing_storage_is_rejected(tmp_path):
    torch.save({"a": torch.ones(3)}, path := tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    start = content.rindex(b"\x80\x02]")  # the list of storages is the last pickle
    path.write_bytes(content[:start] + pickle.dumps([], 2))
    with pytest.raises(CheckpointError, match="list of storages"):
        checkpoint.Checkpoint(path).weights()
