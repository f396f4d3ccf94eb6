"""docs/glossary.md: its terms are where it says, and nothing in the code has a name that it retires."""

import functools
import io
import re
import tokenize

import pytest
from processes import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| say", "| ---"))
]
RETIRED = [
    (folder, word)
    for *_, never in ROWS
    if never
    for folder in never.partition(" in ")[2].split()
    for word in re.findall("`(.*?)`", never)
]
# terms in which a retired word is right: the glossary's own, and names that are public
TERMS = ("step_logit", "beta_logit", "dt_logit", "reference_scan")


@functools.cache
def names(path):
    """The identifiers of a file in Python or CUDA C++ with their lines: no comments, no strings."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return [
            (token.string, token.start[0])
            for token in tokens
            if token.type == tokenize.NAME and not token.line.startswith(("from", "import"))
        ]
    lines = re.sub(r'//.*|"[^"\n]*"', "", text).splitlines()
    return [(name, number) for number, line in enumerate(lines, 1) for name in re.findall(r"[A-Za-z_]\w*", line)]


def uses(root, word):
    """Where the word, or the gradient of what it names, stands in a name between underscores."""
    part = re.compile(rf"(.*_)?d?{re.escape(word)}(_.*)?")
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            for name, line in names(path):
                if part.fullmatch(name) and not any(term in name for term in TERMS):
                    yield f"{path.relative_to(root)}:{line}: {name}"


@pytest.mark.parametrize(("folder", "word"), RETIRED)
def test_nothing_has_a_retired_name(folder, word):
    found = [*uses(ROOT / folder, word)]
    assert found == []


@pytest.mark.parametrize(("term", "file"), [(term, file) for term, _, file, _ in ROWS])
def test_a_term_stands_where_the_glossary_says(term, file):
    text = f"{file} {(ROOT / file).read_text()}"
    assert [
        word for word in term.split(", ") if not re.search(rf"\b{word.replace(' ', '[ _]')}", text, re.IGNORECASE)
    ] == []


def test_a_retired_name_is_found_and_words_of_prose_are_not(tmp_path):
    (tmp_path / "a.py").write_text('"""rates"""\nstep_logits = dlogits_TD = 1  # rates\n')
    (tmp_path / "b.cuh").write_text('#include "rates.h"\n// rates\nfloat *rates_data = f(dstep_logits, separates);\n')
    assert [*uses(tmp_path, "rates")] == ["b.cuh:3: rates_data"]
    assert [*uses(tmp_path, "logits")] == ["a.py:2: dlogits_TD"]
