"""Redraws every committed figure and table from the committed CSVs.

    python -m benchmark.report.results

Each folder of benchmark/results/ that has a runs.csv gets report.md and one PNG: ablation.png where
variants are set beside their script's defaults over several environments, else overview.png.
speed.csv becomes speed_chart.png. In README.md, benchmark/results/README.md and docs/*.md, what is
between <!-- table: NAME --> and <!-- end of table --> is written anew. NAME is a folder of
benchmark/results/, such a name with _gains (what each variant gains on the defaults), algorithms,
or one of benchmark.speed's tables.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import runs as folders
from benchmark.report import algorithms, analysis, contents, figures, page
from benchmark.report.blocks import Curves, Figure, Paragraph, Report, Table
from benchmark.report.formats import mean_std, number, with_interval
from benchmark.speed import tables as speed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmark" / "results"
DPI = 110  # of committed figures
REGION = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SOURCE_DETAIL = r" (?:docs|own|rerun|1\.0|table)\b.*"
TRAINING = "training episodes"  # in the metrics of published scores that last_100 is set beside


@dataclass
class Results:
    """A folder of results: its runs, in the order of analysis.in_order, their curves, and notes."""

    name: str
    runs: pd.DataFrame
    curves: pd.DataFrame
    notes: list


def read_results():
    """All folders of benchmark/results/ with a runs.csv; damage there is an error."""
    found = []
    for path in sorted(RESULTS.glob("*/runs.csv")):
        data = folders.read([path.parent])
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
    """{NAME: Markdown} of all tables that pages may have."""
    tables = {}
    for found in results:
        tables[found.name] = page.markdown_table(score_table(found.runs, published))
        gains = gains_table(found.runs)
        if gains:
            tables[f"{found.name}_gains"] = page.markdown_table(gains)
    rows = speed.read(RESULTS / "speed.csv")
    frames = {found.name: found.runs for found in results}
    tables["algorithms"] = page.markdown_table(algorithms.make_table(frames, rows))
    return tables | speed.tables(rows)


def fill(text, tables):
    """A page's text with its tables; raises LookupError where it wants one that there isn't."""

    def table(found):
        name = found[2]
        if name not in tables:
            raise LookupError(f"there is no table {name}: there are {', '.join(sorted(tables))}")
        return f"{found[1]}{tables[name]}\n{found[3]}"

    return REGION.sub(table, text)


def score_table(runs, published):
    """A row for each environment and variant, with the published scores beside it.

    Variants are named, and planned steps have a column, only where there are several.
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
        rows = [analysis.published_of(published, x, env_id) for x in group["script"].unique()]
        line |= {
            "seeds": contents.seeds_of(found),
            "last 100": mean_std(found["scores"]),
            "IQM [95 % interval]": with_interval(*found["iqm"]),
            "evaluation": mean_std(found["evaluations"]),
            "published": published_range(pd.concat(rows)),
        }
        lines.append(line)
    return Table(tuple(lines[0]), [tuple(line.values()) for line in lines], "numbers noted")


def planned(group):
    """How many steps a variant's runs have, a text."""
    return " or ".join(f"{n:,.0f}" for n in sorted(group["planned_steps"].dropna().unique()))


def published_range(rows):
    """Published scores as text: the lowest and the highest, and whose they are.

    They are of training episodes, as the runs' own; where there are none, the others, with what
    they are.
    """
    training = rows[rows["metric"].str.contains(TRAINING)]
    other = training.empty
    rows = rows if other else training
    if rows.empty:
        return ""
    bounds = dict.fromkeys((number(rows["mean"].min()), number(rows["mean"].max())))
    score = contents.published_score(rows.iloc[0]) if len(rows) == 1 else " to ".join(bounds)
    names = rows["source"].str.replace(SOURCE_DETAIL, "", regex=True)
    versions = rows["env_id"].map(lambda env_id: analysis.split_version(env_id)[1])
    sources = [
        f"{name} {', '.join(sorted(set(own)))}" for name, own in versions.groupby(names, sort=False)
    ]
    what = rows["metric"].unique() if other else []
    return f"{score} ({'; '.join([*sources, *what])})"


def gains_table(runs):
    """What each variant of a script gains on its defaults -> Table, or None.

    It is given for several variants in several environments: their scores in each, and the
    difference of normalised scores over all.
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
        found = analysis.ablation(raw, scaled, script, base, others, "iqm")["all"]
        lines.append((f"`{base}`", *score_cells(own, base, raw, bounds), ""))
        for row in found.to_dict("records"):
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
    return Table(header, lines, "numbers")


def score_cells(runs, variant, raw, env_ids):
    """A variant's scores in each environment; how many seeds where others have more."""
    most = max(len(scores) for own in raw.values() for scores in own.values())
    cells = []
    for env_id in env_ids:
        scores = raw[variant].get(env_id, np.zeros(0))
        count = f" ({len(scores)} seed{'s' * (len(scores) > 1)})"
        cells.append(mean_std(scores) + (count if 0 < len(scores) < most else ""))
    return cells


# Figures


def shown_figure(report):
    """The figure of a report that stands for all: what variants gain, else the curves."""
    drawn = report.all(Figure)
    for figure in drawn:
        if figure.name.startswith("ablation_") and figure.name.endswith("_all"):
            return replace(figure, name="ablation")
    for figure in drawn:
        if figure.name == "overview":
            return figure
    for figure in drawn:
        if isinstance(figure.plot, Curves):
            return replace(figure, name="overview")
    return None


def page_of(name, report):
    """A folder's report -> (text of its report.md, the figure in it or None)."""
    text = (
        "Drawn from runs.csv and curves.csv by python -m benchmark.report.results. For all figures "
        f"see python -m benchmark.report benchmark/results/{name} --out FOLDER."
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


def main():
    results = read_results()
    published = folders.read_published()
    for found in results:
        print(f"benchmark/results/{found.name}", flush=True)
        write_results(found, published)
    speed.draw(speed.read(RESULTS / "speed.csv"), RESULTS / "speed_chart.png")
    tables = make_tables(results, published)
    for path in pages():
        text = path.read_text(encoding="utf-8")
        try:
            filled = fill(text, tables)
        except LookupError as error:
            sys.exit(f"error: {path.name}: {error.args[0]}")
        if filled != text:
            print(path.relative_to(ROOT))
            page.write(path, filled)


if __name__ == "__main__":
    main()
