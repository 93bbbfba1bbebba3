"""The chart of a measurement: each program's speed beside Stable-Baselines3's."""

import textwrap

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmark.report.figures import COLORS, SETTINGS
from benchmark.speed.peers import PEER, PROGRAMS
from benchmark.speed.tables import ratios


def draw(rows, path):
    """Draws the chart of a DataFrame of rows into a PNG."""
    with matplotlib.rc_context(SETTINGS):
        make_figure(rows).savefig(path, dpi=150)


def make_figure(rows):
    """A bar for each program and script: the median of the ratios, and a line from min to max."""
    bars = []
    for program, color in zip(("plainrl", "plainrl --amp", "cleanrl"), COLORS):
        for script in rows.loc[rows["program"] == program, "script"].unique():
            name = textwrap.fill(f"{script}, {PROGRAMS[program][0]}", 30)
            own = rows[rows["script"] == script]
            found = ratios(own, "steps_per_second", program, PEER)
            if not found.empty:
                bars.append((name, color, found))
    height = 0.8 + sum(0.28 + 0.15 * name.count("\n") for name, _, _ in bars)
    figure = Figure((5.2, height), layout="constrained")
    axes = figure.add_subplot()
    axes.use_sticky_edges = False  # leaves room beyond the ends of bars
    axes.axvline(1.0, color="black", lw=0.8)
    for i, (_, color, values) in enumerate(bars):
        axes.barh(i, values.median(), 0.6, color=color, alpha=0.6)
        ends = [values.min(), values.max()]
        axes.plot(ends, [i, i], color="black", lw=1.6, solid_capstyle="butt")
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8.5)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", visible=False)
    figure.supxlabel(f"steps/s, {PROGRAMS[PEER][0]} = 1", fontsize=9)
    return figure
