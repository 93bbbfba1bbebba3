"""Tables of texts: pure functions of the frames of benchmark.report.runs and of stats."""

import html
import re
from typing import NamedTuple

import numpy as np

from benchmark.report import stats


class Table(NamedTuple):
    """header and rows are texts; align has a letter for each column: l for words, r for numbers."""

    header: tuple
    rows: list
    align: str


def markdown(table):
    rule = ["---:" if letter == "r" else " --- " for letter in table.align]
    lines = [" | ".join(map(escaped, row)) for row in (table.header, *table.rows)]
    lines = [f"| {line} |" for line in lines]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def escaped(text):
    """A text in Markdown, on one line."""
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", "; ")


# Numbers as texts


def number(x, like=None):
    """A return to read: 1,443, 88.8 or -6.71; with the digits that like would have, if given."""
    size = abs(x if like is None else like)
    digits = 0 if size >= 1000 else 1 if size >= 10 else 2
    return f"{round(float(x), digits) + 0.0:,.{digits}f}"  # + 0.0: -0.001 is 0.00


def with_interval(value, low, high):
    """An estimate of stats, "-" where it is NaN."""
    if np.isnan(value):
        return "-"
    size = np.nanmax(np.abs([value, low, high]))
    if np.isnan(low):
        return f"{number(value, size)} [one seed]"
    return f"{number(value, size)} [{number(low, size)}, {number(high, size)}]"


def mean_std(values):
    """Mean +- standard deviation (ddof=0) of those that aren't NaN; one stands alone, none is -."""
    values = values.dropna()
    if len(values) < 2:
        return number(values.iloc[0]) if len(values) else "-"
    mean = values.mean()
    std = values.std(ddof=0)
    like = max(abs(mean), std)
    return f"{number(mean, like)} +- {number(std, like)}"


def count(x):
    return "-" if np.isnan(x) else f"{x:,.0f}"


# Scores


def score_table(runs, published, with_speed=False):
    """A row for each environment and variant, with the published scores beside it.

    Variants are named, and planned steps have a column, only if there are several.
    """
    several = runs["variant"].nunique() > 1
    lines = []
    for (env_id, variant), own in runs.groupby(["env_id", "variant"]):
        scores = own["score"].dropna()
        done = own[own["state"] == "finished"]
        seeds = f"{len(scores)}" if len(scores) == len(own) else f"{len(scores)} of {len(own)}"
        line = {"environment": env_id}
        if several:
            line = {"environment, variant": f"{env_id}, `{variant}`"}
        if runs["planned_steps"].nunique() > 1:
            steps = sorted(own["planned_steps"].dropna().unique())
            line["steps"] = " or ".join(map(count, steps))
        line |= {"seeds": seeds, "last 100": mean_std(scores)}
        found = stats.iqm([scores.to_numpy()]) if len(scores) else (np.nan,) * 3
        line["IQM [95 % interval]"] = with_interval(*found)
        line["evaluation"] = mean_std(done["evaluation_mean"])
        if with_speed:
            line["steps/s"] = count(done["steps_per_second"].median())
            line["minutes"] = number(done["wall_seconds"].median() / 60) if len(done) else "-"
        line["published"] = published_range(published_of(published, own))
        lines.append(line)
    header = tuple(lines[0])
    return Table(header, [tuple(line.values()) for line in lines], f"l{'r' * (len(header) - 2)}l")


def split_version(env_id):
    """HalfCheetah-v5 -> ("HalfCheetah", "v5"); a name without a version -> (name, "")."""
    name, version = re.fullmatch(r"(.*?)(?:-(v\d+))?", env_id).groups()
    return name, version or ""


def published_of(published, runs):
    """The rows of published.csv for the scripts of an environment's runs, in any version of it.

    Where some are after as many steps as the runs, it is only those. Scores of evaluations only
    count where there are none of training episodes, as the runs' own are.
    """
    names = published["env_id"].map(lambda other: split_version(other)[0])
    is_same = names == split_version(runs["env_id"].iloc[0])[0]
    is_own = published["scripts"].map(lambda own: not set(own.split()).isdisjoint(runs["script"]))
    rows = published[is_same & is_own]
    as_long = rows[rows["total_timesteps"].isin(runs["planned_steps"])]
    rows = rows if as_long.empty else as_long
    training = rows[rows["kind"] == "training"]
    return rows if training.empty else training


def published_range(rows):
    """Published scores as text: the lowest and the highest, whose they are, and what they are."""
    if rows.empty:
        return ""
    means = rows["mean"]
    score = " to ".join(dict.fromkeys((number(means.min()), number(means.max()))))
    if len(rows) == 1 and not rows["std"].isna().any():
        score = f"{score} +- {number(rows['std'].iloc[0], means.iloc[0])}"
    versions = rows["env_id"].map(lambda env_id: split_version(env_id)[1])
    sources = [
        f"{publisher} {', '.join(sorted(set(own)))}"
        for publisher, own in versions.groupby(rows["publisher"], sort=False)
    ]
    others = rows.loc[rows["kind"] != "training", "metric"].unique()
    return f"{score} ({'; '.join([*sources, *others])})"


# Comparisons


def interval_table(intervals, what, label):
    """A frame of stats.intervals as a table."""
    rows = [
        (row.name, str(row.environments), with_interval(row.value, row.low, row.high))
        for row in intervals.itertuples(index=False)
    ]
    return Table((what, "environments", f"{label} [95 % interval]"), rows, "lrr")


def gains_table(runs, gains):
    """Scores in each environment, and gains (of stats) on the defaults over all; None without."""
    env_ids = sorted(runs.dropna(subset="score")["env_id"].unique())
    lines = []
    for base, own in gains.groupby("base", sort=False):
        lines.append((f"`{base}`", *score_cells(runs, base, env_ids), "", ""))
        for row in own.itertuples():
            found = (with_interval(row.value, row.low, row.high), with_interval(*row.chance))
            lines.append((f"`{row.name}`", *score_cells(runs, row.variant, env_ids), *found))
    labels = (
        "all: IQM of normalised scores minus the defaults' [95 % interval]",
        "all: probability that a run is better than one of the defaults [95 % interval]",
    )
    align = f"l{'r' * (len(env_ids) + 2)}"
    return Table(("variant", *env_ids, *labels), lines, align) if lines else None


def score_cells(runs, variant, env_ids):
    """A variant's score in each environment, with the number of seeds where others have more."""
    sizes = runs.dropna(subset="score").groupby(["env_id", "variant"]).size()
    cells = []
    for env_id in env_ids:
        own = runs[(runs["variant"] == variant) & (runs["env_id"] == env_id)]["score"].dropna()
        is_less = 0 < len(own) < sizes.max()
        seeds = f" ({len(own)} {'seed' if len(own) == 1 else 'seeds'})" if is_less else ""
        cells.append(mean_std(own) + seeds)
    return cells


def variant_table(runs):
    """What the variants are: the distinct flags, commits, versions and machines of their runs."""
    names = ["flags", "git_commit", "script_hash", "versions", "machine"]
    found = runs.groupby("variant")[names].agg(lambda x: "\n".join(sorted(set(x) - {""})) or "-")
    return Table(["variant", *names], found.reset_index().to_numpy().tolist(), "llllll")


def run_table(runs):
    """Every run, with the names of the columns of runs.csv."""
    names = ["run", "variant", "seed", "state", "steps", "last_100", "evaluation_mean"]
    names += ["steps_per_second", "wall_seconds", "command"]
    rows = [
        [x if isinstance(x, str) else "-" if np.isnan(x) else number(x) for x in row]
        for row in runs[names].itertuples(index=False)
    ]
    return Table(names, rows, "llllrrrrrl")
