"""One worker and its run: attempts, failures, signals, locks."""

import fcntl
import json
import os
import signal
from pathlib import Path

import pytest

from benchmark import worker
from benchmark.store import JOB, hold, is_held, read_json, write_json
from benchmark.worker import POLL_S, Silence, count_failure

NO_LOCKS = """
import errno, fcntl
def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock"""


@pytest.fixture
def lock_run(lab):
    """lock_run(name): as a script on another machine does, whose worker is gone."""
    files = []

    def lock(name):
        lab.store.run_dir(name).mkdir(exist_ok=True)
        files.append(open(lab.store.run_dir(name) / "lock", "w"))
        fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return files[-1]

    yield lock
    for file in files:
        file.close()


def write_steps(lab, name, *steps):
    """Writes an episodes.csv with an episode at each of these steps."""
    lab.store.run_dir(name).mkdir(exist_ok=True)
    rows = [f"{step},{step}.0,0,1.0,1,termination\n" for step in steps]
    text = "global_step,wall_seconds,env,return,length,ended_by\n" + "".join(rows)
    (lab.store.run_dir(name) / "episodes.csv").write_text(text)


def replace_main(lab, text):
    """Lets the script do something else, as the body of its main()."""
    begin, main = lab.fake.split("def main():\n")
    assert main
    lab.script.write_text(f"{begin}def main():\n    {text}\nmain()\n")


def test_a_run_is_done(lab):
    name = lab.make_folder("Good-v0")
    assert lab.run_worker(name) == (0, "")
    lab.assert_done_once(name)
    assert (lab.job(name)["failures"], lab.job(name)["session"]) == (0, lab.store.plan()["session"])
    assert lab.starts(name) == 1 and lab.environment(name)["OMP_NUM_THREADS"] == "1"
    assert lab.run_worker(name) == (0, "")
    assert lab.starts(name) == 1


def test_a_run_that_fails_is_resumed_from_its_checkpoint(lab):
    name = lab.make_folder("Crash-v0", retries=1)
    assert lab.run_worker(name)[0] == 0
    lab.assert_done_once(name)
    assert lab.job(name)["failures"] == 1 and lab.starts(name) == 2
    assert json.loads(lab.text(name, "words.json")) == ["--resume", f"runs/{name}"]


def test_a_run_that_fails_too_often_is_given_up_with_its_reason(lab):
    name = lab.make_folder("Never-v0", retries=2)
    assert lab.run_worker(name)[0] == 1
    job = lab.job(name)
    assert (job["state"], job["failures"], lab.starts(name)) == ("failed", 3, 3)
    assert job["error"] == "RuntimeError: [broken] at 0 (exit code 1)"


def test_bad_input_is_given_up_at_once(lab):
    name = lab.make_folder("BadInput-v0", retries=5)
    assert lab.run_worker(name)[0] == 1
    job = lab.job(name)
    assert (job["state"], job["failures"], lab.starts(name)) == ("failed", 1, 1)
    assert job["error"] == "error: a sentence on what is wrong (exit code 2)"


def test_failures_are_counted_from_0_where_a_run_gets_further():
    """So that only the same trouble again and again ends it."""
    job = dict(JOB)
    seen = []
    for step, lost in (
        (5, False),
        (4, False),
        (5, True),
        (6, False),
        (6, True),
        (9, True),
        (9, True),
    ):
        job |= count_failure(job, step, "trouble", lost)
        assert job["state"] == "waiting"
        seen.append((job["failures"], job["step"], job["error"]))
    assert seen == [
        (1, 5, "trouble"),
        (2, 5, "trouble"),
        (3, 5, "trouble"),
        (1, 6, "trouble"),
        (2, 6, "trouble"),
        (0, 9, ""),
        (1, 9, "trouble"),
    ]


@pytest.mark.parametrize(
    "step, retries, state, failures",
    [(None, 0, "failed", 1), (None, 1, "finished", 1), (2, 0, "failed", 1), (3, 0, "finished", 0)],
)
def test_a_lost_worker_is_a_failure_where_it_got_no_further(lab, step, retries, state, failures):
    """step: of its last episode; an attempt before it had come to step 2."""
    name = lab.make_folder("Good-v0", retries=retries)
    lost = {"state": "running", "failures": 0, "step": 2, "place": "node7, process 5"}
    lab.store.write_job(name, lab.job(name) | lost)
    if step:
        write_steps(lab, name, step)
    code, _ = lab.run_worker(name)
    job = read_json(lab.store.job_file(name))
    assert (code, job["state"], job["failures"]) == (int(state == "failed"), state, failures)
    if state == "failed":
        assert job["error"] == "lost by node7, process 5"
        assert lab.starts(name) == 0


def test_a_worker_that_was_lost_with_an_earlier_sweep_is_no_failure(lab):
    name = lab.make_folder("Good-v0")
    lab.store.write_job(name, lab.job(name) | {"state": "running", "failures": 3, "place": "x"})
    lab.store.write_plan(lab.store.plan() | {"session": "next"})
    assert lab.run_worker(name)[0] == 0
    assert lab.job(name)["failures"] == 0


def test_a_run_has_one_worker(lab):
    name = lab.make_folder("Good-v0")
    lab.store.write_job(name, lab.job(name) | {"state": "running", "place": "node7, process 5"})
    with hold(lab.store.job_lock(name)):
        assert lab.run_worker(name) == (75, f"{name} is held by node7, process 5\n")
    assert lab.starts(name) == 0
    assert lab.run_worker(name)[0] == 1  # lost by node7


def test_a_worker_knows_its_sweep(lab):
    lab.make_folder("Good-v0")
    sentence = f"error: {lab.store.plan_file} has no run Bad-v0__fake__1\n"
    assert lab.run_worker("Bad-v0__fake__1") == (1, sentence)
    lab.store.plan_file.unlink()
    code, said = lab.run_worker("Good-v0__fake__1")
    assert code == 1 and said.startswith(f"error: {lab.out} is no folder of a sweep")


def test_without_locks_a_worker_goes_on_where_it_alone_can_have_the_run(lab):
    name = lab.make_folder("Good-v0", needs_locks=False)
    code, said = lab.run_worker(name, patch=NO_LOCKS)
    assert code == 0 and "has no locks (No locks available): see to it" in said
    lab.assert_done_once(name)


def test_without_locks_a_worker_refuses_a_run_that_other_nodes_may_have(lab):
    name = lab.make_folder("Good-v0", needs_locks=True)
    code, said = lab.run_worker(name, patch=NO_LOCKS)
    assert code == 1 and "two nodes may have one run at once" in said and said.count("\n") == 1
    assert lab.starts(name) == 0 and not lab.store.job_file(name).exists()


def test_a_run_that_another_process_has_is_waited_for(lab, lock_run):
    """Such as a script on a node that is cut off: that is not the run's failure."""
    name = lab.make_folder("Good-v0")
    lock = lock_run(name)
    process = lab.start_worker(name)
    lab.wait_for(lambda: "is in use by another process" in lab.job(name)["error"])
    assert lab.job(name)["state"] == "waiting" and lab.starts(name) == 0
    lock.close()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(name)
    assert lab.job(name)["failures"] == 0


def test_a_run_that_another_process_ends_is_finished(lab, lock_run):
    name = lab.make_folder("Good-v0")
    lock_run(name)
    process = lab.start_worker(name)
    lab.wait_for(lambda: "is in use" in lab.job(name)["error"])
    write_json(lab.store.run_dir(name) / "evaluation.json", {"returns": [4.0]})
    assert lab.finish(process)[0] == 0
    assert read_json(lab.store.job_file(name))["state"] == "finished" and lab.starts(name) == 0


def test_a_worker_that_waits_for_another_process_can_be_stopped(lab, lock_run):
    name = lab.make_folder("Good-v0")
    lock_run(name)
    process = lab.start_worker(name, patch="worker.BUSY_S = 60")
    lab.wait_for(lambda: "is in use" in lab.job(name)["error"])
    process.send_signal(signal.SIGTERM)
    assert lab.finish(process) == (143, "")
    job = lab.job(name)
    assert (job["state"], job["error"], lab.starts(name)) == ("waiting", "", 0)


def test_a_script_that_finds_another_one_was_quicker_is_no_failure(lab):
    """The folder was free when the worker looked, and is taken when the script comes."""
    name = lab.make_folder("BadInput-v0")
    answers = "answers = [False, True, False]\nworker.in_use = lambda run_dir: answers.pop(0)"
    code, _ = lab.run_worker(name, patch=f"{answers}\nanswers.append(False)")
    job = lab.job(name)
    assert (code, job["state"], job["failures"], lab.starts(name)) == (1, "failed", 1, 2)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(lab):
    """A real script, in a folder with an episode and the beginning of another."""
    name = lab.make_folder("Good-v0")
    plan = lab.store.plan()
    words = "--env-id Pendulum-v1 --total-timesteps 64 --num-steps 64 --eval-episodes 1"
    words = [*words.split(), "--no-compile", "--no-cuda", "--run-name", name]
    script = lab.root / "ppo_continuous_action.py"
    plan["runs"][name] |= {"script": str(script), "words": words}
    lab.store.write_plan(plan)
    write_steps(lab, name, 1)
    with open(lab.store.run_dir(name) / "episodes.csv", "a") as file:
        file.write("2,")
    assert lab.run_worker(name)[0] == 0
    assert (lab.job(name)["state"], lab.job(name)["failures"]) == ("finished", 0)
    assert lab.text(name, "episodes.csv").count("\n") == 1


def test_an_evaluation_that_stays_unreadable_is_the_failure(lab):
    """Where the script, too, takes the run for finished."""
    name = lab.make_folder("Good-v0")
    (lab.store.run_dir(name) / "evaluation.json").mkdir(parents=True)
    replace_main(lab, "sys.exit()")
    assert lab.run_worker(name)[0] == 1
    job = lab.job(name)
    assert job["state"] == "failed" and job["error"].startswith("evaluation.json can't be read")


def test_a_run_that_writes_nothing_is_stopped_and_can_be_resumed(lab):
    name = lab.make_folder("Hang-v0", stall_minutes=0.03)
    assert lab.run_worker(name)[0] == 1
    job = lab.job(name)
    assert (job["state"], job["failures"], lab.starts(name)) == ("failed", 1, 1)
    assert job["error"].startswith("nothing written for 0.03 minutes (exit code ")
    lab.store.write_plan(lab.store.plan() | {"session": "next"})
    assert lab.run_worker(name)[0] == 0
    lab.assert_done_once(name)


def test_silence_is_the_time_in_which_somebody_has_listened():
    """A machine that sleeps has not: no clock is asked."""
    silence = Silence()
    heard = []
    for written in (1.0, 1.0, 1.0, 2.0, 2.0):
        silence.look(written)
        heard.append(silence.seconds / POLL_S)
    assert heard == [0, 1, 2, 0, 1]


def test_a_worker_that_is_stopped_leaves_its_run_waiting(lab):
    name = lab.make_folder("Gate-v0")
    process = lab.start_worker(name)
    lab.at_gate(name)
    process.send_signal(signal.SIGTERM)
    assert lab.finish(process) == (143, "")
    job = lab.job(name)
    assert (job["state"], job["failures"], job["error"]) == ("waiting", 0, "")
    assert lab.steps(name) == [1, 2, 3]


def test_a_worker_asks_its_script_once_to_stop(lab):
    """However often it is asked itself: at a second signal a script may end unsaved."""
    name = lab.make_folder("Linger-v0")
    seen = "os.environ['SEEN']"
    os.environ["SEEN"] = str(lab.folder / "seen")
    patch = f"""begin = worker.Worker.__init__
def init(self, *args):
    begin(self, *args)
    class Seen(list):
        def append(self, signum):
            list.append(self, signum)
            open({seen}, "a").write("x")
    self.signals = Seen()
worker.Worker.__init__ = init"""
    process = lab.start_worker(name, patch=patch)
    del os.environ["SEEN"]
    lab.at_gate(name)
    signums = (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGTERM)
    for i, signum in enumerate(signums, 1):
        process.send_signal(signum)
        lab.wait_for(lambda: (lab.folder / "seen").read_text() == "x" * i)
        lab.wait_for(lambda: lab.text(name, "signals.txt"))
    # While the script saves: whoever stops the worker may kill it before that has ended
    lab.wait_for(lambda: lab.job(name)["state"] == "waiting")
    lab.go()
    assert lab.finish(process) == (143, "")
    assert lab.text(name, "signals.txt") == "SIGTERM\n" and lab.steps(name) == [1, 2, 3]


def test_a_script_that_does_not_stop_is_killed(lab):
    name = lab.make_folder("Deaf-v0")
    process = lab.start_worker(name, patch="worker.STOP_S = 0.3")
    lab.at_gate(name)
    script_pid, _ = lab.pids(name)
    process.send_signal(signal.SIGTERM)
    assert lab.finish(process)[0] == 143
    assert not Path(f"/proc/{script_pid}").exists()
    assert lab.job(name)["state"] == "waiting" and lab.steps(name) == [1, 2]


@pytest.mark.parametrize("env_id", ["Linger-v0", "Deaf-v0"])
def test_a_worker_that_is_killed_takes_its_script_with_it(lab, env_id):
    """At once, since there is nobody left to see whether it hangs.

    Another worker goes on from its checkpoint.
    """
    name = lab.make_folder(env_id)
    process = lab.start_worker(name)
    lab.at_gate(name)
    assert is_held(lab.store.job_lock(name))
    process.kill()
    process.wait()
    lab.wait_for(lambda: not is_held(lab.store.job_lock(name)))
    assert lab.steps(name) == [1, 2]
    assert not (lab.store.run_dir(name) / "signals.txt").exists()
    assert lab.run_worker(name)[0] == 0
    lab.assert_done_once(name)


def test_a_run_is_locked_as_long_as_its_script_lives(lab):
    """Where a script outlives its worker, as without Linux, no other worker starts it."""
    name = lab.make_folder("Linger-v0")
    process = lab.start_worker(name, patch="worker.die_with_parent = lambda *signum: None")
    lab.at_gate(name)
    process.kill()
    process.wait()
    assert is_held(lab.store.job_lock(name))
    lab.go()
    lab.wait_for(lambda: not is_held(lab.store.job_lock(name)))
    lab.assert_done_once(name)


def test_a_worker_ends_with_what_has_started_it(lab):
    name = lab.make_folder("Gate-v0")
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'benchmark.worker', "
        "*sys.argv[1:]])"
    )
    process = lab.start("-c", code, lab.out, name, "--threads", "1")
    lab.at_gate(name)
    process.kill()
    lab.wait_for(lambda: not is_held(lab.store.job_lock(name)))
    assert lab.job(name)["state"] == "waiting" and lab.steps(name) == [1, 2, 3]


def test_a_disk_that_is_full_for_a_moment_stops_no_run(lab):
    name = lab.make_folder("Good-v0")
    lab.store.job_file(name).with_name(f"{name}.json.part").mkdir()
    code, said = lab.run_worker(name)
    assert code == 0 and f"can't write the state of {name}" in said
    lab.assert_done_once(name)


@pytest.fixture
def slurm_task(lab, monkeypatch):
    """A worker's variables in Slurm, and a scontrol that notes its words in the file "asked"."""
    (lab.folder / "bin").mkdir()
    scontrol = lab.folder / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {lab.folder}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lab.folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")


def test_a_task_of_slurm_near_its_time_limit_asks_for_another(lab, slurm_task):
    """Not one that is stopped by scancel, whose signal is another."""
    name = lab.make_folder("Linger-v0")
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        process = lab.start_worker(name, patch="worker.STOP_S = 0.2")
        lab.wait_for(lambda: lab.job(name)["state"] == "running" and lab.starts(name))
        assert not (lab.folder / "asked").exists()
        process.send_signal(signum)
        assert lab.finish(process)[0] == 143
    assert (lab.folder / "asked").read_text() == "requeue 17_3\n"


def test_a_task_of_slurm_whose_run_ends_in_time_asks_for_none(lab, slurm_task):
    name = lab.make_folder("Deaf-v0")
    process = lab.start_worker(name)
    lab.at_gate(name)
    process.send_signal(signal.SIGUSR1)
    lab.wait_for(lambda: lab.job(name)["state"] == "waiting")  # the signal has come
    lab.go()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(name)
    assert not (lab.folder / "asked").exists()


def test_slurm_that_does_not_answer_a_task_is_only_told(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "17")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("PATH", "")
    worker.requeue()
    assert "can't requeue 17_3" in capsys.readouterr().err
