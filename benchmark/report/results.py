"""Redraws every committed figure and table from the committed CSVs.

    python -m benchmark.report.results

Each folder of benchmark/results/ that has a runs.csv gets report.md and one PNG: ablation.png where
variants are set beside their script's defaults over several environments, else overview.png.
speed.csv becomes speed_chart.png. In README.md, benchmark/results/README.md and docs/*.md, the text
between <!-- table: NAME --> and <!-- end of table --> is replaced. NAME is a folder of
benchmark/results/, such a name with _gains (what each variant gains on the defaults), algorithms,
diffs, or one of benchmark.speed's tables.
"""

import re
from dataclasses import dataclass

import pandas as pd
import tyro

from benchmark import ROOT
from benchmark.report import algorithms, contents, diffs, figures, page, stats, tables
from benchmark.report.runs import read, read_published
from benchmark.speed import chart
from benchmark.speed import tables as speed

RESULTS = ROOT / "benchmark" / "results"
DPI = 110  # of committed figures
REGION = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def read_results():
    """The folders of benchmark/results/ that have a runs.csv -> {name: (runs, episodes)}."""
    found = {}
    for path in sorted(RESULTS.glob("*/runs.csv")):
        runs, episodes, troubles = read([path.parent])
        if troubles:
            raise ValueError("; ".join(troubles))
        found[path.parent.name] = runs, episodes
    return found


def pages():
    """The pages that have tables."""
    return [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def make_tables(results):
    """All tables that pages may have -> {NAME: Markdown}."""
    published = read_published()
    found = {}
    for name, (runs, _) in results.items():
        found[name] = tables.markdown(tables.score_table(runs, published))
        gains = tables.gains_table(runs, stats.gains(runs))
        if gains:
            found[f"{name}_gains"] = tables.markdown(gains)
    rows = speed.read(RESULTS / "speed.csv")
    lines = pd.read_csv(RESULTS / "algorithms.csv", keep_default_na=False)
    frames = {name: runs for name, (runs, _) in results.items()}
    found["algorithms"] = tables.markdown(algorithms.make_table(lines, frames, rows))
    found["diffs"] = tables.markdown(diffs.make_table(ROOT))
    return found | speed.tables(rows)


def fill_tables(text, tables):
    """A page's text with its tables filled in. A KeyError names a table that there isn't."""
    return REGION.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def make_report(name, runs, episodes):
    """A folder's report -> (text of its report.md, the figure in it: Drawn or None)."""
    sections = contents.make_sections(runs, stats.curves(runs, episodes), read_published())
    drawn = {figure.name: figure for section in sections for figure in section.figures}
    shown = drawn.get("ablation") or drawn.get("overview")
    for section in sections:
        section.figures = [figure for figure in section.figures if figure is shown]
    sections[0].texts.insert(
        0,
        "Drawn from runs.csv and curves.csv by python -m benchmark.report.results. For all "
        f"figures, run python -m benchmark.report benchmark/results/{name} --out FOLDER.",
    )
    return page.to_markdown(name, contents.make_warnings(runs, []), sections, ""), shown


def redraw():
    """Writes everything."""
    results = read_results()
    for name, (runs, episodes) in results.items():
        print(f"benchmark/results/{name}", flush=True)
        text, shown = make_report(name, runs, episodes)
        (RESULTS / name / "report.md").write_text(text, encoding="utf-8")
        if shown:
            (RESULTS / name / f"{shown.name}.png").write_bytes(figures.png(shown.figure, DPI))
    chart.draw(speed.read(RESULTS / "speed.csv"), RESULTS / "speed_chart.png")
    found = make_tables(results)
    for path in pages():
        text = path.read_text(encoding="utf-8")
        filled = fill_tables(text, found)
        if filled != text:
            print(path.relative_to(ROOT))
            path.write_text(filled, encoding="utf-8")


@dataclass
class Args:
    """There are none."""


if __name__ == "__main__":
    tyro.cli(Args, prog="python -m benchmark.report.results", description=__doc__)
    redraw()
