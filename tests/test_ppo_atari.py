"""ppo_atari.py: its wrappers, detail by detail (A1 to A10), its network, and whole runs.

The wrappers are compared with Stable-Baselines3's on real games, and tested on scripted ones. What
the script shares with ppo_continuous_action.py is tested there.
"""

import copy
import math
import shutil
import signal
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from moviepy import VideoFileClip
from processes import RUN, differences, load_checkpoint
from slow_atari_games import replay, through_a_file
from stable_baselines3.common import atari_wrappers as sb3
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack
from torch import nn

import ppo_atari as ppo

SCRIPT = Path(ppo.__file__)
SMALL = (
    "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --no-compile --no-cuda "
    "--num-threads 1 --eval-episodes 1"
)


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
    envs = [script.make_env(env_id) for _ in range(num_envs)]
    return script.VecEnv(envs, seed, np.uint8, steps_per_seed=5000)


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


def flat(module):
    """All its weights."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


COEFS = {"lr": 1e-3, "clip_coef": 0.1, "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5}
COEFS = {name: torch.tensor(x) for name, x in COEFS.items()}
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
        env = sb3.NoopResetEnv(Seeded(env, int(seed) % 2**31))
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
    env = ppo.make_env("LivesNoFrameskip-v4")
    counts = []
    for _ in range(600):
        obs, _ = env.reset()
        game = env.unwrapped.games[-1]
        assert set(game) == {0}
        counts.append(len(game))
    assert set(counts) == set(range(1, 31))
    np.testing.assert_array_equal(obs[..., 3], gray(counts[-1]))


def test_a1_a_game_that_ends_in_its_no_ops_starts_again():
    env = ppo.make_env("LivesNoFrameskip-v4")
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
    envs.envs[0].reset(seed=5)
    expected = [0] * noops + [1] * 4 + [0] * 4 + [2] * 4
    if event == "over":
        assert [0] * noops + [1] * 3 in game.games
        expected = [0] * (len(game.games[-1]) - 4) + [2] * 4
    assert game.games[-1] == expected
    game.script = {}
    assert step(envs, 0) == ([0.0], [False], [False], [])


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


def test_a3_a_game_that_ends_in_the_no_op_after_a_life_begins_anew():
    """The life is lost in the agent's fourth step. Such a game is not logged."""
    envs, game, _ = make_scripted("LivesNoFrameskip-v4", {13: "life", 19: "over"})
    played = len(game.games)
    results = [step(envs, 0) for _ in range(5)]
    assert [x[1] for x in results] == [[False], [False], [False], [True], [False]]
    assert [x[3] for x in results] == [[]] * 5
    assert envs.envs[0].get_wrapper_attr("episode_lengths") == 1
    assert len(game.games) == played + 1


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
    obs, _ = env.reset(seed=1)
    frames_in_episode = 1
    ends = set()
    for _ in range(40):
        planes = obs.reshape(-1, 4).T.copy()
        shown = min(frames_in_episode, 4)
        assert not planes[: 4 - shown].any()
        assert (planes[4 - shown :].max(1) > 0).all()
        assert shown == 1 or (np.diff(planes[4 - shown :, 0].astype(int)) == 12).all()
        np.testing.assert_array_equal(obs[..., 3], gray(len(env.unwrapped.games[-1])))
        obs, _, terminated, _, info = env.step(0)
        np.testing.assert_array_equal(obs[..., :3].reshape(-1, 3).T, planes[1:])
        frames_in_episode += 1
        if terminated:
            ends.add("plainrl_statistics" in info)
            obs, _ = env.reset()
            frames_in_episode = 1
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


def test_a_rollout_samples_the_policy_whose_outputs_are_predicted():
    agent = ppo.Agent(4)
    nn.init.zeros_(agent.actor.weight)
    agent.actor.bias.data = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    envs = make_envs("FakeNoFrameskip-v4", 2)
    obs, actions, rewards, *_, episodes = ppo.rollout(agent, envs, 400)
    assert (actions.dtype, rewards.dtype) == (np.int64, np.float32)
    for i, env in enumerate(envs.envs):
        assert env.unwrapped.games[-1][-1600:] == actions[:, i].repeat(4).tolist()
    shares = np.bincount(actions.ravel(), minlength=4) / 800
    np.testing.assert_allclose(shares, [0.1, 0.2, 0.3, 0.4], atol=4 * 0.5 / math.sqrt(800))

    nn.init.normal_(agent.actor.weight, std=0.3)
    device = torch.device("cpu")
    batch, values, next_values = ppo.predict(agent, obs, actions, envs.obs, episodes, device)
    with torch.no_grad():
        logprobs, _, expected = agent(batch["obs"], batch["actions"])
        last = agent.value(torch.from_numpy(envs.obs))
    torch.testing.assert_close(batch["logprobs"], logprobs)
    np.testing.assert_allclose(values.ravel(), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(next_values[:-1], values[1:])
    np.testing.assert_allclose(next_values[-1], last, rtol=1e-4, atol=1e-5)


def test_an_agent_plays_the_likeliest_actions_without_noise():
    agent = ppo.Agent(4)
    nn.init.normal_(agent.actor.weight, std=0.3)
    obs = random_frames(20)
    actions = agent.policy()(obs.numpy(), 0.0)
    assert actions.tolist() == agent.heads(obs)[0].argmax(1).tolist()
    assert len({*actions.tolist()}) > 1


def test_a_lost_life_terminates_for_the_learner_and_is_no_episode():
    envs = make_envs("LivesNoFrameskip-v4")
    *_, terminations, truncations, episodes = ppo.rollout(ppo.Agent(3), envs, 60)
    assert not truncations.any()
    assert terminations.sum() > len(episodes) > 0
    assert {episode.ended_by for _, episode in episodes} == {"termination"}


def test_a_life_lost_at_the_frame_limit_is_a_termination():
    envs, *_ = make_scripted("LivesNoFrameskip-v4", {10: "life cut"})
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


def test_an_evaluation_cuts_a_game_that_does_not_end():
    env = ppo.make_env("FakeNoFrameskip-v4", max_steps=7)
    env.reset(seed=1)
    ends = [env.step(0)[2:4] for _ in range(5)]  # after two steps for FIRE
    assert ends == [(False, False)] * 4 + [(False, True)]


def test_a_game_gets_a_new_seed_after_steps_per_seed_steps_and_a_lost_life_gets_none():
    envs = make_envs("LivesNoFrameskip-v4")
    envs.steps_per_seed = 12  # a game's last life is lost before, its end comes after
    game = envs.envs[0].unwrapped
    expected = [0]
    for _ in range(60):
        recorded = len(envs.actions[0]) + 1
        episodes = step(envs, 0)[3]
        new_seed = episodes != [] and recorded >= 12
        if new_seed:
            expected.append(len(game.games) - 1)
        assert len(envs.actions[0]) == (0 if new_seed else recorded)
    assert [i for i, seed in enumerate(game.seeds) if seed is not None] == expected
    assert 2 < len(expected) < len(game.games)
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
    recorded, equal, equal_unsaved, _ = replay(env_id, 300, 80, steps_per_seed)
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
    others = make_envs("LivesNoFrameskip-v4", 2, 3)
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
    state["obs"][0] = 255 - state["obs"][0]
    others = make_envs("PongNoFrameskip-v4", 2)
    others.load_state_dict(through_a_file(state))
    assert capsys.readouterr().out.count("environment 0 can't be brought back exactly") == 1
    assert not others.obs[0, ..., :3].any(), "the first observation of an episode"
    assert others.obs[0, ..., 3].any()
    assert others.actions[0] == []
    np.testing.assert_array_equal(others.obs[1], envs.obs[1])
    step(others, 2, 3)


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
        optimizer = ppo.Adam(agent.parameters(), eps=1e-5)
        metrics = update_minibatches(optimizer, agent, batch, indices, COEFS, args)
        ends.append((flat(agent), metrics))
    (eager, eager_metrics), (compiled, compiled_metrics) = ends
    torch.testing.assert_close(compiled_metrics, eager_metrics, rtol=1e-3, atol=1e-4)
    change = eager - flat(start)
    assert (compiled - eager).abs().mean() < 0.01 * change.abs().mean() > 0


def assert_advantages_equal_a_sum(module, flag):
    """Those of a run's only iteration, of 32 steps in two games: a quadratic sum over episodes."""
    with torch.no_grad():
        last = module.agent.value(torch.from_numpy(module.envs.obs)).numpy()
        finals = {}
        for i, episode in module.episodes:
            final_obs = torch.from_numpy(episode.final_obs[None])
            finals[i, episode.env] = module.agent.value(final_obs).item()
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
    module = run_script(SCRIPT, *SMALL.split(), *flags, "--learning-rate", "1e-12", flag)
    assert module.terminations.any()
    assert len(module.episodes) >= 2
    assert {episode.ended_by for _, episode in module.episodes} == {"truncation"}
    assert_advantages_equal_a_sum(module, flag)


def test_learning_rate_and_clip_range_fall_to_an_nth(run_script):
    flags = ["--env-id", "LivesNoFrameskip-v4", "--total-timesteps", "64", "--anneal-clip"]
    others = ["--ent-coef", "0.02", "--vf-coef", "0.3", "--max-grad-norm", "0.7"]
    module = run_script(SCRIPT, *SMALL.split(), *flags, *others)
    annealed = {"lr": 2.5e-4 / 2, "clip_coef": 0.05}
    coefs = {"ent_coef": 0.02, "vf_coef": 0.3, "max_grad_norm": 0.7} | annealed
    assert {name: x.item() for name, x in module.coefs.items()} == pytest.approx(coefs)
    assert module.optimizer.eps == 1e-5, "G11"


def test_evaluation_counts_games_not_lives():
    args = ppo.Args(env_id="LivesNoFrameskip-v4", eval_episodes=2)
    episodes = ppo.evaluate(ppo.Agent(3), make_envs("LivesNoFrameskip-v4"), args, None)
    assert [episode.episode_return for episode in episodes] == [-0.75, -0.75]


def test_the_bright_side_is_found(run_script):
    flags = (
        "--env-id BrightSideNoFrameskip-v4 --total-timesteps 2048 --num-envs 4 --num-steps 32 "
        "--learning-rate 1e-3"
    ).split()
    module = run_script(SCRIPT, *SMALL.split(), *flags, "--eval-episodes", "5")
    for episode in module.evaluate(module.agent, module.envs, module.args, None):
        assert episode.episode_return / (4 * episode.length) > 0.9


# Starts a script, and kills it in a step of its environments, counted over all of them
START = f"""
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


def run(server, cwd, flags, killed_in=0, script=SCRIPT):
    """`python script flags` in cwd, where ShortPong is known; returns what it printed.

    killed_in: the step in which it gets SIGKILL.
    """
    start = cwd / "start.py"
    start.write_text(START)
    done = server.run(start, cwd, f"{killed_in} {script} {flags}")
    assert done.returncode == (-signal.SIGKILL if killed_in else 0), done.stdout + done.stderr
    return done.stdout + done.stderr


WHOLE = f"{SMALL} --env-id ShortPongNoFrameskip-v4 --total-timesteps 640 --run-name run"


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """A run of 20 iterations, with video: its folder, and what it printed."""
    cwd = tmp_path_factory.mktemp("whole")
    return cwd / RUN, run(server, cwd, f"{WHOLE} --capture-video")


def test_a_run_killed_in_mid_game_and_resumed_without_video_is_equal(server, whole, tmp_path):
    run(server, tmp_path, f"{WHOLE} --checkpoint-interval 3", killed_in=150)
    checkpoint = load_checkpoint(tmp_path / RUN)
    assert checkpoint["run"]["iteration"] == 3
    assert [len(actions) for actions in checkpoint["envs"]["actions"]] == [48, 48]
    assert "can't be brought back" not in run(server, tmp_path, f"--resume {RUN}")
    assert not differences(tmp_path / RUN, whole[0])


def count_frames(path):
    """Of the film of an Atari game, which is in colour."""
    with VideoFileClip(str(path)) as film:
        frames = list(film.iter_frames())
    assert frames[0].shape == (210, 160, 3)
    assert np.ptp(frames[len(frames) // 2], 2).max() > 50
    return len(frames)


def test_a_run_leaves_its_files_and_a_film(whole):
    folder, _ = whole
    names = {path.name for path in folder.iterdir()}
    assert {"checkpoint.pt", "config.json", "episodes.csv", "evaluation.json", "videos"} <= names
    (film,) = folder.rglob("*.mp4")
    assert film == folder / "videos" / "end" / "rl-video-episode-0.mp4"
    assert 65 < count_frames(film) <= 76  # every fourth of 300, and the first of the game


REFUSED = [  # what is no game, and words of the sentence that says so
    ("CartPole-v1", ["CartPole-v1", "NAMENoFrameskip-v4", "ALE/NAME-v5"]),
    ("Breakout-v4", ["NAMENoFrameskip-v4"]),
    ("BreakotNoFrameskip-v4", ["can't make", "BreakoutNoFrameskip"]),
    ("ALE/Breakuot-v5", ["can't make", "Breakout"]),
    ("ALE/Backgammon-v5", ["no NOOP"]),
]


@pytest.mark.parametrize("env_id, words", REFUSED)
def test_what_is_no_atari_game_is_refused_with_one_sentence(env_id, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        ppo.make_env(env_id)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert all(word in error for word in words), error
