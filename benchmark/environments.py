"""Environments for experiments that Gymnasium has no id for: some of its own, changed.

--env-id benchmark.environments:MaskedCartPole-v1
"""

import time

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from gymnasium.envs.mujoco.half_cheetah_v5 import HalfCheetahEnv


def mask(env_class, seen):
    """A subclass whose observations are those numbers of env_class's alone that seen lists."""

    class Masked(env_class):
        def __init__(self, **settings):
            super().__init__(**settings)
            space = self.observation_space
            self.observation_space = gym.spaces.Box(
                space.low[seen], space.high[seen], dtype=space.dtype
            )

        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed, options=options)
            return obs[seen], info

        def step(self, action):
            obs, *rest = super().step(action)
            return obs[seen], *rest

    return Masked


# Only memory can make up for the velocities
MaskedCartPole = mask(CartPoleEnv, [0, 2])  # position of the cart, angle of the pole
MaskedPendulum = mask(PendulumEnv, [0, 1])  # cosine and sine of the angle
MaskedHalfCheetah = mask(HalfCheetahEnv, list(range(8)))  # height, and angles


class SlowPendulum(PendulumEnv):
    """Each step takes 5 ms and no core, as a simulator on another machine might."""

    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


gym.register("SlowPendulum-v1", SlowPendulum, max_episode_steps=200)
gym.register("MaskedCartPole-v1", MaskedCartPole, max_episode_steps=500)
gym.register("MaskedPendulum-v1", MaskedPendulum, max_episode_steps=200)
gym.register("MaskedHalfCheetah-v5", MaskedHalfCheetah, max_episode_steps=1000)
