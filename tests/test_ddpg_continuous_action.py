"""ddpg_continuous_action.py: its update, and what a run stores and draws.

The oracles are plain PyTorch with torch.optim, and Stable-Baselines3.
"""

import copy
import functools
import importlib
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from processes import returns
from stable_baselines3 import DDPG
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import ddpg_continuous_action as ddpg

SCRIPT = Path(ddpg.__file__)
QUICK = [
    *("--no-compile", "--num-threads", "1", "--eval-episodes", "1"),
    *("--hidden-sizes", "8", "8", "--batch-size", "8"),
]


class Stamped(gym.Env):
    """An observation says which instance it is of, which episode, and which step of it.

    An episode has 3 to 9 steps, odd ones end by termination; the reward is the step, with the
    instance's sign. Keeps the actions and the last seed that it is given.
    """

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    made = []

    def __init__(self, render_mode=None, low=(-1.0, -1.0), high=(1.0, 1.0)):
        self.action_space = Box(np.array(low, np.float32), np.array(high, np.float32))
        self.number = len(self.made)
        self.episode = 0
        self.actions = []
        self.seed = None
        self.end = None
        self.made.append(self)

    def observe(self):
        return np.array([self.number, self.episode, self.t], np.float64)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.end_before = self.end
        self.end = self.np_random.integers(3, 10)
        self.episode += 1
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.actions.append(action.copy())
        self.t += 1
        ended = self.t == self.end
        odd = self.end % 2 == 1
        reward = float(self.t * (-1) ** self.number)
        return self.observe(), reward, bool(ended and odd), bool(ended and not odd), {}


class StampedInPlace(Stamped):
    """The same with observations in one array, which each step and each reset writes over."""

    array = None

    def observe(self):
        if self.array is None:
            self.array = np.zeros(3)
        self.array[:] = super().observe()
        return self.array


class Nested(Stamped):
    """The same with a Dict of observations and a table of actions."""

    observation_space = Dict(b=Box(-np.inf, np.inf, (1,)), a=Box(-np.inf, np.inf, (2, 1)))

    def __init__(self, render_mode=None):
        super().__init__(low=((-1.0, 0.0), (-2.0, -3.0)), high=((3.0, 0.5), (2.0, 1.0)))

    def observe(self):
        obs = super().observe()
        return {"b": obs[:1], "a": obs[1:, None]}


gym.register("Stamped-v0", Stamped)
gym.register("StampedInPlace-v0", StampedInPlace)
gym.register("StampedSlanted-v0", Stamped, kwargs={"low": (-1.0, 0.0), "high": (3.0, 0.5)})
narrow = {"low": (-1.0, -1.0), "high": (-0.4, -0.4)}  # 1 rounds to above
gym.register("StampedNarrow-v0", Stamped, kwargs=narrow)
gym.register("Nested-v0", Nested)


@pytest.fixture(autouse=True)
def made():
    Stamped.made.clear()
    return Stamped.made


def flat(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def as_coefs(args):
    """The coefs that these flags give an update."""
    coefs = {
        "actor_lr": args.actor_learning_rate or args.learning_rate,
        "critic_lr": args.critic_learning_rate or args.learning_rate,
        "gamma": args.gamma,
        "tau": args.tau,
    }
    return {name: torch.tensor(value) for name, value in coefs.items()}


def move(module, distance):
    """Changes all parameters a little, at random."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += distance * torch.randn_like(parameter)


def make_learner(agent, distance=0.01):
    """A learner; distance: of the targets from the agent."""
    learner = ddpg.Learner(agent)
    move(learner.target, distance)
    return learner


def transitions(n, obs_dim, action_dim):
    """A random batch, as sample_batch gives it; a third of its steps are terminations."""
    return {
        "obs": torch.randn(n, obs_dim),
        "actions": torch.rand(n, action_dim) * 2 - 1,
        "rewards": torch.randn(n),
        "next_obs": torch.randn(n, obs_dim),
        "terminations": (torch.rand(n) < 0.3).float(),
    }


class Reference:
    """DDPG in straight torch: modules, autograd, torch.optim.Adam, targets as copies."""

    def __init__(self, agent, learner, args):
        self.args = args
        self.nets = copy.deepcopy(agent)
        self.targets = copy.deepcopy(learner.target)
        lr = args.actor_learning_rate or args.learning_rate
        self.actor_adam = torch.optim.Adam(self.nets.actor.parameters(), lr)
        lr = args.critic_learning_rate or args.learning_rate
        decay = args.weight_decay
        self.critic_adam = torch.optim.Adam(self.nets.critic.parameters(), lr, weight_decay=decay)
        self.norms = []  # of the gradients

    def descend(self, loss, net, adam):
        for parameter in self.nets.parameters():
            parameter.grad = None
        loss.backward()
        if self.args.max_grad_norm:
            norm = nn.utils.clip_grad_norm_(net.parameters(), self.args.max_grad_norm)
            self.norms.append(norm.item())
        adam.step()

    def update(self, batch, with_actor):
        """One update; returns what METRICS are, as floats: the last one only with_actor."""
        obs, rewards, next_obs = batch["obs"], batch["rewards"], batch["next_obs"]
        nets, targets = self.nets, self.targets
        with torch.no_grad():
            next_inputs = torch.cat((next_obs, targets.actor(next_obs)), 1)
            next_values = targets.critic.network(next_inputs)[:, 0]
            terminated = batch["terminations"] == 1
            returns = torch.where(terminated, rewards, rewards + self.args.gamma * next_values)
        values = nets.critic.network(torch.cat((obs, batch["actions"]), 1))[:, 0]
        metrics = [values.mean().item(), ((values - returns) ** 2).mean().item()]
        self.descend(((values - returns) ** 2).mean(), nets.critic, self.critic_adam)
        if with_actor:
            loss = -nets.critic.network(torch.cat((obs, nets.actor(obs)), 1)).mean()
            metrics.append(loss.item())
            self.descend(loss, nets.actor, self.actor_adam)
            with torch.no_grad():
                for target, parameter in zip(targets.parameters(), nets.parameters()):
                    target.copy_((1 - self.args.tau) * target + self.args.tau * parameter)
        return metrics

    def assert_equals(self, agent, learner, rtol, atol):
        """The weights and the targets."""
        for ours, theirs in ((agent, self.nets), (learner.target, self.targets)):
            torch.testing.assert_close(flat(ours), flat(theirs), rtol=rtol, atol=atol)


ALL_FLAGS = {
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.01,  # always below the gradient's norm: Adam sees only that it is constant
    "tau": 0.3,
    "gamma": 0.9,
}
BETWEEN = 0.5  # norms below it and above it


@pytest.mark.parametrize(
    "flags, compiled",
    [
        ({}, False),
        (ALL_FLAGS, False),
        (ALL_FLAGS, True),
        ({"learning_rate": 1e-3, "max_grad_norm": 0.01}, False),
        ({"max_grad_norm": BETWEEN}, False),
    ],
)
def test_updates_equal_a_plain_reference(flags, compiled):
    """Weights, targets and metrics, over ten updates.

    Every third of them leaves the actor and the targets alone.
    """
    args = ddpg.Args(hidden_sizes=(16, 12), compile=compiled, **flags)
    agent = ddpg.Agent(3, 2, args.hidden_sizes)
    learner = make_learner(agent)
    reference = Reference(agent, learner, args)
    update = ddpg.compile_or_not(ddpg.update, args, torch.device("cpu"))
    sums = np.zeros(3)
    for number in range(10):
        batch = transitions(32, 3, 2)
        update(agent, learner, batch, number % 3 > 0, as_coefs(args), args)
        expected = reference.update(batch, number % 3 > 0)
        sums[: len(expected)] += expected
    reference.assert_equals(agent, learner, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(learner.sums, sums, rtol=1e-4, atol=1e-5)
    assert learner.counts.tolist() == [10, 10, 6]
    assert learner.critic_optimizer.steps == 10
    assert learner.actor_optimizer.steps == 6
    if args.max_grad_norm == BETWEEN:
        assert min(reference.norms) < BETWEEN < max(reference.norms)


def feed(model, batch, monkeypatch):
    """Gives a model of SB3 a batch to learn from."""
    rewards, dones = batch["rewards"][:, None], batch["terminations"][:, None]
    samples = ReplayBufferSamples(batch["obs"], batch["actions"], batch["next_obs"], dones, rewards)
    monkeypatch.setattr(model.replay_buffer, "sample", lambda *_, **__: samples)


def test_updates_equal_those_of_stable_baselines3(monkeypatch):
    """DDPG of SB3, five updates from the same weights on the same minibatches."""
    args = ddpg.Args(hidden_sizes=(16, 16))
    model = DDPG(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=args.learning_rate,
        batch_size=32,
        tau=args.tau,
        gamma=args.gamma,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [16, 16]},
    )
    model.set_logger(Logger(None, []))
    agent = ddpg.Agent(3, 1, args.hidden_sizes)
    learner = make_learner(agent)
    pairs = (
        (agent.actor, model.actor.mu),
        (agent.critic, model.critic.qf0),
        (learner.target.actor, model.actor_target.mu),
        (learner.target.critic, model.critic_target.qf0),
    )
    for ours, theirs in pairs:
        nn.utils.vector_to_parameters(flat(ours), theirs.parameters())
    for _ in range(5):
        batch = transitions(32, 3, 1)
        feed(model, batch, monkeypatch)
        model.train(gradient_steps=1, batch_size=32)
        ddpg.update(agent, learner, batch, True, as_coefs(args), args)
    for ours, theirs in pairs:
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-7)


def test_the_step_of_the_actor_leaves_the_critic_alone():
    """After an update the critic is the same with and without it; actor and targets differ."""
    args = ddpg.Args(hidden_sizes=(16, 16))
    agent = ddpg.Agent(3, 2, args.hidden_sizes)
    learner = make_learner(agent)
    batch = transitions(32, 3, 2)

    def after(with_actor):
        copied_agent, copied = copy.deepcopy((agent, learner))
        ddpg.update(copied_agent, copied, batch, with_actor, as_coefs(args), args)
        return copied_agent, copied.target

    (critic_only, same_target), (both, target) = after(False), after(True)
    assert torch.equal(flat(both.critic), flat(critic_only.critic))
    assert not torch.equal(flat(both.critic), flat(agent.critic))
    assert torch.equal(flat(critic_only.actor), flat(agent.actor))
    assert not torch.equal(flat(both.actor), flat(agent.actor))
    assert torch.equal(flat(same_target), flat(learner.target))
    moved = 0.995 * flat(learner.target) + 0.005 * flat(both)
    torch.testing.assert_close(flat(target), moved, rtol=1e-6, atol=1e-7)


def test_targets_are_not_learned_through():
    """Not even where an edited copy has no target networks, but takes the networks themselves."""
    args = ddpg.Args(hidden_sizes=(16, 16))
    agent = ddpg.Agent(3, 2, args.hidden_sizes)
    learner = make_learner(agent)
    learner.target = agent
    reference = Reference(agent, learner, args)
    batch = transitions(32, 3, 2)
    ddpg.update(agent, learner, batch, False, as_coefs(args), args)
    reference.update(batch, False)
    torch.testing.assert_close(flat(agent), flat(reference.nets), rtol=1e-5, atol=1e-7)


def test_metrics_are_means_of_what_there_is():
    """And start again when they were asked for."""
    args = ddpg.Args()
    learner = ddpg.Learner(ddpg.Agent(3, 1, args.hidden_sizes))
    assert learner.mean_metrics() == {}
    learner.sums += torch.tensor([6.0, 9.0, 0.0])
    learner.counts += torch.tensor([3.0, 3.0, 0.0])
    assert learner.mean_metrics() == {"qf1_values": 2.0, "qf1_loss": 3.0}
    learner.sums += torch.tensor([1.0, 2.0, 6.0])
    learner.counts += torch.tensor([1.0, 1.0, 2.0])
    assert learner.mean_metrics() == {"qf1_values": 1.0, "qf1_loss": 2.0, "actor_loss": 3.0}


def test_networks_and_defaults_are_those_of_the_td3_paper_s_code():
    args = ddpg.Args()
    agent = ddpg.Agent(17, 6, args.hidden_sizes)
    for net, inputs, outputs, last in (
        (agent.actor, 17, 6, [nn.Tanh]),
        (agent.critic.network, 23, 1, []),
    ):
        assert [type(x) for x in net] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear, *last]
        assert [tuple(x.weight.shape) for x in net if isinstance(x, nn.Linear)] == [
            (256, inputs),
            (256, 256),
            (outputs, 256),
        ]
        for layer in net[:-2:2]:  # PyTorch's initialisation: both uniform up to 1 / sqrt(inputs)
            for parameter in layer.parameters():
                assert 0.9 < parameter.abs().max() * layer.in_features**0.5 <= 1
    assert args.total_timesteps == args.buffer_size == 1_000_000
    assert (args.learning_starts, args.random_steps) == (25_000, None)
    assert (args.learning_rate, args.gamma, args.tau, args.batch_size) == (3e-4, 0.99, 0.005, 256)
    assert (args.noise_type, args.exploration_noise) == ("gaussian", 0.1)
    assert (args.policy_frequency, args.updates_per_step) == (1, 1.0)
    assert (args.weight_decay, args.max_grad_norm) == (0.0, None)


def drawn_batch(ran, count):
    """The 8 rows that a run whose buffer never is full draws after count steps: {name: array}."""
    rows = ran.replay.rows[count - 1 - torch.randint(count, (8,)).numpy()]
    return {name: rows[name] for name in rows.dtype.names}


def draw_uniform(*shape):
    """Random actions."""
    return 2 * torch.rand(shape).numpy() - 1


def as_tensors(batch):
    return {name: torch.tensor(x, dtype=torch.float32) for name, x in batch.items()}


def stored(ran):
    """The columns of a run's replay buffer as arrays (steps, num_envs, ...)."""
    rows = ran.replay.rows[: ran.replay.count].reshape(-1, ran.args.num_envs)
    return [rows[name] for name in rows.dtype.names]


@pytest.mark.parametrize("env_id", ["Stamped-v0", "StampedInPlace-v0"])
def test_next_observations_are_those_before_the_reset(run_script, env_id):
    """Each transition stays in its episode, and only a termination is one.

    Of three environments, whose episodes end in both ways.
    """
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", env_id, "--num-envs", "3", "--total-timesteps", "300"),
        *("--learning-starts", "297", "--random-steps", "0", "--eval-interval", "1000"),
    )
    obs, _, rewards, next_obs, terminations = stored(ran)
    numbers, episodes, t = obs[..., 0], obs[..., 1], obs[..., 2]
    assert np.array_equal(numbers, np.broadcast_to([0, 1, 2], (100, 3)))
    assert np.array_equal(next_obs, np.stack((numbers, episodes, t + 1), -1))
    assert np.array_equal(rewards, (t + 1) * [1, -1, 1])
    last = np.append(t[1:] == 0, np.zeros((1, 3), bool), 0)  # of its episode
    odd = next_obs[..., 2] % 2 == 1
    assert np.array_equal(terminations[:-1], (last & odd)[:-1])
    assert (last & odd).sum() > 5 and (last & ~odd).sum() > 5
    assert np.array_equal(obs[1:][~last[:-1]], next_obs[:-1][~last[:-1]])


def stored_noise(ran):
    """What was added to the actions of a run of seed 5 that has updated nothing before its end."""
    obs, actions = stored(ran)[:2]
    torch.manual_seed(5)
    agent = ddpg.Agent(3, 2, (8, 8))  # the policy before its only update
    with torch.no_grad():
        return actions - agent.actor(torch.tensor(obs)).numpy()


@pytest.mark.parametrize("noise_type, theta", [("gaussian", 1.0), ("ou", 0.15)])
def test_exploration_noise(run_script, noise_type, theta):
    """Action less policy is noise drawn from the run's random state.

    The Ornstein-Uhlenbeck process starts at 0 in each episode.
    """
    steps = 100
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "Stamped-v0", "--num-envs", "2", "--total-timesteps", str(2 * steps)),
        *("--learning-starts", str(2 * steps - 1), "--random-steps", "0", "--seed", "5"),
        *("--exploration-noise", "0.02", "--noise-type", noise_type),
    )
    obs, actions = stored(ran)[:2]
    noises = stored_noise(ran)
    noise = np.zeros((2, 2))
    for step in range(steps):
        noise[obs[step, :, 2] == 0] = 0.0
        noise = noise * (1 - theta) + 0.02 * torch.randn(2, 2).numpy()
        np.testing.assert_allclose(noises[step], noise, atol=1e-6)
    assert abs(actions).max() < 1


@pytest.mark.parametrize("env_id", ["StampedSlanted-v0", "StampedNarrow-v0", "Nested-v0"])
def test_actions_are_in_units_of_the_bounds_and_stay_inside(run_script, made, env_id):
    """-1 and 1 are the bounds, 0 the middle; noise of 0.5 is half of half the range.

    Random actions fill the range.
    """
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", env_id, "--total-timesteps", "400", "--learning-starts", "399"),
        *("--random-steps", "200", "--exploration-noise", "0.5"),
    )
    space = ran.envs.action_space
    actions = stored(ran)[1][:, 0].reshape(400, *space.shape)
    played = np.array(made[0].actions[1:])  # the first one is make_env's
    middle, half = (space.low + space.high) / 2, (space.high - space.low) / 2
    np.testing.assert_allclose(played, middle + actions * half, atol=1e-6)
    assert played.dtype == space.dtype and all(space.contains(action) for action in played)
    assert np.all(played[:200].min(0) < space.low + 0.1 * half)
    assert np.all(played[:200].max(0) > space.high - 0.1 * half)
    torch.manual_seed(ran.args.seed)
    ddpg.Agent(3, actions[0].size, (8, 8))
    uniform = np.array([draw_uniform(1, actions[0].size) for _ in range(200)])
    assert np.array_equal(actions[:200], uniform.reshape(200, *space.shape))
    assert np.isin([-1.0, 1.0], actions[200:]).all()  # clipped there
    envs = ddpg.VecEnv([ddpg.make_env(env_id)], 1, np.float64)
    for action, bound in ((-1.0, space.low), (1.0, space.high)):
        envs.step(np.full((1, actions[0].size), action))
        assert np.array_equal(made[-1].actions[-1], bound)


def test_random_steps_last_until_learning_starts_unless_told(run_script):
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "Stamped-v0", "--total-timesteps", "80", "--learning-starts", "60"),
        *("--exploration-noise", "0"),
    )
    obs, actions = stored(ran)[:2]
    torch.manual_seed(ran.args.seed)
    ddpg.Agent(3, 2, (8, 8))
    assert np.array_equal(actions[:60], [draw_uniform(1, 2) for _ in range(60)])
    with torch.no_grad():
        policy = ran.agent.actor(torch.tensor(obs[60:])).numpy()
    assert abs(actions[60:] - policy).max() < 0.1  # of the end, a few small updates later


NUMBERS = {
    "defaults": ([], 61, 61),
    "delayed": (["--policy-frequency", "2"], 61, 31),
    "fewer": (["--updates-per-step", "0.25"], 16, 16),
    "more-delayed": (["--updates-per-step", "3", "--policy-frequency", "4"], 183, 46),
    "two-environments": (["--num-envs", "2"], 61, 61),
}


@pytest.mark.parametrize("flags, critic_steps, actor_steps", NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers_of_updates(run_script, flags, critic_steps, actor_steps):
    """100 steps, of all environments together, the first 39 without an update."""
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "Stamped-v0", "--total-timesteps", "100", "--learning-starts", "39"),
        *("--random-steps", "20", *flags),
    )
    assert ran.learner.critic_optimizer.steps == critic_steps
    assert ran.learner.actor_optimizer.steps == actor_steps


ALL_OF_A_RUN = [
    *("--policy-frequency", "2", "--updates-per-step", "1.5", "--gamma", "0.9"),
    *("--noise-type", "ou", "--exploration-noise", "0.05"),
    *("--actor-learning-rate", "2e-4", "--critic-learning-rate", "5e-4", "--tau", "0.01"),
]


@pytest.mark.parametrize("flags", [[], ALL_OF_A_RUN], ids=["defaults", "all"])
def test_a_run_equals_plain_code(run_script, flags):
    """All of a run of 240 steps in two environments.

    Each action, the logged losses, and the weights and targets at the end follow from the seed, the
    environments' answers and the reference.
    """
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "Stamped-v0", "--num-envs", "2", "--total-timesteps", "480"),
        *("--learning-starts", "50", "--random-steps", "30", "--seed", "7"),
        *("--eval-interval", "25", *flags),
    )
    args = ran.args
    obs, actions = stored(ran)[:2]
    torch.manual_seed(7)
    agent = ddpg.Agent(3, 2, (8, 8))
    reference = Reference(agent, ddpg.Learner(agent), args)
    num_updates = 0
    noise = np.zeros((2, 2))
    decay = 0.85 if flags else 0.0
    metrics, logged = [[], [], []], []
    for step in range(240):
        if 2 * step < 30:
            expected = draw_uniform(2, 2)
        else:
            noise[obs[step, :, 2] == 0] = 0.0
            noise = decay * noise + args.exploration_noise * torch.randn(2, 2).numpy()
            with torch.no_grad():
                policy = reference.nets.actor(torch.tensor(obs[step])).numpy()
            expected = (policy + noise).clip(-1, 1)
        np.testing.assert_allclose(actions[step], expected, atol=1e-4)
        count = 2 * step + 2
        while num_updates < (count - 50) * args.updates_per_step:
            batch = as_tensors(drawn_batch(ran, count))
            with_actor = num_updates % args.policy_frequency == 0
            for values, value in zip(metrics, reference.update(batch, with_actor)):
                values.append(value)
            num_updates += 1
        if (step + 1) % 100 == 0:
            logged += [(count, np.mean(values)) for values in metrics]
            metrics = [[], [], []]
    assert num_updates == 430 * args.updates_per_step
    reference.assert_equals(ran.agent, ran.learner, rtol=2e-3, atol=5e-5)
    events = EventAccumulator(str(ran.run.folder)).Reload()
    losses = [events.Scalars(f"losses/{name}") for name in ddpg.METRICS]
    ours = [(scalar.step, scalar.value) for scalars in zip(*losses) for scalar in scalars]
    np.testing.assert_allclose(ours, logged, rtol=1e-3, atol=1e-4)
    rest = [np.sum(values) for values in metrics]
    np.testing.assert_allclose(ran.learner.sums, rest, rtol=1e-3, atol=1e-2)


def buffer_of(path, is_new=True, spare=4):
    """A buffer of 7 rows and 4 spare ones. A row has an image of bytes and a float."""
    columns = {"image": (np.uint8, (2, 3)), "rewards": (np.float32, ())}
    return ddpg.ReplayBuffer(path, 7, spare, columns, is_new)


def add(replay, numbers):
    """Stores rows; each byte of an image is its row's number."""
    image = np.broadcast_to(numbers[:, None, None], (len(numbers), 2, 3))
    replay.add(image=image, rewards=numbers + 0.5)


def filled(path, steps):
    """A buffer of this many pairs, stored one at a time and two at a time in turn."""
    replay = buffer_of(path)
    step = 0
    for n in [1, 2] * (steps // 3):
        add(replay, np.arange(step, step + n))
        step += n
    return replay


def drawn(replay, n):
    torch.manual_seed(3)
    return replay.read(replay.draw(n))


@pytest.mark.parametrize("steps", [3, 6, 9, 30, 48])
def test_replay_samples_the_last_transitions_and_no_others(tmp_path, steps):
    """Before it is full, where it becomes so, and after the ring of 11 rows has wrapped around."""
    rows = drawn(filled(tmp_path / "replay.bin", steps), 7000)
    assert rows["image"].dtype == np.uint8 and rows["image"].shape == (7000, 2, 3)
    assert rows["rewards"].dtype == np.float32 and rows["rewards"].shape == (7000,)
    values, counts = np.unique(rows["rewards"], return_counts=True)
    assert np.array_equal(values, np.arange(max(0, steps - 7), steps) + 0.5)
    assert np.all(rows["image"] == (rows["rewards"] - 0.5)[:, None, None])
    mean = 7000 / len(values)
    assert np.all(abs(counts - mean) < 5 * np.sqrt(mean))  # all alike


def test_replay_goes_on_from_its_file(tmp_path):
    """What was stored after a checkpoint is not seen.

    As long as no more than the spare rows were written since.
    """
    path = tmp_path / "replay.bin"
    replay = filled(path, 30)
    state = replay.state_dict()
    before = drawn(replay, 50)

    def resumed(spare=4):
        again = buffer_of(path, is_new=False, spare=spare)
        again.load_state_dict(state)
        return drawn(again, 50)

    add(replay, np.arange(30, 34))
    assert np.array_equal(resumed()["image"], before["image"])
    assert np.array_equal(resumed(spare=2)["image"], before["image"])  # a resume may have fewer
    add(replay, np.array([34]))  # one more than there are spare rows for
    assert not np.array_equal(resumed()["image"], before["image"])


@pytest.mark.parametrize("case", ["missing", "shorter", "larger interval"])
def test_a_resume_needs_its_buffer(tmp_path, capsys, case):
    """The file, with as many rows as are needed; else a sentence says what to do."""
    path = tmp_path / "replay.bin"
    filled(path, 9).state_dict()
    data = path.read_bytes()
    if case == "missing":
        path.unlink()
    if case == "shorter":
        path.write_bytes(data[:-1])
    with pytest.raises(SystemExit, match="2"):
        buffer_of(path, is_new=False, spare=5 if case == "larger interval" else 4)
    message = f"{path} is missing or has too few rows: lower --checkpoint-interval, or start a new"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("change", [-1, 1])
def test_a_buffer_of_another_length_is_damaged(tmp_path, capsys, change):
    """Rows would be found in other places, also where there are more than a resume needs."""
    path = tmp_path / "replay.bin"
    replay = filled(path, 9)
    state = replay.state_dict()
    data = path.read_bytes()
    row = replay.rows.itemsize
    path.write_bytes(data[:-row] if change < 0 else data + bytes(row))
    again = buffer_of(path, is_new=False, spare=3)
    with pytest.raises(SystemExit, match="2"):
        again.load_state_dict(state)
    assert capsys.readouterr().err.startswith(f"error: {path} is damaged: start a new run")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e39], ids=str)
def test_a_row_that_is_not_finite_ends_the_run(tmp_path, value):
    """In float32, in which it is stored: 1e39 is infinite there."""
    replay = filled(tmp_path / "replay.bin", 9)
    with pytest.raises(SystemExit, match="error: rewards are not finite after step 9: fix the env"):
        replay.add(image=np.zeros((2, 2, 3)), rewards=np.array([0.0, value]))
    assert replay.count == 9


def test_each_checkpoint_comes_after_the_buffer_is_on_disk(run_script, monkeypatch):
    events, replace = [], os.replace

    def replace_and_say(one, other):
        events.append(Path(other).name)
        replace(one, other)

    monkeypatch.setattr(np.memmap, "flush", lambda file: events.append("buffer"))
    monkeypatch.setattr(os, "replace", replace_and_say)
    run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "Pendulum-v1", "--total-timesteps", "40", "--learning-starts", "20"),
        *("--checkpoint-interval", "20"),
    )
    assert events == ["buffer", "checkpoint.pt"] * 3


@pytest.mark.parametrize("name, variants", [("ddpg", 1), ("td3", 2), ("sac", 1)])
def test_a_run_compiles_its_update_once_for_each_variant(run_script, monkeypatch, name, variants):
    """The first one for the script's trial with torch.sin."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    fully = functools.partial(torch.compile, backend=backend, fullgraph=True, dynamic=False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: fully(function))
    torch._dynamo.reset()
    flags = ["--env-id", "Pendulum-v1", "--total-timesteps", "40", "--learning-starts", "20"]
    path = SCRIPT.with_name(f"{name}_continuous_action.py")
    run_script(path, *QUICK, *flags, "--compile")
    assert len(graphs) == 1 + variants


def seeds_of(seed, num_envs):
    """The seeds of the first episodes in the environments of a VecEnv."""
    seeds = np.random.SeedSequence(seed).generate_state(num_envs)
    states = [np.random.SeedSequence((int(x), 0)).generate_state(1) for x in seeds]
    return [int(state[0]) % 2**31 for state in states]


def test_evaluations_leave_the_run_as_it_is(run_script, made):
    """They have environments and seeds of their own, play without noise, and draw no numbers."""
    flags = [
        *QUICK,
        *("--env-id", "Stamped-v0", "--total-timesteps", "120", "--learning-starts", "20"),
    ]
    seldom = run_script(SCRIPT, *flags, "--eval-interval", "1000", "--run-name", "seldom")
    made.clear()
    often = run_script(SCRIPT, *flags, "--eval-interval", "10", "--run-name", "often")
    for part in ("agent", "learner"):
        ours, theirs = vars(often)[part].state_dict(), vars(seldom)[part].state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    assert np.array_equal(often.replay.rows[:120], seldom.replay.rows[:120])
    sign = (-1) ** made[-1].number
    assert returns(often.run.folder) == [sum(range(1, made[-1].end_before + 1)) * sign]
    during = [seeds_of((1, 2, step), 1)[0] for step in range(10, 121, 10)]
    assert [env.seed for env in made[1:]] == [*during, *seeds_of((1, 1), 1)]
    assert len({env.seed for env in made}) == 14
    obs = np.float32([[made[-1].number, 2, 0]])  # make_env's reset came before
    action = often.agent.act(obs)[0]
    np.testing.assert_allclose(action, made[-1].actions[1], rtol=1e-4, atol=1e-6)


def test_pendulum_is_learned(run_script):
    """Better than -200, in 8,000 steps and with networks of 64 units.

    A random policy has -1,200.
    """
    run_script(
        SCRIPT,
        *("--env-id", "Pendulum-v1", "--total-timesteps", "8000", "--random-steps", "500"),
        *("--learning-starts", "500", "--hidden-sizes", "64", "64", "--batch-size", "128"),
        *("--learning-rate", "1e-3", "--num-threads", "1", "--eval-interval", "10000"),
        *("--run-name", "learned"),
    )
    assert np.mean(returns(Path("runs/learned"))) > -200


def test_noise_is_in_units_of_the_action_range(run_script):
    """The same from -1 to 3 as from 0 to 0.5, in the units in which actions are stored."""
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "StampedSlanted-v0", "--total-timesteps", "100", "--learning-starts", "99"),
        *("--random-steps", "0", "--exploration-noise", "0.02", "--seed", "5"),
    )
    noise = stored_noise(ran)
    torch.manual_seed(5)
    ddpg.Agent(3, 2, (8, 8))
    expected = [0.02 * torch.randn(1, 2).numpy() for _ in range(100)]
    np.testing.assert_allclose(noise, expected, atol=1e-6)


CONTROL = ("ddpg_continuous_action", "td3_continuous_action", "sac_continuous_action", "ddpg_lstm")


@pytest.mark.parametrize("script", CONTROL)
def test_actions_have_the_dtype_of_their_space(script):
    env = importlib.import_module(script).make_env("toys:ContinuousHalf-v0")
    env.reset(seed=1)
    env.step(np.zeros(2, np.float32))  # the toy takes no others
