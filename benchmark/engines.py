"""Where the workers of a sweep run: as processes, in Docker containers, on Slurm or on Ray.

An engine has room() for so many more runs, and starts them. running() are the names of those that
it was given and that haven't ended: they wait in its queue or run. What becomes of a run, its
worker writes into the sweep's folder (benchmark/worker.py). stop() ends an engine's work on Ctrl-C
and SIGTERM; what it returns is told to the user. Before start comes open(); preview() says how a
run's worker is started. What may pass, such as a full disk or queue, start() raises as OSError.
runs: {name: its entry in sweep.json}; args: the flags of benchmark.sweep.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from benchmark.worker import STOP_S, die_with_parent, read_json, write_json

ROOT = Path(__file__).resolve().parent.parent


def parse_bytes(text):
    """8G -> 8 * 2**30"""
    return int(text[:-1]) * 2 ** {"K": 10, "M": 20, "G": 30, "T": 40}[text[-1]]


class EngineError(Exception):
    """Why an engine can't work, and what to do, in one sentence."""


def usable_cores():
    """The cores that this process may use, as numbers."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count()))
    )


def usable_gpus():
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in visible.split(",") if gpu and gpu != "-1"]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return [
        str(i) for i in range(sum(line.startswith("GPU") for line in listed.stdout.splitlines()))
    ]


def module_places():
    """The folders where a run's processes find benchmark/ and the user's own modules."""
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    places = [os.getcwd(), str(ROOT), *own]
    return list(dict.fromkeys(map(os.path.abspath, places)))


def python_path():
    return os.pathsep.join(module_places())


def wandb_variables():
    return {key: x for key, x in os.environ.items() if key.startswith("WANDB_")}


class Local:
    """A process a run, on cores (and GPUs) of its own, as long as this process lives."""

    stops_are_final = False  # whether somebody who stops a run there means it

    def __init__(self, folder, runs, args):
        cores = usable_cores()
        gpus = usable_gpus() if args.gpus_per_run else []
        self.folder = folder
        self.args = args
        self.processes = {}
        workers = args.workers or max(1, len(cores) // args.cpus_per_run)
        if workers * args.cpus_per_run > len(cores):
            wanted = f"{workers} workers with {args.cpus_per_run} cores each"
            raise EngineError(f"{wanted} don't fit on {len(cores)} cores")
        shares = int(1 / args.gpus_per_run + 1e-9) if 0 < args.gpus_per_run < 1 else 1
        whole = max(1, int(args.gpus_per_run))
        places = [
            gpus[i : i + whole]
            for _ in range(shares)
            for i in range(0, len(gpus) - whole + 1, whole)
        ]
        if args.gpus_per_run and not args.workers:
            workers = min(workers, len(places)) or 1
        if args.gpus_per_run and workers > len(places):
            wanted = f"{workers} workers with {args.gpus_per_run:g} GPUs each"
            raise EngineError(f"{wanted} don't fit on {len(gpus)} GPUs")
        self.free = deque()
        for i in range(workers):
            own_cores = cores[i * args.cpus_per_run : (i + 1) * args.cpus_per_run]
            self.free.append((own_cores, places[i] if places else []))

    def __str__(self):
        idle = ""
        if usable_gpus() and not self.args.gpus_per_run:
            idle = f" ({len(usable_gpus())} GPUs stay unused: --gpus-per-run)"
        return f"{len(self.free) + len(self.processes)} at a time{idle}"

    def command(self, name, cores, gpus):
        """The words that start a run's worker."""
        words = [sys.executable, "-m", "benchmark.worker", str(self.folder), name]
        words += ["--threads", str(len(cores))]
        return [*words, "--cores", ",".join(map(str, cores))]

    def environment(self, gpus):
        return os.environ | {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}

    def open(self):
        pass

    def preview(self, names):
        return shlex.join(self.command(names[0], *self.free[0]))

    def room(self):
        return len(self.free)

    def start(self, names):
        for name in names:
            cores, gpus = self.free[0]
            with open(self.folder / "logs" / f"{name}.log", "a") as log:
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
            self.begin(process)

    def begin(self, process):
        """Closes the pipe to a worker, after what it is to be told."""
        process.stdin.close()

    def running(self):
        for name, (process, place) in list(self.processes.items()):
            if process.poll() is not None:
                del self.processes[name]
                self.free.append(place)
        return set(self.processes)

    def stop(self):
        for process, _ in self.processes.values():
            process.terminate()
        end = time.time() + STOP_S + 10  # after STOP_S a worker kills its run
        while self.running() and time.time() < end:
            time.sleep(0.1)
        for process, _ in self.processes.values():
            process.kill()
        return "stopped; the same command goes on"


class Docker(Local):
    """A container a run, of an image with what the scripts need.

    Scripts, modules and the sweep's folder are those of this machine, under their own paths. Its
    `docker run` stays attached, and passes on signals and the exit code.
    """

    def __init__(self, folder, runs, args):
        super().__init__(folder, runs, args)
        needed = {str(Path(run["script"]).parent) for run in runs.values()}
        for run in runs.values():
            for flag, value in zip(run["words"], run["words"][1:]):
                if flag == "--init-from":
                    needed.add(value)
        self.needed = sorted(needed)

    def open(self):
        image = self.args.image
        if not shutil.which("docker"):
            raise EngineError(
                "there is no command docker: install Docker "
                "(https://docs.docker.com/engine/install/)"
            )
        inspect = ["docker", "image", "inspect", image]
        found = subprocess.run(inspect, capture_output=True, text=True)
        if found.returncode:
            said = " ".join(found.stderr.split())
            hint = "is Docker running?"
            if "No such image" in said:
                hint = f"`docker build -t {image} {ROOT}` makes it"
            raise EngineError(f"can't use the image {image} ({said}): {hint}")
        if "/" in module_places():
            raise EngineError(
                "a container can't have / as the folder of modules: start the sweep in another "
                "folder"
            )
        (self.folder / "cache").mkdir(exist_ok=True)

    def command(self, name, cores, gpus):
        cache = self.folder / "cache"  # of compiled functions
        # Docker refuses to mount what isn't there
        modules = filter(os.path.exists, module_places())
        places = dict.fromkeys([*modules, *self.needed], ",readonly") | {str(self.folder): ""}
        words = ["docker", "run", "--rm", "--interactive", "--label", f"plainrl={name}"]
        words += ["--stop-timeout", str(STOP_S + 10), "--user", f"{os.getuid()}:{os.getgid()}"]
        words += ["--cpuset-cpus", ",".join(map(str, cores)), "--workdir", str(Path.cwd())]
        words += ["--env", f"PYTHONPATH={python_path()}"]
        words += ["--env", f"TORCHINDUCTOR_CACHE_DIR={cache}"]
        for place, mode in places.items():
            words += ["--mount", f"type=bind,source={place},target={place}{mode}"]
        words += ["--memory", self.args.memory_per_run] if self.args.memory_per_run else []
        words += ["--gpus", f'"device={",".join(gpus)}"'] if gpus else []
        words += [*self.args.engine_args, self.args.image, "-m", "benchmark.worker"]
        return [*words, str(self.folder), name, "--threads", str(len(cores)), "--env-from-stdin"]

    def environment(self, gpus):
        return None

    def begin(self, process):
        """Sends W&B's variables through a pipe: Docker would write those of --env to its disk."""
        variables = json.dumps(wandb_variables()).encode()
        # That docker has failed shows soon enough
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(variables)


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
#SBATCH --output={folder}/logs/slurm-%A_%a.log
{options}
runs=({names})
name=${{runs[$SLURM_ARRAY_TASK_ID]}}
cd {cwd}
export PYTHONPATH={path}
exec >> {folder}/logs/"$name".log 2>&1
exec {python} -m benchmark.worker {folder} "$name" --threads {cpus}
"""


class Slurm:
    """An array job.

    Its tasks go on without this process, which only watches them and submits again what got lost.
    """

    stops_are_final = True  # by scancel

    def __init__(self, folder, runs, args):
        self.folder = folder
        self.args = args
        if args.gpus_per_run % 1:
            raise EngineError(
                "--gpus-per-run must be a whole number: Slurm's runs don't share GPUs"
            )
        # minutes, minutes:seconds or hours:minutes:seconds; with days it is long
        parts = (args.time or "-").split(":")
        if all(part.isdigit() for part in parts):
            units = (3600, 60, 1)[len(parts) != 3 :]
            seconds = sum(int(part) * unit for part, unit in zip(parts, units))
            if seconds < 300:
                raise EngineError(
                    f"--time {args.time} is too short: two minutes before its limit a run is saved "
                    "and put back into the queue, so give five minutes or more"
                )
        self.arrays = read_json(folder / "slurm.json")  # {job's id: names of its tasks}
        self.tasks = None
        self.asked = 0.0
        self.refused = 0.0

    def __str__(self):
        return f"{self.args.workers or 'as many as the cluster has room for'} at a time"

    def open(self):
        if not shutil.which("sbatch"):
            raise EngineError(
                "there is no command sbatch: start the sweep on a machine that submits jobs to "
                "Slurm"
            )

    def preview(self, names):
        gpus = int(self.args.gpus_per_run)
        options = {
            "partition": self.args.partition,
            "account": self.args.account,
            "time": self.args.time,
            "mem": self.args.memory_per_run,
            "gres": f"gpu:{gpus}" if gpus else "",
        }
        lines = [f"#SBATCH --{key}={value}\n" for key, value in options.items() if value]
        lines += [f"#SBATCH {shlex.quote(word)}\n" for word in self.args.engine_args]
        # The limit is for an array: this one comes after those in the queue
        if self.args.workers and self.tasks:
            lines += ["#SBATCH --dependency=singleton\n"]
        return SBATCH.format(
            job=shlex.quote(f"plainrl-{self.folder.name}"),
            last=len(names) - 1,
            limit=f"%{self.args.workers}" if self.args.workers else "",
            cpus=self.args.cpus_per_run,
            folder=shlex.quote(str(self.folder)),
            options="".join(lines),
            names=shlex.join(names),
            cwd=shlex.quote(os.getcwd()),
            path=shlex.quote(python_path()),
            python=shlex.quote(sys.executable),
        )

    def room(self):
        """1,000 tasks an array, Slurm's MaxArraySize where nobody has changed it.

        There is no room for a minute after a refusal.
        """
        return 1000 if time.time() - self.refused > 60 else 0

    def start(self, names):
        file = self.folder / "sweep.sbatch"
        file.write_text(self.preview(names))
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
        if done.returncode:
            said = f"sbatch refused {file}: {' '.join(done.stderr.split())}"
            if not self.arrays:
                raise EngineError(said)
            self.refused = time.time()  # a queue that is full, or a controller that is down
            raise OSError(said)
        self.arrays[done.stdout.strip().split(";")[0]] = names
        self.tasks |= set(names)
        write_json(self.folder / "slurm.json", self.arrays)

    def running(self):
        """Asks Slurm every 5 s; as long as it doesn't answer, what it said last holds."""
        if time.time() - self.asked > 5:
            self.asked = time.time()
            asked = subprocess.run(
                ["squeue", "--noheader", "--array", "--me", "--format=%F %K"],
                capture_output=True,
                text=True,
            )
            if asked.returncode == 0:
                lines = [line.split() for line in asked.stdout.splitlines()]
                self.tasks = {
                    self.arrays[job][int(task)] for job, task in lines if job in self.arrays
                }
            elif self.tasks is None:
                raise EngineError(f"Slurm doesn't answer ({asked.stderr.strip()}): try again later")
        return set(self.tasks)

    def stop(self):
        jobs = " ".join(self.arrays)
        return (
            f"the runs go on in Slurm's job {jobs}: `scancel {jobs}` stops them, the same command "
            "watches them again"
        )


class Ray:
    """A task a run, on this machine or a cluster that sees its files under the same paths."""

    stops_are_final = False

    def __init__(self, folder, runs, args):
        self.folder = folder
        self.args = args
        self.refs = {}

    def __str__(self):
        return f"{self.args.workers or 'as many as the cluster has room for'} at a time"

    def command(self, name):
        words = [sys.executable, "-m", "benchmark.worker", str(self.folder), name]
        return [*words, "--threads", str(self.args.cpus_per_run)]

    def preview(self, names):
        return shlex.join(self.command(names[0]))

    def room(self):
        return self.args.workers - len(self.refs) if self.args.workers else sys.maxsize

    def open(self):
        """Joins the cluster at --ray-address, or makes one of this machine's cores and GPUs."""
        try:
            import ray
        except ImportError:
            raise EngineError(
                "Ray isn't installed: `pip install -r requirements-sweep.txt`"
            ) from None
        self.ray = ray
        where = {
            "address": "local",
            "num_cpus": len(usable_cores()),
            "num_gpus": len(usable_gpus()),
            "include_dashboard": False,
        }
        where = {"address": self.args.ray_address} if self.args.ray_address else where
        try:
            if found := re.fullmatch(r"(?:ray://)?(.+):(\d+)", self.args.ray_address or ""):
                place = found[1], int(found[2])
                socket.create_connection(place, timeout=10).close()  # Ray itself tries for minutes
            ray.init(log_to_driver=False, logging_level="error", **where)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            raise EngineError(
                f"can't reach a Ray cluster at {self.args.ray_address}: {error}"
            ) from None
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(
            node.get("CPU", 0) >= self.args.cpus_per_run
            and node.get("GPU", 0) >= self.args.gpus_per_run
            for node in nodes
        ):
            print(
                f"no node of the cluster has {self.args.cpus_per_run} cores and "
                f"{self.args.gpus_per_run:g} GPUs now: the runs wait for one"
            )

        def work(words, env, log):  # nested, so that it travels to the nodes by value
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

        needs = {"num_cpus": self.args.cpus_per_run, "num_gpus": self.args.gpus_per_run}
        if self.args.memory_per_run:
            needs["memory"] = parse_bytes(self.args.memory_per_run)
        self.work = ray.remote(work).options(max_retries=0, **needs)

    def start(self, names):
        env = {"PYTHONPATH": python_path()} | wandb_variables()
        for name in names:
            log = str(self.folder / "logs" / f"{name}.log")
            self.refs[name] = self.work.remote(self.command(name), env, log)

    def running(self):
        """A lost node ends its tasks as an error does."""
        if self.refs:
            done, _ = self.ray.wait(list(self.refs.values()), num_returns=len(self.refs), timeout=0)
            self.refs = {name: ref for name, ref in self.refs.items() if ref not in done}
        return set(self.refs)

    def stop(self):
        for ref in self.refs.values():
            self.ray.cancel(ref)
        end = time.time() + STOP_S + 10
        while self.running() and time.time() < end:
            time.sleep(0.1)
        return "stopped; the same command goes on"


ENGINES = {"local": Local, "docker": Docker, "slurm": Slurm, "ray": Ray}
