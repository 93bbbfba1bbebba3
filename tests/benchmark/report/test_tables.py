"""Tables, the numbers in them, and the figures."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from benchmark.report import figures, stats, tables
from benchmark.report.tables import Table

pytestmark = pytest.mark.usefixtures("quick")
PUBLISHED = pd.DataFrame(
    [
        ("a2c vpg", "CartPole-v0", 5e5, 490.0, 6.0, "last 100", "training", "CleanRL"),
        ("vpg", "CartPole-v2", 5e5, 300.0, math.nan, "last", "training", "baselines"),
        ("vpg", "CartPole-v1", 5e5, 999.0, 6.0, "best evaluation", "evaluation", "SB3 zoo"),
        ("vpg", "CartPole-v1", 1e6, 995.0, 5.0, "last 100", "training", "Tianshou"),
        ("vpg", "Acrobot-v1", 5e5, -80.0, 6.0, "best evaluation", "evaluation", "SB3 zoo"),
    ],
    columns="scripts env_id total_timesteps mean std metric kind publisher".split(),
)


@pytest.mark.parametrize(
    "values, text",
    [
        ([1442.64, 1442.64], "1,443 +- 0"),
        ([12.0, 14.0], "13.0 +- 1.0"),
        ([-6.71, math.nan], "-6.71"),
        ([0.5, 1.5, math.nan], "1.00 +- 0.50"),
        ([0.0, 4000.0], "2,000 +- 2,000"),
        ([math.nan], "-"),
    ],
)
def test_mean_and_deviation_have_the_digits_of_the_larger(values, text):
    assert tables.mean_std(pd.Series(values)) == text


def test_intervals_have_the_digits_of_the_largest_bound():
    assert tables.with_interval(999.0, 5.0, 1234.5) == "999 [5, 1,234]"
    assert tables.with_interval(0.5, -0.25, 0.75) == "0.50 [-0.25, 0.75]"
    assert tables.with_interval(-0.001, -0.25, 0.75) == "0.00 [-0.25, 0.75]"
    assert tables.with_interval(7.0, math.nan, math.nan) == "7.00 [one seed]"
    assert tables.with_interval(math.nan, math.nan, math.nan) == "-"


def test_markdown_is_escaped_and_aligned():
    table = Table(("a", "b"), [("x|y\nz", "<1>")], "lr")
    assert tables.markdown(table) == "| a | b |\n| --- |---:|\n| x\\|y; z | &lt;1&gt; |"


def test_score_table_names_variants_and_steps_only_where_there_are_several(make_runs):
    """Averages are of the finished runs with a score."""
    rows = [{"last_100": x, "evaluation_mean": 10 * x} for x in (1.0, 2.0, 3.0)]
    table = tables.score_table(make_runs(*rows), PUBLISHED)
    header = ("environment", "seeds", "last 100", "IQM [95 % interval]", "evaluation", "published")
    assert table.header == header and table.align == "lrrrrl"
    (row,) = table.rows
    assert row[:3] == ("CartPole-v1", "3", "2.00 +- 0.82") and row[3].startswith("2.00 [")
    assert row[4:] == ("20.0 +- 8.2", "300.0 to 490.0 (CleanRL v0; baselines v2)")
    rows[1] |= {"variant": "vpg x", "planned_steps": 1e6, "state": "failed"}
    rows[2] |= {"last_100": math.inf}
    table = tables.score_table(make_runs(*rows), PUBLISHED)
    assert table.header[:3] == ("environment, variant", "steps", "seeds")
    assert table.rows[0][:4] == ("CartPole-v1, `vpg`", "500,000", "1 of 2", "1.00")
    assert table.rows[1][:-1] == ("CartPole-v1, `vpg x`", "1,000,000", "0 of 1", "-", "-", "-")


def test_score_table_of_a_report_has_the_speed_of_finished_runs(make_runs):
    rows = [{"steps_per_second": x, "wall_seconds": 3 * x, "last_100": 1} for x in (100, 200, 900)]
    rows.append({"steps_per_second": 9e9, "wall_seconds": 9e9, "state": "unfinished"})
    rows.append({"env_id": "A-v0", "state": "unfinished"})
    table = tables.score_table(make_runs(*rows), PUBLISHED, with_speed=True)
    assert table.header[-3:-1] == ("steps/s", "minutes")
    assert [row[-3:-1] for row in table.rows] == [("-", "-"), ("200", "10.0")]


def published(make_runs, env_id, **run):
    runs = make_runs({"env_id": env_id} | run)
    return tables.published_range(tables.published_of(PUBLISHED, runs))


def test_published_scores_are_of_training_and_of_as_many_steps_where_there_are_such(make_runs):
    assert published(make_runs, "CartPole-v1") == "300.0 to 490.0 (CleanRL v0; baselines v2)"
    long = published(make_runs, "CartPole-v5", planned_steps=1e6)
    assert long == "995.0 +- 5.0 (Tianshou v1)"
    every = published(make_runs, "CartPole-v1", planned_steps=7.0)
    assert every == "300.0 to 995.0 (CleanRL v0; baselines v2; Tianshou v1)"
    assert published(make_runs, "Acrobot-v1") == "-80.0 +- 6.0 (SB3 zoo v1; best evaluation)"
    assert published(make_runs, "Pong-v4") == ""


def test_published_scores_are_of_scripts_with_the_same_algorithm(make_runs):
    assert published(make_runs, "CartPole-v1", script="a2c") == "490.0 +- 6.0 (CleanRL v0)"
    assert published(make_runs, "CartPole-v1", script="a2") == ""


@pytest.fixture
def gained(make_runs):
    """Defaults and a worse variant in two environments, which has one seed fewer in the second."""
    rows = []
    for env_id in ("A-v0", "B-v0"):
        for seed in "12":
            run = {"env_id": env_id, "seed": seed}
            rows.append(run | {"last_100": 1.0, "base": True})
            rows.append(run | {"last_100": 0.0, "variant": "vpg worse"})
    return make_runs(*rows[:-1])


def test_gains_table_has_scores_and_gains(gained):
    table = tables.gains_table(gained, stats.gains(gained))
    assert table.header[:3] == ("variant", "A-v0", "B-v0") and table.align == "lrrrr"
    assert table.rows == [
        ("`vpg`", "1.00 +- 0.00", "1.00 +- 0.00", "", ""),
        (
            "`worse`",
            "0.00 +- 0.00",
            "0.00 (1 seed)",
            "-1.00 [-1.00, -1.00]",
            "0.00 [0.00, 0.00]",
        ),
    ]
    assert tables.gains_table(gained, stats.gains(gained)[:0]) is None


def test_table_of_intervals(gained):
    found = tables.interval_table(stats.aggregates(gained), "variant", "IQM")
    assert found.header == ("variant", "environments", "IQM [95 % interval]")
    assert found.rows[1] == ("vpg worse", "2", "0.00 [0.00, 0.00]")


def test_table_of_variants_has_all_in_which_their_runs_differ(make_runs):
    rows = [{"git_commit": "b", "flags": "--x"}, {"git_commit": "a"}, {"git_commit": "a"}]
    table = tables.variant_table(make_runs(*rows, {"variant": "z", "machine": "old"}))
    assert table.header == ["variant", "flags", "git_commit", "script_hash", "versions", "machine"]
    assert table.rows == [["vpg", "--x", "a\nb", "-", "-", "-"], ["z", "-", "-", "-", "-", "old"]]


def test_table_of_runs(make_runs):
    table = tables.run_table(make_runs({"steps": 1e6, "last_100": -5.0, "command": "python x"}))
    run = ["run0", "vpg", "0", "finished", "1,000,000", "-5.00", "-", "-", "-", "python x"]
    assert table.rows == [run] and len(table.header) == len(table.align) == len(run)


# Figures


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def draw(runs, curves, published=PUBLISHED, x="global_step"):
    centers = stats.centers(runs, curves)
    looks = figures.looks_of(runs["variant"].unique())
    return figures.draw_curves(runs, curves, centers, published, looks, x)


def curve(run, values, steps=(100.0, 200.0)):
    times = 60.0 * np.arange(1, 1 + len(steps))
    columns = {"run": run, "global_step": steps, "wall_seconds": times, "return": values}
    return pd.DataFrame(columns)


def test_curves_are_drawn_thick_for_the_mean_and_dashed_for_runs_without_a_score(make_runs):
    runs = make_runs({"last_100": 1}, {"last_100": 1}, {"state": "failed", "variant": "vpg x"})
    curves = pd.concat([curve("run0", [0, 2]), curve("run1", [2, 4]), curve("run2", [9, 9])])
    figure = draw(runs, curves, PUBLISHED[:0])
    (axes,) = figure.axes
    lines = {(line.get_lw(), line.get_ls(), tuple(line.get_ydata())) for line in axes.lines}
    assert (0.7, "-", (0, 2)) in lines and (2, "-", (1, 3)) in lines
    assert (0.8, "--", (9, 9)) in lines
    assert texts(figure) == ["vpg", "vpg x"] and axes.get_title() == "CartPole-v1"
    x = draw(runs, curves, x="wall_seconds").axes[0].lines[0].get_xdata()
    assert list(x) == [1, 2]  # minutes


def test_each_environment_has_a_panel_and_published_scores_where_they_are_near(make_runs):
    runs = make_runs({"last_100": 1}, {"last_100": 1, "env_id": "Acrobot-v1"})
    curves = pd.concat([curve("run0", [250, 500]), curve("run1", [-500, -499])])
    figure = draw(runs, curves)
    acrobot, cartpole = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["Acrobot-v1", "CartPole-v1"]
    level = [line.get_ydata()[0] for line in cartpole.lines if line.get_color() == "black"]
    assert level == [490, 300]  # training episodes only
    assert not [line for line in acrobot.lines if line.get_color() == "black"]  # far above
    assert texts(figure) == ["vpg", "published scores, where they are near"]


def test_intervals_and_profiles_have_a_mark_for_each_row(gained):
    looks = figures.looks_of(["vpg", "vpg worse"])
    found = stats.gains(gained)
    figure = figures.draw_intervals(found, "gain", looks, reference=0.0, bars=True)
    (axes,) = figure.axes
    assert [bar.get_width() for bar in axes.patches] == [-1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["worse"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 0], [-1, -1]]
    (axes,) = figures.draw_intervals(stats.aggregates(gained), "IQM", looks).axes
    points = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    assert points == [1, 0]
    figure = figures.draw_profiles(stats.profiles(gained), looks)
    assert texts(figure) == ["vpg", "vpg worse"]
    assert figure.axes[0].lines[0].get_ydata()[0] == 1


def test_variants_have_looks_of_their_own():
    looks = figures.looks_of([f"v{i:02}" for i in range(18)])
    assert len(set(looks.values())) == 18 and looks["v00"] == ("#0072B2", "-")


@pytest.mark.parametrize("end, shown", [(999000, 1000000), (950000, 950000), (7.45, 7.5)])
def test_the_axis_ends_at_a_round_number_that_is_close(end, shown):
    assert figures.end_of_axis(end) == pytest.approx(shown)


def test_a_png_is_the_same_for_the_same_figure():
    data = figures.png(Figure(), 50)
    assert data.startswith(b"\x89PNG") and data == figures.png(Figure(), 50)
