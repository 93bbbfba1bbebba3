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
    [runs.variants]           # optional: a name for each set of flags, on top of the others
    default = {}
    no-norm-adv = { norm_adv = false }

Only this module imports training scripts: each has a dataclass Args, and its read_flags and
check_args check the flags. Run holds everything that other modules need; the sweep writes it into
its plan (benchmark/store.py).
"""

import contextlib
import importlib.util
import io
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path

from benchmark import ROOT
from benchmark.flags import SET_BY_SWEEP, words_of
from benchmark.store import LONGEST_NAME, is_run_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEYS = {"script": str, "env_ids": list, "seeds": (int, list), "flags": dict, "variants": dict}
NEEDED = ("script", "env_ids", "seeds")
MOST_SEED = 2**32 - 1  # the largest that NumPy takes
MOST_RUNS = 100_000  # in a suite: more are a mistake


class SuiteError(Exception):
    """What is wrong with a suite, in one sentence and one line, whatever it quotes."""

    def __init__(self, message):
        super().__init__(" ".join(message.splitlines()))


@dataclass(frozen=True)
class Run:
    """One run of a script.

    name: its folder's name; script: absolute path; variant: its name in the suite, "" if it has
    none; args: all flags, as config.json has them; words: of its command line, after the script;
    defaults: the script's flags where its command line has none.
    """

    name: str
    script: str
    env_id: str
    seed: int
    variant: str
    args: dict
    words: tuple[str, ...]
    defaults: dict


def read_suite(path):
    """The runs of a suite's file, in its order. Raises SuiteError."""
    tables = read_tables(path)
    for table in tables:
        check_table(table, path)
    number = sum(count_runs(table) for table in tables)
    if number > MOST_RUNS:
        raise SuiteError(f"{path} has {number:,} runs; a suite may have at most {MOST_RUNS:,}")
    runs = []
    for table in tables:
        runs += expand(table, path)
    check_names(runs, path)
    return runs


def read_tables(path):
    """The tables [[runs]] of a suite's file. Raises SuiteError."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SuiteError(f"can't read the suite {path}: {error}") from None
    runs = tables.get("runs")
    are_tables = isinstance(runs, list) and runs and all(isinstance(x, dict) for x in runs)
    if set(tables) != {"runs"} or not are_tables:
        found = ", ".join(tables) or "nothing"
        raise SuiteError(f"{path} must have tables [[runs]] and nothing else, but has {found}")
    return runs


def check_table(table, path):
    """Raises SuiteError if a table [[runs]] is wrong. Its flags are checked later, see parse()."""
    unknown = set(table) - set(KEYS)
    if unknown:
        raise SuiteError(
            f"{path} has the unknown key {', '.join(sorted(unknown))}: known are {', '.join(KEYS)}"
        )
    for key in NEEDED:
        if key not in table:
            raise SuiteError(f"{path} has a table [[runs]] without {key}")
    for key, value in table.items():
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            advice = "see the examples in benchmark/suites/"
            raise SuiteError(f"{path}: {key} = {value!r} is of the wrong type; {advice}")
    seeds = table["seeds"]
    listed = seeds if isinstance(seeds, list) else []
    valid = all(type(seed) is int and 0 <= seed <= MOST_SEED for seed in listed)
    if not valid or not all(type(env_id) is str for env_id in table["env_ids"]):
        raise SuiteError(
            f"{path} must have whole numbers from 0 to 2**32 - 1 as seeds, and strings as env_ids"
        )
    if count_runs(table) == 0:
        raise SuiteError(f"{path} has a table [[runs]] with no seeds, no env_ids or no variants")
    for variant, own in table.get("variants", {}).items():
        if not isinstance(own, dict):
            raise SuiteError(f"{path}: the variant {variant} must be a table of flags")


def count_runs(table):
    """How many runs a table [[runs]] has."""
    seeds = table["seeds"]
    number = len(seeds) if isinstance(seeds, list) else max(0, seeds)
    return number * len(table["env_ids"]) * len(table.get("variants", {"": {}}))


def check_names(runs, path):
    """Raises SuiteError if two runs, or two scripts, have the same name."""
    names = Counter(run.name for run in runs)
    twice = sorted(name for name, number in names.items() if number > 1)
    if twice:
        others = f" and {len(twice) - 3:,} others" if len(twice) > 3 else ""
        raise SuiteError(
            f"{path} has {', '.join(twice[:3])}{others} more than once: give one of them a variant "
            "of another name"
        )
    places = {Path(run.script).stem: run.script for run in runs}
    for run in runs:
        script = Path(run.script)
        if places[script.stem] != run.script:
            raise SuiteError(
                f"{path} has two scripts {script.name}, which a report takes for one: rename one"
            )


def expand(table, path):
    """The runs of one table [[runs]]. Raises SuiteError."""
    script, module = load_script(table["script"], path)
    defaults = plain_flags(make_defaults(module, path), path)
    seeds = table["seeds"]
    if isinstance(seeds, int):
        seeds = range(1, seeds + 1)
    runs = []
    for variant, changes in table.get("variants", {"": {}}).items():
        flags = table.get("flags", {}) | changes
        if isinstance(flags.get("init_from"), str):  # the runs run in the sweep's folder
            flags["init_from"] = str((path.absolute().parent / flags["init_from"]).resolve())
        args = plain_flags(parse(module, flags, path), path)
        for env_id in table["env_ids"]:
            for seed in seeds:
                name = name_run(env_id, Path(script).stem, variant, seed)
                check_name(name, path)
                identity = {"env_id": env_id, "seed": seed, "run_name": name}
                run = Run(
                    name=name,
                    script=script,
                    env_id=env_id,
                    seed=seed,
                    variant=variant,
                    args=args | identity,
                    words=words_of(identity | flags),
                    defaults=defaults,
                )
                runs.append(run)
    return runs


def name_run(env_id, stem, variant, seed):
    """The name of a run's folder."""
    parts = [env_id, stem, variant, str(seed)]
    name = "__".join(part for part in parts if part)
    return name.replace("/", "-").replace(":", "-")


def check_name(name, path):
    """Raises SuiteError if a run's folder can't have this name."""
    if name.startswith("-") or not is_run_name(name):
        raise SuiteError(
            f"{path}: {name[:50]!r} can't name a run's folder: it begins with -, has "
            f"unprintable characters or more than {LONGEST_NAME} bytes"
        )


def load_script(name, suite_path):
    """(absolute path, module) of a script.

    name: a path relative to the suite's folder, or a script of this repository.
    """
    script = find_script(name, suite_path)
    spec = importlib.util.spec_from_file_location(f"suite_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    # As Python does for a script, which may import its neighbours
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # it may be anybody's script
        what = f"{type(error).__name__} {error}"
        raise SuiteError(f"{suite_path}: can't import {script}: {what}") from None
    finally:
        sys.path.pop(0)
    functions = (getattr(module, name, None) for name in ("read_flags", "check_args"))
    if not is_dataclass(getattr(module, "Args", None)) or not all(map(callable, functions)):
        needs = "a dataclass Args and functions read_flags and check_args"
        raise SuiteError(f"{suite_path}: {script} must have {needs}")
    return str(script), module


def find_script(name, suite_path):
    """The absolute path of a script. Raises SuiteError if there is none."""
    for place in (suite_path.parent / name, ROOT / name, ROOT / f"{name}.py"):
        if place.is_file() and place.suffix == ".py":
            return place.resolve()
    known = ", ".join(sorted(place.stem for place in ROOT.glob("*.py")))
    raise SuiteError(
        f"{suite_path}: there is no script {name}; known are {known}, or give the path of one"
    )


def make_defaults(module, path):
    """An Args of a script with nothing but defaults. Raises SuiteError."""
    try:
        return module.Args()
    except Exception as error:  # it may be anybody's script
        script = Path(module.__file__).name
        raise SuiteError(f"{path}: Args() of {script} ends with {error!r}") from None


def parse(module, flags, path):
    """The Args that the script makes of these flags. Raises SuiteError.

    The script itself says what is wrong.
    """
    script = Path(module.__file__).name
    known = [field.name for field in fields(module.Args)]
    wrong = [name for name in flags if name not in known or name in SET_BY_SWEEP]
    if wrong:
        raise SuiteError(f"{path}: a suite can't set {', '.join(wrong)} for {script}")
    argv = sys.argv
    places = list(sys.path)
    stderr = io.StringIO()
    try:
        sys.argv = [module.__file__, *words_of(flags)]
        with contextlib.redirect_stderr(stderr):
            args, _ = module.read_flags()
            module.check_args(args)
        return args
    except Exception as error:
        raise SuiteError(f"{path}: the check of {script}'s flags ends with {error!r}") from None
    except SystemExit:
        # Without the frame that tyro draws
        said = " ".join(re.sub(r"[^\x20-\x7e]", " ", stderr.getvalue()).split())
        raise SuiteError(f"{path}: {' '.join(words_of(flags))}: {said}") from None
    finally:
        sys.argv = argv
        sys.path[:] = places


def plain_flags(args, path):
    """An Args as config.json has it: a dict of plain values. Raises SuiteError."""
    try:
        return json.loads(json.dumps(asdict(args)))
    except (TypeError, ValueError) as error:
        raise SuiteError(f"{path}: a flag can't be written as JSON: {error}") from None
