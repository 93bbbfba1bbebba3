"""ppo_atari_lstm.py: one frame, its network, and a memory that ends with a life, on scripted games (see FakeALE). What
it shares with ppo_lstm.py (recurrent core, update) is tested there, its wrappers play as those of ppo_atari.py."""

import json
import math
import os
import re
import signal

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from test_ppo_atari import LIVES, Fake, FakeALE, exact, gray
from test_ppo_lstm import (
    CELL_AND_MEMORY,
    KEPT,
    assert_bootstraps_and_agrees,
    assert_equals_a_loop,
    assert_memory_in_the_checkpoint_counts,
    assert_orthogonal,
    memories_by_steps,
    outcome,
    play,
    randomised,
    recorded,
    time_first,
)
from torch import nn
from torch.distributions import Categorical

import ppo_atari
import ppo_atari_lstm as ppo

SHORT = {9: 1.0, 41: "life", 45: -1.0, 53: "life", 62: "cut"}
LIFE_AND_OVER = {36: "life", 39: "over"}  # the game ends in the no-op after the lost life


class CueALE(FakeALE):
    """Sixty frames; the brighter half of the first ones, which only the first observation surely shows, says which of
    two actions is right in the last 24, on a dark screen."""

    def reset_game(self):
        super().reset_game()
        self.side = self.random.integers(2)

    def act(self, action):
        super().act(action)
        return (len(self.games[-1]) > 36) * (1.0 if action == 10 + self.side else -1.0)

    def getScreenRGB(self, out=None):
        out = np.zeros((210, 160, 3), np.uint8) if out is None else out
        out[:] = 0
        if len(self.games[-1]) <= 34:
            out[:, 80 * self.side : 80 * self.side + 80] = 200
        return out


class Cue(Fake):
    def __init__(self, **kwargs):
        super().__init__(actions=("NOOP", "RIGHT"), **kwargs)
        self.ale = CueALE({60: "over"})

    def reset(self, seed=None, options=None):
        self.ale.random = np.random.default_rng(seed)
        return super().reset(seed=seed)


NAMES = ("NOOP", "UP", "DOWN")
gym.register("LstmShortNoFrameskip-v4", Fake, kwargs=exact | {"script": SHORT, "actions": NAMES})
gym.register("LstmLivesNoFrameskip-v4", Fake, kwargs=exact | {"script": LIVES, "actions": NAMES})
gym.register("LstmResetEndNoFrameskip-v4", Fake, kwargs=exact | {"script": LIFE_AND_OVER, "actions": NAMES})
gym.register("LstmNanNoFrameskip-v4", Fake, kwargs=exact | {
    "script": {110: float("nan"), 150: "over"}, "actions": NAMES})  # of 64 frames a rollout, after 30 at most
gym.register("LstmCueNoFrameskip-v4", Cue, kwargs=exact)


def make_agent(num_actions=3, cell="lstm", memory=True, hidden_size=6):
    """An agent with biases, whose policy and values depend on the frame and the memory."""
    agent = ppo.Agent(num_actions, ppo.Args(cell=cell, memory=memory, hidden_size=hidden_size))
    for part in (agent.cell, agent.actor, agent.critic):
        randomised(part)
    for layer in agent.network:
        if hasattr(layer, "bias"):
            layer.bias.data += 0.05 * torch.randn_like(layer.bias)
    return agent


def features(agent, obs):
    """The core's inputs (m, n, 512) of frames (m, n, 1, 84, 84), by the network of the paper for one frame."""
    x, first = obs.flatten(0, 1).to(agent.actor.weight.dtype) / 255, agent.network[0]
    # from (out, 4 rows x 4 columns of a block, block's row, its column) to (out, 1, row, column)
    weight = first.weight.view(32, 4, 4, 2, 2).permute(0, 3, 1, 4, 2).reshape(32, 1, 8, 8)
    x = nn.functional.conv2d(x, weight, first.bias, stride=4).relu()
    for layer, stride in ((agent.network[2], 2), (agent.network[4], 1)):
        x = nn.functional.conv2d(x, layer.weight, layer.bias, stride=stride).relu()
    return nn.functional.linear(x.flatten(1), agent.network[7].weight, agent.network[7].bias).relu().view(
        *obs.shape[:2], 512)


def outputs_by_steps(agent, batch):
    """What agent(batch) must give, by nn.LSTMCell or its like and torch.distributions."""
    batch = time_first(batch)
    hidden = memories_by_steps(agent, features(agent, batch["obs"]), batch["memory"], batch["dones"])[:, :, 0]
    policy = Categorical(logits=agent.actor(hidden))
    return [x.T for x in (policy.log_prob(batch["actions"]), policy.entropy(), agent.critic(hidden).squeeze(2))]


def test_defaults_are_those_of_ppo_atari_and_the_details():
    args = ppo.Args()
    assert (args.env_id, args.total_timesteps, args.num_envs) == ("BreakoutNoFrameskip-v4", 10_000_000, 8)
    assert (args.num_steps, args.num_minibatches, args.update_epochs, args.clip_coef) == (128, 4, 4, 0.1)
    assert (args.learning_rate, args.ent_coef, args.vf_coef, args.max_grad_norm) == (2.5e-4, 0.01, 0.5, 0.5)
    assert (args.cell, args.hidden_size, args.memory, args.bootstrap_truncated) == ("lstm", 128, True, True)


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_l1_layers_are_orthogonal_without_biases(cell, gates):
    agent = ppo.Agent(6, ppo.Args(cell=cell))
    gains = [(layer, math.sqrt(2)) for layer in agent.network if hasattr(layer, "weight")]
    assert len(gains) == 4
    for layer, gain in [*gains, (agent.actor, 0.01), (agent.critic, 1.0)]:
        assert_orthogonal(layer.weight, gain)
        assert not layer.bias.detach().any()
    assert agent.cell.weight_ih_l0.shape == (gates * 128, 512) and agent.cell.weight_hh_l0.shape == (gates * 128, 128)
    assert type(agent.cell) is getattr(nn, cell.upper()) and len(list(agent.cell.parameters())) == 4
    for name, x in agent.cell.named_parameters():
        assert_orthogonal(x, 1.0) if "weight" in name else torch.testing.assert_close(x, torch.zeros_like(x))
    core = gates * 128 * (512 + 128 + 2)
    convolutions = 32 * (64 + 1) + 64 * (32 * 16 + 1) + 64 * (64 * 9 + 1)
    assert sum(p.numel() for p in agent.parameters()) == convolutions + 512 * (3136 + 1) + core + 7 * (128 + 1)


def test_the_first_layer_is_a_convolution_of_8_x_8_with_stride_4():
    """By what each pixel adds: the gradient in a frame of one output of the layer is the kernel, in its place."""
    agent, x = ppo.Agent(4, ppo.Args()), torch.rand(2, 1, 84, 84)
    plain = nn.Conv2d(1, 32, 8, stride=4)
    for y in range(8):
        for column in range(8):
            plain.weight.data[:, 0, y, column] = agent.network[0].weight[:, y % 4 * 4 + column % 4, y // 4, column // 4]
    plain.bias.data = agent.network[0].bias.data = torch.randn(32)
    seen = []
    agent.network[0].register_forward_hook(lambda _, inputs, output: seen.append(output))
    agent.heads((255 * x)[:, None], torch.zeros(2, 2, 128))
    assert seen[0].shape == (2, 32, 20, 20)
    torch.testing.assert_close(seen[0], plain(x), rtol=1e-4, atol=1e-5)


def test_the_layers_after_the_first_are_those_of_the_paper():
    agent = make_agent()
    obs, seen = torch.randint(0, 256, (3, 2, 1, 84, 84), dtype=torch.uint8), []
    agent.cell.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    agent.heads(obs, torch.zeros(2, 3, 6))
    torch.testing.assert_close(seen[0], features(agent, obs), rtol=1e-4, atol=1e-5)
    assert (seen[0] > 0).float().mean() > 0.2


@pytest.mark.parametrize("env_id, kinds", [
    ("ALE/Breakout-v5", {"life", "termination"}), ("SpaceInvadersNoFrameskip-v4", {"life"})])
def test_frames_rewards_and_ends_are_those_of_ppo_atari(env_id, kinds):
    """Which equal Stable-Baselines3's; with FIRE, sticky actions, sprites in every other frame, lost lives and ends."""
    ours, stacked, random, seen = ppo.Envs(env_id, 2, 7), ppo_atari.Envs(env_id, 2, 7), np.random.default_rng(0), set()
    for _ in range(500):
        np.testing.assert_array_equal(ours.obs[:, 0], stacked.obs[:, 3])
        actions = random.integers(len(ours.action_names), size=2)
        (rewards, ended), (expected, others) = ours.step(actions), stacked.step(actions)
        np.testing.assert_array_equal(rewards, expected)
        assert [x[:4] for x in ended] == [x[:4] for x in others]
        for (*_, obs), (*_, last_four) in zip(ended, others):
            np.testing.assert_array_equal(obs[0], last_four[3])
        seen |= {x[3] for x in ended}
    assert seen == kinds


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_outputs_and_gradients_equal_those_of_a_loop_over_steps(cell, memory):
    agent = make_agent(5, cell, memory, 7).double()
    dones = torch.tensor([[0, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    batch = {"obs": torch.randint(0, 256, (4, 3, 1, 84, 84), dtype=torch.uint8).double(), "dones": dones,
             "actions": torch.randint(0, 5, (4, 3)), "memory": torch.randn(agent.num_states, 3, 7).double()}
    assert_equals_a_loop(agent, time_first(batch), outputs_by_steps, memory)


def test_bfloat16_is_near_float32_and_stays_out_of_the_memory(monkeypatch):
    """Within the rollout's context too; the core gets the same inputs as it would outside, as float32."""
    torch.manual_seed(1)
    agent, inputs = make_agent(hidden_size=128), []
    obs = torch.randint(0, 256, (3, 7, 1, 84, 84), dtype=torch.uint8)
    memory, recur = torch.randn(2, 3, 128), agent.recur
    monkeypatch.setattr(agent, "recur", lambda x, *more: (inputs.append(x), recur(x, *more))[1])
    exact = agent.heads(obs, memory)
    agent.args.amp = True
    with torch.autocast("cpu", torch.bfloat16):
        outputs = agent.heads(obs, memory)
    assert inputs[1].dtype == torch.float32 and torch.equal(inputs[1], inputs[1].bfloat16())
    for rounded, output in zip(outputs, exact):
        assert rounded.dtype == torch.float32 and not torch.equal(rounded, output)
        torch.testing.assert_close(rounded, output, rtol=0.05, atol=0.1)
    assert all(torch.equal(*pair) for pair in zip(agent.heads(obs, memory), outputs))  # outside of it, too
    hidden, after = recur(inputs[1], memory)
    torch.testing.assert_close((agent.actor(hidden).log_softmax(2), agent.critic(hidden)[:, :, 0], after), outputs)


@pytest.mark.parametrize("cell, memory", CELL_AND_MEMORY)
def test_rollouts_and_training_agree(cell, memory):
    """In a second rollout, in mid-game, with lost lives and truncations: the ratio is 1 in the first minibatch."""
    agent, envs = make_agent(3, cell, memory), ppo.Envs("LstmShortNoFrameskip-v4", 3, 1)
    start = ppo.rollout(agent, envs, 3, torch.zeros(agent.num_states, 3, 6))[3]
    kept = start.clone()
    arrays, _, terminations, after, episodes = ppo.rollout(agent, envs, 30, start)
    batch, obs, dones = time_first(arrays), torch.from_numpy(arrays["obs"]), arrays["dones"]
    assert obs.dtype == torch.uint8 and obs.shape == (30, 3, 1, 84, 84)
    assert terminations.sum() > 6 and (dones & ~terminations).sum() == len(episodes) > 3
    assert arrays["memory"] is start and torch.equal(start, kept) and (start != 0).any() == memory
    with torch.no_grad():
        for logprobs, _, values in (agent(batch), outputs_by_steps(agent, batch)):
            torch.testing.assert_close(batch["logprobs"], logprobs, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(batch["values"], values, rtol=1e-4, atol=2e-5)
        states = memories_by_steps(agent, features(agent, obs), start, dones)
    for step, i, *_, final_obs, final_memory in episodes:
        assert final_obs.shape == (1, 84, 84)
        torch.testing.assert_close(final_memory, states[step, i] * memory, rtol=1e-4, atol=2e-5)
    states[-1][dones[-1]] = 0.0
    torch.testing.assert_close(after, states[-1].transpose(0, 1) * memory, rtol=1e-4, atol=2e-5)
    assert np.ptp(arrays["logprobs"]) > 0.1 and np.ptp(arrays["values"]) > 0.1
    assert len({tuple(x) for x in arrays["actions"].tolist()}) > 10


@pytest.mark.parametrize("env_id, kinds", [("LstmShortNoFrameskip-v4", {"life", "truncation"}),
                                           ("LstmLivesNoFrameskip-v4", {"life", "termination"}),
                                           ("LstmResetEndNoFrameskip-v4", {"life", "termination"})])
def test_l3_memory_is_zero_after_a_lost_life_and_a_game(monkeypatch, env_id, kinds):
    """Steps one by one: zero where the emulator lost a life or ended its game, not zero elsewhere."""
    agent, envs, seen = make_agent(), ppo.Envs(env_id, 3, 1), set()
    memory, step, ended = torch.zeros(2, 3, 6), ppo.Envs.step, []

    def spy(self, actions, games):
        result = step(self, actions, games)
        ended[:] = result[1]
        return result

    monkeypatch.setattr(ppo.Envs, "step", spy)
    for _ in range(40):
        before = [(len(env.ale.games), env.ale.left) for env in envs.envs]
        arrays, _, terminations, memory, episodes = ppo.rollout(agent, envs, 1, memory)
        lost = [(len(env.ale.games), env.ale.left) != x for env, x in zip(envs.envs, before)]
        assert (memory != 0).all(2).all(0).tolist() == [not x for x in lost]
        assert (memory == 0).all(2).all(0).tolist() == arrays["dones"][0].tolist() == lost
        assert terminations[0].tolist() == [any(x[0] == i and x[3] != "truncation" for x in ended) for i in range(3)]
        assert [x[1] for x in episodes] == [x[0] for x in ended if x[3] != "life"]
        seen |= {x[3] for x in ended}
    assert seen == kinds


class Player:
    """In the place of an Agent, exact in a batch of any size; a memory adds up what was seen. Values: the process."""

    def step(self, obs, memory):
        memory = (3 * memory + torch.from_numpy(obs[:, 0, :40].sum((1, 2)) % 97)[:, None]) % 101
        return memory[0].numpy() % 5, np.full(len(obs), os.getpid() % 10**6, np.float32), memory


def test_games_in_processes_have_their_own_memory():
    """Two rollouts of three games, in one and in two processes, to the bit."""
    results = []
    for threads in (1, 2):
        envs, memory = ppo.Envs("ALE/RoadRunner-v5", 3, 3), torch.arange(2.0 * 3 * 18).view(2, 3, 18)
        torch.manual_seed(5)
        torch.set_num_threads(threads)
        for _ in range(2):
            arrays, rewards, terminations, memory, episodes = ppo.rollout(Player(), envs, 110, memory)
            others = arrays.pop("values")[:, 1:] != os.getpid() % 10**6
            assert torch.get_num_threads() == threads and others.all() == others.any() == (threads == 2)
            results.append([*arrays.values(), rewards, terminations, memory, *(x for game in episodes for x in game)])
    assert len(results[1]) > 8 and results[1][6].any()
    for one, two in zip(results[:2], results[2:], strict=True):
        for x, y in zip(one, two, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_frame_is_seen_alone():
    """No stack: the observation is the present frame."""
    envs = ppo.Envs("LstmLivesNoFrameskip-v4", 2, 1)
    assert envs.obs.shape == (2, 1, 84, 84) and envs.obs.dtype == np.uint8
    for _ in range(8):
        envs.step([1, 2])
        for i, env in enumerate(envs.envs):
            np.testing.assert_array_equal(envs.obs[i, 0], gray(len(env.ale.games[-1])))


RUN = ["--num-envs", "4", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "1", "--hidden-size", "16",
       "--num-threads", "1", "--eval-episodes", "1", "--no-cuda", "--run-name", "run"]


@pytest.mark.parametrize("flags", [["--seed", "5"], ["--cell", "gru"], ["--no-memory"], ["--no-bootstrap-truncated"]],
                         ids=str)
def test_a_run_bootstraps_with_the_memory_of_the_final_observation(run_script, flags):
    """In the second of two rollouts, over lost lives, which cut, and truncations, one of them in its last step."""
    module = run_script(ppo.__file__, *RUN, "--env-id", "LstmShortNoFrameskip-v4", "--total-timesteps", "128",
                        "--learning-rate", "1e-12", *flags)
    finals = assert_bootstraps_and_agrees(module, lambda obs: features(module.agent, obs))
    assert module.terminations.any() and len(finals) > 2
    assert not module.dones[-1].all()
    assert (module.dones & ~module.terminations)[-1].any() or "--seed" not in flags


def test_l2_l5_memory_starts_at_zero_and_goes_on_into_the_next_rollout(run_script):
    modules = [run_script(ppo.__file__, *RUN[:-1], n, "--env-id", "LstmLivesNoFrameskip-v4", "--total-timesteps", n,
                          "--no-anneal-lr") for n in ("64", "128")]
    assert not modules[0].batch["memory"].any() and modules[0].memory.any()
    assert torch.equal(modules[1].batch["memory"].transpose(0, 1), modules[0].memory)


KEPT_OVER_LIVES = {"over lives": lambda ended: not [record for record in ended if record[3] != "life"]}


@pytest.mark.parametrize("memory", [True, False])
def test_evaluation_has_a_memory_that_ends_with_a_life(monkeypatch, memory):
    """The likeliest actions of a loop over steps; not those of one that keeps its memory over lives or games, or has
    none."""
    args = ppo.Args(env_id="LstmLivesNoFrameskip-v4", eval_episodes=4, memory=memory, hidden_size=16)
    agent = make_agent(memory=memory, hidden_size=16)
    agent.cell.weight_ih_l0.data *= 0.2  # so that what the memory was counts
    agent.cell.weight_hh_l0.data *= 4
    agent.actor.weight.data -= agent.actor.weight.mean(0)
    actions = recorded(monkeypatch, ppo)
    results = ppo.evaluate(agent, args)
    played = list(actions)
    assert results["returns"] == [-0.75] * 4, "games, not lives"
    for name, keep in (KEPT | KEPT_OVER_LIVES).items():
        actions.clear()
        envs, games = ppo.Envs(args.env_id, 1, (1, 1)), []

        def step(logits):
            if len(games) == 4:
                return None
            ended = envs.step(np.array([logits.argmax().item()]))[1]
            games.extend(x for x in ended if x[3] != "life")
            return features(agent, torch.from_numpy(envs.obs[None]))[0], keep(ended)

        play(agent, features(agent, torch.from_numpy(envs.obs[None]))[0], step)
        assert (actions == played) == (name == "right" or not memory)
        if name == "right":
            assert results["lengths"] == [x[2] for x in games]


class Killed(Exception):
    pass


PONG = ["--env-id", "ShortPongNoFrameskip-v4", "--num-envs", "2", "--num-steps", "8", "--num-minibatches", "2",
        "--update-epochs", "1", "--hidden-size", "16", "--num-threads", "2", "--learning-rate", "0.01",
        "--checkpoint-interval", "2", "--eval-episodes", "1", "--no-cuda"]


def test_runs_are_deterministic_and_resume_exactly_with_their_memory(run_script, monkeypatch, tmp_path, capsys):
    """Killed between two checkpoints, in mid-game, the games in two processes; --evaluate plays as the run did at its
    end."""
    flags = [*PONG, "--total-timesteps", "96"]
    whole, again = [run_script(ppo.__file__, *flags, "--run-name", name).run_dir for name in ("whole", "again")]
    assert outcome(whole) == outcome(again)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation:")]
    steps, sign = [], np.sign

    def kill(x):
        steps.append(x)
        if len(steps) == 37:  # in the fifth of six rollouts
            raise Killed
        return sign(x)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(np, "sign", kill)
        run_script(ppo.__file__, *flags, "--run-name", "killed")
    assert torch.load(tmp_path / "runs" / "killed" / "checkpoint.pt", weights_only=True)["iteration"] == 4
    assert_memory_in_the_checkpoint_counts(run_script, ppo.__file__, tmp_path / "runs" / "killed", whole)
    capsys.readouterr()
    run_script(ppo.__file__, "--evaluate", "runs/whole")
    assert told[0] in capsys.readouterr().out


def test_a_game_that_does_not_come_back_starts_without_memory(run_script, capsys):
    """The other games go on with theirs."""
    run_dir = run_script(ppo.__file__, *PONG, "--total-timesteps", "16").run_dir
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    games = checkpoint["envs"]["games"]
    checkpoint["envs"]["games"] = [games[0][:2000] + bytes(64) + games[0][2064:], games[1]]
    assert checkpoint["memory"].all()
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    (run_dir / "evaluation.json").unlink()  # so that the run goes on to its end, which is near
    module = run_script(ppo.__file__, "--resume", str(run_dir))
    assert "environment 0 can't be brought back" in capsys.readouterr().out
    assert not module.memory[:, 0].any() and torch.equal(module.memory[:, 1], checkpoint["memory"][:, 1])


BOTH = pytest.mark.parametrize("script, more", [(ppo_atari, ["--no-compile"]), (ppo, ["--hidden-size", "16"])],
                               ids=["ppo_atari", "ppo_atari_lstm"])
TINY = ["--num-envs", "2", "--num-steps", "16", "--num-minibatches", "2", "--update-epochs", "1", "--no-cuda",
        "--eval-episodes", "1"]


@BOTH
def test_a_reward_that_is_nan_ends_the_run_and_leaves_the_last_good_checkpoint(run_script, capsys, script, more):
    run_script(script.__file__, *TINY, *more, "--env-id", "LstmNanNoFrameskip-v4", "--total-timesteps", "96",
               "--checkpoint-interval", "1", "--run-name", "run", code=1)
    assert "error: iteration 2: the loss is not finite" in capsys.readouterr().err
    checkpoint = torch.load("runs/run/checkpoint.pt", weights_only=True)
    assert checkpoint["iteration"] == 1 and all(x.isfinite().all() for x in checkpoint["agent"].values())


@BOTH
def test_sigterm_saves_and_resume_comes_to_the_same_end(run_script, monkeypatch, capsys, script, more):
    flags = [*TINY, *more, "--env-id", "ShortPongNoFrameskip-v4", "--total-timesteps", "192"]
    whole = run_script(script.__file__, *flags, "--run-name", "whole").run_dir
    steps, sign = [], np.sign

    def stop(x):
        steps.append(x)
        if len(steps) == 40:  # in the third of six rollouts
            os.kill(os.getpid(), signal.SIGTERM)
        return sign(x)

    with monkeypatch.context() as patch:
        patch.setattr(np, "sign", stop)
        stopped = run_script(script.__file__, *flags, "--run-name", "stopped", code=143).run_dir
    assert "stopped at step 96; go on with" in capsys.readouterr().out
    run_script(script.__file__, "--resume", "runs/stopped")
    assert outcome(stopped) == outcome(whole)
    told = re.findall("evaluation: .*", capsys.readouterr().out)
    checkpoint = torch.load(whole / "checkpoint.pt", weights_only=True)
    torch.save(checkpoint | {"envs": None}, whole / "checkpoint.pt")
    run_script(script.__file__, "--evaluate", "runs/whole")  # it needs no game of the training
    assert told and re.findall("evaluation: .*", capsys.readouterr().out) == told


@BOTH
def test_amp_is_a_flag_of_a_run(run_script, script, more):
    """The same run, with other weights that are near, and float32."""
    flags = [*TINY, *more, "--env-id", "LstmLivesNoFrameskip-v4", "--total-timesteps", "32"]
    start, end, rounded = ((nn.utils.parameters_to_vector(run_script(script.__file__, *flags, "--run-name", f"run{i}",
                            *also).agent.parameters()).detach())
                           for i, also in enumerate((["--learning-rate", "1e-30"], [], ["--amp"])))
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, end)
    assert (rounded - end).norm() < 0.5 * (end - start).norm()


@BOTH
def test_a_run_leaves_its_weights_a_video_with_bars_and_its_number_of_threads(run_script, script, more):
    run_dir = run_script(script.__file__, *TINY, *more, "--env-id", "LstmLivesNoFrameskip-v4", "--total-timesteps",
                         "32", "--save-model", "--capture-video").run_dir
    assert json.loads((run_dir / "config.json").read_text())["args"]["num_threads"] == 1  # what PyTorch has here
    weights = torch.load(next(run_dir.glob("*.cleanrl_model")), weights_only=True)
    assert weights.keys() == torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"].keys()
    picture = imageio.mimread(run_dir / "videos" / "evaluation" / "episode-0.mp4")[0].astype(int)
    assert ((np.abs(picture[:, 320:] - (255, 160, 0)) < 60).all(2).sum(1) > 20).any()


@pytest.mark.parametrize("script", [ppo_atari, ppo], ids=lambda script: script.__name__)
def test_the_bars_of_the_evaluation_are_the_policys_probabilities(script, monkeypatch):
    agent = script.Agent(3, script.Args(hidden_size=6)) if script is ppo else script.Agent(3, script.Args())
    agent.actor.weight.data = torch.randn_like(agent.actor.weight)
    heads, step, seen = agent.heads, script.Envs.step, []

    def record(*inputs):
        outputs = heads(*inputs)
        seen.append(outputs[0].flatten().softmax(0).numpy())
        return outputs

    def compare(envs, actions):
        np.testing.assert_allclose(envs.probabilities, seen[-1], rtol=1e-4, atol=1e-6)
        assert actions.tolist() == [seen[-1].argmax()]
        return step(envs, actions)

    agent.heads = record
    monkeypatch.setattr(script.Envs, "step", compare)
    script.evaluate(agent, script.Args(env_id="LivesNoFrameskip-v4", eval_episodes=1,
                                       **({"hidden_size": 6} if script is ppo else {})))
    assert len(seen) > 5 and np.ptp(seen[-1]) > 0.05


@pytest.mark.parametrize("memory", [True, False])
def test_a_cue_at_the_first_step_is_remembered(run_script, memory):
    """24 for each game is all that can be had, and 0 the mean of any play that hasn't seen the cue."""
    module = run_script(ppo.__file__, "--env-id", "LstmCueNoFrameskip-v4", "--num-steps", "16", "--num-minibatches",
                        "2", "--update-epochs", "2", "--total-timesteps", "2048", "--num-threads", "1",
                        "--learning-rate", "0.002", "--eval-episodes", "20", "--no-cuda",
                        *([] if memory else ["--no-memory"]))
    returns = json.loads((module.run_dir / "evaluation.json").read_text())["returns"]
    assert returns == [24.0] * 20 if memory else abs(np.mean(returns)) < 16


@pytest.mark.parametrize("flags, sentence", [
    (["--num-minibatches", "3"], "--num-envs must divide into --num-minibatches"),
    (["--num-envs", "2"], "--num-envs must divide into --num-minibatches"),
    (["--hidden-size", "0"], "hidden_size must be above 0"), (["--cell", "transformer"], "transformer"),
    (["--num-envs", "4", "--num-steps", "1"], "minibatches of one step"),
    (["--total-timesteps", "1023"], "one rollout of 1024 steps")])
def test_bad_flags_are_refused(flags, sentence, refused):
    assert sentence in refused(ppo, flags)
