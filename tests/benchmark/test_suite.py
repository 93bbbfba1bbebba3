import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmark import ROOT
from benchmark.store import is_run_name
from benchmark.suite import MOST_RUNS, SuiteError, read_suite

SUITES = sorted((ROOT / "benchmark" / "suites").glob("*.toml"))


def two_tables(script):
    """The text of a suite whose second table is of another script."""
    return f"""env_ids = ["A"]
seeds = 1
[[runs]]
script = "{script}"
env_ids = ["B"]
seeds = 1"""


def change_script(lab, old, new):
    assert lab.fake.count(old) == 1
    lab.script.write_text(lab.fake.replace(old, new))


def test_a_suite_is_the_product_of_environments_seeds_and_variants(lab):
    suite = lab.write_suite(
        """env_ids = ["Good-v0", "ALE/Pong-v5"]
seeds = [3, 8]
flags = { total_timesteps = 4, sizes = [5, 6] }
variants = { plain = {}, slow = { fast = false, total_timesteps = 9 } }"""
    )
    runs = read_suite(suite)
    assert [run.name for run in runs] == [
        f"{env}__fake__{variant}__{seed}"
        for variant in ("plain", "slow")
        for env in ("Good-v0", "ALE-Pong-v5")
        for seed in (3, 8)
    ]
    last = runs[-1]
    words = "--env-id ALE/Pong-v5 --seed 8 --run-name ALE-Pong-v5__fake__slow__8"
    assert " ".join(last.words) == f"{words} --total-timesteps 9 --sizes 5 6 --no-fast"
    defaults = {"resume": "", "num_threads": 0}
    own = {"env_id": "ALE/Pong-v5", "seed": 8, "run_name": last.name}
    assert last.args == defaults | own | {"total_timesteps": 9, "fast": False, "sizes": [5, 6]}
    assert (last.script, last.variant) == (str(lab.script), "slow")
    own = {"env_id": "Good-v0", "seed": 1, "run_name": ""}
    assert last.defaults == defaults | own | {"total_timesteps": 6, "fast": True, "sizes": [1, 2]}


def test_a_table_without_variants_has_runs_without(lab):
    (run,) = read_suite(lab.make_suite("A"))
    assert (run.name, run.variant, run.env_id, run.seed) == ("A__fake__1", "", "A", 1)


def test_a_runs_args_are_those_of_its_config_json(lab):
    """So that nobody takes a run for one with other flags."""
    name = lab.make_folder("Good-v0")
    assert lab.run_worker(name) == (0, "")
    (run,) = read_suite(lab.suite)
    args = json.loads(lab.text(name, "config.json"))["args"]
    assert args == run.args | {"num_threads": 2}


@pytest.mark.parametrize(
    "text, sentence",
    [
        ('env_ids = ["A"\nseeds = 1', "can't read the suite"),
        pytest.param(
            f"env_ids = {'[' * 5000}{']' * 5000}\nseeds = 1", "can't read the suite", id="nested"
        ),
        ('env_ids = ["A"]', "without seeds"),
        ('env_ids = ["A"]\nseeds = 0', "no seeds, no env_ids or no variants"),
        ('env_ids = ["A"]\nseeds = 1\nvariants = {}', "no seeds, no env_ids or no variants"),
        ('env_ids = ["-x"]\nseeds = 1', "it begins with -"),
        (f'env_ids = ["{"x" * 192}"]\nseeds = 1', "or more than 200 bytes"),
        (f'env_ids = ["{"é" * 96}"]\nseeds = 1', "or more than 200 bytes"),
        ('env_ids = ["a\\nb"]\nseeds = 1', "has unprintable characters"),
        ('env_ids = "A"\nseeds = 1', "env_ids = 'A' is of the wrong type"),
        ('env_ids = ["A"]\nseeds = [-1]', "whole numbers from 0 to 2**32 - 1 as seeds"),
        ('env_ids = ["A"]\nseeds = [4294967296]', "whole numbers from 0 to 2**32 - 1 as seeds"),
        ('env_ids = ["A"]\nseeds = -1', "no seeds, no env_ids or no variants"),
        ('env_ids = ["A"]\nseeds = 100001', "100,001 runs; a suite may have at most 100,000"),
        ('env_ids = ["A"]\nseeds = 1000000000000', "1,000,000,000,000 runs"),
        ('env_ids = ["A", "B"]\nseeds = 30000\nvariants = { a = {}, b = {} }', "120,000 runs"),
        ("env_ids = [1]\nseeds = 1", "strings as env_ids"),
        (two_tables("suite.toml"), "no script suite.toml"),
        (two_tables("other.py"), "can't import"),
        (two_tables("exits.py"), "SystemExit 3"),
        (two_tables("empty.py"), "must have a dataclass Args and functions read_flags"),
        (two_tables("raises.py"), "ValueError"),
        (two_tables("one.py"), "the check of one.py's flags ends with TypeError"),
        (two_tables("needs.py"), "Args() of needs.py ends with TypeError"),
        (two_tables("path.py"), "a flag can't be written as JSON"),
        ('env_ids = ["A"]\nseeds = true', "seeds = True is of the wrong type"),
        ('env_ids = ["A"]\nseeds = 1\nenvs = 3', "unknown key envs"),
        ('env_ids = ["A", "A"]\nseeds = 1', "A__fake__1 more than once"),
        ('env_ids = ["A", "A"]\nseeds = 9', "A__fake__3 and 6 others more than once"),
        (two_tables("copy/fake.py"), "two scripts"),
        (
            'env_ids = ["A"]\nseeds = 1\nflags = { stride = 3 }',
            "a suite can't set stride for fake.py",
        ),
        ('env_ids = ["A"]\nseeds = 1\nflags = { seed = 3 }', "a suite can't set seed for fake.py"),
        ('env_ids = ["A"]\nseeds = 1\nflags = { total_timesteps = 0 }', "must be above 0"),
        (
            'env_ids = ["A"]\nseeds = 1\nflags = { total_timesteps = 0, sizes = "1\\n2" }',
            "--total-timesteps 0 --sizes 1 2: ",
        ),
        ('env_ids = ["A"]\nseeds = 1\nvariants = { a = 1 }', "the variant a must be a table"),
        (two_tables("fakes"), "there is no script fakes"),
        ('env_ids = ["A"]\nseeds = 1\n[[walks]]\n', "must have tables [[runs]] and nothing else"),
    ],
)
def test_bad_suites_are_refused_in_one_sentence(lab, text, sentence):
    suite = lab.write_suite(text)
    (lab.folder / "copy").mkdir()
    shutil.copy(lab.script, lab.folder / "copy")
    args = "import dataclasses\n@dataclasses.dataclass\nclass Args:\n    x: object{}\n"
    args += "def read_flags():\n    {}\ndef check_args(args):\n    pass"
    scripts = {
        "other": "no python",
        "exits": "raise SystemExit(3)",
        "empty": "",
        "raises": args.format(" = 1", "raise ValueError('no')"),
        "one": args.format(" = 1", "return Args()"),
        "needs": args.format("", "return Args(1), None"),
        "path": args.format(" = object()", "return Args(), None"),
    }
    for name, script in scripts.items():
        (lab.folder / f"{name}.py").write_text(script)
    with pytest.raises(SuiteError) as error:
        read_suite(suite)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["runs = [1, 2]", "runs = []", "runs = 3", ""])
def test_suites_without_tables_of_runs_are_refused(tmp_path, text):
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(SuiteError, match="must have tables"):
        read_suite(tmp_path / "suite.toml")


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_of_the_repository_is_valid(path):
    """Its flags are ones that the scripts take, and its scripts those of the repository."""
    runs = read_suite(path)
    assert runs and all(is_run_name(run.name) for run in runs)
    assert {Path(run.script).parent for run in runs} == {ROOT}
    assert {run.args.keys() == run.defaults.keys() for run in runs} == {True}


def test_the_smoke_suite_has_every_script():
    runs = read_suite(ROOT / "benchmark" / "suites" / "smoke.toml")
    assert {Path(run.script) for run in runs} == set(ROOT.glob("*.py"))


def test_a_script_may_import_its_neighbours(lab):
    suite = lab.make_suite("A")
    lab.script.write_text(f"import neighbour_of_fake\n{lab.fake}")
    (lab.folder / "neighbour_of_fake.py").touch()
    assert len(read_suite(suite)) == 1


def test_a_suite_of_the_most_runs(lab):
    """Its check takes time that grows with them, not with their square."""
    runs = read_suite(lab.make_suite("A", seeds=MOST_RUNS))
    assert len(runs) == len({run.name for run in runs}) == MOST_RUNS


def test_a_script_that_is_read_changes_nothing_of_the_sweep(lab):
    """Real ones look for modules in the current folder."""
    suite = lab.make_suite("A")
    begin = "def read_flags():\n"
    change_script(lab, begin, f"{begin}    sys.path.append('elsewhere')\n")
    before = (list(sys.path), list(sys.argv))
    read_suite(suite)
    assert (sys.path, sys.argv) == before


def test_runs_that_begin_with_networks_of_another_find_it_from_the_suites_folder(lab):
    """The sweep's folder, in which they run, is another."""
    suite = lab.write_suite('env_ids = ["A"]\nseeds = 1\nflags = { init_from = "../old/one" }')
    field = '    resume: str = ""\n'
    change_script(lab, field, f'{field}    init_from: str = ""\n')
    (run,) = read_suite(suite)
    assert run.args["init_from"] == str(lab.folder.parent / "old" / "one")
    assert run.words[-2:] == ("--init-from", str(lab.folder.parent / "old" / "one"))


def test_a_real_script_says_what_is_wrong_with_its_flags(tmp_path):
    text = """[[runs]]
script = "vpg"
env_ids = ["CartPole-v1"]
seeds = 1
flags = {{ hidden_sizes = [3, 5], {} }}
"""
    suite = tmp_path / "suite.toml"
    suite.write_text(text.format("eval_episodes = 1"))
    (run,) = read_suite(suite)
    assert run.args["hidden_sizes"] == [3, 5] and run.args["eval_episodes"] == 1
    for flag, sentence in (
        ("eval_episodes = 0", "--eval-episodes must be above 0"),
        ('init_from = "gone"', f"{tmp_path}/gone is no checkpoint of vpg.py"),
    ):
        suite.write_text(text.format(flag))
        with pytest.raises(SuiteError, match=sentence):
            read_suite(suite)
