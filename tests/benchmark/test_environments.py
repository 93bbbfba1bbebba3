"""The environments of benchmark.environments."""

import gymnasium as gym

from benchmark.environments import MaskedCartPole


def test_masked_cartpole_is_cartpole_without_its_velocities():
    """The same episodes, of which positions alone are seen; a time limit of 500 steps."""
    masked, whole = gym.make("MaskedCartPole-v1", disable_env_checker=True), gym.make("CartPole-v1")
    assert isinstance(masked.unwrapped, MaskedCartPole) and masked.spec.max_episode_steps == 500
    assert masked.observation_space == gym.spaces.Box(
        *(x[[0, 2]] for x in (whole.observation_space.low, whole.observation_space.high))
    )
    assert (masked.reset(seed=3)[0] == whole.reset(seed=3)[0][[0, 2]]).all()
    for action in [0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]:
        (obs, *rest), (expected, *others) = masked.step(action), whole.step(action)
        assert obs.shape == (2,) and (obs == expected[[0, 2]]).all() and rest == others
