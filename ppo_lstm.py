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
"""PPO with an LSTM, a GRU or a plain RNN, for discrete actions and vector observations.

Proximal Policy Optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347. It has the
details of ppo.py, numbered as there, and five for recurrent networks, l1 to l5. The update is not
compiled, because the ends of episodes cut it in other places each time. --no-memory is the control
experiment. Diff it against ppo.py or ppo_atari_lstm.py.

    python ppo_lstm.py --env-id CartPole-v1 --total-timesteps 500000
"""

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
    compile: bool = True  # accepted, but this script compiles nothing
    num_threads: int = 0  # threads of PyTorch (0: chosen by the script)
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "plainrl"  # project at Weights & Biases
    wandb_entity: str | None = None  # user or team at Weights & Biases
    capture_video: bool = False  # film the evaluation and training episodes of one environment
    video_interval: int = 100  # film every N-th training episode
    save_model: bool = False  # write the final weights to EXPERIMENT.cleanrl_model too
    checkpoint_interval: int = 10  # iterations (a rollout and its update) between checkpoints
    eval_interval: int = 0  # iterations between evaluations during the training (0: none)
    eval_episodes: int = 10  # episodes of an evaluation, with deterministic actions and own seeds
    eval_max_steps: int = 100000  # steps after which an episode of an evaluation ends
    resume: str | None = None  # continue the run in this folder, exactly; its flags come with it
    evaluate: str | None = None  # play the policy of the run in this folder; its flags come with it
    init_from: str | None = None  # begin with the networks and statistics of the run in this folder
    best: bool = False  # with --evaluate or --init-from: the networks of that run's best evaluation

    env_id: str = "CartPole-v1"  # id of the Gymnasium environment
    total_timesteps: int = 500000  # steps of the run, all environments together
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 4  # number of environments
    num_steps: int = 128  # steps in each environment per rollout
    anneal_lr: bool = True  # lower the learning rate linearly over the run
    gamma: float = 0.99  # discount factor
    hidden_sizes: tuple[int, ...] = (64, 64)  # units of the hidden layers before the recurrent core
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    norm_adv: bool = True  # normalise the advantages in each minibatch
    clip_coef: float = 0.2  # clip range of the probability ratio and of the value loss
    anneal_clip: bool = False  # lower the clip range linearly over the run
    clip_vloss: bool = True  # clip the value loss as openai/baselines does
    ent_coef: float = 0.01  # coefficient of the entropy
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient, actor and critic together
    target_kl: float | None = None  # no more epochs after one whose approximate KL exceeds this
    bootstrap_truncated: bool = True  # bootstrap where a time limit has cut an episode
    cell: Literal["lstm", "gru", "rnn"] = "lstm"  # kind of recurrent core
    hidden_size: int = 128  # units of the recurrent core
    memory: bool = True  # carry the core's state from step to step (--no-memory: the control)


def parse_args():
    """Returns the flags, and the checkpoint that --resume or --evaluate starts from, or None.

    To the flags it adds batch_size (steps of a rollout, all environments) and num_iterations;
    read_flags has added folder.
    """
    args, saved = read_flags(may_change=["checkpoint_interval"])
    check(args.total_timesteps > 0, "--total-timesteps must be above 0")
    check(args.learning_rate > 0, "--learning-rate must be above 0")
    check(args.num_envs > 0, "--num-envs must be above 0")
    check(args.num_steps > 0, "--num-steps must be above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(min(args.hidden_sizes, default=0) > 0, "--hidden-sizes must be numbers above 0")
    check(0 <= args.gae_lambda <= 1, "--gae-lambda must be from 0 to 1")
    check(args.num_minibatches > 0, "--num-minibatches must be above 0")
    check(args.update_epochs > 0, "--update-epochs must be above 0")
    check(args.clip_coef > 0, "--clip-coef must be above 0")
    check(args.ent_coef >= 0, "--ent-coef must be 0 or above")
    check(args.vf_coef >= 0, "--vf-coef must be 0 or above")
    check(args.max_grad_norm > 0, "--max-grad-norm must be above 0")
    check(args.target_kl is None or args.target_kl >= 0, "--target-kl must be 0 or above")
    check(args.hidden_size > 0, "--hidden-size must be above 0")

    args.batch_size = args.num_envs * args.num_steps
    args.num_iterations = args.total_timesteps // args.batch_size
    remainder = args.num_envs % args.num_minibatches
    check(remainder == 0, "--num-envs must be a multiple of --num-minibatches")  # l4
    minibatch_size = args.batch_size // args.num_minibatches
    check(minibatch_size > 1 or not args.norm_adv, "minibatches of one step need --no-norm-adv")
    check(args.num_iterations > 0, f"--total-timesteps is less than a rollout, {args.batch_size}")
    return args, saved


# --------------------------------------------------------------------------------------------------
# Environments
# --------------------------------------------------------------------------------------------------


class ActionMask(gym.Wrapper):
    """Appends the action mask to an observation: 1 for what is allowed, 0 for the rest.

    An action has len(nvec) parts; part k is from 0 to nvec[k] - 1 and has nvec[k] places in the
    mask, which is info["action_mask"]. Without one, everything is allowed. Observations are
    float32 (obs_dim + sum(nvec),).
    """

    def __init__(self, env):
        super().__init__(env)
        space = env.action_space
        nvec = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
        self.nvec = np.ravel(nvec)
        self.action_space = gym.spaces.MultiDiscrete(self.nvec)
        self.first_action = np.ravel(space.start)
        self.action_shape = space.shape
        self.mask_size = int(self.nvec.sum())
        self.first_place = np.cumsum(self.nvec) - self.nvec

    def add_mask(self, obs, info):
        """Keeps the mask for step(), and returns obs with the mask behind it."""
        self.mask = info.get("action_mask")
        row = np.ones(len(obs) + self.mask_size, np.float32)
        row[: len(obs)] = obs
        if self.mask is not None:
            self.mask = np.hstack(self.mask)  # from a tuple of masks, if there are several parts
            if self.mask.shape != (self.mask_size,):
                fail(f"an action_mask is {self.mask.shape}, not ({self.mask_size},)", code=1)
            row[len(obs) :] = self.mask
        return row

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return self.add_mask(obs, info), info

    def step(self, action):
        if self.mask is not None:  # after an episode's end it may allow nothing
            largest = np.maximum.reduceat(self.mask, self.first_place)  # of each part
            if not (largest > 0).all():
                fail("an action_mask allows no action: fix the environment", code=1)
        action = (action + self.first_action).reshape(self.action_shape)
        action = action[()]  # an array without dimensions becomes a number, for Discrete
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.add_mask(obs, info), reward, terminated, truncated, info


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
    fits = isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
    check(fits, f"{env_id} has the action space {space}, but this script needs a discrete one")
    obs_space = env.observation_space
    fits = obs_space.is_np_flattenable
    advice = "but this script needs one of fixed size"
    check(fits, f"{env_id} has the observation space {obs_space}, {advice}")

    if max_steps:
        env = gym.wrappers.TimeLimit(env, max_steps)
    env = gym.wrappers.TransformReward(env, float)  # so that float64 numbers are summed
    env = gym.wrappers.RecordEpisodeStatistics(env)
    if video_dir:
        env = RecordVideo(env, video_dir, video_interval)
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    env = ActionMask(env)
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


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


MASKED = -1e8  # logit of an action that the mask forbids: its probability is exactly 0


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    """Orthogonal weights of gain std, constant bias (G9; baselines a2c/utils.py)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def tanh_layers(inputs, sizes):
    """A list of layers of these sizes, with tanh after each (M6)."""
    layers = []
    for size in sizes:
        layers += [layer_init(nn.Linear(inputs, size)), nn.Tanh()]
        inputs = size
    return layers


def make_cell(kind, inputs, hidden_size):
    """The recurrent core: orthogonal weights, biases 0 (l1; baselines a2c/utils.py)."""
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
    cell = kinds[kind](inputs, hidden_size, batch_first=True)
    # On a GPU it would move the weights out of the optimizer's flat tensor
    cell.flatten_parameters = lambda: None
    for name, parameter in cell.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return cell


class Memory:
    """The state of the recurrent core in each environment, (num_states, num_envs, hidden_size)."""

    def __init__(self, agent, num_envs):
        device = agent.actor.bias.device
        shape = (agent.num_states, num_envs, agent.hidden_size)
        self.state = torch.zeros(shape, device=device)  # l2

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        if state["state"].shape != self.state.shape:
            raise ValueError("the memory has another shape")  # copy_ would repeat it
        self.state.copy_(state["state"])


class Agent(nn.Module):
    """Tanh layers (M6), a recurrent core, and on it both policy and value.

    The policy is len(nvec) independent categorical distributions. obs: (n, num_steps, obs_dim +
    sum(nvec)), with the masks of ActionMask. memory: the core's state, (num_states, n,
    hidden_size).
    """

    def __init__(self, obs_dim, nvec, args):
        super().__init__()
        self.obs_dim = obs_dim
        self.nvec = nvec
        self.hidden_size = args.hidden_size
        self.use_memory = args.memory
        self.network = nn.Sequential(*tanh_layers(obs_dim, args.hidden_sizes))
        self.cell = make_cell(args.cell, args.hidden_sizes[-1], args.hidden_size)
        self.num_states = 2 if args.cell == "lstm" else 1
        self.actor = layer_init(nn.Linear(args.hidden_size, sum(nvec)), 0.01)
        self.critic = layer_init(nn.Linear(args.hidden_size, 1), 1.0)

    def recur(self, x, memory, dones=None):
        """Runs the core over x (n, num_steps, inputs), from memory.

        dones: bool (n, num_steps), where episodes end, or None if none does. Returns the outputs
        (n, num_steps, hidden_size) and the memory after them. The steps between two ends are one
        call, which equals a loop over them.
        """
        if not self.use_memory:  # every step is a first one
            outputs, _ = self.cell(x.flatten(0, 1)[:, None])
            return outputs.view(*x.shape[:2], -1), memory

        begins = [0]
        if dones is not None:
            ended = dones[:, :-1].any(0)  # by step, in any of the n
            begins += (ended.nonzero()[:, 0] + 1).tolist()
        ends = [*begins[1:], x.shape[1]]
        outputs = []
        for begin, end in zip(begins, ends):
            if begin > 0:
                memory = memory.masked_fill(dones[:, begin - 1, None], 0.0)  # l3
            if self.num_states == 2:
                output, states = self.cell(x[:, begin:end], memory.split(1))
                memory = torch.cat(states)
            else:
                output, memory = self.cell(x[:, begin:end], memory)
            outputs.append(output)
        return torch.cat(outputs, 1), memory

    def heads(self, obs, memory, dones=None):
        """Returns log-probabilities (n, num_steps, sum(nvec)), values (n, num_steps) and memory.

        Masked actions have probability 0, https://arxiv.org/abs/2006.14171
        """
        hidden = self.network(obs[:, :, : self.obs_dim])
        hidden, memory = self.recur(hidden, memory, dones)
        masks = obs[:, :, self.obs_dim :]
        logits = torch.where(masks > 0, self.actor(hidden), MASKED)
        parts = [part.log_softmax(2) for part in logits.split(self.nvec, 2)]
        return torch.cat(parts, 2), self.critic(hidden).squeeze(2), memory

    def forward(self, obs, actions, memory, dones):
        """Returns logprobs, entropy, values, each (n, num_steps).

        actions: int64 (n, num_steps, len(nvec)); memory: here (n, num_states, hidden_size), since
        minibatches are made of rows.
        """
        memory = memory.transpose(0, 1).contiguous()
        all_logprobs, values, _ = self.heads(obs, memory, dones)
        # The parts are independent, so their log-probabilities add up (d1)
        logprobs = 0.0
        for part, action in zip(all_logprobs.split(self.nvec, 2), actions.split(1, 2)):
            logprobs = logprobs + part.gather(2, action).squeeze(2)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(2)
        return logprobs, entropy, values

    @torch.no_grad()
    def step(self, obs, memory):
        """Like heads, for one step, on arrays obs (n, ...) and without gradients."""
        obs = torch.from_numpy(obs[:, None]).to(memory.device)
        all_logprobs, values, memory = self.heads(obs, memory)
        return all_logprobs[:, 0].cpu().numpy(), values[:, 0].cpu().numpy(), memory

    def argmax_parts(self, scores):
        """Arrays: scores (n, sum(nvec)) -> the largest of each part, int64 (n, len(nvec))."""
        actions = np.zeros((len(scores), len(self.nvec)), np.int64)
        begin = 0
        for k, n in enumerate(self.nvec):
            actions[:, k] = scores[:, begin : begin + n].argmax(1)
            begin += n
        return actions

    def action_logprobs(self, all_logprobs, actions):
        """Arrays: all_logprobs (n, sum(nvec)), actions (n, len(nvec)) -> the actions' own, (n,)."""
        first_place = np.cumsum(self.nvec) - self.nvec
        return np.take_along_axis(all_logprobs, first_place + actions, 1).sum(1)


# --------------------------------------------------------------------------------------------------
# PPO
# --------------------------------------------------------------------------------------------------

METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def rollout(agent, envs, num_steps, memory):
    """Plays num_steps in each environment (G10), and carries memory along.

    Returns arrays (num_steps, num_envs, ...): float32 obs, int64 actions, float32 logprobs, values
    and rewards, bool terminations and truncations; and the episodes that ended, each with its last
    step and the memory (num_states, hidden_size) after it.
    """
    shape = (num_steps, *envs.obs.shape)
    obs = np.zeros(shape, np.float32)
    actions = np.zeros((*shape[:2], len(agent.nvec)), np.int64)
    logprobs = np.zeros(shape[:2], np.float32)
    values = np.zeros(shape[:2], np.float32)
    rewards = np.zeros(shape[:2], np.float32)
    terminations = np.zeros(shape[:2], bool)
    truncations = np.zeros(shape[:2], bool)
    episodes = []
    # argmax(logits + Gumbel noise) is a sample of softmax(logits)
    gumbel_noise = -torch.empty(*shape[:2], sum(agent.nvec)).exponential_().log().numpy()

    for step in range(num_steps):
        obs[step] = envs.obs
        all_logprobs, values[step], memory.state = agent.step(envs.obs, memory.state)
        scores = all_logprobs + gumbel_noise[step]
        actions[step] = agent.argmax_parts(scores)
        logprobs[step] = agent.action_logprobs(all_logprobs, actions[step])
        rewards[step], terminations[step], truncations[step], ended = envs.step(actions[step])
        for episode in ended:
            episodes.append((step, episode, memory.state[:, episode.env].clone()))
        memory.state[:, terminations[step] | truncations[step]] = 0.0  # l3
    return obs, actions, logprobs, values, rewards, terminations, truncations, episodes


def compute_advantages(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Generalized advantage estimation (G2): https://arxiv.org/abs/1506.02438.

    All arrays (num_steps, num_envs), float32 or bool. next_values: of the observation that truly
    followed each step, before any reset; after a termination they don't count. The sum ends with
    the episode, at dones.
    """
    deltas = rewards + gamma * np.where(terminations, 0.0, next_values) - values
    decays = gamma * gae_lambda * ~dones  # float64, and so is the running sum
    advantages = np.zeros_like(deltas)
    advantage = np.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        advantage = deltas[step] + decays[step] * advantage
        advantages[step] = advantage
    return advantages


def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns], arrays; nan where all returns are equal."""
    variance = np.var(returns)
    if variance == 0:
        return np.nan
    return 1 - np.var(returns - values) / variance


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


def ppo_loss(params, agent, batch, coefs, args):
    """PPO's loss on a minibatch: returns it and its metrics, float32 (6,).

    params: the agent's parameters as one flat tensor; batch: obs, actions, memory and dones as the
    agent takes them, and logprobs, advantages, returns, values (n, num_steps).
    """
    clip_coef = coefs["clip_coef"]
    inputs = (batch["obs"], batch["actions"], batch["memory"], batch["dones"])
    logprobs, entropy, values = call(agent, params, *inputs)
    logratio = logprobs - batch["logprobs"]
    ratio = logratio.exp()

    advantages = batch["advantages"]
    if args.norm_adv:  # G3
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    policy_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()  # G1

    value_losses = (values - batch["returns"]) ** 2
    if args.clip_vloss:  # G4
        change = torch.clamp(values - batch["values"], -clip_coef, clip_coef)
        clipped_values = batch["values"] + change
        value_losses = torch.max(value_losses, (clipped_values - batch["returns"]) ** 2)
    value_loss = 0.5 * value_losses.mean()

    entropy = entropy.mean()
    loss = policy_loss - coefs["ent_coef"] * entropy + coefs["vf_coef"] * value_loss  # G5

    old_approx_kl = (-logratio).mean()
    approx_kl = ((ratio - 1) - logratio).mean()  # http://joschu.net/blog/kl-approx.html
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    metrics = (policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac)
    return loss, torch.stack(metrics).detach()


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


def clip_grads(grads, max_norm):
    """Scales flat gradients down to the norm max_norm if theirs is larger (G8)."""
    return grads * torch.clamp(max_norm / (grads.norm() + 1e-6), max=1.0)


def update_minibatches(optimizer, agent, batch, indices, coefs, args):
    """A step of Adam for each row of indices (k, minibatch_size); returns sums of the metrics."""
    total = torch.zeros(len(METRICS), device=optimizer.params.device)
    for row in indices.unbind():
        minibatch = {name: x[row] for name, x in batch.items()}
        # The weights as one tensor, so that there is one gradient to clip and to apply
        params = optimizer.params.detach().requires_grad_()
        loss, metrics = ppo_loss(params, agent, minibatch, coefs, args)
        (grads,) = torch.autograd.grad(loss, params)
        optimizer.step(clip_grads(grads, coefs["max_grad_norm"]), coefs["lr"])
        total = total + metrics
    return total


def update(step_minibatches, optimizer, agent, batch, coefs, args):
    """PPO's epochs over a batch; returns the metrics, averaged over all minibatches.

    step_minibatches: update_minibatches, compiled or not.
    """
    # Two minibatches per call: compiled, they run faster than one; four compile for too long
    per_call = 2 if args.num_minibatches % 2 == 0 else 1
    epochs = []
    for _ in range(args.update_epochs):
        indices = torch.randperm(len(batch["obs"])).view(args.num_minibatches, -1)  # G7
        indices = indices.to(optimizer.params.device)
        sums = []
        for rows in indices.split(per_call):
            sums.append(step_minibatches(optimizer, agent, batch, rows, coefs, args))
        epochs.append(torch.stack(sums).sum(0) / args.num_minibatches)
        approx_kl = epochs[-1][METRICS.index("approx_kl")]
        if args.target_kl is not None and approx_kl > args.target_kl:  # X3
            break
    return torch.stack(epochs).mean(0).cpu()


def evaluate(agent, args, video_dir=None, stream=1):
    """Plays --eval-episodes episodes with the likeliest actions.

    stream picks the seeds, which are not the training's: 1 for the last evaluation, 2 for those
    during the training.
    """
    if video_dir:
        video_dir = video_dir / "evaluation"
    env = make_env(args.env_id, video_dir, max_steps=args.eval_max_steps)
    envs = VecEnv([env], (args.seed, stream))
    memory = Memory(agent, num_envs=1)
    episodes = []
    while len(episodes) < args.eval_episodes:
        all_logprobs, _, memory.state = agent.step(envs.obs, memory.state)
        actions = agent.argmax_parts(all_logprobs)
        _, terminations, truncations, ended = envs.step(actions)
        memory.state[:, terminations | truncations] = 0.0  # l3
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
    torch.set_num_threads(args.num_threads or 1)  # a second thread gains nothing on layers of 64
    torch.backends.cudnn.deterministic = args.torch_deterministic
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    video_dir = args.folder / "videos" if args.capture_video else None
    training_video_dir = None if args.evaluate else video_dir
    envs = [make_env(args.env_id, training_video_dir, args.video_interval)]
    envs += [make_env(args.env_id) for _ in range(args.num_envs - 1)]
    envs = VecEnv(envs, args.seed)
    nvec = envs.action_space.nvec.tolist()
    obs_dim = envs.obs.shape[1] - sum(nvec)
    agent = Agent(obs_dim, nvec, args).to(device)
    run = Run(args, saved, args.num_iterations * args.batch_size, args.checkpoint_interval)
    if args.evaluate or args.init_from:
        run.load(agent=agent)
    if args.evaluate:
        evaluate(agent, args, video_dir)
        sys.exit()
    optimizer = FlatAdam(agent, eps=1e-5)  # G11
    memory = Memory(agent, args.num_envs)
    run.restore(agent=agent, optimizer=optimizer, memory=memory, envs=envs)
    # These begin an episode, either by chance or because they could not be brought back
    just_reset = torch.tensor([not env.actions for env in envs.envs])
    memory.state[:, just_reset] = 0.0

    for iteration in run.iterations():  # counted from 0
        remaining = 1.0 - iteration / args.num_iterations
        lr = args.learning_rate * (remaining if args.anneal_lr else 1.0)  # G6
        clip_coef = args.clip_coef * (remaining if args.anneal_clip else 1.0)  # X1
        coefs = as_tensors(
            device,
            lr=lr,
            clip_coef=clip_coef,
            ent_coef=args.ent_coef,
            vf_coef=args.vf_coef,
            max_grad_norm=args.max_grad_norm,
        )

        start_memory = memory.state.clone()  # kept for the update (l5)
        obs, actions, logprobs, values, rewards, terminations, truncations, episodes = rollout(
            agent, envs, args.num_steps, memory
        )

        dones = terminations | truncations
        # Rows of the batch are environments, with their steps in order (l4)
        batch = {
            "obs": torch.from_numpy(obs).transpose(0, 1).to(device),
            "actions": torch.from_numpy(actions).transpose(0, 1).to(device),
            "logprobs": torch.from_numpy(logprobs).transpose(0, 1).to(device),
            "values": torch.from_numpy(values).transpose(0, 1).to(device),
            "dones": torch.from_numpy(dones).transpose(0, 1).to(device),
            "memory": start_memory.transpose(0, 1),
        }
        bootstrap_obs = np.stack([*envs.obs, *(episode.final_obs for _, episode, _ in episodes)])
        bootstrap_memory = [*memory.state.unbind(1), *(state for _, _, state in episodes)]
        _, bootstrap_values, _ = agent.step(bootstrap_obs, torch.stack(bootstrap_memory, 1))

        # A step's next value is that of the following step; after the rollout's last step, of the
        # current observations; where an episode ended, of its final observation
        last_values, final_values = np.split(bootstrap_values, [args.num_envs])
        next_values = np.concatenate((values[1:], last_values[None]))
        for (step, episode, _), final_value in zip(episodes, final_values):
            next_values[step, episode.env] = final_value
        if not args.bootstrap_truncated:
            terminations = dones
        advantages = compute_advantages(
            rewards, values, next_values, terminations, dones, args.gamma, args.gae_lambda
        )
        returns = advantages + values
        batch["advantages"] = torch.tensor(advantages.T, device=device)
        batch["returns"] = torch.tensor(returns.T, device=device)

        metrics = update(update_minibatches, optimizer, agent, batch, coefs, args)
        run.check_finite(metrics, optimizer.params)

        for step, episode, _ in episodes:
            run.log_episode(run.global_step + (step + 1) * args.num_envs, episode)
        run.global_step += args.batch_size
        scalars = {f"losses/{name}": value for name, value in zip(METRICS, metrics)}
        scalars["losses/explained_variance"] = explained_variance(values, returns)
        scalars["charts/learning_rate"] = coefs["lr"]
        run.log(scalars)
        if args.eval_interval > 0 and run.iteration % args.eval_interval == 0:
            with keep_random_states():
                results = evaluate(agent, args, stream=2)
            run.log_evaluation(results)

    envs.close()
    if run.stop_signal is None:
        run.finish(evaluate(agent, args, video_dir))
