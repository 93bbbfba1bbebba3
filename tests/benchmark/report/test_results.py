"""What is redrawn from the committed CSVs, and that the committed pages have it."""

import types

import pandas as pd
import pytest

from benchmark.report import algorithms, diffs, results


@pytest.fixture(scope="module")
def committed():
    return results.read_results()


def test_committed_pages_have_the_tables_of_the_committed_csvs(committed):
    """python -m benchmark.report.results writes them."""
    tables = results.make_tables(committed)
    count = 0
    for path in results.pages():
        text = path.read_text(encoding="utf-8")
        assert results.fill_tables(text, tables) == text, path.name
        count += len(results.REGION.findall(text))
    assert count > 10


def test_a_committed_report_is_that_of_the_committed_csvs(committed):
    text, _ = results.make_report("ddpg_pendulum", *committed["ddpg_pendulum"])
    path = results.RESULTS / "ddpg_pendulum" / "report.md"
    assert path.read_text(encoding="utf-8") == text


def test_a_folder_has_the_figure_of_gains_else_of_curves_if_there_are_any(committed, quick):
    names = {}
    for name in ("ppo_ablation", "ppo_swimmer", "ddpg_pendulum"):
        text, shown = results.make_report(name, *committed[name])
        names[name] = shown and shown.name
        images = [path.stem for path in (results.RESULTS / name).glob("*.png")]
        assert images == ([shown.name] if shown else [])
        assert text.count("](") == len(images) == text.count(".png)")
    expected = {"ppo_ablation": "ablation", "ppo_swimmer": None, "ddpg_pendulum": "overview"}
    assert names == expected


def test_tables_are_written_between_their_markers():
    start, end = "<!-- table: x -->\n", "<!-- end of table -->"
    new = results.fill_tables(f"a\n{start}old\n{end}\nb\n{start}{end}", {"x": "| 1 |\n| 2 |"})
    region = f"{start}| 1 |\n| 2 |\n{end}"
    assert new == f"a\n{region}\nb\n{region}"
    with pytest.raises(KeyError, match="x"):
        results.fill_tables(new, {"y": ""})


def test_damaged_csvs_are_not_redrawn(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "runs.csv").write_text("x\ny\n")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    with pytest.raises(ValueError, match="a can't be read"):
        results.redraw()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["runs.csv"]


# The table of algorithms


def score(runs, **changes):
    line = {"script": "ppo", "results": "folder", "env_id": "my_module:Pole-v1", "flags": ""}
    return algorithms.score_of(types.SimpleNamespace(**line | changes), {"folder": runs})


def test_score_is_of_finished_runs_with_the_defaults_or_the_flags_that_are_named(make_runs):
    usual = {"script": "ppo", "env_id": "my_module:Pole-v1", "planned_steps": 4e6}
    runs = make_runs(
        usual | {"last_100": 1.0, "base": True},
        usual | {"last_100": 3.0, "base": True},
        usual | {"last_100": 9.0, "flags": "--amp", "variant": "ppo --amp"},
        usual | {"last_100": 7.0, "base": True, "state": "failed"},
        usual | {"last_100": 7.0, "base": True, "script": "vpg"},
        usual | {"last_100": 7.0, "base": True, "env_id": "Other-v1"},
    )
    assert score(runs) == "Pole-v1, 4,000,000 steps, 2 seeds: 2.00 +- 1.00"
    assert score(runs, flags="--amp") == "Pole-v1, `--amp`, 4,000,000 steps, 1 seed: 9.00"


def test_score_of_stopped_runs_says_how_far_they_came(make_runs):
    usual = {"script": "ppo", "env_id": "my_module:Pole-v1", "planned_steps": 1e7, "base": True}
    usual["state"] = "unfinished"
    runs = make_runs(
        usual | {"steps": 7.2e5, "last_100": -17.1}, usual | {"steps": 2e6, "last_100": 7.994}
    )
    text = "Pole-v1, stopped at 0.72M to 2M of 10M steps: -17.1 to 7.99"
    assert score(runs) == text
    assert score(runs[:1]) == "Pole-v1, stopped at 0.72M of 10M steps: -17.1"


def test_speed_is_the_ratio_within_rounds():
    rows = [(1, "sb3", 100.0), (1, "plainrl", 300.0), (1, "plainrl --amp", 400.0)]
    rows += [(2, "sb3", 200.0), (2, "plainrl", 200.0)]
    speeds = pd.DataFrame(rows, columns=["round", "program", "steps_per_second"])
    speeds = speeds.assign(script="ppo")
    assert algorithms.speed_of("ppo", speeds) == "2.0 (1.0 to 3.0); `--amp`: 4.0"
    assert algorithms.speed_of("vpg", speeds) == ""


def test_every_script_is_in_the_table():
    listed = pd.read_csv(results.RESULTS / "algorithms.csv")["script"]
    assert set(listed) == {path.stem for path in results.ROOT.glob("*.py")}


def test_a_diff_is_counted_by_sections(tmp_path):
    rule = f"# {'-' * 98}\n"
    lines = "a\nb\nc\n"
    texts = [
        f"{rule}# {name}\n{rule}{lines}" for name in ("Environments: VecEnv", "Networks", "PPO")
    ]
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("".join([lines, *texts]))
    new.write_text("".join([lines.replace("b\n", ""), texts[0].replace("b", "x\ny"), *texts[1:]]))
    assert diffs.count(old, new) == [0, 3, 1]
    new.write_text("".join([lines + "d\n", texts[0], texts[1] + "d\n", texts[2] + "d\n" * 3]))
    assert diffs.count(old, new) == [4, 0, 1]
