"""vpg.py: what differs from a2c.py and ppo.py, whose tests hold for what they share."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from processes import episode_rows
from test_ppo import (
    SPACES,
    Outputs,
    as_coefs,
    exact,
    flat,
    gradients,
    learned_share,
    make_agent,
    make_envs,
    random_batch,
)

import vpg


def test_gradient_of_a_hand_made_batch():
    """In closed form.

    Minus the weight over n in the log-probabilities, -ent_coef/n in the entropies, vf_coef (V -
    R)/n in the values.
    """
    agent = Outputs(
        torch.tensor([-1.0, -2.0, -0.5]),
        torch.tensor([0.5, 0.6, 0.7]),
        torch.tensor([1.0, 2.0, 3.0]),
    )
    batch = {
        "obs": None,
        "actions": None,
        "advantages": torch.tensor([3.0, 2.0, 1.0]),
        "returns": torch.tensor([3.0, 2.0, 0.0]),
    }
    for norm_adv, weights in ((True, [1.0, 0.0, -1.0]), (False, [3.0, 2.0, 1.0])):
        args = vpg.Args(norm_adv=norm_adv, ent_coef=0.3, vf_coef=0.6)
        _, metrics, grads = gradients(vpg.vpg_loss, agent, batch, as_coefs(args), args)
        weights = torch.tensor(weights)
        in_values = 0.2 * torch.tensor([-2.0, 0.0, 3.0])
        expected = torch.cat((-weights / 3, torch.full((3,), -0.1), in_values))
        torch.testing.assert_close(grads, expected)
        policy_loss = -(weights * agent.logprobs.detach()).mean().item()
        assert metrics.tolist() == pytest.approx([policy_loss, 0.5 * 13 / 3, 0.6])


def test_without_a_baseline_there_is_no_value_loss(run_script):
    """The critic stays as it was, and the actor learns."""
    flags = "--env-id Plain-v0 --total-timesteps 400 --num-envs 2 --eval-episodes 1"
    module = run_script(vpg.__file__, *flags.split(), "--baseline", "none")
    assert module.coefs["vf_coef"] == 0
    torch.manual_seed(1)
    agent = vpg.Agent(3, 4, (64, 64))
    for name, x in module.agent.critic.state_dict().items():
        assert torch.equal(x, agent.critic.state_dict()[name])
    assert not torch.equal(module.agent.actor[4].bias, agent.actor[4].bias)


def test_steps_equal_those_of_adam():
    """Nothing is clipped, however large the critic's gradient is."""
    agent = vpg.Agent(3, 4, (64, 64))
    args = vpg.Args(ent_coef=0.01)
    coefs = as_coefs(args, lr=0.003)
    theirs = deepcopy(agent)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.003, eps=1e-5)
    optimizer = vpg.Adam(agent.parameters(), eps=1e-5)
    for _ in range(5):
        batch = random_batch(agent, 20)
        batch["returns"] *= 100
        vpg.update(optimizer, agent, batch, coefs, args)
        adam.zero_grad()
        loss, _ = vpg.vpg_loss(theirs, batch, coefs, args)
        loss.backward()
        assert theirs.critic[4].weight.grad.norm() > 5
        adam.step()
        torch.testing.assert_close(flat(agent), flat(theirs), rtol=0, atol=1e-6)


@pytest.mark.parametrize("env_id", SPACES)
def test_rollouts_are_one_whole_episode_in_each_environment(env_id):
    """Environments wait for the longest; the data are in the order of the environments."""
    envs = make_envs(vpg, env_id, 5)
    agent = make_agent(vpg, envs)
    ended_by = set()
    for _ in range(3):
        for env in envs.envs:
            env.unwrapped.actions.clear()
            del env.unwrapped.obs_seen[:-1]  # all but that of the present reset
        obs, actions, rewards, episodes = vpg.rollout(agent, envs)
        assert rewards.shape == (len(obs), 1)
        assert [episode.env for _, episode in episodes] == [0, 1, 2, 3, 4]
        lengths = [episode.length for _, episode in episodes]
        first = 0
        for (num_steps, episode), env in zip(episodes, envs.envs):
            ended_by.add(episode.ended_by)
            length = episode.length
            end = first + length
            seen = np.array(env.unwrapped.obs_seen, np.float32)
            assert len(seen) == length + 2
            assert exact(seen[:length]) == exact(obs[first:end])
            assert exact(seen[length]) == exact(episode.final_obs)
            assert exact(seen[-1]) == exact(envs.obs[episode.env])
            assert env.unwrapped.actions == actions[first:end].tolist()
            assert episode.episode_return == rewards[first:end].sum()
            assert num_steps == sum(min(length, other) for other in lengths)
            first = end
        assert first == len(obs) == len(actions)
    assert ended_by == {"termination", "truncation"}


def test_rollouts_sample_the_policy():
    envs = make_envs(vpg, "Plain-v0", 400)
    agent = make_agent(vpg, envs)
    agent.actor[4].weight.data.zero_()
    agent.actor[4].bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    _, actions, _, _ = vpg.rollout(agent, envs)
    frequencies = np.bincount(actions.ravel(), minlength=4) / actions.size
    np.testing.assert_allclose(frequencies, [0.1, 0.2, 0.3, 0.4], atol=0.03)


@pytest.mark.parametrize("flags", ["--baseline none", "", "--no-bootstrap-truncated"])
def test_actions_are_weighted_with_the_rewards_to_go(run_script, flags):
    """A run's last rollout against sums.

    With a baseline a time limit bootstraps, and the values are taken off.
    """
    rest = (
        "--env-id Plain-v0 --total-timesteps 300 --gamma 0.9 --eval-episodes 1 "
        "--learning-rate 1e-9 --ent-coef 0.02 --vf-coef 0.3"
    )
    module = run_script(vpg.__file__, *rest.split(), *flags.split())
    vf_coef = 0.0 if "none" in flags else 0.3
    coefs = {"lr": 1e-9 * module.remaining, "ent_coef": 0.02, "vf_coef": vf_coef}
    assert {name: x.item() for name, x in module.coefs.items()} == pytest.approx(coefs)
    before = module.run.global_step - len(module.rewards)
    assert module.remaining == pytest.approx(1 - before / 300) and 0 < module.remaining < 0.9

    def value(obs):
        if "none" in flags:
            return 0.0
        with torch.no_grad():
            return module.agent.critic(torch.from_numpy(obs[None])).item()

    first = 0
    for _, episode in module.episodes:
        end = first + episode.length
        for step in range(first, end):
            expected = sum(0.9 ** (t - step) * module.rewards[t, 0] for t in range(step, end))
            if episode.ended_by == "truncation" and "--no-bootstrap-truncated" not in flags:
                expected += 0.9 ** (end - step) * value(episode.final_obs)
            assert module.returns[step, 0] == pytest.approx(expected, abs=1e-5)
            advantage = expected - value(module.obs[step])
            assert module.advantages[step, 0] == pytest.approx(advantage, abs=1e-5)
        first = end
    assert first == len(module.rewards)
    assert {e.ended_by for _, e in module.episodes} == {"termination", "truncation"}
    assert module.advantages.dtype == module.returns.dtype == np.float32
    assert torch.equal(module.batch["advantages"], torch.from_numpy(module.advantages[:, 0]))
    assert torch.equal(module.batch["returns"], torch.from_numpy(module.returns[:, 0]))


def test_steps_are_counted_over_whole_episodes(run_script):
    """episodes.csv has the steps of all environments at an episode's end."""
    flags = "--env-id Plain-v0 --total-timesteps 400 --eval-episodes 1".split()
    module = run_script(vpg.__file__, *flags)
    rows = episode_rows(module.run.folder)
    steps = [int(row["global_step"]) for row in rows]
    lengths = [int(row["length"]) for row in rows]
    assert module.run.global_step == max(steps) == sum(lengths)
    assert max(steps) >= 400 > max(steps[:-8])
    assert len(rows) % 8 == 0
    assert steps == sorted(steps)
    assert steps[0] == 8 * lengths[0]


@pytest.mark.parametrize("baseline", ["none", "value"])
def test_toy_is_learned(run_script, baseline):
    flags = "--env-id Plain-v0 --total-timesteps 40000 --learning-rate 0.01 --gamma 0.5"
    flags = f"{flags} --eval-episodes 50 --baseline {baseline}"
    module = run_script(vpg.__file__, *flags.split())
    assert learned_share(module) > 0.8  # 1 is possible, 0.5 is chance


def test_a_single_step_has_no_deviation():
    """An episode may be that short; it is learned from as it is."""
    agent = vpg.Agent(3, 4, (64, 64))
    batch = {
        "obs": torch.ones(1, 3),
        "actions": torch.ones(1, dtype=int),
        "advantages": torch.tensor([2.0]),
        "returns": torch.tensor([2.0]),
    }
    args = vpg.Args()
    loss, metrics = vpg.vpg_loss(agent, batch, as_coefs(args), args)
    assert torch.isfinite(loss)
    assert metrics[0] == pytest.approx(2 * np.log(4), rel=0.1)


def test_bad_flags_are_refused(refused):
    for flags, sentence in (
        ("--total-timesteps 0", "--total-timesteps must be above 0"),
        ("--gamma 1.1", "--gamma must be from 0 to 1"),
        ("--num-envs 0", "--num-envs must be above 0"),
        ("--baseline mean", "mean"),
    ):
        assert sentence in refused(vpg, flags.split()), flags
