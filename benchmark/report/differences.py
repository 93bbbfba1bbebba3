"""Runs that differ from the others, which a reader has to know before looking at averages.

All functions take a frame of benchmark.runs, in the order of analysis.in_order.
"""

import numpy as np

# Part of the planned steps below which a finished run is said to be short: whole rollouts may leave
# out nearly half of them
SHORT = 0.5


def differences(runs):
    """Rows of the table of runs that differ -> [(what, how many, which)], texts."""
    done = runs[runs["state"] == "finished"]
    rows = [*of_states(runs), *of_planned_steps(runs)]
    found = {
        "finished without a finite return: in no average": done[done["score"].isna()],
        "returns that aren't finite: in no curve": runs[runs["not_finite"] > 0],
        "evaluations that aren't finite": runs[has_wrong_evaluation(runs)],
        "more than one run of a seed: each counts": runs[
            runs.duplicated(["env_id", "variant", "seed"], keep=False)
        ],
    }
    rows += [(what, str(len(own)), which(own)) for what, own in found.items() if len(own)]
    damaged = runs[runs["damage"] != ""]
    if len(damaged):
        names = "; ".join(f"{run.run}: {run.damage}" for run in damaged.itertuples())
        rows.append(("not finished: their evaluation can't be read", str(len(damaged)), names))
    begun = runs[runs["begun"]]
    rows += several("different git commits", begun, begun["git_commit"])
    rows += several("different versions", begun, begun["versions"])
    rows += several("different machines: don't compare speeds", begun, begun["machine"])
    return rows


def has_wrong_evaluation(runs):
    """Which runs have an evaluation whose mean isn't finite, a boolean column."""
    return (runs["evaluation_episodes"] > 0) & ~np.isfinite(runs["evaluation_mean"])


def of_states(runs):
    """Rows for the runs that haven't finished; each failed one has a row of its own."""
    rows = []
    for run in runs[runs["state"] == "failed"].itertuples():
        note = run.note or "its log is empty"
        rows.append(("failed", "1", f"{run.run}{progress(run)}: {note}"))
    for state, written, what in (
        ("running", True, "running"),
        ("running", False, "running, nothing written yet"),
        ("waiting", True, "stopped, to be resumed"),
        ("waiting", False, "not begun"),
        ("unfinished", True, "unfinished: stopped or running"),
    ):
        own = runs[(runs["state"] == state) & (runs["begun"] == written)]
        if len(own):
            rows.append((what, str(len(own)), which(own)))
    return rows


def of_planned_steps(runs):
    """Rows for finished runs that are short, and for environments with different plans."""
    done = runs[runs["state"] == "finished"]
    rows = []
    short = done[done["steps"].fillna(0) < SHORT * done["planned_steps"].fillna(0)]
    if len(short):
        names = "; ".join(run.run + progress(run) for run in short.itertuples())
        what = "finished long before their planned steps: they count in full"
        rows.append((what, str(len(short)), names))
    for env_id, own in runs.groupby("env_id"):
        steps = own["planned_steps"].map(lambda n: "unknown" if np.isnan(n) else f"{n:,.0f}")
        rows += several(f"{env_id}: different numbers of steps", own, steps)
    return rows


def progress(run):
    """How far a run has come, as text; "" if it has written nothing."""
    if not run.begun:
        return ""
    steps = 0 if np.isnan(run.steps) else run.steps
    planned = "" if np.isnan(run.planned_steps) else f" of {run.planned_steps:,.0f}"
    return f" (step {steps:,.0f}{planned})"


def which(runs):
    """Runs by environment, variant and seed, in one line; with their progress if not finished."""
    groups = []
    for (env_id, variant), own in runs.groupby(["env_id", "variant"], sort=False):
        seeds = [
            str(run.seed) if run.state == "finished" else f"{run.seed}{progress(run)}"
            for run in own.itertuples()
        ]
        groups.append(f"{env_id}, {variant}: seed {', '.join(seeds)}")
    return "; ".join(groups)


def several(what, runs, values):
    """A row for each distinct value in values, a column of runs, if there are several.

    The runs that have the most frequent value aren't listed.
    """
    counts = values.value_counts()
    if len(counts) < 2:
        return []
    first, *others = counts.index
    rows = [(what, str(counts[first]), first)]
    for value in others:
        rows.append((what, str(counts[value]), f"{value}: {which(runs[values == value])}"))
    return rows
