"""The section Run, on ppo_continuous_action.py, as its user meets it: processes and their files.

It is the same text in every script; what each one gives it is tested in test_behaviour.py.
"""

import fcntl
import importlib
import json
import os
import pty
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
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from processes import (
    RUN,
    assert_fails,
    contents,
    differences,
    edit_checkpoint,
    episode_rows,
    events,
    load_checkpoint,
    outcome,
    progress,
    read_record,
    returns,
    run_process,
    scalars,
    variables,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_continuous_action as ppo

SCRIPT = Path(ppo.__file__)
SIZES = (
    "--num-envs 3 --num-steps 50 --num-minibatches 3 --update-epochs 2 --eval-episodes 3"
    " --run-name run"
)
COMPILED = f"--env-id toys:Continuous-v0 {SIZES} --checkpoint-interval 3 --total-timesteps 1500"
FLAGS = f"{COMPILED} --no-compile"
TINY = f"{FLAGS} --total-timesteps 300"
CLEANRL_TAGS = [
    "charts/SPS",
    "charts/episodic_length",
    "charts/episodic_return",
    "charts/learning_rate",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/entropy",
    "losses/explained_variance",
    "losses/old_approx_kl",
    "losses/policy_loss",
    "losses/value_loss",
]


@pytest.fixture(scope="module")
def run(server):
    """run(cwd, flags, path=SCRIPT, **env): a fork that has ended."""

    def run(cwd, flags, path=SCRIPT, **env):
        return server.run(path, cwd, flags, **env)

    return run


@pytest.fixture(scope="module")
def succeed(run):
    def succeed(*words, **options):
        result = run(*words, **options)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    return succeed


@pytest.fixture(scope="module")
def whole(succeed, tmp_path_factory):
    """A run that nothing interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    result = succeed(cwd, FLAGS)
    return SimpleNamespace(cwd=cwd, run_dir=cwd / RUN, result=result, outcome=outcome(cwd / RUN))


@pytest.fixture(scope="module")
def stopped_run(run, tmp_path_factory):
    """The same run, stopped in iteration 5, for `stopped` to copy."""
    cwd = tmp_path_factory.mktemp("stopped")
    assert run(cwd, FLAGS, TOY_FAULT="SIGTERM 650").returncode == 143
    return cwd / RUN


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of the stopped run to damage, in tmp_path."""
    return Path(shutil.copytree(stopped_run, tmp_path / RUN))


# Folder and logs


def test_config(whole):
    config = json.loads((whole.run_dir / "config.json").read_text())
    assert config["args"]["env_id"] == "toys:Continuous-v0"
    assert config["args"]["total_timesteps"] == 1500
    assert config["defaults"] == json.loads(json.dumps(asdict(ppo.Args())))
    assert config["command"] == [str(SCRIPT), *shlex.split(FLAGS)]
    assert config["versions"]["torch"] == torch.__version__ == config["machine"]["torch"]
    assert config["machine"]["cpu"] and "git_commit" in config
    assert (whole.run_dir / SCRIPT.name).read_bytes() == SCRIPT.read_bytes()


def test_a_fork_has_the_bits_of_a_process(whole, tmp_path):
    result = run_process(SCRIPT, tmp_path, FLAGS)
    assert result.returncode == 0, result.stderr
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_tensorboard_as_cleanrl(whole):
    """CleanRL's tags; losses once an iteration, at its last step."""
    tags = {tag for tag, *_ in events(whole.run_dir)}
    assert sorted(tags) == CLEANRL_TAGS
    for tag in tags - {"charts/episodic_length", "charts/episodic_return"}:
        assert [*scalars(whole.run_dir, tag)] == list(range(150, 1501, 150))
    assert all(0 < value < 1e6 for value in scalars(whole.run_dir, "charts/SPS").values())


def test_tensorboard_shows_no_point_twice(run, succeed, whole, tmp_path):
    """What was logged after the checkpoint is in a file, and TensorBoard takes it back."""
    assert run(tmp_path, FLAGS, TOY_FAULT="save 3").returncode == -signal.SIGKILL
    lost = progress(tmp_path / RUN)["global_step"]
    (path,) = (tmp_path / RUN).glob("events.*")
    path.rename(path.with_name("events.out.tfevents.0000000000.earlier"))
    succeed(tmp_path, f"--resume {RUN}")
    shown = EventAccumulator(str(tmp_path / RUN), size_guidance={"scalars": 0}).Reload()
    for tag in CLEANRL_TAGS:
        found = [(tag, x.step, x.value) for x in shown.Scalars(tag)]
        assert found == [scalar for scalar in events(tmp_path / RUN) if scalar[0] == tag]
    path = tmp_path / RUN / "events.out.tfevents.0000000000.earlier"
    physical = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    assert max(x.step for x in physical.Scalars("losses/entropy")) > lost
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_a_run_is_named_by_what_it_is_and_never_shares_a_folder(run, succeed, whole, tmp_path):
    flags = TINY.replace("--run-name run", "--exp-name a/b --seed 7")
    succeed(tmp_path, flags)
    (folder,) = (tmp_path / "runs").iterdir()
    env_id, exp_name, seed, unixtime = folder.name.split("__")
    assert (env_id, exp_name, seed) == ("toys-Continuous-v0", "a-b", "7")
    assert abs(int(unixtime) - time.time()) < 100

    before = contents(whole.run_dir)
    assert_fails(run(whole.cwd, FLAGS), 2, str(RUN), "--resume", "--run-name")
    assert contents(whole.run_dir) == before


def test_a_run_is_locked_while_its_process_lives(server, run, succeed, whole, tmp_path):
    """No second process writes to its folder; one that only looks may."""
    fork = server.start(SCRIPT, tmp_path, FLAGS, TOY_FAULT="SIGSTOP 650")
    try:
        assert fork.wait().returncode is None
        before = contents(tmp_path / RUN)
        assert_fails(run(tmp_path, f"--resume {RUN}"), 2, str(RUN), "in use by another process")
        succeed(tmp_path, f"--evaluate {RUN}")
        assert contents(tmp_path / RUN) == before
        fork.send(signal.SIGCONT)
        assert fork.wait().returncode == 0
    finally:
        fork.kill()
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_an_environment_of_the_current_folder(succeed, tmp_path):
    text = "import gymnasium as gym, toys\ngym.register('Mine-v0', toys.Continuous)\n"
    (tmp_path / "my_envs.py").write_text(text)
    succeed(tmp_path, TINY.replace("toys:Continuous-v0", "my_envs:Mine-v0"))


def test_wandb_offline(run, succeed, tmp_path):
    """For real: a run of W&B's own in the run's folder. After a kill and --resume it goes on."""
    flags = f"{FLAGS} --track"
    killed = run(tmp_path, flags, TOY_FAULT="save 3", WANDB_MODE="offline")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    succeed(tmp_path, f"--resume {RUN}", WANDB_MODE="offline")
    stores = sorted((tmp_path / RUN).glob("wandb/offline-run-*/*.wandb"))
    assert len(stores) == 2 and len({store.name for store in stores}) == 1  # two parts of one run
    data = stores[-1].read_bytes()
    assert not [tag for tag in CLEANRL_TAGS if tag.encode() not in data]
    assert not list(tmp_path.glob("wandb"))
    succeed(tmp_path, f"{flags} --run-name disabled", WANDB_MODE="disabled")


# Stop and resume


def test_kill_before_the_first_checkpoint(run, succeed, whole, tmp_path):
    """Nothing is lost and nothing is in the way: the same command starts the run."""
    assert run(tmp_path, FLAGS, TOY_FAULT="save 1").returncode == -signal.SIGKILL
    assert not (tmp_path / RUN / "checkpoint.pt").exists()
    assert_fails(run(tmp_path, f"--resume {RUN}"), 2, "checkpoint.pt")
    succeed(tmp_path, FLAGS)
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_resume_of_halfcheetah(run, succeed, tmp_path):
    """Episodes in progress of a physics engine come back to equal bits."""
    flags = FLAGS.replace("toys:Continuous-v0", "HalfCheetah-v5") + " --eval-episodes 1"
    succeed(tmp_path / "whole", flags)
    killed = run(tmp_path / "killed", flags, TOY_FAULT="save 3")
    assert killed.returncode == -signal.SIGKILL
    assert progress(tmp_path / "killed" / RUN)["iteration"] == 3
    result = succeed(tmp_path / "killed", f"--resume {RUN}")
    assert "brought back" not in result.stdout
    assert differences(tmp_path / "whole" / RUN, tmp_path / "killed" / RUN) == []


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143), ("SIGINT,SIGTERM", 143)])
def test_a_signal_ends_the_run_after_its_iteration(run, succeed, whole, tmp_path, name, code):
    result = run(tmp_path, FLAGS, TOY_FAULT=f"{name} 650")
    assert result.returncode == code and "Traceback" not in result.stderr, result.stderr
    assert "the run stops after this iteration" in result.stderr
    assert progress(tmp_path / RUN)["iteration"] == 5
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole.outcome, tmp_path / RUN) == []


AT_ONCE = ["SIGINT,SIGINT 650", "SIGTERM,SIGINT 650", "SIGINT 1505", "SIGTERM 1505"]


@pytest.mark.parametrize("fault", AT_ONCE)
def test_a_signal_that_ends_the_run_at_once(run, succeed, whole, tmp_path, fault):
    """The second one, and one in the last evaluation: the last checkpoint is as it was."""
    result = run(tmp_path, FLAGS, TOY_FAULT=fault)
    assert result.returncode == (-signal.SIGTERM if fault == "SIGTERM 1505" else 130)
    assert progress(tmp_path / RUN)["iteration"] == (10 if "1505" in fault else 3)
    assert not (tmp_path / RUN / "evaluation.json").exists()
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_what_may_change_with_resume(run, succeed, whole, stopped, tmp_path):
    """Flags that change nothing that is learned; any other is refused with the run's value."""
    before = contents(stopped)
    for name, value, old in (("gamma", 0.5, 0.99), ("num-envs", 4, 3), ("anneal-lr", "", None)):
        result = run(tmp_path, f"--resume {RUN} --{name} {value}")
        if old is not None:
            assert_fails(result, 2, f"{{'{name.replace('-', '_')}': {old}}}")
            assert contents(stopped) == before
    longer = f"--resume {RUN} --total-timesteps 3000"
    succeed(tmp_path, f"--resume {RUN} --eval-episodes 1 --checkpoint-interval 1 --seed 1")
    assert len(returns(stopped)) == 1
    assert returns(stopped) == returns(whole.run_dir)[:1]
    assert_fails(run(tmp_path, longer), 2, "anneal_lr", "--init-from")


def test_a_resumed_run_that_is_finished_plays_its_evaluation_again(succeed, whole, tmp_path):
    shutil.copytree(whole.run_dir, tmp_path / RUN)
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_what_a_resume_would_miss_is_named(succeed, whole, tmp_path):
    """Any object of the main block with a state that run.restore wasn't given."""
    text = SCRIPT.read_text()
    place = "    optimizer = Adam(agent.parameters(), eps=1e-5)  # G11\n"
    assert text.count(place) == 1
    more = "    curiosity = nn.Linear(2, 2)\n"
    more += "    other_optimizer = Adam(curiosity.parameters(), eps=1e-5)\n"
    copy = tmp_path / "copy.py"
    copy.write_text(text.replace(place, place + more))
    lines = [x for x in succeed(tmp_path, TINY, path=copy).stdout.splitlines() if "restore" in x]
    assert [line.split()[0] for line in lines] == ["curiosity", "other_optimizer"]
    assert "restore" not in whole.result.stdout
    more_parts = "run.restore(curiosity=curiosity, other_optimizer=other_optimizer, "
    copy.write_text(copy.read_text().replace("run.restore(", more_parts))
    flags = TINY.replace("--run-name run", "--run-name other")
    assert "restore" not in succeed(tmp_path, flags, path=copy).stdout
    assert "curiosity" in load_checkpoint(tmp_path / "runs/other")


@pytest.mark.parametrize("name", ["torch", "cpu", "gpu", "compiled"])
def test_another_machine_is_named(succeed, whole, stopped, tmp_path, name):
    """By a line that says what the checkpoint was made with; the run goes on."""
    assert "bits may differ" not in whole.result.stdout
    saved = load_checkpoint(stopped)
    edit_checkpoint(stopped, machine=saved["machine"] | {name: "another"})
    result = succeed(tmp_path, f"--resume {RUN}")
    (line,) = [line for line in result.stdout.splitlines() if "bits may differ" in line]
    assert "another" in line
    assert differences(whole.outcome, stopped) == []


def test_a_full_disk(succeed, whole, stopped, tmp_path):
    """It takes half a checkpoint: the old one is as it was."""
    before = (stopped / "checkpoint.pt").read_bytes()
    words = [sys.executable, str(SCRIPT), "--resume", str(RUN)]
    command = f"ulimit -f {len(before) // 2048}; exec {shlex.join(words)}"
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=variables(tmp_path))
    assert result.returncode == 1
    assert (stopped / "checkpoint.pt").read_bytes() == before
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole.outcome, stopped) == []


# Compilation


def without_compiler(cwd):
    """Variables of a machine that has a shell and no C++ compiler, nor anything compiled."""
    (cwd / "bin").mkdir()
    (cwd / "bin" / "sh").symlink_to("/bin/sh")
    names = {"PATH": cwd / "bin", "TORCHINDUCTOR_CACHE_DIR": cwd / "cache"}
    return names | {"CXX": "", "CC": ""}


def test_resume_with_compilation(whole, tmp_path):
    """Killed when its logs are on the disk, and the checkpoint is not."""
    flags = f"{COMPILED} --num-minibatches 1"
    result = run_process(SCRIPT, tmp_path / "whole", flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("compiling update_minibatches: ")  # before the first silence
    if "without compilation" in result.stdout:
        pytest.skip("no C++ compiler here")
    killed = run_process(SCRIPT, tmp_path / "killed", flags, TOY_FAULT="save 3")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = run_process(SCRIPT, tmp_path / "killed", f"--resume {RUN}")
    assert result.returncode == 0 and "bits may differ" not in result.stdout, result.stderr
    assert differences(tmp_path / "whole" / RUN, tmp_path / "killed" / RUN) == []


def test_without_a_compiler(run, whole, tmp_path):
    """A line says so, and the run is that of --no-compile: also where it is resumed with one."""
    env = without_compiler(tmp_path)
    killed = run_process(SCRIPT, tmp_path, COMPILED, TOY_FAULT="save 3", **env)
    assert killed.returncode == -signal.SIGKILL
    lines = [line for line in killed.stdout.splitlines() if "without compilation" in line]
    assert len(lines) == 1 and "Traceback" not in killed.stdout + killed.stderr
    result = run(tmp_path, f"--resume {RUN}")
    assert result.returncode == 0, result.stderr
    assert "compil" not in result.stdout and "bits may differ" not in result.stdout
    assert differences(whole.outcome, tmp_path / RUN) == []


def test_a_compiled_run_resumed_without_a_compiler(stopped, tmp_path):
    saved = load_checkpoint(stopped)
    machine, args = saved["machine"] | {"compiled": True}, saved["args"] | {"compile": True}
    edit_checkpoint(stopped, machine=machine, args=args)
    env = without_compiler(tmp_path)
    result = run_process(SCRIPT, tmp_path, f"--resume {RUN}", **env)
    assert result.returncode == 0, result.stderr
    assert "running without compilation" in result.stdout
    assert "bits may differ" in result.stdout


# Bad input

BAD_FLAGS = {
    "--num-minibatches 7": "must be a multiple of --num-minibatches",
    "--num-minibatches 150": "--no-norm-adv",
    "--total-timesteps 149": "--total-timesteps is below a rollout, 150",
    "--total-timesteps -5": "--total-timesteps must be above 0",
    "--num-envs 0": "--num-envs must be above 0",
    "--num-steps 0": "--num-steps must be above 0",
    "--num-minibatches 0": "--num-minibatches must be above 0",
    "--update-epochs 0": "--update-epochs must be above 0",
    "--checkpoint-interval 0": "--checkpoint-interval must be above 0",
    "--eval-episodes 0": "--eval-episodes must be above 0",
    "--learning-rate nan": "--learning-rate must be above 0",
    "--clip-coef -0.2": "--clip-coef must be above 0",
    "--num-threads 0": "--num-threads must be above 0",
    "--resume ''": "is no checkpoint",
    "--resume a --init-from b": "only one of --resume, --evaluate and --init-from",
    "--gamma 1.5": "--gamma",
    "--gae-lambda -0.1": "--gae-lambda",
    "--target-kl 0": "--target-kl must be above 0",
    "--seed -1": "--seed",
    f"--seed {2**32}": "--seed",
    "--hidden-sizes": "--hidden-sizes",
    "--hidden-sizes 8 0": "--hidden-sizes",
    "--num-envs two": "num-envs",
    "--batch-size 100": "batch-size",
    "--resume runs/nowhere": "runs/nowhere",
    "--evaluate runs/nowhere": "runs/nowhere",
    "--init-from runs/nowhere": "runs/nowhere",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_flags(refused, monkeypatch, tmp_path, flags):
    monkeypatch.chdir(tmp_path)
    more = {"150": "--num-envs 3"}.get(flags.split()[-1], "")
    assert BAD_FLAGS[flags] in refused(ppo, shlex.split(f"{TINY} {more} {flags}"))
    assert not list(tmp_path.iterdir())


BAD_ENVIRONMENTS = {
    "HalfCheeta-v5": ("HalfCheeta-v5", "mean: `HalfCheetah`"),
    "Swimmer-v9": ("Swimmer", "v5"),
    "nowhere:Toy-v0": ("nowhere",),
    "CartPole-v1": ("CartPole-v1", "Discrete", "Box"),
    "toys:Multi-v0": ("MultiDiscrete", "Box"),
}


@pytest.mark.parametrize("env_id", BAD_ENVIRONMENTS)
def test_bad_environments(run, tmp_path, env_id):
    """One sentence, and no run that would stand in the way of the next one of its name."""
    result = run(tmp_path, f"{TINY} --env-id {env_id}")
    assert_fails(result, 2, *BAD_ENVIRONMENTS[env_id])
    assert not (tmp_path / RUN).exists()


class Bomb:
    """Its loading, by a pickle that may run code, makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plant_bomb(run_dir, legacy=False):
    """Puts a bomb into a checkpoint, tries it, and clears up after it."""
    bomb, path = run_dir.parent / "exploded", run_dir / "checkpoint.pt"
    checkpoint = load_checkpoint(run_dir)
    checkpoint["run"]["iteration"] = Bomb(bomb)
    torch.save(checkpoint, path, _use_new_zipfile_serialization=not legacy)
    torch.load(path, weights_only=False)
    bomb.rmdir()


def without(*path):
    """A damage: the entry of a checkpoint at this path is missing."""

    def damage(run_dir):
        checkpoint = load_checkpoint(run_dir)
        state = checkpoint
        for name in path[:-1]:
            state = state[name]
        del state[path[-1]]
        torch.save(checkpoint, run_dir / "checkpoint.pt")

    return damage


def with_parts(**parts):
    return lambda run_dir: edit_checkpoint(run_dir, **parts)


def write(data):
    return lambda run_dir: (run_dir / "checkpoint.pt").write_bytes(data)


WRONG_SHAPES = {name: torch.zeros(3, 3) for name in ("actor_logstd", "critic.0.weight")}
WRONG_STATISTICS = {"obs_rms": {"mean": 1, "var": 1, "count": 1}}
DAMAGES = {
    "missing": (lambda run_dir: (run_dir / "checkpoint.pt").unlink(), "checkpoint.pt"),
    "truncated": (lambda x: os.truncate(x / "checkpoint.pt", 20000), "is no checkpoint"),
    "empty": (write(b""), "is no checkpoint"),
    "text": (write(b"no weights"), "is no checkpoint"),
    "list": (lambda x: torch.save([1, 2, 3], x / "checkpoint.pt"), "is no checkpoint"),
    "bomb": (plant_bomb, "is no checkpoint"),
    "legacy-bomb": (lambda run_dir: plant_bomb(run_dir, legacy=True), "is no checkpoint"),
    "args-of-wrong-type": (with_parts(args="--seed 1"), "is no checkpoint"),
    "no-args": (without("args"), "is no checkpoint"),
    "no-weights": (with_parts(agent={}), "other sizes"),
    "other-shapes": (with_parts(agent=WRONG_SHAPES), "other sizes"),
    "no-agent": (without("agent"), "other sizes"),
    "no-optimizer": (without("optimizer"), "other sizes"),
    "no-envs": (without("envs"), "other sizes"),
    "no-statistics": (without("envs", "obs_rms"), "other sizes"),
    "no-run": (without("run"), "is no checkpoint"),
    "no-random-state": (without("run", "random_state"), "other sizes"),
}
FLAGS_OF_DAMAGES = {
    "--resume": [*DAMAGES],
    "--evaluate": ["missing", "truncated", "bomb", "no-agent", "other-shapes"],
    "--init-from": ["missing", "truncated", "bomb", "no-agent", "other-shapes"],
}
CASES = [(flag, name) for flag, names in FLAGS_OF_DAMAGES.items() for name in names]


@pytest.mark.parametrize("flag, name", CASES)
def test_damaged_checkpoint(run, stopped, tmp_path, flag, name):
    """A sentence, and nothing is run or changed."""
    damage, words = DAMAGES[name]
    damage(stopped)
    before = contents(stopped.parent)
    new = TINY.replace("--run-name run", "--run-name new") if flag == "--init-from" else ""
    assert_fails(run(tmp_path, f"{new} {flag} {RUN}"), 2, words)
    # A bomb that went off is seen here too
    assert before == {path: x for path, x in contents(stopped.parent).items() if path in before}
    assert not (stopped.parent / "exploded").exists()
    assert not (stopped.parent / "new" / "checkpoint.pt").exists()


# Evaluations and videos


def brightness(path):
    """Of every frame of a video."""
    video = cv2.VideoCapture(str(path))
    frames = []
    while True:
        is_there, frame = video.read()
        if not is_there:
            return frames
        frames.append(frame.mean())


def test_videos_of_evaluations(succeed, tmp_path):
    """The first episode of each, first to last frame; they change nothing in the run."""
    flags = f"{TINY} --eval-interval 1"
    succeed(tmp_path / "filmed", f"{flags} --capture-video")
    succeed(tmp_path / "plain", flags)
    assert differences(tmp_path / "filmed" / RUN, tmp_path / "plain" / RUN) == []
    succeed(tmp_path / "plain", f"--evaluate {RUN} --capture-video")
    succeed(tmp_path / "plain", f"--evaluate {RUN}/best.pt --capture-video --eval-episodes 1")
    films = tmp_path / "filmed" / RUN / "videos"
    found = {path.relative_to(films).as_posix() for path in films.glob("**/*.mp4")}
    name = "rl-video-episode-0.mp4"
    assert found == {f"{folder}/{name}" for folder in ("step-150", "step-300", "end")}
    for path in [*films.glob("**/*.mp4"), tmp_path / "plain" / RUN / "videos/end" / name]:
        frames = brightness(path)
        assert len(frames) >= 3
        assert frames == pytest.approx([10 * t for t in range(len(frames))], abs=5)


def test_a_video_of_a_known_environment(succeed, tmp_path):
    env = os.environ | {"MUJOCO_GL": "egl"}
    make = "gymnasium.make('InvertedPendulum-v5', render_mode='rgb_array')"
    probe = f"import gymnasium; env = {make}; env.reset(); env.render().shape"
    found = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, env=env)
    if found.returncode:
        pytest.skip("no OpenGL here")
    flags = f"{TINY} --env-id InvertedPendulum-v5 --capture-video"
    succeed(tmp_path, flags, MUJOCO_GL="egl")
    (path,) = (tmp_path / RUN).glob("videos/**/*.mp4")
    assert len(brightness(path)) > 3


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ddpg_continuous_action"])
def test_the_camera_of_a_video_goes_along_with_the_robot(tmp_path, name):
    """The model's own, where it has one: gymnasium's stays at the start."""
    module = importlib.import_module(name)
    cameras = {"Hopper-v5": 0, "InvertedPendulum-v5": -1}
    for env_id, camera in cameras.items():
        env = module.make_env(env_id, tmp_path)
        assert env.unwrapped.mujoco_renderer.camera_id == camera
        model = env.unwrapped.model
        assert camera < 0 or model.cam_mode[camera] == 2  # mjCAMLIGHT_TRACKCOM


def test_an_equal_evaluation_does_not_replace_the_best():
    saves = []
    writer = SimpleNamespace(add_scalar=lambda *_: None)
    run = SimpleNamespace(best_return=5.0, global_step=1, save=saves.append, writer=writer)
    for mean_return in (5.0, 5.5, 5.5):
        episode = SimpleNamespace(episode_return=mean_return)
        ppo.Run.log_evaluation(run, [episode])
    assert saves == ["best.pt"]


# On a terminal

LOOK = """
print("HAVE", type(agent).__name__, len(envs.envs.envs), obs.shape, batch["returns"].shape)
print("AGAIN", len(evaluate(agent, envs, args, None)))
"""


@pytest.mark.parametrize("fault", ["", "SIGINT 350"])
def test_python_i(tmp_path, fault):
    """After the run, and after Ctrl-C, the shell has the run's variables."""
    result = run_process(SCRIPT, tmp_path, FLAGS, python_flags="-i", stdin=LOOK, TOY_FAULT=fault)
    assert "HAVE Agent 3 (50, 3, 3) torch.Size([150])" in result.stdout, result
    assert "AGAIN 3" in result.stdout
    assert progress(tmp_path / RUN)["iteration"] == (3 if fault else 10)


def test_progress_where_there_is_no_terminal(whole):
    """A line for each checkpoint."""
    rows = [row for row in episode_rows(whole.run_dir) if int(row["global_step"]) <= 450]
    mean = np.mean([float(row["return"]) for row in rows][-100:])
    lines = whole.result.stdout.splitlines()
    assert f"saved at step 450, return {mean:.1f}" in lines
    assert [line.split(",")[0] for line in lines[:4]] == [
        f"saved at step {step}" for step in (450, 900, 1350, 1500)
    ]
    assert "\r" not in whole.result.stdout + whole.result.stderr


def test_progress_on_a_terminal(tmp_path):
    """A bar that is redrawn in its line."""
    command = [sys.executable, str(SCRIPT), *shlex.split(FLAGS)]
    terminal, ours = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(
        command, cwd=tmp_path, env=variables(tmp_path), stdin=ours, stdout=ours, stderr=ours
    )
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
    redrawn = [part for part in output.decode().split("\r") if "/1500" in part]
    assert len(redrawn) > 1 and "1500/1500" in redrawn[-1] and "return -" in redrawn[-1]


CLEANRL = {
    "exp_name": "cleanrl",
    "seed": 3,
    "torch_deterministic": True,
    "cuda": False,
    "track": True,
    "wandb_project_name": "cleanRL",
    "wandb_entity": "nobody",
    "capture_video": False,
    "env_id": "toys:Continuous-v0",
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


def test_cleanrl_command_line(succeed, tmp_path):
    """All flags of CleanRL's ppo_continuous_action.py, but those that keep or upload a model."""
    flags = ["--run-name run --no-compile"]
    for name, value in CLEANRL.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags.append(f"--{name} {value}")
    succeed(tmp_path, " ".join(flags), WANDB_MODE="disabled")
    args = json.loads((tmp_path / RUN / "config.json").read_text())["args"]
    assert {name: args[name] for name in CLEANRL} == CLEANRL


FREE = {"capture_video", "eval_interval", "eval_episodes", "checkpoint_interval"}


@pytest.mark.parametrize("name", asdict(ppo.Args()))
def test_each_flag_is_free_or_fixed(capsys, name):
    old = asdict(ppo.Args(anneal_lr=False))
    changed = old | {name: 2000000 if name == "total_timesteps" else "other"}
    if name in FREE | {"total_timesteps"}:
        ppo.check_changes(old, changed, 2000000)  # as many as it may become, and no more
        return
    with pytest.raises(SystemExit):
        ppo.check_changes(old, changed, 0)
    assert f"'{name}': " in capsys.readouterr().err


def test_the_best_return_comes_back(succeed, run, tmp_path):
    """So that a worse evaluation doesn't replace best.pt."""
    flags = f"{FLAGS} --eval-interval 1"
    assert run(tmp_path, flags, TOY_FAULT="SIGTERM 650").returncode == 143
    saved = load_checkpoint(tmp_path / RUN)["run"]
    assert np.isfinite(saved["best_return"])
    edit_checkpoint(tmp_path / RUN, run=saved | {"best_return": 1e9})
    best = (tmp_path / RUN / "best.pt").read_bytes()
    succeed(tmp_path, f"--resume {RUN}")
    assert (tmp_path / RUN / "best.pt").read_bytes() == best


def test_half_a_row_is_cut_off(succeed, whole, stopped, tmp_path):
    with open(stopped / "episodes.csv", "a") as file:
        file.write("75")
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole.outcome, stopped) == []


def test_a_finished_run_that_goes_on_is_no_finished_run(run, whole, tmp_path):
    shutil.copytree(whole.run_dir, tmp_path / RUN)
    killed = run(tmp_path, f"--resume {RUN}", TOY_FAULT="SIGKILL 3@3")
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / RUN / "evaluation.json").exists()


def test_a_run_that_diverges_ends_with_its_iteration(run, tmp_path):
    """Not with the next checkpoint."""
    record = tmp_path / "record"
    flags = f"{FLAGS} --checkpoint-interval 100"
    result = run(tmp_path, flags, TOY_FAULT="nan-reward 310", TOY_RECORD=record)
    assert_fails(result, 1, "not finite")
    assert sum("action" in event for event in read_record(record)) == 3 + 450  # 3: check_env's
