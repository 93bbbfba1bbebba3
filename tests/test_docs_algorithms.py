"""The pages of the algorithms name the flags, defaults and metrics that their scripts have."""

import ast
import importlib
import re
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))


def page(script):
    return (ROOT / "docs" / f"{script.stem}.md").read_text()


def section(script, heading):
    """The text below a heading of the second level, up to the next one."""
    return page(script).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text):
    """The cells of a table's rows that begin with code."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]


def defaults(script):
    return asdict(importlib.import_module(script.stem).Args())


def common_flags():
    """{flag of all scripts: whether its default differs between them}.

    But for the name, and the number of threads, which is the machine's in some.
    """
    of_scripts = [defaults(script) for script in SCRIPTS]
    names = set.intersection(*(set(flags) for flags in of_scripts)) - {"exp_name", "num_threads"}
    return {name: len({repr(flags[name]) for flags in of_scripts}) > 1 for name in names}


def own_flags(script):
    """{flag that not all scripts have: default}"""
    flags = defaults(script)
    return {
        name: flags[name] for name in flags.keys() - common_flags() - {"exp_name", "num_threads"}
    }


def as_written(default):
    """How a page writes a default that is no number."""
    if isinstance(default, tuple):
        return " ".join(str(x) for x in default)
    return {None: "none", True: "on", False: "off"}.get(default, default)


def same(text, default):
    """Whether the text of a page is a default; numbers may be written in other ways."""
    if isinstance(default, int | float) and not isinstance(default, bool):
        return float(text) == default
    return text == as_written(default)


def tags(source, metrics):
    """The tags that a script logs: its strings of the form 'group/name' and f'group/{metric}'."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"[a-z]+/\w+", node.value):
                found.add(node.value)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            group = node.values[0].value
            if re.fullmatch(r"[a-z]+/", group):
                found |= {group + metric for metric in metrics}
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_flags_of_a_page_are_those_of_its_script(script):
    own = own_flags(script)
    written = {}
    for name, default, *_ in rows(section(script, "Flags")):
        written[name.strip("`-").replace("-", "_")] = default
    assert written.keys() == own.keys()
    wrong = {name: text for name, text in written.items() if not same(text, own[name])}
    assert not wrong


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_tells_the_defaults_that_differ_between_scripts(script):
    differing = {name for name, differs in common_flags().items() if differs}
    sentence = section(script, "Flags").partition("Their defaults here: ")[2].partition(".\n")[0]
    written = dict(re.findall(r"`--(\S+) (\S+)`", sentence))
    written = {name.replace("-", "_"): text for name, text in written.items()}
    assert written.keys() == differing
    own = defaults(script)
    wrong = {name: text for name, text in written.items() if not same(text, own[name])}
    assert not wrong


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_metrics_of_a_page_are_those_of_its_script(script):
    written = [name.strip("`") for name, *_ in rows(section(script, "Metrics"))]
    metrics = importlib.import_module(script.stem).METRICS
    assert sorted(written) == sorted(tags(script.read_text(), metrics))
