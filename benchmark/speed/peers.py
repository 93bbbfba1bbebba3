"""What is measured: the scripts' command lines, and their peers'."""

import sys

from benchmark import ROOT

# Title and precision, in the order of a round
PROGRAMS = {
    "plainrl": ("PlainRL", "float32"),
    "plainrl --amp": ("PlainRL, bfloat16", "bfloat16"),
    "sb3": ("Stable-Baselines3", "float32"),
    "cleanrl": ("CleanRL's loop", "float32"),
}
OURS = ("plainrl", "plainrl --amp")
PEER = "sb3"  # the one that all scripts but PQN's have

REPLAY = "--total-timesteps 3000 --random-steps 100 --learning-starts 100".split()
# SB3 keeps the stacks of an observation and of the next one, 56 kB a step
STACKS = "--learning-starts 1000 --buffer-size 20000".split()
TASKS = {  # flags of a script's runs
    "ppo": ("--total-timesteps", "51200"),
    "ppo_continuous_action": ("--total-timesteps", "61440"),
    "ppo_atari": ("--total-timesteps", "10240"),
    "ppo_atari_vector": ("--total-timesteps", "10240"),
    "ppo_atari_lstm": ("--total-timesteps", "8192"),
    "dqn": ("--total-timesteps", "41000", "--learning-starts", "1000"),
    "dqn_atari": ("--total-timesteps", "3000", *STACKS),
    "ddpg_continuous_action": REPLAY,
    "td3_continuous_action": REPLAY,
    "sac_continuous_action": REPLAY,
    "pqn": ("--total-timesteps", "51200"),
    "pqn_atari": ("--total-timesteps", "10240"),
}
PEERS = {
    "sb3": tuple(script for script in TASKS if not script.startswith("pqn")),
    "cleanrl": ("ppo", "ppo_continuous_action", "ppo_atari"),
}


def programs_of(script, amp):
    """The programs of a script's round -> list of str."""
    ours = OURS if amp and "atari" in script else OURS[:1]
    return [*ours, *(peer for peer, scripts in PEERS.items() if script in scripts)]


def command_of(program, script, seed, flags, folder):
    """The command line (list of str) of a program in folder.

    A peer takes its flags from the config.json of the script's run there.
    """
    if program not in OURS:
        config = folder / "runs" / "plainrl" / "config.json"
        return [sys.executable, "-m", f"benchmark.speed.{program}", str(config)]
    words = [sys.executable, str(ROOT / f"{script}.py"), *TASKS[script], "--seed", str(seed)]
    words += ["--run-name", program, "--no-cuda", "--eval-interval", "0", "--eval-episodes", "1"]
    return words + list(flags) + (["--amp"] if program == "plainrl --amp" else [])
