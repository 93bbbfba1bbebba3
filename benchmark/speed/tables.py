"""Tables of the rows of a measurement: speeds, and ratios within a round. Nothing is drawn here."""

import pandas as pd

from benchmark.report.tables import Table, markdown
from benchmark.speed.peers import OURS, PEER, PROGRAMS

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
    """Rows sorted by program in the order of PROGRAMS, other programs last."""
    ranks = {program: rank for rank, program in enumerate(PROGRAMS)}
    return rows.sort_values(
        "program", key=lambda names: names.map(ranks).fillna(len(ranks)), kind="stable"
    )


def tables(rows):
    """A DataFrame of rows -> {name: Markdown}.

    "speed": PlainRL beside its peer, a line for each script and precision; "speed_SCRIPT": all
    programs and ratios of a script; "speed_machines": the machines that they were measured on.
    """
    rows = sort_programs(rows)
    rounds = rows[rows["round"] != "full"]
    texts = {"speed": markdown(overview(rounds))}
    for script, of_script in rounds.groupby("script", sort=False):
        full = rows[(rows["round"] == "full") & (rows["script"] == script)]
        parts = [markdown(program_table(of_script)), markdown(ratio_table(of_script))]
        parts += full_sentence(full)
        texts[f"speed_{script}"] = "\n\n".join(parts)
    texts["speed_machines"] = "\n".join(f"- {machine}" for machine in rows["machine"].unique())
    return texts


def overview(rounds):
    """PlainRL beside its peer -> Table with a line for each script, environment and precision."""
    header = (
        "script, environment",
        "precision",
        "PlainRL, steps/s",
        "Stable-Baselines3 (float32), steps/s",
        "ratio: median",
        "min",
        "max",
        "rounds",
    )
    lines = []
    for (script, env_id), of_script in rounds.groupby(["script", "env_id"], sort=False):
        peer = spread(speeds_of(of_script, PEER), ",.0f")
        for program in OURS:
            speeds = speeds_of(of_script, program)
            if speeds.empty:
                continue
            found = ratios(of_script, "steps_per_second", program, PEER)
            cells = [f"`{script}`, {env_id}", PROGRAMS[program].precision, spread(speeds, ",.0f")]
            lines.append([*cells, peer, *three(found, ".2f"), str(len(speeds))])
    return Table(header, lines, "llrrrrrr")


def program_table(rounds):
    """The speeds of a script's programs -> Table with a line for each."""
    header = (
        "",
        "precision",
        "steps/s",
        "start-up, s",
        "start-up with compilation",
        "1M steps, s",
        "1M steps with compilation",
        "peak memory, MB",
        "other programs, cores",
    )
    lines = []
    for program, runs in rounds.groupby("program", sort=False):
        compiling = runs["cache"] == "empty"
        cells = [title(program), runs["precision"].iloc[0] or "-"]
        cells.append(spread(runs["steps_per_second"], ",.0f"))
        for column in ("start_up_s", "wall_s_1m"):
            cells.append(spread(runs.loc[~compiling, column], ",.1f"))
            cells.append(spread(runs.loc[compiling, column], ",.1f"))
        cells.append(spread(runs["peak_mb"], ",.0f"))
        cells.append(spread(runs["others_cores"], ".1f"))
        lines.append(cells)
    return Table(header, lines, "llrrrrrrr")


def ratio_table(rounds):
    """PlainRL divided by each other program -> Table with a line for each ratio."""
    precisions = dict(zip(rounds["program"], rounds["precision"]))
    header = ("ratio", "precision", "median", "min", "max", "round by round")
    lines = []
    for name, column, above, below in wanted_ratios(list(precisions)):
        found = ratios(rounds, column, above, below)
        by_round = ", ".join(f"{ratio:.2f}" for ratio in found)
        precision = " / ".join(dict.fromkeys(filter(None, (precisions[above], precisions[below]))))
        lines.append([name, precision, *three(found, ".2f"), by_round])
    return Table(header, lines, "llrrrl")


def wanted_ratios(programs):
    """The ratios for a script's programs -> [(name, column, program above, program below)]."""
    pairs = [("plainrl", program) for program in programs if program not in OURS]
    pairs += [("plainrl --amp", PEER), ("plainrl --amp", "plainrl")]
    wanted = []
    for above, below in pairs:
        if above not in programs or below not in programs:
            continue
        name = f"steps/s, {title(above)} / {title(below)}"
        wanted.append((name, "steps_per_second", above, below))
        if below == PEER:
            name = f"time of 1M steps, {title(below)} / {title(above)}"
            wanted.append((name, "wall_s_1m", below, above))
    return wanted


def full_sentence(full):
    """[a sentence] about 1M steps that were really run, [] if they weren't."""
    found = ratios(full, "wall_s", PEER, "plainrl")
    if found.empty:
        return []
    return [
        f"Measured over 1M steps: Stable-Baselines3 takes {found.iloc[0]:.2f} times as long as "
        "PlainRL, whole process."
    ]


def ratios(rows, column, above, below):
    """A column of one program divided by that of another -> Series by round.

    Only rounds that have both programs count.
    """
    by_program = rows.pivot(index="round", columns="program", values=column)
    by_program = by_program.reindex(index=rows["round"].unique(), columns=[above, below])
    return (by_program[above] / by_program[below]).dropna()


def speeds_of(rows, program):
    """A program's steps/s, a Series."""
    return rows.loc[rows["program"] == program, "steps_per_second"]


def title(program):
    """A program's name in tables; one of --other has its own."""
    if program in PROGRAMS:
        return PROGRAMS[program].title
    return program


def three(values, form):
    """Median, minimum and maximum -> list of str, "-" if there are no values."""
    values = values.dropna()
    if values.empty:
        return ["-"] * 3
    return [format(value, form) for value in (values.median(), values.min(), values.max())]


def spread(values, form):
    """Values as "median (min to max)"; a single one stands alone, none is "-"."""
    middle, low, high = three(values, form)
    if values.count() < 2:
        return middle
    return f"{middle} ({low} to {high})"
