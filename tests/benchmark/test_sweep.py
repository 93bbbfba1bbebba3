"""Whole sweeps of a fast fake script, and one of a real script."""

import os
import pty
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from processes import leaves

from benchmark import ROOT, backends, sweep
from benchmark.backends import local
from benchmark.suite import read_suite
from benchmark.sweep import progress

ONE = "Good-v0__fake__1"
GATES = [f"Gate-v0__fake__{seed}" for seed in (1, 2)]
two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="there is one core alone",
)


def test_a_sweep_does_a_suite(lab):
    """What crashes is resumed, what never works is named, and the good ones are not held up."""
    lab.make_suite("Crash-v0", "Never-v0", "BadInput-v0", "Nothing-v0", "Good-v0")
    code, said = lab.run_sweep("--retries", "2")
    assert code == 1
    assert "0 running, 0 begun, 1 waiting, 2 finished, 2 failed" in said
    assert (
        said.count("RuntimeError: [broken] at 0 (exit code 1)") == 2
    )  # as it ended, and in the end
    assert "error: a sentence on what is wrong (exit code 2)" in said
    assert "nothing came to be" in said
    assert f"curves and tables: python -m benchmark.report {lab.out}" in said
    lab.assert_done_once("Crash-v0__fake__1", ONE)
    assert lab.starts("Never-v0__fake__1") == 3


def test_a_run_that_never_began_is_an_error(lab):
    lab.make_suite("Nothing-v0")
    assert lab.run_sweep()[0] == 1


def test_a_damaged_run_is_named(lab):
    lab.make_suite("Good-v0")
    assert lab.run_sweep()[0] == 0
    (lab.out / "runs" / ONE / "config.json").write_text("{")
    code, said = lab.run_sweep()
    assert code == 2 and said.startswith("error: ") and "config.json is damaged: remove" in said
    assert lab.run_sweep("--status")[0] == 0


@pytest.mark.parametrize("code, starts", [(-9, 2), (75, 2), (1, 1), (143, 1)])
def test_how_often_a_task_is_started(lab, monkeypatch, code, starts):
    """Lost ones as often as failed ones are resumed; others once. What waits isn't running."""
    backend = local.Backend(local.Flags("suite", retries=1, workers=1), lab.suite, lab.out, {})

    def begin(name, place):
        backend.starts[name] += 1
        process = SimpleNamespace(poll=lambda: code, returncode=code)
        backend.processes[name] = (process, place)

    monkeypatch.setattr(backend, "begin", begin)
    assert backend.start(["A", "B"]) == {"A", "B"}
    assert backend.running() == {"A"}
    for _ in range(9):
        backend.running()
    assert backend.running() == set() and backend.starts == {"A": starts, "B": starts}


def test_failed_runs_are_tried_again_only_on_demand(lab):
    lab.make_suite("Crash-v0", "Good-v0")
    name = "Crash-v0__fake__1"
    assert lab.run_sweep("--retries", "0")[0] == 1
    code, said = lab.run_sweep("--retries", "0")
    assert code == 1 and lab.starts(name) == 1 and "--retry-failed" in said
    code, said = lab.run_sweep("--retries", "0", "--retry-failed")
    assert code == 0 and f"\n{name} finished" in said
    lab.assert_done_once(name, ONE)
    for flags in ([], ["--status"]):  # tells of no run that had ended before
        code, said = lab.run_sweep(*flags)
        assert code == 0 and f"{name} finished" not in said and f"{ONE} finished" not in said
    assert lab.starts(ONE) == 1


@two_cores
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_stopped_goes_on(lab, signum):
    """Its runs end with it, and none is done twice."""
    lab.make_suite("Gate-v0", "Good-v0", seeds=2)
    first = lab.start_sweep("--workers", "2")
    lab.at_gate(*GATES)
    first.send_signal(signum)
    code, said = lab.finish(first)
    assert code == (-9 if signum == signal.SIGKILL else 128 + signum)
    if signum != signal.SIGKILL:
        assert "0 running, 2 begun, 2 waiting, 0 finished, 0 failed" in said
    assert lab.run_sweep()[0] == 0
    lab.assert_done_once(*GATES, ONE)


def test_a_task_that_is_killed_is_started_again(lab):
    lab.make_suite("Gate-v0")
    process = lab.start_sweep()
    lab.at_gate(GATES[0])
    _, task = lab.pids(GATES[0])
    os.kill(task, signal.SIGKILL)
    assert lab.finish(process)[0] == 0
    lab.assert_done_once(GATES[0])


@two_cores
def test_each_run_has_cores_of_its_own(lab):
    lab.make_suite("Gate-v0", seeds=2)
    process = lab.start_sweep("--workers", "2")
    lab.at_gate(*GATES)
    lab.go()
    assert lab.finish(process)[0] == 0
    cores = sorted(os.sched_getaffinity(0))
    places = sorted(lab.text(name, "starts.txt").strip() for name in GATES)
    assert places == [f"[{core}] 1" for core in cores[:2]]


@two_cores
def test_two_runs_share_a_gpu(lab):
    lab.make_suite("Gate-v0", seeds=2)
    flags = ("--gpus-per-run", "0.5", "--workers", "2")
    process = lab.start_sweep(*flags, CUDA_VISIBLE_DEVICES="7")
    lab.at_gate(*GATES)
    lab.go()
    assert lab.finish(process)[0] == 0
    assert [lab.environment(name)["CUDA_VISIBLE_DEVICES"] for name in GATES] == ["7", "7"]
    code, said = lab.run_sweep("--gpus-per-run", "2", CUDA_VISIBLE_DEVICES="7")
    assert code == 2 and "don't fit on" in said and "1 GPUs" in said


def test_without_gpus_of_its_own_a_run_sees_none(lab):
    lab.make_suite("Good-v0")
    assert lab.run_sweep(CUDA_VISIBLE_DEVICES="7")[0] == 0
    assert lab.environment(ONE)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_second_sweep_of_a_folder_is_refused(lab):
    lab.make_suite("Gate-v0")
    first = lab.start_sweep()
    lab.at_gate(GATES[0])
    code, said = lab.run_sweep()
    assert code == 2 and said == f"error: another sweep has {lab.out}\n"
    code, said = lab.run_sweep("--status")
    assert code == 0 and "1 running, 0 begun" in said and "2/6" in said and "steps/s" in said
    first.terminate()
    lab.finish(first)
    assert "0 running, 1 begun" in lab.run_sweep("--status")[1]
    lab.go()
    assert lab.run_sweep()[0] == 0


def test_the_status_of_a_folder_writes_nothing(lab):
    lab.make_suite("Good-v0")
    code, said = lab.run_sweep("--status")
    assert code == 0 and "1 waiting" in said and not lab.out.exists()
    lock = lab.out / "logs" / f"{ONE}.lock"
    lock.mkdir(parents=True)  # as unreadable as another user's
    assert "1 waiting" in lab.run_sweep("--status")[1]


def test_a_run_that_was_made_with_other_flags_is_refused(lab):
    lab.make_suite("Good-v0")
    assert lab.run_sweep()[0] == 0
    lab.write_suite('env_ids = ["Good-v0"]\nseeds = 1\nflags = { total_timesteps = 9 }')
    code, said = lab.run_sweep()
    assert code == 2 and f"{ONE} was made with another total_timesteps: choose" in said


def test_a_dry_run_starts_nothing(lab):
    lab.make_suite("Good-v0", seeds=2)
    code, said = lab.run_sweep("--dry-run")
    assert code == 0 and not lab.out.exists()
    words = f"-m benchmark.task {lab.suite} Good-v0__fake__2 --dir {lab.out} --retries 1"
    assert said.splitlines()[1] == f"waiting {sys.executable} {words}"


def test_on_a_terminal_there_is_a_live_table(lab):
    lab.make_suite("Gate-v0", "Good-v0")
    ours, its = pty.openpty()
    words = [sys.executable, "-m", "benchmark.sweep", lab.suite, "--dir", lab.out]
    env = os.environ | {"COLUMNS": "200", "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(words, cwd=ROOT, stdout=its, stderr=its, env=env)
    lab.processes.append(process)
    os.close(its)
    lab.at_gate(GATES[0])
    said = b""
    try:
        while data := os.read(ours, 65536):
            said += data
            if b"2/6" in said and b"1 running" in said:
                lab.go()
    except OSError:  # the terminal's other side is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    said = said.decode()
    assert "1 running" in said and "steps/s" in said and "-7.5" in said
    assert "0 running, 0 begun, 0 waiting, 2 finished, 0 failed" in said


def test_elsewhere_there_is_a_line_when_a_run_has_changed(tmp_path, capsys):
    screen = sweep.Screen(tmp_path, {"a": 1, "b": 1})
    for state in ("waiting", "waiting", "running", "running", "finished"):
        screen.states = {"a": state, "b": "waiting"}
        screen.show()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines] == ["0 running", "1 running", "0 running"]


def test_progress_is_read_from_the_last_whole_rows(tmp_path):
    assert progress(tmp_path, 100) is None
    header = "global_step,wall_seconds,env,return,length,ended_by\n"
    (tmp_path / "episodes.csv").write_text(header)
    assert progress(tmp_path, 100) is None
    rows = "13,1\n20,4.0,0,3.0,20,termination\n40,8.0,0,5.0,20,termination\n6"
    (tmp_path / "episodes.csv").write_text(header + rows)
    assert progress(tmp_path, 100) == (40, 5.0, 12.0, 4.0)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--workers", "0"], "--workers must be above 0"),
        (["--cpus-per-run", "0"], "--cpus-per-run must be above 0"),
        (["--cpus-per-run", "9999"], "don't fit on"),
        (["--retries", "-1"], "--retries"),
        (["--gpus-per-run", "nan"], "--gpus-per-run"),
        (["--dir", "/proc/x"], "can't be the folder of a sweep"),
        (["--dir", "/dev/null"], "can't be the folder of a sweep"),
        (["--backend", "cloud"], "--backend must be one of local, docker, slurm, ray"),
    ],
)
def test_bad_flags_are_refused_in_one_sentence(lab, monkeypatch, capsys, flags, sentence):
    lab.make_suite("Good-v0")
    monkeypatch.setattr(sys, "argv", ["sweep", str(lab.suite), "--dir", str(lab.out), *flags])
    with pytest.raises(SystemExit, match="2"):
        sweep.main()
    said = capsys.readouterr()
    assert sentence in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_suite_that_is_none_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sweep", "no_such_suite"])
    with pytest.raises(SystemExit, match="2"):
        sweep.main()
    said = capsys.readouterr().err
    assert "no suite no_such_suite; known are atari_breakout, " in said and "smoke" in said


@pytest.mark.parametrize("name", backends.NAMES)
def test_a_backend_has_flags_of_its_own(monkeypatch, capsys, name):
    """They are in its --help, and no other backend takes them."""
    monkeypatch.setattr(sys, "argv", ["sweep", "--help", f"--backend={name}"])
    with pytest.raises(SystemExit, match="0"):
        sweep.read_flags()
    said = capsys.readouterr().out
    own = {"--image": "docker", "--partition": "slurm", "--ray-address": "ray"}
    assert "--dry-run" in said
    assert [flag in said for flag in own] == [name == backend for backend in own.values()]


def test_a_docker_command(lab, monkeypatch):
    """What a container sees, and what only its environment may tell."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", str(lab.folder / "modules"))
    (lab.folder / "modules").mkdir()
    lab.make_suite("Good-v0")
    from benchmark.backends import docker

    flags = docker.Flags(str(lab.suite), dry_run=True, workers=1, memory_per_run="2g")
    backend = docker.Backend(flags, lab.suite, lab.out, read_suite(lab.suite))
    words = backend.preview(ONE)
    core = min(os.sched_getaffinity(0))
    assert words[words.index("--cpuset-cpus") + 1] == str(core)
    assert words[words.index("--memory") + 1] == "2g"
    assert "WANDB_API_KEY" in words and "secret" not in " ".join(words)
    mounts = [word for before, word in zip(words, words[1:]) if before == "--mount"]
    sources = [word.split('","')[1].removeprefix("source=") for word in mounts]
    assert set(sources) == {str(lab.folder), str(ROOT / "benchmark"), str(lab.out)}
    assert [word.endswith('"readonly"') for word in mounts] == [True, True, False]
    image = words.index("plainrl")
    assert words[image + 1 : image + 3] == ["-m", "benchmark.task"]


def test_a_home_folder_is_not_shown_to_containers(lab, monkeypatch):
    from benchmark.backends import docker

    lab.make_suite("Good-v0")
    monkeypatch.setenv("HOME", str(lab.folder / "me"))
    flags = docker.Flags(str(lab.suite), dry_run=True)
    with pytest.raises(backends.BackendError, match="containers would see all of"):
        docker.Backend(flags, lab.suite, lab.out, read_suite(lab.suite))


def test_a_real_run_that_is_killed_in_a_sweep_has_the_bits_of_one_that_is_not(lab):
    lab.suite.write_text(
        '[[runs]]\nscript = "ppo"\nenv_ids = ["CartPole-v1"]\nseeds = 1\n'
        "flags = { total_timesteps = 4096, compile = false, checkpoint_interval = 1 }\n"
    )
    name = "CartPole-v1__ppo__1"
    results = []
    for kill in (False, True):
        folder = lab.folder / str(kill)
        words = ["-m", "benchmark.sweep", lab.suite, "--dir", folder]
        process = lab.start(*words)
        run_dir = folder / "runs" / name
        if kill:
            lab.wait_for(lambda: (run_dir / "checkpoint.pt").exists())
            first = (run_dir / "checkpoint.pt").stat().st_mtime
            lab.wait_for(lambda: (run_dir / "checkpoint.pt").stat().st_mtime != first)
            process.kill()
            process.communicate()
            assert not (run_dir / "evaluation.json").exists()
            process = lab.start(*words)
        assert lab.finish(process)[0] == 0
        saved = torch.load(run_dir / "checkpoint.pt", weights_only=True)
        results.append((leaves(saved["agent"]), (run_dir / "evaluation.json").read_text()))
    assert repr(results[0]) == repr(results[1])
