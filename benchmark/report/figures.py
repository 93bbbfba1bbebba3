"""The figures of a report: pure functions from frames to matplotlib's Figure."""

import io
import math
import textwrap

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from benchmark.report import stats, tables

# Okabe and Ito's colours, which colour-blind readers can tell apart, too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "-.", ":")  # the next once the colours are used up; "--" is a run without a score
SETTINGS = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "black",
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "legend.frameon": False,
    "axes.axisbelow": True,
}
WIDTH = 5.2  # inches, as are the heights below
LEGEND_LINE = 0.18  # height of a line in a legend
PANELS_ACROSS = 4
SCORED = {"ls": "-", "lw": 0.7, "alpha": 0.35}
UNSCORED = {"ls": "--", "lw": 0.8, "alpha": 0.8}
PUBLISHED = {"color": "black", "lw": 0.8, "ls": (0, (4, 3)), "alpha": 0.7}
ROUND = [1, 2, 2.5, 5, 10]  # steps between ticks


def looks_of(variants):
    """{variant: (colour, line style)}, the same in all figures of a report."""
    return {
        variant: (COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)])
        for i, variant in enumerate(sorted(variants))
    }


def png(figure, dpi=150):
    """A figure as the bytes of a PNG; dpi: pixels per inch."""
    data = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(data, format="png", dpi=dpi)
    return data.getvalue()


def wrap(text, width):
    return textwrap.fill(text, width, break_on_hyphens=False)


def add_legend(figure, axes, columns=1):
    """Adds a legend of all axes below them -> its height."""
    handles = {}
    for own in axes:
        found, labels = own.get_legend_handles_labels()
        handles |= {wrap(label, 30 * columns + 28): line for line, label in zip(found, labels)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left")
    return LEGEND_LINE * sum(label.count("\n") + 1 for label in handles)


@matplotlib.rc_context(SETTINGS)
def draw_curves(runs, curves, centers, published, looks, x="global_step"):
    """A panel of learning curves for each environment, against x: global_step or wall_seconds.

    curves, centers: of stats; published: published.csv.
    """
    curves = curves.dropna(subset=x)
    env_ids = sorted(runs.loc[runs["run"].isin(curves["run"]), "env_id"].unique())
    columns = min(PANELS_ACROSS, len(env_ids))
    lines = math.ceil(len(env_ids) / columns)
    figure = Figure(layout="constrained")
    for i, env_id in enumerate(env_ids):
        axes = figure.add_subplot(lines, columns, i + 1, title=wrap(env_id, 26))
        own = runs[runs["env_id"] == env_id]
        plot_curves(axes, own, curves, centers[centers["env_id"] == env_id], looks, x)
        low, high = axes.get_ylim()
        for mean in tables.published_of(published, own)["mean"]:
            # A line far away would squeeze the curves into less than half of the panel
            if low - (high - low) / 2 <= mean <= high + (high - low) / 2:
                axes.axhline(mean, **PUBLISHED, label="published scores, where they are near")
        if i % columns == 0:
            axes.set_ylabel("return")
    width, height = (3 * columns, 2.4 * lines) if columns > 1 else (WIDTH, 2.9)
    figure.set_size_inches(width, height + 0.3 + add_legend(figure, figure.axes, columns))
    return figure


def plot_curves(axes, runs, curves, centers, looks, x):
    """Draws the single runs of an environment, and the centers of its variants, against x."""
    scale = 60 if x == "wall_seconds" else 1
    ends = []
    for variant, group in runs.groupby("variant"):
        color, style = looks[variant]
        scored = set(group.loc[group["score"].notna(), "run"])
        for run, own in curves[curves["run"].isin(group["run"])].groupby("run"):
            look = SCORED if run in scored else UNSCORED
            axes.plot(own[x] / scale, own["return"], color=color, **look)
            ends.append(own[x].iloc[-1] / scale)
        center = centers[centers["variant"] == variant]
        axes.fill_between(
            center[x] / scale, center["low"], center["high"], color=color, alpha=0.2, lw=0
        )
        look = UNSCORED if center.empty else {"ls": style, "lw": 2}
        axes.plot(center[x] / scale, center["value"], color=color, label=variant, **look)
    axes.set_xlim(0, end_of_axis(max(ends) or 1))
    axes.margins(y=0.04)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
    axes.set_xlabel("wall time, minutes" if x == "wall_seconds" else "steps")
    if x == "global_step":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def end_of_axis(end):
    """The end of the horizontal axis: a round number where one is close, so that it has a tick."""
    digits = 10 ** (math.floor(math.log10(end)) - 1)
    nearest = math.ceil(end / digits) * digits
    return nearest if nearest <= 1.02 * end else end


@matplotlib.rc_context(SETTINGS)
def draw_intervals(rows, label, looks, reference=None, bars=False):
    """A point or a bar with its interval for each row, the first row at the top.

    rows: frame of name, variant, value, low, high; reference: where there is a vertical line.
    """
    names = [wrap(name, 30) for name in rows["name"]]
    label = wrap(label, 70)
    letters = sum(0.28 + 0.15 * name.count("\n") for name in names)
    figure = Figure((WIDTH, 0.8 + 0.17 * label.count("\n") + letters), layout="constrained")
    axes = figure.add_subplot()
    axes.use_sticky_edges = False  # leaves room beyond the ends of bars
    if reference is not None:
        axes.axvline(reference, color="black", lw=0.8)
    for i, row in enumerate(rows.itertuples()):
        color = looks[row.variant][0]
        if bars:
            axes.barh(i, row.value, 0.6, color=color, alpha=0.6)
        else:
            axes.plot(row.value, i, "o", color=color, ms=6)
        look = {"color": "black" if bars else color, "lw": 1.6, "solid_capstyle": "butt"}
        axes.plot([row.low, row.high], [i, i], **look)
    axes.set_yticks(range(len(rows)), names, fontsize=8.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    # The figure's label, not the axes': those may be narrow beside long names
    figure.supxlabel(label, fontsize=9)
    axes.grid(axis="y", visible=False)
    return figure


@matplotlib.rc_context(SETTINGS)
def draw_profiles(profiles, looks):
    """The share of runs above each normalised score; profiles: of stats."""
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="normalised score tau", ylabel="share of runs above it")
    for variant, (value, low, high) in profiles.items():
        color, style = looks[variant]
        axes.fill_between(stats.TAUS, low, high, color=color, alpha=0.2, lw=0)
        axes.plot(stats.TAUS, value, style, color=color, lw=2, label=variant)
    axes.set_ylim(-0.02, 1.02)
    figure.set_size_inches(WIDTH, 2.9 + add_legend(figure, [axes]))
    return figure
