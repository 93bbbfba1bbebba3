"""ppo.py: what differs from ppo_continuous_action.py, whose tests hold for what both share."""

import importlib.util
import inspect
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Categorical

import ppo
import ppo_continuous_action

SPACES = {
    "Plain-v0": Discrete(4),
    "Started-v0": Discrete(3, start=-1),
    "TwoParts-v0": MultiDiscrete([3, 2]),
    "Grid-v0": MultiDiscrete([[3, 2], [2, 4]], start=[[5, 0], [0, 1]]),
}


class Toy(gym.Env):
    """Episodes of 3 to 17 steps; the odd ones end by termination, the others by truncation.

    Masks are random, but the first action is always allowed; any other than an allowed one is an
    error. An action is best where its first part equals the sign of the observation.

    With the environment variable TOY_FAULT="SIGKILL 100", the process gets that signal in the
    hundredth step of all its environments.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    steps = 0

    def __init__(self, render_mode=None, action_space=None, masked=True):
        self.action_space = action_space or gym.spaces.Discrete(4)
        self.masked = masked
        self.actions = []
        self.obs_seen = []
        self.masks_seen = []
        if isinstance(self.action_space, gym.spaces.Discrete):
            self.nvec = [self.action_space.n]
        else:
            self.nvec = np.ravel(self.action_space.nvec)

    def observe(self):
        self.mask = tuple((self.np_random.random(n) < 0.5).astype(np.int8) for n in self.nvec)
        for part in self.mask:
            part[0] = 1
        self.x = self.np_random.normal(size=3)
        self.obs_seen.append(self.x)
        self.masks_seen.append(np.hstack(self.mask))
        if not self.masked:
            return self.x, {}
        return self.x, {"action_mask": self.mask[0] if len(self.mask) == 1 else self.mask}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.end = self.np_random.integers(3, 18)
        return self.observe()

    def step(self, action):
        Toy.steps += 1
        name, fault_step = os.environ.get("TOY_FAULT", "none 0").split()
        if Toy.steps == int(fault_step):
            os.kill(os.getpid(), getattr(signal, name))
        assert self.action_space.contains(action), action
        parts = np.ravel(action) - np.ravel(self.action_space.start)
        if self.masked:
            assert all(mask[part] for mask, part in zip(self.mask, parts)), (self.mask, parts)
        self.actions.append(parts)
        reward = float((parts[0] > 0) == (self.x[0] > 0))
        self.t += 1
        done = bool(self.t >= self.end)
        odd = bool(self.end % 2)
        obs, info = self.observe()
        return obs, reward, done and odd, done and not odd, info


for env_id, space in SPACES.items():
    gym.register(env_id, Toy, kwargs={"action_space": space})
gym.register("Unmasked-v0", Toy, kwargs={"masked": False})

TOY = f"""
import os
import signal

import gymnasium as gym
import numpy as np


{inspect.getsource(Toy)}

gym.register("Toy-v0", Toy)
"""


class Outputs(nn.Module):
    """An agent whose parameters are its outputs: their gradient is the gradient in the outputs."""

    def __init__(self, logprobs, entropy, values):
        super().__init__()
        self.logprobs = nn.Parameter(logprobs)
        self.entropy = nn.Parameter(entropy)
        self.values = nn.Parameter(values)

    def forward(self, obs, actions):
        return self.logprobs, self.entropy, self.values


def make_envs(script, env_id, num_envs, seed=1):
    return script.VecEnv([script.make_env(env_id) for _ in range(num_envs)], seed)


def sizes(envs):
    """Returns obs_dim and nvec, as an Agent takes them."""
    nvec = envs.action_space.nvec.tolist()
    return envs.obs.shape[1] - sum(nvec), nvec


def flat(agent):
    """A copy of the parameters."""
    return nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def exact(x):
    """x with its tensors as bytes: equal only if all of it is equal to the bit."""
    if isinstance(x, dict):
        return {name: exact(part) for name, part in x.items()}
    if isinstance(x, list | tuple):
        return [exact(part) for part in x]
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.numpy().tobytes()
    if isinstance(x, np.ndarray):
        return x.dtype, x.shape, x.tobytes()
    return x


def random_outputs(n):
    """An agent of random outputs, and a batch whose log-probabilities and values are others."""
    agent = Outputs(torch.randn(n), torch.rand(n), torch.randn(n))
    batch = {
        "obs": None,
        "actions": None,
        "logprobs": agent.logprobs.detach() + 0.3 * torch.randn(n),
        "values": torch.randn(n),
        "advantages": torch.randn(n),
        "returns": torch.randn(n),
    }
    return agent, batch


def as_coefs(args, **others):
    """The coefs that these flags give an update; others: those that change during a run."""
    names = ("clip_coef", "ent_coef", "vf_coef", "max_grad_norm")
    floats = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return ppo.as_tensors("cpu", **floats | others)


def loss_and_gradient(function, agent, batch, coefs, args):
    params = flat(agent).requires_grad_()
    loss, metrics = function(params, agent, batch, coefs, args)
    (grads,) = torch.autograd.grad(loss, params)
    return loss.detach(), metrics, grads


def test_loss_equals_that_of_ppo_continuous_action():
    for flags in (
        {"ent_coef": 0.01},
        {"ent_coef": 0.01, "norm_adv": False},
        {"ent_coef": 0.01, "clip_vloss": False},
        {"ent_coef": 0.3, "vf_coef": 2.0},
    ):
        agent, batch = random_outputs(64)
        results = []
        for script in (ppo, ppo_continuous_action):
            args = script.Args(**flags)
            coefs = as_coefs(args)
            results.append(loss_and_gradient(script.ppo_loss, agent, batch, coefs, args))
        for ours, theirs in zip(*results):
            assert torch.equal(ours, theirs), flags
        assert results[0][1][ppo.METRICS.index("clipfrac")] > 0.2


def test_penalty_takes_the_place_of_all_clipping():
    """Equation 8 of the paper, and its gradient in closed form."""
    agent, batch = random_outputs(64)
    args = ppo.Args(kl_penalty=True, norm_adv=False, ent_coef=0.0, vf_coef=0.5)
    coefs = as_coefs(args, kl_coef=3.0)
    loss, metrics, grads = loss_and_gradient(ppo.ppo_loss, agent, batch, coefs, args)
    logratio = agent.logprobs.detach() - batch["logprobs"]
    ratio = logratio.exp()
    errors = agent.values.detach() - batch["returns"]
    kl = (ratio - 1 - logratio).mean()
    policy_loss = -(batch["advantages"] * ratio).mean()
    torch.testing.assert_close(loss, policy_loss + 3.0 * kl + 0.25 * (errors**2).mean())

    in_logprobs = (-batch["advantages"] * ratio + 3.0 * (ratio - 1)) / 64
    torch.testing.assert_close(grads, torch.cat((in_logprobs, torch.zeros(64), 0.5 * errors / 64)))
    assert metrics[ppo.METRICS.index("approx_kl")] == pytest.approx(kl.item())
    assert metrics[ppo.METRICS.index("clipfrac")] == 0


def test_coefficients_follow_the_kl():
    """The penalty doubles above 1.5 times the target and halves below its 1.5th part.

    The learning rate falls above twice the target and rises below half of it.
    """
    for kl, kl_coef, learning_rate in (
        (0.0151, 2.0, 1e-3),
        (0.0149, 1.0, 1e-3),
        (0.0067, 1.0, 1e-3),
        (0.0066, 0.5, 1e-3),
        (0.0201, 2.0, 1e-3 / 1.5),
        (0.0199, 2.0, 1e-3),
        (0.0051, 0.5, 1e-3),
        (0.0049, 0.5, 1.5e-3),
    ):
        controller = ppo.KLController(0.01, 1e-3)
        controller.update(kl)
        assert controller.kl_coef == kl_coef
        assert controller.learning_rate == pytest.approx(learning_rate, rel=1e-12)


def test_coefficients_stay_within_limits():
    controller = ppo.KLController(0.01, 1.1e-6)
    for _ in range(30):
        controller.update(9.0)
    assert (controller.kl_coef, controller.learning_rate) == (1e6, 1e-6)
    for _ in range(60):
        controller.update(0.0)
    assert (controller.kl_coef, controller.learning_rate) == (1e-6, 1e-2)


def test_adapted_coefficients_are_used_and_logged(run_script, monkeypatch):
    """A run of two iterations against one that ends after the first, with the same minibatches.

    The KL of the rollout after the update is far above the target, the mean of losses/approx_kl
    isn't.
    """
    monkeypatch.setattr(torch, "randperm", torch.arange)
    flags = "--env-id Plain-v0 --num-steps 32 --learning-rate 0.003 --kl-penalty --adaptive-lr"
    flags = f"{flags} --kl-target 0.006 --no-compile --no-cuda --eval-episodes 1".split()
    one = run_script(ppo.__file__, *flags, "--total-timesteps", "128", "--run-name", "one")
    two = run_script(ppo.__file__, *flags, "--total-timesteps", "256", "--run-name", "two")

    expected = [(0.003, 1.0)]
    controller = ppo.KLController(0.006, 0.003)
    for module in (one, two):
        with torch.no_grad():
            logprobs, _, _ = module.agent(module.batch["obs"], module.batch["actions"])
        ratio = (logprobs - module.batch["logprobs"]).exp()
        controller.update((ratio - 1 - ratio.log()).mean().item())
        expected.append((controller.learning_rate, controller.kl_coef))
        assert module.controller.state_dict() == controller.state_dict()
    assert len(set(expected)) == 3
    events = EventAccumulator(str(two.run.folder)).Reload()
    learning_rates = [scalar.value for scalar in events.Scalars("charts/learning_rate")]
    coefs = [scalar.value for scalar in events.Scalars("losses/coef")]
    np.testing.assert_allclose(list(zip(learning_rates, coefs)), expected[:2], rtol=1e-6)

    lr, kl_coef = expected[1]
    coefs = as_coefs(one.args, lr=lr, kl_coef=kl_coef)
    ppo.update(ppo.update_minibatches, one.optimizer, one.agent, two.batch, coefs, one.args)
    assert torch.equal(flat(one.agent), flat(two.agent))


@pytest.mark.parametrize("env_id", SPACES)
def test_agent_equals_independent_categorical_distributions(env_id):
    """Masked actions have probability 0, the others are renormalised."""
    envs = make_envs(ppo, env_id, 16)
    obs_dim, nvec = sizes(envs)
    agent = ppo.Agent(obs_dim, nvec, (64, 64))
    agent.actor[4].weight.data *= 100
    rows = torch.from_numpy(envs.obs)
    masks = rows[:, obs_dim:]
    assert (masks == 0).any()
    with torch.no_grad():
        weights = agent.actor(rows[:, :obs_dim]).exp() * masks
        parts = [Categorical(probs=part) for part in weights.split(nvec, 1)]
        actions = torch.stack([part.sample() for part in parts], 1)
        logprobs, entropy, values = agent(rows, actions)
        expected_values = agent.critic(rows[:, :obs_dim]).squeeze(1)
        torch.testing.assert_close(agent.value(rows), expected_values)
    expected = sum(part.log_prob(action) for part, action in zip(parts, actions.unbind(1)))
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    expected = sum(part.entropy() for part in parts)
    torch.testing.assert_close(entropy, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, expected_values)

    logits = torch.from_numpy(agent.numpy_policy()(envs.obs))
    probabilities = torch.cat([part.softmax(1) for part in logits.split(nvec, 1)], 1)
    expected = torch.cat([part.probs for part in parts], 1)
    torch.testing.assert_close(probabilities, expected, rtol=1e-3, atol=1e-5)
    assert (probabilities[masks == 0] == 0).all()
    best = torch.stack([part.probs.argmax(1) for part in parts], 1)
    assert np.array_equal(agent.argmax_parts(logits.numpy()), best)


@pytest.mark.parametrize("env_id", SPACES)
def test_rollouts_keep_to_the_masks(env_id):
    """Toy refuses any other action; it gets what is stored, counted from its own start."""
    envs = make_envs(ppo, env_id, 3)
    obs_dim, nvec = sizes(envs)
    agent = ppo.Agent(obs_dim, nvec, (64, 64))
    obs, actions, _, terminations, truncations, episodes = ppo.rollout(agent, envs, 200)
    for i, env in enumerate(envs.envs):
        assert np.array_equal(env.unwrapped.actions, actions[:, i])
    for k, mask in enumerate(np.split(obs[..., obs_dim:], np.cumsum(nvec)[:-1], 2)):
        assert np.take_along_axis(mask, actions[..., k, None], 2).all()
        assert 0.4 < mask.mean() < 0.9
    assert terminations.sum() > 10 and truncations.sum() > 10
    assert len(episodes) == (terminations | truncations).sum()


def test_rollouts_sample_the_policy():
    envs = make_envs(ppo, "Unmasked-v0", 8)
    agent = ppo.Agent(*sizes(envs), (64, 64))
    agent.actor[4].weight.data.zero_()
    agent.actor[4].bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    _, actions, *_ = ppo.rollout(agent, envs, 1000)
    frequencies = np.bincount(actions.ravel(), minlength=4) / actions.size
    np.testing.assert_allclose(frequencies, [0.1, 0.2, 0.3, 0.4], atol=0.02)


def test_episodes_end_with_their_true_last_observation():
    """After a termination and after a truncation; the next row of obs is the reset's."""
    envs = make_envs(ppo, "Plain-v0", 3)
    seen = [env.unwrapped.obs_seen for env in envs.envs]
    for observations in seen:
        del observations[:-1]  # all but that of the present reset
    agent = ppo.Agent(3, [4], (64, 64))
    obs, _, rewards, terminations, truncations, episodes = ppo.rollout(agent, envs, 100)
    for i, observations in enumerate(seen):
        expected = []
        position = 0
        for step in range(100):
            np.testing.assert_allclose(obs[step, i, :3], observations[position], rtol=1e-6)
            position += 1
            if terminations[step, i] or truncations[step, i]:
                ended_by = "termination" if terminations[step, i] else "truncation"
                expected.append((step, ended_by, observations[position].astype(np.float32)))
                position += 1
        ended = [(step, e.ended_by, e.final_obs[:3]) for step, e in episodes if e.env == i]
        assert exact(ended) == exact(expected)
        assert {ended_by for _, ended_by, _ in ended} == {"termination", "truncation"}

    starts = [0, 0, 0]
    for step, episode in episodes:
        i = episode.env
        assert episode.length == step + 1 - starts[i]
        assert episode.episode_return == pytest.approx(rewards[starts[i] : step + 1, i].sum())
        starts[i] = step + 1


def test_observations_of_any_fixed_size_are_flattened():
    class Mixed(gym.Env):
        observation_space = Dict({"a": Discrete(3), "b": Box(-1, 1, (2, 2))})
        action_space = Discrete(2)

        def __init__(self, render_mode=None):
            pass

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return {"a": 1, "b": np.full((2, 2), 0.5, np.float32)}, {}

    gym.register("Mixed-v0", Mixed)
    envs = make_envs(ppo, "Mixed-v0", 1)
    assert envs.obs.tolist() == [[0, 1, 0, 0.5, 0.5, 0.5, 0.5, 1, 1]]


def test_a_mask_that_allows_nothing_ends_the_run(capsys):
    class Stuck(Toy):
        def observe(self):
            obs, _ = super().observe()
            return obs, {"action_mask": (np.ones(3), np.zeros(2))}

    gym.register("Stuck-v0", Stuck, kwargs={"action_space": MultiDiscrete([3, 2])})
    envs = make_envs(ppo, "Stuck-v0", 1)
    with pytest.raises(SystemExit) as stop:
        ppo.rollout(ppo.Agent(3, [3, 2], (64, 64)), envs, 1)
    assert stop.value.code == 1
    assert "allows no action" in capsys.readouterr().err


@pytest.mark.parametrize("mask", [np.ones(3), np.ones(1), (np.ones(2), np.ones(3))], ids=str)
def test_a_mask_of_another_size_ends_the_run(mask, capsys):
    class Masked(Toy):
        def observe(self):
            obs, _ = super().observe()
            return obs, {"action_mask": mask}

    gym.register("Masked-v0", Masked)
    with pytest.raises(SystemExit) as stop:
        make_envs(ppo, "Masked-v0", 1)
    assert stop.value.code == 1
    assert f"an action_mask is {np.hstack(mask).shape}, not (4,)" in capsys.readouterr().err


def test_the_end_of_an_episode_may_allow_nothing():
    class Over(Toy):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            mask = info["action_mask"] * (not terminated)
            return obs, reward, terminated, truncated, {"action_mask": mask}

    gym.register("Over-v0", Over)
    envs = make_envs(ppo, "Over-v0", 2)
    *_, episodes = ppo.rollout(ppo.Agent(3, [4], (64, 64)), envs, 100)
    assert any(not episode.final_obs[3:].any() for _, episode in episodes)


def sb3_parameters(policy):
    """SB3's parameters in the order of Agent's."""
    value_net = policy.mlp_extractor.value_net
    policy_net = policy.mlp_extractor.policy_net
    critic = (value_net[0], value_net[2], policy.value_net)
    actor = (policy_net[0], policy_net[2], policy.action_net)
    return [parameter for layer in critic + actor for parameter in layer.parameters()]


def train_sb3(model, agent, batch):
    """Trains SB3's model, from the agent's weights, on a batch; returns the flat parameters."""
    model.set_logger(Logger(None, []))
    for theirs, ours in zip(sb3_parameters(model.policy), agent.parameters(), strict=True):
        theirs.data = ours.detach().clone()
    buffer = model.rollout_buffer
    arrays = {"observations": batch["obs"][:, : agent.obs_dim]}
    for name in ("actions", "advantages", "returns"):
        arrays[name] = batch[name]
    if "logprobs" in batch:
        arrays |= {"log_probs": batch["logprobs"], "values": batch["values"]}
    for name, array in arrays.items():
        setattr(buffer, name, array.numpy().reshape(getattr(buffer, name).shape))
    buffer.full = True
    model.train()
    return torch.cat([p.detach().flatten() for p in sb3_parameters(model.policy)])


def random_batch(agent, size):
    """Random data of every kind, with masks that allow everything."""
    obs = torch.randn(size, agent.obs_dim)
    actions = torch.stack([torch.randint(n, (size,)) for n in agent.nvec], 1)
    batch = {"obs": torch.cat((obs, torch.ones(size, sum(agent.nvec))), 1), "actions": actions}
    with torch.no_grad():
        logprobs, _, values = agent(batch["obs"], batch["actions"])
    batch["logprobs"] = logprobs + 0.3 * torch.randn(size)
    batch["values"] = values + 0.3 * torch.randn(size)
    batch["advantages"] = torch.randn(size)
    batch["returns"] = torch.randn(size)
    return batch


@pytest.mark.parametrize("env_id", ["CartPole-v1", "TwoParts-v0"])
def test_update_equals_that_of_stable_baselines3(monkeypatch, env_id):
    args = ppo.Args(clip_vloss=False, num_minibatches=4, update_epochs=3)
    agent = ppo.Agent(*sizes(make_envs(ppo, env_id, 1)), (64, 64))
    batch = random_batch(agent, 64)
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([lambda: gym.make(env_id)]),
        n_steps=64,
        batch_size=16,
        n_epochs=3,
        learning_rate=1e-3,
        ent_coef=0.01,
        vf_coef=0.25,
        max_grad_norm=0.5,
        device="cpu",
    )
    np.random.seed(3)
    expected = train_sb3(model, agent, batch)

    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(np.random.permutation(n)))
    np.random.seed(3)
    before = flat(agent)
    optimizer = ppo.FlatAdam(agent, eps=1e-5)
    coefs = as_coefs(args, lr=1e-3)
    ppo.update(ppo.update_minibatches, optimizer, agent, batch, coefs, args)
    torch.testing.assert_close(flat(agent), expected, rtol=0, atol=2e-6)
    assert (flat(agent) - before).abs().max() > 3e-3


def compare_compiled(script, run_update):
    """Runs run_update(compiled or not, agent) from the same weights; returns both results."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(3)
        agent = script.Agent(5, [3, 2], (64, 64))
        before = flat(agent)
        metrics = run_update(compiled, agent)
        assert (flat(agent) - before).abs().max() > 3e-3
        results.append((flat(agent), metrics))
    return results


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


@needs_compiler
def test_compiled_update_equals_eager():
    """With masks, several parts, and the penalty."""
    args = ppo.Args(kl_penalty=True)
    step_minibatches = ppo.compile_or_not(ppo.update_minibatches, args, torch.device("cpu"))
    assert step_minibatches is not ppo.update_minibatches

    def run_update(compiled, agent):
        batch = random_batch(agent, 256)
        batch["obs"][::3, -1] = 0
        batch["actions"][::3, 1] = 0
        optimizer = ppo.FlatAdam(agent, eps=1e-5)
        function = step_minibatches if compiled else ppo.update_minibatches
        coefs = as_coefs(args, lr=1e-3, kl_coef=2.0)
        return ppo.update(function, optimizer, agent, batch, coefs, args)

    eager, compiled = compare_compiled(ppo, run_update)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=3e-6)


def play(envs, steps):
    """Everything that envs give for steps random actions that the masks allow."""
    rng = np.random.default_rng(1)
    obs_dim, nvec = sizes(envs)
    agent = ppo.Agent(obs_dim, nvec, (64, 64))
    results = []
    for _ in range(steps):
        scores = rng.random((len(envs.envs), sum(nvec))) * envs.obs[:, obs_dim:]
        results.append((envs.step(agent.argmax_parts(scores)), envs.obs.copy()))
    return exact(results)


needs_box2d = pytest.mark.skipif(not importlib.util.find_spec("Box2D"), reason="needs Box2D")


@pytest.mark.parametrize(
    "env_id, steps",
    [
        ("CartPole-v1", 1200),  # they have new seeds by then
        pytest.param("LunarLander-v3", 150, marks=needs_box2d),
        ("Acrobot-v1", 30),
        ("Taxi-v4", 30),
        ("Grid-v0", 23),
        ("Plain-v0", 0),
    ],
)
def test_environments_go_on_from_a_saved_state_bit_for_bit(env_id, steps, capsys):
    envs = make_envs(ppo, env_id, 2)
    play(envs, steps)
    for env in envs.envs:
        assert len(env.actions) == steps if steps < 1000 else 0 < len(env.actions) < 200
    file = io.BytesIO()
    torch.save(envs.state_dict(), file)
    file.seek(0)
    other = make_envs(ppo, env_id, 2, seed=99)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert exact(other.obs) == exact(envs.obs)
    assert play(other, 100) == play(envs, 100)
    assert exact(other.state_dict()) == exact(envs.state_dict())
    assert not capsys.readouterr().out


def test_a_masked_environment_that_cannot_be_replayed_starts_a_new_episode(capsys):
    class Moody(gym.Env):
        observation_space = Box(-1, 1, (2,))
        action_space = Discrete(2)
        allowed = 0

        def __init__(self, render_mode=None):
            pass

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return [0.0, 0.5], {"action_mask": np.eye(2)[self.allowed]}

        def step(self, action):
            return [0.0, 1.0], 0.0, False, False, {"action_mask": np.eye(2)[self.allowed]}

    gym.register("Moody-v0", Moody)
    envs = make_envs(ppo, "Moody-v0", 1)
    assert envs.obs.tolist() == [[0, 0.5, 1, 0]]  # a list will do for an array
    envs.step(np.array([[0]]))
    envs.envs[0].unwrapped.allowed = 1
    envs.load_state_dict(envs.state_dict())
    assert "can't be brought back" in capsys.readouterr().out
    assert envs.obs.tolist() == [[0, 0.5, 0, 1]]


def test_evaluation_plays_the_likeliest_allowed_actions(monkeypatch):
    """Twice the same, and other observations than in training."""
    made = []
    make_env = ppo.make_env

    def spy(*args, **kwargs):
        made.append(make_env(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(ppo, "make_env", spy)
    agent = ppo.Agent(3, [3, 2], (64, 64))
    agent.actor[4].weight.data *= 100
    args = ppo.Args(env_id="TwoParts-v0", eval_episodes=5)
    results = [ppo.evaluate(agent, args) for _ in range(2)]
    assert results[0] == results[1]
    assert len(results[0]["returns"]) == len(results[0]["lengths"]) == 5

    toy = made[0].unwrapped
    seen = list(zip(toy.obs_seen, toy.masks_seen))[1:]  # the first is of make_env
    actions = iter(toy.actions)
    first = 0
    for length in results[0]["lengths"]:
        for obs, mask in seen[first : first + length]:
            with torch.no_grad():
                logits = agent.actor(torch.tensor(obs, dtype=torch.float32)[None])[0]
            parts = (logits.exp() * torch.tensor(mask)).split([3, 2])
            assert next(actions).tolist() == [part.argmax() for part in parts]
        first += length + 1  # after the last observation of an episode comes the next one's first
    assert len(toy.actions) == sum(results[0]["lengths"]) and len(seen) == first + 1
    assert not np.array_equal(seen[0][0], make_envs(ppo, "TwoParts-v0", 1).envs[0].unwrapped.x)


@pytest.mark.parametrize("env_id", ["Plain-v0", "Grid-v0"])
def test_toy_is_learned(run_script, env_id):
    flags = "--total-timesteps 16384 --learning-rate 0.003 --eval-episodes 50 --no-compile".split()
    module = run_script(ppo.__file__, "--env-id", env_id, *flags)
    results = json.loads((module.run.folder / "evaluation.json").read_text())
    only_first = 0.5 ** (module.nvec[0] - 1)  # how often the mask allows the first action alone
    share = sum(results["returns"]) / sum(results["lengths"])
    assert share > 1 - 0.5 * only_first - 0.05


def test_cartpole_is_learned(run_script):
    """Far above the 22 of random actions; the suite ladder_cartpole shows the rest."""
    flags = "--total-timesteps 50000 --no-compile --capture-video --video-interval 1000"
    module = run_script(ppo.__file__, *flags.split(), "--eval-episodes", "3")
    assert np.mean(module.run.recent_returns) > 120
    videos = module.run.folder / "videos"
    assert (videos / "episode-0.mp4").stat().st_size > 1000
    assert len(list((videos / "evaluation").iterdir())) == 3


def run(cwd, flags, fault="none 0", script=ppo.__file__):
    """Runs a script with Toy-v0 in a process of its own; see Toy for fault."""
    cwd.mkdir(exist_ok=True)
    (cwd / "toy.py").write_text(TOY)
    env = os.environ | {"TOY_FAULT": fault, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *flags.split()]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def left_by(cwd):
    """What a run learned and wrote, except times and --checkpoint-interval."""
    folder = cwd / "runs" / "run"
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    del checkpoint["args"]
    for name in ("wall_seconds", "log_sizes"):
        del checkpoint["run"][name]
    episodes = [line.split(",") for line in (folder / "episodes.csv").read_text().splitlines()]
    episodes = [row[:1] + row[2:] for row in episodes]
    return exact(checkpoint), episodes, (folder / "evaluation.json").read_text()


def test_runs_are_deterministic_and_resume_exactly(tmp_path):
    """Killed between two checkpoints, after seeds and coefficients have changed; then SIGTERM.

    The checkpoints of the whole run come at other times.
    """
    flags = (
        "--env-id toy:Toy-v0 --num-envs 3 --num-steps 32 --total-timesteps 4800 --kl-penalty "
        "--adaptive-lr --kl-target 0.0001 --learning-rate 0.001 --eval-episodes 3 --no-compile "
        "--no-cuda --run-name run"
    )
    whole = run(tmp_path / "whole", flags)
    assert whole.returncode == 0, whole.stderr
    killed = run(tmp_path / "killed", f"{flags} --checkpoint-interval 7", fault="SIGKILL 3700")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    path = tmp_path / "killed" / "runs" / "run" / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["run"]["iteration"] == 35
    assert checkpoint["controller"]["kl_coef"] != 1.0
    assert checkpoint["controller"]["learning_rate"] != 0.001
    assert all(state["first_episode"] > 0 for state in checkpoint["envs"]["envs"])
    # The first steps of a process that resumes are those that bring its environments back
    replayed = sum(len(state["actions"]) for state in checkpoint["envs"]["envs"])
    stopped = run(tmp_path / "killed", "--resume runs/run", f"SIGTERM {replayed + 500}")
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert torch.load(path, weights_only=True)["run"]["iteration"] == 35 + 500 // 96 + 1
    finished = run(tmp_path / "killed", "--resume runs/run --checkpoint-interval 3")
    assert finished.returncode == 0, finished.stderr
    assert left_by(tmp_path / "killed") == left_by(tmp_path / "whole")


def test_environments_that_do_not_fit_are_refused(capsys):
    class Sequence(gym.Env):
        observation_space = gym.spaces.Sequence(Discrete(3))
        action_space = Discrete(2)

        def __init__(self, render_mode=None):
            pass

        def reset(self, seed=None, options=None):
            return (), {}

    gym.register("Sequence-v0", Sequence)
    for env_id, sentence in (
        ("Pendulum-v1", "needs a discrete one"),
        ("CartPol-v1", "can't make CartPol-v1"),
        ("Sequence-v0", "needs one of fixed size"),
    ):
        with pytest.raises(SystemExit) as stop:
            ppo.make_env(env_id)
        assert stop.value.code == 2
        assert sentence in capsys.readouterr().err


def test_bad_flags_are_refused(refused):
    for flags, sentence in (
        ("--kl-target 0", "--kl-target must be above 0"),
        ("--num-minibatches 3", "must be a multiple of --num-minibatches"),
    ):
        assert sentence in refused(ppo, flags.split())
