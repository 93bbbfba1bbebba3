"""README and docs: links lead somewhere, flags and files exist, commands parse, examples work.

Pages are found, not named here, so a new one is covered. Nothing that a command line names is
started: scripts and benchmark commands only read their flags.
"""

import ast
import functools
import importlib
import inspect
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import ale_py
import gymnasium as gym
import pytest
import torch
import tyro
from gymnasium.utils.env_checker import check_env

from benchmark.report.runs import read as read_runs
from benchmark.search import Search
from benchmark.suite import SuiteError, read_args, read_suite
from benchmark.sweep import progress
from benchmark.task import read_evaluation

ROOT = Path(__file__).resolve().parents[1]
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmark/results/README.md"]
PAGES = [*TOP, *sorted(ROOT.glob("docs/*.md"))]
SCRIPTS = {path.name: path for path in ROOT.glob("*.py")}
COMMANDS = (
    "sweep",
    "search",
    "task",
    "report",
    "speed",
    "speed.workers",
    "hub",
)  # python -m benchmark.COMMAND
SHELL = ("sh", "bash", "console")  # languages of blocks that are commands, line by line
OTHER_PROGRAMS = (".", "mkdir", "tensorboard", "wandb")  # whose words nobody here can check
# Flags of programs of others
FOREIGN_FLAGS = {"--network": "docker run", "--no-index": "git diff"}
FOREIGN_FLAGS |= dict.fromkeys(("--array", "--requeue", "--wrap"), "sbatch")
torchrun = ("--standalone", "--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint")
FOREIGN_FLAGS |= dict.fromkeys((*torchrun, "--rdzv-id"), "torchrun")
FOREIGN_FLAGS |= dict.fromkeys(("--nodes", "--ntasks-per-node", "--gpus-per-node"), "srun")
FOREIGN_FLAGS |= {"--cpus-per-task": "srun"}
FOREIGN_FLAGS |= dict.fromkeys(("--head", "--num-cpus"), "ray start")
PLACEHOLDERS = {"SEED": "1", "STEPS": "1000000"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@dataclass
class Page:
    """text: without blocks of code; blocks: (language, code) of each; spans: inline code."""

    text: str
    blocks: list
    spans: list


@functools.cache
def read(path):
    blocks = FENCE.findall(path.read_text())
    text = FENCE.sub("", path.read_text())
    return Page(text, blocks, re.findall(r"`([^`\n]+)`", text))


def blocks_in(page, *languages):
    return [code for language, code in read(page).blocks if language in languages]


# Links


def slugs(path):
    """The anchors that GitHub gives the headings of a page."""
    found = []
    for heading in re.findall(r"^#+ +(.+)$", read(path).text, re.MULTILINE):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return found


def is_broken(page, link):
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in slugs(target)


@pages
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"`[^`\n]*`", "", read(page).text)
    links = re.findall(r"\]\((?!https?://)([^)\s]+)\)", text)
    assert not [link for link in links if is_broken(page, link)]


@pages
def test_every_page_is_reached_from_the_readme(page):
    index = (ROOT / "README.md").read_text() + (ROOT / "docs/README.md").read_text()
    assert page.name in index


@pages
def test_files_named_in_the_text_exist(page):
    names = [span for span in read(page).spans if re.fullmatch(r"(benchmark|tests|docs)/\S+", span)]
    paths = [name.partition("::")[0] for name in names if not re.search(r"[A-Z]{3}|[{<]", name)]
    assert not [path for path in paths if not (ROOT / path).exists()]


# Flags


@functools.cache
def load_script(name):
    return importlib.import_module(name.removesuffix(".py"))


def flags_of_script(name):
    flags = set()
    for field in fields(load_script(name).Args):
        word = field.name.replace("_", "-")
        flags |= {f"--{word}", f"--no-{word}"} if field.type is bool else {f"--{word}"}
    return flags


def load_command(name):
    """The module that reads the flags of `python -m benchmark.NAME`."""
    module = importlib.import_module(f"benchmark.{name}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"benchmark.{name}.__main__")
    return module


class HasRead(Exception):
    """Stops a main that has read its flags."""


def read_words(module):
    """What a script or command makes of sys.argv; it does nothing else."""
    if hasattr(module, "check_args"):
        args, _ = module.read_flags()
        module.check_args(args)
        return args
    for name in ("parse_args", "read_flags"):
        if hasattr(module, name):
            reader = getattr(module, name)
            return reader(sys.argv[1:]) if inspect.signature(reader).parameters else reader()
    with pytest.MonkeyPatch.context() as patch:
        cli = tyro.cli

        def read_and_stop(*args, **options):
            raise HasRead(cli(*args, **options))

        patch.setattr(tyro, "cli", read_and_stop)
        with pytest.raises(HasRead) as stop:
            module.main()
    return stop.value.args[0]


@pytest.fixture
def parse(monkeypatch, capsys, tmp_path):
    """parse(module, words): what the module makes of the words, and what it has printed.

    The former is None where the words end the program, as --help does; an error fails the test.
    """

    def parse(module, words):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [module.__name__, *words])
        try:
            found = read_words(module)
        except SystemExit as stop:
            found = None
            assert not stop.code, f"{shlex.join(words)}: {capsys.readouterr().err}"
        return found, capsys.readouterr().out

    return parse


@pytest.fixture
def flags_of_command(parse, monkeypatch):
    """flags_of_command(name): of `python -m benchmark.NAME`, of a sweep with every backend."""
    monkeypatch.setenv("COLUMNS", "200")

    def find(name):
        module = load_command(name)
        helps = [parse(module, ["--help"])[1]]
        if name in ("sweep", "search"):  # which hands flags to the other one
            module = load_command("sweep")
            backends = ("local", "docker", "slurm", "ray")
            helps += [parse(module, ["--backend", backend, "--help"])[1] for backend in backends]
        return set(FLAG.findall(" ".join(helps)))

    return find


@pages
def test_flags_named_on_a_page_exist(page, flags_of_command):
    """In a script or a command that the page names."""
    whole = page.read_text()
    flags = {"--help", *FOREIGN_FLAGS}
    for name in SCRIPTS:
        if re.search(rf"\b{name}\b", whole):
            flags |= flags_of_script(name)
    for name in COMMANDS:
        if f"benchmark.{name}" in whole:
            flags |= flags_of_command(name)
    named = FLAG.findall(" ".join([*read(page).spans, *blocks_in(page, "text")]))
    assert not set(named) - flags


# Commands


def split_commands(code):
    """The commands of a block of shell code -> lists of words, without variables set for them."""
    commands = []
    for line in code.replace("\\\n", " ").splitlines():
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
        while words:
            end = next((i for i, word in enumerate(words) if word in ("&&", "|", ";")), len(words))
            command = words[:end]
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                del command[0]
            commands.append(command)
            words = words[end + 1 :]
    return [command for command in commands if command]


def commands_in(page):
    """All lines of blocks of shell code, and what looks like a command in the text."""
    texts = blocks_in(page, *SHELL)
    starts = re.compile(r"(python|torchrun|make|uv run|git diff|docker run) ")
    texts += [span for span in read(page).spans if starts.match(span)]
    return [words for text in texts for words in split_commands(text)]


class Checker:
    """Looks at commands, as if given in a folder.

    copies: {name: script}, what the page has made by cp.
    """

    def __init__(self, folder, parse, monkeypatch):
        self.folder = folder
        self.parse = parse
        self.monkeypatch = monkeypatch
        self.copies = {}

    def check(self, words):
        program, *rest = words
        if program == "torchrun":
            self.check_script(rest[rest.index("ppo_atari_multigpu.py") :])
        elif program in ("python", ".venv/bin/python"):
            rest = rest[1:] if rest[0] == "-i" else rest
            if rest[0] == "-m":
                self.check_module(rest[1], rest[2:])
            else:
                self.check_script(rest)
        elif program not in OTHER_PROGRAMS:
            checks = {
                "uv": self.check_uv,
                "make": self.check_make,
                "docker": self.check_docker,
                "git": self.check_git,
                "cp": self.check_cp,
                "pip": self.check_pip,
            }
            assert program in checks, f"unknown program {program}"
            checks[program](rest)

    def check_script(self, words):
        name = self.copies.get(words[0], words[0])
        if name.startswith("my_"):  # the reader's own
            return
        assert name in SCRIPTS, f"there is no {name}"
        module = load_script(name)
        saved = {"script": name, "args": asdict(module.Args()), "run": {"global_step": 0}}
        self.monkeypatch.setattr(torch, "load", lambda path, **options: saved)
        args, _ = self.parse(module, words[1:])
        if args is not None:
            check_env_id(args.env_id)

    def check_module(self, name, words):
        if name == "pytest":
            return self.check_tests(words)
        top, _, command = name.partition(".")
        assert top == "benchmark", f"unknown module {name}"
        if command == "report.results":
            assert (ROOT / "benchmark/report/results.py").exists() and not words
            return
        assert command in COMMANDS, f"there is no {name}"
        for word in words:
            if word.startswith("benchmark/results/") and not word.endswith(".csv"):
                assert (ROOT / word).exists(), word
            if command in ("report", "status") and not word.startswith("-"):
                (self.folder / word).mkdir(parents=True, exist_ok=True)
        found, _ = self.parse(load_command(command), words)
        if command == "search":
            self.parse(load_command("sweep"), [words[0], *found[1]])
        if command == "sweep":
            check_suite_exists(words[0])

    def check_tests(self, words):
        """Files, FILE::TEST, and -k TEST after a file."""
        texts = [(ROOT / word.partition("::")[0]).read_text() for word in words if ".py" in word]
        names = [word.partition("::")[2] for word in words if "::" in word]
        names += [name for flag, name in zip(words, words[1:]) if flag == "-k"]
        assert texts
        assert not [name for name in names if f"def {name}" not in "".join(texts)]

    def check_uv(self, words):
        assert words[0] == "run"
        self.check_script(words[1:])

    def check_make(self, words):
        targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert not [word for word in words if "=" not in word and word not in targets]

    def check_docker(self, words):
        if words[0] == "run":
            self.check_script(words[words.index("plainrl") + 1 :])

    def check_git(self, words):
        assert words[:2] == ["diff", "--no-index"]
        assert not [name for name in words[2:] if name not in {**SCRIPTS, **self.copies}]

    def check_cp(self, words):
        source, target = words
        assert source in SCRIPTS
        self.copies[target] = source

    def check_pip(self, words):
        files = [file for flag, file in zip(words, words[1:]) if flag == "-r"]
        assert not [file for file in files if not (ROOT / file).exists()]


def check_env_id(env_id):
    """That an environment is registered, unless it is the reader's or of another package."""
    module, _, name = env_id.rpartition(":")
    if env_id == "ENV" or env_id.startswith(("my_", "shimmy", "gymnasium_robotics")):
        return
    if "." in name:  # a game of many agents
        assert importlib.import_module(name).parallel_env
        return
    gym.register_envs(ale_py)
    if module:
        importlib.import_module(module)
    gym.spec(name)


def check_suite_exists(name):
    path = ROOT / name if name.endswith(".toml") else ROOT / f"benchmark/suites/{name}.toml"
    assert name.startswith("my_") or path.exists(), f"there is no suite {name}"


@pages
def test_commands_parse(page, tmp_path, parse, monkeypatch):
    checker = Checker(tmp_path, parse, monkeypatch)
    for words in commands_in(page):
        checker.check(words)


@pytest.mark.parametrize(
    "line",
    [
        "python ppo.py --clip 0.1",
        "python ppo.py --num-steps 0",
        "python ppo.py --env-id CartPole-v9",
        "python ppo.py --resume runs/NAME --gamma 0.5",
        "python ppo9.py",
        "python -m benchmark.sweep no_such_suite",
        "python -m benchmark.sweep ppo_mujoco --partition gpu",
        "python -m pytest tests/test_ppo.py::test_of_nothing",
        "make coffee",
        "git diff --no-index ppo.py ppo9.py",
        "pyhton ppo.py",
    ],
)
def test_a_wrong_command_is_noticed(line, tmp_path, parse, monkeypatch):
    (words,) = split_commands(line)
    with pytest.raises((AssertionError, FileNotFoundError, gym.error.Error)):
        Checker(tmp_path, parse, monkeypatch).check(words)


# Examples


def is_suite(code):
    return "[[runs]]" in code


@pages
def test_suites_can_be_read(page, tmp_path):
    checker = Checker(tmp_path, None, None)
    for words in commands_in(page):
        if words[0] == "cp":
            checker.check_cp(words[1:])
    for name, source in checker.copies.items():
        (tmp_path / name).write_text(SCRIPTS[source].read_text())
    for i, code in enumerate(filter(is_suite, blocks_in(page, "toml"))):
        path = tmp_path / f"suite_{i}.toml"
        path.write_text(code)
        try:
            assert Search(path).ranges if "[scores]" in code else read_args(read_suite(path))
        except SuiteError as error:
            pytest.fail(str(error))


@pages
def test_python_code_is_valid(page):
    for code in blocks_in(page, "python"):
        ast.parse(code)


def find_example(page, text):
    """The only block of Python on a page with this text."""
    (code,) = [code for code in blocks_in(ROOT / "docs" / page, "python") if text in code]
    return code


def test_the_example_of_an_environment_works(monkeypatch):
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    exec(find_example("environments.md", "gym.register"), {"__name__": "my_module"})
    env = gym.make("Target-v0")
    check_env(env.unwrapped, skip_render_check=True)
    make_env = load_script("ppo_continuous_action.py").make_env
    monkeypatch.setattr(gym, "make", lambda name, **options: env)
    obs, _ = make_env("my_module:Target-v0").reset(seed=1)
    assert obs.shape == (2,)


def test_the_example_of_a_script_can_be_swept(tmp_path):
    """Read by a suite, run, stopped by SIGTERM, resumed; what it leaves is a finished run."""
    script = tmp_path / "my_search.py"
    script.write_text(find_example("custom_scripts.md", "class Args"))
    suite = tmp_path / "my_suite.toml"
    table = 'script = "my_search.py"\nenv_ids = ["CartPole-v1"]\nseeds = 1\n'
    suite.write_text(f"[[runs]]\n{table}flags = {{ total_timesteps = 1000000000 }}\n")
    runs = read_suite(suite)
    (run,) = runs.values()
    folder = tmp_path / "runs" / run.name

    process = subprocess.Popen([sys.executable, script, *run.words], cwd=tmp_path)
    while not (folder / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    config = json.loads((folder / "config.json").read_text())
    assert config["args"] == read_args(runs)[run.name]
    stopped_at, *_ = progress(folder, 10**9)

    config["args"]["total_timesteps"] = stopped_at + 1
    (folder / "config.json").write_text(json.dumps(config))
    subprocess.run([sys.executable, script, "--resume", folder], cwd=tmp_path, check=True)
    assert len(read_evaluation(folder)) == 10
    assert progress(folder, 10**9)[0] > stopped_at
    runs, _, troubles = read_runs([folder])
    assert troubles == [] and runs["score"].notna().all()


# Changes of a script


CHANGES = dict(
    re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?^```diff\n(.*?)^```",
        (ROOT / "docs/change_a_script.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)
SHORT = "--no-cuda --no-compile --num-steps 64 --num-minibatches 2 --update-epochs 2 --seed 3"
SHORT = f"{SHORT} --eval-episodes 1 --checkpoint-interval 1000".split()
LEVELS = """
import gymnasium as gym
from gymnasium.envs.classic_control.pendulum import PendulumEnv


class Levels(PendulumEnv):
    level = 1.0

    def step(self, action):
        obs, *rest = super().step(action * (0.5 + self.level))
        return obs, *rest


gym.register("Levels-v0", Levels, max_episode_steps=30)
"""


def change(text, diff):
    """Applies a diff without line numbers, with hunks between lines that begin with @@."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old, new = ("\n" + "".join(x[1:] or x for x in lines if x[0] not in sign) for sign in "+-")
        assert text.count(old) == 1, f"{text.count(old)} places have the lines {old}"
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_script_resumes_exactly(name, tmp_path, run_script, capsys):
    """A copy in one piece of four iterations, and in two; the middle falls between two seeds."""
    (tmp_path / "my_levels.py").write_text(LEVELS)
    text = change((ROOT / "ppo_continuous_action.py").read_text(), CHANGES[name])
    text = text.replace("steps_per_seed=1000", "steps_per_seed=50")
    text = text.replace("global_step / 100000", "global_step / 256")
    script = tmp_path / "my_ppo.py"
    flags = [*SHORT, "--env-id", "my_levels:Levels-v0", "--total-timesteps", "256"]

    step = "run.global_step += batch_size"
    script.write_text(text.replace(step, f"{step}; run.stop_signal = run.global_step // 128"))
    half = run_script(script, *flags, "--run-name", "half", code=129)
    script.write_text(text)
    whole = run_script(script, *flags, "--run-name", "whole")
    shutil.copytree("runs/half", "runs/resumed", ignore=shutil.ignore_patterns("lock"))
    resumed = run_script(script, "--resume", "runs/resumed")
    said = capsys.readouterr().out
    assert "run.restore" not in said and "brought back" not in said
    parts = [name for name, part in whole.run.parts.items() if name not in ("run", "envs")]
    for part in parts:
        one, other = whole.run.parts[part].state_dict(), resumed.run.parts[part].state_dict()
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(half.agent.critic[0].weight, whole.agent.critic[0].weight)
    check_policy(text)


def check_policy(text):
    """The page's check, of the agent of a changed script."""
    code = find_example("change_a_script.md", "from my_ppo").replace("from my_ppo import Agent", "")
    exec(text + code, {"__name__": "my_ppo", "__file__": "my_ppo.py"})


def test_the_check_of_a_policy_notices_mistakes():
    text = change((ROOT / "ppo_continuous_action.py").read_text(), CHANGES["A policy"])
    for old, new in (
        ("np.exp(log_std(obs))", "log_std(obs)"),
        ("noise = (actions", "noise = torch.rand_like(actions) - 0.5 + (actions"),
        ("nn.Tanh()]", "nn.Tanh(), nn.Dropout(0.1)]"),
    ):
        with pytest.raises(AssertionError):
            check_policy(text.replace(old, new))


def test_a_part_that_is_not_restored_is_named(tmp_path, run_script, capsys):
    diff = CHANGES["A part that is saved"].replace(", bonus_rms=bonus_rms", "")
    script = tmp_path / "my_ppo.py"
    script.write_text(change((ROOT / "ppo_continuous_action.py").read_text(), diff))
    run_script(script, *SHORT, "--env-id", "Pendulum-v1", "--total-timesteps", "64")
    assert "bonus_rms isn't given to run.restore(), so" in capsys.readouterr().out


def play(page_code, folder):
    """Runs the page's code with the policy of a run folder; returns its variables."""
    variables = {}
    exec(page_code.replace("runs/NAME", str(folder)), variables)
    return variables


def test_the_policy_of_a_ppo_run_plays_in_another_program(tmp_path, run_script):
    """Its episode is the first one of the evaluation, if its seed is."""
    flags = ("--env-id", "Pendulum-v1", "--total-timesteps", "128", "--run-name", "a")
    script = run_script(ROOT / "ppo_continuous_action.py", *SHORT, *flags)
    (expected,) = json.loads((tmp_path / "runs/a/evaluation.json").read_text())["returns"]
    envs = script.VecEnv([script.make_env("Pendulum-v1")], (3, 1), float)
    seed = envs.envs[0].unwrapped.np_random_seed
    load = find_example("change_a_script.md", "RunningMeanStd")
    episode = find_example("change_a_script.md", "while not done").replace("seed=1", f"seed={seed}")
    found = play(load + episode, tmp_path / "runs/a")
    assert found["episode_return"] == pytest.approx(expected, abs=1e-6)


def test_the_policy_of_a_sac_run_plays_in_another_program(tmp_path, run_script):
    flags = "--no-cuda --no-compile --env-id Pendulum-v1 --total-timesteps 30 --learning-starts 20"
    flags = [*flags.split(), "--buffer-size", "100", "--batch-size", "8", "--eval-interval", "0"]
    flags += ["--checkpoint-interval", "100", "--eval-episodes", "1", "--run-name", "a"]
    script = run_script(ROOT / "sac_continuous_action.py", *flags)
    found = play(find_example("change_a_script.md", "agent.act"), tmp_path / "runs/a")
    expected = script.agent.act(found["obs"][None])[0]
    assert found["action"].tolist() == expected.tolist()
