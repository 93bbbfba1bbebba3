"""c51_atari.py: the projection, an update, the network, flags. What it shares is dqn_atari.py's."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import episode_rows
from test_dqn_atari import TINY, make_batch, random_obs
from test_ppo_atari import flat
from torch import nn

import c51_atari

SCRIPT = Path(c51_atari.__file__)
LR = torch.tensor(1e-3)
ATOMS = torch.linspace(-10, 10, 51)


def algorithm_1(probs, rewards, discounts, atoms):
    """The projection of Bellemare et al. 2017, atom by atom."""
    width = float(atoms[-1] - atoms[0]) / (len(atoms) - 1)
    projected = np.zeros(probs.shape)
    for i in range(len(probs)):
        for j, atom in enumerate(atoms.tolist()):
            moved = float(rewards[i]) + float(discounts[i]) * atom
            moved = min(max(moved, float(atoms[0])), float(atoms[-1]))
            b = (moved - float(atoms[0])) / width
            lower, upper = math.floor(b), math.ceil(b)
            if lower == upper:  # the paper's two shares are both 0 there
                projected[i, lower] += probs[i, j]
            else:
                projected[i, lower] += probs[i, j] * (upper - b)
                projected[i, upper] += probs[i, j] * (b - lower)
    return projected


def random_probs(n, n_atoms=51):
    return (2 * torch.randn(n, n_atoms)).softmax(1)


@pytest.mark.parametrize("v_min, v_max, n_atoms", [(-10, 10, 51), (0, 3, 2), (-2, 14, 9)])
def test_the_projection_is_algorithm_1(v_min, v_max, n_atoms):
    """Also where atoms fall on atoms, and beyond both ends."""
    atoms = torch.linspace(v_min, v_max, n_atoms)
    probs = random_probs(60, n_atoms)
    rewards = torch.cat((3 * torch.randn(40), torch.tensor(10 * [-20.0, 20.0])))
    rewards[:8] = torch.tensor([0, 1, 2, -1, 0.4, -2, 4, 0])
    discounts = torch.rand(60)
    discounts[:8] = torch.tensor([1.0, 1, 1, 0.5, 1, 0, 0, 0])
    projected = c51_atari.project(probs, rewards, discounts, atoms)
    expected = algorithm_1(probs, rewards, discounts, atoms)
    np.testing.assert_allclose(projected, expected, atol=1e-5)
    torch.testing.assert_close(projected.sum(1), torch.ones(60), rtol=1e-5, atol=0)


def test_projections_in_closed_form():
    probs = random_probs(4)
    none, zeros = torch.zeros(4), torch.zeros(4, 51)
    same = c51_atari.project(probs, none, none + 1, ATOMS)
    torch.testing.assert_close(same, probs, rtol=0, atol=1e-5)
    # A terminal transition: its reward's two neighbours
    expected = zeros.clone()
    expected[:, 27], expected[:, 28] = 0.5, 0.5
    ended = c51_atari.project(probs, none + 1.0, none, ATOMS)
    torch.testing.assert_close(ended, expected, rtol=0, atol=1e-5)
    for reward, place in (50.0, 50), (-50.0, 0):
        expected = zeros.clone()
        expected[:, place] = 1
        beyond = c51_atari.project(probs, none + reward, none + 1, ATOMS)
        torch.testing.assert_close(beyond, expected, rtol=0, atol=1e-5)


def test_the_projection_keeps_the_mean():
    """Where nothing is cut off."""
    probs, rewards, discounts = random_probs(20), torch.rand(20) - 0.5, 0.9 * torch.rand(20)
    projected = c51_atari.project(probs, rewards, discounts, ATOMS)
    means = rewards + discounts * (probs @ ATOMS)
    torch.testing.assert_close(projected @ ATOMS, means, rtol=1e-3, atol=1e-4)


def make_agent(dueling=False, n_atoms=51):
    """An agent whose distributions aren't flat."""
    agent = c51_atari.Agent(6, n_atoms, -10.0, 10.0, dueling, amp=False)
    agent.network[-1].weight.data *= 20
    return agent


def make_learner():
    """And a learner whose target has other weights."""
    agent = make_agent()
    learner = c51_atari.Learner(agent, eps=0.01 / 32)
    learner.target.network[-1].weight.data += torch.randn_like(agent.network[-1].weight)
    return agent, learner


def logits_of(agent, obs):
    return agent.network(obs.permute(0, 3, 1, 2) / 255)


@pytest.mark.parametrize("n_atoms", [51, 11])
def test_the_network_is_dqns_with_atoms(n_atoms):
    agent = c51_atari.Agent(6, n_atoms, -10.0, 10.0, False, False)
    convs = [(x.out_channels, x.kernel_size[0], x.stride[0]) for x in agent.network[:6:2]]
    assert convs == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    assert sum(x.numel() for x in agent.parameters()) == 1_684_128 + 513 * 6 * n_atoms
    obs = random_obs(3)
    logprobs = agent(obs)
    assert logprobs.shape == (3, 6, n_atoms)
    torch.testing.assert_close(logprobs.exp().sum(2), torch.ones(3, 6))
    torch.testing.assert_close(agent.atoms, torch.linspace(-10, 10, n_atoms))


@pytest.mark.parametrize("dueling", [False, True])
def test_distributions_written_out(dueling):
    """--dueling is equation 9 of Wang et al. for each atom; values are means."""
    agent = make_agent(dueling)
    obs = random_obs(4)
    outputs = logits_of(agent, obs).view(4, 6 + dueling, 51)
    if dueling:
        value, advantages = outputs[:, 0], outputs[:, 1:]
        outputs = torch.stack([value + a - advantages.mean(1) for a in advantages.unbind(1)], 1)
    probs = outputs.exp() / outputs.exp().sum(2, keepdim=True)
    torch.testing.assert_close(agent(obs).exp(), probs, rtol=1e-3, atol=1e-6)
    means = sum(probs[..., k] * atom for k, atom in enumerate(np.linspace(-10, 10, 51)))
    values = agent.values(agent(obs))
    torch.testing.assert_close(values, means.float(), rtol=1e-3, atol=1e-3)


def test_actions_have_the_best_mean():
    """Not the likeliest atom, nor the highest: a sure 1 is better than 2 or -2."""
    agent = c51_atari.Agent(2, 5, -2.0, 2.0, False, False)
    nn.init.zeros_(agent.network[-1].weight)
    sure, risky = [0.0, 0, 0, 9, 0], [8.0, 0, 0, 0, 9]
    for rows, best in ((sure, risky), 0), ((risky, sure), 1):
        agent.network[-1].bias.data = torch.tensor([*rows[0], *rows[1]])
        assert agent.policy()(random_obs(3).numpy(), 0.0).tolist() == 3 * [best]


@pytest.mark.parametrize("double", [False, True])
def test_an_update_written_out(double):
    """Three steps with PyTorch's Adam; every third transition is a terminal one."""
    agent, learner = make_learner()
    target = copy.deepcopy(learner.target)
    plain = copy.deepcopy(agent)
    before = flat(agent)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3, eps=0.01 / 32)
    args = c51_atari.Args(batch_size=8, double=double)
    different = 0
    for _ in range(3):
        batch = make_batch()
        c51_atari.update(agent, learner, batch, LR, args)
        loss, value = 0.0, 0.0
        for obs, action, reward, next_obs, discount in zip(*batch.values(), strict=True):
            with torch.no_grad():
                probs = logits_of(target, next_obs[None]).view(6, 51).softmax(1)
                own = logits_of(plain, next_obs[None]).view(6, 51).softmax(1)
                best = ((own if double else probs) @ ATOMS).argmax()
                different += int(best != (probs @ ATOMS).argmax())
                given = probs[best][None], reward[None], discount[None], ATOMS
                labels = torch.tensor(algorithm_1(*given)[0], dtype=torch.float32)
            logits = logits_of(plain, obs[None]).view(6, 51)[action]
            loss = loss + nn.functional.cross_entropy(logits, labels) / 8
            value += float(logits.detach().softmax(0) @ ATOMS) / 8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics = learner.mean_metrics()
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
        assert metrics["q_values"] == pytest.approx(value, rel=1e-3, abs=1e-3)
    assert (different > 0) == double
    difference = (flat(agent) - flat(plain)).abs().mean()
    assert difference < 1e-2 * (flat(plain) - before).abs().mean()
    assert torch.equal(flat(learner.target), flat(target))


@pytest.mark.parametrize("double", [False, True])
def test_the_targets_are_constants(double):
    """Also where both networks are one: no gradient flows through them."""
    agent, learner = make_learner()
    learner.target = agent
    batch = make_batch()
    rows = torch.arange(8)
    with torch.no_grad():
        logprobs = agent(batch["next_obs"])
        probs = logprobs[rows, (logprobs.exp() @ ATOMS).argmax(1)].exp()
        labels = c51_atari.project(probs, batch["rewards"], batch["discounts"], ATOMS)
    logprobs = agent(batch["obs"])[rows, batch["actions"]]
    expected = torch.autograd.grad(-(labels * logprobs).sum() / 8, learner.optimizer.params)
    given = []
    learner.optimizer.step = lambda grads, lr: given.extend(grads)
    c51_atari.update(agent, learner, batch, LR, c51_atari.Args(batch_size=8, double=double))
    torch.testing.assert_close(given, list(expected), rtol=1e-3, atol=1e-6)


def test_bfloat16_is_near_float32():
    """The distributions themselves are computed in float32."""
    agent = make_agent()
    obs = random_obs(3)
    exact = agent(obs)
    agent.amp = True
    rounded = agent(obs)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.1)
    torch.testing.assert_close(rounded.exp().sum(2), torch.ones(3, 6), rtol=1e-5, atol=0)


def test_a_run_has_the_flags_atoms_and_adams_epsilon(run_script, capsys):
    """And an evaluation has them. With others the networks' values would be others."""
    flags = f"{TINY} --env-id ShortPongNoFrameskip-v4 --total-timesteps 16 --learning-starts 8"
    flags += " --buffer-size 50 --batch-size 4 --n-atoms 5 --v-min -3 --v-max 5"
    first = run_script(SCRIPT, *flags.split())
    assert int(first.learner.optimizer.steps) == 2
    assert first.learner.optimizer.eps == 0.01 / 4
    assert first.agent.atoms.tolist() == first.learner.target.atoms.tolist() == [-3, -1, 1, 3, 5]
    played = run_script(SCRIPT, "--evaluate", "runs/run")
    assert played.agent.atoms.tolist() == [-3, -1, 1, 3, 5]
    run_script(SCRIPT, "--evaluate", "runs/run", "--v-max", "1", code=2)
    flags = flags.replace("--run-name run", "--run-name other --init-from runs/run")
    run_script(SCRIPT, *flags.split(), "--v-min", "1", code=2)
    assert capsys.readouterr().err.count("networks' --v-min and --v-max: (-3.0, 5.0)") == 2
    run_script(SCRIPT, *flags.split(), "--run-name", "same")


def test_a_run_updates_and_moves_its_networks(run_script):
    """Iterations of 8 steps: two updates after the last two, the target by tau at the 40th.

    An action is random with the probability of the iteration's first step. Games that are cut end
    in the buffer, and not by a termination.
    """
    flags = f"{TINY} --env-id LivesCutNoFrameskip-v4 --num-envs 2 --total-timesteps 40 --seed 3"
    flags += " --learning-starts 24 --buffer-size 50 --batch-size 4 --dueling --start-e 0.8"
    flags += " --end-e 0 --exploration-fraction 1 --target-network-frequency 40 --tau 0.5"
    module = run_script(SCRIPT, *flags.split())
    assert int(module.learner.optimizer.steps) == 2 * 2
    assert module.agent.epsilon == pytest.approx(0.8 * 8 / 40)
    torch.manual_seed(3)
    untouched = c51_atari.Agent(3, 51, -10.0, 10.0, True, False).state_dict()
    for name, target in module.learner.target.state_dict().items():
        expected = (untouched[name] + module.agent.state_dict()[name]) / 2
        torch.testing.assert_close(target, expected)
    rows = module.replay.rows[:40]
    games = episode_rows(module.run.folder)
    last_rows = {int(game["global_step"]) - 2 + int(game["env"]) for game in games}
    assert last_rows == {*np.flatnonzero(rows["dones"] > rows["terminations"])}
    assert {game["ended_by"] for game in games} == {"truncation"}
    assert rows["terminations"].any(), "a lost life"


def test_bad_flags(refused):
    for flags, sentence in {
        "--n-atoms 1": "--n-atoms must be above 1",
        "--v-min 3 --v-max 2": "--v-min must be below --v-max",
        "--v-min 10": "--v-min must be below --v-max",
        "--v-min=-inf": "--v-min must be below --v-max, and both finite",
        "--v-max inf": "--v-min must be below --v-max, and both finite",
        "--n-step 0": "--n-step must be above 0",
    }.items():
        assert sentence in refused(c51_atari, flags.split())
