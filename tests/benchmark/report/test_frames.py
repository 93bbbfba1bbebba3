"""The frames of runs and episodes: from folders, whole and damaged, and from CSVs."""

import hashlib
import re

import numpy as np
import pandas as pd
import pytest

from benchmark import ROOT
from benchmark.report import stats
from benchmark.report.runs import COLUMNS, NO_VARIANT, read, read_published, write_csvs

RESULTS = ROOT / "benchmark" / "results"


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def only(paths):
    """The one run in folders without troubles, a dict."""
    runs, _, troubles = read(paths)
    assert troubles == []
    (row,) = runs.to_dict("records")
    return row


def variants(*paths, **options):
    return sorted(read(paths, **options)[0]["variant"])


# A run's folder


def test_row_of_a_finished_run(tmp_path, make_run):
    """The score is the mean of the last 100 episodes only, speed is steps by wall time."""
    returns = [9999.0] * 50 + [1.0] * 80 + [11.0] * 20
    folder = make_run(tmp_path / "a", "vpg", 7, returns, [1.0, 3.0], text="code\n", gamma=0.9)
    row = only([folder])
    assert set(row) == {*COLUMNS, "stored", "score"}
    assert row | {"base": True} == {
        "run": "a",
        "env_id": "CartPole-v1",
        "script": "vpg",
        "seed": "7",
        "variant": "vpg --gamma 0.9",
        "flags": "--gamma 0.9",
        "base": True,
        "state": "finished",
        "note": "",
        "planned_steps": 150000,
        "steps": 150000,
        "last_100": pytest.approx(3.0),
        "score": pytest.approx(3.0),
        "evaluation_mean": 2.0,
        "steps_per_second": 2000.0,
        "wall_seconds": 75.0,
        "versions": "torch=1.2.3",
        "machine": "cpu=Xeon cpu_capability=AVX2 gpu=none",
        "git_commit": "abc",
        "script_hash": hashlib.sha256(b"code\n").hexdigest()[:8],
        "command": "python vpg.py --seed 7",
        "stored": False,
    }


def test_episodes_are_one_frame(tmp_path, make_run):
    """To the last digit, where pandas' usual reader is wrong; a run without any has no rows."""
    digits = -1022.1031700108729
    make_run(tmp_path / "runs" / "a", returns=[1.0, digits])
    make_run(tmp_path / "runs" / "b", returns=[3.5])
    make_run(tmp_path / "runs" / "c", returns=[])
    assert read([tmp_path / "runs"])[1].to_dict("list") == {
        "run": ["a", "a", "b"],
        "global_step": [1000, 2000, 1000],
        "wall_seconds": [0.5, 1.0, 0.5],
        "return": [1.0, digits, 3.5],
    }


def test_a_run_that_is_being_written(tmp_path, make_run):
    """Half a last line of episodes.csv and half an evaluation.json are not there yet."""
    folder = make_run(tmp_path / "a", evaluation=None)
    with open(folder / "episodes.csv", "a") as file:
        file.write("3000,1.5,0,-12")
    assert only([folder])["note"] == ""
    (folder / "evaluation.json").write_text('{"returns": [1.0')
    row = only([folder])
    assert (row["state"], row["steps"], row["last_100"]) == ("unfinished", 2000, 1.5)
    assert row["note"].startswith("evaluation.json can't be read (")
    assert np.isnan(row["score"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", [None, "", "global_step,wall_seconds,en"])
def test_a_run_before_its_first_episode(tmp_path, make_run, text):
    folder = make_run(tmp_path / "a", evaluation=None)
    (folder / "episodes.csv").unlink()
    if text is not None:
        (folder / "episodes.csv").write_text(text)
    row = only([folder])
    assert row["state"] == "unfinished"
    numbers = ("steps", "last_100", "evaluation_mean", "steps_per_second", "wall_seconds", "score")
    assert all(np.isnan(row[name]) for name in numbers)


def test_a_run_has_failed_unless_it_has_an_evaluation(tmp_path, make_run):
    folder = make_run(tmp_path / "a", evaluation=None)
    (folder / "failed").write_text("RuntimeError: broken (exit code 1)\n")
    row = only([folder])
    assert (row["state"], row["note"]) == ("failed", "RuntimeError: broken (exit code 1)")
    assert np.isnan(row["score"])
    (folder / "evaluation.json").write_text('{"returns": []}')
    row = only([folder])
    assert (row["state"], row["note"], row["score"]) == ("finished", "", 1.5)
    assert np.isnan(row["evaluation_mean"])


def test_the_length_of_a_run_that_was_lengthened(tmp_path, make_run):
    folder = make_run(tmp_path / "a")
    (folder / "evaluation.json").write_text('{"returns": [5.0], "total_timesteps": 3000}')
    assert only([folder])["planned_steps"] == 3000


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_returns_that_are_not_finite_are_no_score(tmp_path, make_run, bad):
    returns = [1.0, float("inf"), float(bad)]
    row = only([make_run(tmp_path / "a", returns=returns, evaluation=returns)])
    assert (row["state"], np.isfinite(row["evaluation_mean"])) == ("finished", False)
    assert not np.isfinite(row["last_100"]) and np.isnan(row["score"])


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("episodes.csv", "1000,0.5", "what,0.5"),
        ("episodes.csv", "wall_seconds", "time"),
        ("config.json", '{"args": {', '{"args": [{'),
        ("config.json", '"env_id": "CartPole-v1", "seed": 1, "run_name": "bad"', '"x": 1'),
        ("config.json", '"args"', '"arguments"'),
        ("config.json", '["/home/me/vpg.py", "--seed", "1"]', "[]"),
    ],
)
def test_a_damaged_folder_is_named_and_the_others_read(tmp_path, make_run, file, old, new):
    make_run(tmp_path / "runs" / "good", seed=2)
    edit(make_run(tmp_path / "runs" / "bad") / file, old, new)
    runs, episodes, troubles = read([tmp_path / "runs"])
    assert list(runs["run"]) == ["good"] and set(episodes["run"]) == {"good"}
    (trouble,) = troubles
    assert trouble.startswith("bad can't be read (")


# Folders


def test_a_sweep_is_its_runs_and_each_run_is_read_once(tmp_path, make_run):
    """What has not begun isn't there; a failed run that wrote no config.json is damaged."""
    run = make_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "later").mkdir()
    (tmp_path / "logs").mkdir()
    for paths in ([tmp_path], [tmp_path / "runs"], [run, tmp_path / "runs" / ".." / "runs", run]):
        runs, _, troubles = read(paths)
        assert list(runs["run"]) == ["a"] and troubles == []
    (tmp_path / "runs" / "later" / "failed").write_text("no such environment\n")
    runs, _, (trouble,) = read([tmp_path])
    assert list(runs["run"]) == ["a"] and trouble.startswith("later can't be read (FileNotFound")


def test_a_folder_without_runs_is_empty_frames(tmp_path):
    runs, episodes, troubles = read([tmp_path, tmp_path / "missing"])
    assert runs.empty and episodes.empty and troubles == []
    assert "variant" in runs and "return" in episodes


def test_runs_are_sorted_by_environment_variant_and_number_of_the_seed(tmp_path, make_run):
    for seed in (10, 9, 1):
        make_run(tmp_path / "runs" / f"x{seed}", seed=seed)
    make_run(tmp_path / "runs" / "y", env_id="Acrobot-v1", gamma=0.9)
    make_run(tmp_path / "runs" / "z", env_id="Acrobot-v1")
    assert list(read([tmp_path / "runs"])[0]["run"]) == ["z", "y", "x1", "x9", "x10"]


# Variants


def test_a_variant_has_the_name_that_its_folder_has_from_a_suite(tmp_path, make_run):
    """ENV__SCRIPT__VARIANT__SEED, with dashes for slashes and colons; elsewhere it is its flags."""
    env_id = "my:ALE/Pong-v5"
    for seed in (1, 2):
        name = f"my-ALE-Pong-v5__vpg__low__{seed}"
        make_run(tmp_path / "runs" / name, seed=seed, env_id=env_id, gamma=0.9)
    make_run(tmp_path / "runs" / "my-ALE-Pong-v5__vpg__3", seed=3, env_id=env_id)
    make_run(tmp_path / "runs" / "my-ALE-Pong-v5__vpg__4__17", seed=4, env_id=env_id, gamma=0.9)
    runs, _, _ = read([tmp_path / "runs"])
    assert list(runs["variant"]) == ["vpg", "vpg --gamma 0.9", "vpg low", "vpg low"]


def test_flags_of_a_variant_are_those_that_differ_and_matter(tmp_path, make_run):
    """As on the command line; threads and the number of steps make no variant."""
    flags = {"norm_adv": False, "hidden_sizes": [8, 16], "baseline": "a b", "num_threads": 3}
    row = only([make_run(tmp_path / "a", new=True, **flags)])
    assert row["flags"] == "--no-norm-adv --baseline 'a b' --hidden-sizes 8 16 --new"


def test_flags_that_a_resume_may_change_make_no_variant():
    """Those of all scripts. No other names are there than flags."""
    text = "".join(path.read_text() for path in ROOT.glob("*.py"))
    free = re.findall(r'"(\w+)"', "".join(re.findall(r"^FREE .*", text, re.MULTILINE)))
    assert "address" in free and set(free) <= set(NO_VARIANT)
    assert all(f"\n    {name}: " in text for name in NO_VARIANT)


def test_runs_of_another_length_are_another_variant(tmp_path, make_run):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b", returns=[1.0] * 9)
    make_run(tmp_path / "runs" / "c", env_id="Acrobot-v1", returns=[1.0] * 9)
    lengths = ["vpg --total-timesteps 2000", "vpg --total-timesteps 9000"]
    assert variants(tmp_path / "runs") == ["vpg", *lengths]


def test_base_variants_have_the_flags_that_all_of_a_script_share(tmp_path, make_run):
    make_run(tmp_path / "runs" / "a", gamma=0.9, norm_adv=False)
    make_run(tmp_path / "runs" / "b", gamma=0.9)
    make_run(tmp_path / "runs" / "c", "ppo")
    runs, _, _ = read([tmp_path / "runs"])
    assert set(runs.loc[runs["base"], "run"]) == {"b", "c"}


def test_runs_to_compare_are_variants_of_their_own(tmp_path, make_run):
    """Runs of one name are told apart, as are their episodes."""
    make_run(tmp_path / "new" / "runs" / "a", returns=[1.0, 1.0])
    make_run(tmp_path / "old" / "runs" / "a", returns=[2.0, 2.0], gamma=0.9)
    runs, episodes, _ = read([tmp_path / "new"], compare=[tmp_path / "old"])
    assert list(runs["variant"]) == ["vpg", "vpg --gamma 0.9 (old)"]
    assert list(runs["base"]) == [True, True]  # each is the only one of its side
    means = episodes.groupby("run")["return"].mean()
    assert list(means[runs["run"]]) == [1.0, 2.0]


# CSVs


def test_what_is_written_is_read_again(tmp_path, make_run):
    """To the last digit: the runs, and the curves along the same grid."""
    for i in (1, 2):
        returns = np.random.default_rng(i).normal(1000, 400, 333)
        make_run(tmp_path / "runs" / f"vpg {i}", seed=i, returns=returns, total_timesteps=400000)
    make_run(tmp_path / "runs" / "bad", evaluation=None, returns=[])
    runs, episodes, _ = read([tmp_path / "runs"])
    curves = stats.curves(runs, episodes)
    write_csvs(tmp_path, runs, curves)
    assert ",400000," in (tmp_path / "runs.csv").read_text()
    again, points, troubles = read([tmp_path])
    assert troubles == [] and again["stored"].all()
    columns = [*COLUMNS, "score"]
    assert again[columns].equals(runs[columns])
    assert np.allclose(stats.curves(again, points)["return"], curves["return"], rtol=1e-11)
    assert list(stats.curves(again, points)["global_step"]) == list(curves["global_step"])


def test_a_csv_of_an_older_report_may_lack_columns(tmp_path, make_run):
    runs, episodes, _ = read([make_run(tmp_path / "a")])
    write_csvs(tmp_path, runs, episodes)
    table = pd.read_csv(tmp_path / "runs.csv")
    table.drop(columns=["wall_seconds", "machine"]).to_csv(tmp_path / "runs.csv", index=False)
    again, _, troubles = read([tmp_path])
    assert troubles == [] and again["wall_seconds"].isna().all()
    assert list(again["machine"]) == [""] and list(again["run"]) == ["a"]


@pytest.mark.parametrize("file, text", [("runs.csv", "x\ny\n"), ("curves.csv", "run\na\n")])
def test_damaged_csvs_are_named(tmp_path, make_run, file, text):
    runs, episodes, _ = read([make_run(tmp_path / "a")])
    write_csvs(tmp_path, runs, episodes)
    (tmp_path / file).write_text(text)
    runs, _, (trouble,) = read([tmp_path])
    assert runs.empty and trouble.startswith(f"{tmp_path.name} can't be read (")


def test_committed_csvs_are_read_whole():
    """With and without the columns that older ones lack or have more; curves stay as long."""
    for path in RESULTS.glob("*/runs.csv"):
        runs, points, troubles = read([path.parent])
        assert troubles == [] and len(runs) == len(path.read_text().splitlines()) - 1
        assert set(points["run"]) <= set(runs["run"])
        assert len(stats.curves(runs, points)) == len(points)
        assert (runs["state"].isin(["finished", "unfinished"])).all()
        assert not runs[["env_id", "script", "command"]].isin(["", "nan"]).any(axis=None)


def test_published_scores_have_their_columns():
    published = read_published()
    assert set(published["kind"]) == {"training", "evaluation"}
    assert np.isfinite(published[["mean", "total_timesteps"]]).all(axis=None)
    assert published["std"].isna().any()
