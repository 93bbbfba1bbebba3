"""ppo_lstm.py: its recurrent core, step by step and in the update, against nn.LSTMCell, nn.GRUCell and nn.RNNCell in
plain loops (details l1 to l5). What it shares with ppo.py is tested there."""

import copy
import json
import os
import shutil
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from test_ppo import SPACES, adam_state, flat, toy
from torch.distributions import Categorical

import ppo_atari_lstm
import ppo_lstm as ppo

CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
CELL_AND_MEMORY = [("lstm", True), ("gru", True), ("rnn", True), ("lstm", False), ("gru", False)]


class Cue(gym.Env):
    """Five steps; the first observation alone has the cue, -1 or 1, which the last action must repeat (1 for 1)."""

    observation_space, action_space = gym.spaces.Box(-1.0, 1.0, (2,)), gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        pass

    def observe(self):
        return np.array([self.cue * (self.t == 0), self.t == 4], np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, 2 * self.np_random.integers(2) - 1
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        return self.observe(), float(self.t == 5 and action == (self.cue > 0)), self.t == 5, False, {}


class Stopped(toy["Toy"]):
    """Sends its process SIGTERM at step number `at` of all environments."""

    at, steps = None, 0

    def step(self, action):
        Stopped.steps += 1
        if Stopped.steps == Stopped.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)


gym.register("LstmCue-v0", Cue)
gym.register("LstmStopped-v0", Stopped)


def make_agent(envs, cell="lstm", memory=True, hidden_size=7):
    """An agent whose weights and biases are all of a size that shows in its outputs."""
    agent = ppo.Agent(envs.obs_dim, envs.nvec, ppo.Args(cell=cell, memory=memory, hidden_size=hidden_size))
    return randomised(agent)


def randomised(agent, size=0.3):
    for parameter in agent.parameters():
        parameter.data += size * torch.randn_like(parameter)
    return agent


def memories_by_steps(agent, x, memory, dones):
    """The memory after each step, (num_steps, n, num_states, hidden_size), the outputs first: each environment alone,
    step by step, zero where an episode begins, and at every step of an agent without memory."""
    core, rows = agent.cell, []
    cell = CELLS[type(core).__name__.lower()](core.input_size, core.hidden_size)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(core, f"{name}_l0"))
    for i in range(x.shape[1]):
        state, row = memory[:, i], []
        for step in range(len(x)):
            if not agent.args.memory or step and dones[step - 1, i]:
                state = torch.zeros_like(state)
            state = torch.stack(cell(x[step, i], tuple(state))) if len(state) == 2 else cell(x[step, i], state[0])[None]
            row.append(state)
        rows.append(torch.stack(row))
    return torch.stack(rows, 1)


def time_first(batch):
    """A batch whose first dimension is environments as one whose first is steps (of memory: states), and back."""
    return {name: torch.as_tensor(x).transpose(0, 1) for name, x in batch.items()}


def outputs_by_steps(agent, batch):
    """What agent(batch) must give, by nn.LSTMCell or its like and torch.distributions."""
    batch = time_first(batch)
    obs, masks = batch["obs"].split(agent.sizes, 2)
    hidden = memories_by_steps(agent, agent.network(obs), batch["memory"], batch["dones"])[:, :, 0]
    weights = (agent.actor(hidden).exp() * masks.detach()).split(agent.nvec, 2)
    parts = [Categorical(probs=weight) for weight in weights]
    logprobs = sum(part.log_prob(a) for part, a in zip(parts, batch["actions"].unbind(2)))
    return [x.T for x in (logprobs, sum(part.entropy() for part in parts), agent.critic(hidden).squeeze(2))]


def ends_of_all_kinds(num_steps):
    """dones (num_steps, 8): never, always, at the first step, at the last, at both, in mid-segment, twice in a row,
    and at random."""
    dones = torch.zeros(num_steps, 8, dtype=torch.bool)
    for i, steps in enumerate([[], range(num_steps), [0], [-1], [0, -1], [num_steps // 2], [3, 4]]):
        dones[list(steps), i] = True
    dones[:, 7] = torch.rand(num_steps) < 0.3
    return dones


def random_batch(agent, dones):
    """A batch of random observations, masks, allowed actions and memory, in double precision; dones (num_steps, n)."""
    shape, (obs_dim, num_logits) = dones.shape, agent.sizes
    masks, first = (torch.rand(*shape, num_logits) < 0.6).double(), np.cumsum([0, *agent.nvec[:-1]])
    masks[..., first] = 1.0
    actions = [Categorical(probs=mask).sample() for mask in masks.split(agent.nvec, 2)]
    logprobs = -torch.rand(shape).double() - 1
    batch = {"obs": torch.cat((torch.randn(*shape, obs_dim).double(), masks), 2), "actions": torch.stack(actions, 2),
             "dones": dones, "memory": torch.randn(agent.num_states, shape[1], agent.cell.hidden_size).double(),
             "logprobs": logprobs} | {name: torch.randn(shape).double() for name in ("values", "advantages", "returns")}
    return time_first(batch)


def test_defaults_are_those_of_ppo_and_the_details():
    args = ppo.Args()
    assert (args.num_envs, args.num_steps, args.num_minibatches, args.update_epochs) == (4, 128, 4, 4)
    assert (args.learning_rate, args.gamma, args.gae_lambda, args.clip_coef) == (2.5e-4, 0.99, 0.95, 0.2)
    assert (args.ent_coef, args.vf_coef, args.max_grad_norm) == (0.01, 0.5, 0.5)
    assert (args.cell, args.hidden_size, args.memory, args.bootstrap_truncated) == ("lstm", 128, True, True)


def assert_orthogonal(weight, gain):
    weight = weight.detach().flatten(1)
    square = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(square, gain**2 * torch.eye(len(square)), rtol=0, atol=1e-5 * gain)


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_l1_weights_are_orthogonal_and_biases_zero(cell, gates):
    agent = ppo.Agent(3, [3, 2], ppo.Args(cell=cell, hidden_size=20))
    for layer, gain in ((agent.network[0], 2**0.5), (agent.network[2], 2**0.5), (agent.actor, 0.01),
                        (agent.critic, 1.0)):
        assert_orthogonal(layer.weight, gain)
        assert not layer.bias.detach().any()
    assert type(agent.cell) is getattr(nn, cell.upper()) and agent.num_states == 1 + (cell == "lstm")
    shapes = {"weight_ih_l0": (gates * 20, 64), "weight_hh_l0": (gates * 20, 20), "bias_ih_l0": (gates * 20,),
              "bias_hh_l0": (gates * 20,)}
    assert {name: tuple(x.shape) for name, x in agent.cell.named_parameters()} == shapes
    for name, x in agent.cell.named_parameters():
        assert_orthogonal(x, 1.0) if "weight" in name else torch.testing.assert_close(x, torch.zeros_like(x))


def assert_equals_a_loop(agent, batch, by_steps, memory):
    """agent(batch) and by_steps(agent, batch) agree, and their gradients in every parameter, observation and memory."""
    batch["obs"].requires_grad_(), batch["memory"].requires_grad_()
    weights, results = torch.randn(3, *batch["dones"].shape).double(), []
    for outputs in (agent(batch), by_steps(agent, batch)):
        loss = sum((w * x).sum() for w, x in zip(weights, outputs))
        inputs = [*agent.parameters(), batch["obs"], batch["memory"]]
        results.append([*outputs, *torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    assert all((grad != 0).any() for grad in results[0][3:]) == memory


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_outputs_and_gradients_equal_those_of_a_loop_over_steps(cell, memory):
    """With ends of all kinds, masks and several parts."""
    envs = ppo.Envs("Grid-v0", 1, 1)
    agent = make_agent(envs, cell, memory).double()
    batch = random_batch(agent, ends_of_all_kinds(9))
    assert_equals_a_loop(agent, batch, outputs_by_steps, memory)


@pytest.mark.parametrize("script", [ppo, ppo_atari_lstm], ids=lambda script: script.__name__)
@pytest.mark.parametrize("memory, lengths", [(True, [3, 3, 3]), (False, [1])])
def test_training_calls_the_core_once_for_each_stretch_in_which_no_episode_ends(script, memory, lengths):
    args, called = script.Args(hidden_size=6, memory=memory), []
    agent = script.Agent(3, [4], args) if script is ppo else script.Agent(4, args)
    agent.cell.register_forward_pre_hook(lambda _, inputs: called.append(inputs[0].shape[1]))
    dones = torch.zeros(2, 9, dtype=torch.bool)
    dones[0, 2] = dones[1, 5] = dones[0, 8] = True
    obs = torch.zeros(2, 9, 7) if script is ppo else torch.zeros(2, 9, 1, 84, 84, dtype=torch.uint8)
    agent({"obs": obs, "actions": torch.zeros(2, 9, 1, dtype=int)[(...,) if script is ppo else (..., 0)],
           "dones": dones, "memory": torch.zeros(2, 2, 6)})
    assert called == lengths


@pytest.mark.parametrize("script", [ppo, ppo_atari_lstm], ids=lambda script: script.__name__)
def test_cudnn_has_what_a_cpu_does_not_need(script, monkeypatch):
    """Its flattening would move the core's weights out of the flat tensor at the first step after an update. And it
    takes contiguous states only, of a minibatch of several environments too."""
    args = script.Args(hidden_size=6)
    agent = script.Agent(3, [4], args) if script is ppo else script.Agent(4, args)
    params, flattened, contiguous = flat(agent), [], []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flattened.append)
    agent.cell.register_forward_pre_hook(lambda _, inputs: contiguous.extend(x.is_contiguous() for x in inputs[1]))
    views = params.split([p.numel() for p in agent.parameters()])
    views = {name: view.view(p.shape) for (name, p), view in zip(agent.named_parameters(), views)}
    obs = torch.zeros(3, 2, 7) if script is ppo else torch.zeros(3, 2, 1, 84, 84, dtype=torch.uint8)
    batch = {"obs": obs, "actions": torch.zeros(3, 2, 1, dtype=int)[(...,) if script is ppo else (..., 0)],
             "dones": torch.tensor([[False, False], [True, False], [False, True]]), "memory": torch.zeros(3, 2, 6)}
    torch.func.functional_call(agent, views, (batch,))
    agent.step(obs[:, 0].numpy(), torch.zeros(2, 3, 6))
    assert not flattened and contiguous == 6 * [True]


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_outputs_depend_on_their_own_episode_and_its_past_alone(cell, memory):
    """Of n values at m steps, by gradients: exactly zero for other environments, episodes and later steps, not zero for
    the rest; so for the memory at the start."""
    agent = make_agent(ppo.Envs("Plain-v0", 1, 1), cell, memory).double()
    dones = torch.zeros(6, 3, dtype=torch.bool)
    dones[[2, 3], 1] = dones[[0, 5], 2] = True
    batch = random_batch(agent, dones)
    batch["obs"][..., 3:] = 1.0
    batch["obs"].requires_grad_(), batch["memory"].requires_grad_()
    logprobs, _, values = agent(batch)
    for i in range(3):
        for step in range(6):
            ends = [t for t in range(step) if dones[t, i]] if memory else list(range(step))
            first = ends[-1] + 1 if ends else 0
            expected = torch.zeros(6, 3, dtype=torch.bool)
            expected[first : step + 1, i] = True
            for output in (logprobs, values):
                in_obs, in_memory = torch.autograd.grad(output[i, step], [batch["obs"], batch["memory"]],
                                                        retain_graph=True, allow_unused=True, materialize_grads=True)
                assert torch.equal((in_obs[..., :3] != 0).any(2), expected.T)
                assert torch.equal((in_memory != 0).all(2).T, torch.arange(3).expand(agent.num_states, 3) == (
                    -1 if ends or not memory else i))


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
@pytest.mark.parametrize("env_id", ["Grid-v0", "Plain-v0"])
def test_rollouts_and_training_agree(cell, memory, env_id):
    """Log-probabilities, values and the memory afterwards, in a second rollout, in mid-episode, with terminations and
    truncations: the ratio is 1 in the first minibatch."""
    envs = ppo.Envs(env_id, 5, 1)
    agent = make_agent(envs, cell, memory)
    start = ppo.rollout(agent, envs, 7, torch.zeros(agent.num_states, 5, 7))[3]
    kept = start.clone()
    arrays, _, terminations, memory_after, episodes = ppo.rollout(agent, envs, 40, start)
    batch, obs, dones = time_first(arrays), torch.from_numpy(arrays["obs"]), arrays["dones"]
    assert arrays["memory"] is start and torch.equal(start, kept) and (start != 0).any() == memory
    assert terminations.any() and sorted(zip(*dones.nonzero())) == [(step, i) for step, i, *_ in episodes]
    assert {(step, i): ended_by == "termination" for step, i, *_, ended_by, _, _ in episodes} == {
        (step, i): terminations[step, i] for step, i in zip(*dones.nonzero())} and (dones & ~terminations).any()
    with torch.no_grad():
        for logprobs, _, values in (agent(batch), outputs_by_steps(agent, batch)):
            torch.testing.assert_close(batch["logprobs"], logprobs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(batch["values"], values, rtol=1e-5, atol=1e-5)
        last = memories_by_steps(agent, agent.network(obs[..., :3]), start, dones)[-1]
    last[dones[-1]] = 0.0
    torch.testing.assert_close(memory_after, last.transpose(0, 1) * memory, rtol=1e-5, atol=1e-5)
    if not memory:  # then each step is by itself
        batch["dones"] = torch.ones_like(batch["dones"])
        torch.testing.assert_close(batch["values"], outputs_by_steps(agent, batch)[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_l3_memory_is_zero_where_an_episode_has_ended_and_kept_elsewhere(cell):
    """Rollouts of one step: afterwards zero where an episode ended, by termination or truncation; what each episode
    had before its last observation is beside it."""
    envs = ppo.Envs("Plain-v0", 4, 1)
    agent, ends = make_agent(envs, cell), set()
    memory = torch.zeros(agent.num_states, 4, 7)
    for _ in range(40):
        before, obs = memory, torch.from_numpy(envs.obs.copy())
        *_, memory, episodes = ppo.rollout(agent, envs, 1, memory)
        dones = [i in [episode[1] for episode in episodes] for i in range(4)]
        expected = memories_by_steps(agent, agent.network(obs[None, :, :3]), before, None)[0].transpose(0, 1).detach()
        torch.testing.assert_close(memory, torch.where(torch.tensor(dones)[:, None], 0.0, expected))
        assert (memory[:, ~np.array(dones)] != 0).all()
        for _, i, *_, ended_by, final_obs, final_memory in episodes:
            torch.testing.assert_close(final_memory, expected[:, i])
            assert len(final_obs) == 3 + 4
            ends.add(ended_by)
    assert ends == {"termination", "truncation"}


def test_environments_do_not_see_each_others_memory():
    """Another memory of one environment at the start changes what that one does, until its episode ends, and no bit of
    the others."""
    results = []
    for other in (0.0, 5.0):
        torch.manual_seed(2)
        envs = ppo.Envs("Unmasked-v0", 3, 1)
        agent = make_agent(envs)
        memory = torch.full((2, 3, 7), 0.1)
        memory[:, 1] += other
        results.append(ppo.rollout(agent, envs, 30, memory))
    one, another = results[0][0], results[1][0]
    end = int(one["dones"][:, 1].argmax())
    assert 1 < end < 20
    for name in ("logprobs", "values"):
        same = one[name] == another[name]
        assert not same[: end + 1, 1].any() and same[end + 1 :, 1].all() and same[:, [0, 2]].all()
    assert torch.equal(results[0][3], results[1][3])


@pytest.mark.parametrize("env_id", SPACES)
def test_rollouts_keep_to_the_masks_and_sample_the_policy(env_id):
    """Toy itself refuses masked actions; what it got is what is stored. Shares of the first part where it is free."""
    envs = ppo.Envs(env_id, 4, 1)
    agent = ppo.Agent(envs.obs_dim, envs.nvec, ppo.Args(hidden_size=4))
    agent.actor.weight.data.zero_()
    shares = np.arange(1, envs.nvec[0] + 1) / sum(range(1, envs.nvec[0] + 1))
    agent.actor.bias.data[: envs.nvec[0]] = torch.tensor(shares).log()
    arrays = ppo.rollout(agent, envs, 500, torch.zeros(2, 4, 4))[0]
    obs, actions = arrays["obs"], arrays["actions"]
    for i, env in enumerate(envs.envs):
        assert np.array_equal(env.unwrapped.actions, actions[:, i])
    masks = np.split(obs[..., envs.obs_dim :], np.cumsum(envs.nvec)[:-1], 2)
    for k, mask in enumerate(masks):
        assert np.take_along_axis(mask, actions[..., k, None], 2).all() and 0.4 < mask.mean() < 0.9
    chosen = actions[..., 0][masks[0].all(2)]
    assert len(chosen) > 150
    np.testing.assert_allclose(np.bincount(chosen, minlength=envs.nvec[0]) / len(chosen), shares, atol=0.08)


def test_a_step_gives_the_policy_with_exact_zeros_for_what_is_masked():
    envs = ppo.Envs("Grid-v0", 6, 1)
    agent, memory = make_agent(envs), torch.randn(2, 6, 7)
    logits, values, after = agent.step(envs.obs, memory)
    assert not after.requires_grad and logits.shape == (6, envs.num_logits) and values.shape == (6,)
    obs, masks = torch.from_numpy(envs.obs).split(agent.sizes, 1)
    with torch.no_grad():
        hidden = memories_by_steps(agent, agent.network(obs)[None], memory, None)[0, :, 0]
        weights = (agent.actor(hidden).exp() * masks).split(agent.nvec, 1)
        expected = torch.cat([Categorical(probs=weight).probs for weight in weights], 1)
    np.testing.assert_allclose(np.exp(logits), expected, rtol=1e-5, atol=1e-7)
    assert (np.exp(logits)[masks.numpy() == 0] == 0).all() and (masks == 0).any()
    np.testing.assert_allclose(values, agent.critic(hidden).detach()[:, 0], rtol=1e-5, atol=1e-6)


def test_l4_minibatches_are_whole_environments_in_time_order(monkeypatch):
    """Each environment once an epoch, all of its steps and its own memory; another order in each epoch."""
    args = ppo.Args(num_envs=8, num_steps=5, num_minibatches=4, update_epochs=6)
    agent = make_agent(ppo.Envs("Multi-v0", 1, 1))
    code = torch.arange(5) + 10.0 * torch.arange(8)[:, None]  # which step of which environment
    batch = {"obs": torch.cat((code[..., None].expand(8, 5, 3), torch.ones(8, 5, 5)), 2),
             "actions": torch.zeros(8, 5, 2, dtype=torch.int64), "dones": torch.rand(8, 5) < 0.2,
             "memory": 10.0 * torch.arange(8)[:, None, None].expand(8, 2, 7)}
    batch |= {name: code.clone() for name in ("logprobs", "values", "advantages", "returns")}
    seen, ppo_loss = [], ppo.ppo_loss

    def spy(params, agent, minibatch, *rest):
        seen.append(minibatch)
        return ppo_loss(params, agent, minibatch, *rest)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    params = flat(agent)
    state = adam_state(params)
    ppo.update(ppo.update_minibatches, params, state, agent, batch, torch.tensor(0.0), torch.tensor(0.2), args)
    orders = []
    for minibatch in seen:
        rows = (minibatch["values"][:, 0] / 10).long()
        assert minibatch.keys() == batch.keys() and len(rows) == 2
        for name, x in minibatch.items():
            torch.testing.assert_close(x, batch[name].index_select(0, rows))
        orders.append(rows.tolist())
    epochs = [sum(orders[k : k + 4], []) for k in range(0, 24, 4)]
    assert len(orders) == 24 and all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


UPDATES = [{}, {"norm_adv": False, "clip_vloss": False}, {"ent_coef": 0.3, "vf_coef": 2.0, "max_grad_norm": 0.05},
           {"cell": "gru", "num_minibatches": 1}, {"cell": "rnn", "max_grad_norm": 100.0}, {"memory": False}]


@pytest.mark.parametrize("flags", UPDATES, ids=str)
def test_update_equals_the_arithmetic_of_pytorch(flags):
    """Loss by torch.distributions on a loop over steps, clip_grad_norm_, torch.optim.Adam; three epochs."""
    sizes = {"num_envs": 8, "num_steps": 9, "num_minibatches": 2, "update_epochs": 3, "hidden_size": 7}
    args = ppo.Args(**sizes | flags)
    agent = make_agent(ppo.Envs("Multi-v0", 1, 1), args.cell, args.memory).double()
    batch, params, twin = random_batch(agent, ends_of_all_kinds(9)), flat(agent), copy.deepcopy(agent)
    batch["logprobs"] = outputs_by_steps(agent, batch)[0].detach() + 0.2 * torch.randn(8, 9).double()
    lr, clip, metrics, clipped, state = 1e-2, 0.15, [], [], adam_state(params)
    torch.manual_seed(3)
    ours = ppo.update(ppo.update_minibatches, params, state, agent, batch, torch.tensor(lr), torch.tensor(clip), args)
    torch.manual_seed(3)
    orders = [torch.randperm(8) for _ in range(3)]
    adam = torch.optim.Adam(twin.parameters(), lr=torch.tensor(lr).item(), eps=1e-5)
    clip = torch.tensor(clip).item()
    for order in orders:
        for rows in order.chunk(args.num_minibatches):
            part = {name: x.index_select(0, rows) for name, x in batch.items()}
            logprobs, entropy, values = outputs_by_steps(twin, part)
            logratio, advantages = logprobs - part["logprobs"], part["advantages"]
            if args.norm_adv:
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            ratio = logratio.exp()
            policy_loss = -torch.minimum(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()
            errors = (values - part["returns"]) ** 2
            if args.clip_vloss:
                near = part["values"] + (values - part["values"]).clamp(-clip, clip)
                errors = torch.maximum(errors, (near - part["returns"]) ** 2)
            loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * errors.mean() / 2
            adam.zero_grad()
            loss.backward()
            clipped.append(nn.utils.clip_grad_norm_(twin.parameters(), args.max_grad_norm) > args.max_grad_norm)
            adam.step()
            metrics.append(torch.stack((policy_loss, errors.mean() / 2, entropy.mean(), -logratio.mean(), (
                ratio - 1 - logratio).mean(), ((ratio - 1).abs() > clip).double().mean())).detach())
    torch.testing.assert_close(params, flat(twin), rtol=0, atol=1e-7)
    assert (params - flat(agent)).abs().max() > 5e-3
    torch.testing.assert_close(ours.double(), torch.stack(metrics).mean(0), rtol=1e-6, atol=1e-7)
    assert all(clipped) if args.max_grad_norm < 0.1 else not any(clipped) if args.max_grad_norm > 10 else True


def test_target_kl_ends_the_update_after_the_epoch_that_exceeds_it(monkeypatch):
    args = ppo.Args(num_envs=8, num_steps=9, num_minibatches=2, update_epochs=4)
    agent = make_agent(ppo.Envs("Multi-v0", 1, 1))
    batch = random_batch(agent.double(), ends_of_all_kinds(9))
    batch["logprobs"] = agent(batch)[0].detach()
    calls, ppo_loss = [], ppo.ppo_loss

    def spy(*inputs):
        loss, metrics = ppo_loss(*inputs)
        calls.append(metrics)
        return loss, metrics

    def steps(target_kl):
        torch.manual_seed(3)
        calls.clear()
        args.target_kl, params = target_kl, flat(agent)
        state = adam_state(params)
        rates = torch.tensor(3e-3), torch.tensor(0.2)
        metrics = ppo.update(ppo.update_minibatches, params, state, agent, batch, *rates, args)
        torch.testing.assert_close(metrics, torch.stack(calls).mean(0))
        assert state["step"] == len(calls)
        return len(calls)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    assert steps(None) == 8
    kls = torch.stack(calls)[:, ppo.METRICS.index("approx_kl")].view(4, 2).mean(1).tolist()
    assert 0 < kls[0] < kls[1] < kls[2]
    assert [steps(x) for x in (0.99 * kls[0], 1.01 * kls[0], 1.01 * kls[1], 100.0)] == [2, 4, 6, 8]


RUN = ["--env-id", "Multi-v0", "--num-envs", "8", "--num-steps", "20", "--eval-episodes", "1", "--hidden-size", "16",
       "--no-cuda"]


def assert_bootstraps_and_agrees(module, network, gamma=0.99, gae_lambda=0.95):
    """The batch of a run's last iteration, at a learning rate so low that the agent hasn't changed: log-probabilities
    and values are those of training, the advantages quadratic sums whose bootstrap values are of the final observation
    after the memory before the reset, both step by step. network: observations (m, n, ...) -> the core's inputs."""
    agent, batch, args, dones = module.agent, time_first(module.batch), module.args, torch.from_numpy(module.dones)
    truncations = module.dones & ~module.terminations
    assert torch.equal(batch["dones"], dones)
    with torch.no_grad():
        logprobs, _, values = agent(module.batch)
        torch.testing.assert_close(batch["logprobs"], logprobs.T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(batch["values"], values.T, rtol=1e-5, atol=1e-5)
        after = memories_by_steps(agent, network(batch["obs"]), batch["memory"], dones) * agent.args.memory
        torch.testing.assert_close(module.memory.transpose(0, 1), torch.where(dones[-1, :, None, None], 0.0, after[-1]))

        def value(obs, memory):
            x = network(torch.from_numpy(obs[None, None]))
            return agent.critic(memories_by_steps(agent, x, memory[:, None], None)[0, 0, 0]).item()

        finals = {(step, i): (value(obs, after[step, i]), value(obs, 0 * after[step, i]))
                  for step, i, *_, obs, _ in module.episodes if truncations[step, i]}
        last = [value(obs, memory) for obs, memory in zip(module.envs.obs, after[-1])]
    if agent.args.memory:  # else the test could not tell a forgotten memory
        assert all(abs(right - wrong) > 2e-4 for right, wrong in finals.values())
    for i in range(args.num_envs):
        for step in range(args.num_steps):
            expected, weight = 0.0, 1.0
            for t in range(step, args.num_steps):
                cut = module.terminations[t, i] or truncations[t, i] and not args.bootstrap_truncated
                following = 0.0 if cut else finals[t, i][0] if truncations[t, i] else (
                    last[i] if t == args.num_steps - 1 else module.values[t + 1, i])
                expected += weight * (module.rewards[t, i] + gamma * following - module.values[t, i])
                weight *= gamma * gae_lambda
                if dones[t, i]:
                    break
            assert batch["advantages"][step, i] == pytest.approx(expected, abs=3e-5)
    torch.testing.assert_close(batch["returns"], batch["advantages"] + batch["values"])
    assert abs(module.metrics[ppo.METRICS.index("old_approx_kl")]) < 1e-6
    assert module.metrics[ppo.METRICS.index("clipfrac")] == 0
    return finals


@pytest.mark.parametrize("flags", [[], ["--cell", "gru"], ["--cell", "rnn"], ["--no-memory"],
                                   ["--no-bootstrap-truncated"]], ids=str)
def test_a_run_bootstraps_with_the_memory_of_the_final_observation(run_script, flags):
    """In mid-rollout and in its last step, where other episodes go on or end by termination; l5 across rollouts."""
    module = run_script(ppo.__file__, *RUN, "--total-timesteps", "320", "--learning-rate", "1e-12", "--seed", "16",
                        *flags)
    finals = assert_bootstraps_and_agrees(module, lambda obs: module.agent.network(obs[..., :3]))
    last = (module.dones & ~module.terminations)[-1], module.terminations[-1]
    assert last[0].any() and last[1].any() and not (last[0] | last[1]).all() and len(finals) > 2 + last[0].sum()


@pytest.mark.parametrize("cell", CELLS)
def test_l2_l5_memory_starts_at_zero_and_goes_on_into_the_next_rollout(run_script, cell):
    flags = [*RUN, "--no-anneal-lr", "--learning-rate", "0.01", "--cell", cell]
    first, second = [run_script(ppo.__file__, *flags, "--total-timesteps", str(n), "--run-name", str(n))
                     for n in (160, 320)]
    assert first.batch["memory"].shape == (8, 1 + (cell == "lstm"), 16) and not first.batch["memory"].any()
    assert torch.equal(second.batch["memory"].transpose(0, 1), first.memory)
    assert torch.equal((first.memory != 0).all(2).all(0), ~first.batch["dones"][:, -1]) and (first.memory != 0).any()
    assert not first.memory.requires_grad and first.lr == pytest.approx(0.01)


def recorded(monkeypatch, module):
    """The list to which each step of the module's Envs from now on adds its actions."""
    actions, step = [], module.Envs.step

    def record(self, x):
        actions.append(x.ravel().tolist())
        return step(self, x)

    monkeypatch.setattr(module.Envs, "step", record)
    return actions


def play(agent, x, step):
    """Plays step(logits) -> (the core's next inputs, whether the memory is kept) until step gives None."""
    memory = torch.zeros(1, agent.num_states, agent.cell.hidden_size)
    while True:
        with torch.no_grad():
            memory = memories_by_steps(agent, x[None], memory.transpose(0, 1), None)[0]
            following = step(agent.actor(memory[:, 0])[0])
        if following is None:
            return
        x, memory = following[0], memory * (agent.args.memory and following[1])


KEPT = {"right": lambda ended: not ended, "over ends": lambda ended: True, "never": lambda ended: False}


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_evaluation_has_a_memory_that_ends_with_the_episode(monkeypatch, cell, memory):
    """The likeliest allowed actions of a loop over steps; not those of one that keeps its memory over the ends, or has
    none."""
    args = ppo.Args(env_id="Multi-v0", eval_episodes=20, cell=cell, memory=memory, hidden_size=7)
    agent = make_agent(ppo.Envs("Multi-v0", 1, 1), cell, memory)
    agent.cell.weight_hh_l0.data *= 3
    actions = recorded(monkeypatch, ppo)
    results = ppo.evaluate(agent, args)
    played = list(actions)
    for name, keep in KEPT.items():
        actions.clear()
        envs, ended = ppo.Envs("Multi-v0", 1, (1, 1)), []

        def step(logits):
            if len(ended) == 20:
                return None
            parts = (logits.exp() * torch.from_numpy(envs.obs[0, 3:])).split([3, 2])
            new = envs.step(np.array([[part.argmax().item() for part in parts]]))[1]
            ended.extend(new)
            return agent.network(torch.from_numpy(envs.obs[:, :3])), keep(new)

        play(agent, agent.network(torch.from_numpy(envs.obs[:, :3])), step)
        assert (actions == played) == (name == "right" or not memory)
        if name == "right":
            assert results == {"returns": [x[1] for x in ended], "lengths": [x[2] for x in ended]}


CUE = ["--env-id", "LstmCue-v0", "--num-envs", "16", "--num-steps", "20", "--num-minibatches", "2",
       "--learning-rate", "0.01", "--hidden-size", "32", "--eval-episodes", "100", "--run-name", "run",
       "--no-cuda"]


@pytest.mark.parametrize("cell", CELLS)
def test_a_cue_at_the_first_step_is_remembered(run_script, cell, capsys):
    """And by the evaluation; --evaluate plays the same."""
    module = run_script(ppo.__file__, *CUE, "--total-timesteps", "5120", "--cell", cell)
    results = json.loads((module.run_dir / "evaluation.json").read_text())
    assert results["lengths"] == [5] * 100 and np.mean(results["returns"]) == 1.0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation:"))
    run_script(ppo.__file__, "--evaluate", "runs/run")
    assert line in capsys.readouterr().out


def test_without_memory_the_cue_leaves_chance(run_script):
    module = run_script(ppo.__file__, *CUE, "--total-timesteps", "5120", "--no-memory")
    results = json.loads((module.run_dir / "evaluation.json").read_text())
    assert 0.35 < np.mean(results["returns"]) < 0.65 and 0.3 < np.mean(module.recent_returns) < 0.7
    assert not module.memory.any()


def outcome(run_dir):
    """What must be equal in two runs, to the bit: the checkpoint's tensors, episodes without times, evaluation."""
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    tensors = {**checkpoint["agent"], **checkpoint["optimizer"]}
    tensors |= {"memory": checkpoint["memory"]} if "memory" in checkpoint else {}
    rows = [row.split(",") for row in (run_dir / "episodes.csv").read_text().splitlines()]
    return ({name: x.numpy().tobytes() for name, x in tensors.items()}, str(checkpoint["random"]),
            [row[:1] + row[2:] for row in rows], (run_dir / "evaluation.json").read_text())


def assert_memory_in_the_checkpoint_counts(run_script, script, stopped, whole):
    """The run that stopped in mid-episode, resumed, is the whole one; with another memory in its checkpoint not."""
    checkpoint = torch.load(stopped / "checkpoint.pt", weights_only=True)
    assert checkpoint["memory"].any() and (checkpoint["envs"]["episode_lengths"] > 0).any()
    for other, change in (("zeroed", lambda x: x * 0), ("swapped", lambda x: x.flip(1))):
        shutil.copytree(stopped, stopped.with_name(other))
        torch.save(checkpoint | {"memory": change(checkpoint["memory"])}, stopped.with_name(other) / "checkpoint.pt")
        run_script(script, "--resume", f"runs/{other}")
        assert outcome(stopped.with_name(other))[0] != outcome(whole)[0]
    run_script(script, "--resume", str(stopped))
    assert outcome(stopped) == outcome(whole)


STOPPED = ["--env-id", "LstmStopped-v0", "--num-envs", "4", "--num-minibatches", "2", "--num-steps", "10",
           "--total-timesteps", "400", "--update-epochs", "2", "--learning-rate", "0.01", "--hidden-size", "16",
           "--eval-episodes", "3", "--no-cuda"]


def test_runs_are_deterministic_and_resume_exactly_with_their_memory(run_script, monkeypatch, tmp_path):
    whole, again = [run_script(ppo.__file__, *STOPPED, "--run-name", name).run_dir for name in ("whole", "again")]
    assert outcome(whole) == outcome(again)
    monkeypatch.setattr(Stopped, "at", Stopped.steps + 165)
    with pytest.raises(AssertionError, match="143"):  # SIGTERM's exit code, which run_script does not like
        run_script(ppo.__file__, *STOPPED, "--run-name", "stopped", "--checkpoint-interval", "100")
    stopped = tmp_path / "runs" / "stopped"
    assert torch.load(stopped / "checkpoint.pt", weights_only=True)["iteration"] == 5
    assert_memory_in_the_checkpoint_counts(run_script, ppo.__file__, stopped, whole)


def test_an_environment_that_does_not_come_back_starts_without_memory(run_script, capsys):
    """The other environments go on with theirs."""
    run_dir = run_script(ppo.__file__, *RUN, "--total-timesteps", "160", "--run-name", "run").run_dir
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    checkpoint["envs"]["obs"][2] += 1
    assert checkpoint["memory"][:, 2].any()
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    (run_dir / "evaluation.json").unlink()  # so that the run goes on to its end, which is near
    module = run_script(ppo.__file__, "--resume", str(run_dir))
    assert "environment 2 can't be brought back" in capsys.readouterr().out
    expected = checkpoint["memory"].clone()
    expected[:, 2] = 0.0
    assert torch.equal(module.memory, expected)


@pytest.mark.parametrize("change, reason", [
    (lambda x: None, "'memory'"), (lambda x: x[:1], "shape"), (lambda x: x[:, :, :1], "shape")])
def test_a_checkpoint_without_its_memory_is_refused(run_script, capsys, change, reason):
    run_dir = run_script(ppo.__file__, *RUN, "--total-timesteps", "160", "--run-name", "run").run_dir
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    memory = change(checkpoint.pop("memory"))
    torch.save(checkpoint | ({} if memory is None else {"memory": memory}), run_dir / "checkpoint.pt")
    with pytest.raises(AssertionError, match="2"):
        run_script(ppo.__file__, "--resume", str(run_dir))
    said = capsys.readouterr().err
    assert f"can't load {run_dir}: " in said and reason in said


def test_video(run_script):
    run = run_script(ppo.__file__, *RUN, "--total-timesteps", "160", "--env-id", "CartPole-v1", "--capture-video")
    folder = run.run_dir / "videos"
    assert (folder / "episode-0.mp4").stat().st_size > 1000
    assert (folder / "evaluation" / "episode-0.mp4").stat().st_size > 1000


def test_episodes_are_written_and_rates_fall_to_an_nth(run_script):
    module = run_script(ppo.__file__, *RUN, "--total-timesteps", "480", "--anneal-clip", "--run-name", "run")
    assert module.lr.item() == pytest.approx(2.5e-4 / 3) and module.clip_coef.item() == pytest.approx(0.2 / 3)
    rows = [row.split(",") for row in (module.run_dir / "episodes.csv").read_text().splitlines()[1:]]
    expected = [[str(320 + (step + 1) * 8), str(i), repr(episode_return), str(length), ended_by]
                for step, i, episode_return, length, ended_by, *_ in module.episodes]
    assert [row[:1] + row[2:] for row in rows[-len(expected) :]] == expected and len(rows) > len(expected) > 10
    assert torch.equal(flat(module.agent), module.params)


@pytest.mark.parametrize("flags, sentence", [
    (["--num-minibatches", "3"], "--num-envs must divide into --num-minibatches"),
    (["--num-envs", "2"], "--num-envs must divide into --num-minibatches"),
    (["--num-minibatches", "0"], "num_minibatches"), (["--hidden-size", "0"], "hidden_size must be above 0"),
    (["--hidden-size", "-3"], "hidden_size must be above 0"), (["--cell", "transformer"], "transformer"),
    (["--num-steps", "1"], "minibatches of one step"), (["--total-timesteps", "511"], "one rollout of 512 steps")])
def test_bad_flags_are_refused(flags, sentence, refused):
    assert sentence in refused(ppo, flags)


@pytest.mark.parametrize("flags", [["--num-envs", "6", "--num-minibatches", "3", "--num-steps", "1"],
                                   ["--num-steps", "1", "--no-norm-adv"],
                                   ["--num-envs", "1", "--num-minibatches", "1"]])
def test_flags_at_the_edge_are_accepted(flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["ppo_lstm.py", *flags])
    assert ppo.parse_args()[1] is None


def test_a_run_keeps_its_cell(run_script, refused):
    run_script(ppo.__file__, *RUN, "--total-timesteps", "160", "--run-name", "run")
    for flags in (["--cell", "gru"], ["--hidden-size", "17"], ["--no-memory"]):
        assert "runs/run was made with" in refused(ppo, ["--resume", "runs/run", *flags])
