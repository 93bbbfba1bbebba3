"""ppo_lstm.py: its recurrent core, step by step and in the update (details l1 to l5).

The oracles are nn.LSTMCell, nn.GRUCell and nn.RNNCell in plain loops. What the script shares with
ppo.py is tested there.
"""

import copy
import json
import shutil
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from processes import differences, edit_checkpoint, load_checkpoint
from torch.distributions import Categorical

import ppo_atari_lstm
import ppo_lstm as ppo

CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
CELL_AND_MEMORY = [("lstm", True), ("gru", True), ("rnn", True), ("lstm", False), ("gru", False)]
BOTH_SCRIPTS = pytest.mark.parametrize(
    "script", [ppo, ppo_atari_lstm], ids=lambda script: script.__name__
)


class Noise(gym.Env):
    """Observations are noise. Episodes of 3 to 17 steps; the odd ones end by termination."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
    action_space = gym.spaces.Discrete(4)

    def __init__(self, render_mode=None):
        pass

    def observe(self):
        self.x = self.np_random.normal(size=3).astype(np.float32)
        return self.x

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.end = self.np_random.integers(3, 18)
        return self.observe(), {}

    def step(self, action):
        reward = float((action > 1) == (self.x[0] > 0))
        self.t += 1
        done = bool(self.t == self.end)
        odd = bool(self.end % 2)
        return self.observe(), reward, done and odd, done and not odd, {}


class Cue(Noise):
    """Five steps; the last action must repeat the cue, -1 or 1, which only the first obs has."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,))
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        return np.array([self.cue * (self.t == 0), self.t == 4], np.float32)

    def reset(self, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.t = 0
        self.cue = 2 * self.np_random.integers(2) - 1
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        reward = float(self.t == 5 and action == (self.cue > 0))
        return self.observe(), reward, self.t == 5, False, {}


gym.register("LstmNoise-v0", Noise)
gym.register("LstmCue-v0", Cue)


def make_envs(num_envs, seed=1):
    envs = [ppo.make_env("LstmNoise-v0") for _ in range(num_envs)]
    return ppo.VecEnv(envs, seed, np.float32)


def make_agent(cell="lstm", memory=True, hidden_size=7):
    """An agent whose weights and biases are all of a size that shows in its outputs."""
    args = ppo.Args(cell=cell, memory=memory, hidden_size=hidden_size)
    return randomised(ppo.Agent(3, 4, args))


def randomised(agent, size=0.3):
    for parameter in agent.parameters():
        parameter.data += size * torch.randn_like(parameter)
    return agent


def flat(agent):
    """A copy of the parameters."""
    return nn.utils.parameters_to_vector(agent.parameters()).detach().clone()


def outputs(agent, batch):
    """The agent's own logprobs, entropy and values of a batch."""
    return agent(batch["obs"], batch["actions"], batch["memory"], batch["dones"])


def memories_by_steps(agent, x, memory, dones):
    """The memory after each step, (num_steps, n, num_states, hidden_size), the outputs first.

    x: (num_steps, n, inputs). Each environment alone, step by step; zero where an episode begins,
    and at every step of an agent without memory.
    """
    core = agent.cell
    cell = CELLS[type(core).__name__.lower()](core.input_size, core.hidden_size)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(core, f"{name}_l0"))
    rows = []
    for i in range(x.shape[1]):
        state = memory[i]
        row = []
        for step in range(len(x)):
            if not agent.use_memory or step and dones[step - 1, i]:
                state = torch.zeros_like(state)
            if len(state) == 2:
                state = torch.stack(cell(x[step, i], tuple(state)))
            else:
                state = cell(x[step, i], state[0])[None]
            row.append(state)
        rows.append(torch.stack(row))
    return torch.stack(rows, 1)


def swap(batch):
    """A batch whose first dimension is environments as one whose first is steps, and back.

    But for the memory, which has no steps.
    """
    batch = {name: torch.as_tensor(x) for name, x in batch.items()}
    return {name: x if name == "memory" else x.transpose(0, 1) for name, x in batch.items()}


def outputs_by_steps(agent, batch):
    """What outputs(agent, batch) must give, by nn.LSTMCell or its like and distributions."""
    batch = swap(batch)
    x = agent.network(batch["obs"])
    hidden = memories_by_steps(agent, x, batch["memory"], batch["dones"])[:, :, 0]
    policy = Categorical(logits=agent.actor(hidden))
    logprobs = policy.log_prob(batch["actions"])
    return logprobs.T, policy.entropy().T, agent.critic(hidden).squeeze(2).T


def ends_of_all_kinds(num_steps):
    """dones (num_steps, 8): at several steps of an environment, or at random."""
    dones = torch.zeros(num_steps, 8, dtype=torch.bool)
    middle = num_steps // 2
    for i, steps in enumerate([[], range(num_steps), [0], [-1], [0, -1], [middle], [3, 4]]):
        dones[list(steps), i] = True
    dones[:, 7] = torch.rand(num_steps) < 0.3
    return dones


def random_batch(agent, dones):
    """Random observations, actions and memory, float64; dones (num_steps, n)."""
    shape = dones.shape
    batch = {
        "obs": torch.randn(*shape, 3).double(),
        "actions": torch.randint(0, 4, shape),
        "dones": dones,
        "memory": torch.randn(shape[1], agent.num_states, agent.cell.hidden_size).double(),
        "logprobs": -torch.rand(shape).double() - 1,
    }
    for name in ("values", "advantages", "returns"):
        batch[name] = torch.randn(shape).double()
    return swap(batch)


def assert_orthogonal(weight, gain):
    weight = weight.detach().flatten(1)
    square = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(square, gain**2 * torch.eye(len(square)), rtol=0, atol=1e-5 * gain)


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_l1_weights_are_orthogonal_and_biases_zero(cell, gates):
    agent = ppo.Agent(3, 5, ppo.Args(cell=cell, hidden_sizes=(64, 32), hidden_size=20))
    gains = {
        agent.network[0]: 2**0.5,
        agent.network[2]: 2**0.5,
        agent.actor: 0.01,
        agent.critic: 1.0,
    }
    for layer, gain in gains.items():
        assert_orthogonal(layer.weight, gain)
        assert not layer.bias.detach().any()
    assert [type(layer) for layer in agent.network] == 2 * [nn.Linear, nn.Tanh]
    assert type(agent.cell) is getattr(nn, cell.upper())
    assert agent.num_states == (2 if cell == "lstm" else 1)
    shapes = {
        "weight_ih_l0": (gates * 20, 32),
        "weight_hh_l0": (gates * 20, 20),
        "bias_ih_l0": (gates * 20,),
        "bias_hh_l0": (gates * 20,),
    }
    assert {name: tuple(x.shape) for name, x in agent.cell.named_parameters()} == shapes
    for name, x in agent.cell.named_parameters():
        if "weight" in name:
            assert_orthogonal(x, 1.0)
        else:
            assert not x.detach().any()


def assert_equals_a_loop(agent, batch, by_steps, memory):
    """outputs and by_steps agree, and so do their gradients in parameters, obs and memory."""
    batch["obs"].requires_grad_()
    batch["memory"].requires_grad_()
    weights = torch.randn(3, *batch["dones"].shape).double()
    inputs = [*agent.parameters(), batch["obs"], batch["memory"]]
    results = []
    for function in (outputs, by_steps):
        out = function(agent, batch)
        loss = sum((weight * x).sum() for weight, x in zip(weights, out))
        grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        results.append([*out, *grads])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    assert all((grad != 0).any() for grad in results[0][3:]) == memory


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_outputs_and_gradients_equal_those_of_a_loop_over_steps(cell, memory):
    agent = make_agent(cell, memory).double()
    batch = random_batch(agent, ends_of_all_kinds(9))
    assert_equals_a_loop(agent, batch, outputs_by_steps, memory)


def small_agent_and_batch(script, dones, memory=True):
    """An agent of ppo_lstm or ppo_atari_lstm, and an empty batch; dones (n, num_steps)."""
    args = script.Args(hidden_size=6, memory=memory)
    batch = {"dones": dones, "memory": torch.zeros(len(dones), 2, 6)}
    batch["actions"] = torch.zeros(dones.shape, dtype=int)
    if script is ppo:
        batch["obs"] = torch.zeros(*dones.shape, 3)
        return script.Agent(3, 4, args), batch
    batch["obs"] = torch.zeros(*dones.shape, 84, 84, dtype=torch.uint8)
    return script.Agent(4, args), batch


@BOTH_SCRIPTS
@pytest.mark.parametrize("memory, lengths", [(True, [3, 3, 3]), (False, [1])])
def test_training_calls_the_core_once_for_each_stretch_between_ends(script, memory, lengths):
    dones = torch.zeros(2, 9, dtype=torch.bool)
    dones[0, 2] = dones[1, 5] = dones[0, 8] = True
    agent, batch = small_agent_and_batch(script, dones, memory)
    called = []
    agent.cell.register_forward_pre_hook(lambda _, inputs: called.append(inputs[0].shape[1]))
    outputs(agent, batch)
    assert called == lengths


@BOTH_SCRIPTS
def test_the_core_gets_contiguous_states(script):
    """cuDNN takes no others, which a CPU doesn't mind."""
    dones = torch.tensor([[False, False], [True, False], [False, True]])
    agent, batch = small_agent_and_batch(script, dones)
    contiguous = []
    agent.cell.register_forward_pre_hook(
        lambda _, inputs: contiguous.extend(x.is_contiguous() for x in inputs[1])
    )
    outputs(agent, batch)
    *_, memory = agent.policy()(batch["obs"][:, 0].numpy(), 0.0, batch["memory"])
    agent.policy()(batch["obs"][:, 0].numpy(), 0.0, memory)
    assert contiguous == 8 * [True]


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_outputs_depend_on_their_own_episode_and_its_past_alone(cell, memory):
    """By gradients, which are exactly 0 for other environments, episodes and later steps.

    So for the memory at the start.
    """
    agent = make_agent(cell, memory).double()
    dones = torch.zeros(6, 3, dtype=torch.bool)
    dones[[2, 3], 1] = dones[[0, 5], 2] = True
    batch = random_batch(agent, dones)
    inputs = [batch["obs"].requires_grad_(), batch["memory"].requires_grad_()]
    logprobs, _, values = outputs(agent, batch)
    for i in range(3):
        for step in range(6):
            ends = [t for t in range(step) if dones[t, i]] if memory else list(range(step))
            first = ends[-1] + 1 if ends else 0
            in_episode = torch.zeros(6, 3, dtype=torch.bool)
            in_episode[first : step + 1, i] = True
            starts_from = torch.zeros(3, agent.num_states, dtype=torch.bool)
            starts_from[i] = memory and not ends
            for output in (logprobs, values):
                in_obs, in_memory = torch.autograd.grad(
                    output[i, step],
                    inputs,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                assert torch.equal((in_obs != 0).any(2), in_episode.T)
                assert torch.equal((in_memory != 0).all(2), starts_from)
                assert torch.equal((in_memory != 0).any(2), starts_from)


ARRAYS = ("obs", "actions", "logprobs", "values", "rewards", "terminations", "truncations")


def play_rollout(agent, envs, num_steps, memory):
    """A rollout's arrays by their names, with dones, and its episodes; memory goes on."""
    *arrays, episodes = ppo.rollout(agent, envs, num_steps, memory)
    arrays = dict(zip(ARRAYS, arrays, strict=True))
    arrays["dones"] = arrays["terminations"] | arrays["truncations"]
    return arrays, episodes


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_rollouts_and_training_agree(cell, memory):
    """Log-probabilities, values and the memory afterwards, in a second rollout, in mid-episode.

    So the ratio is 1 in the first minibatch.
    """
    envs = make_envs(5)
    agent = make_agent(cell, memory)
    carried = ppo.Memory(agent, 5)
    play_rollout(agent, envs, 7, carried)
    start = carried.state.clone()
    arrays, episodes = play_rollout(agent, envs, 40, carried)
    assert (start != 0).any() == memory
    assert arrays["terminations"].any() and arrays["truncations"].any()
    ends = {(step, e.env, e.ended_by) for step, e, _ in episodes}
    expected = {(*end, "termination") for end in zip(*arrays["terminations"].nonzero())}
    assert ends == expected | {
        (*end, "truncation") for end in zip(*arrays["truncations"].nonzero())
    }

    batch = swap(arrays | {"memory": start})
    dones = torch.from_numpy(arrays["dones"])
    with torch.no_grad():
        for function in (outputs, outputs_by_steps):
            logprobs, _, values = function(agent, batch)
            torch.testing.assert_close(batch["logprobs"], logprobs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(batch["values"], values, rtol=1e-5, atol=1e-5)
        x = agent.network(torch.from_numpy(arrays["obs"]))
        last = memories_by_steps(agent, x, start, dones)[-1] * memory
    last[dones[-1]] = 0.0
    torch.testing.assert_close(carried.state, last, rtol=1e-5, atol=1e-5)
    if not memory:  # then each step is by itself
        batch["dones"] = torch.ones_like(batch["dones"])
        _, _, values = outputs_by_steps(agent, batch)
        torch.testing.assert_close(batch["values"], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_l3_memory_is_zero_where_an_episode_has_ended_and_kept_elsewhere(cell):
    """In rollouts of one step. What an episode had after its last step is beside it."""
    envs = make_envs(4)
    agent = make_agent(cell)
    memory = ppo.Memory(agent, 4)
    ended_by = set()
    for _ in range(40):
        before = memory.state.clone()
        obs = torch.from_numpy(envs.obs[None].copy())
        arrays, episodes = play_rollout(agent, envs, 1, memory)
        dones = torch.from_numpy(arrays["dones"][0])
        assert dones.nonzero()[:, 0].tolist() == [episode.env for _, episode, _ in episodes]
        expected = memories_by_steps(agent, agent.network(obs), before, None)[0].detach()
        kept = torch.where(dones[:, None, None], 0.0, expected)
        torch.testing.assert_close(memory.state, kept)
        assert (memory.state[~dones] != 0).all()
        for _, episode, final_memory in episodes:
            torch.testing.assert_close(final_memory, expected[episode.env])
            ended_by.add(episode.ended_by)
    assert ended_by == {"termination", "truncation"}


def test_environments_do_not_see_each_others_memory():
    """Another memory of one environment changes what that one does, until its episode ends.

    Of the others it changes no bit.
    """
    results = []
    for other in (0.0, 5.0):
        torch.manual_seed(2)
        envs = make_envs(3)
        agent = make_agent()
        memory = ppo.Memory(agent, 3)
        memory.state += 0.1
        memory.state[1] += other
        arrays, _ = play_rollout(agent, envs, 30, memory)
        results.append((arrays, memory.state))
    (one, memory), (another, other_memory) = results
    end = int(one["dones"][:, 1].argmax())
    assert 1 < end < 20
    for name in ("logprobs", "values"):
        same = one[name] == another[name]
        assert not same[: end + 1, 1].any()
        assert same[:, [0, 2]].all()
    assert torch.equal(memory[[0, 2]], other_memory[[0, 2]])


def test_rollouts_sample_the_policy():
    agent = ppo.Agent(3, 4, ppo.Args(hidden_size=4))
    agent.actor.weight.data.zero_()
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    agent.actor.bias.data = torch.tensor(shares).log().float()
    arrays, _ = play_rollout(agent, make_envs(4), 500, ppo.Memory(agent, 4))
    frequencies = np.bincount(arrays["actions"].ravel(), minlength=4) / 2000
    np.testing.assert_allclose(frequencies, shares, atol=0.04)
    expected = np.log(shares)[arrays["actions"]]
    np.testing.assert_allclose(arrays["logprobs"], expected, rtol=1e-5)


COEFS = ("clip_coef", "ent_coef", "vf_coef", "max_grad_norm")


def coefs_of(args, **others):
    return {name: getattr(args, name) for name in COEFS} | others


def test_l4_minibatches_are_whole_environments_in_time_order(monkeypatch):
    """Each environment once an epoch, with all of its steps and its own memory."""
    args = ppo.Args(num_envs=8, num_steps=5, num_minibatches=4, update_epochs=6)
    agent = make_agent()
    code = torch.arange(5) + 10.0 * torch.arange(8)[:, None]  # which step of which environment
    batch = {
        "obs": code[..., None].expand(8, 5, 3),
        "actions": torch.zeros(8, 5, dtype=torch.int64),
        "dones": torch.rand(8, 5) < 0.2,
        "memory": 10.0 * torch.arange(8)[:, None, None].expand(8, 2, 7),
    }
    for name in ("logprobs", "values", "advantages", "returns"):
        batch[name] = code.clone()
    seen = []
    ppo_loss = ppo.ppo_loss

    def spy(agent, minibatch, *rest):
        seen.append(minibatch)
        return ppo_loss(agent, minibatch, *rest)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    optimizer = torch.optim.Adam(agent.parameters())
    ppo.update(ppo.update_minibatches, optimizer, agent, batch, coefs_of(args, lr=0.0), args)
    orders = []
    for minibatch in seen:
        rows = (minibatch["values"][:, 0] / 10).long()
        assert minibatch.keys() == batch.keys() and len(rows) == 2
        for name, x in minibatch.items():
            assert torch.equal(x, batch[name].index_select(0, rows))
        orders.append(rows.tolist())
    assert len(orders) == 24
    epochs = [sum(orders[k : k + 4], []) for k in range(0, 24, 4)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


UPDATES = [
    {},
    {"norm_adv": False, "clip_vloss": False},
    {"ent_coef": 0.3, "vf_coef": 2.0, "max_grad_norm": 0.05},
    {"cell": "gru", "num_minibatches": 1},
    {"cell": "rnn", "max_grad_norm": 100.0},
    {"memory": False},
]


@pytest.mark.parametrize("flags", UPDATES, ids=str)
def test_update_equals_the_arithmetic_of_pytorch(flags):
    """torch.distributions on a loop over steps, torch.optim.Adam not fused; 3 epochs."""
    defaults = {"num_envs": 8, "num_steps": 9, "num_minibatches": 2, "update_epochs": 3}
    args = ppo.Args(**defaults | {"hidden_size": 7} | flags)
    agent = make_agent(args.cell, args.memory).double()
    batch = random_batch(agent, ends_of_all_kinds(9))
    logprobs = outputs_by_steps(agent, batch)[0].detach()
    batch["logprobs"] = logprobs + 0.2 * torch.randn(8, 9).double()
    before = flat(agent)
    twin = copy.deepcopy(agent)
    clip = 0.15
    coefs = coefs_of(args, lr=1e-2, clip_coef=clip)
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
    ours = ppo.update(ppo.update_minibatches, optimizer, agent, batch, coefs, args)

    torch.manual_seed(3)
    orders = [torch.randperm(8) for _ in range(3)]
    adam = torch.optim.Adam(twin.parameters(), lr=1e-2, eps=1e-5, foreach=False)
    metrics = []
    norms = []
    for order in orders:
        for rows in order.chunk(args.num_minibatches):
            part = {name: x.index_select(0, rows) for name, x in batch.items()}
            logprobs, entropy, values = outputs_by_steps(twin, part)
            logratio = logprobs - part["logprobs"]
            ratio = logratio.exp()
            advantages = part["advantages"]
            if args.norm_adv:
                advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            clipped = advantages * ratio.clamp(1 - clip, 1 + clip)
            policy_loss = -torch.minimum(advantages * ratio, clipped).mean()
            errors = (values - part["returns"]) ** 2
            if args.clip_vloss:
                near = part["values"] + (values - part["values"]).clamp(-clip, clip)
                errors = torch.maximum(errors, (near - part["returns"]) ** 2)
            value_loss = errors.mean() / 2
            loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * value_loss
            adam.zero_grad()
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(twin.parameters(), args.max_grad_norm))
            adam.step()
            approx_kl = (ratio - 1 - logratio).mean()
            clipfrac = ((ratio - 1).abs() > clip).double().mean()
            row = (policy_loss, value_loss, entropy.mean(), -logratio.mean(), approx_kl, clipfrac)
            metrics.append(torch.stack(row).detach())
    torch.testing.assert_close(flat(agent), flat(twin), rtol=0, atol=1e-7)
    assert (flat(agent) - before).abs().max() > 5e-3
    torch.testing.assert_close(ours.double(), torch.stack(metrics).mean(0), rtol=1e-6, atol=1e-7)
    if args.max_grad_norm < 0.1:
        assert min(norms) > args.max_grad_norm
    if args.max_grad_norm > 10:
        assert max(norms) < args.max_grad_norm


RUN = (
    "--env-id LstmNoise-v0 --num-envs 8 --num-steps 20 --eval-episodes 1 --hidden-size 16 --no-cuda"
)
RUN = RUN.split()


def assert_bootstraps_and_agrees(module, network, gamma=0.99, gae_lambda=0.95):
    """The batch of a run's last iteration, at a learning rate that hasn't changed the agent.

    Log-probabilities and values are those of training. The advantages are quadratic sums, whose
    bootstrap values are of the final observation after the memory before the reset, both step by
    step. network: observations (m, n, ...) -> the core's inputs. Returns the bootstrap values at
    truncations: {(step, env): (with that memory, with none)}.
    """
    agent = module.agent
    args = module.args
    batch = swap(module.batch)
    truncations = module.truncations
    dones = batch["dones"]
    with torch.no_grad():
        logprobs, _, values = outputs(agent, module.batch)
        torch.testing.assert_close(batch["logprobs"], logprobs.T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(batch["values"], values.T, rtol=1e-5, atol=1e-5)
        after = memories_by_steps(agent, network(batch["obs"]), batch["memory"], dones)
        after = after * agent.use_memory
        expected = torch.where(dones[-1, :, None, None], 0.0, after[-1])
        torch.testing.assert_close(module.memory.state, expected)

        def value(obs, memory):
            x = network(torch.from_numpy(obs[None, None]))
            return agent.critic(memories_by_steps(agent, x, memory[None], None)[0, 0, 0]).item()

        finals = {}
        for step, episode, _ in module.episodes:
            if truncations[step, episode.env]:
                memory = after[step, episode.env]
                obs = episode.final_obs
                finals[step, episode.env] = value(obs, memory), value(obs, 0 * memory)
        last = [value(obs, memory) for obs, memory in zip(module.envs.obs, after[-1])]
    if agent.use_memory:  # else the test could not tell a forgotten memory
        assert all(abs(right - wrong) > 2e-4 for right, wrong in finals.values())
    for i in range(args.num_envs):
        for step in range(args.num_steps):
            expected = 0.0
            weight = 1.0
            for t in range(step, args.num_steps):
                if truncations[t, i] and args.bootstrap_truncated:
                    following, _ = finals[t, i]
                elif dones[t, i]:
                    following = 0.0
                elif t == args.num_steps - 1:
                    following = last[i]
                else:
                    following = module.values[t + 1, i]
                delta = module.rewards[t, i] + gamma * following - module.values[t, i]
                expected += weight * delta
                weight *= gamma * gae_lambda
                if dones[t, i]:
                    break
            assert batch["advantages"][step, i] == pytest.approx(expected, abs=3e-5)
    torch.testing.assert_close(batch["returns"], batch["advantages"] + batch["values"])
    assert abs(module.metrics[module.METRICS.index("old_approx_kl")]) < 1e-6
    assert module.metrics[module.METRICS.index("clipfrac")] == 0
    return finals


@pytest.mark.parametrize(
    "flags",
    ["", "--cell gru", "--cell rnn", "--no-memory", "--no-bootstrap-truncated"],
)
def test_a_run_bootstraps_with_the_memory_of_the_final_observation(run_script, flags):
    """In mid-rollout and in its last step, where other episodes go on or end by termination."""
    rest = f"--total-timesteps 320 --learning-rate 1e-12 --seed 3 {flags}".split()
    module = run_script(ppo.__file__, *RUN, *rest)
    finals = assert_bootstraps_and_agrees(module, lambda obs: module.agent.network(obs))
    dones, truncated = module.dones[-1], module.truncations[-1]
    assert truncated.any() and (dones & ~truncated).any() and not dones.all()
    assert len(finals) > 2 + truncated.sum()


def assert_init_from_needs_the_same_memory(run_script, capsys, script, *flags):
    """The networks have the same shapes with and without, so nothing else would notice."""
    for own, other in (("--memory", "--no-memory"), ("--no-memory", "--memory")):
        first = run_script(script, *flags, own, "--run-name", f"first{own}")
        again = (*flags, "--init-from", str(first.run.folder), "--run-name")
        run_script(script, *again, f"second{own}", other, code=2)
        assert f"trained with {own}: give it here too" in capsys.readouterr().err
        run_script(script, *again, f"third{own}", own)


def test_init_from_needs_the_same_memory(run_script, capsys):
    flags = (*RUN, "--total-timesteps", "160", "--no-compile")
    assert_init_from_needs_the_same_memory(run_script, capsys, ppo.__file__, *flags)


@pytest.mark.parametrize("cell", CELLS)
def test_l2_l5_memory_starts_at_zero_and_goes_on_into_the_next_rollout(run_script, cell):
    flags = [*RUN, "--no-anneal-lr", "--learning-rate", "0.01", "--cell", cell]
    first = run_script(ppo.__file__, *flags, "--total-timesteps", "160", "--run-name", "one")
    second = run_script(ppo.__file__, *flags, "--total-timesteps", "320", "--run-name", "two")
    assert first.batch["memory"].shape == (8, 2 if cell == "lstm" else 1, 16)
    assert not first.batch["memory"].any()
    state = first.memory.state
    assert torch.equal(second.batch["memory"], state)
    assert torch.equal((state != 0).all(2).all(1), ~first.batch["dones"][:, -1])
    assert (state != 0).any() and not state.requires_grad
    assert first.coefs["lr"] == second.coefs["lr"] == 0.01


def recorded(monkeypatch, module):
    """The list to which each step of the module's VecEnv from now on adds its actions."""
    actions = []
    step = module.VecEnv.step

    def record(self, x):
        actions.append(np.ravel(x).tolist())
        return step(self, x)

    monkeypatch.setattr(module.VecEnv, "step", record)
    return actions


def play(agent, x, step):
    """Plays step(logits) -> (the core's next inputs, whether the memory is kept), until None."""
    memory = torch.zeros(1, agent.num_states, agent.cell.hidden_size)
    while True:
        with torch.no_grad():
            memory = memories_by_steps(agent, x[None], memory, None)[0]
            following = step(agent.actor(memory[:, 0])[0])
        if following is None:
            return
        x, keep = following
        memory = memory * (agent.use_memory and keep)


KEPT = {
    "right": lambda ended: not ended,
    "over ends": lambda ended: True,
    "never": lambda ended: False,
}


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_evaluation_has_a_memory_that_ends_with_the_episode(monkeypatch, cell, memory):
    """The likeliest actions of a loop over steps.

    Not those of one that keeps its memory over the ends, or has none.
    """
    args = ppo.Args(env_id="LstmNoise-v0", eval_episodes=20)
    agent = make_agent(cell, memory)
    agent.cell.weight_hh_l0.data *= 3
    agent.actor.bias.data.zero_()
    actions = recorded(monkeypatch, ppo)
    evaluation = ppo.evaluate(agent, make_envs(1), args, None)
    played = list(actions)
    for name, keep in KEPT.items():
        actions.clear()
        envs = make_envs(1, seed=(1, 1))
        episodes = []

        def step(logits):
            if len(episodes) == 20:
                return None
            *_, ended = envs.step(np.array([logits.argmax().item()]))
            episodes.extend(ended)
            return agent.network(torch.from_numpy(envs.obs)), keep(ended)

        play(agent, agent.network(torch.from_numpy(envs.obs)), step)
        assert (actions == played) == (name == "right" or not memory), name
        if name == "right":
            assert [episode[:4] for episode in evaluation] == [episode[:4] for episode in episodes]


CUE = (
    "--env-id LstmCue-v0 --num-envs 16 --num-steps 20 --num-minibatches 2 --learning-rate 0.01 "
    "--hidden-size 32 --eval-episodes 100 --run-name run --no-cuda --total-timesteps 5120"
).split()


@pytest.mark.parametrize("cell", CELLS)
def test_a_cue_at_the_first_step_is_remembered(run_script, cell):
    """Also by the evaluation."""
    module = run_script(ppo.__file__, *CUE, "--cell", cell)
    returns = json.loads((module.run.folder / "evaluation.json").read_text())["returns"]
    assert returns == [1.0] * 100


def test_without_memory_the_cue_leaves_chance(run_script):
    module = run_script(ppo.__file__, *CUE, "--no-memory")
    returns = json.loads((module.run.folder / "evaluation.json").read_text())["returns"]
    assert 0.35 < np.mean(returns) < 0.65
    assert 0.3 < np.mean(module.run.recent_returns) < 0.7
    assert not module.memory.state.any()


def assert_memory_in_the_checkpoint_counts(run_script, script, stopped, whole):
    """A run that stopped in mid-episode, resumed, is the whole one; with another memory not."""
    state = load_checkpoint(stopped)["memory"]["state"]
    assert state.any()
    for name, other in (("zeroed", state * 0), ("swapped", state.flip(0))):
        folder = stopped.with_name(name)
        shutil.copytree(stopped, folder)
        edit_checkpoint(folder, memory={"state": other})
        run_script(script, "--resume", str(folder))
        assert differences(folder, whole)
    run_script(script, "--resume", str(stopped))
    assert not differences(stopped, whole)


def stop_after(monkeypatch, env_class, step):
    """Makes the process send itself SIGTERM in this step of its environments of a class."""
    steps = []
    step_env = env_class.step

    def stop(self, action):
        steps.append(action)
        if len(steps) == step:
            signal.raise_signal(signal.SIGTERM)
        return step_env(self, action)

    monkeypatch.setattr(env_class, "step", stop)


def test_runs_stop_and_go_on_with_their_memory(run_script, monkeypatch):
    flags = [*RUN, "--total-timesteps", "800", "--learning-rate", "0.01", "--run-name"]
    whole = run_script(ppo.__file__, *flags, "whole").run.folder.absolute()
    stop_after(monkeypatch, Noise, 250)
    module = run_script(ppo.__file__, *flags, "stopped", code=128 + signal.SIGTERM)
    module.run.lock.release()
    stopped = whole.with_name("stopped")
    assert load_checkpoint(stopped)["run"]["iteration"] == 2
    assert_memory_in_the_checkpoint_counts(run_script, ppo.__file__, stopped, whole)


def finished_run(run_script):
    """The folder of a run of one iteration, and its checkpoint."""
    flags = "--total-timesteps 160 --run-name run".split()
    run = run_script(ppo.__file__, *RUN, *flags).run
    run.lock.release()
    return run.folder, load_checkpoint(run.folder)


def test_an_environment_that_does_not_come_back_starts_without_memory(run_script, capsys):
    """The other environments go on with theirs."""
    folder, checkpoint = finished_run(run_script)
    state = checkpoint["memory"]["state"].clone()
    assert state[2].any()
    checkpoint["envs"]["obs"][2] += 1
    edit_checkpoint(folder, envs=checkpoint["envs"])
    module = run_script(ppo.__file__, "--resume", str(folder))
    assert capsys.readouterr().out.count("can't be brought back") == 1
    state[2] = 0.0
    assert torch.equal(module.memory.state, state)


@pytest.mark.parametrize("damage", ["missing", "states", "units"])
def test_a_checkpoint_without_its_memory_is_refused(run_script, capsys, damage):
    folder, checkpoint = finished_run(run_script)
    state = checkpoint["memory"]["state"]
    memory = {"missing": {}, "states": {"state": state[:, :1]}, "units": {"state": state[..., :1]}}
    edit_checkpoint(folder, memory=memory[damage])
    run_script(ppo.__file__, "--resume", str(folder), code=2)
    assert "error: the checkpoint is of a run with other sizes" in capsys.readouterr().err


def test_g11_rates_fall_to_an_nth_and_adams_epsilon_is_that_of_baselines(run_script):
    flags = "--total-timesteps 480 --anneal-clip".split()
    others = "--ent-coef 0.02 --vf-coef 0.3 --max-grad-norm 0.7".split()
    module = run_script(ppo.__file__, *RUN, *flags, *others)
    annealed = {"lr": 2.5e-4 / 3, "clip_coef": 0.2 / 3}
    coefs = {"ent_coef": 0.02, "vf_coef": 0.3, "max_grad_norm": 0.7} | annealed
    assert module.coefs == pytest.approx(coefs)
    (group,) = module.optimizer.param_groups
    assert group["lr"] == module.coefs["lr"]
    assert (group["eps"], group["betas"], group["weight_decay"]) == (1e-5, (0.9, 0.999), 0)


def test_bad_flags_are_refused(refused):
    for flags, sentence in (
        ("--num-minibatches 3", "--num-envs must be a multiple of --num-minibatches"),
        ("--num-envs 2", "--num-envs must be a multiple of --num-minibatches"),
        ("--num-minibatches 0", "--num-minibatches must be above 0"),
        ("--hidden-size 0", "--hidden-size must be above 0"),
        ("--cell transformer", "transformer"),
        ("--num-steps 1", "minibatches of one step need --no-norm-adv"),
        ("--total-timesteps 511", "--total-timesteps is below a rollout, 512"),
    ):
        assert sentence in refused(ppo, flags.split()), flags


def test_flags_at_the_edge_are_accepted():
    ppo.check_args(ppo.Args(num_envs=6, num_minibatches=3, num_steps=1))
    ppo.check_args(ppo.Args(num_steps=1, norm_adv=False))
    ppo.check_args(ppo.Args(num_envs=1, num_minibatches=1))
