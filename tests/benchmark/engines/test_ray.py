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
