"""Details on the algorithms' pages: places and tests exist, and no label of a script is missing."""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
INDEX = ROOT / "docs/details.md"
LABEL = re.compile(r"\b(?:[GMAX]\d+|[ld]\d+)\b")
LABELS = {
    *(f"G{i}" for i in range(1, 12)),
    *(f"M{i}" for i in range(1, 9)),
    *(f"A{i}" for i in range(1, 11)),
    *(f"l{i}" for i in range(1, 6)),
    "d1",
    "X1",
    "X2",
    "X3",
    "X4",
}


class Detail(NamedTuple):
    """A detail on the page of a script."""

    script: Path
    name: str  # a label, or words
    places: list  # [(text of the link, its target)]
    tests: list  # the same


def page_of(script):
    return ROOT / "docs" / f"{script.stem}.md"


def section(page, heading):
    """The text below a heading of the second level, up to the next one."""
    _, found, rest = page.read_text().partition(f"\n## {heading}\n")
    assert found, f"{page.name} has no section {heading}"
    return rest.partition("\n## ")[0]


def links(text):
    return re.findall(r"\[([^\]]+)\]\(([^)]+)\)", text)


def read_details(script):
    text = section(page_of(script), "Details")
    found = re.findall(r"^- \*\*(.+?)\*\* .+\n  - Code: (.+)\. Test: (.+)\.$", text, re.MULTILINE)
    assert len(found) == text.count("\n- ")  # none is left out for its form
    return [Detail(script, name, links(code), links(test)) for name, code, test in found]


DETAILS = [detail for script in SCRIPTS for detail in read_details(script)]
IDS = [f"{detail.script.stem}-{detail.name.replace(' ', '-')}" for detail in DETAILS]


def expand(text):
    """'G1 to G3, X1' -> ['G1', 'G2', 'G3', 'X1']; other words stay as they are."""
    names = []
    for part in text.split(", "):
        span = re.fullmatch(r"(\w)(\d+) to \1(\d+)", part)
        if span is None:
            names.append(part)
        else:
            names += [f"{span[1]}{i}" for i in range(int(span[2]), int(span[3]) + 1)]
    return names


def explained_elsewhere(script):
    """[(detail, page that explains it)] by the links at the top of a page's details."""
    found = []
    for text, target in links(section(page_of(script), "Details")):
        if target.endswith(".md#details"):
            found += [(name, target.removesuffix(".md#details")) for name in expand(text)]
    return found


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def comments(path):
    """[(line number, comment)]"""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def find(body, name):
    """The function, class or method of this name in a list of nodes, or None."""
    first, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
            return find(node.body, rest) if rest else node
    return None


def find_main_block(body):
    for node in body:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            return node
    return None


def labels_within(path, node):
    """The labels in the docstrings of a node's definitions and in the comments on its lines."""
    kinds = ast.FunctionDef | ast.ClassDef
    texts = [text for line, text in comments(path) if node.lineno <= line <= node.end_lineno]
    texts += [ast.get_docstring(part) or "" for part in ast.walk(node) if isinstance(part, kinds)]
    return set(LABEL.findall(" ".join(texts)))


def labels_of(script):
    """The labels in a script, but for its docstring, which speaks of other scripts too."""
    return set().union(*(labels_within(script, node) for node in parsed(script).body))


@pytest.mark.parametrize("detail", DETAILS, ids=IDS)
def test_a_detail_names_places_that_carry_its_label(detail):
    assert detail.places
    for text, target in detail.places:
        assert target == f"../{detail.script.name}"
        body = parsed(detail.script).body
        if text == "main block":
            node = find_main_block(body)
        else:
            assert re.fullmatch(r"`[\w.]+`", text)
            node = find(body, text.strip("`"))
        assert node is not None, f"{detail.script.name} has no {text}"
        if detail.name in LABELS:
            assert detail.name in labels_within(detail.script, node), f"{text} lacks the label"


@pytest.mark.parametrize("detail", DETAILS, ids=IDS)
def test_a_detail_names_tests(detail):
    assert detail.tests
    for text, target in detail.tests:
        assert re.fullmatch(r"`test_\w+`", text)
        path = (ROOT / "docs" / target).resolve()
        assert path.parent == ROOT / "tests"
        assert find(parsed(path).body, text.strip("`")) is not None, f"{path.name} has no {text}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_tests_named_in_the_text_exist(script):
    for name, test in re.findall(r"(tests/\w+\.py)::(\w+)", page_of(script).read_text()):
        assert find(parsed(ROOT / name).body, test) is not None, f"{name} has no {test}"


def test_a_label_is_explained_once():
    assert sorted(detail.name for detail in DETAILS if detail.name in LABELS) == sorted(LABELS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_page_of_a_script_has_the_labels_of_its_comments(script):
    own = [detail.name for detail in read_details(script)]
    elsewhere = [name for name, _ in explained_elsewhere(script)]
    names = own + elsewhere
    assert len(set(names)) == len(names)
    assert LABELS & set(names) == labels_of(script)
    assert not LABEL.findall(" ".join(set(names) - LABELS))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_is_explained_elsewhere_is_explained_there(script):
    for name, stem in explained_elsewhere(script):
        assert name in [detail.name for detail in read_details(ROOT / f"{stem}.py")]


def test_the_index_leads_each_label_to_its_page():
    found = {}
    for line in INDEX.read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 3 and LABEL.match(cells[0]):
            ((_, target),) = links(cells[2])
            found |= dict.fromkeys(expand(cells[0]), target.partition(".md")[0])
    labelled = [detail for detail in DETAILS if detail.name in LABELS]
    assert found == {detail.name: detail.script.stem for detail in labelled}
