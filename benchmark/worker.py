"""Looks after one run of a sweep: begins or resumes it, retries it, says what became of it.

    python -m benchmark.worker DIR NAME --threads N

An engine starts one for each run, on this machine, in a container or on a node of a cluster; all of
them see the sweep's folder DIR. What to run is in DIR/sweep.json. This process alone writes
DIR/jobs/NAME.json, and decides when a run has failed for good. It reads the run's progress from
episodes.csv. Only the standard library is needed.

Exit codes: 0 finished, 1 failed, 75 held by another worker, 143 stopped, to be resumed.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmark.store import (
    AFRESH,
    NoLocks,
    Store,
    StoreError,
    hold,
    is_finished,
    is_held,
    last_line,
    read_evaluation,
    read_progress,
)

POLL_S = 0.5  # s between two looks at the run
STOP_S = 60  # s until a run that was asked to stop is killed
STALLED_S = 5  # the same for a run that has stalled: it probably doesn't listen
BUSY_S = 30  # s until the next look at a run that a process elsewhere has
ANSWER_S = 60  # s that a command of Docker or Slurm has to answer
BAD_INPUT = 2  # a script's exit code for what stays wrong however often it is tried
HELD = 75  # exit code where another worker has the run: EX_TEMPFAIL of sysexits.h
STOPPED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def die_with_parent(signum=signal.SIGTERM):
    """Linux: this process gets a signal when its parent ends, so that a kill leaves no orphans."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def in_use(run_dir):
    """Whether a script has the lock of a run's folder, maybe on another machine."""
    try:
        return is_held(run_dir / "lock")
    except NoLocks:
        return False


def count_failure(job, step, error, lost=False):
    """What changes in the job of a run after an attempt that ended badly, as a dict.

    step: how far it got. Where that is further than all before it, the failures are counted from 0
    again, so that a long run may have many troubles, but not one of them again and again. lost: its
    worker is gone without a word, which is then no failure at all.
    """
    failures = job["failures"] + 1
    if step > job["step"]:
        failures = 0 if lost else 1
    return {
        "state": "waiting",
        "failures": failures,
        "error": error if failures else "",
        "step": max(step, job["step"]),
    }


class Silence:
    """How long a run has written nothing: seconds in which this process itself has looked.

    Counted in looks, not by a clock, so that a machine that sleeps is no stall.
    """

    def __init__(self):
        self.seconds = 0.0
        self.written = None

    def look(self, written):
        """written: Unix time at which the run wrote last."""
        self.seconds += POLL_S
        if written != self.written:
            self.seconds = 0.0
        self.written = written


class Worker:
    """A run and what is done about it.

    job: its state, as Store.job returns it; lock: the open file whose lock is held as long as any
    process of the run lives, or None where there are no locks; signals: that have come.
    """

    def __init__(self, store, name, plan, lock):
        self.store = store
        self.name = name
        self.lock = lock
        self.record = plan["runs"][name]
        self.retries = plan["retries"]
        self.stall_s = 60 * plan["stall_minutes"]
        self.session = plan["session"]
        self.run_dir = store.run_dir(name)
        self.log_file = store.log_file(name)
        self.job = store.job(name)
        self.signals = []
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, self.on_signal)

    def on_signal(self, signum, _):
        self.signals.append(signum)

    def work(self):
        """Attempts until the run is finished, has failed too often, or is to stop.

        Returns this process's exit code.
        """
        self.take_over()
        code = None
        while not is_finished(self.run_dir):
            if self.signals:
                self.note(state="waiting", error="")
                return STOPPED
            if self.job["failures"] > self.retries or code == BAD_INPUT:
                self.note(state="failed")
                return 1
            if in_use(self.run_dir):  # by a script on another machine, whose worker is lost
                self.wait_for_other()
            else:
                code = self.attempt()
        self.note(state="finished", error="")
        return 0

    def take_over(self):
        """Counts what became of the run under a worker that is gone, since this one has its lock.

        A worker that was lost before this session began is no failure of this session. Store.job
        reads its state as "running" only because this process has the lock.
        """
        if self.job["state"] != "running":
            return
        if self.job["session"] == self.session:
            self.count(f"lost by {self.job['place']}", lost=True)
        else:
            self.note(**AFRESH)

    def attempt(self):
        """Begins the run or goes on with it, and counts a failure. Returns its exit code."""
        self.note(state="running", started=time.time(), place=this_place())
        code, said = self.watch(self.start())
        returns, damage = read_evaluation(self.run_dir)
        if returns is not None or self.signals:
            return code
        if code == BAD_INPUT and in_use(self.run_dir):  # another script was quicker
            return None
        if code == 0 and damage:
            said = damage
        self.count(said)
        return code

    def wait_for_other(self):
        """Waits for the end of a script that another worker has left, or for a signal."""
        error = f"{self.run_dir} is in use by another process"
        self.note(state="waiting", error=error, started=time.time(), place=this_place())
        end = time.time() + BUSY_S
        while time.time() < end and not self.signals:
            time.sleep(POLL_S)

    def start(self):
        """Starts the run's script; returns its process."""
        words = self.record["words"]
        if (self.run_dir / "checkpoint.pt").exists():
            words = ["--resume", str(self.run_dir.relative_to(self.store.folder))]
        with open(self.log_file, "a") as log:
            return subprocess.Popen(
                [sys.executable, self.record["script"], *words],
                cwd=self.store.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[self.lock.fileno()] if self.lock else [],
                # A script without a worker is killed: nobody would notice that it hangs
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )

    def watch(self, process):
        """Waits for the end of the run's process, and stops it after a signal or when it stalls.

        Returns its exit code and what is to be said of it.
        """
        said = ""
        kill_at = None
        silence = Silence()
        while process.poll() is None:
            silence.look(self.store.last_written(self.name))
            if kill_at is not None:
                if time.time() > kill_at:
                    process.kill()
            elif self.signals:
                kill_at = time.time() + STOP_S
                process.terminate()
                # Written before the run ends: whoever stops this process may soon kill it
                self.note(state="waiting")
            elif silence.seconds > self.stall_s:
                said = f"nothing written for {self.stall_s / 60:g} minutes"
                kill_at = time.time() + STALLED_S
                process.terminate()
            time.sleep(POLL_S)
        said = said or last_line(self.log_file) or "nothing printed"
        return process.returncode, f"{said} (exit code {process.returncode})"

    def count(self, error, lost=False):
        """Notes an attempt that ended badly."""
        step = read_progress(self.run_dir).get("step", 0)
        self.note(**count_failure(self.job, step, error, lost))

    def note(self, **changes):
        """Writes the run's state."""
        self.job |= changes
        try:
            self.store.write_job(self.name, self.job)
        except OSError as error:  # a full disk: the run will find that out, too, or it passes
            print(f"can't write the state of {self.name}: {error}", file=sys.stderr)


def this_place():
    """Where this worker is, for people."""
    return f"{os.uname().nodename}, process {os.getpid()}"


def hold_run(store, name, needs_locks):
    """The open file with the run's lock, None where there are no locks and none are needed.

    Otherwise ends the program if it can't be had.
    """
    path = store.job_lock(name)
    try:
        lock = hold(path)
    except NoLocks as error:
        if needs_locks:
            fail(f"{path}: {error}, without which two nodes may have one run at once")
        print(f"{path}: {error}: see to it that only one sweep runs there", file=sys.stderr)
        return None
    except OSError as error:
        fail(f"can't lock {path}: {error}")
    if lock is None:
        print(f"{name} is held by {store.job(name)['place']}", file=sys.stderr)
        sys.exit(HELD)
    return lock


def fail(message):
    """Ends the program with one sentence."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def requeue():
    """Lets Slurm put this task back into its queue."""
    task = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", task], timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:  # then the sweep submits it again
        print(f"can't requeue {task}: {error}", file=sys.stderr)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path, help="folder of the sweep")
    parser.add_argument("name", help="name of the run")
    parser.add_argument("--threads", required=True, help="threads of the run")
    parser.add_argument("--cores", help="the cores that it is to use: 0,1")
    parser.add_argument(
        "--env-from-stdin",
        action="store_true",
        help="read environment variables, as JSON, from stdin",
    )
    return parser.parse_args()


def main():
    args = parse_args()
    die_with_parent()
    if args.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, args.cores.split(",")))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    os.environ |= dict.fromkeys(names, args.threads)
    if args.env_from_stdin:
        os.environ |= json.load(sys.stdin)

    store = Store(args.dir)
    try:
        plan = store.plan()
    except StoreError as error:
        fail(error)
    if args.name not in plan["runs"]:
        fail(f"{store.plan_file} has no run {args.name}")
    worker = Worker(store, args.name, plan, hold_run(store, args.name, plan["needs_locks"]))
    code = worker.work()
    # Slurm sent this signal since the time limit is near. If the run failed for good, the next task
    # says so
    if signal.SIGUSR1 in worker.signals and code and "SLURM_ARRAY_JOB_ID" in os.environ:
        requeue()
    sys.exit(code)


if __name__ == "__main__":
    main()
