"""ppo_atari_lstm_vector.py: the newest frame, the memory and its ends, devices, and a killed run.

Its games are tested with ppo_atari_vector.py, its network with ppo_atari_lstm.py, and what these
share with ppo_lstm.py there.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ppo_atari import results
from test_ppo_atari_lstm import features
from test_ppo_atari_vector import META, SHORT_RUN, fake_games, read_rows, run, run_on_meta, stack
from test_ppo_lstm import assert_bootstraps_and_agrees

import ppo_atari_lstm_vector as ppo

SCRIPT = Path(ppo.__file__)
SMALL = (
    "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --hidden-size 16 --no-cuda "
    "--num-threads 1 --eval-episodes 1 --eval-max-steps 20 --emulator-threads 1"
)


@pytest.fixture
def fake(monkeypatch):
    """fake(*scripts, **options) is fake_games for ppo_atari_lstm_vector.py."""
    return partial(fake_games, monkeypatch, ppo)


@pytest.fixture
def seen(monkeypatch):
    """All observations and memories that agents get in their steps."""
    inputs = []
    agent_step = ppo.Agent.step

    def step(self, obs, memory):
        inputs.append((obs.copy(), memory.clone()))
        return agent_step(self, obs, memory)

    monkeypatch.setattr(ppo.Agent, "step", step)
    return inputs


def test_a_rollout_sees_the_newest_frame_and_its_memory_ends_with_an_episode(fake, seen):
    """The memory is zero where a life was lost or a game ended, not zero elsewhere."""
    fake({3: "life", 9: "over"}, {6: "life"}, {})
    games = ppo.Games("VectorCutNoFrameskip-v4", 3, 1, ppo.Args())
    agent = ppo.Agent(4, ppo.Args(hidden_size=6))
    memory = ppo.Memory(agent, 3)
    played = ppo.rollout(agent, games, 24, memory)
    obs, *_, terminations, truncations, episodes = played
    assert obs.shape == (24, 3, 84, 84)
    np.testing.assert_array_equal(obs, [frames for frames, _ in seen])
    np.testing.assert_array_equal(obs[:11, 2, 0, 0], [*range(10, 110, 10), 10])
    assert {episode.ended_by for _, episode, _ in episodes} == {"termination", "truncation"}
    ended = terminations | truncations
    assert terminations[[2, 8], 0].all()
    assert truncations[9, 2]
    for step in range(23):
        zero = (seen[step + 1][1] == 0).all(2).all(0)
        assert zero.tolist() == ended[step].tolist()
    for step, episode, final_memory in episodes:
        assert final_memory.all()
        assert episode.final_obs.shape == (84, 84, 4)
    assert (memory.state == 0).all(2).all(0).tolist() == ended[-1].tolist()


def test_an_evaluation_sees_the_newest_frame_and_its_memory_ends_with_a_life(fake, seen):
    fake({3: "life", 6: "over"})
    args = ppo.Args(eval_episodes=2, hidden_size=6)
    assert ppo.evaluate(ppo.Agent(4, args), args)["lengths"] == [6, 6]
    assert {obs.shape for obs, _ in seen} == {(1, 84, 84)}
    assert [obs[0, 0, 0] for obs, _ in seen] == [10, 20, 30, 40, 50, 60] * 2
    assert np.flatnonzero([not memory.any() for _, memory in seen]).tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("flag", ["--bootstrap-truncated", "--no-bootstrap-truncated"])
def test_a_run_bootstraps_with_the_memory_of_the_final_observation(run_script, fake, flag):
    """In the second of two rollouts, over lost lives, ends of games and truncations."""
    fake({3: "life"}, {5: 1.0, 7: "over"}, {2: -1.0}, {})
    flags = f"{SMALL} --env-id VectorCutNoFrameskip-v4 --total-timesteps 128 --learning-rate 1e-12"
    module = run_script(SCRIPT, *flags.split(), "--seed", "3", flag)
    finals = assert_bootstraps_and_agrees(
        module, lambda obs: features(module.agent, obs[..., 3] if obs.dim() == 5 else obs)
    )
    assert (module.terminations & ~module.truncations).any()
    assert len(finals) > 2


def test_a_game_that_does_not_come_back_starts_without_memory(run_script, fake, capsys):
    """The other games go on with theirs."""
    fake({})
    flags = f"{SMALL} --env-id PongNoFrameskip-v4 --total-timesteps 64"
    folder = run_script(SCRIPT, *flags.split()).run.folder
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    state = checkpoint["memory"]["state"]
    assert state.all()
    checkpoint["envs"]["games"][1]["obs"] += 1
    torch.save(checkpoint, folder / "checkpoint.pt")
    (folder / "evaluation.json").unlink()  # so that the run goes on to its end, which is near
    module = run_script(SCRIPT, "--resume", str(folder))
    assert capsys.readouterr().out.count("a game can't be brought back") == 1
    np.testing.assert_array_equal(module.envs.obs[1], stack(0, 0, 0, 10))
    assert not module.memory.state[:, 1].any()
    others = [0, 2, 3]
    assert torch.equal(module.memory.state[:, others], state[:, others])


def test_a_run_killed_and_resumed_with_other_threads_is_equal(server, tmp_path):
    flags = f"{SMALL} --num-envs 2 {SHORT_RUN} --run-name"
    start = partial(run, server, tmp_path, script=SCRIPT)
    start(f"{flags} whole --checkpoint-interval 100")
    start(f"{flags} killed --checkpoint-interval 2", killed_in=110)
    runs = tmp_path / "runs"
    checkpoint = torch.load(runs / "killed" / "checkpoint.pt", weights_only=True)
    assert checkpoint["run"]["iteration"] == 6
    assert checkpoint["memory"]["state"].any()
    assert "can't be brought back" not in start("--resume runs/killed --emulator-threads 2")
    assert results(runs / "killed") == results(runs / "whole")
    assert len(read_rows(runs / "whole")) == 2


def test_all_tensors_of_an_update_are_on_the_device(run_script, monkeypatch, tmp_path, fake):
    """Over two iterations, an evaluation and a checkpoint."""
    fake({5: "life", 9: "over"}, {})
    flags = f"{META} --env-id VectorCutNoFrameskip-v4 --hidden-size 16"
    module = run_on_meta(run_script, monkeypatch, tmp_path, ppo, flags)
    assert {x.device.type for x in module.agent.parameters()} == {"meta"}
    assert {x.device.type for x in module.batch.values()} == {"meta"}
    assert module.memory.state.is_meta
    assert module.run.global_step == 64
