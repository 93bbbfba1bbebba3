"""The jobs that sbatch gets, what becomes of their tasks, and a Slurm that is away.

With commands that do what Slurm's do, as far as the sweep sees it. What is Slurm's own behaviour is
tested with the real one, in real_engines.py.
"""

import json
import shlex

import pytest

from benchmark.engines import EngineError, slurm
from benchmark.engines.slurm import Slurm, SlurmFlags
from benchmark.store import Store


def directives_of(text):
    """{option: value} of the lines that sbatch reads: all before the first command."""
    lines = text[: text.index("\nruns=")].splitlines()
    assert all(line.startswith("#") or not line for line in lines)
    words = [shlex.split(line)[1:] for line in lines if line.startswith("#SBATCH ")]
    assert all(len(word) == 1 for word in words), words
    return dict(word.partition("=")[::2] for (word,) in words)


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, {"--array": "0-2", "--cpus-per-task": "1"}),
        ({"workers": 2}, {"--array": "0-2%2", "--cpus-per-task": "1"}),
        ({"cpus_per_run": 4}, {"--array": "0-2", "--cpus-per-task": "4"}),
        (
            {"gpus_per_run": 2.0, "memory_per_run": "8G"},
            {"--array": "0-2", "--cpus-per-task": "1", "--gres": "gpu:2", "--mem": "8G"},
        ),
        (
            {"partition": "p", "account": "a", "time": "1-0"},
            {
                "--array": "0-2",
                "--cpus-per-task": "1",
                "--partition": "p",
                "--account": "a",
                "--time": "1-0",
            },
        ),
        (
            {"backend_arg": ("--constraint=a100", "--exclusive", "--comment=two words")},
            {
                "--array": "0-2",
                "--cpus-per-task": "1",
                "--constraint": "a100",
                "--exclusive": "",
                "--comment": "two words",
            },
        ),
    ],
)
def test_flags_are_in_the_file_for_sbatch(tmp_path, flags, expected):
    text = Slurm(Store(tmp_path / "out"), {}, SlurmFlags(**flags)).preview(["a", "b", "c"])
    always = {
        "--job-name": "plainrl-out",
        "--ntasks": "1",
        "--requeue": "",
        "--signal": "B:USR1@120",
        "--open-mode": "append",
        "--output": f"{tmp_path}/out/logs/slurm-%A_%a.log",
    }
    assert directives_of(text) == always | expected


def test_a_percent_sign_in_the_folder_is_no_number_of_a_job(tmp_path):
    text = Slurm(Store(tmp_path / "50%j"), {}, SlurmFlags()).preview(["a"])
    assert directives_of(text)["--output"] == f"{tmp_path}/50%%j/logs/slurm-%A_%a.log"


def test_a_task_starts_the_worker_of_its_run(tmp_path):
    engine = Slurm(Store(tmp_path / "my, sweep"), {}, SlurmFlags(cpus_per_run=2))
    *_, runs, name, path, output, worker = engine.preview(["a", "b$HOME"]).splitlines()
    assert runs == "runs=(a 'b$HOME')" and name == "name=${runs[$SLURM_ARRAY_TASK_ID]}"
    assert path.startswith("export PYTHONPATH=")
    folder = f"'{tmp_path}/my, sweep'"
    assert output == f"exec >> '{engine.store.logs}'/\"$name\".log 2>&1"
    assert worker.endswith(f'python -m benchmark.worker {folder} "$name" --threads 2')


@pytest.mark.parametrize("limit", ["4", "0:01", "4:59", "0:04:59"])
def test_a_time_limit_that_only_requeues_is_refused(limit):
    """A job of two minutes would be told at its start that its end is near."""
    with pytest.raises(EngineError, match=f"--time {limit} is too short"):
        SlurmFlags(time=limit)


@pytest.mark.parametrize(
    "limit",
    ["5", "120", "5:00", "0:05:00", "0:30:00", "1-0", "1-00:02", "x", "²", "1:2:3:4", "0", "0:00"],
)
def test_a_longer_time_limit_is_left_to_sbatch(tmp_path, limit):
    """And one of 0, which is none."""
    text = Slurm(Store(tmp_path), {}, SlurmFlags(time=limit)).preview(["a"])
    assert directives_of(text)["--time"] == limit


def test_slurms_runs_do_not_share_gpus():
    with pytest.raises(EngineError, match="must be a whole number: Slurm's runs don't share GPUs"):
        SlurmFlags(gpus_per_run=0.5)


def test_slurm_without_its_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="there is no command sbatch"):
        Slurm(Store(tmp_path), {}, SlurmFlags()).open()


SBATCH = """
import sys
if (here / "refuse").exists():
    sys.exit("sbatch: error: Batch job submission failed: queue is full")
job = 100 + len(list(here.glob("*.sbatch")))
(here / f"{job}.sbatch").write_text(Path(sys.argv[-1]).read_text())
print(f"{job};main")
"""
SQUEUE = """
import sys, time
if (here / "hang").exists():
    time.sleep(60)
if (here / "down").exists():
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
print((here / "queue").read_text(), end="")
"""


@pytest.fixture
def cluster(commands, monkeypatch):
    """The folder of the commands: files queue (what squeue prints), refuse, down, hang."""
    monkeypatch.setattr(slurm, "ASK_S", -1)
    here = commands(sbatch=SBATCH, squeue=SQUEUE)
    (here / "queue").write_text("7 N/A\n8 0\n")  # the user's other jobs
    return here


@pytest.fixture
def engine(cluster, tmp_path):
    return Slurm(Store(tmp_path), {}, SlurmFlags(workers=2))


def test_tasks_are_those_that_squeue_has(cluster, engine):
    """An array's tasks are runs by their numbers; another sweep of the folder knows them, too."""
    assert engine.running() == set()
    engine.start(["a", "b", "c"])
    (cluster / "queue").write_text("7 N/A\n8 0\n100 2\n100 0\n")
    assert engine.running() == {"a", "c"}
    assert Slurm(engine.store, {}, SlurmFlags()).running() == {"a", "c"}
    assert "`scancel 100` stops them" in engine.stop()


@pytest.mark.parametrize(
    "line",
    ["", "slurm: a warning", "100", "100 0 x", "100 [0-3]", "100 N/A", "x 0", "100 ²", "100 1"],
)
def test_other_lines_of_squeue_are_no_tasks(cluster, engine, line):
    """Nor is one whose number its job doesn't have."""
    engine.jobs = {"100": ["a"], "101": ["b"]}
    (cluster / "queue").write_text(f"{line}\n101 0\n")
    assert engine.running() == {"b"}


@pytest.mark.parametrize("damaged", ["3", '"a"', "{}", "null", "[1]"])
def test_damaged_jobs_are_left_out(cluster, engine, damaged):
    engine.store.slurm_jobs.write_text(f'{{"55": {damaged}, "56": [], "57": ["a"]}}')
    (cluster / "queue").write_text("55 0\n56 0\n57 0\n")
    again = Slurm(engine.store, {}, SlurmFlags())
    assert again.jobs == {"56": [], "57": ["a"]} and again.running() == {"a"}


def test_what_was_submitted_counts_before_squeue_tells(cluster, engine, monkeypatch):
    monkeypatch.setattr(slurm, "ASK_S", 60)
    engine.running()
    engine.start(["a", "b"])
    assert engine.running() == {"a", "b"}


def test_squeue_is_not_asked_each_time(cluster, engine, monkeypatch):
    monkeypatch.setattr(slurm, "ASK_S", 60)
    engine.running()
    (cluster / "down").touch()
    assert engine.running() == set()


def test_an_array_waits_for_those_of_its_own_sweep_alone(cluster, engine, tmp_path):
    """Only one array would keep to --workers; another sweep of the same name is no obstacle."""
    engine.running()
    engine.start(["a"])
    (cluster / "queue").write_text("100 0\n")
    engine.running()
    engine.start(["b"])
    (cluster / "queue").write_text("101 0\n")
    engine.running()
    engine.start(["c"])
    scripts = [(cluster / f"{job}.sbatch").read_text() for job in (100, 101, 102)]
    waits = [directives_of(script).get("--dependency") for script in scripts]
    assert waits == [None, "afterany:100", "afterany:101"]
    other = Slurm(Store(tmp_path / "other" / tmp_path.name), {}, SlurmFlags(workers=2))
    other.running()
    assert "--dependency" not in directives_of(other.preview(["d"]))


def test_without_a_limit_no_array_waits(cluster, tmp_path):
    engine = Slurm(Store(tmp_path), {}, SlurmFlags())
    engine.running()
    engine.start(["a"])
    assert "--dependency" not in directives_of(engine.preview(["b"]))


def test_the_dry_run_shows_what_is_submitted(cluster, engine):
    shown = engine.preview(["a", "b"])
    engine.running()
    engine.start(["a", "b"])
    assert (cluster / "100.sbatch").read_text() == shown


def test_slurm_takes_a_thousand_tasks_at_once_and_none_after_a_refusal(
    cluster, engine, monkeypatch
):
    engine.running()
    engine.start(["a"])
    assert engine.room() == 1000
    (cluster / "refuse").touch()
    with pytest.raises(OSError, match="sbatch refused .* queue is full"):
        engine.start(["b"])
    assert engine.room() == 0 and engine.running() == set()
    monkeypatch.setattr(slurm, "REFUSED_S", -1)
    assert engine.room() == 1000
    assert json.loads((engine.store.folder / "slurm.json").read_text()) == {"100": ["a"]}


def test_slurm_that_refuses_the_first_job_ends_the_sweep(cluster, engine):
    (cluster / "refuse").touch()
    engine.running()
    with pytest.raises(EngineError, match="sbatch refused .*sweep.sbatch: sbatch: error: Batch"):
        engine.start(["a"])


def test_a_silent_sbatch_is_asked_again(cluster, engine, commands, monkeypatch):
    """Even at the first job: it may pass."""
    engine.running()
    monkeypatch.setattr("benchmark.engines.ANSWER_S", 0.1)
    commands(sbatch="import time; time.sleep(60)")
    with pytest.raises(OSError, match="sbatch doesn't answer within 0.1 s"):
        engine.start(["a"])
    assert engine.room() == 0 and not engine.jobs


@pytest.mark.parametrize(
    "fault, sentence",
    [
        ("down", r"Slurm doesn't answer \(slurm_load_jobs error: Unable to contact"),
        ("hang", "squeue doesn't answer within 0.5 s"),
    ],
)
def test_slurm_that_is_away_for_a_while(cluster, engine, monkeypatch, fault, sentence):
    """What it said last holds until the next question; at the start the sweep ends."""
    (cluster / "queue").write_text("100 0\n")
    engine.jobs = {"100": ["a"]}
    assert engine.running() == {"a"}
    (cluster / fault).touch()
    engine.asked = 0.0
    if fault == "hang":
        monkeypatch.setattr("benchmark.engines.ANSWER_S", 0.5)
    with pytest.raises(OSError, match=sentence):
        engine.running()
    monkeypatch.setattr(slurm, "ASK_S", 60)
    assert engine.running() == {"a"}
    with pytest.raises(EngineError, match=f"{sentence}.*: try again later"):
        Slurm(engine.store, {}, SlurmFlags()).running()
