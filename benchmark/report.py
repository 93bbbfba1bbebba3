"""Draws a report of runs: curves, tables and statistics, in one HTML file that opens anywhere.

    python -m benchmark.report RUNS... [--out DIR] [--compare RUNS...] [--center iqm|mean] [--watch]

RUNS is a run's folder, a folder of them, or a sweep's folder, whose planned and failed runs are
shown, too. DIR gets report.html, report.md and figures/NAME.png, .svg and .csv; without --out it is
the folder `report` in the first RUNS, beside it where that is a folder of runs. Runs of one
environment that share script and flags are one variant; those of --compare are variants of their
own. An interval is a 95 % bootstrap interval over seeds, drawn within environments.
"""

import argparse
import shlex
import signal
import sys
import time
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmark.collect import printable
from benchmark.figures import (
    COLORS,
    STYLES,
    draw_curves,
    draw_intervals,
    draw_overview,
    draw_profile,
    save,
    unit_of,
)
from benchmark.page import REFRESH, slug, to_html, to_markdown, write
from benchmark.runs import (
    differences,
    name_variants,
    published_of,
    read_published,
    read_runs,
    split_version,
    without_paths,
)
from benchmark.scores import (
    CENTERS,
    aggregate,
    difference,
    estimate,
    improvement,
    normalise,
    pooled,
    profile,
    smooth,
)
from benchmark.sweep import refuse

GRID, WINDOW = 101, 0.05  # points of a curve; part of the axis over which a point of it is the mean
FEW = 10  # seeds below which an interval is too narrow
MANY = 4  # variants above which not all pairs are compared
CENTER_NAMES = {"iqm": "IQM", "mean": "mean"}


def number(x, like=None):
    """A return to read: 1,443, 88.8 or -6.71.

    It has as many digits as like would have, if that is given.
    """
    size = abs(x if like is None else like)
    return f"{x:,.{0 if size >= 1000 else 1 if size >= 10 else 2}f}"


def with_interval(value, low, high):
    size = np.nanmax(np.abs([value, low, high]))
    bounds = "one seed" if np.isnan(low) else f"{number(low, size)}, {number(high, size)}"
    return f"{number(value, size)} [{bounds}]"


def mean_std(values):
    """Of several values mean +- deviation (ddof=0).

    Both have as many digits as the larger of them would have.
    """
    if len(values) < 2:
        return "".join(map(number, values)) or "-"
    mean, std = np.mean(values), np.std(values)
    like = np.nanmax([abs(mean), std])
    return f"{number(mean, like)} +- {number(std, like)}"


def published_score(row):
    mean = float(row["mean"])
    return number(mean) + (f" +- {number(float(row['std']), mean)}" if row["std"] else "")


def published_version(row, env_id):
    """The version that a published score is of, and ours where that is another: "v4 not v5"."""
    theirs, ours = split_version(row["env_id"])[1], split_version(env_id)[1]
    return f"{theirs} not {ours}" if theirs != ours else theirs


def published_label(row, env_id, with_algorithm):
    metric = "" if row["metric"] == "last 100 training episodes" else f" ({row['metric']})"
    version = published_version(row, env_id)
    algorithm = f"{row['algorithm']}, " if with_algorithm else ""
    return f"{algorithm}{row['source']}, {version}: {published_score(row)}{metric}"


def published_row(row, env_id):
    """The cells of a published score in the table of an environment."""
    evaluated = "evaluation" in row["metric"]
    score = published_score(row)
    what = f"{row['algorithm']}, {published_version(row, env_id)}; {row['metric']}"
    last_100 = "-" if evaluated else score
    evaluation = score if evaluated else "-"
    return row["source"], row["seeds"], last_100, "-", evaluation, "-", "-", what


class Report:
    """Blocks of text, tables and figures, in their order: tuples of a kind and what belongs to it.

    runs: of both sets, with their variants named; shared: {script: flags that all its variants
    have}; center: "iqm" or "mean"; folder: of the report; files: paths written so far.
    """

    def __init__(self, runs, shared, troubles, center, folder):
        self.runs = runs
        self.shared = shared
        self.troubles = troubles
        self.center = center
        self.folder = folder
        self.blocks = []
        self.files = []
        self.warnings = []
        self.published = read_published()
        self.variants = sorted({run.variant for run in runs})
        self.env_ids = sorted({run.env_id for run in runs})
        self.looks = {
            variant: (COLORS[i % len(COLORS)], STYLES[i // len(COLORS) % len(STYLES)])
            for i, variant in enumerate(self.variants)
        }
        self.add_head()
        place = len(self.blocks)
        self.panels = {}
        for env_id in self.env_ids:
            self.add_environment(env_id)
        if len(self.panels) > 1:
            environments, self.blocks = self.blocks[place:], self.blocks[:place]
            self.add_overview()
            self.blocks += environments
        self.add_comparison()
        self.add_runs()

    def add(self, *block):
        self.blocks.append(block)

    def add_figure(self, name, title, caption, figure, rows):
        svg = save(figure, rows, self.folder / "figures", slug(name), title)
        self.files.append(self.folder / "figures" / f"{slug(name)}.{{png,svg,csv}}")
        self.add("figure", slug(name), title, caption, svg)

    def warn(self, text):
        self.warnings.append(text)
        self.add("warning", text)

    def scores(self, env_id, variant):
        """(finished runs,) mean returns of the last 100 training episodes."""
        group = [run for run in self.runs if (run.env_id, run.variant) == (env_id, variant)]
        return np.array([run.score for run in group if run.score is not None])

    def add_head(self):
        others = " and others" if len(self.env_ids) > 3 else ""
        self.add("h1", f"Report of {', '.join(self.env_ids[:3])}{others}")
        damaged = f", {len(self.troubles)} damaged" if self.troubles else ""
        now = time.strftime("%Y-%m-%d at %H:%M")
        text = f"Runs: {states_of(self.runs)}{damaged}; drawn on {now}."
        self.add("p", f"{text} Averages, intervals and statistics are of finished runs only.")
        for script, flags in self.shared.items():
            self.add("p", f"All variants of {script} have {flags}.")
        few = []
        uneven = []
        for variant in self.variants:
            seeds = {env_id: len(self.scores(env_id, variant)) for env_id in self.env_ids}
            few += [(n, env_id) for env_id, n in seeds.items() if 0 < n < FEW]
            if len(set(seeds.values()) - {0}) > 1:
                uneven.append(variant)
        if few:
            where = ", ".join(sorted({env_id for _, env_id in few}))
            self.warn(
                f"Fewer than ten seeds, {min(few)[0]} at the least ({where}): the intervals here "
                "are too narrow, the true value is outside of them more often than once in twenty "
                "times."
            )
        if uneven:
            self.warn(
                f"Not as many finished seeds in each environment ({', '.join(uneven)}): in what is "
                "averaged over environments, those with more seeds weigh more."
            )
        rows = differences(self.runs)
        rows += [("damaged", "1", trouble) for trouble in self.troubles]
        if rows:
            self.add("h2", "Runs that differ")
            self.add("table", ("what", "runs", "which"), rows, "words")

    def add_environment(self, env_id):
        runs = [run for run in self.runs if run.env_id == env_id]
        variants = sorted({run.variant for run in runs})
        self.add("h2", env_id)
        scripts = sorted({run.script for run in runs})
        found = {script: published_of(self.published, script, env_id) for script in scripts}
        rows = [row for script in scripts for row in found[script]]
        several = len([script for script in scripts if found[script]]) > 1
        lines = [(published_label(row, env_id, several), float(row["mean"])) for row in rows]
        for x_label in ("steps", "wall time"):
            self.add_curves(env_id, runs, variants, lines, x_label)
        self.add_notes(env_id, runs, rows)
        walls = [run.row["wall_seconds"] for run in runs if run.state == "finished"]
        walls = [wall for wall in walls if wall != ""]
        unit, scale = unit_of(np.median(walls)) if walls else ("s", 1)
        header = (
            "variant or source",
            "seeds",
            "last 100 episodes",
            "IQM of them [interval]",
            "evaluation",
            "steps/s",
            f"wall time, {unit}",
            "published for",
        )
        ours = [
            self.table_row(env_id, variant, [run for run in runs if run.variant == variant], scale)
            for variant in variants
        ]
        lines = [header, *ours, *(published_row(row, env_id) for row in rows)]
        lines = lines if rows else [line[:-1] for line in lines]
        self.add("table", lines[0], lines[1:], "numbers noted" if rows else "numbers")

    def add_notes(self, env_id, runs, rows):
        """What makes published scores incomparable."""
        ours = split_version(env_id)[1]
        theirs = {split_version(row["env_id"])[1] for row in rows} - {ours}
        if theirs:
            text = (
                f"Published scores of {', '.join(sorted(theirs))} are beside runs of {ours}: "
                "another version is another environment, so they orient more than they compare."
            )
            self.add("p", text)
        steps = {int(row["total_timesteps"]) for row in rows}
        own = {run.planned_steps for run in runs if run.planned_steps}
        if steps and own != steps:
            theirs = " or ".join(f"{n:,}" for n in sorted(steps))
            ours = " or ".join(f"{n:,}" for n in sorted(own)) or "an unknown number"
            self.add("p", f"Published scores are of {theirs} steps, these runs of {ours}.")

    def table_row(self, env_id, variant, group, scale):
        """The cells of a variant's runs; scale: seconds in the unit of their wall times."""
        done = [run for run in group if run.state == "finished"]
        scores = self.scores(env_id, variant)
        seeds = str(len(scores)) if len(scores) == len(group) else f"{len(scores)} of {len(group)}"
        iqm = with_interval(*aggregate([scores], CENTERS["iqm"])) if len(scores) else "-"
        evaluations, walls, speeds = (
            [run.row[name] for run in done if run.row[name] != ""]
            for name in ("evaluation_mean", "wall_seconds", "steps_per_second")
        )
        return (
            variant,
            seeds,
            mean_std(scores),
            iqm,
            mean_std(evaluations),
            f"{np.median(speeds):,.0f}" if speeds else "-",
            f"{np.median(walls) / scale:.1f}" if walls else "-",
            "",
        )

    def add_curves(self, env_id, runs, variants, lines, x_label):
        """Draws the runs' returns, smoothed along their steps, and their averages.

        The averages are of the finished runs, as far as all of them go.
        """
        curves = {}
        for variant in variants:
            begun = [run for run in runs if run.variant == variant]
            begun = [run for run in begun if np.isfinite(run.returns).any()]
            last = max((run.at["steps"][-1] for run in begun), default=0)
            steps = np.linspace(0, last or 1, GRID)
            shown = []
            done = []
            for run in begun:
                at = time_of(run, steps) if x_label == "wall time" else steps
                values = smooth(run.at["steps"], run.returns, steps, WINDOW * steps[-1])
                if run.score is not None:
                    done.append((at, values))
                if not np.isnan(values).all():
                    shown.append((run.name, at, values, run.state == "finished"))
            x = np.median([at for at, _ in done], axis=0) if done else steps
            values = np.array([values for _, values in done]).reshape(-1, GRID)
            center = estimate_curve(values, CENTERS[self.center])
            if shown:
                curves[variant] = {"runs": shown, "center": (x, *center), "count": len(done)}
        if not curves:
            self.add("p", f"No episode has ended yet: no return against {x_label}.")
            return
        if x_label == "steps":
            self.panels[env_id] = curves, lines
        figure, rows = draw_curves(curves, lines, self.looks, x_label, self.center)
        caption = (
            f"Each point is the mean return of the training episodes in the {WINDOW:.0%} of a "
            f"run's steps before it. Thick: {CENTER_NAMES[self.center]} over the finished "
            "seeds, as far as all of them go, with its interval; thin: single seeds, dashed "
            "where unfinished."
        )
        if x_label == "wall time":
            caption += " The thick curve has its seeds' median time at each step."
        title = f"{env_id}: return against {x_label}"
        self.add_figure(f"{env_id}_{x_label}", title, caption, figure, rows)

    def add_overview(self):
        figure, rows = draw_overview(self.panels, self.looks, self.center)
        self.add("h2", "All environments")
        caption = (
            f"Thick: {CENTER_NAMES[self.center]} over the finished seeds with its interval; "
            "thin: single seeds; dashed lines: the published scores."
        )
        title = "All environments: return against steps"
        self.add_figure("overview", title, caption, figure, rows)

    def add_comparison(self):
        """Statistics over environments, and of variants against each other."""
        raw = {}
        for variant in self.variants:
            of_envs = {env_id: self.scores(env_id, variant) for env_id in self.env_ids}
            of_envs = {env_id: x for env_id, x in of_envs.items() if len(x)}
            if of_envs:
                raw[variant] = of_envs
        env_ids = sorted({env_id for of_envs in raw.values() for env_id in of_envs})
        if len(raw) < 2 and len(env_ids) < 2:
            return
        every = {
            env_id: np.concatenate([x[env_id] for x in raw.values() if env_id in x])
            for env_id in env_ids
        }
        bounds = {env_id: (x.min(), x.max()) for env_id, x in every.items()}
        scaled = {
            variant: {env_id: normalise(x, *bounds[env_id]) for env_id, x in of_envs.items()}
            for variant, of_envs in raw.items()
        }
        self.add("h2", "Over environments" if len(env_ids) > 1 else "Between variants")
        ranges = [
            f"{env_id} {number(low)} to {number(high)}" for env_id, (low, high) in bounds.items()
        ]
        text = (
            "A score is a run's mean return in its last 100 training episodes, normalised so "
            "that 0 is the lowest and 1 the highest of the finished runs of its environment "
            f"in this report: {', '.join(ranges)}."
        )
        self.add("p", text)
        if any(set(of_envs) != set(env_ids) for of_envs in raw.values()):
            self.warn(
                "Not all variants have finished runs in the same environments: the aggregate and "
                "the profile of each are over its own, so compare them only where those are the "
                "same."
            )
        tables = [self.add_aggregate(scaled), self.add_improvement(scaled)]
        for script, mark in sorted({(run.script, run.mark) for run in self.runs}):
            tables.append(self.add_ablation(script, mark, raw, scaled))
        for header, rows in tables:
            if rows:
                self.add("table", header, rows, "numbers")

    def bases(self, scaled):
        """The variants that are a script with its defaults."""
        variants = dict.fromkeys(f"{run.script}{run.mark}" for run in self.runs)
        return [variant for variant in variants if variant in scaled]

    def add_aggregate(self, scaled):
        """The aggregate's figure and the performance profile's -> (header, rows) of a table."""
        center = CENTERS[self.center]
        rows = [
            row_of(variant, variant, of_envs, aggregate(list(of_envs.values()), center))
            for variant, of_envs in scaled.items()
        ]
        label = f"{CENTER_NAMES[self.center]} of normalised scores"
        figure = draw_intervals(rows, self.looks, label)
        self.add_figure("aggregate", label, f"{label}, with its interval.", figure, rows)
        taus = np.linspace(0, 1, GRID)
        profiles = {
            variant: profile(list(of_envs.values()), taus) for variant, of_envs in scaled.items()
        }
        figure, points = draw_profile(taus, profiles, self.looks, "normalised score tau")
        caption = (
            "Share of runs whose normalised score is above tau, with its interval: higher is "
            "better."
        )
        self.add_figure("profile", "Performance profile", caption, figure, points)
        return ("variant", "environments", f"{label} [interval]"), [cells(row) for row in rows]

    def add_improvement(self, scaled):
        """The figure of pairs of variants -> (header, rows) of a table.

        The two have environments in common; they are all such pairs, or those that say most.
        """
        rows = []
        label = "probability that a run of the first is better"
        bases = self.bases(scaled)
        everything = pairs = list(combinations(scaled, 2))
        if len(scaled) > MANY and (bases or len(pairs) > 30):  # dozens of pairs would be no figure
            base = {run.variant: f"{run.script}{run.mark}" for run in self.runs}
            plain = {run.variant: run.variant.removesuffix(run.mark) for run in self.runs}
            beside = {x: [base[x]] if base[x] in bases else bases for x in scaled}
            beside |= {x: bases for x in bases}
            pairs = [
                (y, x) if x in bases and y not in bases else (x, y)
                for x, y in pairs
                if x in beside[y] or y in beside[x] or plain[x] == plain[y]
            ]
        if len(pairs) < len(everything):
            text = (
                "Of these variants only scripts with their defaults are set beside each other, and "
                "each other variant beside its script's defaults (all defaults, where it has none) "
                "and what it is compared with."
            )
            self.add("p", text)
        for x, y in pairs:
            if common := [env_id for env_id in scaled[x] if env_id in scaled[y]]:
                first, second = ([scaled[z][env_id] for env_id in common] for z in (x, y))
                found = improvement(first, second)
                rows.append(row_of(f"{x} > {y}", x, common, found))
        if rows:
            caption = (
                "Probability that a run of the first variant has a higher score than one of "
                "the second, ties counting half (Mann-Whitney U), averaged over the "
                "environments that both have, with its interval; at 0.5 neither is better."
            )
            figure = draw_intervals(rows, self.looks, label, 0.5, limits=(-0.03, 1.03))
            self.add_figure("improvement", "Probability of improvement", caption, figure, rows)
        return ("variants", "environments", f"{label} [interval]"), [cells(row) for row in rows]

    def add_ablation(self, script, mark, raw, scaled):
        """Figures of what each variant of a script gains on its defaults.

        They are of each environment and of all; returns (header, rows) of a table.
        """
        base = f"{script}{mark}"
        center = CENTERS[self.center]
        runs = [run for run in self.runs if (run.script, run.mark) == (script, mark)]
        variants = {run.variant for run in runs}
        if base not in raw and len(variants) > 1:
            text = (
                f"{base} has no finished run with its defaults (and the usual number of "
                "steps): no figure of what its variants gain on them."
            )
            self.add("p", text)
        others = sorted(variant for variant in variants if variant != base and variant in raw)
        table = []
        for env_id in [*raw.get(base, ()), "all"]:
            source = scaled if env_id == "all" else raw
            rows = []
            for variant in others:
                common = [x for x in source.get(base, ()) if x in source[variant]]
                if env_id != "all":
                    common = [x for x in common if x == env_id]
                if common:
                    mine, theirs = ([source[y][x] for x in common] for y in (variant, base))
                    found = difference(mine, theirs, center)
                    name = variant.removeprefix(script).strip()
                    rows.append(row_of(name, variant, common, found))
            if rows and (env_id != "all" or len(raw[base]) > 1):
                where = "all environments" if env_id == "all" else env_id
                label = f"{CENTER_NAMES[self.center]} less that of {base}"
                unit = "normalised score" if env_id == "all" else "return, last 100 episodes"
                title = f"{where}: difference to {base}"
                caption = f"{where}: {label}, with its interval."
                figure = draw_intervals(rows, self.looks, f"{unit}: {label}", 0.0, bars=True)
                self.add_figure(f"ablation_{base}_{env_id}", title, caption, figure, rows)
                table += [(f"{where}: {name}", *rest) for name, *rest in map(cells, rows)]
        return ("variant", "environments", f"difference to {base} [interval]"), table

    def add_runs(self):
        self.add("h2", "Every run")
        header = (
            "run",
            "environment",
            "variant",
            "seed",
            "state",
            "steps",
            "last 100",
            "evaluation",
            "steps/s",
            "wall s",
            "command",
            "versions",
            "machine",
            "git commit",
        )
        rows = []
        runs = sorted(self.runs, key=lambda run: (run.env_id, run.variant, str(run.seed).zfill(9)))
        for run in runs:
            row = run.row | {"command": without_paths(run.command), "machine": run.machine}
            cells = [run.name, run.env_id, run.variant, str(run.seed), run.state]
            for name, form in FORMS.items():
                value = row.get(name, "")
                cells.append("-" if value == "" else form(value))
            rows.append(cells)
        self.add("table", header, rows, "runs")


# Of what read_run has of a run, and of its machine
FORMS = {
    "steps": "{:,}".format,
    "last_100": number,
    "evaluation_mean": number,
    "steps_per_second": "{:,.0f}".format,
    "wall_seconds": "{:,.0f}".format,
    "command": str,
    "versions": str,
    "machine": str,
    "git_commit": str,
}


def states_of(runs):
    counts = Counter(run.state for run in runs)
    return ", ".join(f"{n} {state}" for state, n in sorted(counts.items())) or "none yet"


def time_of(run, steps):
    """The wall time, s, at which a run had made so many steps, (len(steps),)."""
    known = np.concatenate([[0], run.at["steps"]])
    return np.interp(steps, known, np.concatenate([[0], run.at["wall time"]]))


def estimate_curve(done, center):
    """(value, low, high), (GRID,) each, of the center of runs' curves (runs, GRID).

    They are nan where one of the curves has no value.
    """
    known = ~np.isnan(done).any(axis=0) & bool(len(done))
    found = np.full((3, GRID), np.nan)
    if known.any():
        found[:, known] = estimate([done[:, known].T], pooled(center))
    return found


def row_of(name, variant, env_ids, found):
    """A row of the figures with intervals; found: (value, low, high)."""
    value, low, high = (float(x) for x in found)
    row = {"name": name, "variant": variant, "environments": len(env_ids)}
    return row | {"value": value, "low": low, "high": high}


def cells(row):
    found = with_interval(row["value"], row["low"], row["high"])
    return row["name"], str(row["environments"]), found


def draw(args, folder):
    """Reads all runs and writes the report -> (Report, whether all runs have ended)."""
    runs, troubles = read_runs(args.runs, folder)
    others, more = read_runs(args.compare, folder)
    for paths, found in ((args.runs, runs), (args.compare, others)):
        if paths and not found and not args.watch:
            refuse(
                f"no run in {', '.join(map(str, paths))}: a run's folder has a config.json, a "
                "sweep's a sweep.json"
            )
    shared = name_variants(runs, others)
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(runs + others, shared, troubles + more, args.center, folder)
    ended = bool(runs) and all(run.state in ("finished", "failed") for run in report.runs)
    refresh_s = args.interval if args.watch and not ended else None
    write(folder / "report.html", to_html(report.blocks, refresh_s))
    write(folder / "report.md", to_markdown(report.blocks))
    report.files = [folder / "report.html", folder / "report.md", *report.files]
    return report, ended


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="a run's folder, one of them, or a sweep's",
    )
    parser.add_argument("--out", type=Path, help="folder of the report")
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar="RUNS",
        default=[],
        help="runs to set beside these",
    )
    parser.add_argument(
        "--center", choices=list(CENTERS), default="iqm", help="of seeds (default iqm)"
    )
    parser.add_argument(
        "--watch", action="store_true", help="draw it again until all runs have come to their ends"
    )
    parser.add_argument(
        "--interval", type=int, default=30, help="seconds between two drawings (default 30)"
    )
    args = parser.parse_args()
    if missing := [str(path) for path in args.runs + args.compare if not path.is_dir()]:
        refuse(f"no such folder: {', '.join(missing)}")
    if args.interval < 1:
        refuse("--interval must be at least one second")
    return args


def main():
    args = parse_args()
    first = args.runs[0].absolute()
    inside = any((first / name).exists() for name in ("sweep.json", "config.json"))
    folder = (args.out or (first if inside else first.parent) / "report").absolute()
    try:
        if args.watch:
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as at Ctrl-C
        began = time.time()
        report, ended = draw(args, folder)
        while args.watch and not ended:
            print(printable(f"{states_of(report.runs)}: {folder}/report.html"), flush=True)
            # Longer after a long drawing: the runs need the cores more
            time.sleep(max(args.interval, 10 * (time.time() - began)))
            began = time.time()
            report, ended = draw(args, folder)
    except OSError as error:
        refuse(f"can't draw the report: {error}")
    except KeyboardInterrupt:
        page = folder / "report.html"
        if args.watch and page.exists():  # nothing draws it again from now on
            write(page, page.read_text(encoding="utf-8").replace(REFRESH.format(args.interval), ""))
        sys.exit(130)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(*(printable(str(path)) for path in report.files), sep="\n")
    for path in args.runs + args.compare:
        logdir = path / "runs" if (path / "sweep.json").exists() else path
        print(printable(f"tensorboard --logdir {shlex.quote(str(logdir))}"))


if __name__ == "__main__":
    main()
