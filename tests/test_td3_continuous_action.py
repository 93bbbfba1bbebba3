"""td3_continuous_action.py: what it has of its own.

What it shares with ddpg_continuous_action.py is tested there. The oracles are plain PyTorch with
torch.optim, and Stable-Baselines3.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3 import TD3
from stable_baselines3.common.logger import Logger
from test_ddpg_continuous_action import (
    QUICK,
    Stamped,
    as_tensors,
    draw_uniform,
    drawn_batch,
    feed,
    flat,
    move,
    stored,
    transitions,
)
from torch import nn

import td3_continuous_action as td3

SCRIPT = Path(td3.__file__)


def as_coefs(args):
    """The coefs that these flags give an update."""
    coefs = {
        "actor_lr": args.actor_learning_rate or args.learning_rate,
        "critic_lr": args.critic_learning_rate or args.learning_rate,
        "gamma": args.gamma,
        "tau": args.tau,
        "policy_noise": args.policy_noise,
        "noise_clip": args.noise_clip,
    }
    return {name: torch.tensor(value) for name, value in coefs.items()}


def make_learner(agent, distance=0.1):
    """A learner; distance: of the targets from the agent."""
    learner = td3.Learner(agent)
    move(learner.target, distance)
    return learner


class Reference:
    """TD3 in straight torch: modules, autograd, torch.optim.Adam, targets as copies."""

    def __init__(self, agent, learner, args):
        self.args = args
        self.num_outside = 0  # of the targets' actions, before they are clipped to the bounds
        self.nets = copy.deepcopy(agent)
        self.targets = copy.deepcopy(learner.target)
        lr = args.actor_learning_rate or args.learning_rate
        self.actor_adam = torch.optim.Adam(self.nets.actor.parameters(), lr)
        lr = args.critic_learning_rate or args.learning_rate
        decay = args.weight_decay
        self.critic_adam = torch.optim.Adam(self.nets.critic.parameters(), lr, weight_decay=decay)

    def descend(self, loss, net, adam):
        for parameter in self.nets.parameters():
            parameter.grad = None
        loss.backward()
        if self.args.max_grad_norm:
            nn.utils.clip_grad_norm_(net.parameters(), self.args.max_grad_norm)
        adam.step()

    def update(self, batch, noise, with_actor):
        """One update; returns what METRICS are, as floats: the last one only with_actor."""
        args, nets, targets = self.args, self.nets, self.targets
        obs, rewards, next_obs = batch["obs"], batch["rewards"], batch["next_obs"]
        with torch.no_grad():
            smoothing = (noise * args.policy_noise).clip(-args.noise_clip, args.noise_clip)
            next_actions = targets.actor(next_obs) + smoothing
            self.num_outside += int((next_actions.abs() > 1).sum())
            next_actions = next_actions.clip(-1, 1)
            next_inputs = torch.cat((next_obs, next_actions), 1)
            first = targets.critic.network1(next_inputs)[:, 0]
            second = targets.critic.network2(next_inputs)[:, 0]
            next_values = torch.where(first < second, first, second)
            terminated = batch["terminations"] == 1
            returns = torch.where(terminated, rewards, rewards + args.gamma * next_values)
        inputs = torch.cat((obs, batch["actions"]), 1)
        values = [net(inputs)[:, 0] for net in (nets.critic.network1, nets.critic.network2)]
        losses = [((x - returns) ** 2).mean() for x in values]
        metrics = [*(x.mean().item() for x in values), *(loss.item() for loss in losses)]
        self.descend(sum(losses), nets.critic, self.critic_adam)
        if with_actor:
            loss = -nets.critic.network1(torch.cat((obs, nets.actor(obs)), 1)).mean()
            metrics.append(loss.item())
            self.descend(loss, nets.actor, self.actor_adam)
            with torch.no_grad():
                for target, parameter in zip(targets.parameters(), nets.parameters()):
                    target.copy_((1 - args.tau) * target + args.tau * parameter)
        return metrics

    def assert_equals(self, agent, learner, rtol, atol):
        """The weights and the targets."""
        for ours, theirs in ((agent, self.nets), (learner.target, self.targets)):
            torch.testing.assert_close(flat(ours), flat(theirs), rtol=rtol, atol=atol)


ALL_FLAGS = {
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_grad_norm": 0.01,
    "tau": 0.3,
    "gamma": 0.9,
    "policy_noise": 0.6,
    "noise_clip": 0.4,
}


@pytest.mark.parametrize("flags, compiled", [({}, False), (ALL_FLAGS, False), (ALL_FLAGS, True)])
def test_updates_equal_a_plain_reference(flags, compiled):
    """Weights, targets and metrics, over ten updates, of which every second has the actor's."""
    torch.manual_seed(1)
    args = td3.Args(hidden_sizes=(16, 12), compile=compiled, **flags)
    agent = td3.Agent(3, 2, args.hidden_sizes)
    with torch.no_grad():
        agent.actor[-2].weight *= 20.0  # for actions near the bounds
    learner = make_learner(agent)
    reference = Reference(agent, learner, args)
    update = td3.compile_or_not(td3.update, args, torch.device("cpu"))
    sums = np.zeros(5)
    for number in range(10):
        batch, noise = transitions(32, 3, 2), torch.randn(32, 2)
        update(agent, learner, batch, noise, number % 2 == 0, as_coefs(args), args)
        expected = reference.update(batch, noise, number % 2 == 0)
        sums[: len(expected)] += expected
    reference.assert_equals(agent, learner, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(learner.sums, sums, rtol=1e-4, atol=1e-5)
    assert learner.counts.tolist() == [10, 10, 10, 10, 5]
    assert learner.critic_optimizer.steps == 10
    assert learner.actor_optimizer.steps == 5
    assert reference.num_outside > 20


def test_updates_equal_those_of_stable_baselines3(monkeypatch):
    """TD3 of SB3, six updates from the same weights on the same minibatches, with its draws."""
    args = td3.Args(hidden_sizes=(16, 16))
    model = TD3(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=args.learning_rate,
        batch_size=32,
        tau=args.tau,
        gamma=args.gamma,
        policy_delay=args.policy_frequency,
        target_policy_noise=args.policy_noise,
        target_noise_clip=args.noise_clip,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [16, 16]},
    )
    model.set_logger(Logger(None, []))
    agent = td3.Agent(3, 1, args.hidden_sizes)
    learner = make_learner(agent)
    pairs = (
        (agent.actor, model.actor.mu),
        (agent.critic, model.critic),
        (learner.target.actor, model.actor_target.mu),
        (learner.target.critic, model.critic_target),
    )
    for ours, theirs in pairs:
        nn.utils.vector_to_parameters(flat(ours), theirs.parameters())
    for number in range(6):
        batch = transitions(32, 3, 1)
        feed(model, batch, monkeypatch)
        torch.manual_seed(number)
        model.train(gradient_steps=1, batch_size=32)
        torch.manual_seed(number)
        noise = torch.randn(32, 1)
        with_actor = number % 2 == 1  # theirs takes the first step of the actor in the second one
        td3.update(agent, learner, batch, noise, with_actor, as_coefs(args), args)
    for ours, theirs in pairs:
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-5, atol=1e-7)


def test_a_run_equals_plain_code(run_script):
    """Each action, and the weights and targets at the end, of 240 steps in two environments.

    The noise on the targets' actions is drawn for each action of each transition.
    """
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "StampedSlanted-v0", "--num-envs", "2", "--total-timesteps", "480"),
        *("--learning-starts", "300", "--random-steps", "30", "--seed", "7"),
        *("--eval-interval", "25"),
    )
    obs, actions, *_ = stored(ran)
    torch.manual_seed(7)
    agent = td3.Agent(3, 2, (8, 8))
    reference = Reference(agent, td3.Learner(agent), ran.args)
    num_updates = 0
    for step in range(240):
        if 2 * step < 30:
            expected = draw_uniform(2, 2)
        else:
            noise = 0.1 * torch.randn(2, 2).numpy()
            with torch.no_grad():
                policy = reference.nets.actor(torch.tensor(obs[step])).numpy()
            expected = (policy + noise).clip(-1, 1)
        np.testing.assert_allclose(actions[step], expected, atol=1e-4)
        count = 2 * step + 2
        while num_updates < count - 300:
            batch = as_tensors(drawn_batch(ran, count))
            reference.update(batch, torch.randn(8, 2), num_updates % 2 == 0)
            num_updates += 1
    assert num_updates == 180
    reference.assert_equals(ran.agent, ran.learner, rtol=2e-3, atol=5e-5)


def test_networks_and_defaults_are_those_of_the_paper_s_code():
    args = td3.Args()
    agent = td3.Agent(17, 6, args.hidden_sizes)
    critics = (agent.critic.network1, agent.critic.network2)
    for net, inputs, outputs in ((agent.actor, 17, 6), *((critic, 23, 1) for critic in critics)):
        shapes = [tuple(x.weight.shape) for x in net if isinstance(x, nn.Linear)]
        assert shapes == [(256, inputs), (256, 256), (outputs, 256)]
    assert not torch.equal(*(critic[0].weight for critic in critics))
    assert args.total_timesteps == args.buffer_size == 1_000_000
    assert (args.learning_starts, args.random_steps) == (25_000, None)
    assert (args.learning_rate, args.gamma, args.tau, args.batch_size) == (3e-4, 0.99, 0.005, 256)
    assert (args.exploration_noise, args.policy_noise, args.noise_clip) == (0.1, 0.2, 0.5)
    assert (args.noise_type, args.policy_frequency, args.updates_per_step) == ("gaussian", 2, 1.0)
    assert args.weight_decay == 0.0


def test_without_a_bound_noise_is_not_clipped(run_script):
    flags = ("--env-id", "StampedSlanted-v0", "--total-timesteps", "30", "--learning-starts", "20")
    sums = []
    for bound in ("inf", "1e9", "0.1"):
        Stamped.made.clear()
        noise = ("--policy-noise", "9", "--noise-clip", bound)
        ran = run_script(SCRIPT, *QUICK, *flags, *noise, "--run-name", bound)
        sums.append(ran.learner.sums.tolist())
    assert sums[0] == sums[1] != sums[2]


def test_targets_are_not_learned_through():
    """Not even where an edited copy takes the networks themselves for the targets."""
    args = td3.Args(hidden_sizes=(16, 16))
    agent = td3.Agent(3, 2, args.hidden_sizes)
    learner = make_learner(agent)
    learner.target = agent
    reference = Reference(agent, learner, args)
    batch, noise = transitions(32, 3, 2), torch.randn(32, 2)
    td3.update(agent, learner, batch, noise, False, as_coefs(args), args)
    reference.update(batch, noise, False)
    torch.testing.assert_close(flat(agent), flat(reference.nets), rtol=1e-5, atol=1e-7)
