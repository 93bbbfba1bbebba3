"""benchmark.sweep on real engines, brought up on this machine.

`make test-engines` runs it, `make test` does not. Docker: an engine that runs already, else a
dockerd of its own (BASE_IMAGE in the environment names another base image). Slurm: slurmctld,
slurmd and munged of its own; Ray: two nodes on loopback. What is missing of Docker and Slurm is
installed by apt-get, so that takes root on Debian or Ubuntu. The smoke suite runs on each,
something is killed in its middle, and every run must end with the result that it has in a sweep
that nothing disturbs.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_sweep import FAKE, wait_for

from benchmark.suite import read_suite
from benchmark.worker import read_job

ROOT = Path(__file__).resolve().parent.parent
IMAGE = "plainrl-test"
NAMES = [run.name for run in read_suite(ROOT / "benchmark" / "suites" / "smoke.toml")]


def install(command, *packages):
    """Installs Debian's packages if they are needed and may be."""
    if not shutil.which(command):
        if os.geteuid() or not shutil.which("apt-get"):
            pytest.fail(
                f"there is no {command}, and only root on Debian or Ubuntu can have it installed "
                "here"
            )
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run(
            ["apt-get", "-qq", "install", "-y", "--no-install-recommends", *packages], check=True
        )


def ok(*command, **options):
    """Whether a command succeeds."""
    return subprocess.run(command, capture_output=True, **options).returncode == 0


def start_sweep(suite, folder, *flags):
    command = [sys.executable, "-m", "benchmark.sweep", suite, "--runs", folder, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(sweep, seconds=900):
    """Waits for a sweep, shows what it printed, returns its exit code."""
    try:
        print(sweep.communicate(timeout=seconds)[0])
    finally:
        sweep.kill()
    return sweep.returncode


def result(folder, name):
    """What a run learned and how it was evaluated."""
    checkpoint = torch.load(folder / "runs" / name / "checkpoint.pt", weights_only=True)
    return checkpoint["agent"], json.loads((folder / "runs" / name / "evaluation.json").read_text())


def assert_same_results(folder, whole):
    for name in NAMES:
        (weights, evaluation), (expected_weights, expected_evaluation) = (
            result(folder, name),
            result(whole, name),
        )
        assert evaluation == expected_evaluation, name
        assert all(torch.equal(x, expected_weights[key]) for key, x in weights.items()), name


def run_in_its_middle(folder):
    """Waits until a run of a sweep has a checkpoint of its training and isn't finished.

    Returns its name.
    """
    found = []

    def look():
        for name in NAMES:
            path = folder / "runs" / name / "checkpoint.pt"
            if (
                path.exists()
                and read_job(folder, name)["state"] == "running"
                and torch.load(path, weights_only=True)["run"]["iteration"] > 0
            ):
                found.append(name)
        return found

    wait_for(look, 300)
    return found[0]


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The smoke suite in a local sweep that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    assert finish(start_sweep("smoke", folder)) == 0
    return folder


@pytest.fixture(scope="session")
def docker(tmp_path_factory):
    """An engine, and the image of the Dockerfile."""
    install("docker", "docker.io")
    folder, engine = tmp_path_factory.mktemp("docker"), None
    if not ok("docker", "version"):
        os.environ["DOCKER_HOST"] = f"unix://{folder}/socket"
        engine = subprocess.Popen(
            [
                "dockerd",
                "--host",
                os.environ["DOCKER_HOST"],
                "--data-root",
                folder / "data",
                "--exec-root",
                folder / "exec",
                "--pidfile",
                folder / "pid",
            ]
        )
        wait_for(lambda: ok("docker", "version"))
    base = (
        ["--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}"]
        if "BASE_IMAGE" in os.environ
        else []
    )
    subprocess.run(
        ["docker", "build", "--network", "host", "--tag", IMAGE, *base, ROOT], check=True
    )
    yield
    if engine:
        engine.terminate()
        engine.wait()


SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A cluster of one node; returns its daemons by their names, as they were started."""
    install("slurmctld", "slurmctld", "slurmd", "slurm-client", "munge")
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().split(".")[0]
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(
        SLURM_CONF.format(host=host, ports=free_ports(2), folder=folder, cores=os.cpu_count())
    )
    os.environ["SLURM_CONF"] = str(conf)
    for path in (folder, *list(folder.parents)[:-2]):  # munged asks for it
        path.chmod(0o755)
    commands = {
        "munged": [
            "munged",
            "--foreground",
            "--key-file",
            folder / "key",
            "--socket",
            folder / "munge.socket",
            "--pid-file",
            folder / "munged.pid",
            "--log-file",
            folder / "munged.log",
            "--seed-file",
            folder / "seed",
            "--force",
        ],
        "slurmctld": ["slurmctld", "-D", "-c"],
        "slurmd": ["slurmd", "-D"],
    }
    daemons = {name: subprocess.Popen(command) for name, command in commands.items()}
    wait_for(
        lambda: (
            "idle"
            in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout
        )
    )
    yield daemons
    for daemon in reversed(daemons.values()):
        daemon.terminate()
        daemon.wait()


@pytest.fixture
def ray_cluster(monkeypatch):
    """Two nodes with a core each; returns the cluster and the second node."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield cluster, cluster.add_node(num_cpus=1)
    cluster.shutdown()


def test_docker_container_killed(docker, whole, tmp_path):
    sweep = start_sweep("smoke", tmp_path, "--backend", "docker", "--image", IMAGE)
    name = run_in_its_middle(tmp_path)
    container = subprocess.check_output(
        ["docker", "ps", "--quiet", "--filter", f"label=plainrl={name}"], text=True
    )
    subprocess.run(["docker", "kill", "--signal", "KILL", *container.split()], check=True)
    assert finish(sweep) == 0
    assert_same_results(tmp_path, whole)


def test_docker_sweep_killed(docker, whole, tmp_path):
    """The containers of a sweep that is gone save and end, and the next one goes on."""
    flags = "smoke", tmp_path, "--backend", "docker", "--image", IMAGE
    sweep = start_sweep(*flags)
    run_in_its_middle(tmp_path)
    sweep.kill()
    wait_for(
        lambda: (
            not subprocess.check_output(["docker", "ps", "--quiet", "--filter", "label=plainrl"])
        ),
        100,
    )
    assert finish(start_sweep(*flags)) == 0
    assert_same_results(tmp_path, whole)


def test_docker_run_and_stop(docker, tmp_path):
    """As in the README.

    Another user's files, a video without a display, a checkpoint at `docker stop`.
    """
    tmp_path.chmod(0o777)
    run = [
        "docker",
        "run",
        "--detach",
        "--user",
        "1234:1234",
        "--volume",
        f"{tmp_path}:/app/runs",
        IMAGE,
    ]
    script = [
        "ppo_continuous_action.py",
        "--env-id",
        "InvertedPendulum-v5",
        "--run-name",
        "x",
        "--no-compile",
    ]
    container = subprocess.check_output([*run, *script], text=True).strip()
    wait_for(lambda: (tmp_path / "x" / "episodes.csv").stat().st_size > 1000, 120)
    began = time.time()
    subprocess.run(["docker", "stop", container], check=True)
    print(f"docker stop took {time.time() - began:.1f} s")
    logs = subprocess.run(["docker", "logs", container], capture_output=True, text=True)
    assert "stopped at step" in logs.stdout + logs.stderr
    assert (tmp_path / "x" / "checkpoint.pt").stat().st_uid == 1234
    video = subprocess.check_output(
        [
            "docker",
            "run",
            *run[3:],
            "ppo_continuous_action.py",
            "--evaluate",
            "runs/x",
            "--eval-episodes",
            "1",
            "--capture-video",
        ],
        text=True,
    )
    assert list((tmp_path / "x" / "videos" / "evaluation").glob("*.mp4")), video


def test_slurm_node_killed(slurm, whole, tmp_path):
    """slurmd and all that it has started end at once, as when the power fails.

    Then the node comes back.
    """
    sweep = start_sweep("smoke", tmp_path, "--backend", "slurm")
    run_in_its_middle(tmp_path)
    killed = [slurm["slurmd"].pid]
    for name in NAMES:
        if (job := read_job(tmp_path, name))["state"] == "running":
            worker = job["place"].split()[-1]
            killed += map(
                int,
                subprocess.run(
                    ["ps", "-o", "ppid=", "-p", worker], capture_output=True
                ).stdout.split(),
            )
            killed += map(
                int, subprocess.run(["pgrep", "-P", worker], capture_output=True).stdout.split()
            )
            killed += [int(worker)]
    for pid in killed:
        os.kill(pid, 9)
    slurm["slurmd"].wait()
    time.sleep(20)  # slurmctld misses nothing that has run for less than BatchStartTimeout, 10 s
    slurm["slurmd"] = subprocess.Popen(["slurmd", "-D"])
    assert finish(sweep) == 0
    assert_same_results(tmp_path, whole)


def test_slurm_goes_on_without_the_sweep(slurm, tmp_path):
    """The watching sweep is killed.

    Its job goes on, and the next sweep watches it instead of submitting another.
    """
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "suite.toml").write_text(
        '[[runs]]\nscript = "fake.py"\nenv_ids = ["Good-v0"]\nseeds = 4\n'
        "flags = { total_timesteps = 60 }"
    )
    flags = tmp_path / "suite.toml", tmp_path / "out", "--backend", "slurm", "--workers", "1"
    sweep = start_sweep(*flags)
    wait_for(lambda: list((tmp_path / "out" / "runs").glob("*/steps.txt")))
    sweep.kill()
    assert finish(start_sweep(*flags)) == 0
    assert len(json.loads((tmp_path / "out" / "slurm.json").read_text())) == 1
    for path in (tmp_path / "out" / "runs").iterdir():
        assert [int(line) for line in (path / "steps.txt").read_text().split()] == list(
            range(1, 61)
        )


def test_ray_node_killed(ray_cluster, whole, tmp_path):
    cluster, node = ray_cluster
    sweep = start_sweep("smoke", tmp_path, "--backend", "ray", "--ray-address", cluster.address)
    run_in_its_middle(tmp_path)
    cluster.remove_node(node, allow_graceful=False)
    assert finish(sweep) == 0
    assert_same_results(tmp_path, whole)
