"""ppo_penalty.py: what differs from ppo.py, whose tests hold for what both share."""

import signal

import numpy as np
import pytest
import torch
from processes import RUN, differences, load_checkpoint, scalars
from test_ppo import (
    Outputs,
    as_coefs,
    compare_compiled_epochs,
    flat,
    gradients,
    learned_share,
    needs_compiler,
    random_batch,
)

import ppo_penalty as ppo


@pytest.mark.parametrize("norm_adv, clip_vloss", [(False, False), (True, False), (True, True)])
def test_penalty_takes_the_place_of_the_clipped_ratio(norm_adv, clip_vloss):
    """Equation 8 of the paper, and its gradient in closed form."""
    agent = Outputs(torch.randn(64), torch.rand(64), torch.randn(64))
    batch = {
        "obs": None,
        "actions": None,
        "logprobs": agent.logprobs.detach() + 0.3 * torch.randn(64),
        "values": torch.randn(64),
        "advantages": torch.randn(64),
        "returns": torch.randn(64),
    }
    args = ppo.Args(norm_adv=norm_adv, clip_vloss=clip_vloss, ent_coef=0.1, vf_coef=0.5)
    coefs = as_coefs(args, kl_coef=3.0)
    loss, metrics, grads = gradients(ppo.ppo_loss, agent, batch, coefs, args)
    metrics = dict(zip(ppo.METRICS, metrics.tolist(), strict=True))
    advantages = batch["advantages"]
    if norm_adv:
        advantages = (advantages - advantages.mean()) / advantages.std()
    logratio = agent.logprobs.detach() - batch["logprobs"]
    ratio = logratio.exp()
    errors = agent.values.detach() - batch["returns"]
    kl = (ratio - 1 - logratio).mean()
    policy_loss = -(advantages * ratio).mean()
    in_values = 0.5 * errors / 64
    value_losses = errors**2
    if clip_vloss:
        old_values = batch["values"]
        clipped_values = agent.values.detach().clamp(old_values - 0.2, old_values + 0.2)
        value_losses = torch.max(value_losses, (clipped_values - batch["returns"]) ** 2)
        in_values[value_losses > errors**2] = 0.0
        assert 0 < (in_values == 0.0).sum() < 64
    value_loss = 0.5 * value_losses.mean()
    entropy = agent.entropy.detach().mean()
    expected = policy_loss + 3.0 * kl - 0.1 * entropy + 0.5 * value_loss
    torch.testing.assert_close(loss, expected)

    in_logprobs = (-advantages * ratio + 3.0 * (ratio - 1)) / 64
    in_entropy = torch.full((64,), -0.1 / 64)
    expected = torch.cat((in_logprobs, in_entropy, in_values))
    torch.testing.assert_close(grads, expected)
    expected = (policy_loss, value_loss, entropy, -logratio.mean(), kl)
    assert [*metrics.values()] == pytest.approx([x.item() for x in expected], rel=1e-5)
    assert metrics["approx_kl"] == pytest.approx(kl.item())


@needs_compiler
def test_compiled_update_equals_eager():
    """With the Agent that ppo.py has too."""
    compare_compiled_epochs(
        ppo,
        lambda: ppo.Agent(5, 3, (64, 64)),
        lambda agent: random_batch(agent, 256),
        kl_coef=2.0,
    )


@pytest.mark.parametrize(
    "kl, kl_coef, learning_rate",
    [
        (0.0151, 2.0, 1e-3),
        (0.0149, 1.0, 1e-3),
        (0.0067, 1.0, 1e-3),
        (0.0066, 0.5, 1e-3),
        (0.0201, 2.0, 1e-3 / 1.5),
        (0.0199, 2.0, 1e-3),
        (0.0051, 0.5, 1e-3),
        (0.0049, 0.5, 1.5e-3),
    ],
)
def test_coefficients_follow_the_kl(kl, kl_coef, learning_rate):
    """The penalty doubles above 1.5 times the target and halves below its 1.5th part.

    The learning rate falls above twice the target and rises below half of it.
    """
    controller = ppo.KLController(0.01, 1e-3)
    controller.update(kl)
    assert controller.kl_coef == kl_coef
    assert controller.learning_rate == pytest.approx(learning_rate, rel=1e-12)


def test_coefficients_stay_within_limits():
    controller = ppo.KLController(0.01, 1.1e-6)
    for _ in range(30):
        controller.update(9.0)
    assert (controller.kl_coef, controller.learning_rate) == (1e6, 1e-6)
    for _ in range(60):
        controller.update(0.0)
    assert (controller.kl_coef, controller.learning_rate) == (1e-6, 1e-2)


def test_adapted_coefficients_are_used_and_logged(run_script, monkeypatch):
    """A run of two iterations against one that ends after the first, with the same minibatches.

    The KL of the rollout after the update is far above the target, the mean of losses/approx_kl
    isn't.
    """
    monkeypatch.setattr(torch, "randperm", torch.arange)
    flags = "--env-id Plain-v0 --num-steps 32 --learning-rate 0.003 --adaptive-lr"
    flags = f"{flags} --kl-target 0.006 --no-compile --no-cuda --eval-episodes 1".split()
    one = run_script(ppo.__file__, *flags, "--total-timesteps", "128", "--run-name", "one")
    two = run_script(ppo.__file__, *flags, "--total-timesteps", "256", "--run-name", "two")

    expected = [(0.003, 1.0)]
    controller = ppo.KLController(0.006, 0.003)
    for module in (one, two):
        with torch.no_grad():
            logprobs, _, _ = module.agent(module.batch["obs"], module.batch["actions"])
        ratio = (logprobs - module.batch["logprobs"]).exp()
        controller.update((ratio - 1 - ratio.log()).mean().item())
        expected.append((controller.learning_rate, controller.kl_coef))
        assert module.controller.state_dict() == controller.state_dict()
    assert len(set(expected)) == 3
    learning_rates = scalars(two.run.folder, "charts/learning_rate").values()
    coefs = scalars(two.run.folder, "losses/kl_coef").values()
    np.testing.assert_allclose(list(zip(learning_rates, coefs)), expected[:2], rtol=1e-6)

    lr, kl_coef = expected[1]
    coefs = as_coefs(one.args, lr=lr, kl_coef=kl_coef)
    ppo.update(ppo.update_minibatches, one.optimizer, one.agent, two.batch, coefs, one.args)
    assert torch.equal(flat(one.agent), flat(two.agent))


def test_the_learning_rate_is_annealed_unless_it_follows_the_kl(run_script):
    flags = "--env-id Plain-v0 --num-steps 32 --total-timesteps 256 --no-compile --eval-episodes 1"
    module = run_script(ppo.__file__, *flags.split())
    learning_rates = scalars(module.run.folder, "charts/learning_rate").values()
    assert [*learning_rates] == pytest.approx([2.5e-4, 1.25e-4])


def test_a_killed_run_goes_on_with_its_coefficients(server, tmp_path):
    flags = (
        "--env-id toys:Discrete-v0 --num-envs 3 --num-steps 32 --total-timesteps 3840"
        " --adaptive-lr --kl-target 0.0001 --learning-rate 0.001 --eval-episodes 3 --no-compile"
        " --checkpoint-interval 7 --run-name run"
    )
    whole = server.run(ppo.__file__, tmp_path / "whole", flags)
    assert whole.returncode == 0, whole.stderr
    killed = server.run(ppo.__file__, tmp_path / "killed", flags, TOY_FAULT="SIGKILL 3000")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    checkpoint = load_checkpoint(tmp_path / "killed" / RUN)
    assert checkpoint["run"]["iteration"] == 28
    assert checkpoint["controller"]["kl_coef"] > 1.0
    assert checkpoint["controller"]["learning_rate"] < 0.001
    resumed = server.run(ppo.__file__, tmp_path / "killed", f"--resume {RUN}")
    assert resumed.returncode == 0, resumed.stderr
    assert differences(tmp_path / "killed" / RUN, tmp_path / "whole" / RUN) == []


@pytest.mark.parametrize("flags", ["", "--adaptive-lr"])
def test_toy_is_learned(run_script, flags):
    rest = "--env-id Plain-v0 --total-timesteps 16384 --learning-rate 0.003 --eval-episodes 50"
    module = run_script(ppo.__file__, *rest.split(), "--no-compile", *flags.split())
    assert learned_share(module) > 0.8  # 1 is possible, 0.5 is chance


@pytest.mark.parametrize("flag", ["--kl-target", "--clip-coef"])
def test_bad_flags_are_refused(refused, flag):
    assert f"{flag} must be above 0" in refused(ppo, [flag, "0"])
