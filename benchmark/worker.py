"""Runs one run of a sweep to its end: begins or resumes it, looks after it, retries it.

    python -m benchmark.worker DIR NAME --threads N

benchmark.sweep starts one for each run, on this machine, in a container or on a node of a cluster;
all of them see the sweep's folder DIR. What there is to run stands in DIR/sweep.json, what became
of it in DIR/jobs/NAME.json. Only the standard library is needed. Exit codes: 0 finished, 1 failed,
75 held by another worker, 143 stopped, to be resumed.
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

# A script's line where its output is no terminal:
# "  3%|3  | 2048/65536 [00:03<01:31, 690.55 steps/s, return -7.9]"
PROGRESS = re.compile(r"\| (\d+)/(\d+) \[[^<]*<([^,]*), *([^,\]]+)(?:, return ([^\]]+))?\]")
POLL_S = 0.5  # s between two looks at the run
STOP_S = 60  # s until a run that was asked to stop is killed
STALLED_S = 5  # the same of one that has stalled, and is likely deaf
BUSY_S = 30  # s until the next attempt at a run that a process elsewhere has
BUSY = "is in use by another process"  # what a script says of a folder that is locked
HELD = 75  # exit code where another worker has the run: EX_TEMPFAIL of sysexits.h


def read_json(path):
    """The dict in a file, {} where there is none or a damaged one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path, value):
    """Writes a file that is whole at any time."""
    # Many machines may write it
    part = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)


def read_evaluation(run_dir):
    """A run's folder -> (returns of its evaluation, what is wrong with them).

    The first is None unless the run is finished, and [] after one with --eval-episodes 0. The
    second is "" unless there is an evaluation.json that can't be read.
    """
    try:
        returns = json.loads((run_dir / "evaluation.json").read_bytes())["returns"]
        if not isinstance(returns, list) or not all(type(x) in (int, float) for x in returns):
            raise ValueError("its returns are no list of numbers")
        return [float(x) for x in returns], ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        return None, f"evaluation.json can't be read ({type(error).__name__}: {reason})"


def is_finished(run_dir):
    returns, _ = read_evaluation(run_dir)
    return returns is not None


def read_job(folder, name):
    """What is known of a run.

    "state" (waiting, running, failed, finished), "failures" (attempts that ended badly without
    getting further), "error" (what was said at the last of them), "started" (Unix time of the last
    attempt), "place" (host, process), "step" (the furthest that an attempt got that ended badly).
    """
    job = {"state": "waiting", "failures": 0, "error": "", "started": 0.0, "place": "", "step": 0}
    job |= read_json(folder / "jobs" / f"{name}.json")
    returns, damage = read_evaluation(folder / "runs" / name)
    if returns is not None:
        return job | {"state": "finished", "error": ""}
    if damage and job["state"] == "finished":
        return job | {"state": "waiting"}
    return job


def write_job(folder, name, job):
    write_json(folder / "jobs" / f"{name}.json", job)


def tail(path, size=4096):
    """The last bytes of a file as lines, [] where it isn't there."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace").splitlines()


def last_line(path):
    """What a log says last, 300 characters of it; "" if nothing.

    Docker's advice after its errors doesn't count.
    """
    for line in reversed(tail(path)):
        line = "".join(c for c in line if c.isprintable()).strip()
        if line and not line.startswith("Run 'docker "):
            return line[-300:]
    return ""


def read_progress(log):
    """What a run's log says last: {"step", "steps", "eta", "speed", "return"}, strings.

    It is {} before the first line.
    """
    for line in reversed(tail(log, 2**16)):  # a stack trace may follow it
        if found := PROGRESS.search(line):
            return dict(zip(("step", "steps", "eta", "speed", "return"), found.groups()))
    return {}


def count_failure(folder, name, job, error, lost=False):
    """The job of a run after an attempt that ended badly.

    Where it got further than all before it, the failures are counted from 0 again, so that a long
    run may have many troubles, but not one of them again and again. lost: its worker is gone
    without a word, which is then no failure at all.
    """
    step = int(read_progress(folder / "logs" / f"{name}.log").get("step", 0))
    failures = (0 if lost else 1) if step > job["step"] else job["failures"] + 1
    return job | {
        "state": "waiting",
        "failures": failures,
        "error": error if failures else "",
        "step": max(step, job["step"]),
    }


def hold(path):
    """An open file with its lock, or None if another process has it.

    That may be on another machine that sees the file.
    """
    file = open(path, "a+")
    for _ in range(3):  # held(path) has it for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.1)
        except OSError as error:
            advice = "see to it that only one sweep runs there"
            message = f"{path}: this file system has no locks ({error.strerror}): {advice}"
            print(message, file=sys.stderr)
            return file
    file.close()
    return None


def held(path):
    """Whether a process has the lock of a file."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        # Else there is no such file, or there are no locks
        return isinstance(error, BlockingIOError)
    return False


def die_with_parent(signum=signal.SIGTERM):
    """Linux: this process gets a signal when its parent ends.

    So nothing that was killed leaves orphans.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signum)  # PR_SET_PDEATHSIG


def last_written(folder, name):
    """Unix time at which a run last wrote its log or a new file into its folder, 0 before that."""
    places = (folder / "logs" / f"{name}.log", folder / "runs" / name)
    return max(place.stat().st_mtime if place.exists() else 0.0 for place in places)


class Worker:
    """A run and what is done about it.

    run: its entry in sweep.json; lock: held as long as any process of it lives.
    """

    def __init__(self, folder, name, sweep, lock):
        self.folder = folder
        self.name = name
        self.lock = lock
        self.run = sweep["runs"][name]
        self.retries = sweep["retries"]
        self.stall_s = 60 * sweep["stall_minutes"]
        self.dir = folder / "runs" / name
        self.log = folder / "logs" / f"{name}.log"
        self.job = read_job(folder, name)
        self.signals = []
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, lambda signum, _: self.signals.append(signum))

    def note(self, **changes):
        self.job |= changes
        try:
            write_job(self.folder, self.name, self.job)
        except OSError as error:  # a full disk: the run will find that out, too, or it passes
            print(f"can't write the state of {self.name}: {error}", file=sys.stderr)

    def attempt(self):
        """Begins the run or goes on with it, waits for its end.

        Returns its exit code and what is to be said of it.
        """
        checkpoint = self.dir / "checkpoint.pt"
        words = ["--resume", f"runs/{self.name}"] if checkpoint.exists() else self.run["words"]
        with open(self.log, "a") as log:
            process = subprocess.Popen(
                [sys.executable, self.run["script"], *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[self.lock.fileno()],
                # By then nobody is there to see whether it hangs
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )
        said = ""
        kill_at = None
        written = 0.0
        silent_s = 0.0  # grows only while this process itself runs
        while process.poll() is None:
            before, written = written, last_written(self.folder, self.name)
            silent_s = silent_s + POLL_S if written == before else 0.0
            if kill_at is None and (self.signals or silent_s > self.stall_s):
                said = "" if self.signals else f"nothing written for {self.stall_s / 60:g} minutes"
                kill_at = time.time() + (STOP_S if self.signals else STALLED_S)
                process.terminate()
                if self.signals:
                    # Already now: whoever stops it may soon kill this process, too
                    self.note(state="waiting")
            elif kill_at and time.time() > kill_at:
                process.kill()
            time.sleep(POLL_S)
        said = said or last_line(self.log) or "nothing printed"
        return process.returncode, f"{said} (exit code {process.returncode})"

    def wait(self, seconds):
        """Waits so long, or until a signal comes."""
        end = time.time() + seconds
        while time.time() < end and not self.signals:
            time.sleep(POLL_S)

    def work(self):
        """Attempts until the run is finished, has failed too often, or is to stop.

        Returns this process's exit code.
        """
        code = None
        if self.job["state"] == "running":  # by another, who is gone
            said = f"lost by {self.job['place']}"
            self.note(**count_failure(self.folder, self.name, self.job, said, lost=True))
        while not is_finished(self.dir):
            if self.job["failures"] > self.retries or code == 2:  # 2 is bad input, which stays bad
                self.note(state="failed")
                return 1
            place = f"{os.uname().nodename}, process {os.getpid()}"
            self.note(state="running", started=time.time(), place=place)
            code, said = self.attempt()
            returns, damage = read_evaluation(self.dir)
            if returns is not None and code == 0:
                break
            if code == 2 and BUSY in said:  # by a script on another machine, whose worker is lost
                code = None
                self.note(state="waiting", error=said)
                self.wait(BUSY_S)
            elif not self.signals:
                said = damage if code == 0 and damage else said
                self.note(**count_failure(self.folder, self.name, self.job, said))
            if self.signals:
                self.note(state="waiting", error="")
                return 128 + signal.SIGTERM
        self.note(state="finished", error="")
        return 0


def main():
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
    args = parser.parse_args()
    die_with_parent()
    if args.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, args.cores.split(",")))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    os.environ |= dict.fromkeys(names, args.threads)
    if args.env_from_stdin:
        os.environ |= json.load(sys.stdin)
    sweep = read_json(args.dir / "sweep.json")
    if args.name not in sweep.get("runs", {}):
        print(f"error: {args.dir / 'sweep.json'} has no run {args.name}", file=sys.stderr)
        sys.exit(1)
    lock = hold(args.dir / "jobs" / f"{args.name}.lock")
    if not lock:
        print(f"{args.name} is held by {read_job(args.dir, args.name)['place']}", file=sys.stderr)
        sys.exit(HELD)
    worker = Worker(args.dir, args.name, sweep, lock)
    code = worker.work()
    job = os.environ.get("SLURM_ARRAY_JOB_ID")
    # Its time limit is near: another follows; or it says why not
    if signal.SIGUSR1 in worker.signals and code and job:
        subprocess.run(["scontrol", "requeue", f"{job}_{os.environ['SLURM_ARRAY_TASK_ID']}"])
    sys.exit(code)


if __name__ == "__main__":
    main()
