"""Does one run of a suite, whoever starts this and however often.

    python -m benchmark.task SUITE NAME [--dir DIR] [--retries N]

The run's folder, DIR/runs/NAME, says what is left to do: where there is an evaluation.json it is
finished, where there is a checkpoint.pt it is resumed, else it is started. NAME may be its number
in the suite, from 0, for the array jobs of a cluster. What it prints goes to DIR/logs/NAME.log. A
run that fails is tried again; one that fails for good leaves the reason in runs/NAME/failed.

Exit codes: 0 finished, 1 failed, 2 bad input, 75 another process has the run, 143 stopped.
"""

import ctypes
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from filelock import FileLock, Timeout

from benchmark.suite import SuiteError, read_suite, words_of

FINISHED, FAILED, BAD_INPUT = 0, 1, 2
HELD = 75  # EX_TEMPFAIL of sysexits.h
STOPPED = 128 + signal.SIGTERM
WAIT_S = 90  # s in which a process that is being stopped lets a run go
MAY_CHANGE = ("num_threads", "resume", "evaluate")  # flags in which a run and its suite may differ
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(signum):
    """Linux: this process gets a signal when its parent ends, so that a kill leaves no orphans."""
    if LIBC:
        LIBC.prctl(PR_SET_PDEATHSIG, signum)


def prepare_script():
    """In a script's process, before it begins."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it to all; the task is meant


def read_evaluation(run_dir):
    """The returns of a run's last evaluation, a list; None of a run that isn't finished."""
    try:
        return json.loads((run_dir / "evaluation.json").read_text())["returns"]
    except (OSError, ValueError, LookupError, TypeError):  # none, or half written
        return None


def state_of(run_dir):
    """What there is to do for a run: it is finished, failed, begun (to be resumed) or waiting."""
    if read_evaluation(run_dir) is not None:
        return "finished"
    if (run_dir / "failed").exists():
        return "failed"
    return "begun" if (run_dir / "checkpoint.pt").exists() else "waiting"


def changed_flags(run_dir, flags):
    """Names of those of flags that a run which is there was made with another value of.

    flags: as config.json has them. Raises SuiteError where that is damaged.
    """
    if not (run_dir / "checkpoint.pt").exists():
        return []
    try:
        made = json.loads((run_dir / "config.json").read_text())["args"]
        changed = [x for x in flags if x not in MAY_CHANGE and made.get(x, flags[x]) != flags[x]]
        # 64 in a suite is [64] in config.json: the same words
        return [x for x in changed if words_of({x: made[x]}) != words_of({x: flags[x]})]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise SuiteError(f"{run_dir}/config.json is damaged: remove {run_dir}") from None


def last_line(log, start=""):
    """The last line of a log, if it can be one that begins with start; "" where there is none."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.split("\n") if line.strip()]
    return ([line for line in lines if line.startswith(start)] or lines or [""])[-1].strip()


class Task:
    """A run of a suite in the folder of a sweep, and the process that does it."""

    def __init__(self, run, folder, retries):
        self.run = run
        self.folder = folder
        self.retries = retries
        self.run_dir = folder / "runs" / run.name
        self.log = folder / "logs" / f"{run.name}.log"
        self.process = None
        self.stopping = False

    def work(self):
        """Attempts until the run is finished, has failed or is to stop; returns an exit code."""
        try:
            with FileLock(self.log.with_suffix(".lock"), timeout=WAIT_S):
                return self.attempt_all()
        except Timeout:
            print(f"{self.run.name} is in the hands of another process", file=sys.stderr)
            return HELD

    def attempt_all(self):
        (self.run_dir / "failed").unlink(missing_ok=True)
        code = FINISHED
        for _ in range(1 + self.retries):
            if self.stopping or state_of(self.run_dir) == "finished":
                break
            code = self.attempt()
            if code in (BAD_INPUT, STOPPED):  # wrong however often it is tried, or meant to end
                break
        if state_of(self.run_dir) == "finished":
            return FINISHED
        if self.stopping or code == STOPPED:
            return STOPPED
        if self.run_dir.exists():
            # torchrun goes on after a script's last words
            said = last_line(self.log, "error: " if self.run.processes else "")
            (self.run_dir / "failed").write_text(f"{said} (exit code {code})\n")
        return BAD_INPUT if code == BAD_INPUT else FAILED

    def attempt(self):
        """Starts or resumes the script; returns its exit code. Raises Timeout."""
        words = self.run.words
        if self.run_dir.exists():
            # A script that a lost task has left behind, maybe on another machine, ends first
            with FileLock(self.run_dir / "lock", timeout=WAIT_S):
                pass
        if state_of(self.run_dir) == "begun":
            words = ["--resume", f"runs/{self.run.name}"]
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [*self.run.program, *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare_script,
            )
        if self.stopping:  # since before there was a process
            self.process.terminate()
        return self.process.wait()

    def stop(self):
        """Lets the script save and end. Its wait() goes on in attempt()."""
        self.stopping = True
        if self.process:
            self.process.terminate()


def find_run(suite, name):
    """The Run of that name, or number, in a suite's file. Raises SuiteError."""
    runs = read_suite(suite)
    if name.isdecimal() and int(name) < len(runs):
        return list(runs.values())[int(name)]
    if name not in runs:
        raise SuiteError(f"{suite} has no run {name}")
    return runs[name]


@dataclass
class Flags:
    """The flags of this command."""

    suite: tyro.conf.Positional[Path]  # a suite's file
    name: tyro.conf.Positional[str]  # name of the run, or its number in the suite, from 0
    dir: Path = Path(".")  # folder of the sweep, in which runs/ and logs/ are
    retries: int = 1  # how often a run that has failed is resumed


def main():
    flags = tyro.cli(Flags, prog="python -m benchmark.task", description=__doc__)
    die_with_parent(signal.SIGTERM)
    try:
        task = Task(find_run(flags.suite, flags.name), flags.dir.absolute(), max(0, flags.retries))
        changed = ", ".join(changed_flags(task.run_dir, task.run.flags))
        if changed:
            raise SuiteError(f"{task.run_dir} was made with another {changed}: use another --dir")
        task.log.parent.mkdir(parents=True, exist_ok=True)
    except (SuiteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: task.stop())
    sys.exit(task.work())


if __name__ == "__main__":
    main()
