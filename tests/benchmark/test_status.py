import errno
import fcntl
import io
import json
import math
import os
import subprocess
import sys
import time

import pytest
from rich.console import Console

from benchmark import status
from benchmark.store import JOB, hold, write_json

HEADER = "global_step,wall_seconds,env,return,length,ended_by\n"


def write_episodes(lab, name, *rows):
    lab.store.run_dir(name).mkdir(exist_ok=True)
    text = HEADER + "".join(f"{row},1,termination\n" for row in rows)
    (lab.store.run_dir(name) / "episodes.csv").write_text(text)


def row_of(lab, **job):
    """The row of the folder's run, with the state that its worker has written."""
    ((name, record),) = lab.store.plan()["runs"].items()
    return status.make_row(lab.store, name, record, JOB | job)


def cells_of(row):
    return [list(column.cells)[0] for column in status.make_table([row], "title").columns]


def run_status(lab, *flags):
    code, said = lab.finish(lab.start("-m", "benchmark.status", lab.out, *flags))
    assert code == 0, said
    return said


def test_the_row_of_a_run_that_runs(lab):
    name = lab.make_folder("Good-v0")
    write_episodes(lab, name, "2,1.0,0,-8.0", "4,1.4,0,-7.0")
    lab.store.log_file(name).touch()
    row = row_of(lab, state="running", failures=2, place="node7, process 5", started=3.0)
    assert row.pop("speed") == pytest.approx(5.0) and row.pop("eta_s") == pytest.approx(0.4)
    assert row == {
        "name": name,
        "env_id": "Good-v0",
        "script": str(lab.script),
        "seed": 1,
        "variant": "",
        "state": "running",
        "failures": 2,
        "started": 3.0,
        "place": "node7, process 5",
        "step": 4,
        "steps": 6,
        "return": -7.5,
        "evaluation": None,
        "note": "attempt 3",
    }


def test_a_running_row_as_text(lab):
    lab.make_folder("Good-v0")
    row = row_of(lab, state="running") | {"step": 12_000, "steps": 2_000_000, "note": "[odd]"}
    row |= {"speed": 1234.56, "eta_s": 93_784.4, "return": -7.25}
    facts = ["running", "12,000/2,000,000", "1,234.6 steps/s", "1 day, 2:03:04", "-7.2"]
    assert cells_of(row)[1:] == [*facts, "\\[odd]"]
    name = row["name"]
    line = f"  {name}: 12,000/2,000,000, 1,234.6 steps/s, 1 day, 2:03:04 left, return -7.2"
    assert status.progress_lines([row, row | {"state": "waiting"}]) == [line]


def test_a_silent_run_is_named_with_its_place(lab):
    """So that its user can go and look."""
    name = lab.make_folder("Good-v0")
    lab.store.run_dir(name).mkdir()
    for path in (lab.store.log_file(name), lab.store.run_dir(name)):
        path.touch()
        os.utime(path, (0, 0))
    note = row_of(lab, state="running", place="node7, process 5")["note"]
    assert note.startswith("silent for ") and note.endswith(" min, node7, process 5")
    assert row_of(lab, state="running", started=time.time())["note"] == "no episode is logged yet"
    lab.store.log_file(name).touch()
    assert row_of(lab, state="running")["note"] == "no episode is logged yet"


def test_the_row_of_a_finished_run(lab):
    """It has done all its steps, though its last episode ended earlier."""
    name = lab.make_folder("Good-v0")
    write_episodes(lab, name, "4,1.0,0,-8.0")
    write_json(lab.store.run_dir(name) / "evaluation.json", {"returns": [1.0, 2.0]})
    row = row_of(lab, state="finished")
    assert (row["step"], row["evaluation"], row["return"]) == (6, 1.5, -8.0)
    assert cells_of(row)[1:] == ["finished", "6/6", "", "", "1.5", ""]


def test_a_finished_run_without_evaluation_episodes(lab):
    name = lab.make_folder("Good-v0")
    lab.store.run_dir(name).mkdir()
    write_json(lab.store.run_dir(name) / "evaluation.json", {"returns": []})
    assert cells_of(row_of(lab, state="finished"))[-2:] == ["", ""]


def test_an_evaluation_that_is_no_number_is_none(lab):
    """JSON has no NaN."""
    name = lab.make_folder("Good-v0")
    lab.store.run_dir(name).mkdir()
    write_json(lab.store.run_dir(name) / "evaluation.json", {"returns": [1.0, math.nan]})
    assert row_of(lab, state="finished")["evaluation"] is None


def test_a_damaged_evaluation_is_noted(lab):
    name = lab.make_folder("Good-v0")
    lab.store.run_dir(name).mkdir()
    (lab.store.run_dir(name) / "evaluation.json").write_text("[")
    assert row_of(lab)["note"].startswith("evaluation.json can't be read (JSONDecodeError: ")
    note = row_of(lab, error="an error")["note"]
    assert note.startswith("an error; evaluation.json can't be read (")
    assert row_of(lab, error=note)["note"] == note


def test_the_runs_that_run_come_first(lab):
    records = {}
    jobs = {}
    lab.make_folder("Good-v0")
    (record,) = lab.store.plan()["runs"].values()
    for state in ("finished", "failed", "waiting", "running"):
        records[state] = record
        jobs[state] = JOB | {"state": state}
    rows = status.make_rows(lab.store, records, jobs)
    assert [row["name"] for row in rows] == ["running", "waiting", "failed", "finished"]
    assert status.summary(row["state"] for row in rows) == (
        "1 running, 1 waiting, 1 failed, 1 finished"
    )
    assert len(status.make_rows(lab.store, records, jobs, most=3)) == 3


def test_a_long_name_is_whole_in_a_narrow_table(lab):
    lab.make_folder("Good-v0")
    row = row_of(lab) | {"name": "a" * 100}
    console = Console(width=80, file=io.StringIO())
    console.print(status.make_table([row], "title", left_out=3))
    text = console.file.getvalue()
    assert text.count("a" * 30) == 3 and "and 3 more" in text


def test_no_number_of_steps(lab):
    """A custom script may name its flag otherwise."""
    name = lab.make_folder("Good-v0")
    write_episodes(lab, name, "4,1.0,0,nan")
    (record,) = lab.store.plan()["runs"].values()
    record["args"] = {"steps": 6}
    row = status.make_row(lab.store, name, record, JOB | {"state": "running"})
    assert cells_of(row)[2:] == ["4", "4.0 steps/s", "", "", ""]
    (line,) = status.progress_lines([row])
    assert line == f"  {name}: 4, 4.0 steps/s, ? left, return -"


def test_a_number_of_steps_with_a_point_is_one(lab):
    name = lab.make_folder("Good-v0")
    write_episodes(lab, name, "4,1.0,0,1.0")
    (record,) = lab.store.plan()["runs"].values()
    record["args"] = {"total_timesteps": 1e3}
    row = status.make_row(lab.store, name, record, JOB | {"state": "running"})
    assert cells_of(row)[2:5] == ["4/1,000", "4.0 steps/s", "0:04:09"]


def test_status_of_a_sweep_that_runs(lab):
    """It doesn't disturb it; afterwards nobody looks after the folder."""
    lab.make_suite("Gate-v0", seeds=2)
    sweep = lab.start_sweep("--workers", "1")
    lab.at_gate("Gate-v0__fake__1")
    said = run_status(lab)
    assert "1 running, 1 waiting, 0 failed, 0 finished" in said
    assert f"looked after by process {sweep.pid} on " in said
    (row,) = (line for line in said.splitlines() if "Gate-v0__fake__1" in line)
    assert all(word in row for word in ("running", "2/6", "12.5 steps/s", "0:00:00", "-7.5"))
    lab.go()
    assert lab.finish(sweep)[0] == 0
    said = run_status(lab)
    assert "0 running, 0 waiting, 0 failed, 2 finished" in said and "1.5" in said and "2.5" in said
    assert "No sweep is running" not in said and "looked after by" not in said


def test_status_of_a_sweep_that_nobody_looks_after(lab):
    lab.make_folder("Good-v0")
    said = run_status(lab)
    assert "1 waiting" in said and "No sweep is running here; run the same command again" in said


def test_status_as_json(lab):
    """For other programs: numbers, and null for what is unknown or none."""
    name = lab.make_folder("Good-v0")
    write_episodes(lab, name, "4,1.0,0,nan")
    (row,) = json.loads(run_status(lab, "--json"))
    assert row == status.read_rows(lab.store)[0]
    assert (row["name"], row["step"], row["return"], row["eta_s"]) == (name, 4, None, None)


def test_status_of_a_folder_that_is_none(tmp_path):
    command = [sys.executable, "-m", "benchmark.status", tmp_path / "nothing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is no folder of a sweep" in done.stderr and done.stdout == ""


def test_status_names_what_it_leaves_out(lab, monkeypatch, capsys):
    lab.make_folder("Good-v0")
    plan = lab.store.plan()
    write_json(lab.store.plan_file, plan | {"runs": {"../x": 3, **plan["runs"]}})
    monkeypatch.setattr(sys, "argv", ["status", str(lab.out)])
    status.main()
    said = capsys.readouterr()
    assert "'../x', which can't be a run" in said.err and "1 waiting" in said.out


def test_where_there_are_no_locks_nobody_knows_who_looks_after_a_sweep(lab, monkeypatch):
    lab.make_folder("Good-v0")
    hold(lab.store.sweep_lock).close()
    assert status.who_looks_after(lab.store).startswith("No sweep is running here")

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert "so nobody can tell whether a sweep looks after it" in status.who_looks_after(lab.store)


def test_status_and_report_do_not_import_the_launcher():
    """Whatever they need of a sweep is in its folder."""
    code = "import sys; import benchmark.status; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    launcher = {"benchmark.sweep", "benchmark.engines", "benchmark.worker", "benchmark.suite"}
    assert "benchmark.status" in modules and not launcher & set(modules)
