"""Sweeps in a folder of their own, with a fast fake script that does what its env_id says."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark.task import read_evaluation

ROOT = Path(__file__).resolve().parents[2]

# Leaves what a real script leaves: config.json, episodes.csv (cut to the checkpoint when it is
# resumed), checkpoint.pt, evaluation.json and a locked folder; besides, what it got to know. It
# counts its steps up to 6, an episode and a checkpoint at each; the larger the first of its sizes,
# the better its evaluation. Crash-v0 crashes at step 3 if it
# comes from step 0; Never-v0 crashes at each start, BadInput-v0 ends with exit code 2 and
# Nothing-v0 before it has a folder. Started from step 0, Gate-v0 waits after step 2 for SIGTERM or
# a file "go" in the sweep's folder; two minutes at most, so that no test leaves it behind.
FAKE = """
import argparse, fcntl, json, os, signal, sys, time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

@dataclass
class Args:
    env_id: str = "Good-v0"
    seed: int = 1
    run_name: str = ""
    resume: str = ""
    num_threads: int = 0
    total_timesteps: int = 6
    fast: bool = True
    sizes: tuple = (1, 2)
    init_from: str = ""

def read_flags():
    parser = argparse.ArgumentParser()
    for field in fields(Args):
        flag = "--" + field.name.replace("_", "-")
        options = {"type": field.type}
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif field.type is tuple:
            options = {"nargs": "*", "type": int}
        parser.add_argument(flag, default=field.default, **options)
    return Args(**vars(parser.parse_args())), None

def check_args(args):
    if args.total_timesteps < 1:
        print("error: --total-timesteps must be above 0", file=sys.stderr)
        sys.exit(2)

def main():
    args, _ = read_flags()
    if args.env_id == "Nothing-v0":
        sys.exit("nothing came to be")
    run = Path(args.resume or f"runs/{args.run_name}")
    run.mkdir(parents=True, exist_ok=True)
    lock = open(run / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    checkpoint, log = run / "checkpoint.pt", run / "episodes.csv"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if args.resume:
        args = Args(**json.loads((run / "config.json").read_text())["args"])
    else:
        (run / "config.json").write_text(json.dumps({"args": asdict(args), "command": sys.argv}))
        log.write_text("global_step,wall_seconds,env,return,length,ended_by\\n")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[: step + 1]))
    first, stop = step, []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    with open(run / "starts.txt", "a") as file:
        cores, threads = sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")
        print(cores, threads, file=file)
    (run / "environment.json").write_text(json.dumps(dict(os.environ)))
    (run / "pid").write_text(f"{os.getpid()} {os.getppid()}")
    if args.env_id == "BadInput-v0":
        print("error: a sentence on what is wrong")
        sys.exit(2)
    end = time.time() + 120
    while step < args.total_timesteps:
        if args.env_id == "Never-v0" or args.env_id == "Crash-v0" and step == 3 and first == 0:
            print("warming up")
            raise RuntimeError(f"[broken] at {step}")
        while args.env_id == "Gate-v0" and step == 2 and first == 0:
            if Path("go").exists() or stop or time.time() > end:
                break
            time.sleep(0.02)
        step += 1
        with open(run / "steps.txt", "a") as file:
            print(step, file=file)
        with open(log, "a") as file:
            print(f"{step},{step * 0.08:.2f},0,-7.5,1,termination", file=file)
        time.sleep(0.02)
        checkpoint.write_text(str(step))
        if stop:
            print("stopped")
            sys.exit(143)
    score = args.seed + args.sizes[0] - 1
    (run / "evaluation.json").write_text(json.dumps({"returns": [score, score + 1.0]}))

if __name__ == "__main__":
    main()
"""


class Lab:
    """A suite in a folder, the sweep's folder "out" beside it, and their processes.

    Processes that a test leaves are killed at its end.
    """

    def __init__(self, folder):
        self.folder = folder
        self.suite = folder / "suite.toml"
        self.script = folder / "fake.py"
        self.out = folder / "out"
        self.processes = []

    def write_suite(self, text):
        """Writes the script and a suite with one table [[runs]] of this text; returns its path."""
        self.script.write_text(FAKE)
        self.suite.write_text(f'[[runs]]\nscript = "fake.py"\n{text}')
        return self.suite

    def make_suite(self, *env_ids, seeds=1):
        return self.write_suite(f"env_ids = {json.dumps(env_ids)}\nseeds = {seeds}")

    def start(self, *words, **env):
        """Starts python with these words."""
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def start_sweep(self, *flags, **env):
        return self.start("-m", "benchmark.sweep", self.suite, "--dir", self.out, *flags, **env)

    def run_sweep(self, *flags, **env):
        return self.finish(self.start_sweep(*flags, **env))

    def start_task(self, name, *flags):
        return self.start("-m", "benchmark.task", self.suite, name, "--dir", self.out, *flags)

    def run_task(self, name, *flags):
        return self.finish(self.start_task(name, *flags))

    def finish(self, process, timeout=120):
        """A process's exit code and what it said."""
        said, _ = process.communicate(timeout=timeout)
        return process.returncode, said

    def wait_for(self, condition):
        """Waits until condition() is true; what isn't there yet is not."""
        end = time.time() + 60
        while time.time() < end:
            try:
                if condition():
                    return
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        pytest.fail("waited in vain")

    def at_gate(self, *names):
        """Waits until the runs have reached their gate."""
        self.wait_for(lambda: all(self.text(name, "checkpoint.pt") == "2" for name in names))

    def go(self):
        """Opens the gate."""
        (self.out / "go").touch()

    def text(self, name, file):
        """A file in a run's folder."""
        return (self.out / "runs" / name / file).read_text()

    def log(self, name):
        return (self.out / "logs" / f"{name}.log").read_text()

    def starts(self, name):
        """How often a run's script has been started."""
        path = self.out / "runs" / name / "starts.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def environment(self, name):
        return json.loads(self.text(name, "environment.json"))

    def pids(self, name):
        """Of a run's script and of its task."""
        return map(int, self.text(name, "pid").split())

    def assert_done_once(self, *names):
        """Finished, with no step lost and none done twice."""
        for name in names:
            assert self.text(name, "steps.txt").split() == ["1", "2", "3", "4", "5", "6"]
            assert read_evaluation(self.out / "runs" / name)

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def lab(tmp_path):
    if sys.platform != "linux":
        pytest.skip("sweeps run on Linux")
    lab = Lab(tmp_path)
    yield lab
    lab.close()
