"""Sweeps in a folder of their own, with a fast fake script that does what its env_id says."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmark.store import Store, read_evaluation
from benchmark.suite import read_suite
from benchmark.sweep import SweepFlags, make_plan, records_of

ROOT = Path(__file__).resolve().parents[2]

# Leaves what a real script leaves: config.json, episodes.csv (cut to the checkpoint when it is
# resumed), checkpoint.pt, evaluation.json and a locked folder; besides, what it got to know. It
# counts its steps up to 6, an episode and a checkpoint at each. Crash-v0 crashes at step 3,
# Hang-v0 hangs there, both only when they come from step 0; Never-v0 crashes at each start,
# BadInput-v0 ends with exit code 2. Started from step 0, Gate-v0 waits after step 2 for SIGTERM or
# a file "go" in the sweep's folder, Linger-v0 for the file alone, and so does Deaf-v0, which
# ignores SIGTERM. They wait for two minutes at most, so that no test leaves them behind.
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
    check_args(args)
    run = Path(args.resume or f"runs/{args.run_name}")
    run.mkdir(parents=True, exist_ok=True)
    lock = open(run / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    checkpoint, log = run / "checkpoint.pt", run / "episodes.csv"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if args.resume:
        args = Args(**json.loads((run / "config.json").read_text())["args"])
    else:
        args.num_threads = args.num_threads or 2  # as a script does that chooses them
        (run / "config.json").write_text(json.dumps({"args": asdict(args)}))
        log.write_text("global_step,wall_seconds,env,return,length,ended_by\\n")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[: step + 1]))
    first, stop = step, []

    def request_stop(*_):
        with open(run / "signals.txt", "a") as file:
            print("SIGTERM", file=file)
        if stop:  # as the real scripts
            os._exit(99)
        stop.append(1)

    deaf = args.env_id == "Deaf-v0"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else request_stop)
    with open(run / "starts.txt", "a") as file:
        cores, threads = sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]
        print(cores, threads, time.time(), file=file)
    (run / "environment.json").write_text(json.dumps(dict(os.environ)))
    (run / "words.json").write_text(json.dumps(sys.argv[1:]))
    (run / "pid").write_text(str(os.getpid()))
    if args.env_id == "BadInput-v0":
        print("error: a sentence on what is wrong")
        sys.exit(2)
    end = time.time() + 120
    while step < args.total_timesteps:
        if args.env_id == "Never-v0" or args.env_id == "Crash-v0" and step == 3 and first == 0:
            print("warming up")
            raise RuntimeError(f"[broken] at {step}")
        if args.env_id == "Hang-v0" and step == 3 and first == 0:
            time.sleep(60)
        while args.env_id in ("Gate-v0", "Linger-v0", "Deaf-v0") and step == 2 and first == 0:
            if Path("go").exists() or stop and args.env_id == "Gate-v0" or time.time() > end:
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
    (run / "evaluation.json").write_text(json.dumps({"returns": [args.seed, args.seed + 1.0]}))

if __name__ == "__main__":
    main()
"""


class Lab:
    """A suite in a folder, the sweep's folder "out" beside it, and their processes.

    Processes that a test leaves are killed at its end.
    """

    root = ROOT
    fake = FAKE

    def __init__(self, folder):
        self.folder = folder
        self.suite = folder / "suite.toml"
        self.script = folder / "fake.py"
        self.out = folder / "out"
        self.store = Store(self.out)
        self.processes = []

    def write_suite(self, text):
        """Writes the script and a suite with one table [[runs]] of this text; returns its path."""
        self.script.write_text(FAKE)
        self.suite.write_text(f'[[runs]]\nscript = "fake.py"\n{text}')
        return self.suite

    def make_suite(self, *env_ids, seeds=1):
        return self.write_suite(f"env_ids = {json.dumps(env_ids)}\nseeds = {seeds}")

    def make_folder(self, env_id, **settings):
        """The folder of a sweep with one run, as the sweep itself makes it; returns its name.

        settings: fields of SweepFlags, and needs_locks.
        """
        suite = read_suite(self.make_suite(env_id))
        self.store.make_folders()
        needs_locks = settings.pop("needs_locks", False)
        flags = SweepFlags("suite.toml", **{"retries": 0, **settings})
        self.store.write_plan(make_plan(suite, records_of(suite), flags, needs_locks))
        return suite[0].name

    def start(self, *words):
        """Starts any Python."""
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def start_sweep(self, *flags, patch="", folder=None):
        """Starts a sweep of the suite that looks at its runs many times a second.

        patch: code that is executed before.
        """
        code = f"import sys, time\nfrom benchmark import sweep\nsweep.POLL_S = 0.05\n{patch}"
        return self.start(
            "-c", f"{code}\nsweep.main()", self.suite, "--dir", folder or self.out, *flags
        )

    def run_sweep(self, *flags, **options):
        return self.finish(self.start_sweep(*flags, **options))

    def start_worker(self, name, patch=""):
        """Starts a worker that looks at its run many times a second, and waits for little."""
        code = f"""import os, time
from benchmark import worker
worker.POLL_S = 0.05
worker.BUSY_S = worker.STALLED_S = 0.1
{patch}
worker.main()"""
        return self.start("-c", code, self.out, name, "--threads", "1")

    def run_worker(self, name, **options):
        return self.finish(self.start_worker(name, **options))

    def finish(self, process):
        """A process's exit code and what it said."""
        said, wrong = process.communicate(timeout=60)
        return process.returncode, said + wrong

    def refused(self, process):
        """The one sentence with which a process ends before it has begun."""
        said, wrong = process.communicate(timeout=60)
        assert process.returncode == 2 and said == "", wrong
        assert wrong.startswith("error: ") and wrong.count("\n") == 1, wrong
        return wrong

    def wait_for(self, condition):
        """Waits until condition() is true; what isn't there yet is not."""
        end = time.time() + 60
        while time.time() < end:
            with contextlib.suppress(OSError, ValueError, KeyError, AssertionError):
                if condition():
                    return
            time.sleep(0.02)
        pytest.fail("waited in vain")

    def at_gate(self, *names):
        """Waits until the runs have reached their gate."""
        files = [self.store.run_dir(name) / "checkpoint.pt" for name in names]
        self.wait_for(lambda: all(file.read_text() == "2" for file in files))

    def go(self):
        """Opens the gate."""
        (self.out / "go").touch()

    def job(self, name):
        return self.store.job(name)

    def jobs(self):
        return {name: self.store.job(name) for name in self.store.plan()["runs"]}

    def steps(self, name):
        """All steps that a run has done, in their order."""
        return [int(line) for line in self.text(name, "steps.txt").split()]

    def starts(self, name):
        """How often a run's script has been started."""
        path = self.store.run_dir(name) / "starts.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def text(self, name, file):
        """A file in a run's folder."""
        return (self.store.run_dir(name) / file).read_text()

    def environment(self, name):
        return json.loads(self.text(name, "environment.json"))

    def mean(self, name):
        """The mean of a run's evaluation, None of one that isn't finished."""
        returns, _ = read_evaluation(self.store.run_dir(name))
        return returns and sum(returns) / len(returns)

    def assert_done_once(self, *names):
        """Finished, with no step lost and none done twice."""
        for name in names:
            assert self.steps(name) == [1, 2, 3, 4, 5, 6]
            assert self.job(name)["state"] == "finished"

    def pids(self, name):
        """Of a run's script and of its worker."""
        return int(self.text(name, "pid")), int(self.job(name)["place"].split()[-1])

    def kill_9(self, name):
        """Script and worker at once, as when a node fails: neither notices the other's end."""
        script_pid, worker_pid = self.pids(name)
        os.kill(worker_pid, signal.SIGSTOP)
        os.kill(script_pid, signal.SIGKILL)
        os.kill(worker_pid, signal.SIGKILL)

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def lab(tmp_path):
    if sys.platform != "linux":
        pytest.skip("sweeps run on Linux")
    lab = Lab(tmp_path)
    yield lab
    lab.close()
