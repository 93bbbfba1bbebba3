"""ppo_continuous_action.py as its user meets it: processes, and what they leave.

Most runs are on a toy environment (module TOY, found by PYTHONPATH), which is fast, random, ends
its episodes in both ways, draws its own frames, and does what TOY_FAULT says at an exact step:
sends the process a signal, gives NaN, or fails to render. A killed run is resumed and compared,
bit for bit, with one that nothing interrupted.
"""

import fcntl
import json
import os
import pty
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import asdict
from pathlib import Path

import imageio.v2 as imageio
import pytest
import torch
from processes import (
    RUN,
    contents,
    differences,
    episode_rows,
    events,
    load_checkpoint,
    outcome,
    progress,
    variables,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_continuous_action as ppo

SCRIPT = Path(ppo.__file__)

TOY = '''
import os
import random
import signal

import gymnasium as gym
import numpy as np

steps = 0  # of all environments of this process
FAULT, FAULT_STEP = (os.environ.get("TOY_FAULT") or "none 0").split()


class Toy(gym.Env):
    """Two coordinates that the action and noise move.

    An episode has 3 to 17 steps; the odd ones end by termination, the others by truncation.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None, observation_space=None, action_space=None):
        self.render_mode = render_mode
        self.observation_space = observation_space or gym.spaces.Box(-np.inf, np.inf, (3,))
        self.action_space = action_space or gym.spaces.Box(-1.0, 1.0, (2,))

    def observe(self):
        return np.array([*self.x, self.t], np.float64)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=2)
        self.t = 0
        self.end = self.np_random.integers(3, 18)
        return self.observe(), {}

    def step(self, action):
        global steps
        steps += 1
        if FAULT.startswith("SIG") and steps == int(FAULT_STEP):
            for name in FAULT.split(","):
                os.kill(os.getpid(), getattr(signal, name))
        self.x = self.x + 0.1 * action + 0.1 * self.np_random.normal(size=2)
        self.t += 1
        obs, reward, late = self.observe(), -float(self.x @ self.x), steps >= int(FAULT_STEP)
        if FAULT == "nan-reward" and late:
            reward = float("nan")
        if FAULT == "nan-observation" and late:
            obs[0] = np.nan
        ended = self.t == self.end
        return obs, reward, bool(ended and self.end % 2), bool(ended and not self.end % 2), {}

    def render(self):
        """A grey frame, brighter with every step of the episode."""
        if FAULT == "render":
            raise OSError("no display found")
        return np.full((64, 64, 3), 10 * self.t, np.uint8)


class Blind(Toy):
    metadata = {"render_modes": []}

    def __init__(self):
        super().__init__()


class Lucky(Toy):
    """Its last rewards depend on the states of Python's and NumPy's generators."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        luck = random.random() + np.random.random()
        if self.t == self.end:
            reward += 0.1 * luck
        return obs, reward, *rest


class Short(Toy):
    """Its episodes are as long as something outside of it says, and no step can follow."""

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.end = int(os.environ.get("END", 17))
        return obs, info

    def step(self, action):
        if self.t == self.end:
            raise RuntimeError("a step after the episode's end")
        return super().step(action)


spaces = gym.spaces
numbers = spaces.Box(-1.0, 1.0, (2,))
gym.register("Toy-v0", Toy)
gym.register("ToyBlind-v0", Blind)
gym.register("ToyLucky-v0", Lucky)
gym.register("ToyShort-v0", Short)
gym.register("ToyTuple-v0", Toy, kwargs={"observation_space": spaces.Tuple([numbers, numbers])})
ragged = spaces.Dict(numbers=spaces.Sequence(numbers))
gym.register("ToyRagged-v0", Toy, kwargs={"observation_space": ragged})
gym.register("ToyInteger-v0", Toy, kwargs={"action_space": spaces.Box(0, 3, (2,), np.int64)})
'''

# 40 iterations of 300 steps, checkpoints at 0, 15, 30 and 40: a kill loses up to 15 iterations and
# 400 episodes; each environment gets four seeds
SIZES = "--num-envs 3 --num-steps 100 --num-minibatches 4 --update-epochs 2 --eval-episodes 3"
TOY_RUN = (
    f"--env-id toy:ToyLucky-v0 {SIZES} --total-timesteps 12000 --checkpoint-interval 15 "
    "--run-name run"
)
TINY_RUN = f"--env-id toy:Toy-v0 {SIZES} --total-timesteps 600 --run-name run"
CLEANRL_TAGS = [
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/SPS",
    "charts/learning_rate",
    "losses/value_loss",
    "losses/policy_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
]


def prepare(cwd, flags, compiled=False, fault="", python_flags=(), **env):
    """The command and the variables of a process in the folder cwd, without a login or a GPU."""
    cwd.mkdir(exist_ok=True)
    (cwd / "toy.py").write_text(TOY)
    command = [sys.executable, *python_flags, str(SCRIPT), *shlex.split(flags)]
    if not compiled:
        command.append("--no-compile")
    return command, variables(cwd, **({"TOY_FAULT": fault, "PYTHONPATH": cwd} | env))


@pytest.fixture(scope="module", autouse=True)
def forks(server):
    """Lets run use the server."""
    global SERVER
    SERVER = server


def run(cwd, flags, stdin="", preexec_fn=None, python_flags=(), compiled=False, **options):
    """Runs the script to its end: returncode, stdout and stderr. options: as for prepare.

    It is a fork of the server, or a process of its own where that makes a difference.
    """
    command, env = prepare(cwd, flags, compiled, python_flags=python_flags, **options)
    if not (stdin or preexec_fn or python_flags or compiled):
        return SERVER.run(SCRIPT, cwd, shlex.join(command[2:]), **env)
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        input=stdin,
        preexec_fn=preexec_fn,
        capture_output=True,
        text=True,
        timeout=600,
    )


def succeed(cwd, flags, **options):
    """Runs the script to an end that must be good."""
    result = run(cwd, flags, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def assert_fails(result, code, *words):
    """It ended with this code, no stack trace, and a sentence on stderr that has these words."""
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    assert result.returncode == code, result.stdout + result.stderr
    assert not [word for word in words if word.lower() not in result.stderr.lower()], result.stderr


def resume(cwd, flags="", **options):
    return run(cwd, f"--resume {RUN} {flags}", **options)


def saved_envs(run_dir):
    """The states of the environments in a checkpoint."""
    return load_checkpoint(run_dir)["envs"]["envs"]["envs"]


def edit_checkpoint(run_dir, without=None, **changes):
    """Takes an entry, such as agent or run/iteration, out of a checkpoint, and changes others."""
    checkpoint = load_checkpoint(run_dir) | changes
    if without is not None:
        *parts, name = without.split("/")
        state = checkpoint
        for part in parts:
            state = state[part]
        del state[name]
    torch.save(checkpoint, run_dir / "checkpoint.pt")


def frames(path):
    """Mean brightness of every frame of a video."""
    with imageio.get_reader(path) as reader:
        return [frame.mean() for frame in reader]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    return cwd / RUN, succeed(cwd, TOY_RUN)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """The folder of the same run, stopped in iteration 21, for `stopped` to copy."""
    cwd = tmp_path_factory.mktemp("stopped")
    result = run(cwd, TOY_RUN, fault="SIGTERM 6050")
    assert result.returncode == 143, result.stderr
    return cwd / RUN


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of the stopped run to damage, in tmp_path."""
    return Path(shutil.copytree(stopped_run, tmp_path / RUN))


def test_config(whole):
    config = json.loads((whole[0] / "config.json").read_text())
    assert (
        config["args"]["env_id"] == "toy:ToyLucky-v0" and config["args"]["total_timesteps"] == 12000
    )
    assert config["args"]["learning_rate"] == 3e-4 and config["args"]["run_name"] == "run"
    assert config["defaults"] == json.loads(json.dumps(asdict(ppo.Args())))
    assert config["script"] == str(SCRIPT)
    assert config["command"][0] == str(SCRIPT) and "--total-timesteps" in config["command"]
    assert (
        config["versions"]["torch"] == torch.__version__
        and config["machine"]
        and "git_commit" in config
    )


def test_tensorboard_as_cleanrl(whole):
    """CleanRL's tags, readable by tensorboard; losses once per iteration, at its last step."""
    accumulator = EventAccumulator(str(whole[0]), size_guidance={"scalars": 0}).Reload()
    assert sorted(accumulator.Tags()["scalars"]) == sorted(CLEANRL_TAGS)
    for tag in CLEANRL_TAGS[2:]:
        assert [scalar.step for scalar in accumulator.Scalars(tag)] == list(range(300, 12001, 300))
    rates = [scalar.value for scalar in accumulator.Scalars("charts/learning_rate")]
    assert rates == pytest.approx(
        [3e-4 * (1 - i / 40) for i in range(40)]
    )  # first lr0, last lr0 / N
    assert all(scalar.value > 0 for scalar in accumulator.Scalars("charts/SPS"))
    assert all(0 <= scalar.value <= 1 for scalar in accumulator.Scalars("losses/clipfrac"))


def test_annealing_of_clip_range(whole, tmp_path):
    """The first iteration is the same, the later ones are not."""
    succeed(tmp_path, TOY_RUN + " --anneal-clip --no-anneal-lr")
    ours = {(tag, step): value for tag, step, value in events(tmp_path / RUN)}
    theirs = {(tag, step): value for tag, step, value in events(whole[0])}
    assert ours["losses/policy_loss", 300] == theirs["losses/policy_loss", 300]
    assert ours["losses/policy_loss", 12000] != theirs["losses/policy_loss", 12000]
    assert ours["losses/clipfrac", 12000] > theirs["losses/clipfrac", 12000]
    assert ours["charts/learning_rate", 12000] == ours["charts/learning_rate", 300]


def test_kill_before_first_checkpoint(tmp_path):
    """Nothing is lost and nothing is in the way: the same command starts the run."""
    (tmp_path / "bin").mkdir()
    for name in (
        "g++",
        "clang",
        "clang++",
    ):  # with --compile, the script looks for a compiler before it starts
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nkill -9 $PPID\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    killed = run(tmp_path, TINY_RUN, compiled=True, CXX="g++", **env)
    assert (
        killed.returncode == -signal.SIGKILL and not (tmp_path / RUN / "checkpoint.pt").exists()
    ), killed.stderr
    assert_fails(resume(tmp_path), 2, "checkpoint.pt")
    succeed(tmp_path, TINY_RUN)
    rows = episode_rows(tmp_path / RUN)
    assert (
        len(rows) == sum(tag == "charts/episodic_length" for tag, *_ in events(tmp_path / RUN)) > 0
    )


def kill_at(cwd, flags, iteration):
    """Starts the script and kills it from outside once its checkpoint has reached an iteration."""
    command, env = prepare(cwd, flags)
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL)
    try:
        path = cwd / RUN / "checkpoint.pt"
        while not path.exists() or progress(path.parent)["iteration"] < iteration:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL


def test_resume_of_halfcheetah(tmp_path):
    """Episodes in progress of a physics engine come back to equal bits."""
    flags = (
        "--env-id HalfCheetah-v5 --num-envs 2 --num-steps 75 --num-minibatches 5 --update-epochs 4"
    )
    flags += " --eval-episodes 1 --total-timesteps 6000 --checkpoint-interval 7 --run-name run"
    succeed(tmp_path / "whole", flags)
    (tmp_path / "killed").mkdir()
    kill_at(tmp_path / "killed", flags, iteration=14)
    assert all(len(env["actions"]) > 0 for env in saved_envs(tmp_path / "killed" / RUN))
    result = resume(tmp_path / "killed")
    assert result.returncode == 0, result.stderr
    assert differences(tmp_path / "whole" / RUN, tmp_path / "killed" / RUN) == []


def test_resume_with_compilation(tmp_path):
    flags = f"{TOY_RUN} --num-minibatches 1 --total-timesteps 6000"
    result = succeed(tmp_path / "whole", flags, compiled=True)
    assert result.stdout.startswith("compiling the update: ")  # before the first silence
    if "without compilation" in result.stdout:
        pytest.skip("no C++ compiler here")
    assert (
        run(tmp_path / "killed", flags, compiled=True, fault="SIGKILL 4000").returncode
        == -signal.SIGKILL
    )
    result = run(tmp_path / "killed", f"--resume {RUN}", compiled=True)
    assert result.returncode == 0, result.stderr
    assert differences(tmp_path / "whole" / RUN, tmp_path / "killed" / RUN) == []


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM,SIGTERM", 143)])
def test_resume_after_signal(whole, tmp_path, name, code):
    """Ctrl-C and SIGTERM, which some engines send twice: the iteration is finished and saved.

    The message says how to go on.
    """
    result = run(tmp_path, TOY_RUN, fault=f"{name} 6050")
    assert result.returncode == code and "Traceback" not in result.stderr, result.stderr
    assert (
        f"--resume {RUN}" in result.stdout + result.stderr
        and "6300" in result.stdout + result.stderr
    )
    assert (
        progress(tmp_path / RUN)["iteration"] == 21
        and not (tmp_path / RUN / "evaluation.json").exists()
    )
    assert resume(tmp_path).returncode == 0
    assert differences(whole[0], tmp_path / RUN) == []


@pytest.mark.parametrize("names", ["SIGINT,SIGINT", "SIGTERM,SIGINT"])
def test_second_ctrl_c(tmp_path, names):
    """Whoever doesn't wait for the end of the iteration loses what came since the checkpoint."""
    result = run(tmp_path, TOY_RUN, fault=f"{names} 6050")
    assert_fails(result, 130, "stopped at once", f"--resume {RUN}")
    assert progress(tmp_path / RUN)["iteration"] == 15


def test_signal_in_evaluation(tmp_path):
    result = run(tmp_path, TINY_RUN, fault="SIGTERM 610")
    assert_fails(result, 143, f"--resume {RUN}")
    assert progress(tmp_path / RUN)["iteration"] == 2
    assert not (tmp_path / RUN / "evaluation.json").exists()


def test_ctrl_c_in_evaluate(whole):
    result = run(whole[0].parents[1], f"--evaluate {RUN} --eval-episodes 1000", fault="SIGINT 60")
    assert_fails(result, 130, "stopped")


def test_resume_with_lost_log(whole, stopped, tmp_path):
    """Whoever tidied up TensorBoard's files gets the same run, and what it logs from there on."""
    step = progress(stopped)["global_step"]
    for path in stopped.glob("events.*"):
        path.unlink()
    result = resume(tmp_path)
    assert result.returncode == 0, result.stderr
    results = [outcome(whole[0]), outcome(stopped)]
    logs = [[x for name, x in run.items() if name.startswith("events")] for run in results]
    assert logs[1] == [event for event in logs[0] if event[1] > step]
    rest = [{name: x for name, x in run.items() if "events" not in name} for run in results]
    assert differences(*rest) == []


BAD_FLAGS = {
    "minibatches": ("--num-minibatches 7", "must be a multiple of --num-minibatches"),
    "minibatches-of-one": ("--num-minibatches 300", "--no-norm-adv"),
    "negative-steps": ("--total-timesteps -5", "--total-timesteps"),
    "no-envs": ("--num-envs 0", "--num-envs"),
    "negative-envs": ("--num-envs -1", "--num-envs"),
    "no-rollout": ("--num-steps 0", "--num-steps"),
    "no-minibatches": ("--num-minibatches 0", "--num-minibatches"),
    "no-epochs": ("--update-epochs 0", "--update-epochs"),
    "no-checkpoints": ("--checkpoint-interval 0", "--checkpoint-interval"),
    "negative-evaluation": ("--eval-episodes -1", "--eval-episodes"),
    "negative-learning-rate": ("--learning-rate -1", "--learning-rate"),
    "nan-learning-rate": ("--learning-rate nan", "--learning-rate"),
    "negative-clip": ("--clip-coef -0.2", "--clip-coef"),
    "gamma": ("--gamma 1.5", "--gamma"),
    "negative-lambda": ("--gae-lambda -0.1", "--gae-lambda"),
    "lambda": ("--gae-lambda 1.1", "--gae-lambda"),
    "negative-seed": ("--seed -1", "--seed"),
    "seed": (f"--seed {2**32}", "--seed"),
    "negative-threads": ("--num-threads -1", "--num-threads"),
    "too-many-threads": ("--num-threads 100000000000", "--num-threads"),
    "run-name-empty": ("--run-name ''", "--run-name"),
    "nan-entropy": ("--ent-coef nan", "--ent-coef"),
    "nan-limit": ("--target-kl nan", "--target-kl"),
    "negative-values": ("--vf-coef -0.5", "--vf-coef"),
    "infinite-deviation": ("--init-log-std inf", "--init-log-std"),
    "no-number": ("--num-envs two", "num-envs"),
    "run-name-elsewhere": ("--run-name ../x/run", "--run-name"),
    "run-name-inside": ("--run-name x/../run", "--run-name"),
    "run-name-above": ("--run-name ..", "--run-name"),
    "run-name-absolute": ("--run-name /nowhere/x/run", "--run-name"),
    "run-name-not-utf-8": ("--run-name run\udcff", "--run-name"),
    "best-of-nothing": ("--best", "--best needs"),
    "evaluate-while-training-without-episodes": (
        "--eval-interval 1 --eval-episodes 0",
        "--eval-episodes 0 needs --eval-interval 0",
    ),
    "negative-eval-interval": ("--eval-interval -1", "--eval-interval"),
    "no-steps-of-evaluation": ("--eval-max-steps 0", "--eval-max-steps"),
    "resume-nothing": ("--resume runs/nowhere", "runs/nowhere"),
    "resume-and-evaluate": ("--resume runs/x --evaluate runs/x", "give only one"),
    "evaluate-nothing": ("--evaluate runs/nowhere", "runs/nowhere"),
}

# What is refused after the flags have been read, and two bad flags: each needs a process
BAD_INPUT = {
    "near-matches": ("--env-id HalfCheeta-v5", "HalfCheeta-v5", "mean: `HalfCheetah`"),
    "no-such-version": ("--env-id Swimmer-v9", "Swimmer", "v5"),
    "malformed-id": ("--env-id 'not an id'", "not an id"),
    "no-module": ("--env-id nowhere:Toy-v0", "nowhere"),
    "no-module-at-all": ("--env-id :Toy-v0", ":Toy-v0"),
    "module-above": ("--env-id ..x:Toy-v0", "..x:Toy-v0"),
    "two-modules": ("--env-id a:b:Toy-v0", "a:b:Toy-v0"),
    "no-shimmy": ("--env-id dm_control/cartpole-balance-v0", "shimmy[dm-control]", "mujoco<4"),
    "discrete-actions": ("--env-id CartPole-v1", "CartPole-v1", "Discrete", "Box"),
    "integer-actions": ("--env-id toy:ToyInteger-v0", "int64"),
    "tuple-observations": ("--env-id toy:ToyTuple-v0", "Tuple"),
    "ragged-observations": ("--env-id toy:ToyRagged-v0", "Sequence"),
    "too-few-steps": ("--total-timesteps 299", "--total-timesteps", "300"),
    "unknown-flag": ("--no-such-flag 1", "--no-such-flag"),
    "track-without-login": ("--track", "wandb login", "WANDB_MODE=offline"),
}


RENDERERS = {
    "no-renderer": ("--env-id toy:Toy-v0", {"fault": "render 0"}),
    "no-frames": ("--env-id toy:ToyBlind-v0", {}),
    "no-pygame": ("--env-id Pendulum-v1", {}),
    "no-opengl": ("--env-id InvertedPendulum-v5", {"MUJOCO_GL": "nonsense"}),
    "no-display": ("--env-id InvertedPendulum-v5", {"MUJOCO_GL": "glfw", "DISPLAY": ""}),
}


class Bomb:
    """Its loading, by a pickle that may run code, makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_bomb(run_dir, legacy=False):
    """Puts a bomb into a checkpoint, tries it, and clears up after it."""
    bomb, path = run_dir.parent / "exploded", run_dir / "checkpoint.pt"
    checkpoint = load_checkpoint(run_dir)
    checkpoint["run"]["iteration"] = Bomb(bomb)
    torch.save(checkpoint, path, _use_new_zipfile_serialization=not legacy)
    torch.load(path, weights_only=False)
    bomb.rmdir()


def make_folder_of_checkpoint(run_dir):
    (run_dir / "checkpoint.pt").unlink()
    (run_dir / "checkpoint.pt").mkdir()


def cut_checkpoint(run_dir):
    path = run_dir / "checkpoint.pt"
    os.truncate(path, path.stat().st_size // 2)


def flip_byte(run_dir):
    path = run_dir / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def with_changes(**changes):
    """A damage by edit_checkpoint."""
    return lambda run_dir: edit_checkpoint(run_dir, **changes)


NO_RUN = str(RUN)  # the words of most sentences on a checkpoint that is none
NO_FIT = f"the checkpoint in {RUN} doesn't fit"
WRONG_SHAPES = {name: torch.zeros(3, 3) for name in ("actor_logstd", "critic.0.weight")}
DAMAGES = {
    "missing": (lambda run_dir: (run_dir / "checkpoint.pt").unlink(), NO_RUN),
    "folder": (make_folder_of_checkpoint, NO_RUN),
    "empty": (lambda run_dir: (run_dir / "checkpoint.pt").write_bytes(b""), NO_RUN),
    "truncated": (cut_checkpoint, NO_RUN),
    "flipped": (flip_byte, NO_RUN),
    "text": (lambda run_dir: (run_dir / "checkpoint.pt").write_bytes(b"no weights"), NO_RUN),
    "list": (lambda run_dir: torch.save([1, 2, 3], run_dir / "checkpoint.pt"), NO_RUN),
    "bomb": (write_bomb, NO_RUN),
    "legacy-bomb": (lambda run_dir: write_bomb(run_dir, legacy=True), NO_RUN),
    "other-script": (with_changes(script="ppo_atari.py"), "ppo_atari.py", SCRIPT.name),
    "other-version": (with_changes(args={"warp_factor": 9}), "warp_factor"),
    "args-of-wrong-type": (with_changes(args="--seed 1"), NO_RUN),
    "no-weights": (with_changes(agent={}), NO_FIT),
    "other-shapes": (with_changes(agent=WRONG_SHAPES), NO_FIT),
    "no-environments": (with_changes(envs={"envs": {"envs": []}}), NO_FIT),
    "statistics-of-wrong-type": (with_changes(obs_rms={"mean": 1, "var": 1, "count": 1}), NO_FIT),
}
for part in ("script", "args"):
    DAMAGES[f"no-{part}"] = (with_changes(without=part), NO_RUN)
for part in (
    "agent",
    "optimizer",
    "obs_rms",
    "return_rms",
    "envs",
    "run",
    "run/random",
    "run/iteration",
    "run/log_sizes",
):
    name = part.replace("/", "-")
    DAMAGES[f"no-{name}"] = (with_changes(without=part), NO_FIT)

# --evaluate reads it with the same function
EVALUATED = ("missing", "truncated", "bomb", "other-script", "no-agent")
DAMAGE_CASES = [("resume", name) for name in DAMAGES] + [("evaluate", name) for name in EVALUATED]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, stopped_run):
    """{case: (result, files of runs/ before, and after)} of all that must be refused."""
    folder = tmp_path_factory.mktemp("refusals")
    cases = {name: (f"{TINY_RUN} {flags}", {}) for name, (flags, *_) in BAD_INPUT.items()}
    cases |= {
        name: (f"{TINY_RUN} --capture-video {flags}", env)
        for name, (flags, env) in RENDERERS.items()
    }
    cases |= {(flag, name): (f"--{flag} {RUN}", {}) for flag, name in DAMAGE_CASES}
    cwds = [folder / "-".join([case] if isinstance(case, str) else case) for case in cases]
    for cwd, case in zip(cwds, cases):
        cwd.mkdir()
        if case in RENDERERS:
            (cwd / "pygame.py").write_text("raise ImportError('there is no pygame')")
        elif case not in BAD_INPUT:
            damage, *_ = DAMAGES[case[1]]
            damage(Path(shutil.copytree(stopped_run, cwd / RUN)))
    before = [contents(cwd / "runs") for cwd in cwds]
    results = [run(cwd, flags, **env) for cwd, (flags, env) in zip(cwds, cases.values())]
    after = [contents(cwd / "runs") for cwd in cwds]
    return dict(zip(cases, zip(results, before, after)))


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(refused, monkeypatch, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    flags, *words = BAD_FLAGS[case]
    sentence = refused(ppo, shlex.split(f"{TINY_RUN} {flags}"))
    assert not [word for word in words if word not in sentence], sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(refusals, case):
    """One sentence, and no run that would stand in the way of the next one of its name."""
    result, _, after = refusals[case]
    _, *words = BAD_INPUT[case]
    assert_fails(result, 2, *words)
    assert not [path for path in after if path.name == "checkpoint.pt"]


def test_a_folder_that_cannot_be_made(tmp_path):
    result = run(tmp_path, f"{TINY_RUN} --run-name {'x' * 300}")
    assert_fails(result, 1, "can't write", "File name too long", "start it again")
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("case", RENDERERS)
def test_video_without_renderer(refusals, case):
    result, before, after = refusals[case]
    assert_fails(result, 2, "can't")
    assert before == after == {}


@pytest.mark.parametrize("flag, damage", DAMAGE_CASES)
def test_damaged_checkpoint(refusals, flag, damage):
    """A sentence, and nothing is run or changed.

    The checkpoint is half a one, none, a stranger's, one with a bomb, one that loads and is no run.
    """
    result, before, after = refusals[flag, damage]
    assert_fails(result, 2, *DAMAGES[damage][1:])
    assert before == after  # a bomb that went off is seen here too


def test_hostile_log_sizes(stopped, tmp_path):
    """A checkpoint that names logs outside its folder changes nothing there."""
    victims = [tmp_path / "victim", stopped.parent / "victim"]
    for victim in victims:
        victim.write_text("precious")
    hostile = {"../victim": 0, f"{tmp_path}/victim": 0, "..": 0}
    saved = progress(stopped)
    edit_checkpoint(stopped, run=saved | {"log_sizes": saved["log_sizes"] | hostile})
    result = resume(tmp_path)
    assert "Traceback" not in result.stderr, result.stderr
    assert [victim.read_text() for victim in victims] == ["precious", "precious"]
    assert not (stopped / "victim").exists()


def limit_files(size):
    """Lets this process write no file larger than size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_checkpoint_write_failure(whole, stopped, tmp_path):
    """The disk takes half a checkpoint: a sentence, and the old checkpoint is as it was."""
    before = (stopped / "checkpoint.pt").read_bytes()
    limit = len(before) // 2
    result = resume(tmp_path, preexec_fn=lambda: limit_files(limit))
    assert_fails(result, 1, "can't write", f"--resume {RUN}")
    assert (stopped / "checkpoint.pt").read_bytes() == before
    assert resume(tmp_path).returncode == 0
    assert differences(whole[0], stopped) == []


def test_full_disk_for_logs(tmp_path):
    """The logs are what fills the disk: the same sentence."""
    for name in ("episodes.csv", "events"):
        (tmp_path / name).mkdir()
    limit = 16_384  # less than a checkpoint, so the very first one fails
    result = run(tmp_path, TINY_RUN, preexec_fn=lambda: limit_files(limit))
    assert_fails(result, 1, "can't write", "start it again")


def test_flags_at_their_ends(tmp_path):
    """What means something is no bad input.

    No discount, no value loss, one epoch, no clipping, seed 0.
    """
    flags = (
        f"{TINY_RUN} --gamma 0 --gae-lambda 0 --vf-coef 0 --target-kl 0 --clip-coef inf --seed 0 "
        "--max-grad-norm inf --init-log-std -20 --num-threads 0"
    )
    succeed(tmp_path, flags)


def test_ctrl_c_that_ends_the_reader_too(tmp_path):
    """As with `| tee log`: the run is saved before it finds out."""
    output = os.open("/dev/full", os.O_WRONLY)
    flags = TINY_RUN + " --total-timesteps 900"
    run(tmp_path, flags, fault="SIGINT 350", preexec_fn=lambda: os.dup2(output, 1))
    os.close(output)
    assert progress(tmp_path / RUN)["iteration"] == 2


def test_wandb_that_does_not_start_is_no_bad_input(tmp_path):
    """A sweep tries such a run again."""
    result = run(tmp_path, TOY_RUN + " --track", WANDB_MODE="nonsense")
    assert_fails(result, 1, "W&B doesn't start")


def test_wandb_offline(tmp_path):
    """For real: a run of W&B's own in the run's folder, with our scalars.

    After a kill and --resume it goes on.
    """
    flags, env = f"{TOY_RUN} --track", {"WANDB_MODE": "offline"}
    assert run(tmp_path, flags, fault="SIGKILL 8500", **env).returncode == -signal.SIGKILL
    result = resume(tmp_path, **env)
    assert result.returncode == 0, result.stderr
    stores = sorted((tmp_path / RUN).glob("wandb/offline-run-*/*.wandb"))
    assert len(stores) == 2 and len({store.name for store in stores}) == 1  # two parts of one run
    missing = [tag for tag in CLEANRL_TAGS if tag.encode() not in stores[-1].read_bytes()]
    assert not missing
    assert not list(tmp_path.glob("wandb"))


def expected_videos(run_dir, interval):
    """{file: length} of the finished training episodes that have a video."""
    lengths = [int(row["length"]) for row in episode_rows(run_dir) if row["env"] == "0"]
    return {f"episode-{i}.mp4": length for i, length in enumerate(lengths) if i % interval == 0}


def assert_video(path, length):
    """First frame to last of one episode: the toy's brightness is ten times the step."""
    assert frames(path) == pytest.approx([10 * t for t in range(length + 1)], abs=5)


def assert_videos(run_dir, interval):
    expected = expected_videos(run_dir, interval)
    count = sum(row["env"] == "0" for row in episode_rows(run_dir))
    found = {path.name for path in (run_dir / "videos").glob("*.mp4")}
    # An episode that the run's end cut may have one too
    assert found - {f"episode-{count}.mp4"} == set(expected)
    for name, length in expected.items():
        assert_video(run_dir / "videos" / name, length)
    evaluation = json.loads((run_dir / "evaluation.json").read_text())
    folder = run_dir / "videos" / "evaluation"
    assert sorted(path.name for path in folder.iterdir()) == [f"episode-{i}.mp4" for i in range(3)]
    for i, length in enumerate(evaluation["lengths"]):
        assert_video(folder / f"episode-{i}.mp4", length)


VIDEO_RUN = (
    TOY_RUN.replace("12000", "1800")
    + " --capture-video --video-interval 20 --checkpoint-interval 2"
)


@pytest.fixture(scope="module")
def filmed(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("filmed")
    succeed(cwd, VIDEO_RUN)
    return cwd / RUN


def test_videos(filmed):
    """Every N-th training episode of one environment and every evaluation, first to last frame."""
    assert len(expected_videos(filmed, 20)) >= 3
    assert_videos(filmed, 20)


def test_videos_do_not_change_the_run(filmed, tmp_path):
    succeed(tmp_path, VIDEO_RUN.replace("--capture-video", ""))
    assert differences(filmed, tmp_path / RUN) == []


def test_videos_after_kill(filmed, tmp_path):
    assert run(tmp_path, VIDEO_RUN, fault="SIGKILL 1400").returncode == -signal.SIGKILL
    assert resume(tmp_path).returncode == 0
    assert differences(filmed, tmp_path / RUN) == []
    assert_videos(tmp_path / RUN, 20)


@pytest.mark.parametrize("flag", ["evaluate", "resume"])
def test_videos_of_training_stay(filmed, tmp_path, flag):
    """Looking at a finished run leaves the videos of its training alone."""
    run_dir = Path(shutil.copytree(filmed, tmp_path / RUN))
    before = {path: path.read_bytes() for path in run_dir.glob("videos/*.mp4")}
    succeed(tmp_path, f"--{flag} {RUN} --capture-video")
    assert {path: path.read_bytes() for path in run_dir.glob("videos/*.mp4")} == before
    assert_videos(run_dir, 20)


def test_evaluate_with_video(whole, tmp_path):
    """A run that was trained without videos can be filmed later."""
    run_dir = Path(shutil.copytree(whole[0], tmp_path / RUN))
    succeed(tmp_path, f"--evaluate {RUN} --capture-video")
    videos = sorted(path.name for path in run_dir.glob("videos/**/*.mp4"))
    assert videos == ["episode-0.mp4", "episode-1.mp4", "episode-2.mp4"]


@pytest.mark.parametrize(
    "env_id, env", [("InvertedPendulum-v5", {"MUJOCO_GL": "egl"}), ("Pendulum-v1", {})]
)
def test_videos_of_known_environments(tmp_path, env_id, env):
    probe = (
        "import gymnasium\n"
        f"env = gymnasium.make('{env_id}', render_mode='rgb_array')\n"
        "env.reset()\n"
        "env.render().shape"
    )
    found = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, env=os.environ | env, capture_output=True
    )
    if found.returncode:
        reason = found.stderr.decode().strip().splitlines()[-1]
        pytest.skip(f"no renderer for {env_id} here: {reason}")
    flags = (
        f"--env-id {env_id} --num-steps 100 --num-minibatches 1 --total-timesteps 200 "
        "--eval-episodes 1 --run-name run --capture-video"
    )
    succeed(tmp_path, flags, **env)
    lengths = json.loads((tmp_path / RUN / "evaluation.json").read_text())["lengths"]
    assert len(frames(tmp_path / RUN / "videos/evaluation/episode-0.mp4")) == lengths[0] + 1


LOOK = """
print("HAVE", type(agent).__name__, len(envs.envs.envs), obs.shape, advantages.shape, returns.shape)
print("AGAIN", len(evaluate(agent, envs.obs_rms, args)["returns"]))
"""


@pytest.mark.parametrize("fault", ["", "SIGINT 450"])
def test_python_i(tmp_path, fault):
    """After the run, and after Ctrl-C, the shell has the run's variables."""
    flags = TINY_RUN + " --total-timesteps 3000"
    result = run(tmp_path, flags, stdin=LOOK, python_flags=["-i"], fault=fault)
    assert "HAVE Agent 3 (100, 3, 3) (100, 3) (100, 3)" in result.stdout, result
    assert "AGAIN 3" in result.stdout and "Traceback" not in result.stderr
    assert progress(tmp_path / RUN)["iteration"] == (2 if fault else 10)


SHELL = """
import signal
try: signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt: print("STAYS")

"""


@pytest.mark.parametrize(
    "flags, fault",
    [
        ("", ""),
        ("", "SIGINT 50"),
        ("", "SIGINT 350"),
        ("--resume runs/run", ""),
        ("--evaluate runs/run", ""),
        ("--evaluate runs/run --eval-episodes 1000", "SIGINT 60"),
    ],
)
def test_ctrl_c_in_the_shell(whole, tmp_path, flags, fault):
    """It stays, however the script has ended."""
    cwd = whole[0].parents[1] if flags else tmp_path
    result = run(cwd, flags or TINY_RUN, stdin=SHELL, python_flags=["-i"], fault=fault)
    assert "STAYS" in result.stdout, result
    assert ("stopped" in result.stdout + result.stderr) == bool(fault), result


def test_plain_progress(whole):
    """Where the output is no terminal, lines: the last one at the end."""
    _, result = whole
    (line,) = [line for line in result.stdout.splitlines() if "12000/12000" in line]
    assert "steps/s" in line and "return -" in line
    assert "\r" not in result.stdout + result.stderr


def test_a_run_needs_no_stderr(tmp_path):
    """As when it is started with 2>&-: then sys.stderr is None."""
    result = run(tmp_path, f"{TINY_RUN} --total-timesteps 300", preexec_fn=lambda: os.close(2))
    assert result.returncode == 0 and "evaluation:" in result.stdout, result.stdout


def test_live_progress(tmp_path):
    """On a terminal, a bar that is redrawn in its line."""
    command, env = prepare(tmp_path, TOY_RUN)
    terminal, ours = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=ours, stdout=ours, stderr=ours)
    os.close(ours)
    output = b""
    try:
        while chunk := os.read(terminal, 65536):
            output += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(terminal)
    assert process.wait() == 0, output.decode()
    parts = output.decode().replace("\r\n", "\n").split("\r")
    redrawn = [part for part in parts if "/12000" in part]
    assert len(redrawn) > 2 and "12000/12000" in redrawn[-1]
    assert all("steps/s" in part and "return -" in part for part in redrawn[1:])


def without_compiler(cwd):
    """Variables of a machine that has a shell and no C++ compiler.

    Its folder for compiled code is empty at first.
    """
    (cwd / "bin").mkdir()
    (cwd / "bin" / "sh").symlink_to("/bin/sh")
    return {
        "PATH": str(cwd / "bin"),
        "CXX": "",
        "CC": "",
        "TORCHINDUCTOR_CACHE_DIR": str(cwd / "cache"),
    }


def test_no_compiler(tmp_path):
    """One line says so, and the run is that of --no-compile."""
    result = succeed(tmp_path, TINY_RUN, compiled=True, **without_compiler(tmp_path))
    assert sum("without compilation" in line for line in result.stdout.splitlines()) == 1
    assert "Traceback" not in result.stdout + result.stderr
    assert progress(tmp_path / RUN)["iteration"] == 2


def test_compiler_is_gone(tmp_path):
    """A cache from the time when there was a compiler must not lead the run astray."""
    env = without_compiler(tmp_path)
    cache = {"TORCHINDUCTOR_CACHE_DIR": env["TORCHINDUCTOR_CACHE_DIR"]}
    result = succeed(tmp_path, TINY_RUN + " --num-minibatches 1", compiled=True, **cache)
    if "without compilation" in result.stdout:
        pytest.skip("no C++ compiler here")
    flags = TINY_RUN + " --num-minibatches 3 --run-name other"
    result = succeed(tmp_path, flags, compiled=True, **env)
    assert "without compilation" in result.stdout


def test_help(whole):
    """Every flag is there, with a meaning and its default."""
    result = run(whole[0].parents[1], "--help")
    assert result.returncode == 0
    text = " ".join(result.stdout.replace("│", " ").split())
    args = json.loads((whole[0] / "config.json").read_text())["args"]
    flags = [f" --{name.replace('_', '-')}" for name in args]
    places = sorted(
        (text.index(flag + " " if f"{flag} " in text else flag + ","), flag) for flag in flags
    )
    ends = [place for place, _ in places[1:]] + [len(text)]
    for (place, flag), end in zip(places, ends):
        meaning, default, _ = text[place:end].partition("(default: ")
        # The name, its type, and at least two words
        assert len(meaning.split()) > 3 and default, flag


CLEANRL = {
    "exp_name": "cleanrl",
    "seed": 3,
    "torch_deterministic": True,
    "cuda": False,
    "track": True,
    "wandb_project_name": "cleanRL",
    "wandb_entity": "nobody",
    "capture_video": False,
    "save_model": True,
    "env_id": "toy:Toy-v0",
    "total_timesteps": 256,
    "learning_rate": 1e-4,
    "num_envs": 2,
    "num_steps": 64,
    "anneal_lr": False,
    "gamma": 0.98,
    "gae_lambda": 0.9,
    "num_minibatches": 4,
    "update_epochs": 2,
    "norm_adv": False,
    "clip_coef": 0.1,
    "clip_vloss": False,
    "ent_coef": 0.01,
    "vf_coef": 0.4,
    "max_grad_norm": 1.0,
    "target_kl": 0.02,
}


def test_cleanrl_command_line(tmp_path):
    """All flags of CleanRL's ppo_continuous_action.py, but those for Hugging Face."""
    flags = ["--run-name run"]
    for name, value in CLEANRL.items():
        name = name.replace("_", "-")
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags.append(f"--no-{name}")
        else:
            flags.append(f"--{name} {value}")
    succeed(tmp_path, " ".join(flags), WANDB_MODE="disabled")
    args = json.loads((tmp_path / RUN / "config.json").read_text())["args"]
    assert {name: args[name] for name in CLEANRL} == CLEANRL
    weights = torch.load(tmp_path / RUN / "cleanrl.cleanrl_model", weights_only=True)
    assert "actor_logstd" in weights
