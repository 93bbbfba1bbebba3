"""The figures of a report, drawn from frames made by hand."""

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from benchmark.report import figures
from benchmark.report.blocks import Curves, Intervals, Overview, Profile

LOOKS = {"v": ("#0072B2", "-")}
COLUMNS = ["steps", "variant", "series", "kind", "value", "low", "high"]


def curve_data(averaged=True, published=(), x="steps", variant="v"):
    """A finished and an unfinished run from 0 to 1000, of which the first is the center."""
    at = np.linspace(0, 1000, 3)
    parts = []
    for series, kind in (("a", "finished" if averaged else "uncounted"), ("b", "uncounted")):
        parts.append(pd.DataFrame({"steps": at, "value": at / 100, "series": series, "kind": kind}))
    if averaged:
        center = {"steps": at, "value": at / 100, "low": at / 100 - 1, "high": at / 100 + 2}
        parts.append(pd.DataFrame(center).assign(series="iqm", kind="center"))
    data = pd.concat(parts).assign(variant=variant)
    lines = pd.DataFrame(published, columns=["series", "value"])
    lines = lines.assign(variant="published", kind="published")
    data = pd.concat([data, lines] if published else [data])
    return data.reindex(columns=COLUMNS).rename(columns={"steps": x})


def draw_curves(x="steps", **options):
    return figures.draw(Curves(curve_data(x=x, **options), x), LOOKS)


def legend_of(figure):
    return [text.get_text().replace("\u00a0", " ") for text in figure.legends[0].texts]


def assert_inside(figure, texts):
    figure.draw_without_rendering()
    for text in texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1, text
        assert 0 <= box.y0 < box.y1 <= figure.bbox.y1, text


def test_variants_have_looks_of_their_own():
    looks = figures.looks_of([f"v{i}" for i in range(18)])
    assert len(set(looks.values())) == 18


def test_unfinished_curves_are_dashed():
    figure = draw_curves(published=[("source", 5.0)])
    lines = figure.axes[0].lines
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    assert all((line.get_alpha() or 1) > 0.3 for line in lines) and lines[2].get_linewidth() == 2
    assert legend_of(figure) == ["v (1 finished)", "source"]


def test_variant_without_finished_runs_has_a_dashed_line_in_the_legend():
    figure = draw_curves(averaged=False)
    line = figure.axes[0].lines[2]
    assert line.get_linestyle() == "--" and line.get_linewidth() < 1
    assert legend_of(figure) == ["v (0 finished)"]


def test_band_of_a_curve_is_its_interval_and_times_have_their_unit():
    axes = draw_curves(x="wall_time").axes[0]
    corners = axes.collections[0].get_paths()[0].vertices
    expected = {(0, -1), (0, 2), (500, 4), (500, 7), (1000, 9), (1000, 12)}
    assert {(round(x * 60), y) for x, y in corners} >= expected
    assert all(line.get_xdata().max() == pytest.approx(1000 / 60) for line in axes.lines)
    assert axes.get_xlabel() == "wall time, minutes"
    assert axes.get_xlim() == pytest.approx((0, 1000 / 60))


def test_published_scores_that_would_squeeze_the_curves_are_named_only():
    figure = draw_curves(published=[("near", 14.0), ("far", 30.0), ("low", -9.0)])
    axes = figure.axes[0]
    drawn = {line.get_label(): line for line in axes.lines[3:] if len(line.get_xdata())}
    assert list(drawn) == ["near"] and set(drawn["near"].get_ydata()) == {14.0}
    assert axes.get_ylim()[1] > 14
    outside = [f"1 published score is {side} the picture" for side in ("above", "below")]
    assert legend_of(figure)[1:] == ["near", *outside]


@pytest.mark.parametrize("end, expected", [(999_424, 1e6), (30_000, 3e4), (1, 1), (10.3, 10.3)])
def test_an_axis_ends_at_a_round_number_where_one_is_close(end, expected):
    assert figures.end_of_axis(end) == expected


def test_overview_has_a_panel_for_each_environment_and_one_legend():
    first = curve_data(published=[("far", 500.0)]).assign(env_id="A-v0")
    second = curve_data(published=[("source", 12.0), ("far", 500.0)]).assign(env_id="B-v1")
    figure = figures.draw(Overview(pd.concat([first, second])), LOOKS)
    panels = [(axes.get_title(), len(axes.lines)) for axes in figure.axes]
    assert panels == [("A-v0", 3), ("B-v1", 4)]
    assert sorted(legend_of(figure)) == ["published scores, where they are in the picture", "v"]


def test_overview_has_room_for_long_names():
    long = "ppo_continuous_action --learning-rate 0.001 --num-minibatches 64 --no-norm-adv"
    parts = [
        curve_data(variant=long).assign(env_id=env_id)
        for env_id in ("benchmark.environments:MaskedCartPole-v1", "B-v1")
    ]
    figure = figures.draw(Overview(pd.concat(parts)), {long: LOOKS["v"]})
    assert_inside(figure, [*(axes.title for axes in figure.axes), *figure.legends[0].texts])


def interval_data(*rows):
    found = [(name, "v", value, value - 1, value + 2) for name, value in rows]
    return pd.DataFrame(found, columns=["name", "variant", "value", "low", "high"])


def test_intervals_are_where_they_belong():
    data = interval_data(("one", 3.0), ("two", 7.0))
    plot = Intervals(data, "score", reference=0.5, limits=(0, 10))
    axes = figures.draw(plot, LOOKS).axes[0]
    assert list(axes.lines[0].get_xdata()) == [0.5, 0.5] and axes.get_xlim() == (0, 10)
    assert [list(line.get_xdata()) for line in axes.lines[1:]] == [[3], [2, 5], [7], [6, 9]]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first is above
    bars = figures.draw(Intervals(data, "score", bars=True), LOOKS).axes[0]
    assert [bar.get_width() for bar in bars.patches] == [3, 7] and len(bars.lines) == 2


def test_long_names_and_labels_of_intervals_stay_in_the_picture():
    data = interval_data(("ppo_continuous_action --no-bootstrap-truncated", 1.0))
    figure = figures.draw(Intervals(data, "return of the last 100 episodes, less it, " * 2), LOOKS)
    assert_inside(figure, [*figure.axes[0].get_yticklabels(), *figure.texts])


def test_profile_is_drawn_with_its_band():
    data = pd.DataFrame({"tau": [0.0, 1.0], "value": [0.0, 1.0], "low": [-1.0, 0.0]})
    data = data.assign(high=data["low"] + 3, variant="v")
    axes = figures.draw(Profile(data, "tau"), LOOKS).axes[0]
    corners = axes.collections[0].get_paths()[0].vertices
    assert {tuple(corner) for corner in corners} >= {(0, -1), (1, 3)}
    assert list(axes.lines[0].get_ydata()) == [0, 1]


def test_files_of_a_figure(tmp_path):
    """Whatever a flag holds is drawn as it is, and no formula; the PNG is white."""
    data = interval_data((r"vpg --baseline '$\frac$'", 1.0))
    figure = figures.draw(Intervals(data, "score"), LOOKS)
    svg = figures.write(figure, data, tmp_path, "name")
    assert r"$\frac$" in svg and (tmp_path / "name.svg").read_text() == svg
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "name.csv"), data)
    with Image.open(tmp_path / "name.png") as image:
        assert image.width > 500 and image.getpixel((0, 0))[:3] == (255, 255, 255)


def test_a_figure_has_the_same_text_each_time():
    first, second = (figures.to_svg(draw_curves()) for _ in range(2))
    assert first == second and first.startswith("<?xml")


def test_inline_svg_takes_the_pages_colour_and_has_ids_of_its_own():
    svg = figures.inline(figures.to_svg(draw_curves()), "name", "<b>title</b>")
    assert svg.startswith("<svg ") and "&lt;b&gt;title" in svg
    assert "currentColor" in svg and figures.INK not in svg and "fill: #ffffff" not in svg
    assert 'id="name-' in svg and 'href="#name-' in svg and 'id="axes' not in svg


def test_legend_of_the_overview_has_the_variants_in_their_order():
    parts = [
        curve_data(variant=variant).assign(env_id=env_id)
        for env_id, variant in (("A-v0", "second"), ("B-v1", "first"))
    ]
    looks = figures.looks_of(["first", "second"])
    figure = figures.draw(Overview(pd.concat(parts)), looks)
    assert legend_of(figure) == ["first", "second"]
