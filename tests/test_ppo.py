"""ppo.py: what differs from ppo_continuous_action.py, whose tests hold for what both share."""

import importlib.util
import io
import json
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from gymnasium.spaces import Box, Dict, Discrete
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from torch.distributions import Categorical

import ppo

SPACES = {
    "Plain-v0": Discrete(4),
    "Started-v0": Discrete(3, start=-1),
    "Byte-v0": Discrete(3, start=200, dtype=np.uint8),
}


class Toy(gym.Env):
    """Episodes of 3 to 17 steps; the odd ones end by termination, the others by truncation.

    It keeps the actions and observations. An action, counted from 0, gets a reward where it is
    above 0 just as the first number of the observation is.
    """

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, action_space):
        self.action_space = action_space
        self.actions = []
        self.obs_seen = []

    def observe(self):
        self.x = self.np_random.normal(size=3)
        self.obs_seen.append(self.x)
        return self.x, {}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.end = self.np_random.integers(3, 18)
        return self.observe()

    def count_from_0(self, action):
        return int(action) - int(self.action_space.start)

    def step(self, action):
        assert self.action_space.contains(action), action
        assert action.dtype == self.action_space.dtype
        action = self.count_from_0(action)
        self.actions.append(action)
        reward = float((np.ravel(action)[0] > 0) == (self.x[0] > 0))
        self.t += 1
        done = bool(self.t >= self.end)
        odd = bool(self.end % 2)
        obs, info = self.observe()
        return obs, reward, done and odd, done and not odd, info


for env_id, space in SPACES.items():
    gym.register(env_id, Toy, kwargs={"action_space": space})


class Outputs(nn.Module):
    """An agent whose parameters are its outputs: their gradients are those of the outputs."""

    def __init__(self, logprobs, entropy, values):
        super().__init__()
        self.logprobs = nn.Parameter(logprobs)
        self.entropy = nn.Parameter(entropy)
        self.values = nn.Parameter(values)

    def forward(self, obs, actions):
        return self.logprobs, self.entropy, self.values


def make_envs(script, env_id, num_envs, seed=1):
    return script.VecEnv([script.make_env(env_id) for _ in range(num_envs)], seed, np.float32)


def make_agent(script, envs):
    return script.Agent(envs.obs.shape[1], envs.action_space.n, (64, 64))


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


def as_coefs(args, **others):
    """The coefs that these flags give an update; others: those that change during a run."""
    names = ("clip_coef", "ent_coef", "vf_coef", "max_grad_norm")
    floats = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return {name: torch.tensor(value) for name, value in (floats | others).items()}


def gradients(loss_function, agent, batch, coefs, args):
    """Loss, metrics, and the gradient in the agent's parameters, flat."""
    loss, metrics = loss_function(agent, batch, coefs, args)
    grads = torch.autograd.grad(loss, [*agent.parameters()])
    return loss.detach(), metrics, torch.cat([grad.flatten() for grad in grads])


def add_targets(batch, agent):
    """Adds random advantages and returns to obs and actions, and what the policy was before."""
    size = len(batch["obs"])
    with torch.no_grad():
        logprobs, _, values = agent(batch["obs"], batch["actions"])
    return batch | {
        "logprobs": logprobs + 0.3 * torch.randn(size),
        "values": values + 0.3 * torch.randn(size),
        "advantages": torch.randn(size),
        "returns": torch.randn(size),
    }


def random_batch(agent, size):
    obs = torch.randn(size, agent.critic[0].in_features)
    actions = torch.randint(agent.actor[-1].out_features, (size,))
    return add_targets({"obs": obs, "actions": actions}, agent)


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
    arrays = {"observations": batch["obs"][:, : agent.critic[0].in_features]}
    for name in ("actions", "advantages", "returns"):
        arrays[name] = batch[name]
    if "logprobs" in batch:
        arrays |= {"log_probs": batch["logprobs"], "values": batch["values"]}
    for name, array in arrays.items():
        setattr(buffer, name, array.numpy().reshape(getattr(buffer, name).shape))
    buffer.full = True
    model.train()
    return torch.cat([p.detach().flatten() for p in sb3_parameters(model.policy)])


def compare_with_sb3(script, agent, batch, env_id, monkeypatch):
    """Holds three epochs of a script's update on 64 steps to those of SB3."""
    args = script.Args(clip_vloss=False, num_minibatches=4, update_epochs=3)
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
    optimizer = script.Adam(agent.parameters(), eps=1e-5)
    coefs = as_coefs(args, lr=1e-3)
    script.update(script.update_minibatches, optimizer, agent, batch, coefs, args)
    torch.testing.assert_close(flat(agent), expected, rtol=0, atol=2e-6)
    assert (flat(agent) - before).abs().max() > 3e-3


def test_update_equals_that_of_stable_baselines3(monkeypatch):
    agent = make_agent(ppo, make_envs(ppo, "CartPole-v1", 1))
    compare_with_sb3(ppo, agent, random_batch(agent, 64), "CartPole-v1", monkeypatch)


def compare_with_library(optimizer, library, agent):
    """Holds steps of an optimizer, with gradients of all sizes, to those of PyTorch's."""
    theirs = [nn.Parameter(x.detach().clone()) for x in agent.parameters()]
    library = library(theirs)
    for lr in (3e-3, 3e-3, 1e-3, 1e-2, 1e-3):
        grads = [torch.randn_like(x) * 10.0 ** -torch.randint(8, x.shape) for x in theirs]
        optimizer.step(grads, torch.tensor(lr))
        for parameter, grad in zip(theirs, grads):
            parameter.grad = grad
        library.param_groups[0]["lr"] = lr
        library.step()
        for ours, parameter in zip(agent.parameters(), theirs, strict=True):
            torch.testing.assert_close(ours, parameter, rtol=0, atol=1e-6)


@pytest.mark.parametrize("eps", [1e-5, 1e-8])
def test_g11_adam_equals_that_of_pytorch(eps):
    agent = ppo.Agent(4, 3, (64, 64))
    optimizer = ppo.Adam(agent.parameters(), eps)
    compare_with_library(optimizer, lambda params: torch.optim.Adam(params, eps=eps), agent)


def compare_compiled(make_agent, run_update):
    """Runs run_update(compiled or not, agent) from the same weights; they must end as equal."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(3)
        agent = make_agent()
        before = flat(agent)
        metrics = run_update(compiled, agent)
        assert (flat(agent) - before).abs().max() > 3e-3
        results.append((flat(agent), metrics))
    torch.testing.assert_close(*results, rtol=1e-4, atol=3e-6)


def compare_compiled_epochs(script, make_agent, make_batch, **coefs):
    """Holds a script's compiled update to the eager one."""
    args = script.Args(learning_rate=1e-3)
    step_minibatches = script.compile_or_not(script.update_minibatches, args, torch.device("cpu"))
    assert step_minibatches is not script.update_minibatches

    def run_update(compiled, agent):
        function = step_minibatches if compiled else script.update_minibatches
        batch = make_batch(agent)
        optimizer = script.Adam(agent.parameters(), eps=1e-5)
        return script.update(
            function, optimizer, agent, batch, as_coefs(args, lr=1e-3, **coefs), args
        )

    compare_compiled(make_agent, run_update)


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


def test_agent_equals_a_categorical_distribution():
    envs = make_envs(ppo, "Plain-v0", 16)
    agent = make_agent(ppo, envs)
    agent.actor[4].weight.data *= 100
    obs = torch.from_numpy(envs.obs)
    with torch.no_grad():
        distribution = Categorical(logits=agent.actor(obs))
        actions = distribution.sample()
        logprobs, entropy, values = agent(obs, actions)
        expected_values = agent.critic(obs).squeeze(1)
        torch.testing.assert_close(agent.value(obs), expected_values)
    torch.testing.assert_close(logprobs, distribution.log_prob(actions), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, expected_values)
    assert np.array_equal(agent.policy()(envs.obs, 0.0), distribution.probs.argmax(1))


@pytest.mark.parametrize("env_id", SPACES)
def test_rollouts_play_what_they_store(env_id):
    """Toy refuses what isn't in its space, with its start and dtype."""
    envs = make_envs(ppo, env_id, 3)
    for env in envs.envs:
        env.unwrapped.actions.clear()  # of make_env
    agent = make_agent(ppo, envs)
    obs, actions, rewards, terminations, truncations, episodes = ppo.rollout(agent, envs, 200)
    for i, env in enumerate(envs.envs):
        assert env.unwrapped.actions == actions[:, i].tolist()
    assert set(np.unique(actions)) == set(range(SPACES[env_id].n))
    assert obs.dtype == rewards.dtype == np.float32 and actions.dtype == np.int64
    assert np.array_equal(rewards, (actions > 0) == (obs[..., 0] > 0))
    assert terminations.sum() > 10 and truncations.sum() > 10
    assert len(episodes) == (terminations | truncations).sum()


def test_rollouts_sample_the_policy():
    envs = make_envs(ppo, "Plain-v0", 8)
    agent = make_agent(ppo, envs)
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
    agent = make_agent(ppo, envs)
    obs, _, rewards, terminations, truncations, episodes = ppo.rollout(agent, envs, 100)
    for i, observations in enumerate(seen):
        expected = []
        position = 0
        for step in range(100):
            np.testing.assert_allclose(obs[step, i], observations[position], rtol=1e-6)
            position += 1
            if terminations[step, i] or truncations[step, i]:
                ended_by = "termination" if terminations[step, i] else "truncation"
                expected.append((step, ended_by, observations[position].astype(np.float32)))
                position += 1
        ended = [(step, e.ended_by, e.final_obs) for step, e in episodes if e.env == i]
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

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return {"a": 1, "b": np.full((2, 2), 0.5, np.float32)}, {}

        def step(self, action):
            return *self.reset()[:1], 0.0, False, False, {}

    gym.register("Mixed-v0", Mixed)
    envs = make_envs(ppo, "Mixed-v0", 1)
    assert envs.obs.tolist() == [[0, 1, 0, 0.5, 0.5, 0.5, 0.5]]


def play(envs, policy, steps):
    """Everything that envs give for steps actions of a policy: a function of obs and numbers."""
    rng = np.random.default_rng(1)
    results = []
    for _ in range(steps):
        actions = policy(envs.obs, rng)
        results.append((envs.step(actions), envs.obs.copy()))
    return exact(results)


def random_policy(envs):
    n = envs.action_space.n
    return lambda obs, rng: rng.integers(n, size=len(obs))


def compare_restored(script, env_id, steps, policy_of):
    """Environments that have played some steps go on from a checkpoint as without one."""
    envs = make_envs(script, env_id, 2)
    play(envs, policy_of(envs), steps)
    for actions in envs.actions:
        assert len(actions) == steps if steps < 1000 else 0 < len(actions) <= 200, len(actions)
    file = io.BytesIO()
    torch.save(envs.state_dict(), file)
    file.seek(0)
    other = make_envs(script, env_id, 2)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert not other.restarted.any()
    assert exact(other.obs) == exact(envs.obs)
    assert play(other, policy_of(other), 100) == play(envs, policy_of(envs), 100)
    assert exact(other.state_dict()) == exact(envs.state_dict())


needs_box2d = pytest.mark.skipif(not importlib.util.find_spec("Box2D"), reason="needs Box2D")


@pytest.mark.parametrize(
    "env_id, steps",
    [
        ("CartPole-v1", 1200),  # they have new seeds by then
        pytest.param("LunarLander-v3", 150, marks=needs_box2d),
        ("Acrobot-v1", 30),
        ("Byte-v0", 23),
        ("Plain-v0", 0),
    ],
)
def test_environments_go_on_from_a_saved_state_bit_for_bit(env_id, steps):
    compare_restored(ppo, env_id, steps, random_policy)


def record_evaluation(script, agent, envs, monkeypatch, **flags):
    """Evaluates twice, which must give the same; returns the episodes and the Toy that played."""
    made = []
    make_env = script.make_env

    def spy(*args, **kwargs):
        made.append(make_env(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(script, "make_env", spy)
    args = script.Args(eval_episodes=5, **flags)
    results = [script.evaluate(agent, envs, args, None) for _ in range(2)]
    assert exact(results[0]) == exact(results[1])
    assert len(results[0]) == 5
    during = [script.evaluate(agent, envs, args, None, step) for step in (100, 200)]
    seen = [results[0], *during]
    assert len({episodes[0].final_obs.tobytes() for episodes in seen}) == 3
    return results[0], made[0].unwrapped


def test_evaluation_plays_the_likeliest_actions(monkeypatch):
    envs = make_envs(ppo, "Plain-v0", 1)
    agent = make_agent(ppo, envs)
    agent.actor[4].weight.data *= 100
    episodes, toy = record_evaluation(ppo, agent, envs, monkeypatch, env_id="Plain-v0")
    seen = toy.obs_seen[2:]  # the first two are of make_env
    actions = iter(toy.actions[1:])
    first = 0
    for episode in episodes:
        obs = torch.tensor(np.array(seen[first : first + episode.length]), dtype=torch.float32)
        for action in agent.actor(obs).argmax(1).tolist():
            assert next(actions) == action
        first += episode.length + 1  # after an episode's last observation comes the next's first
    assert next(actions, None) is None and len(seen) == first + 1
    assert not np.array_equal(seen[0], envs.envs[0].unwrapped.x)


def learned_share(module):
    """Rewards per step of a run's evaluation."""
    results = json.loads((module.run.folder / "evaluation.json").read_text())
    assert len(results["returns"]) == 50
    mean_length = 10  # of episodes with 3 to 17 steps
    return np.mean(results["returns"]) / mean_length


@pytest.mark.parametrize("env_id", SPACES)
def test_toy_is_learned(run_script, env_id):
    flags = "--total-timesteps 16384 --learning-rate 0.003 --eval-episodes 50 --no-compile".split()
    module = run_script(ppo.__file__, "--env-id", env_id, *flags)
    assert learned_share(module) > 0.8  # 1 is possible, 0.5 is chance


def test_cartpole_is_learned(run_script):
    """Far above the 22 of random actions; the suite ladder_cartpole shows the rest."""
    module = run_script(ppo.__file__, *"--total-timesteps 50000 --no-compile".split())
    assert np.mean(module.run.recent_returns) > 120


def test_environments_that_do_not_fit_are_refused(capsys):
    class Sequence(Toy):
        observation_space = gym.spaces.Sequence(Discrete(3))

    gym.register("Sequence-v0", Sequence, kwargs={"action_space": Discrete(2)})
    gym.register("Parts-v0", Toy, kwargs={"action_space": gym.spaces.MultiDiscrete([3, 2])})
    for env_id, sentence in (
        ("Pendulum-v1", "needs a Discrete one"),
        ("Parts-v0", "needs a Discrete one"),
        ("CartPol-v1", "can't make CartPol-v1"),
        ("Sequence-v0", "has <class 'gymnasium.spaces.sequence.Sequence'> in its observations"),
    ):
        with pytest.raises(SystemExit) as stop:
            ppo.make_env(env_id)
        assert stop.value.code == 2
        assert sentence in capsys.readouterr().err


def test_bad_flags_are_refused(refused):
    for flags, sentence in (
        ("--clip-coef 0", "--clip-coef must be above 0"),
        ("--num-minibatches 3", "must be a multiple of --num-minibatches"),
    ):
        assert sentence in refused(ppo, flags.split())
