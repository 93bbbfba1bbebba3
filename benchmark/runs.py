"""Runs as pandas frames, read from folders and from CSVs. All damage is met here.

A folder of a run, of runs or of a sweep, or one with the runs.csv and curves.csv of a report is a
source like any other. What can't be read is left out and named; nothing is raised.

The columns of the frames:

    runs      RUN_COLUMNS, one row a run. Missing numbers are NaN, missing texts ""
    episodes  id, global_step, wall_seconds (s), return: of runs in folders, ascending in
              global_step within a run
    curves    the same columns, of runs in CSVs: the return smoothed along a grid, wall_seconds NaN
              where it isn't known
"""

import csv
import hashlib
import io
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark.store import (
    ENDS,
    LARGEST,
    STATES,
    Store,
    StoreError,
    last_line,
    planned_steps,
    read_evaluation,
    whole_number,
)
from benchmark.variants import name_variants, unique_names, without_paths

PACKAGES = ("python", "torch", "gymnasium", "mujoco", "ale-py", "numpy")
EPISODE = ("global_step", "wall_seconds", "return")
CURVE_DIGITS = 12  # of the numbers in curves.csv
# A run's score is its mean return over these episodes. The words are also a metric of published.csv
SCORE_NAME = "last 100"
SCORE_WORDS = "last 100 training episodes"


@dataclass(frozen=True, eq=False)
class Kind:
    """The kind of a column: what stands where a value is missing, and the column's dtype."""

    missing: object
    dtype: type


TEXT = Kind("", object)
NUMBER = Kind(np.nan, float)
WHOLE = Kind(np.nan, float)  # whole numbers
TRUTH = Kind(False, bool)
OTHER = Kind(None, object)
RUN_COLUMNS = {
    "id": OTHER,  # int, of this reading
    "run": TEXT,  # its folder's name
    "folder": OTHER,  # Path of the run's folder, or of its CSV's
    "compared": TRUTH,  # it was read from a folder of --compare
    "mark": TEXT,  # " (COMMIT)" or " (compared)" at the end of the variant's name: this report, or
    # the one that wrote the CSV, compares the run with others; else ""
    "from_csv": TRUTH,
    "env_id": TEXT,
    "script": TEXT,  # without .py
    "script_folder": TEXT,  # absolute, "" where unknown
    "script_hash": TEXT,  # the first 8 hex digits of the script's sha256, "" where unknown
    "seed": OTHER,  # int, or the text that stands in its place
    "suite_variant": TEXT,  # "" where no suite names it
    "args": OTHER,  # dict of all flags, None of a CSV
    "defaults": OTHER,  # dict, None where unknown
    "flags": TEXT,  # words: all that make its variant
    "shared": TEXT,  # those of them that all variants of its script have
    "hidden": TEXT,  # the others that the variant's name doesn't show
    "family": TEXT,  # script, origin and mark; base variants are chosen within it
    "variant": TEXT,
    "base": TRUTH,  # the variant is the script with its defaults (and what all variants share)
    "state": TEXT,  # finished or unfinished; in a sweep also waiting, running, failed
    "note": TEXT,  # why it failed
    "damage": TEXT,  # what is wrong with its evaluation.json
    "begun": TRUTH,  # its folder can be read
    "planned_steps": WHOLE,
    "steps": WHOLE,  # at the end of its last training episode
    "episodes": WHOLE,  # training episodes that have ended
    "not_finite": WHOLE,  # episodes whose return isn't finite
    "last_100": NUMBER,  # mean return of the last 100 training episodes
    "last_20": NUMBER,  # of the last 20
    "evaluation_mean": NUMBER,
    "evaluation_std": NUMBER,  # ddof=0
    "evaluation_episodes": WHOLE,
    "steps_per_second": NUMBER,  # steps / wall_seconds: compilation included, imports not
    "wall_seconds": NUMBER,
    "score": NUMBER,  # last_100 of a finished run, where it is finite
    "versions": TEXT,
    "machine": TEXT,
    "git_commit": TEXT,
    "command": TEXT,
}
# Columns that runs.csv doesn't have: they are about this computer alone, or follow from the rest
NOT_IN_CSV = (
    "id",
    "folder",
    "compared",
    "from_csv",
    "script_folder",
    "suite_variant",
    "args",
    "defaults",
    "score",
)
CSV_COLUMNS = [name for name in RUN_COLUMNS if name not in NOT_IN_CSV]
NEEDED = ("run", "env_id", "script", "variant", "state")  # of runs.csv
# What a damaged or half-written folder makes its readers raise
DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)


@dataclass
class Data:
    """What was read. notes: sentences about flags that the variants' names don't show."""

    runs: pd.DataFrame
    episodes: pd.DataFrame
    curves: pd.DataFrame
    notes: list
    troubles: list


def read(paths, compare=(), leave_out=None):
    """Reads folders, each run once -> Data. leave_out: the report's folder, which isn't a run."""
    reader = Reader(leave_out)
    for compared, group in ((False, paths), (True, compare)):
        for path in group:
            reader.read_path(Path(path), compared)
    runs, notes = name_variants(run_frame(reader.runs))
    return Data(
        runs=runs,
        episodes=series_frame(reader.episodes),
        curves=series_frame(reader.curves),
        notes=notes,
        troubles=[printable(without_paths(trouble)) for trouble in reader.troubles],
    )


def run_frame(rows):
    """Rows of runs (dicts, which may lack columns) -> frame with RUN_COLUMNS."""
    missing = {name: kind.missing for name, kind in RUN_COLUMNS.items()}
    dtypes = {name: kind.dtype for name, kind in RUN_COLUMNS.items()}
    frame = pd.DataFrame([missing | row for row in rows], columns=list(RUN_COLUMNS))
    return frame.astype(dtypes | {"id": int})


def series_frame(parts):
    """[(id, frame with the columns EPISODE)] -> one frame with the column id."""
    columns = {"id": int} | dict.fromkeys(EPISODE, float)
    if not parts:
        return pd.DataFrame(columns=list(columns)).astype(columns)
    frames = [part.assign(id=number) for number, part in parts]
    return pd.concat(frames, ignore_index=True)[list(columns)].astype(columns)


class Reader:
    """Collects what it reads: rows of runs, [(id, frame)] of episodes and of curves, troubles."""

    def __init__(self, leave_out):
        self.runs = []
        self.episodes = []
        self.curves = []
        self.troubles = []
        self.leave_out = leave_out and Path(leave_out).resolve()
        self.seen = set()

    def read_path(self, path, compared):
        """Reads a folder of any kind."""
        if self.was_seen(path):
            return
        if (path / "sweep.json").exists():
            self.read_sweep(path, compared)
        elif (path / "config.json").exists():
            self.read_folder(path, compared)
        elif has_csv(path):
            self.read_csv(path, compared)
        else:
            for folder in subfolders(path):
                if folder.resolve() != self.leave_out and not self.was_seen(folder):
                    self.read_folder(folder, compared)

    def was_seen(self, folder):
        """Whether this was asked before of the folder, by whichever of its paths."""
        place = folder.resolve()
        if place in self.seen:
            return True
        self.seen.add(place)
        return False

    def add(self, row, compared, episodes=None, curve=None):
        """Adds a run's row under the next id, with its frame of episodes or its stored curve."""
        number = len(self.runs)
        self.runs.append(row | {"id": number, "compared": compared})
        if episodes is not None:
            self.episodes.append((number, episodes))
        if curve is not None:
            self.curves.append((number, curve))

    def read_folder(self, folder, compared):
        """Reads a run's folder."""
        try:
            row, episodes = read_run(folder)
        except DAMAGE as error:
            name = folder.absolute().name
            self.troubles.append(f"{name}: not a run, damaged or just begun ({said(error)})")
            return
        self.add(row, compared, episodes)

    def read_sweep(self, folder, compared):
        """Reads a sweep's folder: the runs planned, begun or not, and others in its runs/."""
        store = Store(folder)
        plan = {"runs": {}, "scripts": {}}
        try:
            plan = store.plan()
            self.troubles += store.troubles
        except StoreError as error:
            self.troubles.append(str(error))
        begun = {path.name: path for path in subfolders(folder / "runs")}
        for name in [*plan["runs"], *(name for name in begun if name not in plan["runs"])]:
            if not self.was_seen(store.run_dir(name)):
                self.read_sweeps_run(store, plan, name, name in begun, compared)

    def read_sweeps_run(self, store, plan, name, begun, compared):
        """Reads a run of a sweep."""
        row = {}
        episodes = None
        planned = name in plan["runs"]
        job = store.job(name)
        if planned:
            try:
                row = planned_row(store, plan, name, job)
            except DAMAGE as error:
                self.troubles.append(f"{name}: its record in sweep.json is damaged ({said(error)})")
        if begun:
            try:
                found, episodes = read_run(store.run_dir(name))
                row = found | known_to_sweep(row, found)
            except DAMAGE as error:
                if not planned or job["state"] in ENDS:  # else it has just begun
                    self.troubles.append(f"{name}: not a run, or damaged ({said(error)})")
        if row:
            self.add(row, compared, episodes)

    def read_csv(self, folder, compared):
        """Reads the runs.csv of a folder, and the curves.csv beside it."""
        try:
            rows, troubles = read_runs_csv(folder / "runs.csv")
        except DAMAGE as error:
            self.troubles.append(f"runs.csv of {folder.name} can't be read ({said(error)})")
            return
        curves = {}
        try:
            curves, more = read_curves_csv(folder / "curves.csv", [row["run"] for row in rows])
            troubles += more
        except DAMAGE as error:
            self.troubles.append(f"curves.csv of {folder.name} can't be read ({said(error)})")
        self.troubles += [f"{trouble} of {folder.name}" for trouble in troubles]
        for row in rows:
            self.add(row | {"folder": folder}, compared, curve=curves.get(row["run"]))


def said(error):
    """An error in a few words."""
    reason = getattr(error, "strerror", None) or error
    return f"{type(error).__name__}: {reason}"


def has_csv(folder):
    """Whether a folder holds a report's CSVs. One that also holds runs is read as these runs."""
    if not (folder / "runs.csv").exists():
        return False
    return not any((path / "config.json").exists() for path in subfolders(folder))


def subfolders(folder):
    """The folders in a folder, sorted, without links to one another."""
    real = {}
    for path in sorted(folder.glob("*"), key=lambda path: (path.is_symlink(), path)):
        if path.is_dir():
            real.setdefault(path.resolve(), path)
    return sorted(real.values())


def printable(value):
    """value with \\udcff written out wherever a text, or a text within it, can't be encoded.

    Names of folders on Linux and strings in JSON may hold such code points.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, list):
        return [printable(x) for x in value]
    if isinstance(value, dict):
        return {printable(name): printable(x) for name, x in value.items()}
    return value


# A run's folder


def read_run(folder):
    """A run's folder -> (its row, its episodes). Raises DAMAGE."""
    config = printable(json.loads((folder / "config.json").read_bytes()))
    args = config["args"]
    steps = planned_steps(args)
    if steps is None and "total_timesteps" in args:
        raise ValueError("total_timesteps in config.json is no number of steps")
    command = config.get("command", [])
    script = Path(config.get("script") or command[0])
    episodes = read_episodes(folder / "episodes.csv")
    evaluation, damage = read_evaluation(folder)
    row = {
        "run": printable(folder.absolute().name),
        "folder": folder,
        "env_id": str(args["env_id"]),
        "script": script.stem,
        "script_folder": str(script.parent) if script.is_absolute() else "",
        "script_hash": hash_of(folder / script.name),
        "seed": args["seed"] if isinstance(args["seed"], int) else str(args["seed"]),
        "args": args,
        "defaults": dict(config["defaults"]) if "defaults" in config else None,
        "state": "unfinished" if evaluation is None else "finished",
        "damage": damage,
        "begun": True,
        "planned_steps": np.nan if steps is None else steps,
        "versions": versions_of(config.get("versions", {})),
        "machine": machine_of(config),
        "git_commit": str(config.get("git_commit") or "unknown"),
        "command": without_paths(shlex.join(["python", script.name, *command[1:]])),
    }
    row |= summary_of(episodes) | evaluation_of(evaluation)
    return row | {"score": score_of(row)}, episodes


def read_episodes(path):
    """A run's episodes.csv -> frame with the columns EPISODE, ascending. Raises DAMAGE."""
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
    if not whole:
        return pd.DataFrame(columns=EPISODE, dtype=float)
    frame = pd.read_csv(
        io.BytesIO(whole), usecols=EPISODE, dtype=float, float_precision="round_trip"
    )
    episodes = frame[list(EPISODE)]
    if not are_steps(episodes["global_step"]) or not np.isfinite(episodes["wall_seconds"]).all():
        raise ValueError("a step or a time in episodes.csv is none")
    ascending = episodes[["global_step", "wall_seconds"]].cummax()
    return episodes.assign(**ascending)


def are_steps(values):
    """Whether all values of a column are whole, and small enough to be counted."""
    values = values.to_numpy()
    return ((np.abs(values) <= LARGEST) & (values == np.floor(values))).all()


def hash_of(path):
    """The first 8 hex digits of the sha256 of a file, "" where there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    except OSError:
        return ""


def versions_of(versions):
    """{package: version} -> those of PACKAGES as a text, "python=3.11.2 torch=2.9.0"."""
    return " ".join(f"{name}={versions[name]}" for name in PACKAGES if name in versions)


def machine_of(config):
    """What config.json says about the machine, as a text."""
    machine = config.get("machine", "")
    if not isinstance(machine, dict):  # of an earlier version, or of a script of somebody's own
        return str(machine)
    return ", ".join(f"{name} {x}" for name, x in machine.items() if name != "torch")


def summary_of(episodes):
    """A run's columns that follow from its episodes, a dict."""
    returns = episodes["return"].to_numpy()
    summary = {
        "episodes": len(returns),
        "not_finite": np.count_nonzero(~np.isfinite(returns)),
    }
    if not len(returns):
        return summary
    steps = episodes["global_step"].iloc[-1]
    wall = episodes["wall_seconds"].iloc[-1]
    with np.errstate(invalid="ignore"):  # returns may be infinite
        means = {"last_100": np.mean(returns[-100:]), "last_20": np.mean(returns[-20:])}
    return (
        summary
        | means
        | {
            "steps": steps,
            "wall_seconds": wall,
            "steps_per_second": steps / wall if wall else np.nan,
        }
    )


def evaluation_of(returns):
    """A run's columns that follow from its evaluation, a dict.

    returns: those of the evaluation's episodes, None without an evaluation.
    """
    columns = {"evaluation_episodes": len(returns or ())}
    if returns:
        with np.errstate(invalid="ignore"):  # returns may be infinite
            columns |= {"evaluation_mean": np.mean(returns), "evaluation_std": np.std(returns)}
    return columns


def score_of(row):
    """A run's score: last_100 if it has finished and that is a finite number, else NaN."""
    value = row.get("last_100", np.nan)
    if row["state"] != "finished" or not np.isfinite(value):
        return np.nan
    return value


# A sweep


def planned_row(store, plan, name, job):
    """The row of a run that has only been planned."""
    record = printable(plan["runs"][name])
    script = Path(record["script"])
    defaults = plan["scripts"].get(plan["runs"][name]["script"], {}).get("defaults")
    note = job["error"]
    if not note and job["state"] == "failed":
        note = last_line(store.log_file(name))
    steps = planned_steps(record["args"])
    return {
        "run": name,
        "folder": store.run_dir(name),
        "env_id": record["env_id"],
        "script": script.stem,
        "script_folder": str(script.parent),
        "seed": record["seed"],
        "suite_variant": record["variant"],
        "args": record["args"],
        "defaults": printable(defaults),
        "state": job["state"],
        "note": printable(without_paths(note)),
        "planned_steps": np.nan if steps is None else steps,
        "command": without_paths(shlex.join(["python", str(script), *record["words"]])),
    }


def known_to_sweep(planned, found):
    """What the plan and the job know better than a run's own folder.

    planned, found: the rows of both. That a run is finished is its folder's to say: it may have
    become so since the job was read.
    """
    if not planned:
        return {}
    names = ["suite_variant", "note"]
    if found["state"] != "finished":
        names.append("state")
    if found["defaults"] is None:
        names.append("defaults")
    return {name: planned[name] for name in names}


# CSVs


def write_csv(folder, runs, curves):
    """Writes runs.csv, and curves.csv if there are curves, for read() to read.

    runs, curves: frames as in Data. Runs that share a name are numbered.
    """
    names = unique_names(runs["run"])
    table = runs.assign(run=names)[CSV_COLUMNS]
    for name, kind in RUN_COLUMNS.items():
        if kind is WHOLE and name in table:
            table[name] = table[name].astype("Int64")
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "runs.csv", index=False, encoding="utf-8", na_rep="")
    path = folder / "curves.csv"
    if curves.empty:
        path.unlink(missing_ok=True)
        return
    by_id = dict(zip(runs["id"], names, strict=True))
    points = curves.assign(run=curves["id"].map(by_id))[["run", *EPISODE]]
    points.to_csv(path, index=False, float_format=f"%.{CURVE_DIGITS}g")


def read_table(path, needed):
    """The lines of a CSV as dicts of str. Raises DAMAGE, also if a column of needed is missing."""
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets begin with a mark
        reader = csv.DictReader(file, restval="")
        try:
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            lines = list(reader)
        except csv.Error as error:
            raise ValueError(str(error)) from None
    if missing:
        raise ValueError(f"it has no column {', '.join(missing)}")
    return lines


def read_runs_csv(path):
    """A runs.csv -> (rows of runs, troubles). Raises DAMAGE."""
    rows = []
    troubles = []
    names = set()
    for number, cells in enumerate(read_table(path, NEEDED), 2):
        try:
            row = row_of(cells)
            if row["run"] in names:
                raise ValueError("the run's name is there twice")
        except ValueError as error:
            troubles.append(f"line {number} ({cells['run']}): {error}; runs.csv")
            continue
        names.add(row["run"])
        rows.append(row)
    return rows, troubles


def row_of(cells):
    """The cells of a line of runs.csv -> a run's row. Raises ValueError."""
    row = {"from_csv": True}
    for name in CSV_COLUMNS:
        cell = cells.get(name, "")
        kind = RUN_COLUMNS[name]
        if kind is TEXT:
            row[name] = cell
        elif kind is TRUTH:
            row[name] = truth_of(name, cell)
        elif kind in (NUMBER, WHOLE):
            row[name] = number_of(name, cell)
            if kind is WHOLE and cell and whole_number(row[name]) is None:
                raise ValueError(f"{name} is no whole number: {cell[:50]}")
    seed = cells.get("seed", "")
    row["seed"] = int(seed) if seed.isdecimal() else seed
    empty = [name for name in NEEDED if not row[name]]
    if empty:
        raise ValueError(f"no {', '.join(empty)}")
    if row["state"] not in (*STATES, "unfinished"):
        raise ValueError(f"the state {row['state']} is unknown")
    row["family"] = row["family"] or row["script"]
    return row | {"score": score_of(row)}


def truth_of(name, cell):
    """A cell of the column name as bool; an empty one is False. Raises ValueError."""
    if cell not in ("True", "False", ""):
        raise ValueError(f"{name} is {cell}, neither True nor False")
    return cell == "True"


def number_of(name, cell):
    """A cell of the column name as float; an empty one is NaN. Raises ValueError."""
    if cell == "":
        return np.nan
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{name} is no number: {cell}") from None


def read_curves_csv(path, names):
    """A curves.csv -> ({run: frame with the columns EPISODE}, troubles). Raises DAMAGE.

    The file may be missing. names: the runs of the runs.csv beside it.
    """
    if not path.exists():
        return {}, []
    frame = pd.read_csv(
        path,
        dtype={"run": str} | dict.fromkeys(EPISODE, float),
        usecols=["run", *EPISODE],
        keep_default_na=False,
        na_values={name: ["", "nan"] for name in EPISODE},
        float_precision="round_trip",
    )
    curves = {}
    troubles = []
    for name, points in frame.groupby("run", sort=False):
        points = points[list(EPISODE)].sort_values("global_step", kind="stable")
        if name not in names:
            troubles.append(f"the run {name} isn't in runs.csv; curves.csv")
        elif (
            not (points["global_step"] <= LARGEST).all() or not np.isfinite(points["return"]).all()
        ):
            troubles.append(f"{name}: a step or a return is no number; curves.csv")
        else:
            curves[name] = points
    return curves, troubles


def read_published():
    """The rows of published.csv, scores that others have published.

    Columns: algorithm, env_id, metric (what the score is), kind ("training" or "evaluation":
    returns of which episodes), source and publisher (the source in short) as texts; mean, std (NaN
    where unknown), total_timesteps and seeds as numbers.
    """
    path = Path(__file__).parent / "published.csv"
    return pd.read_csv(path, keep_default_na=False, na_values={"std": [""], "seeds": [""]})
