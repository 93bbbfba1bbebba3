"""Runs as processes of this machine, each on cores and GPUs of its own."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass

from benchmark.engines import GONE_S, EngineError, Flags, ask, python_path, worker_command
from benchmark.worker import die_with_parent


@dataclass
class LocalFlags(Flags):
    """The flags of --backend local."""


def usable_cores():
    """The cores that this process may use, as numbers."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


def usable_gpus():
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu and gpu != "-1"]
    if not shutil.which("nvidia-smi"):
        return []
    try:
        listed = ask(["nvidia-smi", "--list-gpus"])
    except OSError as error:
        print(f"no GPUs: {error}", file=sys.stderr)
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU")]
    return [str(i) for i in range(len(lines))]


def shares_of_gpus(gpus, gpus_per_run):
    """The GPUs of each run that there is room for: a list of lists of GPUs.

    Where a GPU is shared, the first runs get one each, then it is shared.
    """
    if gpus_per_run < 1:
        times = int(1 / gpus_per_run + 1e-9)  # 0.333333333 is a third, too
        return [[gpu] for gpu in gpus] * times
    number = int(gpus_per_run)
    starts = range(0, len(gpus) - number + 1, number)
    return [gpus[i : i + number] for i in starts]


def divide(flags):
    """This machine's cores and GPUs as places of runs: a list of (cores, GPUs), both lists.

    Raises EngineError where the workers that the flags ask for don't fit.
    """
    cores = usable_cores()
    workers = flags.workers or max(1, len(cores) // flags.cpus_per_run)
    if workers * flags.cpus_per_run > len(cores):
        wanted = f"{workers} workers with {flags.cpus_per_run} cores each"
        raise EngineError(f"{wanted} don't fit on {len(cores)} cores")
    shares = [[]] * workers
    if flags.gpus_per_run:
        gpus = usable_gpus()
        shares = shares_of_gpus(gpus, flags.gpus_per_run)
        if not flags.workers:
            workers = max(1, min(workers, len(shares)))
        if workers > len(shares):
            wanted = f"{workers} workers with {flags.gpus_per_run:g} GPUs each"
            raise EngineError(f"{wanted} don't fit on {len(gpus)} GPUs")
    places = []
    for i in range(workers):
        own_cores = cores[i * flags.cpus_per_run : (i + 1) * flags.cpus_per_run]
        places.append((own_cores, shares[i]))
    return places


class Local:
    """A process a run, as long as this process lives.

    free: the places (cores, GPUs) that no run has; processes: {name: (process, its place)}.
    """

    stops_are_final = False
    several_nodes = False

    def __init__(self, store, runs, flags):
        self.store = store
        self.flags = flags
        self.free = deque(divide(flags))
        self.processes = {}

    def __str__(self):
        number = f"{len(self.free) + len(self.processes)} at a time"
        gpus = usable_gpus()
        if gpus and not self.flags.gpus_per_run:
            return f"{number} ({len(gpus)} GPUs stay unused: --gpus-per-run)"
        return number

    def open(self):
        pass

    def command(self, name, cores, gpus):
        """The words that start a run's worker, on these cores.

        Its GPUs are in the environment() here; a container's are in its command.
        """
        words = worker_command(self.store, name, len(cores))
        return [*words, "--cores", ",".join(map(str, cores))]

    def environment(self, gpus):
        """The environment of the command."""
        return os.environ | {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    def tell(self, process):
        """Closes the pipe to a worker, after what it is to be told."""
        process.stdin.close()

    def preview(self, names):
        return shlex.join(self.command(names[0], *self.free[0]))

    def room(self):
        return len(self.free)

    def start(self, names):
        for name in names:
            cores, gpus = self.free[0]
            with open(self.store.log_file(name), "a") as log:
                process = subprocess.Popen(
                    self.command(name, cores, gpus),
                    env=self.environment(gpus),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            # Not before it has begun: the disk may be full
            self.processes[name] = process, self.free.popleft()
            self.tell(process)

    def running(self):
        for name, (process, place) in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[name]
                self.free.append(place)
        return set(self.processes)

    def stop(self):
        for process, _ in self.processes.values():
            process.terminate()
        end = time.time() + GONE_S
        while self.running() and time.time() < end:
            time.sleep(0.1)
        for process, _ in self.processes.values():
            process.kill()
        return "stopped; the same command goes on"
