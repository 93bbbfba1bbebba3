# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium==1.4.0",
#     "ale-py==0.12.1",
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
"""PPO for Atari games, on all cores and on a GPU: the games are played by threads of ALE's.

Proximal Policy Optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347. Flags,
learning and run folder are those of ppo_atari.py, and so are the details, numbered as there. The
games are the same too, but for this:

- A2, A3: the no-op after a lost life, FIRE and the action after it are steps of the learner's, in
  which its actions don't count. A vector of games can't step one of them alone. A life lost in
  them begins them again.

The rest is ALE's own way:

- A1: ALE draws 0 to 29 no-ops for the start of a game, not 1 to 30.
- A4, A5: it makes two frames gray and then takes their maximum, not the other way round.
- It reports a time limit after the four frames of an action, not between them.
- It doesn't draw the last frames of a game that is over. A termination has no next value, so
  nothing is learned from them.

Diff it against ppo_atari.py or ppo_atari_lstm_vector.py.

    python ppo_atari_vector.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 10000000
"""

import atexit
import copy
import errno
import fcntl
import io
import json
import math
import os
import pickle
import random
import re
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
from typing import NamedTuple

# PyTorch's threads spin while they wait, on cores that the games could use. OpenMP reads this when
# torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import ale_py
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
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
    compile: bool = True  # compile policy and update, which takes a minute the first time
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

    env_id: str = "BreakoutNoFrameskip-v4"  # id of the game: NAMENoFrameskip-v4 or ALE/NAME-v5
    emulator_threads: int = 0  # threads that play the games (0: as many as --num-threads)
    total_timesteps: int = 10000000  # steps of the run, all environments together
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 8  # number of environments
    num_steps: int = 128  # steps in each environment per rollout
    anneal_lr: bool = True  # lower the learning rate linearly over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    norm_adv: bool = True  # normalise the advantages in each minibatch
    clip_coef: float = 0.1  # clip range of the probability ratio and of the value loss
    anneal_clip: bool = False  # lower the clip range linearly over the run
    clip_vloss: bool = True  # clip the value loss as openai/baselines does
    ent_coef: float = 0.01  # coefficient of the entropy
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient, actor and critic together
    target_kl: float | None = None  # no more epochs after one whose approximate KL exceeds this
    bootstrap_truncated: bool = True  # bootstrap where a time limit has cut an episode
    amp: bool = False  # compute the network in bfloat16: faster, less exact


def parse_args():
    """Returns the flags, and the checkpoint that --resume or --evaluate starts from, or None.

    To the flags it adds batch_size (steps of a rollout, all environments) and num_iterations;
    read_flags has added folder.
    """
    args, saved = read_flags(may_change=["checkpoint_interval", "emulator_threads"])
    check(args.total_timesteps > 0, "--total-timesteps must be above 0")
    check(args.learning_rate > 0, "--learning-rate must be above 0")
    check(args.num_envs > 0, "--num-envs must be above 0")
    check(0 <= args.emulator_threads < 1024, "--emulator-threads must be from 0 to 1023")
    check(args.num_steps > 0, "--num-steps must be above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(0 <= args.gae_lambda <= 1, "--gae-lambda must be from 0 to 1")
    check(args.num_minibatches > 0, "--num-minibatches must be above 0")
    check(args.update_epochs > 0, "--update-epochs must be above 0")
    check(args.clip_coef > 0, "--clip-coef must be above 0")
    check(args.ent_coef >= 0, "--ent-coef must be 0 or above")
    check(args.vf_coef >= 0, "--vf-coef must be 0 or above")
    check(args.max_grad_norm > 0, "--max-grad-norm must be above 0")
    check(args.target_kl is None or args.target_kl >= 0, "--target-kl must be 0 or above")

    args.batch_size = args.num_envs * args.num_steps
    args.num_iterations = args.total_timesteps // args.batch_size
    minibatch_size, remainder = divmod(args.batch_size, args.num_minibatches)
    check(remainder == 0, "--num-envs x --num-steps must be a multiple of --num-minibatches")
    check(minibatch_size > 1 or not args.norm_adv, "minibatches of one step need --no-norm-adv")
    check(args.num_iterations > 0, f"--total-timesteps is less than a rollout, {args.batch_size}")
    return args, saved


# --------------------------------------------------------------------------------------------------
# Environments
# --------------------------------------------------------------------------------------------------


STEPS_PER_SEED = 10000  # a reset with a seed takes 85 ms, one without it 4


def make_emulators(env_id, num_envs, num_threads, **options):
    """Makes ALE's own vector of a game. Ends the program if it can't.

    In the v5 games the emulator repeats the last action with probability 0.25.
    """
    is_atari = re.fullmatch(r"\w+NoFrameskip-v4|ALE/\w+-v5", env_id)
    check(is_atari, f"{env_id} is not an Atari game: NAMENoFrameskip-v4 or ALE/NAME-v5")
    gym.register_envs(ale_py)
    try:
        spec = gym.spec(env_id)
        settings = {"frameskip": 4, "full_action_space": False} | spec.kwargs
        known = settings.keys() == {
            "game",
            "repeat_action_probability",
            "max_num_frames_per_episode",
            "frameskip",
            "full_action_space",
        }
        plain = spec.entry_point == "ale_py.env:AtariEnv" and spec.max_episode_steps is None
        limited = isinstance(settings.get("max_num_frames_per_episode"), int)
        advice = "it must be registered the way ale-py registers games"
        check(known and plain and limited, f"can't make {env_id}: {advice}")
        emulators = AtariVectorEnv(
            settings["game"],
            num_envs,
            num_threads=num_threads,
            repeat_action_probability=settings["repeat_action_probability"],
            full_action_space=settings["full_action_space"],
            autoreset_mode="SameStep",
            # ALE starts with no-ops (A1), repeats actions (A4) and warps frames (A5). Games does
            # the rest
            stack_num=1,
            use_fire_reset=False,
            reward_clipping=False,
            max_num_frames_per_episode=10**9,
            **options,
        )
    except (
        gym.error.Error,
        ImportError,
        AssertionError,
        TypeError,
        OSError,
        RuntimeError,
    ) as error:
        fail(f"can't make {env_id}: {' '.join(str(error).split())}")
    actions = emulators.ale.get_action_set()
    check(actions[0] == ale_py.Action.NOOP, f"{env_id} has no NOOP action (A1)")
    return emulators


class Film:
    """Writes every interval-th game to folder/episode-N.mp4, frame by frame.

    What the agent sees is small and gray. So an emulator of its own plays the same game in colour:
    it gets the same seeds and actions. The file is opened by the first step, so that a reset alone
    leaves none.
    """

    def __init__(self, env_id, folder, interval):
        options = {"img_height": 210, "img_width": 160, "grayscale": False}
        self.emulators = make_emulators(env_id, num_envs=1, num_threads=1, **options)
        self.folder = folder
        self.interval = interval
        self.video = None

    def reset(self, seed):
        self.close_video()
        frames, _ = self.emulators.reset(seed=seed)
        self.first_frame = frames[0, 0]

    def step(self, action, episode):
        if self.first_frame is not None and episode % self.interval == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"episode-{episode}.mp4"
            # Every fourth of 60 frames; codecs need even sizes, imageio's default multiples of 16
            self.video = imageio.get_writer(path, fps=15, macro_block_size=2)
            self.video.append_data(self.first_frame)
        self.first_frame = None

        frames, _, terminations, _, _ = self.emulators.step(action)
        if terminations[0]:
            self.close_video()
            self.first_frame = frames[0, 0]
        elif self.video is not None:
            self.video.append_data(frames[0, 0])

    def close_video(self):
        if self.video is not None:
            self.video.close()
        self.video = None

    def close(self):
        self.close_video()
        self.emulators = None


class Episode(NamedTuple):
    """A game that has ended."""

    env: int  # index of the environment
    episode_return: float  # sum of the rewards as they came from the game
    length: int  # steps of four frames, those of resets included
    ended_by: str  # "termination" (after a lost life, too) or "truncation"
    final_obs: np.ndarray  # the observation, as the agent sees it, that a reset has replaced


class Games:
    """Games that ALE's threads play at the same time; obs: uint8 (num_envs, 84, 84, 4).

    Around them it does what the wrappers of ppo_atari.py do. A step that ends an episode also
    begins the next one, whose first observation obs then holds.

    Given a seed and actions, a game always does the same. So it is saved as its last seed and the
    actions since, which are played again to bring it back. To keep them few, it gets a new seed
    with the first game that starts STEPS_PER_SEED steps or more after the last seed.
    actions is empty right after a new seed, so also if it could not be brought back.
    """

    def __init__(self, env_id, num_envs, seed, args, film=None, max_steps=math.inf):
        num_threads = min(args.emulator_threads or args.num_threads, num_envs)
        self.emulators = make_emulators(env_id, num_envs, num_threads)
        atexit.register(self.close)
        self.num_actions = self.emulators.single_action_space.n
        self.opening = np.array([0])  # after a lost life a no-op (A3)
        if ale_py.Action.FIRE in self.emulators.ale.get_action_set():
            self.opening = np.array([0, 1, 2])  # for games that wait for FIRE (A2)
        self.max_frames = gym.spec(env_id).kwargs["max_num_frames_per_episode"]
        self.max_steps = max_steps
        self.film = film  # of the first game

        self.obs = np.zeros((num_envs, 84, 84, 4), np.uint8)
        self.pixels = self.obs.view("<u4")[..., 0]  # a pixel's four frames as one number
        # All seeds of a game follow from its first
        self.seeds = np.random.SeedSequence(seed).generate_state(num_envs).tolist()
        self.actions = [[] for _ in range(num_envs)]
        self.first_episodes = [0] * num_envs
        self.episode_counts = [0] * num_envs
        self.episode_returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)
        self.lives = np.zeros(num_envs, np.int64)
        self.opening_steps = np.zeros(num_envs, np.int64)  # of the opening, how many are over
        self.reset_with_new_seeds(np.ones(num_envs, bool))

    def reset_with_new_seeds(self, mask):
        """Starts games with seeds of their own where mask, bool (num_envs,), is True."""
        seeds = []
        for i in np.flatnonzero(mask):
            self.first_episodes[i] = self.episode_counts[i]
            self.actions[i] = []
            sequence = np.random.SeedSequence((self.seeds[i], self.first_episodes[i]))
            seeds.append(int(sequence.generate_state(1)[0]) % 2**31)
        seeds = np.array(seeds)
        frames, info = self.emulators.reset(seed=seeds, options={"reset_mask": mask})
        if self.film is not None and mask[0]:
            self.film.reset(seeds[:1])
        self.begin_games(mask, frames, info)

    def begin_games(self, mask, frames, info):
        """Takes the first frames of games, where mask is True."""
        self.episode_returns[mask] = 0.0
        self.lengths[mask] = 0
        self.lives[mask] = info["lives"][mask]
        self.begin_episodes(mask, frames, opening_step=1)

    def begin_episodes(self, mask, frames, opening_step):
        """Makes all frames but the last ones black (A6), where mask is True."""
        self.pixels[mask] = 0
        self.obs[mask, ..., 3] = frames[mask, 0]
        self.opening_steps[mask] = opening_step

    def step(self, actions):
        """Steps each game by its action, int64 (num_envs,), or in an opening by the opening's.

        Returns the rewards' signs, int32, the terminations (of a game or a life) and truncations,
        bool, all (num_envs,), and the games that ended.
        """
        for game_actions, action in zip(self.actions, actions.tolist()):
            game_actions.append(action)
        in_opening = self.opening_steps < len(self.opening)
        opening_actions = self.opening[self.opening_steps % len(self.opening)]
        actions = np.where(in_opening, opening_actions, actions)
        self.opening_steps += in_opening
        if self.film is not None:
            self.film.step(actions[:1], self.episode_counts[0])

        frames, rewards, games_over, _, info = self.emulators.step(actions)
        self.episode_returns += rewards
        self.lengths += 1
        at_max_frames = info["episode_frame_number"] >= self.max_frames
        truncations = (at_max_frames | (self.lengths >= self.max_steps)) & ~games_over
        has_lives = 0 < info["lives"]  # some games go on for a while with 0
        lost_lives = has_lives & (info["lives"] < self.lives) & ~games_over
        terminations = games_over | lost_lives
        self.lives[:] = info["lives"]

        self.pixels >>= 8  # drops the oldest frame, a pixel's first byte
        self.pixels[in_opening] = 0
        self.obs[..., 3] = frames[:, 0]
        episodes = []
        if lost_lives.any():
            self.begin_episodes(lost_lives & ~truncations, frames, opening_step=0)
        if games_over.any() or truncations.any():
            episodes = self.end_games(games_over, truncations, terminations, frames, info)
        return np.sign(rewards), terminations, truncations, episodes  # A7

    def end_games(self, games_over, truncations, terminations, frames, info):
        """Begins new games where games were over, for which ALE has begun them, or cut.

        Returns the Episodes that ended.
        """
        ended = games_over | truncations
        episodes = []
        for i in np.flatnonzero(ended).tolist():
            final_obs = self.obs[i].copy()
            if games_over[i]:  # the last frame is one of the next game
                final_obs[..., 3] = info["final_obs"][i, 0]
            ended_by = "termination" if terminations[i] else "truncation"
            episode_return = float(self.episode_returns[i])
            length = int(self.lengths[i])
            episodes.append(Episode(i, episode_return, length, ended_by, final_obs))
            self.episode_counts[i] += 1
        self.begin_games(games_over, frames, info)
        long_ago = np.array([len(actions) >= STEPS_PER_SEED for actions in self.actions])
        if truncations.any() or (games_over & long_ago).any():
            self.reset_with_new_seeds(truncations | (games_over & long_ago))
        return episodes

    def close(self):
        """Frees the emulators, of which nanobind complains if they outlive Python."""
        atexit.unregister(self.close)
        self.emulators = None
        if self.film is not None:
            self.film.close()

    def state_dict(self):
        games = []
        for i, actions in enumerate(self.actions):
            game = {
                "seed": self.seeds[i],
                "first_episode": self.first_episodes[i],
                "actions": torch.tensor(actions, dtype=torch.uint8),
                "obs": torch.tensor(self.obs[i]),
                "episode_return": float(self.episode_returns[i]),
            }
            games.append(game)
        return {"games": games}

    def load_state_dict(self, state):
        """Plays the actions since the last seeds again. The games start so that all end together.

        Until its start, a game plays no-ops.
        """
        games = state["games"]
        steps = np.array([len(game["actions"]) for game in games])
        all_actions = np.zeros((steps.max(), len(games)), np.int64)
        for i, game in enumerate(games):
            self.seeds[i] = game["seed"]
            if steps[i] > 0:
                all_actions[-steps[i] :, i] = game["actions"].numpy()
        if not 0 <= all_actions.min(initial=0) <= all_actions.max(initial=0) < self.num_actions:
            raise ValueError("an action is none of the game's")  # of which ALE would never return
        film = self.film
        self.film = None
        for step in range(steps.max() + 1):
            starting = steps.max() - steps == step
            if starting[0]:
                self.film = film
            if starting.any():
                for i in np.flatnonzero(starting):
                    self.episode_counts[i] = games[i]["first_episode"]
                self.reset_with_new_seeds(starting)
            if step < steps.max():
                self.step(all_actions[step])
        for i, game in enumerate(games):
            same = np.array_equal(self.obs[i], game["obs"].numpy())
            if not same or self.episode_returns[i] != game["episode_return"]:
                print("a game can't be brought back to where it was: it starts a new one")
                self.reset_with_new_seeds(np.arange(len(games)) == i)


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    """Orthogonal weights of gain std, constant bias (G9; baselines a2c/utils.py)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The network of https://www.nature.com/articles/nature14236, of policy and value (A9, A10)."""

    def __init__(self, num_actions, amp=False):
        super().__init__()
        self.amp = amp
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(3136, 512)),
            nn.ReLU(),
        )
        self.actor = layer_init(nn.Linear(512, num_actions), 0.01)
        self.critic = layer_init(nn.Linear(512, 1), 1.0)

    def heads(self, obs):
        """obs uint8 (n, 84, 84, 4) -> log-probabilities (n, num_actions), values (n,), float32."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            pixels = obs.permute(0, 3, 1, 2) / 255.0  # A8; in memory the frames still come last
            hidden = self.network(pixels)
            return self.actor(hidden).float().log_softmax(1), self.critic(hidden).float().squeeze(1)

    def forward(self, obs, actions):
        """obs, actions int64 (n,) -> logprobs of the actions, entropy, values, each (n,)."""
        all_logprobs, values = self.heads(obs)
        logprobs = all_logprobs.gather(1, actions[:, None]).squeeze(1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(1)
        return logprobs, entropy, values

    @torch.no_grad()
    def step(self, obs):
        """Like heads, on arrays and without gradients."""
        all_logprobs, values = self.heads(torch.from_numpy(obs).to(self.actor.bias.device))
        return all_logprobs.cpu().numpy(), values.cpu().numpy()


class Policy:
    """The agent as it plays, compiled for the observations of one step of all games.

    Its weights are a copy, which --amp has converted to bfloat16, once per rollout.
    """

    def __init__(self, agent, args, device):
        self.agent = agent
        self.device = device
        self.copy = copy.deepcopy(agent).to(memory_format=torch.channels_last)
        if args.amp:
            self.copy.to(torch.bfloat16)
        self.compiled_forward = compile_or_not(self.forward, args, device, "policy")

    def refresh(self):
        """Takes the agent's weights as they are now."""
        self.copy.load_state_dict(self.agent.state_dict())

    def forward(self, obs):
        """obs uint8 (n, 84, 84, 4) -> log-probabilities and value, (n, num_actions + 1)."""
        all_logprobs, values = self.copy.heads(obs)
        return torch.cat((all_logprobs, values[:, None]), 1)

    @torch.no_grad()
    def step(self, obs):
        """Like Agent.step; there is one transfer to a GPU and one back."""
        obs = torch.from_numpy(obs).to(self.device, non_blocking=True)
        outputs = self.compiled_forward(obs).cpu().numpy()
        return outputs[:, :-1], outputs[:, -1]


# --------------------------------------------------------------------------------------------------
# PPO
# --------------------------------------------------------------------------------------------------

METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def rollout(policy, envs, num_steps):
    """Plays num_steps in each environment (G10).

    Returns arrays (num_steps, num_envs, ...): uint8 obs, int64 actions, float32 logprobs, values
    and rewards, bool terminations and truncations; and the games that ended, each with its last
    step.
    """
    shape = (num_steps, *envs.obs.shape)
    # From pinned memory a GPU fetches by itself
    obs = torch.zeros(shape, dtype=torch.uint8, pin_memory=policy.device.type == "cuda").numpy()
    actions = np.zeros(shape[:2], np.int64)
    logprobs = np.zeros(shape[:2], np.float32)
    values = np.zeros(shape[:2], np.float32)
    rewards = np.zeros(shape[:2], np.float32)
    terminations = np.zeros(shape[:2], bool)
    truncations = np.zeros(shape[:2], bool)
    episodes = []
    # argmax(logits + Gumbel noise) is a sample of softmax(logits)
    gumbel_noise = -torch.empty(*shape[:2], envs.num_actions).exponential_().log().numpy()

    policy.refresh()
    for step in range(num_steps):
        obs[step] = envs.obs
        all_logprobs, values[step] = policy.step(obs[step])
        actions[step] = (all_logprobs + gumbel_noise[step]).argmax(1)
        logprobs[step] = np.take_along_axis(all_logprobs, actions[step][:, None], 1)[:, 0]
        rewards[step], terminations[step], truncations[step], ended = envs.step(actions[step])
        episodes += [(step, episode) for episode in ended]
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

    params: the agent's parameters as one flat tensor; batch: obs and actions as the agent takes
    them, and logprobs, advantages, returns, values (n,).
    """
    clip_coef = coefs["clip_coef"]
    logprobs, entropy, values = call(agent, params, batch["obs"], batch["actions"])
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


def compile_or_not(function, args, device, name):
    """Returns function, compiled; with --no-compile, or without a working compiler, as it is.

    It must return one tensor.
    """
    if not args.compile:
        return function
    print(f"compiling the {name}: up to half a minute, the first time", flush=True)
    # On a GPU, a CUDA graph starts all kernels at once
    options = {"triton.cudagraphs": True}
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
    compiled = torch.compile(function, fullgraph=True, dynamic=False, options=options)
    if device.type == "cpu":
        return compiled
    return lambda *inputs: compiled(*inputs).clone()  # the graph writes there again when it runs


def evaluate(agent, args, video_dir=None, stream=1):
    """Plays --eval-episodes games with the likeliest actions.

    stream picks the seeds, which are not the training's: 1 for the last evaluation, 2 for those
    during the training.
    """
    film = None
    if video_dir:
        film = Film(args.env_id, video_dir / "evaluation", interval=1)
    envs = Games(args.env_id, 1, (args.seed, stream), args, film, args.eval_max_steps)
    episodes = []
    while len(episodes) < args.eval_episodes:
        all_logprobs, _ = agent.step(envs.obs)
        _, _, _, ended = envs.step(all_logprobs.argmax(1))
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
    if args.num_threads == 0:
        args.num_threads = torch.get_num_threads()  # all cores; a resumed run takes as many
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    video_dir = args.folder / "videos" if args.capture_video else None
    film = None
    if video_dir and not args.evaluate:
        film = Film(args.env_id, video_dir, args.video_interval)
    envs = Games(args.env_id, args.num_envs, args.seed, args, film)
    agent = Agent(envs.num_actions, args.amp).to(device)
    run = Run(args, saved, args.num_iterations * args.batch_size, args.checkpoint_interval)
    if args.evaluate or args.init_from:
        run.load(agent=agent)
    if args.evaluate:
        evaluate(agent, args, video_dir)
        sys.exit()
    optimizer = FlatAdam(agent, eps=1e-5)  # G11
    run.restore(agent=agent, optimizer=optimizer, envs=envs)
    step_minibatches = compile_or_not(update_minibatches, args, device, "update")
    policy = Policy(agent, args, device)
    if args.compile:
        for tensor in (optimizer.params, *optimizer.buffers()):
            torch._dynamo.mark_static_address(tensor)  # a CUDA graph may write to it in place

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

        obs, actions, logprobs, values, rewards, terminations, truncations, episodes = rollout(
            policy, envs, args.num_steps
        )

        # The rollout has computed the values and logprobs already
        batch = {
            "obs": torch.from_numpy(obs).flatten(0, 1).to(device),
            "actions": torch.from_numpy(actions).flatten(0, 1).to(device),
            "logprobs": torch.from_numpy(logprobs).flatten(0, 1).to(device),
            "values": torch.from_numpy(values).flatten(0, 1).to(device),
        }
        bootstrap_obs = np.stack([*envs.obs, *(episode.final_obs for _, episode in episodes)])
        _, bootstrap_values = agent.step(bootstrap_obs)

        # A step's next value is that of the following step; after the rollout's last step, of the
        # current observations; where an episode ended, of its final observation
        last_values, final_values = np.split(bootstrap_values, [args.num_envs])
        next_values = np.concatenate((values[1:], last_values[None]))
        for (step, episode), final_value in zip(episodes, final_values):
            next_values[step, episode.env] = final_value
        dones = terminations | truncations
        if not args.bootstrap_truncated:
            terminations = dones
        advantages = compute_advantages(
            rewards, values, next_values, terminations, dones, args.gamma, args.gae_lambda
        )
        returns = advantages + values
        batch["advantages"] = torch.from_numpy(advantages).flatten().to(device)
        batch["returns"] = torch.from_numpy(returns).flatten().to(device)

        metrics = update(step_minibatches, optimizer, agent, batch, coefs, args)
        run.check_finite(metrics, optimizer.params)

        for step, episode in episodes:
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

    if run.stop_signal is None:
        run.finish(evaluate(agent, args, video_dir))
