"""Statistics of reports: scores of runs -> one number and its 95 % bootstrap interval.

A score is one number per run. Scores of several environments are a list of arrays, one for each
environment. The bootstrap draws runs within their environment (stratified), as in Agarwal et al.
2021, https://arxiv.org/abs/2108.13264, whose library rliable the tests compare with.
"""

import numpy as np
from scipy.stats import bootstrap, mannwhitneyu, trim_mean

RESAMPLES = 2000
BATCH = 20_000_000  # numbers drawn at once: 160 MB a copy


def iqm(x, axis=None):
    """Interquartile mean: the mean of the middle half of x along axis.

    Of n values, the lowest and the highest floor(n / 4) are left out.
    """
    return trim_mean(x, 0.25, axis=axis)


CENTERS = {"iqm": iqm, "mean": np.mean}


def smooth(at, returns, grid, window):
    """A run's return along a grid -> (len(grid),).

    At each point it is the mean of the episodes that ended in (point - window, point]. If none did,
    it is the return of the last episode before. It is nan before the first episode that counts and
    after the last episode. at: (episodes,) steps at which they ended, ascending; returns:
    (episodes,), of which those that aren't finite don't count.
    """
    finite = np.isfinite(returns)
    if not finite.any():
        return np.full(len(grid), np.nan)
    end = at[-1]
    at = at[finite]
    returns = returns[finite]
    last = np.searchsorted(at, grid, side="right")
    first = np.clip(np.searchsorted(at, grid - window, side="right"), 0, np.maximum(last - 1, 0))
    sums = np.concatenate([[0.0], np.cumsum(returns)])
    mean = (sums[last] - sums[first]) / np.maximum(last - first, 1)
    return np.where((last > 0) & (grid <= end), mean, np.nan)


def interval(samples, statistic):
    """Bounds of the percentile bootstrap: (low, high), of the shape that statistic has.

    samples: arrays whose last axis is the runs, each resampled by itself; statistic: a function of
    all samples and of axis. A sample of a single run isn't resampled; all nan if no sample has two
    runs.
    """
    drawn_from = [i for i, sample in enumerate(samples) if sample.shape[-1] > 1]
    if not drawn_from:
        nothing = np.full(np.shape(statistic(*samples, axis=-1)), np.nan)
        return nothing, nothing

    def of_all(*drawn, axis):
        """The statistic of all samples. scipy only draws, and passes, those of several runs."""
        resamples = drawn[0].shape[:-1]
        every = [np.broadcast_to(x[..., None, :], (*resamples, x.shape[-1])) for x in samples]
        for i, sample in zip(drawn_from, drawn, strict=True):
            every[i] = sample
        return statistic(*every, axis=axis)

    several = [samples[i] for i in drawn_from]
    found = bootstrap(
        several,
        of_all,
        n_resamples=RESAMPLES,
        batch=max(1, BATCH // sum(sample.size for sample in several)),
        vectorized=True,
        method="percentile",
        axis=-1,
        rng=0,
    )
    return found.confidence_interval.low, found.confidence_interval.high


def estimate(samples, statistic):
    """(value, low, high) of a statistic, see interval()."""
    return statistic(*samples, axis=-1), *interval(samples, statistic)


def pooled(center):
    """A statistic: the center of the runs of all samples."""
    return lambda *samples, axis: center(np.concatenate(samples, axis), axis=axis)


def aggregate(scores, center):
    """(value, low, high) of the center of all environments' scores."""
    return estimate(scores, pooled(center))


def difference(scores, others, center):
    """(value, low, high) of the center of scores less that of others."""
    center_of = pooled(center)

    def statistic(*samples, axis):
        mine = center_of(*samples[: len(scores)], axis=axis)
        return mine - center_of(*samples[len(scores) :], axis=axis)

    return estimate([*scores, *others], statistic)


def improvement(scores, others):
    """Probability that a run of scores is better than one of others -> (value, low, high).

    Both have the same environments. It is Mann-Whitney's U divided by the number of pairs, averaged
    over the environments; ties count half.
    """

    def statistic(*samples, axis):
        pairs = zip(samples[: len(scores)], samples[len(scores) :], strict=True)
        shares = []
        for x, y in pairs:
            u = mannwhitneyu(x, y, axis=axis, method="asymptotic").statistic
            shares.append(u / (x.shape[axis] * y.shape[axis]))
        return np.mean(shares, axis=0)

    return estimate([*scores, *others], statistic)


def profile(scores, taus):
    """The share of runs with a score above each tau -> (value, low, high), each (len(taus),)."""
    return estimate([(x > taus[:, None]).astype(float) for x in scores], pooled(np.mean))


def normalise(scores, low, high):
    """Scores rescaled so that low becomes 0 and high 1; all 1 if low equals high."""
    if high > low:
        return (scores - low) / (high - low)
    return np.ones_like(scores)
