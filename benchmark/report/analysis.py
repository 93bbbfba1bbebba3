"""What a report computes: frames of benchmark.runs in, frames and plain values out.

Neither files nor figures are met here. Whatever depends on the order of runs (the bootstrap's
draws do) gets them from in_order, so that a report doesn't depend on the order of folders.
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

GRID = 101  # points of a curve
WINDOW = 0.05  # part of a curve's steps over which a point of it is the mean
MANY = 4  # variants above which not all pairs are compared
MANY_PAIRS = 30


def in_order(runs):
    """The runs by environment, variant, seed (1, 2, 10) and name."""
    seeds = runs["seed"].map(lambda seed: str(seed).zfill(9))
    order = ["env_id", "variant", "seed_text", "run", "place"]
    runs = runs.assign(seed_text=seeds, place=runs["folder"].map(str)).sort_values(
        order, kind="stable"
    )
    return runs.drop(columns=["seed_text", "place"]).reset_index(drop=True)


# Curves


def make_curves(runs, episodes, stored):
    """Each run's return along a grid -> DataFrame id, global_step, wall_seconds, return.

    episodes: id, global_step, wall_seconds, return of the runs that were read from folders; stored:
    the same of the curves of those that were read from CSVs. All runs of a variant in an
    environment have one grid, from 0 to the last step of the longest; a run has no row where its
    curve has no value.
    """
    finite = episodes[np.isfinite(episodes["return"])]
    measured = {key: own for key, own in episodes.groupby("id") if key in set(finite["id"])}
    known = dict(iter(stored.groupby("id")))
    parts = [pd.DataFrame(columns=["id", "global_step", "wall_seconds", "return"], dtype=float)]
    for _, group in runs.groupby(["env_id", "variant"], sort=False):
        sources = {key: measured.get(key, known.get(key)) for key in group["id"]}
        sources = {key: own for key, own in sources.items() if own is not None}
        last = max((own["global_step"].iloc[-1] for own in sources.values()), default=0)
        grid = np.linspace(0, last or 1, GRID)
        for key, own in sources.items():
            curve = smoothed(own, grid) if key in measured else resampled(own, grid)
            parts.append(curve.assign(id=key).dropna(subset="return"))
    # An empty part would make pandas guess dtypes
    curves = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    return curves[["id", "global_step", "wall_seconds", "return"]]


def smoothed(episodes, grid):
    """A run's episodes -> its curve along grid, nan before the first and after the last."""
    steps = episodes["global_step"].to_numpy(float)
    wall = episodes["wall_seconds"].to_numpy(float)
    values = smooth(steps, episodes["return"].to_numpy(float), grid, WINDOW * grid[-1])
    times = np.interp(grid, [0, *steps], [0, *wall])
    return pd.DataFrame({"global_step": grid, "wall_seconds": times, "return": values})


def resampled(curve, grid):
    """A stored curve along another grid; on its own it is the same, but for its rounding."""
    steps = curve["global_step"].to_numpy(float)
    rounding = 1e-6 * grid[-1]
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

    It is given at the points at which all of the runs have a value; wall_seconds is their median
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


def curve_data(runs, curves, published, x, center):
    """The data of blocks.Curves for the runs of one environment.

    published: [(label, mean)]; x: "steps" or "wall_time". It has only published rows where no run
    has a curve.
    """
    at = {"steps": "global_step", "wall_time": "wall_seconds"}[x]
    series = unique_names(runs)
    parts = []
    for variant, group in runs.groupby("variant", sort=False):
        own = curves[curves["id"].isin(group["id"])]
        averaged = group.loc[group["score"].notna(), "id"]
        for key in group["id"]:
            run = own[own["id"] == key]
            kind = "finished" if key in set(averaged) else "unfinished"
            part = pd.DataFrame({x: run[at], "value": run["return"]})
            parts.append(part.assign(variant=variant, series=series[key], kind=kind))
        middle = center_of(own[own["id"].isin(averaged)], center).rename(columns={at: x})
        parts.append(middle.assign(variant=variant, series=center, kind="center"))
    data = pd.concat([part for part in parts if len(part)] or parts[:1]).dropna(subset=[x, "value"])
    lines = pd.DataFrame(published, columns=["series", "value"])
    lines = lines.assign(variant="published", kind="published")
    data = pd.concat([part for part in (data, lines) if len(part)] or [data], ignore_index=True)
    data = data.reindex(columns=[x, "variant", "series", "kind", "value", "low", "high"])
    return data.astype({x: float, "value": float}).round({x: 3, "value": 6, "low": 6, "high": 6})


def unique_names(runs):
    """{id: name} of runs; of several that have one name, all but the first get a number."""
    count = runs.groupby("run").cumcount()
    return {
        key: name if number == 0 else f"{name} ({number + 1})"
        for key, name, number in zip(runs["id"], runs["run"], count)
    }


# Tables


def summarise(group):
    """What the table of an environment says of a variant's runs.

    "runs": all of them, "seeds": those with a score; "scores", "evaluations": (n,) of the finished
    ones; "iqm": (value, low, high); "steps_per_second", "wall_seconds": medians, nan without any.
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
    """("HalfCheetah", "v5") of HalfCheetah-v5; ("Name", "") where there is none."""
    found = re.fullmatch(r"(.*)-(v\d+)", env_id)
    return found.groups() if found else (env_id, "")


def published_of(published, script, env_id):
    """The rows of published.csv for a script and an environment of any version."""
    name = split_version(env_id)[0]
    same = published["env_id"].map(lambda other: split_version(other)[0] == name)
    return published[same.astype(bool) & (published["algorithm"] == script)]


# Statistics over environments: raw and scaled scores are {variant: {env_id: (runs,) scores}}


def scores_of(runs):
    """{variant: {env_id: (runs,) scores}}; variants and environments without any are left out."""
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

    Only environments count that both have; a pair without any has no row -> data of Intervals.
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
    """{family: variant that is the family's script with its defaults}, where there is one."""
    found = runs[runs["base"].astype(bool)]
    return {
        family: min(own["variant"].unique(), key=len) for family, own in found.groupby("family")
    }


def pairs_to_compare(runs, scaled):
    """(pairs of variants, whether these are all there are).

    Dozens of pairs would be no figure. Of many variants those are paired that say most: defaults
    with each other, other variants with their family's defaults (with all defaults where it has
    none) and with those that differ only by their mark.
    """
    pairs = list(combinations(scaled, 2))
    base_of = {key: base for key, base in bases(runs).items() if base in scaled}
    defaults = list(base_of.values())
    few = len(scaled) <= MANY or (not defaults and len(pairs) <= MANY_PAIRS)
    if few:
        return pairs, True
    variants = runs.drop_duplicates("variant").set_index("variant")
    plain = {x: x.removesuffix(variants.at[x, "mark"]) for x in scaled}
    beside = {}
    for x in scaled:
        own = base_of.get(variants.at[x, "family"])
        beside[x] = [own] if own and x != own else defaults
    chosen = [
        (y, x) if x in defaults and y not in defaults else (x, y)
        for x, y in pairs
        if x in beside[y] or y in beside[x] or plain[x] == plain[y]
    ]
    return chosen, len(chosen) == len(pairs)


def ablation(raw, scaled, script, base, others, center):
    """What each of others gains on base: {env_id, or "all" environments: data of Intervals}.

    The gain is in returns in one environment, in normalised scores in all; the best is first.
    Environments without both are left out, and "all" where base has only one.
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
