"""a2c.py: what differs from ppo.py, whose tests hold for what both share."""

from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C
from stable_baselines3.common.vec_env import DummyVecEnv
from test_ppo import (
    Outputs,
    as_coefs,
    compare_compiled,
    compare_with_library,
    flat,
    gradients,
    learned_share,
    make_agent,
    make_envs,
    needs_compiler,
    random_batch,
    train_sb3,
)

import a2c
import ppo

OPTIMIZERS = {"adam": a2c.Adam, "rmsprop": a2c.RMSprop}


def a2c_batch(agent, size):
    batch = random_batch(agent, size)
    return {name: batch[name] for name in ("obs", "actions", "advantages", "returns")}


@pytest.mark.parametrize("norm_adv", [False, True])
def test_gradient_of_a_hand_made_batch(norm_adv):
    """In closed form.

    -A/n in the log-probabilities, -ent_coef/n in the entropies, vf_coef (V - R)/n in the values.
    """
    agent = Outputs(
        torch.tensor([-1.0, -2.0, -0.5, -1.5]),
        torch.tensor([0.5, 0.6, 0.7, 0.8]),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.0])
    returns = torch.tensor([0.0, 2.0, 5.0, 3.0])
    batch = {"obs": None, "actions": None, "advantages": advantages, "returns": returns}
    args = a2c.Args(norm_adv=norm_adv, ent_coef=0.1, vf_coef=0.6)
    _, metrics, grads = gradients(a2c.a2c_loss, agent, batch, as_coefs(args), args)
    if norm_adv:
        advantages = (advantages - 0.5) / 1.2909945  # sqrt(5/3)
    in_values = torch.tensor([0.15, 0.0, -0.3, 0.15])
    expected = torch.cat((-advantages / 4, torch.full((4,), -0.025), in_values))
    torch.testing.assert_close(grads, expected)
    policy_loss = -(advantages * agent.logprobs.detach()).mean().item()
    assert metrics.tolist() == pytest.approx([policy_loss, 0.5 * (1 + 0 + 4 + 1) / 4, 0.65])


def test_first_update_equals_ppo_with_one_epoch_one_minibatch_and_no_clipping():
    results = []
    for script in (a2c, ppo):
        torch.manual_seed(0)
        agent = script.Agent(4, 3, (64, 64))
        before = flat(agent)
        batch = a2c_batch(agent, 40)
        optimizer = script.Adam(agent.parameters(), eps=1e-5)
        if script is a2c:
            args = a2c.Args()
            a2c.update(optimizer, agent, batch, as_coefs(args, lr=1e-3), args)
        else:
            with torch.no_grad():
                logprobs, _, values = agent(batch["obs"], batch["actions"])
            batch |= {"logprobs": logprobs, "values": values}
            args = ppo.Args(num_minibatches=1, update_epochs=1, norm_adv=False, clip_vloss=False)
            coefs = as_coefs(args, lr=1e-3, clip_coef=1e9)
            ppo.update(ppo.update_minibatches, optimizer, agent, batch, coefs, args)
        assert (flat(agent) - before).abs().max() > 9e-4
        results.append(flat(agent))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_equal_those_of_pytorch(optimizer):
    def library(params):
        if optimizer == "adam":
            return torch.optim.Adam(params, eps=1e-5)
        return torch.optim.RMSprop(params, alpha=0.99, eps=1e-5)

    agent = a2c.Agent(4, 3, (64, 64))
    compare_with_library(OPTIMIZERS[optimizer](agent.parameters(), eps=1e-5), library, agent)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_equal_those_of_the_optimizers_of_pytorch(optimizer):
    """With the gradients of updates, which are clipped."""
    agent = a2c.Agent(4, 3, (64, 64))
    args = a2c.Args(max_grad_norm=0.1)
    lr = 3e-3
    coefs = as_coefs(args, lr=lr)
    theirs = deepcopy(agent)
    if optimizer == "rmsprop":
        library = torch.optim.RMSprop(theirs.parameters(), lr=lr, alpha=0.99, eps=1e-5)
    else:
        library = torch.optim.Adam(theirs.parameters(), lr=lr, eps=1e-5)
    ours = OPTIMIZERS[optimizer](agent.parameters(), eps=1e-5)
    for _ in range(5):
        batch = a2c_batch(agent, 40)
        a2c.update(ours, agent, batch, coefs, args)
        library.zero_grad()
        loss, _ = a2c.a2c_loss(theirs, batch, coefs, args)
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1) > 0.1
        library.step()
        torch.testing.assert_close(flat(agent), flat(theirs), rtol=0, atol=1e-6)


def test_update_equals_that_of_stable_baselines3():
    args = a2c.Args()
    agent = a2c.Agent(4, 2, (64, 64))
    before = flat(agent)
    batch = a2c_batch(agent, 40)
    model = A2C(
        "MlpPolicy",
        DummyVecEnv([lambda: gym.make("CartPole-v1")]),
        n_steps=40,
        learning_rate=7e-4,
        ent_coef=0.01,
        vf_coef=0.25,
        max_grad_norm=0.5,
        device="cpu",
    )
    expected = train_sb3(model, agent, batch)
    optimizer = a2c.RMSprop(agent.parameters(), eps=1e-5)
    a2c.update(optimizer, agent, batch, as_coefs(args, lr=7e-4), args)
    torch.testing.assert_close(flat(agent), expected, rtol=0, atol=1e-6)
    assert (flat(agent) - before).abs().max() > 5e-3


@needs_compiler
def test_compiled_update_equals_eager():
    """Three steps, with the optimizer that ppo.py has not."""
    args = a2c.Args()
    compiled_update = a2c.compile_or_not(a2c.update, args, torch.device("cpu"))
    assert compiled_update is not a2c.update

    def run_update(compiled, agent):
        optimizer = a2c.RMSprop(agent.parameters(), eps=1e-5)
        function = compiled_update if compiled else a2c.update
        for lr in (1e-3, 2e-3, 3e-3):
            coefs = as_coefs(args, lr=lr)
            metrics = function(optimizer, agent, a2c_batch(agent, 40), coefs, args)
        return metrics

    compare_compiled(lambda: a2c.Agent(5, 3, (64, 64)), run_update)


def test_values_of_a_rollout_are_those_of_ppo():
    results = []
    for script in (a2c, ppo):
        torch.manual_seed(0)
        envs = make_envs(script, "Plain-v0", 3)
        agent = make_agent(script, envs)
        obs, actions, *_, episodes = script.rollout(agent, envs, 50)
        assert len(episodes) > 5
        _, values, next_values = script.predict(
            agent, obs, actions, envs.obs, episodes, torch.device("cpu")
        )
        results.append(torch.from_numpy(np.stack((values, next_values))))
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
@pytest.mark.parametrize("script", [a2c, ppo], ids=lambda script: script.__name__)
def test_a_run_learns_from_n_step_and_one_step_returns(run_script, script, gae_lambda, bootstrap):
    """The returns of the last of three rollouts against sums over terminations and truncations.

    What is annealed has come to a third.
    """
    flags = (
        "--env-id Plain-v0 --num-envs 3 --num-steps 50 --total-timesteps 450 --gamma 0.9 "
        f"--no-compile --eval-episodes 1 --learning-rate 3e-9 --gae-lambda {gae_lambda} "
        "--ent-coef 0.02 --vf-coef 0.3 --max-grad-norm 0.7"
    ).split()
    coefs = {"lr": 1e-9, "ent_coef": 0.02, "vf_coef": 0.3, "max_grad_norm": 0.7}
    if script is ppo:
        coefs["clip_coef"] = 0.2 / 3
        flags += ["--num-minibatches", "3", "--anneal-clip"]
    if not bootstrap:
        flags += ["--no-bootstrap-truncated"]
    module = run_script(script.__file__, *flags)
    assert {name: x.item() for name, x in module.coefs.items()} == pytest.approx(coefs)
    assert module.terminations.any() and module.truncations.any()
    final = {(step, episode.env): episode.final_obs for step, episode in module.episodes}

    def value(obs):
        with torch.no_grad():
            return module.agent.critic(torch.from_numpy(obs)[None]).item()

    for i in range(3):
        for step in range(50):
            expected = 0.0
            discount = 1.0
            for t in range(step, 50):
                expected += discount * module.rewards[t, i]
                discount *= 0.9
                truncated = module.truncations[t, i]
                if module.terminations[t, i] or truncated and not bootstrap:
                    break
                if truncated or t == 49 or gae_lambda == 0:
                    after = module.envs.obs[i] if t == 49 else module.obs[t + 1, i]
                    expected += discount * value(final.get((t, i), after))
                    break
            assert module.returns[step, i] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_toy_is_learned(run_script, optimizer):
    flags = "--env-id Plain-v0 --total-timesteps 40000 --learning-rate 0.003 --eval-episodes 50"
    module = run_script(a2c.__file__, *flags.split(), "--no-compile", "--optimizer", optimizer)
    assert type(module.optimizer).__name__ == OPTIMIZERS[optimizer].__name__
    assert learned_share(module) > 0.8  # 1 is possible, 0.5 is chance


def test_bad_flags_are_refused(refused):
    for flags, sentence in (
        ("--num-envs 1 --num-steps 1 --norm-adv", "rollouts of one step need --no-norm-adv"),
        ("--total-timesteps 39", "--total-timesteps is below a rollout, 40"),
        ("--num-steps 0", "--num-steps must be above 0"),
        ("--gae-lambda 1.1", "--gae-lambda must be from 0 to 1"),
        ("--optimizer sgd", "sgd"),
    ):
        assert sentence in refused(a2c, flags.split()), flags


def test_a_rollout_of_one_step_is_accepted(run_script):
    flags = "--num-envs 1 --num-steps 1 --total-timesteps 3 --eval-episodes 1 --no-compile"
    assert run_script(a2c.__file__, *flags.split()).run.global_step == 3
