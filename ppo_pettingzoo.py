# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch==2.13.0",
#     "gymnasium==1.4.0",
#     "pettingzoo[butterfly]==1.27.0",
#     "mpe2==1.1.1",
#     "numpy==2.4.6; python_version >= '3.11'",
#     "numpy==2.2.6; python_version < '3.11'",
#     "tyro==1.0.17",
#     "tqdm==4.70.1",
#     "tensorboard==2.21.0",
#     "wandb==0.31.0",
#     "moviepy==2.2.1",
# ]
# ///
"""PPO for games of many agents, which share one policy.

Independent PPO: each agent is to the policy what an environment is in ppo.py, and a part of what
the others play in. The games are those of PettingZoo's parallel API, with Discrete actions, or your
own. Comments number details as docs/details.md of the repository does: G1 to G11 are general, M6 is
for MuJoCo, X1 and X3 are optional. What many agents take, line by line, is the diff against ppo.py:

- ParallelVecEnv has a row for each agent of each game, so rollout, compute_advantages, predict and
  update stay as they are. An episode is an agent's: it ends with the agent, maybe before the game.
  --eval-episodes counts games.
- A row begins with the number of the agent, one-hot, so that one policy can play different parts.
- The rows of an agent that has ended, until the game does, are zeros, and no part of any loss.
- --centralised-critic appends what all agents see to each row, for the critic alone: MAPPO, Yu et
  al. 2022, https://arxiv.org/abs/2103.01955
- Where the sides of a game are adversaries, it is self-play: the policy plays them all.

Diff it against ppo.py.

    python ppo_pettingzoo.py --env-id mpe2.simple_spread_v3 --total-timesteps 1000000
"""

import copy
import importlib
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
    num_threads: int = 1  # threads of PyTorch; a second one gains nothing on layers so small
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "plainrl"  # project at Weights & Biases
    wandb_entity: str | None = None  # user or team at Weights & Biases
    capture_video: bool = False  # film the first episode of each evaluation, into videos/
    checkpoint_interval: int = 10  # iterations (a rollout and its update) between checkpoints
    eval_interval: int = 0  # iterations between evaluations during the training (0: none)
    eval_episodes: int = 10  # games of an evaluation, with deterministic actions and own seeds
    resume: str | None = None  # continue the run in this folder, exactly; its flags come with it
    evaluate: str | None = None  # play the policy of this run, or of a checkpoint such as best.pt
    init_from: str | None = None  # begin with the networks and statistics of this run

    env_id: str = "mpe2.simple_spread_v3"  # module whose parallel_env() makes a game
    total_timesteps: int = 1000000  # steps of the run, all environments together
    learning_rate: float = 7e-4  # learning rate of Adam
    num_envs: int = 32  # number of environments
    num_steps: int = 50  # steps in each environment per rollout
    anneal_lr: bool = True  # lower the learning rate linearly over the run
    gamma: float = 0.99  # discount factor
    hidden_sizes: tuple[int, ...] = (64, 64)  # units of the hidden layers, actor's and critic's
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimation
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    norm_adv: bool = True  # normalise the advantages in each minibatch
    clip_coef: float = 0.2  # clip range of the probability ratio and of the value loss
    anneal_clip: bool = False  # lower the clip range linearly over the run
    clip_vloss: bool = False  # clip the value loss as openai/baselines does
    ent_coef: float = 0.01  # coefficient of the entropy
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient, actor and critic together
    target_kl: float | None = None  # no more epochs after one whose approximate KL exceeds this
    bootstrap_truncated: bool = True  # bootstrap where a time limit has cut an episode
    centralised_critic: bool = False  # the critic sees what all agents of a game see (MAPPO)


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
    check(min(args.hidden_sizes, default=0) > 0, "--hidden-sizes must be numbers above 0")
    check(0 <= args.gamma <= 1, "--gamma must be from 0 to 1")
    check(0 <= args.gae_lambda <= 1, "--gae-lambda must be from 0 to 1")
    check(args.target_kl is None or args.target_kl > 0, "--target-kl must be above 0")
    batch_size = args.num_envs * args.num_steps
    minibatch_size, remainder = divmod(batch_size, args.num_minibatches)
    check(remainder == 0, "--num-envs x --num-steps must be a multiple of --num-minibatches")
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
    """Ends the program if the first reset() or step() of a game returns what it mustn't."""
    results = {"reset()": env.reset(seed=0)}
    known = set(env.agents) <= set(env.possible_agents)
    check(env.agents and known, f"after reset() {env_id} must have agents, of its possible_agents")
    results["step()"] = env.step({agent: env.action_space(agent).start for agent in env.agents})
    for name, result in results.items():
        length = 2 if name == "reset()" else 5
        fits = isinstance(result, tuple) and len(result) == length
        fits = fits and all(isinstance(part, dict) for part in result)
        check(fits, f"{name} of {env_id} must return {length} dicts")
        for agent, obs in result[0].items():
            shape = env.observation_space(agent).shape
            fits = shape is None or np.shape(obs) == shape  # a Dict and a Tuple have none
            shape = np.shape(obs)
            check(fits, f"{name} of {env_id} returns another shape than its space's: {shape}")
    for reward in results["step()"][1].values():
        fits = np.ndim(reward) == 0 and np.asarray(reward).dtype.kind in "biuf"
        check(fits, f"step() of {env_id} must return numbers as its rewards, not {reward!r}")


def make_env(env_id, **options):
    """Makes a game: parallel_env(**options) of the module env_id."""
    advice = "give a module with a parallel_env(), as mpe2.simple_spread_v3 is"
    try:
        module = importlib.import_module(env_id)
    except (ImportError, TypeError, ValueError) as error:  # the last two: "." and ""
        check(False, f"can't make {env_id}: {error}; {advice}")
    make = getattr(module, "parallel_env", None)
    check(callable(make), f"{env_id} has no parallel_env(): {advice}")
    env = make(**options)
    agents = getattr(env, "possible_agents", [])
    check(agents, f"{env_id} must name its possible_agents")
    for space_of in (env.observation_space, env.action_space):
        fits = all(space_of(agent) == space_of(agents[0]) for agent in agents)
        kind = space_of.__name__
        check(fits, f"{env_id} has agents that differ in {kind}, but share a policy")
    action_space = env.action_space(agents[0])
    fits = isinstance(action_space, gym.spaces.Discrete)
    kind = f"{type(action_space)} {action_space}"
    check(fits, f"{env_id} has the action space {kind}, but this script needs a Discrete one")
    check_env(env, env_id)
    return env


class Episode(NamedTuple):
    """An agent's part of a game, which has ended."""

    env: int  # index of the agent's row
    episode_return: float  # sum of the agent's rewards as they came from the game
    length: int
    ended_by: str  # "termination" or "truncation"
    final_obs: np.ndarray  # its last row


class ParallelVecEnv:
    """Games of many agents, stepped one after another; obs: the current rows, (num_rows, width).

    Agent k of game i has row i * num_agents + k: its number k, one-hot, and its observation; zeros
    where it has left the game, or hasn't come yet. With centralised, all rows of the game follow in
    each of them.
    A step that ends a game also begins the next one. Given a seed and actions, a game always does
    the same. So each is saved as its seed and its actions, which are played again to bring it back.
    max_steps: where a game is cut at the latest.
    """

    def __init__(self, envs, seed, dtype, centralised, max_steps=math.inf):
        self.envs = envs
        self.centralised = centralised
        self.max_steps = max_steps
        self.agents = list(envs[0].possible_agents)
        self.action_space = envs[0].action_space(self.agents[0])
        self.obs_space = float_space(envs[0].observation_space(self.agents[0]), str(envs[0]))
        num_agents = len(self.agents)
        self.obs_dim = num_agents + gym.spaces.flatdim(self.obs_space)  # without the others' rows
        self.rows = np.arange(len(envs) * num_agents).reshape(-1, num_agents)  # of each game
        width = self.obs_dim * (1 + num_agents) if centralised else self.obs_dim
        self.obs = np.zeros((self.rows.size, width), dtype)
        self.games_over = 0
        self.video = None
        self.seeds = np.random.SeedSequence(seed).generate_state(len(envs))
        self.seed_counts = np.zeros(len(envs), np.int64)
        self.actions = [[] for _ in envs]  # of each game
        self.scores = [{} for _ in envs]  # of each game: {agent: return and length so far}
        for i in range(len(envs)):
            self.reset_with_new_seed(i)

    def reset_with_new_seed(self, i):
        """Starts game i with its next seed."""
        sequence = np.random.SeedSequence((int(self.seeds[i]), int(self.seed_counts[i])))
        self.seed_counts[i] += 1
        self.actions[i] = []
        self.scores[i] = {}
        seed = int(sequence.generate_state(1)[0]) % 2**31  # some libraries take no larger one
        observations, _ = self.envs[i].reset(seed=seed)
        self.obs[self.rows[i]] = self.observe(observations, self.envs[i].agents)

    def observe(self, observations, agents):
        """Returns the rows of a game in which these agents are."""
        rows = np.zeros((len(self.agents), self.obs_dim), self.obs.dtype)
        for agent in agents:
            k = self.agents.index(agent)
            rows[k, k] = 1.0
            rows[k, len(rows) :] = gym.spaces.flatten(self.obs_space, observations[agent])
        if self.centralised:
            rows = np.hstack((rows, np.tile(rows.ravel(), (len(rows), 1))))
        return rows

    def step_env(self, i, actions):
        """Steps game i by actions (num_agents,).

        Returns rewards, terminations and truncations (3, num_agents), and the episodes that ended.
        """
        env = self.envs[i]
        agents = {agent: self.agents.index(agent) for agent in env.agents}
        actions = actions.astype(self.action_space.dtype)
        to_take = {agent: self.action_space.start + actions[k] for agent, k in agents.items()}
        observations, rewards, terminations, truncations, _ = env.step(to_take)
        self.actions[i].append(actions)
        if self.video:
            self.video.write_frame(env.render())
        agents_left = list(env.agents)
        if len(self.actions[i]) == self.max_steps:
            agents_left = []
            truncations = dict.fromkeys(agents, True)

        last_rows = self.observe(observations, agents)
        results = np.zeros((3, len(self.agents)))
        episodes = []
        for agent, k in agents.items():
            results[:, k] = rewards[agent], terminations[agent], truncations[agent]
            episode_return, length = self.scores[i].pop(agent, (0.0, 0))
            score = episode_return + float(rewards[agent]), length + 1
            ended = terminations[agent] or truncations[agent]
            if ended == (agent in agents_left):
                sys.exit(f"error: {agent} must leave env.agents when it has ended, and only then")
            if ended:
                ended_by = "termination" if terminations[agent] else "truncation"
                episodes.append(Episode(int(self.rows[i, k]), *score, ended_by, last_rows[k]))
            else:
                self.scores[i][agent] = score
        self.obs[self.rows[i]] = self.observe(observations, agents_left)
        if not agents_left:
            self.games_over += 1
            if self.video:
                self.video.close()
                self.video = None
            self.reset_with_new_seed(i)
        return results, episodes

    def step(self, actions):
        """Steps each game by its rows of actions (num_rows,).

        Returns the rewards, float64, the terminations and truncations, bool, all (num_rows,), and
        the episodes that ended.
        """
        results = np.zeros((3, len(self.obs)))
        episodes = []
        for i, rows in enumerate(self.rows):
            results[:, rows], ended = self.step_env(i, actions[rows])
            episodes += ended
        rewards, terminations, truncations = results
        return rewards, terminations > 0, truncations > 0, episodes

    def for_evaluation(self, env_id, seed, video_dir):
        """Returns the same with one new game, for an evaluation."""
        options = {"render_mode": "rgb_array"} if video_dir else {}
        env = make_env(env_id, **options)
        max_steps = 100000  # some might never end
        envs = ParallelVecEnv([env], seed, self.obs.dtype, self.centralised, max_steps)
        if video_dir:
            envs.film(video_dir / "rl-video-episode-0.mp4")
        return envs

    def film(self, path):
        """Begins a film of the first game."""
        from moviepy.video.io.ffmpeg_writer import FFMPEG_VideoWriter

        path.parent.mkdir(parents=True, exist_ok=True)
        frame = self.envs[0].render()
        fps = self.envs[0].metadata.get("render_fps", 30)
        self.video = FFMPEG_VideoWriter(str(path), frame.shape[1::-1], fps)
        self.video.write_frame(frame)

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
        for i, actions in enumerate(state["actions"]):
            self.reset_with_new_seed(i)
            for game_actions in actions.numpy():
                self.step_env(i, game_actions)
            if not np.array_equal(self.obs[self.rows[i]], state["obs"][self.rows[i]].numpy()):
                print(f"environment {i} can't be brought back exactly: it starts a new episode")
                self.reset_with_new_seed(i)


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


def numpy_mlp(network):
    """A network, with a copy of its weights, as a function of arrays (n, inputs) -> (n, outputs).

    During a rollout the weights are frozen, and on a few observations numpy takes 10 us where
    PyTorch takes 45. Networks of other layers than these play in PyTorch.
    """
    if not all(isinstance(layer, nn.Linear | nn.Tanh | nn.ReLU) for layer in network):
        network = copy.deepcopy(network).cpu().requires_grad_(False)
        return lambda x: network(torch.from_numpy(x)).numpy()

    def numpy_layer(layer):
        if isinstance(layer, nn.Tanh):
            return np.tanh
        if isinstance(layer, nn.ReLU):
            return lambda x: np.maximum(x, 0.0)
        weight = layer.weight.detach().cpu().numpy().T.copy()
        bias = layer.bias.detach().cpu().numpy()[None].copy()
        return lambda x: x.dot(weight) + bias  # faster than x @ weight + bias

    layers = [numpy_layer(layer) for layer in network]

    def forward(x):
        for layer in layers:
            x = layer(x)
        return x

    return forward


class Agent(nn.Module):
    """Policy and value in separate networks, the same for all agents.

    obs (n, width): rows, of which the policy sees the first obs_dim numbers, the value all.
    """

    def __init__(self, obs_dim, width, num_actions, hidden_sizes):
        super().__init__()
        self.obs_dim = obs_dim
        self.critic = mlp(width, hidden_sizes, 1, std=1.0)
        self.actor = mlp(obs_dim, hidden_sizes, num_actions, std=0.01)

    def forward(self, obs, actions):
        """obs (n, width), actions int64 (n,) -> logprobs, entropy, values, each (n,)."""
        all_logprobs = self.actor(obs[:, : self.obs_dim]).log_softmax(1)
        logprobs = all_logprobs.gather(1, actions[:, None]).squeeze(1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(1)
        return logprobs, entropy, self.value(obs)

    def value(self, obs):
        """obs (n, width) -> values (n,)."""
        return self.critic(obs).squeeze(1)

    def noise(self, num_steps, num_envs):
        """Gumbel noise: argmax(logits + noise) is a sample of softmax(logits)."""
        shape = num_steps, num_envs, self.actor[-1].out_features
        return -torch.empty(shape).exponential_().log().numpy()

    def policy(self):
        """The policy, with a copy of its weights, as a function of arrays.

        obs (n, width), a row of noise (n, num_actions) -> actions; noise 0.0: the likeliest.
        """
        logits = numpy_mlp(self.actor)
        return lambda obs, noise: (logits(obs[:, : self.obs_dim]) + noise).argmax(1)


# --------------------------------------------------------------------------------------------------
# PPO
# --------------------------------------------------------------------------------------------------

PER_CALL = 2  # minibatches in a compiled call: faster than one; four compile for too long
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

    batch: obs and actions as the agent takes them, and logprobs, advantages, returns, values (n,),
    and alive, bool (n,): all means are over the rows where it is True.
    """
    clip_coef = coefs["clip_coef"]
    alive = batch["alive"]
    count = alive.sum()

    def mean(x, count=count):
        return torch.where(alive, x, 0.0).sum() / count.clamp(min=1)

    logprobs, entropy, values = agent(batch["obs"], batch["actions"])
    logratio = logprobs - batch["logprobs"]
    ratio = logratio.exp()

    advantages = batch["advantages"]
    if args.norm_adv:  # G3
        advantages = advantages - mean(advantages)
        advantages = advantages / (mean(advantages**2, count - 1).sqrt() + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    policy_loss = mean(torch.max(-advantages * ratio, -advantages * clipped_ratio))  # G1

    value_losses = (values - batch["returns"]) ** 2
    if args.clip_vloss:  # G4
        change = torch.clamp(values - batch["values"], -clip_coef, clip_coef)
        clipped_values = batch["values"] + change
        value_losses = torch.max(value_losses, (clipped_values - batch["returns"]) ** 2)
    value_loss = 0.5 * mean(value_losses)

    entropy = mean(entropy)
    loss = policy_loss - coefs["ent_coef"] * entropy + coefs["vf_coef"] * value_loss  # G5

    old_approx_kl = mean(-logratio)
    approx_kl = mean((ratio - 1) - logratio)  # http://joschu.net/blog/kl-approx.html
    clipfrac = mean(((ratio - 1).abs() > clip_coef).float())
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


def update_minibatches(optimizer, agent, batch, indices, coefs, args):
    """A step of Adam for each row of indices (k, minibatch_size); returns sums of the metrics."""
    total = 0.0
    for row in indices.unbind():
        minibatch = {name: x[row] for name, x in batch.items()}
        loss, metrics = ppo_loss(agent, minibatch, coefs, args)
        grads = torch.autograd.grad(loss, optimizer.params)
        optimizer.step(clip_grads(grads, coefs["max_grad_norm"]), coefs["lr"])
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
    """Plays --eval-episodes games with deterministic actions; returns the agents' episodes.

    In an environment of its own, with other seeds than the training's envs, and during the
    training (at a step) with others each time, so that best.pt isn't the best at a few starts.
    """
    seed = (args.seed, 1) if step is None else (args.seed, 2, step)
    if video_dir:
        video_dir = video_dir / ("end" if step is None else f"step-{step}")
    envs = envs.for_evaluation(args.env_id, seed, video_dir)
    policy = agent.policy()
    episodes = []
    while envs.games_over < args.eval_episodes:
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
    envs = [make_env(args.env_id) for _ in range(args.num_envs)]
    envs = ParallelVecEnv(envs, args.seed, np.float32, args.centralised_critic)
    agent = Agent(envs.obs_dim, envs.obs.shape[1], envs.action_space.n, args.hidden_sizes)
    agent = agent.to(device)
    run = Run(args, saved, num_iterations * batch_size)
    video_dir = run.folder / "videos" if args.capture_video else None
    if args.evaluate or args.init_from:
        run.load(agent=agent)
    if args.evaluate:
        run.finish(evaluate(agent, envs, args, video_dir))
        sys.exit()
    optimizer = Adam(agent.parameters(), eps=1e-5)  # G11
    run.restore(agent=agent, optimizer=optimizer, envs=envs)
    step_minibatches = compile_or_not(update_minibatches, args, device)

    for iteration in run.iterations():  # counted from 0
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
            agent, envs, args.num_steps
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
        alive = obs[:, :, : len(envs.agents)].any(2)  # the others' rows are zeros
        batch["alive"] = torch.from_numpy(alive).flatten().to(device)
        metrics = update(step_minibatches, optimizer, agent, batch, coefs, args)

        run.check_finite(metrics)
        for step, episode in episodes:
            run.log_episode(run.global_step + (step + 1) * args.num_envs, episode)
        run.global_step += batch_size
        scalars = {f"losses/{name}": value for name, value in zip(METRICS, metrics, strict=True)}
        scalars["losses/explained_variance"] = explained_variance(values[alive], returns[alive])
        scalars["charts/learning_rate"] = coefs["lr"]
        run.log(scalars)
        if args.eval_interval > 0 and (iteration + 1) % args.eval_interval == 0:
            run.log_evaluation(evaluate(agent, envs, args, video_dir, run.global_step))

    envs.close()
    run.finish(evaluate(agent, envs, args, video_dir))
