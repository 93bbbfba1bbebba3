"""What one script defines under a name, each other script that has the name defines in the same text."""

import ast
import re
import shutil
import subprocess
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
# Definitions that differ between scripts, and flags that differ in default or help text: how many texts there are of
# each, and the reason; statements of the main block go by their first line. Args is compared flag by flag: a script has
# those that its algorithm takes (compile: where something is compiled)
DIFFERENT = {
    "METRICS": (3, "what is learned"),
    "Args.checkpoint_interval": (3, "short iterations; steps where there are no iterations"),
    "parse_args": (6, "sizes that must divide, flags that may be 0 or negative, or change on resume"),
    "make_env": (3, "kinds of environments"),
    "FRAMES": (2, "a stack of frames, or one"),
    "Envs": (4, "what the vector normalises, stacks and counts"),
    "Envs.COUNTERS": (3, "what is counted"),
    "Envs.__init__": (4, "what is normalised, stacked and counted"),
    "Envs.reset_env": (4, "Atari's no-ops, FIRE and lives"),
    "Envs.step_env": (2, "who says that an episode ended"),
    "Envs.step": (5, "VecNormalize, signs of the rewards and lives, statistics alone, nothing, or some of them"),
    "Envs.state": (3, "an emulator is saved, other environments are replayed"),
    "Envs.load_state": (4, "an emulator is saved, other environments are replayed; what is normalised"),
    "Agent": (6, "the network"),
    "Agent.__init__": (6, "the network"),
    "Agent.forward": (5, "normal, categorical or several categorical distributions, with a memory or without"),
    "Agent.step": (2, "a memory to carry, or none"),
    "Agent.heads": (3, "pixels, their blocks of 4 x 4, or vectors and masks"),
    "Envs.see": (2, "a stack of frames, or one"),
    "ppo_loss": (3, "the penalty in the place of clipping; what the agent takes"),
    "rollout": (6, "the actor alone, all outputs of a shared trunk, whole episodes, or a memory to carry"),
    "evaluate": (6, "statistics to bring, probabilities to draw, a progress bar not to tear, a memory to carry"),
    "Args.env_id": (3, "default"),
    "Args.total_timesteps": (3, "default"),
    "Args.learning_rate": (4, "default, and whose rate it is"),
    "Args.num_envs": (3, "default"),
    "Args.num_steps": (3, "default"),
    "Args.num_minibatches": (2, "default"),
    "Args.update_epochs": (2, "default"),
    "Args.clip_coef": (2, "default"),
    "Args.gae_lambda": (2, "default"),
    "Args.norm_adv": (3, "default and help text: no minibatches"),
    "Args.ent_coef": (2, "default"),
    "Args.max_grad_norm": (2, "type, default and help text: two gradients, not clipped as a rule"),
    'progress = {"iteration": 0, "wall_seconds": 0.0, "recent_returns": [], "wandb_id": None, "log_sizes": {},': (
        2, "steps are no multiple of iterations; adapted coefficients"),
    "if checkpoint:": (4, "statistics, a memory, a replay buffer"),
    "if args.evaluate:": (3, "statistics to bring"),
    "if stop or iteration % args.checkpoint_interval == 0:": (3, "adapted coefficients or a memory in the checkpoint"),
    "with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):  # around all steps: weights convert once": (
        2, "a memory to carry, or none"),
    "with torch.no_grad():  # the weights were frozen, so one pass serves the whole rollout": (
        3, "what the algorithm needs of the networks"),
    "if stop_signals:": (3, "statistics to bring to the evaluation"),
}
# How many statements of its main block are also in five other scripts or more
COMMON = {"a2c": 50, "ddpg_continuous_action": 27, "ppo": 48, "ppo_atari": 49, "ppo_atari_lstm": 49,
          "ppo_continuous_action": 49, "ppo_lstm": 50, "vpg": 37}


def definitions(text):
    """Qualified name -> source of every function, class, method, flag and constant of a script; of a class that is its
    head (decorators, bases, docstring), of a flag its line with the help text. And first line -> source of every
    statement of the main block and of its loop."""
    lines, found = text.splitlines(), {}

    def add(node, prefix):
        name = node.target.id if isinstance(node, ast.AnnAssign) else getattr(node, "name", None) or node.targets[0].id
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        inner = [n for n in node.body if isinstance(n, KINDS)] if isinstance(node, ast.ClassDef) else []
        last = inner[0].lineno - 1 if inner else node.end_lineno
        found[prefix + name] = "\n".join(lines[first - 1 : last]).rstrip()
        for n in inner:
            add(n, f"{prefix}{name}.")

    for node in ast.parse(text).body:
        if isinstance(node, KINDS):
            add(node, "")
        elif isinstance(node, ast.If):
            for n in [n for m in node.body for n in (m.body if isinstance(m, ast.While) else [m])]:
                source = "\n".join(lines[n.lineno - 1 : n.end_lineno])
                found[source.partition("\n")[0].strip()] = source
    return found


KINDS = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def without_default(flag):
    """A flag's line as its name and type, and its help text."""
    return flag.partition(" = ")[0], flag.partition("  # ")[2]


@pytest.mark.parametrize("a, b", list(combinations(SCRIPTS, 2)), ids=lambda path: path.stem)
def test_shared_definitions_are_the_same_text(a, b):
    one, other = definitions(a.read_text()), definitions(b.read_text())
    shared = one.keys() & other.keys()
    assert {"Args.seed", "Args", "save_checkpoint", "fail"} <= shared
    differing = {name for name in shared if one[name] != other[name]}
    assert differing <= DIFFERENT.keys(), f"{a.name} and {b.name} differ in {sorted(differing - DIFFERENT.keys())}"
    for name in differing:
        if name.startswith("Args.") and DIFFERENT[name][1] == "default" and name != "Args.env_id":
            assert without_default(one[name]) == without_default(other[name]), f"{name}: name, type or help text"


@pytest.mark.parametrize("name", DIFFERENT)
def test_no_more_texts_than_the_list_says(name):
    """Two of three scripts that share a text must not drift apart because the third one's differs."""
    texts = [definitions(path.read_text()) for path in SCRIPTS]
    assert len({text[name] for text in texts if name in text}) == DIFFERENT[name][0] > 1


def test_no_script_has_lost_a_statement_that_most_have():
    """So that one script's tests of what the main blocks have in common serve for all."""
    mains = {path.stem: {name for name in definitions(path.read_text()) if not name.replace(".", "").isidentifier()}
             for path in SCRIPTS}
    numbers = Counter(name for names in mains.values() for name in names)
    assert {script: sum(numbers[name] > 5 for name in names) for script, names in mains.items()} == COMMON


@pytest.mark.parametrize("name", ["save_checkpoint", "Args.seed", "Envs.step", "METRICS", "fail"])
def test_one_character_less_is_a_difference(name):
    text = SCRIPTS[0].read_text()
    source = definitions(text)[name]
    assert text.count(source) == 1
    for position in range(len(source) - 12, len(source)):
        shorter = source[:position] + source[position + 1 :]
        try:
            changed = definitions(text.replace(source, shorter))
        except SyntaxError:
            continue
        assert changed.get(name) != source


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_docstring_names_a_neighbour_and_a_command(path):
    words = ast.get_docstring(ast.parse(path.read_text()))
    neighbours = re.search(r"To diff against (\S+?\.py)(?: or (\S+?\.py))?\.\n", words).groups()
    assert all(name is None or (ROOT / name).is_file() and name != path.name for name in neighbours)
    assert f"\n    python {path.name} " in words and re.search(r"https://|\d{4}", words)


def test_readme_has_the_lines_of_the_scripts():
    rows = dict(re.findall(r"\| \[`(\w+\.py)`\]\(\1\) \| (\d+) \|", (ROOT / "README.md").read_text()))
    assert rows == {path.name: str(len(path.read_text().splitlines())) for path in SCRIPTS}


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_readme_has_the_sizes_of_the_diffs():
    rows = re.findall(r"\| `git diff --no-index (\S+) (\S+)` \| (\d+) \| (\d+) \|", (ROOT / "README.md").read_text())
    assert [f"{one[:-3]} {other[:-3]}" for one, other, *_ in rows] == [
        "ppo_continuous_action ppo_atari", "ppo_atari ppo_atari_lstm", "ppo ppo_lstm",
        "ppo_continuous_action ddpg_continuous_action",
        "vpg a2c", "a2c ppo", "ppo ppo_continuous_action", "ppo ppo_atari"]
    for one, other, added, removed in rows:
        said = subprocess.run(["git", "diff", "--no-index", "--numstat", one, other], cwd=ROOT, capture_output=True,
                              text=True).stdout
        assert said.split()[:2] == [added, removed]


@pytest.mark.parametrize("page", ["README.md", "benchmark/results/README.md"])
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / page).read_text())
    assert len(links) > 5 and not [link for link in links if not ((ROOT / page).parent / link).exists()]
