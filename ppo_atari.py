"""PPO for Atari games, from pixels.

Proximal Policy Optimization, Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the details of
openai/baselines ppo2: G1 to G11, A1 to A10, X1, X3 mark them as "The 37 Implementation Details of PPO" counts. Unlike
there, a time limit is no termination (--no-bootstrap-truncated: as there). To diff against ppo_continuous_action.py.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4 --total-timesteps 10000000
"""

import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

import ale_py
import cv2
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
FRAMES = 4  # that the network sees (A6)


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
    env_id: str = "BreakoutNoFrameskip-v4"  # id of the Atari game: NAMENoFrameskip-v4 or ALE/NAME-v5
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
    target_kl: float | None = None  # an epoch whose mean approximate KL exceeds this is the iteration's last
    bootstrap_truncated: bool = True  # bootstrap from the last observation of an episode that a time limit cut
    amp: bool = False  # compute the network in bfloat16: faster, less exact


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
    numbers = [(name, x) for name, x in asdict(args).items() if type(x) in (int, float)]
    wrong = [name for name, x in numbers if not (x > 0 or x == 0 and name in may_be_0)]
    problems = [
        (wrong, f"{', '.join(wrong)} must be above 0 ({', '.join(may_be_0)} may be 0)"),
        (max(args.gamma, args.gae_lambda) > 1 or args.seed >= 2**32, "--gamma, --gae-lambda: up to 1, --seed: < 2**32"),
        (args.batch_size % max(args.num_minibatches, 1), "--num-envs x --num-steps must divide into --num-minibatches"),
        (args.norm_adv and args.batch_size == args.num_minibatches, "minibatches of one step need --no-norm-adv"),
        (args.num_iterations < 1, f"--total-timesteps is less than one rollout of {args.batch_size} steps"),
        (args.resume and args.evaluate or "" in (args.resume, args.evaluate), "give --resume or --evaluate a folder"),
        (args.run_name and ("/" in args.run_name or args.run_name in (".", "..")), "--run-name must be a name"),
    ]
    if sentences := [sentence for wrong, sentence in problems if wrong]:
        fail("; ".join(sentences))
    return args, checkpoint


def make_env(env_id):
    """Makes an Atari game, whose emulator neither skips frames nor repeats actions, or ends the program."""
    if not (env_id.endswith("NoFrameskip-v4") or env_id.startswith("ALE/") and env_id.endswith("-v5")):
        fail(f"{env_id} is none of the Atari games that this script plays: NAMENoFrameskip-v4 or ALE/NAME-v5")
    try:
        env = gym.make(env_id, frameskip=1, repeat_action_probability=0.0, disable_env_checker=True).unwrapped
        return env if env.ale and env.get_action_meanings()[0] == "NOOP" else fail(f"{env_id} has no NOOP action (A1)")
    except Exception as error:  # environments have their own
        fail(f"can't make {env_id}: {' '.join(str(error).split())}")


def draw(screen, names, probabilities):
    """screen (height, 160, 3) -> the same twice as large, beside it each action's name and, as a bar, probability."""
    panel = np.zeros_like(screen)
    for name, p, y in zip(names, probabilities, range(9, 209, 11)):
        cv2.rectangle(panel, (88, y - 6), (88 + round(70 * float(p)), y), (255, 160, 0), -1)
        cv2.putText(panel, name, (2, y), cv2.FONT_HERSHEY_PLAIN, 0.6, (255, 255, 255))
    return np.hstack((screen, panel)).repeat(2, axis=0).repeat(2, axis=1)


class Envs:
    """Atari games with openai/baselines' wrappers (common/atari_wrappers.py); obs: uint8 (num_envs, FRAMES, 84, 84). A
    step that ends an episode, for the learner a lost life does too (A3), also resets it (Gymnasium's SAME_STEP)."""
    COUNTERS = ("obs", "screens", "lives", "last_actions", "episode_returns", "episode_lengths", "episode_counts")

    def __init__(self, env_id, num_envs, seed, video_dir=None, video_interval=1):
        self.envs = [make_env(env_id) for i in range(num_envs)]
        self.action_names, self.probabilities, self.unseen = self.envs[0].get_action_meanings(), (), []
        self.video_dir, self.video_interval, self.video = video_dir, video_interval, None
        self.screens = np.zeros((num_envs, 2, *self.envs[0].ale.getScreenDims(), 3), np.uint8)
        self.obs, self.episode_returns = np.zeros((num_envs, FRAMES, 84, 84), np.uint8), np.zeros(num_envs)
        self.sticky = gym.spec(env_id.rpartition(":")[2]).kwargs.get("repeat_action_probability", 0.25)  # as ale_py
        self.lives, self.last_actions, self.episode_lengths, self.episode_counts = np.zeros((4, num_envs), int)
        for i, env_seed in enumerate(np.random.SeedSequence(seed).generate_state(num_envs)):
            self.envs[i].reset(seed=int(env_seed))
            self.reset_env(i)

    def act(self, i, action):
        """Plays a frame; in v5 games one in four repeats the last action, which the emulator's own state would lack."""
        if not self.sticky or self.envs[i].np_random.random() >= self.sticky:
            self.last_actions[i] = action
        return self.envs[i].ale.act(self.envs[i]._action_set[self.last_actions[i]])

    def skip(self, i, action):
        """Four frames of an action, the last two kept (A4). Returns the reward, "life" or None, end of game or None."""
        ale, reward = self.envs[i].ale, 0.0
        for frame in range(4):
            reward += self.act(i, action)
            if frame >= 2:
                ale.getScreenRGB(self.screens[i, frame - 2])
            if ale.game_over() and frame < 3:
                self.screens[i] = ale.getScreenRGB()
                break
        lost, self.lives[i] = "life" if 0 < ale.lives() < self.lives[i] else None, ale.lives()
        self.episode_returns[i] += reward  # of the whole game, no-ops and FIRE after a lost life too
        over = "truncation" if ale.game_truncated() else None
        return reward, lost, "termination" if ale.game_over(with_truncation=False) else over

    def skip_unseen(self, i, action):
        """skip() in a reset: its reward is not learned from, but a game that ends there counts. Returns what ended."""
        _, lost, over = self.skip(i, action)
        if over and self.episode_lengths[i]:
            self.unseen.append((i, self.episode_returns.item(i), self.episode_lengths.item(i), over))
        return over or lost

    def begin(self, i, ended_by):
        """Goes on with a no-op after a lost life (A3), or starts a game with 1 to 30 of them (A1)."""
        ale = self.envs[i].ale
        if ended_by != "life" or self.skip_unseen(i, 0) not in (None, "life"):
            if i == 0 and self.video:
                self.video = self.video.close()
            self.episode_counts[i] += self.episode_lengths[i] > 0
            self.episode_returns[i], self.episode_lengths[i], self.last_actions[i] = 0.0, 0, 0
            ale.reset_game()
            for _ in range(self.envs[i].np_random.integers(1, 31)):
                self.act(i, 0)
                if ale.game_over():
                    ale.reset_game()
            self.screens[i] = ale.getScreenRGB()
        self.lives[i] = ale.lives()

    def reset_env(self, i, ended_by=None):
        """Starts an episode in game i, with FIRE and the action after it where a game has that (A2)."""
        self.begin(i, ended_by)
        for action in (1, 2) if "FIRE" in self.action_names else ():
            if ended_by := self.skip_unseen(i, action):
                self.begin(i, ended_by)
        self.obs[i] = 0  # A6: as ppo2's VecFrameStack; the wrapper of DQN repeats the first frame instead
        self.see(i)

    def see(self, i):
        """The maximum of the last two frames, grayscale, 84 x 84 (A5), becomes the newest of FRAMES (A6)."""
        self.obs[i, :-1] = self.obs[i, 1:]
        gray = cv2.cvtColor(np.maximum(*self.screens[i]), cv2.COLOR_RGB2GRAY)
        self.obs[i, -1] = cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)

    def step(self, actions, games=slice(None)):
        """Steps games, a slice of them, by actions, int (n,). Returns the signs of the rewards (A7), float32 (n,), and
        what ended, [(i, the game's return and length so far, "termination", "truncation" or "life", the observation
        that the reset has replaced)]. A game that ends in a reset follows as one more."""
        rewards, ended, self.unseen = [], [], []
        for i, action in zip(range(len(self.envs))[games], actions):
            episode, n = self.episode_counts[i], self.episode_lengths[i]  # n > 0: a run resumed in an episode
            if i == 0 and self.video_dir and not self.video and episode % self.video_interval == 0:
                self.video_dir.mkdir(parents=True, exist_ok=True)
                path = self.video_dir / f"episode-{episode}{f'-from-step-{n}' if n else ''}.mp4"
                self.video = imageio.get_writer(path, fps=15, macro_block_size=2)
            if i == 0 and self.video:
                self.video.append_data(draw(self.screens[i, 1], self.action_names, self.probabilities))
            reward, lost, over = self.skip(i, action)
            rewards.append(reward)
            self.see(i)
            self.episode_lengths[i] += 1
            if ended_by := over if over == "termination" else lost or over:
                ended += [(i, self.episode_returns.item(i), self.episode_lengths.item(i), ended_by, self.obs[i].copy())]
        for i, *_, ended_by, _ in ended:
            self.reset_env(i, ended_by)
        return np.sign(np.float32(rewards)), ended + [(*game, self.obs[game[0]].copy()) for game in self.unseen]

    def state(self, games=slice(None)):
        """All that load_state needs of games, a slice of them, as tensors and plain Python values."""
        for ale in (emulators := [env.ale for env in self.envs[games]]):  # to go on from what is saved, as load_state
            ale.restoreState(ale.cloneState(include_rng=True))  # does: in Miniature Golf that isn't all that there was
        state = {name: torch.tensor(getattr(self, name)[games]) for name in self.COUNTERS}
        return state | {"games": [ale.cloneState(include_rng=True).serialize() for ale in emulators],
                        "random": [env.np_random.bit_generator.state for env in self.envs[games]]}

    def load_state(self, state, games=slice(None)):
        """Goes on from a state()."""
        for name in self.COUNTERS:
            getattr(self, name)[games] = state[name].numpy()
        for i, bits, random_state in zip(range(len(self.envs))[games], state["games"], state["random"]):
            self.envs[i].np_random.bit_generator.state = random_state
            self.envs[i].ale.restoreState(ale_py.ALEState(bits))
            if self.envs[i].ale.cloneState(include_rng=True).serialize() != bits:
                print(f"environment {i} can't be brought back to where it was: it starts a new episode")
                self.reset_env(i)


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    """Orthogonal weights of gain std, constant bias (G9; baselines a2c/utils.py)."""
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """The network of https://www.nature.com/articles/nature14236, shared by policy and value (A9, A10)."""
    def __init__(self, num_actions, args):
        super().__init__()
        self.args, self.network = args, nn.Sequential(
            layer_init(nn.Conv2d(FRAMES, 32, 8, 4)), nn.ReLU(), layer_init(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3)), nn.ReLU(), nn.Flatten(), layer_init(nn.Linear(3136, 512)), nn.ReLU())
        self.actor, self.critic = layer_init(nn.Linear(512, num_actions), 0.01), layer_init(nn.Linear(512, 1), 1.0)

    def heads(self, obs):
        """obs uint8 (n, FRAMES, 84, 84) -> log-probabilities (n, num_actions), values (n,), float32."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.args.amp):
            hidden = self.network((obs / 255.0).contiguous(memory_format=torch.channels_last))  # A8
            return self.actor(hidden).float().log_softmax(1), self.critic(hidden).float().squeeze(1)

    def forward(self, obs, actions):
        """obs, actions int64 (n,) -> log-probabilities of the actions, entropy, values, each (n,)."""
        logits, values = self.heads(obs)
        return logits.gather(1, actions[:, None]).squeeze(1), -(logits.exp() * logits).sum(1), values

    @torch.no_grad()
    def step(self, obs):
        """heads, with arrays."""
        return [x.cpu().numpy() for x in self.heads(torch.from_numpy(obs).to(self.actor.bias.device))]


def in_processes(play, envs):
    """play(games) for slices of all games, the first here, one for each other of PyTorch's threads in a forked process,
    of which result and games come back, no more. Returns the results joined: arrays (x, num_envs, ...), and a list."""
    threads, n = torch.get_num_threads(), len(envs.envs)
    parts = min(threads, n) if sys.platform == "linux" and not torch.cuda.is_available() else 1
    first, *others = [slice(part * n // parts, (part + 1) * n // parts) for part in range(parts)]
    workers = 0 if envs.video_dir else len(others)  # ffmpeg ends when no process has its input open, and is waited for
    children = iter(torch.utils.data.DataLoader(
        others, None, num_workers=workers, multiprocessing_context="fork" if workers else None,
        worker_init_fn=lambda _: (os.setsid(), signal.signal(signal.SIGTERM, signal.SIG_IGN),  # left to the parent
                                  torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)),  # they end with it
        collate_fn=lambda games: pickle.dumps((*play(games), envs.state(games)))))
    torch.set_num_threads(1 if others else threads)  # as every worker has
    try:
        *arrays, episodes, states = zip((*play(first), None), *map(pickle.loads, children))
    except RuntimeError as error:
        raise error if "(pid" not in str(error) else fail(f"{error} - mend that, then go on with --resume", code=1)
    finally:
        torch.set_num_threads(threads)
    for games, state in zip(others, states[1:]):
        envs.load_state(state, games)
    return *[np.concatenate(array, 1) for array in arrays], sorted(sum(episodes, []), key=lambda episode: episode[0])


def rollout(agent, envs, num_steps):
    """Plays num_steps in each game (G10). Returns uint8 obs (num_steps, num_envs, FRAMES, 84, 84), of the first two
    dimensions int64 actions, float32 logprobs, values, rewards, bool terminations (lost lives too) and truncations, and
    the games that ended, [(step, i, return, length, ended_by, final_obs)], see Envs.step."""
    noise = -torch.empty(num_steps, len(envs.envs), len(envs.action_names)).exponential_().log().numpy()

    def play(games):
        steps, episodes = [], []
        for step in range(num_steps):
            obs = envs.obs[games].copy()
            logits, values = agent.step(obs)
            actions = (logits + noise[step, games]).argmax(1)  # Gumbel noise: a sample of the policy
            logprobs = np.take_along_axis(logits, actions[:, None], 1)[:, 0]
            rewards, ended = envs.step(actions, games)
            terminations, truncations = np.zeros((2, len(obs)), bool)
            for i, *_, ended_by, _ in ended:
                (truncations if ended_by == "truncation" else terminations)[i - games.start] = True
            episodes += [(step, *game) for game in ended if game[3] != "life"]
            steps.append((obs, actions, logprobs, values, rewards, terminations, truncations))
        return *[np.stack(arrays) for arrays in zip(*steps)], episodes
    return in_processes(play, envs)


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


def evaluate(agent, args, video_dir=None):
    """Plays --eval-episodes with the likeliest actions and a seed of its own; prints and returns results."""
    envs = Envs(args.env_id, 1, (args.seed, 1), video_dir=video_dir and video_dir / "evaluation")
    episodes = []
    while len(episodes) < args.eval_episodes:
        logits = agent.step(envs.obs)[0]
        envs.probabilities = np.exp(logits[0])
        episodes += [episode for episode in envs.step(logits.argmax(1))[1] if episode[3] != "life"]
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
    envs = Envs(args.env_id, args.num_envs, args.seed, None if args.evaluate else video_dir, args.video_interval)
    agent = Agent(len(envs.action_names), args).to(device)
    params = nn.utils.parameters_to_vector(agent.parameters()).detach()
    nn.utils.vector_to_parameters(params, agent.parameters())  # from here on they are views of one flat tensor
    optimizer = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")} | {"step": params.new_zeros(())}
    progress = {"iteration": 0, "wall_seconds": 0.0, "recent_returns": [], "wandb_id": None, "log_sizes": {}}
    if checkpoint:
        try:
            progress = {name: checkpoint[name] for name in progress}
            agent.load_state_dict(checkpoint["agent"])
            args.evaluate or envs.load_state(checkpoint["envs"])
            optimizer = {name: checkpoint["optimizer"][name].to(x.device) for name, x in optimizer.items()}
            for setter, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), checkpoint["random"]):
                setter(state)
        except Exception as error:  # a part is missing, or of another shape or version
            fail(f"can't load {run_dir}: {' '.join(str(error).split())[:99]}; use config.json's versions or start anew")
    iteration, recent_returns, stop_signals = progress["iteration"], progress["recent_returns"], []
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)
    if args.evaluate:
        sys.exit(not evaluate(agent, args, video_dir))
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

        with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):  # around all steps: weights convert once
            obs, actions, logprobs, values, *rest = rollout(agent, envs, args.num_steps)
        rewards, terminations, truncations, episodes = rest
        batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values}
        batch = {k: torch.from_numpy(x).flatten(0, 1).to(device) for k, x in batch.items()}
        final_values = agent.step(np.stack([*envs.obs, *(episode[-1] for episode in episodes)]))[1]
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
        (run_dir / "evaluation.tmp").write_text(json.dumps(evaluate(agent, args, video_dir)))
        (run_dir / "evaluation.tmp").replace(run_dir / "evaluation.json")
        print("written:", *sorted(str(path) for path in run_dir.rglob("*") if path.is_file()), sep="\n  ")
    if stop_signals[0] and not sys.flags.interactive:
        sys.exit(128 + stop_signals[0])
