"""benchmark.report: its statistics and its pages, on cases and run folders made by hand."""

import csv
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
import types
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ppo_continuous_action
import vpg
from benchmark import page, report, scores
from benchmark.runs import (
    RUN_ONLY,
    Run,
    name_variants,
    planned_args,
    read_begun,
    read_published,
    read_runs,
)

SCRIPTS = {
    module.__name__: json.loads(json.dumps(asdict(module.Args())))  # as config.json has them
    for module in (vpg, ppo_continuous_action)
}
EVIL = "<script>alert(1)</script>"


def make_run(
    folder, script="vpg", seed=1, returns=(1.0, 2.0), evaluation=(5.0, 7.0), commit="abc", **flags
):
    """A run's folder with one episode of 1,000 steps and 0.5 s for each of returns.

    It is unfinished without evaluation.
    """
    folder.mkdir(parents=True)
    args = SCRIPTS.get(script, {"env_id": "CartPole-v1", "total_timesteps": 5000})
    args = (
        args
        | {"seed": seed, "run_name": folder.name, "total_timesteps": 1000 * max(1, len(returns))}
        | flags
    )
    config = {
        "args": args,
        "git_commit": commit,
        "versions": {"torch": "1.2.3"},
        "cores": 2,
        "device": "cpu",
        "command": [f"/home/me/{script}.py", "--seed", str(seed), "--note", "/home/me/notes.txt"],
        "machine": ["Linux", "vm", "6.1", "#1 SMP", "x86_64"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        f"{1000 * (i + 1)},{0.5 * (i + 1)},0,{x},1000,truncation\n" for i, x in enumerate(returns)
    ]
    (folder / "episodes.csv").write_text(
        "global_step,wall_seconds,env,return,length,ended_by\n" + "".join(lines)
    )
    if evaluation is not None:
        (folder / "evaluation.json").write_text(json.dumps({"returns": evaluation}))
    return folder


def make_sweep(folder, planned, **jobs):
    """A sweep's folder with runs planned, {name: words}, and the states of jobs.

    jobs: {name: (state, error)}.
    """
    for name in ("runs", "jobs", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    runs = {name: {"script": "/home/me/vpg.py", "words": words} for name, words in planned.items()}
    (folder / "sweep.json").write_text(json.dumps({"runs": runs}))
    for name, (state, error) in jobs.items():
        (folder / "jobs" / f"{name}.json").write_text(json.dumps({"state": state, "error": error}))
    return folder


def run_report(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["report", *map(str, words)])
    report.main()


def table_after(markdown, heading):
    """The rows of the first table after a heading, as lists of cells, its header first."""
    lines = markdown[markdown.index(f"## {heading}\n") :].splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("|")) :]
    lines = lines[
        : next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    ]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if not line.startswith("| --- ")
    ]


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# Statistics


def test_iqm_is_the_mean_without_the_lowest_and_highest_quarter():
    assert scores.iqm(np.array([100.0, 1, 2, 7, 3, 4, 6, 5])) == 4.5
    assert scores.iqm(np.array([1.0, 2, 9])) == 4  # floor(3 / 4) = 0: nothing is left out
    assert scores.iqm(np.array([[0.0, 1, 2, 90], [4, 5, 6, 7]]), axis=1).tolist() == [1.5, 5.5]


def test_improvement_counts_pairs_and_averages_environments():
    """Of 3 by 2 pairs 3 are better and one is a tie; in the second environment all 4 are better."""
    value, low, high = scores.improvement(
        [np.array([1.0, 3, 5]), np.array([2.0, 2])], [np.array([2.0, 3]), np.array([1.0, 1])]
    )
    assert value == pytest.approx((3.5 / 6 + 1) / 2)
    assert 0.5 <= low < value < high <= 1
    assert scores.improvement([np.ones(3)], [np.ones(3)]) == (0.5, 0.5, 0.5)


def test_interval_of_a_constant_is_that_constant():
    for center in scores.CENTERS.values():
        assert scores.aggregate([np.full(5, 3.0), np.full(4, 3.0)], center) == (3, 3, 3)


def test_interval_covers_95_percent():
    """That of a mean of many runs is the normal one: 1.96 standard errors to each side."""
    x = np.random.default_rng(1).normal(10, 2, 400)
    value, low, high = scores.aggregate([x], np.mean)
    error = x.std() / 20
    assert (value, low, high) == pytest.approx(
        (x.mean(), x.mean() - 1.96 * error, x.mean() + 1.96 * error), abs=0.15 * error
    )


def test_bootstrap_keeps_environments_apart():
    """Whatever runs are drawn, half of them are of each environment.

    In one all have 0, in the other all have 1.
    """
    assert scores.aggregate([np.zeros(3), np.ones(3)], np.mean) == (0.5, 0.5, 0.5)
    together = scores.aggregate([np.array([0.0, 0, 0, 1, 1, 1])], np.mean)
    assert together[1] < 0.5 < together[2]


def test_one_seed_has_no_interval():
    value, low, high = scores.aggregate([np.array([7.0])], scores.iqm)
    assert value == 7 and np.isnan(low) and np.isnan(high)
    assert report.with_interval(value, low, high) == "7.00 [one seed]"


def test_one_seed_in_one_of_two_environments_stays_as_it_is():
    value, low, high = scores.aggregate([np.array([1.0, 2, 3]), np.array([5.0])], np.mean)
    assert value == 2.75 and (low, high) == (2.0, 3.5)  # three times 1, three times 3, and the 5
    shares = scores.profile([np.array([0.0, 1.0]), np.array([1.0])], np.array([0.5, -1.0]))
    assert np.array(shares).T.tolist() == [pytest.approx([2 / 3, 1 / 3, 1]), [1, 1, 1]]


def test_difference_of_centers():
    """IQM 4.5 less IQM 2.5, of means another; constants have no spread."""
    mine, base = np.array([1.0, 2, 3, 4, 5, 6, 7, 100]), np.array([0.0, 2, 3, 40])
    assert scores.difference([mine], [base], scores.iqm)[0] == 2
    assert scores.difference([mine], [base], np.mean)[0] == 16 - 11.25
    assert scores.difference([np.full(3, 5.0)], [np.full(3, 2.0)], np.mean) == (3, 3, 3)
    assert scores.difference([np.zeros(3), np.ones(3)], [np.ones(3), np.full(3, 3.0)], np.mean) == (
        -1.5,
        -1.5,
        -1.5,
    )
    _, low, high = scores.difference([mine], [base], scores.iqm)
    assert low < 2 < high


def test_profile_is_the_share_of_runs_above_tau():
    value, low, high = scores.profile(
        [np.array([0.0, 0.5, 1.0]), np.array([0.6, 0.2])], np.array([-1, 0.5, 0.55, 1])
    )
    assert value.tolist() == pytest.approx([1, 2 / 5, 2 / 5, 0])
    assert low[0] == high[0] == 1 and low[1] < 0.4 < high[1]


def test_a_profile_of_all_of_atari_fits_into_memory():
    tracemalloc.start()
    runs = np.random.default_rng(0).normal(size=(57, 10))
    value, low, high = scores.profile(list(runs), np.linspace(-1, 1, 101))
    assert tracemalloc.get_traced_memory()[1] < 600e6  # all resamples at once take 1.8 GB
    tracemalloc.stop()
    deviation = np.sqrt(value * (1 - value) / 570)
    normal = 2 * 1.96 * deviation  # the normal approximation
    np.testing.assert_allclose(high - low, normal, rtol=0.15)


def test_normalise():
    assert scores.normalise(np.array([10.0, 15, 20]), 10, 20).tolist() == [0, 0.5, 1]
    assert scores.normalise(np.array([3.0, 3]), 3, 3).tolist() == [1, 1]


def test_smooth_is_the_mean_over_a_window_before_each_point():
    """Nothing before the first episode and after the last.

    The one before where none ended in the window.
    """
    at, returns = np.array([10.0, 20, 30, 40, 90]), np.array([1.0, 2, 3, 10, 20])
    values = scores.smooth(at, returns, np.array([0.0, 10, 25, 35, 40, 60, 90, 91]), 20)
    assert np.isnan(values[[0, 7]]).all()
    assert values[1:7].tolist() == [1, 1.5, 2.5, 6.5, 10, 20]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_smooth_leaves_out_returns_that_are_not_finite(bad):
    at, grid = np.array([10.0, 20, 30, 40]), np.array([10.0, 20, 25, 30, 40, 41])
    values = scores.smooth(at, np.array([1.0, bad, 3, bad]), grid, 20)
    assert values[:5].tolist() == [1, 1, 1, 3, 3] and np.isnan(values[5])
    assert np.isnan(scores.smooth(at, np.full(4, bad), grid, 20)).all()


def test_curve_of_several_runs_ends_where_the_first_of_them_ends():
    done = np.full((4, report.GRID), 1.0)
    done[3] = 9.0
    done[0, :5], done[1, 90:] = np.nan, np.nan
    for center, expected in (("iqm", 1), ("mean", 3)):
        value, low, high = report.estimate_curve(done, scores.CENTERS[center])
        assert (
            value[5:90].tolist() == [expected] * 85
            and np.isnan(value[:5]).all()
            and np.isnan(value[90:]).all()
        )
        assert (low[5:90] == 1).all() and (high[5:90] > expected).all()


# Runs


def test_arguments_of_a_run_that_has_not_begun():
    """As config.json will have them, by the types of the script's defaults."""
    defaults = {
        "lr": 0.1,
        "sizes": [1, 2],
        "norm": True,
        "amp": False,
        "kind": "a",
        "none": None,
        "steps": 5,
    }
    words = "--lr 1 --sizes 400 300 --no-norm --amp --kind 7 --none -0.5 --steps 9".split()
    assert planned_args(defaults, words) == {
        "lr": 1.0,
        "sizes": [400, 300],
        "norm": False,
        "amp": True,
        "kind": "7",
        "none": -0.5,
        "steps": 9,
    }
    assert (
        isinstance(planned_args(defaults, words)["lr"], float)
        and planned_args(defaults, []) == defaults
    )
    assert planned_args(defaults, ["--sizes", "--amp"]) == defaults | {"sizes": [], "amp": True}


def variants_of(*runs, others=()):
    runs, others = list(runs), list(others)
    name_variants(runs, others)
    return [run.variant for run in runs + others]


def make(script="vpg", row=None, **args):
    return Run(
        "name", script, SCRIPTS.get(script, {}) | args, "finished", row=row or {"git_commit": "abc"}
    )


def test_variants_are_script_and_changed_flags():
    """Seeds, environments, and flags that don't change what is learned are no part of them."""
    assert set(RUN_ONLY) <= set(SCRIPTS["vpg"])
    plain = make(seed=3, env_id="Acrobot-v1", num_threads=4, exp_name="mine", checkpoint_interval=7)
    plain.args |= {"eval_episodes": 0, "eval_interval": 5, "eval_max_steps": 9, "compile": False}
    assert variants_of(plain, make(baseline="none", norm_adv=False, data="/home/me/data.npz")) == [
        "vpg",
        "vpg --baseline none --no-norm-adv --data data.npz",
    ]
    planned = planned_args({"target_kl": None}, ["--target-kl", "1", "--clip-coef", "1e9"])
    assert variants_of(make(target_kl=1.0, clip_coef=1e9), make(**planned), make()) == [
        "vpg --target-kl 1 --clip-coef 1000000000"
    ] * 2 + ["vpg"]


def test_sizes_and_first_networks_make_variants():
    """As a sweep's plan has them, and as config.json; --best then says which networks."""
    words = "--hidden-sizes 3 5 --init-from /old/runs/one --best".split()
    planned = planned_args(SCRIPTS["vpg"], words)
    begun = {"hidden_sizes": [3, 5], "init_from": "/old/runs/one", "best": True}
    assert variants_of(make(**planned), make(**begun), make()) == [
        "vpg --init-from one --best --hidden-sizes 3 5"
    ] * 2 + ["vpg"]


def test_variants_name_the_steps_only_where_they_differ():
    assert variants_of(make(total_timesteps=7), make(total_timesteps=7)) == ["vpg", "vpg"]
    assert variants_of(make(total_timesteps=7), make(total_timesteps=8), make(baseline="none")) == [
        "vpg --total-timesteps 7",
        "vpg --total-timesteps 8",
        "vpg --baseline none",
    ]
    assert variants_of(make(total_timesteps=7), make(total_timesteps=8, env_id="Acrobot-v1")) == [
        "vpg",
        "vpg",
    ]
    most = [make(total_timesteps=7), make(total_timesteps=8), make(total_timesteps=7)]
    assert variants_of(*most) == ["vpg", "vpg --total-timesteps 8", "vpg"]
    assert variants_of(
        make(total_timesteps=8), others=[make(total_timesteps=7), make(total_timesteps=8)]
    ) == ["vpg", "vpg --total-timesteps 7 (compared)", "vpg (compared)"]


def test_variants_of_a_script_from_elsewhere_are_what_differs_between_its_runs():
    runs = [make("mine", lr=0.1, size=3, seed=1), make("mine", lr=0.1, size=4, seed=2)]
    planned = Run("later", "mine", {"size": 4, "seed": 3}, "waiting")
    assert variants_of(*runs, planned) == ["mine --size 3", "mine --size 4", "mine --size 4"]
    runs = [make("mine", total_timesteps=7, seed=1), Run("later", "mine", {"seed": 2}, "waiting")]
    assert variants_of(*runs) == ["mine", "mine"]  # whose steps aren't known is no variant


def test_what_all_variants_of_a_script_have_is_no_part_of_their_names():
    runs = [
        make(gamma=0.9, norm_adv=False),
        make(gamma=0.9, baseline="none", norm_adv=False),
        make("ppo_continuous_action", gamma=0.8),
    ]
    shared = name_variants(runs, [])
    assert [run.variant for run in runs] == [
        "vpg",
        "vpg --baseline none",
        "ppo_continuous_action --gamma 0.8",
    ]
    assert shared == {"vpg": "--gamma 0.9 --no-norm-adv"}


def test_variants_to_compare_have_a_mark():
    """The git commit where it is another, else a word."""
    assert variants_of(make(), others=[make(row={"git_commit": "def"})]) == ["vpg", "vpg (def)"]
    assert variants_of(make(), others=[make()]) == ["vpg", "vpg (compared)"]
    assert (
        variants_of(make(), others=[make(row={"git_commit": c}) for c in "de"])[1:]
        == ["vpg (compared)"] * 2
    )


def test_each_run_is_read_once_and_the_report_is_none(tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "report").mkdir()
    make_sweep(tmp_path, {"a": []}, a=("finished", ""))
    monkeypatch.chdir(tmp_path)
    for paths in (
        [run, tmp_path / "runs", run, tmp_path / "runs" / ".." / "runs"],
        [Path("runs")],
        [tmp_path / "runs", tmp_path],
        [tmp_path, tmp_path / "runs"],
    ):
        runs, troubles = read_runs(paths, tmp_path / "runs" / "report")
        assert [run.name for run in runs] == ["a"], paths
        assert len(troubles) == (tmp_path in paths), paths  # report
    (tmp_path / "runs" / "A-link").symlink_to("a")
    for path in (tmp_path / "runs", tmp_path):
        assert [run.name for run in read_runs([path], tmp_path / "runs" / "report")[0]] == ["a"]


def test_score_is_of_the_last_100_episodes_of_a_finished_run(tmp_path):
    run = read_begun(make_run(tmp_path / "a", returns=[1e6] * 7 + [2.0] * 50 + [4.0] * 50))
    assert run.score == 3
    assert read_begun(make_run(tmp_path / "b", evaluation=None)).score is None
    assert read_begun(make_run(tmp_path / "c", returns=[1.0, float("nan")])).score is None
    assert read_begun(make_run(tmp_path / "d", returns=[])).score is None


def test_published_scores_are_complete():
    """Each names what it was measured on and where it is from."""
    rows = read_published()
    assert len(rows) > 50
    for row in rows:
        assert (
            float(row["mean"])
            and int(row["total_timesteps"])
            and int(row["seeds"])
            and row["std"] != "-"
        )
        assert row["source"] and row["metric"] and re.fullmatch(r".*-v\d+", row["env_id"]), row


# The report


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """A report of a sweep in its middle and of other runs.

    Its folder, what it printed, the page and the Markdown.
    """
    folder = tmp_path_factory.mktemp("big")
    sweep = make_sweep(
        folder / "sweep",
        {
            f"run{i}": ["--seed", str(i), "--env-id", "CartPole-v1", "--total-timesteps", "8000"]
            for i in range(1, 8)
        },
        run4=("failed", "Bad <b>end</b> in /home/me/vpg.py (exit code 1)"),
        run5=("failed", ""),
        run6=("running", ""),
    )
    (sweep / "logs" / "run5.log").write_text("first\nnot enough memory\n")
    for i in (1, 2, 3):
        make_run(sweep / "runs" / f"run{i}", seed=i, returns=[10.0 * i] * 8, total_timesteps=8000)
    (sweep / "runs" / "run2" / "config.json").write_text(
        (sweep / "runs" / "run2" / "config.json")
        .read_text()
        .replace('"abc"', '"def"')
        .replace("1.2.3", "4.5.6")
    )
    half = make_run(
        sweep / "runs" / "run4",
        seed=4,
        returns=[1.0, 2.0, 3.0],
        evaluation=None,
        total_timesteps=8000,
    )
    with open(half / "episodes.csv", "a") as file:
        file.write("4000,2.0,0,-12")
    (sweep / "runs" / "run6").mkdir()
    (sweep / "runs" / "run6" / "config.json").write_text('{"args"')
    runs = folder / "runs"
    for i in (1, 2):
        make_run(
            runs / f"none{i}", seed=i, returns=[40.0 + i] * 8, total_timesteps=8000, baseline="none"
        )
        make_run(
            runs / f"none_acro{i}",
            seed=i,
            returns=[-5.0 * i] * 4,
            env_id="Acrobot-v1",
            baseline="none",
        )
        make_run(runs / f"acro{i}", seed=i, returns=[-20.0 * i] * 4, env_id="Acrobot-v1")
        make_run(runs / f"cheetah{i}", "ppo_continuous_action", seed=i, returns=[100.0 * i] * 4)
    make_run(runs / "evil", seed=1, returns=[7.0] * 9, total_timesteps=9000, baseline=EVIL)
    make_run(
        runs / "stopped",
        "ppo_continuous_action",
        seed=3,
        returns=[9000.0] * 2,
        evaluation=None,
        total_timesteps=4000,
    )
    make_run(runs / "again", "ppo_continuous_action", seed=2, returns=[300.0] * 4)
    (runs / "broken").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.report", sweep, runs, "--out", folder / "out"],
        cwd=Path(report.__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = (folder / "out" / "report.html").read_text()
    return types.SimpleNamespace(
        folder=folder / "out",
        sweep=sweep,
        runs=runs,
        done=done,
        page=page,
        markdown=(folder / "out" / "report.md").read_text(),
    )


def test_report_table_of_an_environment(big):
    """Finished runs only: mean and deviation (ddof=0), IQM, evaluation, speed, wall time.

    Then published scores.
    """
    rows = {row[0]: row[1:] for row in table_after(big.markdown, "CartPole-v1")}
    assert rows["vpg"][:1] + rows["vpg"][1:3] == ["3 of 7", "20.0 +- 8.2", "20.0 [10.0, 30.0]"]
    assert rows["vpg"][3:] == ["6.00 +- 0.00", "2,000", "4.0"]
    assert rows["variant or source"][-1] == "wall time, s"
    one = next(row for name, row in rows.items() if "script" in name)
    assert one[:2] == ["1", "7.00"]  # a single run has no deviation
    assert rows["vpg --baseline none"][:2] == ["2", "41.5 +- 0.5"]
    cheetah = {row[0]: row[1:] for row in table_after(big.markdown, "HalfCheetah-v5")}
    assert cheetah["ppo_continuous_action"][:2] == ["3 of 4", "200.0 +- 81.6"]
    assert cheetah["CleanRL docs 2023"] == [
        "3",
        "1,443 +- 46",
        "-",
        "-",
        "-",
        "-",
        "ppo_continuous_action, v4 not v5; last 100 training episodes",
    ]
    tianshou = cheetah["Tianshou (recomputes advantages each epoch)"]
    assert tianshou[1] == "-" and tianshou[3] == "5,784 +- 1,244"


def test_numbers_stand_on_the_right_and_words_on_the_left():
    header = ("variant", "seeds", "score")
    rules = [
        page.to_markdown([("table", header, [("a", "1", "2")], kind)]).splitlines()[1]
        for kind in ("numbers", "numbers noted", "")
    ]
    assert rules == ["| --- |---:|---:|", "| --- |---:| --- |", "| --- | --- | --- |"]


def test_report_says_where_published_scores_are_not_comparable(big):
    for text in (big.page, big.markdown):
        assert (
            "scores of v1, v2, v3, v4 are beside runs of v5: another version is another environment"
            in text
        )
        assert "Published scores are of 1,000,000 steps, these runs of 4,000." in text
    rows = read_csv(big.folder / "figures" / "HalfCheetah-v5_steps.csv")
    lines = {row["series"]: float(row["value"]) for row in rows if row["variant"] == "published"}
    assert lines["CleanRL docs 2023, v4 not v5: 1,443 +- 46"] == 1442.64
    assert "CleanRL docs 2023, v4 not v5: 1,443" in big.page.replace("\u00a0", " ")


def test_published_version_is_not_another_where_it_is_ours():
    row = {"env_id": "HalfCheetah-v4"}
    assert report.published_version(row, "HalfCheetah-v4") == "v4"
    assert report.published_version(row, "HalfCheetah-v5") == "v4 not v5"


def test_wall_time_is_read_in_its_unit():
    assert [report.unit_of(s) for s in (299, 300, 10799, 10800)] == [
        ("s", 1),
        ("minutes", 60),
        ("minutes", 60),
        ("hours", 3600),
    ]


def test_table_has_wall_times_in_their_unit_and_what_else_is_to_be_known(tmp_path, monkeypatch):
    returns = [1.0] * 1200  # 600 s
    for seed in (1, 2):
        folder = make_run(tmp_path / "sweep" / "runs" / f"run{seed}", seed=seed, returns=returns)
    config = json.loads((folder / "config.json").read_text()) | {"cores": 64}
    (folder / "config.json").write_text(json.dumps(config))
    make_run(
        tmp_path / "sweep" / "runs" / "run3",
        seed=3,
        returns=[1.0] * 7,
        evaluation=None,
        total_timesteps=1200000,
    )
    make_sweep(
        tmp_path / "sweep",
        {f"run{i}": ["--seed", str(i)] for i in (1, 2, 3)},
        run1=("finished", ""),
        run2=("finished", ""),
        run3=("waiting", ""),
    )
    run_report(monkeypatch, tmp_path / "sweep", "--out", tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    rows = {row[0]: row[1:] for row in table_after(text, "CartPole-v1")}
    assert (rows["variant or source"][-1], rows["vpg"][-1]) == ("wall time, minutes", "10.0")
    other = "Linux vm 6.1 x86_64, 64 cores, cpu: CartPole-v1, vpg: seed 2"
    assert f"| different machines: compare no speeds | 1 | {other} |" in text
    assert (
        "| stopped, to be resumed | 1 | CartPole-v1, vpg: seed 3 (step 7,000 of 1,200,000) |"
        in text
    )


def test_mean_and_deviation_have_the_digits_of_the_larger():
    assert (
        report.mean_std([1.0, 201.0]) == "101.0 +- 100.0"
        and report.mean_std([-20.5, 21.0]) == "0.2 +- 20.8"
    )
    assert report.mean_std([3.0]) == "3.00" and report.mean_std([]) == "-"


def test_report_says_what_all_variants_have(tmp_path, monkeypatch):
    """And lists seeds as numbers, not as the folders' names are ordered."""
    for seed in (1, 2, 10):
        make_run(tmp_path / "runs" / f"a{seed}", seed=seed, gamma=0.9, evaluation=None)
    make_run(tmp_path / "runs" / "b", gamma=0.9, baseline="none")
    run_report(monkeypatch, tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "All variants of vpg have --gamma 0.9." in text and "| vpg --baseline none | 1 |" in text
    assert re.search(r"vpg: seed 1 \(.*?\), 2 \(.*?\), 10 \(", text)


def test_report_shows_runs_that_differ(big):
    """Failed, running, planned, unfinished, repeated and damaged ones.

    Several commits, versions, numbers of steps.
    """
    rows = [
        [what, count, which] for what, count, which in table_after(big.markdown, "Runs that differ")
    ]
    assert [
        "failed",
        "1",
        "run4 (step 3,000 of 8,000): Bad &lt;b&gt;end&lt;/b&gt; in vpg.py (exit code 1)",
    ] in rows
    assert ["failed", "1", "run5: not enough memory"] in rows
    assert ["running, nothing written yet", "1", "CartPole-v1, vpg: seed 6"] in rows
    assert ["not begun", "1", "CartPole-v1, vpg: seed 7"] in rows
    assert [
        "unfinished: stopped or running",
        "1",
        "HalfCheetah-v5, ppo_continuous_action: seed 3 (step 2,000 of 4,000)",
    ] in rows
    assert [
        "more than one run of a seed: each counts",
        "2",
        "HalfCheetah-v5, ppo_continuous_action: seed 2, 2",
    ] in rows
    assert any(row[0] == "damaged" and row[2].startswith("broken: not a run") for row in rows)
    assert ["different git commits", "1", "def: CartPole-v1, vpg: seed 2"] in rows
    assert ["different versions", "1", "torch=4.5.6: CartPole-v1, vpg: seed 2"] in rows
    steps = [row for row in rows if row[0] == "CartPole-v1: different numbers of steps"]
    assert [row[2].split(":")[0] for row in steps] == ["8,000", "9,000"]
    assert not any("machines" in row[0] for row in rows)
    assert (
        "Runs: 2 failed, 13 finished, 1 running, 1 unfinished, 1 waiting, 1 damaged; drawn on"
        in big.markdown
    )


def test_report_has_every_run_with_its_command_versions_machine_and_commit(big):
    rows = {row[0]: row[1:] for row in table_after(big.markdown, "Every run")}
    assert {"run1", "run7", "none1", "stopped", "evil"} <= set(rows)
    run = rows["run2"]
    assert run[:6] == ["CartPole-v1", "vpg", "2", "finished", "8,000", "20.0"]
    assert run[-4:] == [
        "python vpg.py --seed 2 --note notes.txt",
        "torch=4.5.6",
        "Linux vm 6.1 x86_64, 2 cores, cpu",
        "def",
    ]
    assert rows["run7"][3:5] == ["waiting", "-"]
    for text in (big.page, big.markdown):
        assert "/home/me" not in text and str(big.sweep.parent) not in text


def test_report_warns_of_few_seeds(big, tmp_path, monkeypatch, capsys):
    """On the page, in the Markdown and on the terminal; not with ten."""
    for text in (big.page, big.markdown, big.done.stderr):
        assert (
            "Fewer than ten seeds, 1 at the least (Acrobot-v1, CartPole-v1, HalfCheetah-v5)" in text
        )
    for i in range(10):
        make_run(tmp_path / "runs" / f"run{i}", seed=i)
    run_report(monkeypatch, tmp_path / "runs")
    assert (
        "ewer than ten"
        not in capsys.readouterr().err + (tmp_path / "report" / "report.html").read_text()
    )


def test_report_warns_of_uneven_seeds(big):
    """On the page and on the terminal."""
    assert (
        "with more seeds weigh more" in big.done.stderr and "with more seeds weigh more" in big.page
    )
    assert "Not all variants have finished runs in the same environments" in big.done.stderr


def test_report_shows_runs_that_are_short_or_not_finite(tmp_path, monkeypatch):
    make_run(tmp_path / "runs" / "short", returns=[1.0] * 3, total_timesteps=8000)
    make_run(tmp_path / "runs" / "nan", seed=2, returns=[float("nan"), *[2.0] * 7])
    make_run(
        tmp_path / "runs" / "played", seed=3, returns=[3.0] * 8, evaluation=(float("inf"), 1.0)
    )
    make_run(tmp_path / "runs" / "good", seed=4, returns=[4.0] * 8)
    run_report(monkeypatch, tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    rows = [row[:2] + [row[2].split(": ")[-1]] for row in table_after(text, "Runs that differ")]
    assert [
        "finished long before their planned steps: they count in full",
        "1",
        "short (step 3,000 of 8,000)",
    ] in rows
    assert ["returns that aren't finite: in no curve", "1", "seed 2"] in rows
    assert ["finished without a finite return: in no average", "1", "seed 2"] in rows
    assert ["evaluations that aren't finite", "1", "seed 3"] in rows
    assert {row[0]: row[1:3] for row in table_after(text, "CartPole-v1")}["vpg"] == [
        "3 of 4",
        "2.67 +- 1.25",
    ]


def test_report_names_evaluations_that_cannot_be_read(tmp_path, monkeypatch):
    """Their runs are in no average, in a sweep and elsewhere."""
    sweep = make_sweep(tmp_path / "sweep", {"one": [], "two": []}, two=("finished", ""))
    runs = sweep / "runs"
    make_run(runs / "one", returns=[5.0] * 8)
    bad = make_run(runs / "two", seed=2, returns=[7.0] * 8)
    (bad / "evaluation.json").write_text('{"returns": [1.0')
    for path, state in ((sweep, "waiting"), (runs, "unfinished")):
        run_report(monkeypatch, path, "--out", tmp_path / "out")
        text = (tmp_path / "out" / "report.md").read_text()
        assert f"Runs: 1 finished, 1 {state}; " in text
        rows = {row[0]: row[1:] for row in table_after(text, "Runs that differ")}
        number, what = rows["not finished, as their evaluation can't be read"]
        assert number == "1" and what.startswith("two: evaluation.json can't be read (")
        rows = {row[0]: row[1:3] for row in table_after(text, "CartPole-v1")}
        assert rows["vpg"] == ["1 of 2", "5.00"]


@pytest.mark.filterwarnings("error")
def test_report_of_runs_without_evaluation_episodes(tmp_path, monkeypatch):
    """--eval-episodes 0: they are finished, and have no score of an evaluation."""
    make_run(tmp_path / "runs" / "one", returns=[5.0] * 8, evaluation=())
    make_run(tmp_path / "runs" / "two", returns=[5.0] * 8, evaluation=(), env_id="Acrobot-v1")
    make_run(tmp_path / "runs" / "three", seed=2, returns=[7.0] * 8, env_id="Acrobot-v1")
    run_report(monkeypatch, tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Runs: 3 finished; " in text and "nan" not in text
    cells = {}
    for env_id in ("CartPole-v1", "Acrobot-v1"):
        rows = {row[0]: row for row in table_after(text, env_id)}
        cells[env_id] = (rows["vpg"][1], rows["vpg"][2], rows["vpg"][4])
    assert cells == {"CartPole-v1": ("1", "5.00", "-"), "Acrobot-v1": ("2", "6.00 +- 1.00", "6.00")}
    every = {row[0]: row[7] for row in table_after(text, "Every run")}
    assert every == {"run": "evaluation", "one": "-", "two": "-", "three": "6.00"}


def test_report_of_names_that_are_no_text(tmp_path, monkeypatch, capsys):
    """A folder's name may be any bytes: it is shown with what can be printed of it.

    In the page, the Markdown, the figures' data and the terminal; in a sweep each run once.
    """
    sweep = make_sweep(tmp_path / os.fsdecode(b"sweep\xfd"), {"good": []})
    make_run(sweep / "runs" / "good", returns=[5.0] * 8)
    bad = make_run(sweep / "runs" / os.fsdecode(b"bad\xff"), seed=2, returns=[7.0] * 8)
    (sweep / "runs" / os.fsdecode(b"none\xfe")).mkdir()
    run_report(monkeypatch, bad, sweep)
    assert f"tensorboard --logdir '{tmp_path}/sweep\\udcfd/runs'" in capsys.readouterr().out
    text = (bad / "report" / "report.md").read_text()
    assert "Runs: 2 finished, 1 damaged; " in text and "none\\udcfe: not a run" in text
    assert [row[0] for row in table_after(text, "Every run")] == ["run", "good", "bad\\udcff"]
    assert "bad\\udcff" in (bad / "report" / "report.html").read_text()
    rows = read_csv(bad / "report" / "figures" / "CartPole-v1_steps.csv")
    assert {row["series"] for row in rows} == {"good", "bad\\udcff", "iqm"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: edit(folder / "episodes.csv", "1000,0.5", "1000,nan"),
        lambda folder: edit(
            folder / "config.json",
            '"/home/me/vpg.py", "--seed", "1", "--note", "/home/me/notes.txt"',
            "",
        ),
        lambda folder: edit(
            folder / "config.json", '"total_timesteps": 2000', '"total_timesteps": "many"'
        ),
        lambda folder: edit(folder / "episodes.csv", "2000,1.0,0,2.0", "2000,what"),
    ],
)
def test_one_damaged_run_is_named_and_the_others_reported(tmp_path, monkeypatch, damage):
    make_run(tmp_path / "runs" / "good", seed=2)
    damage(make_run(tmp_path / "runs" / "bad"))
    run_report(monkeypatch, tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert (
        "Runs: 1 finished, 1 damaged" in text and "| damaged | 1 | bad: not a run, damaged" in text
    )


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_environment_whose_returns_are_never_finite_has_no_curve(tmp_path, monkeypatch):
    make_run(tmp_path / "runs" / "nan", returns=[float("nan")] * 3)
    run_report(monkeypatch, tmp_path / "runs")
    assert "No episode has ended yet" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize(
    "plan", ["5", "{}", '{"script": "vpg.py", "words": 3}', '{"script": 1, "words": []}']
)
def test_damaged_plan_of_a_run_is_named(tmp_path, monkeypatch, plan):
    sweep = make_sweep(tmp_path / "sweep", {"one": [], "two": []})
    make_run(sweep / "runs" / "one")
    (sweep / "sweep.json").write_text(f'{{"runs": {{"one": {plan}, "two": {plan}}}}}')
    run_report(monkeypatch, sweep)
    assert (
        "| damaged | 1 | two: sweep.json is damaged there"
        in (sweep / "report" / "report.md").read_text()
    )


def test_command_of_a_run_that_has_not_begun(tmp_path, monkeypatch):
    sweep = make_sweep(
        tmp_path / "sweep", {"one": ["--seed", "1", "--env-id", "My Env-v0"]}, one=("failed", "bad")
    )
    run_report(monkeypatch, sweep)
    assert (
        "| python vpg.py --seed 1 --env-id 'My Env-v0' |"
        in (sweep / "report" / "report.md").read_text()
    )


def test_report_of_many_variants_compares_them_with_the_defaults(tmp_path, monkeypatch):
    """With looks that differ, and centers that are no means.

    Of one environment there is no sum over all.
    """
    for i in range(7):
        for seed in range(1, 5):
            make_run(
                tmp_path / "runs" / f"{i}_{seed}",
                seed=seed,
                returns=[float(i + (90 if seed == 4 else seed))],
                **({"gamma": round(0.9 + i / 100, 2)} if i else {}),
            )
    runs, troubles = read_runs([tmp_path / "runs"], None)
    shared = name_variants(runs, [])
    monkeypatch.setattr(scores, "RESAMPLES", 20)  # the intervals don't matter
    made = report.Report(runs, shared, troubles, "iqm", tmp_path / "out")
    assert len(set(made.looks.values())) == 7
    rows = read_csv(tmp_path / "out" / "figures" / "improvement.csv")
    assert [row["name"] for row in rows] == [f"vpg --gamma 0.9{i} > vpg" for i in range(1, 7)]
    rows = read_csv(tmp_path / "out" / "figures" / "ablation_vpg_CartPole-v1.csv")
    assert [float(row["value"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "out" / "figures" / "ablation_vpg_all.csv").exists()


def test_report_of_many_variants_sets_like_beside_like(tmp_path, monkeypatch):
    """Of five variants and what they are compared with: defaults, a variant with its script's, and
    the same twice.
    """
    for part in ("new", "old"):
        for script, flags in (
            ("vpg", {}),
            ("vpg", {"gamma": 0.5}),
            ("a2c", {}),
            ("a2c", {"gamma": 0.5}),
            ("ppo", {}),
        ):
            for seed in (1, 2):
                make_run(
                    tmp_path / part / f"{script}{len(flags)}{seed}",
                    script,
                    seed,
                    commit=part,
                    **flags,
                )
    monkeypatch.setattr(scores, "RESAMPLES", 20)  # the intervals don't matter
    run_report(monkeypatch, tmp_path / "new", "--compare", tmp_path / "old")
    rows = {row["name"] for row in read_csv(tmp_path / "report" / "figures" / "improvement.csv")}
    names = {frozenset(name.split(" > ")) for name in rows}
    plain = ["vpg", "a2c", "ppo", "vpg (old)", "a2c (old)", "ppo (old)"]
    expected = {frozenset(pair) for pair in combinations(plain, 2)}
    expected |= {frozenset((f"{x} --gamma 0.5", f"{x} --gamma 0.5 (old)")) for x in ("vpg", "a2c")}
    expected |= {
        frozenset((f"{x} --gamma 0.5{y}", f"{x}{y}"))
        for x in ("vpg", "a2c")
        for y in ("", " (old)")
    }
    assert names == expected and len(rows) == len(expected)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "only scripts with their defaults are set beside each other" in text
    for i in range(4):  # variants of a script without defaults
        for seed in (1, 2):
            make_run(tmp_path / "mine" / f"{i}{seed}", "mine", seed, lr=i)
    make_run(tmp_path / "mine" / "vpg")
    make_run(tmp_path / "mine" / "a2c", "a2c")
    run_report(monkeypatch, tmp_path / "mine", "--out", tmp_path / "second")
    rows = read_csv(tmp_path / "second" / "figures" / "improvement.csv")
    assert [row["name"] for row in rows if "mine" in row["name"]] == [
        f"mine --lr {i} > {x}" for x in ("a2c", "vpg") for i in range(4)
    ] and len(rows) == 9


def test_report_says_why_there_is_no_ablation(tmp_path, monkeypatch):
    make_run(tmp_path / "runs" / "one", baseline="none")
    make_run(tmp_path / "runs" / "two", gamma=0.5)
    run_report(monkeypatch, tmp_path / "runs")
    assert (
        "vpg has no finished run with its defaults"
        in (tmp_path / "report" / "report.md").read_text()
    )


def test_report_statistics_of_variants(big):
    """Normalised over all runs of an environment, each pair of variants over the environments that
    both have.
    """
    assert "set beside each other" not in big.markdown  # all pairs of four variants are
    for text in (big.page, big.markdown):
        assert "Acrobot-v1 -40.0 to -5.00, CartPole-v1 7.00 to 42.0" in text
        assert "Not all variants have finished runs in the same environments" in text
    rows = {row["name"]: row for row in read_csv(big.folder / "figures" / "improvement.csv")}
    pair = rows["vpg > vpg --baseline none"]
    assert float(pair["value"]) == 0 and pair["environments"] == "2"
    assert rows[f"vpg > vpg --baseline {EVIL!r}"]["environments"] == "1"
    rows = {row["name"]: row for row in read_csv(big.folder / "figures" / "aggregate.csv")}
    expected = scores.iqm(np.array([0, 20 / 35, 3 / 35, 13 / 35, 23 / 35]))
    assert float(rows["vpg"]["value"]) == pytest.approx(expected)
    profile = read_csv(big.folder / "figures" / "profile.csv")
    above = {row["tau"]: float(row["value"]) for row in profile if row["variant"] == "vpg"}
    assert above["0.5"] == 2 / 5 and above["0.0"] == 4 / 5


def test_report_ablation_is_the_difference_to_the_defaults(big):
    rows = {
        row["name"]: row for row in read_csv(big.folder / "figures" / "ablation_vpg_Acrobot-v1.csv")
    }
    assert set(rows) == {"--baseline none"}
    assert float(rows["--baseline none"]["value"]) == -7.5 + 30
    rows = {row["name"]: row for row in read_csv(big.folder / "figures" / "ablation_vpg_all.csv")}
    assert (rows["--baseline none"]["environments"], rows["--baseline none"]["variant"]) == (
        "2",
        "vpg --baseline none",
    )
    assert (big.folder / "figures" / "ablation_vpg_CartPole-v1.csv").exists()


def test_report_curves(big):
    """The data of the figure: single runs, finished or not, and the center of the finished ones
    with its interval.
    """
    rows = read_csv(big.folder / "figures" / "CartPole-v1_steps.csv")
    ends = {row["series"]: row for row in rows if row["variant"] == "vpg"}
    assert (ends["run3"]["steps"], ends["run3"]["value"]) == ("8000.0", "30.0")
    # Of a grid of 80, up to 8,000
    assert (ends["run4"]["steps"], ends["run4"]["value"]) == ("2960.0", "2.0")
    assert [float(ends["iqm"][name]) for name in ("value", "low", "high")] == [20, 10, 30]
    walls = read_csv(big.folder / "figures" / "CartPole-v1_wall-time.csv")
    assert max(float(row["wall_time"]) for row in walls if row["series"] == "run3") == 4.0


def test_curve_along_the_wall_time_has_the_median_time_of_each_step(tmp_path, monkeypatch):
    """A seed on a slow machine moves no value of the others, and the curve goes on to the last
    step.
    """
    for seed, slower in ((1, 1), (2, 2), (3, 20)):
        run = make_run(tmp_path / "runs" / f"run{seed}", seed=seed, returns=range(11))
        lines = (run / "episodes.csv").read_text().splitlines()
        cells = [line.split(",") for line in lines[1:]]
        (run / "episodes.csv").write_text(
            "\n".join(
                [
                    lines[0],
                    *(",".join([x[0], str(slower * float(x[1])), *x[2:]]) for x in cells),
                    "",
                ]
            )
        )
    run_report(monkeypatch, tmp_path / "runs")
    rows = read_csv(tmp_path / "report" / "figures" / "CartPole-v1_wall-time.csv")
    assert {row["series"]: float(row["wall_time"]) for row in rows} == {
        "run1": 5.5,
        "run2": 11.0,
        "run3": 110.0,
        "iqm": 11.0,
    }
    assert [row["value"] for row in rows if row["series"] == "iqm"][-1] == "10.0"


def test_overview_has_the_curves_of_all_environments(big):
    assert figure_names(big.page)[0] == "overview"
    rows = read_csv(big.folder / "figures" / "overview.csv")
    env_ids = list(dict.fromkeys(row.pop("env_id") for row in [dict(row) for row in rows]))
    assert len(env_ids) > 1
    for env_id in env_ids:
        own = [
            {name: x for name, x in row.items() if name != "env_id"}
            for row in rows
            if row["env_id"] == env_id
        ]
        assert own == read_csv(big.folder / "figures" / f"{report.slug(env_id)}_steps.csv")


def test_overview_has_a_panel_for_each_environment_and_one_legend():
    x = np.array([0.0, 1.0])
    curves = {"v": {"runs": [("a", x, x, True)], "center": (x, x, x, x), "count": 1}}
    panels = {"A-v0": (curves, [("far", 5.0)]), "B-v1": (curves, [("source", 1.2), ("far", 5.0)])}
    figure, _ = report.draw_overview(panels, {"v": ("#0072B2", "-")}, "iqm")
    assert [(axes.get_title(), len(axes.lines)) for axes in figure.axes] == [
        ("A-v0", 2),
        ("B-v1", 3),
    ]
    assert sorted(text.get_text() for text in figure.legends[0].texts) == [
        "published scores, where they are in the picture",
        "v",
    ]


def test_overview_has_room_for_long_names():
    x, long = (
        np.array([0.0, 1.0]),
        "ppo_continuous_action --learning-rate 0.001 --num-minibatches 64 --no-norm-adv",
    )
    curves = {long: {"runs": [("a", x, x, True)], "center": (x, x, x, x), "count": 1}}
    panels = {"benchmark.environments:MaskedCartPole-v1": (curves, []), "B-v1": (curves, [])}
    figure, _ = report.draw_overview(panels, {long: ("#0072B2", "-")}, "iqm")
    figure.draw_without_rendering()
    for text in (*(axes.title for axes in figure.axes), *figure.legends[0].texts):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and 0 <= box.y0 < box.y1 <= figure.bbox.y1, (
            text
        )


def test_unfinished_curves_are_dashed():
    figure, _ = draw_one(1, [("source", 5.0)])
    lines = figure.axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert all((line.get_alpha() or 1) > 0.3 for line in lines) and lines[2].get_linewidth() == 2
    assert [text.get_text() for text in figure.legends[0].texts] == [
        "v (1\u00a0finished)",
        "source",
    ]
    figure, _ = draw_one(0)
    assert (
        figure.axes[0].lines[2].get_linestyle() == "--"
        and figure.axes[0].lines[2].get_linewidth() < 1
    )


def draw_one(count, lines=(), x_label="steps"):
    x, nan = np.linspace(0, 1000, 3), np.full(3, np.nan)
    center = (x, x / 100, x / 100 - 1, x / 100 + 2) if count else (x, nan, nan, nan)
    curves = {
        "v": {
            "runs": [("a", x, x / 100, True), ("b", x, x / 100, False)],
            "center": center,
            "count": count,
        }
    }
    return report.draw_curves(curves, lines, {"v": ("#0072B2", "-")}, x_label, "iqm")


def test_band_of_a_curve_is_its_interval_and_times_have_their_unit():
    figure, _ = draw_one(1, x_label="wall time")
    axes = figure.axes[0]
    corners = axes.collections[0].get_paths()[0].vertices
    assert {(round(x * 60), y) for x, y in corners} >= {
        (0, -1),
        (0, 2),
        (500, 4),
        (500, 7),
        (1000, 9),
        (1000, 12),
    }
    assert all(line.get_xdata()[-1] == pytest.approx(1000 / 60) for line in axes.lines)
    assert axes.get_xlabel() == "wall time, minutes" and axes.get_xlim() == pytest.approx(
        (0, 1000 / 60)
    )


def test_published_scores_that_would_squeeze_the_curves_are_named_only():
    published = [("near", 14.0), ("far", 30.0), ("low", -9.0)]
    figure, rows = draw_one(1, published)
    axes = figure.axes[0]
    drawn = {line.get_label(): line for line in axes.lines[3:] if len(line.get_xdata())}
    assert (
        list(drawn) == ["near"]
        and set(drawn["near"].get_ydata()) == {14.0}
        and axes.get_ylim()[1] > 14
    )
    assert [text.get_text() for text in figure.legends[0].texts][1:] == [
        "near",
        "far: above the picture",
        "low: below the picture",
    ]
    assert [
        (row["series"], row["value"]) for row in rows if row["variant"] == "published"
    ] == published


def test_intervals_are_where_they_belong():
    rows = [
        {"name": name, "variant": "v", "value": value, "low": value - 1, "high": value + 2}
        for name, value in (("one", 3.0), ("two", 7.0))
    ]
    looks = {"v": ("#0072B2", "-")}
    axes = report.draw_intervals(rows, looks, "score", 0.5, limits=(0, 10)).axes[0]
    assert [line.get_xdata()[:1] for line in axes.lines[:1]] == [[0.5]] and axes.get_xlim() == (
        0,
        10,
    )
    assert [list(line.get_xdata()) for line in axes.lines[1:]] == [[3], [2, 5], [7], [6, 9]]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first is above
    bars = report.draw_intervals(rows, looks, "score", bars=True).axes[0]
    assert [bar.get_width() for bar in bars.patches] == [3, 7] and len(bars.lines) == 2


def test_long_names_and_labels_of_intervals_stay_in_the_picture():
    rows = [
        {
            "name": "ppo_continuous_action --no-bootstrap-truncated",
            "variant": "v",
            "value": 1,
            "low": 0,
            "high": 2,
        }
    ]
    label = "return of the last 100 episodes, less that of it, " * 2
    figure = report.draw_intervals(rows, {"v": ("#0072B2", "-")}, label)
    figure.draw_without_rendering()
    for text in (*figure.axes[0].get_yticklabels(), *figure.texts):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1 and 0 <= box.y0 < box.y1 <= figure.bbox.y1, (
            text
        )


def test_profile_is_drawn_with_its_band():
    taus, looks = np.array([0.0, 1.0]), {"v": ("#0072B2", "-")}
    figure, _ = report.draw_profile(taus, {"v": (taus, taus - 1, taus + 2)}, looks, "tau")
    assert {tuple(corner) for corner in figure.axes[0].collections[0].get_paths()[0].vertices} >= {
        (0, -1),
        (1, 3),
    }


def test_labels_are_no_formulas(tmp_path):
    """Whatever a flag holds is drawn as it is."""
    row = {
        "name": r"vpg --baseline '$\frac$'",
        "variant": "v",
        "value": 1.0,
        "low": 0.5,
        "high": 2.0,
    }
    figure = report.draw_intervals([row], {"v": ("#0072B2", "-")}, "score")
    assert r"$\frac$" in report.save(figure, [row], tmp_path, "name", "title")


def figure_names(page):
    return re.findall(r'<figure id="([^"]*)"', page)


def test_every_figure_has_its_files_and_is_in_the_pages(big):
    """A PNG, an SVG and a CSV each; ids of one page are there once."""
    names = figure_names(big.page)
    assert {
        "CartPole-v1_steps",
        "CartPole-v1_wall-time",
        "Acrobot-v1_steps",
        "aggregate",
        "profile",
        "improvement",
        "ablation_vpg_Acrobot-v1",
        "ablation_vpg_all",
    } <= set(names)
    assert sorted(names) == sorted(path.stem for path in (big.folder / "figures").glob("*.png"))
    assert big.page.count("<svg ") == len(names)
    for name in names:
        path = big.folder / "figures" / name
        with Image.open(path.with_name(f"{name}.png")) as image:
            assert image.width > 500 and image.getpixel((0, 0))[:3] == (255, 255, 255)
        assert path.with_name(f"{name}.svg").read_text().startswith("<?xml")
        assert read_csv(path.with_name(f"{name}.csv"))
        assert f"](figures/{name}.png)" in big.markdown
        assert f"{name}.{{png,svg,csv}}" in big.done.stdout
    assert 'http-equiv="refresh"' not in big.page
    ids = re.findall(r'\bid="([^"]*)"', big.page)
    assert len(ids) == len(set(ids)) > 100
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', big.page)
    assert {a or b for a, b in used} <= set(ids)


def test_page_has_the_text_colour_and_no_white(big):
    svgs = "".join(re.findall(r"<svg .*?</svg>", big.page, re.S))
    assert "currentColor" in svgs and "#010203" not in svgs and "fill: #ffffff" not in svgs
    assert "prefers-color-scheme: dark" in big.page and "color-scheme: light dark" in big.page


class References(HTMLParser):
    """Collects what a page refers to, its tags, and its visible text."""

    def __init__(self, page):
        super().__init__()
        self.found, self.tags, self.texts = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name.split(":")[-1] in (
                "src",
                "href",
                "srcset",
                "data",
                "action",
                "poster",
                "background",
            ):
                self.found.append(value)
            self.found += re.findall(r"url\(\s*['\"]?([^)]*)", value or "")

    def handle_data(self, data):
        self.texts.append(data)
        self.found += re.findall(r"url\(\s*['\"]?([^)]*)|@import\s*(\S+)", data)


def test_page_refers_to_nothing_outside(big):
    page = References(big.page)
    assert (
        len(page.found) > 20 and [x for x in page.found if not x.startswith(("#", "data:"))] == []
    )
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)


def test_what_comes_from_runs_is_escaped(big):
    """In tables, captions, legends and the SVGs' titles."""
    assert EVIL not in big.page and EVIL not in big.markdown
    assert big.page.count("&lt;script&gt;") > 4 and "<b>end" not in big.page
    assert any(EVIL in text for text in References(big.page).texts)
    assert EVIL not in (big.folder / "figures" / "CartPole-v1_steps.svg").read_text()


def test_report_prints_paths_and_tensorboards_command(big):
    lines = big.done.stdout.splitlines()
    assert lines[:2] == [str(big.folder / "report.html"), str(big.folder / "report.md")]
    assert lines[-2:] == [
        f"tensorboard --logdir {big.sweep / 'runs'}",
        f"tensorboard --logdir {big.runs}",
    ]


def test_compare_sets_runs_beside_others(tmp_path, monkeypatch, capsys):
    """With the means of each, and the place of the report: in the first sweep, beside the first
    folder of runs.
    """
    for i in (1, 2):
        make_run(tmp_path / "new" / "runs" / f"run{i}", seed=i, returns=[5.0])
        make_run(tmp_path / "old" / f"run{i}", seed=i, returns=[3.0], commit="old123")
    make_sweep(tmp_path / "new", {"run1": [], "run2": []})
    run_report(monkeypatch, tmp_path / "new", "--compare", tmp_path / "old", "--center", "mean")
    folder = tmp_path / "new" / "report"
    rows = {
        row[0]: row[1:] for row in table_after((folder / "report.md").read_text(), "CartPole-v1")
    }
    assert rows["vpg"][:2] == ["2", "5.00 +- 0.00"] and rows["vpg (old123)"][:2] == [
        "2",
        "3.00 +- 0.00",
    ]
    assert "mean of normalised scores" in (folder / "report.html").read_text()
    assert {row["series"] for row in read_csv(folder / "figures" / "CartPole-v1_steps.csv")} == {
        "run1",
        "run2",
        "mean",
    }
    assert str(tmp_path / "old") in capsys.readouterr().out.splitlines()[-1]
    run_report(monkeypatch, tmp_path / "old")
    assert (tmp_path / "report" / "report.html").exists()


def test_sweep_of_which_nothing_has_begun(tmp_path, monkeypatch):
    """And one whose sweep.json is damaged still shows its runs."""
    make_sweep(tmp_path / "a", {"one": ["--seed", "1"]})
    run_report(monkeypatch, tmp_path / "a")
    page = (tmp_path / "a" / "report" / "report.html").read_text()
    assert "not begun" in page and "No episode has ended yet" in page and "<svg" not in page
    make_run(tmp_path / "b" / "runs" / "one")
    (tmp_path / "b" / "sweep.json").write_text("{")
    run_report(monkeypatch, tmp_path / "b", "--out", tmp_path / "out")
    assert (
        "doesn&#x27;t say which runs are planned" in (tmp_path / "out" / "report.html").read_text()
    )


def test_watch_draws_until_all_runs_have_ended(tmp_path, monkeypatch, capsys):
    """The page reloads itself as long as it is drawn again."""
    sweep = make_sweep(
        tmp_path / "sweep", {"one": ["--seed", "1"], "two": ["--seed", "2"]}, two=("running", "")
    )
    make_run(sweep / "runs" / "one", seed=1)
    page, seen, draw, now = sweep / "report" / "report.html", [], report.draw, [0]

    def slow_draw(*args):
        now[0] += 3 * len(seen)  # s: the first takes none
        return draw(*args)

    def sleep(seconds):
        seen.append((seconds, page.read_text()))
        if len(seen) == 1:
            make_run(sweep / "runs" / "two", seed=2, evaluation=None)
        else:
            (sweep / "jobs" / "two.json").write_text('{"state": "failed", "error": "bad"}')

    monkeypatch.setattr(report.time, "sleep", sleep)
    monkeypatch.setattr(report.time, "time", lambda: now[0])
    monkeypatch.setattr(report, "draw", slow_draw)
    run_report(monkeypatch, sweep, "--watch", "--interval", "7")
    assert [seconds for seconds, _ in seen] == [7, 30]  # a tenth of a core at the most
    assert all('<meta http-equiv="refresh" content="7">' in text for _, text in seen)
    assert "nothing written yet" in seen[0][1] and "(step 2,000 of 2,000)" in seen[1][1]
    assert (
        "refresh" not in page.read_text() and "two (step 2,000 of 2,000): bad" in page.read_text()
    )
    assert "1 finished, 1 running" in capsys.readouterr().out


def test_watch_waits_for_the_first_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(report.time, "sleep", lambda seconds: make_run(tmp_path / "runs" / "one"))
    run_report(monkeypatch, tmp_path / "runs", "--watch")
    assert capsys.readouterr().out.startswith("none yet: ")
    assert "Runs: 1 finished" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_ends_quietly_with_ctrl_c_and_sigterm(tmp_path, monkeypatch, capsys, number):
    """The page that is left doesn't reload itself."""
    make_run(tmp_path / "runs" / "one", evaluation=None)
    monkeypatch.setattr(
        report.time, "sleep", lambda _: (signal.raise_signal(number), pytest.fail("not ended"))
    )
    # A job of a shell ignores SIGINT
    own = {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.default_int_handler}
    before = {name: signal.signal(name, handler) for name, handler in own.items()}
    try:
        with pytest.raises(SystemExit) as stop:
            run_report(monkeypatch, tmp_path / "runs", "--watch")
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert stop.value.code == 130 and capsys.readouterr().err == ""
    page = (tmp_path / "report" / "report.html").read_text()
    assert "1 unfinished" in page and "refresh" not in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{}/missing"], "error: no such folder: {}/missing"),
        (
            ["{}/runs", "--compare", "{}/runs/one/config.json"],
            "error: no such folder: {}/runs/one/config.json",
        ),
        (
            ["{}/empty"],
            "error: no run in {}/empty: a run's folder has a config.json, a sweep's a sweep.json",
        ),
        (["{}/runs", "--compare", "{}/empty"], "error: no run in {}/empty"),
        (["{}/runs", "--interval", "0"], "error: --interval must be at least one second"),
        (["{}/runs", "--out", "{}/runs/one/config.json"], "error: can't draw the report: [Errno"),
    ],
)
def test_bad_input_gets_a_sentence(tmp_path, monkeypatch, capsys, words, sentence):
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        run_report(monkeypatch, *(word.format(tmp_path) for word in words))
    error = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and error.startswith(sentence.format(tmp_path))
        and error.count("\n") == 1
    )


# A window is 500 pixels wide at the least, a frame is not
FRAME = """<!doctype html>
<style>:root {{ color-scheme: light dark; }} iframe {{ border: 0; }}</style>
<iframe srcdoc="{}" width="{}" height="900"></iframe>"""
MEASURE = """<script>addEventListener("load", () => {
const box = (x) => { const b = x.getBoundingClientRect(); return [b.width, b.height]; };
const color = (x, name) => getComputedStyle(x)[name];
parent.document.documentElement.textContent = "MEASURED" + JSON.stringify({
    width: innerWidth, needed: document.documentElement.scrollWidth,
    figures: [...document.querySelectorAll("figure")].map(
        (x) => [x.id, ...box(x.querySelector("svg"))]),
    lines: [...document.querySelectorAll("figure svg path")].filter((x) => box(x)[0] > 0).length,
    paper: color(document.body, "backgroundColor"),
    ink: color(document.querySelector("figure svg text") ?? document.body, "fill"),
    requests: performance.getEntriesByType("resource").map((x) => x.name)}) + "END"; });</script>"""


@pytest.fixture
def render(tmp_path):
    """render(page, width, scheme): what Chromium, which reaches no network, measures of a page."""
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not chromium:
        pytest.skip("no Chromium on this machine")

    def measure(page, width, scheme):
        path = tmp_path / "page.html"
        path.write_text(
            FRAME.format(html.escape(page.replace("</body>", f"{MEASURE}</body>")), width)
        )
        done = subprocess.run(
            [
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--proxy-server=127.0.0.1:9",
                "--disable-background-networking",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--hide-scrollbars",
                f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
                "--window-size=1700,1000",
                "--dump-dom",
                path.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        found = re.search("MEASURED(.*)END", done.stdout)
        assert found, done.stderr
        return json.loads(html.unescape(found[1]))

    return measure


def test_page_in_chromium(big, render):
    """Wide and narrow, light and dark: every figure is there, nothing overflows sideways, no
    request is made.
    """
    for width in (1600, 360):
        for scheme in ("light", "dark"):
            found = render(big.page, width, scheme)
            assert found["width"] == width >= found["needed"], (width, scheme)
            assert [name for name, _, _ in found["figures"]] == figure_names(big.page)
            assert all(300 < w <= width and h > 50 for _, w, h in found["figures"]), found[
                "figures"
            ]
            assert found["lines"] > 10 * len(found["figures"])
            assert found["requests"] == []
            ink, paper = (
                sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("ink", "paper")
            )
            assert (ink < 200 and paper > 600) if scheme == "light" else (ink > 600 and paper < 200)
    other = render(
        big.page.replace("<h1>", '<img src="http://example.org/x.png"><h1>'), 1600, "light"
    )
    assert other["requests"] == ["http://example.org/x.png"]  # the measure sees requests
