import shutil
import sys
from pathlib import Path

import pytest

from benchmark import ROOT
from benchmark.suite import SuiteError, read_args, read_suite

SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))


def test_a_suite_is_the_product_of_environments_seeds_and_variants(lab):
    suite = lab.write_suite(
        """env_ids = ["Good-v0", "ALE/Pong-v5"]
seeds = [3, 8]
flags = { total_timesteps = 4, sizes = [5, 6] }
variants = { plain = {}, slow = { fast = false, total_timesteps = 9 } }"""
    )
    runs = read_suite(suite)
    assert list(runs) == [
        f"{env}__fake__{variant}__{seed}"
        for variant in ("plain", "slow")
        for env in ("Good-v0", "ALE-Pong-v5")
        for seed in (3, 8)
    ]
    last = runs["ALE-Pong-v5__fake__slow__8"]
    words = "--env-id ALE/Pong-v5 --seed 8 --run-name ALE-Pong-v5__fake__slow__8"
    assert " ".join(last.words) == f"{words} --total-timesteps 9 --sizes 5 6 --no-fast"
    own = {"env_id": "ALE/Pong-v5", "seed": 8, "run_name": last.name}
    others = {"resume": "", "num_threads": 0, "init_from": ""}
    args = {"total_timesteps": 9, "fast": False, "sizes": [5, 6]}
    assert read_args(runs)[last.name] == own | others | args
    assert last.script == lab.script


def test_torchrun_starts_a_run_of_several_processes(lab):
    (run,) = read_suite(lab.write_suite('env_ids = ["A"]\nseeds = 1\nprocesses = 2')).values()
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run.program == [sys.executable, *words, str(lab.script)]
    (run,) = read_suite(lab.make_suite("A")).values()
    assert run.program == [sys.executable, str(lab.script)]


def test_a_table_without_variants_has_runs_without(lab):
    (run,) = read_suite(lab.make_suite("A")).values()
    assert (run.name, run.env_id, run.seed, run.flags) == ("A__fake__1", "A", 1, {})


def test_a_run_that_begins_with_the_networks_of_another_finds_it_from_the_suites_folder(lab):
    """The sweep's folder, in which it runs, is another."""
    suite = lab.write_suite('env_ids = ["A"]\nseeds = 1\nflags = { init_from = "../old/one" }')
    (run,) = read_suite(suite).values()
    assert run.flags["init_from"] == str(lab.folder.parent / "old" / "one")


SECOND = 'env_ids = ["A"]\nseeds = 1\n[[runs]]\nscript = "{}"\nenv_ids = ["B"]\nseeds = 1'
ARGS = "from dataclasses import dataclass\n@dataclass\nclass Args:\n    x: int = 1\n"
FUNCTIONS = "def read_flags(): ...\ndef check_args(args): ...\n"
SCRIPTS = {"broken": "no python", "exits": "raise SystemExit(3)", "empty": ARGS}
SCRIPTS |= {"few_flags": ARGS + FUNCTIONS, "no_dataclass": "class Args: ...\n" + FUNCTIONS}


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('env_ids = ["A"\nseeds = 1', "can't read the suite"),
        ('env_ids = ["A"]', "look at seeds"),
        ('env_ids = ["A"]\nseeds = 1\nenvs = 3', "look at envs"),
        ('env_ids = ["A"]\nseeds = 1\nprocesses = 0', "processes must be above 0"),
        ('env_ids = ["A"]\nseeds = 1\nprocesses = "2"', "processes = '2' is of the wrong type"),
        ('env_ids = ["A"]\nseeds = 0', "without runs"),
        ('env_ids = "A"\nseeds = 1', "env_ids = 'A' is of the wrong type"),
        ('env_ids = ["A"]\nseeds = true', "seeds = True is of the wrong type"),
        ('env_ids = ["A"]\nseeds = [-1]', "whole numbers from 0 to 2**32 - 1"),
        ('env_ids = ["A"]\nseeds = [4294967296]', "whole numbers from 0 to 2**32 - 1"),
        ('env_ids = ["A"]\nseeds = 1\nvariants = { a = 1 }', "a variant must be a table"),
        ('env_ids = ["A", "A"]\nseeds = 1', "A__fake__1 twice"),
        ('env_ids = ["A"]\nseeds = 1\n[[walks]]\n', "must have tables [[runs]] and nothing else"),
        (SECOND.format("suite.toml"), "there is no script suite.toml"),
        (SECOND.format("fakes"), "there is no script fakes"),
        (SECOND.format("broken.py"), "can't import"),
        (SECOND.format("exits.py"), "SystemExit 3"),
        (SECOND.format("empty.py"), "must have read_flags, check_args"),
        (SECOND.format("few_flags.py"), "must be a dataclass with env_id, resume, run_name, seed"),
        (SECOND.format("no_dataclass.py"), "Args of"),
        ('env_ids = ["A"]\nseeds = 1\nflags = { stride = 3 }', "can't set stride for fake.py"),
        ('env_ids = ["A"]\nseeds = 1\nflags = { seed = 3 }', "can't set seed for fake.py"),
        ('env_ids = ["A"]\nseeds = 1\nflags = { resume = "x" }', "can't set resume for fake.py"),
        ('env_ids = ["A"]\nseeds = 1\nflags = { run_name = "x" }', "can't set run_name for"),
        (
            'env_ids = ["A"]\nseeds = 1\nflags = { total_timesteps = 0 }',
            "fake.py --total-timesteps 0: error: --total-timesteps must be above 0",
        ),
        (
            'env_ids = ["A"]\nseeds = 1\nflags = { total_timesteps = 1979-05-27 }',
            "invalid int value: '1979-05-27'",
        ),
    ],
)
def test_bad_suites_are_refused_in_one_sentence(lab, text, sentence):
    suite = lab.write_suite(text)
    for name, script in SCRIPTS.items():
        (lab.folder / f"{name}.py").write_text(script)
    with pytest.raises(SuiteError) as error:
        read_args(read_suite(suite))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_tables_are_tables(tmp_path):
    (tmp_path / "suite.toml").write_text("runs = [1]")
    with pytest.raises(SuiteError, match="must have tables"):
        read_suite(tmp_path / "suite.toml")


def test_a_module_of_an_environment_is_in_the_name(lab):
    assert list(read_suite(lab.make_suite("mine:A-v0"))) == ["mine-A-v0__fake__1"]


def test_the_suites_folder_comes_first(lab):
    suite = lab.make_suite("A")
    (lab.folder / "ppo.py").write_text(lab.script.read_text())
    suite.write_text(suite.read_text().replace("fake.py", "ppo.py"))
    (run,) = read_suite(suite).values()
    assert run.script == lab.folder / "ppo.py"


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_of_the_repository_is_valid(path):
    """Its flags are ones that the scripts take, and its scripts those of the repository."""
    runs = read_suite(path)
    assert read_args(runs).keys() == runs.keys()
    assert {run.script.parent for run in runs.values()} == {ROOT}


def test_the_smoke_suite_has_every_script():
    runs = read_suite(ROOT / "benchmark" / "suites" / "smoke.toml")
    assert {run.script for run in runs.values()} == set(ROOT.glob("*.py"))


def test_a_script_may_import_its_neighbours(lab):
    suite = lab.make_suite("A")
    lab.script.write_text(f"import neighbour_of_fake\n{lab.script.read_text()}")
    (lab.folder / "neighbour_of_fake.py").touch()
    assert len(read_args(read_suite(suite))) == 1


def test_a_script_of_the_repository_says_what_is_wrong_with_its_flags(tmp_path):
    suite = tmp_path / "suite.toml"
    for flag, sentence in (
        ("eval_episodes = 0", "--eval-episodes must be above 0"),
        ('init_from = "gone"', f"{tmp_path}/gone is no checkpoint of vpg.py"),
    ):
        suite.write_text(
            f'[[runs]]\nscript = "vpg"\nenv_ids = ["CartPole-v1"]\nseeds = 1\nflags = {{ {flag} }}'
        )
        with pytest.raises(SuiteError, match=sentence):
            read_args(read_suite(suite))


def test_a_copy_of_a_script_is_found_from_the_suites_folder(tmp_path):
    shutil.copy(ROOT / "vpg.py", tmp_path / "my_vpg.py")
    suite = tmp_path / "suite.toml"
    suite.write_text('[[runs]]\nscript = "my_vpg.py"\nenv_ids = ["CartPole-v1"]\nseeds = 1\n')
    (run,) = read_suite(suite).values()
    assert run.script == Path(tmp_path / "my_vpg.py") and run.name == "CartPole-v1__my_vpg__1"
