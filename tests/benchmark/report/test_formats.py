"""Numbers as texts."""

import numpy as np

from benchmark.report import formats


def test_numbers_have_the_digits_that_are_read():
    assert [formats.number(x) for x in (1442.6, -88.84, 6.714)] == ["1,443", "-88.8", "6.71"]
    assert formats.number(46.03, like=1442.6) == "46"


def test_mean_and_deviation_have_the_digits_of_the_larger():
    assert formats.mean_std([1.0, 201.0]) == "101.0 +- 100.0"
    assert formats.mean_std([-20.5, 21.0]) == "0.2 +- 20.8"
    assert formats.mean_std([3.0, np.nan]) == "3.00"
    assert formats.mean_std([]) == "-"


def test_interval_has_the_digits_of_its_largest_number():
    assert formats.with_interval(950.0, 20.0, 1100.0) == "950 [20, 1,100]"
    assert formats.with_interval(7.0, np.nan, np.nan) == "7.00 [one seed]"
    assert formats.with_interval(np.nan, np.nan, np.nan) == "-"


def test_times_are_read_in_their_unit():
    units = [formats.unit_of(seconds) for seconds in (299, 300, 10799, 10800)]
    assert units == [("s", 1), ("minutes", 60), ("minutes", 60), ("hours", 3600)]
