"""ddpg_lstm.py: what it has of its own.

What it shares with ddpg_continuous_action.py is tested there. The oracles are loops over single
steps of single episodes in plain PyTorch, and the memory of skrl.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import returns
from skrl.memories.torch import RandomMemory
from test_ddpg_continuous_action import Stamped, as_coefs, draw_uniform, flat, move, stored
from test_ppo_lstm import assert_init_from_needs_the_same_memory
from torch import nn

import ddpg_lstm as lstm

SCRIPT = Path(lstm.__file__)
CPU = torch.device("cpu")
QUICK = [
    *("--num-threads", "1", "--eval-episodes", "1", "--hidden-sizes", "8", "--hidden-size", "6"),
    *("--batch-size", "8", "--sequence-length", "3", "--burn-in", "2"),
]


def make_args(**flags):
    return lstm.Args(hidden_sizes=(8,), hidden_size=6, sequence_length=3, burn_in=2, **flags)


def make_learner(agent, distance=0.1):
    """A learner; distance: of the targets from the agent."""
    learner = lstm.Learner(agent)
    move(learner.target, distance)
    return learner


# --------------------------------------------------------------------------------------------------
# Sequences
# --------------------------------------------------------------------------------------------------


def play(replay, num_envs, num_steps, draws):
    """Fills a buffer with episodes of random lengths -> its rows as dicts, all there ever were.

    Some end, others break off, as those of an environment that could not be brought back.
    """
    rows = []
    episode, step = 100 * np.arange(num_envs), np.zeros(num_envs, int)
    for _ in range(num_steps):
        obs = np.stack((episode, step, draws.standard_normal(num_envs)), 1).astype(np.float32)
        row = {
            "obs": obs,
            "actions": draws.uniform(-1, 1, (num_envs, 2)).astype(np.float32),
            "rewards": draws.standard_normal(num_envs).astype(np.float32),
            "next_obs": obs + np.float32([0, 1, 5]),
            "terminations": draws.random(num_envs) < 0.1,
            "steps": step,
        }
        replay.add(**row)
        for i in range(num_envs):
            rows.append({name: values[i] for name, values in row.items()} | {"episode": episode[i]})
        begins = row["terminations"] | (draws.random(num_envs) < 0.1)
        step = np.where(begins, 0, step + 1)
        episode = episode + begins
    return rows


@pytest.mark.parametrize("trial", range(20))
def test_sequences_are_of_one_episode(tmp_path, monkeypatch, trial):
    """All that can be drawn from a small buffer, compared with lists of its rows.

    Learning begins with the row drawn. The steps of its episode that the buffer has come before it,
    burn_in of them at most, and after it. Over all draws, each row has the same weight.
    """
    draws = np.random.RandomState(trial)
    num_envs, size, num_steps = draws.randint([1, 1, 2], [4, 60, 90])
    args = make_args(num_envs=num_envs, memory=trial != 3)
    args.burn_in, args.sequence_length = draws.randint([0, 1], 8)
    replay = make_replay(tmp_path / "replay.bin", size, spare=draws.randint(num_envs, 15))
    rows = play(replay, num_envs, num_steps, draws)
    oldest = max(len(rows) - size, 0)
    ages = np.arange(len(rows) - oldest)

    def draw_all(stop, shape):
        assert (stop, shape) == (len(ages), (args.batch_size,))
        return torch.from_numpy(ages)

    monkeypatch.setattr(torch, "randint", draw_all)
    batch = lstm.sample_sequences(replay, args, CPU)
    batch = {name: x.numpy() for name, x in batch.items()}

    def with_neighbours(number, step):
        """The row's episode from the row on, in steps of 1 or -1."""
        stop = len(rows) if step == 1 else oldest - 1
        for i in range(number, stop, step * num_envs):
            if rows[i]["episode"] != rows[number]["episode"]:
                return
            yield i

    totals = np.zeros(len(rows))
    for k, number in enumerate(len(rows) - 1 - ages):
        before = [*with_neighbours(number, -1)][1:]
        burn_in = before[: args.burn_in][::-1]
        after = [*with_neighbours(number, 1)][: args.sequence_length]
        weights = batch["weights"][k]
        learned = slice(len(burn_in), len(burn_in) + len(after))
        assert weights[learned].all() and np.count_nonzero(weights) == len(after)
        totals[after] += weights[learned]

        sequence = [rows[i] for i in (*burn_in, *after)]
        obs = [sequence[0]["obs"], *(row["next_obs"] for row in sequence)]
        actions = [np.zeros(2), *(row["actions"] for row in sequence)]
        if len(before) > len(burn_in):
            actions[0] = rows[before[len(burn_in)]]["actions"]
        if not args.memory:
            actions = np.zeros_like(actions)
        rewards = np.array([row["rewards"] for row in sequence])
        histories = np.concatenate((obs, actions), 1)
        length = len(sequence)
        np.testing.assert_allclose(
            batch["histories"][k, : length + 1], histories, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(batch["rewards"][k, :length], rewards, rtol=1e-6)
        for name in ("actions", "terminations"):
            assert np.array_equal(batch[name][k, :length], [row[name] for row in sequence])
    np.testing.assert_allclose(totals[oldest:], 1.0, rtol=1e-6)


def test_sequences_are_those_of_skrl(tmp_path, monkeypatch):
    """Of one long episode in each of two environments, from the rows that skrl has drawn."""
    args = make_args(num_envs=2, batch_size=16)
    args.burn_in = 0
    memory = RandomMemory(memory_size=50, num_envs=2, replacement=True)
    columns = {"obs": 3, "actions": 2, "rewards": 1, "terminations": 1}
    for name, size in columns.items():
        memory.create_tensor(name=name, size=size)
    replay = make_replay(tmp_path / "replay.bin")
    draws = np.random.RandomState(1)
    for step in range(50):
        row = {name: draws.standard_normal((2, size)) for name, size in columns.items()}
        row = {name: x.astype(np.float32) for name, x in row.items()}
        memory.add_samples(**{name: torch.tensor(x) for name, x in row.items()})
        flat_row = {name: row[name][:, 0] for name in ("rewards", "terminations")}
        steps = np.full(2, step)
        replay.add(**(row | flat_row), next_obs=row["obs"] + 1, steps=steps)
    torch.manual_seed(2)
    theirs = memory.sample([*columns], batch_size=16, sequence_length=3)[0]
    drawn = memory.get_sampling_indexes().view(16, 3)[:, 0].numpy()

    def draw_theirs(stop, shape):
        assert (stop, shape) == (100, (16,))
        return torch.from_numpy(replay.count - 1 - drawn)

    monkeypatch.setattr(torch, "randint", draw_theirs)
    ours = lstm.sample_sequences(replay, args, CPU)
    assert ours["weights"].all()
    obs, actions, rewards, terminations = (x.view(16, 3, -1) for x in theirs)
    assert torch.equal(ours["histories"][:, 0, :3], obs[:, 0])
    assert torch.equal(ours["histories"][:, 1:, :3], obs + 1)
    assert torch.equal(ours["actions"], actions)
    assert torch.equal(ours["rewards"], rewards[:, :, 0])
    assert torch.equal(ours["terminations"], terminations[:, :, 0])


def make_replay(path, size=100, spare=0):
    """A buffer of rows of 3 observations and 2 actions."""
    columns = {
        "obs": (np.float32, (3,)),
        "actions": (np.float32, (2,)),
        "rewards": (np.float32, ()),
        "next_obs": (np.float32, (3,)),
        "terminations": (np.float32, ()),
        "steps": (np.int32, ()),
    }
    return lstm.ReplayBuffer(path, size, spare, columns, is_new=True)


# --------------------------------------------------------------------------------------------------
# Updates
# --------------------------------------------------------------------------------------------------


def run_cell(cell, x, state):
    """A step of a recurrent core by its formula: x (inputs,), state: list of (hidden_size,)."""
    gates = cell.weight_ih_l0 @ x + cell.bias_ih_l0
    hidden = cell.weight_hh_l0 @ state[0] + cell.bias_hh_l0
    if isinstance(cell, nn.LSTM):
        i, f, g, o = (gates + hidden).chunk(4)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]
    if isinstance(cell, nn.GRU):
        (r, z, n), (hr, hz, hn) = gates.chunk(3), hidden.chunk(3)
        z = (z + hz).sigmoid()
        n = (n + (r + hr).sigmoid() * hn).tanh()
        return [(1 - z) * n + z * state[0]]
    return [(gates + hidden).tanh()]


def outputs_of(core, history, use_memory):
    """A core's outputs along one history (num_steps, inputs), one step after the other."""
    size = core.cell.hidden_size
    zeros = [torch.zeros(size), torch.zeros(size)]
    state, outputs = zeros, []
    for x in history:
        state = run_cell(core.cell, core.network(x), state if use_memory else zeros)
        outputs.append(state[0])
    return outputs


def actions_of(actor, history, use_memory):
    return [actor.head(x).tanh() for x in outputs_of(actor.core, history, use_memory)]


def values_of(critic, history, actions, use_memory):
    outputs = outputs_of(critic.core, history, use_memory)
    return [critic.head(torch.cat((x, action)))[0] for x, action in zip(outputs, actions)]


class Reference:
    """The update as a loop over sequences and their steps."""

    def __init__(self, agent, learner, args):
        self.args = args
        self.nets, self.targets = copy.deepcopy(agent), copy.deepcopy(learner.target)
        self.actor_adam = torch.optim.Adam(self.nets.actor.parameters(), args.learning_rate)
        self.critic_adam = torch.optim.Adam(self.nets.critic.parameters(), args.learning_rate)

    def descend(self, loss, adam):
        self.nets.zero_grad()
        loss.backward()
        adam.step()

    def update(self, batch, with_actor):
        """One update; returns what METRICS are, as floats: the last one only with_actor."""
        args, nets, targets = self.args, self.nets, self.targets
        memory = args.memory
        errors, values = [], []
        for k, history in enumerate(batch["histories"]):
            with torch.no_grad():
                next_actions = actions_of(targets.actor, history, memory)
                next_values = values_of(targets.critic, history, next_actions, memory)
            found = values_of(nets.critic, history[:-1], batch["actions"][k], memory)
            for j, value in enumerate(found):
                weight = batch["weights"][k, j]
                if weight > 0:
                    target = batch["rewards"][k, j]
                    if not batch["terminations"][k, j]:
                        target = target + args.gamma * next_values[j + 1]
                    values.append(weight * value)
                    errors.append(weight * (value - target) ** 2)
        total = batch["weights"].sum()
        loss = sum(errors) / total
        metrics = [sum(values).item() / total.item(), loss.item()]
        self.descend(loss, self.critic_adam)
        if with_actor:
            values = []
            for k, history in enumerate(batch["histories"]):
                actions = actions_of(nets.actor, history[:-1], memory)
                found = values_of(nets.critic, history[:-1], actions, memory)
                values += [weight * x for weight, x in zip(batch["weights"][k], found)]
            loss = -sum(values) / total
            metrics.append(loss.item())
            self.descend(loss, self.actor_adam)
            with torch.no_grad():
                for target, parameter in zip(targets.parameters(), nets.parameters()):
                    target.lerp_(parameter, args.tau)
        return metrics

    def assert_equals(self, agent, learner, rtol, atol):
        """The weights and the targets."""
        for ours, theirs in ((agent, self.nets), (learner.target, self.targets)):
            torch.testing.assert_close(flat(ours), flat(theirs), rtol=rtol, atol=atol)


def sequences(n):
    """A random batch, as sample_sequences gives it, of 5 steps, some of which have no meaning."""
    return {
        "histories": torch.randn(n, 6, 5),
        "actions": torch.rand(n, 5, 2) * 2 - 1,
        "rewards": torch.randn(n, 5),
        "terminations": (torch.rand(n, 5) < 0.3).float(),
        "weights": (torch.rand(n, 5) - 0.4).clip(0.0),
    }


@pytest.mark.parametrize(
    "flags", [{}, {"cell": "gru"}, {"cell": "rnn"}, {"memory": False}], ids=str
)
def test_updates_equal_a_loop_over_steps(flags):
    """Weights, targets and metrics, over four updates, of which every second has the actor's."""
    torch.manual_seed(1)
    args = make_args(tau=0.3, gamma=0.9, learning_rate=1e-3, **flags)
    agent = lstm.Agent(3, 2, args)
    learner = make_learner(agent)
    reference = Reference(agent, learner, args)
    sums = np.zeros(3)
    for number in range(4):
        batch = sequences(6)
        lstm.update(agent, learner, batch, number % 2 == 0, as_coefs(args), args)
        expected = reference.update(batch, number % 2 == 0)
        sums[: len(expected)] += expected
    reference.assert_equals(agent, learner, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(learner.sums, sums, rtol=1e-4, atol=1e-5)
    assert learner.counts.tolist() == [4, 4, 2]


# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--no-memory"], ["--cell", "gru"]], ids=str)
def test_actions_follow_from_the_episode_so_far(run_script, flags):
    """Each action of two environments, and of the evaluation, is that of its episode played again.

    The episode has the actions played, with their noise. Learning begins with the last step, so the
    network is the same all the time.
    """
    Stamped.made.clear()
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "Stamped-v0", "--num-envs", "2", "--total-timesteps", "100"),
        *("--learning-starts", "99", "--random-steps", "30", "--exploration-noise", "0.3", *flags),
        *("--eval-interval", "10", "--eval-episodes", "3", "--seed", "5"),
    )
    obs, actions, *_, steps = (x.copy() for x in stored(ran))
    assert np.array_equal(steps, obs[:, :, 2])
    torch.manual_seed(5)
    agent = lstm.Agent(3, 2, ran.args)
    draws = [draw_uniform(2, 2) for _ in range(15)]
    noise = np.array([0.3 * torch.randn(2, 2).numpy() for _ in range(35)])
    assert np.array_equal(actions[:15], draws)

    def action_of(agent, obs, actions):
        """What an agent does after obs (num_steps, 3) with actions (num_steps - 1, 2) between."""
        before = np.zeros((len(obs), 2))
        if ran.args.memory:
            before[1:] = actions
        history = torch.tensor(np.concatenate((obs, before), 1), dtype=torch.float32)
        with torch.no_grad():
            return actions_of(agent.actor, history, ran.args.memory)[-1].numpy()

    for env in range(2):
        for step in range(15, 50):
            begin = step - steps[step, env]
            expected = action_of(agent, obs[begin : step + 1, env], actions[begin:step, env])
            expected = np.clip(expected + noise[step - 15, env], -1, 1)
            np.testing.assert_allclose(actions[step, env], expected, atol=1e-6)

    evaluated = Stamped.made[-1]
    assert evaluated.episode == 5  # the first is make_env's, the last has only begun
    played = np.array(evaluated.actions[1:])
    sign = (-1) ** evaluated.number
    lengths = [(np.sqrt(1 + 8 * sign * x) - 1) / 2 for x in returns(ran.run.folder)]
    ends = np.cumsum(lengths).astype(int)  # rewards are 1, 2, 3, ...
    for episode, (begin, end) in enumerate(zip([0, *ends], ends), start=2):
        for step in range(begin, end):
            stamps = [[evaluated.number, episode, i] for i in range(step - begin + 1)]
            expected = action_of(ran.agent, np.array(stamps), played[begin:step])
            np.testing.assert_allclose(played[step], expected, atol=1e-6)


def test_init_from_needs_the_same_memory(run_script, capsys):
    flags = ("--env-id", "Stamped-v0", "--total-timesteps", "30", "--learning-starts", "20")
    assert_init_from_needs_the_same_memory(run_script, capsys, SCRIPT, *QUICK, *flags)


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_networks(cell, gates):
    """ReLU layers before the core and, in the critic, one after it."""
    args = lstm.Args(cell=cell, hidden_sizes=(32, 16), hidden_size=24)
    agent = lstm.Agent(3, 2, args)
    for core in (agent.actor.core, agent.critic.core):
        kinds = [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]
        assert [type(x) for x in core.network] == kinds
        assert [tuple(x.weight.shape) for x in core.network[::2]] == [(32, 5), (16, 32)]
        assert core.cell.weight_ih_l0.shape == (24 * gates, 16)
        weight = core.cell.weight_hh_l0
        assert weight.shape == (24 * gates, 24)
        torch.testing.assert_close(weight.T @ weight, torch.eye(24), rtol=1e-5, atol=1e-5)
        assert not core.cell.bias_ih_l0.any() and not core.cell.bias_hh_l0.any()
    assert agent.actor.core is not agent.critic.core
    assert agent.actor.head.weight.shape == (2, 24)
    assert 0.5 < agent.actor.head.weight.abs().max() * 24**0.5 <= 1
    assert [type(x) for x in agent.critic.head] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [tuple(x.weight.shape) for x in agent.critic.head[::2]] == [(24, 26), (1, 24)]


def test_a_saved_memory_goes_on_where_it_was():
    """Once reset, it is empty."""
    args = make_args(num_envs=2)
    agent = lstm.Agent(3, 2, args)
    memory = lstm.ActorMemory(agent, 2)
    obs = np.ones((2, 3), np.float32)
    for _ in range(3):
        memory.follow(agent.act(obs, memory), np.array([False, False]))
    again = lstm.ActorMemory(agent, 2)
    again.load_state_dict(copy.deepcopy(memory.state_dict()))
    assert np.array_equal(agent.act(obs, memory), agent.act(obs, again))
    assert memory.steps.tolist() == again.steps.tolist() == [3, 3]
    memory.reset(np.array([True, False]))
    fresh = lstm.ActorMemory(agent, 2)
    assert np.array_equal(agent.act(obs, memory)[0], agent.act(obs, fresh)[0])
    assert memory.steps.tolist() == [0, 3]


def test_targets_are_not_learned_through():
    """Not even where an edited copy takes the networks themselves for the targets."""
    args = make_args()
    agent = lstm.Agent(3, 2, args)
    learner = make_learner(agent)
    learner.target = agent
    reference = Reference(agent, learner, args)
    batch = sequences(6)
    lstm.update(agent, learner, batch, False, as_coefs(args), args)
    reference.update(batch, False)
    torch.testing.assert_close(flat(agent), flat(reference.nets), rtol=1e-5, atol=1e-6)
