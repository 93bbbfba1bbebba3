"""What every script does the same way, on the toys of toys.py: each test runs for each script.

Runs are processes that leave files. Where a toy recorded what was done to it, the record says what
the files must have. A script's own algorithm is tested in the script's own file, and what the
section Run does alone, which is the same text everywhere, in test_runs.py.
"""

import importlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import toys
from processes import (
    RUN,
    assert_fails,
    contents,
    differences,
    edit_checkpoint,
    episode_rows,
    evaluation,
    events,
    leaves,
    load_checkpoint,
    outcome,
    progress,
    read_record,
    returns,
    scalars,
    variables,
)

ROOT = Path(__file__).resolve().parents[1]
COMMON = "--num-threads 1 --run-name run --no-compile"
VECTOR = f"{COMMON} --num-envs 3 --eval-episodes 3 --total-timesteps 3600"
# 24 iterations of 150 steps. An environment gets its second seed after 1,000 of its 1,200 steps
PPO = (
    f"{VECTOR} --num-steps 50 --num-minibatches 3 --update-epochs 2 --no-anneal-lr"
    " --checkpoint-interval 7 --eval-interval 5"
)
GAME = (
    f"--env-id ToyNoFrameskip-v4 {COMMON} --num-envs 2 --eval-episodes 2 --num-steps 8"
    " --num-minibatches 2 --update-epochs 1 --total-timesteps 96 --no-anneal-lr"
    " --checkpoint-interval 4 --eval-interval 2"
)
REPLAY = (
    f"--env-id toys:Continuous-v0 {VECTOR} --hidden-sizes 16 16 --batch-size 16 --buffer-size 700"
    " --learning-starts 100 --random-steps 60 --updates-per-step 0.2"
    " --checkpoint-interval 130 --eval-interval 300"
)
# 12 iterations of 8 steps
VALUES_OF_GAMES = (
    f"--env-id ToyNoFrameskip-v4 {COMMON} --num-envs 2 --eval-episodes 2 --total-timesteps 96"
    " --batch-size 4 --buffer-size 60 --learning-starts 20 --train-frequency 4"
    " --target-network-frequency 16 --n-step 3 --double --dueling --exploration-fraction 0"
    " --end-e 0.5 --checkpoint-interval 8 --eval-interval 4"
)
# The flags of a long run, which has checkpoints after 30, 60 and 90 % or so, and those that make it
# a short one
SETTINGS = {
    "ppo_continuous_action": (f"--env-id toys:Continuous-v0 {PPO}", "--total-timesteps 750"),
    "ppo": (f"--env-id toys:Discrete-v0 {PPO}", "--total-timesteps 750"),
    "ppo_penalty": (f"--env-id toys:Discrete-v0 {PPO}", "--total-timesteps 750"),
    "ppo_mask": (f"--env-id toys:Multi-v0 {PPO}", "--total-timesteps 750"),
    "a2c": (
        f"--env-id toys:Discrete-v0 {VECTOR} --num-steps 5 --no-anneal-lr --checkpoint-interval 70"
        " --eval-interval 50",
        "--total-timesteps 750",
    ),
    "vpg": (
        f"--env-id toys:Discrete-v0 {VECTOR} --no-anneal-lr --checkpoint-interval 35"
        " --eval-interval 30",
        "--total-timesteps 750",
    ),
    "ppo_lstm": (
        f"--env-id toys:Discrete-v0 {PPO} --hidden-size 16",
        "--total-timesteps 750",
    ),
    "ddpg_continuous_action": (
        f"{REPLAY} --policy-frequency 2 --noise-type ou --exploration-noise 0.3",
        "--total-timesteps 900",
    ),
    "td3_continuous_action": (REPLAY, "--total-timesteps 900"),
    "sac_continuous_action": (REPLAY, "--total-timesteps 900"),
    "ddpg_lstm": (
        f"{REPLAY} --hidden-size 8 --sequence-length 4 --burn-in 2",
        "--total-timesteps 900",
    ),
    "dqn": (
        f"--env-id toys:Discrete-v0 {VECTOR} --hidden-sizes 16 16 --batch-size 16 --buffer-size 700"
        " --learning-starts 100 --train-frequency 5 --target-network-frequency 60 --n-step 3"
        " --double --dueling --exploration-fraction 0 --end-e 0.3 --checkpoint-interval 26"
        " --eval-interval 60",
        "--total-timesteps 900",
    ),
    "pqn": (
        f"--env-id toys:Discrete-v0 {PPO} --exploration-fraction 0 --end-e 0.3",
        "--total-timesteps 750",
    ),
    "ppo_atari": (GAME, "--total-timesteps 48"),
    "ppo_atari_lstm": (f"{GAME} --hidden-size 16", "--total-timesteps 48"),
    "dqn_atari": (VALUES_OF_GAMES, "--total-timesteps 48"),
    "c51_atari": (f"{VALUES_OF_GAMES} --n-atoms 5", "--total-timesteps 48"),
}
# These scripts play no toys of toys.py: their files have the same tests with other games
ALL = SETTINGS | {
    "ppo_atari_vector": (GAME, "--total-timesteps 48"),
    "pqn_atari": (f"{GAME} --exploration-fraction 0", "--total-timesteps 48"),
    "ppo_pettingzoo": (f"--env-id parallel_toys.mortal {PPO}", "--total-timesteps 750"),
    "ppo_atari_multigpu": (GAME, "--total-timesteps 48"),
    "ppo_continuous_action_ray": (f"--env-id toys:Continuous-v0 {PPO}", "--total-timesteps 750"),
}
VALUES = {"dqn", "dqn_atari", "c51_atari"}
every_script = pytest.mark.parametrize("script", ALL, indirect=True)
OFF_POLICY = {
    "ddpg_continuous_action",
    "td3_continuous_action",
    "sac_continuous_action",
    "ddpg_lstm",
    *VALUES,
}


class Script:
    """A script with its flags."""

    def __init__(self, name, server):
        self.name = name
        self.path = ROOT / f"{name}.py"
        self.server = server
        self.module = importlib.import_module(name)
        self.flags, self.shorter = ALL[name]
        self.short = f"{self.flags} {self.shorter}"
        self.is_game = "atari" in name
        self.is_off_policy = name in OFF_POLICY
        self.num_envs = self.flag("num-envs")
        self.num_evaluations = self.flag("eval-episodes")

    def flag(self, name, flags=None):
        """The number that a flag has."""
        return int(re.findall(rf"--{name} (\d+)", flags or self.flags)[-1])

    def on(self, variant, flags=None):
        """Flags, else those of a short run, on a variant of the toy."""
        return re.sub(r"(Toy|toys:\w+?)(NoF|-v0)", rf"\1{variant}\2", flags or self.short)

    def run(self, cwd, flags, path=None, **env):
        return self.server.run(path or self.path, cwd, flags, **env)

    def succeed(self, cwd, flags, **options):
        """Runs it to an end that must be good."""
        result = self.run(cwd, flags, **options)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    def die(self, cwd, flags, fault, **env):
        """Runs it to the SIGKILL that the fault sends."""
        result = self.run(cwd, flags, TOY_FAULT=fault, **env)
        assert result.returncode == -signal.SIGKILL, result.stdout + result.stderr

    def steps(self, record):
        """{environment: its steps} in a record; a step is what the agent calls one.

        In a game that is four frames; the wrappers' no-ops before the agent's first are left out.
        """
        steps = {}
        to_come = {}  # frames of the step in progress
        for place, event in enumerate(without_trials(record)):
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
        record = without_trials(record)
        mine = [x["env"] for x in record if "action" in x and x["env"] < self.num_envs]
        i = sum("action" in x and x["env"] < self.num_envs for x in record[: place + 1])
        while i < len(mine) and mine[i] > mine[i - 1]:
            i += 1
        return i


def without_trials(record):
    """A record without the resets and steps by which an environment is tried when it is made."""
    events = []
    in_trial = set()
    for event in record:
        if "seed" in event:
            in_trial.discard(event["env"])
            if event["seed"] == 0:
                in_trial.add(event["env"])
        if event["env"] not in in_trial:
            events.append(event)
    return events


def seeds(record):
    """{environment: its seeds}"""
    found = {}
    for event in without_trials(record):
        if event.get("seed") is not None:
            found.setdefault(event["env"], []).append(event["seed"])
    return found


def expected_seeds(entropy, num_envs, count):
    """Of each environment, its first seeds by the definition, and what they were before modulo."""
    found = []
    for seed in np.random.SeedSequence(entropy).generate_state(num_envs):
        sequences = [np.random.SeedSequence((int(seed), k)) for k in range(count)]
        found.append([int(sequence.generate_state(1)[0]) for sequence in sequences])
    return [[seed % 2**31 for seed in mine] for mine in found], found


def assert_finite(checkpoint):
    """All of its tensors, networks and statistics and what else there is, are numbers."""
    spoilt = []
    for path, leaf in leaves(checkpoint).items():
        if isinstance(leaf, tuple) and leaf[0].startswith("torch.float"):
            array = np.frombuffer(leaf[2], leaf[0].removeprefix("torch."))
            spoilt += [path] * (not np.isfinite(array).all())
    assert spoilt == []


def frames(record, env=0):
    """The number of steps, in a game of frames, of an environment in a record."""
    return sum("action" in event and event["env"] == env for event in record)


@pytest.fixture(scope="module", params=SETTINGS)
def script(request, server):
    return Script(request.param, server)


def record_run(script, cwd, flags):
    result = script.succeed(cwd, flags, TOY_RECORD=cwd / "record")
    record = read_record(cwd / "record")
    return SimpleNamespace(
        cwd=cwd, run_dir=cwd / RUN, result=result, outcome=outcome(cwd / RUN), record=record
    )


@pytest.fixture(scope="module")
def whole(script, tmp_path_factory):
    """A run that nothing interrupted, recorded by its toys."""
    return record_run(script, tmp_path_factory.mktemp("whole"), script.flags)


@pytest.fixture(scope="module")
def short(script, tmp_path_factory):
    """A short one."""
    return record_run(script, tmp_path_factory.mktemp("short"), script.short)


@pytest.fixture(scope="module")
def same(script, tmp_path_factory):
    """A short run on toys that all look the same, whatever is done to them."""
    return record_run(script, tmp_path_factory.mktemp("same"), script.on("Same"))


# Seeds and determinism


def test_same_seed_same_bits(script, whole, tmp_path):
    """However often the run is saved; and an evaluation during the training changes nothing."""
    interval = script.flag("checkpoint-interval") // 2
    script.succeed(tmp_path, f"{script.flags} --checkpoint-interval {interval} --eval-interval 0")
    assert not (tmp_path / RUN / "best.pt").exists()
    allowed = ("best/", "events/", "checkpoint/run/best_return")
    allowed += ("checkpoint/replay/num_rows",)  # more where it is saved less often
    found = differences(whole.outcome, tmp_path / RUN)
    assert [name for name in found if not name.startswith(allowed)] == []
    logged = [
        x for x in events(whole.run_dir) if x[0] not in ("eval/episodic_return", "charts/SPS")
    ]
    assert logged == [x for x in events(tmp_path / RUN) if x[0] != "charts/SPS"]


def test_other_seed_other_run(script, tmp_path):
    """Other networks, environments, and actions."""
    found = []
    for seed in (1, 2):
        cwd = tmp_path / str(seed)
        cwd.mkdir()
        flags = f"{script.short} --seed {seed} --checkpoint-interval 1000"
        count = 100 if script.is_game else 15
        script.die(cwd, flags, f"SIGKILL {count}@0", TOY_RECORD=cwd / "record")
        found.append((load_checkpoint(cwd / RUN), read_record(cwd / "record")))
    (a, a_record), (b, b_record) = found
    assert a["run"]["global_step"] == b["run"]["global_step"] == 0
    random_weights = [name for name, x in a["agent"].items() if len(x.unique()) > 1]
    assert len(random_weights) > 2
    assert all((a["agent"][name] != b["agent"][name]).any() for name in random_weights)
    starts = [[x["x"] for x in without_trials(y) if x.get("seed")] for y in (a_record, b_record)]
    assert len(starts[0]) == len(starts[1]) == script.num_envs
    assert not [x for x in starts[0] if x in starts[1]]
    a_steps, b_steps = script.steps(a_record), script.steps(b_record)
    pairs = [pair for env in a_steps for pair in zip(a_steps[env], b_steps[env])]
    assert len(pairs) > 20
    equal = [np.allclose(x["action"], y["action"], atol=0.01) for x, y in pairs]
    assert np.mean(equal) < 0.7


def test_seeds_of_environments(script, whole):
    """By the definition, below 2**31; evaluations have others than the training, and each time."""
    by_env = seeds(whole.record)
    count = 1 if script.is_game else 2
    expected, raw = expected_seeds(1, script.num_envs, count)
    assert [by_env[env] for env in range(script.num_envs)] == expected
    steps = [*scalars(whole.run_dir, "eval/episodic_return")]
    assert len(steps) >= 3
    for entropy in [*((1, 2, step) for step in steps), (1, 1)]:
        (mine,), (raw_seed,) = expected_seeds(entropy, 1, 1)
        expected.append(mine)
        raw.append(raw_seed)
    assert [*by_env.values()] == expected
    assert any(seed >= 2**31 for mine in raw for seed in mine)
    every_seed = [seed for mine in expected for seed in mine]
    assert len({*every_seed}) == len(every_seed)


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
    for tag, column in ("episodic_return", 2), ("episodic_length", 3):
        logged = [x[1:] for x in events(whole.run_dir) if x[0] == f"charts/{tag}"]
        assert sorted(logged) == sorted((row[0], np.float32(row[column])) for row in rows)


def test_the_learning_rate_falls_to_zero(script, short, tmp_path):
    """It is what the update takes: without annealing the networks are others."""
    if script.is_off_policy:
        assert not hasattr(script.module.Args, "anneal_lr")
        return
    first = script.module.Args.learning_rate
    assert {*scalars(short.run_dir, "charts/learning_rate").values()} == {np.float32(first)}
    script.succeed(tmp_path, f"{script.short} --anneal-lr")
    logged = scalars(tmp_path / RUN, "charts/learning_rate")
    steps = list(logged)
    remaining = [1 - i / len(steps) for i in range(len(steps))]
    if script.name == "vpg":  # its iterations differ in length
        remaining = [
            1 - step / script.flag("total-timesteps", script.short) for step in [0, *steps]
        ]
    assert len(steps) >= 3
    expected = first * np.array(remaining[: len(steps)])
    np.testing.assert_allclose([*logged.values()], expected, rtol=1e-6)
    assert any("/agent/" in name for name in differences(short.outcome, tmp_path / RUN))


# Ends of episodes


def test_ends_of_episodes(script, tmp_path):
    """Both ends at once are a termination, to the last bit: nothing is bootstrapped.

    A time limit is a truncation, which bootstraps, so that the networks are others; with
    --no-bootstrap-truncated they are those of terminations.
    """
    for how in ("Both", "Terminated", "Truncated"):
        script.succeed(tmp_path / how, script.on(how))
    both, terminated, truncated = (tmp_path / x / RUN for x in ("Both", "Terminated", "Truncated"))
    assert differences(both, terminated) == []
    assert {row["ended_by"] for row in episode_rows(both)} == {"termination"}
    assert {row["ended_by"] for row in episode_rows(truncated)} == {"truncation"}
    assert any("/agent/" in name for name in differences(terminated, truncated))
    if script.is_off_policy or script.name == "pqn":
        assert not hasattr(script.module.Args, "bootstrap_truncated")
        return
    script.succeed(tmp_path, f"{script.on('Truncated')} --no-bootstrap-truncated")
    found = differences(terminated, tmp_path / RUN)
    assert [name for name in found if not name.startswith("episodes/")] == []


def test_an_end_at_every_step(script, tmp_path):
    """Every step is an episode, and each has its row."""
    script.succeed(tmp_path, script.on("Each"))
    rows = episode_rows(tmp_path / RUN)
    assert {row["length"] for row in rows} == {"1"}
    assert len(rows) == progress(tmp_path / RUN)["global_step"]


@pytest.mark.parametrize("script", ["ppo_mask"], indirect=True)
def test_masks_hold_as_long_as_they_are_there(script, whole):
    """In training and evaluation; without one, all actions are possible, also right after one."""
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
    """The checkpoint from before it is whole: the run can go on."""
    place = int(0.7 * frames(short.record)) * script.num_envs
    for what in ["reward"] if script.is_game else ["reward", "observation"]:
        cwd = tmp_path / what
        interval = 50 if script.is_off_policy and script.name not in VALUES else 2
        flags = f"{script.short} --eval-interval 0 --checkpoint-interval {interval}"
        result = script.run(cwd, flags, TOY_FAULT=f"nan-{what} {place}")
        assert_fails(result, 1, "not finite")
        assert not (cwd / RUN / "evaluation.json").exists()
        checkpoint = load_checkpoint(cwd / RUN)
        assert 0 < checkpoint["run"]["global_step"] < script.flag("total-timesteps", script.short)
        assert_finite(checkpoint)
        script.succeed(cwd, f"--resume {RUN}")


def test_weights_that_become_infinite_in_the_last_step_are_not_saved(script, tmp_path):
    flags = f"{script.flags} --learning-rate 3e38"
    if script.name in VALUES:
        steps = script.num_envs * script.flag("train-frequency")
        flags += f" --total-timesteps {steps} --learning-starts {steps - 1}"
    elif script.is_off_policy:
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
    """In the first iteration, when logs are on the disk and their checkpoint isn't, in the end.

    That is in the last evaluation. The outcome is that of a run which nothing interrupted.
    """
    run_dir = tmp_path / RUN
    training = [x for x in whole.record if x["env"] == 0 and "action" in x]
    first = next(i for i, x in enumerate(training) if x["by_agent"]) + 3
    script.die(tmp_path, script.flags, f"SIGKILL {first}@0")
    assert progress(run_dir)["iteration"] == 0

    script.die(tmp_path, f"--resume {RUN}", "save 3" if script.is_game else "save 4")
    saved = progress(run_dir)
    assert script.is_game or saved["global_step"] > 0
    assert max(int(row["global_step"]) for row in episode_rows(run_dir)) > saved["global_step"]
    assert max(step for _, step, _ in events(run_dir)) > saved["global_step"]

    evaluations = scalars(whole.run_dir, "eval/episodic_return")
    left = sum(step > saved["global_step"] for step in evaluations)
    script.die(tmp_path, f"--resume {RUN}", f"SIGKILL 3@{script.num_envs + left}")
    assert progress(run_dir)["global_step"] == progress(whole.run_dir)["global_step"]
    assert not (run_dir / "evaluation.json").exists()

    result = script.succeed(tmp_path, f"--resume {RUN}")
    assert "brought back" not in result.stdout and "bits may differ" not in result.stdout
    assert differences(whole.outcome, run_dir) == []
    rows = episode_rows(run_dir)
    walls = [float(row["wall_seconds"]) for row in rows]
    assert walls == sorted(walls)
    assert progress(run_dir)["recent_returns"] == [float(x["return"]) for x in rows[-100:]]


@pytest.mark.parametrize("script", ["ppo_continuous_action", "vpg", "c51_atari"], indirect=True)
def test_resume_after_a_signal(script, whole, tmp_path):
    """The iteration is finished and saved, and the command that is printed can be pasted.

    That is in the section Run, which is the same in all scripts.

    Also when the script lies in another folder, and for a name with a space and brackets.
    """
    fault = f"SIGTERM {int(0.4 * frames(whole.record))}@0"
    flags = script.flags.replace("--run-name run", "--run-name 'first try (2)'")
    result = script.run(tmp_path, flags, TOY_FAULT=fault)
    assert result.returncode == 143, result.stderr
    run_dir = tmp_path / "runs" / "first try (2)"
    saved = progress(run_dir)
    assert saved["iteration"] % script.flag("checkpoint-interval") != 0
    assert not (run_dir / "evaluation.json").exists()
    message = f"stopped at step {saved['global_step']}; go on with: "
    (line,) = [line for line in result.stdout.splitlines() if line.startswith(message)]
    command = line.removeprefix(message)
    assert command.startswith("python ")
    if script.name == "ppo_continuous_action":  # a fork is faster
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/python").symlink_to(sys.executable)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = variables(tmp_path, PATH=path)
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, check=True)
    else:
        _, path, *flags = shlex.split(command)
        script.succeed(tmp_path, shlex.join(flags), path=path)
    assert differences(whole.outcome, run_dir) == []


def test_resume_where_an_episode_does_not_come_back(script, tmp_path):
    """Episodes that end sooner than they did: new ones start, and the run goes on to its end.

    No step follows the end of an episode. --evaluate doesn't need where the environments were.
    """
    fault = f"SIGTERM {130 if script.is_game else 70}@0"
    assert script.run(tmp_path, script.short, TOY_FAULT=fault).returncode == 143
    end = 9 if script.is_game else 2
    result = script.succeed(tmp_path, f"--evaluate {RUN}", TOY_END=end)
    assert "brought back" not in result.stdout and "evaluation:" in result.stdout
    result = script.succeed(tmp_path, f"--resume {RUN}", TOY_END=end)
    told = result.stdout.count("can't be brought back exactly")
    assert 0 < told <= script.num_envs and "evaluation:" in result.stdout


def test_longer(script, whole, short, tmp_path):
    """A finished run goes on, to the bits of one that was to be that long from the start.

    But not where a schedule depends on the length.
    """
    shutil.copytree(short.run_dir, tmp_path / RUN)
    longer = f"--resume {RUN} --total-timesteps {script.flag('total-timesteps')}"
    script.succeed(tmp_path, longer)
    assert differences(whole.outcome, tmp_path / RUN) == []
    assert evaluation(tmp_path / RUN)["total_timesteps"] == script.flag("total-timesteps")
    for name in script.module.SCHEDULES:
        cwd = tmp_path / name
        on = f"--{name.replace('_', '-')}" + " 0.5" * (name == "exploration_fraction")
        script.succeed(cwd, f"{script.short} --eval-interval 0 {on}")
        before = contents(cwd)
        assert_fails(script.run(cwd, longer), 2, "--total-timesteps", name, "--init-from")
        assert contents(cwd) == before


# Evaluation


def test_evaluations_are_of_the_episodes_that_were_played(script, whole):
    played = script.steps(whole.record)
    *during, last = [script.episodes(played[env]) for env in played if env >= script.num_envs]
    assert returns(whole.run_dir) == [episode[0] for episode in last]
    assert {len(episodes) for episodes in [*during, last]} == {script.num_evaluations}
    assert f"evaluation: {np.mean(returns(whole.run_dir)):.1f} +- " in whole.result.stdout
    logged = scalars(whole.run_dir, "eval/episodic_return")
    means = [np.mean([episode[0] for episode in episodes]) for episodes in during]
    assert [*logged.values()] == pytest.approx(means, rel=1e-6)
    best = load_checkpoint(whole.run_dir, "best.pt")
    assert best["run"]["global_step"] == max(logged, key=logged.get)


def test_evaluate(script, whole, tmp_path):
    """It repeats the last evaluation, and plays best.pt; it changes nothing.

    So does a copy of the script under another name, with a flag more. The copy can't resume it.
    """
    copy = tmp_path / "copy.py"
    line = "\n    env_id: str"
    text = script.path.read_text()
    copy.write_text(text.replace(line, f"\n    more: float = 0.5  # a new flag{line}"))
    assert copy.read_text().count("more: float") == 1
    assert_fails(script.run(whole.cwd, f"--resume {RUN}", path=copy), 2, script.path.name)
    before = contents(whole.run_dir)
    last = last_evaluation(script, whole.record)
    more = f"--evaluate {RUN} --eval-episodes {script.num_evaluations + 1}"
    played = play_again(script, whole.cwd, more, script.path)
    assert played[: len(last)] == last != played
    assert play_again(script, whole.cwd, f"--evaluate {RUN}", copy) == last

    # On the same episodes, the best networks give the same as when they are the last ones
    run_dir = Path(shutil.copytree(whole.run_dir, tmp_path / RUN))
    change_best(run_dir)
    best = play_again(script, tmp_path, f"--evaluate {RUN}/best.pt", copy)
    shutil.copyfile(run_dir / "best.pt", run_dir / "checkpoint.pt")
    assert play_again(script, tmp_path, f"--evaluate {RUN}", script.path) == best != last
    assert contents(whole.run_dir) == before


def change_best(run_dir):
    """Makes sure that the best networks are not the last ones."""
    agent = load_checkpoint(run_dir, "best.pt")["agent"]
    agent = {name: x.flip(0) if x.ndim else x for name, x in agent.items()}
    edit_checkpoint(run_dir, "best.pt", agent=agent)


def last_evaluation(script, record):
    """Its actions and rewards."""
    steps = script.steps(record)[max(seeds(record))]
    return [(step["action"], step["reward"]) for step in steps]


def play_again(script, cwd, flags, path):
    """What an evaluation plays, and says."""
    record = cwd.parent / f"record-of-{cwd.name}"
    record.write_text("")
    result = script.succeed(cwd, flags, path=path, TOY_RECORD=record)
    record = read_record(record)
    episodes = script.episodes(script.steps(record)[max(seeds(record))])
    assert f"evaluation: {np.mean([x[0] for x in episodes]):.1f} +- " in result.stdout
    return last_evaluation(script, record)


# A run from another's networks


def statistics(checkpoint):
    """{path: array} of the running means and variances in it."""
    found = leaves({name: x for name, x in checkpoint.items() if name != "agent"})
    return {
        path: np.frombuffer(x[2]) for path, x in found.items() if re.search("rms/(mean|var)$", path)
    }


def test_init_from(script, whole, tmp_path):
    """Networks and statistics are the old run's, all else is new; it can be deleted then."""
    old = Path(shutil.copytree(whole.run_dir, tmp_path / "old"))
    change_best(old)
    flags = f"{script.short} --seed 5"
    fault = f"SIGKILL {100 if script.is_game else 5}@0"
    saved = []
    for name, more in ("plain", ""), ("from", f"--init-from {old}"), ("best", "--init-from best"):
        more = more.replace("best", str(old / "best.pt"))
        script.die(tmp_path, f"{flags} --run-name {name} {more}", fault)
        saved.append(load_checkpoint(tmp_path / "runs" / name))
    plain, new, from_best = saved
    last, best = load_checkpoint(old), load_checkpoint(old, "best.pt")
    assert leaves(new["agent"]) == leaves(last["agent"]) != leaves(plain["agent"])
    assert leaves(from_best["agent"]) == leaves(best["agent"]) != leaves(last["agent"])
    expected = statistics(last)
    assert bool(expected) == (script.name == "ppo_continuous_action")
    for path, array in statistics(new).items():  # the first observations may be in it
        np.testing.assert_allclose(array, expected[path], rtol=0.3, atol=0.1)
    taken = "rms|wall_seconds|actor|critic|alpha|target"
    for name in plain.keys() - {"agent", "args", "machine", "script"}:
        ours, theirs = leaves(plain[name]), leaves(new[name])
        found = [path for path in ours if ours[path] != theirs.get(path)]
        assert not [x for x in found if not re.search(taken, x)]
    shutil.rmtree(old)
    script.succeed(tmp_path, "--resume runs/from")


# Strangers' environments


def needs_vectors(script):
    if script.is_game:
        pytest.skip("its wrappers make images of whatever there is")


def test_fractions_after_integers_at_reset(script, tmp_path):
    """Observations are what the algorithm computes with, whatever the first reset gives."""
    needs_vectors(script)
    for variant in ("Whole", "Integers"):
        script.succeed(tmp_path / variant, script.on(variant))
    assert differences(*(tmp_path / variant / RUN for variant in ("Whole", "Integers"))) == []


def test_an_environment_that_uses_info_episode_itself(script, short, tmp_path):
    needs_vectors(script)
    script.succeed(tmp_path, script.on("Numbered"))
    assert differences(short.outcome, tmp_path / RUN) == []


def test_spaces_of_other_packages_are_refused(script, tmp_path):
    """By the name of their class and its module."""
    needs_vectors(script)
    assert_fails(script.run(tmp_path, script.on("Talking")), 2, "toys.Words")
    assert_fails(script.run(tmp_path, script.on("Old")), 2, "toys.OldSpace")
    assert not (tmp_path / RUN / "checkpoint.pt").exists()


def test_what_reset_and_step_return_is_checked(script, tmp_path):
    needs_vectors(script)
    words = {"alone": "reset()", "short": "reset()", "row": "number", "pair": "number"}
    for what in toys.RETURNS:
        result = script.run(tmp_path, script.on(what.capitalize()))
        assert_fails(result, 2, words.get(what, "step()"))


# Flags


@every_script
def test_help(script, tmp_path):
    """Every flag is there, with a meaning and its default."""
    text = script.succeed(tmp_path, "--help").stdout
    text = " ".join(text.replace("│", " ").split())
    flags = [name.replace("_", "-") for name in asdict(script.module.Args())]
    # Behind the name comes its type or --no-name; in the meaning of another flag it hasn't any
    places = [re.search(rf" --{flag}(, | [{{A-Z\[])", text).start() for flag in flags]
    assert places == sorted(places)
    for place, end in zip(places, [*places[1:], len(text)]):
        meaning, default, _ = text[place:end].partition("(default: ")
        assert len(meaning.split()) > 3 and default, meaning  # name, type, and two words at least


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
ATARI_FLAGS = {"env_id": "BreakoutNoFrameskip-v4", "total_timesteps": 10000000, "num_envs": 8}
ATARI_FLAGS |= {"clip_coef": 0.1, "amp": False}
HIDDEN = {"hidden_sizes": (64, 64)}
LSTM_FLAGS = {"cell": "lstm", "hidden_size": 128, "memory": True}
REPLAY_FLAGS = {
    "env_id": "HalfCheetah-v5",
    "total_timesteps": 1000000,
    "learning_rate": 3e-4,
    "num_envs": 1,
    "gamma": 0.99,
    "hidden_sizes": (256, 256),
    "buffer_size": 1000000,
    "batch_size": 256,
    "tau": 0.005,
    "learning_starts": 25000,
    "updates_per_step": 1.0,
    "max_grad_norm": None,
}
NOISE = {"policy_frequency": 1, "noise_type": "gaussian", "exploration_noise": 0.1}
PQN_FLAGS = {
    "env_id": "CartPole-v1",
    "total_timesteps": 500000,
    "learning_rate": 2.5e-4,
    "num_envs": 4,
    "num_steps": 128,
    "anneal_lr": True,
    "gamma": 0.99,
    "q_lambda": 0.65,
    "num_minibatches": 4,
    "update_epochs": 4,
    "max_grad_norm": 10.0,
    "start_e": 1.0,
    "end_e": 0.05,
    "exploration_fraction": 0.5,
}
DQN_FLAGS = {
    "env_id": "CartPole-v1",
    "total_timesteps": 500000,
    "learning_rate": 2.5e-4,
    "num_envs": 1,
    "gamma": 0.99,
    "buffer_size": 10000,
    "batch_size": 128,
    "tau": 1.0,
    "target_network_frequency": 500,
    "learning_starts": 10000,
    "train_frequency": 10,
    "start_e": 1.0,
    "end_e": 0.05,
    "exploration_fraction": 0.5,
    "n_step": 1,
    "double": False,
    "dueling": False,
}
DQN_ATARI_FLAGS = {
    "env_id": "BreakoutNoFrameskip-v4",
    "total_timesteps": 10000000,
    "learning_rate": 1e-4,
    "buffer_size": 1000000,
    "batch_size": 32,
    "target_network_frequency": 1000,
    "learning_starts": 80000,
    "train_frequency": 4,
    "end_e": 0.01,
    "exploration_fraction": 0.1,
    "amp": False,
}
# Constants that are published, CleanRL's and openai/baselines' for PPO
DEFAULTS = {
    "ppo": PPO_FLAGS | HIDDEN,
    "ppo_mask": PPO_FLAGS | HIDDEN | {"env_id": "Taxi-v4"},
    "ppo_penalty": PPO_FLAGS | HIDDEN,
    "ppo_pettingzoo": PPO_FLAGS
    | HIDDEN
    | {
        "env_id": "mpe2.simple_spread_v3",
        "total_timesteps": 1000000,
        "learning_rate": 7e-4,
        "num_envs": 32,
        "num_steps": 50,
        "update_epochs": 10,
        "clip_vloss": False,
        "centralised_critic": False,
    },
    "ppo_lstm": PPO_FLAGS | HIDDEN | LSTM_FLAGS,
    "ppo_atari": PPO_FLAGS | ATARI_FLAGS,
    "ppo_atari_vector": PPO_FLAGS | ATARI_FLAGS,
    "ppo_atari_multigpu": PPO_FLAGS | ATARI_FLAGS | {"sync_norm_adv": True},
    "ppo_atari_lstm": PPO_FLAGS | ATARI_FLAGS | LSTM_FLAGS,
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
        "recompute_advantages": False,
    },
    "ppo_continuous_action_ray": {"num_envs": 8, "num_steps": 256, "overlap": False},
    "a2c": HIDDEN
    | {
        "learning_rate": 7e-4,
        "num_envs": 8,
        "num_steps": 5,
        "anneal_lr": True,
        "gamma": 0.99,
        "gae_lambda": 1.0,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
    },
    "vpg": HIDDEN | {"learning_rate": 2.5e-3, "num_envs": 8, "baseline": "value", "gamma": 0.99},
    "dqn": DQN_FLAGS | {"hidden_sizes": (120, 84)},
    "dqn_atari": DQN_FLAGS | DQN_ATARI_FLAGS | {"huber": False},
    "c51_atari": DQN_FLAGS
    | DQN_ATARI_FLAGS
    | {
        "learning_rate": 2.5e-4,
        "target_network_frequency": 10000,
        "n_atoms": 51,
        "v_min": -10.0,
        "v_max": 10.0,
    },
    "pqn": PQN_FLAGS | {"hidden_sizes": (120, 84)},
    "pqn_atari": PQN_FLAGS
    | {
        "env_id": "BreakoutNoFrameskip-v4",
        "total_timesteps": 10000000,
        "num_envs": 8,
        "end_e": 0.01,
        "exploration_fraction": 0.1,
        "amp": False,
    },
    "ddpg_continuous_action": REPLAY_FLAGS | NOISE,
    "td3_continuous_action": REPLAY_FLAGS
    | NOISE
    | {"policy_frequency": 2, "policy_noise": 0.2, "noise_clip": 0.5},
    "sac_continuous_action": REPLAY_FLAGS | {"learning_starts": 5000, "autotune": True},
    "ddpg_lstm": REPLAY_FLAGS
    | {
        "env_id": "Pendulum-v1",
        "total_timesteps": 100_000,
        "learning_starts": 1000,
        "hidden_sizes": (64,),
        "cell": "lstm",
        "hidden_size": 64,
        "batch_size": 32,
        "sequence_length": 20,
        "burn_in": 20,
    },
}


@every_script
def test_defaults(script):
    flags = asdict(script.module.Args())
    expected = DEFAULTS[script.name] | {"exp_name": script.name}
    assert {name: flags[name] for name in expected} == expected


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
def test_schedules(script):
    """test_longer tries those that the script names: here they are all named."""
    schedules = {"anneal_lr", "anneal_clip", "exploration_fraction"}
    assert {*script.module.SCHEDULES} == schedules & {*asdict(script.module.Args())}
