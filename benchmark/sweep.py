"""Runs a suite: every run in a process of its own, so many at a time, until all are finished.

    python -m benchmark.sweep SUITE [--runs DIR] [--workers N] [--cpus-per-run N] [--retries N] [--stall-minutes M]
    python -m benchmark.sweep benchmark/suites/smoke.toml --dry-run

SUITE is a file, or a name under benchmark/suites/ (its format: see benchmark/suite.py). DIR (sweeps/SUITE without
--runs) gets runs/NAME, a run's folder, logs/NAME.log, what it printed, and sweep.json, which
`python -m benchmark.status DIR` shows at any time. Started again, a sweep skips what is finished and resumes what is
not from its checkpoints. Ctrl-C and SIGTERM let the runs write theirs. The exit code is 1 if a run has failed.
"""

import argparse
import ctypes
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from benchmark.suite import ROOT, SuiteError, read_suite

# A script's line where its output is no terminal: "  3%|3  | 2048/65536 [00:03<01:31, 690.55 steps/s, return -7.9]"
PROGRESS = re.compile(r"\| (\d+)/(\d+) \[[^<]*<([^,]*), *([^,\]]+)(?:, return ([^\]]+))?\]")
POLL_S = 0.5  # s between two looks at the runs
STOP_S, STALLED_S = 60, 5  # s until a run that was asked to stop is killed, and until a stalled one is
STATES = ("running", "waiting", "failed", "finished")


def read_result(run_dir):
    """Mean return of a finished run's evaluation, or None."""
    try:
        return float(np.mean(json.loads((run_dir / "evaluation.json").read_text())["returns"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tail(path, size=4096):
    """The last bytes of a file as lines, [] where it isn't there."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace").splitlines()


def read_progress(log):
    """What a run's log says last: {"step", "steps", "eta", "speed", "return"}, strings; {} before the first line."""
    found = next((match for line in reversed(tail(log)) if (match := PROGRESS.search(line))), None)
    return dict(zip(("step", "steps", "eta", "speed", "return"), found.groups())) if found else {}


def refuse(message):
    """Ends the program, exit code 2, with one sentence."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


class Sweep:
    """The runs of a suite in the folder dir, with what happened to each: jobs[name] is a dict with "state" (of
    STATES), "attempts", "result" (of the evaluation), "error" (the last line of a failed run's log)."""

    def __init__(self, runs, folder, workers, cpus_per_run, retries, stall_minutes):
        self.runs, self.dir = {run.name: run for run in runs}, folder
        self.retries, self.stall_s = retries, 60 * stall_minutes
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count()))
        self.free = [cores[i * cpus_per_run : (i + 1) * cpus_per_run] for i in range(workers)]
        self.jobs, self.processes, self.stopping = {}, {}, None
        for run in runs:
            result = read_result(folder / "runs" / run.name)
            self.jobs[run.name] = {"state": "waiting" if result is None else "finished", "attempts": 0,
                                   "result": result, "error": ""}

    def check(self):
        """Ends the program if a run that is there was made with other flags."""
        for name, run in self.runs.items():
            path = self.dir / "runs" / name / "config.json"
            try:
                made = json.loads(path.read_text())["args"]
            except (OSError, ValueError, KeyError, TypeError):
                continue  # not begun, or killed while it was written: the run starts again
            changed = [k for k, x in run.args.items() if made.get(k, x) != x and k not in ("num_threads", "resume")]
            if changed:
                refuse(f"{path.parent} was made with another {', '.join(changed)}: choose another --runs, or remove it")

    def command(self, run):
        """The words of the command that starts a run, or goes on with it."""
        resume = (self.dir / "runs" / run.name / "checkpoint.pt").exists()
        return [sys.executable, run.script, *(("--resume", f"runs/{run.name}") if resume else run.words)]

    def start(self, run):
        """Starts a run on free cores; its process ends with this one, and until then holds the sweep's lock."""
        cores = self.free.pop(0)
        threads = str(len(cores))
        env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
                            "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])}

        def child():
            if sys.platform == "linux":
                os.sched_setaffinity(0, cores)
                ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a sweep killed by -9 leaves no orphans

        with open(self.dir / "logs" / f"{run.name}.log", "a") as log:
            process = subprocess.Popen(
                self.command(run), cwd=self.dir, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=child, pass_fds=[self.lock.fileno()])
        self.processes[run.name] = (process, cores, time.time())
        self.jobs[run.name] |= {"state": "running", "attempts": self.jobs[run.name]["attempts"] + 1}

    def end(self, name, said=""):
        """Takes note of a run whose process has ended."""
        process, cores, _ = self.processes.pop(name)
        self.free.append(cores)
        job, log = self.jobs[name], self.dir / "logs" / f"{name}.log"
        job["result"] = read_result(self.dir / "runs" / name)
        job["error"] = said or next((line for line in reversed(tail(log)) if line.strip()), "nothing printed")
        if process.returncode == 0 and job["result"] is not None:
            job |= {"state": "finished", "error": ""}
        elif self.stopping:
            job["state"] = "waiting"
        else:
            again = job["attempts"] <= self.retries and process.returncode != 2  # 2 is bad input, which stays bad
            job["state"] = "waiting" if again else "failed"
            job["error"] += f" (exit code {process.returncode})"
        self.say(f"{job['state'] if job['state'] != 'waiting' else 'to be resumed'}: {name} {job['error']}".rstrip())

    def stalled(self, name):
        """Whether a running run has written nothing for too long, neither its log nor a file of its folder anew."""
        places = (self.dir / "logs" / f"{name}.log", self.dir / "runs" / name)
        times = [place.stat().st_mtime for place in places if place.exists()]
        return time.time() - max([self.processes[name][2], *times]) > self.stall_s

    def stop(self, names, wait_s, said=""):
        """Asks runs to save and end, once, since at a second signal a script ends unsaved; after wait_s kills them."""
        end = time.time() + wait_s
        for name in names:
            self.processes[name][0].terminate()
        for name in names:
            try:
                self.processes[name][0].wait(max(0.0, end - time.time()))
            except subprocess.TimeoutExpired:
                self.processes[name][0].kill()
                self.processes[name][0].wait()
            self.end(name, said)

    def poll(self):
        """Looks after the runs once: ends, stalls, starts."""
        for name in list(self.processes):
            if self.processes[name][0].poll() is not None:
                self.end(name)
            elif self.stalled(name):
                self.stop([name], STALLED_S, f"nothing written for {self.stall_s / 60:g} minutes")
        for name, job in self.jobs.items():
            if job["state"] == "waiting" and self.free and not self.stopping:
                self.start(self.runs[name])
        self.write()

    def write(self):
        """sweep.json, whole at any time."""
        state = {"time": time.time(), "pid": os.getpid(), "host": os.uname().nodename, "jobs": self.jobs}
        (self.dir / "sweep.tmp").write_text(json.dumps(state, indent=1))
        (self.dir / "sweep.tmp").replace(self.dir / "sweep.json")

    def hold(self):
        """Takes the folder's lock or ends the program, naming who holds it."""
        self.dir.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.dir / "lock", "a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.seek(0)
            refuse(f"{self.dir} is held by another sweep, {self.lock.read().strip()}, or by runs it has left: wait "
                   "for their end, or choose another --runs")
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {os.uname().nodename} since {time.strftime('%Y-%m-%d %H:%M')}")
        self.lock.flush()
        for name in ("logs", "runs"):
            (self.dir / name).mkdir(exist_ok=True)

    def run(self):
        """Runs all to their ends, or to a signal; returns the exit code."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, _: setattr(self, "stopping", signum))
        terminal = sys.stdout.isatty()
        self.say = (lambda line: None) if terminal else (lambda line: print(line, flush=True))
        live = Live(console=Console(), auto_refresh=False) if terminal else None
        shown = 0.0
        with live or open(os.devnull):
            while any(job["state"] in ("waiting", "running") for job in self.jobs.values()) and not self.stopping:
                self.poll()
                if terminal:
                    live.update(make_table(self.dir, self.jobs), refresh=True)
                elif time.time() - shown > 30:
                    print(summary(self.jobs), flush=True)
                    shown = time.time()
                time.sleep(POLL_S)
        self.stop(list(self.processes), STOP_S)  # there are some only after a signal
        self.write()
        failed = any(job["state"] == "failed" for job in self.jobs.values())
        return 128 + self.stopping if self.stopping else int(failed)


def summary(jobs):
    """How many runs are in each state, in one line."""
    counts = {state: sum(job["state"] == state for job in jobs.values()) for state in STATES}
    return ", ".join(f"{n} {state}" for state, n in counts.items())


def make_table(folder, jobs, most=40):
    """The jobs of a sweep as a table, those that run first, no more than most of them."""
    table = Table("run", "state", "steps", "speed", "ETA", "return", "note", title=summary(jobs))
    for name, job in sorted(jobs.items(), key=lambda item: STATES.index(item[1]["state"]))[:most]:
        progress = read_progress(Path(folder) / "logs" / f"{name}.log")
        speed, eta, note = "", "", job["error"]
        if job["state"] == "running":
            speed, eta = progress.get("speed", ""), progress.get("eta", "")
            note = f"attempt {job['attempts']}" if job["attempts"] > 1 else ""
        value = progress.get("return") or "" if job["result"] is None else f"{job['result']:.1f}"
        table.add_row(name, job["state"], f"{progress['step']}/{progress['steps']}" if progress else "", speed, eta,
                      value, escape(note))
    if len(jobs) > most:
        table.caption = f"and {len(jobs) - most} more"
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", help="a suite's file, or its name under benchmark/suites/")
    parser.add_argument("--runs", type=Path, help="folder of the sweep (default sweeps/SUITE)")
    parser.add_argument("--workers", type=int, help="runs at a time (default: as many as there are cores for)")
    parser.add_argument("--cpus-per-run", type=int, default=1, help="cores of a run, and its threads (default 1)")
    parser.add_argument("--retries", type=int, default=1, help="how often a failed run is resumed (default 1)")
    parser.add_argument("--stall-minutes", type=float, default=30,
                        help="a run that writes nothing for so long counts as failed (default 30)")
    parser.add_argument("--dry-run", action="store_true", help="print the runs' commands, and run nothing")
    args = parser.parse_args()
    path = Path(args.suite)
    path = path if path.suffix == ".toml" else ROOT / "benchmark" / "suites" / f"{args.suite}.toml"
    try:
        runs = read_suite(path)
    except SuiteError as error:
        refuse(error)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if args.cpus_per_run < 1 or args.stall_minutes <= 0 or args.retries < 0:
        refuse("--cpus-per-run and --stall-minutes must be above 0, --retries from 0")
    workers = args.workers if args.workers is not None else max(1, cores // args.cpus_per_run)
    if not 0 < workers * args.cpus_per_run <= cores:
        refuse(f"--workers {workers} x --cpus-per-run {args.cpus_per_run} don't fit on {cores} cores")
    folder = (args.runs or Path("sweeps") / path.stem).absolute()
    sweep = Sweep(runs, folder, workers, args.cpus_per_run, args.retries, args.stall_minutes)
    if args.dry_run:
        for name, run in sweep.runs.items():
            print(sweep.jobs[name]["state"], *sweep.command(run))
        return
    sweep.hold()
    sweep.check()
    print(f"{len(runs)} runs, {workers} at a time, in {folder}: {summary(sweep.jobs)}", flush=True)
    code = sweep.run()
    Console(width=None if sys.stdout.isatty() else 200).print(make_table(folder, sweep.jobs, most=10**9))
    if sweep.stopping:
        print("stopped; the same command goes on")
    sys.exit(code)


if __name__ == "__main__":
    main()
