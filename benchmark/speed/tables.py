"""Tables of the rows of a measurement: speeds, and ratios within a round."""

import pandas as pd

from benchmark.report.tables import Table, markdown
from benchmark.speed.peers import OURS, PEERS, PROGRAMS

NOTE = """\
Cells: median (min to max) over the rounds. Steps/s are of the steady state, from the end of the
first iteration that learns to the end of the last. 1M steps are the whole process, projected from
its wall time and its steps/s. PlainRL compiles in its first run; later runs find what it compiled
in the compiler's cache. Other programs, cores: how many these kept busy meanwhile."""


def read(path):
    """The rows of a CSV of this command -> DataFrame."""
    return pd.read_csv(path)


def tables(rows):
    """A DataFrame of rows -> {name: Markdown}.

    speed: PlainRL beside its peers, a line for each script and precision; speed_SCRIPT: all
    programs and ratios of a script; speed_machines: the machines that they were measured on.
    """
    texts = {"speed": overview(rows)}
    for script, own in rows.groupby("script", sort=False):
        texts[f"speed_{script}"] = f"{program_table(own)}\n\n{ratio_table(own)}".strip()
    texts["speed_machines"] = "\n".join(f"- {machine}" for machine in rows["machine"].unique())
    return texts


def overview(rows):
    header = ["script, environment", "precision", "rounds", "PlainRL, steps/s"]
    for peer in PEERS:
        header += [f"{PROGRAMS[peer][0]}, steps/s", "ratio", "ratio with start-up, 1M steps"]
    lines = []
    for (script, env_id), own in rows.groupby(["script", "env_id"], sort=False):
        for program in OURS:
            speeds = speeds_of(own, program)
            if speeds.empty:
                continue
            cells = [f"`{script}`, {env_id}", PROGRAMS[program][1], str(len(speeds))]
            cells.append(spread(speeds, ",.0f"))
            for peer in PEERS:
                cells.append(spread(speeds_of(own, peer), ",.0f"))
                cells.append(spread(ratios(own, "steps_per_second", program, peer), ".2f"))
                cells.append(spread(ratios(own, "wall_s_1m", peer, program), ".2f"))
            lines.append(cells)
    return markdown(Table(header, lines, "ll" + "r" * (len(header) - 2)))


def speeds_of(rows, program):
    return rows.loc[rows["program"] == program, "steps_per_second"]


def program_table(rows):
    """A line for each of a script's programs -> Markdown."""
    header = "|precision|steps/s|start-up, s|start-up with compilation|1M steps, s"
    header += "|1M steps with compilation|peak memory, MB|other programs, cores"
    lines = []
    for program, runs in rows.groupby("program", sort=False):
        title, precision = PROGRAMS[program]
        compiling = runs["cache"] == "empty"
        cells = [title, precision, spread(runs["steps_per_second"], ",.0f")]
        for column in ("start_up_s", "wall_s_1m"):
            cells.append(spread(runs.loc[~compiling, column], ",.1f"))
            cells.append(spread(runs.loc[compiling, column], ",.1f"))
        cells.append(spread(runs["peak_mb"], ",.0f"))
        lines.append([*cells, spread(runs["others_cores"], ".1f")])
    return markdown(Table(header.split("|"), lines, "llrrrrrrr"))


def ratio_table(rows):
    """A line for each ratio of a script's programs -> Markdown, "" for a script without a peer."""
    programs = list(rows["program"].unique())
    pairs = [("plainrl", other) for other in programs if other not in OURS]
    if "plainrl --amp" in programs:
        pairs += [("plainrl --amp", peer) for peer in PEERS if peer in programs]
        pairs.append(("plainrl --amp", "plainrl"))
    lines = []
    for ours, other in pairs:
        lines.append(ratio_line(rows, "steps/s", "steps_per_second", ours, other))
        lines.append(ratio_line(rows, "time of 1M steps", "wall_s_1m", other, ours))
    header = ("ratio", "precision", "median", "min", "max", "round by round")
    return markdown(Table(header, lines, "llrrrl")) if lines else ""


def ratio_line(rows, what, column, above, below):
    """The cells of a ratio -> list of str."""
    titles, precisions = zip(PROGRAMS[above], PROGRAMS[below])
    found = ratios(rows, column, above, below)
    by_round = ", ".join(f"{ratio:.2f}" for ratio in found)
    precision = " / ".join(dict.fromkeys(filter(None, precisions)))
    return [f"{what}, {' / '.join(titles)}", precision, *three(found, ".2f"), by_round]


def ratios(rows, column, above, below):
    """A column of one program divided by that of another, in rounds that have both -> Series."""
    by_program = rows.pivot(index="round", columns="program", values=column)
    by_program = by_program.reindex(index=rows["round"].unique(), columns=[above, below])
    return (by_program[above] / by_program[below]).dropna()


def three(values, form):
    """Median, minimum and maximum -> list of str, "-" if there are no values."""
    if values.count() == 0:
        return ["-"] * 3
    return [format(value, form) for value in (values.median(), values.min(), values.max())]


def spread(values, form):
    """Values as "median (min to max)"; a single one stands alone, none is "-"."""
    middle, low, high = three(values, form)
    return middle if values.count() < 2 else f"{middle} ({low} to {high})"
