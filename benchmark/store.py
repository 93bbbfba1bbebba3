"""A sweep's folder: where everything is, what there is to run, and what became of it.

    sweep.json        the plan: the runs and how to treat them. The sweep writes it when it starts
    jobs/NAME.json    the state of a run. The worker that holds jobs/NAME.lock writes it
    jobs/NAME.lock    held by the worker that has the run
    runs/NAME/        the run's own folder. Its script writes it
    logs/NAME.log     what the script and its worker printed
    lock              held by the sweep, which writes into it who that is
    cache/            Docker: compiled functions
    sweep.sbatch      Slurm: the array job that was submitted last
    slurm.json        Slurm: the jobs that were submitted
    logs/slurm-*.log  Slurm: what it said itself

Each file has one writer and any number of readers, on any machine that sees the folder. Readers
take a missing or damaged file for one that says nothing. Only the standard library is needed, since
workers run wherever their scripts do.
"""

import contextlib
import errno
import fcntl
import json
import math
import time
from pathlib import Path

STATES = ("running", "waiting", "failed", "finished")
ENDS = ("failed", "finished")
LONGEST_NAME = 200  # bytes of a run's name, so that suffixes fit into the 255 of a file's name
# The keys of a plan, those of a run's record in it, and those of a job: see plan() and job()
PLAN = {
    "session": str,
    "retries": int,
    "stall_minutes": (int, float),
    "needs_locks": bool,
    "scripts": dict,
    "runs": dict,
}
RECORD = {"script": str, "env_id": str, "seed": int, "variant": str, "args": dict, "words": list}
JOB = {
    "state": "waiting",
    "failures": 0,
    "error": "",
    "started": 0.0,
    "place": "",
    "step": 0,
    "session": "",
}
AFRESH = {"state": "waiting", "failures": 0, "error": ""}  # how a new session begins with a run
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
TAIL_BYTES = 2**14  # of episodes.csv: more than a hundred rows
LARGEST = 2**53  # of a count: above it, floats skip whole numbers
RECENT = 100  # rows that tell a run's speed and return
LOG_BYTES = 2**12  # of the end of a log that are searched for its last line
LONGEST_LINE = 300  # characters of a log's last line that are told
LOCK_TRIES = 3  # attempts to get a lock that is_held() may have for a moment
LOCK_PAUSE_S = 0.1  # s between two of them


class StoreError(Exception):
    """Why a folder can't be read as a sweep's, in one sentence."""


class NoLocks(Exception):
    """The file system has no locks."""


def read_json(path):
    """The dict in a file, {} where there is none or a damaged one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path, value):
    """Writes a file that is whole at any time. It must have one writer."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=1))
    part.replace(path)


def is_run_name(name):
    """Whether a run can have this name: that of one folder, and of the files beside it."""
    is_folder = name == Path(name).name and name not in ("", ".", "..")
    return is_folder and name.isprintable() and len(name.encode()) <= LONGEST_NAME


class Store:
    """The folder of a sweep. Making a Store touches nothing.

    troubles: sentences on what the last plan() left out. known_session: the session of the plan
    that this Store has read or written last, None before. job() goes by it, so that a worker which
    outlives its sweep keeps to the session that it began in.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.plan_file = self.folder / "sweep.json"
        self.sweep_lock = self.folder / "lock"
        self.logs = self.folder / "logs"
        self.cache = self.folder / "cache"
        self.slurm_script = self.folder / "sweep.sbatch"
        self.slurm_jobs = self.folder / "slurm.json"
        self.troubles = []
        self.known_session = None

    def run_dir(self, name):
        return self.folder / "runs" / name

    def log_file(self, name):
        return self.logs / f"{name}.log"

    def job_file(self, name):
        return self.folder / "jobs" / f"{name}.json"

    def job_lock(self, name):
        return self.folder / "jobs" / f"{name}.lock"

    def make_folders(self):
        for name in ("jobs", "logs", "runs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def write_plan(self, plan):
        """Writes sweep.json, for the sweep alone. plan: see plan()."""
        write_json(self.plan_file, plan)
        self.known_session = plan["session"]

    def plan(self):
        """Reads sweep.json.

        "session" (str, another one at each start of the sweep), "retries" (int), "stall_minutes",
        "needs_locks" (bool), "scripts" ({path: {"defaults": flags}}), "runs" ({name: record}). A
        record has the keys of RECORD, which suite.Run explains. Runs with unusable names or records
        are left out. Sets troubles, which names them, and known_session. Raises StoreError if there
        is no plan.
        """
        if not self.plan_file.exists():
            raise StoreError(f"{self.folder} is no folder of a sweep: it has no sweep.json")
        plan = read_json(self.plan_file)
        wrong = [key for key, kind in PLAN.items() if not isinstance(plan.get(key), kind)]
        if wrong:
            advice = "starting the sweep again writes it anew"
            raise StoreError(f"{self.plan_file} has no valid {', '.join(wrong)}: {advice}")

        self.troubles = []
        runs = {}
        for name, record in plan["runs"].items():
            if not is_run_name(name):
                self.troubles.append(f"{self.plan_file} names {name!r}, which can't be a run")
            elif not is_record(record):
                self.troubles.append(f"{self.plan_file} has no valid record of the run {name}")
            else:
                runs[name] = record
        scripts = {}
        for path, facts in plan["scripts"].items():
            if isinstance(facts, dict) and isinstance(facts.get("defaults"), dict):
                scripts[path] = facts
        self.known_session = plan["session"]
        return {key: plan[key] for key in PLAN} | {"runs": runs, "scripts": scripts}

    def session(self):
        """known_session, read now if it isn't known yet; "" where there is no plan."""
        if self.known_session is None:
            self.known_session = str(read_json(self.plan_file).get("session", ""))
        return self.known_session

    def job(self, name):
        """What is known of a run.

        "state" (one of STATES), "failures" (int, attempts that ended badly without getting
        further), "error" (what was said at the last of them), "started" (Unix time of the last
        attempt), "place" (host and process of its worker), "step" (int, the furthest that an
        attempt got that ended badly), "session" (of the plan when this was written).

        A run is finished if its evaluation.json can be read, and only then. What an earlier session
        left as failed, or as running under a worker that is gone, waits for a new try in this one:
        see session(). A worker that asks for its own run holds that run's lock itself, so it still
        reads "running" there: Worker.take_over deals with that.
        """
        written = read_json(self.job_file(name))
        job = dict(JOB)
        for key, default in JOB.items():
            value = written.get(key, default)
            if isinstance(value, type(default)):
                job[key] = value
        for key in ("error", "place"):  # shown to people; JSON may hold what isn't text
            job[key] = job[key].encode(errors="backslashreplace").decode()
        if job["state"] not in STATES:
            job["state"] = "waiting"
        if is_finished(self.run_dir(name)):
            return job | {"state": "finished", "error": ""}
        if job["state"] == "finished":  # its evaluation.json is damaged or was removed
            return job | {"state": "waiting"}
        if job["session"] == self.session():
            return job
        if job["state"] == "running" and may_be_held(self.job_lock(name)):
            return job
        return job | AFRESH

    def write_job(self, name, job):
        """Writes the state of a run, for the worker that holds its lock alone.

        The session is that of the sweep.json now there: a worker may outlive its sweep.
        """
        session = str(read_json(self.plan_file).get("session", ""))
        write_json(self.job_file(name), job | {"session": session})

    def last_written(self, name):
        """Unix time of the last sign of life in a run's log or folder, 0 before the first."""
        run_dir = self.run_dir(name)
        paths = [self.log_file(name), run_dir]
        with contextlib.suppress(OSError):
            paths += run_dir.iterdir()
        times = [0.0]
        for path in paths:
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)


def is_record(record):
    """Whether a run's record in sweep.json has all that it must have."""
    if not isinstance(record, dict):
        return False
    whole = all(isinstance(record.get(key), kind) for key, kind in RECORD.items())
    if not whole or whole_number(record["seed"]) is None:
        return False
    return all(isinstance(word, str) for word in record["words"])


def planned_steps(args):
    """The total_timesteps of a run's args, an int, or None where they are no whole number."""
    steps = args.get("total_timesteps")
    if isinstance(steps, bool) or not isinstance(steps, (int, float)):
        return None
    return whole_number(steps)


def whole_number(value):
    """A number as int, or None if it isn't whole, isn't finite or is too large to be a count."""
    if not abs(value) <= LARGEST or value != int(value):
        return None
    return int(value)


def read_evaluation(run_dir):
    """A run's folder -> (returns of its evaluation, what is wrong with them).

    The first is None unless the run is finished, and [] after one with --eval-episodes 0. The
    second is "" unless there is an evaluation.json that can't be read.
    """
    try:
        returns = json.loads((run_dir / "evaluation.json").read_bytes())["returns"]
        if not isinstance(returns, list) or not all(type(x) in (int, float) for x in returns):
            raise ValueError("its returns are no list of numbers")
        return [float(x) for x in returns], ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        reason = str(getattr(error, "strerror", None) or error)
        return None, f"evaluation.json can't be read ({type(error).__name__}: {reason})"


def is_finished(run_dir):
    returns, _ = read_evaluation(run_dir)
    return returns is not None


def read_progress(run_dir, total_steps=None):
    """How far a run is, by the last rows of its episodes.csv; {} before its first episode's end.

    "step" (int), "speed" (env steps a second over these rows, None if unknown), "eta_s" (s to
    total_steps, None if unknown), "return" (the mean of these episodes).
    """
    episodes = read_last_episodes(run_dir / "episodes.csv")
    if not episodes:
        return {}
    first_step, first_wall, _ = episodes[0]
    step, wall, _ = episodes[-1]
    speed = None
    if step > first_step and wall > first_wall:
        speed = (step - first_step) / (wall - first_wall)
    elif step > 0 and wall > 0:
        speed = step / wall
    eta_s = None
    if speed and total_steps is not None:
        eta_s = max(0, total_steps - step) / speed
    mean = sum(episode_return for _, _, episode_return in episodes) / len(episodes)
    return {"step": step, "speed": speed, "eta_s": eta_s, "return": mean}


def read_last_episodes(path):
    """[(global_step, wall_seconds, return)] of the last rows of an episodes.csv, at most RECENT.

    A last line without its end is still being written and doesn't count; nor do damaged ones.
    """
    try:
        with open(path, "rb") as file:
            header = file.readline()
            file.seek(max(len(header), path.stat().st_size - TAIL_BYTES))
            cut = file.tell() > len(header)
            rest = file.read()
    except OSError:
        return []
    lines = rest.decode(errors="replace").split("\n")[:-1]
    if cut:
        lines = lines[1:]
    names = header.decode(errors="replace").strip().split(",")
    episodes = []
    for line in lines[-RECENT:]:
        row = dict(zip(names, line.split(",")))
        try:
            step = whole_number(float(row["global_step"]))
            wall = float(row["wall_seconds"])
            episode_return = float(row["return"])
        except (KeyError, ValueError):
            continue
        if step is not None and math.isfinite(wall):
            episodes.append((step, wall, episode_return))
    return episodes


def tail(path, size=LOG_BYTES):
    """The last bytes of a file as lines, [] where it isn't there."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_line(path):
    """The last line with text of a log, cut to LONGEST_LINE; "" if there is none.

    Docker's advice after its errors doesn't count.
    """
    for line in reversed(tail(path)):
        line = "".join(c for c in line if c.isprintable()).strip()
        if line and not line.startswith("Run 'docker "):
            return line[-LONGEST_LINE:]
    return ""


def try_lock(file, operation):
    """Whether an open file's lock could be had; False if another process has it.

    operation: fcntl.LOCK_EX or LOCK_SH. Raises NoLocks, OSError.
    """
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise NoLocks(f"this file system has no locks ({error.strerror})") from None
        raise
    return True


def hold(path):
    """An open file with its lock, or None if another process has it.

    That may be on another machine that sees the file. Closing the file frees the lock. Raises
    NoLocks, or OSError if the file can't be written.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(path, "a+"))
        for _ in range(LOCK_TRIES):
            if try_lock(file, fcntl.LOCK_EX):
                stack.pop_all()
                return file
            time.sleep(LOCK_PAUSE_S)
    return None


def is_held(path):
    """Whether a process has the lock of a file. Raises NoLocks."""
    try:
        with open(path) as file:
            return not try_lock(file, fcntl.LOCK_SH)
    except OSError:  # most likely the file isn't there
        return False


def may_be_held(path):
    """Whether a process has the lock of a file, for all that this file system can tell."""
    try:
        return is_held(path)
    except NoLocks:
        return True
