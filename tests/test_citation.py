"""CITATION.cff is what tools that read citations expect."""

import datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_citation_has_what_version_1_2_0_of_the_format_requires():
    """Its required keys, authors with names, and a licence as LICENSE has it."""
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["message"] and citation["title"] == "PlainRL"
    assert citation["authors"] and all(author["name"] for author in citation["authors"])
    assert citation["license"] in (ROOT / "LICENSE").read_text()
    assert datetime.date.fromisoformat(citation["date-released"])
