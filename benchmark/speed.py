"""Env steps per second of scripts beside Stable-Baselines3's, and beside what bounds both.

    python -m benchmark.speed [SCRIPT...] [--rounds 3] [--steps N] [--env-id ID] [--full]
                              [--out FILE.csv]
    python -m benchmark.speed ppo_atari \\
        --other 'CleanRL=python ../cleanrl/ppo_atari.py --total-timesteps 16384'

The peers are Stable-Baselines3's PPO or DDPG, or sb3-contrib's RecurrentPPO, with the same wrappers
or VecNormalize; the bounds are the environment alone, and the arithmetic alone. Same
hyper-parameters, in alternation, one process at a time; one CPU thread each for
ppo_continuous_action, all cores for the others. DDPG learns from its 100th step on, and evaluates
nothing during the run.

Steady state: from the end of the first iteration (rollout and update; of DDPG a hundred steps) to
the end of the last; no start-up, compilation or final evaluation. Whole process: everything from
the process's start to its end, an evaluation of one episode too, and what it comes to for 1M steps.
PlainRL's compiler cache is empty in the first round and filled in the others. Of another program,
any command, the speed is the last that it prints: "SPS: 1234" or "1,234 steps/s". The arithmetic
alone: floating-point operations of PyTorch's matrix products and convolutions, in the update and,
where PyTorch is the policy, in the rollout, at the rate that this machine reaches for a product of
1024 x 1024 matrices in the round.
"""

import argparse
import json
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
DDPG_FLAGS = ["--random-steps", "100", "--learning-starts", "100", "--eval-interval", str(10**9)]
# rollout: its steps in all environments, the scripts' defaults, as the constants in work_sb3 are
TASKS = {
    "ppo_continuous_action": {
        "env_id": "HalfCheetah-v5",
        "rollout": 2048,
        "threads": 1,
        "steps": 61440,
    },
    "ppo_atari": {
        "env_id": "BreakoutNoFrameskip-v4",
        "rollout": 1024,
        "threads": os.cpu_count(),
        "steps": 10240,
    },
    "ppo_atari_lstm": {
        "env_id": "BreakoutNoFrameskip-v4",
        "rollout": 1024,
        "threads": os.cpu_count(),
        "steps": 8192,
    },
    "ddpg_continuous_action": {
        "env_id": "HalfCheetah-v5",
        "rollout": 100,
        "threads": os.cpu_count(),
        "steps": 3000,
        "flags": DDPG_FLAGS,
    },
}
FULL_STEPS = 1_000_000
PACKAGES = ("torch", "gymnasium", "mujoco", "numpy", "stable-baselines3", "sb3-contrib")


def work_sb3(script, env_id, steps, seed):
    """Trains SB3's algorithm with the script's default hyper-parameters.

    Returns marks (see steady_state).
    """
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
        model = TimedDDPG(
            "MlpPolicy",
            env,
            learning_rate=3e-4,
            buffer_size=FULL_STEPS,
            batch_size=256,
            tau=0.005,
            learning_starts=100,
            train_freq=1,
            gradient_steps=1,
            action_noise=NormalActionNoise(np.zeros(num_actions), 0.1 * np.ones(num_actions)),
            policy_kwargs={"net_arch": [256, 256]},
            **flags,
        )
        model.learn(steps)
        return marks
    flags |= {"gae_lambda": 0.95, "vf_coef": 0.5, "max_grad_norm": 0.5}
    adam = {"optimizer_kwargs": {"eps": 1e-5}}
    if script.startswith("ppo_atari"):
        import ale_py  # noqa: F401, registers the games

        kind = TimedPPO
        policy = "CnnPolicy"
        envs = make_atari_env(env_id, n_envs=8, seed=seed)
        if script == "ppo_atari_lstm":
            from sb3_contrib import RecurrentPPO

            kind = type("TimedRecurrentPPO", (Timed, RecurrentPPO), {})
            policy = "CnnLstmPolicy"
            # One LSTM for policy and value, as in the script
            adam |= {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
        else:
            envs = VecFrameStack(envs, 4)
        model = kind(
            policy,
            envs,
            learning_rate=lambda left: 2.5e-4 * left,
            n_steps=128,
            batch_size=256,
            n_epochs=4,
            clip_range=0.1,
            clip_range_vf=0.1,
            ent_coef=0.01,
            policy_kwargs=adam,
            **flags,
        )
    else:
        nets = {
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
            "ortho_init": True,
            "log_std_init": 0.0,
        }
        envs = VecNormalize(make_vec_env(env_id, seed=seed), gamma=0.99)
        model = TimedPPO(
            "MlpPolicy",
            envs,
            learning_rate=lambda left: 3e-4 * left,
            n_steps=2048,
            batch_size=64,
            n_epochs=10,
            clip_range=0.2,
            clip_range_vf=0.2,
            ent_coef=0.0,
            policy_kwargs=nets | adam,
            **flags,
        )
    model.learn(steps)
    return marks


def work_env(script, env_id, steps, seed):
    """Steps one environment with random actions, drawn beforehand, and resets it at ends.

    For Atari that is the emulator with four frames a step, whose screen nobody reads. Returns
    marks.
    """
    import gymnasium as gym
    import numpy as np

    rng = np.random.default_rng(seed)
    if script.startswith("ppo_atari"):
        import ale_py  # noqa: F401, registers the games

        env = gym.make(env_id, frameskip=1, disable_env_checker=True).unwrapped
        env.reset(seed=seed)
        ale = env.ale
        actions = [env._action_set[i] for i in rng.integers(env.action_space.n, size=steps)]
        start = time.time()
        for action in actions:
            for _ in range(4):
                ale.act(action)
            if ale.game_over():
                ale.reset_game()
        return [(0, start), (steps, time.time())]
    env = gym.make(env_id, disable_env_checker=True)
    space = env.action_space
    actions = rng.standard_normal((steps, *space.shape)).clip(space.low, space.high)
    actions = actions.astype(space.dtype)
    env.reset(seed=seed)
    start = time.time()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return [(0, start), (steps, time.time())]


def work_arithmetic(script, env_id, steps, seed):
    """Counts the floating-point operations of two iterations of a script.

    It also measures how fast this machine multiplies matrices, and returns marks as if it did
    nothing else. What the scripts leave to numpy, and an LSTM's own products, which PyTorch's
    counter doesn't know, are not counted: the bound is loose by those.
    """
    import torch
    import torch.utils.tensorboard
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    last = 2 * TASKS[script]["rollout"]

    class Counter:
        def __init__(self, folder):
            pass

        def add_scalar(self, tag, value, step):
            if tag == "charts/SPS":
                counts.append((step, flops.get_total_flops()))
                if step >= last:
                    sys.exit()

        def flush(self):
            pass

    torch.utils.tensorboard.SummaryWriter = Counter
    _, path, *words = command_of("plainrl", script, env_id, last, seed)
    sys.argv = [path, *words, "--no-compile"]  # what is compiled isn't counted
    with FlopCounterMode(display=False) as flops:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    (first_step, before), (last_step, after) = counts[0], counts[-1]
    torch.set_num_threads(TASKS[script]["threads"])
    matrix = torch.randn(1024, 1024)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    flops_per_step = (after - before) / (last_step - first_step)
    seconds_per_flop = median(times) / (2 * 1024**3)
    return [(0, 0.0), (steps, steps * flops_per_step * seconds_per_flop)]


def read_speed(output):
    """The last number of steps per second in what a program has printed, float.

    It is None if there is none.
    """
    found = re.findall(
        r"(?:SPS|FPS)\W*(\d[\d,]*\.?\d*)|(\d[\d,]*\.?\d*) *steps/s", output, re.IGNORECASE
    )
    return float("".join(found[-1]).replace(",", "")) if found else None


WORKERS = {"sb3": work_sb3, "env": work_env, "arithmetic": work_arithmetic}
# In the order of a round; other programs follow
PROGRAMS = {
    "plainrl": "PlainRL",
    "sb3": "Stable-Baselines3",
    "env": "environment alone",
    "arithmetic": "arithmetic alone",
}


def command_of(program, script, env_id, steps, seed):
    """The command line (list of str) that runs a program for that many env steps."""
    flags = ["--env-id", env_id, "--seed", str(seed)]
    if program in WORKERS:
        worker = [sys.executable, str(Path(__file__).resolve()), script, "--worker", program]
        return [*worker, "--steps", str(steps), *flags]
    flags = ["--run-name", "speed", "--no-cuda", *TASKS[script].get("flags", []), *flags]
    flags = ["--total-timesteps", str(steps), "--eval-episodes", "1", *flags]
    return [sys.executable, str(ROOT / f"{script}.py"), *flags]


def read_marks(program, folder):
    """Marks of the run in folder.

    A worker has printed them; a script's TensorBoard events have steps and times.
    """
    if program in WORKERS:
        lines = (folder / "output.txt").read_text().splitlines()
        return json.loads(next(line for line in lines if line.startswith("[[")))
    # Not at the top of the file: that would count in the workers' start-up
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "runs" / "speed"), size_guidance={"scalars": 0})
    return [(event.step, event.wall_time) for event in events.Reload().Scalars("charts/SPS")]


def steady_state(marks, started, ended):
    """The figures of a run, from its marks and the Unix times when it started and ended, s.

    marks: [(env steps done, Unix time, s)] at ends of iterations.

    Returns steps_per_second of the steady state, start_up_s (imports, building, compilation: the
    time to the first mark, less what its steps take at that speed), wall_s and wall_s_1m: the
    process's wall time, and that for 1M steps.
    """
    (first_step, first), (last_step, last) = marks[0], marks[-1]
    speed = (last_step - first_step) / (last - first)
    wall = ended - started
    return {
        "steps": last_step,
        "steps_per_second": speed,
        "start_up_s": first - started - first_step / speed,
        "wall_s": wall,
        "wall_s_1m": wall + (FULL_STEPS - last_step) / speed,
    }


def run(command, output, folder, settings, **options):
    """Runs a command in folder, what it prints into the file output.

    Returns when it began and ended, s since 1970, its exit code and the peak MB of its largest
    process.
    """
    began = time.time()
    process = subprocess.Popen(
        command, cwd=folder, stdout=output, stderr=output, env=os.environ | settings, **options
    )
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except KeyboardInterrupt:
        process.kill()
        raise
    ended = time.time()
    process.returncode = os.waitstatus_to_exitcode(status)
    peak_mb = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return began, ended, process.returncode, peak_mb


def measure(program, label, script, env_id, steps, seed, cache, command=None):
    """Runs a program once; returns a row for the CSV.

    Ours runs in a folder of its own with the compiler cache in cache, another's command, a string,
    where we are.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output.txt", "w") as output:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        settings = dict.fromkeys(names, str(TASKS[script]["threads"]))
        row = {"round": label, "program": program, "script": script, "env_id": env_id, "seed": seed}
        title = PROGRAMS.get(program, program)
        if command:
            began, ended, code, peak_mb = run(command, output, None, {}, shell=True)
        else:
            settings |= {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
            words = command_of(program, script, env_id, steps, seed)
            began, ended, code, peak_mb = run(words, output, folder, settings)
        said = (Path(folder) / "output.txt").read_text()
        if code:
            sys.exit(f"error: {title} failed with exit code {code}:\n{said[-1000:]}")
        if not command:
            row |= steady_state(read_marks(program, Path(folder)), began, ended)
        elif speed := read_speed(said):
            row |= {
                "steps": "",
                "steps_per_second": speed,
                "start_up_s": "",
                "wall_s": ended - began,
                "wall_s_1m": "",
            }
        else:
            example = "SPS: 1234 or 1,234 steps/s"
            sys.exit(f"error: {title} printed no speed, such as {example}:\n{said[-1000:]}")
        row["peak_mb"] = peak_mb
    if program in ("env", "arithmetic"):  # they are no program that anybody would run
        row |= {"start_up_s": "", "wall_s_1m": "", "peak_mb": ""}
    print(
        f"round {label}, {script}: {title} {row['steps_per_second']:,.0f} steps/s, whole process "
        f"{row['wall_s']:.1f} s",
        flush=True,
    )
    return row


def ratios(rows, column, above, below):
    """Round by round, the column's value of program `above` divided by that of program `below`."""
    value = {(row["round"], row["program"]): row[column] for row in rows}
    return [x / value[label, below] for (label, program), x in value.items() if program == above]


def spread(values, form):
    """Median, min and max as three cells of a Markdown table."""
    return " | ".join(format(f(values), form) for f in (median, min, max))


def tables(rows):
    """The Markdown tables of all rounds of a script (not of --full)."""
    header = (
        "| | steps/s: median | min | max | start-up, s: first round | later | "
        "1M steps, s: first round | later | peak memory, MB |"
    )
    lines = [header, "|---|" + "---:|" * 8]
    programs = list(dict.fromkeys(row["program"] for row in rows))
    for program in programs:
        runs = [row for row in rows if row["program"] == program]
        times = [
            f"{median(column):.1f}" if column and column[0] != "" else "-"
            for name in ("start_up_s", "wall_s_1m")
            for column in ([run[name] for run in runs[:1]], [run[name] for run in runs[1:]])
        ]
        peaks = [run["peak_mb"] for run in runs if run["peak_mb"] != ""]
        speeds = spread([run["steps_per_second"] for run in runs], ",.0f")
        peak = f"{max(peaks):.0f}" if peaks else "-"
        name = PROGRAMS.get(program, program)
        lines.append(f"| {name} | {speeds} | {' | '.join(times)} | {peak} |")
    lines += ["", "| ratio | median | min | max | round by round |", "|---|---:|---:|---:|---|"]
    wanted = []
    for program in programs:
        if program != "plainrl":
            name = f"steps/s, PlainRL / {PROGRAMS.get(program, program)}"
            wanted.append((name, "steps_per_second", "plainrl", program))
    if "sb3" in programs:
        name = "1M steps, Stable-Baselines3's time / PlainRL's"
        wanted.insert(1, (name, "wall_s_1m", "sb3", "plainrl"))
    for name, *which in wanted:
        found = ratios(rows, *which)
        by_round = ", ".join(f"{x:.2f}" for x in found)
        lines.append(f"| {name} | {spread(found, '.2f')} | {by_round} |")
    note = (
        "steps/s: steady state. 1M steps: whole process, projected from its wall time and steps/s. "
        "What PlainRL compiles in the first round it finds in the compiler's cache later."
    )
    return "\n".join([*lines, "", note])


def draw(rows, path):
    """Draws a chart beside the CSV at path.

    It has a bar for each script and program, the median, and a line from min to max, in units of
    the peer's median, where there is one, since scripts are far apart.
    """
    from benchmark.figures import COLORS, draw_intervals, save

    programs = dict.fromkeys(row["program"] for row in rows)
    programs = [program for program in programs if program not in ("env", "arithmetic")]
    peer = "sb3" in programs
    bars = []
    for script in dict.fromkeys(row["script"] for row in rows):
        mine = [row for row in rows if row["script"] == script]
        speeds = {
            program: [row["steps_per_second"] for row in mine if row["program"] == program]
            for program in programs
        }
        unit = median(speeds["sb3"]) if peer else 1.0
        for program, x in speeds.items():
            bar = {"name": f"{script}, {PROGRAMS.get(program, program)}", "variant": program}
            bar |= {"value": median(x) / unit, "low": min(x) / unit, "high": max(x) / unit}
            bars.append(bar)
    looks = {program: (COLORS[i % len(COLORS)],) for i, program in enumerate(programs)}
    label = "steps per second, Stable-Baselines3 = 1" if peer else "environment steps per second"
    figure = draw_intervals(bars, looks, label, reference=1.0 if peer else None, bars=True)
    save(figure, bars, path.parent, f"{path.stem}_chart", "Speed")


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine():
    """One line: versions, processor, cores, the load of the last minute, which should be near 0."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = next(
        (line.split(": ")[1] for line in info.splitlines() if line.startswith("model name")), "CPU"
    )
    versions = ", ".join(f"{name} {installed(name)}" for name in PACKAGES)
    return (
        f"python {platform.python_version()}, {versions}; {processor}, {os.cpu_count()} cores, "
        f"{platform.platform()}; load before the first run {os.getloadavg()[0]:.2f}"
    )


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "scripts",
        nargs="*",
        metavar="SCRIPT",
        default=["ppo_continuous_action"],
        help=f"scripts to measure, of {', '.join(TASKS)} (default ppo_continuous_action)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (default 3)")
    parser.add_argument(
        "--steps", type=int, help="env steps of a run (default: 8 to 30 iterations)"
    )
    parser.add_argument(
        "--env-id", help="environment (default HalfCheetah-v5, for Atari BreakoutNoFrameskip-v4)"
    )
    parser.add_argument(
        "--versus", choices=("sb3", "none"), default="sb3", help="the peer (default sb3)"
    )
    parser.add_argument(
        "--other", action="append", metavar="NAME=COMMAND", default=[], help="one more program"
    )
    parser.add_argument(
        "--full", action="store_true", help="then really run 1M steps of each once, empty cache"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.csv",
        help=(
            "write each run's figures to this file, tables to FILE.md, a chart to FILE_chart.png "
            "and .svg"
        ),
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round (default 1)")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.others = dict(other.partition("=")[::2] for other in args.other)
    if len(args.others) < len(args.other):
        parser.error("two of --other have the same NAME")
    if unknown := [script for script in args.scripts if script not in TASKS]:
        parser.error(f"there is no {', '.join(unknown)} to measure: {', '.join(TASKS)} are")
    # SB3's DDPG learns after its 100th step, so its first iteration isn't seen
    least = 0
    for script in args.scripts:
        rollouts = 3 if script.startswith("ddpg") else 2
        least = max(least, rollouts * TASKS[script]["rollout"])
    if args.rounds < 1 or args.steps is not None and not args.worker and args.steps < least:
        parser.error(f"the steady state needs --steps {least} or more, and one of --rounds")
    whole = all(args.others) and all(args.others.values())
    if not whole or args.others.keys() & PROGRAMS.keys():
        parser.error(f"--other must be NAME=COMMAND, the name none of {', '.join(PROGRAMS)}")
    if args.out:
        from benchmark.collect import check_output

        check_output(parser, args.out)
    return args


def main():
    args = parse_args()
    if args.worker:
        script = args.scripts[0]
        return print(json.dumps(WORKERS[args.worker](script, args.env_id, args.steps, args.seed)))
    programs = [program for program in PROGRAMS if program != "sb3" or args.versus == "sb3"]
    programs += args.others
    texts, rows, machine_line = [], [], machine()
    try:
        for script in args.scripts:
            texts += measure_script(script, args, programs, rows)
    finally:  # what was measured before a program failed is kept
        if args.out and rows:
            from benchmark.collect import write_csv

            write_csv(args.out, [row | {"machine": machine_line} for row in rows])
    text = "\n\n".join([*texts, machine_line])
    if args.out:
        args.out.with_suffix(".md").write_text(text + "\n")
        draw([row for row in rows if row["round"] != "full"], args.out)
    print(f"\n{text}")


def measure_script(script, args, programs, rows):
    """All rounds of a script; adds to rows as it goes, returns its part of the Markdown."""
    task = TASKS[script]
    env_id = args.env_id or task["env_id"]
    rollout = task["rollout"]
    steps = (args.steps or task["steps"]) // rollout * rollout
    full_steps = FULL_STEPS // rollout * rollout
    mine = []
    ran = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "rounds")
        for i in range(args.rounds):
            for name in programs:
                other = args.others.get(name)
                row = measure(name, i + 1, script, env_id, steps, args.seed + i, cache, other)
                mine.append(row)
                rows.append(row)
        cache = Path(folder, "full")
        for name in ("plainrl", "sb3"):
            if args.full and name in programs:
                row = measure(name, "full", script, env_id, full_steps, args.seed, cache)
                ran.append(row)
                rows.append(row)
    texts = [f"## {script}, {env_id}\n\n{tables(mine)}"]
    if len(ran) == 2:
        longer = ratios(ran, "wall_s", "sb3", "plainrl")[0]
        texts.append(
            f"1M steps, whole process, really run: SB3 takes {longer:.2f} times as long as PlainRL."
        )
    return texts


if __name__ == "__main__":
    main()
