"""Statistics of a report: rliable's, and the smoothing of curves.

Scores are lists of arrays (runs,), one for each environment, which may have different numbers of
runs. An estimate is (value, low, high): low and high are the ends of rliable's stratified 95 %
bootstrap interval, as in Agarwal et al. 2021, https://arxiv.org/abs/2108.13264.
"""

from itertools import combinations

import numpy as np
import pandas as pd
from rliable import library

RESAMPLES = 2000
POINTS = 101  # of a curve
WINDOW = 0.05  # part of a curve's steps over which each of its points is the mean
TAUS = np.linspace(0, 1, 101)
FEW_VARIANTS = 4  # up to so many are compared in all pairs


def estimate(samples, statistic):
    """The estimate of statistic(*samples); NaN stand for the interval if all have one run."""

    def flat(*drawn):
        return np.atleast_1d(statistic(*drawn))

    np.random.seed(0)  # rliable draws from numpy's global generator
    values, intervals = library.get_interval_estimates({"": samples}, flat, reps=RESAMPLES)
    low, high = intervals[""]
    if max(map(len, samples)) < 2:
        low = high = np.full_like(low, np.nan)
    return tuple(np.squeeze(x)[()] for x in (values[""], low, high))


def middle_mean(x):
    """The interquartile mean along the first axis, as in rliable and scipy.stats.trim_mean.

    With their checks of what they are given, resampling takes several times as long.
    """
    cut = len(x) // 4
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def pooled_iqm(*scores):
    return middle_mean(np.concatenate(scores))


def iqm(scores):
    """The interquartile mean of all environments' scores -> estimate."""
    return estimate(scores, pooled_iqm)


def gain(scores, others):
    """The interquartile mean of scores less that of others -> estimate."""
    n = len(scores)
    return estimate([*scores, *others], lambda *x: pooled_iqm(*x[:n]) - pooled_iqm(*x[n:]))


def improvement(scores, others):
    """Probability that a run of scores beats one of others in the same environment -> estimate."""
    n = len(scores)

    def probability(*x):
        columns = [own[:, None] for own in x[:n]]
        both = zip(columns, x[n:], strict=True)
        return np.mean([np.mean((own > other) + (own == other) / 2) for own, other in both])

    return estimate([*scores, *others], probability)


def profile(scores):
    """The share of runs above each of TAUS -> estimate of arrays."""
    return estimate(scores, lambda *x: library.score_distributions(np.concatenate(x), TAUS))


# Curves


def smooth(steps, returns, grid, window):
    """A run's return along a grid -> (len(grid),).

    At each point it is the mean of the episodes that ended in (point - window, point]. If none did,
    it is the return of the last episode before. It is NaN before the first episode and after the
    last. steps: (episodes,), ascending; returns: (episodes,), those that aren't finite don't count.
    """
    finite = np.isfinite(returns)
    if not finite.any():
        return np.full(len(grid), np.nan)
    at = steps[finite]
    last = np.searchsorted(at, grid, side="right")
    first = np.clip(np.searchsorted(at, grid - window, side="right"), 0, np.maximum(last - 1, 0))
    sums = np.concatenate([[0.0], np.cumsum(returns[finite])])
    means = (sums[last] - sums[first]) / np.maximum(last - first, 1)
    return np.where((last > 0) & (grid <= steps[-1]), means, np.nan)


def curves(runs, episodes):
    """Each run's return along a grid -> frame with the columns of episodes.

    The runs of a variant in an environment share a grid, from 0 to the last step of the longest.
    A run has no row where its curve has no value.
    """
    parts = [episodes[:0]]
    own = dict(iter(episodes.groupby("run")))
    for _, group in runs[runs["run"].isin(own)].groupby(["env_id", "variant"]):
        last = max(own[run]["global_step"].iloc[-1] for run in group["run"])
        grid = np.linspace(0, last, POINTS).round(2)  # as a CSV can hold it
        for run, is_stored in zip(group["run"], group["stored"], strict=True):
            steps, walls, returns = (own[run][name].to_numpy() for name in list(episodes)[1:])
            if is_stored:
                values = np.interp(grid, steps, returns, left=np.nan, right=np.nan)
            else:
                values = smooth(steps, returns, grid, WINDOW * last)
            times = np.interp(grid, [0, *steps], [0, *walls])
            columns = {"run": run, "global_step": grid, "wall_seconds": times, "return": values}
            parts.append(pd.DataFrame(columns).dropna(subset="return"))
    return pd.concat(parts, ignore_index=True)


def centers(runs, curves):
    """The interquartile mean of the curves of each variant's runs with a score, where all go.

    -> frame of env_id, variant, global_step, wall_seconds (their median), value, low, high.
    """
    names = ["env_id", "variant", "global_step", "wall_seconds", "value", "low", "high"]
    parts = [pd.DataFrame(columns=names).astype(dict.fromkeys(names[2:], float))]
    scored = curves.merge(runs.dropna(subset="score")[["run", "env_id", "variant"]])
    for (env_id, variant), own in scored.groupby(["env_id", "variant"]):
        table = own.pivot(index="global_step", columns="run")
        table = table[table["return"].notna().all(axis=1)]
        if table.empty:
            continue
        values = table["return"].to_numpy().T
        value, low, high = estimate([values], middle_mean)
        part = {"env_id": env_id, "variant": variant, "global_step": table.index}
        part["wall_seconds"] = table["wall_seconds"].median(axis=1, skipna=False).to_numpy()
        parts.append(pd.DataFrame(part | {"value": value, "low": low, "high": high}))
    return pd.concat(parts, ignore_index=True)


# Scores over environments


def scores_of(runs, column="score"):
    """{variant: {env_id: (runs,) scores}} of the runs that have a score."""
    scores = {}
    for (variant, env_id), own in runs.dropna(subset="score").groupby(["variant", "env_id"]):
        scores.setdefault(variant, {})[env_id] = own[column].to_numpy()
    return scores


def normalised(runs):
    """runs with the column normalised: 0 is an environment's lowest score and 1 its highest."""
    by_env = runs.groupby("env_id")["score"]
    low = by_env.transform("min")
    width = by_env.transform("max") - low
    return runs.assign(normalised=((runs["score"] - low) / width).where(width > 0, 1.0))


def bases(runs):
    """{script: its variant with the defaults, of several the first by name}."""
    return runs[runs["base"]].groupby("script")["variant"].min().to_dict()


def compared_pairs(runs, variants):
    """The pairs of variants to compare.

    Of many, it is those with a script's defaults, and those of a variant with that of --compare.
    """
    pairs = list(combinations(sorted(variants), 2))
    if len(variants) <= FEW_VARIANTS:
        return pairs
    defaults = set(bases(runs).values())
    return [(x, y) for x, y in pairs if defaults & {x, y} or y.startswith(f"{x} (")]


def shared(scores, x, y):
    """The scores of two variants in the environments that both have -> two lists."""
    env_ids = [env_id for env_id in scores[x] if env_id in scores[y]]
    return [scores[x][env_id] for env_id in env_ids], [scores[y][env_id] for env_id in env_ids]


def intervals(rows):
    """Rows (name, variant, number of environments, *estimate) as a frame."""
    names = ["name", "variant", "environments", "value", "low", "high"]
    return pd.DataFrame(rows, columns=names).astype(dict.fromkeys(names[3:], float))


def aggregates(runs):
    """The interquartile mean of each variant's normalised scores -> frame of intervals()."""
    scores = scores_of(normalised(runs), "normalised")
    return intervals((x, x, len(own), *iqm(list(own.values()))) for x, own in scores.items())


def profiles(runs):
    """Performance profiles -> {variant: estimate at each of TAUS}."""
    scores = scores_of(normalised(runs), "normalised")
    return {variant: profile(list(own.values())) for variant, own in scores.items()}


def improvements(runs):
    """Probabilities of improvement -> frame of intervals()."""
    scores = scores_of(runs)
    rows = []
    for x, y in compared_pairs(runs, scores):
        mine, theirs = shared(scores, x, y)
        if mine:
            rows.append((f"{x} > {y}", x, len(mine), *improvement(mine, theirs)))
    return intervals(rows)


def gains(runs):
    """What variants gain on their script's defaults -> frame of intervals(), chance and base.

    Gains are in normalised scores, over the environments that both have; chance is the estimate of
    improvement(). Where defaults have scores in one environment only there are none.
    """
    scores = scores_of(normalised(runs), "normalised")
    parts = [intervals([]).assign(chance="", base="")]
    for script, base in bases(runs).items():
        rows = []
        chances = []
        for variant in runs.loc[runs["script"] == script, "variant"].unique():
            if variant == base or len(scores.get(base, ())) < 2 or variant not in scores:
                continue
            mine, theirs = shared(scores, variant, base)
            if mine:
                name = variant.removeprefix(script).strip()
                rows.append((name, variant, len(mine), *gain(mine, theirs)))
                chances.append(improvement(mine, theirs))
        part = intervals(rows).assign(chance=chances, base=base)
        parts.append(part.sort_values("value", ascending=False))
    return pd.concat(parts, ignore_index=True)
