"""The documentation's table of what a variant takes: the sizes of the diffs between neighbours."""

import re
import subprocess

from benchmark.report.tables import Table

PAIRS = """
vpg a2c
a2c ppo
ppo ppo_mask
ppo ppo_penalty
ppo ppo_pettingzoo
ppo ppo_lstm
ppo ppo_continuous_action
ppo ppo_atari
ppo_continuous_action ppo_continuous_action_ray
ppo_continuous_action ppo_atari
ppo_atari ppo_atari_vector
ppo_atari_vector ppo_atari_multigpu
ppo_atari ppo_atari_lstm
ppo_lstm ppo_atari_lstm
ppo_continuous_action ddpg_continuous_action
ddpg_continuous_action td3_continuous_action
td3_continuous_action sac_continuous_action
ddpg_continuous_action ddpg_lstm
ddpg_continuous_action dqn
ppo dqn
dqn dqn_atari
dqn_atari c51_atari
dqn pqn
ppo pqn
ppo_atari_vector pqn_atari
pqn pqn_atari
"""
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
BANNER = re.compile(r"# -{98}\n# (\w+)")


def make_table(folder):
    """The table of the scripts in a folder."""
    rows = []
    for pair in PAIRS.strip().splitlines():
        names = [f"{name}.py" for name in pair.split()]
        counts = count(*(folder / name for name in names))
        rows.append([f"`{name}`" for name in names] + [*map(str, (sum(counts), *counts))])
    header = ("from", "to", "all", "algorithm", "environments", "docstring and flags")
    return Table(header, rows, "llrrrr")


def count(old, new):
    """Lines that git removes and adds: of the algorithm, of the environments, of what is before."""
    command = ["git", "diff", "--no-index", "--unified=0", "--diff-algorithm=default"]
    diff = subprocess.run([*command, old, new], capture_output=True, text=True).stdout
    old_sections = sections(old)
    new_sections = sections(new)
    found = []
    for old_line, old_length, new_line, new_length in HUNK.findall(diff):
        found += old_sections[int(old_line) - 1 :][: int(old_length or 1)]
        found += new_sections[int(new_line) - 1 :][: int(new_length or 1)]
    return [found.count(name) for name in ("algorithm", "environments", "before")]


def sections(path):
    """The section of each line of a script."""
    found = []
    section = "before"
    for text in re.split(r"(?m)^(?=# -{98}\n# )", path.read_text()):
        banner = BANNER.match(text)
        if banner and banner[1] == "Environments":
            section = "environments"
        elif section == "environments":
            section = "algorithm"
        found += [section] * text.count("\n")
    return found
