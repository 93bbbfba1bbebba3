"""The chart of a measurement: each program's speed beside Stable-Baselines3's."""

import pandas as pd

from benchmark.report.figures import COLORS, draw_intervals, png
from benchmark.speed.peers import PEER, PROGRAMS
from benchmark.speed.tables import ratios


def draw(rows, path):
    """Draws the chart of a DataFrame of rows into a PNG."""
    path.write_bytes(png(make_figure(rows)))


def make_figure(rows):
    """A bar for each program and script: the median of the ratios, and a line from min to max."""
    bars = []
    looks = dict(zip(("plainrl", "plainrl --amp", "cleanrl"), zip(COLORS)))
    for program in looks:
        for script in rows.loc[rows["program"] == program, "script"].unique():
            found = ratios(rows[rows["script"] == script], "steps_per_second", program, PEER)
            if not found.empty:
                name = f"{script}, {PROGRAMS[program][0]}"
                bars.append((name, program, found.median(), found.min(), found.max()))
    bars = pd.DataFrame(bars, columns=["name", "variant", "value", "low", "high"])
    return draw_intervals(bars, f"steps/s, {PROGRAMS[PEER][0]} = 1", looks, 1.0, bars=True)
