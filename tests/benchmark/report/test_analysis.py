"""What a report computes, on frames made by hand."""

import ast
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmark import report, stats
from benchmark.report import analysis

PACKAGE = Path(report.__file__).parent


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 20)


def frame(key, returns, step=1000, second=0.5):
    """Episodes of a run, one each step steps and second seconds."""
    count = np.arange(1, len(returns) + 1)
    wall = second * count
    columns = {"id": key, "global_step": step * count, "wall_seconds": wall, "return": returns}
    return pd.DataFrame(columns).astype({"return": float})


EMPTY = frame(0, [])


def imports_of(path):
    """The modules that a file imports, dotted."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_analysis_needs_neither_files_nor_figures():
    found = imports_of(PACKAGE / "analysis.py")
    assert "numpy" in found
    assert not {name.split(".")[0] for name in found} & {"matplotlib", "pathlib", "os", "io", "csv"}
    assert {name for name in found if name.startswith("benchmark")} <= {
        "benchmark.stats",
        "benchmark.variants",
        "benchmark.variants.unique_names",
        *(f"benchmark.stats.{name}" for name in dir(stats)),
    }


def test_the_report_does_not_know_the_launcher():
    launcher = {"sweep", "engines", "worker", "suite"}
    for path in PACKAGE.glob("*.py"):
        parts = {part for name in imports_of(path) for part in name.split(".")}
        assert not parts & launcher, path.name


def drawn(runs, curves, x, center="iqm", published=()):
    return analysis.against(x, analysis.curves_to_draw(runs, curves, center), published)


def test_runs_are_in_the_order_of_their_seeds_as_numbers(make_runs):
    runs = make_runs(
        {"seed": "?"}, {"seed": 2**32 - 1}, {"seed": 10}, {"seed": 2}, {"seed": 1, "variant": "a2c"}
    )
    assert list(analysis.in_order(runs)["seed"]) == [1, 2, 10, 2**32 - 1, "?"]


def test_curves_of_a_variant_have_one_grid(make_runs):
    """Up to the last step of its longest run; nothing after a run's own end."""
    runs = make_runs({}, {}, {"variant": "other"})
    episodes = pd.concat([frame(0, [1.0] * 8), frame(1, [2.0] * 4), frame(2, [3.0])])
    curves = analysis.make_curves(runs, episodes, EMPTY)
    steps = {key: own["global_step"].to_numpy() for key, own in curves.groupby("id")}
    assert steps[0][-1] == 8000 and steps[1][-1] == 4000 and steps[2][-1] == 1000
    assert set(steps[1]) < set(steps[0])
    assert curves.loc[curves["id"] == 0, "wall_seconds"].iloc[-1] == 4.0


def test_returns_that_are_not_finite_make_no_curve(make_runs):
    runs = make_runs({}, {})
    episodes = pd.concat([frame(0, [np.nan, np.inf]), frame(1, [np.nan, 5.0])])
    curves = analysis.make_curves(runs, episodes, EMPTY)
    assert set(curves["id"]) == {1} and set(curves["return"]) == {5.0}


def test_stored_curves_come_back_as_they_are(make_runs):
    runs = make_runs({}, {})
    returns = np.random.default_rng(0).normal(size=(2, 50))
    episodes = pd.concat([frame(0, returns[0]), frame(1, returns[1, :31])])
    curves = analysis.make_curves(runs, episodes, EMPTY)
    pd.testing.assert_frame_equal(analysis.make_curves(runs, EMPTY, curves), curves)
    rounded = curves.round({"global_step": 3, "wall_seconds": 3, "return": 6})
    again = analysis.make_curves(runs, EMPTY, rounded)
    assert list(again["id"]) == list(curves["id"])
    np.testing.assert_allclose(again["return"], curves["return"], atol=1e-5)
    own = curves["id"] == 1
    below = curves.assign(
        global_step=curves["global_step"].where(~own, curves["global_step"] * (1 - 1e-9))
    )
    assert list(analysis.make_curves(runs, EMPTY, below)["id"]) == list(curves["id"])


def test_stored_curves_are_put_on_the_grid_of_longer_runs(make_runs):
    runs = make_runs({}, {})
    line = pd.DataFrame({"global_step": np.linspace(0, 1000, 101)})
    line = line.assign(id=0, wall_seconds=1.0)
    line["return"] = line["global_step"]
    curves = analysis.make_curves(runs, frame(1, [1.0] * 4), line)
    own = curves[curves["id"] == 0]
    assert list(own["global_step"]) == pytest.approx(list(np.arange(0, 1001, 40)))
    assert list(own["return"]) == pytest.approx(list(own["global_step"]))


@pytest.mark.parametrize(("center", "expected"), [("iqm", 1.0), ("mean", 3.0)])
def test_center_ends_where_the_first_of_its_runs_ends(center, expected):
    parts = []
    for key, (first, last, value) in enumerate([(5, 101, 1), (0, 90, 1), (0, 101, 1), (0, 101, 9)]):
        steps = np.arange(first, last)
        columns = {"id": key, "global_step": steps, "wall_seconds": 2.0 * steps, "return": value}
        parts.append(pd.DataFrame(columns))
    found = analysis.center_of(pd.concat(parts), center)
    assert list(found["global_step"]) == list(range(5, 90))
    assert set(found["value"]) == {expected}
    assert (found["low"] == 1).all() and (found["high"] > expected).all()


def test_center_along_the_wall_time_is_at_the_median_time_of_each_step(make_runs):
    """A seed on a slow machine moves no value of the others."""
    runs = make_runs({"score": 1.0}, {"score": 1.0}, {"score": 1.0})
    seconds = (0.5, 1.0, 10.0)
    episodes = pd.concat([frame(i, range(11), second=x) for i, x in enumerate(seconds)])
    curves = analysis.make_curves(runs, episodes, EMPTY)
    data = drawn(runs, curves, "wall_time")
    ends = data.groupby("series")["wall_time"].max().to_dict()
    assert ends == {"run0": 5.5, "run1": 11.0, "run2": 110.0, "iqm": 11.0}
    assert data[data["series"] == "iqm"]["value"].iloc[-1] == 10.0


def test_without_wall_times_there_is_no_curve_along_them(make_runs):
    runs = make_runs({"score": 1.0})
    curves = analysis.make_curves(runs, frame(0, [1.0] * 5), EMPTY).assign(wall_seconds=np.nan)
    data = drawn(runs, curves, "wall_time", published=[("source", 3.0)])
    assert list(data["kind"]) == ["published"]
    assert len(drawn(runs, curves, "steps")) > 100


def test_runs_of_one_name_are_series_of_their_own(make_runs):
    """Even if a run is named like a number that another would get."""
    runs = make_runs({"run": "x"}, {"run": "x"}, {"run": "x (2)"})
    episodes = pd.concat([frame(i, [1.0] * 5) for i in range(3)])
    data = drawn(runs, analysis.make_curves(runs, episodes, EMPTY), "steps")
    assert data["series"].nunique() == 3


def test_only_runs_with_a_score_are_averaged(make_runs):
    runs = make_runs({"score": 1.0}, {"state": "unfinished", "run": "run0"})
    episodes = pd.concat([frame(0, [1.0] * 5), frame(1, [9.0] * 5)])
    curves = analysis.make_curves(runs, episodes, EMPTY)
    data = drawn(runs, curves, "steps", "mean")
    assert set(data.loc[data["kind"] == "center", "value"]) == {1.0}
    kinds = dict(zip(data["series"], data["kind"]))
    assert kinds == {"run0": "finished", "run0 (2)": "uncounted", "mean": "center"}


def test_summary_is_of_finished_runs(make_runs):
    runs = make_runs(
        {"score": 1.0, "evaluation_mean": 4.0, "wall_seconds": 10.0, "steps_per_second": 3.0},
        {"score": 2.0, "wall_seconds": 30.0, "steps_per_second": 5.0},
        {"state": "unfinished", "wall_seconds": 900.0, "evaluation_mean": 9.0},
    )
    found = analysis.summarise(runs)
    assert (found["runs"], found["seeds"]) == (3, 2)
    assert list(found["scores"]) == [1, 2] and list(found["evaluations"]) == [4]
    assert (found["wall_seconds"], found["steps_per_second"]) == (20, 4)
    assert found["iqm"][0] == 1.5


def test_published_scores_are_of_the_script_and_of_any_version():
    published = pd.DataFrame(
        {
            "algorithm": ["ppo", "ppo", "ddpg"],
            "env_id": ["HalfCheetah-v4", "Hopper-v4", "HalfCheetah-v2"],
            "total_timesteps": [100, 100, 100],
        }
    )
    found = analysis.published_of(published, "ppo", "HalfCheetah-v5", [100.0])
    assert list(found["env_id"]) == ["HalfCheetah-v4"]
    assert analysis.published_of(published, "ppo", "ppo", [100.0]).empty


def test_published_scores_are_after_as_many_steps_where_there_are_such():
    published = pd.DataFrame(
        {"algorithm": "ppo", "env_id": ["A-v1", "A-v2"], "total_timesteps": [100, 200]}
    )
    for steps, env_ids in (([200.0, np.nan], ["A-v2"]), ([300.0], ["A-v1", "A-v2"])):
        found = analysis.published_of(published, "ppo", "A-v1", steps)
        assert list(found["env_id"]) == env_ids


def test_scores_are_scaled_over_all_variants():
    raw = {"a": {"X": np.array([0.0, 5.0])}, "b": {"X": np.array([10.0]), "Y": np.array([3.0])}}
    scaled, bounds = analysis.scale(raw)
    assert bounds == {"X": (0, 10), "Y": (3, 3)}
    assert list(scaled["a"]["X"]) == [0, 0.5] and list(scaled["b"]["Y"]) == [1]


def test_aggregate_and_profile_are_over_environments():
    scaled = {"a": {"X": np.array([0.0, 0.2]), "Y": np.array([0.6, 1.0])}}
    found = analysis.aggregates(scaled, "mean").iloc[0]
    assert (found["environments"], found["value"]) == (2, pytest.approx(0.45))
    above = analysis.profiles(scaled).set_index("tau")["value"]
    assert (above[0.0], above[0.5], above[1.0]) == (0.75, 0.5, 0)


def test_improvement_is_over_the_environments_that_both_have():
    scaled = {
        "a": {"X": np.array([0.0, 0.0]), "Y": np.array([1.0])},
        "b": {"X": np.array([1.0, 0.0])},
        "c": {"Z": np.array([1.0])},
    }
    found = analysis.improvements(scaled, list(combinations(scaled, 2)))
    assert list(found["name"]) == ["a > b"]
    assert (found["value"][0], found["environments"][0]) == (0.25, 1)


def variants_of(make_runs, *names):
    """Runs of variants (script, flags, mark), and their scaled scores."""
    rows = []
    for script, flags, mark in names:
        variant = f"{script} {flags}".strip() + mark
        base = flags == "" and script != "mine"
        row = {"script": script, "variant": variant, "mark": mark, "base": base, "score": 1.0}
        rows.append(row)
    runs = make_runs(*rows)
    return runs, analysis.scores_of(runs)


def test_few_variants_are_all_compared(make_runs):
    names = [("vpg", flags, "") for flags in ("", "--a 1", "--a 2", "--a 3")]
    pairs, every = analysis.pairs_to_compare(*variants_of(make_runs, *names))
    assert every and len(pairs) == 6


def test_many_variants_are_compared_with_the_defaults(make_runs):
    names = [("vpg", flags, "") for flags in ("", *(f"--a {i}" for i in range(6)))]
    pairs, every = analysis.pairs_to_compare(*variants_of(make_runs, *names))
    assert not every and pairs == [(f"vpg --a {i}", "vpg") for i in range(6)]


def test_many_variants_are_compared_like_with_like(make_runs):
    """Defaults with each other, variants with their script's, and what differs by its mark only."""
    scripts = (("vpg", ""), ("vpg", "--a 1"), ("a2c", ""), ("a2c", "--a 1"), ("ppo", ""))
    names = [(*script, mark) for script in scripts for mark in ("", " (old)")]
    runs, scaled = variants_of(make_runs, *names)
    pairs, every = analysis.pairs_to_compare(runs, scaled)
    plain = ["vpg", "a2c", "ppo", "vpg (old)", "a2c (old)", "ppo (old)"]
    expected = {frozenset(pair) for pair in combinations(plain, 2)}
    for x in ("vpg", "a2c"):
        expected.add(frozenset((f"{x} --a 1", f"{x} --a 1 (old)")))
        for mark in ("", " (old)"):
            expected.add(frozenset((f"{x} --a 1{mark}", f"{x}{mark}")))
    assert not every
    assert {frozenset(pair) for pair in pairs} == expected and len(pairs) == len(expected)
    order = list(scaled)
    of_defaults = [pair for pair in pairs if set(pair) <= set(plain)]
    assert all(order.index(x) < order.index(y) for x, y in of_defaults)


def test_variants_of_a_script_without_defaults_are_compared_with_all_defaults(make_runs):
    names = [("mine", f"--a {i}", "") for i in range(4)] + [("vpg", "", ""), ("a2c", "", "")]
    pairs, _ = analysis.pairs_to_compare(*variants_of(make_runs, *names))
    mine = {pair for pair in pairs if "mine" in pair[0]}
    assert mine == {(f"mine --a {i}", x) for i in range(4) for x in ("vpg", "a2c")}
    assert len(pairs) == 9


def test_ablation_is_the_difference_to_the_defaults():
    """In each environment in returns, over all in normalised scores; the best first."""
    raw = {
        "vpg": {"X": np.array([1.0]), "Y": np.array([0.0])},
        "vpg --bad 1": {"X": np.array([0.0])},
        "vpg --good 1": {"X": np.array([3.0]), "Y": np.array([8.0])},
    }
    scaled, _ = analysis.scale(raw)
    found = analysis.ablation(raw, scaled, "vpg", "vpg", list(raw)[1:], "iqm")
    assert list(found) == ["X", "Y", "all"]
    assert list(found["X"]["name"]) == ["--good 1", "--bad 1"]
    assert list(found["X"]["value"]) == [2, -1] and list(found["Y"]["value"]) == [8]
    assert list(found["all"]["environments"]) == [2, 1]
    one = {name: {"X": own["X"]} for name, own in raw.items()}
    assert list(analysis.ablation(one, one, "vpg", "vpg", list(one)[1:], "iqm")) == ["X"]
