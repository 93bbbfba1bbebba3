"""Every game of ale-py that has a NOOP action comes back from a checkpoint exactly.

Five to ten seconds a game, so pytest does not collect it by itself:

    python -m pytest tests/slow_atari_games.py

Each game writes its row of benchmark/results/atari_replay.csv.
"""

import csv
import io
import time
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_atari

TABLE = Path(__file__).resolve().parents[1] / "benchmark" / "results" / "atari_replay.csv"
COLUMNS = ["game", "env_id", "recorded_steps", "equal_steps", "replay_seconds"]
STEPS_PER_SEED = [400, 5000]  # by turns: 1,500 steps with and without a new seed in them
gym.register_envs(ale_py)
GAMES = sorted(name for name in gym.registry if name.startswith("ALE/") and name.endswith("-v5"))


def play(envs, actions):
    """Steps envs; returns what each step gave."""
    results = []
    for action in actions:
        *arrays, episodes = envs.step(action[None])
        final_obs = [episode.final_obs for episode in episodes]
        results.append((envs.obs.copy(), *arrays, np.array(final_obs)))
    return results


def count_equal(results, others):
    """How many steps of two plays gave the same."""
    equal = 0
    for result, other in zip(results, others, strict=True):
        equal += all(np.array_equal(x, y) for x, y in zip(result, other, strict=True))
    return equal


def through_a_file(state):
    """A state as it comes out of a checkpoint."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def replay(env_id, num_steps, num_following, steps_per_seed):
    """Plays num_steps at random and brings a new environment to where that has ended.

    Returns the number of recorded steps, in how many of the following steps the new environment
    did the same, in how many an environment did that was never saved, and the seconds of the
    replay.
    """
    saved, unsaved, new = (
        ppo_atari.VecEnv([ppo_atari.make_env(env_id)], 7, np.uint8, steps_per_seed)
        for _ in range(3)
    )
    num_actions = saved.action_space.n
    actions = np.random.default_rng(3).integers(num_actions, size=num_steps)
    following = np.random.default_rng(4).integers(num_actions, size=num_following)
    for part in np.array_split(actions, 5):
        play(saved, part)
        state = through_a_file(saved.state_dict())
    play(unsaved, actions)

    start_time = time.perf_counter()
    new.load_state_dict(state)
    seconds = time.perf_counter() - start_time
    results = play(saved, following)
    equal = count_equal(results, play(new, following))
    equal_unsaved = count_equal(results, play(unsaved, following))
    for envs in (saved, unsaved, new):
        envs.close()
    return len(state["actions"][0]), equal, equal_unsaved, seconds


def write_row(row):
    """Puts the row of a game into the table."""
    rows = {row["env_id"]: row}
    if TABLE.exists():
        with open(TABLE, newline="") as file:
            rows = {old["env_id"]: old for old in csv.DictReader(file)} | rows
    with open(TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[env_id] for env_id in sorted(rows))


@pytest.mark.parametrize("env_id", GAMES)
def test_a_game_comes_back_and_is_not_changed_by_being_saved(env_id, capsys):
    env = gym.make(env_id)
    game, has_noop = env.unwrapped.spec.kwargs["game"], env.unwrapped.get_action_meanings()[0]
    env.close()
    if has_noop != "NOOP":
        pytest.skip("it has no NOOP action")
    steps_per_seed = STEPS_PER_SEED[GAMES.index(env_id) % 2]
    recorded, equal, equal_unsaved, seconds = replay(env_id, 1500, 150, steps_per_seed)
    row = [game, env_id, recorded, equal, round(seconds, 2)]
    write_row(dict(zip(COLUMNS, row)))
    assert steps_per_seed == 400 or recorded == 1500
    assert equal == 150
    assert equal_unsaved == 150
    assert "can't be brought back" not in capsys.readouterr().out
