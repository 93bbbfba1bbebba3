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
"""PQN for Atari games, from pixels, played side by side by ALE's own threads.

Parallelised Q-Network, Gallici et al. 2024, https://arxiv.org/abs/2407.04811: Q-learning without a
replay buffer and without a target network. LayerNorm makes it stable, and its targets are Q(lambda)
returns of rollouts in parallel environments.
RAdam with 2.5e-4, lambda 0.65 and a gradient of a norm up to 10 are the authors' constants,
https://github.com/mttga/purejaxql. Rollouts of 8 x 128 steps, and a probability of random actions
that falls from 1 to 0.01 in the first tenth of the run are those of CleanRL's pqn_atari_envpool.py,
and so are the flags. Unlike there, a time limit is not a termination.
The games are those of ppo_atari_vector.py. Comments number details as docs/details.md of the
repository does: G6 to G10 are general, A1 to A8 for Atari.
Diff it against ppo_atari_vector.py or pqn.py.

    python pqn_atari.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 10000000
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
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
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
    compile: bool = True  # compile policy and update, which takes a minute the first time
    num_threads: int = torch.get_num_threads()  # threads of PyTorch and of ALE: all cores
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
    learning_rate: float = 2.5e-4  # learning rate of RAdam
    num_envs: int = 8  # number of environments
    num_steps: int = 128  # steps in each environment per rollout
    anneal_lr: bool = True  # lower the learning rate linearly over the run
    gamma: float = 0.99  # discount factor
    q_lambda: float = 0.65  # lambda of the Q(lambda) returns
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # epochs per rollout
    max_grad_norm: float = 10.0  # largest norm of the gradient
    start_e: float = 1.0  # epsilon at the start: the probability of a random action
    end_e: float = 0.01  # epsilon at the end of its fall
    exploration_fraction: float = 0.1  # epsilon falls linearly in this part of the run (0: at once)
    amp: bool = False  # compute the network in bfloat16: faster, less exact


SCHEDULES = ("anneal_lr", "exploration_fraction")  # flags whose effect depends on --total-timesteps
# Flags that a resume may change
FREE = ("total_timesteps", "capture_video", "checkpoint_interval", "eval_interval", "eval_episodes")


def check_args(args):
    """Ends the program if the flags can't be used, alone or together."""
    check(0 <= args.seed < 2**32, "--seed must be from 0 to 2**32 - 1")
    positive = ("num_threads", "learning_rate", "total_timesteps", "checkpoint_interval")
    positive += ("eval_episodes", "num_envs", "num_steps", "num_minibatches", "update_epochs")
    positive += ("max_grad_norm",)
    for name in positive:
        check(getattr(args, name) > 0, f"--{name.replace('_', '-')} must be above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(0 <= args.q_lambda <= 1, "--q-lambda must be from 0 to 1")
    check(0 <= args.end_e <= args.start_e <= 1, "it must be 0 <= --end-e <= --start-e <= 1")
    check(0 <= args.exploration_fraction <= 1, "--exploration-fraction must be from 0 to 1")
    batch_size = args.num_envs * args.num_steps
    divides = batch_size % args.num_minibatches == 0
    check(divides, "--num-envs x --num-steps must be a multiple of --num-minibatches")
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


# --------------------------------------------------------------------------------------------------
# Networks
# --------------------------------------------------------------------------------------------------


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    """Orthogonal weights of gain std, constant bias (G9; baselines a2c/utils.py)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The Q-network: that of https://www.nature.com/articles/nature14236, with LayerNorm."""

    def __init__(self, num_actions, amp=False):
        super().__init__()
        self.amp = amp
        self.epsilon = 0.0  # the probability of a random action in a rollout
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, stride=4)),
            nn.LayerNorm((32, 20, 20)),
            nn.ReLU(),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)),
            nn.LayerNorm((64, 9, 9)),
            nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)),
            nn.LayerNorm((64, 7, 7)),
            nn.ReLU(),
            nn.Flatten(),
            layer_init(nn.Linear(3136, 512)),
            nn.LayerNorm(512),
            nn.ReLU(),
        )
        self.head = layer_init(nn.Linear(512, num_actions))

    def forward(self, obs):
        """obs uint8 (n, 84, 84, 4) -> the actions' values, float32 (n, num_actions)."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.amp):
            pixels = obs.permute(0, 3, 1, 2) / 255.0  # A8; in memory the frames still come last
            hidden = self.network(pixels)
        return self.head(hidden.float())

    def value(self, obs):
        """obs uint8 (n, 84, 84, 4) -> values of the best actions (n,)."""
        return self(obs).amax(1)

    def noise(self, num_steps, num_envs):
        """Noise that makes an action random, with the probability epsilon, else 0."""
        explores = torch.rand(num_steps, num_envs, 1) < self.epsilon
        noise = torch.rand(num_steps, num_envs, self.head.out_features)
        # Beside the largest of such numbers the values don't count, so argmax draws an action
        return (explores * 1e30 * noise).numpy()

    def policy(self):
        """The policy as a function of arrays.

        obs (n, 84, 84, 4), noise (n, num_actions) -> actions; with noise 0.0 the best ones.
        """
        device = self.head.bias.device

        @torch.no_grad()
        def policy(obs, noise):
            values = self(torch.from_numpy(obs).to(device))
            return (values.cpu().numpy() + noise).argmax(1)

        return policy


class Player:
    """The agent as it plays in a rollout: its copy, which is compiled, and with --amp bfloat16."""

    def __init__(self, agent, args, device):
        self.agent = agent
        self.noise = agent.noise
        dtype = torch.bfloat16 if args.amp else torch.float32
        self.copy = copy.deepcopy(agent).to(dtype=dtype, memory_format=torch.channels_last)
        self.copy.head.float()  # the values of actions differ by little
        self.copy.forward = compile_or_not(self.copy.forward, args, device)

    def policy(self):
        """Agent.policy(), with the agent's weights as they are now."""
        self.copy.load_state_dict(self.agent.state_dict())
        return self.copy.policy()


# --------------------------------------------------------------------------------------------------
# PQN
# --------------------------------------------------------------------------------------------------

PER_CALL = 1  # minibatches in a compiled call: beside convolutions the call costs nothing
METRICS = ("td_loss", "q_values")  # CleanRL's names


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


def predict(agent, obs, actions, last_obs, episodes, device):
    """Values of a rollout in one pass, since its weights were frozen.

    Arrays: obs and actions (num_steps, num_envs, ...); last_obs (num_envs, obs_dim): the current
    observations; episodes: those that ended, as of rollout. Returns the batch, tensors (n, ...),
    and next_values, an array (num_steps, num_envs): a step's next value is that of the following
    step, but after an episode's end that of its final observation.
    """
    batch = {
        "obs": torch.from_numpy(obs).flatten(0, 1).to(device),
        "actions": torch.from_numpy(actions).flatten(0, 1).to(device),
    }
    bootstrap_obs = np.stack([*last_obs, *(episode.final_obs for _, episode in episodes)])
    with torch.no_grad():
        # In pieces, which fit into the processor's caches
        values = torch.cat([agent.value(piece) for piece in batch["obs"].chunk(8)])
        bootstrap_values = agent.value(torch.from_numpy(bootstrap_obs).to(device)).cpu().numpy()
    values = values.cpu().numpy().reshape(obs.shape[:2])
    last_values, final_values = np.split(bootstrap_values, [len(last_obs)])
    next_values = np.concatenate((values[1:], last_values[None]))
    for (step, episode), final_value in zip(episodes, final_values):
        next_values[step, episode.env] = final_value
    return batch, next_values


def compute_returns(rewards, next_values, terminations, dones, gamma, q_lambda):
    """Peng's Q(lambda) returns: https://arxiv.org/abs/2103.00107.

    They go on where the next action wasn't the best one, but not beyond the episode, at dones.
    All arrays (num_steps, num_envs), float32 or bool. next_values: of the best action in the
    observation that truly followed each step, before any reset; after a termination they don't
    count.
    """
    next_values = np.where(terminations, 0.0, next_values)
    returns = np.zeros_like(rewards)
    next_returns = next_values[-1]
    for step in reversed(range(len(rewards))):
        next_returns = np.where(dones[step], next_values[step], next_returns)
        mixture = (1 - q_lambda) * next_values[step] + q_lambda * next_returns
        next_returns = returns[step] = rewards[step] + gamma * mixture
    return returns


def q_loss(agent, batch):
    """The squared error on a minibatch: returns it and its metrics, float32 (2,).

    batch: obs and actions as the agent takes them, and returns (n,).
    """
    values = agent(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)
    loss = ((values - batch["returns"]) ** 2).mean()
    return loss, torch.stack((loss, values.mean())).detach()


def clip_grads(grads, max_norm):
    """Scales gradients down to the norm max_norm if theirs, all together, is larger (G8)."""
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return [grad * scale for grad in grads]


class RAdam(nn.Module):
    """Rectified Adam with tensors for all that changes, so that a step compiles with the loss.

    https://arxiv.org/abs/1908.03265, as torch.optim.RAdam computes it. An nn.Module for its
    state_dict().
    """

    def __init__(self, params, eps=1e-8):
        super().__init__()
        self.params = [param for param in params if param.requires_grad]
        self.eps = eps
        # float64: with float32 the first values of rho would be wrong by up to 0.04
        steps = torch.zeros((), dtype=torch.float64, device=self.params[0].device)
        self.register_buffer("steps", steps)
        self.exp_avg = nn.ParameterList(torch.zeros_like(x) for x in self.params)
        self.exp_avg_sq = nn.ParameterList(torch.zeros_like(x) for x in self.params)

    @torch.no_grad()
    def step(self, grads, lr):
        self.steps += 1
        decay = 0.999**self.steps
        step_size = lr / (1 - 0.9**self.steps)
        # rho: about how many steps v is a mean of; while it is 5 or less, v isn't used
        rho_inf = 2 / (1 - 0.999) - 1
        rho = rho_inf - 2 * self.steps * decay / (1 - decay)
        ratio = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        rectification = torch.sqrt(ratio * (1 - decay))
        for param, grad, m, v in zip(self.params, grads, self.exp_avg, self.exp_avg_sq):
            m.lerp_(grad, 0.1)
            v.lerp_(grad * grad, 0.001)
            scale = torch.where(rho > 5, rectification / (v.sqrt() + self.eps), 1.0)
            param -= step_size * scale * m


def update_minibatches(optimizer, agent, batch, indices, coefs):
    """A step of RAdam for each row of indices (k, minibatch_size); returns sums of the metrics."""
    total = 0.0
    for row in indices.unbind():
        minibatch = {name: x[row] for name, x in batch.items()}
        loss, metrics = q_loss(agent, minibatch)
        grads = torch.autograd.grad(loss, optimizer.params)
        optimizer.step(clip_grads(grads, coefs["max_grad_norm"]), coefs["lr"])
        total = total + metrics
    return total


def update(step_minibatches, optimizer, agent, batch, coefs, args):
    """Epochs over a batch; returns the metrics, averaged over all minibatches.

    step_minibatches: update_minibatches, compiled or not.
    """
    epochs = []
    for _ in range(args.update_epochs):
        indices = torch.randperm(len(batch["obs"])).view(args.num_minibatches, -1)  # G7
        indices = indices.to(batch["obs"].device)
        total = 0.0
        for rows in indices.split(math.gcd(args.num_minibatches, PER_CALL)):
            total = total + step_minibatches(optimizer, agent, batch, rows, coefs)
        epochs.append(total / args.num_minibatches)
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
    envs = AtariVecEnv(args.env_id, args.num_envs, args.seed, args.num_threads)
    agent = Agent(envs.action_space.n, args.amp).to(device)
    run = Run(args, saved, num_iterations * batch_size)
    video_dir = run.folder / "videos" if args.capture_video else None
    if args.evaluate or args.init_from:
        run.load(agent=agent)
    if args.evaluate:
        run.finish(evaluate(agent, envs, args, video_dir))
        sys.exit()
    optimizer = RAdam(agent.parameters())
    run.restore(agent=agent, optimizer=optimizer, envs=envs)
    step_minibatches = compile_or_not(update_minibatches, args, device)
    player = Player(agent, args, device)

    for iteration in run.iterations():  # counted from 0
        remaining = 1.0 - iteration / num_iterations
        coefs = {
            "lr": args.learning_rate * (remaining if args.anneal_lr else 1.0),  # G6
            "max_grad_norm": args.max_grad_norm,
        }
        # As tensors: for each new float the compiled update would be compiled again
        coefs = {name: torch.tensor(value, device=device) for name, value in coefs.items()}

        agent.epsilon = epsilon(run.global_step, args)
        obs, actions, rewards, terminations, truncations, episodes = rollout(
            player, envs, args.num_steps
        )
        batch, next_values = predict(agent, obs, actions, envs.obs, episodes, device)
        dones = terminations | truncations
        returns = compute_returns(
            rewards, next_values, terminations, dones, args.gamma, args.q_lambda
        )
        batch["returns"] = torch.from_numpy(returns).flatten().to(device)
        metrics = update(step_minibatches, optimizer, agent, batch, coefs, args)

        run.check_finite(metrics)
        for step, episode in episodes:
            run.log_episode(run.global_step + (step + 1) * args.num_envs, episode)
        run.global_step += batch_size
        scalars = {f"losses/{name}": value for name, value in zip(METRICS, metrics, strict=True)}
        scalars["charts/learning_rate"] = coefs["lr"]
        scalars["charts/epsilon"] = agent.epsilon
        run.log(scalars)
        if args.eval_interval > 0 and (iteration + 1) % args.eval_interval == 0:
            run.log_evaluation(evaluate(agent, envs, args, video_dir, run.global_step))

    envs.close()
    run.finish(evaluate(agent, envs, args, video_dir))
