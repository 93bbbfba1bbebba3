"""Environments for experiments that Gymnasium has no id for.

--env-id benchmark.environments:MaskedCartPole-v1
"""

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

SEEN = [0, 2]  # position of the cart, angle of the pole


class MaskedCartPole(CartPoleEnv):
    """CartPole without its velocities, which only memory can make up for.

    Observations: float32 (2,).
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        space = self.observation_space
        self.observation_space = gym.spaces.Box(space.low[SEEN], space.high[SEEN])

    def reset(self, **settings):
        obs, info = super().reset(**settings)
        return obs[SEEN], info

    def step(self, action):
        obs, *rest = super().step(action)
        return obs[SEEN], *rest


gym.register("MaskedCartPole-v1", MaskedCartPole, max_episode_steps=500)
