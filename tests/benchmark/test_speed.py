"""benchmark.speed: its arithmetic, its peers, and what a user gets."""

import json
import re
import sys
from dataclasses import asdict
from importlib import import_module
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from benchmark import ROOT
from benchmark.speed import __main__ as command
from benchmark.speed import chart, cleanrl, measure, peers, sb3, tables

RESULTS = ROOT / "benchmark" / "results"


def flags_of(script, **changed):
    """A script's flags as its config.json has them."""
    return SimpleNamespace(**asdict(import_module(script).Args(**changed)))


def make_row(number, program, speed, **figures):
    row = {
        "round": number,
        "program": program,
        "precision": peers.PROGRAMS[program][1],
        "cache": "",
        "script": "ppo_atari",
        "env_id": "PongNoFrameskip-v4",
        "seed": 100 + number,
        "steps_per_second": speed,
        "start_up_s": 10.0 * number,
        "wall_s": 2.0,
        "wall_s_1m": 1e4 / speed,
        "peak_mb": 50.0 * number,
        "others_cores": number - 1.0,
        "machine": "a machine",
    }
    return row | figures


@pytest.fixture
def rows():
    """Two rounds, the second three times as fast; --amp in the second alone."""
    made = []
    for number, factor, cache in ((1, 1, "empty"), (2, 3, "filled")):
        made.append(make_row(number, "plainrl", 800.0 * factor, cache=cache))
        for program, speed in (("sb3", 100.0), ("cleanrl", 200.0)):
            made.append(make_row(number, program, speed * factor))
    made.append(make_row(2, "plainrl --amp", 1200.0, cache="empty"))
    return pd.DataFrame(made)


# What is read of a run


def test_steady_state():
    """100 steps/s after the first mark; those before it that learned aren't start-up."""
    marks = [(2048, 130.48), (4096, 140.0), (12048, 230.48)]
    assert measure.figures_of(marks, 100.0, 240.0, learning_starts=1000) == pytest.approx(
        {
            "steps": 12048,
            "steps_per_second": 100.0,
            "start_up_s": 20.0,
            "wall_s": 140.0,
            "wall_s_1m": 140 + 9879.52,
        }
    )


def test_marks_of_a_script_are_those_of_its_events_once_it_learns(tmp_path):
    writer = SummaryWriter(tmp_path / "runs" / "plainrl")
    for i in range(1, 12_001):  # TensorBoard's reader keeps a sample of 10,000 unless told
        writer.add_scalar("charts/SPS", 0, 100 * i, walltime=1000.0 + i)
        writer.add_scalar("charts/learning_rate", 0, 1, walltime=0.0)
    writer.close()
    marks = measure.read_marks("plainrl", "", tmp_path, learning_starts=100)
    assert marks == [(100 * i, 1000.0 + i) for i in range(2, 12_001)]
    # A peer's are its last line
    assert measure.read_marks("sb3", "a warning\n[[1, 2.5]]", tmp_path, 0) == [[1, 2.5]]


@pytest.mark.parametrize(
    "code, sentence",
    [(2, "warming up\nno environment x\n"), (3, "PlainRL failed with exit code 3: no environment")],
)
def test_a_program_that_fails_ends_in_a_sentence(code, sentence, tmp_path, capsys):
    """A script that refuses its flags, code 2, has said it itself."""
    words = ["sh", "-c", f"echo warming up; echo no environment x; exit {code}"]
    with pytest.raises(SystemExit) as stop:
        measure.run("plainrl", words, tmp_path, tmp_path)
    assert sentence in capsys.readouterr().err + str(stop.value.code)
    assert (stop.value.code == 2) == (code == 2)


def test_other_programs_cores_are_what_is_left_of_the_machines(monkeypatch, tmp_path):
    """All CPU seconds less the program's own, hardly any, by its wall time."""
    seconds = iter([100.0, 107.0])
    monkeypatch.setattr(measure, "busy_seconds", lambda: next(seconds))
    monkeypatch.setattr(measure.time, "time", iter([50.0, 52.0]).__next__)
    words = [sys.executable, "-c", "sum(range(2 * 10**7))"]
    used = measure.run("plainrl", words, tmp_path, tmp_path)[3]
    assert 2.0 < used["others_cores"] < 3.49


def test_a_round_is_measured_as_a_user_would(tmp_path):
    """PlainRL, SB3 and CleanRL's loop, processes of their own, with one set of flags."""
    flags = "--total-timesteps 512 --num-steps 32 --env-id Acrobot-v1 --no-compile"
    args = command.Args(rounds=1, flags=flags)
    found = pd.DataFrame(command.measure_script("ppo", args))
    assert list(found["program"]) == ["plainrl", "sb3", "cleanrl"]
    assert (found["round"] == 1).all() and (found["seed"] == 1).all()
    assert (found["env_id"] == "Acrobot-v1").all() and (found["steps"] == 512).all()
    figures = ["steps_per_second", "start_up_s", "wall_s", "wall_s_1m", "peak_mb"]
    assert (found[figures] > 0).all(axis=None) and (found["others_cores"] >= 0).all()
    assert (found["cache"] == "").all()  # nothing was compiled
    assert found["machine"].str.contains(f"torch {torch.__version__}", regex=False).all()
    assert "PlainRL" in tables.tables(found)["speed_ppo"]


def test_rows_say_whether_the_compilers_cache_was_empty(tmp_path, monkeypatch):
    config = {"args": {"env_id": "x", "seed": 1}, "versions": {"python": "3"}, "git_commit": ""}
    path = tmp_path / "runs" / "plainrl" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config | {"machine": {"cpu": ""}}))
    code = "import os; os.makedirs(os.environ['TORCHINDUCTOR_CACHE_DIR'], exist_ok=True)"
    monkeypatch.setattr(measure, "command_of", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(measure, "read_marks", lambda *_: [(1, 0.0), (2, 1.0)])
    for state in ("empty", "filled"):
        row = measure.measure("plainrl", "ppo", 1, [], tmp_path, tmp_path / "cache")
        assert row["cache"] == state


def test_the_compilers_cache_has_no_space_in_its_path(monkeypatch):
    """g++ gets it without quotes."""
    caches = []
    monkeypatch.setattr(command, "measure", lambda *given: caches.append(given[-1]) or {})
    list(command.measure_script("ppo_atari", command.Args(rounds=2, amp=True)))
    assert len(set(caches)) == 4 and not any(" " in cache.name for cache in caches)


def test_a_run_without_its_compilation_is_refused(monkeypatch, tmp_path, capsys):
    words = [sys.executable, "-c", "print('running without compilation, slower: no g++')"]
    monkeypatch.setattr(measure, "command_of", lambda *_: words)
    with pytest.raises(SystemExit, match="2"):
        measure.measure("plainrl", "ppo", 1, [], tmp_path, tmp_path / "cache")
    assert "the script couldn't be compiled" in capsys.readouterr().err


# Tables and figures


def test_ratios_pair_runs_of_one_round():
    speeds = [(1, "plainrl", 8.0), (1, "sb3", 2.0), (2, "sb3", 10.0), (2, "plainrl", 30.0)]
    speeds += [(3, "plainrl", 6.0), (10, "plainrl", 7.0), (10, "sb3", 7.0)]
    made = pd.DataFrame([make_row(*row) for row in speeds])
    found = tables.ratios(made, "steps_per_second", "plainrl", "sb3")
    assert list(found.items()) == [(1, 4.0), (2, 3.0), (10, 1.0)]
    assert tables.ratios(made, "steps_per_second", "plainrl", "cleanrl").empty


def test_tables(rows):
    """A line for each program and ratio; compiling runs have columns of their own."""
    texts = tables.tables(rows)
    start = "| `ppo_atari`, PongNoFrameskip-v4 |"
    peer, other = "200 (100 to 300)", "400 (200 to 600)"
    ratios = " (8.00 to 8.00)", " (4.00 to 4.00)"
    line = f"{start} float32 | 2 | 1,600 (800 to 2,400) "
    line += f"| {peer} | 8.00{ratios[0]} | 8.00{ratios[0]} "
    line += f"| {other} | 4.00{ratios[1]} | 4.00{ratios[1]} |"
    assert line in texts["speed"]
    line = f"{start} bfloat16 | 1 | 1,200 | {peer} | 4.00 | 4.00 | {other} | 2.00 | 2.00 |"
    assert line in texts["speed"]
    text = texts["speed_ppo_atari"]
    line = "| PlainRL | float32 | 1,600 (800 to 2,400) | 20.0 | 10.0 | 4.2 | 12.5 | "
    assert line + "75 (50 to 100) | 0.5 (0.0 to 1.0) |" in text
    assert "| CleanRL's loop | float32 | 400 (200 to 600) | 15.0 (10.0 to 20.0) | - | " in text
    ratio = "| steps/s, PlainRL / CleanRL's loop | float32 | 4.00 | 4.00 | 4.00 | 4.00, 4.00 |"
    assert ratio in text
    name = "time of 1M steps, Stable-Baselines3 / PlainRL, bfloat16"
    assert f"| {name} | float32 / bfloat16 | 4.00 | 4.00 | 4.00 | 4.00 |" in text
    assert "| steps/s, PlainRL, bfloat16 / PlainRL | bfloat16 / float32 | 0.50 |" in text


def test_a_script_without_a_peer_has_its_own_line(rows):
    """Beside others in a table; it has no ratio, and no bar in the chart."""
    own = [make_row(i, "plainrl", 100.0 * i, script="pqn", env_id="x", cache="") for i in (1, 2)]
    rows = pd.concat([rows, pd.DataFrame(own)])
    texts = tables.tables(rows)
    line = "| `pqn`, x | float32 | 2 | 150 (100 to 200) | - | - | - | - | - | - |"
    assert line in texts["speed"]
    assert "| PlainRL | float32 | 150 (100 to 200) |" in texts["speed_pqn"]
    assert "ratio" not in texts["speed_pqn"]
    assert len(chart.make_figure(rows).axes[0].patches) == 3
    assert peers.programs_of("pqn_atari", amp=True) == ["plainrl", "plainrl --amp"]


def test_a_csv_gives_the_tables_it_was_written_from(rows, tmp_path):
    rows.to_csv(tmp_path / "speed.csv", index=False)
    assert tables.tables(tables.read(tmp_path / "speed.csv")) == tables.tables(rows)


def test_chart_has_the_ratios_to_the_peer(rows):
    rows.loc[(rows["round"] == 2) & (rows["program"] == "plainrl"), "steps_per_second"] = 1800.0
    axes = chart.make_figure(rows).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [7.0, 4.0, 2.0]  # the median of 8 and 6
    assert list(axes.lines[1].get_xdata()) == [6.0, 8.0]
    names = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert names[1:] == ["ppo_atari, PlainRL, bfloat16", "ppo_atari, CleanRL's loop"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("speed*.csv")), ids=lambda path: path.stem)
def test_committed_rounds_are_at_least_four(path):
    assert tables.read(path).groupby(["script", "program"]).size().min() >= 4


# The command


@pytest.fixture
def run_command(monkeypatch):
    """run_command(*flags): benchmark.speed with programs whose speeds are made up."""
    speeds = {"plainrl": 1000.0, "plainrl --amp": 1500.0, "sb3": 500.0, "cleanrl": 400.0}

    def measure_one(program, script, seed, flags, folder, cache):
        row = make_row(seed, program, speeds[program], script=script)
        del row["round"]
        return row

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["speed", *map(str, flags)])
        command.main()

    monkeypatch.setattr(command, "measure", measure_one)
    return run


def test_command_measures_in_alternation(run_command, tmp_path, capsys):
    """What a user gets: a line for each run, the CSV, tables."""
    out = tmp_path / "new" / "speed.csv"
    script = "td3_continuous_action"
    run_command("ppo_atari", script, "ppo_atari", "--amp", "--out", out)
    said = capsys.readouterr().out
    assert "round 1, ppo_atari: CleanRL's loop 400 steps/s" in said
    found = tables.read(out)
    order = ["plainrl", "plainrl --amp", "sb3", "cleanrl"]
    assert list(found["program"]) == 4 * order + 4 * ["plainrl", "sb3"]
    assert list(found["round"].unique()) == [1, 2, 3, 4]
    assert list(found["seed"].unique()) == [101, 102, 103, 104]
    assert tables.tables(found)["speed_ppo_atari"] in said


def test_command_keeps_what_it_measured_before_a_program_failed(run_command, tmp_path, monkeypatch):
    measure_one = command.measure

    def fail(program, *given):
        return measure_one(program, *given) if program != "cleanrl" else sys.exit("error: failed")

    monkeypatch.setattr(command, "measure", fail)
    with pytest.raises(SystemExit, match="error: failed"):
        run_command("ppo_atari", "--out", tmp_path / "speed.csv")
    assert list(tables.read(tmp_path / "speed.csv")["program"]) == ["plainrl", "sb3"]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["ppo_atri"], "invalid choice 'ppo_atri'"),
        (["--rounds", "3"], "error: --rounds must be 4 or more"),
        (["--out", "/proc/x/speed.csv"], "error: can't write /proc/x/speed.csv"),
        ([], "error: the peers need sb3_contrib: pip install"),
    ],
)
def test_command_refuses_bad_input(flags, sentence, run_command, monkeypatch, capsys):
    if flags == []:
        monkeypatch.setattr(command, "find_spec", lambda name: name != "sb3_contrib" or None)
    with pytest.raises(SystemExit, match="2"):
        run_command(*flags)
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("script", peers.TASKS)
def test_scripts_understand_their_command_lines(script, monkeypatch, tmp_path):
    module = import_module(script)
    for program in peers.OURS[: 1 + ("atari" in script)]:
        words = peers.command_of(program, script, 3, ["--gamma", "0.5"], tmp_path)
        monkeypatch.setattr(sys, "argv", words[1:])
        args, _ = module.read_flags()
        module.check_args(args)
        assert (args.seed, args.run_name, args.cuda, args.gamma) == (3, program, False, 0.5)
        assert getattr(args, "amp", False) == (program == "plainrl --amp")
    assert hasattr(args, "amp") == (program == "plainrl --amp")


# Stable-Baselines3


def count_weights(network):
    return sum(x.numel() for x in network.parameters())


# None of these is a default of SB3
COMMON = {"seed": 3, "gamma": 0.9, "learning_rate": 1e-2}
PPO_FLAGS = COMMON | {"gae_lambda": 0.8, "ent_coef": 0.02, "vf_coef": 0.3, "max_grad_norm": 0.7}
PPO_FLAGS |= {"num_envs": 2, "num_steps": 64, "num_minibatches": 2, "update_epochs": 3}
REPLAY_FLAGS = COMMON | {"buffer_size": 5000, "batch_size": 32, "tau": 0.01}
REPLAY_FLAGS["hidden_sizes"] = (32, 16)


@pytest.mark.parametrize("script", [script for script in peers.TASKS if script.startswith("ppo")])
def test_sb3_has_the_flags_of_a_ppo_script(script):
    args = flags_of(script, **PPO_FLAGS, clip_coef=0.3, norm_adv=False)
    given = {"ppo": (4, 2, (32, 16)), "ppo_continuous_action": (17, 6, (32, 16))}
    given["ppo_atari_lstm"] = (4, args)
    if hasattr(args, "hidden_sizes"):
        args.hidden_sizes = (32, 16)
    args.init_log_std = -0.5
    model = sb3.make_ppo(script, args)
    for name in ("seed", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"):
        assert getattr(model, name) == PPO_FLAGS[name]
    assert (model.n_envs, model.n_steps, model.batch_size, model.n_epochs) == (2, 64, 64, 3)
    assert (model.clip_range(1.0), model.clip_range_vf(1.0)) == (0.3, 0.3)
    assert model.lr_schedule(0.5) == 5e-3 and not model.normalize_advantage
    assert model.policy.optimizer.defaults["eps"] == 1e-5
    ours = import_module(script).Agent(*given.get(script, (4,)))
    assert count_weights(model.policy) == count_weights(ours)
    if script == "ppo_continuous_action":
        assert model.env.norm_obs and model.env.norm_reward and model.env.gamma == 0.9
        assert model.policy.log_std_init == -0.5 and model.policy.activation_fn is torch.nn.Tanh


@pytest.mark.parametrize("name", ["ddpg", "td3", "sac"])
def test_sb3_has_the_flags_of_a_script_with_replay(name, monkeypatch):
    """And learns once a step, after --learning-starts, while it is timed."""
    script = f"{name}_continuous_action"
    own = {"exploration_noise": 0.2, "policy_noise": 0.3, "noise_clip": 0.4, "policy_frequency": 3}
    own = {"td3": own, "ddpg": {"exploration_noise": 0.2}, "sac": {"autotune": False, "alpha": 0.3}}
    task = dict(zip(peers.TASKS[script][::2], peers.TASKS[script][1::2]))
    assert task["--random-steps"] == task["--learning-starts"] == "100"
    args = flags_of(script, env_id="Pendulum-v1", **REPLAY_FLAGS, **own[name])
    args.learning_starts, args.total_timesteps = 150, 300
    made = []
    make = sb3.make_off_policy
    monkeypatch.setattr(sb3, "make_off_policy", lambda *given: made.append(make(*given)) or made[0])
    assert [step for step, _ in sb3.train(script, args)] == [200, 300]
    model = made[0]
    assert model._n_updates == 150
    for flag in set(REPLAY_FLAGS) - {"hidden_sizes"}:
        assert getattr(model, flag) == REPLAY_FLAGS[flag]
    agent = import_module(script).Agent(3, 1, (32, 16))
    assert count_weights(model.actor) == count_weights(agent.actor)
    assert count_weights(model.critic) == count_weights(agent.critic)
    if name == "sac":
        assert model.ent_coef == 0.3
    else:
        assert model.action_noise._sigma == [0.2]
    if name == "td3":
        noise = (model.target_policy_noise, model.target_noise_clip)
        assert (*noise, model.policy_delay) == (0.3, 0.4, 3)


@pytest.mark.parametrize("script", ["dqn", "dqn_atari"])
def test_sb3_has_the_flags_of_dqn(script, monkeypatch):
    """And the same network."""
    flags = REPLAY_FLAGS | {"start_e": 0.9, "end_e": 0.2, "exploration_fraction": 0.3}
    if script == "dqn_atari":
        flags = flags | {"buffer_size": 50, "env_id": "PongNoFrameskip-v4"}
        del flags["hidden_sizes"]
    args = flags_of(script, **flags, train_frequency=5, target_network_frequency=60)
    args.learning_starts, args.total_timesteps = 100, 300
    made = []
    make = sb3.make_off_policy
    monkeypatch.setattr(sb3, "make_off_policy", lambda *given: made.append(make(*given)) or made[0])
    monkeypatch.setattr(sb3.torch, "set_num_threads", lambda _: None)
    assert [step for step, _ in sb3.train(script, args)] == [200, 300]
    model = made[0]
    assert model._n_updates == 40 and model.target_update_interval == 60
    schedule = model.exploration_initial_eps, model.exploration_final_eps
    assert (*schedule, model.exploration_fraction) == (0.9, 0.2, 0.3)
    for flag in flags.keys() & set(sb3.SAME_REPLAY):
        assert getattr(model, flag) == flags[flag]
    sizes = (6, False, False) if script == "dqn_atari" else (4, 2, (32, 16), False)
    agent = import_module(script).Agent(*sizes)
    assert count_weights(model.q_net) == count_weights(agent)


# CleanRL


def as_cleanrl(state):
    """The weights of a script's Agent under the names of cleanrl.Agent."""
    renamed = {}
    for name, x in state.items():
        name = name.replace("actor_mean", "actor").replace("actor_logstd", "logstd")
        renamed[re.sub(r"^(actor|critic)\.(weight|bias)", r"\1.0.\2", name)] = x
    return renamed


def make_agents(script, args):
    """The script's Agent and CleanRL's with the same weights, and observations for each."""
    module = import_module(script)
    actions = gym.spaces.Discrete(3)
    if script == "ppo_atari":
        obs = torch.randint(256, (64, 84, 84, 4), dtype=torch.uint8)
        their_obs = obs.permute(0, 3, 1, 2).float()
        ours = module.Agent(3)
    else:
        obs = their_obs = torch.randn(64, 5)
        ours = module.Agent(5, 3, args.hidden_sizes)
    if script == "ppo_continuous_action":
        actions = gym.spaces.Box(-1, 1, (3,))
    theirs = cleanrl.Agent(gym.spaces.Box(-1, 1, their_obs.shape[1:]), actions, args)
    theirs.load_state_dict(as_cleanrl(ours.state_dict()))
    return ours, theirs, obs, their_obs


@pytest.mark.parametrize("script", peers.PEERS["cleanrl"])
def test_an_update_is_that_of_the_script(script):
    """Three steps of Adam on batches where ratios and values are clipped, and the gradient."""
    torch.manual_seed(1)
    args = flags_of(script, ent_coef=0.01)
    module = import_module(script)
    ours, theirs, obs, their_obs = make_agents(script, args)
    actions = theirs(their_obs)[0].detach()
    optimizer = module.Adam(ours.parameters(), eps=1e-5)
    their_optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-3, eps=1e-5)
    names = ("clip_coef", "ent_coef", "vf_coef", "max_grad_norm")
    coefs = {"lr": torch.tensor(1e-3)} | {x: torch.tensor(getattr(args, x)) for x in names}
    for scale in (0.01, 10.0, 0.1):
        with torch.no_grad():
            _, logprobs, _, values = theirs(their_obs, actions)
        batch = {"actions": actions, "logprobs": logprobs + 0.3 * torch.randn(64)}
        batch |= {"advantages": scale * (torch.randn(64) + 1), "values": values + torch.randn(64)}
        batch["returns"] = values + scale * torch.randn(64)
        indices = torch.arange(64)[None]
        module.update_minibatches(optimizer, ours, batch | {"obs": obs}, indices, coefs, args)
        cleanrl.update(theirs, their_optimizer, batch | {"obs": their_obs}, args)
    for name, weights in as_cleanrl(ours.state_dict()).items():
        torch.testing.assert_close(weights, theirs.state_dict()[name], rtol=0, atol=1e-4)


def test_advantages_are_those_of_the_script_where_nothing_is_truncated():
    script = import_module("ppo_continuous_action")
    rng = np.random.default_rng(1)
    rewards, values = rng.standard_normal((2, 50, 3), np.float32)
    last_value = rng.standard_normal(3, np.float32)
    ends = rng.random((50, 3)) < 0.2
    next_values = np.concatenate((values[1:], last_value[None]))
    expected = script.compute_advantages(rewards, values, next_values, ends, ends, 0.99, 0.95)
    begins = np.concatenate((np.zeros((1, 3)), ends)).astype(np.float32)
    tensors = map(torch.from_numpy, (rewards, values, begins[:-1], last_value, begins[-1]))
    found = cleanrl.compute_advantages(*tensors, SimpleNamespace(gamma=0.99, gae_lambda=0.95))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_cleanrls_loop_learns_from_what_it_played(monkeypatch):
    """Before the first update of an iteration the batch is what the agent still thinks of it.

    The Pendulum's episodes of 200 steps begin at once after a time limit.
    """
    args = flags_of("ppo_continuous_action", env_id="Pendulum-v1", num_envs=2, num_steps=250)
    args.total_timesteps, args.num_minibatches, args.update_epochs = 1000, 2, 3
    update, compute_advantages = cleanrl.update, cleanrl.compute_advantages
    rates = []
    begins = []

    def check_played(rewards, values, dones, *given):
        begins.append(dones.nonzero().tolist())
        assert (rewards != 0).all()
        return compute_advantages(rewards, values, dones, *given)

    def check_batch(agent, optimizer, batch, args):
        if len(rates) % 6 == 0:
            with torch.no_grad():
                _, logprobs, _, values = agent(batch["obs"], batch["actions"])
            torch.testing.assert_close(logprobs, batch["logprobs"])
            torch.testing.assert_close(values, batch["values"])
            torch.testing.assert_close(batch["returns"], batch["advantages"] + values)
        assert optimizer.defaults["eps"] == 1e-5
        rates.append(optimizer.param_groups[0]["lr"])
        return update(agent, optimizer, batch, args)

    monkeypatch.setattr(cleanrl, "compute_advantages", check_played)
    monkeypatch.setattr(cleanrl, "update", check_batch)
    assert [step for step, _ in cleanrl.train("ppo_continuous_action", args)] == [500, 1000]
    assert begins == [[[200, 0], [200, 1]], [[150, 0], [150, 1]]]
    assert rates == [args.learning_rate] * 6 + [args.learning_rate / 2] * 6


def test_environments_have_cleanrls_wrappers():
    env = cleanrl.make_env("ppo_continuous_action", flags_of("ppo_continuous_action"))
    names = "FlattenObservation RecordEpisodeStatistics ClipAction NormalizeObservation "
    names += "TransformObservation NormalizeReward TransformReward"
    assert [wrapper.name for wrapper in env.spec.additional_wrappers] == names.split()
    env.reset(seed=1)
    steps = [env.step(np.full(6, 100.0)) for _ in range(50)]
    assert all(abs(reward) <= 10 and (abs(obs) <= 10).all() for obs, reward, *_ in steps)
    game = cleanrl.make_env("ppo_atari", flags_of("ppo_atari"))
    names = "FrameStackObservation GrayscaleObservation ResizeObservation ClipRewardEnv "
    names += "FireResetEnv EpisodicLifeEnv MaxAndSkipEnv NoopResetEnv RecordEpisodeStatistics"
    assert re.findall(r"<(\w+)", str(game))[:9] == names.split()
    assert game.observation_space.shape == (4, 84, 84)
