"""What a report computes: frames of benchmark.runs in, frames and plain values out.

This module touches no files and draws nothing. What depends on the order of runs, such as the
bootstrap's draws, gets them from in_order, so that a report doesn't depend on the order of folders.
"""

import re
from itertools import combinations

import numpy as np
import pandas as pd

from benchmark.stats import (
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
from benchmark.variants import unique_names

GRID = 101  # points of a curve
WINDOW = 0.05  # part of a curve's steps over which a point of it is the mean
ROUNDING = 1e-6  # of a stored curve's steps, as part of its last one
EPISODES = ["id", "global_step", "wall_seconds", "return"]  # columns, as benchmark.runs has them
FEW_VARIANTS = 4  # up to so many are compared in all pairs
FEW_PAIRS = 30  # as are more, up to so many pairs, if none of them is a script with its defaults


def in_order(runs):
    """The runs sorted by environment, variant, seed (1, 2, 10, and texts last) and name."""
    keys = {
        "seed_is_text": [not isinstance(seed, int) for seed in runs["seed"]],
        "seed_number": [seed if isinstance(seed, int) else 0 for seed in runs["seed"]],
        "seed_text": runs["seed"].map(str),
        "place": runs["folder"].map(str),
    }
    order = ["env_id", "variant", "seed_is_text", "seed_number", "seed_text", "run", "place"]
    runs = runs.assign(**keys).sort_values(order, kind="stable")
    return runs.drop(columns=list(keys)).reset_index(drop=True)


# Curves


def make_curves(runs, episodes, stored):
    """Each run's return along a grid -> frame with the columns EPISODES.

    episodes, stored: frames with these columns, episodes of the runs that were read from folders
    and curves of those that were read from CSVs. All runs of a variant in an environment share a
    grid, from 0 to the last step of the longest; a run has no row where its curve has no value.
    """
    finite = episodes[np.isfinite(episodes["return"])]
    measured = {key: own for key, own in episodes.groupby("id") if key in set(finite["id"])}
    known = dict(iter(stored.groupby("id")))
    parts = []
    for _, group in runs.groupby(["env_id", "variant"], sort=False):
        sources = {key: measured.get(key, known.get(key)) for key in group["id"]}
        sources = {key: own for key, own in sources.items() if own is not None}
        last = max((own["global_step"].iloc[-1] for own in sources.values()), default=0)
        grid = np.linspace(0, last or 1, GRID)
        for key, own in sources.items():
            curve = smoothed(own, grid) if key in measured else resampled(own, grid)
            parts.append(curve.assign(id=key).dropna(subset="return"))
    return concatenated(parts, EPISODES)


def concatenated(parts, columns):
    """The rows of several frames with these columns; a frame without rows if there are none."""
    # An empty part would make pandas guess dtypes
    parts = [part for part in parts if len(part)]
    if not parts:
        return pd.DataFrame(columns=columns, dtype=float)
    return pd.concat(parts, ignore_index=True).reindex(columns=columns)


def smoothed(episodes, grid):
    """A run's episodes -> its curve along grid, nan before the first episode and after the last."""
    steps = episodes["global_step"].to_numpy(float)
    wall = episodes["wall_seconds"].to_numpy(float)
    values = smooth(steps, episodes["return"].to_numpy(float), grid, WINDOW * grid[-1])
    times = np.interp(grid, [0, *steps], [0, *wall])
    return pd.DataFrame({"global_step": grid, "wall_seconds": times, "return": values})


def resampled(curve, grid):
    """A stored curve along another grid; along its own it stays the same, but for rounding."""
    steps = curve["global_step"].to_numpy(float)
    rounding = ROUNDING * grid[-1]
    inside = (grid >= steps[0] - rounding) & (grid <= steps[-1] + rounding)
    values = np.interp(grid, steps, curve["return"])
    return pd.DataFrame(
        {
            "global_step": grid,
            "wall_seconds": np.interp(grid, steps, curve["wall_seconds"]),
            "return": np.where(inside, values, np.nan),
        }
    )


def center_of(curves, center):
    """The center of several runs' curves -> frame of global_step, wall_seconds, value, low, high.

    It is given at the points where all of the runs have a value; wall_seconds is their median
    there. center: a name of stats.CENTERS.
    """
    order = curves["id"].unique()  # that of the runs, not of their ids
    values = curves.pivot(index="global_step", columns="id", values="return")[order].dropna()
    walls = curves.pivot(index="global_step", columns="id", values="wall_seconds")
    if values.empty:
        return pd.DataFrame(columns=["global_step", "wall_seconds", "value", "low", "high"])
    value, low, high = estimate([values.to_numpy()], pooled(CENTERS[center]))
    return pd.DataFrame(
        {
            "global_step": values.index,
            "wall_seconds": walls.loc[values.index].median(axis=1, skipna=False).to_numpy(),
            "value": value,
            "low": low,
            "high": high,
        }
    )


def curves_to_draw(runs, curves, center):
    """What is drawn for the runs of one environment, against steps and against wall time alike.

    -> frame of global_step, wall_seconds, variant, series, kind, value, low and high, whose columns
    are those of blocks.Curves. curves: of make_curves; center: a name of stats.CENTERS.
    """
    series = dict(zip(runs["id"], unique_names(runs["run"]), strict=True))
    parts = []
    for variant, group in runs.groupby("variant", sort=False):
        own = curves[curves["id"].isin(group["id"])]
        does_count = own["id"].isin(group.loc[group["score"].notna(), "id"])
        single = own.rename(columns={"return": "value"}).assign(
            variant=variant,
            series=own["id"].map(series),
            kind=np.where(does_count, "finished", "uncounted"),
        )
        middle = center_of(own[does_count], center)
        parts += [single, middle.assign(variant=variant, series=center, kind="center")]
    columns = ["global_step", "wall_seconds", "variant", "series", "kind", "value", "low", "high"]
    return concatenated(parts, columns)


def against(x, curves, published):
    """The data of blocks.Curves: curves of curves_to_draw against x, then the published scores.

    x: "steps" or "wall_time"; published: [(label, mean)].
    """
    at = {"steps": "global_step", "wall_time": "wall_seconds"}[x]
    columns = [x, "variant", "series", "kind", "value", "low", "high"]
    lines = pd.DataFrame(published, columns=["series", "value"])
    lines = lines.assign(variant="published", kind="published")
    known = curves.rename(columns={at: x}).dropna(subset=[x, "value"])
    data = concatenated([known, lines], columns)
    return data.astype({x: float, "value": float}).round({x: 3, "value": 6, "low": 6, "high": 6})


# Tables


def summarise(group):
    """What the table of an environment says about a variant's runs, a dict.

    "runs": how many there are, "seeds": how many have a score; "scores", "evaluations": (n,), of
    finished runs; "iqm": (value, low, high); "steps_per_second", "wall_seconds": medians of
    finished runs, nan without any.
    """
    done = group[group["state"] == "finished"]
    scores = group["score"].dropna().to_numpy(float)
    return {
        "runs": len(group),
        "seeds": len(scores),
        "scores": scores,
        "iqm": aggregate([scores], CENTERS["iqm"]) if len(scores) else (np.nan,) * 3,
        "evaluations": done["evaluation_mean"].dropna().to_numpy(float),
        "steps_per_second": done["steps_per_second"].dropna().median(),
        "wall_seconds": done["wall_seconds"].dropna().median(),
    }


def split_version(env_id):
    """HalfCheetah-v5 -> ("HalfCheetah", "v5"); a name without a version -> (name, "")."""
    found = re.fullmatch(r"(.*)-(v\d+)", env_id)
    return found.groups() if found else (env_id, "")


def published_of(published, script, env_id, steps):
    """The rows of published.csv for a script and an environment, in any version.

    Where some are after as many steps as the runs (steps: their numbers), it is only those.
    """
    name = split_version(env_id)[0]
    same = published["env_id"].map(lambda other: split_version(other)[0] == name)
    rows = published[same.astype(bool) & (published["algorithm"] == script)]
    as_long = rows[rows["total_timesteps"].isin(steps)]
    return rows if as_long.empty else as_long


# Statistics over environments: raw and scaled scores are {variant: {env_id: (runs,) scores}}


def scores_of(runs):
    """{variant: {env_id: (runs,) scores}}, without variants and environments that have none."""
    raw = {}
    scored = runs[runs["score"].notna()]
    for (variant, env_id), own in scored.groupby(["variant", "env_id"]):
        raw.setdefault(variant, {})[env_id] = own["score"].to_numpy(float)
    return raw


def scale(raw):
    """Scores -> (normalised scores, {env_id: (lowest, highest) score of all variants})."""
    env_ids = sorted({env_id for own in raw.values() for env_id in own})
    every = {
        env_id: np.concatenate([own[env_id] for own in raw.values() if env_id in own])
        for env_id in env_ids
    }
    bounds = {env_id: (scores.min(), scores.max()) for env_id, scores in every.items()}
    scaled = {
        variant: {env_id: normalise(scores, *bounds[env_id]) for env_id, scores in own.items()}
        for variant, own in raw.items()
    }
    return scaled, bounds


def intervals(rows):
    """[(name, variant, number of environments, (value, low, high))] -> data of Intervals."""
    return pd.DataFrame(
        [(name, variant, count, *map(float, found)) for name, variant, count, found in rows],
        columns=["name", "variant", "environments", "value", "low", "high"],
    )


def aggregates(scaled, center):
    """The center of each variant's normalised scores -> data of Intervals."""
    return intervals(
        (variant, variant, len(own), aggregate(list(own.values()), CENTERS[center]))
        for variant, own in scaled.items()
    )


def profiles(scaled):
    """Each variant's share of runs above tau, for tau from 0 to 1 -> data of Profile."""
    taus = np.linspace(0, 1, GRID)
    parts = []
    for variant, own in scaled.items():
        value, low, high = profile(list(own.values()), taus)
        part = pd.DataFrame({"tau": taus, "value": value, "low": low, "high": high})
        parts.append(part.assign(variant=variant))
    data = pd.concat(parts, ignore_index=True).round(6)
    return data[["tau", "variant", "value", "low", "high"]]


def improvements(scaled, pairs):
    """Probability that a run of a pair's first is better than one of its second.

    -> data of Intervals. Only environments that both variants have count; a pair that shares none
    has no row.
    """
    rows = []
    for x, y in pairs:
        common = [env_id for env_id in scaled[x] if env_id in scaled[y]]
        if common:
            first = [scaled[x][env_id] for env_id in common]
            second = [scaled[y][env_id] for env_id in common]
            rows.append((f"{x} > {y}", x, len(common), improvement(first, second)))
    return intervals(rows)


def bases(runs):
    """{family: its variant with the script's defaults}, without families that have none.

    Of several such variants (a suite may name the defaults twice) it is the first by name.
    """
    found = runs[runs["base"].astype(bool)]
    return found.groupby("family")["variant"].min().to_dict()


def pairs_to_compare(runs, scaled):
    """(pairs of variants, whether these are all there are).

    With many variants, only the most telling pairs are compared: defaults with each other, other
    variants with the defaults they belong to and with those that differ only by their mark.
    """
    pairs = list(combinations(scaled, 2))
    base_of = {key: base for key, base in bases(runs).items() if base in scaled}
    defaults = list(base_of.values())
    if len(scaled) <= FEW_VARIANTS or (not defaults and len(pairs) <= FEW_PAIRS):
        return pairs, True
    variants = runs.drop_duplicates("variant").set_index("variant")
    beside = {x: defaults_beside(x, variants.at[x, "family"], base_of) for x in scaled}
    unmarked = {x: x.removesuffix(variants.at[x, "mark"]) for x in scaled}
    chosen = []
    for x, y in pairs:
        if x not in beside[y] and y not in beside[x] and unmarked[x] != unmarked[y]:
            continue
        is_turned = x in defaults and y not in defaults  # defaults come second
        chosen.append((y, x) if is_turned else (x, y))
    return chosen, len(chosen) == len(pairs)


def defaults_beside(variant, family, base_of):
    """The defaults that a variant is compared with, a list of variants.

    They are its family's, but all defaults if it is itself its family's or the family has none.
    base_of: {family: its defaults}.
    """
    base = base_of.get(family, variant)
    return list(base_of.values()) if base == variant else [base]


def ablation(raw, scaled, script, base, others, center):
    """What each of others gains on base -> {env_id, or "all" for all of them: data of Intervals}.

    The gain is in returns within an environment, in normalised scores over all; the best is first.
    Environments that only one of the two has are left out, and so is "all" if base has only one.
    """
    found = {}
    for where in [*raw[base], "all"]:
        source = scaled if where == "all" else raw
        rows = []
        for variant in others:
            common = [env_id for env_id in source[base] if env_id in source[variant]]
            if where != "all":
                common = [env_id for env_id in common if env_id == where]
            if common:
                mine = [source[variant][env_id] for env_id in common]
                theirs = [source[base][env_id] for env_id in common]
                name = variant.removeprefix(script).strip()
                gain = difference(mine, theirs, CENTERS[center])
                rows.append((name, variant, len(common), gain))
        if rows and (where != "all" or len(raw[base]) > 1):
            data = intervals(rows).sort_values("value", ascending=False, kind="stable")
            found[where] = data.reset_index(drop=True)
    return found
