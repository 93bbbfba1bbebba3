"""Environment steps per second of scripts, beside their peers.

    python -m benchmark.speed ppo_continuous_action ppo_atari --amp --out speed.csv

The peers are Stable-Baselines3 or sb3-contrib, and CleanRL's loop for three scripts. They have the
flags of the script's run, as far as they know them: sizes, rates, coefficients, threads. Programs
of a round run one after the other, on the CPU; ratios pair the runs of a round. PQN has no peer.
"""

import shlex
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import pandas as pd
import tyro

from benchmark import fail
from benchmark.speed.measure import measure
from benchmark.speed.peers import PROGRAMS, TASKS, programs_of
from benchmark.speed.tables import NOTE, tables


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[Literal[tuple(TASKS)], ...]] = ("ppo_continuous_action",)
    """scripts to measure"""
    rounds: int = 4
    """runs of each program, 4 or more"""
    amp: bool = False
    """measure PlainRL in bfloat16 too, where the script has --amp"""
    flags: str = ""
    """more flags of the scripts, in quotes: "--env-id Hopper-v5 --total-timesteps 20480" """
    out: Path | None = None
    """write each run's figures to this CSV"""


def parse_args():
    """The flags. Bad ones end the program, code 2."""
    args = tyro.cli(Args, prog="python -m benchmark.speed", description=__doc__)
    if args.rounds < 4:
        fail("--rounds must be 4 or more: speeds vary from run to run")
    for package in ("stable_baselines3", "sb3_contrib"):
        if find_spec(package) is None:
            fail(f"the peers need {package}: pip install -r requirements.txt")
    return args


def measure_script(script, args):
    """Yields the rows of a script, round by round."""
    with tempfile.TemporaryDirectory() as caches:
        for number in range(1, args.rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                for program in programs_of(script, args.amp):
                    flags = shlex.split(args.flags)
                    cache = Path(caches, program.replace(" ", ""))  # g++ gets it without quotes
                    row = measure(program, script, number, flags, Path(folder), cache)
                    yield {"round": number, **row}


def main():
    args = parse_args()
    if args.out:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.touch()
        except OSError as error:
            fail(f"can't write {args.out}: {error.strerror}")
    rows = []
    for script in dict.fromkeys(args.scripts):
        for row in measure_script(script, args):
            print(
                f"round {row['round']}, {script}: {PROGRAMS[row['program']][0]} "
                f"{row['steps_per_second']:,.0f} steps/s, whole process {row['wall_s']:.1f} s, "
                f"other programs kept {row['others_cores']:.1f} cores busy",
                flush=True,
            )
            rows.append(row)
            if args.out:  # at once: it is kept, whatever ends the program
                pd.DataFrame(rows).to_csv(args.out, index=False)
    for name, table in tables(pd.DataFrame(rows)).items():
        print(f"\n## {name}\n\n{table}")
    print(f"\n{NOTE}")


if __name__ == "__main__":
    main()
