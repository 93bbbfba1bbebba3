"""ppo_continuous_action_ray.py: what differs from ppo_continuous_action.py.

Most runs have tests/no_ray/ray.py in the place of Ray, and so one process. Those on a real Ray, the
tests at the end, must have the bits of such a run.
"""

import copy
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from processes import (
    RUN,
    TESTS,
    assert_fails,
    differences,
    edit_checkpoint,
    leaves,
    load_checkpoint,
    outcome,
    progress,
    variables,
)

import ppo_continuous_action_ray as ppo

SCRIPT = Path(ppo.__file__)
# 24 iterations. An environment gets its second seed after 1,000 of its 1,200 steps
FLAGS = (
    "--env-id toys:Continuous-v0 --run-name run --no-compile --num-envs 4 --num-steps 50"
    " --num-minibatches 4 --update-epochs 2 --hidden-sizes 16 16 --no-anneal-lr"
    " --total-timesteps 4800 --checkpoint-interval 7 --eval-interval 5 --eval-episodes 2"
)
TINY = FLAGS.replace("4800", "600").replace("--eval-interval 5", "--eval-interval 0")
OVERLAP = ["", "--overlap"]


@pytest.fixture(scope="module")
def run(server):
    """run(cwd, flags, code=0, **env): `python SCRIPT flags` without Ray."""

    def run(cwd, flags, code=0, **env):
        path = f"{TESTS / 'no_ray'}{os.pathsep}{TESTS}"
        result = server.run(SCRIPT, cwd, flags, PYTHONPATH=path, **env)
        assert result.returncode == code, result.stdout + result.stderr
        return result

    return run


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """{--overlap or not: the outcome of a run that nothing interrupted}"""
    outcomes = {}
    for overlap in OVERLAP:
        cwd = tmp_path_factory.mktemp("whole")
        run(cwd, f"{FLAGS} {overlap} --num-workers 1")
        outcomes[overlap] = outcome(cwd / RUN)
    return outcomes


def bits(x):
    """Nested containers with the bytes of their arrays and tensors, which can be compared."""
    if isinstance(x, dict):
        return {name: bits(part) for name, part in x.items()}
    if isinstance(x, list | tuple):
        return [bits(part) for part in x]
    if isinstance(x, torch.Tensor):
        x = x.numpy()
    if isinstance(x, np.ndarray | np.generic):
        return str(x.dtype), x.shape, x.tobytes()
    return x


ARGS = ppo.Args(env_id="toys:Continuous-v0", num_envs=3, num_workers=1, num_steps=400)


def make_worker(share=slice(0, 3)):
    return ppo.Worker(ARGS, share)


def make_agent():
    torch.manual_seed(7)
    agent = ppo.Agent(3, 2, (64, 64))
    with torch.no_grad():
        agent.actor_mean[4].weight *= 100
    return agent


def statistics():
    """Some that change observations."""
    obs_rms = ppo.RunningMeanStd(3)
    obs_rms.update(np.random.default_rng(0).normal(2, 3, (20, 3)))
    return obs_rms


def play(worker, number, state, share=slice(0, 3)):
    """A rollout of a share of three environments."""
    noise = np.random.default_rng(number).normal(size=(400, 3, 2)).astype(np.float32)
    return worker.play(number, state, (make_agent().policy(), statistics()), noise[:, share])


def test_workers_change_no_bits(run, whole, tmp_path):
    for workers in (2, 4):
        run(tmp_path / str(workers), f"{FLAGS} --num-workers {workers}")
        assert differences(whole[""], tmp_path / str(workers) / RUN) == []
    assert differences(whole[""], whole["--overlap"]) != []


def test_x4_recomputed_values_are_the_learners(run, whole, tmp_path):
    """With those of the policy that has played, the run would be the one without the flag."""
    run(tmp_path, f"{FLAGS} --recompute-advantages --num-workers 1")
    assert differences(whole[""], tmp_path / RUN) != []


def test_environments_and_seeds_are_those_of_one_process():
    """Whatever the share. Their rows have the bits that they have alone."""
    envs = [ppo.make_env("toys:Continuous-v0") for _ in range(3)]
    envs = ppo.VecEnv(envs, ARGS.seed, np.float64)
    policy = make_agent().policy()
    _, together, _ = play(make_worker(), 0, None)
    alone = [play(make_worker(slice(i, i + 1)), 0, None, slice(i, i + 1))[1] for i in range(3)]
    for step in range(400):
        actions, rewards, terminations, truncations, episodes, obs = together[step]
        noise = np.random.default_rng(0).normal(size=(400, 3, 2)).astype(np.float32)[step]
        mine = statistics().normalize(envs.obs)
        expected = [policy(mine[i : i + 1], noise[i]) for i in range(3)]
        assert bits(actions) == bits(np.concatenate(expected))
        assert bits(envs.step(actions)) == bits((rewards, terminations, truncations, episodes))
        assert bits(envs.obs) == bits(obs)
        for k in (0, 1, 2, 3, 5):
            parts = np.concatenate([worker[step][k] for worker in alone])
            assert bits(parts) == bits(together[step][k])


def test_workers_have_global_generators_of_their_own():
    draws = []
    for share in (slice(0, 1), slice(1, 3)):
        make_worker(share)
        draws.append((random.random(), np.random.random()))
    assert draws[0][0] != draws[1][0]
    assert draws[0][1] != draws[1][1]


def test_a_share_is_played_again_with_the_same_bits():
    """By a new worker, and by one whose reply has been lost; also in the run's first rollout."""
    worker = make_worker()
    state = worker.bring_back(0, None)
    for number in range(4):
        results = play(worker, number, state)
        for other in (make_worker(), worker):
            assert bits(play(other, number, state)) == bits(results)
        state = results[2]
    assert state["seed_counts"].tolist() == [2, 2, 2]


def test_a_worker_that_knows_the_rollout_brings_nothing_back(monkeypatch):
    """It would take as long as to play what is replayed."""
    worker = make_worker()
    state = worker.bring_back(0, None)
    monkeypatch.setattr(worker.envs, "load_state_dict", None)
    play(worker, 1, play(worker, 0, state)[2])


class Recorded:
    """A VecEnv of the steps that a worker has played."""

    def __init__(self, obs, steps):
        self.obs = obs
        self.action_space = None
        self.steps = iter(steps)

    def step(self, actions):
        _, *outcome, self.obs = next(self.steps)
        return outcome


@pytest.fixture
def learner(monkeypatch):
    """A learner with one worker in its own process, and the list of what this one replies."""
    replies = []
    worker = make_worker()

    def remote_play(*args):
        replies.append(worker.play(*args))
        return replies[-1]

    methods = {"play": remote_play, "bring_back": worker.bring_back}
    actor = SimpleNamespace(
        **{name: SimpleNamespace(remote=method) for name, method in methods.items()}
    )
    ray = SimpleNamespace(
        remote=lambda **_: lambda _: SimpleNamespace(remote=lambda *_: actor),
        init=lambda *_, **__: None,
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1.0}}],
        put=lambda x: x,
        get=lambda x: x,
        wait=lambda x, **_: (x, []),
    )
    monkeypatch.setattr(ppo, "ray", ray)
    return ppo.VecNormalize(ppo.RayVecEnv(None, ARGS), ARGS.gamma), replies


def test_m1_m3_m4_statistics_are_those_of_one_process(learner):
    """Of the same steps, in two rollouts; observations have the statistics of a rollout's start."""
    envs, replies = learner
    one = ppo.VecNormalize(Recorded(envs.envs.obs, []), ARGS.gamma)
    for _ in range(2):
        frozen = ppo.RunningMeanStd(3)
        frozen.load_state_dict(envs.obs_rms.state_dict())
        raw_obs = envs.envs.obs
        played = ppo.rollout(make_agent(), envs, 400)
        _, steps, _ = replies[-1]
        one.envs.steps = iter(steps)
        expected = []
        for step, (actions, *_, next_obs) in enumerate(steps):
            rewards, terminations, truncations, _ = one.step(None)
            obs = frozen.normalize(raw_obs)
            expected.append((obs, actions, rewards.astype(np.float32), terminations, truncations))
            raw_obs = next_obs
        assert bits(played[:5]) == bits([np.array(x) for x in zip(*expected)])
        assert bits(envs.obs) == bits(one.obs)
        for name in ("obs_rms", "return_rms"):
            ours, theirs = (getattr(x, name).state_dict() for x in (envs, one))
            assert bits(ours) == bits(theirs)
        assert bits(envs.discounted_returns) == bits(one.discounted_returns)


def test_what_a_worker_could_not_bring_back_is_what_it_began_with(learner):
    """The policy has acted on that, not on what the learner knows of the last rollout."""
    envs, replies = learner
    obs_rms = copy.copy(envs.obs_rms)
    envs.envs.begin(make_agent(), envs.obs_rms, 400)
    replies[0][0][1] += 5
    obs = ppo.rollout(None, envs, 400)[0]
    assert bits(obs[0]) == bits(obs_rms.normalize(replies[0][0]))


@pytest.mark.parametrize("overlap", OVERLAP)
def test_the_loss_has_the_log_probabilities_of_the_policy_that_played(
    run_script, monkeypatch, overlap
):
    """That of the update before or, with --overlap, of the one before that."""
    monkeypatch.syspath_prepend(TESTS / "no_ray")
    monkeypatch.delitem(sys.modules, "ray")
    agents = []
    for iterations in (1, 2, 3):
        flags = f"{TINY} {overlap} --total-timesteps {200 * iterations} --run-name {iterations}"
        script = run_script(SCRIPT, *flags.split())
        agents.append(script.agent)
    player, other = agents[:2] if overlap else reversed(agents[:2])
    batch = script.batch
    with torch.no_grad():
        logprobs, _, values = player(batch["obs"], batch["actions"])
        means = other.actor_mean(batch["obs"])
    torch.testing.assert_close(batch["logprobs"], logprobs)
    torch.testing.assert_close(batch["values"], values)
    requests = [x for x in script.ray.requests if x[0] == 2][-2:]  # of two workers
    policy, _ = requests[0][2]
    noise = np.concatenate([x[3] for x in requests], 1).reshape(200, 2)
    played = torch.from_numpy(policy(batch["obs"].numpy(), noise))
    torch.testing.assert_close(batch["actions"], played)
    assert not torch.allclose(means, torch.from_numpy(policy(batch["obs"].numpy(), 0.0)))


@pytest.mark.parametrize("overlap", OVERLAP)
@pytest.mark.parametrize("fault", ["SIGKILL 3@6", "save 5"])
def test_a_killed_learner_goes_on_to_the_same_bits(run, whole, tmp_path, overlap, fault):
    """Killed in an evaluation, and while it writes a checkpoint. It goes on with other workers."""
    run(tmp_path, f"{FLAGS} {overlap} --num-workers 2", -signal.SIGKILL, TOY_FAULT=fault)
    assert 0 < progress(tmp_path / RUN)["iteration"] < 24
    result = run(tmp_path, f"--resume {RUN} --num-workers 4 --cpus-per-worker 0.5 --address auto")
    assert "brought back" not in result.stdout and "run.restore" not in result.stdout
    assert differences(whole[overlap], tmp_path / RUN) == []


def test_an_environment_that_does_not_come_back_begins_a_new_episode(run, tmp_path):
    run(tmp_path, TINY)
    envs = load_checkpoint(tmp_path / RUN)["envs"]
    envs["envs"]["obs"][2, 1] += 1
    envs["discounted_returns"][2] = 1e6
    edit_checkpoint(tmp_path / RUN, envs=envs)
    result = run(tmp_path, f"--resume {RUN} --total-timesteps 800")
    assert result.stdout.count("can't be brought back exactly: it starts a new episode") == 1
    assert progress(tmp_path / RUN)["iteration"] == 4
    assert load_checkpoint(tmp_path / RUN)["envs"]["return_rms"]["var"] < 1e6


def test_evaluate_and_init_from(run, tmp_path):
    """An evaluation needs no Ray. A new run takes the networks and statistics of an old one."""
    run(tmp_path, TINY)
    run(tmp_path, f"--evaluate {RUN}", NO_RAY="1")
    flags = TINY.replace("--run-name run", "--run-name new --learning-rate 1e-20")
    run(tmp_path, f"{flags} --init-from {RUN}")
    old, new = (load_checkpoint(tmp_path / "runs" / name) for name in ("run", "new"))
    assert leaves(old["agent"]) == leaves(new["agent"]) == leaves(new["player"])
    assert new["envs"]["obs_rms"]["count"] == old["envs"]["obs_rms"]["count"] + 600


# Bad input


def test_bad_flags(refused):
    assert "multiple of --num-workers" in refused(ppo, ["--num-envs", "6", "--num-workers", "4"])
    assert "--num-workers must be above 0" in refused(ppo, ["--num-workers", "0"])
    assert "--cpus-per-worker must be above 0" in refused(ppo, ["--cpus-per-worker", "0"])
    assert "at least 0.0001" in refused(ppo, ["--cpus-per-worker", "0.00001"])


@pytest.mark.parametrize(
    "cores, workers, cpus, room",
    [
        ([4.0], 4, 1.0, 4),
        ([4.0], 5, 1.0, 4),
        ([3.0, 3.0], 3, 2.0, 2),
        ([1.0], 10, 0.1, 10),
        ([1.0], 11, 0.1, 10),
        ([], 1, 1.0, 0),
    ],
)
def test_workers_that_do_not_fit_are_refused(monkeypatch, capsys, cores, workers, cpus, room):
    """Each must fit one node. A node that is lost has no room."""
    nodes = [{"Alive": True, "Resources": {"CPU": x}} for x in cores]
    nodes += [{"Alive": True, "Resources": {}}, {"Alive": False, "Resources": {"CPU": 99.0}}]
    ray = SimpleNamespace(nodes=lambda: nodes, init=lambda *_, **__: None)
    monkeypatch.setattr(ppo, "ray", ray)
    args = ppo.Args(num_workers=workers, cpus_per_worker=cpus)
    if workers <= room:
        ppo.connect(args)
        return
    with pytest.raises(SystemExit) as stop:
        ppo.connect(args)
    assert stop.value.code == 2
    assert f"the cluster has room for {room} workers" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "ray://127.0.0.1:1"])
def test_no_ray_at_the_address(server, tmp_path, address):
    result = server.run(SCRIPT, tmp_path, f"{TINY} --address {address}")
    assert_fails(result, 2, f"can't reach a Ray cluster at {address}")
    assert not (tmp_path / "runs").exists()


def test_something_else_than_ray_at_the_address(monkeypatch, capsys):
    """Where nothing comes, and where something else does."""
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: connect(address, 0.2))
    for words in (b"", b"SSH-2.0-OpenSSH_9.2\r\n"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            reply = threading.Thread(target=lambda: server.accept()[0].send(words))
            reply.start()
            with pytest.raises(SystemExit) as stop:
                ppo.connect(ppo.Args(address=address))
            reply.join()
        assert stop.value.code == 2
        assert f"can't reach a Ray cluster at {address}" in capsys.readouterr().err


def test_a_cluster_that_is_busy_is_waited_for(learner, monkeypatch, capsys):
    """Its nodes have room when they are idle. The user is told why nothing happens."""
    monkeypatch.setattr(ppo.ray, "wait", lambda results, **_: ([], results))
    ppo.RayVecEnv(None, ARGS)
    assert "0 of 1 workers have started" in capsys.readouterr().out


# On a real Ray

FATAL = """
import os
import signal
from pathlib import Path

import gymnasium as gym
import toys

FAULT = Path(__file__).with_name("fault")


class Fatal(toys.Continuous):
    def step(self, action):
        if self.steps == 120:
            mine = FAULT.with_name(f"fault of {os.getpid()}")
            try:
                FAULT.rename(mine)  # one worker alone can
            except FileNotFoundError:
                return super().step(action)
            if mine.read_text() == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the simulator has burst")
        return super().step(action)


gym.register("Fatal-v0", Fatal)
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A cluster of two cores."""
    with pytest.MonkeyPatch.context() as patch:
        env = variables(tmp_path_factory.mktemp("ray"), RAY_USAGE_STATS_ENABLED="0")
        for name, value in env.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        yield cluster.address
        cluster.shutdown()


def with_fault(cwd, fault):
    cwd.mkdir(exist_ok=True)
    (cwd / "my_fatal.py").write_text(FATAL)
    (cwd / "fault").write_text(fault)


def test_a_worker_killed_in_the_middle_of_a_rollout(server, address, whole, tmp_path):
    """Ray says so, another one plays the same share, and the bits are those without Ray."""
    with_fault(tmp_path, "SIGKILL")
    flags = f"{FLAGS} --env-id my_fatal:Fatal-v0 --num-workers 2 --address {address}"
    result = server.run(SCRIPT, tmp_path, flags)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (tmp_path / "fault").exists()
    assert "A worker died or was killed" in result.stdout + result.stderr
    assert differences(whole[""], tmp_path / RUN) == []


def test_an_error_of_the_environment_ends_the_run(server, address, tmp_path):
    """With its trace, and at once: nothing is played again."""
    with_fault(tmp_path, "error")
    flags = f"{FLAGS} --env-id my_fatal:Fatal-v0 --num-workers 1 --address {address}"
    result = server.run(SCRIPT, tmp_path, flags)
    assert result.returncode == 1
    assert "ArithmeticError" in result.stderr and "has burst" in result.stderr
    assert "retries remaining" not in result.stdout + result.stderr


def test_workers_that_do_not_fit_the_cluster(server, address, tmp_path):
    flags = f"{TINY} --cpus-per-worker 1.5 --address {address}"
    assert_fails(server.run(SCRIPT, tmp_path, flags), 2, "room for 1 workers")
    assert not (tmp_path / "runs").exists()


def test_a_stopped_run_of_its_own_ray(run, server, whole, tmp_path):
    """SIGTERM saves the rollout that --overlap has begun, and the workers end."""
    fork = server.start(SCRIPT, tmp_path, f"{FLAGS} --overlap --num-workers 1")
    while not (tmp_path / RUN / "checkpoint.pt").exists():
        time.sleep(0.02)
    fork.send(signal.SIGTERM)
    result = fork.wait()
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert "go on with" in result.stdout
    assert load_checkpoint(tmp_path / RUN)["envs"]["envs"]["noise"] is not None
    run(tmp_path, f"--resume {RUN}")
    assert differences(whole["--overlap"], tmp_path / RUN) == []
