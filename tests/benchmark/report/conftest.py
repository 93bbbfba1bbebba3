"""Run folders and frames of runs, made by hand."""

import json

import pytest

from benchmark.report import runs, stats

DEFAULTS = {
    "env_id": "CartPole-v1",
    "seed": 1,
    "run_name": "",
    "total_timesteps": 500000,
    "gamma": 0.99,
    "norm_adv": True,
    "baseline": "value",
    "hidden_sizes": [64, 64],
    "num_threads": 0,
}


@pytest.fixture(scope="session")
def make_run():
    """make_run(folder, ...): a run's folder.

    It has an episode of 1,000 steps and 0.5 s for each of returns, and is unfinished without
    evaluation. text: the script's; own: flags that aren't the defaults.
    """

    def make(
        folder,
        script="vpg",
        seed=1,
        returns=(1.0, 2.0),
        evaluation=(5.0, 7.0),
        commit="abc",
        text="",
        **own,
    ):
        folder.mkdir(parents=True)
        steps = 1000 * max(1, len(returns))
        args = DEFAULTS | {"seed": seed, "run_name": folder.name, "total_timesteps": steps} | own
        config = {
            "args": args,
            "defaults": DEFAULTS,
            "command": [f"/home/me/{script}.py", "--seed", str(seed)],
            "git_commit": commit,
            "machine": {"torch": "1.2.3", "cpu": "Xeon", "cpu_capability": "AVX2", "gpu": "none"},
            "versions": {"torch": "1.2.3", "other": "9"},
        }
        (folder / "config.json").write_text(json.dumps(config))
        lines = ["global_step,wall_seconds,env,return,length,ended_by"]
        for i, x in enumerate(returns, 1):
            lines.append(f"{1000 * i},{0.5 * i},0,{x},1000,truncation")
        (folder / "episodes.csv").write_text("\n".join(lines) + "\n")
        if evaluation is not None:
            (folder / "evaluation.json").write_text(json.dumps({"returns": evaluation}))
        (folder / f"{script}.py").write_text(text)
        return folder

    return make


@pytest.fixture
def quick(monkeypatch):
    """Few resamples, where intervals don't matter."""
    monkeypatch.setattr(stats, "RESAMPLES", 20)


@pytest.fixture(scope="session")
def make_runs():
    """make_runs(*rows): a frame of runs; each row has what differs from a finished run of vpg."""

    def make(*rows):
        found = []
        for i, row in enumerate(rows):
            usual = dict.fromkeys(runs.COLUMNS, "") | {"run": f"run{i}", "seed": str(i)}
            usual |= {name: None for name, kind in runs.COLUMNS.items() if kind is float}
            usual |= {"env_id": "CartPole-v1", "script": "vpg", "variant": "vpg"}
            usual |= {"state": "finished", "base": False, "stored": False, "planned_steps": 5e5}
            found.append(usual | row)
        return runs.run_frame(found)

    return make
