"""DDPG for continuous (Box) actions: MuJoCo and any other Gymnasium environment with vector observations.

Deep Deterministic Policy Gradient, Lillicrap et al. 2015, https://arxiv.org/abs/1509.02971, as re-tuned in the paper of
TD3, Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477 ("OurDDPG"; the README has the flags for others). A time
limit is no termination: the value of the last observation counts. To diff against ppo_continuous_action.py.

    python ddpg_continuous_action.py --env-id HalfCheetah-v5 --total-timesteps 1000000
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.optim.adam import adam
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

METRICS = ("qf1_values", "qf1_loss", "actor_loss")


@dataclass
class Args:
    """All flags and their --help texts: how to run, record and go on; what is learned, and how."""
    exp_name: str = Path(__file__).stem  # name of the experiment, a part of the run's name
    run_name: str | None = None  # folder of the run under runs/; without it ENV__EXPERIMENT__SEED__UNIXTIME
    seed: int = 1  # seed of the networks, the action noise, the minibatches and the environments
    torch_deterministic: bool = True  # use deterministic cuDNN algorithms
    cuda: bool = True  # use a GPU where there is one
    compile: bool = True  # compile the update (half a minute or more the first time, less from the cache)
    num_threads: int = 0  # threads of PyTorch (0: chosen by the script)
    track: bool = False  # log to Weights & Biases too (WANDB_MODE=offline needs no account)
    wandb_project_name: str = "plainrl"  # project at Weights & Biases
    wandb_entity: str | None = None  # user or team at Weights & Biases
    capture_video: bool = False  # record the evaluation, and training episodes of the first environment, under videos/
    video_interval: int = 100  # record every N-th training episode
    save_model: bool = False  # write the final weights to EXPERIMENT.cleanrl_model too, as CleanRL does
    checkpoint_interval: int = 10000  # steps between checkpoints
    eval_episodes: int = 10  # episodes of the evaluation: deterministic actions, own seeds, frozen normalisation
    resume: str | None = None  # folder of a run to go on with, exactly as if it had never stopped; it knows its flags
    evaluate: str | None = None  # folder of a run whose policy is played, without training; it knows its flags
    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1000000  # steps of the run, all environments together
    learning_rate: float = 3e-4  # learning rate of Adam
    actor_learning_rate: float | None = None  # learning rate of the actor, where it isn't --learning-rate
    critic_learning_rate: float | None = None  # learning rate of the critic, where it isn't --learning-rate
    num_envs: int = 1  # number of environments
    gamma: float = 0.99  # discount factor
    hidden_sizes: tuple[int, ...] = (256, 256)  # units of the hidden layers, of the actor's and of the critic's
    buffer_size: int = 1000000  # transitions in the replay buffer
    batch_size: int = 256  # transitions in a minibatch
    tau: float = 0.005  # part of the way that the target networks go at an update
    random_steps: int | None = None  # steps with uniformly random actions at the start; without it --learning-starts
    learning_starts: int = 25000  # steps before the first update
    updates_per_step: float = 1.0  # updates for each step, all environments counted; may be below 1
    policy_frequency: int = 1  # update the actor and both targets at every N-th update of the critic
    noise_type: Literal["gaussian", "ou"] = "gaussian"  # exploration noise: independent, or Ornstein-Uhlenbeck's
    exploration_noise: float = 0.1  # standard deviation (ou: of a step's), in halves of the action range
    final_exploration_noise: float | None = None  # the same at the last step, linear between; without it no change
    max_grad_norm: float | None = None  # largest norm of the gradient, of the actor's and of the critic's
    weight_decay: float = 0.0  # weight of the L2 penalty on the critic's parameters
    norm_obs: bool = False  # normalise the observations by their running mean and standard deviation
    norm_reward: bool = False  # divide the rewards by the running standard deviation of the discounted return
    eval_interval: int = 10000  # steps between evaluations


def fail(message, code=2):
    """Ends the program with one sentence: code 2 for bad input, 1 for a run that failed."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def parse_args():
    """Returns the flags and, for --resume and --evaluate, the run's checkpoint, whose flags they then are."""
    args, checkpoint = tyro.cli(Args, description=__doc__.split("\n")[0]), None
    if run := args.resume or args.evaluate:
        own = (checkpoint := load_checkpoint(Path(run)))["args"]
        args = tyro.cli(Args, default=replace(own, resume=args.resume, evaluate=args.evaluate))
        free = ("resume", "evaluate", "eval_episodes", "capture_video", "video_interval")
        if changed := [f"{k} = {v}" for k, v in asdict(own).items() if v != getattr(args, k) and k not in free]:
            fail(f"{run} was made with {', '.join(changed)}: give no other value, or start a new run")
    may_be_0 = ("seed", "num_threads", "gamma", "random_steps", "learning_starts", "exploration_noise",
                "final_exploration_noise", "weight_decay")
    numbers = [(name, x) for name, x in asdict(args).items() if type(x) in (int, float)]
    wrong = [name for name, x in numbers if not (0 < x < math.inf or x == 0 and name in may_be_0)]
    args.num_iterations = args.total_timesteps // max(args.num_envs, 1)
    problems = [
        (wrong, f"{', '.join(wrong)} must be above 0 and finite ({', '.join(may_be_0)} may be 0)"),
        (max(args.gamma, args.tau) > 1 or args.seed >= 2**32, "--gamma and --tau must be up to 1, --seed below 2**32"),
        (not args.hidden_sizes or min(args.hidden_sizes) < 1, "--hidden-sizes must be some numbers above 0"),
        (args.num_iterations * args.num_envs <= args.learning_starts, "--learning-starts is past the last step"),
        (args.resume and args.evaluate or "" in (args.resume, args.evaluate), "give --resume or --evaluate a folder"),
        (args.run_name and ("/" in args.run_name or args.run_name in (".", "..")), "--run-name must be a name"),
    ]
    if sentences := [sentence for wrong, sentence in problems if wrong]:
        fail("; ".join(sentences))
    return args, checkpoint


class RunningMeanStd:
    """Mean and variance of all samples seen, float64, prior count 1e-4 (baselines common/running_mean_std.py)."""

    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), np.array(1e-4)

    def update(self, batch):
        """Adds a batch (n, *shape)."""
        n = len(batch)
        mean = batch[0] if n == 1 else np.add.reduce(batch) / n  # np.mean and np.var take three times as long
        delta, total = mean - self.mean, self.count + n
        squares = delta * delta * (self.count * n / total)
        squares = squares + np.add.reduce((batch - mean) ** 2) if n > 1 else squares
        self.var = (self.var * self.count + squares) / total
        self.mean, self.count = self.mean + delta * (n / total), total

    def normalize(self, x, update=False):
        """x (n, obs_dim), shape (1, obs_dim) -> distance from the mean in deviations, clipped to 10 (M2), float32."""
        if update:
            self.update(x[:, None])
        x = (x - self.mean) / np.sqrt(self.var + 1e-8)
        return np.minimum(np.maximum(x, -10.0), 10.0).astype(np.float32)


def make_env(env_id, render):
    """Makes an environment that this script can learn in, or ends the program; render: it makes frames for videos."""
    try:
        env = gym.make(env_id, render_mode="rgb_array" if render else None, disable_env_checker=True)
        env.reset()
        if render:
            env.render()
    except Exception as error:  # environments and renderers have their own
        hint = "; to film without a display, set MUJOCO_GL=egl or MUJOCO_GL=osmesa" if render else ""
        fail(f"can't make {env_id}: {' '.join(str(error).split())}{hint}")
    if not isinstance(env.action_space, gym.spaces.Box) or env.action_space.dtype.kind != "f":
        fail(f"{env_id} has the action space {env.action_space}, but this script needs a Box of floats")
    space = env.observation_space
    if not isinstance(space, (gym.spaces.Box, gym.spaces.Dict)) or not space.is_np_flattenable:
        fail(f"{env_id} has the observation space {space}, but this script needs a Box, or a Dict of such")
    return env


class Envs:
    """A vector of environments. A step that ends an episode also resets it and gives the reset's observation
    (Gymnasium's SAME_STEP). raw_obs: float64 (num_envs, obs_dim), the present ones. With norm_obs and norm_reward,
    obs_stats and return_stats are those of openai/baselines' VecNormalize (common/vec_env/vec_normalize.py)."""
    COUNTERS = ("raw_obs", "discounted_returns", "episode_returns", "episode_lengths", "episode_counts")

    def __init__(self, env_id, num_envs, seed, gamma=0.99, norm_obs=False, norm_reward=False, video_dir=None,
                 video_interval=1):
        self.envs = [make_env(env_id, render=i == 0 and video_dir is not None) for i in range(num_envs)]
        self.space, action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.low, self.high = action_space.low.reshape(1, -1), action_space.high.reshape(1, -1)
        if not np.isfinite(self.high - self.low).all():
            fail(f"{env_id} has the action space {action_space}, but this script needs finite bounds")
        self.action_shape = action_space.shape
        self.obs_dim, self.action_dim = gym.spaces.flatdim(self.space), self.low.size
        self.norm_obs, self.norm_reward, self.gamma = norm_obs, norm_reward, gamma
        self.obs_stats, self.return_stats = RunningMeanStd((1, self.obs_dim)), RunningMeanStd(())
        self.video_dir, self.video_interval, self.video = video_dir, video_interval, None
        self.raw_obs = np.zeros((num_envs, self.obs_dim))
        self.discounted_returns, self.episode_returns = np.zeros(num_envs), np.zeros(num_envs)
        self.episode_lengths, self.episode_counts = np.zeros(num_envs, int), np.zeros(num_envs, int)
        # An environment is replayed from its random state before its last reset, and the actions since
        self.reset_states, self.actions_since = [None] * num_envs, [None] * num_envs
        for i, env_seed in enumerate(np.random.SeedSequence(seed).generate_state(num_envs)):
            self.envs[i].reset(seed=int(env_seed))
            self.reset_env(i)
        if norm_obs:
            self.obs_stats.update(self.raw_obs[:, None])

    def reset_env(self, i):
        """Starts an episode in environment i; raw_obs[i] is its first observation."""
        self.reset_states[i], self.actions_since[i] = self.envs[i].unwrapped.np_random.bit_generator.state, []
        self.discounted_returns[i], self.episode_returns[i], self.episode_lengths[i] = 0.0, 0.0, 0
        self.raw_obs[i] = gym.spaces.flatten(self.space, self.envs[i].reset()[0])

    def step_env(self, i, action):
        """Steps environment i with a clipped action (action_dim,); raw_obs[i] is the observation."""
        env, episode = self.envs[i], self.episode_counts[i]
        if i == 0 and self.video_dir and not self.actions_since[i] and episode % self.video_interval == 0:
            self.video_dir.mkdir(parents=True, exist_ok=True)
            path, fps = self.video_dir / f"episode-{episode}.mp4", env.metadata.get("render_fps", 30)
            self.video = imageio.get_writer(path, fps=fps, macro_block_size=2)
            self.video.append_data(env.render())
        self.actions_since[i].append(action.copy())
        obs, reward, terminated, truncated, _ = env.step(action.reshape(self.action_shape))
        self.raw_obs[i] = obs.ravel() if isinstance(obs, np.ndarray) else gym.spaces.flatten(self.space, obs)
        if i == 0 and self.video:
            self.video.append_data(env.render())
        return float(reward), terminated, truncated

    def step(self, actions):
        """Steps every environment; actions (num_envs, action_dim) in [-1, 1] are brought to the bounds here. Returns
        the rewards, float64 (num_envs,), and the episodes that ended, [(i, return, length, ended_by, final_obs)]:
        ended_by "termination" or "truncation", final_obs (obs_dim,) the observation that the reset has replaced."""
        actions = (self.low + (actions + 1) * (self.high - self.low) / 2).astype(self.low.dtype)
        actions = np.minimum(np.maximum(actions, self.low), self.high)  # rounding must not lead outside
        rewards, ended = np.zeros(len(actions)), []
        for i, action in enumerate(actions):
            rewards[i], terminated, truncated = self.step_env(i, action)
            self.episode_returns[i] += rewards[i]
            self.episode_lengths[i] += 1
            if terminated or truncated:
                ended.append((i, self.episode_returns[i].item(), self.episode_lengths[i].item(),
                              "termination" if terminated else "truncation", self.raw_obs[i].copy()))
        if self.norm_reward:
            self.discounted_returns = self.discounted_returns * self.gamma + rewards
            self.return_stats.update(self.discounted_returns)
        for i, *_ in ended:
            self.episode_counts[i] += 1
            if i == 0 and self.video:
                self.video = self.video.close()
            self.reset_env(i)
        if self.norm_obs:
            self.obs_stats.update(self.raw_obs[:, None])
        return rewards, ended

    def state(self):
        """All that load_state needs, as tensors and plain Python values."""
        return {name: torch.tensor(getattr(self, name)) for name in self.COUNTERS} | {
            "stats": [[torch.tensor(x) for x in vars(s).values()] for s in (self.obs_stats, self.return_stats)],
            "reset_states": list(self.reset_states),
            "actions_since": [torch.tensor(np.array(actions)) for actions in self.actions_since],
        }

    def load_state(self, state):
        """Goes on from a state(): replays each environment from its last reset, and checks where that leads."""
        for stats, values in zip((self.obs_stats, self.return_stats), state["stats"]):
            stats.mean, stats.var, stats.count = (x.numpy() for x in values)
        self.episode_counts = state["episode_counts"].numpy()
        for i, env in enumerate(self.envs):
            env.unwrapped.np_random.bit_generator.state = state["reset_states"][i]
            self.reset_env(i)
            any(any(self.step_env(i, action)[1:]) for action in state["actions_since"][i].numpy())  # until it ends
            if np.array_equal(self.raw_obs[i], state["raw_obs"][i].numpy()):
                for name in self.COUNTERS:
                    getattr(self, name)[i] = state[name][i].numpy()
            else:
                print(f"environment {i} can't be brought back to where it was: it starts a new episode")
                self.reset_env(i)


class Replay:
    """The last size transitions, float32 rows in a file mapped to memory, so that a checkpoint needs only their count.
    The file has spare rows more than size: if no more than these are written between two checkpoints, none that the
    first one may sample is overwritten, and a killed run goes on from it with the same buffer."""
    def __init__(self, path, size, spare, obs_dim, action_dim, count=0):
        num_bytes = 4 * math.prod(shape := (size + spare, 2 * obs_dim + action_dim + 2))
        if num_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            fail(f"no memory for a buffer of {num_bytes / 1e9:.1f} GB: lower --buffer-size or --checkpoint-interval")
        if count and not (path.is_file() and path.stat().st_size == num_bytes):
            fail(f"{path}, the replay buffer, is missing or not whole: start a new run")
        try:
            with open(path, "r+b" if count else "wb") as file:
                allocate = getattr(os, "posix_fallocate", lambda file, _, size: os.truncate(file, size))
                allocate(file.fileno(), 0, num_bytes)  # takes the space now; macOS can't
        except OSError as error:
            count or error.filename or path.unlink()  # without a filename it was opened: it keeps what room there was
            fail(f"no {num_bytes / 1e9:.1f} GB for {path} ({error.strerror}): free disk space, or lower --buffer-size")
        self.file = np.memmap(path, np.float32, mode="r+", shape=shape)
        self.rows, self.size, self.count, self.obs_dim = np.asarray(self.file), size, count, obs_dim

    def add(self, *columns):
        """Stores n transitions: obs (n, obs_dim), actions in [-1, 1] (n, action_dim), rewards (n,), next_obs, which
        truly followed, (n, obs_dim), terminations (n,)."""
        rows = np.column_stack(columns).astype(np.float32)
        if not np.isfinite(rows).all():
            cure = "start anew at a lower rate" if np.isnan(columns[1]).any() else "mend the environment, then --resume"
            fail(f"step {self.count}: an observation, action or reward is not finite: {cure}", code=1)
        self.rows[np.arange(self.count, self.count + len(rows)) % len(self.rows)] = rows
        self.count += len(rows)

    def sample(self, n, obs_stats, return_stats):
        """Draws n of the last size transitions, with replacement: rows (n, row_size); observations and rewards are
        normalised by what these statistics are now, where they aren't None."""
        ages = np.random.randint(min(self.count, self.size), size=n)
        rows, reward = self.rows[(self.count - 1 - ages) % len(self.rows)], -self.obs_dim - 2
        for columns in (slice(self.obs_dim), slice(-self.obs_dim - 1, -1)) if obs_stats else ():
            rows[:, columns] = obs_stats.normalize(rows[:, columns])
        if return_stats:
            rows[:, reward] = (rows[:, reward] / np.sqrt(return_stats.var + 1e-8)).clip(-10.0, 10.0)
        return torch.from_numpy(rows)


def relu_mlp(sizes, *last):
    """Linear layers of these sizes, ReLU between them, then last; initialised by PyTorch, as in the code of TD3."""
    layers = [layer for n, m in zip(sizes, sizes[1:]) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1], *last)


class Agent(nn.Module):
    """The actor, obs -> actions in [-1, 1], and the critic, obs and actions -> value of the actions."""
    def __init__(self, obs_dim, action_dim, hidden_sizes):
        super().__init__()
        self.row_sizes = (obs_dim, action_dim, 1, obs_dim, 1)  # of a transition: see Replay.add
        self.actor = relu_mlp((obs_dim, *hidden_sizes, action_dim), nn.Tanh())
        self.critic = relu_mlp((obs_dim + action_dim, *hidden_sizes, 1))

    def act(self, obs, obs_stats):
        """Arrays: obs (n, obs_dim), normalised by obs_stats where it isn't None -> actions (n, action_dim), float32."""
        obs = obs_stats.normalize(obs) if obs_stats else obs.astype(np.float32)
        with torch.no_grad():
            return self.actor(torch.from_numpy(obs).to(self.actor[0].bias.device)).cpu().numpy()


def call(module, params, *inputs):
    """module(*inputs), with its parameters taken from the flat tensor params."""
    views = params.split([p.numel() for p in module.parameters()])
    views = {name: view.view(p.shape) for (name, p), view in zip(module.named_parameters(), views)}
    return torch.func.functional_call(module, views, inputs)


def step_adam(learner, loss_of, lr, weight_decay, args):
    """A step of Adam, in place. loss_of: a function of flat parameters (p,) that returns the scalar loss and some
    METRICS (k,); learner: see ddpg_update. Returns the metrics and their numbers, ones, float32 (2, k)."""
    leaf, lr = learner["params"].detach().requires_grad_(), lr or args.learning_rate
    loss, metrics = loss_of(leaf)
    grads = torch.autograd.grad(loss, leaf)[0]
    if args.max_grad_norm:
        grads = grads * torch.clamp(args.max_grad_norm / (grads.norm() + 1e-6), max=1.0)
    adam([learner["params"]], [grads], [learner["exp_avg"]], [learner["exp_avg_sq"]], [], [learner["step"]], lr=lr,
         eps=1e-8, beta1=0.9, beta2=0.999, weight_decay=weight_decay, amsgrad=False, maximize=False,
         fused=not torch.compiler.is_compiling())
    return torch.stack((metrics, torch.ones_like(metrics))).detach()


def ddpg_update(learners, totals, agent, rows, with_actor, args):
    """A step of Adam for the critic and, with_actor, for the actor, then of both targets (algorithm 1 of the paper).
    learners: {"actor", "critic": {"params", "target", both flat, and Adam's "exp_avg", "exp_avg_sq", "step"}}, changed
    in place; rows: see Replay.sample. Adds METRICS to totals[0], float32 (3,), and how many of each to totals[1]."""
    obs, actions, rewards, next_obs, terminations = rows.split(agent.row_sizes, 1)
    next_actions = call(agent.actor, learners["actor"]["target"], next_obs)
    next_values = call(agent.critic, learners["critic"]["target"], torch.cat((next_obs, next_actions), 1))
    td_targets = rewards + args.gamma * (1 - terminations) * next_values
    def critic_loss(params):
        values = call(agent.critic, params, torch.cat((obs, actions), 1))
        loss = nn.functional.mse_loss(values, td_targets)
        return loss, torch.stack((values.mean(), loss))
    def actor_loss(params):
        obs_and_actions = torch.cat((obs, call(agent.actor, params, obs)), 1)
        loss = -call(agent.critic, learners["critic"]["params"], obs_and_actions).mean()
        return loss, loss[None]
    totals[:, :2] += step_adam(learners["critic"], critic_loss, args.critic_learning_rate, args.weight_decay, args)
    if with_actor:
        totals[:, 2:] += step_adam(learners["actor"], actor_loss, args.actor_learning_rate, 0.0, args)
        for learner in learners.values():
            learner["target"].lerp_(learner["params"], args.tau)


def compile_or_not(function, args, device):
    """function, compiled, where --compile is on and the machine has what that takes."""
    # With a threshold of 4 Adam's powers of its step are computed once, not anew for every eight parameters
    options = {"cpp_wrapper": True, "realize_opcount_threshold": 4} if device.type == "cpu" else {}
    if args.compile:
        try:
            torch.compile(torch.sin, options=options)(torch.ones(1, device=device))
            torch._dynamo.config.trace_autograd_ops = True  # else it doesn't take torch.autograd.grad
            return torch.compile(function, fullgraph=True, dynamic=False, options=options)  # new floats compile anew
        except Exception as error:  # a compiler, its headers, its cache folder: whatever is missing is in the message
            print(f"running without compilation, slower: {str(error).strip().splitlines()[0][:200]}")
    return function


def save_checkpoint(run_dir, checkpoint, logs):
    """Writes checkpoint.pt under a temporary name, fsyncs and renames it, so that a kill never leaves half of one."""
    try:
        for log in logs:
            log.flush()
        checkpoint["log_sizes"] = {path.name: path.stat().st_size for path in run_dir.iterdir()}
        with open(run_dir / "checkpoint.tmp", "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")
    except (OSError, RuntimeError) as error:
        fail(f"can't write the checkpoint ({error}): mend that, then --resume {run_dir}, or start anew", code=1)


def load_checkpoint(run_dir):
    """Reads a run's checkpoint or ends the program; weights_only, so that a stranger's file can't run code."""
    path, script = run_dir / "checkpoint.pt", Path(__file__).name
    try:
        if broken := zipfile.ZipFile(path).testzip():  # torch.load doesn't look at checksums
            raise ValueError(f"bad checksum of {broken}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if checkpoint["script"] != script:
            fail(f"{path} was made by {checkpoint['script']}, not by {script}: run that script")
        return checkpoint | {"args": Args(**checkpoint["args"])}
    except Exception as error:  # torch.load raises what it likes
        reason = " ".join(str(error).split())[:150]
        fail(f"{path} is missing, damaged or not of this {script} ({reason}): give another run, or start one")


def evaluate(agent, obs_stats, args, video_dir=None):
    """Plays --eval-episodes without noise, with frozen statistics and a seed of its own; prints and returns results."""
    envs = Envs(args.env_id, 1, (args.seed, 1), video_dir=video_dir and video_dir / "evaluation")
    episodes = []
    while len(episodes) < args.eval_episodes:
        episodes += envs.step(agent.act(envs.raw_obs, obs_stats))[1]
    returns = [episode[1] for episode in episodes]
    tqdm.write(f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes, no noise")
    return {"returns": returns, "lengths": [episode[2] for episode in episodes]}


def request_stop(signum, _frame):
    """Ctrl-C, SIGTERM: the iteration is ended and saved first. In the first, or at a second Ctrl-C: ends at once."""
    if signum == signal.SIGINT and hasattr(sys, "ps1"):  # in the shell of python -i
        raise KeyboardInterrupt
    if iteration == progress["iteration"] or stop_signals and not stop_signals[0] == signum == signal.SIGTERM:
        fail(f"stopped at once; --resume {run_dir} goes on from its last checkpoint, if any", code=128 + signum)
    stop_signals.append(signum)


if __name__ == "__main__":
    args, checkpoint = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    args.num_threads = args.num_threads or torch.get_num_threads()  # all cores; resumed with as many, for equal bits
    torch.set_num_threads(args.num_threads)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(args.seed)

    run_name = args.run_name or f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}".replace("/", "-")
    run_dir = Path(args.resume or args.evaluate or f"runs/{run_name}")
    if not checkpoint and os.path.exists(run_dir / "checkpoint.pt"):
        fail(f"{run_dir} exists: choose another --run-name, or go on with --resume {run_dir}")
    video_dir = run_dir / "videos" if args.capture_video else None
    if video_dir and sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # the renderer that needs no display
    envs = Envs(args.env_id, args.num_envs, args.seed, args.gamma, args.norm_obs, args.norm_reward,
                None if args.evaluate else video_dir, args.video_interval)
    agent = Agent(envs.obs_dim, envs.action_dim, args.hidden_sizes).to(device)
    learners = {}
    for name, net in agent.named_children():  # from here on its parameters are views of one flat tensor
        params = nn.utils.parameters_to_vector(net.parameters()).detach()
        nn.utils.vector_to_parameters(params, net.parameters())
        learners[name] = {"params": params, "target": params.clone(), "step": params.new_zeros(()),
                          "exp_avg": torch.zeros_like(params), "exp_avg_sq": torch.zeros_like(params)}
    noise = np.zeros((args.num_envs, envs.action_dim))
    progress = {"iteration": 0, "wall_seconds": 0.0, "recent_returns": [], "wandb_id": None, "log_sizes": {}}
    if checkpoint:
        try:
            progress = {name: checkpoint[name] for name in progress}
            envs.load_state(checkpoint["envs"])
            for name, learner in learners.items():
                for key, x in learner.items():
                    x.copy_(checkpoint["learners"][name][key])
            noise[:] = checkpoint["noise"].numpy() * (envs.episode_lengths > 0)[:, None]  # 0 in a new episode
            for setter, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), checkpoint["random"]):
                setter(state)
        except Exception as error:  # a part is missing, or of another shape or version
            fail(f"can't load {run_dir}: {' '.join(str(error).split())[:99]}; use config.json's versions or start anew")
    iteration, recent_returns, stop_signals = progress["iteration"], progress["recent_returns"], []
    obs_stats, return_stats = envs.obs_stats if args.norm_obs else None, envs.return_stats if args.norm_reward else None
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    if args.evaluate:
        sys.exit(not evaluate(agent, obs_stats, args, video_dir))
    if iteration == args.num_iterations and (run_dir / "evaluation.json").exists():
        sys.exit(print(f"{run_dir} is finished: {(run_dir / 'evaluation.json').read_text()}"))

    learn = compile_or_not(ddpg_update, args, device)

    try:  # two runs started in one second must not share a folder
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume or args.run_name))
    except OSError as error:
        fail(f"can't make {run_dir} ({error.strerror}): choose another --run-name, or mend that")
    replay = Replay(run_dir / "replay.bin", min(args.buffer_size, args.num_iterations * args.num_envs),
                    args.checkpoint_interval + args.num_envs, envs.obs_dim, envs.action_dim, iteration * args.num_envs)
    for path in run_dir.iterdir():  # what was logged after the checkpoint will be logged again
        if (path.name == "episodes.csv" or path.name.startswith("events.")) and not path.is_symlink():
            os.truncate(path, min(path.stat().st_size, progress["log_sizes"].get(path.name, 0)))
    if not checkpoint:
        git = ["sh", "-c", "git describe --always --dirty"]  # says nothing without git, or outside a repository
        commit = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
        config = {"args": asdict(args), "command": sys.argv, "git_commit": commit, "machine": [*os.uname()],
                  "cores": os.cpu_count(), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                  "versions": {"python": sys.version.split()[0]} | {d.name: d.version for d in distributions()}}
        (run_dir / "config.json").write_text(json.dumps(config, indent=2))
        (run_dir / "episodes.csv").write_text("global_step,wall_seconds,env,return,length,ended_by\n")
    if args.track:
        import wandb
        try:
            if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
                fail("--track: there is no login: run `wandb login`, or set WANDB_MODE=offline and sync later")
            wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, config=asdict(args),
                       name=run_dir.name, id=progress["wandb_id"], resume="allow", dir=run_dir, sync_tensorboard=True)
        except Exception as error:  # network, server
            fail(f"--track: W&B doesn't start ({error}): try again, or set WANDB_MODE=offline and sync later", code=1)
    writer, episodes_file = SummaryWriter(run_dir), open(run_dir / "episodes.csv", "a")
    start_time, last_line, terminal = time.time() - progress["wall_seconds"], time.time(), os.isatty(2)
    bar = tqdm(total=args.num_iterations * args.num_envs, initial=iteration * args.num_envs, unit=" steps",
               dynamic_ncols=True, file=sys.stderr if terminal else open(os.devnull, "w"))
    totals = torch.zeros(2, len(METRICS), device=device)  # sums, and how many
    for with_actor in {args.policy_frequency == 1, True}:  # compiles now, with copies
        copies = {name: {key: x.clone() for key, x in learner.items()} for name, learner in learners.items()}
        learn(copies, totals.clone(), agent, totals.new_zeros(args.batch_size, sum(agent.row_sizes)), with_actor, args)
    noises = [x for x in (args.exploration_noise, args.final_exploration_noise) if x is not None]
    global_step, save, stop = iteration * args.num_envs, True, iteration == args.num_iterations
    while True:
        if save:
            numpy_random = [x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]
            save_checkpoint(run_dir, {
                "script": Path(__file__).name, "args": asdict(args), "iteration": iteration, "global_step": global_step,
                "wall_seconds": time.time() - start_time, "recent_returns": recent_returns,
                "wandb_id": wandb.run.id if args.track else None, "random": [random.getstate(), numpy_random,
                torch.get_rng_state()], "agent": agent.state_dict(), "learners": learners, "envs": envs.state(),
                "noise": torch.tensor(noise),
            }, logs=(replay.file, writer, episodes_file))
        if stop:
            break
        if global_step < (args.learning_starts if args.random_steps is None else args.random_steps):
            actions = np.random.uniform(-1.0, 1.0, noise.shape)
        else:
            scale = noises[0] + (noises[-1] - noises[0]) * iteration / max(args.num_iterations - 1, 1)
            kept = 0.85 if args.noise_type == "ou" else 0.0  # section 7 of the paper: theta is .15
            noise = kept * noise + scale * np.random.standard_normal(noise.shape)
            actions = np.clip(agent.act(envs.raw_obs, obs_stats) + noise, -1.0, 1.0)
        obs, (rewards, ended) = envs.raw_obs.copy(), envs.step(actions)
        next_obs, terminations = envs.raw_obs.copy(), np.zeros(args.num_envs, bool)
        for i, *_, ended_by, final_obs in ended:
            next_obs[i], terminations[i], noise[i] = final_obs, ended_by == "termination", 0.0
        replay.add(obs, actions, rewards, next_obs, terminations)
        iteration += 1
        global_step = iteration * args.num_envs
        numbers = [max(0, math.ceil((step - args.learning_starts) * args.updates_per_step))
                   for step in (global_step - args.num_envs, global_step)]
        for number in range(*numbers):
            rows = replay.sample(args.batch_size, obs_stats, return_stats).to(device)
            learn(learners, totals, agent, rows, number % args.policy_frequency == 0, args)
        for i, episode_return, length, ended_by, _ in ended:
            wall_seconds = time.time() - start_time
            episodes_file.write(f"{global_step},{wall_seconds:.2f},{i},{episode_return!r},{length},{ended_by}\n")
            writer.add_scalar("charts/episodic_return", episode_return, global_step)
            writer.add_scalar("charts/episodic_length", length, global_step)
            recent_returns = [*recent_returns[-99:], episode_return]
        if global_step % args.eval_interval < args.num_envs:
            writer.add_scalar("eval/episodic_return", np.mean(evaluate(agent, obs_stats, args)["returns"]), global_step)
        stop = bool(stop_signals) or iteration == args.num_iterations
        save = stop or global_step % args.checkpoint_interval < args.num_envs
        if save or iteration % 100 == 0:
            if not (torch.isfinite(totals).all() and all(torch.isfinite(x["params"]).all() for x in learners.values())):
                fail(f"step {global_step}: the loss is not finite; {run_dir} is saved; start anew at a lower rate", 1)
            for name, total, n in [row for row in zip(METRICS, *totals.tolist()) if row[-1]]:
                writer.add_scalar(f"losses/{name}", total / n, global_step)
            totals.zero_()
            writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)
            bar.set_postfix_str(f"return {np.mean(recent_returns):.1f}" if recent_returns else "", refresh=False)
            bar.update(global_step - bar.n)
            if not (terminal or stop_signals) and (time.time() - last_line > 5 or iteration == args.num_iterations):
                print(bar, flush=True)
                last_line = time.time()

    for file in filter(None, (bar, writer, envs.video)):
        file.close()
    if stop_signals:
        print(f"stopped at step {global_step}; go on with: python {Path(__file__).name} --resume {run_dir}")
    else:
        stop_signals.append(0)  # from here on a signal ends the program at once
        if args.save_model:
            torch.save(agent.state_dict(), run_dir / f"{args.exp_name.replace('/', '-')}.cleanrl_model")
        (run_dir / "evaluation.tmp").write_text(json.dumps(evaluate(agent, obs_stats, args, video_dir)))
        (run_dir / "evaluation.tmp").replace(run_dir / "evaluation.json")
        print("written:", *sorted(str(path) for path in run_dir.rglob("*") if path.is_file()), sep="\n  ")
    if stop_signals[0] and not sys.flags.interactive:
        sys.exit(128 + stop_signals[0])
