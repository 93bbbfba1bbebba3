"""ddpg_continuous_action.py: its update against plain code and Stable-Baselines3's, and what a run stores and draws."""

import copy
import errno
import json
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from stable_baselines3 import DDPG
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from torch import nn

import ddpg_continuous_action as ddpg

SCRIPT = Path(ddpg.__file__)
QUICK = ("--no-compile", "--num-threads", "1", "--eval-episodes", "1", "--hidden-sizes", "8", "8", "--batch-size", "8")


class Stamped(gym.Env):
    """An observation says which instance it is of, which episode, and which step of it; an episode has 3 to 9 steps,
    odd ones end by termination; the reward is the step, with the instance's sign. Keeps the actions it is given."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    made = []

    def __init__(self, render_mode=None, low=(-1.0, -1.0), high=(1.0, 1.0)):
        self.action_space = Box(np.array(low, np.float32), np.array(high, np.float32))
        self.number, self.episode, self.actions, self.seed = len(self.made), 0, [], None
        self.end = None
        self.made.append(self)

    def observe(self):
        return np.array([self.number, self.episode, self.t], np.float64)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.end_before, self.end = self.end, self.np_random.integers(3, 10)
        self.episode, self.t = self.episode + 1, 0
        return self.observe(), {}

    def step(self, action):
        self.actions.append(action.copy())
        self.t += 1
        ended, reward = self.t == self.end, float(self.t * (-1) ** self.number)
        return self.observe(), reward, bool(ended and self.end % 2), bool(ended and not self.end % 2), {}


class Nested(Stamped):
    """The same with a Dict of observations and a table of actions."""

    observation_space = Dict(b=Box(-np.inf, np.inf, (1,)), a=Box(-np.inf, np.inf, (2, 1)))

    def __init__(self, render_mode=None):
        super().__init__(low=((-1.0, 0.0), (-2.0, -3.0)), high=((3.0, 0.5), (2.0, 1.0)))

    def observe(self):
        obs = super().observe()
        return {"b": obs[:1], "a": obs[1:, None]}


gym.register("Stamped-v0", Stamped)
gym.register("StampedSlanted-v0", Stamped, kwargs={"low": (-1.0, 0.0), "high": (3.0, 0.5)})
gym.register("StampedNarrow-v0", Stamped, kwargs={"low": (-1.0, -1.0), "high": (-0.4, -0.4)})  # 1 rounds to above
gym.register("Nested-v0", Nested)


@pytest.fixture(autouse=True)
def made():
    Stamped.made.clear()
    return Stamped.made


def learn_state(agent):
    """learners as the script's main block makes them: copies of the agent's weights."""
    flat = {name: nn.utils.parameters_to_vector(net.parameters()).detach() for name, net in agent.named_children()}
    return {name: {"params": x, "target": x + 0.01 * torch.randn_like(x), "step": torch.tensor(0.0),
                   "exp_avg": torch.zeros_like(x), "exp_avg_sq": torch.zeros_like(x)} for name, x in flat.items()}


def transitions(n, obs_dim, action_dim):
    """Random rows, as Replay.sample gives them; a third of them are terminations."""
    return torch.cat((torch.randn(n, obs_dim), torch.rand(n, action_dim) * 2 - 1, torch.randn(n, 1),
                      torch.randn(n, obs_dim), (torch.rand(n, 1) < 0.3).float()), 1)


class Reference:
    """DDPG in straight torch: modules, autograd, torch.optim.Adam, targets as copies."""

    def __init__(self, agent, learners, args):
        self.nets, self.targets, self.args = copy.deepcopy(agent), copy.deepcopy(agent), args
        for name in ("actor", "critic"):
            nn.utils.vector_to_parameters(learners[name]["target"].clone(), getattr(self.targets, name).parameters())
        lrs = [lr or args.learning_rate for lr in (args.actor_learning_rate, args.critic_learning_rate)]
        self.actor_adam = torch.optim.Adam(self.nets.actor.parameters(), lrs[0])
        self.critic_adam = torch.optim.Adam(self.nets.critic.parameters(), lrs[1], weight_decay=args.weight_decay)
        self.norms = []  # of the gradients

    def descend(self, loss, net, adam):
        for parameter in self.nets.parameters():
            parameter.grad = None
        loss.backward()
        if self.args.max_grad_norm:
            self.norms.append(nn.utils.clip_grad_norm_(net.parameters(), self.args.max_grad_norm).item())
        adam.step()

    def update(self, rows, with_actor):
        """One update; returns the mean value, the critic's loss and, with_actor, the actor's, as floats."""
        obs, actions, next_obs = rows[:, :3], rows[:, 3:5], rows[:, 6:9]
        nets, targets = self.nets, self.targets
        with torch.no_grad():
            next_values = targets.critic(torch.cat((next_obs, targets.actor(next_obs)), 1))[:, 0]
            returns = torch.where(rows[:, 9] == 1, rows[:, 5], rows[:, 5] + self.args.gamma * next_values)
        values = nets.critic(torch.cat((obs, actions), 1))[:, 0]
        metrics = [values.mean().item(), ((values - returns) ** 2).mean().item()]
        self.descend(((values - returns) ** 2).mean(), nets.critic, self.critic_adam)
        if with_actor:
            loss = -nets.critic(torch.cat((obs, nets.actor(obs)), 1)).mean()
            metrics.append(loss.item())
            self.descend(loss, nets.actor, self.actor_adam)
            with torch.no_grad():
                for target, parameter in zip(targets.parameters(), nets.parameters()):
                    target.copy_((1 - self.args.tau) * target + self.args.tau * parameter)
        return metrics


ALL_FLAGS = {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.01,
             "tau": 0.3, "gamma": 0.9}  # a gradient's norm is always above 0.01: Adam sees only that it is constant
BETWEEN = 0.5  # norms below it and above it


@pytest.mark.parametrize("flags, compiled", [({}, False), ({}, True), (ALL_FLAGS, False), (ALL_FLAGS, True),
                                             ({"learning_rate": 1e-3, "max_grad_norm": 0.01}, False),
                                             ({"max_grad_norm": BETWEEN}, False)])
def test_updates_equal_a_plain_reference(flags, compiled):
    """Weights, targets and metrics, over ten updates of which every third leaves the actor and the targets alone."""
    args = ddpg.Args(hidden_sizes=(16, 12), compile=compiled, **flags)
    agent = ddpg.Agent(3, 2, args.hidden_sizes)
    learners, totals = learn_state(agent), torch.zeros(2, 3)
    reference = Reference(agent, learners, args)
    update = ddpg.compile_or_not(ddpg.ddpg_update, args, torch.device("cpu"))
    sums = np.zeros((2, 3))
    for number in range(10):
        rows = transitions(32, 3, 2)
        update(learners, totals, agent, rows, number % 3 > 0, args)
        metrics = reference.update(rows, number % 3 > 0)
        sums[:, : len(metrics)] += metrics, np.ones(len(metrics))
    for name, learner in learners.items():
        for key, nets in (("params", reference.nets), ("target", reference.targets)):
            expected = nn.utils.parameters_to_vector(getattr(nets, name).parameters()).detach()
            torch.testing.assert_close(learner[key], expected, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(totals.numpy(), sums, rtol=1e-4, atol=1e-5)
    assert (learners["critic"]["step"], learners["actor"]["step"]) == (10, 6)
    if args.max_grad_norm == BETWEEN:
        assert min(reference.norms) < BETWEEN < max(reference.norms)


def test_updates_equal_those_of_stable_baselines3(monkeypatch):
    """DDPG of SB3, five updates from the same weights on the same minibatches."""
    model = DDPG("MlpPolicy", "Pendulum-v1", learning_rate=3e-4, batch_size=32, tau=0.005, gamma=0.99, seed=0,
                 device="cpu", policy_kwargs={"net_arch": [16, 16]})
    model.set_logger(Logger(None, []))
    args = ddpg.Args(hidden_sizes=(16, 16))
    agent = ddpg.Agent(3, 1, args.hidden_sizes)
    theirs = {"actor": (model.actor.mu, model.actor_target.mu),
              "critic": (model.critic.qf0, model.critic_target.qf0)}
    learners = learn_state(agent)
    for name, nets in theirs.items():
        for key, net in zip(("params", "target"), nets):
            nn.utils.vector_to_parameters(learners[name][key].clone(), net.parameters())
    for _ in range(5):
        rows = transitions(32, 3, 1)
        obs, actions, rewards, next_obs, terminations = rows.split((3, 1, 1, 3, 1), 1)
        batch = ReplayBufferSamples(obs, actions, next_obs, terminations, rewards)
        monkeypatch.setattr(model.replay_buffer, "sample", lambda *_, batch=batch, **__: batch)
        model.train(gradient_steps=1, batch_size=32)
        ddpg.ddpg_update(learners, torch.zeros(2, 3), agent, rows, True, args)
    for name, nets in theirs.items():
        for key, net in zip(("params", "target"), nets):
            expected = nn.utils.parameters_to_vector(net.parameters()).detach()
            torch.testing.assert_close(learners[name][key], expected, rtol=1e-5, atol=1e-7)


def test_the_step_of_the_actor_leaves_the_critic_alone():
    """After one update the critic is the same with and without it, while the actor and both targets differ."""
    args = ddpg.Args(hidden_sizes=(16, 16))
    agent, rows = ddpg.Agent(3, 2, args.hidden_sizes), transitions(32, 3, 2)
    before = learn_state(agent)
    after = {}
    for with_actor in (False, True):
        after[with_actor] = copy.deepcopy(before)
        ddpg.ddpg_update(after[with_actor], torch.zeros(2, 3), agent, rows, with_actor, args)
    assert torch.equal(after[True]["critic"]["params"], after[False]["critic"]["params"])
    assert not torch.equal(after[True]["actor"]["params"], before["actor"]["params"])
    for name, learner in before.items():
        assert torch.equal(after[False][name]["target"], learner["target"])
        moved = 0.995 * learner["target"] + 0.005 * after[True][name]["params"]
        torch.testing.assert_close(after[True][name]["target"], moved, rtol=1e-6, atol=1e-7)


def test_networks_and_defaults_are_those_of_the_td3_paper():
    args = ddpg.Args()
    agent = ddpg.Agent(17, 6, args.hidden_sizes)
    for net, inputs, outputs, last in ((agent.actor, 17, 6, [nn.Tanh]), (agent.critic, 23, 1, [])):
        assert [type(x) for x in net] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear, *last]
        assert [tuple(x.weight.shape) for x in net if isinstance(x, nn.Linear)] == [
            (256, inputs), (256, 256), (outputs, 256)]
        for layer in net[:-2:2]:  # PyTorch's initialisation: both uniform up to 1 / sqrt(inputs)
            for parameter in layer.parameters():
                assert 0.9 < parameter.abs().max() * layer.in_features**0.5 <= 1
    assert args.total_timesteps == args.buffer_size == 1_000_000
    assert (args.learning_starts, args.random_steps) == (25_000, None)
    assert (args.learning_rate, args.gamma, args.tau, args.batch_size) == (3e-4, 0.99, 0.005, 256)
    assert (args.exploration_noise, args.noise_type, args.policy_frequency, args.updates_per_step) == (
        0.1, "gaussian", 1, 1.0)
    assert (args.norm_obs, args.norm_reward, args.weight_decay, args.max_grad_norm) == (False, False, 0.0, None)


def stored(run):
    """A run's replay buffer as arrays (steps, num_envs, ...): obs, actions, rewards, next_obs, terminations."""
    rows = torch.tensor(run.replay.rows[: run.replay.count]).unflatten(0, (-1, run.args.num_envs))
    return [x.numpy() for x in rows.split(run.agent.row_sizes, -1)]


def test_next_observations_are_those_before_the_reset(run_script):
    """Three environments, whose episodes end in both ways: each transition stays in its episode, and only a
    termination is one."""
    run = run_script(SCRIPT, *QUICK, "--env-id", "Stamped-v0", "--num-envs", "3", "--total-timesteps", "300",
                     "--learning-starts", "297", "--random-steps", "0", "--eval-interval", "1000")
    obs, _, rewards, next_obs, terminations = stored(run)
    numbers, episodes, t = obs[..., 0], obs[..., 1], obs[..., 2]
    assert np.array_equal(numbers, np.broadcast_to([0, 1, 2], (100, 3)))
    assert np.array_equal(next_obs, np.stack((numbers, episodes, t + 1), -1))
    assert np.array_equal(rewards[..., 0], (t + 1) * [1, -1, 1])
    last = np.append(t[1:] == 0, np.zeros((1, 3), bool), 0)  # of its episode
    odd = next_obs[..., 2] % 2 == 1
    assert np.array_equal(terminations[:-1, :, 0], (last & odd)[:-1])
    assert (last & odd).sum() > 5 and (last & ~odd).sum() > 5
    assert np.array_equal(obs[1:][~last[:-1]], next_obs[:-1][~last[:-1]])


@pytest.mark.parametrize("flags, theta, scales", [
    (["--exploration-noise", "0.02"], 1.0, (0.02, 0.02)),
    (["--exploration-noise", "0.02", "--final-exploration-noise", "0.002"], 1.0, (0.02, 0.002)),
    (["--exploration-noise", "0.0", "--final-exploration-noise", "0.03", "--noise-type", "ou"], 0.15, (0.0, 0.03)),
    (["--exploration-noise", "0.02", "--final-exploration-noise", "0", "--noise-type", "ou"], 0.15, (0.02, 0.0)),
], ids=["gaussian", "gaussian scheduled", "ou scheduled up", "ou scheduled down"])
def test_exploration_noise(run_script, flags, theta, scales):
    """Action less policy is noise drawn from the run's random state: the scale runs linearly from the first step's to
    the last one's, and the Ornstein-Uhlenbeck process starts at 0 in each episode."""
    steps = 100
    run = run_script(SCRIPT, *QUICK, "--env-id", "Stamped-v0", "--num-envs", "2", "--total-timesteps", str(2 * steps),
                     "--learning-starts", str(2 * steps - 1), "--random-steps", "0", "--seed", "5", *flags)
    obs, actions = stored(run)[:2]
    torch.manual_seed(5)
    agent = ddpg.Agent(3, 2, (8, 8))  # the policy before its only update
    with torch.no_grad():
        noises = actions - agent.actor(torch.tensor(obs)).numpy()
    draws, noise = np.random.RandomState(5), np.zeros((2, 2))
    for step in range(steps):
        scale = scales[0] + (scales[1] - scales[0]) * step / (steps - 1)
        noise[obs[step, :, 2] == 0] = 0.0
        noise = noise * (1 - theta) + scale * draws.standard_normal((2, 2))
        np.testing.assert_allclose(noises[step], noise, atol=1e-6)
    assert abs(actions).max() < 1


@pytest.mark.parametrize("env_id", ["StampedSlanted-v0", "StampedNarrow-v0", "Nested-v0"])
def test_actions_are_in_units_of_the_bounds_and_stay_inside(run_script, made, env_id):
    """-1 and 1 are the bounds, 0 the middle; noise of 0.5 is half of half the range; random actions fill the range."""
    run = run_script(SCRIPT, *QUICK, "--env-id", env_id, "--total-timesteps", "400", "--learning-starts", "399",
                     "--random-steps", "200", "--exploration-noise", "0.5")
    space, actions = run.envs.envs[0].action_space, stored(run)[1][:, 0].reshape(400, *run.envs.action_shape)
    played = np.array(made[0].actions)
    middle, half = (space.low + space.high) / 2, (space.high - space.low) / 2
    np.testing.assert_allclose(played, middle + actions * half, atol=1e-6)
    assert played.dtype == space.dtype and all(space.contains(action) for action in played)
    assert np.all(played[:200].min(0) < space.low + 0.1 * half)
    assert np.all(played[:200].max(0) > space.high - 0.1 * half)
    draws = np.random.RandomState(run.args.seed)
    uniform = draws.uniform(-1.0, 1.0, (200, 1, actions[0].size)).reshape(200, *run.envs.action_shape)
    np.testing.assert_allclose(actions[:200], uniform, atol=1e-7)
    assert np.isin([-1.0, 1.0], actions[200:]).all()  # clipped there
    envs = ddpg.Envs(env_id, 1, 1)
    for action, bound in ((-1.0, space.low), (1.0, space.high)):
        envs.step(np.full((1, envs.action_dim), action))
        assert np.array_equal(made[-1].actions[-1], bound)


def test_random_steps_last_until_learning_starts_unless_told(run_script):
    run = run_script(SCRIPT, *QUICK, "--env-id", "Stamped-v0", "--total-timesteps", "80", "--learning-starts", "60",
                     "--exploration-noise", "0")
    actions, draws = stored(run)[1], np.random.RandomState(run.args.seed)
    np.testing.assert_allclose(actions[:60], draws.uniform(-1.0, 1.0, (60, 1, 2)), atol=1e-7)
    with torch.no_grad():
        policy = run.agent.actor(torch.tensor(stored(run)[0][60:])).numpy()
    assert abs(actions[60:] - policy).max() < 0.1  # of the end, a few small updates later


@pytest.mark.parametrize("flags, critic_steps, actor_steps", [
    ((), 61, 61),
    (("--policy-frequency", "2"), 61, 31),
    (("--updates-per-step", "0.25"), 16, 16),
    (("--updates-per-step", "3", "--policy-frequency", "4"), 183, 46),
    (("--num-envs", "2"), 61, 61),
], ids=["defaults", "delayed", "fewer", "more, delayed", "two environments"])
def test_numbers_of_updates(run_script, flags, critic_steps, actor_steps):
    """100 steps, the first 39 without an update; what comes after counts for all environments together."""
    run = run_script(SCRIPT, *QUICK, "--env-id", "Stamped-v0", "--total-timesteps", "100", "--learning-starts", "39",
                     "--random-steps", "20", *flags)
    assert (run.learners["critic"]["step"], run.learners["actor"]["step"]) == (critic_steps, actor_steps)


@pytest.mark.parametrize("flags", [
    (),
    ("--norm-obs", "--norm-reward", "--policy-frequency", "2", "--updates-per-step", "1.5", "--gamma", "0.9"),
], ids=["defaults", "normalised"])
def test_a_run_equals_plain_code(run_script, flags):
    """All of a run of 60 steps in two environments: each action, and the weights and targets at the end, from the seed,
    the environments' answers and the reference, with the statistics of SB3."""
    run = run_script(SCRIPT, *QUICK, "--env-id", "Stamped-v0", "--num-envs", "2", "--total-timesteps", "120",
                     "--learning-starts", "50", "--random-steps", "30", "--seed", "7", "--eval-interval", "25", *flags)
    args, transitions = run.args, torch.tensor(run.replay.rows[:120])
    obs, actions, rewards, *_ = stored(run)
    next_obs = np.append(obs[1:], run.envs.raw_obs[None], 0)  # after resets
    torch.manual_seed(7)
    agent, draws = ddpg.Agent(3, 2, (8, 8)), np.random.RandomState(7)
    learners = {name: learner | {"target": learner["params"]} for name, learner in learn_state(agent).items()}
    reference, num_updates = Reference(agent, learners, args), 0
    obs_rms, ret_rms, returns = RunningMeanStd(shape=(3,)), RunningMeanStd(shape=()), np.zeros(2)
    obs_rms.update(obs[0])

    def normalised(x):
        return ((x - obs_rms.mean) / np.sqrt(obs_rms.var + 1e-8)).clip(-10, 10) if args.norm_obs else x

    for step in range(60):
        if 2 * step < 30:
            expected = draws.uniform(-1, 1, (2, 2))
        else:
            noise = 0.1 * draws.standard_normal((2, 2))
            with torch.no_grad():
                policy = reference.nets.actor(torch.tensor(normalised(obs[step]), dtype=torch.float32)).numpy()
            expected = (policy + noise).clip(-1, 1)
        np.testing.assert_allclose(actions[step], expected, atol=1e-5)
        obs_rms.update(next_obs[step])
        returns = returns * args.gamma + rewards[step, :, 0]
        ret_rms.update(returns)
        returns[next_obs[step, :, 2] == 0] = 0.0
        count = 2 * step + 2
        while num_updates < (count - 50) * args.updates_per_step:
            rows = transitions[count - 1 - draws.randint(count, size=8)].numpy()
            rows[:, :3], rows[:, 6:9] = normalised(rows[:, :3]), normalised(rows[:, 6:9])
            if args.norm_reward:
                rows[:, 5] = (rows[:, 5] / np.sqrt(ret_rms.var + 1e-8)).clip(-10, 10)
            reference.update(torch.tensor(rows), num_updates % args.policy_frequency == 0)
            num_updates += 1
    assert num_updates == 70 * args.updates_per_step
    assert [run.obs_stats is None, run.return_stats is None] == [not flags] * 2  # else small rewards hide it
    for name, learner in run.learners.items():
        for key, nets in (("params", reference.nets), ("target", reference.targets)):
            expected = nn.utils.parameters_to_vector(getattr(nets, name).parameters()).detach()
            torch.testing.assert_close(learner[key], expected, rtol=1e-3, atol=1e-5)
        assert torch.equal(nn.utils.parameters_to_vector(getattr(run.agent, name).parameters()), learner["params"])


def replay_of(path, size, spare, steps):
    """A buffer of rows (step, step + 0.5), one at a time and two at a time in turn."""
    replay, step = ddpg.Replay(path, size, spare, obs_dim=0, action_dim=0), 0
    for n in [1, 2] * (steps // 3):
        numbers = np.arange(step, step + n)
        replay.add(numbers, numbers + 0.5)
        step += n
    return replay


@pytest.mark.parametrize("steps", [3, 6, 9, 30, 48])
def test_replay_samples_the_last_transitions_and_no_others(tmp_path, steps):
    """Before it is full, where it becomes so, and after the ring of 7 + 4 rows has wrapped around."""
    rows = replay_of(tmp_path / "replay.bin", 7, 4, steps).sample(7000, None, None).numpy()
    values, counts = np.unique(rows[:, 0], return_counts=True)
    assert np.array_equal(values, np.arange(max(0, steps - 7), steps))
    assert np.array_equal(rows[:, 1], rows[:, 0] + 0.5)
    assert np.all(abs(counts - 7000 / len(values)) < 5 * np.sqrt(7000 / len(values)))  # all alike


def test_replay_goes_on_from_its_file(tmp_path):
    """What was stored after a count is not seen, as long as no more than the spare rows were written since."""
    replay = replay_of(tmp_path / "replay.bin", 7, 4, 30)
    np.random.seed(3)
    drawn = replay.sample(50, None, None)
    for step in range(30, 34):
        replay.add(np.array([step]), np.array([step + 0.5]))
    np.random.seed(3)
    assert torch.equal(ddpg.Replay(tmp_path / "replay.bin", 7, 4, 0, 0, count=30).sample(50, None, None), drawn)
    replay.add(np.array([34.0]), np.array([34.5]))  # one more than there are spare rows for
    np.random.seed(3)
    assert not torch.equal(ddpg.Replay(tmp_path / "replay.bin", 7, 4, 0, 0, count=30).sample(50, None, None), drawn)


@pytest.mark.parametrize("count", [0, 30])
def test_a_buffer_that_finds_no_room_keeps_none(tmp_path, monkeypatch, capsys, count):
    """But a resumed run's is left as it is."""
    path = tmp_path / "replay.bin"
    replay_of(path, 7, 4, 30)
    before = path.read_bytes()

    def fill(file, _, size):
        if not count:
            os.write(file, bytes(size // 2))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(SystemExit, match="2"):
        ddpg.Replay(path, 7, 4, 0, 0, count)
    assert "No space left on device): free disk space, or lower --buffer-size" in capsys.readouterr().err
    assert path.read_bytes() == before if count else not path.exists()


def test_a_buffer_that_cannot_be_opened_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        ddpg.Replay(tmp_path, 7, 4, 0, 0)
    assert "(Is a directory): free disk space" in capsys.readouterr().err and tmp_path.is_dir()


def test_each_checkpoint_comes_after_the_buffer_is_on_disk(run_script, monkeypatch):
    events, replace = [], os.replace
    monkeypatch.setattr(np.memmap, "flush", lambda file: events.append("buffer"))
    monkeypatch.setattr(os, "replace", lambda one, other: [events.append(Path(other).name), replace(one, other)])
    run_script(SCRIPT, *QUICK, "--env-id", "Pendulum-v1", "--total-timesteps", "40", "--learning-starts",
               "20", "--checkpoint-interval", "20")
    assert events[:6] == ["buffer", "checkpoint.pt"] * 3


def test_all_cores_are_taken_and_a_resumed_run_takes_as_many(run_script):
    """What PyTorch takes by itself is all cores."""
    threads, flags = torch.get_num_threads(), [*QUICK[:1], *QUICK[3:], "--learning-starts", "20"]
    try:
        torch.set_num_threads(2)
        run = run_script(SCRIPT, *flags, "--env-id", "Pendulum-v1", "--total-timesteps", "40")
        assert torch.get_num_threads() == run.args.num_threads == 2
        (run.run_dir / "evaluation.json").unlink()
        torch.set_num_threads(1)
        run_script(SCRIPT, "--resume", str(run.run_dir))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_normalisation_is_that_of_vec_normalize(run_script, made, tmp_path):
    """The statistics of a run, and what they make of a minibatch and of the policy's observations, equal SB3's."""
    run = run_script(SCRIPT, *QUICK, "--env-id", "Stamped-v0", "--num-envs", "2", "--total-timesteps", "200",
                     "--learning-starts", "199", "--norm-obs", "--norm-reward", "--gamma", "0.9", "--eval-interval",
                     "50")
    actions = [env.actions for env in made[:2]]
    made.clear()
    vec = DummyVecEnv([lambda: gym.make("Stamped-v0") for _ in range(2)])
    vec = VecNormalize(vec, gamma=0.9)
    seeds = np.random.SeedSequence(1).generate_state(2)
    for env, seed in zip(vec.venv.envs, seeds):  # as the script does before the first episode's reset
        env.reset()
        env.reset(seed=int(seed))
    vec.reset()
    for both in zip(*actions):
        vec.step(np.array(both))
    np.testing.assert_allclose(run.envs.obs_stats.mean[0], vec.obs_rms.mean, rtol=1e-9)
    np.testing.assert_allclose(run.envs.obs_stats.var[0], vec.obs_rms.var, rtol=1e-9)
    np.testing.assert_allclose(run.envs.return_stats.var, vec.ret_rms.var, rtol=1e-9)
    obs_stats, return_stats = run.envs.obs_stats, run.envs.return_stats
    assert run.obs_stats is obs_stats and run.return_stats is return_stats
    obs_stats.var[0, 0] = vec.obs_rms.var[0] = 1e-6  # something is clipped
    return_stats.var = vec.ret_rms.var = np.array(0.1)  # here, too
    np.random.seed(3)
    raw = run.replay.sample(64, None, None).numpy()
    np.random.seed(3)
    rows = run.replay.sample(64, obs_stats, return_stats).numpy()
    for columns in (slice(0, 3), slice(6, 9)):
        np.testing.assert_allclose(rows[:, columns], vec.normalize_obs(raw[:, columns]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rows[:, 5], vec.normalize_reward(raw[:, 5]), rtol=1e-5)
    assert np.array_equal(rows[:, [3, 4, 9]], raw[:, [3, 4, 9]])
    assert abs(rows[:, 0]).max() == abs(rows[:, 5]).max() == 10 and abs(rows[:, 5]).min() < 10
    obs = raw[:, :3].astype(np.float64)
    with torch.no_grad():
        expected = run.agent.actor(torch.tensor(vec.normalize_obs(obs), dtype=torch.float32))
    np.testing.assert_allclose(run.agent.act(obs, obs_stats), expected, rtol=1e-4, atol=1e-5)


def test_evaluations_leave_the_run_as_it_is(run_script, made):
    """They have environments and seeds of their own, play without noise, and draw nothing from the run's states."""
    flags = (*QUICK, "--env-id", "Stamped-v0", "--total-timesteps", "120", "--learning-starts", "20", "--norm-obs")
    seldom = run_script(SCRIPT, *flags, "--eval-interval", "1000", "--run-name", "seldom")
    made.clear()
    often = run_script(SCRIPT, *flags, "--eval-interval", "10", "--run-name", "often")
    for name, learner in seldom.learners.items():
        assert all(torch.equal(x, often.learners[name][key]) for key, x in learner.items())
    result = json.loads((often.run_dir / "evaluation.json").read_text())
    assert result["lengths"] == [made[-1].end_before]
    assert result["returns"] == [sum(range(1, result["lengths"][0] + 1)) * (-1) ** made[-1].number]
    assert len(made) == 14 and len({env.actions[0].tobytes() for env in made[-2:]}) == 1
    assert {env.seed for env in made[1:]} == {np.random.SeedSequence((1, 1)).generate_state(1)[0]} != {made[0].seed}
    obs = np.array([[made[-1].number, 3.0, 0.0]])  # two resets came before that of the first episode
    np.testing.assert_allclose(often.agent.act(obs, often.obs_stats)[0], made[-1].actions[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_is_learned(run_script, seed):
    """Better than -200, in 8,000 steps and with networks of 64 units (a random policy has -1,200)."""
    run_script(SCRIPT, "--env-id", "Pendulum-v1", "--total-timesteps", "8000", "--random-steps", "500",
               "--learning-starts", "500", "--hidden-sizes", "64", "64", "--batch-size", "128", "--learning-rate",
               "1e-3", "--num-threads", "1", "--eval-interval", "10000", "--seed", str(seed), "--run-name", "learned")
    assert np.mean(json.loads(Path("runs/learned/evaluation.json").read_text())["returns"]) > -200
