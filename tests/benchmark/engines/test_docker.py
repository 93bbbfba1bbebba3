"""What `docker run` is called with, and what becomes of runs whose containers end.

With a command `docker` that runs a container's words as a process of this machine. What is Docker's
own behaviour is tested with the real one, in real_engines.py.
"""

import csv
import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmark import ROOT
from benchmark.engines import EngineError
from benchmark.engines.docker import Docker, DockerFlags
from benchmark.store import Store
from benchmark.worker import STOP_S


def record(script="/scripts/ppo.py", init_from=None):
    return {"script": str(script), "args": {"init_from": init_from}, "words": []}


def make_folder(path):
    path.mkdir(parents=True)
    return str(path)


def mounts_of(words):
    """{target: whether it can be written} of a docker run, and that source is target."""
    mounts = {}
    for flag, value in zip(words, words[1:]):
        if flag == "--mount":
            (fields,) = csv.reader([value])
            kind, source, target, *mode = fields
            assert kind == "type=bind" and mode in ([], ["readonly"])
            place = target.removeprefix("target=")
            assert source.removeprefix("source=") == place
            assert place not in mounts
            mounts[place] = not mode
    return mounts


def mounts(folder, runs):
    return mounts_of(Docker(Store(folder), runs, DockerFlags(workers=1)).command("a", [0], []))


def variables_of(words):
    pairs = [value.partition("=") for flag, value in zip(words, words[1:]) if flag == "--env"]
    return {name: value for name, _, value in pairs}


@pytest.fixture(autouse=True)
def no_modules(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)


def test_a_container_sees_what_it_needs_and_no_more(tmp_path, monkeypatch):
    """Not the working folder, nor the rest of this repository, which no script needs here."""
    monkeypatch.chdir(make_folder(tmp_path / "here"))
    scripts = make_folder(tmp_path / "scripts")
    old = make_folder(tmp_path / "old" / "runs" / "one")
    runs = {"a": record(f"{scripts}/ppo.py"), "b": record(f"{scripts}/ppo.py", init_from=old)}
    assert mounts(tmp_path / "out", runs) == {
        str(ROOT / "benchmark"): False,
        scripts: False,
        old: False,
        str(tmp_path / "out"): True,
    }


def test_a_folder_inside_another_one_is_mounted_once(tmp_path):
    """But the sweep's folder, which can be written."""
    runs = {"a": record(ROOT / "ppo.py"), "b": record(tmp_path / "ppo.py")}
    assert mounts(tmp_path / "out", runs) == {
        str(ROOT): False,
        str(tmp_path): False,
        str(tmp_path / "out"): True,
    }


def test_scripts_in_the_sweeps_folder_leave_it_writable(tmp_path):
    assert mounts(tmp_path, {"a": record(tmp_path / "ppo.py")})[str(tmp_path)]


def test_a_container_finds_benchmark_and_the_users_modules(tmp_path, monkeypatch):
    """Docker refuses to mount what this machine lacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"modules:{tmp_path}/gone")
    modules = make_folder(tmp_path / "modules")
    words = Docker(Store(tmp_path / "out"), {}, DockerFlags(workers=1)).command("a", [0], [])
    paths = variables_of(words)["PYTHONPATH"].split(":")
    assert paths == [str(ROOT), modules, f"{tmp_path}/gone"]
    assert set(mounts_of(words)) == {str(ROOT / "benchmark"), modules, str(tmp_path / "out")}


@pytest.mark.parametrize("name", ["a,b", "a b", 'a"b', "a,target=/etc"])
def test_a_path_with_a_comma_or_a_quote_is_one_path(tmp_path, name):
    scripts = make_folder(tmp_path / name / "scripts")
    folder = tmp_path / name / "out"
    found = mounts(folder, {"a": record(f"{scripts}/ppo.py")})
    assert found == {str(ROOT / "benchmark"): False, scripts: False, str(folder): True}


@pytest.mark.parametrize("where", ["home", "above it", "root", "link"])
@pytest.mark.parametrize("what", ["script", "modules", "init_from", "sweep"])
def test_a_home_is_not_given_to_containers(tmp_path, monkeypatch, where, what):
    home = make_folder(tmp_path / "home" / "me")
    monkeypatch.setenv("HOME", home)
    (tmp_path / "link").symlink_to(home)
    place = {
        "home": home,
        "above it": str(tmp_path / "home"),
        "root": "/",
        "link": str(tmp_path / "link"),
    }[where]
    run = record(tmp_path / "scripts" / "ppo.py")
    folder = tmp_path / "out"
    if what == "script":
        run = record(Path(place) / "ppo.py")
    elif what == "modules":
        monkeypatch.setenv("PYTHONPATH", place)
    elif what == "init_from":
        run = record(tmp_path / "scripts" / "ppo.py", init_from=place)
    else:
        folder = Path(place)
    with pytest.raises(EngineError) as refusal:
        Docker(Store(folder), {"a": run}, DockerFlags(workers=1))
    assert f"containers would see all of {place}, which is or contains" in str(refusal.value)


def test_a_folder_in_the_home_is_given_to_containers(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    scripts = make_folder(tmp_path / "scripts")
    assert scripts in mounts(tmp_path / "out", {"a": record(f"{scripts}/ppo.py")})


def test_a_container_has_its_cores_gpus_and_memory(tmp_path):
    flags = DockerFlags(
        workers=1,
        memory_per_run="8G",
        image="mine",
        backend_arg=("--network=host", "--shm-size", "1g"),
    )
    words = Docker(Store(tmp_path), {}, flags).command("a", [3, 5], ["4", "6"])
    assert words[:2] == ["docker", "run"]
    for flag, value in {
        "--label": "plainrl=a",
        "--user": f"{os.getuid()}:{os.getgid()}",
        "--cpuset-cpus": "3,5",
        "--workdir": str(tmp_path),
        "--memory": "8G",
        "--gpus": '"device=4,6"',
    }.items():
        assert words[words.index(flag) + 1] == value
    assert int(words[words.index("--stop-timeout") + 1]) > STOP_S
    *own, image = words[words.index("--network=host") : words.index("-m")]
    assert (own, image) == (["--network=host", "--shm-size", "1g"], "mine")
    assert words[words.index("-m") :] == [
        *("-m", "benchmark.worker", str(tmp_path), "a"),
        *("--threads", "2", "--env-from-stdin"),
    ]


def test_a_container_has_no_limits_that_nobody_gave(tmp_path):
    words = Docker(Store(tmp_path), {}, DockerFlags(workers=1)).command("a", [3], [])
    assert "--memory" not in words and "--gpus" not in words
    assert words[words.index("-m") - 1] == "plainrl"


def test_docker_without_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="there is no command docker: install Docker"):
        Docker(Store(tmp_path), {}, DockerFlags(workers=1)).open()


@pytest.mark.parametrize(
    "fake, sentence",
    [
        (
            "import sys; sys.exit(f'Error response from daemon: No such image: {sys.argv[3]}')",
            "(Error response from daemon: No such image: x): `docker build -t x",
        ),
        (
            "import sys; sys.exit('Cannot connect to the Docker daemon at unix:///a.sock.')",
            "(Cannot connect to the Docker daemon at unix:///a.sock.): is Docker running?",
        ),
        ("import time; time.sleep(60)", "docker doesn't answer within"),
    ],
)
def test_docker_that_cannot_use_the_image(tmp_path, monkeypatch, commands, fake, sentence):
    commands(docker=fake)
    if "time" in fake:
        monkeypatch.setattr("benchmark.engines.ANSWER_S", 0.1)
    with pytest.raises(EngineError) as refusal:
        Docker(Store(tmp_path), {}, DockerFlags(workers=1, image="x")).open()
    assert str(refusal.value).startswith("can't use the image x") and sentence in str(refusal.value)


def test_wandbs_key_reaches_the_container_through_a_pipe_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    engine = Docker(Store(tmp_path), {}, DockerFlags(workers=1))
    assert "a-secret" not in " ".join(engine.command("a", [0], []))
    reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    engine.tell(reader)
    with reader.stdout:
        assert json.load(reader.stdout)["WANDB_API_KEY"] == "a-secret"
    reader.wait()


def test_a_docker_that_has_ended_is_told_nothing(tmp_path):
    """Its worker didn't come up, which the sweep notices."""
    process = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    process.wait()
    Docker(Store(tmp_path), {}, DockerFlags(workers=1)).tell(process)
    assert process.stdin.closed
