"""ppo.py: what differs from ppo_continuous_action.py, whose definitions it shares and whose tests hold for those."""

import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

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

SPACES = {"Plain-v0": Discrete(4), "Started-v0": Discrete(3, start=-1), "Multi-v0": MultiDiscrete([3, 2]),
          "Grid-v0": MultiDiscrete([[3, 2], [2, 4]], start=[[5, 0], [0, 1]])}
TOY = '''
import os, signal

import gymnasium as gym
import numpy as np

FAULT, FAULT_STEP = (os.environ.get("TOY_FAULT") or "none 0").split()
steps = 0


class Toy(gym.Env):
    """Episodes of 3 to 17 steps, the odd ones end by termination. Its masks are random, the first action is always
    allowed; it takes no other. An action is best where its first part equals the sign of the observation."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))

    def __init__(self, render_mode=None, action_space=gym.spaces.Discrete(4), masked=True):
        self.action_space, self.masked, self.actions, self.obs_seen = action_space, masked, [], []
        self.nvec = np.ravel(getattr(action_space, "nvec", None) if hasattr(action_space, "nvec") else action_space.n)

    def observe(self):
        self.mask = tuple((self.np_random.random(n) < 0.5).astype(np.int8) for n in self.nvec)
        for part in self.mask:
            part[0] = 1
        self.x = self.np_random.normal(size=3)
        self.obs_seen.append(self.x)
        return self.x, {"action_mask": self.mask[0] if len(self.mask) == 1 else self.mask} if self.masked else {}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.end = 0, self.np_random.integers(3, 18)
        return self.observe()

    def step(self, action):
        global steps
        steps += 1
        if FAULT.startswith("SIG") and steps == int(FAULT_STEP):
            os.kill(os.getpid(), getattr(signal, FAULT))
        assert self.action_space.contains(action), action
        parts = np.ravel(action) - np.ravel(self.action_space.start)
        assert not self.masked or all(mask[part] for mask, part in zip(self.mask, parts)), (self.mask, parts)
        self.actions.append(parts)
        reward = float((parts[0] > 0) == (self.x[0] > 0))
        self.t += 1
        done = self.t >= self.end
        obs, info = self.observe()
        return obs, reward, bool(done and self.end % 2), bool(done and not self.end % 2), info


gym.register("Toy-v0", Toy)
'''
toy = {"__name__": "toy"}
exec(TOY, toy)
for env_id, space in SPACES.items():
    gym.register(env_id, toy["Toy"], kwargs={"action_space": space})
gym.register("Unmasked-v0", toy["Toy"], kwargs={"masked": False})


class Outputs(nn.Module):
    """An agent whose parameters are its outputs, so that the gradient in them is the gradient in the outputs."""

    def __init__(self, logprobs, entropy, values):
        super().__init__()
        self.logprobs, self.entropy, self.values = (nn.Parameter(x) for x in (logprobs, entropy, values))

    def forward(self, obs, actions):
        return self.logprobs, self.entropy, self.values


def flat(agent):
    return nn.utils.parameters_to_vector(agent.parameters()).detach()


def adam_state(params):
    return {"exp_avg": torch.zeros_like(params), "exp_avg_sq": torch.zeros_like(params), "step": torch.tensor(0.0)}


def random_outputs(n):
    """An agent of random outputs, and a batch whose log-probabilities and values are others."""
    agent = Outputs(torch.randn(n), torch.rand(n), torch.randn(n))
    batch = {"obs": None, "actions": None, "logprobs": agent.logprobs.detach() + 0.3 * torch.randn(n),
             "values": torch.randn(n), "advantages": torch.randn(n), "returns": torch.randn(n)}
    return agent, batch


def loss_and_gradient(function, agent, batch, coef, args):
    params = flat(agent).requires_grad_()
    loss, metrics = function(params, agent, batch, torch.tensor(coef), args)
    return loss.detach(), metrics, torch.autograd.grad(loss, params)[0]


@pytest.mark.parametrize("flags", [{}, {"norm_adv": False}, {"clip_vloss": False}, {"ent_coef": 0.3, "vf_coef": 2.0}])
def test_loss_equals_that_of_ppo_continuous_action(flags):
    agent, batch = random_outputs(64)
    defaults = {"ent_coef": 0.01} | flags
    results = [loss_and_gradient(module.ppo_loss, agent, batch, 0.2, module.Args(**defaults))
               for module in (ppo, ppo_continuous_action)]
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)
    assert results[0][1][ppo.METRICS.index("clipfrac")] > 0.2


def test_penalty_stands_in_the_place_of_all_clipping():
    """Equation 8 of the paper; the gradients in log-probabilities and values in closed form."""
    agent, batch = random_outputs(64)
    args = ppo.Args(kl_penalty=True, norm_adv=False, ent_coef=0.0, vf_coef=0.5)
    loss, metrics, grad = loss_and_gradient(ppo.ppo_loss, agent, batch, 3.0, args)
    logratio = agent.logprobs.detach() - batch["logprobs"]
    ratio, errors = logratio.exp(), agent.values.detach() - batch["returns"]
    kl = (ratio - 1 - logratio).mean()
    torch.testing.assert_close(loss, -(batch["advantages"] * ratio).mean() + 3.0 * kl + 0.25 * (errors**2).mean())
    in_logprobs = (-batch["advantages"] * ratio + 3.0 * (ratio - 1)) / 64
    torch.testing.assert_close(grad, torch.cat((in_logprobs, torch.zeros(64), 0.5 * errors / 64)))
    assert metrics[ppo.METRICS.index("approx_kl")] == pytest.approx(kl.item())
    assert metrics[ppo.METRICS.index("clipfrac")] == 0


@pytest.mark.parametrize("kl, kl_coef, lr", [
    (0.0151, 2.0, 1e-3), (0.0149, 1.0, 1e-3), (0.0067, 1.0, 1e-3), (0.0066, 0.5, 1e-3), (0.0201, 2.0, 1e-3 / 1.5),
    (0.0199, 2.0, 1e-3), (0.0051, 0.5, 1e-3), (0.0049, 0.5, 1.5e-3)])
def test_coefficients_follow_the_kl(kl, kl_coef, lr):
    """Doubled above 1.5 times the target, halved below its 1.5th part; the rate falls above twice, rises below half."""
    assert ppo.adapt(1.0, 1e-3, kl, ppo.Args(kl_target=0.01)) == (kl_coef, pytest.approx(lr, rel=1e-12))


def test_coefficients_stay_within_limits():
    assert ppo.adapt(1e6, 1.1e-6, 9.0, ppo.Args()) == (1e6, 1e-6)
    assert ppo.adapt(1e-6, 9e-3, 0.0, ppo.Args()) == (1e-6, 1e-2)


def test_adapted_coefficients_are_used_and_logged(run_script, monkeypatch):
    """The update gets what adapt said after the last one, and adapt gets the KL of the whole rollout."""
    calls, kls = [], []
    monkeypatch.setattr(ppo.torch, "randperm", torch.arange)
    source = Path(ppo.__file__).read_text()
    assert source.count("metrics = update(step_minibatches") == source.count("= adapt(kl_coef, adapted_lr, ") == 1
    source = source.replace("metrics = update(step_minibatches, params, optimizer, agent, batch, lr, coef, args)",
                            "CALLS.append((lr.item(), coef.item())); metrics = update(step_minibatches, params, "
                            "optimizer, agent, batch, lr, coef, args)")
    source = source.replace("= adapt(kl_coef, adapted_lr, ", "= SPY(agent, batch, kl_coef, adapted_lr, ")

    def spy(agent, batch, kl_coef, lr, kl, args):
        with torch.no_grad():
            ratio = (agent(batch["obs"], batch["actions"])[0] - batch["logprobs"]).exp()
        kls.append((kl, (ratio - 1 - ratio.log()).mean().item()))
        return kl_coef * 3, lr / 7

    source = source.replace("from tqdm import tqdm\n", "from tqdm import tqdm\nfrom test_ppo import CALLS, SPY\n")
    (Path.cwd() / "spied.py").write_text(source)
    globals().update(CALLS=calls, SPY=spy)
    monkeypatch.setitem(sys.modules, "test_ppo", sys.modules[__name__])
    module = run_script(Path.cwd() / "spied.py", "--env-id", "Plain-v0", "--num-steps", "32", "--total-timesteps",
                        "384", "--learning-rate", "0.5", "--kl-penalty", "--adaptive-lr", "--no-compile",
                        "--eval-episodes", "1")
    np.testing.assert_allclose(calls, [(0.5, 1.0), (0.5 / 7, 3.0), (0.5 / 49, 9.0)], rtol=1e-6)
    events = EventAccumulator(str(module.run_dir)).Reload()
    logged = [[scalar.value for scalar in events.Scalars(tag)] for tag in ("charts/learning_rate", "losses/coef")]
    np.testing.assert_allclose(np.transpose(logged), calls, rtol=1e-6)
    assert len(kls) == 3 and kls[0][0] > 0.01
    for kl, expected in kls:
        assert kl == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("env_id", SPACES)
def test_agent_equals_independent_categorical_distributions(env_id):
    """Masked actions have probability 0, the others are renormalised."""
    envs = ppo.Envs(env_id, 16, 1)
    agent = ppo.Agent(envs.obs_dim, envs.nvec)
    agent.actor[4].weight.data *= 100
    rows = torch.from_numpy(envs.obs)
    assert (rows[:, envs.obs_dim :] == 0).any()
    with torch.no_grad():
        parts = agent.actor(rows[:, : envs.obs_dim]).exp() * rows[:, envs.obs_dim :]
        parts = [Categorical(probs=part) for part in parts.split(envs.nvec, 1)]
        actions = torch.stack([part.sample() for part in parts], 1)
        logprobs, entropy, values = agent(rows, actions)
    expected = sum(part.log_prob(action) for part, action in zip(parts, actions.unbind(1)))
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, sum(part.entropy() for part in parts), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, agent.critic(rows[:, : envs.obs_dim]).squeeze(1))
    probabilities = np.concatenate([np.exp(logits - np.logaddexp.reduce(logits, 1)[:, None])
                                    for logits in (agent.policy()(envs.obs)[:, part] for part in envs.parts)], 1)
    np.testing.assert_allclose(probabilities, torch.cat([part.probs for part in parts], 1), rtol=1e-3, atol=1e-5)
    assert (probabilities[envs.obs[:, envs.obs_dim :] == 0] == 0).all()


@pytest.mark.parametrize("env_id", SPACES)
def test_rollouts_keep_to_the_masks(env_id):
    """The environment itself refuses any other action (Toy.step); it gets what is stored, counted from its start."""
    envs = ppo.Envs(env_id, 3, 1)
    agent = ppo.Agent(envs.obs_dim, envs.nvec)
    obs, actions, rewards, terminations, truncations, episodes = ppo.rollout(agent, envs, 200)
    for i, env in enumerate(envs.envs):
        assert np.array_equal(env.unwrapped.actions, actions[:, i])
    logits = np.split(obs[..., envs.obs_dim :], np.cumsum(envs.nvec)[:-1], 2)
    for k, mask in enumerate(logits):
        assert np.take_along_axis(mask, actions[..., k, None], 2).all() and 0.4 < mask.mean() < 0.9
    assert terminations.sum() > 10 and truncations.sum() > 10 and len(episodes) == (terminations | truncations).sum()


def test_rollouts_sample_the_policy():
    envs = ppo.Envs("Unmasked-v0", 8, 1)
    agent = ppo.Agent(envs.obs_dim, envs.nvec)
    agent.actor[4].weight.data.zero_()
    agent.actor[4].bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    actions = ppo.rollout(agent, envs, 1000)[1]
    frequencies = np.bincount(actions.ravel(), minlength=4) / actions.size
    np.testing.assert_allclose(frequencies, [0.1, 0.2, 0.3, 0.4], atol=0.02)


def test_episodes_end_with_their_true_last_observation():
    """After a termination, after a truncation, in several environments; the next row of obs is the reset's."""
    envs = ppo.Envs("Plain-v0", 3, 1)
    seen = [env.unwrapped.obs_seen for env in envs.envs]
    for observations in seen:
        del observations[:-1]  # but for the one of the present reset
    obs, _, rewards, terminations, truncations, episodes = ppo.rollout(ppo.Agent(3, [4]), envs, 100)
    for i, observations in enumerate(seen):
        expected, position = [], 0
        for step in range(100):
            np.testing.assert_allclose(obs[step, i, :3], observations[position], rtol=1e-6)
            position += 1
            if terminations[step, i] or truncations[step, i]:
                ended_by = "termination" if terminations[step, i] else "truncation"
                expected.append((step, ended_by, observations[position]))
                position += 1
        ended = [(step, ended_by, final_obs[:3]) for step, j, _, _, ended_by, final_obs in episodes if j == i]
        assert [x[:2] for x in ended] == [x[:2] for x in expected] and len({x[1] for x in ended}) == 2
        for (*_, ours), (*_, theirs) in zip(ended, expected):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for step, i, episode_return, length, *_ in episodes:
        assert episode_return == pytest.approx(rewards[step - length + 1 : step + 1, i].sum()) or step - length < -1


def test_observations_of_any_fixed_size_are_flattened():
    class Mixed(gym.Env):
        observation_space, action_space = Dict({"a": Discrete(3), "b": Box(-1, 1, (2, 2))}), Discrete(2)

        def __init__(self, render_mode=None):
            pass

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return {"a": 1, "b": np.full((2, 2), 0.5, np.float32)}, {}

    gym.register("Mixed-v0", Mixed)
    envs = ppo.Envs("Mixed-v0", 1, 1)
    assert envs.obs.tolist() == [[0, 1, 0, 0.5, 0.5, 0.5, 0.5, 1, 1]]


def test_a_mask_that_allows_nothing_ends_the_run(capsys):
    class Stuck(toy["Toy"]):
        def observe(self):
            return super().observe()[0], {"action_mask": (np.ones(3), np.zeros(2))}

    gym.register("Stuck-v0", Stuck, kwargs={"action_space": MultiDiscrete([3, 2])})
    envs = ppo.Envs("Stuck-v0", 1, 1)
    with pytest.raises(SystemExit) as stop:
        ppo.rollout(ppo.Agent(3, [3, 2]), envs, 1)
    assert stop.value.code == 1 and "allows no action" in capsys.readouterr().err


@pytest.mark.parametrize("mask", [np.ones(3), np.ones(1), (np.ones(2), np.ones(3))], ids=str)
def test_a_mask_of_another_size_ends_the_run(mask, capsys):
    class Masked(toy["Toy"]):
        def observe(self):
            return super().observe()[0], {"action_mask": mask}

    gym.register("Masked-v0", Masked)
    with pytest.raises(SystemExit) as stop:
        ppo.Envs("Masked-v0", 1, 1)
    assert stop.value.code == 1 and "must have 4 numbers" in capsys.readouterr().err


def test_the_end_of_an_episode_may_allow_nothing():
    class Over(toy["Toy"]):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated, truncated, {"action_mask": info["action_mask"] * (not terminated)}

    gym.register("Over-v0", Over)
    envs = ppo.Envs("Over-v0", 2, 1)
    episodes = ppo.rollout(ppo.Agent(3, [4]), envs, 100)[-1]
    assert any(not final_obs[3:].any() for *_, final_obs in episodes)


def sb3_parameters(policy):
    """SB3's parameters in the order of Agent's."""
    value_net, policy_net = policy.mlp_extractor.value_net, policy.mlp_extractor.policy_net
    layers = (value_net[0], value_net[2], policy.value_net, policy_net[0], policy_net[2], policy.action_net)
    return [p for layer in layers for p in layer.parameters()]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Multi-v0"])
def test_update_equals_that_of_stable_baselines3(monkeypatch, env_id):
    envs = ppo.Envs(env_id, 1, 1)
    envs.obs[:, envs.obs_dim :] = 1
    args = ppo.Args(num_envs=1, num_steps=64, clip_vloss=False, num_minibatches=4, update_epochs=3)
    agent = ppo.Agent(envs.obs_dim, envs.nvec)
    rows = torch.cat((torch.randn(64, envs.obs_dim), torch.ones(64, envs.num_logits)), 1)
    actions = torch.stack([torch.randint(n, (64,)) for n in envs.nvec], 1)
    with torch.no_grad():
        logprobs, _, values = agent(rows, actions)
    batch = {"obs": rows, "actions": actions, "logprobs": logprobs + 0.3 * torch.randn(64),
             "values": values + 0.3 * torch.randn(64), "advantages": torch.randn(64), "returns": torch.randn(64)}
    model = PPO("MlpPolicy", DummyVecEnv([lambda: gym.make(env_id)]), n_steps=64, batch_size=16, n_epochs=3,
                learning_rate=1e-3, ent_coef=0.01, vf_coef=0.25, max_grad_norm=0.5, device="cpu")
    model.set_logger(Logger(None, []))
    for theirs, ours in zip(sb3_parameters(model.policy), agent.parameters(), strict=True):
        theirs.data = ours.detach().clone()
    buffer, twins = model.rollout_buffer, {"observations": rows[:, : envs.obs_dim], "log_probs": batch["logprobs"]}
    for name in ("observations", "actions", "log_probs", "values", "advantages", "returns"):
        x = twins[name] if name in twins else batch[name]
        setattr(buffer, name, x.numpy().reshape(getattr(buffer, name).shape))
    buffer.full = True
    np.random.seed(3)
    model.train()
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(np.random.permutation(n)))
    np.random.seed(3)
    before = params = flat(agent)
    before = before.clone()
    ppo.update(ppo.update_minibatches, params, adam_state(params), agent, batch, torch.tensor(1e-3), torch.tensor(0.2),
               args)
    expected = torch.cat([p.detach().flatten() for p in sb3_parameters(model.policy)])
    torch.testing.assert_close(params, expected, rtol=0, atol=2e-6)
    assert (params - before).abs().max() > 3e-3


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiled_update_equals_eager():
    """With masks, several parts, and the penalty."""
    envs = ppo.Envs("Grid-v0", 4, 1)
    agent, args = ppo.Agent(envs.obs_dim, envs.nvec), ppo.Args(num_steps=64, kl_penalty=True)
    obs, actions, *_ = ppo.rollout(agent, envs, 64)
    rows, actions = torch.from_numpy(obs).flatten(0, 1), torch.from_numpy(actions).flatten(0, 1)
    with torch.no_grad():
        logprobs, _, values = agent(rows, actions)
    batch = {"obs": rows, "actions": actions, "logprobs": logprobs, "values": values,
             "advantages": torch.randn(256), "returns": torch.randn(256)}
    compiled = ppo.compile_or_not(ppo.update_minibatches, args, torch.device("cpu"))
    assert compiled is not ppo.update_minibatches
    results = []
    for function in (ppo.update_minibatches, compiled):
        torch.manual_seed(3)
        params = flat(agent)
        metrics = ppo.update(function, params, adam_state(params), agent, batch, torch.tensor(1e-3), torch.tensor(2.0),
                             args)
        results.append((params, metrics))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=3e-6)
    assert (results[0][0] - flat(agent)).abs().max() > 3e-3


def play(envs, steps):
    """Everything that envs gives for steps random actions that the masks allow."""
    random, results = np.random.default_rng(1), []
    for _ in range(steps):
        scores = random.random((len(envs.envs), envs.num_logits)) * envs.obs[:, envs.obs_dim :]
        rewards, episodes = envs.step(np.stack([scores[:, part].argmax(1) for part in envs.parts], 1))
        results.append((envs.obs.tolist(), rewards.tolist(), [(*end, obs.tolist()) for *end, obs in episodes]))
    return results


needs_box2d = pytest.mark.skipif(not importlib.util.find_spec("Box2D"), reason="needs Box2D")


@pytest.mark.parametrize("env_id, steps", [
    ("CartPole-v1", 50), pytest.param("LunarLander-v3", 150, marks=needs_box2d), ("Acrobot-v1", 30), ("Taxi-v4", 30),
    ("Grid-v0", 23), ("Plain-v0", 0)])
def test_environments_go_on_from_a_saved_state_bit_for_bit(env_id, steps, capsys):
    envs = ppo.Envs(env_id, 2, 1)
    play(envs, steps)
    file = io.BytesIO()
    torch.save(envs.state(), file)
    file.seek(0)
    other = ppo.Envs(env_id, 2, 99)
    other.load_state(torch.load(file, weights_only=True))
    assert np.array_equal(other.obs, envs.obs)
    assert play(other, 100) == play(envs, 100)
    assert str(other.state()) == str(envs.state())
    assert not capsys.readouterr().out


def test_a_masked_environment_that_cannot_be_replayed_starts_anew(capsys):
    class Moody(gym.Env):
        observation_space, action_space, allowed = Box(-1, 1, (2,)), Discrete(2), 0

        def __init__(self, render_mode=None):
            pass

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return [0.0, 0.5], {"action_mask": np.eye(2)[self.allowed]}

        def step(self, action):
            return [0.0, 1.0], 0.0, False, False, {"action_mask": np.eye(2)[self.allowed]}

    gym.register("Moody-v0", Moody)
    envs = ppo.Envs("Moody-v0", 1, 1)
    assert envs.obs.tolist() == [[0, 0.5, 1, 0]]  # a list will do for an array
    envs.step(np.array([[0]]))
    envs.envs[0].unwrapped.allowed = 1
    envs.load_state(envs.state())
    assert "can't be brought back" in capsys.readouterr().out and envs.obs.tolist() == [[0, 0.5, 0, 1]]


def test_evaluation_plays_the_likeliest_allowed_actions(monkeypatch):
    made, make_env = [], ppo.make_env
    monkeypatch.setattr(ppo, "make_env", lambda *args, **kwargs: made.append(make_env(*args, **kwargs)) or made[-1])
    agent, args = ppo.Agent(3, [3, 2]), ppo.Args(env_id="Multi-v0", eval_episodes=5)
    agent.actor[4].weight.data *= 100
    results = [ppo.evaluate(agent, args) for _ in range(2)]
    assert results[0] == results[1] and len(results[0]["returns"]) == len(results[0]["lengths"]) == 5
    env, expected = gym.make("Multi-v0"), []
    env.reset(seed=int(np.random.SeedSequence((1, 1)).generate_state(1)[0]))
    obs, info = env.reset()
    while len(expected) < len(made[-1].unwrapped.actions):
        with torch.no_grad():
            logits = agent.actor(torch.tensor(obs, dtype=torch.float32)[None])[0].split([3, 2])
        action = [int((x.exp() * torch.tensor(mask)).argmax()) for x, mask in zip(logits, info["action_mask"])]
        expected.append(action)
        obs, _, terminated, truncated, info = env.step(np.array(action))
        if terminated or truncated:
            obs, info = env.reset()
    assert np.array_equal(made[-1].unwrapped.actions, expected)


@pytest.mark.parametrize("env_id", ["Plain-v0", "Grid-v0"])
def test_toy_is_learned(run_script, env_id):
    run = run_script(ppo.__file__, "--env-id", env_id, "--total-timesteps", "16384", "--learning-rate", "0.003",
                     "--eval-episodes", "50", "--no-compile")
    results = json.loads((run.run_dir / "evaluation.json").read_text())
    possible = 1 - 0.5 * 0.5 ** (ppo.Envs(env_id, 1, 1).nvec[0] - 1)  # now and then only the first action is allowed
    assert sum(results["returns"]) / sum(results["lengths"]) > possible - 0.05


def test_cartpole_is_learned(run_script):
    """The last of 50,000 steps are far above the 22 of random actions; the suite ladder_cartpole shows the rest."""
    run = run_script(ppo.__file__, "--total-timesteps", "50000", "--no-compile", "--capture-video", "--video-interval",
                     "1000", "--eval-episodes", "3")
    assert np.mean(run.recent_returns) > 120
    assert (run.run_dir / "videos" / "episode-0.mp4").stat().st_size > 1000
    assert len(list((run.run_dir / "videos" / "evaluation").iterdir())) >= 1


FLAGS = ("--env-id toy:Toy-v0 --num-envs 3 --num-steps 32 --total-timesteps 2400 --checkpoint-interval 4 --kl-penalty "
         "--adaptive-lr --kl-target 0.0001 --learning-rate 0.001 --eval-episodes 3 --no-compile --run-name run")


def run(cwd, flags, fault="", script=ppo.__file__):
    cwd.mkdir(exist_ok=True)
    (cwd / "toy.py").write_text(TOY)
    env = os.environ | {"TOY_FAULT": fault, "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, script, *flags.split()], cwd=cwd, env=env, capture_output=True,
                          text=True, timeout=300)


def left_by(cwd, keep=("agent", "optimizer", "envs", "random", "adapted", "iteration")):
    """What a run learned and wrote, but for times."""
    checkpoint = torch.load(cwd / "runs" / "run" / "checkpoint.pt", weights_only=True)
    episodes = (cwd / "runs" / "run" / "episodes.csv").read_text().splitlines()
    parts = {name: str(checkpoint[name]) for name in keep}
    return parts, [line.split(",")[:1] + line.split(",")[2:] for line in episodes], (
        cwd / "runs" / "run" / "evaluation.json").read_text()


def test_runs_are_deterministic_and_resume_exactly(tmp_path):
    """Killed by -9 between two checkpoints, after the coefficients have moved; stopped by SIGTERM."""
    whole = run(tmp_path / "whole", FLAGS)
    assert whole.returncode == 0, whole.stderr
    assert run(tmp_path / "killed", FLAGS, "SIGKILL 1500").returncode == -signal.SIGKILL
    kl_coef, lr = torch.load(tmp_path / "killed" / "runs" / "run" / "checkpoint.pt", weights_only=True)["adapted"]
    assert kl_coef != 1.0 and lr != 0.001
    assert run(tmp_path / "killed", "--resume runs/run", "SIGTERM 600").returncode == 143
    assert run(tmp_path / "killed", "--resume runs/run").returncode == 0
    assert left_by(tmp_path / "killed") == left_by(tmp_path / "whole")


@pytest.mark.parametrize("env_id, sentence", [
    ("Pendulum-v1", "needs a Discrete or MultiDiscrete one"), ("CartPol-v1", "can't make CartPol-v1"),
    ("Sequence-v0", "needs one of fixed size")])
def test_environments_that_do_not_fit_are_refused(env_id, sentence, capsys):
    class Sequence(gym.Env):
        observation_space, action_space = gym.spaces.Sequence(Discrete(3)), Discrete(2)

        def __init__(self, render_mode=None):
            pass

        def reset(self, seed=None, options=None):
            return (), {}

    gym.register("Sequence-v0", Sequence)
    with pytest.raises(SystemExit) as stop:
        ppo.make_env(env_id, False)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("flags, sentence", [
    (["--kl-target", "0"], "kl_target must be above 0"), (["--num-minibatches", "3"], "must divide into")])
def test_bad_flags_are_refused(flags, sentence, refused):
    assert sentence in refused(ppo, flags)
