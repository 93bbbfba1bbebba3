"""Where the workers of a sweep run: an engine for each --backend.

local.py starts processes, docker.py containers, slurm.py array jobs, ray.py tasks. Each has a
dataclass of its flags, which the command line of benchmark.sweep is made of, and a class that is an
Engine. An engine is given the plan's runs and the sweep's folder (benchmark/store.py), and starts a
worker (benchmark/worker.py) for each run. The worker writes the run's state into the folder; the
engine only knows which workers are alive.

To add a backend:

- Write a module with a dataclass of flags, made from Flags or MemoryFlags, and a class with the
  methods of Engine, and name both in ENGINES. The command line, --help and the tests that all
  backends share follow from there.
- Start from the nearest class. Where a process of this machine lives as long as the worker, as
  `docker run` does, subclass Local and change its command. Where workers wait in a queue and
  outlive the sweep, read slurm.py. Where a library keeps the tasks, read ray.py.
- Name its files in the sweep's folder in Store. Where its jobs outlive the sweep, let leftovers()
  tell of them.
- If it ends workers, at a time limit for example, it must send SIGTERM a minute or more before: the
  run is saved, and the worker ends with code 143. The sweep then starts the run again, unless
  stops_are_final. With that, the queue must do it: see worker.requeue(), which knows Slurm only.
"""

import importlib
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Protocol

import tyro

from benchmark import ROOT
from benchmark.store import read_json
from benchmark.worker import ANSWER_S, STOP_S

# s until a worker that was asked to stop is gone: after STOP_S it kills its run
GONE_S = STOP_S + 10
SMALLEST_SHARE = 0.001  # of a GPU: less is a mistake
# A flag that may be given several times, each time with one word: --backend-arg=--network=host
Words = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="WORD")]
# A backend's module, its dataclass of flags and its class
ENGINES = {
    "local": ("benchmark.engines.local", "LocalFlags", "Local"),
    "docker": ("benchmark.engines.docker", "DockerFlags", "Docker"),
    "slurm": ("benchmark.engines.slurm", "SlurmFlags", "Slurm"),
    "ray": ("benchmark.engines.ray", "RayFlags", "Ray"),
}


def load(backend):
    """(dataclass of the flags, class) of a backend; only its own module is imported."""
    place, flags, engine = ENGINES[backend]
    module = importlib.import_module(place)
    return getattr(module, flags), getattr(module, engine)


class EngineError(Exception):
    """Why an engine can't work, and what to do, in one sentence."""


class Engine(Protocol):
    """What a sweep asks of a backend.

    stops_are_final: whether somebody who stops a run there means it, as with scancel; such a run
    isn't started again. several_nodes: whether workers may run on other machines than the sweep's,
    so that only the file system's locks keep two of them from one run.
    """

    stops_are_final: bool
    several_nodes: bool

    def __init__(self, store, runs, flags):
        """store: the sweep's folder; runs: {name: its record in the plan}; flags: its dataclass.

        Nothing is started or written. Raises EngineError where the runs don't fit.
        """

    def __str__(self):
        """How many runs there can be at a time, for the sweep's first line."""

    def open(self):
        """Called once, before the first start. Raises EngineError where the backend isn't there."""

    def preview(self, names):
        """What starts the workers of these runs, as text, for --dry-run, which doesn't open()."""

    def room(self):
        """How many more runs start() would take now."""

    def start(self, names):
        """Starts the workers of these runs, no more than there is room for.

        Raises OSError for what may pass, such as a full disk or queue: then running() tells which
        of them have been started. Raises EngineError for what won't pass.
        """

    def running(self):
        """The set of the names whose workers run, or wait in the backend's queue.

        They are among those that start() was given. With Slurm, they may also be of an earlier
        sweep of the folder. Raises OSError where the backend doesn't answer, which may pass.
        """

    def stop(self):
        """Ends the engine's work, after Ctrl-C for example; returns what the user is told."""


@dataclass
class Flags:
    """The flags that all backends have. Raises EngineError for a value that can't be."""

    workers: int | None = None  # runs at a time (None: as many as there is room for)
    cpus_per_run: int = 1  # cores of a run, and its threads
    gpus_per_run: float = 0  # GPUs of a run; 0.25: up to four share one

    def __post_init__(self):
        check(self.workers is None or self.workers >= 1, "--workers must be above 0")
        check(self.cpus_per_run >= 1, "--cpus-per-run must be above 0")
        check(0 <= self.gpus_per_run < math.inf, "--gpus-per-run must be 0 or above")
        check(
            self.gpus_per_run == 0 or self.gpus_per_run >= SMALLEST_SHARE,
            f"--gpus-per-run must be 0, or {SMALLEST_SHARE:g} or more",
        )
        check(
            self.gpus_per_run < 1 or self.gpus_per_run % 1 == 0,
            "--gpus-per-run must be a whole number, or below 1 for runs that share a GPU",
        )


@dataclass
class MemoryFlags(Flags):
    """The flags of backends that can limit a run's memory."""

    memory_per_run: str | None = None  # memory of a run, such as 8G

    def __post_init__(self):
        super().__post_init__()
        memory = self.memory_per_run
        check(
            memory is None or re.fullmatch(r"[1-9]\d*[KMGT]", memory),
            f"--memory-per-run {memory} must be a whole number with K, M, G or T",
        )


def check(condition, message):
    """Raises EngineError with this sentence unless the condition holds."""
    if not condition:
        raise EngineError(message)


def leftovers(store, backend):
    """A sentence on jobs that a sweep with another backend may have left for this folder, or "".

    Only Slurm's jobs outlive their sweep.
    """
    jobs = " ".join(read_json(store.slurm_jobs))
    if backend == "slurm" or not jobs:
        return ""
    return (
        f"Slurm may still have jobs {jobs} for this folder; `scancel {jobs}` removes those that "
        "wait."
    )


def runs_at_a_time(workers):
    """What Engine.__str__ says where a cluster decides; workers: as in Flags."""
    return f"{workers or 'as many as the cluster has room for'} at a time"


def worker_command(store, name, threads):
    """The words that start a run's worker."""
    words = [sys.executable, "-m", "benchmark.worker", str(store.folder), name]
    return [*words, "--threads", str(threads)]


def users_modules():
    """The folders of the user's PYTHONPATH, as absolute paths: runs run in the sweep's folder."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.abspath(place) for place in places if place]


def python_path():
    """The PYTHONPATH of a worker: the sweep's own working folder, benchmark/ and the user's."""
    places = [os.getcwd(), str(ROOT), *users_modules()]
    return os.pathsep.join(dict.fromkeys(places))


def wandb_variables():
    """The environment's settings of Weights & Biases, the key among them."""
    return {key: x for key, x in os.environ.items() if key.startswith("WANDB_")}


def ask(command):
    """A finished command with its output as text. Raises OSError where it doesn't answer in time.

    command: words.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} doesn't answer within {ANSWER_S} s") from None
