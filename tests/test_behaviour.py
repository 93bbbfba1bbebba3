"""What every script does the same way, on the toys of toys.py: each test runs for each script.

Runs are processes that leave files. Where a toy recorded what was done to it, the record says what
the files must have. A script's own algorithm is tested in the script's own file.
"""

import importlib
import json
import os
import re
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import toys  # noqa: F401  its games are registered by this
from processes import (
    RUN,
    contents,
    differences,
    episode_rows,
    events,
    leaves,
    load_checkpoint,
    outcome,
    progress,
    read_record,
    run_process,
)

COMMON = "--num-threads 1 --run-name run"
VECTOR = f"{COMMON} --num-envs 3 --eval-episodes 3"
# 24 iterations of 150 steps. An environment gets its second seed after 1,000 of its 1,200 steps
PPO = f"{VECTOR} --num-steps 50 --num-minibatches 3 --update-epochs 2 --total-timesteps 3600"
GAME = (
    f"--env-id ToyNoFrameskip-v4 {COMMON} --num-envs 2 --eval-episodes 2 --num-steps 8"
    " --num-minibatches 2 --update-epochs 1 --total-timesteps 96 --checkpoint-interval 4"
)
REPLAY = (
    f"--env-id toys:Continuous-v0 {VECTOR} --hidden-sizes 16 16 --batch-size 16 --buffer-size 700"
    " --learning-starts 100 --random-steps 60 --updates-per-step 0.2 --norm-obs --norm-reward"
    " --total-timesteps 3600 --checkpoint-interval 400 --eval-interval 1000"
)
# The flags of a long run, which has checkpoints after 30, 60 and 90 % or so, and those that make it
# a short one
SETTINGS = {
    "ppo_continuous_action": (
        f"--env-id toys:Continuous-v0 {PPO} --checkpoint-interval 7",
        "--total-timesteps 600",
    ),
    "ppo": (
        f"--env-id toys:Multi-v0 {PPO} --checkpoint-interval 7",
        "--total-timesteps 600",
    ),
    "a2c": (
        f"--env-id toys:Multi-v0 {VECTOR} --num-steps 5 --total-timesteps 3600"
        " --checkpoint-interval 70",
        "--total-timesteps 300",
    ),
    "vpg": (
        f"--env-id toys:Multi-v0 {VECTOR} --total-timesteps 3600 --checkpoint-interval 35",
        "--total-timesteps 300",
    ),
    "ppo_lstm": (
        f"--env-id toys:Multi-v0 {PPO} --checkpoint-interval 7 --hidden-size 16",
        "--total-timesteps 600",
    ),
    "ddpg_continuous_action": (
        f"{REPLAY} --policy-frequency 2 --noise-type ou --exploration-noise 0.3",
        "--total-timesteps 300",
    ),
    "ppo_atari": (GAME, "--total-timesteps 64"),
    "ppo_atari_lstm": (f"{GAME} --hidden-size 16", "--total-timesteps 64"),
}
# These scripts are here only in some tests; their own files have more. Their section Run is the
# same text as everyone's. ALE's vector plays no toys, but real games
REAL_GAME = (
    f"--env-id PongNoFrameskip-v4 {COMMON} --num-envs 2 --eval-episodes 1 --eval-max-steps 5"
    " --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 96"
    " --emulator-threads 1"
)
FEW_TESTS = {
    "ppo_atari_vector": (REAL_GAME, "--total-timesteps 64"),
    "ppo_atari_lstm_vector": (f"{REAL_GAME} --hidden-size 16", "--total-timesteps 64"),
    "td3_continuous_action": (REPLAY, "--total-timesteps 300"),
    "sac_continuous_action": (REPLAY, "--total-timesteps 300"),
    "ddpg_lstm": (
        f"{REPLAY} --hidden-size 8 --sequence-length 4 --burn-in 2",
        "--total-timesteps 300",
    ),
}
OFF_POLICY = {
    "ddpg_continuous_action",
    "td3_continuous_action",
    "sac_continuous_action",
    "ddpg_lstm",
}
OTHER_CHECKPOINTS = {"a2c": 31, "ddpg_continuous_action": 1000}


class Script:
    """A script with its flags."""

    def __init__(self, name, server):
        self.name = name
        self.path = Path(__file__).resolve().parents[1] / f"{name}.py"
        self.server = server
        self.module = importlib.import_module(name)
        self.flags, self.shorter = (SETTINGS | FEW_TESTS)[name]
        self.flags += " --no-compile"
        self.short = f"{self.flags} {self.shorter}"
        self.is_game = "atari" in name
        self.is_off_policy = name in OFF_POLICY
        self.is_continuous = "continuous" in name or self.is_off_policy
        self.num_envs = self.flag("num-envs")
        self.num_evaluations = self.flag("eval-episodes")

    def flag(self, name, flags=None):
        """The number that a flag has."""
        return int(re.findall(rf"--{name} (\d+)", flags or self.flags)[-1])

    def on(self, variant, flags=None):
        """Flags, else those of a short run, on a variant of the toy."""
        return re.sub(r"(Toy|toys:\w+?)(NoF|-v0)", rf"\1{variant}\2", flags or self.short)

    def run(self, cwd, flags, **options):
        return self.server.run(self.path, cwd, flags, **options)

    def succeed(self, cwd, flags, **options):
        """Runs it to an end that must be good."""
        result = self.run(cwd, flags, **options)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    def steps(self, record):
        """{environment: its steps} in a record; a step is what the agent calls one.

        In a game that is four frames; the wrappers' no-ops before the agent's first are left out.
        """
        steps = {}
        to_come = {}  # frames of the step in progress
        for place, event in enumerate(record):
            env = event["env"]
            if "seed" in event:
                to_come[env] = None
                steps.setdefault(env, [])
                continue
            if to_come[env] is None and not event["by_agent"]:
                continue
            if to_come[env]:
                step = steps[env][-1]
                step["reward"] += event["reward"]
                step.update({name: event[name] for name in ("terminated", "truncated")})
                to_come[env] -= 1
            else:
                steps[env].append(event | {"place": place})
                to_come[env] = 3 if self.is_game else 0
            if event["terminated"] or event["truncated"]:
                to_come[env] = 0
        return steps

    def episodes(self, steps):
        """The episodes in the steps of one environment: return, length, end, and steps so far."""
        episodes = []
        total = 0.0
        length = 0
        count = 0
        for step in steps:
            total += step["reward"]
            length += 1
            count += step["by_agent"]
            if step["terminated"] or step["truncated"]:
                ended_by = "termination" if step["terminated"] else "truncation"
                episodes.append((total, length, ended_by, count))
                total = 0.0
                length = 0
        return episodes

    def rows(self, record):
        """What episodes.csv must have of a recorded run, but the time."""
        steps = self.steps(record)
        rows = []
        for env in range(self.num_envs):
            ends = [x for x in steps[env] if x["terminated"] or x["truncated"]]
            for step, (total, length, ended_by, count) in zip(ends, self.episodes(steps[env])):
                global_step = self.num_envs * count
                if self.name == "vpg":
                    global_step = self.steps_at_end_of_round(record, step["place"])
                rows.append((global_step, env, total, length, ended_by))
        return sorted(rows)

    def steps_at_end_of_round(self, record, place):
        """The training steps of all environments until each one that plays has made its own."""
        mine = [x["env"] for x in record if "action" in x and x["env"] < self.num_envs]
        i = sum("action" in x and x["env"] < self.num_envs for x in record[: place + 1])
        while i < len(mine) and mine[i] > mine[i - 1]:
            i += 1
        return i


def seeds(record):
    """{environment: its seeds}, without that of the trial when it was made."""
    found = {}
    for event in record:
        if "seed" in event:
            found.setdefault(event["env"], []).append(event["seed"])
    return {env: [seed for seed in mine[1:] if seed is not None] for env, mine in found.items()}


def first_states(record):
    """{environment: its state after the first reset with its own seed}."""
    found = {}
    for event in record:
        if "seed" in event:
            found.setdefault(event["env"], []).append(event["x"])
    return {env: states[1] for env, states in found.items()}


def scalars(run_dir, tag):
    """{step: value}, in order."""
    return dict(sorted((step, value) for name, step, value in events(run_dir) if name == tag))


def assert_fails(result, code, *words):
    """It ended with this code, no stack trace, and one sentence on stderr that has these words."""
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert not [word for word in words if word.lower() not in result.stderr.lower()], result.stderr


def without_lock(files):
    """The contents of a run's folder, but for the file that is its lock."""
    return {path: data for path, data in files.items() if path.name != "lock"}


def assert_finite(checkpoint):
    """All of its tensors, networks and statistics and what else there is, are numbers."""
    spoilt = []
    for name, part in checkpoint.items():
        for path, leaf in leaves(part, name).items():
            if isinstance(leaf, tuple) and leaf[0].startswith("torch.float"):
                array = np.frombuffer(leaf[2], leaf[0].removeprefix("torch."))
                spoilt += [path] * (not np.isfinite(array).all())
    assert spoilt == []


def env_steps(record, env=0):
    """The number of steps, in a game of frames, of an environment in a record."""
    return sum("action" in event and event["env"] == env for event in record)


@pytest.fixture(scope="module", params=SETTINGS)
def script(request, server):
    return Script(request.param, server)


every_script = pytest.mark.parametrize("script", [*SETTINGS, *FEW_TESTS], indirect=True)


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """A run that nothing interrupted, recorded by its toys."""
    cwd = tmp_path_factory.mktemp("whole")
    result = script.succeed(cwd, script.flags, TOY_RECORD=cwd / "record")
    return SimpleNamespace(
        cwd=cwd,
        run_dir=cwd / RUN,
        result=result,
        outcome=outcome(cwd / RUN),
        record=read_record(cwd / "record"),
    )


@pytest.fixture(scope="module")
def same(script, tmp_path_factory):
    """A short run on toys that all look the same, whatever is done to them."""
    cwd = tmp_path_factory.mktemp("same")
    script.succeed(cwd, script.on("Same"), TOY_RECORD=cwd / "record")
    return SimpleNamespace(run_dir=cwd / RUN, record=read_record(cwd / "record"))


@pytest.fixture(scope="module")
def short(script, tmp_path_factory):
    """A short run that nothing interrupted."""
    cwd = tmp_path_factory.mktemp("short")
    result = script.succeed(cwd, script.short, TOY_RECORD=cwd / "record")
    return SimpleNamespace(
        run_dir=cwd / RUN, result=result, record=read_record(cwd / "record"), cwd=cwd
    )


# Seeds and determinism


def test_same_seed_same_bits(script, whole, tmp_path):
    """In a process of its own, which is no fork, and however often the run is saved."""
    interval = OTHER_CHECKPOINTS.get(script.name, 5)
    result = run_process(script.path, tmp_path, f"{script.flags} --checkpoint-interval {interval}")
    assert result.returncode == 0, result.stderr
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_other_seed_other_run(script, tmp_path):
    """Other networks, environments, actions, and numbers of Python's and NumPy's generators."""
    found = []
    for seed in (1, 2):
        cwd = tmp_path / str(seed)
        cwd.mkdir()
        flags = f"{script.short} --seed {seed} --checkpoint-interval 1000000"
        frames = 100 if script.is_game else 15
        env = {"TOY_FAULT": f"SIGKILL {frames}@0", "TOY_RECORD": cwd / "record"}
        assert script.run(cwd, flags, **env).returncode == -signal.SIGKILL
        found.append((load_checkpoint(cwd / RUN), read_record(cwd / "record")))
    (a, a_record), (b, b_record) = found
    assert a["run"]["global_step"] == b["run"]["global_step"] == 0
    random_weights = [name for name, x in a["agent"].items() if len(x.unique()) > 1]
    assert len(random_weights) > 2
    assert all((a["agent"][name] != b["agent"][name]).any() for name in random_weights)
    a_states, b_states = first_states(a_record), first_states(b_record)
    a_steps, b_steps = script.steps(a_record), script.steps(b_record)
    assert len(a_states) == len(b_states) == script.num_envs
    pairs = []
    for env in range(script.num_envs):
        assert a_states[env] != b_states[env]
        pairs += zip(a_steps[env], b_steps[env])
    assert len(pairs) > 20
    equal = [np.allclose(x["action"], y["action"], atol=0.01) for x, y in pairs]
    assert np.mean(equal) < 0.7
    for k in (0, 1):
        assert all(x["luck"][k] != y["luck"][k] for x, y in pairs)


def test_every_environment_has_its_own_seeds(script, whole):
    """No two environments share one, and an evaluation shares none with the training."""
    by_env = seeds(whole.record)
    training = [seed for env in range(script.num_envs) for seed in by_env[env]]
    assert len(training) == script.num_envs * (1 if script.is_game else 2)
    assert len({*training}) == len(training)
    states = first_states(whole.record)
    assert len({str(states[env]) for env in range(script.num_envs)}) == script.num_envs
    evaluation = [seed for env in by_env if env >= script.num_envs for seed in by_env[env]]
    assert evaluation and not {*evaluation} & {*training}


def test_every_environment_has_its_own_noise(script, same):
    """Where two environments show the same, they are not treated the same."""
    steps = script.steps(same.record)
    first, second = ([x["action"] for x in steps[env] if x["by_agent"]] for env in (0, 1))
    assert len(first) >= 20
    equal = [a == b for a, b in zip(first, second)]
    assert np.mean(equal) < 0.7


def test_an_evaluation_has_no_noise_no_memory_and_learns_nothing(script, same):
    """Its episodes, in which the toy shows the same each time, are played the same."""
    steps = script.steps(same.record)[max(seeds(same.record))]
    actions = [x["action"] for x in steps]
    count = script.num_evaluations
    assert len(actions) == 7 * count
    assert all(actions[7 * i : 7 * i + 7] == actions[:7] for i in range(1, count))


# Logs


def test_episodes_are_logged_as_they_were(script, whole):
    """Step, environment, return to the last bit, length, and how each episode ended."""
    rows = []
    for row in episode_rows(whole.run_dir):
        numbers = [int(row[name]) for name in ("global_step", "env", "length")]
        rows.append((*numbers[:2], float(row["return"]), numbers[2], row["ended_by"]))
    assert rows == script.rows(whole.record)
    assert {row[4] for row in rows} == {"termination", "truncation"}
    assert {row[1] for row in rows} == set(range(script.num_envs))
    walls = [float(row["wall_seconds"]) for row in episode_rows(whole.run_dir)]
    assert walls == sorted(walls)


def test_tensorboard_has_the_episodes_too(script, whole):
    rows = episode_rows(whole.run_dir)
    for tag, column in ("episodic_return", "return"), ("episodic_length", "length"):
        logged = [x[1:] for x in events(whole.run_dir) if x[0] == f"charts/{tag}"]
        expected = [(int(row["global_step"]), np.float32(row[column])) for row in rows]
        assert sorted(logged) == sorted(expected)


def test_logs_are_on_the_disk_when_a_checkpoint_is(script, whole):
    """It knows their sizes; after the last one nothing is logged."""
    sizes = progress(whole.run_dir)["log_sizes"]
    logs = [whole.run_dir / "episodes.csv", *whole.run_dir.glob("events.*")]
    assert len(logs) == 2
    assert {path.name: path.stat().st_size for path in logs}.items() <= sizes.items()


def test_a_file_is_whole_before_it_has_its_name(script, tmp_path, monkeypatch):
    """Its bytes are with the system when they are brought to the disk, and that comes first."""
    calls = []
    fsync, replace = os.fsync, os.replace

    def look_and_fsync(descriptor):
        calls.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def look_and_replace(source, target):
        calls.append(("replace", Path(source).stat().st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", look_and_fsync)
    monkeypatch.setattr(os, "replace", look_and_replace)
    script.module.write_whole(tmp_path / "file.pt", b"12345")
    assert calls[:2] == [("fsync", 5), ("replace", 5)]
    assert (tmp_path / "file.pt").read_bytes() == b"12345"


def test_the_learning_rate_falls_to_zero(script, whole, short, tmp_path):
    """It is what the update takes: without annealing the networks are others."""
    if script.is_off_policy:
        assert not hasattr(script.module.Args, "anneal_lr")
        return
    logged = scalars(whole.run_dir, "charts/learning_rate")
    steps = list(logged)
    first = script.module.Args.learning_rate
    remaining = [1 - i / len(steps) for i in range(len(steps))]
    if script.name == "vpg":  # its iterations differ in length
        remaining = [1 - step / script.flag("total-timesteps") for step in [0, *steps[:-1]]]
    assert len(steps) >= 6
    np.testing.assert_allclose(list(logged.values()), first * np.array(remaining), rtol=1e-6)

    script.succeed(tmp_path, f"{script.short} --no-anneal-lr")
    rates = [*scalars(tmp_path / RUN, "charts/learning_rate").values()]
    assert rates == pytest.approx([first] * len(rates))
    assert any("/agent/" in name for name in differences(short.run_dir, tmp_path / RUN))


@every_script
def test_explained_variance(script, run_script):
    """Of returns by values, in numbers and in the log."""
    if script.is_off_policy:
        assert not hasattr(script.module, "explained_variance")
        return
    returns = np.array([[1.0, 2.0], [3.0, 6.0]])
    values = np.array([[1.0, 1.0], [4.0, 4.0]])
    errors = [0.0, 1.0, -1.0, 2.0]
    expected = 1 - np.var(errors) / np.var([1.0, 2.0, 3.0, 6.0])
    assert script.module.explained_variance(values, returns) == pytest.approx(expected)
    assert np.isnan(script.module.explained_variance(values, np.ones((2, 2))))

    module = run_script(script.path, *script.short.split())
    values, returns = (np.ravel(getattr(module, name)) for name in ("values", "returns"))
    expected = 1 - np.var(returns - values) / np.var(returns)
    logged = scalars(Path(RUN), "losses/explained_variance")
    assert [*logged.values()][-1] == pytest.approx(expected, rel=1e-4)


@every_script
def test_optimizer(script, run_script):
    """Adam's epsilon is baselines' 1e-5 (G11), but DDPG's is PyTorch's."""
    module = run_script(script.path, *script.short.split())
    if script.is_off_policy:
        optimizers = [module.learner.actor_optimizer, module.learner.critic_optimizer]
        assert [optimizer.eps for optimizer in optimizers] == [1e-8, 1e-8]
        return
    kind = module.FlatRMSprop if script.name == "a2c" else module.FlatAdam
    assert type(module.optimizer) is kind
    assert module.optimizer.eps == 1e-5
    if script.name == "a2c":
        flags = script.short.replace("--run-name run", "--run-name adam --optimizer adam")
        optimizer = run_script(script.path, *flags.split()).optimizer
        assert (type(optimizer).__name__, optimizer.eps) == ("FlatAdam", 1e-5)


@every_script
def test_the_clip_range_falls_to_zero(script, run_script):
    """With --anneal-clip, linearly: in the last of N iterations it is an Nth (X1)."""
    if not script.name.startswith("ppo"):
        return
    for number, (flag, part) in enumerate({"--anneal-clip": None, "--no-anneal-clip": 1.0}.items()):
        flags = script.short.replace("--run-name run", f"--run-name run-{number} {flag}")
        module = run_script(script.path, *flags.split(), "--clip-coef", "0.25")
        part = part or 1 / module.args.num_iterations
        assert module.coefs["clip_coef"].item() == pytest.approx(0.25 * part)


# Ends of episodes


@pytest.fixture(scope="module")
def ends(script, tmp_path_factory):
    """{how all episodes end: folder of a short run}; the rest of the run is the same."""
    folders = {}
    for how in ("Both", "Terminated", "Truncated"):
        cwd = tmp_path_factory.mktemp(how)
        script.succeed(cwd, script.on(how))
        folders[how] = cwd / RUN
    return folders


def test_both_ends_at_once_are_a_termination(script, ends):
    """To the last bit: nothing is bootstrapped, which would change the networks."""
    assert differences(ends["Both"], ends["Terminated"]) == []
    assert {row["ended_by"] for row in episode_rows(ends["Both"])} == {"termination"}
    bootstrapped = differences(ends["Both"], ends["Truncated"])
    assert any("/agent/" in name for name in bootstrapped)


def test_a_time_limit_is_a_truncation(script, ends):
    rows = episode_rows(ends["Truncated"])
    assert len(rows) > 2 and {row["ended_by"] for row in rows} == {"truncation"}


def test_no_bootstrap_truncated_makes_a_time_limit_a_termination(script, ends, tmp_path):
    if script.is_off_policy:
        assert not hasattr(script.module.Args, "bootstrap_truncated")
        return
    script.succeed(tmp_path, f"{script.on('Truncated')} --no-bootstrap-truncated")
    found = differences(ends["Terminated"], tmp_path / RUN)
    assert [name for name in found if not name.startswith("episodes/")] == []


def test_an_end_at_every_step(script, tmp_path):
    """Every step is an episode, and each has its row."""
    result = script.succeed(tmp_path, script.on("Each"), TOY_RECORD=tmp_path / "record")
    rows = episode_rows(tmp_path / RUN)
    steps = script.steps(read_record(tmp_path / "record"))
    assert len(rows) == sum(len(steps[env]) for env in range(script.num_envs))
    assert {row["length"] for row in rows} == {"1"}
    assert len(rows) == progress(tmp_path / RUN)["global_step"]
    assert "evaluation:" in result.stdout


# Masks


def test_masks_hold_as_long_as_they_are_there(script, whole):
    """In training and evaluation; without one, all actions are possible, also right after one."""
    if script.is_game or script.is_continuous:
        assert not hasattr(script.module, "ActionMask")
        return
    free = [set(), set()]
    masked = 0
    for env, steps in script.steps(whole.record).items():
        for previous, step in zip([None, *steps], steps):
            parts = zip(step["mask"] or [], step["action"])
            assert all(mask[action] for mask, action in parts), step
            masked += step["mask"] is not None
            if env < script.num_envs and previous and previous["mask"] and not step["mask"]:
                for k, action in enumerate(step["action"]):
                    free[k].add(action)
    assert masked > 1000
    assert free == [{0, 1, 2, 3}, {0, 1, 2}]


# What is no number


def test_what_is_no_number_ends_the_run(script, short, tmp_path):
    """In its iteration, here the third, which is named.

    The checkpoint from before it is whole: the run can go on.
    """
    steps = [step for step in script.steps(short.record)[0] if step["by_agent"]]
    if script.is_off_policy:
        number = 70
    elif script.name == "vpg":
        number = sum(length for _, length, *_ in script.episodes(steps)[:2])
    else:
        number = 2 * script.flag("num-steps") + 1
    place = sum("action" in event for event in short.record[: steps[number]["place"] + 1])
    for what in ["reward"] if script.is_game else ["reward", "observation"]:
        cwd = tmp_path / what
        cwd.mkdir()
        flags = f"{script.short} --checkpoint-interval {100 if script.is_off_policy else 2}"
        record = cwd / "record"
        result = script.run(cwd, flags, TOY_FAULT=f"nan-{what} {place}", TOY_RECORD=record)
        record = read_record(record)
        (env,) = (event["env"] for event in record if event.get("spoilt"))
        mine = [step for step in script.steps(record)[env] if step["by_agent"]]
        spoilt = (i for i, x in enumerate(mine) if x["spoilt"] or np.isnan(x["reward"]))
        index = next(spoilt)
        checkpoint = load_checkpoint(cwd / RUN)
        if script.is_off_policy:
            assert_fails(result, 1, f"step {script.num_envs * index}:", "not finite")
            assert 0 < checkpoint["run"]["global_step"] <= script.num_envs * index
        else:
            assert_fails(result, 1, "iteration 3:", "not finite", str(RUN))
            assert checkpoint["run"]["iteration"] == 2
        assert_finite(checkpoint)
        script.succeed(cwd, f"--resume {RUN}")


def test_weights_that_become_infinite_in_the_last_step_are_not_saved(script, tmp_path):
    flags = f"{script.flags} --learning-rate 3e38"
    if script.is_off_policy:
        flags += " --total-timesteps 120 --learning-starts 117"
    elif script.name == "vpg":
        flags += " --total-timesteps 1"
    else:
        flags += f" --total-timesteps {script.num_envs * script.flag('num-steps')}"
    result = script.run(tmp_path, flags)
    assert_fails(result, 1, "not finite")
    assert progress(tmp_path / RUN)["global_step"] == 0
    assert_finite(load_checkpoint(tmp_path / RUN))
    assert not (tmp_path / RUN / "evaluation.json").exists()


# Stop and resume


def test_resume_after_kills(script, whole, tmp_path):
    """In the first iteration, between checkpoints, and in the last evaluation.

    The end is that of a run which nothing interrupted, which is filmed besides; so are the videos.
    """
    run_dir = tmp_path / RUN
    interval = 2 if script.is_game else 40
    flags = f"{script.flags} --capture-video --video-interval {interval}"
    training = [x for x in whole.record if x["env"] == 0 and "action" in x]
    first = next(i for i, x in enumerate(training) if x["by_agent"]) + 2
    result = script.run(tmp_path, flags, TOY_FAULT=f"SIGKILL {first}@0")
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert progress(run_dir)["iteration"] == 0

    fault = f"SIGKILL {int(0.93 * len(training))}@0"
    result = script.run(tmp_path, f"--resume {RUN}", TOY_FAULT=fault)
    assert result.returncode == -signal.SIGKILL, result.stderr
    saved = progress(run_dir)
    assert 0 < saved["global_step"] < 0.93 * script.flag("total-timesteps")
    if not script.is_game:  # whose logs are too short to reach the disk
        sizes = saved["log_sizes"]
        logs = [run_dir / "episodes.csv", *run_dir.glob("events.*")]
        assert sum(path.stat().st_size for path in logs) > sum(sizes[path.name] for path in logs)
    unknown = run_dir / "events.out.tfevents.1.unknown"
    shutil.copyfile(max(run_dir.glob("events.*"), key=lambda path: path.stat().st_size), unknown)
    (run_dir / "episodes.csv.bak").write_text("the user's own")

    fault = f"SIGKILL 3@{script.num_envs}"
    result = script.run(tmp_path, f"--resume {RUN}", TOY_FAULT=fault)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert progress(run_dir)["global_step"] == progress(whole.run_dir)["global_step"]
    assert not (run_dir / "evaluation.json").exists()

    result = script.succeed(tmp_path, f"--resume {RUN}")
    assert "can't be brought back" not in result.stdout
    assert differences(whole.outcome, run_dir) == []
    assert not unknown.exists() or unknown.stat().st_size == 0
    assert (run_dir / "episodes.csv.bak").read_text() == "the user's own"
    rows = episode_rows(run_dir)
    walls = [float(row["wall_seconds"]) for row in rows]
    assert walls == sorted(walls)
    assert progress(run_dir)["recent_returns"] == [float(x["return"]) for x in rows[-100:]]

    count = sum(row["env"] == "0" for row in rows)
    videos = {path.name for path in (run_dir / "videos").glob("*.mp4")}
    expected = {f"episode-{i}.mp4" for i in range(0, count, interval)}
    assert videos - {f"episode-{count}.mp4"} == expected  # the last may be unfinished
    played = {path.name for path in (run_dir / "videos/evaluation").iterdir()}
    assert played == {f"episode-{i}.mp4" for i in range(script.num_evaluations)}


@pytest.fixture(scope="module")
def stopped(script, whole, tmp_path_factory):
    """The run of `whole`, stopped by SIGTERM after 40 %: its folder and what the process gave."""
    cwd = tmp_path_factory.mktemp("stopped")
    fault = f"SIGTERM {int(0.4 * env_steps(whole.record))}@0"
    return cwd / RUN, script.run(cwd, script.flags, TOY_FAULT=fault)


def test_resume_after_a_signal(script, whole, stopped, tmp_path):
    """SIGTERM: the iteration is finished and saved. The message says how to go on."""
    stopped_run, result = stopped
    assert result.returncode == 143 and result.stderr == "", result.stderr
    saved = progress(stopped_run)
    step = saved["global_step"]
    message = f"stopped at step {step}; go on with: python {script.path.name} --resume {RUN}"
    assert message in result.stdout
    assert saved["iteration"] % script.flag("checkpoint-interval") != 0
    assert not (stopped_run / "evaluation.json").exists()
    shutil.copytree(stopped_run, tmp_path / RUN)
    script.succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_resume_where_an_episode_does_not_come_back(script, tmp_path):
    """Episodes that end sooner than they did: new ones start, and the run goes on to its end.

    No step follows the end of an episode. --evaluate doesn't need where the environments were.
    """
    fault = f"SIGTERM {130 if script.is_game else 70}@0"
    assert script.run(tmp_path, script.short, TOY_FAULT=fault).returncode == 143
    end = 9 if script.is_game else 2
    result = script.succeed(tmp_path, f"--evaluate {RUN}", TOY_END=end)
    assert "can't be brought back" not in result.stdout and "evaluation:" in result.stdout
    result = script.succeed(tmp_path, f"--resume {RUN}", TOY_END=end)
    told = result.stdout.count("an environment can't be brought back to where it was")
    assert 0 < told <= script.num_envs and "evaluation:" in result.stdout


def test_resume_of_a_finished_run(script, whole):
    """Says so, ends well, and changes nothing."""
    before = contents(whole.run_dir)
    result = script.succeed(whole.cwd, f"--resume {RUN}")
    assert "is finished" in result.stdout
    assert contents(whole.run_dir) == before


def test_two_runs_never_share_a_folder(script, whole, tmp_path):
    """Without --run-name, the name has the second: here, another run has those to come."""
    cwd = tmp_path
    shutil.copytree(whole.run_dir, cwd / RUN)
    before = contents(cwd / RUN)
    name = re.search(r"--env-id (\S+)", script.short)[1].replace(":", "-")
    now = int(time.time())
    for i in range(60):
        (cwd / "runs" / f"{name}__{script.name}__1__{now + i}").symlink_to("run")
    assert_fails(script.run(cwd, script.short.replace("--run-name run", "")), 2, "--run-name")
    assert without_lock(contents(cwd / RUN)) == without_lock(before)


@every_script
def test_a_run_is_named_by_what_it_is(script, tmp_path):
    """Slashes and colons of names become dashes; here the experiment has one."""
    flags = script.short.replace("--run-name run", "--exp-name a/b --seed 7")
    script.succeed(tmp_path, flags)
    (folder,) = (tmp_path / "runs").iterdir()
    env_id, exp_name, seed, unixtime = folder.name.split("__")
    assert env_id == re.search(r"--env-id (\S+)", script.short)[1].replace(":", "-")
    assert (exp_name, seed) == ("a-b", "7")
    assert abs(int(unixtime) - time.time()) < 100


# Evaluation


def test_evaluation_is_of_the_episodes_that_were_played(script, whole):
    evaluation = json.loads((whole.run_dir / "evaluation.json").read_text())
    steps = script.steps(whole.record)[max(seeds(whole.record))]
    episodes = script.episodes(steps)
    assert len(episodes) == script.num_evaluations
    assert evaluation["returns"] == [episode[0] for episode in episodes]
    assert evaluation["lengths"] == [episode[1] for episode in episodes]
    mean = np.mean(evaluation["returns"])
    assert f"evaluation: {mean:.1f} +- " in whole.result.stdout
    assert f"finished: everything is in {RUN}" in whole.result.stdout


def test_evaluate_repeats_the_evaluation(script, whole, tmp_path):
    """To the last bit, and it changes nothing; also with more episodes."""
    before = contents(whole.run_dir)
    for more in ("", f" --eval-episodes {script.num_evaluations + 1}"):
        path = tmp_path / f"record{len(more)}"
        result = script.succeed(whole.cwd, f"--evaluate {RUN}{more}", TOY_RECORD=path)
        record = read_record(path)
        returns = [x[0] for x in script.episodes(script.steps(record)[max(seeds(record))])]
        evaluation = json.loads((whole.run_dir / "evaluation.json").read_text())
        assert len(returns) == script.num_evaluations + bool(more)
        assert returns[: script.num_evaluations] == evaluation["returns"]
        assert f"over {len(returns)} episodes" in result.stdout
    assert contents(whole.run_dir) == before


def test_evaluate_of_an_unfinished_run(script, stopped):
    run_dir, _ = stopped
    before = contents(run_dir)
    assert "evaluation:" in script.succeed(run_dir.parents[1], f"--evaluate {RUN}").stdout
    assert contents(run_dir) == before


# Flags


RUN_FLAGS = {
    "run_name": None,
    "seed": 1,
    "torch_deterministic": True,
    "cuda": True,
    "num_threads": 0,
    "track": False,
    "wandb_project_name": "plainrl",
    "wandb_entity": None,
    "capture_video": False,
    "video_interval": 100,
    "save_model": False,
    "compile": True,
    "eval_interval": 0,
    "eval_episodes": 10,
    "eval_max_steps": 100000,
    "resume": None,
    "evaluate": None,
    "init_from": None,
    "best": False,
    "checkpoint_interval": 10,
}
# CleanRL's and openai/baselines' constants of PPO, for vectors and for Atari
PPO_FLAGS = {
    "env_id": "CartPole-v1",
    "total_timesteps": 500000,
    "learning_rate": 2.5e-4,
    "num_envs": 4,
    "num_steps": 128,
    "anneal_lr": True,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "num_minibatches": 4,
    "update_epochs": 4,
    "norm_adv": True,
    "clip_coef": 0.2,
    "anneal_clip": False,
    "clip_vloss": True,
    "ent_coef": 0.01,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
    "target_kl": None,
    "bootstrap_truncated": True,
}
ATARI_FLAGS = {
    "env_id": "BreakoutNoFrameskip-v4",
    "total_timesteps": 10000000,
    "num_envs": 8,
    "clip_coef": 0.1,
    "amp": False,
}
HIDDEN = {"hidden_sizes": (64, 64)}
VECTOR_FLAGS = {"emulator_threads": 0}
LSTM_FLAGS = {"cell": "lstm", "hidden_size": 128, "memory": True}
OFF_POLICY_DEFAULTS = {
    "checkpoint_interval": 10000,
    "env_id": "HalfCheetah-v5",
    "total_timesteps": 1000000,
    "learning_rate": 3e-4,
    "actor_learning_rate": None,
    "critic_learning_rate": None,
    "num_envs": 1,
    "gamma": 0.99,
    "hidden_sizes": (256, 256),
    "buffer_size": 1000000,
    "batch_size": 256,
    "tau": 0.005,
    "random_steps": None,
    "learning_starts": 25000,
    "updates_per_step": 1.0,
    "policy_frequency": 1,
    "noise_type": "gaussian",
    "exploration_noise": 0.1,
    "final_exploration_noise": None,
    "max_grad_norm": None,
    "weight_decay": 0.0,
    "norm_obs": False,
    "norm_reward": False,
    "eval_interval": 10000,
}
NOISE = ("policy_frequency", "noise_type", "exploration_noise", "final_exploration_noise")
DEFAULTS = {
    "ppo": PPO_FLAGS | HIDDEN | {"kl_penalty": False, "kl_target": 0.01, "adaptive_lr": False},
    "ppo_lstm": PPO_FLAGS | HIDDEN | LSTM_FLAGS,
    "ppo_atari": PPO_FLAGS | ATARI_FLAGS,
    "ppo_atari_vector": PPO_FLAGS | ATARI_FLAGS | VECTOR_FLAGS,
    "ppo_atari_lstm": PPO_FLAGS | ATARI_FLAGS | LSTM_FLAGS,
    "ppo_atari_lstm_vector": PPO_FLAGS | ATARI_FLAGS | LSTM_FLAGS | VECTOR_FLAGS,
    "ppo_continuous_action": PPO_FLAGS
    | HIDDEN
    | {
        "env_id": "HalfCheetah-v5",
        "total_timesteps": 1000000,
        "learning_rate": 3e-4,
        "num_envs": 1,
        "num_steps": 2048,
        "num_minibatches": 32,
        "update_epochs": 10,
        "ent_coef": 0.0,
        "init_log_std": 0.0,
    },
    "a2c": HIDDEN
    | {
        "checkpoint_interval": 1000,
        "env_id": "CartPole-v1",
        "total_timesteps": 500000,
        "learning_rate": 7e-4,
        "num_envs": 8,
        "num_steps": 5,
        "anneal_lr": True,
        "gamma": 0.99,
        "gae_lambda": 1.0,
        "norm_adv": False,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "optimizer": "rmsprop",
        "bootstrap_truncated": True,
    },
    "vpg": HIDDEN
    | {
        "env_id": "CartPole-v1",
        "total_timesteps": 500000,
        "learning_rate": 2.5e-3,
        "num_envs": 8,
        "anneal_lr": True,
        "gamma": 0.99,
        "baseline": "value",
        "norm_adv": True,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "bootstrap_truncated": True,
    },
    "ddpg_continuous_action": OFF_POLICY_DEFAULTS,
    "td3_continuous_action": OFF_POLICY_DEFAULTS
    | {"policy_frequency": 2, "policy_noise": 0.2, "noise_clip": 0.5},
    "sac_continuous_action": {
        name: value for name, value in OFF_POLICY_DEFAULTS.items() if name not in NOISE
    }
    | {
        "learning_starts": 10000,
        "autotune": True,
        "alpha": 1.0,
        "alpha_learning_rate": None,
        "target_entropy": None,
    },
    "ddpg_lstm": OFF_POLICY_DEFAULTS
    | {
        "env_id": "Pendulum-v1",
        "total_timesteps": 100_000,
        "learning_starts": 1000,
        "eval_interval": 5000,
        "hidden_sizes": (64,),
        "cell": "lstm",
        "hidden_size": 64,
        "memory": True,
        "batch_size": 32,
        "sequence_length": 20,
        "burn_in": 20,
    },
}


@every_script
def test_defaults(script):
    """What is published."""
    expected = {"exp_name": script.name} | RUN_FLAGS | DEFAULTS[script.name]
    assert asdict(script.module.Args()) == expected


# One run, one folder


@pytest.mark.parametrize(
    "name",
    ["episodes.csv", "events.out.tfevents.1.x", "evaluation.json", "checkpoint.pt", "best.pt"],
)
def test_a_folder_with_a_run_is_not_used_again(script, tmp_path, name):
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / name).write_text("old")
    result = script.run(tmp_path, script.short)
    words = ["--resume"] if name == "checkpoint.pt" else []
    assert_fails(result, 2, str(RUN), "--run-name", *words)
    assert {path.name for path in (tmp_path / RUN).iterdir()} <= {name, "lock"}
    assert (tmp_path / RUN / name).read_text() == "old"


def test_a_run_that_failed_at_once_is_not_in_the_way(script, tmp_path):
    """The first checkpoint comes before the logs: without it, there are none."""
    result = script.run(tmp_path, script.short, limit=30000)
    assert_fails(result, 1, "can't write")
    left = [path.name for path in (tmp_path / RUN).iterdir()]
    assert not [name for name in left if name.startswith(("events", "episodes", "checkpoint.pt"))]
    script.succeed(tmp_path, script.short)


def test_a_run_is_locked_while_its_process_lives(script, short, tmp_path):
    """No second process writes to its folder; one that only looks may."""
    fork = script.server.start(script.path, tmp_path, script.short, TOY_FAULT="SIGSTOP 170")
    try:
        assert fork.wait().returncode is None
        before = contents(tmp_path / RUN)
        for flags in (f"--resume {RUN}", script.short):
            assert_fails(script.run(tmp_path, flags), 2, str(RUN), "in use by another process")
        assert "evaluation:" in script.succeed(tmp_path, f"--evaluate {RUN}").stdout
        assert contents(tmp_path / RUN) == before
        fork.send(signal.SIGCONT)
        assert fork.wait().returncode == 0
    finally:
        fork.kill()
    assert differences(short.run_dir, tmp_path / RUN) == []


def test_the_text_of_the_script_is_kept(script, whole, stopped, tmp_path):
    """That of the start, and any other with which the run goes on."""
    assert (whole.run_dir / script.path.name).read_bytes() == script.path.read_bytes()
    assert [path.name for path in whole.run_dir.glob("*.py")] == [script.path.name]
    shutil.copytree(stopped[0], tmp_path / RUN)
    changed = tmp_path / "elsewhere" / script.path.name
    changed.parent.mkdir()
    changed.write_text(script.path.read_text() + "# another text\n")
    result = script.server.run(changed, tmp_path, f"--resume {RUN}")
    assert result.returncode == 0, result.stderr
    step = progress(stopped[0])["global_step"]
    kept = tmp_path / RUN / f"{script.name}.{step}.py"
    assert kept.read_bytes() == changed.read_bytes()
    assert (tmp_path / RUN / script.path.name).read_bytes() == script.path.read_bytes()
    assert sum(kept.name in line for line in result.stdout.splitlines()) == 1


def test_the_text_that_is_kept_is_the_one_that_runs(script, tmp_path):
    """The toy edits the script while the run begins."""
    edited = tmp_path / script.path.name
    shutil.copy(script.path, edited)
    result = script.server.run(edited, tmp_path, script.short, TOY_FAULT="edit-script 0")
    assert result.returncode == 0, result.stderr
    assert edited.read_text().endswith("# edited\n")
    assert (tmp_path / RUN / edited.name).read_bytes() == script.path.read_bytes()


# More about evaluations


@every_script
def test_a_run_without_evaluation(script, tmp_path):
    """It is a finished one, too."""
    result = script.succeed(tmp_path, f"{script.short} --eval-interval 0 --eval-episodes 0")
    evaluation = json.loads((tmp_path / RUN / "evaluation.json").read_text())
    assert evaluation["returns"] == evaluation["lengths"] == []
    assert "Warning" not in result.stderr and "nan" not in result.stdout
    assert "is finished" in script.succeed(tmp_path, f"--resume {RUN}").stdout


def test_evaluations_of_episodes_without_end(script, whole, tmp_path):
    """Are cut after so many steps of the agent, and the line says so; whatever the flag's run."""
    flags = f"{script.short} --eval-max-steps 2"
    count = script.num_evaluations
    result = script.succeed(tmp_path, flags)
    evaluation = json.loads((tmp_path / RUN / "evaluation.json").read_text())
    assert evaluation["lengths"] == [2] * count
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("evaluation:")]
    assert f" {count} of them" in line and "--eval-max-steps 2" in line
    result = script.succeed(whole.cwd, f"--evaluate {RUN} --eval-max-steps 1 --eval-episodes 4")
    assert " 4 of them" in result.stdout
    assert "--eval-max-steps" not in whole.result.stdout
    if script.name != "vpg":  # it would play the first episode for ever
        result = script.succeed(tmp_path / "never", f"{script.on('Never')} --eval-max-steps 20")
        evaluation = json.loads((tmp_path / "never" / RUN / "evaluation.json").read_text())
        assert evaluation["lengths"] == [20] * count
        assert episode_rows(tmp_path / "never" / RUN) == []


@pytest.fixture(scope="module")
def evaluated(script, tmp_path_factory):
    """A short run with evaluations, recorded: every iteration, A2C's every 4, DDPG's 70 steps."""
    cwd = tmp_path_factory.mktemp("evaluated")
    interval = {"ddpg_continuous_action": 70, "a2c": 4}.get(script.name, 1)
    flags = f"{script.short} --eval-interval {interval}"
    result = script.succeed(cwd, flags, TOY_RECORD=cwd / "record")
    return SimpleNamespace(
        cwd=cwd,
        run_dir=cwd / RUN,
        flags=flags,
        interval=interval,
        result=result,
        record=read_record(cwd / "record"),
    )


def test_evaluations_during_the_training(script, evaluated):
    """Each is logged with its mean return, at its step, from a new environment."""
    logged = scalars(evaluated.run_dir, "eval/episodic_return")
    steps = list(scalars(evaluated.run_dir, "charts/learning_rate"))
    if script.is_off_policy:
        passed = range(script.num_envs, 301, script.num_envs)
        expected = [step for step in passed if step % evaluated.interval < script.num_envs]
    else:
        expected = steps[evaluated.interval - 1 :: evaluated.interval]
    assert list(logged) == expected
    assert len(logged) >= 3
    played = script.steps(evaluated.record)
    *during, last = [env for env in played if env >= script.num_envs]
    means = [np.mean([x[0] for x in script.episodes(played[env])]) for env in during]
    assert [*logged.values()] == pytest.approx(means, rel=1e-6)
    lengths = {len(script.episodes(played[env])) for env in [*during, last]}
    assert lengths == {script.num_evaluations}


def test_evaluations_during_the_training_have_seeds_of_their_own(script, evaluated):
    by_env = seeds(evaluated.record)
    training = {seed for env in range(script.num_envs) for seed in by_env[env]}
    *during, last = [env for env in by_env if env >= script.num_envs]
    inner = {seed for env in during for seed in by_env[env]}
    final = {*by_env[last]}
    assert inner and final
    assert not inner & final and not inner & training and not final & training


def without_evaluations(run_dir):
    """The outcome of a run, but for what its evaluations during the training leave."""
    results = {}
    count = 0
    for name, value in outcome(run_dir).items():
        if name.startswith("events/"):
            if value[0] in ("eval/episodic_return", "charts/SPS"):
                continue
            name = f"events/{count}"
            count += 1
        if not name.startswith("best/") and name != "checkpoint/run/best_return":
            results[name] = value
    return results


def test_evaluations_during_the_training_change_nothing(script, evaluated, tmp_path):
    """Though the toys draw from the generators of Python and NumPy."""
    script.succeed(tmp_path, f"{script.short} --eval-interval 0")
    assert not (tmp_path / RUN / "best.pt").exists()
    assert "eval/episodic_return" not in {tag for tag, *_ in events(tmp_path / RUN)}
    found = differences(without_evaluations(tmp_path / RUN), without_evaluations(evaluated.run_dir))
    assert found == []


def test_the_best_networks_are_kept(script, evaluated, tmp_path):
    """Those of the highest mean return, the first of them; --evaluate --best plays them."""
    logged = scalars(evaluated.run_dir, "eval/episodic_return")
    best = load_checkpoint(evaluated.run_dir, "best.pt")
    assert best["run"]["global_step"] == max(logged, key=logged.get)
    last = load_checkpoint(evaluated.run_dir)
    assert leaves(best).keys() & {*leaves(last)} and best.keys() == last.keys()

    # Played on the same episodes, its networks give the same as when they are the last ones
    run_dir = Path(shutil.copytree(evaluated.run_dir, tmp_path / RUN))
    shutil.copyfile(run_dir / "best.pt", run_dir / "checkpoint.pt")
    os.truncate(run_dir / "best.pt", 0)
    lines = []
    for cwd, flags in (tmp_path, ""), (evaluated.cwd, " --best"), (evaluated.cwd, ""):
        result = script.succeed(cwd, f"--evaluate {RUN}{flags}")
        lines.append(next(x for x in result.stdout.splitlines() if x.startswith("evaluation:")))
    assert lines[0] == lines[1]
    assert lines[2] in evaluated.result.stdout.splitlines()
    assert_fails(script.run(tmp_path / "new", f"{script.short} --best"), 2, "--best")


def test_an_equal_evaluation_does_not_replace_the_best(script):
    saves = []
    writer = SimpleNamespace(add_scalar=lambda *_: None)
    run = SimpleNamespace(best_return=5.0, global_step=1, save=saves.append, writer=writer)
    for mean_return in (5.0, 5.5, 5.5):
        script.module.Run.log_evaluation(run, {"returns": [mean_return]})
    assert saves == ["best.pt"]


def test_sps_are_steps_by_seconds(script, monkeypatch):
    monkeypatch.setattr(script.module.time, "time", lambda: 110.0)
    logged = []
    writer = SimpleNamespace(add_scalar=lambda *row: logged.append(row))
    run = SimpleNamespace(global_step=1000, iteration=10, start_time=100.0, writer=writer)
    script.module.Run.log(run, {})
    assert logged == [("charts/SPS", 100, 1000)]


def test_a_text_is_compared_to_the_last_one_kept(script, tmp_path):
    last = tmp_path / f"{script.name}.100.py"
    texts = {tmp_path / script.path.name: b"first", last: script.module.SCRIPT_TEXT}
    for seconds, (path, text) in enumerate(texts.items()):
        path.write_bytes(text)
        os.utime(path, (seconds, seconds))
    script.module.Run.keep_script(SimpleNamespace(folder=tmp_path, global_step=200))
    assert sorted(tmp_path.iterdir()) == sorted(texts)


def test_a_resumed_run_has_the_same_best_networks(script, evaluated, tmp_path):
    """Killed past the middle, after evaluations that the checkpoint doesn't know."""
    frames = int(0.8 * env_steps(evaluated.record))
    interval = 100 if script.is_off_policy else 2
    flags = f"{evaluated.flags} --checkpoint-interval {interval}"
    result = script.run(tmp_path, flags, TOY_FAULT=f"SIGKILL {frames}@0")
    assert result.returncode == -signal.SIGKILL
    script.succeed(tmp_path, f"--resume {RUN}")
    assert differences(evaluated.run_dir, tmp_path / RUN) == []


def test_what_may_change_with_resume(script, stopped, tmp_path):
    """Flags that change nothing that is learned; any other is named, with the run's value."""
    run_dir = Path(shutil.copytree(stopped[0], tmp_path / RUN))
    before = contents(run_dir)
    result = script.run(tmp_path, f"--resume {RUN} --gamma 0.5 --num-envs 4 --seed 1")
    assert_fails(result, 2, "gamma = 0.99", f"num_envs = {script.num_envs}")
    assert "seed" not in result.stderr
    assert without_lock(contents(run_dir)) == without_lock(before)
    flags = "--eval-episodes 1 --eval-max-steps 2 --eval-interval 100000"
    if not script.is_off_policy:
        flags += " --checkpoint-interval 100"
    script.succeed(tmp_path, f"--resume {RUN} {flags}")
    assert json.loads((run_dir / "evaluation.json").read_text())["lengths"] == [2]


# A run from another's networks


def parts(checkpoint, *names):
    """The leaves of some parts of a checkpoint, if it has them."""
    return leaves({name: checkpoint[name] for name in names if name in checkpoint})


def find_seeds(envs):
    """The seeds of the environments in a checkpoint."""
    return [x for path, x in leaves(envs).items() if path.endswith("/seed")]


def test_init_from(script, whole, tmp_path):
    """Networks and statistics are the old run's, all else is new; it can be deleted then."""
    old = Path(shutil.copytree(whole.run_dir, tmp_path / "old"))
    flags = f"{script.short} --seed 5"
    saved = []
    for name, more in ("plain", ""), ("from", f"--init-from {old}"):
        options = {"TOY_FAULT": f"SIGKILL {100 if script.is_game else 5}@0"}
        result = script.run(tmp_path, f"{flags} --run-name {name} {more}", **options)
        assert result.returncode == -signal.SIGKILL, result.stderr
        saved.append(load_checkpoint(tmp_path / "runs" / name))
    plain, new = saved
    last = load_checkpoint(old)
    assert parts(new, "agent") == parts(last, "agent") != parts(plain, "agent")
    for name in {"obs_rms", "return_rms"} & last.keys():  # the first observations may be in it
        assert last[name]["count"] <= new[name]["count"] <= last[name]["count"] + 2 * 3
        for key in ("mean", "var"):
            np.testing.assert_allclose(new[name][key], last[name][key], rtol=0.2, atol=0.05)
    fresh = ("optimizer", "controller", "memory", "noise", "replay")
    assert parts(new, *fresh) == parts(plain, *fresh)
    assert find_seeds(new["envs"]) == find_seeds(plain["envs"]) != find_seeds(last["envs"])
    names = ("iteration", "global_step", "recent_returns", "best_return")
    assert [new["run"][name] for name in names] == [plain["run"][name] for name in names]
    shutil.rmtree(old)
    script.succeed(tmp_path, "--resume runs/from")


def test_init_from_the_best(script, evaluated, tmp_path):
    fault = f"SIGKILL {100 if script.is_game else 5}@0"
    flags = f"{script.short} --init-from {evaluated.run_dir} --best"
    assert script.run(tmp_path, flags, TOY_FAULT=fault).returncode == -signal.SIGKILL
    best = load_checkpoint(evaluated.run_dir, "best.pt")
    assert parts(load_checkpoint(tmp_path / RUN), "agent") == parts(best, "agent")


def test_init_from_what_does_not_fit(script, short, tmp_path):
    """Other sizes, another script's run, none at all, or two runs at once."""
    if script.is_game:
        other = ""
    elif script.is_continuous:
        other = script.on("Wide")
    else:
        other = script.short.replace("toys:Multi", "toys:Discrete")
    old = short.run_dir
    if other:
        assert_fails(script.run(tmp_path, f"{other} --init-from {old}"), 2, "sizes")
    assert_fails(script.run(tmp_path, f"{script.short} --init-from nowhere"), 2, "nowhere")
    both = f"{script.short} --init-from {old} --resume {old}"
    assert_fails(script.run(tmp_path, both), 2, "--init-from")
    foreign = Path(shutil.copytree(old, tmp_path / "foreign"))
    checkpoint = load_checkpoint(foreign) | {"script": "other.py"}
    torch.save(checkpoint, foreign / "checkpoint.pt")
    assert_fails(script.run(tmp_path, f"{script.short} --init-from foreign"), 2, "other.py")
    assert not list(tmp_path.glob("runs/*/checkpoint.pt"))


# Flags and errors


def test_hidden_sizes(script, tmp_path):
    if script.is_game:
        assert not hasattr(script.module.Args, "hidden_sizes")
        return
    script.succeed(tmp_path, f"{script.short} --hidden-sizes 7 5 6")
    shapes = {name: tuple(x.shape) for name, x in load_checkpoint(tmp_path / RUN)["agent"].items()}
    pairs = [shape for name, shape in shapes.items() if len(shape) == 2]
    assert (5, 7) in pairs and (6, 5) in pairs
    assert_fails(script.run(tmp_path / "none", f"{script.short} --hidden-sizes 7 0"), 2, "--hidden")


@every_script
def test_compile_is_a_flag_of_every_script(script, refused):
    """Some compile nothing."""
    sentence = refused(script.module, [*script.short.split(), "--compile", "--num-envs", "0"])
    assert sentence.startswith("error: --num-envs")


@every_script
@pytest.mark.parametrize("flag", ["--batch-size", "--minibatch-size", "--num-iterations"])
@pytest.mark.parametrize("form", ["{} 100", "{}=100"])
def test_what_is_computed_is_no_flag(script, refused, flag, form):
    if script.is_off_policy and flag == "--batch-size":
        assert script.module.Args.batch_size > 0
        return
    sentence = refused(script.module, [*script.short.split(), *form.format(flag).split()])
    assert sentence.startswith(f"error: {flag} follows from") and sentence.count("\n") == 1


def test_hangup(script, short, tmp_path):
    """As SIGTERM, unless it was ignored at the start, as by nohup."""
    fault = f"SIGHUP {int(0.6 * env_steps(short.record))}@0"
    result = script.run(tmp_path, script.short, TOY_FAULT=fault)
    assert result.returncode == 129 and result.stderr == "", result.stderr
    assert f"--resume {RUN}" in result.stdout
    assert 0 < progress(tmp_path / RUN)["global_step"] < progress(short.run_dir)["global_step"]
    script.succeed(tmp_path, f"--resume {RUN}")
    assert differences(short.run_dir, tmp_path / RUN) == []
    script.succeed(tmp_path / "nohup", script.short, TOY_FAULT=fault, ignored=[signal.SIGHUP])
    assert differences(short.run_dir, tmp_path / "nohup" / RUN) == []


def test_what_the_machine_refuses_is_a_sentence(script, short, tmp_path):
    """A file in the place of a folder, a folder in the place of a file, a full disk."""
    (tmp_path / "runs").write_text("a file")
    assert_fails(script.run(tmp_path, script.short), 1, "runs")
    for name in ("config.json", script.path.name):
        cwd = tmp_path / f"folder-{name}"
        (cwd / RUN / name).mkdir(parents=True)
        assert_fails(script.run(cwd, script.short), 1, name)
    cwd = tmp_path / "disk"
    fault = f"SIGTERM {int(0.5 * env_steps(short.record))}@0"
    assert script.run(cwd, script.short, TOY_FAULT=fault).returncode == 143
    before = (cwd / RUN / "checkpoint.pt").read_bytes()
    result = script.run(cwd, f"--resume {RUN}", limit=len(before) // 2)
    assert_fails(result, 1, "can't write", f"--resume {RUN}")
    assert (cwd / RUN / "checkpoint.pt").read_bytes() == before
    script.succeed(cwd, f"--resume {RUN}")
    assert differences(short.run_dir, cwd / RUN) == []


def test_a_mistake_of_an_environment_keeps_its_trace(script, tmp_path):
    """In a step, in reset(), and where it is made."""
    for fault, words in {
        "error 150": "a mistake of the toy",
        "reset-error 0": "a mistake of the toy's reset",
        "make-error 0": "a mistake of the toy's constructor",
        "os-error 150": "No such file or directory: 'level.txt'",
        "pipe-error 150": "the simulator is gone",
    }.items():
        result = script.run(tmp_path / fault, script.short, TOY_FAULT=fault)
        assert result.returncode == 1
        assert "Traceback" in result.stderr and words in result.stderr, result.stderr
        assert "toys.py" in result.stderr


def test_a_reset_that_returns_an_observation_alone(script, tmp_path):
    if script.is_game:  # whose wrappers don't look
        return
    assert_fails(script.run(tmp_path, script.short, TOY_FAULT="bare-reset 0"), 2, "reset()")


def test_an_observation_of_another_shape(script, tmp_path):
    """Is not spread over its row of the vector."""
    if script.is_game:  # whose wrappers make images of one shape
        return
    result = script.run(tmp_path, script.short, TOY_FAULT="short-observation 150")
    assert result.returncode == 1
    assert "ValueError" in result.stderr and "shape" in result.stderr, result.stderr


def test_environments_of_the_current_folder(script, tmp_path):
    if script.is_game:
        return
    toy = "Continuous" if script.is_continuous else "Multi"
    text = f"import gymnasium as gym, toys\ngym.register('Mine-v0', toys.{toy})\n"
    (tmp_path / "my_envs.py").write_text(text)
    script.succeed(tmp_path, re.sub(r"toys:\w+-v0", "my_envs:Mine-v0", script.short))


@pytest.mark.parametrize(
    "change",
    [{"iteration": -1}, {"global_step": -1}, {"iteration": 10**9}, {"global_step": 0.5}],
    ids=str,
)
def test_a_checkpoint_with_impossible_counters(script, stopped, tmp_path, change):
    run_dir = Path(shutil.copytree(stopped[0], tmp_path / RUN))
    checkpoint = load_checkpoint(run_dir)
    checkpoint["run"] |= change
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    assert_fails(script.run(tmp_path, f"--resume {RUN}"), 2)


@pytest.mark.parametrize("spoilt", ["optimizer", "statistics"])
def test_infinite_states_are_not_saved(script, stopped, tmp_path, spoilt):
    """They stop the run at its next checkpoint, and the one before stays."""
    run_dir = Path(shutil.copytree(stopped[0], tmp_path / RUN))
    checkpoint = load_checkpoint(run_dir)
    if spoilt == "optimizer":
        state = checkpoint["learner" if script.is_off_policy else "optimizer"]
        name = next(name for name in state if re.search("avg", name))
        state[name][0] = float("inf")
    elif "return_rms" in checkpoint:
        checkpoint["return_rms"]["var"].fill_(float("inf"))
    else:
        return
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    before = (run_dir / "checkpoint.pt").read_bytes()
    assert_fails(script.run(tmp_path, f"--resume {RUN}"), 1, "not finite")
    assert (run_dir / "checkpoint.pt").read_bytes() == before
