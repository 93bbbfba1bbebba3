"""Runs a suite: every run in a process of its own, here, in containers or on a cluster.

    python -m benchmark.sweep SUITE [--runs DIR] [--workers N] [--cpus-per-run N] [--gpus-per-run N]
    python -m benchmark.sweep SUITE --backend docker|slurm|ray
    python -m benchmark.sweep benchmark/suites/smoke.toml --dry-run

It ends when all are finished. SUITE is a file, or a name under benchmark/suites/ (its format: see
benchmark/suite.py). DIR (sweeps/SUITE without --runs) gets runs/NAME, a run's folder,
logs/NAME.log, what it printed, and jobs/NAME.json, its state, which `python -m benchmark.status
DIR` shows at any time. Started again, a sweep skips what is finished and resumes what is not from
its checkpoints. Ctrl-C and SIGTERM let the runs write theirs. The exit code is 1 if a run has
failed.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from benchmark.engines import ENGINES, ROOT, EngineError
from benchmark.suite import SuiteError, read_suite
from benchmark.worker import (
    count_failure,
    held,
    hold,
    is_finished,
    last_line,
    last_written,
    read_evaluation,
    read_job,
    read_json,
    read_progress,
    write_job,
    write_json,
)

POLL_S = 0.5  # s between two looks at the runs
SILENT_S = 120  # s without a word after which the table says so
PAUSE_S = 10  # s until the next start after a worker that didn't come up
MISSES = 5  # so many in a row that didn't come up are too many
STATES = ("running", "waiting", "failed", "finished")
ENDS = STATES[2:]
# Flags that not all backends have
ONLY = {
    "image": ("docker",),
    "memory_per_run": ("docker", "slurm", "ray"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "time": ("slurm",),
    "engine_args": ("docker", "slurm"),
    "ray_address": ("ray",),
}


def refuse(message):
    """Ends the program, exit code 2, with one sentence."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


class Sweep:
    """The runs of a suite in a folder, and the engine that they run on.

    jobs: {name: as read_job returns it}; given: {name: its mark() when the engine got it} of those
    that the engine has.
    """

    def __init__(self, folder, runs, engine, retries):
        self.dir = folder
        self.runs = runs
        self.engine = engine
        self.retries = retries
        self.jobs = {name: read_job(folder, name) for name in runs}
        self.given = {}
        self.cancelled = set()
        self.stopping = None
        self.misses = 0
        self.pause_end = 0.0
        self.say = lambda line: print(line, flush=True)

    def held(self, name):
        return held(self.dir / "jobs" / f"{name}.lock")

    def mark(self, name):
        """(time of a run's last attempt, size of its log).

        Where neither has grown, no worker has come up since.
        """
        log = self.dir / "logs" / f"{name}.log"
        return self.jobs[name]["started"], log.stat().st_size if log.exists() else 0

    def begin(self):
        """Sets runs that failed, were left by a killed sweep or were removed to be tried again."""
        running = self.engine.running()
        marks = {name: self.mark(name) for name in running if name in self.jobs}
        # Of a run that an earlier sweep started the worker has come up, whatever it does next
        self.given = {
            name: (0.0, size) if self.jobs[name]["state"] == "running" else (started, size)
            for name, (started, size) in marks.items()
        }
        for name, job in self.jobs.items():
            done = job["state"] == "finished" and is_finished(self.dir / "runs" / name)
            if not done and name not in running and not self.held(name):
                job |= {"state": "waiting", "failures": 0, "error": ""}
                write_job(self.dir, name, job)

    def poll(self):
        """Looks after the runs once: takes note of those that ended, and starts others."""
        running = self.engine.running()
        for name in self.given:
            self.jobs[name] = read_job(self.dir, name)
        for name in set(self.given) - running:
            self.left(name, self.given.pop(name))
        names = []
        for name, job in self.jobs.items():
            if len(names) >= self.engine.room() or time.time() < self.pause_end:
                break
            if job["state"] not in ENDS and name not in self.given and name not in self.cancelled:
                free = not self.held(name)  # by what a killed sweep has left, which is to end first
                self.jobs[name] = read_job(self.dir, name)
                names += [name] if free and self.jobs[name]["state"] not in ENDS else []
        if names:
            marks = {name: self.mark(name) for name in names}
            try:
                self.engine.start(names)
            except OSError:
                began = self.engine.running()
                self.given |= {name: mark for name, mark in marks.items() if name in began}
                raise
            self.given |= marks

    def left(self, name, mark):
        """A run's worker has ended; mark: of the run before it, see mark()."""
        job = self.jobs[name]
        if job["state"] not in ENDS and not self.held(name):
            log = self.dir / "logs" / f"{name}.log"
            started, size = self.mark(name)
            self.misses = 0 if started > mark[0] else self.misses
            if job["state"] == "running":
                job |= count_failure(self.dir, name, job, f"lost by {job['place']}", lost=True)
                job["state"] = "failed" if job["failures"] > self.retries else "waiting"
                write_job(self.dir, name, job)
            elif self.engine.stops_are_final and (started > mark[0] or size == mark[1]):
                self.cancelled.add(name)
            elif started == mark[0]:  # not even the worker came up, which is not the run's failure
                self.misses += 1
                self.pause_end = time.time() + PAUSE_S
                job["error"] = last_line(log) or "its worker said nothing"
                if self.misses >= MISSES:
                    raise EngineError(
                        f"the last {MISSES} workers didn't come up, {name}'s with: {job['error']}: "
                        "fix that, then the same command goes on"
                    )
        state = job["state"] if job["state"] in ENDS else "to be resumed"
        state = "cancelled" if name in self.cancelled else state
        self.say(f"{state}: {name} {job['error']}".rstrip())

    def unfinished(self):
        """Names of the runs that are neither at their ends nor cancelled."""
        left = [name for name, job in self.jobs.items() if job["state"] not in ENDS]
        return [name for name in left if name not in self.cancelled]

    def run(self):
        """Runs all to their ends, or to a signal; returns the exit code.

        Raises EngineError, after a stop.
        """
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, _: setattr(self, "stopping", signum))
        terminal = sys.stdout.isatty()
        live = contextlib.nullcontext()
        if terminal:
            live = Live(console=Console(), auto_refresh=False, transient=True)
            self.say = lambda line: None
        shown = 0.0
        broken = None
        with live:
            while not self.stopping and self.unfinished():
                try:
                    self.poll()
                    if terminal:
                        live.update(make_table(self.dir, self.jobs), refresh=True)
                    elif time.time() - shown > 30:
                        shown = time.time()
                        lines = [summary(self.jobs), *progress_lines(self.dir, self.jobs)]
                        self.say("\n".join(lines))
                except EngineError as error:
                    broken = error
                    break
                except OSError as error:  # a full disk, a network that is away for a moment
                    self.say(f"{error}: trying again")
                time.sleep(POLL_S)
        if self.stopping or broken:
            print("stopping: the runs save what they have, which takes up to a minute", flush=True)
        said = self.engine.stop() if self.stopping or broken else ""
        self.jobs = {name: read_job(self.dir, name) for name in self.runs}
        Console(width=None if terminal else 200).print(make_table(self.dir, self.jobs, most=10**9))
        print(said, end="\n" * bool(said))
        if broken:
            raise broken
        if self.cancelled:
            print(f"{len(self.cancelled)} were cancelled; the same command goes on with them")
        failed = any(job["state"] != "finished" for job in self.jobs.values())
        return 128 + self.stopping if self.stopping else int(failed)


def changed_flags(folder, runs):
    """(path, names) of the first run that is there already and was made with other flags.

    It is None if there is none.
    """
    for run in runs:
        path = folder / "runs" / run.name / "config.json"
        made = read_json(path).get("args")
        if not isinstance(made, dict):
            continue  # not begun, or killed while it was written: the run starts again
        names = [name for name, x in run.args.items() if made.get(name, x) != x]
        names = [name for name in names if name not in ("num_threads", "resume")]
        if names:
            return path.parent, ", ".join(names)


def summary(jobs):
    """How many runs are in each state, in one line."""
    counts = {state: sum(job["state"] == state for job in jobs.values()) for state in STATES}
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def progress_lines(folder, jobs, most=20):
    """What the runs that run have printed last, a line each."""
    names = [name for name, job in jobs.items() if job["state"] == "running"][:most]
    progress = [(name, read_progress(folder / "logs" / f"{name}.log")) for name in names]
    lines = []
    for name, p in progress:
        if p:
            steps = f"{p['step']}/{p['steps']}, {p['speed']}, {p['eta']} left"
            lines.append(f"  {name}: {steps}, return {p['return'] or '-'}")
    return lines


def make_table(folder, jobs, most=40):
    """The jobs of a sweep as a table, those that run first, no more than most of them."""
    table = Table(title=summary(jobs))
    for title in ("run", "state", "steps", "speed", "ETA", "return", "note"):
        min_width = min(30, max(map(len, jobs))) if title == "run" else None
        table.add_column(title, overflow="fold", min_width=min_width)
    order = {state: i for i, state in enumerate(STATES)}
    for name, job in sorted(jobs.items(), key=lambda item: order.get(item[1]["state"], 1))[:most]:
        progress = read_progress(folder / "logs" / f"{name}.log")
        returns, damage = read_evaluation(folder / "runs" / name)
        speed = ""
        eta = ""
        note = job["error"]
        if job["state"] == "running":
            speed = progress.get("speed", "")
            eta = progress.get("eta", "")
            silent_s = time.time() - max(job["started"], last_written(folder, name))
            notes = [f"attempt {job['failures'] + 1}"] if job["failures"] else []
            if silent_s > SILENT_S:
                notes.append(f"silent for {silent_s / 60:.0f} min, {job['place']}")
            note = ", ".join(notes)
        if damage and damage not in note:
            note = f"{note}; {damage}".removeprefix("; ")
        value = progress.get("return") or "" if returns is None else ""
        if returns:
            value = f"{sum(returns) / len(returns):.1f}"
        steps = f"{progress['step']}/{progress['steps']}" if progress else ""
        table.add_row(escape(name), job["state"], steps, speed, eta, value, escape(note))
    if len(jobs) > most:
        table.caption = f"and {len(jobs) - most} more"
    return table


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", help="a suite's file, or its name under benchmark/suites/")
    parser.add_argument("--runs", help="folder of the sweep (default sweeps/SUITE)")
    parser.add_argument(
        "--backend",
        choices=list(ENGINES),
        default="local",
        help="where the runs run (default local)",
    )
    parser.add_argument(
        "--workers", type=int, help="runs at a time (default: as many as there is room for)"
    )
    parser.add_argument(
        "--cpus-per-run", type=int, default=1, help="cores of a run, and its threads (default 1)"
    )
    parser.add_argument(
        "--gpus-per-run",
        type=float,
        default=0,
        help="GPUs of a run; 0.25: up to four share one (default 0)",
    )
    parser.add_argument("--memory-per-run", help="docker, slurm, ray: a run's memory, such as 8G")
    parser.add_argument("--image", help="docker: the image (default plainrl)")
    parser.add_argument("--partition", help="slurm: the partition")
    parser.add_argument("--account", help="slurm: the account")
    parser.add_argument(
        "--time", help="slurm: time limit of a job, after which the run goes on in another"
    )
    parser.add_argument(
        "--ray-address",
        help="ray: the cluster's address (default: a cluster of this machine alone)",
    )
    parser.add_argument(
        "--engine-arg",
        dest="engine_args",
        action="append",
        metavar="WORD",
        default=[],
        help=(
            "docker, slurm: one more word for docker run or sbatch: --engine-arg=--constraint=a100"
        ),
    )
    parser.add_argument(
        "--retries", type=int, default=1, help="how often a failed run is resumed (default 1)"
    )
    parser.add_argument(
        "--stall-minutes",
        type=float,
        default=30,
        help="a run that writes nothing for so long counts as failed (default 30)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands, and start nothing"
    )
    args = parser.parse_args()
    for name, backends in ONLY.items():
        if getattr(args, name) and args.backend not in backends:
            flag = "engine-arg" if name == "engine_args" else name.replace("_", "-")
            refuse(f"--{flag} is for --backend {' or '.join(backends)}")
    positive = args.cpus_per_run >= 1 and args.stall_minutes > 0
    if not positive or args.retries < 0 or not 0 <= args.gpus_per_run < 1e6:
        refuse(
            "--cpus-per-run and --stall-minutes must be above 0, --gpus-per-run and --retries "
            "from 0"
        )
    if args.workers is not None and args.workers < 1:
        refuse("--workers must be above 0")
    if args.gpus_per_run > 1 and args.gpus_per_run % 1:
        refuse("--gpus-per-run must be a whole number, or below 1 for runs that share a GPU")
    if args.runs == "":
        refuse("--runs must name a folder")
    if args.memory_per_run and not re.fullmatch(r"[1-9]\d*[KMGT]", args.memory_per_run):
        refuse(f"--memory-per-run {args.memory_per_run} must be a whole number with K, M, G or T")
    args.image = args.image or "plainrl"
    return args


def main():
    args = parse_args()
    path = Path(args.suite)
    path = path if path.suffix == ".toml" else ROOT / "benchmark" / "suites" / f"{args.suite}.toml"
    folder = Path(args.runs or Path("sweeps") / path.stem).absolute()
    try:
        suite = read_suite(path)
        runs = {run.name: {"script": run.script, "words": run.words} for run in suite}
        engine = ENGINES[args.backend](folder, runs, args)
        sweep = Sweep(folder, runs, engine, args.retries)
        if args.dry_run:
            for name, run in runs.items():
                command = shlex.join([sys.executable, run["script"], *run["words"]])
                print(sweep.jobs[name]["state"], command)
            print(f"the worker that looks after a run:\n{engine.preview(list(runs))}")
            return
        for name in ("", "jobs", "logs", "runs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        lock = hold(folder / "lock")
        if not lock:
            holder = (folder / "lock").read_text()
            advice = "wait for its end, or choose another --runs"
            refuse(f"{folder} is held by another sweep, {holder}: {advice}")
        if changed := changed_flags(folder, suite):
            advice = "choose another --runs, or remove it"
            refuse(f"{changed[0]} was made with another {changed[1]}: {advice}")
        lock.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M")
        lock.write(f"process {os.getpid()} on {os.uname().nodename} since {since}")
        lock.flush()
        engine.open()
        plan = {"retries": args.retries, "stall_minutes": args.stall_minutes, "runs": runs}
        write_json(folder / "sweep.json", plan)
        sweep.begin()
        if args.backend != "slurm" and (jobs := " ".join(read_json(folder / "slurm.json"))):
            print(
                f"Slurm's jobs {jobs} were submitted for this folder, too: `scancel {jobs}` takes "
                "back what waits"
            )
        print(f"{len(runs)} runs, {engine}, in {folder}: {summary(sweep.jobs)}", flush=True)
        sys.exit(sweep.run())
    except (SuiteError, EngineError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{folder} can't be the folder of a sweep: {error}")
    except KeyboardInterrupt:  # before the runs began
        sys.exit(130)


if __name__ == "__main__":
    main()
