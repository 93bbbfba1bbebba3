"""docs/details.md: the places and tests that it names exist, and no label is missing."""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
PAGE = (ROOT / "docs/details.md").read_text()
LABEL = re.compile(r"\b(?:[GMAX]\d+|[ld]\d+)\b")
LABELS = {
    *(f"G{i}" for i in range(1, 12)),
    *(f"M{i}" for i in range(1, 9)),
    *(f"A{i}" for i in range(1, 11)),
    *(f"X{i}" for i in range(1, 4)),
    *(f"l{i}" for i in range(1, 6)),
    "d1",
}
UNMARKED = set()  # labels that no script has
NOT_IMPLEMENTED = {"X2"}
UNLABELLED = {"DDPG": 17, "A2C": 4, "VPG": 6}  # rows of the tables without labels


def read_tables():
    """{heading: rows}, each row a list of four cells."""
    tables = {}
    for section in PAGE.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        tables[heading] = [line.strip("| ").split(" | ") for line in lines[2:]]
    return tables


TABLES = read_tables()
ROWS = [row for rows in TABLES.values() for row in rows if row[0] not in NOT_IMPLEMENTED]


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


def docstrings(node):
    kinds = ast.FunctionDef | ast.ClassDef | ast.Module
    return [ast.get_docstring(part) or "" for part in ast.walk(node) if isinstance(part, kinds)]


def labels_within(path, node):
    """The labels in the docstrings of a node and in the comments on its lines."""
    texts = [text for line, text in comments(path) if node.lineno <= line <= node.end_lineno]
    return set(LABEL.findall(" ".join([*texts, *docstrings(node)])))


def labels_of_script(path):
    texts = [text for _, text in comments(path)]
    return set(LABEL.findall(" ".join([*texts, *docstrings(parsed(path))])))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(" ", "-"))
def test_a_row_names_places_that_carry_its_label(row):
    name, _, where, _ = row
    script, _, places = where.partition(" ")
    path = ROOT / script
    assert path in SCRIPTS
    for place in places.split(", "):
        body = parsed(path).body
        if place == "main block":
            node = find_main_block(body)
        else:
            assert re.fullmatch(r"`[\w.]+`", place), place
            node = find(body, place.strip("`"))
        assert node is not None, f"{script} has no {place}"
        if name in LABELS - UNMARKED:
            assert name in labels_within(path, node), f"{place} of {script} lacks {name}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(" ", "-"))
def test_a_row_names_tests(row):
    for cell in row[3].split(", "):
        assert re.fullmatch(r"`tests/\w+\.py::test_\w+`", cell), cell


def test_all_tests_on_the_page_exist():
    names = set(re.findall(r"(tests/\w+\.py)::(\w+)", PAGE))
    assert len(names) > 50
    missing = [name for name in names if find(parsed(ROOT / name[0]).body, name[1]) is None]
    assert not missing


def test_each_label_has_one_row():
    found = [
        row[0] for heading, rows in TABLES.items() if heading not in UNLABELLED for row in rows
    ]
    assert sorted(found) == sorted(LABELS)


def test_tables_without_labels_are_whole():
    assert {heading: len(TABLES[heading]) for heading in UNLABELLED} == UNLABELLED
    for heading in UNLABELLED:
        names = [row[0] for row in TABLES[heading]]
        assert len(set(names)) == len(names)
        assert not LABELS & set(names)


def test_a_detail_that_is_not_implemented_has_no_place():
    rows = [row for rows in TABLES.values() for row in rows if row[0] in NOT_IMPLEMENTED]
    assert [row[2:] for row in rows] == [["not implemented", "none"]] * len(NOT_IMPLEMENTED)


def test_every_label_of_a_script_is_in_a_table():
    found = set().union(*(labels_of_script(path) for path in SCRIPTS))
    assert found == LABELS - UNMARKED - NOT_IMPLEMENTED
