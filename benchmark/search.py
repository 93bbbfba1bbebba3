"""Searches for good hyper-parameters, by Optuna, on every backend.

    python -m benchmark.search SEARCH [--trials N] [--dir DIR] [FLAGS OF benchmark.sweep]

SEARCH is a suite's file with two more tables: flags' ranges, and what scores are worth
(docs/search.md). A trial is a set of values; its runs are a sweep, DIR/trials/NUMBER, and its value
is the interquartile mean of their scores. One that loses to the best trial by Wilcoxon's test ends
before all its runs are done.

A score on the seeds of a search is no result. So the values of the best trials, as many as
--finalists says, are run again with --seeds other seeds, beside the defaults: DIR/finals.
DIR/report has curves and tables of these runs, and Optuna's figures of the trials.

Given again, the same command goes on. Several at once, on machines that share DIR, share the work.
"""

import contextlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
import tomli_w
import tyro
from filelock import FileLock, Timeout
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from scipy.stats import trim_mean

from benchmark import fail
from benchmark.backends import BackendError
from benchmark.report import __main__ as report
from benchmark.suite import SET_BY_SWEEP, SuiteError, read_args, read_file, read_suite, seeds_of
from benchmark.sweep import ENDS, POLL_S
from benchmark.sweep import read_flags as read_sweep_flags
from benchmark.task import WAIT_S, die_with_parent, last_line, read_evaluation, state_of


@dataclass
class Flags:
    """The flags of this command. It hands all others to benchmark.sweep."""

    search: tyro.conf.Positional[Path]  # a file with ranges
    trials: int = 100  # sets of values that are tried, by all commands together
    finalists: int = 3  # best trials that are run again, beside the defaults
    seeds: int = 10  # of the runs of each of them; 0: no such runs
    dir: Path | None = None  # folder of the search (default: searches/SEARCH)


# The file


class Search:
    """What a search's file says.

    tables: its tables [[runs]]; ranges: {flag: its range, a table}; scores: {env_id: [of a bad
    policy, of a good one]}; first_seed: that no trial has.
    """

    def __init__(self, path):
        """Raises SuiteError."""
        self.path = path.absolute()
        content = read_file(path, ["ranges", "scores"])
        self.tables = content["runs"]
        self.ranges = content["ranges"]
        self.scores = content["scores"]
        self.first_seed = 1 + max(seed for table in self.tables for seed in seeds_of(table))
        if any("variants" in table for table in self.tables):
            raise SuiteError(f"{path}: a search has no variants")
        if not self.ranges:
            raise SuiteError(f"{path} has no ranges")
        self.suggest(optuna.create_study().ask())
        runs, args = self.read_defaults()
        for name in self.ranges:
            if name in (*SET_BY_SWEEP, "init_from"):
                raise SuiteError(f"{path}: a search can't set {name}")
            if not all(name in own for own in args.values()):
                raise SuiteError(f"{path}: a script has no flag {name}")
        for env_id in {run.env_id for run in runs.values()}:
            match self.scores.get(env_id):
                case [int() | float() as bad, int() | float() as good] if 0 < good - bad < math.inf:
                    continue
            wanted = f"{env_id} = [of a bad policy, of a good one]"
            raise SuiteError(f"{path}: [scores] must have {wanted}")

    def read_defaults(self):
        """The finals' default runs, and their flags as the scripts read them. Raises SuiteError."""
        with tempfile.TemporaryDirectory() as folder:
            suite = Path(folder, "suite.toml")
            runs = self.write_suite(suite, {"default": {}}, [self.first_seed])
            return runs, read_args(runs)

    def suggest(self, trial):
        """The values of a trial, from Optuna: {flag: value}. Raises SuiteError."""
        values = {}
        for name, spec in self.ranges.items():
            try:
                values[name] = suggest(trial, name, **spec)
            except (ArithmeticError, TypeError, ValueError) as error:
                raise SuiteError(f"{self.path}: the range of {name} is wrong: {error}") from None
        return values

    def write_suite(self, path, variants, seeds=None):
        """Writes a suite of variants, {name: a trial's values}; returns its runs.

        One without a name adds nothing to its runs' names. seeds: other ones than the file's.
        """
        tables = []
        for table in self.tables:
            flags = dict(table.get("flags", {}))
            if "init_from" in flags:
                flags["init_from"] = str(self.path.parent / str(flags["init_from"]))
            keys = {"flags": flags, "variants": variants, "seeds": seeds or table["seeds"]}
            script = self.path.parent / table["script"]
            if script.is_file():  # one of this repository is elsewhere on another machine
                keys["script"] = str(script)
            tables.append(table | keys)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps({"runs": tables}), encoding="utf-8")
        return read_suite(path)

    def score(self, run, run_dir):
        """Of a run that has ended: 0 for a bad policy or a worse one, 1 for a good one."""
        bad, good = self.scores[run.env_id]
        returns = read_evaluation(run_dir)
        score = (np.mean(returns) - bad) / (good - bad) if returns else 0.0
        return max(0.0, float(score)) if math.isfinite(score) else 0.0


def suggest(trial, name, low=None, high=None, log=False, choices=None):
    """A value of a range, from Optuna. Raises a Python error for a bad one."""
    if choices is not None:
        return json.loads(trial.suggest_categorical(name, [*map(json.dumps, choices)]))
    if log not in (True, False, "1 - x"):
        raise ValueError(f'log must be true, false or "1 - x", not {log!r}')
    if log == "1 - x":
        value = 1 - trial.suggest_float(f"1 - {name}", 1 - high, 1 - low, log=True)
    elif type(low) is type(high) is int:
        return trial.suggest_int(name, low, high, log=log)
    else:
        value = trial.suggest_float(name, low, high, log=log)
    return float(f"{value:.6g}")


# Trials


def open_study(search, folder):
    """The study in a folder's journal, which may be new. Raises SuiteError."""
    if (folder / "runs").exists():
        raise SuiteError(f"{folder} is the folder of a sweep: choose another --dir")
    copy = folder / "search.toml"
    text = search.path.read_text()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if copy.exists() and copy.read_text() != text:
            name = search.path.name
            raise SuiteError(f"{folder} was made by another {name}: choose another --dir")
        if not copy.exists():
            copy.write_text(text)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal.log")))
        return optuna.create_study(
            study_name="search",
            storage=storage,
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.WilcoxonPruner(),
        )


def make_sampler(number):
    """That of a trial. From the same trials before it, it draws the same values."""
    return optuna.samplers.TPESampler(multivariate=True, seed=number)


def take_trial(study, folder, count):
    """The lock of a trial, which is held, and the trial; None where there are count.

    One left by a command that has ended comes first.
    """
    with FileLock(folder / "lock"):
        for left in study.get_trials(states=(TrialState.RUNNING,)):
            lock = FileLock(folder / "trials" / f"{left.number}.lock")
            with contextlib.suppress(Timeout):
                held = lock.acquire(timeout=0)
                if study.trials[left.number].state == TrialState.RUNNING:  # it hasn't just ended
                    study.sampler = make_sampler(left.number)
                    return held, optuna.trial.Trial(study, left._trial_id)
                lock.release()
        if len(study.trials) >= count:
            return None
        study.sampler = make_sampler(len(study.trials))
        trial = study.ask()
        return FileLock(folder / "trials" / f"{trial.number}.lock").acquire(), trial


@contextlib.contextmanager
def sweep(folder, words, **options):
    """benchmark.sweep of the suite in a folder, which is stopped at the end of the block."""
    with contextlib.suppress(Timeout), FileLock(folder / "lock", timeout=WAIT_S):
        pass  # one that a killed command has left saves and ends first
    command = [sys.executable, "-m", "benchmark.sweep", str(folder / "suite.toml")]
    process = subprocess.Popen(
        [*command, "--dir", str(folder), *words],
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        **options,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def do_trial(study, trial, search, folder, words):
    """Does a trial's runs, and tells the study. Raises SuiteError if the scripts can't be run."""
    values = search.suggest(trial)
    runs = search.write_suite(folder / "suite.toml", {"": values})
    scores = {}
    pruned = False
    try:
        read_args(runs)
    except SuiteError as error:
        search.read_defaults()  # raises if the defaults can't be run now either
        study.tell(trial, state=TrialState.PRUNED)  # with a value it could come into the finals
        print(f"trial {trial.number} can't be run: {error}", flush=True)
        return
    with open(folder / "sweep.log", "a") as log:
        with sweep(folder, words, stdout=log, stderr=log) as process:
            code = None
            while code is None and not pruned:
                code = process.poll()
                ends = ENDS if code is not None else ("finished",)  # a failed one may be retried
                for step, (name, run) in enumerate(runs.items()):
                    run_dir = folder / "runs" / name
                    if name not in scores and state_of(run_dir) in ends:
                        scores[name] = search.score(run, run_dir)
                        trial.report(scores[name], step)
                pruned = len(scores) < len(runs) and trial.should_prune()
                time.sleep(POLL_S)
    if pruned:
        study.tell(trial, state=TrialState.PRUNED)
        found = f"pruned after {len(scores)} of {len(runs)} runs"
    elif len(scores) < len(runs):  # lost, or they could not begin
        lost = next(name for name in runs if name not in scores)
        said = last_line(folder / "logs" / f"{lost}.log") or last_line(folder / "sweep.log")
        print(f"trial {trial.number} isn't finished: {said}; the same command goes on with it")
        sys.exit(code)
    else:
        value = trim_mean(list(scores.values()), 0.25)
        study.tell(trial, value)
        found = f"{value:.3f}; best {study.best_value:.3f}, trial {study.best_trial.number}"
    print(f"trial {trial.number}: {found}; {json.dumps(values)}", flush=True)


# The end


def best_trials(study, search, count):
    """Those with the highest values, no two of which have the same flags -> {name: flags}."""
    trials = study.get_trials(states=(TrialState.COMPLETE,))
    found = {}
    for trial in sorted(trials, key=lambda trial: -trial.value):
        values = search.suggest(trial)
        if values not in found.values() and len(found) < count:
            found[f"trial-{trial.number}"] = values
    return found


def do_finals(best, search, folder, count, words):
    """Runs the best trials' flags and the defaults with other seeds; returns the exit code."""
    seeds = list(range(search.first_seed, search.first_seed + count))
    variants = {"default": {}} | best
    runs = search.write_suite(folder / "suite.toml", variants, seeds)
    with sweep(folder, words) as process:
        code = process.wait()
    ended = [name for name in runs if state_of(folder / "runs" / name) in ENDS]
    for variant, values in variants.items():
        own = [name for name in ended if f"__{variant}__" in name]
        scores = [search.score(runs[name], folder / "runs" / name) for name in own]
        value = f"{trim_mean(scores, 0.25):.3f}" if scores else "no score"
        print(f"{variant}: {value} in {len(own)} runs; {json.dumps(values)}")
    return code


def write_report(study, finals, out):
    """Writes DIR/report: Optuna's figures of the trials, and the report of the finalists' runs."""
    out.mkdir(exist_ok=True)
    trials = study.trials_dataframe()
    # Optuna gives a pruned trial the score of its last run
    trials.loc[trials["state"] != "COMPLETE", "value"] = np.nan
    trials.to_csv(out / "trials.csv", index=False)
    plots = optuna.visualization
    drawn = [plots.plot_optimization_history(study), plots.plot_slice(study)]
    drawn += [plots.plot_param_importances(study), plots.plot_parallel_coordinate(study)]
    options = {"full_html": False, "default_height": 500}
    pages = [x.to_html(include_plotlyjs=x is drawn[0], **options) for x in drawn]
    (out / "trials.html").write_text("".join(pages), encoding="utf-8")
    print(out / "trials.html")
    if (finals / "runs").is_dir():
        report.draw(report.Args(runs=(finals,), out=out))
        print(out / "report.html")


def main():
    flags, words = tyro.cli(
        Flags, prog="python -m benchmark.search", description=__doc__, return_unknown_args=True
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of its pruner
    warnings.filterwarnings("ignore", "The reported value is ignored")  # of a trial that goes on
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
    if min(flags.trials, flags.finalists) < 1 or flags.seeds < 0:
        fail("--trials and --finalists must be above 0, and --seeds not below")
    folder = (flags.dir or Path("searches", flags.search.stem)).absolute()
    sys.argv = ["python -m benchmark.search", "SEARCH", *words]
    try:
        sweep_flags, _ = read_sweep_flags()  # ends the program where they are wrong
        if sweep_flags.status or sweep_flags.dry_run:
            fail("--status and --dry-run are for benchmark.sweep, with the suite.toml of a trial")
        search = Search(flags.search)
        study = open_study(search, folder)
    except (SuiteError, BackendError, OSError) as error:
        fail(error)
    while taken := take_trial(study, folder, flags.trials):
        lock, trial = taken
        with lock:
            try:
                do_trial(study, trial, search, folder / "trials" / str(trial.number), words)
            except SuiteError as error:
                fail(error)
    if study.get_trials(states=(TrialState.RUNNING,)):
        print("the last trials are in the hands of other commands, which go on")
        return
    best = best_trials(study, search, flags.finalists)
    if not best:
        fail("no trial has a value")
    finals = folder / "finals"
    lock = FileLock(folder / "finals.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("the finals are in the hands of another command, which goes on")
        return
    code = do_finals(best, search, finals, flags.seeds, words) if flags.seeds else 0
    write_report(study, finals, folder / "report")
    sys.exit(code)


if __name__ == "__main__":
    main()
