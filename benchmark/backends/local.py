"""Runs as processes of this machine, each on cores and GPUs of its own."""

import math
import os
import shutil
import signal
import subprocess
import time
from collections import Counter, deque
from dataclasses import dataclass

from benchmark.backends import BackendError, CommonFlags, environment, task_words
from benchmark.task import BAD_INPUT, FAILED, FINISHED, STOPPED, die_with_parent

ENDS = (FINISHED, FAILED, BAD_INPUT, STOPPED)  # exit codes after which a run isn't started again
STOP_S = 100  # s until tasks that were asked to stop are killed


@dataclass
class Flags(CommonFlags):
    """Runs of a suite as processes of this machine."""


def usable_cores():
    """The cores that this process may use, as numbers."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


def usable_gpus():
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return [str(i) for i, _ in enumerate(listed.stdout.splitlines())]


def places_of(flags):
    """This machine's cores and GPUs as places of runs: [(cores, GPUs)]. Raises BackendError."""
    cores = usable_cores()
    gpus = usable_gpus()
    gpus_per_run = math.ceil(flags.gpus_per_run)
    if 0 < flags.gpus_per_run < 1:  # runs share a GPU
        gpus = gpus * int(1 / flags.gpus_per_run)
    most = len(cores) // flags.cpus_per_run
    if gpus_per_run:
        most = min(most, len(gpus) // gpus_per_run)
    workers = flags.workers or max(1, most)
    if workers > most:
        raise BackendError(
            f"{workers} runs with {flags.cpus_per_run} cores and {flags.gpus_per_run:g} GPUs each "
            f"don't fit on {len(cores)} cores and {len(usable_gpus())} GPUs"
        )
    places = []
    for i in range(workers):
        own_cores = cores[i * flags.cpus_per_run : (i + 1) * flags.cpus_per_run]
        places.append((own_cores, gpus[i * gpus_per_run : (i + 1) * gpus_per_run]))
    return places


class Backend:
    """A process a run.

    waiting: names in their order; free: places that no run has; processes: {name: (process, its
    place)}; starts: how often each was started.
    """

    def __init__(self, flags, suite, folder, runs):
        self.flags = flags
        self.suite = suite
        self.folder = folder
        self.waiting = deque()
        self.free = deque(places_of(flags))
        self.processes = {}
        self.starts = Counter()

    def preview(self, name):
        return self.command(name, *self.free[0])

    def command(self, name, cores, gpus):
        """The words that do a run on these cores and GPUs."""
        return task_words(self.flags, self.suite, self.folder, name)

    def start(self, names):
        self.waiting += names
        return set(names)

    def running(self):
        """Starts others in the places of those that have ended."""
        for name, (process, place) in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[name]
                self.free.append(place)
                lost = process.returncode not in ENDS  # killed: not by its own fault
                if lost and self.starts[name] <= self.flags.retries:
                    self.waiting.append(name)
        while self.waiting and self.free:
            self.begin(self.waiting.popleft(), self.free.popleft())
        return set(self.processes)

    def begin(self, name, place):
        """Starts a run's task in a place."""
        cores, gpus = place

        def prepare():
            die_with_parent(signal.SIGTERM)
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cores)

        gpu = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        with open(self.folder / "logs" / f"{name}.log", "a") as log:
            process = subprocess.Popen(
                self.command(name, cores, gpus),
                env=os.environ | environment(self.flags) | gpu,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self.processes[name] = (process, place)
        self.starts[name] += 1

    def stop(self):
        for process, _ in self.processes.values():
            process.terminate()
        end = time.time() + STOP_S
        for process, _ in self.processes.values():
            try:
                process.wait(max(0, end - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
        return "stopped; the same command goes on"
