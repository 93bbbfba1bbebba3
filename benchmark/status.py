"""Shows how far a sweep is, at any time, from any machine that sees its folder.

    python -m benchmark.status DIR [--json]

It reads what the sweep, its workers and the scripts have written, and changes nothing.
benchmark.sweep shows the same table while it runs.
"""

import json
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmark.store import (
    ENDS,
    STATES,
    NoLocks,
    Store,
    StoreError,
    is_held,
    planned_steps,
    read_evaluation,
    read_progress,
)

SILENT_S = 300  # s without a word after which a run's note says so


def read_rows(store):
    """make_row() of all runs of a sweep, those that run first. Raises StoreError."""
    runs = store.plan()["runs"]
    jobs = {name: store.job(name) for name in runs}
    return make_rows(store, runs, jobs)


def make_rows(store, runs, jobs, most=None):
    """make_row() of all jobs, or of the first `most`, those that run first.

    runs: {name: record of the plan}; jobs: {name: Store.job(name)}.
    """
    order = {state: i for i, state in enumerate(STATES)}
    names = sorted(jobs, key=lambda name: order[jobs[name]["state"]])[:most]
    return [make_row(store, name, runs[name], jobs[name]) for name in names]


def make_row(store, name, record, job):
    """A run's facts and what became of it, as plain values; None is unknown.

    "name", "env_id", "script" (path), "seed", "variant", "state", "failures", "step" (of "steps"),
    "speed" (env steps/s) and "eta_s" of one that runs, "return" (mean of the last training
    episodes), "evaluation" (mean return), "started" (Unix time), "place", "note".
    """
    run_dir = store.run_dir(name)
    total_steps = planned_steps(record["args"])
    progress = read_progress(run_dir, total_steps)
    returns, damage = read_evaluation(run_dir)
    row = {"name": name}
    row |= {key: record[key] for key in ("env_id", "script", "seed", "variant")}
    row |= {key: job[key] for key in ("state", "failures", "started", "place")}
    row |= {
        "step": progress.get("step"),
        "steps": total_steps,
        "speed": None,
        "eta_s": None,
        "return": finite(progress.get("return")),
        "evaluation": None,
        "note": job["error"],
    }
    if job["state"] == "running":
        row["speed"] = finite(progress.get("speed"))
        row["eta_s"] = finite(progress.get("eta_s"))
        row["note"] = note_of_running(store, name, job)
        if not progress and not row["note"]:
            row["note"] = "no episode is logged yet"
    if job["state"] == "finished" and total_steps is not None:
        row["step"] = total_steps  # its last episode ended earlier
    if returns:
        row["evaluation"] = finite(sum(returns) / len(returns))
    if damage and damage not in row["note"]:
        row["note"] = f"{row['note']}; {damage}".removeprefix("; ")
    return row


def finite(value):
    """value, or None if it is missing or no number that JSON can hold."""
    if value is None or not math.isfinite(value):
        return None
    return value


def note_of_running(store, name, job):
    """What is worth knowing of a run that runs."""
    notes = []
    if job["failures"]:
        notes.append(f"attempt {job['failures'] + 1}")
    silent_s = time.time() - max(job["started"], store.last_written(name))
    if silent_s > SILENT_S:
        notes.append(f"silent for {silent_s / 60:.0f} min, {job['place']}")
    return ", ".join(notes)


def summary(states):
    """How many runs are in each state, in one line."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def steps_of(row):
    """How far a run is: "2,048/8,192"."""
    if row["step"] is None:
        return ""
    if row["steps"] is None:
        return f"{row['step']:,}"
    return f"{row['step']:,}/{row['steps']:,}"


def speed_of(row):
    return "" if row["speed"] is None else f"{row['speed']:,.1f} steps/s"


def eta_of(row):
    return "" if row["eta_s"] is None else str(timedelta(seconds=round(row["eta_s"])))


def return_of(row):
    """The mean return: of the evaluation of a finished run, else of the training so far."""
    value = row["evaluation"] if row["state"] == "finished" else row["return"]
    return "" if value is None else f"{value:.1f}"


def make_table(rows, title, left_out=0):
    """The rows as a table of rich; left_out: how many runs are not among them."""
    table = Table(title=title)
    longest = max((len(row["name"]) for row in rows), default=0)
    table.add_column("run", overflow="fold", min_width=min(30, longest))
    for name in ("state", "steps", "speed", "ETA", "return", "note"):
        table.add_column(name, overflow="fold")
    for row in rows:
        facts = (row["state"], steps_of(row), speed_of(row), eta_of(row), return_of(row))
        table.add_row(escape(row["name"]), *facts, escape(row["note"]))
    if left_out:
        table.caption = f"and {left_out} more"
    return table


def progress_lines(rows):
    """A line for each run that runs and has ended an episode, for logs."""
    lines = []
    for row in rows:
        if row["state"] == "running" and row["step"] is not None:
            facts = [steps_of(row), speed_of(row), f"{eta_of(row) or '?'} left"]
            facts.append(f"return {return_of(row) or '-'}")
            lines.append(f"  {row['name']}: {', '.join(filter(None, facts))}")
    return lines


def who_looks_after(store):
    """Which sweep has the folder, in one line."""
    try:
        if is_held(store.sweep_lock):
            return f"looked after by {store.sweep_lock.read_text()}"
    except NoLocks as error:
        return f"{error}, so nobody can tell whether a sweep looks after it"
    except (OSError, UnicodeDecodeError):
        pass
    return "No sweep is running here; run the same command again to continue."


@dataclass
class Flags:
    """The flags of this command."""

    dir: tyro.conf.Positional[Path]  # folder of the sweep: its --dir
    json: bool = False  # print the rows of the table as JSON


def main():
    config = (tyro.conf.FlagCreatePairsOff,)
    flags = tyro.cli(Flags, prog="python -m benchmark.status", description=__doc__, config=config)
    store = Store(flags.dir)
    try:
        rows = read_rows(store)
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for trouble in store.troubles:
        print(f"warning: {trouble}", file=sys.stderr)
    if flags.json:
        print(json.dumps(rows, indent=1))
        return
    states = [row["state"] for row in rows]
    Console(width=None if sys.stdout.isatty() else 200).print(make_table(rows, summary(states)))
    if any(state not in ENDS for state in states):
        print(who_looks_after(store))


if __name__ == "__main__":
    main()
