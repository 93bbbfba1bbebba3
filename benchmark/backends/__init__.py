"""Where the runs of a sweep are done: a module for each --backend.

A module has a dataclass Flags, whose fields are the command line of benchmark.sweep, and a class
Backend. A backend executes `python -m benchmark.task` for each run; tasks look after everything
else, and may be started twice or killed at any moment. To add a backend, start from the nearest
module and name the new one in NAMES:

- local.py: processes of this machine. docker.py is the same with another command.
- slurm.py: jobs in a queue, which go on without the sweep.
- ray.py: tasks of a library.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import tyro

from benchmark import ROOT

NAMES = ("local", "docker", "slurm", "ray")


class BackendError(Exception):
    """Why a backend can't work, and what to do, in one sentence."""


@dataclass
class CommonFlags:
    """The flags that all backends have."""

    suite: tyro.conf.Positional[str]  # a suite's file, or its name under benchmark/suites/
    dir: Path | None = None  # folder of the sweep (default: sweeps/SUITE)
    backend: Literal[NAMES] = "local"  # where the runs are done; each has flags of its own
    workers: int | None = None  # runs at a time (default: as many as there is room for)
    cpus_per_run: int = 1  # cores of a run, and its OMP_NUM_THREADS
    gpus_per_run: float = 0  # GPUs of a run; 0.25: four share one, except on Slurm
    retries: int = 1  # how often a run that has failed is resumed
    retry_failed: bool = False  # try the runs that have failed once more
    status: bool = False  # show how far the runs are, and do nothing
    dry_run: bool = False  # show the commands, and do nothing

    def __post_init__(self):
        if self.cpus_per_run < 1 or not 0 <= self.gpus_per_run < math.inf or self.retries < 0:
            raise BackendError(
                "--cpus-per-run must be above 0, --gpus-per-run and --retries not below"
            )
        if self.workers is not None and self.workers < 1:
            raise BackendError("--workers must be above 0")


class Backend(Protocol):
    """What a sweep asks of a backend."""

    def __init__(self, flags, suite, folder, runs):
        """flags: its Flags; suite, folder: absolute paths; runs: {name: Run}.

        Raises BackendError where it isn't there or the runs don't fit.
        """

    def preview(self, name):
        """The command of a run, as words."""

    def start(self, names):
        """Takes runs; returns the set of those that it has taken. Raises BackendError."""

    def running(self):
        """Names of the runs that it has and that haven't ended."""

    def stop(self):
        """Lets the runs save and end, after Ctrl-C for example; returns what the user is told."""


def task_words(flags, suite, folder, name, python=sys.executable):
    """The command that does a run, as words."""
    words = [python, "-m", "benchmark.task", str(suite), name, "--dir", str(folder)]
    return [*words, "--retries", str(flags.retries)]


def environment(flags):
    """The variables of a run: where its modules are, its threads, its settings of W&B."""
    places = [os.getcwd(), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    wandb = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    path = ":".join(dict.fromkeys(map(os.path.abspath, places)))
    return {"PYTHONPATH": path, **dict.fromkeys(threads, str(flags.cpus_per_run)), **wandb}
