"""Searches, with a fast fake script whose evaluation is better the larger its first size is."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pandas as pd
import pytest
from filelock import FileLock
from optuna.trial import TrialState

from benchmark import ROOT, search
from benchmark.suite import SuiteError

RANGE = "choices = [[2, 1], [7, 1], [4, 1]]"
FLAGS = f"""
[runs.flags]
total_timesteps = 6
fast = false
[ranges]
sizes = {{ {RANGE} }}
"""
SCORES = """
[scores]
Good-v0 = [1, 11]
Gate-v0 = [1, 11]
Never-v0 = [1, 11]
Crash-v0 = [1, 11]
Nothing-v0 = [1, 11]
"""


CHOICES = ["[2, 1]", "[7, 1]", "[4, 1]"]
WINNER = {
    "value": 99.0,
    "params": {"sizes": "[7, 1]"},
    "distributions": {"sizes": optuna.distributions.CategoricalDistribution(CHOICES)},
}


class Searches:
    """A file in a lab's folder, and the folder of its search."""

    def __init__(self, lab):
        self.lab = lab
        self.out = lab.folder / "search"
        self.path = lab.folder / "my_search.toml"
        lab.write_suite("")

    def write(self, env_ids, seeds=2, flags=FLAGS, scores=SCORES):
        runs = f'[[runs]]\nscript = "fake.py"\nenv_ids = {json.dumps(env_ids)}\nseeds = {seeds}\n'
        self.path.write_text(runs + flags + scores)
        return self.path

    def start(self, *flags):
        return self.lab.start("-m", "benchmark.search", self.path, "--dir", self.out, *flags)

    def run(self, *flags, code=0):
        found, said = self.lab.finish(self.start(*flags))
        assert found == code, said
        return said

    def trials(self):
        storage = search.JournalFileBackend(str(self.out / "journal.log"))
        storage = optuna.storages.JournalStorage(storage)
        return optuna.load_study(study_name="search", storage=storage).trials

    def run_dir(self, trial, name):
        return self.out / "trials" / str(trial) / "runs" / name

    def steps(self):
        """{run's folder: the steps that it has made}"""
        return {path.parent: path.read_text().split() for path in self.out.rglob("steps.txt")}


@pytest.fixture
def searches(lab):
    return Searches(lab)


def test_a_search_ends_with_its_best_trials_beside_the_defaults(searches):
    searches.write(["Good-v0"])
    said = searches.run("--trials", "5", "--seeds", "3", "--finalists", "2")
    trials = searches.trials()
    assert [trial.state.name for trial in trials] == 5 * ["COMPLETE"]
    for trial in trials:
        size = json.loads(trial.params["sizes"])[0]
        # Of the two seeds' evaluations, seed + size - 1/2, on the scale of [scores]
        assert trial.value == pytest.approx((1.5 + size - 0.5 - 1) / 10)
    first = {trial.params["sizes"]: trial.number for trial in reversed(trials)}
    best = sorted(first, key=lambda sizes: -json.loads(sizes)[0])[:2]
    finals = searches.out / "finals"
    expected = {"default": [1, 2]} | {f"trial-{first[sizes]}": json.loads(sizes) for sizes in best}
    names = {f"Good-v0__fake__{name}__{seed}": name for name in expected for seed in (3, 4, 5)}
    assert {path.name for path in (finals / "runs").iterdir()} == set(names)
    for run, name in names.items():
        args = json.loads((finals / "runs" / run / "config.json").read_text())["args"]
        assert args["sizes"] == expected[name] and args["fast"] is False
    for name, sizes in expected.items():  # seed 4 is in the middle
        assert f"\n{name}: {(4 + sizes[0] - 0.5 - 1) / 10:.3f} in 3 runs; " in said
    report = searches.out / "report"
    assert all(name in (report / "report.html").read_text() for name in expected)
    page = (report / "trials.html").read_text()
    assert page.count("Plotly.newPlot") == 4 and '"parcoords"' in page
    assert pd.read_csv(report / "trials.csv")["value"].tolist() == [x.value for x in trials]
    # More trials, of which another one wins
    study = search.open_study(search.Search(searches.path), searches.out)
    study.add_trial(optuna.create_trial(**WINNER))
    searches.run("--trials", "7", "--seeds", "1", "--finalists", "1")
    assert len(searches.trials()) == 7
    assert (searches.out / "finals" / "runs" / "Good-v0__fake__trial-5__3").is_dir()
    assert all(steps == list("123456") for steps in searches.steps().values())


def test_no_two_of_the_best_trials_have_the_same_flags(searches):
    study = optuna.create_study(direction="maximize")
    for value, sizes in ((1, "[2, 1]"), (3, "[7, 1]"), (2, "[7, 1]"), (1.5, "[4, 1]")):
        study.add_trial(
            optuna.create_trial(**WINNER | {"value": value, "params": {"sizes": sizes}})
        )
    found = search.best_trials(study, search.Search(searches.write(["Good-v0"])), 2)
    assert list(found.items()) == [("trial-1", {"sizes": [7, 1]}), ("trial-3", {"sizes": [4, 1]})]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_search_goes_on_with_its_trial(searches, signum):
    """At once, when its sweep may still be saving. No step is lost or done twice."""
    searches.write(["Gate-v0"], seeds=1)
    process = searches.start("--trials", "2", "--seeds", "0")
    run_dir = searches.run_dir(0, "Gate-v0__fake__1")
    searches.lab.wait_for(lambda: (run_dir / "checkpoint.pt").read_text() == "2")
    (before,) = searches.trials()
    process.send_signal(signum)
    searches.lab.finish(process)
    assert {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}[signum.name] == process.returncode
    other = searches.out / "trials" / "1"
    other.mkdir(parents=True)
    (other / "go").touch()  # its run finds the gate open
    searches.run("--trials", "2", "--seeds", "0")
    after, _ = searches.trials()
    assert after.params == before.params and after.state.name == "COMPLETE"
    steps = searches.steps()
    assert len(steps) == 2 and all(found == list("123456") for found in steps.values())


def test_a_sweep_begins_when_the_one_before_has_let_the_folder_go(tmp_path):
    """That of a killed search may take an iteration to save."""
    lock = FileLock(tmp_path / "lock", thread_local=False)
    lock.acquire()
    threading.Timer(0.3, lock.release).start()
    with search.sweep(tmp_path, []):
        assert not lock.is_locked


def test_two_commands_share_the_trials(searches):
    searches.write(["Good-v0"], seeds=1)
    flags = ("--trials", "4", "--seeds", "1", "--finalists", "1")
    processes = [searches.start(*flags) for _ in range(2)]
    said = [searches.lab.finish(process) for process in processes]
    assert {code for code, _ in said} == {0}, said
    assert [trial.state.name for trial in searches.trials()] == 4 * ["COMPLETE"]
    steps = searches.steps()
    assert len(steps) == 6 and all(found == list("123456") for found in steps.values())
    assert min(sum(line.startswith("trial ") for line in x.split("\n")) for _, x in said) > 0


def test_a_script_of_this_repository_keeps_its_name(tmp_path):
    """It is elsewhere on another machine, and in a container."""
    path = tmp_path / "my_search.toml"
    path.write_text(
        '[[runs]]\nscript = "vpg"\nenv_ids = ["CartPole-v1"]\nseeds = 1\n'
        "[ranges]\ngamma = { low = 0.9, high = 0.99 }\n[scores]\nCartPole-v1 = [0, 500]\n"
    )
    search.Search(path).write_suite(tmp_path / "suite.toml", {"": {"gamma": 0.9}})
    assert 'script = "vpg"\n' in (tmp_path / "suite.toml").read_text()


def test_a_trial_is_taken_by_one_command_alone(searches):
    """And by another one when that has ended."""
    study = search.open_study(search.Search(searches.write(["Good-v0"])), searches.out)
    lock, first = search.take_trial(study, searches.out, 2)
    other, second = search.take_trial(study, searches.out, 2)
    assert (first.number, second.number) == (0, 1)
    assert search.take_trial(study, searches.out, 2) is None
    lock.lock.release()
    lock, again = search.take_trial(study, searches.out, 2)
    assert again.number == 0
    lock.lock.release()
    other.lock.release()


def test_a_trial_that_has_just_ended_is_not_taken_again(searches, monkeypatch):
    """Another command may tell it, and let it go, between two looks at the study."""
    study = search.open_study(search.Search(searches.write(["Good-v0"])), searches.out)
    lock, trial = search.take_trial(study, searches.out, 1)
    running = study.get_trials(states=(TrialState.RUNNING,))
    assert [left.number for left in running] == [0]
    study.tell(trial, 1.0)
    lock.lock.release()
    now = study.get_trials
    monkeypatch.setattr(
        study, "get_trials", lambda *args, states=None, **more: running if states else now()
    )
    assert search.take_trial(study, searches.out, 1) is None


def test_a_script_that_is_broken_for_a_while_costs_no_trial(searches):
    searches.write(["Gate-v0"], seeds=1)
    process = searches.start("--trials", "2", "--seeds", "0")
    run_dir = searches.run_dir(0, "Gate-v0__fake__1")
    searches.lab.wait_for(lambda: (run_dir / "checkpoint.pt").read_text() == "2")
    script = searches.lab.script.read_text()
    searches.lab.script.write_text("no python")
    for number in ("0", "1"):
        (searches.out / "trials" / number).mkdir(exist_ok=True)
        (searches.out / "trials" / number / "go").touch()
    code, said = searches.lab.finish(process)
    assert code == 2 and "error: can't import" in said and "Traceback" not in said
    assert [trial.state.name for trial in searches.trials()] == ["COMPLETE", "RUNNING"]
    searches.lab.script.write_text(script)
    searches.run("--trials", "2", "--seeds", "0")
    assert [trial.state.name for trial in searches.trials()] == ["COMPLETE", "COMPLETE"]


def test_a_search_made_again_tries_the_same_values(searches):
    """Also where a command was killed before it had drawn a trial's."""
    flags = FLAGS.replace(RANGE, "low = 0.0, high = 1.0")
    assert search.make_sampler(0)._multivariate
    file = search.Search(searches.write(["Good-v0"], flags=flags))
    found = {"a": [], "b": []}
    for name, values in found.items():
        study = search.open_study(file, searches.out / name)
        for number in range(14):  # the first ten are uniform draws
            lock, trial = search.take_trial(study, searches.out / name, 14)
            if name == "b":
                lock.lock.release()
                study = search.open_study(file, searches.out / name)
                lock, trial = search.take_trial(study, searches.out / name, 14)
            assert trial.number == number
            values.append(file.suggest(trial)["sizes"])
            study.tell(trial, -((values[-1] - 0.3) ** 2))
            lock.lock.release()
    assert found["a"] == found["b"] and len(set(found["a"])) == 14


def test_new_trials_are_near_the_good_ones(searches):
    """By TPE: values of a uniform draw would be 0.34 away on average."""
    study = search.open_study(search.Search(searches.write(["Good-v0"])), searches.out)
    study.sampler = search.make_sampler(1)
    ranges = {"x": optuna.distributions.FloatDistribution(0, 1)}
    for x in np.linspace(0, 1, 41):
        study.add_trial(
            optuna.create_trial(value=-abs(x - 0.8), params={"x": x}, distributions=ranges)
        )
    found = [study.ask(ranges).params["x"] for _ in range(20)]
    assert np.abs(np.array(found) - 0.8).mean() < 0.2


def test_a_trial_that_loses_to_the_best_one_is_pruned(searches):
    """When seeds enough have said so. Pruned ones count as trials, and don't win."""
    flags = FLAGS.replace("[2, 1], [7, 1], [4, 1]", "[2, 1]")
    path = searches.write(["Good-v0"], seeds=12, flags=flags)
    study = search.open_study(search.Search(path), searches.out)
    best = study.ask()
    best.suggest_categorical("sizes", ["[2, 1]"])
    for step in range(12):
        best.report(9.0, step)
    study.tell(best, 9.0)
    searches.run("--trials", "2", "--seeds", "0", "--workers", "1")
    trial = searches.trials()[1]
    assert trial.state.name == "PRUNED"
    finished = list((searches.out / "trials" / "1").rglob("evaluation.json"))
    assert 3 < len(finished) < 12
    values = pd.read_csv(searches.out / "report" / "trials.csv")["value"]
    np.testing.assert_array_equal(values, [9.0, np.nan])


def test_failed_runs_score_0(searches):
    searches.write(["Never-v0", "Good-v0"], seeds=3)  # the first ones are scored last
    flags = ("--trials", "1", "--seeds", "3", "--finalists", "1", "--retries", "0")
    said = searches.run(*flags, code=1)
    (trial,) = searches.trials()
    size = json.loads(trial.params["sizes"])[0]
    scores = [0, 0, 0, *((seed + size - 1.5) / 10 for seed in (1, 2, 3))]
    value = np.sort(scores)[1:-1].mean()  # without a quarter, rounded down
    defaults = [0, 0, 0, *((seed - 0.5) / 10 for seed in (4, 5, 6))]
    assert f"\ndefault: {np.sort(defaults)[1:-1].mean():.3f} in 6 runs; " in said
    assert trial.value == pytest.approx(value)
    assert [trial.intermediate_values[step] for step in range(6)] == pytest.approx(scores)


def test_a_trial_all_of_whose_runs_fail_has_0(searches):
    """And the search goes on. Its end says that the best trial's runs have failed."""
    searches.write(["Never-v0"], seeds=1)
    searches.run("--trials", "2", "--seeds", "1", "--retries", "0", code=1)
    assert [trial.value for trial in searches.trials()] == [0.0, 0.0]
    assert (searches.out / "report" / "report.html").exists()
    starts = [path.read_text() for path in searches.out.rglob("starts.txt")]
    assert len(starts) > 2 and {text.count("\n") for text in starts} == {1}  # --retries 0


def test_values_that_the_script_refuses_do_not_come_into_the_finals(searches):
    searches.write(["Good-v0"], flags=f"{FLAGS}total_timesteps = {{ choices = [0] }}\n")
    said = searches.run("--trials", "1", "--seeds", "1", code=2)
    assert "trial 0 can't be run: " in said and "error: no trial has a value" in said
    assert "error: --total-timesteps must be above 0" in said
    assert [trial.state.name for trial in searches.trials()] == ["PRUNED"]


def test_only_one_command_does_the_finals(searches):
    searches.write(["Good-v0"], seeds=1)
    searches.run("--trials", "1", "--seeds", "0")
    with FileLock(searches.out / "finals.lock"):
        said = searches.run("--trials", "1", "--seeds", "1")
    assert "the finals are in the hands of another command" in said
    assert not (searches.out / "finals").exists()


def test_a_trial_whose_runs_are_lost_is_not_told(searches):
    """Here somebody ends its sweep. A run that has failed before may be tried once more."""
    searches.write(["Crash-v0", "Gate-v0"], seeds=1)
    process = searches.start("--trials", "1", "--seeds", "0", "--retries", "0")
    failed = searches.run_dir(0, "Crash-v0__fake__1") / "failed"
    searches.lab.wait_for(failed.read_text)
    run_dir = searches.run_dir(0, "Gate-v0__fake__1")
    searches.lab.wait_for(lambda: (run_dir / "checkpoint.pt").read_text() == "2")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    code, said = searches.lab.finish(process)
    assert code == 143 and "trial 0 isn't finished" in said
    assert searches.trials()[0].state.name == "RUNNING"
    searches.run("--trials", "1", "--seeds", "0", "--retry-failed")
    (trial,) = searches.trials()
    size = json.loads(trial.params["sizes"])[0]
    assert trial.value == pytest.approx((size - 0.5) / 10) and trial.state.name == "COMPLETE"


def test_a_return_that_is_no_number_or_worse_than_bad_scores_0(searches, tmp_path):
    found = search.Search(searches.write(["Good-v0"]))
    infinite = float("inf")
    for returns, score in (([6.0, 8.0], 0.6), ([6.0, float("nan")], 0), ([infinite], 0), ([-1], 0)):
        (tmp_path / "evaluation.json").write_text(json.dumps({"returns": returns}))
        assert found.score(SimpleNamespace(env_id="Good-v0"), tmp_path) == pytest.approx(score)


@pytest.mark.parametrize(
    "env_id, flags, code, words",
    [
        ("Nothing-v0", (), 1, "trial 0 isn't finished: nothing came to be; "),
        ("Good-v0", ("--status",), 2, "--status and --dry-run are for benchmark.sweep"),
        ("Good-v0", ("--dry-run",), 2, "--status and --dry-run are for benchmark.sweep"),
        ("Good-v0", ("--workers", "0"), 2, "error: --workers must be above 0"),
        ("Good-v0", ("--trials", "0"), 2, "--trials and --finalists must be above 0"),
        ("Good-v0", ("--finalists", "0"), 2, "--trials and --finalists must be above 0"),
        ("Good-v0", ("--seeds", "-1"), 2, "--seeds not below"),
        ("Good-v0", ("--trails", "1"), 2, "--trails"),
    ],
)
def test_what_cannot_work_ends_the_search(searches, env_id, flags, code, words):
    searches.write([env_id], seeds=1)
    assert words in searches.run(*flags, code=code)
    assert code == 1 or not searches.out.exists()


def test_the_folder_of_a_sweep_is_refused(searches):
    searches.lab.make_suite("Good-v0")
    assert searches.lab.run_sweep()[0] == 0
    searches.write(["Good-v0"], seeds=1)
    searches.out = searches.lab.out
    assert "is the folder of a sweep: choose another --dir" in searches.run(code=2)
    assert not (searches.out / "journal.log").exists()


def test_a_search_without_dir_is_in_searches(searches, tmp_path):
    searches.write(["Good-v0"])
    (tmp_path / "searches" / "my_search" / "runs").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmark.search", searches.path],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "searches/my_search is the folder of a sweep" in done.stderr


def test_another_file_needs_another_folder(searches):
    searches.write(["Good-v0"], seeds=1)
    searches.run("--trials", "1", "--seeds", "0")
    copied = (searches.out / "search.toml").stat()
    searches.path = searches.path.rename(searches.path.with_name("renamed.toml"))
    searches.run("--trials", "2", "--seeds", "0")
    assert len(searches.trials()) == 2
    # A disk that is full now can't leave half a copy
    assert (searches.out / "search.toml").stat().st_mtime_ns == copied.st_mtime_ns
    searches.write(["Good-v0"], seeds=1, scores=SCORES.replace("11", "12"))
    assert "was made by another renamed.toml: choose another --dir" in searches.run(code=2)


@pytest.mark.parametrize(
    "change, words",
    [
        (("sizes = {", "# {"), "has no ranges"),
        (("Good-v0 = [1, 11]", ""), "[scores] must have Good-v0 = "),
        (("Good-v0 = [1, 11]", "Good-v0 = [1, 1]"), "[scores] must have Good-v0 = "),
        (("Good-v0 = [1, 11]", "Good-v0 = [11, 1]"), "[scores] must have Good-v0 = "),
        (("Good-v0 = [1, 11]", "Good-v0 = 5"), "[scores] must have Good-v0 = "),
        (("Good-v0 = [1, 11]", "Good-v0 = [1, nan]"), "[scores] must have Good-v0 = "),
        (("Good-v0 = [1, 11]", "Good-v0 = [1, 2, 3]"), "[scores] must have Good-v0 = "),
        (("sizes = {", "sizes = 5 # {"), "the range of sizes is wrong: "),
        (("sizes = {", "size = {"), "a script has no flag size"),
        (("sizes = {", "seed = { low = 1, high = 9 } # {"), "a search can't set seed"),
        (("sizes = {", "init_from = { choices = ['x'] } # {"), "a search can't set init_from"),
        (("fast =", "slow ="), "a suite can't set slow for fake.py"),
        (("[runs.flags]", "[runs.variants]\na = {}\n[runs.flags]"), "a search has no variants"),
        (("seeds = 2", "seeds = [4294967295]"), "seeds must be different whole numbers from 0 to"),
        (("seeds = 2", "seeds = [1, 1]"), "seeds must be different whole numbers from 0 to"),
        ((RANGE, "choices = []"), "the range of sizes is wrong: "),
        (("choices", "chocies"), "the range of sizes is wrong: "),
        ((RANGE, "low = 3"), "the range of sizes is wrong"),
        ((RANGE, "low = 3, high = 2"), "the range of sizes is wrong"),
        ((RANGE, "low = 0, high = 2, log = true"), "the range of sizes is wrong"),
        ((RANGE, "low = 0.5, high = 1, log = '1 - x'"), "the range of sizes is wrong"),
        ((RANGE, "low = 0.5, high = 0.9, log = '1-x'"), 'or "1 - x", not'),
        ((RANGE, "low = nan, high = 1"), "the range of sizes is wrong"),
        (("= 6", "= -5"), "error: --total-timesteps must be above 0"),
        (("fake.py", "none.py"), "there is no script none.py"),
        (("[[runs]]", "[[runs]"), "can't read "),
        (("[[runs]]", "[runs]"), "must have tables [[runs]], [ranges], [scores] and"),
        (("[scores]", "[points]"), "must have tables [[runs]], [ranges], [scores] and"),
    ],
)
def test_wrong_files_are_refused_with_one_sentence(searches, change, words):
    path = searches.write(["Good-v0"])
    text = path.read_text()
    assert text.count(change[0]) == 1
    path.write_text(text.replace(*change))
    with pytest.raises(SuiteError) as error:
        search.Search(path)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert "my_search.toml" in str(error.value) or "[scores]" not in words


def test_all_tables_have_the_values_of_a_trial(searches):
    """In place of fixed ones, which the finals' default has."""
    text = searches.write(["Good-v0"]).read_text()
    fixed = "[[runs]]\nscript = 'fake.py'\nenv_ids = ['Gate-v0']\nseeds = 1\nflags.sizes = [9]\n"
    searches.path.write_text(fixed + text)
    found = search.Search(searches.path)
    path = searches.out / "suite.toml"
    runs = found.write_suite(path, {"": {"sizes": [5, 5]}})
    assert [run.flags["sizes"] for run in runs.values()] == 3 * [[5, 5]]
    runs = found.write_suite(path, {"default": {}, "trial-4": {"sizes": [5, 5]}}, [7])
    sizes = {name: run.flags.get("sizes") for name, run in runs.items()}
    assert sizes == {
        "Gate-v0__fake__default__7": [9],
        "Gate-v0__fake__trial-4__7": [5, 5],
        "Good-v0__fake__default__7": None,
        "Good-v0__fake__trial-4__7": [5, 5],
    }


def test_a_range_is_of_a_flag_that_all_scripts_have(searches):
    text = searches.write(["Good-v0"]).read_text()
    searches.path.write_text(
        "[[runs]]\nscript = 'vpg'\nenv_ids = ['CartPole-v1']\nseeds = 1\n" + text
    )
    with pytest.raises(SuiteError, match="a script has no flag sizes"):
        search.Search(searches.path)


def test_values_of_ranges():
    """Within them, whole where they are; even in log x or log(1 - x) where they say so."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    ranges = {
        "whole": {"low": 2, "high": 9},
        "real": {"low": 2.0, "high": 9},
        "log": {"low": 1e-5, "high": 1e-1, "log": True},
        "mirrored": {"low": 0.9, "high": 0.9999, "log": "1 - x"},
        "choice": {"choices": [[1, 2], None, "tanh", False]},
    }
    drawn = {name: [] for name in ranges}
    for _ in range(300):
        trial = study.ask()
        for name, spec in ranges.items():
            drawn[name].append(search.suggest(trial, name, **spec))
    assert set(drawn["whole"]) == set(range(2, 10))
    assert all(type(x) is int for x in drawn["whole"])
    assert 2 <= min(drawn["real"]) < 2.1 and 8.9 < max(drawn["real"]) <= 9
    assert np.median(np.log10(drawn["log"])) == pytest.approx(-3, abs=0.3)
    assert 0.9 <= min(drawn["mirrored"]) and max(drawn["mirrored"]) <= 0.9999
    assert np.median(np.log10(1 - np.array(drawn["mirrored"]))) == pytest.approx(-2.5, abs=0.25)
    assert {str(x) for x in drawn["choice"]} == {"[1, 2]", "None", "tanh", "False"}


def test_a_trial_has_what_the_file_has(searches):
    """Paths begin in the file's folder, as in a suite; all values of TOML are kept."""
    flags = FLAGS.replace("fast = false", "fast = false\ninit_from = 'old 😀'\nrate = inf")
    path = searches.write(["Good-v0"], flags=flags.replace("rate", "num_threads"))
    found = search.Search.__new__(search.Search)  # whose flags no script need have
    found.path, found.tables = path, search.read_file(path, ["ranges", "scores"])["runs"]
    runs = found.write_suite(searches.out / "trials" / "0" / "suite.toml", {"": {}})
    assert {run.script for run in runs.values()} == {searches.lab.script}
    expected = {"total_timesteps": 6, "fast": False, "num_threads": float("inf")}
    expected["init_from"] = str(path.parent / "old 😀")
    assert all(run.flags == expected for run in runs.values())
