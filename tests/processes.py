"""Runs scripts as their user does, and reads what they leave.

Most runs are forks of one process, a Server, that has done the imports, which take longer than the
runs. A fork has the bits of a process of its own, and can be killed like one.
"""

import atexit
import contextlib
import csv
import gc
import importlib
import io
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from importlib.metadata import PathDistribution, distributions
from pathlib import Path

TESTS = Path(__file__).resolve().parent
RUN = Path("runs/run")  # of --run-name run
IMPORTS = ("ale_py", "cv2", "filelock", "gymnasium", "torch", "torch._dynamo", "tyro", "tqdm")
IMPORTS += ("torch.utils.tensorboard",)


def variables(cwd, **env):
    """The variables of a process: no login, no GPU, one thread, and the toys can be imported."""
    foreign = ("WANDB", "MUJOCO", "PYOPENGL", "TOY_", "PYTEST")
    inherited = {name: x for name, x in os.environ.items() if not name.startswith(foreign)}
    own = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "120",
        "HOME": str(cwd),
        "PYTHONPATH": str(TESTS),
    }
    return inherited | own | {name: str(value) for name, value in env.items()}


class Server:
    """A process that forks for every command line."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.started = 0
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=variables(self.folder.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, script, cwd, flags, **env):
        """Starts `python script flags` in the folder cwd; returns the Fork.

        env: variables, as TOY_FAULT.
        """
        Path(cwd).mkdir(parents=True, exist_ok=True)
        output = Path(self.folder.name, str(self.started))
        self.started += 1
        argv = [str(script), *shlex.split(flags)]
        env = variables(cwd, **env)
        pid = self.ask(cwd=str(cwd), argv=argv, env=env, output=str(output))
        return Fork(self, pid, argv, output)

    def run(self, script, cwd, flags, **env):
        """Runs `python script flags` to its end; returns a subprocess.CompletedProcess."""
        return self.start(script, cwd, flags, **env).wait()

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
        self.folder.cleanup()


class Fork:
    """A running command line."""

    def __init__(self, server, pid, argv, output):
        self.server = server
        self.pid = pid
        self.argv = argv
        self.output = output
        self.ended = False

    def wait(self):
        """Waits for the end, or for a SIGSTOP: then the returncode is None."""
        code = self.server.ask(wait=self.pid)
        self.ended = code is not None
        stdout, stderr = (self.output.with_suffix(x).read_text() for x in (".out", ".err"))
        return subprocess.CompletedProcess(self.argv, code, stdout, stderr)

    def send(self, signum):
        os.kill(self.pid, signum)

    def kill(self):
        """Ends it, if it still runs."""
        if not self.ended:
            self.send(signal.SIGKILL)
            self.wait()


def run_process(script, cwd, flags, python_flags="", stdin="", **env):
    """Runs `python python_flags script flags` in a process of its own, as a user does."""
    cwd.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, *shlex.split(python_flags), str(script), *shlex.split(flags)],
        cwd=cwd,
        env=variables(cwd, **env),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
    )


def load_checkpoint(run_dir, name="checkpoint.pt"):
    import torch

    return torch.load(run_dir / name, weights_only=True)


def edit_checkpoint(run_dir, name="checkpoint.pt", **parts):
    """Puts other parts in the place of a checkpoint's."""
    import torch

    torch.save(load_checkpoint(run_dir, name) | parts, run_dir / name)


def leaves(x, name=""):
    """Nested containers -> {path: value}, a tensor as its type, shape and bytes."""
    import torch

    if isinstance(x, torch.Tensor):
        return {name: (str(x.dtype), tuple(x.shape), x.contiguous().cpu().numpy().tobytes())}
    if isinstance(x, dict):
        items = x.items()
    elif isinstance(x, (list, tuple)):
        items = enumerate(x)
    else:
        return {name: x}
    found = {}
    for key, value in items:
        found |= leaves(value, f"{name}/{key}")
    return found


def episode_rows(run_dir):
    with open(run_dir / "episodes.csv", newline="") as file:
        return list(csv.DictReader(file))


def events(run_dir):
    """The scalars that TensorBoard shows, [(tag, step, value)] in the order they were logged.

    A file may begin by taking back what the files before it have from a step on.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = [list(LegacyEventFileLoader(str(path)).Load()) for path in run_dir.glob("events.*")]
    found = []
    for file in sorted(files, key=lambda file: file[0].wall_time):
        for event in file:
            if event.HasField("session_log"):
                found = [scalar for scalar in found if scalar[1] < event.step]
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
    return found


def scalars(run_dir, tag):
    """{step: value}"""
    return {step: value for name, step, value in events(run_dir) if name == tag}


def progress(run_dir):
    """How far a run has come by its checkpoint: iteration, global_step, and so on."""
    return load_checkpoint(run_dir)["run"]


def evaluation(run_dir):
    """The last one, as its file has it."""
    return json.loads((run_dir / "evaluation.json").read_text())


def returns(run_dir):
    """Those of the last evaluation."""
    return evaluation(run_dir)["returns"]


def outcome(run_dir):
    """{name: value} of all that must be the same for the same run: not times and flags."""
    results = {}
    for path in run_dir.glob("*.pt"):
        checkpoint = load_checkpoint(run_dir, path.name)
        for name in ("args", "machine", "script"):
            del checkpoint[name]
        for name in ("wall_seconds", "wandb_id"):
            del checkpoint["run"][name]
        results |= leaves(checkpoint, path.stem)
    for i, row in enumerate(episode_rows(run_dir)):
        results[f"episodes/{i}"] = row | {"wall_seconds": None}
    logged = [(tag, step, None if tag == "charts/SPS" else x) for tag, step, x in events(run_dir)]
    for i, scalar in enumerate(sorted(logged, key=repr)):
        results[f"events/{i}"] = scalar
    results["evaluation"] = evaluation(run_dir)
    return results


def differences(a, b):
    """Names of what two runs, folders or their outcomes, differ in."""
    a, b = (x if isinstance(x, dict) else outcome(x) for x in (a, b))
    return sorted(name for name in a.keys() | b.keys() if repr(a.get(name)) != repr(b.get(name)))


def contents(folder):
    """{path: bytes, or None for a folder} of all that a folder has, but for locks."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != "lock"
    }


def assert_fails(result, code, *words):
    """It ended with this code, no stack trace, and a sentence on stderr that has these words."""
    assert "Traceback" not in result.stdout + result.stderr, result.stderr
    assert result.returncode == code, result.stdout + result.stderr
    assert "error: " in result.stderr, result.stderr
    assert not [word for word in words if word.lower() not in result.stderr.lower()], result.stderr


def read_record(path):
    """The events that toys have appended to a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def serve():
    """Forks for every request on stdin, which asks to start or to wait."""
    for name in IMPORTS:
        importlib.import_module(name)
    # A run writes the versions of all packages into its config.json. To look them up takes longer
    # than most runs of a test
    known = {str(x._path): x.metadata for x in distributions()}
    read = PathDistribution.metadata.fget  # of what a script's imports have brought
    PathDistribution.metadata = property(lambda x: known.get(str(x._path)) or read(x))
    gc.freeze()  # a fork that looks for garbage would copy the memory of the imports
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], os.WUNTRACED)
            code = None if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
            print(json.dumps(code), flush=True)
            continue
        pid = os.fork()
        if pid > 0:
            print(pid, flush=True)
            continue
        break
    else:
        return

    signal.alarm(300)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, suffix in (1, ".out"), (2, ".err"):
        os.dup2(os.open(request["output"] + suffix, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = request["argv"]
    script = sys.argv[0]
    sys.path[:0] = [str(Path(script).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    import toys  # noqa: F401

    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    leave(code)


def leave(code):
    """Ends the process as Python does, but for taking apart all that was imported: a long time."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for thing in gc.get_objects():
        # Not isinstance, which asks a weak proxy for what it stands for
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter)):
            with contextlib.suppress(ValueError):  # it is closed, or not yet open
                thing.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
