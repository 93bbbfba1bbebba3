"""Scripts stand alone, so they repeat each other: what two of them repeat is the same text."""

import ast
import difflib
import re
import sys
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
PAIRS = list(combinations(SCRIPTS, 2))
RUN_BEGINS = "# Run: "
RUN_ENDS = "# End of Run. "

# Definitions that may differ: how many texts there are of each, and why
DIFFERENT = {
    "Args": (13, "the flags of the algorithm; its common flags are compared one by one"),
    "parse_args": (13, "what the algorithm's flags may be"),
    "make_env": (5, "kinds of spaces, and the wrappers for them"),
    "Episode": (2, "in Atari: a game, which has several lives"),
    "VecEnv": (3, "a game can end in a reset (Atari); only some environments are stepped (vpg)"),
    "Agent": (9, "the network"),
    "METRICS": (5, "what is learned"),
    "rollout": (8, "actions, what the network gives in a step, whole episodes, a memory"),
    "ppo_loss": (3, "a penalty in place of clipping (ppo); a memory"),
    "update": (7, "one step per rollout (a2c, vpg), or with a replay buffer"),
    "Learner": (2, "what has a target (sac: the actor has none)"),
    "evaluate": (10, "statistics or a memory to bring, actions, ALE's vector"),
    "compile_or_not": (2, "CUDA graphs (ppo_atari_vector)"),
}
# Definitions that two scripts must share: all, those that step their environments in Python, and
# those in which ALE steps a vector of games
SHARED = {"Run", "fail", "Args", "Episode", "evaluate"}
SHARED_IN_PYTHON = {"ReplayEnv", "RecordVideo", "VecEnv", "make_env"}
SHARED_IN_ALE = {"Games", "Film", "make_emulators", "STEPS_PER_SEED"}
# Flags that two scripts explain differently
DIFFERENT_FLAGS = {
    "env_id": "ids of games",
    "compile": "some compile nothing",
    "checkpoint_interval": "steps, where an iteration is a step",
    "eval_interval": "steps, where an iteration is a step; on by default with a replay buffer",
    "hidden_sizes": "of which networks",
    "learning_rate": "of which optimizer",
    "batch_size": "transitions or sequences",
    "norm_adv": "there may be no minibatches",
    "max_grad_norm": "two gradients, which are not clipped by default",
}


def source(text, node):
    """The lines of a definition, its decorators among them."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def definitions(text):
    """{name: source} of the functions, classes and constants of a script."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = source(text, node)
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = source(text, node)
    return found


def flags(text):
    """{name: (type, default, help)} of the flags of a script, in their order."""
    found = {}
    for line in definitions(text)["Args"].splitlines():
        flag = re.fullmatch(r"    (\w+): (.*?) = (.*)  # (.*)", line)
        if flag:
            name, *rest = flag.groups()
            found[name] = tuple(rest)
    return found


def run_section(text):
    """The fenced section that every script has."""
    assert text.count(RUN_BEGINS) == text.count(RUN_ENDS) == 1
    return text[text.index(RUN_BEGINS) : text.index(RUN_ENDS)]


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
    text = "A = 1\n\n@x\nclass B:\n    c: int = 2\n\n    def d(self):\n        return 3\n"
    assert definitions(text) == {"A": "A = 1", "B": text.partition("\n\n")[2].rstrip()}


@pytest.mark.parametrize("a, b", PAIRS, ids=lambda path: path.stem)
def test_definitions_of_one_name_are_one_text(a, b):
    one, other = definitions(a.read_text()), definitions(b.read_text())
    shared = one.keys() & other.keys()
    assert SHARED <= shared
    kinds = {path.stem.endswith("_vector") for path in (a, b)}
    assert (shared & SHARED_IN_PYTHON == SHARED_IN_PYTHON) == (kinds == {False})
    assert (shared & SHARED_IN_ALE == SHARED_IN_ALE) == (kinds == {True})
    differing = {name for name in shared if one[name] != other[name]}
    assert differing <= DIFFERENT.keys()


@pytest.mark.parametrize("name", DIFFERENT)
def test_there_are_no_more_texts_than_the_list_says(name):
    """So that two of three scripts do not drift apart because the third one differs."""
    texts = {definitions(path.read_text()).get(name) for path in SCRIPTS} - {None}
    assert len(texts) == DIFFERENT[name][0]


def test_run_section_is_the_same_everywhere():
    sections = {run_section(path.read_text()) for path in SCRIPTS}
    assert len(sections) == 1
    assert "class Run:" in sections.pop()


@pytest.mark.parametrize("a, b", PAIRS, ids=lambda path: path.stem)
def test_common_flags_have_one_order_type_and_help(a, b):
    one, other = flags(a.read_text()), flags(b.read_text())
    shared = [name for name in one if name in other]
    assert shared == [name for name in other if name in one]
    assert len(shared) > 15
    for name in shared:
        own, theirs = one[name], other[name]
        if name in DIFFERENT_FLAGS:
            continue
        assert (own[0], own[2]) == (theirs[0], theirs[2]), name
        if shared.index(name) < shared.index("env_id"):
            assert own == theirs, name


@pytest.mark.parametrize("name", DIFFERENT_FLAGS)
def test_no_flag_is_in_the_list_for_nothing(name):
    found = {flags(path.read_text()).get(name, (None, None, None)) for path in SCRIPTS}
    assert len({(kind, text) for kind, _, text in found if kind}) > 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_dependencies_have_the_pins_of_requirements(path):
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [pin(line) for line in lines if "==" in line and not line.startswith("#")]
    pins = [pin(line) for line in metadata(path.read_text())]
    assert not [found for found in pins if found not in wanted]
    complete = {
        name: [version for package, version in wanted if package == name] for name, _ in pins
    }
    assert all((name, version) in pins for name in complete for version in complete[name])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_dependencies_are_what_is_imported(path):
    """Third-party modules, by the packages that bring them; torch's logs need tensorboard."""
    packages = {"cv2": "opencv-python-headless", "ale_py": "ale-py"}
    modules = {"tensorboard"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    modules -= sys.stdlib_module_names
    names = {name for name, _ in map(pin, metadata(path.read_text()))}
    assert {packages.get(module, module) for module in modules} <= names
    assert not modules & {script.stem for script in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_docstring_names_neighbours_and_a_command(path):
    words = " ".join(ast.get_docstring(ast.parse(path.read_text())).split())
    neighbours = re.search(r"Diff it against (\S+\.py(?: or \S+\.py)*)\.", words)[1].split(" or ")
    assert all((ROOT / name).is_file() and name != path.name for name in neighbours)
    assert f" python {path.name} --env-id " in words


GAMES_IN_PYTHON = """
training_video_dir = None if args.evaluate else video_dir
envs = [make_env(args.env_id, training_video_dir, args.video_interval)]
envs += [make_env(args.env_id) for _ in range(args.num_envs - 1)]
envs = VecEnv(envs, args.seed)
atexit.register(envs.envs.clear)  # ale-py complains about games that outlive Python
envs.close()
"""
GAMES_IN_ALE = """
film = None
if video_dir and not args.evaluate:
film = Film(args.env_id, video_dir, args.video_interval)
envs = Games(args.env_id, args.num_envs, args.seed, args, film)
"""
# The lines in which the main block of a script differs from that of another one
MAIN_BLOCKS = {
    ("ppo_atari", "ppo_atari_vector"): (
        GAMES_IN_PYTHON
        + """
agent = Agent(envs.action_space.n, args.amp).to(device)
step_minibatches = compile_or_not(update_minibatches, args, device)
# With one autocast around the rollout, the weights are converted to bfloat16 only once
with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
agent, envs, args.num_steps
""",
        GAMES_IN_ALE
        + """
agent = Agent(envs.num_actions, args.amp).to(device)
step_minibatches = compile_or_not(update_minibatches, args, device, "update")
policy = Policy(agent, args, device)
if args.compile:
for tensor in (optimizer.params, *optimizer.buffers()):
torch._dynamo.mark_static_address(tensor)  # a CUDA graph may write to it in place
policy, envs, args.num_steps
""",
    ),
    ("ppo_atari_lstm", "ppo_atari_lstm_vector"): (
        GAMES_IN_PYTHON
        + """
agent = Agent(envs.action_space.n, args).to(device)
just_reset = torch.tensor([not env.actions for env in envs.envs])
_, bootstrap_values, _ = agent.step(bootstrap_obs, torch.stack(bootstrap_memory, 1))
""",
        GAMES_IN_ALE
        + """
agent = Agent(envs.num_actions, args).to(device)
just_reset = torch.tensor([not actions for actions in envs.actions])
_, bootstrap_values, _ = agent.step(bootstrap_obs[..., 3], torch.stack(bootstrap_memory, 1))
""",
    ),
    ("ddpg_continuous_action", "td3_continuous_action"): (
        """
compiled_update(agent, copy.deepcopy(learner), zeros, with_actor, coefs, args)
compiled_update(agent, learner, batch, with_actor, coefs, args)
""",
        """
policy_noise=args.policy_noise,
noise_clip=args.noise_clip,
# Not zeros["actions"]: for one tensor in two places it would be compiled once more
target_noise = torch.zeros(args.batch_size, action_dim, device=device)
copied = copy.deepcopy(learner)
compiled_update(agent, copied, zeros, target_noise, with_actor, coefs, args)
target_noise = torch.randn(args.batch_size, action_dim).to(device)
compiled_update(agent, learner, batch, target_noise, with_actor, coefs, args)
""",
    ),
    ("td3_continuous_action", "sac_continuous_action"): (
        """
noise = ExplorationNoise((args.num_envs, action_dim), args)
noise=noise,
noise.reset(just_reset)
policy_noise=args.policy_noise,
noise_clip=args.noise_clip,
variants = [True] if args.policy_frequency == 1 else [False, True]
# Not zeros["actions"]: for one tensor in two places it would be compiled once more
target_noise = torch.zeros(args.batch_size, action_dim, device=device)
for with_actor in variants:
copied = copy.deepcopy(learner)
compiled_update(agent, copied, zeros, target_noise, with_actor, coefs, args)
actions = agent.act(normalizer.normalize_obs(envs.obs))
progress = iteration / max(args.num_iterations - 1, 1)
actions = np.clip(actions + noise.sample(progress), -1.0, 1.0)
noise.reset(dones)
for number in range(updates_before, updates_after):
target_noise = torch.randn(args.batch_size, action_dim).to(device)
with_actor = number % args.policy_frequency == 0
compiled_update(agent, learner, batch, target_noise, with_actor, coefs, args)
""",
        """
target_entropy = args.target_entropy
if target_entropy is None:
target_entropy = -float(action_dim)
alpha_lr=args.alpha_learning_rate or args.learning_rate,
target_entropy=target_entropy,
noises = torch.zeros(2, *zeros["actions"].shape, device=device)
compiled_update(agent, copy.deepcopy(learner), zeros, noises, coefs, args)
actions = actions.astype(np.float32)  # as the actor's: a resume needs one dtype
noise = np.random.standard_normal((args.num_envs, action_dim))
actions = agent.act(normalizer.normalize_obs(envs.obs), noise)
for _ in range(updates_before, updates_after):
noises = torch.randn(2, args.batch_size, action_dim).to(device)
compiled_update(agent, learner, batch, noises, coefs, args)
""",
    ),
    ("ddpg_continuous_action", "ddpg_lstm"): (
        """
agent = Agent(obs_dim, action_dim, args.hidden_sizes).to(device)
compiled_update = compile_or_not(update, args, device)
# Compile before the first step: on zeros, with copies of what changes
zeros = {
name: torch.zeros(args.batch_size, *shape, device=device)
for name, (_, shape) in columns.items()
}
variants = [True] if args.policy_frequency == 1 else [False, True]
for with_actor in variants:
compiled_update(agent, copy.deepcopy(learner), zeros, with_actor, coefs, args)
actions = agent.act(normalizer.normalize_obs(envs.obs))
batch = sample_batch(replay, normalizer, args, device)
compiled_update(agent, learner, batch, with_actor, coefs, args)
""",
        """
agent = Agent(obs_dim, action_dim, args).to(device)
memory = ActorMemory(agent, args.num_envs)
"steps": (np.int32, ()),  # of the episode, before this one
memory=memory,
memory.reset(just_reset)
# Also before random steps: the memory follows all observations
actions = agent.act(normalizer.normalize_obs(envs.obs), memory)
steps=memory.steps,
memory.follow(actions, dones)
batch = sample_sequences(replay, normalizer, args, device)
update(agent, learner, batch, with_actor, coefs, args)
""",
    ),
}


@pytest.mark.parametrize("names", MAIN_BLOCKS, ids=" to ".join)
def test_main_blocks_of_one_kind_differ_in_few_lines(names):
    """So what the tests find in one of them is true of the other."""
    blocks = []
    for name in names:
        text = (ROOT / f"{name}.py").read_text()
        block = text[text.index('if __name__ == "__main__":') :]
        blocks.append([line.strip() for line in block.splitlines()])
    changes = [line for line in difflib.ndiff(*blocks) if line[0] in "-+"]
    for sign, expected in zip(("- ", "+ "), MAIN_BLOCKS[names]):
        found = [line.removeprefix(sign) for line in changes if line.startswith(sign)]
        assert sorted(found) == sorted(line for line in expected.splitlines() if line)
