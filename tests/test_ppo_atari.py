"""ppo_atari.py: its wrappers, detail by detail (A1 to A10), its network, and whole runs.

The wrappers are compared with Stable-Baselines3's on real games, and tested on scripted ones. What
the script shares with ppo_continuous_action.py is tested there.
"""

import copy
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cv2
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from slow_atari_games import play, replay, through_a_file
from stable_baselines3.common import atari_wrappers as sb3
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack
from test_ppo import as_coefs
from torch import nn

import ppo_atari as ppo

SCRIPT = Path(ppo.__file__)
SMALL = (
    "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-compile --no-cuda "
    "--num-threads 1 --eval-episodes 1"
).split()


class Fake(gym.Env):
    """A game whose frame k after a reset is filled with gray 3k.

    script says what happens in which frame: a number is its reward, "life" takes one of three
    lives, "over" and "cut" end the game, "life cut" does both. Keeps the actions of every game.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}
    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def __init__(
        self,
        script=None,
        actions=("NOOP", "FIRE", "RIGHT", "LEFT"),
        frameskip=4,
        render_mode=None,
    ):
        assert frameskip == 1
        self.script = script or {}
        self.names = actions
        self.action_space = gym.spaces.Discrete(len(actions))
        self.render_mode = render_mode
        self.games = []
        self.seeds = []

    def get_action_meanings(self):
        return self.names

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.games.append([])
        self.lives = 3
        self.over = False
        return self.screen(), {"lives": self.lives}

    def step(self, action):
        assert not self.over, "an action after the end of the game"
        self.games[-1].append(int(action))
        event = self.script.get(len(self.games[-1]), 0.0)
        self.lives -= event in ("life", "life cut")
        truncated = event in ("cut", "life cut")
        self.over = truncated or event == "over"
        reward = 0.0 if isinstance(event, str) else event
        return self.screen(), reward, event == "over", truncated, {"lives": self.lives}

    def screen(self):
        return np.full((210, 160, 3), 3 * len(self.games[-1]) % 256, np.uint8)

    def render(self):
        return self.screen()


class BrightSide(Fake):
    """Sixty frames; the brighter half of the screen says which of two actions is rewarded."""

    def __init__(self, **kwargs):
        super().__init__({60: "over"}, ("NOOP", "RIGHT"), **kwargs)

    def reset(self, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.side = self.np_random.integers(2)
        return super().reset()

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(action == self.side), *rest

    def screen(self):
        screen = np.zeros((210, 160, 3), np.uint8)
        screen[:, 80 * self.side : 80 * self.side + 80] = 200
        return screen


LIVES = {38: 2.0, 39: -3.0, 40: "life", 60: 0.25, 70: "over"}
LIVES_CUT = {34: 1.0, 41: "life", 45: -1.0, 70: "cut"}
NAMES = ("NOOP", "UP", "DOWN")
gym.register("FakeNoFrameskip-v4", Fake)
gym.register("LivesNoFrameskip-v4", Fake, kwargs={"script": LIVES, "actions": NAMES})
gym.register("FireNoFrameskip-v4", Fake, kwargs={"script": LIVES})
gym.register("CutNoFrameskip-v4", Fake, kwargs={"script": {50: "cut"}, "actions": ("NOOP", "UP")})
gym.register("LivesCutNoFrameskip-v4", Fake, kwargs={"script": LIVES_CUT, "actions": NAMES})
gym.register("BrightSideNoFrameskip-v4", BrightSide)
SHORT_PONG = {
    "id": "ShortPongNoFrameskip-v4",
    "entry_point": "ale_py.env:AtariEnv",
    "kwargs": {
        "game": "pong",
        "repeat_action_probability": 0.0,
        "frameskip": 1,
        "max_num_frames_per_episode": 300,
    },
}
gym.register(**SHORT_PONG)


def make_envs(env_id, num_envs=1, seed=1, script=ppo):
    """Environments as the script's main block makes them."""
    return script.VecEnv([script.make_env(env_id) for _ in range(num_envs)], seed)


def make_scripted(env_id, script):
    """One environment, the Fake in it, and the number of frames before the agent's first action.

    Frame k of the script is the k-th after the agent's first action.
    """
    envs = make_envs(env_id)
    game = envs.envs[0].unwrapped
    start = len(game.games[-1])
    game.script = {start + frame: event for frame, event in script.items()}
    return envs, game, start


def step(envs, *actions):
    """envs.step; returns rewards, terminations, truncations (lists) and episodes."""
    *arrays, episodes = envs.step(np.array(actions))
    return *(x.tolist() for x in arrays), episodes


def frame(screen):
    """Grayscale, 84 x 84."""
    screen = cv2.cvtColor(screen, cv2.COLOR_RGB2GRAY)
    return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)


def gray(k):
    """A Fake's frame k as the network sees it."""
    return frame(np.full((210, 160, 3), 3 * k % 256, np.uint8))


def random_frames(num):
    return torch.randint(0, 256, (num, 84, 84, 4), dtype=torch.uint8)


class Seeded(gym.Wrapper):
    """Gives the first reset a seed."""

    def __init__(self, env, seed):
        super().__init__(env)
        self.seed = seed

    def reset(self, **kwargs):
        seed, self.seed = self.seed, None
        return self.env.reset(seed=seed)


LIFE = {"life", "termination"}
GAMES = {
    "BreakoutNoFrameskip-v4": LIFE,
    "SeaquestNoFrameskip-v4": LIFE,
    "QbertNoFrameskip-v4": LIFE,
    "ALE/Breakout-v5": LIFE,
    "PongNoFrameskip-v4": set(),
    "FreewayNoFrameskip-v4": set(),
    "ShortPongNoFrameskip-v4": {"truncation"},
}


@pytest.mark.parametrize("env_id", GAMES)
def test_a1_to_a7_games_are_those_of_stable_baselines3(env_id):
    """1,200 random steps in two games: the same frames, rewards, ends, returns and lengths.

    Stable-Baselines3's Monitor is where baselines has it. The emulator's sticky actions have the
    probability 0.25 in the v5 games, and 0 in the others.
    """
    ours = make_envs(env_id, 2, 7)
    sticky = 0.25 if env_id.startswith("ALE/") else 0.0
    monitors = []

    def make(seed):
        env = gym.make(
            env_id, frameskip=1, repeat_action_probability=sticky, disable_env_checker=True
        )
        (seed,) = np.random.SeedSequence((int(seed), 0)).generate_state(1)
        env = sb3.NoopResetEnv(Seeded(env, int(seed)))
        monitors.append(Monitor(sb3.MaxAndSkipEnv(env)))
        env = sb3.EpisodicLifeEnv(monitors[-1])
        if "FIRE" in env.unwrapped.get_action_meanings():
            env = sb3.FireResetEnv(env)
        return sb3.ClipRewardEnv(sb3.WarpFrame(env))

    seeds = np.random.SeedSequence(7).generate_state(2)
    theirs = VecFrameStack(DummyVecEnv([lambda seed=seed: make(seed) for seed in seeds]), 4)
    obs = theirs.reset()
    random = np.random.default_rng(0)
    kinds = set()
    for i in range(600):
        np.testing.assert_array_equal(ours.obs, obs, err_msg=f"step {i}")
        actions = random.integers(theirs.action_space.n, size=2)
        counts = [len(monitor.get_episode_lengths()) for monitor in monitors]
        rewards, terminations, truncations, episodes = ours.step(actions)
        obs, their_rewards, dones, infos = theirs.step(actions)
        np.testing.assert_array_equal(rewards, their_rewards)
        np.testing.assert_array_equal(terminations | truncations, dones)
        ended = {episode.env: episode for episode in episodes}
        for env, monitor in enumerate(monitors):
            assert (env in ended) == (len(monitor.get_episode_lengths()) > counts[env])
            if dones[env]:
                assert truncations[env] == infos[env]["TimeLimit.truncated"]
                kinds.add(ended[env].ended_by if env in ended else "life")
            if env in ended:
                assert ended[env].ended_by == ("truncation" if truncations[env] else "termination")
                assert ended[env].episode_return == monitor.get_episode_rewards()[-1]
                assert ended[env].length == monitor.get_episode_lengths()[-1]
    assert kinds == GAMES[env_id], "the ends that were compared"


def test_a1_a_game_starts_with_1_to_30_no_ops():
    env = ppo.make_env("LivesNoFrameskip-v4").env
    counts = []
    for _ in range(600):
        obs, _ = env.reset()
        game = env.unwrapped.games[-1]
        assert set(game) == {0}
        counts.append(len(game))
    assert set(counts) == set(range(1, 31))
    np.testing.assert_array_equal(obs[..., 3], gray(counts[-1]))


def test_a1_a_game_that_ends_in_its_no_ops_starts_again():
    env = ppo.make_env("LivesNoFrameskip-v4").env
    env.unwrapped.script = {3: "over"}
    lengths = set()
    for _ in range(40):
        env.reset()
        assert not env.unwrapped.over
        lengths.add(len(env.unwrapped.games[-1]))
    assert lengths == {0, 1, 2}


def test_a2_fire_and_the_action_after_it_follow_a_reset_and_a_lost_life():
    envs = make_envs("FireNoFrameskip-v4")
    game = envs.envs[0].unwrapped
    game.script = {60: "life"}
    actions = game.games[-1]
    noops = len(actions) - 8
    assert 1 <= noops <= 30
    assert actions == [0] * noops + [1] * 4 + [2] * 4
    while not step(envs, 3)[1][0]:
        pass
    assert actions[60:][-12:] == [0] * 4 + [1] * 4 + [2] * 4
    assert set(actions[noops + 8 : -12]) == {3}


@pytest.mark.parametrize("event", ["life", "over"])
def test_a2_an_episode_that_ends_in_its_fire_starts_again(event):
    """A game in which the learner has done nothing is no Episode."""
    envs = make_envs("FireNoFrameskip-v4")
    game = envs.envs[0].unwrapped
    noops = int(np.random.Generator(np.random.PCG64(5)).integers(1, 31))
    game.script = {noops + 3: event}
    envs.envs[0].env.reset(seed=5)
    expected = [0] * noops + [1] * 4 + [0] * 4 + [2] * 4
    if event == "over":
        assert [0] * noops + [1] * 3 in game.games
        expected = [0] * (len(game.games[-1]) - 4) + [2] * 4
    assert game.games[-1] == expected
    game.script = {}
    assert step(envs, 0) == ([0.0], [False], [False], [])


def test_a2_a_game_that_ends_in_its_fire_does_not_hide_the_game_before():
    envs, game, start = make_scripted("FireNoFrameskip-v4", {2: 7.0, 3: "over"})
    played = len(game.games)
    events = dict(game.script)

    def act(action):
        in_second = len(game.games) == played + 1
        at_fire = in_second and action == 1 and 1 not in game.games[-1]
        game.script = events if len(game.games) == played else {}
        if at_fire:
            game.script = {len(game.games[-1]) + 1: "over"}
        return Fake.step(game, action)

    game.step = act
    *_, episodes = step(envs, 3)
    assert len(game.games) == played + 2, "a game has ended in its FIRE"
    assert [episode.episode_return for episode in episodes] == [7.0]


def test_a3_a_lost_life_ends_the_episode_but_not_the_game():
    """The return of a game is whole and unclipped; its length counts the no-op after the life."""
    envs = make_envs("LivesNoFrameskip-v4")
    game = envs.envs[0].unwrapped
    played = len(game.games)
    actions = game.games[-1]
    before = len(actions)
    ends = []
    num_steps = 0
    while len(ends) < 2:
        _, (terminated,), (truncated,), episodes = step(envs, 1)
        num_steps += 1
        assert not truncated
        if terminated:
            ends.append((num_steps, episodes))
    (life, no_episode), (_, (episode,)) = ends
    assert no_episode == []
    assert len(actions) == 70
    assert len(game.games) == played + 1
    after_life = actions[before + 4 * life :]
    assert after_life[:4] == [0] * 4, "the reset after a life is a no-op"
    assert set(after_life[4:]) == {1}
    assert episode[:4] == (0, 2.0 - 3.0 + 0.25, num_steps + 1, "termination")
    assert envs.envs[0].get_wrapper_attr("episode_lengths") == 0


def test_a3_a_game_that_ends_in_a_reset_is_an_episode_too():
    """The life is lost in the agent's fourth step, the game ends in the no-op after it."""
    script = {2: 7.0, 13: "life", 18: 5.0, 19: "over"}
    envs, game, _ = make_scripted("LivesNoFrameskip-v4", script)
    played = len(game.games)
    for queue in ("length_queue", "return_queue"):
        envs.envs[0].get_wrapper_attr(queue).appendleft(99)  # of an older game
    results = [step(envs, 0) for _ in range(4)]
    assert [x[1] for x in results] == [[False], [False], [False], [True]]
    assert [len(x[3]) for x in results] == [0, 0, 0, 1]
    assert results[3][3][0][:4] == (0, 12.0, 5, "termination")
    assert envs.envs[0].get_wrapper_attr("episode_lengths") == 0
    assert len(game.games) == played + 1

    envs, *_ = make_scripted("LivesNoFrameskip-v4", script)
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(3), envs, 4)
    assert [(i, *episode[:4]) for i, episode in episodes] == [(3, 0, 12.0, 5, "termination")]
    assert terminations[:, 0].tolist() == [False, False, False, True]
    assert not truncations.any()


def test_a3_no_life_lost_at_the_last_one_and_none_won():
    envs, game, _ = make_scripted("LivesNoFrameskip-v4", {})
    for lives, expected in ((4, False), (2, True), (2, False), (0, False)):
        game.lives = lives
        assert step(envs, 0)[1:] == ([expected], [False], [])


def test_a4_four_frames_an_action_rewards_summed_maximum_of_the_last_two():
    envs, game, start = make_scripted("LivesNoFrameskip-v4", {k: 10.0**k for k in range(1, 5)})
    screens = np.random.randint(0, 256, (5, 210, 160, 3)).astype(np.uint8)
    game.screen = lambda: screens[len(game.games[-1]) - start]
    step(envs, 2)
    assert game.games[-1][start:] == [2] * 4
    assert envs.envs[0].get_wrapper_attr("episode_returns") == 11110.0
    np.testing.assert_array_equal(envs.obs[0, ..., 3], frame(np.maximum(screens[3], screens[4])))


def test_a6_four_frames_are_stacked_and_black_after_a_reset_and_a_lost_life():
    env = ppo.make_env("LivesNoFrameskip-v4")
    obs, _ = env.reset(1)
    frames_in_episode = 1
    ends = set()
    for _ in range(40):
        planes = obs.reshape(-1, 4).T.copy()
        shown = min(frames_in_episode, 4)
        assert not planes[: 4 - shown].any()
        assert (planes[4 - shown :].max(1) > 0).all()
        assert shown == 1 or (np.diff(planes[4 - shown :, 0].astype(int)) == 12).all()
        np.testing.assert_array_equal(obs[..., 3], gray(len(env.unwrapped.games[-1])))
        obs, _, terminated, _, info = env.step(np.int64(0))
        last = info["final_obs"] if terminated else obs
        np.testing.assert_array_equal(last[..., :3].reshape(-1, 3).T, planes[1:])
        frames_in_episode = 1 if terminated else frames_in_episode + 1
        if terminated:
            ends.add("episode" in info)
    assert ends == {True, False}, "games and lives"


def test_a6_a_shift_moves_each_pixel_to_the_frame_before():
    """Frames of noise, in which no two pixels are mixed up; frame 3 is the newest."""
    env = ppo.FrameStack(gym.Wrapper(Fake(frameskip=1)))
    frames = np.random.randint(0, 256, (6, 84, 84)).astype(np.uint8)
    env.env.reset = lambda **_: (frames[0], {})
    env.env.step = lambda action: (frames[action], 0.0, False, False, {})
    env.reset()
    for k in range(1, 6):
        obs = env.step(k)[0]
        expected = [frames[i] if i >= 0 else 0 * frames[0] for i in range(k - 3, k + 1)]
        np.testing.assert_array_equal(obs, np.stack(expected, 2))
    obs, _ = env.reset()
    assert not obs[..., :3].any()
    np.testing.assert_array_equal(obs[..., 3], frames[0])


def test_a7_rewards_are_signs():
    envs, *_ = make_scripted("LivesNoFrameskip-v4", {1: -3.0, 6: 0.0, 9: 0.2})
    assert [step(envs, 0)[0] for _ in range(3)] == [[-1.0], [0.0], [1.0]]


def test_a8_frames_are_stored_as_bytes_and_scaled_in_the_network():
    agent = ppo.Agent(4)
    obs = ppo.rollout(agent, make_envs("FakeNoFrameskip-v4", 2), 3)[0]
    assert obs.dtype == np.uint8
    assert obs.shape == (3, 2, 84, 84, 4)
    inputs = []
    agent.network.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    agent.heads(torch.from_numpy(obs[0]))
    channels_first = obs[0].transpose(0, 3, 1, 2)
    np.testing.assert_allclose(inputs[0].numpy(), channels_first / 255, rtol=1e-6)


def test_a9_a10_network_has_1687719_parameters_for_six_actions_and_one_trunk():
    agent = ppo.Agent(6)
    assert sum(p.numel() for p in agent.parameters()) == 1_687_719
    others = [type(layer) for layer in agent.network if not hasattr(layer, "weight")]
    assert others == [nn.ReLU, nn.ReLU, nn.ReLU, nn.Flatten, nn.ReLU]
    logprobs, entropy, values = agent(random_frames(5), torch.zeros(5, dtype=torch.int64))
    for output in (logprobs, values):
        agent.zero_grad()
        output.sum().backward(retain_graph=True)
        layers = [layer for layer in agent.network if hasattr(layer, "weight")]
        assert all(layer.weight.grad.norm() > 0 for layer in layers)
    assert entropy.detach().numpy() == pytest.approx(math.log(6), abs=1e-3)


def test_g9_layers_are_orthogonal_with_their_gains_and_no_bias():
    agent = ppo.Agent(6)
    gains = [(layer, math.sqrt(2)) for layer in agent.network if hasattr(layer, "weight")]
    assert len(gains) == 4
    for layer, gain in [*gains, (agent.actor, 0.01), (agent.critic, 1.0)]:
        weight = layer.weight.detach().flatten(1)
        wide = len(weight) <= weight.shape[1]
        square = weight @ weight.T if wide else weight.T @ weight
        np.testing.assert_allclose(square, gain**2 * np.eye(len(square)), atol=1e-5)
        assert not layer.bias.detach().any()


def test_log_probabilities_and_entropy_equal_those_of_a_categorical():
    agent = ppo.Agent(5)
    nn.init.normal_(agent.actor.weight)
    obs = random_frames(7)
    actions = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    logprobs, entropy, values = agent(obs, actions)
    logits, other_values = agent.heads(obs)
    reference = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(7))
    torch.testing.assert_close(logprobs, reference.log_prob(actions))
    torch.testing.assert_close(entropy, reference.entropy())
    torch.testing.assert_close(values, other_values)


def test_rollout_samples_the_policy_and_has_the_outputs_of_training():
    agent = ppo.Agent(4)
    nn.init.zeros_(agent.actor.weight)
    agent.actor.bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    envs = make_envs("FakeNoFrameskip-v4", 2)
    obs, actions, logprobs, values, rewards, *_ = ppo.rollout(agent, envs, 400)
    assert (actions.dtype, logprobs.dtype, rewards.dtype) == (np.int64, np.float32, np.float32)
    for i, env in enumerate(envs.envs):
        assert env.unwrapped.games[-1][-1600:] == actions[:, i].repeat(4).tolist()
    shares = np.bincount(actions.ravel(), minlength=4) / 800
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=4 * 0.5 / math.sqrt(800))
    with torch.no_grad():
        inputs = torch.from_numpy(obs).flatten(0, 1), torch.from_numpy(actions).flatten()
        new_logprobs, _, new_values = agent(*inputs)
    np.testing.assert_allclose(logprobs.ravel(), new_logprobs, atol=1e-5)
    np.testing.assert_allclose(values.ravel(), new_values, atol=1e-5)


def test_a_lost_life_terminates_for_the_learner_and_is_no_episode():
    envs = make_envs("LivesNoFrameskip-v4")
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(3), envs, 60)
    assert not truncations.any()
    assert terminations.sum() > len(episodes) > 0
    assert {episode.ended_by for _, episode in episodes} == {"termination"}


@pytest.mark.parametrize("script", [{10: "life cut"}, {10: "life", 14: "cut"}], ids=str)
def test_a_life_lost_at_the_frame_limit_terminates_for_the_learner(script):
    """In one frame, or in the no-op after the life; the game, one Episode, is told to terminate."""
    envs, *_ = make_scripted("LivesNoFrameskip-v4", script)
    *_, terminations, _, episodes = ppo.rollout(ppo.Agent(3), envs, 3)
    assert terminations[:, 0].tolist() == [False, False, True]
    assert [(i, episode.ended_by) for i, episode in episodes] == [(2, "termination")]


@pytest.mark.parametrize("event, ended_by", [("cut", "truncation"), ("over", "termination")])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_observation_that_ends_a_game_shows_its_last_two_frames(event, ended_by, k):
    """On a screen that gets darker, the earlier of the two; of a single one, that one."""
    envs, game, start = make_scripted("LivesNoFrameskip-v4", {k: event})
    actions = game.games[-1]
    game.screen = lambda: np.full((210, 160, 3), 3 * (50 - len(actions)), np.uint8)
    (episode,) = step(envs, 1)[3]
    assert episode.ended_by == ended_by
    np.testing.assert_array_equal(episode.final_obs[..., 3], gray(50 - start - max(1, k - 1)))


def test_the_frame_limit_is_a_truncation_with_its_final_observation():
    envs = make_envs("CutNoFrameskip-v4")
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(2), envs, 40)
    assert not terminations.any()
    assert np.flatnonzero(truncations[:, 0]).tolist() == [i for i, _ in episodes] != []
    for _, episode in episodes:
        assert episode.ended_by == "truncation"
        np.testing.assert_array_equal(episode.final_obs[..., 3], gray(50))


def test_a_game_gets_a_new_seed_after_steps_per_seed_steps_and_a_lost_life_gets_none():
    env = ppo.make_env("LivesNoFrameskip-v4")
    env.steps_per_seed = 12  # a game's last life is lost before, its end comes after
    env.reset(3)
    game = env.unwrapped
    expected = [len(game.games) - 1]
    for _ in range(60):
        recorded = len(env.actions) + 1
        _, _, terminated, _, info = env.step(np.int64(0))
        new_seed = terminated and "episode" in info and recorded >= 12
        if new_seed:
            expected.append(len(game.games) - 1)
        assert len(env.actions) == (0 if new_seed else recorded)
    seeded = [i for i, seed in enumerate(game.seeds) if seed is not None]
    assert seeded[1:] == expected
    assert 2 < len(expected) < len(game.games) - 1
    assert len({game.seeds[i] for i in expected}) == len(expected)


@pytest.mark.parametrize(
    "env_id, steps_per_seed",
    [
        ("ALE/Qbert-v5", 5000),
        ("ALE/Pitfall-v5", 5000),
        ("ALE/Breakout-v5", 100),
        ("LivesNoFrameskip-v4", 5000),  # many short games, each with its no-ops
    ],
)
def test_a_game_comes_back_exactly_and_is_not_changed_by_being_saved(
    env_id, steps_per_seed, capsys
):
    """slow_atari_games.py tries all games, for longer."""
    recorded, equal, equal_unsaved, _ = replay(ppo, env_id, 300, 80, steps_per_seed)
    assert 0 < recorded < 300 if steps_per_seed == 100 else recorded == 300
    assert equal == 80
    assert equal_unsaved == 80
    assert "can't be brought back" not in capsys.readouterr().out


def test_environments_come_back_with_their_statistics():
    """In mid-game: observations, returns and lengths of the games that end later."""
    envs = make_envs("LivesNoFrameskip-v4", 2, 3)
    actions = np.random.default_rng(0).integers(3, size=(60, 2))
    for row in actions[:19]:
        envs.step(row)
    others = make_envs("LivesNoFrameskip-v4", 2, 4)
    others.load_state_dict(through_a_file(envs.state_dict()))
    ended = 0
    for row in actions[19:]:
        np.testing.assert_array_equal(envs.obs, others.obs)
        (*arrays, episodes), (*other_arrays, other_episodes) = envs.step(row), others.step(row)
        for x, y in zip(arrays, other_arrays, strict=True):
            np.testing.assert_array_equal(x, y)
        assert [episode[:4] for episode in episodes] == [x[:4] for x in other_episodes]
        ended += len(episodes)
    assert ended > 2


def test_a_game_that_does_not_come_back_is_reported_and_starts_a_new_episode(capsys):
    envs = make_envs("PongNoFrameskip-v4", 2)
    for _ in range(30):
        step(envs, 2, 3)
    state = envs.state_dict()
    state["envs"][0]["obs"] = 255 - state["envs"][0]["obs"]
    others = make_envs("PongNoFrameskip-v4", 2, 2)
    others.load_state_dict(through_a_file(state))
    told = capsys.readouterr().out
    assert told.count("an environment can't be brought back to where it was: it starts a new") == 1
    assert not others.obs[0, ..., :3].any(), "the first observation of an episode"
    assert others.obs[0, ..., 3].any()
    assert others.envs[0].actions == []
    np.testing.assert_array_equal(others.obs[1], envs.obs[1])
    play(others.envs[0], np.array([2, 3]))


def test_bfloat16_is_near_float32():
    torch.manual_seed(1)
    agent = ppo.Agent(4)
    obs = random_frames(3)
    exact = agent.heads(obs)
    agent.amp = True
    for rounded, output in zip(agent.heads(obs), exact, strict=True):
        assert rounded.dtype == torch.float32
        assert not torch.equal(rounded, output)
        torch.testing.assert_close(rounded, output, rtol=0.05, atol=0.05)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)
def test_compiled_update_equals_eager():
    torch.manual_seed(1)
    start = ppo.Agent(4)
    args = ppo.Args(num_envs=1, num_steps=16, num_minibatches=2)
    batch = {"obs": random_frames(16), "actions": torch.randint(0, 4, (16,))}
    for name in ("logprobs", "advantages", "returns", "values"):
        batch[name] = torch.randn(16)
    indices = torch.randperm(16).view(2, 8)
    function = ppo.compile_or_not(ppo.update_minibatches, args, torch.device("cpu"))
    assert function is not ppo.update_minibatches
    ends = []
    for update_minibatches in (ppo.update_minibatches, function):
        agent = copy.deepcopy(start)
        optimizer = ppo.FlatAdam(agent, eps=1e-5)
        coefs = as_coefs(args, lr=1e-3)
        metrics = update_minibatches(optimizer, agent, batch, indices, coefs, args)
        ends.append((optimizer.params, metrics))
    (eager, eager_metrics), (compiled, compiled_metrics) = ends
    torch.testing.assert_close(compiled_metrics, eager_metrics, rtol=1e-3, atol=1e-4)
    change = eager - nn.utils.parameters_to_vector(start.parameters()).detach()
    assert (compiled - eager).abs().mean() < 0.01 * change.abs().mean() > 0


def assert_advantages_equal_a_sum(module, flag):
    """Those of a run's only iteration, of 32 steps in two games: a quadratic sum over episodes."""
    last = module.agent.step(module.envs.obs)[1]
    finals = {}
    for i, episode in module.episodes:
        finals[i, episode.env] = module.agent.step(episode.final_obs[None])[1][0]
    dones = module.terminations | module.truncations
    for env in range(2):
        for first in range(32):
            expected = 0.0
            weight = 1.0
            for i in range(first, 32):
                cut = module.truncations[i, env] and flag == "--no-bootstrap-truncated"
                if module.terminations[i, env] or cut:
                    following = 0.0
                elif (i, env) in finals:
                    following = finals[i, env]
                else:
                    following = last[env] if i == 31 else module.values[i + 1, env]
                delta = module.rewards[i, env] + 0.99 * following - module.values[i, env]
                expected += weight * delta
                weight *= 0.99 * 0.95
                if dones[i, env]:
                    break
            assert module.advantages[first, env] == pytest.approx(expected, abs=2e-5)
    returns = module.advantages + module.values
    np.testing.assert_allclose(module.batch["advantages"].view(32, 2), module.advantages, atol=1e-6)
    np.testing.assert_allclose(module.batch["returns"].view(32, 2), returns, atol=1e-6)


@pytest.mark.parametrize("flag", ["--bootstrap-truncated", "--no-bootstrap-truncated"])
def test_a_run_bootstraps_truncations_and_cuts_at_lost_lives(run_script, flag):
    """Advantages of a run's only iteration against a quadratic sum over its episodes."""
    flags = ["--env-id", "LivesCutNoFrameskip-v4", "--total-timesteps", "64", "--num-steps", "32"]
    module = run_script(SCRIPT, *SMALL, *flags, "--learning-rate", "1e-12", flag)
    assert module.terminations.any()
    assert len(module.episodes) >= 2
    assert {episode.ended_by for _, episode in module.episodes} == {"truncation"}
    assert_advantages_equal_a_sum(module, flag)


def test_learning_rate_and_clip_range_fall_to_an_nth(run_script):
    flags = ["--env-id", "LivesNoFrameskip-v4", "--total-timesteps", "64", "--anneal-clip"]
    others = ["--ent-coef", "0.02", "--vf-coef", "0.3", "--max-grad-norm", "0.7"]
    module = run_script(SCRIPT, *SMALL, *flags, *others)
    annealed = {"lr": 2.5e-4 / 2, "clip_coef": 0.05}
    coefs = {"ent_coef": 0.02, "vf_coef": 0.3, "max_grad_norm": 0.7} | annealed
    assert {name: x.item() for name, x in module.coefs.items()} == pytest.approx(coefs)
    assert module.optimizer.eps == 1e-5, "G11"


def test_evaluation_counts_games_not_lives():
    args = ppo.Args(env_id="LivesNoFrameskip-v4", eval_episodes=2)
    assert ppo.evaluate(ppo.Agent(3), args)["returns"] == [-0.75, -0.75]


def test_the_bright_side_is_found(run_script):
    flags = (
        "--env-id BrightSideNoFrameskip-v4 --total-timesteps 2048 --num-envs 4 --num-steps 32 "
        "--learning-rate 1e-3"
    ).split()
    module = run_script(SCRIPT, *SMALL, *flags, "--eval-episodes", "5")
    results = module.evaluate(module.agent, module.args)
    for episode_return, length in zip(results["returns"], results["lengths"], strict=True):
        assert episode_return / (4 * length) > 0.9


def leaves(x):
    """What is in a checkpoint, in order: tensors as bytes."""
    if isinstance(x, torch.Tensor):
        yield x.dtype, tuple(x.shape), x.numpy().tobytes()
    elif isinstance(x, dict):
        for name, value in x.items():
            yield name
            yield from leaves(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from leaves(value)
    else:
        yield x


def results(folder):
    """What must be equal in two runs: the checkpoint, the episodes, the evaluation."""
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    del checkpoint["args"]
    for name in ("wall_seconds", "log_sizes"):
        del checkpoint["run"][name]
    rows = [row.split(",") for row in (folder / "episodes.csv").read_text().splitlines()]
    rows = [row[:1] + row[2:] for row in rows]
    return list(leaves(checkpoint)), rows, (folder / "evaluation.json").read_text()


def run(folder, *flags, code=0):
    """python ppo_atari.py in folder; returns what it printed."""
    command = [sys.executable, str(SCRIPT), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 20 iterations on Breakout, with video."""
    folder = tmp_path_factory.mktemp("whole")
    flags = "--total-timesteps 640 --run-name whole --capture-video --video-interval 1".split()
    output = run(folder, *SMALL, *flags)
    return folder / "runs" / "whole", output


KILLED = f"""
import os, runpy, signal, sys
import gymnasium as gym
import numpy as np

gym.register(**{SHORT_PONG})
left = int(sys.argv[1])
sign = np.sign

def count(reward):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return sign(reward)

np.sign = count
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_killed(folder, step, script, *flags):
    """Runs a script that gets SIGKILL in a step of its environments, counted over all of them."""
    command = [sys.executable, "-c", KILLED, str(step), str(script), *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def test_same_seed_same_bits_without_video_and_resumed_after_a_kill_in_mid_game(whole, tmp_path):
    flags = "--total-timesteps 640 --run-name again --checkpoint-interval 3".split()
    run_killed(tmp_path, 150, SCRIPT, *SMALL, *flags)
    folder = tmp_path / "runs" / "again"
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert checkpoint["run"]["iteration"] == 3
    assert [len(env["actions"]) for env in checkpoint["envs"]["envs"]] == [48, 48]
    run(tmp_path, "--resume", str(folder))
    assert results(folder) == results(whole[0])


def test_a_run_leaves_its_files_and_videos(whole):
    """And ends without a word of the emulators, which report those that are leaked."""
    folder, output = whole
    names = {path.name for path in folder.iterdir()}
    expected = {"checkpoint.pt", "config.json", "episodes.csv", "evaluation.json", "videos"}
    assert expected <= names
    assert "evaluation:" in output
    assert "1 episodes" in output
    assert "leak" not in output
    rows = (folder / "episodes.csv").read_text().splitlines()[1:]
    assert rows
    assert {row.split(",")[5] for row in rows} <= {"termination", "truncation"}
    for path in ("evaluation/episode-0.mp4", "episode-0.mp4"):
        frames = imageio.mimread(folder / "videos" / path, memtest=False)
        with imageio.get_reader(folder / "videos" / path) as reader:
            assert reader.get_meta_data()["fps"] == 15
        assert frames[0].shape == (210, 160, 3)
        assert np.ptp(frames[len(frames) // 2]) > 100, "the game, in colour"


def test_evaluate_plays_the_same_games(whole, run_script, tmp_path, capsys):
    """It needs no game of the training."""
    checkpoint = torch.load(whole[0] / "checkpoint.pt", weights_only=True)
    (tmp_path / "other").mkdir()
    torch.save(checkpoint | {"envs": None}, tmp_path / "other" / "checkpoint.pt")
    run_script(SCRIPT, "--evaluate", "other")
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("evaluation:")]
    assert len(lines) == 1
    assert lines[0] in whole[1].splitlines()


def test_a_checkpoint_of_another_version_is_refused(run_script, capsys):
    flags = ["--env-id", "LivesNoFrameskip-v4", "--total-timesteps", "32"]
    folder = run_script(SCRIPT, *SMALL, *flags).run.folder
    checkpoint = torch.load(folder / "checkpoint.pt", weights_only=True)
    for env in checkpoint["envs"]["envs"]:
        del env["first_episode"]
    torch.save(checkpoint, folder / "checkpoint.pt")
    (folder / "evaluation.json").unlink()  # the run is not finished
    run_script(SCRIPT, "--resume", str(folder), code=2)
    told = capsys.readouterr().err
    assert f"the checkpoint in {folder} doesn't fit (KeyError: 'first_episode')" in told
    assert "of a run with other sizes, of another version, or damaged" in told


class NoEmulator(gym.Env):
    """An environment that is no Atari game."""

    def __init__(self, frameskip):
        pass

    def reset(self, seed=None, options=None):
        return np.zeros(3), {}


gym.register("NoEmulatorNoFrameskip-v4", NoEmulator)


REFUSED = [  # what is no game, and words of the sentence that says so
    ("CartPole-v1", ["CartPole-v1", "NAMENoFrameskip-v4", "ALE/NAME-v5"]),
    ("Breakout-v4", ["NAMENoFrameskip-v4"]),
    ("BreakotNoFrameskip-v4", ["can't make", "BreakoutNoFrameskip"]),
    ("ALE/Breakuot-v5", ["can't make", "Breakout"]),
    ("ALE/Backgammon-v5", ["no NOOP"]),
    ("NoEmulatorNoFrameskip-v4", ["can't make NoEmulatorNoFrameskip-v4"]),
]


@pytest.mark.parametrize("env_id, words", REFUSED)
def test_what_is_no_atari_game_is_refused_with_one_sentence(env_id, words, run_script, capsys):
    run_script(SCRIPT, "--env-id", env_id, code=2)
    (error,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error:")]
    assert not Path("runs").exists()
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num-minibatches", "3"], "must be a multiple of --num-minibatches"),
        (["--total-timesteps", "1000"], "--total-timesteps is less than a rollout, 1024"),
        (["--resume", "missing"], "missing/checkpoint.pt is missing"),
        (["--evaluate", "junk"], "junk/checkpoint.pt is missing, damaged"),
        (["--resume", "other"], "it was made by ppo_continuous_action.py"),
    ],
    ids=str,
)
def test_bad_input_is_refused_with_one_sentence(flags, words, refused, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("junk").mkdir()
    Path("junk/checkpoint.pt").write_text("junk")
    Path("other").mkdir()
    torch.save({"script": "ppo_continuous_action.py"}, "other/checkpoint.pt")
    error = refused(ppo, flags)
    assert words in error
    assert error.startswith("error:")
    assert error.count("\n") == 1


def test_x1_x3_are_off_by_default():
    args = ppo.Args()
    assert not args.anneal_clip
    assert args.target_kl is None
