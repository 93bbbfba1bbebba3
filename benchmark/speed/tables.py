"""From the rows of a measurement to Markdown tables and a chart."""

import pandas as pd

from benchmark.report import figures
from benchmark.report.blocks import Intervals
from benchmark.speed.peers import BOUNDS, PROGRAMS

COLUMNS = [
    "round",
    "program",
    "precision",
    "cache",
    "script",
    "env_id",
    "seed",
    "steps",
    "steps_per_second",
    "start_up_s",
    "wall_s",
    "wall_s_1m",
    "peak_mb",
    "others_cores",
    "machine",
]
NOTE = (
    "Cells: median (min to max) over the rounds. Steps/s are of the steady state. 1M steps are the "
    "whole process, projected from its wall time and its steps/s. PlainRL compiles in its first "
    "run; later runs find what it compiled in the compiler's cache. Other programs, cores: how "
    "many cores they kept busy during the runs."
)


def frame(rows):
    """Rows (list of dict, see COLUMNS) as a DataFrame; round is a str, a number or "full"."""
    return pd.DataFrame(rows, columns=COLUMNS).astype({"round": str})


def read(path):
    """The DataFrame of a CSV that this command wrote."""
    rows = pd.read_csv(path, dtype={"round": str})
    texts = ["precision", "cache", "machine"]
    rows[texts] = rows[texts].fillna("")
    return rows


def sort_programs(rows):
    """Rows with programs in the order of PROGRAMS, others after them; else the order they have."""
    ranks = {program: rank for rank, program in enumerate(PROGRAMS)}
    return rows.sort_values(
        "program", key=lambda names: names.map(ranks).fillna(len(ranks)), kind="stable"
    )


def tables(rows):
    """Markdown of a DataFrame of rows -> {name: text}.

    "speed": PlainRL beside its peer, a line a script; "speed_SCRIPT": all programs and ratios of a
    script; "speed_machines": on which machines they were measured.
    """
    rows = sort_programs(rows)
    rounds = rows[rows["round"] != "full"]
    texts = {"speed": overview(rounds)}
    for script, of_script in rounds.groupby("script", sort=False):
        full = rows[(rows["round"] == "full") & (rows["script"] == script)]
        parts = [program_table(of_script), ratio_table(of_script), *full_sentence(full)]
        texts[f"speed_{script}"] = "\n\n".join(parts)
    texts["speed_machines"] = "\n".join(f"- {machine}" for machine in rows["machine"].unique())
    return texts


def overview(rounds):
    lines = [
        "| script, environment | precision | PlainRL, steps/s | Stable-Baselines3 (float32), "
        "steps/s | ratio: median | min | max | rounds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (script, env_id), of_script in rounds.groupby(["script", "env_id"], sort=False):
        peer = spread(speeds_of(of_script, "sb3"), ",.0f")
        for program in ("plainrl", "plainrl --amp"):
            speeds = speeds_of(of_script, program)
            if speeds.empty:
                continue
            found = ratios(of_script, "steps_per_second", program, "sb3")
            cells = [f"`{script}`, {env_id}", PROGRAMS[program].precision, spread(speeds, ",.0f")]
            cells += [peer, *three(found, ".2f"), str(len(speeds))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def program_table(rounds):
    """A line a program of a script."""
    lines = [
        "| | precision | steps/s | start-up, s | start-up with compilation | 1M steps, s "
        "| 1M steps with compilation | peak memory, MB | other programs, cores |",
        "|---|---|" + "---:|" * 7,
    ]
    for program, runs in rounds.groupby("program", sort=False):
        compiling = runs["cache"] == "empty"
        cells = [title(program), runs["precision"].iloc[0] or "-"]
        cells.append(spread(runs["steps_per_second"], ",.0f"))
        for column in ("start_up_s", "wall_s_1m"):
            cells.append(spread(runs.loc[~compiling, column], ",.1f"))
            cells.append(spread(runs.loc[compiling, column], ",.1f"))
        cells.append(spread(runs["peak_mb"], ",.0f"))
        cells.append(spread(runs["others_cores"], ".1f"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio_table(rounds):
    """A line a ratio: PlainRL by each other program, and bfloat16 by float32 and by the peer."""
    precisions = dict(zip(rounds["program"], rounds["precision"]))
    lines = [
        "| ratio | precision | median | min | max | round by round |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, column, above, below in wanted_ratios(list(precisions)):
        found = ratios(rounds, column, above, below)
        by_round = ", ".join(f"{ratio:.2f}" for ratio in found)
        precision = " / ".join(dict.fromkeys(filter(None, (precisions[above], precisions[below]))))
        cells = [name, precision, *three(found, ".2f"), by_round]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def wanted_ratios(programs):
    """[(name, column, program above, program below)] of a script's ratios."""
    pairs = [("plainrl", program) for program in programs if not program.startswith("plainrl")]
    pairs += [("plainrl --amp", "sb3"), ("plainrl --amp", "plainrl")]
    wanted = []
    for above, below in pairs:
        if above not in programs or below not in programs:
            continue
        name = f"steps/s, {title(above)} / {title(below)}"
        wanted.append((name, "steps_per_second", above, below))
        if below == "sb3":
            name = f"time of 1M steps, {title(below)} / {title(above)}"
            wanted.append((name, "wall_s_1m", below, above))
    return wanted


def full_sentence(full):
    """[sentence] about the 1M steps that were really run, [] if they weren't."""
    found = ratios(full, "wall_s", "sb3", "plainrl")
    if found.empty:
        return []
    return [
        "1M steps, really run, whole process: Stable-Baselines3 takes "
        f"{found.iloc[0]:.2f} times as long as PlainRL."
    ]


def ratios(rows, column, above, below):
    """Column of one program by that of another, of the rounds that have both -> Series by round."""
    by_program = rows.pivot(index="round", columns="program", values=column)
    by_program = by_program.reindex(index=rows["round"].unique(), columns=[above, below])
    return (by_program[above] / by_program[below]).dropna()


def speeds_of(rows, program):
    return rows.loc[rows["program"] == program, "steps_per_second"]


def title(program):
    if program in PROGRAMS:
        return PROGRAMS[program].title
    return program


def three(values, form):
    """Median, minimum and maximum, list of str."""
    values = values.dropna()
    if values.empty:
        return ["-"] * 3
    return [format(value, form) for value in (values.median(), values.min(), values.max())]


def spread(values, form):
    """ "median (min to max)", the number if it is one, "-" if there is none."""
    middle, low, high = three(values, form)
    if values.count() < 2:
        return middle
    return f"{middle} ({low} to {high})"


def draw(rows, path):
    """Draws the chart of a DataFrame of rows into a PNG."""
    plot = chart(rows)
    figure = figures.draw(plot, figures.looks_of(plot.data["variant"].unique()))
    figures.write_png(figure, path, dpi=150)


def chart(rows):
    """A bar for each script and program, the median, and a line from min to max -> Intervals.

    They are of the ratio to the peer, round by round, since scripts are far apart; where there is
    no peer, of steps/s. The bounds are left out: they are no programs.
    """
    rows = sort_programs(rows)
    rounds = rows[(rows["round"] != "full") & ~rows["program"].isin(BOUNDS)]
    with_peer = "sb3" in set(rounds["program"])
    bars = []
    for (script, program), runs in rounds.groupby(["script", "program"], sort=False):
        if program == "sb3":
            continue
        values = runs["steps_per_second"]
        if with_peer:
            of_script = rounds[rounds["script"] == script]
            values = ratios(of_script, "steps_per_second", program, "sb3")
        bar = {"name": f"{script}, {title(program)}", "variant": program}
        bar |= {"value": values.median(), "low": values.min(), "high": values.max()}
        bars.append(bar)
    if with_peer:
        return Intervals(pd.DataFrame(bars), "steps/s, Stable-Baselines3 = 1", True, 1.0)
    return Intervals(pd.DataFrame(bars), "environment steps per second", True)
