"""Tests of pretrained weights of timm without a network: cached weights load, and a download fails at once."""

import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import huggingface_hub.constants
import pytest
import timm
import torch
from processes import call
from safetensors.torch import save_file

from vil.cli import export, predict, validate
from vil.config import Config, ConfigError
from vil.factory import pretrained_model
from vil.training.building import build_model
from vil.training.teacher import Teacher

REPOSITORY = "timm/test_vit.r160_in1k"
MODELS = r"(test_vit|teacher test_vit|hf-hub:owner/test_vit@v1)"
UNREACHABLE = rf"pretrained weights of {MODELS} from the Hugging Face Hub \(.*Name or service not known\): "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of an empty download cache, and fail a test whose download waits before a retry."""

    def refuse(seconds):
        raise AssertionError(f"waited for {seconds} seconds")

    monkeypatch.setattr("time.sleep", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (predict, ["photo.jpg"]),
        (export, ["--out", "model.onnx"]),
        (validate, ["--data-dir", "data", "--split", "val", "--device", "cpu"]),
    ],
)
def test_a_command_fails_at_once_without_a_network(offline, command, words, tmp_path, monkeypatch):
    (tmp_path / "data" / "val").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model in ("test_vit", "hf-hub:owner/test_vit@v1"):
        message = f"^error: cannot download the {UNREACHABLE}check the .* --checkpoint FILE"
        with pytest.raises(SystemExit, match=message):
            call(command.main, "--model", model, *words)


def test_training_fails_at_once_without_a_network(offline):
    with pytest.raises(ConfigError, match=f"{UNREACHABLE}check the network connection, or set --pretrained-path FILE"):
        build_model(Config(model="test_vit", pretrained=True), 3)
    with pytest.raises(ConfigError, match=f"{UNREACHABLE}check the network connection, or set --teacher-checkpoint"):
        Teacher(Config(teacher="test_vit"), 1000, [], {}, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["test_vit", "test_vit.r160_in1k"])
def test_cached_weights_need_no_network(offline, cache, name):
    expected = timm.create_model("test_vit").state_dict()
    (folder := cache / f"models--{REPOSITORY.replace('/', '--')}" / "snapshots" / "1").mkdir(parents=True)
    (refs := folder.parents[1] / "refs").mkdir()
    (refs / "main").write_text("1")
    save_file(expected, folder / "model.safetensors")
    loaded = pretrained_model(name).state_dict()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)


def test_weights_from_a_file_need_no_network(offline, tmp_path):
    expected = timm.create_model("test_vit")
    torch.save(expected.state_dict(), path := tmp_path / "mine.pth")
    overlay = dict(pretrained_cfg_overlay=dict(file=str(path)))
    built = build_model(Config(model="test_vit", pretrained=True, model_kwargs=overlay), 1000)
    for model in (pretrained_model("test_vit", **overlay), built):
        assert torch.equal(model.head.weight, expected.head.weight)


def test_an_error_of_the_hub_is_reported(monkeypatch):
    class NotFound(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), NotFound)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    with pytest.raises(ConfigError, match="cannot create the model test_vit: RepositoryNotFoundError: 404"):
        pretrained_model("test_vit")
    server.shutdown()
    server.server_close()
