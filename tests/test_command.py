"""Tests of the subcommands of `vil`, and of help and error messages that appear before PyTorch is imported."""

import subprocess
import sys

import pytest

import vil
from vil.cli.main import COMMANDS, run


def vil_process(*words):
    """Run `vil` with the arguments `words` in a new process, which finally prints whether PyTorch was imported."""
    code = f"import sys; sys.argv = ['vil', *{list(words)}]\ntry:\n    import vil.cli.main; vil.cli.main.main()\n"
    code += "finally:\n    print('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_help_lists_the_subcommands_one_line_each(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        run(words)
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "][-7:] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_does_not_import_pytorch(command):
    ended = vil_process(command, "--help")
    assert ended.stdout.startswith(f"usage: vil {command} ")
    assert (ended.stdout.splitlines()[-1], ended.stderr, ended.returncode) == ("False", "", 0)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["xyz"], "unknown command 'xyz'; choose one of train, validate, predict, export, viz, split, info"),
        (["train", "--epoch", "3"], "unknown option 'epoch' on the command line; did you mean --epochs?"),
        (["train", "-c", "vil_tin"], "config file vil_tin does not exist; did you mean 'vil_tiny'?"),
        (["viz", "--checkpoint", "best.pt"], "images are required: give image files or folders with images"),
        (["export"], "the following arguments are required: --out"),
        (["split", "pets"], "the following arguments are required: target"),
    ],
)
def test_an_error_in_the_words_is_one_line_without_importing_pytorch(words, error):
    ended = vil_process(*words)
    assert (ended.stdout, ended.returncode) == ("False\n", 1)
    assert ended.stderr.startswith(f"error: {error}")
    assert ended.stderr.count("\n") == 1


def test_the_version_has_a_short_option(capsys):
    run(["-V"])
    run(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_the_public_names_are_listed_for_completion():
    assert {*vil.__all__, "export", "viz"} <= {*dir(vil)}


def test_the_models_are_registered_only_outside_the_command():
    code = "import sys; sys.argv = [{!r}]; import vil; print('timm' in sys.modules)"
    last = "; vil.from_checkpoint"  # the command imports the package's functions at first use
    for program, is_imported in (("/usr/bin/vil", False), ("vil.exe", False), ("train.py", True)):
        words = [sys.executable, "-c", code.format(program) + last * (program == "/usr/bin/vil")]
        ended = subprocess.run(words, capture_output=True, text=True, check=True)
        assert ended.stdout == f"{is_imported}\n"
