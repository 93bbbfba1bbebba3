"""Ray where it isn't installed, and what a task is given. The rest takes the real one."""

import socket
import sys
import types

import pytest

from benchmark.engines import EngineError, ray
from benchmark.engines.ray import Ray, RayFlags
from benchmark.store import Store


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.make_folders()
    return store


def test_ray_that_is_not_installed(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match="Ray isn't installed: `pip install -r requirements-"):
        Ray(store, {}, RayFlags()).open()


def test_a_cluster_that_nobody_answers_for_is_refused_at_once(store, monkeypatch):
    """Ray itself tries for minutes."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(EngineError, match=f"can't reach a Ray cluster at {address}: "):
        Ray(store, {}, RayFlags(ray_address=address)).open()


@pytest.mark.parametrize("address, expected", [(None, False), ("auto", True)])
def test_several_nodes_are_those_of_a_cluster(store, address, expected):
    assert Ray(store, {}, RayFlags(ray_address=address)).several_nodes == expected


@pytest.mark.parametrize(
    "memory, number",
    [("1K", 1024), ("500M", 500 * 1024**2), ("8G", 8 * 1024**3), ("10T", 10 * 1024**4)],
)
def test_memory_in_bytes(memory, number):
    assert ray.parse_bytes(memory) == number


def test_a_task_runs_a_worker(store):
    """With the sweep's variables; its output is in the run's log, after what is there."""
    store.log_file("a").write_text("before\n")
    work = ray.make_task()
    work(["sh", "-c", "echo $X; echo wrong >&2"], {"X": "told"}, str(store.log_file("a")))
    assert store.log_file("a").read_text() == "before\ntold\nwrong\n"


def test_room_is_what_the_workers_leave(store):
    engine = Ray(store, {}, RayFlags(workers=2))
    engine.refs = {"a": 0}
    assert engine.room() == 1
    assert Ray(store, {}, RayFlags()).room() > 10**6


class Cluster:
    """What Ray says of tasks: those in ended have ended, and cancel() ends those that obey."""

    def __init__(self, obeys=True):
        self.ended = set()
        self.cancelled = []
        self.obeys = obeys

    def wait(self, refs, *, num_returns=1, timeout=None):
        assert timeout == 0
        done = [ref for ref in refs if ref in self.ended][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def cancel(self, ref):
        self.cancelled.append(ref)
        if self.obeys:
            self.ended.add(ref)


@pytest.fixture
def engine(store):
    engine = Ray(store, {}, RayFlags(workers=3))
    engine.ray = Cluster()
    engine.refs = {"a": 1, "b": 2, "c": 3}
    return engine


def test_tasks_that_have_ended_are_no_longer_running(engine):
    """All of them at once."""
    assert engine.running() == {"a", "b", "c"} and engine.room() == 0
    engine.ray.ended = {1, 2}
    assert engine.running() == {"c"} and engine.room() == 2
    engine.ray.ended = {1, 2, 3}
    assert engine.running() == set() and engine.running() == set()


@pytest.mark.parametrize("obeys, left", [(True, {}), (False, {"b": 2, "c": 3})])
def test_a_stop_cancels_what_runs(engine, monkeypatch, obeys, left):
    """And waits for its end, not for ever."""
    if not obeys:
        monkeypatch.setattr(ray, "GONE_S", 0)
    engine.ray.ended = {1}
    engine.ray.obeys = obeys
    assert engine.running() == {"b", "c"}
    assert engine.stop() == "stopped; the same command goes on"
    assert engine.ray.cancelled == [2, 3] and engine.refs == left
