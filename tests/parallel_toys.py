"""Toy games of many agents for the tests of ppo_pettingzoo.py: small, and known to the last step.

Each is a module of its own for --env-id: parallel_toys.pair and so on. The variables TOY_FAULT and
TOY_RECORD of toys.py are obeyed: a step of a game is one step there.
"""

import sys
import types

import gymnasium as gym
import numpy as np
import toys
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import ParallelEnv


class Toy(ParallelEnv):
    """A game in which all agents stay until it's cut after 8 steps.

    made: all games of this process. steps: what each step of this one returned, with its actions.
    """

    made = []
    length = 8
    possible_agents = ["ann", "bob"]
    space = Box(-1, 1, (3,), np.float32)
    actions = Discrete(3, start=-1)
    render_mode = None

    def __init__(self, render_mode=None):
        self.metadata = {"render_fps": 10}
        self.render_mode = render_mode
        self.number = len(self.made)
        self.made.append(self)
        self.steps = []

    def observation_space(self, agent):
        return self.space

    def action_space(self, agent):
        return self.actions

    def reset(self, seed=None, options=None):
        assert 0 <= seed < 2**31
        self.rng = np.random.default_rng(seed)
        self.t = 0
        self.start()
        observations = {agent: self.look(agent) for agent in self.agents}
        toys.record(env=self.number, seed=seed)
        self.steps.append({"observations": observations, "agents": list(self.agents)})
        return observations, {agent: {} for agent in self.agents}

    def start(self):
        self.agents = list(self.possible_agents)

    def look(self, agent):
        return self.rng.uniform(-1, 1, 3).astype(np.float32)

    def step(self, actions):
        assert list(actions) == self.agents
        assert all(self.action_space(agent).contains(x) for agent, x in actions.items())
        toys.steps += 1
        toys.Toy.fail(self, toys.steps)
        self.t += 1
        rewards = self.reward({agent: int(action) for agent, action in actions.items()})
        terminations, truncations = self.ends()
        over = [agent for agent in self.agents if terminations[agent] or truncations[agent]]
        ends = {agent: "termination" if terminations[agent] else "truncation" for agent in over}
        toys.record(env=self.number, rewards=rewards, ends=ends)
        self.leave(over)
        seeing = [*actions, *(agent for agent in self.agents if agent not in actions)]
        observations = {agent: self.look(agent) for agent in seeing}
        step = {"actions": actions, "rewards": rewards, "ends": ends, "observations": observations}
        self.steps.append(step | {"agents": list(self.agents)})
        return observations, rewards, terminations, truncations, {agent: {} for agent in actions}

    def ends(self):
        truncated = self.t == self.length
        return dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, truncated)

    def leave(self, over):
        self.agents = [agent for agent in self.agents if agent not in over]

    def render(self):
        return np.full((64, 64, 3), 10 * self.t, np.uint8)


class Pair(Toy):
    """Both get 1 where ann plays the sign of what she sees, and bob the opposite of what he sees.

    The optimum is 8 a game. One policy that doesn't know who it is gets half of it.
    """

    space = Discrete(2)

    def look(self, agent):
        self.seen = getattr(self, "seen", {}) | {agent: int(self.rng.integers(2))}
        return self.seen[agent]

    def reward(self, actions):
        ann, bob = (2 * self.seen[agent] - 1 for agent in self.possible_agents)
        return dict.fromkeys(actions, float(actions["ann"] == ann and actions["bob"] == -bob))


class Duel(Toy):
    """A matrix of what bob pays ann, with a saddle point: the last row, the first column, 1."""

    matrix = np.array([[0, 5, -2], [-1, -3, 4], [1, 2, 3]])

    def reward(self, actions):
        paid = float(self.matrix[actions["ann"] + 1, actions["bob"] + 1])
        return {"ann": paid, "bob": -paid}


class Mortal(Toy):
    """Agents come and go at steps of their own, some of them more than once.

    A life ends by termination or by truncation. The game ends when nobody is left.
    """

    possible_agents = ["ann", "bob", "cid"]

    def start(self):
        self.agents = ["ann", "bob", "cid"] if self.rng.random() < 0.7 else ["bob"]
        self.lives = {agent: int(self.rng.integers(1, 12)) for agent in self.agents}

    def reward(self, actions):
        return {agent: float(self.rng.normal() + x) for agent, x in actions.items()}

    def ends(self):
        over = {agent: self.lives[agent] <= self.t for agent in self.agents}
        terminated = {agent: self.rng.random() < 0.5 for agent in self.agents}
        terminations = {agent: over[agent] and terminated[agent] for agent in self.agents}
        truncations = {agent: over[agent] and not terminated[agent] for agent in self.agents}
        return terminations, truncations

    def leave(self, over):
        super().leave(over)
        others = [x for x in self.possible_agents if x not in self.agents and x not in over]
        if self.agents and others and self.rng.random() < 0.3:
            self.agents.append(others[0])
            self.lives[others[0]] = self.t + int(self.rng.integers(1, 6))


class Hopeless(Mortal):
    """No seed brings it back."""

    def reset(self, seed=None, options=None):
        return super().reset(seed=(seed + len(self.steps)) % 2**31)


class Alone(Toy):
    """toys.Discrete as a game of one agent."""

    possible_agents = ["ann"]
    space = toys.Discrete.observation_space
    actions = toys.Discrete.action_space

    def __init__(self, render_mode=None):
        super().__init__()
        self.env = toys.Discrete()

    def reset(self, seed=None, options=None):
        self.agents = ["ann"]
        obs, info = self.env.reset(seed=seed)
        return {"ann": obs}, {"ann": info}

    def step(self, actions):
        results = self.env.step(actions["ann"])
        if results[2] or results[3]:
            self.agents = []
        return tuple({"ann": result} for result in results)


class WithOne(gym.Wrapper):
    """toys.Discrete with a 1 before its observations: the number of the only agent, one-hot."""

    spec = None  # gym.make sets it
    observation_space = Box(-np.inf, np.inf, (4,))

    def __init__(self):
        super().__init__(toys.Discrete())

    @property
    def unwrapped(self):
        return self

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return np.append(1.0, obs), info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return np.append(1.0, obs), *rest


gym.register("WithOne-v0", WithOne)


# What games of other people do


class Nested(Pair):
    space = Dict(b=Box(-9, 9, (2, 2)), a=Discrete(3))

    def look(self, agent):
        super().look(agent)
        return {"b": np.arange(4.0).reshape(2, 2), "a": 2}


class Unlike(Pair):
    def observation_space(self, agent):
        return Discrete(2 + (agent == "bob"))


class Uneven(Pair):
    def action_space(self, agent):
        return Discrete(2 + (agent == "bob"))


class Continuous(Pair):
    actions = Box(-1, 1, (2,))


class Words(Pair):
    space = toys.Words()


class Nameless(Pair):
    possible_agents = []


class Old(Pair):
    """Of the time when reset() returned no infos."""

    def reset(self, seed=None, options=None):
        return super().reset(seed=seed)[0]


class Empty(Pair):
    """Nobody comes."""

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.agents = []
        return {}, {}


class Four(Pair):
    def step(self, actions):
        return super().step(actions)[:4]


class Wide(Toy):
    def look(self, agent):
        return np.zeros(4)

    def reward(self, actions):
        return dict.fromkeys(actions, 0.0)


class Unrewarded(Pair):
    def reward(self, actions):
        return dict.fromkeys(actions)


class Manyfold(Pair):
    def reward(self, actions):
        return dict.fromkeys(actions, np.zeros(2))


class Undead(Pair):
    """Its agents stay after they have ended."""

    def leave(self, over):
        pass


class Vanishing(Pair):
    """An agent leaves that hasn't ended."""

    def leave(self, over):
        self.agents = self.agents[: 8 - self.t]


class Endless(Pair):
    length = None


for toy in [*Toy.__subclasses__(), *Pair.__subclasses__(), Hopeless]:
    name = f"{__name__}.{toy.__name__.lower()}"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].parallel_env = toy

sys.modules[f"{__name__}.uncallable"] = types.ModuleType("uncallable")
sys.modules[f"{__name__}.uncallable"].parallel_env = 5
