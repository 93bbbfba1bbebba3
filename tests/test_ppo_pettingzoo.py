"""ppo_pettingzoo.py: what many agents change in ppo.py, whose tests hold for what both share."""

import importlib
import signal
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import parallel_toys
import pytest
import torch
from gymnasium.spaces import flatten
from processes import (
    RUN,
    assert_fails,
    differences,
    episode_rows,
    load_checkpoint,
    progress,
    read_record,
    returns,
)

import ppo
import ppo_pettingzoo

SCRIPT = Path(ppo_pettingzoo.__file__)
MORTAL = "parallel_toys.mortal"
TINY = "--num-threads 1 --no-compile --run-name run --hidden-sizes 16 --eval-episodes 3"


def make_envs(name, num_envs=2, centralised=False, seed=1):
    envs = [ppo_pettingzoo.make_env(f"parallel_toys.{name}") for _ in range(num_envs)]
    return ppo_pettingzoo.ParallelVecEnv(envs, seed, np.float32, centralised)


def play(envs, steps, seed=0):
    """Plays random actions: obs before each step and what step() returned."""
    rng = np.random.default_rng(seed)
    history = []
    for _ in range(steps):
        obs = envs.obs.copy()
        history.append((obs, *envs.step(rng.integers(0, 3, len(obs)))))
    return history


def own_part(toy, observations, agent):
    """The row of an agent, from what the toy has shown it."""
    names = toy.possible_agents
    number = np.eye(len(names), dtype=np.float32)[names.index(agent)]
    return np.concatenate((number, flatten(toy.space, observations[agent])))


def all_parts(toy, observations, agents):
    size = len(toy.possible_agents) + 3
    zeros = np.zeros(size, np.float32)
    names = toy.possible_agents
    return [own_part(toy, observations, x) if x in agents else zeros for x in names]


def test_rows_are_those_of_the_living():
    """Zeros where an agent is not in the game, and what the critic sees beside them."""
    envs = make_envs("mortal", centralised=True)
    history = play(envs, 300)
    seen_dead = 0
    for i, toy in enumerate(envs.envs):
        steps = toy.steps[2:]  # without the trial in make_env
        before = [step for step, after in zip(steps, steps[1:]) if "actions" in after]
        for (obs, *_), step in zip(history, before, strict=True):
            parts = all_parts(toy, step["observations"], step["agents"])
            expected = [np.concatenate((part, *parts)) for part in parts]
            np.testing.assert_array_equal(obs[3 * i : 3 * i + 3], expected)
            seen_dead += 3 - len(step["agents"])
    assert seen_dead > 100


def test_an_end_is_the_agents_own():
    """Rewards, ends, returns, lengths and last observations, in each step, against the toys'."""
    envs = make_envs("mortal")
    history = play(envs, 300)
    counts = {"termination": 0, "truncation": 0}
    early = 0
    for i, toy in enumerate(envs.envs):
        steps = [step for step in toy.steps[2:] if "actions" in step]
        totals = dict.fromkeys(toy.possible_agents, (0.0, 0))
        for (_, rewards, terminations, truncations, episodes), step in zip(history, steps):
            episodes = {x.env - 3 * i: x for x in episodes if x.env // 3 == i}
            assert {toy.possible_agents[k] for k in episodes} == {*step["ends"]}
            for k, agent in enumerate(toy.possible_agents):
                row = 3 * i + k
                reward = step["rewards"].get(agent, 0.0)
                ended_by = step["ends"].get(agent)
                assert rewards[row] == reward
                assert terminations[row] == (ended_by == "termination")
                assert truncations[row] == (ended_by == "truncation")
                totals[agent] = (
                    totals[agent][0] + reward,
                    totals[agent][1] + (agent in step["rewards"]),
                )
                if ended_by:
                    expected = (row, *totals[agent], ended_by)
                    assert episodes[k][:4] == expected
                    last = own_part(toy, step["observations"], agent)
                    np.testing.assert_array_equal(episodes[k].final_obs, last)
                    totals[agent] = (0.0, 0)
                    counts[ended_by] += 1
                    early += bool(step["agents"])
    assert min(counts.values()) > 30 and early > 60


def test_the_dead_have_no_part_in_the_loss():
    """Whatever their rows hold, loss, metrics and gradient are the same bits; those of ppo.py."""
    agent = ppo_pettingzoo.Agent(5, 5, 3, (8,))
    names = ("logprobs", "advantages", "returns", "values")
    batch = {"obs": torch.randn(40, 5), "actions": torch.randint(0, 3, (40,))}
    batch |= {name: torch.randn(40) for name in names}
    alive = torch.rand(40) < 0.6
    args = ppo_pettingzoo.Args(clip_vloss=True)
    coefs = {
        name: torch.tensor(getattr(args, name)) for name in ("clip_coef", "ent_coef", "vf_coef")
    }

    def learn(script, batch):
        loss, metrics = script.ppo_loss(agent, batch, coefs, args)
        return loss, metrics, *torch.autograd.grad(loss, [*agent.parameters()])

    spoilt = {name: x.clone() for name, x in batch.items()}
    for name in ("advantages", "returns", "values"):
        spoilt[name][~alive] = 1e6
    spoilt["logprobs"][~alive] = -20.0
    spoilt["obs"][~alive] = 7.0
    spoilt["actions"][~alive] = 0
    result = learn(ppo_pettingzoo, batch | {"alive": alive})
    for x, y in zip(result, learn(ppo_pettingzoo, spoilt | {"alive": alive})):
        assert torch.equal(x, y)
    living = {name: x[alive] for name, x in batch.items()}
    for x, y in zip(result, learn(ppo, living)):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    none = learn(ppo_pettingzoo, batch | {"alive": torch.zeros(40, dtype=bool)})
    assert not any(x.any() for x in none)


def lives(alive, terminations, truncations):
    """First and last step of each row's lives, in a rollout."""
    found = []
    for row in range(alive.shape[1]):
        first = None
        for step in range(len(alive)):
            if alive[step, row] and first is None:
                first = step
            over = terminations[step, row] or truncations[step, row]
            if first is not None and (over or step == len(alive) - 1):
                found.append((row, first, step))
                first = None
    return found


@pytest.mark.parametrize("flag", ["--bootstrap-truncated", "--no-bootstrap-truncated"])
def test_advantages_are_sums_over_an_agents_own_life(run_script, flag):
    """Those of a run's only iteration; a truncated life goes on with its own last observation."""
    flags = f"{TINY} --env-id {MORTAL} --num-envs 3 --num-steps 40 --total-timesteps 120"
    flags += " --gamma 0.99"
    module = run_script(SCRIPT, *flags.split(), "--learning-rate", "1e-12", flag)
    final = {(step, episode.env): episode for step, episode in module.episodes}

    def value(obs):
        with torch.no_grad():
            return module.agent.value(torch.from_numpy(obs[None])).item()

    checked = np.zeros_like(module.alive)
    truncated = 0
    for row, first, last in lives(module.alive, module.terminations, module.truncations):
        values = [value(module.obs[step, row]) for step in range(first, last + 1)]
        episode = final.get((last, row))
        if episode is None:
            values.append(value(module.envs.obs[row]))
        elif episode.ended_by == "truncation" and flag == "--bootstrap-truncated":
            values.append(value(episode.final_obs))
            truncated += 1
        else:
            values.append(0.0)
        rewards = module.rewards[first : last + 1, row]
        deltas = rewards + 0.99 * np.array(values[1:]) - np.array(values[:-1])
        for k in range(len(deltas)):
            expected = sum((0.99 * 0.95) ** j * x for j, x in enumerate(deltas[k:]))
            assert module.advantages[first + k, row] == pytest.approx(expected, abs=1e-4)
            checked[first + k, row] = True
    np.testing.assert_array_equal(checked, module.alive)
    assert not module.alive.all() and (truncated > 5 or flag == "--no-bootstrap-truncated")
    living = module.values[module.alive], module.returns[module.alive]
    assert module.scalars["losses/explained_variance"] == ppo.explained_variance(*living)


@pytest.mark.parametrize("centralised", [False, True])
def test_the_centralised_critic_sees_what_the_others_see(centralised):
    """Its policy doesn't."""
    envs = make_envs("mortal", 1, centralised)
    agent = ppo_pettingzoo.Agent(envs.obs_dim, envs.obs.shape[1], 3, (8,))
    toy = envs.envs[0]
    agents = ["ann", "cid"]
    observations = {name: np.full(3, 0.1) for name in agents}
    before = envs.observe(observations, agents)
    after = envs.observe(observations | {"cid": np.full(3, -0.7)}, agents)
    alone = envs.observe(observations, ["ann"])

    def outputs(rows):
        rows = torch.from_numpy(rows[:1])  # ann's
        with torch.no_grad():
            logprobs = agent(rows.expand(3, -1), torch.arange(3))[0]
            return logprobs, agent.value(rows)

    for changed in (after, alone):
        assert torch.equal(outputs(before)[0], outputs(changed)[0])
        assert torch.equal(outputs(before)[1], outputs(changed)[1]) != centralised
    assert toy.possible_agents == envs.agents


@pytest.mark.parametrize("flags", ["", "--no-norm-adv"])
def test_one_agent_alone_is_ppo(run_script, tmp_path, flags):
    """The weights after three iterations, and all episodes, are those of ppo.py."""
    text = Path(ppo.__file__).read_text()
    assert text.count("steps_per_seed=1000") == 1
    single = tmp_path / "ppo.py"
    single.write_text(text.replace("steps_per_seed=1000", "steps_per_seed=1"))
    flags += " --learning-rate 1e-3 --gamma 0.9 --update-epochs 3 --clip-vloss"
    common = f"{TINY} --num-envs 3 --num-steps 40 --total-timesteps 360 {flags}".split()
    ours = run_script(SCRIPT, "--env-id", "parallel_toys.alone", *common)
    (tmp_path / RUN).rename(tmp_path / "ours")
    theirs = run_script(single, "--env-id", "parallel_toys:WithOne-v0", *common)
    for x, y in zip(ours.agent.parameters(), theirs.agent.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    rows = [episode_rows(folder) for folder in (tmp_path / "ours", tmp_path / RUN)]
    for row in rows[0] + rows[1]:
        del row["wall_seconds"]
    assert rows[0] == rows[1] and len(rows[0]) > 20


LEARN = "--num-threads 1 --no-compile --num-envs 4 --num-steps 32 --update-epochs 4"
LEARN += " --learning-rate 0.01 --ent-coef 0.001"


def test_a_toy_of_two_agents_is_learned_to_its_optimum(run_script, tmp_path):
    """Which one policy only reaches if it knows which agent it plays."""
    flags = f"{LEARN} --env-id parallel_toys.pair --total-timesteps 6400 --run-name run"
    run_script(SCRIPT, *flags.split())
    assert returns(tmp_path / RUN) == [8.0] * 20


@pytest.mark.parametrize("critic", ["--no-centralised-critic", "--centralised-critic"])
def test_self_play_finds_the_saddle_point(run_script, tmp_path, critic):
    flags = f"{LEARN} --env-id parallel_toys.duel --total-timesteps 6400 --run-name run {critic}"
    run_script(SCRIPT, *flags.split())
    assert returns(tmp_path / RUN) == [8.0, -8.0] * 10


def test_the_update_compiles_as_one_graph():
    agent = ppo_pettingzoo.Agent(4, 6, 3, (8,))
    args = ppo_pettingzoo.Args(update_epochs=1, num_minibatches=2)
    names = ("clip_coef", "ent_coef", "vf_coef", "max_grad_norm")
    coefs = {name: torch.tensor(getattr(args, name)) for name in names}
    coefs["lr"] = torch.tensor(0.01)
    batch = {"obs": torch.randn(40, 6), "actions": torch.randint(0, 3, (40,))}
    batch |= {name: torch.randn(40) for name in ("logprobs", "advantages", "returns", "values")}
    batch["alive"] = torch.rand(40) < 0.5
    torch._dynamo.config.trace_autograd_ops = True
    step = torch.compile(ppo_pettingzoo.update_minibatches, fullgraph=True, backend="eager")
    weights = []
    for function in (ppo_pettingzoo.update_minibatches, step):
        copy = ppo_pettingzoo.Agent(4, 6, 3, (8,))
        copy.load_state_dict(agent.state_dict())
        optimizer = ppo_pettingzoo.Adam(copy.parameters(), eps=1e-5)
        torch.manual_seed(1)
        ppo_pettingzoo.update(function, optimizer, copy, batch, coefs, args)
        weights.append(torch.cat([x.detach().flatten() for x in copy.parameters()]))
    torch.testing.assert_close(*weights)
    assert not torch.equal(weights[0], torch.cat([x.flatten() for x in agent.parameters()]))


# Whole runs

LONG = (
    f"{TINY} --env-id {MORTAL} --num-envs 3 --num-steps 20 --num-minibatches 3 --update-epochs 2"
    " --total-timesteps 720 --checkpoint-interval 5 --eval-interval 4 --centralised-critic"
)


def succeed(server, cwd, flags, **env):
    result = server.run(SCRIPT, cwd, flags, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """A run of 12 iterations, with video: its folder, what it printed, and the toys' record."""
    cwd = tmp_path_factory.mktemp("whole")
    output = succeed(server, cwd, f"{LONG} --capture-video", TOY_RECORD=cwd / "record")
    return cwd / RUN, output, read_record(cwd / "record")


def test_a_run_killed_in_mid_game_and_resumed_is_equal(server, whole, tmp_path):
    """Its own bits, too: with the same seed it is the same run."""
    result = server.run(SCRIPT, tmp_path, LONG, TOY_FAULT="SIGKILL 620")
    assert result.returncode == -signal.SIGKILL, result.stderr
    checkpoint = load_checkpoint(tmp_path / RUN)
    assert checkpoint["run"]["iteration"] == 5
    assert any(len(actions) for actions in checkpoint["envs"]["actions"])
    assert "can't be brought back" not in succeed(server, tmp_path, f"--resume {RUN}")
    assert differences(tmp_path / RUN, whole[0]) == []


def test_a_run_stopped_by_a_signal_and_resumed_is_equal(server, whole, tmp_path):
    result = server.run(SCRIPT, tmp_path, LONG, TOY_FAULT="SIGTERM 500")
    assert result.returncode == 128 + signal.SIGTERM, result.stderr
    assert 0 < progress(tmp_path / RUN)["global_step"] < 720
    succeed(server, tmp_path, f"--resume {RUN}")
    assert differences(tmp_path / RUN, whole[0]) == []


def test_a_game_that_does_not_come_back_starts_anew(server, tmp_path):
    flags = LONG.replace(MORTAL, "parallel_toys.hopeless")
    server.run(SCRIPT, tmp_path, flags, TOY_FAULT="SIGKILL 620")
    output = succeed(server, tmp_path, f"--resume {RUN}")
    assert "environment 0 can't be brought back exactly: it starts a new episode" in output


def test_the_game_that_it_starts_anew_has_a_new_seed_and_no_score():
    envs = make_envs("mortal")
    play(envs, 2)
    state = envs.state_dict()
    assert len(state["actions"][1]) == 2 and envs.scores[1]
    state["obs"][envs.rows[1]] += 1
    envs.load_state_dict(state)
    expected = state["seed_counts"] + torch.tensor([0, 1])
    assert envs.seed_counts.tolist() == expected.tolist()
    assert envs.actions[1] == [] and envs.scores[1] == {}
    other = make_envs("mortal")
    other.seed_counts[1] = envs.seed_counts[1] - 1
    other.reset_with_new_seed(1)
    np.testing.assert_array_equal(envs.obs[envs.rows[1]], other.obs[envs.rows[1]])


def test_evaluations_have_seeds_of_their_own(monkeypatch):
    envs = make_envs("pair")
    seeds = []

    def stop(env_id, seed, video_dir):
        seeds.append(seed)
        raise InterruptedError

    monkeypatch.setattr(envs, "for_evaluation", stop)
    for step in (None, 100, 200):
        with pytest.raises(InterruptedError):
            ppo_pettingzoo.evaluate(None, envs, ppo_pettingzoo.Args(seed=7), None, step)
    assert seeds == [(7, 1), (7, 2, 100), (7, 2, 200)]


def logged(record, num_envs):
    """The rows of episodes.csv by the toys' record, but for the time."""
    rows = []
    for env in range(num_envs):
        names = parallel_toys.Mortal.possible_agents
        totals = dict.fromkeys(names, (0.0, 0))
        steps = 0
        events = [event for event in record if event["env"] == env][2:]
        for event in events:
            if "seed" in event:
                continue
            steps += 1
            for agent, reward in event["rewards"].items():
                totals[agent] = totals[agent][0] + reward, totals[agent][1] + 1
            for agent, ended_by in event["ends"].items():
                row = env * len(names) + names.index(agent)
                rows.append((steps * num_envs, row, *totals[agent], ended_by))
                totals[agent] = (0.0, 0)
    return sorted(rows)


def test_episodes_are_logged_as_they_were(whole):
    """A step of a game is one step, however many agents take it."""
    rows = [
        (int(x["global_step"]), int(x["env"]), float(x["return"]), int(x["length"]), x["ended_by"])
        for x in episode_rows(whole[0])
    ]
    assert sorted(rows) == logged(whole[2], 3) and len(rows) > 100
    assert progress(whole[0])["global_step"] == 720


def games(record, env):
    """The returns of an evaluation's agents, in the order in which they left, game by game."""
    found = []
    totals = {}
    for event in [event for event in record if event["env"] == env][2:]:
        if "seed" in event:
            found.append([])
            continue
        for agent, reward in event["rewards"].items():
            totals[agent] = totals.get(agent, 0.0) + reward
        found[-1] += [totals.pop(agent) for agent in event["ends"]]
    return found


def test_an_evaluation_plays_whole_games(server, whole):
    """As many as it is told, and --evaluate the same ones again."""
    last = max(event["env"] for event in whole[2])
    *played, begun = games(whole[2], last)
    assert len(played) == 3 and begun == []
    assert returns(whole[0]) == pytest.approx(sum(played, []))
    (line,) = [x for x in whole[1].splitlines() if x.startswith("evaluation:")]
    assert line in succeed(server, whole[0].parents[1], f"--evaluate {RUN}")


def test_the_film_shows_the_first_game_of_an_evaluation(whole):
    films = sorted(whole[0].rglob("*.mp4"))
    assert [film.parent.name for film in films] == ["end", "step-240", "step-480", "step-720"]
    last = max(event["env"] for event in whole[2])
    events = [event for event in whole[2] if event["env"] == last][3:]
    length = ["seed" in event for event in events].index(True)
    assert imageio_ffmpeg.count_frames_and_secs(str(films[0]))[0] == length + 1


def test_a_game_that_never_ends_is_cut_in_an_evaluation(monkeypatch):
    envs = make_envs("endless")
    evaluation = envs.for_evaluation("parallel_toys.endless", 1, None)
    assert evaluation.max_steps == 100000
    evaluation.max_steps = 12
    ends = [step for step, (*_, episodes) in enumerate(play(evaluation, 30)) if episodes]
    assert ends == [11, 23] and evaluation.games_over == 2


def test_observations_of_any_space_are_flattened():
    envs = make_envs("nested")
    np.testing.assert_array_equal(envs.obs[0], [1, 0, 0, 1, 2, 3, 0, 0, 1])
    np.testing.assert_array_equal(envs.obs[3], [0, 1, 0, 1, 2, 3, 0, 0, 1])


REFUSED = {
    "parallel_toys.nothing": "can't make parallel_toys.nothing: No module named",
    "CartPole-v1": "give a module with a parallel_env()",
    "": "give a module with a parallel_env()",
    ".": "give a module with a parallel_env()",
    "parallel_toys.empty": "after reset() parallel_toys.empty must have agents",
    "toys": "toys has no parallel_env()",
    "parallel_toys.uncallable": "has no parallel_env()",
    "parallel_toys.unlike": "agents that differ in observation_space",
    "parallel_toys.uneven": "agents that differ in action_space",
    "parallel_toys.continuous": "needs a Discrete one",
    "parallel_toys.words": "toys.Words",
    "parallel_toys.nameless": "must name its possible_agents",
    "parallel_toys.old": "reset() of parallel_toys.old must return 2 dicts",
    "parallel_toys.four": "step() of parallel_toys.four must return 5 dicts",
    "parallel_toys.wide": "returns another shape than its space's: (4,)",
    "parallel_toys.unrewarded": "must return numbers as its rewards, not None",
    "parallel_toys.manyfold": "must return numbers as its rewards, not array([0., 0.])",
}


@pytest.mark.parametrize("env_id", REFUSED)
def test_what_is_no_game_is_refused_with_one_sentence(capsys, env_id):
    with pytest.raises(SystemExit) as stop:
        env = ppo_pettingzoo.make_env(env_id)
        ppo_pettingzoo.ParallelVecEnv([env], 1, np.float32, False)
    assert stop.value.code == 2
    assert REFUSED[env_id] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["undead", "vanishing"])
def test_agents_that_leave_at_another_time_than_they_end_are_reported(server, tmp_path, name):
    flags = LONG.replace(MORTAL, f"parallel_toys.{name}")
    assert_fails(server.run(SCRIPT, tmp_path, flags), 1, "env.agents")


def test_bad_flags(server, tmp_path):
    assert_fails(server.run(SCRIPT, tmp_path, "--env-id toys --no-compile"), 2, "no parallel_env")
    assert_fails(server.run(SCRIPT, tmp_path, f"{LONG} --num-minibatches 7"), 2, "multiple")
    assert not (tmp_path / "runs").exists()


# The games that it is made for


@pytest.mark.parametrize("env_id", ["mpe2.simple_spread_v3", "pettingzoo.classic.rps_v2"])
def test_games_come_back_exactly(env_id, capsys):
    importlib.import_module(env_id)

    def make():
        envs = [ppo_pettingzoo.make_env(env_id) for _ in range(2)]
        return ppo_pettingzoo.ParallelVecEnv(envs, 1, np.float32, True)

    envs, others = make(), make()
    play(envs, 40)
    others.load_state_dict(envs.state_dict())
    for ours, theirs in zip(play(envs, 30, 1), play(others, 30, 1)):
        for x, y in zip(ours[:4], theirs[:4]):
            np.testing.assert_array_equal(x, y)
        assert [x[:4] for x in ours[4]] == [x[:4] for x in theirs[4]]
    assert capsys.readouterr().out == ""
