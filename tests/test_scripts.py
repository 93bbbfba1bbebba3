"""Scripts stand alone, so they repeat each other: what two of them repeat is the same text."""

import ast
import difflib
import importlib
import inspect
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# Definitions that may differ: how many texts there are of each, and why
DIFFERENT = {
    "Args": (22, "the flags of the algorithm; its common flags are compared one by one"),
    "SCHEDULES": (5, "which flags there are"),
    "check_args": (18, "what the algorithm's flags may be"),
    "check_env": (3, "actions to try, where there are masks (ppo_mask); many agents"),
    "make_env": (7, "kinds of spaces, and the wrappers for them"),
    "Episode": (2, "an agent's part of a game (ppo_pettingzoo)"),
    "mlp": (2, "LayerNorm and ReLU (pqn)"),
    "numpy_mlp": (2, "LayerNorm (pqn)"),
    "Agent": (16, "the network"),
    "Player": (2, "the head stays float32 (pqn_atari)"),
    "METRICS": (8, "what is learned"),
    "PER_CALL": (3, "what fits into one compiled call"),
    "rollout": (4, "whole episodes (vpg); a memory; workers that play (Ray)"),
    "predict": (3, "no log-probabilities (a2c, pqn)"),
    "ppo_loss": (5, "a penalty (ppo_penalty); a memory; many processes; agents that have ended"),
    "update_minibatches": (3, "PyTorch's Adam where nothing is compiled (a memory); a loss (pqn)"),
    "update": (12, "one step a rollout (a2c, vpg), no KL (pqn), replay, processes; new advantages"),
    "Learner": (3, "what has a target and an optimizer"),
    "evaluate": (5, "a copy of the weights to play with (PPO); a memory; games of many agents"),
}
# Flags that two scripts explain differently
DIFFERENT_FLAGS = {
    "num_threads": "one or all cores",
    "compile": "some compile nothing",
    "checkpoint_interval": "what an iteration is",
    "eval_interval": "evaluations are on by default with a replay buffer",
    "eval_episodes": "an episode is an agent's where there are several",
    "env_id": "ids of games",
    "learning_rate": "of which optimizer",
    "hidden_sizes": "of which networks",
    "batch_size": "transitions or sequences",
    "norm_adv": "there may be no minibatches",
    "clip_coef": "a penalty takes the place of the clipped ratio",
    "max_grad_norm": "two gradients, which are not clipped by default",
    "amp": "of which layers",
    "tau": "when the target moves",
}
# The most lines that the main blocks of neighbours may differ in, old and new ones together
MAIN_BLOCKS = {
    ("ppo", "ppo_continuous_action"): 21,
    ("ppo", "ppo_mask"): 4,
    ("ppo", "ppo_penalty"): 12,
    ("ppo", "ppo_pettingzoo"): 10,
    ("ppo", "a2c"): 10,
    ("ppo", "pqn"): 18,
    ("ppo_continuous_action", "ppo_atari"): 23,
    ("ppo_continuous_action", "ppo_continuous_action_ray"): 22,
    ("ppo_atari", "ppo_atari_vector"): 12,
    ("ppo_atari_vector", "pqn_atari"): 18,
    ("ppo_atari_vector", "ppo_atari_multigpu"): 46,
    ("pqn", "pqn_atari"): 8,
    ("ppo_lstm", "ppo_atari_lstm"): 6,
    ("dqn", "dqn_atari"): 44,
    ("dqn_atari", "c51_atari"): 8,
    ("ddpg_continuous_action", "td3_continuous_action"): 6,
    ("td3_continuous_action", "sac_continuous_action"): 26,
    ("ddpg_continuous_action", "ddpg_lstm"): 27,
}


def find_scripts(root):
    """The scripts in a folder: those that git knows, and so not its user's own copies."""
    command = ["git", "-C", str(root), "ls-files", ":(glob)*.py"]
    git = subprocess.run(command, capture_output=True, text=True)
    names = git.stdout.split() or [path.name for path in root.glob("*.py")]
    return sorted(root / name for name in names if (root / name).exists())


SCRIPTS = find_scripts(ROOT)
TEXTS = {path.stem: path.read_text() for path in SCRIPTS}
each_script = pytest.mark.parametrize("name", TEXTS)


def spans(text):
    """{name: (first line, last line)} of the functions, classes and constants of a script."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            found[node.name] = (first, node.end_lineno)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = (node.lineno, node.end_lineno)
    return found


def definitions(text):
    """{name: source}, comments and decorators among it."""
    lines = text.splitlines()
    places = spans(text).items()
    return {name: "\n".join(lines[first - 1 : last]) for name, (first, last) in places}


def flags(text):
    """{name: (type, default, help)} of the flags of a script, in their order."""
    lines = definitions(text)["Args"].splitlines()
    matches = [re.fullmatch(r"    (\w+): (.*?) = (.*)  # (.*)", line) for line in lines]
    return {match[1]: match.groups()[1:] for match in matches if match}


def run_section(text):
    begins, ends = "# Run: ", "# Environments\n"
    assert text.count(begins) == text.count(ends) == 1
    return text[text.index(begins) : text.index(ends)]


def metadata(text):
    """The dependencies of PEP 723's block, by the reference implementation's expression."""
    block = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (match,) = re.finditer(block, text)
    assert match["type"] == "script"
    toml = "".join(line.removeprefix("# ") for line in match["content"].splitlines(keepends=True))
    assert 'requires-python = ">=3.10"' in toml
    return re.findall(r'^    "(.*)",$', toml, re.MULTILINE)


def pin(line):
    """A line of requirements -> (package, version and marker), without extras."""
    package, version = line.split("==", 1)
    return package.partition("[")[0], version.replace('"', "'")


def test_definitions_are_read_whole():
    text = "A = 1\n\n@x\nclass B:\n    c: int = 2  # d\n\n    def d(self):\n        return 3\n"
    assert definitions(text) == {"A": "A = 1", "B": text.partition("\n\n")[2].rstrip()}


def test_definitions_of_one_name_are_one_text():
    """Those on the list are no more texts than it says.

    So two of three scripts don't drift apart because the third one differs.
    """
    found = {}
    for script, text in TEXTS.items():
        for name, source in definitions(text).items():
            found.setdefault(name, {}).setdefault(source, []).append(script)
    counts = {name: len(sources) for name, sources in found.items() if len(sources) > 1}
    drifted = {name: [*found[name].values()] for name in counts.keys() - DIFFERENT.keys()}
    assert drifted == {}
    assert counts == {name: count for name, (count, _) in DIFFERENT.items()}


def test_run_section_is_the_same_everywhere():
    sections = {run_section(text) for text in TEXTS.values()}
    assert len(sections) == 1
    assert "class Run:" in sections.pop()


def test_common_flags_have_one_order_type_and_help():
    explained = set()
    for one, other in combinations([flags(text) for text in TEXTS.values()], 2):
        shared = [name for name in one if name in other]
        assert shared == [name for name in other if name in one]
        assert len(shared) > 15
        for name in shared:
            different = (one[name][0], one[name][2]) != (other[name][0], other[name][2])
            if shared.index(name) < shared.index("env_id"):  # flags of the run
                different = one[name] != other[name]
            if different:
                assert name in DIFFERENT_FLAGS, (name, one[name], other[name])
                explained.add(name)
    assert explained == DIFFERENT_FLAGS.keys()


@each_script
def test_dependencies_have_the_pins_of_requirements(name):
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [pin(line) for line in lines if "==" in line and not line.startswith("#")]
    pins = [pin(line) for line in metadata(TEXTS[name])]
    assert not [found for found in pins if found not in wanted]
    packages = {package for package, _ in pins}
    assert not [line for line in wanted if line[0] in packages and line not in pins]


@each_script
def test_dependencies_are_what_is_imported(name):
    """Third-party modules, by the packages that bring them.

    torch brings filelock; its logs need tensorboard, and gymnasium's videos moviepy.
    """
    packages = {"cv2": "opencv-python-headless", "ale_py": "ale-py"}
    modules = {"tensorboard", "moviepy"}
    for node in ast.walk(ast.parse(TEXTS[name])):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    modules -= sys.stdlib_module_names | {"filelock"}
    names = {package for package, _ in map(pin, metadata(TEXTS[name]))}
    assert {packages.get(module, module) for module in modules} <= names
    assert not modules & TEXTS.keys()


@each_script
def test_docstring_names_neighbours_and_a_command(name):
    words = " ".join(ast.get_docstring(ast.parse(TEXTS[name])).split())
    neighbours = re.search(r"Diff it against (.+?\.py)\.", words)[1]
    neighbours = re.split(", | or ", neighbours)
    assert all(neighbour.removesuffix(".py") in TEXTS.keys() - {name} for neighbour in neighbours)
    assert re.search(rf" (python|torchrun .*) {name}\.py --env-id ", words)


def test_g11_epsilon_of_adam():
    """1e-5 in all that learn a policy by it, as in baselines; elsewhere it isn't called G11."""
    found = {name: re.findall(r"eps=([-.e\d]+).*  # G11", text) for name, text in TEXTS.items()}
    labelled = {name for name, text in TEXTS.items() if "G11" in text}
    policies = {name for name in TEXTS if name.startswith(("ppo", "a2c", "vpg"))}
    assert labelled == policies
    assert all(found[name] == ["1e-5"] for name in policies)


@pytest.mark.parametrize(
    "name", [x for x, text in TEXTS.items() if "max_grad_norm: float =" in text]
)
def test_the_norm_of_the_gradient_is_above_0(refused, name):
    """A negative one would turn the gradient around."""
    module = importlib.import_module(name)
    assert "--max-grad-norm must be above 0" in refused(module, ["--max-grad-norm", "-1"])


COMPILED = [name for name, text in TEXTS.items() if "def compile_or_not" in text]
IN_MINIBATCHES = [name for name, text in TEXTS.items() if "def update(step_minibatches" in text]


@pytest.mark.parametrize("name", COMPILED)
def test_on_a_gpu_there_are_graphs_and_no_kernels_chosen_by_their_speed(monkeypatch, name):
    """On the meta device, in place of a GPU."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: given.append(kwargs))
    script = importlib.import_module(name)
    script.compile_or_not(torch.sin, script.Args(), torch.device("meta"))
    options = given[0]["options"]
    assert options["deterministic"] is True and options["triton.autotune_pointwise"] is False
    assert options["triton.cudagraphs"] is True
    assert options.keys() <= set(torch._inductor.list_options())


@pytest.mark.parametrize("name", IN_MINIBATCHES)
def test_metrics_are_kept_where_a_cuda_graph_writes_to_one_place(name):
    """Here the graph is a function that always returns the same tensor."""
    script = importlib.import_module(name)
    size = len(script.METRICS)
    memory = torch.zeros(size)
    args = script.Args(num_minibatches=4, update_epochs=2)
    calls = 2 * 4 // script.PER_CALL
    given = {"step_minibatches": lambda *_: memory.add_(1), "args": args}
    if "estimate" in inspect.signature(script.update).parameters:
        given["estimate"] = None
    metrics = script.update(
        optimizer=None, agent=None, batch={"obs": torch.zeros(8)}, coefs={}, **given
    )
    assert metrics.tolist() == [sum(range(1, calls + 1)) / (2 * 4)] * size


@pytest.mark.parametrize("names", MAIN_BLOCKS, ids=" to ".join)
def test_main_blocks_of_neighbours_differ_in_few_lines(names):
    """So what the tests find in one of them is true of the other."""
    blocks = []
    for name in names:
        block = TEXTS[name].partition('if __name__ == "__main__":')[2]
        blocks.append([line.strip() for line in block.splitlines()])
    changes = [line for line in difflib.ndiff(*blocks) if line[0] in "-+"]
    assert len(changes) <= MAIN_BLOCKS[names], "\n".join(changes)


# make sync

SCRIPT = '''"""A script."""


class Args:
    flag: int = {flag}


def make(x):
    return x


def double(x):
    return {double} * x


SIZE = {size}  # of something
AND_SIZE = 3
'''


@pytest.fixture
def repository(tmp_path):
    """Three scripts in the last commit, a new one that git knows, and a copy of the user's."""

    def git(*words):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True)

    git("init", "--quiet")
    for flag, name in enumerate(("a", "b", "c", "new", "own")):
        text = SCRIPT.format(flag=flag, double=2, size=1)
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "without.py").write_text("X = 1\n")
    git("add", "a.py", "b.py", "c.py", "without.py")
    git("commit", "--quiet", "--message", "scripts")
    git("add", "new.py")
    return tmp_path


def edit(repository, name, old, new):
    path = repository / f"{name}.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_sync_copies_what_has_changed(repository, capsys):
    """Into every script that git knows, but not what may differ."""
    import sync

    edit(repository, "b", "return 2 * x", "# twice\n    return x + x")
    edit(repository, "c", "\nSIZE = 1  #", "\nSIZE = 5  #")
    edit(repository, "a", "flag: int = 0", "flag: int = 7")
    edit(repository, "new", "return x\n", "return -x\n")  # a new script's own is not copied
    sync.main(repository)
    assert len(capsys.readouterr().out.splitlines()) == 3 + 3
    for flag, name in {7: "a", 1: "b", 2: "c", 3: "new"}.items():
        expected = SCRIPT.format(flag=flag, double=2, size=5)
        expected = expected.replace("return 2 * x", "# twice\n    return x + x")
        if name == "new":
            expected = expected.replace("return x\n", "return -x\n")
        assert (repository / f"{name}.py").read_text() == expected
    assert (repository / "own.py").read_text() == SCRIPT.format(flag=4, double=2, size=1)
    assert (repository / "without.py").read_text() == "X = 1\n"
    sync.main(repository)
    assert capsys.readouterr().out == ""


def test_sync_refuses_two_changes_of_one_definition(repository):
    import sync

    edit(repository, "a", "return 2 * x", "return x * 2")
    edit(repository, "b", "return 2 * x", "return x + x")
    before = {path: path.read_text() for path in repository.glob("*.py")}
    with pytest.raises(SystemExit, match="double has changed in a.py and b.py"):
        sync.main(repository)
    assert before == {path: path.read_text() for path in repository.glob("*.py")}
