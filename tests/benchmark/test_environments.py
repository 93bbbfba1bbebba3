"""The environments of benchmark.environments."""

import gymnasium as gym
import numpy as np
import pytest

import benchmark.environments  # noqa: F401 (registers them)

MASKED = {
    "MaskedCartPole-v1": ("CartPole-v1", [0, 2]),
    "MaskedPendulum-v1": ("Pendulum-v1", [0, 1]),
    "MaskedHalfCheetah-v5": ("HalfCheetah-v5", range(8)),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_environments_are_gymnasiums_without_velocities(name):
    """The same episodes and time limits, with observations of positions alone."""
    env_id, seen = MASKED[name]
    seen = list(seen)
    masked, whole = gym.make(name), gym.make(env_id)
    assert masked.spec.max_episode_steps == whole.spec.max_episode_steps
    space = whole.observation_space
    low, high = space.low[seen], space.high[seen]
    assert masked.observation_space == gym.spaces.Box(low, high, dtype=space.dtype)
    assert np.array_equal(masked.reset(seed=3)[0], whole.reset(seed=3)[0][seen])
    whole.action_space.seed(3)
    for _ in range(12):
        action = whole.action_space.sample()
        (obs, *rest), (expected, *others) = masked.step(action), whole.step(action)
        assert obs.dtype == space.dtype and np.array_equal(obs, expected[seen]) and rest == others
