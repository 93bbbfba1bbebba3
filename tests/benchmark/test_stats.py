"""Statistics of reports, by closed forms, by hand and against rliable."""

import tracemalloc

import numpy as np
import pytest
from rliable import library, metrics

from benchmark import stats

pytestmark = pytest.mark.filterwarnings("ignore:random_state is deprecated:FutureWarning")


def test_iqm_is_the_mean_without_the_lowest_and_highest_quarter():
    assert stats.iqm(np.array([100.0, 1, 2, 7, 3, 4, 6, 5])) == 4.5
    assert stats.iqm(np.array([1.0, 2, 9])) == 4  # floor(3 / 4) = 0: nothing is left out
    assert stats.iqm(np.array([[0.0, 1, 2, 90], [4, 5, 6, 7]]), axis=1).tolist() == [1.5, 5.5]


def test_improvement_counts_pairs_and_averages_environments():
    """Of 3 by 2 pairs 3 are better and one is a tie; in the second environment all 4 are better."""
    value, low, high = stats.improvement(
        [np.array([1.0, 3, 5]), np.array([2.0, 2])], [np.array([2.0, 3]), np.array([1.0, 1])]
    )
    assert value == pytest.approx((3.5 / 6 + 1) / 2)
    assert 0.5 <= low < value < high <= 1
    assert stats.improvement([np.ones(3)], [np.ones(3)]) == (0.5, 0.5, 0.5)


def test_interval_of_a_constant_is_that_constant():
    for center in stats.CENTERS.values():
        assert stats.aggregate([np.full(5, 3.0), np.full(4, 3.0)], center) == (3, 3, 3)


def test_interval_covers_95_percent():
    """That of a mean of many runs is the normal one: 1.96 standard errors to each side."""
    x = np.random.default_rng(1).normal(10, 2, 400)
    found = stats.aggregate([x], np.mean)
    error = x.std() / 20
    expected = (x.mean(), x.mean() - 1.96 * error, x.mean() + 1.96 * error)
    assert found == pytest.approx(expected, abs=0.15 * error)


def test_bootstrap_keeps_environments_apart():
    """Whatever runs are drawn, half of them are of each environment.

    In one all have 0, in the other all have 1.
    """
    assert stats.aggregate([np.zeros(3), np.ones(3)], np.mean) == (0.5, 0.5, 0.5)
    together = stats.aggregate([np.array([0.0, 0, 0, 1, 1, 1])], np.mean)
    assert together[1] < 0.5 < together[2]


def test_one_seed_has_no_interval():
    value, low, high = stats.aggregate([np.array([7.0])], stats.iqm)
    assert value == 7 and np.isnan(low) and np.isnan(high)


def test_one_seed_in_one_of_two_environments_stays_as_it_is():
    value, low, high = stats.aggregate([np.array([1.0, 2, 3]), np.array([5.0])], np.mean)
    assert value == 2.75 and (low, high) == (2.0, 3.5)  # three times 1, three times 3, and the 5
    shares = stats.profile([np.array([0.0, 1.0]), np.array([1.0])], np.array([0.5, -1.0]))
    assert np.array(shares).T.tolist() == [pytest.approx([2 / 3, 1 / 3, 1]), [1, 1, 1]]


def test_difference_of_centers():
    """IQM 4.5 less IQM 2.5, of means another; constants have no spread."""
    mine = np.array([1.0, 2, 3, 4, 5, 6, 7, 100])
    base = np.array([0.0, 2, 3, 40])
    value, low, high = stats.difference([mine], [base], stats.iqm)
    assert value == 2 and low < 2 < high
    assert stats.difference([mine], [base], np.mean)[0] == 16 - 11.25
    assert stats.difference([np.full(3, 5.0)], [np.full(3, 2.0)], np.mean) == (3, 3, 3)
    scores = [np.zeros(3), np.ones(3)]
    others = [np.ones(3), np.full(3, 3.0)]
    assert stats.difference(scores, others, np.mean) == (-1.5, -1.5, -1.5)


def test_profile_is_the_share_of_runs_above_tau():
    scores = [np.array([0.0, 0.5, 1.0]), np.array([0.6, 0.2])]
    value, low, high = stats.profile(scores, np.array([-1, 0.5, 0.55, 1]))
    assert value.tolist() == pytest.approx([1, 2 / 5, 2 / 5, 0])
    assert low[0] == high[0] == 1 and low[1] < 0.4 < high[1]


def test_a_profile_of_all_of_atari_fits_into_memory():
    tracemalloc.start()
    runs = np.random.default_rng(0).normal(size=(57, 10))
    value, low, high = stats.profile(list(runs), np.linspace(-1, 1, 101))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 600e6  # all resamples at once take 1.8 GB
    deviation = np.sqrt(value * (1 - value) / 570)
    np.testing.assert_allclose(high - low, 2 * 1.96 * deviation, rtol=0.15)


def test_normalise():
    assert stats.normalise(np.array([10.0, 15, 20]), 10, 20).tolist() == [0, 0.5, 1]
    assert stats.normalise(np.array([3.0, 3]), 3, 3).tolist() == [1, 1]


def test_smooth_is_the_mean_over_a_window_before_each_point():
    """Nothing before the first episode and after the last.

    The one before where none ended in the window.
    """
    at = np.array([10.0, 20, 30, 40, 90])
    returns = np.array([1.0, 2, 3, 10, 20])
    values = stats.smooth(at, returns, np.array([0.0, 10, 25, 35, 40, 60, 90, 91]), 20)
    assert np.isnan(values[[0, 7]]).all()
    assert values[1:7].tolist() == [1, 1.5, 2.5, 6.5, 10, 20]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_smooth_leaves_out_returns_that_are_not_finite(bad):
    at = np.array([10.0, 20, 30, 40])
    grid = np.array([10.0, 20, 25, 30, 40, 41])
    values = stats.smooth(at, np.array([1.0, bad, 3, bad]), grid, 20)
    assert values[:5].tolist() == [1, 1, 1, 3, 3] and np.isnan(values[5])
    assert np.isnan(stats.smooth(at, np.full(4, bad), grid, 20)).all()


# Against rliable, the library of Agarwal et al. Its scores are (runs, environments)

TAUS = np.linspace(0, 3, 7)


@pytest.fixture
def scores():
    """(runs, environments) of two variants."""
    rng = np.random.default_rng(3)
    return rng.gamma(2.0, 0.5, (10, 4)), rng.gamma(3.0, 0.4, (10, 4))


def rliables(scores, statistic):
    """rliable's (value, low, high) of a statistic of scores."""
    points, intervals = library.get_interval_estimates(
        {"x": scores}, statistic, reps=500, random_state=np.random.RandomState(0)
    )
    return points["x"], *intervals["x"]


def assert_alike(found, expected):
    """Values are equal; bounds of random resamples lie within a tenth of the interval's width."""
    found = np.array(found).reshape(3, -1)
    expected = np.array(expected).reshape(3, -1)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-12)
    width = expected[2] - expected[1]
    assert (np.abs(found[1:] - expected[1:]) <= 0.1 * width + 1e-12).all()


@pytest.mark.parametrize(
    "center, theirs", [("iqm", metrics.aggregate_iqm), ("mean", metrics.aggregate_mean)]
)
def test_aggregate_is_rliables(scores, center, theirs):
    found = stats.aggregate(list(scores[0].T), stats.CENTERS[center])
    assert_alike(found, rliables(scores[0], lambda x: np.array([theirs(x)])))


def test_profile_is_rliables(scores):
    def theirs(x):
        return np.array([library.run_score_deviation(x, tau) for tau in TAUS])

    found = stats.profile(list(scores[0].T), TAUS)
    assert_alike(found, rliables(scores[0], theirs))


def test_improvement_is_rliables(scores):
    def theirs(x, y):
        return np.array([metrics.probability_of_improvement(x, y)])

    found = stats.improvement(list(scores[0].T), list(scores[1].T))
    assert_alike(found, rliables(scores, theirs))


def test_difference_is_that_of_rliables_centers(scores):
    def theirs(x, y):
        return np.array([metrics.aggregate_iqm(x) - metrics.aggregate_iqm(y)])

    found = stats.difference(list(scores[0].T), list(scores[1].T), stats.iqm)
    assert_alike(found, rliables(scores, theirs))
