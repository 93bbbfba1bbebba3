"""a2c.py: what differs from ppo.py, whose definitions it shares and whose tests hold for those."""

import json
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv
from test_ppo import Outputs, adam_state, flat, left_by, run, sb3_parameters

import a2c
import ppo


def make_batch(agent, size, nvec):
    obs = torch.cat((torch.randn(size, agent.sizes[0]), torch.ones(size, sum(nvec))), 1)
    return {"obs": obs, "actions": torch.stack([torch.randint(n, (size,)) for n in nvec], 1),
            "advantages": torch.randn(size), "returns": torch.randn(size)}


@pytest.mark.parametrize("norm_adv", [False, True])
def test_gradient_of_a_hand_made_batch(norm_adv):
    """In closed form: -A/n in the log-probabilities, vf_coef (V - R)/n in the values, -ent_coef/n in the entropies."""
    agent = Outputs(torch.tensor([-1.0, -2.0, -0.5, -1.5]), torch.tensor([0.5, 0.6, 0.7, 0.8]),
                    torch.tensor([1.0, 2.0, 3.0, 4.0]))
    batch = {"obs": None, "actions": None, "advantages": torch.tensor([1.0, -1.0, 2.0, 0.0]),
             "returns": torch.tensor([0.0, 2.0, 5.0, 3.0])}
    args = a2c.Args(norm_adv=norm_adv, ent_coef=0.1, vf_coef=0.6)
    grads, metrics = torch.func.grad(a2c.a2c_loss, has_aux=True)(flat(agent), agent, batch, args)
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.0])
    if norm_adv:
        advantages = (advantages - 0.5) / 1.2909945  # sqrt(5/3)
    expected = torch.cat((-advantages / 4, torch.full((4,), -0.025), torch.tensor([0.15, 0.0, -0.3, 0.15])))
    torch.testing.assert_close(grads, expected)
    policy_loss = -(advantages * agent.logprobs.detach()).mean().item()
    assert metrics.tolist() == pytest.approx([policy_loss, 0.5 * (1 + 0 + 4 + 1) / 4, 0.65])


def test_first_update_equals_ppo_with_one_epoch_one_minibatch_and_no_clipping():
    agent = a2c.Agent(4, [3, 2])
    batch = make_batch(agent, 40, [3, 2])
    with torch.no_grad():
        logprobs, _, values = agent(batch["obs"], batch["actions"])
    ours, theirs, lr = flat(agent), flat(agent), torch.tensor(1e-3)
    a2c.a2c_update(ours, adam_state(ours), agent, batch, lr, a2c.Args(optimizer="adam"))
    args = ppo.Args(num_envs=1, num_steps=40, num_minibatches=1, update_epochs=1, norm_adv=False, clip_vloss=False)
    batch |= {"logprobs": logprobs, "values": values}
    ppo.update(ppo.update_minibatches, theirs, adam_state(theirs), agent, batch, lr, torch.tensor(1e9), args)
    assert (ours - flat(agent)).abs().max() > 9e-4
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_steps_equal_those_of_the_optimizers_of_pytorch(optimizer):
    agent, args, lr = a2c.Agent(4, [3]), a2c.Args(optimizer=optimizer, max_grad_norm=0.1), 3e-3
    params = flat(agent)
    state, theirs = adam_state(params), params.clone().requires_grad_()
    library = {"rmsprop": lambda: torch.optim.RMSprop([theirs], lr=lr, alpha=0.99, eps=1e-5),
               "adam": lambda: torch.optim.Adam([theirs], lr=lr, eps=1e-5)}[optimizer]()
    for _ in range(5):
        batch = make_batch(agent, 40, [3])
        a2c.a2c_update(params, state, agent, batch, torch.tensor(lr), args)
        library.zero_grad()
        a2c.a2c_loss(theirs, agent, batch, args)[0].backward()
        assert torch.nn.utils.clip_grad_norm_(theirs, 0.1) > 0.1
        library.step()
        torch.testing.assert_close(params, theirs.detach(), rtol=0, atol=1e-6)


def test_update_equals_that_of_stable_baselines3():
    agent, args = a2c.Agent(4, [2]), a2c.Args(num_envs=1, num_steps=40)
    batch = make_batch(agent, 40, [2])
    model = A2C("MlpPolicy", DummyVecEnv([lambda: gym.make("CartPole-v1")]), n_steps=40, learning_rate=7e-4,
                ent_coef=0.01, vf_coef=0.25, max_grad_norm=0.5, device="cpu")
    model.set_logger(Logger(None, []))
    for theirs, ours in zip(sb3_parameters(model.policy), agent.parameters(), strict=True):
        theirs.data = ours.detach().clone()
    buffer, names = model.rollout_buffer, {"observations": batch["obs"][:, :4]}
    for name in ("observations", "actions", "advantages", "returns"):
        setattr(buffer, name, names.get(name, batch.get(name)).numpy().reshape(getattr(buffer, name).shape))
    buffer.full = True
    np.random.seed(3)
    model.train()
    params = flat(agent)
    a2c.a2c_update(params, adam_state(params), agent, batch, torch.tensor(7e-4), args)
    assert (params - flat(agent)).abs().max() > 5e-3
    expected = torch.cat([p.detach().flatten() for p in sb3_parameters(model.policy)])
    torch.testing.assert_close(params, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
@pytest.mark.parametrize("script, flags", [(a2c, []), (ppo, ["--num-minibatches", "3", "--anneal-clip"])],
                         ids=["a2c", "ppo"])
def test_a_run_learns_from_n_step_and_one_step_returns(run_script, script, flags, gae_lambda, bootstrap):
    """The returns of the last of three rollouts against sums, over terminations and truncations; what is annealed has
    come to a third."""
    module = run_script(script.__file__, "--env-id", "Plain-v0", "--num-envs", "3", "--num-steps", "50",
                        "--total-timesteps", "450", "--gae-lambda", str(gae_lambda), "--gamma", "0.9", "--no-compile",
                        "--eval-episodes", "1", "--learning-rate", "3e-9", *flags,
                        *([] if bootstrap else ["--no-bootstrap-truncated"]))
    assert module.lr.item() == pytest.approx(1e-9)
    if script is ppo:
        assert module.coef.item() == pytest.approx(0.2 / 3)
    final = {(step, i): obs for step, i, *_, obs in module.episodes}
    assert module.terminations.any() and module.truncations.any()

    def value(obs):
        with torch.no_grad():
            return module.agent.critic(torch.from_numpy(obs[:3])[None]).item()

    for i in range(3):
        for step in range(50):
            expected, discount, t = 0.0, 1.0, step
            while True:
                expected += discount * module.rewards[t, i]
                discount *= 0.9
                t += 1
                if module.terminations[t - 1, i]:
                    break
                if module.truncations[t - 1, i] and not bootstrap:
                    break
                if module.truncations[t - 1, i] or t == 50 or gae_lambda == 0:
                    after = module.envs.obs[i] if t == 50 else module.obs[t, i]
                    expected += discount * value(final.get((t - 1, i), after))
                    break
            assert module.returns[step, i] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_toy_is_learned(run_script, optimizer):
    module = run_script(a2c.__file__, "--env-id", "Plain-v0", "--total-timesteps", "40000", "--learning-rate", "0.003",
                        "--eval-episodes", "50", "--no-compile", "--optimizer", optimizer)
    results = json.loads((module.run_dir / "evaluation.json").read_text())
    assert sum(results["returns"]) / sum(results["lengths"]) > 0.88  # 0.94 is possible, 0.5 is chance


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_runs_are_deterministic_and_resume_exactly(tmp_path, optimizer):
    flags = (f"--env-id toy:Toy-v0 --total-timesteps 4000 --checkpoint-interval 20 --eval-episodes 3 --no-compile "
             f"--run-name run --optimizer {optimizer}")
    keep = ("agent", "optimizer", "envs", "random", "iteration")
    assert run(tmp_path / "whole", flags, script=a2c.__file__).returncode == 0
    assert run(tmp_path / "killed", flags, "SIGKILL 2500", a2c.__file__).returncode == -signal.SIGKILL
    assert run(tmp_path / "killed", "--resume runs/run", script=a2c.__file__).returncode == 0
    assert left_by(tmp_path / "killed", keep) == left_by(tmp_path / "whole", keep)


@pytest.mark.parametrize("flags, sentence", [
    (["--num-envs", "1", "--num-steps", "1", "--norm-adv"], "has no standard deviation"),
    (["--total-timesteps", "39"], "is less than one rollout of 40 steps"), (["--num-steps", "0"], "must be above 0"),
    (["--gae-lambda", "1.1"], "--gae-lambda: up to 1"), (["--optimizer", "sgd"], "sgd")])
def test_bad_flags_are_refused(flags, sentence, refused):
    assert sentence in refused(a2c, flags)
