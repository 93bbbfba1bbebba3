"""Runs a suite: every run in a process of its own, here, in containers or on a cluster.

    python -m benchmark.sweep SUITE [--dir DIR] [--workers N] [--cpus-per-run N] [--gpus-per-run N]
    python -m benchmark.sweep SUITE --backend docker|slurm|ray
    python -m benchmark.sweep benchmark/suites/smoke.toml --dry-run

It ends when all are finished. SUITE is a file, or a name under benchmark/suites/ (its format: see
benchmark/suite.py). DIR (sweeps/SUITE without --dir) gets runs/NAME, a run's folder,
logs/NAME.log, what it printed, and jobs/NAME.json, its state, which `python -m benchmark.status
DIR` shows at any time. Started again, a sweep skips what is finished, resumes what is not from its
checkpoints, and tries what has failed once more. Ctrl-C and SIGTERM let the runs write their
checkpoints. The exit code is 1 if a run has failed. Each backend has flags of its own: --backend
slurm --help.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import time
import uuid
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.live import Live

from benchmark import ROOT, engines
from benchmark.engines import EngineError
from benchmark.flags import MAY_CHANGE
from benchmark.status import make_rows, make_table, progress_lines, summary
from benchmark.store import (
    ENDS,
    RECORD,
    NoLocks,
    Store,
    hold,
    is_held,
    last_line,
    may_be_held,
    read_json,
)
from benchmark.suite import SuiteError, read_suite

POLL_S = 0.5  # s between two looks at the runs
SHOW_S = 30  # s between two looks at the progress where there is no terminal
SHOWN = 40  # runs in the table on a terminal
REPEAT_S = 600  # s until an error that lasts is told again
PAUSE_S = 10  # s until the next start after a worker that didn't come up
LEAVE_S = 10  # s until the workers of finished runs have ended, and Slurm has noticed it
MISSES = 5  # workers in a row that don't come up before the sweep gives up


@dataclass
class SweepFlags:
    """The flags that all backends have in common."""

    suite: tyro.conf.Positional[str]  # a suite's file, or its name under benchmark/suites/
    dir: str | None = None  # folder of the sweep; sweeps/SUITE if there is none
    backend: Literal[tuple(engines.ENGINES)] = "local"  # where the runs run
    retries: int = 1  # how often a failed run is resumed
    stall_minutes: float = 30  # a run that writes nothing for so long counts as failed
    # go on where the file system has no locks, and several nodes could have one run at once
    without_locks: bool = False
    dry_run: bool = False  # print the commands, and start nothing


class Screen:
    """What the user sees of a sweep: on a terminal a table that is drawn anew, elsewhere lines.

    runs: the plan's; live: the table, None where there is no terminal; told: {error: Unix time at
    which it was told last}.
    """

    def __init__(self, store, runs):
        self.store = store
        self.runs = runs
        self.live = None
        self.shown = 0.0
        self.told = {}

    @contextlib.contextmanager
    def open(self):
        """Draws the table in this context."""
        if not sys.stdout.isatty():
            yield
            return
        with Live(console=Console(), auto_refresh=False, transient=True) as self.live:
            yield

    def say(self, line):
        """Tells what happens to a run; on a terminal the table does."""
        if self.live is None:
            print(line, flush=True)

    def warn(self, error):
        """Tells of an error that may pass, not again and again; on a terminal above the table."""
        message = f"{error}: trying again"
        if time.time() - self.told.get(message, 0.0) < REPEAT_S:
            return
        self.told[message] = time.time()
        if self.live is None:
            print(message, flush=True)
        else:
            self.live.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def show(self, jobs):
        """The table on a terminal; elsewhere some lines now and then."""
        now = time.time()
        if self.live is None and now - self.shown < SHOW_S:
            return
        self.shown = now
        title = summary(job["state"] for job in jobs.values())
        rows = make_rows(self.store, self.runs, jobs, SHOWN)
        if self.live is None:
            self.say("\n".join([title, *progress_lines(rows)]))
        else:
            table = make_table(rows, title, max(0, len(jobs) - SHOWN))
            self.live.update(table, refresh=True)

    def sum_up(self, jobs):
        """Prints what became of all runs."""
        title = summary(job["state"] for job in jobs.values())
        rows = make_rows(self.store, self.runs, jobs)
        Console(width=None if sys.stdout.isatty() else 200).print(make_table(rows, title))


class Sweep:
    """The runs of a suite in a folder, and the engine that they run on.

    runs: the plan's; jobs: {name: Store.job(name)}; given: {name: its mark() when the engine got
    it} of those that the engine has; cancelled: names that aren't to be started again; misses: how
    many workers in a row didn't come up; pause_end: Unix time before which none is started;
    stopping: the signal that has come, or None.

    It reads the states of the runs and never writes them: that is for their workers.
    """

    def __init__(self, store, runs, engine):
        self.store = store
        self.runs = runs
        self.engine = engine
        self.jobs = {name: store.job(name) for name in runs}
        self.given = {}
        self.cancelled = set()
        self.misses = 0
        self.pause_end = 0.0
        self.stopping = None
        self.screen = Screen(store, runs)

    def held(self, name):
        """Whether a worker has the run; where there are no locks, nobody knows."""
        try:
            return is_held(self.store.job_lock(name))
        except NoLocks:
            return False

    def mark(self, name):
        """(time of a run's last attempt, size of its log).

        Where neither has grown, no worker has come up since.
        """
        log = self.store.log_file(name)
        size = log.stat().st_size if log.exists() else 0
        return self.jobs[name]["started"], size

    def adopt(self):
        """Watches the workers that the engine has from an earlier sweep of this folder."""
        for name in self.engine.running() & self.runs.keys():
            started, size = self.mark(name)
            if self.jobs[name]["state"] == "running":
                started = 0.0  # its worker has come up, whatever it does next
            self.given[name] = (started, size)

    def unfinished(self):
        """Names of the runs that are neither at their ends nor cancelled."""
        left = [name for name, job in self.jobs.items() if job["state"] not in ENDS]
        return [name for name in left if name not in self.cancelled]

    def poll(self):
        """Looks after the runs once: takes note of those that ended, and starts others."""
        running = self.engine.running()
        for name in self.given:
            self.jobs[name] = self.store.job(name)
        for name in set(self.given) - running:
            self.take_back(name, self.given.pop(name))
        names = self.next_runs()
        if names:
            self.start(names)

    def take_back(self, name, mark):
        """Takes note of a run whose worker has ended. mark: the run's mark() before that worker.

        Raises EngineError, see miss().
        """
        job = self.jobs[name]
        if job["state"] not in ENDS and not self.held(name):
            self.judge_end(name, mark)
        state = "to be resumed"
        if job["state"] in ENDS:
            state = job["state"]
        elif name in self.cancelled:
            state = "cancelled"
        self.screen.say(f"{state}: {name} {job['error']}".rstrip())

    def judge_end(self, name, mark):
        """Why a worker has ended whose run is not at its end: lost, cancelled or never come up.

        mark: as in take_back(). Raises EngineError, see miss().
        """
        job = self.jobs[name]
        started_before, size_before = mark
        started, size = self.mark(name)
        came_up = started > started_before
        if came_up:
            self.misses = 0
        # A worker that is stopped writes that, one that is lost doesn't get to it
        is_lost = job["state"] == "running" or job["session"] != self.store.session()
        if came_up and is_lost:
            return  # the run's next worker counts that
        was_queued = not came_up and size == size_before
        if self.engine.stops_are_final and (came_up or was_queued):
            self.cancelled.add(name)
        elif not came_up:
            self.miss(name)

    def miss(self, name):
        """Counts a worker that didn't come up, which is no failure of the run.

        Raises EngineError if that has happened too often.
        """
        self.misses += 1
        self.pause_end = time.time() + PAUSE_S
        error = last_line(self.store.log_file(name)) or "its worker said nothing"
        self.jobs[name]["error"] = error
        if self.misses >= MISSES:
            raise EngineError(
                f"the last {MISSES} workers didn't come up, {name}'s with: {error}: fix that, then "
                "the same command goes on"
            )

    def next_runs(self):
        """Names of the runs to start now."""
        if time.time() < self.pause_end:
            return []
        room = self.engine.room()
        names = []
        for name in self.unfinished():
            if len(names) >= room:
                break
            if name in self.given:
                continue
            # What a killed sweep has left may have the run, and is to end first
            held = self.held(name)
            self.jobs[name] = self.store.job(name)
            if not held and self.jobs[name]["state"] not in ENDS:
                names.append(name)
        return names

    def start(self, names):
        """Gives runs to the engine. Raises OSError, EngineError."""
        marks = {name: self.mark(name) for name in names}
        try:
            self.engine.start(names)
        except OSError:
            began = self.engine.running()
            self.given |= {name: mark for name, mark in marks.items() if name in began}
            raise
        self.given |= marks

    def last_job(self, name):
        """Store.job(name), in which a run waits whose worker is gone without a word."""
        job = self.store.job(name)
        if job["state"] == "running" and not may_be_held(self.store.job_lock(name)):
            return job | {"state": "waiting"}
        return job

    def watch(self):
        """Looks after the runs until all are at their ends, or a signal comes."""
        while not self.stopping and self.unfinished():
            self.look()
        # Workers end a moment after their runs, and until then the folder isn't free
        end = time.time() + LEAVE_S
        while not self.stopping and self.given and time.time() < end:
            self.look()

    def look(self):
        """Looks after the runs and shows them, once."""
        for do in (self.poll, self.show):
            try:
                do()
            except OSError as error:  # a full disk, a network that is away for a moment
                self.screen.warn(error)
        time.sleep(POLL_S)

    def show(self):
        self.screen.show(self.jobs)

    def on_signal(self, signum, _):
        self.stopping = signum

    def run(self):
        """Runs all to their ends, or to a signal; returns the exit code.

        Raises EngineError, after a stop.
        """
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.on_signal)
        broken = None
        try:
            with self.screen.open():
                self.watch()
        except EngineError as error:
            broken = error
        said = ""
        if self.stopping or broken:
            print(
                "stopping: the runs save what they have, which takes up to a minute; one in its "
                "first iteration begins again next time",
                flush=True,
            )
            said = self.engine.stop()
        self.jobs = {name: self.last_job(name) for name in self.runs}
        self.screen.sum_up(self.jobs)
        if said:
            print(said)
        if broken:
            raise broken
        if self.cancelled:
            print(f"{len(self.cancelled)} were cancelled; the same command goes on with them")
        if self.stopping:
            return 128 + self.stopping
        if any(job["state"] == "finished" for job in self.jobs.values()):
            folder = shlex.quote(str(self.store.folder))
            print(f"curves and tables: python -m benchmark.report {folder}")
        return int(any(job["state"] != "finished" for job in self.jobs.values()))


def records_of(suite):
    """The Runs of a suite as the plan has them: {name: record}, see Store.plan."""
    runs = {}
    for run in suite:
        runs[run.name] = {key: getattr(run, key) for key in RECORD} | {"words": list(run.words)}
    return runs


def make_plan(suite, runs, flags, needs_locks):
    """What sweep.json says: see Store.plan. runs: records_of(suite)."""
    return {
        "session": uuid.uuid4().hex,
        "retries": flags.retries,
        "stall_minutes": flags.stall_minutes,
        "needs_locks": needs_locks,
        "scripts": {run.script: {"defaults": run.defaults} for run in suite},
        "runs": runs,
    }


def check_old_runs(store, suite):
    """Ends the program if a run is there already and was made with other flags."""
    for run in suite:
        run_dir = store.run_dir(run.name)
        made = read_json(run_dir / "config.json").get("args")
        if not isinstance(made, dict):
            continue  # not begun, or killed while it was written: the run starts again
        names = [name for name, x in run.args.items() if made.get(name, x) != x]
        names = [name for name in names if name not in MAY_CHANGE]
        if names:
            advice = "choose another --dir, or remove it"
            refuse(f"{run_dir} was made with another {', '.join(names)}: {advice}")


def take_folder(store, needs_locks):
    """Locks the sweep's folder, or ends the program. Returns the open file with the lock, or None.

    None: there are no locks and none are needed.
    """
    try:
        lock = hold(store.sweep_lock)
    except NoLocks as error:
        if needs_locks:
            refuse(
                f"{store.folder}: {error}, so two nodes could have one run at once: choose a --dir "
                "on another file system, or --without-locks if no other sweep runs there"
            )
        print(f"{store.folder}: {error}: see to it that only one sweep runs there", flush=True)
        return None
    if lock is None:
        holder = store.sweep_lock.read_text()
        advice = "wait for its end, or choose another --dir"
        refuse(f"{store.folder} is held by another sweep, {holder}: {advice}")
    lock.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M")
    lock.write(f"process {os.getpid()} on {os.uname().nodename} since {since}")
    lock.flush()
    return lock


def preview(sweep):
    """Prints what would be done."""
    for name, run in sweep.runs.items():
        command = shlex.join([sys.executable, run["script"], *run["words"]])
        print(sweep.jobs[name]["state"], command)
    print(f"the worker that looks after a run:\n{sweep.engine.preview(list(sweep.runs))}")


def refuse(message):
    """Ends the program, exit code 2, with one sentence."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def read_flags(words):
    """The words of the command line -> (SweepFlags, class of the engine, its flags).

    Which flags there are depends on --backend. Raises EngineError for values that can't be.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--backend", nargs="?")
    backend = first.parse_known_args(words)[0].backend
    if backend not in engines.ENGINES:
        backend = "local"  # or a mistake, which tyro tells
    backend_flags, engine = engines.load(backend)
    both = make_dataclass("Flags", [("sweep", SweepFlags), ("backend", backend_flags)])
    flags = tyro.cli(
        both,
        prog="python -m benchmark.sweep",
        description=__doc__,
        args=words,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    if not flags.sweep.stall_minutes > 0 or flags.sweep.retries < 0:  # it may be nan
        refuse("--stall-minutes must be above 0, and --retries 0 or above")
    if flags.sweep.dir == "":
        refuse("--dir must name a folder")
    return flags.sweep, engine, flags.backend


def find_suite(name):
    """The path of a suite that is named by its file, or by its name under benchmark/suites/.

    Raises SuiteError.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return path
    suites = ROOT / "benchmark" / "suites"
    path = suites / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(place.stem for place in suites.glob("*.toml")))
        raise SuiteError(f"there is no suite {name}; known are {known}, or give the path of one")
    return path


def run_suite(flags, engine_class, backend_flags):
    """Runs a suite as the flags say; returns the exit code. Raises SuiteError, EngineError."""
    path = find_suite(flags.suite)
    suite = read_suite(path)
    store = Store(Path(flags.dir or Path("sweeps") / path.stem).absolute())
    runs = records_of(suite)
    engine = engine_class(store, runs, backend_flags)
    if flags.dry_run:
        preview(Sweep(store, runs, engine))
        return 0
    try:
        sweep, lock = prepare(store, suite, runs, engine, flags)
    except OSError as error:
        refuse(f"{store.folder} can't be the folder of a sweep: {error}")
    code = sweep.run()
    if lock is not None:
        lock.close()
    return code


def prepare(store, suite, runs, engine, flags):
    """Makes the sweep's folder and tells what there is to do -> (Sweep, what take_folder returns).

    Raises EngineError, or OSError where the folder can't be written.
    """
    needs_locks = engine.several_nodes and not flags.without_locks
    store.make_folders()
    lock = take_folder(store, needs_locks)
    check_old_runs(store, suite)
    engine.open()
    store.write_plan(make_plan(suite, runs, flags, needs_locks))
    sweep = Sweep(store, runs, engine)
    sweep.adopt()
    left = engines.leftovers(store, flags.backend)
    if left:
        print(left)
    states = summary(job["state"] for job in sweep.jobs.values())
    print(f"{len(suite)} runs, {engine}, in {store.folder}: {states}", flush=True)
    return sweep, lock


def main():
    try:
        sys.exit(run_suite(*read_flags(sys.argv[1:])))
    except (SuiteError, EngineError) as error:
        refuse(error)
    except KeyboardInterrupt:  # before the runs began
        sys.exit(130)


if __name__ == "__main__":
    main()
