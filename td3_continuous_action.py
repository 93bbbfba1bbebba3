# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium[classic-control,mujoco]==1.4.0",
#     "box2d==2.3.10; python_version < '3.14'",
#     "mujoco==4.0.0; python_version >= '3.11'",
#     "mujoco==3.17.0; python_version < '3.11'",
#     "numpy==2.4.6; python_version >= '3.11'",
#     "numpy==2.2.6; python_version < '3.11'",
#     "tyro==1.0.17",
#     "tqdm==4.70.1",
#     "tensorboard==2.21.0",
#     "wandb==0.31.0",
#     "imageio[ffmpeg]==2.38.0",
#     "imageio-ffmpeg==0.8.1",
# ]
# ///
"""TD3 for continuous (Box) actions: MuJoCo and any other environment with vector observations.

Twin Delayed DDPG, Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477. The defaults are those of
its code, https://github.com/sfujim/TD3: layers of 256, Adam with 3e-4, gamma 0.99, tau 0.005,
minibatches of 256, noise of 0.1, smoothing noise of 0.2 within 0.5, a policy delayed by 2, 25,000
random steps. The paper has layers of 400 and 300, 1e-3, minibatches of 100, and 1,000 or 10,000
random steps. The comments use the numbers of details of ppo_continuous_action.py and the sections
of the paper. A time limit is not a termination.
Diff it against ddpg_continuous_action.py or sac_continuous_action.py.

    python td3_continuous_action.py --env-id HalfCheetah-v5 --total-timesteps 1000000
"""

import copy
import errno
import fcntl
import io
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.optim.adam import adam
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# --------------------------------------------------------------------------------------------------
# Flags
# --------------------------------------------------------------------------------------------------


@dataclass
class Args:
    """All flags. The comments are what --help says."""

    exp_name: str = Path(__file__).stem  # name of the experiment, a part of the run's name
    run_name: str | None = None  # folder in runs/ (default: ENV__EXPERIMENT__SEED__UNIXTIME)
    seed: int = 1  # seed of the networks, the action noise, the minibatches and the environments
    torch_deterministic: bool = True  # use deterministic cuDNN algorithms
    cuda: bool = True  # use a GPU where there is one
    compile: bool = True  # compile the update, which takes half a minute the first time
    num_threads: int = 0  # threads of PyTorch (0: chosen by the script)
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "plainrl"  # project at Weights & Biases
    wandb_entity: str | None = None  # user or team at Weights & Biases
    capture_video: bool = False  # film the evaluation and training episodes of one environment
    video_interval: int = 100  # film every N-th training episode
    save_model: bool = False  # write the final weights to EXPERIMENT.cleanrl_model too
    checkpoint_interval: int = 10000  # steps between checkpoints
    eval_interval: int = 10000  # steps between evaluations during the training (0: none)
    eval_episodes: int = 10  # episodes of an evaluation, with deterministic actions and own seeds
    eval_max_steps: int = 100000  # steps after which an episode of an evaluation ends
    resume: str | None = None  # continue the run in this folder, exactly; its flags come with it
    evaluate: str | None = None  # play the policy of the run in this folder; its flags come with it
    init_from: str | None = None  # begin with the networks and statistics of the run in this folder
    best: bool = False  # with --evaluate or --init-from: the networks of that run's best evaluation

    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1000000  # steps of the run, all environments together
    learning_rate: float = 3e-4  # learning rate of Adam
    actor_learning_rate: float | None = None  # of the actor (default: --learning-rate)
    critic_learning_rate: float | None = None  # of the critic (default: --learning-rate)
    num_envs: int = 1  # number of environments
    gamma: float = 0.99  # discount factor
    hidden_sizes: tuple[int, ...] = (256, 256)  # units of the hidden layers, actor's and critic's
    buffer_size: int = 1000000  # transitions in the replay buffer
    batch_size: int = 256  # transitions in a minibatch
    tau: float = 0.005  # part of the way that an update moves the targets to the trained networks
    random_steps: int | None = None  # first steps, with random actions (default: --learning-starts)
    learning_starts: int = 25000  # steps before the first update
    updates_per_step: float = 1.0  # updates for each step of an environment; may be below 1
    policy_frequency: int = 2  # update the actor and the targets at every N-th update of the critic
    policy_noise: float = 0.2  # standard deviation of the smoothing noise, for actions in [-1, 1]
    noise_clip: float = 0.5  # bound of the smoothing noise, for actions in [-1, 1]
    noise_type: Literal["gaussian", "ou"] = "gaussian"  # independent, or Ornstein-Uhlenbeck's
    exploration_noise: float = 0.1  # standard deviation for actions in [-1, 1] (ou: of its steps)
    final_exploration_noise: float | None = None  # at the last step, reached linearly
    max_grad_norm: float | None = None  # largest norm of the gradient, actor's and critic's
    weight_decay: float = 0.0  # weight of the L2 penalty on the critic's parameters
    norm_obs: bool = False  # normalise observations by their running mean and deviation
    norm_reward: bool = False  # divide rewards by the running deviation of the discounted return


def parse_args():
    """Returns the flags, and the checkpoint that --resume or --evaluate starts from, or None.

    To the flags it adds num_iterations; read_flags has added folder.
    """
    args, saved = read_flags(may_change=[])  # the replay buffer depends on --checkpoint-interval
    check(args.total_timesteps > 0, "--total-timesteps must be above 0")
    for name in ("learning_rate", "actor_learning_rate", "critic_learning_rate", "max_grad_norm"):
        value = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        check(value is None or 0 < value < math.inf, f"{flag} must be above 0 and finite")
    check(args.num_envs > 0, "--num-envs must be above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(min(args.hidden_sizes, default=0) > 0, "--hidden-sizes must be numbers above 0")
    check(args.buffer_size > 0, "--buffer-size must be above 0")
    check(args.batch_size > 0, "--batch-size must be above 0")
    check(0 < args.tau <= 1, "--tau must be above 0, up to 1")
    check(args.random_steps is None or args.random_steps >= 0, "--random-steps must be 0 or above")
    check(args.learning_starts >= 0, "--learning-starts must be 0 or above")
    check(0 < args.updates_per_step < math.inf, "--updates-per-step must be above 0 and finite")
    check(args.policy_frequency > 0, "--policy-frequency must be above 0")
    check(args.noise_clip >= 0, "--noise-clip must be 0 or above")
    noises = ("policy_noise", "exploration_noise", "final_exploration_noise")
    for name in (*noises, "weight_decay"):
        value = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        check(value is None or 0 <= value < math.inf, f"{flag} must be 0 or above, and finite")

    if args.init_from is not None:
        for name in ("norm_obs", "norm_reward"):
            flag = "--" + name.replace("_", "-")
            same = saved["args"][name] == getattr(args, name)
            check(same, f"--init-from: that run has another {flag}, give the same one")

    args.num_iterations = args.total_timesteps // args.num_envs
    total_steps = args.num_iterations * args.num_envs
    check(total_steps > args.learning_starts, "--learning-starts is past the last step")
    return args, saved


# --------------------------------------------------------------------------------------------------
# Environments
# --------------------------------------------------------------------------------------------------


class RescaleAction(gym.ActionWrapper):
    """Brings a flat action in [-1, 1], (action_dim,), to the bounds of the environment."""

    def __init__(self, env):
        super().__init__(env)
        self.low = env.action_space.low
        self.high = env.action_space.high

    def action(self, action):
        action = action.reshape(self.low.shape)
        action = (self.low + (action + 1) * (self.high - self.low) / 2).astype(self.low.dtype)
        return np.minimum(np.maximum(action, self.low), self.high)  # rounding may lead outside


class RecordVideo(gym.Wrapper):
    """Writes every interval-th episode to folder/episode-N.mp4, frame by frame.

    Gymnasium's own keeps all frames of an episode in memory: 700 MB for 1,000 steps of HalfCheetah.
    The file is opened by the first step, so that a reset alone leaves none.
    """

    def __init__(self, env, folder, interval):
        super().__init__(env)
        self.folder = folder
        self.interval = interval
        self.starting = True
        self.video = None

    def reset(self, **kwargs):
        self.close_video()
        self.starting = True
        return self.env.reset(**kwargs)

    def step(self, action):
        episode = self.get_wrapper_attr("episode_count")
        if self.starting and episode % self.interval == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"episode-{episode}.mp4"
            fps = self.env.metadata.get("render_fps", 30)
            # Codecs need even sizes; imageio's default would scale frames to multiples of 16
            self.video = imageio.get_writer(path, fps=fps, macro_block_size=2)
            self.video.append_data(self.env.render())
        self.starting = False

        result = self.env.step(action)
        if self.video is not None:
            self.video.append_data(self.env.render())
        return result

    def close_video(self):
        if self.video is not None:
            self.video.close()
        self.video = None

    def close(self):
        self.close_video()
        self.env.close()


class ReplayEnv(gym.Wrapper):
    """An environment that resets itself and that can be saved and brought back exactly.

    A step that ends an episode also resets it: the step's observation is the first of the next
    episode, and info["final_obs"] is the one that the reset has replaced (Gymnasium's SAME_STEP).

    Given a seed and actions, an environment always does the same. So it is saved as its last seed
    and the actions since, which are played again to bring it back. To keep them few, it gets a new
    seed with the first episode that starts steps_per_seed steps or more after the last seed.
    actions is empty right after a new seed, so also if it could not be brought back.
    """

    def __init__(self, env, steps_per_seed=1000):
        super().__init__(env)
        self.steps_per_seed = steps_per_seed

    def reset(self, seed, options=None):
        """Starts afresh; all seeds of the environment follow from this one."""
        self.seed = seed
        return self.reset_with_new_seed()

    def reset_with_new_seed(self):
        """Starts an episode with a seed of its own."""
        self.first_episode = self.get_wrapper_attr("episode_count")
        self.actions = []
        sequence = np.random.SeedSequence((self.seed, self.first_episode))
        (seed,) = sequence.generate_state(1)
        self.obs, info = self.env.reset(seed=int(seed))
        self.shape = np.shape(self.obs)
        return self.obs, info

    def step(self, action):
        self.actions.append(action.copy())
        if len(self.actions) == 200 * self.steps_per_seed:
            advice = "give the environment a time limit, max_episode_steps of gymnasium.register"
            print(f"an episode is so long that --resume, which replays it, is slow: {advice}")
        self.obs, reward, terminated, truncated, info = self.env.step(action)
        if np.shape(self.obs) != self.shape:  # NumPy would spread it over its row without a word
            raise ValueError(f"an observation of shape {np.shape(self.obs)} after {self.shape}")
        if terminated or truncated:
            info["final_obs"] = np.array(self.obs)  # a copy: the reset may write over it
            game_over = "episode" in info  # in Atari, a lost life is the end of an episode, too
            if game_over and len(self.actions) >= self.steps_per_seed:
                self.reset_with_new_seed()
            else:
                self.obs, _ = self.env.reset()
        return self.obs, reward, terminated, truncated, info

    def state_dict(self):
        return {
            "seed": self.seed,
            "first_episode": self.first_episode,
            "actions": torch.tensor(np.array(self.actions)),
            "obs": torch.tensor(np.array(self.obs)),
            "episode_return": float(self.get_wrapper_attr("episode_returns")),
        }

    def load_state_dict(self, state):
        self.set_wrapper_attr("episode_count", state["first_episode"])
        self.reset(state["seed"])
        for action in state["actions"].numpy():
            self.step(action)
        same = np.array_equal(self.obs, state["obs"].numpy())
        if not same or self.get_wrapper_attr("episode_returns") != state["episode_return"]:
            print("an environment can't be brought back to where it was: it starts a new episode")
            self.reset_with_new_seed()


def make_base_env(env_id, filmed):
    """Makes an environment; ends the program if it can't be made or, where filmed, rendered.

    A mistake in the code of an environment keeps its trace.
    """
    is_id = env_id.count(":") <= 1 and not env_id.startswith((":", "."))
    check(is_id, f"{env_id} is no id of an environment, such as CartPole-v1 or my_envs:MyEnv-v0")
    name = env_id
    options = {}
    expected = (gym.error.Error, ImportError)
    advice = ""
    if env_id.startswith("dm_control/"):
        name = f"shimmy:{env_id}"  # the module that registers them
        expected = (Exception,)  # with a MuJoCo that it doesn't know, it fails in its own ways
        advice = " (it needs: pip install 'shimmy[dm-control]' 'mujoco<4')"
    if filmed:
        options["render_mode"] = "rgb_array"
        expected = (Exception,)  # renderers raise their own errors
        if sys.platform == "linux" and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # the renderer that needs no display
    try:
        env = gym.make(name, disable_env_checker=True, **options)
        result = env.reset(seed=0)  # rather fail here than later
        if filmed:
            env.render()
    except expected as error:
        fail(f"can't make {env_id}: {' '.join(str(error).split())}{advice}")
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    check(is_pair, f"the reset() of {env_id} must return an observation and a dict")
    return env


def make_env(env_id, video_dir=None, video_interval=1, max_steps=None):
    """Makes an environment with its wrappers; with a video_dir it is filmed.

    Ends the program if the environment can't be made or has other spaces than this script needs.
    """
    env = make_base_env(env_id, filmed=video_dir is not None)
    space = env.action_space
    fits = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
    check(fits, f"{env_id} has the action space {space}, but this script needs a Box of floats")
    with np.errstate(over="ignore"):  # finite bounds may be infinitely far apart, too
        bounded = np.isfinite(space.high - space.low).all()
    advice = "but this script needs finite bounds and a finite range"
    check(bounded, f"{env_id} has the action space {space}, {advice}")
    obs_space = env.observation_space
    fits = isinstance(obs_space, gym.spaces.Box | gym.spaces.Dict) and obs_space.is_np_flattenable
    advice = "but this script needs a Box or a Dict of them"
    check(fits, f"{env_id} has the observation space {obs_space}, {advice}")

    if max_steps:
        env = gym.wrappers.TimeLimit(env, max_steps)
    env = gym.wrappers.TransformReward(env, float)  # so that float64 numbers are summed
    env = gym.wrappers.RecordEpisodeStatistics(env)
    if video_dir:
        env = RecordVideo(env, video_dir, video_interval)
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    env = RescaleAction(env)
    return ReplayEnv(env)


class Episode(NamedTuple):
    """An episode that has ended."""

    env: int  # index of the environment
    episode_return: float  # sum of the rewards as they came from the environment
    length: int
    ended_by: str  # "termination" or "truncation"
    final_obs: np.ndarray  # the observation, as the agent sees it, that a reset has replaced


class VecEnv:
    """Environments, stepped one after another; obs: the current observations, (num_envs, ...)."""

    def __init__(self, envs, seed):
        self.envs = envs
        self.action_space = envs[0].action_space
        seeds = np.random.SeedSequence(seed).generate_state(len(envs))
        self.obs = np.stack([env.reset(int(seeds[i]))[0] for i, env in enumerate(envs)])

    def step(self, actions):
        """Steps each environment by its row of actions (num_envs, ...).

        Returns the rewards, float64, the terminations and truncations, bool, all (num_envs,), and
        the episodes that ended.
        """
        rewards = np.zeros(len(self.envs))
        terminations = np.zeros(len(self.envs), bool)
        truncations = np.zeros(len(self.envs), bool)
        episodes = []
        for i, env in enumerate(self.envs):
            self.obs[i], rewards[i], terminations[i], truncations[i], info = env.step(actions[i])
            if terminations[i] or truncations[i]:
                episode_return = float(info["episode"]["r"])
                length = info["episode"]["l"]
                ended_by = "termination" if terminations[i] else "truncation"
                episodes.append(Episode(i, episode_return, length, ended_by, info["final_obs"]))
        return rewards, terminations, truncations, episodes

    def close(self):
        for env in self.envs:
            env.close()

    def state_dict(self):
        return {"envs": [env.state_dict() for env in self.envs]}

    def load_state_dict(self, state):
        for i, env in enumerate(self.envs):
            env.load_state_dict(state["envs"][i])
            self.obs[i] = env.obs


class RunningMeanStd:
    """Mean and variance of all samples seen, float64 (baselines common/running_mean_std.py)."""

    def __init__(self, shape):
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = np.array(1e-4)

    def update(self, batch):
        """Adds a batch (n, *shape), float64."""
        n = len(batch)
        if n == 1:  # the same, in half the time
            mean = batch[0]
            squares = 0.0
        else:
            mean = np.add.reduce(batch) / n  # np.mean and np.var take three times as long
            squares = np.add.reduce((batch - mean) ** 2)
        delta = mean - self.mean
        total = self.count + n
        squares = squares + delta * delta * (self.count * n / total)
        self.mean = self.mean + delta * (n / total)
        self.var = (self.var * self.count + squares) / total
        self.count = total

    def normalize(self, x):
        """x (..., *shape) in standard deviations from the mean, clipped to 10 (M2), float32."""
        x = (x - self.mean) / np.sqrt(self.var + 1e-8)
        return np.minimum(np.maximum(x, -10.0), 10.0).astype(np.float32)

    def state_dict(self):
        return {
            "mean": torch.tensor(self.mean),
            "var": torch.tensor(self.var),
            "count": torch.tensor(self.count),
        }

    def load_state_dict(self, state):
        self.mean = state["mean"].numpy()
        self.var = state["var"].numpy()
        self.count = state["count"].numpy()


class Normalizer:
    """Running statistics of what a VecEnv gives, and what --norm-obs and --norm-reward do with it.

    As VecNormalize of openai/baselines (vec_env/vec_normalize.py), but the replay buffer keeps what
    came from the environments, which is normalised each time that it is used.
    """

    def __init__(self, envs, args):
        self.norm_obs = args.norm_obs
        self.norm_reward = args.norm_reward
        self.gamma = args.gamma
        self.obs_rms = RunningMeanStd(envs.obs.shape[1])
        self.return_rms = RunningMeanStd(())
        self.discounted_returns = np.zeros(len(envs.obs))
        if self.norm_obs:
            self.obs_rms.update(envs.obs.astype(np.float64))

    def update(self, obs, rewards, dones):
        """Counts what a step gave: obs (num_envs, obs_dim), rewards and dones (num_envs,)."""
        if self.norm_reward:
            self.discounted_returns = self.discounted_returns * self.gamma + rewards
            self.return_rms.update(self.discounted_returns)
            self.discounted_returns[dones] = 0.0
        if self.norm_obs:
            self.obs_rms.update(obs.astype(np.float64))

    def normalize_obs(self, obs):
        """obs (..., obs_dim) -> float32, as the networks see them."""
        if self.norm_obs:
            return self.obs_rms.normalize(obs)
        return obs.astype(np.float32)

    def normalize_rewards(self, rewards):
        """rewards (...), float32 -> the same as the critic sees them."""
        if self.norm_reward:
            rewards = rewards / np.sqrt(self.return_rms.var + 1e-8)
            return rewards.clip(-10.0, 10.0).astype(np.float32)
        return rewards

    def normalize_batch(self, batch):
        """Rows of a replay buffer, {name: array} -> the same as the networks see them."""
        return batch | {
            "obs": self.normalize_obs(batch["obs"]),
            "next_obs": self.normalize_obs(batch["next_obs"]),
            "rewards": self.normalize_rewards(batch["rewards"]),
        }

    def state_dict(self):
        return {"discounted_returns": torch.tensor(self.discounted_returns)}

    def load_state_dict(self, state):
        self.discounted_returns = state["discounted_returns"].numpy()


class ReplayBuffer:
    """The last size steps of the environments, rows in a file that is mapped to memory.

    So a checkpoint needs only their number. The file has size + spare rows. At most spare rows are
    written between two checkpoints, so a killed run that goes on from a checkpoint still finds
    every row that it may sample. columns: what a row has, {name: (dtype, shape)}; images that
    overlap from step to step are best stored one by one, and put together from several rows.
    """

    def __init__(self, path, size, spare, columns, is_new):
        row = np.dtype([(name, dtype, shape) for name, (dtype, shape) in columns.items()])
        num_bytes = row.itemsize * (size + spare)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        gigabytes = f"{num_bytes / 1e9:.1f} GB"
        advice = "lower --buffer-size or --checkpoint-interval"
        check(num_bytes <= memory, f"no memory for a replay buffer of {gigabytes}: {advice}")
        if is_new:
            self.allocate(path, num_bytes)
        else:
            whole = path.is_file() and path.stat().st_size == num_bytes
            check(whole, f"{path}, the replay buffer, is missing or damaged: start a new run")
        self.file = np.memmap(path, row, mode="r+", shape=(size + spare,))
        self.rows = np.asarray(self.file)  # the same memory, faster to index
        self.size = size
        self.count = 0

    def allocate(self, path, num_bytes):
        """Makes the file and takes its space now, where the system can (macOS can't)."""
        try:
            with open(path, "wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                else:
                    os.truncate(file.fileno(), num_bytes)
        except OSError as error:
            if path.is_file():
                path.unlink()
            advice = "free disk space, or lower --buffer-size"
            fail(f"no {num_bytes / 1e9:.1f} GB for {path} ({error.strerror}): {advice}")

    def add(self, **columns):
        """Stores n rows; columns: arrays (n, *shape), all that a row has."""
        n = len(next(iter(columns.values())))
        places = np.arange(self.count, self.count + n) % len(self.rows)
        for name in self.rows.dtype.names:
            values = columns[name].astype(self.rows[name].dtype)
            if not np.isfinite(values).all():
                advice = "fix the environment, then use --resume"
                if name == "actions":
                    advice = "start a new run with a lower --learning-rate"
                fail(f"step {self.count}: {name} has a value that is not finite: {advice}", code=1)
            self.rows[name][places] = values
        self.count += n

    def read(self, numbers):
        """Rows by their numbers, counted from the start of the run.

        numbers: an array of any shape -> {name: array (*numbers.shape, *shape)}.
        """
        places = numbers % len(self.rows)
        # Column by column: NumPy is slow in copying rows that have arrays in them
        return {name: self.rows[name][places] for name in self.rows.dtype.names}

    def sample(self, n):
        """Draws n of the last size rows, with replacement -> {name: array (n, *shape)}."""
        ages = np.random.randint(min(self.count, self.size), size=n)
        return self.read(self.count - 1 - ages)

    def state_dict(self):
        self.file.flush()
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


def relu_mlp(sizes):
    """Linear layers of these sizes, ReLU between them; initialised by PyTorch, as in TD3's code."""
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class TwinCritic(nn.Module):
    """Two networks, obs (n, obs_dim) and actions (n, action_dim) -> values of both, each (n,)."""

    def __init__(self, sizes):
        super().__init__()
        self.network1 = relu_mlp(sizes)
        self.network2 = relu_mlp(sizes)

    def forward(self, obs, actions):
        inputs = torch.cat((obs, actions), 1)
        return self.network1(inputs).squeeze(1), self.network2(inputs).squeeze(1)


class Agent(nn.Module):
    """The actor, obs -> actions in [-1, 1], and the two critics."""

    def __init__(self, obs_dim, action_dim, hidden_sizes):
        super().__init__()
        self.actor = relu_mlp((obs_dim, *hidden_sizes, action_dim))
        self.actor.append(nn.Tanh())
        self.critic = TwinCritic((obs_dim + action_dim, *hidden_sizes, 1))

    @torch.no_grad()
    def act(self, obs):
        """Arrays: what normalize_obs returns, (n, obs_dim) -> actions (n, action_dim)."""
        obs = torch.from_numpy(obs).to(self.actor[0].bias.device)
        return self.actor(obs).cpu().numpy()


# --------------------------------------------------------------------------------------------------
# TD3
# --------------------------------------------------------------------------------------------------

METRICS = ("qf1_values", "qf2_values", "qf1_loss", "qf2_loss", "actor_loss")  # CleanRL's names


class ExplorationNoise:
    """What is added to the actions: Gaussian, or an Ornstein-Uhlenbeck process."""

    def __init__(self, shape, args):
        # theta of the process is 0.15 (section 7 of Lillicrap et al.)
        self.decay = 0.85 if args.noise_type == "ou" else 0.0
        self.first_std = args.exploration_noise
        self.last_std = args.exploration_noise
        if args.final_exploration_noise is not None:
            self.last_std = args.final_exploration_noise
        self.state = np.zeros(shape)

    def sample(self, progress):
        """Returns noise (num_envs, action_dim); progress: part of the run, from 0 to 1."""
        std = self.first_std + (self.last_std - self.first_std) * progress
        self.state = self.decay * self.state + std * np.random.standard_normal(self.state.shape)
        return self.state

    def reset(self, dones):
        """Starts again where dones, bool (num_envs,), says so."""
        self.state[dones] = 0.0

    def state_dict(self):
        return {"state": torch.tensor(self.state)}

    def load_state_dict(self, state):
        self.state = state["state"].numpy()


def as_tensors(device, **floats):
    """Numbers as float32 tensors. A compiled function takes a new value of a tensor as it comes.

    For each new float it would be compiled again.
    """
    return {name: torch.tensor(x, device=device) for name, x in floats.items()}


def call(module, params, *inputs):
    """module(*inputs), with its weights taken from the flat tensor params: see FlatAdam."""
    by_name = {}
    sizes = [parameter.numel() for parameter in module.parameters()]
    for (name, parameter), chunk in zip(module.named_parameters(), params.split(sizes)):
        by_name[name] = chunk.view(parameter.shape)
    return torch.func.functional_call(module, by_name, inputs)


class FlatAdam(nn.Module):
    """Adam on the weights of a module, joined into one flat tensor, params.

    The module's own parameters become views of it. A step is then a few large operations, not many
    small ones for each layer. Make it after module.to(device). It is an nn.Module for its
    state_dict(); params is not in there: the module saves the weights.
    """

    def __init__(self, module, eps, weight_decay=0.0):
        super().__init__()
        self.eps = eps
        self.weight_decay = weight_decay
        self.params = nn.utils.parameters_to_vector(module.parameters()).detach()
        nn.utils.vector_to_parameters(self.params, module.parameters())
        self.register_buffer("exp_avg", torch.zeros_like(self.params))
        self.register_buffer("exp_avg_sq", torch.zeros_like(self.params))
        self.register_buffer("steps", self.params.new_zeros(()))

    def step(self, grads, lr):
        """Takes a step, in place, with flat gradients."""
        adam(
            [self.params],
            [grads],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],  # only amsgrad has more
            [self.steps],
            lr=lr,
            eps=self.eps,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self.weight_decay,
            amsgrad=False,
            maximize=False,
            fused=not torch.compiler.is_compiling(),  # the compiler fuses by itself
        )


class Target(nn.Module):
    """The parameters of a target network, flat: they follow those of an optimizer."""

    def __init__(self, optimizer):
        super().__init__()
        self.register_buffer("params", optimizer.params.clone())

    def follow(self, optimizer, tau):
        """Moves params by the part tau of the way to the optimizer's."""
        self.params.lerp_(optimizer.params, tau)


class Learner(nn.Module):
    """What updates change besides the networks: optimizers, targets, and METRICS not yet logged.

    sums: of each of these METRICS; counts: how many values a sum has; float32 (len(METRICS),).
    """

    def __init__(self, agent, args):
        super().__init__()
        self.actor_optimizer = FlatAdam(agent.actor, eps=1e-8)
        self.critic_optimizer = FlatAdam(agent.critic, eps=1e-8, weight_decay=args.weight_decay)
        self.actor_target = Target(self.actor_optimizer)
        self.critic_target = Target(self.critic_optimizer)
        self.register_buffer("sums", self.actor_target.params.new_zeros(len(METRICS)))
        self.register_buffer("counts", torch.zeros_like(self.sums))

    def add_metrics(self, **values):
        """Counts an update's metrics, scalars."""
        for name, value in values.items():
            place = METRICS.index(name)
            self.sums[place] += value.detach()
            self.counts[place] += 1

    def mean_metrics(self):
        """Returns the means of the metrics that have values, by name, and clears them."""
        means = {}
        for name, total, count in zip(METRICS, self.sums.tolist(), self.counts.tolist()):
            if count > 0:
                means[name] = total / count
        self.sums.zero_()
        self.counts.zero_()
        return means


def clip_grads(grads, max_norm):
    """Scales flat gradients down to the norm max_norm if theirs is larger (G8)."""
    return grads * torch.clamp(max_norm / (grads.norm() + 1e-6), max=1.0)


def gradient_step(loss, params, optimizer, lr, args):
    """A step of the optimizer with the gradient of loss, a scalar, by the flat params."""
    (grads,) = torch.autograd.grad(loss, params)
    if args.max_grad_norm is not None:
        grads = clip_grads(grads, args.max_grad_norm)
    optimizer.step(grads, lr)


def update(agent, learner, batch, target_noise, with_actor, coefs, args):
    """A step for the critics and, with_actor, one for the actor and all targets.

    Algorithm 1 of Fujimoto et al.; batch: see sample_batch; target_noise: standard normal, of the
    actions' shape (batch_size, action_dim).
    """
    obs, actions, next_obs = batch["obs"], batch["actions"], batch["next_obs"]
    # Target policy smoothing (section 5.3)
    noise = coefs["policy_noise"] * target_noise
    noise = noise.clamp(-coefs["noise_clip"], coefs["noise_clip"])
    next_actions = call(agent.actor, learner.actor_target.params, next_obs)
    next_actions = (next_actions + noise).clamp(-1.0, 1.0)
    # Clipped double Q-learning (section 4.2)
    next_values = call(agent.critic, learner.critic_target.params, next_obs, next_actions)
    nonterminal = 1 - batch["terminations"]
    td_targets = batch["rewards"] + coefs["gamma"] * nonterminal * torch.minimum(*next_values)

    optimizer = learner.critic_optimizer
    params = optimizer.params.detach().requires_grad_()
    values1, values2 = call(agent.critic, params, obs, actions)
    loss1 = nn.functional.mse_loss(values1, td_targets)
    loss2 = nn.functional.mse_loss(values2, td_targets)
    gradient_step(loss1 + loss2, params, optimizer, coefs["critic_lr"], args)
    learner.add_metrics(qf1_values=values1.mean(), qf2_values=values2.mean())
    learner.add_metrics(qf1_loss=loss1, qf2_loss=loss2)

    if with_actor:  # delayed policy updates (section 5.2)
        optimizer = learner.actor_optimizer
        params = optimizer.params.detach().requires_grad_()
        actions = call(agent.actor, params, obs)
        values1, _ = call(agent.critic, learner.critic_optimizer.params, obs, actions)
        actor_loss = -values1.mean()
        gradient_step(actor_loss, params, optimizer, coefs["actor_lr"], args)
        learner.actor_target.follow(learner.actor_optimizer, coefs["tau"])
        learner.critic_target.follow(learner.critic_optimizer, coefs["tau"])
        learner.add_metrics(actor_loss=actor_loss)


def sample_batch(replay, normalizer, args, device):
    """Draws a minibatch of transitions -> {column: tensor (batch_size, ...)}, see ReplayBuffer."""
    batch = normalizer.normalize_batch(replay.sample(args.batch_size))
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}


def count_updates(step, args):
    """The number of updates that are due after so many steps of a run."""
    return max(0, math.ceil((step - args.learning_starts) * args.updates_per_step))


def compile_or_not(function, args, device):
    """Returns function, compiled; with --no-compile, or without a working compiler, as it is."""
    if not args.compile:
        return function
    print("compiling the update: up to half a minute, the first time", flush=True)
    options = {}
    if device.type == "cpu":
        # Without the threshold, beta ** steps is computed again for every eight weights (a vector
        # register), with it only once
        options = {"cpp_wrapper": True, "realize_opcount_threshold": 4}
    try:  # on something small
        torch.compile(torch.sin, options=options)(torch.ones(1, device=device))
    except Exception as error:  # whatever is missing (compiler, headers, cache) is in the message
        print(f"running without compilation, slower: {one_line(error)}")
        return function
    torch._dynamo.config.trace_autograd_ops = True  # else it can't compile torch.autograd.grad
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def evaluate(agent, normalizer, args, video_dir=None, stream=1):
    """Plays --eval-episodes episodes with no noise and frozen statistics.

    stream picks the seeds, which are not the training's: 1 for the last evaluation, 2 for those
    during the training.
    """
    if video_dir:
        video_dir = video_dir / "evaluation"
    env = make_env(args.env_id, video_dir, max_steps=args.eval_max_steps)
    envs = VecEnv([env], (args.seed, stream))
    episodes = []
    while len(episodes) < args.eval_episodes:
        _, _, _, ended = envs.step(agent.act(normalizer.normalize_obs(envs.obs)))
        episodes += ended
    envs.close()
    return report_evaluation(episodes, args)


# --------------------------------------------------------------------------------------------------
# Run: the flags of an old run, folder, logs, checkpoints, signals. It is the same text in every
# script and knows nothing of what is learned: skip it on a first reading.
# --------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).name
SCRIPT_TEXT = Path(__file__).read_bytes()  # now, before somebody edits it


def fail(message, code=2):
    """Ends the program with one sentence: code 2 for bad input, 1 for a run that failed."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def check(condition, message):
    """Ends the program if the input is not as it must be."""
    if not condition:
        fail(message)


def one_line(error):
    """An error as a part of a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:150]


def read_flags(may_change):
    """Reads the command line; returns the flags, and the checkpoint of an old run or None.

    A run that --resume or --evaluate names keeps its own flags; only a few can be given again,
    those in may_change among them. args.folder is the folder of the run.
    """
    refuse_computed_flags()
    sys.path.append("")  # the current folder, for a module there: --env-id my_envs:MyEnv-v0
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    old_runs = [run for run in (args.resume, args.evaluate, args.init_from) if run is not None]
    check(len(old_runs) <= 1, "give only one of --resume, --evaluate and --init-from")
    takes_networks = args.evaluate is not None or args.init_from is not None
    check(takes_networks or not args.best, "--best needs --evaluate or --init-from")

    is_new = args.resume is None and args.evaluate is None
    args.folder = new_folder(args) if is_new else Path(old_runs[0])
    sys.excepthook = partial(explain_error, args)
    threading.excepthook = partial(explain_error_of_thread, args)
    if args.resume is not None and (args.folder / "checkpoint.pt").is_file():
        lock(args.folder)
    saved = None
    if old_runs:
        name = "best.pt" if args.best else "checkpoint.pt"
        saved = load_checkpoint(Path(old_runs[0]) / name)
    if not is_new:
        args = flags_of_old_run(args, saved, may_change)

    check(0 <= args.seed < 2**32, "--seed must be from 0 to 2**32 - 1")
    check(0 <= args.num_threads < 1024, "--num-threads must be from 0 to 1023")
    check(args.video_interval > 0, "--video-interval must be above 0")
    check(args.checkpoint_interval > 0, "--checkpoint-interval must be above 0")
    check(args.eval_interval >= 0, "--eval-interval must be 0 or above")
    check(args.eval_episodes >= 0, "--eval-episodes must be 0 or above")
    evaluates = args.eval_episodes > 0
    check(evaluates or args.eval_interval == 0, "--eval-episodes 0 needs --eval-interval 0")
    check(args.eval_max_steps > 0, "--eval-max-steps must be above 0")
    return args, saved


def refuse_computed_flags():
    """Ends the program if a flag is given that CleanRL's --help shows, but that is computed."""
    own = {field.name for field in fields(Args)}
    for name in ("batch_size", "minibatch_size", "num_iterations"):
        flag = "--" + name.replace("_", "-")
        given = [word for word in sys.argv if word.partition("=")[0].replace("_", "-") == flag]
        check(name in own or not given, f"{flag} follows from other flags: leave it out")


def new_folder(args):
    """The folder of a new run."""
    name = args.run_name
    if name is None:
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        name = name.replace("/", "-").replace(":", "-")
    is_name = name == Path(name).name and name not in ("", "..") and name.isprintable()
    check(is_name, "--run-name must be the name of a folder in runs/, not a path")
    return Path("runs", name)


def flags_of_old_run(args, saved, may_change):
    """The flags of the old run in a checkpoint, with those that the command line may change."""
    own = replace(
        Args(**saved["args"]),
        resume=args.resume,
        evaluate=args.evaluate,
        best=args.best,
        init_from=None,
    )
    folder = args.folder
    args = tyro.cli(Args, default=own)  # the command line again, now on the run's own flags
    args.folder = folder
    changeable = ["capture_video", "video_interval", "eval_interval", "eval_episodes"]
    changeable += ["eval_max_steps", *may_change]
    changed = []
    for name, value in asdict(own).items():
        if getattr(args, name) != value and name not in changeable:
            changed.append(f"{name} = {value}")
    advice = "leave these flags out, or start a new run"
    check(not changed, f"{folder} was made with {', '.join(changed)}: {advice}")
    return args


def lock(folder):
    """Locks a run's folder until this process ends, or ends the program if another one has it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # never closed
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        in_use = error.errno in (errno.EACCES, errno.EAGAIN)
        advice = "stop that one, wait for it, or choose another --run-name"
        check(not in_use, f"{folder} is in use by another process: {advice}")
        print(f"{folder} can't be locked ({error.strerror}): don't start this run twice")


def load_checkpoint(path):
    """Reads a checkpoint or ends the program; weights_only: a stranger's file can't run code."""
    try:
        broken = zipfile.ZipFile(path).testzip()  # torch.load doesn't look at checksums
        if broken:
            raise ValueError(f"bad checksum of {broken}")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["script"] != SCRIPT:
            raise ValueError(f"it was made by {saved['script']}")
        Args(**saved["args"])  # fails if the flags are others
        return saved
    except pickle.UnpicklingError:
        fail(f"{path} holds more than tensors and plain values, maybe code: it was not loaded")
    except Exception as error:  # torch.load raises many kinds
        fail(f"{path} is missing, damaged, or not of this {SCRIPT} ({one_line(error)})")


def explain_error(args, kind, error, trace):
    """sys.excepthook: tells in a sentence that a run's folder, the disk or a pipe fails.

    Any other error, such as a mistake in an environment, keeps its trace.
    """
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EPIPE)
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(trace)]
    is_told = False
    if isinstance(error, OSError) and not {"make_env", "reset", "step"} & set(functions):
        is_told = error.errno in numbers
        if isinstance(error.filename, str):
            path = Path(error.filename).absolute()
            folder = args.folder.absolute()
            is_told = is_told or path.is_relative_to(folder) or folder.is_relative_to(path)
    if not is_told:
        sys.__excepthook__(kind, error, trace)
        return
    advice = "start it again"
    if args.evaluate is None and os.path.exists(args.folder / "checkpoint.pt"):
        advice = f"go on with --resume {args.folder}"
    print(f"error: can't write ({error}): fix it, then {advice}", file=sys.stderr)
    if error.errno == errno.EPIPE:  # Python would complain again when it flushes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def explain_error_of_thread(args, hook_args):
    """threading.excepthook: the same, for the thread that writes TensorBoard's file."""
    explain_error(args, hook_args.exc_type, hook_args.exc_value, hook_args.exc_traceback)


def write_whole(path, data):
    """Writes bytes under another name, fsyncs and renames: a kill never leaves half a file."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def report_evaluation(episodes, args):
    """Prints the returns of an evaluation, and returns what evaluation.json has of it."""
    returns = [episode.episode_return for episode in episodes]
    lengths = [episode.length for episode in episodes]
    if returns:
        spread = f"{np.mean(returns):.1f} +- {np.std(returns):.1f}"
        line = f"evaluation: {spread} over {len(returns)} episodes, deterministic"
        truncated = [episode for episode in episodes if episode.ended_by == "truncation"]
        cut = sum(episode.length >= args.eval_max_steps for episode in truncated)
        if cut > 0:
            line += f"; {cut} of them ended by --eval-max-steps {args.eval_max_steps}"
        tqdm.write(line)  # the progress bar may be on the terminal
    return {"returns": returns, "lengths": lengths}


def random_states():
    """The states of all generators of the process; nothing draws on a GPU."""
    algorithm, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (algorithm, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }


def set_random_states(states):
    """Sets what random_states has returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


@contextmanager
def keep_random_states():
    """Puts the generators back afterwards, so that an evaluation doesn't change the training."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def tensors_in(state):
    """All tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list):
        return [tensor for item in state for tensor in tensors_in(item)]
    return []


class Run:
    """A run on disk, and the signals that stop it.

    The script restores the run's parts, loops over iterations(), adds to global_step, logs, and
    finishes. Iterations and steps are counted from the beginning of the run, not of the process.
    """

    SAVED = {
        "iteration": int,
        "global_step": int,
        "wall_seconds": float,
        "recent_returns": list,
        "best_return": float,
        "wandb_id": str | None,
        "log_sizes": dict,
    }

    def __init__(self, args, saved, total_steps, save_interval):
        self.args = args
        self.saved = saved
        self.total_steps = total_steps
        self.save_interval = save_interval  # in iterations
        self.folder = args.folder
        self.iteration = 0
        self.global_step = 0  # all environments together
        self.wall_seconds = 0.0
        self.recent_returns = []
        self.best_return = -math.inf  # of the evaluations during the training
        self.wandb_id = None
        self.log_sizes = {}
        self.writer = None
        self.stop_signal = None
        self.can_wait = False  # whether a signal waits for the end of the iteration
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # started by nohup
            signal.signal(signum, self.on_signal)
        if args.resume:
            self.leave_if_finished()
        elif not args.evaluate:
            self.make_folder()

    def make_folder(self):
        """Makes the folder and config.json; ends the program if the folder has another run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock(self.folder)
        files = ("checkpoint.pt", "best.pt", "episodes.csv", "evaluation.json")
        advice = "choose another --run-name"
        if os.path.exists(self.folder / "checkpoint.pt"):
            advice += f", or go on with --resume {self.folder}"
        for path in self.folder.iterdir():
            is_of_run = path.name in files or path.name.startswith("events.")
            check(not is_of_run, f"{self.folder} has {path.name} of another run: {advice}")
        # By sh, so that where there is no git it is empty, as outside a repository
        describe = ["sh", "-c", "git describe --always --dirty"]
        git = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
        cuda = self.args.cuda and torch.cuda.is_available()
        versions = {package.name: package.version for package in distributions()}
        config = {
            "args": asdict(self.args),
            "defaults": asdict(Args()),
            "script": str(Path(__file__).absolute()),
            "command": sys.argv,
            "git_commit": git.stdout.strip(),
            "machine": list(os.uname()),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "versions": {"python": sys.version.split()[0], **versions},
        }
        write_whole(self.folder / "config.json", json.dumps(config, indent=2).encode())

    def leave_if_finished(self):
        """Ends the program if the run to resume has been finished."""
        try:
            results = json.loads((self.folder / "evaluation.json").read_text())
        except (FileNotFoundError, ValueError):  # not yet written, or damaged
            return
        print(f"{self.folder} is finished: {json.dumps(results)}")
        sys.exit()

    def load(self, **parts):
        """Brings parts back from the checkpoint of an old run, in this order.

        A part is anything with state_dict() and load_state_dict().
        """
        try:
            for name, part in parts.items():
                part.load_state_dict(self.saved[name])
            if self.args.evaluate:  # the last evaluation again, if environments draw from these
                set_random_states(self.saved["run"]["random"])
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            source = self.args.init_from or self.folder
            advice = "it is of a run with other sizes, of another version, or damaged"
            fail(f"the checkpoint in {source} doesn't fit ({one_line(error)}): {advice}")

    def restore(self, **parts):
        """Names the run's parts and, with --resume, loads them. One must be called agent."""
        self.parts = parts
        if self.args.resume:
            self.load(**parts, run=self)

    def state_dict(self):
        state = {name: getattr(self, name) for name in self.SAVED}
        return {**state, "random": random_states()}

    def load_state_dict(self, state):
        for name, kind in self.SAVED.items():
            if not isinstance(state[name], kind):
                raise TypeError(f"{name} is {state[name]!r}")
            setattr(self, name, state[name])
        if not 0 <= self.iteration <= self.global_step:
            raise ValueError(f"iteration {self.iteration} at step {self.global_step}")
        set_random_states(state["random"])

    def keep_script(self):
        """Keeps a copy of this script in the folder, and one more if a resume finds it changed."""
        stem = Path(SCRIPT).stem
        texts = [
            path
            for path in self.folder.iterdir()
            if path.name.startswith(stem) and path.suffix == ".py"
        ]
        if not texts:
            write_whole(self.folder / SCRIPT, SCRIPT_TEXT)
            return
        last = max(texts, key=os.path.getmtime)
        if last.read_bytes() != SCRIPT_TEXT:
            new = self.folder / f"{stem}.{self.global_step}.py"
            print(f"{SCRIPT} has changed since this run began: its new text is kept as {new}")
            write_whole(new, SCRIPT_TEXT)

    def open_logs(self):
        """Opens the logs. What was logged after the checkpoint is cut off: it will come again."""
        for path in self.folder.iterdir():
            is_log = path.name == "episodes.csv" or path.name.startswith("events.")
            if is_log and path.is_file() and not path.is_symlink():
                os.truncate(path, min(path.stat().st_size, self.log_sizes.get(path.name, 0)))
        self.writer = SummaryWriter(self.folder)
        self.episodes_file = open(self.folder / "episodes.csv", "a")
        if self.episodes_file.tell() == 0:
            self.episodes_file.write("global_step,wall_seconds,env,return,length,ended_by\n")
        self.start_time = time.time() - self.wall_seconds  # as if the run had never paused

        self.terminal = os.isatty(2)
        self.last_line = time.time()
        bar_file = sys.stderr
        if not self.terminal:
            bar_file = open(os.devnull, "w")  # there print() shows the bar's line
        self.bar = tqdm(
            total=self.total_steps,
            initial=self.global_step,
            unit=" steps",
            dynamic_ncols=True,
            file=bar_file,
        )

    def start_wandb(self):
        """Starts W&B, which copies what TensorBoard gets."""
        import wandb

        try:
            online = os.environ.get("WANDB_MODE", "online") == "online"
            if online and not wandb.login(prompt=False):
                fail("--track: run `wandb login`, or set WANDB_MODE=offline and sync later")
            run = wandb.init(
                project=self.args.wandb_project_name,
                entity=self.args.wandb_entity,
                config=asdict(self.args),
                name=self.folder.name,
                id=self.wandb_id,
                resume="allow",
                dir=self.folder,
                sync_tensorboard=True,
            )
        except Exception as error:  # network, server
            advice = "try again, or set WANDB_MODE=offline and sync later"
            fail(f"--track: W&B doesn't start ({error}): {advice}", code=1)
        self.wandb_id = run.id

    def iterations(self):
        """Yields the numbers of the iterations that are left, and saves the run between them.

        After Ctrl-C, SIGTERM or SIGHUP the program ends here; with python -i only the loop ends.
        """
        self.keep_script()
        if self.args.track:
            self.start_wandb()
        if not self.args.resume:
            self.save()  # before there are logs: a folder with logs has a checkpoint
        self.open_logs()
        done = self.global_step >= self.total_steps
        while not done:
            self.iteration += 1
            yield self.iteration - 1
            self.can_wait = True
            done = self.stop_signal is not None or self.global_step >= self.total_steps
            if done or self.iteration % self.save_interval == 0:
                self.save()
            self.show_progress(done)

        self.can_wait = False
        self.bar.close()
        self.writer.close()
        self.episodes_file.close()
        if self.stop_signal is not None:
            command = f"python {SCRIPT} --resume {self.folder}"
            print(f"stopped at step {self.global_step}; go on with: {command}")
            if not sys.flags.interactive:
                sys.exit(128 + self.stop_signal)

    def on_signal(self, signum, frame):
        """Ctrl-C, SIGTERM and SIGHUP: the run is saved and ends after this iteration.

        It ends at once in the first iteration, which may compile for minutes, in the last
        evaluation, and after a second Ctrl-C.
        """
        if signum == signal.SIGINT and hasattr(sys, "ps1"):  # in the shell of python -i
            raise KeyboardInterrupt
        second_ctrl_c = signum == signal.SIGINT and self.stop_signal is not None
        if second_ctrl_c or not self.can_wait:
            advice = f"; --resume {self.folder} goes on from its last checkpoint, if there is one"
            if self.args.evaluate:
                advice = ""
            fail(f"stopped at once{advice}", code=128 + signum)
        self.stop_signal = signum

    def save(self, name="checkpoint.pt"):
        """Writes a checkpoint: tensors and plain Python values."""
        if self.writer is not None:
            self.writer.flush()
            self.episodes_file.flush()
            self.wall_seconds = time.time() - self.start_time
        files = [path for path in self.folder.iterdir() if path.is_file()]
        self.log_sizes = {path.name: path.stat().st_size for path in files}
        checkpoint = {"script": SCRIPT, "args": asdict(self.args), "run": self.state_dict()}
        for part_name, part in self.parts.items():
            checkpoint[part_name] = part.state_dict()
        self.check_finite(*tensors_in(checkpoint))
        file = io.BytesIO()
        torch.save(checkpoint, file)
        write_whole(self.folder / name, file.getvalue())

    def show_progress(self, done):
        """Draws a bar on a terminal; elsewhere prints a line every five seconds."""
        seconds = 0.1 if self.terminal else 5
        if not done and time.time() - self.last_line < seconds:
            return
        self.last_line = time.time()
        if self.recent_returns:
            self.bar.set_postfix_str(f"return {np.mean(self.recent_returns):.1f}", refresh=False)
        self.bar.update(min(self.global_step, self.total_steps) - self.bar.n)
        self.bar.refresh()
        self.episodes_file.flush()  # for those who watch the run
        if not self.terminal:
            print(self.bar, flush=True)

    def log_episode(self, step, episode):
        """Logs an Episode that ended at a step of the run."""
        episode_return = episode.episode_return
        length = episode.length
        wall_seconds = time.time() - self.start_time
        row = f"{step},{wall_seconds:.2f},{episode.env},{episode_return!r},{length}"
        self.episodes_file.write(f"{row},{episode.ended_by}\n")
        self.writer.add_scalar("charts/episodic_return", episode_return, step)
        self.writer.add_scalar("charts/episodic_length", length, step)
        self.recent_returns = [*self.recent_returns[-99:], episode_return]

    def log(self, scalars):
        """Logs numbers by their tags, and the speed."""
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, float(value), self.global_step)
        sps = int(self.global_step / (time.time() - self.start_time))
        self.writer.add_scalar("charts/SPS", sps, self.global_step)

    def log_evaluation(self, results):
        """Logs an evaluation during the training; the best so far is kept as best.pt."""
        mean_return = float(np.mean(results["returns"]))
        self.writer.add_scalar("eval/episodic_return", mean_return, self.global_step)
        if mean_return > self.best_return:
            self.best_return = mean_return
            self.save("best.pt")

    def check_finite(self, *tensors):
        """Ends a run whose learning has diverged, before it is saved."""
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            fail(
                f"iteration {self.iteration}: the loss, a weight or a statistic is not finite; "
                f"{self.folder} keeps the last good checkpoint. Try a lower --learning-rate, or "
                "look for NaN and huge numbers in the environment's rewards and observations",
                code=1,
            )

    def finish(self, results):
        """Writes the results of the last evaluation, which make the run a finished one."""
        if self.args.save_model:
            name = self.args.exp_name.replace("/", "-")
            file = io.BytesIO()
            torch.save(self.parts["agent"].state_dict(), file)
            write_whole(self.folder / f"{name}.cleanrl_model", file.getvalue())
        write_whole(self.folder / "evaluation.json", json.dumps(results).encode())
        print(f"finished: everything is in {self.folder}")


# End of Run. --------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    args, saved = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    # A second thread gains less than it costs where other programs want the cores
    torch.set_num_threads(args.num_threads or 1)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    video_dir = args.folder / "videos" if args.capture_video else None
    training_video_dir = None if args.evaluate else video_dir
    envs = [make_env(args.env_id, training_video_dir, args.video_interval)]
    envs += [make_env(args.env_id) for _ in range(args.num_envs - 1)]
    envs = VecEnv(envs, args.seed)
    obs_dim = envs.obs.shape[1]
    action_dim = gym.spaces.flatdim(envs.action_space)
    normalizer = Normalizer(envs, args)
    agent = Agent(obs_dim, action_dim, args.hidden_sizes).to(device)
    total_steps = args.num_iterations * args.num_envs
    save_interval = max(args.checkpoint_interval // args.num_envs, 1)
    run = Run(args, saved, total_steps, save_interval)
    if args.evaluate or args.init_from:
        run.load(agent=agent, obs_rms=normalizer.obs_rms, return_rms=normalizer.return_rms)
    if args.evaluate:
        evaluate(agent, normalizer, args, video_dir)
        sys.exit()
    learner = Learner(agent, args)
    noise = ExplorationNoise((args.num_envs, action_dim), args)
    columns = {
        "obs": (np.float32, (obs_dim,)),
        "actions": (np.float32, (action_dim,)),  # in [-1, 1]
        "rewards": (np.float32, ()),
        "next_obs": (np.float32, (obs_dim,)),  # what truly followed, before any reset
        "terminations": (np.float32, ()),  # 0 or 1
    }
    replay = ReplayBuffer(
        run.folder / "replay.bin",
        size=min(args.buffer_size, total_steps),
        spare=args.checkpoint_interval + args.num_envs,
        columns=columns,
        is_new=args.resume is None,
    )
    run.restore(
        agent=agent,
        learner=learner,
        noise=noise,
        obs_rms=normalizer.obs_rms,
        return_rms=normalizer.return_rms,
        normalizer=normalizer,
        replay=replay,
        envs=envs,
    )
    # These begin an episode, either by chance or because they could not be brought back
    just_reset = np.array([not env.actions for env in envs.envs])
    noise.reset(just_reset)
    normalizer.discounted_returns[just_reset] = 0.0

    coefs = as_tensors(
        device,
        actor_lr=args.actor_learning_rate or args.learning_rate,
        critic_lr=args.critic_learning_rate or args.learning_rate,
        gamma=args.gamma,
        tau=args.tau,
        policy_noise=args.policy_noise,
        noise_clip=args.noise_clip,
    )
    compiled_update = compile_or_not(update, args, device)
    # Compile before the first step: on zeros, with copies of what changes
    zeros = {
        name: torch.zeros(args.batch_size, *shape, device=device)
        for name, (_, shape) in columns.items()
    }
    variants = [True] if args.policy_frequency == 1 else [False, True]
    # Not zeros["actions"]: for one tensor in two places it would be compiled once more
    target_noise = torch.zeros(args.batch_size, action_dim, device=device)
    for with_actor in variants:
        copied = copy.deepcopy(learner)
        compiled_update(agent, copied, zeros, target_noise, with_actor, coefs, args)

    random_steps = args.learning_starts if args.random_steps is None else args.random_steps
    for iteration in run.iterations():
        if run.global_step < random_steps:
            actions = np.random.uniform(-1.0, 1.0, (args.num_envs, action_dim))
        else:
            actions = agent.act(normalizer.normalize_obs(envs.obs))
            progress = iteration / max(args.num_iterations - 1, 1)
            actions = np.clip(actions + noise.sample(progress), -1.0, 1.0)

        obs = envs.obs.copy()
        rewards, terminations, truncations, episodes = envs.step(actions)
        next_obs = envs.obs.copy()
        for episode in episodes:
            next_obs[episode.env] = episode.final_obs
        dones = terminations | truncations
        noise.reset(dones)
        normalizer.update(envs.obs, rewards, dones)
        replay.add(
            obs=obs,
            actions=actions,
            rewards=rewards,
            next_obs=next_obs,
            terminations=terminations,
        )
        updates_before = count_updates(run.global_step, args)
        run.global_step += args.num_envs
        updates_after = count_updates(run.global_step, args)

        for number in range(updates_before, updates_after):
            batch = sample_batch(replay, normalizer, args, device)
            target_noise = torch.randn(args.batch_size, action_dim).to(device)
            with_actor = number % args.policy_frequency == 0
            compiled_update(agent, learner, batch, target_noise, with_actor, coefs, args)

        for episode in episodes:
            run.log_episode(run.global_step, episode)
        if (iteration + 1) % 100 == 0:
            run.check_finite(learner.sums)
            means = learner.mean_metrics()
            run.log({f"losses/{name}": mean for name, mean in means.items()})
        if args.eval_interval > 0 and run.global_step % args.eval_interval < args.num_envs:
            with keep_random_states():
                results = evaluate(agent, normalizer, args, stream=2)
            run.log_evaluation(results)

    envs.close()
    if run.stop_signal is None:
        run.finish(evaluate(agent, normalizer, args, video_dir))
