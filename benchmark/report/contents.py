"""What a report says: frames in, warnings and sections out."""

from dataclasses import dataclass, field
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmark.report import figures, stats, tables

ENOUGH_SEEDS = 10  # with fewer, intervals are too narrow
HOW_TO_READ = (
    "Last 100: a run's mean return in its last 100 training episodes; evaluation: its mean return "
    "in the evaluation at its end; both as mean +- standard deviation over the seeds of finished "
    "runs. IQM: interquartile mean of the last 100. Intervals are 95 % bootstrap intervals over "
    "seeds. Published scores are of the versions of the environment that stand behind them: those "
    "of other versions, or of another number of steps, can't be compared strictly. Steps/s and "
    "minutes are of the whole training, compilation included: they say little of short runs."
)
CURVES = (
    f"Each point is the mean return of the training episodes in the {stats.WINDOW:.0%} of all "
    "steps before it. Thick: interquartile mean of the finished seeds and its interval, as far as "
    "all of them go. Thin: single seeds, dashed where they are not in the mean."
)
NORMALISED = (
    "Scores are normalised: in each environment 0 is the lowest and 1 the highest score of the "
    "finished runs in this report."
)
IMPROVEMENT = "probability that a run of the first is better"


class Drawn(NamedTuple):
    """A figure of a section; name is that of its file."""

    name: str
    caption: str
    figure: Figure


@dataclass
class Section:
    title: str
    texts: list = field(default_factory=list)
    figures: list = field(default_factory=list)
    tables: list = field(default_factory=list)


def make_sections(runs, curves, published):
    """runs: of benchmark.report.runs; curves: of stats; published: published.csv -> [Section]."""
    looks = figures.looks_of(runs["variant"].unique())
    scores = tables.score_table(runs, published, with_speed=True)
    sections = [Section("Scores", [HOW_TO_READ], tables=[scores])]
    if len(curves):
        sections.append(curve_section(runs, curves, published, looks))
    if runs.dropna(subset="score")["variant"].nunique() > 1:
        sections.append(comparison_section(runs, looks))
    sections.append(Section("Variants", tables=[tables.variant_table(runs)]))
    sections.append(Section("Runs", tables=[tables.run_table(runs)]))
    return sections


def curve_section(runs, curves, published, looks):
    frames = (runs, curves, stats.centers(runs, curves), published, looks)
    section = Section("Curves", [CURVES])
    by_steps = figures.draw_curves(*frames)
    section.figures.append(Drawn("overview", "Return against steps.", by_steps))
    if curves["wall_seconds"].notna().any():
        caption = "Return against wall time; the means at the median of their seeds' times."
        by_time = figures.draw_curves(*frames, x="wall_seconds")
        section.figures.append(Drawn("wall_time", caption, by_time))
    return section


def comparison_section(runs, looks):
    """Statistics over environments, and what variants gain on the defaults."""
    section = Section("Comparison of variants", [NORMALISED])
    found = stats.aggregates(runs)
    label = "IQM of normalised scores"
    aggregate = figures.draw_intervals(found, label, looks)
    profile = figures.draw_profiles(stats.profiles(runs), looks)
    section.figures += [
        Drawn("aggregate", f"{label}, with its interval.", aggregate),
        Drawn("profile", "Performance profiles: share of runs above a score.", profile),
    ]
    section.tables.append(tables.interval_table(found, "variant", label))
    found = stats.improvements(runs)
    if len(found):
        caption = (
            f"The {IMPROVEMENT} than one of the second, a tie counting half (Mann-Whitney U), "
            "averaged over the environments that both have. At 0.5 neither is better."
        )
        drawn = figures.draw_intervals(found, IMPROVEMENT, looks, 0.5)
        section.figures.append(Drawn("improvement", caption, drawn))
        section.tables.append(tables.interval_table(found, "variants", IMPROVEMENT))
    found = stats.gains(runs)
    if len(found):
        label = "normalised score, all environments: IQM minus that of the defaults"
        drawn = figures.draw_intervals(found, label, looks, 0.0, bars=True)
        section.figures.append(Drawn("ablation", f"{label}, with its interval.", drawn))
        section.tables.append(tables.gains_table(runs, found))
    return section


def make_warnings(runs, troubles):
    """Sentences on what to know before looking at averages; troubles: what couldn't be read."""
    found = [f"{run.run} {run.state}: {run.note}" for run in runs.itertuples() if run.note]
    found += troubles
    finished = runs["state"] == "finished"
    for what, which in {
        "unfinished or failed, in no average": ~finished,
        "finished without a finite score, in no average": finished & runs["score"].isna(),
        "several of one seed, which all count": runs.duplicated(["env_id", "variant", "seed"]),
    }.items():
        if which.any():
            found.append(f"{which.sum()} of {len(runs)} runs: {what} ({some(runs[which]['run'])}).")
    counts = runs.dropna(subset="score").groupby(["variant", "env_id"]).size()
    if len(counts) and counts.min() < ENOUGH_SEEDS:
        found.append(
            f"As few as {counts.min()} finished seeds. Below {ENOUGH_SEEDS} intervals are too "
            "narrow: the true value is outside them more often than one time in twenty."
        )
    table = counts.unstack(fill_value=0)
    uneven = table.index[table.nunique(axis=1) > 1]
    if len(uneven):
        found.append(
            f"The number of finished seeds differs between environments ({some(uneven)}). In "
            "averages over environments, those with more seeds weigh more, and those without any "
            "are missing."
        )
    for column, by, what in (
        ("flags", "variant", "flags"),
        ("script_hash", "script", "texts of the script"),
    ):
        sizes = runs[runs[column] != ""].groupby(by)[column].nunique()
        found += [f"{name}: {n} different {what}." for name, n in sizes.items() if n > 1]
    for column in ("git_commit", "versions", "machine"):
        sizes = runs.loc[runs[column] != "", column].value_counts()
        if len(sizes) > 1:
            values = "; ".join(f"{value} ({n} runs)" for value, n in sizes.items())
            found.append(f"Runs differ in {column}: {values}.")
    return found


def some(names):
    """The first of several names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
