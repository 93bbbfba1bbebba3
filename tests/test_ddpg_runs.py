"""ddpg_continuous_action.py as its user meets it, in what it has of its own.

That is its main block, and its replay buffer in a file. What it shares with
ppo_continuous_action.py is tested in test_runs.py, whose toy environment is used here, too; what it
shares with all scripts, in test_behaviour.py.
"""

import json
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import test_runs
import torch
from processes import RUN, contents, differences, events, leaves, load_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_runs import assert_fails, assert_videos

SCRIPT = Path(__file__).resolve().parents[1] / "ddpg_continuous_action.py"

TOYS = '''
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import toy


class Copied(toy.Toy):
    """Copies the run's folder in its 110th step: a kill -9 there would leave the same."""

    def step(self, action):
        if toy.steps == 110 and not Path("runs/copy").exists():
            shutil.copytree("runs/run", "runs/copy")
        return super().step(action)


gym.register("ToyCopied-v0", Copied)
unbounded = gym.spaces.Box(-np.inf, np.inf, (2,))
gym.register("ToyUnbounded-v0", toy.Toy, kwargs={"action_space": unbounded})
wide = gym.spaces.Box(np.float32(-3e38), np.float32(3e38), (2,))
gym.register("ToyWide-v0", toy.Toy, kwargs={"action_space": wide})
'''

NOISE = (
    " --policy-frequency 2 --noise-type ou --exploration-noise 0.3 --final-exploration-noise 0.05"
)
# Of 500 steps 65 are random and 425 are learned from. A ring of 100 + 40 + 2 rows goes round thrice
TOY_RUN = (
    "--env-id toy:Toy-v0 --num-envs 2 --hidden-sizes 16 16 --batch-size 16 --buffer-size 100"
    " --random-steps 65 --learning-starts 75 --updates-per-step 0.25"
    f"{NOISE}"
    " --norm-obs --norm-reward --total-timesteps 500 --checkpoint-interval 40"
    " --eval-interval 250 --eval-episodes 3 --num-threads 1 --run-name run"
)
# One update in each iteration from step 78 on
SHORT_RUN = (
    f"{TOY_RUN} --total-timesteps 120 --learning-starts 76 --updates-per-step 0.5"
    " --eval-interval 1000"
)
LOSSES = ["losses/qf1_values", "losses/qf1_loss", "losses/actor_loss"]
EPISODES = ["charts/episodic_return", "charts/episodic_length"]
LEARNED = ["agent", "learner"]
ACTION = slice(3, 5)  # columns of replay.bin


@pytest.fixture(scope="module")
def run(server):
    """run(cwd, flags): runs the script to its end in the folder cwd, and returns what it gave."""

    def run(cwd, flags, script=SCRIPT, limit=None, **options):
        """limit: bytes that a file may have. options: as for test_runs.prepare."""
        command, env = test_runs.prepare(cwd, flags, **options)
        (cwd / "ddpg_toys.py").write_text(TOYS)
        return server.run(script, cwd, shlex.join(command[2:]), limit=limit, **env)

    return run


@pytest.fixture(scope="module")
def succeed(run):
    """As run, to an end that must be good."""

    def succeed(cwd, flags, **options):
        result = run(cwd, flags, **options)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    return succeed


@pytest.fixture(scope="module")
def whole(succeed, tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    succeed(cwd, TOY_RUN)
    return cwd / RUN


@pytest.fixture(scope="module")
def stopped_run(run, tmp_path_factory):
    """The same run, stopped in iteration 125 of 250: its folder and what the process gave."""
    cwd = tmp_path_factory.mktemp("stopped")
    return cwd / RUN, run(cwd, TOY_RUN, fault="SIGTERM 249")


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of the stopped run to damage, in tmp_path."""
    return Path(shutil.copytree(stopped_run[0], tmp_path / RUN))


def transitions(run_dir, count, size=100):
    """The last size transitions of count that were stored, the oldest first: (size, 10)."""
    rows = np.fromfile(run_dir / "replay.bin", np.float32).reshape(-1, 10)
    return rows[np.arange(max(count - size, 0), count) % len(rows)]


def num_steps(run_dir):
    """Steps of the checkpoint."""
    return load_checkpoint(run_dir)["run"]["global_step"]


def scalars(run_dir, tag):
    """{step: value}, in order."""
    return dict(sorted((step, value) for name, step, value in events(run_dir) if name == tag))


def assert_refused(result, *words):
    """One sentence on stderr, and no run."""
    assert_fails(result, 2, *words)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr


def flat(state):
    """The tensors of a state_dict as one, flat."""
    return torch.cat([x.flatten() for x in state.values()])


def test_config_and_model(succeed, tmp_path):
    succeed(tmp_path, SHORT_RUN + " --save-model --hidden-sizes 8 4 --exp-name own")
    config = json.loads((tmp_path / RUN / "config.json").read_text())
    assert config["args"]["noise_type"] == "ou" and config["args"]["hidden_sizes"] == [8, 4]
    assert config["args"]["tau"] == 0.005 and config["command"][0] == str(SCRIPT)
    model = torch.load(tmp_path / RUN / "own.cleanrl_model", weights_only=True)
    actor = [(8, 3), (8,), (4, 8), (4,), (2, 4), (2,)]
    critic = [(8, 5), (8,), (4, 8), (4,), (1, 4), (1,)]
    assert [tuple(x.shape) for x in model.values()] == actor + critic
    assert leaves(dict(model), "") == leaves(dict(load_checkpoint(tmp_path / RUN)["agent"]), "")


# The toy's steps in a process, of which evaluations and the replay of a resumed run have a share,
# and the step of the checkpoint that each kill leaves
MOMENTS = {
    "random-steps": [("SIGKILL 62", 40)],
    "learning": [("SIGKILL 139", 120)],  # the ring has not gone round
    "ring-is-full": [("SIGKILL 239", 200)],  # without spare, 38 of 100 transitions would be gone
    "evaluation": [("SIGKILL 255", 240)],
    "several": [
        ("SIGKILL 95", 80),
        ("SIGKILL 117", 80),
        ("SIGKILL 227", 200),
        ("SIGKILL 490", 440),
    ],
}


@pytest.mark.parametrize("faults", MOMENTS.values(), ids=MOMENTS.keys())
def test_resume_after_kill(whole, run, succeed, tmp_path, faults):
    """Killed with -9 at an exact step and resumed: no bit differs from an uninterrupted run."""
    flags = TOY_RUN
    for fault, steps in faults:
        assert run(tmp_path, flags, fault=fault).returncode == -signal.SIGKILL
        assert num_steps(tmp_path / RUN) == steps
        flags = f"--resume {RUN}"
    result = succeed(tmp_path, flags)
    assert differences(whole, tmp_path / RUN) == []
    assert "can't be brought back" not in result.stdout


OTHERS = {
    "td3_continuous_action": TOY_RUN,
    "sac_continuous_action": TOY_RUN.replace(NOISE, ""),
    "ddpg_lstm": f"{TOY_RUN} --hidden-size 8 --sequence-length 4 --burn-in 3",
}


@pytest.mark.parametrize("name", OTHERS)
def test_scripts_of_this_kind_resume_exactly(run, succeed, tmp_path, name):
    """Killed twice with -9, while learning and after the ring has gone round.

    It is filmed, which changes nothing.
    """
    script = SCRIPT.with_name(f"{name}.py")
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    succeed(folders[0], OTHERS[name], script=script)
    filmed = f"{OTHERS[name]} --capture-video --video-interval 10"
    for fault, flags in (("SIGKILL 117", filmed), ("SIGKILL 227", f"--resume {RUN}")):
        result = run(folders[1], flags, script=script, fault=fault)
        assert result.returncode == -signal.SIGKILL
    result = succeed(folders[1], f"--resume {RUN}", script=script)
    assert differences(folders[0] / RUN, folders[1] / RUN) == []
    assert_videos(folders[1] / RUN, 10)
    assert "can't be brought back" not in result.stdout
    repeated = succeed(folders[1], f"--evaluate {RUN}", script=script).stdout
    assert repeated.splitlines()[-1] in result.stdout


def test_kill_before_first_checkpoint(whole, run, succeed, tmp_path):
    """Nothing is lost and nothing is in the way: the same command starts the run."""
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "replay.bin").write_bytes(b"half a buffer")
    (tmp_path / RUN / "checkpoint.tmp").write_bytes(b"half a checkpoint")
    assert_refused(run(tmp_path, f"--resume {RUN}"), "checkpoint.pt", "missing")
    succeed(tmp_path, TOY_RUN)
    assert differences(whole, tmp_path / RUN) == []


def test_stop_by_signal(whole, stopped_run, stopped, succeed, tmp_path):
    """SIGTERM: the iteration is finished, with its evaluation, and saved.

    Here that is between two checkpoints. The message says how to go on.
    """
    _, result = stopped_run
    assert result.returncode == 143 and result.stderr == "", result.stderr
    message = f"stopped at step 250; go on with: python {SCRIPT.name} --resume {RUN}"
    assert message in result.stdout
    assert num_steps(stopped) == 250 and not (stopped / "evaluation.json").exists()
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole, stopped) == []


def test_signal_in_first_iteration(run, tmp_path):
    """Ends at once."""
    result = run(tmp_path, TOY_RUN, fault="SIGINT 1")
    assert_fails(result, 130, f"--resume {RUN}")
    assert num_steps(tmp_path / RUN) == 0


def test_resume_of_finished_run(whole, succeed, tmp_path):
    """Says so and changes nothing; the large replay buffer may have been deleted."""
    run_dir = Path(shutil.copytree(whole, tmp_path / RUN))
    (run_dir / "replay.bin").unlink()
    before = contents(run_dir)
    assert "finished" in succeed(tmp_path, f"--resume {RUN}").stdout
    assert contents(run_dir) == before


def test_evaluate(whole, succeed, tmp_path):
    """--evaluate repeats the run's own last evaluation: its policy, with its statistics.

    It needs no replay buffer and writes nothing.
    """
    run_dir = Path(shutil.copytree(whole, tmp_path / RUN))
    (run_dir / "replay.bin").unlink()
    before = contents(run_dir)
    returns = json.loads((run_dir / "evaluation.json").read_text())["returns"]
    spread = f"{np.mean(returns):.1f} +- {np.std(returns):.1f}"
    output = succeed(tmp_path, f"--evaluate {RUN}").stdout
    assert f"evaluation: {spread} over 3 episodes" in output
    assert contents(run_dir) == before


@pytest.mark.parametrize("change", ["missing", "shorter", "longer", "folder"])
def test_damaged_replay_buffer(stopped, run, tmp_path, change):
    path = stopped / "replay.bin"
    data = path.read_bytes()
    path.unlink()
    if change == "folder":
        path.mkdir()
    elif change != "missing":
        path.write_bytes(data[:-4] if change == "shorter" else data + data[:4])
    before = contents(stopped)
    assert_refused(run(tmp_path, f"--resume {RUN}"), "replay.bin", "missing or damaged")
    assert contents(stopped) == before


def test_full_disk_at_start(run, succeed, tmp_path):
    """One sentence before any step is taken, and the next run may have the same name."""
    flags = f"{TOY_RUN} --buffer-size 5000 --total-timesteps 5000"
    assert_refused(run(tmp_path, flags, limit=100_000), "replay.bin", "--buffer-size")
    assert not (tmp_path / RUN / "checkpoint.pt").exists()
    succeed(tmp_path, SHORT_RUN)


def test_disk_space_is_taken_at_start(run, tmp_path):
    """A run must not find out after a day that the disk is too small for its buffer."""
    flags = f"{SHORT_RUN} --buffer-size 50000 --total-timesteps 100000"
    assert run(tmp_path, flags, fault="SIGKILL 1").returncode == -signal.SIGKILL
    stat = (tmp_path / RUN / "replay.bin").stat()
    assert stat.st_size == 4 * 10 * (50000 + 40 + 2) and 512 * stat.st_blocks >= stat.st_size


def test_buffer_of_a_short_run(succeed, tmp_path):
    """Is no longer than the run, whatever --buffer-size says."""
    succeed(tmp_path, SHORT_RUN + " --buffer-size 1000000000000")
    assert (tmp_path / RUN / "replay.bin").stat().st_size == 4 * 10 * (120 + 40 + 2)


BAD_INPUT = {
    "memory": (
        "--buffer-size 1000000000000 --total-timesteps 1000000000000",
        "memory",
        "--buffer-size",
    ),
    "unbounded-actions": ("--env-id ddpg_toys:ToyUnbounded-v0", "ToyUnbounded-v0", "finite bounds"),
    "too-wide-actions": ("--env-id ddpg_toys:ToyWide-v0", "ToyWide-v0", "a finite range"),
    "discrete-actions": ("--env-id CartPole-v1", "CartPole-v1", "Discrete", "Box"),
    "unknown-env": ("--env-id HalfCheeta-v5", "can't make HalfCheeta-v5"),
    "gamma": ("--gamma 2", "--gamma must"),
}
USAGE_ERRORS = {
    "noise-type": ("--noise-type other", "--noise-type", "gaussian"),
    "no-number": ("--hidden-sizes two", "--hidden-sizes"),
    "unknown-flag": ("--no-such-flag 1", "--no-such-flag"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(run, tmp_path, case):
    """One sentence, and the next run may have the same name.

    For more flags see test_off_policy_flags.py.
    """
    flags, *words = BAD_INPUT[case]
    assert_refused(run(tmp_path, f"{TOY_RUN} {flags}"), *words)
    assert not list(tmp_path.glob("runs/*/checkpoint.pt"))


@pytest.mark.parametrize("case", USAGE_ERRORS)
def test_usage_errors(run, tmp_path, case):
    """Of tyro, which draws a box around its sentences."""
    flags, *words = USAGE_ERRORS[case]
    assert_fails(run(tmp_path, f"{TOY_RUN} {flags}"), 2, *words)
    assert not (tmp_path / "runs").exists()


def test_zeros_and_ones_are_accepted(succeed, tmp_path):
    """Where 0 or 1 is the end of a flag's range.

    The targets are then the networks, and the buffer is a queue of 1.
    """
    flags = (
        "--learning-starts 0 --random-steps 0 --exploration-noise 0 --final-exploration-noise 0"
        " --weight-decay 0 --gamma 1 --tau 1 --policy-frequency 1 --updates-per-step 1"
        " --buffer-size 1 --batch-size 1 --total-timesteps 20 --checkpoint-interval 10"
    )
    succeed(tmp_path, f"{SHORT_RUN} {flags}")
    saved = load_checkpoint(tmp_path / RUN)
    targets = torch.cat(
        (saved["learner"]["actor_target.params"], saved["learner"]["critic_target.params"])
    )
    torch.testing.assert_close(targets, flat(saved["agent"]), rtol=1e-6, atol=1e-7)
    assert saved["learner"]["actor_optimizer.steps"] == 20
    assert saved["learner"]["critic_optimizer.steps"] == 20


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_checkpoint_of_ppo(run, succeed, tmp_path, flag):
    ppo = (
        "--env-id toy:Toy-v0 --total-timesteps 80 --num-steps 20 --num-envs 2"
        " --num-minibatches 1 --eval-episodes 1 --run-name run"
    )
    succeed(tmp_path, ppo, script=test_runs.SCRIPT)
    before = contents(tmp_path / RUN)
    words = ("made by ppo_continuous_action.py", f"this {SCRIPT.name}")
    assert_refused(run(tmp_path, f"--{flag} {RUN}"), *words)
    assert contents(tmp_path / RUN) == before


STATISTICS = ["obs_rms", "return_rms"]


@pytest.mark.parametrize("part", [*LEARNED, *STATISTICS, "noise", "normalizer", "replay", "envs"])
def test_damaged_checkpoint(stopped, run, tmp_path, part):
    test_runs.edit_checkpoint(stopped, without=part)
    before = contents(stopped)
    words = (f"the checkpoint in {RUN} doesn't fit", "damaged", f"'{part}'")
    assert_refused(run(tmp_path, f"--resume {RUN}"), *words)
    assert contents(stopped) == before


def assert_finite(run_dir):
    """The checkpoint of a run and the transitions that it may sample."""
    saved = load_checkpoint(run_dir)
    for name in [*LEARNED, *STATISTICS, "noise", "normalizer"]:
        assert torch.isfinite(flat(saved[name])).all()
    assert np.isfinite(transitions(run_dir, saved["run"]["global_step"])).all()


@pytest.mark.parametrize("step, saved", [(30, 0), (170, 160)], ids=["before learning", "learning"])
@pytest.mark.parametrize("fault", ["nan-reward", "nan-observation"])
def test_non_finite_transition(whole, run, succeed, tmp_path, fault, step, saved):
    """Ends the run before it is stored; the run goes on from the last good checkpoint."""
    result = run(tmp_path, TOY_RUN, fault=f"{fault} {step}")
    what = "rewards" if fault == "nan-reward" else "next_obs"
    message = f"step {step - 2}: {what} has a value that is not finite: fix the environment"
    assert_fails(result, 1, message, "--resume")
    assert num_steps(tmp_path / RUN) == saved
    assert_finite(tmp_path / RUN)
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole, tmp_path / RUN) == []


@pytest.mark.parametrize("interval", [40, 1000], ids=["at a checkpoint", "at the losses"])
def test_non_finite_loss(run, tmp_path, interval):
    """Ends the run at the next look at it, and leaves the last good checkpoint."""
    flags = "--learning-rate 1e30 --random-steps 500 --eval-interval 1000"  # no use of the policy
    result = run(tmp_path, f"{TOY_RUN} {flags} --checkpoint-interval {interval}")
    assert_fails(result, 1, "is not finite", str(RUN), "iteration 100:" if interval > 500 else "")
    assert_finite(tmp_path / RUN)


def test_spoilt_policy_is_not_the_environment_s_fault(run, tmp_path):
    result = run(tmp_path, f"{TOY_RUN} --learning-rate 1e30 --checkpoint-interval 1000")
    message = "actions has a value that is not finite: start a new run with a lower --learning-rate"
    assert_fails(result, 1, message)


def test_an_environment_that_does_not_come_back(run, tmp_path):
    """Its episode ended before the actions of the checkpoint do: it starts a new one.

    The noise and the discounted return that the checkpoint has aren't those of the new one.
    """
    flags = TOY_RUN.replace("toy:Toy-v0", "toy:ToyShort-v0") + " --eval-interval 1000"
    assert run(tmp_path, flags, fault="SIGTERM 249", END="30").returncode == 143
    saved = load_checkpoint(tmp_path / RUN)
    saved["noise"]["state"][:] = 1e9
    saved["normalizer"]["discounted_returns"][:] = 1e9
    test_runs.edit_checkpoint(tmp_path / RUN, **saved)
    # 250 steps are played again
    result = run(tmp_path, f"--resume {RUN}", fault="SIGTERM 253", END="3")
    assert result.returncode == 143 and result.stdout.count("can't be brought back") == 2
    assert num_steps(tmp_path / RUN) == 254
    actions = transitions(tmp_path / RUN, 254, 4)[:, ACTION]
    assert not (np.abs(actions) == 1).any()
    saved = load_checkpoint(tmp_path / RUN)
    assert saved["normalizer"]["discounted_returns"].abs().max() < 1e6
    assert saved["return_rms"]["var"] < 1e6


def test_a_memory_is_emptied_where_its_episode_does_not_come_back(run, tmp_path):
    script = SCRIPT.with_name("ddpg_lstm.py")
    flags = OTHERS["ddpg_lstm"].replace("toy:Toy-v0", "toy:ToyShort-v0") + " --eval-interval 1000"
    assert run(tmp_path, flags, script=script, fault="SIGTERM 249", END="30").returncode == 143
    saved = load_checkpoint(tmp_path / RUN)
    saved["memory"]["steps"] += 1000
    test_runs.edit_checkpoint(tmp_path / RUN, **saved)
    # 250 steps are played again
    flags = f"--resume {RUN}"
    result = run(tmp_path, flags, script=script, fault="SIGTERM 253", END="3")
    assert result.returncode == 143 and result.stdout.count("can't be brought back") == 2
    assert load_checkpoint(tmp_path / RUN)["memory"]["steps"].max() < 1000


def test_tensorboard(whole):
    """The tags and the steps of each; losses are logged every 100 iterations."""
    accumulator = EventAccumulator(str(whole), size_guidance={"scalars": 0}).Reload()
    steps = {
        tag: [scalar.step for scalar in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }
    assert sorted(steps) == sorted([*EPISODES, *LOSSES, "eval/episodic_return", "charts/SPS"])
    assert [steps[tag] for tag in LOSSES] == [[200, 400]] * 3
    assert steps["eval/episodic_return"] == [250, 500]
    assert steps["charts/SPS"] == [200, 400]
    evaluation = json.loads((whole / "evaluation.json").read_text())
    assert len(evaluation["returns"]) == 3
    best = max(scalars(whole, "eval/episodic_return").values())
    assert best == pytest.approx(load_checkpoint(whole)["run"]["best_return"], rel=1e-6)
    assert all(scalar.value > 0 for scalar in accumulator.Scalars("charts/SPS"))


def test_evaluation_where_a_multiple_of_its_interval_is_passed(succeed, tmp_path):
    """At the first step that has reached it; losses at the ends of iterations 100 and 200."""
    flags = "--num-envs 3 --total-timesteps 600 --eval-interval 200 --updates-per-step 0.02"
    succeed(tmp_path, f"{TOY_RUN} {flags}")
    assert list(scalars(tmp_path / RUN, "losses/qf1_loss")) == [300, 600]
    assert list(scalars(tmp_path / RUN, "eval/episodic_return")) == [201, 402, 600]


def test_videos(whole, succeed, tmp_path):
    """Of training episodes and of the last evaluation; the run is the same to the bit."""
    succeed(tmp_path, TOY_RUN + " --capture-video --video-interval 10")
    assert_videos(tmp_path / RUN, 10)
    assert differences(whole, tmp_path / RUN) == []


def test_compilation(succeed, tmp_path):
    """Learns the same to rounding, and a resumed run is the same to the bit."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    flags = SHORT_RUN.replace("toy:Toy-v0", "ddpg_toys:ToyCopied-v0") + " --policy-frequency 1"
    if "without compilation" in succeed(tmp_path, flags, compiled=True, **cache).stdout:
        pytest.skip("no C++ compiler here")
    assert num_steps(tmp_path / "runs/copy") == 80
    succeed(tmp_path, "--resume runs/copy", compiled=True, **cache)
    assert differences(tmp_path / RUN, tmp_path / "runs/copy") == []
    succeed(tmp_path, f"{flags} --run-name eager")
    compiled, eager = (load_checkpoint(tmp_path / "runs" / name) for name in ("run", "eager"))
    assert compiled["learner"]["critic_optimizer.steps"] == 22
    assert compiled["learner"]["actor_optimizer.steps"] == 22
    for name in LEARNED:
        for key, x in compiled[name].items():
            torch.testing.assert_close(x, eager[name][key], rtol=1e-3, atol=1e-5)
    # It is compiled code indeed
    assert not torch.equal(flat(compiled["learner"]), flat(eager["learner"]))
