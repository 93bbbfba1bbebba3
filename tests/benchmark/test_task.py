"""One run, whoever does it and however often: python -m benchmark.task."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmark.task import changed_flags, state_of

GOOD = "Good-v0__fake__1"
GATE = "Gate-v0__fake__1"


def state(lab, name):
    return state_of(lab.out / "runs" / name)


def test_a_run_is_done_once_however_often_it_is_started(lab):
    lab.make_suite("Good-v0")
    assert state(lab, GOOD) == "waiting"
    assert lab.run_task(GOOD) == (0, "")
    lab.assert_done_once(GOOD)
    assert state(lab, GOOD) == "finished"
    assert lab.run_task(GOOD) == (0, "") and lab.starts(GOOD) == 1


def test_a_run_may_be_named_by_its_number(lab):
    lab.make_suite("Good-v0", seeds=3)
    assert lab.run_task("2") == (0, "")
    lab.assert_done_once("Good-v0__fake__3")
    code, said = lab.run_task("3")
    assert code == 2 and "has no run 3" in said


def test_torchrun_starts_a_run_of_several_processes(lab):
    """Of one here, since the fake script is for one."""
    lab.write_suite('env_ids = ["Good-v0"]\nseeds = 1\nprocesses = 1')
    assert lab.run_task(GOOD) == (0, "")
    lab.assert_done_once(GOOD)
    variables = json.loads(lab.text(GOOD, "environment.json"))
    assert variables["RANK"] == "0" and variables["WORLD_SIZE"] == "1"


def test_a_run_that_crashes_is_resumed(lab):
    lab.make_suite("Crash-v0")
    assert lab.run_task("Crash-v0__fake__1")[0] == 0
    lab.assert_done_once("Crash-v0__fake__1")
    assert lab.starts("Crash-v0__fake__1") == 2


@pytest.mark.parametrize("retries", [0, 2])
def test_a_run_that_fails_for_good_says_why(lab, retries):
    lab.make_suite("Never-v0")
    name = "Never-v0__fake__1"
    assert lab.run_task(name, "--retries", retries)[0] == 1
    assert lab.starts(name) == 1 + retries and state(lab, name) == "failed"
    assert lab.text(name, "failed") == "RuntimeError: [broken] at 0 (exit code 1)\n"
    assert lab.log(name).count("Traceback") == 1 + retries


def test_a_flag_that_the_script_reads_as_it_was_has_not_changed(tmp_path):
    (tmp_path / "checkpoint.pt").touch()
    made = {"hidden_sizes": [64], "gamma": 0.9, "learning_rate": 1.0, "target_kl": None}
    (tmp_path / "config.json").write_text(json.dumps({"args": made}))
    flags = {"hidden_sizes": 64, "gamma": "0.9", "learning_rate": 1, "target_kl": "None"}
    assert changed_flags(tmp_path, flags) == []
    assert changed_flags(tmp_path, flags | {"hidden_sizes": [64, 64]}) == ["hidden_sizes"]


def test_bad_input_is_not_tried_again(lab):
    lab.make_suite("BadInput-v0")
    assert lab.run_task("BadInput-v0__fake__1", "--retries", 3)[0] == 2
    assert lab.starts("BadInput-v0__fake__1") == 1
    error = "error: a sentence on what is wrong (exit code 2)\n"
    assert lab.text("BadInput-v0__fake__1", "failed") == error


def test_a_run_without_a_folder_leaves_its_log(lab):
    lab.make_suite("Nothing-v0")
    assert lab.run_task("Nothing-v0__fake__1")[0] == 1
    assert not (lab.out / "runs").exists()
    assert lab.log("Nothing-v0__fake__1") == "nothing came to be\n" * 2


def test_a_failed_run_that_is_started_again_is_failed_no_more(lab):
    lab.make_suite("Crash-v0")
    name = "Crash-v0__fake__1"
    assert lab.run_task(name, "--retries", 0)[0] == 1 and state(lab, name) == "failed"
    assert lab.run_task(name, "--retries", 0)[0] == 0 and state(lab, name) == "finished"
    assert not (lab.out / "runs" / name / "failed").exists()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_task_that_is_stopped_lets_its_run_save(lab, signum):
    lab.make_suite("Gate-v0")
    task = lab.start_task(GATE)
    lab.at_gate(GATE)
    task.send_signal(signum)
    assert lab.finish(task)[0] == 143
    assert state(lab, GATE) == "begun" and lab.text(GATE, "checkpoint.pt") == "3"
    assert lab.run_task(GATE)[0] == 0
    lab.assert_done_once(GATE)


def test_the_script_of_a_killed_task_ends_with_it(lab):
    lab.make_suite("Gate-v0")
    task = lab.start_task(GATE)
    lab.at_gate(GATE)
    script, _ = lab.pids(GATE)
    task.kill()
    task.communicate()
    lab.wait_for(lambda: not os.path.exists(f"/proc/{script}"))
    assert lab.run_task(GATE)[0] == 0
    lab.assert_done_once(GATE)


def test_two_tasks_of_one_run_come_one_after_the_other(lab):
    lab.make_suite("Gate-v0")
    first = lab.start_task(GATE)
    lab.at_gate(GATE)
    second = lab.start_task(GATE)
    time.sleep(1)
    lab.go()
    assert lab.finish(first)[0] == lab.finish(second)[0] == 0
    lab.assert_done_once(GATE)
    assert lab.starts(GATE) == 1


def test_a_run_that_another_process_keeps_is_neither_done_nor_failed(lab):
    """Be it a task, or a script that a lost one has left behind on another machine."""
    lab.make_suite("Good-v0")
    hold = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    hold += "print(flush=True); sys.stdin.read()"
    places = (lab.out / "logs" / f"{GOOD}.lock", lab.out / "runs" / GOOD / "lock")
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-c", hold, str(place)]
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        holder.stdout.readline()
        code = "from benchmark import task; task.WAIT_S = 0.1; task.main()"
        task = lab.start("-c", code, lab.suite, GOOD, "--dir", lab.out)
        assert lab.finish(task) == (75, f"{GOOD} is in the hands of another process\n")
        assert lab.starts(GOOD) == 0 and state(lab, GOOD) == "waiting"
        holder.communicate()
    assert lab.run_task(GOOD)[0] == 0


def test_a_script_that_is_stopped_itself_is_neither_failed_nor_retried(lab):
    lab.make_suite("Gate-v0")
    task = lab.start_task(GATE)
    lab.at_gate(GATE)
    script, _ = lab.pids(GATE)
    os.kill(script, signal.SIGTERM)
    assert lab.finish(task)[0] == 143
    assert lab.starts(GATE) == 1 and state(lab, GATE) == "begun"


def test_slurms_signal_does_not_reach_the_script(lab):
    lab.make_suite("Gate-v0")
    task = lab.start_task(GATE)
    lab.at_gate(GATE)
    script, _ = lab.pids(GATE)
    os.kill(script, signal.SIGUSR2)
    lab.go()
    assert lab.finish(task)[0] == 0 and lab.starts(GATE) == 1


def test_an_evaluation_outweighs_an_old_failure(lab):
    lab.make_suite("Good-v0")
    assert lab.run_task(GOOD)[0] == 0
    (lab.out / "runs" / GOOD / "failed").touch()
    assert state(lab, GOOD) == "finished"


def test_a_run_that_was_made_with_other_flags_is_refused(lab):
    lab.make_suite("Good-v0")
    assert lab.run_task(GOOD)[0] == 0
    lab.write_suite('env_ids = ["Good-v0"]\nseeds = 1\nflags = { total_timesteps = 9 }')
    code, said = lab.run_task(GOOD)
    assert code == 2 and f"{GOOD} was made with another total_timesteps" in said
    (lab.out / "runs" / GOOD / "config.json").write_text("{")
    code, said = lab.run_task(GOOD)
    assert code == 2 and "config.json is damaged: remove" in said and "Traceback" not in said


def test_a_folder_that_can_be_none_is_refused(lab):
    lab.make_suite("Good-v0")
    lab.out.write_text("a file")
    code, said = lab.run_task(GOOD)
    assert code == 2 and said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize("text", ['{"returns": [1', "[]", "{}", "null"])
def test_what_is_no_evaluation_is_none(tmp_path, text):
    (tmp_path / "evaluation.json").write_text(text)
    assert state_of(tmp_path) == "waiting"


def test_half_an_evaluation_is_none(lab):
    """A run that was killed while it wrote it is evaluated again."""
    lab.make_suite("Good-v0")
    assert lab.run_task(GOOD)[0] == 0
    (lab.out / "runs" / GOOD / "evaluation.json").write_text('{"returns": [1')
    assert state(lab, GOOD) == "begun"
    assert lab.run_task(GOOD)[0] == 0 and state(lab, GOOD) == "finished"
