"""ppo_continuous_action.py detail by detail (G1 to G11, M1 to M8, X1, X3, X4).

The oracles are independent: closed forms, quadratic sums, torch.optim and Stable-Baselines3.
"""

import io
import json
import math
import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from processes import leaves, scalars
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

import ppo_continuous_action as ppo

RUN = Path("runs/run")
COEFS = ("clip_coef", "ent_coef", "vf_coef", "max_grad_norm")


class Noise(gym.Env):
    """Observations and rewards are noise, seldom a hundred times as large.

    A fifth of the steps ends the episode. Keeps the actions since the last seed.
    """

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, render_mode=None, low=-1.0, high=1.0, shape=(2,), dtype=np.float32):
        self.action_space = Box(low, high, shape, dtype)

    def outlier(self):
        return 100.0 if self.np_random.random() < 0.02 else 1.0

    def observe(self):
        return self.np_random.normal((0, 5, -3), (1, 10, 0.1)) * self.outlier()

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.actions = []
        return self.observe(), {}

    def step(self, action):
        self.actions.append(action.copy())
        reward = np.float32((self.np_random.normal() + action.sum()) * self.outlier())
        terminated, truncated = self.np_random.random(2) < 0.1
        return self.observe(), reward, bool(terminated), bool(truncated), {}


class DictNoise(Noise):
    observation_space = Dict(
        b=Box(-np.inf, np.inf, (1,), np.float64), a=Box(-np.inf, np.inf, (2, 1), np.float64)
    )

    def observe(self):
        obs = super().observe()
        return {"b": obs[:1], "a": obs[1:, None]}


class Forgetful(Noise):
    """What it shows depends on how often anything was ever observed: no replay brings it back."""

    observed = 0

    def observe(self):
        Forgetful.observed += 1
        return super().observe() + Forgetful.observed


class Counter(Noise):
    """The observation is the number of steps since the reset, the reward too."""

    observation_space = Box(0, np.inf, (1,), np.float64)

    def reset(self, seed=None, options=None):
        self.count = -1
        return super().reset(seed=seed)

    def observe(self):
        self.count += 1
        return np.array([self.count], np.float64)

    def step(self, action):
        return self.observe(), self.count, False, False, {}


class Buffered(Noise):
    """Keeps its observation, the number of steps, in one array; an episode is three steps."""

    observation_space = Box(0, np.inf, (1,), np.float32)

    obs = None

    def reset(self, seed=None, options=None):
        if self.obs is None:
            self.obs = np.zeros(1, np.float32)
        self.obs[:] = 0
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, np.float32(0.1), bool(self.obs[0] == 3), False, {}


class Reversed(Noise):
    """Its observations are views that run backwards through memory."""

    def observe(self):
        return super().observe()[::-1]


class Scripted(Noise):
    """Rewards 1, -2, 4 and so on; the second step terminates, the fourth truncates."""

    def step(self, action):
        self.actions.append(action)
        steps = len(self.actions)
        return self.observe(), (-2.0) ** (steps - 1), steps == 2, steps == 4, {}


class Identity(gym.Env):
    """One step an episode; the reward is highest where the action equals the observation."""

    observation_space, action_space = Box(-1, 1, (1,)), Box(-2, 2, (1,))

    def __init__(self, render_mode=None):
        pass

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.obs = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.obs, {}

    def step(self, action):
        return self.obs, -float(((action - self.obs) ** 2).sum()), True, False, {}


ASYMMETRIC = {
    "low": np.array([-0.1, 0.2], np.float32),
    "high": np.array([0.3, 2.0], np.float32),
}
BOUNDS = {
    "Symmetric-v0": {},
    "Asymmetric-v0": ASYMMETRIC,
    "Unbounded-v0": {"low": -np.inf, "high": np.inf},
    "Shaped-v0": {"shape": (2, 3)},
    "Double-v0": {"dtype": np.float64},
    "Half-v0": {"dtype": np.float16},
}
for name, kwargs in BOUNDS.items():
    gym.register(name, Noise, kwargs=kwargs)
for env_class in (Noise, DictNoise, Forgetful, Buffered, Reversed, Scripted, Identity):
    gym.register(f"{env_class.__name__}-v0", env_class)
gym.register("Counter-v0", Counter, max_episode_steps=8)


class Outputs(nn.Module):
    """An agent whose parameters are its outputs: their gradients are those of the outputs."""

    def __init__(self, logprobs, values):
        super().__init__()
        self.logprobs, self.values = (nn.Parameter(torch.tensor(x)) for x in (logprobs, values))
        self.entropy = nn.Parameter(torch.full((len(logprobs),), 3.0))

    def forward(self, obs, actions):
        return self.logprobs, self.entropy, self.values


def loss_of_outputs(ratios, advantages, values, old_values, returns, **flags):
    """ppo_loss for these outputs of a network, with the clip range 0.2 whatever the flags say.

    Returns the loss, METRICS, and the gradients in logprobs, values and entropy.
    """
    agent = Outputs([-1.0] * len(ratios), values)
    data = {
        "logprobs": -1.0 - np.log(ratios),
        "advantages": advantages,
        "values": old_values,
        "returns": returns,
    }
    batch = {name: torch.tensor(x, dtype=torch.float32) for name, x in data.items()}
    batch |= {"obs": None, "actions": None}
    args = ppo.Args(**flags)
    loss, metrics = ppo.ppo_loss(agent, batch, as_coefs(args, clip_coef=0.2), args)
    grads = torch.autograd.grad(loss, [*agent.parameters()])
    return loss.item(), dict(zip(ppo.METRICS, metrics.tolist())), *grads


def as_coefs(args, **others):
    """The coefs that these flags give the first update of a run; others: other ones."""
    floats = {"lr": args.learning_rate} | {name: getattr(args, name) for name in COEFS}
    return {name: torch.tensor(value) for name, value in (floats | others).items()}


def flat(agent):
    return nn.utils.parameters_to_vector(agent.parameters()).detach()


def make_batch(agent, size, off_policy=0.3):
    """Random data for agent; off_policy: how far its logprobs and values are from the batch's."""
    obs = torch.randn(size, agent.critic[0].in_features)
    actions = torch.randn(size, agent.actor_logstd.shape[1])
    with torch.no_grad():
        logprobs, _, values = agent(obs, actions)
    return {
        "obs": obs,
        "actions": actions,
        "logprobs": logprobs + off_policy * torch.randn(size),
        "values": values + off_policy * torch.randn(size),
        "advantages": torch.randn(size),
        "returns": torch.randn(size),
    }


def learn(agent, batch, args, function=ppo.update_minibatches):
    """ppo.update of a copy of the agent: returns its parameters, the optimizer and METRICS."""
    agent = deepcopy(agent)
    optimizer = ppo.Adam(agent.parameters(), eps=1e-5)
    metrics = ppo.update(function, optimizer, agent, batch, None, as_coefs(args), args)
    return flat(agent), optimizer, metrics


def args_for(batch_size, **flags):
    return ppo.Args(num_steps=batch_size, **flags)


def raw_gradient(agent, batch, args):
    loss, _ = ppo.ppo_loss(agent, batch, as_coefs(args), args)
    grads = torch.autograd.grad(loss, [*agent.parameters()])
    return torch.cat([grad.flatten() for grad in grads])


def make_envs(env_id, num_envs, seed, gamma=0.99, obs_rms=None):
    """Environments as the script's main block makes them."""
    envs = [ppo.make_env(env_id) for _ in range(num_envs)]
    return ppo.VecNormalize(ppo.VecEnv(envs, seed, np.float64), gamma, obs_rms)


def first_seeds(seed, num_envs):
    """The seeds with which the environments of a run start their first episodes."""
    seeds = np.random.SeedSequence(seed).generate_state(num_envs)
    sequences = [np.random.SeedSequence((int(x), 0)) for x in seeds]
    return [int(sequence.generate_state(1)[0]) % 2**31 for sequence in sequences]


def quadratic_advantages(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
    """The definition of GAE: the exponentially weighted mean of all n-step advantages."""
    advantages = np.zeros(rewards.shape)
    for start, env in np.ndindex(rewards.shape):
        reward_sum, weight = 0.0, 1.0
        for n, step in enumerate(range(start, len(rewards)), 1):
            reward_sum += gamma ** (n - 1) * float(rewards[step, env])
            bootstrap = 0.0 if terminations[step, env] else gamma**n * float(next_values[step, env])
            last = dones[step, env] or step == len(rewards) - 1
            share = weight if last else weight * (1 - gae_lambda)
            advantages[start, env] += share * (reward_sum + bootstrap - float(values[start, env]))
            weight *= gae_lambda
            if last:
                break
    return advantages


@pytest.mark.parametrize(
    "advantage, ratio, flat_there",
    [
        (1.0, 1.21, True),
        (1.0, 1.19, False),
        (1.0, 0.5, False),
        (-1.0, 0.79, True),
        (-1.0, 0.81, False),
        (-1.0, 2.0, False),
    ],
)
def test_g1_policy_gradient_is_zero_exactly_where_the_ratio_has_left_the_band(
    advantage, ratio, flat_there
):
    flags = {"norm_adv": False, "clip_coef": 0.7}  # the annealed clip range counts, not the flag
    loss, metrics, grad, *_ = loss_of_outputs([ratio], [advantage], [0.0], [0.0], [0.0], **flags)
    clipped = np.clip(ratio, 0.8, 1.2) if flat_there else ratio
    assert loss == metrics["policy_loss"] == pytest.approx(-advantage * clipped)
    expected = 0.0 if flat_there else -advantage * ratio
    assert grad.item() == pytest.approx(expected, abs=0.0, rel=1e-5)
    assert metrics["clipfrac"] == float(abs(ratio - 1) > 0.2)


def test_g1_kl_metrics_are_the_two_estimates():
    ratios = np.array([0.5, 1.5, 3.0])
    _, metrics, *_ = loss_of_outputs(ratios, [0.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3)
    assert metrics["old_approx_kl"] == pytest.approx(-np.log(ratios).mean(), rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx((ratios - 1 - np.log(ratios)).mean(), rel=1e-5)


@pytest.mark.parametrize("bootstrap, expected", [(True, [1.843475, 0.95]), (False, [-2.812, -4.0])])
def test_g2_golden_case(bootstrap, expected):
    values = np.array([5.0, 5, 20, 20])
    truncated = np.array([False, True, False, False])
    columns = (np.ones(4), values, values, truncated & (not bootstrap), truncated)
    columns = (x[:, None] for x in columns)
    advantages = ppo.compute_advantages(*columns, 0.99, 0.95)
    np.testing.assert_allclose(advantages[:, 0], [*expected, 1.5524, 0.8], rtol=1e-10)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_g2_advantages_equal_a_quadratic_sum(gae_lambda):
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 40, 5))
    terminations, truncations = rng.random((2, 40, 5)) < 0.1
    dones = terminations | truncations
    next_values[:-1] = np.where(dones[:-1], next_values[:-1], values[1:])
    data = (rewards, values, next_values, terminations, dones, 0.99, gae_lambda)
    expected = quadratic_advantages(*data)
    np.testing.assert_allclose(ppo.compute_advantages(*data), expected, rtol=1e-9, atol=1e-9)


@pytest.fixture(params=["--bootstrap-truncated", "--no-bootstrap-truncated"])
def one_iteration(request, run_script):
    """The script after one iteration that keeps the weights; a truncation is its last step."""
    flags = (
        "--env-id Noise-v0 --seed 2 --num-envs 3 --num-steps 40 --total-timesteps 120 "
        "--num-minibatches 4 --gamma 0.9 --gae-lambda 0.8 --learning-rate 1e-20 "
        "--init-log-std -0.5 --eval-episodes 1 --no-compile"
    )
    return run_script(ppo.__file__, *flags.split(), request.param)


def check_advantages(run, batch, critic):
    """Those of a batch of one_iteration, and its returns, against this critic's values.

    Returns the expected ones and the values, (40, 3).
    """
    terminations, dones = np.zeros((2, 40, 3), bool)
    for step, end in run.episodes:
        dones[step, end.env] = True
        terminations[step, end.env] = end.ended_by == "termination"
    assert terminations.any() and (dones & ~terminations)[-1].any()
    with torch.no_grad():
        values = critic(torch.from_numpy(run.obs))[..., 0].numpy()
        last_values = critic(torch.from_numpy(run.envs.obs)).numpy().T
        next_values = np.concatenate((values[1:], last_values))
        for step, end in run.episodes:
            next_values[step, end.env] = critic(torch.from_numpy(end.final_obs)).item()
    terminal = terminations if run.args.bootstrap_truncated else dones
    expected = quadratic_advantages(run.rewards, values, next_values, terminal, dones, 0.9, 0.8)
    found = batch["advantages"].view(40, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    found = batch["returns"].view(40, 3)
    np.testing.assert_allclose(found, expected + values, rtol=1e-4, atol=1e-5)
    return expected, values


def test_g2_a_run_bootstraps_truncations_from_their_final_observation(one_iteration):
    run = one_iteration
    expected, values = check_advantages(run, run.batch, run.agent.critic)
    variance = 1 - np.var(expected) / np.var(expected + values)
    logged = scalars(run.run.folder, "losses/explained_variance")
    assert [*logged.values()] == pytest.approx([variance], rel=1e-3)


def test_explained_variance():
    returns = np.array([[1.0, 2.0], [3.0, 6.0]])
    values = np.array([[1.0, 1.0], [4.0, 4.0]])
    expected = 1 - np.var([0.0, 1.0, -1.0, 2.0]) / np.var([1.0, 2.0, 3.0, 6.0])
    assert ppo.explained_variance(values, returns) == pytest.approx(expected)
    assert np.isnan(ppo.explained_variance(values, np.ones((2, 2))))


def test_m5_m8_a_run_takes_the_log_probabilities_of_the_raw_actions(one_iteration):
    run = one_iteration
    batch = run.batch
    assert run.envs.gamma == 0.9
    assert torch.equal(run.agent.actor_logstd, torch.full((1, 2), -0.5))
    for name in ("obs", "actions"):
        assert torch.equal(batch[name].view(40, 3, -1), torch.from_numpy(getattr(run, name)))
    assert (batch["actions"].abs() > 1).any()
    assert all(np.abs(env.unwrapped.actions).max() <= 1 for env in run.envs.envs.envs)
    with torch.no_grad():
        logprobs, _, values = run.agent(batch["obs"], batch["actions"])
    torch.testing.assert_close(batch["logprobs"], logprobs)
    torch.testing.assert_close(batch["values"], values)


def test_g3_advantages_are_normalised_in_each_minibatch(monkeypatch):
    monkeypatch.setattr(torch, "randperm", torch.arange)
    agent = ppo.Agent(3, 2, (64, 64))
    args = args_for(64, num_minibatches=2, update_epochs=1)
    batch = make_batch(agent, 64)
    shifted = batch["advantages"].clone()
    shifted[32:] = 10 * shifted[32:] + 100
    plain, _, _ = learn(agent, batch, args)
    changed, _, _ = learn(agent, batch | {"advantages": shifted}, args)
    torch.testing.assert_close(changed, plain, rtol=0, atol=1e-6)
    other, _, _ = learn(agent, batch | {"advantages": shifted}, replace(args, norm_adv=False))
    assert (other - plain).abs().max() > 1e-4


def test_g3_normalised_advantages_are_golden():
    ratios, zeros = [1.1, 0.9, 1.0], [0.0] * 3
    loss, *_ = loss_of_outputs(ratios, [2.0, -2.0, 3.0], zeros, zeros, zeros)
    expected = -np.mean(np.array([1.0, -3.0, 2.0]) / math.sqrt(7) * ratios)
    assert loss == pytest.approx(expected, rel=1e-5)
    loss, *_ = loss_of_outputs([1.1, 0.9], [0.0, 2e-8], zeros[:2], zeros[:2], zeros[:2])
    assert loss == pytest.approx(0.1 / (1 + math.sqrt(2)), rel=1e-5)


@pytest.mark.parametrize(
    "value, old_value, ret, clip_vloss, loss, grad",
    [
        (0.1, 0.0, 1.0, True, 0.405, -0.9),  # inside the band
        (0.5, 0.0, 1.0, True, 0.32, 0.0),  # above the band and nearer to the return
        (0.5, 0.0, -1.0, True, 1.125, 1.5),  # above the band and farther from the return
        (-0.5, 0.0, -1.0, True, 0.32, 0.0),
        (-0.5, 0.0, 1.0, True, 1.125, -1.5),
        (1.5, 1.0, 2.0, True, 0.32, 0.0),
        (0.5, 0.0, 1.0, False, 0.125, -0.5),
    ],
)
def test_g4_value_loss_is_half_the_larger_of_clipped_and_unclipped(
    value, old_value, ret, clip_vloss, loss, grad
):
    data = ([1.0, 1.0], [0.0, 0.0], [value] * 2, [old_value] * 2, [ret] * 2)
    flags = {"clip_coef": 0.7, "clip_vloss": clip_vloss, "vf_coef": 1.0}
    _, metrics, _, value_grad, _ = loss_of_outputs(*data, **flags)
    assert metrics["value_loss"] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(value_grad, [grad / 2] * 2, rtol=1e-5, atol=0)


def test_g4_the_maximum_is_taken_before_the_mean():
    data = ([1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [1.0, -1.0])
    assert loss_of_outputs(*data)[1]["value_loss"] == pytest.approx((0.32 + 1.125) / 2, rel=1e-5)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, -2.2 + 0.5 * 0.405),
        ({"ent_coef": 0.01, "vf_coef": 0.25}, -2.2 - 0.01 * 3.0 + 0.25 * 0.405),
    ],
)
def test_g5_loss_is_the_sum_of_its_three_parts(flags, expected):
    data = ([1.1], [2.0], [0.1], [0.0], [1.0])
    loss, metrics, _, _, entropy_grad = loss_of_outputs(*data, norm_adv=False, **flags)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["entropy"] == 3.0
    assert entropy_grad.item() == pytest.approx(-flags.get("ent_coef", 0.0))


@pytest.mark.parametrize(
    "flag, lr_fractions, clip_fractions",
    [
        ("--anneal-clip", [1, 0.75, 0.5, 0.25], [1, 0.75, 0.5, 0.25]),
        ("--no-anneal-lr", [1] * 4, [1] * 4),
    ],
)
def test_g6_x1_learning_rate_and_clip_range_fall_to_an_nth(
    run_script, monkeypatch, flag, lr_fractions, clip_fractions
):
    """The other coefficients stay, and all of them reach Adam and the loss as tensors."""
    used = []
    clamp = torch.clamp

    def spy(x, *bounds, **named):
        main = sys.modules["__main__"]
        if bounds:
            used.append([main.coefs[name].item() for name in ("lr", *COEFS)])
        return clamp(x, *bounds, **named)

    monkeypatch.setattr(torch, "clamp", spy)
    flags = (
        "--env-id Noise-v0 --num-steps 8 --num-minibatches 2 --update-epochs 3 --no-clip-vloss "
        "--total-timesteps 39 --eval-episodes 1 --no-compile --run-name run "
        "--ent-coef 0.02 --vf-coef 0.3 --max-grad-norm 0.7"
    )
    run_script(ppo.__file__, *flags.split(), flag)
    fractions = np.repeat(np.c_[lr_fractions, clip_fractions, np.ones((4, 3))], 6, 0)
    np.testing.assert_allclose(used, fractions * (3e-4, 0.2, 0.02, 0.3, 0.7), rtol=1e-6)
    logged = [*scalars(RUN, "charts/learning_rate").values()]
    np.testing.assert_allclose(logged, 3e-4 * np.array(lr_fractions), rtol=1e-6)


@pytest.mark.parametrize("num_minibatches", [5, 6, 8])
def test_g7_every_epoch_is_a_new_permutation_in_minibatches(num_minibatches):
    args, calls = args_for(120, num_minibatches=num_minibatches, update_epochs=3), []

    def spy(optimizer, agent, batch, indices, coefs, args):
        calls.append(indices)
        return ppo.update_minibatches(optimizer, agent, batch, indices, coefs, args)

    agent = ppo.Agent(3, 2, (64, 64))
    _, optimizer, _ = learn(agent, make_batch(agent, 120), args, spy)
    assert optimizer.steps == 3 * num_minibatches
    minibatches = torch.cat(calls)
    assert minibatches.shape == (3 * num_minibatches, 120 // num_minibatches)
    epochs = minibatches.view(3, 120)
    assert torch.equal(epochs.sort(1).values, torch.arange(120).expand(3, 120))
    assert len({tuple(epoch) for epoch in [*epochs.tolist(), list(range(120))]}) == 4


def test_g7_each_minibatch_is_one_step_on_its_own_rows():
    together = ppo.Agent(3, 2, (64, 64))
    args = args_for(24)
    apart = deepcopy(together)
    coefs = as_coefs(args)
    batch, indices = make_batch(together, 24), torch.randperm(24).view(3, 8)
    optimizer = ppo.Adam(together.parameters(), eps=1e-5)
    total = ppo.update_minibatches(optimizer, together, batch, indices, coefs, args)
    optimizer = ppo.Adam(apart.parameters(), eps=1e-5)
    total_apart = 0
    for row in indices:
        part = {name: x[row] for name, x in batch.items()}
        order = torch.arange(8)[None]
        metrics = ppo.update_minibatches(optimizer, apart, part, order, coefs, args)
        total_apart = total_apart + metrics
    assert torch.equal(flat(together), flat(apart)) and torch.equal(total, total_apart)


@pytest.mark.parametrize("scale, norm", [(1e4, 0.5), (1e-3, None)])
def test_g8_gradient_of_actor_and_critic_is_clipped_to_one_norm(scale, norm):
    agent = ppo.Agent(3, 2, (64, 64))
    args = args_for(32, num_minibatches=1, update_epochs=1, norm_adv=False)
    batch = make_batch(agent, 32)
    batch["advantages"] *= scale
    batch["returns"] = batch["values"] + batch["returns"] * scale
    grad = raw_gradient(agent, batch, args)
    expected = grad if norm is None else grad / grad.norm() * norm
    _, optimizer, _ = learn(agent, batch, args)
    found = torch.cat([x.flatten() for x in optimizer.exp_avg]) * 10
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_g9_layers_are_orthogonal_with_their_gains_and_no_bias():
    agent = ppo.Agent(17, 6, (64, 64))
    for network, gain in ((agent.actor_mean, 0.01), (agent.critic, 1.0)):
        for layer, expected in zip(network[::2], (math.sqrt(2), math.sqrt(2), gain), strict=True):
            weight = layer.weight if layer.out_features <= layer.in_features else layer.weight.T
            square = expected**2 * torch.eye(len(weight))
            torch.testing.assert_close(
                weight @ weight.T, square, rtol=1e-4, atol=1e-5 * expected**2
            )
            assert not layer.bias.any()


def test_g10_rollouts_are_segments_of_fixed_length_that_go_on_where_the_last_ended():
    identity = ppo.RunningMeanStd(1)  # statistics that change nothing
    identity.var = np.full(1, 1 - 1e-8)
    envs = make_envs("Counter-v0", 2, 1, obs_rms=identity)
    agent = ppo.Agent(1, 2, (64, 64))
    segments = [ppo.rollout(agent, envs, 5) for _ in range(3)]
    seen = np.stack([segment[0] for segment in segments])
    expected = np.array([[0, 1, 2, 3, 4], [5, 6, 7, 0, 1], [2, 3, 4, 5, 6]])
    assert np.array_equal(seen, np.broadcast_to(expected[:, :, None, None], (3, 5, 2, 1)))
    assert [segment[4].sum() for segment in segments] == [0, 2, 0] and segments[1][4][2].all()
    assert not any(segment[3].any() for segment in segments)
    ends = [(step, *episode[:4]) for step, episode in segments[1][5]]
    assert ends == [(2, i, 36.0, 8, "truncation") for i in range(2)]
    assert [episode.final_obs.tolist() for _, episode in segments[1][5]] == [[8.0], [8.0]]


def test_final_observations_outlast_the_reset():
    """Of an environment that writes all its observations into one array, too."""
    envs = ppo.VecEnv([ppo.make_env("Buffered-v0")], 1, np.float32)
    episodes = [episode for _ in range(6) for episode in envs.step(np.zeros((1, 2)))[3]]
    assert [episode.final_obs.tolist() for episode in episodes] == [[3.0], [3.0]]
    assert [episode.episode_return for episode in episodes] == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("eps", [1e-5, 1e-8])
def test_g11_adam_equals_that_of_torch_optim(eps):
    """Over 300 steps of gradients of all sizes, with learning rates that change."""
    params = [torch.randn(3, 4), torch.randn(5), torch.randn(())]
    twins = [nn.Parameter(x.clone()) for x in params]
    ours, theirs = (
        ppo.Adam([nn.Parameter(x) for x in params], eps),
        torch.optim.Adam(twins, eps=eps),
    )
    for step in range(300):
        lr = 3e-4 * (1 - step / 300)
        grads = [torch.randn_like(x) * 10.0 ** float(torch.randint(-7, 3, ())) for x in twins]
        ours.step(grads, torch.tensor(lr))
        theirs.param_groups[0]["lr"] = lr
        for twin, grad in zip(twins, grads):
            twin.grad = grad
        theirs.step()
    assert ours.steps == 300
    for param, twin, before in zip(ours.params, twins, params):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
    for m, v, twin in zip(ours.exp_avg, ours.exp_avg_sq, twins):
        torch.testing.assert_close(m.data, theirs.state[twin]["exp_avg"], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(v.data, theirs.state[twin]["exp_avg_sq"], rtol=1e-4, atol=1e-9)


def test_g11_steps_equal_those_of_adam_with_epsilon_1e_minus_5():
    agent = ppo.Agent(3, 2, (64, 64))
    args = args_for(32, num_minibatches=1, update_epochs=3, max_grad_norm=1e-4)
    batch = make_batch(agent, 32)
    params, optimizer, _ = learn(agent, batch, args)
    twin = deepcopy(agent)
    adam = torch.optim.Adam(twin.parameters(), lr=3e-4, eps=1e-5)
    for _ in range(3):
        loss, _ = ppo.ppo_loss(twin, batch, as_coefs(args), args)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1e-4)
        adam.step()
    torch.testing.assert_close(params, flat(twin), rtol=0, atol=1e-7)
    assert (params - flat(agent)).abs().max() > 1e-6


class SeededOnce(gym.Wrapper):
    """Gives a seed to its first reset."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.seed = seed

    def reset(self, **kwargs):
        seed, self.seed = self.seed, None
        return self.env.reset(seed=seed)


def test_m1_m2_m3_m4_normalisation_equals_vec_normalize():
    envs = make_envs("Noise-v0", 3, 5, gamma=0.9)
    raw = [SeededOnce(gym.make("Noise-v0", disable_env_checker=True), x) for x in first_seeds(5, 3)]
    theirs = VecNormalize(DummyVecEnv([lambda env=env: env for env in raw]), gamma=0.9)
    np.testing.assert_allclose(envs.obs, theirs.reset(), rtol=1e-6)
    kinds, largest_obs, largest_reward, sums = set(), 0.0, 0.0, np.zeros(3)
    for actions in np.random.default_rng(0).uniform(-1, 1, (300, 3, 2)).astype(np.float32):
        rewards, terminations, truncations, episodes = envs.step(actions)
        obs, their_rewards, dones, infos = theirs.step(actions)
        sums += theirs.get_original_reward()
        np.testing.assert_allclose(envs.obs, obs, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(rewards, their_rewards, rtol=1e-6)
        np.testing.assert_allclose(envs.discounted_returns, theirs.returns, rtol=1e-12)
        assert np.array_equal(terminations | truncations, dones)
        assert [episode.env for episode in episodes] == list(np.flatnonzero(dones))
        for i, episode_return, _, ended_by, final_obs in episodes:
            terminal_obs = infos[i]["terminal_observation"]
            np.testing.assert_allclose(final_obs, terminal_obs, rtol=1e-6, atol=1e-7)
            assert (ended_by == "truncation") == infos[i]["TimeLimit.truncated"]
            assert terminations[i] == (ended_by == "termination")
            assert episode_return == pytest.approx(sums[i], rel=1e-5, abs=1e-4)
            kinds.add(ended_by)
        sums[dones] = 0
        largest_obs = max(largest_obs, abs(obs).max())
        largest_reward = max(largest_reward, abs(rewards).max())
    for ours, reference in ((envs.obs_rms, theirs.obs_rms), (envs.return_rms, theirs.ret_rms)):
        for name in ("mean", "var", "count"):
            np.testing.assert_allclose(getattr(ours, name), getattr(reference, name), rtol=1e-9)
    assert kinds == {"termination", "truncation"} and largest_obs == largest_reward == 10.0


def test_m1_statistics_are_golden():
    rms = ppo.RunningMeanStd(())
    assert rms.mean.dtype == rms.var.dtype == np.float64
    rms.update(np.array([3.0]))
    var = 0.0001 * (1.0001 + 9) / 1.0001**2
    expected = (3 / 1.0001, var, 1.0001)
    np.testing.assert_allclose((rms.mean, rms.var, rms.count), expected, rtol=1e-12)
    rms.mean, rms.var = np.ones(()), np.zeros(())
    assert rms.normalize(np.array([1 + 1e-5])) == pytest.approx(0.1, rel=1e-6)


def test_m1_statistics_count_the_observations_of_resets():
    envs = make_envs("Noise-v0", 3, 1)
    np.testing.assert_allclose(envs.obs_rms.count, 3.0001, rtol=1e-12)
    np.testing.assert_allclose(envs.obs_rms.mean, envs.envs.obs.sum(0) / 3.0001, rtol=1e-12)


def test_m2_observations_are_clipped_to_10():
    rms = ppo.RunningMeanStd(3)
    clipped = rms.normalize(np.array([[1e6, -11.0, 9.5]]))
    np.testing.assert_allclose(clipped, [[10.0, -10.0, 9.5]], rtol=1e-6)
    assert clipped.dtype == np.float32


def test_m3_m4_rewards_are_golden_over_a_termination_and_a_truncation():
    gamma, seen, discounted = 0.5, [], 0.0
    envs = make_envs("Scripted-v0", 1, 1, gamma)
    for step, ends in enumerate((False, True, False, True, False, False)):
        reward = (-2.0) ** step
        discounted = gamma * discounted + reward
        seen.append(discounted)
        count, mean = len(seen) + 1e-4, sum(seen) / (len(seen) + 1e-4)
        var = (1e-4 + sum(x * x for x in seen)) / count - mean**2
        expected = np.clip(reward / math.sqrt(var + 1e-8), -10, 10)
        rewards, _, _, episodes = envs.step(np.zeros((1, 2)))
        np.testing.assert_allclose(rewards, [expected], rtol=1e-7)
        assert bool(episodes) == ends
        discounted = 0.0 if ends else discounted
        np.testing.assert_allclose(envs.discounted_returns, [discounted], rtol=1e-12)


@pytest.mark.parametrize("action", [1e6, -1e6])
def test_m4_rewards_are_clipped_to_10(action):
    envs = make_envs("Unbounded-v0", 1, 1)
    for _ in range(200):
        envs.step(np.zeros((1, 2)))
    rewards, *_ = envs.step(np.full((1, 2), action))
    assert rewards == 10.0 * np.sign(action)


def test_m5_log_probabilities_equal_those_of_a_multivariate_normal():
    agent = ppo.Agent(3, 4, (64, 64))
    agent.actor_logstd.data = torch.tensor([[-1.0, 0.0, 0.5, 1.0]])
    obs, actions = torch.randn(20, 3), torch.randn(20, 4)
    covariance = torch.diag(agent.actor_logstd[0].exp() ** 2)
    normal = torch.distributions.MultivariateNormal(agent.actor_mean(obs), covariance)
    logprobs, entropy, values = agent(obs, actions)
    torch.testing.assert_close(logprobs, normal.log_prob(actions), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, normal.entropy(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, agent.critic(obs)[:, 0])


@pytest.mark.parametrize("given, expected", [((), 0.0), ((-0.5,), -0.5)])
def test_m5_log_std_is_one_free_parameter_per_action_dimension(given, expected):
    agent = ppo.Agent(3, 4, (64, 64), *given)
    assert isinstance(agent.actor_logstd, nn.Parameter)
    assert torch.equal(agent.actor_logstd.detach().flatten(), torch.full((4,), expected))
    agent(torch.randn(5, 3), torch.randn(5, 4))[0].sum().backward()
    assert agent.actor_logstd.grad.all()


def test_m5_rollout_adds_noise_of_that_std_to_the_mean():
    agent = ppo.Agent(3, 2, (64, 64))
    envs = make_envs("Noise-v0", 3, 1)
    agent.actor_logstd.data = torch.tensor([[-3.0, 1.0]])
    agent.actor_mean[4].weight.data *= 100
    torch.manual_seed(7)
    obs, actions, *_ = ppo.rollout(agent, envs, 20)
    torch.manual_seed(7)
    noise = torch.randn(20, 3, 2) * torch.tensor([math.exp(-3), math.exp(1)])
    expected = agent.actor_mean(torch.from_numpy(obs)).detach() + noise
    torch.testing.assert_close(torch.from_numpy(actions), expected, rtol=1e-5, atol=1e-5)


def test_m6_networks_are_two_tanh_layers_of_64():
    assert ppo.Args().hidden_sizes == (64, 64)
    agent = ppo.Agent(17, 6, (64, 64))
    for network, outputs in ((agent.actor_mean, 6), (agent.critic, 1)):
        kinds = [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
        assert [type(layer) for layer in network] == kinds
        shapes = [tuple(layer.weight.shape) for layer in network[::2]]
        assert shapes == [(64, 17), (64, 64), (outputs, 64)]


@pytest.mark.parametrize("extra", [[], [nn.LayerNorm(6)]], ids=["numpy", "torch"])
def test_m6_numpy_mlp_equals_the_module_and_keeps_a_copy_of_its_weights(extra):
    network = ppo.mlp(17, (64, 64), 6, std=1.0).extend(extra)
    obs = torch.randn(50, 17)
    for layer in network[:5:2]:
        nn.init.normal_(layer.bias)
    policy = ppo.numpy_mlp(network)
    expected = network(obs).detach().numpy()
    network[4].weight.data.zero_()
    np.testing.assert_allclose(policy(obs.numpy()), expected, rtol=1e-5, atol=1e-6)


def test_m7_policy_and_value_share_nothing():
    agent = ppo.Agent(3, 2, (64, 64))
    batch = make_batch(agent, 32)

    def gradients(batch, args):
        """{parameter: whether it has any}"""
        loss, _ = ppo.ppo_loss(agent, batch, as_coefs(args), args)
        agent.zero_grad()
        loss.backward()
        return {name: bool(x.grad.any()) for name, x in agent.named_parameters()}

    value_only = gradients(batch | {"advantages": torch.zeros(32)}, ppo.Args())
    policy_only = gradients(batch, ppo.Args(vf_coef=0.0))
    assert value_only == {name: name.startswith("critic.") for name in value_only}
    assert policy_only == {name: name.startswith("actor_") for name in policy_only}


@pytest.mark.parametrize("env_id", BOUNDS)
def test_m8_environment_gets_the_clipped_action_and_the_buffer_the_raw_one(env_id):
    envs = make_envs(env_id, 2, 1)
    space = envs.action_space
    agent = ppo.Agent(3, gym.spaces.flatdim(space), (64, 64), 1.0)
    _, actions, *_ = ppo.rollout(agent, envs, 30)
    low, high = space.low.ravel(), space.high.ravel()
    assert actions.shape == (30, 2, space.low.size) and abs(actions.std() - math.e) < 0.5
    for i, env in enumerate(envs.envs.envs):
        received = np.stack(env.unwrapped.actions)
        assert all(space.contains(action) for action in received)
        expected = np.clip(actions[:, i], low, high)
        rtol = 1e-3 if space.dtype == np.float16 else 1e-6
        np.testing.assert_allclose(received.reshape(30, -1), expected, rtol=rtol)


@pytest.mark.parametrize("target_kl, epochs", [(0.02, 2), (None, 5), (1.0, 5), (1e-9, 1)])
def test_x3_an_epoch_whose_mean_kl_is_past_the_target_is_the_last(target_kl, epochs):
    # The means of the epochs are 0.015, 0.0267, 0, ...
    kls = iter([0.0, 0.01, 0.035, 0.05, 0.02, 0.01] + [0.0] * 9)
    steps = []

    def step_minibatches(optimizer, agent, batch, indices, coefs, args):
        steps.append(next(kls))
        metrics = torch.full((len(ppo.METRICS),), 7.0 * len(indices))
        metrics[ppo.METRICS.index("approx_kl")] = steps[-1] * len(indices)
        return metrics

    agent = ppo.Agent(3, 2, (64, 64))
    args = args_for(36, num_minibatches=6, update_epochs=5, target_kl=target_kl)
    _, _, metrics = learn(agent, {"obs": torch.zeros(36, 3)}, args, step_minibatches)
    assert len(steps) == 3 * epochs
    expected = dict.fromkeys(ppo.METRICS, 7.0) | {"approx_kl": np.mean(steps)}
    assert dict(zip(ppo.METRICS, metrics.tolist())) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("recompute", [True, False])
def test_x4_each_epoch_has_the_advantages_of_the_values_before_it(one_iteration, recompute):
    """Where they are recomputed. The log-probabilities are always those of the rollout."""
    run, calls = one_iteration, []
    args = replace(run.args, recompute_advantages=recompute, update_epochs=3)
    per_epoch = args.num_minibatches // run.PER_CALL

    def spy(optimizer, agent, batch, *rest):
        calls.append((batch, deepcopy(agent.critic)))
        return run.update_minibatches(optimizer, agent, batch, *rest)

    coefs = run.coefs | {"lr": torch.tensor(0.01)}
    run.update(spy, run.optimizer, run.agent, run.batch, run.estimate, coefs, args)
    assert len(calls) == 3 * per_epoch
    assert calls[0][0] is run.batch
    assert not torch.equal(calls[0][1][0].weight, calls[-1][1][0].weight)
    for number, (batch, _) in enumerate(calls):
        critic = calls[number // per_epoch * per_epoch if recompute else 0][1]
        _, values = check_advantages(run, batch, critic)
        torch.testing.assert_close(batch["values"].view(40, 3), torch.from_numpy(values))
        for name in ("obs", "actions", "logprobs"):
            assert torch.equal(batch[name], run.batch[name])


def test_x4_a_run_recomputes_its_advantages(run_script):
    flags = "--num-steps 64 --total-timesteps 64 --num-minibatches 4 --no-compile --eval-episodes 1"
    found = {}
    for extra in ("", "--recompute-advantages"):
        for epochs in (1, 2):
            name = f"{epochs}{extra}"
            words = f"{flags} --update-epochs {epochs} --run-name {name} {extra}".split()
            found[extra, epochs] = flat(run_script(ppo.__file__, *words).agent)
    assert torch.equal(found["", 1], found["--recompute-advantages", 1])
    assert not torch.equal(found["", 2], found["--recompute-advantages", 2])


def sb3_parameters(policy):
    """SB3's parameters in the order of Agent's."""
    value_net, policy_net = policy.mlp_extractor.value_net, policy.mlp_extractor.policy_net
    layers = (value_net[0], value_net[2], policy.value_net)
    layers += (policy_net[0], policy_net[2], policy.action_net)
    return [policy.log_std, *(p for layer in layers for p in layer.parameters())]


def test_oracle_update_equals_that_of_stable_baselines3(monkeypatch):
    flags = {"ent_coef": 0.01, "clip_vloss": False, "num_minibatches": 4, "update_epochs": 3}
    size = 64
    agent = ppo.Agent(3, 2, (64, 64), -0.3)
    names = [name for name, _ in agent.named_parameters()]
    assert names[0] == "actor_logstd"
    assert names[1].startswith("critic") and names[-1].startswith("actor_mean")
    batch, before = make_batch(agent, size), flat(agent)
    # Its value loss is a mean of squares without the half
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([lambda: gym.make("Noise-v0")]),
        n_steps=size,
        batch_size=16,
        n_epochs=3,
        learning_rate=3e-4,
        ent_coef=0.01,
        vf_coef=0.25,
        max_grad_norm=0.5,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    for theirs, ours in zip(sb3_parameters(model.policy), agent.parameters(), strict=True):
        theirs.data = ours.detach().view(theirs.shape).clone()
    buffer = model.rollout_buffer
    twins = {"observations": "obs", "log_probs": "logprobs"}
    for name in ("observations", "actions", "log_probs", "values", "advantages", "returns"):
        values = batch[twins.get(name, name)].numpy()
        setattr(buffer, name, values.reshape(getattr(buffer, name).shape))
    buffer.full = True
    np.random.seed(3)
    model.train()
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(np.random.permutation(n)))
    np.random.seed(3)
    params, _, metrics = learn(agent, batch, args_for(size, **flags))
    expected = torch.cat([p.detach().flatten() for p in sb3_parameters(model.policy)])
    torch.testing.assert_close(params, expected, rtol=0, atol=1e-6)
    assert (params - before).abs().max() > 1e-3
    logged = model.logger.name_to_value
    metrics = dict(zip(ppo.METRICS, metrics.tolist()))
    for name, factor, their_name in (
        ("policy_loss", 1, "policy_gradient_loss"),
        ("value_loss", 2, "value_loss"),
        ("entropy", -1, "entropy_loss"),
        ("clipfrac", 1, "clip_fraction"),
    ):
        logged_value = logged[f"train/{their_name}"]
        assert metrics[name] * factor == pytest.approx(logged_value, rel=1e-4, abs=1e-6)


def test_ratio_is_one_on_the_first_minibatch_of_every_update(run_script):
    flags = (
        "--num-steps 256 --total-timesteps 1024 --num-minibatches 1 --update-epochs 1 "
        "--learning-rate 0.01 --eval-episodes 1 --no-compile --run-name run"
    )
    run_script(ppo.__file__, *flags.split())
    for tag, tolerance in (("approx_kl", 1e-6), ("old_approx_kl", 1e-5), ("clipfrac", 0.0)):
        values = [*scalars(RUN, f"losses/{tag}").values()]
        np.testing.assert_allclose(values, np.zeros(4), atol=tolerance)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
def test_compiled_update_equals_eager_over_50_minibatches():
    agent = ppo.Agent(17, 6, (64, 64))
    args = args_for(640, num_minibatches=10, update_epochs=5)
    batch = make_batch(agent, 640, off_policy=0.0)
    function = ppo.compile_or_not(ppo.update_minibatches, args, torch.device("cpu"))
    assert args.compile and function is not ppo.update_minibatches
    results = {}
    for name, step_minibatches in (("eager", ppo.update_minibatches), ("compiled", function)):
        torch.manual_seed(3)
        results[name] = learn(agent, batch, args, step_minibatches)
    eager, optimizer, metrics = results["eager"]
    compiled, compiled_optimizer, compiled_metrics = results["compiled"]
    assert optimizer.steps == compiled_optimizer.steps == 50
    assert (eager - flat(agent)).abs().max() > 3e-3
    torch.testing.assert_close(compiled, eager, rtol=0, atol=3e-6)
    torch.testing.assert_close(compiled_metrics, metrics, rtol=1e-4, atol=1e-5)


def test_a_new_coefficient_does_not_compile_again():
    """So that a copy of the script can lower --ent-coef over the run."""
    torch._dynamo.reset()  # what other tests compiled counts as a first version
    args = ppo.Args(num_minibatches=1, update_epochs=1)
    agent = ppo.Agent(3, 2, (4,))
    optimizer = ppo.Adam(agent.parameters(), eps=1e-5)
    batch = make_batch(agent, 6)
    update = torch.compile(ppo.update_minibatches, fullgraph=True, dynamic=False, backend="eager")
    with torch._dynamo.config.patch(trace_autograd_ops=True, error_on_recompile=True):
        for value in (0.1, 0.2, 0.3):
            coefs = as_coefs(args, **dict.fromkeys(("lr", *COEFS), value))
            update(optimizer, agent, batch, torch.randperm(6).view(1, 6), coefs, args)


# Environments


def test_dict_observations_are_flattened():
    envs, env = make_envs("DictNoise-v0", 1, 1), gym.make("DictNoise-v0")
    obs, _ = env.reset(seed=first_seeds(1, 1)[0])
    assert envs.obs.shape == (1, 3)
    for _ in range(10):
        flattened = np.concatenate([obs["b"].ravel(), obs["a"].ravel()])
        np.testing.assert_array_equal(envs.envs.obs[0], flattened)
        envs.step(np.zeros((1, 2)))
        obs, _, terminated, truncated, _ = env.step(np.zeros(2))
        obs = env.reset()[0] if terminated or truncated else obs


def play(envs, steps):
    """Everything that envs gives for steps actions."""
    results = []
    shape = (steps, len(envs.obs), gym.spaces.flatdim(envs.action_space))
    for actions in np.random.default_rng(1).normal(size=shape).astype(np.float32):
        *arrays, episodes = envs.step(actions)
        ends = [(*end, final_obs.tolist()) for *end, final_obs in episodes]
        results.append((envs.obs.tolist(), [x.tolist() for x in arrays], ends))
    return results


def saved(part):
    """The state of a part of a run as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(part.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "env_id, steps",
    [
        ("HalfCheetah-v5", 100),
        ("DictNoise-v0", 23),
        ("DictNoise-v0", 0),
        ("Noise-v0", 2500),
        ("Reversed-v0", 23),
    ],
)
def test_environments_go_on_from_a_saved_state_bit_for_bit(env_id, steps, capsys):
    """For any number of episodes since the last seed; after 1,000 steps comes a new one."""
    envs = make_envs(env_id, 2, 1)
    play(envs, steps)
    state = saved(envs)
    assert all(len(actions) < 1100 for actions in state["envs"]["actions"])
    other = make_envs(env_id, 2, 1)
    play(other, 7)
    other.load_state_dict(state)
    assert np.array_equal(other.obs, envs.obs)
    assert play(other, 40) == play(envs, 40)
    assert leaves(saved(other)) == leaves(saved(envs))
    assert not capsys.readouterr().out


def test_an_environment_that_does_not_come_back_starts_an_episode(capsys):
    """The statistics go on."""
    envs = make_envs("Forgetful-v0", 2, 1)
    play(envs, 22)
    other = make_envs("Forgetful-v0", 2, 1)
    other.load_state_dict(saved(envs))
    assert capsys.readouterr().out.count("can't be brought back exactly") == 2
    assert other.envs.actions == [[], []]
    assert envs.discounted_returns.any() and not other.discounted_returns.any()
    for name in ("obs_rms", "return_rms"):
        ours, theirs = (getattr(x, name).state_dict() for x in (other, envs))
        assert leaves(ours) == leaves(theirs)
    play(other, 3)


def test_evaluation_plays_mean_actions_and_leaves_the_statistics(monkeypatch):
    made, make_env = [], ppo.make_env
    monkeypatch.setattr(
        ppo, "make_env", lambda *x, **named: made.append(make_env(*x, **named)) or made[-1]
    )
    envs = make_envs("Noise-v0", 2, 1)
    agent = ppo.Agent(3, 2, (64, 64))
    agent.actor_mean[4].weight.data *= 100
    play(envs, 20)
    before = leaves(saved(envs))
    args = ppo.Args(env_id="Noise-v0", eval_episodes=7)
    found = ppo.evaluate(agent, envs, args, None)
    assert leaves(saved(envs)) == before
    env, actions, returns = gym.make("Noise-v0"), [], [0.0]
    obs, _ = env.reset(seed=first_seeds((1, 1), 1)[0])
    while len(returns) <= 7:
        with torch.no_grad():
            mean = agent.actor_mean(torch.from_numpy(envs.obs_rms.normalize(obs[None]))).numpy()
        actions.append(mean[0].clip(-1, 1))
        obs, reward, terminated, truncated, _ = env.step(actions[-1])
        returns[-1] += float(reward)
        if terminated or truncated:
            obs, _ = env.reset()
            returns.append(0.0)
    np.testing.assert_allclose(made[-1].unwrapped.actions, actions, rtol=1e-4, atol=1e-6)
    found = [episode.episode_return for episode in found]
    np.testing.assert_allclose(found, returns[:7], rtol=1e-4)


def test_identity_environment_is_solved(run_script):
    flags = (
        "--env-id Identity-v0 --total-timesteps 8192 --num-steps 512 --num-minibatches 4 "
        "--learning-rate 0.003 --eval-episodes 200 --no-compile"
    )
    module = run_script(ppo.__file__, *flags.split())
    returns = json.loads((module.run.folder / "evaluation.json").read_text())["returns"]
    assert np.mean(returns) > -0.01  # -0.33 for actions of zero


# The policy is written once, in Agent. Each of these changes one or two of its methods

AGENT = """
    def __init__(self, obs_dim, action_dim, hidden_sizes, init_log_std=0.0):
        super().__init__()
        self.critic = mlp(obs_dim, hidden_sizes, 1, std=1.0)
        self.actor = mlp(obs_dim, hidden_sizes, 2 * action_dim, std=1.0)
{init}
{methods}
"""
BETA = '''
    def distribution(self, obs):
        alpha, beta = (1 + nn.functional.softplus(self.actor(obs))).chunk(2, 1)
        return torch.distributions.Beta(alpha, beta, validate_args=False)

    def forward(self, obs, actions):
        """Actions from -1 to 1."""
        distribution = self.distribution(obs)
        x = (actions + 1) / 2
        logprobs = (distribution.log_prob(x) - math.log(2)).sum(1)
        return logprobs, (distribution.entropy() + math.log(2)).sum(1), self.value(obs)

    def noise(self, num_steps, num_envs):
        return torch.randint(2**31, (num_steps, num_envs)).numpy()

    @torch.no_grad()
    def policy(self):
        agent = copy.deepcopy(self)

        def play(obs, noise):
            x = agent.distribution(torch.from_numpy(obs))
            a, b = (x.detach().numpy() for x in (x.concentration1, x.concentration0))
            x = a / (a + b)
            if np.ndim(noise):
                x = np.stack([np.random.default_rng(s).beta(p, q) for s, p, q in zip(noise, a, b)])
            return (2 * x - 1).clip(-0.999, 0.999).astype(np.float32)

        return play
'''
DEVIATION = """
    def forward(self, obs, actions):
        mean, logstd = self.actor(obs).chunk(2, 1)
        normal = torch.distributions.Normal(mean, logstd.exp(), validate_args=False)
        return normal.log_prob(actions).sum(1), normal.entropy().sum(1), self.value(obs)

    def noise(self, num_steps, num_envs):
        return torch.randn(num_steps, num_envs, self.actor[-1].out_features // 2).numpy()

    def policy(self):
        network = numpy_mlp(self.actor)

        def play(obs, noise):
            mean, logstd = np.split(network(obs), 2, 1)
            return mean + np.exp(logstd) * noise

        return play
"""
VALUE = """
    def value(self, obs):
        return self.critic(obs).squeeze(1)
"""
NORM = """        for name in ("actor", "critic"):
            layers = list(getattr(self, name))
            layers[1] = nn.Sequential(nn.LayerNorm(hidden_sizes[0]), nn.ReLU())
            layers[3] = nn.ReLU()
            setattr(self, name, nn.Sequential(*layers))"""
POLICIES = {
    "beta": ("", BETA + VALUE),
    "deviation": ("", DEVIATION + VALUE),
    "relu-layernorm": (NORM, DEVIATION + VALUE),
}


def density(kind, outputs, actions):
    """The log-density of actions, by the textbook, from what the actor's network gives: (n,)."""
    first, second = np.split(outputs.astype(np.float64), 2, 1)
    if kind == "beta":
        alpha, beta = (1 + np.logaddexp(0.0, x) for x in (first, second))
        x = (actions + 1) / 2
        norm = np.vectorize(lambda a, b: math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b))
        logs = (alpha - 1) * np.log(x) + (beta - 1) * np.log1p(-x) - norm(alpha, beta) - math.log(2)
    else:
        noise = (actions - first) / np.exp(second)
        logs = -0.5 * noise**2 - second - 0.5 * math.log(2 * math.pi)
    return logs.sum(1)


@pytest.mark.parametrize("kind", POLICIES)
def test_a_policy_is_changed_in_agent_alone(run_script, tmp_path, kind):
    """It plays, learns, and is evaluated; its log-probabilities are right."""
    text = Path(ppo.__file__).read_text()
    start = text.index("    def __init__(self, obs_dim, action_dim, hidden_sizes")
    end = text.index("\n\n# ----", start)
    init, methods = POLICIES[kind]
    copy = tmp_path / "copy.py"
    copy.write_text(text[:start] + AGENT.format(init=init, methods=methods) + text[end:])
    flags = (
        "--env-id Noise-v0 --num-envs 2 --num-steps 64 --num-minibatches 2 --update-epochs 3"
        " --total-timesteps 640 --learning-rate 1e-3 --eval-episodes 5 --no-compile --run-name run"
    )
    run = run_script(copy, *flags.split())
    assert len(json.loads((RUN / "evaluation.json").read_text())["returns"]) == 5

    # Played with the weights as they are now
    obs, actions, *_, episodes = run.rollout(run.agent, run.envs, 200)
    batch, *_ = run.predict(run.agent, obs, actions, run.envs.obs, episodes, torch.device("cpu"))
    with torch.no_grad():
        outputs = run.agent.actor(batch["obs"]).numpy()
        logprobs, entropy, _ = run.agent(batch["obs"], batch["actions"])
    expected = density(kind, outputs, batch["actions"].numpy())
    np.testing.assert_allclose(logprobs.numpy(), expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(batch["logprobs"].numpy(), expected, rtol=1e-3, atol=1e-3)
    # The actions are samples of it: on average their log-probability is minus the entropy
    error = expected.mean() + entropy.numpy().mean()
    assert abs(error) < 4 * expected.std() / math.sqrt(len(expected))


class Parts(gym.Env):
    """Observations of two parts, of which each declares integers but has fractions."""

    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, kind):
        self.kind = kind
        box = gym.spaces.Box(-9, 9, (1, 2), np.int64)
        kinds = {
            "tuple": gym.spaces.Tuple([box, gym.spaces.Discrete(3)]),
            "dict": gym.spaces.Dict(a=box, b=gym.spaces.Discrete(3)),
            "box": box,
        }
        self.observation_space = kinds[kind]

    def observe(self):
        box = np.full((1, 2), 0.25)
        return {"tuple": (box, 1), "dict": {"a": box, "b": 1}, "box": box}[self.kind]

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 1.0, True, False, {"episode": 1, "statistics": 2}


class Repaired(gym.Wrapper):
    """Makes five values of the four that the environment within returns."""

    def step(self, action):
        obs, reward, terminated, info = self.env.step(action)
        return obs, reward, terminated, False, info


class FourValues(Parts):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


@pytest.mark.parametrize("kind, size", [("tuple", 5), ("dict", 5), ("box", 2)])
def test_observations_keep_fractions_that_their_space_does_not_declare(kind, size):
    gym.register("Parts-v0", Parts, kwargs={"kind": kind})
    envs = ppo.VecEnv([ppo.make_env("Parts-v0")], 1, np.float64)
    assert envs.obs.tolist() == [[0.25, 0.25, 0, 1, 0][:size]]
    _, _, _, (episode,) = envs.step(np.zeros((1, 1), np.float32))
    assert episode.final_obs.tolist() == envs.obs[0].tolist()
    gym.registry.pop("Parts-v0")


def test_an_environment_is_checked_with_the_wrappers_that_its_author_gave_it(capsys):
    gym.register("Four-v0", lambda: FourValues("box"), max_episode_steps=9)
    gym.register("Five-v0", lambda: Repaired(FourValues("box")), max_episode_steps=9)
    ppo.make_env("Five-v0")
    with pytest.raises(SystemExit) as stop:
        ppo.make_env("Four-v0")
    assert stop.value.code == 2
    assert "step() of Four-v0 must return 5 values" in capsys.readouterr().err
    gym.registry.pop("Four-v0")
    gym.registry.pop("Five-v0")


def test_a_new_seed_comes_with_the_first_episode_after_steps_per_seed_steps():
    """An episode of this toy has 7 steps."""
    for steps_per_seed, seeds in ((7, 2), (8, 1)):
        envs = [ppo.make_env("toys:ContinuousSame-v0")]
        envs = ppo.VecEnv(envs, 1, np.float64, steps_per_seed)
        for _ in range(7):
            envs.step(np.zeros((1, 2)))
        assert envs.seed_counts.tolist() == [seeds]


def test_an_evaluation_cuts_an_episode_that_does_not_end(monkeypatch):
    made, make_env = [], ppo.make_env
    envs = make_envs("Noise-v0", 1, 1)
    monkeypatch.setattr(ppo, "make_env", lambda *x, **named: made.append(named) or make_env(*x))
    envs.for_evaluation("Noise-v0", 1, None)
    assert made == [{"max_steps": 100000}]


def test_loaded_statistics_count_at_once():
    envs = make_envs("Noise-v0", 2, 1)
    play(envs, 20)
    other = make_envs("Noise-v0", 2, 1)
    before = other.obs
    other.load_statistics(saved(envs))
    assert np.array_equal(other.obs, envs.obs_rms.normalize(other.envs.obs))
    assert not np.array_equal(other.obs, before)
