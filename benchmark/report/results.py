"""Redraws every committed figure and table from the committed CSVs.

    python -m benchmark.report.results

Each folder of benchmark/results/ that has a runs.csv gets report.md and one PNG: ablation.png where
variants are set beside their script's defaults over several environments, else overview.png.
speed.csv becomes speed_chart.png, games.csv games.png. In README.md, benchmark/results/README.md
and docs/*.md, the text between <!-- table: NAME --> and <!-- end of table --> is replaced. NAME is
a folder of benchmark/results/, such a name with _gains (what each variant gains on the defaults),
algorithms, or one of benchmark.speed's tables.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import tyro

from benchmark.report import algorithms, analysis, contents, figures, page
from benchmark.report.blocks import (
    NAME,
    NOTE,
    NUMBER,
    Curves,
    Figure,
    Overview,
    Paragraph,
    Report,
    Table,
)
from benchmark.report.formats import mean_std, number, with_interval
from benchmark.runs import SCORE_NAME, read, read_published
from benchmark.speed import chart, games
from benchmark.speed import tables as speed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmark" / "results"
DPI = 110  # of committed figures
REGION = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


@dataclass
class Results:
    """A folder of results: its runs in the order of analysis.in_order, their curves, and notes."""

    name: str
    runs: pd.DataFrame
    curves: pd.DataFrame
    notes: list


def read_results():
    """All folders of benchmark/results/ that have a runs.csv -> [Results].

    Raises ValueError if one of them is damaged.
    """
    found = []
    for path in sorted(RESULTS.glob("*/runs.csv")):
        data = read([path.parent])
        if data.troubles:
            raise ValueError("; ".join(data.troubles))
        runs = analysis.in_order(data.runs)
        curves = analysis.make_curves(runs, data.episodes, data.curves)
        found.append(Results(path.parent.name, runs, curves, data.notes))
    return found


def pages():
    """The pages that have tables."""
    return [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# Tables


def make_tables(results, published):
    """All tables that pages may have -> {NAME: Markdown}."""
    tables = {}
    for found in results:
        tables[found.name] = page.markdown_table(score_table(found.runs, published))
        gains = gains_table(found.runs)
        if gains:
            tables[f"{found.name}_gains"] = page.markdown_table(gains)
    rows = speed.read(RESULTS / "speed.csv")
    frames = {found.name: found.runs for found in results}
    tables["algorithms"] = page.markdown_table(algorithms.make_table(frames, rows))
    cleanrl = speed.read(RESULTS / "speed_cleanrl.csv")
    return tables | speed.tables(rows) | speed.tables(cleanrl, "speed_cleanrl")


def fill_tables(text, tables):
    """A page's text with its tables filled in. Raises LookupError if one of them isn't known."""

    def table(found):
        name = found[2]
        if name not in tables:
            raise LookupError(f"there is no table {name}, only {', '.join(sorted(tables))}")
        return f"{found[1]}{tables[name]}\n{found[3]}"

    return REGION.sub(table, text)


def score_table(runs, published):
    """A row for each environment and variant, with the published scores beside it -> Table.

    Variants are named, and planned steps have a column, only if there are several.
    """
    several = runs["variant"].nunique() > 1
    steps = runs["planned_steps"].nunique() > 1
    lines = []
    for (env_id, variant), group in runs.groupby(["env_id", "variant"]):
        found = analysis.summarise(group)
        first = "environment, variant" if several else "environment"
        line = {first: f"{env_id}, `{variant}`" if several else env_id}
        if steps:
            line["steps"] = planned(group)
        scripts = group["script"].unique()
        own = group["planned_steps"]
        rows = [analysis.published_of(published, script, env_id, own) for script in scripts]
        line |= {
            "seeds": contents.seeds_of(found),
            SCORE_NAME: mean_std(found["scores"]),
            "IQM [95 % interval]": with_interval(*found["iqm"]),
            "evaluation": mean_std(found["evaluations"]),
            "published": published_range(pd.concat(rows)),
        }
        lines.append(line)
    header = tuple(lines[0])
    styles = (NAME, *[NUMBER] * (len(header) - 2), NOTE)
    return Table(header, [tuple(line.values()) for line in lines], styles)


def planned(group):
    """The planned steps of a variant's runs, as text."""
    return " or ".join(f"{n:,.0f}" for n in sorted(group["planned_steps"].dropna().unique()))


def published_range(rows):
    """Published scores as text: the lowest and the highest, and whose they are.

    Only scores of training episodes count, as the runs' own scores are such. If there are none, it
    is the other scores, and the text says what they are.
    """
    if rows.empty:
        return ""
    training = rows[rows["kind"] == "training"]
    what = rows["metric"].unique() if training.empty else []
    rows = rows if training.empty else training
    bounds = dict.fromkeys((number(rows["mean"].min()), number(rows["mean"].max())))
    score = contents.published_score(rows.iloc[0]) if len(rows) == 1 else " to ".join(bounds)
    versions = rows["env_id"].map(lambda env_id: analysis.split_version(env_id)[1])
    sources = [
        f"{publisher} {', '.join(sorted(set(own)))}"
        for publisher, own in versions.groupby(rows["publisher"], sort=False)
    ]
    return f"{score} ({'; '.join([*sources, *what])})"


def gains_table(runs):
    """What each variant of a script gains on its defaults -> Table.

    It has the scores in each environment and the difference of normalised scores over all. It is
    None unless a script has variants that share environments with its defaults, which have several.
    """
    raw = analysis.scores_of(runs)
    scaled, bounds = analysis.scale(raw)
    lines = []
    for family, base in analysis.bases(runs).items():
        own = runs[runs["family"] == family]
        others = sorted(set(own["variant"]) & set(raw) - {base})
        if base not in raw or not others or len(raw[base]) < 2:
            continue
        script = own["script"].iloc[0]
        found = analysis.ablation(raw, scaled, script, base, others, "iqm")
        if "all" not in found:  # none of the others shares an environment with it
            continue
        lines.append((f"`{base}`", *score_cells(own, base, raw, bounds), ""))
        for row in found["all"].to_dict("records"):
            gain = contents.interval_of(row)
            cells = score_cells(own, row["variant"], raw, bounds)
            lines.append((f"`{row['name']}`", *cells, gain))
    if not lines:
        return None
    header = (
        "variant",
        *bounds,
        "all: IQM of normalised scores minus the defaults' [95 % interval]",
    )
    return Table(header, lines, (NAME, *[NUMBER] * (len(header) - 1)))


def score_cells(runs, variant, raw, env_ids):
    """A variant's scores in each environment, with the number of seeds if others have more."""
    most = max(len(scores) for own in raw.values() for scores in own.values())
    cells = []
    for env_id in env_ids:
        scores = raw[variant].get(env_id, np.zeros(0))
        count = ""
        if 0 < len(scores) < most:
            count = " (1 seed)" if len(scores) == 1 else f" ({len(scores)} seeds)"
        cells.append(mean_std(scores) + count)
    return cells


# Figures


def shown_figure(report):
    """The figure that represents a report: what variants gain, else the curves; None without."""
    drawn = report.all(Figure)
    for figure in drawn:
        if figure.shows_gains:
            return replace(figure, name="ablation")
    for kind in (Overview, Curves):
        for figure in drawn:
            if isinstance(figure.plot, kind):
                return replace(figure, name="overview")
    return None


def page_of(name, report):
    """A folder's report -> (text of its report.md, the figure in it or None)."""
    text = (
        "Drawn from runs.csv and curves.csv by python -m benchmark.report.results. For all "
        f"figures, run python -m benchmark.report benchmark/results/{name} --out FOLDER."
    )
    shown = shown_figure(report)
    figure = [shown] if shown else []
    blocks = [block for block in report.blocks if not isinstance(block, Figure)]
    short = Report(name, report.variants, [Paragraph(text), *figure, *blocks])
    return page.to_markdown(short, ""), shown


def write_results(found, published):
    """Writes a folder's report.md and its figure."""
    folder = RESULTS / found.name
    report = contents.make_report(found.runs, found.curves, published, [], found.notes)
    text, shown = page_of(found.name, report)
    page.write(folder / "report.md", text)
    if shown:
        drawn = figures.draw(shown.plot, figures.looks_of(report.variants))
        figures.write_png(drawn, folder / f"{shown.name}.png", DPI)


@dataclass
class Flags:
    """There are none."""


def main():
    tyro.cli(Flags, prog="python -m benchmark.report.results", description=__doc__)
    try:
        redraw()
    except (OSError, ValueError, LookupError) as error:
        print(f"error: can't redraw the results: {error}", file=sys.stderr)
        sys.exit(2)


def redraw():
    """Writes everything. Raises OSError, ValueError, LookupError where a file isn't as needed."""
    results = read_results()
    published = read_published()
    for found in results:
        print(f"benchmark/results/{found.name}", flush=True)
        write_results(found, published)
    chart.draw(speed.read(RESULTS / "speed.csv"), RESULTS / "speed_chart.png")
    games.draw(pd.read_csv(RESULTS / "games.csv"), RESULTS / "games.png")
    tables = make_tables(results, published)
    for path in pages():
        text = path.read_text(encoding="utf-8")
        filled = fill_tables(text, tables)
        if filled != text:
            print(path.relative_to(ROOT))
            page.write(path, filled)


if __name__ == "__main__":
    main()
