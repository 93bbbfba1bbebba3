"""CleanRL's PPO, written anew from its documentation, https://docs.cleanrl.dev/rl-algorithms/ppo/

    python -m benchmark.speed.cleanrl CONFIG

What its ppo, ppo_continuous_action and ppo_atari compute: gymnasium's wrappers and SyncVectorEnv, a
forward pass for each step, an eager update. Unlike CleanRL, it logs nothing. CONFIG: see sb3.
"""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
from gymnasium import wrappers
from torch import nn
from torch.distributions import Categorical, Normal


def make_env(script, args):
    """An environment in the wrappers of CleanRL's script."""
    if script == "ppo_atari":
        return make_game(args.env_id)
    env = gym.make(args.env_id)
    if script == "ppo":
        return wrappers.RecordEpisodeStatistics(env)
    env = wrappers.RecordEpisodeStatistics(wrappers.FlattenObservation(env))
    env = wrappers.NormalizeObservation(wrappers.ClipAction(env))
    space = env.observation_space
    env = wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), space)
    env = wrappers.NormalizeReward(env, args.gamma)
    return wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))


def make_game(env_id):
    import ale_py  # noqa: F401, registers the games
    from stable_baselines3.common import atari_wrappers

    env = wrappers.RecordEpisodeStatistics(gym.make(env_id))
    env = atari_wrappers.NoopResetEnv(env, noop_max=30)
    env = atari_wrappers.MaxAndSkipEnv(env, skip=4)
    env = atari_wrappers.EpisodicLifeEnv(env)
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = atari_wrappers.FireResetEnv(env)
    env = atari_wrappers.ClipRewardEnv(env)
    env = wrappers.GrayscaleObservation(wrappers.ResizeObservation(env, (84, 84)))
    return wrappers.FrameStackObservation(env, 4)


def layer_init(layer, std=np.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs, sizes, outputs, std):
    layers = []
    for size in sizes:
        layers += [layer_init(nn.Linear(inputs, size)), nn.Tanh()]
        inputs = size
    return nn.Sequential(*layers, layer_init(nn.Linear(inputs, outputs), std))


class Agent(nn.Module):
    """Policy and value, networks of their own unless observations are frames."""

    def __init__(self, obs_space, action_space, args):
        super().__init__()
        is_box = isinstance(action_space, gym.spaces.Box)
        outputs = action_space.shape[0] if is_box else action_space.n
        self.logstd = nn.Parameter(torch.zeros(1, outputs)) if is_box else None
        self.network = None
        inputs, sizes = obs_space.shape[0], getattr(args, "hidden_sizes", ())
        if len(obs_space.shape) == 3:
            inputs = 512
            self.network = nn.Sequential(
                layer_init(nn.Conv2d(4, 32, 8, stride=4)),
                nn.ReLU(),
                layer_init(nn.Conv2d(32, 64, 4, stride=2)),
                nn.ReLU(),
                layer_init(nn.Conv2d(64, 64, 3)),
                nn.ReLU(),
                nn.Flatten(),
                layer_init(nn.Linear(3136, inputs)),
                nn.ReLU(),
            )
        self.critic = mlp(inputs, sizes, 1, std=1.0)
        self.actor = mlp(inputs, sizes, outputs, std=0.01)

    def forward(self, obs, actions=None):
        """Actions, drawn unless they are given, their log-probabilities, entropies and values."""
        hidden = self.network(obs / 255.0) if self.network else obs
        outputs = self.actor(hidden)
        values = self.critic(hidden).flatten()
        if self.logstd is None:
            policy = Categorical(logits=outputs)
        else:
            policy = Normal(outputs, self.logstd.expand_as(outputs).exp())
        if actions is None:
            actions = policy.sample()
        logprobs, entropy = policy.log_prob(actions), policy.entropy()
        if self.logstd is not None:
            logprobs, entropy = logprobs.sum(1), entropy.sum(1)
        return actions, logprobs, entropy, values


def compute_advantages(rewards, values, dones, last_value, last_done, args):
    """GAE. dones[t]: an episode begins at the observation of step t; a truncation ends one too."""
    values = [*values, last_value]
    dones = [*dones, last_done]
    advantages = torch.zeros_like(rewards)
    advantage = 0
    for step in reversed(range(len(rewards))):
        goes_on = 1.0 - dones[step + 1]
        delta = rewards[step] + args.gamma * values[step + 1] * goes_on - values[step]
        advantage = delta + args.gamma * args.gae_lambda * goes_on * advantage
        advantages[step] = advantage
    return advantages


def update(agent, optimizer, batch, args):
    """A step of Adam on a minibatch; returns the metrics that CleanRL computes for its logs."""
    _, logprobs, entropy, values = agent(batch["obs"], batch["actions"])
    logratio = logprobs - batch["logprobs"]
    ratio = logratio.exp()
    with torch.no_grad():
        old_approx_kl = (-logratio).mean()
        approx_kl = (ratio - 1 - logratio).mean()
        clipfrac = ((ratio - 1.0).abs() > args.clip_coef).float().mean().item()
    advantages = batch["advantages"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped_ratio = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()
    errors = (values - batch["returns"]) ** 2
    if args.clip_vloss:
        change = torch.clamp(values - batch["values"], -args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (batch["values"] + change - batch["returns"]) ** 2)
    value_loss = 0.5 * errors.mean()
    loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * value_loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    return old_approx_kl, approx_kl, clipfrac


def train(script, args):
    """Trains as CleanRL's script does -> marks."""
    torch.set_num_threads(args.num_threads)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    makers = [lambda: make_env(script, args)] * args.num_envs
    same_step = gym.vector.AutoresetMode.SAME_STEP
    envs = gym.vector.SyncVectorEnv(makers, autoreset_mode=same_step)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions = torch.zeros(shape + envs.single_action_space.shape)
    logprobs, rewards, dones, values = torch.zeros(4, *shape)
    next_obs = torch.Tensor(envs.reset(seed=args.seed)[0])
    next_done = torch.zeros(args.num_envs)
    batch_size = args.num_steps * args.num_envs
    num_iterations = args.total_timesteps // batch_size
    marks = []
    for iteration in range(num_iterations):
        if args.anneal_lr:
            remaining = 1.0 - iteration / num_iterations
            optimizer.param_groups[0]["lr"] = remaining * args.learning_rate
        for step in range(args.num_steps):
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprobs[step], _, values[step] = agent(next_obs)
            actions[step] = action
            next_obs, reward, terminations, truncations, _ = envs.step(action.numpy())
            rewards[step] = torch.tensor(reward)
            next_obs = torch.Tensor(next_obs)
            next_done = torch.Tensor(terminations | truncations)
        with torch.no_grad():
            last_value = agent(next_obs)[3]
            advantages = compute_advantages(rewards, values, dones, last_value, next_done, args)
        batch = {"obs": obs, "actions": actions, "logprobs": logprobs, "values": values}
        batch |= {"advantages": advantages, "returns": advantages + values}
        batch = {name: x.flatten(0, 1) for name, x in batch.items()}
        indices = np.arange(batch_size)
        for _ in range(args.update_epochs):
            np.random.shuffle(indices)
            for rows in np.split(indices, args.num_minibatches):
                update(agent, optimizer, {name: x[rows] for name, x in batch.items()}, args)
        marks.append(((iteration + 1) * batch_size, time.time()))
    return marks


if __name__ == "__main__":
    args = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text())["args"])
    print(json.dumps(train(args.exp_name, args)))
