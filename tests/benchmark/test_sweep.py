"""Whole sweeps of a fast fake script, one of a real one, and the loop that schedules them."""

import errno
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from processes import leaves

from benchmark import engines, sweep
from benchmark.store import hold, is_held, write_json
from benchmark.suite import read_suite
from benchmark.sweep import Sweep, check_old_runs, read_flags, take_folder

ONE = "Good-v0__fake__1"
NO_LOCKS = """
import errno, fcntl
def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock"""


class Engine:
    """What a Sweep sees of a backend: the names that it was given, until a test takes them back."""

    stops_are_final = False
    several_nodes = False

    def __init__(self):
        self.given = set()
        self.calls = []
        self.places = 1
        self.broken = None  # an error of start()

    def room(self):
        return self.places - len(self.given)

    def start(self, names):
        self.calls.append(list(names))
        if self.broken:
            raise self.broken
        self.given |= set(names)

    def running(self):
        return set(self.given)

    def stop(self):
        return "stopped"


@pytest.fixture
def watched(lab):
    """A Sweep of two runs, on an engine that does nothing."""
    suite = read_suite(lab.make_suite("Good-v0", seeds=2))
    name = lab.make_folder("Good-v0")
    plan = lab.store.plan()
    runs = sweep.records_of(suite)
    lab.store.write_plan(plan | {"runs": runs})
    assert name in runs
    return Sweep(lab.store, runs, Engine())


def note(watched, name, **changes):
    """Writes a run's state, as its worker does."""
    watched.store.write_job(name, watched.store.job(name) | changes)


def finish(watched, name):
    watched.store.run_dir(name).mkdir(exist_ok=True)
    write_json(watched.store.run_dir(name) / "evaluation.json", {"returns": [1.0]})


def run_on_terminal(lab, *flags, patch=""):
    """What a sweep draws on a terminal, and its exit code."""
    ours, its = pty.openpty()
    code = f"import sys, time\nfrom benchmark import sweep\nsweep.POLL_S = 0.05\n{patch}"
    words = [sys.executable, "-c", f"{code}\nsweep.main()", lab.suite, "--dir", lab.out, *flags]
    env = os.environ | {"COLUMNS": "200", "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(words, cwd=lab.root, stdout=its, stderr=its, env=env)
    lab.processes.append(process)
    os.close(its)
    said = b""
    try:
        while data := os.read(ours, 65536):
            said += data
    except OSError:  # the terminal's other side is closed
        pass
    os.close(ours)
    return process.wait(60), said.decode()


def test_a_sweep_runs_a_suite(lab):
    """What crashes is resumed, what never works is named, and the good ones are not held up."""
    lab.make_suite("Crash-v0", "Never-v0", "BadInput-v0", "Good-v0")
    code, said = lab.run_sweep("--retries", "2")
    assert code == 1
    jobs = {name.split("-")[0]: job for name, job in lab.jobs().items()}
    assert {name: (job["state"], job["failures"]) for name, job in jobs.items()} == {
        "Crash": ("finished", 1),
        "Never": ("failed", 3),
        "BadInput": ("failed", 1),
        "Good": ("finished", 0),
    }
    assert [lab.mean(f"{name}-v0__fake__1") for name in ("Good", "Never")] == [1.5, None]
    lab.assert_done_once("Crash-v0__fake__1", ONE)
    table = said[said.rindex("0 running") :]
    assert "0 waiting, 2 failed, 2 finished" in table
    assert "RuntimeError: [broken] at 0 (exit code 1)" in table
    assert f"curves and tables: python -m benchmark.report {lab.out}" in table
    assert lab.store.log_file("Never-v0__fake__1").read_text().count("Traceback") == 3
    code, said = lab.run_sweep("--retries", "0")
    assert code == 1 and "2 waiting, 0 failed, 2 finished" in said.splitlines()[0]
    assert (lab.starts("Never-v0__fake__1"), lab.starts(ONE)) == (4, 1)


def test_the_plan_has_all_facts_of_a_run(lab):
    suite = lab.write_suite(
        'env_ids = ["Good-v0"]\nseeds = [7]\nvariants = { slow = { fast = false } }'
    )
    assert lab.run_sweep("--retries", "3", "--stall-minutes", "2.5")[0] == 0
    (run,) = read_suite(suite)
    plan = json.loads(lab.store.plan_file.read_text())
    assert plan.pop("session")
    assert plan == {
        "retries": 3,
        "stall_minutes": 2.5,
        "needs_locks": False,
        "scripts": {str(lab.script): {"defaults": run.defaults}},
        "runs": {
            "Good-v0__fake__slow__7": {
                "script": str(lab.script),
                "env_id": "Good-v0",
                "seed": 7,
                "variant": "slow",
                "args": run.args,
                "words": list(run.words),
            }
        },
    }
    assert run.args["fast"] is False and run.defaults["fast"] is True


def test_each_start_is_another_session(lab):
    lab.make_suite("Good-v0")
    sessions = set()
    for _ in range(2):
        assert lab.run_sweep()[0] == 0
        sessions.add(lab.store.plan()["session"])
    assert len(sessions) == 2


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_stopped_goes_on(lab, signum):
    """Its runs end with it, none is done twice, and only then the folder is free again."""
    lab.make_suite("Good-v0", "Gate-v0", seeds=2)
    good = [f"Good-v0__fake__{seed}" for seed in (1, 2)]
    gates = [f"Gate-v0__fake__{seed}" for seed in (1, 2)]
    first = lab.start_sweep("--workers", "2")
    lab.at_gate(*gates)
    first.send_signal(signum)
    code, said = lab.finish(first)
    if signum == signal.SIGKILL:
        assert code == -9
    else:
        assert code == 128 + signum and "the same command goes on" in said
        assert {lab.job(name)["state"] for name in gates} == {"waiting"}
    locks = [lab.store.sweep_lock, *(lab.store.job_lock(name) for name in gates)]
    lab.wait_for(lambda: not any(is_held(lock) for lock in locks))
    code, said = lab.run_sweep("--workers", "2")
    assert code == 0 and "0 running, 2 waiting, 0 failed, 2 finished" in said.splitlines()[0]
    lab.assert_done_once(*good, *gates)
    assert [lab.starts(name) for name in (*good, *gates)] == [1, 1, 2, 2]
    assert [lab.mean(name) for name in good] == [1.5, 2.5]
    assert {job["failures"] for job in lab.jobs().values()} == {0}


def test_a_run_whose_evaluation_is_damaged_is_evaluated_again(lab):
    lab.make_suite("Good-v0", seeds=2)
    assert lab.run_sweep()[0] == 0
    (lab.store.run_dir(ONE) / "evaluation.json").write_text("")
    code, said = lab.run_sweep()
    assert code == 0 and "1 waiting, 0 failed, 1 finished" in said.splitlines()[0]
    names = [ONE, "Good-v0__fake__2"]
    assert [lab.mean(name) for name in names] == [1.5, 2.5]
    assert [lab.starts(name) for name in names] == [2, 1]


def test_a_removed_run_is_run_again(lab):
    lab.make_suite("Good-v0")
    for _ in range(2):
        assert lab.run_sweep()[0] == 0
        assert lab.steps(ONE) == [1, 2, 3, 4, 5, 6]
        shutil.rmtree(lab.store.run_dir(ONE))
    assert lab.job(ONE)["state"] == "waiting"


def test_a_sweep_ends_after_its_workers(watched, monkeypatch):
    """What they write last is told, and another sweep may follow at once."""
    monkeypatch.setattr(sweep, "POLL_S", 0)
    one, other = watched.runs
    watched.engine.places = 2
    watched.poll()
    finish(watched, one)
    finish(watched, other)
    looks = []

    def show():
        looks.append(watched.unfinished())
        if looks.count([]) == 3:
            watched.engine.given.clear()

    monkeypatch.setattr(watched, "show", show)
    watched.watch()
    assert looks == [[]] * 4 and not watched.given


def test_two_sweeps_on_one_folder_do_not_fight(lab):
    lab.make_suite("Gate-v0")
    first = lab.start_sweep()
    lab.at_gate("Gate-v0__fake__1")
    sentence = lab.refused(lab.start_sweep())
    assert f"held by another sweep, process {first.pid} on" in sentence and "--dir" in sentence
    lab.go()
    assert lab.finish(first)[0] == 0


def test_runs_have_their_own_cores(lab):
    """Two at a time. One that is wide has the threads for it."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    names = ["Gate-v0__fake__1", "Gate-v0__fake__2"]
    lab.make_suite("Gate-v0", seeds=2)
    process = lab.start_sweep("--workers", "2")
    lab.at_gate(*names)
    starts = [lab.text(name, "starts.txt").rsplit(maxsplit=2)[:2] for name in names]
    assert sorted(starts) == sorted([f"[{core}]", "1"] for core in cores[:2])
    lab.go()
    assert lab.finish(process)[0] == 0
    lab.make_suite("Good-v0")
    assert lab.run_sweep("--cpus-per-run", "2", "--workers", "1")[0] == 0
    assert lab.text(ONE, "starts.txt").rsplit(maxsplit=2)[:2] == [str(cores[:2]), "2"]


@pytest.mark.parametrize("flag, value", [("resume", "runs/x"), ("num_threads", 7)])
def test_flags_of_an_attempt_may_differ(lab, flag, value):
    """A run that was resumed once more says so in its config.json."""
    name = lab.make_folder("Good-v0")
    suite = read_suite(lab.suite)
    assert suite[0].args[flag] != value
    lab.store.run_dir(name).mkdir()
    config = {"args": suite[0].args | {flag: value}}
    write_json(lab.store.run_dir(name) / "config.json", config)
    check_old_runs(lab.store, suite)


def test_other_flags_are_no_reason_to_mix_runs(lab):
    lab.write_suite('env_ids = ["Good-v0"]\nseeds = 1\nflags = { total_timesteps = 1 }')
    assert lab.run_sweep()[0] == 0
    check_old_runs(lab.store, read_suite(lab.suite))
    lab.suite.write_text(lab.suite.read_text().replace("= 1 }", "= 2 }"))
    assert "was made with another total_timesteps" in lab.refused(lab.start_sweep())


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--workers", "1000"], "don't fit on"),
        (["--workers", "0"], "--workers must be above 0"),
        (["--cpus-per-run", "0"], "must be above 0"),
        (["--gpus-per-run", "1.5"], "whole number, or below 1"),
        (["--stall-minutes", "0"], "--stall-minutes must be above 0"),
        (["--stall-minutes", "nan"], "--stall-minutes must be above 0"),
        (["--retries", "-1"], "--retries 0 or above"),
        (["--dir", ""], "--dir must name a folder"),
        (["--dir", "/proc/x"], "can't be the folder of a sweep"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(lab, monkeypatch, capsys, flags, sentence):
    lab.make_suite("Good-v0")
    words = ["sweep", str(lab.suite), "--dir", str(lab.out), *flags]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="2"):
        sweep.main()
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_suite_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep", "no_such_suite"])
    with pytest.raises(SystemExit, match="2"):
        sweep.main()
    said = capsys.readouterr().err
    assert "no suite no_such_suite; known are ddpg_lstm, " in said and "smoke" in said


@pytest.mark.parametrize("backend", engines.ENGINES)
def test_a_backend_has_flags_of_its_own(backend, capsys):
    """They are in its --help, and no other backend takes them."""
    backend_flags, engine_class = engines.load(backend)
    flags, found, own = read_flags(["smoke", "--backend", backend, "--workers", "3"])
    assert (flags.suite, flags.backend, found) == ("smoke", backend, engine_class)
    assert own == backend_flags(workers=3)
    with pytest.raises(SystemExit) as stop:
        read_flags(["--help", f"--backend={backend}"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    for flag, backends in {
        "--dry-run": engines.ENGINES,
        "--image": ["docker"],
        "--partition": ["slurm"],
        "--ray-address": ["ray"],
    }.items():
        assert (flag in said) == (backend in backends)


@pytest.mark.parametrize(
    "words",
    [["smoke", "--backend", "cloud"], ["smoke", "--backend"], ["smoke", "--image", "x"], []],
)
def test_flags_that_are_none_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        read_flags(words)
    assert stop.value.code == 2 and capsys.readouterr().err


def test_a_dry_run_starts_nothing(lab):
    lab.make_suite("Good-v0", seeds=2)
    code, said = lab.run_sweep("--dry-run")
    assert code == 0 and not lab.out.exists()
    lines = said.splitlines()
    words = "--env-id Good-v0 --seed 2 --run-name Good-v0__fake__2"
    assert lines[1] == f"waiting {sys.executable} {lab.script} {words}"
    core = min(os.sched_getaffinity(0))
    words = f"-m benchmark.worker {lab.out} {ONE} --threads 1 --cores {core}"
    assert lines[3] == f"{sys.executable} {words}"


def test_the_folder_is_named_after_the_suite(lab, monkeypatch, capsys):
    monkeypatch.chdir(lab.folder)
    lab.make_suite("Good-v0")
    monkeypatch.setattr(sys, "argv", ["sweep", str(lab.suite), "--dry-run"])
    with pytest.raises(SystemExit, match="0"):
        sweep.main()
    assert f"benchmark.worker {lab.folder}/sweeps/suite Good-v0" in capsys.readouterr().out


def test_an_error_in_the_middle_is_not_blamed_on_the_folder(lab, monkeypatch):
    def run(_):
        raise OSError("away")

    lab.make_suite("Good-v0")
    monkeypatch.setattr(sys, "argv", ["sweep", str(lab.suite), "--dir", str(lab.out)])
    monkeypatch.setattr(Sweep, "run", run)
    with pytest.raises(OSError, match="away"):
        sweep.main()


def test_another_backend_names_the_slurm_jobs_of_its_folder(lab):
    lab.make_suite("Good-v0")
    lab.out.mkdir()
    (lab.out / "slurm.json").write_text('{"17": ["one"], "18": []}')
    code, said = lab.run_sweep()
    assert code == 0 and "`scancel 17 18` removes those that wait" in said


@pytest.mark.parametrize(
    "words, reason",
    [("echo no worker; exit 3", "no worker"), ("exit 3", "its worker said nothing")],
)
def test_workers_that_do_not_come_up_end_the_sweep(lab, words, reason):
    """That is not the runs' failure; the others save."""
    lab.make_suite("Gate-v0", "Good-v0")
    patch = f"""from benchmark.engines.local import Local
sweep.PAUSE_S = 0.1
command = Local.command
Local.command = lambda self, name, *rest: (
    ['sh', '-c', {words!r}] if name.startswith('Good') else command(self, name, *rest))"""
    code, said = lab.run_sweep("--retries", "2", "--workers", "2", patch=patch)
    sentence = f"the last 5 workers didn't come up, {ONE}'s with: {reason}: fix that"
    assert code == 2 and sentence in said
    states = [(job["state"], job["failures"]) for job in lab.jobs().values()]
    assert states == [("waiting", 0), ("waiting", 0)]


def test_a_killed_worker_is_replaced(lab):
    """The next one counts what became of the run: it got further, so that is no failure."""
    lab.make_suite("Gate-v0")
    name = "Gate-v0__fake__1"
    process = lab.start_sweep("--retries", "0")
    lab.at_gate(name)
    lab.kill_9(name)
    code, said = lab.finish(process)
    assert code == 0 and f"to be resumed: {name}\n" in said
    lab.assert_done_once(name)
    assert lab.job(name)["failures"] == 0


def test_a_run_is_started_when_there_is_room_for_it(watched, capsys):
    one, other = watched.runs
    watched.poll()
    watched.poll()
    assert watched.engine.calls == [[one]]
    finish(watched, one)
    watched.engine.given.clear()
    watched.poll()
    assert watched.engine.calls == [[one], [other]] and watched.unfinished() == [other]
    assert capsys.readouterr().out == f"finished: {one}\n"


def test_a_run_that_a_killed_sweep_has_left_ends_first(watched):
    one, other = watched.runs
    with hold(watched.store.job_lock(one)):
        watched.poll()
        assert watched.engine.calls == [[other]]
    watched.engine.places = 2
    watched.poll()
    assert watched.engine.calls == [[other], [one]]


def test_a_worker_that_finds_its_run_held_is_neither_a_miss_nor_a_stop(watched):
    one, other = watched.runs
    watched.engine.stops_are_final = True
    watched.poll()
    watched.engine.given.clear()
    with hold(watched.store.job_lock(one)):
        watched.poll()
    assert not watched.cancelled and watched.misses == 0
    assert watched.engine.calls == [[one], [other]]


def test_a_sweep_writes_no_states(watched):
    """That is for the workers, whatever becomes of them."""
    one, _ = watched.runs
    watched.poll()
    note(watched, one, state="running", started=5.0, place="gone")
    before = watched.store.job_file(one).read_bytes()
    watched.engine.given.clear()
    watched.poll()
    assert watched.engine.calls == [[one], [one]]
    assert watched.store.job_file(one).read_bytes() == before
    assert len(list((watched.store.folder / "jobs").glob("*.json"))) == 1


@pytest.mark.parametrize("started, size", [(5.0, 0), (0.0, 0)])
def test_a_stop_is_final_where_the_engine_says_so(watched, started, size):
    """Of a run that ran, and of one that was still in the queue."""
    one, other = watched.runs
    watched.engine.stops_are_final = True
    watched.poll()
    note(watched, one, state="waiting", started=started)
    watched.engine.given.clear()
    watched.poll()
    assert watched.cancelled == {one} and watched.engine.calls == [[one], [other]]
    assert watched.unfinished() == [other] and watched.misses == 0


def test_a_worker_that_did_not_come_up_is_no_stop(watched, monkeypatch):
    """Its log says why. After a pause it is started again, until there were too many."""
    one, _ = watched.runs
    watched.engine.stops_are_final = True
    monkeypatch.setattr(sweep, "PAUSE_S", 0)
    for i in range(1, sweep.MISSES + 1):
        watched.poll()
        with open(watched.store.log_file(one), "a") as log:
            print("no such file", file=log)
        watched.engine.given.clear()
        assert len(watched.engine.calls) == i
    with pytest.raises(engines.EngineError, match="didn't come up, .*'s with: no such file: fix"):
        watched.poll()
    assert not watched.cancelled


def test_the_last_table_has_no_run_as_running_whose_worker_is_gone(watched, monkeypatch, capsys):
    one, other = watched.runs
    for name in watched.runs:
        note(watched, name, state="running", started=5.0)
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    watched.stopping = signal.SIGTERM
    with hold(watched.store.job_lock(other)):
        assert watched.run() == 143
    assert "1 running, 1 waiting, 0 failed, 0 finished" in capsys.readouterr().out
    assert watched.jobs[one]["state"] == "waiting"


def test_after_a_miss_there_is_a_pause(watched):
    watched.poll()
    watched.engine.given.clear()
    watched.poll()
    assert len(watched.engine.calls) == 1 and watched.misses == 1
    watched.pause_end = 0.0
    watched.poll()
    assert len(watched.engine.calls) == 2


def test_a_worker_that_came_up_ends_a_row_of_misses(watched):
    one, _ = watched.runs
    watched.misses = sweep.MISSES - 1
    watched.poll()
    note(watched, one, state="waiting", started=5.0)
    watched.engine.given.clear()
    watched.poll()
    assert watched.misses == 0


def test_a_start_that_fails_halfway_is_watched_as_far_as_it_came(watched):
    one, other = watched.runs
    watched.engine.places = 3
    watched.engine.broken = OSError("disk full")
    watched.engine.given = {one}
    with pytest.raises(OSError, match="disk full"):
        watched.poll()
    assert set(watched.given) == {one}
    watched.engine.broken = None
    watched.poll()
    assert set(watched.given) == {one, other}


def test_workers_of_an_earlier_sweep_are_watched(watched):
    """One that ran and is lost has come up, so that this is neither a miss nor a stop."""
    one, other = watched.runs
    watched.engine.stops_are_final = True
    watched.engine.given = {one, other, "of another suite"}
    note(watched, one, state="running", started=5.0, place="there")
    watched.store.write_plan(watched.store.plan() | {"session": "next"})
    with hold(watched.store.job_lock(one)):
        again = Sweep(watched.store, watched.runs, watched.engine)
        again.adopt()
    assert set(again.given) == {one, other}
    watched.engine.given = {other}
    again.poll()
    assert not again.cancelled and again.misses == 0 and watched.engine.calls == []
    watched.engine.given.clear()
    again.poll()
    assert again.cancelled == {other} and watched.engine.calls == [[one]]


def test_an_error_that_lasts_is_told_once(watched, capsys, monkeypatch):
    for error in ("stale", "stale", "full", "stale"):
        watched.screen.warn(OSError(error))
    assert capsys.readouterr().out == "stale: trying again\nfull: trying again\n"
    monkeypatch.setattr(sweep, "REPEAT_S", -1)
    watched.screen.warn(OSError("stale"))
    assert capsys.readouterr().out == "stale: trying again\n"


def test_a_network_folder_that_is_away_for_a_moment_does_not_end_the_sweep(watched, monkeypatch):
    """Neither while it is looked after nor while it is shown."""
    errors = [OSError("stale"), OSError("away")]
    poll = watched.poll

    def poll_badly():
        if errors:
            raise errors.pop()
        for name in watched.runs:
            finish(watched, name)
            watched.jobs[name] = watched.store.job(name)
        poll()

    def make_rows(*_):
        raise OSError("far")

    monkeypatch.setattr(sweep, "POLL_S", 0)
    monkeypatch.setattr(sweep, "make_rows", make_rows)
    monkeypatch.setattr(watched, "poll", poll_badly)
    watched.watch()
    assert set(watched.screen.told) == {f"{x}: trying again" for x in ("stale", "away", "far")}


def test_an_error_is_seen_on_a_terminal(lab):
    """Above the table, and not at each look."""
    lab.make_suite("Good-v0")
    patch = """from benchmark.engines.local import Local
start, left = Local.start, [1] * 10
def start_badly(self, names):
    if left:
        left.pop()
        raise OSError("the [queue] is full")
    start(self, names)
Local.start = start_badly"""
    code, said = run_on_terminal(lab, patch=patch)
    assert code == 0 and said.count("the [queue] is full: trying again") == 1
    assert f"finished: {ONE}" not in said and "1 finished" in said


def test_an_error_of_an_engine_ends_the_table_and_the_sweep(lab):
    lab.make_suite("Gate-v0")
    patch = """from benchmark.engines.local import Local
running = Local.running
def run_badly(self):
    from pathlib import Path
    names = running(self)
    if names and next(iter(self.store.folder.glob("runs/*/steps.txt")), None):
        Local.running = running
        raise sweep.EngineError("the daemon is gone")
    return names
Local.running = run_badly"""
    code, said = run_on_terminal(lab, patch=patch)
    assert code == 2 and said.rstrip().endswith("error: the daemon is gone")
    assert lab.job("Gate-v0__fake__1")["state"] == "waiting"


def test_without_locks_local_runs_go_on(lab):
    """One line says so."""
    lab.make_suite("Good-v0")
    code, said = lab.run_sweep(patch=NO_LOCKS)
    assert code == 0 and said.count("has no locks (No locks available): see to it") == 1
    lab.assert_done_once(ONE)


def test_without_locks_several_nodes_are_refused_unless_told(lab, monkeypatch, capsys):
    lab.make_folder("Good-v0")

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(SystemExit, match="2"):
        take_folder(lab.store, needs_locks=True)
    said = capsys.readouterr().err
    assert "two nodes could have one run at once" in said and "--without-locks" in said
    assert take_folder(lab.store, needs_locks=False) is None


@pytest.mark.parametrize("flags, needs_locks", [([], True), (["--without-locks"], False)])
def test_runs_of_several_nodes_need_locks(lab, flags, needs_locks):
    lab.make_suite("Good-v0")
    patch = "from benchmark.engines.local import Local\nLocal.several_nodes = True"
    assert lab.run_sweep(*flags, patch=patch)[0] == 0
    assert lab.store.plan()["needs_locks"] == needs_locks


def test_a_killed_sweep_of_a_real_script_ends_with_the_same_bits(lab):
    lab.suite.write_text(
        """[[runs]]
script = "ppo_continuous_action"
env_ids = ["Pendulum-v1"]
seeds = 1
[runs.flags]
total_timesteps = 2048
num_steps = 128
num_minibatches = 4
compile = false
checkpoint_interval = 1
eval_episodes = 1
"""
    )
    (planned,) = read_suite(lab.suite)
    name = planned.name
    killed = lab.start_sweep()
    (lab.folder / "whole").mkdir()
    whole = subprocess.Popen(
        [sys.executable, planned.script, *planned.words], cwd=lab.folder / "whole"
    )

    def checkpoint(folder):
        path = lab.folder / folder / "runs" / name / "checkpoint.pt"
        return leaves(torch.load(path, weights_only=True))

    def iteration(folder):
        (found,) = (x for key, x in checkpoint(folder).items() if key.endswith("/iteration"))
        return found

    lab.wait_for(lambda: iteration("out") > 3)
    killed.kill()
    killed.wait()
    assert iteration("out") < 16
    lab.wait_for(lambda: not is_held(lab.store.sweep_lock))
    assert lab.run_sweep()[0] == 0
    assert whole.wait(60) == 0
    one = checkpoint("whole")
    other = checkpoint("out")
    differ = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    # Nothing but the time and how it was begun
    same = ("/args/", "/iteration", "/agent", "/optimizer", "/envs", "/random", "/recent_returns")
    assert all(any(part in key for key in one) for part in same), list(one)
    own = ("/wall_seconds", "/args/resume")
    assert all(any(part in key for part in own) for key in differ), differ
    run_dirs = [lab.folder / folder / "runs" / name for folder in ("whole", "out")]
    assert len({(path / "evaluation.json").read_text() for path in run_dirs}) == 1
