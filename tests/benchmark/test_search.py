"""Searches, with a fast fake script whose evaluation is better the larger its first size is."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import optuna
import pandas as pd
import pytest

from benchmark import search
from benchmark.suite import SuiteError, read_suite

FLAGS = """
[runs.flags]
total_timesteps = 6
fast = false
sizes = { choices = [[2, 1], [7, 1], [4, 1]] }
"""
SCORES = """
[scores]
Good-v0 = [1, 11]
Gate-v0 = [1, 11]
Never-v0 = [1, 11]
Nothing-v0 = [1, 11]
"""


class Searches:
    """A file in a lab's folder, and the folder of its search."""

    def __init__(self, lab):
        self.lab = lab
        self.out = lab.folder / "search"
        lab.write_suite("")

    def write(self, env_ids, seeds=2, flags=FLAGS, scores=SCORES):
        path = self.lab.folder / "my_search.toml"
        runs = f'[[runs]]\nscript = "fake.py"\nenv_ids = {json.dumps(env_ids)}\nseeds = {seeds}\n'
        path.write_text(runs + flags + scores)
        return path

    def start(self, *flags):
        path = self.lab.folder / "my_search.toml"
        return self.lab.start("-m", "benchmark.search", path, "--dir", self.out, *flags)

    def run(self, *flags, code=0):
        found, said = self.lab.finish(self.start(*flags))
        assert found == code, said
        return said

    def trials(self):
        storage = search.JournalFileBackend(str(self.out / "journal.log"))
        storage = optuna.storages.JournalStorage(storage)
        return optuna.load_study(study_name="my_search", storage=storage).trials

    def run_dir(self, trial, name):
        return self.out / "trials" / str(trial) / "runs" / name

    def steps(self):
        """{run's folder: the steps that it has made}"""
        return {path.parent: path.read_text().split() for path in self.out.rglob("steps.txt")}


@pytest.fixture
def searches(lab):
    return Searches(lab)


def test_a_search_ends_with_its_winner_beside_the_defaults(searches):
    searches.write(["Good-v0"])
    searches.run("--trials", "5", "--seeds", "3")
    trials = searches.trials()
    assert [trial.state.name for trial in trials] == 5 * ["COMPLETE"]
    for trial in trials:
        size = json.loads(trial.params["sizes"])[0]
        # Of the two seeds' evaluations, seed + size - 1/2, on the scale of [scores]
        assert trial.value == pytest.approx((1.5 + size - 0.5 - 1) / 10)
    best = max(json.loads(trial.params["sizes"])[0] for trial in trials)
    names = [
        f"Good-v0__fake__{variant}__{seed}"
        for variant in ("default", "winner")
        for seed in (3, 4, 5)
    ]
    runs = searches.out / "winner" / "runs"
    assert sorted(path.name for path in runs.iterdir()) == names
    for name in names:
        args = json.loads((runs / name / "config.json").read_text())["args"]
        assert args["sizes"] == ([best, 1] if "winner" in name else [1, 2])
        assert args["fast"] is False
    report = searches.out / "report"
    assert "winner" in (report / "report.html").read_text()
    page = (report / "trials.html").read_text()
    assert page.count("Plotly.newPlot") == 4 and '"parcoords"' in page
    assert pd.read_csv(report / "trials.csv")["value"].tolist() == [x.value for x in trials]
    searches.run("--trials", "6", "--seeds", "0")  # one more; the others and the winner stand
    assert len(searches.trials()) == 6
    assert all(steps == list("123456") for steps in searches.steps().values())


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_search_goes_on_with_its_trial(searches, signum):
    """No step is lost or done twice; nothing of it is left running."""
    searches.write(["Gate-v0"], seeds=1)
    process = searches.start("--trials", "2", "--seeds", "0")
    run_dir = searches.run_dir(0, "Gate-v0__fake__1")
    searches.lab.wait_for(lambda: (run_dir / "checkpoint.pt").read_text() == "2")
    (before,) = searches.trials()
    script = int((run_dir / "pid").read_text().split()[0])
    process.send_signal(signum)
    searches.lab.finish(process)
    searches.lab.wait_for(lambda: not os.path.exists(f"/proc/{script}"))
    assert (run_dir / "checkpoint.pt").read_text() == "3"
    assert {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 1}[signum.name] == process.returncode
    other = searches.out / "trials" / "1"
    other.mkdir(parents=True)
    (other / "go").touch()  # its run finds the gate open
    searches.run("--trials", "2", "--seeds", "0")
    after, _ = searches.trials()
    assert after.params == before.params and after.state.name == "COMPLETE"
    steps = searches.steps()
    assert len(steps) == 2 and all(found == list("123456") for found in steps.values())


def test_two_commands_share_the_trials(searches):
    searches.write(["Good-v0"], seeds=1)
    processes = [searches.start("--trials", "4", "--seeds", "1") for _ in range(2)]
    said = [searches.lab.finish(process) for process in processes]
    assert {code for code, _ in said} == {0}, said
    assert [trial.state.name for trial in searches.trials()] == 4 * ["COMPLETE"]
    steps = searches.steps()
    assert len(steps) == 6 and all(found == list("123456") for found in steps.values())
    assert min(sum(line.startswith("trial ") for line in x.split("\n")) for _, x in said) > 0


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


def test_failed_runs_score_0(searches):
    searches.write(["Good-v0", "Never-v0"], seeds=3)
    searches.run("--trials", "1", "--seeds", "0", "--retries", "0")
    (trial,) = searches.trials()
    size = json.loads(trial.params["sizes"])[0]
    scores = np.sort([0, 0, 0, *((seed + size - 1.5) / 10 for seed in (1, 2, 3))])
    assert trial.value == pytest.approx(scores[1:-1].mean())  # without a quarter, rounded down
    assert sorted(trial.intermediate_values.values()) == pytest.approx(scores)


@pytest.mark.parametrize(
    "env_id, flags, words",
    [
        ("Nothing-v0", (), "no run of trial 0 has finished: look into "),
        ("Good-v0", ("--workers", "0"), "trial 0: error: --workers must be above 0"),
        ("Good-v0", ("--trials", "0"), "--trials must be above 0"),
        ("Good-v0", ("--nonsense", "1"), "trial 0: "),
    ],
)
def test_what_cannot_work_ends_the_search(searches, env_id, flags, words):
    searches.write([env_id], seeds=1)
    assert words in searches.run(*flags, code=2)


def test_another_file_needs_another_folder(searches):
    searches.write(["Good-v0"], seeds=1)
    searches.run("--trials", "1", "--seeds", "0")
    searches.write(["Good-v0"], seeds=1, scores=SCORES.replace("11", "12"))
    assert "was made by another my_search.toml: choose another --dir" in searches.run(code=2)


@pytest.mark.parametrize(
    "change, words",
    [
        (("sizes = {", "sizes = [1, 2] # {"), "has no flag with a range"),
        (("Good-v0 = [1, 11]", ""), "[scores] must have Good-v0 = "),
        (("Good-v0 = [1, 11]", "Good-v0 = [1, 1]"), "[scores] must have Good-v0 = "),
        (("Good-v0 = [1, 11]", "Good-v0 = 5"), "[scores] must have Good-v0 = "),
        (("sizes = {", "size = {"), "a suite can't set size for fake.py"),
        (("choices = [[2, 1], [7, 1], [4, 1]]", "choices = []"), "the range of sizes is wrong: "),
        (("choices", "chocies"), "the range of sizes is wrong: "),
        (("{ choices = [[2, 1], [7, 1], [4, 1]] }", "{ low = 3 }"), "the range of sizes is wrong"),
        (("= 6", "= { low = 3, high = 2 }"), "the range of total_timesteps is wrong: "),
        (("= 6", "= { low = 0, high = 2, log = true }"), "the range of total_timesteps is wrong"),
        (("= 6", "= { low = 0.5, high = 1, log = '1 - x' }"), "the range of total_timesteps is"),
        (("= 6", "= { low = -5, high = -3 }"), "error: --total-timesteps must be above 0"),
        (("fake.py", "none.py"), "there is no script none.py"),
        (("[[runs]]", "[[runs]"), "can't read "),
        (("[[runs]]", "[runs]"), "must have tables [[runs]] and [scores] and nothing else"),
        (("[scores]", "[points]"), "must have tables [[runs]] and [scores] and nothing else"),
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


def test_two_tables_share_a_range(searches):
    path = searches.write(["Good-v0"])
    table = path.read_text().split("[scores]")[0]
    path.write_text(f"{table}{table.replace('Good', 'Gate')}{SCORES}")
    found = search.Search(path)
    runs = found.write_suite(Path(searches.out, "suite.toml"), {"sizes": [5, 5]})
    assert [run.flags["sizes"] for run in runs.values()] == 4 * [[5, 5]]
    other = table.replace("Good", "Gate").replace("[2, 1]", "[3, 1]")
    path.write_text(f"{table}{other}{SCORES}")
    with pytest.raises(SuiteError, match="two ranges of sizes"):
        search.Search(path)


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


def test_scripts_and_suites_are_found_from_elsewhere(searches):
    """A script's path begins in the file's folder, as in a suite."""
    path = searches.write(["Good-v0"])
    runs = search.Search(path).write_suite(searches.out / "trials" / "0" / "suite.toml", {})
    assert runs == read_suite(searches.out / "trials" / "0" / "suite.toml")
    assert {run.script for run in runs.values()} == {searches.lab.script}
