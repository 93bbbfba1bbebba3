"""dqn_atari.py: stacks from single frames, across episodes' ends, the buffer's end and a resume.

And its network, updates, actions, and whole runs. Its games are those of test_ppo_atari.py.
"""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from processes import RUN, differences, load_checkpoint
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import ReplayBufferSamples
from stable_baselines3.dqn import CnnPolicy
from test_ppo_atari import flat, run
from torch import nn

import dqn_atari

SCRIPT = Path(dqn_atari.__file__)
SIZE = 60
SPARE = 12
TINY = "--no-compile --no-cuda --num-threads 1 --run-name run --eval-episodes 1"
LR = torch.tensor(1e-3)


def random_game(rng, num_envs, num_steps):
    """Observations as FrameStack makes them, (84, 84, 4) by step and environment, and their rows.

    A row: obs, actions, rewards, next_obs (the one before a reset), terminations, dones.
    """

    def frame():
        return rng.integers(1, 256, (84, 84), np.uint8)

    def first():
        obs = np.zeros((84, 84, 4), np.uint8)
        obs[..., 3] = frame()
        return obs

    current = [first() for _ in range(num_envs)]
    rows = []
    for _ in range(num_steps):
        for i in range(num_envs):
            next_obs = np.concatenate((current[i][..., 1:], frame()[..., None]), 2)
            terminated = rng.random() < 0.1
            done = terminated or rng.random() < 0.1
            row = {"obs": current[i], "actions": rng.integers(4), "rewards": rng.random()}
            rows.append({**row, "next_obs": next_obs, "terminations": terminated, "dones": done})
            current[i] = first() if done else next_obs
    return rows, current


def fill(replay, rows, current_obs):
    """Adds all rows, and the final frames of cut episodes, in blocks of up to three steps."""
    num_envs = len(current_obs)
    block = 3 * num_envs
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        for k, row in enumerate(part, replay.count):
            if row["dones"] and not row["terminations"]:
                replay.final_frames[k] = row["next_obs"][..., 3]
        names = ("actions", "rewards", "terminations", "dones")
        columns = {name: np.array([row[name] for row in part]) for name in names}
        frames = np.stack([row["obs"][..., 3] for row in part])
        columns = {"frames": frames, **columns}
        shape = (-1, num_envs)
        replay.add(**{name: x.reshape(*shape, *x.shape[1:]) for name, x in columns.items()})


@pytest.mark.parametrize("num_steps", [3, 20, 47, 100])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_stacks_are_those_of_the_game(tmp_path, num_envs, num_steps):
    """All rows that may be drawn: full or not, episodes' ends, the newest, past the file's end."""
    rows, current = random_game(np.random.default_rng(0), num_envs, num_steps)
    current_obs = np.stack(current)
    path = tmp_path / "replay"
    replay = dqn_atari.FrameBuffer(path, SIZE, SPARE, current_obs, is_new=True)
    fill(replay, rows, current_obs)
    numbers = np.arange(max(0, len(rows) - SIZE), len(rows))
    assert set(replay.draw(5000)) == set(numbers)
    found = replay.read(numbers)
    for k, number in enumerate(numbers):
        row = rows[number]
        assert np.array_equal(found["obs"][k], row["obs"])
        assert found["actions"][k] == row["actions"]
        assert found["rewards"][k] == np.float32(row["rewards"])
        assert found["dones"][k] == row["dones"]
        assert found["terminations"][k] == row["terminations"]
        if not row["terminations"]:
            assert np.array_equal(found["next_obs"][k], row["next_obs"])


def test_a_killed_run_finds_all_that_it_may_draw(tmp_path):
    """After a checkpoint, rows were written that it knows nothing of; frames too."""
    rng = np.random.default_rng(1)
    rows, current = random_game(rng, 2, 75)
    current_obs = np.stack(current)
    path = tmp_path / "replay"
    replay = dqn_atari.FrameBuffer(path, SIZE, SPARE, current_obs, is_new=True)
    fill(replay, rows, current_obs)
    numbers = np.arange(len(rows) - SIZE, len(rows))
    before = replay.read(numbers)
    state = replay.state_dict()
    assert min(state["final_frames"]) >= len(rows) - SIZE
    lost, _ = random_game(rng, 2, SPARE // 2)
    fill(replay, lost, current_obs)
    resumed = dqn_atari.FrameBuffer(path, SIZE, SPARE, current_obs, is_new=False)
    resumed.load_state_dict(state)
    after = resumed.read(numbers)
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.array_equal(values, after[name])


def test_a_checkpoint_keeps_the_last_frames_that_may_be_drawn(tmp_path):
    """From the oldest row's on."""
    current_obs = np.zeros((2, 84, 84, 4), np.uint8)
    replay = dqn_atari.FrameBuffer(tmp_path / "replay", SIZE, SPARE, current_obs, is_new=True)
    replay.count = 100
    replay.final_frames = {k: np.full((84, 84), k, np.uint8) for k in range(0, 100, 10)}
    frames = replay.state_dict()["final_frames"]
    assert {k: int(frame[0, 0]) for k, frame in frames.items()} == {
        k: k for k in range(40, 100, 10)
    }


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("n_step", [1, 2, 5])
def test_n_step_returns_written_out(tmp_path, num_envs, n_step):
    """Row by row, across ends, cuts with their last frame, the newest row and the file's end."""
    rows, current = random_game(np.random.default_rng(0), num_envs, 130 // num_envs)
    current_obs = np.stack(current)
    path = tmp_path / "replay"
    replay = dqn_atari.FrameBuffer(path, SIZE, SPARE, current_obs, is_new=True)
    fill(replay, rows, current_obs)
    assert replay.count > len(replay.rows) + SPARE
    args = dqn_atari.Args(num_envs=num_envs, n_step=n_step, gamma=0.9, batch_size=400)
    numbers = replay.draw(args.batch_size)
    assert {*numbers} == {*range(len(rows) - SIZE, len(rows))}
    replay.draw = lambda n: numbers
    batch = dqn_atari.sample_n_steps(replay, args, "cpu")
    batch = {name: x.numpy() for name, x in batch.items()}
    ends = set()
    for k, number in enumerate(numbers):
        assert np.array_equal(batch["obs"][k], rows[number]["obs"])
        assert batch["actions"][k] == rows[number]["actions"]
        total, discount = 0.0, 1.0
        for _ in range(n_step):
            row = rows[number]
            total += discount * row["rewards"]
            discount *= 0.9
            number += num_envs
            if row["dones"] or number >= len(rows):
                break
        ends.add((row["dones"], row["terminations"], number >= len(rows)))
        assert batch["rewards"][k] == pytest.approx(total, rel=1e-5)
        assert batch["discounts"][k] == pytest.approx(discount * (1 - row["terminations"]))
        if not row["terminations"]:
            assert np.array_equal(batch["next_obs"][k], row["next_obs"])
    assert {end[:2] for end in ends} == {(False, False), (True, False), (True, True)}
    assert any(newest for *_, newest in ends)


# Network and update


def random_obs(n):
    return torch.randint(256, (n, 84, 84, 4), dtype=torch.uint8)


def make_batch(n=8, num_actions=6):
    return {
        "obs": random_obs(n),
        "actions": torch.randint(num_actions, (n,)),
        "rewards": torch.randn(n),
        "next_obs": random_obs(n),
        "discounts": 0.99 * (torch.arange(n) % 3 > 0).float(),
    }


def make_learner(dueling=False):
    """An agent with values of some size, and a learner whose target has other weights."""
    agent = dqn_atari.Agent(6, dueling, amp=False)
    agent.network[-1].weight.data *= 20
    learner = dqn_atari.Learner(agent, eps=1e-8)
    learner.target.network[-1].weight.data += torch.randn_like(agent.network[-1].weight)
    return agent, learner


def test_the_network_is_natures():
    """With PyTorch's own initial weights, which --seed draws."""
    torch.manual_seed(5)
    agent = dqn_atari.Agent(6, False, False)
    kinds = [type(layer).__name__ for layer in agent.network]
    assert kinds == 3 * ["Conv2d", "ReLU"] + ["Flatten", "Linear", "ReLU", "Linear"]
    convs = [(x.out_channels, x.kernel_size[0], x.stride[0]) for x in agent.network[:6:2]]
    assert convs == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    assert (agent.network[7].out_features, agent.network[9].out_features) == (512, 6)
    assert sum(x.numel() for x in agent.parameters()) == 1_687_206
    torch.manual_seed(5)
    layers = [nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)]
    layers += [nn.Linear(3136, 512), nn.Linear(512, 6)]
    for own, other in zip(agent.parameters(), nn.ModuleList(layers).parameters(), strict=True):
        assert torch.equal(own, other)


def test_values_written_out():
    """Bytes as pixels from 0 to 1, frames as channels."""
    agent, _ = make_learner()
    obs = random_obs(5)
    planes = torch.stack([obs[..., k] for k in range(4)], 1).float() / 255
    assert agent(obs).dtype == torch.float32
    torch.testing.assert_close(agent(obs), agent.network(planes), rtol=1e-4, atol=1e-5)


def test_dueling_values_have_the_mean_of_the_value():
    """Equation 9 of Wang et al.: the advantages' mean is 0."""
    agent, _ = make_learner(dueling=True)
    obs = random_obs(5)
    outputs = agent.network(obs.permute(0, 3, 1, 2) / 255)
    assert outputs.shape == (5, 7)
    torch.testing.assert_close(agent(obs).mean(1), outputs[:, 0], rtol=1e-4, atol=1e-5)
    differences = outputs[:, 1:].diff(dim=1)
    torch.testing.assert_close(agent(obs).diff(dim=1), differences, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_near_float32():
    agent, _ = make_learner()
    obs = random_obs(3)
    exact = agent(obs)
    agent.amp = True
    rounded = agent(obs)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dueling", [False, True])
def test_actions_are_the_best_ones_or_random(dueling):
    """With the probability epsilon, all alike."""
    agent, _ = make_learner(dueling)
    agent.network[-1].weight.data[:, :256] *= -1  # so that the best action isn't always one
    obs = random_obs(16).numpy()
    obs[8:] //= 8
    policy = agent.policy()
    best = policy(obs, 0.0)
    assert np.array_equal(best, agent(torch.from_numpy(obs)).argmax(1))
    for epsilon in (0.0, 0.3, 1.0):
        agent.epsilon = epsilon
        noise = agent.noise(500, 16)
        assert noise.shape == (500, 16, 6)
        explores = noise.any(axis=2)
        assert explores.mean() == pytest.approx(epsilon, abs=0.03)
        actions = policy(obs, noise[0])
        assert np.array_equal(actions, np.where(explores[0], noise[0].argmax(1), best))
        if epsilon > 0:
            shares = np.bincount(noise[explores].argmax(1), minlength=6) / explores.sum()
            np.testing.assert_allclose(shares, 1 / 6, atol=0.04)


def test_an_update_equals_stable_baselines3():
    """Three steps on three minibatches; its loss is Huber's."""
    agent, learner = make_learner()
    spaces = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(6)
    policy = CnnPolicy(*spaces, lambda _: 1e-3)
    pairs = (policy.q_net, agent), (policy.q_net_target, learner.target)
    for network, own in pairs:
        weights = list(own.parameters())
        for other, weight in zip(network.parameters(), weights, strict=True):
            other.data.copy_(weight)
    model = SimpleNamespace(policy=policy, q_net=policy.q_net, q_net_target=policy.q_net_target)
    model.gamma, model.max_grad_norm, model._n_updates = 0.99, 1e9, 0
    model._update_learning_rate = lambda optimizer: None
    model._vec_normalize_env = None
    model.logger = SimpleNamespace(record=lambda *_, **__: None)
    before = flat(agent)
    for _ in range(3):
        batch = make_batch()
        obs, next_obs = (batch[name].permute(0, 3, 1, 2) for name in ("obs", "next_obs"))
        dones = (batch["discounts"] == 0).float()[:, None]
        rows = obs, batch["actions"][:, None], next_obs, dones, batch["rewards"][:, None]
        samples = ReplayBufferSamples(*rows)
        model.replay_buffer = SimpleNamespace(sample=lambda *_, x=samples, **__: x)
        DQN.train(model, gradient_steps=1, batch_size=8)
        dqn_atari.update(agent, learner, batch, LR, dqn_atari.Args(huber=True))
    difference = (flat(agent) - flat(policy.q_net)).abs().mean()
    assert difference < 1e-3 * (flat(agent) - before).abs().mean()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("huber", [False, True])
def test_the_loss_written_out(double, huber):
    """One transition after the other: equation 2 of Mnih et al., equation 4 of van Hasselt."""
    agent, learner = make_learner()
    before = copy.deepcopy(agent)
    batch = make_batch()
    expected = []
    for obs, action, reward, next_obs, discount in zip(*batch.values(), strict=True):
        values = learner.target(next_obs[None])[0].detach()
        best = int((before(next_obs[None])[0] if double else values).argmax())
        error = float(before(obs[None])[0, action].detach() - (reward + discount * values[best]))
        is_small = abs(error) < 1
        expected.append((0.5 * error**2 if is_small else abs(error) - 0.5) if huber else error**2)
    dqn_atari.update(agent, learner, batch, LR, dqn_atari.Args(double=double, huber=huber))
    metrics = learner.mean_metrics()
    assert metrics["td_loss"] == pytest.approx(np.mean(expected), rel=1e-3)
    values = before(batch["obs"]).gather(1, batch["actions"][:, None])
    assert metrics["q_values"] == pytest.approx(float(values.mean()), rel=1e-3)


# Whole runs


def record_steps(monkeypatch, run_script, flags):
    """A run, and its rows as the training's VecEnv gave them: those of random_game()."""
    rows = []

    def give_rows(namespace):
        step, step_env = namespace.VecEnv.step, namespace.VecEnv.step_env
        before_reset = {}

        def record(envs, actions):
            if len(envs.envs) == 1:  # an evaluation's
                return step(envs, actions)
            obs = envs.obs.copy()
            rewards, terminations, truncations, episodes = step(envs, actions)
            next_obs = envs.obs.copy()
            for i, last in before_reset.items():
                next_obs[i] = last
            before_reset.clear()
            for row in zip(obs, actions, rewards, next_obs, terminations, truncations):
                names = ("obs", "actions", "rewards", "next_obs", "terminations", "truncations")
                rows.append(dict(zip(names, row)))
            return rewards, terminations, truncations, episodes

        def record_env(envs, i, action):
            env = envs.envs[i]
            reset = env.reset
            env.reset = lambda **given: (
                before_reset.update({i: env.frames.copy()}) or reset(**given)
            )
            try:
                return step_env(envs, i, action)
            finally:
                del env.reset

        namespace.VecEnv.step, namespace.VecEnv.step_env = record, record_env

    make = nn.Module.__init__
    done = []

    def hook(self, *args, **kwargs):  # the Agent is made after VecEnv, before the first step
        module = sys.modules["__main__"]
        if not done and hasattr(module, "VecEnv"):
            done.append(True)
            give_rows(module)
        make(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__init__", hook)
    return run_script(SCRIPT, *flags.split()), rows


@pytest.mark.parametrize(
    "env_id, kinds",
    [
        ("BreakoutNoFrameskip-v4", {"termination"}),
        ("ShortPongNoFrameskip-v4", {"truncation"}),
    ],
)
def test_a_run_remembers_what_its_games_showed(monkeypatch, run_script, env_id, kinds):
    """All rows that may be drawn: across lost lives, or where the emulator's time limit cuts."""
    flags = f"{TINY} --env-id {env_id} --num-envs 2 --total-timesteps 640 --learning-starts 630"
    flags += " --end-e 1 --buffer-size 400 --checkpoint-interval 20"
    module, rows = record_steps(monkeypatch, run_script, flags)
    assert len(rows) == module.replay.count == 640 > len(module.replay.rows)
    assert int(module.learner.optimizer.steps) == 2 * 2
    numbers = np.arange(240, 640)
    found = module.replay.read(numbers)
    ends = set()
    for k, row in enumerate(rows[240:]):
        done = row["terminations"] or row["truncations"]
        assert np.array_equal(found["obs"][k], row["obs"])
        for name in ("actions", "rewards", "terminations"):
            assert found[name][k] == row[name]
        assert found["dones"][k] == done
        if not row["terminations"]:
            assert np.array_equal(found["next_obs"][k], row["next_obs"])
        if done:
            ends.add("termination" if row["terminations"] else "truncation")
    assert ends == kinds
    assert {*found["rewards"]} > {0.0}


def test_a_run_killed_in_mid_game_and_resumed_is_equal(server, tmp_path):
    """Weights, rows, all that is logged; and the frames aren't in the checkpoint."""
    flags = f"{TINY} --env-id ShortPongNoFrameskip-v4 --num-envs 2 --total-timesteps 384"
    flags += " --learning-starts 330 --buffer-size 150 --checkpoint-interval 21 --end-e 0.5"
    (tmp_path / "whole").mkdir()
    run(server, tmp_path / "whole", flags, script=SCRIPT)
    run(server, tmp_path, flags, killed_in=360, script=SCRIPT)
    saved = load_checkpoint(tmp_path / RUN)
    assert saved["run"]["iteration"] == 42
    assert saved["learner"]["optimizer.steps"] > 0
    networks = sum(x.nbytes for part in ("agent", "learner") for x in saved[part].values())
    size = (tmp_path / RUN / "checkpoint.pt").stat().st_size
    assert size - networks < 200_000
    assert "brought back" not in run(server, tmp_path, f"--resume {RUN}", script=SCRIPT)
    assert not differences(tmp_path / RUN, tmp_path / "whole" / RUN)
    ours, theirs = (rows_of(folder / RUN, 2) for folder in (tmp_path, tmp_path / "whole"))
    for name, values in ours.items():
        assert np.array_equal(values, theirs[name])


def rows_of(run_dir, num_envs):
    """All rows that a run of 150 steps' memory may draw."""
    state = load_checkpoint(run_dir)
    obs = state["envs"]["obs"].numpy()
    spare = 21 * 4 * num_envs
    path = run_dir / "replay.bin"
    replay = dqn_atari.FrameBuffer(path, 150, spare, obs, is_new=False)
    replay.load_state_dict(state["replay"])
    return replay.read(np.arange(replay.count - 150, replay.count))


def test_an_episode_that_cannot_be_brought_back_ends_in_the_buffer(run_script):
    """With its last frame, or that of its time limit; what follows is a new episode."""
    flags = f"{TINY} --total-timesteps 156 --learning-starts 155 --num-envs 3 --end-e 1"
    flags += " --buffer-size 100 --exploration-fraction 0"
    run_script(SCRIPT, *flags.split()).run.lock.release()
    path = Path("runs/run/checkpoint.pt")
    saved = torch.load(path, weights_only=True)
    assert saved["replay"]["count"] == 156
    saved["envs"]["obs"][1:] = 255 - saved["envs"]["obs"][1:]
    saved["replay"]["final_frames"][155] = torch.full((84, 84), 7, dtype=torch.uint8)
    torch.save(saved, path)
    module = run_script(SCRIPT, "--resume", "runs/run", "--total-timesteps", "168")
    assert module.envs.restarted.tolist() == [False, True, True]
    assert module.replay.rows["dones"][153:156].tolist() == [0, 1, 1]
    assert module.replay.rows["terminations"][153:156].tolist() == [0, 0, 0]
    frames = saved["envs"]["obs"][1, ..., 3].numpy()
    assert np.array_equal(module.replay.final_frames[154], frames)
    assert (module.replay.final_frames[155] == 7).all()
    found = module.replay.read(np.array([153, 154, 157]))
    assert np.array_equal(found["next_obs"][0], saved["envs"]["obs"][0])
    assert np.array_equal(found["next_obs"][1, ..., 3], frames)
    assert not found["obs"][2, ..., :3].any()
    assert found["obs"][2, ..., 3].any()


def test_an_end_that_a_killed_resume_has_written_has_its_last_frame(run_script):
    """Rows outlive a kill, unlike the frame, also where this resume brings the episode back."""
    flags = f"{TINY} --total-timesteps 160 --learning-starts 159 --num-envs 2 --end-e 1"
    flags += " --buffer-size 200 --exploration-fraction 0"
    first = run_script(SCRIPT, *flags.split())
    first.run.lock.release()
    assert not first.replay.rows["dones"][159]
    first.replay.rows["dones"][159] = True
    module = run_script(SCRIPT, "--resume", "runs/run", "--total-timesteps", "168")
    assert module.envs.restarted.tolist() == [False, False]
    assert list(module.replay.final_frames) == [159]
    found = module.replay.read(np.array([159]))
    assert np.array_equal(found["next_obs"][0], first.envs.obs[1])


def test_when_the_networks_move(run_script):
    """An update for 20 steps after the 40th; the target by tau, when a multiple has passed.

    An action is random with the probability of the iteration's first step, which is the 40th.
    """
    flags = f"{TINY} --total-timesteps 80 --learning-starts 40 --train-frequency 20 --seed 3"
    flags += " --buffer-size 100 --num-envs 2 --end-e 0 --exploration-fraction 1"
    first = run_script(SCRIPT, *flags.split(), "--target-network-frequency", "81")
    assert int(first.learner.optimizer.steps) == (80 - 40) // 20
    assert first.learner.optimizer.eps == 1e-8
    assert first.agent.epsilon == 0.5
    torch.manual_seed(3)
    untouched = dqn_atari.Agent(4, False, False).state_dict()
    torch.testing.assert_close(first.learner.target.state_dict(), untouched)
    flags = flags.replace("--run-name run", "--run-name moved")
    moved = run_script(SCRIPT, *flags.split(), "--target-network-frequency", "70", "--tau", "0.5")
    for name, target in moved.learner.target.state_dict().items():
        expected = (untouched[name] + moved.agent.state_dict()[name]) / 2
        torch.testing.assert_close(target, expected)


def test_a_run_has_the_flags_network(run_script):
    flags = f"{TINY} --env-id LivesCutNoFrameskip-v4 --total-timesteps 8 --learning-starts 4"
    flags += " --buffer-size 9 --batch-size 2 --dueling --amp"
    module = run_script(SCRIPT, *flags.split())
    for agent in module.agent, module.learner.target:
        assert agent.amp and agent.dueling
        assert agent.network[-1].out_features == 1 + 3


def test_bad_flags(refused):
    for flags, sentence in {
        "--end-e 0.5 --start-e 0.1": "it must be 0 <= --end-e <= --start-e <= 1",
        "--exploration-fraction 2": "--exploration-fraction must be from 0 to 1",
        "--n-step 0": "--n-step must be above 0",
        "--train-frequency 0": "--train-frequency must be above 0",
        "--buffer-size 0": "--buffer-size must be above 0",
        "--tau 0": "--tau must be above 0, up to 1",
        "--learning-starts 10000000": "--learning-starts must be from 0, below",
        "--total-timesteps 7 --num-envs 2": "--total-timesteps is below an iteration, 8",
    }.items():
        assert sentence in refused(dqn_atari, flags.split())
