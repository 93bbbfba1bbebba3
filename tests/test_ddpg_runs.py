"""Runs of the scripts with a replay buffer, in what they have of their own: processes and files.

What they share with all scripts is tested in test_behaviour.py.
"""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from processes import (
    RUN,
    assert_fails,
    contents,
    differences,
    edit_checkpoint,
    load_checkpoint,
    progress,
    scalars,
)

ROOT = Path(__file__).resolve().parents[1]
NOISE = " --policy-frequency 2 --noise-type ou --exploration-noise 0.3"
# Of 500 steps 65 are random and 425 are learned from. The ring of 100 + 40 rows goes round thrice
FLAGS = (
    "--env-id toys:Continuous-v0 --num-envs 2 --hidden-sizes 16 16 --batch-size 16"
    " --buffer-size 100 --random-steps 65 --learning-starts 75 --updates-per-step 0.25"
    " --total-timesteps 500 --checkpoint-interval 20 --eval-interval 125"
    " --eval-episodes 3 --num-threads 1 --no-compile --run-name run"
)
SCRIPTS = {
    "ddpg_continuous_action": FLAGS + NOISE,
    "td3_continuous_action": FLAGS + NOISE,
    "sac_continuous_action": FLAGS,
    "ddpg_lstm": f"{FLAGS}{NOISE} --hidden-size 8 --sequence-length 4 --burn-in 3",
}
DDPG = SCRIPTS["ddpg_continuous_action"]


@pytest.fixture(scope="module")
def run(server):
    """run(cwd, flags, name): a process that has ended."""

    def run(cwd, flags, name="ddpg_continuous_action", **env):
        return server.run(ROOT / f"{name}.py", cwd, flags, **env)

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
    """The folder of a run that nothing interrupted."""
    cwd = tmp_path_factory.mktemp("whole")
    succeed(cwd, DDPG)
    return cwd / RUN


def test_a_resume_may_save_more_often_but_not_less(whole, run, succeed, tmp_path):
    """The file has room for so many steps. Less often, or without the file, a sentence says so."""
    assert run(tmp_path, DDPG, TOY_FAULT="SIGKILL 120@0").returncode == -signal.SIGKILL
    before = contents(tmp_path)
    result = run(tmp_path, f"--resume {RUN} --checkpoint-interval 21")
    assert_fails(result, 2, "replay.bin", "lower --checkpoint-interval")
    assert contents(tmp_path) == before
    moved = (tmp_path / RUN / "replay.bin").rename(tmp_path / "replay.bin")
    assert_fails(run(tmp_path, f"--resume {RUN}"), 2, "replay.bin is missing")
    moved.rename(tmp_path / RUN / "replay.bin")
    succeed(tmp_path, f"--resume {RUN} --checkpoint-interval 7")
    assert differences(whole, tmp_path / RUN) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_environment_that_does_not_come_back(run, tmp_path, name):
    """Its episode ended before the actions of the checkpoint do: it starts a new one.

    What the checkpoint has of the old one, noise and memory, is gone then.
    """
    flags = f"{SCRIPTS[name]} --eval-interval 0"
    assert run(tmp_path, flags, name, TOY_FAULT="SIGTERM 121@0", TOY_END=50).returncode == 143
    saved = load_checkpoint(tmp_path / RUN)
    assert saved["run"]["global_step"] == 240
    if "noise" in saved:
        saved["noise"]["state"][:] = 1e9
    if "memory" in saved:
        saved["memory"]["steps"] += 1000
    edit_checkpoint(tmp_path / RUN, **saved)
    # After make_env's step and 120 that are played again
    result = run(tmp_path, f"--resume {RUN}", name, TOY_FAULT="SIGTERM 122@0", TOY_END=7)
    assert result.returncode == 143, result.stderr
    assert result.stdout.count("can't be brought back") == 2
    saved = load_checkpoint(tmp_path / RUN)
    assert saved["run"]["global_step"] == 242
    if "noise" in saved:
        assert 0 < saved["noise"]["state"].abs().max() < 10
    if "memory" in saved:
        assert saved["memory"]["steps"].tolist() == [1, 1]


def test_losses_and_evaluations_are_logged_by_iterations(whole):
    for tag in ("qf1_values", "qf1_loss", "actor_loss"):
        assert [*scalars(whole, f"losses/{tag}")] == [200, 400]
    assert [*scalars(whole, "charts/SPS")] == [200, 400]
    assert [*scalars(whole, "eval/episodic_return")] == [250, 500]


def test_a_loss_that_is_not_finite_ends_the_run(run, tmp_path):
    """When it is to be logged; the policy, which would show it, has not yet played."""
    flags = "--learning-rate 1e30 --random-steps 500 --eval-interval 0 --checkpoint-interval 1000"
    result = run(tmp_path, f"{DDPG} {flags}")
    assert_fails(result, 1, "a loss or a weight is not finite")
    assert progress(tmp_path / RUN)["global_step"] == 0


def test_actions_that_are_not_finite_end_the_run(run, tmp_path):
    """Before an environment gets them, which needn't take them."""
    flags = "--learning-rate 1e30 --eval-interval 0 --checkpoint-interval 1000"
    result = run(tmp_path, f"{DDPG} {flags}")
    assert_fails(result, 1, "a loss or a weight is not finite", "a lower --learning-rate")


def test_a_run_cannot_become_shorter_than_it_is(whole, run, tmp_path):
    """Its evaluation would be said to be of fewer steps than it is."""
    shutil.copytree(whole, tmp_path / RUN)
    before = contents(tmp_path)
    result = run(tmp_path, f"--resume {RUN} --total-timesteps 499")
    assert_fails(result, 2, "the run has made 500 steps: --total-timesteps can't be below")
    assert contents(tmp_path) == before


def test_the_buffer_does_not_depend_on_the_length_of_the_run(succeed, tmp_path):
    """Else a run couldn't go on beyond its end. Rows that aren't used take no space on the disk."""
    succeed(tmp_path, f"{DDPG} --total-timesteps 80 --buffer-size 100000")
    stat = (tmp_path / RUN / "replay.bin").stat()
    assert stat.st_size == 4 * 10 * (100000 + 40)
    assert 512 * stat.st_blocks < stat.st_size / 4


def test_zeros_and_ones_are_accepted(succeed, tmp_path):
    """Where 0 or 1 is the end of a flag's range.

    The targets are then the networks, and the buffer is a queue of 1.
    """
    flags = (
        "--learning-starts 0 --random-steps 0 --exploration-noise 0"
        " --weight-decay 0 --gamma 1 --tau 1 --policy-frequency 1 --updates-per-step 1"
        " --buffer-size 1 --batch-size 1 --total-timesteps 20 --checkpoint-interval 1"
    )
    succeed(tmp_path, f"{DDPG} {flags}")
    saved = load_checkpoint(tmp_path / RUN)
    for name, parameter in saved["agent"].items():
        assert torch.equal(saved["learner"][f"target.{name}"], parameter)
    assert saved["learner"]["actor_optimizer.steps"] == 20
    assert saved["learner"]["critic_optimizer.steps"] == 20


def test_videos_of_evaluations(whole, succeed, tmp_path):
    """The run is the same to the bit."""
    succeed(tmp_path, f"{DDPG} --capture-video")
    videos = sorted(path.parent.name for path in (tmp_path / RUN / "videos").rglob("*.mp4"))
    assert videos == ["end", "step-250", "step-500"]
    assert differences(whole, tmp_path / RUN) == []


def test_compilation(whole, run, succeed, tmp_path):
    """A compiled run that is killed and resumed has the bits of one that isn't.

    It learns the same as without compilation, to rounding.
    """
    flags = DDPG.replace("--no-compile", "") + " --policy-frequency 1 --total-timesteps 160"
    succeed(tmp_path, f"{flags} --run-name eager --no-compile")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    if "without compilation" in succeed(tmp_path, f"{flags} --run-name whole", **cache).stdout:
        pytest.skip("no C++ compiler here")
    assert run(tmp_path, flags, TOY_FAULT="SIGKILL 72@0", **cache).returncode == -signal.SIGKILL
    assert progress(tmp_path / RUN)["global_step"] == 120
    result = succeed(tmp_path, f"--resume {RUN}", **cache)
    assert "bits may differ" not in result.stdout
    assert differences(tmp_path / "runs/whole", tmp_path / RUN) == []
    compiled, eager = (load_checkpoint(tmp_path / "runs" / name) for name in ("whole", "eager"))
    assert compiled["learner"]["critic_optimizer.steps"] == 22
    assert compiled["learner"]["actor_optimizer.steps"] == 22
    for name in ("agent", "learner"):
        for key, x in compiled[name].items():
            torch.testing.assert_close(x, eager[name][key], rtol=1e-3, atol=1e-5)
    ours, theirs = (
        torch.cat([x.flatten() for x in y["agent"].values()]) for y in (compiled, eager)
    )
    assert not torch.equal(ours, theirs)  # it is compiled code indeed
