import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest

from benchmark import store as module
from benchmark.store import (
    LONGEST_NAME,
    RECENT,
    TAIL_BYTES,
    NoLocks,
    Store,
    StoreError,
    hold,
    is_held,
    last_line,
    planned_steps,
    read_evaluation,
    read_json,
    read_progress,
    tail,
    write_json,
)

LONG = "€" * (LONGEST_NAME // 3) + "é"  # of two and three bytes a letter
RECORD = {"script": "/a.py", "env_id": "A", "seed": 1, "variant": "", "args": {}, "words": []}
HEADER = "global_step,wall_seconds,env,return,length,ended_by\n"


def make_plan(*names, session="now", **changes):
    plan = {"session": session, "retries": 1, "stall_minutes": 30.0, "needs_locks": False}
    plan |= {"scripts": {"/a.py": {"defaults": {"x": 1}}}, "runs": {}}
    return plan | {"runs": dict.fromkeys(names, RECORD)} | changes


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.make_folders()
    store.write_plan(make_plan("a"))
    return store


def break_locks(monkeypatch, number):
    """Lets each lock end with this errno."""

    def flock(*_):
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks."""
    break_locks(monkeypatch, errno.ENOLCK)


def finish(store, name, text='{"returns": [1.0]}'):
    store.run_dir(name).mkdir()
    (store.run_dir(name) / "evaluation.json").write_text(text)


def test_a_plan_is_read_as_it_was_written(store):
    plan = make_plan("a", "b")
    store.write_plan(plan)
    assert Store(store.folder).plan() == plan
    assert store.troubles == []


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", ".", "..", "/etc", "a\0b", "a\nb", "\ud800", "x" * 201, f"{LONG}e"]
)
def test_a_foreign_plan_cannot_name_other_folders(store, name):
    """Nor does a name that no file can have stop its readers."""
    write_json(store.plan_file, make_plan("a", name))
    assert set(store.plan()["runs"]) == {"a"}
    (trouble,) = store.troubles
    assert repr(name) in trouble and "can't be a run" in trouble


@pytest.mark.parametrize(
    "record", [3, {}, RECORD | {"args": None}, RECORD | {"words": [1]}, RECORD | {"seed": "1"}]
)
def test_a_damaged_record_is_left_out_and_named(store, record):
    write_json(store.plan_file, make_plan("a") | {"runs": {"a": RECORD, "b": record}})
    assert set(store.plan()["runs"]) == {"a"}
    assert store.troubles == [f"{store.plan_file} has no valid record of the run b"]


def test_damaged_defaults_are_left_out(store):
    scripts = {"/a.py": {"defaults": {}}, "/b.py": 3, "/c.py": {"defaults": []}}
    write_json(store.plan_file, make_plan("a", scripts=scripts))
    assert store.plan()["scripts"] == {"/a.py": {"defaults": {}}}


def test_a_folder_without_a_plan(tmp_path):
    with pytest.raises(StoreError, match="is no folder of a sweep: it has no sweep.json"):
        Store(tmp_path).plan()


@pytest.mark.parametrize(
    "content, keys",
    [
        ("{", "session, retries, stall_minutes, needs_locks, scripts, runs"),
        ("[]", "session, retries"),
        (json.dumps(make_plan("a", runs=[])), "runs"),
        (json.dumps(make_plan("a", retries=None)), "retries"),
        (json.dumps(make_plan("a", session=3)), "session"),
    ],
)
def test_a_damaged_plan(store, content, keys):
    store.plan_file.write_text(content)
    with pytest.raises(StoreError, match=f"sweep.json has no valid {keys}"):
        store.plan()
    assert store.job("a")["state"] == "waiting"


def test_a_run_with_the_longest_name(store):
    """All files beside its folder fit into the 255 bytes of a name, and while they are written."""
    assert len(LONG.encode()) == LONGEST_NAME
    store.write_plan(make_plan(LONG))
    assert list(store.plan()["runs"]) == [LONG]
    store.write_job(LONG, store.job(LONG) | {"state": "failed"})
    assert store.job(LONG)["state"] == "failed"
    store.log_file(LONG).write_text("said")
    assert last_line(store.log_file(LONG)) == "said"
    with hold(store.job_lock(LONG)):
        assert is_held(store.job_lock(LONG))
    finish(store, LONG)
    assert store.job(LONG)["state"] == "finished"


def test_a_file_is_whole_at_any_time(store, monkeypatch):
    """What a full disk cuts off never gets the file's name."""
    write_json(store.job_file("a"), {"old": 1})

    class Full:
        def dumps(self, *_, **__):
            return "\ud800"  # can't be encoded: the write fails in its middle

    monkeypatch.setattr(module, "json", Full())
    with pytest.raises(UnicodeEncodeError):
        write_json(store.job_file("a"), {"new": 1})
    monkeypatch.undo()
    assert read_json(store.job_file("a")) == {"old": 1}


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_file_says_nothing(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert read_json(tmp_path / "file") == {}


def test_a_state_is_read_as_it_was_written(store):
    job = {"state": "failed", "failures": 2, "error": "no", "started": 1.5, "place": "x", "step": 3}
    store.write_job("a", job)
    assert store.job("a") == job | {"session": "now"}


def test_what_nobody_has_written_waits(store):
    expected = {"state": "waiting", "failures": 0, "error": "", "started": 0.0, "place": ""}
    assert store.job("a") == expected | {"step": 0, "session": ""}


def test_a_damaged_state_is_one_that_says_nothing(store):
    store.job_file("a").write_text('{"state": "asleep", "failures": "x", "error": 3, "step": 7}')
    job = store.job("a")
    assert (job["state"], job["failures"], job["error"]) == ("waiting", 0, "")


@pytest.mark.parametrize("state", ["waiting", "failed"])
def test_what_failed_in_an_earlier_session_is_tried_anew(store, state):
    """Nobody has to write that. How far the run came is kept."""
    store.write_job("a", {"state": state, "failures": 2, "error": "no", "step": 5})
    store.write_plan(make_plan("a", session="next"))
    for reader in (store, Store(store.folder)):
        job = reader.job("a")
        assert (job["state"], job["failures"], job["error"]) == ("waiting", 0, "")
        assert job["step"] == 5


def test_what_runs_since_an_earlier_session_still_does_if_its_worker_lives(store):
    store.write_job("a", {"state": "running", "failures": 1, "place": "there"})
    store.write_plan(make_plan("a", session="next"))
    assert store.job("a")["state"] == "waiting"
    with hold(store.job_lock("a")):
        assert store.job("a")["state"] == "running"
        assert store.job("a")["failures"] == 1
    assert store.job("a")["failures"] == 0


def test_a_worker_that_outlives_its_sweep_writes_into_the_next_session(store):
    """So that what fails then has failed for that one."""
    worker = Store(store.folder)
    assert worker.plan()["session"] == "now"
    store.write_plan(make_plan("a", session="next"))
    worker.write_job("a", {"state": "failed", "failures": 2})
    assert store.job("a")["state"] == "failed"


def test_without_locks_a_state_is_believed(store, no_locks):
    store.job_lock("a").touch()
    store.write_job("a", {"state": "running"})
    store.write_plan(make_plan("a", session="next"))
    assert store.job("a")["state"] == "running"


@pytest.mark.parametrize(
    "content", ["", '{"returns": [1.0', "[]", "{}", '{"returns": 3}', '{"returns": ["1"]}', "["]
)
def test_an_evaluation_that_cannot_be_read_is_no_end(store, content):
    store.write_job("a", {"state": "finished"})
    finish(store, "a", content)
    returns, damage = read_evaluation(store.run_dir("a"))
    assert returns is None and damage.startswith("evaluation.json can't be read (")
    assert store.job("a")["state"] == "waiting"
    (store.run_dir("a") / "evaluation.json").write_text('{"returns": [1, 2.5]}')
    assert read_evaluation(store.run_dir("a")) == ([1.0, 2.5], "")
    assert store.job("a")["state"] == "finished"


def test_a_run_is_finished_by_its_evaluation_whatever_its_state_says(store):
    """Of no episodes, too."""
    store.write_job("a", {"state": "failed", "error": "no"})
    finish(store, "a", '{"returns": []}')
    assert (store.job("a")["state"], store.job("a")["error"]) == ("finished", "")


def write_episodes(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "episodes.csv").write_text(text)


@pytest.mark.parametrize(
    "steps, expected",
    [
        (5, 5),
        (1e6, 1_000_000),
        (0.5, None),
        (2**53 + 1, None),
        (True, None),
        ("9", None),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (10**400, None),
    ],
)
def test_planned_steps_are_finite_numbers(steps, expected):
    found = planned_steps({"total_timesteps": steps})
    assert found == expected and type(found) is type(expected)
    assert planned_steps({}) is None


def test_an_error_that_cannot_be_printed_is_spelled_out(store):
    written = {"state": "failed", "error": "\ud800", "session": "now"}
    store.job_file("a").write_text(json.dumps(written))
    assert store.job("a")["error"] == "\\ud800"


def test_progress_is_in_the_last_episodes(tmp_path):
    write_episodes(tmp_path / "a", f"{HEADER}100,2.0,0,5.0,9,truncation\n300,4.0,1,8.0,9,x\n")
    assert read_progress(tmp_path / "a", 1000) == {
        "step": 300,
        "speed": 100.0,
        "eta_s": 7.0,
        "return": 6.5,
    }


def test_progress_takes_whole_floats_and_leaves_out_what_is_no_step(tmp_path):
    rows = f"100.0,2.0,0,5.0,9,x\n{'9' * 400},3.0,0,6.0,9,x\n7.5,3.0,0,6.0,9,x\n"
    write_episodes(tmp_path / "a", HEADER + rows)
    assert read_progress(tmp_path / "a", 1000)["step"] == 100


def test_progress_of_the_first_episode(tmp_path):
    """Its speed is that since the run began; without a number of steps nobody knows the end."""
    write_episodes(tmp_path, f"{HEADER}100,2.0,0,5.0,9,truncation\n")
    progress = read_progress(tmp_path)
    assert (progress["step"], progress["speed"], progress["eta_s"]) == (100, 50.0, None)


@pytest.mark.parametrize("text", [None, "", HEADER, f"{HEADER}10,1.0,0,3", f"{HEADER}10,1.0,0,3.5"])
def test_no_progress_before_the_first_episode(tmp_path, text):
    """A line that is still being written is none."""
    if text is not None:
        write_episodes(tmp_path, text)
    assert read_progress(tmp_path, 10) == {}


def test_damaged_rows_are_left_out_of_the_progress(tmp_path):
    rows = ["10,1.0,0,3.0,9,x", "x,1.0,0,4.0,9,x", "30,nan,0,4.0,9,x", "40", "", "20,2.0,0,5.0,9,x"]
    write_episodes(tmp_path, HEADER + "".join(f"{row}\n" for row in rows))
    progress = read_progress(tmp_path, 100)
    assert (progress["step"], progress["return"]) == (20, 4.0)


def test_progress_takes_the_last_hundred_episodes_of_a_long_file(tmp_path):
    rows = [f"{i},{i * 0.5},0,{float(i)},1,termination\n" for i in range(1, 100_001)]
    write_episodes(tmp_path, HEADER + "".join(rows))
    progress = read_progress(tmp_path, 200_000)
    assert (progress["step"], progress["speed"]) == (100_000, 2.0)
    assert progress["return"] == sum(range(99_901, 100_001)) / 100


def test_a_row_that_is_cut_off_by_the_tail_is_left_out(tmp_path):
    """Its first digits are missing, and what is left looks like a number, too."""
    width = 256
    assert TAIL_BYTES % width == 0 and TAIL_BYTES < RECENT * width
    rows = [f"{1000 + i},{i}.0,2.0,".ljust(width - 1, "x") + "\n" for i in range(100)]
    text = f"global_step,wall_seconds,return,pad\n{''.join(rows)}"
    write_episodes(tmp_path, f"{text[:-1]}x\n")  # the tail begins after a row's first digit
    assert read_progress(tmp_path)["speed"] == 1.0


def test_columns_of_a_custom_script_are_found_by_their_names(tmp_path):
    write_episodes(tmp_path, "return,global_step,lives,wall_seconds\n2.5,7,3,1.0\n")
    assert (read_progress(tmp_path)["step"], read_progress(tmp_path)["return"]) == (7, 2.5)


def test_the_last_line_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert (last_line(log), tail(log)) == ("", [])
    log.write_text(f"{'x' * 5000}\nfirst\n  Error: \x1b[1mno\n\n")
    assert last_line(log) == "Error: [1mno"
    assert tail(log, 4) == ["no", ""]
    log.write_text("docker: no daemon\n\nRun 'docker run --help' for more information\n")
    assert last_line(log) == "docker: no daemon"
    log.write_text("y" * 500)
    assert last_line(log) == "y" * 300


def test_a_runs_last_sign_of_life(store):
    """Its log, a new file in its folder, or what is written into one."""
    assert store.last_written("a") == 0.0
    store.log_file("a").touch()
    assert store.last_written("a") == store.log_file("a").stat().st_mtime
    write_episodes(store.run_dir("a"), HEADER)
    events = store.run_dir("a") / "events"
    subprocess.run(["touch", "-d", "2100-01-01", events], check=True)
    assert store.last_written("a") == events.stat().st_mtime > store.log_file("a").stat().st_mtime
    os.utime(store.run_dir("a"), (5e9, 5e9))  # later than 2100
    assert store.last_written("a") == 5e9


def test_a_lock_is_free_or_held(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path)
    lock = hold(path)
    assert is_held(path) and hold(path) is None
    lock.close()
    assert not is_held(path)


def test_a_lock_is_for_all_processes(tmp_path):
    code = "import sys; from benchmark.store import is_held; print(is_held(sys.argv[1]))"
    command = [sys.executable, "-c", code, tmp_path / "lock"]
    with hold(tmp_path / "lock"):
        assert subprocess.check_output(command, text=True) == "True\n"
    assert subprocess.check_output(command, text=True) == "False\n"


def test_no_locks_are_not_free_locks(tmp_path, no_locks):
    with pytest.raises(NoLocks, match=r"has no locks \(No locks available\)"):
        hold(tmp_path / "lock")
    with pytest.raises(NoLocks):
        is_held(tmp_path / "lock")


@pytest.mark.parametrize("name", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EINVAL"])
def test_file_systems_say_in_many_ways_that_they_have_no_locks(tmp_path, monkeypatch, name):
    break_locks(monkeypatch, getattr(errno, name))
    with pytest.raises(NoLocks):
        hold(tmp_path / "lock")


@pytest.mark.parametrize("looks, expected", [(2, True), (3, False)])
def test_who_only_looks_at_a_lock_keeps_nobody_from_it(tmp_path, monkeypatch, looks, expected):
    """is_held() has it for a moment."""
    answers = [BlockingIOError()] * looks
    monkeypatch.setattr(module, "LOCK_PAUSE_S", 0)

    def flock(*_):
        if answers:
            raise answers.pop()

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = hold(tmp_path / "lock")
    assert (lock is not None) == expected and not answers
    if lock:
        lock.close()


def test_a_folder_that_is_away_is_no_file_system_without_locks(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Stale"):
        hold(tmp_path / "lock")


def test_the_store_needs_nothing_but_the_standard_library():
    """Workers run wherever their scripts do."""
    code = (
        "import sys; before = set(sys.modules); import benchmark.worker; "
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} "
        "- set(sys.stdlib_module_names)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "['benchmark']\n"
