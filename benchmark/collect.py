"""Collects run folders into a CSV, a row for each run, finished or not, and a Markdown table.

    python -m benchmark.collect RUNS_DIR... [--out FILE.csv] [--curves FILE.csv]

RUNS_DIR is a run's folder or a folder of them. A run is finished when its evaluation.json can be
read; its score there is empty after --eval-episodes 0. In the CSV, steps and wall_seconds
(compilation included, imports not) are those of the run's last training episode, steps_per_second
is their quotient; last_100 and last_20 are mean returns of the run's last training episodes. The
curves are a row for each training episode, and for each evaluation during the training, its mean
return. The files of this repository's own results are in benchmark/results/.
"""

import argparse
import csv
import importlib
import json
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark.worker import read_evaluation

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("python", "torch", "gymnasium", "mujoco", "ale-py", "numpy")
HEADER = (
    "Mean +- standard deviation over the finished runs (ddof=0, as CleanRL and openrlbenchmark "
    "have it) of\n"
    "a run's mean return in its last 100 training episodes, and of its mean return in the "
    "deterministic evaluation.\n\n"
    "| environment | script | flags | finished: seeds | last 100 episodes | evaluation | "
    "steps/s, median | unfinished |\n"
    "|---|---|---|---|---:|---:|---:|---|"
)


def script_defaults(command):
    """The default flags of a command line's script, {} if it is none of this repository."""
    name = Path(command[0]).stem
    sys.path.insert(0, str(ROOT))
    if not (ROOT / f"{name}.py").is_file():
        return {}
    defaults = asdict(importlib.import_module(name).Args())
    return json.loads(json.dumps(defaults))  # as config.json has them


def changed_flags(args, defaults):
    """The flags that differ from the defaults, as on a command line.

    Those with a column of their own are left out.
    """
    words = []
    for name, value in args.items():
        changed = name not in defaults or value != defaults[name]
        if not changed or name in ("env_id", "seed", "run_name"):
            continue
        words.append(f"--{'no-' * (value is False)}{name}".replace("_", "-"))
        if isinstance(value, bool):
            continue
        for x in value if isinstance(value, list) else [value]:
            words.append(str(x).removesuffix(".0") if isinstance(x, float) else str(x))
    return shlex.join(words)


def subfolders(folder):
    """The folders in a folder, sorted; a link to one of them is none."""
    real = {}
    for path in sorted(folder.glob("*"), key=lambda path: (path.is_symlink(), path)):
        if path.is_dir():
            real.setdefault(path.resolve(), path)
    return sorted(real.values())


def printable(value):
    """value, or what it contains, with \\udcff for what is no character.

    Linux has such names of folders, and JSON such strings.
    """
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, list):
        return [printable(x) for x in value]
    if isinstance(value, dict):
        return {printable(name): printable(x) for name, x in value.items()}
    return value


def read_config(run):
    """A run's config.json, printable."""
    return printable(json.loads((run / "config.json").read_text()))


def read_episodes(run):
    """The rows of a run's episodes.csv, as dicts of strings."""
    text = (run / "episodes.csv").read_text() if (run / "episodes.csv").exists() else ""
    whole = text[: text.rfind("\n") + 1]  # the last line may be half written
    return list(csv.DictReader(whole.splitlines()))


def read_run(run):
    """A run's folder -> its row of the CSV; what it doesn't have yet is "".

    Raises what a damaged folder makes it.
    """
    config = read_config(run)
    episodes = read_episodes(run)
    script = Path(config["command"][0])
    returns = [float(episode["return"]) for episode in episodes]
    steps = int(episodes[-1]["global_step"]) if episodes else ""
    wall = float(episodes[-1]["wall_seconds"]) if episodes else ""
    evaluation, _ = read_evaluation(run)
    return {
        "run": printable(run.name),
        "env_id": config["args"]["env_id"],
        "script": script.stem,
        "seed": config["args"]["seed"],
        "flags": changed_flags(config["args"], script_defaults(config["command"])),
        "status": "unfinished" if evaluation is None else "finished",
        "steps": steps,
        "episodes": len(episodes),
        "last_100": np.mean(returns[-100:]) if returns else "",
        "last_20": np.mean(returns[-20:]) if returns else "",
        "evaluation_mean": np.mean(evaluation) if evaluation else "",
        "evaluation_std": np.std(evaluation) if evaluation else "",
        "evaluation_episodes": len(evaluation or ()),
        "steps_per_second": steps / wall if wall else "",
        "wall_seconds": wall,
        "versions": " ".join(
            f"{name}={config['versions'][name]}" for name in PACKAGES if name in config["versions"]
        ),
        "git_commit": config["git_commit"] or "unknown",
        "command": shlex.join(["python", script.name, *config["command"][1:]]),
    }


def read_curves(run):
    """A run's folder -> rows of its curves: env_id, seed, run, kind, global_step, return."""
    args = read_config(run)["args"]
    head = {"env_id": args["env_id"], "seed": args["seed"], "run": printable(run.name)}
    rows = []
    for episode in read_episodes(run):
        step = int(episode["global_step"])
        rows.append({**head, "kind": "training", "global_step": step, "return": episode["return"]})
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "run"  # TensorBoard can't open a path that isn't UTF-8
        link.symlink_to(run.resolve())
        events = EventAccumulator(str(link), size_guidance={"scalars": 0}).Reload()
    tag = "eval/episodic_return"
    for event in events.Scalars(tag) if tag in events.Tags()["scalars"] else ():
        value = round(event.value, 3)
        rows.append({**head, "kind": "evaluation", "global_step": event.step, "return": value})
    return rows


def check_output(parser, path):
    """Makes the folder that path lies in and the file, or ends the program."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open(path, "a").close()
    except OSError as error:
        parser.error(f"can't write {path} ({error.strerror}): give another file")


def write_csv(path, rows):
    """Writes rows, all with the keys of the first."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def table(rows):
    """Rows -> Markdown, a line for each environment, script and flags.

    Unfinished runs are named, not averaged.
    """
    lines = [HEADER]
    keys = [(row["env_id"], row["script"], row["flags"]) for row in rows]
    for env_id, script, flags in sorted(set(keys)):
        group = [row for row, key in zip(rows, keys) if key == (env_id, script, flags)]
        done = [row for row in group if row["status"] == "finished"]
        left = [f"{row['run']} (step {row['steps'] or 0})" for row in group if row not in done]
        seeds = " ".join(str(row["seed"]) for row in done)
        cells = [env_id, script, flags or "defaults", f"{len(done)}: {seeds}"]
        for name in ("last_100", "evaluation_mean", "steps_per_second"):
            values = [row[name] for row in done if row[name] != ""]
            form = "{1:,.0f}" if name == "steps_per_second" else "{0:.1f} +- {2:.1f}"
            if values:
                cells.append(form.format(np.mean(values), np.median(values), np.std(values)))
            else:
                cells.append("-")
        lines.append(f"| {' | '.join(cells)} | {len(left)} {', '.join(left)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "dirs", nargs="+", type=Path, metavar="RUNS_DIR", help="a run's folder or a folder of them"
    )
    parser.add_argument("--out", type=Path, help="write the rows to this CSV")
    parser.add_argument("--curves", type=Path, help="write the learning curves to this CSV")
    args = parser.parse_args()
    rows = []
    curves = []
    damaged = []
    seen = set()
    if missing := [str(path) for path in args.dirs if not path.is_dir()]:
        parser.error(f"no such folder: {', '.join(missing)}")
    for path in args.dirs:
        for run in [path] if (path / "config.json").exists() else subfolders(path):
            if run.resolve() in seen:
                continue
            seen.add(run.resolve())
            try:
                rows.append(read_run(run))
                curves += read_curves(run) if args.curves else []
                if damage := read_evaluation(run)[1]:
                    damaged.append(f"unfinished: {run}: {damage}")
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                damaged.append(f"not a run, or damaged: {run} ({type(error).__name__}: {error})")
    rows.sort(key=lambda row: (row["env_id"], row["script"], row["flags"], row["seed"]))
    for path, table_rows in ((args.out, rows), (args.curves, curves)):
        if path and table_rows:
            check_output(parser, path)
            write_csv(path, table_rows)
    commits = ", ".join(sorted({row["git_commit"] for row in rows}))
    print(table(rows), "", f"git commits: {commits}", *printable(damaged), sep="\n")
    sys.exit(not rows)


if __name__ == "__main__":
    main()
