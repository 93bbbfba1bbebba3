"""Reads runs for benchmark.report.

They are those that there are, in folders and sweeps, and those that a sweep has planned.
"""

import csv
import json
import re
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmark.collect import (
    ROOT,
    changed_flags,
    printable,
    read_config,
    read_episodes,
    read_run,
    script_defaults,
    subfolders,
)
from benchmark.sweep import ENDS
from benchmark.worker import last_line, read_evaluation, read_job, read_json

# What a damaged or half-written folder makes its readers raise
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError)
# Flags that change what a run shows or how fast it is, not what it learns
RUN_ONLY = (
    "exp_name",
    "torch_deterministic",
    "cuda",
    "compile",
    "num_threads",
    "track",
    "wandb_project_name",
    "wandb_entity",
    "capture_video",
    "video_interval",
    "save_model",
    "checkpoint_interval",
    "eval_episodes",
    "eval_max_steps",
    "eval_interval",
    "resume",
    "evaluate",
)
SHORT = 0.9  # part of the planned steps below which a finished run is said to be short
NO_VARIANT = (*RUN_ONLY, "total_timesteps", "env_id", "seed", "run_name")  # make no variant


@dataclass
class Run:
    """A run that is planned, under way or ended.

    args: all its flags, as in config.json, or those known of a planned one; command: its command
    line; row: as collect.read_run has it, {} before it begins; at, returns: see read_arrays;
    folder: its own, which need not be there; damage: what is wrong with its evaluation.json, or "".
    """

    name: str
    script: str
    args: dict
    state: str  # finished, unfinished; in a sweep also waiting, running, failed
    command: str = ""
    note: str = ""
    row: dict = field(default_factory=dict)
    machine: str = ""
    variant: str = ""
    mark: str = ""  # in variant: of a run to compare with
    at: dict = field(default_factory=dict)
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0))
    folder: Path | None = None
    damage: str = ""

    env_id = property(lambda self: str(self.args.get("env_id", "unknown")))
    seed = property(lambda self: self.args.get("seed", "unknown"))
    planned_steps = property(lambda self: self.args.get("total_timesteps"))

    @property
    def score(self):
        """Mean return of a finished run's last 100 training episodes.

        None for others, and where it isn't finite.
        """
        value = self.row.get("last_100", "")
        if self.state == "finished" and value != "" and np.isfinite(value):
            return float(value)
        return None


def read_arrays(folder):
    """A run's folder -> (when its episodes ended, their returns).

    The first is {"steps", "wall time": (episodes,) float64, ascending, s}; the second is
    (episodes,).
    """
    columns = ("global_step", "wall_seconds", "return")
    table = [[float(episode[name]) for name in columns] for episode in read_episodes(folder)]
    table = np.array(table).reshape(-1, 3)
    if not np.isfinite(table[:, :2]).all():
        raise ValueError("a step or a time in episodes.csv is no number")
    ascending = np.maximum.accumulate(table[:, :2])
    return {"steps": ascending[:, 0], "wall time": ascending[:, 1]}, table[:, 2]


def read_begun(folder):
    """A run's folder -> Run. Raises DAMAGE."""
    config = read_config(folder)
    row = read_run(folder)
    at, returns = read_arrays(folder)
    if not isinstance(config["args"].get("total_timesteps", 0), int):
        raise ValueError("total_timesteps in config.json is no number")
    words = map(str, config.get("machine", ()))
    machine = " ".join(word for word in words if not word.startswith("#"))
    for name, unit in (("cores", "cores"), ("device", "")):
        if name in config:
            machine += f", {config[name]} {unit}".rstrip()
    return Run(
        row["run"],
        row["script"],
        config["args"],
        row["status"],
        row["command"],
        row=row,
        machine=machine,
        at=at,
        returns=returns,
        folder=folder,
        damage=read_evaluation(folder)[1],
    )


def read_word(word, default):
    """A word of a command line as the value that config.json has for it.

    Its type is that of the flag's default.
    """
    if isinstance(default, str):
        return word
    try:
        value = json.loads(word)
    except ValueError:
        return word
    return float(value) if isinstance(default, float) else value


def planned_args(defaults, words):
    """The flags of a run that hasn't begun.

    They are the script's defaults, and what its command line changes.
    """
    args = dict(defaults)
    flags = defaultdict(list)
    flag = "words"
    for word in words:
        if word.startswith("--"):
            flag = word[2:].replace("-", "_")
            flags[flag] = []
        else:
            flags[flag].append(word)
    for flag, values in flags.items():
        values = [read_word(value, defaults.get(flag)) for value in values]
        if isinstance(defaults.get(flag), list):
            args[flag] = values
        elif values:
            args[flag] = values[0]
        else:
            args[flag.removeprefix("no_")] = not flag.startswith("no_")
    return args


def read_sweep(folder):
    """A sweep's folder -> (runs, troubles): those planned, begun or not, and others in runs/."""
    plan = read_json(folder / "sweep.json").get("runs")
    runs = []
    troubles = []
    if not isinstance(plan, dict):
        troubles.append(f"sweep.json of {folder.name} doesn't say which runs are planned")
        plan = {}
    begun = [path.name for path in subfolders(folder / "runs")]
    for name in [*plan, *(name for name in begun if name not in plan)]:
        job = read_job(folder, name)
        damage = ""
        run = None
        try:
            if name in begun:
                run = read_begun(folder / "runs" / name)
        except DAMAGE as error:
            if name not in plan or job["state"] in ENDS:  # else it has just begun
                damage = f"{name}: not a run, or damaged ({type(error).__name__}: {error})"
        if run is None and name in plan:
            try:
                script, words = plan[name]["script"], plan[name]["words"]
                args = planned_args(script_defaults([script]), words)
                command = shlex.join(["python", script, *words])
                run = Run(name, Path(script).stem, args, job["state"], command)
                run.folder = folder / "runs" / name
            except DAMAGE as error:
                damage = f"{name}: sweep.json is damaged there ({type(error).__name__}: {error})"
        if run and name in plan:
            run.state = job["state"]
            if run.state == "finished":
                run.state = run.row.get("status", "unfinished")
            note = job["error"]
            if not note and run.state == "failed":
                note = last_line(folder / "logs" / f"{name}.log")
            run.note = without_paths(note)
        runs += [run] if run else []
        troubles += [damage] if damage else []
    return runs, troubles


def read_runs(paths, out):
    """Folders of runs, of sweeps, or runs -> (runs, troubles), each run once.

    The folder out is none of them.
    """
    runs = []
    troubles = []
    seen = set()
    out = out and out.resolve()
    for path in paths:
        if path.resolve() in seen:
            continue
        seen.add(path.resolve())
        if (path / "sweep.json").exists():
            found, wrong = read_sweep(path)
            runs += [run for run in found if run.folder.resolve() not in seen]
            troubles += wrong
            seen |= {folder.resolve() for folder in (path / "runs").glob("*")}
            continue
        if (path / "config.json").exists():
            folders = [path]
        else:
            folders = [p for p in subfolders(path) if p.resolve() not in {*seen, out}]
            seen |= {folder.resolve() for folder in folders}
        for folder in folders:
            try:
                runs.append(read_begun(folder))
            except DAMAGE as error:
                name = folder.absolute().name
                what = f"{type(error).__name__}: {error}"
                troubles.append(f"{name}: not a run, damaged or just begun ({what})")
    return runs, [printable(without_paths(trouble)) for trouble in troubles]


def without_paths(text):
    """text with the absolute paths in it cut to their last part."""
    path = r"(?<![^\s'\"=(:,\[])(?:/[\w.@+-]+)+"
    return re.sub(path, lambda found: found[0].rsplit("/", 1)[1], text)


def name_variants(runs, others):
    """Gives each run its variant -> {script: flags that all its variants have}.

    A variant is the script and the flags that differ from its defaults, or, for a script of
    somewhere else, from one run to another; the steps where they aren't those of most runs of the
    variant (of others where runs has none), or where there is no most. others are to be compared,
    and get a mark. What all variants of a script have in common is no part of their names: it is
    what is returned, as on a command line.
    """
    everything = runs + others
    shared = {}
    for script in {run.script for run in everything}:
        same = [run for run in everything if run.script == script]
        # Of one that hasn't begun not all flags may be known
        known = [run for run in same if run.row] or same
        defaults = script_defaults([script]) or {
            name: x
            for name, x in known[0].args.items()
            if all(run.args.get(name) == x for run in known)
        }
        flags = [
            {
                name: x
                for name, x in run.args.items()
                if name not in NO_VARIANT and (name not in defaults or x != defaults[name])
            }
            for run in same
        ]
        common = {
            name: x for name, x in flags[0].items() if all(other.get(name) == x for other in flags)
        }
        if all(other == common for other in flags):  # one variant is named in full
            common = {}
        shared[script] = without_paths(changed_flags(common, {}))
        for run, own in zip(same, flags):
            own = {name: x for name, x in own.items() if name not in common}
            run.variant = without_paths(f"{script} {changed_flags(own, {})}".rstrip())
    lengths = defaultdict(Counter)
    for group in (runs, others):
        known = set(lengths)
        for run in group:
            if run.planned_steps and (run.env_id, run.variant) not in known:
                lengths[run.env_id, run.variant][run.planned_steps] += 1
    for run in everything:
        usual = lengths[run.env_id, run.variant].most_common(2)
        no_most = len(usual) == 2 and usual[0][1] == usual[1][1]
        if run.planned_steps and (no_most or run.planned_steps != usual[0][0]):
            run.variant += f" --total-timesteps {run.planned_steps}"
    mark = mark_of(runs, others)
    for run in others:
        run.mark = f" ({mark})"
        run.variant += run.mark
    return {script: flags for script, flags in shared.items() if flags}


def mark_of(runs, others):
    """What tells the others from the runs.

    It is their git commit, where they have one of their own, or "compared".
    """
    commits = {run.row["git_commit"] for run in runs if run.row}
    theirs = {run.row["git_commit"] for run in others if run.row}
    if len(theirs) == 1 and not theirs & (commits | {"unknown"}):
        return theirs.pop()
    return "compared"


def differences(runs):
    """What is to be known before runs are averaged: [(what, how many, which)], strings."""
    rows = []
    for state in ("failed", "running", "waiting", "unfinished"):
        group = [run for run in runs if run.state == state]
        begun = [run for run in group if run.row]
        rest = [run for run in group if not run.row]
        if state == "failed":
            for run in group:
                note = run.note or "its log is empty"
                rows.append(("failed", "1", f"{run.name}{progress(run)}: {note}"))
            continue
        if begun:
            names = {"waiting": "stopped, to be resumed"}
            names["unfinished"] = "unfinished: stopped or running"
            rows.append((names.get(state, state), str(len(begun)), which(begun)))
        if rest:
            name = "not begun" if state == "waiting" else f"{state}, nothing written yet"
            rows.append((name, str(len(rest)), which(rest)))
    done = [run for run in runs if run.state == "finished"]
    if silent := [run for run in done if run.score is None]:
        name = "finished without a finite return: in no average"
        rows.append((name, str(len(silent)), which(silent)))
    if wrong := [run for run in runs if not np.isfinite(run.returns).all()]:
        rows.append(("returns that aren't finite: in no curve", str(len(wrong)), which(wrong)))
    if wrong := [run for run in runs if run.damage]:
        names = "; ".join(f"{run.name}: {run.damage}" for run in wrong)
        rows.append(("not finished, as their evaluation can't be read", str(len(wrong)), names))
    if wrong := [run for run in runs if not np.isfinite(run.row.get("evaluation_mean") or 0.0)]:
        rows.append(("evaluations that aren't finite", str(len(wrong)), which(wrong)))
    short = [run for run in done if (run.row["steps"] or 0) < SHORT * (run.planned_steps or 0)]
    if short:
        name = "finished long before their planned steps: they count in full"
        names = "; ".join(run.name + progress(run) for run in short)
        rows.append((name, str(len(short)), names))
    twice = Counter((run.env_id, run.variant, run.seed) for run in runs)
    if same := [run for run in runs if twice[run.env_id, run.variant, run.seed] > 1]:
        rows.append(("more than one run of a seed: each counts", str(len(same)), which(same)))
    for env_id in sorted({run.env_id for run in runs}):
        own = [run for run in runs if run.env_id == env_id]
        rows += several(f"{env_id}: different numbers of steps", own, steps_of)
    begun = [run for run in runs if run.row]
    rows += several("different git commits", begun, lambda run: run.row["git_commit"])
    rows += several("different versions", begun, lambda run: run.row["versions"])
    rows += several("different machines: compare no speeds", begun, lambda run: run.machine)
    return rows


def steps_of(run):
    return f"{run.planned_steps:,}" if run.planned_steps else "unknown"


def progress(run):
    planned = f" of {run.planned_steps:,}" if run.planned_steps else ""
    return f" (step {run.row['steps'] or 0:,}{planned})" if run.row else ""


def which(runs):
    """Runs by environment, variant and seed, in a line.

    Of those that aren't finished it says how far they are.
    """
    groups = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.env_id, run.variant, str(run.seed).zfill(9))):
        far = progress(run) if run.state != "finished" else ""
        groups[run.env_id, run.variant].append(f"{run.seed}{far}")
    return "; ".join(
        f"{env_id}, {variant}: seed {', '.join(seeds)}"
        for (env_id, variant), seeds in groups.items()
    )


def several(what, runs, value_of):
    """A row for each value of value_of(run), if there is more than one.

    Those of the most frequent are not listed.
    """
    groups = defaultdict(list)
    for run in runs:
        groups[value_of(run)].append(run)
    order = sorted(groups.items(), key=lambda item: -len(item[1]))
    if len(order) < 2:
        return []
    (most, group), *others = order
    rows = [(what, str(len(group)), most)]
    return rows + [(what, str(len(group)), f"{value}: {which(group)}") for value, group in others]


def read_published():
    """The rows of published.csv, dicts of strings.

    Those without a number of seeds or a deviation have "" there.
    """
    with open(ROOT / "benchmark" / "published.csv", newline="") as file:
        return list(csv.DictReader(file))


def split_version(env_id):
    """("HalfCheetah", "v5") of HalfCheetah-v5; ("Name", "") where there is none."""
    found = re.fullmatch(r"(.*)-(v\d+)", env_id)
    return found.groups() if found else (env_id, "")


def published_of(rows, script, env_id):
    """Those of published.csv's rows for a script and an environment of any version."""
    return [
        row
        for row in rows
        if row["algorithm"] == script
        and split_version(row["env_id"])[0] == split_version(env_id)[0]
    ]
