"""Tests of the documentation (links, named files and tests, throughput tables, quick start) and of the CI workflows."""

import re

import pytest
import tables
import wheel_test
import yaml
from processes import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("vil/weights/*.md")]
PAGES += [page for folder in ("docs", "research") for page in ROOT.glob(f"{folder}/**/*.md")]
DOCUMENTS = sorted({str(page.relative_to(ROOT)) for page in PAGES})
FOLDERS = "kernels|vil|tests|benchmarks|configs|docs|research|scripts|weights"


def anchors(page):
    """Return the anchors that GitHub creates for a page's headings, if no two headings are equal."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_files_and_tests_named_in_documents_exist(document):
    page = ROOT / document
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text)
    links += [(path, "") for path in re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    targets = [(page.parent / path if path else page, anchor) for path, anchor in links]
    missing = [(file, a) for file, a in targets if not file.exists() or (a and a not in anchors(file))]
    # GitHub does not follow symbolic links to folders, such as configs
    missing += [file for file, _ in targets if any(p.is_symlink() for p in file.parents if ROOT in p.parents)]
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*\w|(?:train_imagenet|validate)\.py)`", text)
    missing += [path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()]
    defined = "".join(file.read_text() for file in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("research/tests/*.py")))
    missing += [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in defined]
    assert not missing


@pytest.mark.parametrize("page", tables.PAGES)
def test_throughput_tables_equal_the_result_files(page):
    text = (ROOT / page).read_text()
    assert "<!-- table: " in text
    assert tables.renewed(text) == text


def test_continuous_integration_tests_the_oldest_supported_versions():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    oldest, _ = jobs["test"]["strategy"]["matrix"]["include"]
    project = (ROOT / "pyproject.toml").read_text()
    assert f'requires-python = ">={oldest["python"]}"' in project
    for package in oldest["packages"].split():
        assert f'"{package.replace("==", ">=").removesuffix(".*")}"' in project


def test_workflows_run_existing_targets_and_tests_and_pin_actions_to_commits():
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        text = workflow.read_text()
        targets = {word for line in re.findall(r"run: make ([a-z -]+)", text) for word in line.split()}
        assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in re.findall(r"uses: (\S+)", text))
        for folder, names in re.findall(r"(tests/\w+/test_){([a-z_,]+)}\.py", text):
            assert all((ROOT / f"{folder}{name}.py").exists() for name in names.split(","))


def test_the_readmes_quick_start_installs_trains_and_predicts():
    install, *commands = wheel_test.quick_start()
    assert re.match(r'pip install "\.\[train]"$', install)
    assert [command.split()[:2] for command in commands] == [["vil", word] for word in ("train", "predict")]
