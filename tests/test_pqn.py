"""pqn.py: returns, RAdam, an update, the network, and actions. What it shares is ppo.py's text."""

import copy

import numpy as np
import pytest
import torch
import torch.nn as nn
from processes import scalars
from test_ppo import (
    compare_compiled,
    learned_share,
    make_agent,
    make_envs,
    needs_compiler,
    record_evaluation,
)

import pqn

TINY = "--env-id Plain-v0 --no-compile --no-cuda --run-name run --eval-episodes 1 --num-steps 64"


def returns_by_definition(rewards, next_values, terminations, dones, gamma, q_lambda):
    """The mean of all n-step returns, each with the weight that lambda gives it: O(T^2).

    The longest, to the end of the episode or the rollout, has the weights of all longer ones.
    """
    returns = np.zeros(rewards.shape)
    num_steps, num_envs = rewards.shape
    for env in range(num_envs):
        for first in range(num_steps):
            rewards_so_far = 0.0
            weight = 1.0
            for n, step in enumerate(range(first, num_steps), start=1):
                rewards_so_far += gamma ** (n - 1) * rewards[step, env]
                following = 0.0 if terminations[step, env] else next_values[step, env]
                n_step_return = rewards_so_far + gamma**n * following
                is_last = dones[step, env] or step == num_steps - 1
                returns[first, env] += weight * (1 if is_last else 1 - q_lambda) * n_step_return
                weight *= q_lambda
                if is_last:
                    break
    return returns


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_returns_are_a_mean_of_n_step_returns(q_lambda):
    shape = 60, 3
    rewards, next_values = np.random.randn(2, *shape).astype(np.float32)
    terminations = np.random.rand(*shape) < 0.05
    dones = terminations | (np.random.rand(*shape) < 0.05)
    dones[-1] = [True, True, False]
    terminations[-1] = [True, False, False]
    data = rewards, next_values, terminations, dones, 0.9, q_lambda
    returns = pqn.compute_returns(*data)
    assert returns.dtype == np.float32
    np.testing.assert_allclose(returns, returns_by_definition(*data), rtol=1e-4, atol=1e-5)


def test_returns_by_hand():
    """Three environments: one goes on, one is cut after its second step, one terminates there."""
    rewards = np.ones((3, 3), np.float32)
    next_values = np.repeat(np.float32([[10], [20], [30]]), 3, axis=1)
    ends = np.zeros((2, 3, 3), bool)
    ends[:, 1] = [[False, False, True], [False, True, True]]
    returns = pqn.compute_returns(rewards, next_values, *ends, 0.5, 0.5)
    assert returns.T.tolist() == [
        [6.0, 10.0, 16.0],
        [6.25, 11.0, 16.0],
        [3.75, 1.0, 16.0],
    ]


def test_a_run_learns_from_returns_of_its_own_values(run_script):
    """Of its only iteration, whose weights hardly move.

    A time limit's final observation has a value, and the last step's is that of the current one.
    Actions are random, and the returns don't end at those that aren't the best.
    """
    flags = f"{TINY} --num-envs 3 --total-timesteps 192 --end-e 1 --learning-rate 1e-12"
    module = run_script(pqn.__file__, *flags.split(), "--gamma", "0.9", "--q-lambda", "0.7")
    assert module.terminations.any() and module.truncations.any()

    def best(obs):
        with torch.no_grad():
            return module.agent.network(torch.from_numpy(obs)).max(-1).values.numpy()

    next_obs = np.concatenate((module.obs[1:], module.envs.obs[None]))
    for step, episode in module.episodes:
        next_obs[step, episode.env] = episode.final_obs
    dones = module.terminations | module.truncations
    expected = returns_by_definition(
        module.rewards, best(next_obs), module.terminations, dones, 0.9, 0.7
    )
    returns = module.batch["returns"].view(64, 3).numpy()
    np.testing.assert_allclose(returns, expected, rtol=1e-4, atol=1e-4)
    assert (
        module.actions != module.agent.policy()(module.obs.reshape(192, 3), 0.0).reshape(64, 3)
    ).any()


def test_each_observation_is_evaluated_once():
    envs = make_envs(pqn, "Plain-v0", 3)
    agent = make_agent(pqn, envs)
    obs, actions, *_, episodes = pqn.rollout(agent, envs, 50)
    rows = []
    agent.network.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    pqn.predict(agent, obs, actions, envs.obs, episodes, "cpu")
    assert len(episodes) > 5
    assert sum(rows) == 150 + 3 + len(episodes)


def test_radam_is_pytorchs():
    """In each of 20 steps with changing rates: the variance counts from the sixth on."""
    shapes = (7, 5), (5,)
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    others = copy.deepcopy(params)
    ours = pqn.RAdam(params)
    theirs = torch.optim.RAdam(others)
    for number in range(1, 21):
        grads = [torch.randn(shape) * 3 for shape in shapes]
        theirs.param_groups[0]["lr"] = 0.02 / number
        for param, grad in zip(others, grads):
            param.grad = grad.clone()
        ours.step(grads, torch.tensor(0.02 / number))
        theirs.step()
        for param, other in zip(params, others):
            torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-9)
            param.data.zero_()  # the next step is to be seen in all its digits
            other.data.zero_()
    assert theirs.defaults["eps"] == ours.eps


@pytest.mark.parametrize("max_grad_norm", [1e9, 0.1])
def test_an_update_written_out(max_grad_norm):
    """Two minibatches: the squared error to constant targets, the gradient's norm clipped."""
    agent = pqn.Agent(4, 3, (16, 8))
    network = copy.deepcopy(agent.network)
    batch = {
        "obs": torch.randn(64, 4),
        "actions": torch.randint(3, (64,)),
        "returns": 5 * torch.randn(64),
    }
    indices = torch.randperm(64).view(2, 32)
    coefs = {"lr": torch.tensor(1e-2), "max_grad_norm": torch.tensor(max_grad_norm)}
    optimizer = pqn.RAdam(agent.parameters())
    metrics = pqn.update_minibatches(optimizer, agent, batch, indices, coefs)

    theirs = torch.optim.RAdam(network.parameters(), lr=1e-2)
    losses, means = [], []
    for rows in indices:
        values = network(batch["obs"][rows])[torch.arange(32), batch["actions"][rows]]
        loss = nn.functional.mse_loss(values, batch["returns"][rows])
        theirs.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
        assert 0.5 < norm
        theirs.step()
        losses.append(loss.item())
        means.append(values.mean().item())
    assert pqn.METRICS == ("td_loss", "q_values")
    assert metrics.tolist() == pytest.approx([sum(losses), sum(means)], rel=1e-4)
    for own, other in zip(agent.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


def test_an_update_uses_each_step_once_an_epoch():
    """In minibatches of random steps; its metrics are means over all of them."""
    seen = []

    def step_minibatches(optimizer, agent, batch, indices, coefs):
        seen.extend(indices.tolist())
        return len(indices) * torch.tensor([1.0, len(seen)])

    args = pqn.Args(num_minibatches=4, update_epochs=3)
    batch = {"obs": torch.zeros(24)}
    assert pqn.update(step_minibatches, None, None, batch, {}, args).tolist() == [1.0, 7.0]
    assert len(seen) == 12 and {len(rows) for rows in seen} == {6}
    epochs = np.array(seen).reshape(3, 24)
    assert (np.sort(epochs) == np.arange(24)).all()
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_learning_rate_falls_to_an_nth(run_script):
    """And the optimizer takes a step for each minibatch of each epoch."""
    flags = f"{TINY} --num-envs 2 --total-timesteps 512 --num-minibatches 2 --update-epochs 3"
    flags += " --max-grad-norm 7"
    for flag, last in (("--anneal-lr", 0.25), ("--no-anneal-lr", 1.0)):
        module = run_script(pqn.__file__, *flags.split(), flag, "--run-name", flag[2:])
        rates = [*scalars(module.run.folder, "charts/learning_rate").values()]
        assert len(rates) == 4
        assert rates[::3] == pytest.approx([2.5e-4, last * 2.5e-4])
        assert module.coefs["lr"].item() == pytest.approx(last * 2.5e-4)
        assert module.coefs["max_grad_norm"] == 7
        assert int(module.optimizer.steps) == 4 * 2 * 3


def test_a_run_that_diverges_ends_with_its_iteration(run_script):
    """Not with the next checkpoint, nor in the end."""
    flags = f"{TINY} --num-envs 2 --total-timesteps 512 --learning-rate 1e30"
    module = run_script(pqn.__file__, *flags.split(), code=1)
    assert module.run.global_step <= 128


def test_the_network_is_cleanrls():
    """LayerNorm between a linear map and ReLU; orthogonal weights of gain sqrt(2), no biases."""
    network = pqn.Agent(4, 2, pqn.Args().hidden_sizes).network
    kinds = [type(layer).__name__ for layer in network]
    assert kinds == 2 * ["Linear", "LayerNorm", "ReLU"] + ["Linear"]
    assert [layer.out_features for layer in network[::3]] == [120, 84, 2]
    assert [layer.normalized_shape for layer in network[1::3]] == [(120,), (84,)]
    for layer in network[::3]:
        weight = layer.weight if layer.out_features < layer.in_features else layer.weight.T
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)), atol=1e-5, rtol=0)
        assert not layer.bias.any()


def trained_agent(hidden_sizes=(120, 84)):
    """An agent whose biases and norms aren't those of a new one."""
    agent = pqn.Agent(4, 3, hidden_sizes)
    for param in agent.parameters():
        param.data += 0.3 * torch.randn_like(param)
    return agent


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("hidden_sizes", [(120, 84), (5,)])
def test_numpy_computes_what_the_network_does(hidden_sizes, scale):
    """With the weights of the moment at which it was made, and where a variance is tiny."""
    agent = trained_agent(hidden_sizes)
    agent.network[0].weight.data *= scale
    agent.network[0].bias.data *= scale
    obs = 10 * torch.randn(20, 4)
    expected = agent(obs).detach()
    outputs = pqn.numpy_mlp(agent.network)
    for param in agent.parameters():
        param.data.zero_()
    found = outputs(obs.numpy())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_other_layers_play_in_pytorch():
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    obs = torch.randn(6, 4)
    expected = network(obs).detach().numpy()
    np.testing.assert_allclose(pqn.numpy_mlp(network)(obs.numpy()), expected, rtol=1e-5)


def test_values_are_those_of_the_best_actions():
    agent = trained_agent()
    obs = torch.randn(20, 4)
    values, actions = agent.network(obs).max(1)
    assert torch.equal(agent.value(obs), values)
    assert np.array_equal(agent.policy()(obs.numpy(), 0.0), actions)
    assert len(actions.unique()) > 1


def test_the_probability_of_a_random_action():
    args = pqn.Args(total_timesteps=1000, exploration_fraction=0.5, start_e=0.9, end_e=0.1)
    found = [pqn.epsilon(step, args) for step in (0, 250, 500, 999)]
    assert found == pytest.approx([0.9, 0.5, 0.1, 0.1])
    assert pqn.epsilon(0, pqn.Args(exploration_fraction=0, end_e=0.3)) == 0.3


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_actions_are_random_with_the_probability_epsilon(epsilon):
    """All actions alike, in each environment and step by itself; else the best one is played."""
    agent = trained_agent()
    agent.network[-1].weight.data *= 1e6  # however large values are
    agent.epsilon = epsilon
    noise = agent.noise(500, 20)
    assert noise.shape == (500, 20, 3) and noise.dtype == np.float32
    obs = np.random.randn(10_000, 4).astype(np.float32)
    policy = agent.policy()
    best = policy(obs, 0.0)
    actions = policy(obs, noise.reshape(10_000, 3))
    explores = noise.any(axis=2).ravel()
    assert explores.mean() == pytest.approx(epsilon, abs=0.02)
    for draws in (explores, explores & (actions == 0)):
        by_step, by_env = (draws.reshape(500, 20).mean(axis).std() for axis in (1, 0))
        assert by_step < 0.15 and by_env < 0.05  # it would be 0.4 if all had the same draw
    assert np.array_equal(actions[~explores], best[~explores])
    if epsilon > 0:
        shares = np.bincount(actions[explores], minlength=3) / explores.sum()
        np.testing.assert_allclose(shares, 1 / 3, atol=0.03)
        assert np.mean(actions[explores] == best[explores]) == pytest.approx(1 / 3, abs=0.03)


def test_a_run_plays_with_the_probability_of_its_step(run_script):
    """Of the first step of the iteration: here of the last of 8, half-way from 0.8 to 0."""
    flags = f"{TINY} --num-envs 2 --total-timesteps 1024 --start-e 0.8 --end-e 0"
    module = run_script(pqn.__file__, *flags.split(), "--exploration-fraction", "1")
    assert module.agent.epsilon == pytest.approx(0.8 / 8)


def test_evaluation_plays_the_best_actions(monkeypatch):
    """Whatever the probability of random ones in training."""
    envs = make_envs(pqn, "Plain-v0", 1)
    agent = make_agent(pqn, envs)
    agent.epsilon = 1.0
    episodes, toy = record_evaluation(pqn, agent, envs, monkeypatch, env_id="Plain-v0")
    seen = toy.obs_seen[2:]  # the first two are of make_env
    actions = iter(toy.actions[1:])
    first = 0
    for episode in episodes:
        obs = torch.tensor(np.array(seen[first : first + episode.length]), dtype=torch.float32)
        for action in agent(obs).argmax(1).tolist():
            assert next(actions) == action
        first += episode.length + 1  # after an episode's last observation comes the next's first
    assert next(actions, None) is None


@needs_compiler
def test_the_compiled_update_equals_the_eager_one():
    """Over the steps in which RAdam's variance begins to count, and with changing rates."""
    args = pqn.Args(update_epochs=2)
    step_minibatches = pqn.compile_or_not(pqn.update_minibatches, args, torch.device("cpu"))
    assert step_minibatches is not pqn.update_minibatches

    def run_update(compiled, agent):
        function = step_minibatches if compiled else pqn.update_minibatches
        batch = {"obs": torch.randn(256, 4), "actions": torch.randint(3, (256,))}
        batch["returns"] = torch.randn(256)
        optimizer = pqn.RAdam(agent.parameters())
        for lr in (1e-3, 5e-4):
            coefs = {"lr": torch.tensor(lr), "max_grad_norm": torch.tensor(10.0)}
            metrics = pqn.update(function, optimizer, agent, batch, coefs, args)
        assert int(optimizer.steps) == 16
        return metrics

    compare_compiled(lambda: pqn.Agent(4, 3, (120, 84)), run_update)


def test_toy_is_learned(run_script):
    flags = "--total-timesteps 16384 --learning-rate 0.003 --eval-episodes 50 --no-compile"
    module = run_script(pqn.__file__, "--env-id", "Plain-v0", *flags.split())
    assert learned_share(module) > 0.8  # 1 is possible, 0.5 is chance


def test_bad_flags(refused):
    for flags, sentence in {
        "--end-e 0.5 --start-e 0.1": "it must be 0 <= --end-e <= --start-e <= 1",
        "--start-e 2": "it must be 0 <= --end-e <= --start-e <= 1",
        "--exploration-fraction 2": "--exploration-fraction must be from 0 to 1",
        "--q-lambda 1.5": "--q-lambda must be from 0 to 1",
        "--gamma 2": "--gamma must be from 0 to 1",
        "--num-steps 0": "--num-steps must be above 0",
        "--num-minibatches 0": "--num-minibatches must be above 0",
        "--update-epochs 0": "--update-epochs must be above 0",
        "--num-minibatches 3": "must be a multiple of --num-minibatches",
        "--total-timesteps 500": "--total-timesteps is below a rollout, 512",
        "--hidden-sizes 0": "--hidden-sizes must be numbers above 0",
    }.items():
        assert sentence in refused(pqn, flags.split())
