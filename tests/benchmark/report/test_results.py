"""What is redrawn from the committed CSVs, and that the committed pages have it."""

import math
import sys

import pandas as pd
import pytest

from benchmark.report import contents, results
from benchmark.report.blocks import Curves, Figure, Intervals, Overview, Report
from benchmark.runs import read_published

PUBLISHED = pd.DataFrame(
    [
        (
            "vpg",
            "CartPole-v0",
            5e5,
            490.0,
            6.0,
            3,
            "last 100 training episodes",
            "training",
            "CleanRL",
        ),
        (
            "vpg",
            "CartPole-v2",
            5e5,
            300.0,
            math.nan,
            3,
            "last training episodes",
            "training",
            "baselines",
        ),
        (
            "vpg",
            "CartPole-v1",
            5e5,
            999.0,
            6.0,
            3,
            "deterministic evaluation",
            "evaluation",
            "SB3 zoo",
        ),
        (
            "vpg",
            "Acrobot-v1",
            5e5,
            -80.0,
            6.0,
            3,
            "deterministic evaluation",
            "evaluation",
            "SB3 zoo",
        ),
    ],
    columns=[
        "algorithm",
        "env_id",
        "total_timesteps",
        "mean",
        "std",
        "seeds",
        "metric",
        "kind",
        "publisher",
    ],
)


@pytest.fixture(scope="module")
def committed():
    return results.read_results()


def test_committed_pages_have_the_tables_of_the_committed_csvs(committed):
    """python -m benchmark.report.results writes them."""
    tables = results.make_tables(committed, read_published())
    count = 0
    for path in results.pages():
        text = path.read_text(encoding="utf-8")
        assert results.fill_tables(text, tables) == text, path.name
        count += len(results.REGION.findall(text))
    assert count > 10


def test_committed_reports_are_those_of_the_committed_csvs(committed):
    published = read_published()
    for found in committed:
        report = contents.make_report(found.runs, found.curves, published, [], found.notes)
        text, shown = results.page_of(found.name, report)
        folder = results.RESULTS / found.name
        assert (folder / "report.md").read_text(encoding="utf-8") == text, found.name
        images = [path.stem for path in folder.glob("*.png")]
        assert images == ([shown.name] if shown else []), found.name


def test_tables_are_written_between_their_markers():
    start, end = "<!-- table: x -->\n", "<!-- end of table -->"
    new = results.fill_tables(f"a\n{start}old\n{end}\nb\n{start}{end}", {"x": "| 1 |\n| 2 |"})
    region = f"{start}| 1 |\n| 2 |\n{end}"
    assert new == f"a\n{region}\nb\n{region}"
    assert results.fill_tables(new, {"x": "| 1 |\n| 2 |"}) == new


def test_a_table_that_there_is_not_is_named():
    page = "<!-- table: y -->\n<!-- end of table -->"
    with pytest.raises(LookupError, match="there is no table y, only a, x"):
        results.fill_tables(page, {"x": "", "a": ""})


def test_score_table_names_variants_and_steps_only_where_there_are_several(make_runs):
    rows = [{"score": 1.0, "planned_steps": 5e5}, {"score": 3.0, "planned_steps": 5e5}]
    table = results.score_table(make_runs(*rows), PUBLISHED)
    assert table.header[:3] == ("environment", "seeds", "last 100")
    assert table.rows[0][:3] == ("CartPole-v1", "2", "2.00 +- 1.00")
    rows[1] |= {"variant": "vpg x", "planned_steps": 1e6, "state": "failed", "score": math.nan}
    table = results.score_table(make_runs(*rows), PUBLISHED)
    assert table.header[:3] == ("environment, variant", "steps", "seeds")
    assert table.rows[1][:4] == ("CartPole-v1, `vpg x`", "1,000,000", "0 of 1", "-")


@pytest.mark.parametrize("words, code", [(["--help"], 0), (["x"], 2), ([], 2)])
def test_nothing_is_redrawn_by_mistake(tmp_path, monkeypatch, capsys, words, code):
    """After a wrong word, or from damaged CSVs."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "runs.csv").write_text("x\n")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results", *words])
    with pytest.raises(SystemExit) as stop:
        results.main()
    assert stop.value.code == code
    if not words:
        said = capsys.readouterr().err
        assert said.startswith("error: can't redraw the results: runs.csv of a") and "\n" in said
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["runs.csv"]


def published(env_id):
    return results.published_range(contents.analysis.published_of(PUBLISHED, "vpg", env_id, [5e5]))


def test_published_scores_are_of_training_where_there_are_such():
    assert published("CartPole-v1") == "300.0 to 490.0 (CleanRL v0; baselines v2)"
    assert published("Acrobot-v1") == "-80.0 +- 6.0 (SB3 zoo v1; deterministic evaluation)"
    assert published("Pong-v4") == ""


def test_gains_are_those_of_a_scripts_variants_over_several_environments(make_runs):
    rows = []
    for env_id in ("A-v0", "B-v0"):
        for seed in (1, 2):
            rows.append({"env_id": env_id, "seed": seed, "score": 1.0, "base": True})
            worse = {"env_id": env_id, "seed": seed, "score": 0.0, "variant": "vpg worse"}
            rows.append(worse)
    table = results.gains_table(make_runs(*rows[:-1]))
    assert table.header[:3] == ("variant", "A-v0", "B-v0")
    assert table.rows[0] == ("`vpg`", "1.00 +- 0.00", "1.00 +- 0.00", "")
    gain = "-1.00 [-1.00, -1.00]"
    assert table.rows[1] == ("`worse`", "0.00 +- 0.00", "0.00 (1 seed)", gain)
    assert results.gains_table(make_runs(*(row for row in rows if row["env_id"] == "A-v0"))) is None


def test_a_variant_without_an_environment_of_the_defaults_has_no_gain(make_runs):
    rows = [{"env_id": env_id, "score": 1.0, "base": True} for env_id in ("A-v0", "B-v0")]
    elsewhere = {"env_id": "C-v0", "score": 0.0, "variant": "vpg elsewhere"}
    assert results.gains_table(make_runs(*rows, elsewhere)) is None


def test_the_figure_shown_is_the_gain_else_the_curves():
    plots = {
        "A_steps": Curves(None, "steps"),
        "overview": Overview(None),
        "ablation_vpg_A": Intervals(None, ""),
        "ablation_vpg_all": Intervals(None, ""),
    }
    names = list(plots)
    shown = []
    for count in range(len(names) + 1):
        blocks = [
            Figure(name, "", "", plots[name], shows_gains=name == "ablation_vpg_all")
            for name in names[:count]
        ]
        found = results.shown_figure(Report("", [], blocks))
        shown.append(found and (found.name, found.plot))
    curves = ("overview", plots["overview"])
    ablation = ("ablation", plots["ablation_vpg_all"])
    assert shown == [None, ("overview", plots["A_steps"]), curves, curves, ablation]
