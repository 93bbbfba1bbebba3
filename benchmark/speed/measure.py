"""Runs one program, and reads its speed from marks: [(environment steps done, Unix time)]."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark import ROOT, fail
from benchmark.speed.peers import OURS, PROGRAMS, command_of

PACKAGES = ("torch", "gymnasium", "mujoco", "numpy", "stable_baselines3", "sb3_contrib")


def measure(program, script, seed, flags, folder, cache):
    """Runs a program in folder -> dict, a row without its round; ends with a sentence if it fails.

    cache: folder of the compiler's cache, which is empty if the folder isn't there.
    """
    cache_state = "filled" if cache.exists() else "empty"
    load = os.getloadavg()[0]
    said, began, ended, used = run(
        program, command_of(program, script, seed, flags, folder), folder, cache
    )
    if program in OURS and "running without compilation" in said:
        fail("the script couldn't be compiled: run it to see why, or add --no-compile to --flags")
    if program not in OURS or not cache.exists():  # it compiles nothing
        cache_state = ""
    config = json.loads((folder / "runs" / "plainrl" / "config.json").read_text())
    args = config["args"]
    learning_starts = args.get("learning_starts", 0)
    marks = read_marks(program, said, folder, learning_starts)
    if len(marks) < 2:
        fail("a run needs two iterations that learn: raise --total-timesteps in --flags")
    return {
        "program": program,
        "precision": PROGRAMS[program][1],
        "cache": cache_state,
        "script": script,
        "env_id": args["env_id"],
        "seed": args["seed"],
        **figures_of(marks, began, ended, learning_starts),
        **used,
        "load": load,
        "machine": describe_machine(config),
    }


def run(program, command, folder, cache):
    """Runs a command -> what it printed, the Unix times when it began and ended, what it used."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    with open(folder / "output.txt", "w+") as output:
        busy = busy_seconds()
        began = time.time()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.time()
        others = busy_seconds() - busy - usage.ru_utime - usage.ru_stime
        output.seek(0)
        said = output.read().strip()
    code = process.returncode = os.waitstatus_to_exitcode(status)
    if code == 2:  # a script that refuses its flags has said why
        print(said, file=sys.stderr)
        sys.exit(2)
    if code != 0:
        last_line = said.rpartition("\n")[2]
        sys.exit(f"error: {PROGRAMS[program][0]} failed with exit code {code}: {last_line}")
    used = {"peak_mb": usage.ru_maxrss / 1024, "others_cores": max(0.0, others / (ended - began))}
    return said, began, ended, used


def busy_seconds():
    """CPU seconds of all programs since the machine started, and those that a hypervisor took."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def read_marks(program, said, folder, learning_starts):
    """The marks of a run: a peer prints them, a script's TensorBoard events have steps and times.

    Those before learning_starts are left out: these iterations learn nothing.
    """
    if program not in OURS:
        return json.loads(said.rpartition("\n")[2])
    events = EventAccumulator(str(folder / "runs" / program), size_guidance={"scalars": 0})
    marks = [(event.step, event.wall_time) for event in events.Reload().Scalars("charts/SPS")]
    return [mark for mark in marks if mark[0] > learning_starts]


def figures_of(marks, began, ended, learning_starts):
    """The figures of a run -> dict.

    steps_per_second is from the first mark to the last. start_up_s (imports, building, compilation,
    steps before learning_starts) is the time to the first mark, less what the steps after that take
    at that speed. wall_s is the process's wall time, and wall_s_1m what it comes to for 1M steps.
    """
    first_step, first = marks[0]
    last_step, last = marks[-1]
    speed = (last_step - first_step) / (last - first)
    return {
        "steps": last_step,
        "steps_per_second": speed,
        "start_up_s": first - began - (first_step - learning_starts) / speed,
        "wall_s": ended - began,
        "wall_s_1m": ended - began + (1_000_000 - last_step) / speed,
    }


def describe_machine(config):
    """One line: commit, versions, processor, cores, and system."""
    versions = config["versions"]
    named = ", ".join(f"{name} {versions.get(name, 'not installed')}" for name in PACKAGES)
    return (
        f"PlainRL {config['git_commit']}, python {versions['python']}, {named}; "
        f"{config['machine']['cpu']}, {len(os.sched_getaffinity(0))} cores, {platform.platform()}"
    )
