"""Tests of docs/integrations.md: each snippet runs if the packages that it imports are installed."""

import ast
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from processes import ROOT

PAGE = (ROOT / "docs/integrations.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in re.split(r"^## ", PAGE, flags=re.M)[1:])
BLOCK = re.compile(r"^```(?:python|bash)\n(.*?)^```", re.M | re.S)
BLOCKS = {title: found[1] for title, text in SECTIONS.items() if (found := BLOCK.search(text))}
SNIPPETS = {title: block for title, block in BLOCKS.items() if title != "timm's scripts"}
# Program that imports timm but not this package, and runs the code of each line of stdin in a process forked from the
# program, because importing timm takes longer than most snippets.
SERVER = """
import json, os, sys, traceback
import timm

for line in sys.stdin:
    code, folder = json.loads(line)
    process = os.fork()
    if not process:
        status = 1
        try:
            os.chdir(folder)
            for stream, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(os.path.join(sys.argv[1], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_forked(tmp_path_factory):
    """Return a function that runs code in a working folder, and returns the exit status and the text of stderr."""
    output = tmp_path_factory.mktemp("output")
    words = [sys.executable, "-c", SERVER, str(output)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run_code(code, folder):
            print(json.dumps([code, str(folder)]), file=server.stdin, flush=True)
            return int(server.stdout.readline()), (output / "stderr").read_text()

        yield run_code
        server.stdin.close()


def packages(snippet):
    """Yield the top-level packages that a snippet imports."""
    for node in ast.walk(ast.parse(snippet)):
        if isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def run(*words, folder):
    """Run Python in a new process with the working folder `folder`."""
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("title", SNIPPETS)
def test_a_snippet_runs(title, run_forked, tmp_path):
    missing = {name for name in packages(SNIPPETS[title]) if not find_spec(name)}
    if missing:
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.jpg")
    snippet = SNIPPETS[title]
    if title == "ONNX and quantization":  # exporting all 24 blocks takes twice as long as exporting two
        snippet = snippet.replace("pretrained=True", "pretrained=True, depth=2")
    status, errors = run_forked(snippet, tmp_path)
    assert status == 0, errors


def test_every_section_has_one_snippet_or_a_reason():
    assert SECTIONS.keys() - BLOCKS.keys() == {"lightly"}
    assert len(BLOCK.findall(PAGE)) == len(BLOCKS)


def test_the_table_marks_the_snippets_whose_packages_continuous_integration_installs():
    project, _ = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")
    installed = {name.replace("-", "_") for name in re.findall(r'"([\w-]+)', project)} | {"vil", "PIL", "os"}
    rows = re.findall(r"^\| \[.*?]\(#(.*?)\) \| .* \| (yes|no) \| .* \|$", PAGE, re.M)
    titles = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"): title for title in SECTIONS}
    assert [anchor for anchor, _ in rows] == list(titles)
    for anchor, found in rows:
        snippet = SNIPPETS.get(titles[anchor])
        assert found == ("yes" if snippet and installed.issuperset(packages(snippet)) else "no")


def test_the_line_for_timms_scripts_registers_the_models(tmp_path):
    (tmp_path / "validate.py").write_text("import sys, timm; print(timm.is_model(sys.argv[3]))")
    python, *words = shlex.split(BLOCKS["timm's scripts"])
    assert python == "python"
    assert run(*words, folder=tmp_path).stdout == "True\n"


@pytest.mark.parametrize("names", ["kernels, vil", "vil, kernels"])
def test_a_library_may_import_the_link_kernels_of_a_checkout(names, run_forked):
    status, errors = run_forked(f"import {names}; from vil.kernels import longhorn_scan", ROOT)
    assert status == 0, errors
