"""Runs one program and reads its speed; describes the machine and what else runs there."""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark.speed.peers import (
    BOUNDS,
    CORES,
    FULL_STEPS,
    OURS,
    PROGRAMS,
    ROOT,
    WORKERS,
    command_of,
)
from benchmark.worker import BAD_INPUT

PACKAGES = ("torch", "gymnasium", "mujoco", "numpy", "stable-baselines3", "sb3-contrib")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class MeasureError(Exception):
    """A program failed or printed no speed; the text is a sentence for the user."""


class FailedError(MeasureError):
    """A program ended with an exit code that isn't 0. said: what it printed."""

    def __init__(self, title, code, said):
        super().__init__(f"{title} failed with exit code {code}:\n{said[-1000:]}")
        self.code = code
        self.said = said


class RefusedError(MeasureError):
    """A script refused its flags; the text is the last line that it printed."""


def measure(program, work, cache):
    """Runs a program of PROGRAMS once, in a folder of its own -> dict, a row without its round.

    cache: folder of the compiler's cache, which is empty if the folder isn't there. Raises
    MeasureError, RefusedError where a script of ours refuses its flags.
    """
    was_there = cache.exists()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        settings = dict.fromkeys(THREADS, str(work.task.threads))
        settings |= {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        if program in WORKERS:
            settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        title = PROGRAMS[program].title
        try:
            process = run(title, command_of(program, work), folder, settings)
        except FailedError as error:
            if error.code != BAD_INPUT or program not in OURS:
                raise
            raise RefusedError(error.said.strip().rpartition("\n")[-1]) from None
        marks = read_marks(program, folder)
        if program in OURS:  # with a replay buffer, the second iteration is the first that learns
            marks = marks[work.task.least_iterations - 2 :]
        figures = steady_state(marks, process.began, process.ended)
    figures |= {"peak_mb": process.peak_mb, "others_cores": process.others_cores}
    if program in BOUNDS:  # nobody would run these for themselves
        figures |= {"start_up_s": None, "wall_s_1m": None, "peak_mb": None}
    cache_state = ""
    if program not in WORKERS and cache.exists():  # else it compiles nothing
        cache_state = "filled" if was_there else "empty"
    return identity(program, PROGRAMS[program].precision, cache_state, work) | figures


def measure_other(name, command, work):
    """Runs any other command once, in the current folder -> dict as that of measure.

    Its speed is the last one that it prints; its precision isn't known. Raises MeasureError.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = run(name, command, Path(folder), {}, cwd=None, shell=True)
    speed = read_speed(process.said)
    if speed is None:
        example = "SPS: 1234 or 1,234 steps/s"
        raise MeasureError(f"{name} printed no speed, such as {example}:\n{process.said[-1000:]}")
    return identity(name, "", "", work) | {
        "steps": None,
        "steps_per_second": speed,
        "start_up_s": None,
        "wall_s": process.ended - process.began,
        "wall_s_1m": None,
        "peak_mb": process.peak_mb,
        "others_cores": process.others_cores,
    }


def identity(program, precision, cache_state, work):
    """The part of a row that says what was measured, a dict."""
    return {
        "program": program,
        "precision": precision,
        "cache": cache_state,
        "script": work.script,
        "env_id": work.env_id,
        "seed": work.seed,
    }


@dataclass(frozen=True)
class Process:
    """A process that has ended well."""

    began: float  # s since 1970
    ended: float
    peak_mb: float  # of its largest process
    others_cores: float | None  # how many cores other programs kept busy meanwhile, on average
    said: str  # what it printed


def run(title, command, folder, settings, **options):
    """Runs a command in folder, unless told otherwise -> Process. Raises FailedError if it fails.

    What it prints goes to output.txt there.
    """
    options = {"cwd": folder} | options
    path = folder / "output.txt"
    with open(path, "w") as output:
        busy = busy_seconds()
        began = time.time()
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | settings, **options
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.kill()
            raise
        ended = time.time()
    process.returncode = os.waitstatus_to_exitcode(status)
    said = path.read_text(errors="replace")
    if process.returncode:
        raise FailedError(title, process.returncode, said)
    others_cores = None
    if busy is not None:
        used = busy_seconds() - busy - usage.ru_utime - usage.ru_stime
        others_cores = max(0.0, used / (ended - began))
    peak_mb = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return Process(began, ended, peak_mb, others_cores, said)


def busy_seconds():
    """CPU seconds that all programs have used since the machine started; None without /proc/stat.

    Time that a hypervisor gave to other machines counts too.
    """
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, line.split()[1:9])
    ticks = user + nice + system + interrupts + soft_interrupts + stolen
    return ticks / os.sysconf("SC_CLK_TCK")


def read_marks(program, folder):
    """Marks, [(environment steps done, Unix time, s)], of the run in folder.

    A worker has printed them; a script's TensorBoard events have steps and times.
    """
    if program in WORKERS:
        lines = (folder / "output.txt").read_text().splitlines()
        return json.loads(next(line for line in lines if line.startswith("[[")))
    events = EventAccumulator(str(folder / "runs" / "speed"), size_guidance={"scalars": 0})
    return [(event.step, event.wall_time) for event in events.Reload().Scalars("charts/SPS")]


def read_speed(said):
    """The last number of steps per second in a program's output, float; None if there is none."""
    found = re.findall(
        r"(?:SPS|FPS)\W*(\d[\d,]*\.?\d*)|(\d[\d,]*\.?\d*) *steps/s", said, re.IGNORECASE
    )
    if not found:
        return None
    return float("".join(found[-1]).replace(",", ""))


def steady_state(marks, began, ended):
    """The figures of a run, from its marks and the Unix times (s) when it began and ended -> dict.

    steps_per_second is that of the steady state, from the first mark to the last. start_up_s
    (imports, building, compilation) is the time to the first mark, less what its steps take at that
    speed. wall_s is the process's wall time, and wall_s_1m what it comes to for 1M steps.
    """
    first_step, first = marks[0]
    last_step, last = marks[-1]
    speed = (last_step - first_step) / (last - first)
    wall = ended - began
    return {
        "steps": last_step,
        "steps_per_second": speed,
        "start_up_s": first - began - first_step / speed,
        "wall_s": wall,
        "wall_s_1m": wall + (FULL_STEPS - last_step) / speed,
    }


def describe_machine():
    """One line: versions, processor, cores, system, load, and what else uses the CPU right now."""
    versions = ", ".join(f"{name} {installed(name)}" for name in PACKAGES)
    load = os.getloadavg()[0]
    busy = [f"{name} {share:.0%}" for name, share in busy_processes()]
    others = ", ".join(busy) if busy else "nothing"
    return (
        f"python {platform.python_version()}, {versions}; {processor()}, {CORES} cores, "
        f"{platform.platform()}; at the start: load {load:.2f}, other programs on the CPU (shares "
        f"of a core): {others}"
    )


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor():
    """The processor's name; where /proc has none, the architecture's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.split(": ")[1] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def busy_processes(seconds=0.5, least=0.05):
    """Other processes that use the CPU in the next seconds -> [(name, share of a core)].

    The busiest is first; shares below least are left out. Where there is no /proc, that is none.
    """
    before = cpu_times()
    start = time.perf_counter()
    time.sleep(seconds)
    after = cpu_times()
    elapsed = time.perf_counter() - start
    found = []
    for pid, (name, used) in after.items():
        share = (used - before.get(pid, (name, 0.0))[1]) / elapsed
        if share >= least:
            found.append((name, share))
    return sorted(found, key=lambda process: -process[1])


def cpu_times():
    """{pid: (name, seconds of CPU used so far)} of all processes."""
    tick = os.sysconf("SC_CLK_TCK")
    times = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(errors="replace")
        except OSError:  # it has ended
            continue
        # PID (NAME) STATE ...: a name may have parentheses and spaces
        start = text.index("(")
        end = text.rindex(")")
        fields = text[end + 1 :].split()
        times[int(path.parent.name)] = (
            text[start + 1 : end],
            (int(fields[11]) + int(fields[12])) / tick,
        )
    return times
