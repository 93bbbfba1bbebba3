"""Runs as tasks of Ray, on this machine or on a cluster that sees its files under the same paths.

Ray is imported when the engine is opened, and needs to be installed only then.
"""

import re
import shlex
import socket
import sys
import time
from dataclasses import dataclass

from benchmark.engines import (
    GONE_S,
    EngineError,
    MemoryFlags,
    python_path,
    runs_at_a_time,
    wandb_variables,
    worker_command,
)
from benchmark.engines.local import usable_cores, usable_gpus

REACH_S = 10  # s that the head of a cluster has to take a connection
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass
class RayFlags(MemoryFlags):
    """The flags of --backend ray."""

    ray_address: str | None = None  # the cluster's address (None: this machine alone)


def parse_bytes(text):
    """8G -> 8 * 2**30"""
    return int(text[:-1]) * UNITS[text[-1]]


def make_task():
    """The function that a task runs on its node.

    Nested, so that Ray sends it there by value: a node needs nothing of this repository for it.
    """

    def work(words, env, log):
        """words: the worker's command; env: added to the node's variables; log: a file's path."""
        import os
        import subprocess
        import time

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


class Ray:
    """A task a run.

    ray: the module, and task: Ray's remote function that runs a worker, both None before open();
    refs: {name: Ray's reference to its task}.
    """

    stops_are_final = False

    def __init__(self, store, runs, flags):
        self.store = store
        self.flags = flags
        self.several_nodes = bool(flags.ray_address)
        self.ray = None
        self.task = None
        self.refs = {}

    def __str__(self):
        return runs_at_a_time(self.flags.workers)

    def preview(self, names):
        return shlex.join(worker_command(self.store, names[0], self.flags.cpus_per_run))

    def room(self):
        return self.flags.workers - len(self.refs) if self.flags.workers else sys.maxsize

    def open(self):
        """Joins the cluster at --ray-address, or makes one of this machine's cores and GPUs."""
        try:
            import ray
        except ImportError:
            raise EngineError(
                "Ray isn't installed: `pip install -r requirements-sweep.txt`"
            ) from None
        self.ray = ray
        self.connect()
        cpus = self.flags.cpus_per_run
        gpus = self.flags.gpus_per_run
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            print(
                f"no node of the cluster has {cpus} cores and {gpus:g} GPUs now: the runs wait for "
                "one"
            )
        needs = {"num_cpus": cpus, "num_gpus": gpus}
        if self.flags.memory_per_run:
            needs["memory"] = parse_bytes(self.flags.memory_per_run)
        self.task = ray.remote(max_retries=0, **needs)(make_task())

    def connect(self):
        """Raises EngineError where the cluster can't be reached."""
        address = self.flags.ray_address
        where = {"address": address}
        if not address:
            where = {
                "address": "local",
                "num_cpus": len(usable_cores()),
                "num_gpus": len(usable_gpus()),
                "include_dashboard": False,
            }
        try:
            found = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address or "")
            if found:
                place = (found[1], int(found[2]))
                # Asked first, since Ray itself tries for minutes
                socket.create_connection(place, timeout=REACH_S).close()
            self.ray.init(log_to_driver=False, logging_level="error", **where)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            raise EngineError(f"can't reach a Ray cluster at {address}: {error}") from None

    def start(self, names):
        env = {"PYTHONPATH": python_path()} | wandb_variables()
        for name in names:
            words = worker_command(self.store, name, self.flags.cpus_per_run)
            self.refs[name] = self.task.remote(words, env, str(self.store.log_file(name)))

    def running(self):
        """A lost node ends its tasks as an error does."""
        if self.refs:
            done, _ = self.ray.wait(list(self.refs.values()), num_returns=len(self.refs), timeout=0)
            self.refs = {name: ref for name, ref in self.refs.items() if ref not in done}
        return set(self.refs)

    def stop(self):
        for ref in self.refs.values():
            self.ray.cancel(ref)
        end = time.time() + GONE_S
        while self.running() and time.time() < end:
            time.sleep(0.1)
        return "stopped; the same command goes on"
