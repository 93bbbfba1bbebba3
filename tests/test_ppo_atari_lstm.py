"""ppo_atari_lstm.py: one frame, its network, and a memory that ends with a life.

On scripted games (see Fake in test_ppo_atari). What it shares with ppo_lstm.py, the recurrent core
and the update, is tested there; its wrappers play as those of ppo_atari.py.
"""

import json
import math
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from processes import load_checkpoint
from test_ppo_atari import LIVES, Fake, gray
from test_ppo_lstm import (
    CELL_AND_MEMORY,
    assert_bootstraps_and_agrees,
    assert_equals_a_loop,
    assert_init_from_needs_the_same_memory,
    assert_memory_in_the_checkpoint_counts,
    assert_orthogonal,
    memories_by_steps,
    outputs,
    play,
    randomised,
    recorded,
    stop_after,
    swap,
)
from torch import nn
from torch.distributions import Categorical

import ppo_atari
import ppo_atari_lstm as ppo

SHORT = {9: 1.0, 41: "life", 45: -1.0, 53: "life", 62: "cut"}
LIFE_AND_OVER = {36: "life", 39: "over"}  # the game ends in the no-op after the lost life
NAMES = ("NOOP", "UP", "DOWN")


class Cue(Fake):
    """Sixty frames, the first with a cue, which says which of two actions is right in the last 24.

    It is the brighter half of the screen, and only the first observation surely shows it.
    """

    def __init__(self, **kwargs):
        super().__init__({60: "over"}, ("NOOP", "RIGHT"), **kwargs)

    def reset(self, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.side = self.np_random.integers(2)
        return super().reset()

    def step(self, action):
        obs, _, *rest = super().step(action)
        reward = 1.0 if action == self.side else -1.0
        return obs, reward * (len(self.games[-1]) > 36), *rest

    def screen(self):
        screen = np.zeros((210, 160, 3), np.uint8)
        if len(self.games[-1]) <= 34:
            screen[:, 80 * self.side : 80 * self.side + 80] = 200
        return screen


gym.register("LstmShortNoFrameskip-v4", Fake, kwargs={"script": SHORT, "actions": NAMES})
gym.register("LstmLivesNoFrameskip-v4", Fake, kwargs={"script": LIVES, "actions": NAMES})
gym.register("LstmResetEndNoFrameskip-v4", Fake, kwargs={"script": LIFE_AND_OVER, "actions": NAMES})
gym.register("LstmCueNoFrameskip-v4", Cue)


def make_envs(env_id, num_envs, seed=1, script=ppo):
    """Environments as the script's main block makes them."""
    envs = [script.make_env(env_id) for _ in range(num_envs)]
    return script.VecEnv(envs, seed, np.uint8, steps_per_seed=5000)


def make_agent(num_actions=3, cell="lstm", memory=True, hidden_size=6):
    """An agent with biases, whose policy and values depend on the frame and the memory."""
    args = ppo.Args(cell=cell, memory=memory, hidden_size=hidden_size)
    agent = ppo.Agent(num_actions, args)
    for part in (agent.cell, agent.actor, agent.critic):
        randomised(part)
    for layer in agent.network:
        if hasattr(layer, "bias"):
            layer.bias.data += 0.05 * torch.randn_like(layer.bias)
    return agent


def random_frames(*shape):
    return torch.randint(0, 256, (*shape, 84, 84), dtype=torch.uint8)


def features(agent, obs):
    """The core's inputs (m, n, 512) of frames (m, n, 84, 84), by the paper's network for one."""
    x = obs.flatten(0, 1)[:, None].to(agent.actor.weight.dtype) / 255
    first = agent.network[0]
    # from (out, 4 rows x 4 columns of a block, block's row, its column) to (out, 1, row, column)
    weight = first.weight.view(32, 4, 4, 2, 2).permute(0, 3, 1, 4, 2).reshape(32, 1, 8, 8)
    x = nn.functional.conv2d(x, weight, first.bias, stride=4).relu()
    for layer, stride in ((agent.network[2], 2), (agent.network[4], 1)):
        x = nn.functional.conv2d(x, layer.weight, layer.bias, stride=stride).relu()
    last = agent.network[7]
    x = nn.functional.linear(x.flatten(1), last.weight, last.bias).relu()
    return x.view(*obs.shape[:2], 512)


def outputs_by_steps(agent, batch):
    """What outputs(agent, batch) must give, by nn.LSTMCell or its like and distributions."""
    batch = swap(batch)
    x = features(agent, batch["obs"])
    hidden = memories_by_steps(agent, x, batch["memory"], batch["dones"])[:, :, 0]
    policy = Categorical(logits=agent.actor(hidden))
    logprobs = policy.log_prob(batch["actions"])
    return logprobs.T, policy.entropy().T, agent.critic(hidden).squeeze(2).T


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_l1_layers_are_orthogonal_without_biases(cell, gates):
    agent = ppo.Agent(6, ppo.Args(cell=cell))
    gains = [(layer, math.sqrt(2)) for layer in agent.network if hasattr(layer, "weight")]
    assert len(gains) == 4
    for layer, gain in [*gains, (agent.actor, 0.01), (agent.critic, 1.0)]:
        assert_orthogonal(layer.weight, gain)
        assert not layer.bias.detach().any()
    assert type(agent.cell) is getattr(nn, cell.upper())
    assert agent.cell.weight_ih_l0.shape == (gates * 128, 512)
    assert agent.cell.weight_hh_l0.shape == (gates * 128, 128)
    assert len(list(agent.cell.parameters())) == 4
    for name, x in agent.cell.named_parameters():
        if "weight" in name:
            assert_orthogonal(x, 1.0)
        else:
            assert not x.detach().any()
    core = gates * 128 * (512 + 128 + 2)
    convolutions = 32 * (64 + 1) + 64 * (32 * 16 + 1) + 64 * (64 * 9 + 1)
    expected = convolutions + 512 * (3136 + 1) + core + 7 * (128 + 1)
    assert sum(p.numel() for p in agent.parameters()) == expected


def test_the_first_layer_is_a_convolution_of_8_x_8_with_stride_4():
    agent = ppo.Agent(4, ppo.Args())
    first = agent.network[0]
    x = torch.rand(2, 84, 84)
    plain = nn.Conv2d(1, 32, 8, stride=4)
    for y in range(8):
        for column in range(8):
            block = first.weight[:, y % 4 * 4 + column % 4, y // 4, column // 4]
            plain.weight.data[:, 0, y, column] = block
    plain.bias.data = first.bias.data = torch.randn(32)
    seen = []
    first.register_forward_hook(lambda _, inputs, output: seen.append(output))
    agent.value(255 * x, torch.zeros(2, 2, 128))
    assert seen[0].shape == (2, 32, 20, 20)
    torch.testing.assert_close(seen[0], plain(x[:, None]), rtol=1e-4, atol=1e-5)


def test_the_layers_after_the_first_are_those_of_the_paper():
    agent = make_agent()
    obs = random_frames(3, 2)
    seen = []
    agent.cell.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    agent.heads(obs, torch.zeros(3, 2, 6))
    torch.testing.assert_close(seen[0], features(agent, obs), rtol=1e-4, atol=1e-5)
    assert (seen[0] > 0).float().mean() > 0.2


@pytest.mark.parametrize(
    "env_id, lives", [("ALE/Breakout-v5", 5), ("SpaceInvadersNoFrameskip-v4", 1)]
)
def test_frames_rewards_and_ends_are_those_of_ppo_atari(env_id, lives):
    """Which equal Stable-Baselines3's.

    With FIRE, sticky actions, sprites in every other frame, lost lives and ends of games.
    """
    ours = make_envs(env_id, 2, 7)
    stacked = make_envs(env_id, 2, 7, ppo_atari)
    random = np.random.default_rng(0)
    terminated = ended = 0
    for _ in range(500):
        np.testing.assert_array_equal(ours.obs, stacked.obs[..., 3])
        actions = random.integers(ours.action_space.n, size=2)
        (*arrays, episodes), (*others, expected) = ours.step(actions), stacked.step(actions)
        for x, y in zip(arrays, others, strict=True):
            np.testing.assert_array_equal(x, y)
        assert [x[:4] for x in episodes] == [x[:4] for x in expected]
        for one, four in zip(episodes, expected, strict=True):
            np.testing.assert_array_equal(one.final_obs, four.final_obs[..., 3])
        terminated += arrays[1].sum()
        ended += len(episodes)
    assert terminated >= ended + lives
    assert ended > 0 or lives == 1


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_outputs_and_gradients_equal_those_of_a_loop_over_steps(cell, memory):
    agent = make_agent(5, cell, memory, 7).double()
    dones = torch.tensor([[0, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    batch = {
        "obs": random_frames(4, 3).double(),
        "dones": dones,
        "actions": torch.randint(0, 5, (4, 3)),
        "memory": torch.randn(3, agent.num_states, 7).double(),
    }
    assert_equals_a_loop(agent, swap(batch), outputs_by_steps, memory)


def test_bfloat16_is_near_float32_and_stays_out_of_the_memory(monkeypatch):
    """Within the rollout's context, too.

    The core gets the same inputs as it would outside, as float32.
    """
    torch.manual_seed(1)
    agent = make_agent(hidden_size=128)
    obs = random_frames(3, 7)
    memory = torch.randn(3, 2, 128)
    recur = agent.recur
    inputs = []

    def spy(x, *rest):
        inputs.append(x)
        return recur(x, *rest)

    monkeypatch.setattr(agent, "recur", spy)
    exact = agent.heads(obs, memory)
    agent.amp = True
    with torch.autocast("cpu", enabled=False):
        within = agent.heads(obs, memory)
    assert inputs[1].dtype == torch.float32
    assert torch.equal(inputs[1], inputs[1].bfloat16())
    for rounded, output in zip(within, exact, strict=True):
        assert rounded.dtype == torch.float32
        assert not torch.equal(rounded, output)
        torch.testing.assert_close(rounded, output, rtol=0.05, atol=0.1)
    assert all(torch.equal(*pair) for pair in zip(agent.heads(obs, memory), within, strict=True))
    hidden, after = recur(inputs[1], memory)
    expected = agent.actor(hidden).log_softmax(2), agent.critic(hidden)[:, :, 0], after
    torch.testing.assert_close(expected, within)


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_rollouts_and_training_agree(cell, memory):
    """In a second rollout, in mid-game, with lost lives and truncations.

    So the ratio is 1 in the first minibatch.
    """
    agent = make_agent(3, cell, memory)
    envs = make_envs("LstmShortNoFrameskip-v4", 3)
    carried = ppo.Memory(agent, 3)
    ppo.rollout(agent, envs, 3, carried)
    start = carried.state.clone()
    assert (start != 0).any() == memory
    obs, actions, logprobs, values, _, terminations, truncations, episodes = ppo.rollout(
        agent, envs, 30, carried
    )
    dones = terminations | truncations
    assert obs.dtype == np.uint8
    assert obs.shape == (30, 3, 84, 84)
    assert terminations.sum() > 6
    assert (dones & ~terminations).sum() == len(episodes) > 3
    batch = swap({"obs": obs, "actions": actions, "dones": dones, "memory": start})
    with torch.no_grad():
        for function in (outputs, outputs_by_steps):
            expected_logprobs, _, expected_values = function(agent, batch)
            np.testing.assert_allclose(logprobs.T, expected_logprobs, rtol=1e-4, atol=2e-5)
            np.testing.assert_allclose(values.T, expected_values, rtol=1e-4, atol=2e-5)
        states = memories_by_steps(agent, features(agent, torch.from_numpy(obs)), start, dones)
    for step, episode, final_memory in episodes:
        assert episode.final_obs.shape == (84, 84)
        expected = states[step, episode.env] * memory
        torch.testing.assert_close(final_memory, expected, rtol=1e-4, atol=2e-5)
    states[-1][dones[-1]] = 0.0
    torch.testing.assert_close(carried.state, states[-1] * memory, rtol=1e-4, atol=2e-5)
    assert np.ptp(logprobs) > 0.1
    assert np.ptp(values) > 0.1
    assert len({tuple(x) for x in actions.tolist()}) > 10


@pytest.mark.parametrize(
    "env_id, kinds",
    [
        ("LstmShortNoFrameskip-v4", {"life", "truncation"}),
        ("LstmLivesNoFrameskip-v4", {"life", "termination"}),
        ("LstmResetEndNoFrameskip-v4", {"life", "termination"}),
    ],
)
def test_l3_memory_is_zero_after_a_lost_life_and_a_game(env_id, kinds):
    """Steps one by one: zero where a life was lost or a game ended, not zero elsewhere."""
    agent = make_agent()
    envs = make_envs(env_id, 3)
    games = [env.unwrapped for env in envs.envs]
    memory = ppo.Memory(agent, 3)
    seen = set()
    for _ in range(40):
        before = [(len(game.games), game.lives) for game in games]
        *_, terminations, truncations, episodes = ppo.rollout(agent, envs, 1, memory)
        lost = [(len(game.games), game.lives) != x for game, x in zip(games, before, strict=True)]
        assert (memory.state == 0).all(2).all(1).tolist() == lost
        assert (memory.state != 0).all(2).all(1).tolist() == [not x for x in lost]
        assert (terminations | truncations)[0].tolist() == lost
        ended = {episode.env: episode.ended_by for _, episode, _ in episodes}
        for i in np.flatnonzero(lost):
            kind = ended.get(i, "life")
            assert terminations[0, i] == (kind != "truncation")
            seen.add(kind)
    assert seen == kinds


def test_a_frame_is_seen_alone():
    """No stack: the observation is the present frame."""
    envs = make_envs("LstmLivesNoFrameskip-v4", 2)
    assert envs.obs.shape == (2, 84, 84)
    assert envs.obs.dtype == np.uint8
    for _ in range(8):
        envs.step(np.array([1, 2]))
        for i, env in enumerate(envs.envs):
            np.testing.assert_array_equal(envs.obs[i], gray(len(env.unwrapped.games[-1])))


RUN = (
    "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --hidden-size 16 "
    "--num-threads 1 --eval-episodes 1 --no-cuda"
).split()


@pytest.mark.parametrize("flags", ["", "--cell gru", "--no-memory", "--no-bootstrap-truncated"])
def test_a_run_bootstraps_with_the_memory_of_the_final_observation(run_script, flags):
    """In the second of two rollouts, over lost lives, which cut, and truncations.

    In its last step some games are truncated, and one goes on.
    """
    game = "--env-id LstmShortNoFrameskip-v4 --total-timesteps 128 --learning-rate 1e-12 --seed 3"
    module = run_script(ppo.__file__, *RUN, *game.split(), *flags.split())
    finals = assert_bootstraps_and_agrees(module, lambda obs: features(module.agent, obs))
    lives = module.terminations & ~module.truncations
    assert lives.any()
    assert len(finals) > 2
    if not flags:
        assert module.truncations[-1].any()
        assert not (module.terminations | module.truncations)[-1].all()


def test_init_from_needs_the_same_memory(run_script, capsys):
    game = ("--env-id", "LstmLivesNoFrameskip-v4", "--total-timesteps", "64", "--no-compile")
    assert_init_from_needs_the_same_memory(run_script, capsys, ppo.__file__, *RUN, *game)


def test_l2_l5_memory_starts_at_zero_and_goes_on_into_the_next_rollout(run_script):
    others = "--no-anneal-lr --ent-coef 0.02 --vf-coef 0.3 --max-grad-norm 0.7".split()
    game = ["--env-id", "LstmLivesNoFrameskip-v4", *others, "--total-timesteps"]
    first = run_script(ppo.__file__, *RUN, *game, "64", "--run-name", "one")
    second = run_script(ppo.__file__, *RUN, *game, "128", "--run-name", "two")
    coefs = {"lr": 2.5e-4, "clip_coef": 0.1}
    coefs |= {"ent_coef": 0.02, "vf_coef": 0.3, "max_grad_norm": 0.7}
    assert second.coefs == coefs
    assert not first.batch["memory"].any()
    assert first.memory.state.any()
    assert torch.equal(second.batch["memory"], first.memory.state)


KEPT = {
    "right": lambda done, episodes: not done,
    "over ends": lambda done, episodes: True,
    "over lives": lambda done, episodes: not episodes,
    "never": lambda done, episodes: False,
}


@pytest.mark.parametrize("memory", [True, False])
def test_evaluation_has_a_memory_that_ends_with_a_life(monkeypatch, memory):
    """The likeliest actions of a loop over steps.

    Not those of one that keeps its memory over lives or games, or has none.
    """
    args = ppo.Args(env_id="LstmLivesNoFrameskip-v4", eval_episodes=4)
    agent = make_agent(memory=memory, hidden_size=16)
    agent.cell.weight_ih_l0.data *= 0.2  # so that what the memory was counts
    agent.cell.weight_hh_l0.data *= 4
    agent.actor.weight.data -= agent.actor.weight.mean(0)
    actions = recorded(monkeypatch, ppo)
    evaluation = ppo.evaluate(agent, make_envs(args.env_id, 1), args, None)
    played = list(actions)
    assert [game.episode_return for game in evaluation] == [-0.75] * 4, "games, not lives"
    for name, keep in KEPT.items():
        actions.clear()
        envs = make_envs(args.env_id, 1, (args.seed, 1))
        games = []

        def step(logits):
            if len(games) == 4:
                return None
            action = np.array([logits.argmax().item()])
            _, terminations, truncations, episodes = envs.step(action)
            games.extend(episodes)
            done = terminations[0] or truncations[0]
            return features(agent, torch.from_numpy(envs.obs[None]))[0], keep(done, episodes)

        play(agent, features(agent, torch.from_numpy(envs.obs[None]))[0], step)
        assert (actions == played) == (name == "right" or not memory), name
        if name == "right":
            assert [game[:4] for game in evaluation] == [game[:4] for game in games]


LIVES_RUN = [*RUN, "--env-id", "LstmLivesNoFrameskip-v4"]


def test_runs_stop_and_go_on_with_their_memory(run_script, monkeypatch):
    flags = [*LIVES_RUN, "--learning-rate", "0.001", "--total-timesteps", "256", "--run-name"]
    whole = run_script(ppo.__file__, *flags, "whole").run.folder.absolute()
    stop_after(monkeypatch, Fake, 600)
    module = run_script(ppo.__file__, *flags, "stopped", code=128 + signal.SIGTERM)
    module.run.lock.release()
    stopped = whole.with_name("stopped")
    assert 0 < load_checkpoint(stopped)["run"]["iteration"] < 4
    assert_memory_in_the_checkpoint_counts(run_script, ppo.__file__, stopped, whole)


def test_amp_is_a_flag_of_a_run(run_script):
    """The same run, with other weights that are near, and float32."""
    weights = []
    for i, flags in enumerate((["--learning-rate", "1e-30"], [], ["--amp"])):
        names = ["--total-timesteps", "64", "--run-name", str(i)]
        module = run_script(ppo.__file__, *LIVES_RUN, *names, *flags)
        weights.append(nn.utils.parameters_to_vector(module.agent.parameters()).detach())
    start, end, rounded = weights
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, end)
    assert (rounded - end).norm() < 0.5 * (end - start).norm()


@pytest.mark.parametrize("memory", [True, False])
def test_a_cue_at_the_first_step_is_remembered(run_script, memory):
    """24 for each game is all that can be had, and 0 the mean of any play without the cue."""
    flags = (
        "--env-id LstmCueNoFrameskip-v4 --num-steps 16 --num-minibatches 2 --update-epochs 2 "
        "--total-timesteps 2048 --num-threads 1 --learning-rate 0.002 --eval-episodes 20 --no-cuda"
    ).split()
    if not memory:
        flags.append("--no-memory")
    module = run_script(ppo.__file__, *flags)
    returns = json.loads((module.run.folder / "evaluation.json").read_text())["returns"]
    if memory:
        assert returns == [24.0] * 20
    else:
        assert abs(np.mean(returns)) < 16


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--num-minibatches 3", "--num-envs must be a multiple of --num-minibatches"),
        ("--num-envs 2", "--num-envs must be a multiple of --num-minibatches"),
        ("--hidden-size 0", "--hidden-size must be above 0"),
        ("--cell transformer", "transformer"),
        ("--num-envs 4 --num-steps 1", "minibatches of one step"),
        ("--total-timesteps 1023", "--total-timesteps is below a rollout, 1024"),
    ],
)
def test_bad_flags_are_refused(flags, sentence, refused):
    assert sentence in refused(ppo, flags.split())
