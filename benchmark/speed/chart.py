"""The chart of a measurement, drawn with the report's figures."""

import pandas as pd

from benchmark.report import figures
from benchmark.speed.peers import BOUNDS, PEER
from benchmark.speed.tables import ratios, sort_programs, title

DPI = 150


def draw(rows, path):
    """Draws the chart of a DataFrame of rows into a PNG."""
    bars, label, reference = make_bars(rows)
    looks = figures.looks_of(bars["variant"].unique())
    figure = figures.draw_intervals(bars, label, looks, reference, bars=True)
    path.write_bytes(figures.png(figure, DPI))


def make_bars(rows):
    """A bar for each script and program: the median, and a line from min to max.

    -> (frame of name, variant, value, low, high; label of the axis; where its line is).

    Values are the ratios to the peer, round by round, since speeds of scripts differ widely;
    without a peer, steps/s. The bounds are left out.
    """
    rows = sort_programs(rows)
    rounds = rows[(rows["round"] != "full") & ~rows["program"].isin(BOUNDS)]
    with_peer = PEER in set(rounds["program"])
    bars = []
    for (script, program), runs in rounds.groupby(["script", "program"], sort=False):
        if program == PEER:
            continue
        values = runs["steps_per_second"]
        if with_peer:
            of_script = rounds[rounds["script"] == script]
            values = ratios(of_script, "steps_per_second", program, PEER)
        bar = {"name": f"{script}, {title(program)}", "variant": program}
        bar |= {"value": values.median(), "low": values.min(), "high": values.max()}
        bars.append(bar)
    data = pd.DataFrame(bars)
    if with_peer:
        return data, f"steps/s, {title(PEER)} = 1", 1.0
    return data, "environment steps per second", None
