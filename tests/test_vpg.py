"""vpg.py: what differs from a2c.py and ppo.py, whose definitions it shares and whose tests hold for those."""

import json
import signal

import numpy as np
import pytest
import torch
from test_ppo import Outputs, adam_state, flat, left_by, run

import vpg


@pytest.mark.parametrize("norm_adv", [False, True])
def test_gradient_of_a_hand_made_batch(norm_adv):
    """In closed form: minus the weight over n in the log-probabilities, vf_coef (V - R)/n in the values."""
    agent = Outputs(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0.5, 0.6, 0.7]), torch.tensor([1.0, 2.0, 3.0]))
    batch = {"obs": None, "actions": None, "advantages": torch.tensor([3.0, 2.0, 1.0]),
             "returns": torch.tensor([3.0, 2.0, 0.0])}
    args = vpg.Args(norm_adv=norm_adv, ent_coef=0.3, vf_coef=0.6)
    grads, metrics = torch.func.grad(vpg.vpg_loss, has_aux=True)(flat(agent), agent, batch, args)
    weights = torch.tensor([1.0, 0.0, -1.0]) if norm_adv else torch.tensor([3.0, 2.0, 1.0])
    expected = torch.cat((-weights / 3, torch.full((3,), -0.1), 0.2 * torch.tensor([-2.0, 0.0, 3.0])))
    torch.testing.assert_close(grads, expected)
    assert metrics.tolist() == pytest.approx([-(weights * agent.logprobs.detach()).mean().item(), 0.5 * 13 / 3, 0.6])


def test_without_a_baseline_there_is_no_value_loss():
    agent = vpg.Agent(3, [4])
    batch = {"obs": torch.cat((torch.randn(20, 3), torch.ones(20, 4)), 1), "actions": torch.randint(4, (20, 1)),
             "advantages": torch.randn(20), "returns": 100 * torch.randn(20)}
    grads = [torch.func.grad(vpg.vpg_loss, has_aux=True)(flat(agent), agent, batch, vpg.Args(**flags))[0]
             for flags in ({"baseline": "none"}, {"vf_coef": 0.0}, {})]
    assert torch.equal(grads[0], grads[1]) and (grads[2] - grads[0]).abs().max() > 1


def test_steps_equal_those_of_adam():
    """Nothing is clipped, however large the critic's gradient is."""
    agent, args = vpg.Agent(3, [4]), vpg.Args(ent_coef=0.01)
    params = flat(agent)
    state, theirs = adam_state(params), params.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.003, eps=1e-5)
    for _ in range(5):
        rows = torch.cat((torch.randn(20, 3), torch.ones(20, 4)), 1)
        batch = {"obs": rows, "actions": torch.randint(4, (20, 1)), "advantages": torch.randn(20),
                 "returns": 100 * torch.randn(20)}
        vpg.vpg_update(params, state, agent, batch, torch.tensor(0.003), args)
        adam.zero_grad()
        vpg.vpg_loss(theirs, agent, batch, args)[0].backward()
        assert theirs.grad.norm() > 10
        adam.step()
        torch.testing.assert_close(params, theirs.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("env_id", ["Plain-v0", "Grid-v0"])
def test_rollouts_are_one_whole_episode_in_each_environment(env_id):
    """Environments wait for the longest; all data are in their episodes' order, with the true last observations."""
    envs = vpg.Envs(env_id, 5, 1)
    agent, kinds = vpg.Agent(envs.obs_dim, envs.nvec), set()
    for _ in range(3):
        for env in envs.envs:
            env.unwrapped.actions.clear()
            del env.unwrapped.obs_seen[:-1]  # but for that of the present reset
        obs, actions, rewards, episodes = vpg.rollout(agent, envs)
        assert [episode[1] for episode in episodes] == [0, 1, 2, 3, 4]
        kinds |= {episode[4] for episode in episodes}
        first, lengths = 0, [episode[3] for episode in episodes]
        for (played, i, episode_return, length, ended_by, final_obs), env in zip(episodes, envs.envs):
            seen, end = np.array(env.unwrapped.obs_seen, np.float32), first + length
            assert len(seen) == length + 2 and np.array_equal(seen[:length], obs[first:end, :3])
            assert np.array_equal(seen[length], final_obs[:3]) and np.array_equal(seen[-1], envs.obs[i, :3])
            assert np.array_equal(env.unwrapped.actions, actions[first:end])
            assert episode_return == rewards[first:end].sum()
            assert played == sum(min(length, other) for other in lengths)
            first = end
        assert first == len(obs) == len(rewards)
    assert kinds == {"termination", "truncation"}


@pytest.mark.parametrize("flags", [["--baseline", "none"], [], ["--no-bootstrap-truncated"]], ids=str)
def test_actions_are_weighted_with_the_rewards_to_go(run_script, flags):
    """A run's last rollout against sums; with a baseline a time limit bootstraps, and the values are taken off."""
    module = run_script(vpg.__file__, "--env-id", "Plain-v0", "--total-timesteps", "300", "--gamma", "0.9", *flags,
                        "--eval-episodes", "1", "--learning-rate", "1e-9")
    assert module.lr.item() == pytest.approx(1e-9 * module.remaining) and 0 < module.remaining < 0.9
    first = 0

    def value(rows):
        with torch.no_grad():
            return module.agent.critic(torch.from_numpy(rows[..., :3])).numpy()[..., 0] * ("none" not in flags)

    for *_, length, ended_by, final_obs in module.episodes:
        for step in range(first, first + length):
            expected = sum(0.9 ** (t - step) * module.rewards[t, 0] for t in range(step, first + length))
            if ended_by == "truncation" and "--no-bootstrap-truncated" not in flags:
                expected += 0.9 ** (first + length - step) * value(final_obs)
            assert module.returns[step, 0] == pytest.approx(expected, abs=1e-5)
            assert module.advantages[step, 0] == pytest.approx(expected - value(module.obs[step]), abs=1e-5)
        first += length
    assert {"termination", "truncation"} == {episode[4] for episode in module.episodes}


def test_steps_are_counted_over_whole_episodes(run_script, capsys):
    """episodes.csv has the steps of all environments at an episode's end; the last line says all were played."""
    module = run_script(vpg.__file__, "--env-id", "Plain-v0", "--total-timesteps", "400", "--eval-episodes", "1")
    rows = [line.split(",") for line in (module.run_dir / "episodes.csv").read_text().splitlines()[1:]]
    steps, lengths = [int(row[0]) for row in rows], [int(row[4]) for row in rows]
    assert module.global_step == max(steps) == sum(lengths) >= 400 > max(steps[:-8]) and len(rows) % 8 == 0
    assert steps == sorted(steps) and steps[0] == 8 * lengths[0]
    assert "| 400/400 [" in capsys.readouterr().out


@pytest.mark.parametrize("baseline", ["none", "value"])
def test_toy_is_learned(run_script, baseline):
    module = run_script(vpg.__file__, "--env-id", "Plain-v0", "--total-timesteps", "40000", "--learning-rate", "0.01",
                        "--gamma", "0.5", "--eval-episodes", "50", "--baseline", baseline)
    results = json.loads((module.run_dir / "evaluation.json").read_text())
    assert sum(results["returns"]) / sum(results["lengths"]) > 0.88  # 0.94 is possible, 0.5 is chance


def test_a_single_step_has_no_deviation():
    """An episode may be that short; it is learned from as it is."""
    agent, args = vpg.Agent(3, [4]), vpg.Args()
    batch = {"obs": torch.ones(1, 7), "actions": torch.ones(1, 1, dtype=int), "advantages": torch.tensor([2.0]),
             "returns": torch.tensor([2.0])}
    loss, metrics = vpg.vpg_loss(flat(agent), agent, batch, args)
    assert torch.isfinite(loss) and metrics[0] == pytest.approx(2 * np.log(4), rel=0.1)


def test_runs_are_deterministic_and_resume_exactly(tmp_path):
    flags = ("--env-id toy:Toy-v0 --total-timesteps 3000 --checkpoint-interval 4 --eval-episodes 2 --learning-rate .01 "
             "--run-name run")
    keep = ("agent", "optimizer", "envs", "random", "iteration", "global_step")
    assert run(tmp_path / "whole", flags, script=vpg.__file__).returncode == 0
    assert run(tmp_path / "killed", flags, "SIGKILL 1500", vpg.__file__).returncode == -signal.SIGKILL
    assert run(tmp_path / "killed", "--resume runs/run", "SIGTERM 500", vpg.__file__).returncode == 143
    assert run(tmp_path / "killed", "--resume runs/run", script=vpg.__file__).returncode == 0
    assert left_by(tmp_path / "killed", keep) == left_by(tmp_path / "whole", keep)
    again = run(tmp_path / "killed", "--resume runs/run", script=vpg.__file__)
    assert again.returncode == 0 and "is finished" in again.stdout


@pytest.mark.parametrize("flags, sentence", [
    (["--total-timesteps", "0"], "must be above 0"), (["--gamma", "1.1"], "--gamma must be up to 1"),
    (["--num-envs", "0"], "must be above 0"), (["--baseline", "mean"], "mean")])
def test_bad_flags_are_refused(flags, sentence, refused):
    assert sentence in refused(vpg, flags)
