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
#     "moviepy==2.2.1",
# ]
# ///
"""PPO with an LSTM, a GRU or a plain RNN, for discrete actions and vector observations.

Proximal Policy Optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347. It has the
details of ppo.py, numbered as there, and five for recurrent networks, l1 to l5. The update is not
compiled, because the ends of episodes cut it in other places each time. --no-memory is the control
experiment. Diff it against ppo.py or ppo_atari_lstm.py.

    python ppo_lstm.py --env-id CartPole-v1 --total-timesteps 500000
"""

import json
import math
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, NamedTuple

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
    compile: bool = True  # accepted, but this script compiles nothing
    num_threads: int = 1  # threads of PyTorch; a second one gains nothing on layers so small
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "plainrl"  # project at Weights & Biases
    wandb_entity: str | None = None  # user or team at Weights & Biases
    capture_video: bool = False  # film the first episode of each evaluation, into videos/
    checkpoint_interval: int = 10  # iterations (a rollout and its update) between checkpoints
    eval_interval: int = 0  # iterations between evaluations during the training (0: none)
    eval_episodes: int = 10  # episodes of an evaluation, with deterministic actions and own seeds
    resume: str | None = None  # continue the run in this folder, exactly; its flags come with it
    evaluate: str | None = None  # play the policy of this run, or of a checkpoint such as best.pt
    init_from: str | None = None  # begin with the networks and statistics of this run

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


SCHEDULES = ("anneal_lr", "anneal_clip")  # flags whose effect depends on --total-timesteps
# Flags that a resume may change
FREE = ("total_timesteps", "capture_video", "checkpoint_interval", "eval_interval", "eval_episodes")


def check_args(args):
    """Ends the program if the flags can't be used, alone or together."""
    check(0 <= args.seed < 2**32, "--seed must be from 0 to 2**32 - 1")
    positive = ("num_threads", "learning_rate", "total_timesteps", "checkpoint_interval")
    positive += ("eval_episodes", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    positive += ("clip_coef", "hidden_size", "max_grad_norm")
    for name in positive:
        check(getattr(args, name) > 0, f"--{name.replace('_', '-')} must be above 0")
    check(min(args.hidden_sizes, default=0) > 0, "--hidden-sizes must be numbers above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(0 <= args.gae_lambda <= 1, "--gae-lambda must be from 0 to 1")
    check(args.target_kl is None or args.target_kl > 0, "--target-kl must be above 0")
    batch_size = args.num_envs * args.num_steps
    remainder = args.num_envs % args.num_minibatches
    check(remainder == 0, "--num-envs must be a multiple of --num-minibatches")  # l4
    minibatch_size = batch_size // args.num_minibatches
    check(minibatch_size > 1 or not args.norm_adv, "minibatches of one step need --no-norm-adv")
    check(batch_size <= args.total_timesteps, f"--total-timesteps is below a rollout, {batch_size}")


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


def float_space(space, env_id):
    """Returns an observation space with float64 numbers, whose dtype flattening gives to them.

    Ends the program if a part of the space can't become a flat array.
    """
    if isinstance(space, gym.spaces.Dict):
        parts = [(name, float_space(part, env_id)) for name, part in space.items()]
        return gym.spaces.Dict(parts)  # in their order, which a dict of them would lose
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([float_space(part, env_id) for part in space])
    if isinstance(space, gym.spaces.Box):
        return gym.spaces.Box(-np.inf, np.inf, space.shape, np.float64)
    kinds = gym.spaces.Discrete | gym.spaces.MultiBinary | gym.spaces.MultiDiscrete
    advice = "gymnasium's Dict, Tuple, Box, Discrete, MultiBinary and MultiDiscrete can be used"
    check(isinstance(space, kinds), f"{env_id} has {type(space)} in its observations: {advice}")
    return space


def check_env(env, env_id):
    """Ends the program if the first reset() or step() of an environment returns what it mustn't."""
    env.action_space.seed(0)
    results = {"reset()": env.reset(seed=0), "step()": env.step(env.action_space.sample())}
    for name, result in results.items():
        length = 2 if name == "reset()" else 5
        fits = isinstance(result, tuple) and len(result) == length and isinstance(result[-1], dict)
        check(fits, f"{name} of {env_id} must return {length} values, the last one a dict")
        if env.observation_space.shape is not None:  # a Dict and a Tuple have none
            shape = np.shape(result[0])
            fits = shape == env.observation_space.shape
            check(fits, f"{name} of {env_id} returns another shape than its space's: {shape}")
    reward = results["step()"][1]
    fits = np.ndim(reward) == 0 and np.asarray(reward).dtype.kind in "biuf"
    check(fits, f"step() of {env_id} must return a number as its reward, not {reward!r}")


def make_env(env_id, video_dir=None, max_steps=None):
    """Makes an environment with its wrappers.

    video_dir: for a film of its first episode; max_steps: where an episode is cut at the latest.
    """
    options = {"render_mode": "rgb_array"} if video_dir else {}
    if video_dir and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # the renderer that needs no display
    try:
        env = gym.make(env_id, disable_env_checker=True, **options)
    except (gym.error.Error, ImportError) as error:
        check(False, f"can't make {env_id}: {error}")
    action_space = env.action_space
    fits = isinstance(action_space, gym.spaces.Discrete)
    kind = f"{type(action_space)} {action_space}"
    check(fits, f"{env_id} has the action space {kind}, but this script needs a Discrete one")
    space = float_space(env.observation_space, env_id)
    inner = env  # without those wrappers of gymnasium.make that would fail before the sentence
    while isinstance(inner, gym.wrappers.OrderEnforcing | gym.wrappers.TimeLimit):
        inner = inner.env
    check_env(inner, env_id)

    if max_steps:
        env = gym.wrappers.TimeLimit(env, max_steps)
    if video_dir:
        env = gym.wrappers.RecordVideo(env, video_dir, lambda number: number == 0)
    env = gym.wrappers.TransformReward(env, float)  # sums of float32 numbers would be less exact
    env = gym.wrappers.RecordEpisodeStatistics(env, stats_key="plainrl_statistics")
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
        env = gym.wrappers.TransformObservation(env, lambda obs: obs, space)
        env = gym.wrappers.FlattenObservation(env)
    # The agent counts actions from 0
    start, dtype = action_space.start, action_space.dtype
    return gym.wrappers.TransformAction(env, lambda k: start + k.astype(dtype), action_space)


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


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    """Orthogonal weights of gain std, constant bias (G9; baselines a2c/utils.py)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(inputs, hidden_sizes, outputs, std):
    """Tanh layers (M6) and a linear one of gain std."""
    layers = []
    for size in hidden_sizes:
        layers += [layer_init(nn.Linear(inputs, size)), nn.Tanh()]
        inputs = size
    return nn.Sequential(*layers, layer_init(nn.Linear(inputs, outputs), std))


def make_cell(kind, inputs, hidden_size):
    """The recurrent core: orthogonal weights, biases 0 (l1; baselines a2c/utils.py)."""
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
    cell = kinds[kind](inputs, hidden_size, batch_first=True)
    for name, parameter in cell.named_parameters():
        if "weight" in name:
            nn.init.orthogonal_(parameter)
        else:
            nn.init.zeros_(parameter)
    return cell


class Memory(nn.Module):
    """The state of the recurrent core in each environment, (num_envs, num_states, hidden_size).

    An nn.Module for its state_dict().
    """

    def __init__(self, agent, num_envs):
        super().__init__()
        shape = num_envs, agent.num_states, agent.cell.hidden_size
        self.register_buffer("state", torch.zeros(shape, device=agent.actor.bias.device))  # l2


class Agent(nn.Module):
    """Tanh layers (M6), a recurrent core, and on it both policy and value.

    obs: (n, num_steps, obs_dim); memory: the core's state, (n, num_states, hidden_size).
    """

    def __init__(self, obs_dim, num_actions, args):
        super().__init__()
        self.use_memory = args.memory
        *first_sizes, last_size = args.hidden_sizes
        self.network = mlp(obs_dim, first_sizes, last_size, std=math.sqrt(2)).append(nn.Tanh())
        self.cell = make_cell(args.cell, last_size, args.hidden_size)
        self.num_states = 2 if args.cell == "lstm" else 1
        self.actor = layer_init(nn.Linear(args.hidden_size, num_actions), 0.01)
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
        state = memory.transpose(0, 1).contiguous()
        for begin, end in zip(begins, ends):
            if begin > 0:
                state = state.masked_fill(dones[:, begin - 1, None], 0.0)  # l3
            if self.num_states == 2:
                output, states = self.cell(x[:, begin:end], state.split(1))
                state = torch.cat(states)
            else:
                output, state = self.cell(x[:, begin:end], state)
            outputs.append(output)
        return torch.cat(outputs, 1), state.transpose(0, 1)

    def heads(self, obs, memory, dones=None):
        """Returns log-probabilities (n, num_steps, num_actions), values (n, num_steps) and memory.

        dones: see recur.
        """
        hidden, memory = self.recur(self.network(obs), memory, dones)
        return self.actor(hidden).log_softmax(2), self.critic(hidden).squeeze(2), memory

    def forward(self, obs, actions, memory, dones):
        """actions: int64 (n, num_steps) -> logprobs, entropy, values, each (n, num_steps)."""
        all_logprobs, values, _ = self.heads(obs, memory, dones)
        logprobs = all_logprobs.gather(2, actions[..., None]).squeeze(2)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(2)
        return logprobs, entropy, values

    def value(self, obs, memory):
        """obs of one step, (n, ...), memory -> values (n,)."""
        return self.heads(obs[:, None], memory)[1].squeeze(1)

    def noise(self, num_steps, num_envs):
        """Gumbel noise: argmax(logits + noise) is a sample of softmax(logits)."""
        shape = num_steps, num_envs, self.actor.out_features
        return -torch.empty(shape).exponential_().log().numpy()

    def policy(self):
        """The policy as a function of arrays, but for the memory, which is a tensor.

        obs of one step, (n, ...), a row of noise (n, num_actions), memory -> actions, logprobs,
        values, the memory after that step; noise 0.0: the likeliest actions.
        """
        device = self.actor.bias.device

        @torch.no_grad()
        def policy(obs, noise, memory):
            obs = torch.from_numpy(obs[:, None]).to(device)
            all_logprobs, values, memory = self.heads(obs, memory)
            all_logprobs = all_logprobs[:, 0].cpu().numpy()
            actions = (all_logprobs + noise).argmax(1)
            logprobs = all_logprobs[np.arange(len(actions)), actions]
            return actions, logprobs, values[:, 0].cpu().numpy(), memory

        return policy


# --------------------------------------------------------------------------------------------------
# PPO
# --------------------------------------------------------------------------------------------------

PER_CALL = 1  # minibatches in a call of update_minibatches
METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def rollout(agent, envs, num_steps, memory):
    """Plays num_steps in each environment (G10), and carries memory along.

    Returns arrays (num_steps, num_envs, ...): obs and actions as they are, float32 logprobs, values
    and rewards, bool terminations and truncations; and for each episode that ended its last step in
    this rollout, the Episode, and the memory (num_states, hidden_size) after that step.
    """
    policy = agent.policy()
    noise = agent.noise(num_steps, len(envs.obs))
    steps = []
    episodes = []
    for step in range(num_steps):
        obs = envs.obs.copy()
        actions, logprobs, values, memory.state = policy(obs, noise[step], memory.state)
        rewards, terminations, truncations, ended = envs.step(actions)
        rewards = rewards.astype(np.float32)
        steps.append((obs, actions, logprobs, values, rewards, terminations, truncations))
        episodes += [(step, episode, memory.state[episode.env].clone()) for episode in ended]
        memory.state[terminations | truncations] = 0.0  # l3
    return *map(np.array, zip(*steps)), episodes


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


def predict_next_values(agent, values, last_obs, last_memory, episodes):
    """The values of the observations that followed each step, an array (num_steps, num_envs).

    A step's next value is that of the following step; after the last one, that of the current
    observations, last_obs, and memory; after an episode's end, that of its final observation, with
    the memory that it had then. values: of the rollout; episodes: those that ended, as of rollout.
    """
    obs = np.stack([*last_obs, *(episode.final_obs for _, episode, _ in episodes)])
    memory = torch.stack([*last_memory, *(state for _, _, state in episodes)])
    with torch.no_grad():
        bootstrap_values = agent.value(torch.from_numpy(obs).to(memory.device), memory)
    last_values, final_values = np.split(bootstrap_values.cpu().numpy(), [len(last_obs)])
    next_values = np.concatenate((values[1:], last_values[None]))
    for (step, episode, _), final_value in zip(episodes, final_values):
        next_values[step, episode.env] = final_value
    return next_values


def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns], arrays; nan where all returns are equal."""
    variance = np.var(returns)
    if variance == 0:
        return np.nan
    return 1 - np.var(returns - values) / variance


def ppo_loss(agent, batch, coefs, args):
    """PPO's loss on a minibatch: returns it and its metrics, float32 (6,).

    batch: obs, actions, memory and dones as the agent takes them, and logprobs, advantages,
    returns, values (n, num_steps).
    """
    clip_coef = coefs["clip_coef"]
    logprobs, entropy, values = agent(
        batch["obs"], batch["actions"], batch["memory"], batch["dones"]
    )
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


def update_minibatches(optimizer, agent, batch, indices, coefs, args):
    """A step of Adam for each row of indices (k, minibatch_size); returns sums of the metrics."""
    optimizer.param_groups[0]["lr"] = coefs["lr"]
    total = 0.0
    for row in indices.unbind():
        minibatch = {name: x[row] for name, x in batch.items()}
        loss, metrics = ppo_loss(agent, minibatch, coefs, args)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), coefs["max_grad_norm"])  # G8
        optimizer.step()
        total = total + metrics
    return total


def update(step_minibatches, optimizer, agent, batch, coefs, args):
    """PPO's epochs over a batch; returns the metrics, averaged over all minibatches.

    step_minibatches: update_minibatches, compiled or not.
    """
    epochs = []
    for _ in range(args.update_epochs):
        indices = torch.randperm(len(batch["obs"])).view(args.num_minibatches, -1)  # G7
        indices = indices.to(batch["obs"].device)
        total = 0.0
        for rows in indices.split(math.gcd(args.num_minibatches, PER_CALL)):
            total = total + step_minibatches(optimizer, agent, batch, rows, coefs, args)
        epochs.append(total / args.num_minibatches)
        approx_kl = epochs[-1][METRICS.index("approx_kl")]
        if args.target_kl is not None and approx_kl > args.target_kl:  # X3
            break
    return torch.stack(epochs).mean(0).cpu()


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
    memory = Memory(agent, num_envs=1)
    episodes = []
    while len(episodes) < args.eval_episodes:
        actions, _, _, memory.state = policy(envs.obs, 0.0, memory.state)
        _, terminations, truncations, ended = envs.step(actions)
        memory.state[terminations | truncations] = 0.0  # l3
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

    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    envs = [make_env(args.env_id) for _ in range(args.num_envs)]
    envs = VecEnv(envs, args.seed, np.float32)
    agent = Agent(envs.obs.shape[1], envs.action_space.n, args).to(device)
    run = Run(args, saved, num_iterations * batch_size)
    video_dir = run.folder / "videos" if args.capture_video else None
    if args.evaluate or args.init_from:
        run.load(agent=agent)
        flag = "--memory" if saved["args"]["memory"] else "--no-memory"
        same = saved["args"]["memory"] == args.memory
        check(same, f"the networks were trained with {flag}: give it here too")
    if args.evaluate:
        run.finish(evaluate(agent, envs, args, video_dir))
        sys.exit()
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # G11
    memory = Memory(agent, args.num_envs)
    run.restore(agent=agent, optimizer=optimizer, memory=memory, envs=envs)
    if args.resume:
        memory.state[envs.restarted] = 0.0  # l3

    for iteration in run.iterations():  # counted from 0
        remaining = 1.0 - iteration / num_iterations
        coefs = {
            "lr": args.learning_rate * (remaining if args.anneal_lr else 1.0),  # G6
            "clip_coef": args.clip_coef * (remaining if args.anneal_clip else 1.0),  # X1
            "ent_coef": args.ent_coef,
            "vf_coef": args.vf_coef,
            "max_grad_norm": args.max_grad_norm,
        }

        start_memory = memory.state.clone()  # kept for the update (l5)
        obs, actions, logprobs, values, rewards, terminations, truncations, episodes = rollout(
            agent, envs, args.num_steps, memory
        )
        next_values = predict_next_values(agent, values, envs.obs, memory.state, episodes)
        dones = terminations | truncations
        if not args.bootstrap_truncated:
            terminations = dones
        advantages = compute_advantages(
            rewards, values, next_values, terminations, dones, args.gamma, args.gae_lambda
        )
        returns = advantages + values
        batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values}
        batch |= {"dones": dones, "advantages": advantages, "returns": returns}
        # Its rows are environments, with their steps in order (l4)
        batch = {name: torch.from_numpy(x).transpose(0, 1).to(device) for name, x in batch.items()}
        batch["memory"] = start_memory
        metrics = update(update_minibatches, optimizer, agent, batch, coefs, args)

        run.check_finite(metrics)
        for step, episode, _ in episodes:
            run.log_episode(run.global_step + (step + 1) * args.num_envs, episode)
        run.global_step += batch_size
        scalars = {f"losses/{name}": value for name, value in zip(METRICS, metrics, strict=True)}
        scalars["losses/explained_variance"] = explained_variance(values, returns)
        scalars["charts/learning_rate"] = coefs["lr"]
        run.log(scalars)
        if args.eval_interval > 0 and (iteration + 1) % args.eval_interval == 0:
            run.log_evaluation(evaluate(agent, envs, args, video_dir, run.global_step))

    envs.close()
    run.finish(evaluate(agent, envs, args, video_dir))
