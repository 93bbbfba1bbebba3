"""benchmark.sweep with a fast fake script that does what its env_id says, and a real one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import leaves

from benchmark import sweep, worker
from benchmark.suite import MOST_RUNS, SuiteError, read_suite

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sweeps run on Linux")
ROOT = Path(__file__).resolve().parent.parent

# Counts its steps up to 6, a checkpoint after each. Crash-v0 crashes at step 3, Hang-v0 hangs
# there, both only when they come from step 0; Never-v0 crashes at each start, BadInput-v0 ends with
# exit code 2.
FAKE = """
import argparse, json, os, signal, sys, time
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

def parse_args():
    parser = argparse.ArgumentParser()
    for field in fields(Args):
        flag = "--" + field.name.replace("_", "-")
        options = {"type": field.type}
        if field.type is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif field.type is tuple:
            options = {"nargs": "*", "type": int}
        parser.add_argument(flag, default=field.default, **options)
    args = Args(**vars(parser.parse_args()))
    if args.total_timesteps < 1:
        print("error: --total-timesteps must be above 0", file=sys.stderr)
        sys.exit(2)
    return args, None

if __name__ == "__main__":
    args, _ = parse_args()
    run = Path(args.resume or f"runs/{args.run_name}")
    run.mkdir(parents=True, exist_ok=True)
    checkpoint = run / "checkpoint.pt"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if args.resume:
        args = Args(**json.loads((run / "config.json").read_text())["args"])
    else:
        args.num_threads = args.num_threads or 2  # as a script does that chooses them
        (run / "config.json").write_text(json.dumps({"args": asdict(args)}))
    first, stop = step, []
    def request_stop(*_):
        if stop:  # as the real scripts
            os._exit(99)
        stop.append(1)
    signal.signal(signal.SIGTERM, request_stop)
    with open(run / "starts.txt", "a") as file:
        cores, threads = sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]
        print(cores, threads, time.time(), file=file)
    if args.env_id == "BadInput-v0":
        print("error: a sentence on what is wrong")
        sys.exit(2)
    while step < args.total_timesteps:
        if args.env_id == "Never-v0" or args.env_id == "Crash-v0" and step == 3 and first == 0:
            print("warming up")
            raise RuntimeError(f"[broken] at {step}")
        if args.env_id == "Hang-v0" and step == 3 and first == 0:
            time.sleep(600)
        step += 1
        with open(run / "steps.txt", "a") as file:
            print(step, file=file)
        speed = "[00:01<00:09, 12.50 steps/s, return -7.5]"
        print(f" 50%|##   | {step}/{args.total_timesteps} {speed}", flush=True)
        time.sleep(0.2)
        checkpoint.write_text(str(step))
        if stop:
            print("stopped")
            sys.exit(143)
    (run / "evaluation.json").write_text(json.dumps({"returns": [args.seed, args.seed + 1.0]}))
"""


def write_suite(folder, text):
    """Writes FAKE and a suite with one table [[runs]] of this text; returns the suite's path."""
    (folder / "fake.py").write_text(FAKE)
    (folder / "suite.toml").write_text(f'[[runs]]\nscript = "fake.py"\n{text}')
    return folder / "suite.toml"


def command(suite, folder, *flags):
    return [sys.executable, "-m", "benchmark.sweep", str(suite), "--runs", str(folder), *flags]


def start(*args):
    return subprocess.Popen(
        command(*args), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*args):
    return subprocess.run(command(*args), cwd=ROOT, capture_output=True, text=True, timeout=120)


def jobs_of(folder):
    return {
        name: worker.read_job(folder, name)
        for name in json.loads((folder / "sweep.json").read_text())["runs"]
    }


def wait_for(condition, seconds=60):
    """Waits until condition() is true; what isn't there yet is not."""
    end = time.time() + seconds
    while time.time() < end:
        try:
            if condition():
                return
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.02)
    pytest.fail("waited in vain")


def mean_of(folder, name):
    """The mean of a run's evaluation, None of one that isn't finished."""
    returns, _ = worker.read_evaluation(folder / "runs" / name)
    return returns and sum(returns) / len(returns)


def steps_of(folder, name):
    return [int(line) for line in (folder / "runs" / name / "steps.txt").read_text().split()]


def test_suite_is_the_product_of_environments_seeds_and_variants(tmp_path):
    suite = write_suite(
        tmp_path,
        """env_ids = ["Good-v0", "ALE/Pong-v5"]
seeds = [3, 8]
flags = { total_timesteps = 4, sizes = [5, 6] }
variants = { plain = {}, slow = { fast = false, total_timesteps = 9 } }""",
    )
    runs = read_suite(suite)
    assert [run.name for run in runs] == [
        f"{env}__fake__{variant}__{seed}"
        for variant in ("plain", "slow")
        for env in ("Good-v0", "ALE-Pong-v5")
        for seed in (3, 8)
    ]
    last = runs[-1]
    assert last.words == (
        "--env-id",
        "ALE/Pong-v5",
        "--seed",
        "8",
        "--run-name",
        "ALE-Pong-v5__fake__slow__8",
        "--total-timesteps",
        "9",
        "--sizes",
        "5",
        "6",
        "--no-fast",
    )
    assert last.args == {
        "env_id": "ALE/Pong-v5",
        "seed": 8,
        "run_name": last.name,
        "resume": "",
        "num_threads": 0,
        "total_timesteps": 9,
        "fast": False,
        "sizes": [5, 6],
    }
    assert last.script == str(tmp_path / "fake.py")


def two_tables(script):
    """The text of a suite whose second table is of another script."""
    return f"""env_ids = ["A"]
seeds = 1
[[runs]]
script = "{script}"
env_ids = ["B"]
seeds = 1"""


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('env_ids = ["A"\nseeds = 1', "can't read the suite"),
        ('env_ids = ["A"]', "without seeds"),
        ('env_ids = ["A"]\nseeds = 0', "no seeds, no env_ids or no variants"),
        ('env_ids = ["A"]\nseeds = 1\nvariants = {}', "no seeds, no env_ids or no variants"),
        ('env_ids = ["-x"]\nseeds = 1', "begins with - or is too long"),
        (f'env_ids = ["{"x" * 230}"]\nseeds = 1', "begins with - or is too long"),
        ('env_ids = "A"\nseeds = 1', "env_ids = 'A' is of the wrong type"),
        ('env_ids = ["A"]\nseeds = [-1]', "whole numbers from 0 to 2**32 - 1 as seeds"),
        ('env_ids = ["A"]\nseeds = [4294967296]', "whole numbers from 0 to 2**32 - 1 as seeds"),
        ('env_ids = ["A"]\nseeds = -1', "no seeds, no env_ids or no variants"),
        ('env_ids = ["A"]\nseeds = 100001', "100,001 runs, but 100,000 are the most"),
        ('env_ids = ["A"]\nseeds = 1000000000000', "1,000,000,000,000 runs"),
        (
            'env_ids = ["A", "B"]\nseeds = 30000\nvariants = { a = {}, b = {} }',
            "120,000 runs, but",
        ),
        ("env_ids = [1]\nseeds = 1", "strings as env_ids"),
        (two_tables("suite.toml"), "no script suite.toml"),
        (two_tables("other.py"), "can't import"),
        (two_tables("exits.py"), "SystemExit 3"),
        (two_tables("empty.py"), "no dataclass Args"),
        (two_tables("raises.py"), "ValueError"),
        (two_tables("one.py"), "parse_args of one.py"),
        ('env_ids = ["A"]\nseeds = true', "seeds = True is of the wrong type"),
        ('env_ids = ["A"]\nseeds = 1\nenvs = 3', "unknown key envs"),
        ('env_ids = ["A", "A"]\nseeds = 1', "A__fake__1 more than once"),
        ('env_ids = ["A", "A"]\nseeds = 9', "A__fake__3 and 6 others more than once"),
        (two_tables("copy/fake.py"), "two scripts"),
        ('env_ids = ["A"]\nseeds = 1\nflags = { stride = 3 }', "stride is no flag of fake.py"),
        (
            'env_ids = ["A"]\nseeds = 1\nflags = { seed = 3 }',
            "seed is no flag of fake.py that a suite may set",
        ),
        (
            'env_ids = ["A"]\nseeds = 1\nflags = { total_timesteps = 0 }',
            "--total-timesteps must be above 0",
        ),
        ('env_ids = ["A"]\nseeds = 1\nvariants = { a = 1 }', "the variant a must be a table"),
        (two_tables("fakes"), "there is no script fakes"),
        ('env_ids = ["A"]\nseeds = 1\n[[walks]]\n', "must have tables [[runs]] and nothing else"),
    ],
)
def test_bad_suites_are_refused_in_one_sentence(tmp_path, text, sentence):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "fake.py").write_text(FAKE)
    (tmp_path / "other.py").write_text("no python")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    (tmp_path / "empty.py").write_text("")
    args = (
        "import dataclasses\n@dataclasses.dataclass\nclass Args:\n    x: int = 1\n"
        "def parse_args():\n    "
    )
    (tmp_path / "raises.py").write_text(f"{args}raise ValueError('no')")
    (tmp_path / "one.py").write_text(f"{args}return Args()")
    with pytest.raises(SuiteError) as error:
        read_suite(write_suite(tmp_path, text))
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, number",
    [
        ("ppo_mujoco", 70),
        ("ppo_atari", 9),
        ("ddpg_mujoco", 14),
        ("ppo_ablation", 90),
        ("ladder_cartpole", 40),
        ("ladder_lunarlander", 40),
        ("ppo_swimmer", 5),
        ("ppo_lstm", 10),
        ("ppo_atari_lstm", 9),
        ("smoke", 8),
    ],
)
def test_suites_of_the_repository_are_valid(name, number):
    assert len(read_suite(ROOT / "benchmark" / "suites" / f"{name}.toml")) == number


def test_smoke_suite_has_every_script():
    runs = read_suite(ROOT / "benchmark" / "suites" / "smoke.toml")
    assert {Path(run.script) for run in runs} == set(ROOT.glob("*.py"))


@pytest.mark.parametrize("text", ["runs = [1, 2]", "runs = []", "runs = 3", ""])
def test_suites_without_tables_of_runs_are_refused(tmp_path, text):
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(SuiteError, match="must have tables"):
        read_suite(tmp_path / "suite.toml")


def test_a_script_may_import_its_neighbours(tmp_path):
    suite = write_suite(tmp_path, 'env_ids = ["A"]\nseeds = 1')
    (tmp_path / "fake.py").write_text(f"import neighbour_of_fake\n{FAKE}")
    (tmp_path / "neighbour_of_fake.py").touch()
    assert len(read_suite(suite)) == 1


def test_a_suite_of_the_most_runs(tmp_path):
    """Its check takes time that grows with them, not with their square."""
    runs = read_suite(write_suite(tmp_path, f'env_ids = ["A"]\nseeds = {MOST_RUNS}'))
    assert len(runs) == len({run.name for run in runs}) == MOST_RUNS


def test_a_script_that_is_read_changes_nothing_of_the_sweep(tmp_path):
    """Real ones set a hook for errors and look for modules in the current folder."""
    suite = write_suite(tmp_path, 'env_ids = ["A"]\nseeds = 1')
    begin = "def parse_args():\n"
    assert FAKE.count(begin) == 1
    change = "    sys.excepthook = print\n    sys.path.append('elsewhere')\n"
    (tmp_path / "fake.py").write_text(FAKE.replace(begin, begin + change))
    before = (list(sys.path), sys.excepthook, list(sys.argv))
    read_suite(suite)
    assert (sys.path, sys.excepthook, sys.argv) == before


def test_runs_that_begin_with_networks_of_another_find_it_from_the_suites_folder(tmp_path):
    """The sweep's folder, in which they run, is another."""
    (tmp_path / "suites").mkdir()
    suite = write_suite(
        tmp_path / "suites", 'env_ids = ["A"]\nseeds = 1\nflags = { init_from = "../old/one" }'
    )
    field = '    resume: str = ""\n'
    assert FAKE.count(field) == 1
    (suite.parent / "fake.py").write_text(FAKE.replace(field, f'{field}    init_from: str = ""\n'))
    (run,) = read_suite(suite)
    assert run.args["init_from"] == str(tmp_path / "old" / "one")
    assert run.words[-2:] == ("--init-from", str(tmp_path / "old" / "one"))


def test_a_real_script_says_what_is_wrong_with_its_flags(tmp_path):
    text = """[[runs]]
script = "vpg"
env_ids = ["CartPole-v1"]
seeds = 1
flags = {{ hidden_sizes = [3, 5], {} }}
"""
    suite = tmp_path / "suite.toml"
    suite.write_text(text.format("eval_episodes = 0"))
    (run,) = read_suite(suite)
    assert run.args["hidden_sizes"] == [3, 5] and run.args["eval_episodes"] == 0
    suite.write_text(text.format('init_from = "gone"'))
    with pytest.raises(SuiteError, match=f"{tmp_path}/gone/checkpoint.pt is missing"):
        read_suite(suite)


@pytest.mark.parametrize(
    "content", ["", '{"returns": [1.0', "[]", "{}", '{"returns": 3}', '{"returns": ["1"]}', "["]
)
def test_an_evaluation_that_cannot_be_read_is_no_end(tmp_path, content):
    """Whatever is known of the run: its state is shown as waiting, with what is wrong."""
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "jobs").mkdir()
    worker.write_job(tmp_path, "a", {"state": "finished"})
    evaluation = tmp_path / "runs" / "a" / "evaluation.json"
    evaluation.write_text(content)
    returns, damage = worker.read_evaluation(evaluation.parent)
    assert returns is None and damage.startswith("evaluation.json can't be read (")
    job = worker.read_job(tmp_path, "a")
    assert job["state"] == "waiting"
    (note,) = sweep.make_table(tmp_path, {"a": job}).columns[-1].cells
    assert note == damage.replace("[", "\\[") if "[" in damage else note == damage
    evaluation.write_text('{"returns": [1, 2.5]}')
    assert worker.read_evaluation(evaluation.parent) == ([1.0, 2.5], "")
    assert worker.read_job(tmp_path, "a")["state"] == "finished"


def test_a_run_without_evaluation_episodes_is_finished(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "evaluation.json").write_text('{"returns": [], "lengths": []}')
    job = worker.read_job(tmp_path, "a")
    assert job["state"] == "finished"
    *_, value, note = (
        list(column.cells) for column in sweep.make_table(tmp_path, {"a": job}).columns
    )
    assert (value, note) == ([""], [""])


def test_a_run_whose_evaluation_is_damaged_is_evaluated_again(tmp_path):
    suite = write_suite(
        tmp_path, 'env_ids = ["Good-v0"]\nseeds = 2\nflags = { total_timesteps = 2 }'
    )
    folder = tmp_path / "out"
    assert run(suite, folder).returncode == 0
    (folder / "runs" / "Good-v0__fake__1" / "evaluation.json").write_text("")
    status = [sys.executable, "-m", "benchmark.status", folder]
    said = subprocess.run(status, cwd=ROOT, capture_output=True, text=True).stdout
    assert "1 waiting, 0 failed, 1 finished" in said and "evaluation.json can't be read" in said
    assert run(suite, folder).returncode == 0
    assert [mean_of(folder, f"Good-v0__fake__{seed}") for seed in (1, 2)] == [1.5, 2.5]
    starts = [
        len((folder / "runs" / f"Good-v0__fake__{seed}" / "starts.txt").read_text().splitlines())
        for seed in (1, 2)
    ]
    assert starts == [2, 1]


def test_progress_is_read_from_the_last_line(tmp_path):
    log = tmp_path / "log"
    assert worker.read_progress(log) == {}
    log.write_text("no C++ compiler\n")
    assert worker.read_progress(log) == {}
    log.write_text(
        "  1%|1  | 9900/1000000 [00:10<16:26, 1003.89 steps/s]\n"
        "  1%|1   | 11900/1000000 [00:15<18:16, 901.19 steps/s, return -282.9]\n"
        "evaluation: -1.5 +- 0.9 over 10 episodes, no noise\n"
    )
    assert worker.read_progress(log) == {
        "step": "11900",
        "steps": "1000000",
        "eta": "18:16",
        "speed": "901.19 steps/s",
        "return": "-282.9",
    }
    with open(log, "a") as file:
        file.write("a line of a stack trace\n" * 500)
    assert worker.read_progress(log)["step"] == "11900"


def test_a_removed_run_is_run_again(tmp_path):
    suite = write_suite(
        tmp_path, 'env_ids = ["Good-v0"]\nseeds = 1\nflags = { total_timesteps = 2 }'
    )
    folder = tmp_path / "out"
    for _ in range(2):
        assert run(suite, folder).returncode == 0
        assert steps_of(folder, "Good-v0__fake__1") == [1, 2]
        shutil.rmtree(folder / "runs" / "Good-v0__fake__1")


def test_a_network_folder_that_is_away_for_a_moment_does_not_end_the_sweep(
    tmp_path, monkeypatch, capsys
):
    class Engine:
        stops_are_final = False

        def running(self):
            return set()

        def room(self):
            return 1

        def start(self, names):
            (tmp_path / "runs" / "a").mkdir(parents=True)
            (tmp_path / "runs" / "a" / "evaluation.json").write_text('{"returns": [1.0]}')

    def away(*_):
        raise OSError("stale")

    (tmp_path / "jobs").mkdir()
    monkeypatch.setattr(sweep, "progress_lines", away)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert sweep.Sweep(tmp_path, {"a": None}, Engine(), 1).run() == 0
    assert "stale: trying again" in capsys.readouterr().out


def test_failed_runs_are_resumed_and_at_last_named(tmp_path):
    """One crashes and is resumed, one never works, one has bad input, one hangs.

    The good one is not held up.
    """
    suite = write_suite(
        tmp_path,
        'env_ids = ["Hang-v0", "Crash-v0", "Never-v0", "BadInput-v0", "Good-v0"]\nseeds = 1',
    )
    done = run(suite, tmp_path / "out", "--stall-minutes", "0.03", "--retries", "2")
    assert done.returncode == 1, done.stderr
    jobs = {name.split("-")[0]: job for name, job in jobs_of(tmp_path / "out").items()}
    assert {name: (job["state"], job["failures"]) for name, job in jobs.items()} == {
        "Crash": ("finished", 1),
        "Never": ("failed", 3),
        "BadInput": ("failed", 1),
        "Hang": ("finished", 1),
        "Good": ("finished", 0),
    }
    assert jobs["Never"]["error"] == "RuntimeError: [broken] at 0 (exit code 1)"
    assert jobs["BadInput"]["error"] == "error: a sentence on what is wrong (exit code 2)"
    results = [mean_of(tmp_path / "out", f"{name}-v0__fake__1") for name in ("Good", "Never")]
    assert results == [1.5, None]
    for name in ("Crash", "Hang", "Good"):  # nothing is lost and nothing done twice
        assert steps_of(tmp_path / "out", f"{name}-v0__fake__1") == [1, 2, 3, 4, 5, 6]
    table = done.stdout[done.stdout.rindex("0 running") :]
    assert (
        "0 waiting, 2 failed, 3 finished" in table
        and "RuntimeError: [broken] at 0 (exit code 1)" in table
    )
    log = (tmp_path / "out" / "logs" / "Never-v0__fake__1.log").read_text()
    assert log.count("Traceback") == 3
    again = run(suite, tmp_path / "out")
    assert again.returncode == 1 and "3 finished" in again.stdout.splitlines()[0]
    assert steps_of(tmp_path / "out", "Good-v0__fake__1") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_sweep_that_is_stopped_goes_on(tmp_path, signum):
    """Its runs end with it, none is done twice, and only then the folder is free again."""
    suite, folder = write_suite(tmp_path, 'env_ids = ["Good-v0"]\nseeds = 4'), tmp_path / "out"
    first = start(suite, folder, "--workers", "2")
    wait_for(
        lambda: (
            "finished" in {job["state"] for job in jobs_of(folder).values()}
            and any(
                int((path / "checkpoint.pt").read_text()) in (2, 3)
                for path in folder.glob("runs/*")
            )
        )
    )
    first.send_signal(signum)
    said = first.communicate(timeout=60)[0]
    if signum != signal.SIGKILL:
        assert first.returncode == 128 + signum and "the same command goes on" in said
        assert "running" not in {job["state"] for job in jobs_of(folder).values()}
    wait_for(lambda: run(suite, folder, "--workers", "2").returncode == 0)
    for seed in range(1, 5):
        assert steps_of(folder, f"Good-v0__fake__{seed}") == [1, 2, 3, 4, 5, 6]
    results = {name: mean_of(folder, name) for name in jobs_of(folder)}
    assert results == {f"Good-v0__fake__{seed}": seed + 0.5 for seed in range(1, 5)}
    starts = [len((path / "starts.txt").read_text().splitlines()) for path in folder.glob("runs/*")]
    assert sorted(set(starts)) == [1, 2]  # some were resumed, others untouched


def test_two_sweeps_on_one_folder_do_not_fight(tmp_path):
    suite, folder = write_suite(tmp_path, 'env_ids = ["Good-v0"]\nseeds = 2'), tmp_path / "out"
    first = start(suite, folder, "--workers", "1")
    wait_for(lambda: jobs_of(folder))
    second = run(suite, folder)
    assert (
        second.returncode == 2 and f"held by another sweep, process {first.pid} on" in second.stderr
    )
    assert first.wait(60) == 0


def test_runs_have_their_own_cores(tmp_path):
    suite, folder = write_suite(tmp_path, 'env_ids = ["Good-v0"]\nseeds = 2'), tmp_path / "out"
    cores = sorted(os.sched_getaffinity(0))
    assert run(suite, folder, "--workers", "2").returncode == 0
    starts = [path.read_text().rsplit(maxsplit=2) for path in folder.glob("runs/*/starts.txt")]
    assert sorted(core for core, *_ in starts) == [f"[{core}]" for core in cores[:2]]
    assert {threads for _, threads, _ in starts} == {"1"}
    ends = [path.stat().st_mtime for path in folder.glob("runs/*/evaluation.json")]
    assert max(float(began) for *_, began in starts) < min(ends)  # at the same time
    suite.write_text(suite.read_text().replace("= 2", "= 1\nflags = { total_timesteps = 1 }"))
    assert run(suite, tmp_path / "wide", "--cpus-per-run", "2", "--workers", "1").returncode == 0
    first = next((tmp_path / "wide").glob("runs/*/starts.txt"))
    core, threads, _ = first.read_text().rsplit(maxsplit=2)
    assert (core, threads) == (str(cores[:2]), "2")


def test_other_flags_are_no_reason_to_mix_runs(tmp_path):
    suite = write_suite(
        tmp_path, 'env_ids = ["Good-v0"]\nseeds = 1\nflags = { total_timesteps = 1 }'
    )
    assert run(suite, tmp_path / "out").returncode == 0
    suite.write_text(suite.read_text().replace("= 1 }", "= 2 }"))
    done = run(suite, tmp_path / "out")
    assert done.returncode == 2 and "was made with another total_timesteps" in done.stderr


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--workers", "1000"], "don't fit on"),
        (["--workers", "0"], "--workers must be above 0"),
        (["--cpus-per-run", "0"], "must be above 0"),
        (["--stall-minutes", "0"], "must be above 0"),
        (["--retries", "-1"], "--retries from 0"),
        (["--gpus-per-run", "1.5"], "whole number, or below 1"),
        (["--runs", ""], "--runs must name a folder"),
        (["--runs", "/proc/x"], "can't be the folder of a sweep"),
    ],
)
def test_bad_flags_are_refused(tmp_path, flags, sentence):
    done = run(write_suite(tmp_path, 'env_ids = ["Good-v0"]\nseeds = 1'), tmp_path / "out", *flags)
    assert done.returncode == 2 and sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_dry_run_runs_nothing(tmp_path):
    done = run(
        write_suite(tmp_path, 'env_ids = ["Good-v0"]\nseeds = 2'), tmp_path / "out", "--dry-run"
    )
    assert done.returncode == 0 and not (tmp_path / "out").exists()
    lines = done.stdout.splitlines()
    assert lines[1].endswith(
        f"{tmp_path / 'fake.py'} --env-id Good-v0 --seed 2 --run-name Good-v0__fake__2"
    )
    core = min(os.sched_getaffinity(0))
    assert lines[3].endswith(
        f"-m benchmark.worker {tmp_path / 'out'} Good-v0__fake__1 --threads 1 --cores {core}"
    )


def test_status_shows_a_sweep(tmp_path):
    suite = write_suite(
        tmp_path, 'env_ids = ["Good-v0", "Never-v0"]\nseeds = 1\nflags = { total_timesteps = 2 }'
    )
    run(suite, tmp_path / "out", "--retries", "0")
    status = [sys.executable, "-m", "benchmark.status"]
    done = subprocess.run([*status, tmp_path / "out"], cwd=ROOT, capture_output=True, text=True)
    assert "0 running, 0 waiting, 1 failed, 1 finished" in done.stdout and "[broken]" in done.stdout
    assert (
        "Good-v0__fake__1" in done.stdout
        and "2/2" in done.stdout
        and "looks after" not in done.stdout
    )
    nothing = subprocess.run(
        [*status, tmp_path / "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert nothing.returncode == 2 and "is no folder of a sweep" in nothing.stderr


def test_a_killed_sweep_of_a_real_script_ends_with_the_same_bits(tmp_path):
    text = """[[runs]]
script = "ppo_continuous_action"
env_ids = ["Pendulum-v1"]
seeds = 1
[runs.flags]
total_timesteps = 2048
num_steps = 128
num_minibatches = 4
compile = false
checkpoint_interval = 1
eval_episodes = 1
"""
    (tmp_path / "suite.toml").write_text(text)
    (planned,) = read_suite(tmp_path / "suite.toml")
    name = planned.name
    killed = start(tmp_path / "suite.toml", tmp_path / "killed")
    (tmp_path / "whole").mkdir()
    whole = subprocess.Popen(
        [sys.executable, planned.script, *planned.words], cwd=tmp_path / "whole"
    )

    def checkpoint(folder):
        path = tmp_path / folder / "runs" / name / "checkpoint.pt"
        return leaves(torch.load(path, weights_only=True))

    def iteration(folder):
        (found,) = (x for key, x in checkpoint(folder).items() if key.endswith("/iteration"))
        return found

    wait_for(lambda: iteration("killed") > 3)
    killed.kill()
    killed.wait()
    assert iteration("killed") < 16
    wait_for(lambda: run(tmp_path / "suite.toml", tmp_path / "killed").returncode == 0)
    assert whole.wait(60) == 0
    one = checkpoint("whole")
    other = checkpoint("killed")
    differ = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    # Nothing but times, sizes of the logs that hold them, and how it was begun
    same = ("/args/", "/iteration", "/agent", "/optimizer", "/envs", "/random", "/recent_returns")
    assert all(any(part in key for key in one) for part in same), list(one)
    own = ("/wall_seconds", "/log_sizes", "/args/resume")
    assert all(any(part in key for part in own) for key in differ), differ
    run_dirs = [tmp_path / folder / "runs" / name for folder in ("whole", "killed")]
    assert len({(path / "evaluation.json").read_text() for path in run_dirs}) == 1
