"""PPO for continuous (Box) actions: MuJoCo and any other Gymnasium environment with vector observations.

Proximal Policy Optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of
openai/baselines ppo2: G1 to G11, M1 to M8, X1, X3 mark them as "The 37 Implementation Details of PPO" counts. Unlike
there, a time limit is no termination (--no-bootstrap-truncated: as there). To diff against ppo.py or ppo_atari.py.

    python ppo_continuous_action.py --env-id HalfCheetah-v5 --total-timesteps 1000000
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

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.optim.adam import adam
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

METRICS = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


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
    checkpoint_interval: int = 10  # iterations between checkpoints
    eval_episodes: int = 10  # episodes of the evaluation: deterministic actions, own seeds, frozen normalisation
    resume: str | None = None  # folder of a run to go on with, exactly as if it had never stopped; it knows its flags
    evaluate: str | None = None  # folder of a run whose policy is played, without training; it knows its flags
    env_id: str = "HalfCheetah-v5"  # id of the Gymnasium environment
    total_timesteps: int = 1000000  # steps of the run, all environments together
    learning_rate: float = 3e-4  # learning rate of Adam
    num_envs: int = 1  # number of environments
    num_steps: int = 2048  # steps in each environment per rollout
    anneal_lr: bool = True  # lower the learning rate linearly over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalized advantage estimation
    num_minibatches: int = 32  # minibatches per epoch
    update_epochs: int = 10  # epochs per rollout
    norm_adv: bool = True  # normalise the advantages in each minibatch
    clip_coef: float = 0.2  # clip range of the probability ratio and of the value loss
    anneal_clip: bool = False  # lower the clip range linearly over the run
    clip_vloss: bool = True  # clip the value loss as openai/baselines does
    ent_coef: float = 0.0  # coefficient of the entropy
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # largest norm of the gradient, actor and critic together
    target_kl: float | None = None  # an epoch whose mean approximate KL exceeds this is the iteration's last
    bootstrap_truncated: bool = True  # bootstrap from the last observation of an episode that a time limit cut
    init_log_std: float = 0.0  # initial logarithm of the policy's standard deviation


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
        free = ("resume", "evaluate", "eval_episodes", "capture_video", "video_interval", "checkpoint_interval")
        if changed := [f"{k} = {v}" for k, v in asdict(own).items() if v != getattr(args, k) and k not in free]:
            fail(f"{run} was made with {', '.join(changed)}: give no other value, or start a new run")
    args.batch_size = args.num_envs * args.num_steps
    args.num_iterations = args.total_timesteps // max(args.batch_size, 1)
    may_be_0 = ("seed", "num_threads", "gamma", "gae_lambda", "ent_coef", "vf_coef", "target_kl")
    numbers = [(name, x) for name, x in asdict(args).items() if type(x) in (int, float) and name != "init_log_std"]
    wrong = [name for name, x in numbers if not (x > 0 or x == 0 and name in may_be_0)]
    problems = [
        (wrong, f"{', '.join(wrong)} must be above 0 ({', '.join(may_be_0)} may be 0)"),
        (max(args.gamma, args.gae_lambda) > 1 or args.seed >= 2**32, "--gamma, --gae-lambda: up to 1, --seed: < 2**32"),
        (args.batch_size % max(args.num_minibatches, 1), "--num-envs x --num-steps must divide into --num-minibatches"),
        (args.norm_adv and args.batch_size == args.num_minibatches, "minibatches of one step need --no-norm-adv"),
        (not abs(args.init_log_std) <= 20, "--init-log-std must be from -20 to 20"),
        (args.num_iterations < 1, f"--total-timesteps is less than one rollout of {args.batch_size} steps"),
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
    """A vector of environments with openai/baselines' VecNormalize (common/vec_env/vec_normalize.py). A step that ends
    an episode also resets it and gives the reset's observation (Gymnasium's SAME_STEP). obs_stats sees each observation
    given once, resets too (M1), unless the caller brought it. Rewards are divided by the standard deviation of the
    discounted return, which restarts at 0 after an episode (M3). obs: float32 (num_envs, obs_dim), the present ones."""
    COUNTERS = ("raw_obs", "discounted_returns", "episode_returns", "episode_lengths", "episode_counts")

    def __init__(self, env_id, num_envs, seed, gamma=0.99, obs_stats=None, video_dir=None, video_interval=1):
        self.envs = [make_env(env_id, render=i == 0 and video_dir is not None) for i in range(num_envs)]
        self.space, action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.low, self.high = action_space.low.reshape(1, -1), action_space.high.reshape(1, -1)
        self.action_shape = action_space.shape
        self.obs_dim, self.action_dim = gym.spaces.flatdim(self.space), self.low.size
        self.training, self.gamma, self.return_stats = obs_stats is None, gamma, RunningMeanStd(())
        self.obs_stats = obs_stats or RunningMeanStd((1, self.obs_dim))  # numpy is fastest where shapes are equal
        self.video_dir, self.video_interval, self.video = video_dir, video_interval, None
        self.raw_obs = np.zeros((num_envs, self.obs_dim))
        self.discounted_returns, self.episode_returns = np.zeros(num_envs), np.zeros(num_envs)
        self.episode_lengths, self.episode_counts = np.zeros(num_envs, int), np.zeros(num_envs, int)
        # An environment is replayed from its random state before its last reset, and the actions since
        self.reset_states, self.actions_since = [None] * num_envs, [None] * num_envs
        for i, env_seed in enumerate(np.random.SeedSequence(seed).generate_state(num_envs)):
            self.envs[i].reset(seed=int(env_seed))
            self.reset_env(i)
        self.obs = self.obs_stats.normalize(self.raw_obs, update=self.training)

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
        """Steps every environment; actions (num_envs, action_dim) are clipped to the bounds here (M8).
        Returns the normalised rewards, float64 (num_envs,), and the episodes that ended, [(i, return, length, ended_by,
        final_obs)]: environment, unnormalised return, length, "termination" or "truncation", and the observation
        (obs_dim,) that the reset has replaced, normalised with the same statistics but not counted in them."""
        actions = np.minimum(np.maximum(actions, self.low), self.high)
        rewards, ended = np.zeros(len(actions)), []
        for i, action in enumerate(actions):
            rewards[i], terminated, truncated = self.step_env(i, action)
            self.episode_returns[i] += rewards[i]
            self.episode_lengths[i] += 1
            if terminated or truncated:
                ended.append((i, self.episode_returns[i].item(), self.episode_lengths[i].item(),
                              "termination" if terminated else "truncation", self.raw_obs[i].copy()))
        self.discounted_returns = self.discounted_returns * self.gamma + rewards
        self.return_stats.update(self.discounted_returns)
        rewards = np.minimum(np.maximum(rewards / math.sqrt(self.return_stats.var + 1e-8), -10.0), 10.0)  # M4
        for i, *_ in ended:
            self.episode_counts[i] += 1
            if i == 0 and self.video:
                self.video = self.video.close()
            self.reset_env(i)
        self.obs = self.obs_stats.normalize(self.raw_obs, update=self.training)
        return rewards, [(*record, self.obs_stats.normalize(obs)[0]) for *record, obs in ended]

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
        self.obs = self.obs_stats.normalize(self.raw_obs)


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    """Orthogonal weights of gain std, constant bias (G9; baselines a2c/utils.py)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


def mlp(inputs, outputs, std):
    """Two tanh layers of 64 (M6), and a linear one of gain std."""
    layers = [layer_init(nn.Linear(inputs, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
    return nn.Sequential(*layers, layer_init(nn.Linear(64, outputs), std))


class Agent(nn.Module):
    """Policy and value in separate networks (M7); the standard deviation depends on no observation (M5)."""
    def __init__(self, obs_dim, action_dim, init_log_std=0.0):
        super().__init__()
        self.critic, self.actor_mean = mlp(obs_dim, 1, std=1.0), mlp(obs_dim, action_dim, std=0.01)
        self.actor_logstd = nn.Parameter(torch.full((1, action_dim), init_log_std))

    def forward(self, obs, actions):
        """obs (n, obs_dim), actions (n, action_dim) -> log-probabilities of the actions, entropy, values, each (n,)."""
        constant = 0.5 * math.log(2 * math.pi)
        noise = (actions - self.actor_mean(obs)) / self.actor_logstd.exp()
        logprobs = (-0.5 * noise**2 - self.actor_logstd - constant).sum(1)
        entropy = (self.actor_logstd + 0.5 + constant).sum(1).expand(len(obs))
        return logprobs, entropy, self.critic(obs).squeeze(1)


def numpy_policy(actor_mean):
    """actor_mean, with a copy of its weights, as a function of arrays (n, obs_dim) -> (n, action_dim): during a rollout
    weights are frozen, and on a few observations numpy takes 10 us where PyTorch takes 45."""
    # Another kind of layer in actor_mean needs its twin here; dot is three times as fast as x @ weight + bias
    twins = {nn.Linear: lambda weight, bias: lambda x: x.dot(weight) + bias[None], nn.Tanh: lambda: np.tanh}
    weights = [[p.detach().cpu().numpy().T.copy() for p in layer.parameters()] for layer in actor_mean]
    layers = [twins[type(layer)](*parameters) for layer, parameters in zip(actor_mean, weights)]
    def policy(x):
        for layer in layers:
            x = layer(x)
        return x
    return policy


def rollout(agent, envs, num_steps):
    """Plays num_steps in each environment (G10). Returns float32 obs (num_steps, num_envs, obs_dim), raw actions
    (num_steps, num_envs, action_dim) and rewards (num_steps, num_envs), bool terminations and truncations, and the
    episodes that ended, [(step, i, return, length, ended_by, final_obs)], see Envs.step."""
    shape, policy, episodes = (num_steps, len(envs.envs)), numpy_policy(agent.actor_mean), []
    obs, rewards = np.zeros((*shape, envs.obs_dim), np.float32), np.zeros(shape, np.float32)
    terminations, truncations = np.zeros(shape, bool), np.zeros(shape, bool)
    actions = (torch.randn(*shape, envs.action_dim) * agent.actor_logstd.detach().cpu().exp()).numpy()
    for step in range(num_steps):
        obs[step] = envs.obs
        actions[step] += policy(envs.obs)  # to the noise
        rewards[step], ended = envs.step(actions[step])
        for i, *_, ended_by, _ in ended:
            (truncations if ended_by == "truncation" else terminations)[step, i] = True
        episodes += [(step, *episode) for episode in ended]
    return obs, actions, rewards, terminations, truncations, episodes


def compute_advantages(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """Generalized advantage estimation (G2): https://arxiv.org/abs/1506.02438, baselines ppo2/runner.py.
    All arrays (num_steps, num_envs). next_values: of the observation that truly followed each step, before any reset;
    after a termination they don't count. The sum ends with the episode, at dones."""
    deltas = rewards + gamma * np.where(terminations, np.float32(0), next_values) - values
    decays = gamma * gae_lambda * ~dones
    advantages, last = np.zeros_like(deltas), np.zeros_like(deltas[0])
    for step in reversed(range(len(deltas))):
        advantages[step] = last = deltas[step] + decays[step] * last
    return advantages


def ppo_loss(params, agent, batch, clip_coef, args):
    """PPO's loss on a minibatch: returns it and METRICS, float32 (6,). params: the parameters as one flat tensor;
    batch: obs and actions as the agent takes them, and logprobs, advantages, returns, values (n,)."""
    views = params.split([p.numel() for p in agent.parameters()])
    views = {name: view.view(p.shape) for (name, p), view in zip(agent.named_parameters(), views)}
    logprobs, entropy, values = torch.func.functional_call(agent, views, (batch["obs"], batch["actions"]))
    logratio = logprobs - batch["logprobs"]
    ratio, advantages = logratio.exp(), batch["advantages"]
    if args.norm_adv:  # G3
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
    policy_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()  # G1
    value_losses = (values - batch["returns"]) ** 2
    if args.clip_vloss:  # G4
        clipped_values = batch["values"] + torch.clamp(values - batch["values"], -clip_coef, clip_coef)
        value_losses = torch.max(value_losses, (clipped_values - batch["returns"]) ** 2)
    value_loss, entropy = 0.5 * value_losses.mean(), entropy.mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss  # G5
    old_approx_kl, approx_kl = (-logratio).mean(), ((ratio - 1) - logratio).mean()  # joschu.net/blog/kl-approx.html
    clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    return loss, torch.stack((policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac)).detach()


def update_minibatches(params, optimizer, agent, batch, indices, lr, clip_coef, args):
    """A step of Adam (G11), in place, for each row of indices (k, minibatch_size); returns the sum of their METRICS."""
    total, compiling = torch.zeros(len(METRICS), device=params.device), torch.compiler.is_compiling()
    for row in indices.unbind():
        minibatch, leaf = {name: x[row] for name, x in batch.items()}, params.detach().requires_grad_()
        loss, metrics = ppo_loss(leaf, agent, minibatch, clip_coef, args)
        grads = torch.autograd.grad(loss, leaf)[0]
        grads = grads * torch.clamp(args.max_grad_norm / (grads.norm() + 1e-6), max=1.0)  # G8: the norm of them all
        adam([params], [grads], [optimizer["exp_avg"]], [optimizer["exp_avg_sq"]], [], [optimizer["step"]], lr=lr,
             eps=1e-5, beta1=0.9, beta2=0.999, weight_decay=0.0, amsgrad=False, maximize=False, fused=not compiling)
        total = total + metrics
    return total


def update(step_minibatches, params, optimizer, agent, batch, lr, clip_coef, args):
    """PPO's epochs over a batch, in place, by update_minibatches, compiled or not; returns the mean of METRICS."""
    epochs, rows = [], 2 - args.num_minibatches % 2  # of indices in one call: 2 run faster than 1, 4 compile too long
    for _ in range(args.update_epochs):
        indices = torch.randperm(len(batch["obs"])).view(args.num_minibatches, -1).to(params.device)  # G7
        calls = [step_minibatches(params, optimizer, agent, batch, i, lr, clip_coef, args) for i in indices.split(rows)]
        epochs.append(torch.stack(calls).sum(0) / args.num_minibatches)
        if args.target_kl is not None and epochs[-1][METRICS.index("approx_kl")] > args.target_kl:  # X3
            break
    return torch.stack(epochs).mean(0).cpu()


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
    """Plays --eval-episodes with mean actions, frozen statistics and a seed of its own; prints and returns results."""
    envs = Envs(args.env_id, 1, (args.seed, 1), obs_stats=obs_stats, video_dir=video_dir and video_dir / "evaluation")
    policy, episodes = numpy_policy(agent.actor_mean), []
    while len(episodes) < args.eval_episodes:
        episodes += envs.step(policy(envs.obs))[1]
    returns = [episode[1] for episode in episodes]
    print(f"evaluation: {np.mean(returns):.1f} +- {np.std(returns):.1f} over {len(returns)} episodes, deterministic")
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
    torch.set_num_threads(args.num_threads or 1)  # a second thread gains nothing on layers of 64
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
    envs = Envs(args.env_id, args.num_envs, args.seed, args.gamma, video_dir=None if args.evaluate else video_dir,
                video_interval=args.video_interval)
    agent = Agent(envs.obs_dim, envs.action_dim, args.init_log_std).to(device)
    params = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(params, agent.parameters())  # from here on they are views of one flat tensor
    optimizer = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")} | {"step": params.new_zeros(())}
    progress = {"iteration": 0, "wall_seconds": 0.0, "recent_returns": [], "wandb_id": None, "log_sizes": {}}
    if checkpoint:
        try:
            progress = {name: checkpoint[name] for name in progress}
            agent.load_state_dict(checkpoint["agent"])
            envs.load_state(checkpoint["envs"])
            optimizer = {name: checkpoint["optimizer"][name].to(x.device) for name, x in optimizer.items()}
            for setter, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), checkpoint["random"]):
                setter(state)
        except Exception as error:  # a part is missing, or of another shape or version
            fail(f"can't load {run_dir}: {' '.join(str(error).split())[:99]}; use config.json's versions or start anew")
    iteration, recent_returns, stop_signals = progress["iteration"], progress["recent_returns"], []
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    if args.evaluate:
        sys.exit(not evaluate(agent, envs.obs_stats, args, video_dir))
    if iteration == args.num_iterations and (run_dir / "evaluation.json").exists():
        sys.exit(print(f"{run_dir} is finished: {(run_dir / 'evaluation.json').read_text()}"))

    step_minibatches = compile_or_not(update_minibatches, args, device)

    try:  # two runs started in one second must not share a folder
        run_dir.mkdir(parents=True, exist_ok=bool(args.resume or args.run_name))
    except OSError as error:
        fail(f"can't make {run_dir} ({error.strerror}): choose another --run-name, or mend that")
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
    bar = tqdm(total=args.num_iterations * args.batch_size, initial=iteration * args.batch_size, unit=" steps",
               dynamic_ncols=True, file=sys.stderr if terminal else open(os.devnull, "w"))

    while True:
        global_step, stop = iteration * args.batch_size, stop_signals or iteration == args.num_iterations
        if stop or iteration % args.checkpoint_interval == 0:
            numpy_random = [x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]
            save_checkpoint(run_dir, {
                "script": Path(__file__).name, "args": asdict(args), "iteration": iteration, "global_step": global_step,
                "wall_seconds": time.time() - start_time, "recent_returns": recent_returns,
                "wandb_id": wandb.run.id if args.track else None, "random": [random.getstate(), numpy_random,
                torch.get_rng_state()], "agent": agent.state_dict(), "optimizer": optimizer, "envs": envs.state(),
            }, logs=(writer, episodes_file))
        if stop:
            break
        remaining = 1.0 - iteration / args.num_iterations
        lr = torch.tensor(args.learning_rate * (remaining if args.anneal_lr else 1.0), device=device)  # G6
        clip_coef = torch.tensor(args.clip_coef * (remaining if args.anneal_clip else 1.0), device=device)  # X1

        obs, actions, rewards, terminations, truncations, episodes = rollout(agent, envs, args.num_steps)
        batch = {k: torch.from_numpy(x).flatten(0, 1).to(device) for k, x in (("obs", obs), ("actions", actions))}
        final_obs = torch.from_numpy(np.stack([*envs.obs, *(episode[-1] for episode in episodes)])).to(device)
        with torch.no_grad():  # the weights were frozen, so one pass serves the whole rollout
            batch["logprobs"], _, batch["values"] = agent(batch["obs"], batch["actions"])
            final_values = agent.critic(final_obs).squeeze(1).cpu().numpy()
        values = batch["values"].cpu().numpy().reshape(rewards.shape)
        next_values = np.concatenate((values[1:], final_values[None, : args.num_envs]))
        next_values[[e[0] for e in episodes], [e[1] for e in episodes]] = final_values[args.num_envs :]
        dones = terminations | truncations
        ends = terminations if args.bootstrap_truncated else dones
        advantages = compute_advantages(rewards, values, next_values, ends, dones, args.gamma, args.gae_lambda)
        returns = advantages + values
        batch["advantages"], batch["returns"] = (torch.tensor(x.ravel(), device=device) for x in (advantages, returns))
        metrics = update(step_minibatches, params, optimizer, agent, batch, lr, clip_coef, args)
        if not (torch.isfinite(metrics).all() and torch.isfinite(params).all()):
            fail(f"iteration {iteration + 1}: the loss is not finite; {run_dir} keeps the last good checkpoint. "
                 "Try a lower --learning-rate, or look for NaN in the environment's rewards and observations", code=1)

        iteration += 1
        for step, i, episode_return, length, ended_by, *_ in episodes:
            step, wall_seconds = global_step + (step + 1) * args.num_envs, time.time() - start_time
            episodes_file.write(f"{step},{wall_seconds:.2f},{i},{episode_return!r},{length},{ended_by}\n")
            writer.add_scalar("charts/episodic_return", episode_return, step)
            writer.add_scalar("charts/episodic_length", length, step)
            recent_returns = [*recent_returns[-99:], episode_return]
        global_step = iteration * args.batch_size
        explained_variance = 1 - np.var(returns - values) / (np.var(returns) or np.nan)
        for name, x in [*zip(METRICS, metrics), ("explained_variance", explained_variance)]:
            writer.add_scalar(f"losses/{name}", float(x), global_step)
        writer.add_scalar("charts/learning_rate", lr.item(), global_step)
        writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)
        bar.set_postfix_str(f"return {np.mean(recent_returns):.1f}" if recent_returns else "", refresh=False)
        bar.update(args.batch_size)
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
        (run_dir / "evaluation.tmp").write_text(json.dumps(evaluate(agent, envs.obs_stats, args, video_dir)))
        (run_dir / "evaluation.tmp").replace(run_dir / "evaluation.json")
        print("written:", *sorted(str(path) for path in run_dir.rglob("*") if path.is_file()), sep="\n  ")
    if stop_signals[0] and not sys.flags.interactive:
        sys.exit(128 + stop_signals[0])
