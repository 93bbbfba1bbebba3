# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium==1.4.0",
#     "ale-py==0.12.1",
#     "opencv-python-headless==5.0.0.93",
#     "numpy==2.4.6; python_version >= '3.11'",
#     "numpy==2.2.6; python_version < '3.11'",
#     "tyro==1.0.17",
#     "tqdm==4.70.1",
#     "tensorboard==2.21.0",
#     "wandb==0.31.0",
#     "moviepy==2.2.1",
# ]
# ///
"""C51 for Atari games, from pixels: DQN that learns the distribution of the returns.

Categorical DQN, Bellemare et al. 2017, https://arxiv.org/abs/1707.06887, with the flags and
defaults of CleanRL's c51_atari.py. From the paper are the 51 atoms from -10 to 10, and Adam with
2.5e-4 and an epsilon of 0.01 divided by the size of a minibatch, 32; the rest is as in DQN, but for
a new target network every 10,000 steps.
--double is van Hasselt et al. 2015, https://arxiv.org/abs/1509.06461, --dueling Wang et al. 2015,
https://arxiv.org/abs/1511.06581, --n-step Sutton's n-step return. A time limit is not a
termination. The games are those of ppo_atari.py, with openai/baselines' wrappers; G10 and A1 to A8
are the numbers of docs/details.md of the repository. Diff it against dqn_atari.py.

    python c51_atari.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 10000000
"""

import copy
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

# PyTorch's threads are to wait briefly and then sleep, else a busy program beside this one costs
# most of its speed. Read when torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from filelock import FileLock, Timeout
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
    num_threads: int = torch.get_num_threads()  # threads of PyTorch: all cores
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "plainrl"  # project at Weights & Biases
    wandb_entity: str | None = None  # user or team at Weights & Biases
    capture_video: bool = False  # film the first episode of each evaluation, into videos/
    checkpoint_interval: int = 2500  # iterations (a rollout and its updates) between checkpoints
    eval_interval: int = 0  # iterations between evaluations during the training (0: none)
    eval_episodes: int = 10  # episodes of an evaluation, with deterministic actions and own seeds
    resume: str | None = None  # continue the run in this folder, exactly; its flags come with it
    evaluate: str | None = None  # play the policy of this run, or of a checkpoint such as best.pt
    init_from: str | None = None  # begin with the networks and statistics of this run

    env_id: str = "BreakoutNoFrameskip-v4"  # id of the game: NAMENoFrameskip-v4 or ALE/NAME-v5
    total_timesteps: int = 10000000  # steps of the run, all environments together
    learning_rate: float = 2.5e-4  # learning rate of Adam
    num_envs: int = 1  # number of environments
    gamma: float = 0.99  # discount factor
    buffer_size: int = 1000000  # transitions in the replay buffer
    batch_size: int = 32  # transitions in a minibatch
    tau: float = 1.0  # target smoothing coefficient (1: a copy of the Q-network)
    target_network_frequency: int = 10000  # steps between updates of the target network
    learning_starts: int = 80000  # steps before the first update
    train_frequency: int = 4  # steps between updates
    start_e: float = 1.0  # epsilon at the start: the probability of a random action
    end_e: float = 0.01  # epsilon at the end of its fall
    exploration_fraction: float = 0.1  # epsilon falls linearly in this part of the run (0: at once)
    n_atoms: int = 51  # atoms of the distribution of the returns
    v_min: float = -10.0  # the lowest atom: the smallest return that can be represented
    v_max: float = 10.0  # the highest atom: the largest return that can be represented
    n_step: int = 1  # n of the n-step returns in targets
    double: bool = False  # the Q-network chooses the target's action
    dueling: bool = False  # the network gives a state's value and the actions' advantages
    amp: bool = False  # compute the network in bfloat16: faster, less exact


SCHEDULES = ("exploration_fraction",)  # flags whose effect depends on --total-timesteps
# Flags that a resume may change
FREE = ("total_timesteps", "capture_video", "checkpoint_interval", "eval_interval", "eval_episodes")


def check_args(args):
    """Ends the program if the flags can't be used, alone or together."""
    check(0 <= args.seed < 2**32, "--seed must be from 0 to 2**32 - 1")
    positive = ("num_threads", "learning_rate", "total_timesteps", "checkpoint_interval")
    positive += ("eval_episodes", "num_envs", "buffer_size", "batch_size", "n_step")
    positive += ("target_network_frequency", "train_frequency")
    for name in positive:
        check(getattr(args, name) > 0, f"--{name.replace('_', '-')} must be above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(args.n_atoms > 1, "--n-atoms must be above 1")
    in_order = -math.inf < args.v_min < args.v_max < math.inf
    check(in_order, "--v-min must be below --v-max, and both finite")
    check(0 < args.tau <= 1, "--tau must be above 0, up to 1")
    check(0 <= args.end_e <= args.start_e <= 1, "it must be 0 <= --end-e <= --start-e <= 1")
    check(0 <= args.exploration_fraction <= 1, "--exploration-fraction must be from 0 to 1")
    steps = args.num_envs * args.train_frequency
    check(steps <= args.total_timesteps, f"--total-timesteps is below an iteration, {steps}")
    end = args.total_timesteps // steps * steps
    check(0 <= args.learning_starts < end, f"--learning-starts must be from 0, below {end}")


# --------------------------------------------------------------------------------------------------
# Run: folder, logs, checkpoints, signals. It is the same text in every script and knows nothing of
# what is learned: skip it on a first reading.
# --------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).name


def check(condition, message):
    """Ends the program with a sentence, code 2, if the input is not as it must be."""
    if not condition:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def read_flags():
    """Returns the flags, and the checkpoint that the run starts from, or None.

    With --resume and --evaluate the flags are those of the old run, where they aren't given again.
    """
    sys.path.append("")  # the current folder, for --env-id my_envs:MyEnv-v0
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    old_runs = [run for run in (args.resume, args.evaluate, args.init_from) if run is not None]
    check(len(old_runs) < 2, "give only one of --resume, --evaluate and --init-from")
    if not old_runs:
        return args, None
    path = Path(old_runs[0])
    if args.resume or path.is_dir():
        path = path / "checkpoint.pt"
    try:  # weights_only: a stranger's file can't run code
        saved = torch.load(path, map_location="cpu", weights_only=True)
        flags = {name: x for name, x in saved["args"].items() if name in asdict(args)}
        steps = saved["run"]["global_step"]
    except Exception as error:  # torch.load raises many kinds
        check(False, f"{path} is no checkpoint of {SCRIPT}, or damaged: {type(error).__name__}")
    if args.init_from:
        return args, saved
    old_args = replace(Args(**flags), resume=args.resume, evaluate=args.evaluate, init_from=None)
    args = tyro.cli(Args, default=old_args)
    if args.resume:
        script = saved.get("script")
        check(script == SCRIPT, f"the run was made by {script}: resume it with that script")
        check_changes(asdict(old_args), asdict(args), steps)
    return args, saved


def check_changes(old, new, steps):
    """Ends the program if flags, dicts, of a run that has made steps can't be as they are now."""
    changed = {name for name in new if new[name] != old[name]}
    if "total_timesteps" in changed:
        schedules = [name for name in SCHEDULES if old[name]]
        advice = "start a new run with --init-from"
        check(not schedules, f"--total-timesteps can't change with {schedules}: {advice}")
        message = f"the run has made {steps} steps: --total-timesteps can't be below"
        check(steps <= new["total_timesteps"], message)
    fixed = {name: old[name] for name in changed.difference(FREE)}
    check(not fixed, f"the run was made with {fixed}: leave these flags out")


class Run:
    """A run on disk, and the signals that stop it.

    The script names the run's parts, loops over iterations(), adds to global_step, logs, and
    finishes. Iterations and steps are counted from the beginning of the run, not of the process.
    """

    def __init__(self, args, saved, total_steps):
        self.args = args
        self.saved = saved
        self.total_steps = total_steps
        self.iteration = 0
        self.global_step = 0  # all environments together
        self.wall_seconds = 0.0
        self.recent_returns = []
        self.best_return = -math.inf  # of the evaluations during the training
        self.wandb_id = None
        self.stop_signal = None
        self.parts = {"run": self}
        self.machine = {
            "torch": str(torch.__version__),
            "cpu": torch.cpu.get_capabilities().get("cpu_name"),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        }
        if args.evaluate:
            path = Path(args.evaluate)
            self.folder = path if path.is_dir() else path.parent
            return
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
        name = args.run_name or name.replace("/", "-").replace(":", "-")
        self.folder = Path(args.resume) if args.resume else Path("runs", name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder / "lock")
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            check(False, f"{self.folder} is in use by another process")
        if not args.resume:
            self.write_config()

    def write_config(self):
        """Writes config.json and a copy of the script into the folder of a new run."""
        is_new = not (self.folder / "checkpoint.pt").exists()
        check(is_new, f"{self.folder} has a run: --resume it, or choose another --run-name")
        git = f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty"
        versions = {package.name: package.version for package in distributions()}
        config = {
            "args": asdict(self.args),
            "defaults": asdict(Args()),
            "command": sys.argv,
            "git_commit": subprocess.getoutput(git),
            "machine": self.machine,
            "versions": {"python": platform.python_version(), **versions},
        }
        (self.folder / "config.json").write_text(json.dumps(config, indent=2))
        (self.folder / SCRIPT).write_bytes(Path(__file__).read_bytes())

    def load(self, **parts):
        """Loads parts, anything with load_state_dict(), from the checkpoint."""
        try:
            for name, part in parts.items():
                part.load_state_dict(self.saved[name])
        except (LookupError, RuntimeError) as error:
            check(False, f"the checkpoint is of a run with other sizes or another version: {error}")

    def restore(self, **parts):
        """Names all that a checkpoint must hold; with --resume, loads it."""
        self.parts |= parts
        if self.args.resume:
            self.load(**self.parts)

    def state_dict(self):
        names = ("iteration", "global_step", "wall_seconds", "recent_returns", "best_return")
        state = {name: getattr(self, name) for name in (*names, "wandb_id")}
        return {**state, "random_state": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state.pop("random_state"))
        vars(self).update(state)

    def save(self, filename="checkpoint.pt"):
        """Writes a checkpoint under another name first: a kill never leaves half a file."""
        self.writer.flush()
        self.episodes_file.flush()
        self.wall_seconds = time.time() - self.start_time
        checkpoint = {name: part.state_dict() for name, part in self.parts.items()}
        modules = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        self.check_finite(*(x for module in modules for x in module.parameters()))
        checkpoint |= {"script": SCRIPT, "args": asdict(self.args), "machine": self.machine}
        with open(self.folder / "checkpoint.tmp", "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / "checkpoint.tmp", self.folder / filename)

    def open_logs(self):
        """Opens the logs. What was logged after the checkpoint is cut off: it will come again."""
        self.episodes_file = open(self.folder / "episodes.csv", "a+", newline="")
        self.episodes_file.seek(0)
        size = len(self.episodes_file.readline())  # of the header
        for row in self.episodes_file:
            if row.endswith("\n") and int(row.split(",")[0]) <= self.global_step:
                size += len(row)
        self.episodes_file.truncate(size)
        if size == 0:
            self.episodes_file.write("global_step,wall_seconds,env,return,length,ended_by\n")
        if self.args.track:
            import wandb

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
            self.wandb_id = run.id
        self.writer = SummaryWriter(self.folder, purge_step=self.global_step + 1)
        self.start_time = time.time() - self.wall_seconds  # as if the run had never paused

    def warn(self):
        """Names what a resume would miss, and what may give this one other bits."""
        for name, value in vars(sys.modules["__main__"]).items():
            has_state = hasattr(value, "state_dict") and not isinstance(value, type)
            if has_state and all(value is not part for part in self.parts.values()):
                print(f"{name} isn't given to run.restore(), so a resume begins it anew")
        if self.args.resume and self.saved.get("machine") != self.machine:
            before = self.saved.get("machine")
            print(f"goes on, but its bits may differ: {before} before, {self.machine} now")

    def iterations(self):
        """Yields the numbers of the iterations that are left, and saves the run between them.

        After Ctrl-C or SIGTERM the program ends when the iteration does; after one more Ctrl-C, at
        once.
        """
        self.machine["compiled"] = self.args.compile  # by now False where there is no compiler
        self.warn()
        self.open_logs()
        (self.folder / "evaluation.json").unlink(missing_ok=True)
        if not self.args.resume:
            self.save()
        signal.signal(signal.SIGINT, self.on_signal)
        signal.signal(signal.SIGTERM, self.on_signal)
        # A bar on a terminal; elsewhere there is a line for each checkpoint
        bar = tqdm(total=self.total_steps, initial=self.global_step, unit=" steps", disable=None)
        while self.global_step < self.total_steps:
            yield self.iteration
            self.iteration += 1
            mean_return = f"return {np.mean(self.recent_returns or [math.nan]):.1f}"
            bar.set_postfix_str(mean_return, refresh=False)
            bar.update(self.global_step - bar.n)
            stop = self.stop_signal
            done = stop or self.global_step >= self.total_steps
            if done or self.iteration % self.args.checkpoint_interval == 0:
                self.save()
                if bar.disable:
                    print(f"saved at step {self.global_step}, {mean_return}", flush=True)
            if stop:
                bar.close()
                command = shlex.join(["python", sys.argv[0], "--resume", str(self.folder)])
                print(f"stopped at step {self.global_step}; go on with: {command}")
                sys.exit(128 + stop)
        bar.close()
        self.writer.close()
        self.episodes_file.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_signal(self, signum, frame):
        if self.stop_signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop_signal = signum
        os.write(2, b"\nthe run stops after this iteration, or at once with one more Ctrl-C\n")

    def log_episode(self, step, episode):
        """Logs an Episode that ended at a step of the run."""
        values = (step, round(time.time() - self.start_time, 2), *episode[:4])
        self.episodes_file.write(",".join(map(str, values)) + "\n")
        self.writer.add_scalar("charts/episodic_return", episode.episode_return, step)
        self.writer.add_scalar("charts/episodic_length", episode.length, step)
        self.recent_returns = [*self.recent_returns[-99:], episode.episode_return]

    def log(self, scalars):
        """Logs numbers by their tags, and the speed."""
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, float(value), self.global_step)
        sps = int(self.global_step / (time.time() - self.start_time))
        self.writer.add_scalar("charts/SPS", sps, self.global_step)

    def check_finite(self, *tensors):
        """Ends a run that has diverged: the last good checkpoint stays."""
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            advice = "try a lower --learning-rate, or look for huge rewards and observations"
            sys.exit(f"error: a loss or a weight is not finite: {advice}")

    def log_evaluation(self, episodes):
        """Logs an evaluation during the training; the best so far is kept as best.pt."""
        mean_return = float(np.mean([episode.episode_return for episode in episodes]))
        self.writer.add_scalar("eval/episodic_return", mean_return, self.global_step)
        if mean_return > self.best_return:
            self.best_return = mean_return
            self.save("best.pt")

    def finish(self, episodes):
        """Prints the last evaluation, and writes it, which makes the run a finished one."""
        returns = [episode.episode_return for episode in episodes]
        score = f"{np.mean(returns):.1f} +- {np.std(returns):.1f}"
        print(f"evaluation: {score} over {len(returns)} episodes, deterministic")
        if not self.args.evaluate:
            result = {"returns": returns, "total_timesteps": self.args.total_timesteps}
            (self.folder / "evaluation.json").write_text(json.dumps(result))
            print(f"finished: everything is in {self.folder}")


# --------------------------------------------------------------------------------------------------
# Environments
# --------------------------------------------------------------------------------------------------


class NoopResetEnv(gym.Wrapper):
    """Starts a game with 1 to 30 frames of no-ops (A1)."""

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        for _ in range(self.np_random.integers(1, 31)):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class MaxAndSkipEnv(gym.Wrapper):
    """Repeats an action for four frames and gives the maximum of the last two (A4)."""

    def step(self, action):
        frame = 0  # black
        total_reward = 0.0
        for _ in range(4):
            previous_frame = frame
            frame, reward, terminated, truncated, info = self.env.step(action)
            total_reward += reward
            if terminated or truncated:
                break
        return np.maximum(previous_frame, frame), total_reward, terminated, truncated, info


class EpisodicLifeEnv(gym.Wrapper):
    """A lost life is a termination; the reset after it is a no-op, and the game goes on (A3)."""

    was_real_done = True

    def reset(self, seed=None, options=None):
        if self.was_real_done or seed is not None:
            obs, info = self.env.reset(seed=seed)
        else:
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                obs, info = self.env.reset()
        self.lives = info["lives"]
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.was_real_done = terminated or truncated
        lost_life = 0 < info["lives"] < self.lives  # some games go on for a while with 0
        self.lives = info["lives"]
        return obs, reward, terminated or lost_life, truncated, info


class FireResetEnv(gym.Wrapper):
    """Starts with FIRE and the action after it, for games that wait for FIRE (A2)."""

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        for action in (1, 2):
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset()
        return obs, info


class WarpFrame(gym.ObservationWrapper):
    """Frames in gray, 84 x 84 (A5)."""

    def observation(self, frame):
        frame = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
        return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)


class ClipRewardEnv(gym.RewardWrapper):
    """The signs of the rewards (A7)."""

    def reward(self, reward):
        return np.sign(reward)


class FrameStack(gym.Wrapper):
    """The last four frames, (84, 84, 4); those before the reset are black, as in ppo2 (A6).

    The four bytes of a pixel are one number to NumPy: a shift by a byte drops the oldest frame.
    """

    def __init__(self, env):
        super().__init__(env)
        self.frames = np.zeros((84, 84, 4), np.uint8)
        self.pixels = self.frames.view("<u4")

    def reset(self, **kwargs):
        frame, info = self.env.reset(**kwargs)
        self.pixels[:] = 0
        self.frames[..., 3] = frame
        return self.frames, info

    def step(self, action):
        frame, reward, terminated, truncated, info = self.env.step(action)
        self.pixels >>= 8
        self.frames[..., 3] = frame
        return self.frames, reward, terminated, truncated, info


def make_env(env_id, video_dir=None, max_steps=None):
    """Makes a game with its wrappers, which are openai/baselines' (common/atari_wrappers.py).

    In the v5 games the emulator repeats the last action with probability 0.25.
    video_dir: for a film of its first episode; max_steps: where a game is cut at the latest.
    """
    known = re.fullmatch(r"\w+NoFrameskip-v4|ALE/\w+-v5", env_id)
    check(known, f"{env_id} is not an Atari game: NAMENoFrameskip-v4 or ALE/NAME-v5")
    gym.register_envs(ale_py)
    options = {"render_mode": "rgb_array"} if video_dir else {}
    try:
        env = gym.make(env_id, frameskip=1, disable_env_checker=True, **options)
    except (gym.error.Error, ImportError) as error:
        check(False, f"can't make {env_id}: {error}")
    actions = env.unwrapped.get_action_meanings()
    check(actions[0] == "NOOP", f"{env_id} has no NOOP action (A1)")

    env = NoopResetEnv(env)
    env = MaxAndSkipEnv(env)
    if video_dir:  # every fourth frame of 60 a second
        env = gym.wrappers.RecordVideo(env, video_dir, lambda number: number == 0, fps=15)
    if max_steps:
        env = gym.wrappers.TimeLimit(env, max_steps)
    env = gym.wrappers.RecordEpisodeStatistics(env, stats_key="plainrl_statistics")
    env = EpisodicLifeEnv(env)
    if "FIRE" in actions:
        env = FireResetEnv(env)
    env = WarpFrame(env)
    env = ClipRewardEnv(env)
    return FrameStack(env)


class Episode(NamedTuple):
    """An episode that has ended."""

    env: int  # index of the environment
    episode_return: float  # sum of the rewards as they came from the environment
    length: int
    ended_by: str  # "termination" or "truncation"
    final_obs: np.ndarray  # its last observation, as the agent sees it


class VecEnv:
    """Environments, stepped one after another; obs: the current observations, (num_envs, ...).

    A step that ends an episode also resets it; its last observation is in the Episode.
    Given a seed and actions, an environment always does the same. So each is saved as its last seed
    and the actions since, which are played again to bring it back. To keep them few, it gets a new
    seed with the first episode that starts steps_per_seed steps or more after the last seed.
    """

    def __init__(self, envs, seed, dtype, steps_per_seed=1000):
        self.envs = envs
        self.action_space = envs[0].action_space
        self.seeds = np.random.SeedSequence(seed).generate_state(len(envs))
        self.steps_per_seed = steps_per_seed
        self.seed_counts = np.zeros(len(envs), np.int64)
        self.actions = [[] for _ in envs]  # of each environment, since its last seed
        first_obs = [self.reset_with_new_seed(i) for i in range(len(envs))]
        # Of that dtype, since reset() may give integers where step() doesn't
        self.obs = np.stack(first_obs).astype(dtype)

    def reset_with_new_seed(self, i):
        """Starts an episode of environment i with its next seed; returns its observation."""
        sequence = np.random.SeedSequence((int(self.seeds[i]), int(self.seed_counts[i])))
        self.seed_counts[i] += 1
        self.actions[i] = []
        seed = int(sequence.generate_state(1)[0]) % 2**31  # some libraries take no larger one
        return self.envs[i].reset(seed=seed)[0]

    def step_env(self, i, action):
        """Steps environment i; returns reward, terminated, truncated, and an Episode or None."""
        obs, reward, terminated, truncated, info = self.envs[i].step(action)
        self.actions[i].append(action.copy())
        episode = None
        if terminated or truncated:
            # None after a lost life in Atari: the game goes on
            statistics = info.get("plainrl_statistics")
            if statistics:
                ended_by = "termination" if terminated else "truncation"
                final_obs = np.array(obs, self.obs.dtype)  # a copy: the reset may write over it
                episode = Episode(i, float(statistics["r"]), statistics["l"], ended_by, final_obs)
            if statistics and len(self.actions[i]) >= self.steps_per_seed:
                obs = self.reset_with_new_seed(i)
            else:
                obs, _ = self.envs[i].reset()
        self.obs[i] = obs
        return reward, terminated, truncated, episode

    def step(self, actions):
        """Steps each environment by its row of actions (num_envs, ...).

        Returns the rewards, float64, the terminations and truncations, bool, all (num_envs,), and
        the episodes that ended.
        """
        rewards = np.zeros(len(self.envs))
        terminations = np.zeros(len(self.envs), bool)
        truncations = np.zeros(len(self.envs), bool)
        episodes = []
        for i, action in enumerate(actions):
            rewards[i], terminations[i], truncations[i], episode = self.step_env(i, action)
            if episode:
                episodes.append(episode)
        return rewards, terminations, truncations, episodes

    def for_evaluation(self, env_id, seed, video_dir):
        """Returns a VecEnv of one new environment, for an evaluation."""
        env = make_env(env_id, video_dir, max_steps=100000)  # some might never end an episode
        return VecEnv([env], seed, self.obs.dtype)

    def close(self):
        for env in self.envs:
            env.close()

    def state_dict(self):
        return {
            "seed_counts": torch.tensor(self.seed_counts),
            "actions": [torch.tensor(np.array(actions)) for actions in self.actions],
            "obs": torch.tensor(self.obs),
        }

    def load_state_dict(self, state):
        self.seed_counts = state["seed_counts"].numpy() - 1  # of the last seed, to be drawn again
        self.restarted = np.zeros(len(self.envs), bool)
        for i, actions in enumerate(state["actions"]):
            self.obs[i] = self.reset_with_new_seed(i)
            for action in actions.numpy():
                self.step_env(i, action)
            if not np.array_equal(self.obs[i], state["obs"][i].numpy()):
                print(f"environment {i} can't be brought back exactly: it starts a new episode")
                self.obs[i] = self.reset_with_new_seed(i)
                self.restarted[i] = True


class ReplayBuffer:
    """The last size steps of the environments, rows in a file that is mapped to memory.

    So a checkpoint needs only their count. The file has size + spare rows. At most spare rows are
    written between two checkpoints, so a killed run that goes on from a checkpoint still finds
    every row that it may sample. columns: what a row has, {name: (dtype, shape)}.
    """

    def __init__(self, path, size, spare, columns, is_new):
        row = np.dtype([(name, dtype, shape) for name, (dtype, shape) in columns.items()])
        num_rows = size + spare
        if not is_new:
            num_rows = path.stat().st_size // row.itemsize if path.exists() else 0
            advice = "lower --checkpoint-interval, or start a new run with --init-from"
            check(num_rows >= size + spare, f"{path} is missing or has too few rows: {advice}")
        self.file = np.memmap(path, row, mode="w+" if is_new else "r+", shape=num_rows)
        self.rows = np.asarray(self.file)  # the same memory, faster to index
        self.size = size
        self.count = 0

    def add(self, **columns):
        """Stores rows; columns: arrays (..., *shape), all that a row has."""
        n = columns["rewards"].size
        places = np.arange(self.count, self.count + n) % len(self.rows)
        for name, values in columns.items():
            values = values.astype(self.rows[name].dtype).reshape(n, *self.rows[name].shape[1:])
            if not np.isfinite(values).all():
                advice = "fix the environment, then use --resume"
                sys.exit(f"error: {name} are not finite after step {self.count}: {advice}")
            self.rows[name][places] = values
        self.count += n

    def read(self, numbers):
        """Rows by their numbers, counted from the start of the run.

        numbers: an array of any shape -> {name: array (*numbers.shape, *shape)}.
        """
        places = numbers % len(self.rows)
        # Column by column: NumPy is slow in copying rows that have arrays in them
        return {name: self.rows[name][places] for name in self.rows.dtype.names}

    def draw(self, n):
        """Draws n of the last size rows, with replacement -> their numbers (n,)."""
        # By PyTorch's generator, whose state a checkpoint has
        ages = torch.randint(min(self.count, self.size), (n,)).numpy()
        return self.count - 1 - ages

    def state_dict(self):
        self.file.flush()
        return {"count": self.count, "num_rows": len(self.rows)}

    def load_state_dict(self, state):
        is_whole = state["num_rows"] == len(self.rows)
        check(is_whole, f"{self.file.filename} is damaged: start a new run with --init-from")
        self.count = state["count"]


class FrameBuffer(ReplayBuffer):
    """A replay buffer of games' steps, in which each frame is stored once.

    A row has the newest frame of its observation. Stacks of four, as FrameStack makes them, are put
    together when rows are read. current_obs (num_envs, 84, 84, 4): the games' observations, always
    as they are now, which will be in the next rows. final_frames: what no row has, the last frames
    of games that a time limit cut, by the number of their last row.
    """

    def __init__(self, path, size, spare, current_obs, is_new):
        columns = {
            "frames": (np.uint8, (84, 84)),
            "actions": (np.int64, ()),
            "rewards": (np.float32, ()),
            "terminations": (np.bool_, ()),
            "dones": (np.bool_, ()),  # the episode ended, maybe by a time limit
        }
        self.current_obs = current_obs
        self.num_envs = len(current_obs)
        # A stack begins up to three steps before its row
        super().__init__(path, size, spare + 3 * self.num_envs, columns, is_new)
        self.final_frames = {}

    def read(self, numbers):
        """Rows by their numbers (n,), with obs and next_obs, uint8 (n, 84, 84, 4), for frames."""
        rows = super().read(numbers)
        del rows["frames"]
        # The frames of obs are the first four of these, those of next_obs the last four
        around = numbers[:, None] + self.num_envs * np.arange(-3, 2)
        places = around % len(self.rows)
        frames = self.rows["frames"][places]
        newest = numbers >= self.count - self.num_envs
        frames[newest, 4] = self.current_obs[numbers[newest] % self.num_envs, ..., 3]
        for i in np.flatnonzero(rows["dones"] & ~rows["terminations"]):
            frames[i, 4] = self.final_frames[int(numbers[i])]
        # A frame is black if the episode ended with it or later, before this row (A6)
        ended = self.rows["dones"][places[:, :3]] | (around[:, :3] < 0)
        frames[:, :3][np.logical_or.accumulate(ended[:, ::-1], 1)[:, ::-1]] = 0
        frames = torch.from_numpy(frames).movedim(1, 3)  # PyTorch copies them faster so than NumPy
        rows["obs"] = frames[..., :4].contiguous().numpy()
        rows["next_obs"] = frames[..., 1:].contiguous().numpy()
        return rows

    def state_dict(self):
        oldest = self.count - self.size
        self.final_frames = {k: frame for k, frame in self.final_frames.items() if k >= oldest}
        frames = {k: torch.tensor(frame) for k, frame in self.final_frames.items()}
        return {**super().state_dict(), "final_frames": frames}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.final_frames = {k: frame.numpy() for k, frame in state["final_frames"].items()}


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


class Agent(nn.Module):
    """The network of DQN, with a distribution over atoms for each action."""

    def __init__(self, num_actions, n_atoms, v_min, v_max, dueling, amp):
        super().__init__()
        outputs = num_actions + 1 if dueling else num_actions
        self.num_actions = num_actions
        self.dueling = dueling
        self.amp = amp
        self.epsilon = 0.0  # the probability of a random action in a rollout
        atoms = torch.linspace(v_min, v_max, n_atoms)
        self.register_buffer("atoms", atoms, persistent=False)  # as the flags say
        self.network = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, outputs * n_atoms),
        )

    def forward(self, obs):
        """obs uint8 (n, 84, 84, 4) -> the atoms' log-probabilities, (n, num_actions, n_atoms)."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            pixels = obs.permute(0, 3, 1, 2) / 255.0  # A8
            logits = self.network(pixels).float().view(len(obs), -1, len(self.atoms))
        if self.dueling:
            values, advantages = logits[:, :1], logits[:, 1:]
            # Equation 9 of Wang et al.
            logits = values + advantages - advantages.mean(1, keepdim=True)
        return logits.log_softmax(2)

    def values(self, logprobs):
        """The atoms' log-probabilities (..., n_atoms) -> the means of the distributions (...)."""
        return (logprobs.exp() * self.atoms).sum(-1)

    def noise(self, num_steps, num_envs):
        """Noise that makes an action random, with the probability epsilon, else 0."""
        explores = torch.rand(num_steps, num_envs, 1) < self.epsilon
        noise = torch.rand(num_steps, num_envs, self.num_actions)
        # Beside the largest of such numbers the values don't count, so argmax draws an action
        return (explores * 1e30 * noise).numpy()

    def policy(self):
        """The policy as a function of arrays.

        obs (n, 84, 84, 4), noise (n, num_actions) -> actions; with noise 0.0 the best ones.
        """
        device = self.network[0].bias.device

        @torch.no_grad()
        def policy(obs, noise):
            values = self.values(self(torch.from_numpy(obs).to(device)))
            return (values.cpu().numpy() + noise).argmax(1)

        return policy


# --------------------------------------------------------------------------------------------------
# C51
# --------------------------------------------------------------------------------------------------

METRICS = ("loss", "q_values")  # CleanRL's names


def rollout(agent, envs, num_steps):
    """Plays num_steps in each environment (G10).

    Returns arrays (num_steps, num_envs, ...): obs and actions as they are, float32 rewards, bool
    terminations and truncations; and the episodes that ended, in pairs: the last step, counted in
    this rollout, and the Episode.
    """
    policy = agent.policy()
    noise = agent.noise(num_steps, len(envs.obs))
    steps = []
    episodes = []
    for step in range(num_steps):
        obs = envs.obs.copy()
        actions = policy(obs, noise[step])
        rewards, terminations, truncations, ended = envs.step(actions)
        steps.append((obs, actions, rewards, terminations, truncations))
        episodes += [(step, episode) for episode in ended]
    obs, actions, rewards, terminations, truncations = map(np.array, zip(*steps))
    return obs, actions, rewards.astype(np.float32), terminations, truncations, episodes


def epsilon(step, args):
    """The probability of a random action at a step of the run."""
    last_step = args.exploration_fraction * args.total_timesteps
    if step >= last_step:
        return args.end_e
    return args.start_e + step / last_step * (args.end_e - args.start_e)


class Adam(nn.Module):
    """Adam with tensors for all that changes, so that a step compiles together with the loss.

    torch.optim.Adam takes four times as long there. An nn.Module for its state_dict().
    """

    def __init__(self, params, eps):
        super().__init__()
        self.params = [param for param in params if param.requires_grad]
        self.eps = eps
        self.register_buffer("steps", torch.zeros((), device=self.params[0].device))
        self.exp_avg = nn.ParameterList(torch.zeros_like(x) for x in self.params)
        self.exp_avg_sq = nn.ParameterList(torch.zeros_like(x) for x in self.params)

    @torch.no_grad()
    def step(self, grads, lr):
        self.steps += 1
        correction = torch.sqrt(1 - 0.999**self.steps)
        step_size = lr / (1 - 0.9**self.steps)
        for param, grad, m, v in zip(self.params, grads, self.exp_avg, self.exp_avg_sq):
            m.lerp_(grad, 0.1)
            v.lerp_(grad * grad, 0.001)
            param -= step_size * m / (v.sqrt() / correction + self.eps)


class Learner(nn.Module):
    """What updates change besides the agent: target, optimizer, and METRICS not yet logged.

    target: the network that targets are computed with, a copy of the agent from earlier on.
    sums: of each of these METRICS; counts: how many values a sum has; float32 (len(METRICS),).
    """

    def __init__(self, agent, eps):
        super().__init__()
        self.target = copy.deepcopy(agent)
        self.optimizer = Adam(agent.parameters(), eps)
        device = self.optimizer.steps.device
        self.register_buffer("sums", torch.zeros(len(METRICS), device=device))
        self.register_buffer("counts", torch.zeros(len(METRICS), device=device))

    def add_metrics(self, *values):
        """Counts an update's metrics, scalars in the order of METRICS; the last may be missing."""
        self.sums[: len(values)] += torch.stack(values).detach()
        self.counts[: len(values)] += 1

    def mean_metrics(self):
        """Returns the means of the metrics that have values, by name, and clears them."""
        means = (self.sums / self.counts).tolist()  # nan where there are no values
        self.sums.zero_()
        self.counts.zero_()
        return {name: mean for name, mean in zip(METRICS, means) if not math.isnan(mean)}


def project(probs, rewards, discounts, atoms):
    """The distribution of rewards + discounts * atoms, as one over atoms: equation 7.

    probs (n, n_atoms); rewards and discounts (n,); atoms: equally spaced -> (n, n_atoms).
    """
    moved = rewards[:, None] + discounts[:, None] * atoms
    moved = moved.clamp(atoms[0], atoms[-1])
    distances = (moved[:, None] - atoms[:, None]).abs() / (atoms[1] - atoms[0])
    # Each moved atom gives its probability to its two neighbours
    return ((1 - distances).clamp(0, 1) * probs[:, None]).sum(2)


def update(agent, learner, batch, lr, args):
    """A step of Adam on a minibatch, see sample_n_steps."""
    rows = torch.arange(args.batch_size, device=batch["obs"].device)
    with torch.no_grad():
        next_logprobs = learner.target(batch["next_obs"])
        online_logprobs = agent(batch["next_obs"]) if args.double else next_logprobs
        best_actions = agent.values(online_logprobs).argmax(1)
        next_probs = next_logprobs[rows, best_actions].exp()
        targets = project(next_probs, batch["rewards"], batch["discounts"], agent.atoms)

    logprobs = agent(batch["obs"])[rows, batch["actions"]]
    loss = -(targets * logprobs).sum(1).mean()
    grads = torch.autograd.grad(loss, learner.optimizer.params)
    learner.optimizer.step(grads, lr)
    learner.add_metrics(loss, agent.values(logprobs).mean())


@torch.no_grad()
def move_target(agent, learner, tau):
    """Moves the target network towards the agent's, by a fraction tau; 1: all the way."""
    for target, param in zip(learner.target.parameters(), agent.parameters()):
        target.lerp_(param, tau)


def sample_n_steps(replay, args, device):
    """Draws transitions of up to --n-step steps -> {name: tensor (batch_size, ...)}.

    obs, actions; rewards: the discounted sum; next_obs: after the last of these steps; discounts:
    the factor of its value, gamma ** k after k steps, 0 after a termination. A transition ends with
    its episode, and with the newest step of its environment: rows stand in the buffer step by step,
    environment by environment.
    """
    numbers = replay.draw(args.batch_size)
    batch = replay.read(numbers)
    discounts = np.full(args.batch_size, args.gamma, np.float32)
    last = batch
    for _ in range(args.n_step - 1):
        numbers = numbers + args.num_envs
        goes_on = ~last["dones"] & (numbers < replay.count)
        numbers = np.where(goes_on, numbers, numbers - args.num_envs)
        last = replay.read(numbers)
        batch["rewards"] = batch["rewards"] + goes_on * discounts * last["rewards"]
        discounts = np.where(goes_on, args.gamma * discounts, discounts)
    batch["next_obs"] = last["next_obs"]
    batch["discounts"] = discounts * ~last["terminations"]
    del batch["terminations"], batch["dones"]  # of the first step, which a target doesn't need
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}


def compile_or_not(function, args, device):
    """Returns function compiled, or as it is with --no-compile.

    Where no compiler works it also sets args.compile = False, so that a resume has the same bits
    everywhere.
    """
    if not args.compile:
        return function
    print(f"compiling {function.__name__}: up to half a minute, the first time", flush=True)
    # Kernels of a GPU that are chosen by timing them would give each run other bits
    options = {"deterministic": True, "triton.autotune_pointwise": False}
    options["triton.cudagraphs"] = True  # on a GPU a graph starts all kernels at once
    if device.type == "cpu":
        # Without the threshold, inductor computes beta ** steps again for every eight weights
        options = {"cpp_wrapper": True, "realize_opcount_threshold": 4}
    try:  # on something small
        torch.compile(torch.sin, options=options)(torch.ones(1, device=device))
    except Exception as error:  # whatever is missing (compiler, headers, cache) is in the message
        print(f"running without compilation, slower: {error}")
        args.compile = False
        return function
    torch._dynamo.config.trace_autograd_ops = True  # else it can't compile torch.autograd.grad
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


def evaluate(agent, envs, args, video_dir, step=None):
    """Plays --eval-episodes episodes with deterministic actions; returns them.

    In an environment of its own, with other seeds than the training's envs, and during the
    training (at a step) with others each time, so that best.pt isn't the best at a few starts.
    """
    seed = (args.seed, 1) if step is None else (args.seed, 2, step)
    if video_dir:
        video_dir = video_dir / ("end" if step is None else f"step-{step}")
    envs = envs.for_evaluation(args.env_id, seed, video_dir)
    policy = agent.policy()
    episodes = []
    while len(episodes) < args.eval_episodes:
        _, _, _, ended = envs.step(policy(envs.obs, 0.0))
        episodes += ended
    envs.close()
    return episodes


# --------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    args, saved = read_flags()
    check_args(args)
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    random.seed(args.seed)  # some environments draw from these two, which a resume doesn't restore
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    steps_per_iteration = args.num_envs * args.train_frequency
    num_iterations = args.total_timesteps // steps_per_iteration
    envs = [make_env(args.env_id) for _ in range(args.num_envs)]
    envs = VecEnv(envs, args.seed, np.uint8, steps_per_seed=5000)  # a seeded reset takes 85 ms
    num_actions = int(envs.action_space.n)
    agent = Agent(num_actions, args.n_atoms, args.v_min, args.v_max, args.dueling, args.amp)
    agent = agent.to(device)
    run = Run(args, saved, num_iterations * steps_per_iteration)
    video_dir = run.folder / "videos" if args.capture_video else None
    if args.evaluate or args.init_from:
        run.load(agent=agent)
        atoms = saved["args"]["v_min"], saved["args"]["v_max"]
        check(atoms == (args.v_min, args.v_max), f"give the networks' --v-min and --v-max: {atoms}")
    if args.evaluate:
        run.finish(evaluate(agent, envs, args, video_dir))
        sys.exit()
    learner = Learner(agent, eps=0.01 / args.batch_size)
    spare = args.checkpoint_interval * steps_per_iteration
    path = run.folder / "replay.bin"
    replay = FrameBuffer(path, args.buffer_size, spare, envs.obs, is_new=not args.resume)
    run.restore(agent=agent, learner=learner, replay=replay, envs=envs)
    if args.resume:
        # An episode that couldn't be brought back ends with its newest row. So does one that
        # couldn't in an earlier resume, since rows outlive a kill
        newest = np.arange(replay.count - args.num_envs, replay.count)
        rows = newest % len(replay.rows)
        replay.rows["dones"][rows[envs.restarted]] = True
        cut = replay.rows["dones"][rows] & ~replay.rows["terminations"][rows]
        for number, obs in zip(newest[cut].tolist(), saved["envs"]["obs"].numpy()[cut]):
            replay.final_frames.setdefault(number, obs[..., 3])
    compiled_update = compile_or_not(update, args, device)
    # As a tensor: for another float the update would be compiled again
    lr = torch.tensor(args.learning_rate, device=device)

    for iteration in run.iterations():  # counted from 0
        agent.epsilon = epsilon(run.global_step, args)
        # With one autocast around the rollout, the weights are converted to bfloat16 only once
        with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
            obs, actions, rewards, terminations, truncations, episodes = rollout(
                agent, envs, args.train_frequency
            )
        for step, episode in episodes:
            if episode.ended_by == "truncation":
                number = replay.count + step * args.num_envs + episode.env
                replay.final_frames[number] = episode.final_obs[..., 3]
            run.log_episode(run.global_step + (step + 1) * args.num_envs, episode)
        replay.add(
            frames=obs[..., 3],
            actions=actions,
            rewards=rewards,
            terminations=terminations,
            dones=terminations | truncations,
        )
        first_step = run.global_step
        run.global_step += steps_per_iteration
        if run.global_step > args.learning_starts:
            # An update for each --train-frequency steps
            for step in range(first_step, run.global_step, args.train_frequency):
                batch = sample_n_steps(replay, args, device)
                compiled_update(agent, learner, batch, lr, args)
                next_step = step + args.train_frequency
                frequency = args.target_network_frequency
                for _ in range(step // frequency, next_step // frequency):
                    move_target(agent, learner, args.tau)

        if (iteration + 1) % 100 == 0:
            run.check_finite(learner.sums)
            means = learner.mean_metrics()
            scalars = {f"losses/{name}": mean for name, mean in means.items()}
            run.log({**scalars, "charts/epsilon": agent.epsilon})
        if args.eval_interval > 0 and (iteration + 1) % args.eval_interval == 0:
            run.log_evaluation(evaluate(agent, envs, args, video_dir, run.global_step))

    envs.close()
    run.finish(evaluate(agent, envs, args, video_dir))
