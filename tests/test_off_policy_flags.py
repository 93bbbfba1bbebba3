"""What the flags of the scripts with a replay buffer may be; flags of one of them are in its file.

Each script has a parse_args of its own, so each is asked.
"""

from dataclasses import fields

import pytest
from test_ddpg_continuous_action import Stamped

import ddpg_continuous_action
import ddpg_lstm
import sac_continuous_action
import td3_continuous_action

SCRIPTS = (
    ddpg_continuous_action,
    ddpg_lstm,
    td3_continuous_action,
    sac_continuous_action,
)
POSITIVE = "must be above 0"
FINITE = "must be above 0 and finite"
NOT_NEGATIVE = "must be 0 or above"
NOT_NEGATIVE_AND_FINITE = "must be 0 or above, and finite"
# A flag, values that it may not have, and what its sentence says
BAD_VALUES = (
    ("total-timesteps", ("0",), POSITIVE),
    ("learning-rate", ("0", "nan"), FINITE),
    ("actor-learning-rate", ("-1", "inf"), FINITE),
    ("critic-learning-rate", ("0", "nan"), FINITE),
    ("max-grad-norm", ("0", "inf"), FINITE),
    ("num-envs", ("0",), POSITIVE),
    ("gamma", ("-0.1", "2", "nan"), "must be from 0 to 1"),
    ("hidden-sizes", ("0", "-16", "16 0"), "must be numbers above 0"),
    ("buffer-size", ("0",), POSITIVE),
    ("batch-size", ("0",), POSITIVE),
    ("tau", ("0", "2", "nan"), "must be above 0, up to 1"),
    ("random-steps", ("-1",), NOT_NEGATIVE),
    ("learning-starts", ("-1",), NOT_NEGATIVE),
    ("updates-per-step", ("0", "nan", "inf"), FINITE),
    ("policy-frequency", ("0",), POSITIVE),
    ("exploration-noise", ("-0.1", "nan"), NOT_NEGATIVE_AND_FINITE),
    ("final-exploration-noise", ("-0.1", "inf"), NOT_NEGATIVE_AND_FINITE),
    ("weight-decay", ("-1", "nan"), NOT_NEGATIVE_AND_FINITE),
    ("eval-interval", ("-1",), NOT_NEGATIVE),
)
# Of these a script has no such flag
WITHOUT = {
    sac_continuous_action: {"policy-frequency", "exploration-noise", "final-exploration-noise"},
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_bad_values(refused, script):
    """One sentence each, which names the flag."""
    names = {field.name.replace("_", "-") for field in fields(script.Args)}
    without = {flag for flag, _, _ in BAD_VALUES} - names
    assert without == WITHOUT.get(script, set())
    for flag, values, sentence in BAD_VALUES:
        for value in values:
            if flag not in without:
                message = refused(script, [f"--{flag}", *value.split()])
                assert message.startswith(f"error: --{flag} {sentence}"), (flag, value)
                assert message.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("steps", ["500", "501"])
def test_learning_must_start_before_the_end(refused, script, steps):
    message = refused(script, ["--total-timesteps", "500", "--learning-starts", steps])
    assert message == "error: --learning-starts is past the last step\n"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_init_from_needs_the_same_normalisation(run_script, refused, script):
    """Else networks would see what they were not trained on."""
    flags = [
        *("--env-id", f"{Stamped.__module__}:Stamped-v0", "--no-compile", "--hidden-sizes", "8"),
        *("--total-timesteps", "30", "--learning-starts", "20", "--eval-episodes", "1"),
    ]
    old = run_script(script.__file__, *flags).run.folder
    for flag in ("norm-obs", "norm-reward"):
        message = refused(
            script, [*flags, "--run-name", flag, "--init-from", str(old), f"--{flag}"]
        )
        assert message.startswith(f"error: --init-from: that run has another --{flag}")
