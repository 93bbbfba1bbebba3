"""Runs as two pandas frames, read from folders of runs or from the CSVs of an earlier report.

runs      a row for each run: COLUMNS; stored, whether it comes from a CSV; score, which is
          last_100 of a finished run where it is finite. A missing text is "", a number NaN
episodes  EPISODE, a row for each training episode; of a run from a CSV, for each point of its
          curve
"""

import hashlib
import io
import json
import shlex
from pathlib import Path

import numpy as np
import pandas as pd

from benchmark import ROOT

COLUMNS = {
    "run": str,  # its folder's name, with a number where another run has it
    "env_id": str,
    "script": str,  # without .py
    "seed": str,
    "variant": str,  # runs of one variant differ in their environment and seed only
    "flags": str,  # that differ from the script's defaults
    "base": bool,  # it has no flags but those that all runs of its script share
    "state": str,  # finished, failed or unfinished
    "note": str,  # why it isn't finished
    "planned_steps": float,
    "steps": float,  # at the end of the last training episode
    "last_100": float,  # mean return of the last 100 training episodes
    "evaluation_mean": float,  # mean return of the evaluation at the end
    "steps_per_second": float,
    "wall_seconds": float,
    "versions": str,
    "machine": str,
    "git_commit": str,
    "script_hash": str,  # of the script's text
    "command": str,
}
EPISODE = {"run": str, "global_step": float, "wall_seconds": float, "return": float}
PACKAGES = ("python", "torch", "gymnasium", "mujoco", "ale-py", "numpy")
# Runs that differ only in these flags are of one variant
NO_VARIANT = (
    "env_id seed run_name exp_name total_timesteps torch_deterministic cuda compile num_threads "
    "num_workers cpus_per_worker address track wandb_project_name wandb_entity capture_video "
    "checkpoint_interval eval_episodes eval_interval resume evaluate"
).split()
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError)


def read(paths, compare=()):
    """Reads folders -> (runs, episodes, troubles: a sentence for each folder that can't be read).

    Variants of compare's folders have the folder's name behind theirs.
    """
    sources = [(Path(path), "") for path in paths]
    sources += [(Path(path), f" ({Path(path).resolve().name})") for path in compare]
    rows = []
    episodes = []
    troubles = []
    seen = set()
    for path, mark in sources:
        for folder in folders_in(path):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                is_stored = (folder / "runs.csv").exists()
                found, points = read_csvs(folder) if is_stored else read_run(folder)
            except DAMAGE as error:
                troubles.append(f"{folder.name} can't be read ({type(error).__name__}: {error})")
                continue
            taken = {row["run"] for row in rows}
            again = f" ({len(rows)})"
            names = {row["run"]: row["run"] + again * (row["run"] in taken) for row in found}
            for row in found:
                marked = {"run": names[row["run"]], "variant": row["variant"] + mark, "mark": mark}
                rows.append(row | marked)
            episodes.append(points.assign(run=points["run"].map(names)))
    set_bases([row for row in rows if not row["stored"]])
    return run_frame(rows), pd.concat([no_episodes(), *episodes], ignore_index=True), troubles


def folders_in(path):
    """The folders of runs in a sweep's folder or in one of runs; a run's or a report's itself."""
    if (path / "config.json").exists() or (path / "runs.csv").exists():
        return [path]
    if (path / "runs").is_dir():
        path = path / "runs"
    begun = [*path.glob("*/config.json"), *path.glob("*/failed")]
    return sorted({file.parent for file in begun})


def run_frame(rows):
    """Dicts with COLUMNS and stored -> the frame of runs, sorted."""
    runs = pd.DataFrame(rows, columns=[*COLUMNS, "stored"]).astype(COLUMNS | {"stored": bool})
    counts = runs.groupby(["env_id", "variant"])["planned_steps"].transform("nunique")
    steps = runs["planned_steps"].map(" --total-timesteps {:.0f}".format).astype(str)
    runs["variant"] += steps.where(counts > 1, "")
    is_scored = (runs["state"] == "finished") & np.isfinite(runs["last_100"])
    runs["score"] = runs["last_100"].where(is_scored)
    runs["digits"] = runs["seed"].str.len()  # sorts seed 10 after seed 9
    runs = runs.sort_values(["env_id", "variant", "digits", "seed", "run"], ignore_index=True)
    return runs.drop(columns="digits")


def no_episodes():
    return pd.DataFrame(columns=list(EPISODE)).astype(EPISODE)


# A run's folder


def read_run(folder):
    """A run's folder -> ([its row], its episodes)."""
    config = json.loads((folder / "config.json").read_text())
    args = config["args"]
    command = config["command"]
    script = Path(command[0])
    run = folder.resolve().name
    env_id = str(args["env_id"])
    seed = str(args["seed"])
    flags = flags_of(args, config.get("defaults", {}))
    name = variant_in(run, env_id, script.stem, seed) or " ".join(flags)
    episodes = read_episodes(folder)
    steps = episodes["global_step"].max()
    wall_seconds = episodes["wall_seconds"].max()
    state, note, evaluation_mean, length = end_of(folder)
    row = {
        "run": run,
        "env_id": env_id,
        "script": script.stem,
        "seed": seed,
        "variant": f"{script.stem} {name}".strip(),
        "flags": " ".join(flags),
        "flag_set": set(flags),
        "state": state,
        "note": note,
        "planned_steps": length or args.get("total_timesteps", np.nan),
        "steps": steps,
        "last_100": episodes["return"].tail(100).mean(skipna=False),
        "evaluation_mean": evaluation_mean,
        "steps_per_second": steps / wall_seconds,
        "wall_seconds": wall_seconds,
        "versions": pairs(config.get("versions", {}), PACKAGES),
        "machine": pairs(config.get("machine", {}), ("cpu", "cpu_capability", "gpu")),
        "git_commit": config.get("git_commit", ""),
        "script_hash": hash_of(folder / script.name),
        "command": shlex.join(["python", script.name, *command[1:]]),
        "stored": False,
    }
    return [row], episodes.assign(run=run)


def flags_of(args, defaults):
    """The flags that make a variant, those that differ from the defaults: ["--gamma 0.9", ...]."""
    texts = []
    for name, value in args.items():
        if name in NO_VARIANT or (name in defaults and value == defaults[name]):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            texts.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list) else [value]
            texts.append(shlex.join([f"--{flag}", *map(str, values)]))
    return texts


def variant_in(name, env_id, script, seed):
    """The variant in a folder's name ENV__SCRIPT__VARIANT__SEED, "" in any other name."""
    start = f"{env_id}__{script}__".replace("/", "-").replace(":", "-")
    end = f"__{seed}"
    if name.startswith(start) and name.endswith(end):
        return name[len(start) : -len(end)]
    return ""


def set_bases(rows):
    """Sets base in the rows of runs, which are compared within their script and mark."""
    common = {}
    for row in rows:
        key = row["script"], row["mark"]
        common[key] = common.get(key, row["flag_set"]) & row["flag_set"]
    for row in rows:
        row["base"] = row["flag_set"] == common[row["script"], row["mark"]]


def read_episodes(folder):
    """A run's episodes.csv -> frame with the columns EPISODE, all but run filled."""
    path = folder / "episodes.csv"
    text = path.read_bytes() if path.exists() else b""
    whole = text[: text.rfind(b"\n") + 1]  # the last line may be half written
    if not whole:
        return no_episodes()
    columns = list(EPISODE)[1:]
    numbers = pd.read_csv(
        io.BytesIO(whole), usecols=columns, dtype=float, float_precision="round_trip"
    )
    return numbers.assign(run="")[list(EPISODE)]


def end_of(folder):
    """How a run has ended -> (state, note, mean return of its evaluation, its total_timesteps).

    The last is None where evaluation.json doesn't have it. A resume may have changed it.
    """
    note = ""
    try:
        result = json.loads((folder / "evaluation.json").read_text())
        mean = pd.Series(result["returns"], dtype=float).mean(skipna=False)
        return "finished", "", mean, result.get("total_timesteps")
    except FileNotFoundError:
        pass
    except DAMAGE as error:
        note = f"evaluation.json can't be read ({error})"
    if (folder / "failed").exists():
        return "failed", (folder / "failed").read_text().strip(), np.nan, None
    return "unfinished", note, np.nan, None


def pairs(values, names):
    """Those of names that a dict has, as text: "python=3.11.2 torch=2.9.0"."""
    return " ".join(f"{name}={values[name]}" for name in names if name in values)


def hash_of(path):
    """The first 8 hex digits of a file's sha256, "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8] if path.exists() else ""


# CSVs


def write_csvs(folder, runs, curves):
    """Writes runs.csv and curves.csv for read()."""
    whole = dict.fromkeys(("planned_steps", "steps"), "Int64")
    runs[list(COLUMNS)].astype(whole).to_csv(folder / "runs.csv", index=False)
    curves[list(EPISODE)].to_csv(folder / "curves.csv", index=False, float_format="%.12g")


def read_csvs(folder):
    """A folder's runs.csv -> (rows, the points of curves.csv, which may be missing)."""
    runs = pd.read_csv(
        folder / "runs.csv",
        dtype=COLUMNS,
        keep_default_na=False,
        na_values={name: "" for name, kind in COLUMNS.items() if kind is float},
        float_precision="round_trip",
    )
    if "run" not in runs:
        raise ValueError("it has no column run")
    for name, kind in COLUMNS.items():
        if kind is float and name not in runs:  # of an older report
            runs[name] = np.nan
    runs = runs.reindex(columns=list(COLUMNS), fill_value="").astype(COLUMNS)
    points = no_episodes()
    if (folder / "curves.csv").exists():
        points = pd.read_csv(folder / "curves.csv", dtype=EPISODE, float_precision="round_trip")
        points = points[list(EPISODE)]
    return runs.assign(stored=True).to_dict("records"), points


def read_published():
    """Scores that others have published, a frame.

    Columns: scripts (names of those with that algorithm), env_id, metric (what the score is), kind
    ("training" or "evaluation": returns of which episodes), source and publisher (in short); mean,
    std (NaN where unknown), total_timesteps and seeds.
    """
    path = ROOT / "benchmark" / "published.csv"
    return pd.read_csv(path, keep_default_na=False, na_values={"std": "", "seeds": ""})
