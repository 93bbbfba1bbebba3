"""What a report says: frames in, a benchmark.report.blocks.Report out."""

from collections import Counter

import numpy as np
import pandas as pd

from benchmark.report import analysis
from benchmark.report.blocks import (
    LONG,
    NAME,
    NOTE,
    NUMBER,
    SHORT,
    Caution,
    Curves,
    Figure,
    Heading,
    Intervals,
    Overview,
    Paragraph,
    Profile,
    Report,
    Table,
    slug,
)
from benchmark.report.differences import differences
from benchmark.report.formats import mean_std, number, unit_of, with_interval
from benchmark.runs import SCORE_NAME, SCORE_WORDS

ENOUGH_SEEDS = 10  # with fewer, intervals are too narrow
SHORT_S = 60  # s of a run below which its speed means little
TITLE_NAMES = 3  # environments that a report's title names
CENTER_NAMES = {"iqm": "IQM", "mean": "mean"}
HOW_TO_READ = (
    f"Averages, intervals and statistics cover finished runs only. {SCORE_NAME.capitalize()} "
    f"episodes: a run's mean return in its {SCORE_WORDS}; evaluation: its mean return in the "
    "evaluation after the training; both as mean +- standard deviation over seeds. IQM: "
    "interquartile mean, the mean of the middle half. Intervals are 95 % bootstrap intervals over "
    "seeds."
)


def make_report(runs, curves, published, troubles, notes, center="iqm", drawn=""):
    """The report of runs.

    runs: frame of benchmark.runs in the order of analysis.in_order; curves: of make_curves;
    published: frame of published.csv; troubles: what was damaged, texts; notes: about the names of
    variants, texts; center: "iqm" or "mean"; drawn: when the report was drawn, a text, or "".
    """
    env_ids = sorted(runs["env_id"].unique())
    others = " and others" if len(env_ids) > TITLE_NAMES else ""
    title = f"Report of {', '.join(env_ids[:TITLE_NAMES])}{others}"
    report = Report(title, sorted(runs["variant"].unique()))
    report.blocks += head(runs, troubles, notes, drawn)
    environments = []
    panels = []
    for env_id in env_ids:
        own = runs[runs["env_id"] == env_id]
        scores = published_rows(published, own, env_id)
        drawn_curves = analysis.curves_to_draw(own, curves, center)
        environments += environment_blocks(env_id, own, drawn_curves, scores, center)
        if len(drawn_curves):
            lines = published_lines(scores, env_id)
            data = analysis.against("steps", drawn_curves, lines)
            data.insert(0, "env_id", env_id)
            panels.append(data)
    if len(panels) > 1:
        report.blocks += [Heading("All environments"), overview(panels, center)]
    report.blocks += environments
    report.blocks += comparison_blocks(runs, center)
    report.blocks += every_run(runs)
    return report


def states_of(runs):
    """How many runs are in each state, as text."""
    counts = Counter(runs["state"])
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none yet"


def head(runs, troubles, notes, drawn):
    """The blocks before the first figure: which runs there are, and what to know about them."""
    damaged = f", {len(troubles)} damaged" if troubles else ""
    when = f"; drawn on {drawn}" if drawn else ""
    blocks = [Paragraph(f"Runs: {states_of(runs)}{damaged}{when}."), Paragraph(HOW_TO_READ)]
    blocks += map(Paragraph, notes)
    blocks += seed_warnings(runs)
    rows = differences(runs)
    rows += [("damaged", "1", trouble) for trouble in troubles]
    if rows:
        table = Table(("what", "runs", "which"), rows, (SHORT, SHORT, NOTE))
        blocks += [Heading("Runs that differ"), table]
    return blocks


def seed_warnings(runs):
    """Warnings: that there are few finished seeds, or not equally many everywhere."""
    counts = runs[runs["score"].notna()].groupby(["variant", "env_id"]).size()
    few = counts[counts < ENOUGH_SEEDS]
    blocks = []
    if len(few):
        where = ", ".join(sorted(few.index.get_level_values("env_id").unique()))
        text = (
            f"Fewer than {ENOUGH_SEEDS} seeds in {where} (the fewest: {few.min()}). With so few, "
            "intervals are too narrow: the true value is outside them more often than one time in "
            "twenty."
        )
        blocks.append(Caution(text))
    uneven = [variant for variant, own in counts.groupby("variant") if own.nunique() > 1]
    if uneven:
        text = (
            f"The number of finished seeds differs between environments ({', '.join(uneven)}). In "
            "averages over environments, those with more seeds weigh more."
        )
        blocks.append(Caution(text))
    return blocks


# An environment


def environment_blocks(env_id, runs, curves, rows, center):
    """The blocks of one environment: its curves, notes about published scores, its table.

    curves: of analysis.curves_to_draw; rows: its published scores, dicts.
    """
    lines = published_lines(rows, env_id)
    blocks = [Heading(env_id)]
    for x in ("steps", "wall_time"):
        data = analysis.against(x, curves, lines)
        has_curves = (data["kind"] != "published").any()  # wall times may be unknown
        if has_curves:
            blocks.append(curves_figure(env_id, data, x, center))
    if len(blocks) == 1:
        blocks.append(Paragraph("No curve: no episode has ended yet, or no curve is stored."))
    blocks += published_notes(env_id, runs, rows)
    blocks += speed_notes(runs)
    blocks.append(environment_table(env_id, runs, rows))
    return blocks


def published_rows(published, runs, env_id):
    """The published scores of the environment's scripts, dicts."""
    found = [
        analysis.published_of(published, script, env_id, runs["planned_steps"])
        for script in sorted(runs["script"].unique())
    ]
    return [row for rows in found for row in rows.to_dict("records")]


def published_lines(rows, env_id):
    """[(label, mean)] of the published scores to draw; labels name several algorithms.

    The curves are of training episodes, so scores of these are drawn, others only where there are
    none.
    """
    alike = [row for row in rows if row["kind"] == "training"]
    if alike:
        rows = alike
    several = len({row["algorithm"] for row in rows}) > 1
    return [(published_label(row, env_id, several), row["mean"]) for row in rows]


def published_score(row):
    """A published mean, with its standard deviation if that is known, as text."""
    mean = row["mean"]
    if np.isnan(row["std"]):
        return number(mean)
    return f"{number(mean)} +- {number(row['std'], mean)}"


def published_version(row, env_id):
    """The environment's version of a published score; "v4 not v5" if ours is another."""
    theirs = analysis.split_version(row["env_id"])[1]
    ours = analysis.split_version(env_id)[1]
    return theirs if theirs == ours else f"{theirs} not {ours}"


def published_label(row, env_id, with_algorithm):
    """A published score's label in a legend; names what it is unless it is a score as ours."""
    metric = "" if row["metric"] == SCORE_WORDS else f" ({row['metric']})"
    version = published_version(row, env_id)
    algorithm = f"{row['algorithm']}, " if with_algorithm else ""
    return f"{algorithm}{row['source']}, {version}: {published_score(row)}{metric}"


def published_cells(row, env_id):
    """A published score's cells in the table of an environment."""
    score = published_score(row)
    seeds = f"{row['seeds']:.0f}"
    what = f"{row['algorithm']}, {published_version(row, env_id)}; {row['metric']}"
    if row["kind"] == "evaluation":
        return row["source"], seeds, "-", "-", score, "-", "-", what
    return row["source"], seeds, score, "-", "-", "-", "-", what


def published_notes(env_id, runs, rows):
    """Paragraphs about what makes published scores hard to compare with these runs."""
    blocks = []
    ours = analysis.split_version(env_id)[1]
    theirs = sorted({analysis.split_version(row["env_id"])[1] for row in rows} - {ours})
    if theirs:
        text = (
            f"Some published scores are for {', '.join(theirs)} of this environment, these runs "
            f"for {ours}. Another version is another environment: take such scores as a rough "
            "guide."
        )
        blocks.append(Paragraph(text))
    steps = {row["total_timesteps"] for row in rows}
    own = {int(n) for n in runs["planned_steps"].dropna()}
    if steps and own != steps:
        theirs = " or ".join(f"{n:,}" for n in sorted(steps))
        ours = " or ".join(f"{n:,}" for n in sorted(own)) or "an unknown number of"
        text = f"Published scores are after {theirs} steps, these runs have {ours} steps."
        blocks.append(Paragraph(text))
    return blocks


def speed_notes(runs):
    """A paragraph where runs are too short for their speeds to mean much."""
    walls = runs.loc[runs["state"] == "finished", "wall_seconds"]
    if not (walls < SHORT_S).any():
        return []
    text = (
        "Some runs lasted less than a minute. Their wall time and steps/s are mostly start-up "
        "and compilation: don't compare speeds by them."
    )
    return [Paragraph(text)]


def curves_figure(env_id, data, x, center):
    caption = (
        f"Each point is the mean return of the training episodes in the {analysis.WINDOW:.0%} of "
        f"all steps before it. Thick: {CENTER_NAMES[center]} of the finished seeds and its "
        "interval, as far as all of them go. Thin: single seeds, dashed where they are not in the "
        "average."
    )
    if x == "wall_time":
        caption += " The thick curve is at the median of its seeds' times for each step."
    against = x.replace("_", " ")
    title = f"{env_id}: return against {against}"
    return Figure(slug(f"{env_id}_{against}"), title, caption, Curves(data, x))


def environment_table(env_id, runs, rows):
    """A row for each variant, then one for each published score."""
    walls = runs.loc[runs["state"] == "finished", "wall_seconds"]
    unit, seconds = unit_of(walls.dropna().median())
    header = (
        "variant or source",
        "seeds",
        f"{SCORE_NAME} episodes",
        "IQM of them [interval]",
        "evaluation",
        "steps/s",
        f"wall time, {unit}",
        "published for",
    )
    styles = (NAME, *[NUMBER] * 6, NOTE)
    lines = [
        (*variant_cells(variant, analysis.summarise(group), seconds), "")
        for variant, group in runs.groupby("variant")
    ]
    lines += [published_cells(row, env_id) for row in rows]
    if rows:
        return Table(header, lines, styles)
    return Table(header[:-1], [line[:-1] for line in lines], styles[:-1])


def variant_cells(variant, summary, seconds):
    """The cells of a variant's runs; seconds: the length of the unit of wall times."""
    speed = summary["steps_per_second"]
    wall = summary["wall_seconds"] / seconds
    return (
        variant,
        seeds_of(summary),
        mean_std(summary["scores"]),
        with_interval(*summary["iqm"]),
        mean_std(summary["evaluations"]),
        "-" if np.isnan(speed) else f"{speed:,.0f}",
        "-" if np.isnan(wall) else f"{wall:.1f}",
    )


def seeds_of(summary):
    """How many seeds are averaged, and of how many runs if there are more."""
    if summary["seeds"] == summary["runs"]:
        return str(summary["seeds"])
    return f"{summary['seeds']} of {summary['runs']}"


# All environments


def overview(panels, center):
    """The figure of all environments' curves. panels: data of Curves with env_id, one for each."""
    caption = (
        f"Thick: {CENTER_NAMES[center]} of the finished seeds and its interval. Thin: single "
        "seeds, dashed where they are not in the average. Dashed lines across: published scores."
    )
    title = "All environments: return against steps"
    data = pd.concat(panels, ignore_index=True)
    return Figure("overview", title, caption, Overview(data))


def comparison_blocks(runs, center):
    """Statistics over environments, and comparisons of variants with each other."""
    raw = analysis.scores_of(runs)
    scaled, bounds = analysis.scale(raw)
    if len(raw) < 2 and len(bounds) < 2:
        return []
    heading = "Over environments" if len(bounds) > 1 else "Between variants"
    ranges = [f"{name} {number(low)} to {number(high)}" for name, (low, high) in bounds.items()]
    text = (
        f"A score is a run's mean return in its {SCORE_WORDS}. It is normalised: in each "
        "environment 0 is the lowest and 1 the highest score of the finished runs in this report "
        f"({', '.join(ranges)})."
    )
    blocks = [Heading(heading), Paragraph(text)]
    if any(set(own) != set(bounds) for own in raw.values()):
        text = (
            "Not all variants have finished runs in the same environments. The aggregate and the "
            "profile of a variant are over its own environments: compare only variants that have "
            "the same ones."
        )
        blocks.append(Caution(text))
    found = aggregate_blocks(scaled, center) + improvement_blocks(runs, scaled)
    for family, own in runs.groupby("family"):
        found += ablation_blocks(family, own, raw, scaled, center)
    tables = [block for block in found if isinstance(block, Table)]
    others = [block for block in found if not isinstance(block, Table)]
    return [*blocks, *others, *tables]


def interval_rows(data):
    """Data of Intervals -> rows of a table."""
    return [
        (row["name"], str(row["environments"]), interval_of(row)) for row in data.to_dict("records")
    ]


def interval_of(row):
    """A row of the data of Intervals as text."""
    return with_interval(row["value"], row["low"], row["high"])


def aggregate_blocks(scaled, center):
    """The aggregate's figure and table, and the figure of performance profiles."""
    label = f"{CENTER_NAMES[center]} of normalised scores"
    data = analysis.aggregates(scaled, center)
    header = ("variant", "environments", f"{label} [interval]")
    profile_text = (
        "Share of runs whose normalised score is above tau, with its interval. Higher is better."
    )
    return [
        Figure("aggregate", label, f"{label}, with its interval.", Intervals(data, label)),
        Figure(
            "profile",
            "Performance profile",
            profile_text,
            Profile(analysis.profiles(scaled), "normalised score tau"),
        ),
        Table(header, interval_rows(data), (NAME, NUMBER, NUMBER)),
    ]


def improvement_blocks(runs, scaled):
    """The figure and the table of pairs of variants."""
    pairs, every = analysis.pairs_to_compare(runs, scaled)
    data = analysis.improvements(scaled, pairs)
    if data.empty:
        return []
    blocks = []
    if not every:
        text = (
            "Not every pair of variants is compared. Scripts with their defaults are compared with "
            "each other. Another variant is compared with its script's defaults (with all "
            "defaults, where its script has none here), and with its counterpart that has the "
            "same flags."
        )
        blocks.append(Paragraph(text))
    label = "probability that a run of the first is better"
    caption = (
        "Probability that a run of the first variant has a higher score than one of the second "
        "(Mann-Whitney U; a tie counts half), averaged over the environments that both have, with "
        "its interval. At 0.5 neither is better."
    )
    plot = Intervals(data, label, reference=0.5, limits=(-0.03, 1.03))
    header = ("variants", "environments", f"{label} [interval]")
    return [
        *blocks,
        Figure("improvement", "Probability of improvement", caption, plot),
        Table(header, interval_rows(data), (NAME, NUMBER, NUMBER)),
    ]


def ablation_blocks(family, runs, raw, scaled, center):
    """Figures and a table of what a family's variants gain on its defaults.

    family: as in the columns of benchmark.runs; runs: those of the family.
    """
    script = runs["script"].iloc[0]
    base = analysis.bases(runs).get(family)
    variants = sorted(runs["variant"].unique())
    if base not in raw:
        if len(variants) < 2:
            return []
        text = (
            f"{family} has no finished run with its defaults, so there is no figure of what "
            "its variants gain on them."
        )
        return [Paragraph(text)]
    others = [variant for variant in variants if variant != base and variant in raw]
    blocks = []
    rows = []
    found = analysis.ablation(raw, scaled, script, base, others, center)
    for where, data in found.items():
        place = "all environments" if where == "all" else where
        unit = "normalised score" if where == "all" else f"return in the {SCORE_NAME} episodes"
        label = f"{CENTER_NAMES[center]} minus that of {base}"
        title = f"{place}: difference to {base}"
        plot = Intervals(data, f"{unit}: {label}", bars=True, reference=0.0)
        caption = f"{place}: {label}, with its interval."
        name = slug(f"ablation_{base}_{where}")
        blocks.append(Figure(name, title, caption, plot, shows_gains=where == "all"))
        rows += [(f"{place}: {variant}", *rest) for variant, *rest in interval_rows(data)]
    if rows:
        header = ("variant", "environments", f"difference to {base} [interval]")
        blocks.append(Table(header, rows, (NAME, NUMBER, NUMBER)))
    return blocks


# Every run

COUNT = "{:,.0f}".format
# Column of benchmark.runs, its header, how its values become texts, its style
COLUMNS = (
    ("run", "run", str, NAME),
    ("env_id", "environment", str, NAME),
    ("variant", "variant", str, NAME),
    ("seed", "seed", str, SHORT),
    ("state", "state", str, SHORT),
    ("steps", "steps", COUNT, NUMBER),
    ("last_100", SCORE_NAME, number, NUMBER),
    ("evaluation_mean", "evaluation", number, NUMBER),
    ("steps_per_second", "steps/s", COUNT, NUMBER),
    ("wall_seconds", "wall s", COUNT, NUMBER),
    ("command", "command", str, LONG),
    ("versions", "versions", str, LONG),
    ("machine", "machine", str, LONG),
    ("git_commit", "git commit", str, NOTE),
)


def every_run(runs):
    """The table of all runs."""
    names, header, forms, styles = zip(*COLUMNS, strict=True)
    rows = [
        [cell_text(value, form) for value, form in zip(values, forms, strict=True)]
        for values in runs[list(names)].itertuples(index=False)
    ]
    return [Heading("Every run"), Table(header, rows, styles, small=True)]


def cell_text(value, form):
    """A value as text; "-" if it is missing."""
    is_missing = pd.isna(value) or value == ""
    return "-" if is_missing else form(value)
