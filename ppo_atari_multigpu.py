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
#     "moviepy==2.2.1",
# ]
# ///
"""PPO for Atari games, on many GPUs or many machines: processes that average their gradients.

Proximal Policy Optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the
details of openai/baselines ppo2 that "The 37 Implementation Details of PPO" explains,
https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
Comments number them as docs/details.md of the repository does: G1 to G11 are general, A1 to A10
for Atari, X1 and X3 optional, X2 for many processes.
Unlike in baselines, a time limit is not a termination; --no-bootstrap-truncated makes it one.
The games are those of ppo_atari_vector.py.

Each process plays its share of the games and learns from it. Before a step of Adam the processes
average their gradients (X2), so their weights stay equal. Flags name the sizes of the whole run.
Up to rounding, its results don't depend on the number of processes:

- Games have the seeds, and their actions the noise, that they have in one process with all games.
- A minibatch has the same number of steps of each game (G7).
- Advantages are normalised over all processes (G3). --no-sync-norm-adv does it in each one alone,
  as baselines does under MPI.

Rank 0 has the run: logs, checkpoints, evaluations. All processes read the checkpoint to resume, so
machines need a common folder.

Diff it against ppo_atari_vector.py.

    torchrun --standalone --nproc-per-node=2 ppo_atari_multigpu.py --env-id BreakoutNoFrameskip-v4
"""

import copy
import ctypes
import json
import math
import os
import platform
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

# Linux kills this process when torchrun is killed. Before the imports, which take seconds
if sys.platform == "linux" and "RANK" in os.environ:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG

# PyTorch's threads are to wait briefly and then sleep, else a busy program beside this one costs
# most of its speed. Read when torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from filelock import FileLock, Timeout
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# As torchrun sets them
LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
RANK = int(os.environ["RANK"]) if LAUNCHED else 0  # of this process among all, on all machines
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if LAUNCHED else 1  # the number of processes

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
    num_threads: int = torch.get_num_threads()  # threads of PyTorch and of ALE in each process
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

    env_id: str = "BreakoutNoFrameskip-v4"  # id of the game: NAMENoFrameskip-v4 or ALE/NAME-v5
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
    sync_norm_adv: bool = True  # normalise advantages over all processes, not in each alone
    clip_coef: float = 0.1  # clip range of the probability ratio and of the value loss
    anneal_clip: bool = False  # lower the clip range linearly over the run
    clip_vloss: bool = True  # clip the value loss as openai/baselines does
    ent_coef: float = 0.01  # coefficient of the entropy
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient, actor and critic together
    target_kl: float | None = None  # no more epochs after one whose approximate KL exceeds this
    bootstrap_truncated: bool = True  # bootstrap where a time limit has cut an episode
    amp: bool = False  # compute the network in bfloat16: faster, less exact


SCHEDULES = ("anneal_lr", "anneal_clip")  # flags whose effect depends on --total-timesteps
# Flags that a resume may change
FREE = ("total_timesteps", "capture_video", "checkpoint_interval", "eval_interval", "eval_episodes")


def check_args(args):
    """Ends the program if the flags can't be used, alone or together."""
    check(0 <= args.seed < 2**32, "--seed must be from 0 to 2**32 - 1")
    positive = ("num_threads", "learning_rate", "total_timesteps", "checkpoint_interval")
    positive += ("eval_episodes", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    positive += ("clip_coef", "max_grad_norm")
    for name in positive:
        check(getattr(args, name) > 0, f"--{name.replace('_', '-')} must be above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(0 <= args.gae_lambda <= 1, "--gae-lambda must be from 0 to 1")
    check(args.target_kl is None or args.target_kl > 0, "--target-kl must be above 0")
    batch_size = args.num_envs * args.num_steps
    whole = args.num_envs % WORLD_SIZE == 0
    check(whole, f"--num-envs must be a multiple of the number of processes, {WORLD_SIZE}")
    whole = args.num_steps % args.num_minibatches == 0
    check(whole, "--num-steps must be a multiple of --num-minibatches")
    minibatch_size = batch_size // args.num_minibatches
    if not args.sync_norm_adv:
        minibatch_size //= WORLD_SIZE
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


def make_emulators(env_id, num_envs, num_threads, **options):
    """Makes ALE's own vector of a game. Ends the program if it can't.

    In the v5 games the emulator repeats the last action with probability 0.25.
    """
    known = re.fullmatch(r"\w+NoFrameskip-v4|ALE/\w+-v5", env_id)
    check(known, f"{env_id} is not an Atari game: NAMENoFrameskip-v4 or ALE/NAME-v5")
    gym.register_envs(ale_py)
    # ALE starts with no-ops (A1), repeats actions (A4) and warps frames (A5). AtariVecEnv does the
    # rest, time limits too
    options |= {"stack_num": 1, "use_fire_reset": False, "reward_clipping": False}
    options |= {"frameskip": 4, "max_num_frames_per_episode": 10**9, "autoreset_mode": "SameStep"}
    try:
        spec = gym.spec(env_id)
        plain = spec.entry_point == "ale_py.env:AtariEnv" and spec.max_episode_steps is None
        plain = plain and isinstance(spec.kwargs.get("max_num_frames_per_episode"), int)
        advice = "it must be registered as ale-py registers games"
        check(plain, f"can't make {env_id}: {advice}")
        settings = spec.kwargs | options
        emulators = AtariVectorEnv(num_envs=num_envs, num_threads=num_threads, **settings)
    except (gym.error.Error, ImportError, TypeError, AssertionError, OSError) as error:
        check(False, f"can't make {env_id}: {error}")
    actions = emulators.ale.get_action_set()
    check(actions[0] == ale_py.Action.NOOP, f"{env_id} has no NOOP action (A1)")
    return emulators


def film(env_id, seed, actions, path):
    """Plays a game's actions again, in colour, which the agent doesn't see, and writes the film."""
    from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

    emulators = make_emulators(env_id, 1, 1, img_height=210, img_width=160, grayscale=False)
    frames, _ = emulators.reset(seed=seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FFMPEG_VideoWriter(str(path), (160, 210), fps=15) as video:  # every fourth of 60 frames
        for action in actions:
            video.write_frame(frames[0, 0])
            frames, *_ = emulators.step(np.array([action]))


class Episode(NamedTuple):
    """An episode that has ended."""

    env: int  # index of the environment
    episode_return: float  # sum of the rewards as they came from the environment
    length: int
    ended_by: str  # "termination" or "truncation"
    final_obs: np.ndarray  # its last observation, as the agent sees it


class AtariVecEnv:
    """Games that ALE's threads play at the same time; obs: uint8 (num_envs, 84, 84, 4).

    Around ALE's vector it does what the wrappers of ppo_atari.py do. A step that ends a game also
    begins the next one; its last observation is in the Episode.
    Given a seed and actions, a game always does the same. So each is saved as its last seed and the
    actions since, which are played again to bring it back. To keep them few, it gets a new seed
    with the first game that starts steps_per_seed steps or more after the last seed.
    video_dir: for a film of the first episode.
    """

    steps_per_seed = 10000  # a reset with a seed takes 85 ms, one without it 4

    def __init__(self, env_id, num_envs, seed, num_threads, video_dir=None):
        self.env_id = env_id
        self.video_dir = video_dir
        self.emulators = make_emulators(env_id, num_envs, min(num_threads, num_envs))
        self.action_space = self.emulators.single_action_space
        self.opening = np.array([0])  # after a lost life a no-op (A3)
        if ale_py.Action.FIRE in self.emulators.ale.get_action_set():
            self.opening = np.array([0, 1, 2])  # for games that wait for FIRE (A2)
        self.max_frames = gym.spec(env_id).kwargs["max_num_frames_per_episode"]

        self.obs = np.zeros((num_envs, 84, 84, 4), np.uint8)
        self.pixels = self.obs.view("<u4")[..., 0]  # a pixel's four frames as one number
        self.seeds = np.random.SeedSequence(seed).generate_state(num_envs)
        self.seed_counts = np.zeros(num_envs, np.int64)
        self.last_seeds = np.zeros(num_envs, np.int64)
        self.actions = [[] for _ in range(num_envs)]  # of each game, since its last seed
        self.episode_returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)
        self.lives = np.zeros(num_envs, np.int64)
        self.opening_steps = np.zeros(num_envs, np.int64)  # of the opening, how many are over
        self.reset_with_new_seeds(np.ones(num_envs, bool))

    def reset_with_new_seeds(self, mask):
        """Starts games with their next seeds where mask, bool (num_envs,), is True."""
        for i in np.flatnonzero(mask):
            sequence = np.random.SeedSequence((int(self.seeds[i]), int(self.seed_counts[i])))
            self.last_seeds[i] = sequence.generate_state(1)[0] % 2**31
            self.seed_counts[i] += 1
            self.actions[i] = []
        options = {"reset_mask": mask}
        frames, info = self.emulators.reset(seed=self.last_seeds[mask], options=options)
        self.begin_games(mask, frames, info)

    def begin_games(self, mask, frames, info):
        """Takes the first frames of games, where mask is True."""
        self.episode_returns[mask] = 0.0
        self.lengths[mask] = 0
        self.lives[mask] = info["lives"][mask]
        self.begin_episodes(mask, frames, opening_step=1)

    def begin_episodes(self, mask, frames, opening_step):
        """Makes all frames but the last one black (A6), where mask is True."""
        self.pixels[mask] = 0
        self.obs[mask, ..., 3] = frames[mask, 0]
        self.opening_steps[mask] = opening_step

    def step(self, actions):
        """Steps each game by its action, int64 (num_envs,), or in an opening by the opening's.

        Returns the rewards' signs, the terminations (of a game or a life) and truncations, bool,
        all (num_envs,), and the games that ended.
        """
        in_opening = self.opening_steps < len(self.opening)
        opening_actions = self.opening[self.opening_steps % len(self.opening)]
        actions = np.where(in_opening, opening_actions, actions)
        self.opening_steps += in_opening
        for game_actions, action in zip(self.actions, actions.tolist()):
            game_actions.append(action)

        frames, rewards, games_over, _, info = self.emulators.step(actions)
        self.episode_returns += rewards
        self.lengths += 1
        truncations = (info["episode_frame_number"] >= self.max_frames) & ~games_over
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
        episodes = []
        for i in np.flatnonzero(games_over | truncations).tolist():
            final_obs = self.obs[i].copy()
            if games_over[i]:  # the last frame is one of the next game
                final_obs[..., 3] = info["final_obs"][i, 0]
            ended_by = "termination" if terminations[i] else "truncation"
            episode_return = float(self.episode_returns[i])
            episodes.append(Episode(i, episode_return, int(self.lengths[i]), ended_by, final_obs))
        if self.video_dir:
            path = self.video_dir / "rl-video-episode-0.mp4"
            film(self.env_id, int(self.last_seeds[0]), self.actions[0], path)
            self.video_dir = None
        self.begin_games(games_over, frames, info)
        long_ago = np.array([len(actions) >= self.steps_per_seed for actions in self.actions])
        if truncations.any() or (games_over & long_ago).any():
            self.reset_with_new_seeds(truncations | (games_over & long_ago))
        return episodes

    def for_evaluation(self, env_id, seed, video_dir):
        """The same with one game, which an evaluation plays."""
        return AtariVecEnv(env_id, 1, seed, 1, video_dir)

    def close(self):
        self.emulators = None  # ends their threads

    def state_dict(self):
        return {
            "seed_counts": torch.tensor(self.seed_counts),
            "actions": [torch.tensor(actions, dtype=torch.uint8) for actions in self.actions],
            "obs": torch.tensor(self.obs),
        }

    def load_state_dict(self, state):
        """Plays the actions since the last seeds again. The games start so that all end together.

        Until its start, a game plays no-ops.
        """
        lengths = np.array([len(actions) for actions in state["actions"]])
        starts = lengths.max() - lengths
        all_actions = np.zeros((lengths.max(), len(lengths)), np.int64)
        for i, actions in enumerate(state["actions"]):
            all_actions[starts[i] :, i] = actions.numpy()
        for step in range(lengths.max() + 1):
            starting = starts == step
            if starting.any():
                self.seed_counts[starting] = state["seed_counts"].numpy()[starting] - 1
                self.reset_with_new_seeds(starting)
            if step < lengths.max():
                self.step(all_actions[step])
        for i, obs in enumerate(state["obs"].numpy()):
            if not np.array_equal(self.obs[i], obs):
                print(f"environment {i} can't be brought back exactly: it starts a new episode")
                self.reset_with_new_seeds(np.arange(len(lengths)) == i)


class RankVecEnv(AtariVecEnv):
    """This process's share of the games. Rank 0 saves the games of all processes.

    num_envs: of all processes; share: which of them are this one's.
    """

    def __init__(self, env_id, num_envs, seed, num_threads):
        share_size = num_envs // WORLD_SIZE
        self.share = slice(RANK * share_size, (RANK + 1) * share_size)
        super().__init__(env_id, share_size, seed, num_threads)
        self.seeds = np.random.SeedSequence(seed).generate_state(num_envs)[self.share]
        self.seed_counts[:] = 0
        self.reset_with_new_seeds(np.ones(share_size, bool))

    def gather(self):
        """Brings the games as they are now to rank 0, whose next state_dict() has them all."""
        states = gather(super().state_dict())
        if RANK == 0:
            self.state = {
                "seed_counts": torch.cat([state["seed_counts"] for state in states]),
                "actions": [actions for state in states for actions in state["actions"]],
                "obs": torch.cat([state["obs"] for state in states]),
            }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        super().load_state_dict({name: x[self.share] for name, x in state.items()})


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

    def value(self, obs):
        """obs uint8 (n, 84, 84, 4) -> values (n,)."""
        return self.heads(obs)[1]

    def noise(self, num_steps, num_envs):
        """Gumbel noise: argmax(logits + noise) is a sample of softmax(logits)."""
        shape = num_steps, num_envs, self.actor.out_features
        return -torch.empty(shape).exponential_().log().numpy()

    def policy(self):
        """The policy as a function of arrays.

        obs (n, 84, 84, 4), a row of noise (n, num_actions) -> actions; noise 0.0: the likeliest.
        """
        device = self.actor.bias.device

        @torch.no_grad()
        def policy(obs, noise):
            logprobs, _ = self.heads(torch.from_numpy(obs).to(device))
            return (logprobs.cpu().numpy() + noise).argmax(1)

        return policy


class Player:
    """The agent as it plays in a rollout: its copy, which is compiled, and with --amp bfloat16."""

    def __init__(self, agent, args, device):
        self.agent = agent
        self.noise = agent.noise
        dtype = torch.bfloat16 if args.amp else torch.float32
        self.copy = copy.deepcopy(agent).to(dtype=dtype, memory_format=torch.channels_last)
        self.copy.heads = compile_or_not(self.copy.heads, args, device)

    def policy(self):
        """Agent.policy(), with the agent's weights as they are now."""
        self.copy.load_state_dict(self.agent.state_dict())
        return self.copy.policy()


# --------------------------------------------------------------------------------------------------
# Processes
# --------------------------------------------------------------------------------------------------


def join():
    """Joins the other processes, and waits until all have."""
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        # Fails where torchrun has been killed already: the next line would wait for it
        address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        socket.create_connection(address, timeout=30).close()
    # For tensors on CPUs and on GPUs. Others wait while rank 0 evaluates
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backends, timeout=timedelta(days=1))


def broadcast_state(agent, optimizer):
    """Gives all processes the weights and the random state of rank 0."""
    rng_state = torch.get_rng_state()
    for x in (*agent.state_dict().values(), *optimizer.state_dict().values(), rng_state):
        dist.broadcast(x, 0)
    torch.set_rng_state(rng_state)


def gather(x):
    """The objects x of all processes, in the order of ranks, in rank 0; in the others None."""
    objects = [None] * WORLD_SIZE if RANK == 0 else None
    dist.gather_object(x, objects)
    return objects


def gather_rollout(share, episodes, values, returns):
    """A rollout as one process would have it, in rank 0; in the others None.

    Without the episodes' final observations, which have done their part.
    """
    episodes = [
        (step, episode._replace(env=share.start + episode.env, final_obs=None))
        for step, episode in episodes
    ]
    shares = gather((episodes, values, returns))
    if RANK > 0:
        return None
    episodes, values, returns = zip(*shares)
    return sorted(sum(episodes, [])), np.concatenate(values, 1), np.concatenate(returns, 1)


def iterations_together(run):
    """Yields what rank 0's run.iterations() yields, in all processes.

    Rank 0 alone obeys signals: the others end when it does.
    """
    iteration = torch.tensor(-1)  # after the last one, too
    if RANK > 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.broadcast(iteration, 0)
        while iteration >= 0:
            yield int(iteration)
            dist.broadcast(iteration, 0)
        return
    try:
        for number in run.iterations():
            dist.broadcast(torch.tensor(number), 0)
            yield number
    except SystemExit:
        if run.stop_signal:  # it has named a command
            print("but with torchrun, as this run was started, in the place of python")
        dist.broadcast(iteration, 0)
        raise
    dist.broadcast(iteration, 0)


def check_equal(agent):
    """Ends the run if the processes' weights aren't the same bits."""
    weights = torch.cat([x.detach().flatten() for x in agent.parameters()])
    checksums = gather(weights.view(torch.int32).sum().item())
    if RANK == 0 and len(set(checksums)) > 1:
        advice = "start it on machines of one kind, or look for what a process does alone"
        sys.exit(f"error: the weights of the processes have become different: {advice}")


# --------------------------------------------------------------------------------------------------
# PPO
# --------------------------------------------------------------------------------------------------

METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


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


def predict(agent, obs, actions, last_obs, episodes, device):
    """Values and log-probabilities of a rollout in one pass, since its weights were frozen.

    Arrays: obs and actions (num_steps, num_envs, ...); last_obs (num_envs, obs_dim): the current
    observations; episodes: those that ended, as of rollout. Returns the batch, tensors (n, ...),
    its values as an array (num_steps, num_envs), and next_values: a step's next value is that of
    the following step, but after an episode's end that of its final observation.
    """
    batch = {
        "obs": torch.from_numpy(obs).flatten(0, 1).to(device),
        "actions": torch.from_numpy(actions).flatten(0, 1).to(device),
    }
    bootstrap_obs = np.stack([*last_obs, *(episode.final_obs for _, episode in episodes)])
    with torch.no_grad():
        # In pieces, which fit into the processor's caches
        pieces = zip(batch["obs"].chunk(8), batch["actions"].chunk(8))
        outputs = zip(*(agent(*piece) for piece in pieces))
        batch["logprobs"], _, batch["values"] = map(torch.cat, outputs)
        bootstrap_values = agent.value(torch.from_numpy(bootstrap_obs).to(device)).cpu().numpy()
    values = batch["values"].cpu().numpy().reshape(obs.shape[:2])
    last_values, final_values = np.split(bootstrap_values, [len(last_obs)])
    next_values = np.concatenate((values[1:], last_values[None]))
    for (step, episode), final_value in zip(episodes, final_values):
        next_values[step, episode.env] = final_value
    return batch, values, next_values


def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns], arrays; nan where all returns are equal."""
    variance = np.var(returns)
    if variance == 0:
        return np.nan
    return 1 - np.var(returns - values) / variance


def ppo_loss(agent, batch, coefs, args):
    """PPO's loss on a minibatch: returns it and its metrics, float32 (6,).

    batch: obs and actions as the agent takes them, and logprobs, advantages, returns, values (n,).
    """
    clip_coef = coefs["clip_coef"]
    logprobs, entropy, values = agent(batch["obs"], batch["actions"])
    logratio = logprobs - batch["logprobs"]
    ratio = logratio.exp()

    advantages = batch["advantages"]
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


def draw_minibatches(args, share):
    """Indices (num_minibatches, n) of this process's steps; each row has equally many of each game.

    All processes draw for all games, so that together they learn from one process's minibatches.
    """
    steps = torch.rand(args.num_steps, args.num_envs).argsort(0)[:, share]  # G7
    num_envs = steps.shape[1]
    return (steps * num_envs + torch.arange(num_envs)).view(args.num_minibatches, -1)


def normalise_advantages(advantages, indices, args):
    """Normalises the advantages (n,) in each minibatch, a row of indices, of all processes (G3)."""
    minibatches = advantages[indices].double()
    moments = torch.stack([minibatches.sum(1), minibatches.square().sum(1)])
    count = minibatches.shape[1]
    if args.sync_norm_adv:
        dist.all_reduce(moments)
        count *= WORLD_SIZE
    mean = moments[0] / count
    variance = (moments[1] - count * mean**2) / (count - 1)
    std = variance.clamp(min=0.0).sqrt()
    normalised = torch.empty_like(advantages)
    normalised[indices] = ((minibatches - mean[:, None]) / (std[:, None] + 1e-8)).float()
    return normalised


def compute_gradient(optimizer, agent, batch, row, coefs, args):
    """The gradient of a minibatch, flat, and the metrics behind it."""
    minibatch = {name: x[row] for name, x in batch.items()}
    loss, metrics = ppo_loss(agent, minibatch, coefs, args)
    grads = torch.autograd.grad(loss, optimizer.params)
    return torch.cat([*(grad.flatten() for grad in grads), metrics])


def step_by_gradient(optimizer, gradient, coefs):
    """A step of Adam by the sum of what compute_gradient() gave the processes."""
    sizes = [param.numel() for param in optimizer.params]
    *grads, _ = (gradient / WORLD_SIZE).split([*sizes, len(METRICS)])
    grads = [grad.view_as(param) for grad, param in zip(grads, optimizer.params)]
    optimizer.step(clip_grads(grads, coefs["max_grad_norm"]), coefs["lr"])


def update(functions, optimizer, agent, batch, share, coefs, args):
    """PPO's epochs over a batch; returns the metrics, averaged over all minibatches and processes.

    functions: compute_gradient and step_by_gradient, compiled or not.
    """
    compute, step = functions
    epochs = []
    for _ in range(args.update_epochs):
        indices = draw_minibatches(args, share).to(batch["obs"].device)
        minibatches = dict(batch)
        if args.norm_adv:
            minibatches["advantages"] = normalise_advantages(batch["advantages"], indices, args)
        total = 0.0
        for row in indices:
            gradient = compute(optimizer, agent, minibatches, row, coefs, args)
            gradient = gradient.clone()  # a CUDA graph's output lasts until the next graph runs
            dist.all_reduce(gradient)  # X2
            step(optimizer, gradient, coefs)
            total = total + gradient[-len(METRICS) :]
        epochs.append(total / (args.num_minibatches * WORLD_SIZE))
        approx_kl = epochs[-1][METRICS.index("approx_kl")]  # of all processes: they stop together
        if args.target_kl is not None and approx_kl > args.target_kl:  # X3
            break
    return torch.stack(epochs).mean(0).cpu()


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
    if RANK > 0:
        join()  # rank 0 does so when flags, environments and checkpoint are good
    args, saved = read_flags()
    check_args(args)
    advice = "torchrun --standalone --nproc-per-node=2 ppo_atari_multigpu.py --env-id ..."
    check(LAUNCHED or args.evaluate, f"training is started by torchrun: {advice}")
    check(not LAUNCHED or not args.evaluate, "--evaluate needs no torchrun: use python")
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    if device.type == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", 0))  # among the processes of this machine
        advice = "lower --nproc-per-node, or use --no-cuda"
        check(local_rank < torch.cuda.device_count(), f"each process needs a GPU: {advice}")
        torch.cuda.set_device(local_rank)
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    random.seed(args.seed)  # some environments draw from these two, which a resume doesn't restore
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    envs = RankVecEnv(args.env_id, args.num_envs, args.seed, args.num_threads)
    agent = Agent(envs.action_space.n, args.amp).to(device)
    optimizer = Adam(agent.parameters(), eps=1e-5)  # G11
    run = None
    if RANK == 0:
        run = Run(args, saved, num_iterations * batch_size)
        run.machine["processes"] = WORLD_SIZE
        video_dir = run.folder / "videos" if args.capture_video else None
        if args.evaluate or args.init_from:
            run.load(agent=agent)
        if args.evaluate:
            run.finish(evaluate(agent, envs, args, video_dir))
            sys.exit()
        run.restore(agent=agent, optimizer=optimizer, envs=envs)
        join()
    elif args.resume:
        envs.load_state_dict(saved["envs"])
    broadcast_state(agent, optimizer)
    functions = [compile_or_not(x, args, device) for x in (compute_gradient, step_by_gradient)]
    player = Player(agent, args, device)
    # Drawn for all games, so that one random state is enough for all processes
    player.noise = lambda num_steps, _: agent.noise(num_steps, args.num_envs)[:, envs.share]
    envs.gather()

    for iteration in iterations_together(run):  # counted from 0
        remaining = 1.0 - iteration / num_iterations
        coefs = {
            "lr": args.learning_rate * (remaining if args.anneal_lr else 1.0),  # G6
            "clip_coef": args.clip_coef * (remaining if args.anneal_clip else 1.0),  # X1
            "ent_coef": args.ent_coef,
            "vf_coef": args.vf_coef,
            "max_grad_norm": args.max_grad_norm,
        }
        # As tensors: for each new float the compiled update would be compiled again
        coefs = {name: torch.tensor(value, device=device) for name, value in coefs.items()}

        obs, actions, rewards, terminations, truncations, episodes = rollout(
            player, envs, args.num_steps
        )
        batch, values, next_values = predict(agent, obs, actions, envs.obs, episodes, device)
        dones = terminations | truncations
        if not args.bootstrap_truncated:
            terminations = dones
        advantages = compute_advantages(
            rewards, values, next_values, terminations, dones, args.gamma, args.gae_lambda
        )
        returns = advantages + values
        batch["advantages"] = torch.from_numpy(advantages).flatten().to(device)
        batch["returns"] = torch.from_numpy(returns).flatten().to(device)
        metrics = update(functions, optimizer, agent, batch, envs.share, coefs, args)

        check_equal(agent)
        envs.gather()
        whole = gather_rollout(envs.share, episodes, values, returns)
        if RANK > 0:
            continue
        episodes, values, returns = whole
        run.check_finite(metrics)
        for step, episode in episodes:
            run.log_episode(run.global_step + (step + 1) * args.num_envs, episode)
        run.global_step += batch_size
        scalars = {f"losses/{name}": value for name, value in zip(METRICS, metrics, strict=True)}
        scalars["losses/explained_variance"] = explained_variance(values, returns)
        scalars["charts/learning_rate"] = coefs["lr"]
        run.log(scalars)
        if args.eval_interval > 0 and (iteration + 1) % args.eval_interval == 0:
            run.log_evaluation(evaluate(agent, envs, args, video_dir, run.global_step))

    envs.close()
    if RANK == 0:
        run.finish(evaluate(agent, envs, args, video_dir))
    dist.destroy_process_group()
