"""Engines, workers and status of sweeps, with a fake script and fakes of docker, Slurm and ray."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from test_sweep import FAKE, ROOT, jobs_of, steps_of, wait_for, write_suite

from benchmark import engines, sweep, worker
from benchmark.suite import read_suite

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sweeps run on Linux")
# FAKE, but fast; what it got to know is in its folder. Started from step 0, Gate-v0 waits after
# step 2 for SIGTERM or a file "go" in the sweep's folder, Linger-v0 for the file alone, and so does
# Deaf-v0, which ignores SIGTERM. They wait for a minute at most, so that no test leaves them
# behind.
LOOP = "    while step < args.total_timesteps:\n"
assert FAKE.count(LOOP) == FAKE.count("time.sleep(0.2)") == 1
SCRIPT = FAKE.replace("time.sleep(0.2)", "time.sleep(0.02)").replace(
    LOOP,
    f"""
    def note_signal(*_):
        with open(run / "signals.txt", "a") as file:
            print("SIGTERM", file=file)
        request_stop()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.env_id == "Deaf-v0" else note_signal)
    (run / "environment.json").write_text(json.dumps(dict(os.environ)))
    (run / "words.json").write_text(json.dumps(sys.argv[1:]))
    (run / "pid").write_text(str(os.getpid()))
    end = time.time() + 60
{LOOP}
        while args.env_id in ("Gate-v0", "Linger-v0", "Deaf-v0") and step == 2 and first == 0:
            if Path("go").exists() or stop and args.env_id == "Gate-v0" or time.time() > end:
                break
            time.sleep(0.02)
""",
)
GATES = [f"Gate-v0__fake__{seed}" for seed in (1, 2, 3)]
GATE = GATES[0]

# Runs a container's command here, on the cores that it is given, with nothing in its environment
# but what it is given, and as no child of the command `docker`, which passes on SIGTERM and the
# exit code.
DOCKER = """
import argparse, os, signal, subprocess, sys
if sys.argv[1:3] == ["image", "inspect"]:
    print("[]")
    missing = f"Error response from daemon: No such image: {sys.argv[3]}:latest"
    sys.exit(sys.argv[3] != "plainrl" and missing)
assert sys.argv[1] == "run"
parser = argparse.ArgumentParser(allow_abbrev=False)
for flag in ("--rm", "--interactive"):
    parser.add_argument(flag, action="store_true")
for flag in ("label", "stop-timeout", "user", "cpuset-cpus", "workdir", "memory", "gpus"):
    parser.add_argument(f"--{flag}")
for flag in ("network", "shm-size"):
    parser.add_argument(f"--{flag}")
for flag in ("--env", "--mount"):
    parser.add_argument(flag, action="append")
parser.add_argument("image")
parser.add_argument("words", nargs=argparse.REMAINDER)
args = parser.parse_args(sys.argv[2:])
(here / f"{os.getpid()}.call").write_text(json.dumps(vars(args)))
if (here / "broken").exists():
    print("docker: Error response from daemon: could not select device driver", file=sys.stderr)
    print("\\nRun 'docker run --help' for more information", file=sys.stderr)
    sys.exit(125)
if container := os.fork():
    signal.signal(signal.SIGTERM, lambda *_: os.kill(container, signal.SIGTERM))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(container, 0)[1]))
os.setsid()
process = subprocess.Popen(
    [sys.executable, *args.words],
    cwd=args.workdir,
    env=dict(word.split("=", 1) for word in args.env),
    stdin=None if args.interactive else subprocess.DEVNULL,
    preexec_fn=lambda: os.sched_setaffinity(0, map(int, args.cpuset_cpus.split(","))),
)
signal.signal(signal.SIGTERM, lambda *_: process.terminate())
code = process.wait()
sys.exit(code if code >= 0 else 128 - code)
"""

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

NVIDIA_SMI = """
import sys
assert sys.argv[1:] == ["--list-gpus"]
print((here / "gpus").read_text(), end="")
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """commands(name=text, ...) puts fake commands first on PATH.

    Returns their folder, `here` in their texts.
    """
    here = tmp_path / "bin"
    here.mkdir()
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")

    def write(**texts):
        for name, text in texts.items():
            path = here / name.replace("_", "-")
            path.write_text(
                f"#!{sys.executable} -S\nimport json\nfrom pathlib import Path\n"
                f"here = Path(__file__).parent\n{text}"
            )
            path.chmod(0o755)
        return here

    return write


@pytest.fixture
def docker(commands):
    return commands(docker=DOCKER)


@pytest.fixture
def slurm(commands):
    here = commands(sbatch=SBATCH, squeue=SQUEUE, scontrol=SCONTROL, controller=CONTROLLER)
    yield here
    if left := list(here.glob("*.queued")):  # the test has failed
        pids = [path.read_text() for path in here.glob("*.controller")] + [
            path.read_text() for path in left
        ]
        for pid in filter(None, pids):
            subprocess.run(["kill", pid], stderr=subprocess.DEVNULL)


@pytest.fixture
def start():
    """start(suite, folder, *flags, patch="") starts a sweep, and what a test leaves is killed.

    The sweep looks at its runs and at Slurm many times a second; patch: code for it, executed
    before. start.worker(folder, name) starts a worker, start.begin(words) any Python.
    """
    started = []

    def begin(words):
        started.append(
            subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    def start(suite, folder, *flags, patch=""):
        clock = (
            "time=lambda: 20 * time.time(), sleep=time.sleep"
            if "slurm" in flags
            else "**vars(time)"
        )
        code = f"""import sys, time, types
from benchmark import engines, sweep
engines.time, sweep.POLL_S = types.SimpleNamespace({clock}), 0.05
{patch}
sweep.main()"""
        return begin(["-c", code, suite, "--runs", folder, *flags])

    def start_worker(folder, name, stop_s=60, busy_s=0.1):
        code = f"""from benchmark import worker
worker.POLL_S, worker.STOP_S, worker.BUSY_S = 0.05, {stop_s}, {busy_s}
worker.main()"""
        return begin(["-c", code, folder, name, "--threads", "1"])

    start.begin, start.worker = begin, start_worker
    yield start
    for process in started:
        process.kill()
        process.communicate()


def finish(process):
    """Exit code and what it said."""
    said, wrong = process.communicate(timeout=30)
    return process.returncode, said + wrong


def refused(process):
    """The one sentence with which it ends before it has begun."""
    said, wrong = process.communicate(timeout=30)
    assert (
        process.returncode == 2
        and said == ""
        and wrong.startswith("error: ")
        and wrong.count("\n") == 1
    ), wrong
    return wrong


def make_suite(folder, *env_ids, seeds=1):
    suite = write_suite(folder, f"env_ids = {json.dumps(env_ids)}\nseeds = {seeds}")
    (folder / "fake.py").write_text(SCRIPT)
    return suite


def at_gate(folder, *names):
    """Waits until the runs have reached their gate."""
    wait_for(
        lambda: all(
            (folder / "runs" / name / "checkpoint.pt").read_text() == "2" for name in names
        ),
        30,
    )


def pids_of(folder, name):
    """Of its script and of its worker."""
    place = worker.read_job(folder, name)["place"]
    return int((folder / "runs" / name / "pid").read_text()), int(place.split()[-1])


def kill_9(folder, name):
    """Script and worker at once, as when a node fails: neither notices the other's end."""
    script_pid, worker_pid = pids_of(folder, name)
    os.kill(worker_pid, signal.SIGSTOP)
    os.kill(script_pid, signal.SIGKILL)
    os.kill(worker_pid, signal.SIGKILL)


def environment_of(folder, name):
    return json.loads((folder / "runs" / name / "environment.json").read_text())


def calls_of(here):
    """What docker run or sbatch was called with, in the order of the calls."""
    return [
        json.loads(path.read_text())
        for path in sorted(here.glob("*.call"), key=lambda path: path.stat().st_mtime)
    ]


def assert_done_once(folder, *names):
    for name in names:
        assert steps_of(folder, name) == [1, 2, 3, 4, 5, 6]
        assert worker.read_job(folder, name)["state"] == "finished"


def test_docker_run_gets_what_a_run_needs(tmp_path, docker, start, monkeypatch):
    """Two at a time, on cores and GPUs of their own.

    W&B's key reaches the scripts and is written nowhere else.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(
        suite,
        folder,
        "--backend",
        "docker",
        "--workers",
        "2",
        "--gpus-per-run",
        "2",
        "--memory-per-run",
        "8G",
        "--engine-arg=--network=host",
        "--engine-arg=--shm-size",
        "--engine-arg=1g",
    )
    at_gate(folder, *GATES[:2])
    calls = sorted(calls_of(docker), key=lambda call: call["label"])
    (folder / "go").touch()
    assert finish(first)[0] == 0
    assert_done_once(folder, *GATES[:2])
    assert [call["label"] for call in calls] == [f"plainrl={name}" for name in GATES[:2]]
    assert {call["cpuset_cpus"] for call in calls} == {
        str(core) for core in sorted(os.sched_getaffinity(0))[:2]
    }
    assert sorted(next(csv.reader([call["gpus"]])) for call in calls) == [
        ["device=4,5"],
        ["device=6,7"],
    ]
    for name, call in zip(GATES, calls):
        assert (call["user"], call["memory"]) == (f"{os.getuid()}:{os.getgid()}", "8G")
        assert (
            call["rm"]
            and call["workdir"] == str(ROOT)
            and int(call["stop_timeout"]) > worker.STOP_S
        )
        mounts = {f"type=bind,source={place},target={place},readonly" for place in (tmp_path, ROOT)}
        mounts |= {f"type=bind,source={folder},target={folder}"}
        assert set(call["mount"]) == mounts and (call["network"], call["shm_size"]) == (
            "host",
            "1g",
        )
        assert call["words"][call["words"].index("--threads") + 1] == "1"
        assert "WANDB" not in json.dumps(call) and "a-secret" not in json.dumps(call)
        environment = environment_of(folder, name)
        assert environment["WANDB_API_KEY"] == "a-secret"
        assert Path(environment["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folder)
        assert Path(environment["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
    files = [
        path for path in folder.rglob("*") if path.is_file() and path.name != "environment.json"
    ]
    assert files and not any(b"a-secret" in path.read_bytes() for path in files)


def test_a_container_that_is_killed_is_resumed(tmp_path, docker, start):
    suite, folder = make_suite(tmp_path, "Gate-v0"), tmp_path / "out"
    first = start(suite, folder, "--backend", "docker", "--workers", "1", "--retries", "0")
    at_gate(folder, GATE)
    kill_9(folder, GATE)
    code, said = finish(first)
    assert code == 0 and f"to be resumed: {GATE}\n" in said
    assert_done_once(folder, GATE)
    assert json.loads((folder / "runs" / GATE / "words.json").read_text()) == [
        "--resume",
        f"runs/{GATE}",
    ]
    assert len(calls_of(docker)) == 2 and worker.read_job(folder, GATE)["failures"] == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_containers_of_a_sweep_that_is_stopped_save(tmp_path, docker, start, signum):
    suite, folder = make_suite(tmp_path, "Gate-v0"), tmp_path / "out"
    first = start(suite, folder, "--backend", "docker", "--workers", "1")
    at_gate(folder, GATE)
    first.send_signal(signum)
    code, said = finish(first)
    assert code == (-9 if signum == signal.SIGKILL else 143)
    wait_for(lambda: not worker.held(folder / "jobs" / f"{GATE}.lock"))
    assert worker.read_job(folder, GATE)["state"] == "waiting" and steps_of(folder, GATE) == [
        1,
        2,
        3,
    ]
    assert (folder / "runs" / GATE / "signals.txt").read_text() == "SIGTERM\n"


def test_a_container_that_does_not_start_is_named_with_its_reason(tmp_path, docker, start):
    """Docker's last line says only where there is help."""
    (docker / "broken").touch()
    suite, folder = make_suite(tmp_path, "Good-v0"), tmp_path / "out"
    code, said = finish(start(suite, folder, "--backend", "docker", patch="sweep.PAUSE_S = 0.1"))
    assert code == 2 and len(calls_of(docker)) == sweep.MISSES
    assert worker.read_job(folder, "Good-v0__fake__1")["failures"] == 0
    assert (
        "error: the last 5 workers didn't come up" in said
        and "could not select device driver" in said
    )


def test_docker_that_fails_for_a_while_costs_no_run(tmp_path, docker, start):
    (docker / "broken").touch()
    suite, folder = make_suite(tmp_path, "Good-v0", seeds=4), tmp_path / "out"
    first = start(suite, folder, "--backend", "docker", "--retries", "0", patch="sweep.PAUSE_S = 1")
    wait_for(lambda: calls_of(docker))
    (docker / "broken").unlink()
    assert finish(first)[0] == 0
    assert_done_once(folder, *(f"Good-v0__fake__{seed}" for seed in range(1, 5)))
    assert {job["failures"] for job in jobs_of(folder).values()} == {0}


def test_a_container_sees_the_users_modules(tmp_path, monkeypatch):
    """Whatever its PYTHONPATH names is there, but for what this machine lacks, too."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/modules:{tmp_path}/gone")
    (tmp_path / "modules").mkdir()
    args = Namespace(
        workers=1, cpus_per_run=1, gpus_per_run=0, memory_per_run=None, engine_args=[], image="x"
    )
    words = engines.Docker(tmp_path / "out", {}, args).command("a", [0], [])
    places = [
        word.split(",")[1].removeprefix("source=") for word in words if word.startswith("type=bind")
    ]
    (paths,) = (
        word.removeprefix("PYTHONPATH=").split(":")
        for word in words
        if word.startswith("PYTHONPATH=")
    )
    assert str(tmp_path / "modules") in paths
    assert f"{tmp_path}/gone" not in places
    assert all(any(Path(path).is_relative_to(place) for place in places) for path in paths[:-1]), (
        places
    )


def test_a_container_sees_the_run_whose_networks_it_begins_with(tmp_path):
    args = Namespace(
        workers=1, cpus_per_run=1, gpus_per_run=0, memory_per_run=None, engine_args=[], image="x"
    )
    run = {"script": "/a/fake.py", "words": ["--seed", "1", "--init-from", "/old/runs/one"]}
    words = engines.Docker(tmp_path / "out", {"a": run}, args).command("a", [0], [])
    assert "type=bind,source=/old/runs/one,target=/old/runs/one,readonly" in words


def test_docker_without_the_image(tmp_path, docker, start):
    sentence = refused(
        start(
            make_suite(tmp_path, "Good-v0"), tmp_path / "out", "--backend", "docker", "--image", "x"
        )
    )
    assert "No such image: x:latest" in sentence and "docker build -t x" in sentence


@pytest.mark.parametrize(
    "backend, sentence",
    [("docker", "there is no command docker"), ("slurm", "there is no command sbatch")],
)
def test_an_engine_without_its_command(tmp_path, start, monkeypatch, backend, sentence):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sentence in refused(
        start(make_suite(tmp_path, "Good-v0"), tmp_path / "out", "--backend", backend)
    )


def wait_until_asked(slurm, times):
    """Waits until squeue has been called so many times more."""
    asked = (slurm / "asked.txt").stat().st_size
    wait_for(lambda: (slurm / "asked.txt").stat().st_size >= asked + times * len("asked\n"))


def slurm_args(**changes):
    return Namespace(
        **{
            "workers": None,
            "cpus_per_run": 1,
            "gpus_per_run": 0.0,
            "memory_per_run": None,
            "partition": None,
            "account": None,
            "time": None,
            "engine_args": [],
        }
        | changes
    )


def directives_of(text):
    """{option: value} of the lines that sbatch reads: all before the first command."""
    lines = text[: text.index("\nruns=")].splitlines()
    assert all(line.startswith("#") or not line for line in lines)
    words = [shlex.split(line)[1:] for line in lines if line.startswith("#SBATCH ")]
    assert all(len(word) == 1 for word in words), words
    return dict(word.partition("=")[::2] for (word,) in words)


@pytest.mark.parametrize(
    "changes, expected",
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
            {"engine_args": ["--constraint=a100", "--exclusive"]},
            {"--array": "0-2", "--cpus-per-task": "1", "--constraint": "a100", "--exclusive": ""},
        ),
        (
            {"engine_args": ["--comment=two words"]},
            {"--array": "0-2", "--cpus-per-task": "1", "--comment": "two words"},
        ),
    ],
)
def test_flags_are_in_the_file_for_sbatch(tmp_path, changes, expected):
    text = engines.Slurm(tmp_path / "out", {}, slurm_args(**changes)).preview(["a", "b", "c"])
    always = {
        "--job-name": "plainrl-out",
        "--ntasks": "1",
        "--requeue": "",
        "--signal": "B:USR1@120",
        "--open-mode": "append",
        "--output": f"{tmp_path}/out/logs/slurm-%A_%a.log",
    }
    assert directives_of(text) == always | expected


@pytest.mark.parametrize("limit", ["4", "0", "4:59", "0:04:59"])
def test_a_time_limit_that_only_requeues_is_refused(tmp_path, limit):
    """A job of two minutes would be told at its start that its end is near."""
    with pytest.raises(engines.EngineError, match=f"--time {limit} is too short"):
        engines.Slurm(tmp_path, {}, slurm_args(time=limit))


@pytest.mark.parametrize("limit", ["5", "120", "5:00", "0:05:00", "1-0", "1-00:02", "0:30:00", "x"])
def test_longer_time_limits_are_left_to_slurm(tmp_path, limit):
    engines.Slurm(tmp_path, {}, slurm_args(time=limit))


def test_another_backend_names_the_slurm_jobs_of_its_folder(tmp_path, start):
    suite, folder = make_suite(tmp_path, "Good-v0"), tmp_path / "out"
    folder.mkdir()
    (folder / "slurm.json").write_text('{"17": ["one"], "18": []}')
    code, said = finish(start(suite, folder))
    assert code == 0 and "`scancel 17 18` takes back what waits" in said


def test_slurm_runs_a_suite(tmp_path, slurm, start):
    """One job, two of its three tasks at a time, each with its threads and its log."""
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=3), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm", "--workers", "2", "--cpus-per-run", "3")
    at_gate(folder, *GATES[:2])
    assert worker.read_job(folder, GATES[2])["state"] == "waiting"
    (folder / "go").touch()
    assert finish(first)[0] == 0
    assert_done_once(folder, *GATES)
    assert [call["options"]["--array"] for call in calls_of(slurm)] == ["0-2%2"]
    for name in GATES:
        assert environment_of(folder, name)["OMP_NUM_THREADS"] == "3"
        assert "6/6" in (folder / "logs" / f"{name}.log").read_text()


def test_slurm_in_a_folder_with_a_space(tmp_path, slurm, start):
    suite, folder = make_suite(tmp_path, "Good-v0"), tmp_path / "my sweep"
    code, said = finish(start(suite, folder, "--backend", "slurm"))
    assert code == 0, said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_slurm_runs_go_on_without_the_sweep(tmp_path, slurm, start, signum):
    """One that runs and one that still is in the queue."""
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm", "--workers", "1")
    at_gate(folder, GATE)
    first.send_signal(signum)
    code, said = finish(first)
    assert code == (130 if signum == signal.SIGINT else -9)
    assert ("scancel 100" in said) == (signum == signal.SIGINT)
    second = start(suite, folder, "--backend", "slurm", "--workers", "1")
    assert "1 running, 1 waiting" in second.stdout.readline()
    wait_until_asked(slurm, 1)
    (folder / "go").touch()
    assert finish(second)[0] == 0
    assert_done_once(folder, *GATES[:2])
    assert len(calls_of(slurm)) == 1
    assert not list((folder / "runs").glob("*/signals.txt"))


def test_a_lost_slurm_task_is_submitted_again_alone(tmp_path, slurm, start):
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm", "--retries", "0")
    at_gate(folder, *GATES[:2])
    kill_9(folder, GATES[1])
    wait_for(lambda: worker.read_job(folder, GATES[1])["state"] == "finished")
    (folder / "go").touch()
    assert finish(first)[0] == 0
    assert_done_once(folder, *GATES[:2])
    one, other = calls_of(slurm)
    assert one["options"]["--array"] == "0-1" and other["options"]["--array"] == "0-0"
    assert f"\nruns=({GATES[1]})\n" in other["text"]


def test_a_slurm_task_lost_after_a_sweep_came_back_is_no_failure(tmp_path, slurm, start):
    """Its worker came up, and there is a checkpoint, if also before this sweep began to watch."""
    suite, folder = make_suite(tmp_path, "Gate-v0"), tmp_path / "out"
    flags = suite, folder, "--backend", "slurm", "--retries", "0"
    first = start(*flags)
    at_gate(folder, GATE)
    first.kill()
    first.wait()
    second = start(*flags)
    assert "1 running" in second.stdout.readline()
    kill_9(folder, GATE)
    code, said = finish(second)
    assert code == 0, said
    assert_done_once(folder, GATE)
    assert worker.read_job(folder, GATE)["failures"] == 0


def test_scancel_is_the_last_word(tmp_path, slurm, start):
    """Until the same command is given once more."""
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm")
    at_gate(folder, *GATES[:2])
    os.kill(int((slurm / "100_0.queued").read_text()), signal.SIGTERM)
    wait_for(lambda: not (slurm / "100_0.queued").exists())
    wait_until_asked(slurm, 2)
    (folder / "go").touch()
    code, said = finish(first)
    assert code == 1 and f"cancelled: {GATES[0]}\n" in said and "1 were cancelled" in said
    assert len(calls_of(slurm)) == 1 and steps_of(folder, GATES[0]) == [1, 2, 3]
    assert_done_once(folder, GATES[1])
    assert finish(start(suite, folder, "--backend", "slurm"))[0] == 0
    assert_done_once(folder, *GATES[:2])
    assert f"\nruns=({GATES[0]})\n" in calls_of(slurm)[1]["text"]


def test_scancel_is_the_last_word_for_a_sweep_that_watches_again(tmp_path, slurm, start):
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm")
    at_gate(folder, *GATES[:2])
    first.kill()
    first.wait()
    second = start(suite, folder, "--backend", "slurm")
    wait_until_asked(slurm, 2)
    os.kill(int((slurm / "100_0.queued").read_text()), signal.SIGTERM)
    wait_for(lambda: not (slurm / "100_0.queued").exists())
    wait_until_asked(slurm, 2)
    (folder / "go").touch()
    code, said = finish(second)
    assert code == 1 and f"cancelled: {GATES[0]}\n" in said and len(calls_of(slurm)) == 1
    assert_done_once(folder, GATES[1])


def test_a_slurm_task_near_its_time_limit_goes_on_in_another(tmp_path, slurm, start):
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm")
    at_gate(folder, *GATES[:2])
    os.kill(int((slurm / "100_1.queued").read_text()), signal.SIGUSR1)
    wait_for(lambda: worker.read_job(folder, GATES[1])["state"] == "finished")
    (folder / "go").touch()
    assert finish(first)[0] == 0
    assert_done_once(folder, *GATES[:2])
    assert (slurm / "requeued.txt").read_text() == "100_1\n" and len(calls_of(slurm)) == 1
    starts = [(folder / "runs" / name / "starts.txt").read_text().count("\n") for name in GATES[:2]]
    assert starts == [1, 2]


def test_slurm_that_does_not_answer_in_the_middle_is_waited_for(tmp_path, slurm, start):
    suite, folder = make_suite(tmp_path, "Gate-v0"), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm")
    at_gate(folder, GATE)
    (slurm / "down").touch()
    wait_until_asked(slurm, 3)
    assert first.poll() is None and len(calls_of(slurm)) == 1
    (slurm / "down").unlink()
    (folder / "go").touch()
    assert finish(first)[0] == 0
    assert_done_once(folder, GATE)
    assert len(calls_of(slurm)) == 1


def test_slurm_that_refuses_a_task_in_the_middle_is_asked_again(tmp_path, slurm, start):
    """A task is lost while the queue is full; it is neither cancelled nor given up."""
    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(suite, folder, "--backend", "slurm", "--workers", "2")
    at_gate(folder, *GATES[:2])
    (slurm / "refuse").touch()
    kill_9(folder, GATES[1])
    assert any("sbatch refused" in line for line in first.stdout)
    (slurm / "refuse").unlink()
    wait_for(
        lambda: (
            worker.read_job(folder, GATES[1])["state"] == "waiting" and len(calls_of(slurm)) == 2
        )
    )
    (folder / "go").touch()
    assert finish(first)[0] == 0
    assert_done_once(folder, *GATES[:2])
    one, other = (call["options"] for call in calls_of(slurm))
    assert "--dependency" not in one and other["--dependency"] == "singleton"


def test_a_disk_that_is_full_for_a_while_costs_no_core(tmp_path, monkeypatch):
    args = Namespace(workers=1, cpus_per_run=1, gpus_per_run=0)
    engine = engines.Local(tmp_path, {}, args)
    for _ in range(3):  # there is no folder for its log yet
        with pytest.raises(OSError):
            engine.start(["a"])
    assert engine.room() == 1 and not engine.running()
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(engine, "command", lambda *_: ["true"])
    engine.start(["a"])
    assert engine.room() == 0
    wait_for(lambda: not engine.running())
    assert engine.room() == 1


def test_a_start_that_fails_halfway_costs_no_core(tmp_path, monkeypatch):
    """What had begun is watched, the rest is started when that can be."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "logs" / "b.log").mkdir(parents=True)
    monkeypatch.setattr(engines, "usable_cores", lambda: [0, 1])
    engine = engines.Local(tmp_path, {}, Namespace(workers=2, cpus_per_run=1, gpus_per_run=0))
    monkeypatch.setattr(engine, "command", lambda *_: ["sleep", "60"])
    watched = sweep.Sweep(tmp_path, {"a": None, "b": None}, engine, 1)
    with pytest.raises(IsADirectoryError):
        watched.poll()
    assert set(watched.given) == {"a"} and engine.room() == 1
    (tmp_path / "logs" / "b.log").rmdir()
    watched.poll()
    assert set(watched.given) == set(engine.processes) == {"a", "b"} and engine.room() == 0
    engine.stop()
    assert engine.room() == 2


def test_slurm_takes_a_thousand_tasks_at_once_and_none_after_a_refusal(tmp_path, monkeypatch):
    engine = engines.Slurm(tmp_path, {}, Namespace(time=None, gpus_per_run=0))
    engine.arrays, engine.tasks = {"1": ["a"]}, set()
    monkeypatch.setattr(engine, "preview", lambda names: "")
    refusal = subprocess.CompletedProcess([], 1, "", "queue is full")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: refusal)
    assert engine.room() == 1000
    with pytest.raises(OSError, match="queue is full"):
        engine.start(["b"])
    assert engine.room() == 0


def test_a_slurm_task_whose_worker_does_not_come_up_is_no_cancelled_one(tmp_path, slurm, start):
    """Its log says why."""
    suite, folder = make_suite(tmp_path, "Good-v0"), tmp_path / "out"
    patch = "sys.executable, sweep.PAUSE_S = '/no/py', 0.1"
    code, said = finish(start(suite, folder, "--backend", "slurm", "--retries", "0", patch=patch))
    assert "/no/py: No such file" in (folder / "logs" / "Good-v0__fake__1.log").read_text()
    assert (
        code == 2
        and "error: the last 5 workers didn't come up" in said
        and "/no/py: No such file" in said
    )
    assert worker.read_job(folder, "Good-v0__fake__1")["failures"] == 0


@pytest.mark.parametrize(
    "fault, sentence", [("down", "Slurm doesn't answer"), ("refuse", "sbatch refused")]
)
def test_slurm_that_does_not_work_at_the_start(tmp_path, slurm, start, fault, sentence):
    (slurm / fault).touch()
    code, said = finish(
        start(make_suite(tmp_path, "Good-v0"), tmp_path / "out", "--backend", "slurm")
    )
    *_, last = said.splitlines()
    assert code == 2 and last.startswith("error: ") and sentence in last and "Traceback" not in said
    assert not calls_of(slurm)


def test_slurm_does_not_share_gpus(tmp_path, start):
    flags = "--backend", "slurm", "--gpus-per-run", "0.5"
    assert "must be a whole number" in refused(
        start(make_suite(tmp_path, "Good-v0"), tmp_path / "out", *flags)
    )


def test_ray_that_is_not_installed(tmp_path, start, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "ray.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    sentence = refused(start(make_suite(tmp_path, "Good-v0"), tmp_path / "out", "--backend", "ray"))
    assert "Ray isn't installed" in sentence


@pytest.mark.parametrize(
    "gpus_per_run, workers, expected",
    [
        (0, None, [[]] * 6),
        (0.25, 5, [["4"], ["5"]] * 2 + [["4"]]),
        (0.25, None, [["4"], ["5"]] * 3),
        (0.5, None, [["4"], ["5"]] * 2),
        (0.3, None, [["4"], ["5"]] * 3),
        (0.6, None, [["4"], ["5"]]),
        (1, None, [["4"], ["5"]]),
        (1, 1, [["4"]]),
        (2, None, [["4", "5"]]),
    ],
)
def test_gpus_are_divided_among_local_runs(tmp_path, monkeypatch, gpus_per_run, workers, expected):
    monkeypatch.setattr(engines, "usable_cores", lambda: [0, 2, 3, 5, 8, 9])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    engine = engines.Local(
        tmp_path, {}, Namespace(workers=workers, cpus_per_run=1, gpus_per_run=gpus_per_run)
    )
    assert [gpus for _, gpus in engine.free] == expected and engine.room() == len(expected)
    assert [cores for cores, _ in engine.free] == [
        [core] for core in (0, 2, 3, 5, 8, 9)[: len(expected)]
    ]


@pytest.mark.parametrize(
    "cpus_per_run, workers, expected",
    [(1, 2, [[0], [2]]), (2, None, [[0, 2], [3, 5]]), (3, None, [[0, 2, 3]]), (2, 1, [[0, 2]])],
)
def test_cores_are_divided_among_local_runs(tmp_path, monkeypatch, cpus_per_run, workers, expected):
    monkeypatch.setattr(engines, "usable_cores", lambda: [0, 2, 3, 5, 8])
    engine = engines.Local(
        tmp_path, {}, Namespace(workers=workers, cpus_per_run=cpus_per_run, gpus_per_run=0)
    )
    assert list(engine.free) == [(cores, []) for cores in expected]


@pytest.mark.parametrize(
    "visible, gpus_per_run, workers, sentence",
    [
        ("4,5", 3, None, "1 workers with 3 GPUs each don't fit on 2 GPUs"),
        ("4,5", 1, 3, "3 workers with 1 GPUs each don't fit on 2 GPUs"),
        ("", 1, None, "don't fit on 0 GPUs"),
        ("4,5", 0.5, 5, "5 workers with 0.5 GPUs each don't fit on 2 GPUs"),
        ("4,5", 0, 7, "don't fit on 6 cores"),
    ],
)
def test_local_runs_that_do_not_fit_are_refused(
    tmp_path, monkeypatch, visible, gpus_per_run, workers, sentence
):
    monkeypatch.setattr(engines, "usable_cores", lambda: list(range(6)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(engines.EngineError) as error:
        engines.Local(
            tmp_path, {}, Namespace(workers=workers, cpus_per_run=1, gpus_per_run=gpus_per_run)
        )
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "listed, expected",
    [
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n", ["0", "1"]),
        (
            (
                "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g.10gb  Device 0: (UUID: MIG-1)\nGPU 1: "
                "NVIDIA H100 (UUID: GPU-2)\n"
            ),
            ["0", "1"],
        ),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
    ],
)
def test_gpus_of_a_machine(monkeypatch, commands, listed, expected):
    here = commands(nvidia_smi=NVIDIA_SMI)
    (here / "gpus").write_text(listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engines.usable_gpus() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    assert engines.usable_gpus() == ["3", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert engines.usable_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert engines.usable_gpus() == []


@pytest.mark.parametrize("gpus_per_run, expected", [("0", ["", ""]), ("1", ["4", "5"])])
def test_local_runs_see_their_gpus_alone(tmp_path, start, monkeypatch, gpus_per_run, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    suite, folder = make_suite(tmp_path, "Good-v0", seeds=2), tmp_path / "out"
    assert finish(start(suite, folder, "--workers", "2", "--gpus-per-run", gpus_per_run))[0] == 0
    seen = [
        environment_of(folder, f"Good-v0__fake__{seed}")["CUDA_VISIBLE_DEVICES"] for seed in (1, 2)
    ]
    assert seen == expected


def test_a_runs_modules_are_found_from_any_folder(tmp_path, monkeypatch):
    """Scripts run in the sweep's folder, so that a relative path would lead elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"modules:{tmp_path}/others")
    assert engines.python_path().split(":") == [
        str(tmp_path),
        str(ROOT),
        f"{tmp_path}/modules",
        f"{tmp_path}/others",
    ]


@pytest.mark.parametrize(
    "words, reason",
    [("echo no worker; exit 3", "no worker"), ("exit 3", "its worker said nothing")],
)
def test_workers_that_do_not_come_up_end_the_sweep(tmp_path, start, words, reason):
    """That is not the runs' failure; the others save."""
    suite, folder = make_suite(tmp_path, "Gate-v0", "Good-v0"), tmp_path / "out"
    patch = f"""sweep.PAUSE_S = 0.1
command = engines.Local.command
engines.Local.command = lambda self, name, *rest: (
    ['sh', '-c', {words!r}] if name.startswith('Good') else command(self, name, *rest))"""
    code, said = finish(start(suite, folder, "--retries", "2", patch=patch))
    assert (
        code == 2
        and f"the last 5 workers didn't come up, Good-v0__fake__1's with: {reason}: fix that"
        in said
    )
    assert [(job["state"], job["failures"]) for job in jobs_of(folder).values()] == [
        ("waiting", 0),
        ("waiting", 0),
    ]


def test_failures_are_counted_from_0_where_a_run_gets_further(tmp_path):
    """So that only the same trouble again and again ends it."""
    (tmp_path / "logs").mkdir()
    job, steps = worker.read_job(tmp_path, "a"), []
    for step, lost in (
        (5, False),
        (4, False),
        (5, True),
        (6, False),
        (6, True),
        (9, True),
        (9, True),
    ):
        (tmp_path / "logs" / "a.log").write_text(
            f" 50%|##   | {step}/10 [00:01<00:09, 12.50 steps/s]\nTraceback\n"
        )
        job = worker.count_failure(tmp_path, "a", job, "trouble", lost)
        steps.append((job["failures"], job["step"], job["error"]))
    assert steps == [
        (1, 5, "trouble"),
        (2, 5, "trouble"),
        (3, 5, "trouble"),
        (1, 6, "trouble"),
        (2, 6, "trouble"),
        (0, 9, ""),
        (1, 9, "trouble"),
    ]


def test_a_machine_that_sleeps_is_no_stall(tmp_path, start):
    """What counts is the time in which the worker itself could see that nothing was written."""
    folder, run = make_folder(tmp_path, "Linger-v0", stall_minutes=0.04)
    process = start.worker(folder, run.name)
    at_gate(folder, run.name)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    (folder / "go").touch()
    assert finish(process)[0] == 0
    assert worker.read_job(folder, run.name)["failures"] == 0


def make_folder(path, env_id, retries=0, stall_minutes=30):
    """A sweep's folder with one run; returns it and the run."""
    (run,) = read_suite(make_suite(path, env_id))
    return folder_of(path, run, retries, stall_minutes), run


def folder_of(path, run, retries, stall_minutes=30):
    """The sweep's folder of a run."""
    for name in ("jobs", "logs", "runs"):
        (path / "out" / name).mkdir(parents=True)
    runs = {run.name: {"script": run.script, "words": run.words}}
    worker.write_json(
        path / "out" / "sweep.json",
        {"retries": retries, "stall_minutes": stall_minutes, "runs": runs},
    )
    return path / "out"


def test_a_run_has_one_worker(tmp_path, start):
    folder, run = make_folder(tmp_path, "Good-v0")
    worker.write_job(folder, run.name, {"state": "running", "place": "node7, process 5"})
    lock = worker.hold(folder / "jobs" / f"{run.name}.lock")
    assert finish(start.worker(folder, run.name)) == (
        75,
        f"{run.name} is held by node7, process 5\n",
    )
    assert not list((folder / "runs").iterdir())
    lock.close()
    assert finish(start.worker(folder, run.name))[0] == 1  # lost by node7


def test_a_worker_knows_its_sweep(tmp_path, start):
    folder, _ = make_folder(tmp_path, "Good-v0")
    code, said = finish(start.worker(folder, "Bad-v0__fake__1"))
    assert code == 1 and said == f"error: {folder / 'sweep.json'} has no run Bad-v0__fake__1\n"


@pytest.mark.parametrize(
    "step, retries, state, failures",
    [(None, 0, "failed", 1), (None, 1, "finished", 1), (2, 0, "failed", 1), (3, 0, "finished", 0)],
)
def test_a_lost_worker_is_a_failure_where_it_got_no_further(
    tmp_path, start, step, retries, state, failures
):
    """step: what it had printed last; an attempt before it had come to step 2."""
    folder, run = make_folder(tmp_path, "Good-v0", retries)
    worker.write_job(
        folder,
        run.name,
        {"state": "running", "failures": 0, "step": 2, "place": "node7, process 5"},
    )
    if step:
        (folder / "logs" / f"{run.name}.log").write_text(
            f" 50%|##   | {step}/6 [00:01<00:09, 12.50 steps/s]\n"
        )
    code, _ = finish(start.worker(folder, run.name))
    job = json.loads((folder / "jobs" / f"{run.name}.json").read_text())
    assert (code, job["state"], job["failures"]) == (int(state == "failed"), state, failures)
    if state == "failed":
        assert job["error"] == "lost by node7, process 5"
        assert not (folder / "runs" / run.name / "starts.txt").exists()


def make_busy(folder, name):
    """Lets a run's script say that another process has its folder, until there is a file "free"."""
    script = folder.parent / "fake.py"
    main = 'if __name__ == "__main__":\n'
    assert SCRIPT.count(main) == 1
    busy = f"""{main}    with open("tries.txt", "a") as file:
        print("tried", file=file)
    if not Path("free").exists():
        print("error: runs/{name} is in use by another process: wait for it", file=sys.stderr)
        sys.exit(2)
"""
    script.write_text(SCRIPT.replace(main, busy))


def tries_of(folder):
    return len((folder / "tries.txt").read_text().splitlines())


def test_a_run_that_another_process_has_is_waited_for(tmp_path, start):
    """Such as a script on a node that is cut off: that is not the run's failure."""
    folder, run = make_folder(tmp_path, "Good-v0")
    make_busy(folder, run.name)
    process = start.worker(folder, run.name)
    wait_for(lambda: tries_of(folder) > 2)
    (job,) = jobs_of(folder).values()
    assert job["failures"] == 0
    (folder / "free").touch()
    assert finish(process)[0] == 0
    assert_done_once(folder, run.name)
    assert worker.read_job(folder, run.name)["failures"] == 0


def test_a_run_that_another_process_ends_is_finished(tmp_path, start):
    folder, run = make_folder(tmp_path, "Good-v0")
    make_busy(folder, run.name)
    process = start.worker(folder, run.name)
    wait_for(lambda: tries_of(folder) > 0)
    (folder / "runs" / run.name).mkdir()
    worker.write_json(folder / "runs" / run.name / "evaluation.json", {"returns": [4.0]})
    assert finish(process)[0] == 0
    assert worker.read_job(folder, run.name)["state"] == "finished"


def test_a_worker_that_waits_for_another_process_can_be_stopped(tmp_path, start):
    folder, run = make_folder(tmp_path, "Good-v0")
    make_busy(folder, run.name)
    process = start.worker(folder, run.name, busy_s=60)
    wait_for(lambda: "is in use" in worker.read_job(folder, run.name)["error"])
    assert worker.read_job(folder, run.name)["state"] == "waiting"
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "")
    assert worker.read_job(folder, run.name)["state"] == "waiting" and tries_of(folder) == 1


def test_a_folder_that_has_lost_its_checkpoint_is_a_failure_at_once(tmp_path, start):
    """With the sentence of a real script, and nothing in it changes."""
    run = Namespace(name="one", script=str(ROOT / "vpg.py"), words=["--run-name", "one"])
    folder = folder_of(tmp_path, run, retries=3)
    (folder / "runs" / run.name).mkdir()
    (folder / "runs" / run.name / "episodes.csv").write_text("a log\n")
    assert finish(start.worker(folder, run.name))[0] == 1
    job = worker.read_job(folder, run.name)
    assert (job["state"], job["failures"]) == ("failed", 1)
    assert f"runs/{run.name}" in job["error"] and "choose another --run-name" in job["error"]
    assert (folder / "runs" / run.name / "episodes.csv").read_text() == "a log\n"


def test_an_evaluation_that_stays_unreadable_is_the_failure(tmp_path, start):
    """Where the script, too, takes the run for finished."""
    folder, run = make_folder(tmp_path, "Good-v0")
    (folder / "runs" / run.name / "evaluation.json").mkdir(parents=True)
    text = 'if __name__ == "__main__":\n'
    (tmp_path / "fake.py").write_text(SCRIPT.replace(text, f"{text}    sys.exit()\n"))
    assert finish(start.worker(folder, run.name))[0] == 1
    job = worker.read_job(folder, run.name)
    assert job["state"] == "failed" and job["error"].startswith("evaluation.json can't be read")


def test_a_worker_asks_its_script_once_to_stop(tmp_path, start):
    """However often it is asked itself: at a second signal a script may end unsaved."""
    folder, run = make_folder(tmp_path, "Linger-v0")
    process, signals = start.worker(folder, run.name), folder / "runs" / run.name / "signals.txt"
    at_gate(folder, run.name)
    process.send_signal(signal.SIGTERM)
    wait_for(signals.exists)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(signum)
        time.sleep(0.2)  # some polls of it
    (folder / "go").touch()
    assert finish(process) == (143, "")
    assert signals.read_text() == "SIGTERM\n" and steps_of(folder, run.name) == [1, 2, 3]


def test_a_worker_that_is_stopped_leaves_its_run_waiting(tmp_path, start):
    folder, run = make_folder(tmp_path, "Gate-v0")
    process = start.worker(folder, run.name)
    at_gate(folder, run.name)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (143, "")
    job = worker.read_job(folder, run.name)
    assert (job["state"], job["failures"], job["error"]) == ("waiting", 0, "") and steps_of(
        folder, GATE
    ) == [1, 2, 3]


@pytest.mark.parametrize("env_id", ["Linger-v0", "Deaf-v0"])
def test_a_worker_that_is_killed_takes_its_script_with_it(tmp_path, start, env_id):
    """At once, since there is nobody left to see whether it hangs.

    Another worker goes on from its checkpoint.
    """
    folder, run = make_folder(tmp_path, env_id)
    process = start.worker(folder, run.name)
    at_gate(folder, run.name)
    assert worker.held(folder / "jobs" / f"{run.name}.lock")
    process.kill()
    process.wait()
    wait_for(lambda: not worker.held(folder / "jobs" / f"{run.name}.lock"))
    assert (
        steps_of(folder, run.name) == [1, 2]
        and not (folder / "runs" / run.name / "signals.txt").exists()
    )
    assert finish(start.worker(folder, run.name))[0] == 0
    assert_done_once(folder, run.name)


def test_a_worker_ends_with_what_has_started_it(tmp_path, start):
    folder, run = make_folder(tmp_path, "Gate-v0")
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'benchmark.worker', "
        "*sys.argv[1:]])"
    )
    process = start.begin(["-c", code, folder, run.name, "--threads", "1"])
    at_gate(folder, run.name)
    process.kill()
    wait_for(lambda: not worker.held(folder / "jobs" / f"{run.name}.lock"))
    assert worker.read_job(folder, run.name)["state"] == "waiting" and steps_of(
        folder, run.name
    ) == [1, 2, 3]


def test_a_script_that_does_not_stop_is_killed(tmp_path, start):
    folder, run = make_folder(tmp_path, "Deaf-v0")
    process = start.worker(folder, run.name, stop_s=0.3)
    at_gate(folder, run.name)
    script_pid, _ = pids_of(folder, run.name)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143
    assert not Path(f"/proc/{script_pid}").exists()
    assert worker.read_job(folder, run.name)["state"] == "waiting" and steps_of(
        folder, run.name
    ) == [1, 2]


def parse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["sweep", "smoke", *flags])
    return sweep.parse_args()


@pytest.mark.parametrize(
    "flags, backends",
    [
        (["--image", "x"], ["docker"]),
        (["--memory-per-run", "1G"], ["docker", "slurm", "ray"]),
        (["--partition", "x"], ["slurm"]),
        (["--account", "x"], ["slurm"]),
        (["--time", "1:00"], ["slurm"]),
        (["--engine-arg=--x"], ["docker", "slurm"]),
        (["--ray-address", "x"], ["ray"]),
    ],
)
def test_flags_of_another_engine_are_refused(monkeypatch, capsys, flags, backends):
    for backend in engines.ENGINES:
        if backend in backends:
            assert parse(monkeypatch, "--backend", backend, *flags).backend == backend
        else:
            with pytest.raises(SystemExit, match="2"):
                parse(monkeypatch, "--backend", backend, *flags)
            flag = flags[0].partition("=")[0]
            assert (
                capsys.readouterr().err
                == f"error: {flag} is for --backend {' or '.join(backends)}\n"
            )


@pytest.mark.parametrize("memory", ["8", "8g", "1.5G", "0G", "08G", "G", "8GB", "-8G", "8G 8G"])
def test_memory_that_is_none_is_refused(monkeypatch, capsys, memory):
    with pytest.raises(SystemExit, match="2"):
        parse(monkeypatch, "--backend", "docker", f"--memory-per-run={memory}")
    assert capsys.readouterr().err == (
        f"error: --memory-per-run {memory} must be a whole number with K, M, G or T\n"
    )


@pytest.mark.parametrize(
    "memory, number",
    [("1K", 1024), ("500M", 500 * 1024**2), ("8G", 8 * 1024**3), ("10T", 10 * 1024**4)],
)
def test_memory(monkeypatch, memory, number):
    args = parse(monkeypatch, "--backend", "ray", "--memory-per-run", memory)
    assert args.memory_per_run == memory and engines.parse_bytes(memory) == number


def test_status_of_a_sweep_that_runs(tmp_path, start):
    """It doesn't disturb it; afterwards nobody looks after the folder."""

    def status():
        return subprocess.run(
            [sys.executable, "-m", "benchmark.status", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    suite, folder = make_suite(tmp_path, "Gate-v0", seeds=2), tmp_path / "out"
    first = start(suite, folder, "--workers", "1")
    at_gate(folder, GATE)
    said = status()
    assert (
        "1 running, 1 waiting, 0 failed, 0 finished" in said
        and f"looked after by process {first.pid} on " in said
    )
    (row,) = (line for line in said.splitlines() if GATE in line)
    assert all(word in row for word in ("running", "2/6", "12.50 steps/s", "00:09", "-7.5"))
    (folder / "go").touch()
    assert finish(first)[0] == 0
    said = status()
    assert "0 running, 0 waiting, 0 failed, 2 finished" in said and "1.5" in said and "2.5" in said
    assert "looks after" not in said and "looked after by" not in said
