"""ppo_mask.py: what differs from ppo.py, whose tests hold for what both share."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from test_ppo import (
    Toy,
    add_targets,
    as_coefs,
    compare_compiled_epochs,
    compare_restored,
    compare_with_sb3,
    exact,
    flat,
    learned_share,
    make_envs,
    needs_compiler,
    record_evaluation,
)
from torch.distributions import Categorical

import ppo
import ppo_mask

SPACES = {
    "Mask-v0": Discrete(4),
    "MaskStarted-v0": Discrete(3, start=-1, dtype=np.int32),
    "MaskTwoParts-v0": MultiDiscrete([3, 2], dtype=np.uint8),
    "MaskGrid-v0": MultiDiscrete([[3, 2], [2, 4]], start=[[5, 0], [0, 1]]),
}


class MaskedToy(Toy):
    """Masks are random, but the last action is always allowed; any that isn't is an error.

    It gets a reward for the first part of an action.
    """

    def __init__(self, action_space, masked=True):
        super().__init__(action_space)
        self.masked = masked
        self.masks_seen = []
        n = action_space.n if isinstance(action_space, Discrete) else action_space.nvec
        self.nvec = np.ravel(n).astype(int)

    def observe(self):
        obs, info = super().observe()
        self.mask = tuple((self.np_random.random(n) < 0.5).astype(np.int8) for n in self.nvec)
        for part in self.mask:
            part[-1] = 1
        self.masks_seen.append(np.hstack(self.mask))
        if self.masked:
            info["action_mask"] = self.mask[0] if len(self.mask) == 1 else self.mask
            if len(self.mask) == 4:  # MaskGrid's, as Gymnasium takes it
                info["action_mask"] = (self.mask[:2], self.mask[2:])
        return obs, info

    def count_from_0(self, action):
        start = np.ravel(self.action_space.start).astype(int)
        parts = np.ravel(action).astype(int) - start
        if self.masked:
            assert all(mask[part] for mask, part in zip(self.mask, parts)), (self.mask, parts)
        return parts


for env_id, space in SPACES.items():
    gym.register(env_id, MaskedToy, kwargs={"action_space": space})
gym.register("NoMask-v0", MaskedToy, kwargs={"action_space": Discrete(4), "masked": False})


def sizes(envs):
    """Returns obs_dim and nvec, as an Agent takes them."""
    nvec = envs.action_space.nvec.tolist()
    return envs.obs.shape[1] - sum(nvec), nvec


def make_agent(envs):
    return ppo_mask.Agent(*sizes(envs), (64, 64))


def masked_batch(agent, size, masks):
    """Random data for an agent, with these masks and with actions that they allow."""
    scores = torch.rand(size, sum(agent.nvec)) * masks
    actions = [part.argmax(1) for part in scores.split(agent.nvec, 1)]
    obs = torch.cat((torch.randn(size, agent.obs_dim), masks), 1)
    return add_targets({"obs": obs, "actions": torch.stack(actions, 1)}, agent)


@pytest.mark.parametrize("env_id", SPACES)
def test_agent_equals_independent_categorical_distributions(env_id):
    """Masked actions have probability 0, the others are renormalised."""
    envs = make_envs(ppo_mask, env_id, 16)
    obs_dim, nvec = sizes(envs)
    agent = make_agent(envs)
    agent.actor[4].weight.data *= 100
    rows = torch.from_numpy(envs.obs)
    masks = rows[:, obs_dim:]
    assert (masks == 0).any()
    with torch.no_grad():
        weights = agent.actor(rows[:, :obs_dim]).exp() * masks
        parts = [Categorical(probs=part) for part in weights.split(nvec, 1)]
        actions = torch.stack([part.sample() for part in parts], 1)
        logprobs, entropy, values = agent(rows, actions)
        expected_values = agent.critic(rows[:, :obs_dim]).squeeze(1)
        torch.testing.assert_close(agent.value(rows), expected_values)
    expected = sum(part.log_prob(action) for part, action in zip(parts, actions.unbind(1)))
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)
    expected = sum(part.entropy() for part in parts)
    torch.testing.assert_close(entropy, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values, expected_values)
    best = torch.stack([part.probs.argmax(1) for part in parts], 1)
    assert np.array_equal(agent.policy()(envs.obs, 0.0), best)


def test_masked_logits_get_no_gradient():
    agent = ppo_mask.Agent(3, [3, 2], (64, 64))
    obs = torch.cat((torch.randn(8, 3), torch.tensor([[0.0, 1, 1, 1, 0]]).expand(8, 5)), 1)
    actions = torch.tensor([[1, 0]]).expand(8, 2)
    logprobs, entropy, _ = agent(obs, actions)
    bias = agent.actor[4].bias
    for output in (logprobs, entropy):
        (grad,) = torch.autograd.grad(output.sum(), bias, retain_graph=True)
        assert grad[[0, 4]].tolist() == [0.0, 0.0]
    (grad,) = torch.autograd.grad(logprobs.sum(), bias)
    assert grad[[1, 2]].abs().min() > 1


def test_what_is_masked_has_no_chance_however_low_the_rest():
    agent = ppo_mask.Agent(3, [3, 2], (64, 64))
    agent.actor[4].bias.data -= 1000
    obs = torch.cat((torch.randn(8, 3), torch.tensor([[0.0, 1, 1, 1, 0]]).expand(8, 5)), 1)
    actions = agent.policy()(obs.numpy(), 0.0)
    assert actions[:, 0].min() > 0 and not actions[:, 1].any()
    logprobs, _, _ = agent(obs, torch.tensor([[0, 0]]).expand(8, 2))
    assert (logprobs.exp() == 0).all()


@pytest.mark.parametrize("env_id", SPACES)
def test_rollouts_keep_to_the_masks(env_id):
    """The toy refuses any other action, and what isn't in its space, with its start and dtype."""
    envs = make_envs(ppo_mask, env_id, 3)
    for env in envs.envs:
        env.unwrapped.actions.clear()  # of make_env
    obs_dim, nvec = sizes(envs)
    agent = make_agent(envs)
    obs, actions, _, terminations, truncations, episodes = ppo_mask.rollout(agent, envs, 200)
    for i, env in enumerate(envs.envs):
        assert np.array_equal(env.unwrapped.actions, actions[:, i])
    for k, mask in enumerate(np.split(obs[..., obs_dim:], np.cumsum(nvec)[:-1], 2)):
        assert np.take_along_axis(mask, actions[..., k, None], 2).all()
        assert 0.4 < mask.mean() < 0.9
    assert terminations.sum() > 10 and truncations.sum() > 10
    assert len(episodes) == (terminations | truncations).sum()


def test_log_probabilities_after_a_rollout_are_those_it_has_drawn_from():
    """policy() and forward() know the same masks: actions are as frequent as forward() says."""
    agent = ppo_mask.Agent(3, [3, 2], (64, 64))
    agent.actor[4].weight.data *= 100
    obs = np.array([[0.3, -1.0, 2.0, 1, 0, 1, 1, 1]], np.float32).repeat(100000, 0)
    actions = agent.policy()(obs, agent.noise(1, len(obs))[0])
    assert set(actions[:, 0]) == {0, 2} and set(actions[:, 1]) == {0, 1}
    for action in ([0, 0], [0, 1], [2, 0], [2, 1]):
        frequency = (actions == action).all(1).mean()
        with torch.no_grad():
            logprobs, _, _ = agent(torch.from_numpy(obs[:1]), torch.tensor([action]))
        assert frequency == pytest.approx(logprobs.exp().item(), abs=0.01)


def test_without_masks_and_with_one_part_it_is_ppo():
    """Rollouts and updates of equal bits."""
    results = []
    for script in (ppo, ppo_mask):
        torch.manual_seed(0)
        envs = make_envs(script, "NoMask-v0", 3)
        if script is ppo:
            agent = ppo.Agent(3, 4, (64, 64))
        else:
            agent = make_agent(envs)
        obs, actions, rewards, _, _, episodes = script.rollout(agent, envs, 64)
        batch, values, next_values = script.predict(
            agent, obs, actions, envs.obs, episodes, torch.device("cpu")
        )
        batch["advantages"] = torch.from_numpy(rewards).flatten()
        batch["returns"] = torch.from_numpy(values).flatten() + batch["advantages"]
        args = script.Args()
        optimizer = script.Adam(agent.parameters(), eps=1e-5)
        coefs = as_coefs(args, lr=1e-3)
        script.update(script.update_minibatches, optimizer, agent, batch, coefs, args)
        results.append(exact([obs[..., :3], actions.ravel(), rewards, next_values, flat(agent)]))
    assert results[0] == results[1]


def test_a_mask_that_allows_nothing_ends_the_run():
    class Stuck(MaskedToy):
        def observe(self):
            obs, info = super().observe()
            if len(self.obs_seen) > 5:
                info["action_mask"] = (np.ones(3), np.zeros(2))
                self.mask = np.ones(3), np.ones(2)
            return obs, info

    gym.register("Stuck-v0", Stuck, kwargs={"action_space": MultiDiscrete([3, 2])})
    envs = make_envs(ppo_mask, "Stuck-v0", 1)
    with pytest.raises(SystemExit, match="^error: an action_mask allows no action"):
        ppo_mask.rollout(ppo_mask.Agent(3, [3, 2], (64, 64)), envs, 20)


@pytest.mark.parametrize("mask", [np.ones(3), np.ones(1), (np.ones(2), np.ones(3))], ids=str)
def test_a_mask_of_another_size_ends_the_run(mask):
    class Masked(MaskedToy):
        def observe(self):
            obs, _ = super().observe()
            return obs, {"action_mask": mask}

    gym.register("Masked-v0", Masked, kwargs={"action_space": Discrete(4)})
    size = len(np.hstack(mask))
    with pytest.raises(SystemExit, match=rf"^error: an action_mask is \({size},\), not \(4,\)"):
        ppo_mask.make_env("Masked-v0")


def test_masks_may_be_nested_as_gymnasium_takes_them():
    env = ppo_mask.make_env("MaskGrid-v0")
    obs, info = env.reset(seed=1)
    env.unwrapped.action_space.sample(mask=info["action_mask"])  # raises for any other form
    np.testing.assert_array_equal(obs[-11:], np.hstack(env.unwrapped.mask))


def test_the_end_of_an_episode_may_allow_nothing():
    class Over(MaskedToy):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            mask = info["action_mask"] * (not terminated)
            return obs, reward, terminated, truncated, {"action_mask": mask}

    gym.register("Over-v0", Over, kwargs={"action_space": Discrete(4)})
    envs = make_envs(ppo_mask, "Over-v0", 2)
    *_, episodes = ppo_mask.rollout(ppo_mask.Agent(3, [4], (64, 64)), envs, 100)
    assert any(not episode.final_obs[3:].any() for _, episode in episodes)


@pytest.mark.parametrize(
    "returned, sentence",
    [
        ((np.zeros(3), None), "reset() of Bad-v0 must return 2 values"),
        ((np.zeros(2), {}), "reset() of Bad-v0 returns another shape than its space's: (2,)"),
        ((np.zeros(3), 0.0, False, {}), "step() of Bad-v0 must return 5 values"),
        ((np.zeros(2), 0.0, False, False, {}), "step() of Bad-v0 returns another shape"),
        ((np.zeros(3), np.zeros(1), False, False, {}), "must return a number as its reward"),
    ],
)
def test_what_reset_and_step_return_is_checked(returned, sentence, capsys):
    class Bad(MaskedToy):
        def reset(self, seed=None, options=None):
            result = super().reset(seed=seed)
            return returned if len(returned) == 2 else result

        def step(self, action):
            super().step(action)
            return returned

    gym.register("Bad-v0", Bad, kwargs={"action_space": Discrete(4)})
    with pytest.raises(SystemExit) as stop:
        ppo_mask.make_env("Bad-v0")
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_update_equals_that_of_stable_baselines3(monkeypatch):
    gym.register("Both-v0", MaskedToy, kwargs={"action_space": MultiDiscrete([3, 2])})
    agent = ppo_mask.Agent(3, [3, 2], (64, 64))
    batch = masked_batch(agent, 64, torch.ones(64, 5))
    compare_with_sb3(ppo_mask, agent, batch, "Both-v0", monkeypatch)


@needs_compiler
def test_compiled_update_equals_eager():
    """With masks and several parts."""

    def make_batch(agent):
        masks = torch.randint(2, (256, 5)).float()
        masks[:, [0, 4]] = 1.0
        return masked_batch(agent, 256, masks)

    compare_compiled_epochs(ppo_mask, lambda: ppo_mask.Agent(5, [3, 2], (64, 64)), make_batch)


def random_policy(envs):
    """Actions that the masks allow."""
    obs_dim, nvec = sizes(envs)
    ends = np.cumsum(nvec)

    def policy(obs, rng):
        scores = rng.random((len(obs), sum(nvec))) * obs[:, obs_dim:]
        return np.stack([part.argmax(1) for part in np.split(scores, ends[:-1], 1)], 1)

    return policy


@pytest.mark.parametrize("env_id, steps", [("Taxi-v4", 30), ("MaskGrid-v0", 23), ("Mask-v0", 0)])
def test_environments_go_on_from_a_saved_state_bit_for_bit(env_id, steps):
    compare_restored(ppo_mask, env_id, steps, random_policy)


def test_an_environment_whose_masks_do_not_come_back_starts_a_new_episode(capsys):
    class Moody(gym.Env):
        observation_space = Box(-1, 1, (2,))
        action_space = Discrete(2)
        allowed = 0

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return [0.0, 0.5], {"action_mask": np.eye(2)[self.allowed]}

        def step(self, action):
            return [0.0, 1.0], 0.0, False, False, {"action_mask": np.eye(2)[self.allowed]}

    gym.register("Moody-v0", Moody)
    envs = make_envs(ppo_mask, "Moody-v0", 1)
    assert envs.obs.tolist() == [[0, 0.5, 1, 0]]  # a list will do for an array
    envs.envs[0].unwrapped.allowed = 1
    envs.load_state_dict(envs.state_dict())
    assert "can't be brought back" in capsys.readouterr().out
    assert envs.obs.tolist() == [[0, 0.5, 0, 1]]


def test_evaluation_plays_the_likeliest_allowed_actions(monkeypatch):
    envs = make_envs(ppo_mask, "MaskTwoParts-v0", 1)
    agent = make_agent(envs)
    agent.actor[4].weight.data *= 100
    episodes, toy = record_evaluation(ppo_mask, agent, envs, monkeypatch, env_id="MaskTwoParts-v0")
    seen = list(zip(toy.obs_seen, toy.masks_seen))[2:]  # the first two are of make_env
    actions = iter(toy.actions[1:])
    first = 0
    for episode in episodes:
        for obs, mask in seen[first : first + episode.length]:
            with torch.no_grad():
                logits = agent.actor(torch.tensor(obs, dtype=torch.float32)[None])[0]
            parts = (logits.exp() * torch.tensor(mask)).split([3, 2])
            assert next(actions).tolist() == [part.argmax() for part in parts]
        first += episode.length + 1  # after an episode's last observation comes the next's first
    assert next(actions, None) is None and len(seen) == first + 1


@pytest.mark.parametrize("env_id", ["Mask-v0", "MaskGrid-v0"])
def test_toy_is_learned(run_script, env_id):
    flags = "--total-timesteps 16384 --learning-rate 0.003 --eval-episodes 50 --no-compile".split()
    module = run_script(ppo_mask.__file__, "--env-id", env_id, *flags)
    # Half of the time the best is action 0, which half of the masks forbid
    assert learned_share(module) > 0.65  # 0.75 is possible, 0.5 is chance


def test_spaces_that_do_not_fit_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        ppo_mask.make_env("Pendulum-v1")
    assert stop.value.code == 2
    assert "needs a discrete one" in capsys.readouterr().err
