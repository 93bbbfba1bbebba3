"""Toy environments for the tests of every script: small, random, and known to the last step.

Continuous-v0 has Box actions, Multi-v0 and Discrete-v0 have discrete ones with masks that come and
go, and the games are for the Atari scripts. Their ids for gym.make: toys:Continuous-v0 and the
like; the games' have no module, so a process imports this one first. Ids with Both, Terminated,
Truncated, Never, Each or Same behind the kind (toys:MultiBoth-v0, BothNoFrameskip-v4) are variants.

Variables of a process:

TOY_FAULT   what happens in which step of all its environments: "SIGKILL 100" sends a signal,
            "nan-reward 100" and "nan-observation 100" spoil the agent's first step from then on
            that ends no episode, "error 100", "os-error 100" and "pipe-error 100" raise,
            "short-observation 100" cuts all observations from then on; "SIGKILL 100@3" counts the
            steps of environment number 3. "make-error 0" and "reset-error 0" raise in the first
            call, with "bare-reset 0" reset() returns an observation alone, and "edit-script 0"
            adds a line to the script that runs
TOY_END     the length of every episode
TOY_RECORD  a file to which every reset and step is appended, as a line of JSON
"""

import errno
import json
import os
import random
import signal
import sys

import gymnasium as gym
import numpy as np

FAULT, FAULT_STEP = (os.environ.get("TOY_FAULT") or "none 0").split()
FAULT_STEP, _, FAULT_NUMBER = FAULT_STEP.partition("@")
FAULT_STEP = int(FAULT_STEP)
RECORD = os.environ.get("TOY_RECORD")
if RECORD:
    RECORD = open(RECORD, "a", buffering=1)

steps = 0  # of all environments of this process
made = 0  # environments of this process
spoilt = False  # whether a fault has given NaN


def record(**event):
    if RECORD:
        RECORD.write(json.dumps(event) + "\n")


class Toy(gym.Env):
    """Two coordinates that the action and noise move.

    An episode has 3 to 17 steps. ends says how it ends: "mixed" is by termination after an odd
    number, else by truncation. In variant "same", observations depend on the step alone, and all
    episodes are equally long. The last reward of an episode has luck in it: numbers drawn from the
    generators of Python and NumPy.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    same_end = 7

    def __init__(self, ends="mixed", render_mode=None):
        global made
        if FAULT == "edit-script":
            with open(sys.argv[0], "a") as file:
                file.write("# edited\n")
        if FAULT == "make-error":
            raise RuntimeError("a mistake of the toy's constructor")
        self.number = made
        made += 1
        self.steps = 0
        self.ends = ends
        self.render_mode = render_mode
        self.over = True

    def draw_end(self):
        """The number of steps of an episode."""
        return int(self.np_random.integers(3, 18))

    def observe(self):
        if self.ends == "same":
            return np.array([np.sin(self.t), np.cos(2 * self.t), self.t])
        return np.array([*self.x, self.t], np.float64)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if FAULT == "reset-error":
            raise RuntimeError("a mistake of the toy's reset")
        self.x = self.np_random.normal(size=2)
        self.t = 0
        self.end = self.draw_end()
        if self.ends == "same":
            self.end = self.same_end
        if self.ends == "each":
            self.end = 1
        if "TOY_END" in os.environ:
            self.end = int(os.environ["TOY_END"])
        self.over = False
        obs = self.observe()
        record(env=self.number, seed=seed, x=self.x.tolist())
        return obs if FAULT == "bare-reset" else (obs, self.info())

    def step(self, action):
        global steps
        assert not self.over, "a step after the episode's end"
        steps += 1
        self.steps += 1
        if FAULT_NUMBER in ("", str(self.number)):
            self.fail(self.steps if FAULT_NUMBER else steps)
        self.x = self.x + 0.1 * self.push(action) + 0.1 * self.np_random.normal(size=2)
        self.advance(action)
        luck = [random.random(), np.random.random()]
        reward = self.reward(action)
        self.over = self.t == self.end and self.ends != "never"
        if self.over:
            reward += self.score(luck)
        odd = self.end % 2 == 1
        by_default = {"same": odd, "mixed": odd, "each": self.x[0] > 0}
        terminated = self.over and by_default.get(self.ends, self.ends in ("both", "terminated"))
        by_default = {name: not x for name, x in by_default.items()}
        truncated = self.over and by_default.get(self.ends, self.ends in ("both", "truncated"))
        obs = self.observe()
        spoilt_before = spoilt
        if not isinstance(action, int):
            obs, reward = self.spoil(obs, reward)
        if FAULT == "short-observation" and steps >= FAULT_STEP:
            obs = obs[:1]
        record(
            env=self.number,
            action=np.asarray(action).tolist(),
            by_agent=not isinstance(action, int),
            mask=self.mask_of_step(),
            luck=luck,
            reward=reward,
            terminated=bool(terminated),
            truncated=bool(truncated),
            spoilt=spoilt and not spoilt_before,
        )
        return obs, reward, bool(terminated), bool(truncated), self.info()

    def advance(self, action):
        self.t += 1

    def push(self, action):
        """What an action adds to the coordinates."""
        return np.resize(action, 2)

    def reward(self, action):
        return -float(self.x @ self.x)

    def score(self, luck):
        """What luck adds to the last reward."""
        return 0.1 * sum(luck)

    def mask_of_step(self):
        """The mask that the action of this step had to keep to."""
        return None

    def info(self):
        return {}

    def fail(self, step):
        if step == FAULT_STEP and FAULT.startswith("SIG"):
            for name in FAULT.split(","):
                os.kill(os.getpid(), getattr(signal, name))
        if step == FAULT_STEP and FAULT == "error":
            raise RuntimeError("a mistake of the toy")
        if step == FAULT_STEP and FAULT == "os-error":
            open("level.txt").close()
        if step == FAULT_STEP and FAULT == "pipe-error":
            raise BrokenPipeError(errno.EPIPE, "the simulator is gone")

    def spoil(self, obs, reward):
        global spoilt
        if not spoilt and FAULT.startswith("nan") and steps >= FAULT_STEP and not self.over:
            spoilt = True
            if FAULT == "nan-reward":
                reward = float("nan")
            else:
                obs[0] = np.nan
        return obs, reward

    def render(self):
        """A grey frame, brighter with every step of the episode."""
        return np.full((64, 64, 3), 10 * self.t % 256, np.uint8)


class Continuous(Toy):
    action_space = gym.spaces.Box(np.array([-1.0, -2.0]), np.array([1.0, 2.0]), dtype=np.float64)


class Multi(Toy):
    """Two parts of an action. Half of the time there is a mask, which forbids the last of each."""

    nvec = (4, 3)
    action_space = gym.spaces.MultiDiscrete(nvec)
    mask = None
    kept_mask = None

    def push(self, action):
        return np.resize(action, 2) - 1.0

    def reward(self, action):
        return float((np.ravel(action)[0] > 1) == (self.x[0] > 0))

    def info(self):
        self.mask = None
        if self.ends != "same" and self.np_random.random() < 0.5:
            self.mask = [(self.np_random.random(n) < 0.5).astype(np.int8) for n in self.nvec]
            for part in self.mask:
                part[0] = 1
                part[-1] = 0
            return {"action_mask": self.mask[0] if len(self.nvec) == 1 else tuple(self.mask)}
        return {}

    def mask_of_step(self):
        return None if self.kept_mask is None else [part.tolist() for part in self.kept_mask]

    def step(self, action):
        assert self.action_space.contains(action), action
        self.kept_mask = self.mask
        return super().step(action)


class Discrete(Multi):
    nvec = (4,)
    action_space = gym.spaces.Discrete(4)


class Game(Toy):
    """A game with three lives, in frames. Its end is counted from the agent's first frame on.

    The wrappers' own no-ops are integers of Python, the agent's actions are NumPy's. Rewards are
    multiples of 1/8, so that sums of them are exact.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}
    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(4)
    same_end = 27

    def __init__(self, frameskip=4, **kwargs):
        assert frameskip == 1
        super().__init__(**kwargs)

    def get_action_meanings(self):
        return ["NOOP", "UP", "RIGHT", "LEFT"]

    def draw_end(self):
        return int(self.np_random.integers(10, 60))

    def reset(self, seed=None, options=None):
        self.frames = 0
        self.lives = 3
        self.started = False
        return super().reset(seed=seed)

    def advance(self, action):
        self.frames += 1
        self.started = self.started or not isinstance(action, int)
        if self.started:
            self.t += 1
            near_end = self.t + 8 > self.end  # an end in the no-op after a life is a rare one
            if self.ends == "mixed" and self.t % 18 == 0 and self.lives > 1 and not near_end:
                self.lives -= 1

    def push(self, action):
        return np.array([action - 1.5, 1.5 - action])

    def reward(self, action):
        return round(4 * self.x[0]) / 8

    def score(self, luck):
        return float(round(8 * sum(luck)))

    def info(self):
        return {"lives": self.lives}

    def observe(self):
        screen = np.zeros((210, 160, 3), np.uint8)
        if self.ends != "same":
            gray = np.tanh(self.x) * 127 + 128
            screen[:70] = 3 * self.frames % 256
            screen[70:, :80] = int(gray[0])
            screen[70:, 80:] = int(gray[1])
        return screen

    def render(self):
        return self.observe()


class Wide(Continuous):
    """With one more number to see."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))

    def observe(self):
        return np.array([*super().observe(), 1.0])


KINDS = {"toys:Continuous{}-v0": Continuous, "toys:Multi{}-v0": Multi}
KINDS |= {"toys:Discrete{}-v0": Discrete, "Toy{}NoFrameskip-v4": Game}
for env_id, toy in KINDS.items():
    for ends in ("mixed", "both", "terminated", "truncated", "never", "each", "same"):
        name = "" if ends == "mixed" else ends.capitalize()
        gym.register(env_id.format(name).removeprefix("toys:"), toy, kwargs={"ends": ends})
gym.register("ContinuousWide-v0", Wide)
