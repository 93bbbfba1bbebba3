"""Environment steps per second of scripts, beside their peers and beside what bounds both.

    python -m benchmark.speed ppo_atari ppo_atari_lstm --amp --out speed.csv
    python -m benchmark.speed ppo_atari \\
        --other 'CleanRL=python ../cleanrl/ppo_atari.py --total-timesteps 16384'

The peers are Stable-Baselines3's PPO, DDPG, TD3 and SAC, and sb3-contrib's RecurrentPPO, with the
same wrappers or VecNormalize and the same hyper-parameters. The bounds are the environment alone
and the arithmetic alone: the floating-point operations of PyTorch's matrix products and
convolutions, at the rate that this machine reaches for a product of two matrices of 1024 x 1024.

All programs of a round run one after the other, on the CPU: with one thread for
ppo_continuous_action, with all cores that they may use for the others. Ratios pair the runs of a
round.

Steady state: from the end of the first iteration that learns (rollout and update; for DDPG, TD3 and
SAC the second hundred steps) to the end of the last. It has no start-up, compilation or final
evaluation. Whole process: everything from the process's start to its end, with an evaluation of one
episode, and what that comes to for 1M steps. The compiler's cache is empty in the first round and
filled in the others. DDPG, TD3 and SAC learn from their 100th step on and evaluate nothing during
the run.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from benchmark.speed import chart
from benchmark.speed.measure import (
    MeasureError,
    RefusedError,
    describe_machine,
    measure,
    measure_other,
)
from benchmark.speed.peers import FULL_STEPS, PEER, PROGRAMS, TASKS, Work
from benchmark.speed.tables import NOTE, frame, tables, title

LEAST_ROUNDS = 4


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[Literal[tuple(TASKS)], ...]] = ("ppo_continuous_action",)
    """scripts to measure"""
    rounds: int = LEAST_ROUNDS
    """runs of each program, 4 or more"""
    steps: int | None = None
    """environment steps of a run; None: 8 to 30 iterations"""
    env_id: str | None = None
    """None: HalfCheetah-v5, for Atari BreakoutNoFrameskip-v4"""
    versus: Literal["sb3", "none"] = "sb3"
    """the peer"""
    amp: bool = False
    """measure PlainRL in bfloat16 too, where the script has --amp"""
    other: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=COMMAND: one more program, any command that prints its steps per second, such as
    "SPS: 1234" or "1,234 steps/s"; the last counts"""
    full: bool = False
    """then really run 1M steps of PlainRL and of the peer, once, with an empty compiler cache"""
    out: Path | None = None
    """write each run's figures to this CSV, tables to .md and a chart to _chart.png beside it"""
    seed: int = 1
    """seed of the first round"""


def refuse(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args():
    """The flags, and the commands of --other, {name: command}. Bad ones end the program, code 2."""
    args = tyro.cli(
        Args,
        prog="python -m benchmark.speed",
        description=__doc__,
        config=[tyro.conf.FlagCreatePairsOff],
    )
    if args.rounds < LEAST_ROUNDS:
        refuse(f"--rounds must be {LEAST_ROUNDS} or more: speeds vary from run to run")
    tasks = [TASKS[script] for script in args.scripts]
    least = max(task.least_iterations * task.rollout for task in tasks)
    if args.steps is not None and args.steps < least:
        refuse(f"the steady state needs --steps {least} or more")
    if args.amp and not any(task.amp for task in tasks):
        refuse(f"--amp: no such flag in {', '.join(args.scripts)}")
    commands = {}
    for other in args.other:
        name, _, words = other.partition("=")
        commands[name] = words
    if len(commands) < len(args.other):
        refuse("two of --other have the same NAME")
    if not all(commands) or not all(commands.values()) or commands.keys() & PROGRAMS.keys():
        refuse(f"--other must be NAME=COMMAND, the name none of {', '.join(PROGRAMS)}")
    if args.out:
        check_output(args.out)
    return args, commands


def check_output(path):
    """Makes the CSV and its folder now: what was measured must not be lost."""
    if path.suffix != ".csv":
        refuse(f"--out {path} must end in .csv")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        refuse(f"can't write {path} ({error.strerror}): give another file")


def measure_script(script, args, commands):
    """Yields the rows of a script: round by round, then those of --full."""
    task = TASKS[script]
    env_id = args.env_id or task.env_id
    steps = (args.steps or task.steps) // task.rollout * task.rollout
    programs = [program for program in PROGRAMS if program != PEER or args.versus == PEER]
    if not (args.amp and task.amp):
        programs.remove("plainrl --amp")
    with tempfile.TemporaryDirectory() as caches:
        for i in range(args.rounds):
            work = Work(script, env_id, steps, args.seed + i)
            for program in programs:
                yield {"round": i + 1} | measure(program, work, Path(caches, program))
            for name, command in commands.items():
                yield {"round": i + 1} | measure_other(name, command, work)
    if not args.full:
        return
    work = Work(script, env_id, FULL_STEPS // task.rollout * task.rollout, args.seed)
    with tempfile.TemporaryDirectory() as caches:
        for program in ("plainrl", PEER):
            if program in programs:
                yield {"round": "full"} | measure(program, work, Path(caches, program))


def announce(row):
    """Prints a row as a line."""
    parts = [
        f"round {row['round']}, {row['script']}: {title(row['program'])} "
        f"{row['steps_per_second']:,.0f} steps/s",
        f"whole process {row['wall_s']:.1f} s",
    ]
    if row["others_cores"] is not None:
        parts.append(f"other programs kept {row['others_cores']:.1f} cores busy")
    print(", ".join(parts), flush=True)


def main():
    args, commands = parse_args()
    machine = describe_machine()
    print(machine, flush=True)
    rows = []
    try:
        for script in dict.fromkeys(args.scripts):
            for row in measure_script(script, args, commands):
                announce(row)
                rows.append(row | {"machine": machine})
                if args.out:  # at once: it is kept, whatever ends the program
                    frame(rows).to_csv(args.out, index=False)
    except RefusedError as error:
        refuse(str(error).removeprefix("error: "))
    except MeasureError as error:
        sys.exit(f"error: {error}")
    parts = [f"## {name}\n\n{table}" for name, table in tables(frame(rows)).items()]
    text = "\n\n".join([*parts, NOTE])
    print(f"\n{text}")
    if args.out:
        args.out.with_suffix(".md").write_text(text + "\n")
        chart.draw(frame(rows), args.out.with_name(f"{args.out.stem}_chart.png"))


if __name__ == "__main__":
    main()
