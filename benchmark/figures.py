"""The figures of benchmark.report.

Each is a PNG and an SVG on white, a CSV of its data, and an SVG for the page, whose lines and
letters have the colour of the page's text.
"""

import html
import io
import math
import re
import textwrap

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmark.collect import write_csv

INK, PAPER = "#010203", "#ffffff"  # what becomes the text's colour, and nothing, in the page
# Okabe and Ito's: all eyes tell them apart
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Of further variants, when the colours are used up; dashed are unfinished runs
STYLES = ("-", "-.", ":")
MARKERS = "osD^vPX*<>"
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "plainrl",
    "text.parse_math": False,
    "font.size": 10,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "legend.frameon": False,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "axes.axisbelow": True,
}
WIDTH = 4.8  # inches
# Finished or not
THIN = {
    True: {"ls": "-", "lw": 0.8, "alpha": 0.4},
    False: {"ls": "--", "lw": 0.8, "alpha": 0.8},
}
PUBLISHED = {"color": INK, "lw": 0.8, "ls": (0, (4, 3)), "alpha": 0.7}  # lines of published scores


def save(figure, rows, folder, name, title):
    """Writes NAME.png, NAME.svg and NAME.csv into folder; returns the SVG for the page, a str."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(folder / f"{name}.png", dpi=200)
        figure.savefig(
            text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    (folder / f"{name}.svg").write_text(text.getvalue(), encoding="utf-8")
    write_csv(folder / f"{name}.csv", rows)
    return inline(text.getvalue(), name, title)


def inline(svg, name, title):
    """matplotlib's SVG for a page with others.

    Its ids begin with name; it takes the page's width and colour.
    """
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = svg.replace(f"fill: {PAPER}", "fill: none")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    head, body = svg.split(">", 1)
    view_box, title = re.search(r'viewBox="[^"]*"', head)[0], html.escape(title)
    return (
        f'<svg {view_box} xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{title}"><title>{title}</title>{body}'
    )


def fill(text, width):
    """text in lines of width letters; a mean and its deviation stay together."""
    return textwrap.fill(text.replace(" +- ", "\u00a0+-\u00a0"), width, break_on_hyphens=False)


def unit_of(seconds):
    """(name, seconds) of the unit in which so many seconds are read well."""
    if seconds < 300:
        return "s", 1
    if seconds < 3 * 3600:
        return "minutes", 60
    return "hours", 3600


def draw_curves(curves, lines, looks, x_label, center):
    """Learning curves along steps, or along seconds where x_label is "wall time".

    curves: {variant: {"runs": [(name, x, values, finished)], "center": (x, values, low, high),
    "count": of finished runs}}, x and values (points,); lines: [(label, published mean)]; looks:
    {variant: (colour, line style)} -> (figure, rows of its CSV).
    """
    with matplotlib.rc_context(SETTINGS):
        names = {
            variant: fill(f"{variant} ({curve['count']}\u00a0finished)", 50)
            for variant, curve in curves.items()
        }
        figure = Figure(layout="constrained")
        axes = figure.add_subplot(ylabel="return")
        rows = plot_curves(axes, curves, names, looks, x_label, center)
        rows += plot_published(axes, lines, x_label)
        labels = axes.get_legend_handles_labels()[1]
        figure.set_size_inches(WIDTH, 3.3 + 0.19 * sum(label.count("\n") + 1 for label in labels))
        figure.legend(loc="outside lower left")
    return figure, rows


def draw_overview(panels, looks, center):
    """The learning curves of all environments along their steps, one small panel each.

    panels: {env_id: (curves, lines)} as draw_curves has them; looks: as there -> (figure, rows of
    its CSV).
    """
    columns = min(4, len(panels))
    with matplotlib.rc_context(SETTINGS):
        names = {
            variant: fill(variant, 30 * columns)
            for curves, _ in panels.values()
            for variant in curves
        }
        lines = math.ceil(len(panels) / columns)
        rest = sum(name.count("\n") + 1 for name in names.values())
        figure = Figure((3 * columns, 2.4 * lines + 0.4 + 0.2 * rest), layout="constrained")
        rows, handles = [], {}
        for i, (env_id, (curves, published)) in enumerate(panels.items()):
            axes = figure.add_subplot(lines, columns, i + 1, title=fill(env_id, 26))
            own = plot_curves(axes, curves, names, looks, "steps", center)
            handles |= dict(reversed(pair) for pair in zip(*axes.get_legend_handles_labels()))
            limits = axes.get_ylim()
            for label, mean in published:
                if not beyond(limits, mean):
                    line = axes.axhline(mean, **PUBLISHED)
                    handles["published scores, where they are in the picture"] = line
                own.append(row_of("steps", "", "published", label, mean))
            rows += [{"env_id": env_id, **row} for row in own]
        figure.legend(handles.values(), handles.keys(), loc="outside lower left")
    return figure, rows


def plot_curves(axes, curves, names, looks, x_label, center):
    """Draws the curves of draw_curves, under the names {variant: name} -> rows of the CSV."""
    runs = [run for curve in curves.values() for run in curve["runs"]]
    end = max(x[~np.isnan(values)][-1] for _, x, values, _ in runs) or 1
    unit, scale = unit_of(end) if x_label == "wall time" else ("", 1)
    rows = []
    for variant, curve in curves.items():
        color, style = looks[variant]
        for run, x, values, finished in curve["runs"]:
            axes.plot(x / scale, values, **THIN[finished], color=color)
            rows += curve_rows(x_label, x, variant, run, values)
        x, values, low, high = curve["center"]
        axes.fill_between(x / scale, low, high, color=color, alpha=0.2, lw=0)
        look = {"ls": style, "lw": 2} if curve["count"] else THIN[False]
        axes.plot(x / scale, values, **look, color=color, label=names[variant])
        rows += curve_rows(x_label, x, variant, center, values, low, high)
    axes.set(xlabel=f"{x_label}{', ' * bool(unit)}{unit}", xlim=(0, end / scale))
    axes.margins(y=0.04)
    if not unit:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return rows


def beyond(limits, y):
    """Where y is, "above" or "below", if it is too far off to be shown; else "".

    Too far: it would squeeze what is between the limits into half of the axes.
    """
    low, high = limits
    margin = (high - low) / 2
    return "above" if y > high + margin else "below" if y < low - margin else ""


def plot_published(axes, lines, x_label):
    """Draws the published means of draw_curves -> rows of the CSV.

    Each has a marker at a place of its own.
    """
    limits = axes.get_ylim()
    for i, (label, mean) in enumerate(lines):
        if side := beyond(limits, mean):
            axes.plot([], [], " ", label=fill(f"{label}: {side} the picture", 50))
            continue
        x = (0.0, (i + 1) / (len(lines) + 1), 1.0)
        axes.plot(
            x,
            [mean] * 3,
            transform=axes.get_yaxis_transform(),
            **PUBLISHED,
            markevery=[1],
            ms=5,
            marker=MARKERS[i % len(MARKERS)],
            label=fill(label, 50),
        )
    return [row_of(x_label, "", "published", label, mean) for label, mean in lines]


def row_of(x_label, x, variant, series, value, low="", high=""):
    return {
        x_label.replace(" ", "_"): x,
        "variant": variant,
        "series": series,
        "value": value,
        "low": low,
        "high": high,
    }


def curve_rows(x_label, x, variant, series, values, low=None, high=None):
    """Rows of a CSV, one for each point at which there is a value."""
    low, high = (x * math.nan if bound is None else bound for bound in (low, high))
    shown = [
        ["" if math.isnan(v) else round(float(v), 6) for v in (a, b, c)]
        for a, b, c in zip(values, low, high)
    ]
    return [
        row_of(x_label, round(float(at), 3), variant, series, *cells)
        for at, cells in zip(x, shown)
        if cells[0] != ""
    ]


def draw_intervals(rows, looks, x_label, reference=None, bars=False, limits=None):
    """A point or bar with its interval for each of rows -> figure.

    rows: {"name", "variant", "value", "low", "high"}; reference: where a vertical line is; limits:
    of the horizontal axis.
    """
    with matplotlib.rc_context(SETTINGS):
        names = [fill(row["name"], 26) for row in rows]
        x_label = fill(x_label, 60)
        height = 1.0 + 0.17 * x_label.count("\n")
        height += sum(0.16 + 0.17 * (name.count("\n") + 1) for name in names)
        figure = Figure((WIDTH, height), layout="constrained")
        axes = figure.add_subplot()
        if reference is not None:
            axes.axvline(reference, color=INK, lw=1)
        for i, row in enumerate(rows):
            color = looks[row["variant"]][0]
            if bars:
                axes.barh(i, row["value"], 0.6, color=color, alpha=0.6)
            else:
                axes.plot(row["value"], i, "o", color=color, ms=7)
            look = {"color": INK if bars else color, "lw": 2, "solid_capstyle": "butt"}
            axes.plot([row["low"], row["high"]], [i, i], **look)
        axes.set_yticks(range(len(rows)), names, fontsize=9)
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=limits)
        # Of the figure: the axes may be narrow beside long names
        figure.supxlabel(x_label, fontsize=10)
        axes.grid(axis="y", visible=False)
    return figure


def draw_profile(taus, profiles, looks, x_label):
    """Share of runs above each of taus.

    profiles: {variant: (value, low, high)} -> (figure, rows of its CSV).
    """
    with matplotlib.rc_context(SETTINGS):
        names = {variant: fill(variant, 50) for variant in profiles}
        height = 3.1 + 0.19 * sum(name.count("\n") + 1 for name in names.values())
        figure = Figure((WIDTH, height), layout="constrained")
        axes, rows = figure.add_subplot(), []
        for variant, (values, low, high) in profiles.items():
            color, style = looks[variant]
            axes.fill_between(taus, low, high, color=color, alpha=0.2, lw=0)
            axes.plot(taus, values, style, color=color, lw=2, label=names[variant])
            rows += curve_rows("tau", taus, variant, "profile", values, low, high)
        axes.set(xlabel=x_label, ylabel="share of runs above it", ylim=(-0.02, 1.02))
        figure.legend(loc="outside lower left")
    return figure, rows
