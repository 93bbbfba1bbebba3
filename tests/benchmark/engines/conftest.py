"""Fake commands for the engines. What they prove is our side: words, order and states."""

import os
import sys

import pytest


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """commands(name=text, ...) puts fake commands, Python scripts, first on PATH.

    Returns their folder, `here` in their texts.
    """
    here = tmp_path / "bin"
    here.mkdir()
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")

    def write(**texts):
        for name, text in texts.items():
            path = here / name.replace("_", "-")
            path.write_text(
                f"#!{sys.executable} -S\nimport json\nfrom pathlib import Path\n"
                f"here = Path(__file__).parent\n{text}"
            )
            path.chmod(0o755)
        return here

    return write
