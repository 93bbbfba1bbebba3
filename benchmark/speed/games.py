"""The figure of benchmark/results/games.csv: where the time of ppo_atari_vector.py goes."""

import matplotlib
from matplotlib.figure import Figure

from benchmark.report.figures import COLORS, SETTINGS

NUM_STEPS = 128  # of each game in a rollout


def draw(rows, path):
    """Draws the CSV's rows, a DataFrame, into a PNG."""
    with matplotlib.rc_context(SETTINGS):
        make_figure(rows).savefig(path, dpi=110)


def make_figure(rows):
    """A panel for each precision and number of threads: a step's time, part by part -> Figure."""
    panels = list(rows.groupby(["amp", "threads"]))
    figure = Figure(figsize=(2.4 * len(panels) + 0.5, 3.0), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, ((amp, threads), found) in zip(all_axes, panels):
        labels = found["games"].astype(str)
        bottom = 0.0
        for part, color in zip(("games", "policy", "update"), COLORS):
            heights = 1e3 * found[f"{part}_seconds"] / (NUM_STEPS * found["games"])
            axes.bar(labels, heights, bottom=bottom, color=color, label=part)
            bottom += heights
        for x, (top, speed) in enumerate(zip(bottom, found["steps_per_second"])):
            axes.annotate(f"{speed:.0f}", (x, top), ha="center", va="bottom", fontsize=8)
        axes.set_title(f"{'bfloat16' if amp else 'float32'}, threads: {threads}")
        axes.set_xlabel("games")
        axes.grid(axis="x", visible=False)
    all_axes[0].set_ylabel("ms per step (above the bars: steps/s)")
    all_axes[-1].legend()
    return figure
