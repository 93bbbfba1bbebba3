"""ppo_atari_multigpu.py: several processes learn what one would, and end together.

What it shares with ppo_atari_vector.py, letter for letter, is tested there.
"""

import ctypes
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import (
    RUN,
    assert_fails,
    differences,
    episode_rows,
    events,
    load_checkpoint,
    outcome,
    variables,
)
from test_ppo_atari_vector import META, fake_games, run_on_meta
from torch import distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

import ppo_atari_multigpu as ppo

SCRIPT = Path(ppo.__file__)
FLAGS = (
    "--env-id BreakoutNoFrameskip-v4 --run-name run --no-compile --num-threads 1 --num-envs 4"
    " --num-steps 16 --num-minibatches 2 --update-epochs 2 --total-timesteps 640"
    " --eval-episodes 1 --eval-interval 8 --checkpoint-interval 2 --seed 3"
    " --learning-rate 2.5e-5 --no-anneal-lr"
)  # 10 iterations


ENV = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "RANK": 0, "WORLD_SIZE": 2}


def start(server, cwd, flags, processes, script=SCRIPT):
    """Starts processes as torchrun starts them, each on a machine of its own: forks, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cwd.mkdir(exist_ok=True)
    env = ENV | {"MASTER_PORT": port, "WORLD_SIZE": processes, "LOCAL_RANK": 0}
    return [server.start(script, cwd, flags, **(env | {"RANK": i})) for i in range(processes)]


def run(server, cwd, flags, processes):
    """Runs them to an end that must be good; returns what each printed."""
    results = [fork.wait() for fork in start(server, cwd, flags, processes)]
    assert [result.returncode for result in results] == [0] * processes, results
    return [result.stdout for result in results]


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    """{number of processes: the folder of a run}; what they printed is in said.txt."""
    folders = {}
    for processes in (1, 2):
        cwd = tmp_path_factory.mktemp(f"processes-{processes}")
        said = run(server, cwd, FLAGS, processes)
        (cwd / "said.txt").write_text("\n".join(said[1:]))
        folders[processes] = cwd / RUN
    return folders


def flat(weights):
    return torch.cat([x.flatten() for x in weights.values()])


def test_x2_two_processes_learn_what_one_does(runs):
    """But for rounding, which Adam makes large where a gradient is almost 0; games to the bit."""
    one, two = (load_checkpoint(runs[processes]) for processes in (1, 2))
    torch.manual_seed(3)
    begin = flat(ppo.Agent(4).state_dict())
    change = flat(one["agent"]) - begin
    difference = flat(two["agent"]) - flat(one["agent"])
    assert difference.norm() < 1e-3 * change.norm()
    assert all(map(torch.equal, one["envs"]["actions"], two["envs"]["actions"]))
    assert torch.equal(one["envs"]["obs"], two["envs"]["obs"])
    assert torch.equal(one["run"]["random_state"], two["run"]["random_state"])
    episodes = [
        [{**row, "wall_seconds": None} for row in episode_rows(runs[processes])]
        for processes in (1, 2)
    ]
    assert episodes[0] == episodes[1]
    envs = {row["env"] for row in episodes[1]}
    assert envs & {"0", "1"} and envs & {"2", "3"}  # of both processes
    logged = [
        [event for event in events(runs[processes]) if event[0] != "charts/SPS"]
        for processes in (1, 2)
    ]
    assert len(logged[0]) == len(logged[1]) > 10 * 8
    for (tag, step, x), (other_tag, other_step, y) in zip(*logged):
        assert (tag, step) == (other_tag, other_step)
        assert y == pytest.approx(x, rel=1e-3, abs=1e-5), tag


def test_games_of_all_processes_differ(runs):
    actions = load_checkpoint(runs[2])["envs"]["actions"]
    assert len({x.numpy().tobytes() for x in actions}) == 4


def test_games_have_the_seeds_of_one_process(monkeypatch):
    """So no process plays what another one plays."""
    whole = ppo.AtariVecEnv("BreakoutNoFrameskip-v4", 4, 5, 1)
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(ppo, "RANK", 1)
    envs = ppo.RankVecEnv("BreakoutNoFrameskip-v4", 4, 5, 1)
    assert envs.last_seeds.tolist() == whole.last_seeds[2:].tolist()
    assert envs.seed_counts.tolist() == [1, 1]
    np.testing.assert_array_equal(envs.obs, whole.obs[2:])


def test_rank_0_speaks_for_all(runs):
    assert (runs[2].parents[1] / "said.txt").read_text() == ""


def test_a_rollout_is_gathered_as_one_process_would_have_it(monkeypatch):
    """Episodes by step and then by game, whoever played them; a column for each game."""
    shares = []
    monkeypatch.setattr(ppo, "gather", lambda x: shares.append(x) or shares)
    obs = np.zeros(3)
    theirs = [(4, ppo.Episode(1, 5.0, 2, "termination", obs))]
    mine = [
        (4, ppo.Episode(0, 7.0, 3, "truncation", obs)),
        (2, ppo.Episode(0, 9.0, 1, "truncation", obs)),
    ]
    ones = np.ones((5, 2))
    ppo.gather_rollout(slice(0, 2), theirs, ones, 2 * ones)
    episodes, values, returns = ppo.gather_rollout(slice(2, 4), mine, 3 * ones, 4 * ones)
    found = [(step, episode.env, episode.episode_return) for step, episode in episodes]
    assert found == [(2, 2, 9.0), (4, 1, 5.0), (4, 2, 7.0)]
    assert values.tolist() == 5 * [[1, 1, 3, 3]] and returns.tolist() == 5 * [[2, 2, 4, 4]]


# The update


def test_g7_minibatches_have_as_many_steps_of_each_game():
    args = ppo.Args(num_steps=8, num_envs=6, num_minibatches=4)
    shares = []
    for share in (slice(0, 2), slice(2, 6)):
        torch.manual_seed(1)
        indices = ppo.draw_minibatches(args, share)
        num_envs = share.stop - share.start
        assert sorted(indices.flatten().tolist()) == list(range(8 * num_envs))
        games = indices % num_envs
        assert all(games.eq(i).sum(1).eq(2).all() for i in range(num_envs))
        shares.append((indices // num_envs).view(8, num_envs))
    torch.manual_seed(1)
    whole = ppo.draw_minibatches(args, slice(0, 6)) // 6
    assert torch.equal(torch.cat(shares, 1), whole.view(8, 6))
    assert not torch.equal(whole, ppo.draw_minibatches(args, slice(0, 6)) // 6)
    assert not torch.equal(whole.view(8, 6)[:, 0], whole.view(8, 6)[:, 1])


@pytest.mark.parametrize("sync", [True, False])
def test_g3_advantages_are_normalised_over_all_processes(monkeypatch, sync):
    """Against the mean and standard deviation of the joint minibatch, or of this process's."""
    ours = torch.randn(12) * 3 + 1000
    theirs = torch.randn(12) * 0.1 - 7
    indices = torch.randperm(12).view(3, 4)
    args = ppo.Args(sync_norm_adv=sync)
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    moments = []
    monkeypatch.setattr(ppo.dist, "all_reduce", moments.append)
    ppo.normalise_advantages(theirs, indices, args)
    monkeypatch.setattr(ppo.dist, "all_reduce", lambda x: x.add_(moments[0]))
    normalised = ppo.normalise_advantages(ours, indices, args)
    for row in indices:
        joint = torch.cat([ours[row], theirs[row]]) if sync else ours[row]
        expected = (ours[row] - joint.mean()) / (joint.std() + 1e-8)
        torch.testing.assert_close(normalised[row], expected, rtol=1e-4, atol=1e-4)


def test_equal_advantages_become_0(monkeypatch):
    """Not nan: the variance may come out below 0."""
    advantages = torch.full((6,), 0.1)
    args = ppo.Args(sync_norm_adv=False)
    normalised = ppo.normalise_advantages(advantages, torch.arange(6).view(1, 6), args)
    torch.testing.assert_close(normalised, torch.zeros(6), rtol=0, atol=1e-2)


@pytest.mark.parametrize("theirs, epochs", [(0.3, 1), (0.15, 3)])
def test_x3_processes_obey_target_kl_together(monkeypatch, theirs, epochs):
    """By the mean of their KLs: 0.0 here, and theirs there."""
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    place = -len(ppo.METRICS) + ppo.METRICS.index("approx_kl")

    def add_theirs(gradient):
        gradient[place] += theirs

    monkeypatch.setattr(ppo.dist, "all_reduce", add_theirs)
    args = ppo.Args(num_envs=2, num_steps=4, num_minibatches=2, update_epochs=3, norm_adv=False)
    args.target_kl = 0.1
    calls = []

    def compute(*_):
        calls.append(1)
        return torch.zeros(1 + len(ppo.METRICS))

    functions = compute, lambda *_: None
    batch = {"obs": torch.zeros(8)}
    metrics = ppo.update(functions, None, None, batch, slice(0, 2), {}, args)
    assert len(calls) == 2 * epochs
    expected = torch.zeros(6)
    expected[place] = theirs / 2
    torch.testing.assert_close(metrics, expected)


def test_a_gradient_outlasts_the_memory_of_a_cuda_graph(monkeypatch):
    """The output of a compiled function is memory that the next one may write into."""
    monkeypatch.setattr(ppo.dist, "all_reduce", lambda _: None)
    memory = torch.empty(1 + len(ppo.METRICS))
    gradients = []

    def step(optimizer, gradient, coefs):
        memory.fill_(math.nan)
        gradients.append(gradient[0].item())

    args = ppo.Args(num_envs=2, num_steps=4, num_minibatches=2, update_epochs=1, norm_adv=False)
    functions = (lambda *_: memory.fill_(2.0)), step
    batch = {"obs": torch.zeros(8)}
    metrics = ppo.update(functions, None, None, batch, slice(0, 2), {}, args)
    assert metrics.tolist() == [2.0] * 6 and gradients == [2.0, 2.0]


@pytest.mark.parametrize("differ", [False, True])
def test_different_weights_end_the_run(monkeypatch, differ):
    """By one bit of one weight."""
    agent = torch.nn.Linear(3, 2)
    checksums = []

    def gather(x):
        checksums.append(x)
        return checksums

    monkeypatch.setattr(ppo, "gather", gather)
    ppo.check_equal(agent)
    if not differ:
        ppo.check_equal(agent)
        assert checksums[0] == checksums[1]
        return
    with torch.no_grad():
        agent.weight[1, 1] = torch.nextafter(agent.weight[1, 1], torch.tensor(9.0))
    with pytest.raises(SystemExit, match="weights of the processes have become different"):
        ppo.check_equal(agent)


def test_a_run_whose_weights_become_different_ends(server, tmp_path):
    """Its rank 1 does something alone."""
    call = "        check_equal(agent)\n"
    text = SCRIPT.read_text()
    assert text.count(call) == 1
    (tmp_path / SCRIPT.name).write_text(
        text.replace(call, f"        agent.critic.bias.data += RANK\n{call}")
    )
    forks = start(server, tmp_path, FLAGS, 2, tmp_path / SCRIPT.name)
    results = [fork.wait() for fork in forks]
    assert results[0].returncode == 1 and results[1].returncode == 1
    assert "error: the weights of the processes have become different" in results[0].stderr
    checkpoint = load_checkpoint(tmp_path / RUN)
    assert checkpoint["run"]["iteration"] == 0 and len(checkpoint["envs"]["actions"]) == 4


# Ends and resumes


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_a_resume_has_equal_bits(server, runs, tmp_path, rank):
    forks = start(server, tmp_path, FLAGS, 2)
    wait_for_iteration(tmp_path / RUN, 4)
    forks[rank].send(signal.SIGKILL)
    codes = [fork.wait().returncode for fork in forks]
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1
    assert 4 <= load_checkpoint(tmp_path / RUN)["run"]["iteration"] < 10
    said = run(server, tmp_path, f"--resume {RUN}", 2)
    assert "bits may differ" not in said[0]
    assert differences(runs[2], tmp_path / RUN) == []


def wait_for_iteration(folder, number):
    end = time.time() + 120
    while time.time() < end:
        try:
            if load_checkpoint(folder)["run"]["iteration"] >= number:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.02)
    pytest.fail(f"no iteration {number}")


def test_sigterm_saves_and_another_number_of_processes_goes_on(server, runs, tmp_path):
    """Signals come to all processes, as torchrun sends them. A line says that the bits differ."""
    forks = start(server, tmp_path, FLAGS, 2)
    wait_for_iteration(tmp_path / RUN, 4)
    forks[1].send(signal.SIGINT)  # Ctrl-C
    for fork in forks:
        fork.send(signal.SIGTERM)
    results = [fork.wait() for fork in forks]
    assert [result.returncode for result in results] == [128 + signal.SIGTERM, 0]
    assert "but with torchrun" in results[0].stdout and not results[1].stdout
    (said,) = run(server, tmp_path, f"--resume {RUN}", 1)
    assert "goes on, but its bits may differ" in said
    assert "'processes': 2" in said and "'processes': 1" in said
    one, resumed = outcome(runs[1]), outcome(tmp_path / RUN)
    assert one.keys() == resumed.keys()
    assert one["checkpoint/envs/actions/3"] == resumed["checkpoint/envs/actions/3"]


def test_init_from_gives_all_processes_the_old_weights(server, runs, tmp_path):
    """Else they would differ, which ends the run."""
    flags = f"{FLAGS} --total-timesteps 64 --learning-rate 1e-12 --eval-interval 0"
    run(server, tmp_path, f"{flags} --init-from {runs[1]}", 2)
    old, new = (load_checkpoint(folder)["agent"] for folder in (runs[1], tmp_path / RUN))
    assert all(torch.allclose(new[name], old[name], atol=1e-6) for name in old)


@pytest.mark.parametrize("moment", ["start", "training"])
def test_torchrun_takes_its_processes_along(tmp_path, moment):
    """When it is killed, they end, wherever they are."""
    words = f"-m torch.distributed.run --standalone --nproc-per-node=2 {SCRIPT} {FLAGS}"
    process = subprocess.Popen(
        [sys.executable, *shlex.split(words), "--total-timesteps", "1000000"],
        cwd=tmp_path,
        env=variables(tmp_path),
        stdout=subprocess.DEVNULL,
    )
    children = []
    while len(children) < 2:
        command = ["pgrep", "--parent", str(process.pid)]
        children = subprocess.run(command, capture_output=True, text=True).stdout.split()
    if moment == "training":
        wait_for_iteration(tmp_path / RUN, 2)
    process.kill()
    process.wait()
    end = time.time() + 60
    while left := [child for child in children if os.path.exists(f"/proc/{child}")]:
        if time.time() > end:
            subprocess.run(["kill", "-9", *left])
            pytest.fail(f"{moment}: {left} are left")
        time.sleep(0.02)


# Bad input


@pytest.mark.parametrize(
    "flags, env, words",
    [
        ("", {}, "training is started by torchrun: torchrun --standalone"),
        ("", {"RANK": 1, "WORLD_SIZE": 2}, "training is started by torchrun"),
        ("--num-envs 6", ENV | {"WORLD_SIZE": 4}, "--num-envs must be a multiple of the"),
        ("--evaluate .", ENV, "--evaluate needs no torchrun"),
        ("--env-id CartPole-v1", ENV, "is not an Atari game"),
    ],
)
def test_rank_0_refuses_bad_input_before_it_waits_for_others(server, tmp_path, flags, env, words):
    if "--evaluate" in flags:
        checkpoint = {"args": {}, "script": SCRIPT.name, "run": {"global_step": 0}}
        torch.save(checkpoint, tmp_path / "checkpoint.pt")
    assert_fails(server.run(SCRIPT, tmp_path, flags, **env), 2, words)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-steps 30 --num-minibatches 4", "--num-steps must be a multiple of"),
        (
            "--num-envs 1 --num-steps 4 --num-minibatches 4",
            "minibatches of one step need --no-norm-adv",
        ),
    ],
)
def test_sizes(refused, flags, words):
    assert words in refused(ppo, flags.split())


def test_a_process_that_normalises_alone_needs_two_steps_in_a_minibatch(refused, monkeypatch):
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    flags = "--num-envs 2 --num-steps 4 --num-minibatches 4"
    assert "need --no-norm-adv" in refused(ppo, [*flags.split(), "--no-sync-norm-adv"])
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags.split()])
    ppo.check_args(ppo.read_flags()[0])


def test_evaluate_plays_in_one_process_without_torchrun(server, runs):
    cwd = runs[2].parents[1]
    result = server.run(SCRIPT, cwd, f"--evaluate {RUN} --eval-episodes 1")
    assert result.returncode == 0 and "evaluation: " in result.stdout


def test_a_process_without_a_gpu_of_its_own_is_refused(run_script, monkeypatch, capsys):
    set_variables(monkeypatch, LOCAL_RANK=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run_script(SCRIPT, code=2)
    assert "each process needs a GPU: lower --nproc-per-node" in capsys.readouterr().err


def set_variables(monkeypatch, **more):
    for name, value in {**ENV, **more}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: None))


def test_a_process_takes_the_gpu_of_its_local_rank(run_script, monkeypatch):
    """Whatever its rank is."""
    set_variables(monkeypatch, LOCAL_RANK=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: sys.exit(10 + device))
    run_script(SCRIPT, code=11)


def test_tensors_of_cpus_travel_between_processes_with_gpus_too(monkeypatch):
    """By itself PyTorch would send those of GPUs alone."""
    groups = []
    monkeypatch.setattr(dist, "init_process_group", lambda backends, **_: groups.append(backends))
    for has_gpus in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpus=has_gpus: has_gpus)
        ppo.join()
    backends = [BackendConfig(backends).get_device_backend_map() for backends in groups]
    assert backends[0] == {"cpu": "gloo", "cuda": "nccl"} and backends[1]["cpu"] == "gloo"


def test_all_tensors_of_an_update_are_on_the_device(run_script, monkeypatch, tmp_path):
    """On PyTorch's meta device, as ppo_atari_vector.py's test; the processes are one."""
    fake_games(monkeypatch, ppo, {5: "life", 9: "over"}, {})
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "gather_object", lambda x, objects: objects.__setitem__(0, x))
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", reduced.append)
    monkeypatch.setattr(dist, "broadcast", lambda x, rank: None)
    set_variables(monkeypatch, WORLD_SIZE=1)
    changes = {"        check_equal(agent)\n": ""}
    flags = f"{META} --no-compile --env-id VectorCutNoFrameskip-v4"
    module = run_on_meta(run_script, monkeypatch, tmp_path, ppo, flags, changes)
    assert {x.device.type for x in module.agent.parameters()} == {"meta"}
    assert {x.device.type for x in module.batch.values()} == {"meta"}
    assert {x.device.type for x in reduced} == {"meta"} and len(reduced) == 2 * (1 + 2)
    assert module.run.global_step == 64
