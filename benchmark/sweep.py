"""Does all runs of a suite: here, in containers or on a cluster.

    python -m benchmark.sweep SUITE [--dir DIR] [--workers N] [--cpus-per-run N] [--gpus-per-run N]
    python -m benchmark.sweep SUITE --backend docker|slurm|ray
    python -m benchmark.sweep SUITE --status

SUITE is a file, or a name under benchmark/suites/ (its format: see benchmark/suite.py). DIR
(sweeps/SUITE without --dir) gets runs/NAME, a run's folder, and logs/NAME.log, what it printed.
Given again, the same command goes on: what is finished is left alone, the rest is resumed. Ctrl-C
and SIGTERM let the runs write their checkpoints. The exit code is 1 if a run isn't finished.
"""

import argparse
import fcntl
import importlib
import shlex
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import tyro
from filelock import FileLock, Timeout
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from benchmark import ROOT, backends, fail
from benchmark.backends import BackendError
from benchmark.suite import SuiteError, read_args, read_suite
from benchmark.task import changed_flags, last_line, read_evaluation, state_of

POLL_S = 0.5  # s between two looks at the runs
ENDS = ("finished", "failed")
STATES = ("running", "begun", "waiting", *ENDS)


def read_flags():
    """The flags, and the class of the backend."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--backend", default="local")
    name = parser.parse_known_args()[0].backend  # whose flags tyro is to read
    if name not in backends.NAMES:
        fail(f"--backend must be one of {', '.join(backends.NAMES)}")
    module = importlib.import_module(f"benchmark.backends.{name}")
    flags = tyro.cli(module.Flags, prog="python -m benchmark.sweep", description=__doc__)
    return flags, module.Backend


def find_suite(name):
    """The absolute path of a suite's file."""
    places = (Path(name), ROOT / "benchmark" / "suites" / f"{name}.toml")
    for place in places:
        if place.is_file():
            return place.absolute()
    known = ", ".join(sorted(place.stem for place in places[1].parent.glob("*.toml")))
    fail(f"there is no suite {name}; known are {known}, or give a file")


def check_old_runs(folder, args):
    """Ends the program if a run is there already that was made with other flags.

    args: {name: flags as config.json has them}.
    """
    for name, flags in args.items():
        run_dir = folder / "runs" / name
        changed = ", ".join(changed_flags(run_dir, flags))
        if changed:
            fail(f"{run_dir} was made with another {changed}: choose another --dir")


def progress(run_dir, total_steps):
    """How far a run is: step, steps per second, seconds left and the mean of the last returns.

    From episodes.csv; None before its first row.
    """
    path = run_dir / "episodes.csv"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        rows = file.read().split(b"\n")[1:-1]
    rows = [row.split(b",") for row in rows if row.count(b",") == 5]
    if not rows:
        return None
    step, seconds = int(rows[-1][0]), float(rows[-1][1])
    speed = step / max(seconds, 0.01)
    return step, speed, (total_steps - step) / speed, np.mean([float(row[3]) for row in rows])


def is_held(log):
    """Whether a task, of whatever sweep and machine, has the run with this log."""
    try:
        with open(log.with_suffix(".lock")) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no task has begun it, or this user may not read it
        return False
    return False


class Screen:
    """What the user sees: on a terminal a table that is drawn anew, elsewhere lines.

    steps: {name: total_timesteps}; rows: {name: the table's row} of those that have ended; states:
    {name: state} as they were seen last; told: the last line that counts them.
    """

    def __init__(self, folder, steps):
        self.folder = folder
        self.steps = steps
        self.rows = {}
        self.states = {}
        self.told = ""
        self.live = Live(console=Console(), auto_refresh=False, transient=True)

    def look(self, running):
        """Reads all folders, and tells what has changed where there is no terminal."""
        for name in self.steps:
            if name in self.rows:
                continue
            state = state_of(self.folder / "runs" / name)
            if state == "begun" and name in running:
                state = "running"
            has_just_ended = state in ENDS and self.states.get(name, state) != state
            self.states[name] = state
            if state in ENDS:
                self.rows[name] = self.row(name, state)
            if has_just_ended and not sys.stdout.isatty():
                print(*filter(None, self.rows[name]), flush=True)

    def row(self, name, state):
        """A run's cells: name, state, steps, speed, time left, return, note."""
        run_dir = self.folder / "runs" / name
        total = self.steps[name]
        steps = speed = left = mean_return = note = ""
        if state == "finished":
            steps = f"{total:,}"
            mean_return = f"{np.mean(read_evaluation(run_dir)):.1f}"
        elif state == "failed":
            note = last_line(run_dir / "failed")
        elif found := progress(run_dir, total):
            steps = f"{found[0]:,}/{total:,}"
            mean_return = f"{found[3]:.1f}"
            if state == "running":
                speed = f"{found[1]:,.0f} steps/s"
                left = str(timedelta(seconds=round(found[2])))
        elif state == "waiting":
            note = last_line(self.folder / "logs" / f"{name}.log")
        return name, state, steps, speed, left, mean_return, note

    def summary(self):
        counts = Counter(self.states.values())
        return ", ".join(f"{counts[state]} {state}" for state in STATES)

    def table(self):
        table = Table(title=self.summary())
        for name in ("run", "state", "steps", "speed", "left", "return", "note"):
            table.add_column(name, overflow="fold")
        for name in sorted(self.states, key=lambda name: STATES.index(self.states[name])):
            row = self.rows.get(name) or self.row(name, self.states[name])
            table.add_row(*map(escape, row))
        return table

    def show(self):
        """The table on a terminal; elsewhere a line when a run's state has changed."""
        if sys.stdout.isatty():
            self.live.update(self.table(), refresh=True)
        elif self.told != self.summary():
            self.told = self.summary()
            print(self.told, flush=True)

    def print_table(self):
        Console(width=None if sys.stdout.isatty() else 200).print(self.table())


def do_all(backend, screen):
    """Has the backend do all runs that aren't at their ends, until they are, or a signal comes.

    Returns the signal, or None. Raises BackendError.
    """
    signals = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: signals.append(signum))
    taken = set()
    while not signals:
        left = [name for name, x in screen.states.items() if x not in ENDS and name not in taken]
        if not left:
            return None
        taken |= backend.start(left)
        while running := backend.running():
            if signals:
                break
            screen.look(running)
            screen.show()
            time.sleep(POLL_S)
        screen.look(())
    return signals[0]


def main():
    try:
        flags, backend_class = read_flags()
        suite = find_suite(flags.suite)
        folder = (flags.dir or Path("sweeps", suite.stem)).absolute()
        runs = read_suite(suite)
        args = read_args(runs)
        screen = Screen(folder, {name: args[name]["total_timesteps"] for name in runs})
        if flags.status:
            screen.look({name for name in runs if is_held(folder / "logs" / f"{name}.log")})
            screen.print_table()
            return
        screen.look(())
        check_old_runs(folder, args)
        backend = backend_class(flags, suite, folder, runs)
        if flags.dry_run:
            for name in runs:
                print(screen.states[name], shlex.join(backend.preview(name)))
            return
        run_sweep(flags, folder, backend, screen)
    except (SuiteError, BackendError) as error:
        fail(error)


def run_sweep(flags, folder, backend, screen):
    """Does the runs, shows what became of them, and ends the program."""
    lock = FileLock(folder / "lock")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        fail(f"another sweep has {folder}")
    except OSError as error:
        fail(f"{folder} can't be the folder of a sweep: {error}")
    if flags.retry_failed:
        for name, state in screen.states.items():
            if state == "failed":
                (folder / "runs" / name / "failed").unlink()
        screen.rows.clear()
        screen.look(())
    with screen.live:
        stopped = do_all(backend, screen)
    if stopped:
        print("stopping: the runs save what they have", flush=True)
        print(backend.stop())
        screen.look(())
    screen.print_table()
    if "failed" in screen.states.values():
        print("--retry-failed tries the failed runs once more")
    if "finished" in screen.states.values():
        print(f"curves and tables: python -m benchmark.report {shlex.quote(str(folder))}")
    if stopped:
        sys.exit(128 + stopped)
    sys.exit(any(state != "finished" for state in screen.states.values()))


if __name__ == "__main__":
    main()
