"""Sweeps whose runs are tasks of array jobs, with commands that do what Slurm's do."""

import json
import os
import signal
import subprocess

import pytest

# Takes the file of an array job as it is, with a file JOB_TASK.queued for each task until that has
# ended.
SBATCH = """
import os, shlex, subprocess, sys
if (here / "refuse").exists():
    sys.exit("sbatch: error: Batch job submission failed: Invalid account")
assert len(sys.argv) == 3 and sys.argv[1] == "--parsable"
text, options = Path(sys.argv[2]).read_text(), {}
for line in text.splitlines():
    if line and not line.startswith("#"):
        break
    if line.startswith("#SBATCH"):
        word, *more = shlex.split(line[8:])
        if more:
            sys.exit(f"sbatch: error: Invalid directive found in batch script: {more[0]}")
        options[word.partition("=")[0]] = word.partition("=")[2]
job = str(100 + len(list(here.glob("*.call"))))
(here / f"{job}.call").write_text(json.dumps({"options": options, "text": text}))
for task in range(int(options["--array"].partition("%")[0].removeprefix("0-")) + 1):
    (here / f"{job}_{task}.queued").touch()
nothing = subprocess.DEVNULL
controller = subprocess.Popen(
    [here / "controller", job],
    start_new_session=True,
    stdin=nothing,
    stdout=nothing,
    stderr=nothing,
)
(here / f"{job}.controller").write_text(str(controller.pid))
print(f"{job};main")
"""

CONTROLLER = """
import os, subprocess, sys, time
job = sys.argv[1]
call = json.loads((here / f"{job}.call").read_text())
tasks, _, limit = call["options"]["--array"].partition("%")
waiting, processes = list(range(int(tasks.removeprefix("0-")) + 1)), {}
while waiting or processes:
    while waiting and len(processes) < int(limit or 99):
        task = waiting.pop(0)
        log = open(call["options"]["--output"].replace("%A", job).replace("%a", str(task)), "a")
        env = os.environ | {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": str(task)}
        command = ["bash", "-c", call["text"]]
        processes[task] = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        (here / f"{job}_{task}.queued").write_text(str(processes[task].pid))
    for task in [task for task, process in processes.items() if process.poll() is not None]:
        del processes[task]
        if (here / f"{job}_{task}.requeue").exists():
            (here / f"{job}_{task}.requeue").unlink()
            waiting.append(task)
        else:
            (here / f"{job}_{task}.queued").unlink()
    time.sleep(0.02)
"""

SQUEUE = """
import sys
with open(here / "asked.txt", "a") as file:
    print("asked", file=file)
if (here / "down").exists():
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
options = dict(word.partition("=")[::2] for word in sys.argv[1:])
assert set(options) == {"--noheader", "--array", "--me", "--format"}
for job, task in [("7", "N/A"), *(path.stem.split("_") for path in here.glob("*.queued"))]:
    print(options["--format"].replace("%F", job).replace("%K", task))
"""

SCONTROL = """
import sys
assert sys.argv[1] == "requeue" and len(sys.argv) == 3
(here / f"{sys.argv[2]}.requeue").touch()
with open(here / "requeued.txt", "a") as file:
    print(sys.argv[2], file=file)
"""

FAST = """
from benchmark.engines import slurm
slurm.ASK_S, slurm.REFUSED_S = 0.1, 1
"""
GATES = ["Gate-v0__fake__1", "Gate-v0__fake__2", "Gate-v0__fake__3"]
GATE = GATES[0]
SLURM = ("--backend", "slurm")


@pytest.fixture
def slurm(commands):
    here = commands(sbatch=SBATCH, squeue=SQUEUE, scontrol=SCONTROL, controller=CONTROLLER)
    yield here
    left = list(here.glob("*.queued"))
    if left:  # the test has failed
        paths = [*here.glob("*.controller"), *left]
        for pid in filter(None, [path.read_text() for path in paths]):
            subprocess.run(["kill", pid], stderr=subprocess.DEVNULL)


def calls_of(here):
    """What sbatch was called with, in the order of the calls."""
    return [json.loads(path.read_text()) for path in sorted(here.glob("*.call"))]


def wait_until_asked(lab, slurm, times):
    """Waits until squeue has been called so many times more."""
    asked = slurm / "asked.txt"
    enough = asked.stat().st_size + times * len("asked\n")
    lab.wait_for(lambda: asked.stat().st_size >= enough)


def signal_task(slurm, task, signum):
    os.kill(int((slurm / f"{task}.queued").read_text()), signum)


def test_slurm_runs_a_suite(lab, slurm):
    """One job, two of its three tasks at a time, each with its threads and its log."""
    lab.make_suite("Gate-v0", seeds=3)
    process = lab.start_sweep(*SLURM, "--workers", "2", "--cpus-per-run", "3", patch=FAST)
    lab.at_gate(*GATES[:2])
    assert lab.job(GATES[2])["state"] == "waiting"
    lab.go()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(*GATES)
    assert [call["options"]["--array"] for call in calls_of(slurm)] == ["0-2%2"]
    for name in GATES:
        assert lab.environment(name)["OMP_NUM_THREADS"] == "3"
        assert lab.store.log_file(name).exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_slurms_runs_go_on_without_the_sweep(lab, slurm, signum):
    """One that runs and one that still is in the queue."""
    lab.make_suite("Gate-v0", seeds=2)
    first = lab.start_sweep(*SLURM, "--workers", "1", patch=FAST)
    lab.at_gate(GATE)
    first.send_signal(signum)
    code, said = lab.finish(first)
    assert code == (130 if signum == signal.SIGINT else -9)
    assert ("scancel 100" in said) == (signum == signal.SIGINT)
    second = lab.start_sweep(*SLURM, "--workers", "1", patch=FAST)
    assert "1 running, 1 waiting" in second.stdout.readline()
    wait_until_asked(lab, slurm, 1)
    lab.go()
    assert lab.finish(second)[0] == 0
    lab.assert_done_once(*GATES[:2])
    assert len(calls_of(slurm)) == 1
    assert not list((lab.out / "runs").glob("*/signals.txt"))


def test_a_lost_task_is_submitted_again_alone(lab, slurm):
    lab.make_suite("Gate-v0", seeds=2)
    process = lab.start_sweep(*SLURM, "--retries", "0", patch=FAST)
    lab.at_gate(*GATES[:2])
    lab.kill_9(GATES[1])
    lab.wait_for(lambda: lab.job(GATES[1])["state"] == "finished")
    lab.go()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(*GATES[:2])
    one, other = calls_of(slurm)
    assert one["options"]["--array"] == "0-1" and other["options"]["--array"] == "0-0"
    assert f"\nruns=({GATES[1]})\n" in other["text"]


def test_a_task_lost_after_a_sweep_came_back_is_no_failure(lab, slurm):
    """Its worker came up, and there is a checkpoint, if also before this sweep began to watch."""
    lab.make_suite("Gate-v0")
    first = lab.start_sweep(*SLURM, "--retries", "0", patch=FAST)
    lab.at_gate(GATE)
    first.kill()
    first.wait()
    second = lab.start_sweep(*SLURM, "--retries", "0", patch=FAST)
    assert "1 running" in second.stdout.readline()
    lab.kill_9(GATE)
    code, said = lab.finish(second)
    assert code == 0, said
    lab.assert_done_once(GATE)
    assert lab.job(GATE)["failures"] == 0


def test_scancel_is_the_last_word(lab, slurm):
    """Until the same command is given once more."""
    lab.make_suite("Gate-v0", seeds=2)
    process = lab.start_sweep(*SLURM, patch=FAST)
    lab.at_gate(*GATES[:2])
    signal_task(slurm, "100_0", signal.SIGTERM)
    lab.wait_for(lambda: not (slurm / "100_0.queued").exists())
    wait_until_asked(lab, slurm, 2)
    lab.go()
    code, said = lab.finish(process)
    assert code == 1 and f"cancelled: {GATE}\n" in said and "1 were cancelled" in said
    assert len(calls_of(slurm)) == 1 and lab.steps(GATE) == [1, 2, 3]
    lab.assert_done_once(GATES[1])
    assert lab.run_sweep(*SLURM, patch=FAST)[0] == 0
    lab.assert_done_once(*GATES[:2])
    assert f"\nruns=({GATE})\n" in calls_of(slurm)[1]["text"]


def test_scancel_is_the_last_word_for_a_sweep_that_watches_again(lab, slurm):
    lab.make_suite("Gate-v0", seeds=2)
    first = lab.start_sweep(*SLURM, patch=FAST)
    lab.at_gate(*GATES[:2])
    first.kill()
    first.wait()
    second = lab.start_sweep(*SLURM, patch=FAST)
    wait_until_asked(lab, slurm, 2)
    signal_task(slurm, "100_0", signal.SIGTERM)
    lab.wait_for(lambda: not (slurm / "100_0.queued").exists())
    wait_until_asked(lab, slurm, 2)
    lab.go()
    code, said = lab.finish(second)
    assert code == 1 and f"cancelled: {GATE}\n" in said and len(calls_of(slurm)) == 1
    lab.assert_done_once(GATES[1])


def test_a_task_near_its_time_limit_goes_on_in_another(lab, slurm):
    lab.make_suite("Gate-v0", seeds=2)
    process = lab.start_sweep(*SLURM, patch=FAST)
    lab.at_gate(*GATES[:2])
    signal_task(slurm, "100_1", signal.SIGUSR1)
    lab.wait_for(lambda: lab.job(GATES[1])["state"] == "finished")
    lab.go()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(*GATES[:2])
    assert (slurm / "requeued.txt").read_text() == "100_1\n" and len(calls_of(slurm)) == 1
    assert [lab.starts(name) for name in GATES[:2]] == [1, 2]


def test_slurm_that_does_not_answer_in_the_middle_is_waited_for(lab, slurm):
    """Which is said once."""
    lab.make_suite("Gate-v0")
    process = lab.start_sweep(*SLURM, patch=FAST)
    lab.at_gate(GATE)
    (slurm / "down").touch()
    wait_until_asked(lab, slurm, 3)
    assert process.poll() is None and len(calls_of(slurm)) == 1
    (slurm / "down").unlink()
    lab.go()
    code, said = lab.finish(process)
    assert code == 0 and said.count("Slurm doesn't answer") == 1
    lab.assert_done_once(GATE)
    assert len(calls_of(slurm)) == 1


def test_slurm_that_refuses_a_task_in_the_middle_is_asked_again(lab, slurm):
    """A task is lost while the queue is full; it is neither cancelled nor given up."""
    lab.make_suite("Gate-v0", seeds=2)
    process = lab.start_sweep(*SLURM, "--workers", "2", patch=FAST)
    lab.at_gate(*GATES[:2])
    (slurm / "refuse").touch()
    lab.kill_9(GATES[1])
    assert any("sbatch refused" in line for line in process.stdout)
    (slurm / "refuse").unlink()
    lab.wait_for(lambda: len(calls_of(slurm)) == 2)
    lab.go()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(*GATES[:2])
    one, other = (call["options"] for call in calls_of(slurm))
    assert "--dependency" not in one and other["--dependency"] == "afterany:100"


def test_a_task_whose_worker_does_not_come_up_is_no_cancelled_one(lab, slurm):
    """Its log says why."""
    lab.make_suite("Good-v0")
    patch = f"{FAST}\nsys.executable, sweep.PAUSE_S = '/no/py', 0.1"
    code, said = lab.run_sweep(*SLURM, "--retries", "0", patch=patch)
    assert code == 2 and "error: the last 5 workers didn't come up" in said
    assert "/no/py: No such file" in said
    assert "/no/py: No such file" in lab.store.log_file("Good-v0__fake__1").read_text()
    assert lab.job("Good-v0__fake__1")["failures"] == 0


@pytest.mark.parametrize(
    "fault, sentence", [("down", "Slurm doesn't answer"), ("refuse", "sbatch refused")]
)
def test_slurm_that_does_not_work_at_the_start(lab, slurm, fault, sentence):
    (slurm / fault).touch()
    lab.make_suite("Good-v0")
    code, said = lab.run_sweep(*SLURM, patch=FAST)
    *_, last = said.splitlines()
    assert code == 2 and last.startswith("error: ") and sentence in last
    assert "Traceback" not in said and not calls_of(slurm)
