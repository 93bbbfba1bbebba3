"""Runs as tasks of Ray, here or on a cluster that sees this machine's files under their paths."""

import os
import subprocess
import time
from dataclasses import dataclass

from benchmark.backends import BackendError, CommonFlags, environment, task_words
from benchmark.backends.local import STOP_S, usable_cores, usable_gpus

LOST = 3  # nodes that a run may lose, beside --retries


@dataclass
class Flags(CommonFlags):
    """Runs of a suite as tasks of Ray."""

    ray_address: str | None = None  # the cluster's address (default: this machine alone)
    memory_per_run: int | None = None  # memory of a run, in bytes


def make_work():
    """The function that a task of Ray runs.

    Nested, so that Ray sends it by value: a node needs nothing of this repository for it.
    """

    def work(words, env, log):
        """words: the command; env: added to the node's variables; log: a file's path."""
        with open(log, "a") as file:
            process = subprocess.Popen(
                words, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        try:
            while process.poll() is None:  # ray.cancel interrupts between two lines of Python
                time.sleep(0.2)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()

    return work


class Backend:
    """A task of Ray a run. refs: {name: Ray's reference to its task}."""

    def __init__(self, flags, suite, folder, runs):
        self.flags = flags
        self.suite = suite
        self.folder = folder
        self.waiting = []
        self.refs = {}
        if flags.dry_run:
            return
        try:
            import ray
        except ImportError:
            raise BackendError("Ray isn't installed: `pip install -r requirements.txt`") from None
        where = {"address": flags.ray_address}
        if not flags.ray_address:
            where = {"num_cpus": len(usable_cores()), "num_gpus": len(usable_gpus())}
        try:
            ray.init(log_to_driver=False, logging_level="error", include_dashboard=False, **where)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BackendError(f"can't reach a Ray at {flags.ray_address}: {error}") from None
        self.ray = ray
        self.task = ray.remote(make_work()).options(
            num_cpus=flags.cpus_per_run,
            num_gpus=flags.gpus_per_run,
            memory=flags.memory_per_run,
            max_retries=flags.retries + LOST,
        )

    def preview(self, name):
        return task_words(self.flags, self.suite, self.folder, name)

    def start(self, names):
        self.waiting += names
        return set(names)

    def running(self):
        """Gives Ray as many as --workers says."""
        if self.refs:
            refs = list(self.refs.values())
            done, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
            self.refs = {name: ref for name, ref in self.refs.items() if ref not in done}
        while self.waiting and len(self.refs) < (self.flags.workers or len(self.refs) + 1):
            name = self.waiting.pop(0)
            log = str(self.folder / "logs" / f"{name}.log")
            self.refs[name] = self.task.remote(self.preview(name), environment(self.flags), log)
        return set(self.refs)

    def stop(self):
        for ref in self.refs.values():
            self.ray.cancel(ref)
        self.ray.wait(list(self.refs.values()), num_returns=len(self.refs), timeout=STOP_S)
        return "stopped; the same command goes on"
