"""sac_continuous_action.py: what it has of its own.

What it shares with ddpg_continuous_action.py is tested there. The oracles are plain PyTorch with
torch.optim and torch.distributions, and Stable-Baselines3.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3 import SAC
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
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

import sac_continuous_action as sac

SCRIPT = Path(sac.__file__)


def as_coefs(args, action_dim):
    """The coefs that these flags give an update."""
    coefs = {
        "actor_lr": args.actor_learning_rate or args.learning_rate,
        "critic_lr": args.critic_learning_rate or args.learning_rate,
        "gamma": args.gamma,
        "tau": args.tau,
        "alpha_lr": args.alpha_learning_rate or args.learning_rate,
        "target_entropy": args.target_entropy or -float(action_dim),
    }
    return {name: torch.tensor(value) for name, value in coefs.items()}


def make_learner(agent, args, distance=0.1):
    """A learner; distance: of the target from the critics."""
    learner = sac.Learner(agent, args.alpha)
    move(learner.target, distance)
    return learner


def distribution(outputs):
    """The policy as torch.distributions has it."""
    mean, log_std = outputs.chunk(2, 1)
    normal = Normal(mean, log_std.clip(-20, 2).exp())
    return TransformedDistribution(normal, [TanhTransform(cache_size=1)])


def play(outputs, noise):
    """Actions, and their log-probabilities by torch.distributions."""
    policy = distribution(outputs)
    actions = (policy.base_dist.mean + policy.base_dist.stddev * noise).tanh()
    return actions, policy.log_prob(actions).sum(1)


class Reference:
    """SAC in straight torch: modules, autograd, torch.optim.Adam, targets as copies."""

    def __init__(self, agent, learner, args, action_dim):
        self.args = args
        self.nets = copy.deepcopy(agent)
        self.log_alpha = learner.log_alpha.detach().clone().requires_grad_()
        self.targets = copy.deepcopy(learner.target)
        lr = args.actor_learning_rate or args.learning_rate
        self.actor_adam = torch.optim.Adam(self.nets.actor.parameters(), lr)
        lr = args.critic_learning_rate or args.learning_rate
        decay = args.weight_decay
        self.critic_adam = torch.optim.Adam(self.nets.critic.parameters(), lr, weight_decay=decay)
        lr = args.alpha_learning_rate or args.learning_rate
        self.alpha_adam = torch.optim.Adam([self.log_alpha], lr)
        self.target_entropy = args.target_entropy
        if args.target_entropy is None:
            self.target_entropy = -action_dim

    def descend(self, loss, params, adam):
        for parameter in (*self.nets.parameters(), self.log_alpha):
            parameter.grad = None
        loss.backward()
        if self.args.max_grad_norm:
            nn.utils.clip_grad_norm_(params, self.args.max_grad_norm)
        adam.step()

    def update(self, batch, noises):
        """One update; returns what METRICS are, as floats."""
        args, nets = self.args, self.nets
        obs, rewards, next_obs = batch["obs"], batch["rewards"], batch["next_obs"]
        alpha = self.log_alpha.exp().item()
        with torch.no_grad():
            next_actions, next_logprobs = play(nets.actor(next_obs), noises[1])
            next_inputs = torch.cat((next_obs, next_actions), 1)
            first = self.targets.network1(next_inputs)[:, 0]
            second = self.targets.network2(next_inputs)[:, 0]
            soft_values = torch.where(first < second, first, second) - alpha * next_logprobs
            terminated = batch["terminations"] == 1
            returns = torch.where(terminated, rewards, rewards + args.gamma * soft_values)
            entropy = -play(nets.actor(obs), noises[0])[1]
        alpha_loss = (self.log_alpha * (entropy - self.target_entropy)).mean()

        critics = (nets.critic.network1, nets.critic.network2)
        inputs = torch.cat((obs, batch["actions"]), 1)
        values = [net(inputs)[:, 0] for net in critics]
        losses = [((x - returns) ** 2).mean() for x in values]
        metrics = [*(x.mean().item() for x in values), *(loss.item() for loss in losses)]
        self.descend(sum(losses), nets.critic.parameters(), self.critic_adam)

        actions, logprobs = play(nets.actor(obs), noises[0])
        inputs = torch.cat((obs, actions), 1)
        first, second = (net(inputs)[:, 0] for net in critics)
        loss = (alpha * logprobs - torch.where(first < second, first, second)).mean()
        metrics += [loss.item(), alpha, entropy.mean().item(), alpha_loss.item()]
        self.descend(loss, nets.actor.parameters(), self.actor_adam)
        if args.autotune:
            self.descend(alpha_loss, [self.log_alpha], self.alpha_adam)
        with torch.no_grad():
            for target, parameter in zip(self.targets.parameters(), nets.critic.parameters()):
                target.copy_((1 - args.tau) * target + args.tau * parameter)
        return metrics

    def assert_equals(self, agent, learner, rtol, atol):
        """The weights, the targets and the temperature."""
        for ours, theirs in (
            (flat(agent), flat(self.nets)),
            (flat(learner.target), flat(self.targets)),
            (learner.log_alpha, self.log_alpha),
        ):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


ALL_FLAGS = {
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
    "alpha_learning_rate": 3e-3,
    "alpha": 0.3,
    "target_entropy": 0.5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.01,
    "tau": 0.3,
    "gamma": 0.9,
}


FIXED = {"autotune": False, "alpha": 0.2}


@pytest.mark.parametrize(
    "flags, compiled", [({}, False), (ALL_FLAGS, False), (ALL_FLAGS, True), (FIXED, False)]
)
def test_updates_equal_a_plain_reference(flags, compiled):
    """Weights, targets, temperature and metrics, over ten updates."""
    torch.manual_seed(1)
    args = sac.Args(hidden_sizes=(16, 12), compile=compiled, **flags)
    agent = sac.Agent(3, 2, args.hidden_sizes)
    learner = make_learner(agent, args)
    reference = Reference(agent, learner, args, 2)
    update = sac.compile_or_not(sac.update, args, torch.device("cpu"))
    sums = np.zeros(8)
    for _ in range(10):
        batch, noises = transitions(32, 3, 2), torch.randn(2, 32, 2)
        update(agent, learner, batch, noises, as_coefs(args, 2), args)
        sums += reference.update(batch, noises)
    if not args.autotune:
        sums[7] = 0.0
        assert learner.log_alpha.item() == pytest.approx(np.log(0.2))
    reference.assert_equals(agent, learner, rtol=1e-4, atol=5e-6)
    np.testing.assert_allclose(learner.sums, sums, rtol=1e-4, atol=1e-4)
    assert learner.counts.tolist() == [*7 * [10], 10 * args.autotune]


def test_updates_equal_those_of_stable_baselines3(monkeypatch):
    """SAC of SB3, five updates from the same weights on the same minibatches, with its draws."""
    args = sac.Args(hidden_sizes=(16, 16), critic_learning_rate=None, alpha_learning_rate=None)
    model = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=args.learning_rate,
        batch_size=32,
        tau=args.tau,
        gamma=args.gamma,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [16, 16]},
    )
    model.set_logger(Logger(None, []))
    agent = sac.Agent(3, 1, args.hidden_sizes)
    learner = make_learner(agent, args)

    def actor_of_sb3():
        """Their actor's weights in the order of ours, whose last layer is both of theirs."""
        mu, log_std = model.actor.mu, model.actor.log_std
        last = (mu.weight, log_std.weight, mu.bias, log_std.bias)
        return [*model.actor.latent_pi.parameters(), *last]

    pairs = (
        (agent.actor, actor_of_sb3()),
        (agent.critic, [*model.critic.parameters()]),
        (learner.target, [*model.critic_target.parameters()]),
    )
    for ours, theirs in pairs:
        nn.utils.vector_to_parameters(flat(ours), theirs)
    for number in range(5):
        batch = transitions(32, 3, 1)
        feed(model, batch, monkeypatch)
        torch.manual_seed(number)
        model.train(gradient_steps=1, batch_size=32)
        torch.manual_seed(number)
        noises = torch.stack((torch.randn(32, 1), torch.randn(32, 1)))
        sac.update(agent, learner, batch, noises, as_coefs(args, 1), args)
    for ours, theirs in pairs:
        expected = nn.utils.parameters_to_vector(theirs)
        torch.testing.assert_close(flat(ours), expected, rtol=1e-4, atol=1e-6)
    assert learner.log_alpha.item() == pytest.approx(model.log_ent_coef.item(), rel=1e-4)
    assert model.log_ent_coef.item() != 0


def test_actions_and_log_probabilities_are_those_of_a_squashed_gaussian():
    """Those of torch.distributions, in float64, with standard deviations held in their bounds."""
    torch.manual_seed(1)
    outputs, noise = torch.randn(1000, 6), torch.randn(1000, 3)
    outputs[:10, 3:] = 50.0  # log_std is 2 at most
    outputs[10:20, 3:] = -50.0  # and -20 at least
    outputs[:10, :3] = 0.0  # for actions that aren't 1 yet
    actions, logprobs = sac.squash(outputs, noise)
    expected, expected_logprobs = play(outputs.double(), noise.double())
    inner = (expected.abs() < 1 - 1e-6).all(1)  # where the oracle has not lost digits
    assert inner.sum() > 700
    torch.testing.assert_close(actions, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        logprobs[inner], expected_logprobs[inner].float(), rtol=1e-4, atol=1e-3
    )


def test_log_probabilities_are_finite_where_tanh_is_1():
    """There log(1 - tanh(x)^2) is 2 (log 2 - |x|) to rounding."""
    outputs = torch.tensor([[40.0, 0.0], [-40.0, 0.0]], requires_grad=True)
    actions, logprobs = sac.squash(outputs, torch.zeros(2, 1))
    assert actions.tolist() == [[1.0], [-1.0]]
    expected = -0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - 40)
    np.testing.assert_allclose(logprobs.detach(), expected, rtol=1e-6)
    (grads,) = torch.autograd.grad(logprobs.sum(), outputs)
    torch.testing.assert_close(grads, torch.tensor([[2.0, -1.0], [-2.0, -1.0]]))


ALL_OF_A_RUN = [
    *("--target-entropy", "-0.7", "--alpha-learning-rate", "2e-3", "--alpha", "0.4"),
    *("--actor-learning-rate", "2e-4", "--critic-learning-rate", "5e-4"),
    *("--gamma", "0.9", "--tau", "0.01"),
]


@pytest.mark.parametrize("flags", [[], ALL_OF_A_RUN], ids=["defaults", "all"])
def test_a_run_equals_plain_code(run_script, flags):
    """Each action, and the weights and targets at the end, of 240 steps in two environments.

    And the metrics since the last row of the log. Training draws its actions; the last evaluation
    takes those of the mean.
    """
    Stamped.made.clear()
    ran = run_script(
        SCRIPT,
        *QUICK,
        *("--env-id", "StampedSlanted-v0", "--num-envs", "2", "--total-timesteps", "480"),
        *("--learning-starts", "300", "--random-steps", "30", "--seed", "7"),
        *("--eval-interval", "25", *flags),
    )
    obs, actions, *_ = stored(ran)
    torch.manual_seed(7)
    agent = sac.Agent(3, 2, (8, 8))
    reference = Reference(agent, sac.Learner(agent, ran.args.alpha), ran.args, 2)
    metrics = []
    for step in range(240):
        if 2 * step < 30:
            expected = draw_uniform(2, 2)
        else:
            noise = torch.randn(2, 2)
            with torch.no_grad():
                expected, _ = play(reference.nets.actor(torch.tensor(obs[step])), noise)
        np.testing.assert_allclose(actions[step], expected, atol=1e-4)
        count = 2 * step + 2
        while len(metrics) < count - 300:
            batch = as_tensors(drawn_batch(ran, count))
            metrics.append(reference.update(batch, torch.randn(2, 8, 2)))
    assert len(metrics) == 180
    sums = np.sum(metrics[100:], 0)  # there is a row after 200 steps of both environments
    np.testing.assert_allclose(ran.learner.sums, sums, rtol=2e-3, atol=2e-3)
    reference.assert_equals(ran.agent, ran.learner, rtol=2e-3, atol=5e-5)
    evaluated = Stamped.made[-1]
    first = torch.tensor([[evaluated.number, 2.0, 0.0]])  # make_env's reset came before
    with torch.no_grad():
        action = distribution(reference.nets.actor(first)).base_dist.mean.tanh()[0].numpy()
    low, high = ran.envs.action_space.low, ran.envs.action_space.high
    expected = low + (action + 1) / 2 * (high - low)
    np.testing.assert_allclose(evaluated.actions[1], expected, rtol=1e-3, atol=1e-4)


def test_init_from_takes_networks_and_no_temperature(run_script):
    flags = ("--env-id", "StampedSlanted-v0", "--total-timesteps", "60", "--learning-starts", "20")
    first = run_script(SCRIPT, *QUICK, *flags, "--alpha", "0.1", "--run-name", "first")
    assert first.learner.log_alpha.item() != pytest.approx(np.log(0.1), rel=1e-5)
    again = ("--init-from", str(first.run.folder), "--no-autotune", "--alpha", "0.7")
    ran = run_script(SCRIPT, *QUICK, *flags[:3], "21", *flags[4:], *again)
    assert ran.learner.log_alpha.item() == pytest.approx(np.log(0.7))
    assert ran.agent.state_dict().keys() == first.agent.state_dict().keys()
    torch.testing.assert_close(flat(ran.agent), flat(first.agent), rtol=1e-2, atol=1e-3)


def test_networks_and_defaults():
    """Of the paper's table 1; the 10,000 random steps are Tianshou's."""
    args = sac.Args()
    agent = sac.Agent(17, 6, args.hidden_sizes)
    critics = (agent.critic.network1, agent.critic.network2)
    for net, inputs, outputs in ((agent.actor, 17, 12), *((critic, 23, 1) for critic in critics)):
        shapes = [tuple(x.weight.shape) for x in net if isinstance(x, nn.Linear)]
        assert shapes == [(256, inputs), (256, 256), (outputs, 256)]
    assert sac.Learner(agent, args.alpha).log_alpha == 0.0
    assert args.total_timesteps == args.buffer_size == 1_000_000
    assert (args.learning_rate, args.gamma, args.tau, args.batch_size) == (3e-4, 0.99, 0.005, 256)
    rates = (args.actor_learning_rate, args.critic_learning_rate, args.alpha_learning_rate)
    assert rates == (None, 1e-3, 1e-3)
    assert (args.autotune, args.alpha, args.target_entropy) == (True, 1.0, None)
    assert (args.learning_starts, args.random_steps, args.updates_per_step) == (5000, None, 1.0)
    assert args.weight_decay == 0.0


def test_targets_are_not_learned_through():
    """Not even where an edited copy takes the critics themselves for their targets."""
    args = sac.Args(hidden_sizes=(16, 16))
    agent = sac.Agent(3, 2, args.hidden_sizes)
    learner = make_learner(agent, args)
    learner.target = agent.critic
    reference = Reference(agent, learner, args, 2)
    batch, noises = transitions(32, 3, 2), torch.randn(2, 32, 2)
    sac.update(agent, learner, batch, noises, as_coefs(args, 2), args)
    reference.update(batch, noises)
    torch.testing.assert_close(flat(agent), flat(reference.nets), rtol=1e-5, atol=1e-6)
