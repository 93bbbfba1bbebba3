"""Statistics of reports, by hand, by closed forms and by rliable's published definitions."""

import numpy as np
import pandas as pd
import pytest
from rliable import library, metrics
from scipy.stats import trim_mean

from benchmark.report import stats


def test_iqm_is_the_mean_without_the_lowest_and_highest_quarter():
    assert stats.iqm([np.array([100.0, 1, 2, 7]), np.array([3.0, 4, 6, 5])])[0] == 4.5
    assert stats.iqm([np.array([1.0, 2, 9])])[0] == 4  # floor(3 / 4) = 0: nothing is left out


def test_middle_mean_is_scipys_of_each_column():
    x = np.random.default_rng(2).normal(size=(10, 5))
    assert stats.middle_mean(x) == pytest.approx(trim_mean(x, 0.25, axis=0))


def test_estimates_are_rliables():
    """Its README's call, on scores of (runs, tasks): values equal, bounds but for the draws."""
    scores = np.random.default_rng(3).gamma(2.0, 0.5, (10, 4))
    others = np.random.default_rng(4).gamma(3.0, 0.4, (10, 4))
    theirs, intervals = library.get_interval_estimates(
        {"x": scores}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=2000
    )
    value, low, high = stats.iqm(list(scores.T))
    assert value == pytest.approx(theirs["x"][0])
    assert (low, high) == pytest.approx(tuple(intervals["x"][:, 0]), abs=0.1 * (high - low))
    value = stats.improvement(list(scores.T), list(others.T))[0]
    assert value == pytest.approx(metrics.probability_of_improvement(scores, others))
    found, _ = library.create_performance_profile({"x": scores}, stats.TAUS, reps=2)
    assert stats.profile(list(scores.T))[0].tolist() == pytest.approx(found["x"].tolist())


def test_interval_covers_95_percent():
    """That of the middle of many normal runs: 1.96 standard errors of it to each side."""
    x = np.random.default_rng(1).normal(10, 2, 400)
    value, low, high = stats.iqm([x])
    # The variance of a trimmed mean: of x cut at the quartiles, by (1 - 2 * 0.25)**2
    cut = np.clip(x, *np.quantile(x, [0.25, 0.75]))
    error = cut.std() / 0.5 / 20
    expected = (value - 1.96 * error, value + 1.96 * error)
    assert (low, high) == pytest.approx(expected, abs=0.15 * error)


def test_the_same_scores_have_the_same_interval():
    x = [np.random.default_rng(1).normal(size=6)]
    assert stats.iqm(x) == stats.iqm(x)


def test_bootstrap_keeps_environments_apart():
    """Whatever runs are drawn, half of them are of each environment."""
    assert stats.iqm([np.zeros(4), np.ones(4)]) == (0.5, 0.5, 0.5)
    low, high = stats.iqm([np.array([0.0, 0, 0, 0, 1, 1, 1, 1])])[1:]
    assert low < 0.5 < high


def test_one_seed_has_no_interval():
    value, low, high = stats.iqm([np.array([7.0]), np.array([8.0])])
    assert value == 7.5 and np.isnan(low) and np.isnan(high)
    value, low, high = stats.iqm([np.array([1.0, 2, 3]), np.array([5.0])])
    assert value == 2.5 and low < 2.5 < high  # one of two stays as it is


def test_gain_is_the_difference_of_iqms():
    value, low, high = stats.gain([np.array([1.0, 2, 3, 4, 5, 6, 7, 100])], [np.array([0.0, 5])])
    assert value == 4.5 - 2.5 and low < 2 < high
    ones = [np.ones(3), np.ones(2)]
    assert stats.gain([np.full(3, 5.0), np.full(2, 5.0)], ones) == (4, 4, 4)


def test_improvement_counts_pairs_and_averages_environments():
    """Of 3 by 2 pairs 3 are better and one is a tie; in the second environment all 4 are better."""
    scores = [np.array([1.0, 3, 5]), np.array([2.0, 2])]
    value, low, high = stats.improvement(scores, [np.array([2.0, 3]), np.array([1.0, 1])])
    assert value == pytest.approx((3.5 / 6 + 1) / 2)
    assert 0.5 <= low < value < high <= 1
    assert stats.improvement([np.ones(3)], [np.ones(3)]) == (0.5, 0.5, 0.5)


def test_profile_is_the_share_of_runs_above_tau():
    value, low, high = stats.profile([np.array([0.0, 0.5, 1.0]), np.array([0.605, 0.205])])
    shares = dict(zip(stats.TAUS.round(2), value))
    assert [shares[tau] for tau in (0, 0.5, 0.6, 0.61, 1)] == [0.8, 0.4, 0.4, 0.2, 0]
    assert low[50] < 0.4 < high[50] and low[100] == high[100] == 0


# Curves


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


def series(run, steps, returns):
    columns = {"run": run, "global_step": steps, "wall_seconds": np.divide(steps, 10.0)}
    return pd.DataFrame(columns | {"return": np.array(returns, float)})


def test_curves_of_a_variant_share_a_grid_whether_stored_or_not(make_runs):
    """To the last step of the longest; between the points of a stored one there are straight lines;
    each is as long as its run, and has its wall time.
    """
    runs = make_runs({}, {}, {"stored": True}, {"env_id": "Acrobot-v1"})
    parts = [
        series("run0", [100.0, 200.0], [1.0, 3.0]),
        series("run1", [400.0], [5.0]),
        series("run2", [100.0, 300.0], [0.0, 20.0]),
        series("run3", [7.0], [1.0]),
    ]
    curves = stats.curves(runs, pd.concat(parts)).set_index(["run", "global_step"])
    assert curves.loc["run0"].index.tolist() == list(range(100, 204, 4))
    assert curves.loc[("run0", 160), "return"] == 1.0  # the last before
    assert curves.loc[("run0", 200), "return"] == 3.0
    assert curves.loc["run1"].index.tolist() == [400]
    assert curves.loc[("run2", 160), "return"] == pytest.approx(6.0)
    assert curves.loc[("run2", 160), "wall_seconds"] == pytest.approx(16.0)
    assert curves.loc["run2"].index.tolist() == list(range(100, 304, 4))
    assert curves.loc["run3"].index.tolist() == [7]


def test_center_is_of_runs_with_a_score_where_all_have_a_curve(make_runs):
    rows = [{"last_100": 1.0}] * 4 + [{"state": "unfinished"}]
    parts = [series(f"run{i}", [10, 20, 30], [i, 10.0 * i, 7.0]) for i in (0, 1, 2, 4)]
    parts.append(series("run3", [10, 20], [99.0, 990.0]))  # which the interquartile mean leaves out
    center = stats.centers(make_runs(*rows), pd.concat(parts))
    assert center["global_step"].tolist() == [10, 20]
    assert center["value"].tolist() == [1.5, 15] and center["wall_seconds"].tolist() == [1, 2]
    assert (center["low"] < center["value"]).all() and (center["value"] < center["high"]).all()
    assert set(center["variant"]) == {"vpg"}
    assert stats.centers(make_runs({"state": "failed"}), parts[0]).empty


# Scores over environments


@pytest.fixture
def several(make_runs):
    """Defaults and two variants in environments A and B, ten seeds; one variant has no B."""
    rows = []
    for seed in range(10):
        for env_id, scale in (("A-v0", 10.0), ("B-v0", -1.0)):
            run = {"env_id": env_id, "seed": str(seed)}
            rows.append(run | {"last_100": scale * seed, "base": True})
            rows.append(run | {"last_100": scale * 9, "variant": "vpg best"})
        rows.append(run | {"env_id": "A-v0", "last_100": 0.0, "variant": "vpg awful"})
    return make_runs(*(rows + [{"env_id": "A-v0", "last_100": 999.0, "state": "unfinished"}]))


def test_scores_are_normalised_in_each_environment(several, make_runs):
    found = stats.scores_of(stats.normalised(several), "normalised")
    assert found["vpg"]["A-v0"].tolist() == pytest.approx(np.arange(10) / 9)
    assert found["vpg"]["B-v0"].tolist() == pytest.approx(1 - np.arange(10) / 9)
    assert found["vpg best"]["B-v0"].tolist() == [0.0] * 10
    constant = make_runs({"last_100": 3.0}, {"last_100": 3.0})
    assert stats.normalised(constant)["normalised"].tolist() == [1.0, 1.0]


def test_aggregates_and_profiles_are_over_all_environments_of_a_variant(several, quick):
    found = stats.aggregates(several).set_index("variant")
    assert found["environments"].to_dict() == {"vpg": 2, "vpg best": 2, "vpg awful": 1}
    assert found["value"].to_dict() == pytest.approx({"vpg": 0.5, "vpg best": 0.5, "vpg awful": 0})
    assert set(stats.profiles(several)) == set(found.index)
    assert stats.profiles(several)["vpg best"][0][:2].tolist() == [0.5, 0.5]


def test_improvements_are_over_the_environments_that_both_have(several, quick):
    found = stats.improvements(several).set_index("name")
    assert found["environments"].to_dict() == {
        "vpg > vpg awful": 1,
        "vpg > vpg best": 2,
        "vpg awful > vpg best": 1,
    }
    assert found.loc["vpg > vpg awful", "value"] == pytest.approx(0.95)  # one of ten ties
    assert found.loc["vpg awful > vpg best", "high"] == 0


def test_of_many_variants_the_telling_pairs_are_compared(make_runs):
    names = ["vpg", "vpg a", "vpg b", "vpg c", "vpg c (old)"]
    runs = make_runs(*({"variant": name, "base": name == "vpg"} for name in names))
    assert len(stats.compared_pairs(runs, names[:4])) == 6
    expected = [("vpg", name) for name in names[1:]] + [("vpg c", "vpg c (old)")]
    assert stats.compared_pairs(runs, names) == expected


def test_gains_are_on_the_defaults_the_best_first(several):
    found = stats.gains(several)
    assert found["name"].tolist() == ["best", "awful"] and set(found["base"]) == {"vpg"}
    assert found["value"].tolist() == pytest.approx([0.0, -0.5])
    for runs in (several, several[::-1]):  # the best is the first or the last of the runs
        chances = stats.gains(runs)["chance"].tolist()
        assert [x[0] for x in chances] == pytest.approx([0.5, 0.05])
    alone = several[several["env_id"] == "A-v0"]
    assert stats.gains(alone).empty
