"""Draws a report of runs: curves, tables and statistics, in one HTML file that opens anywhere.

RUNS are folders, as many as you like: a run's, one that holds runs, a sweep's, or one with the
runs.csv and curves.csv of a report. Planned and failed runs of a sweep are shown, too. The report's
folder gets report.html, report.md, figures/NAME.png, .svg and .csv, and runs.csv and curves.csv,
from which the same report can be drawn again.
"""

import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from benchmark.report import analysis, contents, figures, page
from benchmark.report.blocks import Caution, Figure
from benchmark.runs import printable, read, read_published, write_csv
from benchmark.store import ENDS

HOLDS_REPORT = ("sweep.json", "config.json")  # a folder with one of them may hold its report
REST = 10  # --watch draws for at most 1 / (1 + REST) of the time: the runs need the cores more


@dataclass
class Args:
    """All flags. The comments are what --help says."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs, of sweeps, or of CSVs
    out: Path | None = None  # folder of the report; without it, report/ in or beside the first RUNS
    compare: tuple[Path, ...] = ()  # runs to set beside these, as variants of their own
    center: Literal["iqm", "mean"] = "iqm"  # of the seeds: interquartile mean or mean
    watch: bool = False  # draw it again until all runs have ended
    interval: int = 30  # seconds between two drawings


def refuse(text):
    """Ends the program for bad input."""
    print(printable(f"error: {text}"), file=sys.stderr)
    sys.exit(2)


def parse_args():
    args = tyro.cli(
        Args,
        prog="python -m benchmark.report",
        description=__doc__,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    missing = [str(path) for path in (*args.runs, *args.compare) if not path.is_dir()]
    if missing:
        refuse(f"no such folder: {', '.join(missing)}")
    if not args.runs:
        refuse("no RUNS: name at least one folder")
    if args.interval < 1:
        refuse("--interval must be at least one second")
    return args


def folder_of(args):
    """Where the report goes."""
    if args.out:
        return args.out.absolute()
    first = args.runs[0].absolute()
    inside = any((first / name).exists() for name in HOLDS_REPORT)
    return (first if inside else first.parent) / "report"


def read_runs(args, folder):
    """Reads the folders of the flags -> benchmark.runs.Data.

    Ends the program if there is no run in RUNS, or none in those of --compare.
    """
    sources = {path.resolve() for path in (*args.runs, *args.compare)}
    # A report that is drawn from a folder's CSVs may be written into the same folder
    leave_out = None if folder.resolve() in sources else folder
    data = read(args.runs, args.compare, leave_out)
    for paths, compared in ((args.runs, False), (args.compare, True)):
        found = (data.runs["compared"] == compared).any()
        if paths and not found and not args.watch:
            advice = (
                "a run's folder has a config.json, a sweep's a sweep.json, a report's a runs.csv"
            )
            if data.troubles:
                advice = data.troubles[0]
            refuse(f"no run in {', '.join(map(str, paths))}: {advice}")
    return data


def draw(args, folder):
    """Reads all runs and writes the report -> (Report, frame of its runs, paths written)."""
    data = read_runs(args, folder)
    runs = analysis.in_order(data.runs)
    curves = analysis.make_curves(runs, data.episodes, data.curves)
    report = contents.make_report(
        runs,
        curves,
        read_published(),
        data.troubles,
        data.notes,
        center=args.center,
        drawn=time.strftime("%Y-%m-%d at %H:%M"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    svgs = write_figures(report, folder / "figures")
    write_csv(folder, runs, curves)
    refresh_s = args.interval if args.watch and not has_ended(runs) else None
    page.write(folder / "report.html", page.to_html(report, svgs, refresh_s))
    page.write(folder / "report.md", page.to_markdown(report))
    files = [folder / name for name in ("report.html", "report.md", "runs.csv", "curves.csv")]
    files += [folder / "figures" / f"{name}.{{png,svg,csv}}" for name in svgs]
    return report, runs, files


def write_figures(report, folder):
    """Writes the files of a report's figures -> {name: SVG for the page}."""
    looks = figures.looks_of(report.variants)
    svgs = {}
    for figure in report.all(Figure):
        drawn = figures.draw(figure.plot, looks)
        svg = figures.write(drawn, figure.plot.data, folder, figure.name)
        svgs[figure.name] = figures.inline(svg, figure.name, figure.title)
    return svgs


def has_ended(runs):
    """Whether there are runs, all of which have finished or failed."""
    return len(runs) > 0 and bool(runs["state"].isin(ENDS).all())


def watch(args, folder):
    """Draws the report again and again until all runs have ended -> what draw returns."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as at Ctrl-C
    while True:
        began = time.time()
        report, runs, files = draw(args, folder)
        if has_ended(runs):
            return report, runs, files
        states = contents.states_of(runs)
        print(printable(f"{states}: {folder}/report.html"), flush=True)
        time.sleep(max(args.interval, REST * (time.time() - began)))


def stop_reloading(path, interval):
    """Removes the tag that makes a page reload itself, if there is a page."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        page.write(path, text.replace(str(page.refresh_tag(interval)), ""))


def main():
    args = parse_args()
    folder = folder_of(args)
    try:
        if args.watch:
            report, _, files = watch(args, folder)
        else:
            report, _, files = draw(args, folder)
    except OSError as error:
        refuse(f"can't draw the report: {error}")
    except KeyboardInterrupt:
        if args.watch:  # from now on, nothing draws the page again
            stop_reloading(folder / "report.html", args.interval)
        sys.exit(130)
    for warning in report.all(Caution):
        print(printable(f"warning: {warning.text}"), file=sys.stderr)
    print(*(printable(str(path)) for path in files), sep="\n")
    for path in (*args.runs, *args.compare):
        if not (path / "runs.csv").exists():
            logdir = path / "runs" if (path / "sweep.json").exists() else path
            print(printable(f"tensorboard --logdir {shlex.quote(str(logdir))}"))


if __name__ == "__main__":
    main()
