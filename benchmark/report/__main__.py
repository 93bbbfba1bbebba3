"""Draws a report of runs: curves, tables and statistics, in one HTML file that opens anywhere.

RUNS are folders, as many as you like: a run's, one that holds runs, a sweep's, or one with the
runs.csv and curves.csv of a report. The report's folder gets report.html, report.md,
figures/NAME.png, and runs.csv and curves.csv, from which the same report can be drawn again.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmark import fail
from benchmark.report import contents, page, stats
from benchmark.report.runs import read, read_published, write_csvs


@dataclass
class Args:
    """All flags. The comments are what --help says."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs, of sweeps, or of CSVs
    out: Path | None = None  # folder of the report; without it, report/ in or beside the first RUNS
    compare: tuple[Path, ...] = ()  # runs to set beside these, as variants of their own


def folder_of(args):
    """Where the report goes."""
    first = args.runs[0].absolute()
    is_whole = (first / "runs").is_dir() or (first / "config.json").exists()
    return args.out or (first if is_whole else first.parent) / "report"


def draw(args):
    """Reads all runs and writes the report -> (warnings, the paths written)."""
    runs, episodes, troubles = read(args.runs, args.compare)
    if runs.empty:
        names = ", ".join(map(str, args.runs))
        fail("; ".join(troubles) or f"no run in {names}: a run's folder has a config.json")
    curves = stats.curves(runs, episodes)
    title = f"Report of {len(runs)} runs, {time.strftime('%Y-%m-%d at %H:%M')}"
    warnings = contents.make_warnings(runs, troubles)
    sections = contents.make_sections(runs, curves, read_published())
    folder = folder_of(args)
    paths = page.write(folder, title, warnings, sections)
    write_csvs(folder, runs, curves)
    return warnings, [*paths, folder / "runs.csv", folder / "curves.csv"]


def main():
    args = tyro.cli(Args, prog="python -m benchmark.report", description=__doc__)
    missing = [str(path) for path in (*args.runs, *args.compare) if not path.is_dir()]
    if missing:
        fail(f"no such folder: {', '.join(missing)}")
    if not args.runs:
        fail("no RUNS: name at least one folder")
    try:
        warnings, paths = draw(args)
    except OSError as error:
        fail(f"can't draw the report: {error}")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(*paths, sep="\n")


if __name__ == "__main__":
    main()
