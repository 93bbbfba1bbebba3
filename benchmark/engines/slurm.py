"""Runs as tasks of Slurm's array jobs, on nodes that see the sweep's folder under its own path.

The tasks go on without this process, which only watches them and submits again what got lost.
The submitted jobs are in slurm.json, in the sweep's folder.
"""

import math
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass

from benchmark.engines import (
    EngineError,
    MemoryFlags,
    Words,
    ask,
    check,
    python_path,
    runs_at_a_time,
)
from benchmark.store import read_json, write_json

ASK_S = 5  # s between two questions to squeue
REFUSED_S = 60  # s until the next sbatch after one that was refused
MOST_TASKS = 1000  # of an array: Slurm's MaxArraySize where nobody has changed it
SAVE_S = 120  # s before its time limit at which a run is saved
SHORTEST_S = 300  # s of a time limit, so that a run gets further before it is saved again
SQUEUE = ["squeue", "--noheader", "--array", "--me", "--format=%F %K"]  # job and task
SBATCH = """\
#!/bin/bash
# One task a run. Slurm sends SIGUSR1 before the time limit and SIGTERM at a preemption: the run is
# saved and resumed.
#SBATCH --job-name={job}
#SBATCH --array=0-{last}{limit}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cpus}
#SBATCH --requeue
#SBATCH --signal=B:USR1@{save_s}
#SBATCH --open-mode=append
#SBATCH --output={output}
{options}
runs=({names})
name=${{runs[$SLURM_ARRAY_TASK_ID]}}
export PYTHONPATH={path}
exec >> {logs}/"$name".log 2>&1
exec {python} -m benchmark.worker {folder} "$name" --threads {cpus}
"""


@dataclass
class SlurmFlags(MemoryFlags):
    """The flags of --backend slurm."""

    partition: str | None = None  # the partition that the jobs run in
    account: str | None = None  # the account that pays for the jobs
    time: str | None = None  # time limit of a job, after which the run goes on in another
    # one more word for sbatch: --backend-arg=--constraint=a100
    backend_arg: Words = ()

    def __post_init__(self):
        super().__post_init__()
        check(
            self.gpus_per_run % 1 == 0,
            "--gpus-per-run must be a whole number: Slurm's runs don't share GPUs",
        )
        check(
            seconds_of(self.time) >= SHORTEST_S,
            f"--time {self.time} is too short: {SAVE_S // 60} minutes before its limit a run is "
            f"saved and put back into the queue, so give {SHORTEST_S // 60} minutes or more",
        )


def seconds_of(limit):
    """A time limit in seconds; infinite if there is none, or one of days, which is long enough.

    limit: minutes, minutes:seconds or hours:minutes:seconds; of 0, there is none. sbatch says what
    is wrong with others.
    """
    parts = (limit or "").split(":")
    if len(parts) > 3 or not all(part.isdecimal() for part in parts):
        return math.inf
    units = (3600, 60, 1) if len(parts) == 3 else (60, 1)
    return sum(int(part) * unit for part, unit in zip(parts, units)) or math.inf


def read_jobs(path):
    """The jobs in slurm.json: {job's id: names of its tasks}. Damaged ones are left out."""
    jobs = {}
    for job, names in read_json(path).items():
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            jobs[job] = names
    return jobs


class Slurm:
    """An array job, and others for what got lost.

    jobs: {job's id: names of its tasks, in their order}, as in slurm.json; queued: the (job, task)
    that Slurm has, both strings as squeue prints them, None before its first answer; asked: when
    squeue was asked last; refused: when sbatch refused last, Unix times.
    """

    stops_are_final = True
    several_nodes = True

    def __init__(self, store, runs, flags):
        self.store = store
        self.flags = flags
        self.jobs = read_jobs(store.slurm_jobs)
        self.queued = None
        self.asked = 0.0
        self.refused = 0.0

    def __str__(self):
        return runs_at_a_time(self.flags.workers)

    def open(self):
        if not shutil.which("sbatch"):
            raise EngineError(
                "there is no command sbatch: start the sweep on a machine that submits jobs to "
                "Slurm"
            )

    def options(self):
        """The options of sbatch that the flags make, as words."""
        gpus = int(self.flags.gpus_per_run)
        values = {
            "partition": self.flags.partition,
            "account": self.flags.account,
            "time": self.flags.time,
            "mem": self.flags.memory_per_run,
            "gres": f"gpu:{gpus}" if gpus else "",
        }
        words = [f"--{key}={value}" for key, value in values.items() if value]
        # The limit of --array is for one array: this one comes after those in the queue
        before = sorted({job for job, _ in self.queued or ()}, key=int)
        if self.flags.workers and before:
            words.append(f"--dependency=afterany:{':'.join(before)}")
        return [*words, *self.flags.backend_arg]

    def preview(self, names):
        return self.job_script(names)

    def job_script(self, names):
        """The array job of these runs, as a file for sbatch."""
        folder = self.store.folder
        logs = str(self.store.logs)
        output = logs.replace("%", "%%") + "/slurm-%A_%a.log"
        lines = [f"#SBATCH {shlex.quote(word)}\n" for word in self.options()]
        return SBATCH.format(
            job=shlex.quote(f"plainrl-{folder.name}"),
            last=len(names) - 1,
            limit=f"%{self.flags.workers}" if self.flags.workers else "",
            cpus=self.flags.cpus_per_run,
            save_s=SAVE_S,
            output=shlex.quote(output),
            options="".join(lines),
            names=shlex.join(names),
            path=shlex.quote(python_path()),
            logs=shlex.quote(logs),
            folder=shlex.quote(str(folder)),
            python=shlex.quote(sys.executable),
        )

    def room(self):
        """0 for a minute after a refusal."""
        return MOST_TASKS if time.time() - self.refused > REFUSED_S else 0

    def start(self, names):
        """Where sbatch submits and doesn't answer, the locks keep a run from two workers."""
        file = self.store.slurm_script
        file.write_text(self.job_script(names))
        try:
            done = ask(["sbatch", "--parsable", str(file)])
        except OSError:
            self.refused = time.time()
            raise
        if done.returncode:
            said = f"sbatch refused {file}: {' '.join(done.stderr.split())}"
            if not self.jobs:
                raise EngineError(said)
            self.refused = time.time()  # a queue that is full, or a controller that is down
            raise OSError(said)
        job = done.stdout.strip().split(";")[0]
        self.jobs[job] = names
        self.queued |= {(job, str(i)) for i in range(len(names))}
        write_json(self.store.slurm_jobs, self.jobs)

    def running(self):
        """Asks Slurm every ASK_S. Where it doesn't answer, its last answer holds for as long."""
        if time.time() - self.asked > ASK_S:
            try:
                self.queued = self.ask_for_tasks()
            finally:
                self.asked = time.time()
        names = set()
        for job, task in self.queued:
            names.add(self.jobs[job][int(task)])
        return names

    def ask_for_tasks(self):
        """The (job, task) of this sweep that Slurm has.

        Raises OSError where it doesn't answer, EngineError where it never has.
        """
        try:
            asked = ask(SQUEUE)
            if asked.returncode:
                raise OSError(f"Slurm doesn't answer ({' '.join(asked.stderr.split())})")
        except OSError as error:
            if self.queued is None:
                raise EngineError(f"{error}: try again later") from None
            raise
        # Lines of other jobs may have other words
        tasks = re.findall(r"^ *(\d+) +(\d+) *$", asked.stdout, re.MULTILINE | re.ASCII)
        return {(job, task) for job, task in tasks if int(task) < len(self.jobs.get(job, ()))}

    def stop(self):
        jobs = " ".join(self.jobs)
        return (
            f"the runs go on in Slurm's job {jobs}: `scancel {jobs}` stops them, the same command "
            "watches them again"
        )
