"""python -m benchmark.report, on folders made by hand, and what its pages say."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmark import stats
from benchmark.report import __main__ as report

EVIL = "<script>alert(1)</script>"
ROOT = Path(report.__file__).resolve().parents[2]


@pytest.fixture
def run_report(monkeypatch):
    """run_report(words...): the command, in this process, with few resamples."""
    monkeypatch.setattr(stats, "RESAMPLES", 20)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["report", *map(str, words)])
        report.main()

    return run


@pytest.fixture(scope="module")
def big(tmp_path_factory, make_run, make_sweep):
    """A report of a sweep in its middle and of other runs.

    Its folder, what it printed, the page and the Markdown.
    """
    folder = tmp_path_factory.mktemp("big")
    steps = {"args": {"total_timesteps": 8000}}
    sweep = make_sweep(
        folder / "sweep",
        {f"run{i}": {"seed": i} | steps for i in range(1, 8)},
        run4=("failed", "Bad <b>end</b> in /home/me/vpg.py (exit code 1)"),
        run5=("failed", ""),
        run6=("running", ""),
    )
    (sweep / "logs" / "run5.log").write_text("first\nnot enough memory\n")
    for i in (1, 2, 3):
        run = sweep / "runs" / f"run{i}"
        make_run(run, seed=i, returns=[10.0 * i] * 8, total_timesteps=8000)
    config = sweep / "runs" / "run2" / "config.json"
    text = config.read_text().replace('"abc"', '"def"').replace("1.2.3", "4.5.6")
    config.write_text(text)
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
    acrobot = {"env_id": "Acrobot-v1"}
    cheetah = {"env_id": "HalfCheetah-v5"}
    for i in (1, 2):
        none = {"seed": i, "baseline": "none"}
        make_run(runs / f"none{i}", returns=[40.0 + i] * 8, total_timesteps=8000, **none)
        make_run(runs / f"none_acro{i}", returns=[-5.0 * i] * 4, **none, **acrobot)
        make_run(runs / f"acro{i}", seed=i, returns=[-20.0 * i] * 4, **acrobot)
        make_run(
            runs / f"cheetah{i}",
            "ppo_continuous_action",
            seed=i,
            returns=[100.0 * i] * 4,
            **cheetah,
        )
    make_run(runs / "evil", seed=1, returns=[7.0] * 9, total_timesteps=9000, baseline=EVIL)
    make_run(
        runs / "stopped",
        "ppo_continuous_action",
        seed=3,
        returns=[9000.0] * 2,
        evaluation=None,
        total_timesteps=4000,
        **cheetah,
    )
    make_run(runs / "again", "ppo_continuous_action", seed=2, returns=[300.0] * 4, **cheetah)
    (runs / "broken").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.report", sweep, runs, "--out", folder / "out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return types.SimpleNamespace(
        folder=folder / "out",
        sweep=sweep,
        runs=runs,
        done=done,
        page=(folder / "out" / "report.html").read_text(),
        markdown=(folder / "out" / "report.md").read_text(),
    )


def test_report_table_of_an_environment(big, table_after):
    """Finished runs only: mean and deviation (ddof=0), IQM, evaluation, speed, wall time."""
    rows = {row[0]: row[1:] for row in table_after(big.markdown, "CartPole-v1")}
    assert rows["vpg"][:3] == ["3 of 7", "20.0 +- 8.2", "20.0 [10.0, 30.0]"]
    assert rows["vpg"][3:6] == ["6.00 +- 0.00", "2,000", "4.0"]
    assert rows["variant or source"][5] == "wall time, s"
    one = next(row for name, row in rows.items() if "script" in name)
    assert one[:2] == ["1", "7.00"]  # a single run has no deviation
    assert rows["vpg --baseline none"][:2] == ["2", "41.5 +- 0.5"]


def test_report_table_has_the_published_scores(big, table_after):
    cheetah = {row[0]: row[1:] for row in table_after(big.markdown, "HalfCheetah-v5")}
    assert cheetah["ppo_continuous_action"][:2] == ["3 of 4", "200.0 +- 81.6"]
    what = "ppo_continuous_action, v4 not v5; last 100 training episodes"
    expected = ["3", "1,443 +- 46", "-", "-", "-", "-", what]
    assert cheetah["CleanRL docs 2023"] == expected
    tianshou = cheetah["Tianshou (recomputes advantages each epoch)"]
    assert tianshou[1] == "-" and tianshou[3] == "5,784 +- 1,244"


def test_report_says_where_published_scores_are_not_comparable(big, read_csv):
    for text in (big.page, big.markdown):
        assert "published scores are for v1, v2, v3, v4 of this environment" in text
        assert "Published scores are after 1,000,000 steps, these runs have 4,000 steps." in text
    rows = read_csv(big.folder / "figures" / "HalfCheetah-v5_steps.csv")
    lines = {row["series"]: float(row["value"]) for row in rows if row["variant"] == "published"}
    assert lines["CleanRL docs 2023, v4 not v5: 1,443 +- 46"] == 1442.64
    assert "CleanRL docs 2023, v4 not v5: 1,443" in big.page.replace("\u00a0", " ")


def test_published_version_is_not_another_where_it_is_ours():
    row = {"env_id": "HalfCheetah-v4"}
    assert report.contents.published_version(row, "HalfCheetah-v4") == "v4"
    assert report.contents.published_version(row, "HalfCheetah-v5") == "v4 not v5"


def test_table_has_wall_times_in_their_unit(tmp_path, run_report, make_run, table_after):
    """And runs of several machines, and those to be resumed, are named."""
    returns = [1.0] * 1200  # 600 s
    for seed in (1, 2):
        folder = make_run(tmp_path / "runs" / f"run{seed}", seed=seed, returns=returns)
    config = json.loads((folder / "config.json").read_text())
    config["machine"] = {"cpu": "Xeon", "gpu": "H100"}
    (folder / "config.json").write_text(json.dumps(config))
    run_report(tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    rows = {row[0]: row[1:] for row in table_after(text, "CartPole-v1")}
    assert (rows["variant or source"][5], rows["vpg"][5]) == ("wall time, minutes", "10.0")
    other = "cpu Xeon, gpu H100: CartPole-v1, vpg: seed 2"
    assert f"| different machines: don't compare speeds | 1 | {other} |" in text


def test_stopped_runs_of_a_sweep_are_to_be_resumed(tmp_path, run_report, make_run, make_sweep):
    run = tmp_path / "runs" / "run3"
    make_run(run, seed=3, returns=[1.0] * 7, evaluation=None, total_timesteps=1200000)
    make_sweep(tmp_path, {"run3": {"seed": 3}}, run3=("waiting", ""))
    run_report(tmp_path)
    where = "CartPole-v1, vpg: seed 3 (step 7,000 of 1,200,000)"
    text = (tmp_path / "report" / "report.md").read_text()
    assert f"| stopped, to be resumed | 1 | {where} |" in text


def test_report_says_what_all_variants_have(tmp_path, run_report, make_run):
    """And lists seeds as numbers, not as the folders' names are ordered."""
    for seed in (1, 2, 10):
        make_run(tmp_path / "runs" / f"a{seed}", seed=seed, gamma=0.9, evaluation=None)
    make_run(tmp_path / "runs" / "b", gamma=0.9, baseline="none")
    run_report(tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "All variants of vpg have --gamma 0.9." in text and "| vpg --baseline none | 1 |" in text
    assert re.search(r"vpg: seed 1 \(.*?\), 2 \(.*?\), 10 \(", text)


def test_report_shows_runs_that_differ(big, table_after):
    """Failed, running, planned, unfinished, repeated and damaged ones.

    Several commits, versions, numbers of steps.
    """
    rows = table_after(big.markdown, "Runs that differ")
    failed = "run4 (step 3,000 of 8,000): Bad &lt;b&gt;end&lt;/b&gt; in vpg.py (exit code 1)"
    cheetah = "HalfCheetah-v5, ppo_continuous_action: seed"
    for row in (
        ["failed", "1", failed],
        ["failed", "1", "run5: not enough memory"],
        ["running, nothing written yet", "1", "CartPole-v1, vpg: seed 6"],
        ["not begun", "1", "CartPole-v1, vpg: seed 7"],
        ["unfinished: stopped or running", "1", f"{cheetah} 3 (step 2,000 of 4,000)"],
        ["more than one run of a seed: each counts", "2", f"{cheetah} 2, 2"],
        ["different git commits", "1", "def: CartPole-v1, vpg: seed 2"],
        ["different versions", "1", "torch=4.5.6: CartPole-v1, vpg: seed 2"],
    ):
        assert row in rows
    assert any(row[0] == "damaged" and row[2].startswith("broken: not a run") for row in rows)
    steps = [row for row in rows if row[0] == "CartPole-v1: different numbers of steps"]
    assert [row[2].split(":")[0] for row in steps] == ["8,000", "9,000"]
    assert not any("machines" in row[0] for row in rows)
    states = "2 failed, 13 finished, 1 running, 1 unfinished, 1 waiting, 1 damaged"
    assert f"Runs: {states}; drawn on" in big.markdown


def test_report_has_every_run_with_its_command_versions_machine_and_commit(big, table_after):
    rows = {row[0]: row[1:] for row in table_after(big.markdown, "Every run")}
    assert {"run1", "run7", "none1", "stopped", "evil"} <= set(rows)
    run = rows["run2"]
    assert run[:6] == ["CartPole-v1", "vpg", "2", "finished", "8,000", "20.0"]
    machine = "cpu Xeon, gpu none"
    assert run[-4:] == ["python vpg.py --seed 2 --note notes.txt", "torch=4.5.6", machine, "def"]
    assert rows["run7"][3:5] == ["waiting", "-"]
    for text in (big.page, big.markdown, (big.folder / "runs.csv").read_text()):
        assert "/home/me" not in text and str(big.sweep.parent) not in text


def test_report_warns_of_few_seeds(big, tmp_path, run_report, make_run, capsys):
    """On the page, in the Markdown and on the terminal; not with ten."""
    where = "Acrobot-v1, CartPole-v1, HalfCheetah-v5 (the fewest: 1)"
    for text in (big.page, big.markdown, big.done.stderr):
        assert f"Fewer than 10 seeds in {where}" in text
    for i in range(10):
        make_run(tmp_path / "runs" / f"run{i}", seed=i)
    run_report(tmp_path / "runs")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "ewer than 10" not in capsys.readouterr().err + page


def test_report_warns_of_uneven_seeds(big):
    """On the page and on the terminal."""
    for text in (big.page, big.done.stderr):
        assert "number of finished seeds differs between environments (vpg)" in text
        assert "Not all variants have finished runs in the same environments" in text


def test_report_shows_runs_that_are_short_or_not_finite(
    tmp_path, run_report, make_run, table_after
):
    runs = tmp_path / "runs"
    make_run(runs / "short", returns=[1.0] * 3, total_timesteps=8000)
    make_run(runs / "whole", returns=[1.0] * 3, total_timesteps=5000)  # but for its last episodes
    make_run(runs / "nan", seed=2, returns=[float("nan"), *[2.0] * 7])
    make_run(runs / "played", seed=3, returns=[3.0] * 8, evaluation=(float("inf"), 1.0))
    make_run(runs / "good", seed=4, returns=[4.0] * 8)
    run_report(runs)
    text = (tmp_path / "report" / "report.md").read_text()
    table = table_after(text, "Runs that differ")
    rows = {(what, count, which.split(": ")[-1]) for what, count, which in table}
    short = "finished long before their planned steps: they count in full"
    assert (short, "1", "short (step 3,000 of 8,000)") in rows
    assert ("returns that aren't finite: in no curve", "1", "seed 2") in rows
    assert ("finished without a finite return: in no average", "1", "seed 2") in rows
    assert ("evaluations that aren't finite", "1", "seed 3") in rows
    cells = {row[0]: row[1:3] for row in table_after(text, "CartPole-v1")}
    assert cells["vpg"] == ["3 of 4", "2.67 +- 1.25"]


def test_report_names_evaluations_that_cannot_be_read(
    tmp_path, run_report, make_run, make_sweep, table_after
):
    """Their runs are in no average, in a sweep and elsewhere."""
    sweep = make_sweep(tmp_path / "sweep", {"one": {}, "two": {}}, two=("finished", ""))
    make_run(sweep / "runs" / "one", returns=[5.0] * 8)
    bad = make_run(sweep / "runs" / "two", seed=2, returns=[7.0] * 8)
    (bad / "evaluation.json").write_text('{"returns": [1.0')
    for path, state in ((sweep, "waiting"), (sweep / "runs", "unfinished")):
        run_report(path, "--out", tmp_path / "out")
        text = (tmp_path / "out" / "report.md").read_text()
        assert f"Runs: 1 finished, 1 {state}; " in text
        rows = {row[0]: row[1:] for row in table_after(text, "Runs that differ")}
        number, what = rows["not finished: their evaluation can't be read"]
        assert number == "1" and what.startswith("two: evaluation.json can't be read (")
        rows = {row[0]: row[1:3] for row in table_after(text, "CartPole-v1")}
        assert rows["vpg"] == ["1 of 2", "5.00"]


@pytest.mark.filterwarnings("error")
def test_report_of_runs_without_evaluation_episodes(tmp_path, run_report, make_run, table_after):
    """--eval-episodes 0: they are finished, and have no score of an evaluation."""
    acrobot = {"env_id": "Acrobot-v1", "returns": [5.0] * 8}
    make_run(tmp_path / "runs" / "one", returns=[5.0] * 8, evaluation=())
    make_run(tmp_path / "runs" / "two", evaluation=(), **acrobot)
    make_run(tmp_path / "runs" / "three", seed=2, **acrobot | {"returns": [7.0] * 8})
    run_report(tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Runs: 3 finished; " in text and "nan" not in text
    cells = {}
    for env_id in ("CartPole-v1", "Acrobot-v1"):
        rows = {row[0]: row for row in table_after(text, env_id)}
        cells[env_id] = (rows["vpg"][1], rows["vpg"][2], rows["vpg"][4])
    assert cells == {"CartPole-v1": ("1", "5.00", "-"), "Acrobot-v1": ("2", "6.00 +- 1.00", "6.00")}
    every = {row[0]: row[7] for row in table_after(text, "Every run")}
    assert every == {"run": "evaluation", "one": "-", "two": "-", "three": "6.00"}


def test_report_of_names_that_are_no_text(
    tmp_path, run_report, make_run, make_sweep, table_after, read_csv, capsys
):
    """A folder's name may be any bytes: it is shown with what can be printed of it.

    In the page, the Markdown, the figures' data and the terminal; in a sweep each run once.
    """
    sweep = make_sweep(tmp_path / os.fsdecode(b"sweep\xfd"), {"good": {}})
    make_run(sweep / "runs" / "good", returns=[5.0] * 8)
    bad = make_run(sweep / "runs" / os.fsdecode(b"bad\xff"), seed=2, returns=[7.0] * 8)
    (sweep / "runs" / os.fsdecode(b"none\xfe")).mkdir()
    run_report(bad, sweep)
    assert f"tensorboard --logdir '{tmp_path}/sweep\\udcfd/runs'" in capsys.readouterr().out
    text = (bad / "report" / "report.md").read_text()
    assert "Runs: 2 finished, 1 damaged; " in text and "none\\udcfe: not a run" in text
    assert {row[0] for row in table_after(text, "Every run")} == {"run", "good", "bad\\udcff"}
    assert "bad\\udcff" in (bad / "report" / "report.html").read_text()
    rows = read_csv(bad / "report" / "figures" / "CartPole-v1_steps.csv")
    assert {row["series"] for row in rows} == {"good", "bad\\udcff", "iqm"}


def test_damaged_runs_are_named_and_the_others_reported(tmp_path, run_report, make_run):
    make_run(tmp_path / "runs" / "good", seed=2)
    bad = make_run(tmp_path / "runs" / "bad")
    (bad / "episodes.csv").write_text("global_step,wall_seconds,return\n1000,nan,3.0\n")
    run_report(tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Runs: 1 finished, 1 damaged" in text and "| damaged | 1 | bad: not a run" in text


def test_environment_whose_returns_are_never_finite_has_no_curve(tmp_path, run_report, make_run):
    make_run(tmp_path / "runs" / "nan", returns=[float("nan")] * 3)
    run_report(tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert text.count("No curve: no episode has ended yet") == 1


def test_command_of_a_run_that_has_not_begun(tmp_path, run_report, make_sweep):
    make_sweep(tmp_path, {"one": {"words": ["--env-id", "My Env-v0"]}}, one=("failed", "bad"))
    run_report(tmp_path)
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| python vpg.py --env-id 'My Env-v0' |" in text


def test_report_says_why_there_is_no_ablation(tmp_path, run_report, make_run):
    make_run(tmp_path / "runs" / "one", baseline="none")
    make_run(tmp_path / "runs" / "two", gamma=0.5)
    run_report(tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "vpg has no finished run with its defaults" in text


def test_report_says_that_not_all_pairs_are_compared(big, tmp_path, run_report, make_run):
    for i in range(6):
        make_run(tmp_path / "runs" / f"run{i}", **({"gamma": i / 10} if i else {}))
    run_report(tmp_path / "runs")
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Not every pair of variants is compared" in text
    assert "Not every pair" not in big.markdown  # of four variants


def test_report_statistics_of_variants(big, read_csv):
    """Normalised over all runs of an environment, each pair of variants over the environments that
    both have.
    """
    for text in (big.page, big.markdown):
        assert "(Acrobot-v1 -40.0 to -5.00, CartPole-v1 7.00 to 42.0, HalfCheetah-v5 " in text
    rows = {row["name"]: row for row in read_csv(big.folder / "figures" / "improvement.csv")}
    pair = rows["vpg > vpg --baseline none"]
    assert float(pair["value"]) == 0 and pair["environments"] == "2"
    assert rows[f"vpg > vpg --baseline {EVIL!r}"]["environments"] == "1"
    rows = {row["name"]: row for row in read_csv(big.folder / "figures" / "aggregate.csv")}
    expected = stats.iqm(np.array([0, 20 / 35, 3 / 35, 13 / 35, 23 / 35]))
    assert float(rows["vpg"]["value"]) == pytest.approx(expected)
    profile = read_csv(big.folder / "figures" / "profile.csv")
    above = {float(row["tau"]): float(row["value"]) for row in profile if row["variant"] == "vpg"}
    assert above[0.5] == 2 / 5 and above[0.0] == 4 / 5


def test_report_ablation_is_the_difference_to_the_defaults(big, read_csv):
    folder = big.folder / "figures"
    rows = {row["name"]: row for row in read_csv(folder / "ablation_vpg_Acrobot-v1.csv")}
    assert set(rows) == {"--baseline none"}
    assert float(rows["--baseline none"]["value"]) == -7.5 + 30
    rows = {row["name"]: row for row in read_csv(folder / "ablation_vpg_all.csv")}
    row = rows["--baseline none"]
    assert (row["environments"], row["variant"]) == ("2", "vpg --baseline none")
    assert (folder / "ablation_vpg_CartPole-v1.csv").exists()


def test_report_curves(big, read_csv):
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


def figure_names(page):
    return re.findall(r'<figure id="([^"]*)"', page)


def test_overview_has_the_curves_of_all_environments(big, read_csv):
    assert figure_names(big.page)[0] == "overview"
    rows = read_csv(big.folder / "figures" / "overview.csv")
    env_ids = list(dict.fromkeys(row["env_id"] for row in rows))
    assert env_ids == ["Acrobot-v1", "CartPole-v1", "HalfCheetah-v5"]
    for env_id in env_ids:
        own = [row for row in rows if row["env_id"] == env_id]
        single = read_csv(big.folder / "figures" / f"{env_id}_steps.csv")
        assert own == [{"env_id": env_id, **row} for row in single]


def test_every_figure_has_its_files_and_is_in_the_pages(big, read_csv):
    """A PNG, an SVG and a CSV each; ids of one page are there once."""
    names = figure_names(big.page)
    folder = big.folder / "figures"
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
    for suffix in ("png", "svg", "csv"):
        assert sorted(names) == sorted(path.stem for path in folder.glob(f"*.{suffix}"))
    assert big.page.count("<svg ") == len(names)
    for name in names:
        assert read_csv(folder / f"{name}.csv")
        assert f"](figures/{name}.png)" in big.markdown
        assert f"{name}.{{png,svg,csv}}" in big.done.stdout
    ids = re.findall(r'\bid="([^"]*)"', big.page)
    assert len(ids) == len(set(ids)) > 100
    used = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', big.page)
    assert {a or b for a, b in used} <= set(ids)


class References(HTMLParser):
    """Collects what a page refers to, its tags, and its visible text."""

    def __init__(self, page):
        super().__init__()
        self.found, self.tags, self.texts = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        outside = ("src", "href", "srcset", "data", "action", "poster", "background")
        for name, value in attrs:
            if name.split(":")[-1] in outside:
                self.found.append(value)
            self.found += re.findall(r"url\(\s*['\"]?([^)]*)", value or "")

    def handle_data(self, data):
        self.texts.append(data)
        self.found += re.findall(r"url\(\s*['\"]?([^)]*)|@import\s*(\S+)", data)


def test_page_refers_to_nothing_outside(big):
    page = References(big.page)
    assert len(page.found) > 20
    assert [x for x in page.found if not x.startswith(("#", "data:"))] == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)


def test_what_comes_from_runs_is_escaped(big):
    """In tables, captions, legends and the SVGs' titles."""
    assert EVIL not in big.page and EVIL not in big.markdown
    assert big.page.count("&lt;script&gt;") > 4 and "<b>end" not in big.page
    assert any(EVIL in text for text in References(big.page).texts)
    assert EVIL not in (big.folder / "figures" / "CartPole-v1_steps.svg").read_text()


def test_report_prints_paths_and_tensorboards_command(big):
    lines = big.done.stdout.splitlines()
    names = ("report.html", "report.md", "runs.csv", "curves.csv")
    assert lines[:4] == [str(big.folder / name) for name in names]
    logdirs = (big.sweep / "runs", big.runs)
    assert lines[-2:] == [f"tensorboard --logdir {logdir}" for logdir in logdirs]


def without_time(markdown):
    return re.sub(r"drawn on .*?\.", "", markdown)


def test_report_of_its_own_csvs_is_the_same(big, tmp_path, run_report):
    """The same sentences, tables and figures, but for what is wrong with folders of runs."""
    run_report(big.sweep, big.runs, "--out", tmp_path / "first")
    run_report(tmp_path / "first", "--out", tmp_path / "second")
    first, second = (
        without_time((tmp_path / name / "report.md").read_text()) for name in ("first", "second")
    )
    damaged = [line for line in first.splitlines() if line.startswith("| damaged ")]
    assert len(damaged) == 1
    assert second == first.replace(damaged[0] + "\n", "").replace(", 1 damaged", "")
    paths = sorted((tmp_path / "first" / "figures").glob("*.csv"))
    assert len(paths) > 10
    for path in paths:
        again = tmp_path / "second" / "figures" / path.name
        pd.testing.assert_frame_equal(pd.read_csv(again), pd.read_csv(path), atol=2e-6)


def test_csvs_can_be_redrawn_in_their_own_folder(tmp_path, run_report, make_run):
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"run{seed}", seed=seed, returns=range(seed, 40))
    run_report(tmp_path / "runs", "--out", tmp_path / "out")
    before = {name: (tmp_path / "out" / name).read_text() for name in ("runs.csv", "curves.csv")}
    (tmp_path / "out" / "report.md").unlink()
    run_report(tmp_path / "out", "--out", tmp_path / "out")
    assert "Runs: 2 finished" in (tmp_path / "out" / "report.md").read_text()
    assert {name: (tmp_path / "out" / name).read_text() for name in before} == before


def test_compare_sets_runs_beside_others(
    tmp_path, run_report, make_run, make_sweep, table_after, read_csv, capsys
):
    """With the means of each, and the place of the report: in the first sweep, beside the first
    folder of runs.
    """
    for i in (1, 2):
        make_run(tmp_path / "new" / "runs" / f"run{i}", seed=i, returns=[5.0])
        make_run(tmp_path / "old" / f"run{i}", seed=i, returns=[3.0], commit="old123")
    make_sweep(tmp_path / "new", {"run1": {"seed": 1}, "run2": {"seed": 2}})
    run_report(tmp_path / "new", "--compare", tmp_path / "old", "--center", "mean")
    folder = tmp_path / "new" / "report"
    table = table_after((folder / "report.md").read_text(), "CartPole-v1")
    rows = {row[0]: row[1:3] for row in table}
    assert rows["vpg"] == ["2", "5.00 +- 0.00"] and rows["vpg (old123)"] == ["2", "3.00 +- 0.00"]
    assert "mean of normalised scores" in (folder / "report.html").read_text()
    series = {row["series"] for row in read_csv(folder / "figures" / "CartPole-v1_steps.csv")}
    assert {"run1", "run2", "mean"} <= series and "iqm" not in series
    assert str(tmp_path / "old") in capsys.readouterr().out.splitlines()[-1]
    run_report(tmp_path / "old")
    assert (tmp_path / "report" / "report.html").exists()


def test_sweep_of_which_nothing_has_begun(tmp_path, run_report, make_run, make_sweep):
    """And one whose sweep.json is damaged still shows its runs."""
    make_sweep(tmp_path / "a", {"one": {"seed": 1}})
    run_report(tmp_path / "a")
    page = (tmp_path / "a" / "report" / "report.html").read_text()
    assert "not begun" in page and "No curve" in page and "<svg" not in page
    make_run(tmp_path / "b" / "runs" / "one")
    (tmp_path / "b" / "sweep.json").write_text("{")
    run_report(tmp_path / "b", "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "sweep.json" in text and "Runs: 1 finished, 1 damaged" in text


def test_watch_draws_until_all_runs_have_ended(
    tmp_path, monkeypatch, run_report, make_run, make_sweep, capsys
):
    """The page reloads itself as long as it is drawn again."""
    planned = {"one": {"seed": 1}, "two": {"seed": 2}}
    sweep = make_sweep(tmp_path / "sweep", planned, two=("running", ""))
    make_run(sweep / "runs" / "one", seed=1)
    page = sweep / "report" / "report.html"
    seen = []
    draw = report.draw
    now = [0]

    def slow_draw(*args):
        now[0] += 3 * len(seen)  # s: the first takes none
        return draw(*args)

    def sleep(seconds):
        seen.append((seconds, page.read_text()))
        if len(seen) == 1:
            make_run(sweep / "runs" / "two", seed=2, evaluation=None)
        else:
            make_sweep(sweep, planned, two=("failed", "bad"))

    clock = types.SimpleNamespace(
        sleep=sleep, time=lambda: now[0], strftime=lambda text: "a day at noon"
    )
    monkeypatch.setattr(report, "time", clock)
    monkeypatch.setattr(report, "draw", slow_draw)
    monkeypatch.setattr(report.signal, "signal", lambda *_: None)
    run_report(sweep, "--watch", "--interval", "7")
    assert [seconds for seconds, _ in seen] == [7, 30]  # a tenth of a core at the most
    assert all('<meta http-equiv="refresh" content="7">' in text for _, text in seen)
    assert "nothing written yet" in seen[0][1] and "(step 2,000 of 2,000)" in seen[1][1]
    text = page.read_text()
    assert "refresh" not in text and "two (step 2,000 of 2,000): bad" in text
    assert "1 finished, 1 running" in capsys.readouterr().out


def test_watch_waits_for_the_first_run(tmp_path, monkeypatch, run_report, make_run, capsys):
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(report.time, "sleep", lambda _: make_run(tmp_path / "runs" / "one"))
    monkeypatch.setattr(report.signal, "signal", lambda *_: None)
    run_report(tmp_path / "runs", "--watch")
    assert capsys.readouterr().out.startswith("none yet: ")
    assert "Runs: 1 finished" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_watch_ends_quietly_with_ctrl_c_and_sigterm(
    tmp_path, monkeypatch, run_report, make_run, capsys, number
):
    """The page that is left doesn't reload itself."""
    make_run(tmp_path / "runs" / "one", evaluation=None)

    def end(_):
        signal.raise_signal(number)
        pytest.fail("not ended")

    monkeypatch.setattr(report.time, "sleep", end)
    # A job of a shell ignores SIGINT
    own = {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.default_int_handler}
    before = {name: signal.signal(name, handler) for name, handler in own.items()}
    try:
        with pytest.raises(SystemExit) as stop:
            run_report(tmp_path / "runs", "--watch")
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
        (["{}/empty"], "error: no run in {}/empty: a run's folder has a config.json"),
        (["{}/runs", "--compare", "{}/empty"], "error: no run in {}/empty"),
        (["{}/damaged"], "error: no run in {}/damaged: runs.csv of damaged can't be read (V"),
        (["{}/runs", "--interval", "0"], "error: --interval must be at least one second"),
        (["{}/runs", "--out", "{}/runs/one/config.json"], "error: can't draw the report: [Errno"),
    ],
)
def test_bad_input_gets_a_sentence(tmp_path, run_report, make_run, capsys, words, sentence):
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "runs.csv").write_text("x\n")
    with pytest.raises(SystemExit) as stop:
        run_report(*(word.format(tmp_path) for word in words))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith(sentence.format(tmp_path)) and error.count("\n") == 1


@pytest.mark.parametrize("words", [[], [".", "--center", "median"], [".", "--engine", "x"]])
def test_unknown_flags_end_with_code_2(run_report, words):
    with pytest.raises(SystemExit) as stop:
        run_report(*words)
    assert stop.value.code == 2


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
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if not chromium:
        pytest.skip("no Chromium on this machine")

    def measure(page, width, scheme):
        path = tmp_path / "page.html"
        text = html.escape(page.replace("</body>", f"{MEASURE}</body>"))
        path.write_text(FRAME.format(text, width))
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
    """Wide and light, narrow and dark: every figure is there, nothing overflows sideways, no
    request is made.
    """
    for width, scheme in ((1600, "light"), (360, "dark")):
        found = render(big.page, width, scheme)
        assert found["width"] == width >= found["needed"], (width, scheme)
        assert [name for name, _, _ in found["figures"]] == figure_names(big.page)
        for name, figure_width, height in found["figures"]:
            widest = 576 if name == "overview" else 0  # which can be moved sideways
            assert 300 < figure_width <= max(width, widest) and height > 50, name
        assert found["lines"] > 10 * len(found["figures"])
        assert found["requests"] == []
        ink, paper = (
            sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("ink", "paper")
        )
        assert (ink < 200 and paper > 600) if scheme == "light" else (ink > 600 and paper < 200)
    image = '<img src="http://example.org/x.png"><h1>'
    other = render(big.page.replace("<h1>", image), 1600, "light")
    assert other["requests"] == ["http://example.org/x.png"]  # the measure sees requests
