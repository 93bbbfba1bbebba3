"""dqn.py: targets, n-step returns, exploration, and when the networks move."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBufferSamples

import dqn

SCRIPT = Path(dqn.__file__)
TINY = "--no-compile --no-cuda --run-name run --eval-episodes 1 --eval-interval 0"
LR = torch.tensor(1e-3)


def make_batch(n=16, obs_dim=4, num_actions=2):
    return {
        "obs": torch.randn(n, obs_dim),
        "actions": torch.randint(num_actions, (n,)),
        "rewards": torch.randn(n),
        "next_obs": torch.randn(n, obs_dim),
        "discounts": 0.99 * torch.randint(2, (n,)).float(),
    }


def make_learner(dueling=False):
    """An agent, and a learner whose target has other weights."""
    agent = dqn.Agent(4, 2, (120, 84), dueling)
    learner = dqn.Learner(agent, eps=1e-8)
    for param in learner.target.parameters():
        param.data += 0.1 * torch.randn_like(param)
    return agent, learner


def test_an_update_equals_stable_baselines3():
    """Three steps on three minibatches; its loss is Huber's."""
    agent, learner = make_learner()
    settings = {"policy_kwargs": {"net_arch": [120, 84]}, "max_grad_norm": 1e9, "device": "cpu"}
    model = DQN("MlpPolicy", "CartPole-v1", learning_rate=1e-3, gamma=0.99, **settings)
    model._setup_learn(1)
    for network, own in ((model.q_net, agent), (model.q_net_target, learner.target)):
        network.q_net.load_state_dict(own.network.state_dict())
    args = dqn.Args(huber=True)
    for _ in range(3):
        batch = make_batch()
        rows = (batch["obs"], batch["actions"][:, None], batch["next_obs"])
        dones = (batch["discounts"] == 0).float()[:, None]
        samples = ReplayBufferSamples(*rows, dones, batch["rewards"][:, None])
        model.replay_buffer.sample = lambda *_, samples=samples, **__: samples
        model.train(gradient_steps=1, batch_size=16)
        dqn.update(agent, learner, batch, LR, args)
    for own, other in zip(agent.parameters(), model.q_net.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("huber", [False, True])
def test_the_loss_written_out(double, huber):
    """One transition after the other: equation 2 of Mnih et al., equation 4 of van Hasselt."""
    agent, learner = make_learner()
    before = copy.deepcopy(agent)
    batch = make_batch()
    expected = []
    for obs, action, reward, next_obs, discount in zip(*batch.values(), strict=True):
        values = learner.target(next_obs[None])[0]
        best = int((before(next_obs[None])[0] if double else values).argmax())
        error = float(before(obs[None])[0, action] - (reward + discount * values[best]))
        is_small = abs(error) < 1
        expected.append((0.5 * error**2 if is_small else abs(error) - 0.5) if huber else error**2)
    dqn.update(agent, learner, batch, LR, dqn.Args(double=double, huber=huber))
    metrics = learner.mean_metrics()
    assert metrics["td_loss"] == pytest.approx(np.mean(expected), rel=1e-4)
    values = before(batch["obs"]).gather(1, batch["actions"][:, None])
    assert metrics["q_values"] == pytest.approx(float(values.mean()), rel=1e-4)


def test_the_target_is_a_constant():
    """Also where both networks are one: no gradient flows through it."""
    agent, learner = make_learner()
    learner.target = agent
    batch = make_batch()
    td_targets = batch["rewards"] + batch["discounts"] * agent(batch["next_obs"]).amax(1)
    values = agent(batch["obs"]).gather(1, batch["actions"][:, None]).squeeze(1)
    expected = torch.autograd.grad(
        ((values - td_targets.detach()) ** 2).mean(), learner.optimizer.params
    )
    given = []
    learner.optimizer.step = lambda grads, lr: given.extend(grads)
    dqn.update(agent, learner, batch, LR, dqn.Args())
    torch.testing.assert_close(given, list(expected))


def test_dueling_values_have_the_mean_of_the_value():
    """Equation 9 of Wang et al.: the advantages' mean is 0."""
    agent = dqn.Agent(4, 3, (8,), dueling=True)
    obs = torch.randn(5, 4)
    outputs = agent.network(obs)
    assert outputs.shape == (5, 4)
    torch.testing.assert_close(agent(obs).mean(1), outputs[:, 0])
    torch.testing.assert_close(agent(obs).diff(dim=1), outputs[:, 1:].diff(dim=1))


@pytest.mark.parametrize("dueling", [False, True])
def test_actions_are_the_best_ones(dueling):
    agent = dqn.Agent(4, 3, (8,), dueling)
    obs = np.random.randn(20, 4).astype(np.float32)
    actions = agent.policy()(obs, 0.0)
    assert np.array_equal(actions, agent(torch.from_numpy(obs)).argmax(1).numpy())
    assert len(set(actions)) > 1


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("n_step", [1, 2, 5])
def test_n_step_returns_written_out(tmp_path, num_envs, n_step):
    """Row by row, across episodes' ends, the newest row, and the end of the buffer's file."""
    rng = np.random.default_rng(0)
    args = dqn.Args(num_envs=num_envs, n_step=n_step, gamma=0.9, batch_size=500)
    columns = {name: (np.float32, ()) for name in ("obs", "rewards", "next_obs")}
    columns |= {name: (np.bool_, ()) for name in ("terminations", "dones")}
    replay = dqn.ReplayBuffer(tmp_path / "replay", 60, 9, columns, is_new=True)
    rows = []
    for step in range(50):
        terminations = rng.random(num_envs) < 0.1
        dones = terminations | (rng.random(num_envs) < 0.1)
        obs = np.arange(num_envs) + num_envs * step
        row = {"obs": obs, "rewards": rng.random(num_envs), "next_obs": obs + 0.5}
        row |= {"terminations": terminations, "dones": dones}
        replay.add(**{name: np.asarray(x, np.float32) for name, x in row.items()})
        rows += [{name: np.float32(x[i]) for name, x in row.items()} for i in range(num_envs)]
    batch = dqn.sample_n_steps(replay, args, "cpu")
    batch = {name: x.numpy() for name, x in batch.items()}
    assert len(set(batch["obs"])) > min(30, len(rows) - 20)
    for k, obs in enumerate(batch["obs"]):
        number = int(obs)
        total, discount = 0.0, 1.0
        for _ in range(n_step):
            row = rows[number]
            total += discount * row["rewards"]
            discount *= 0.9
            number += num_envs
            if row["dones"] or number >= len(rows):
                break
        assert batch["rewards"][k] == pytest.approx(total, rel=1e-5)
        assert batch["next_obs"][k] == row["next_obs"]
        assert batch["discounts"][k] == pytest.approx(discount * (1 - row["terminations"]))


def test_an_episode_that_cannot_be_brought_back_ends_in_the_buffer(run_script):
    """Its returns of several steps mustn't go on into the next one."""
    flags = f"{TINY} --total-timesteps 300 --learning-starts 299 --num-envs 2 --end-e 1"
    flags += " --buffer-size 100 --checkpoint-interval 2"  # the file has begun anew
    run_script(SCRIPT, *flags.split()).run.lock.release()
    path = Path("runs/run/checkpoint.pt")
    saved = torch.load(path, weights_only=True)
    saved["envs"]["obs"][1] += 1
    torch.save(saved, path)
    run = run_script(SCRIPT, "--resume", "runs/run")
    assert run.envs.restarted.tolist() == [False, True]
    assert len(run.replay.rows) == 140
    assert run.replay.read(np.array([298, 299]))["dones"].tolist() == [0, 1]


def test_the_probability_of_a_random_action():
    args = dqn.Args(total_timesteps=1000, exploration_fraction=0.5, start_e=0.9, end_e=0.1)
    found = [dqn.epsilon(step, args) for step in (0, 250, 500, 999)]
    assert found == pytest.approx([0.9, 0.5, 0.1, 0.1])
    assert dqn.epsilon(0, dqn.Args(exploration_fraction=0, end_e=0.3)) == 0.3


@pytest.mark.parametrize("probability", [0, 1])
def test_actions_are_random_or_the_best(run_script, probability):
    flags = f"{TINY} --total-timesteps 400 --learning-starts 300 --learning-rate 1e-20"
    flags += f" --start-e {probability} --end-e {probability}"
    run = run_script(SCRIPT, *flags.split())
    rows = run.replay.rows[:400]
    policy = run.agent.policy()
    best = np.concatenate([policy(obs[None], 0.0) for obs in rows["obs"]])
    equal = np.mean(rows["actions"] == best)
    assert equal == 1 if probability == 0 else 0.35 < equal < 0.65


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MountainCar-v0"])
def test_next_observations_are_those_before_the_reset(run_script, env_id):
    """And only terminations, which CartPole's random episodes end with, are stored as such."""
    flags = f"--env-id {env_id} {TINY} --num-envs 2 --total-timesteps 1000 --learning-starts 999"
    run = run_script(SCRIPT, *flags.split(), "--end-e", "1")
    rows = run.replay.rows[:1000]
    dones = rows["dones"][:-2]
    assert 2 <= dones.sum() < 200
    goes_on = np.all(rows["next_obs"][:-2] == rows["obs"][2:], axis=1)
    assert np.array_equal(goes_on, ~dones)
    assert np.array_equal(rows["terminations"], rows["dones"] & (env_id[0] == "C"))


def test_when_the_networks_move(run_script):
    """An update every 20 steps after the 100th; the target every 220 steps, by tau."""
    flags = f"{TINY} --total-timesteps 220 --learning-starts 100 --train-frequency 20 --seed 3"
    first = run_script(SCRIPT, *flags.split(), "--target-network-frequency", "221")
    assert int(first.learner.optimizer.steps) == (220 - 100) // 20
    assert first.learner.optimizer.eps == 1e-8
    torch.manual_seed(3)
    untouched = dqn.Agent(4, 2, (120, 84), False).state_dict()
    torch.testing.assert_close(first.learner.target.state_dict(), untouched)
    flags = flags.replace("--run-name run", "--run-name moved")
    moved = run_script(SCRIPT, *flags.split(), "--target-network-frequency", "220", "--tau", "0.5")
    for name, target in moved.learner.target.state_dict().items():
        expected = (untouched[name] + moved.agent.state_dict()[name]) / 2
        torch.testing.assert_close(target, expected)


@pytest.mark.parametrize("frequency, moves", [(30, [1, 3, 4, 6]), (10, [*range(1, 7)] * 2)])
def test_the_target_moves_with_the_steps_of_all_environments(
    run_script, tmp_path, capsys, frequency, moves
):
    """After the update of a step at which it is due, and as often as it is due."""
    call = "move_target(agent, learner, args.tau)"
    text = SCRIPT.read_text()
    assert text.count(f"    {call}") == 1
    copy = tmp_path / "copy.py"
    copy.write_text(text.replace(f"    {call}", '    print("moved", int(learner.optimizer.steps))'))
    flags = f"{TINY} --total-timesteps 160 --learning-starts 40 --train-frequency 20 --num-envs 2"
    run_script(copy, *flags.split(), "--target-network-frequency", str(frequency))
    lines = capsys.readouterr().out.splitlines()
    assert [int(x.split()[1]) for x in lines if x.startswith("moved")] == sorted(moves)


def test_a_run_counts_the_steps_of_all_environments(run_script):
    """Iterations of 20 steps: two updates after the last two, a target that moves at 240.

    An action is random with the probability of the iteration's first step, here 0.8 / 12.
    """
    flags = f"{TINY} --total-timesteps 240 --learning-starts 200 --num-envs 2 --start-e 0.8"
    flags += " --end-e 0 --exploration-fraction 1 --target-network-frequency 240"
    module = run_script(SCRIPT, *flags.split())
    assert int(module.learner.optimizer.steps) == 2 * 2
    assert torch.equal(module.learner.target.network[0].weight, module.agent.network[0].weight)
    assert module.agent.epsilon == pytest.approx(0.8 / 12)


def test_a_run_that_diverges_ends_within_a_hundred_iterations(run_script):
    """Not with the next checkpoint."""
    flags = f"{TINY} --total-timesteps 2000 --learning-starts 10 --train-frequency 1"
    module = run_script(SCRIPT, *flags.split(), "--learning-rate", "1e30", code=1)
    assert module.run.global_step <= 200


def test_bad_flags(run_script, capsys):
    for flags, sentence in {
        "--end-e 0.5 --start-e 0.1": "it must be 0 <= --end-e <= --start-e <= 1",
        "--exploration-fraction 2": "--exploration-fraction must be from 0 to 1",
        "--n-step 0": "--n-step must be above 0",
        "--train-frequency 0": "--train-frequency must be above 0",
        "--learning-starts 500000": "--learning-starts must be from 0, below 500000",
        "--total-timesteps 10005": "--learning-starts must be from 0, below 10000",
        "--env-id Pendulum-v1": "needs a Discrete one",
    }.items():
        run_script(SCRIPT, *flags.split(), code=2)
        assert sentence in capsys.readouterr().err


def test_networks_are_cleanrl_s():
    """Two layers with ReLU, and PyTorch's own initial weights."""
    agent = dqn.Agent(4, 2, dqn.Args().hidden_sizes, dueling=False)
    kinds = [type(layer).__name__ for layer in agent.network]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [layer.out_features for layer in agent.network[::2]] == [120, 84, 2]
    assert agent.network[0].weight.abs().max() <= 0.5
