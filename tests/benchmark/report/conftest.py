"""Frames of runs, and readers of what a report writes."""

import csv

import pytest

from benchmark import runs


@pytest.fixture(scope="session")
def make_runs():
    """make_runs(*rows): a frame of runs; each row has what differs from a finished run of vpg."""

    def make(*rows):
        found = []
        for i, row in enumerate(rows):
            default = {"id": i, "run": f"run{i}", "env_id": "CartPole-v1", "script": "vpg"}
            default |= {"seed": i, "variant": "vpg", "state": "finished", "begun": True}
            row = default | {"folder": "", "git_commit": "abc"} | row
            row["family"] = row["script"] + row.get("mark", "")
            found.append(row)
        return runs.run_frame(found)

    return make


@pytest.fixture(scope="session")
def read_csv():
    """read_csv(path): its rows, dicts of texts."""

    def read(path):
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return read


@pytest.fixture(scope="session")
def table_after():
    """table_after(markdown, heading): the rows of the first table after a heading, lists of cells.

    The first is the header.
    """

    def rows(markdown, heading):
        lines = markdown[markdown.index(f"## {heading}\n") :].splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("|"))
        table = []
        for line in lines[start:]:
            if not line.startswith("|"):
                break
            if not line.startswith("| --- "):
                table.append([cell.strip() for cell in line.strip("|").split(" | ")])
        return table

    return rows
