"""What all backends have: the methods of the Protocol, the flags that tyro reads."""

import inspect
import os

import pytest
import tyro

from benchmark import ROOT, engines
from benchmark.engines import ENGINES, Engine, EngineError, load
from benchmark.store import Store

METHODS = [
    name
    for name, value in vars(Engine).items()
    if inspect.isfunction(value) and value.__module__ == engines.__name__
]
MEMORY = ["docker", "slurm", "ray"]


def parse(backend, *words):
    """The dataclass of a backend's flags, as the command line gives it."""
    flags, _ = load(backend)
    return tyro.cli(flags, args=words)


def accepts(backend, *words):
    try:
        parse(backend, *words)
    except SystemExit as stop:
        assert stop.code == 2
        return False
    return True


@pytest.mark.parametrize("backend", ENGINES)
def test_a_backend_has_all_of_the_protocol(tmp_path, backend):
    flags, engine = load(backend)
    assert {"open", "room", "start", "running", "stop", "preview", "__str__"} < set(METHODS)
    for name in METHODS:
        expected = list(inspect.signature(getattr(Engine, name)).parameters)
        assert list(inspect.signature(getattr(engine, name)).parameters) == expected, name
    made = engine(Store(tmp_path), {}, flags())
    assert (made.stops_are_final, made.several_nodes) == (backend == "slurm", backend == "slurm")
    assert str(made).split()[-3:] == ["at", "a", "time"]


@pytest.mark.parametrize(
    "flag, backends",
    [
        ("--workers=2", ENGINES),
        ("--cpus-per-run=2", ENGINES),
        ("--gpus-per-run=2", ENGINES),
        ("--memory-per-run=1G", MEMORY),
        ("--image=x", ["docker"]),
        ("--backend-arg=--x", ["docker", "slurm"]),
        ("--partition=x", ["slurm"]),
        ("--account=x", ["slurm"]),
        ("--time=1:00:00", ["slurm"]),
        ("--ray-address=x", ["ray"]),
    ],
)
def test_a_flag_is_for_those_backends_that_have_it(flag, backends):
    assert {backend for backend in ENGINES if accepts(backend, flag)} == set(backends)


@pytest.mark.parametrize("backend", ["docker", "slurm"])
def test_a_backends_own_words_may_begin_with_dashes(backend):
    flags = parse(backend, "--backend-arg=--a=b", "--backend-arg=--c", "--backend-arg=two words")
    assert flags.backend_arg == ("--a=b", "--c", "two words")


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--workers=0", "--workers must be above 0"),
        ("--cpus-per-run=0", "--cpus-per-run must be above 0"),
        ("--gpus-per-run=-1", "--gpus-per-run must be 0 or above"),
        ("--gpus-per-run=nan", "--gpus-per-run must be 0 or above"),
        ("--gpus-per-run=inf", "--gpus-per-run must be 0 or above"),
        ("--gpus-per-run=0.0009", "--gpus-per-run must be 0, or 0.001 or more"),
        ("--gpus-per-run=1e-320", "--gpus-per-run must be 0, or 0.001 or more"),
        ("--gpus-per-run=1.5", "--gpus-per-run must be a whole number, or below 1 for runs that"),
    ],
)
def test_numbers_that_cannot_be_are_refused(backend, flag, sentence):
    with pytest.raises(EngineError, match=sentence):
        parse(backend, flag)


@pytest.mark.parametrize("backend", MEMORY)
@pytest.mark.parametrize("memory", ["8", "8g", "1.5G", "0G", "08G", "G", "8GB", "-8G", "8G 8G", ""])
def test_memory_that_is_none_is_refused(backend, memory):
    with pytest.raises(EngineError) as refusal:
        parse(backend, f"--memory-per-run={memory}")
    sentence = f"--memory-per-run {memory} must be a whole number with K, M, G or T"
    assert str(refusal.value) == sentence


def test_a_runs_modules_are_found_from_any_folder(tmp_path, monkeypatch):
    """Scripts run in the sweep's folder, so that a relative path would lead elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"modules::{tmp_path}/others")
    expected = [str(tmp_path), str(ROOT), f"{tmp_path}/modules", f"{tmp_path}/others"]
    assert engines.python_path().split(os.pathsep) == expected


def test_a_command_that_does_not_answer_is_no_silence_for_ever(monkeypatch):
    monkeypatch.setattr(engines, "ANSWER_S", 0.05)
    with pytest.raises(OSError, match="sleep doesn't answer within 0.05 s"):
        engines.ask(["sleep", "60"])


def test_slurms_jobs_are_left_over_for_other_backends_only(tmp_path):
    store = Store(tmp_path)
    assert engines.leftovers(store, "local") == ""
    store.slurm_jobs.write_text('{"17": ["one"], "18": []}')
    assert "`scancel 17 18` removes those that wait" in engines.leftovers(store, "local")
    assert engines.leftovers(store, "slurm") == ""
