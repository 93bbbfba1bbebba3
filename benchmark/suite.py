"""Suites: TOML files that say which runs there are.

A suite has one or more tables like this one; its runs are all combinations of env_ids, seeds and
variants.

    [[runs]]
    # A script of this repository, or a path from the suite's folder: "my_ppo.py"
    script = "ppo_continuous_action"
    env_ids = ["HalfCheetah-v5", "Hopper-v5"]
    seeds = 5                                 # 1 to 5; or a list: [1, 2, 7]
    # Names as in Args: --anneal-lr is anneal_lr. init_from: a path from the suite's folder
    flags = { total_timesteps = 1000000 }
    processes = 2             # optional: torchrun starts the script in so many processes
    [runs.variants]           # optional: a name for each set of flags, on top of the others
    default = {}
    no-norm-adv = { norm_adv = false }
"""

import contextlib
import importlib.util
import io
import json
import re
import sys
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path

from benchmark import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEYS = {"script": str, "env_ids": list, "seeds": (int, list), "flags": dict, "variants": dict}
KEYS |= {"processes": int}
NEEDED = ("script", "env_ids", "seeds")
# A sweep sets these flags itself, so a suite can't
SET_BY_SWEEP = ("env_id", "seed", "run_name", "resume", "evaluate")
# A sweep needs these
NEEDED_FLAGS = ("env_id", "resume", "run_name", "seed", "total_timesteps")


class SuiteError(Exception):
    """What is wrong with a suite, in one sentence and one line, whatever it quotes."""

    def __init__(self, message):
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True)
class Run:
    """One run of a script.

    name: its folder's name; script: its path; flags: those that the suite sets; processes: in how
    many torchrun starts the script, 0 without torchrun.
    """

    name: str
    script: Path
    env_id: str
    seed: int
    flags: dict
    processes: int = 0

    @property
    def program(self):
        """The words of its command line up to the script."""
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(self.processes)]
        return [sys.executable, *(torchrun if self.processes else []), str(self.script)]

    @property
    def words(self):
        """The words of its command line, after the script."""
        identity = {"env_id": self.env_id, "seed": self.seed, "run_name": self.name}
        return words_of(identity | self.flags)


def words_of(flags):
    """Flags, a dict -> the words of a command line."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def read_file(path, others=()):
    """A suite's file as a dict: its tables [[runs]], and one table for each name in others.

    Raises SuiteError.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SuiteError(f"can't read the suite {path}: {error}") from None
    tables = content.get("runs")
    are_tables = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    are_tables = are_tables and all(isinstance(content.get(name), dict) for name in others)
    if content.keys() != {"runs", *others} or not are_tables:
        names = ", ".join(["[[runs]]", *(f"[{name}]" for name in others)])
        raise SuiteError(f"{path} must have tables {names} and nothing else")
    for table in tables:
        check_table(table, path)
    return content


def read_suite(path):
    """The runs of a suite's file, in its order: {name: Run}. Raises SuiteError."""
    runs = {}
    for table in read_file(path)["runs"]:
        for run in expand(table, path):
            if run.name in runs:
                raise SuiteError(f"{path} has {run.name} twice: give one a variant")
            runs[run.name] = run
    if not runs:
        raise SuiteError(f"{path} has no runs")
    return runs


def check_table(table, path):
    """Raises SuiteError if a table [[runs]] is wrong."""
    unknown = set(table) - set(KEYS)
    missing = set(NEEDED) - set(table)
    if unknown or missing:
        wrong = ", ".join(sorted(unknown | missing))
        raise SuiteError(
            f"{path}: a table [[runs]] has {', '.join(KEYS)}, of which {', '.join(NEEDED)} must be "
            f"there; look at {wrong}"
        )
    for key, value in table.items():
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            raise SuiteError(f"{path}: {key} = {value!r} is of the wrong type")
    seeds = seeds_of(table)
    fit = all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)
    if not fit or len(set(seeds)) < len(seeds):
        raise SuiteError(f"{path}: seeds must be different whole numbers from 0 to 2**32 - 1")
    if table.get("processes", 1) < 1:
        raise SuiteError(f"{path}: processes must be above 0")
    if not seeds or not table["env_ids"]:
        raise SuiteError(f"{path} has a table [[runs]] without runs")
    if not all(isinstance(flags, dict) for flags in table.get("variants", {}).values()):
        raise SuiteError(f"{path}: a variant must be a table of flags")


def seeds_of(table):
    seeds = table["seeds"]
    return seeds if isinstance(seeds, list) else range(1, seeds + 1)


def expand(table, path):
    """Yields the Runs of one table [[runs]]. Raises SuiteError."""
    script = find_script(table["script"], path)
    for variant, own in table.get("variants", {"": {}}).items():
        flags = table.get("flags", {}) | own
        if "init_from" in flags:  # the runs run in the sweep's folder
            flags["init_from"] = str((path.absolute().parent / str(flags["init_from"])).resolve())
        for env_id in table["env_ids"]:
            for seed in seeds_of(table):
                parts = (str(env_id), script.stem, variant, str(seed))
                name = "__".join(filter(None, parts)).replace("/", "-").replace(":", "-")
                processes = table.get("processes", 0)
                yield Run(name, script, str(env_id), seed, flags, processes)


def find_script(name, suite_path):
    """The absolute path of a script: from the suite's folder, or of this repository."""
    for place in (suite_path.parent / name, ROOT / name, ROOT / f"{name}.py"):
        if place.is_file() and place.suffix == ".py":
            return place.resolve()
    known = ", ".join(sorted(place.stem for place in ROOT.glob("*.py")))
    raise SuiteError(f"{suite_path}: there is no script {name}: give a path, or one of {known}")


def read_args(runs):
    """The flags of all runs as their scripts read them: {name: dict as in config.json}.

    Each script is imported, and says itself what is wrong. Raises SuiteError.
    """
    modules = {}
    parsed = {}
    args = {}
    for run in runs.values():
        if run.script not in modules:
            modules[run.script] = load_script(run.script)
        key = (run.script, json.dumps(run.flags, default=str))  # TOML has dates
        if key not in parsed:
            parsed[key] = parse(modules[run.script], run.flags)
        identity = {"env_id": run.env_id, "seed": run.seed, "run_name": run.name}
        args[run.name] = parsed[key] | identity
    return args


def load_script(script):
    """Imports a script, which must have Args, read_flags and check_args. Raises SuiteError."""
    spec = importlib.util.spec_from_file_location(f"suite_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it may be anybody's script
        raise SuiteError(f"can't import {script}: {type(error).__name__} {error}") from None
    finally:
        sys.path.pop(0)
    missing = [name for name in ("Args", "read_flags", "check_args") if not hasattr(module, name)]
    if missing:
        raise SuiteError(f"{script} must have {', '.join(missing)}")
    flags = [field.name for field in fields(module.Args)] if is_dataclass(module.Args) else []
    if not set(NEEDED_FLAGS) <= set(flags):
        raise SuiteError(f"Args of {script} must be a dataclass with {', '.join(NEEDED_FLAGS)}")
    return module


def parse(module, flags):
    """The flags as the script reads them, a dict of plain values. Raises SuiteError."""
    script = Path(module.__file__).name
    known = {field.name for field in fields(module.Args)}.difference(SET_BY_SWEEP)
    unknown = ", ".join(set(flags) - known)
    if unknown:
        raise SuiteError(f"a suite can't set {unknown} for {script}")
    argv = sys.argv
    places = list(sys.path)
    said = io.StringIO()
    try:
        sys.argv = [module.__file__, *words_of(flags)]
        with contextlib.redirect_stderr(said):
            args, _ = module.read_flags()
            module.check_args(args)
        return json.loads(json.dumps(asdict(args)))
    except SystemExit:
        # Without the frame that tyro draws
        sentence = re.sub(r"[^\x20-\x7e]", " ", said.getvalue())
        raise SuiteError(f"{script} {' '.join(words_of(flags))}: {sentence}") from None
    finally:
        sys.argv = argv
        sys.path[:] = places
