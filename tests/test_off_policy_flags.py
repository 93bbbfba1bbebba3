"""What the flags of the scripts with a replay buffer may be: each has a check_args of its own."""

from dataclasses import fields

import gymnasium as gym
import numpy as np
import pytest
from test_ddpg_continuous_action import Stamped

import c51_atari
import ddpg_continuous_action
import ddpg_lstm
import dqn
import dqn_atari
import sac_continuous_action
import td3_continuous_action

CONTINUOUS = (
    ddpg_continuous_action,
    ddpg_lstm,
    td3_continuous_action,
    sac_continuous_action,
)
SCRIPTS = (*CONTINUOUS, dqn, dqn_atari, c51_atari)
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
POSITIVE = "must be above 0"
NOT_NEGATIVE = "must be 0 or above"
# A flag, values that it may not have, and what its sentence says
BAD_VALUES = (
    ("seed", ("-1", "4294967296"), "must be from 0 to 2**32 - 1"),
    ("checkpoint-interval", ("0",), POSITIVE),
    ("eval-episodes", ("0",), POSITIVE),
    ("total-timesteps", ("0",), POSITIVE),
    ("learning-rate", ("0", "nan"), POSITIVE),
    ("actor-learning-rate", ("0", "nan"), POSITIVE),
    ("critic-learning-rate", ("0",), POSITIVE),
    ("alpha-learning-rate", ("0",), POSITIVE),
    ("max-grad-norm", ("0", "-1"), POSITIVE),
    ("num-envs", ("0",), POSITIVE),
    ("gamma", ("-0.1", "2", "nan"), "must be from 0 to 1"),
    ("hidden-sizes", ("0", "-16", "16 0"), "must be numbers above 0"),
    ("buffer-size", ("0",), POSITIVE),
    ("batch-size", ("0",), POSITIVE),
    ("tau", ("0", "2", "nan"), "must be above 0, up to 1"),
    ("updates-per-step", ("0", "nan"), POSITIVE),
    ("policy-frequency", ("0",), POSITIVE),
    ("random-steps", ("-1",), NOT_NEGATIVE),
    ("exploration-noise", ("-0.1", "nan"), NOT_NEGATIVE),
    ("policy-noise", ("-0.1", "nan"), NOT_NEGATIVE),
    ("noise-clip", ("-0.5", "nan"), NOT_NEGATIVE),
    ("weight-decay", ("-0.01", "nan"), NOT_NEGATIVE),
    ("burn-in", ("-1",), NOT_NEGATIVE),
    ("alpha", ("0", "-1", "nan"), POSITIVE),
    ("sequence-length", ("0",), POSITIVE),
    ("hidden-size", ("0",), POSITIVE),
    ("n-step", ("0",), POSITIVE),
    ("target-network-frequency", ("0",), POSITIVE),
    ("train-frequency", ("0",), POSITIVE),
    ("exploration-fraction", ("-0.1", "2", "nan"), "must be from 0 to 1"),
    ("n-atoms", ("1",), "must be above 1"),
)


@each_script
def test_bad_values(refused, script):
    """One sentence each, which names the flag."""
    names = {field.name.replace("_", "-") for field in fields(script.Args)}
    for flag, values, sentence in BAD_VALUES:
        for value in values if flag in names else ():
            message = refused(script, [f"--{flag}", *value.split()])
            assert message == f"error: --{flag} {sentence}\n", (flag, value)


@each_script
@pytest.mark.parametrize("steps", ["-1", "500", "501"])
def test_learning_must_start_before_the_end(refused, script, steps):
    """Of the last iteration; a run ends before --total-timesteps where they don't fit."""
    flags = ["--total-timesteps", "503", "--num-envs", "5", "--learning-starts", steps]
    message = refused(script, flags)
    assert message == "error: --learning-starts must be from 0, below 500\n"


@pytest.mark.parametrize("script", CONTINUOUS, ids=lambda script: script.__name__)
def test_actions_must_have_finite_bounds(script, capsys):
    """And a finite range."""
    for bound in (np.inf, 3e38):
        gym.register("Wide-v0", Stamped, kwargs={"low": (-1, -bound), "high": (1, bound)})
        with pytest.raises(SystemExit, match="2"), np.errstate(over="ignore"):
            script.make_env("Wide-v0")
        assert "finite bounds" in capsys.readouterr().err
        del gym.registry["Wide-v0"]
