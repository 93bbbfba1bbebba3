"""The README's table of algorithms: what each script is, one of its scores, and its speed.

benchmark/results/algorithms.csv says which: script and what it is; results, the folder of its runs;
env_id; flags of these runs, where they don't have the defaults.
"""

from benchmark.report.tables import Table, mean_std, number
from benchmark.speed.peers import OURS, PEER
from benchmark.speed.tables import ratios, spread


def make_table(algorithms, results, speeds):
    """The table, with links relative to the repository's root.

    algorithms: frame of algorithms.csv; results: {folder: frame of its runs}; speeds: of speed.csv.
    """
    rows = [
        (
            f"[`{algorithm.script}.py`]({algorithm.script}.py)",
            f"[{algorithm.what}](docs/{algorithm.script}.md)",
            score_of(algorithm, results),
            speed_of(algorithm.script, speeds),
        )
        for algorithm in algorithms.itertuples()
    ]
    return Table(("file", "what it is", "score", "speed"), rows, "llll")


def score_of(algorithm, results):
    """The score of a script's runs; if all were stopped, how far they came."""
    runs = results[algorithm.results]
    runs = runs[(runs["script"] == algorithm.script) & (runs["env_id"] == algorithm.env_id)]
    what = algorithm.env_id.rpartition(":")[2]
    if algorithm.flags:
        runs = runs[runs["flags"] == algorithm.flags]
        what = f"{what}, `{algorithm.flags}`"
    else:
        runs = runs[runs["base"]]
    planned = runs["planned_steps"].iloc[0]
    finished = runs[runs["state"] == "finished"]
    if finished.empty:
        steps = from_to(runs["steps"], in_millions)
        score = from_to(runs["last_100"], number)
        return f"{what}, stopped at {steps} of {in_millions(planned)} steps: {score}"
    seeds = "1 seed" if len(finished) == 1 else f"{len(finished)} seeds"
    return f"{what}, {planned:,.0f} steps, {seeds}: {mean_std(finished['score'])}"


def in_millions(steps):
    return f"{steps / 1e6:.2g}M"


def from_to(values, form):
    """The lowest and the highest of several values, or the only one."""
    return " to ".join(dict.fromkeys([form(values.min()), form(values.max())]))


def speed_of(script, speeds):
    """PlainRL's steps/s divided by the peer's, in each precision; "" if it wasn't measured."""
    rounds = speeds[speeds["script"] == script]
    texts = []
    for program, label in zip(OURS, ("", "`--amp`: "), strict=True):
        found = ratios(rounds, "steps_per_second", program, PEER)
        if not found.empty:
            texts.append(f"{label}{spread(found, '.1f')}")
    return "; ".join(texts)
