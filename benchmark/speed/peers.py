"""The programs whose speeds are compared: their command lines, and the workers that run the peers.

python -m benchmark.speed.peers PROGRAM SCRIPT ENV_ID STEPS SEED prints a worker's marks as JSON.
What this file imports at its top counts in the start-up of the peers: the standard library only.
"""

import json
import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
FULL_STEPS = 1_000_000


@dataclass(frozen=True)
class Task:
    """How a script is measured."""

    env_id: str
    rollout: int  # steps of an iteration, of all environments together: the script's default
    threads: int
    steps: int  # of a run
    least_iterations: int = 2  # of a run, to have a steady state
    atari: bool = False  # the environment alone is the emulator
    amp: bool = False  # the script has --amp
    flags: tuple = ()


# Those that this process may use: taskset may leave it fewer than there are
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
REPLAY_FLAGS = (
    "--random-steps=100",
    "--learning-starts=100",
    f"--eval-interval={10**9}",
    f"--num-threads={CORES}",
)
TASKS = {
    "ppo_continuous_action": Task("HalfCheetah-v5", rollout=2048, threads=1, steps=61440),
    "ppo_atari": Task(
        "BreakoutNoFrameskip-v4", 1024, threads=CORES, steps=10240, atari=True, amp=True
    ),
    "ppo_atari_vector": Task(
        "BreakoutNoFrameskip-v4", 1024, threads=CORES, steps=10240, atari=True, amp=True
    ),
    "ppo_atari_lstm": Task(
        "BreakoutNoFrameskip-v4", 1024, threads=CORES, steps=8192, atari=True, amp=True
    ),
    # These and Stable-Baselines3 learn after their 100th step, so that the first iteration is none
    **{
        f"{name}_continuous_action": Task(
            "HalfCheetah-v5", 100, threads=CORES, steps=3000, least_iterations=3, flags=REPLAY_FLAGS
        )
        for name in ("ddpg", "td3", "sac")
    },
}


@dataclass(frozen=True)
class Work:
    """What each program of a round has to do."""

    script: str
    env_id: str
    steps: int
    seed: int

    @property
    def task(self):
        return TASKS[self.script]


@dataclass(frozen=True)
class Program:
    """A program: its name in tables, and the precision of its arithmetic ("" if it has none)."""

    title: str
    precision: str


# In the order of a round; those of --other follow
PROGRAMS = {
    "plainrl": Program("PlainRL", "float32"),
    "plainrl --amp": Program("PlainRL, bfloat16", "bfloat16"),
    "sb3": Program("Stable-Baselines3", "float32"),
    "env": Program("environment alone", ""),
    "arithmetic": Program("arithmetic alone", "float32"),
}
OURS = ("plainrl", "plainrl --amp")
PEER = "sb3"
BOUNDS = ("env", "arithmetic")


def command_of(program, work):
    """The command line (list of str) that runs a program of PROGRAMS."""
    if program in WORKERS:
        words = [program, work.script, work.env_id, str(work.steps), str(work.seed)]
        return [sys.executable, "-m", "benchmark.speed.peers", *words]
    words = ["--run-name", "speed", "--no-cuda", "--eval-episodes", "1"]
    words += ["--env-id", work.env_id, "--seed", str(work.seed)]
    words += ["--total-timesteps", str(work.steps), *work.task.flags]
    if program == "plainrl --amp":
        words.append("--amp")
    return [sys.executable, str(ROOT / f"{work.script}.py"), *words]


def work_sb3(work):
    """Trains SB3's algorithm with the script's default hyper-parameters -> marks.

    Marks are [(environment steps done, Unix time, s)], one at the end of each iteration.
    """
    import torch

    marks = []

    def timed(algorithm):
        class Timed(algorithm):
            def train(self, *args, **kwargs):
                super().train(*args, **kwargs)
                # Off-policy algorithms train at every step, PPO at the end of a rollout
                if self.num_timesteps % work.task.rollout == 0:
                    marks.append((self.num_timesteps, time.time()))

        return Timed

    torch.set_num_threads(work.task.threads)
    model = SB3_MODELS[work.script](work, timed)
    model.learn(work.steps)
    return marks


# Each makes the peer of a script: the same algorithm, networks and wrappers, with the values of the
# script's Args. timed: wraps SB3's class so that it notes the time of each iteration.


def sb3_ppo_continuous_action(work, timed):
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    return timed(PPO)(
        "MlpPolicy",
        VecNormalize(make_vec_env(work.env_id, seed=work.seed), gamma=0.99),
        learning_rate=lambda left: 3e-4 * left,
        n_steps=2048,
        batch_size=64,
        n_epochs=10,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_range_vf=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
            "ortho_init": True,
            "log_std_init": 0.0,
            "optimizer_kwargs": {"eps": 1e-5},
        },
        seed=work.seed,
        device="cpu",
    )


def sb3_ppo_atari(work, timed):
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecFrameStack

    envs = VecFrameStack(sb3_atari_envs(work), 4)
    return timed(PPO)("CnnPolicy", envs, **sb3_atari_settings(work))


def sb3_ppo_atari_lstm(work, timed):
    from sb3_contrib import RecurrentPPO

    # One LSTM for policy and value, as in the script
    lstm = {"lstm_hidden_size": 128, "shared_lstm": True, "enable_critic_lstm": False}
    settings = sb3_atari_settings(work)
    settings["policy_kwargs"] |= lstm
    return timed(RecurrentPPO)("CnnLstmPolicy", sb3_atari_envs(work), **settings)


def sb3_atari_envs(work):
    import ale_py  # noqa: F401, registers the games
    from stable_baselines3.common.env_util import make_atari_env

    return make_atari_env(work.env_id, n_envs=8, seed=work.seed)


def sb3_atari_settings(work):
    return {
        "learning_rate": lambda left: 2.5e-4 * left,
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 4,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "clip_range": 0.1,
        "clip_range_vf": 0.1,
        "ent_coef": 0.01,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "policy_kwargs": {"optimizer_kwargs": {"eps": 1e-5}},
        "seed": work.seed,
        "device": "cpu",
    }


def sb3_ddpg_continuous_action(work, timed):
    from stable_baselines3 import DDPG

    return timed(DDPG)("MlpPolicy", **sb3_replay_settings(work), action_noise=sb3_noise(work))


def sb3_td3_continuous_action(work, timed):
    from stable_baselines3 import TD3

    settings = sb3_replay_settings(work)
    settings |= {"policy_delay": 2, "target_policy_noise": 0.2, "target_noise_clip": 0.5}
    return timed(TD3)("MlpPolicy", **settings, action_noise=sb3_noise(work))


def sb3_sac_continuous_action(work, timed):
    from stable_baselines3 import SAC

    settings = {"ent_coef": "auto", "target_entropy": "auto", "target_update_interval": 1}
    return timed(SAC)("MlpPolicy", **sb3_replay_settings(work), **settings)


def sb3_replay_settings(work):
    from stable_baselines3.common.env_util import make_vec_env

    return {
        "env": make_vec_env(work.env_id, seed=work.seed),
        "learning_rate": 3e-4,
        "buffer_size": 1_000_000,
        "batch_size": 256,
        "gamma": 0.99,
        "tau": 0.005,
        "learning_starts": 100,
        "train_freq": 1,
        "gradient_steps": 1,
        "policy_kwargs": {"net_arch": [256, 256]},
        "seed": work.seed,
        "device": "cpu",
    }


def sb3_noise(work):
    """The noise of the actions played: normal, with a standard deviation of 0.1."""
    import gymnasium as gym
    import numpy as np
    from stable_baselines3.common.noise import NormalActionNoise

    (num_actions,) = gym.make(work.env_id).action_space.shape
    return NormalActionNoise(np.zeros(num_actions), np.full(num_actions, 0.1))


SB3_MODELS = {
    "ppo_continuous_action": sb3_ppo_continuous_action,
    "ppo_atari": sb3_ppo_atari,
    "ppo_atari_vector": sb3_ppo_atari,
    "ppo_atari_lstm": sb3_ppo_atari_lstm,
    "ddpg_continuous_action": sb3_ddpg_continuous_action,
    "td3_continuous_action": sb3_td3_continuous_action,
    "sac_continuous_action": sb3_sac_continuous_action,
}


def work_env(work):
    """Steps one environment with random actions, which are drawn beforehand -> marks.

    For Atari, it is the emulator alone, with four frames a step, whose screen nobody reads.
    """
    import gymnasium as gym
    import numpy as np

    rng = np.random.default_rng(work.seed)
    if work.task.atari:
        return step_emulator(work, rng)
    env = gym.make(work.env_id, disable_env_checker=True)
    space = env.action_space
    actions = rng.standard_normal((work.steps, *space.shape)).clip(space.low, space.high)
    actions = actions.astype(space.dtype)
    env.reset(seed=work.seed)
    start = time.time()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return [(0, start), (work.steps, time.time())]


def step_emulator(work, rng):
    """What work_env does for Atari -> marks. rng: numpy's generator of the actions."""
    import ale_py  # noqa: F401, registers the games
    import gymnasium as gym

    env = gym.make(work.env_id, frameskip=1, disable_env_checker=True).unwrapped
    env.reset(seed=work.seed)
    ale = env.ale
    actions = [env._action_set[i] for i in rng.integers(env.action_space.n, size=work.steps)]
    start = time.time()
    for action in actions:
        for _ in range(4):
            ale.act(action)
        if ale.game_over():
            ale.reset_game()
    return [(0, start), (work.steps, time.time())]


def work_arithmetic(work):
    """Marks as if a script's floating-point operations were all there is to do.

    They take place at the rate that this machine reaches for a product of two matrices of
    1024 x 1024. What the script leaves to numpy isn't counted, nor are an LSTM's own products,
    which PyTorch's counter doesn't know: the bound is loose by those.
    """
    seconds = flops_per_step(work) * seconds_per_flop(work.task.threads)
    return [(0, 0.0), (work.steps, work.steps * seconds)]


def flops_per_step(work):
    """Floating-point operations per environment step in a script's second iteration, float."""
    import torch.utils.tensorboard
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    last = 2 * work.task.rollout

    class Counter:
        """A SummaryWriter that counts, and ends the script after two iterations."""

        def __init__(self, folder, purge_step):
            pass

        def add_scalar(self, tag, value, step):
            if tag != "charts/SPS":
                return
            counts.append((step, flops.get_total_flops()))
            if step >= last:
                sys.exit()

        def flush(self):
            pass

    torch.utils.tensorboard.SummaryWriter = Counter
    two_iterations = Work(work.script, work.env_id, last, work.seed)
    _, path, *words = command_of("plainrl", two_iterations)
    sys.argv = [path, *words, "--no-compile"]  # what is compiled isn't counted
    with FlopCounterMode(display=False) as flops:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    first_step, before = counts[0]
    last_step, after = counts[-1]
    return (after - before) / (last_step - first_step)


def seconds_per_flop(threads):
    """Seconds per floating-point operation in a product of matrices: the median of 30 products."""
    import torch

    torch.set_num_threads(threads)
    matrix = torch.randn(1024, 1024)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    return median(times) / (2 * 1024**3)


WORKERS = {"sb3": work_sb3, "env": work_env, "arithmetic": work_arithmetic}


if __name__ == "__main__":
    program, script, env_id, steps, seed = sys.argv[1:]
    print(json.dumps(WORKERS[program](Work(script, env_id, int(steps), int(seed)))))
