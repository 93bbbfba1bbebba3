"""ppo_atari_vector.py: its games, its policy, its devices, and whole runs.

The games are compared with ppo_atari.py's wrappers on real games, and tested on scripted ones. What
the script shares with ppo_atari.py is tested there.
"""

import copy
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ale_py
import ale_py.vector_env
import cv2
import gymnasium as gym
import moviepy.video.io.ffmpeg_writer
import numpy as np
import pytest
import torch
from processes import RUN, differences, episode_rows, leaves, load_checkpoint
from slow_atari_games import through_a_file
from test_ppo_atari import (
    GAMES,
    LIFE,
    REFUSED,
    assert_advantages_equal_a_sum,
    count_frames,
    run,
)
from torch import nn

import ppo_atari
import ppo_atari_vector as ppo

SCRIPT = Path(ppo.__file__)
SMALL = (
    "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-compile --no-cuda "
    "--num-threads 1 --eval-episodes 2"
)
gym.register_envs(ale_py)
gym.register(
    "VectorCutNoFrameskip-v4",
    "ale_py.env:AtariEnv",
    kwargs={
        "game": "pong",
        "repeat_action_probability": 0.0,
        "max_num_frames_per_episode": 47,  # ten steps after seven no-ops
    },
)
PONG = gym.spec("PongNoFrameskip-v4")
UNLIKE = {  # registered otherwise than ale-py's games
    "DifficultNoFrameskip-v4": {"kwargs": PONG.kwargs | {"difficulty": 1}},
    "EndlessNoFrameskip-v4": {"kwargs": PONG.kwargs | {"max_num_frames_per_episode": None}},
    "HurriedNoFrameskip-v4": {"kwargs": PONG.kwargs, "max_episode_steps": 80},
    "ForeignNoFrameskip-v4": {"kwargs": PONG.kwargs, "entry_point": "ppo_atari:make_env"},
}
for env_id, settings in UNLIKE.items():
    gym.register(env_id, **({"entry_point": PONG.entry_point} | settings))
gym.register(
    "AllActionsNoFrameskip-v4",
    PONG.entry_point,
    kwargs=PONG.kwargs | {"full_action_space": True},
)
OF_A_GAME = ("episode_returns", "lengths", "lives", "opening_steps")  # arrays of AtariVecEnv
NAMES = [ale_py.Action.NOOP, ale_py.Action.UP, ale_py.Action.RIGHT, ale_py.Action.LEFT]
NAMES_WITH_FIRE = [ale_py.Action.NOOP, ale_py.Action.FIRE, *NAMES[2:]]


class Fake:
    """Scripted games with the interface of AtariVectorEnv: game i has scripts[i].

    A script says what happens in which step of every game: a number is its reward, "life" takes
    one of three lives, "over" ends the game. After k steps a game shows the gray 10 (k + 1).
    games has the actions of every game, and seeds the seed of each, or None.
    """

    def __init__(self, game, num_envs, scripts, actions=NAMES, **options):
        assert options["max_num_frames_per_episode"] > 10**6, "AtariVecEnv cuts, with new seeds"
        assert options["autoreset_mode"] == "SameStep"
        self.scripts = [scripts[i % len(scripts)] for i in range(num_envs)]
        self.ale = SimpleNamespace(get_action_set=lambda: actions)
        self.single_action_space = gym.spaces.Discrete(len(actions))
        self.games = [[] for _ in range(num_envs)]
        self.seeds = [[] for _ in range(num_envs)]
        self.lives = np.zeros(num_envs, np.int32)

    def begin(self, i, seed):
        self.games[i].append([])
        self.seeds[i].append(seed)
        self.lives[i] = 3

    def frames(self):
        grays = [10 * (len(games[-1]) + 1) for games in self.games]
        return np.full((84, 84, 1, len(grays)), grays, np.uint8).T

    def info(self):
        frame_numbers = np.array([7 + 4 * len(games[-1]) for games in self.games])
        return {"lives": self.lives.copy(), "episode_frame_number": frame_numbers}

    def reset(self, *, seed, options):
        for i, own_seed in zip(np.flatnonzero(options["reset_mask"]), seed, strict=True):
            self.begin(i, int(own_seed))
        return self.frames(), self.info()

    def step(self, actions):
        rewards = np.zeros(len(actions), np.float32)
        over = np.zeros(len(actions), bool)
        for i, action in enumerate(actions):
            self.games[i][-1].append(int(action))
            event = self.scripts[i].get(len(self.games[i][-1]), 0.0)
            self.lives[i] -= event == "life"
            over[i] = event == "over"
            rewards[i] = 0.0 if isinstance(event, str) else event
        last_frames = self.frames()
        for i in np.flatnonzero(over):
            self.begin(i, None)
        info = self.info() | {"final_obs": last_frames}
        return self.frames(), rewards, over, np.zeros(len(actions), bool), info


def fake_games(monkeypatch, module, *scripts, **options):
    """From here on, all games are Fakes; returns the list of these, one for each vector."""
    made = []

    def make(*args, **more):
        made.append(Fake(*args, scripts=scripts, **options, **more))
        return made[-1]

    monkeypatch.setattr(ale_py.vector_env, "AtariVectorEnv", make)
    monkeypatch.setattr(module, "AtariVectorEnv", make)
    return made


@pytest.fixture
def fake(monkeypatch):
    """fake(*scripts, **options) is fake_games for ppo_atari_vector.py."""
    return partial(fake_games, monkeypatch, ppo)


def make_games(env_id="PongNoFrameskip-v4", num_envs=1, seed=1, threads=1):
    return ppo.AtariVecEnv(env_id, num_envs, seed, threads)


def step(games, *actions):
    """games.step; returns rewards, terminations, truncations (lists) and episodes."""
    *arrays, episodes = games.step(np.array(actions))
    return *(x.tolist() for x in arrays), episodes


def stack(*grays):
    """The observation of four frames, each of one gray."""
    return np.full((84, 84, 4), grays, np.uint8)


class Spy:
    """Emulators that keep the last seed of each game, and the no-ops at the game's start."""

    def __init__(self, *args, **options):
        self.emulators = ale_py.vector_env.AtariVectorEnv(*args, **options)
        self.seeds = {}
        self.noops = {}

    def __getattr__(self, name):
        return getattr(self.emulators, name)

    def begin(self, mask, info):
        for i in np.flatnonzero(mask):
            self.noops[i] = int(info["episode_frame_number"][i])

    def reset(self, *, seed, options):
        frames, info = self.emulators.reset(seed=seed, options=options)
        self.seeds |= zip(np.flatnonzero(options["reset_mask"]), seed.tolist())
        self.begin(options["reset_mask"], info)
        return frames, info

    def step(self, actions):
        frames, rewards, games_over, truncations, info = self.emulators.step(actions)
        self.begin(games_over, info)
        return frames, rewards, games_over, truncations, info


class Shrink(gym.ObservationWrapper):
    """WarpFrame for frames that are gray already."""

    def observation(self, frame):
        return cv2.resize(frame, (84, 84), interpolation=cv2.INTER_AREA)


def wrapped(monkeypatch, spy, i, env_id, gray_first):
    """ppo_atari.py's environment for the i-th game of the vector, with its seeds and no-ops.

    gray_first: the emulator gives gray frames, of which the wrappers take the maximum, as ALE's
    vector does.
    """

    class KnownNoops(gym.Wrapper):
        def reset(self, **kwargs):
            obs, info = self.env.reset(**kwargs)
            for _ in range(spy.noops[i]):
                obs, _, _, _, info = self.env.step(0)
            return obs, info

    with monkeypatch.context() as patch:
        patch.setattr(ppo_atari, "NoopResetEnv", KnownNoops)
        if gray_first:
            patch.setattr(ppo_atari, "WarpFrame", Shrink)
            patch.setattr(gym, "make", partial(gym.make, obs_type="grayscale"))
        env = ppo_atari.make_env(env_id)
    game = env.unwrapped

    def seed_game(seed=None):
        game.ale.setInt("random_seed", spy.seeds[i])
        return 0, 0

    game.seed_game = seed_game
    # After a truncation a game of the vector has a new seed, after a termination only seldom
    steps_per_seed = 1 if env_id.startswith("ShortPong") else 10**9
    return ppo_atari.VecEnv([env], 1, np.uint8, steps_per_seed)


def compare(monkeypatch, env_id, num_steps, gray_first=True):
    """Plays two games of a vector and those of ppo_atari.py's wrappers at random.

    Rewards, ends, returns and lengths must be equal. Returns the share of the pixels that differ,
    and which ends there were. What the wrappers do in a reset, the vector does in an opening.
    """
    monkeypatch.setattr(ppo, "AtariVectorEnv", Spy)
    ours = make_games(env_id, 2, 7)
    spy = ours.emulators
    theirs = [wrapped(monkeypatch, spy, i, env_id, gray_first) for i in range(2)]
    random = np.random.default_rng(0)
    shares = []
    kinds = set()
    for _ in range(num_steps):
        opening = ours.opening_steps < len(ours.opening)
        shares += [np.mean(ours.obs[i] != theirs[i].obs[0]) for i in range(2) if not opening[i]]
        actions = random.integers(ours.action_space.n, size=2)
        frames_left = {i: ours.max_frames - noops for i, noops in spy.noops.items()}
        rewards, terminations, truncations, episodes = ours.step(actions)
        ended = {episode.env: episode for episode in episodes}
        for i in range(2):
            if opening[i]:
                assert not terminations[i], "in a reset the wrappers don't report it"
                continue
            *their_arrays, their_episodes = theirs[i].step(actions[i : i + 1])
            assert [x[0] for x in their_arrays] == [rewards[i], terminations[i], truncations[i]]
            mine = [ended[i]] if i in ended else []
            assert [x[1:4] for x in mine] == [x[1:4] for x in their_episodes]
            if terminations[i] or mine:
                kinds.add(mine[0].ended_by if mine else "life")
            if mine:
                # Where the wrappers see another last frame: see the script's docstring
                same_last_frame = truncations[i] and frames_left[i] % 4 == 0
                count = 4 if same_last_frame else 3
                pair = mine[0].final_obs, their_episodes[0].final_obs
                shares.append(np.mean(pair[0][..., :count] != pair[1][..., :count]))
    return np.mean(shares), kinds


@pytest.mark.parametrize("env_id", GAMES)
def test_a1_to_a7_games_are_those_of_ppo_atari(env_id, monkeypatch):
    """With frames that become gray before the maximum, as in ALE.

    The emulator's sticky actions have the probability 0.25 in the v5 games, and 0 in the others.
    """
    difference, kinds = compare(monkeypatch, env_id, 500 if LIFE == GAMES[env_id] else 200)
    assert difference == 0
    assert kinds == GAMES[env_id], "the ends that were compared"


@pytest.mark.parametrize(
    "env_id, low, high", [("BreakoutNoFrameskip-v4", 0, 0), ("SeaquestNoFrameskip-v4", 1e-4, 0.03)]
)
def test_a4_a5_gray_after_the_maximum_differs_in_few_pixels(env_id, low, high, monkeypatch):
    difference, _ = compare(monkeypatch, env_id, 200, gray_first=False)
    assert low <= difference <= high


def test_a1_a_game_starts_with_0_to_29_no_ops():
    emulators = ppo.make_emulators("BreakoutNoFrameskip-v4", 4, 1)
    counts = set()
    seed = 1
    for _ in range(40):
        _, info = emulators.reset(seed=seed)
        seed = None
        counts |= {*info["episode_frame_number"].tolist()}
    assert counts == set(range(30))


@pytest.mark.parametrize("fire", [True, False])
def test_a2_a3_a6_openings(fake, fire):
    """After a lost life a no-op, and where there is FIRE, then and in a new game FIRE and 2.

    The learner's action doesn't count in them. The frames before the last one are black, in them
    and in what follows them.
    """
    made = fake({8: "life", 16: "over"}, actions=NAMES_WITH_FIRE if fire else NAMES)
    games = make_games()
    np.testing.assert_array_equal(games.obs[0], stack(0, 0, 0, 10))
    shown = [10]
    for _ in range(36):
        _, (terminated,), _, _ = step(games, 3)
        played = made[0].games[0]
        gray = 10 * (len(played[-1]) + 1)
        in_opening = not terminated and played[-1][-1] != 3
        shown = [gray] if terminated or in_opening else [*shown, gray]
        np.testing.assert_array_equal(games.obs[0], stack(*[0, 0, 0, *shown][-4:]))
    start = [1, 2] if fire else []
    after_life = [0, *start]
    first = start + [3] * (8 - len(start)) + after_life + [3] * (8 - len(after_life))
    assert made[0].games[0] == [first, first, (start + [3] * 4)[:4]]


def test_openings_of_several_games_are_their_own(fake):
    made = fake({5: "life"}, {7: "over"}, {}, actions=NAMES_WITH_FIRE)
    games = make_games(num_envs=3)
    for _ in range(10):
        step(games, 3, 3, 3)
    assert made[0].games[0] == [[1, 2, 3, 3, 3, 0, 1, 2, 3, 3]]
    assert made[0].games[1] == [[1, 2, 3, 3, 3, 3, 3], [1, 2, 3]]
    assert made[0].games[2] == [[1, 2, 3, 3, 3, 3, 3, 3, 3, 3]]


def test_a_life_lost_in_an_opening_begins_it_again(fake):
    made = fake({5: "life", 7: "life"}, actions=NAMES_WITH_FIRE)
    games = make_games()
    terminations = [step(games, 3)[1][0] for _ in range(11)]
    assert made[0].games[0] == [[1, 2, 3, 3, 3, 0, 1, 0, 1, 2, 3]]
    assert np.flatnonzero(terminations).tolist() == [4, 6]


def test_a3_a7_a_lost_life_terminates_but_the_game_goes_on(fake):
    """What is logged is the whole game, with its unclipped rewards; the learner gets signs."""
    made = fake({2: 5.0, 3: -3.0, 4: "life", 5: 0.5, 9: 7.0, 10: "over"}, {})
    games = make_games(num_envs=2)
    found = [step(games, 1, 1) for _ in range(10)]
    assert [x[0][0] for x in found] == [0, 1, -1, 0, 1, 0, 0, 0, 1, 0]
    assert np.flatnonzero([x[1][0] for x in found]).tolist() == [3, 9]
    assert not any(any(x[2]) or x[1][1] for x in found)
    assert [len(x[3]) for x in found] == [0] * 9 + [1]
    (episode,) = found[9][3]
    assert episode[:4] == (0, 9.5, 10, "termination")
    np.testing.assert_array_equal(episode.final_obs, stack(80, 90, 100, 110))
    assert [len(x) for x in made[0].games] == [2, 1]
    assert (games.episode_returns[0], games.lengths[0], games.lengths[1]) == (0.0, 0, 10)


def test_a3_no_life_lost_at_the_last_one_and_none_won(fake):
    made = fake({})
    games = make_games()
    for lives, expected in ((4, False), (2, True), (2, False), (0, False), (3, False), (1, True)):
        made[0].lives[0] = lives
        assert step(games, 0)[1:] == ([expected], [False], [])


def test_a_truncated_game_has_its_true_last_observation_and_a_new_seed(fake):
    """The limit of frames is that of the id's registration."""
    made = fake({4: 2.0}, {4: "over"})
    games = make_games("VectorCutNoFrameskip-v4", 2)
    for number in range(3):
        found = [step(games, 1, 1) for _ in range(10)]
        assert [x[2] for x in found] == [[False, False]] * 9 + [[True, False]]
        assert not any(x[1][0] for x in found)
        (episode,) = [x for x in found[9][3] if x.env == 0]
        assert episode[:4] == (0, 2.0, 10, "truncation")
        np.testing.assert_array_equal(episode.final_obs, stack(80, 90, 100, 110))
        np.testing.assert_array_equal(games.obs[0], stack(0, 0, 0, 10))
        assert games.actions[0] == []
        assert len(games.actions[1]) == 10 * (number + 1)
    assert len({*made[0].seeds[0]} - {None}) == 4
    assert made[0].seeds[1][1:] == [None] * 7, "none after a game that is over"


@pytest.mark.parametrize(
    "script, terminated, truncated",
    [({10: "life"}, True, True), ({10: "over"}, True, False), ({}, False, True)],
    ids=str,
)
def test_an_end_at_the_limit(fake, script, terminated, truncated):
    """A life lost there, or the game's own end, is a termination, for the learner and the log."""
    fake(script)
    games = make_games("VectorCutNoFrameskip-v4")
    for _ in range(9):
        assert step(games, 1)[1:] == ([False], [False], [])
    _, terminations, truncations, (episode,) = step(games, 1)
    assert (terminations, truncations) == ([terminated], [truncated])
    assert episode.ended_by == ("termination" if terminated else "truncation")
    np.testing.assert_array_equal(episode.final_obs, stack(80, 90, 100, 110))
    np.testing.assert_array_equal(games.obs[0], stack(0, 0, 0, 10))
    assert (games.opening_steps[0], games.lengths[0], games.lives[0]) == (1, 0, 3)


def test_a_game_gets_a_new_seed_after_steps_per_seed_steps(fake, monkeypatch):
    """With the game that starts then; its seeds are its own."""
    assert ppo.AtariVecEnv.steps_per_seed == 10_000
    monkeypatch.setattr(ppo.AtariVecEnv, "steps_per_seed", 12)
    made = fake({2: "life", 5: "over"}, {11: "life", 12: "over"})
    games = make_games(num_envs=2)
    recorded = []
    for _ in range(31):
        step(games, 1, 1)
        recorded.append([len(actions) for actions in games.actions])
    first, second = ([seed is not None for seed in seeds] for seeds in made[0].seeds)
    # A game that is over begins anew, and then once more with its seed
    assert first == [True, False, False, False, True, False, False, False, True]
    assert second == [True, False, True, False, True]
    assert [x[0] for x in recorded] == [*range(1, 15), *range(15), 0, 1]
    seeds = [seed for own in made[0].seeds for seed in own if seed is not None]
    assert len({*seeds}) == len(seeds) == 6


def test_games_of_other_runs_have_other_seeds(fake):
    made = fake({})
    for seed in (1, 2, (1, 1), (1, 2), 1):
        make_games(num_envs=4, seed=seed)
    *others, again = [tuple(seeds[0] for seeds in games.seeds) for games in made]
    assert len({seed for seeds in others for seed in seeds}) == 16
    assert again == others[0]


def test_evaluations_have_seeds_of_their_own(fake):
    """At the end of a run, at its steps, and in a run with another seed."""
    made = fake({2: "over"})
    games = make_games(seed=1)
    for seed, when in ((1, None), (1, 100), (1, 200), (2, None)):
        ppo.evaluate(ppo.Agent(4), games, ppo.Args(seed=seed, eval_episodes=1), None, when)
    assert len({games.seeds[0][0] for games in made}) == 5


def test_evaluation_counts_games_not_lives(fake):
    fake({3: 2.0, 6: "life", 8: 3.0, 12: "over"})
    episodes = ppo.evaluate(ppo.Agent(4), make_games(), ppo.Args(eval_episodes=2), None)
    assert [episode[:4] for episode in episodes] == [(0, 5.0, 12, "termination")] * 2


def play(games, actions):
    """What each step gives: observations, rewards, ends, and the games that ended."""
    for row in actions:
        *arrays, episodes = games.step(row)
        yield [games.obs.copy(), *arrays, *(x for episode in episodes for x in episode)]


def count_equal(*plays):
    """In how many steps the plays were the same."""
    equal = 0
    for found, other in zip(*plays, strict=True):
        equal += len(found) == len(other) and all(map(np.array_equal, found, other))
    return equal


@pytest.mark.parametrize("env_id", ["Breakout", "Seaquest", "Qbert", "ALE/Pong-v5"])
def test_games_come_back_exactly(env_id, monkeypatch, capsys):
    """Seeds lie behind, the last ones not equally long ago, and episodes end in what follows.

    Saving changes nothing, and neither does the number of threads.
    """
    monkeypatch.setattr(ppo.AtariVecEnv, "steps_per_seed", 40)
    if "/" not in env_id:
        env_id += "NoFrameskip-v4"
    saved, unsaved, new = (make_games(env_id, 2, 7, threads) for threads in (1, 2, 1))
    random = np.random.default_rng(3)
    actions = random.integers(saved.action_space.n, size=(400, 2))
    for part in np.array_split(actions, 3):
        assert count_equal(play(saved, part), play(unsaved, part)) == len(part)
        state = through_a_file(saved.state_dict())
    if env_id != "ALE/Pong-v5":  # whose games are too long
        assert len({len(actions) for actions in state["actions"]}) > 1
        assert state["seed_counts"].max() > 1
    new.load_state_dict(state)
    assert "can't be brought back" not in capsys.readouterr().out
    following = random.integers(saved.action_space.n, size=(150, 2))
    assert count_equal(play(saved, following), play(new, following)) == 150
    assert leaves(new.state_dict()) == leaves(saved.state_dict())


def test_games_come_back_wherever_they_are_saved(fake, monkeypatch):
    """Right after a seed, several games after it, in an opening, in mid-game."""
    monkeypatch.setattr(ppo.AtariVecEnv, "steps_per_seed", 12)
    made = fake({2: "life", 5: "over"}, {3: 1.0, 8: "life"}, actions=NAMES_WITH_FIRE)
    saved = make_games("VectorCutNoFrameskip-v4", 2)
    random = np.random.default_rng(0)
    for _ in range(40):
        new = make_games("VectorCutNoFrameskip-v4", 2)
        new.load_state_dict(through_a_file(saved.state_dict()))
        assert new.actions == saved.actions
        for name in ("seed_counts", "last_seeds", "obs", *OF_A_GAME):
            np.testing.assert_array_equal(getattr(new, name), getattr(saved, name), err_msg=name)
        for i in range(2):
            mine, theirs = (x.seeds[i] for x in (made[-1], made[0]))
            last_seed = max(k for k, seed in enumerate(theirs) if seed is not None)
            assert mine[last_seed - len(theirs) :] == theirs[last_seed:]
            assert made[-1].games[i][-1] == made[0].games[i][-1]
        step(saved, *random.integers(4, size=2))


def test_a_game_that_does_not_come_back_is_reported_and_starts_a_new_one(capsys):
    games = make_games("PongNoFrameskip-v4", 2)
    for _ in range(30):
        step(games, 2, 3)
    state = games.state_dict()
    assert np.array_equal(games.obs, make_loaded(state).obs)
    assert "can't be brought back" not in capsys.readouterr().out
    state["obs"][0] = 255 - state["obs"][0]
    others = make_loaded(state)
    assert capsys.readouterr().out.count("environment 0 can't be brought back exactly") == 1
    assert not others.obs[0, ..., :3].any(), "the first observation of an episode"
    assert others.obs[0, ..., 3].any()
    assert others.actions[0] == []
    assert (others.lengths[0], others.episode_returns[0]) == (0, 0.0)
    np.testing.assert_array_equal(others.obs[1], games.obs[1])
    step(others, 2, 3)


def make_loaded(state):
    games = make_games("PongNoFrameskip-v4", 2)
    games.load_state_dict(through_a_file(state))
    return games


def small_and_gray(frame):
    assert frame.shape == (210, 160, 3)
    assert np.ptp(frame, 2).max() > 100, "colours"
    gray = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
    return cv2.resize(gray, (84, 84), interpolation=cv2.INTER_AREA)


def test_the_film_shows_an_evaluations_first_game_as_it_was_played(tmp_path, monkeypatch):
    """In Breakout, where gray before or after the maximum is the same."""
    films = []

    def writer(path, size, fps):
        assert (size, fps) == ((160, 210), 15)
        frames = []
        films.append((path, frames))
        return nullcontext(SimpleNamespace(write_frame=lambda x: frames.append(x.copy())))

    monkeypatch.setattr(moviepy.video.io.ffmpeg_writer, "FFMPEG_VideoWriter", writer)
    games = make_games("BreakoutNoFrameskip-v4")
    games = games.for_evaluation("BreakoutNoFrameskip-v4", (1, 1), tmp_path / "end")
    random = np.random.default_rng(0)
    seen = []
    lives = 0
    for _ in range(2):
        episodes = []
        while not episodes:
            if not films:
                seen.append(games.obs[0, ..., 3].copy())
            _, terminations, _, episodes = games.step(random.integers(4, size=1))
            lives += terminations[0]
    assert lives == 10
    ((path, frames),) = films
    assert path == str(tmp_path / "end" / "rl-video-episode-0.mp4")
    np.testing.assert_array_equal([small_and_gray(frame) for frame in frames], seen)


# Policy and update


def random_obs(num):
    return np.random.randint(0, 256, (num, 84, 84, 4)).astype(np.uint8)


def make_agent(amp=False, num_actions=4):
    """An agent whose outputs depend on the observation more than those of a new one."""
    agent = ppo.Agent(num_actions, amp)
    nn.init.normal_(agent.actor.weight, std=0.3)
    return agent


def outputs(policy, obs, num_actions=4):
    """The policy's log-probabilities, of which a Player shows the sum with the noise."""
    shown = []

    class Noise:
        """What is added to the log-probabilities."""

        def __radd__(self, logprobs):
            shown.append(logprobs)
            return logprobs

        __array_ufunc__ = None

    policy(obs, Noise())
    return shown[0]


def assert_outputs_close(policy, agent, obs, tolerance):
    with torch.no_grad():
        exact = agent.heads(torch.from_numpy(obs))[0].numpy()
    assert np.ptp(exact) > 0.1
    np.testing.assert_allclose(outputs(policy, obs), exact, rtol=tolerance, atol=tolerance)


def change_weights(agent):
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.mul_(1.2)


@pytest.mark.parametrize("amp", [False, True])
def test_a_player_has_the_agents_outputs_and_takes_its_weights_when_told(amp):
    """With --amp its weights are bfloat16, those of the agent float32."""
    agent = make_agent(amp)
    player = ppo.Player(agent, ppo.Args(compile=False, amp=amp), torch.device("cpu"))
    exact = copy.deepcopy(agent)
    exact.amp = False
    tolerance = 0.05 if amp else 1e-5
    obs = random_obs(5)
    policy = player.policy()
    assert_outputs_close(policy, exact, obs, tolerance)
    change_weights(agent)
    assert_outputs_close(policy, exact, obs, tolerance)
    policy = player.policy()
    with pytest.raises(AssertionError):
        assert_outputs_close(policy, exact, obs, tolerance)
    change_weights(exact)
    assert_outputs_close(policy, exact, obs, tolerance)
    kinds = [{x.dtype for x in module.parameters()} for module in (player.copy, agent)]
    assert kinds == [{torch.bfloat16 if amp else torch.float32}, {torch.float32}]


def test_a_rollout_plays_with_the_weights_of_its_start(fake):
    made = fake({5: "life", 9: 1.0, 20: "over"}, {})
    games = make_games(num_envs=2)
    agent = make_agent()
    player = ppo.Player(agent, ppo.Args(compile=False), torch.device("cpu"))
    nn.init.zeros_(agent.actor.weight)
    agent.actor.bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    obs, actions, rewards, *_ = ppo.rollout(player, games, 400)
    assert obs.shape == (400, 2, 84, 84, 4)
    assert (obs.dtype, actions.dtype, rewards.dtype) == (np.uint8, np.int64, np.float32)
    assert made[0].games[1] == [actions[:, 1].tolist()]
    shares = np.bincount(actions.ravel(), minlength=4) / 800
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=0.07)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
def test_a_compiled_player_equals_the_agent():
    """Also with new weights, for which nothing is compiled."""
    agent = make_agent()
    player = ppo.Player(agent, ppo.Args(), torch.device("cpu"))
    assert_outputs_close(player.policy(), agent, random_obs(3), 1e-4)
    change_weights(agent)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_outputs_close(player.policy(), agent, random_obs(3), 1e-4)


# Whole runs


@pytest.mark.parametrize("flag", ["--bootstrap-truncated", "--no-bootstrap-truncated"])
def test_a_run_bootstraps_truncations_and_cuts_at_lost_lives(run_script, fake, flag):
    """Advantages of a run's only iteration against a quadratic sum over its episodes."""
    fake({3: -1.0, 4: "life"}, {2: 1.0, 8: 2.0, 9: "over"})
    flags = f"{SMALL} --env-id VectorCutNoFrameskip-v4 --total-timesteps 64 --num-steps 32"
    module = run_script(SCRIPT, *flags.split(), "--learning-rate", "1e-12", flag)
    ends = {(episode.env, episode.ended_by) for _, episode in module.episodes}
    assert ends == {(0, "truncation"), (1, "termination")}
    assert_advantages_equal_a_sum(module, flag)


def find_all(self):
    """Tensor.nonzero, as if nothing were zero."""
    return torch.nonzero(torch.ones(self.shape))


def run_on_meta(run_script, monkeypatch, tmp_path, script, flags, changes=None):
    """Runs a script's main block with its networks on PyTorch's meta device, in place of a GPU.

    Tensors there have no values: what comes back to the CPU is 0, and nonzero finds all. An
    operation on tensors of both devices raises. changes: {old: new} text of the script.
    """
    text = Path(script.__file__).read_text()
    choice = 'torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")'
    for old, new in {choice: 'torch.device("meta")', **(changes or {})}.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "meta" / Path(script.__file__).name
    path.parent.mkdir()
    path.write_text(text)
    kept = torch.Tensor.cpu, torch.isfinite

    def cpu(self):
        return torch.zeros(self.shape, dtype=self.dtype) if self.is_meta else kept[0](self)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: self.cpu().item())
    monkeypatch.setattr(torch, "isfinite", lambda x: kept[1](x.cpu()))
    monkeypatch.setattr(torch.Tensor, "nonzero", find_all)
    # It knows no meta
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    return run_script(path, *flags.split())


META = (
    "--total-timesteps 64 --num-steps 16 --num-envs 2 --num-minibatches 2 --update-epochs 1 "
    "--num-threads 1 --eval-interval 1 --eval-episodes 1"
)


@pytest.mark.parametrize(
    "script, env_id",
    [(ppo, "VectorCutNoFrameskip-v4"), (ppo_atari, "LivesCutNoFrameskip-v4")],
    ids=["ppo_atari_vector", "ppo_atari"],
)
def test_all_tensors_of_an_update_are_on_the_device(
    run_script, monkeypatch, tmp_path, fake, script, env_id
):
    """Over two iterations, an evaluation and a checkpoint."""
    fake({5: "life", 9: "over"}, {})
    flags = f"{META} --no-compile --env-id {env_id}"
    module = run_on_meta(run_script, monkeypatch, tmp_path, script, flags)
    assert {x.device.type for x in module.agent.parameters()} == {"meta"}
    assert {x.device.type for x in module.batch.values()} == {"meta"}
    assert {x.device.type for x in module.coefs.values()} == {"meta"}
    assert module.run.global_step == 64


def test_a_tensor_that_is_left_on_the_cpu_is_found(run_script, monkeypatch, tmp_path, fake):
    """So that the test before this one could fail."""
    fake({})
    moved = "torch.from_numpy(advantages).flatten().to(device)"
    changes = {moved: moved.removesuffix(".to(device)")}
    flags = f"{META} --no-compile --env-id PongNoFrameskip-v4"
    with pytest.raises(RuntimeError, match="device"):
        run_on_meta(run_script, monkeypatch, tmp_path, ppo, flags, changes)


SHORT_RUN = f"{SMALL} --env-id ShortPongNoFrameskip-v4 --total-timesteps 256 --run-name run"


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """A run of 8 iterations, with video: its folder and what it printed."""
    cwd = tmp_path_factory.mktemp("whole")
    return cwd / RUN, run(server, cwd, f"{SHORT_RUN} --capture-video", script=SCRIPT)


def test_a_run_killed_in_mid_game_and_resumed_without_video_is_equal(server, whole, tmp_path):
    run(server, tmp_path, f"{SHORT_RUN} --checkpoint-interval 3", killed_in=110, script=SCRIPT)
    checkpoint = load_checkpoint(tmp_path / RUN)
    assert checkpoint["run"]["iteration"] == 6
    lengths = {int(row["env"]): int(row["length"]) for row in episode_rows(whole[0])}
    recorded = [len(actions) for actions in checkpoint["envs"]["actions"]]
    assert recorded == [96 - lengths[0], 96 - lengths[1]]
    output = run(server, tmp_path, f"--resume {RUN}", script=SCRIPT)
    assert "can't be brought back" not in output
    assert not differences(tmp_path / RUN, whole[0])


def test_a_run_leaves_a_film_of_its_evaluation(whole):
    (film,) = whole[0].rglob("*.mp4")
    assert film == whole[0] / "videos" / "end" / "rl-video-episode-0.mp4"
    assert 60 < count_frames(film) <= 75


def test_evaluate_plays_the_same_games(server, whole):
    folder, output = whole
    (line,) = [x for x in output.splitlines() if x.startswith("evaluation:")]
    again = run(server, folder.parents[1], f"--evaluate {RUN}", script=SCRIPT)
    assert line in again.splitlines()


@pytest.mark.parametrize(
    "env_id, words",
    [*REFUSED, *((env_id, [f"can't make {env_id}"]) for env_id in UNLIKE)],
)
def test_what_is_no_atari_game_is_refused_with_one_sentence(env_id, words, capsys):
    with pytest.raises(SystemExit) as stop:
        make_games(env_id)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(word in error for word in words), error


def test_games_have_the_actions_that_they_are_registered_with():
    assert make_games("AllActionsNoFrameskip-v4").action_space.n == 18
    assert make_games("PongNoFrameskip-v4").action_space.n == 6


def test_missing_games_end_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="2"):
        make_games()
    assert "can't make PongNoFrameskip-v4" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_atari_lstm", "ppo_atari_vector", "pqn_atari"])
def test_threads_of_pytorch_do_not_spin_unless_told(name):
    """OpenMP reads it when torch is imported, so it must be set before."""
    code = (
        "import os, sys; sys.modules['torch'] = None\n"
        f"try: import {name}\n"
        "except ImportError as error: print(error.name, os.environ['GOMP_SPINCOUNT'])"
    )
    for own, expected in (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        env = {name: x for name, x in os.environ.items() if name != "GOMP_SPINCOUNT"} | own
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=SCRIPT.parent, env=env, capture_output=True, text=True)
        assert done.stdout.split() == ["torch", expected], done.stderr
