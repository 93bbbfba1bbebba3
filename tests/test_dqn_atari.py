"""dqn_atari.py: stacks from single frames, across episodes' ends, the buffer's end and a resume."""

from pathlib import Path

import numpy as np
import pytest

import dqn_atari

SCRIPT = Path(dqn_atari.__file__)
SIZE = 60
SPARE = 12


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
