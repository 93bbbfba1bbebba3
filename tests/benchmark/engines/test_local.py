"""Processes of this machine, and how its cores and GPUs are divided among them."""

import os

import pytest

from benchmark.engines import EngineError, local
from benchmark.engines.local import Local, LocalFlags
from benchmark.store import Store

NVIDIA_SMI = """
import sys
assert sys.argv[1:] == ["--list-gpus"]
print((here / "gpus").read_text(), end="")
"""


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.make_folders()
    return store


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
def test_gpus_are_divided_among_runs(monkeypatch, gpus_per_run, workers, expected):
    monkeypatch.setattr(local, "usable_cores", lambda: [0, 2, 3, 5, 8, 9])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    places = local.divide(LocalFlags(workers=workers, gpus_per_run=gpus_per_run))
    assert [gpus for _, gpus in places] == expected
    cores = [0, 2, 3, 5, 8, 9][: len(expected)]
    assert [cores for cores, _ in places] == [[core] for core in cores]


@pytest.mark.parametrize(
    "cpus_per_run, workers, expected",
    [(1, 2, [[0], [2]]), (2, None, [[0, 2], [3, 5]]), (3, None, [[0, 2, 3]]), (2, 1, [[0, 2]])],
)
def test_cores_are_divided_among_runs(monkeypatch, cpus_per_run, workers, expected):
    monkeypatch.setattr(local, "usable_cores", lambda: [0, 2, 3, 5, 8])
    places = local.divide(LocalFlags(workers=workers, cpus_per_run=cpus_per_run))
    assert places == [(cores, []) for cores in expected]


@pytest.mark.parametrize(
    "visible, gpus_per_run, workers, sentence",
    [
        ("4,5", 3, None, "1 workers with 3 GPUs each don't fit on 2 GPUs"),
        ("4,5", 1, 3, "3 workers with 1 GPUs each don't fit on 2 GPUs"),
        ("", 1, None, "1 workers with 1 GPUs each don't fit on 0 GPUs"),
        ("4,5", 0.5, 5, "5 workers with 0.5 GPUs each don't fit on 2 GPUs"),
        ("4,5", 0, 7, "7 workers with 1 cores each don't fit on 6 cores"),
    ],
)
def test_runs_that_do_not_fit_are_refused(
    monkeypatch, store, visible, gpus_per_run, workers, sentence
):
    monkeypatch.setattr(local, "usable_cores", lambda: list(range(6)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EngineError) as refusal:
        Local(store, {}, LocalFlags(workers=workers, gpus_per_run=gpus_per_run))
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    "listed, expected",
    [
        ("GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n", ["0", "1"]),
        (
            "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g.10gb  Device 0: (UUID: MIG-1)\n"
            "GPU 1: NVIDIA H100 (UUID: GPU-2)\n",
            ["0", "1"],
        ),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
    ],
)
def test_gpus_of_a_machine(monkeypatch, commands, listed, expected):
    here = commands(nvidia_smi=NVIDIA_SMI)
    (here / "gpus").write_text(listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.usable_gpus() == expected


def test_a_driver_that_hangs_has_no_gpus(monkeypatch, commands, capsys):
    commands(nvidia_smi="import time\ntime.sleep(60)")
    monkeypatch.setattr("benchmark.engines.ANSWER_S", 0.1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.usable_gpus() == []
    assert capsys.readouterr().err == "no GPUs: nvidia-smi doesn't answer within 0.1 s\n"


@pytest.mark.parametrize(
    "visible, expected", [("3,GPU-7", ["3", "GPU-7"]), ("", []), ("-1", []), (None, [])]
)
def test_gpus_that_the_user_chose(monkeypatch, visible, expected):
    """None: no variable, and no nvidia-smi either."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", "")
    assert local.usable_gpus() == expected


def test_gpus_that_stay_unused_are_named(monkeypatch, store):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert str(Local(store, {}, LocalFlags(workers=1))) == (
        "1 at a time (2 GPUs stay unused: --gpus-per-run)"
    )
    assert str(Local(store, {}, LocalFlags(workers=1, gpus_per_run=1))) == "1 at a time"


@pytest.mark.parametrize("gpus_per_run, expected", [(0, "\n"), (1, "5\n")])
def test_a_worker_sees_its_gpus_alone(monkeypatch, store, lab, gpus_per_run, expected):
    """And it finds benchmark/, and its output is in the run's log."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    engine = Local(store, {}, LocalFlags(workers=1, gpus_per_run=gpus_per_run))
    script = 'cd /; echo "$CUDA_VISIBLE_DEVICES"; python -c "import benchmark.store" || echo lost'
    monkeypatch.setattr(engine, "command", lambda *_: ["bash", "-c", script])
    engine.start(["a"])
    lab.wait_for(lambda: not engine.running())
    assert store.log_file("a").read_text() == expected


def test_a_workers_command(store):
    engine = Local(store, {}, LocalFlags(workers=1))
    (cores, gpus) = engine.free[0]
    words = engine.command("a", cores, gpus)
    assert words[1:] == [
        *("-m", "benchmark.worker", str(store.folder), "a"),
        *("--threads", "1", "--cores", str(cores[0])),
    ]
    assert engine.preview(["a", "b"]).split() == words


def test_a_disk_that_is_full_for_a_while_costs_no_core(monkeypatch, store, lab):
    engine = Local(store, {}, LocalFlags(workers=1))
    monkeypatch.setattr(engine, "command", lambda *_: ["true"])
    store.log_file("a").parent.rmdir()
    for _ in range(3):
        with pytest.raises(OSError):
            engine.start(["a"])
    assert engine.room() == 1 and not engine.running()
    store.log_file("a").parent.mkdir()
    engine.start(["a"])
    assert engine.room() == 0
    lab.wait_for(lambda: not engine.running())
    assert engine.room() == 1


def test_a_start_that_fails_halfway_costs_no_core(monkeypatch, store):
    """What had begun runs, and stop() ends it."""
    monkeypatch.setattr(local, "usable_cores", lambda: [0, 1])
    store.log_file("b").mkdir()
    engine = Local(store, {}, LocalFlags(workers=2))
    monkeypatch.setattr(engine, "command", lambda *_: ["sleep", "60"])
    with pytest.raises(IsADirectoryError):
        engine.start(["a", "b"])
    assert engine.running() == {"a"} and engine.room() == 1
    process, _ = engine.processes["a"]
    assert engine.stop() == "stopped; the same command goes on"
    assert process.returncode == -15
    assert engine.room() == 2


def test_ctrl_c_in_the_terminal_is_for_the_sweep_alone(monkeypatch, store):
    """It stops its workers as is right for them."""
    engine = Local(store, {}, LocalFlags(workers=1))
    monkeypatch.setattr(engine, "command", lambda *_: ["sleep", "60"])
    engine.start(["a"])
    process, _ = engine.processes["a"]
    group = os.getpgid(process.pid)
    engine.stop()
    assert group == process.pid


def test_a_worker_that_does_not_stop_is_killed(monkeypatch, store, lab):
    monkeypatch.setattr(local, "GONE_S", 0)
    engine = Local(store, {}, LocalFlags(workers=1))
    script = "trap '' TERM; echo up; while true; do sleep 0.05; done"
    monkeypatch.setattr(engine, "command", lambda *_: ["bash", "-c", script])
    engine.start(["a"])
    lab.wait_for(lambda: store.log_file("a").read_text() == "up\n")
    process, _ = engine.processes["a"]
    engine.stop()
    assert process.wait(30) == -9
