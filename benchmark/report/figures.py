"""The figures of a report, each drawn from a frame that is also written as its CSV.

A figure becomes a PNG and an SVG on white, and an SVG for the page, whose lines and letters have
the colour of the page's text.
"""

import html
import io
import math
import re
import textwrap
from collections import Counter

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from benchmark.report.blocks import Curves, Intervals, Overview, Profile
from benchmark.report.formats import unit_of

# In the page, INK becomes the colour of the text, and PAPER transparent
INK, PAPER = "#010203", "#ffffff"
# Okabe and Ito's colours, which colour-blind readers can tell apart, too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The next is for further variants, once the colours are used up; dashed lines are for single runs
# that don't count
STYLES = ("-", "-.", ":")
MARKERS = "osD^vPX*<>"
SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "plainrl",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "legend.frameon": False,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "axes.axisbelow": True,
}
WIDTH = 5.2  # inches, as are the heights below
LEGEND_LINE = 0.18  # height of a line in a legend
LEGEND_LETTERS = 58  # of a line in a legend of this width
PANELS_ACROSS = 4  # in an overview
PAGE_PIXELS = 1.55  # of the page for a point of a figure
THIN = {
    "finished": {"ls": "-", "lw": 0.7, "alpha": 0.35},
    "uncounted": {"ls": "--", "lw": 0.8, "alpha": 0.8},
}
PUBLISHED = {"color": INK, "lw": 0.8, "ls": (0, (4, 3)), "alpha": 0.7}
ROUND = [1, 2, 2.5, 5, 10]  # steps between ticks
X_LABELS = {"steps": "steps", "wall_time": "wall time"}


def looks_of(variants):
    """{variant: (colour, line style)}, the same in all figures of a report."""
    return {
        variant: (COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)])
        for i, variant in enumerate(variants)
    }


def draw(plot, looks):
    """A plot of benchmark.report.blocks -> matplotlib's Figure; looks: see looks_of."""
    with matplotlib.rc_context(SETTINGS):
        match plot:
            case Curves():
                return draw_curves(plot, looks)
            case Overview():
                return draw_overview(plot, looks)
            case Intervals():
                return draw_intervals(plot, looks)
            case Profile():
                return draw_profile(plot, looks)
    raise TypeError(f"no plot: {plot}")


def write_png(figure, path, dpi=200):
    """Writes figure as a PNG; dpi: pixels per inch."""
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(path, format="png", dpi=dpi)


def to_svg(figure):
    """figure as the text of an SVG file, the same text for the same figure."""
    text = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        unknown = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=unknown)
    return text.getvalue()


def write(figure, data, folder, name):
    """Writes NAME.png, NAME.svg and NAME.csv into folder; returns the SVG's text."""
    folder.mkdir(parents=True, exist_ok=True)
    svg = to_svg(figure)
    write_png(figure, folder / f"{name}.png")
    (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    data.to_csv(folder / f"{name}.csv", index=False)
    return svg


def inline(svg, name, title):
    """The text of an SVG file for a page with others.

    Its ids begin with name. It takes the page's colour. It is as wide as there is room, up to the
    width at which its letters are as large as the page's.
    """
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = svg.replace(f"fill: {PAPER}", "fill: none")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    head, body = svg.split(">", 1)
    view_box = re.search(r'viewBox="[^"]*"', head)[0]
    width = PAGE_PIXELS * float(re.search(r'width="([\d.]+)pt"', head)[1])
    title = html.escape(title)
    return (
        f'<svg {view_box} style="max-width: {width:.0f}px" role="img" aria-label="{title}" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink"><title>{title}</title>{body}'
    )


def wrap(text, width):
    """text broken into lines of width letters; a mean and its deviation stay together."""
    return textwrap.fill(text.replace(" +- ", "\u00a0+-\u00a0"), width, break_on_hyphens=False)


def lines_of(labels):
    """How many lines a legend with these labels has."""
    return sum(label.count("\n") + 1 for label in labels)


def draw_curves(plot, looks):
    """One environment's learning curves, with the published scores in the legend."""
    data = plot.data
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(ylabel="return")
    plot_curves(axes, data, plot.x, looks, name_with_count)
    plot_published(axes, data[data["kind"] == "published"])
    labels = axes.get_legend_handles_labels()[1]
    figure.set_size_inches(WIDTH, 3.1 + LEGEND_LINE * lines_of(labels))
    figure.legend(loc="outside lower left")
    return figure


def name_with_count(variant, own):
    """A variant's label: its name, and how many of its runs have finished."""
    count = own.loc[own["kind"] == "finished", "series"].nunique()
    return wrap(f"{variant} ({count}\u00a0finished)", LEGEND_LETTERS)


def draw_overview(plot, looks):
    """A panel of learning curves for each environment, and one legend."""
    env_ids = list(plot.data["env_id"].unique())
    columns = min(PANELS_ACROSS, len(env_ids))
    lines = math.ceil(len(env_ids) / columns)
    figure = Figure(layout="constrained")
    handles = {}
    for i, env_id in enumerate(env_ids):
        own = plot.data[plot.data["env_id"] == env_id]
        axes = figure.add_subplot(lines, columns, i + 1, title=wrap(env_id, 26))
        plot_curves(axes, own, "steps", looks, lambda x, _: wrap_overview(x, columns))
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
        limits = axes.get_ylim()
        for mean in own.loc[own["kind"] == "published", "value"]:
            if not beyond(limits, mean):
                line = axes.axhline(mean, **PUBLISHED)
                handles["published scores, where they are in the picture"] = line
        if i % columns == 0:
            axes.set_ylabel("return")
    panel = 3 if columns > 1 else WIDTH
    figure.set_size_inches(panel * columns, 2.4 * lines + 0.3 + LEGEND_LINE * lines_of(handles))
    order = [wrap_overview(variant, columns) for variant in looks]
    names = sorted(handles, key=lambda name: order.index(name) if name in order else len(order))
    figure.legend([handles[name] for name in names], names, loc="outside lower left")
    return figure


def wrap_overview(variant, columns):
    """A variant's label in the legend of an overview with so many columns."""
    return wrap(variant, 30 * columns + 20)


def plot_curves(axes, data, x, looks, name_of):
    """Draws single runs and centers against x; name_of: variant and its rows -> its label."""
    curves = data[data["kind"] != "published"]
    end = end_of_axis(curves[x].max() or 1)
    unit, scale = unit_of(end) if x == "wall_time" else ("", 1)
    for variant, own in curves.groupby("variant", sort=False):
        color, style = looks[variant]
        for (_, kind), run in own[own["kind"] != "center"].groupby(["series", "kind"], sort=False):
            axes.plot(run[x] / scale, run["value"], **THIN[kind], color=color)
        center = own[own["kind"] == "center"]
        at = center[x] / scale
        axes.fill_between(at, center["low"], center["high"], color=color, alpha=0.2, lw=0)
        averaged = (own["kind"] == "finished").any()
        look = {"ls": style, "lw": 2} if averaged else THIN["uncounted"]
        axes.plot(at, center["value"], **look, color=color, label=name_of(variant, own))
    axes.set(xlabel=", ".join(filter(None, (X_LABELS[x], unit))), xlim=(0, end / scale))
    axes.margins(y=0.04)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    if not unit:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))


def end_of_axis(end):
    """The end of the horizontal axis: a round number where one is close, so that it has a tick."""
    digits = 10 ** (math.floor(math.log10(end)) - 1)
    nearest = math.ceil(end / digits) * digits
    if nearest <= 1.02 * end:
        return nearest
    return end


def beyond(limits, y):
    """Whether y is too far from the limits to be shown -> "above" or "below" them, else "".

    Too far means that what is between the limits would be squeezed into half of the axes.
    """
    low, high = limits
    margin = (high - low) / 2
    if y > high + margin:
        return "above"
    if y < low - margin:
        return "below"
    return ""


def plot_published(axes, published):
    """Draws published means as dashed lines, each with its own marker; counts those far off."""
    limits = axes.get_ylim()
    outside = Counter()
    for i, (label, mean) in enumerate(zip(published["series"], published["value"])):
        side = beyond(limits, mean)
        if side:
            outside[side] += 1
            continue
        axes.plot(
            (0.0, (i + 1) / (len(published) + 1), 1.0),
            [mean] * 3,
            transform=axes.get_yaxis_transform(),
            **PUBLISHED,
            markevery=[1],
            ms=4.5,
            marker=MARKERS[i % len(MARKERS)],
            label=wrap(label, LEGEND_LETTERS),
        )
    for side, count in outside.items():
        scores = "score is" if count == 1 else "scores are"
        axes.plot([], [], " ", label=f"{count} published {scores} {side} the picture")


def draw_intervals(plot, looks):
    """A point or a bar with its interval for each row, the first row at the top."""
    data = plot.data
    names = [wrap(name, 30) for name in data["name"]]
    label = wrap(plot.label, 70)
    height = 0.8 + 0.17 * label.count("\n") + sum(0.13 + 0.15 * lines_of([x]) for x in names)
    figure = Figure((WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.use_sticky_edges = False  # leaves room beyond the ends of bars
    if plot.reference is not None:
        axes.axvline(plot.reference, color=INK, lw=0.8)
    for i, row in enumerate(data.itertuples()):
        color = looks[row.variant][0]
        if plot.bars:
            axes.barh(i, row.value, 0.6, color=color, alpha=0.6)
        else:
            axes.plot(row.value, i, "o", color=color, ms=6)
        look = {"color": INK if plot.bars else color, "lw": 1.6, "solid_capstyle": "butt"}
        axes.plot([row.low, row.high], [i, i], **look)
    axes.set_yticks(range(len(data)), names, fontsize=8.5)
    axes.set(ylim=(len(data) - 0.4, -0.6), xlim=plot.limits)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    # The figure's label, not the axes': those may be narrow beside long names
    figure.supxlabel(label, fontsize=9)
    axes.grid(axis="y", visible=False)
    return figure


def draw_profile(plot, looks):
    """The share of runs above each score, with its interval."""
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel=plot.label, ylabel="share of runs above it")
    labels = []
    for variant, own in plot.data.groupby("variant", sort=False):
        color, style = looks[variant]
        labels.append(wrap(variant, LEGEND_LETTERS))
        axes.fill_between(own["tau"], own["low"], own["high"], color=color, alpha=0.2, lw=0)
        axes.plot(own["tau"], own["value"], style, color=color, lw=2, label=labels[-1])
    axes.set_ylim(-0.02, 1.02)
    figure.set_size_inches(WIDTH, 2.9 + LEGEND_LINE * lines_of(labels))
    figure.legend(loc="outside lower left")
    return figure
