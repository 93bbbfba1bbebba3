"""Toy environments for the tests of every script: small, random, and known to the last step.

Continuous-v0 has Box actions, Discrete-v0 discrete ones, Multi-v0 two of them with masks that come
and go, and the games are for the Atari scripts. Their ids for gym.make: toys:Continuous-v0 and the
like; the games' have no module, so a process imports this one first. Ids with Both, Terminated,
Truncated, Never, Each or Same behind the kind (toys:MultiBoth-v0, ToyBothNoFrameskip-v4) are
variants; others are at the end of this file.

Variables of a process:

TOY_FAULT   what happens in which step of all its environments: "SIGKILL 100" sends a signal,
            "SIGINT,SIGINT 100" two, "nan-reward 100" and "nan-observation 100" spoil the agent's
            first step from then on that ends no episode; "SIGKILL 100@3" counts the steps of
            environment number 3. "save 3" kills the process in its third os.fsync(): when its logs
            are on the disk, and the checkpoint is not
TOY_END     the length of every episode
TOY_RECORD  a file to which every reset and step is appended, as a line of JSON
"""

import json
import os
import signal

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
fsync = os.fsync
fsyncs = 0


def fsync_or_die(descriptor):
    global fsyncs
    fsyncs += 1
    if fsyncs == FAULT_STEP:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)


if FAULT == "save":
    os.fsync = fsync_or_die


def record(**event):
    if RECORD:
        RECORD.write(json.dumps(event) + "\n")


class Toy(gym.Env):
    """Two coordinates that the action and noise move.

    An episode has 3 to 17 steps. ends says how it ends: "mixed" is by termination after an odd
    number, else by truncation. In variant "same", observations depend on the step alone, and all
    episodes are equally long. Takes no action that isn't in its space, and no seed that a signed
    integer of 32 bits can't hold.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    same_end = 7

    def __init__(self, ends="mixed", render_mode=None):
        global made
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
        assert seed is None or 0 <= seed < 2**31
        super().reset(seed=seed)
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
        record(env=self.number, seed=seed, x=self.x.tolist())
        return self.observe(), self.info()

    def step(self, action):
        global steps
        assert not self.over, "a step after the episode's end"
        assert spoilt or self.action_space.contains(action), (
            f"{action!r} is not in {self.action_space}"
        )
        steps += 1
        self.steps += 1
        if FAULT_NUMBER in ("", str(self.number)):
            self.fail(self.steps if FAULT_NUMBER else steps)
        self.x = self.x + 0.1 * self.push(action) + 0.1 * self.np_random.normal(size=2)
        self.advance(action)
        reward = self.reward(action)
        self.over = self.t == self.end and self.ends != "never"
        odd = self.end % 2 == 1
        by_default = {"same": odd, "mixed": odd, "each": self.x[0] > 0}
        terminated = self.over and by_default.get(self.ends, self.ends in ("both", "terminated"))
        by_default = {name: not x for name, x in by_default.items()}
        truncated = self.over and by_default.get(self.ends, self.ends in ("both", "truncated"))
        obs = self.observe()
        spoilt_before = spoilt
        if not isinstance(action, int):
            obs, reward = self.spoil(obs, reward)
        record(
            env=self.number,
            action=np.asarray(action).tolist(),
            by_agent=not isinstance(action, int),
            mask=self.mask_of_step(),
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

    def mask_of_step(self):
        """The mask that the action of this step had to keep to."""
        return None

    def info(self):
        return {}

    def fail(self, step):
        if step == FAULT_STEP and FAULT.startswith("SIG"):
            for name in FAULT.split(","):
                os.kill(os.getpid(), getattr(signal, name))

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


class Discrete(Toy):
    action_space = gym.spaces.Discrete(4)

    def push(self, action):
        return np.resize(action, 2) - 1.0

    def reward(self, action):
        return float((np.ravel(action)[0] > 1) == (self.x[0] > 0))


class Multi(Discrete):
    """Two parts of an action. Half of the time there is a mask, which forbids the last of each."""

    nvec = (4, 3)
    action_space = gym.spaces.MultiDiscrete(nvec, dtype=np.uint8)
    mask = None
    kept_mask = None

    def info(self):
        self.mask = None
        if self.ends != "same" and self.np_random.random() < 0.5:
            self.mask = [(self.np_random.random(n) < 0.5).astype(np.int8) for n in self.nvec]
            for part in self.mask:
                part[0] = 1
                part[-1] = 0
            return {"action_mask": tuple(self.mask)}
        return {}

    def mask_of_step(self):
        return None if self.kept_mask is None else [part.tolist() for part in self.kept_mask]

    def step(self, action):
        self.kept_mask = self.mask
        return super().step(action)


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


KINDS = {
    "Continuous{}-v0": Continuous,
    "Discrete{}-v0": Discrete,
    "Multi{}-v0": Multi,
    "Toy{}NoFrameskip-v4": Game,
}
for env_id, toy in KINDS.items():
    for ends in ("mixed", "both", "terminated", "truncated", "never", "each", "same"):
        name = "" if ends == "mixed" else ends.capitalize()
        gym.register(env_id.format(name), toy, kwargs={"ends": ends})


# What environments of other people do. Each wraps a toy: toys:ContinuousWhole-v0 and so on


class Odd(gym.Wrapper):
    spec = None  # gym.make sets it

    def __init__(self, toy, **kwargs):
        super().__init__(toy(**kwargs))

    @property
    def unwrapped(self):
        return self


class Whole(Odd):
    """Its first observations are whole numbers."""

    dtype = np.float64

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs.round().astype(self.dtype), info


class Integers(Whole):
    """The same, as integers. All later ones have fractions."""

    dtype = np.int64


class Numbered(Odd):
    """Says in each info which episode this is."""

    episode = 0

    def reset(self, **kwargs):
        self.episode += 1
        return self.env.reset(**kwargs)

    def step(self, action):
        *rest, info = self.env.step(action)
        return *rest, info | {"episode": self.episode}


class Wide(Odd):
    """With one more number to see."""

    def __init__(self, toy, **kwargs):
        super().__init__(toy, **kwargs)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return np.append(obs, 1.0), info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return np.append(obs, 1.0), *rest


class Words(gym.spaces.Space):
    """A space of a package's own."""

    def sample(self, mask=None, probability=None):
        return "go"

    def contains(self, x):
        return isinstance(x, str)


class Talking(Odd):
    """Observes a word too, deep in a Dict."""

    def __init__(self, toy, **kwargs):
        super().__init__(toy, **kwargs)
        words = gym.spaces.Dict(words=Words())
        self.observation_space = gym.spaces.Dict(x=self.env.observation_space, task=words)

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return {"x": obs, "task": {"words": "go"}}, info

    def step(self, action):
        obs, *rest = self.env.step(action)
        return {"x": obs, "task": {"words": "go"}}, *rest


class OldSpace:
    """A space that is not gymnasium's, as one of the package gym."""

    def __init__(self, space):
        self.low = getattr(space, "low", None)
        self.high = getattr(space, "high", None)
        self.n = getattr(space, "n", None)
        self.shape = space.shape
        self.dtype = space.dtype


class Old(Odd):
    def __init__(self, toy, **kwargs):
        super().__init__(toy, **kwargs)
        self.action_space = OldSpace(self.env.action_space)


class Half(Odd):
    """Actions of float16."""

    def __init__(self, toy, **kwargs):
        super().__init__(toy, **kwargs)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float16)

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return self.env.step(action.astype(np.float64))


class Returns(Odd):
    """Returns in step() or reset() what it mustn't."""

    def __init__(self, toy, what, **kwargs):
        super().__init__(toy, **kwargs)
        self.what = what

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return {"alone": obs, "short": (obs[:1], info)}.get(self.what, (obs, info))

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        returned = {
            "row": (obs, np.array([reward]), terminated, truncated, info),
            "pair": (obs, np.array([reward, -reward]), terminated, truncated, info),
            "four": (obs, reward, terminated, info),
            "none": (obs, reward, terminated, truncated, None),
            "late": (obs[:1], reward, terminated, truncated, info),
        }
        return returned.get(self.what, (obs, reward, terminated, truncated, info))


RETURNS = ("row", "pair", "four", "none", "late", "alone", "short")
for toy in (Continuous, Discrete, Multi):
    kwargs = {"toy": toy}
    for odd in (Whole, Integers, Numbered, Wide, Talking, Old):
        gym.register(f"{toy.__name__}{odd.__name__}-v0", odd, kwargs=kwargs)
    for what in RETURNS:
        name = f"{toy.__name__}{what.capitalize()}-v0"
        gym.register(name, Returns, kwargs=kwargs | {"what": what})
gym.register("ContinuousHalf-v0", Half, kwargs={"toy": Continuous})
