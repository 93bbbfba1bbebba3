"""Sweeps in containers, with a command `docker` that runs their words on this machine."""

import json
import os
import signal
from pathlib import Path

import pytest

from benchmark import sweep
from benchmark.store import is_held

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


GATES = ["Gate-v0__fake__1", "Gate-v0__fake__2"]
GATE = GATES[0]


@pytest.fixture
def docker(commands):
    return commands(docker=DOCKER)


def calls_of(here):
    """What docker run was called with."""
    return [json.loads(path.read_text()) for path in here.glob("*.call")]


def test_a_sweep_in_containers(lab, docker, monkeypatch):
    """Two at a time, on cores of their own; the compiler's cache is the sweep's.

    W&B's key reaches the scripts and is written nowhere.
    """
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    lab.make_suite("Gate-v0", seeds=2)
    process = lab.start_sweep("--backend", "docker", "--workers", "2")
    lab.at_gate(*GATES)
    lab.go()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(*GATES)
    calls = calls_of(docker)
    assert {call["label"] for call in calls} == {f"plainrl={name}" for name in GATES}
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert {call["cpuset_cpus"] for call in calls} == {str(core) for core in cores}
    assert "a-secret" not in json.dumps(calls)
    for name in GATES:
        environment = lab.environment(name)
        assert environment["WANDB_API_KEY"] == "a-secret"
        cache = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
        assert cache.is_relative_to(lab.out) and cache.is_dir()
    files = [path for path in lab.out.rglob("*") if path.is_file()]
    files = [path for path in files if path.name != "environment.json"]
    assert files and not any(b"a-secret" in path.read_bytes() for path in files)


def test_a_container_that_is_killed_is_resumed(lab, docker):
    lab.make_suite("Gate-v0")
    process = lab.start_sweep("--backend", "docker", "--workers", "1", "--retries", "0")
    lab.at_gate(GATE)
    lab.kill_9(GATE)
    code, said = lab.finish(process)
    assert code == 0 and f"to be resumed: {GATE}\n" in said
    lab.assert_done_once(GATE)
    assert json.loads(lab.text(GATE, "words.json")) == ["--resume", f"runs/{GATE}"]
    assert len(calls_of(docker)) == 2 and lab.job(GATE)["failures"] == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_containers_of_a_sweep_that_is_stopped_save(lab, docker, signum):
    lab.make_suite("Gate-v0")
    process = lab.start_sweep("--backend", "docker", "--workers", "1")
    lab.at_gate(GATE)
    process.send_signal(signum)
    code, _ = lab.finish(process)
    assert code == (-9 if signum == signal.SIGKILL else 143)
    lab.wait_for(lambda: not is_held(lab.store.job_lock(GATE)))
    assert lab.job(GATE)["state"] == "waiting" and lab.steps(GATE) == [1, 2, 3]
    assert lab.text(GATE, "signals.txt") == "SIGTERM\n"


def test_a_container_that_does_not_start_is_named_with_its_reason(lab, docker):
    """Docker's last line says only where there is help."""
    (docker / "broken").touch()
    lab.make_suite("Good-v0")
    code, said = lab.run_sweep("--backend", "docker", patch="sweep.PAUSE_S = 0.1")
    assert code == 2 and len(calls_of(docker)) == sweep.MISSES
    assert lab.job("Good-v0__fake__1")["failures"] == 0
    assert "error: the last 5 workers didn't come up" in said
    assert "could not select device driver" in said


def test_docker_that_fails_for_a_while_costs_no_run(lab, docker):
    (docker / "broken").touch()
    lab.make_suite("Good-v0", seeds=2)
    # No second miss before it works again
    patch = f"""
from pathlib import Path
next_runs = sweep.Sweep.next_runs
def wait(self):
    broken = self.misses and Path({str(docker / "broken")!r}).exists()
    return [] if broken else next_runs(self)
sweep.Sweep.next_runs, sweep.PAUSE_S = wait, 0
"""
    process = lab.start_sweep("--backend", "docker", "--retries", "0", patch=patch)
    lab.wait_for(lambda: calls_of(docker))
    (docker / "broken").unlink()
    assert lab.finish(process)[0] == 0
    lab.assert_done_once("Good-v0__fake__1", "Good-v0__fake__2")
    assert {job["failures"] for job in lab.jobs().values()} == {0}


def test_a_sweep_without_the_image(lab, docker):
    lab.make_suite("Good-v0")
    sentence = lab.refused(lab.start_sweep("--backend", "docker", "--image", "x"))
    assert "No such image: x:latest" in sentence and "docker build -t x" in sentence
