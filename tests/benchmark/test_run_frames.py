"""Tests of benchmark.runs, on folders made by hand.

tests/test_runs.py has those of the scripts' runs: two test files can't have one name.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmark.runs import SCORE_WORDS, printable, read, read_published, write_csv
from benchmark.store import Store

RESULTS = Path(__file__).resolve().parents[2] / "benchmark" / "results"


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def only(data):
    """The one run of a reading without troubles, a row as a dict."""
    assert data.troubles == []
    (row,) = data.runs.to_dict("records")
    return row


# A run's folder


def test_row_of_a_finished_run(tmp_path, make_run):
    """Means are of the last 100 and 20 episodes only, speed is steps by wall time.

    The deviation has ddof=0.
    """
    returns = [9999.0] * 50 + [1.0] * 80 + [11.0] * 20
    folder = make_run(tmp_path / "a", "vpg", 7, returns, [1.0, 3.0], text="code\n", gamma=0.9)
    row = only(read([folder]))
    expected = {
        "id": 0,
        "run": "a",
        "folder": folder,
        "compared": False,
        "from_csv": False,
        "env_id": "CartPole-v1",
        "script": "vpg",
        "script_folder": "/home/me",
        "script_hash": hashlib.sha256(b"code\n").hexdigest()[:8],
        "seed": 7,
        "suite_variant": "",
        "flags": "--gamma 0.9",
        "variant": "vpg --gamma 0.9",
        "base": False,
        "state": "finished",
        "note": "",
        "damage": "",
        "begun": True,
        "planned_steps": 150000,
        "steps": 150000,
        "episodes": 150,
        "not_finite": 0,
        "last_100": pytest.approx(3.0),
        "last_20": pytest.approx(11.0),
        "score": pytest.approx(3.0),
        "evaluation_mean": 2.0,
        "evaluation_std": 1.0,
        "evaluation_episodes": 2,
        "steps_per_second": 2000.0,
        "wall_seconds": 75.0,
        "versions": "torch=1.2.3",
        "machine": "cpu Xeon, gpu none",
        "git_commit": "abc",
        "command": "python vpg.py --seed 7 --note notes.txt",
    }
    assert {name: row[name] for name in expected} == expected
    assert row["args"]["gamma"] == 0.9 and row["defaults"]["gamma"] == 0.99


def test_episodes_are_a_frame_of_all_runs(tmp_path, make_run):
    make_run(tmp_path / "runs" / "a", returns=[1.0, 2.0])
    make_run(tmp_path / "runs" / "b", returns=[3.5])
    make_run(tmp_path / "runs" / "c", returns=[])
    episodes = read([tmp_path / "runs"]).episodes
    assert episodes.to_dict("list") == {
        "id": [0, 0, 1],
        "global_step": [1000, 2000, 1000],
        "wall_seconds": [0.5, 1.0, 0.5],
        "return": [1.0, 2.0, 3.5],
    }


def test_returns_are_read_to_the_last_digit(tmp_path, make_run):
    """pandas' usual reader is wrong there."""
    value = -1022.1031700108729
    made = read([make_run(tmp_path / "a", returns=[value])])
    assert list(made.episodes["return"]) == [value]
    write_csv(tmp_path / "csv", made.runs, made.curves)
    assert only(read([tmp_path / "csv"]))["score"] == value


def test_steps_and_times_of_episodes_ascend(tmp_path, make_run):
    """A clock that is set back, or an environment whose episode is logged late."""
    folder = make_run(tmp_path / "a", returns=[1.0, 2.0, 3.0])
    edit(folder / "episodes.csv", "2000,1.0", "900,0.2")
    episodes = read([folder]).episodes
    assert list(episodes["global_step"]) == [1000, 1000, 3000]
    assert list(episodes["wall_seconds"]) == [0.5, 0.5, 1.5]


def test_a_run_that_is_being_written(tmp_path, make_run):
    """Half a last line of episodes.csv and half an evaluation.json are not there yet."""
    folder = make_run(tmp_path / "a", evaluation=None)
    with open(folder / "episodes.csv", "a") as file:
        file.write("3000,1.5,0,-12")
    (folder / "evaluation.json").write_text('{"returns": [1.0')
    row = only(read([folder]))
    assert (row["state"], row["steps"], row["last_100"]) == ("unfinished", 2000, 1.5)
    assert row["damage"].startswith("evaluation.json can't be read (")
    assert np.isnan(row["score"])


@pytest.mark.parametrize("text", [None, "", "global_step,wall_seconds,en"])
def test_a_run_before_its_first_episode(tmp_path, make_run, text):
    folder = make_run(tmp_path / "a", evaluation=None)
    (folder / "episodes.csv").unlink()
    if text is not None:
        (folder / "episodes.csv").write_text(text)
    data = read([folder])
    row = only(data)
    assert (row["state"], row["episodes"], row["begun"]) == ("unfinished", 0, True)
    numbers = ("steps", "last_100", "last_20", "steps_per_second", "wall_seconds", "score")
    assert all(np.isnan(row[name]) for name in numbers)
    assert data.episodes.empty


@pytest.mark.filterwarnings("error")
def test_runs_without_evaluation_episodes_are_finished(tmp_path, make_run):
    row = only(read([make_run(tmp_path / "a", evaluation=())]))
    assert (row["state"], row["evaluation_episodes"], row["score"]) == ("finished", 0, 1.5)
    assert np.isnan(row["evaluation_mean"]) and np.isnan(row["evaluation_std"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_returns_that_are_not_finite_are_counted_and_no_score(tmp_path, make_run, bad):
    returns = [1.0, float("inf"), float(bad)]
    row = only(read([make_run(tmp_path / "a", returns=returns, evaluation=returns)]))
    assert (row["state"], row["not_finite"], row["episodes"]) == ("finished", 2, 3)
    assert (row["evaluation_episodes"], np.isfinite(row["evaluation_mean"])) == (3, False)
    assert not np.isfinite(row["last_100"]) and np.isnan(row["score"])


def test_old_runs_name_script_and_defaults_in_no_place(tmp_path, make_run):
    """The script is that of their command."""
    folder = make_run(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    del config["script"], config["defaults"]
    (folder / "config.json").write_text(json.dumps(config | {"command": ["./old.py", "x"]}))
    row = only(read([folder]))
    assert (row["script"], row["script_folder"], row["defaults"]) == ("old", "", None)
    assert row["command"] == "python old.py x"


@pytest.mark.parametrize(
    "file, old, new",
    [
        ("episodes.csv", "1000,0.5", "1000,nan"),
        ("episodes.csv", "1000,0.5", "what,0.5"),
        ("episodes.csv", "2000,1.0,0,2.0", "2000,1.0,0,what"),
        ("episodes.csv", "wall_seconds", "time"),
        ("episodes.csv", "1000,0.5", "1000.5,0.5"),
        ("episodes.csv", "2000,1.0", "1e300,1.0"),
        ("config.json", '"total_timesteps": 2000', '"total_timesteps": "many"'),
        ("config.json", '"total_timesteps": 2000', '"total_timesteps": 0.5'),
        ("config.json", '"total_timesteps": 2000', '"total_timesteps": Infinity'),
        ("config.json", '{"args": {', '{"args": [{'),
        ("config.json", '"env_id": "CartPole-v1", "seed": 1, "run_name": "bad"', '"x": 1'),
    ],
)
def test_one_damaged_run_is_named_and_the_others_read(tmp_path, make_run, file, old, new):
    make_run(tmp_path / "runs" / "good", seed=2)
    edit(make_run(tmp_path / "runs" / "bad") / file, old, new)
    data = read([tmp_path / "runs"])
    assert list(data.runs["run"]) == ["good"]
    (trouble,) = data.troubles
    assert trouble.startswith("bad: not a run, damaged or just begun (")


def test_what_a_custom_script_may_leave_out(tmp_path, make_run):
    folder = make_run(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    config = {name: config[name] for name in ("args", "script")}
    (folder / "config.json").write_text(json.dumps(config))
    row = only(read([folder]))
    assert (row["state"], row["script"], row["score"]) == ("finished", "vpg", 1.5)
    assert (row["versions"], row["git_commit"], row["command"]) == ("", "unknown", "python vpg.py")


def test_bytes_that_are_no_text_are_a_trouble(tmp_path, make_run):
    for i, name in enumerate(("config.json", "episodes.csv")):
        folder = make_run(tmp_path / "runs" / f"run{i}")
        (folder / name).write_bytes(b"\xff\xfe\n\xff\n")
    data = read([tmp_path / "runs"])
    assert data.runs.empty and len(data.troubles) == 2


def test_names_that_are_no_text(tmp_path, make_run):
    """A folder's name may be any bytes: it is shown with what can be printed of it."""
    runs = tmp_path / "runs"
    make_run(runs / "good")
    make_run(tmp_path / "made", seed=2, note="\udc80").rename(runs / os.fsdecode(b"bad\xff"))
    (runs / os.fsdecode(b"none\xfe")).mkdir()
    data = read([runs])
    assert sorted(data.runs["run"]) == ["bad\\udcff", "good"]
    assert "vpg --note '\\udc80'" in set(data.runs["variant"])
    (trouble,) = data.troubles
    assert trouble.startswith("none\\udcfe: not a run")
    write_csv(tmp_path / "out", data.runs, data.episodes)
    assert sorted(read([tmp_path / "out"]).runs["run"]) == ["bad\\udcff", "good"]


def test_printable_reaches_into_lists_and_dicts():
    assert printable({"a\udc80": ["\udcff", 1]}) == {"a\\udc80": ["\\udcff", 1]}


# Folders


def test_each_run_is_read_once_and_the_report_is_none(tmp_path, monkeypatch, make_run, make_sweep):
    run = make_run(tmp_path / "runs" / "a")
    report = tmp_path / "runs" / "report"
    report.mkdir()
    make_sweep(tmp_path, {"a": {}}, a=("finished", ""))
    monkeypatch.chdir(tmp_path)
    for paths in (
        [run, tmp_path / "runs", run, tmp_path / "runs" / ".." / "runs"],
        [Path("runs")],
        [tmp_path / "runs", tmp_path],
        [tmp_path, tmp_path / "runs"],
    ):
        data = read(paths, leave_out=report)
        assert list(data.runs["run"]) == ["a"], paths
        assert len(data.troubles) == (tmp_path in paths), paths  # a sweep's runs/ has no report
    (tmp_path / "runs" / "A-link").symlink_to("a")
    for path in (tmp_path / "runs", tmp_path):
        assert list(read([path], leave_out=report).runs["run"]) == ["a"]


def test_runs_to_compare_are_marked(tmp_path, make_run):
    make_run(tmp_path / "new" / "a")
    make_run(tmp_path / "old" / "a", commit="def")
    data = read([tmp_path / "new"], compare=[tmp_path / "old"])
    assert list(data.runs["compared"]) == [False, True]
    assert list(data.runs["variant"]) == ["vpg", "vpg (def)"]
    assert list(data.runs["id"]) == [0, 1]


def test_a_folder_without_runs_is_empty_frames(tmp_path):
    data = read([tmp_path, tmp_path / "missing"])
    assert data.runs.empty and data.episodes.empty and data.curves.empty
    assert "variant" in data.runs and "return" in data.episodes
    assert data.troubles == [] and data.notes == []


def test_notes_tell_flags_that_names_do_not_show(tmp_path, make_run):
    make_run(tmp_path / "runs" / "a", gamma=0.9)
    make_run(tmp_path / "runs" / "b", gamma=0.9, baseline="none")
    assert read([tmp_path / "runs"]).notes == ["All variants of vpg have --gamma 0.9."]


# Sweeps


def test_a_sweep_in_its_middle(tmp_path, make_run, make_sweep):
    """Each state; what is in its runs/ without a plan; a run that has just begun."""
    names = ["done", "half", "failed", "silent", "young", "later"]
    planned = {name: {"seed": i} for i, name in enumerate(names, 1)}
    sweep = make_sweep(
        tmp_path,
        planned,
        half=("running", ""),
        failed=("failed", "Bad end in /home/me/vpg.py"),
        silent=("failed", ""),
        young=("running", ""),
    )
    (sweep / "logs" / "silent.log").write_text("first\nnot enough memory\n")
    make_run(sweep / "runs" / "done", seed=1)
    make_run(sweep / "runs" / "half", seed=2, evaluation=None)
    make_run(sweep / "runs" / "failed", seed=3, evaluation=None)
    make_run(sweep / "runs" / "other", seed=9)
    (sweep / "runs" / "young").mkdir()
    (sweep / "runs" / "young" / "config.json").write_text('{"args"')
    data = read([sweep])
    assert data.troubles == []
    rows = data.runs.set_index("run")
    assert dict(rows["state"]) == {
        "done": "finished",
        "half": "running",
        "failed": "failed",
        "silent": "failed",
        "young": "running",
        "later": "waiting",
        "other": "finished",
    }
    begun = rows.index[rows["begun"]]
    assert list(begun) == ["done", "half", "failed", "other"]
    assert rows["note"]["failed"] == "Bad end in vpg.py"
    assert rows["note"]["silent"] == "not enough memory"
    assert list(rows["seed"]) == [1, 2, 3, 4, 5, 6, 9]


def test_facts_of_a_planned_run_are_the_plans(tmp_path, make_sweep):
    """Its command line is shown, and nothing is read from it."""
    facts = {
        "seed": 4,
        "env_id": "My Env-v0",
        "variant": "quick",
        "args": {"gamma": 0.9, "total_timesteps": 70},
        "words": ["--env-id", "My Env-v0", "--gamma", "0.1", "--data", "/home/me/x"],
    }
    row = only(read([make_sweep(tmp_path, {"one": facts})]))
    expected = {
        "run": "one",
        "env_id": "My Env-v0",
        "seed": 4,
        "script": "vpg",
        "variant": "vpg quick",
        "flags": "--gamma 0.9",
        "planned_steps": 70,
        "state": "waiting",
        "begun": False,
        "git_commit": "",
        "command": "python vpg.py --env-id 'My Env-v0' --gamma 0.1 --data x",
    }
    assert {name: row[name] for name in expected} == expected


def test_variants_of_a_sweep_have_the_suites_names_before_and_after_they_begin(
    tmp_path, make_run, make_sweep
):
    facts = {"variant": "no-gae", "args": {"gamma": 1.0, "total_timesteps": 2000}}
    usual = {"variant": "default", "args": {"total_timesteps": 2000}}
    sweep = make_sweep(tmp_path, {"one": facts, "two": facts, "three": usual})
    make_run(sweep / "runs" / "one", gamma=1.0)
    data = read([sweep])
    assert list(data.runs["variant"]) == ["vpg no-gae", "vpg no-gae", "vpg default"]
    assert list(data.runs["base"]) == [False, False, True]
    assert data.notes == ["vpg no-gae has --gamma 1."]


def test_a_finished_run_that_is_damaged_is_named(tmp_path, make_run, make_sweep):
    sweep = make_sweep(tmp_path, {"one": {}})
    edit(make_run(sweep / "runs" / "one") / "episodes.csv", "1000,0.5", "what,0.5")
    data = read([sweep])
    assert list(data.runs["state"]) == ["finished"] and not data.runs["begun"].any()
    (trouble,) = data.troubles
    assert trouble.startswith("one: not a run, or damaged (ValueError")


def test_a_sweep_knows_the_defaults_of_an_old_run(tmp_path, make_run, make_sweep):
    sweep = make_sweep(tmp_path, {"one": {}})
    config = make_run(sweep / "runs" / "one", gamma=0.9) / "config.json"
    edit(config, '"defaults"', '"other"')
    assert only(read([sweep]))["variant"] == "vpg --gamma 0.9"


def test_a_run_that_ends_while_it_is_read_is_finished(tmp_path, monkeypatch, make_run, make_sweep):
    sweep = make_sweep(tmp_path, {"one": {}})
    make_run(sweep / "runs" / "one")
    monkeypatch.setattr(Store, "job", lambda store, name: {"state": "running", "error": ""})
    assert only(read([sweep]))["state"] == "finished"


def test_a_damaged_evaluation_is_named_and_no_end(tmp_path, make_run, make_sweep):
    sweep = make_sweep(tmp_path, {"one": {}}, one=("finished", ""))
    folder = make_run(sweep / "runs" / "one")
    (folder / "evaluation.json").write_text('{"returns": [1.0')
    row = only(read([sweep]))
    assert row["state"] == "waiting" and row["damage"].startswith("evaluation.json can't be read (")


def test_a_damaged_plan_still_shows_the_runs(tmp_path, make_run):
    make_run(tmp_path / "runs" / "one")
    for text in ("{", "[]", '{"runs": 5}', '{"runs": {}}'):
        (tmp_path / "sweep.json").write_text(text)
        data = read([tmp_path])
        assert list(data.runs["run"]) == ["one"] and list(data.runs["state"]) == ["finished"]
        (trouble,) = data.troubles
        assert trouble.startswith("sweep.json has no valid ")


def test_a_foreign_plan_reaches_no_other_folder(tmp_path, make_run, make_sweep):
    """Names like ../x are left out and named, and so are damaged records."""
    sweep = make_sweep(tmp_path / "sweep", {"one": {}, "../../x": {}, "two": {}})
    make_run(tmp_path / "x")
    plan = json.loads((sweep / "sweep.json").read_text())
    plan["runs"]["two"] = {"script": 1}
    (sweep / "sweep.json").write_text(json.dumps(plan))
    data = read([sweep])
    assert list(data.runs["run"]) == ["one"]
    assert len(data.troubles) == 2
    assert "names '../../x'" in data.troubles[0] and "record of the run two" in data.troubles[1]


# CSVs


def curves_of(data):
    """Hand-made curves of all runs."""
    frames = [
        pd.DataFrame({"id": i, "global_step": [0.5, 1.0], "wall_seconds": [2.0, np.nan]})
        for i in data.runs["id"]
    ]
    curves = pd.concat(frames, ignore_index=True)
    return curves.assign(**{"return": np.arange(len(curves)) / 3})


def test_csvs_give_back_what_was_written(tmp_path, make_run, make_sweep):
    """All columns that they have, of runs in any state; written again they are the same."""
    planned = {"done": {"variant": "quick", "args": {"gamma": 0.9}}, "later": {"seed": 2}}
    sweep = make_sweep(tmp_path / "sweep", planned, later=("failed", 'bad, "very"\nbad'))
    make_run(sweep / "runs" / "done", gamma=0.9, returns=[1 / 3, 2.0])
    make_run(tmp_path / "old" / "done", commit="old", evaluation=[float("inf")], gamma=0.9)
    made = read([sweep], compare=[tmp_path / "old"])
    write_csv(tmp_path / "csv", made.runs, curves_of(made))
    data = read([tmp_path / "csv"])
    assert data.troubles == [] and data.notes == made.notes != []
    assert list(data.runs["from_csv"]) == [True] * 3
    same = [
        name
        for name in made.runs
        if name not in ("folder", "compared", "from_csv", "run", "args", "defaults")
        and name not in ("suite_variant", "script_folder", "script_hash")
    ]
    pd.testing.assert_frame_equal(data.runs[same], made.runs[same])
    assert list(data.runs["run"]) == ["done", "later", "done (2)"]
    assert list(data.runs["mark"]) == ["", "", " (old)"] and not data.runs["compared"].any()
    pd.testing.assert_frame_equal(data.curves, curves_of(made))
    write_csv(tmp_path / "again", data.runs, data.curves)
    for name in ("runs.csv", "curves.csv"):
        assert (tmp_path / "again" / name).read_text() == (tmp_path / "csv" / name).read_text()


def test_csvs_without_curves(tmp_path, make_run):
    """A curves.csv of an earlier report goes."""
    made = read([make_run(tmp_path / "a")])
    write_csv(tmp_path / "csv", made.runs, curves_of(made))
    write_csv(tmp_path / "csv", made.runs, curves_of(made).iloc[:0])
    assert not (tmp_path / "csv" / "curves.csv").exists()
    data = read([tmp_path / "csv"])
    assert only(data)["run"] == "a" and data.curves.empty


def test_a_folder_of_runs_with_a_report_in_it_is_its_runs(tmp_path, make_run):
    make_run(tmp_path / "runs" / "a")
    data = read([tmp_path / "runs"])
    write_csv(tmp_path / "runs", data.runs, data.curves)
    make_run(tmp_path / "runs" / "b")
    assert list(read([tmp_path / "runs"]).runs["run"]) == ["a", "b"]


def test_a_report_can_be_drawn_in_its_own_folder(tmp_path, make_run):
    data = read([make_run(tmp_path / "a")])
    write_csv(tmp_path / "csv", data.runs, data.curves)
    assert only(read([tmp_path / "csv"], leave_out=tmp_path / "csv"))["run"] == "a"


def test_csvs_beside_folders(tmp_path, make_run):
    """Curves and episodes belong to their runs."""
    made = read([make_run(tmp_path / "a", returns=[5.0])])
    write_csv(tmp_path / "csv", made.runs, curves_of(made))
    make_run(tmp_path / "b", returns=[7.0])
    data = read([tmp_path / "b", tmp_path / "csv"])
    assert list(data.runs["run"]) == ["b", "a"] and list(data.runs["score"]) == [7.0, 5.0]
    assert set(data.episodes["id"]) == {0} and set(data.curves["id"]) == {1}


@pytest.mark.parametrize(
    "old, new, trouble",
    [
        ("run,", "name,", "runs.csv of csv can't be read (ValueError: it has no column run)"),
        (",1.5,", ",many,", "line 3 (b): last_100 is no number: many; runs.csv of csv"),
        ("b,", "a,", "line 3 (a): the run's name is there twice; runs.csv of csv"),
        (",finished,", ",odd,", "line 3 (b): the state odd is unknown; runs.csv of csv"),
        (",CartPole-v1,", ",,", "line 3 (b): no env_id; runs.csv of csv"),
        (",True,finished", ",Yes,finished", "line 3 (b): base is Yes, neither True nor False"),
        (",2000,", ",2000.5,", "line 3 (b): planned_steps is no whole number: 2000.5; runs.csv"),
        (",2000,", ",1e400,", "line 3 (b): planned_steps is no whole number: 1e400; runs.csv"),
        (
            "run,",
            "x" * 200_000 + ",run,",
            "runs.csv of csv can't be read (ValueError: field larger",
        ),
    ],
)
def test_damage_in_runs_csv_is_a_trouble(tmp_path, make_run, old, new, trouble):
    """The other lines count."""
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b")
    made = read([tmp_path / "runs"])
    write_csv(tmp_path / "csv", made.runs, made.curves)
    path = tmp_path / "csv" / "runs.csv"
    lines = path.read_text().splitlines(keepends=True)
    place = 0 if old == "run," else 2
    lines[0] = "\ufeff" + lines[0]  # as spreadsheets begin their CSVs
    assert old in lines[place]
    lines[place] = lines[place].replace(old, new, 1)
    path.write_text("".join(lines))
    data = read([tmp_path / "csv"])
    assert list(data.runs["run"]) == ([] if place == 0 else ["a"])
    assert len(data.troubles) == 1 and data.troubles[0].startswith(trouble)


def test_points_of_a_curve_are_put_in_order(tmp_path, make_run):
    made = read([make_run(tmp_path / "a")])
    write_csv(tmp_path / "csv", made.runs, made.curves)
    text = "run,global_step,wall_seconds,return\na,2,1,5\na,1,1,4\n"
    (tmp_path / "csv" / "curves.csv").write_text(text)
    assert list(read([tmp_path / "csv"]).curves["return"]) == [4, 5]


@pytest.mark.parametrize(
    "text, trouble",
    [
        ("run,global_step\na,1\n", "curves.csv of csv can't be read (ValueError"),
        ("run,global_step,wall_seconds,return\na,x,1,2\n", "curves.csv of csv can't be read"),
        ("run,global_step,wall_seconds,return\na,1,1,\n", "a: a step or a return is no number;"),
        ("run,global_step,wall_seconds,return\na,1e308,1,1\n", "a: a step or a return is no"),
        ("run,global_step,wall_seconds,return\nz,1,1,1\n", "the run z isn't in runs.csv;"),
    ],
)
def test_damage_in_curves_csv_is_a_trouble(tmp_path, make_run, text, trouble):
    made = read([make_run(tmp_path / "a")])
    write_csv(tmp_path / "csv", made.runs, made.curves)
    (tmp_path / "csv" / "curves.csv").write_text(text)
    data = read([tmp_path / "csv"])
    assert list(data.runs["run"]) == ["a"] and data.curves.empty
    assert len(data.troubles) == 1 and data.troubles[0].startswith(trouble)


def test_bytes_in_csvs_that_are_no_text_are_a_trouble(tmp_path):
    (tmp_path / "runs.csv").write_bytes(b"run,\xff\n")
    data = read([tmp_path])
    assert data.runs.empty and "can't be read (UnicodeDecodeError" in data.troubles[0]


@pytest.mark.parametrize("folder", sorted(path.parent for path in RESULTS.glob("*/runs.csv")))
def test_committed_results_are_whole(folder):
    """No trouble, and a curve for each run or for none of an environment's variant."""
    data = read([folder])
    assert data.troubles == [] and len(data.runs) > 0
    with_curve = data.runs["id"].isin(data.curves["id"])
    groups = with_curve.groupby([data.runs["env_id"], data.runs["variant"]])
    assert (groups.all() | ~groups.any()).all()
    assert (data.curves["global_step"].diff()[~data.curves["id"].diff().ne(0)] > 0).all()


def test_published_scores_are_complete():
    """Each names what it was measured on and where it is from."""
    published = read_published()
    assert len(published) > 50
    assert published[["mean", "total_timesteps", "seeds"]].notna().all(axis=None)
    assert published["env_id"].str.fullmatch(r".*-v\d+").all()
    texts = published[["algorithm", "source", "publisher", "metric"]]
    assert (texts != "").all(axis=None)
    assert set(published["kind"]) == {"training", "evaluation"}
    assert SCORE_WORDS in set(published["metric"])
    assert published["std"].dtype == float
