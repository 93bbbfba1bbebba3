"""Runs as tasks of Slurm's array jobs, on nodes that see the sweep's folder under its own path.

submitit writes and submits the jobs, and puts a run that reaches its time limit back into the
queue. The jobs go on without the sweep, which only watches.
"""

import contextlib
import hashlib
import importlib.util
import math
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass

import tyro

from benchmark.backends import BackendError, CommonFlags, environment, task_words
from benchmark.task import Task

ASK_S = 5  # s between two questions to squeue
SAVE_S = 120  # s before its time limit at which a run is saved
MOST_TIMES = 10**6  # that a run may reach its time limit
MOST_TASKS = 1000  # of an array: Slurm's MaxArraySize where nobody has changed it


@dataclass
class Flags(CommonFlags):
    """Runs of a suite as jobs of Slurm."""

    partition: str | None = None  # the partition that the jobs run in
    account: str | None = None  # the account that pays for the jobs
    minutes: int = 1440  # time limit of a job, after which the run goes on in another
    memory_per_run: str | None = None  # memory of a run, such as 8G
    # one more option of sbatch: --backend-arg=constraint=a100
    backend_arg: tyro.conf.UseAppendAction[tuple[str, ...]] = ()


class Work:
    """What a task of an array does, pickled by submitit, which calls checkpoint() at the limit."""

    def __init__(self, run, folder, retries):
        self.arguments = (run, folder, retries)
        self.task = None

    def __call__(self):
        self.task = Task(*self.arguments)
        return self.task.work()

    def checkpoint(self):
        """Lets the run save; returns what goes on with it after the time limit."""
        from submitit.helpers import DelayedSubmission

        self.task.stop()
        if self.task.process:
            # work() is in the middle of process.wait(), which can't be nested
            with contextlib.suppress(ChildProcessError):  # it has just ended
                os.waitid(os.P_PID, self.task.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Work(*self.arguments))


class Backend:
    """A job's task a run.

    names: of the runs that Slurm has, as long as it has any; asked: Unix time at which squeue was
    asked last.
    """

    def __init__(self, flags, suite, folder, runs):
        self.flags = flags
        self.suite = suite
        self.folder = folder
        self.runs = runs
        self.names = set()
        self.asked = 0.0
        # By this the jobs of the folder are found again
        name = re.sub(r"\W+", "-", folder.name, flags=re.ASCII)
        self.job_name = f"{name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        if flags.dry_run:
            return
        if not shutil.which("sbatch"):
            raise BackendError("there is no command sbatch: start this where jobs are submitted")
        if not importlib.util.find_spec("submitit"):
            raise BackendError("submitit isn't installed: `pip install -r requirements-sweep.txt`")

    def preview(self, name):
        return task_words(self.flags, self.suite, self.folder, name)

    def has_jobs(self):
        """Whether Slurm has jobs of this folder. Raises BackendError where it doesn't answer."""
        words = ["squeue", "--me", "--noheader", "--name", self.job_name]
        for _ in range(60):  # its controller may be away for a while
            asked = subprocess.run(words, capture_output=True, text=True)
            if not asked.returncode:
                return bool(asked.stdout.strip())
            time.sleep(ASK_S)
        raise BackendError(f"Slurm doesn't answer: {asked.stderr.strip()}")

    def start(self, names):
        """Submits the runs, but not beside jobs that an earlier sweep of the folder has left."""
        if self.has_jobs():
            print("watching the jobs that Slurm has of this folder", flush=True)
            self.names = set(names)
            return set()
        from submitit import SlurmExecutor

        executor = SlurmExecutor(self.folder / "slurm", max_num_timeout=MOST_TIMES)
        words = [word.partition("=") for word in self.flags.backend_arg]
        more = {option: value or True for option, _, value in words}
        # W&B's variables get there by themselves, and its key mustn't be written to a file
        variables = [x for x in environment(self.flags).items() if not x[0].startswith("WANDB_")]
        executor.update_parameters(
            job_name=self.job_name,
            time=self.flags.minutes,
            partition=self.flags.partition,
            account=self.flags.account,
            mem=self.flags.memory_per_run,
            cpus_per_task=self.flags.cpus_per_run,
            gpus_per_node=math.ceil(self.flags.gpus_per_run) or None,
            array_parallelism=self.flags.workers or MOST_TASKS,
            signal_delay_s=SAVE_S,
            setup=[f"export {name}={shlex.quote(value)}" for name, value in variables],
            additional_parameters={"requeue": True, **more},
        )
        taken = names[:MOST_TASKS]
        work = [Work(self.runs[name], self.folder, self.flags.retries) for name in taken]
        try:
            executor.submit_array(work)
        except RuntimeError as error:
            raise BackendError(f"sbatch refused the runs: {error}") from None
        print(f"what the jobs print is in {executor.folder}", flush=True)
        self.names = set(taken)
        return self.names

    def running(self):
        if time.time() - self.asked > ASK_S:
            if not self.has_jobs():
                self.names = set()
            self.asked = time.time()
        return self.names

    def stop(self):
        return f"the runs go on in Slurm: `scancel --name {self.job_name}` stops them"
