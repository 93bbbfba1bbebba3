"""Shows how far a sweep is, at any time, from any machine that sees its folder.

python -m benchmark.status DIR
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmark.sweep import ENDS, make_table, refuse
from benchmark.worker import held, read_job, read_json


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, help="folder of the sweep: its --runs")
    args = parser.parse_args()
    names = read_json(args.dir / "sweep.json").get("runs")
    if not names:
        refuse(f"{args.dir} is no folder of a sweep")
    jobs = {name: read_job(args.dir, name) for name in names}
    Console(width=None if sys.stdout.isatty() else 200).print(
        make_table(args.dir, jobs, most=10**9)
    )
    lock = args.dir / "lock"
    if held(lock):
        print(f"looked after by {lock.read_text()}")
    elif any(job["state"] not in ENDS for job in jobs.values()):
        print("no sweep looks after it: the same command goes on")


if __name__ == "__main__":
    main()
