"""Shows how far a sweep is, at any time, from any machine that sees its folder.

    python -m benchmark.status DIR
"""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmark.sweep import make_table, refuse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, help="folder of the sweep: its --runs")
    args = parser.parse_args()
    try:
        state = json.loads((args.dir / "sweep.json").read_text())
    except (OSError, ValueError) as error:
        refuse(f"{args.dir} is no folder of a sweep ({error})")
    Console(width=None if sys.stdout.isatty() else 200).print(make_table(args.dir, state["jobs"], most=10**9))
    print(f"process {state['pid']} on {state['host']}, last heard of {time.time() - state['time']:.0f} s ago")


if __name__ == "__main__":
    main()
