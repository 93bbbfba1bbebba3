"""Numbers as texts, for tables and figures."""

import numpy as np


def number(x, like=None):
    """A return to read: 1,443, 88.8 or -6.71; with the digits that like would have, if given."""
    size = abs(x if like is None else like)
    if size >= 1000:
        return f"{x:,.0f}"
    if size >= 10:
        return f"{x:.1f}"
    return f"{x:.2f}"


def with_interval(value, low, high):
    """A value and the bounds of its interval, which are nan where there is one seed."""
    if np.isnan(value):
        return "-"
    size = np.nanmax(np.abs([value, low, high]))
    if np.isnan(low):
        return f"{number(value, size)} [one seed]"
    return f"{number(value, size)} [{number(low, size)}, {number(high, size)}]"


def mean_std(values):
    """Mean +- standard deviation (ddof=0), both with the digits of the larger.

    A single value stands alone, no value is "-"; nan counts as missing.
    """
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    if len(values) == 0:
        return "-"
    if len(values) == 1:
        return number(values[0])
    mean = np.mean(values)
    with np.errstate(invalid="ignore"):  # values may be infinite
        std = np.std(values)
    like = np.nanmax([abs(mean), std])
    return f"{number(mean, like)} +- {number(std, like)}"


def unit_of(seconds):
    """A readable unit for a duration -> (its name, its length in seconds)."""
    if seconds < 300:
        return "s", 1
    if seconds < 3 * 3600:
        return "minutes", 60
    return "hours", 3600
