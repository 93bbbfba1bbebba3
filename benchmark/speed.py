"""Env steps per second of a script beside Stable-Baselines3's PPO or DDPG, or sb3-contrib's RecurrentPPO, with the same
wrappers or VecNormalize, and of the environment alone, which bounds both. Same hyper-parameters, in alternation, one
process at a time; one CPU thread each for ppo_continuous_action, all cores for the others. DDPG learns from its 100th
step on, and evaluates nothing during the run.

    python -m benchmark.speed [SCRIPT] [--rounds 3] [--steps N] [--env-id ID] [--full] [--csv FILE]

Steady state: from the end of the first iteration (rollout and update; of DDPG a hundred steps) to the end of the last;
no start-up, compilation or final evaluation. Whole process: everything from the process's start to its end, an
evaluation of one episode too, and what it comes to for 1M steps.
PlainRL's compiler cache is empty in the first round and filled in the others.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
# A rollout's steps in all environments, which with the constants in work_sb3 are the scripts' defaults; and our own
DDPG_FLAGS = ["--random-steps", "100", "--learning-starts", "100", "--eval-interval", str(10**9)]
TASKS = {
    "ppo_continuous_action": {"env_id": "HalfCheetah-v5", "rollout": 2048, "threads": 1, "steps": 61440},
    "ppo_atari": {"env_id": "BreakoutNoFrameskip-v4", "rollout": 1024, "threads": os.cpu_count(), "steps": 16384},
    "ppo_atari_lstm": {"env_id": "BreakoutNoFrameskip-v4", "rollout": 1024, "threads": os.cpu_count(), "steps": 16384},
    "ddpg_continuous_action": {"env_id": "HalfCheetah-v5", "rollout": 100, "threads": os.cpu_count(), "steps": 5000,
                               "flags": DDPG_FLAGS},
}
FULL_STEPS = 1_000_000
PACKAGES = ("torch", "gymnasium", "mujoco", "numpy", "stable-baselines3", "sb3-contrib")


def work_sb3(script, env_id, steps, seed):
    """Trains SB3's algorithm with the script's default hyper-parameters; returns marks (see steady_state)."""
    import numpy as np
    import torch
    from stable_baselines3 import DDPG, PPO
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    marks = []

    class Timed:
        def train(self):  # the update: an iteration ends here
            super().train()
            marks.append((self.num_timesteps, time.time()))

    class TimedPPO(Timed, PPO):
        pass

    class TimedDDPG(DDPG):
        def train(self, *args, **kwargs):  # at every step: an iteration is a hundred
            super().train(*args, **kwargs)
            if self.num_timesteps % TASKS[script]["rollout"] == 0:
                marks.append((self.num_timesteps, time.time()))

    torch.set_num_threads(TASKS[script]["threads"])
    flags = {"gamma": 0.99, "seed": seed, "device": "cpu"}
    if script == "ddpg_continuous_action":
        env = make_vec_env(env_id, seed=seed)
        num_actions = env.action_space.shape[0]
        model = TimedDDPG("MlpPolicy", env, learning_rate=3e-4, buffer_size=FULL_STEPS, batch_size=256, tau=0.005,
                          learning_starts=100, train_freq=1, gradient_steps=1,
                          action_noise=NormalActionNoise(np.zeros(num_actions), 0.1 * np.ones(num_actions)),
                          policy_kwargs={"net_arch": [256, 256]}, **flags)
        model.learn(steps)
        return marks
    flags |= {"gae_lambda": 0.95, "vf_coef": 0.5, "max_grad_norm": 0.5}
    adam = {"optimizer_kwargs": {"eps": 1e-5}}
    if script.startswith("ppo_atari"):
        import ale_py  # noqa: F401, registers the games

        kind, policy, envs = TimedPPO, "CnnPolicy", make_atari_env(env_id, n_envs=8, seed=seed)
        if script == "ppo_atari_lstm":
            from sb3_contrib import RecurrentPPO

            kind, policy = type("TimedRecurrentPPO", (Timed, RecurrentPPO), {}), "CnnLstmPolicy"
            # One LSTM for policy and value, as in the script
            adam |= {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
        else:
            envs = VecFrameStack(envs, 4)
        model = kind(policy, envs, learning_rate=lambda left: 2.5e-4 * left, n_steps=128, batch_size=256,
                     n_epochs=4, clip_range=0.1, clip_range_vf=0.1, ent_coef=0.01, policy_kwargs=adam, **flags)
    else:
        nets = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh, "ortho_init": True,
                "log_std_init": 0.0}
        envs = VecNormalize(make_vec_env(env_id, seed=seed), gamma=0.99)
        model = TimedPPO("MlpPolicy", envs, learning_rate=lambda left: 3e-4 * left, n_steps=2048, batch_size=64,
                         n_epochs=10, clip_range=0.2, clip_range_vf=0.2, ent_coef=0.0, policy_kwargs=nets | adam,
                         **flags)
    model.learn(steps)
    return marks


def work_env(script, env_id, steps, seed):
    """Steps one environment with random actions, drawn beforehand, and resets it at ends; for Atari that is the
    emulator with four frames a step, whose screen nobody reads. Returns marks."""
    import gymnasium as gym
    import numpy as np

    rng = np.random.default_rng(seed)
    if script.startswith("ppo_atari"):
        import ale_py  # noqa: F401, registers the games

        env = gym.make(env_id, frameskip=1, disable_env_checker=True).unwrapped
        env.reset(seed=seed)
        ale, actions = env.ale, [env._action_set[i] for i in rng.integers(env.action_space.n, size=steps)]
        start = time.time()
        for action in actions:
            for _ in range(4):
                ale.act(action)
            if ale.game_over():
                ale.reset_game()
        return [(0, start), (steps, time.time())]
    env = gym.make(env_id, disable_env_checker=True)
    low, high, shape = env.action_space.low, env.action_space.high, (steps, *env.action_space.shape)
    actions = rng.standard_normal(shape).clip(low, high).astype(env.action_space.dtype)
    env.reset(seed=seed)
    start = time.time()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return [(0, start), (steps, time.time())]


WORKERS = {"sb3": work_sb3, "env": work_env}
PROGRAMS = {"plainrl": "PlainRL", "sb3": "Stable-Baselines3", "env": "environment alone"}  # in the order of a round


def command_of(program, script, env_id, steps, seed):
    """The command line (list of str) that runs a program for that many env steps."""
    flags = ["--env-id", env_id, "--seed", str(seed)]
    if program in WORKERS:
        worker = [sys.executable, str(Path(__file__).resolve()), script, "--worker", program]
        return [*worker, "--steps", str(steps), *flags]
    command = [sys.executable, str(ROOT / f"{script}.py"), "--total-timesteps", str(steps), "--eval-episodes", "1"]
    return [*command, "--run-name", "speed", "--no-cuda", *TASKS[script].get("flags", []), *flags]


def read_marks(program, folder):
    """Marks of the run in folder: a worker has printed them, a script's TensorBoard events have steps and times."""
    if program in WORKERS:
        lines = (folder / "output.txt").read_text().splitlines()
        return json.loads(next(line for line in lines if line.startswith("[[")))
    # Not at the top of the file: that would count in the workers' start-up
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "runs" / "speed"), size_guidance={"scalars": 0})
    return [(event.step, event.wall_time) for event in events.Reload().Scalars("charts/SPS")]


def steady_state(marks, started, ended):
    """marks: [(env steps done, Unix time, s)] at ends of iterations; started, ended: of the process, Unix time, s.

    Returns steps_per_second of the steady state, start_up_s (imports, building, compilation: the time to the first
    mark, less what its steps take at that speed), wall_s and wall_s_1m: the process's wall time, and that for 1M steps.
    """
    (first_step, first), (last_step, last) = marks[0], marks[-1]
    speed = (last_step - first_step) / (last - first)
    wall = ended - started
    return {"steps": last_step, "steps_per_second": speed, "start_up_s": first - started - first_step / speed,
            "wall_s": wall, "wall_s_1m": wall + (FULL_STEPS - last_step) / speed}


def measure(program, label, script, env_id, steps, seed, cache):
    """Runs a program once in a folder of its own, compiler cache in cache; returns a row for the CSV."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output.txt", "w") as output:
        threads = str(TASKS[script]["threads"])
        settings = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        settings |= {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        started = time.time()
        process = subprocess.Popen(command_of(program, script, env_id, steps, seed), cwd=folder, stdout=output,
                                   stderr=output, env=os.environ | settings)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            raise
        ended, process.returncode = time.time(), os.waitstatus_to_exitcode(status)
        if process.returncode:
            tail = (Path(folder) / "output.txt").read_text()[-1000:]
            sys.exit(f"error: {PROGRAMS[program]} failed with exit code {process.returncode}:\n{tail}")
        row = {"round": label, "program": program, "script": script, "env_id": env_id, "seed": seed}
        row |= steady_state(read_marks(program, Path(folder)), started, ended)
    row["peak_mb"] = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)  # of the largest process
    print(f"round {label}: {PROGRAMS[program]} {row['steps_per_second']:,.0f} steps/s, start-up {row['start_up_s']:.1f}"
          f" s, whole process {row['wall_s']:.1f} s for {row['steps']:,} steps", flush=True)
    return row


def ratios(rows, column, above, below):
    """Round by round, the column's value of program `above` divided by that of program `below`."""
    value = {(row["round"], row["program"]): row[column] for row in rows}
    return [x / value[label, below] for (label, program), x in value.items() if program == above]


def spread(values, form):
    """Median, min and max as three cells of a Markdown table."""
    return " | ".join(format(f(values), form) for f in (median, min, max))


def tables(rows):
    """The Markdown tables of all rounds (not of --full)."""
    lines = ["| | steps/s: median | min | max | start-up, s: first round | later | 1M steps, s: first round | later | "
             "peak memory, MB |", "|---|" + "---:|" * 8]
    for program, title in PROGRAMS.items():
        runs = [row for row in rows if row["program"] == program]
        times = [f"{median(column):.1f}" if column else "-" for name in ("start_up_s", "wall_s_1m")
                 for column in ([run[name] for run in runs[:1]], [run[name] for run in runs[1:]])]
        lines.append(f"| {title} | {spread([run['steps_per_second'] for run in runs], ',.0f')} | {' | '.join(times)} | "
                     f"{max(run['peak_mb'] for run in runs):.0f} |")
    lines += ["", "| ratio | median | min | max | round by round |", "|---|---:|---:|---:|---|"]
    for name, *which in (("steps/s, PlainRL / SB3", "steps_per_second", "plainrl", "sb3"),
                         ("steps/s, PlainRL / environment alone", "steps_per_second", "plainrl", "env"),
                         ("1M steps, SB3's time / PlainRL's", "wall_s_1m", "sb3", "plainrl")):
        found = ratios(rows, *which)
        lines.append(f"| {name} | {spread(found, '.2f')} | {', '.join(f'{x:.2f}' for x in found)} |")
    return "\n".join([*lines, "", "steps/s: steady state. 1M steps: whole process, projected from its wall time and "
                      "steps/s. What PlainRL compiles in the first round it finds in the compiler's cache later."])


def machine():
    """One line: versions, processor, cores and the load of the last minute, which should be near 0."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = next((line.split(": ")[1] for line in info.splitlines() if line.startswith("model name")), "CPU")
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (f"python {platform.python_version()}, {versions}; {processor}, {os.cpu_count()} cores, "
            f"{platform.platform()}; load before the first run {os.getloadavg()[0]:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", choices=TASKS, default="ppo_continuous_action", help="script to measure")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (default 3)")
    parser.add_argument("--steps", type=int, help="env steps of a run (default: 30, 16 or 50 iterations)")
    parser.add_argument("--env-id", help="environment (default HalfCheetah-v5, for Atari BreakoutNoFrameskip-v4)")
    parser.add_argument("--full", action="store_true", help="then really run 1M steps of each once, empty cache")
    parser.add_argument("--csv", type=Path, help="write one row for each run to this file")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round (default 1)")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    task = TASKS[args.script]
    env_id, steps, rollout = args.env_id or task["env_id"], args.steps or task["steps"], task["rollout"]
    if args.worker:
        return print(json.dumps(WORKERS[args.worker](args.script, env_id, steps, args.seed)))
    steps = steps // rollout * rollout
    if steps < 2 * rollout or args.rounds < 1:
        parser.error(f"the steady state needs --steps {2 * rollout} (two iterations) or more, and one of --rounds")

    machine_line, rows = machine(), []
    with tempfile.TemporaryDirectory() as cache:
        for i in range(args.rounds):
            rows += [measure(name, i + 1, args.script, env_id, steps, args.seed + i, Path(cache, "rounds"))
                     for name in PROGRAMS]
        full_steps = FULL_STEPS // rollout * rollout
        full = [measure(name, "full", args.script, env_id, full_steps, args.seed, Path(cache, "full"))
                for name in ("plainrl", "sb3") if args.full]
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], "machine"])
            writer.writeheader()
            writer.writerows(row | {"machine": machine_line} for row in rows + full)
    print(f"\n{tables(rows)}\n\n{machine_line}")
    if full:
        print(f"1M steps, whole process, really run: SB3 takes {ratios(full, 'wall_s', 'sb3', 'plainrl')[0]:.2f} times "
              "as long as PlainRL")


if __name__ == "__main__":
    main()
