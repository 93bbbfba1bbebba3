"""The README's table of algorithms."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from benchmark.report.algorithms import ALGORITHMS, make_table, score_text, speed_text

ROOT = Path(__file__).resolve().parents[3]


def make_runs(**columns):
    """A frame of runs of ppo on CartPole-v1 with these columns besides."""
    runs = pd.DataFrame(columns)
    facts = {"script": "ppo", "env_id": "CartPole-v1", "base": True, "planned_steps": 4e6}
    return runs.assign(**{name: x for name, x in facts.items() if name not in columns})


def make_rounds(*rows):
    """A frame of speed.csv: rows of (round, program, steps per second) of ppo."""
    rounds = pd.DataFrame(rows, columns=["round", "program", "steps_per_second"])
    return rounds.assign(script="ppo")


def test_every_script_has_a_line():
    assert sorted(line.script for line in ALGORITHMS) == sorted(x.stem for x in ROOT.glob("*.py"))


def test_scores_are_of_finished_runs():
    states = ["finished", "finished", "unfinished"]
    runs = make_runs(state=states, score=[100.0, 300.0, float("nan")], steps=[4e6, 4e6, 1e6])
    assert (
        score_text(runs, "CartPole-v1") == "CartPole-v1, 4,000,000 steps, 2 seeds: 200.0 +- 100.0"
    )


@pytest.mark.parametrize(
    "steps, last_100, text",
    [
        ([1.23e6], [5.0], "Pong, stopped at 1.2M of 4M steps: 5.00"),
        ([2e6, 5e5], [-20.0, 5.0], "Pong, stopped at 0.5M to 2M of 4M steps: -20.0 to 5.00"),
    ],
)
def test_runs_that_were_stopped_say_how_far_they_got(steps, last_100, text):
    runs = make_runs(state=["unfinished"] * len(steps), steps=steps, last_100=last_100)
    assert score_text(runs, "Pong") == text


def test_speeds_are_medians_of_the_rounds_by_the_peer():
    rounds = [("1", "sb3", 100.0), ("2", "sb3", 200.0), ("3", "sb3", 100.0)]
    rounds += [("1", "plainrl", 300.0), ("2", "plainrl", 1000.0), ("3", "plainrl", 400.0)]
    assert speed_text(make_rounds(*rounds)) == "4.0 (3.0 to 5.0)"
    both = make_rounds(*rounds, ("1", "plainrl --amp", 600.0))
    assert speed_text(both) == "4.0 (3.0 to 5.0); `--amp`: 6.0"
    assert speed_text(make_rounds(("1", "environment", 300.0))) == ""


def test_a_line_is_of_the_defaults_in_one_environment(monkeypatch):
    """Of other variants, environments and scripts, and of --full, it has nothing."""
    (line,) = [line for line in ALGORITHMS if line.script == "ppo"]
    monkeypatch.setattr("benchmark.report.algorithms.ALGORITHMS", (line,))
    runs = make_runs(
        state=["finished"] * 4,
        score=[1.0, 2.0, 3.0, 4.0],
        steps=[4e6] * 4,
        script=["ppo", "ppo", "ppo", "vpg"],
        env_id=["CartPole-v1", "CartPole-v1", "Acrobot-v1", "CartPole-v1"],
        base=[True, False, True, True],
    )
    speeds = [("1", "sb3", 100.0), ("1", "plainrl", 300.0)]
    speeds += [("full", "sb3", 100.0), ("full", "plainrl", 900.0)]
    table = make_table({"ladder_cartpole": runs}, make_rounds(*speeds))
    score = "CartPole-v1, 4,000,000 steps, 1 seed: 1.00"
    assert table.rows == [("[`ppo.py`](ppo.py)", f"[{line.what}](docs/ppo.md)", score, "3.0")]


def test_a_line_may_be_of_runs_with_flags_which_it_names(monkeypatch):
    (line,) = [line for line in ALGORITHMS if line.script == "ppo"]
    lines = (replace(line, flags="--amp"),)
    monkeypatch.setattr("benchmark.report.algorithms.ALGORITHMS", lines)
    runs = make_runs(
        state=["finished"] * 3,
        score=[1.0, 2.0, 3.0],
        steps=[4e6] * 3,
        script=["ppo"] * 3,
        env_id=["CartPole-v1"] * 3,
        flags=["", "--amp", "--amp --gamma 0.9"],
        base=[True, False, False],
    )
    table = make_table({"ladder_cartpole": runs}, make_rounds(("1", "plainrl", 300.0)))
    assert table.rows[0][2] == "CartPole-v1, `--amp`, 4,000,000 steps, 1 seed: 2.00"


def test_a_script_without_results_has_its_line(monkeypatch):
    (line,) = [line for line in ALGORITHMS if line.script == "ppo"]
    lines = (replace(line, results=None),)
    monkeypatch.setattr("benchmark.report.algorithms.ALGORITHMS", lines)
    table = make_table({}, make_rounds(("1", "plainrl", 300.0)))
    link = "[`ppo.py`](ppo.py)", f"[{line.what}](docs/ppo.md)"
    assert table.rows == [(*link, "no score yet", "")]
