"""Where the time of ppo_atari_vector.py goes, by the number of games and of threads.

    python -m benchmark.speed.games --out games.csv

writes a CSV and, beside it, a PNG of the same name. Each row is a process of its own, which times
iterations: the games; the policy, which plays and then predicts values; and an update with random
advantages. Threads are those of the games and of PyTorch. The first iteration, which compiles,
doesn't count, nor does what else an iteration does.
"""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import matplotlib
import pandas as pd
import tyro
from matplotlib.figure import Figure

from benchmark.report import figures
from benchmark.speed.__main__ import check_output, refuse
from benchmark.speed.peers import ROOT

DPI = 110
NUM_STEPS = 128  # of each game in a rollout: the default of the script
PARTS = ("games", "policy", "update")
KEYS = ("env_id", "amp", "threads", "games")


@dataclass
class Args:
    out: Path
    """CSV to write; what it holds already isn't measured again"""
    games: tuple[int, ...] = (8, 16, 32, 64, 128)
    """numbers of games"""
    threads: tuple[int, ...] = tuple(sorted({1, os.cpu_count()}))
    """numbers of threads"""
    amp: tuple[bool, ...] = (False, True)
    """without and with --amp"""
    env_id: str = "BreakoutNoFrameskip-v4"
    """the game"""
    seconds: float = 10.0
    """for which a process goes on timing iterations, two or more"""


class Clock:
    """Adds up the seconds that calls of a function take."""

    def __init__(self, function):
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args):
        start = time.perf_counter()
        result = self.function(*args)
        self.seconds += time.perf_counter() - start
        return result


def work(env_id, amp, threads, num_envs, seconds):
    """Times iterations of the script -> their medians in seconds, {part: seconds}."""
    import torch

    import ppo_atari_vector as ppo

    torch.manual_seed(1)
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    args = ppo.Args(env_id=env_id, num_envs=num_envs, num_threads=threads, amp=amp)
    envs = ppo.AtariVecEnv(env_id, num_envs, 1, threads)
    agent = ppo.Agent(envs.action_space.n, amp)
    optimizer = ppo.Adam(agent.parameters())
    step_minibatches = ppo.compile_or_not(ppo.update_minibatches, args, device)
    player = ppo.Player(agent, args, device)
    coefs = {"lr": args.learning_rate}
    coefs |= {name: getattr(args, name) for name in ("clip_coef", "ent_coef", "vf_coef")}
    coefs["max_grad_norm"] = args.max_grad_norm
    coefs = {name: torch.tensor(value) for name, value in coefs.items()}
    envs.step = Clock(envs.step)
    act = Clock(player.policy())
    player.policy = lambda: act
    predict = Clock(ppo.predict)
    update = Clock(ppo.update)
    clocks = (envs.step, act, predict, update)

    rows = []
    start = math.inf
    while len(rows) < 3 or time.perf_counter() < start + seconds:
        for clock in clocks:
            clock.seconds = 0.0
        obs, actions, *_, episodes = ppo.rollout(player, envs, args.num_steps)
        batch, _, _ = predict(agent, obs, actions, envs.obs, episodes, device)
        batch["advantages"] = torch.randn(len(batch["values"]))
        batch["returns"] = batch["values"] + batch["advantages"]
        update(step_minibatches, optimizer, agent, batch, coefs, args)
        rows.append((envs.step.seconds, act.seconds + predict.seconds, update.seconds))
        if len(rows) == 1:
            start = time.perf_counter()
    envs.close()
    return {part: median(found) for part, *found in zip(PARTS, *rows[1:])}


def read_rows(path):
    """The rows of a CSV that there may be -> [dict]. Ends the program if it isn't such a CSV."""
    check_output(path)
    if path.stat().st_size == 0:
        return []
    try:
        rows = pd.read_csv(path)
    except ValueError:
        rows = pd.DataFrame()
    if not {*KEYS} <= {*rows.columns}:
        refuse(f"{path} isn't a CSV of this program: give another file")
    return rows.to_dict("records")


def measure(args):
    """Measures what the CSV doesn't hold yet and writes it after each row -> DataFrame."""
    rows = read_rows(args.out)
    measured = {tuple(row[key] for key in KEYS) for row in rows}
    for cell in product([args.env_id], args.amp, args.threads, args.games):
        if cell in measured:
            continue
        command = [sys.executable, "-m", "benchmark.speed.games", "work"]
        command.append(json.dumps([*cell, args.seconds]))
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
        if done.returncode != 0:  # it has said why
            sys.exit(done.returncode)
        seconds = json.loads(done.stdout.splitlines()[-1])
        row = dict(zip(KEYS, cell))
        row["steps_per_second"] = round(NUM_STEPS * row["games"] / sum(seconds.values()), 1)
        row |= {f"{part}_seconds": round(seconds[part], 4) for part in PARTS}
        rows.append(row)
        pd.DataFrame(rows).to_csv(args.out, index=False)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return pd.DataFrame(rows)


def draw(rows, path):
    """Draws the rows into a PNG."""
    path.write_bytes(figures.png(make_figure(rows), DPI))


def make_figure(rows):
    """A panel for each precision and number of threads: a step's time, part by part -> Figure."""
    panels = list(rows.groupby(["amp", "threads"]))
    with matplotlib.rc_context(figures.SETTINGS):
        figure = Figure(figsize=(2.4 * len(panels) + 0.5, 3.0), layout="constrained")
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, ((amp, threads), found) in zip(all_axes, panels):
            found = found.sort_values("games")
            labels = found["games"].astype(str)
            bottom = 0.0
            for part, colour in zip(PARTS, figures.COLORS):
                heights = 1e3 * found[f"{part}_seconds"] / (NUM_STEPS * found["games"])
                axes.bar(labels, heights, bottom=bottom, color=colour, label=part)
                bottom += heights
            for x, (top, speed) in enumerate(zip(bottom, found["steps_per_second"])):
                axes.annotate(f"{speed:.0f}", (x, top), ha="center", va="bottom", fontsize=8)
            precision = "bfloat16" if amp else "float32"
            axes.set_title(f"{precision}, threads: {threads}")
            axes.set_xlabel("games")
            axes.grid(axis="x", visible=False)
        all_axes[0].set_ylabel("ms per step (above the bars: steps/s)")
        all_axes[-1].legend()
    return figure


def main():
    if sys.argv[1:2] == ["work"]:
        print(json.dumps(work(*json.loads(sys.argv[2]))))
        return
    args = tyro.cli(Args, prog="python -m benchmark.speed.games", description=__doc__)
    if min((*args.games, *args.threads), default=0) < 1:
        refuse("--games and --threads must be numbers above 0")
    draw(measure(args), args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
