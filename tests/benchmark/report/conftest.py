"""Frames, run folders and pages for the tests of benchmark.report."""

import csv
import json

import pytest

from benchmark import runs

DEFAULTS = {
    "vpg": {
        "env_id": "CartPole-v1",
        "total_timesteps": 500000,
        "baseline": "value",
        "gamma": 0.99,
    },
    "ppo_continuous_action": {
        "env_id": "HalfCheetah-v5",
        "total_timesteps": 1000000,
        "gamma": 0.99,
    },
}


@pytest.fixture(scope="session")
def make_run():
    """Makes a run's folder.

    It has one episode of 1,000 steps and 0.5 s for each of returns, and is unfinished without
    evaluation.
    """

    def make(
        folder, script="vpg", seed=1, returns=(1.0, 2.0), evaluation=(5.0, 7.0), commit="abc", **own
    ):
        folder.mkdir(parents=True)
        defaults = DEFAULTS.get(script, DEFAULTS["vpg"]) | {"seed": 1}
        steps = 1000 * max(1, len(returns))
        args = defaults | {"seed": seed, "run_name": folder.name, "total_timesteps": steps} | own
        path = f"/home/me/{script}.py"
        config = {
            "args": args,
            "defaults": defaults,
            "script": path,
            "git_commit": commit,
            "versions": {"torch": "1.2.3"},
            "cores": 2,
            "device": "cpu",
            "command": [path, "--seed", str(seed), "--note", "/home/me/notes.txt"],
            "machine": ["Linux", "vm", "6.1", "#1 SMP", "x86_64"],
        }
        (folder / "config.json").write_text(json.dumps(config))
        lines = ["global_step,wall_seconds,env,return,length,ended_by"]
        for i, x in enumerate(returns, 1):
            lines.append(f"{1000 * i},{0.5 * i},0,{x},1000,truncation")
        (folder / "episodes.csv").write_text("\n".join(lines) + "\n")
        if evaluation is not None:
            (folder / "evaluation.json").write_text(json.dumps({"returns": evaluation}))
        return folder

    return make


@pytest.fixture(scope="session")
def make_sweep():
    """Makes a sweep's folder with runs of vpg planned, {name: flags}.

    Further arguments are the states of jobs, {name: (state, error)}.
    """

    def make(folder, planned, **jobs):
        for name in ("runs", "jobs", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        path = "/home/me/vpg.py"
        plan = {}
        for name, flags in planned.items():
            args = DEFAULTS["vpg"] | {"seed": 1, "run_name": name} | flags
            words = [word for flag, x in flags.items() for word in (f"--{flag}", str(x))]
            record = {"script": path, "env_id": args["env_id"], "seed": args["seed"]}
            plan[name] = record | {"variant": "", "args": args, "words": words}
        head = {"session": "1", "retries": 0, "stall_minutes": 30, "needs_locks": False}
        scripts = {path: {"defaults": DEFAULTS["vpg"] | {"seed": 1}}}
        text = json.dumps(head | {"scripts": scripts, "runs": plan})
        (folder / "sweep.json").write_text(text)
        for name, (state, error) in jobs.items():
            job = {"state": state, "error": error, "session": "1"}
            (folder / "jobs" / f"{name}.json").write_text(json.dumps(job))
        return folder

    return make


@pytest.fixture(scope="session")
def make_runs():
    """make_runs(*rows): a frame of runs; each row has what differs from a finished run of vpg."""

    def make(*rows):
        found = []
        for i, row in enumerate(rows):
            default = {"id": i, "run": f"run{i}", "env_id": "CartPole-v1", "script": "vpg"}
            default |= {"seed": i, "variant": "vpg", "state": "finished", "begun": True}
            row = default | {"folder": "", "git_commit": "abc"} | row
            row["family"] = row["script"] + row.get("mark", "")
            found.append(row)
        return runs.run_frame(found)

    return make


@pytest.fixture(scope="session")
def read_csv():
    """read_csv(path): its rows, dicts of texts."""

    def read(path):
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return read


@pytest.fixture(scope="session")
def table_after():
    """table_after(markdown, heading): the rows of the first table after a heading, lists of cells.

    The first is the header.
    """

    def rows(markdown, heading):
        lines = markdown[markdown.index(f"## {heading}\n") :].splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("|"))
        table = []
        for line in lines[start:]:
            if not line.startswith("|"):
                break
            if not line.startswith("| --- "):
                table.append([cell.strip() for cell in line.strip("|").split(" | ")])
        return table

    return rows
