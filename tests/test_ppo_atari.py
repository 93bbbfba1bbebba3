"""ppo_atari.py: its wrappers against Stable-Baselines3's on real games and on a scripted emulator, detail by detail (A1
to A10), its network, and whole runs. What it shares with ppo_continuous_action.py is tested there."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import cv2
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack
from torch import nn

import ppo_atari as ppo

SCRIPT = Path(ppo.__file__)
SMALL = ("--num-envs", "2", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "2", "--no-compile",
         "--num-threads", "1", "--eval-episodes", "1")
IN_TWO = (*SMALL[:-4], "--num-threads", "2", "--eval-episodes", "1")


class FakeALE:
    """An emulator in which frame k after a reset is filled with gray 3k; `script` says which frame does what: a number
    is its reward, "life" takes one of three lives, "over" and "cut" end the game, "life cut" does both. Keeps the
    actions of every game."""

    def __init__(self, script):
        self.script, self.games = script, []

    def reset_game(self):
        self.games.append([])
        self.left, self.over, self.cut, self.frozen = 3, False, False, False

    def act(self, action):
        if self.frozen:  # the no-op after a life that is lost as the game is cut: as in the real one nothing happens
            return 0.0
        assert not self.over, "an action after the end of the game"
        self.games[-1].append(int(action))
        event = self.script.get(len(self.games[-1]), 0.0)
        self.frozen = event == "life cut"
        self.left -= event in ("life", "life cut")
        self.over, self.cut = event in ("over", "cut", "life cut"), event in ("cut", "life cut")
        return 0.0 if isinstance(event, str) else event

    def game_over(self, with_truncation=True):
        return self.over and (with_truncation or not self.cut)

    def game_truncated(self):
        return self.cut

    def lives(self):
        return self.left

    def cloneState(self, include_rng):
        return self

    def restoreState(self, state):
        pass

    def serialize(self):
        return b"fake"  # no empty bytes: torch.load takes them for code

    def getScreenDims(self):
        return 210, 160

    def getScreenRGB(self, out=None):
        out = np.zeros((210, 160, 3), np.uint8) if out is None else out
        out[:] = 3 * len(self.games[-1]) % 256
        return out


class Fake(gym.Env):
    """A game of FakeALE."""

    metadata = {"render_modes": ["rgb_array"]}
    action_space = gym.spaces.Discrete(4)

    def __init__(self, script=None, actions=("NOOP", "FIRE", "RIGHT", "LEFT"), **kwargs):
        assert kwargs.items() >= {"frameskip": 1, "repeat_action_probability": 0.0}.items()
        self.ale, self.names, self._action_set = FakeALE(script or {}), list(actions), range(10, 10 + len(actions))

    def get_action_meanings(self):
        return self.names

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.ale.reset_game()
        return self.ale.getScreenRGB(), {}


class BrightSideALE(FakeALE):
    """Sixty frames; the brighter half of the screen says which of two actions is rewarded."""

    def __init__(self):
        super().__init__({60: "over"})
        self.random = np.random.default_rng(0)

    def reset_game(self):
        super().reset_game()
        self.side = self.random.integers(2)

    def act(self, action):
        super().act(action)
        return float(action == 10 + self.side)

    def getScreenRGB(self, out=None):
        out = np.zeros((210, 160, 3), np.uint8) if out is None else out
        out[:] = 0
        out[:, 80 * self.side : 80 * self.side + 80] = 200
        return out


class BrightSide(Fake):
    def __init__(self, **kwargs):
        super().__init__(actions=("NOOP", "RIGHT"), **kwargs)
        self.ale = BrightSideALE()


LIVES = {38: 2.0, 39: -3.0, 40: "life", 60: 0.25, 70: "over"}
exact = {"repeat_action_probability": 0.0}
gym.register("FakeNoFrameskip-v4", Fake, kwargs=exact)
gym.register("LivesNoFrameskip-v4", Fake, kwargs=exact | {"script": LIVES, "actions": ("NOOP", "UP", "DOWN")})
gym.register("FireNoFrameskip-v4", Fake, kwargs=exact | {"script": LIVES})
gym.register("CutNoFrameskip-v4", Fake, kwargs=exact | {"script": {50: "cut"}, "actions": ("NOOP", "UP")})
gym.register("LivesCutNoFrameskip-v4", Fake, kwargs=exact | {
    "script": {34: 1.0, 41: "life", 45: -1.0, 70: "cut"}, "actions": ("NOOP", "UP", "DOWN")})
gym.register("BrightSideNoFrameskip-v4", BrightSide, kwargs=exact)
gym.register("ShortPongNoFrameskip-v4", "ale_py.env:AtariEnv", kwargs={
    "game": "pong", "repeat_action_probability": 0.0, "frameskip": 1, "max_num_frames_per_episode": 300})


def frame(screen):
    """Grayscale, 84 x 84."""
    return cv2.resize(cv2.cvtColor(screen, cv2.COLOR_RGB2GRAY), (84, 84), interpolation=cv2.INTER_AREA)


def gray(k):
    """A FakeALE's frame k as the network sees it."""
    return frame(np.full((210, 160, 3), 3 * k % 256, np.uint8))


def test_defaults_are_the_constants_of_baselines():
    expected = {"env_id": "BreakoutNoFrameskip-v4", "total_timesteps": 10_000_000, "learning_rate": 2.5e-4,
                "num_envs": 8, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "gamma": 0.99,
                "gae_lambda": 0.95, "clip_coef": 0.1, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5,
                "anneal_lr": True, "clip_vloss": True, "norm_adv": True, "amp": False, "bootstrap_truncated": True}
    assert {name: asdict(ppo.Args())[name] for name in expected} == expected


LIFE = {"life", "termination"}
GAMES = {"BreakoutNoFrameskip-v4": LIFE, "SeaquestNoFrameskip-v4": LIFE, "QbertNoFrameskip-v4": LIFE,
         "ALE/Breakout-v5": LIFE, "PongNoFrameskip-v4": set(), "FreewayNoFrameskip-v4": set(),
         "ShortPongNoFrameskip-v4": {"truncation"}}


@pytest.mark.parametrize("env_id", GAMES)
def test_a1_to_a7_frames_rewards_and_ends_equal_those_of_stable_baselines3(env_id):
    """1,200 random steps in two games: the same frames, rewards and ends as Stable-Baselines3's wrappers, but for the
    observation that ends an episode: there it's as old as the last full skip, and "doesn't matter"."""
    ours = ppo.Envs(env_id, 2, 7)

    def make(seed):
        env = gym.make(env_id, frameskip=1, repeat_action_probability=0.0, disable_env_checker=True)
        env.unwrapped.reset(seed=int(seed))
        return AtariWrapper(env, action_repeat_probability=0.25 if env_id.startswith("ALE/") else 0.0)

    seeds = np.random.SeedSequence(7).generate_state(2)
    theirs = VecFrameStack(DummyVecEnv([lambda s=s: make(s) for s in seeds]), 4)
    obs, actions, kinds = theirs.reset(), np.random.default_rng(0), set()
    for step in range(600):
        np.testing.assert_array_equal(ours.obs, obs.transpose(0, 3, 1, 2), err_msg=f"step {step}")
        action = actions.integers(theirs.action_space.n, size=2)
        rewards, ended = ours.step(action)
        obs, their_rewards, dones, infos = theirs.step(action)
        np.testing.assert_array_equal(rewards, their_rewards)
        assert [record[0] for record in ended] == np.flatnonzero(dones).tolist()
        for i, _, _, ended_by, _ in ended:
            assert (ended_by == "truncation") == infos[i]["TimeLimit.truncated"]
            kinds.add(ended_by)
    assert kinds == GAMES[env_id], "the ends that were compared"


def test_a1_a_game_starts_with_1_to_30_no_ops():
    envs, counts = ppo.Envs("LivesNoFrameskip-v4", 1, 1), []
    for _ in range(600):
        envs.reset_env(0)
        game = envs.envs[0].ale.games[-1]
        assert set(game) == {10}
        counts.append(len(game))
    assert set(counts) == set(range(1, 31))
    np.testing.assert_array_equal(envs.obs[0, 3], gray(counts[-1]))


def test_a1_a_game_that_ends_in_its_no_ops_starts_again():
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    envs.envs[0].ale.script = {3: "over"}
    for _ in range(20):
        envs.reset_env(0)
        assert not envs.envs[0].ale.over


def test_a2_fire_and_the_action_after_it_follow_a_reset_and_a_lost_life():
    envs = ppo.Envs("FireNoFrameskip-v4", 1, 1)
    envs.envs[0].ale.script = {60: "life"}
    envs.reset_env(0)
    game = envs.envs[0].ale.games[-1]
    noops = len(game) - 8
    assert game == [10] * noops + [11] * 4 + [12] * 4 and 1 <= noops <= 30
    while not (ended := envs.step([3])[1]):
        pass
    assert ended[0][3] == "life"
    assert game[60:][-12:] == [10] * 4 + [11] * 4 + [12] * 4
    assert set(game[noops + 8 : -12]) == {13}


def test_a_new_game_knows_nothing_of_the_last_ones_action():
    envs = ppo.Envs("FireNoFrameskip-v4", 1, 1)
    envs.envs[0].ale.script, envs.sticky = {}, 1.0
    envs.last_actions[0] = 3
    envs.reset_env(0)
    assert set(envs.envs[0].ale.games[-1]) == {10}


@pytest.mark.parametrize("event", ["life", "over"])
def test_a2_an_episode_that_ends_in_its_fire_starts_again(event):
    envs = ppo.Envs("FireNoFrameskip-v4", 1, 1)
    ale = envs.envs[0].ale
    ale.script = {}
    envs.envs[0].np_random.bit_generator.state = np.random.PCG64(5).state
    noops = int(np.random.Generator(np.random.PCG64(5)).integers(1, 31))
    ale.script = {noops + 3: event}
    envs.unseen = []
    envs.reset_env(0)
    assert not ale.over and envs.unseen == []  # a game in which the learner has done nothing is no episode
    expected = [10] * noops + [11] * 4 + [10] * 4 + [12] * 4 if event == "life" else [12] * 4
    assert ale.games[-1][-len(expected) :] == expected


def test_a3_a_lost_life_ends_the_episode_but_not_the_game():
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    ale, ends, played, rewards = envs.envs[0].ale, [], len(envs.envs[0].ale.games), []
    before = len(ale.games[-1])
    while len(ends) < 2:
        reward, ended = envs.step([1])
        rewards.append(reward[0])
        ends += ended
    (_, _, length, first, _), (_, game_return, whole_length, second, _) = ends
    assert (first, second) == ("life", "termination")
    game = ale.games[played - 1]
    assert len(game) == 70 and len(ale.games) == played + 1
    after_life = game[before + 4 * length :]
    assert after_life[:4] == [10] * 4 and set(after_life[4:]) == {11}, "the soft reset is one no-op step"
    assert game_return == 2.0 - 3.0 + 0.25, "the return is of the whole game, unclipped"
    assert whole_length == len(rewards) == envs.episode_counts[0] * len(rewards)
    assert envs.episode_returns[0] == envs.episode_lengths[0] == 0 and envs.lives[0] == 3


def test_a3_a_game_that_ends_in_a_reset_is_an_episode_too():
    """The life is lost in the agent's fourth step, the game ends in the no-op after it: two records, one episode."""
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    ale = envs.envs[0].ale
    start = len(ale.games[-1])
    ale.script = {start + 2: 7.0, start + 13: "life", start + 18: 5.0, start + 19: "over"}
    records = [envs.step([0])[1] for _ in range(4)]
    assert [[record[:4] for record in step] for step in records] == [
        [], [], [], [(0, 7.0, 4, "life"), (0, 12.0, 4, "termination")]]
    assert envs.episode_counts[0] == 1 and envs.episode_lengths[0] == 0 and len(ale.games) == 3
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    envs.envs[0].ale.script = ale.script
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(3, ppo.Args()), envs, 4)
    assert [episode[:5] for episode in episodes] == [(3, 0, 12.0, 4, "termination")]
    assert terminations[:, 0].tolist() == [False, False, False, True] and not truncations.any()


def test_a3_no_life_lost_at_the_last_one_and_none_won():
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    envs.envs[0].ale.script = {}
    for lives, expected in ((4, []), (2, ["life"]), (2, []), (0, [])):
        envs.envs[0].ale.left = lives
        assert [record[3] for record in envs.step([0])[1]] == expected


def test_a4_four_frames_an_action_rewards_summed_maximum_of_the_last_two():
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    ale = envs.envs[0].ale
    start = len(ale.games[-1])
    ale.script = {start + k: float(10**k) for k in range(1, 5)}
    screens = {start + k: np.random.randint(0, 256, (210, 160, 3)).astype(np.uint8) for k in range(1, 5)}

    def screen(out):
        out[:] = screens[len(ale.games[-1])]

    ale.getScreenRGB = screen
    envs.step([2])
    assert ale.games[-1][start:] == [12] * 4 and envs.episode_returns[0] == 11110.0
    np.testing.assert_array_equal(envs.obs[0, 3], frame(np.maximum(screens[start + 3], screens[start + 4])))


def test_a6_four_frames_are_stacked_and_zero_after_a_reset_and_a_lost_life():
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    ale, seen, frames_in_episode = envs.envs[0].ale, [], 1
    for _ in range(40):
        planes = envs.obs[0].reshape(4, -1)
        shown = min(frames_in_episode, 4)
        assert planes[: 4 - shown].sum() == 0 and (planes[4 - shown :].max(1) > 0).all()
        assert (np.diff(planes[4 - shown :, 0].astype(int)) == 12).all() or shown == 1
        np.testing.assert_array_equal(envs.obs[0, 3], gray(len(ale.games[-1])))
        newest, ended = planes[1:].copy(), envs.step([0])[1]
        final = ended[0][4] if ended else envs.obs[0]
        np.testing.assert_array_equal(final[:3].reshape(3, -1), newest)
        frames_in_episode = 1 if ended else frames_in_episode + 1
        seen += [record[3] for record in ended]
    assert {"life", "termination"} <= set(seen)


def test_a7_rewards_are_signs():
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    ale = envs.envs[0].ale
    start = len(ale.games[-1])
    ale.script = {start + 1: -3.0, start + 6: 0.0, start + 9: 0.2}
    assert [envs.step([0])[0].tolist() for _ in range(3)] == [[-1.0], [0.0], [1.0]]


def test_a8_frames_are_stored_as_bytes_and_scaled_in_the_network():
    agent, envs = ppo.Agent(4, ppo.Args()), ppo.Envs("FakeNoFrameskip-v4", 2, 1)
    obs = ppo.rollout(agent, envs, 3)[0]
    assert obs.dtype == np.uint8 and obs.shape == (3, 2, 4, 84, 84)
    inputs = []
    agent.network.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    agent.heads(torch.from_numpy(obs[0]))
    np.testing.assert_allclose(inputs[0].numpy(), obs[0] / 255, rtol=1e-6)


def test_a9_a10_network_has_1687719_parameters_for_six_actions_and_one_trunk():
    agent = ppo.Agent(6, ppo.Args())
    assert sum(p.numel() for p in agent.parameters()) == 1_687_719
    assert [type(layer) for layer in agent.network if not isinstance(layer, (nn.Conv2d, nn.Linear))] == [
        nn.ReLU, nn.ReLU, nn.ReLU, nn.Flatten, nn.ReLU]
    obs = torch.randint(0, 256, (5, 4, 84, 84), dtype=torch.uint8)
    logprobs, entropy, values = agent(obs, torch.zeros(5, dtype=torch.int64))
    for output in (logprobs, values):
        agent.zero_grad()
        output.sum().backward(retain_graph=True)
        assert all(layer.weight.grad.norm() > 0 for layer in agent.network if hasattr(layer, "weight"))
    assert entropy.detach().numpy() == pytest.approx(math.log(6), abs=1e-3)


def test_g9_layers_are_orthogonal_with_their_gains_and_no_bias():
    agent = ppo.Agent(6, ppo.Args())
    gains = [(layer, math.sqrt(2)) for layer in agent.network if hasattr(layer, "weight")]
    for layer, gain in [*gains, (agent.actor, 0.01), (agent.critic, 1.0)]:
        weight = layer.weight.detach().flatten(1)
        square = weight @ weight.T if len(weight) <= weight.shape[1] else weight.T @ weight
        np.testing.assert_allclose(square, gain**2 * np.eye(len(square)), atol=1e-5)
        assert not layer.bias.detach().any()


def test_log_probabilities_and_entropy_equal_those_of_a_categorical():
    agent = ppo.Agent(5, ppo.Args())
    nn.init.normal_(agent.actor.weight)
    obs, actions = torch.randint(0, 256, (7, 4, 84, 84), dtype=torch.uint8), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    logprobs, entropy, values = agent(obs, actions)
    logits, other_values = agent.heads(obs)
    reference = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(7))
    torch.testing.assert_close(logprobs, reference.log_prob(actions))
    torch.testing.assert_close(entropy, reference.entropy())
    torch.testing.assert_close(values, other_values)


def test_rollout_samples_the_policy_and_its_log_probabilities_and_values_are_those_of_training():
    agent, envs = ppo.Agent(4, ppo.Args()), ppo.Envs("FakeNoFrameskip-v4", 2, 1)
    nn.init.zeros_(agent.actor.weight)
    agent.actor.bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    obs, actions, logprobs, values, *_ = ppo.rollout(agent, envs, 400)
    shares = np.bincount(actions.ravel(), minlength=4) / 800
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=4 * 0.5 / math.sqrt(800))
    with torch.no_grad():
        new_logprobs, _, new_values = agent(torch.from_numpy(obs).flatten(0, 1), torch.from_numpy(actions).flatten())
    np.testing.assert_allclose(logprobs.ravel(), new_logprobs, atol=1e-5)
    np.testing.assert_allclose(values.ravel(), new_values, atol=1e-5)


def test_a_lost_life_terminates_for_the_learner_and_is_no_episode():
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(3, ppo.Args()), envs, 60)
    assert not truncations.any()
    assert terminations.sum() > len(episodes) > 0 and {episode[4] for episode in episodes} == {"termination"}


@pytest.mark.parametrize("last", [40, 44])
def test_a_life_lost_at_the_frame_limit_terminates_for_the_learner_and_the_game_is_truncated(last):
    """In a step, or in the no-op after a life lost in frame 40."""
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    envs.envs[0].ale.script = {40: "life", last: "life cut"}
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(3, ppo.Args()), envs, 60)
    assert len(episodes) == terminations.sum() >= 2 and {episode[4] for episode in episodes} == {"truncation"}
    np.testing.assert_array_equal(terminations, truncations)


@pytest.mark.parametrize("event, ended_by", [("cut", "truncation"), ("over", "termination")])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_observation_that_ends_a_game_shows_its_last_frame_or_the_fourth_and_the_third(event, ended_by, k):
    envs = ppo.Envs("LivesNoFrameskip-v4", 1, 1)
    ale = envs.envs[0].ale
    first = len(ale.games[-1])

    def darkening(out=None):
        out = np.zeros((210, 160, 3), np.uint8) if out is None else out
        out[:] = 3 * (50 - len(ale.games[-1]))
        return out
    ale.script, ale.getScreenRGB = {first + k: event}, darkening
    ended = envs.step([1])[1]
    assert [record[3] for record in ended] == [ended_by]
    np.testing.assert_array_equal(ended[0][4][3], gray(50 - first - min(k, 3)))


class Player:
    """In the place of an Agent: exact in a batch of any size. Its values are the session of the process it is in."""

    def __init__(self, num_actions):
        self.factors = np.arange(3, 3 + num_actions)

    def step(self, obs):
        sums = obs.reshape(len(obs), -1).astype(int) @ (np.arange(obs[0].size) % 7)
        return np.float32(sums[:, None] * self.factors % 5), np.full(len(obs), os.getsid(0), np.float32)


def play(env_id, threads, **kwargs):
    """Two rollouts of five games: results and state after them; and of each game the sessions it was played in."""
    envs = ppo.Envs(env_id, 5, 3, **kwargs)
    torch.manual_seed(5)
    torch.set_num_threads(threads)
    results = [ppo.rollout(Player(len(envs.action_names)), envs, 60) for _ in range(2)]
    assert torch.get_num_threads() == threads
    for obs, actions, logprobs, values, rewards, *_ in results:
        assert (obs.dtype, actions.dtype) == (np.uint8, int) and {logprobs.dtype, rewards.dtype} == {np.dtype("f4")}
    played = [x for i in range(8) if i != 3 for x in (results[0][i], results[1][i])]
    return [*played, envs.obs, *envs.state().values()], [set(np.concatenate((results[0][3], results[1][3]))[:, i])
                                                         for i in range(5)]


def assert_equal(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        if isinstance(x, (list, tuple)):
            assert_equal(x, y)
        else:
            np.testing.assert_array_equal(x, y)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", "ALE/RoadRunner-v5"])
def test_games_in_processes_go_as_in_one(env_id, tmp_path):
    """With sticky actions, lost lives and ends, to the bit; each game goes on from its own state. Every forked process
    has a session of its own, where no Ctrl-C comes. While the first game is filmed all are played in one process."""
    one, sessions = play(env_id, 1)
    assert sessions == [{os.getsid(0)}] * 5
    assert one[8].any() and one[12] + one[13], "lives and games that end"
    for threads, parts in ((2, [0, 0, 1, 1, 1]), (3, [0, 1, 1, 2, 2]), (6, [0, 1, 2, 3, 4])):
        several, sessions = play(env_id, threads)
        assert_equal(several, one)
        assert sessions[0] == {os.getsid(0)} and [len(x) for x in sessions] == [2 if part else 1 for part in parts]
        assert [[x == y for y in sessions] for x in sessions] == [[x == y for y in parts] for x in parts]
    filmed, sessions = play(env_id, 3, video_dir=tmp_path)
    assert_equal(filmed, one)
    assert sessions == [{os.getsid(0)}] * 5 and len(list(tmp_path.iterdir())) > 0


def end_in_a_child(end):
    """Rollout of two games, the second of which calls end() in the process that plays it."""
    torch.set_num_threads(2)
    player, here = Player(4), os.getpid()
    step = player.step
    player.step = lambda obs: step(obs) if os.getpid() == here else end()
    ppo.rollout(player, ppo.Envs("FakeNoFrameskip-v4", 2, 1), 4)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_in_play_is_told(signum, capfd):
    with pytest.raises(SystemExit) as stop:
        end_in_a_child(lambda: os.kill(os.getpid(), signum))
    error = re.findall(r"error: .*worker \(pid.* - mend that, .* --resume", capfd.readouterr().err)
    assert stop.value.code == 1 and len(error) == 1 and torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["IndexError", "RuntimeError"])
def test_a_mistake_in_play_has_its_trace(name):
    """Of whoever edits a copy, in the process that plays."""
    def mistake():
        raise {"IndexError": IndexError, "RuntimeError": RuntimeError}[name]("mine")

    with pytest.raises((IndexError, RuntimeError), match="(?s)Original Traceback.*in mistake.*mine") as stop:
        end_in_a_child(mistake)
    assert stop.type.__name__ == name


def test_no_process_that_plays_outlives_a_killed_run(tmp_path):
    """Killed in a rollout that would take minutes."""
    run = subprocess.Popen([sys.executable, SCRIPT, "--no-compile", "--num-threads", "3", "--num-steps", "100000",
                            "--env-id", "PongNoFrameskip-v4"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    try:
        until = time.time() + 60
        while len(workers := children.read_text().split()) < 2 and time.time() < until:
            time.sleep(0.1)
        time.sleep(0.5)
    finally:
        run.kill()
        run.wait()
    time.sleep(1)
    states = [Path(f"/proc/{pid}/stat") for pid in workers]
    assert len(workers) == 2 and all(not x.exists() or x.read_text().split()[2] == "Z" for x in states)


@pytest.mark.parametrize("flag", ["--bootstrap-truncated", "--no-bootstrap-truncated"])
def test_a_run_bootstraps_truncations_and_cuts_at_lost_lives(run_script, flag):
    """Advantages of a run's only iteration against a quadratic sum over episodes, ended by truncation or lost life."""
    module = run_script(SCRIPT, "--env-id", "LivesCutNoFrameskip-v4", "--total-timesteps", "64", "--num-envs", "2",
                        "--num-steps", "32", "--num-minibatches", "2", "--update-epochs", "1", "--no-compile",
                        "--learning-rate", "1e-9", "--eval-episodes", "1", flag)
    last = module.agent.step(module.envs.obs)[1]
    finals = {(step, i): module.agent.step(obs[None])[1][0] for step, i, *_, obs in module.episodes}
    kinds = {episode[4] for episode in module.episodes}
    assert kinds == {"truncation"} and module.terminations.any() and len(finals) >= 2
    for i in range(2):
        for step in range(32):
            expected, weight = 0.0, 1.0
            for t in range(step, 32):
                cut = module.truncations[t, i] and flag == "--no-bootstrap-truncated"
                following = 0.0 if module.terminations[t, i] or cut else finals.get((t, i), (
                    last[i] if t == 31 else module.values[min(t + 1, 31), i]))
                expected += weight * (module.rewards[t, i] + 0.99 * following - module.values[t, i])
                weight *= 0.99 * 0.95
                if module.terminations[t, i] or module.truncations[t, i]:
                    break
            assert module.advantages[step, i] == pytest.approx(expected, abs=2e-5)
    for name, x in (("advantages", module.advantages), ("returns", module.advantages + module.values)):
        np.testing.assert_allclose(module.batch[name].view(32, 2), x, atol=1e-6)


def test_learning_rate_and_clip_range_fall_to_an_nth(run_script):
    module = run_script(SCRIPT, "--env-id", "LivesNoFrameskip-v4", "--total-timesteps", "64", "--num-envs", "2",
                        "--num-steps", "16", "--num-minibatches", "1", "--update-epochs", "1", "--no-compile",
                        "--anneal-clip", "--eval-episodes", "1")
    assert module.lr.item() == pytest.approx(2.5e-4 / 2) and module.clip_coef.item() == pytest.approx(0.05)


def test_evaluation_counts_games_not_lives():
    agent, args = ppo.Agent(3, ppo.Args()), ppo.Args(env_id="LivesNoFrameskip-v4", eval_episodes=2)
    assert ppo.evaluate(agent, args)["returns"] == [-0.75, -0.75]


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiled_update_equals_eager():
    torch.manual_seed(1)
    agent, args = ppo.Agent(4, ppo.Args()), ppo.Args(num_envs=1, num_steps=16, num_minibatches=2)
    start = nn.utils.parameters_to_vector(agent.parameters()).detach()
    batch = {"obs": torch.randint(0, 256, (16, 4, 84, 84), dtype=torch.uint8), "actions": torch.randint(0, 4, (16,)),
             **{name: torch.randn(16) for name in ("logprobs", "advantages", "returns", "values")}}
    indices, ends = torch.randperm(16).view(2, 8), []
    for function in (ppo.update_minibatches, ppo.compile_or_not(ppo.update_minibatches, args, torch.device("cpu"))):
        params = start.clone()
        optimizer = {"exp_avg": torch.zeros_like(params), "exp_avg_sq": torch.zeros_like(params),
                     "step": torch.tensor(0.0)}
        metrics = function(params, optimizer, agent, batch, indices, torch.tensor(1e-3), torch.tensor(0.1), args)
        ends.append((params, metrics))
    (eager, eager_metrics), (compiled, compiled_metrics) = ends
    torch.testing.assert_close(compiled_metrics, eager_metrics, rtol=1e-3, atol=1e-4)
    assert (compiled - eager).abs().mean() < 0.01 * (eager - start).abs().mean() > 0


def test_a_game_that_does_not_come_back_is_reported_and_starts_afresh(capsys):
    envs, other = ppo.Envs("PongNoFrameskip-v4", 1, 1), ppo.Envs("PongNoFrameskip-v4", 1, 2)
    state = envs.state()
    state["games"] = [state["games"][0][:2000] + bytes(64) + state["games"][0][2064:]]
    other.load_state(state)
    assert "environment 0 can't be brought back" in capsys.readouterr().out
    assert other.obs.any()


def test_a_checkpoint_of_another_version_of_the_emulator_names_the_way_out(run_script, capsys):
    module = run_script(SCRIPT, *SMALL, "--env-id", "PongNoFrameskip-v4", "--total-timesteps", "32")
    path = module.run_dir / "checkpoint.pt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["envs"]["games"] = [game[:-20] for game in checkpoint["envs"]["games"]]  # as ale-py 0.11 to 0.12
    torch.save(checkpoint, path)
    run_script(SCRIPT, "--resume", str(module.run_dir), code=2)
    assert "use config.json's versions or start anew" in capsys.readouterr().err


def test_the_frame_limit_is_a_truncation_with_its_final_observation():
    envs = ppo.Envs("CutNoFrameskip-v4", 1, 1)
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(2, ppo.Args()), envs, 40)
    assert not terminations.any() and truncations.sum() == len(episodes) > 0
    assert all(episode[4] == "truncation" and episode[5].any() for episode in episodes)
    assert [bool(truncations[episode[0], 0]) for episode in episodes] == [True] * len(episodes)


@pytest.mark.parametrize("env_id", ["SeaquestNoFrameskip-v4", "ALE/Breakout-v5", "PongNoFrameskip-v4",
                                    "ALE/MiniatureGolf-v5"])
def test_games_go_on_from_a_saved_state_bit_for_bit(env_id, tmp_path):
    envs, random = ppo.Envs(env_id, 2, 3), np.random.default_rng(1)
    envs.sticky = 0.9 if envs.sticky else 0.0  # so that the last action surely matters
    actions = random.integers(len(envs.action_names), size=(700, 2))
    for action in actions[:200]:
        envs.step(action)
    torch.save(envs.state(), tmp_path / "state.pt")
    copy = ppo.Envs(env_id, 2, 4)
    copy.sticky = envs.sticky
    copy.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    np.testing.assert_array_equal(envs.screens, copy.screens)  # what a video shows next
    ends = 0
    for action in actions[200:]:
        np.testing.assert_array_equal(envs.obs, copy.obs)
        (rewards, ended), (copied_rewards, copied_ended) = envs.step(action), copy.step(action)
        np.testing.assert_array_equal(rewards, copied_rewards)
        assert [record[:4] for record in ended] == [record[:4] for record in copied_ended]
        ends += len(ended)
    assert ends or env_id in ("PongNoFrameskip-v4", "ALE/MiniatureGolf-v5")


def test_bfloat16_is_near_float32():
    torch.manual_seed(1)
    agent = ppo.Agent(4, ppo.Args())
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    exact = agent.heads(obs)
    agent.args.amp = True
    for rounded, output in zip(agent.heads(obs), exact):
        assert rounded.dtype == torch.float32 and not torch.equal(rounded, output)
        torch.testing.assert_close(rounded, output, rtol=0.05, atol=0.05)


def test_drawing_shows_the_screen_the_names_and_bars_as_long_as_the_probabilities():
    screen = np.random.randint(0, 256, (210, 160, 3)).astype(np.uint8)
    names = ("NOOP", "FIRE", "DOWNRIGHTFIRE")
    picture = ppo.draw(screen, names, np.array([0.0, 0.5, 1.0], np.float32))
    np.testing.assert_array_equal(picture[::2, :320:2], screen)
    white = (picture[:, 320 : 320 + 2 * 86] > 130).all(2).any(1)
    assert [bool(white[22 * k : 22 * k + 18].any()) for k in range(4)] == [True, True, True, False], "names"
    widths = [int((picture[2 * (9 + 11 * k) - 6, 2 * (160 + 88) :] == (255, 160, 0)).all(1).sum()) for k in range(3)]
    assert widths == [2, 2 * 36, 2 * 71]
    assert not (ppo.draw(screen, names, ())[:, 320:]).any()


def run(folder, *flags, code=0):
    """python ppo_atari.py in folder; returns what it printed."""
    done = subprocess.run([sys.executable, str(SCRIPT), *flags], cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def results(run_dir):
    """What must be equal in two runs: weights, optimizer and counters, episodes without wall times, evaluation."""
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    rows = [row.split(",") for row in (run_dir / "episodes.csv").read_text().splitlines()]
    weights = [x.numpy().tobytes() for x in (*checkpoint["agent"].values(), *checkpoint["optimizer"].values())]
    return weights, [row[:1] + row[2:] for row in rows], (run_dir / "evaluation.json").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 20 iterations on Breakout, with video."""
    folder = tmp_path_factory.mktemp("whole")
    output = run(folder, *IN_TWO, "--total-timesteps", "640", "--run-name", "whole", "--capture-video",
                 "--video-interval", "1")
    return folder / "runs" / "whole", output


def test_same_seed_same_bits_without_video_and_resumed_after_a_kill_in_mid_game(whole, tmp_path):
    """The games of the run with video are all played in its one process, those of the other in two."""
    flags = (*IN_TWO, "--total-timesteps", "640", "--run-name", "again", "--checkpoint-interval", "3")
    killer = ("import os, runpy, sys, pathlib; import numpy as np; steps, main = 0, os.getpid()\n"
              "def spy(original):\n"
              "    def sign(*args, **kwargs):\n"
              "        global steps; steps += 1\n"
              "        if (steps, os.getpid()) == (150, main): os.kill(main, 9)\n"
              "        return original(*args, **kwargs)\n"
              "    return sign\n"
              "np.sign = spy(np.sign); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", killer, str(SCRIPT), *flags], cwd=tmp_path, capture_output=True)
    assert done.returncode == -9
    run_dir = tmp_path / "runs" / "again"
    iteration = torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"]
    assert 0 < iteration < 10
    run(tmp_path, "--resume", str(run_dir))
    assert results(run_dir) == results(whole[0])


def test_a_run_leaves_its_files_and_videos(whole):
    run_dir, output = whole
    names = {path.name for path in run_dir.iterdir()}
    assert {"checkpoint.pt", "config.json", "episodes.csv", "evaluation.json", "videos"} <= names
    assert "evaluation:" in output and "1 episodes" in output
    episodes = [row.split(",") for row in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    assert episodes and {row[5] for row in episodes} <= {"termination", "truncation"}
    frames = imageio.mimread(run_dir / "videos" / "evaluation" / "episode-0.mp4", memtest=False)
    assert frames[0].shape == (420, 640, 3)
    assert np.ptp(frames[len(frames) // 2][:, :320]) > 100, "the game, in colour"
    orange = (np.abs(frames[0][:, 320:].astype(int) - (255, 160, 0)) < 60).all(2).sum(1)
    assert (orange > 20).any(), "bars of the probabilities"
    training = imageio.mimread(run_dir / "videos" / "episode-0.mp4", memtest=False)
    assert not (np.abs(training[0][:, 320:].astype(int) - (255, 160, 0)) < 60).all(2).any()


def test_evaluate_plays_the_same_games(whole, tmp_path):
    output = run(whole[0].parent, "--evaluate", str(whole[0]))
    assert output.count("evaluation:") == 1
    line = next(line for line in output.splitlines() if line.startswith("evaluation:"))
    assert line in whole[1]
    checkpoint = torch.load(whole[0] / "checkpoint.pt", weights_only=True)
    (tmp_path / "other").mkdir()
    torch.save(checkpoint | {"envs": None}, tmp_path / "other" / "checkpoint.pt")
    assert line in run(tmp_path, "--evaluate", "other")  # it needs no game of the training


@pytest.mark.parametrize("env_id, words", [
    ("CartPole-v1", ["CartPole-v1", "NAMENoFrameskip-v4", "ALE/NAME-v5"]),
    ("Breakout-v4", ["NAMENoFrameskip-v4"]),
    ("BreakotNoFrameskip-v4", ["can't make", "BreakoutNoFrameskip"]),
    ("ALE/Breakuot-v5", ["can't make", "Breakout"]),
    ("ALE/Backgammon-v5", ["no NOOP"]),
])
def test_what_is_no_atari_game_is_refused_with_one_sentence(env_id, words, tmp_path):
    output = run(tmp_path, "--env-id", env_id, code=2)
    error = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(error) == 1 and "Traceback" not in output and not (tmp_path / "runs").exists()
    assert all(word in error[0] for word in words), error[0]


class NoEmulator(gym.Env):
    def __init__(self, **kwargs):
        pass


def test_an_environment_without_an_emulator_is_refused(capsys):
    gym.register("NoEmulatorNoFrameskip-v4", NoEmulator)
    with pytest.raises(SystemExit) as stop:
        ppo.Envs("NoEmulatorNoFrameskip-v4", 1, 1)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "can't make NoEmulatorNoFrameskip-v4" in error and error.count("\n") == 1


@pytest.mark.parametrize("flags, words", [
    (("--num-minibatches", "3"), ["must divide into --num-minibatches"]),
    (("--total-timesteps", "1000"), ["one rollout of 1024 steps"]),
    (("--resume", "missing"), ["missing/checkpoint.pt is missing"]),
    (("--evaluate", "junk"), ["junk/checkpoint.pt is missing, damaged"]),
    (("--resume", "other"), ["was made by ppo_continuous_action.py, not by ppo_atari.py"]),
])
def test_bad_input_is_refused_with_one_sentence(flags, words, tmp_path):
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "checkpoint.pt").write_text("junk")
    (tmp_path / "other").mkdir()
    torch.save({"script": "ppo_continuous_action.py"}, tmp_path / "other" / "checkpoint.pt")
    output = run(tmp_path, *flags, code=2)
    error = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(error) == 1 and "Traceback" not in output and all(word in error[0] for word in words), output


def test_a_run_ends_without_a_word_of_the_emulators(tmp_path):
    """They report themselves as leaked where something outlives the run that holds them."""
    assert "leak" not in run(tmp_path, *SMALL, "--total-timesteps", "64")


def test_the_bright_side_is_found(run_script):
    module = run_script(SCRIPT, "--env-id", "BrightSideNoFrameskip-v4", "--total-timesteps", "2048", "--num-envs", "4",
                        "--num-steps", "32", "--num-minibatches", "2", "--no-compile", "--num-threads", "1",
                        "--learning-rate", "1e-3", "--eval-episodes", "5")
    lengths = module.evaluate(module.agent, module.args)
    assert min(r / (4 * n) for r, n in zip(lengths["returns"], lengths["lengths"])) > 0.9
