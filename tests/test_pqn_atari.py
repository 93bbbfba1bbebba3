"""pqn_atari.py: its network, its policy, its devices, and whole runs.

Its games are the text of ppo_atari_vector.py, its returns and updates that of pqn.py.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import RUN, differences, episode_rows, load_checkpoint, scalars
from test_ppo import needs_compiler
from test_ppo_atari import run
from test_ppo_atari_vector import META, SMALL, fake_games, random_obs, run_on_meta
from test_pqn import returns_by_definition
from torch import nn

import pqn_atari

SCRIPT = Path(pqn_atari.__file__)


@pytest.fixture
def fake(monkeypatch):
    """fake(*scripts): scripted games, see test_ppo_atari_vector.py."""
    return lambda *scripts: fake_games(monkeypatch, pqn_atari, *scripts)


def make_agent(amp=False):
    """An agent whose biases and norms aren't those of a new one."""
    agent = pqn_atari.Agent(4, amp)
    with torch.no_grad():
        for param in agent.parameters():
            if param.dim() != 4:
                param.add_(0.05 * torch.randn_like(param))
    return agent


def test_the_network_is_natures_with_layernorm():
    """Over channels and pixels, before each ReLU; orthogonal weights of gain sqrt(2)."""
    agent = pqn_atari.Agent(6)
    kinds = [type(layer).__name__ for layer in agent.network]
    hidden = ["LayerNorm", "ReLU"]
    assert kinds == 3 * ["Conv2d", *hidden] + ["Flatten", "Linear", *hidden]
    convs = [(x.out_channels, x.kernel_size[0], x.stride[0]) for x in agent.network[:9:3]]
    assert convs == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    shapes = [x.normalized_shape for x in agent.network if isinstance(x, nn.LayerNorm)]
    assert shapes == [(32, 20, 20), (64, 9, 9), (64, 7, 7), (512,)]
    for layer in (*agent.network[:9:3], agent.network[10], agent.head):
        weight = layer.weight.flatten(1)
        torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)), atol=1e-4, rtol=0)
        assert not layer.bias.any()
    assert agent.head.out_features == 6


def test_values_written_out():
    """Pixels from 0 to 1, frames as channels; the best action's value, and that action."""
    agent = make_agent()
    obs = random_obs(9)
    with torch.no_grad():
        frames = torch.from_numpy(obs).float().permute(0, 3, 1, 2).contiguous() / 255
        expected = agent.head(agent.network(frames))
        values = agent(torch.from_numpy(obs))
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(agent.value(torch.from_numpy(obs)), values.max(1).values)
    assert np.array_equal(agent.policy()(obs, 0.0), values.argmax(1))


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_actions_are_random_with_the_probability_epsilon(epsilon):
    """Of the agent, whatever its player has; all actions alike, else the best one is played."""
    agent = make_agent()
    player = pqn_atari.Player(agent, pqn_atari.Args(compile=False), torch.device("cpu"))
    agent.epsilon = epsilon
    noise = player.noise(300, 8)
    assert noise.shape == (300, 8, 4) and noise.dtype == np.float32
    noise = noise.reshape(2400, 4)
    explores = noise.any(axis=1)
    assert explores.mean() == pytest.approx(epsilon, abs=0.03)
    by_step, by_game = (explores.reshape(300, 8).mean(axis).std() for axis in (1, 0))
    assert by_step < 0.25 and by_game < 0.08  # it would be 0.45 if all had the same draw
    policy = player.policy()
    obs = random_obs(16)
    best = policy(obs, 0.0)
    actions = np.concatenate([policy(obs, noise[i : i + 16]) for i in range(0, 160, 16)])
    rows = explores[:160]
    assert np.array_equal(actions[~rows], np.tile(best, 10)[~rows])
    if epsilon > 0:
        shares = np.bincount(noise[explores].argmax(1), minlength=4) / explores.sum()
        np.testing.assert_allclose(shares, 0.25, atol=0.05)
        assert np.array_equal(actions[rows], noise[:160][rows].argmax(1))


def outputs(policy, obs):
    """The policy's values, of which a Player shows the sum with the noise."""
    shown = []

    class Noise:
        """What is added to the values."""

        __array_ufunc__ = None

        def __radd__(self, values):
            shown.append(values)
            return values

    policy(obs, Noise())
    return shown[0]


def assert_values_close(policy, agent, obs, tolerance):
    with torch.no_grad():
        exact = agent(torch.from_numpy(obs)).numpy()
    assert np.ptp(exact) > 0.5
    np.testing.assert_allclose(outputs(policy, obs), exact, rtol=tolerance, atol=tolerance)


def change_weights(agent):
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.mul_(1.2)


@pytest.mark.parametrize("amp", [False, True])
def test_a_player_has_the_agents_values_and_takes_its_weights_when_told(amp):
    """With --amp its weights are bfloat16, but for the last layer; those of the agent float32."""
    agent = make_agent(amp)
    player = pqn_atari.Player(agent, pqn_atari.Args(compile=False, amp=amp), torch.device("cpu"))
    exact = copy.deepcopy(agent)
    exact.amp = False
    tolerance = 0.1 if amp else 1e-4
    obs = random_obs(5)
    policy = player.policy()
    assert_values_close(policy, exact, obs, tolerance)
    change_weights(agent)
    assert_values_close(policy, exact, obs, tolerance)
    policy = player.policy()
    with pytest.raises(AssertionError):
        assert_values_close(policy, exact, obs, tolerance)
    change_weights(exact)
    assert_values_close(policy, exact, obs, tolerance)
    kinds = [{x.dtype for x in part.parameters()} for part in (player.copy.network, agent)]
    assert kinds == [{torch.bfloat16 if amp else torch.float32}, {torch.float32}]
    assert {x.dtype for x in player.copy.head.parameters()} == {torch.float32}


def test_bfloat16_is_near_float32():
    """And the last layer computes in float32: near values of actions stay apart."""
    agent = make_agent(amp=True)
    agent.head.weight.data[1] = agent.head.weight.data[0]
    agent.head.bias.data = torch.tensor([10.0, 10.001, 0.0, 0.0])
    obs = torch.from_numpy(random_obs(3))
    rounded = agent(obs)
    agent.amp = False
    exact = agent(obs)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)
    torch.testing.assert_close(
        rounded[:, 1] - rounded[:, 0], torch.full((3,), 0.001), rtol=0.1, atol=0
    )


@needs_compiler
def test_a_compiled_player_equals_the_agent():
    """Also with new weights, for which nothing is compiled."""
    agent = make_agent()
    player = pqn_atari.Player(agent, pqn_atari.Args(), torch.device("cpu"))
    assert "forward" in vars(player.copy)  # the compiled one, before the class's
    assert_values_close(player.policy(), agent, random_obs(3), 1e-3)
    change_weights(agent)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_values_close(player.policy(), agent, random_obs(3), 1e-3)


@needs_compiler
def test_the_compiled_update_equals_the_eager_one():
    """Over the steps in which RAdam's variance begins to count."""
    start = pqn_atari.Agent(4)
    args = pqn_atari.Args(num_minibatches=2, update_epochs=4)
    batch = {"obs": torch.from_numpy(random_obs(16)), "actions": torch.randint(4, (16,))}
    batch["returns"] = torch.randn(16)
    coefs = {"lr": torch.tensor(1e-4), "max_grad_norm": torch.tensor(10.0)}
    function = pqn_atari.compile_or_not(pqn_atari.update_minibatches, args, torch.device("cpu"))
    assert function is not pqn_atari.update_minibatches
    ends = []
    for update_minibatches in (pqn_atari.update_minibatches, function):
        torch.manual_seed(3)
        agent = copy.deepcopy(start)
        optimizer = pqn_atari.RAdam(agent.parameters())
        metrics = pqn_atari.update(update_minibatches, optimizer, agent, batch, coefs, args)
        ends.append((nn.utils.parameters_to_vector(agent.parameters()), metrics))
    (eager, eager_metrics), (compiled, compiled_metrics) = ends
    torch.testing.assert_close(compiled_metrics, eager_metrics, rtol=1e-2, atol=1e-3)
    change = eager - nn.utils.parameters_to_vector(start.parameters())
    assert (compiled - eager).abs().mean() < 0.02 * change.abs().mean() > 0


# Whole runs


def test_a_run_bootstraps_truncations_and_cuts_at_lost_lives(run_script, fake):
    """Returns of a run's only iteration against the mean of all n-step returns."""
    fake({3: -1.0, 4: "life"}, {2: 1.0, 8: 2.0, 9: "over"})
    flags = f"{SMALL} --env-id VectorCutNoFrameskip-v4 --total-timesteps 64 --num-steps 32"
    module = run_script(SCRIPT, *flags.split(), "--learning-rate", "1e-12", "--q-lambda", "0.8")
    ends = {(episode.env, episode.ended_by) for _, episode in module.episodes}
    assert ends == {(0, "truncation"), (1, "termination")}
    assert module.terminations[:, 0].any(), "a lost life"
    next_obs = np.concatenate((module.obs[1:], module.envs.obs[None]))
    for step, episode in module.episodes:
        next_obs[step, episode.env] = episode.final_obs
    with torch.no_grad():
        values = [module.agent(torch.from_numpy(obs)).amax(1).numpy() for obs in next_obs]
    dones = module.terminations | module.truncations
    data = module.rewards, np.array(values), module.terminations, dones, 0.99, 0.8
    returns = module.batch["returns"].view(32, 2)
    np.testing.assert_allclose(returns, returns_by_definition(*data), rtol=1e-3, atol=1e-3)


def test_the_probability_and_the_learning_rate_fall(run_script, fake):
    fake({20: "over"})
    flags = f"{SMALL} --env-id PongNoFrameskip-v4 --total-timesteps 128 --start-e 0.8 --end-e 0"
    flags += " --max-grad-norm 7"
    module = run_script(SCRIPT, *flags.split(), "--exploration-fraction", "1")
    torch.manual_seed(1)
    first = pqn_atari.Agent(module.envs.action_space.n)
    assert not torch.equal(module.player.copy.head.weight, first.head.weight), "it has played"
    assert module.agent.epsilon == pytest.approx(0.8 / 4)
    assert module.coefs["lr"].item() == pytest.approx(2.5e-4 / 4)
    assert module.coefs["max_grad_norm"] == 7


def test_a_run_logs_its_steps_and_evaluates_other_games_each_time(run_script, fake):
    """Two iterations, an evaluation after each and in the end; then a run from its networks."""
    made = fake({5: "over"}, {})
    flags = f"{SMALL} --env-id PongNoFrameskip-v4 --total-timesteps 64 --run-name run"
    module = run_script(SCRIPT, *f"{flags} --eval-interval 1 --learning-rate 0.01".split())
    rows = episode_rows(module.run.folder)
    assert [int(row["global_step"]) for row in rows] == [10, 20, 30, 40, 50, 60]
    assert [*scalars(module.run.folder, "losses/td_loss")] == [32, 64]
    first_seeds = [games.seeds[0][0] for games in made]
    assert len(first_seeds) == len({*first_seeds}) == 1 + 2 + 1
    flags = flags.replace("--run-name run", "--run-name other --init-from runs/run")
    other = run_script(SCRIPT, *flags.split(), "--learning-rate", "1e-12")
    torch.testing.assert_close(other.agent.state_dict(), module.agent.state_dict())


def test_a_run_that_diverges_ends_with_its_iteration(run_script, fake):
    """Not with the next checkpoint, nor in the end. With --amp it also plays in bfloat16."""
    fake({20: "over"})
    flags = f"{SMALL} --env-id PongNoFrameskip-v4 --total-timesteps 128 --learning-rate 1e30"
    module = run_script(SCRIPT, *flags.split(), "--amp", code=1)
    assert module.run.global_step <= 32
    assert module.agent.amp and module.player.copy.amp


def test_all_tensors_of_an_update_are_on_the_device(run_script, monkeypatch, tmp_path, fake):
    """Over two iterations, an evaluation and a checkpoint."""
    fake({5: "life", 9: "over"}, {})
    flags = f"{META} --no-compile --env-id VectorCutNoFrameskip-v4"
    module = run_on_meta(run_script, monkeypatch, tmp_path, pqn_atari, flags)
    assert {x.device.type for x in module.agent.parameters()} == {"meta"}
    assert {x.device.type for x in module.optimizer.state_dict().values()} == {"meta"}
    assert {x.device.type for x in module.batch.values()} == {"meta"}
    assert {x.device.type for x in module.coefs.values()} == {"meta"}
    assert module.run.global_step == 64


def test_a_run_killed_in_mid_game_and_resumed_is_equal(server, tmp_path):
    flags = f"{SMALL} --env-id ShortPongNoFrameskip-v4 --total-timesteps 256 --run-name run"
    flags += " --checkpoint-interval 3"
    (tmp_path / "whole").mkdir()
    run(server, tmp_path / "whole", flags, script=SCRIPT)
    run(server, tmp_path, flags, killed_in=110, script=SCRIPT)
    assert load_checkpoint(tmp_path / RUN)["run"]["iteration"] == 6
    run(server, tmp_path, f"--resume {RUN}", script=SCRIPT)
    assert not differences(tmp_path / RUN, tmp_path / "whole" / RUN)


def test_bad_flags(refused):
    for flags, sentence in {
        "--end-e 0.5 --start-e 0.1": "it must be 0 <= --end-e <= --start-e <= 1",
        "--exploration-fraction 2": "--exploration-fraction must be from 0 to 1",
        "--q-lambda 1.5": "--q-lambda must be from 0 to 1",
        "--gamma 2": "--gamma must be from 0 to 1",
        "--num-steps 0": "--num-steps must be above 0",
        "--num-minibatches 0": "--num-minibatches must be above 0",
        "--update-epochs 0": "--update-epochs must be above 0",
        "--num-minibatches 3": "must be a multiple of --num-minibatches",
    }.items():
        assert sentence in refused(pqn_atari, flags.split())
