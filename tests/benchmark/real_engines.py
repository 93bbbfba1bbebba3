"""benchmark.sweep on real engines, brought up on this machine.

`make test-engines` runs it, `make test` does not. Docker: an engine that answers already, else a
dockerd of its own (BASE_IMAGE in the environment names another base image). Slurm: slurmctld,
slurmd and munged of its own; Ray: two nodes on loopback. What is missing of Docker and Slurm is
installed by apt-get, so that takes root on Debian or Ubuntu. The smoke suite runs on each,
something is killed in its middle, and every run must end with the result that it has in a sweep
that nothing disturbs. What is the engines' own behaviour and not ours, such as how they read an odd
path, a fast fake script shows.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import differences, load_checkpoint

from benchmark.suite import read_suite
from benchmark.task import read_evaluation

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "plainrl-test"
DOCKER = ("--backend", "docker", "--image", IMAGE)
NAMES = list(read_suite(ROOT / "benchmark" / "suites" / "smoke.toml"))
GATES = [f"Gate-v0__fake__{seed}" for seed in (1, 2)]
ODD = 'it\'s a, "b" %j'  # commas and quotes matter to Docker's CSV, % and quotes to sbatch


def install(command, *packages):
    """Installs Debian's packages if a command is missing and they may be."""
    if shutil.which(command):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.fail(
            f"there is no {command}, and only root on Debian or Ubuntu can have it installed here"
        )
    apt = ["apt-get", "-qq"]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "install", "-y", "--no-install-recommends", *packages], check=True)


def output(*command):
    """What a command prints; "" where it fails or isn't there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def docker_answers():
    """Whether there is an engine: a command docker alone is none."""
    return output("docker", "version", "--format", "{{.Server.Version}}").strip() != ""


def wait_for(condition, seconds=60):
    """Waits until condition() is true; what isn't there yet is not."""
    end = time.time() + seconds
    while time.time() < end:
        try:
            if condition():
                return
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail("waited in vain")


def start_smoke(folder, *flags):
    """Starts a sweep of the smoke suite."""
    command = [sys.executable, "-m", "benchmark.sweep", "smoke", "--dir", folder, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(sweep):
    """Waits for a sweep, shows what it printed, returns its exit code."""
    try:
        print(sweep.communicate(timeout=900)[0])
    finally:
        sweep.kill()
    return sweep.returncode


def result(folder, name):
    """What a run learned and how it was evaluated: (state dict, returns)."""
    run_dir = folder / "runs" / name
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    return checkpoint["agent"], read_evaluation(run_dir)


def assert_same_results(folder, whole):
    for name in NAMES:
        weights, returns = result(folder, name)
        expected_weights, expected_returns = result(whole, name)
        assert returns == expected_returns, name
        assert all(torch.equal(x, expected_weights[key]) for key, x in weights.items()), name


def run_in_its_middle(folder):
    """Waits for a run that has learned something and is not finished; returns its name."""
    found = []

    def look():
        for name in NAMES:
            path = folder / "runs" / name / "checkpoint.pt"
            if path.exists() and read_evaluation(path.parent) is None:
                if torch.load(path, weights_only=True)["run"]["iteration"] > 0:
                    found.append(name)
        return found

    wait_for(look, 300)
    return found[0]


@pytest.fixture
def odd_lab(lab):
    """A lab with the fake script, in a folder of an odd name."""
    folder = lab.folder / ODD
    folder.mkdir()
    odd = type(lab)(folder)
    yield odd
    odd.close()


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The smoke suite in a local sweep that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    assert finish(start_smoke(folder)) == 0
    return folder


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory):
    """An engine that answers already, else a dockerd of its own."""
    install("docker", "docker.io")
    if docker_answers():
        yield
        return
    install("dockerd", "docker.io")
    folder = tmp_path_factory.mktemp("docker")
    os.environ["DOCKER_HOST"] = f"unix://{folder}/socket"
    words = ["dockerd", "--host", os.environ["DOCKER_HOST"], "--data-root", folder / "data"]
    words += ["--exec-root", folder / "exec", "--pidfile", folder / "pid"]
    # This machine's network stays as it is
    words += ["--bridge=none", "--iptables=false", "--ip6tables=false"]
    words += ["--ip-forward=false", "--ip-masq=false"]
    engine = subprocess.Popen(words)
    wait_for(docker_answers)
    yield
    engine.terminate()
    engine.wait()


@pytest.fixture(scope="session")
def docker(docker_engine):
    """The image of the Dockerfile."""
    base = []
    if "BASE_IMAGE" in os.environ:
        base = ["--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}"]
    build = ["docker", "build", "--network", "host", "--tag", IMAGE, *base, ROOT]
    subprocess.run(build, check=True)


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


def munged(folder):
    """The words that start munge in a folder, with a key of its own."""
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (folder, *list(folder.parents)[:-2]):  # munged asks for it
        path.chmod(0o755)
    words = ["munged", "--foreground", "--force", "--key-file", key]
    words += ["--socket", folder / "munge.socket", "--pid-file", folder / "munged.pid"]
    return [*words, "--log-file", folder / "munged.log", "--seed-file", folder / "seed"]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A cluster of one node; returns its daemons by their names, as they were started."""
    install("slurmctld", "slurmctld", "slurmd", "slurm-client", "munge")
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(
        SLURM_CONF.format(host=host, ports=free_ports(2), folder=folder, cores=os.cpu_count())
    )
    os.environ["SLURM_CONF"] = str(conf)
    commands = {
        "munged": munged(folder),
        "slurmctld": ["slurmctld", "-D", "-c"],
        "slurmd": ["slurmd", "-D"],
    }
    daemons = {name: subprocess.Popen(command) for name, command in commands.items()}
    wait_for(lambda: "idle" in output("sinfo", "-h", "-o", "%T"))
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


def containers_of(label):
    return output("docker", "ps", "--quiet", "--filter", f"label={label}").split()


def test_docker_container_killed(docker, whole, tmp_path):
    sweep = start_smoke(tmp_path, *DOCKER)
    name = run_in_its_middle(tmp_path)
    (container,) = containers_of(f"plainrl={name}")
    subprocess.run(["docker", "kill", "--signal", "KILL", container], check=True)
    assert finish(sweep) == 0
    assert_same_results(tmp_path, whole)


def test_docker_sweep_killed(docker, whole, tmp_path):
    """The containers of a sweep that is gone save and end, and the next one goes on."""
    sweep = start_smoke(tmp_path, *DOCKER)
    run_in_its_middle(tmp_path)
    sweep.kill()
    wait_for(lambda: not containers_of("plainrl"), 100)
    assert finish(start_smoke(tmp_path, *DOCKER)) == 0
    assert_same_results(tmp_path, whole)


def test_docker_in_a_folder_of_an_odd_name(docker, odd_lab):
    """Scripts, the sweep, and modules that PYTHONPATH names."""
    odd_lab.make_suite("Good-v0", seeds=2)
    code, said = odd_lab.run_sweep(*DOCKER)
    assert code == 0, said
    odd_lab.assert_done_once("Good-v0__fake__1", "Good-v0__fake__2")


def test_docker_run_and_stop(docker, tmp_path):
    """As in the README.

    Another user's files, a video without a display, a checkpoint at `docker stop`.
    """
    tmp_path.chmod(0o777)
    run = ["--user", "1234:1234", "--volume", f"{tmp_path}:/app/runs", IMAGE]
    run.append("ppo_continuous_action.py")
    flags = ["--env-id", "InvertedPendulum-v5", "--run-name", "x", "--no-compile"]
    container = output("docker", "run", "--detach", *run, *flags).strip()
    wait_for(lambda: (tmp_path / "x" / "episodes.csv").stat().st_size > 1000, 120)
    began = time.time()
    subprocess.run(["docker", "stop", container], check=True)
    print(f"docker stop took {time.time() - began:.1f} s")
    logs = subprocess.run(["docker", "logs", container], capture_output=True, text=True)
    assert "stopped at step" in logs.stdout + logs.stderr
    assert (tmp_path / "x" / "checkpoint.pt").stat().st_uid == 1234
    flags = ["--evaluate", "runs/x", "--eval-episodes", "1", "--capture-video"]
    video = output("docker", "run", *run, *flags)
    assert list((tmp_path / "x" / "videos").rglob("*.mp4")), video


def slurm_tasks(tmp_path):
    """The process ids of all that Slurm has started for a sweep's folder, scripts included."""
    pids = []
    for pid in output("pgrep", "-f", f"submitit.core._submit {tmp_path}|slurmstepd").split():
        pids += [pid, *output("pgrep", "-P", pid).split()]
    return sorted(set(map(int, pids)))


def test_slurm_node_killed(slurm, whole, tmp_path):
    """slurmd and all that it has started end at once, as when the power fails.

    Then the node comes back.
    """
    sweep = start_smoke(tmp_path, "--backend", "slurm")
    run_in_its_middle(tmp_path)
    for pid in [slurm["slurmd"].pid, *slurm_tasks(tmp_path)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # with its parent
            pass
    slurm["slurmd"].wait()
    time.sleep(20)  # slurmctld misses nothing that has run for less than BatchStartTimeout, 10 s
    slurm["slurmd"] = subprocess.Popen(["slurmd", "-D"])
    assert finish(sweep) == 0
    assert_same_results(tmp_path, whole)


def test_slurm_goes_on_without_the_sweep(slurm, lab):
    """The watching sweep is killed.

    Its job goes on, and the next sweep watches it instead of submitting another.
    """
    lab.make_suite("Gate-v0", seeds=2)
    sweep = lab.start_sweep("--backend", "slurm", "--workers", "1")
    lab.at_gate(GATES[0])
    sweep.kill()
    sweep = lab.start_sweep("--backend", "slurm", "--workers", "1")
    assert "1 begun, 1 waiting" in sweep.stdout.readline()
    assert "watching the jobs" in sweep.stdout.readline()
    lab.go()
    assert lab.finish(sweep)[0] == 0
    lab.assert_done_once(*GATES)
    assert len(list((lab.out / "slurm").glob("*_submission.sh"))) == 1


def test_slurm_time_limit(slurm, lab):
    """A run is saved before it, and goes on in the same job."""
    lab.make_suite("Gate-v0")
    sweep = lab.start_sweep("--backend", "slurm", "--minutes", "3")
    lab.at_gate(GATES[0])
    code, said = lab.finish(sweep, timeout=400)
    assert code == 0, said
    lab.assert_done_once(GATES[0])
    assert lab.starts(GATES[0]) == 2


def test_slurm_in_a_folder_of_an_odd_name(slurm, odd_lab):
    odd_lab.make_suite("Good-v0", seeds=2)
    code, said = odd_lab.run_sweep("--backend", "slurm")
    assert code == 0, said
    odd_lab.assert_done_once("Good-v0__fake__1", "Good-v0__fake__2")


def test_slurm_scancel_lets_a_run_save(slurm, lab):
    lab.make_suite("Gate-v0", seeds=2)
    sweep = lab.start_sweep("--backend", "slurm")
    lab.at_gate(*GATES)
    task = output("squeue", "--noheader", "--array", "--format=%F_%K").split()[0]
    subprocess.run(["scancel", task], check=True)
    lab.wait_for(lambda: "3" in [lab.text(name, "checkpoint.pt") for name in GATES])
    lab.go()
    code, said = lab.finish(sweep)
    assert code == 1 and "1 begun" in said
    assert lab.run_sweep("--backend", "slurm")[0] == 0
    lab.assert_done_once(*GATES)


SLOW = """
import time

import gymnasium as gym
from gymnasium.envs.classic_control.pendulum import PendulumEnv


class Slow(PendulumEnv):
    def step(self, action):
        time.sleep(0.005)
        return super().step(action)


gym.register("Slow-v0", Slow, max_episode_steps=60)
"""


def test_ray_node_killed_in_mid_rollout(ray_cluster, tmp_path):
    """Its worker plays again on the other node; the bits are those of a run of its own Ray."""
    cluster, node = ray_cluster
    (tmp_path / "my_slow.py").write_text(SLOW)
    flags = "--env-id my_slow:Slow-v0 --no-compile --num-envs 4 --num-steps 50 --num-minibatches 4"
    flags += " --total-timesteps 2400 --eval-episodes 1 --checkpoint-interval 2"
    command = [sys.executable, ROOT / "ppo_continuous_action_ray.py", *flags.split()]
    command += ["--cpus-per-worker", "0.5", "--run-name"]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "alone"], cwd=tmp_path, env=env, check=True)
    words = ["killed", "--address", cluster.address]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *words], cwd=tmp_path, env=env, stdout=file, stderr=file
        )
    checkpoint = tmp_path / "runs/killed/checkpoint.pt"
    wait_for(lambda: checkpoint.exists() and load_checkpoint(checkpoint.parent)["run"]["iteration"])
    cluster.remove_node(node, allow_graceful=False)
    assert process.wait() == 0
    assert "the task will be retried" in log.read_text()
    assert differences(tmp_path / "runs/alone", tmp_path / "runs/killed") == []


def test_ray_node_killed(ray_cluster, whole, tmp_path):
    cluster, node = ray_cluster
    sweep = start_smoke(tmp_path, "--backend", "ray", "--ray-address", cluster.address)
    run_in_its_middle(tmp_path)
    cluster.remove_node(node, allow_graceful=False)
    assert finish(sweep) == 0
    assert_same_results(tmp_path, whole)
