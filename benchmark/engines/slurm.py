"""Runs as tasks of Slurm's array jobs, on nodes that see the sweep's folder under its own path.

The tasks go on without this process, which only watches them and submits again what got lost.
slurm.json, in the sweep's folder, has the submitted jobs.
"""

import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import tyro

from benchmark.engines import EngineError, MemoryFlags, ask, check, python_path
from benchmark.store import read_json, write_json

ASK_S = 5  # s between two questions to squeue
REFUSED_S = 60  # s until the next sbatch after one that was refused
MOST_TASKS = 1000  # of an array: Slurm's MaxArraySize where nobody has changed it
SHORTEST_S = 300  # s of a time limit: two minutes before it a run is saved
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
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output={output}
{options}
runs=({names})
name=${{runs[$SLURM_ARRAY_TASK_ID]}}
export PYTHONPATH={path}
exec >> {folder}/logs/"$name".log 2>&1
exec {python} -m benchmark.worker {folder} "$name" --threads {cpus}
"""


@dataclass
class SlurmFlags(MemoryFlags):
    """The flags of --backend slurm."""

    partition: str | None = None  # the partition that the jobs run in
    account: str | None = None  # the account that pays for the jobs
    time: str | None = None  # time limit of a job, after which the run goes on in another
    # one more word for sbatch: --backend-arg=--constraint=a100
    backend_arg: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="WORD")
    ] = ()

    def __post_init__(self):
        super().__post_init__()
        check(
            self.gpus_per_run % 1 == 0,
            "--gpus-per-run must be a whole number: Slurm's runs don't share GPUs",
        )
        check(
            seconds_of(self.time) >= SHORTEST_S,
            f"--time {self.time} is too short: two minutes before its limit a run is saved and put "
            "back into the queue, so give five minutes or more",
        )


def seconds_of(limit):
    """A time limit in seconds; infinite if there is none, or one of days, which is long enough.

    limit: minutes, minutes:seconds or hours:minutes:seconds. sbatch says what is wrong with others.
    """
    parts = (limit or "").split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in parts):
        return float("inf")
    units = (3600, 60, 1) if len(parts) == 3 else (60, 1)
    return sum(int(part) * unit for part, unit in zip(parts, units))


def submitted_jobs(store):
    """{job's id: names of its tasks, in their order} of a sweep's folder."""
    return read_json(store.folder / "slurm.json")


class Slurm:
    """An array job, and others for what got lost.

    jobs: as submitted_jobs returns them; queued: the (job, task) that Slurm has, both strings as
    squeue prints them, None before its first answer; asked: when squeue was asked last; refused:
    when sbatch refused last, Unix times.
    """

    stops_are_final = True
    several_nodes = True

    def __init__(self, store, runs, flags):
        self.store = store
        self.flags = flags
        self.jobs = submitted_jobs(store)
        self.queued = None
        self.asked = 0.0
        self.refused = 0.0

    def __str__(self):
        return f"{self.flags.workers or 'as many as the cluster has room for'} at a time"

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
        """The array job of these runs, as a file for sbatch."""
        folder = self.store.folder
        output = str(folder / "logs").replace("%", "%%") + "/slurm-%A_%a.log"
        lines = [f"#SBATCH {shlex.quote(word)}\n" for word in self.options()]
        return SBATCH.format(
            job=shlex.quote(f"plainrl-{folder.name}"),
            last=len(names) - 1,
            limit=f"%{self.flags.workers}" if self.flags.workers else "",
            cpus=self.flags.cpus_per_run,
            output=shlex.quote(output),
            options="".join(lines),
            names=shlex.join(names),
            path=shlex.quote(python_path()),
            folder=shlex.quote(str(folder)),
            python=shlex.quote(sys.executable),
        )

    def room(self):
        """There is no room for a minute after a refusal."""
        return MOST_TASKS if time.time() - self.refused > REFUSED_S else 0

    def start(self, names):
        """Where sbatch submits and doesn't answer, the locks keep a run from two workers."""
        file = self.store.folder / "sweep.sbatch"
        file.write_text(self.preview(names))
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
        write_json(self.store.folder / "slurm.json", self.jobs)

    def running(self):
        """Asks Slurm every 5 s. Where it doesn't answer, what it said last holds for as long."""
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
        lines = [line.split() for line in asked.stdout.splitlines()]
        return {(job, task) for job, task in lines if job in self.jobs}

    def stop(self):
        jobs = " ".join(self.jobs)
        return (
            f"the runs go on in Slurm's job {jobs}: `scancel {jobs}` stops them, the same command "
            "watches them again"
        )
