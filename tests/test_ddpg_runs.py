"""ddpg_continuous_action.py as its user meets it, in what it has of its own: its main block, and its replay buffer in a
file. What it shares with ppo_continuous_action.py is tested in test_runs.py, whose toy environment is used here, too.

Every run is a fork of one process that has done the imports: the imports take longer than most of these runs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_runs
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_runs import RUN, assert_fails, assert_videos, contents, episode_rows, events, leaves, load_checkpoint

SCRIPT = Path(__file__).resolve().parents[1] / "ddpg_continuous_action.py"

SERVER = '''
"""Runs a command line for each line of stdin, in a fork of this process; answers with its exit code."""

import gc
import json
import os
import resource
import runpy
import signal
import sys

import gymnasium, imageio.v2, torch, torch._dynamo, torch.utils.tensorboard, tqdm, tyro

gc.freeze()  # a fork that looks for garbage would copy the memory of the imports
for line in sys.stdin:
    script, cwd, argv, env, limit = json.loads(line)
    if os.fork() == 0:
        signal.alarm(300)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.path.insert(0, cwd)
        sys.argv = [script, *argv]
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in (1, "stdout"), (2, "stderr"):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
'''

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
gym.register("ToyUnbounded-v0", toy.Toy, kwargs={"action_space": gym.spaces.Box(-np.inf, np.inf, (2,))})
'''

# Of 500 steps 65 are random and the last 425 are learned from. A ring of 100 + 40 + 2 rows goes round three times
TOY_RUN = (
    "--env-id toy:Toy-v0 --num-envs 2 --hidden-sizes 16 16 --batch-size 16 --buffer-size 100 --random-steps 65"
    " --learning-starts 75 --updates-per-step 0.25 --policy-frequency 2 --noise-type ou --exploration-noise 0.3"
    " --final-exploration-noise 0.05 --norm-obs --norm-reward --total-timesteps 500 --checkpoint-interval 40"
    " --eval-interval 250 --eval-episodes 3 --num-threads 1 --run-name run"
)
# One update in each iteration from step 78 on
SHORT_RUN = TOY_RUN + " --total-timesteps 120 --learning-starts 76 --updates-per-step 0.5 --eval-interval 1000"
TAGS = ["charts/episodic_return", "charts/episodic_length", "charts/SPS", "eval/episodic_return",
        "losses/qf1_values", "losses/qf1_loss", "losses/actor_loss"]  # fmt: skip
OBS, ACTION, REWARD, NEXT_OBS, TERMINATION = slice(3), slice(3, 5), 5, slice(6, 9), 9  # columns of replay.bin


@pytest.fixture(scope="module")
def run():
    """run(cwd, flags): runs the script to its end in the folder cwd; returns its exit code, stdout and stderr."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(cwd, flags, script=SCRIPT, limit=None, **options):
        """limit: bytes that a file may have. options: as for test_runs.prepare."""
        command, env = test_runs.prepare(cwd, flags, **options)
        (cwd / "toys.py").write_text(TOYS)
        print(json.dumps([str(script), str(cwd), command[2:], env, limit]), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, code, *[(cwd / x).read_text() for x in ("stdout", "stderr")])

    yield run
    server.stdin.close()
    assert server.wait(timeout=60) == 0


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
    """The folder of the same run, stopped in iteration 125 of 250, for `stopped` to copy; and the process's result."""
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


def differences(run_dir, other_dir):
    """Names of what two runs differ in, times left out: checkpoint, replay buffer, logs, evaluation."""
    names = test_runs.differences(run_dir, other_dir)
    a, b = (transitions(path, load_checkpoint(path)["global_step"]) for path in (run_dir, other_dir))
    return names + ["replay.bin"] * (a.tobytes() != b.tobytes())


def num_steps(run_dir):
    """Steps of the checkpoint."""
    return load_checkpoint(run_dir)["global_step"]


def scalars(run_dir, tag):
    """{step: value}, in order."""
    return dict(sorted((step, value) for name, step, value in events(run_dir) if name == tag))


def assert_refused(result, *words):
    """One sentence on stderr, and no run."""
    assert_fails(result, 2, *words)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr


def test_config_and_model(succeed, tmp_path):
    succeed(tmp_path, SHORT_RUN + " --save-model --hidden-sizes 8 4 --exp-name own")
    config = json.loads((tmp_path / RUN / "config.json").read_text())
    assert config["args"]["noise_type"] == "ou" and config["args"]["hidden_sizes"] == [8, 4]
    assert config["args"]["tau"] == 0.005 and config["command"][0] == str(SCRIPT)
    model = torch.load(tmp_path / RUN / "own.cleanrl_model", weights_only=True)
    assert [tuple(x.shape) for x in model.values()] == [
        (8, 3), (8,), (4, 8), (4,), (2, 4), (2,), (8, 5), (8,), (4, 8), (4,), (1, 4), (1,)
    ]  # fmt: skip
    assert leaves(model, "") == leaves(dict(load_checkpoint(tmp_path / RUN)["agent"]), "")


def test_same_seed_same_bits(whole, succeed, tmp_path):
    succeed(tmp_path, TOY_RUN)
    assert differences(whole, tmp_path / RUN) == []


def test_other_seed_other_run(run, tmp_path):
    """Other weights from the start, other random actions, other environments."""
    found = []
    for seed in 1, 2:
        flags = f"{SHORT_RUN} --seed {seed} --run-name {seed}"
        assert run(tmp_path, flags, fault="SIGKILL 5").returncode == -signal.SIGKILL
        run_dir = tmp_path / "runs" / str(seed)
        found.append((load_checkpoint(run_dir), transitions(run_dir, 4)))
    (a, a_rows), (b, b_rows) = found
    assert a["global_step"] == b["global_step"] == 0
    assert all((x != b["agent"][name]).any() for name, x in a["agent"].items())
    assert (a_rows[:, OBS][:, :2] != b_rows[:, OBS][:, :2]).all()  # the third coordinate is the time
    assert (a_rows[:, ACTION] != b_rows[:, ACTION]).all()
    assert a["envs"]["reset_states"] != b["envs"]["reset_states"]


# The toy's steps, of which evaluations have a share, and the step of the checkpoint that each kill leaves
MOMENTS = {
    "random-steps": [("SIGKILL 62", 40)],
    "learning": [("SIGKILL 139", 120)],  # the ring has not gone round
    "ring-is-full": [("SIGKILL 239", 200)],  # 38 of the 100 transitions of the checkpoint would be gone without spare
    "evaluation": [("SIGKILL 255", 240)],
    "several": [("SIGKILL 95", 80), ("SIGKILL 37", 80), ("SIGKILL 147", 200), ("SIGKILL 290", 440)],
}


@pytest.mark.parametrize("faults", MOMENTS.values(), ids=MOMENTS.keys())
def test_resume_after_kill(whole, run, succeed, tmp_path, faults):
    """Killed with -9 at an exact step and resumed: no bit differs from the run that nothing interrupted."""
    flags = TOY_RUN
    for fault, steps in faults:
        assert run(tmp_path, flags, fault=fault).returncode == -signal.SIGKILL
        assert num_steps(tmp_path / RUN) == steps
        flags = f"--resume {RUN}"
    result = succeed(tmp_path, flags)
    assert differences(whole, tmp_path / RUN) == []
    assert "can't be brought back" not in result.stdout


def test_resume_after_kill_in_last_evaluation(whole, run, succeed, tmp_path):
    """All is learned, evaluation.json is missing: it is made."""
    evaluation = json.loads((whole / "evaluation.json").read_text())
    last = 500 + 2 * sum(evaluation["lengths"]) + 3  # there were evaluations at 250 and 500
    assert run(tmp_path, TOY_RUN, fault=f"SIGKILL {last}").returncode == -signal.SIGKILL
    assert num_steps(tmp_path / RUN) == 500 and not (tmp_path / RUN / "evaluation.json").exists()
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole, tmp_path / RUN) == []


def test_kill_before_first_checkpoint(whole, run, succeed, tmp_path):
    """Nothing is lost and nothing is in the way: the same command starts the run."""
    (tmp_path / RUN).mkdir(parents=True)
    (tmp_path / RUN / "replay.bin").write_bytes(b"half a buffer")
    (tmp_path / RUN / "episodes.csv").write_text("global_step,wall_")
    assert_refused(run(tmp_path, f"--resume {RUN}"), "checkpoint.pt", "missing")
    succeed(tmp_path, TOY_RUN)
    assert differences(whole, tmp_path / RUN) == []


def test_kill_after_first_checkpoint(whole, run, succeed, tmp_path):
    """No transition is stored, so the replay buffer may be missing."""
    assert run(tmp_path, TOY_RUN, fault="SIGKILL 1").returncode == -signal.SIGKILL
    assert num_steps(tmp_path / RUN) == 0
    (tmp_path / RUN / "replay.bin").unlink()
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole, tmp_path / RUN) == []


def test_stop_by_signal(whole, stopped_run, stopped, succeed, tmp_path):
    """SIGTERM: the iteration is finished, with its evaluation, and saved, here between two checkpoints; the message
    says how to go on."""
    _, result = stopped_run
    assert result.returncode == 143 and result.stderr == "", result.stderr
    assert f"stopped at step 250; go on with: python {SCRIPT.name} --resume {RUN}" in result.stdout
    assert num_steps(stopped) == 250 and not (stopped / "evaluation.json").exists()
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole, stopped) == ["events"]  # the stop logged the losses since step 240
    a, b = ({(tag, step, value * (tag != "charts/SPS")) for tag, step, value in events(x)} for x in (whole, stopped))
    losses = {(tag, step) for tag in TAGS if tag.startswith("losses/") for step in (250, 280)}
    assert {(tag, step) for tag, step, _ in a ^ b} == losses | {("charts/SPS", 250)}


def test_signal_in_first_iteration(run, tmp_path):
    """Ends at once."""
    result = run(tmp_path, TOY_RUN, fault="SIGINT 1")
    assert_fails(result, 130, f"--resume {RUN}")
    assert num_steps(tmp_path / RUN) == 0


def test_resume_of_finished_run(whole, succeed, tmp_path):
    """Says so and changes nothing; the replay buffer, which is large, may have been deleted."""
    run_dir = Path(shutil.copytree(whole, tmp_path / RUN))
    (run_dir / "replay.bin").unlink()
    before = contents(run_dir)
    assert "finished" in succeed(tmp_path, f"--resume {RUN}").stdout
    assert contents(run_dir) == before


def test_evaluate(stopped, succeed, tmp_path):
    """--evaluate plays the policy of the checkpoint, with its statistics, needs no replay buffer and writes nothing."""
    (stopped / "replay.bin").unlink()
    before = contents(stopped)
    logged = scalars(stopped, "eval/episodic_return")[250]
    output = succeed(tmp_path, f"--evaluate {RUN}").stdout
    assert f"evaluation: {logged:.1f} +- " in output and "over 3 episodes" in output
    assert contents(stopped) == before


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
    assert_refused(run(tmp_path, f"--resume {RUN}"), "replay.bin", "missing or not whole")
    assert contents(stopped) == before


def test_full_disk_at_start(run, succeed, tmp_path):
    """One sentence before any step is taken, and nothing that stands in the way of the next run of its name."""
    assert_refused(run(tmp_path, SHORT_RUN, limit=4096), "replay.bin", "--buffer-size")
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
    "memory": ("--buffer-size 1000000000000 --total-timesteps 1000000000000", "memory", "--buffer-size"),
    "unbounded-actions": ("--env-id toys:ToyUnbounded-v0", "ToyUnbounded-v0", "finite bounds"),
    "discrete-actions": ("--env-id CartPole-v1", "CartPole-v1", "Discrete", "Box"),
    "unknown-env": ("--env-id HalfCheeta-v5", "HalfCheeta-v5"),
    "gamma": ("--gamma 2", "--gamma"),
    "nan-gamma": ("--gamma nan", "gamma"),
    "endless-updates": ("--updates-per-step inf", "updates_per_step must be above 0 and finite"),
    "tau": ("--tau 2", "--tau"),
    "no-tau": ("--tau 0", "tau must be above 0"),
    "no-units": ("--hidden-sizes 16 0", "--hidden-sizes"),
    "negative-units": ("--hidden-sizes -16", "--hidden-sizes"),
    "late-learning": ("--learning-starts 501", "--learning-starts is past the last step"),
    "never-learning": ("--learning-starts 500", "--learning-starts is past the last step"),
    "no-envs": ("--num-envs 0", "num_envs must be above 0"),
    "negative-learning-starts": ("--learning-starts -1", "learning_starts"),
    "negative-random-steps": ("--random-steps -1", "random_steps"),
    "no-updates": ("--updates-per-step 0", "updates_per_step must be above 0"),
    "nan-updates": ("--updates-per-step nan", "updates_per_step"),
    "no-policy-updates": ("--policy-frequency 0", "policy_frequency"),
    "no-batch": ("--batch-size 0", "batch_size"),
    "no-buffer": ("--buffer-size 0", "buffer_size"),
    "no-eval-interval": ("--eval-interval 0", "eval_interval"),
    "negative-noise": ("--exploration-noise -0.1", "exploration_noise must be above 0"),
    "nan-noise": ("--exploration-noise nan", "exploration_noise"),
    "negative-final-noise": ("--final-exploration-noise -0.1", "final_exploration_noise"),
    "negative-actor-rate": ("--actor-learning-rate -1", "actor_learning_rate"),
    "nan-critic-rate": ("--critic-learning-rate nan", "critic_learning_rate"),
    "no-norm": ("--max-grad-norm 0", "max_grad_norm"),
    "negative-decay": ("--weight-decay -1", "weight_decay"),
}
USAGE_ERRORS = {
    "noise-type": ("--noise-type other", "--noise-type", "gaussian"),
    "no-number": ("--hidden-sizes two", "--hidden-sizes"),
    "unknown-flag": ("--no-such-flag 1", "--no-such-flag"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(run, tmp_path, case):
    """One sentence, and no run that would stand in the way of the next one of its name."""
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
    """Where 0 or 1 is the end of a flag's range; the targets are then the networks, and the buffer is a queue of 1."""
    flags = "--learning-starts 0 --random-steps 0 --exploration-noise 0 --final-exploration-noise 0 --weight-decay 0"
    flags += " --gamma 1 --tau 1 --policy-frequency 1 --updates-per-step 1 --buffer-size 1 --batch-size 1"
    succeed(tmp_path, f"{SHORT_RUN} --total-timesteps 20 --checkpoint-interval 10 {flags}")
    for learner in load_checkpoint(tmp_path / RUN)["learners"].values():
        assert learner["step"] == 20
        torch.testing.assert_close(learner["target"], learner["params"], rtol=1e-6, atol=1e-7)


def test_resume_with_other_flags(stopped, run, tmp_path):
    """They are named, with the values that the run has."""
    before = contents(stopped)
    result = run(tmp_path, f"--resume {RUN} --noise-type gaussian --hidden-sizes 8 --buffer-size 101 --gamma 0.99")
    assert_refused(result, "noise_type = ou", "hidden_sizes = (16, 16)", "buffer_size = 100")
    assert "gamma" not in result.stderr and contents(stopped) == before


@pytest.mark.parametrize("flag", ["resume", "evaluate"])
def test_checkpoint_of_ppo(run, succeed, tmp_path, flag):
    ppo = "--env-id toy:Toy-v0 --total-timesteps 80 --num-steps 20 --num-envs 2 --num-minibatches 1 --run-name run"
    succeed(tmp_path, ppo + " --eval-episodes 1", script=test_runs.SCRIPT)
    before = contents(tmp_path / RUN)
    assert_refused(run(tmp_path, f"--{flag} {RUN}"), "made by ppo_continuous_action.py", f"not by {SCRIPT.name}")
    assert contents(tmp_path / RUN) == before


@pytest.mark.parametrize("part", ["learners", "noise", "random", "envs"])
def test_damaged_checkpoint(stopped, run, tmp_path, part):
    test_runs.edit_checkpoint(stopped, without=part)
    assert_refused(run(tmp_path, f"--resume {RUN}"), "can't load", str(RUN), "config.json", part)


def is_finite(x):
    return all(is_finite(y) for y in x.values()) if isinstance(x, dict) else bool(torch.isfinite(x).all())


@pytest.mark.parametrize("step, saved", [(30, 0), (170, 160)], ids=["before learning", "learning"])
@pytest.mark.parametrize("fault", ["nan-reward", "nan-observation"])
def test_non_finite_transition(whole, run, succeed, tmp_path, fault, step, saved):
    """Ends the run before it is stored and leaves the last good checkpoint, from which the run goes on."""
    result = run(tmp_path, TOY_RUN, fault=f"{fault} {step}")
    assert_fails(result, 1, f"step {step - 2}:", "reward is not finite: mend the environment", "--resume")
    checkpoint = load_checkpoint(tmp_path / RUN)
    assert checkpoint["global_step"] == saved and is_finite(checkpoint["agent"]) and is_finite(checkpoint["learners"])
    assert all(is_finite(x) for stats in checkpoint["envs"]["stats"] for x in stats)
    assert np.isfinite(transitions(tmp_path / RUN, saved)).all()
    succeed(tmp_path, f"--resume {RUN}")
    assert differences(whole, tmp_path / RUN) == []


def test_non_finite_loss(run, tmp_path):
    """Ends the run at the next look at the losses, and leaves the last good checkpoint."""
    flags = "--learning-rate 1e30 --random-steps 500 --eval-interval 1000"  # nobody asks the spoilt policy
    assert_fails(run(tmp_path, f"{TOY_RUN} {flags}"), 1, "the loss is not finite", str(RUN))
    assert is_finite(load_checkpoint(tmp_path / RUN)["learners"])


def test_spoilt_policy_is_not_the_environment_s_fault(run, tmp_path):
    result = run(tmp_path, f"{TOY_RUN} --learning-rate 1e30")
    assert_fails(result, 1, "action or reward is not finite", "start anew at a lower rate")


def test_noise_starts_anew_where_the_environment_does(run, tmp_path):
    """Its episode ended before the actions of the checkpoint do; the noise that the checkpoint has isn't that of the
    new one."""
    flags = TOY_RUN.replace("toy:Toy-v0", "toy:ToyShort-v0")
    assert "ToyShort" in flags and run(tmp_path, flags, fault="SIGTERM 249", END="30").returncode == 143
    checkpoint = load_checkpoint(tmp_path / RUN)
    test_runs.edit_checkpoint(tmp_path / RUN, noise=torch.full_like(checkpoint["noise"], 1e9))
    result = run(tmp_path, f"--resume {RUN}", fault="SIGTERM 30", END="3")
    actions = transitions(tmp_path / RUN, checkpoint["global_step"] + 4, 4)[:, ACTION]
    assert (result.returncode, result.stdout.count("can't be brought back")) == (143, 2) and not (actions == 1).any()


def test_tensorboard(whole):
    """The tags and the steps of each; the evaluation of the last step is that of evaluation.json."""
    accumulator = EventAccumulator(str(whole), size_guidance={"scalars": 0}).Reload()
    assert sorted(accumulator.Tags()["scalars"]) == sorted(TAGS)
    steps = {tag: [scalar.step for scalar in accumulator.Scalars(tag)] for tag in TAGS}
    assert steps["charts/SPS"] == [*range(40, 481, 40), 500]
    for tag in ("losses/qf1_values", "losses/qf1_loss", "losses/actor_loss"):
        assert steps[tag] == [*range(80, 481, 40), 500]  # learning starts at step 75
    assert steps["eval/episodic_return"] == [250, 500]
    evaluation = json.loads((whole / "evaluation.json").read_text())
    last = scalars(whole, "eval/episodic_return")[500]
    assert last == pytest.approx(np.mean(evaluation["returns"]), rel=1e-6) and len(evaluation["returns"]) == 3
    assert all(scalar.value > 0 for scalar in accumulator.Scalars("charts/SPS"))


def test_losses_every_100_iterations(succeed, tmp_path):
    """Without a checkpoint there, too; the evaluation is at the first step that has reached a multiple."""
    flags = TOY_RUN + " --num-envs 3 --total-timesteps 600 --checkpoint-interval 10000"
    succeed(tmp_path, flags + " --eval-interval 200 --updates-per-step 0.02")
    assert list(scalars(tmp_path / RUN, "losses/qf1_loss")) == [300, 600]
    assert list(scalars(tmp_path / RUN, "eval/episodic_return")) == [201, 402, 600]


def test_logged_losses_are_means(succeed, tmp_path):
    """Of all updates since the last log: those that are logged after every iteration, which has one, show it."""
    for name, interval in ("each", 2), ("mean", 20):
        succeed(tmp_path, f"{SHORT_RUN} --checkpoint-interval {interval} --run-name {name}")
    for tag in ("losses/qf1_values", "losses/qf1_loss", "losses/actor_loss"):
        each, mean = (scalars(tmp_path / "runs" / name, tag) for name in ("each", "mean"))
        assert list(each) == list(range(78, 121, 4 if tag == "losses/actor_loss" else 2))  # every second updates both
        assert list(mean) == [80, 100, 120]
        for step, value in mean.items():
            assert value == pytest.approx(np.mean([x for s, x in each.items() if step - 20 < s <= step]), rel=1e-5)


def test_number_of_updates(whole):
    """The least that is not below 0.25 for each of the 425 steps; every second one is of the actor, too."""
    learners = load_checkpoint(whole)["learners"]
    assert learners["critic"]["step"] == 107 and learners["actor"]["step"] == 54


def test_normalisation_of_rewards(succeed, tmp_path):
    """Is of what is learned from, not of what is stored."""
    for name in ("norm-reward", "no-norm-reward"):
        succeed(tmp_path, f"{SHORT_RUN} --{name} --run-name {name}")
    a, b = (tmp_path / "runs" / name for name in ("norm-reward", "no-norm-reward"))
    np.testing.assert_array_equal(transitions(a, 76), transitions(b, 76))
    params = [load_checkpoint(run_dir)["learners"]["critic"]["params"] for run_dir in (a, b)]
    assert (params[0] != params[1]).any()


def test_episodes_file(whole):
    """Lengths that add up to the steps, both ways to end, and the step of the run at which each episode ended."""
    rows = episode_rows(whole)
    assert list(rows[0]) == ["global_step", "wall_seconds", "env", "return", "length", "ended_by"]
    unfinished = load_checkpoint(whole)["envs"]["episode_lengths"].sum().item()
    assert sum(int(row["length"]) for row in rows) + unfinished == 500
    assert {row["env"] for row in rows} == {"0", "1"}
    assert all(row["ended_by"] == ("termination" if int(row["length"]) % 2 else "truncation") for row in rows)
    for env in "01":  # an environment's k-th step is step 2 k of the run
        mine = [row for row in rows if row["env"] == env]
        ends = [2 * sum(int(row["length"]) for row in mine[: i + 1]) for i in range(len(mine))]
        assert [int(row["global_step"]) for row in mine] == ends
    walls = [float(row["wall_seconds"]) for row in rows]
    assert walls == sorted(walls) and walls[-1] > 0
    for tag, column in ("charts/episodic_return", "return"), ("charts/episodic_length", "length"):
        logged = sorted((step, value) for name, step, value in events(whole) if name == tag)
        written = sorted((int(row["global_step"]), float(row[column])) for row in rows)
        assert [step for step, _ in logged] == [step for step, _ in written]
        assert [value for _, value in logged] == pytest.approx([value for _, value in written], rel=1e-6)


@pytest.fixture(scope="module")
def explored(run, tmp_path_factory):
    """A run that was killed before its first update: its folder, with the checkpoint of step 0, and the transitions of
    each environment, (steps, 2, 10)."""
    cwd = tmp_path_factory.mktemp("explored")
    flags = "--total-timesteps 300 --learning-starts 298 --checkpoint-interval 300 --random-steps 10"
    assert run(cwd, f"{TOY_RUN} --buffer-size 1000 --eval-interval 1000 {flags}", fault="SIGKILL 297").returncode < 0
    assert num_steps(cwd / RUN) == 0
    return cwd / RUN, transitions(cwd / RUN, 296, 296).reshape(148, 2, 10)


def test_stored_transitions(explored):
    """As the environment gave them: no normalisation, the last observation of an episode before the reset, and a flag
    for terminations only."""
    _, rows = explored
    assert (rows[..., NEXT_OBS][..., 2] == rows[..., OBS][..., 2] + 1).all()  # the third coordinate is the time
    x = rows[..., NEXT_OBS][..., :2].astype(np.float64)
    np.testing.assert_allclose(rows[..., REWARD], -(x**2).sum(-1), rtol=1e-5)
    ended = rows[1:, :, 2] == 0  # the next observation is the first of an episode
    np.testing.assert_array_equal(rows[1:, :, OBS][~ended], rows[:-1, :, NEXT_OBS][~ended])
    odd = rows[:-1, :, NEXT_OBS][..., 2] % 2 == 1  # which is how the toy's episodes end by termination
    np.testing.assert_array_equal(rows[:-1, :, TERMINATION], ended & odd)
    assert (ended & odd).any() and (ended & ~odd).any()


def test_actions(explored):
    """Uniform ones at first, then the actor's on normalised observations with Ornstein-Uhlenbeck noise, whose deviation
    goes from 0.3 to 0.05 over the run and which starts from 0 in each episode."""
    run_dir, rows = explored
    checkpoint = load_checkpoint(run_dir)
    random_state = np.random.RandomState()
    random_state.set_state(checkpoint["random"][1])
    weights = {name: x.numpy() for name, x in checkpoint["agent"].items()}
    noise = np.zeros((2, 2))
    for k, (before, row) in enumerate(zip([None, *rows], rows)):
        if 2 * k < 10:
            expected = random_state.uniform(-1, 1, (2, 2))
        else:
            seen = rows[: k + 1, :, OBS].reshape(-1, 3).astype(np.float64)
            count = len(seen) + 1e-4  # as if there had been 1e-4 observations of mean 0 and variance 1
            mean = seen.sum(0) / count
            var = ((seen - mean) ** 2).sum(0) / count + 1e-4 * (1 + mean**2) / count
            x = ((row[:, OBS] - mean) / np.sqrt(var + 1e-8)).clip(-10, 10)
            for layer in (0, 2):
                x = np.maximum(x @ weights[f"actor.{layer}.weight"].T + weights[f"actor.{layer}.bias"], 0)
            x = np.tanh(x @ weights["actor.4.weight"].T + weights["actor.4.bias"])
            noise[row[:, 2] == 0] = 0
            noise = 0.85 * noise + (0.3 - 0.25 * k / 149) * random_state.standard_normal((2, 2))
            expected = (x + noise).clip(-1, 1)
        np.testing.assert_allclose(row[:, ACTION], expected, atol=1e-5, err_msg=f"iteration {k}")
        random_state.random_sample(2)  # the toy takes one in each step
    assert (np.abs(rows[5:, :, ACTION]) == 1).any()  # some were clipped


def test_gaussian_noise(run, tmp_path):
    """Without --final-exploration-noise, independent noise of one deviation on top of the actor's action."""
    flags = TOY_RUN.replace(" --noise-type ou", "").replace(" --final-exploration-noise 0.05", "")
    flags = flags.replace(" --norm-obs", "") + " --random-steps 0 --total-timesteps 300 --learning-starts 298"
    flags += " --buffer-size 1000 --checkpoint-interval 300 --eval-interval 1000"
    assert run(tmp_path, flags, fault="SIGKILL 297").returncode < 0
    checkpoint, rows = load_checkpoint(tmp_path / RUN), transitions(tmp_path / RUN, 296, 296)
    actor = {name.removeprefix("actor."): x for name, x in checkpoint["agent"].items() if name.startswith("actor.")}
    nn = torch.nn
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh())
    net.load_state_dict(actor)
    noise = rows[:, ACTION] - net(torch.from_numpy(rows[:, OBS])).detach().numpy()
    random_state = np.random.RandomState()
    random_state.set_state(checkpoint["random"][1])
    for k, x in enumerate(noise.reshape(148, 2, 2)):
        expected = 0.3 * random_state.standard_normal((2, 2))
        inside = np.abs(rows[2 * k : 2 * k + 2, ACTION]) < 1
        np.testing.assert_allclose(x[inside], expected[inside], atol=1e-5)
        random_state.random_sample(2)


def test_videos(whole, succeed, tmp_path):
    """Of training episodes and of the last evaluation, from first frame to last; the run is the same to the bit."""
    succeed(tmp_path, TOY_RUN + " --capture-video --video-interval 10")
    assert_videos(tmp_path / RUN, 10)
    assert differences(whole, tmp_path / RUN) == []


def test_compilation(succeed, tmp_path):
    """Learns the same to rounding, and a resumed run is the same to the bit."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    flags = SHORT_RUN.replace("toy:Toy-v0", "toys:ToyCopied-v0") + " --policy-frequency 1"
    if "without compilation" in succeed(tmp_path, flags, compiled=True, **cache).stdout:
        pytest.skip("no C++ compiler here")
    assert num_steps(tmp_path / "runs/copy") == 80
    succeed(tmp_path, "--resume runs/copy", compiled=True, **cache)
    assert differences(tmp_path / RUN, tmp_path / "runs/copy") == []
    succeed(tmp_path, f"{flags} --run-name eager")
    compiled, eager = (load_checkpoint(tmp_path / "runs" / name)["learners"] for name in ("run", "eager"))
    for name in ("actor", "critic"):
        assert compiled[name]["step"] == 22
        assert any((compiled[name][key] != eager[name][key]).any() for key in ("params", "exp_avg", "exp_avg_sq"))
        for key, x in compiled[name].items():
            torch.testing.assert_close(x, eager[name][key], rtol=1e-3, atol=1e-5)
