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
"""SAC for continuous (Box) actions: MuJoCo and any other environment with vector observations.

Soft Actor-Critic with a learned temperature, Haarnoja et al. 2018b,
https://arxiv.org/abs/1812.05905. The defaults are those of its table 1: layers of 256, gamma 0.99,
tau 0.005, minibatches of 256, a target entropy of minus the action's dimensions, Adam with 3e-4 for
the actor. The 1e-3 of critics and temperature and the 5,000 random steps are CleanRL's. The
temperature of 1 at the start is that of https://github.com/rail-berkeley/softlearning, the authors'
code. Comments number details as docs/details.md does, and have the paper's equations. A time limit
is not a termination.
Diff it against td3_continuous_action.py.

    python sac_continuous_action.py --env-id HalfCheetah-v5 --total-timesteps 1000000
"""

import copy
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
from typing import NamedTuple

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
    num_threads: int = 1  # threads of PyTorch; a second one gains less than it costs
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "plainrl"  # project at Weights & Biases
    wandb_entity: str | None = None  # user or team at Weights & Biases
    capture_video: bool = False  # film the first episode of each evaluation, into videos/
    checkpoint_interval: int = 10000  # iterations (a step in each environment) between checkpoints
    eval_interval: int = 10000  # iterations between evaluations during the training (0: none)
    eval_episodes: int = 10  # episodes of an evaluation, with deterministic actions and own seeds
    resume: str | None = None  # continue the run in this folder, exactly; its flags come with it
    evaluate: str | None = None  # play the policy of this run, or of a checkpoint such as best.pt
    init_from: str | None = None  # begin with the networks and statistics of this run

    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1000000  # steps of the run, all environments together
    learning_rate: float = 3e-4  # learning rate of Adam
    actor_learning_rate: float | None = None  # learning rate of the actor (None: --learning-rate)
    critic_learning_rate: float | None = 1e-3  # learning rate of the critic (None: --learning-rate)
    num_envs: int = 1  # number of environments
    gamma: float = 0.99  # discount factor
    hidden_sizes: tuple[int, ...] = (256, 256)  # units of the hidden layers, actor's and critic's
    buffer_size: int = 1000000  # transitions in the replay buffer
    batch_size: int = 256  # transitions in a minibatch
    tau: float = 0.005  # target smoothing coefficient (Polyak averaging)
    random_steps: int | None = None  # first steps, with random actions (default: --learning-starts)
    learning_starts: int = 5000  # steps before the first update
    updates_per_step: float = 1.0  # updates for each step of an environment; may be below 1
    autotune: bool = True  # learn the temperature; off: it stays --alpha
    alpha: float = 1.0  # temperature, the weight of the entropy (with --autotune: the first one)
    alpha_learning_rate: float | None = 1e-3  # learning rate of alpha (None: --learning-rate)
    target_entropy: float | None = None  # target entropy, in nats (None: minus action dimensions)
    max_grad_norm: float | None = None  # largest norm of a gradient: actor's, critics' or alpha's
    weight_decay: float = 0.0  # weight of the L2 penalty on the critic's parameters


SCHEDULES = ()  # flags whose effect depends on --total-timesteps
# Flags that a resume may change
FREE = ("total_timesteps", "capture_video", "checkpoint_interval", "eval_interval", "eval_episodes")


def check_args(args):
    """Ends the program if the flags can't be used, alone or together."""
    check(0 <= args.seed < 2**32, "--seed must be from 0 to 2**32 - 1")
    positive = ("num_threads", "learning_rate", "total_timesteps", "checkpoint_interval")
    positive += ("eval_episodes", "num_envs", "buffer_size", "batch_size", "updates_per_step")
    positive += ("alpha", "alpha_learning_rate")
    positive += ("actor_learning_rate", "critic_learning_rate", "max_grad_norm")
    for name in positive:
        value = getattr(args, name)
        check(value is None or value > 0, f"--{name.replace('_', '-')} must be above 0")
    for name in ("random_steps", "weight_decay"):
        value = getattr(args, name)
        check(value is None or value >= 0, f"--{name.replace('_', '-')} must be 0 or above")
    check(min(args.hidden_sizes, default=0) > 0, "--hidden-sizes must be numbers above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(0 < args.tau <= 1, "--tau must be above 0, up to 1")
    end = args.total_timesteps // args.num_envs * args.num_envs
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


class RescaleAction(gym.ActionWrapper):
    """Brings a flat action in [-1, 1], (action_dim,), to the bounds, their shape and dtype."""

    def __init__(self, env):
        super().__init__(env)
        self.low = env.action_space.low
        self.high = env.action_space.high

    def action(self, action):
        action = action.reshape(self.low.shape)
        action = (self.low + (action + 1) * (self.high - self.low) / 2).astype(self.low.dtype)
        return np.minimum(np.maximum(action, self.low), self.high)  # rounding may lead outside


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
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer and renderer.model.ncam > 0:
        renderer.camera_id = 0  # the model's own camera, which goes along with the robot
    action_space = env.action_space
    fits = isinstance(action_space, gym.spaces.Box) and action_space.dtype.kind == "f"
    fits = fits and np.isfinite(action_space.high - action_space.low).all()
    kind = f"{type(action_space)} {action_space}"
    advice = "but this script needs a Box of floats with finite bounds"
    check(fits, f"{env_id} has the action space {kind}, {advice}")
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
    return RescaleAction(env)


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


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


def relu_mlp(sizes):
    """Linear layers of these sizes, ReLU between them; initialised by PyTorch."""
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
    """The actor, obs -> mean and log_std of each component of an action, and the two critics."""

    def __init__(self, obs_dim, action_dim, hidden_sizes):
        super().__init__()
        self.actor = relu_mlp((obs_dim, *hidden_sizes, 2 * action_dim))
        self.critic = TwinCritic((obs_dim + action_dim, *hidden_sizes, 1))

    @torch.no_grad()
    def act(self, obs, noise=0.0):
        """Arrays: obs float32 (n, obs_dim) -> actions (n, action_dim).

        noise: see squash; without it, the actions are deterministic.
        """
        obs = torch.from_numpy(obs).to(self.actor[0].bias.device)
        actions, _ = squash(self.actor(obs), torch.as_tensor(noise).to(obs))
        return actions.cpu().numpy()


def squash(outputs, noise):
    """Actions of a Gaussian, brought to [-1, 1] by tanh (appendix C).

    outputs: the actor's, (n, 2 * action_dim); noise: standard normal, (n, action_dim). Returns
    actions (n, action_dim) and their log-probabilities, (n,).
    """
    means, log_stds = outputs.chunk(2, 1)
    log_stds = log_stds.clamp(-20.0, 2.0)  # as in the paper's code
    x = means + log_stds.exp() * noise
    logprobs = -0.5 * noise**2 - log_stds - 0.5 * math.log(2 * math.pi)
    # log(1 - tanh(x)^2), written so that it stays finite where tanh rounds to 1
    log_slopes = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))
    return x.tanh(), (logprobs - log_slopes).sum(1)


# --------------------------------------------------------------------------------------------------
# SAC
# --------------------------------------------------------------------------------------------------

METRICS = (  # CleanRL's names, and the policy's entropy
    "qf1_values",
    "qf2_values",
    "qf1_loss",
    "qf2_loss",
    "actor_loss",
    "alpha",
    "entropy",
    "alpha_loss",
)


def clip_grads(grads, max_norm):
    """Scales gradients down to the norm max_norm if theirs, all together, is larger (G8)."""
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return [grad * scale for grad in grads]


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
    """What updates change besides the agent: target, temperature, optimizers, unlogged METRICS.

    target: the critics' slow copy; log_alpha: logarithm of the temperature, ().
    sums: of each of these METRICS; counts: how many values a sum has; float32 (len(METRICS),).
    """

    def __init__(self, agent, alpha):
        super().__init__()
        device = agent.actor[0].bias.device
        self.target = copy.deepcopy(agent.critic)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha), device=device))
        self.actor_optimizer = Adam(agent.actor.parameters(), eps=1e-8)
        self.critic_optimizer = Adam(agent.critic.parameters(), eps=1e-8)
        self.alpha_optimizer = Adam([self.log_alpha], eps=1e-8)
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


def gradient_step(loss, optimizer, lr, args, weight_decay=0.0):
    """A step of the optimizer with the gradient of loss, a scalar, and that of an L2 penalty."""
    grads = torch.autograd.grad(loss, optimizer.params)
    if args.max_grad_norm is not None:
        grads = clip_grads(grads, args.max_grad_norm)
    if weight_decay > 0:
        grads = [x + weight_decay * param.detach() for x, param in zip(grads, optimizer.params)]
    optimizer.step(grads, lr)


def update(agent, learner, batch, noises, coefs, args):
    """A step for the temperature, one for the critics, one for the actor, one for the target.

    Algorithm 1 of Haarnoja et al., but the temperature comes first, as in Stable-Baselines3. batch:
    see sample_batch; noises: of the actions in obs and of those in next_obs, standard normal,
    (2, batch_size, action_dim).
    """
    obs, next_obs = batch["obs"], batch["next_obs"]
    alpha = learner.log_alpha.detach().exp()
    actions, logprobs = squash(agent.actor(obs), noises[0])

    if args.autotune:  # equation 18, with log alpha for alpha, as in the authors' first code
        surplus = logprobs.detach() + coefs["target_entropy"]
        alpha_loss = -(learner.log_alpha * surplus).mean()
        gradient_step(alpha_loss, learner.alpha_optimizer, coefs["alpha_lr"], args)

    with torch.no_grad():  # soft values, clipped double Q-learning (equations 3 and 5)
        next_actions, next_logprobs = squash(agent.actor(next_obs), noises[1])
        next_values = torch.minimum(*learner.target(next_obs, next_actions))
        soft_values = next_values - alpha * next_logprobs
        nonterminal = 1 - batch["terminations"]
        td_targets = batch["rewards"] + coefs["gamma"] * nonterminal * soft_values

    values1, values2 = agent.critic(obs, batch["actions"])
    loss1 = nn.functional.mse_loss(values1, td_targets)
    loss2 = nn.functional.mse_loss(values2, td_targets)
    optimizer = learner.critic_optimizer
    gradient_step(loss1 + loss2, optimizer, coefs["critic_lr"], args, args.weight_decay)
    metrics = [values1.mean(), values2.mean(), loss1, loss2]

    values = torch.minimum(*agent.critic(obs, actions))
    actor_loss = (alpha * logprobs - values).mean()  # equation 9
    gradient_step(actor_loss, learner.actor_optimizer, coefs["actor_lr"], args)
    metrics += [actor_loss, alpha, -logprobs.mean()]
    with torch.no_grad():
        for target, param in zip(learner.target.parameters(), agent.critic.parameters()):
            target.lerp_(param, coefs["tau"])
    if args.autotune:
        metrics.append(alpha_loss)
    learner.add_metrics(*metrics)


def sample_batch(replay, args, device):
    """Draws a minibatch of transitions -> {column: tensor (batch_size, ...)}, see ReplayBuffer."""
    batch = replay.read(replay.draw(args.batch_size))
    return {name: torch.from_numpy(array).to(device) for name, array in batch.items()}


def count_updates(step, args):
    """The number of updates that are due after so many steps of a run."""
    return max(0, math.ceil((step - args.learning_starts) * args.updates_per_step))


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
    episodes = []
    while len(episodes) < args.eval_episodes:
        _, _, _, ended = envs.step(agent.act(envs.obs))
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

    num_iterations = args.total_timesteps // args.num_envs
    envs = VecEnv([make_env(args.env_id) for _ in range(args.num_envs)], args.seed, np.float32)
    obs_dim = envs.obs.shape[1]
    action_dim = gym.spaces.flatdim(envs.action_space)
    agent = Agent(obs_dim, action_dim, args.hidden_sizes).to(device)
    run = Run(args, saved, num_iterations * args.num_envs)
    video_dir = run.folder / "videos" if args.capture_video else None
    if args.evaluate or args.init_from:
        run.load(agent=agent)
    if args.evaluate:
        run.finish(evaluate(agent, envs, args, video_dir))
        sys.exit()
    learner = Learner(agent, args.alpha)
    columns = {
        "obs": (np.float32, (obs_dim,)),
        "actions": (np.float32, (action_dim,)),  # in [-1, 1]
        "rewards": (np.float32, ()),
        "next_obs": (np.float32, (obs_dim,)),  # what truly followed, before any reset
        "terminations": (np.float32, ()),  # 0 or 1
    }
    spare = args.checkpoint_interval * args.num_envs
    path = run.folder / "replay.bin"
    replay = ReplayBuffer(path, args.buffer_size, spare, columns, is_new=not args.resume)
    run.restore(agent=agent, learner=learner, replay=replay, envs=envs)

    compiled_update = compile_or_not(update, args, device)
    target_entropy = -action_dim if args.target_entropy is None else args.target_entropy
    coefs = {
        "actor_lr": args.actor_learning_rate or args.learning_rate,
        "critic_lr": args.critic_learning_rate or args.learning_rate,
        "gamma": args.gamma,
        "tau": args.tau,
        "alpha_lr": args.alpha_learning_rate or args.learning_rate,
        "target_entropy": float(target_entropy),
    }
    # As tensors: for other floats the update would be compiled again
    coefs = {name: torch.tensor(value, device=device) for name, value in coefs.items()}
    random_steps = args.learning_starts if args.random_steps is None else args.random_steps
    for iteration in run.iterations():  # counted from 0
        obs = envs.obs.copy()
        if run.global_step < random_steps:
            actions = 2 * torch.rand(args.num_envs, action_dim).numpy() - 1
        else:
            noise = torch.randn(args.num_envs, action_dim)
            actions = agent.act(obs, noise)
        run.check_finite(torch.from_numpy(actions))  # before they spoil the environment

        rewards, terminations, _, episodes = envs.step(actions)
        next_obs = envs.obs.copy()
        for episode in episodes:
            next_obs[episode.env] = episode.final_obs
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
        for _ in range(updates_before, updates_after):
            batch = sample_batch(replay, args, device)
            noises = torch.randn(2, args.batch_size, action_dim).to(device)
            compiled_update(agent, learner, batch, noises, coefs, args)

        for episode in episodes:
            run.log_episode(run.global_step, episode)
        if (iteration + 1) % 100 == 0:
            run.check_finite(learner.sums)
            means = learner.mean_metrics()
            run.log({f"losses/{name}": mean for name, mean in means.items()})
        if args.eval_interval > 0 and (iteration + 1) % args.eval_interval == 0:
            run.log_evaluation(evaluate(agent, envs, args, video_dir, run.global_step))

    envs.close()
    run.finish(evaluate(agent, envs, args, video_dir))
