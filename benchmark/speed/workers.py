"""Measures ppo_continuous_action_ray.py over its workers.

    python -m benchmark.speed.workers --out FILE.csv [--env-id ENV] [--rllib-python PYTHON]

The environment is a simulator of 5 ms a step unless another one is named. There are eight of
it, rollouts of 64 steps, each learned from as ppo_continuous_action.py does by default. Beside it
gymnasium's AsyncVectorEnv, which plays alone and learns nothing, and RLlib's PPO of the same sizes,
where a Python with ray[rllib] is named. Steps per second are those between the first iteration and
the last: without start-up and compilation.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import tyro

from benchmark import ROOT

NUM_ENVS = 8
NUM_STEPS = 64
WORKERS = (1, 2, 4, 8)
OURS = (
    f"--num-envs {NUM_ENVS} --num-steps {NUM_STEPS} --num-minibatches 8 --checkpoint-interval 1"
    " --cpus-per-worker 0.1 --num-threads 1 --eval-episodes 1 --no-cuda --run-name run"
)

# Programs that print a line after each iteration: for the arguments ENV_ID ITERATIONS [WORKERS]
ASYNC = f"""
import sys

import gymnasium as gym

if __name__ == "__main__":
    envs = gym.make_vec(sys.argv[1], {NUM_ENVS}, "async")
    envs.reset(seed=1)
    for _ in range(int(sys.argv[2])):
        for _ in range({NUM_STEPS}):
            envs.step(envs.action_space.sample())
        print("iteration", flush=True)
    envs.close()
"""
RLLIB = f"""
import sys

import ray
from ray.rllib.algorithms.ppo import PPOConfig

env_id = sys.argv[1]
iterations, workers = map(int, sys.argv[2:])
ray.init("local", num_cpus=workers + 1, log_to_driver=False, include_dashboard=False)
config = PPOConfig().environment(env_id)
config = config.env_runners(
    num_env_runners=workers,
    num_envs_per_env_runner={NUM_ENVS} // workers,
    rollout_fragment_length={NUM_STEPS},
)
config = config.training(
    train_batch_size_per_learner={NUM_ENVS * NUM_STEPS}, minibatch_size=64, num_epochs=10
)
config = config.rl_module(model_config={{"fcnet_hiddens": [64, 64]}})
algorithm = config.build_algo()
for _ in range(iterations):
    algorithm.train()
    print("iteration", flush=True)
"""


def measure(command, iterations):
    """Runs a command; returns its steps per second between its first iteration and its last."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    times = []
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in process.stdout:
            if line.startswith(("iteration", "saved at step")):
                times.append(time.perf_counter())
        if process.wait() != 0:
            sys.exit(f"failed: {command}")
    assert len(times) == iterations
    return NUM_ENVS * NUM_STEPS * (iterations - 1) / (times[-1] - times[0])


@dataclass
class Flags:
    """The flags of this command."""

    out: Path  # the CSV that it writes, row by row
    env_id: str = "benchmark.environments:SlowPendulum-v1"  # which all programs play
    iterations: int = 9  # of each program: rollouts, and updates but for AsyncVectorEnv
    rounds: int = 4  # in each every program runs once
    rllib_python: Path | None = None  # a Python that has ray[rllib]


def main():
    flags = tyro.cli(Flags, prog="python -m benchmark.speed.workers", description=__doc__)
    script = [sys.executable, str(ROOT / "ppo_continuous_action_ray.py"), *OURS.split()]
    script += ["--env-id", flags.env_id]
    script += ["--total-timesteps", str(NUM_ENVS * NUM_STEPS * flags.iterations)]
    words = [flags.env_id, str(flags.iterations)]
    programs = {}
    for workers in WORKERS:
        command = [*script, "--num-workers", str(workers)]
        programs["plainrl", workers] = command
        programs["plainrl --overlap", workers] = [*command, "--overlap"]
        if flags.rllib_python:
            python = str(flags.rllib_python)
            programs["rllib", workers] = [python, "-c", RLLIB, *words, str(workers)]
    with tempfile.TemporaryDirectory() as folder:
        async_script = Path(folder, "async_envs.py")  # its processes import it
        async_script.write_text(ASYNC)
        programs["AsyncVectorEnv", NUM_ENVS] = [sys.executable, str(async_script), *words]
        rows = []
        for number in range(1, flags.rounds + 1):
            for (program, workers), command in programs.items():
                speed = measure(command, flags.iterations)
                rows.append((number, flags.env_id, program, workers, speed, os.getloadavg()[0]))
                print(*rows[-1], flush=True)
                columns = ["round", "env_id", "program", "workers", "steps_per_second", "load"]
                pd.DataFrame(rows, columns=columns).to_csv(flags.out, index=False)


if __name__ == "__main__":
    main()
